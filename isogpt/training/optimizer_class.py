"""
Optimizers that are not ours: a class from a user's file or from torch.optim, which updates each element of a
parameter independently of the others. And the optimizers of shards.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from isogpt.parallel.local_parts import local

Class = type[torch.optim.Optimizer]


@cache
def load_class(place: str) -> Class:
    """
    Return the class that `place`, FILE.py:CLASS, names. The file is run only once.

    Raises:
        ValueError: the file cannot be run, or contains no such optimizer.
    """
    file, _, name = place.rpartition(":")
    path = Path(file).expanduser()
    module_name = f"optimizer_{path.stem}"
    loader = SourceFileLoader(module_name, str(path))
    module = module_from_spec(spec_from_file_location(module_name, loader=loader))
    sys.modules[module_name] = module  # dataclasses and pickle look it up
    try:
        loader.exec_module(module)
    except Exception as e:  # whatever a user's file raises
        raise ValueError(f"{file} of --optimizer={place} fails: {in_one_line(e)}") from e
    base = torch.optim.Optimizer
    classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and base in value.__mro__[1:]
    }
    if name not in classes:
        raise ValueError(
            f"optimizer is {place!r}, but the subclasses of torch.optim.Optimizer in {file} are: "
            f"{', '.join(classes) or 'none'}"
        )
    return classes[name]


def in_one_line(error: Exception) -> str:
    """The kind of an error and its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


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

    state: tuple[str, ...]  # names of what it keeps for a parameter
    moments: int  # how many of these are tensors in the parameter's shape
    numbers: tuple[str, ...]  # names of the numbers in its groups that a step changes


@cache
def kept_by(cls: Class) -> Kept:
    """
    Return what an optimizer keeps, from its first step of a small parameter.

    Raises:
        ValueError: it cannot be made or fails, or does not update each element independently of the others.
    """
    p = nn.Parameter(torch.ones(2, 3))
    try:
        optimizer = cls([{"params": [p]}], **options_of(cls, {"lr": 1e-3, "betas": (0.9, 0.95)}))
        if has_modes(cls):
            optimizer.train()
        (group,) = optimizer.param_groups
        before = dict(group)
        p.grad = torch.ones_like(p)
        optimizer.step()
    except Exception as e:  # whatever a user's class raises
        takes = "it is called with (groups, lr=..., betas=...), as far as it takes these, and step()"
        raise ValueError(f"optimizer {cls.__name__} fails: {in_one_line(e)} ({takes})") from e
    state = {key: value for key, value in optimizer.state[p].items() if value is not None}
    moments = [key for key, value in state.items() if getattr(value, "shape", None) == p.shape]
    for key in state.keys() - moments:
        value = state[key]
        if not (is_number(value) or (torch.is_tensor(value) and value.numel() == 1)):
            raise ValueError(
                f"optimizer {cls.__name__} is not element-wise: it keeps {key}, neither a number nor a "
                "tensor of the parameter's shape"
            )
    numbers = [key for key, value in group.items() if is_number(value) and value != before.get(key)]
    return Kept(tuple(state), len(moments), tuple(numbers))


def is_number(value: object) -> bool:
    """Whether a value is a Python number, or True or False."""
    return isinstance(value, int | float)


class OnShards(torch.optim.Optimizer):
    """
    An optimizer of DTensors that lets an optimizer of another class update this rank's parts as plain
    tensors. That class need not know DTensors, whose dispatch also takes longer than a small tensor's step.
    """

    def __init__(self, groups: list[dict], cls: Class, **options: Any) -> None:
        super().__init__(groups, {})
        self.optim = cls([{**group, "params": parts_of(group["params"])} for group in groups], **options)
        share_groups(self.optim, self)

    def parts(self) -> list[nn.Parameter]:
        """This rank's parts: FSDP can move a DTensor to other memory before the first step."""
        parts = params_of(self.optim)
        for part in parts:
            part.data = local(part.whole).detach()
        return parts

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Update all parts with a gradient."""
        parts = self.parts()
        for part in parts:
            part.grad = None if part.whole.grad is None else local(part.whole.grad)
        share_groups(self, self.optim)
        self.optim.step()
        share_groups(self.optim, self)
        for part in parts:
            part.grad = None


def parts_of(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """This rank's parts of parameters, which know their DTensors."""
    parts = [nn.Parameter(local(p).detach()) for p in params]
    for part, p in zip(parts, params, strict=True):
        part.whole = p
    return parts


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def share_groups(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy what the groups of one optimizer contain besides parameters to those of another."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({key: value for key, value in group.items() if key != "params"})


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """
    What updates this rank's share: the optimizer in a ZeroRedundancyOptimizer or in OnShards, or the
    optimizer itself.
    """
    return getattr(optimizer, "optim", optimizer)


def has_modes(cls: Class) -> bool:
    """Whether an optimizer evaluates weights other than those it trains, as schedule-free optimizers do."""
    return hasattr(cls, "eval") and hasattr(cls, "train")


def evaluates_average(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer evaluates weights other than those it trains."""
    return any(has_modes(type(inner_optimizer(optimizer))) for optimizer in optimizers)


@torch.no_grad()
def set_mode(optimizers: list[torch.optim.Optimizer], mode: str) -> None:
    """
    Call `eval` or `train` of the optimizers that have both, which changes the weights in place (all ranks).

    Args:
        mode: 'eval' or 'train'.
    """
    for optimizer in optimizers:
        inner = inner_optimizer(optimizer)
        if not has_modes(type(inner)):
            continue
        if isinstance(optimizer, OnShards):
            optimizer.parts()
        getattr(inner, mode)()
        share_groups(inner, optimizer)
        if hasattr(optimizer, "_sync_params"):  # ZeroRedundancyOptimizer's, which its step calls
            optimizer._sync_params()
