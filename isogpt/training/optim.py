"""
The optimizers: which of them updates a parameter, at which rate and with which weight decay, and their step.

Muon is in muon.py, classes of a user in optimizer_class.py, the optimizers' state by parameter name in
optimizer_state.py.
"""

import math
import re
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isogpt.launch.together import Gathered, gather_objects
from isogpt.nn.experts import ExpertLinear
from isogpt.parallel.compilation import is_compiled
from isogpt.parallel.local_parts import is_sharded, is_split, local
from isogpt.parallel.mesh import Mesh
from isogpt.training.muon import Muon, stack_of
from isogpt.training.optimizer_class import (
    Class,
    OnShards,
    Optimizers,
    inner_optimizer,
    kept_by,
    load_class,
    options_of,
    params_of,
    set_mode,
)
from isogpt.training.step_numbers import StepNumbers

BLOCK_MATRIX = "matrices of blocks"  # of a linear layer, or of all experts of a block
TOKEN_EMBEDDING = "token embedding"  # if it is not tied to the head
OTHER_MATRIX = "other matrices"  # the head, a token embedding tied to the head, position embeddings, routers
VECTOR = "vectors"  # biases, weights of norms
LINEAR = (nn.Linear, ExpertLinear)
DIVIDED = ((), ("ep",))  # axes that have divided most parameters already, and experts
IN_A_BLOCK = re.compile(r"transformer\.h\.\d+\.")


# Fused AdamW on a CPU updates whole vectors of up to this many float32 numbers with different instructions
# than the rest of a tensor, which rounds differently (torch 2.13).
WHOLE_VECTORS = 16


