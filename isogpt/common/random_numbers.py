"""
Random numbers that depend on their arguments alone, with one stream for each use. The seeds of dropout are in
training/precision.py (seed_step), the initial weights in model.py (initial_weight).
"""

import numpy as np

# a separate stream of random numbers for each use, so that no use depends on how many numbers others draw
TRAIN, EVAL_TRAIN, EVAL_VAL, SHUFFLE, SAMPLING = range(5)


def random_bits(seed: int, stream: int, step: int, n: int) -> np.ndarray:
    """
    Return n random 64-bit numbers that depend on the arguments alone: Philox (Salmon et al. 2011), with the
    step as the high word of the counter. These are raw bits, since numpy guarantees that raw bits do not
    change between versions.
    """
    return np.random.Philox(key=[seed, stream], counter=[0, 0, 0, step]).random_raw(n)
