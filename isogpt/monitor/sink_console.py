"""The console: the lines that a run prints."""

import sys

from isogpt.common import console
from isogpt.monitor.records import step_line


class Console:
    """Prints to stdout. A closed pipe, such as `| head`, costs lines, not the run."""

    def print(self, text: str) -> None:
        """Print a line."""
        if not console.print_line(text):
            print(
                "warning: stdout was closed; training continues, see metrics.jsonl",
                file=sys.stderr,
                flush=True,
            )

    def event(self, record: dict, text: str) -> None:
        """Print the sentence about an event, if there is one."""
        if text:
            self.print(text)

    def step(self, record: dict, left_s: float) -> None:
        """Print the line of a step."""
        self.print(step_line(record, left_s))

    def evaluation(self, record: dict, lr: float) -> None:
        """Print the line of an evaluation."""
        losses = f"train loss {record['train_loss']:.4f}, val loss {record['val_loss']:.4f}"
        self.print(f"step {record['iter']}: {losses}")

    def done(self, text: str) -> None:
        """Print the summary of the run."""
        self.print(text)
