"""
Plot the loss curves of the same training run on different numbers of processes, and how much they differ.

    python measure/one_curve.py [--out=docs/one_curve.png] [--steps=300]

Trains a small model on the CPU in float32 on 1, 2, 3 and 7 processes, on 4 with ZeRO-3, and on 2 that are
killed twice and resumed. Takes a few minutes on two idle cores.
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

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import REPO, children, column, tiny_data

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


@dataclass(frozen=True)
class Layout:
    """
    One run: its name in the legend, number of processes, ZeRO stage, and the steps after which it is killed.
    """

    name: str
    processes: int
    zero: int = 0
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


def train(layout: Layout, args: list[str], work: Path) -> list[float]:
    """Train on a layout, with its kills; returns the loss of each step."""
    out_dir = work / f"{layout.processes}_{layout.zero}_{len(layout.kills)}"
    for step in [*layout.kills, None]:
        start(
            [*SETTINGS, *args, f"--out_dir={out_dir}", f"--zero={layout.zero}"], layout.processes, work, step
        )
    return list(column(out_dir, "loss").values())


def plot(layouts: list[Layout], losses: np.ndarray, path: Path) -> None:
    """Plot the loss curves, (layouts, steps), and below them their differences from the first one."""
    figure = Figure(figsize=(8, 5.5), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2), subplot_kw={"xmargin": 0.01})
    colors = colormaps["viridis_r"](np.linspace(0.05, 1, len(layouts)))
    widths = np.linspace(11, 1, len(layouts))  # each leaves the edges of those below it visible
    spacing = np.spacing(losses[0].astype(np.float32)) / 1e-7
    below.fill_between(range(len(spacing)), -spacing, spacing, step="mid", color="0.9", linewidth=0)
    for i, layout in enumerate(layouts):
        above.plot(losses[i], color=colors[i], linewidth=widths[i], label=layout.name)
        if i > 0:
            below.plot((losses[i] - losses[0]) / 1e-7, "o", color=colors[i], markersize=widths[i] / 2)
        for step in layout.kills:
            above.plot(
                step, losses[i, step], "X", color="crimson", markersize=11, markeredgecolor="white", zorder=3
            )
            below.axvline(step, color="crimson", linewidth=1, linestyle=":")
    below.yaxis.get_major_locator().set_params(integer=True)
    below.set_xlabel("step")
    above.set_title("Training loss of the same run on different numbers of processes", loc="left")
    below.set_title(
        "Difference from 1 process, in units of 1e-7 (grey: spacing of float32 numbers)", loc="left"
    )
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=REPO / "docs" / "one_curve.png", help="the image to write"
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run, 30 or more")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as with Ctrl-C
    steps = options.steps
    kills = (random.randrange(steps // 5, steps * 2 // 5), random.randrange(steps * 3 // 5, steps * 4 // 5))
    layouts = [
        Layout("1 process", 1),
        Layout("2 processes", 2),
        Layout("3 processes", 3),
        Layout("7 processes", 7),
    ]
    layouts.append(Layout("4 processes, ZeRO-3", 4, zero=3))
    layouts.append(Layout(f"2 processes, killed after steps {kills[0]} and {kills[1]}", 2, kills=kills))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    prepared = [REPO / "data" / name for name in ("shakespeare_char", "stdlib_char")]
    losses = []
    with tempfile.TemporaryDirectory(prefix="one_curve_") as work:
        data = next((f for f in prepared if (f / "train.bin").exists()), None) or tiny_data(
            work, tokens=500_000
        )
        args = [f"--dataset={data}", f"--max_iters={steps - 1}", f"--lr_decay_iters={steps}"]
        for layout in layouts:
            losses.append(train(layout, args, Path(work)))
            difference = np.abs(np.subtract(losses[-1], losses[0])).max()
            print(
                f"{layout.name}: final loss {losses[-1][-1]:.7f}, largest difference {difference:.1e}",
                flush=True,
            )
    plot(layouts, np.array(losses), options.out)


if __name__ == "__main__":
    main()
