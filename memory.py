"""
How much memory a training step takes on each rank, by its parts, without allocating it (bench.py --estimate), and what
would lower it (said when a run goes out of memory).
"""

from collections.abc import Callable
from itertools import accumulate
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_file
from model import GPT, GPTConfig, logits_at_once
from parallel import recompute


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


def activation_bytes(model_args: dict, rows: int, dtype: str, mode: str, on_cpu: bool) -> int:
    """
    The most memory that activations, and what the backward makes on its way, take in a micro-step of `rows` rows.
    The step is run with tensors that have a shape but no memory.
    """
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    model_file.causal_bias.cache_clear()  # no real mask among fake tensors, nor a fake one after them
    own_attention = mock.patch.object(model_file, "HALF_ATTENTION_UP_TO", model_file.HALF_ATTENTION_UP_TO * on_cpu)
    masks = mock.patch.object(model_file, "dropout_factors", lambda shape, p, dtype: torch.empty(shape, dtype=dtype))
    logits = mock.patch.object(model_file, "logits_at_once", lambda _, itemsize: logits_at_once(on_cpu, itemsize))
    with FakeTensorMode(), own_attention, masks, logits:
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
    cpu_offload: bool, mode: str, on_cpu: bool, prefetch: int = 1,
) -> dict[str, float]:  # fmt: skip
    """
    GB that the parts of a training step take on each rank's device, without allocating them: weights (float32, and
    what is gathered of them), gradients, optimizer state (two moments), activations; and their total.
    """
    with torch.device("meta"):
        model = GPT(GPTConfig(**model_args))
    n = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.transformer.h[0].parameters())
    ahead = min(1 + prefetch, model_args["n_layer"])
    unit = n - block * (model_args["n_layer"] - ahead)  # gathered at once: the root's, a block's and those ahead of it
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
    parts["activations"] = activation_bytes(model_args, rows, dtype, mode, on_cpu)
    model_file.causal_bias.cache_clear()
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
