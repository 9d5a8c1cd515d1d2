"""
Everything that train.py, sample.py, bench.py and export.py share. Nothing here imports a top-level file.
"""
