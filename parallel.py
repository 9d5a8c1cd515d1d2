"""
The ways of spreading a model over processes, one function each; the model itself knows of none (DESIGN.md, law 6).

In the order in which train.py applies them: recompute, compiled, shard (on the meta device, then materialize), and,
with the weights in place, data_parallel. `zero` says what is sharded over the data-parallel ranks (ZeRO, Rajbhandari
et al. 2020, arXiv:1910.02054): 0 nothing, 1 the optimizer's state, 2 the gradients too, 3 the parameters too.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launch import Ranks, gather_objects

if TYPE_CHECKING:  # what sharding needs is imported where it is used: it takes half a second
    from torch.distributed.device_mesh import DeviceMesh

# ---------------------------------------------------------------------------------------------------------------------
# memory for time

aten = torch.ops.aten
# what 'selective' keeps: the results of matmuls and of attention, which are the expensive ones to compute again
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute(model: nn.Module, mode: str) -> None:
    """
    Activation checkpointing, in place: instead of keeping what a block computed for the backward, keep its input and
    compute it again (Chen et al. 2016, arXiv:1604.06174). 'none'; 'full' in each block; 'selective' in each, but what
    matmuls and attention gave is kept; 'every:K' in one block of K. Dropout draws the same masks again.
    """
    every = recompute_every(mode)
    for i, block in enumerate(model.transformer.h):
        if every and i % every == 0:
            again = partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = partial(again, context_fn=selective_contexts) if mode == "selective" else again


def recompute_every(mode: str) -> int:
    """One block in how many is recomputed: 0 for 'none'. Raises ValueError for an unknown mode."""
    known = {"none": 0, "full": 1, "selective": 1}
    if mode in known:
        return known[mode]
    kind, _, number = mode.partition(":")
    if kind == "every" and number.isdigit() and int(number) > 0:
        return int(number)
    raise ValueError(f"activation_checkpointing is {mode!r}; possible are none, full, selective and every:K (K >= 1)")


def selective_contexts() -> tuple:
    """The pair of contexts that torch's selective checkpointing wants."""
    policy = lambda ctx, op, *args, **kw: (  # noqa: E731
        CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
    )
    return create_selective_checkpoint_contexts(policy)


def compiled(model: nn.Module, ranks: Ranks, by_block: bool = False) -> tuple[bool, str]:
    """
    torch.compile the model, in place: its parameters keep their names (all ranks).

    Args:
        by_block: each block on its own, which is what sharding block by block wants.

    Returns:
        (whether it is compiled, what to tell the user). Left out on a CPU, where it gained nothing but a wait of 10 s;
        left out by all ranks where a small trial fails on any, for want of a compiler, say.
    """
    if ranks.device.type == "cpu":
        return False, "compile: left out on the CPU, where it gains nothing"
    problem = None
    try:
        x = torch.ones(64, device=ranks.device, requires_grad=True)
        torch.compile(lambda t: (t.sin() * t).sum())(x).backward()
    except Exception as e:  # whatever a compiler on a stranger's machine can raise
        problem = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    problems = gather_objects(problem)
    if any(problems):
        return False, f"compile: does not work here, going on without it (slower): {next(p for p in problems if p)}"
    torch._dynamo.config.suppress_errors = True  # what fails to compile later runs uncompiled, with a warning
    for part in model.transformer.h if by_block else [model]:
        part.compile()
    return True, "compile: the first step takes about a minute longer"


# ---------------------------------------------------------------------------------------------------------------------
# the ways


def data_mesh(ranks: Ranks, dp_replicate: int) -> "DeviceMesh":
    """
    The mesh of the data-parallel ranks: ("shard",), or ("replicate", "shard") for HSDP, where neighbours shard.

    Raises:
        ValueError: dp_replicate does not divide the world size.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if dp_replicate == 1:
        return init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("shard",))
    shape = (dp_replicate, ranks.world_size // dp_replicate)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module,
    ranks: Ranks,
    zero: int,
    dp_replicate: int,
    dtype: torch.dtype,
    cpu_offload: bool,
    prefetch: int = 1,
) -> None:
    """
    ZeRO-2 and 3 by FSDP2's fully_shard, in place: each block is a unit that is gathered when it is needed, the rest
    (embeddings, the tied head, the last norm) another. With zero 2 what is gathered stays until the backward is done.
    The blocks compute in `dtype`, their gradients are reduced and the weights kept in float32. `prefetch` blocks are
    gathered ahead of the one that computes.
    """
    if zero < 2:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mixed = dtype if dtype != torch.float32 else None
    settings = dict(
        mesh=data_mesh(ranks, dp_replicate),
        reshard_after_forward=zero == 3,
        mp_policy=MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=torch.float32 if mixed else None),
        offload_policy=CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if cpu_offload else OffloadPolicy(),
    )
    blocks = list(model.transformer.h)
    for block in blocks:
        fully_shard(block, **settings)
    for i, block in enumerate(blocks if prefetch > 1 else []):  # one is what FSDP2 does by itself
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch) : i][::-1])
    # what is left is needed until the end of the forward and at once after it: giving it back would gain nothing
    fully_shard(model, **settings | {"reshard_after_forward": False})


def materialize(model: nn.Module, device: torch.device, cpu_offload: bool = False) -> None:
    """Give a model of the meta device, sharded or not, memory for what this rank holds of it; its values come next."""
    device = "cpu" if cpu_offload else device
    if is_fsdp(model):
        model.to_empty(device=device)
    else:  # for the same, to_empty imports sympy: half a second
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device)))
    model.tie_weights()


def is_fsdp(module: nn.Module) -> bool:
    """Whether fully_shard made a unit of it."""
    return hasattr(module, "set_requires_gradient_sync")


def is_sharded(value: Tensor) -> bool:
    """Whether a rank holds a part of it only (a DTensor)."""
    return hasattr(value, "full_tensor")


@torch.no_grad()
def put(target: Tensor, full: Tensor) -> None:
    """Copy the whole tensor `full` into `target`, or what this rank holds of it: no communication."""
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full.to(target.dtype), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(full.to_local())
    else:
        target.copy_(full)


def make_optimizer(
    model: nn.Module, zero: int, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
) -> torch.optim.Optimizer:
    """The model's AdamW; with zero 1 each rank keeps and updates its share of the parameters and sends them around."""
    if device_type == "cpu":
        # torch's optimizers import torch.compile when they are made and at their first step, to keep it out: that
        # took 1 of the 3.4 seconds to the first step on a CPU, where nothing is compiled
        for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
            inspect.unwrap(method).__dict__.setdefault("__dynamo_disable", inspect.unwrap(method))
    optimizer = model.configure_optimizers(weight_decay, learning_rate, betas, device_type)
    if device_type == "cpu":
        optimizer.step = partial(torch.no_grad()(inspect.unwrap(type(optimizer).step)), optimizer)
    if zero != 1:
        return optimizer
    from torch.distributed.optim import ZeroRedundancyOptimizer

    groups = [{k: group[k] for k in ("params", "weight_decay")} for group in optimizer.param_groups]
    fused = optimizer.param_groups[0]["fused"]
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=learning_rate, betas=betas, fused=fused)


