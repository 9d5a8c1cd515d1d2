"""
The optimizers: which of them updates a parameter, at which rate and with which weight decay, and their step.

Muon is in muon.py, the optimizers' state by parameter name in optimizer_state.py.
"""

import inspect
import math
import re
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw as update_adamw

from isogpt.launch.together import Gathered
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.local_parts import is_sharded, is_split, local
from isogpt.parallel.mesh import Mesh
from isogpt.training.muon import Muon, Stack, stack_of
from isogpt.training.optimizer_state import create_state
from isogpt.training.step_numbers import StepNumbers

BLOCK_MATRIX = "matrix of a block"  # of attention, of an MLP, or of all experts of a block
TOKEN_EMBEDDING = "token embedding"  # if it is not tied to the head
OTHER_MATRIX = "other matrix"  # the head, a token embedding tied to the head, position embeddings, routers
VECTOR = "vector"  # biases, weights of norms
NAME_OF_BLOCK_MATRIX = re.compile(r"transformer\.h\.\d+\.(attn|mlp|mlp\.experts)\.c_\w+\.weight")


class AdamW(torch.optim.AdamW):
    """
    torch.optim.AdamW, whose step updates this rank's parts of the parameters, which may be DTensors.

    The arithmetic is the same, without DTensor's dispatch (a step of 148 small parameters takes 1.5 ms
    instead of 4 on a CPU, torch 2.13), and without the import of torch.compile, only to exclude the step.
    """

    multiple = 1  # parts are padded to a multiple of this number of elements, see exact_steps.py

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters with a gradient."""
        create_state(self)
        # set by `step`, below
        amp = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            parts = [local_tensors(p, self.state[p]) for p in params]
            padded = [pad_to_multiple(tensors, self.multiple) for tensors in parts]
            columns = [list(column) for column in zip(*padded, strict=True)] or [[], [], [], []]
            settings = {
                name: group[name] for name in ("lr", "weight_decay", "eps", "fused", "amsgrad", "maximize")
            }
            beta1, beta2 = group["betas"]
            steps = [self.state[p]["step"] for p in params]
            update_adamw(*columns, [], steps, beta1=beta1, beta2=beta2, **settings, **amp)
            for tensors, copies in zip(parts, padded, strict=True):
                if copies is not tensors:
                    for t, copied in zip(tensors, copies, strict=True):
                        t.copy_(copied[: t.numel()].view_as(t))


def local_tensors(p: nn.Parameter, state: dict[str, Tensor]) -> list[Tensor]:
    """This rank's part of a parameter, of its gradient and of AdamW's moments."""
    tensors = [p, p.grad, state["exp_avg"], state["exp_avg_sq"]]
    return [local(t) for t in tensors] if is_sharded(p) else tensors


def pad_to_multiple(tensors: list[Tensor], multiple: int) -> list[Tensor]:
    """
    The tensors, of equal shape, or padded flat copies if their number of elements is not a multiple.
    """
    missing = -tensors[0].numel() % multiple
    return [torch.nn.functional.pad(t.flatten(), (0, missing)) for t in tensors] if missing else tensors


class Rule(NamedTuple):
    """How parameters are updated. The rate and the weight decay are names of train.py's settings."""

    optimizer: str  # the value of the setting `optimizer` for which this rule holds
    roles: tuple[str, ...]
    updated_by: type[torch.optim.Optimizer]
    rate: str
    weight_decay: str | None


RULES = (
    # optimizer, parameters, updated by, rate, weight decay
    Rule("adamw", (BLOCK_MATRIX, TOKEN_EMBEDDING, OTHER_MATRIX), AdamW, "learning_rate", "weight_decay"),
    Rule("adamw", (VECTOR,), AdamW, "learning_rate", None),
    Rule("muon", (BLOCK_MATRIX,), Muon, "muon_lr", "weight_decay"),
    Rule("muon", (TOKEN_EMBEDDING,), AdamW, "embedding_lr", None),
    Rule("muon", (OTHER_MATRIX, VECTOR), AdamW, "learning_rate", None),
)


def role_of(name: str, p: Tensor, config: GPTConfig) -> str:
    """What a parameter is: one of the roles in RULES."""
    if p.dim() < 2:
        return VECTOR
    if NAME_OF_BLOCK_MATRIX.fullmatch(name):
        return BLOCK_MATRIX
    if name == "transformer.wte.weight" and not config.tied:
        return TOKEN_EMBEDDING
    return OTHER_MATRIX


@dataclass(frozen=True)
class OptimizerSettings:
    """train.py's settings of the optimizers, with train.py's defaults."""

    optimizer: str = "adamw"
    learning_rate: float = 6e-4
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    muon_lr: float = 0.02
    embedding_lr: float = 0.0  # 0: learning_rate

    @classmethod
    def of(cls, config: dict) -> "OptimizerSettings":
        """Select the settings of the optimizers from all settings, some of which may be missing."""
        return cls(**{field.name: config[field.name] for field in fields(cls) if field.name in config})

    def rate(self, name: str) -> float:
        """The learning rate that a rule names."""
        if name == "embedding_lr" and not self.embedding_lr:
            return self.learning_rate
        return getattr(self, name)


