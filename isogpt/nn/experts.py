"""
Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): a router chooses a few of a block's MLPs (experts)
for each token. Experts are not limited in capacity, so no token is dropped, and a token's result does not
depend on the other tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from isogpt.nn.architecture import GPTConfig
from isogpt.nn.cpu_kernels import uses_cpu_kernels
from isogpt.nn.kernels import Dropout, compute_dtype


def unchanged(x: Tensor) -> Tensor:
    """Return x."""
    return x


class MoE(nn.Module):
    """
    The router and the experts of a block.

    Args:
        experts: maps rows (N, C), sorted by expert, and the number of rows of each expert (E,) to (N, C).
        seams: model.Seams, of which the router and the experts use two functions.
    """

    def __init__(self, config: GPTConfig, experts: nn.Module, seams: Any) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config.n_embd, config.n_expert)
        self.experts = experts
        self.dropout = Dropout(config.dropout)
        self.seams = seams

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> the experts' weighted sum (B, T, C), and in training what `routing_of` returns."""
        k, scores = self.config.n_expert_active, self.router(x)  # (B, T, E)
        probs = scores.softmax(-1)
        weights, chosen = probs.topk(k)  # (B, T, k)
        weights = weights / weights.sum(-1, keepdim=True)
        is_chosen = chosen[..., None] == torch.arange(scores.size(-1), device=x.device)  # (B, T, k, E)
        counts = is_chosen.sum((1, 2))  # (B, E)

        order = chosen.flatten().argsort(stable=True)  # (B T k,), by expert
        # the place of each row in `order`
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        rows = Reorder.apply(x.to(compute_dtype(x)).flatten(0, 1), order, place, k)  # (B T k, C)
        rows = self.seams.experts(self.experts, rows, counts.sum(0))  # (B T k, C)
        rows = Reorder.apply(rows, place, order).view(*chosen.shape, -1)  # (B, T, k, C)
        y = (rows * weights[..., None]).sum(2).to(rows.dtype)  # (B, T, C)
        return self.dropout(y), self.routing_of(scores, probs, counts) if self.training else None

    def routing_of(self, scores: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        """
        Return, for each sequence (B, E + 2): the auxiliary loss and the entropy of the router's
        probabilities, each summed over the tokens; and the number of tokens of each expert.

        The balance loss is E times the sum over experts of (share of the sequence's tokens) x (mean
        probability), 1 if tokens are distributed evenly (Fedus et al. 2022, arXiv:2101.03961, eq. 4, for each
        sequence as in arXiv:2412.19437, eq. 17, so that the loss does not depend on the layout). The z-loss
        is the mean squared logsumexp of the scores (Zoph et al. 2022, arXiv:2202.08906, eq. 5).
        """
        c, totals = self.config, self.seams.tokens_per_expert(counts)
        shares = totals / totals.sum(-1, keepdim=True)  # (B, E)
        balance = c.n_expert * (shares * probs.sum(1)).sum(-1)  # (B,)
        z = scores.logsumexp(-1).square().sum(1)
        loss = c.balance_loss * balance + c.router_z_loss * z
        entropy = torch.special.entr(probs.detach()).sum((1, 2))
        return torch.cat((loss[:, None], entropy[:, None], counts), -1)


class Reorder(torch.autograd.Function):
    """
    Select row `order[i]` of `copies` copies of each row (N, C) -> (N copies, C); `place` is the inverse of
    `order`. The forward pass of PyTorch's index_select is the same, but its backward pass adds up rows one by
    one.
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


class Router(nn.Module):
    """
    Scores of the experts for each token, in float32 for any dtype of the model: (B, T, C) -> (B, T, E).
    """

    def __init__(self, n_embd: int, n_expert: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, n_embd))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())


class ExpertLinear(nn.Module):
    """
    Linear layers of several experts. Their weights (out, in) are stacked in one parameter, and so are their
    biases; a process may hold only some of the experts.
    """

    def __init__(self, n_expert: int, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert * n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_expert * n_out)) if bias else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows (N, in), sorted by expert, `counts` (E,) of each -> (N, out)."""
        dtype = compute_dtype(self.weight)
        weight = self.weight.to(dtype).view(len(counts), -1, x.size(1))  # (E, out, in)
        y = grouped_matmul(x.to(dtype), weight, counts)
        if self.bias is None:
            return y
        bias = self.expert_biases(dtype, len(counts))
        return y + bias.repeat_interleave(counts, 0, output_size=len(x))

    def expert_biases(self, dtype: torch.dtype, n_expert: int) -> Tensor:
        """The bias of each expert, (E, out)."""
        return self.bias.to(dtype).view(n_expert, -1)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """
    Multiply each expert's rows of x (N, in) by the expert's weight (E, out, in), transposed: (N, out). The
    host does not wait for a GPU to know the `counts`.
    """
    on_cpu = uses_cpu_kernels(x)
    # The GPU's kernel is for bfloat16 only, the only dtype that torch.compile accepts. On GPUs other than
    # Hopper, Blackwell and AMD's counterparts it is a loop, for which the host waits (torch 2.13).
    has_kernel = on_cpu or x.dtype == torch.bfloat16
    if has_kernel and x.device.type == "cuda":
        # torch.compile treats properties as constants, unlike get_device_capability
        has_kernel = torch.cuda.get_device_properties().major in (9, 10)
    if has_kernel and all(n * x.itemsize % 16 == 0 for n in weight.shape[1:]):
        return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
    if on_cpu:  # less arithmetic than in blocks
        parts = zip(x.split(counts.tolist()), weight, strict=True)
        return torch.cat([F.linear(rows, w) for rows, w in parts])
    return BlockMatmul.apply(x, weight, *blocks_of_rows(len(x), counts))


# Half of the mean number of rows of an expert. Smaller blocks contain fewer rows of zeros, at most one block
# of each expert, but need more copies of weights.
BLOCKS_PER_EXPERT = 2


def blocks_of_rows(N: int, counts: Tensor) -> tuple[Tensor, Tensor, int]:
    """
    Divide N rows, sorted by expert, into blocks of equal size, each for one expert and padded with zeros.
    There are as many blocks as any `counts` (E,) can need, so that no shape depends on the counts.

    Returns:
        the place of each row in the blocks (N,), the expert of each block (blocks,), and the rows of a block.
    """
    E, device = len(counts), counts.device
    size = max(1, -(-N // (BLOCKS_PER_EXPERT * E)))
    block_counts = (counts + size - 1) // size  # (E,)
    row_ends, block_ends = counts.cumsum(0), block_counts.cumsum(0)  # (E,) each
    rows, blocks = torch.arange(N, device=device), torch.arange(min(N, N // size + E), device=device)
    expert_of_row = torch.searchsorted(row_ends, rows, right=True)  # (N,)
    # from an expert's first row to its place (E,)
    shift = (block_ends - block_counts) * size - (row_ends - counts)
    # blocks without rows can belong to any expert
    expert_of_block = torch.searchsorted(block_ends, blocks, right=True).clamp(max=E - 1)
    return rows + shift[expert_of_row], expert_of_block, size


class BlockMatmul(torch.autograd.Function):
    """
    grouped_matmul as one batched matmul of blocks, see `blocks_of_rows`: x (N, in), weight w (E, out, in) ->
    (N, out). The zeros add at most half as much arithmetic.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, w: Tensor, place: Tensor, expert: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(x, w, place, expert)
        ctx.size = size
        y = torch.bmm(in_blocks(x, place, expert, size), w[expert].mT)  # (blocks, size, out)
        return y.flatten(0, 1).index_select(0, place)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, w, place, expert = ctx.saved_tensors
        grad = in_blocks(grad, place, expert, ctx.size)  # (blocks, size, out)
        dx = torch.bmm(grad, w[expert]).flatten(0, 1).index_select(0, place)
        dw = torch.bmm(grad.mT, in_blocks(x, place, expert, ctx.size))  # (blocks, out, in)
        is_expert = torch.arange(len(w), device=x.device)[:, None] == expert  # (E, blocks)
        # a matmul, since index_add adds in a random order on a GPU
        dw = (is_expert.to(dw.dtype) @ dw.flatten(1)).view_as(w)
        return dx, dw, None, None, None


def in_blocks(rows: Tensor, place: Tensor, expert: Tensor, size: int) -> Tensor:
    """Put rows (N, C) at their places in blocks, padded with zeros: (blocks, size, C)."""
    blocks = rows.new_zeros(len(expert) * size, rows.size(1)).index_copy(0, place, rows)
    return blocks.unflatten(0, (len(expert), size))
