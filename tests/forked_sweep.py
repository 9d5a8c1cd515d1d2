"""sweep.py, whose runs are forked from it, see forks.py. compare.py is not run, but named."""

import os
import subprocess
import sys
from types import SimpleNamespace

from forks import HOME, Forked, exec_script

sys.path[:0] = [str(HOME)]

from isogpt.lab import queue


def forked_run(command, stdout, env, **options):
    """In place of subprocess.Popen in queue.py."""
    sweep, first = os.getpid(), command.index(sys.executable)

    def prepare():
        queue.end_with(sweep)
        if command[0] == "taskset":
            os.sched_setaffinity(0, map(int, command[2].split(",")))
        for descriptor in (1, 2):
            os.dup2(stdout.fileno(), descriptor)

    return Forked(command[first + 1 :], env, prepare)


def run_or_name(command, **options):
    """Run a command; of compare.py, only print it."""
    if not command[1].endswith("compare.py"):
        return run(command, **options)
    print("would run", *command[1:], flush=True)


run = subprocess.run
queue.subprocess, subprocess.run = SimpleNamespace(Popen=forked_run), run_or_name
sys.argv[0] = str(HOME / "sweep.py")
exec_script(sys.argv[0])
