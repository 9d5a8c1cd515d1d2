"""The files of a run's folder that tell how it goes: metrics.jsonl, result.json and loss.png."""

import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path

from isogpt.checkpoint.folder import RESULT
from isogpt.checkpoint.measures import NONE
from isogpt.checkpoint.owner import owns
from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.common.files import METRICS, as_json, reason_of, regular_file, write_whole
from isogpt.data.dataset import Dataset
from isogpt.lab import pictures
from isogpt.lab.runs import Group, read_run
from isogpt.monitor.records import CLOSING, FINAL, known

PAUSE = 20  # times as long as a plot takes, until the next one


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
        if not record or not owns(self.path.parent, self.owner):
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps(as_json(record | {"time": now})) + "\n"
        with open(self.path, "a+b", opener=regular_file) as file:
            file.seek(max(0, file.tell() - 1))
            if file.read() not in (b"", b"\n"):  # a kill or a full disk has torn the last line
                line = "\n" + line
            file.write(line.encode())


class Result:
    """
    Writes result.json when the run ends, in whatever way. Only a run that is killed leaves none.

    Args:
        data: converts the validation loss to bits per byte.
        owner: who has claimed the run's folder; '': nobody, then nothing is written.
    """

    def __init__(self, out_dir: str, progress: Progress, data: Dataset, owner: str) -> None:
        self.folder, self.progress, self.data, self.owner = Path(out_dir), progress, data, owner
        self.facts = {"parameters": None, "commit": "", "changed": False}  # of the event start or resume

    def write(self, record: dict, text: str) -> None:
        """Write the file at the end."""
        if "parameters" in record:
            self.facts = {name: record[name] for name in self.facts}
        if record.get("event") in FINAL:
            content = as_json(self.summary(record))
            if self.owner and owns(self.folder, self.owner):
                write_whole(self.folder / RESULT, json.dumps(content, indent=2) + "\n")

    def summary(self, ending: dict) -> dict:
        """Return what result.json contains, from the event that ends the run; None: not known."""
        p, totals = self.progress, self.progress.totals
        timed_s = totals.timed_s or math.nan
        speeds = {"tokens_per_s": totals.timed_tokens / timed_s, "mfu": totals.timed_mfu / timed_s}
        return {
            "val_loss": p.val_loss,
            "bits_per_byte": None if p.val_loss is None else self.data.bits_per_byte(p.val_loss),
            **known(speeds | {"best_val_loss": p.best_val_loss}),
            "best_step": p.best_step if p.best_step != NONE else None,
            "steps": p.step,
            "tokens": p.tokens,
            "seconds": p.seconds,
            "memory_gb": totals.memory_gb or None,
            **self.facts,
            "weights": ending.get("weights"),
            "exit_reason": ending["event"].replace("end", "complete"),
            "reason": ending.get("reason", ""),
        }


class Plot:
    """
    Plots the losses in metrics.jsonl after evaluations, but not all the time, and at the end, when it tells
    the user where the plot is.
    """

    def __init__(self, out_dir: str) -> None:
        self.path = Path(out_dir, "loss.png")
        self.not_before = 0.0

    def write(self, record: dict, text: str) -> None:
        """Plot after an evaluation and at the end."""
        is_end, began = record.get("event") in CLOSING, time.monotonic()
        is_due = began >= self.not_before and record.get("iter") and "val_loss" in record
        if is_end or is_due:
            try:
                self.draw()
                result = f"the loss curve: {self.path}"
            except Exception as e:  # matplotlib raises many types
                result = f"no plot of the loss curve: {reason_of(e)}"
            self.not_before = time.monotonic() + PAUSE * (time.monotonic() - began)
        if is_end:
            console.print_line(result, patience_s=console.PATIENCE_S)

    def draw(self) -> None:
        """Plot the loss curve."""
        folder = self.path.parent
        group = Group(folder.resolve().name, [read_run(folder)])
        pictures.write(pictures.losses_figure([group], "steps"), self.path)
