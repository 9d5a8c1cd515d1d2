"""The plot of the loss curve, loss.png."""

import io
import os
from pathlib import Path

from isogpt.common.files import read_records, write_whole
from isogpt.monitor.sink_console import Console
from isogpt.monitor.sink_metrics import METRICS


class Plot:
    """Plots the losses so far. An error while drawing does not stop a run."""

    def __init__(self, out_dir: str | Path, console: Console) -> None:
        self.out_dir, self.console = Path(out_dir), console

    def draw(self) -> str:
        """Plot the loss curve; returns a sentence about the plot."""
        try:
            return f"the loss curve: {plot_loss(self.out_dir)}"
        except ImportError:
            return "no plot of the loss curve: pip install matplotlib"
        except Exception as e:  # matplotlib raises many types
            return f"no plot of the loss curve: {' '.join(str(e).split())}"

    def done(self, text: str) -> None:
        """Plot the whole loss curve, and tell the user where it is."""
        self.console.print(self.draw())


def plot_loss(out_dir: Path) -> Path:
    """
    Plot metrics.jsonl to loss.png: the loss of each logged step, and the evaluations. Returns the path of
    loss.png. Can raise nearly any exception.
    """
    from matplotlib.figure import Figure

    records = [r for r in read_records(out_dir / METRICS) if "event" not in r]
    axes = Figure(figsize=(8, 5), layout="constrained").add_subplot()
    for key, label, style in (
        ("loss", "training step", dict(color="0.75", linewidth=1)),
        ("train_loss", "evaluation, train", dict(color="tab:blue", marker=".")),
        ("val_loss", "evaluation, val", dict(color="tab:orange", marker=".")),
    ):
        points = [(r["iter"], r[key]) for r in records if isinstance(r.get(key), float)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    # a $ in the name does not begin a formula
    axes.set_title(os.fsencode(out_dir.resolve().name).decode(errors="replace"), parse_math=False)
    if axes.lines:
        axes.legend()
    axes.grid(alpha=0.3)
    image = io.BytesIO()
    axes.figure.savefig(image, format="png", dpi=110)
    write_whole(out_dir / "loss.png", image.getvalue())
    return out_dir / "loss.png"
