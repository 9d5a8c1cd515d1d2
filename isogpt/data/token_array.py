"""Several arrays of token ids as one: the shards of a split, or the sources of a mixture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokens(Protocol):
    """Token ids on the disk, from which windows are read: a TokenFile, or several."""

    path: Path  # for messages

    def __len__(self) -> int:
        """The number of ids."""

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read windows (len(starts), length) that begin at the ids `starts`. Raises DataError."""


class TokenArray:
    """
    The ids of `parts`, one part after the other. A window may cross from one part to the next ones.

    Args:
        path: what messages name.
    """

    def __init__(self, path: Path, parts: Sequence[Tokens]) -> None:
        self.path, self.parts = path, parts
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        """The number of ids."""
        return int(self.ends[-1])

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read windows (len(starts), length) in int64. Raises DataError, see TokenFile.read."""
        windows = np.empty((len(starts), length), np.int64)
        first = np.searchsorted(self.ends, starts, side="right")
        last = np.searchsorted(self.ends, starts + length - 1, side="right")
        for number in np.unique(first[first == last]).tolist():
            rows = np.flatnonzero((first == number) & (last == number))
            windows[rows] = self.parts[number].read(starts[rows] - self.begin(number), length)
        for row in np.flatnonzero(first < last).tolist():
            windows[row] = self.read_across(int(starts[row]), length)
        return windows

    def read_across(self, start: int, length: int) -> np.ndarray:
        """Read one window (length,) that several parts contain."""
        pieces, end = [], start + length
        while start < end:
            number = int(np.searchsorted(self.ends, start, side="right"))
            count = min(end, int(self.ends[number])) - start
            local = np.array([start - self.begin(number)])
            pieces.append(self.parts[number].read(local, count)[0].astype(np.int64))
            start += count
        return np.concatenate(pieces)

    def begin(self, number: int) -> int:
        """The number of ids before a part."""
        return int(self.ends[number - 1]) if number else 0
