"""metrics.jsonl: a line for each logged step, evaluation and event."""

import errno
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from isogpt.checkpoint.owner import check_owner
from isogpt.common.files import METRICS, as_json, as_record, regular_file, write_whole


class MetricsFile:
    """
    Appends lines to metrics.jsonl in the run's folder.

    The file stays open. If it is not as this run left it, the run checks who owns the folder before it writes
    again, so that two runs never write to one file.

    Args:
        owner: who has claimed the run's folder; '': nobody.
    """

    def __init__(self, config: dict, step: int, owner: str = "") -> None:
        self.path, self.owner = Path(config["out_dir"], METRICS), owner
        self.max_iters, self.eval_interval = config["max_iters"], config["eval_interval"]
        self.open(step)

    def open(self, step: int) -> None:
        """
        Cut the file back to a step and open it. If the evaluation of this step's state was made at the end of
        a run, it will not be repeated, and stays.
        """
        make_separate(self.path)
        repeats_evaluation = step <= self.max_iters and step % self.eval_interval == 0
        cut_back(self.path, step, repeats_evaluation)
        self.open_to_append()

    def open_to_append(self) -> None:
        """Open the file by its name."""
        self.file = open(self.path, "ab", buffering=0)  # unbuffered: a line is written, or there is an error
        self.size = os.fstat(self.file.fileno()).st_size  # as this run leaves the file

    def write(self, record: dict, text: str) -> None:
        """Append a line."""
        if not record:
            return
        record = as_json(record | {"time": datetime.now(UTC).isoformat(timespec="milliseconds")})
        line = f"{json.dumps(record)}\n".encode()
        try:
            self.append(line)
        except OSError:  # for instance, a stale handle (NFS) or a file that was removed
            self.open_again()
            self.append(line)
        if record.get("event") == "rollback":
            self.file.close()
            self.open(record["to"])

    def append(self, line: bytes) -> None:
        """Append a whole line or nothing, since the next line must not follow a torn one."""
        try:
            status = os.fstat(self.file.fileno())
            # somebody has removed the file, so that lines would be lost, or has cut it or written to it
            if status.st_nlink == 0 or status.st_size != self.size:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            if self.file.write(line) < len(line):
                os.ftruncate(self.file.fileno(), status.st_size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.size += len(line)
        except OSError as e:
            e.filename = str(self.path)  # for the message
            raise

    def open_again(self) -> None:
        """Open the file by its name, unless a different run has claimed the folder."""
        check_owner(self.path.parent, self.owner)
        with suppress(OSError):  # a full disk can be reported again when the file is closed
            self.file.close()
        self.open_to_append()


def make_separate(path: Path) -> None:
    """
    Prepare a file for changes in place, which must not show under any other name: a link, and a file with
    several names, are replaced by a copy. If there is no file, it is created.
    """
    if not path.exists():
        path.touch()
    elif path.is_symlink() or path.stat().st_nlink > 1:
        with open(path, "rb", opener=regular_file) as file:
            write_whole(path, file.read())


def cut_back(path: Path, step: int, repeats_evaluation: bool) -> None:
    """
    Cut metrics.jsonl back to a step, in place. Lines of this and later steps, which will be repeated, are
    removed, and so are torn lines among them. Events stay, and so does the last evaluation of this step's
    state, unless the run `repeats_evaluation`. What precedes these lines is neither read nor written.
    """
    with open(path, "r+b", opener=regular_file) as file:
        kept, start, needs_evaluation = [], 0, not repeats_evaluation
        for position, line, record in last_records(file, step):
            if is_before(record, step):
                start = position
            is_evaluation = needs_evaluation and is_evaluation_at(record, step)
            if is_evaluation or is_before(record, step) or "event" in record:
                kept.append(line)
            needs_evaluation = needs_evaluation and not is_evaluation
        file.seek(start)
        file.write(b"".join(line + b"\n" for line in reversed(kept)))
        file.truncate()  # after writing: a kill in between leaves lines twice, and loses none


def last_records(file: BinaryIO, step: int) -> Iterator[tuple[int, bytes, dict]]:
    """
    Read the records at the end of metrics.jsonl, the newest first, back to the last step before `step`;
    yields the position of each line, the line and the record. Lines that are not records are left out.
    """
    for start, line in last_lines(file):
        if (record := as_record(line)) is not None:
            yield start, line, record
            if is_before(record, step):
                return


def last_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Read an open file from its end: yields the position and the text of each line that is not empty."""
    end = file.seek(0, os.SEEK_END)
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if end else b""
    while end > 0:
        start = content.rfind(b"\n", 0, end) + 1
        if start < end:
            yield start, content[start:end]
        end = start - 1


def is_before(record: dict, step: int) -> bool:
    """Whether a record is of a step before `step`, or of the evaluation before such a step."""
    return "event" not in record and record.get("iter", 0) < step


def is_evaluation_at(record: dict, step: int) -> bool:
    """Whether a record is of an evaluation of the state before `step`."""
    return "val_loss" in record and record.get("iter") == step


def evaluation_at(path: Path, step: int) -> dict | None:
    """Return the last evaluation of the state before `step`, if metrics.jsonl has been cut back to `step`."""
    with suppress(FileNotFoundError), open(path, "rb", opener=regular_file) as file:
        for _, _, record in last_records(file, step):
            if is_evaluation_at(record, step):
                return record
    return None
