"""metrics.jsonl: a line for each logged step, evaluation and event."""

import errno
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from isogpt.common import console
from isogpt.common.files import read_records, write_whole
from isogpt.monitor.records import as_json

METRICS = "metrics.jsonl"


class MetricsFile:
    """
    Appends lines to metrics.jsonl in the run's folder.

    The file stays open, and is replaced by a run that starts in the same folder: two runs never write to one
    file.
    """

    def __init__(self, config: dict, step: int) -> None:
        self.path = Path(config["out_dir"], METRICS)
        self.max_iters, self.eval_interval = config["max_iters"], config["eval_interval"]
        self.is_full = False  # whether a line could not be written
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
        """Append a line. A full disk costs lines, not the run."""
        if not record:
            return
        record = as_json(record | {"time": datetime.now(UTC).isoformat(timespec="milliseconds")})
        line = f"{json.dumps(record)}\n".encode()
        try:
            before = os.fstat(self.file.fileno()).st_size
            if self.file.write(line) < len(line):  # the next line must not follow a torn line
                os.ftruncate(self.file.fileno(), before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            if not self.is_full:
                problem = f"{self.path} cannot be written ({e.strerror}); training continues"
                console.print_to_stderr(f"warning: {problem}")
            self.is_full = True
        if record.get("event") == "rollback":
            self.file.close()
            self.open(record["to"])


def evaluations_of(records: list[dict], step: int) -> list[dict]:
    """Return the last evaluation of the state before a step, in a list; an empty list if there is none."""
    return [r for r in records if "val_loss" in r and r.get("iter") == step][-1:]
