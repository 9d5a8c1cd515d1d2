"""Optimizer steps whose bits do not depend on which rank holds which part of the parameters, for `exact`."""

from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw as update_adamw

from isogpt.parallel.local_parts import local
from isogpt.training.muon import Muon
from isogpt.training.optimizer_state import create_state

# Fused AdamW on a CPU updates whole vectors of up to this many float32 numbers with different instructions
# than the rest of a tensor, which rounds differently (torch 2.13).
VECTOR = 16


def make_steps_exact(optimizers: list[torch.optim.Optimizer]) -> None:
    """
    Let the optimizers compute an element's update in the same way in any shard and next to any other
    parameters, in place. The step of other layouts is the same up to rounding.
    """
    for optimizer in optimizers:
        inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
        if isinstance(inner, Muon):
            inner.separately = True
        elif inner.defaults["fused"]:
            inner.step = partial(step_in_whole_vectors, inner)


@torch.no_grad()
def step_in_whole_vectors(adamw: torch.optim.AdamW, closure: None = None) -> None:
    """
    Take a fused AdamW's step on this rank's parts of the parameters, as if each part were whole vectors.
    """
    create_state(adamw)
    amp = {name: getattr(adamw, name, None) for name in ("grad_scale", "found_inf")}
    for group in adamw.param_groups:
        params = [p for p in group["params"] if p.grad is not None]
        states = [adamw.state[p] for p in params]
        parts = [
            [local(t) for t in (p, p.grad, s["exp_avg"], s["exp_avg_sq"])]
            for p, s in zip(params, states, strict=True)
        ]
        settings = {
            name: group[name] for name in ("lr", "weight_decay", "eps", "fused", "amsgrad", "maximize")
        }
        beta1, beta2 = group["betas"]
        padded = [in_whole_vectors(tensors) for tensors in parts]
        columns = [list(column) for column in zip(*padded, strict=True)] or [[], [], [], []]
        update_adamw(*columns, [], [s["step"] for s in states], beta1=beta1, beta2=beta2, **settings, **amp)
        for tensors, copies in zip(parts, padded, strict=True):
            for t, copied in zip(tensors, copies, strict=True):
                if copied is not t:
                    t.copy_(copied[: t.numel()].view_as(t))


def in_whole_vectors(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, of equal shape, or padded flat copies if they do not consist of whole vectors."""
    missing = -tensors[0].numel() % VECTOR
    return [torch.nn.functional.pad(t.flatten(), (0, missing)) for t in tensors] if missing else tensors
