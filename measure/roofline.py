"""
Predict a training step on a GPU, on a machine without a GPU.

The step is compiled for the GPU by torch.compile, up to the point at which Triton would compile the kernels,
with tensors that have shapes but no values. Every kernel is counted: the bytes that it reads and writes, and
its FLOPs. A kernel takes max(bytes / bandwidth, FLOPs / speed). The speeds are in CARDS.

    python measure/roofline.py --batch_size=16                    train.py's settings; one micro-batch a step
    python measure/roofline.py --arch=nanochat --optimizer=muon --card=a100 --json=step.json
    python measure/roofline.py --nanogpt=FOLDER --batch_size=16   a clone of nanoGPT
    python measure/roofline.py --nanochat=FOLDER --batch_size=8 --block_size=2048

It needs a CPU build of torch 2.13, triton (`pip install triton`) and g++, and no network.
"""

import importlib.util
import math
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "pretend_cuda")]

import cuda_guard

# a device guard for CUDA, which autograd asks for; torch looks for it when it is imported
LACKING = cuda_guard.missing() or (
    "" if importlib.util.find_spec("triton") else "torch.compile needs Triton: pip install triton"
)
if __name__ == "__main__" and not LACKING:
    cuda_guard.load()

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from configurator import configure, fail
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel import compilation, parallelize
from isogpt.parallel.float_sums import FloatSums
from isogpt.parallel.integer_sums import ExactSums
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import plan_of
from isogpt.parallel.recompute import recompute
from isogpt.parallel.shares import share_of_plan
from isogpt.training import optim, precision, settings
from isogpt.training.step_numbers import StepNumbers


