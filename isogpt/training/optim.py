"""
The optimizers: which of them updates a parameter, at which rate and with which weight decay, and their step.

Muon is in muon.py, the optimizers' state by parameter name in optimizer_state.py.
"""

import math
import re
from collections import defaultdict
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as update_adamw

from isogpt.launch.together import Gathered
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.local_parts import is_split, local
from isogpt.parallel.mesh import Mesh
from isogpt.training.muon import Muon, Stack, stack_of
from isogpt.training.optimizer_state import create_state, inner_optimizer
from isogpt.training.step_numbers import StepNumbers

BLOCK_MATRIX = "matrix of a block"  # of attention, of an MLP, or of all experts of a block
TOKEN_EMBEDDING = "token embedding"  # if it is not tied to the head
OTHER_MATRIX = "other matrix"  # the head, a token embedding tied to the head, position embeddings, routers
VECTOR = "vector"  # biases, weights of norms
NAME_OF_BLOCK_MATRIX = re.compile(r"transformer\.h\.\d+\.(attn|mlp|mlp\.experts)\.c_\w+\.weight")


# Fused AdamW on a CPU updates whole vectors of up to this many float32 numbers with different instructions
# than the rest of a tensor, which rounds differently (torch 2.13). So the step with exact pads to these.
WHOLE_VECTORS = 16
ADAMW_OPTIONS = ("lr", "weight_decay", "eps", "fused", "amsgrad", "maximize")


class AdamW(torch.optim.AdamW):
    """
    torch.optim.AdamW, whose step updates this rank's parts of the parameters, which may be DTensors.

    The arithmetic is the same, without DTensor's dispatch (a step of 148 small parameters takes 1.5 ms
    instead of 4 on a CPU, torch 2.13), and without the import of torch.compile, only to exclude the step.
    """

    multiple = 1  # parts are padded to a multiple of this number of elements, see make_steps_exact

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters with a gradient."""
        create_state(self)
        # set by `clip_and_step`
        from_scaler = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            parts = [
                [local(t) for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]
                for p, state in zip(params, states, strict=True)
            ]
            padded = [pad_to_multiple(tensors, self.multiple) for tensors in parts]
            beta1, beta2 = group["betas"]
            update_adamw(
                *([tensors[i] for tensors in padded] for i in range(4)),
                max_exp_avg_sqs=[],
                state_steps=[state["step"] for state in states],
                beta1=beta1,
                beta2=beta2,
                **{name: group[name] for name in ADAMW_OPTIONS},
                **from_scaler,
            )
            for target, source in zip(chain(*parts), chain(*padded), strict=True):
                if source is not target:
                    target.copy_(source[: target.numel()].view_as(target))


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
# the tensors, in the shape of a parameter, that an optimizer keeps for it and a resume loads
MOMENTS = {AdamW: ("exp_avg", "exp_avg_sq"), Muon: ("momentum_buffer",)}


def role_of(name: str, p: Tensor, config: GPTConfig) -> str:
    """What a parameter is: one of the roles in RULES."""
    if p.dim() < 2:
        return VECTOR
    if NAME_OF_BLOCK_MATRIX.fullmatch(name):
        return BLOCK_MATRIX
    if name == "transformer.wte.weight" and not config.tied:
        return TOKEN_EMBEDDING
    return OTHER_MATRIX


def make_optimizers(
    model: nn.Module,
    config: dict,
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
        config: train.py's settings.
        muon_dtype: the dtype in which Muon orthogonalizes.
        mesh: the ranks over which parameters and optimizer state are divided. Default: a single process.
    """
    mesh = mesh or Mesh()
    device_type = next(model.parameters()).device.type  # cpu with cpu_offload
    groups = groups_by_optimizer(model, config)
    optimizers = []
    # AdamW first, as in nanoGPT's checkpoints, and experts last
    for cls, are_experts in sorted(groups, key=lambda key: (key[0] is not AdamW, key[1])):
        divided = ("ep",) if are_experts else ()  # axes that have divided the parameters already
        options = {}
        if cls is AdamW:
            is_fused = device_type in ("cuda", "cpu", "mps")
            options = {"betas": (config["beta1"], config["beta2"]), "fused": is_fused}
        elif cls is Muon:
            options = {"dtype": muon_dtype, "group": mesh.matrix_parts.without(*divided).group}
        replicas = mesh.loss.without(*divided).group
        if zero == 1 and replicas:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            # a rank sends its share in one piece, not each parameter separately
            options |= {"parameters_as_bucket_view": True, "process_group": replicas}
            optimizer = ZeroRedundancyOptimizer(groups[cls, are_experts], cls, **options)
        else:
            optimizer = cls(groups[cls, are_experts], **options)
        optimizers.append(optimizer)
    if config.get("exact"):
        make_steps_exact(optimizers)
    return optimizers


