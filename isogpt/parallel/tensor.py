"""
Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): each rank of a group holds a part of each matrix,
namely some of the attention heads, of the hidden features, and of the vocabulary. Between these matmuls each
rank holds a part of the sequence (Korthikanti et al. 2022, arXiv:2205.05198), so norms and dropout are also
divided.
"""

import re
from functools import partial
from math import ceil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isogpt.nn.experts import MoE
from isogpt.nn.kernels import VocabularyPart, summed_loss
from isogpt.parallel.local_parts import Split, keep_local_part
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.sequence_collectives import Gather, ScatterSum

# The dimension along which a parameter is divided, and the block's matmul that it belongs to. Column-parallel
# layers (rows of the weight) come before row-parallel layers (columns of the weight). All other parameters
# are on every rank.
PLAN = {
    r"transformer\.wte\.weight|lm_head\.weight": 0,  # the vocabulary
    r".*\.attn\.c_attn\.(weight|bias)": 0,  # heads of q, k and v
    r".*\.attn\.c_proj\.weight": 1,  # heads
    r".*\.mlp\.(experts\.)?(c_gate|c_fc)\.(weight|bias)": 0,  # hidden features
    r".*\.mlp\.(experts\.)?c_proj\.weight": 1,  # hidden features
}


def split_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Replace the parameters in PLAN by this rank's parts, on the meta device."""
    for name, p in list(model.named_parameters()):
        dim = next((d for pattern, d in PLAN.items() if re.fullmatch(pattern, name)), None)
        if dim is None:
            continue
        sections = model.config.qkv_rows if ".c_attn." in name else (p.size(dim),)
        if ".experts." in name and dim == 0:  # the experts' rows are stacked
            sections = (model.config.n_hidden,) * (p.size(0) // model.config.n_hidden)
        keep_local_part(model, name, Split("tp", dim, sections, mesh.index("tp"), mesh.tp))
    model.tie_weights()


def parallelize_tensors(model: nn.Module, mesh: Mesh, splits_sequence: bool = True) -> None:
    """
    Divide the model's matrices over the tp ranks, in place, on the meta device (all ranks).

    Args:
        splits_sequence: divide the sequence between the matmuls. False for generation, whose sequences have
            any length.
    """
    split_parameters(model, mesh)
    group = mesh.group("tp")
    add_up = partial(combine, group, splits_sequence)
    for block in model.transformer.h:
        for layer in (block.attn, block.mlp):
            if splits_sequence:
                layer.register_forward_pre_hook(partial(gather_input, group))
            if isinstance(layer, MoE):
                layer.add_up = add_up
                layer.register_forward_hook(partial(share_of_routing, mesh.tp))
                layer.experts.c_proj.bias_share = 1 / mesh.tp
            else:
                layer.c_proj.forward = partial(row_parallel, layer.c_proj, add_up)
    if "wte" in model.transformer:
        first = ceil(model.config.vocab_size / mesh.tp) * mesh.index("tp")
        model.transformer.wte.forward = partial(embed_part, model.transformer.wte, first, add_up)
    if "wpe" in model.transformer and splits_sequence:
        model.transformer.wpe.register_forward_pre_hook(partial(own_positions, mesh))
    model.loss = partial(vocabulary_parallel_loss, mesh, group, model.config.vocab_size)
    if model.lm_head is not None:
        model.lm_head.register_forward_hook(partial(gather_logits, group, model.config.vocab_size))


def combine(group: dist.ProcessGroup, splits_sequence: bool, x: Tensor) -> Tensor:
    """Return the sum of the ranks' (B, T, C): all positions, or this rank's positions."""
    if splits_sequence:
        return ScatterSum.apply(x, group)
    dist.all_reduce(x, group=group)  # used only without gradients
    return x


def gather_input(group: dist.ProcessGroup, layer: nn.Module, inputs: tuple) -> tuple:
    """Attention and MLP take the whole sequence: (B, T / tp, C) -> (B, T, C)."""
    x, *others = inputs
    return Gather.apply(x, group), *others


def share_of_routing(
    ranks: int, layer: nn.Module, inputs: tuple, outputs: tuple
) -> tuple[Tensor, Tensor | None]:
    """All ranks route the whole sequence: the sum of their shares is the result of one process."""
    y, routing = outputs
    return y, None if routing is None else routing / ranks


def row_parallel(linear: nn.Linear, add_up: partial, x: Tensor) -> Tensor:
    """A Linear layer of which each rank holds some columns; the bias is on every rank and is added once."""
    y = add_up(F.linear(x, linear.weight))
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


def embed_part(wte: nn.Embedding, first: int, add_up: partial, idx: Tensor) -> Tensor:
    """
    Look up an Embedding of which this rank holds the rows from `first` on: (B, T) -> (B, T, C), or this
    rank's positions.
    """
    row, n = idx - first, wte.weight.size(0)
    is_mine = (row >= 0) & (row < n)
    return add_up(F.embedding(row.clamp(0, n - 1), wte.weight) * is_mine[..., None])


def own_positions(mesh: Mesh, wpe: nn.Embedding, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """The positions whose embeddings this rank adds: (T,) -> (T / tp,)."""
    return (inputs[0].chunk(mesh.tp)[mesh.index("tp")],)


def gather_logits(
    group: dist.ProcessGroup, vocab_size: int, head: nn.Linear, inputs: tuple, logits: Tensor
) -> Tensor:
    """
    Gather all logits, in generation: (B, T, V / tp) -> (B, T, V). The last rank's part of the vocabulary can
    be shorter.
    """
    ranks = dist.get_world_size(group)
    logits = F.pad(logits, (0, ceil(vocab_size / ranks) - logits.size(-1))).contiguous()
    parts = [torch.empty_like(logits) for _ in range(ranks)]
    dist.all_gather(parts, logits, group=group)
    return torch.cat(parts, -1)[..., :vocab_size]


def vocabulary_parallel_loss(
    mesh: Mesh,
    group: dist.ProcessGroup,
    vocab_size: int,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    cap: float,
) -> Tensor:
    """
    Compute summed_loss on (B, T / tp, C), with each rank's logits of a part of the vocabulary; equal on all
    ranks.
    """

    def reduce(value: Tensor, op: str) -> None:
        dist.all_reduce(value, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)

    longest = ceil(vocab_size / mesh.tp)
    return summed_loss(
        Gather.apply(x, group),
        weight,
        targets,
        cap,
        VocabularyPart(longest * mesh.index("tp"), longest, reduce),
    )
