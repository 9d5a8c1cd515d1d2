"""The policy for steps whose loss or gradient is not finite: skip the step, roll back, or stop."""

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch.nn as nn

from isogpt.checkpoint import folder
from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.search import FoundCheckpoint, share_found
from isogpt.data.reader import Reader
from isogpt.launch.together import do_together, exit_together, is_main
from isogpt.monitor.log import Logger
from isogpt.parallel.gradients import gradient_norms
from isogpt.training.step_numbers import StepNumbers


@dataclass
class NanPolicy:
    """What to do about a step whose loss or gradient is not finite; the same on all ranks."""

    on_nan: str  # stop or skip
    patience: int  # consecutive steps until a rollback
    max_rollbacks: int
    consecutive: list[int] = field(default_factory=list)  # the steps since the last finite step
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
        Whether the step needs no report (the same on all ranks). A finite step needs none. Neither does a
        float16 step whose gradient overflowed because of the loss scale, which is then halved. A scale of 1
        cannot be the cause.
        """
        accepted = bool(numbers.is_finite or (numbers.loss.isfinite().all() and numbers.loss_scale.max() > 1))
        if accepted:
            self.consecutive.clear()
        return accepted

    def handle(
        self,
        numbers: StepNumbers,
        progress: Progress,
        model: nn.Module,
        reader: Reader,
        saver: Saver,
        logger: Logger,
    ) -> FoundCheckpoint | None:
        """
        Report a step that is not finite and move past it (all ranks).

        Returns:
            The checkpoint to roll back to; None if the step is skipped. Exits if the run cannot continue.
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
                    raise ValueError(f"{text}; {self.advice(is_run(saver.run_folder.path))}")
        return self.find_rollback(text, saver, logger)

    def find_rollback(self, text: str, saver: Saver, logger: Logger) -> FoundCheckpoint:
        """
        Find the checkpoint to roll back to (all ranks; rank 0 looks). Damaged checkpoints are reported. Exits
        with a message that begins with `text` if there is no checkpoint.
        """
        found, reports = do_together(partial(look_for_rollback, saver), logger.failed)
        for report in reports:
            logger.print(f"warning: {report}")
        with exit_together(logger.failed):
            if is_main() and not found:
                advice = "start again with a lower --learning_rate"
                raise ValueError(f"{text}; there is no valid checkpoint to roll back to: {advice}")
        return share_found(found, str(saver.run_folder.path))

    def rolled_back(self, progress: Progress, logger: Logger) -> None:
        """Exclude the consecutive steps after progress was rewound to a checkpoint (all ranks)."""
        excluded, self.consecutive, step = self.consecutive, [], progress.step
        self.rollbacks += 1
        progress.skipped.update(excluded)
        logger.event("rollback", to=step, left_out=sorted(progress.skipped), rollback=self.rollbacks)
        logger.print(
            f"warning: {len(excluded)} steps not finite: rolled back to step {step}, excluding {excluded}"
        )
        logger.cut_back()

    def advice(self, can_resume: bool) -> str:
        """What a user can do when the run ends."""
        command = "Resume with --init_from=resume and" if can_resume else "Start again with"
        skip = ", or --on_nan=skip" if self.on_nan == "stop" else ""
        return f"the step was not taken and no checkpoint was lost. {command} a lower --learning_rate{skip}"


def look_for_rollback(saver: Saver) -> tuple[FoundCheckpoint | None, list[str]]:
    """Return what folder.find_rollback returns, on rank 0; nothing on the other ranks."""
    return folder.find_rollback(saver.run_folder) if is_main() else (None, [])


def describe_not_finite(
    step: int, numbers: StepNumbers, model: nn.Module, reader: Reader
) -> tuple[str, dict]:
    """
    Describe which ranks computed a loss that is not finite, what they read, and the largest gradients (all
    ranks).

    Returns:
        (a sentence for the user, the facts for metrics.jsonl)
    """
    everyone, starts = range(len(numbers.loss)), reader.starts(step)
    guilty = [r for r in everyone if not numbers.loss[r].isfinite()] or list(everyone)
    rows_read = {}  # where each rank's rows start
    for r in guilty:
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
    text = (
        f"step {step}: not finite on rank {', '.join(map(str, guilty))}: loss by rank {facts['loss']}, "
        "gradient "
        f"norm {facts['grad_norm']:.3g}; largest gradients {gradients}; rows start at token {rows}"
    )
    return text, facts