def make_steps_exact(optimizers: list[torch.optim.Optimizer]) -> None:
    """
    Let the optimizers compute an element's update in the same way in any shard and next to any other
    parameters, in place. The step of other layouts is the same up to rounding.
    """
    for inner in map(inner_optimizer, optimizers):
        if isinstance(inner, Muon):
            inner.separately = True
        elif isinstance(inner, AdamW) and inner.defaults["fused"]:
            inner.multiple = WHOLE_VECTORS


def groups_by_optimizer(
    model: nn.Module, config: dict
) -> dict[tuple[type[torch.optim.Optimizer], bool], list[dict]]:
    """
    Divide the model's parameters into the groups of each optimizer, by RULES.

    Returns:
        {(class of the optimizer, whether it updates experts that are divided over ranks): groups}
    """
    rules = [rule for rule in RULES if rule.optimizer == config["optimizer"]]
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
        groups[rule.updated_by, are_experts].append(make_group(members[key], rule, stack, config))
    return groups


def make_group(params: list[nn.Parameter], rule: Rule, stack: Stack | None, config: dict) -> dict:
    """An optimizer's group of parameters. Muon's also contain the heights of the stacked matrices."""
    rate = config[rule.rate]
    if rule.rate == "embedding_lr" and rate == 0:
        rate = config["learning_rate"]
    group = {
        "params": params,
        "optimizer": rule.optimizer,
        "lr": rate,
        "lr_scale": 1.0 if rate == config["learning_rate"] else rate / config["learning_rate"],
        "weight_decay": config[rule.weight_decay] if rule.weight_decay else 0.0,
        "moments": MOMENTS[rule.updated_by],
    }
    return group | {"rows": stack.rows} if stack else group


def set_rates(optimizers: list[torch.optim.Optimizer], step: int, lr: float, muon_momentum: float) -> None:
    """
    Set each group's learning rate to `lr` times its lr_scale, and Muon's momentum: linear warm-up from 0.85
    to muon_momentum over 300 steps, as nanochat and modded-nanogpt do.
    """
    momentum = 0.85 + min(1.0, step / 300) * (muon_momentum - 0.85)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            if "rows" in group:  # Muon's
                group["momentum"] = momentum


def clip_and_step(
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    gathered: Gathered[StepNumbers],
    max_norm: float,
) -> None:
    """
    Clip the gradients and update the parameters, or skip the update if a loss or a gradient is not finite on
    any rank. In both cases, update float16's loss scale.

    Args:
        scaler: the loss scaler, whose `unscale_` was called.
        max_norm: maximum norm of the gradient (0: no clipping).
    """
    for optimizer in optimizers:
        params = params_of(optimizer)
        if clips_on_device(optimizer):
            # fused AdamW divides gradients by grad_scale, and leaves out a step whose found_inf is not 0, so
            # that a GPU does not wait for the host between the backward pass and the optimizer
            numbers = gathered.on(params[0].device)
            inner = inner_optimizer(optimizer)
            inner.grad_scale = clipping_divisor(numbers.grad_norm, max_norm)
            inner.found_inf = (~numbers.is_finite).float()
            optimizer.step()
        elif (numbers := gathered.read()).is_finite:
            divisor = clipping_divisor(numbers.grad_norm, max_norm)
            if divisor > 1:
                grads = [local(p.grad) for p in params if p.grad is not None]
                torch._foreach_div_(grads, divisor.item())
            optimizer.step()
        if scaler.is_enabled():
            report_overflow(scaler, optimizer, gathered)
    scaler.update()


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def clips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can divide gradients, and skip a step, without asking the host: fused AdamW."""
    # before torch 2.13, fused AdamW ignores grad_scale and found_inf on MPS
    is_mps = params_of(optimizer)[0].device.type == "mps"
    return bool(inner_optimizer(optimizer).defaults.get("fused")) and not is_mps


def clipping_divisor(grad_norm: Tensor, max_norm: float) -> Tensor:
    """By what to divide gradients of this norm, at least 1: as in clip_grad_norm_."""
    divisor = (grad_norm + 1e-6) / (max_norm or math.inf)
    return divisor.clamp(1.0, torch.finfo(torch.float32).max).float()


def report_overflow(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, gathered: Gathered[StepNumbers]
) -> None:
    """Tell the loss scaler, which only knows of this rank's gradients, whether any rank's are not finite."""
    for overflowed in scaler._found_inf_per_device(optimizer).values():
        # computed on the GPU, also for an optimizer that decides on the CPU: copying would wait for the GPU
        overflowed.copy_(~gathered.on(overflowed.device).is_finite)
