"""Write files so that a kill cannot leave half a file, and read files that may be damaged or hostile."""

import errno
import hashlib
import json
import os
import pickle
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from enum import EnumMeta
from itertools import count
from pathlib import Path
from typing import IO, BinaryIO

from isogpt.common.console import RANKS_SHOWN, ranks_text, shortened

# what file systems that cannot sync a folder raise, such as CIFS and some of FUSE
CANNOT_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM)
# what file systems without locks raise; NFS locks no folders (EBADF)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
REPOSITORY = Path(__file__).resolve().parents[2]  # the folder of the scripts
BLOCK = 2**16  # bytes that are read at once from the end of a file
LARGEST_TEXT = 2**28  # bytes of a file that is read as a whole
TEMPORARY = re.compile(r".+\.[0-9a-f]{16}\.tmp")  # see temporary_name


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
    return next(p for n in count(first) if not os.path.lexists(p := out / (f"{name}_{n}" if n else name)))


def remove(path: Path) -> None:
    """Remove a folder with its content, or a file or a link, but not what the link leads to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def check_no_link(folder: Path) -> None:
    """
    Raise OSError if a link has taken the place of a folder to write to. It is not removed: other ranks may
    have created the folder, and in a folder with the sticky bit only the owner of a link may remove it.
    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(folder))


