"""What follows from a step's numbers: the step is taken, it is left out, or the run ends."""

import math
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest

import numpy as np

from isogpt.checkpoint.folder import exclude_steps
from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.state import TrainState
from isogpt.common.console import RANKS_SHOWN, ranks_text
from isogpt.data.reader import Reader
from isogpt.launch.together import exit_together, is_main
from isogpt.monitor.log import Logger
from isogpt.parallel.gradients import gradient_norms
from isogpt.training.recent_steps import ENOUGH
from isogpt.training.step_numbers import StepNumbers

PATIENCE = 3  # steps in succession that are not finite until the run ends


@dataclass
class StepPolicy:
    """
    Decides about each step from the numbers of all ranks, so that all ranks decide alike.

    Args:
        on_nan: stop or skip, if the loss or the gradient is not finite.
        on_spike: report or skip, if one of them is far above those of the last steps.
    """

    on_nan: str
    on_spike: str
    state: TrainState
    reader: Reader
    saver: Saver
    logger: Logger
    not_finite: list[int] = field(default_factory=list)  # the steps since the last one that was

    def takes(self, numbers: StepNumbers) -> bool:
        """
        Return whether a step is taken; `skip` does what must be done if it is not.

        A finite step is taken, unless it is a spike that is skipped. A float16 step whose gradient overflowed
        because of the loss scale counts as taken: the optimizer has left the step out, and the scale is
        halved. A scale of 1 cannot be the cause.
        """
        has_overflowed = numbers.loss.isfinite().all() and numbers.loss_scale.max() > 1
        if not (numbers.is_finite or has_overflowed):
            self.not_finite.append(self.state.step)
            return False
        self.not_finite = []
        return self.takes_finite(numbers) if numbers.is_finite else True

    def takes_finite(self, numbers: StepNumbers) -> bool:
        """
        Return whether a finite step is taken, as clip_and_step has decided. A step that is taken is
        remembered, and a spike is reported.
        """
        values = {"loss": numbers.loss.mean().item(), "grad_norm": numbers.grad_norm.item()}
        limits = {"loss": numbers.loss_limit[0].item(), "grad_norm": numbers.grad_norm_limit[0].item()}
        above = [name for name in values if values[name] > limits[name]]
        is_taken = not above or self.on_spike == "report"
        if above:
            spikes = [
                f"{name.replace('_', ' ')} {values[name]:.4g} (limit {limits[name]:.4g})" for name in above
            ]
            follows = "; --on_spike=skip would leave it out" if is_taken else ": the step is skipped"
            text = f"warning: step {self.state.step} is a spike: {' and '.join(spikes)}{follows}"
            facts = values | {f"{name}_limit": limit for name, limit in limits.items()}
            self.logger.event("spike", text, **facts, skipped=not is_taken)
        recent_steps = self.state.progress.recent_steps
        if is_taken:
            recent_steps.add(**values)
        elif recent_steps.skip():
            text = "warning: so many spikes in succession are not due to a single batch: the next "
            self.logger.print(f"{text}{ENOUGH} steps are taken and set new limits")
        return is_taken

    def skip(self, numbers: StepNumbers) -> None:
        """
        Leave out a step that is not taken, while its gradients are still there (all ranks). Exits with a
        message if the step is not finite and the run must end; and if a rank could not read its data, after
        the state before the step has been saved.
        """
        self.state.slow_network.forget()  # compression errors, which contain the step's gradient
        with exit_together(partial(self.saver.save_and_fail, self.state)):
            if self.reader.problems:
                raise self.reader.problems[0]
        if not numbers.is_finite:  # else it is a spike
            problem, facts = self.describe(numbers)
            is_end = self.on_nan == "stop" or len(self.not_finite) == PATIENCE
            text = "" if is_end else f"warning: {problem}: the step is skipped"
            self.logger.event("not_finite", text, **facts)
            if is_end:
                self.saver.wait()  # a checkpoint may be under way
                with exit_together(self.logger.failed):
                    if is_main():  # rank 0 prints the message
                        raise ValueError(f"{problem}; {self.advice()}")
        self.state.progress.skip()
        self.state.model.reset_routing(self.reader.device)  # the routers' sums contain the step's

    def advice(self) -> str:
        """
        Return what a user can do when the run ends. If steps were skipped, exclude them from each resume.
        """
        folder, command = self.saver.run_folder, "start again with"
        if is_run(str(folder.path)):
            command = "no checkpoint was lost: resume with --init_from=resume and"
            if self.on_nan == "skip":
                exclude_steps(folder, self.state.progress.excluded.union(self.not_finite))
                steps = ", ".join(map(str, self.not_finite))
                command = f"each resume leaves out steps {steps}; {command}"
        skip = ", or --on_nan=skip" if self.on_nan == "stop" else ""
        return f"{command} a lower --learning_rate{skip}"

    def describe(self, numbers: StepNumbers) -> tuple[str, dict]:
        """
        Describe which ranks computed a loss that is not finite, what these ranks read, and the largest
        gradients (all ranks).

        Returns:
            (a sentence for the user, the facts for metrics.jsonl)
        """
        loss, norm, step = numbers.loss, numbers.grad_norm.item(), self.state.step
        guilty = (~loss.isfinite()).nonzero().flatten().tolist() or [*range(len(loss))]
        starts, windows = self.reader.starts(step), {}
        for rank in guilty[:RANKS_SHOWN]:
            share = self.reader.share_of_rank(rank)
            picked = [share.pick(starts, m) for m in range(share.micro_steps)]
            windows[rank] = np.concatenate(picked)[:64].tolist()  # the tokens at which its rows start
        norms = gradient_norms(self.state.model)
        names = nlargest(5, norms, lambda name: norms[name] if math.isfinite(norms[name]) else math.inf)
        largest = {name: norms[name] for name in names}
        facts = {"loss": loss.tolist(), "grad_norm": norm, "ranks": guilty, "windows": windows}
        gradients = ", ".join(f"{name} {value:.3g}" for name, value in largest.items())
        rows = "; ".join(f"{window[:8]} (rank {rank})" for rank, window in windows.items())
        text = (
            f"step {step}: not finite on {ranks_text(guilty)}: loss {loss.mean():.4g}, gradient norm "
            f"{norm:.3g}; largest gradients {gradients}; rows start at token {rows}"
        )
        return text, facts | {"largest_gradients": largest}
