"""
The steps that distribute a model which knows nothing of processes. train.py calls them in the right order.

The model is on the meta device until `materialize`, so that no rank ever holds a model that is larger than
its memory.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.parallel.compilation import compile_model
from isogpt.parallel.data_parallel import fsdp_units, shard
from isogpt.parallel.local_parts import Splits, copy_to_cpu, init_part, local_parts_by_name, splits_of
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.pipeline import Pipeline, split_layers
from isogpt.parallel.plan import LayoutError, Plan
from isogpt.parallel.recompute import recompute


def divide_model(
    model: nn.Module, plan: Plan, mesh: Mesh, device: torch.device, splits_sequence: bool = True
) -> dict[str, Splits]:
    """
    Divide a model on the meta device over the ranks, as the plan says (all ranks). This rank keeps only what
    it computes: its layers with pp, its experts with ep, its part of each matrix with tp, and of each
    sequence with cp. Then come activation checkpointing, torch.compile, which takes place at the first call,
    and FSDP2's fully_shard on each block with zero 2 and 3.

    Returns:
        How each parameter was split, for `materialize`, since fully_shard replaces parameters.
    """
    if mesh.pp > 1:
        split_layers(model, mesh, plan.pp_schedule)
    if mesh.ep > 1:
        from isogpt.parallel.expert import parallelize_experts

        parallelize_experts(model, mesh)
    if mesh.tp > 1:
        from isogpt.parallel.tensor import parallelize_tensors

        parallelize_tensors(model, mesh, splits_sequence)
    if mesh.cp > 1:
        from isogpt.parallel.context import parallelize_context

        parallelize_context(model, mesh, device)
    splits = {name: splits_of(p) for name, p in model.named_parameters()}
    recompute(model, plan.activation_checkpointing)
    compile_model(model, device, plan, mesh)
    if plan.zero >= 2:
        shard(model, mesh, device, plan)
    return splits


def make_pipeline(
    model: nn.Module, mesh: Mesh, device: torch.device, plan: Plan, splits_sequence: bool = True
) -> Pipeline | None:
    """Make the pipeline that calls a model from `divide_model` whose layers are divided; None if pp is 1."""
    if mesh.pp == 1:
        return None
    return Pipeline(model, mesh, plan, device, tp_parts=mesh.tp if splits_sequence else 1)


def materialize(model: nn.Module, device: torch.device, splits: dict[str, Splits] | None = None) -> None:
    """
    Allocate memory for this rank's parts of a model on the meta device. The values of parameters are
    undefined, those of buffers are the model's. Modules that shared a parameter still share it.

    Args:
        splits: what `divide_model` returned.
    """
    check_what_is_lost(model)
    places = defaultdict(list)  # of each parameter, which modules can share
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            places[p].append((module, name))
    has_units = bool(fsdp_units(model))
    if has_units:
        model.to_empty(device=device)
    for p, ((first, first_name), *others) in places.items():
        if not has_units:  # Module.to_empty would do, but imports sympy, which takes half a second
            memory = torch.empty(p.shape, dtype=p.dtype, device=device)
            setattr(first, first_name, nn.Parameter(memory, requires_grad=p.requires_grad))
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
    model.fill_buffers(device)
    for name, p in model.named_parameters() if splits else ():
        p.splits = splits[name]
    model.reset_routing(device)


def check_what_is_lost(model: nn.Module) -> None:
    """
    Raise LayoutError if the modules of model.py hold something that `materialize` does not allocate: tensors
    or modules that PyTorch does not know, or hooks of parameters.
    """
    modules = {*model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            where = f"{path}.{name} in model.py"
            values = value.values() if isinstance(value, dict) else value
            values = values if isinstance(value, dict | list | tuple) else [value]
            if any(torch.is_tensor(v) and v.is_meta for v in values):
                raise LayoutError(f"{where} is a tensor: use register_buffer and INITIAL_VALUES")
            if any(isinstance(v, nn.Module) and v not in modules for v in values):
                kind = type(value).__name__
                raise LayoutError(f"{where} is a {kind} of modules: use nn.ModuleList or nn.ModuleDict")
        for name, p in module.named_parameters(recurse=False):
            if p._backward_hooks:
                raise LayoutError(f"a hook of {path}.{name} in model.py is lost: use a hook of the module")


def init_weights(model: nn.Module, seed: int) -> None:
    """
    Fill this rank's parts with the initial weights of the whole model on one process, of which only these
    parts are computed.
    """
    for name, part in local_parts_by_name(model).items():
        init_part(model, name, part, seed)


def take_routing(model: nn.Module, is_logged: bool, device: torch.device) -> Tensor | None:
    """
    Return the routers' statistics since the last logged step, over all ranks and divided by the number of
    tokens (all ranks): (L, E + 2) as in MoE.routing_of. None without experts, or if this step is not logged.
    A copy from a GPU is only queued: it has arrived once numbers that are gathered later have arrived.
    """
    c = model.config
    if not c.n_expert or not is_logged:
        return None
    sums = model.routing  # in a pipeline, only the last rank adds to these
    model.reset_routing(device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    tokens = sums[:, 2:].sum(1, keepdim=True) / c.n_expert_active  # (L, 1)
    return copy_to_cpu(sums / tokens)
