"""
The ways of spreading a model over processes, one function each; the model itself knows of none (DESIGN.md, law 6).

In the order in which train.py applies them: recompute, compiled, shard (on the meta device, then materialize), and,
with the weights in place, data_parallel. `zero` says what is sharded over the data-parallel ranks (ZeRO, Rajbhandari
et al. 2020, arXiv:1910.02054): 0 nothing, 1 the optimizer's state, 2 the gradients too, 3 the parameters too.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launch import Ranks, gather_objects
from model import GPT, GPTConfig

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


def data_mesh(ranks: Ranks, dp_replicate: int) -> DeviceMesh:
    """
    The mesh of the data-parallel ranks: ("shard",), or ("replicate", "shard") for HSDP, where neighbours shard.

    Raises:
        ValueError: dp_replicate does not divide the world size.
    """
    if dp_replicate == 1:
        return init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("shard",))
    shape = (dp_replicate, ranks.world_size // dp_replicate)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, ranks: Ranks, zero: int, dp_replicate: int, dtype: torch.dtype, cpu_offload: bool) -> None:
    """
    ZeRO-2 and 3 by FSDP2's fully_shard, in place: each block is a unit that is gathered when it is needed, the rest
    (embeddings, the tied head, the last norm) another. With zero 2 what is gathered stays until the backward is done.
    The blocks compute in `dtype`, their gradients are reduced and the weights kept in float32.
    """
    if zero < 2:
        return
    mixed = dtype if dtype != torch.float32 else None
    settings = dict(
        mesh=data_mesh(ranks, dp_replicate),
        reshard_after_forward=zero == 3,
        mp_policy=MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=torch.float32 if mixed else None),
        offload_policy=CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if cpu_offload else OffloadPolicy(),
    )
    for block in model.transformer.h:
        fully_shard(block, **settings)
    # what is left is needed until the end of the forward and at once after it: giving it back would gain nothing
    fully_shard(model, **settings | {"reshard_after_forward": False})


def materialize(model: nn.Module, device: torch.device, cpu_offload: bool = False) -> None:
    """Give a model of the meta device, sharded or not, memory for what this rank holds of it; its values come next."""
    model.to_empty(device="cpu" if cpu_offload else device)
    model.tie_weights()


@torch.no_grad()
def put(target: Tensor, full: Tensor) -> None:
    """Copy the whole tensor `full` into `target`, or what this rank holds of it: no communication."""
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        full = full.to(target.dtype)
        full = distribute_tensor(full, mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(full.to_local())
    else:
        target.copy_(full)


def make_optimizer(
    model: nn.Module, zero: int, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
) -> torch.optim.Optimizer:
    """The model's AdamW; with zero 1 each rank keeps and updates its share of the parameters and sends them around."""
    optimizer = model.configure_optimizers(weight_decay, learning_rate, betas, device_type)
    if zero != 1:
        return optimizer
    groups = [{k: group[k] for k in ("params", "weight_decay")} for group in optimizer.param_groups]
    fused = optimizer.param_groups[0]["fused"]
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=learning_rate, betas=betas, fused=fused)


def data_parallel(model: nn.Module, ranks: Ranks) -> nn.Module:
    """DistributedDataParallel (zero 0 and 1): each rank has the whole model, gradients are averaged over the ranks."""
    if ranks.world_size == 1 or isinstance(model, FSDPModule):
        return model
    own = {"device_ids": [ranks.device.index]} if ranks.device.type == "cuda" else {}
    # gradients live in the buckets that are sent: one copy less of them in memory
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **own)


