"""The loss over fixed sequences, divided among the ranks."""

from contextlib import AbstractContextManager

import torch
from torch import nn

from isogpt import parallel
from isogpt.agree import gather_number, gather_objects, number_dtype
from isogpt.hardware import Clock
from isogpt.loader import DataError, Reader
from isogpt.resilience import Stop


@torch.no_grad()
def evaluate(model: nn.Module, reader: Reader, split: str, sequences: int, autocast: AbstractContextManager, stop: Stop,
             clock: Clock, checkpoint_s: float) -> float | None:  # fmt: skip
    """
    Mean loss over a split's fixed sequences (all ranks); None if a stop was requested.

    Args:
        checkpoint_s: how long a checkpoint takes, see Stop.code.

    Raises:
        DataError: on all ranks, if any of them could not read the data.
    """
    total, device, problem = 0.0, reader.device, ""
    model.eval()
    try:
        for i, (x, y) in enumerate(reader.evaluation(split, sequences)):
            with clock("evaluation"), autocast:
                total += model(x, y, 1.0)[1].to(number_dtype(device))  # the sum over the targets
            if stop.in_evaluation(i, device, checkpoint_s):
                break
    except DataError as e:  # raised after the last micro-batch: this rank has computed as many as the others
        problem = str(e)
    model.train()
    parallel.reshard(model)
    raise_together(problem)
    copies = reader.mesh.data_size * reader.mesh.cp  # ranks with different tokens
    total = gather_number(total, device).mean().item() * copies
    return None if stop.agreed else total / (sequences * reader.block_size)


def raise_together(problem: str) -> None:
    """Raise DataError on all ranks if any of them found a problem; '' is none (all ranks)."""
    found = gather_objects(problem)
    ranks = {text: ", ".join(str(r) for r, other in enumerate(found) if other == text) for text in found if text}
    if len(found) == 1 and problem:
        raise DataError(problem)
    if ranks:
        raise DataError("; ".join(f"rank {ranks[text]}: {text}" for text in ranks))
