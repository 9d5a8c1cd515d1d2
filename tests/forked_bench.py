"""bench.py, whose launches of train.py are forked from it, see forks.py."""

import os
import subprocess
import sys
import tempfile

from forks import HOME, Forked, exec_script

sys.path[:0] = [str(HOME)]

from isogpt.speed import launches


def forked_launch(command, env, stdout, **options):
    """In place of subprocess.run in launches.py: returns the exit status and what was written to stderr."""
    _, train_py, *arguments = command
    launcher = [word for word in arguments if word.startswith("--nproc=") and word != "--nproc=0"]
    others = [word for word in arguments if not word.startswith("--nproc=")]
    script = HOME / "tests/forked_torchrun.py" if launcher else train_py
    with tempfile.TemporaryFile("w+") as errors, open(os.devnull, "w") as nowhere:

        def prepare():
            os.dup2(errors.fileno(), 2)
            if stdout == subprocess.DEVNULL:
                os.dup2(nowhere.fileno(), 1)

        code = Forked([script, *launcher, *others], env, prepare).wait(300)
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, stderr=errors.read())


class ForkedLaunches:
    """In place of the module subprocess in launches.py."""

    DEVNULL, PIPE, run = subprocess.DEVNULL, subprocess.PIPE, staticmethod(forked_launch)


launches.subprocess = ForkedLaunches
sys.argv[0] = str(HOME / "bench.py")
exec_script(sys.argv[0])
