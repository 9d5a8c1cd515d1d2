"""
Run a script with a pretended GPU:

    python tests/pretend_cuda/run.py train.py --dataset=tiny --compile=False --dtype=tf32 ...
"""

import sys
import types
from pathlib import Path

import harness


def main() -> None:
    """Run the script as __main__, whose variables say which step of train.py it is."""
    script = Path(sys.argv[1]).resolve()
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(script.parent))
    harness.install()
    space = types.ModuleType("__main__")
    space.__file__ = str(script)
    sys.modules["__main__"] = space
    exec(compile(script.read_text(), str(script), "exec"), vars(space))


main()
