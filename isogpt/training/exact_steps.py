"""Optimizer steps whose bits do not depend on which rank holds which part of the parameters, for `exact`."""

import torch

from isogpt.training.muon import Muon
from isogpt.training.optim import AdamW

# Fused AdamW on a CPU updates whole vectors of up to this many float32 numbers with different instructions
# than the rest of a tensor, which rounds differently (torch 2.13). So AdamW's step pads to whole vectors.
VECTOR = 16


def make_steps_exact(optimizers: list[torch.optim.Optimizer]) -> None:
    """
    Let the optimizers compute an element's update in the same way in any shard and next to any other
    parameters, in place. The step of other layouts is the same up to rounding.
    """
    for optimizer in optimizers:
        inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
        if isinstance(inner, Muon):
            inner.separately = True
        elif isinstance(inner, AdamW) and inner.defaults["fused"]:
            inner.multiple = VECTOR
