"""The report on a run in progress: steps, evaluations, anomalies and the end."""

import math
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.measures import NONE
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.state import TrainState
from isogpt.common.console import count_text, duration
from isogpt.data.reader import Reader
from isogpt.launch.process_group import Ranks
from isogpt.launch.together import Gathered, gather_numbers, gather_objects
from isogpt.monitor import banner, records, slow_ranks
from isogpt.monitor.code_version import code_version
from isogpt.monitor.log import Logger
from isogpt.monitor.samples import how_to_sample
from isogpt.nn.counts import flops_per_token
from isogpt.parallel.compare_weights import weights_digest
from isogpt.parallel.compilation import compile_report
from isogpt.parallel.data_parallel import Norms
from isogpt.parallel.parallelize import take_routing
from isogpt.run.resolve import Run
from isogpt.speed.clock import Clock, over_ranks
from isogpt.speed.devices import Peak, find_peak, fraction_of_peak
from isogpt.speed.usage import memory_gb, utilization
from isogpt.training.optim import describe_updates
from isogpt.training.step_numbers import StepNumbers

SLOW_STEPS = 3  # the first steps compile, allocate memory and start threads: no later step takes as long
MOST_MEASUREMENTS = 4  # of a peak that steps exceed


def means_of(sums: Counter) -> dict[str, float | None]:
    """Return the means of numbers that were added up over sums["steps"] steps; None: not known."""
    return records.known({name: total / sums["steps"] for name, total in sums.items() if name != "steps"})


@dataclass
class Launched:
    """
    A step that is launched, which a device may still compute.

    Args:
        gathered: the numbers of all ranks, which arrive when it is computed.
        routing: see parallelize.take_routing; arrives with these.
        norms: of its gradients on this rank, see gradients.norms_of.
        more: further numbers for its record.
        step_s: the seconds that it has taken on a GPU; None: they are among the numbers.
    """

    gathered: Gathered[StepNumbers]
    lr: float
    routing: Tensor | None
    norms: Norms
    more: dict[str, float]
    step_s: float | None = None


