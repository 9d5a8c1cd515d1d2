"""Pictures of runs: losses, the difference of two groups, and the statistics of layers."""

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

# what the x axis shows: its name in a record, and its label
X = {
    "steps": ("iter", "training step"),
    "tokens": ("tokens", "training tokens"),
    "seconds": ("seconds", "training time (s)"),
    "flops": ("flops", "training computation (FLOP)"),
}
MOST_PLACES = 300  # of a line
PARTS = 40  # a point of the smoothed loss is the mean over the last one of so many parts of a run
STATISTICS = ("weight_norm", "grad_norm", "update_norm", "activation_rms", "attention_logit")
MOST_COLUMNS = 6  # runs with statistics side by side

Curve = np.ndarray  # (2, n): places on the x axis, and finite values


def draw(groups: list[Group], x: str, path: Path, unit: str = "val_loss") -> Path:
    """
    Draw the losses of groups of runs to a PNG file, see `losses_figure`. Returns the path.

    Raises:
        ValueError: matplotlib is missing, or the runs cannot be drawn over `x`.
        OSError: the file cannot be written.
    """
    return write(losses_figure(groups, x, unit), path)


def losses_figure(groups: list[Group], x: str, unit: str = "val_loss") -> "Figure":
    """
    Return a figure with the validation loss of each group and the smoothed training loss; for two groups also
    with the difference of their validation losses, second minus first.

    Args:
        x: what the x axis shows, one of X.
        unit: the name of the validation loss in a record. With bits per byte there is no panel of the
            training loss, whose tokens differ from run to run.
    """
    name, label = X[x]
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        if any(record.get(name) is None for record in run.evaluations):
            raise ValueError(f"{run.folder} does not record its {x}: use --x=steps")
    validation = {run.folder: curve_of(run.evaluations, name, unit) for run in runs}
    training = {run.folder: smoothed(curve_of(run.steps, name, "loss_mean")) for run in runs}
    has_training = unit == "val_loss"
    is_pair = len(groups) == 2 and all(group.counted for group in groups)
    figure, count = new_figure(), 1 + has_training + is_pair
    figure.set_size_inches(9, 3.5 * count)
    panels = figure.subplots(count, sharex=True, squeeze=False)[:, 0]
    panels[0].set_title("Validation loss")
    draw_groups(panels[0], groups, validation)
    if has_training:
        panels[1].set_title("Training loss, smoothed")
        draw_groups(panels[1], groups, training)
    if is_pair:
        panels[-1].set_title("Difference of the validation losses")
        draw_difference(panels[-1], *groups, validation)
    for axes in panels:
        axes.set_ylabel("bits per byte" if unit == "val_bpb" else "nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[-1].set_xlabel(label)
    return figure


def draw_groups(axes: "Axes", groups: list[Group], curves: dict[Path, Curve]) -> None:
    """
    Draw the runs of each group that count as one line, their mean, in a band of the standard error; other
    runs are thin lines. The axis leaves out the highest tenth of the losses: the fall at the start, or a run
    that diverges, would flatten the rest.

    Args:
        curves: {folder of a run: its curve}.
    """
    losses = []
    for index, group in enumerate(groups):
        color, name = f"C{index}", name_of(group)
        counted = [curves[run.folder] for run in group.counted if curves[run.folder].size]
        for run in group.runs:
            if run not in group.counted:
                label = "" if counted else f"{name}: {run.state}"
                axes.plot(*curves[run.folder], color=color, linewidth=0.5, label=label)
        if counted:
            x, values = together(counted)
            mean, error = values.mean(axis=0), standard_error(values)
            label = f"{name}: {mean[-1]:.4f}" + (f" ± {error[-1]:.4f}" if len(values) > 1 else "")
            axes.plot(x, mean, color=color, marker=".", label=label)
            axes.fill_between(x, mean - error, mean + error, color=color, alpha=0.25)
            losses.append(mean)
    if losses:
        axes.set_ylim(top=np.quantile(np.concatenate(losses), 0.9))


def draw_difference(axes: "Axes", a: Group, b: Group, curves: dict[Path, Curve]) -> None:
    """
    Draw the difference b - a: of each seed that both have, and the mean with its 95% interval, as
    significance.difference computes them.
    """
    x, values = together([curves[run.folder] for run in a.counted + b.counted])
    before = {run.seed: of_run for run, of_run in zip(a.counted, values, strict=False)}
    after = {run.seed: of_run for run, of_run in zip(b.counted, values[len(a.counted) :], strict=True)}
    for seed in before.keys() & after.keys():
        axes.plot(x, after[seed] - before[seed], color="0.7", linewidth=0.8)
    results = [
        difference(
            {seed: of_run[place] for seed, of_run in before.items()},
            {seed: of_run[place] for seed, of_run in after.items()},
        )
        for place in range(len(x))
    ]
    rows = [(result.mean, result.low, result.high) for result in results]
    mean, low, high = np.array(rows, dtype=float).T  # None becomes nan
    axes.axhline(0, color="0", linewidth=0.8)
    axes.plot(x, mean, color="0", label=f"({name_of(b)}) minus ({name_of(a)}): {mean[-1]:+.4f}")
    axes.fill_between(x, low, high, color="0", alpha=0.15, label=f"95% interval, {results[-1].method}")


def curve_of(records: list[dict], x: str, y: str) -> Curve:
    """The curve of a number in the records of a run."""
    rows = [(record.get(x), record.get(y)) for record in records]
    points = np.array(rows, dtype=float).reshape(-1, 2)
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
        raise ValueError("the runs have no part of the x axis in common: use --x=steps")
    places = places[np.linspace(0, len(places) - 1, min(len(places), MOST_PLACES)).astype(int)]
    return places, np.array([np.interp(places, *curve) for curve in curves])


def standard_error(values: np.ndarray) -> np.ndarray:
    """The standard error of the mean of values (runs, ...), 0 for one run."""
    runs = len(values)
    return values.std(axis=0, ddof=1) / math.sqrt(runs) if runs > 1 else np.zeros(values.shape[1:])


# ------------------------------------------------------------------------------------------------------------
# the statistics of layers


def draw_statistics(groups: list[Group], path: Path) -> Path | None:
    """
    Draw the statistics of layers of a run of each group to a PNG file. A line is a block, by the largest
    value of its parameters or activations. Returns the path, or None if no run has recorded any
    (--stats_interval).

    Raises:
        ValueError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    runs = {}
    for group in groups:
        for run in group.runs:
            if run.statistics:
                runs.setdefault(name_of(group), run)
    if not runs:
        return None
    shown = list(runs.items())[:MOST_COLUMNS]
    figure = new_figure()
    figure.set_size_inches(2 + 4 * len(shown), 3 * len(STATISTICS))
    grid = figure.subplots(len(STATISTICS), len(shown), sharex=True, sharey="row", squeeze=False)
    for column, (name, run) in zip(grid.T, shown, strict=True):
        for axes, kind in zip(column, STATISTICS, strict=True):
            draw_blocks(axes, run.statistics[:: len(run.statistics) // MOST_PLACES + 1], kind)
        column[0].set_title(name)
        column[-1].set_xlabel("training step")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper")
    return write(figure, path)


def draw_blocks(axes: "Axes", records: list[dict], kind: str) -> None:
    """Draw the values of a statistic: the blocks in colors that show how deep they are, all else dashed."""
    from matplotlib import colormaps

    lines = {}
    for record in records:
        largest = {}
        for name, value in record["statistics"].get(kind, {}).items():
            block = name.partition(".")[0]
            largest[block] = max(largest.get(block, -math.inf), float(value))
        for block, value in largest.items():
            lines.setdefault(block, []).append((record["iter"], value))
    depth = sum(name.isdigit() for name in lines)
    for name, points in lines.items():
        style = {"color": colormaps["viridis"](int(name) / depth)} if name.isdigit() else {"linestyle": "--"}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set_ylabel(kind)
    if kind != "attention_logit":  # which may be negative
        axes.set_yscale("log")


# ------------------------------------------------------------------------------------------------------------
# figures


def new_figure() -> "Figure":
    """
    Return an empty figure.

    Raises:
        ValueError: matplotlib is missing.
    """
    # a notebook's kernel sets a backend that may be installed only in its environment
    os.environ["MPLBACKEND"] = "agg"
    with needed_by("the picture", "matplotlib"):
        from matplotlib.figure import Figure

    return Figure(layout="constrained")


def name_of(group: Group) -> str:
    """The name of a group, or its folder's if there is nothing to distinguish; a $ begins no formula."""
    name = group.name or group.runs[0].folder.resolve().name
    return name.replace("$", r"\$")


def write(figure: "Figure", path: Path) -> Path:
    """Write a figure to a PNG file. Returns the path."""
    image = io.BytesIO()
    # the font may lack characters of a folder's name
    warnings.filterwarnings("ignore", message="Glyph ")
    figure.savefig(image, format="png", metadata={"Software": None})
    write_whole(path, image.getvalue())
    return path
