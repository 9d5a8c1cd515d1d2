"""The policy for steps whose loss or gradient is not finite: skip the step, roll back, or stop."""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import torch.nn as nn

from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.state import TrainState
from isogpt.data.reader import Batches, Reader
from isogpt.launch.together import exit_together, is_main
from isogpt.monitor.log import Logger
from isogpt.parallel.gradients import gradient_norms
from isogpt.training.step_numbers import StepNumbers


class Action(Enum):
    """What to do about a step."""

    TAKE = auto()
    SKIP = auto()
    ROLL_BACK = auto()  # to the last checkpoint, and exclude the steps that were not finite
    STOP = auto()


@dataclass(frozen=True)
class Verdict:
    """What to do about a step, and the consecutive steps that were not finite, including this step."""

    action: Action
    not_finite: tuple[int, ...] = ()


@dataclass
class NanPolicy:
    """Decides about each step from the numbers of all ranks, so that the verdict is the same on all ranks."""

    on_nan: str  # stop or skip
    patience: int  # consecutive steps until a rollback
    max_rollbacks: int
    consecutive: list[int] = field(default_factory=list)  # the steps since the last finite step or rollback
    rollbacks: int = 0
    verdict: Verdict = Verdict(Action.TAKE)  # about the last step

    def judge(self, numbers: StepNumbers, step: int) -> Verdict:
        """
        Decide what to do about a step.

        A finite step is taken. So is a float16 step whose gradient overflowed because of the loss scale: the
        optimizer has left the step out, and the scale is halved. A scale of 1 cannot be the cause.
        """
        has_overflowed = numbers.loss.isfinite().all() and numbers.loss_scale.max() > 1
        if numbers.is_finite or has_overflowed:
            self.consecutive.clear()
            return Verdict(Action.TAKE)
        self.consecutive.append(step)
        steps = tuple(self.consecutive)
        if self.on_nan == "stop":
            return Verdict(Action.STOP, steps)
        if len(steps) < self.patience:
            return Verdict(Action.SKIP, steps)
        if self.rollbacks >= self.max_rollbacks:
            return Verdict(Action.STOP, steps)
        self.consecutive.clear()
        self.rollbacks += 1
        return Verdict(Action.ROLL_BACK, steps)

    def takes(self, numbers: StepNumbers, step: int) -> bool:
        """Whether a step is taken; `recover` does what must be done if it is not."""
        self.verdict = self.judge(numbers, step)
        return self.verdict.action is Action.TAKE

    def recover(
        self, numbers: StepNumbers, state: TrainState, reader: Reader, saver: Saver, logger: Logger
    ) -> Batches:
        """
        Report a step that is not taken, while the gradients are still there. Then do what `judge` decided:
        skip the step, or go back to a checkpoint, or exit with a message (all ranks). Returns the batches to
        continue with.
        """
        verdict = self.verdict
        problem = report_not_finite(verdict, numbers, state.step, state.model, reader, logger)
        state.skip()
        state.model.reset_routing(reader.device)  # the routers' numbers may not be finite either
        state.slow_network.forget()  # compression errors, which may not be finite either
        if verdict.action is Action.STOP:
            saver.wait()  # a checkpoint may be under way
            stop_run(problem, self, str(saver.run_folder.path), logger)  # exits
        if verdict.action is Action.ROLL_BACK:
            saver.roll_back(state, problem)
            state.progress.skipped.update(verdict.not_finite)
            logger.rolled_back(verdict.not_finite, self.rollbacks)
        return reader.train(state.step, state.progress.position, state.progress.skipped)

    def advice(self, can_resume: bool) -> str:
        """Return what a user can do when the run ends."""
        command = "Resume with --init_from=resume and" if can_resume else "Start again with"
        skip = ", or --on_nan=skip" if self.on_nan == "stop" else ""
        return f"the step was not taken and no checkpoint was lost. {command} a lower --learning_rate{skip}"


def report_not_finite(
    verdict: Verdict, numbers: StepNumbers, step: int, model: nn.Module, reader: Reader, logger: Logger
) -> str:
    """
    Report a step that is not finite, while the gradients are still there (all ranks).

    Returns:
        A sentence for the user about the ranks, the gradients and the rows.
    """
    problem, facts = describe_not_finite(step, numbers, model, reader)
    text = f"warning: {problem}: the step is skipped" if verdict.action is Action.SKIP else ""
    logger.event("not_finite", text, **facts)
    return problem


def stop_run(problem: str, nan_policy: NanPolicy, out_dir: str, logger: Logger) -> None:
    """Exit with a message that begins with `problem` and says what a user can do (all ranks)."""
    with exit_together(logger.failed):
        if is_main():  # rank 0 prints the message
            raise ValueError(f"{problem}; {nan_policy.advice(is_run(out_dir))}")


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
        f"gradient norm {facts['grad_norm']:.3g}; largest gradients {gradients}; rows start at token {rows}"
    )
    return text, facts
