"""The plot of the loss curve, loss.png."""

import io
import os
import warnings
from pathlib import Path

from isogpt.common import console
from isogpt.common.files import read_records, write_whole
from isogpt.common.packages import needed_by
from isogpt.monitor.records import CLOSING
from isogpt.monitor.sink_metrics import METRICS

FEW = 20  # so few points are not smoothed

Points = list[tuple[float, float]]  # (step, loss)


class Plot:
    """Plots the losses after each evaluation and at the end."""

    def __init__(self, out_dir: str) -> None:
        self.out_dir = Path(out_dir)
        self.has_new_steps = False  # which are not drawn yet
        self.result = ""  # a sentence about the last plot

    def write(self, record: dict, text: str) -> None:
        """Plot the losses if it is time, and tell the user at the end where the plot is."""
        is_end = record.get("event") in CLOSING
        if self.has_new_steps and ("val_loss" in record or is_end):
            self.result = self.draw()
        self.has_new_steps = "step_ms" in record or (self.has_new_steps and "val_loss" not in record)
        if is_end and self.result:
            console.print_line(self.result, patience_s=console.PATIENCE_S)

    def draw(self) -> str:
        """Plot the loss curve; returns a sentence about the plot."""
        try:
            return f"the loss curve: {plot_loss(self.out_dir)}"
        except Exception as e:  # matplotlib raises many types
            return f"no plot of the loss curve: {' '.join(str(e).split())}"


def smoothed(points: Points) -> Points:
    """
    The mean of each point and the points before it, with weights that halve every fortieth of the points.
    """
    keep = 0.5 ** (40 / len(points))
    total = weight = 0.0
    means = []
    for step, loss in points:
        total = keep * total + loss
        weight = keep * weight + 1
        means.append((step, total / weight))
    return means


def plot_loss(out_dir: Path) -> Path:
    """
    Plot metrics.jsonl to loss.png: the loss of each logged step, the smoothed loss of all steps, and the
    evaluations. The legend contains the last values. Returns the path of loss.png. Can raise nearly any
    exception.
    """
    os.environ["MPLBACKEND"] = "agg"  # a notebook's kernel sets one that only its environment has installed
    with needed_by("it", "matplotlib"):
        from matplotlib.figure import Figure

    records = [r for r in read_records(out_dir / METRICS) if "event" not in r]
    axes = Figure(figsize=(8, 5), layout="constrained").add_subplot()
    losses = {
        key: [(r["iter"], r[key]) for r in records if isinstance(r.get(key), float)]
        for key in ("loss", "loss_mean", "train_loss", "val_loss")
    }
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
    with warnings.catch_warnings():  # the font may lack characters of the folder's name
        warnings.filterwarnings("ignore", message="Glyph ")
        axes.figure.savefig(image, format="png", dpi=110)
    write_whole(out_dir / "loss.png", image.getvalue())
    return out_dir / "loss.png"