@dataclass(frozen=True)
class Card:
    """
    A GPU, and the speeds that the kernels of a training step reach.

    Args:
        peak: the data sheet's, for MFU.
        matmul: FLOP/s of matmuls in bfloat16; float32 runs at a tenth of it, and TF32 at half.
        bytes_per_s: bytes that kernels read and write.
        attention: FLOP/s of attention's forward and backward pass, without the scores above the diagonal.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    memory: int
    peak: float
    matmul: float
    bytes_per_s: float
    attention: tuple[float, float]


# A step of GPT-2 on an H200 (docs/benchmarks.md): its matmuls reach 738 TFLOP/s, 8192^3 alone 661; its Triton
# kernels 3.3 TB/s, a copy alone 4.15; cuDNN's attention of 1,024 tokens and heads of 64 features 310 TFLOP/s
# forward and 234 backward. The H100's bandwidth is 0.9 times the data sheet's. The A100's matmuls and
# bandwidth are those of isogpt/speed/devices.py. Its attention is an assumption: no measured step was
# compared.
HOPPER = {"capability": (9, 0), "processors": 132, "peak": 989e12, "matmul": 700e12}
HOPPER |= {"attention": (310e12, 234e12)}
CARDS = {
    "h100": Card("NVIDIA H100 80GB HBM3", memory=85 * 10**9, bytes_per_s=3.0e12, **HOPPER),
    "h200": Card("NVIDIA H200", memory=150 * 10**9, bytes_per_s=4.15e12, **HOPPER),
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 85 * 10**9, 312e12, 234e12, 1.7e12, (110e12, 90e12)),
}
# seconds between the end of a kernel and the start of the next, where the host is ahead: 1.2 ms for the 500
# kernels of a measured step
GAP = 2.4e-6
# elements that one launch of a fused optimizer or of a _foreach operator takes: 320 blocks of 65,536
PER_LAUNCH = 320 * 2**16

TRITON, MATMUL, ATTENTION, OTHER = "Triton", "matmul", "attention", "other"  # kinds of kernels
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"  # passes
# parts of a step; a kernel that computes something of several belongs to the first of them
LOSS, NORMS, MLP, ATTN = "head and loss", "norms", "MLP", "attention"
REST, SUMS, OPTIMIZER = "embeddings and rest", "exact's sums", "optimizer"
PARTS = (LOSS, NORMS, MLP, ATTN, REST, SUMS, OPTIMIZER)


@dataclass
class Kernel:
    """Kernels of one kind that are launched one after the other: usually one."""

    kind: str
    part: str
    pass_: str
    name: str
    bytes: float
    flops: float = 0.0
    width: int = 2  # bytes of an element that is multiplied
    launches: float = 1

    def seconds(self, card: Card) -> float:
        """The predicted time, without the gap before the next kernel."""
        speed = card.matmul if self.width == 2 else card.matmul / 10
        if self.kind == ATTENTION:
            speed = card.attention[self.pass_ == BACKWARD]
        return max(self.bytes / card.bytes_per_s, self.flops / speed)


# ------------------------------------------------------------------------------------------------------------
# bytes and FLOPs of operators


def bytes_of(tensors: Iterable[object]) -> int:
    """The bytes of the different tensors among these: a tensor that is expanded is read once."""
    sizes = {}
    for t in tensors:
        if isinstance(t, Tensor):
            spans = [n for n, stride in zip(t.shape, t.stride(), strict=True) if stride]
            sizes[id(t)] = math.prod(spans) * t.itemsize
    return sum(sizes.values())


def traffic(op: torch._ops.OpOverload, args: tuple, kwargs: dict, out: object) -> int:
    """The bytes that a call of an operator reads and writes, by its schema; 0 if it only makes a view."""
    if op.is_view or op.namespace in ("prim", "prims") or op._schema.name in WITHOUT_TRAFFIC:
        return 0
    read, written = [], []
    overwrites = op._schema.name.endswith(("fill_", "zero_", "copy_"))  # without reading
    for i, argument in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        leaves = tree_leaves(value)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and not (argument.name == "grads" and kwargs.get("grad_scale") is None):
            written += leaves  # fused AdamW writes gradients only if it divides them
        if not (is_written and (overwrites or argument.is_out)):
            read += leaves
    touched = {id(t) for t in written}
    written += [t for t in tree_leaves(out) if id(t) not in touched]
    if op._schema.name in ("aten::index_select", "aten::gather", "aten::embedding", "aten::index"):
        return 2 * bytes_of(written) + bytes_of(read[1:])
    return bytes_of(read) + bytes_of(written)


WITHOUT_TRAFFIC = {
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_local_scalar_dense",
    "aten::lift_fresh",
    "aten::record_stream",
}


def flops_of(op: torch._ops.OpOverload, args: tuple, kwargs: dict, out: object) -> float:
    """
    The FLOPs of a matmul or of attention; 0 for other operators. Causal attention computes half of the
    scores, and the backward pass of fused attention computes them again.
    """
    from torch.utils.flop_counter import flop_registry

    packet = op._overloadpacket
    if op.namespace == "roofline":
        return windowed_flops(op, args)
    if op._schema.name == "aten::_grouped_mm":  # each row is multiplied by one expert's matrix
        return 2.0 * args[0].numel() * args[1].size(-1)
    if packet not in flop_registry:
        return 0.0
    flops = flop_registry[packet](*args, **without_device(kwargs), out_val=out)
    return flops / 2 if is_causal(op, args, kwargs) else flops


def windowed_flops(op: torch._ops.OpOverload, args: tuple) -> float:
    """The FLOPs of FlashAttention-3, see `flash_attention_3`: 2 matmuls forward, 5 backward."""
    (B, T, H, D), window = args[0].shape, args[3]
    window = min(window, T) if window >= 0 else T
    scores = window * (window + 1) / 2 + (T - window) * window
    return (10 if "backward" in op._schema.name else 4) * B * H * D * scores


def without_device(kwargs: dict) -> dict:
    """The keyword arguments without those of a tensor's place and dtype."""
    return {k: v for k, v in kwargs.items() if k not in ("dtype", "layout", "device", "pin_memory")}


