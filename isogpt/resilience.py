"""What keeps a run alive: stopping on request, steps that are not finite, loss spikes, slow ranks, and alerts."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn as nn

from isogpt import run_folder
from isogpt.agree import (
    Gathered,
    Number,
    StepNumbers,
    do_together,
    exit_together,
    gather_number,
    gather_numbers,
    is_main,
)
from isogpt.files import recorded
from isogpt.launch import agent_start, environment_without_launcher
from isogpt.loader import Reader
from isogpt.parallel import gradient_norms

if TYPE_CHECKING:
    from isogpt.checkpoint import Progress, Saver
    from isogpt.metrics import Logger

MICRO_BATCH = "micro_batch.json"  # the micro-batch size to use after running out of memory
PROCESS_START = time.monotonic()  # approximately
TIME_IS_UP = -1  # Stop.code for the time limit; signals have positive numbers
EXIT_S = 1.0  # reserved for leaving the process group and exiting

# ---------------------------------------------------------------------------------------------------------------------
# stopping on request


def running_s() -> float:
    """Seconds since the start of this process, or of torchrun's agent, which may have restarted it (Linux)."""
    started = agent_start()
    if started is not None:
        return float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - PROCESS_START


@dataclass
class Stop:
    """Whether this rank was asked to stop: by a signal, or because time_limit_s (0: none) is about to be exceeded."""

    time_limit_s: float = 0
    signal: int = 0
    agreed: int = 0  # the code that all ranks stop by
    asked: Gathered[Number] | None = None  # the codes of an evaluation that are read at a later micro-batch

    def code(self, step_s: float = 0.0, checkpoint_s: float = 0.0) -> int:
        """
        0: continue; a signal's number; or TIME_IS_UP if the time left is not enough for another step, which may take
        twice as long as the last one, and two checkpoints: one that may be under way, and the final one.
        """
        needed = EXIT_S + 2 * step_s + 2 * checkpoint_s
        is_late = self.time_limit_s and running_s() + needed > self.time_limit_s
        return self.signal or (TIME_IS_UP if is_late else 0)

    def decide(self, codes: torch.Tensor) -> int:
        """What all ranks stop by, from every rank's code: a signal takes precedence over TIME_IS_UP; 0: continue."""
        self.agreed = int(codes.max() or codes.min())
        return self.agreed

    def in_evaluation(self, micro_batch: int, device: torch.device, checkpoint_s: float) -> bool:
        """
        Whether to stop, asked after each micro-batch of an evaluation (all ranks). With a GPU, the ranks ask each other
        at every fourth one and read the answer four later: reading it at once would wait for all queued work.
        """
        if device.type == "cpu":
            return self.decide(gather_number(self.code(checkpoint_s=checkpoint_s), device)) != 0
        if micro_batch % 4:
            return False
        answer = self.asked if micro_batch else None  # at the first micro-batch: of an earlier evaluation
        self.asked = gather_numbers(Number(self.code(checkpoint_s=checkpoint_s)), device)
        return answer is not None and self.decide(answer.read().value) != 0

    def reason(self) -> str:
        """The agreed code's name."""
        return "time_limit_s" if self.agreed == TIME_IS_UP else signal.Signals(self.agreed).name


def watch_signals(time_limit_s: float = 0) -> Stop:
    """
    From now on SIGTERM, SIGUSR1 and SIGINT are recorded in the returned Stop, which all ranks check together. A second
    SIGINT, more than a second later, ends the process at once: a single Ctrl-C often arrives twice, from the terminal
    and from the launcher.
    """
    stop = Stop(time_limit_s)

    def record(number: int, frame: object) -> None:
        if not stop.signal:
            stop.signal = number
            os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())

    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), record)
    # Python runs `record` between two bytecodes of the main thread. If that waits in C++ for a failed rank, the thread
    # below, which reads the numbers of arriving signals, can still end the process.
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


# ---------------------------------------------------------------------------------------------------------------------
# steps that are not finite


