"""torch.compile: which part of the model is compiled, and whether it works on this machine at all."""

import torch
import torch.nn as nn

from isogpt.common.console import count_text
from isogpt.launch.together import gather_objects
from isogpt.nn import generation
from isogpt.nn.kernels import summed_loss
from isogpt.parallel.attach import replace_seams
from isogpt.parallel.mesh import Mesh, splits_backward
from isogpt.parallel.plan import Plan


def compile_model(model: nn.Module, device: torch.device, plan: Plan, mesh: Mesh) -> str:
    """
    Compile the model in place (all ranks), if the plan says so; parameters keep their names. The model stays
    uncompiled on a CPU, where compilation takes 10 s and gains nothing. It also stays uncompiled if a trial
    compilation fails on any rank, for instance because there is no C compiler.

    With FSDP, and where ranks divide the model, each block is compiled separately. So it is in all layouts
    with exact, because they must compile the same parts. With cuda_graphs, the kernels of a forward or
    backward pass are recorded in a CUDA graph and launched together; gradients must be allocated beforehand,
    see data_parallel.allocate_gradients.

    Returns:
        A sentence for the user about what was done.
    """
    if not plan.compile:
        return "compile: off"
    if device.type == "cpu":
        return "compile: off, since it gains nothing on a CPU"
    if problem := trial_compilation(device):
        return f"compile: does not work on this machine, training without it (slower): {problem}"
    # functions that fail to compile later run uncompiled, with a warning
    torch._dynamo.config.suppress_errors = True
    if plan.exact:  # other layouts have no buckets at which DDP's graphs would be divided
        torch._dynamo.config.optimize_ddp = False
    if mesh.pp > 1 and splits_backward(plan.pp_schedule):
        # torch.compile refuses a second backward pass if the first may overwrite what both read
        torch._functorch.config.donated_buffer = False
    by_block = plan.zero >= 2 or mesh.splits_model or plan.exact
    compile_parts(model, by_block, mode="reduce-overhead" if plan.cuda_graphs else None)
    return "compile: the first step takes about a minute longer"


def compile_note(model: nn.Module, device: torch.device, plan: Plan) -> str:
    """A sentence for the user about what `compile_model` has done (all ranks)."""
    if not plan.compile:
        return "compile: off"
    if device.type == "cpu":
        return "compile: off, since it gains nothing on a CPU"
    if not is_compiled(model):
        return "compile: does not work on this machine, training without it (slower): " + trial_compilation(
            device
        )
    return "compile: the first step takes about a minute longer"


def trial_compilation(device: torch.device) -> str:
    """Compile a small function (all ranks). Returns the first problem of any rank, or ''."""
    problem = ""
    try:
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(lambda t: (t.sin() * t).sum())(x).backward()
    except Exception as e:  # a broken compiler installation can raise nearly anything
        problem = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
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
    if device.type == "cpu":
        return "compile: off, since it gains nothing on a CPU"
    if splits_model:
        return "compile: off, since several processes divide the model"
    if problem := trial_compilation(device):
        return f"compile: does not work on this machine, generating without it (slower): {problem}"
    advance = torch.compile(generation.advance, fullgraph=True, dynamic=False, mode="reduce-overhead")
    replace_seams(model, advance=advance)
    return ""


def compile_parts(model: nn.Module, by_block: bool, **options: object) -> None:
    """
    Compile the model, or its blocks and its loss, in place. Shapes are fixed: an evaluation uses separate
    graphs.
    """
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

    graphs, breaks, frames = counters["stats"]["unique_graphs"], counters["graph_break"], counters["frames"]
    if not graphs and not frames["total"]:
        return ""
    text = f"compile: {count_text(graphs, 'graph')}, {count_text(sum(breaks.values()), 'graph break')}"
    if breaks:
        text += f" ({'; '.join(' '.join(reason.split())[:100] for reason in breaks)})"
    if skips := counters["inductor"]["cudagraph_skips"]:
        text += f", {skips} without CUDA graphs: TORCH_LOGS=cudagraphs shows why"
    failed = frames["total"] - frames["ok"]
    if failed:
        text += f", {count_text(failed, 'function')} failed to compile: TORCH_LOGS=dynamo shows why"
    return text
