"""result.json: how a run ended, for programs that start runs."""

import json
import math
import sys
from pathlib import Path

from isogpt.checkpoint.folder import RESULT
from isogpt.checkpoint.measures import NONE
from isogpt.checkpoint.owner import check_owner
from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.common.files import as_json, write_whole
from isogpt.data.dataset import Dataset
from isogpt.monitor.records import STARTS

EXIT_REASONS = {"end": "complete", "preempted": "preempted", "failed": "failed"}  # by event


class Result:
    """
    Writes result.json when the run ends, in whatever way. Only a run that is killed leaves none.

    Args:
        data: converts the validation loss to bits per byte.
        owner: who has claimed the run's folder; '': nobody, then nothing is written.
    """

    def __init__(self, out_dir: str, progress: Progress, data: Dataset, owner: str) -> None:
        self.folder, self.progress, self.data, self.owner = Path(out_dir), progress, data, owner
        self.content: dict = {}  # of result.json; empty until the run ends
        self.facts = {"parameters": None, "commit": "", "changed": False}  # of the event start or resume

    def write(self, record: dict, text: str) -> None:
        """Write the file at the end."""
        event = record.get("event")
        if event in STARTS:
            self.facts = {name: record[name] for name in self.facts}
        if event in EXIT_REASONS:
            self.content = as_json(self.summary(record))
            if self.owner:
                check_owner(self.folder, self.owner)
                write_whole(self.folder / RESULT, json.dumps(self.content, indent=2) + "\n")

    def summary(self, ending: dict) -> dict:
        """Return what result.json contains, from the event that ends the run; None: not known."""
        p, totals = self.progress, self.progress.totals
        timed_s = totals.timed_s or math.nan
        numbers = {
            "best_val_loss": p.best_val_loss,
            "tokens_per_s": totals.timed_tokens / timed_s,
            "mfu": totals.timed_mfu / timed_s,
        }
        return {
            "val_loss": p.val_loss,
            "bits_per_byte": None if p.val_loss is None else self.data.bits_per_byte(p.val_loss),
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "best_step": p.best_step if p.best_step != NONE else None,
            "steps": p.step,
            "tokens": p.tokens,
            "seconds": p.seconds,
            "memory_gb": totals.memory_gb or None,
            **self.facts,
            "weights": ending.get("weights"),
            "exit_reason": EXIT_REASONS[ending["event"]],
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
