"""The policy for steps whose loss or gradient is not finite: skip the step, or stop."""

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch.nn as nn

from isogpt.checkpoint.folder import RunFolder, exclude_steps
from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.state import TrainState
from isogpt.common.console import RANKS_SHOWN, ranks_text, shortened
from isogpt.data.reader import Reader
from isogpt.launch.together import exit_together, is_main
from isogpt.monitor.log import Logger
from isogpt.monitor.spikes import SpikePolicy
from isogpt.parallel.gradients import gradient_norms
from isogpt.training.step_numbers import StepNumbers

PATIENCE = 3  # consecutive steps that are not finite until the run ends


@dataclass
class NanPolicy:
    """
    Decides about each step from the numbers of all ranks, so that all ranks decide alike; `spikes` decides
    about finite steps.
    """

    on_nan: str  # stop or skip
    spikes: SpikePolicy
    not_finite: list[int] = field(default_factory=list)  # the steps since the last finite step

    def takes(self, numbers: StepNumbers, step: int) -> bool:
        """
        Return whether a step is taken; `recover` does what must be done if it is not.

        A finite step is taken, unless it is a spike that is skipped. A float16 step whose gradient overflowed
        because of the loss scale counts as taken: the optimizer has left the step out, and the scale is
        halved. A scale of 1 cannot be the cause.
        """
        has_overflowed = numbers.loss.isfinite().all() and numbers.loss_scale.max() > 1
        is_finite = bool(numbers.is_finite)
        if not (is_finite or has_overflowed):
            self.not_finite.append(step)
            return False
        self.not_finite = []
        return self.spikes.takes(numbers, step) if is_finite else True

    @property
    def must_stop(self) -> bool:
        """Whether the run ends after a step that is not finite."""
        return self.on_nan == "stop" or len(self.not_finite) == PATIENCE

    def recover(
        self, numbers: StepNumbers, state: TrainState, reader: Reader, saver: Saver, logger: Logger
    ) -> None:
        """
        Report a step that is not finite, while the gradients are still there. Then skip the step, or exit
        with a message (all ranks). A spike, which `takes` has reported, is skipped.

        If the step is not finite because a rank could not read its data, the state before the step is saved,
        and the run exits with a message.
        """
        state.slow_network.forget()  # compression errors, which contain the step's gradient
        with exit_together(partial(saver.save_and_fail, state)):
            if reader.problems:
                raise reader.problems[0]
        if not numbers.is_finite:  # else it is a spike
            problem, facts = describe_not_finite(state.step, numbers, state.model, reader)
            text = "" if self.must_stop else f"warning: {problem}: the step is skipped"
            logger.event("not_finite", text, **facts)
            if self.must_stop:
                saver.wait()  # a checkpoint may be under way
                with exit_together(logger.failed):
                    if is_main():  # rank 0 prints the message
                        raise ValueError(
                            f"{problem}; {self.advice(state.progress.excluded, saver.run_folder)}"
                        )
        state.progress.skip()
        state.model.reset_routing(reader.device)  # the routers' sums contain the step's, perhaps not finite

    def advice(self, excluded: set[int], folder: RunFolder) -> str:
        """
        Return what a user can do when the run ends, after steps that were skipped and are not finite either
        have been excluded from each resume.
        """
        has_checkpoint = is_run(str(folder.path))
        advice = "the step was not taken and no checkpoint was lost. "
        if has_checkpoint and self.on_nan == "skip":
            exclude_steps(folder, excluded.union(self.not_finite))
            left_out = ", ".join(map(str, self.not_finite))
            advice += f"Each resume leaves out steps {left_out}. "
        command = "Resume with --init_from=resume and" if has_checkpoint else "Start again with"
        skip = ", or --on_nan=skip" if self.on_nan == "stop" else ""
        return f"{advice}{command} a lower --learning_rate{skip}"


def describe_not_finite(
    step: int, numbers: StepNumbers, model: nn.Module, reader: Reader
) -> tuple[str, dict]:
    """
    Describe which ranks computed a loss that is not finite, what these ranks read, and the largest gradients
    (all ranks).

    Returns:
        (a sentence for the user, the facts for metrics.jsonl)
    """
    everyone, starts = range(len(numbers.loss)), reader.starts(step)
    guilty = [r for r in everyone if not numbers.loss[r].isfinite()] or list(everyone)
    rows_read = {}  # {rank: the tokens at which its rows start}
    for r in guilty[:RANKS_SHOWN]:
        share = reader.share_of_rank(r)
        picked = [share.pick(starts, m) for m in range(share.micro_steps)]
        rows_read[r] = np.concatenate(picked)[:64].tolist()
    ranked = sorted(
        gradient_norms(model).items(),
        reverse=True,
        key=lambda item: item[1] if math.isfinite(item[1]) else math.inf,
    )
    facts = {
        "loss": numbers.loss.tolist(),
        "grad_norm": numbers.grad_norm.item(),
        "ranks": guilty,
        "windows": rows_read,
        "largest_gradients": dict(ranked[:5]),
    }
    gradients = ", ".join(f"{name} {norm:.3g}" for name, norm in ranked[:5])
    rows = "; ".join(f"{first[:8]} (rank {r})" for r, first in list(rows_read.items())[:4])
    losses = shortened([*map(str, facts["loss"])], RANKS_SHOWN)
    text = (
        f"step {step}: not finite on {ranks_text(guilty)}: loss by rank [{losses}], gradient "
        f"norm {facts['grad_norm']:.3g}; largest gradients {gradients}; rows start at token {rows}"
    )
    return text, facts
