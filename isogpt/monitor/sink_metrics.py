"""metrics.jsonl: a line for each logged step, evaluation and event."""

import errno
import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from isogpt.checkpoint.owner import check_owner
from isogpt.common.files import read_records, write_whole
from isogpt.monitor.records import as_json
from isogpt.monitor.sink_console import Console

METRICS = "metrics.jsonl"


class MetricsFile:
    """
    Appends lines to metrics.jsonl in the run's folder, which `owner` has claimed. Warnings go to the console.

    `interrupted_at` is when the run before a resume wrote its last line, in seconds since the epoch; None if
    this run starts at step 0.
    """

    def __init__(self, config: dict, owner: str, console: Console, step: int) -> None:
        self.out_dir = config["out_dir"]
        self.path = Path(self.out_dir, METRICS)
        self.max_iters, self.eval_interval = config["max_iters"], config["eval_interval"]
        self.owner, self.console = owner, console
        self.is_full = False  # whether a line could not be written
        self.interrupted_at: float | None = None
        self.file: IO[bytes] | None = None
        records = self.rewind(step)
        with suppress(LookupError, TypeError, ValueError):  # there are no records, or not ours
            if step:
                self.interrupted_at = datetime.fromisoformat(records[-1]["time"]).timestamp()

    def rewind(self, step: int) -> list[dict]:
        """
        Cut the file back to a step and open the file; returns the records before the cut.

        Lines of this and later steps, which will be repeated, are removed, and so are torn lines. Events
        stay. The evaluation of this step's state stays if it will not be repeated, because it was made at the
        end of a run.
        """
        if self.file:
            self.file.close()
        records = read_records(self.path)
        kept = [r for r in records if "event" in r or r.get("iter", 0) < step]
        if step > self.max_iters or step % self.eval_interval:
            kept += evaluations_of(records, step)
        write_whole(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self.file = open(self.path, "ab", buffering=0)  # unbuffered: a line is written, or there is an error
        return records

    def event(self, record: dict, text: str) -> None:
        """Record an event."""
        self.write(record)

    def step(self, record: dict, left_s: float | None) -> None:
        """Record a step."""
        self.write(record)

    def evaluation(self, record: dict, lr: float) -> None:
        """Record an evaluation."""
        self.write(record)

    def write(self, record: dict) -> None:
        """Append a line. A full disk costs lines, not the run."""
        if not self.file:
            return
        record = as_json(record | {"time": datetime.now(UTC).isoformat(timespec="milliseconds")})
        line = f"{json.dumps(record)}\n".encode()
        try:
            if os.fstat(self.file.fileno()).st_nlink == 0 and not self.reopen():
                return
            before = os.fstat(self.file.fileno()).st_size
            written = self.file.write(line)
            if written < len(line):  # the disk is full, and the next line must not follow a torn line
                os.ftruncate(self.file.fileno(), before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            if not self.is_full:
                name = self.file.name
                self.console.print(f"warning: {name} cannot be written ({e.strerror}); training continues")
            self.is_full = True

    def reopen(self) -> bool:
        """
        Open the file again after it was deleted or replaced. Returns whether the file still belongs to this
        run: a run that resumes in the same folder replaces the file, and two runs must not write to one file.
        """
        name = self.file.name
        self.file.close()
        self.file = None
        try:
            check_owner(Path(self.out_dir), self.owner)
        except ValueError:
            self.console.print(
                f"warning: a different run was started in {self.out_dir}: this run no longer writes to {name}"
            )
            return False
        self.console.print(f"warning: {name} was deleted: a new file is written from here on")
        self.file = open(name, "ab", buffering=0)
        return True


def evaluations_of(records: list[dict], step: int) -> list[dict]:
    """Return the last evaluation of the state before a step, in a list; an empty list if there is none."""
    return [r for r in records if "val_loss" in r and r.get("iter") == step][-1:]
