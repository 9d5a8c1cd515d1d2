"""
Files of token ids: how they are read, and their format, which llm.c's or numpy's header or the metadata
declares; otherwise it is uint16, as in nanoGPT.

Files that are probably something else are refused, since they would give wrong tokens.
"""

import codecs
import io
import math
import os
import struct
import threading
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

from isogpt.common.files import regular_file

DTYPES = ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
# llm.c's header, also written by modded-nanogpt: 256 int32, which begin with this number, a version, and the
# number of tokens
HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # number: (version, dtype of the tokens)
HEADER_BYTES = 1024
NPY = "a .npy header"
NO_HEADER = "no header"
HEADER_READ = 4096  # bytes of each file that are read at the start: a header, or some ids
TOFILE = "write the ids with numpy's tofile, ids.astype(numpy.uint16).tofile('train.bin')"
# how files without bare ids begin, and what to do about them
OTHER_FILES = {
    b"PK\x03\x04": f"a zip archive, such as a .npz or a file of torch.save: {TOFILE}",
    b"\x80\x04\x95": f"a pickle: {TOFILE}",
    b"\x80\x02\x8a\nl\xfc\x9c": f"a file of torch.save: {TOFILE}",
    b"PAR1": "a Parquet file: rename it to train.parquet, and run prepare.py with --data_files=",
    b"ARROW1": f"an Arrow file: {TOFILE}",
    b"\x1f\x8b\x08": "compressed by gzip: type: gzip -d < train.bin > ids.bin",
    b"\xfd7zXZ\x00": "compressed by xz: type: xz -d < train.bin > ids.bin",
    b"BZh": "compressed by bzip2: type: bzip2 -d < train.bin > ids.bin",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: type: zstd -d < train.bin > ids.bin",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: run git lfs pull in its folder",
    np.int32(20240522).tobytes(): "llm.c's multiple-choice questions, not a text: use a different data set",
}
START = 2**19  # bytes at the beginning of a file by which its format is judged


class DataError(ValueError):
    """The data is not what the check at the start of the run found."""


class TokenFile:
    """
    An open file of token ids, from which windows are read. It remains the same file if its name is given to
    another one. Reads report an error where a mapped file would end the process with SIGBUS: at the end of a
    file that has been truncated, and if the disk fails.

    Args:
        dtype: of the ids, one of DTYPES.
        offset: bytes before the first id.
    """

    def __init__(self, path: Path, dtype: str, offset: int = 0) -> None:
        self.path, self.dtype, self.offset = path, np.dtype(dtype), offset
        self.file = open(path, "rb", buffering=0, opener=regular_file)
        self.length = (os.fstat(self.file.fileno()).st_size - offset) // self.dtype.itemsize
        self.lock = threading.Lock()  # training and an evaluation read at the same time
        if hasattr(os, "posix_fadvise"):  # Linux: at a page that is missing, it would read megabytes ahead
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def __len__(self) -> int:
        """The number of ids when the file was opened."""
        return self.length

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """
        Read windows (len(starts), length) that begin at the ids `starts`. The pages that contain them come
        from the disk all at once.

        Raises:
            DataError: the file has been truncated, or it cannot be read.
        """
        windows = np.empty((len(starts), length), self.dtype)
        begins = (self.offset + starts * self.dtype.itemsize).tolist()
        try:
            if hasattr(os, "posix_fadvise") and len(begins) > 1:
                window_size = length * self.dtype.itemsize
                for begin in begins:
                    os.posix_fadvise(self.file.fileno(), begin, window_size, os.POSIX_FADV_WILLNEED)
            count = sum(map(self.read_at, begins, windows))
            file_size = os.fstat(self.file.fileno()).st_size
        except OSError as e:  # such as a file that was deleted on a file server
            raise DataError(f"{self.path} can no longer be read: {e.strerror}") from e
        if count < windows.nbytes or file_size < self.offset + self.length * self.dtype.itemsize:
            raise DataError(f"{self.path} has been truncated since the start of the run")
        return windows

    def file_at(self, position: int) -> Path:
        """The file that contains the id at `position`: this one."""
        return self.path

    def read_at(self, begin: int, window: np.ndarray) -> int:
        """Fill a window from byte `begin`, or its beginning if the file ends. Returns the bytes read."""
        buffer, count = memoryview(window).cast("B"), 0
        with self.lock:
            self.file.seek(begin)
            # a call may read less: before a page that cannot be read, and on some file systems
            while count < len(buffer) and (read_bytes := self.file.readinto(buffer[count:])):
                count += read_bytes
        return count


