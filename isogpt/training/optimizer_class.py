"""
Optimizers that are not ours: a class from a user's file or from torch.optim, which updates each element of a
parameter independently of the others. And the optimizers of shards.
"""

import inspect
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from isogpt.common.files import reason_of
from isogpt.parallel.local_parts import local

Class = type[Optimizer]
Optimizers = Sequence[Optimizer]


@cache
def load_class(place: str) -> Class:
    """
    Return the class that `place`, FILE.py:CLASS, names. The file is run only once.

    Raises:
        ValueError: the file cannot be run, or contains no such optimizer.
    """
    file, _, name = place.rpartition(":")
    path = Path(file).expanduser()
    loader = SourceFileLoader(f"optimizer_{path.stem}", str(path))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # dataclasses and pickle look it up
    try:
        loader.exec_module(module)
    except Exception as e:  # whatever a user's file raises
        raise ValueError(f"{file} of --optimizer={place} fails: {type(e).__name__}: {reason_of(e)}") from e
    members = inspect.getmembers(module, inspect.isclass)
    classes = {key: cls for key, cls in members if Optimizer in cls.__mro__[1:]}
    if name not in classes:
        choices = ", ".join(classes) or "none"
        raise ValueError(f"optimizer is {place!r}, but the optimizers in {file} are: {choices}")
    return classes[name]


def options_of(cls: Class, values: dict[str, Any]) -> dict[str, Any]:
    """Those of these values that the class takes, or passes on to its base class."""
    names = set()
    for base in cls.__mro__:
        arguments = inspect.signature(base.__init__).parameters
        names |= {*arguments}
        if all(argument.kind is not argument.VAR_KEYWORD for argument in arguments.values()):
            break
    return {name: value for name, value in values.items() if name in names}


class Kept(NamedTuple):
    """What an optimizer keeps from step to step."""

    state: dict[str, torch.Size]  # the shape of what it keeps for a parameter, by name
    moments: int  # how many of these have the parameter's shape
    numbers: list[str]  # names of the numbers in its groups that a step changes


@cache
def kept_by(cls: Class) -> Kept:
    """
    Return what an optimizer keeps, from its first step of a small parameter.

    Raises:
        ValueError: it cannot be made or fails, or does not update each element independently of the others.
    """
    p = nn.Parameter(torch.ones(2, 3))
    p.grad = torch.ones_like(p)
    try:
        optimizer = cls([{"params": [p]}], **options_of(cls, {"lr": 1e-3, "betas": (0.9, 0.95)}))
        if has_modes(cls):
            optimizer.train()
        (group,) = optimizer.param_groups
        before = dict(group)
        optimizer.step()
        kept = {key: value for key, value in optimizer.state[p].items() if value is not None}
        shapes = {key: torch.as_tensor(value).shape for key, value in kept.items()}
    except Exception as e:  # whatever a user's class raises
        raise ValueError(f"optimizer {cls.__name__} fails: {type(e).__name__}: {reason_of(e)}") from e
    if others := [key for key, shape in shapes.items() if shape != p.shape and shape.numel() != 1]:
        raise ValueError(f"optimizer {cls.__name__} is not element-wise: {others[0]} has another shape")
    numbers = [key for key, value in group.items() if isinstance(value, int | float)]
    changed = [key for key in numbers if group[key] != before.get(key)]
    return Kept(shapes, [*shapes.values()].count(p.shape), changed)


class OnShards(Optimizer):
    """
    An optimizer of DTensors that lets an optimizer of another class update this rank's parts as plain
    tensors. That class need not know DTensors, whose dispatch also takes longer than a small tensor's step.
    """

    def __init__(self, groups: list[dict], cls: Class, **options: Any) -> None:
        super().__init__(groups, {})
        parts = [{**group, "params": [*map(part_of, group["params"])]} for group in groups]
        self.optim = cls(parts, **options)
        share_groups(self.optim, self)

    def parts(self) -> list[nn.Parameter]:
        """This rank's parts: FSDP can move a DTensor to other memory before the first step."""
        parts = params_of(self.optim)
        for part in parts:
            part.data = local(part.whole).detach()
        return parts

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parts with a gradient."""
        for part in self.parts():
            part.grad = local(part.whole.grad)
        share_groups(self, self.optim)
        self.optim.step()
        share_groups(self.optim, self)
        self.optim.zero_grad()


def part_of(p: nn.Parameter) -> nn.Parameter:
    """This rank's part of a DTensor, which knows it."""
    part = nn.Parameter(local(p).detach())
    part.whole = p
    return part


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def share_groups(source: Optimizer, target: Optimizer) -> None:
    """Copy what the groups of one optimizer contain besides parameters to those of another."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({key: value for key, value in group.items() if key != "params"})


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """
    What updates this rank's share: the optimizer in a ZeroRedundancyOptimizer or in OnShards, or the
    optimizer itself.
    """
    return getattr(optimizer, "optim", optimizer)


def has_modes(optimizer: Class | Optimizer) -> bool:
    """Whether an optimizer evaluates weights other than those it trains, as schedule-free optimizers do."""
    return hasattr(optimizer, "eval") and hasattr(optimizer, "train")


def evaluates_average(optimizers: Optimizers) -> bool:
    """Whether an optimizer evaluates weights other than those it trains."""
    return any(has_modes(inner_optimizer(optimizer)) for optimizer in optimizers)


@torch.no_grad()
def set_mode(optimizers: Optimizers, mode: str) -> None:
    """
    Call `eval` or `train` of the optimizers that have both, which changes the weights in place (all ranks).

    Args:
        mode: 'eval' or 'train'.
    """
    for optimizer in optimizers:
        inner = inner_optimizer(optimizer)
        if not has_modes(inner):
            continue
        if isinstance(optimizer, OnShards):
            optimizer.parts()
        share_groups(optimizer, inner)  # rates may have been set since the last step
        getattr(inner, mode)()
        share_groups(inner, optimizer)
        if hasattr(optimizer, "_sync_params"):  # ZeroRedundancyOptimizer's, which its step calls
            optimizer._sync_params()
