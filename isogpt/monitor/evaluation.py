"""Evaluation: the loss over fixed sequences, divided over the ranks."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.state import TrainState
from isogpt.data.dataset import DataError
from isogpt.data.reader import Reader
from isogpt.launch.together import exit_together, gather_numbers, gather_objects, number_dtype
from isogpt.monitor.run_report import RunReport
from isogpt.monitor.signals import Stop
from isogpt.parallel.compare_weights import weights_digest
from isogpt.parallel.data_parallel import reshard
from isogpt.parallel.integer_sums import TOKENS_UNIT, rounded
from isogpt.speed.clock import Clock


@dataclass
class Evaluator:
    """Evaluates a run's state and reports the losses."""

    model: nn.Module  # as it is called: with a pipeline, through all stages
    state: TrainState
    reader: Reader
    sequences: int  # of each split
    autocast: AbstractContextManager
    clock: Clock
    stop: Stop
    saver: Saver
    report: RunReport

    def run(self, lr: float) -> None:
        """
        Evaluate the state (all ranks). If this fails, the state is saved and the run exits with a message. If
        a stop was requested meanwhile, `stop.agreed` is set, and there is no result.

        Args:
            lr: the learning rate of the next step, which is reported.
        """
        state = self.state
        on_error = partial(self.saver.save_and_fail, state)
        with exit_together(on_error), state.slow_network.evaluated_weights():
            losses = evaluate(
                self.model,
                self.reader,
                self.sequences,
                self.autocast,
                self.stop,
                self.clock,
                self.saver.seconds,
            )
        if losses:
            train_loss, val_loss = losses
            state.progress.evaluated(val_loss)
            is_exact = self.reader.plan.exact
            digest = weights_digest(state.model, self.reader.mesh) if is_exact else ""
            self.report.evaluation(train_loss, val_loss, lr, digest)


class SplitSums(NamedTuple):
    """Sums of the losses over the sequences that this rank evaluates, for both splits."""

    train: Tensor | float
    val: Tensor | float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    reader: Reader,
    sequences: int,
    autocast: AbstractContextManager,
    stop: Stop,
    clock: Clock,
    checkpoint_s: float,
) -> tuple[float, float] | None:
    """
    Compute the mean losses over fixed sequences of the training and the validation data (all ranks). Returns
    None if a stop was requested. The host waits for a GPU only at the end.

    Args:
        sequences: number of sequences of each split.
        checkpoint_s: how long a checkpoint takes, see Stop.code.

    Raises:
        DataError: on all ranks, if any rank could not read the data.
    """
    device, dtype, problems = reader.device, number_dtype(reader.device), []
    sums = {split: 0.0 for split in SplitSums._fields}
    model.eval()
    for split in sums:
        try:
            for i, (x, y) in enumerate(reader.evaluation(split, sequences)):
                with clock.part("evaluation"), autocast:
                    loss = model(x, y, 1.0)[1]  # the sum over the targets
                    sums[split] += rounded(loss, TOKENS_UNIT) if reader.plan.exact else loss.to(dtype)
                if stop.in_evaluation(i, device, checkpoint_s):
                    break
        # raised after the last micro-batch: this rank has computed as many micro-batches as the others
        except DataError as e:
            problems.append(str(e))
        if stop.agreed:
            break
    model.train()
    reshard(model)
    raise_together("; ".join(problems))
    over_ranks = gather_numbers(SplitSums(**sums), device).read()
    totals = [values.sum().item() / reader.mesh.same_tokens.size for values in over_ranks]
    train_loss, val_loss = (total / (sequences * reader.block_size) for total in totals)
    return None if stop.agreed else (train_loss, val_loss)


def raise_together(problem: str) -> None:
    """Raise DataError on all ranks if any rank found a problem; '' means no problem (all ranks)."""
    found = gather_objects(problem)
    ranks = {
        text: ", ".join(str(r) for r, other in enumerate(found) if other == text) for text in found if text
    }
    if len(found) == 1 and problem:
        raise DataError(problem)
    if ranks:
        raise DataError("; ".join(f"rank {ranks[text]}: {text}" for text in ranks))