def declared_dtype(meta: dict, folder: Path) -> str | None:
    """
    Return the dtype that a meta.json declares; None without a declaration.

    Raises:
        ValueError: ids are not stored in this dtype.
    """
    if "dtype" not in meta:
        return None
    if meta["dtype"] not in DTYPES:
        possible = f"{', '.join(DTYPES[:-1])} and {DTYPES[-1]}"
        raise ValueError(f"{folder / 'meta.json'}: dtype is {meta['dtype']!r}; choose from {possible}")
    return meta["dtype"]


class Format(NamedTuple):
    """How a file contains ids."""

    header: str  # NPY, NO_HEADER, or llm.c's
    dtype: str  # one of DTYPES
    offset: int  # bytes before the first id


def format_of(path: Path, start: bytes, size: int, declared: str | None) -> Format:
    """
    Find how a file contains ids, without looking at their values: see `check_undeclared`.

    Args:
        start: the first HEADER_READ bytes of the file, or all of a shorter one.
        size: the file's size in bytes.
        declared: the dtype in the metadata; None: not declared. A header takes precedence.

    Raises:
        ValueError: the file does not contain token ids, begins with an unknown header, or has another size
            than its header announces.
    """
    magic, version, tokens = struct.unpack("=3i", start[:12].ljust(12, b"\0"))
    if magic in HEADERS:
        found = llm_c_format(path, magic, version)
    elif start.startswith(npy.MAGIC_PREFIX):
        found, tokens = npy_format(path, start)
    else:
        check_kind(path, start, may_be_text=declared == "uint8")
        return Format(NO_HEADER, declared or "uint16", 0)
    expected = found.offset + tokens * np.dtype(found.dtype).itemsize
    if size != expected:
        raise ValueError(
            f"{path} contains {size} bytes, but the header announces {tokens} tokens, that is {expected} "
            "bytes: the file is truncated or damaged; copy or prepare it again"
        )
    return found


def llm_c_format(path: Path, magic: int, version: int) -> Format:
    """The format that llm.c's header announces. Raises ValueError if its version is unknown."""
    known, dtype = HEADERS[magic]
    if version != known:
        raise ValueError(
            f"{path} begins with llm.c's header {magic} of version {version}, but only version {known} is "
            "known: write the file again, without a header"
        )
    return Format(f"llm.c's header {magic}", dtype, HEADER_BYTES)


def npy_format(path: Path, start: bytes) -> tuple[Format, int]:
    """
    The format that a .npy header announces, and the number of ids. Raises ValueError if the header cannot be
    read, or announces something other than a row of ids.
    """
    try:
        shape, dtype, offset = npy_header(start[: start.index(b"\n") + 1])
    except Exception as e:  # a damaged header raises nearly anything
        raise ValueError(f"{path} begins with a .npy header that cannot be read: {e}") from e
    if len(shape) != 1 or dtype.name not in DTYPES or not dtype.isnative:
        raise ValueError(
            f"{path} is a .npy array of shape {shape} and dtype {dtype.str}, not one row of ids: write it "
            f"with numpy.save('{path.name}', ids.reshape(-1).astype('uint16')), or uint32 for ids above 65535"
        )
    return Format(NPY, dtype.name, offset), shape[0]


@lru_cache(maxsize=64)  # numpy takes 40 us, and most shards of a data set have the same header
def npy_header(header: bytes) -> tuple[tuple[int, ...], np.dtype, int]:
    """The shape and the dtype that a .npy header announces, and its length in bytes. Raises any exception."""
    file = io.BytesIO(header)
    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype, file.tell()


