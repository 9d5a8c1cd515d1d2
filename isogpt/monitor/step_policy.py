"""What follows from a step's numbers: the step is taken, it is left out, or the run ends."""

import gc
import math
from dataclasses import dataclass, field
from heapq import nlargest
from textwrap import shorten

import numpy as np

from isogpt.checkpoint.folder import exclude_steps
from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.state import TrainState
from isogpt.common.console import RANKS_SHOWN, ranks_text
from isogpt.data.reader import Reader
from isogpt.launch.together import Gathered, exit_together, gather_objects, is_main
from isogpt.monitor.run_report import Launched, RunReport
from isogpt.nn.module_values import plain_values
from isogpt.parallel.compare_weights import check_equal_weights
from isogpt.parallel.compression import keeps_errors
from isogpt.parallel.gradients import Sums, gradient_norms
from isogpt.training.recent_steps import ENOUGH, PATIENCE
from isogpt.training.step_numbers import StepNumbers

# why the weights of replicas can differ after the first step of a launch
CAUSE = ": each rank has drawn other random numbers, or has changed weights in the forward pass"


@dataclass
class StepPolicy:
    """
    Decides about each step from the numbers of all ranks, so that all ranks decide alike. PATIENCE steps in
    succession that are not finite end the run.

    The host waits for the numbers of a step when it has launched the next one, so that a GPU need not wait
    for the host. The device itself leaves out an update that is not finite: the step after it computes what
    it would have computed without that step.

    Args:
        skip_steps: which steps are left out: none, those whose loss or gradient is not finite (nan), or also
            those in which one of them is far above the last ones (spikes).
    """

    skip_steps: str
    state: TrainState
    reader: Reader
    report: RunReport
    gradients: Sums
    in_flight: list[Launched] = field(default_factory=list)  # see Progress.launched
    not_finite: list[int] = field(default_factory=list)  # the steps since the last one that was
    updates: int = 0  # how often this launch has changed the weights; 2: at least twice
    values: dict[str, str] | None = None  # see plain_values, after the first update

    def __post_init__(self) -> None:
        self.saver, self.logger = self.report.saver, self.report.logger
        config, compression = self.report.config, self.state.compression
        names = [f"{name}_interval" for name in ("eval", "save", "check_ranks", "sample", "stats")]
        self.intervals = [config[name] for name in names if config[name]]
        if self.state.islands:
            self.intervals.append(self.reader.plan.local_steps)
        # a step that is not taken leaves errors behind, see Compression.forget
        self.keeps_errors = compression is not None and keeps_errors(compression.kind)

    def needs_outcomes(self, step: int) -> bool:
        """
        Whether the outcome of all steps before `step` is needed: at the end, by what the loop does between
        steps, by an average of islands and by errors of a compression; and to compare weights after the
        first two updates.
        """
        is_due = any(step % interval == 0 for interval in self.intervals)
        is_left_out = step > self.report.run.max_iters or step in self.state.progress.excluded
        return is_due or is_left_out or self.keeps_errors or self.updates < 2

    def launched(self, gathered: Gathered[StepNumbers], lr: float, **more: float) -> None:
        """
        Decide about the step before the one that is launched, and about the latter too if what follows needs
        its outcome (all ranks). Waits until the device has computed them.

        Args:
            lr: of the step that is launched.
            more: further numbers for its record.
        """
        clock, progress, stop = self.report.clock, self.state.progress, self.report.run.stop
        clock.lap("optimizer")
        keeps = 0 if self.needs_outcomes(self.state.next_step + 1) else 1
        facts = (self.report.routing, self.gradients.norms, more, self.report.spans)
        self.in_flight.append(Launched(gathered, lr, *facts))
        gc.collect(1)  # what was allocated since the step before; the GPU is still busy
        known = []
        while len(self.in_flight) > (0 if stop.agreed else keeps):
            step = self.in_flight.pop(0)
            known.append((step, self.report.read(step)))
        clock.lap("agree")
        progress.launched = 0  # the watchdog names the step that is settled
        for step, numbers in known:
            self.settle(step, numbers)
        progress.launched = len(self.in_flight)
        clock.step(pauses=not self.in_flight)  # an average of islands is a part of the next step, and watched

    def check_ranks(self, interval: int) -> None:
        """
        Compare the weights of ranks that hold the same parameters, every `interval` steps (0: never) and
        after the launch's first update; and after the second one, plain Python values of modules with those
        after the first (all ranks). Exits with a message if some differ.
        """
        model, step = self.state.model, self.state.next_step
        is_first = self.updates == 1 and self.values is None
        # with grad_sync never, which measures communication, they must differ
        compares_first = is_first and self.reader.plan.grad_sync != "never"
        if compares_first or (interval and step % interval == 0):
            cause = CAUSE if compares_first else ""
            check_equal_weights(model, self.reader.mesh, step, self.logger.failed, cause)
        if is_first:
            self.values = plain_values(model)
        elif self.updates == 2 and self.values:
            problems = gather_objects(problem_of_values(self.values, plain_values(model)))
            self.values = {}
            with exit_together(self.logger.failed):
                if problem := next(filter(None, problems), ""):
                    raise ValueError(problem)

    def settle(self, launched: Launched, numbers: StepNumbers) -> None:
        """
        Report and count a step that is taken, as clip_and_step has decided; else leave it out, and exit with
        a message if the run must end (all ranks).
        """
        self.state.progress.recent_steps.begin()
        if not self.is_taken(numbers):
            self.skip(launched, numbers)
            return
        if self.updates < 2 and numbers.is_finite:  # if float16 overflows, it is not
            self.updates += 1
        self.report.step(launched, numbers)
        self.state.advance()  # averages the weights of islands, if that is due

    def is_taken(self, numbers: StepNumbers) -> bool:
        """
        Return whether a step is taken. A finite step that is taken is remembered. A spike is counted and
        recorded, but printed only if it is skipped, since ordinary runs have some.

        A float16 step whose gradient overflowed because of the loss scale counts as taken: the optimizer has
        left the step out, and the scale is halved. A scale of 1 cannot be the cause.
        """
        step, recent_steps = self.state.step, self.state.progress.recent_steps
        if not numbers.is_finite:
            is_loss_finite = numbers.loss.isfinite().all()
            has_overflowed = bool(is_loss_finite and numbers.loss_scale.max() > 1)
            self.not_finite = [] if has_overflowed else [*self.not_finite, step]
            return has_overflowed
        self.not_finite = []
        skips_spikes = self.skip_steps == "spikes"
        is_taken = bool(numbers.is_update(skips_spikes))
        names = ("loss", "loss_limit", "grad_norm", "grad_norm_limit")
        facts = {name: getattr(numbers, name).mean().item() for name in names}
        if not numbers.is_update(skips_spikes=True):
            self.report.spikes += 1
            values = ", ".join(f"{name} {value:.4g}" for name, value in facts.items())
            text = "" if is_taken else f"warning: step {step} is a spike: {values}: the step is skipped"
            self.logger.event("spike", text, **facts, skipped=not is_taken)
        if is_taken:
            recent_steps.add(facts["loss"], facts["grad_norm"])
        elif recent_steps.skip():
            text = "spikes in succession are not due to a single batch"
            self.logger.print(f"warning: so many {text}: the next {ENOUGH} steps set new limits")
        return is_taken

    def skip(self, launched: Launched, numbers: StepNumbers) -> None:
        """
        Leave out a step that is not taken (all ranks). Exits with a message if the step is not finite and the
        run must end; and if a rank could not read its data, after the state before the step has been saved:
        a step after it, which may be launched, has left the weights as they were, for the same reason.
        """
        self.report.clock.previous = None  # the watchdog expects no progress: a disk may be slow
        if self.state.compression:
            self.state.compression.forget()  # errors, which contain the step's gradient
        with exit_together(lambda reason: self.saver.save_and_fail(self.state, reason)):
            if self.reader.problems:
                raise self.reader.problems[0]
        if not numbers.is_finite:  # else it is a spike
            self.report_not_finite(launched, numbers)
        self.state.progress.skip()

    def report_not_finite(self, launched: Launched, numbers: StepNumbers) -> None:
        """
        Report which ranks computed a loss that is not finite, what these ranks read, and the largest
        gradients (all ranks). Exits if the run must end.
        """
        loss, norm, step = numbers.loss, numbers.grad_norm.item(), self.state.step
        guilty = (~loss.isfinite()).nonzero().flatten().tolist()
        guilty = guilty or [*range(len(loss))]
        starts, windows = self.reader.starts(step), {}
        for rank in guilty[:RANKS_SHOWN]:
            share = self.reader.share_of_rank(rank)
            picked = [share.pick(starts, m) for m in range(share.micro_steps)]
            windows[rank] = np.concatenate(picked)[:64].tolist()  # the tokens at which its rows start
        norms = gradient_norms(self.state.model, launched.norms).items()
        largest = nlargest(5, norms, lambda item: np.nan_to_num(item[1], nan=math.inf))
        gradients = ", ".join(f"{name} {value:.3g}" for name, value in largest)
        rows = "; ".join(f"{window[:8]} (rank {rank})" for rank, window in windows.items())
        what = f"loss {loss.mean():.4g}, gradient norm {norm:.3g}"
        problem = f"step {step}: not finite on {ranks_text(guilty)}: {what}"
        problem += f"; largest gradients {gradients}; rows start at token {rows}"
        is_end = self.skip_steps == "none" or len(self.not_finite) == PATIENCE
        facts = {"loss": loss.tolist(), "grad_norm": norm, "ranks": guilty, "windows": windows}
        text = "" if is_end else f"warning: {problem}: the step is skipped"
        self.logger.event("not_finite", text, **facts, largest_gradients=dict(largest))
        if is_end:
            self.saver.wait()  # a checkpoint may be under way
            with exit_together(self.logger.failed):
                if is_main():  # rank 0 prints the message
                    raise ValueError(f"{problem}; {self.advice()}")

    def advice(self) -> str:
        """
        Return what a user can do when the run ends. If steps were skipped, exclude them from each resume.
        """
        folder, skips = self.saver.run_folder, self.skip_steps != "none"
        advice = "a lower --learning_rate"
        if not skips:
            advice += ", or --skip_steps=nan"
        if not is_run(str(folder.path)):
            return f"start again with {advice}"
        advice = f"no checkpoint was lost: resume with --init_from=resume and {advice}"
        if skips:
            steps = self.not_finite
            exclude_steps(folder, self.state.progress.excluded.union(steps))
            advice = f"each resume leaves out steps {', '.join(map(str, steps))}; {advice}"
        return advice


def problem_of_values(before: dict[str, str], after: dict[str, str]) -> str:
    """
    Compare plain Python values of modules between two steps; train.py sets `step`, see GPT.set_step.

    Returns:
        '', or a message for the user about the first one that differs.
    """
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    name = min((name for name in changed if name.rpartition(".")[2] != "step"), default="")
    if not name:
        return ""
    was, now = (shorten(values.get(name, "missing"), 40) for values in (before, after))
    problem = f"a step changes model.{name}, a Python value, from {was} to {now}"
    advice = "compute it from self.step, which train.py sets (write self.step = 0 in __init__)"
    advice += ", or store it in a parameter with requires_grad=False, or in state.extra in train.py"
    advice += "; a number for a log can stay a tensor"
    return f"{problem}: checkpoints contain no such values: {advice}"