def settle_buckets(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """
    One discarded forward and backward (all ranks), before the first step after a start.

    DDP orders its buckets anew after the first backward, and with three or more ranks another order sums in another
    order. Without this a resumed run would differ in the last bits from the run that never stopped.
    """
    if isinstance(model, DistributedDataParallel):
        _, loss = model(x, y, 1.0)
        loss.backward()
        model.zero_grad(set_to_none=True)


def sync_if(model: nn.Module, now: bool) -> AbstractContextManager:
    """Gradients are reduced over the ranks in this micro-step's backward, or stay on the rank and add up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not now else nullcontext()


def reshard(model: nn.Module) -> None:
    """After a forward without a backward: give back what it gathered, so that parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(value: Tensor) -> Tensor:
    """A plain tensor of a norm that may be spread over the ranks (all ranks)."""
    return value.full_tensor() if isinstance(value, DTensor) else value


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
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    names = {p: name for name, p in model.named_parameters()}
    for group in inner.param_groups:
        for p in group["params"]:
            if not inner.state[p]:
                on = p.device if group["fused"] else "cpu"
                step = torch.zeros((), dtype=torch.float32, device=on)
                inner.state[p] = dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    return {names[p]: inner.state[p] for group in inner.param_groups for p in group["params"]}


# ---------------------------------------------------------------------------------------------------------------------
# what it costs


class Live(TorchDispatchMode):
    """Notes when each piece of memory that operators make is born and when it is gone, in numbers of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.pieces, self.now = {}, [], 0

    def __torch_dispatch__(self, func: Callable, types: list, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        self.now += 1
        for key, (ref, size, born) in list(self.alive.items()):
            if ref.expired():
                self.pieces.append((size, born, self.now))
                del self.alive[key]
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes(), self.now))
        return out

    def peak(self, but: set[int]) -> int:
        """The most bytes that were alive at once, without these storages, which still are."""
        ends = [(size, born, self.now + 1) for key, (_, size, born) in self.alive.items() if key not in but]
        change = [0] * (self.now + 2)
        for size, born, gone in self.pieces + ends:
            change[born] += size
            change[gone] -= size
        return max(accumulate(change))


def activation_bytes(model_args: dict, rows: int, dtype: str, mode: str) -> int:
    """
    The most memory that activations, and what the backward makes on its way, take in a micro-step of `rows` rows.
    The step is run with tensors that have a shape but no memory.
    """
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    with FakeTensorMode():
        model = GPT(GPTConfig(**model_args), 0)
        recompute(model, mode)
        idx = torch.zeros(rows, model_args["block_size"], dtype=torch.int64)
        with Live() as live:
            with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
                _, loss = model(idx, idx, 1.0)
            loss.backward()
            return live.peak(but={p.grad.untyped_storage()._cdata for p in model.parameters()})


def memory_estimate(
    model_args: dict, rows: int, dtype: str, world_size: int, zero: int, dp_replicate: int, sync_every: bool,
    cpu_offload: bool, mode: str,
) -> dict[str, float]:  # fmt: skip
    """
    GB that the parts of a training step take on each rank's device, without allocating them: weights (float32, and
    what is gathered of them), gradients, optimizer state (two moments), activations; and their total.
    """
    with torch.device("meta"):
        model = GPT(GPTConfig(**model_args))
    n = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.transformer.h[0].parameters())
    unit = n - block * model_args["n_layer"] + 2 * block  # gathered at once: the root's, a block's and the next one's
    shards = world_size // dp_replicate
    compute = 2 if dtype in ("bfloat16", "float16") else 4  # bytes
    weights, gradients, moments = 4 * n, 4 * n, 8 * n
    if zero >= 1:
        moments /= shards
    if zero >= 2:
        weights = 4 * n / shards + compute * (n if zero == 2 else unit)
        # before they are reduced and sharded: a unit's, or with grad_sync 'last' all of them
        gradients = 4 * n / shards + compute * (unit if sync_every else n)
    if cpu_offload:
        weights, gradients, moments = weights - 4 * n / shards, gradients - 4 * n / shards, 0
    parts = {"weights": weights, "gradients": gradients, "optimizer": moments}
    parts["activations"] = activation_bytes(model_args, rows, dtype, mode)
    parts = {name: size / 1e9 for name, size in parts.items()}
    return parts | {"total": sum(parts.values())}


def memory_report(cost: dict) -> str:
    """What the parts of memory_estimate(**cost) are, and the total with each flag that would lower it."""
    now = memory_estimate(**cost)
    options = {}
    if cost["rows"] > 1:
        options[f"--batch_size={cost['rows'] // 2}"] = dict(rows=cost["rows"] // 2)
    if cost["mode"] == "none":
        options["--activation_checkpointing=full"] = dict(mode="full")
    if cost["zero"] < 3 and cost["world_size"] > 1:
        sharded = dict(zero=3, sync_every=True)
        options |= {"--fsdp=True": sharded}
        options |= {"--fsdp=True --activation_checkpointing=full": sharded | dict(mode="full")}
    if cost["zero"] >= 2 and not cost["cpu_offload"]:
        options["--cpu_offload=True"] = dict(cpu_offload=True)
    totals = {flag: memory_estimate(**cost | change)["total"] for flag, change in options.items()}
    lower = [f"{flag} {total:.2f}" for flag, total in totals.items() if total < now["total"]]
    parts = ", ".join(f"{name} {size:.2f}" for name, size in now.items())
    return f"GB on each rank, estimated: {parts}" + f"; the total with {', '.join(lower)}" * bool(lower)
