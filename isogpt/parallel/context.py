"""
Context parallelism: each rank of a group holds some positions of each sequence. All layers except attention
treat positions alike; attention gathers the keys and values of all ranks (as Llama 3 does, arXiv:2407.21783,
section 3.3.2).

No parameter is divided: only functions of model.Seams are replaced.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils.checkpoint import checkpoint

from isogpt.nn.kernels import attention_backends, causal_attention
from isogpt.parallel.attach import check_seam, replace_seams
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.sequence_collectives import Gather


@dataclass(frozen=True)
class ContextRanks:
    """
    The ranks that divide each sequence.

    Args:
        positions: the positions that this rank holds, (T / cp,).
        order: the places of chunks 0, 1, ... in what Gather returns.
        chunks: the numbers of this rank's two chunks, each with a `last_rows_mask`.
    """

    group: dist.ProcessGroup | None
    positions: Tensor
    order: list[int]
    chunks: list[tuple[int, CausalBias | None]]


def cp_positions(ranks: ContextRanks, start: int, end: int, device: torch.device) -> Tensor:
    """The positions of a sequence that this rank holds, (T / cp,)."""
    return ranks.positions


def sum_of_counts(ranks: ContextRanks, counts: Tensor) -> Tensor:
    """Return the sum of the ranks' tokens per expert (B, E), which need no gradient."""
    total = counts.clone()
    dist.all_reduce(total, group=ranks.group)
    return total


def last_rows_mask(T: int, S: int, device: torch.device) -> CausalBias | None:
    """
    Return, for a GPU, the causal mask of the last T of S positions, with which FlashAttention runs. The mask
    is made once, because torch.compile cannot trace the constructor (torch 2.13).
    """
    return causal_lower_right(T, S) if device.type == "cuda" else None


def context_attention(
    ranks: ContextRanks, q: Tensor, k: Tensor, v: Tensor, dropout: float, cache: None
) -> Tensor:
    """
    Compute kernels.causal_attention of this rank's positions over the positions of all ranks.

    q (B, T / cp, H, D), k and v (B, T / cp, K, D) -> (B, T / cp, H * D). The backward pass gathers the keys
    and values again instead of keeping them, so that activations are divided by cp. It also computes the
    attention's forward pass again.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = Gather.apply(torch.cat((k, v), -1), ranks.group)  # (B, T, K, 2 D), in the order of the ranks
        in_ranks = keys.chunk(len(ranks.order), 1)
        k, v = torch.cat([in_ranks[place] for place in ranks.order], 1).chunk(2, -1)  # (B, T, K, D) each
        groups = q.size(2) // k.size(2)
        k, v = (t.repeat_interleave(groups, 2) if groups > 1 else t for t in (k, v))
        size = q.size(1) // 2  # positions of a chunk
        parts = []
        for part, (c, mask) in zip(q.split(size, 1), ranks.chunks, strict=True):
            end = (c + 1) * size
            parts.append(attend_chunk(part, k[:, :end], v[:, :end], mask, dropout))
        return torch.cat(parts, 1)

    if torch.is_grad_enabled():
        return checkpoint(attend, q, k, v, use_reentrant=False)
    return attend(q, k, v)


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: CausalBias | None, dropout: float) -> Tensor:
    """
    Compute the attention of the last T of S positions: (B, T, H, D), (B, S, H, D) twice -> (B, T, H * D).

    Args:
        mask: see `last_rows_mask`. None: compute in float32, since on a CPU some bfloat16 gradients were
            several times too large with a mask (torch 2.13).
    """
    T, S, dtype = q.size(1), k.size(1), q.dtype
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T or S, D)
    if mask is None:
        q, k, v = (t.float() for t in (q, k, v))
        mask = q.new_ones(T, S, dtype=torch.bool).tril(S - T)
    with attention_backends(dropout, q.device):  # PyTorch chooses for the first chunk's mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return y.transpose(1, 2).flatten(2).to(dtype)


def parallelize_context(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """
    Make the model compute on this rank's positions of each sequence of block_size tokens, in place (all
    ranks).
    """
    check_seam(model, "attention", causal_attention, "cp")
    positions = mesh.positions(model.config.block_size).to(device)
    in_ranks = [c for rank in range(mesh.cp) for c in mesh.chunks(rank)]
    order = torch.tensor(in_ranks).argsort().tolist()
    size = model.config.block_size // len(order)  # tokens of a chunk
    numbers = mesh.chunks(mesh.index("cp"))
    chunks = [(c, last_rows_mask(size, (c + 1) * size, device)) for c in numbers]
    ranks = ContextRanks(mesh.group("cp"), positions, order, chunks)
    replace_seams(
        model,
        positions=partial(cp_positions, ranks),
        attention=partial(context_attention, ranks),
        tokens_per_expert=partial(sum_of_counts, ranks),
    )
