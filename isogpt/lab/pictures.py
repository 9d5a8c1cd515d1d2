"""Pictures of runs side by side: losses, differences of two groups, and the statistics of layers."""

import io
import math
import os
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isogpt.common.files import write_whole
from isogpt.common.packages import needed_by
from isogpt.lab.runs import Group, Run
from isogpt.lab.significance import difference, has_scipy
from isogpt.monitor.sink_plot import FEW, smoothed

if TYPE_CHECKING:  # matplotlib takes half a second to import, and may be missing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

X = ("steps", "tokens", "seconds", "flops")
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# Okabe and Ito's, which people with any color vision tell apart; then the same ones dashed, and so on
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
WHOLE = 0.9  # a run that got this far, compared with its group's farthest one, belongs to the mean
START = 0.25  # of the x axis: the initial fall of the losses, up to here, would flatten what is compared
LINE = 90  # characters of a line in a title or a legend
FEW_MARKED = 60  # evaluations up to which each one is a dot
MOST_PLACES = 300  # at which a difference is computed
# of draw_statistics: the key in a record, the title, and whether the axis is logarithmic
PANELS = (
    ("weight_norm", "norm of the weights", False),
    ("grad_norm", "norm of the gradient", True),
    ("update_ratio", "norm of the update / of the weights", True),
    ("activation_rms", "RMS of the activations", False),
    ("attention_logit", "largest attention logit", False),
)
MOST_COLUMNS = 6  # runs side by side


@dataclass(eq=False)
class Curve:
    """The values of a run that are finite, in the order of steps."""

    seed: int
    steps: np.ndarray  # (n,)
    x: np.ndarray  # (n,) the same in the unit of the x axis
    y: np.ndarray  # (n,)
    has_diverged: bool = False  # the last value was not finite


@dataclass
class Scale:
    """What the x axis shows."""

    x: str  # one of X
    unit: float = 1.0  # of the axis, in steps, tokens, seconds or FLOPs
    label: str = "training step"


# ------------------------------------------------------------------------------------------------------------
# the losses


def draw(groups: list[Group], x: str, path: Path, unit: str = "val_loss") -> Path:
    """
    Draw the losses of groups of runs to a PNG file, see `losses_figure`. Returns the path.

    Raises:
        ValueError: matplotlib is missing, or there is nothing to draw.
        OSError: the file cannot be written.
    """
    return write(losses_figure(groups, x, unit), path)


def losses_figure(groups: list[Group], x: str, unit: str = "val_loss") -> "Figure":
    """
    Return a figure with the validation loss of each group and the smoothed training loss; for two groups also
    with the difference of their validation losses, second minus first, if scipy is installed.

    The seeds of a group are one line, their mean, in a band of the standard error. Runs that diverged, or
    stopped before the others of their group, are thin lines that end in a cross, and not part of the mean.
    Where evaluations are at different steps, the values between them are interpolated.

    Args:
        x: what the x axis shows, one of X.
        unit: the key of the validation loss in a record: val_loss, val_bpb, or one of them with /NAME. With
            bits per byte there is no panel of the training loss, whose tokens may differ from run to run.

    Raises:
        ValueError: matplotlib is missing, x is none of X or not known, or there is nothing to draw.
    """
    scale = scale_of(groups, x)
    evaluations = [[curve_of(run, run.evaluations, scale, unit) for run in group.runs] for group in groups]
    if not any(len(curve.x) for curves in evaluations for curve in curves):
        raise ValueError(f"there is nothing to draw: no run has an evaluation with {unit}")
    kind, _, data_set = unit.partition("/")
    measured = "bits per byte" if kind == "val_bpb" else "nats per token"
    has_training = kind != "val_bpb"
    is_pair = len(groups) == 2 and all(map(whole, evaluations)) and has_scipy()
    columns = 1 + has_training
    rows = [["val", "train"][:columns], *[["difference"] * columns] * is_pair]
    figure = new_figure(10, 4 + 3.4 * is_pair + 0.15 * len(groups))
    panels = figure.subplot_mosaic(rows)
    draw_groups(panels["val"], evaluations, marks_few=True)
    entitle(panels["val"], f"Validation loss of {data_set}" if data_set else "Validation loss")
    panels["val"].set(xlabel=scale.label, ylabel=f"loss ({measured})")
    if has_training:
        draw_groups(panels["train"], [[smooth(run, scale) for run in group.runs] for group in groups])
        entitle(panels["train"], "Training loss, smoothed")
        panels["train"].set(xlabel=scale.label, ylabel="loss (nats per token)")
    if is_pair:
        draw_differences(panels["difference"], *map(whole, evaluations))
        entitle(panels["difference"], difference_title(groups, *map(whole, evaluations)))
        panels["difference"].set(xlabel=scale.label, ylabel=f"difference ({measured})")
    add_legend(figure, groups, evaluations)
    return figure


