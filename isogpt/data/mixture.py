"""
A mixture of data sets: which of them a sequence of the run comes from.

Every data set provides the same number of each 1,000 sequences, its quota, in an order that is drawn anew for
each 1,000.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from isogpt.common.random_numbers import MIXTURE, random_bits

PER = 1000  # sequences to which a quota refers


def parse_mixture(text: str, is_folder: Callable[[str], bool]) -> list[tuple[str, Fraction | None]]:
    """
    Parse the names of data sets and their weights: a:0.7,b:0.3, or a,b, whose weights are None.

    Args:
        is_folder: whether a text is the name of a folder. Such a text is taken as that name, even if it
            contains commas and colons.

    Raises:
        ValueError: a weight is not a positive number, or only some data sets have one.
    """
    names = [text] if is_folder(text) else [part.strip() for part in text.split(",") if part.strip()]
    parts = [(name, None) if is_folder(name) else parse_part(name) for name in names or [text]]
    without = [name for name, weight in parts if weight is None]
    if 0 < len(without) < len(parts):
        raise ValueError(
            f"--dataset={text} gives no weight to {', '.join(without)}: type a weight after each name, such "
            "as a:0.7,b:0.3, or after none, to mix them in proportion to their training tokens"
        )
    return parts


def parse_part(part: str) -> tuple[str, Fraction | None]:
    """Parse NAME or NAME:WEIGHT. Raises ValueError if the weight is not a positive number."""
    name, colon, weight = part.rpartition(":")
    if not colon:
        return part, None
    try:
        # what is 0 or infinite as a float could have a billion digits as a fraction
        if 0 < float(weight) < math.inf:
            return name, Fraction(weight)
    except ValueError:
        pass
    raise ValueError(
        f"--dataset contains {part}, but {weight!r} is not a positive number, and there is no folder {part}: "
        "type NAME:WEIGHT"
    )


def quotas_of(weights: dict[str, Fraction | int]) -> list[int]:
    """
    Return how many of each PER sequences are of each data set, by the method of the largest remainder.

    Args:
        weights: by name.

    Raises:
        ValueError: a data set gets none.
    """
    shares = [Fraction(weight) * PER / sum(weights.values()) for weight in weights.values()]
    quotas = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: quotas[i] - shares[i])
    for i in by_remainder[: PER - sum(quotas)]:
        quotas[i] += 1
    if 0 in quotas:
        i = quotas.index(0)
        raise ValueError(
            f"{[*weights][i]} is {float(shares[i]):.2g} of each {PER:,} sequences of the mixture, which is "
            f"rounded to 0: give it a weight of 1/{PER} of the sum or more, or leave it out of --dataset="
        )
    return quotas


def sources_at(quotas: Sequence[int], places: np.ndarray) -> np.ndarray:
    """The number of the data set at these places of PER sequences, which are sorted by the data set."""
    return np.searchsorted(np.cumsum(quotas), places, side="right")


def drawn_sources(quotas: Sequence[int], seed: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the data sets of the sequences `numbers` of a run, and the sequences' numbers within their data
    set, of which each occurs once, (n,) each.

    Args:
        quotas: how many of each PER sequences are of each data set; all of them, if there is a single one.
    """
    if len(quotas) == 1:
        return np.zeros_like(numbers), numbers
    blocks, places = np.divmod(numbers, PER)
    for block in np.unique(blocks).tolist():
        rows = blocks == block
        order = np.argsort(random_bits(seed, MIXTURE, block, PER), kind="stable")
        places[rows] = order[places[rows]]
    sources = sources_at(quotas, places)
    quota = np.asarray(quotas)
    begins = np.cumsum(quota) - quota
    return sources, blocks * quota[sources] + places - begins[sources]


def spread_sources(quotas: Sequence[int], n: int) -> np.ndarray:
    """The data sets (n,) of n sequences, in the proportions of the quotas up to one sequence."""
    return sources_at(quotas, (2 * np.arange(n) + 1) * PER // (2 * n))
