"""sweep.py, whose runs are forked from it, see forks.py. compare.py is not run, but named."""

import os
import subprocess
import sys

from forks import HOME, Forked, exec_script


class Popen(subprocess.Popen):
    """A forked run of train.py, or a different command."""

    def __new__(cls, command, stdout=None, env=None, preexec_fn=None, **options):
        script = next((place for place, word in enumerate(command) if word.endswith("train.py")), None)
        if script is None:
            return super().__new__(cls)

        def prepare():
            preexec_fn()
            if command[0] == "taskset":
                os.sched_setaffinity(0, map(int, command[2].split(",")))
            for descriptor in (1, 2):
                os.dup2(stdout.fileno(), descriptor)

        return Forked(command[script:], env, prepare)

    def __init__(self, command, **options):
        if command[1].endswith("compare.py"):
            print("would run", *command[1:], flush=True)
            command = ["true"]
        super().__init__(command, **options)


subprocess.Popen = Popen
sys.path[:0] = [str(HOME)]
sys.argv[0] = str(HOME / "sweep.py")
exec_script(sys.argv[0])
