"""
What a CPU computes faster than PyTorch's operators do. A GPU uses nothing of this, and torch.compile fuses
PyTorch's operators itself, on any device.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

# module constants, because reading an attribute of an autograd.Function breaks torch.compile's graph
HALF_ATTENTION_UP_TO = 2048  # tokens; at 4096 PyTorch's kernel is faster than CPUHalfAttention
# queries per matmul; larger chunks compute more scores that the causal mask discards
HALF_ATTENTION_CHUNK = 128
# tokens up to which the probabilities are kept for the backward pass: at 1024, recomputing costs a tenth of
# attention and saves a third of a block's activation memory
HALF_ATTENTION_KEEPS_UP_TO = 512


def uses_cpu_kernels(x: Tensor) -> bool:
    """
    Whether operators run the kernels of this module for a CPU. torch.compile fuses PyTorch's operators
    itself, on any device.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def dropout_factors(shape: tuple[int, ...], p: float, dtype: torch.dtype) -> Tensor:
    """
    Return the factors of dropout on a CPU: 0 with probability p (rounded to a multiple of 1 / 65,536), else 1
    / (1 - p).

    This is ten times as fast as one draw per element: four elements share one 64-bit draw of NumPy's SFC64,
    and the rest is integer arithmetic. SFC64 is twice as fast as PyTorch's generator, from which it is
    seeded.
    """
    n, scale = math.prod(shape), 1 / (1 - p)
    seed = int(torch.randint(2**62, (), device="cpu"))
    bits = torch.from_numpy(np.random.SFC64(seed).random_raw(-(-n // 4)).view(np.int16)[:n]).view(shape)
    kept = bits.ge_(min(round(p * 65536), 65535) - 32768)  # int16: 1 if kept, else 0
    if dtype.itemsize == 2:
        return kept.mul_(torch.tensor(scale, dtype=dtype).view(torch.int16).item()).view(dtype)
    return kept.to(dtype).mul_(scale)


# ------------------------------------------------------------------------------------------------------------
# each has half as many passes over memory as PyTorch's composition of operators


class CPUNormalize(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) over the last dimension."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        scale = inverse_rms(x, eps)
        ctx.save_for_backward(x, scale)
        return torch.mul(x, scale, out=x.new_empty(x.shape, dtype=dtype))

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        shift = (grad * x).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-x.size(-1))
        return (grad * scale).addcmul_(x, shift).to(x.dtype), None, None


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, at least in float32: (..., N) -> (..., 1)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    return norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()


class CPURotate(torch.autograd.Function):
    """`rotate` on a CPU, in float32. The norm does not depend on the rotation, so one pass applies both."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, rope: Tensor, eps: float | None) -> Tensor:
        # (T, H, D): much faster than broadcasting over the heads
        cos, sin = rope.expand(2, *x.shape[1:]).contiguous()
        x = x.contiguous()
        y = torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)
        scale = None if eps is None else inverse_rms(x, eps)
        y = y if scale is None else y.mul_(scale)
        ctx.save_for_backward(rope, y if scale is not None else None, scale)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        rope, y, scale = ctx.saved_tensors
        cos, sin = rope.expand(2, *grad.shape[1:]).contiguous()  # (T, H, D)
        dtype, grad = grad.dtype, grad.contiguous()
        if scale is not None:
            shift = (grad * y).sum(-1, keepdim=True).div_(-y.size(-1))
            grad = torch.addcmul(grad, y, shift).mul_(scale)
        dx = torch.addcmul(grad * cos, grad.roll(grad.size(-1) // 2, -1), sin, value=-1)
        return dx.to(dtype), None, None


class CPURelu2(torch.autograd.Function):
    """`relu2` on a CPU."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        y = x.relu()
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.addcmul(y.new_zeros(()), grad, y, value=2)


# ------------------------------------------------------------------------------------------------------------
# attention


class CPUHalfAttention(torch.autograd.Function):
    """
    Causal self-attention on a CPU in bfloat16 or float16: q, k, v (B, T, H, D) -> (B, T, H * D).

    PyTorch's kernel multiplies small blocks one at a time, but processors with bfloat16 instructions need
    large blocks, so its forward and backward pass took 2 to 4 times as long. Here, each chunk of queries
    attends to all keys up to its last position in one batched matmul. The probabilities, (T +
    HALF_ATTENTION_CHUNK) / 2 * H numbers per token, are kept for the backward pass if the sequence is short
    or dropout needs them. Otherwise they are recomputed.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        B, T, H, D = q.shape
        ctx.shape, ctx.dropout = q.shape, dropout
        ctx.chunks = [(i, min(i + HALF_ATTENTION_CHUNK, T)) for i in range(0, T, HALF_ATTENTION_CHUNK)]
        ctx.keeps_probs = dropout > 0 or T <= HALF_ATTENTION_KEEPS_UP_TO
        q, k, v = (t.transpose(1, 2).reshape(B * H, T, D) for t in (q, k, v))
        outs, kept = [], []
        for i, j in ctx.chunks:
            p = attention_probs(q, k, i, j)
            if ctx.keeps_probs:
                kept.append(p)
            if dropout:
                kept.append(dropout_factors(p.shape, dropout, p.dtype))
                p = p * kept[-1]
            outs.append(torch.bmm(p, v[:, :j]))
        ctx.save_for_backward(q, k, v, *kept)
        y = outs[0] if len(outs) == 1 else torch.cat(outs, 1)  # (B * H, T, D)
        return y.view(B, H, T, D).transpose(1, 2).reshape(B, T, H * D)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        B, T, H, D = ctx.shape
        q, k, v, *kept = ctx.saved_tensors
        grad = grad.view(B, T, H, D).transpose(1, 2).reshape(B * H, T, D)
        beta = 0 if len(ctx.chunks) == 1 else 1  # gradients of keys and values add up over several chunks
        dq, dk, dv = (grad.new_zeros if beta else grad.new_empty)(3, B * H, T, D)
        for i, j in ctx.chunks:
            p = kept.pop(0) if ctx.keeps_probs else attention_probs(q, k, i, j)
            g = grad[:, i:j]
            dp, dropped = torch.bmm(g, v[:, :j].transpose(1, 2)), p
            if ctx.dropout:
                factors = kept.pop(0)
                dp, dropped = dp.mul_(factors), p * factors
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)  # (B * H, j - i, j)
            dq[:, i:j].baddbmm_(ds, k[:, :j], beta=0, alpha=D**-0.5)
            dk[:, :j].baddbmm_(ds.transpose(1, 2), q[:, i:j], beta=beta, alpha=D**-0.5)
            dv[:, :j].baddbmm_(dropped.transpose(1, 2), g, beta=beta)
        dq, dk, dv = (t.view(B, H, T, D).transpose(1, 2) for t in (dq, dk, dv))
        return dq, dk, dv, None


def attention_probs(q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """Attention weights of queries i to j over keys 0 to j, (B * H, j - i, j), from q and k (B * H, T, D)."""
    mask = causal_bias(i, j, q.dtype)  # (j - i, j)
    return torch.baddbmm(mask, q[:, i:j], k[:, :j].transpose(1, 2), alpha=q.size(-1) ** -0.5).softmax(-1)


@lru_cache(maxsize=32)
def causal_bias(i: int, j: int, dtype: torch.dtype) -> Tensor:
    """
    Return what is added to the scores of queries i to j over keys 0 to j, (j - i, j): -inf for later keys,
    else 0.
    """
    return torch.full((j - i, j), -math.inf, dtype=dtype).triu(1 + i)
