"""The console: the lines that a run prints, and the status line on a terminal."""

import shutil
import sys

from isogpt.common import console
from isogpt.monitor.records import CLOSING


class Console:
    """
    Prints to stdout. Lines are lost, but training goes on, if a pipe is closed, such as `| head`, a disk is
    full, or a terminal was stopped with Ctrl-S.

    On a terminal (console.erase_line), the newest step is drawn in place in the last line, and other lines
    are printed above it. The cursor waits at the start of this line, from where console.ERASE erases it.
    """

    def __init__(self) -> None:
        self.has_status = console.erase_line(sys.stdout) != ""
        self.status = ""
        self.is_blocked = False  # whether the last line was lost because stdout did not take it in time

    def write(self, record: dict, text: str) -> None:
        """Print the line of a record, if there is one. Raises why it was lost."""
        is_end = record.get("event") in CLOSING
        line = console.visible(text, but="\n\t")
        output = f"{line}\n" if line else ""
        if self.has_status:
            if "step_ms" in record:
                self.status, output = line, ""
            # in the last column, a terminal would move the cursor to the next row
            self.status = "" if is_end else self.status[: shutil.get_terminal_size().columns - 1]
            output = f"{console.ERASE}{output}{self.status}\r"
        error = console.print_line(output, "", 0 if self.is_blocked else console.PATIENCE_S)
        self.is_blocked = isinstance(error, TimeoutError)
        if error and is_end:
            console.discard_output()  # else Python would report the lines again, and exit with status 120
        if error:
            raise error
