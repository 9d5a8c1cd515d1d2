"""The runs of a sweep: how far each is, where they are trained at the same time, and how each ends."""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from isogpt.checkpoint.folder import RESULT
from isogpt.checkpoint.manifest import steps_in
from isogpt.common.console import duration, print_line, print_to_stderr
from isogpt.common.files import lock, parse_json, read_records, read_utf8, regular_file, write_whole
from isogpt.data.dataset import open_dataset
from isogpt.lab.combinations import typed
from isogpt.lab.comparison import NOT_COMPARED
from isogpt.launch.device import pick_device
from isogpt.launch.launchers import environment_without_launcher, stop_signals
from isogpt.launch.network import own_cores
from isogpt.training.budget import limits_of
from isogpt.training.settings import check_training, without_secrets

LOG = "train.log"  # what a run printed; the file is locked while the run is trained
SETTINGS = "sweep.json"  # the settings with which a run was started, in a line
# settings that may differ when a run continues: they change neither the weights nor the figures
MAY_CHANGE = NOT_COMPARED - {"seed"} | {"nproc", "backend", "alert_command"}
POLL_S = 0.05  # seconds between two looks at the processes


# ------------------------------------------------------------------------------------------------------------
# a run, and what its folder shows


@dataclass
class SweptRun:
    """A run of a sweep: train.py with `arguments`, which give the settings `config`."""

    folder: Path
    arguments: list[str]
    config: dict
    # while it is trained:
    log: BinaryIO | None = None  # locked
    process: subprocess.Popen | None = None

    @property
    def result(self) -> dict:
        """How the run has ended: its result.json. {}: it is new, it is training, or it was killed."""
        with suppress(OSError, ValueError):  # it is missing or damaged
            return parse_json(read_utf8(self.folder / RESULT))
        return {}

    @property
    def is_complete(self) -> bool:
        """Whether the run has taken its last step."""
        return self.result.get("exit_reason") == "complete"

    @property
    def step(self) -> int:
        """The step at which the run would resume."""
        return max(steps_in(str(self.folder)), default=0)

    @property
    def state(self) -> str:
        """How far the run is, and how it has ended before its last step: what it recorded or printed last."""
        result, log = self.result, self.folder / LOG
        if result.get("exit_reason") == "complete":
            return f"complete, val loss {float(result['val_loss']):.4f}"
        step = f"at step {self.step}" if self.step else "new"
        if result:
            return f"{step}, {result['exit_reason']}: {result['reason']}"
        lines = []
        with suppress(FileNotFoundError), open(log, errors="replace", opener=regular_file) as file:
            lines = file.read().splitlines()
        return f"{step}, its last line: {lines[-1]}" if lines else step

    def check(self) -> None:
        """
        Check the settings. Those that a budget of tokens or epochs determines become part of `config`.

        Raises:
            ValueError: train.py cannot train a run with these settings, or cannot continue the one in the
                folder.
        """
        c = self.config
        check_training(c)
        data = open_dataset(c["dataset"], c["block_size"], c["vocab_size"], data_order=c["data_order"])
        c.update(limits_of(c, len(data.train)).settings())
        if not self.step and not self.is_complete:
            return  # train.py moves aside what is in the folder
        before, now = next(read_records(self.folder / SETTINGS), {}), without_secrets(c)
        changed = {name: value for name, value in before.items() if now.get(name, value) != value}
        if changed or not before:
            text = shlex.join(typed(changed)) or "unknown settings"
            raise ValueError(f"{self.folder} was trained with {text}: type them, or a different --out_dir=")

    def start(self, train_py: Path, slot: list[str]) -> bool:
        """
        Start the run, in a new session, so that the terminal's Ctrl-C reaches only the sweep. Returns False
        if the run is complete, or a different sweep trains it now. The log stays locked until all processes
        of the run have exited, even if the sweep is killed.

        Args:
            slot: how the command begins, see `make_slots`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = open(self.folder / LOG, "ab", opener=regular_file)
        if lock(self.log) is False or self.is_complete:
            self.log.close()
            return False
        print_line(f"start  {self.folder}")
        kept = {name: v for name, v in without_secrets(self.config).items() if name not in MAY_CHANGE}
        write_whole(self.folder / SETTINGS, json.dumps(kept) + "\n")
        (self.folder / RESULT).unlink(missing_ok=True)  # of an earlier start
        sweep = os.getpid()
        self.process = subprocess.Popen(
            [*slot, sys.executable, str(train_py), *self.arguments],
            stdout=self.log,
            stderr=self.log,
            env=environment_without_launcher(),
            start_new_session=True,
            preexec_fn=(lambda: end_with(sweep)) if sys.platform == "linux" else None,
        )
        return True


def time_left(runs: list[SweptRun], at_once: int) -> str:
    """
    The time until these runs are complete, as text, from the mean time of a step of those that are.

    Args:
        at_once: runs that are trained at the same time.
    """
    left = [run for run in runs if not run.is_complete]
    timed = [run.result for run in runs if run.is_complete and run.result["seconds"]]
    if not timed:
        return "n/a"
    step_s = sum(result["seconds"] for result in timed) / sum(result["steps"] for result in timed)
    steps = sum(run.config["max_iters"] + 1 - run.step for run in left)
    return f"about {duration(steps * step_s / max(1, min(at_once, len(left))))}"


# ------------------------------------------------------------------------------------------------------------
# where runs are trained


def make_slots(jobs: int, processes: int, device: str) -> list[list[str]]:
    """
    Divide this machine between runs. Each run gets a GPU for each of its processes, or, on a CPU, a share of
    the cores, on which the bits of a run may depend. Returns how the commands of runs begin: with what limits
    them to some GPUs or cores.

    Args:
        jobs: the most runs at the same time; 0: on GPUs, as many as these suffice for, else one.
        processes: of each run.
        device: as for train.py.

    Raises:
        ValueError: the device is not available, or there are too few GPUs.
    """
    kind = pick_device(device, 0, 1).type
    if kind == "cuda" and ":" not in device:
        limit, size = "env CUDA_VISIBLE_DEVICES=", processes
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        units = named.split(",") if named else range(torch.cuda.device_count())
        if size > len(units):
            raise ValueError(f"nproc is {size}, but there are {len(units)} GPUs: set --nproc={len(units)}")
    elif kind == "cpu" and jobs > 1 and sys.platform == "linux":
        limit, units = "taskset -c ", own_cores()
        size = max(1, len(units) // jobs)
    else:
        return [[]] * (jobs or 1)  # not limited
    slots = []
    for first in range(0, len(units) - size + 1, size):  # a rest is left out
        group = ",".join(map(str, units[first : first + size]))
        slots.append(f"{limit}{group}".split())
    return slots[: jobs or None] if len(slots) > 1 else [[]]


# ------------------------------------------------------------------------------------------------------------
# training


def train(train_py: Path, runs: list[SweptRun], slots: list[list[str]]) -> list[int]:
    """
    Train the runs that are not complete, and print how each ends. After a signal, they save and stop.

    Args:
        train_py: the script.
        slots: for the runs that are trained at the same time.

    Returns:
        the signals that were received.
    """
    waiting, running = [run for run in runs if not run.is_complete], {}  # {number of a slot: its run}
    received, passed_on = [], 0
    for number in stop_signals():
        signal.signal(number, lambda number, frame: received.append(number))
    while running or (waiting and not received):
        free = [slot for slot in range(len(slots)) if slot not in running]
        if waiting and free and not received:
            run = waiting.pop(0)
            if run.start(train_py, slots[free[0]]):
                running[free[0]] = run
            elif not run.is_complete:  # a different sweep trains it: look again later
                waiting.append(run)
        for number in received[passed_on:]:  # to each run once: a second SIGINT would end it immediately
            print_to_stderr(f"{signal.Signals(number).name}: the runs save and stop")
            for run in running.values():
                run.process.send_signal(number)
            passed_on += 1
        for slot, run in [*running.items()]:
            if run.process.poll() is not None:
                del running[slot]
                left = f"runs left: {len(waiting) + len(running)}, time left: {time_left(runs, len(slots))}"
                print_line(f"end    {run.folder}: {run.state}; {left}")
                run.log.close()  # unlocks the run, after its end was printed
        time.sleep(POLL_S)
    return received


def end_with(sweep: int) -> None:
    """Let this process receive SIGTERM when its parent, whose process id is `sweep`, is killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != sweep:  # it was killed before this call
        os._exit(1)