class AdamW(torch.optim.AdamW):
    """
    torch.optim.AdamW, fused.

    Args:
        exact: let a step compute an element's update in the same way in any shard.
    """

    found_inf: Tensor | None = None  # 1: the step is left out, see clip_and_step

    def __init__(self, groups: list[dict], lr: float = 1e-3, exact: bool = False, **options: Any) -> None:
        super().__init__(groups, lr, fused=True, **options)
        self.exact = exact
        for p in params_of(self):  # a checkpoint can be saved before the first step
            self.state[p] = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            self.state[p]["step"] = torch.zeros((), device=p.device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters with a gradient."""
        self.padded = []
        super().step()
        for tensor, padded in self.padded:
            tensor.copy_(padded[: tensor.numel()].view_as(tensor))

    def _init_group(self, group: dict, *lists: list[Tensor]) -> bool:
        """Collect the tensors of a group's step; with `exact`, copies of those that no whole vectors fill."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists[:4] if self.exact else ():  # parameters, gradients and two moments
            for i, tensor in enumerate(tensors):
                if missing := -tensor.numel() % WHOLE_VECTORS:
                    tensors[i] = nn.functional.pad(tensor.flatten(), (0, missing))
                    self.padded.append((tensor, tensors[i]))
        return has_complex


class Rule(NamedTuple):
    """How parameters are updated. `rate` and `weight_decay` are names of train.py's settings."""

    optimizer: str  # the value of the setting `optimizer` for which this rule holds
    roles: tuple[str, ...]
    updated_by: Class
    rate: str
    weight_decay: str | None


RULES = (
    # optimizer, parameters, updated by, rate, weight decay; AdamW first, as in nanoGPT's checkpoints
    Rule("adamw", (BLOCK_MATRIX, TOKEN_EMBEDDING, OTHER_MATRIX), AdamW, "learning_rate", "weight_decay"),
    Rule("adamw", (VECTOR,), AdamW, "learning_rate", None),
    Rule("muon", (TOKEN_EMBEDDING,), AdamW, "embedding_lr", None),
    Rule("muon", (OTHER_MATRIX, VECTOR), AdamW, "learning_rate", None),
    Rule("muon", (BLOCK_MATRIX,), Muon, "muon_lr", "weight_decay"),
)


def rules_of(optimizer: str) -> list[Rule]:
    """
    Return the rules for a value of the setting `optimizer`. With FILE.py:CLASS, the class takes AdamW's place
    in the rules of adamw, and with muon+FILE.py:CLASS in those of muon.

    Raises:
        ValueError: there are no such rules, or the class cannot be loaded.
    """
    names = [*dict.fromkeys(rule.optimizer for rule in RULES)]
    any_name = "|".join(names)
    match = re.fullmatch(rf"({any_name})|(?:({any_name})\+)?(.+:.+)", optimizer)
    if not match:
        choices = ", ".join([*names, "FILE.py:CLASS"])
        raise ValueError(f"optimizer is {optimizer!r}; choose from {choices} and muon+FILE.py:CLASS")
    name, beside, place = match.groups()
    rules = [rule for rule in RULES if rule.optimizer == (name or beside or "adamw")]
    if not place:
        return rules
    cls = load_class(place)
    return [rule._replace(updated_by=cls) if rule.updated_by is AdamW else rule for rule in rules]


def uses_muon(optimizer: str) -> bool:
    """Whether Muon updates parameters with this setting `optimizer`."""
    return any(rule.updated_by is Muon for rule in rules_of(optimizer))


def classes_of_users(optimizer: str) -> list[Class]:
    """
    Return the classes in the rules of the setting `optimizer` that are not ours, after a step of each.

    Raises:
        ValueError: see `rules_of` and `kept_by`.
    """
    classes = {rule.updated_by for rule in rules_of(optimizer)} - {AdamW, Muon}
    for cls in classes:
        kept_by(cls)
    return [*classes]


def moments_of(optimizer: str) -> tuple[int, int]:
    """How many tensors in a parameter's shape are kept for matrices of blocks, and for other parameters."""
    rules = rules_of(optimizer)
    moments = {role: kept_by(rule.updated_by).moments for rule in rules for role in rule.roles}
    return moments[BLOCK_MATRIX], moments[OTHER_MATRIX]


def role_of(name: str, p: Tensor, model: nn.Module) -> str:
    """What a parameter of a model is: one of the roles in RULES."""
    if p.dim() < 2:
        return VECTOR
    module, _, kind = name.rpartition(".")
    is_linear = kind == "weight" and isinstance(model.get_submodule(module), LINEAR)
    if is_linear and p.dim() == 2 and IN_A_BLOCK.match(name):
        return BLOCK_MATRIX
    if name == "transformer.wte.weight" and not model.config.tied:
        return TOKEN_EMBEDDING
    return OTHER_MATRIX


def make_optimizers(
    model: nn.Module,
    config: dict,
    zero: int = 0,
    muon_dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
) -> list[Optimizer]:
    """
    Make the model's optimizers, as RULES says: AdamW, then Muon.

    With zero 1, each rank keeps the optimizer state of a share of the parameters, updates these and sends
    them to the other ranks. Experts that are only on some of the ranks get separate optimizers. Every group
    contains an `lr_scale`, see `set_rates`.

    Args:
        config: train.py's settings.
        muon_dtype: the dtype in which Muon orthogonalizes.
        mesh: the ranks over which parameters and optimizer state are divided. Default: a single process.

    Raises:
        ValueError: see `groups_by_optimizer`.
    """
    mesh = mesh or Mesh()
    # all ranks create the process groups, even a pipeline stage that trains no matrices or no experts
    replicas = {axes: mesh.loss.without(*axes).group for axes in DIVIDED}
    of_matrices = {axes: matrix_groups(mesh, config, zero, axes) for axes in DIVIDED}
    optimizers = []
    for (cls, axes), groups in groups_by_optimizer(model, config).items():
        options = options_of(cls, {"lr": groups[0]["lr"], "betas": (config["beta1"], config["beta2"])})
        if cls in (AdamW, Muon):
            options["exact"] = config.get("exact", False)
        first = groups[0]["params"][0]
        if cls is Muon:
            # with cpu_offload too, parameters are on the CPU
            compiles = is_compiled(model) and first.device.type != "cpu"
            options |= {"dtype": muon_dtype, "compiles": compiles} | of_matrices[axes]
        if zero == 1 and replicas[axes]:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            # a rank sends its share in one piece, not each parameter separately
            options |= {"parameters_as_bucket_view": True, "process_group": replicas[axes]}
            optimizer = ZeroRedundancyOptimizer(groups, cls, **options)
        elif is_sharded(first):
            optimizer = OnShards(groups, cls, **options)
        else:
            optimizer = cls(groups, **options)
        optimizers.append(optimizer)
    set_mode(optimizers, "train")
    return optimizers


def matrix_groups(mesh: Mesh, config: dict, zero: int, divided: tuple[str, ...]) -> dict:
    """
    The process groups of Muon (all ranks); {} without Muon.

    Args:
        divided: axes that have divided the parameters already.
    """
    if not uses_muon(config["optimizer"]):
        return {}
    # With zero 1, replicas update different parameters. Sending the results takes 2 or 4 bytes for each
    # parameter, besides the 8 for the gradient's reduction: little, unless gradients are compressed.
    is_compressed = mesh.islands == 1 and config.get("grad_compression", "none") != "none"
    workers = mesh.matrix_parts if zero == 1 or is_compressed else mesh.matrix_workers
    return {"group": mesh.matrix_parts.without(*divided).group, "workers": workers.without(*divided).group}


def groups_by_optimizer(model: nn.Module, config: dict) -> dict[tuple[Class, tuple[str, ...]], list[dict]]:
    """
    Divide the model's parameters into the groups of each optimizer, by RULES. Muon's groups also contain the
    heights of the matrices that are stacked in a parameter.

    Returns:
        {(class of the optimizer, one of DIVIDED): groups}

    Raises:
        ValueError: RULES contains no row for a parameter, or several.
    """
    rules = rules_of(config["optimizer"])
    members = defaultdict(list)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, p in trained:
        role = role_of(name, p, model)
        rows = [rule for rule in rules if role in rule.roles]
        if len(rows) != 1:
            raise ValueError(f"{len(rows)} rows of RULES in {__file__} contain {name} ({role}): one must")
        axes = ("ep",) if is_split(p, "ep") else ()
        # Muon updates matrices of equal shape together
        stack = stack_of(name, p, model) if rows[0].updated_by is Muon else None
        members[rows[0], axes, stack].append(p)
    groups = defaultdict(list)
    base = config["learning_rate"]
    rates = config | {"embedding_lr": config.get("embedding_lr") or base}
    # nanoGPT numbers parameters by the order of the rules
    for key in sorted(members, key=lambda key: rules.index(key[0])):
        rule, axes, stack = key
        rate = rates[rule.rate]
        group = {
            "params": members[key],
            "optimizer": config["optimizer"],
            "lr": rate,
            "lr_scale": rate / base if base else 1.0,
            "weight_decay": config[rule.weight_decay] if rule.weight_decay else 0.0,
        }
        if stack:
            group["rows"] = stack[2]
        groups[rule.updated_by, axes].append(group)
    return groups


def describe_updates(model: nn.Module, optimizers: Optimizers, mesh: Mesh) -> str:
    """
    Say in one line which optimizer updates which parameters of the whole model, with which rate and weight
    decay, and which are frozen (all ranks).
    """
    updates = {}
    for optimizer in optimizers:
        inner = inner_optimizer(optimizer)
        for group in optimizer.param_groups:
            decay = f", decay {group['weight_decay']:g}" if group.get("weight_decay") else ""
            if decay and "weight_decay" not in inner.defaults:
                decay = ", which takes no decay"
            update = f"{type(inner).__name__}, lr {group['lr']:g}{decay}"
            updates |= dict.fromkeys(group["params"], update)
    described = {}
    for name, p in model.named_parameters():
        kind = role_of(name, p, model)
        if kind not in (BLOCK_MATRIX, VECTOR) or p not in updates:
            kind = IN_A_BLOCK.sub("", name).removeprefix("transformer.").removesuffix(".weight")
        described[name] = (updates.get(p, "frozen"), kind)
    if mesh.pp > 1:  # a rank holds some of the blocks
        of_stages = gather_objects(described, mesh.group("pp"))
        described = {name: update for stage in of_stages for name, update in stage.items()}
    if model.config.tied and "transformer.wte.weight" in described:
        described.pop("lm_head.weight", None)  # in a pipeline, two ranks hold it
    kinds_of = defaultdict(list)
    for (update, kind), count in Counter(described.values()).items():
        kinds_of[update].append(f"{count} {kind}" if count > 1 else kind)
    parts = [f"{update}: {', '.join(kinds)}" for update, kinds in kinds_of.items()]
    return "; ".join(sorted(parts, key=lambda part: part.startswith("frozen")))


def check_optimizers(optimizers: Optimizers) -> None:
    """
    Check optimizers that train.py may have made without `make_optimizers`: their groups follow the schedule.

    Raises:
        ValueError: one is not element-wise, see `kept_by`, or a group does not say how its rate follows.
    """
    for inner in map(inner_optimizer, optimizers):
        groups = [group for group in inner.param_groups if "lr_scale" not in group]
        if groups:
            kept_by(type(inner))
        if len({float(group["lr"]) for group in groups}) > 1:
            raise ValueError(
                f"groups of {type(inner).__name__} have different rates: give each an lr_scale, the multiple "
                "of --learning_rate that it takes, or use --optimizer=FILE.py:CLASS"
            )
        for group in groups:
            group["lr_scale"] = 1.0


def set_rates(optimizers: Optimizers, step: int, lr: float, muon_momentum: float) -> None:
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


def unscale(optimizers: list[Optimizer], scaler: torch.amp.GradScaler) -> None:
    """Divide the gradients by float16's loss scale."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)


def clip_and_step(
    optimizers: Optimizers,
    scaler: torch.amp.GradScaler,
    gathered: Gathered[StepNumbers],
    max_norm: float,
    skips_spikes: bool = False,
) -> None:
    """
    Clip the gradients and update the parameters, or skip the update if the loss or a gradient of any rank is
    not finite, or if the step is a spike. In each case, update float16's loss scale.

    Args:
        scaler: the loss scaler, whose `unscale_` was called.
        max_norm: maximum norm of the gradient (0: no clipping).
        skips_spikes: whether a spike is skipped too.
    """
    for optimizer in optimizers:
        params, inner = params_of(optimizer), inner_optimizer(optimizer)
        decides = getattr(inner, "_step_supports_amp_scaling", False) and hasattr(inner, "found_inf")
        # before torch 2.13, fused AdamW ignores grad_scale and found_inf on MPS
        if decides and (params[0].device.type != "mps" or isinstance(inner, Muon)):
            # Muon and PyTorch's fused optimizers divide gradients by grad_scale, and leave out a step whose
            # found_inf is not 0, so that a GPU does not wait for the host
            numbers = gathered.on(params[0].device)
            inner.grad_scale = clipping_divisor(numbers.grad_norm, max_norm)
            inner.found_inf = (~numbers.is_update(skips_spikes)).float()
            optimizer.step()
        elif (numbers := gathered.read()).is_update(skips_spikes):
            divisor = clipping_divisor(numbers.grad_norm, max_norm).item()
            if divisor > 1:
                torch._foreach_div_([local(p.grad) for p in params if p.grad is not None], divisor)
            optimizer.step()
            # from now on, a fused optimizer decides; fused SGD, left out in its first step, would have gone
            # on with a momentum that is not initialized. Equal on all ranks, unlike whether there is state
            inner.found_inf = None
        if scaler.is_enabled():
            # the loss scaler knows only this rank's gradients; data that cannot be read are no overflow.
            # Computed on the GPU, also for an optimizer that decides on the CPU: a copy would wait for it
            for overflowed in scaler._found_inf_per_device(optimizer).values():
                overflowed.copy_(~gathered.on(overflowed.device).grad_norm.isfinite())
    scaler.update()


def clipping_divisor(grad_norm: Tensor, max_norm: float) -> Tensor:
    """What to divide gradients of this norm by, at least 1, as in clip_grad_norm_."""
    divisor = (grad_norm + 1e-6) / (max_norm or math.inf)
    return divisor.clamp(1.0, torch.finfo(torch.float32).max).float()
