"""
What torch.compile makes of the model on a GPU, without one: dynamo's graphs, graph breaks and recompilations,
and Inductor's Triton kernels, which Triton compiles to machine code for a given GPU. Nothing is executed.

    python tests/pretend_cuda/compile_rehearsal.py                           all cases for an H100, about 15
    minutes
    python tests/pretend_cuda/compile_rehearsal.py --sm=75 "gpt2 fp16"       one case for a T4
    python tests/pretend_cuda/compile_rehearsal.py --graphs_only             without kernels and without
    Triton

It ends in a table. Inputs and parameters are tensors that claim to be on cuda:0 and have no kernels. The exit
status is 1 if a case failed, or if a case has graph breaks or compiles anything after the first step.
"""

import argparse
import os
import sys
from pathlib import Path

CASES = (
    "gpt2 bf16",
    "gpt2 fp16",
    "gpt2 f32",
    "gpt2 bias dropout bf16",
    "nanochat bf16",
    "nanochat fp16",
    "llama gqa bf16",
    "gpt2 chunks bf16",
    "gpt2 chunks fp16",
    "gpt2 chunks f32",
    "nanochat chunks bf16",
    "recompute full bf16",
    "recompute selective bf16",
    "recompute selective nanochat bf16",
    "experts bf16",
    "experts fp16",
    "experts f32",
    "blocks gpt2 bf16",
    "blocks nanochat bf16",
    "blocks llama full bf16",
    "blocks experts bf16",
    "tp bf16",
    "tp nanochat bf16",
    "cp bf16",
    "generate gpt2 bf16",
    "generate gpt2 f32",
    "generate nanochat bf16",
    "generate llama gqa bf16",
    "generate experts bf16",
)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(CASES)}")
    parser.add_argument(
        "--sm", type=int, default=90, help="the GPU's compute capability, such as 75, 80 or 90"
    )
    parser.add_argument("--gb", default="80", help="the GPU's memory")
    parser.add_argument(
        "--graphs_only", action="store_true", help="dynamo and AOTAutograd, without Inductor and Triton"
    )
    parser.add_argument("--n_embd", type=int, default=256, help="the model's width")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case is named {', '.join(unknown)}; there are {', '.join(CASES)}")
    return options


OPTIONS = arguments()
os.environ["PRETEND_CUDA_CAPABILITY"] = f"{OPTIONS.sm // 10}.{OPTIONS.sm % 10}"
os.environ["PRETEND_CUDA_GB"] = OPTIONS.gb
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import harness

harness.install_for_compile()  # before Inductor is imported, which looks for a GPU

import collections
import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
from torch.testing._internal.distributed.fake_pg import FakeStore

from isogpt.nn import generation, kernels
from isogpt.parallel import compilation
from isogpt.parallel.context import parallelize_context
from isogpt.parallel.local_parts import splits_of
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.parallelize import split_model
from isogpt.parallel.recompute import recompute
from model import GPT, GPTConfig

KERNELS = collections.Counter()  # compiled for the case that runs, by name
COPIED = []  # for each graph, the number of inputs that a CUDA graph would copy in each step
VOCABULARY = 50304
BLOCK_SIZE = 256


# ------------------------------------------------------------------------------------------------------------
# Inductor and Triton without a GPU


def use_triton() -> None:
    """Have Triton compile for a GPU that is not there, and Inductor use the result without loading it."""
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class NoDriver(DriverBase):
        """Triton's driver: enough of it to compile."""

        def __init__(self) -> None:
            self.get_current_device = harness.constant(0)
            self.get_device_capability = harness.constant(divmod(OPTIONS.sm, 10))
            self.set_current_device = harness.constant(None)
            self.get_current_stream = harness.constant(0)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", OPTIONS.sm, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Callable:
            return harness.constant(1.0)

    triton.runtime.driver.set_active(NoDriver())
    triton_helpers.set_driver_to_gpu = harness.constant(None)
    real_precompile = triton_heuristics.CachingAutotuner.precompile

    def precompile(self, warm_cache_only=False, **kwargs):
        """Compile to machine code, without loading it."""
        KERNELS[self.fn.__name__] += 1
        kept = {name: value for name, value in kwargs.items() if name == "reload_kernel"}
        return real_precompile(self, warm_cache_only=True, **kept)

    triton_heuristics.CachingAutotuner.precompile = precompile