def is_causal(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether an operator of attention leaves out the scores above the diagonal."""
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[i] if i < len(args) else kwargs.get("is_causal", argument.default_value))
    return False


def kind_of(op: torch._ops.OpOverload, flops: float) -> str:
    """The kind of an operator's kernel, which Inductor has not generated."""
    if op.namespace == "roofline" or "_attention" in op._schema.name:
        return ATTENTION
    return MATMUL if flops else OTHER


def launches_of(op: torch._ops.OpOverload, args: tuple) -> int:
    """How many kernels an eager operator launches: lists of tensors are divided by their elements."""
    name = op._schema.name.rpartition("::")[2]
    if not name.startswith(("_foreach", "_fused")):
        return 1
    elements = sum(t.numel() for t in args[0])
    return -(-elements // PER_LAUNCH)


# ------------------------------------------------------------------------------------------------------------
# the parts of a step


def part_of_node(node: torch.fx.Node) -> str:
    """The part of the step to which an operator of a compiled graph belongs."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    modules = list(stack.values())
    names = {name for path, _ in modules for name in str(path).replace("[", ".").split(".")}
    classes = {getattr(cls, "__name__", str(cls).rpartition(".")[2]) for _, cls in modules}
    trace = str(node.meta.get("stack_trace") or "")
    original = str(node.meta.get("original_aten") or "")
    if "integer_sums.py" in trace:
        return SUMS
    if "muon.py" in trace or "/optim.py" in trace:
        return OPTIMIZER
    if names & {"attn", "self_attn"}:
        return ATTN
    if names & {"mlp"}:
        return MLP
    is_loss = any(word in trace for word in ("in summed_loss", "cross_entropy", "lm_head", "soft_cap"))
    if "lm_head" in names or is_loss or "nll_loss" in original or "log_softmax" in original:
        return LOSS
    if any("Norm" in name for name in classes) or "norm" in original or "norm(" in trace:
        return NORMS
    return REST


def first_part(nodes: Iterable[torch.fx.Node]) -> str:
    """The part to which a kernel belongs that computes these operators."""
    parts = {part_of_node(node) for node in nodes}
    return next((part for part in PARTS if part in parts), REST)


# ------------------------------------------------------------------------------------------------------------
# counting


@dataclass
class Ledger:
    """
    The kernels that a step launches.

    Args:
        part: to which eager operators belong now.
        pass_: likewise.
        factor: how often a step repeats what runs now.
        is_counting: False while torch.compile traces and runs compiled graphs.
    """

    kernels: list[Kernel] = field(default_factory=list)
    part: str = REST
    pass_: str = FORWARD
    factor: float = 1.0
    is_counting: bool = False

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Count launches, as often as a step repeats them."""
        if self.is_counting:
            self.kernels += [replace(k, launches=k.launches * self.factor) for k in kernels]

    @contextmanager
    def phase(self, part: str, pass_: str) -> Iterator[None]:
        """The part and the pass of what runs inside."""
        before = self.part, self.pass_
        self.part, self.pass_ = part, pass_
        yield
        self.part, self.pass_ = before


class CountEager(TorchDispatchMode):
    """Counts the operators that run eagerly."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, op: torch._ops.OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        if not self.ledger.is_counting or torch._guards.TracingContext.try_get():
            return out
        on_gpu = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor) and t.is_cuda]
        size = traffic(op, args, kwargs, out) if on_gpu else 0
        if size:
            flops = flops_of(op, args, kwargs, out)
            name = op._schema.name.rpartition("::")[2]
            n = launches_of(op, args)
            width = next((t.itemsize for t in on_gpu if t.is_floating_point()), 4)
            kernel = Kernel(
                kind_of(op, flops), self.ledger.part, self.ledger.pass_, name, size / n, flops / n, width, n
            )
            self.ledger.add([kernel])
        return out


def kernels_of_graph(scheduler: Any, pass_: str) -> list[Kernel]:
    """The kernels of a graph that Inductor has scheduled."""
    from torch._inductor import scheduler as ind

    kernels = []
    for node in scheduler.nodes:
        parts = node.get_nodes()  # more than one in a fused kernel, and in one for lists of tensors
        origins = {fx: None for part in parts if part.node is not None for fx in part.node.get_origins()}
        if isinstance(node, ind.NopKernelSchedulerNode) or not origins:
            continue
        if not isinstance(node, ind.ExternKernelSchedulerNode):
            names = [str(fx.target).split(".")[-2] if "." in str(fx.target) else str(fx) for fx in origins]
            name = "triton_" + "_".join(list(dict.fromkeys(names))[:6])
            size = traffic_of_fused(node, parts)
            kernels.append(Kernel(TRITON, first_part(origins), pass_, name, size))
            continue
        fx = main_operator(getattr(node.node, "origin_node", None), origins)
        if type(node.node).__name__ == "MultiOutput" or not isinstance(fx.target, torch._ops.OpOverload):
            continue
        args, kwargs = torch.fx.node.map_arg((fx.args, fx.kwargs), value_of)
        out = fx.meta.get("val")
        size, flops = traffic(fx.target, args, kwargs, out), flops_of(fx.target, args, kwargs, out)
        if size:
            width = next((t.itemsize for t in tree_leaves(args) if isinstance(t, Tensor)), 2)
            name = fx.target._schema.name.rpartition("::")[2]
            kernels.append(
                Kernel(kind_of(fx.target, flops), first_part([fx]), pass_, name, size, flops, width)
            )
    return kernels


def main_operator(origin: torch.fx.Node | None, origins: Iterable[torch.fx.Node]) -> torch.fx.Node:
    """The matmul or attention among the operators that one call computes, or else Inductor's `origin`."""
    from torch.utils.flop_counter import flop_registry

    candidates = [origin, *origins] if origin else [*origins]
    counted = (fx for fx in candidates if getattr(fx.target, "overloadpacket", None) in flop_registry)
    return next(counted, candidates[0])


def traffic_of_fused(node: Any, parts: list) -> int:
    """
    The bytes that a kernel reads and writes, by Inductor's count. For a fused kernel, Inductor counts whole
    buffers, even one from which a part gathers only a few elements.
    """
    options = {"include_reads": True, "include_writes": True}
    of_parts = [part.get_read_write_buffer_accesses(**options) for part in parts]
    whole = node.get_read_write_buffer_accesses(**options)
    return sum(min(size, sum(part.get(name, 0) for part in of_parts)) for name, size in whole.items())


def value_of(node: torch.fx.Node) -> object:
    """The tensor, without values, that a node of a graph computes."""
    return node.meta.get("val")


def compile_and_count(
    ledger: Ledger, graph_module: torch.fx.GraphModule, inputs: list, **options: Any
) -> Callable[[list], list]:
    """
    Inductor's compilation of one graph, up to the schedule of its kernels. Returns a function that counts
    these kernels when it is called, and returns tensors without values.
    """
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    is_backward, is_inference = options.get("is_backward", False), options.get("is_inference", False)
    with _disable_current_modes(), torch.no_grad(), DebugContext():
        compile_fx.view_to_reshape(graph_module)
        fake_mode = compile_fx.fake_tensor_prop(graph_module, inputs)
        compile_fx._recursive_record_original_output_strides(graph_module)
        with V.set_fake_mode(fake_mode):
            compile_fx._recursive_post_grad_passes(graph_module, is_inference=is_inference)
            graph = GraphLowering(
                graph_module, example_inputs=inputs, is_backward=is_backward, is_inference=is_inference
            )
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
                kernels = kernels_of_graph(graph.scheduler, BACKWARD if is_backward else FORWARD)
    (output,) = graph_module.graph.find_nodes(op="output")
    results = [value_of(out) if isinstance(out, torch.fx.Node) else out for out in output.args[0]]

    def call(args: list) -> list:
        # what is compiled outside of the model belongs to the part that runs now
        part, pass_ = ledger.part, ledger.pass_
        if pass_ == UPDATE:
            ledger.add(replace(kernel, part=part, pass_=pass_) for kernel in kernels)
        else:
            ledger.add(kernels)
        counts, ledger.is_counting = ledger.is_counting, False
        out = [empty_like(t) if isinstance(t, Tensor) else t for t in results]
        ledger.is_counting = counts
        args.clear()
        return out

    call._boxed_call = True  # frees its arguments
    return call


def empty_like(t: Tensor) -> Tensor:
    """A new tensor of the same shape, strides, dtype and device."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


# ------------------------------------------------------------------------------------------------------------
# pretending that there is a GPU


def choose_attention(  # noqa: PLR0913  (PyTorch's arguments)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """
    scaled_dot_product_attention as PyTorch chooses it on a GPU, which a CPU build cannot ask: cuDNN on Hopper
    without dropout, else FlashAttention; efficient attention with a mask and in float32.
    """
    aten, options = torch.ops.aten, {"scale": scale}
    needs_grad = any(t.requires_grad for t in (q, k, v))
    if attn_mask is not None or q.itemsize > 2:
        if enable_gqa:
            k, v = (t.repeat_interleave(q.size(1) // k.size(1), dim=1) for t in (k, v))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(q.dtype)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*q.shape[:3], k.size(2))
        call = aten._scaled_dot_product_efficient_attention
        return call(q, k, v, attn_mask, needs_grad, dropout_p, is_causal, **options)[0]
    if torch.cuda.get_device_capability() >= (9, 0) and not dropout_p:
        call = aten._scaled_dot_product_cudnn_attention
        return call(q, k, v, None, needs_grad, dropout_p, is_causal, False, **options)[0]
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, **options)[0]


class OnCPU(TorchDispatchMode):
    """Makes tensors on the CPU instead of a GPU: Inductor evaluates constants of one element."""

    def __torch_dispatch__(
        self, op: torch._ops.OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        return op(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") else kwargs))


def constant(value: object) -> Callable[..., object]:
    """A function that returns this value for any arguments."""

    def function(*args: object, **kwargs: object) -> object:
        return value

    return function


@contextmanager
def pretended_gpu(card: Card, ledger: Ledger) -> Iterator[None]:
    """Inside, torch finds this GPU, and torch.compile counts kernels instead of generating them."""
    import torch._inductor.config
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import joint_graph, post_grad

    # before a GPU is found, because they would trace patterns with its tensors
    joint_graph.lazy_init(torch.device("cuda", 0))
    post_grad.lazy_init()
    major, minor = card.capability
    properties = types.SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.memory,
        multi_processor_count=card.processors,
        gcnArchName="",
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=232448 if major == 9 else 166912,
    )
    stand_ins = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": card.capability,
        "get_device_name": card.name,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "get_rng_state": torch.get_rng_state(),
        "set_rng_state": None,
        "synchronize": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    real_compile, folder = compile_fx.compile_fx, joint_graph.UniformValueConstantFolder
    real_deduce = folder._deduce_value

    def compile_counting(graph_module: object, inputs: object, **options: object) -> object:
        options["inner_compile"] = partial(compile_and_count, ledger)
        return real_compile(graph_module, inputs, **options)

    def deduce_on_cpu(self: object, node: torch.fx.Node) -> object:
        with OnCPU():
            return real_deduce(self, node)

    attention = torch.ops.aten.scaled_dot_product_attention.default
    with ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, constant(value)))
            if hasattr(CudaInterface, name):
                stand_in = staticmethod(constant(value))
                stack.enter_context(mock.patch.object(CudaInterface, name, stand_in))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(compile_fx, "compile_fx", compile_counting))
        stack.enter_context(mock.patch.object(folder, "_deduce_value", deduce_on_cpu))
        # would time matmuls to decide whether to pad them
        stack.enter_context(torch._inductor.config.patch(shape_padding=False))
        kernels = {torch._C.DispatchKey.CompositeImplicitAutograd: choose_attention}
        stack.enter_context(mock.patch.dict(attention.py_kernels, kernels))
        attention._dispatch_cache.clear()
        yield


# ------------------------------------------------------------------------------------------------------------
# steps


@dataclass
class Step:
    """What a step launches, and what it computes."""

    title: str
    kernels: list[Kernel]
    model_flops: float  # for MFU: 6 N + 12 L H Q T for each token
    tokens: int


@dataclass
class Numbers:
    """The numbers of a step, without values on the GPU. Its norm is above grad_clip, so it is clipped."""

    on_gpu: StepNumbers
    on_cpu: StepNumbers

    def on(self, device: torch.device) -> StepNumbers:
        return self.on_gpu if device.type == "cuda" else self.on_cpu

    def read(self) -> StepNumbers:
        return self.on_cpu


def numbers_of(square: tuple[Tensor, Tensor | float], max_norm: float, device: torch.device) -> Numbers:
    """The gathered numbers of a step with this share of the gradient's squared norm."""
    columns = {name: torch.ones(1, dtype=torch.float64, device=device) for name in StepNumbers._fields}
    columns |= {"grad_square": square[0].double().reshape(1)}
    norm = torch.tensor([(2 * max_norm or 1.0) ** 2], dtype=torch.float64)
    one, zero = (torch.tensor([x], dtype=torch.float64) for x in (1.0, 0.0))
    cpu = dict.fromkeys(StepNumbers._fields, one) | {"grad_square": norm, "grad_square_fine": zero}
    return Numbers(StepNumbers(**columns), StepNumbers(**cpu))


def isogpt_step(config: dict, ledger: Ledger) -> Step:
    """Count a step of train.py with these settings."""
    from model import GPT

    device = torch.device("cuda", 0)
    args = asdict(GPTConfig(**settings.model_args_of(config, config["vocab_size"] or 50304)))
    dtype = precision.resolve_dtype(config["dtype"], device)
    plan = plan_of(config, 1, world_size=1, device_type="cuda", dtype=dtype, model_args=args)
    mesh = Mesh()
    precision.set_numerics(device, plan.dtype, False)
    with torch.device("meta"):
        model = GPT(GPTConfig(**args))
    recompute(model, plan.activation_checkpointing)
    # as compilation.compile_model, which first tries a compilation
    if plan.compile:
        compilation.compile_parts(model, by_block=plan.exact)
    parallelize.materialize(model, device, None)
    autocast = torch.autocast("cuda", plan.torch_dtype, enabled=plan.uses_autocast)
    with mock.patch.object(optim, "check_updated", constant(None)):  # it computes with values
        optimizers = optim.make_optimizers(model, config, 0, plan.torch_dtype, mesh)
    scaler = precision.make_scaler(plan.dtype, device)
    share = share_of_plan(plan, mesh)
    sums = ExactSums if plan.exact else FloatSums
    gradients = sums(model, model, mesh, plan, share, *([scaler] if plan.exact else []))
    x = torch.zeros(plan.micro_batch, args["block_size"], dtype=torch.int64, device=device)
    for is_counted in (False, True):  # the first step allocates gradients and sums
        ledger.is_counting = is_counted
        with ledger.phase(SUMS if plan.exact else OPTIMIZER, UPDATE):
            gradients.start_step()
        # micro-batches after the first one, which add to gradients, are equal
        repeats = [1, share.micro_steps - 1] if share.micro_steps > 1 else [1]
        for micro_step, factor in enumerate(repeats):
            ledger.factor = factor
            with ledger.phase(SUMS if plan.exact else REST, BACKWARD), gradients.micro_batch(micro_step):
                with ledger.phase(REST, FORWARD), autocast:
                    _, loss = model(x, x, gradients.loss_divisor)
                with ledger.phase(REST, BACKWARD):
                    scaler.scale(loss).backward()
            with ledger.phase(SUMS if plan.exact else REST, UPDATE):
                gradients.loss_term(loss)
        ledger.factor = 1.0
        with ledger.phase(SUMS if plan.exact else OPTIMIZER, UPDATE):
            gradients.finish()
            square = gradients.norm_share()
        with ledger.phase(OPTIMIZER, UPDATE):
            gathered = numbers_of(square, config["grad_clip"], device)
            optim.clip_and_step(optimizers, scaler, gathered, config["grad_clip"])
    ledger.is_counting = False
    tokens = plan.sequences * args["block_size"]
    title = f"isoGPT {describe(config)}"
    return Step(title, ledger.kernels, model.flops_per_token() * tokens, tokens)


def describe(config: dict) -> str:
    """The settings that were changed, as they are typed."""
    from configurator import settings_of

    defaults = {name: setting.default for name, setting in settings_of(ROOT / "train.py").items()}
    defaults |= DEFAULTS
    return " ".join(f"--{name}={config[name]}" for name in defaults if config[name] != defaults[name])


def load_module(folder: Path, name: str) -> types.ModuleType:
    """Import a module of a folder, although there may be another one of the same name."""
    sys.path.insert(0, str(folder))
    if not (folder / f"{name.replace('.', '/')}.py").exists():
        raise ValueError(
            f"{folder} does not contain {name.replace('.', '/')}.py: name a clone of the repository"
        )
    sys.modules.pop(name, None)
    module = importlib.import_module(name)
    sys.path.remove(str(folder))
    return module


def nanogpt_step(config: dict, ledger: Ledger, folder: Path) -> Step:
    """Count a step of nanoGPT's train.py, with its model.py and these settings."""
    nanogpt = load_module(folder, "model")
    device = torch.device("cuda", 0)
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
    args = {name: config[name] for name in names} | {"vocab_size": config["vocab_size"] or 50304}
    torch.set_float32_matmul_precision("high")
    with device:
        model = nanogpt.GPT(nanogpt.GPTConfig(**args))
    betas = (config["beta1"], config["beta2"])
    optimizer = model.configure_optimizers(config["weight_decay"], config["learning_rate"], betas, "cuda")
    parameters = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
    compiled = torch.compile(model)
    x = torch.zeros(config["batch_size"], config["block_size"], dtype=torch.int64, device=device)
    micro_steps = config["gradient_accumulation_steps"]
    for is_counted in (False, True):
        ledger.is_counting = is_counted
        for factor in [1, micro_steps - 1] if micro_steps > 1 else [1]:
            ledger.factor = factor
            with ledger.phase(REST, FORWARD), torch.autocast("cuda", torch.bfloat16):
                _, loss = compiled(x, x)
                loss = loss / micro_steps
            with ledger.phase(REST, BACKWARD):
                loss.backward()
        ledger.factor = 1.0
        with ledger.phase(OPTIMIZER, UPDATE):
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["grad_clip"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    ledger.is_counting = False
    tokens = x.numel() * micro_steps
    per_token = 6 * parameters + 12 * args["n_layer"] * args["n_embd"] * args["block_size"]
    return Step(f"nanoGPT {describe(config)}", ledger.kernels, per_token * tokens, tokens)


def nanochat_step(config: dict, ledger: Ledger, folder: Path) -> Step:
    """
    Count a step of nanochat's scripts/base_train.py for a depth of n_layer: 64 n_layer features, heads of
    128, and FlashAttention-3.
    """
    nanochat_gpt = load_module(folder, "nanochat.gpt")
    flash = sys.modules["nanochat.flash_attention"]
    flash.USE_FA3, flash._fa3 = True, types.SimpleNamespace(flash_attn_func=flash_attention_3())
    device = torch.device("cuda", 0)
    depth, length = config["n_layer"], config["block_size"]
    heads = -(-64 * depth // 128)
    vocabulary = config["vocab_size"] or 32768
    with device:
        model = nanochat_gpt.GPT(nanochat_gpt.GPTConfig(length, vocabulary, depth, heads, heads, 128 * heads))
    for embedding in (model.transformer.wte, *model.value_embeds.values()):  # as its init_weights
        embedding.weight = nn.Parameter(embedding.weight.detach().bfloat16())
    optimizer = model.setup_optimizer()
    compiled = torch.compile(model, dynamic=False)
    x = torch.zeros(config["batch_size"], length, dtype=torch.int64, device=device)
    micro_steps = config["gradient_accumulation_steps"]
    for is_counted in (False, True):
        ledger.is_counting = is_counted
        for factor in [1, micro_steps - 1] if micro_steps > 1 else [1]:
            ledger.factor = factor
            with ledger.phase(REST, FORWARD):
                loss = compiled(x, x) / micro_steps
            with ledger.phase(REST, BACKWARD):
                loss.backward()
        ledger.factor = 1.0
        with ledger.phase(OPTIMIZER, UPDATE):
            optimizer.step()
            model.zero_grad(set_to_none=True)
    ledger.is_counting = False
    tokens = x.numel() * micro_steps
    title = f"nanochat d{depth} {describe(config)}"
    return Step(title, ledger.kernels, model.estimate_flops() * tokens, tokens)


def flash_attention_3() -> Callable[..., Tensor]:
    """A stand-in for FlashAttention-3's function: (B, T, H, D) -> (B, T, H, D), with shapes alone."""

    @torch.library.custom_op("roofline::attention", mutates_args=())
    def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        return torch.empty_like(q)

    @torch.library.custom_op("roofline::attention_backward", mutates_args=())
    def differentiate(
        grad: Tensor, q: Tensor, k: Tensor, window: int, v: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    @attend.register_fake
    def shape_of(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        return torch.empty_like(q)

    @differentiate.register_fake
    def shapes_of(
        grad: Tensor, q: Tensor, k: Tensor, window: int, v: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def save(ctx: Any, inputs: tuple, output: Tensor) -> None:
        q, k, v, ctx.window = inputs
        ctx.save_for_backward(q, k, v, output)

    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k, v, y = ctx.saved_tensors
        return *torch.ops.roofline.attention_backward(grad, q, k, ctx.window, v, y), None

    attend.register_autograd(backward, setup_context=save)

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]
    ) -> Tensor:
        return torch.ops.roofline.attention(q, k, v, window_size[0])

    return flash_attn_func


# ------------------------------------------------------------------------------------------------------------
# the report


def table_of(step: Step, card: Card, largest: int = 15) -> str:
    """The prediction in Markdown."""
    lines = [f"{step.title}: {step.tokens:,} tokens a step, {card.name}", ""]
    rows = defaultdict(list)
    for kernel in step.kernels:
        rows[kernel.part].append(kernel)
    lines += [
        "| part | Triton forward + backward | matmuls | other | GB Triton | GB matmul | TFLOP matmul | ms |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for part in (*PARTS, "sum"):
        kernels = rows[part] if part != "sum" else step.kernels
        if kernels:
            lines.append(f"| {part} | {row_of(kernels, card)} |")
    total, launches = seconds_of(step.kernels, card), count(step.kernels)
    lines += ["", kinds_line(step, card)]
    mfu = step.model_flops / total / card.peak
    with_gaps = total + launches * GAP
    lines.append(
        f"sum {total * 1e3:.1f} ms, MFU {mfu:.1%}; with {launches:,.0f} gaps of {GAP * 1e6:.1f} us "
        f"{with_gaps * 1e3:.1f} ms, MFU {step.model_flops / with_gaps / card.peak:.1%}"
    )
    lines += ["", "| ms | launches | MB each | GFLOP each | kernel |", "|---|---|---|---|---|"]
    for kernel in largest_kernels(step.kernels, card)[:largest]:
        ms = kernel.seconds(card) * kernel.launches * 1e3
        lines.append(
            f"| {ms:.2f} | {kernel.launches:.0f} | {kernel.bytes / 1e6:.1f} | {kernel.flops / 1e9:.1f} | "
            f"{kernel.part}, {kernel.pass_}: {kernel.name} |"
        )
    return "\n".join(lines)


def to_json(step: Step, card: Card) -> str:
    """The prediction and all kernels, equal ones together."""
    total = seconds_of(step.kernels, card)
    summary = {"title": step.title, "card": card.name, "torch": torch.__version__, "tokens": step.tokens}
    summary |= {"ms": total * 1e3, "gaps_ms": count(step.kernels) * GAP * 1e3}
    summary |= {"mfu": step.model_flops / total / card.peak}
    parts = {part: seconds_of([k for k in step.kernels if k.part == part], card) * 1e3 for part in PARTS}
    kernels = [asdict(k) | {"ms": k.seconds(card) * 1e3} for k in largest_kernels(step.kernels, card)]
    return dumps(summary | {"parts_ms": parts, "kernels": kernels}, indent=1)


def row_of(kernels: list[Kernel], card: Card) -> str:
    """The cells of a part."""
    triton = [k for k in kernels if k.kind == TRITON]
    matmul = [k for k in kernels if k.kind == MATMUL]
    passes = [count(k for k in triton if k.pass_ == pass_) for pass_ in (FORWARD, BACKWARD, UPDATE)]
    passes = passes if passes[2] else passes[:2]
    products = [count(k for k in matmul if k.pass_ == pass_) for pass_ in (FORWARD, BACKWARD, UPDATE)]
    products = products if products[2] else products[:2]
    cells = [" + ".join(f"{n:.0f}" for n in numbers) for numbers in (passes, products)]
    cells.append(f"{count(k for k in kernels if k.kind in (OTHER, ATTENTION)):.0f}")
    cells += [f"{gigabytes(some):.2f}" for some in (triton, matmul)]
    cells += [f"{sum(k.flops * k.launches for k in matmul) / 1e12:.2f}"]
    return " | ".join([*cells, f"{seconds_of(kernels, card) * 1e3:.2f}"])


def kinds_line(step: Step, card: Card) -> str:
    """The predicted time by kind of kernel."""
    of_passes = [k for k in step.kernels if k.part not in (OPTIMIZER, SUMS)]
    texts = []
    for kind in (MATMUL, TRITON, ATTENTION, OTHER):
        kernels = [k for k in of_passes if k.kind == kind]
        texts.append(f"{kind} {seconds_of(kernels, card) * 1e3:.1f} ({gigabytes(kernels):.1f} GB)")
    for part in (OPTIMIZER, SUMS):
        kernels = [k for k in step.kernels if k.part == part]
        texts += (
            [f"{part} {seconds_of(kernels, card) * 1e3:.1f} ({gigabytes(kernels):.1f} GB)"] if kernels else []
        )
    return f"ms by kind: {', '.join(texts)}"


def count(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.launches for kernel in kernels)


def gigabytes(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.bytes * kernel.launches for kernel in kernels) / 1e9


def seconds_of(kernels: Iterable[Kernel], card: Card) -> float:
    return sum(kernel.seconds(card) * kernel.launches for kernel in kernels)


def largest_kernels(kernels: list[Kernel], card: Card) -> list[Kernel]:
    """Equal kernels together, and those that take longest first."""
    groups = {}
    for k in kernels:
        key = (k.kind, k.part, k.pass_, k.name, k.bytes, k.flops)
        groups[key] = replace(k, launches=k.launches + (groups[key].launches if key in groups else 0))
    return sorted(groups.values(), key=lambda k: -k.seconds(card) * k.launches)


# ------------------------------------------------------------------------------------------------------------

# -- prediction ----------------------------------------------------------------------------------------------
card = "h100"  # whose speeds are assumed [h100 | h200 | a100]
nanogpt = ""  # a clone of karpathy/nanoGPT, whose step is predicted instead
nanochat = ""  # a clone of karpathy/nanochat, likewise
json = ""  # also write all kernels to this file
# ------------------------------------------------------------------------------------------------------------
DEFAULTS = {"gradient_accumulation_steps": 1}


def main() -> None:
    from configurator import settings_of

    extra = settings_of(ROOT / "train.py")
    config = configure(globals(), extra=extra)
    config = {name: setting.default for name, setting in extra.items()} | DEFAULTS | config
    if LACKING:
        fail(LACKING)
    try:
        config = settings.check_training(config)
        step = predict(config)
    except ValueError as e:
        fail(str(e))
    print(table_of(step, CARDS[card]))
    if json:
        Path(json).write_text(to_json(step, CARDS[card]))


def predict(config: dict) -> Step:
    from torch._subclasses import FakeTensorMode

    ledger = Ledger()
    with pretended_gpu(CARDS[card], ledger), FakeTensorMode(), CountEager(ledger):
        if nanochat:
            return nanochat_step(config, ledger, Path(nanochat))
        if nanogpt:
            return nanogpt_step(config, ledger, Path(nanogpt))
        return isogpt_step(config, ledger)


if __name__ == "__main__":
    main()