def check_undeclared(path: Path, vocab_size: int) -> None:
    """
    Check a file without a header whose dtype is not declared.

    Args:
        vocab_size: the size in the metadata or the settings; 0: unknown.

    Raises:
        ValueError: the file cannot be read, or probably contains something other than ids of 16 bits.
    """
    start = read_start(path, START)[0]
    check_kind(path, start[: 2**16], may_be_text=False)
    check_width(path, np.frombuffer(start[: len(start) // 2 * 2], np.uint16), vocab_size)
    check_values(path, start)


def read_start(path: Path, length: int) -> tuple[bytes, os.stat_result]:
    """The first bytes of a file, and its properties. Raises ValueError if it cannot be read."""
    try:
        with open(path, "rb", buffering=0, opener=regular_file) as f:
            return f.read(length), os.fstat(f.fileno())
    except OSError as e:  # its text does not always name the file
        raise ValueError(f"{path} cannot be read: {e.strerror}") from e


def check_kind(path: Path, start: bytes, may_be_text: bool) -> None:
    """Raise ValueError if a file does not contain bare token ids. The bytes of a text can be ids."""
    for beginning, kind in OTHER_FILES.items():
        if start.startswith(beginning):
            raise ValueError(f"{path} is {kind.replace('train.bin', path.name)}")
    if path.suffix == ".npy":
        raise ValueError(f"{path} does not begin with a .npy header: write the file again, with numpy.save")
    if is_text(start) and not may_be_text:
        text = path.with_suffix(".jsonl" if start.startswith(b"{") else ".txt")
        raise ValueError(
            f"{path} is text, not token ids: rename it to {text.name}, then run: python "
            f"data/shakespeare/prepare.py --data_files={text} --out={path.parent}"
        )


def is_text(start: bytes) -> bool:
    """
    Whether the beginning of a file is text: UTF-16 with a byte order mark, or without the control characters
    that ids below 8192 contain, in UTF-8 or an encoding with one byte for each letter.
    """
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    return len(start) >= 64 and not any(byte < 32 and byte not in b"\t\n\r\f" for byte in start)


def check_values(path: Path, start: bytes) -> None:
    """Raise ValueError if numbers of 16 bits are probably not ids: other data, floats, or bytes reversed."""
    ids = np.frombuffer(start[: len(start) // 2 * 2], np.uint16)
    problem = ""
    if any(map(is_spread_evenly, (ids, ids[0::2], ids[1::2]))):
        problem = (
            "its numbers are spread evenly over all values of 16 bits, as in compressed files and in "
            f"weights, but not in texts: {TOFILE}"
        )
    for dtype in ("float16", "float32", "float64"):
        numbers = np.frombuffer(start[: len(start) // 8 * 8], dtype)
        with np.errstate(invalid="ignore"):  # ids form arbitrary floats
            if numbers.max(initial=0) >= 1 and np.all((numbers % 1 == 0) & (numbers >= 0)):
                problem = f"it contains ids as {dtype}: {TOFILE}"
    low, high = ids & 0xFF, ids >> 8
    reaches_further = low.max(initial=0) < high.max(initial=0)  # the high byte of ids below 65280 does not
    is_low_zero = low.max(initial=0) == 0 or np.mean(low == 0) > 0.1 and np.mean(high == 0) < 0.05
    if reaches_further and is_low_zero:
        problem = "the bytes of its numbers are in reverse order (big-endian): write ids.byteswap()"
    if problem:
        declare = f'declare {{"dtype": "uint16"}} in {path.with_name("meta.json")}'
        raise ValueError(f"{path}: {problem}. If these are ids of 16 bits all the same, {declare}")


def is_spread_evenly(numbers: np.ndarray) -> bool:
    """
    Whether numbers of 16 bits reach both ends of the range and repeat as rarely as random ones. A text
    repeats frequent tokens.
    """
    n, values = len(numbers), 2**16
    if n < 256 or np.ptp(numbers) < 0.98 * values:
        return False
    different_if_random = values * (1 - math.exp(-n / values))
    return len(np.unique(numbers)) > 0.9 * different_if_random


def check_width(path: Path, ids: np.ndarray, vocab_size: int) -> None:
    """
    Raise ValueError if a file without a declared dtype probably does not contain ids of 16 bits. `ids` is the
    beginning of the file, read as ids of 16 bits.
    """
    parts = (ids[0::2], ids[1::2], ids[2::4], ids & 0xFF, ids >> 8)
    first, second, third, low, high = (part.max(initial=0) for part in parts)
    dtype = "uint32"
    if vocab_size > 2**16:
        reason = f"the vocabulary size is {vocab_size}, but ids of 16 bits end at 65535"
    elif second < 16 <= first or second == 0 < first:  # the upper half of ids below 2**20
        reason = "every second number of 16 bits is 0 or small, as in files with ids of 32 or 64 bits"
        dtype = "int64" if second == third == 0 else dtype
    elif 0 < low < 128 and 0 < high < 128:  # low is 0 if the bytes of small ids are in reverse order
        reason, dtype = "no byte is above 127, as in files with ids of 8 bits", "uint8"
    else:
        return
    others = ", ".join(name for name in DTYPES if name != dtype)
    declare = f'declare {{"dtype": "{dtype}"}} in {path.with_name("meta.json")}'
    raise ValueError(f"{path}: {reason}: {declare}, or the dtype that is right: {others}")
