"""
Collectives with gradients for sequences whose positions are divided over ranks: (B, T / n, ...) on each of n.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from isogpt.common.torch_versions import all_gather_single, reduce_scatter_single


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts, one after the other: (B, T / n, ...) -> (B, T, ...)."""
    parts = x.new_empty(dist.get_world_size(group), *x.shape)  # (n, B, T / n, ...)
    all_gather_single(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts.movedim(0, 1).flatten(1, 2)


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum over the ranks: (B, T, ...) -> (B, T / n, ...)."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0).contiguous()  # (n, B, T / n, ...)
    total = torch.empty_like(parts[0])
    reduce_scatter_single(total.view(-1), parts.view(-1), group=group)
    return total


class Gather(torch.autograd.Function):
    """
    `gathered`, with gradients. Each rank's gradient is for what this rank computes from the whole sequence,
    so the backward pass adds the ranks' gradients.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return scattered(grad, ctx.group), None


class ScatterSum(torch.autograd.Function):
    """`scattered`, with gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None
