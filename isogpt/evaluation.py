"""The loss over fixed sequences, divided among the ranks."""

from contextlib import AbstractContextManager

import torch
from torch import nn

from isogpt import parallel
from isogpt.agree import gather_number, number_dtype
from isogpt.hardware import Clock
from isogpt.loader import Reader
from isogpt.resilience import Stop


@torch.no_grad()
def evaluate(model: nn.Module, reader: Reader, split: str, sequences: int, autocast: AbstractContextManager, stop: Stop,
             clock: Clock, checkpoint_s: float) -> float | None:  # fmt: skip
    """
    Mean loss over a split's fixed sequences (all ranks); None if a stop was requested.

    Args:
        checkpoint_s: how long a checkpoint takes, see Stop.code.
    """
    total, device = 0.0, reader.device
    model.eval()
    for i, (x, y) in enumerate(reader.evaluation(split, sequences)):
        with clock("evaluation"), autocast:
            total += model(x, y, 1.0)[1].to(number_dtype(device))  # the sum over the targets
        if stop.in_evaluation(i, device, checkpoint_s):
            break
    model.train()
    parallel.reshard(model)
    copies = reader.mesh.data_size * reader.mesh.cp  # ranks with different tokens
    total = gather_number(total, device).mean().item() * copies
    return None if stop.agreed else total / (sequences * reader.block_size)