@dataclass
class RunReport:
    """
    Gathers what all ranks decide from and report after a step, and turns the numbers of steps and evaluations
    into records and warnings for the logger, whose sinks are on rank 0.

    Constructed just before the first step.
    """

    run: Run
    ranks: Ranks
    state: TrainState
    reader: Reader
    saver: Saver
    clock: Clock
    logger: Logger
    flops_per_step: float
    peak: Peak  # if it is unknown, the mfu is None
    measurements: int = 1  # of the peak
    steps_taken: int = 0  # by this process
    spikes: int = 0  # steps, taken or skipped, see RecentSteps
    at_full_speed: float = 0.0  # when the first SLOW_STEPS steps had been taken
    routing: Tensor | None = None  # of the step that is launched last
    slow_steps: dict = field(default_factory=dict)  # for how many logged steps a rank is slow
    since_log: Counter = field(default_factory=Counter)  # sums over the steps since the last logged step
    throughout: Counter = field(default_factory=Counter)  # sums over the steps at full speed

    def __post_init__(self) -> None:
        self.config, self.progress = self.run.config, self.state.progress
        self.progress.began = time.perf_counter()

    def is_logged(self, step: int) -> bool:
        """Whether this step is logged."""
        return step % self.config["log_interval"] == 0

    def gather(self, loss: Tensor, grad_square: tuple[Tensor, Tensor | float]) -> Gathered:
        """
        Gather the StepNumbers of all ranks (all ranks). This is the one small collective of a step; with
        experts, there is a second one if the step is logged. The host does not wait for a GPU.

        Args:
            loss, grad_square: see StepNumbers.
        """
        self.clock.lap("norm")
        device, model = self.reader.device, self.state.model
        self.routing = take_routing(model, self.is_logged(self.state.next_step), device)
        loss_limit, grad_norm_limit = self.progress.recent_steps.limits(self.progress.launched)
        # a GPU computes the numbers later: what it gathers is the time of the latest step that is known
        step_s = self.clock.latest_s if self.clock.on_gpu else self.clock.arrive()
        gathered = gather_numbers(
            StepNumbers(
                # a step with padding in place of data must not be taken, on any rank: see StepPolicy.skip
                loss=math.nan if self.reader.problems else loss,
                grad_square=grad_square[0],
                grad_square_fine=grad_square[1],
                step_ms=step_s * 1e3,
                data_ms=self.clock.milliseconds("data", self.clock.spans),
                memory_gb=memory_gb(device),
                forward_ms=self.clock.steps[-1].get("forward", 0.0),
                # 0, a signal, or the time limit
                stop=self.run.stop.code(step_s, self.saver.seconds_at_end),
                # get_scale would wait for the device
                loss_scale=self.state.scaler.scale(torch.ones((), device=device)),
                waiting=self.clock.waiting_share(),
                loss_limit=loss_limit,
                grad_norm_limit=grad_norm_limit,
            ),
            device,
        )
        if model.routing is not None:  # a step that is not finite adds nothing to the next one that is logged
            is_finite = gathered.on(device).is_finite
            model.routing = model.routing.where(is_finite, 0.0)
        self.clock.lap("agree")
        return gathered

    def read(self, launched: Launched) -> StepNumbers:
        """Return the numbers of a step: waits for a GPU, unless clip_and_step has done so."""
        numbers = launched.gathered.read()
        if self.clock.on_gpu:
            launched.step_s = self.clock.arrive()
        self.run.stop.decide(numbers.stop)
        return numbers

    def evaluation(self, values: dict[str, float | str]) -> None:
        """Report an evaluation: its losses, and with exact the digest of the weights."""
        p = self.progress
        record = {"iter": p.step, "tokens": p.tokens, "seconds": p.seconds, **values}
        self.logger.write(record, records.evaluation_line(record))

    def step(self, launched: Launched, numbers: StepNumbers) -> None:
        """
        Report a step that was taken, if it is logged, and what is wrong with it; and a checkpoint that was
        written in the background, or could not be (all ranks).
        """
        self.steps_taken += 1
        if self.steps_taken == 1:
            self.logger.print(compile_report())
        if self.steps_taken == SLOW_STEPS:
            self.at_full_speed = time.perf_counter()
        is_logged = self.is_logged(self.progress.step)
        if is_logged:
            self.check_peak(self.flops_per_step / numbers.step_ms.mean().item() * 1e3)
        if launched.step_s is not None:  # on a GPU; ranks wait for each other, so a step takes as long on all
            numbers = numbers._replace(step_ms=torch.tensor([launched.step_s * 1e3]))
        sums = records.waiting_percent(numbers) | {"loss_mean": numbers.loss.mean().item(), "steps": 1}
        self.since_log.update(sums)
        if self.steps_taken > SLOW_STEPS:
            self.throughout.update(sums)
        if is_logged:
            times = {"forward ms": numbers.forward_ms.numpy(), "data wait ms": numbers.data_ms.numpy()}
            columns = times | {"memory GB": numbers.memory_gb.numpy()}
            for slow in slow_ranks.slow_ranks(columns, self.slow_steps):
                self.logger.event("slow_rank", f"warning: a slow rank: {slow}", what=slow)
            record = self.record(launched, numbers) | launched.more
            self.logger.write(record, records.step_line(record))
        self.saver.poll()

    def record(self, launched: Launched, numbers: StepNumbers) -> dict:
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
            "lr": launched.lr,
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
        if launched.routing is not None:
            record |= records.routing_record(launched.routing, p.tokens_per_step)
        self.since_log.clear()
        p.totals.add(record, is_timed=self.steps_taken > SLOW_STEPS)
        return record

    def check_peak(self, flops_per_s: float) -> None:
        """Measure the peak again if a step was faster: the machine was then busy at the start (all ranks)."""
        is_too_low = "measured" in self.peak.source and flops_per_s > self.peak.flops
        if is_too_low and self.measurements < MOST_MEASUREMENTS:
            self.measurements += 1
            began = time.perf_counter()
            again = find_peak(self.reader.device, self.reader.plan.dtype)
            self.clock.began += time.perf_counter() - began  # not a part of a step
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
        return self.run.stop.agreed != 0 and self.progress.is_unfinished(self.run.max_iters)

    def is_complete(self) -> bool:
        """Whether a complete run was resumed, so that nothing is left to do. If so, say what continues it."""
        if self.config["eval_only"] or self.progress.is_unfinished(self.run.max_iters):
            return False
        where = f"{self.config['out_dir']} is at step {self.progress.step}, which is beyond max_iters"
        advice = f"to continue, set {self.run.schedule.to_continue(self.progress.step)} or so"
        self.logger.print(f"{where}: {advice}")
        return True

    def end(self) -> int:
        """
        End the run: save its state if it was stopped, report how it ended, and close the sinks (all ranks).
        Exits with a message if the last checkpoint could not be written.

        Returns:
            The exit status: 128 + the signal that stopped the run before its end. 0 under a launcher, which
            would restart the run after an error, and after the time limit.
        """
        stop = self.run.stop
        stopped_by = stop.reason() if self.is_stopped() else ""
        if stop.agreed:
            self.saver.save(self.state)
        self.saver.wait()
        if self.steps_taken:
            self.summary()
        # writes PREEMPTED before the plot is drawn, for which mpirun may leave no time
        self.saver.end(self.state, stopped_by, self.steps_taken)
        facts = {"spans_ms": over_ranks(gather_objects(self.clock.medians())), "weights": None}
        if self.run.plan.exact:
            facts["weights"] = weights_digest(self.state.model, self.run.mesh)
            self.logger.print(f"weights: SHA-256 {facts['weights']} before step {self.progress.step}")
        if stopped_by:
            is_saved = is_run(self.config["out_dir"])
            hint = "resume with --init_from=auto" if is_saved else "there is no checkpoint to resume"
            text = f"stopped on request before step {self.progress.step}: {hint}"
            self.logger.event("preempted", text, signal=stop.agreed, reason=stopped_by, **facts)
        else:
            self.logger.event("end", **facts)
        # last, since whoever stopped the run may not wait for it
        self.saver.wait_for_mirror(stop.seconds_left())
        was_signalled = stopped_by and stop.agreed > 0
        return 128 + stop.agreed if was_signalled and not self.ranks.has_launcher else 0

    def summary(self) -> None:
        """Report how long the run has trained, its best loss, and how to sample from it."""
        p, verb = self.progress, "stopped" if self.is_stopped() else "done"
        text = f"{verb}: {count_text(self.steps_taken, 'step')} in {duration(time.perf_counter() - p.began)}"
        if math.isfinite(p.best_val_loss):
            text += f", best val loss {p.best_val_loss:.4f}"
            text += f" at step {p.best_step}" if p.best_step != NONE else ""
            if bits := self.reader.data.bits_per_byte(p.best_val_loss):
                text += f", {bits:.4f} bits per byte"
        text += f", {count_text(self.spikes, 'spike')}" if self.spikes else ""
        advice = how_to_sample(self.config["out_dir"], self.run.vocabulary)
        self.logger.print(records.waiting_text(means_of(self.throughout)), text, advice)