@dataclass
class NanPolicy:
    """What to do about a step whose loss or gradient is not finite; the same on all ranks."""

    on_nan: str  # stop or skip
    patience: int  # consecutive steps until a rollback
    max_rollbacks: int
    consecutive: list[int] = field(default_factory=list)  # the steps since the last finite one
    rollbacks: int = 0

    def decide(self, step: int) -> str:
        """'skip' the step, 'rollback' to the last checkpoint and exclude the consecutive steps, or 'stop'."""
        self.consecutive.append(step)
        if self.on_nan == "stop":
            return "stop"
        if len(self.consecutive) < self.patience:
            return "skip"
        return "rollback" if self.rollbacks < self.max_rollbacks else "stop"

    def accepts(self, numbers: StepNumbers) -> bool:
        """
        Whether the step needs no report (the same on all ranks): it is finite, or it is a float16 step whose gradient
        overflowed because of the loss scale, which is then halved. A scale of 1 cannot be the cause.
        """
        accepted = bool(numbers.is_finite or (numbers.loss.isfinite().all() and numbers.loss_scale.max() > 1))
        if accepted:
            self.consecutive.clear()
        return accepted

    def handle(self, numbers: StepNumbers, progress: "Progress", model: nn.Module, reader: Reader, saver: "Saver",
               logger: "Logger") -> run_folder.Found | None:  # fmt: skip
        """
        Report a step that is not finite and move past it (all ranks).

        Returns:
            the checkpoint to roll back to; None if the step is skipped. Exits if the run cannot continue.
        """
        text, facts = describe_not_finite(progress.step, numbers, model, reader)
        logger.event("not_finite", **facts)
        action = self.decide(progress.step)
        progress.skip()
        if action == "skip":
            logger.print(f"warning: {text}: the step is skipped")
            return None
        logger.saved(saver.wait_together())
        if action == "stop":
            with exit_together(logger.failed):
                if is_main():
                    raise ValueError(f"{text}; {self.advice(run_folder.is_run(saver.out_dir))}")
        return self.find_rollback(text, saver, logger)

    def find_rollback(self, text: str, saver: "Saver", logger: "Logger") -> run_folder.Found:
        """
        The checkpoint to roll back to (all ranks; rank 0 looks). Damaged ones are reported. Exits with a message that
        begins with `text` if there is none.
        """
        found, reports = do_together(partial(look_for_rollback, saver), logger.failed)
        for report in reports:
            logger.print(f"warning: {report}")
        with exit_together(logger.failed):
            if is_main() and not found:
                advice = "start again with a lower --learning_rate"
                raise ValueError(f"{text}; there is no valid checkpoint to roll back to: {advice}")
        return run_folder.share(found, saver.out_dir)

    def rolled_back(self, progress: "Progress", logger: "Logger") -> None:
        """Exclude the consecutive steps after progress was rewound to a checkpoint (all ranks)."""
        excluded, self.consecutive, step = self.consecutive, [], progress.step
        self.rollbacks += 1
        progress.skipped.update(excluded)
        logger.event("rollback", to=step, left_out=sorted(progress.skipped), rollback=self.rollbacks)
        logger.print(f"warning: {len(excluded)} steps not finite: rolled back to step {step}, excluding {excluded}")
        logger.cut_back()

    def advice(self, can_resume: bool) -> str:
        """What a user can do when the run ends."""
        command = "Resume with --init_from=resume and" if can_resume else "Start again with"
        skip = ", or --on_nan=skip" if self.on_nan == "stop" else ""
        return f"the step was not taken and no checkpoint was lost. {command} a lower --learning_rate{skip}"


def look_for_rollback(saver: "Saver") -> tuple[run_folder.Found | None, list[str]]:
    """What run_folder.find_rollback returns, on rank 0; nothing on the other ranks."""
    return run_folder.find_rollback(saver.out_dir, saver.owner) if is_main() else (None, [])


