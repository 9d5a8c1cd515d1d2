"""The token ids of several files as one array: the shards of a split, or of all sources of a mixture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from isogpt.data.token_files import TokenFile


class Tokens:
    """
    The ids of files, one after the other. A window may cross from one file to the next ones.

    Args:
        path: what messages name.
    """

    def __init__(self, path: Path, files: Sequence[TokenFile]) -> None:
        self.path, self.files = path, files
        self.offset = files[0].offset  # bytes before the first id
        dtypes = {file.dtype for file in files}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
        self.ends = np.cumsum([len(file) for file in files])

    def __len__(self) -> int:
        """The number of ids."""
        return int(self.ends[-1])

    def place_of(self, position: int) -> tuple[TokenFile, int]:
        """The file that contains the id at `position`, and the id's place in it."""
        number = int(np.searchsorted(self.ends, position, side="right"))
        file = self.files[number]
        return file, position - int(self.ends[number]) + len(file)

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """
        Read windows (len(starts), length), in the dtype of the files, or in int64 if they have several.
        Raises DataError, see TokenFile.read.
        """
        windows = np.empty((len(starts), length), self.dtype)
        for window, start in zip(windows, starts.tolist(), strict=True):
            filled = 0
            while filled < length:
                file, place = self.place_of(start + filled)
                part = file.read(place, min(length - filled, len(file) - place))
                window[filled : filled + len(part)] = part
                filled += len(part)
        return windows
