"""sweep.py, whose runs are forked from it, see forks.py. compare.py is not run, but named."""

import os
import subprocess
import sys
from pathlib import Path

from forks import HOME, Forked, exec_script

sys.path[:0] = [str(HOME)]

from isogpt.lab import queue
from isogpt.launch.launchers import environment_without_launcher


def forked_run(train_py, run, slot, log):
    """In place of queue.start_process."""
    sweep = os.getpid()

    def prepare():
        queue.enter(slot, sweep)
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)

    return Forked([train_py, *run.arguments], environment_without_launcher(), prepare)


def run_or_name(command, **options):
    """Run a command; of compare.py, only print it."""
    if Path(command[1]).name != "compare.py":
        return run(command, **options)
    print("would run", " ".join(map(str, command[1:])), flush=True)


run = subprocess.run
queue.start_process, subprocess.run = forked_run, run_or_name
sys.argv[0] = str(HOME / "sweep.py")
exec_script(sys.argv[0])
