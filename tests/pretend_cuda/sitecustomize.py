"""
With PRETEND_CUDA=1 and this folder in PYTHONPATH, every Python process has a pretended GPU, see README.md.
With PRETEND_CUDA=loaded a process is only made ready for one: processes that are forked from it can call
harness.install.
"""

import os

if os.environ.get("PRETEND_CUDA"):
    import harness

    if os.environ["PRETEND_CUDA"] != "loaded":
        harness.install()
