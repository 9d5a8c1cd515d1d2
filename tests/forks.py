"""
Runs of train.py that are forked from the process that starts them: without the seconds in which each would
import torch. That process must not have computed anything with torch.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
PEAKS = "isogpt.speed.devices"  # zygote.py has replaced a measurement in this module


class Forked:
    """
    What sweep.py, bench.py and torchrun use of a subprocess.Popen.

    Args:
        words: a script of isoGPT and its arguments.
        prepare: is called first in the new process.
    """

    def __init__(self, words, env, prepare=None):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            become_run([*map(str, words)], env, prepare)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("train.py", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def become_run(words, env, prepare):
    """Become train.py, as zygote.py does; does not return."""
    code = 1
    try:
        os.setsid()
        if prepare:
            prepare()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.path[:0] = [str(Path(words[0]).parent), str(HOME)]
        from isogpt.launch.launchers import stop_signals

        for number in stop_signals():
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = words
        for name in [*sys.modules]:
            if name.split(".")[0] in ("isogpt", "model", "configurator") and name != PEAKS:
                del sys.modules[name]
        exec_script(words[0])
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        threading._shutdown()
        os._exit(code)


def exec_script(path):
    """Run a script in this process, in which `sys.argv` is set."""
    space = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(Path(path).read_text(), path, "exec"), space)
