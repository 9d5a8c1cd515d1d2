"""
The ways of distributing a model, one file each, applied from outside to a model that knows none of them.

`parallelize` works on the meta device, so that no rank ever holds a model that is larger than its memory. train.py then
fills the model with weights and, with zero 0 and 1, wraps it with DistributedDataParallel.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.agree import exit_together
from isogpt.mesh import Mesh
from isogpt.parallel.compilation import compile_model
from isogpt.parallel.data import is_fsdp, no_sync, reshard, settle_buckets, shard
from isogpt.parallel.recompute import recompute, recompute_every

__all__ = ["compile_model", "is_fsdp", "no_sync", "recompute", "recompute_every", "reshard", "settle_buckets", "shard"]


def parallelize(model: nn.Module, mesh: Mesh, device: torch.device, zero: int, dtype: torch.dtype,
                activation_checkpointing: str, compile: bool, cpu_offload: bool,
                fsdp_prefetch: int) -> str:  # fmt: skip
    """
    Distribute a model on the meta device, in place, and allocate this rank's part of it (all ranks). The order of the
    steps matters: each one applies to what the one before has made.

    Returns:
        a sentence for the user about torch.compile.
    """
    recompute(model, activation_checkpointing)
    note = compile_model(model, device, by_block=zero >= 2) if compile else "compile: off"
    if zero >= 2:
        shard(model, mesh, device, zero, dtype, cpu_offload, fsdp_prefetch)
    materialize(model, torch.device("cpu") if cpu_offload else device)
    return note


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for what this rank holds of a model on the meta device; the values are undefined."""
    if is_fsdp(model):
        model.to_empty(device=device)
    else:  # Module.to_empty would do, but imports sympy, which takes half a second
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device)))
    model.tie_weights()


def is_sharded(value: Tensor) -> bool:
    """Whether it is a DTensor, of which a rank may hold only a part."""
    return hasattr(value, "full_tensor")


def local(value: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return value.to_local() if is_sharded(value) else value


def full(value: Tensor) -> Tensor:
    """A plain tensor of a value that may be a DTensor (all ranks)."""
    return value.full_tensor() if is_sharded(value) else value


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy the full tensor `value`, or this rank's part of it, into `target`: no communication."""
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(target.dtype), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(value.to_local())
    else:
        target.copy_(value)


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters for a checkpoint: each one once (the head is tied to wte), or this rank's shard of it."""
    return {name: p.detach() for name, p in model.named_parameters()}


def check_weights(model: nn.Module, mesh: Mesh, device: torch.device, step: int, on_error: Callable) -> None:
    """Compare the weights of ranks that hold the same ones, and exit with a message if they differ (all ranks)."""
    differences = weight_differences(model, mesh, device)
    with exit_together(on_error):
        if differences:
            raise ValueError(f"step {step}: weights differ across ranks: {differences}")


@torch.no_grad()
def weight_differences(model: nn.Module, mesh: Mesh, device: torch.device) -> str:
    """
    Compare a checksum of the weights between ranks that hold the same ones (all ranks). Returns which parameter differs
    on which rank; '' if none.
    """
    if mesh.data_size == 1:
        return ""
    parameters = parameters_by_name(model)
    sums = [local(p).contiguous().view(torch.int32).sum(dtype=torch.int64) for p in parameters.values()]
    mine = torch.stack(sums).to(device)
    gathered = [torch.empty_like(mine) for _ in range(mesh.data_size)]
    dist.all_gather(gathered, mine)
    copies = torch.stack(gathered).cpu().view(mesh.dp_replicate, mesh.dp_shard, -1)  # (..., parameters)
    differs = (copies != copies.mode(0).values).flatten(0, 1).T.tolist()  # (parameters, data_size)
    wrong = {name: [r for r, w in enumerate(row) if w] for name, row in zip(parameters, differs, strict=True)}
    found = [f"{name} differs on rank {', '.join(map(str, ranks))}" for name, ranks in wrong.items() if ranks]
    return "; ".join(found if len(found) <= 3 else [*found[:3], f"and {len(found) - 3} more"])
