"""
Files of token ids: how they are read, and their format, which llm.c's or numpy's header or the metadata
declares; otherwise it is uint16, as in nanoGPT. A file is opened when it is read, and few are open at a time,
so that a data set may consist of many thousands.
"""

import os
import struct
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from io import FileIO
from pathlib import Path

import numpy as np

from isogpt.common.files import regular_file

DTYPES = ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
# llm.c's header, also written by modded-nanogpt: 256 int32, which begin with a number, a version, and the
# number of tokens. By the first two, the dtype of the tokens
HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
HEADER_BYTES = 1024
NO_HEADER = "no header"
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
    header: str  # its kind, or NO_HEADER
    dtype: np.dtype  # of the ids, one of DTYPES
    offset: int  # bytes before the first id
    size: int  # bytes
    modified_ns: int
    lock: threading.Lock = field(default_factory=threading.Lock)  # an evaluation reads at the same time

    def __len__(self) -> int:
        """The number of ids."""
        return (self.size - self.offset) // self.dtype.itemsize

    def read(self, start: int, length: int) -> np.ndarray:
        """
        Read the ids (length,) from number `start` on. Their pages come from the disk at once.

        Raises:
            DataError: the file is missing, has been replaced or truncated, or cannot be read.
        """
        ids = np.empty(length, self.dtype)
        buffer, count = memoryview(ids).cast("B"), 0
        try:
            file = opened(self)
            with self.lock:
                file.seek(self.offset + start * self.dtype.itemsize)
                # a call may read less: before a page that cannot be read, and on some file systems
                while count < len(buffer) and (read_bytes := file.readinto(buffer[count:])):
                    count += read_bytes
        except OSError as e:  # such as a file that was deleted on a file server
            raise DataError(f"{self.path} can no longer be read: {e.strerror}") from e
        if count < len(buffer):
            raise DataError(f"{self.path} has been truncated since the start of the run")
        return ids


@lru_cache(maxsize=MOST_OPEN)
def opened(tokens: TokenFile) -> FileIO:
    """
    Open a file. If too many are open, the least recently read one is closed, once no thread reads it.

    Raises:
        OSError: the file is missing.
        DataError: it is not the one that was there at the start of the run.
    """
    file = open(tokens.path, "rb", buffering=0, opener=regular_file)
    status = os.fstat(file.fileno())
    if (status.st_size, status.st_mtime_ns) != (tokens.size, tokens.modified_ns):
        raise DataError(f"{tokens.path} has been replaced or changed since the start of the run")
    if hasattr(os, "posix_fadvise"):  # Linux: at a page that is missing, it would read megabytes ahead
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return file


def declared_dtype(meta: dict, folder: Path) -> str | None:
    """The dtype in a meta.json; None: not declared. Raises ValueError if ids are not stored in it."""
    dtype = meta.get("dtype")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"{folder / 'meta.json'}: dtype is {dtype!r}; choose from {', '.join(DTYPES)}")
    return dtype


def find_file(path: Path, declared: str | None) -> TokenFile:
    """
    Find out how a file contains ids, without looking at their values.

    Args:
        declared: the dtype in the metadata; None: not declared. A header takes precedence.

    Raises:
        ValueError: it cannot be read, is empty or truncated, or begins with an unknown header.
    """
    try:
        with open(path, "rb", buffering=0, opener=regular_file) as f:
            start, status = f.read(12), os.fstat(f.fileno())
        is_npy = start.startswith(np.lib.format.MAGIC_PREFIX)
        array = np.lib.format.open_memmap(path, mode="r") if is_npy else None
    except Exception as e:  # a damaged .npy header raises nearly anything
        raise ValueError(f"{path} cannot be read: {e}") from e
    magic, version, tokens = struct.unpack("=3i", start.ljust(12, b"\0"))
    if is_npy:
        header, dtype, offset, tokens = "a .npy header", array.dtype, array.offset, array.size
        if array.ndim != 1 or dtype not in DTYPES:
            raise ValueError(f"{path} is not one row of ids: its shape is {array.shape}, its dtype {dtype}")
    elif (magic, version) in HEADERS:
        header, dtype, offset = f"llm.c's header {magic}", np.dtype(HEADERS[magic, version]), HEADER_BYTES
    elif magic in (20240520, 20240522, 20240801):  # GPT-2's ids form no such number
        raise ValueError(f"{path} begins with llm.c's header {magic} of version {version}, which is not read")
    else:
        header, dtype, offset = NO_HEADER, np.dtype(declared or "uint16"), 0
        tokens = status.st_size // dtype.itemsize
    expected = offset + tokens * dtype.itemsize
    if not tokens or status.st_size != expected:
        raise ValueError(
            f"{path} contains {status.st_size} bytes, but {header} and {tokens} tokens of {dtype} take "
            f"{expected}: it is empty, truncated or of a different dtype; write it again"
        )
    return TokenFile(path, header, dtype, offset, status.st_size, status.st_mtime_ns)


def check_width(tokens: TokenFile, vocab_size: int) -> None:
    """
    Raise ValueError if ids of an undeclared dtype do not have 16 bits: in a vocabulary of this size, or since
    every second number is small.
    """
    ids = tokens.read(0, min(2**18, len(tokens)))
    first, second = ids[0::2].max(), ids[1::2].max(initial=0)
    # the upper half of ids below 2**20
    if vocab_size > 2**16 or second < 16 <= first or second == 0 < first:
        raise ValueError(
            f"{tokens.path} contains ids of 32 or 64 bits, by the size of the vocabulary or since every "
            f'second number of 16 bits is small: declare {{"dtype": "uint32"}} in '
            f"{tokens.path.with_name('meta.json')}, or the dtype that is right: {', '.join(DTYPES)}"
        )
