"""
The optimizers: which of them updates a parameter, at which rate and with which weight decay, and their step.

Muon is in muon.py, classes of a user in optimizer_class.py, the optimizers' state by parameter name in
optimizer_state.py.
"""

import math
import re
from collections import Counter, defaultdict
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as update_adamw

from isogpt.launch.together import Gathered, gather_objects
from isogpt.nn.experts import ExpertLinear
from isogpt.parallel.compilation import is_compiled
from isogpt.parallel.local_parts import is_sharded, is_split, local
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.tensor import RowParallelLinear
from isogpt.training.muon import Muon, Stack, stack_of
from isogpt.training.optimizer_class import (
    Class,
    OnShards,
    has_modes,
    inner_optimizer,
    kept_by,
    load_class,
    options_of,
    switch,
)
from isogpt.training.optimizer_state import held_by, what_is_kept
from isogpt.training.step_numbers import StepNumbers

BLOCK_MATRIX = "matrix of a block"  # of a linear layer, or of all experts of a block
TOKEN_EMBEDDING = "token embedding"  # if it is not tied to the head
OTHER_MATRIX = "other matrix"  # the head, a token embedding tied to the head, position embeddings, routers
VECTOR = "vector"  # biases, weights of norms
LINEAR = (nn.Linear, ExpertLinear, RowParallelLinear)
DIVIDED = ((), ("ep",))  # axes that have divided most parameters already, and experts
IN_A_BLOCK = re.compile(r"transformer\.h\.\d+\.")


# Fused AdamW on a CPU updates whole vectors of up to this many float32 numbers with different instructions
# than the rest of a tensor, which rounds differently (torch 2.13). So with exact, the step pads to them.
WHOLE_VECTORS = 16
ADAMW_OPTIONS = ("lr", "weight_decay", "eps", "fused", "amsgrad", "maximize")


class AdamW(torch.optim.AdamW):
    """
    torch.optim.AdamW, whose step updates this rank's parts of the parameters, which may be DTensors.

    The arithmetic is the same, but DTensor does not dispatch it (a step of 148 small parameters takes 1.5 ms
    instead of 4 on a CPU, torch 2.13), and torch.compile is not imported merely to exclude the step.
    """

    multiple = 1  # parts are padded to a multiple of this number of elements, see make_steps_exact

    def __init__(self, groups: list[dict], lr: float = 1e-3, **options: Any) -> None:
        super().__init__(groups, lr, **options)
        for group in self.param_groups:  # a checkpoint can be saved before the first step
            for p in group["params"]:
                device = p.device if group["fused"] else "cpu"
                self.state[p] = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters with a gradient."""
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
    Return the tensors, of equal shape, or padded flat copies if their size is no multiple of `multiple`.
    """
    missing = -tensors[0].numel() % multiple
    return [torch.nn.functional.pad(t.flatten(), (0, missing)) for t in tensors] if missing else tensors


class Rule(NamedTuple):
    """How parameters are updated. `rate` and `weight_decay` are names of train.py's settings."""

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


def rules_of(optimizer: str) -> list[Rule]:
    """
    Return the rules for a value of the setting `optimizer`. With FILE.py:CLASS, the class takes AdamW's place
    in the rules of adamw, and with muon+FILE.py:CLASS in those of muon.

    Raises:
        ValueError: there are no such rules, or the class cannot be loaded.
    """
    names = list(dict.fromkeys(rule.optimizer for rule in RULES))
    base, plus, place = optimizer.partition("+")
    if not plus or base not in names:
        base, place = ("adamw", optimizer) if ":" in optimizer else (optimizer, "")
    if base not in names or (plus and ":" not in place):
        others = [f"{name}+FILE.py:CLASS" for name in names if name != "adamw"]
        *possible, last = [*names, "FILE.py:CLASS", *others]
        raise ValueError(f"optimizer is {optimizer!r}; choose from {', '.join(possible)} and {last}")
    rules = [rule for rule in RULES if rule.optimizer == base]
    if not place:
        return rules
    cls = load_class(place)
    return [rule._replace(updated_by=cls) if rule.updated_by is AdamW else rule for rule in rules]


