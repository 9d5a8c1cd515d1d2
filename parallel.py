"""
The ways of spreading a model over processes, one function each; the model itself knows of none (DESIGN.md, law 6).
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from launch import Ranks, gather_objects


def compiled(model: nn.Module, ranks: Ranks) -> tuple[bool, str]:
    """
    torch.compile the model, in place: its parameters keep their names (all ranks).

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
    model.compile()
    return True, "compile: the first step takes about a minute longer"


def data_parallel(model: nn.Module, ranks: Ranks) -> nn.Module:
    """DistributedDataParallel: each rank has the whole model, the gradients are averaged over the ranks."""
    if ranks.world_size == 1:
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


def no_sync(model: nn.Module, last: bool) -> AbstractContextManager:
    """Gradients stay on the rank during all micro-steps of a step but the last, whose backward sends their sum."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
