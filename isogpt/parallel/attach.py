"""
How tensor, expert and context parallelism attach to a model that does not know them.

Each of the ways is a table. Each of its rows names modules, and says how their parameters are divided over
ranks and what surrounds or changes each module: a hook on its inputs, a hook on its outputs, or a subclass of
the module's class. `attach` applies a table in one loop. Functions that are not modules are
those of model.Seams, which `replace_seams` exchanges.

PyTorch's parallelize_module takes a table, too, but turns each parameter into a DTensor, which it divides in
one piece. Here, q, k and v are stacked in one parameter but divided separately, and so are experts. Besides,
a DTensor costs a Linear 0.4 ms of a CPU in each forward and backward pass (64 x 64, torch 2.13).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.local_parts import Split, splits_of
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import LayoutError


@dataclass(frozen=True)
class Attachment:
    """
    A row of a table.

    Args:
        modules: pattern of the modules' names.
        dim: the dimension along which the modules' parameters are divided. Parameters with fewer dimensions
            stay whole, such as the bias of a Linear whose columns are divided. None: all stay whole.
        sections: the sizes of what is stacked along `dim`, see `Split`, which repeat up to the parameter's
            size: sections(config) -> sizes. None: nothing is stacked.
        becomes: the subclass that the module becomes, with the same parameters; it gets the ranks as
            `self.ranks`.
        inputs: a forward pre-hook that also gets the ranks: inputs(ranks, module, args) -> args.
        output: a forward hook that also gets the ranks: output(ranks, module, args, result) -> result.
    """

    modules: str
    dim: int | None = None
    sections: Callable[[GPTConfig], tuple[int, ...]] | None = None
    becomes: type[nn.Module] | None = None
    inputs: Callable | None = None
    output: Callable | None = None


def attach(model: nn.Module, table: Sequence[Attachment], mesh: Mesh, axis: str, ranks: object) -> None:
    """
    Apply a table to a model on the meta device, in place.

    Args:
        axis: the axis of the mesh along which ranks hold different parts of a divided parameter.
        ranks: what the hooks and the new modules know of the ranks; their first argument.
    """
    for name, module in list(model.named_modules()):  # of a pipeline's stage: the modules that it contains
        for row in table:
            if not re.fullmatch(row.modules, name):
                continue
            if row.becomes:
                module.__class__, module.ranks = row.becomes, ranks
            if row.dim is not None:
                divide_parameters(model.config, module, row, mesh, axis)
            if row.inputs:
                module.register_forward_pre_hook(partial(row.inputs, ranks))
            if row.output:
                module.register_forward_hook(partial(row.output, ranks))
    model.tie_weights()


def divide_parameters(config: GPTConfig, module: nn.Module, row: Attachment, mesh: Mesh, axis: str) -> None:
    """Keep this rank's part of each parameter of a module, if the parameter has the dimension of the row."""
    for name, p in list(module.named_parameters(recurse=False)):
        if row.dim < p.dim():
            shape = list(p.shape)
            n = shape[row.dim]
            stacked = row.sections(config) if row.sections else (n,)
            sections = stacked * (n // sum(stacked))
            split = Split(axis, row.dim, sections, mesh.index(axis), mesh.size(axis))
            shape[row.dim] = sum(length for _, length in split.ranges())
            part = nn.Parameter(torch.empty(shape, device=p.device), requires_grad=p.requires_grad)
            part.splits = (*splits_of(p), split)
            setattr(module, name, part)


def check_seam(model: nn.Module, name: str, known: Callable, way: str) -> None:
    """
    Raise LayoutError if a module calls a different function than the `known` one, which a way of dividing the
    work replaces by one that computes the same on several ranks.
    """
    for module_name, module in model.named_modules():
        if hasattr(module, "seams") and getattr(module.seams, name) is not known:
            problem = f"{way} divides {known.__name__}, which {module_name} in model.py replaces"
            raise LayoutError(f"{problem}: set --{way}=1")


def replace_seams(model: nn.Module, **functions: Callable) -> None:
    """Exchange functions that the model's modules call, by their names in model.Seams, in place."""
    for module in model.modules():
        if hasattr(module, "seams"):
            module.seams = replace(module.seams, **functions)
