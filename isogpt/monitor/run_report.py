"""The report on a run in progress: steps, evaluations, anomalies and the end."""

import math
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.measures import NONE
from isogpt.checkpoint.save import Saver
from isogpt.common.console import count_text, duration
from isogpt.data.reader import Reader
from isogpt.launch.together import Gathered, gather_numbers, gather_objects
from isogpt.monitor import banner, records, slow_ranks
from isogpt.monitor.log import Logger
from isogpt.monitor.signals import Stop
from isogpt.parallel.compilation import compile_report
from isogpt.parallel.parallelize import take_routing
from isogpt.speed.clock import Clock, over_ranks
from isogpt.speed.devices import Peak, find_peak, fraction_of_peak
from isogpt.speed.usage import memory_gb, utilization
from isogpt.training.step_numbers import StepNumbers

SLOW_STEPS = 3  # the first steps compile, allocate memory and start threads: no later step takes as long
MOST_MEASUREMENTS = 4  # of a peak that steps exceed


def means_of(sums: Counter) -> dict[str, float | None]:
    """Return the means of numbers that were added up over sums["steps"] steps; None: not known."""
    return records.known({name: total / sums["steps"] for name, total in sums.items() if name != "steps"})


@dataclass
class RunReport:
    """
    Gathers what all ranks decide from and report after a step, and turns the numbers of steps and evaluations
    into records and warnings for the logger, whose sinks are on rank 0.

    Constructed just before the first step.
    """

    logger: Logger
    config: dict
    model: nn.Module
    scaler: torch.amp.GradScaler
    clock: Clock
    stop: Stop
    saver: Saver
    reader: Reader
    flops_per_step: float
    peak: Peak  # if it is unknown, the mfu is None
    measurements: int = 1  # of the peak
    steps_taken: int = 0  # by this process
    at_full_speed: float = 0.0  # when the first SLOW_STEPS steps had been taken
    routing: Tensor | None = None  # of the step, see parallelize.take_routing; arrives with its numbers
    slow_steps: dict = field(default_factory=dict)  # for how many logged steps a rank is slow
    since_log: Counter = field(default_factory=Counter)  # sums over the steps since the last logged step
    throughout: Counter = field(default_factory=Counter)  # sums over the steps at full speed

    def __post_init__(self) -> None:
        self.progress = self.logger.progress
        self.progress.began = time.perf_counter()

    @property
    def is_logged(self) -> bool:
        """Whether the present step is logged."""
        return self.progress.step % self.config["log_interval"] == 0

    def gather(self, loss: Tensor, grad_square: tuple[Tensor, Tensor | float]) -> Gathered:
        """
        Gather the StepNumbers of all ranks (all ranks). This is the one small collective of a step; with
        experts, there is a second one if the step is logged. The host does not wait for a GPU.

        Args:
            loss, grad_square: see StepNumbers.
        """
        step_s, device = self.clock.step_s(), self.reader.device
        self.routing = take_routing(self.model, self.is_logged, device)
        loss_limit, grad_norm_limit = self.progress.recent_steps.limits()
        return gather_numbers(
            StepNumbers(
                # a step with padding in place of data must not be taken, on any rank: see StepPolicy.skip
                loss=math.nan if self.reader.problems else loss,
                grad_square=grad_square[0],
                grad_square_fine=grad_square[1],
                step_ms=step_s * 1e3,
                data_ms=self.clock.milliseconds("data", self.clock.spans),
                memory_gb=memory_gb(device),
                forward_ms=self.clock.steps[-1].get("forward", 0.0),
                stop=self.stop.code(step_s, self.saver.seconds_at_end),  # 0, a signal, or the time limit
                loss_scale=self.scaler.scale(torch.ones((), device=device)),  # get_scale would wait for it
                waiting=self.clock.waiting_share(),
                loss_limit=loss_limit,
                grad_norm_limit=grad_norm_limit,
            ),
            device,
        )

    def evaluation(self, values: dict[str, float | str]) -> None:
        """Report an evaluation: its losses, and with exact the digest of the weights."""
        p = self.progress
        record = {"iter": p.step, "tokens": p.tokens, "seconds": p.seconds, **values}
        self.logger.write(record, records.evaluation_line(record))

    def step(self, numbers: StepNumbers, lr: float) -> None:
        """Report a step that was taken, if it is logged, and what is wrong with it (all ranks)."""
        self.steps_taken += 1
        if self.steps_taken == 1:
            self.logger.print(compile_report())
        if self.steps_taken == SLOW_STEPS:
            self.at_full_speed = time.perf_counter()
        sums = records.waiting_percent(numbers) | {"loss_mean": numbers.loss.mean().item(), "steps": 1}
        self.since_log.update(sums)
        if self.steps_taken > SLOW_STEPS:
            self.throughout.update(sums)
        if self.is_logged:
            self.check_peak(self.flops_per_step / numbers.step_ms.mean().item() * 1e3)
            times = {"forward ms": numbers.forward_ms.numpy(), "data wait ms": numbers.data_ms.numpy()}
            columns = times | {"memory GB": numbers.memory_gb.numpy()}
            for slow in slow_ranks.slow_ranks(columns, self.slow_steps):
                self.logger.event("slow_rank", f"warning: a slow rank: {slow}", what=slow)
            record = self.record(numbers, lr)
            self.logger.write(record, records.step_line(record))

    def record(self, numbers: StepNumbers, lr: float) -> dict:
        """
        Return the record of a step that is logged. The loss is the mean over the ranks, which is the mean
        over the global batch. Since a mean hides a slow rank, the record also contains the maximum over the
        ranks of times and memory.
        """
        p, step_s = self.progress, numbers.step_ms.mean().item() / 1e3
        record = {
            "iter": p.step,
            "loss": numbers.loss.mean().item(),
            "grad_norm": numbers.grad_norm.item(),
            "lr": lr,
            "tokens_per_s": p.tokens_per_step / step_s,
            "mfu": fraction_of_peak(self.flops_per_step / step_s, self.peak.flops),
            "tokens": p.tokens + p.tokens_per_step,
            "seconds": p.seconds,
            "gpu_percent": utilization(self.reader.device),
            "left_s": self.seconds_left(),
            **means_of(self.since_log),
        }
        for name in ("step_ms", "data_ms", "memory_gb"):
            values = getattr(numbers, name)
            record |= {name: values.mean().item(), f"{name}_max": values.max().item()}
        if self.routing is not None:
            record |= records.routing_record(self.routing, p.tokens_per_step)
        self.since_log.clear()
        p.totals.add(record, is_timed=self.steps_taken > SLOW_STEPS)
        return record

    def check_peak(self, flops_per_s: float) -> None:
        """Measure the peak again if a step was faster: the machine was then busy at the start (all ranks)."""
        is_too_low = "measured" in self.peak.source and flops_per_s > self.peak.flops
        if is_too_low and self.measurements < MOST_MEASUREMENTS:
            self.measurements += 1
            self.clock.pause()  # not a part of a step
            again = find_peak(self.reader.device, self.reader.plan.dtype)
            self.peak = max(self.peak, again) if again.flops else self.peak
            text = f"peak:    {banner.peak_text(self.peak)}, measured again: a step was faster than the peak"
            self.logger.event("peak", text, peak_flops=self.peak.flops)

    def seconds_left(self) -> float | None:
        """
        Estimate the seconds until the end of the run from all steps but the first, with the evaluations,
        checkpoints and samples between them; None: not known yet.
        """
        if self.steps_taken < 10:  # it would be a guess
            return None
        step_s = (time.perf_counter() - self.at_full_speed) / (self.steps_taken - SLOW_STEPS)
        return step_s * (self.config["max_iters"] - self.progress.step)

    def is_stopped(self) -> bool:
        """Whether all ranks have agreed to stop before the end, see Progress.is_unfinished."""
        return self.stop.agreed != 0 and self.progress.is_unfinished(self.config["max_iters"])

    def done(self, advice: str) -> None:
        """Report the end of training, and advice for the user, if there was a step."""
        if not self.steps_taken:
            return
        p, verb = self.progress, "stopped" if self.is_stopped() else "done"
        text = f"{verb}: {count_text(self.steps_taken, 'step')} in {duration(time.perf_counter() - p.began)}"
        if math.isfinite(p.best_val_loss):
            text += f", best val loss {p.best_val_loss:.4f}"
            text += f" at step {p.best_step}" if p.best_step != NONE else ""
            if bits := self.reader.data.bits_per_byte(p.best_val_loss):
                text += f", {bits:.4f} bits per byte"
        self.logger.print(records.waiting_text(means_of(self.throughout)), text, advice)

    def end(self, weights: str | None) -> None:
        """
        Report the end of the run, or that it stopped early, and close the sinks (all ranks).

        Args:
            weights: the digest of the final weights; None: not known.
        """
        facts = {"spans_ms": over_ranks(gather_objects(self.clock.medians())), "weights": weights}
        if not self.is_stopped():
            self.logger.event("end", **facts)
            return
        is_saved = is_run(self.config["out_dir"])
        hint = "resume with --init_from=auto" if is_saved else "there is no checkpoint to resume"
        text = f"stopped on request before step {self.progress.step}: {hint}"
        self.logger.event("preempted", text, signal=self.stop.agreed, reason=self.stop.reason(), **facts)
