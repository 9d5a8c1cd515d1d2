"""The report on a run in progress: steps, evaluations, anomalies and the end."""

import math
import time
from dataclasses import dataclass, field

from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.measures import NONE
from isogpt.common.console import count_text, duration
from isogpt.launch.together import gather_objects, is_main
from isogpt.monitor import banner, records
from isogpt.monitor.log import Logger
from isogpt.monitor.meter import Meter
from isogpt.monitor.records import SLOW_STEPS, Means
from isogpt.monitor.slow_ranks import SlowRanks
from isogpt.parallel.compilation import compile_report
from isogpt.speed.clock import over_ranks
from isogpt.speed.devices import Peak, find_peak
from isogpt.speed.usage import utilization
from isogpt.training.step_numbers import StepNumbers

ENOUGH_STEPS = 7  # with fewer, the time left would be a guess
MOST_MEASUREMENTS = 4  # of a peak that steps exceed


@dataclass
class RunReport:
    """
    Turns the numbers of steps and evaluations into records and warnings for the logger. On ranks other than
    0, the methods only count the steps.

    Constructed just before the first step.
    """

    logger: Logger
    meter: Meter
    max_iters: int
    flops_per_step: float
    peak: Peak  # if it is unknown, the mfu is None
    measurements: int = 1  # of the peak
    steps_taken: int = 0  # by this process
    at_full_speed: float = 0.0  # when the first SLOW_STEPS steps had been taken
    slow_ranks: SlowRanks = field(default_factory=SlowRanks)
    since_log: Means = field(default_factory=Means)  # of the steps since the last logged step
    throughout: Means = field(default_factory=Means)  # of all steps

    def __post_init__(self) -> None:
        self.progress = self.logger.progress
        self.progress.began = time.perf_counter()

    def evaluation(self, values: dict[str, float | str]) -> None:
        """Report an evaluation: its losses, and with exact the digest of the weights."""
        p = self.progress
        self.logger.write({"iter": p.step, "tokens": p.tokens, "seconds": p.seconds, **values})

    def step(self, numbers: StepNumbers, lr: float) -> None:
        """Report a step that was taken, if it is logged, and what is wrong with it (all ranks)."""
        self.steps_taken += 1
        is_logged = self.progress.step % self.meter.log_interval == 0
        if is_logged:
            self.check_peak(self.flops_per_step / numbers.step_ms.mean().item() * 1e3)
        if not is_main():
            return
        if self.steps_taken == 1 and (report := compile_report()):
            self.logger.print(report)
        if self.steps_taken == SLOW_STEPS:
            self.at_full_speed = time.perf_counter()
        waiting = records.waiting_percent(numbers)
        self.throughout.add(waiting)
        self.since_log.add(waiting | {"loss_mean": numbers.loss.mean().item()})
        if is_logged:
            self.look_for_slow_ranks(numbers)
            self.logger.write(self.record(numbers, lr))

    def record(self, numbers: StepNumbers, lr: float) -> dict:
        """Return the record of a step that is logged."""
        record = records.step_record(self.progress, numbers, lr, self.flops_per_step, self.peak.flops)
        self.progress.totals.add(record, is_timed=self.steps_taken > SLOW_STEPS)
        record["gpu_percent"] = utilization(self.meter.device)
        record |= self.since_log.read()
        if self.meter.routing is not None:
            record |= records.routing_record(self.meter.routing, self.progress.tokens_per_step)
        return record | {"left_s": self.seconds_left()}

    def check_peak(self, flops_per_s: float) -> None:
        """Measure the peak again if a step was faster: the machine was then busy at the start (all ranks)."""
        is_too_low = "measured" in self.peak.source and flops_per_s > self.peak.flops
        if is_too_low and self.measurements < MOST_MEASUREMENTS:
            self.measurements += 1
            self.meter.clock.pause()  # not a part of a step
            again = find_peak(self.meter.device, self.meter.reader.plan.dtype)
            self.peak = max(self.peak, again) if again.flops else self.peak
            text = f"peak:    {banner.peak_text(self.peak)}, measured again: a step was faster than the peak"
            self.logger.event("peak", text, peak_flops=self.peak.flops)

    def seconds_left(self) -> float | None:
        """
        Estimate the seconds until the end of the run from all steps but the first, with the evaluations,
        checkpoints and samples between them; None: not known yet.
        """
        steps = self.steps_taken - SLOW_STEPS
        if steps < ENOUGH_STEPS:
            return None
        step_s = (time.perf_counter() - self.at_full_speed) / steps
        return step_s * (self.max_iters - self.progress.step)

    def look_for_slow_ranks(self, numbers: StepNumbers) -> None:
        """Report slow ranks."""
        columns = {
            "forward ms": numbers.forward_ms.numpy(),
            "data wait ms": numbers.data_ms.numpy(),
            "memory GB": numbers.memory_gb.numpy(),
        }
        for slow in self.slow_ranks.seen(columns):
            self.logger.event("slow_rank", f"warning: a slow rank: {slow}", what=slow)

    def is_stopped(self) -> bool:
        """Whether all ranks have agreed to stop before the end, see Progress.is_unfinished."""
        return self.meter.stop.agreed != 0 and self.progress.is_unfinished(self.max_iters)

    def done(self, advice: str) -> None:
        """Report the end of training, and advice for the user; nothing if no step was taken."""
        if not self.steps_taken:
            return
        if waiting := records.waiting_text(self.throughout.read()):
            self.logger.print(waiting)
        p, took = self.progress, duration(time.perf_counter() - self.progress.began)
        verb = "stopped" if self.is_stopped() else "done"
        text = f"{verb}: {count_text(self.steps_taken, 'step')} in {took}"
        # a loss that is as low as the best to the last digit is not repeated
        if p.val_loss is not None and f"{p.val_loss:.4f}" != f"{p.best_val_loss:.4f}":
            text += f", val loss {p.val_loss:.4f}"
        if math.isfinite(p.best_val_loss):
            at_step = f" at step {p.best_step}" if p.best_step != NONE else ", which no checkpoint contains"
            text += f", best val loss {p.best_val_loss:.4f}{at_step}"
            if bits := self.meter.reader.data.bits_per_byte(p.best_val_loss):
                text += f", {bits:.4f} bits per byte"
        self.logger.print(text)
        if advice:
            self.logger.print(advice)

    def end(self, out_dir: str, weights: str | None) -> None:
        """
        Report the end of the run, or that it stopped early, and close the sinks (all ranks).

        Args:
            weights: the digest of the final weights; None: not known.
        """
        stop, medians = self.meter.stop, gather_objects(self.meter.clock.medians())
        facts = {"spans_ms": over_ranks(medians), "weights": weights}
        if not self.is_stopped():
            self.logger.event("end", **facts)
            return
        hint = "there is no checkpoint to resume"
        if is_run(out_dir):
            hint = "resume with --init_from=resume or auto"
        text = f"stopped on request before step {self.progress.step}: {hint}"
        self.logger.event("preempted", text, signal=stop.agreed, reason=stop.reason(), **facts)
