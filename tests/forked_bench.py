"""bench.py, whose launches of train.py are forked from it, see forks.py."""

import os
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace

from forks import HOME, Forked, exec_script

sys.path[:0] = [str(HOME)]

from isogpt.speed import launches


def forked_launch(command, stdout, **options):
    """In place of subprocess.run in launches.py: returns the exit status and what was written to stderr."""
    _, train_py, *arguments = command
    launcher = [word for word in arguments if word.startswith("--nproc=") and word != "--nproc=0"]
    others = [word for word in arguments if not word.startswith("--nproc=")]
    script = HOME / "tests/forked_torchrun.py" if launcher else train_py
    with tempfile.TemporaryFile("w+") as errors:

        def prepare():
            os.dup2(errors.fileno(), 2)
            if stdout == subprocess.DEVNULL:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

        launch = Forked([script, *launcher, *others], dict(os.environ), prepare)
        try:
            code = launch.wait(300)
        finally:
            launch.send_signal(signal.SIGKILL)  # after an error; nothing if it has ended
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, stderr=errors.read())


# bench.py starts other programs too, with the module itself
launches.subprocess = SimpleNamespace(DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE, run=forked_launch)
sys.argv[0] = str(HOME / "bench.py")
exec_script(sys.argv[0])
