"""The plot of the loss curve, loss.png."""

import threading
import time
from pathlib import Path
from queue import SimpleQueue

from isogpt.common import console
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
        self.out_dir = Path(out_dir)
        self.not_before = 0.0  # when the next plot may begin
        self.result = ""  # a sentence about the last plot
        self.requests: SimpleQueue[None] = SimpleQueue()
        self.is_idle = threading.Event()
        self.is_idle.set()
        # one thread for all plots, since the C library would not reuse one thread's memory for the next
        threading.Thread(target=self.draw_all, daemon=True, name="plot").start()

    def write(self, record: dict, text: str) -> None:
        """Plot the losses if it is time, and tell the user at the end where the plot is."""
        is_end = record.get("event") in CLOSING
        is_due = "val_loss" in record and record["iter"] > 0 and time.monotonic() > self.not_before
        if is_end:
            self.is_idle.wait(END_S)
        if (is_due or is_end) and self.is_idle.is_set():
            self.is_idle.clear()
            self.requests.put(None)
        if is_end:
            if not self.is_idle.wait(END_S):
                self.result = f"no plot of the loss curve: drawing it takes more than {END_S} s"
            console.print_line(self.result, patience_s=console.PATIENCE_S)

    def draw_all(self) -> None:
        """Plot each time that `write` asks for it (in the thread)."""
        while True:
            self.requests.get()
            began = time.monotonic()
            try:
                self.result = f"the loss curve: {self.draw()}"
            except Exception as e:  # matplotlib raises many types
                self.result = f"no plot of the loss curve: {' '.join(str(e).split())}"
            self.not_before = time.monotonic() + PAUSE * (time.monotonic() - began)
            self.is_idle.set()

    def draw(self) -> Path:
        """Plot the loss curve. Returns the path."""
        return pictures.draw([Group("", [read_run(self.out_dir)])], "steps", self.out_dir / "loss.png")