def make_optimizers(
    model: nn.Module,
    settings: OptimizerSettings,
    zero: int = 0,
    muon_dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
) -> list[torch.optim.Optimizer]:
    """
    Make the model's optimizers, as RULES says: AdamW, then Muon.

    With zero 1, each rank keeps the optimizer state of a share of the parameters, updates these and sends
    them to the other ranks. Experts that are only on some of the ranks get separate optimizers. Every group
    contains an `lr_scale`, see `set_rates`.

    Args:
        muon_dtype: the dtype in which Muon orthogonalizes.
        mesh: the ranks over which parameters and optimizer state are divided. Default: a single process.
    """
    mesh = mesh or Mesh()
    device_type = next(model.parameters()).device.type  # cpu with cpu_offload
    if device_type == "cpu":
        # torch's optimizers import torch.compile when they are created, at their first step and when they are
        # saved, only to exclude themselves. This takes 1 of the 3.4 s to the first step on a CPU, where
        # nothing is compiled.
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
            method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
            method.__dict__.setdefault("__dynamo_disable", method)
    betas, is_fused = (settings.beta1, settings.beta2), device_type in ("cuda", "cpu", "mps")
    groups = groups_by_optimizer(model, settings)
    optimizers = []
    for cls in (AdamW, Muon):
        for are_experts in (False, True):
            own = groups[cls, are_experts]
            if not own:  # also on some ranks only: a pipeline's stage can lack embeddings and norms
                continue
            divided = ("ep",) if are_experts else ()  # axes that have divided the parameters already
            options = {"betas": betas, "fused": is_fused}
            if cls is Muon:
                options = {"dtype": muon_dtype, "group": mesh.matrix_parts.without(*divided).group}
            optimizers.append(make_optimizer(cls, own, options, zero, mesh.loss.without(*divided).group))
    return optimizers


def groups_by_optimizer(
    model: nn.Module, settings: OptimizerSettings
) -> dict[tuple[type[torch.optim.Optimizer], bool], list[dict]]:
    """
    Divide the model's parameters into the groups of each optimizer, by RULES.

    Returns:
        {(class of the optimizer, whether it updates experts that are divided over ranks): groups}
    """
    rules = [rule for rule in RULES if rule.optimizer == settings.optimizer]
    members = defaultdict(list)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        role = role_of(name, p, model.config)
        rule = next(rule for rule in rules if role in rule.roles)
        # Muon updates matrices of equal shape together
        stack = stack_of(name, p, model.config) if rule.updated_by is Muon else None
        members[rule, is_split(p, "ep"), stack].append(p)
    groups = defaultdict(list)
    # nanoGPT numbers parameters by the order of the rules
    for key in sorted(members, key=lambda key: rules.index(key[0])):
        rule, are_experts, stack = key
        groups[rule.updated_by, are_experts].append(make_group(members[key], rule, stack, settings))
    return groups


def make_group(
    params: list[nn.Parameter], rule: Rule, stack: Stack | None, settings: OptimizerSettings
) -> dict:
    """An optimizer's group of parameters. Muon's also contain the heights of the stacked matrices."""
    rate = settings.rate(rule.rate)
    group = {
        "params": params,
        "lr": rate,
        "lr_scale": 1.0 if rate == settings.learning_rate else rate / settings.learning_rate,
        "weight_decay": getattr(settings, rule.weight_decay) if rule.weight_decay else 0.0,
    }
    return group | {"rows": stack.rows} if stack else group


def make_optimizer(
    cls: type, groups: list[dict], options: dict, zero: int, replicas: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    """Make an optimizer for groups of parameters. With zero 1, the ranks of `replicas` share the state."""
    if zero == 1 and replicas:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # as_bucket_view: a rank sends its share in one piece, not each parameter separately
        return ZeroRedundancyOptimizer(
            groups, cls, process_group=replicas, parameters_as_bucket_view=True, **options
        )
    return cls(groups, **options)


def set_rates(optimizers: list[torch.optim.Optimizer], step: int, lr: float, muon_momentum: float) -> None:
    """
    Set each group's learning rate to `lr` times its lr_scale, and Muon's momentum: linear warm-up from 0.85
    to muon_momentum over 300 steps, as nanochat and modded-nanogpt do.
    """
    momentum = 0.85 + min(1.0, step / 300) * (muon_momentum - 0.85)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            if "momentum" in group:
                group["momentum"] = momentum


def step(
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    gathered: Gathered[StepNumbers],
    max_norm: float,
) -> None:
    """
    Clip the gradients and update the parameters, or skip the update if a loss or a gradient is not finite on
    any rank. In both cases, update float16's loss scale. A fused AdamW clips and skips on the device, so that
    a GPU does not wait for the host between the backward pass and the optimizer.

    Args:
        scaler: the loss scaler, whose `unscale_` was called.
        max_norm: maximum norm of the gradient (0: no clipping).
    """
    for optimizer in optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        # ZeroRedundancyOptimizer's optimizer for this rank's share
        inner = getattr(optimizer, "optim", optimizer)
        # before torch 2.13, fused AdamW ignores grad_scale and found_inf on MPS
        on_device = inner.defaults.get("fused") and params[0].device.type != "mps"
        numbers = gathered.on(params[0].device) if on_device else gathered.read()
        divisor = (numbers.grad_norm + 1e-6) / (max_norm or math.inf)  # as in clip_grad_norm_
        divisor = divisor.clamp(1.0, torch.finfo(torch.float32).max).float()
        if on_device:
            inner.grad_scale, inner.found_inf = divisor, (~numbers.is_finite).float()
            optimizer.step()
        elif numbers.is_finite:
            if divisor > 1:
                torch._foreach_div_([local(p.grad) for p in params if p.grad is not None], divisor.item())
            optimizer.step()
        if scaler.is_enabled():  # the scaler knows only of this rank's gradients
            for overflowed in scaler._found_inf_per_device(optimizer).values():
                # computed on the GPU, also for an optimizer that decides on the CPU: copying would wait for
                # the GPU
                overflowed.copy_(~gathered.on(overflowed.device).is_finite)
    scaler.update()