def uses_muon(optimizer: str) -> bool:
    """Whether Muon updates parameters with this setting `optimizer`."""
    return any(rule.updated_by is Muon for rule in rules_of(optimizer))


def classes_of_users(optimizer: str) -> list[Class]:
    """The classes in the rules of the setting `optimizer` that are not ours."""
    classes = dict.fromkeys(rule.updated_by for rule in rules_of(optimizer))
    return [cls for cls in classes if cls not in (AdamW, Muon)]


def check_optimizer(config: dict) -> list[Class]:
    """
    Check that the classes of the setting `optimizer` can be loaded and take a step. Returns those that are
    not ours.

    Raises:
        ValueError: see `rules_of` and `kept_by`.
    """
    classes = classes_of_users(config["optimizer"])
    for cls in classes:
        kept_by(cls, 2, torch.device("cpu"), (config["beta1"], config["beta2"]))
    return classes


def moments_of(optimizer: str) -> tuple[int, int]:
    """How many tensors in a parameter's shape are kept for matrices of blocks, and for other parameters."""
    counts = {
        role: kept_by(rule.updated_by, 2, torch.device("cpu")).moments
        for rule in rules_of(optimizer)
        for role in rule.roles
    }
    return counts[BLOCK_MATRIX], counts[OTHER_MATRIX]


def role_of(name: str, p: Tensor, model: nn.Module) -> str:
    """What a parameter of a model is: one of the roles in RULES."""
    if p.dim() < 2:
        return VECTOR
    is_weight = p.dim() == 2 and name.endswith(".weight")
    if is_weight and IN_A_BLOCK.match(name) and isinstance(module_of(name, model), LINEAR):
        return BLOCK_MATRIX
    if name == "transformer.wte.weight" and not model.config.tied:
        return TOKEN_EMBEDDING
    return OTHER_MATRIX


def module_of(name: str, model: nn.Module) -> nn.Module:
    """The module that holds a parameter."""
    return model.get_submodule(name.rpartition(".")[0])


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

    Raises:
        ValueError: RULES contains no row for a parameter, or several.
    """
    mesh = mesh or Mesh()
    device_type = next(model.parameters()).device.type  # cpu with cpu_offload
    groups = groups_by_optimizer(model, config)
    # all ranks create the process groups, even a pipeline stage that trains no matrices or no experts
    replicas = [mesh.loss.without(*axes).group for axes in DIVIDED]
    of_matrices = [matrix_groups(mesh, config, zero, axes) for axes in DIVIDED]
    optimizers = []
    # AdamW first, as in nanoGPT's checkpoints, and experts last
    for cls, are_experts in sorted(groups, key=lambda key: (key[0] is Muon, key[1])):
        members = groups[cls, are_experts]
        options = options_of(cls, {"lr": members[0]["lr"], "betas": (config["beta1"], config["beta2"])})
        if cls is AdamW:
            options["fused"] = device_type in ("cuda", "cpu", "mps")
        elif cls is Muon:
            compiles = is_compiled(model) and device_type != "cpu"
            options |= {"dtype": muon_dtype, "compiles": compiles} | of_matrices[are_experts]
        if zero == 1 and replicas[are_experts]:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            # a rank sends its share in one piece, not each parameter separately
            options |= {"parameters_as_bucket_view": True, "process_group": replicas[are_experts]}
            optimizer = ZeroRedundancyOptimizer(members, cls, **options)
        elif cls not in (AdamW, Muon) and is_sharded(members[0]["params"][0]):
            optimizer = OnShards(members, cls, **options)
        else:
            optimizer = cls(members, **options)
        optimizers.append(optimizer)
    check_updated(model, optimizers)
    set_mode(optimizers, "train")
    if config.get("exact"):
        make_steps_exact(optimizers)
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
    shares = zero != 1 and not is_compressed
    workers = mesh.matrix_workers if shares else mesh.matrix_parts
    return {"group": mesh.matrix_parts.without(*divided).group, "workers": workers.without(*divided).group}


def check_updated(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """
    Raise ValueError if a parameter that is trained is not in exactly one group of one optimizer, or if what
    an optimizer keeps for it cannot be saved.
    """
    counts = Counter(p for optimizer in optimizers for p in params_of(optimizer))
    for name, p in model.named_parameters():
        if p.requires_grad and counts[p] != 1:
            raise ValueError(
                f"{counts[p]} groups of optimizers contain {name}, which is trained: make_optimizers in "
                "isogpt/training/optim.py must put each parameter into one"
            )
    for optimizer in optimizers:
        for _, p, _ in held_by(optimizer):
            what_is_kept(optimizer, p)


def average_weights(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer evaluates weights other than those it trains, as schedule-free optimizers do."""
    return any(has_modes(type(inner_optimizer(optimizer))) for optimizer in optimizers)


