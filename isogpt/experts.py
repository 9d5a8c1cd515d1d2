"""
Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): a router chooses a few of a block's MLPs, the experts, for
each token. No expert has a capacity, so no token is dropped, and the result does not depend on the other tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from isogpt.architecture import GPTConfig
from isogpt.kernels import Dropout


def unchanged(x: Tensor) -> Tensor:
    """What tensor and context parallelism replace by a sum over ranks."""
    return x


class MoE(nn.Module):
    """
    The router and the experts of a block.

    Args:
        experts: maps rows (N, C), sorted by expert, and the number of rows of each expert (E,) to (N, C).
    """

    def __init__(self, config: GPTConfig, experts: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config.n_embd, config.n_expert)
        self.experts = experts
        self.dropout = Dropout(config.dropout)
        self.add_up = unchanged  # (B, T, C); tensor parallelism replaces it
        self.count_sequences = unchanged  # tokens per expert (B, E); context parallelism replaces it

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> the experts' weighted sum (B, T, C), and in training what `routing_of` returns."""
        k, scores = self.config.n_expert_active, self.router(x)  # (B, T, E)
        probs = scores.softmax(-1)
        weights, chosen = probs.topk(k)  # (B, T, k)
        weights = weights / weights.sum(-1, keepdim=True)
        is_chosen = chosen[..., None] == torch.arange(scores.size(-1), device=x.device)  # (B, T, k, E)
        counts = is_chosen.sum((1, 2))  # (B, E)

        order = chosen.flatten().argsort(stable=True)  # (B T k,), by expert
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))  # of each in it
        rows = Reorder.apply(x.to(compute_dtype(x)).flatten(0, 1), order, place, k)  # (B T k, C)
        rows = Reorder.apply(self.experts(rows, counts.sum(0)), place, order).view(*chosen.shape, -1)  # (B, T, k, C)
        y = (rows * weights[..., None]).sum(2).to(rows.dtype)  # (B, T, C)
        return self.dropout(self.add_up(y)), self.routing_of(scores, probs, counts) if self.training else None

    def routing_of(self, scores: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        """
        For each sequence (B, E + 2): the auxiliary loss, summed over the tokens; the entropy of the router's
        probabilities, likewise; and the tokens of each expert.

        The balance loss is E times the sum over experts of (share of the sequence's tokens) x (mean probability), 1 if
        tokens are distributed evenly (Fedus et al. 2022, arXiv:2101.03961, eq. 4, for each sequence as in
        arXiv:2412.19437, eq. 17, so that it does not depend on the layout). The z-loss is the mean squared logsumexp of
        the scores (Zoph et al. 2022, arXiv:2202.08906, eq. 5).
        """
        c, totals = self.config, self.count_sequences(counts)
        shares = totals / totals.sum(-1, keepdim=True)  # (B, E)
        balance = c.n_expert * (shares * probs.sum(1)).sum(-1)  # (B,)
        z = scores.logsumexp(-1).square().sum(1)
        loss = c.balance_loss * balance + c.router_z_loss * z
        entropy = torch.special.entr(probs.detach()).sum((1, 2))
        return torch.cat((loss[:, None], entropy[:, None], counts), -1)


class Reorder(torch.autograd.Function):
    """
    Row `order[i]` of `copies` copies of each row (N, C) -> (N copies, C); `place` is the inverse of `order`. PyTorch's
    index_select has the same forward, but its backward adds up rows one by one.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, order: Tensor, place: Tensor, copies: int = 1) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return rows.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        grad = grad.index_select(0, place)
        return grad.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else grad, None, None, None


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matmul with x computes, under autocast or without."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Router(nn.Module):
    """Scores of the experts for each token, in float32 whatever the model computes in: (B, T, C) -> (B, T, E)."""

    def __init__(self, n_embd: int, n_expert: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, n_embd))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())


class ExpertLinear(nn.Module):
    """
    Linear layers of several experts. Their weights (out, in) are stacked in one parameter, and so are their biases; a
    process may hold only some of the experts.
    """

    def __init__(self, n_expert: int, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert * n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_expert * n_out)) if bias else None
        self.bias_share = 1.0  # with tensor parallelism each rank adds its share of c_proj's

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows (N, in), sorted by expert, `counts` (E,) of each -> (N, out)."""
        dtype = compute_dtype(self.weight)
        weight = self.weight.to(dtype).view(len(counts), -1, x.size(1))  # (E, out, in)
        y = grouped_matmul(x.to(dtype), weight, counts)
        if self.bias is None:
            return y
        bias = self.bias_share * self.bias.to(dtype).view(len(counts), -1)
        return y + bias.repeat_interleave(counts, 0, output_size=len(x))


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each expert's rows of x (N, in) times its weight (E, out, in), transposed: (N, out)."""
    # torch 2.13: a GPU has a kernel for bfloat16 only, which is also the only dtype that torch.compile accepts
    has_kernel = x.dtype == torch.bfloat16 or (x.device.type == "cpu" and not torch.compiler.is_compiling())
    is_aligned = all(n * x.itemsize % 16 == 0 for n in weight.shape[1:])
    if has_kernel and is_aligned:
        return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
    return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(counts.tolist()), weight, strict=True)])
