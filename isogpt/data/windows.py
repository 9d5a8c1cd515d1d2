"""The sequences that a step reads: a pure function of the seed, the data set and the step."""

from functools import lru_cache

import numpy as np

from isogpt.common.random_numbers import SHUFFLE, random_bits


def random_windows(n_tokens: int, block_size: int, seed: int, stream: int, step: int, n: int) -> np.ndarray:
    """Starts (n,) of windows at any position, with replacement, as in nanoGPT."""
    return (random_bits(seed, stream, step, n) % np.uint64(n_tokens - block_size)).astype(np.int64)


def shuffled_windows(
    n_tokens: int, block_size: int, seed: int, step: int, n: int, shift: int = 0
) -> np.ndarray:
    """
    Return the starts (n,) of the step's windows if every window is read once per epoch, in a new order each
    time. `shift` is how many windows more than step * n the run has read before, because the batch size was
    different.
    """
    windows = (n_tokens - 1) // block_size
    epochs, places = np.divmod(shift + step * n + np.arange(n), windows)
    orders = [epoch_order(windows, seed, int(e))[places[epochs == e]] for e in np.unique(epochs)]
    return np.concatenate(orders) * block_size


@lru_cache(maxsize=2)
def epoch_order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the windows: 8 bytes per window, 70 MB for OpenWebText at block_size 1024."""
    return np.argsort(random_bits(seed, SHUFFLE, epoch, windows), kind="stable")
