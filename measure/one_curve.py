"""
Plot the loss curves of the same training run on different numbers of processes, and how much they differ.

    python measure/one_curve.py [--out=docs] [--steps=300] [--exact_steps=150]

Trains a small model with AdamW on the CPU in float32 on 1, 2, 4 and 7 processes, on 4 with ZeRO-3, and on 2
that are killed twice and resumed. Then trains the model of README.md's first command, whose optimizer, Muon,
amplifies rounding: without `exact` on 1 and 2 processes, and with `exact` on 1, 2, 4 and 7 processes and on 2
that are killed twice, the second time resumed on 3. Takes ten minutes on two idle cores, and writes two
figures: one_curve.png contains the losses of README.md, and differences.png shows how much all runs differ.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import REPO, children, column, tiny_data

from configurator import fail
from isogpt.common.packages import needed_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# 25 sequences per step: no number of processes but 1 divides it, so some ranks have more sequences than
# others
SETTINGS = [
    "--device=cpu",
    "--dtype=float32",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=64",
    "--block_size=64",
    "--batch_size=5",
    "--gradient_accumulation_steps=5",
    "--dropout=0.0",
    "--learning_rate=2e-3",
    "--min_lr=2e-4",
    "--warmup_iters=20",
    "--eval_interval=1000000",
    "--eval_iters=1",
    "--log_interval=1",
    "--save_interval=25",
    "--init_from=auto",
]
# the model and the rates of README.md's first command, with a step of 4 micro-batches
RECIPE = [
    str(REPO / "config" / "train_stdlib_char_exact.py"),
    "--eval_interval=1000000",
    "--eval_iters=1",
    "--log_interval=1",
    "--save_interval=25",
    "--init_from=auto",
]


@dataclass(frozen=True)
class Layout:
    """
    A run: the name in the legend, the number of processes of each start, flags, and the step after which each
    start but the last is killed.
    """

    name: str
    processes: tuple[int, ...]
    flags: tuple[str, ...] = ()
    kills: tuple[int, ...] = ()


def kill(process: subprocess.Popen) -> None:
    """Send SIGKILL to a launcher and its workers, which get no chance to clean up."""
    for pid in [process.pid, *children(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(args: list[str], processes: int, work: Path, kill_after: int | None = None) -> None:
    """Run train.py to its end or, with `kill_after`, until it has logged this step; then kill it."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launcher, str(REPO / "train.py"), *args]
    output = []
    with subprocess.Popen(
        command, cwd=work, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            for line in process.stdout:  # ends when the launcher and all of its workers have ended
                output.append(line)
                if kill_after is not None and line.startswith(f"iter {kill_after}:"):
                    kill(process)
        except BaseException:  # KeyboardInterrupt too: leave no processes behind
            kill(process)
            raise
    expected = 0 if kill_after is None else -signal.SIGKILL
    if process.returncode != expected:
        sys.exit(f"{' '.join(command)} failed:\n{''.join(output[-100:])}")


def train(layout: Layout, args: list[str], out_dir: Path) -> list[float]:
    """Train on a layout, with its kills; returns the loss of each step."""
    for processes, step in zip(layout.processes, [*layout.kills, None], strict=True):
        start([*args, *layout.flags, f"--out_dir={out_dir}"], processes, out_dir.parent, step)
    return list(column(out_dir, "loss").values())


def train_all(layouts: list[Layout], args: list[str], work: Path) -> np.ndarray:
    """Train on all layouts; returns the losses, (layouts, steps)."""
    losses = []
    for i, layout in enumerate(layouts):
        losses.append(train(layout, args, work / f"run{i}"))
        difference = np.abs(np.subtract(losses[-1], losses[0])).max()
        print(
            f"{layout.name}: final loss {losses[-1][-1]:.7f}, largest difference {difference:.1e}", flush=True
        )
    return np.array(losses)


def colors_of(layouts: list[Layout]) -> np.ndarray:
    from matplotlib import colormaps

    return colormaps["viridis_r"](np.linspace(0.05, 1, len(layouts)))


def plot_curves(axes: "Axes", layouts: list[Layout], losses: np.ndarray) -> None:
    """Plot the loss curves, (layouts, steps), on top of each other."""
    widths = np.linspace(11, 1.5, len(layouts))  # each leaves the edges of those below it visible
    for i, (layout, color) in enumerate(zip(layouts, colors_of(layouts), strict=True)):
        axes.plot(losses[i], color=color, linewidth=widths[i], label=layout.name)
        for step in layout.kills:
            axes.plot(
                step, losses[i, step], "X", color="crimson", markersize=12, markeredgecolor="white", zorder=3
            )
            axes.annotate(
                "killed and resumed",
                (step, losses[i, step]),
                xytext=(0, 60),  # above the curve's peaks
                textcoords="offset points",
                ha="center",
                color="crimson",
                arrowprops={"arrowstyle": "-", "color": "crimson"},
            )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)


