"""
The one way in which tensor, expert and context parallelism attach to a model that does not know them.

Each of these is a plan: a table whose rows name modules, how the parameters of these modules are divided over
ranks, and which function of the modules is replaced. The function is the forward pass, or a function that the
model keeps in an attribute so that it can be replaced: `loss`, `attention`, `positions`. `attach` applies a
plan in one loop.

A plan of PyTorch's parallelize_module is a table, too, but makes parameters DTensors, divided in one piece.
Here, q, k and v are stacked in one parameter and each is divided, and so are several experts. The forward and
backward pass of a Linear with a DTensor take 0.4 ms more of a CPU (64 x 64, torch 2.13).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.local_parts import Split, keep_local_part
from isogpt.parallel.mesh import Mesh


def one_matrix(config: GPTConfig, length: int) -> tuple[int, ...]:
    """The sections of a parameter in which nothing is stacked, see `Split`."""
    return (length,)


@dataclass(frozen=True)
class Attachment:
    """
    A row of a plan.

    Args:
        modules: pattern of the modules' names; the model's own name is "".
        dim: the dimension along which the modules' parameters are divided. Parameters with fewer dimensions
            stay whole, such as the bias of a Linear whose columns are divided. None: all stay whole.
        sections: what is stacked along `dim`, see `Split`: maps (config, length) to the sections.
        function: the name of the function that is replaced; "": none.
        replacement: is called as replacement(ranks, module, *arguments).
    """

    modules: str
    dim: int | None = None
    sections: Callable[[GPTConfig, int], tuple[int, ...]] = one_matrix
    function: str = ""
    replacement: Callable | None = None


def attach(model: nn.Module, plan: Sequence[Attachment], mesh: Mesh, axis: str, ranks: Any) -> None:
    """
    Apply a plan to a model on the meta device, in place.

    Args:
        axis: the axis of the mesh along which ranks hold different parts of a divided parameter.
        ranks: what the replacements know of the ranks; their first argument.
    """
    for name, module in list(model.named_modules()):  # of a pipeline's stage: the modules that it contains
        for row in plan:
            if not re.fullmatch(row.modules, name):
                continue
            if row.dim is not None:
                divide_parameters(model, name, row, mesh, axis)
            if row.function:
                assert row.function != "forward" or "forward" not in vars(module), f"{name}: replaced twice"
                setattr(module, row.function, partial(row.replacement, ranks, module))
    model.tie_weights()


def divide_parameters(model: nn.Module, name: str, row: Attachment, mesh: Mesh, axis: str) -> None:
    """Keep this rank's part of each parameter of a module, if the parameter has the dimension of the row."""
    for leaf, p in list(model.get_submodule(name).named_parameters(recurse=False)):
        if row.dim < p.dim():
            sections = row.sections(model.config, p.size(row.dim))
            split = Split(axis, row.dim, sections, mesh.index(axis), mesh.size(axis))
            keep_local_part(model, f"{name}.{leaf}", split)
