"""
Files of token ids: how they are read, one after the other as one array, and their format, which llm.c's or
numpy's header or the metadata declares; otherwise it is uint16, as in nanoGPT. A file is opened when it is
read, and few are open at a time, so that a data set may consist of many thousands.
"""

import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BufferedReader
from pathlib import Path

import numpy as np

from isogpt.common.files import regular_file

DTYPES = ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
# llm.c's header, also written by modded-nanogpt: 256 int32, which begin with a number, a version, and the
# number of tokens. By the first two, the dtype of the tokens
HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
HEADER_BYTES = 1024
MOST_OPEN = 256  # files; the limit of the process is often 1,024


class DataError(ValueError):
    """The data is not what the check at the start of the run found."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """
    A file of token ids. Reads report an error where a mapped file would end the process with SIGBUS: at the
    end of a file that has been truncated, and if the disk fails.
    """

    path: Path
    dtype: np.dtype  # of the ids, one of DTYPES
    offset: int  # bytes before the first id
    count: int  # ids
    version: tuple[int, int]  # its size in bytes, and when it was modified
    lock: threading.Lock = field(default_factory=threading.Lock)  # an evaluation reads at the same time

    def read(self, start: int, length: int) -> np.ndarray:
        """
        Read the ids (length,) from number `start` on. Their pages come from the disk at once.

        Raises:
            DataError: the file is missing, has been replaced or truncated, or cannot be read.
        """
        ids = np.empty(length, self.dtype)
        try:
            file = opened(self)
            with self.lock:
                file.seek(self.offset + start * self.dtype.itemsize)
                count = file.readinto(ids)
        except OSError as e:  # such as a file that was deleted on a file server
            raise DataError(f"{self.path} can no longer be read: {e.strerror}") from e
        if count < ids.nbytes:
            raise DataError(f"{self.path} has been truncated since the start of the run")
        return ids


@lru_cache(maxsize=MOST_OPEN)
def opened(tokens: TokenFile) -> BufferedReader:
    """
    Open a file. If too many are open, the least recently read one is closed, once no thread reads it.

    Raises:
        OSError: the file is missing.
        DataError: it is not the one that was there at the start of the run.
    """
    # the buffer is for few bytes, so that no others are read; without one, a read may return less than asked
    file = open(tokens.path, "rb", buffering=16, opener=regular_file)
    status = os.fstat(file.fileno())
    if (status.st_size, status.st_mtime_ns) != tokens.version:
        raise DataError(f"{tokens.path} has changed since the start of the run")
    if hasattr(os, "posix_fadvise"):  # Linux: at a page that is missing, it would read megabytes ahead
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return file


class Tokens:
    """
    The ids of files, one after the other: the shards of a split, or of all sources of a mixture. A window may
    cross from one file to the next ones.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = files
        self.dtype = np.result_type(*{file.dtype for file in files})
        self.ends = np.cumsum([file.count for file in files])
        self.path = files[0].path  # what messages name

    def __len__(self) -> int:
        """The number of ids."""
        return int(self.ends[-1])

    def place_of(self, position: int) -> tuple[TokenFile, int]:
        """The file that contains the id at `position`, and the id's place in it."""
        number = int(np.searchsorted(self.ends, position, side="right"))
        file = self.files[number]
        return file, position - int(self.ends[number]) + file.count

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read windows (len(starts), length). Raises DataError, see TokenFile.read."""
        windows = np.empty((len(starts), length), self.dtype)
        for window, start in zip(windows, starts.tolist(), strict=True):
            filled = 0
            while filled < length:
                file, place = self.place_of(start + filled)
                part = file.read(place, min(length - filled, file.count - place))
                window[filled : filled + len(part)] = part
                filled += len(part)
        return windows


def open_files(paths: Sequence[Path], declared: str | None) -> Tokens:
    """
    Open the files of a split. The beginning of each is read. Whether ids of an undeclared dtype look like ids
    of 16 bits is judged by the first file only.

    Args:
        declared: the dtype that the metadata declares; None: not declared. A header takes precedence.

    Raises:
        ValueError: a file is empty, truncated or of an unknown format, or the files are of different formats.
    """
    files = [find_file(path, declared) for path in paths]
    kinds = {(file.dtype.name, file.offset > 0): str(file.path) for file in files}
    if len(kinds) > 1:
        raise ValueError(f"files of several dtypes, or not all with a header: {[*kinds.values()]}")
    if not files[0].offset and not declared:
        check_width(files[0])
    return Tokens(files)


def find_file(path: Path, declared: str | None) -> TokenFile:
    """
    Find out how a file contains ids, without looking at their values.

    Raises:
        ValueError: it cannot be read, is empty or truncated, or does not contain ids.
    """
    try:
        with open(path, "rb", opener=regular_file) as file:
            start, status = file.read(12), os.fstat(file.fileno())
        magic, version, count = struct.unpack("=3i", start.ljust(12, b"\0"))
        if start.startswith(np.lib.format.MAGIC_PREFIX):
            ids = np.load(path, mmap_mode="r")
        elif dtype := HEADERS.get((magic, version)):
            ids = np.memmap(path, dtype, "r", HEADER_BYTES, count)
        else:
            ids = np.memmap(path, declared or "uint16", "r")
    except Exception as e:  # a damaged .npy header raises nearly anything
        raise ValueError(f"{path} cannot be read, or is of a different dtype: {e}") from e
    rest = status.st_size - ids.offset - ids.nbytes
    if ids.ndim != 1 or ids.dtype not in DTYPES or rest:
        raise ValueError(f"{path} is not one row of ids: shape {ids.shape}, {ids.dtype}, {rest} bytes more")
    return TokenFile(path, ids.dtype, ids.offset, ids.size, (status.st_size, status.st_mtime_ns))


def check_width(tokens: TokenFile) -> None:
    """Raise ValueError if what is read as ids of 16 bits are halves of longer ones: each second is small."""
    ids = tokens.read(0, min(2**18, tokens.count))
    first, second = ids[0::2].max(), ids[1::2].max(initial=0)
    if second < 16 <= first or second == 0 < first:  # the upper half of ids below 2**20
        raise ValueError(f'{tokens.path} holds ids of 32 or 64 bits: add {{"dtype": "uint32"}} to meta.json')
