"""
Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): each rank of a group holds a part of each matrix,
namely some of the attention heads, of the hidden features, and of the vocabulary. Between these matmuls each
rank holds a part of the sequence (Korthikanti et al. 2022, arXiv:2205.05198), so norms and dropout are also
divided.

The table ATTACHMENTS says what happens to each module; attach.py explains how it is applied.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isogpt.nn.experts import ExpertLinear
from isogpt.nn.kernels import VocabularyPart, summed_loss
from isogpt.parallel.attach import Attachment, attach, check_seam, replace_seams
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import LayoutError
from isogpt.parallel.sequence_collectives import Gather, ScatterSum


@dataclass(frozen=True)
class TensorRanks:
    """
    The ranks that divide each matrix, of which this rank is number `index`.

    Args:
        splits_sequence: whether each rank holds a part of the sequence between the matmuls.
        vocab_size: of the whole model.
    """

    group: dist.ProcessGroup
    index: int
    count: int
    splits_sequence: bool
    vocab_size: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' (B, T, C): this rank's positions, or all positions."""
        if self.splits_sequence:
            return ScatterSum.apply(x, self.group)
        dist.all_reduce(x, group=self.group)  # used only without gradients
        return x

    @property
    def longest(self) -> int:
        """The number of token ids that each rank holds; the last rank can hold fewer."""
        return ceil(self.vocab_size / self.count)


class VocabularyEmbedding(nn.Embedding):
    """An Embedding of which this rank holds some rows: (B, T) -> (B, T, C), or this rank's positions."""

    def forward(self, idx: Tensor) -> Tensor:
        row, n = idx - self.ranks.longest * self.ranks.index, self.weight.size(0)
        is_mine = (row >= 0) & (row < n)
        return self.ranks.sum(F.embedding(row.clamp(0, n - 1), self.weight) * is_mine[..., None])


class RowParallelLinear(nn.Linear):
    """A Linear layer of which each rank holds some columns; the bias is on every rank and is added once."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.ranks.sum(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RowParallelExperts(ExpertLinear):
    """
    Linear layers of experts of which each rank holds some columns. The ranks' results are added after they
    are weighted, see `sum_of_experts`, and so are the biases, which are on every rank.
    """

    def expert_biases(self, dtype: torch.dtype, n_expert: int) -> Tensor:
        """This rank's share of the bias of each expert, (E, out)."""
        return 1 / self.ranks.count * super().expert_biases(dtype, n_expert)


def tp_positions(ranks: TensorRanks, wpe: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Position embeddings are looked up for the positions that this rank holds: (T,) -> (T / tp,)."""
    (positions,) = args
    if ranks.splits_sequence:
        positions = positions.chunk(ranks.count)[ranks.index]
    return (positions,)


def whole_sequence(ranks: TensorRanks, layer: nn.Module, args: tuple) -> tuple:
    """Attention and MLP take the whole sequence: (B, T / tp, C) -> (B, T, C)."""
    x, *others = args
    if ranks.splits_sequence:
        x = Gather.apply(x, ranks.group)
    return x, *others


def sum_of_experts(ranks: TensorRanks, dropout: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Before the dropout, add the ranks' weighted sums of experts, each over some of the hidden features."""
    (y,) = args
    return (ranks.sum(y),)


def divided_routing(
    ranks: TensorRanks, moe: nn.Module, args: tuple, result: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """All ranks route the whole sequence: the sum of their shares is the result of one process."""
    y, routing = result
    return y, None if routing is None else routing / ranks.count


def all_logits(ranks: TensorRanks, head: nn.Module, args: tuple, logits: Tensor) -> Tensor:
    """
    Gather the logits of the whole vocabulary, in generation: (B, T, V / tp) -> (B, T, V). The last rank's
    part of the vocabulary can be shorter.

    Raises:
        LayoutError: in training, where ranks hold different tokens: no rank has all logits.
    """
    if ranks.splits_sequence:
        raise LayoutError("with tp, no rank has all logits of a training step: set --tp=1")
    logits = F.pad(logits, (0, ranks.longest - logits.size(-1))).contiguous()
    parts = [torch.empty_like(logits) for _ in range(ranks.count)]
    dist.all_gather(parts, logits, group=ranks.group)
    return torch.cat(parts, -1)[..., : ranks.vocab_size]


def vocabulary_parallel_loss(
    ranks: TensorRanks, x: Tensor, weight: Tensor, targets: Tensor, cap: float
) -> Tensor:
    """
    Compute summed_loss on (B, T / tp, C); each rank computes the logits of a part of the vocabulary. The loss
    is equal on all ranks.
    """

    def reduce(value: Tensor, op: str) -> None:
        operator = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        dist.all_reduce(value, operator, group=ranks.group)

    part = VocabularyPart(ranks.longest * ranks.index, ranks.longest, reduce)
    return summed_loss(Gather.apply(x, ranks.group), weight, targets, cap, part)


ATTENTION, MLP = r"transformer\.h\.\d+\.attn", r"transformer\.h\.\d+\.mlp"
# Column-parallel layers (rows of the weight, dimension 0) come before row-parallel layers (columns of the
# weight, dimension 1). Parameters for which no dimension is given here are on every rank.
ATTACHMENTS = (
    Attachment(r"transformer\.wte", dim=0, becomes=VocabularyEmbedding),
    Attachment(r"transformer\.wpe", inputs=tp_positions),
    Attachment(ATTENTION, inputs=whole_sequence),
    Attachment(rf"{ATTENTION}\.c_attn", dim=0, sections=lambda config: config.qkv_rows),
    Attachment(rf"{ATTENTION}\.c_proj", dim=1, becomes=RowParallelLinear),
    Attachment(MLP, inputs=whole_sequence),
    Attachment("lm_head", dim=0, output=all_logits),
)
OF_MLP = (
    Attachment(rf"{MLP}\.(c_gate|c_fc)", dim=0),
    Attachment(rf"{MLP}\.c_proj", dim=1, becomes=RowParallelLinear),
)
OF_EXPERTS = (
    Attachment(MLP, output=divided_routing),
    Attachment(rf"{MLP}\.experts\.(c_gate|c_fc)", dim=0, sections=lambda config: (config.n_hidden,)),
    Attachment(rf"{MLP}\.experts\.c_proj", dim=1, becomes=RowParallelExperts),
    Attachment(rf"{MLP}\.dropout", inputs=sum_of_experts),
)


def parallelize_tensors(model: nn.Module, mesh: Mesh, splits_sequence: bool = True) -> None:
    """
    Divide the model's matrices over the tp ranks, in place, on the meta device (all ranks).

    Args:
        splits_sequence: divide the sequence between the matmuls. False for generation, where sequences may
            be of any length.
    """
    c = model.config
    ranks = TensorRanks(mesh.group("tp"), mesh.index("tp"), mesh.tp, splits_sequence, c.vocab_size)
    check_seam(model, "loss", summed_loss, "tp")
    table = ATTACHMENTS + (OF_EXPERTS if c.n_expert else OF_MLP)
    attach(model, table, mesh, "tp", ranks)
    replace_seams(model, loss=partial(vocabulary_parallel_loss, ranks))
