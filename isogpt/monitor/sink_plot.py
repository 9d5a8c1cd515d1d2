"""The plot of the loss curve, loss.png."""

import io
import math
import os
import threading
import time
import warnings
from pathlib import Path
from queue import SimpleQueue

from isogpt.common import console
from isogpt.common.files import write_whole
from isogpt.common.packages import needed_by
from isogpt.monitor.curves import Curves, Points, read_curves
from isogpt.monitor.records import CLOSING
from isogpt.monitor.sink_metrics import METRICS

FEW = 20  # so few points are not smoothed
END_S = 60  # seconds that the end of a run waits for a plot


class Plot:
    """
    Plots the losses after each evaluation and at the end, in a thread, so that training goes on meanwhile. An
    evaluation that ends during a plot is drawn by the next one. The first plot after a resume also reads
    metrics.jsonl, once.

    Args:
        step: at which the run continues; metrics.jsonl contains the steps before.
    """

    def __init__(self, out_dir: str, step: int) -> None:
        self.out_dir = Path(out_dir)
        # a notebook's kernel sets a backend that may be installed only in its environment
        os.environ["MPLBACKEND"] = "agg"
        self.curves, self.began = Curves(), step  # the losses from step `began` on
        self.past: Curves | None = None if step else Curves()  # the losses before; None: not read yet
        self.has_new_steps = False  # which are not drawn yet
        self.result = ""  # a sentence about the last plot
        self.work: SimpleQueue[tuple[Curves, int]] = SimpleQueue()  # the arguments of `draw`, at most once
        self.is_idle = threading.Event()
        self.is_idle.set()
        # one thread for all plots, since the C library would not reuse one thread's memory for the next
        threading.Thread(target=self.draw_all, daemon=True, name="plot").start()

    def write(self, record: dict, text: str) -> None:
        """Plot the losses if it is time, and tell the user at the end where the plot is."""
        event = record.get("event")
        is_end, end = event in CLOSING, time.monotonic() + END_S
        if not event:
            self.curves.add(record)
        self.has_new_steps = self.has_new_steps or "step_ms" in record
        if is_end:
            self.is_idle.wait(END_S)
        if self.has_new_steps and ("val_loss" in record or is_end) and self.is_idle.is_set():
            self.is_idle.clear()
            # a copy of the curves, since this thread adds to them
            self.work.put((self.curves.before(math.inf), self.began))
            self.has_new_steps = False
        if is_end:
            if not self.is_idle.wait(max(0, end - time.monotonic())):
                self.result = f"no plot of the loss curve: drawing it takes more than {END_S} s"
            if self.result:
                console.print_line(self.result, patience_s=console.PATIENCE_S)

    def draw_all(self) -> None:
        """Plot each time that `write` asks for it (in the thread)."""
        while True:
            self.draw(*self.work.get())
            self.is_idle.set()

    def draw(self, curves: Curves, began: int) -> None:
        """
        Plot the loss curve (in the thread).

        Args:
            curves: the losses from step `began` on, which is also where those of the past end.
        """
        try:
            if self.past is None:
                self.past = read_curves(self.out_dir / METRICS, began)
            whole = self.past.before(began).followed_by(curves)
            self.result = f"the loss curve: {plot_loss(self.out_dir, whole)}"
        except Exception as e:  # matplotlib raises many types
            self.result = f"no plot of the loss curve: {' '.join(str(e).split())}"


def smoothed(points: Points) -> Points:
    """
    The means of each point and those before it, with weights that halve over every fortieth of the points.
    """
    keep = 0.5 ** (40 / len(points))
    total = weight = 0.0
    means = []
    for step, loss in points:
        total = keep * total + loss
        weight = keep * weight + 1
        means.append((step, total / weight))
    return means


def plot_loss(out_dir: Path, curves: Curves) -> Path:
    """
    Plot a run's losses to loss.png: the loss of logged steps, the smoothed loss, and the evaluations. The
    legend contains the last values. Returns the path of loss.png. Can raise nearly any exception.
    """
    with needed_by("it", "matplotlib"):
        from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 5), layout="constrained").add_subplot()
    losses = {name: curve.shown() for name, curve in curves.by_name()}
    training = losses["loss"]
    lines = [
        ("training step", training, dict(color="0.8", linewidth=1)),
        (
            "training, smoothed",
            smoothed(losses["loss_mean"]) if len(training) >= FEW else [],
            dict(color="0.3"),
        ),
        ("evaluation, train", losses["train_loss"], dict(color="tab:blue", marker=".")),
        ("evaluation, val", losses["val_loss"], dict(color="tab:orange", marker=".")),
    ]
    for label, points, style in lines:
        if points:
            axes.plot(*zip(*points, strict=True), label=f"{label}: {points[-1][1]:.4f} at the end", **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    # a $ in the name does not begin a formula
    axes.set_title(os.fsencode(out_dir.resolve().name).decode(errors="replace"), parse_math=False)
    if axes.lines:
        axes.legend()
    axes.grid(alpha=0.3)
    image = io.BytesIO()
    # the font may lack characters of the folder's name. The filter stays: catch_warnings would also undo
    # what the main thread changes meanwhile
    warnings.filterwarnings("ignore", message="Glyph ")
    axes.figure.savefig(image, format="png", dpi=110)
    write_whole(out_dir / "loss.png", image.getvalue())
    return out_dir / "loss.png"
