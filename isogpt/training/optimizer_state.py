"""The state of the optimizers by parameter name, and as nanoGPT numbers it in a ckpt.pt."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isogpt.parallel.local_parts import like
from isogpt.training.optimizer_class import Optimizers, inner_optimizer, kept_by, share_groups

GROUP = "group:"  # before the name of a number that an optimizer keeps for a group of parameters
States = dict[str, dict[str, Tensor]]  # {parameter name: {key: tensor}}
Update = tuple[str, nn.Parameter, Optimizer, dict]  # see `updates_of`


def is_of_kind(optimizers: Optimizers, kind: str) -> bool:
    """Whether these are the classes that a setting `optimizer` names, in files that may have been moved."""
    settings = (kind, optimizers[0].param_groups[0].get("optimizer", "adamw"))
    # without folders: muon+mine/lion.py:Lion -> muon+lion.py:Lion
    return len({re.sub(r"[^+]*/", "", setting) for setting in settings}) == 1


def updates_of(model: nn.Module, optimizers: Optimizers) -> Iterator[Update]:
    """
    Yield (name, what is updated, the optimizer that does it, its group) for each parameter that this rank
    updates.
    """
    names = {p: name for name, p in model.named_parameters()}
    for inner in map(inner_optimizer, optimizers):
        for group in inner.param_groups:
            for p in group["params"]:
                yield names[getattr(p, "whole", p)], p, inner, group


def state_by_name(model: nn.Module, optimizers: Optimizers) -> States:
    """
    Return the optimizers' tensors of what this rank holds: with ZeRO-1 some of the parameters, with ZeRO-2
    and 3 a shard of each. Numbers that are not tensors are put into new ones, see `filled_state`. Parameters
    that an optimizer of a user's class has not updated yet have no state.
    """
    states = {}
    for name, p, inner, group in updates_of(model, optimizers):
        kept, state = kept_by(type(inner)), dict(inner.state.get(p, {}))
        if state or not kept.state:
            state |= {GROUP + key: group[key] for key in kept.numbers if key in group}
        tensors = {key: as_tensor(value, p) for key, value in state.items() if value is not None}
        if tensors:
            states[name] = tensors
    return states


def as_tensor(value: Tensor | float, p: nn.Parameter) -> Tensor:
    """A number as a tensor, and a moment of this rank's part of a DTensor as a DTensor."""
    if torch.is_tensor(value):
        return like(getattr(p, "whole", p), value)
    return torch.tensor(float(value), dtype=torch.float64)


@contextmanager
def filled_state(model: nn.Module, optimizers: Optimizers, names: Collection[str]) -> Iterator[States]:
    """
    In the block, a checkpoint must be copied to the weights, and to the optimizers' state, which is yielded.
    State that is not there yet is allocated by a step with gradients of 0.

    Args:
        names: of the parameters of which the checkpoint contains state.
    """
    updates = [update for update in updates_of(model, optimizers) if update[0] in names]
    new = [(p, inner) for _, p, inner, _ in updates if not inner.state.get(p)]
    for p, _ in new:
        p.grad = torch.zeros_like(p)
    for inner in {inner for _, inner in new}:
        inner.step()
        inner.zero_grad()
    states = state_by_name(model, optimizers)
    yield states
    for name, p, inner, group in updates:
        for key, value in states.get(name, {}).items():
            place = group if key.startswith(GROUP) else inner.state[p]
            key = key.removeprefix(GROUP)
            if not torch.is_tensor(place[key]):
                place[key] = type(place[key])(value.item())
    for optimizer in optimizers:
        share_groups(inner_optimizer(optimizer), optimizer)


def saved_state(model: nn.Module, optimizers: Optimizers) -> dict:
    """
    Return the state for ckpt.pt: by number, in two groups, as nanoGPT stores it, if AdamW alone updates all
    parameters of a GPT-2; else by parameter name.
    """
    weights = dict(model.named_parameters())
    is_adamw = [isinstance(optimizer, torch.optim.AdamW) for optimizer in optimizers] == [True]
    is_numbered = [name for name, *_ in updates_of(model, optimizers)] == numbered(weights)
    if not (is_adamw and is_numbered and model.config.arch == "gpt2"):
        return {"state": state_by_name(model, optimizers)}
    state = optimizers[0].state_dict()
    for group in state["param_groups"]:
        group.pop("lr_scale")
        group.pop("optimizer", None)
    return state


def numbered(weights: dict[str, Tensor]) -> list[str]:
    """
    The names of weights as nanoGPT numbers their state: those of two or more dimensions first, then the rest,
    both in the order of `weights`.
    """
    return sorted((n for n in weights if n != "lm_head.weight"), key=lambda n: weights[n].dim() < 2)


def by_name(weights: dict[str, Tensor], saved: dict | None) -> dict[str, dict]:
    """
    Return the state of `saved_state` by parameter name. It is empty if there is no state, or not AdamW's, as
    in checkpoints of forks.
    """
    state = (saved or {}).get("state", {})
    if all(isinstance(key, str) for key in state):
        return state
    if not all({"exp_avg", "exp_avg_sq", "step"} <= moments.keys() for moments in state.values()):
        return {}
    return {name: state[i] for i, name in enumerate(numbered(weights)) if i in state}
