"""
Prove a layout before a run trains with it: a small model, with the code of model.py, computes on all ranks
together what it computes on one process.

The ways of dividing the work rely on the model: only attention mixes positions, nothing but the residual
stream goes from block to block, and certain matrices can be divided. After an edit of model.py, this may no
longer be true, and nothing else would say so.
"""

import gc

import torch
from torch import nn

from isogpt.check.facts import Trial, crash_of, small_plan
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import LAYOUT, UNDIVIDED, LayoutError, Plan
from isogpt.training import precision

# what divides the work, and the values with which nothing does
DIVIDED_BY = (*LAYOUT, "islands", "exact")
ONE_PROCESS = {name: getattr(UNDIVIDED, name) for name in DIVIDED_BY}
ONE_PROCESS |= {"cpu_offload": False, "grad_sync": "auto", "shares": "equal"}


def prove_layout(
    model_class: type[nn.Module], plan: Plan, mesh: Mesh, device: torch.device, config: dict
) -> list[str]:
    """
    Compare the facts of a small model on all ranks with those of one process, see Trial.facts (all ranks).
    Returns a line for the user; none if nothing is divided.

    Args:
        model_class: GPT, from the model.py of the run.
        plan: if it has no batch_size, the model only generates.
        mesh: of the plan, connected.
        config: train.py's settings, of which the optimizers are made.

    Raises:
        LayoutError: a fact differs, or the small model cannot be computed or saved. On every rank, unless a
            pipeline fails.
    """
    name, args = layout_name(plan), small_plan(plan).model_args
    try:
        problem = first_problem(model_class, plan, mesh, device, config)
    except ValueError as e:  # a sentence for the user
        raise LayoutError(str(e)) from e
    except Exception as e:  # whatever an edited model raises
        raise LayoutError(refusal(plan, crash_of(e))) from e
    if not problem:
        sizes = f"n_layer {args['n_layer']}, block_size {args['block_size']}"
        line = f"layout:  {name} computes the same as one process: checked with a small model ({sizes})"
        return [line] if name else []
    raise LayoutError(refusal(plan, problem))


def first_problem(
    model_class: type[nn.Module], plan: Plan, mesh: Mesh, device: torch.device, config: dict
) -> str:
    """
    Return the first difference of any rank; "" if there is none (all ranks). Since rounding can flip a token
    from one expert to another, there must be a difference with a second draw of weights and tokens, too.
    """
    precision.set_numerics(device, "float32", deterministic=False)  # without TF32
    shapes = (False, True) if plan.batch_size and plan.cp > 1 else (not layout_name(plan),)
    for is_long in shapes:
        for draw in range(2):
            problem = Trial(model_class, plan, mesh, device, config, draw, is_long).problem()
            gc.collect()  # what the small model has allocated; its hooks refer to each other
            torch.cuda.empty_cache()  # does nothing without CUDA
            if not problem:
                break
        if problem:
            break
    return problem


def layout_name(plan: Plan) -> str:
    """The settings that divide the work, as they are typed; "" if nothing is divided."""
    values = {name: getattr(plan, name) for name in DIVIDED_BY}
    typed = [f"{name}={value}" for name, value in values.items() if value != ONE_PROCESS[name]]
    processes = f"dp on {plan.world_size} processes" if plan.world_size > 1 else ""
    return " ".join(typed) or processes


def refusal(plan: Plan, problem: str) -> str:
    """What to say about a layout that has a problem."""
    name = layout_name(plan) or "a model from the meta device"
    return (
        f"{name} does not compute what one process computes with this model.py: {problem}. See "
        "docs/changing-the-model.md; python bench.py --check shows which layouts do"
    )
