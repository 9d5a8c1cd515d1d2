"""The three pictures of lessons/split.py, which draws them with --picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ["#4477aa", "#ee7733", "#44aa77", "#cc6699", "#bbaa33", "#66ccee", "#882255", "#777777"]  # of ranks


def draw(
    picture: str,
    timelines: dict[tuple, list],
    slot: float,
    in_order: Sequence[Tensor],
    zigzag: Sequence[Tensor],
) -> None:
    """Write picture-tensor.png, picture-pipeline.png and picture-context.png."""
    figures = {
        "tensor": tensor_figure(len(in_order)),
        "pipeline": pipeline_figure(timelines, slot),
        "context": context_figure({"in order": in_order, "zigzag": zigzag}),
    }
    for name, figure in figures.items():
        file = Path(picture)
        figure.savefig(file.with_stem(f"{file.stem}-{name}"))


def tensor_figure(p: int) -> Figure:
    """What each rank holds of the MLP's two matrices and of the hidden features."""
    figure = Figure(figsize=(8, 2.7), dpi=110, layout="constrained")
    axes = figure.subplots()
    C, T = 1.0, 1.4  # widths in the picture
    # label, formula, x, width, height, cut: "columns", "rows" or None if each rank has all of it
    panels = [
        ("x", "all ranks", 0, C, T, None),
        ("c_fc.weight.T", "columns of a rank", 1.5, 4 * C, C, "columns"),
        ("gelu(x @ c_fc.weight.T)", "features of a rank", 6.0, 4 * C, T, "columns"),
        ("c_proj.weight.T", "rows of a rank", 10.9, C, 4 * C, "rows"),
        ("y", "all-reduce: all ranks", 12.9, C, T, None),
    ]
    for label, note, left, width, height, cut in panels:
        bottom = -height / 2
        for r in range(p if cut else 1):
            color = COLORS[r % len(COLORS)] if cut else "0.8"
            if cut == "rows":
                box = Rectangle((left, bottom + (p - 1 - r) * height / p), width, height / p)
            else:
                n = p if cut else 1
                box = Rectangle((left + r * width / n, bottom), width / n, height)
            box.set(facecolor=color, edgecolor="white")
            axes.add_patch(box)
            if cut:
                x, y = box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2
                axes.text(x, y, str(r), ha="center", va="center", color="white")
        axes.text(
            left + width / 2, -bottom + 0.15, label, ha="center", va="bottom", family="monospace", size=8
        )
        axes.text(left + width / 2, bottom - 0.15, note, ha="center", va="top", size=8)
    for x, sign in ((1.25, "@"), (5.75, "→"), (10.45, "@"), (12.4, "→")):
        axes.text(x, 0, sign, ha="center", va="center", size=12)
    axes.set(xlim=(-0.3, 14.7), ylim=(-2.7, 2.6), aspect="equal")
    axes.axis("off")
    return figure


def pipeline_figure(timelines: dict[tuple, list], slot: float) -> Figure:
    """Both schedules, as computed in slots and as measured."""
    figure = Figure(figsize=(8, 7.5), dpi=110, layout="constrained")
    for axes, ((schedule, kind), timeline) in zip(
        figure.subplots(4, sharex=True), timelines.items(), strict=True
    ):
        unit = slot if kind == "measured" else 1
        for stage, passes in enumerate(timeline):
            for direction, i, start, length in passes:
                color = "#4477aa" if direction == "forward" else "#ee7733"
                axes.broken_barh(
                    [(start / unit, length / unit)], (stage - 0.45, 0.9), color=color, edgecolor="white"
                )
                middle = (start + length / 2) / unit
                axes.text(middle, stage, str(i), ha="center", va="center", color="white", size=8)
        axes.set_title(f"{schedule}, {kind}", loc="left", size=10)
        axes.set(yticks=range(len(timeline)), ylabel="stage")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("slots (blue: forward, orange: backward; the numbers are those of the micro-batches)")
    return figure


def context_figure(layouts: dict[str, Sequence[Tensor]]) -> Figure:
    """The causal mask, with each pair of a query and a key in the color of the rank that computes it."""
    figure = Figure(figsize=(8, 4.7), dpi=110, layout="constrained")
    row: list[Axes] = figure.subplots(1, 2, sharey=True)
    for axes, (layout, held) in zip(row, layouts.items(), strict=True):
        p, T = len(held), sum(map(len, held))
        owner = torch.empty(T)
        for r, positions in enumerate(held):
            owner[positions] = r
        mask = owner[:, None].expand(T, T).clone()
        mask[~torch.ones(T, T, dtype=torch.bool).tril()] = torch.nan
        colors = ListedColormap(COLORS[:p])
        axes.imshow(mask, cmap=colors, vmin=-0.5, vmax=p - 0.5, interpolation="nearest")
        for r, positions in enumerate(held):
            share = (positions + 1).sum() / (T * (T + 1) / 2)
            axes.plot([], [], "s", color=COLORS[r], label=f"rank {r}: {100 * share:.1f}%")
        axes.legend(frameon=False, loc="upper right")
        axes.set(title=layout, xlabel="key", xticks=[], yticks=[])
        axes.spines[["top", "right"]].set_visible(False)
    row[0].set_ylabel("query")
    return figure
