"""
Operators that model.py uses: dropout, norms, rotary positions, activations, attention and the loss.

Dropout and half-precision attention are fast on a CPU. Causal attention supports a key/value cache. The
cross-entropy never holds all the logits of a large vocabulary in memory.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention import SDPBackend, sdpa_kernel

IGNORE = -1  # targets with this value do not contribute to the loss


def uses_cpu_kernels(x: Tensor) -> bool:
    """
    Whether operators run the kernels of this module for a CPU. torch.compile fuses PyTorch's operators
    itself, on any device.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


# ------------------------------------------------------------------------------------------------------------
# dropout


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


class Dropout(nn.Dropout):
    """nn.Dropout with faster mask generation on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not 0 < self.p < 1 or not uses_cpu_kernels(x):
            return super().forward(x)
        return x * dropout_factors(x.shape, self.p, x.dtype)


# ------------------------------------------------------------------------------------------------------------
# norm, rotary positions, activation, cap: on a CPU, each is an autograd.Function with half as many passes
# over memory as PyTorch's composition of operators; on a GPU, torch.compile fuses the composition


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm; under autocast on a CPU, the result is already in the dtype to compute in."""

    def forward(self, x: Tensor) -> Tensor:
        if not uses_cpu_kernels(x):
            # weights in another dtype than x would leave PyTorch's fused kernel, with a warning (torch 2.11)
            return super().forward(x if self.weight is None else x.to(self.weight.dtype))
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        y = CPUNormalize.apply(x, self.eps, dtype)
        return y if self.weight is None else y * self.weight.to(dtype)


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
    norm = torch.linalg.vector_norm(
        x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
    )
    return norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()


def rotate(x: Tensor, rope: Tensor, eps: float | None = None) -> Tensor:
    """
    Rotate pairs of features by their position's angle (rotary positions): feature i is paired with i + D / 2.

    Args:
        x: queries or keys (B, T, H, D).
        rope: cosine and signed sine of the angle of each feature (2, T, 1, D).
        eps: if not None, also normalize each head: RMSNorm without weights.
    """
    if uses_cpu_kernels(x):
        return CPURotate.apply(x, rope, eps)
    return Rotate.apply(x, rope, eps)


class Rotate(torch.autograd.Function):
    """
    `rotate` on a GPU, at least in float32. The gradient of the rotation is the opposite rotation, which does
    not change norms. So only what a pass reads is rotated, never a result of its sums over features, and
    torch.compile makes one kernel of each pass.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, rope: Tensor, eps: float | None) -> Tensor:
        rope = rope.to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = rope  # (T, 1, D) each
        y = x * cos + swap_halves(x) * sin
        scale = None
        if eps is not None:
            scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
            y = y * scale
        ctx.save_for_backward(x, rope, scale)
        return y if y.dtype == x.dtype else y.to(x.dtype)  # see torch_versions.py

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        x, rope, scale = ctx.saved_tensors
        cos, sin = rope
        dx = grad * cos - swap_halves(grad) * sin
        if scale is not None:
            shift = (dx * x).mean(-1, keepdim=True) * scale.square()
            dx = (dx - x * shift) * scale
        return dx.to(grad.dtype), None, None


def swap_halves(x: Tensor) -> Tensor:
    """Exchange feature i and feature i + D / 2: x.roll(D / 2, -1), as a view that kernels read directly."""
    return x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)


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


def relu2(x: Tensor) -> Tensor:
    """relu(x) squared."""
    return CPURelu2.apply(x) if uses_cpu_kernels(x) else F.relu(x).square()


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


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), between -cap and cap; if cap is 0, return the logits."""
    return torch.tanh(logits / cap) * cap if cap else logits


# ------------------------------------------------------------------------------------------------------------
# attention

# module constants, because reading an attribute of an autograd.Function breaks torch.compile's graph
HALF_ATTENTION_UP_TO = 2048  # tokens; at 4096 PyTorch's kernel is faster than CPUHalfAttention
# queries per matmul; larger chunks compute more scores that the causal mask discards
HALF_ATTENTION_CHUNK = 128
# tokens up to which the probabilities are kept for the backward pass: at 1024, recomputing costs a tenth of
# attention and saves a third of a block's activation memory
HALF_ATTENTION_KEEPS_UP_TO = 512