def set_mode(optimizers: list[torch.optim.Optimizer], mode: str) -> None:
    """
    Call `eval` or `train` of the optimizers that have both, which changes the weights in place (all ranks).

    Args:
        mode: 'eval' or 'train'.
    """
    for optimizer in optimizers:
        if has_modes(type(inner_optimizer(optimizer))):
            switch(optimizer, mode)


def make_steps_exact(optimizers: list[torch.optim.Optimizer]) -> None:
    """
    Let the optimizers compute an element's update in the same way in any shard and next to any other
    parameters, in place. Otherwise, the steps of different layouts are equal only up to rounding.
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
    rules = rules_of(config["optimizer"])
    members = defaultdict(list)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        rule = rule_for(name, role_of(name, p, model), rules, config["optimizer"])
        # Muon updates matrices of equal shape together
        stack = stack_of(name, p, module_of(name, model), model.config) if rule.updated_by is Muon else None
        members[rule, is_split(p, "ep"), stack].append(p)
    groups = defaultdict(list)
    # nanoGPT numbers parameters by the order of the rules
    for key in sorted(members, key=lambda key: rules.index(key[0])):
        rule, are_experts, stack = key
        groups[rule.updated_by, are_experts].append(make_group(members[key], rule, stack, config))
    return groups


def rule_for(name: str, role: str, rules: list[Rule], optimizer: str) -> Rule:
    """The rule for a parameter. Raises ValueError if there is none, or more than one."""
    matching = [rule for rule in rules if role in rule.roles]
    if len(matching) != 1:
        rows = "no row" if not matching else "more than one row"
        raise ValueError(
            f"RULES in isogpt/training/optim.py contains {rows} of optimizer {optimizer!r} for {name}: name "
            f"its role, {role!r}, in one row"
        )
    return matching[0]


def make_group(params: list[nn.Parameter], rule: Rule, stack: Stack | None, config: dict) -> dict:
    """An optimizer's group of parameters. Muon's groups also contain the heights of the stacked matrices."""
    rate = config[rule.rate]
    if rule.rate == "embedding_lr" and rate == 0:
        rate = config["learning_rate"]
    group = {
        "params": params,
        "optimizer": config["optimizer"],
        "lr": rate,
        "lr_scale": 1.0 if rate == config["learning_rate"] else rate / config["learning_rate"],
        "weight_decay": config[rule.weight_decay] if rule.weight_decay else 0.0,
    }
    return group | {"rows": stack.rows} if stack else group


class Treatment(NamedTuple):
    """How a parameter is updated, for the user."""

    by: str  # class of the optimizer
    rate: float
    decay: str
    kind: str  # what the parameter is called, perhaps together with others


def describe_updates(model: nn.Module, optimizers: list[torch.optim.Optimizer], mesh: Mesh) -> str:
    """
    Say in one line which optimizer updates which parameters of the whole model, with which rate and weight
    decay, and which are frozen (all ranks).
    """
    treatments = {name: Treatment("", 0.0, "", short_name(name)) for name, _ in model.named_parameters()}
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        inner = inner_optimizer(optimizer)
        for group in optimizer.param_groups:
            decay = f", decay {group['weight_decay']:g}" if group["weight_decay"] else ""
            if decay and "weight_decay" not in inner.defaults:
                decay = ", which takes no decay"
            for p in group["params"]:
                name = names[p]
                kinds = {BLOCK_MATRIX: "matrices of blocks", VECTOR: "vectors"}
                kind = kinds.get(role_of(name, p, model), short_name(name))
                treatments[name] = Treatment(type(inner).__name__, group["lr"], decay, kind)
    if mesh.pp > 1:  # a rank holds some of the blocks
        of_stages = gather_objects(treatments, mesh.group("pp"))
        treatments = {name: t for stage in of_stages for name, t in stage.items()}
    if model.config.tied and "transformer.wte.weight" in treatments:
        treatments.pop("lm_head.weight", None)  # in a pipeline, two ranks hold it
    counts = defaultdict(Counter)  # {(optimizer, rate, decay): {kind: number of parameters}}
    for by, rate, decay, kind in treatments.values():
        counts[by, rate, decay][kind] += 1
    frozen = counts.pop(("", 0.0, ""), {})
    parts = [f"{by}: {spell_kinds(kinds)}, lr {rate:g}{decay}" for (by, rate, decay), kinds in counts.items()]
    return "; ".join(parts + ([f"frozen: {spell_kinds(frozen)}"] if frozen else []))


def short_name(name: str) -> str:
    """A parameter's name without the number of the block and what all names share: wte, mlp.router."""
    return IN_A_BLOCK.sub("", name).removeprefix("transformer.").removesuffix(".weight")


