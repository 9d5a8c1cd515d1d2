"""
Data parallelism: DistributedDataParallel, and the stages of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054):
1 shards the optimizer state over the data-parallel ranks (training/optim.py), 2 also the gradients, 3 also
the parameters (FSDP2).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.nn.experts import MoE
from isogpt.parallel.local_parts import is_sharded, local
from isogpt.parallel.mesh import Mesh, splits_backward
from isogpt.parallel.plan import LayoutError, Plan

Norms = dict[nn.Parameter, list[Tensor]]  # of the pieces of a gradient on this rank

# A CPU adds up the squares of a norm one after the other: in float32, that of 38 million numbers, the token
# embedding of GPT-2, was 0.2% too small (torch 2.13), that of this many 4e-7
SQUARES_AT_ONCE = 2**16


def uses_ddp(plan: Plan, mesh: Mesh) -> bool:
    """Whether the model is wrapped with DistributedDataParallel."""
    return plan.zero < 2 and plan.pp == 1 and not plan.exact and mesh.replicas.size > 1


def shard(model: nn.Module, mesh: Mesh, device: torch.device, plan: Plan) -> None:
    """
    Shard a model for ZeRO-2 or 3 with FSDP2's fully_shard, in place. Each block is a unit that is gathered
    when it is needed; embeddings, the tied head and the last norm form the root unit. With zero 2, or in a
    pipeline whose schedule delays gradients of weights, gathered parameters stay until the backward pass is
    done. Blocks compute in the plan's dtype, whereas weights and the reduction of gradients are float32. With
    grad_compression or exact, fully_shard does not average gradients over dp_replicate.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if plan.torch_dtype != torch.float32 and not plan.uses_autocast:
        policy = MixedPrecisionPolicy(plan.torch_dtype, torch.float32)
    # pipeline stages receive float32 numbers of the routers, which must not be cast
    root_policy = replace(policy, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if plan.cpu_offload else OffloadPolicy()
    reduces_replicas = plan.replica_compression == "none" and not plan.exact
    settings = {"mesh": mesh.fsdp_mesh(mesh.shards, reduces_replicas), "offload_policy": offload}
    blocks = list(dict.fromkeys(model.transformer.h))
    if name := shared_parameter(model, [[block] for block in blocks]):
        raise LayoutError(f"zero {plan.zero} shards blocks separately, but two share {name}: set --zero=1")
    delays_weights = mesh.pp > 1 and splits_backward(plan.pp_schedule)
    of_blocks = settings | {"reshard_after_forward": plan.zero == 3 and not delays_weights}
    for block in blocks:
        if isinstance(block.mlp, MoE):
            fully_shard(block.mlp.router, **of_blocks)  # routers compute in float32
        if mesh.ep > 1:
            expert_mesh = mesh.fsdp_mesh(mesh.shards.without("ep"), reduces_replicas)
            fully_shard(block.mlp.experts, mp_policy=policy, **of_blocks | {"mesh": expert_mesh})
        fully_shard(block, mp_policy=policy, **of_blocks)
    # the root unit is needed at the end of the forward pass and right after it: resharding would gain nothing
    for root in getattr(model, "stages", [model]):
        # the last stage's head can be tied to wte in the first stage on the same rank, which has sharded it
        done = {p for p in root.parameters() if is_sharded(p)}
        fully_shard(root, reshard_after_forward=False, mp_policy=root_policy, ignored_params=done, **settings)


def shared_parameter(model: nn.Module, parts: Sequence[Sequence[nn.Module]]) -> str:
    """
    Return the name of a parameter that modules of different parts share; "" if they share none.
    """
    part_of = {}
    for number, modules in enumerate(parts):
        for p in (p for module in modules for p in module.parameters()):
            if part_of.setdefault(p, number) != number:
                return next(name for name, other in model.named_parameters() if other is p)
    return ""


def tied_over_ranks(model: nn.Module) -> nn.Parameter | None:
    """
    The weight of wte and the tied head, if this rank of a pipeline holds one of the two, and another rank the
    other.
    """
    ends = sum(stage.is_first + stage.is_last for stage in getattr(model, "stages", []))
    return model.lm_head.weight if model.config.tied and ends == 1 else None


def fsdp_units(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are units of fully_shard."""
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after a forward pass without a backward pass; do nothing without FSDP."""
    for unit in fsdp_units(model):
        unit.reshard()


@contextmanager
@torch.no_grad()
def kept_weights(model: nn.Module) -> Iterator[None]:
    """A context in which the weights may be changed; on leaving it, they are what they were, to the bit."""
    reshard(model)
    kept = [local(p).clone() for p in model.parameters()]
    try:
        yield
    finally:  # if an evaluation fails, the state is saved
        reshard(model)
        for p, weight in zip(model.parameters(), kept, strict=True):
            local(p).copy_(weight)


def in_buckets(tensors: list[Tensor], bucket_bytes: int = 2**25) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in lists of at most this size; a larger tensor is alone in its list."""
    bucket, size = [], 0
    for t in tensors:
        if bucket and size + t.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += t.nbytes
    if bucket:
        yield bucket


def views_of(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, in the shapes of the tensors that were concatenated."""
    parts = flat.split([t.numel() for t in tensors])
    return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]


def norms_of(params: Iterable[nn.Parameter]) -> Norms:
    """Return the norms of this rank's gradients, without waiting for a GPU."""
    pieces = {}
    for p in params:
        if p.grad is not None:
            grad = local(p.grad)
            pieces[p] = grad.flatten().split(SQUARES_AT_ONCE) if grad.device.type == "cpu" else [grad]
    norms = iter(torch._foreach_norm([*chain.from_iterable(pieces.values())]) if pieces else ())
    return {p: [next(norms) for _ in of_grad] for p, of_grad in pieces.items()}


def sum_in_buckets(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by the sum over the group (all its ranks), many tensors in one collective."""
    for bucket in in_buckets(tensors):
        flat = torch.cat([t.flatten() for t in bucket])
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(bucket, views_of(flat, bucket))
