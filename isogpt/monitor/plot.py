"""The plot of the loss curve."""

import io
import os
from pathlib import Path

from isogpt.common.files import read_records, write_whole


def plot_loss(out_dir: Path) -> Path:
    """
    Plot metrics.jsonl to loss.png: the loss of each logged step, and the evaluations. Can raise nearly any
    exception.
    """
    from matplotlib.figure import Figure

    records = [r for r in read_records(out_dir / "metrics.jsonl") if "event" not in r]
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