def data_parallel(model: nn.Module, ranks: Ranks, bucket_mb: float = 25) -> nn.Module:
    """
    DistributedDataParallel (zero 0 and 1): each rank has the whole model, gradients are averaged over the ranks, sent
    in buckets of bucket_mb MiB as soon as the backward has filled them.
    """
    if ranks.world_size == 1 or is_fsdp(model):
        return model
    own = {"device_ids": [ranks.device.index]} if ranks.device.type == "cuda" else {}
    # gradients live in the buckets that are sent: one copy less of them in memory
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb, **own)


def settle_buckets(
    model: nn.Module, x: Tensor, y: Tensor, target_count: float, autocast: AbstractContextManager
) -> None:
    """
    One discarded forward and backward (all ranks), before the first step after a start; it is called as the step's
    are, so that torch.compile has no second graph to make.

    DDP orders its buckets anew after the first backward, and with three or more ranks another order sums in another
    order. Without this a resumed run would differ in the last bits from the run that never stopped.
    """
    if isinstance(model, DistributedDataParallel):
        with autocast:
            _, loss = model(x, y, target_count)
        loss.backward()
        model.zero_grad(set_to_none=True)


def sync_if(model: nn.Module, now: bool) -> AbstractContextManager:
    """Gradients are reduced over the ranks in this micro-step's backward, or stay on the rank and add up."""
    if is_fsdp(model):
        model.set_requires_gradient_sync(now)
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not now else nullcontext()


def reshard(model: nn.Module) -> None:
    """After a forward without a backward: give back what it gathered, so that parameters are shards again."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()


def whole(value: Tensor) -> Tensor:
    """A plain tensor of a norm that may be spread over the ranks (all ranks)."""
    return value.full_tensor() if is_sharded(value) else value


@torch.no_grad()
def differing(model: nn.Module, ranks: Ranks, shards: int) -> str:
    """
    Compare the weights of the ranks that should have the same ones (all ranks): those that are a multiple of `shards`
    apart. Returns which parameter differs on which rank, by a sum over its bits; '' if none.
    """
    if ranks.world_size == 1:
        return ""
    names = list(parameters_by_name(model))
    parts = [p.to_local() if is_sharded(p) else p for p in parameters_by_name(model).values()]
    mine = torch.stack([p.contiguous().view(torch.int32).sum(dtype=torch.int64) for p in parts]).to(ranks.device)
    digests = [torch.empty_like(mine) for _ in range(ranks.world_size)]  # (parameters,) each
    dist.all_gather(digests, mine)
    digests = torch.stack(digests).cpu()  # (world size, parameters)
    found = []
    for shard in range(shards):
        same = digests[shard::shards]  # of the ranks that hold the same
        usual = same.mode(0).values
        for i, name in enumerate(names):
            wrong = [shard + shards * r for r in range(len(same)) if same[r, i] != usual[i]]
            found += [f"{name} differs on rank {', '.join(map(str, wrong))}"] if wrong else []
    return "; ".join(found[:3]) + f"; and {len(found) - 3} more" * (len(found) > 3)


# ---------------------------------------------------------------------------------------------------------------------
# state by name, the same in every layout


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """What is saved of a model: each parameter once (the head is tied to wte), a shard of it where it is sharded."""
    return {name: p.detach() for name, p in model.named_parameters()}


def moments_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """
    {parameter: {step, exp_avg, exp_avg_sq}} of what this rank holds: all of it, with ZeRO-1 some of the parameters,
    with ZeRO-2 and 3 a shard of each. What AdamW would make at its first step is made here, as zeros.
    """
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own, of this rank's share
    names = {p: name for name, p in model.named_parameters()}
    for group in inner.param_groups:
        for p in group["params"]:
            if not inner.state[p]:
                on = p.device if group["fused"] else "cpu"
                step = torch.zeros((), dtype=torch.float32, device=on)
                inner.state[p] = dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    return {names[p]: inner.state[p] for group in inner.param_groups for p in group["params"]}