def measure_nothing() -> None:
    """Turn off what Inductor does with tensors on the GPU while it compiles."""
    fuse_attention._sfdp_init = harness.constant(None)
    pad_mm._pad_mm_init = harness.constant(None)
    misc_patterns._misc_patterns_init = harness.constant(None)
    torch._inductor.config.shape_padding = False
    torch._functorch.config.graphsafe_rng_functionalization = False  # needs the GPU's generator


def without_values(value: object) -> object:
    """A tensor on the pretended GPU in the shape of a fake one, or what is not a tensor."""
    if not isinstance(value, Tensor):
        return value
    shape = tuple(map(int, value.shape))
    stride = tuple(map(int, value.stride()))
    made = torch.empty_strided(shape, stride, dtype=value.dtype)
    return torch.ops.pretend.label(made, 0) if value.device.type == "cuda" else made


def inner_compile(gm: torch.fx.GraphModule, example_inputs: list, **kwargs) -> Callable:
    """
    Inductor's compile_fx_inner, then a function that returns tensors of the right shapes and runs no kernel.
    """
    COPIED.append(len(example_inputs) - len(kwargs.get("static_input_idxs", ())))
    if not OPTIONS.graphs_only:
        compile_fx.compile_fx_inner(gm, example_inputs, **kwargs)
    outputs = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    values = [node.meta.get("val") if isinstance(node, torch.fx.Node) else node for node in outputs]

    def run(args: list) -> list:
        args.clear()
        return [without_values(value) for value in values]

    run._boxed_call = True
    return run


def backend(gm: torch.fx.GraphModule, example_inputs: list, **kwargs) -> Callable:
    """The backend for torch.compile."""
    return compile_fx.compile_fx(gm, example_inputs, inner_compile=inner_compile)


# ------------------------------------------------------------------------------------------------------------
# models and their steps


