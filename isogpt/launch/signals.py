"""Stop on request: signals and the time limit."""

import math
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass

import torch

from isogpt.common import console
from isogpt.launch.launchers import agent_start, stop_signals
from isogpt.launch.together import gather_number

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

    def seconds_left(self) -> float:
        """Return the seconds until time_limit_s, less those for the exit; infinite without a limit."""
        return self.time_limit_s - running_s() - EXIT_S if self.time_limit_s else math.inf

    def code(self, step_s: float = 0.0, checkpoint_s: float = 0.0) -> int:
        """
        Return 0 to continue, a signal's number, or TIME_IS_UP.

        The time is up if not enough is left for three steps, of which one may have been launched before all
        ranks know this code, and for two checkpoints: one that may be under way, and the final one.
        """
        is_late = self.seconds_left() < 3 * step_s + 2 * checkpoint_s
        return self.signal or (TIME_IS_UP if is_late else 0)

    def decide(self, codes: torch.Tensor) -> int:
        """
        Return why all ranks stop, from the codes of all ranks; 0: continue. A signal takes precedence over
        TIME_IS_UP. What was agreed stays.
        """
        self.agreed = self.agreed or int(codes.max() or codes.min())
        return self.agreed

    def in_evaluation(self, micro_batch: int, device: torch.device, checkpoint_s: float) -> bool:
        """
        Return whether to stop; called after each micro-batch of an evaluation (all ranks). With a GPU, the
        ranks agree at every eighth, because to read what they say is to wait for all queued work.
        """
        if device.type != "cpu" and micro_batch % 8:
            return False
        return self.decide(gather_number(self.code(checkpoint_s=checkpoint_s), device)) != 0

    def reason(self) -> str:
        """Return the name of the agreed code."""
        return "time_limit_s" if self.agreed == TIME_IS_UP else signal.Signals(self.agreed).name


def watch_signals(time_limit_s: float = 0) -> Stop:
    """Record the signals of stop_signals in the returned Stop, which all ranks check together."""
    stop = Stop(time_limit_s)
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    signal.set_wakeup_fd(sending.detach(), warn_on_full_buffer=False)
    for number in stop_signals():
        signal.signal(number, lambda *_: None)  # as set_wakeup_fd needs a handler
    threading.Thread(target=receive_signals, args=(stop, receiving), daemon=True, name="signals").start()
    return stop


def receive_signals(stop: Stop, receiving: socket.socket) -> None:
    """
    Record the signals whose numbers arrive (in a thread: the main thread may be waiting in C++ for a failed
    rank). A second SIGINT, more than a second later, ends the process at once. An earlier one does not, since
    a single Ctrl-C often arrives twice, from the terminal and from the launcher.
    """
    interrupted_at = math.inf
    while number := receiving.recv(1)[0]:
        if not stop.signal:
            stop.signal = number
            console.print_to_stderr(f"{signal.Signals(number).name}: stopping after this step or the next")
        if number == signal.SIGINT:
            if time.monotonic() - interrupted_at > 1:
                os._exit(128 + number)
            interrupted_at = min(interrupted_at, time.monotonic())
