"""torch.compile: which part of the model is compiled, and whether it works on this machine at all."""

from functools import cache

import torch
import torch.nn as nn

from isogpt.common.console import count_text
from isogpt.launch.together import gather_objects
from isogpt.nn import generation
from isogpt.nn.kernels import summed_loss
from isogpt.parallel.attach import replace_seams
from isogpt.parallel.mesh import Mesh, splits_backward
from isogpt.parallel.plan import Plan


def compile_model(model: nn.Module, device: torch.device, plan: Plan, mesh: Mesh) -> None:
    """
    Compile the model in place (all ranks), if the plan says so and `why_uncompiled` knows no reason
    against it; parameters keep their names.

    With FSDP, and where ranks divide the model, each block is compiled separately. So it is in all layouts
    with exact, because they must compile the same parts. With cuda_graphs, the kernels of a forward or
    backward pass are recorded in a CUDA graph and launched together; gradients must be allocated beforehand,
    see gradients.FloatSums.allocate.
    """
    if not plan.compile or why_uncompiled(device):
        return
    # functions that fail to compile later run uncompiled, with a warning
    torch._dynamo.config.suppress_errors = True
    if plan.exact:  # other layouts have no buckets at which DDP's graphs would be divided
        torch._dynamo.config.optimize_ddp = False
    if mesh.pp > 1 and splits_backward(plan.pp_schedule):
        # torch.compile refuses a second backward pass if the first may overwrite what both read
        torch._functorch.config.donated_buffer = False
    # a graph that reads a step would be recorded anew at each of them
    torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = True
    by_block = plan.zero >= 2 or mesh.splits_model or plan.exact
    compile_parts(model, by_block, mode="reduce-overhead" if plan.cuda_graphs else None)


def compile_note(device: torch.device, plan: Plan) -> str:
    """What `compile_model` has done, for the user."""
    if not plan.compile:
        return "compile: off"
    return why_uncompiled(device) or "compile: the first step takes about a minute longer"


def why_uncompiled(device: torch.device) -> str:
    """
    Why models stay uncompiled on this device, for the user; '' if they do not (all ranks, the first time). On
    a CPU, compilation takes 10 s and gains nothing.
    """
    if device.type == "cpu":
        return "compile: off, since it gains nothing on a CPU"
    problem = trial_compilation(device)
    return problem and f"compile: fails on this machine, going on without it (slower): {problem}"


@cache
def trial_compilation(device: torch.device) -> str:
    """
    Compile a small function (all ranks, once). Returns the first problem of any rank, such as a missing C
    compiler, or ''.
    """
    problem = ""
    torch._inductor.config.cpp_cache_precompile_headers = False  # they would be in /tmp, see torch_import.py
    try:
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(lambda t: (t.sin() * t).sum())(x).backward()
    except Exception as e:  # a broken compiler installation can raise nearly anything
        problem = f"{type(e).__name__}: {e}".partition("\n")[0]
    return next(filter(None, gather_objects(problem)), "")


def compile_generation(model: nn.Module, device: torch.device, splits_model: bool) -> str:
    """
    Let the model generate in compiled steps (all ranks). One CUDA graph launches the kernels of a step, so
    that the host neither launches them one by one nor waits for a token.

    Args:
        splits_model: whether several ranks divide the model, which is then not compiled.

    Returns:
        '', or the reason why the model generates without compiled steps.
    """
    if splits_model:
        return "compile: off, since several processes divide the model"
    problem = why_uncompiled(device)
    if not problem:
        advance = torch.compile(generation.advance, fullgraph=True, dynamic=False, mode="reduce-overhead")
        replace_seams(model, advance=advance)
    return problem


def compile_parts(model: nn.Module, by_block: bool, **options: object) -> None:
    """
    Compile the model, or its blocks and its loss, in place. Shapes are fixed: an evaluation uses separate
    graphs. An attribute `step`, see GPT.set_step, is a number that a graph reads: other numbers on modules
    are constants, each of whose values would be compiled.
    """
    torch.compiler.config.dynamic_sources = r".*\.step"
    for part in model.transformer.h if by_block else [model]:
        part.compile(dynamic=False, **options)
    # neither the loss of tensor parallelism, which communicates, nor (beware) a partial of summed_loss
    if by_block and model.seams.loss is summed_loss:
        replace_seams(model, loss=torch.compile(summed_loss, dynamic=False, **options))


def is_compiled(model: nn.Module) -> bool:
    """
    Whether `compile_model` has compiled the model, which needs a GPU, the setting, and a compiler that works.
    If so, whatever else a step computes with many small kernels is compiled as well.
    """
    return any(module._compiled_call_impl is not None for module in model.modules())


def compile_report() -> str:
    """Describe what torch.compile has compiled so far and what failed; '' if it has compiled nothing."""
    from torch._dynamo.utils import counters

    graphs, frames = counters["stats"]["unique_graphs"], counters["frames"]
    if not graphs and not frames["total"]:
        return ""
    breaks, skips = counters["graph_break"], counters["inductor"]["cudagraph_skips"]
    failed = frames["total"] - frames["ok"]
    text = f"compile: {count_text(graphs, 'graph')}, {count_text(breaks.total(), 'graph break')}"
    if breaks:
        reasons = [" ".join(reason.split())[:100] for reason in breaks]
        text += f" ({'; '.join(reasons)})"
    if skips:
        text += f", {skips} without CUDA graphs: TORCH_LOGS=cudagraphs shows why"
    if failed:
        text += f", {count_text(failed, 'function')} failed to compile: TORCH_LOGS=dynamo shows why"
    return text