def write_whole(path: Path, content: str | bytes | BinaryIO) -> None:
    """
    Write a file, or copy an open file: after a kill or a power failure, `path` contains either the old
    content or all of the new content. If `path` is a link, the file replaces the link.
    """
    other = temporary_name(path)
    try:
        with open(other, "xb") as f:  # x: it does not follow a link (O_EXCL)
            if isinstance(content, str | bytes):
                f.write(content.encode() if isinstance(content, str) else content)
            else:
                shutil.copyfileobj(content, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(other, path)
    except OSError as e:
        e.filename = e.filename or str(path)  # a full disk names no file
        raise
    finally:
        other.unlink(missing_ok=True)  # after an error, such as a full disk
    sync_folder(path.parent)


class HashedFile:
    """
    A new file that is hashed while it is written, from its beginning to its end: what a disk or a network
    changes later does not match. torch.save and torch.distributed.checkpoint write to it as to a file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash `data`."""
        self.sha256.update(data)
        self.bytes += memoryview(data).nbytes
        return self.file.write(data)

    def tell(self) -> int:
        """The number of bytes so far."""
        return self.bytes

    def flush(self) -> None:
        """Pass what is buffered to the operating system."""
        self.file.flush()

    def fileno(self) -> int:
        """The descriptor, for fsync, which does not know what is still buffered here."""
        self.file.flush()
        return self.file.fileno()

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def entry(self) -> dict:
        """The entry of a checkpoint's manifest, as manifest.entry_of reads it from a file."""
        return {"bytes": self.bytes, "sha256": self.sha256.hexdigest()}


def make_separate(path: Path) -> None:
    """
    Prepare a file for changes in place, which must not show under any other name. A link, a file with several
    names and a file that this user may not change are replaced by a copy. If there is no file, it is created.
    """
    with suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and os.access(path, os.W_OK):
            return
    try:
        with open(path, "rb", opener=regular_file) as original:
            write_whole(path, original)
    except FileNotFoundError:
        write_whole(path, b"")


def record(path: Path, job: dict, value: object) -> None:
    """
    Record a value for later attempts at the same job: out/layout.json contains the keys "layout" and "job".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({path.stem: value, "job": job}))


def sync_folder(folder: Path) -> None:
    """
    Make renames in this folder survive a power failure. Does nothing where the file system (or Windows)
    cannot sync a folder: files are complete there too, but a power failure may undo the newest renames.
    """
    if os.name != "posix":
        return
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in CANNOT_SYNC:
            e.filename = e.filename or str(folder)  # fsync names no file
            raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def lock(file: IO[bytes] | int) -> bool:
    """
    Lock an open file, or the descriptor of a folder, for as long as it is open; False if a different process
    has locked it. On a file system without locks, nothing is locked.
    """
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise
    return True


# ------------------------------------------------------------------------------------------------------------
# reading


def regular_file(path: str | os.PathLike, flags: int) -> int:
    """
    Open a file that somebody else may have written: the opener of `open`. Reading from a FIFO, a socket or a
    device could wait forever, which not even a signal ends.

    Raises:
        OSError: it is not a regular file.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def check_regular(path: Path) -> None:
    """Raise OSError if a file that another library opens is missing or not a regular file."""
    os.close(regular_file(path, os.O_RDONLY))


def read_utf8(path: Path) -> str:
    """Read a file in UTF-8. Raises OSError or ValueError if this is not possible."""
    with open(path, encoding="utf-8", opener=regular_file) as f:
        if (size := os.fstat(f.fileno()).st_size) > LARGEST_TEXT:
            raise ValueError(f"{path} is too large to be read: {size:,} bytes")
        return f.read()


def parse_json(text: str | bytes) -> object:
    """Parse JSON. Raises ValueError also if it is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("the JSON is nested too deeply") from e


def reason_of(error: BaseException) -> str:
    """
    Return in one line why writing or reading files failed: the OSError behind an error, or else the error
    itself. Libraries replace the OSError of a full disk by different errors. For a CheckpointException, whose
    text is a traceback, return each reason with the ranks that failed for it.
    """
    if failures := getattr(error, "failures", None):  # rank -> (the rank's error, traceback)
        ranks_of = {}
        for rank, (failure, _) in sorted(failures.items()):
            ranks_of.setdefault(reason_of(failure), []).append(rank)
        is_alone = list(failures) == [0]  # rank 0, which reports, or a process without others
        reasons = [
            reason if is_alone else f"{reason} ({ranks_text(ranks)})" for reason, ranks in ranks_of.items()
        ]
        return shortened(reasons, RANKS_SHOWN, "; ")
    chain = [error]
    while (behind := chain[-1].__cause__ or chain[-1].__context__) and behind not in chain:
        chain.append(behind)
    cause = next((e for e in chain if isinstance(e, OSError)), error)
    return " ".join(str(cause).split()) or type(cause).__name__


def about_pointer(path: Path) -> str:
    """What to do about a file that is a pointer of Git LFS, not the file itself; '' for other files."""
    with suppress(OSError), open(path, "rb", opener=regular_file) as f:
        if f.read(32).startswith(b"version https://git-lfs"):
            return f"a pointer of Git LFS, not the file itself: run git lfs pull in {path.parent}"
    return ""


def recorded(path: Path, job: dict) -> object | None:
    """What `record` wrote for the same job; None if there is nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = parse_json(read_utf8(path))
        return content[path.stem] if content["job"] == job else None


def as_record(line: str | bytes) -> dict | None:
    """The record in a line of a metrics.jsonl; None if it is not a record, such as a line torn by a kill."""
    with suppress(ValueError):
        record = parse_json(line)
        if isinstance(record, dict) and isinstance(record.get("iter", 0), int):
            return record
    return None


def iterate_records(path: Path) -> Iterator[dict]:
    """Read the records of a metrics.jsonl one by one; nothing if the file is missing."""
    with suppress(FileNotFoundError), open(path, errors="replace", opener=regular_file) as f:
        for line in f:
            if (record := as_record(line)) is not None:
                yield record


def read_records(path: Path) -> list[dict]:
    """
    Read all records of a metrics.jsonl, which takes more memory the more steps there are, unlike
    `last_lines`.
    """
    return list(iterate_records(path))


def last_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Read an open file from its end: yields the position and the text of each line that is not empty."""
    start, first = file.seek(0, os.SEEK_END), b""  # `first` may begin before `start`
    while start > 0:
        size = min(start, max(BLOCK, len(first)))  # twice as much each time until a long line is complete
        start -= size
        file.seek(start)
        block = file.read(size) + first
        first, newline, rest = block.partition(b"\n")
        end = start + len(block)
        for line in reversed(rest.split(b"\n") if newline else []):
            if line:
                yield end - len(line), line
            end -= len(line) + 1
    if first:
        yield 0, first


def enum_member(kind: type, name: str) -> object:
    """A member of an enum, the only attribute that a pickle may read."""
    if not isinstance(kind, EnumMeta):
        raise pickle.UnpicklingError(f"it would read {name} of {kind!r}; only plain values are read")
    return kind[name]


def load_pickle(path: Path, allowed: dict[str, set[str]]) -> object:
    """
    Read a pickle of builtin values and of the classes in `allowed`, {module: names}. Nothing in the pickle
    runs.

    Raises:
        pickle.UnpicklingError: the pickle names something else. A damaged file raises nearly anything.
    """

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            # how Python 3.11.0 to 3.11.3 pickles an enum's members
            if (module, name) == ("builtins", "getattr"):
                return enum_member
            if name in allowed.get(module, ()):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"it would run {module}.{name}; only plain values are read")

    with open(path, "rb", opener=regular_file) as f:
        return PlainUnpickler(f).load()
