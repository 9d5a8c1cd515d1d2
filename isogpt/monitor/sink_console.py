"""The console: the lines that a run prints, and the status line on a terminal."""

import sys

from isogpt.common import console
from isogpt.monitor.records import step_line
from isogpt.monitor.status_line import Status, StatusLine


class Console:
    """
    Prints to stdout. On a terminal, a status line takes the place of the lines of steps, see
    console.is_screen. A closed pipe, such as `| head`, costs lines, not the run.
    """

    def __init__(self) -> None:
        self.status_line = StatusLine() if console.is_screen(sys.stdout) else None

    def print(self, text: str) -> None:
        """Print a line."""
        if not (self.status_line.print(f"{text}\n") if self.status_line else console.print_line(text)):
            print(
                "warning: stdout was closed; training continues, see metrics.jsonl",
                file=sys.stderr,
                flush=True,
            )

    def event(self, record: dict, text: str) -> None:
        """Print the sentence about an event, if there is one."""
        if text:
            self.print(text)

    def status(self, status: Status) -> None:
        """Draw the status line."""
        if self.status_line:
            self.status_line.show(status)

    def step(self, record: dict, left_s: float | None) -> None:
        """Print the line of a step."""
        if not self.status_line:
            self.print(step_line(record, left_s))

    def evaluation(self, record: dict, lr: float) -> None:
        """Print the line of an evaluation."""
        if self.status_line:
            self.status_line.val_loss = record["val_loss"]
        losses = f"train loss {record['train_loss']:.4f}, val loss {record['val_loss']:.4f}"
        self.print(f"step {record['iter']}: {losses}")

    def done(self, text: str) -> None:
        """Print the summary of the run."""
        self.close()
        self.print(text)

    def close(self) -> None:
        """Remove the status line."""
        if self.status_line:
            self.status_line.end()
