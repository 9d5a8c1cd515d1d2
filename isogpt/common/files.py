"""Write files so that a kill cannot leave half a file, and read files that may be damaged or hostile."""

import errno
import hashlib
import io
import json
import operator
import os
import pickle
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from isogpt.common.console import RANKS_SHOWN, shortened

REPOSITORY = Path(__file__).resolve().parents[2]  # the folder of the scripts
MOST_VALUES = 2_000_000  # in a pickle, such as the ids of tokens in a meta.pkl
METRICS = "metrics.jsonl"  # a line for each logged step, evaluation and event of a run


def path_of_script(name: str) -> str:
    """A script of data/, as it is typed in the working folder."""
    return os.path.relpath(REPOSITORY / "data" / name)


# ------------------------------------------------------------------------------------------------------------
# writing


def temporary_name(path: Path) -> Path:
    """
    A name beside `path` that nobody can foresee, since a link of this name would lead to a different file.
    """
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def free_name(out: Path, name: str, first: int = 0) -> Path:
    """The first path of `out`/`name` (unless `first` is 1), name_1, name_2, ... that does not exist."""
    for n in count(first):
        path = out / (f"{name}_{n}" if n else name)
        if not os.path.lexists(path):
            return path


def remove(path: Path) -> None:
    """Remove a folder with its content, or a file or a link, but not what the link leads to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


class HashedFile(io.BufferedWriter):
    """
    A new file that is hashed while it is written, from its beginning to its end: what a disk or a network
    changes later does not match. torch.save and torch.distributed.checkpoint write to it as to a file.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(io.FileIO(path, "x"))  # x: it does not follow a link (O_EXCL)
        self.sha256, self.bytes = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash `data`."""
        self.sha256.update(data)
        self.bytes += memoryview(data).nbytes
        return super().write(data)

    def fileno(self) -> int:
        """The descriptor, for fsync, which does not know what is still buffered here."""
        self.flush()
        return super().fileno()

    def entry(self) -> dict:
        """The entry of a checkpoint's manifest, as manifest.entry_of reads it from a file."""
        return {"bytes": self.bytes, "sha256": self.sha256.hexdigest()}


def write_whole(path: Path, content: str | bytes) -> None:
    """
    Write a file: after a kill or a power failure, `path` contains either the old content or all of the new
    content. If `path` is a link, the file replaces the link.
    """
    other = temporary_name(path)
    try:
        with HashedFile(other) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            os.fsync(file.fileno())
        os.replace(other, path)
    finally:
        other.unlink(missing_ok=True)  # after an error, such as a full disk
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """
    Make renames in this folder survive a power failure. Does nothing where the file system (CIFS, some of
    FUSE) or Windows cannot sync a folder: files are complete there too, but a power failure may undo the
    newest renames.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock(file: IO[bytes]) -> bool | None:
    """
    Lock an open file for as long as it is open; False if a different process has locked it, None if there are
    no locks, as on Windows and on some file systems.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as e:
        return False if isinstance(e, BlockingIOError) else None
    return True


# ------------------------------------------------------------------------------------------------------------
# opening and reading


def regular_file(path: str | os.PathLike, flags: int) -> int:
    """
    Open a file that somebody else may have made: the opener of `open`. A FIFO, a socket or a device could
    wait forever, which not even a signal ends, and what is written to a link would change a different file.

    Raises:
        OSError: it is not a regular file, or a link if it is opened to be written to.
    """
    refusal = OSError(errno.EINVAL, "it is not a regular file", str(path))
    if flags & (os.O_WRONLY | os.O_RDWR):
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise refusal
        flags |= getattr(os, "O_NOFOLLOW", 0)  # should it become a link now
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return descriptor


def read_utf8(path: Path) -> str:
    """Read a file in UTF-8. Raises OSError or ValueError if this is not possible."""
    with open(path, encoding="utf-8", opener=regular_file) as f:
        return f.read()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that somebody else may have written. Raises ValueError if it is damaged or nested deeply."""
    with suppress(RecursionError):
        return json.loads(text)
    raise ValueError("it is nested too deeply")


def reason_of(error: BaseException) -> str:
    """
    Return in one line why writing or reading files failed: the OSError behind an error, or else the error
    itself. Libraries replace the OSError of a full disk by different errors. For a CheckpointException, whose
    text is a traceback, return each rank's reason.
    """
    if failures := getattr(error, "failures", None):  # rank -> (the rank's error, traceback)
        reasons = [f"{reason_of(failure)} (rank {rank})" for rank, (failure, _) in sorted(failures.items())]
        return shortened(reasons, RANKS_SHOWN, "; ")
    cause = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(cause or error).split()) or type(error).__name__


def as_json(record: dict) -> dict:
    """Return the record with nan and infinity as the strings 'nan' and 'inf', since JSON has neither."""
    return json.loads(json.dumps(record), parse_constant=lambda name: str(float(name)))


def as_record(line: str | bytes) -> dict | None:
    """The record in a line of a metrics.jsonl; None if it is not a record, such as a line torn by a kill."""
    with suppress(ValueError):
        record = parse_json(line)
        return record if isinstance(record, dict) else None
    return None


def read_records(path: Path) -> Iterator[dict]:
    """Read the records of a metrics.jsonl one by one; nothing if the file is missing."""
    with suppress(FileNotFoundError), open(path, errors="replace", opener=regular_file) as f:
        yield from filter(None, map(as_record, f))


def check_extent(content: object) -> object:
    """
    Return what a pickle contains. Raises ValueError if it has more than MOST_VALUES values when it is written
    out: a list can contain another one twice, and so on, until a few hundred bytes take forever to print,
    copy or compare.
    """
    waiting, count = [(content,)], 0
    while waiting:
        part = waiting.pop()
        values = [*part, *part.values()] if isinstance(part, dict) else part
        waiting += [value for value in values if isinstance(value, dict | list | tuple | set | frozenset)]
        count += len(values)
        if count > MOST_VALUES:
            raise ValueError(f"it contains more than {MOST_VALUES:,} values")
    return content


def load_pickle(path: Path, allowed: dict[str, set[str]]) -> object:
    """
    Read a pickle of builtin values and of the classes in `allowed`, {module: names}. Nothing in the pickle
    runs.

    Raises:
        pickle.UnpicklingError: the pickle names something else. A damaged file raises nearly anything.
        ValueError: it is too long, see check_extent.
    """

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            # Python 3.11.0 to 3.11.3 pickles a member of an enum as an attribute, but an item is the same
            if (module, name) == ("builtins", "getattr"):
                return operator.getitem
            if name in allowed.get(module, ()):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"it would run {module}.{name}; only plain values are read")

    with open(path, "rb", opener=regular_file) as f:
        return check_extent(PlainUnpickler(f).load())
