"""The optimizer for each layout, and its state by parameter name. Nothing else knows an optimizer's groups or state."""

import inspect
from functools import partial

import torch
from torch import Tensor, nn


def make_optimizer(model: nn.Module, zero: int, weight_decay: float, learning_rate: float,
                   betas: tuple[float, float]) -> torch.optim.Optimizer:  # fmt: skip
    """
    The model's optimizer (`model.configure_optimizers`). With zero 1 each rank keeps the state of its share of the
    parameters, updates them and sends them to the other ranks. Every group has an `lr_scale`, see `set_lr`.
    """
    device_type = next(model.parameters()).device.type  # cpu with cpu_offload
    if device_type == "cpu":
        # torch's optimizers import torch.compile when they are created and at their first step, only to exclude
        # themselves from it. That takes 1 of the 3.4 s to the first step on a CPU, where nothing is compiled.
        for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
            inspect.unwrap(method).__dict__.setdefault("__dynamo_disable", inspect.unwrap(method))
    optimizer = model.configure_optimizers(weight_decay, learning_rate, betas, device_type)
    if device_type == "cpu":
        optimizer.step = partial(torch.no_grad()(inspect.unwrap(type(optimizer).step)), optimizer)
    if zero == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        groups = [{k: group[k] for k in ("params", "weight_decay")} for group in optimizer.param_groups]
        fused = optimizer.param_groups[0]["fused"]
        # as_bucket_view: a rank sends its share in one piece, not each parameter by itself
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True,
                                            lr=learning_rate, betas=betas, fused=fused)  # fmt: skip
    for group in optimizer.param_groups:
        group["lr_scale"] = 1.0
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each group's learning rate to `lr` times its own lr_scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """
    {parameter name: the optimizer's tensors for it} of what this rank holds: with ZeRO-1 some of the parameters, with
    ZeRO-2 and 3 a shard of each. State that does not exist before the first step is created as the optimizer would.
    """
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's optimizer for this rank's share
    names = {p: name for name, p in model.named_parameters()}
    for group in inner.param_groups:
        for p in group["params"]:
            if not inner.state[p]:
                step = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu")
                inner.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return {names[p]: inner.state[p] for group in inner.param_groups for p in group["params"]}


def numbered_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's state_dict as nanoGPT stores it: by number, in two groups."""
    state_by_name(model, optimizer)  # creates the state before the first step
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.pop("lr_scale", None)
    return state


def numbered_by_name(weights: dict[str, Tensor], state: dict[int, dict]) -> dict[str, dict]:
    """
    nanoGPT's optimizer state, which is by number, by parameter name: the parameters of two or more dimensions come
    first, then the rest, both in the order of `weights`.
    """
    names = sorted((n for n in weights if n != "lm_head.weight"), key=lambda n: weights[n].dim() < 2)
    return {name: state[i] for i, name in enumerate(names) if i in state}
