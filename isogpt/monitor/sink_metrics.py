"""metrics.jsonl: a line for each logged step, evaluation and event."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from isogpt.checkpoint.owner import check_owner
from isogpt.common.files import METRICS, as_json


class MetricsFile:
    """
    Appends lines to metrics.jsonl in the run's folder, unless a different run has claimed it.

    Nothing is removed: a resumed run writes the steps that it repeats again, and the last record of a step
    counts.

    Args:
        owner: who has claimed the run's folder; '': nobody.
    """

    def __init__(self, out_dir: str, owner: str = "") -> None:
        self.path, self.owner = Path(out_dir, METRICS), owner

    def write(self, record: dict, text: str) -> None:
        """Append a line. The file is opened by its name each time, since it may have been removed."""
        if not record:
            return
        check_owner(self.path.parent, self.owner)
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps(as_json(record | {"time": time})) + "\n"
        with open(self.path, "a+b", opener=no_link) as file:
            file.seek(max(0, file.tell() - 1))
            if file.read() not in (b"", b"\n"):  # a kill or a full disk has torn the last line
                line = "\n" + line
            file.write(line.encode())


def no_link(path: str, flags: int) -> int:
    """Open a file, but not through a link, which may lead to a file of somebody else."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
