"""
The files of a split: one file, or shards. A shard is opened when it is first read, and few are open at a
time, so that a data set may consist of many thousands.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import filter as matching
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from isogpt.common.console import count_text
from isogpt.data.token_array import TokenArray, Tokens
from isogpt.data.token_files import (
    HEADER_READ,
    NO_HEADER,
    DataError,
    TokenFile,
    check_undeclared,
    format_of,
    read_start,
)

SPLITS = ("train", "val")
MOST_OPEN = 256  # of all shards; the limit of the process is often 1,024 files
MEASURED = 100  # the shards that say how long it takes to read the beginning of one
SLOW_S = 0.001  # seconds for one, as of a file server
READERS = 16  # threads that read the beginnings on a slow file system
MEGATRON = b"MMIDIDX\0\0"  # how the index begins that Megatron writes next to its files of ids
MEGATRON_DTYPES = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
MEGATRON_DTYPE = 17  # place of the dtype's number in the index, after MEGATRON and a version of 8 bytes

# ------------------------------------------------------------------------------------------------------------
# which files


def files_of(folder: Path, split: str) -> list[Path]:
    """
    The token files of a split in the order in which they are read: train.bin alone if it exists, as in
    nanoGPT, else its shards. [] if there are none.
    """
    whole = folder / f"{split}.bin"
    return [whole] if os.path.exists(whole) else shards_of(folder, split)


def shards_of(folder: Path, split: str) -> list[Path]:
    """
    The files train*.bin and train*.npy in a folder, else *_train_*.bin, *_train.bin and the same with .npy,
    as others call them; in the order of their names.
    """
    names = names_in(folder)
    names = [name for name in names if name.endswith((".bin", ".npy"))]
    for pattern in (f"{split}*", f"*_{split}[_.]*"):
        if shards := matching(names, pattern):
            return [folder / name for name in sorted(shards)]
    return []


def names_in(folder: Path) -> list[str]:
    """
    The names in a folder, in order, without hidden ones; [] if there is no such folder. Raises ValueError if
    it cannot be read.
    """
    if not os.path.isdir(folder):  # such as a mixture's text, which may be longer than a name can be
        return []
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as e:
        raise ValueError(f"{folder} cannot be read: {e.strerror}") from e


def notes_about_files(folder: Path) -> list[str]:
    """Sentences for the user about shards that are not read, since there is a train.bin or val.bin too."""
    notes = []
    for whole in (folder / f"{split}.bin" for split in SPLITS):
        unread = [path.name for path in shards_of(folder, whole.stem) if path != whole]
        if unread and whole.exists():
            names = f"{count_text(len(unread), 'file')} such as {unread[0]}"
            notes.append(f"{whole} is read, but not {names}: to read these instead, move {whole.name} away")
    return notes


def advice_about_names(folder: Path, split: str) -> str:
    """
    What to do about a folder whose token files have other names than those that are read; '' if it contains
    none that could be of the split.
    """
    names = names_in(folder)
    files = sorted(matching(names, "*.bin") + matching(names, "*.npy"))
    others = [name for name in files if name not in ("all.bin", "documents.bin") and not is_of_split(name)]
    likely = [name for name in others if split in name] or (others if split == "train" else [])
    if not likely:
        return ""
    first, target = folder / likely[0], folder / f"{split}{Path(likely[0]).suffix}"
    if problem := about_megatron(first, target):
        return problem
    if len(likely) == 1:
        return f"if {first} contains the token ids, type: mv {first} {target}"
    names = f"{first} and {count_text(len(likely) - 1, 'other file')}"
    return (
        f"{names} are not called {split}.bin, nor {split}_000000.bin, "
        f"{split}_000001.bin and so on: rename them, as in mv {first} {target.with_stem(split + '_000000')}"
    )


def is_of_split(name: str) -> bool:
    """Whether a file belongs to a split by its name."""
    return any(name.startswith(split) or f"_{split}_" in name or f"_{split}." in name for split in SPLITS)


def about_megatron(path: Path, target: Path) -> str:
    """
    What to do about a file of ids that Megatron has written; '' for other files. Such a file contains nothing
    but ids, in a dtype that only the index next to it records.

    Args:
        target: the name under which the file would be read.
    """
    index = path.with_suffix(".idx")
    try:
        start = read_start(index, MEGATRON_DTYPE + 1)[0]
    except ValueError:
        return ""
    if not start.startswith(MEGATRON):
        return ""
    dtype = MEGATRON_DTYPES.get(start[MEGATRON_DTYPE]) if len(start) > MEGATRON_DTYPE else None
    problem = f"{path} has an index of Megatron, {index.name}, which is not read"
    if not dtype:
        return f"{problem}; the ids' dtype is unknown: write them with numpy.save('{target.stem}.npy', ids)"
    commands = [f"mv {index} {index}.unread"]
    if path != target:
        commands.insert(0, f"mv {path} {target}")
    meta, declaration = path.with_name("meta.json"), f'{{"dtype": "{dtype}"}}'
    if meta.exists():
        return f"{problem}: declare {declaration} in {meta}, and type: {' && '.join(commands)}"
    return f"{problem}: type: {' && '.join(commands)} && echo '{declaration}' > {meta}"


def how_to_prepare(folder: Path) -> str:
    """The command that prepares a data set again; '' if its folder does not contain a prepare.py."""
    script = folder / "prepare.py"
    return f"run: python {script}" if os.path.exists(script) else ""


# ------------------------------------------------------------------------------------------------------------
# opening


@dataclass(frozen=True, eq=False, slots=True)
class Shard:
    """A token file that is opened when it is read."""

    path: Path
    header: str
    dtype: np.dtype
    offset: int  # bytes before the first id
    length: int  # ids
    size: int  # bytes
    modified_ns: int

    def __len__(self) -> int:
        """The number of ids."""
        return self.length

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """
        See TokenFile.read. Raises DataError also if the file is missing or is not the one that was there at
        the start of the run.
        """
        return opened(self).read(starts, length)

    def file_at(self, position: int) -> Path:
        """The file that contains the id at `position`: this one."""
        return self.path


@lru_cache(maxsize=MOST_OPEN)
def opened(shard: Shard) -> TokenFile:
    """
    Open a shard. If too many are open, the least recently read one is closed, once no thread reads it.

    Raises:
        DataError: the file is missing or has changed.
    """
    try:
        file = TokenFile(shard.path, shard.dtype, shard.offset)
    except OSError as e:
        raise DataError(f"{shard.path} can no longer be read: {e.strerror}") from e
    status = os.fstat(file.file.fileno())
    if (status.st_size, status.st_mtime_ns) != (shard.size, shard.modified_ns):
        raise DataError(f"{shard.path} has been replaced or changed since the start of the run")
    return file


def open_files(paths: Sequence[Path], declared: str | None, vocab_size: int) -> Tokens:
    """
    Open the files of a split. The beginning of each is read. Whether ids of an undeclared dtype look like ids
    of 16 bits is judged by the first file only.

    Args:
        declared: the dtype that the metadata declares; None: not declared.
        vocab_size: the size in the metadata or the settings; 0: unknown.

    Raises:
        ValueError: a file is empty, truncated or of an unknown format, or the files are of different formats.
    """
    first, folder = paths[0], paths[0].parent
    if problem := about_megatron(first, first):
        raise ValueError(problem)
    shards = find_shards(paths, declared)
    if shards[0].header == NO_HEADER and not declared:
        check_undeclared(first, vocab_size)
    if len(shards) == 1:
        return TokenFile(first, shards[0].dtype, shards[0].offset)
    check_alike(shards)
    return TokenArray(folder / common_name(paths), shards)


def find_shards(paths: Sequence[Path], declared: str | None) -> list[Shard]:
    """
    Read the beginnings of files, several at a time if the file system is slow. Raises ValueError, see
    `find_shard`.
    """
    find, begin = partial(find_shard, declared=declared), time.perf_counter()
    shards = [find(path) for path in paths[:MEASURED]]
    rest = paths[MEASURED:]
    if time.perf_counter() - begin < SLOW_S * len(shards):  # threads would take longer than the disk
        return shards + [find(path) for path in rest]
    with ThreadPoolExecutor(READERS, thread_name_prefix="shards") as threads:
        return shards + list(threads.map(find, rest))


def find_shard(path: Path, declared: str | None) -> Shard:
    """
    Read the beginning of a file.

    Raises:
        ValueError: it cannot be read, is empty or truncated, or does not contain token ids.
    """
    start, status = read_start(path, HEADER_READ)
    found = format_of(path, start, status.st_size, declared)
    size, dtype = status.st_size - found.offset, np.dtype(found.dtype)
    if size == 0 < found.offset:
        raise ValueError(f"{path} contains no tokens, as its header says: delete it, or write it again")
    if size == 0 or size % dtype.itemsize:
        problem = f"{path} contains {size} bytes, not a multiple of {dtype.itemsize} ({dtype})"
        problem = problem if size else f"{path} is empty"
        advice = how_to_prepare(path.parent) or f"write {path} again"
        raise ValueError(f"{problem}: it is truncated, or of a different dtype; {advice}")
    return Shard(
        path, found.header, dtype, found.offset, size // dtype.itemsize, status.st_size, status.st_mtime_ns
    )


def check_alike(shards: Sequence[Shard]) -> None:
    """Raise ValueError if shards have different headers or dtypes: they probably do not belong together."""
    first = shards[0]
    for shard in shards:
        if (shard.header, shard.dtype) != (first.header, first.dtype):
            raise ValueError(
                f"{first.path} contains {first.dtype} and {first.header}, but {shard.path} {shard.dtype} and "
                f"{shard.header}: move the files that do not belong together to separate folders"
            )


def common_name(paths: Sequence[Path]) -> str:
    """How messages call several files: by the beginning and the end that their names share."""
    prefix = os.path.commonprefix([path.name for path in paths])
    return f"{prefix}*{paths[0].suffix}"