def spell_kinds(kinds: dict[str, int]) -> str:
    """Parameters for the user, such as: 24 matrices of blocks, wte, 2 mlp.router."""
    return ", ".join(kind if n == 1 and kind != "vectors" else f"{n} {kind}" for kind, n in kinds.items())


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


def unscale(optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler) -> None:
    """Divide the gradients by float16's loss scale."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)


def clip_and_step(
    optimizers: list[torch.optim.Optimizer],
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
        params = params_of(optimizer)
        if clips_on_device(optimizer):
            # fused AdamW divides gradients by grad_scale, and leaves out a step whose found_inf is not 0, so
            # that a GPU does not wait for the host between the backward pass and the optimizer
            numbers = gathered.on(params[0].device)
            inner = inner_optimizer(optimizer)
            inner.grad_scale = clipping_divisor(numbers.grad_norm, max_norm)
            inner.found_inf = (~numbers.is_update(skips_spikes)).float()
            optimizer.step()
        elif (numbers := gathered.read()).is_update(skips_spikes):
            divisor, inner = clipping_divisor(numbers.grad_norm, max_norm).item(), inner_optimizer(optimizer)
            if isinstance(inner, Muon):  # divides where it reads them
                inner.grad_scale = divisor
            elif divisor > 1:
                torch._foreach_div_([local(p.grad) for p in params if p.grad is not None], divisor)
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
    """What to divide gradients of this norm by, at least 1, as in clip_grad_norm_."""
    divisor = (grad_norm + 1e-6) / (max_norm or math.inf)
    return divisor.clamp(1.0, torch.finfo(torch.float32).max).float()


def report_overflow(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, gathered: Gathered[StepNumbers]
) -> None:
    """Tell the loss scaler, which knows only this rank's gradients, whether any rank's are not finite."""
    for overflowed in scaler._found_inf_per_device(optimizer).values():
        # computed on the GPU, also for an optimizer that decides on the CPU: copying would wait for the GPU
        overflowed.copy_(~gathered.on(overflowed.device).is_finite)