def labelled(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """Zeros on the pretended GPU."""
    return torch.ops.pretend.label(torch.zeros(shape, dtype=dtype), 0).requires_grad_(grad)


def label_parameters(module: nn.Module) -> None:
    """Allocate a model from the meta device on the pretended GPU."""
    for m in module.modules():
        for name, p in list(m.named_parameters(recurse=False)):
            setattr(m, name, nn.Parameter(labelled(*p.shape, dtype=p.dtype)))
            getattr(m, name).splits = splits_of(p)  # as materialize does
        for name, b in list(m.named_buffers(recurse=False)):
            setattr(m, name, labelled(*b.shape, dtype=b.dtype))
    if isinstance(module.lm_head, nn.Linear):  # not prepared for generation
        module.tie_weights()
    if module.config.n_expert:
        module.routing = labelled(module.config.n_layer, module.config.n_expert + 2)


def make(**changes) -> GPT:
    """A model on the meta device."""
    args = {"n_layer": 2, "n_head": 4, "n_embd": OPTIONS.n_embd, "block_size": BLOCK_SIZE, "bias": False}
    with torch.device("meta"):
        return GPT(GPTConfig(**args | {"vocab_size": VOCABULARY} | changes))


def rounded_to(dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """train.py's autocast."""
    return torch.autocast("cuda", dtype, enabled=dtype.itemsize == 2)


def train(model: GPT, dtype: torch.dtype, tokens: int = BLOCK_SIZE) -> None:
    """Forward and backward of one micro-batch of this many tokens per sequence."""
    x = labelled(4, tokens, dtype=torch.int64)
    model.train()
    with rounded_to(dtype):
        _, loss = model(x, x, 1024.0)
    torch.autograd.backward(loss, labelled())
    for p in model.parameters():
        p.grad = None


def evaluate(model: GPT, dtype: torch.dtype) -> None:
    """The loss of one micro-batch."""
    x = labelled(4, BLOCK_SIZE, dtype=torch.int64)
    model.eval()
    with torch.no_grad(), rounded_to(dtype):
        model(x, x, 1024.0)


def run_block(block: nn.Module, model: GPT, dtype: torch.dtype, tokens: int = BLOCK_SIZE) -> None:
    """Forward and backward of one block."""
    c = model.config
    rope = labelled(2, BLOCK_SIZE, 1, c.n_embd // c.n_head) if model.arch.rotation else None
    with rounded_to(dtype):
        y = block(labelled(4, tokens, c.n_embd, grad=True), rope)
    outs = [out for out in (y if isinstance(y, tuple) else (y,)) if out is not None and out.requires_grad]
    torch.autograd.backward(outs, [labelled(*out.shape, dtype=out.dtype) for out in outs])


def run_loss(loss: Callable, model: GPT, dtype: torch.dtype) -> None:
    """Forward and backward of the loss."""
    with rounded_to(dtype):
        x = labelled(4, BLOCK_SIZE, model.config.n_embd, grad=True)
        out = loss(x, model.lm_head.weight, labelled(4, BLOCK_SIZE, dtype=torch.int64), 0.0)
    torch.autograd.backward(out, labelled())


def whole(dtype: torch.dtype, mode: str = "none", **changes) -> Callable[[], None]:
    """The model as one graph, as one GPU and DDP have it; returns what a step does."""
    model = make(**changes)
    recompute(model, mode)
    label_parameters(model)
    compilation.compile_parts(model, by_block=False, backend=backend)

    def step() -> None:
        train(model, dtype)
        evaluate(model, dtype)

    return step


def chunks(dtype: torch.dtype, **changes) -> Callable[[], None]:
    """The same with a loss that is computed in chunks, as for large micro-batches."""
    real = kernels.logits_at_once
    model = make(**changes)
    label_parameters(model)
    compilation.compile_parts(model, by_block=False, backend=backend)

    def few_at_once(on_cpu: bool, itemsize: int, vocab: int) -> tuple:
        return (2**20, *real(on_cpu, itemsize, vocab)[1:])

    def step() -> None:
        kernels.logits_at_once = few_at_once
        try:
            train(model, dtype)
        finally:
            kernels.logits_at_once = real

    return step


def blocks(dtype: torch.dtype, mode: str = "none", **changes) -> Callable[[], None]:
    """Each block and the loss by themselves, as FSDP has them."""
    model = make(**changes)
    recompute(model, mode)
    label_parameters(model)
    compilation.compile_parts(model, by_block=True, backend=backend)

    def step() -> None:
        for block in model.transformer.h:
            run_block(block, model, dtype)
        run_loss(model.seams.loss, model, dtype)

    return step


def divided(dtype: torch.dtype, by_block: bool = True, **changes) -> Callable[[], None]:
    """Rank 0 of two, whose collectives do nothing, with tp, cp or ep."""
    degrees = {name: changes.pop(name) for name in ("tp", "cp", "ep") if name in changes}
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = make(**changes)
    mesh = Mesh(0, **degrees)
    split_model(model, mesh, "1f1b", torch.device("cpu"))
    if mesh.cp > 1:
        real_positions = mesh.own_positions

        def own_positions(n: int) -> Tensor:
            return torch.ops.pretend.label(real_positions(n), 0)

        mesh.own_positions = own_positions
        parallelize_context(model, mesh, torch.device("cuda", 0))
    label_parameters(model)
    compilation.compile_parts(model, by_block, backend=backend)

    def step() -> None:
        if not by_block:
            train(model, dtype, BLOCK_SIZE // mesh.cp)
            return
        for block in model.transformer.h:  # what is between the blocks is not compiled
            run_block(block, model, dtype, BLOCK_SIZE // mesh.tp)

    return step


def generating(dtype: torch.dtype, **changes) -> Callable[[], None]:
    """A token of some samples, as sample.py --compile=True computes it."""
    model = make(**changes)
    generation.prepare(model.eval(), dtype)
    label_parameters(model)
    c, rows = model.config, 4
    newest = labelled(1, dtype=torch.int64)
    shape = (rows, c.n_kv_head, BLOCK_SIZE, c.n_embd // c.n_head)
    samples = generation.Samples(
        labelled(rows, BLOCK_SIZE, dtype=torch.int64),
        labelled(BLOCK_SIZE - 1, rows, 1),
        [
            kernels.FixedCache(labelled(*shape, dtype=dtype), labelled(*shape, dtype=dtype), newest)
            for _ in range(c.n_layer)
        ],
        newest,
    )
    generation.keep_addresses(samples)
    choice = generation.Choice(0.8, 200, 0.9, VOCABULARY - 47)
    advance = torch.compile(generation.advance, fullgraph=True, dynamic=False, backend=backend)

    def step() -> None:
        with torch.no_grad():
            advance(model, samples, choice)
        if COPIED != [0]:
            raise RuntimeError(f"a CUDA graph would copy inputs in each step: {COPIED}")

    return step


bf16 = torch.bfloat16
fp16 = torch.float16
f32 = torch.float32
EXPERTS = {"n_expert": 4, "n_expert_active": 2}
MAKERS = {
    "gpt2 bf16": partial(whole, bf16),
    "gpt2 fp16": partial(whole, fp16),
    "gpt2 f32": partial(whole, f32),
    "gpt2 bias dropout bf16": partial(whole, bf16, bias=True, dropout=0.1),
    "nanochat bf16": partial(whole, bf16, arch="nanochat"),
    "nanochat fp16": partial(whole, fp16, arch="nanochat"),
    "llama gqa bf16": partial(whole, bf16, arch="llama", n_kv_head=2),
    "gpt2 chunks bf16": partial(chunks, bf16),
    "gpt2 chunks fp16": partial(chunks, fp16),
    "gpt2 chunks f32": partial(chunks, f32),
    "nanochat chunks bf16": partial(chunks, bf16, arch="nanochat"),
    "recompute full bf16": partial(whole, bf16, "full"),
    "recompute selective bf16": partial(whole, bf16, "selective"),
    "recompute selective nanochat bf16": partial(whole, bf16, "selective", arch="nanochat"),
    "experts bf16": partial(whole, bf16, **EXPERTS),
    "experts fp16": partial(whole, fp16, **EXPERTS),
    "experts f32": partial(whole, f32, **EXPERTS),
    "blocks gpt2 bf16": partial(blocks, bf16),
    "blocks nanochat bf16": partial(blocks, bf16, arch="nanochat"),
    "blocks llama full bf16": partial(blocks, bf16, "full", arch="llama"),
    "blocks experts bf16": partial(blocks, bf16, **EXPERTS),
    "tp bf16": partial(divided, bf16, tp=2),
    "tp nanochat bf16": partial(divided, bf16, tp=2, arch="nanochat"),
    # not ep: its token exchange is not compiled, and needs kernels
    "cp bf16": partial(divided, bf16, by_block=False, cp=2),
    "generate gpt2 bf16": partial(generating, bf16),
    "generate gpt2 f32": partial(generating, f32),
    "generate nanochat bf16": partial(generating, bf16, arch="nanochat"),
    "generate llama gqa bf16": partial(generating, bf16, arch="llama", n_kv_head=2),
    "generate experts bf16": partial(generating, bf16, arch="llama", **EXPERTS),
}


# ------------------------------------------------------------------------------------------------------------
# the table


@dataclass
class Row:
    """What torch.compile has made of a case."""

    case: str
    graphs: int = 0  # of the first step: training and evaluation, or blocks and loss
    recompiled: int = 0  # graphs that the second step has compiled again
    breaks: dict[str, int] = field(default_factory=dict)  # reason -> how often
    kernels: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def has_passed(self) -> bool:
        """Whether there is nothing to mend."""
        return not (self.error or self.breaks or self.recompiled)

    def text(self) -> str:
        """The row, and the reason of each graph break below it."""
        said = "ok" if self.has_passed else "FAILED"
        found = f"{self.graphs:6} {sum(self.breaks.values()):6} {self.recompiled:10} {self.kernels:7}"
        lines = [f"{self.case:34} {found} {self.seconds:7.0f} s  {said}{self.error and f': {self.error}'}"]
        lines += [
            f"{'':8}break {count} x {' '.join(reason.split())[:300]}" for reason, count in self.breaks.items()
        ]
        return "\n".join(lines)


def rehearse(name: str) -> Row:
    """Two steps of a case."""
    torch._dynamo.reset()
    counters.clear()
    KERNELS.clear()
    COPIED.clear()
    row = Row(name)
    began = time.monotonic()
    try:
        step = MAKERS[name]()
        step()
        row.graphs = counters["stats"]["unique_graphs"]
        step()
        row.recompiled = counters["stats"]["unique_graphs"] - row.graphs
    except Exception as e:
        row.error = f"{type(e).__name__}: {' '.join(str(e).split())[:600]}"
        if os.environ.get("VERBOSE"):
            traceback.print_exc()
    row.breaks = dict(counters["graph_break"])
    row.kernels = sum(KERNELS.values())
    row.seconds = time.monotonic() - began
    return row


def main() -> None:
    measure_nothing()
    # flash attention, or memory-efficient attention
    torch.ops.pretend.use_attention(1 if OPTIONS.sm >= 80 else 2)
    if not OPTIONS.graphs_only:
        try:
            use_triton()
        except ImportError as e:
            sys.exit(
                f"error: {e}; type pip install triton, or add --graphs_only for the graphs without kernels"
            )
    print(
        f"{'case':34} {'graphs':>6} {'breaks':>6} {'recompiled':>10} {'kernels':>7} {'time':>9}", flush=True
    )
    has_passed = True
    for name in OPTIONS.cases or CASES:
        row = rehearse(name)
        print(row.text(), flush=True)
        has_passed = has_passed and row.has_passed
    sys.exit(not has_passed)


main()
