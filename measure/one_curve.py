"""
Plot the loss curves of the same training run on different numbers of processes, and how much they differ.

    python measure/one_curve.py [--out=docs] [--steps=300] [--exact_steps=150]

Trains a small model with AdamW on the CPU in float32 on 1, 2, 4 and 7 processes, on 4 with ZeRO-3, and on 2
that are killed twice and resumed. Then trains the model of README.md's first command, whose optimizer, Muon,
amplifies rounding: without `exact` on 1 and 2 processes, and with `exact` on 1, 2, 4 and 7 processes and on 2
that are killed twice, the second time resumed on 3. Takes ten minutes on two idle cores, and writes two
figures: one_curve.png contains the losses of README.md, and differences.png shows how much all runs differ.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
from runs import children, column, tiny_data

from configurator import fail
from isogpt.common.packages import needed_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# losses and a checkpoint every 25 steps, and nothing else
BASE = [
    "--eval_interval=1000000",
    "--eval_iters=1",
    "--log_interval=1",
    "--save_interval=25",
    "--init_from=auto",
]
# 25 sequences per step: no number of processes but 1 divides it, so some ranks have more than others
ADAMW = "--device=cpu --dtype=float32 --n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=5"
ADAMW += " --gradient_accumulation_steps=5 --dropout=0.0 --learning_rate=2e-3 --min_lr=2e-4 --warmup_iters=20"
ADAMW = [*BASE, *ADAMW.split()]
# the model and the rates of README.md's first command, with a step of 4 micro-batches
RECIPE = [str(ROOT / "config/train_stdlib_char_exact.py"), *BASE]


@dataclass(frozen=True)
class Layout:
    """The name in the legend, the processes of each start, and the steps after which all but the last die."""

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
    command, output, pipe = [*launcher, str(ROOT / "train.py"), *args], [], subprocess.PIPE
    process = subprocess.Popen(command, cwd=work, text=True, stdout=pipe, stderr=subprocess.STDOUT)
    try:
        for line in process.stdout:  # ends when the launcher and all of its workers have ended
            output.append(line)
            if line.startswith(f"iter {kill_after}:"):
                kill(process)
    except BaseException:  # KeyboardInterrupt too: leave no processes behind
        kill(process)
        raise
    expected = 0 if kill_after is None else -signal.SIGKILL
    if process.wait() != expected:
        sys.exit(f"{' '.join(command)} failed:\n{''.join(output[-100:])}")


def train(layouts: list[Layout], args: list[str], work: Path) -> np.ndarray:
    """Train on all layouts, with their kills; returns the losses, (layouts, steps)."""
    losses = []
    for i, layout in enumerate(layouts):
        out = work / f"run{i}"
        for processes, step in zip(layout.processes, [*layout.kills, None], strict=True):
            start([*args, *layout.flags, f"--out_dir={out}"], processes, work, step)
        losses.append(list(column(out, "loss").values()))
        difference = np.abs(np.subtract(losses[-1], losses[0])).max()
        print(f"{layout.name}: final loss {losses[-1][-1]:.7f}, largest difference {difference:.1e}")
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
            place = step, losses[i, step]
            cross = {"markersize": 12, "markeredgecolor": "white", "zorder": 3}
            axes.plot(*place, "X", color="crimson", **cross)
            arrow = {"arrowstyle": "-", "color": "crimson"}
            above = {"xytext": (0, 60), "textcoords": "offset points", "ha": "center"}  # the curve's peaks
            axes.annotate("killed and resumed", place, color="crimson", arrowprops=arrow, **above)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend(frameon=False)


def plot_points(axes: "Axes", layouts: list[Layout], differences: np.ndarray, note: str = "") -> None:
    """Plot the differences from the first layout as points, and the kills as lines."""
    sizes, colors = np.linspace(6, 1, len(layouts)), colors_of(layouts)
    for i, layout in list(enumerate(layouts))[1:]:
        label = layout.name + note
        axes.plot(differences[i], "o", color=colors[i], markersize=sizes[i], label=label)
        for step in layout.kills:
            axes.axvline(step, color="crimson", linewidth=1, linestyle=":")
    axes.set_xlabel("step")


def plot_differences(axes: "Axes", layouts: list[Layout], losses: np.ndarray) -> None:
    """Plot the differences of the curves, (layouts, steps), from the first one."""
    spacing = np.spacing(losses[0].astype(np.float32)) / 1e-7
    axes.fill_between(range(len(spacing)), -spacing, spacing, step="mid", color="0.9", linewidth=0)
    plot_points(axes, layouts, (losses - losses[0]) / 1e-7)
    axes.yaxis.get_major_locator().set_params(integer=True)
    units = "in units of 1e-7 (grey: spacing of float32 numbers)"
    axes.set_title(f"AdamW: difference from 1 process, {units}", loc="left")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def plot_exact(axes: "Axes", inexact: np.ndarray, layouts: list[Layout], losses: np.ndarray) -> None:
    """Plot how Muon amplifies rounding, (2, steps), and that the differences with `exact` are 0."""
    axes.plot(np.abs(inexact[1] - inexact[0]), color="0.5", label="2 processes, without exact")
    plot_points(axes, layouts, np.abs(losses - losses[0]), ", with exact")
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_ylim(-3e-8, 1e5)  # the legend is above the curve
    axes.set_yticks([0, 1e-6, 1e-4, 1e-2, 1], minor=False)
    axes.set_yticks([], minor=True)
    axes.set_title("Muon, the recipe of the first command: difference from 1 process", loc="left")
    axes.legend(frameon=False, loc="upper center", ncols=2, columnspacing=1)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="the folder for the figures")
    parser.add_argument("--steps", type=int, default=300, help="of each run with AdamW, 30 or more")
    parser.add_argument("--exact_steps", type=int, default=150, help="of the recipe, 30 or more")
    options = parser.parse_args()
    try:
        with needed_by("the figure", "matplotlib"):
            from matplotlib.figure import Figure
    except ValueError as e:
        fail(str(e))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as with Ctrl-C
    options.out.mkdir(parents=True, exist_ok=True)
    steps, exact_steps = options.steps, options.exact_steps
    kills = random.randrange(steps // 5, steps * 2 // 5), random.randrange(steps * 3 // 5, steps * 4 // 5)
    layouts = [Layout("1 process", (1,)), *(Layout(f"{n} processes", (n,)) for n in (2, 4, 7))]
    killed = f"2 processes, killed after step {exact_steps // 3}, and {exact_steps * 2 // 3}: then 3"
    ends = exact_steps // 3, exact_steps * 2 // 3
    exact_layouts = [*layouts, Layout(killed, (2, 2, 3), kills=ends)]
    layouts.append(Layout("4 processes, ZeRO-3", (4,), ("--zero=3",)))
    killed = f"2 processes, killed after steps {kills[0]} and {kills[1]}"
    layouts.append(Layout(killed, (2, 2, 2), kills=kills))
    with tempfile.TemporaryDirectory(prefix="one_curve_") as folder:
        work, data = Path(folder), ROOT / "data/stdlib_char"
        if not (data / "train.bin").exists():
            data = tiny_data(work, tokens=500_000)
        args = [*ADAMW, f"--dataset={data}", f"--max_iters={steps - 1}", f"--lr_decay_iters={steps}"]
        recipe = [*RECIPE, f"--dataset={data}", f"--max_iters={exact_steps - 1}"]
        for name in ("adamw", "inexact", "exact"):
            (work / name).mkdir()
        losses = train(layouts, args, work / "adamw")
        inexact = train(layouts[:2], [*recipe, "--exact=False"], work / "inexact")
        growth = np.maximum.accumulate(np.abs(inexact[1] - inexact[0]))
        print("without exact, up to step:", *(f"{step}: {growth[step]:.1e}" for step in (5, 15, 29, -1)))
        exact = train(exact_layouts, recipe, work / "exact")
    figures = [Figure(figsize=(8, height), dpi=110, layout="constrained") for height in (3.6, 6)]
    axes, (above, below) = figures[0].subplots(subplot_kw={"xmargin": 0.01}), figures[1].subplots(2)
    for_readme = [0, 1, 2, 5]  # 1, 2 and 4 processes, and 2 that are killed
    plot_curves(axes, [layouts[i] for i in for_readme], losses[for_readme])
    plot_differences(above, layouts, losses)
    plot_exact(below, inexact, exact_layouts, exact)
    for drawn in (axes, above, below):
        drawn.margins(x=0.01)
        drawn.spines[["top", "right"]].set_visible(False)
    for figure, name in zip(figures, ("one_curve.png", "differences.png"), strict=True):
        figure.savefig(options.out / name)


if __name__ == "__main__":
    main()
