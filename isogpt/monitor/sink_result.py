"""result.json: how a run ended, for programs that start runs."""

import json
import math
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from isogpt.checkpoint.folder import RESULT
from isogpt.checkpoint.measures import NONE
from isogpt.checkpoint.owner import check_owner
from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.common.files import as_record, regular_file, write_whole
from isogpt.data.dataset import Dataset
from isogpt.monitor.records import SLOW_STEPS, STARTS, as_json
from isogpt.monitor.sink_metrics import METRICS, is_before, is_evaluation_at

EXIT_REASONS = {"end": "complete", "preempted": "preempted", "failed": "failed"}  # by event
# how many seconds a run that ends waits for the records of earlier launches; a stopped run has little time
PATIENCE_S = {"complete": 60.0, "preempted": 0.5, "failed": 0.5}


@dataclass
class Totals:
    """
    What the records of launches add up to. The means are over logged steps, without the first SLOW_STEPS of
    each launch.
    """

    seconds: float = 0.0  # from the start of each launch to its last logged step or evaluation
    memory_gb: float = 0.0  # the most that a rank used
    step_s: float = 0.0  # of the steps of the means
    step_tokens: float = 0.0  # which these steps read
    mfu_s: float = 0.0  # the sum of mfu * seconds over these steps; nan if the mfu of one of them is unknown
    began: float = 0.0  # time of the last start
    before_start: float = 0.0  # `seconds` then
    first_step: int = 0  # of the last launch

    def add(self, record: dict, at: float) -> None:
        """Add a record that was written at time `at`, in seconds."""
        if record.get("event") in STARTS:
            self.began, self.before_start, self.first_step = at, self.seconds, record["iter"]
        if "event" in record or "iter" not in record:
            return
        self.seconds = self.before_start + at - self.began
        if "step_ms" not in record:
            return
        self.memory_gb = max(self.memory_gb, record["memory_gb_max"])
        if record["iter"] >= self.first_step + SLOW_STEPS:
            step_s = record["step_ms"] / 1e3
            self.step_s += step_s
            self.step_tokens += record["tokens_per_s"] * step_s
            self.mfu_s += step_s * (math.nan if record["mfu"] is None else record["mfu"])

    def summary(self, earlier: "Totals") -> dict:
        """Return the fields of result.json for these launches and `earlier` ones; None: not known."""
        step_s, mfu_s = self.step_s + earlier.step_s, self.mfu_s + earlier.mfu_s
        return {
            "seconds": self.seconds + earlier.seconds,
            "tokens_per_s": (self.step_tokens + earlier.step_tokens) / step_s if step_s else None,
            "memory_gb": max(self.memory_gb, earlier.memory_gb) or None,
            "mfu": mfu_s / step_s if step_s and not math.isnan(mfu_s) else None,
        }


def read_totals(path: Path, step: int, size: int) -> Totals:
    """Return the totals of the first `size` bytes of metrics.jsonl, up to the state before `step`."""
    totals = Totals()
    with open(path, "rb", opener=regular_file) as file:
        for line in file:
            size -= len(line)
            if size < 0:
                break
            record = as_record(line) or {}
            if "event" in record or is_before(record, step) or is_evaluation_at(record, step):
                with suppress(KeyError, TypeError, ValueError):  # it is not a record of a run
                    totals.add(record, datetime.fromisoformat(record["time"]).timestamp())
    return totals


class Result:
    """
    Writes result.json when the run ends, in whatever way. Only a run that is killed leaves none.

    Times and speeds are those of all launches of the run. A thread reads those of earlier launches from
    metrics.jsonl while training goes on.

    Args:
        progress: the run's, at the step at which it continues.
        data: converts the validation loss to bits per byte.
        owner: who has claimed the run's folder; '': nobody, then nothing is written.
    """

    def __init__(self, out_dir: str, progress: Progress, data: Dataset, owner: str) -> None:
        self.folder, self.progress, self.data, self.owner = Path(out_dir), progress, data, owner
        self.content: dict = {}  # of result.json; empty until the run ends
        self.facts: dict = {}  # the event start or resume
        self.launch = Totals()
        self.earlier: Totals | None = None if progress.step else Totals()  # None: not read yet
        self.reader = threading.Thread(target=self.read, args=(progress.step,), daemon=True, name="result")
        try:
            self.size = os.path.getsize(self.folder / METRICS)  # without what this launch will write
        except OSError:
            self.earlier = Totals()
        if self.earlier is None:
            self.reader.start()

    def read(self, step: int) -> None:
        """Read what earlier launches have recorded (in the thread)."""
        try:
            self.earlier = read_totals(self.folder / METRICS, step, self.size)
        except OSError as e:
            console.print_to_stderr(f"warning: {RESULT} will not include the earlier steps: {e}")

    def write(self, record: dict, text: str) -> None:
        """Add up records; write the file at the end."""
        self.launch.add(record, time.time())
        event = record.get("event")
        if event in STARTS:
            self.facts = record
        if event not in EXIT_REASONS:
            return
        self.content = as_json(self.summary(record))
        if self.owner:
            check_owner(self.folder, self.owner)
            write_whole(self.folder / RESULT, json.dumps(self.content, indent=2) + "\n")

    def summary(self, ending: dict) -> dict:
        """Return what result.json contains, from the event that ends the run."""
        p, exit_reason = self.progress, EXIT_REASONS[ending["event"]]
        if self.earlier is None:
            self.reader.join(PATIENCE_S[exit_reason])
        if self.earlier is None:  # what is not known is null
            totals = dict.fromkeys(self.launch.summary(Totals()))
        else:
            totals = self.launch.summary(self.earlier)
        return {
            "val_loss": p.val_loss,
            "best_val_loss": p.best_val_loss if math.isfinite(p.best_val_loss) else None,
            "best_step": p.best_step if p.best_step != NONE else None,
            "bits_per_byte": None if p.val_loss is None else self.data.bits_per_byte(p.val_loss),
            "steps": p.step,
            "tokens": p.tokens,
            **totals,
            "parameters": self.facts.get("parameters"),
            "weights": ending.get("weights"),
            "commit": self.facts.get("commit", ""),
            "changed": self.facts.get("changed", False),
            "exit_reason": exit_reason,
            "reason": ending.get("reason", ""),
        }


class ResultLine:
    """Prints the result as a line of JSON, with print_result, after what other sinks print at the end."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def write(self, record: dict, text: str) -> None:
        """Print the line when the run ends."""
        if record.get("event") in EXIT_REASONS:
            line = json.dumps(self.result.content)
            console.print_line(console.erase_line(sys.stdout) + line, patience_s=console.PATIENCE_S)
