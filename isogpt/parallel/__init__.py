"""
The ways of distributing a model, one file each, applied from outside to a model that knows none of them.

`parallelize` works on the meta device, so that no rank ever holds a model that is larger than its memory. train.py then
fills the model with weights and, with zero 0 and 1, wraps it with DistributedDataParallel.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.agree import exit_together, gather_objects
from isogpt.mesh import DATA_AXES, Mesh
from isogpt.parallel.compilation import compile_model
from isogpt.parallel.data import fsdp_units, no_sync, reshard, settle_buckets, shard, sum_in_buckets
from isogpt.parallel.parts import Part, Split, copy_to_cpu, local, part_of, parts_by_name, split_of
from isogpt.parallel.recompute import recompute, recompute_every

if TYPE_CHECKING:
    from isogpt.parallel.pipeline import Pipeline

__all__ = ["Part", "compile_model", "copy_to_cpu", "local", "no_sync", "part_of", "parts_by_name", "recompute",
           "recompute_every", "reshard", "settle_buckets", "shard", "split_of"]  # fmt: skip


def parallelize(model: nn.Module, mesh: Mesh, device: torch.device, zero: int, dtype: torch.dtype,
                config: dict) -> str:  # fmt: skip
    """
    Distribute a model on the meta device, in place, and allocate this rank's part of it (all ranks). The order of the
    steps matters: each one applies to what the one before has made.

    Args:
        dtype: see `shard`.
        config: train.py's settings; those that are used here have the names of settings.

    Returns:
        a sentence for the user about torch.compile.
    """
    splits = split_model(model, mesh, config["pp_schedule"])
    if mesh.cp > 1:
        from isogpt.parallel.context import parallelize_context

        parallelize_context(model, mesh, device)
    recompute(model, config["activation_checkpointing"])
    by_block, note = zero >= 2 or mesh.splits_model, "compile: off"
    if config["compile"]:
        note = compile_model(model, device, by_block)
    if zero >= 2:
        shard(model, mesh, device, zero, dtype, config["cpu_offload"], config["fsdp_prefetch"],
              config["pp_schedule"])  # fmt: skip
    materialize(model, torch.device("cpu") if config["cpu_offload"] else device, splits)
    return note


def split_model(model: nn.Module, mesh: Mesh, pp_schedule: str, splits_sequence: bool = True) -> dict[str, Split]:
    """Leave this rank's layers, and its part of each matrix, of a model on the meta device; returns the splits."""
    if mesh.pp > 1:
        from isogpt.parallel.pipeline import split_layers

        split_layers(model, mesh, pp_schedule)
    if mesh.tp == 1:
        return {}
    from isogpt.parallel.tensor import parallelize_tensors

    return parallelize_tensors(model, mesh, splits_sequence)


def make_pipeline(model: nn.Module, mesh: Mesh, pp_schedule: str, zero: int, dtype: torch.dtype,
                  device: torch.device, splits_sequence: bool = True) -> "Pipeline | None":  # fmt: skip
    """The pipeline of a model from `split_model`, which its forward uses from now on; None if pp is 1."""
    if mesh.pp == 1:
        return None
    from isogpt.parallel.pipeline import Pipeline

    dtype = torch.float32 if zero < 2 else dtype  # autocast leaves the residual stream in float32
    return Pipeline(model, mesh, pp_schedule, dtype, device, mesh.tp if splits_sequence else 1)


def materialize(model: nn.Module, device: torch.device, splits: dict[str, Split] | None = None) -> None:
    """
    Allocate memory for what this rank holds of a model on the meta device; the values are undefined.

    Args:
        splits: of parameters that tensor parallelism has split, by name.
    """
    if fsdp_units(model):
        model.to_empty(device=device)
    else:  # Module.to_empty would do, but imports sympy, which takes half a second
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device)))
    model.tie_weights()
    for name, p in model.named_parameters() if splits else ():
        p.tp_split = splits.get(name)


def init_weights(model: nn.Module, seed: int) -> None:
    """Fill this rank's parts with the initial weights that the whole model has on one process."""
    for name, part in parts_by_name(model).items():
        part.put(model.initial_weight(name, part.shape, seed))


# ---------------------------------------------------------------------------------------------------------------------
# gradients


