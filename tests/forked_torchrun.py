"""
torchrun with these arguments, whose workers are forked from it, see forks.py; with --nproc=N, train.py, which
becomes torchrun.
"""

import os
import sys

from forks import HOME, Forked, exec_script
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def forked_worker(handler, command, env):
    """In place of SubprocessHandler._popen."""
    script = next(place for place, word in enumerate(command) if word.endswith(".py"))
    return Forked(command[script:], env)


def become_torchrun(program, words):
    """In place of os.execv: `python -c ...` in this process."""
    _, option, code, *arguments = words
    assert option == "-c"
    sys.argv = [option, *arguments]
    exec(code, {"__name__": "__main__"})
    sys.exit()


SubprocessHandler._popen, os.execv = forked_worker, become_torchrun
if sys.argv[1].startswith("--nproc="):
    sys.argv[0] = str(HOME / "train.py")
    sys.path[:0] = [str(HOME)]
    exec_script(sys.argv[0])
else:
    run.main()