def plot_differences(axes: "Axes", layouts: list[Layout], losses: np.ndarray) -> None:
    """Plot the differences of the curves, (layouts, steps), from the first one."""
    sizes = np.linspace(6, 1, len(layouts))
    colors = colors_of(layouts)
    spacing = np.spacing(losses[0].astype(np.float32)) / 1e-7
    axes.fill_between(range(len(spacing)), -spacing, spacing, step="mid", color="0.9", linewidth=0)
    for i, layout in list(enumerate(layouts))[1:]:
        difference = (losses[i] - losses[0]) / 1e-7
        axes.plot(difference, "o", color=colors[i], markersize=sizes[i], label=layout.name)
        for step in layout.kills:
            axes.axvline(step, color="crimson", linewidth=1, linestyle=":")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_title(
        "AdamW: difference from 1 process, in units of 1e-7 (grey: spacing of float32 numbers)", loc="left"
    )
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def plot_exact(axes: "Axes", inexact: np.ndarray, layouts: list[Layout], losses: np.ndarray) -> None:
    """Plot how Muon amplifies rounding, (2, steps), and that the differences with `exact` are 0."""
    axes.plot(np.abs(inexact[1] - inexact[0]), color="0.5", label="2 processes, without exact")
    colors = colors_of(layouts)
    sizes = np.linspace(8, 1, len(layouts))
    for i, layout in list(enumerate(layouts))[1:]:
        difference = np.abs(losses[i] - losses[0])
        axes.plot(difference, "o", color=colors[i], markersize=sizes[i], label=f"{layout.name}, with exact")
        for step in layout.kills:
            axes.axvline(step, color="crimson", linewidth=1, linestyle=":")
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_ylim(-3e-8, 1e5)  # the legend is above the curve
    axes.set_yticks([0, 1e-6, 1e-4, 1e-2, 1], minor=False)
    axes.set_yticks([], minor=True)
    axes.set_xlabel("step")
    axes.set_title("Muon, the recipe of the first command: difference from 1 process", loc="left")
    axes.legend(frameon=False, loc="upper center", ncols=2, columnspacing=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=REPO / "docs", help="the folder for the figures")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run, 30 or more")
    parser.add_argument(
        "--exact_steps", type=int, default=150, help="training steps of the recipe, 30 or more"
    )
    options = parser.parse_args()
    try:
        with needed_by("the figure", "matplotlib"):
            from matplotlib.figure import Figure
    except ValueError as e:
        fail(str(e))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as with Ctrl-C
    options.out.mkdir(parents=True, exist_ok=True)
    steps = options.steps
    kills = (random.randrange(steps // 5, steps * 2 // 5), random.randrange(steps * 3 // 5, steps * 4 // 5))
    layouts = [Layout("1 process", (1,))]
    layouts += [Layout(f"{n} processes", (n,)) for n in (2, 4, 7)]
    layouts.append(Layout("4 processes, ZeRO-3", (4,), ("--zero=3",)))
    layouts.append(
        Layout(f"2 processes, killed after steps {kills[0]} and {kills[1]}", (2, 2, 2), kills=kills)
    )
    ends = (options.exact_steps // 3, options.exact_steps * 2 // 3)
    exact_layouts = layouts[:4]
    exact_layouts.append(
        Layout(f"2 processes, killed after step {ends[0]}, and {ends[1]}: then 3", (2, 2, 3), kills=ends)
    )
    prepared = REPO / "data" / "stdlib_char"
    with tempfile.TemporaryDirectory(prefix="one_curve_") as folder:
        work = Path(folder)
        is_prepared = (prepared / "train.bin").exists()
        data = prepared if is_prepared else tiny_data(work, tokens=500_000)
        args = [f"--dataset={data}", f"--max_iters={steps - 1}", f"--lr_decay_iters={steps}"]
        recipe = [*RECIPE, f"--dataset={data}", f"--max_iters={options.exact_steps - 1}"]
        for name in ("adamw", "inexact", "exact"):
            (work / name).mkdir()
        losses = train_all(layouts, [*SETTINGS, *args], work / "adamw")
        inexact = train_all(layouts[:2], [*recipe, "--exact=False"], work / "inexact")
        growth = np.maximum.accumulate(np.abs(inexact[1] - inexact[0]))
        print("without exact, up to step:", *(f"{step}: {growth[step]:.1e}" for step in (5, 15, 29, -1)))
        exact = train_all(exact_layouts, recipe, work / "exact")
    for_readme = [0, 1, 2, 5]  # 1, 2 and 4 processes, and 2 that are killed
    figure = Figure(figsize=(8, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots(subplot_kw={"xmargin": 0.01})
    plot_curves(axes, [layouts[i] for i in for_readme], losses[for_readme])
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.out / "one_curve.png")

    figure = Figure(figsize=(8, 6), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, subplot_kw={"xmargin": 0.01})
    plot_differences(above, layouts, losses)
    plot_exact(below, inexact, exact_layouts, exact)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.out / "differences.png")


if __name__ == "__main__":
    main()
