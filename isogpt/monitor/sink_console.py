"""The console: the lines that a run prints, and the status line on a terminal."""

import shutil
import sys
import time

from isogpt.common import console
from isogpt.common.console import duration
from isogpt.monitor.records import CLOSING, STARTS, evaluation_line, step_line

REDRAW_S = 0.1  # steps may be shorter, but nobody would see them drawn more often


class Console:
    """
    Prints to stdout. Lines are lost, but training goes on, if a pipe is closed, such as `| head`, a disk is
    full, or a terminal was stopped with Ctrl-S.

    On a terminal (console.erase_line), the newest step is drawn in place in the last line, and other lines
    are printed above it. The cursor waits at the start of this line, from where console.ERASE erases it.
    """

    def __init__(self) -> None:
        self.max_iters = 0  # of the event start or resume
        self.has_status = console.erase_line(sys.stdout) != ""
        self.status = ""
        self.val_loss: float | None = None
        self.drawn_at = 0.0
        self.is_blocked = False  # whether the last line was lost because stdout did not take it in time

    def write(self, record: dict, text: str) -> None:
        """Print the line of a record, if there is one."""
        is_step = "step_ms" in record
        if record.get("event") in STARTS:
            self.max_iters = record["config"]["max_iters"]
        if "val_loss" in record:
            self.val_loss = record["val_loss"]
            text = evaluation_line(record)
        elif is_step and not self.has_status:
            text = step_line(record)
        output = console.visible(text, but="\n\t") + "\n" if text else ""
        if self.has_status:
            if is_step:
                self.status = status_text(record, self.max_iters, self.val_loss)
                if time.monotonic() - self.drawn_at < REDRAW_S:
                    return
            elif record.get("event") in CLOSING:
                self.status = ""
            self.drawn_at = time.monotonic()
            # in the last column, a terminal would move the cursor to the next row
            status = self.status[: shutil.get_terminal_size().columns - 1]
            output = f"{console.ERASE}{output}{status}\r"
        if not output:
            return
        error = console.print_line(output, "", 0 if self.is_blocked else console.PATIENCE_S)
        self.is_blocked = isinstance(error, TimeoutError)
        if error and error.errno in console.CLOSED:  # said once: what follows is discarded
            console.print_to_stderr("warning: stdout was closed; training continues, see metrics.jsonl")
        elif error:
            if record.get("event") in CLOSING:
                console.discard_output()  # else Python would report the lines again, and exit with status 120
            raise error


def status_text(record: dict, max_iters: int, val_loss: float | None) -> str:
    """The status line, of which a narrow terminal shows the beginning."""
    parts = [f"step {record['iter']}/{max_iters}", f"loss {record['loss']:.4f}"]
    if record["left_s"] is not None:
        parts.append(f"{duration(record['left_s'])} left")
    if val_loss is not None:
        parts.append(f"val {val_loss:.4f}")
    return "  ".join([*parts, f"{record['tokens_per_s']:,.0f} tokens/s"])
