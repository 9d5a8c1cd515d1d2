"""
Optimizers that are not ours: a class from a user's file or from torch.optim, which updates each element of a
parameter independently of the others. What it keeps from step to step is found by a probe.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isogpt.parallel.local_parts import local

Class = type[torch.optim.Optimizer]
BETAS = (0.9, 0.95)  # of a probe


@cache
def load_class(place: str) -> Class:
    """
    Return the class that `place`, FILE.py:CLASS, names. The file is run only once.

    Raises:
        ValueError: there is no such file or class, the file fails, or the class is not an optimizer.
    """
    file, _, name = place.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(
            f"optimizer is {place!r}, but there is no file {file}: set --optimizer=FILE.py:CLASS"
        )
    spec = importlib.util.spec_from_file_location(f"optimizer_{path.stem}", path)
    if spec is None:
        raise ValueError(f"optimizer is {place!r}, but the name of a Python file ends in .py: rename {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except Exception as e:  # whatever a user's file raises
        raise ValueError(f"{file} of --optimizer={place} fails: {in_one_line(e)}") from e
    cls = getattr(module, name, None)
    if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)):
        classes = [key for key, value in vars(module).items() if is_optimizer(value)]
        what = f"its {name} is not one" if hasattr(module, name) else f"it contains no {name}"
        possible = ", ".join(f"--optimizer={file}:{key}" for key in classes) or "add a class to it"
        raise ValueError(
            f"optimizer needs a subclass of torch.optim.Optimizer in {file}, but {what}: {possible}"
        )
    return cls


def is_optimizer(value: object) -> bool:
    """Whether a value is a class of optimizers, other than their base class."""
    base = torch.optim.Optimizer
    return inspect.isclass(value) and issubclass(value, base) and value is not base


def in_one_line(error: Exception) -> str:
    """The kind of an error and its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def options_of(cls: Class, values: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate and the betas among these values, as far as the class takes them."""
    return {name: values[name] for name in ("lr", "betas") if takes(cls, name) and name in values}


def takes(cls: Class, name: str) -> bool:
    """Whether a class can be made with an argument of this name, which it may pass on to its base class."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            arguments = inspect.signature(base.__init__).parameters
            if name in arguments:
                return True
            if all(argument.kind is not argument.VAR_KEYWORD for argument in arguments.values()):
                return False
    return False


class Kept(NamedTuple):
    """
    What an optimizer keeps from step to step. `state` maps names to values of the probe: tensors in the shape
    of its parameter (moments), tensors of one element, and numbers. `group` maps the names of the numbers in
    param_groups that a step changes to values after the probe's steps.
    """

    state: dict[str, Tensor | float]
    shape: torch.Size  # of the probe's parameter
    group: dict[str, float]

    @property
    def moments(self) -> int:
        """How many tensors in the shape of a parameter are kept for it."""
        return sum(is_moment(value, self.shape) for value in self.state.values())

    def new_state(self, p: Tensor) -> dict[str, Tensor | float]:
        """Memory for the state of a parameter, or of this rank's part of it; a checkpoint will fill it."""
        state = {}
        for name, value in self.state.items():
            if is_moment(value, self.shape):
                state[name] = torch.zeros_like(p, dtype=value.dtype)
            else:
                state[name] = value.clone() if torch.is_tensor(value) else value
        return state


def is_moment(value: object, shape: torch.Size) -> bool:
    """Whether a value is a tensor of this shape."""
    return torch.is_tensor(value) and value.shape == shape


def is_number(value: object) -> bool:
    """Whether a value is a Python number, or True or False."""
    return isinstance(value, int | float)


@cache
def kept_by(cls: Class, dims: int, device: torch.device, betas: tuple[float, ...] = BETAS) -> Kept:
    """
    Find out what an optimizer keeps from step to step, by two steps with a parameter of `dims` dimensions.

    Raises:
        ValueError: it cannot be made or fails, or it keeps what a checkpoint or a shard cannot hold.
    """
    shape = torch.Size(range(2, 2 + dims))  # sides of different lengths
    p = nn.Parameter(torch.linspace(-1, 1, shape.numel(), device=device).view(shape))
    name, address = cls.__name__, p.data_ptr()
    try:
        optimizer = cls([{"params": [p]}], **options_of(cls, {"lr": 1e-3, "betas": betas}))
        if has_modes(cls):
            optimizer.train()
        (group,) = optimizer.param_groups
        before, attributes = snapshot(group), snapshot(vars(optimizer))
        for sign in (1, -0.5):
            p.grad = sign * p.detach() + 0.1
            optimizer.step()
    except Exception as e:  # whatever a user's class raises
        takes = "it is called with (groups, lr=..., betas=...), as far as it takes these, and step()"
        raise ValueError(f"optimizer {name} fails: {in_one_line(e)} ({takes})") from e
    if p.data_ptr() != address or p is not group["params"][0]:
        raise ValueError(
            f"optimizer {name} replaces a parameter's memory (p.data = ...), but others hold views of it: "
            "update it in place, as with p.copy_(...)"
        )
    state = {key: value for key, value in optimizer.state[p].items() if value is not None}
    for key, value in state.items():
        is_scalar = is_number(value) or (torch.is_tensor(value) and value.numel() == 1)
        if not (is_moment(value, p.shape) or is_scalar):
            what = (
                f"a tensor of shape {tuple(value.shape)}" if torch.is_tensor(value) else type(value).__name__
            )
            raise ValueError(
                f"optimizer {name} is not element-wise: for a parameter of shape {tuple(p.shape)} it keeps "
                f"{key}, {what}. It may keep only numbers and tensors of the same shape"
            )
    changed = changes(before, snapshot(group))
    if others := [key for key in changed if not is_number(group[key])]:
        raise ValueError(
            f"optimizer {name} changes {others[0]} in its groups, of which a checkpoint holds only numbers"
        )
    if hidden := changes(attributes, snapshot(vars(optimizer))):
        raise ValueError(
            f"optimizer {name} changes its attribute {hidden[0]}, which no checkpoint would hold: keep it in "
            "the group, as with group['step'] += 1"
        )
    return Kept(state, p.shape, {key: group[key] for key in changed})


def snapshot(values: Mapping[str, Any]) -> dict[str, Tensor | float]:
    """The numbers among some values, and copies of the tensors."""
    copies = {key: value.clone() for key, value in values.items() if torch.is_tensor(value)}
    return copies | {key: value for key, value in values.items() if is_number(value)}


def changes(before: Mapping[str, Tensor | float], after: Mapping[str, Tensor | float]) -> list[str]:
    """The keys of a later snapshot that an earlier one lacks, or holds with a different value."""
    return [
        key
        for key, value in after.items()
        if key not in before or not bool(torch.all(torch.as_tensor(before[key] == value)))
    ]


class OnShards(torch.optim.Optimizer):
    """
    An optimizer of DTensors that lets an optimizer of another class update this rank's parts as plain
    tensors. That class need not know DTensors, whose dispatch also takes longer than a small tensor's step.
    """

    def __init__(self, groups: list[dict], cls: Class, **options: Any) -> None:
        super().__init__(groups, {})
        self.optim = cls([self.group_of_parts(group) for group in groups], **options)
        share_groups(self.optim, self)

    def group_of_parts(self, group: dict) -> dict:
        """The same group with this rank's parts, which know their DTensors."""
        parts = []
        for p in group["params"]:
            part = nn.Parameter(local(p).detach())
            part.whole = p
            parts.append(part)
        return {**group, "params": parts}

    def parts(self) -> list[nn.Parameter]:
        """This rank's parts: FSDP can move a DTensor to other memory before the first step."""
        parts = [part for group in self.optim.param_groups for part in group["params"]]
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


@torch.no_grad()
def switch(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Call `eval` or `train` of an optimizer, which changes the weights in place (all ranks)."""
    inner = inner_optimizer(optimizer)
    if isinstance(optimizer, OnShards):
        optimizer.parts()
    share_groups(optimizer, inner)  # as in a step: the groups of both say the same
    getattr(inner, mode)()
    share_groups(inner, optimizer)
    if hasattr(optimizer, "_sync_params"):  # ZeroRedundancyOptimizer's, which its step calls
        optimizer._sync_params()