def describe_not_finite(step: int, numbers: StepNumbers, model: nn.Module, reader: Reader) -> tuple[str, dict]:
    """
    Which ranks had a loss that is not finite, what they read and the largest gradients (all ranks).

    Returns:
        (a sentence for the user, the facts for metrics.jsonl)
    """
    everyone, starts = range(len(numbers.loss)), reader.starts(step)
    guilty = [r for r in everyone if not numbers.loss[r].isfinite()] or list(everyone)
    rows_read = {}  # by rank, where its rows start
    for r in guilty:
        share = reader.share_of_rank(r)
        picked = [share.pick(starts, m) for m in range(share.micro_steps)]
        rows_read[r] = np.concatenate(picked)[:64].tolist()
    ranked = sorted(gradient_norms(model).items(), reverse=True,
                    key=lambda item: item[1] if math.isfinite(item[1]) else math.inf)  # fmt: skip
    facts = {"loss": numbers.loss.tolist(), "grad_norm": numbers.grad_norm.item(), "ranks": guilty,
             "windows": rows_read, "largest_gradients": dict(ranked[:5])}  # fmt: skip
    gradients = ", ".join(f"{name} {norm:.3g}" for name, norm in ranked[:5])
    rows = "; ".join(f"{first[:8]} (rank {r})" for r, first in list(rows_read.items())[:4])
    text = (f"step {step}: not finite on rank {', '.join(map(str, guilty))}: loss by rank {facts['loss']}, gradient "
            f"norm {facts['grad_norm']:.3g}; largest gradients {gradients}; rows start at token {rows}")  # fmt: skip
    return text, facts


# ---------------------------------------------------------------------------------------------------------------------
# anomalies and alerts


@dataclass
class Spikes:
    """Detects a loss far above those of the last hundred logged steps."""

    losses: deque = field(default_factory=lambda: deque(maxlen=100))

    def seen(self, loss: float) -> bool:
        """Whether this loss is a spike."""
        before = np.array(self.losses)
        self.losses.append(loss)
        return len(before) >= 20 and loss > before.mean() + max(6 * before.std(), 0.1 * abs(before.mean()))


@dataclass
class Overflows:
    """Detects float16 steps that are skipped in succession: the gradient overflows whatever the loss scale is."""

    patience: int = 8  # the first steps of a run often overflow; by then the scale has fallen to 1/256
    count: int = 0

    def seen(self, is_finite: bool) -> bool:
        """Whether this step is the last of `patience` skipped ones; once in each succession."""
        self.count = 0 if is_finite else self.count + 1
        return self.count == self.patience


@dataclass
class SlowRanks:
    """Detects a rank that stays well above the others in its own forward time, in data wait or in memory."""

    patience: int = 20  # consecutive logged steps
    counts: dict = field(default_factory=dict)  # by (column, rank)

    def seen(self, columns: dict[str, list[float]]) -> list[str]:
        """
        Args:
            columns: what was measured -> its value by rank.

        Returns:
            a sentence for each rank that has been above the others for `patience` steps; once each time.
        """
        found = []
        for what, values in columns.items():
            typical = statistics.median_low(values)
            margin = 0.2 if what.endswith("GB") else 5  # GB or ms: differences that do not matter
            for rank, value in enumerate(values):
                is_above = value > 1.5 * typical + margin
                self.counts[what, rank] = self.counts.get((what, rank), 0) + 1 if is_above else 0
                if self.counts[what, rank] == self.patience:
                    found.append(f"rank {rank}: {what} {value:.1f}, others {typical:.1f}")
        return found


def alert(command: str, record: dict, wait_s: float = 0) -> None:
    """Run the user's command with a line of JSON on its standard input (rank 0). Its failure does not stop the run."""
    if not command:
        return
    stderr, env = None if wait_s else subprocess.DEVNULL, environment_without_launcher()
    try:
        process = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, stderr=stderr, text=True, env=env)
    except OSError as e:
        print(f"warning: alert_command: {e}", file=sys.stderr, flush=True)
        return
    # a thread, so that a command that does not read its input cannot block the run; it also reaps the process
    thread = threading.Thread(target=process.communicate, args=(json.dumps(record) + "\n",), daemon=True)
    thread.start()
    thread.join(wait_s)


# ---------------------------------------------------------------------------------------------------------------------
# out of memory


def micro_batch_of(out_dir: str, job: dict, batch_size: int) -> int:
    """
    The micro-batch size to use: batch_size, or the smaller one that a previous attempt at the same job, see
    memory.job_of, recorded when it ran out of memory. The global batch and thus the loss curve stay the same. The rank
    that ran out of memory may be on another machine: all ranks look, and the smallest size of all ranks is used.
    """
    rows = recorded(Path(out_dir) / MICRO_BATCH, job)
    return min(batch_size, rows) if isinstance(rows, int) else batch_size
