"""Pictures of runs: losses, and the difference of two groups."""

import io
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isogpt.common.files import write_whole
from isogpt.common.packages import needed_by
from isogpt.lab.runs import Group
from isogpt.lab.significance import difference

if TYPE_CHECKING:  # matplotlib takes half a second to import, and may be missing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PLACES = 300  # of a line
PARTS = 40  # a point of the smoothed loss is the mean over the last one of so many parts of the run

Curve = np.ndarray  # (2, n): places on the x axis, and finite values


# ------------------------------------------------------------------------------------------------------------
# losses


def losses_figure(groups: list[Group], x: str, unit: str = "val_loss") -> "Figure":
    """
    Return a figure with the validation loss of each group and the smoothed training loss; for two groups also
    with the difference of their validation losses, second minus first.

    Args:
        x: what the x axis shows, steps, tokens, seconds or flops.
        unit: the name of the validation loss in a record. With bits per byte there is no panel of the
            training loss, whose tokens differ from run to run.

    Raises:
        ValueError: matplotlib is missing, or the runs cannot be drawn over `x`.
    """
    name = "iter" if x == "steps" else x
    validation, training = {}, {}
    for run in (run for group in groups for run in group.runs):
        if any(record.get(name) is None for record in run.evaluations):
            raise ValueError(f"{run.folder} does not record its {x}: use --x=steps")
        validation[run.folder] = curve_of(run.evaluations, name, unit)
        training[run.folder] = smoothed(curve_of(run.steps, name, "loss_mean"))
    curves = {"Validation loss": validation}
    if unit == "val_loss":
        curves["Training loss, smoothed"] = training
    titles = [*curves]
    if len(groups) == 2 and all(group.counted for group in groups):
        titles.append("Difference of the validation losses")
    # a notebook's kernel sets a backend that may be installed only in its environment
    os.environ["MPLBACKEND"] = "agg"
    with needed_by("the picture", "matplotlib"):
        from matplotlib.figure import Figure
    ylabel = "bits per byte" if unit == "val_bpb" else "nats per token"
    figure = Figure((9, 3.5 * len(titles)), layout="constrained")
    panels = figure.subplots(len(titles), sharex=True, squeeze=False)[:, 0]
    for axes, title in zip(panels, titles, strict=True):
        if title in curves:
            draw_groups(axes, groups, curves[title])
        else:
            draw_difference(axes, *groups, validation)
        axes.set(title=title, ylabel=ylabel)
        axes.grid(alpha=0.3)
        axes.legend()
    panels[-1].set_xlabel(f"training {x}")
    return figure


def draw_groups(axes: "Axes", groups: list[Group], curves: dict[Path, Curve]) -> None:
    """
    Draw the runs of each group that count as one line, their mean, in a band of the standard error; other
    runs are thin lines.

    Args:
        curves: {folder of a run: its curve}.
    """
    for index, group in enumerate(groups):
        color, name = f"C{index}", name_of(group)
        counted = [curves[run.folder] for run in group.counted]
        counted = [curve for curve in counted if curve.size]
        if counted:
            x, values = together(counted)
            mean = values.mean(axis=0)
            label = f"{name}: {mean[-1]:.4f}"
            if len(values) > 1:
                error = values.std(axis=0, ddof=1) / math.sqrt(len(values))
                axes.fill_between(x, mean - error, mean + error, color=color, alpha=0.25)
                label += f" ± {error[-1]:.4f}"
            axes.plot(x, mean, color=color, marker=".", label=label)
        for run in group.runs:
            if run not in group.counted:
                label = "" if counted else f"{name}: {run.state}"
                axes.plot(*curves[run.folder], color=color, linewidth=0.5, label=label)
    losses = np.concatenate([line.get_ydata() for line in axes.lines])
    if losses.size:  # without the highest fifth: the fall at the start would flatten the rest
        axes.set_ylim(top=np.quantile(losses, 0.8))


def draw_difference(axes: "Axes", a: Group, b: Group, curves: dict[Path, Curve]) -> None:
    """
    Draw the difference b - a: of each seed that both have, and the mean with its 95% interval, as
    significance.difference computes them.
    """
    x, values = together([curves[run.folder] for run in a.counted + b.counted])
    lines = iter(values)
    before = {run.seed: next(lines) for run in a.counted}
    after = {run.seed: next(lines) for run in b.counted}
    for seed in before.keys() & after.keys():
        axes.plot(x, after[seed] - before[seed], color="0.7", linewidth=0.8)
    bounds = []
    for place in range(len(x)):
        at_a = {seed: line[place] for seed, line in before.items()}
        at_b = {seed: line[place] for seed, line in after.items()}
        result = difference(at_a, at_b)
        bounds.append([result.mean, result.low, result.high])
    mean, low, high = np.array(bounds, dtype=float).T
    axes.axhline(0, color="0", linewidth=0.8)
    axes.plot(x, mean, color="0", label=f"({name_of(b)}) minus ({name_of(a)}): {mean[-1]:+.4f}")
    axes.fill_between(x, low, high, color="0", alpha=0.15, label=f"95% interval, {result.method}")


def curve_of(records: list[dict], x: str, y: str) -> Curve:
    """The curve of a number in the records of a run."""
    points = np.array([(one.get(x), one.get(y)) for one in records], dtype=float).reshape(-1, 2)
    return points[np.isfinite(points).all(axis=1)].T


def smoothed(curve: Curve) -> Curve:
    """The mean of each point and those before it."""
    length = curve.shape[1] // PARTS + 1
    sums = np.insert(np.cumsum(curve[1]), 0, 0)
    return np.array([curve[0, length - 1 :], (sums[length:] - sums[:-length]) / length])


def together(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """
    Return places (n,) at which all curves have a value, and their values there (curves, n). Between two
    points of a curve, they are interpolated.
    """
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    places = np.unique(np.concatenate([x for x, _ in curves]))
    places = places[(places >= first) & (places <= last)]
    if not len(places):
        raise ValueError("the runs share no part of the x axis: use --x=steps")
    places = places[np.linspace(0, len(places) - 1, min(len(places), MOST_PLACES)).astype(int)]
    return places, np.array([np.interp(places, *curve) for curve in curves])


# ------------------------------------------------------------------------------------------------------------
# figures


def name_of(group: Group) -> str:
    """The name of a group, in UTF-8, and a $ begins no formula."""
    return group.name.replace("$", r"\$").encode(errors="replace").decode()


def write(figure: "Figure", path: Path) -> None:
    """Write a figure to a PNG file. Raises OSError if this is not possible."""
    image = io.BytesIO()
    # the font may lack characters of a folder's name
    warnings.filterwarnings("ignore", message="Glyph ")
    figure.savefig(image, format="png", metadata={"Software": None})
    write_whole(path, image.getvalue())
