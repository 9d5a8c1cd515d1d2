"""
Measure what activations take: the step of a model of two blocks, with one row and with two, on tensors
without memory. The figures follow an edit of model.py.
"""

from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch.overrides import TorchFunctionMode

from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.attach import replace_seams
from isogpt.parallel.parallelize import materialize
from isogpt.parallel.plan import Plan
from isogpt.speed.memory_counter import MemoryCounter

BLOCKS = 2
LONGEST = 4096  # tokens of a row that is measured: a longer one takes as much for each token


class Activations(NamedTuple):
    """
    Bytes for each token of a micro-batch, without recomputation, as if nothing divided the model.

    Args:
        block: what a block keeps for the backward pass, with compiled kernels if they are used.
        matmuls: the results of a block's matmuls and attention.
        loss: what exists when the loss begins. This and the next are besides what the blocks keep.
        head: the peak from then on to the blocks' backward passes, without the loss itself.
        backward: the peak of the blocks' backward passes.
    """

    block: float
    matmuls: float
    loss: float
    head: float
    backward: float


def activations_of(plan: Plan) -> Activations:
    """Measure the activations of a plan's model."""
    args = plan.model_args | {"n_layer": BLOCKS, "block_size": min(plan.model_args["block_size"], LONGEST)}
    kind = plan.torch_dtype, plan.uses_autocast, plan.device_type == "cuda", is_fused(plan)
    return measured(plan.counts.model_class, tuple(args.items()), kind)


def is_fused(plan: Plan) -> bool:
    """Whether compiled kernels compute what lies between two matmuls at once. A CPU trains uncompiled."""
    return plan.compile and plan.device_type == "cuda"


@cache
def measured(model_class: type[nn.Module], args: tuple, kind: tuple) -> Activations:
    """What a second row adds. `kind`: see `measure`."""
    config = model_class.config_class(**dict(args))
    one, two = (measure(model_class, config, rows, kind) for rows in (1, 2))
    return Activations(*((two - one) / config.block_size).tolist())


def measure(model_class: type[nn.Module], config: GPTConfig, rows: int, kind: tuple) -> np.ndarray:
    """
    Return the bytes of Activations for a micro-batch of so many rows.

    Args:
        kind: the dtype, whether autocast casts to it (otherwise, the weights have it), whether the kernels
            are those of a GPU, and whether they are compiled.
    """
    dtype, casts, on_gpu, is_compiled = kind
    with torch.device("meta"):
        model = model_class(config)
    marks: dict[str, np.ndarray] = {}
    counter = MemoryCounter()

    def mark(name: str, *_: Any) -> None:
        marks[name] = np.array([counter.total, counter.fused(), counter.matmuls, counter.peak])
        counter.peak = counter.total

    def loss_without_logits(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        mark("loss")  # whose memory is a formula: memory.loss_activations
        return x.sum() + weight.sum()

    first, last = model.transformer.h[0], model.transformer.h[-1]
    first.register_forward_pre_hook(partial(mark, "enter"))
    last.register_forward_hook(partial(mark, "leave"))
    last.register_full_backward_pre_hook(partial(mark, "head"))
    first.register_full_backward_hook(partial(mark, "backward"))
    replace_seams(model, loss=loss_without_logits)
    with ExitStack() as stack:
        stack.enter_context(counter)
        if on_gpu:
            stack.enter_context(GPUKernels())
            stack.enter_context(_compiling_state_context())  # kernels.uses_cpu_kernels
        materialize(model if casts else model.to(dtype), torch.device("cpu"))
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        x = torch.zeros(rows, config.block_size, dtype=torch.int64)
        with torch.autocast("cpu", dtype, enabled=casts):
            _, loss = model(x, x, 1.0)
        loss.backward()
    kept, fused, matmuls, _ = marks["leave"] - marks["enter"]
    of_blocks = np.array([kept - is_compiled * fused, matmuls])
    peaks = np.array([marks["loss"][0], marks["head"][3], marks["backward"][3]])
    return np.concatenate([of_blocks / BLOCKS, peaks - kept])


class GPUKernels(TorchFunctionMode):
    """Calls operators that keep what a GPU's kernels keep, where PyTorch has different ones for a CPU."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:  # queries, keys, values, the result, and a logsumexp
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args[:3])[0]
        if function is F.rms_norm:  # the input, and a number for each token
            return F.layer_norm(*args, kwargs["weight"])
        if function is F.dropout and kwargs["p"]:  # a mask of one byte for each element
            return torch.ops.aten.native_dropout(*args, kwargs["p"], kwargs["training"])[0]
        return function(*args, **kwargs)
