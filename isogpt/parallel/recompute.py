"""
Activation checkpointing: less memory for activations, at the cost of computing them again in the backward
pass.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint, create_selective_checkpoint_contexts

# the profiler's marks of FSDP's hooks: recomputing a block gathers its units at other times than its forward
# did
SAC_IGNORED_OPS.update(
    (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)
aten = torch.ops.aten
# 'selective' keeps the results of matmuls and attention, the expensive ones to recompute
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._grouped_mm.default,
]


def recompute(model: nn.Module, mode: str) -> None:
    """
    Keep only each block's input for the backward pass and recompute the rest, in place (Chen et al. 2016,
    arXiv:1604.06174). Dropout draws the same masks again.

    Args:
        mode: 'none'; 'full' recomputes every block; 'selective' recomputes every block except for the results
            of matmuls and attention; 'every:K' recomputes one block in K.
    """
    every = recompute_every(mode)
    options = (
        {"context_fn": partial(create_selective_checkpoint_contexts, KEPT)} if mode == "selective" else {}
    )
    for block in model.transformer.h[::every] if every else []:
        block.forward = recomputed(block.forward, options)


def recomputed(forward: Callable, options: dict) -> Callable:
    """
    The forward of a block that is recomputed: a function, since torch.compile skips a partial of
    `checkpoint`.
    """

    def recomputed_forward(*args: object) -> Tensor:
        return checkpoint(forward, *args, use_reentrant=False, **options)

    return recomputed_forward


def recompute_every(mode: str) -> int:
    """One block in how many is recomputed: 0 for 'none'. settings.problems_of checks the mode."""
    known = {"none": 0, "full": 1, "selective": 1}
    return known[mode] if mode in known else int(mode.removeprefix("every:"))