@dataclass
class KVCache:
    """
    Keys and values of one block at the last `size` positions, in a ring: position p is stored at p % size.
    """

    rows: int  # rows of the batch
    size: int
    length: int = 0  # positions appended so far
    k: Tensor | None = None  # (B, K, size, D), allocated by the first append
    v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """
        Store k and v of T more positions, (B, K, T, D); a batch of one is stored in all rows. Returns all
        stored keys and values, (B, K, S, D). Several positions at once must not go past the end of the ring.
        """
        if self.k is None:
            shape = (self.rows, k.size(1), self.size, k.size(3))
            self.k, self.v = k.new_empty(shape), v.new_empty(shape)
        start = self.length % self.size
        self.length += k.size(2)
        stored = min(self.length, self.size)
        self.k[:, :, start : start + k.size(2)] = k
        self.v[:, :, start : start + k.size(2)] = v
        return self.k[:, :, :stored], self.v[:, :, :stored]


@dataclass
class FixedCache:
    """
    Keys and values of one block in a ring as in KVCache, for steps of one token each. Where a step writes is
    a tensor, and a step reads the whole ring: the shapes and the program of all steps are the same, as a CUDA
    graph requires.
    """

    k: Tensor  # (B, K, size, D)
    v: Tensor
    position: Tensor  # (1,): of the token that the next step appends; the caller increases it

    @classmethod
    def of(cls, cache: KVCache, position: Tensor) -> "FixedCache":
        """The same memory as a KVCache that contains at least one position."""
        for t in (cache.k, cache.v):
            t[:, :, cache.length :] = 0  # attention multiplies positions that are not yet written by 0
        return cls(cache.k, cache.v, position)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v of one position, (B, K, 1, D). Returns the whole ring, (B, K, size, D)."""
        place = self.position % self.k.size(2)
        self.k.index_copy_(2, place, k)
        self.v.index_copy_(2, place, v)
        return self.k, self.v

    def is_written(self) -> Tensor:
        """Which places of the ring contain a position, (1, size)."""
        return torch.arange(self.k.size(2), device=self.k.device)[None] <= self.position


Cache = KVCache | FixedCache


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, cache: Cache | None = None
) -> Tensor:
    """
    Compute causal self-attention: softmax(q k^T / sqrt(D)) v, where a position attends to itself and earlier
    positions.

    Args:
        q, k, v: queries (B, T, H, D), keys and values (B, T, K, D); they may be views of one tensor. Each
            head of keys serves H / K heads of queries.
        dropout: probability of dropping an attention weight.
        cache: keys and values of the previous positions, to which k and v are appended.

    Returns:
        (B, T, H * D)
    """
    T, groups = q.size(1), q.size(2) // k.size(2)
    is_fixed = isinstance(cache, FixedCache)
    has_previous = is_fixed or (cache is not None and cache.length > 0)
    if cache is not None:
        cached_k, cached_v = cache.append(k.transpose(1, 2), v.transpose(1, 2))  # (B, K, S, D) each
    if groups > 1 and not has_previous:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    # dropout's factors are also kept in memory
    longest = HALF_ATTENTION_UP_TO // 2 if dropout else HALF_ATTENTION_UP_TO
    if not has_previous and uses_cpu_kernels(q) and q.itemsize == 2 and longest >= T:
        return CPUHalfAttention.apply(q, k, v, dropout)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D) each
    if has_previous:
        k, v = cached_k, cached_v
    S, mask = k.size(2), None
    if 1 < T < S:  # is_causal would align the first query with the first key; a single query needs no mask
        mask = q.new_ones(T, S, dtype=torch.bool).tril(S - T)
    elif is_fixed:
        mask = cache.is_written()
    grows = has_previous and not is_fixed
    with attention_backends(dropout, q.device, grows):
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=not has_previous,
            enable_gqa=k.size(1) < q.size(1),
        )
    return y.transpose(1, 2).flatten(2)


def attention_backends(dropout: float, device: torch.device, grows: bool = False) -> AbstractContextManager:
    """
    A context in which PyTorch chooses among the back ends that drop attention weights with this probability.

    On Hopper and Blackwell, PyTorch tries cuDNN first, unless its version contains a known bug. But cuDNN
    rounds the probability to sixteenths, so that 0.1 becomes 0.125 or 0.0625, whereas FlashAttention rounds
    it to 1 / 256. Besides, cuDNN takes up to 0.4 s to plan each new length.

    Args:
        grows: whether each call has one more key than the one before.
    """
    if device.type != "cuda" or not (dropout or grows):
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


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
        beta = 0 if len(ctx.chunks) == 1 else 1  # gradients of keys and values accumulate over several chunks
        new = grad.new_zeros if beta else grad.new_empty
        dq, dk, dv = new(3, B * H, T, D)
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


# ------------------------------------------------------------------------------------------------------------
# loss


def logits_at_once(on_cpu: bool, itemsize: int, vocab_size: int, memory: int = 0) -> tuple[int, int, int]:
    """
    Return the maximum number of logits held at once: (in float32 without chunks, per chunk of `itemsize`-byte
    logits, in float32 per chunk). On a CPU, these are 64, 64 and 8 MiB. 8 MiB fit the CPU's cache, which
    takes a third less time than 64 MiB.

    On a GPU, the maximum without chunks is an eighth of the memory, at the 12 bytes per logit of
    memory.loss_activations, because torch.compile fuses a whole cross-entropy best. A chunk contains 8,192
    rows, so that matmuls fill the GPU, or fewer rows if these logits would take more than that eighth.

    Args:
        memory: bytes of the GPU's memory (0: those of this process's GPU).
    """
    if on_cpu:
        return 2**24, 2**26 // itemsize, 2**21
    if not memory and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties().total_memory
    unchunked, rows = max(2**26, memory // (8 * 12)), 8192
    if memory:
        fitting = unchunked // vocab_size // 128 * 128  # matmuls are fast with whole tiles of 128 rows
        rows = max(128, min(rows, fitting))
    per_chunk = max(2**26, rows * vocab_size)
    return unchunked, per_chunk, per_chunk


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matmul with x computes, under autocast or without."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@dataclass(frozen=True)
class VocabularyPart:
    """
    The rows of the output embeddings that this process holds, if several processes divide them: the rows from
    `first` on. No process holds more than `longest` rows. `reduce(values, "max" or "sum")` combines values of
    all processes, in place.
    """

    first: int
    longest: int
    reduce: Callable[[Tensor, str], None]


def summed_loss(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0, vocabulary: VocabularyPart | None = None
) -> Tensor:
    """
    Compute the cross-entropy of the logits `x @ weight.T`, summed over the targets that are not -1: a float32
    scalar.

    Args:
        x: final hidden states (B, T, C).
        weight: output embeddings (V, C).
        targets: token ids (B, T).
        cap: of the logits, see `soft_cap`.
        vocabulary: given if each process holds only some rows of `weight`. The gradient of x is then this
            process's share.
    """
    x, targets = x.flatten(0, 1), targets.flatten()  # (B * T, C), (B * T,)
    on_cpu, V = x.device.type == "cpu", vocabulary.longest if vocabulary else weight.size(0)
    unchunked, _, _ = logits_at_once(on_cpu, x.itemsize, V)
    rows, has_gradients = max(1, unchunked // V), torch.is_grad_enabled()
    if torch.compiler.is_compiling() and not has_gradients:
        # each part is compiled separately; fused cross-entropy reads unconverted logits: fewer than 12 bytes
        # each
        rows *= 12 // compute_dtype(x).itemsize
    if not vocabulary and (x.size(0) <= rows or not has_gradients):
        losses = [
            F.cross_entropy(
                soft_cap(F.linear(xs, weight), cap).float(), ts, reduction="sum", ignore_index=IGNORE
            )
            for xs, ts in zip(x.split(rows), targets.split(rows), strict=True)
        ]
        return torch.stack(losses).sum()
    if torch.is_autocast_enabled(x.device.type):  # autocast does not apply inside an autograd.Function
        dtype = compute_dtype(x)
        x, weight = x.to(dtype), weight.to(dtype)
    _, per_chunk, per_chunk_float = logits_at_once(on_cpu, x.itemsize, V)
    return ChunkedLoss.apply(x, weight, targets, cap, per_chunk, per_chunk_float, vocabulary)


# Softmax gradients in float16 are stored times this factor. Without it, numbers below 6e-8 become 0, and
# GradScaler's factor is only known in the backward pass. As a power of two it adds no rounding. The gradient
# of x stays within float16's range for weights up to 31: the absolute values of a row's softmax gradient add
# up to 2 at most.
FLOAT16_SCALE = 1024.0


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """
    Add the matrix product a @ b to `total`, in place. The product of float16 matrices is computed in float32,
    because a sum over many rows can exceed float16's range.
    """
    if a.device.type == "cuda":  # not addmm, which torch.compile cannot lower with an out_dtype (torch 2.13)
        total += torch.mm(a, b, out_dtype=torch.float32)
    elif a.dtype == torch.float16:
        total += a.float() @ b.float()
    else:
        total += a @ b


class ChunkedLoss(torch.autograd.Function):
    """
    summed_loss for a large vocabulary, one chunk of rows at a time. The logits of a whole micro-batch would
    be the step's largest tensor, several times over. The gradient of a chunk does not depend on the other
    chunks, so it is computed immediately and overwrites the chunk's logits. F.linear_cross_entropy serves the
    same purpose, but was 4 to 8 times slower on a CPU and rounded the sum to bfloat16 (torch 2.13).

    Args:
        x: final hidden states (N, C).
        weight: output embeddings (V, C).
        targets: token ids (N,).
        cap: limit of the logits, see `soft_cap`.
        per_chunk: maximum number of logits per chunk (at least one row).
        per_chunk_float: maximum number of logits converted to float32 at once.
        vocabulary: see `summed_loss`.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  (autograd passes tensors one by one)
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        cap: float,
        per_chunk: int,
        per_chunk_float: int,
        vocabulary: VocabularyPart | None = None,
    ) -> Tensor:
        V, C = weight.shape
        longest = vocabulary.longest if vocabulary else V  # equal chunks in every process
        rows, float_rows = max(1, per_chunk // longest), max(1, per_chunk_float // longest)
        weight_rows = max(1, per_chunk_float // C)
        ctx.scale = FLOAT16_SCALE if x.dtype == torch.float16 else 1.0
        loss = x.new_zeros((), dtype=torch.float32)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        buffer = x.new_empty(min(rows, len(x)), V)
        for xs, ts, dxs in zip(x.split(rows), targets.split(rows), dx.split(rows), strict=True):
            logits = torch.mm(xs, weight.t(), out=buffer[: len(xs)])  # (rows, V)
            for part, t in zip(logits.split(float_rows), ts.split(float_rows), strict=True):
                t = t[:, None]  # (float_rows, 1)
                is_here = valid = t != IGNORE
                if vocabulary:
                    t = t - vocabulary.first
                    is_here = valid & (t >= 0) & (t < V)
                t = t.clamp(0, V - 1)
                p = part.float()  # (float_rows, V)
                if cap:
                    p.div_(cap).tanh_()
                    slope = 1 - p.square()  # derivative of soft_cap
                    p *= cap
                highest = p.amax(-1, keepdim=True)
                if vocabulary:
                    vocabulary.reduce(highest, "max")
                p -= highest
                target_logit = p.gather(1, t)
                total = p.exp_().sum(-1, keepdim=True)
                if vocabulary:
                    both = torch.stack((total, target_logit * is_here))
                    vocabulary.reduce(both, "sum")
                    total, target_logit = both
                # not in place: under torch.compile, torch 2.11 gives a Function no gradient, silently, if its
                # output is changed in place (pytorch #180642)
                loss = loss + ((total.log() - target_logit) * valid).sum()
                # d loss / d logits = softmax - one_hot, 0 if the target is ignored
                p *= valid * ctx.scale / total
                # not scatter_add_, which is slow on a GPU with deterministic algorithms
                part.copy_(p).scatter_(1, t, (p.gather(1, t) - is_here * ctx.scale).to(part.dtype))
                if cap:
                    part *= slope
                del p  # so that the next part reuses its memory
            if not ctx.needs_input_grad[0]:  # evaluation
                continue
            torch.mm(logits, weight, out=dxs)
            for dws, part in zip(dw.split(weight_rows), logits.split(weight_rows, 1), strict=True):
                add_product(dws, part.t(), xs)
        ctx.save_for_backward(dx, dw)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        grad = grad / ctx.scale
        # in float32: if 1 / target_count were rounded to bfloat16, gradients would be scaled by up to 0.4%
        dx, dw = (dx.float() * grad).to(dx.dtype), (dw * grad).to(ctx.weight_dtype)
        return dx, dw, None, None, None, None, None