def open_report(
    run: Run, ranks: Ranks, state: TrainState, reader: Reader, saver: Saver, clock: Clock, logger: Logger
) -> RunReport:
    """Report what the run is about to do (all ranks), and return what reports its steps."""
    plan, tokens_per_step = run.plan, state.progress.tokens_per_step
    peak = find_peak(ranks.device, plan.dtype)
    flops_per_step = tokens_per_step * flops_per_token(plan.counts, state.model.config)
    logger.print(
        *banner.about_model(run.data, plan, run.start.description),
        *banner.about_ranks(ranks, plan, run.mesh),
        *run.checked,
        f"optim:   {describe_updates(state.model, state.optimizers, run.mesh)}",
        *banner.about_step(run.config, reader),
        *banner.about_machine(ranks, plan, peak),
        *(f"note:    {note}" for note in run.notes),
    )
    logger.event(
        "resume" if run.start.is_resume else "start",
        config=run.recorded,
        world_size=ranks.world_size,
        dtype=plan.dtype,
        micro_batch=plan.micro_batch,
        parameters=banner.parameter_count(plan.counts),
        peak_flops=peak.flops,
        flops_per_step=flops_per_step,
        tokens_per_step=tokens_per_step,
        measures=state.progress.measures,
        **run.data.validation(),
        code=run.code,
        **code_version(ranks),
    )
    return RunReport(run, ranks, state, reader, saver, clock, logger, flops_per_step, peak)