def complete_gradients(model: nn.Module, mesh: Mesh, zero: int, reduces_data: bool) -> None:
    """
    Add up what the backward has left on several ranks (all ranks): with tp, the gradients of parameters that are on
    every rank, each from its part of the sequence; with pp, those of data-parallel ranks, since the pipeline's stages
    are not wrapped with DDP, and of wte tied to the head, if these are on different ranks.

    Args:
        reduces_data: False leaves out the data-parallel ranks, to measure what they cost.
    """
    if not mesh.splits_model:
        return
    params = [p for p in model.parameters() if p.grad is not None]
    if mesh.tp > 1:
        sum_in_buckets([local(p.grad) for p in params if split_of(p) is None], mesh.group("tp"))
    if mesh.pp > 1 and zero < 2 and reduces_data and mesh.size(*DATA_AXES) > 1:
        grads = [p.grad for p in params]
        sum_in_buckets(grads, mesh.group(*DATA_AXES))
        torch._foreach_div_(grads, mesh.size(*DATA_AXES))
    if mesh.pp > 1 and is_tied_over_ranks(model):
        grad, group = local(model.lm_head.weight.grad), mesh.group("pp")
        peer = dist.get_global_rank(group, mesh.pp - 1 if mesh.index("pp") == 0 else 0)
        theirs = torch.empty_like(grad)
        exchange = [dist.P2POp(dist.isend, grad.clone(), peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        grad += theirs


def is_tied_over_ranks(model: nn.Module) -> bool:
    """Whether this rank of a pipeline has one of wte and the head, tied to the other one on another rank."""
    has_first, has_last = (any(getattr(s, name) for s in model.stages) for name in ("is_first", "is_last"))
    return model.config.tied and has_first != has_last


def copies_of(model: nn.Module, mesh: Mesh) -> dict[int, list[nn.Parameter]]:
    """This rank's parameters by how many ranks hold the same part of them."""
    found = defaultdict(list)
    for p in model.parameters():
        copies = mesh.dp_replicate * (1 if hasattr(p, "full_tensor") else mesh.cp * mesh.dp_shard)
        if split_of(p) is None:
            copies *= mesh.tp
        if mesh.pp > 1 and p is getattr(model.lm_head, "weight", None) and is_tied_over_ranks(model):
            copies *= 2
        found[copies].append(p)
    return found


def norm_share(copies: dict[int, list[nn.Parameter]]) -> Tensor:
    """This rank's share of the gradient's squared norm, from `copies_of`: the sum over all ranks is the whole."""
    shares = []
    for n, params in copies.items():
        grads = [local(p.grad) for p in params if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(0)
        shares.append(norms.to(torch.float64 if norms.device.type != "mps" else torch.float32).square().sum() / n)
    return torch.stack(shares).sum()


def clip_gradients(copies: dict[int, list[nn.Parameter]], max_norm: float, grad_norm: float) -> None:
    """Scale the gradients like clip_grads_with_norm_, given their norm over all ranks. With max_norm 0: no clipping."""
    scale = max_norm / (grad_norm + 1e-6)
    grads = [local(p.grad) for params in copies.values() for p in params if p.grad is not None]
    if 0 < scale < 1:
        torch._foreach_mul_(grads, scale)


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """The norm of each parameter's gradient over all ranks (all ranks)."""
    pieces = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            parts = part_of(p.grad, split_of(p)).pieces
            pieces |= {(name, offsets): piece.double().square().sum().item() for offsets, piece in parts}
    squares = defaultdict(float)
    for (name, _), square in {k: v for found in gather_objects(pieces) for k, v in found.items()}.items():
        squares[name] += square
    return {name: square**0.5 for name, square in squares.items()}


# ---------------------------------------------------------------------------------------------------------------------
# comparing weights


def check_weights(model: nn.Module, step: int, on_error: Callable) -> None:
    """Compare the weights of ranks that hold the same ones, and exit with a message if they differ (all ranks)."""
    differences = weight_differences(model)
    with exit_together(on_error):
        if differences:
            raise ValueError(f"step {step}: weights differ across ranks: {differences}")


@torch.no_grad()
def weight_differences(model: nn.Module) -> str:
    """
    Compare a checksum of the weights between ranks that hold the same ones (all ranks). Returns which parameter differs
    on which rank; '' if none.
    """
    pieces = [(name, *piece) for name, part in parts_by_name(model).items() for piece in part.pieces]
    sums = [piece.contiguous().view(torch.int32).sum(dtype=torch.int64) for _, _, piece in pieces]
    sums = torch.stack(sums).tolist() if sums else []  # one copy from the device
    mine = {(name, offsets): value for (name, offsets, _), value in zip(pieces, sums, strict=True)}
    found = defaultdict(list)  # {(name, offsets): [(rank, checksum)]}
    for rank, theirs in enumerate(gather_objects(mine)):
        for key, value in theirs.items():
            found[key].append((rank, value))
    wrong = defaultdict(set)
    for (name, _), values in found.items():
        usual = most_common([value for _, value in values])
        wrong[name] |= {rank for rank, value in values if value != usual}
    texts = [f"{name} differs on rank {', '.join(map(str, sorted(ranks)))}" for name, ranks in wrong.items() if ranks]
    return "; ".join(texts if len(texts) <= 3 else [*texts[:3], f"and {len(texts) - 3} more"])


def most_common(values: list[int]) -> int:
    """The value that occurs most often; the smallest of several."""
    return min(values, key=lambda value: (-values.count(value), value))
