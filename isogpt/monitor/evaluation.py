"""Evaluation: the loss over fixed sequences, divided over the ranks."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isogpt.data.dataset import DataError
from isogpt.data.reader import Reader
from isogpt.launch.together import gather_numbers, gather_objects, number_dtype
from isogpt.monitor.signals import Stop
from isogpt.parallel.data import reshard
from isogpt.parallel.exact import TOKENS_UNIT, rounded
from isogpt.speed.clock import Clock


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
    sharing = reader.mesh.pp * reader.mesh.tp  # ranks with the same tokens
    totals = [
        over_ranks.sum().item() / sharing for over_ranks in gather_numbers(SplitSums(**sums), device).read()
    ]
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
