"""Whether two computations of one model have the same logits."""

from collections.abc import Callable, Iterable, Iterator
from textwrap import shorten

import torch
from torch import Tensor, nn

from isogpt.nn.architecture import GPTConfig

Logits = Callable[[Tensor], Tensor]  # token ids (1, T) -> logits (1, T, V)

# The largest difference that rounding makes, in standard deviations of the logits. Measured between cached
# and uncached steps and between model.py and transformers, for all architectures with 2 and 12 layers: up to
# 0.011 in float16 and 0.08 in bfloat16. Deep, trained models amplify rounding more. In float32, see below.
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
# In float32, how much a model amplifies rounding is measured: how far do the logits move if each embedding
# changes by CHANGE of its value? The limit is SMALLEST + TIMES this, at most ROUNDING. Rounding was between
# 2e-7 and 7e-6, at most a fifth of the limit between model.py and transformers, and half of it with a cache,
# for all architectures up to the shape of GPT-2, initial or trained. GELU with tanh in place of the exact one
# makes 4e-6 in a small initial model and 4e-4 in a trained one, which is 1.1 and 100 times the limit.
CHANGE, SMALLEST, TIMES = 2.0**-20, 1.5e-6, 2.0
CHECKED_TOKENS = 2048  # length of the sequences, at most: windows of edited models may be long
# Rounding can send a token to another expert, whose result is different, but hardly in each of several
# sequences: the one with the smallest difference counts.
SEQUENCES_WITH_EXPERTS = 3


def random_sequences(config: GPTConfig, length: int, device: torch.device) -> Iterator[Tensor]:
    """
    Yield the token ids (1, length) on which computations of a model are compared, always the same ones. Every
    second id is one of the last and the first ones, which edited models may treat differently: the last 64
    contain the end of a text, also if the vocabulary is padded to a multiple of 64.
    """
    last = config.vocab_size - 1
    ends = torch.stack((last - torch.arange(64), torch.arange(64)), 1).flatten().clamp(0, last)
    for seed in range(SEQUENCES_WITH_EXPERTS if config.n_expert else 1):
        generator = torch.Generator().manual_seed(seed)  # torch's own is left as it is
        tokens = torch.randint(config.vocab_size, (1, length), generator=generator)
        special = ends[: (length + 1) // 2]
        tokens[0, : 2 * len(special) : 2] = special
        yield tokens.to(device)


@torch.no_grad()
def compare_logits(
    computed: Logits,
    expected: Logits,
    sequences: Iterable[Tensor],
    dtype: torch.dtype | None = None,
    errors: type[Exception] | tuple[()] = Exception,
    embedding: nn.Module | None = None,
) -> str:
    """
    Compare the logits (1, T, V) that two functions compute from each of the sequences.

    Args:
        dtype: in which `computed` computes. Default: that of its logits.
        errors: what `computed` may raise, which counts as a difference, since an edited model can raise
            anything.
        embedding: the token embedding of the model of `expected`, to measure the limit in float32. Default:
            the limit is the one in ROUNDING.

    Returns:
        "" if rounding explains the difference in one of the sequences, else what differs.
    """
    differences = []
    for tokens in sequences:
        reference = expected(tokens)
        try:
            logits = computed(tokens)
        except errors as e:
            return f"the model raises {type(e).__name__}: {shorten(str(e), 200)}"
        difference, size = largest_difference(logits, reference)
        largest = limit(dtype or logits.dtype)
        if embedding and largest == ROUNDING[torch.float32] and difference > SMALLEST * size:
            del logits  # perhaps 400 MB
            moved = amplification(expected, tokens, reference, embedding)
            if moved > 0:  # else an edited model reads the weight without calling the embedding
                largest = min(largest, SMALLEST + TIMES * moved)
        if difference <= largest * size:
            return ""
        differences.append((difference, size))
    difference, size = min(differences)
    return f"the logits differ by {difference:.2g} (their standard deviation is {size:.2g})"


def limit(dtype: torch.dtype) -> float:
    """The limit of rounding, see ROUNDING. With TF32, float32 is multiplied with float16's precision."""
    is_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return ROUNDING[torch.float16 if is_tf32 else dtype]


def amplification(expected: Logits, tokens: Tensor, reference: Tensor, embedding: nn.Module) -> float:
    """Return by which part of their size the logits move if embeddings are changed, see CHANGE."""
    hook = embedding.register_forward_hook(changed_slightly)
    try:
        moved, size = largest_difference(expected(tokens), reference)
    finally:
        hook.remove()
    return moved / max(size, 1e-30)


def changed_slightly(_module: nn.Module, _tokens: tuple[Tensor], embeddings: Tensor) -> Tensor:
    """Change each number by CHANGE of its value on average, always alike."""
    generator = torch.Generator().manual_seed(0)  # torch's own is left as it is
    noise = torch.randn(embeddings.shape, generator=generator).to(embeddings)
    return embeddings * (1 + CHANGE * noise)


def largest_difference(logits: Tensor, expected: Tensor) -> tuple[float, float]:
    """
    Return, at the position where their quotient is largest, the root mean square difference of the logits
    and the standard deviation of the expected logits. Both are (B, T, V). Masked logits, which are infinite
    in both, and expected logits of NaN are equal. The difference is NaN if logits are.
    """
    differences = []
    # one position at a time: further copies of all logits would take too much memory
    for position, reference in zip(logits.flatten(0, -2), expected.flatten(0, -2), strict=True):
        a, b = position.float(), reference.float()  # (V,) each
        error = (a - b).masked_fill((a == b) | b.isnan(), 0).square().mean().sqrt()
        size = b[b.isfinite()].std(correction=0).nan_to_num()
        differences.append(torch.stack((error, size)).cpu())
    errors, sizes = torch.stack(differences, dim=1)  # (B * T,) each
    worst = (errors / sizes.clamp(min=1e-30)).argmax()  # NaN is the largest
    return errors[worst].item(), sizes[worst].item()
