"""The sequences that a step reads: a pure function of the seed, the data set and the step."""

import math
from dataclasses import dataclass

import numpy as np

from isogpt.common.random_numbers import SHUFFLE, random_bits

ROUNDS = 8  # pairs of rounds. With 4, the orders of fewer than 20 windows are visibly not equally frequent


def random_windows(n_tokens: int, block_size: int, seed: int, stream: int, step: int, n: int) -> np.ndarray:
    """Starts (n,) of windows at any position, with replacement, as in nanoGPT."""
    return starts_of_bits(random_bits(seed, stream, step, n), n_tokens, block_size)


def starts_of_bits(bits: np.ndarray, n_tokens: int | np.ndarray, block_size: int) -> np.ndarray:
    """Starts (n,) of windows at any position, from random 64-bit numbers (n,), of one text or n texts."""
    return (bits % np.uint64(n_tokens - block_size)).astype(np.int64)


def whole_windows(n_tokens: int, block_size: int) -> np.ndarray:
    """
    Starts of windows in which each token but the first one is predicted once. The last window may reach
    beyond the end.
    """
    return np.arange(0, n_tokens - 1, block_size)


@dataclass
class Windows:
    """
    Windows of a data set, which an order permutes: they lie side by side, so that each token but the first
    one is predicted once. documents.DocumentWindows are others.
    """

    n_tokens: int
    block_size: int
    digest = ""  # of where they begin, if more than these numbers determines it

    def __len__(self) -> int:
        """The number of windows. The last one is whole."""
        return (self.n_tokens - 1) // self.block_size

    def starts(self, places: np.ndarray) -> np.ndarray:
        """Where the windows with these numbers begin."""
        return places * self.block_size


def shuffled_windows(windows: Windows, seed: int, numbers: np.ndarray) -> np.ndarray:
    """
    Return the starts of the sequences `numbers` of a run in which every window is read once per epoch, in a
    new order each time. Sequences are counted from the beginning of the run.
    """
    epochs, places = np.divmod(numbers, len(windows))
    shuffled = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        rows = epochs == epoch
        shuffled[rows] = permuted(places[rows], len(windows), seed, epoch)
    return windows.starts(shuffled)


def permuted(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """
    Return where a permutation of range(n) takes `places`. It is computed for these alone, so that no memory
    is needed for the others, however large the data set is.

    The permutation is a generalized Feistel network on a rectangle of at least n places: a place has a row
    and a column, and each round shifts one of them by a random function of the other one. A place that
    arrives at n or beyond goes through the network again until it does not (Black and Rogaway 2002, "Ciphers
    with Arbitrary Finite Domains").
    """
    columns = np.uint64(math.isqrt(n - 1) + 1)
    rows = np.uint64(-(-n // int(columns)))  # the rectangle has fewer than `columns` places too many
    keys = random_bits(seed, SHUFFLE, epoch, 2 * ROUNDS)
    results = places.astype(np.uint64)
    left = np.arange(len(results))
    while len(left):
        row, column = np.divmod(results[left], columns)
        for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
            row = (row + mixed(column ^ row_key) % rows) % rows
            column = (column + mixed(row ^ column_key) % columns) % columns
        results[left] = row * columns + column
        left = left[results[left] >= n]
    return results.astype(np.int64)


def mixed(bits: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014), in arithmetic modulo 2**64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
