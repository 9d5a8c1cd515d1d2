"""Activation checkpointing: less memory for activations, which the backward pass computes again."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint, create_selective_checkpoint_contexts

# FSDP's hooks mark gathers for the profiler, and a recomputed forward pass gathers at different times
aten, profiler = torch.ops.aten, torch.ops.profiler
SAC_IGNORED_OPS.add(profiler._record_function_enter_new.default)
SAC_IGNORED_OPS.add(profiler._record_function_exit._RecordFunction)
# 'selective' keeps the results of matmuls and attention, which are expensive to recompute
SAVED = [
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
    arXiv:1604.06174). Dropout draws the same masks in both passes.

    Args:
        mode: 'none'; 'full' recomputes every block; 'selective' recomputes every block except for the results
            of matmuls and attention; 'every:K' recomputes one block in K.
    """
    every, options = recompute_every(mode), {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED)

    # not a partial of `checkpoint`, which torch.compile skips
    def recomputed_block(compute: Callable, *args: object) -> Tensor:
        return checkpoint(compute, *args, use_reentrant=False, **options)

    for block in model.transformer.h[::every] if every else []:
        block.seams = replace(block.seams, block=recomputed_block)


def recompute_every(mode: str) -> int:
    """Return K if one block in K is recomputed, 0 for 'none'. settings.py checks the mode."""
    known = {"none": 0, "full": 1, "selective": 1}
    return known[mode] if mode in known else int(mode.removeprefix("every:"))
