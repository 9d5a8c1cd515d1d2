"""
Random numbers that depend on their arguments alone, with one stream for each use. The seeds of dropout are in
training/precision.py (seed_step), and model.py (initial_weight) says what begins with normal numbers.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

# a separate stream of random numbers for each use, so that no use depends on how many numbers others draw
TRAIN, EVAL_TRAIN, EVAL_VAL, SHUFFLE, SAMPLING, MIXTURE = range(6)
AT_ONCE = 2**16  # normal numbers that are computed at once, so that they stay in a core's cache


def random_bits(seed: int, stream: int, step: int, n: int) -> np.ndarray:
    """
    Return n random 64-bit numbers that depend on the arguments alone: Philox (Salmon et al. 2011), with the
    step as the high word of the counter. These are raw bits, since numpy guarantees that raw bits do not
    change between versions.
    """
    return np.random.Philox(key=[seed, stream], counter=[0, 0, 0, step]).random_raw(n)


def normal_numbers(seed: int, name: str, shape: Sequence[int], part: Sequence[slice]) -> np.ndarray:
    """
    Return a part of a tensor of standard normal numbers, in float32. They depend on (seed, name) and on the
    place in the tensor, in the order of memory. Only the numbers of the part are drawn, since the counter of
    Philox can start anywhere.

    Args:
        shape: of the whole tensor.
        part: a slice for each dimension, with start and stop.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    key = int.from_bytes(digest[:16], "little")
    starts, n = runs(shape, part)
    numbers = np.empty((len(starts), n), np.float32)
    rows = max(1, AT_ONCE // max(1, n))
    for row in range(0, len(starts), rows):
        begins = starts[row : row + rows]
        for column in range(0, n, AT_ONCE):
            block = numbers[row : row + rows, column : column + AT_ONCE]
            places = (begins + column).tolist()
            block[:] = normal_rows(key, places, block.shape[1])
    return numbers.reshape([place.stop - place.start for place in part])


def runs(shape: Sequence[int], part: Sequence[slice]) -> tuple[np.ndarray, int]:
    """
    Return where the numbers of a part of a tensor are in the order of memory: the starts of runs of
    consecutive numbers, and the length of each run.
    """
    starts, n, stride = np.zeros(1, np.int64), 1, 1
    for size, place in zip(reversed(shape), reversed(part), strict=True):
        if n == stride:  # all of the later dimensions: the run goes on
            starts = starts + place.start * stride
            n *= place.stop - place.start
        else:
            starts = (np.arange(place.start, place.stop)[:, None] * stride + starts).flatten()
        stride *= size
    return starts, n


def normal_rows(key: int, starts: list[int], n: int) -> np.ndarray:
    """
    Return rows of n normal numbers of the sequence with this key, each from a different start: (rows, n). Two
    consecutive numbers are computed from one 64-bit word (Box and Muller 1958).
    """
    words = np.stack([random_words(key, start // 2, n // 2 + 1) for start in starts])
    # contiguous, since numpy may compute different bits for other arrays
    halves = words.view(np.uint32).reshape(-1, 2).T
    uniform = halves.astype(np.float32, order="C") * 2.0**-32
    radius = np.sqrt(-2.0 * np.log(uniform[0] + 2.0**-33))  # never the logarithm of 0
    angle = 2.0 * np.pi * uniform[1]
    pairs = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1)
    rows = pairs.reshape(len(starts), -1)
    numbers = [row[start % 2 :][:n] for row, start in zip(rows, starts, strict=True)]
    return np.stack(numbers)


def random_words(key: int, first: int, n: int) -> np.ndarray:
    """
    Return n 64-bit words from number `first` of Philox's stream with this key; each count of the counter
    gives four words.
    """
    skipped = first % 4
    return np.random.Philox(key=key, counter=first // 4).random_raw(skipped + n)[skipped:]
