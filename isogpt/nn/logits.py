"""How far apart the logits of two computations of one model are."""

import torch
from torch import Tensor

# The largest difference that rounding makes, in standard deviations of the logits. Measured between cached
# and uncached steps and between model.py and transformers, for all architectures with 2 and 12 layers: up to
# 4e-5 in float32, 0.011 in float16 and 0.08 in bfloat16. Deep, trained models amplify rounding more.
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
# Rounding can send a token to another expert, whose result is different, but hardly in each of several
# sequences: the one with the smallest difference counts.
SEQUENCES_WITH_EXPERTS = 3


def pseudo_random_tokens(shape: tuple[int, int], vocab_size: int, seed: int) -> Tensor:
    """Return token ids (B, T) that depend on the arguments alone, not on torch's generator."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def largest_difference(logits: Tensor, expected: Tensor) -> tuple[float, float]:
    """
    Return, at the position where their quotient is largest, the root mean square difference of the logits
    and the standard deviation of the expected logits. Both are (B, T, V). Masked logits, which are infinite
    in both, are equal. The difference is NaN if logits are.
    """
    worst, largest = (0.0, 0.0), 0.0
    # one position at a time: further copies of all logits would take too much memory
    for position, reference in zip(logits.flatten(0, -2), expected.flatten(0, -2), strict=True):
        a, b = position.float(), reference.float()  # (V,) each
        difference = (a - b).masked_fill(a == b, 0).square().mean().sqrt().item()
        size = b[b.isfinite()].std(correction=0).item()
        quotient = difference / max(size, 1e-30) if difference else 0.0
        if not quotient <= largest:  # also NaN
            worst, largest = (difference, size), quotient
    return worst


def is_rounding(difference: float, size: float, dtype: torch.dtype) -> bool:
    """
    Whether rounding explains a difference of logits of this size, see `largest_difference`.

    Args:
        dtype: in which the model computes. With TF32, float32 is multiplied with float16's precision.
    """
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.float16
    return difference <= ROUNDING.get(dtype, ROUNDING[torch.float32]) * size
