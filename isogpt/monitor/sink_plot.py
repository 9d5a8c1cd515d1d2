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
        self.path = Path(out_dir, "loss.png")
        self.result = ""  # a sentence about the last plot
        self.requests: SimpleQueue[bool] = SimpleQueue()  # for each plot, whether it is the last one
        # one thread for all plots, since the C library would not reuse one thread's memory for the next
        self.thread = threading.Thread(target=self.draw_all, daemon=True, name="plot")
        self.thread.start()

    def write(self, record: dict, text: str) -> None:
        """Ask for a plot if it is time, and tell the user at the end where the plot is."""
        is_end = record.get("event") in CLOSING
        if is_end or ("val_loss" in record and record["iter"] > 0):
            self.requests.put(is_end)
        if is_end:
            self.thread.join(END_S)
            if self.thread.is_alive():
                self.result = f"no plot of the loss curve: drawing it takes more than {END_S} s"
            console.print_line(self.result, patience_s=console.PATIENCE_S)

    def draw_all(self) -> None:
        """Plot what `write` asks for, but not all the time (in the thread)."""
        is_last, not_before = False, 0.0
        while not is_last:
            is_last, began = self.requests.get(), time.monotonic()
            if is_last or began >= not_before:
                try:
                    self.draw()
                    self.result = f"the loss curve: {self.path}"
                except Exception as e:  # matplotlib raises many types
                    self.result = f"no plot of the loss curve: {' '.join(str(e).split())}"
                ended = time.monotonic()
                not_before = ended + PAUSE * (ended - began)

    def draw(self) -> None:
        """Plot the loss curve (in the thread)."""
        folder = self.path.parent
        group = Group(folder.resolve().name, [read_run(folder)])
        pictures.write(pictures.losses_figure([group], "steps"), self.path)
