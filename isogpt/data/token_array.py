"""Several arrays of token ids as one: the shards of a split, or the sources of a mixture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokens(Protocol):
    """Token ids on the disk, from which windows are read: a TokenFile, or several."""

    path: Path  # for messages
    dtype: np.dtype  # of the windows

    def __len__(self) -> int:
        """The number of ids."""

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read windows (len(starts), length) that begin at the ids `starts`. Raises DataError."""

    def file_at(self, position: int) -> Path:
        """The file that contains the id at `position`."""


class TokenArray:
    """
    The ids of `parts`, one part after the other. A window may cross from one part to the next ones.

    Args:
        path: what messages name.
    """

    def __init__(self, path: Path, parts: Sequence[Tokens]) -> None:
        self.path, self.parts = path, parts
        dtypes = {part.dtype for part in parts}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
        lengths = np.array([len(part) for part in parts])
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths

    def __len__(self) -> int:
        """The number of ids."""
        return int(self.ends[-1])

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """
        Read windows (len(starts), length), in the dtype of the parts, or in int64 if they have several.
        Raises DataError, see TokenFile.read.
        """
        windows = np.empty((len(starts), length), self.dtype)
        numbers = np.searchsorted(self.ends, starts, side="right")
        is_crossing = starts + length > self.ends[numbers]
        rows_of = {}  # the rows of windows by the part that contains them
        for row in np.flatnonzero(~is_crossing).tolist():
            rows_of.setdefault(int(numbers[row]), []).append(row)
        for number, rows in rows_of.items():
            windows[rows] = self.parts[number].read(starts[rows] - self.begins[number], length)
        for row in np.flatnonzero(is_crossing).tolist():
            self.read_across(int(starts[row]), windows[row])
        return windows

    def file_at(self, position: int) -> Path:
        """The file that contains the id at `position`."""
        number = int(np.searchsorted(self.ends, position, side="right"))
        return self.parts[number].file_at(position - int(self.begins[number]))

    def read_across(self, start: int, window: np.ndarray) -> None:
        """Fill a window that several parts contain."""
        number, filled = int(np.searchsorted(self.ends, start, side="right")), 0
        while filled < len(window):
            local = start + filled - self.begins[number]
            count = min(len(window) - filled, len(self.parts[number]) - int(local))
            window[filled : filled + count] = self.parts[number].read(np.array([local]), count)[0]
            number, filled = number + 1, filled + count
