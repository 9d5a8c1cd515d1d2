"""Stop on request: signals and the time limit."""

import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from isogpt.common import console
from isogpt.launch.launchers import agent_start, stop_signals
from isogpt.launch.together import Gathered, Number, gather_number, gather_numbers

PROCESS_START = time.monotonic()  # approximately
TIME_IS_UP = -1  # Stop.code for the time limit; signals are positive numbers
EXIT_S = 1.0  # seconds reserved for leaving the process group and exiting


def running_s() -> float:
    """
    Return the seconds since the start of this process, or of torchrun's agent, which may have restarted the
    process (Linux).
    """
    started = agent_start()
    if started is not None:
        # not /proc/uptime, which LXC replaces by the uptime of the container
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - PROCESS_START


@dataclass
class Stop:
    """
    Records whether this rank was asked to stop: by a signal, or because time_limit_s (0: no limit) is about
    to be exceeded.
    """

    time_limit_s: float = 0
    signal: int = 0
    agreed: int = 0  # the code that all ranks stop by
    asked: Gathered[Number] | None = None  # the codes of an evaluation that are read at a later micro-batch

    def code(self, step_s: float = 0.0, checkpoint_s: float = 0.0) -> int:
        """
        Return 0 to continue, a signal's number, or TIME_IS_UP.

        The time is up if not enough is left for a step, which may take twice as long as the last one, and for
        two checkpoints: one that may be under way, and the final one.
        """
        needed = EXIT_S + 2 * step_s + 2 * checkpoint_s
        is_late = self.time_limit_s and running_s() + needed > self.time_limit_s
        return self.signal or (TIME_IS_UP if is_late else 0)

    def seconds_left(self) -> float:
        """Return the seconds until time_limit_s, less those for the exit; infinite without a limit."""
        return self.time_limit_s - running_s() - EXIT_S if self.time_limit_s else math.inf

    def decide(self, codes: torch.Tensor) -> int:
        """
        Return why all ranks stop, from the codes of all ranks; 0: continue. A signal takes precedence over
        TIME_IS_UP.
        """
        self.agreed = int(codes.max() or codes.min())
        return self.agreed

    def in_evaluation(self, micro_batch: int, device: torch.device, checkpoint_s: float) -> bool:
        """
        Return whether to stop; called after each micro-batch of an evaluation (all ranks). With a GPU, the
        ranks exchange codes at every fourth micro-batch and read them four micro-batches later, because
        reading them at once would wait for all queued work.
        """
        if device.type == "cpu":
            return self.decide(gather_number(self.code(checkpoint_s=checkpoint_s), device)) != 0
        if micro_batch % 4:
            return False
        answer = self.asked if micro_batch else None  # not the codes of an earlier evaluation
        self.asked = gather_numbers(Number(self.code(checkpoint_s=checkpoint_s)), device)
        return answer is not None and self.decide(answer.read().value) != 0

    def reason(self) -> str:
        """Return the name of the agreed code."""
        return "time_limit_s" if self.agreed == TIME_IS_UP else signal.Signals(self.agreed).name


def watch_signals(time_limit_s: float = 0) -> Stop:
    """
    Record the signals of stop_signals in the returned Stop, which all ranks check together. A second SIGINT,
    more than a second later, ends the process at once. An earlier one does not, since a single Ctrl-C often
    arrives twice, from the terminal and from the launcher.
    """
    stop, erase = Stop(time_limit_s), console.erase_line(sys.stderr)

    def record(number: int, frame: object) -> None:
        if not stop.signal:
            stop.signal = number
            text = f"{erase}{signal.Signals(number).name}: stopping after this step\n"
            with suppress(OSError):  # a full disk, or no terminal after SIGHUP
                if not console.is_blocked(sys.stderr, 0):
                    os.write(2, text.encode())  # the signal may have interrupted a print

    for number in stop_signals():
        signal.signal(number, record)
    # Python runs `record` between two bytecodes of the main thread. If that waits in C++ for a failed rank,
    # the thread below, which reads the numbers of arriving signals, can still end the process.
    if os.name != "posix":  # Windows cannot make a pipe non-blocking before Python 3.12
        return stop
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def exit_at_second_sigint() -> None:
        first = None
        while numbers := os.read(read, 1):
            if numbers[0] == signal.SIGINT:
                first = first or time.monotonic()
                if time.monotonic() - first > 1:
                    os._exit(128 + signal.SIGINT)

    threading.Thread(target=exit_at_second_sigint, daemon=True, name="signals").start()
    return stop
