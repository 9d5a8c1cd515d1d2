"""The plot of the loss curve, loss.png."""

import threading
import time
from pathlib import Path

from isogpt.common import console
from isogpt.common.files import reason_of
from isogpt.lab import pictures
from isogpt.lab.runs import Group, read_run
from isogpt.monitor.records import CLOSING

PAUSE = 20  # times as long as a plot takes, until the next one
END_S = 60  # seconds that the end of a run waits for a plot


class Plot:
    """
    Plots the losses in metrics.jsonl after evaluations and at the end, in a thread, so that training goes on
    meanwhile.
    """

    def __init__(self, out_dir: str) -> None:
        self.path = Path(out_dir, "loss.png")
        self.result = f"no plot of the loss curve: drawing it takes more than {END_S} s"
        self.asked, self.ended = threading.Event(), threading.Event()
        # one thread for all plots, since the C library would not reuse one thread's memory for the next
        self.thread = threading.Thread(target=self.draw_all, daemon=True, name="plot")
        self.thread.start()

    def write(self, record: dict, text: str) -> None:
        """Ask for a plot after an evaluation, and at the end tell the user where the plot is."""
        if record.get("iter") and "val_loss" in record:
            self.asked.set()
        if record.get("event") in CLOSING:
            self.ended.set()
            self.asked.set()
            self.thread.join(END_S)
            console.print_line(self.result, patience_s=console.PATIENCE_S)

    def draw_all(self) -> None:
        """Plot what `write` asks for, but not all the time, and last of all at the end (in the thread)."""
        is_last, pause = False, 0.0
        while not is_last:
            self.asked.wait()
            self.asked.clear()
            is_last, began = self.ended.wait(pause), time.monotonic()
            try:
                self.draw()
                self.result = f"the loss curve: {self.path}"
            except Exception as e:  # matplotlib raises many types
                self.result = f"no plot of the loss curve: {reason_of(e)}"
            pause = PAUSE * (time.monotonic() - began)

    def draw(self) -> None:
        """Plot the loss curve (in the thread)."""
        run = read_run(self.path.parent)
        pictures.write(pictures.losses_figure([Group("", [run])], "steps"), self.path)
