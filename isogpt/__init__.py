"""Code that train.py, sample.py, bench.py and export.py share; nothing here imports a top-level file."""
