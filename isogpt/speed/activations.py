"""
Measure what activations take: the step of a model of two blocks, with one row and with two, on tensors
without memory. The figures follow an edit of model.py.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.attach import replace_seams
from isogpt.parallel.parallelize import materialize
from isogpt.parallel.plan import Plan
from isogpt.parallel.recompute import KEPT
from isogpt.speed.memory_counter import FakeFloats, MemoryCounter, tensors_in

BLOCKS = 2
LONGEST = 4096  # tokens of a row that is measured: a longer one takes as much for each token


class Activations(NamedTuple):
    """
    Bytes of activations and other temporary tensors: (those that do not depend on the tokens, such as the
    copies of weights that autocast makes; those of each token).

    Args:
        block: what a block keeps for the backward pass.
        fused: what compiled kernels do not keep of that.
        stream: a block's input.
        matmuls: the results of a block's matmuls and attention.
        loss: what exists when the loss begins, besides what blocks keep.
        backward: the peak of the blocks' backward passes, besides what blocks keep.
        end: the peak of the backward pass after that.
    """

    block: np.ndarray
    fused: np.ndarray
    stream: np.ndarray
    matmuls: np.ndarray
    loss: np.ndarray
    backward: np.ndarray
    end: np.ndarray


def activations_of(plan: Plan) -> Activations:
    """Measure the activations of a plan's model without recomputation, as if nothing divided it."""
    args = plan.model_args | {"n_layer": BLOCKS, "block_size": min(plan.model_args["block_size"], LONGEST)}
    kind = plan.torch_dtype, plan.uses_autocast, plan.device_type == "cuda"
    found = measured(plan.counts.model_class, tuple(args.items()), *kind)
    return found._replace(block=found.block - found.fused) if is_fused(plan) else found


def is_fused(plan: Plan) -> bool:
    """Whether compiled kernels compute what lies between two matmuls at once. A CPU trains uncompiled."""
    return plan.compile and plan.device_type == "cuda"


@cache
def measured(model_class: type[nn.Module], args: tuple, *kind: Any) -> Activations:
    """`activations_of` from a micro-batch of one row and one of two. `kind`: see `measure`."""
    config = GPTConfig(**dict(args))
    one, two = (np.array(measure(model_class, config, rows, *kind)) for rows in (1, 2))
    return Activations(*np.stack([2 * one - two, (two - one) / config.block_size], 1))


def measure(
    model_class: type[nn.Module], config: GPTConfig, rows: int, dtype: torch.dtype, casts: bool, on_gpu: bool
) -> tuple[float, ...]:
    """
    Return the fields of Activations for a micro-batch of so many rows, in bytes.

    Args:
        casts: whether autocast casts to `dtype`. Otherwise, the weights have it.
    """
    with torch.device("meta"):
        model = model_class(config)
    marks = {}

    def enter(_: nn.Module, inputs: tuple) -> None:
        marks["enter"], marks["stream"] = counter.now(), inputs[0].nbytes
        on_gradient(inputs[0], end_blocks)

    def leave(_: nn.Module, inputs: tuple, result: Tensor | tuple) -> None:
        marks["leave"] = counter.now()
        on_gradient(tensors_in(result)[0], begin_blocks)

    def loss_without_logits(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        marks["loss"] = counter.total
        return LossWithoutLogits.apply(x, weight)

    def begin_blocks(_: Tensor) -> None:
        counter.peak = counter.total

    def end_blocks(_: Tensor) -> None:
        marks["backward"], counter.peak = counter.peak, counter.total

    model.transformer.h[0].register_forward_pre_hook(enter)
    model.transformer.h[-1].register_forward_hook(leave)
    replace_seams(model, loss=loss_without_logits)
    with ExitStack() as stack:
        stack.enter_context(FakeFloats())
        counter = stack.enter_context(BlockCounter())
        if on_gpu:
            stack.enter_context(GPUKernels())
            stack.enter_context(_compiling_state_context())  # kernels.uses_cpu_kernels
        materialize(model if casts else model.to(dtype), torch.device("cpu"))
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        before = counter.total
        x = torch.zeros(rows, config.block_size, dtype=torch.int64)
        with torch.autocast("cpu", dtype, enabled=casts):
            _, loss = model(x, x, 1.0)
        loss.backward()
        end = counter.peak
    kept, fused, matmuls = marks["leave"] - marks["enter"]
    others = [marks["loss"] - before - kept, marks.get("backward", end) - before - kept, end - before]
    return kept / BLOCKS, fused / BLOCKS, marks["stream"], matmuls / BLOCKS, *others


def on_gradient(x: Tensor, function: Callable[[Tensor], None]) -> None:
    """Call a function when the backward pass has computed the gradient of x, if it does."""
    if x.requires_grad:
        x.register_hook(function)


class BlockCounter(MemoryCounter):
    """Also tells apart what compiled kernels and selective recomputation would keep."""

    def __init__(self) -> None:
        super().__init__()
        # results of pointwise operators that no other operator has read, and what they were computed from
        self.pointwise: dict[int, list[weakref.ref]] = {}
        self.matmuls = 0  # bytes of the results of matmuls and attention

    def now(self) -> np.ndarray:
        """The bytes of all tensors, of those that can be computed again from others, and `matmuls`."""
        fused = [key for key, sources in self.pointwise.items() if all(ref() is not None for ref in sources)]
        return np.array([self.total, sum(self.sizes.get(key, 0) for key in fused), self.matmuls])

    def __torch_dispatch__(
        self, operator: Any, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        results = {tensor.untyped_storage()._cdata for tensor in tensors_in(result)}
        if torch.Tag.pointwise in operator.tags:
            sources = [self.references[key] for key in inputs]
            self.pointwise |= dict.fromkeys(results - inputs, sources)
        elif operator.namespace == "aten" and not operator.is_view:
            for key in inputs | results:
                self.pointwise.pop(key, None)
        if operator in KEPT:
            self.matmuls += sum(tensor.nbytes for tensor in tensors_in(result))
        return result


class LossWithoutLogits(torch.autograd.Function):
    """Takes the place of kernels.summed_loss: only the gradients that its backward pass returns."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: FunctionCtx, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


class GPUKernels(TorchFunctionMode):
    """Calls operators that keep what a GPU's kernels keep, where PyTorch has different ones for a CPU."""

    def __torch_function__(
        self, function: Any, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:  # queries, keys, values, the result, and a logsumexp
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args[:3])[0]
        if function is F.rms_norm:  # the input, and a number for each token
            return F.layer_norm(*args, kwargs["weight"])
        if function is F.dropout and kwargs["p"]:  # a mask of one byte for each element
            return torch.ops.aten.native_dropout(*args, kwargs["p"], kwargs["training"])[0]
        return function(*args, **kwargs)
