"""Train the runs of a sweep: start train.py in free slots, pass signals on, report how each run ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from isogpt.common import console
from isogpt.common.console import duration
from isogpt.common.files import reason_of
from isogpt.lab.slots import Slot, enter
from isogpt.lab.swept_runs import State, SweptRun, open_log, read_state, record_settings
from isogpt.launch.launchers import environment_without_launcher, stop_signals
from isogpt.speed.launches import reason_for

POLL_S = 0.05  # seconds between two looks at the processes
LOOK_AGAIN_S = 1.0  # seconds between two looks at runs that a different sweep trains
LOG_TAIL = 2**16  # bytes of a log in which the reason of a failure is looked for


@dataclass
class Job:
    """A run that is trained now."""

    run: SweptRun
    slot: Slot
    process: subprocess.Popen
    log: BinaryIO
    log_size: int  # before this start
    start: State
    began: float = field(default_factory=time.monotonic)
    signals: int = 0  # how many have been passed on

    def output(self) -> str:
        """The end of what the run has printed since its start."""
        with open(self.log.name, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_size, size - LOG_TAIL))
            return file.read().decode(errors="replace")


@dataclass
class Queue:
    """
    The runs of a sweep on this machine.

    Args:
        train_py: the script.
        waiting: runs that are not complete, as far as is known. Those that a different sweep trains stay
            here, and are checked again.
        slots: those that are free.
        received: the signals so far. After the first one no more runs are started; all are passed on to the
            runs.
    """

    train_py: Path
    waiting: list[SweptRun]
    slots: list[Slot]
    received: list[int] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # {name of a run: why it failed}
    stopped: list[str] = field(default_factory=list)  # names of runs that stopped before their end
    elsewhere: set[str] = field(default_factory=set)  # names of runs that a different sweep was seen to train
    steps: int = 0  # taken in `seconds` by runs that ended
    seconds: float = 0.0
    number_of_slots: int = 0
    look_again: float = 0.0

    def __post_init__(self) -> None:
        self.number_of_slots = len(self.slots)

    def train(self) -> None:
        """Train all runs, unless a signal arrives before."""
        with recorded_signals(self.received):
            while self.running or (self.waiting and not self.received):
                self.start_runs()
                self.pass_signals_on()
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self.finish(job)
                time.sleep(POLL_S)

    def start_runs(self) -> None:
        """Start runs while slots are free."""
        if not self.slots or time.monotonic() < self.look_again:
            return
        for run in [*self.waiting]:
            if not self.slots or self.received:
                return
            try:
                self.start(run)
            except (OSError, ValueError) as e:  # a full disk, for instance
                self.waiting.remove(run)
                self.fail(run, reason_of(e))

    def start(self, run: SweptRun) -> None:
        """Start a run, unless a different sweep trains it now or has completed it."""
        log = open_log(run)
        if log is None:
            if run.name not in self.elsewhere:
                console.print_line(
                    f"{run.name}: a different sweep, or a process that one left behind, trains it now"
                )
            self.elsewhere.add(run.name)
            self.look_again = time.monotonic() + LOOK_AGAIN_S
            return
        self.waiting.remove(run)
        state = read_state(run)
        if state.is_complete:
            console.print_line(f"complete  {run.name}: {state.loss_text}")
            log.close()
            return
        try:
            record_settings(run)
            log_size = os.fstat(log.fileno()).st_size
            process = start_process(self.train_py, run, self.slots[0], log)
        except (OSError, ValueError):
            log.close()
            raise
        self.running.append(Job(run, self.slots.pop(0), process, log, log_size, state))
        console.print_line(f"start     {run.name}: {state.text}{self.left_text()}")

    def pass_signals_on(self) -> None:
        """Send each run the signals that it has not received. A second SIGINT ends a run at once."""
        for job in self.running:
            for number in self.received[job.signals :]:
                job.process.send_signal(number)
            job.signals = len(self.received)

    def finish(self, job: Job) -> None:
        """Report how a run has ended, and free its slot."""
        self.running.remove(job)
        self.slots.append(job.slot)
        state, seconds = read_state(job.run), time.monotonic() - job.began
        if state.is_complete:
            self.steps += state.step - job.start.step
            self.seconds += seconds
            text = f"end       {job.run.name}: {state.loss_text}, {duration(seconds)}{self.left_text()}"
            console.print_line(text)
        elif self.received or state.ending == "preempted":
            self.stopped.append(job.run.name)
            console.print_line(f"stopped   {job.run.name}: {state.text}")
        else:
            self.fail(job.run, reason_for(job.process.returncode, job.output()))
        job.log.close()  # unlocks the run, after it was reported

    def fail(self, run: SweptRun, reason: str) -> None:
        """Report that a run has failed. The others go on."""
        self.failures[run.name] = reason
        console.print_line(f"failed    {run.name}: {reason}")

    def left_text(self) -> str:
        """How many runs are left, and in how much time they will be complete, if this is known."""
        left = len(self.waiting) + len(self.running)
        if not left or not self.steps:
            return f"; {left} left"
        step_s, now = self.seconds / self.steps, time.monotonic()
        rest = sum(step_s * (run.steps - read_state(run).step) for run in self.waiting)
        for job in self.running:
            rest += max(0.0, step_s * (job.run.steps - job.start.step) - (now - job.began))
        return f"; {left} left, about {duration(rest / min(left, self.number_of_slots))}"


def start_process(train_py: Path, run: SweptRun, slot: Slot, log: BinaryIO) -> subprocess.Popen:
    """Start train.py for a run, in a new session, so that the terminal's Ctrl-C reaches only the sweep."""
    return subprocess.Popen(
        [sys.executable, str(train_py), *run.arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment_without_launcher() | slot.variables,
        start_new_session=True,
        preexec_fn=partial(enter, slot, os.getpid()) if os.name == "posix" else None,
    )


@contextmanager
def recorded_signals(received: list[int]) -> Iterator[None]:
    """In this context, signals that ask a process to stop are only recorded in the list."""

    def record(number: int, frame: object) -> None:
        received.append(number)
        name = signal.Signals(number).name
        console.print_to_stderr(f"{name}: the runs save and stop; nothing more is started")

    before = {number: signal.signal(number, record) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
