"""
Operators that model.py uses: dropout, norms, rotary positions, activations, attention and the loss.

Causal attention supports a key/value cache. The cross-entropy never holds all the logits of a large
vocabulary in memory. What a CPU computes in a different way is in cpu_kernels.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention import SDPBackend, sdpa_kernel

from isogpt.nn.cpu_kernels import (
    HALF_ATTENTION_UP_TO,
    CPUHalfAttention,
    CPUNormalize,
    CPURelu2,
    CPURotate,
    dropout_factors,
    uses_cpu_kernels,
)

IGNORE = -1  # targets with this value do not contribute to the loss


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matmul with x computes, under autocast or without."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# ------------------------------------------------------------------------------------------------------------
# dropout, norm, rotary positions, activation, cap


class Dropout(nn.Dropout):
    """nn.Dropout with faster mask generation on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not 0 < self.p < 1 or not uses_cpu_kernels(x):
            return super().forward(x)
        return x * dropout_factors(x.shape, self.p, x.dtype)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm; under autocast on a CPU, the result is already in the dtype to compute in."""

    def forward(self, x: Tensor) -> Tensor:
        if not uses_cpu_kernels(x):
            # weights in another dtype than x would leave PyTorch's fused kernel, with a warning (torch 2.11)
            return super().forward(x if self.weight is None else x.to(self.weight.dtype))
        dtype = compute_dtype(x)
        y = CPUNormalize.apply(x, self.eps, dtype)
        return y if self.weight is None else y * self.weight.to(dtype)


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


def relu2(x: Tensor) -> Tensor:
    """relu(x) squared."""
    return CPURelu2.apply(x) if uses_cpu_kernels(x) else F.relu(x).square()


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), between -cap and cap; if cap is 0, return the logits."""
    return torch.tanh(logits / cap) * cap if cap else logits


# ------------------------------------------------------------------------------------------------------------
# attention


@dataclass
class KVCache:
    """
    Keys and values of one block at the last `size` positions, in a ring: position p is stored at p % size.

    With `position`, a step appends one token, where it writes is a tensor, and it reads the whole ring: the
    shapes and the program of all steps are the same, as a CUDA graph requires.
    """

    rows: int  # rows of the batch
    size: int
    length: int = 0  # positions appended so far, before `position` was given
    k: Tensor | None = None  # (B, K, size, D), allocated by the first append
    v: Tensor | None = None
    position: Tensor | None = None  # (1,): of the token that the next step appends; the caller increases it

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """
        Store k and v of T more positions, (B, K, T, D); a batch of one is stored in all rows. Returns all
        stored keys and values, (B, K, S, D). Several positions at once must not go past the end of the ring.
        """
        if self.position is not None:
            place = self.position % self.size
            self.k.index_copy_(2, place, k)
            self.v.index_copy_(2, place, v)
            return self.k, self.v
        if self.k is None:
            shape = (self.rows, k.size(1), self.size, k.size(3))
            self.k, self.v = k.new_empty(shape), v.new_empty(shape)
        start = self.length % self.size
        self.length += k.size(2)
        stored = min(self.length, self.size)
        self.k[:, :, start : start + k.size(2)] = k
        self.v[:, :, start : start + k.size(2)] = v
        return self.k[:, :, :stored], self.v[:, :, :stored]

    def fix_shape(self, position: Tensor) -> None:
        """Continue with steps of one shape after the positions that the cache contains, at least one."""
        self.position = position
        for t in (self.k, self.v):
            t[:, :, self.length :] = 0  # attention multiplies positions that are not yet written by 0


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, cache: KVCache | None = None
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
    has_previous = cache is not None and cache.length > 0
    has_fixed_shape = has_previous and cache.position is not None
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
    elif has_fixed_shape:
        mask = torch.arange(S, device=q.device)[None] <= cache.position  # which places are written
    is_causal, is_grouped = not has_previous, has_previous and groups > 1
    with attention_backends(dropout, q.device, has_previous and not has_fixed_shape):
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, enable_gqa=is_grouped)
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
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    cap: float = 0.0,
    vocabulary: VocabularyPart | None = None,
    at_once: tuple[int, int, int] | None = None,
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
        at_once: numbers of logits. Default: `logits_at_once`.
    """
    x, targets = x.flatten(0, 1), targets.flatten()  # (B * T, C), (B * T,)
    on_cpu, V = x.device.type == "cpu", vocabulary.longest if vocabulary else weight.size(0)
    unchunked, _, _ = at_once or logits_at_once(on_cpu, x.itemsize, V)
    rows, has_gradients = max(1, unchunked // V), torch.is_grad_enabled()
    if torch.compiler.is_compiling() and not has_gradients:
        # each part is compiled separately; fused cross-entropy reads unconverted logits: fewer than 12 bytes
        # each
        rows *= 12 // compute_dtype(x).itemsize
    if not vocabulary and (x.size(0) <= rows or not has_gradients):
        options = dict(reduction="sum", ignore_index=IGNORE)
        losses = [
            F.cross_entropy(soft_cap(F.linear(xs, weight), cap).float(), ts, **options)
            for xs, ts in zip(x.split(rows), targets.split(rows), strict=True)
        ]
        return torch.stack(losses).sum()
    dtype = compute_dtype(x)  # autocast does not apply inside an autograd.Function
    x, weight = x.to(dtype), weight.to(dtype)
    _, per_chunk, per_chunk_float = at_once or logits_at_once(on_cpu, dtype.itemsize, V)
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
    chunks, so it is computed immediately and overwrites the chunk's logits. F.linear_cross_entropy in
    chunks (LinearCrossEntropyOptions) took 9.4 s instead of 2.9 in float32 and 19 s instead of 1.7 in
    bfloat16, forward and backward, for 1,024 rows of 768 features and 50,304 ids on a core of an AMD EPYC
    with AVX-512, and rounded the sum to bfloat16 (torch 2.13). Without these options, it holds all logits.

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
