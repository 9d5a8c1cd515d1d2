"""The state of the optimizers by parameter name, and as nanoGPT numbers it in a ckpt.pt."""

import torch
from torch import Tensor, nn


def kind_of(optimizers: list[torch.optim.Optimizer]) -> str:
    """The setting `optimizer` for which `optim.make_optimizers` made the optimizers."""
    names = {group.get("optimizer", "adamw") for o in optimizers for group in o.param_groups}
    return names.pop()


def state_by_name(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """
    Return {parameter name: the optimizer's tensors} of what this rank holds: with ZeRO-1 some of the
    parameters, with ZeRO-2 and 3 a shard of each. State that does not exist before the first step is created
    as the optimizer would create it.
    """
    names = {p: name for name, p in model.named_parameters()}
    states = {}
    for optimizer in map(inner_optimizer, optimizers):
        create_state(optimizer)
        states |= {names[p]: optimizer.state[p] for group in optimizer.param_groups for p in group["params"]}
    return states


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """ZeroRedundancyOptimizer's optimizer for this rank's share, or the optimizer itself."""
    return getattr(optimizer, "optim", optimizer)


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that does not exist before the first step, as the optimizer would create it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                optimizer.state[p] = new_state(p, group)


def new_state(p: Tensor, group: dict) -> dict[str, Tensor]:
    """
    Return an optimizer's state for a parameter before the first step: the group's `moments`, by default
    AdamW's, and AdamW's count of steps.
    """
    is_adamw = "betas" in group
    names = group.get("moments", ("exp_avg", "exp_avg_sq") if is_adamw else ())
    state = {name: torch.zeros_like(p) for name in names}
    if is_adamw:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu")
    return state


def saved_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """
    Return the state for ckpt.pt: for AdamW alone as nanoGPT stores it, by number, in two groups; else by
    parameter name.
    """
    state = state_by_name(model, optimizers)  # creates the state before the first step
    if kind_of(optimizers) != "adamw" or model.config.arch != "gpt2":
        return {"state": state}
    state = optimizers[0].state_dict()
    for group in state["param_groups"]:
        for name in ("lr_scale", "optimizer", "moments"):
            group.pop(name, None)
    return state


def by_name(weights: dict[str, Tensor], saved: object) -> dict[str, dict]:
    """
    Return the state of `saved_state` by parameter name. It is empty if there is no state, or not AdamW's, as
    in checkpoints of forks. nanoGPT's numbers count the parameters of two or more dimensions first, then the
    rest, both in the order of `weights`.
    """
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(state, dict) or not all(isinstance(moments, dict) for moments in state.values()):
        return {}
    if all(isinstance(key, str) for key in state):
        return state
    if not all({"exp_avg", "exp_avg_sq", "step"} <= moments.keys() for moments in state.values()):
        return {}
    names = sorted((n for n in weights if n != "lm_head.weight"), key=lambda n: weights[n].dim() < 2)
    return {name: state[i] for i, name in enumerate(names) if i in state}
