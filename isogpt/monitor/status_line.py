"""The status line: where a run is, on the last line of a terminal."""

import os
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

from isogpt.common import console
from isogpt.monitor.records import duration

REDRAW_S = 0.1  # steps may be shorter: drawing more often is not seen
COLUMNS = 80  # of a terminal that does not say how wide it is


class Status(NamedTuple):
    """Where a run is after a step."""

    step: int
    last_step: int
    loss: float  # smoothed over the steps
    tokens_per_s: float  # smoothed over the steps
    left_s: float | None  # the estimated seconds until the end of the run; None: not known yet


@dataclass
class StatusLine:
    """
    Draws where a run is in the last line of a terminal, in place. Other lines are printed above.

    The cursor waits at the start of the line, from where console.ERASE erases the line.
    """

    status: Status | None = None
    val_loss: float | None = None
    drawn_at: float = 0.0

    def show(self, status: Status) -> bool:
        """Draw the line unless it was drawn just now. Returns False if the terminal was closed."""
        self.status = status
        if time.monotonic() - self.drawn_at < REDRAW_S:
            return True
        return self.print("")

    def print(self, lines: str) -> bool:
        """Print complete lines above the status line. Returns False if the terminal was closed."""
        self.drawn_at, line = time.monotonic(), ""
        if self.status:
            # in the last column, a terminal would move the cursor to the next row
            line = status_text(self.status, self.val_loss, columns() - 1) + "\r"
        return console.print_line(f"{console.ERASE}{lines}{line}", end="")

    def end(self) -> None:
        """Remove the line."""
        self.status = None
        self.print("")


def columns() -> int:
    """The columns of the terminal now: a window may be resized at any time."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or COLUMNS
    except OSError:  # the terminal was closed
        return COLUMNS


def status_text(status: Status, val_loss: float | None, width: int) -> str:
    """Describe a status in at most `width` characters: the parts that matter least are left out first."""
    percent = 100 * status.step // max(1, status.last_step)
    # (importance, text), in the order in which they are shown
    parts = [
        (5, f"step {status.step}/{status.last_step}"),
        (1, f"{percent}%"),
        (4, f"loss {status.loss:.4f}"),
        (2, "" if val_loss is None else f"val {val_loss:.4f}"),
        (0, f"{shown_speed(status.tokens_per_s)} tokens/s"),
        (3, "" if status.left_s is None else f"{duration(status.left_s)} left"),
    ]
    for least in range(len(parts)):
        text = "  ".join(part for importance, part in parts if importance >= least and part)
        if len(text) <= width:
            return text
    return text[: max(0, width)]


def shown_speed(tokens_per_s: float) -> str:
    """Format a number of tokens in at most seven characters, such as 12,345 or 1.23M."""
    return f"{tokens_per_s:,.0f}" if tokens_per_s < 999_999.5 else f"{tokens_per_s / 1e6:.2f}M"
