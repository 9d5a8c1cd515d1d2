"""The state of the optimizers by parameter name, and as nanoGPT numbers it in a ckpt.pt."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from isogpt.parallel.local_parts import like
from isogpt.training.optimizer_class import BETAS, Kept, inner_optimizer, is_number, kept_by, share_groups

GROUP = "group:"  # before the name of a number that an optimizer keeps for a group of parameters


def kind_of(optimizers: list[torch.optim.Optimizer]) -> str:
    """The setting `optimizer` for which `optim.make_optimizers` made the optimizers."""
    names = {group.get("optimizer", "adamw") for o in optimizers for group in o.param_groups}
    return names.pop()


def is_same_kind(kind: str, other: str) -> bool:
    """Whether two settings `optimizer` name the same classes, in files that may have been moved."""
    return without_folder(kind) == without_folder(other)


def without_folder(kind: str) -> str:
    """A setting `optimizer` without the folder of its file: muon+mine/lion.py:Lion -> muon+lion.py:Lion."""
    base, plus, place = kind.rpartition("+")
    return base + plus + place.rpartition("/")[2]


def held_by(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter, dict]]:
    """
    Yield (parameter of the model, what the optimizer updates for it, the optimizer's group) for all that this
    rank updates.
    """
    for group in inner_optimizer(optimizer).param_groups:
        for p in group["params"]:
            yield getattr(p, "whole", p), p, group


def what_is_kept(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> Kept:
    """What an optimizer keeps for a parameter, found by a probe (on the CPU for the meta device)."""
    inner = inner_optimizer(optimizer)
    betas = tuple(inner.defaults.get("betas", BETAS))
    device = torch.device("cpu") if p.is_meta else p.device
    return kept_by(type(inner), p.dim(), device, betas)


def state_by_name(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """
    Return {parameter name: the optimizer's tensors} of what this rank holds: with ZeRO-1 some of the
    parameters, with ZeRO-2 and 3 a shard of each. Numbers that are not tensors are put into new ones, see
    `take_numbers`. Parameters that an optimizer of a user's class has not updated yet have no state.
    """
    names = {p: name for name, p in model.named_parameters()}
    states = {}
    for optimizer in optimizers:
        state = inner_optimizer(optimizer).state
        for whole, p, group in held_by(optimizer):
            kept = what_is_kept(optimizer, p)
            numbers = {key: value for key, value in state.get(p, {}).items() if is_number(value)}
            if state.get(p) or not kept.state:
                numbers |= {GROUP + key: group[key] for key in kept.group if key in group}
            tensors = {k: like(whole, v) for k, v in state.get(p, {}).items() if torch.is_tensor(v)}
            tensors |= {key: torch.tensor(float(n), dtype=torch.float64) for key, n in numbers.items()}
            if tensors:
                states[names[whole]] = tensors
    return states


def create_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], names: Collection[str]
) -> dict[str, dict[str, Tensor]]:
    """
    Allocate the optimizers' state of the parameters with these names, to be filled from a checkpoint; other
    parameters have not been updated. Returns `state_by_name`.
    """
    names_of = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        state = inner_optimizer(optimizer).state
        for whole, p, group in held_by(optimizer):
            if names_of[whole] not in names:
                continue
            kept = what_is_kept(optimizer, p)
            if not state.get(p):
                state[p] = kept.new_state(p)
            group.update(kept.group)  # a first step may add a number, or make a float of 0
    return state_by_name(model, optimizers)


def take_numbers(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], filled: dict[str, dict[str, Tensor]]
) -> None:
    """Take numbers that are not tensors from what `create_state` returned and a checkpoint has filled."""
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        inner = inner_optimizer(optimizer)
        for whole, p, group in held_by(optimizer):
            for key, value in filled.get(names[whole], {}).items():
                place = group if key.startswith(GROUP) else inner.state[p]
                key = key.removeprefix(GROUP)
                if is_number(place.get(key)):
                    place[key] = type(place[key])(value.item())
        share_groups(inner, optimizer)


def saved_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """
    Return the state for ckpt.pt: by number, in two groups, as nanoGPT stores it, if AdamW alone updates all
    parameters of a GPT-2; else by parameter name.
    """
    weights = dict(model.named_parameters())
    updated = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    is_adamw = len(optimizers) == 1 and isinstance(optimizers[0], torch.optim.AdamW)
    is_numbered = [*map(id, updated)] == [id(weights[name]) for name in numbered(weights)]
    if not (is_adamw and is_numbered and model.config.arch == "gpt2"):
        return {"state": state_by_name(model, optimizers)}
    state = optimizers[0].state_dict()
    for group in state["param_groups"]:
        for name in ("lr_scale", "optimizer"):
            group.pop(name, None)
    return state


def numbered(weights: dict[str, Tensor]) -> list[str]:
    """
    The names of weights as nanoGPT numbers their state: those of two or more dimensions first, then the rest,
    both in the order of `weights`.
    """
    return sorted((n for n in weights if n != "lm_head.weight"), key=lambda n: weights[n].dim() < 2)


def by_name(weights: dict[str, Tensor], saved: object) -> dict[str, dict]:
    """
    Return the state of `saved_state` by parameter name. It is empty if there is no state, or not AdamW's, as
    in checkpoints of forks.
    """
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(state, dict) or not all(isinstance(moments, dict) for moments in state.values()):
        return {}
    if all(isinstance(key, str) for key in state):
        return state
    if not all({"exp_avg", "exp_avg_sq", "step"} <= moments.keys() for moments in state.values()):
        return {}
    return {name: state[i] for i, name in enumerate(numbered(weights)) if i in state}
