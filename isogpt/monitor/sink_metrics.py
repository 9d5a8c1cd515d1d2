"""metrics.jsonl: a line for each logged step, evaluation and event."""

import errno
import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from isogpt.checkpoint.owner import check_owner
from isogpt.common.files import read_records, write_whole
from isogpt.monitor.records import as_json

METRICS = "metrics.jsonl"


class MetricsFile:
    """
    Appends lines to metrics.jsonl in the run's folder.

    The file stays open, and is replaced by a run that starts in the same folder: two runs never write to one
    file.

    Args:
        owner: who has claimed the run's folder; '': nobody.
    """

    def __init__(self, config: dict, step: int, owner: str = "") -> None:
        self.path, self.owner = Path(config["out_dir"], METRICS), owner
        self.max_iters, self.eval_interval = config["max_iters"], config["eval_interval"]
        self.open(step)

    def open(self, step: int) -> None:
        """
        Cut the file back to a step and open the file.

        Lines of this and later steps, which will be repeated, are removed, and so are torn lines. Events
        stay. The evaluation of this step's state stays if it will not be repeated, because it was made at the
        end of a run.
        """
        records = read_records(self.path)
        kept = [r for r in records if "event" in r or r.get("iter", 0) < step]
        if step > self.max_iters or step % self.eval_interval:
            kept += evaluations_of(records, step)
        write_whole(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self.file = open(self.path, "ab", buffering=0)  # unbuffered: a line is written, or there is an error

    def write(self, record: dict, text: str) -> None:
        """Append a line."""
        if not record:
            return
        record = as_json(record | {"time": datetime.now(UTC).isoformat(timespec="milliseconds")})
        line = f"{json.dumps(record)}\n".encode()
        try:
            self.append(line)
        except OSError:  # of a stale handle (NFS) or a file that was removed, for instance
            self.open_again()
            self.append(line)
        if record.get("event") == "rollback":
            self.file.close()
            self.open(record["to"])

    def append(self, line: bytes) -> None:
        """Append a line, or nothing: the next line must not follow a torn line."""
        try:
            status = os.fstat(self.file.fileno())
            if status.st_nlink == 0:  # somebody has removed it: the lines would be lost
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            if self.file.write(line) < len(line):
                os.ftruncate(self.file.fileno(), status.st_size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            e.filename = str(self.path)  # for the message
            raise

    def open_again(self) -> None:
        """Open the file by its name, unless a different run has claimed the folder and replaced the file."""
        check_owner(self.path.parent, self.owner)
        with suppress(OSError):  # a full disk can be reported again when the file is closed
            self.file.close()
        self.file = open(self.path, "ab", buffering=0)


def evaluations_of(records: list[dict], step: int) -> list[dict]:
    """Return the last evaluation of the state before a step, in a list; an empty list if there is none."""
    return [r for r in records if "val_loss" in r and r.get("iter") == step][-1:]