def scale_of(groups: list[Group], x: str) -> Scale:
    """
    Return the x axis, whose unit follows the farthest run.

    Raises:
        ValueError: x is not one of X, or a run does not record it.
    """
    if x not in X:
        raise ValueError(f"x={x!r}: choose from {', '.join(X)}")
    runs = [run for group in groups for run in group.runs]
    ends = [(run, place(run, record, Scale(x))) for run in runs for record in run.evaluations[-1:]]
    if unknown := [run for run, end in ends if not math.isfinite(end)]:
        raise ValueError(f"{unknown[0].folder} does not record its {x}: use --x=steps")
    most = max((end for _, end in ends), default=0.0)
    if x == "steps":
        return Scale(x)
    if x == "seconds":
        unit, label = (1, "s") if most < 180 else (60, "minutes") if most < 3 * 3600 else (3600, "hours")
        return Scale(x, unit, f"training time ({label})")
    unit, prefix = next((pair for pair in PREFIXES if most >= pair[0]), (1, ""))
    if x == "tokens":
        return Scale(x, unit, f"training tokens ({prefix})" if prefix else "training tokens")
    return Scale(x, unit, f"training computation ({prefix}FLOP)")


def place(run: Run, record: dict, scale: Scale) -> float:
    """Where a record of a run stands on the x axis; nan: not known."""
    step = number(record.get("iter"))
    if scale.x == "steps":
        return step
    if scale.x == "seconds":
        return number(record.get("seconds")) / scale.unit
    if scale.x == "tokens":
        tokens = record.get("tokens", step * number(run.facts.get("tokens_per_step")))
        return number(tokens) / scale.unit
    flops = record.get("flops", step * number(run.facts.get("flops_per_step")))
    return number(flops) / scale.unit


def number(value: object) -> float:
    """A number of a record, which contains nan and infinity as text; nan: there is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def curve_of(run: Run, records: list[dict], scale: Scale, key: str) -> Curve:
    """Return the curve of a value in the records of a run."""
    rows = [(number(rec.get("iter")), place(run, rec, scale), number(rec.get(key))) for rec in records]
    points = np.array([row for row in rows if all(map(math.isfinite, row))]).reshape(-1, 3)
    has_diverged = bool(rows) and math.isfinite(rows[-1][0]) and not math.isfinite(rows[-1][2])
    return Curve(run.settings.get("seed", 0), *points.T, has_diverged=has_diverged)


def smooth(run: Run, scale: Scale) -> Curve:
    """Return the training loss of a run, smoothed as in loss.png unless there are only a few steps."""
    key = "loss_mean" if any("loss_mean" in step for step in run.steps) else "loss"
    curve = curve_of(run, run.steps, scale, key)
    if len(curve.y) >= FEW:
        means = smoothed([*zip(curve.steps.tolist(), curve.y.tolist(), strict=True)])
        curve.y = np.array([mean for _, mean in means])
    return curve


def whole(curves: list[Curve]) -> list[Curve]:
    """Return the curves of a group that have not diverged and got about as far as its farthest one."""
    candidates = [curve for curve in curves if len(curve.x) and not curve.has_diverged]
    return [curve for curve in candidates if curve.steps[-1] >= WHOLE * last_step(candidates)]


def last_step(curves: list[Curve]) -> float:
    """The step of the last finite value of any curve; 0 if there is none."""
    return max((curve.steps[-1] for curve in curves if len(curve.x)), default=0.0)


def mean_curve(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Return the mean of curves: its places on the x axis (n,), its values (n,), and their standard error (n,),
    which is 0 for one curve. Values at the same step are averaged, up to the end of the shortest curve.
    """
    steps = places([curve.steps for curve in curves])
    x = np.mean([np.interp(steps, curve.steps, curve.x) for curve in curves], axis=0)
    y = np.array([np.interp(steps, curve.steps, curve.y) for curve in curves])  # (curves, n)
    return x, y.mean(axis=0), standard_error(y)


