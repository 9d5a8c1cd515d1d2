"""
A mixture of data sets: which of them a sequence of the run comes from.

Every data set provides the same number of each 1,000 sequences, its quota, in an order that is drawn anew for
each 1,000.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np

from isogpt.common.random_numbers import MIXTURE, random_bits
from isogpt.data.data_folder import find_dataset

PER = 1000  # sequences to which a quota refers


def find_sources(text: str) -> list[tuple[Path, Fraction | None]]:
    """
    Find the folders of a data set or a mixture and their weights, sorted by the folder's name, so that their
    order in the text does not matter.

    Args:
        text: a:0.7,b:0.3, or a,b, whose weights are None.

    Raises:
        ValueError: a folder is missing, or only some data sets have a weight.
    """
    parts = filter(None, map(str.strip, text.split(",")))
    sources = []
    for name, weight in [*map(parse_part, parts)] or [(text, None)]:
        sources.append((find_dataset(name), weight))
    if len({weight is None for _, weight in sources}) > 1:
        raise ValueError(f"--dataset={text}: type a weight after each name, or after none")
    return sorted(sources, key=lambda source: source[0].resolve().name)


def parse_part(part: str) -> tuple[str, Fraction | None]:
    """Parse NAME or NAME:WEIGHT. What does not end with a positive number is a name, such as C:/data."""
    name, _, weight = part.rpartition(":")
    with suppress(ValueError):
        # what is 0 or infinite as a float could have a billion digits as a fraction
        if name and 0 < float(weight) < math.inf:
            return name, Fraction(weight)
    return part, None


def quotas_of(weights: Sequence[Fraction | int]) -> list[int]:
    """
    Return how many of each PER sequences are of each data set, by the method of the largest remainder. Raises
    ValueError if a data set gets none.
    """
    total = sum(weights)
    shares = [Fraction(weight) * PER / total for weight in weights]
    quotas = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: quotas[i] - shares[i])
    for i in by_remainder[: PER - sum(quotas)]:
        quotas[i] += 1
    if 0 in quotas:
        problem = f"of each {PER:,} sequences, the data sets would get {quotas}"
        raise ValueError(f"{problem}: set a larger weight")
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
        bits = random_bits(seed, MIXTURE, block, PER)
        order = np.argsort(bits, kind="stable")
        places[rows] = order[places[rows]]
    sources = sources_at(quotas, places)
    quota = np.asarray(quotas)
    begins = np.cumsum(quota) - quota
    return sources, blocks * quota[sources] + places - begins[sources]


def spread_sources(quotas: Sequence[int], n: int) -> np.ndarray:
    """The data sets (n,) of n sequences, in the proportions of the quotas up to one sequence."""
    middles = (2 * np.arange(n) + 1) * PER // (2 * n)
    return sources_at(quotas, middles)
