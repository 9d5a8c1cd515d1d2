"""
sweep.py, whose runs are forked from it in place of being started: without the seconds in which each would
import torch. compare.py is not run, but named. The process must not have computed anything with torch.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HOME)]

from isogpt.lab import queue, slots
from isogpt.launch import launchers

PEAKS = "isogpt.speed.devices"  # zygote.py has replaced a measurement in this module


class Forked:
    """What queue.py uses of a subprocess.Popen."""

    def __init__(self, train_py, run, slot, log):
        sweep = os.getpid()
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            become_run(train_py, run, slot, log, sweep)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def become_run(train_py, run, slot, log, sweep):
    """Become train.py, as start_process and zygote.py do; does not return."""
    os.setsid()
    slots.enter(slot, sweep)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    for number in launchers.stop_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    env = launchers.environment_without_launcher() | slot.variables
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [str(train_py), *run.arguments]
    for name in [*sys.modules]:
        if name.split(".")[0] in ("isogpt", "model", "configurator") and name != PEAKS:
            del sys.modules[name]
    code = 0
    try:
        source = Path(train_py).read_text()
        exec(compile(source, train_py, "exec"), {"__name__": "__main__", "__file__": str(train_py)})
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        threading._shutdown()
        os._exit(code)


def run_or_name(command, **options):
    """Run a command; of compare.py, only print it."""
    if Path(command[1]).name != "compare.py":
        return run(command, **options)
    print("would run", " ".join(map(str, command[1:])), flush=True)
    return subprocess.CompletedProcess(command, 0)


run = subprocess.run
queue.start_process, subprocess.run = Forked, run_or_name
sys.argv[0] = str(HOME / "sweep.py")
exec(
    compile((HOME / "sweep.py").read_text(), sys.argv[0], "exec"),
    {"__name__": "__main__", "__file__": sys.argv[0]},
)