def places(curves: list[np.ndarray]) -> np.ndarray:
    """Return the places at which any of the curves has a point and all of them have a value."""
    first, last = max(curve[0] for curve in curves), min(curve[-1] for curve in curves)
    every = np.unique(np.concatenate(curves))
    return every[(every >= first) & (every <= last)]


def standard_error(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean of values (runs, ...), 0 for one run."""
    runs = len(values)
    return values.std(axis=0, ddof=1) / math.sqrt(runs) if runs > 1 else np.zeros(values.shape[1:])


def draw_groups(axes: "Axes", curves: list[list[Curve]], marks_few: bool = False) -> None:
    """
    Draw the curves of each group.

    Args:
        marks_few: whether to draw each point of the mean as a dot, unless there are many.
    """
    for index, of_group in enumerate(curves):
        color, dash = style_of(index)
        kept = whole(of_group)
        if kept:
            x, y, error = mean_curve(kept)
            marker = "." if marks_few and len(x) <= FEW_MARKED else ""
            axes.plot(x, y, dash, color=color, marker=marker)
            if len(kept) > 1:
                axes.fill_between(x, y - error, y + error, color=color, alpha=0.25, linewidth=0)
        for curve in of_group:
            if len(curve.x) and curve not in kept:
                axes.plot(curve.x, curve.y, dash, color=color, linewidth=0.8)
                axes.plot(curve.x[-1:], curve.y[-1:], "x", color=color)
    finish(axes)
    zoom(axes, [curve for of_group in curves for curve in of_group if len(curve.x)])


def zoom(axes: "Axes", curves: list[Curve]) -> None:
    """Limit the y axis to the losses after the start of training, and to where each curve ends."""
    start = START * max((curve.x[-1] for curve in curves), default=0)
    later = [y for curve in curves if len(y := curve.y[curve.x >= start])]
    if not later:
        return
    low = min(y.min() for y in later)
    # a loss above that of the first evaluation has diverged
    high = min(max(max(y[0], y[-1]) for y in later), max(curve.y[0] for curve in curves))
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


# ------------------------------------------------------------------------------------------------------------
# the difference of two groups


def draw_differences(axes: "Axes", a: list[Curve], b: list[Curve]) -> None:
    """
    Draw the difference b - a: for each seed that both groups have, and the mean with its 95% interval at each
    place, as significance.difference computes them.
    """
    x = places([curve.x for curve in a + b])
    if len(x) > MOST_PLACES:
        x = np.linspace(x[0], x[-1], MOST_PLACES)
    before = {curve.seed: np.interp(x, curve.x, curve.y) for curve in a}  # {seed: (n,)}
    after = {curve.seed: np.interp(x, curve.x, curve.y) for curve in b}
    compared = [difference(at(before, index), at(after, index)) for index in range(len(x))]
    rows = [(result.mean, result.low, result.high) for result in compared]
    mean, low, high = np.array(rows, dtype=float).reshape(-1, 3).T  # None becomes nan
    by_seed = [after[seed] - before[seed] for seed in before if seed in after]
    axes.axhline(0, color="0.2", linewidth=0.8)
    if len(by_seed) > 1:
        for index, values in enumerate(by_seed):
            axes.plot(x, values, color="0.6", linewidth=0.8, label="" if index else "one seed")
    marker = "." if len(x) <= FEW_MARKED else ""
    axes.plot(x, mean, color="black", linewidth=2, marker=marker, label="mean")
    if np.isfinite(low).any():
        axes.fill_between(x, low, high, color="black", alpha=0.12, linewidth=0, label="its 95% interval")
        axes.legend(frameon=False, ncols=3, loc="upper right")
    finish(axes)
    later = x >= START * x.max(initial=0)
    if later.any():
        limit_differences(axes, np.array([mean, *by_seed])[:, later], low[later][-1], high[later][-1])


def at(values: dict[int, np.ndarray], index: int) -> dict[int, float]:
    """The values {seed: value} at a place."""
    return {seed: float(of_seed[index]) for seed, of_seed in values.items()}


def limit_differences(axes: "Axes", lines: np.ndarray, low: float, high: float) -> None:
    """
    Limit the y axis to zero, the lines (lines, n) and the last interval. With few seeds, the interval may be
    so wide that it would flatten the lines; it is then cut off.
    """
    bottom, top = min(0.0, lines.min()), max(0.0, lines.max())
    size = top - bottom or 1.0
    bottom = min(bottom, max(low, bottom - size)) if math.isfinite(low) else bottom
    top = max(top, min(high, top + size)) if math.isfinite(high) else top
    axes.set_ylim(bottom - 0.05 * size, top + 0.2 * size)  # with room for the legend


def difference_title(groups: list[Group], a: list[Curve], b: list[Curve]) -> str:
    """Return what is subtracted, and the result at the end."""
    first, second = map(name_of, groups)
    last = [{curve.seed: float(curve.y[-1]) for curve in curves} for curves in (a, b)]
    result = difference(*last)
    interval = ""
    if result.low is not None:
        interval = f", 95% interval {signed(result.low)} to {signed(result.high)} ({result.method})"
    return (
        f"Difference of the validation losses: ({second}) minus ({first})\n"
        f"{signed(result.mean)} at the end{interval}; below zero, {second} is better"
    )


def signed(value: float) -> str:
    """A difference as text, with a minus sign as on the axes."""
    return f"{value:+.4f}".replace("-", "\N{MINUS SIGN}")


# ------------------------------------------------------------------------------------------------------------
# the statistics of layers


def draw_statistics(groups: list[Group], path: Path) -> Path | None:
    """
    Draw the statistics of layers to a PNG file, see `statistics_figure`. Returns the path, or None if no run
    has recorded any (--stats_interval).

    Raises:
        ValueError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    figure = statistics_figure(groups)
    return write(figure, path) if figure else None


def statistics_figure(groups: list[Group]) -> "Figure | None":
    """
    Return a figure with a row for each statistic and a column for each group, which shows the group's first
    run with recorded statistics; None if there is no such run. A line is a block, whose parameters are taken
    together; what belongs to no block, such as wte, has a dashed line.

    Raises:
        ValueError: matplotlib is missing.
    """
    columns = [(group, run) for group in groups if (run := first_with_statistics(group))][:MOST_COLUMNS]
    if not columns:
        return None
    lines = [statistic_lines(run) for _, run in columns]
    panels = [panel for panel in PANELS if any(panel[0] in of_run for of_run in lines)]
    styles = line_styles({name for of_run in lines for of_one in of_run.values() for name in of_one})
    figure = new_figure(max(7, 1 + 3.6 * len(columns)), 1 + 2.3 * len(panels))
    grid = figure.subplots(len(panels), len(columns), sharex=True, sharey="row", squeeze=False)
    for column, of_run in enumerate(lines):
        for row, (key, _, _) in enumerate(panels):
            for name, points in of_run.get(key, {}).items():
                grid[row, column].plot(*points, **styles[name])
            finish(grid[row, column])
    for axes, (group, _) in zip(grid[0], columns, strict=True):
        entitle(axes, f"{name_of(group)}\n{panels[0][1]}", LINE // 2)
    for axes, (_, title, _) in zip(grid[1:, 0], panels[1:], strict=True):
        entitle(axes, title)
    for row, (_, _, is_logarithmic) in zip(grid, panels, strict=True):
        if is_logarithmic:
            make_logarithmic(row)
    for axes in grid[-1]:
        axes.set_xlabel("training step")
    add_legend_of_lines(figure, styles)
    return figure


def first_with_statistics(group: Group) -> Run | None:
    """The first run of a group that has recorded statistics."""
    return next((run for run in group.runs if run.statistics), None)


def statistic_lines(run: Run) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
    """
    Return {statistic: {block, or the name of what belongs to none: (steps, values)}}, with update_ratio, the
    norm of a block's update divided by that of its weights.
    """
    lines = {}
    for record in run.statistics:
        of_blocks = {key: by_block(key, values) for key, values in record["statistics"].items()}
        weights, updates = of_blocks.get("weight_norm", {}), of_blocks.get("update_norm", {})
        of_blocks["update_ratio"] = {
            block: norm / weights[block] for block, norm in updates.items() if weights.get(block)
        }
        for key, values in of_blocks.items():
            for block, value in values.items():
                steps, of_line = lines.setdefault(key, {}).setdefault(block, ([], []))
                steps.append(record["iter"])
                of_line.append(value)
    return lines


def by_block(key: str, values: dict[str, float]) -> dict[str, float]:
    """
    Combine the values of a block's parameters or activations: norms into the norm of all of them, root mean
    squares into that of all of them, and logits into the largest.

    Args:
        values: {name, such as 3.attn.c_attn or wte: value}.
    """
    parts = {}
    for name, value in values.items():
        block = name.partition(".")[0]
        parts.setdefault(block if block.isdigit() else name, []).append(number(value))
    if key == "attention_logit":
        return {block: max(of_block) for block, of_block in parts.items()}
    norms = {block: math.hypot(*of_block) for block, of_block in parts.items()}
    if key == "activation_rms":
        return {block: norm / math.sqrt(len(parts[block])) for block, norm in norms.items()}
    return norms


def line_styles(names: set[str]) -> dict[str, dict]:
    """
    Return {name: the style of its line}: first the blocks in order, whose color shows how deep they are, then
    the other names, whose lines are dashed.
    """
    from matplotlib import colormaps

    blocks = sorted((name for name in names if name.isdigit()), key=int)
    others = sorted(name for name in names if not name.isdigit())
    # a map whose brightness alone shows the order; its last tenth is too bright on white
    colors = colormaps["viridis"](np.linspace(0, 0.9, max(len(blocks), 1)))
    styles = {block: {"color": color} for block, color in zip(blocks, colors, strict=False)}
    for index, name in enumerate(others):
        gray = str(0.3 + 0.3 * (index // 3 % 2))
        styles[name] = {"color": gray, "linestyle": DASHES[1 + index % 3]}
    return styles


def make_logarithmic(row: np.ndarray) -> None:
    """If its values differ, make the y axis that a row of panels shares logarithmic, with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    values = np.concatenate([line.get_ydata() for axes in row for line in axes.lines])
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values) or values.max() < 2 * values.min():
        return
    row[0].set_yscale("log", nonpositive="mask")
    is_narrow = values.max() < 100 * values.min()
    row[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_narrow else (1,)))
    row[0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    row[0].yaxis.set_minor_formatter(NullFormatter())


def add_legend_of_lines(figure: "Figure", styles: dict[str, dict]) -> None:
    """Add a legend with some of the blocks and all other names below the panels."""
    from matplotlib.lines import Line2D

    blocks = [name for name in styles if name.isdigit()]
    shown = sorted({round((len(blocks) - 1) * part / 4) for part in range(5)}) if blocks else []
    labels = {blocks[index]: f"block {blocks[index]}" for index in shown}
    labels |= {name: name for name in styles if not name.isdigit()}
    handles = [Line2D([], [], **styles[name]) for name in labels]
    figure.legend(handles, labels.values(), loc="outside lower center", ncols=5, frameon=False)


# ------------------------------------------------------------------------------------------------------------
# figures


def new_figure(width: float, height: float) -> "Figure":
    """
    Return an empty figure; its size is in inches.

    Raises:
        ValueError: matplotlib is missing.
    """
    # a notebook's kernel sets a backend that may be installed only in its environment
    os.environ["MPLBACKEND"] = "agg"
    with needed_by("the picture", "matplotlib"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style_of(index: int) -> tuple[str, str]:
    """The color and the dashes of a group."""
    return COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]


def name_of(group: Group) -> str:
    """The name of a group, or of its first folder if there is nothing to distinguish."""
    return group.name or os.fsencode(group.runs[0].folder.resolve().name).decode(errors="replace")


def entitle(axes: "Axes", title: str, width: int = LINE) -> None:
    """Set a title, in lines of this many characters; a $ in a name does not begin a formula."""
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, width)]
    axes.set_title("\n".join(lines), loc="left", fontsize=10, parse_math=False)


def finish(axes: "Axes") -> None:
    """Add the parts that all panels have."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def add_legend(figure: "Figure", groups: list[Group], curves: list[list[Curve]]) -> None:
    """Add a legend above the panels, which contains the validation loss of each group at its end."""
    from matplotlib.lines import Line2D

    handles, labels = [], []
    end = max(map(last_step, curves))
    for index, (group, of_group) in enumerate(zip(groups, curves, strict=True)):
        color, dash = style_of(index)
        handles.append(Line2D([], [], color=color, linestyle=dash, linewidth=2))
        labels.append("\n".join(textwrap.wrap(f"{name_of(group)}: {final_text(of_group, end)}", LINE)))
    if any(len(whole(of_group)) < sum(len(curve.x) > 0 for curve in of_group) for of_group in curves):
        handles.append(Line2D([], [], color="0.4", marker="x", linewidth=0.8))
        labels.append("a run that diverged or stopped before the others, not part of the mean")
    has_seeds = any(len(whole(of_group)) > 1 for of_group in curves)
    title = "Validation loss at the end"
    title += ": mean ± standard error over the seeds (the bands)" if has_seeds else ""
    layout = dict(loc="outside upper left", alignment="left", ncols=legend_columns(labels), frameon=False)
    legend = figure.legend(handles, labels, title=title, **layout)
    for text in legend.get_texts():
        text.set_parse_math(False)


def legend_columns(labels: list[str]) -> int:
    """How many columns the legend has: two if there are many labels and all are short."""
    return 2 if len(labels) > 6 and max(map(len, labels)) <= LINE // 2 else 1


def final_text(curves: list[Curve], end: float) -> str:
    """
    Return the last losses of a group's runs.

    Args:
        end: the last step of all groups.
    """
    kept = whole(curves)
    if not kept:
        return "diverged" if any(curve.has_diverged for curve in curves) else "no evaluation"
    last = np.array([curve.y[-1] for curve in kept])
    stopped = f" at step {last_step(kept):.0f}" if last_step(kept) < WHOLE * end else ""
    if len(curves) == 1:
        return f"{last[0]:.4f}{stopped}"
    of = "" if len(kept) == len(curves) else f" of {len(curves)}"
    error = f" ± {standard_error(last):.4f}" if len(kept) > 1 else ""
    return f"{last.mean():.4f}{error}{stopped} ({len(kept)}{of} seeds)"


def write(figure: "Figure", path: Path) -> Path:
    """Write a figure to a PNG file, whose bytes depend on the figure only. Returns the path."""
    image = io.BytesIO()
    # the font may lack characters of a folder's name
    warnings.filterwarnings("ignore", message="Glyph ")
    figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    write_whole(path, image.getvalue())
    return path
