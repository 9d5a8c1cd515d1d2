"""
Time to nanoGPT's loss, and the figure of docs/recipes.md: nanoGPT's recipe for Shakespeare on a CPU, run by
nanoGPT itself, and config/train_shakespeare_char_fast.py, alternating. It needs an idle machine and
data/shakespeare_char.

    python measure/time_to_loss.py --nanogpt=FOLDER     FOLDER: a clone of github.com/karpathy/nanoGPT
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import CPU_RECIPE, REPO, column

from configurator import fail
from isogpt.common.packages import needed_by

NANOGPT = [
    "config/train_shakespeare_char.py",
    *CPU_RECIPE,
    "--device=cpu",
    "--log_interval=1",
    "--eval_interval=2000",
    "--out_dir=out",
]
FAST = ["config/train_shakespeare_char_fast.py", "--log_interval=1", "--device=cpu"]
WHOLE_SPLIT = [
    "--eval_only=True",
    "--eval_iters=145",
    "--batch_size=12",
    "--block_size=64",
    "--device=cpu",
    "--dataset=shakespeare_char",
    "--dtype=float32",
]


def run(args: list[str], cwd: Path) -> str:
    """Run train.py of a folder; returns its output."""
    done = subprocess.run([sys.executable, "train.py", *args], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return done.stdout


def val_loss(text: str) -> float:
    """The last validation loss in train.py's output."""
    return float(re.findall(r"val loss ([\d.]+)", text)[-1])


def train_nanogpt(folder: Path) -> tuple[np.ndarray, np.ndarray, float]:
    """(seconds of each step, losses, loss over the whole validation split)"""
    text = run(NANOGPT, folder)
    # without the first and the last step, whose times include an evaluation
    found = re.findall(r"^iter \d+: loss ([\d.]+), time ([\d.]+)ms", text, re.M)[1:-1]
    losses, ms = np.array(found, dtype=float).T
    return ms / 1e3, losses, val_loss(run([f"--init_from={folder / 'out'}", *WHOLE_SPLIT], REPO))


def train_fast(out_dir: Path, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(seconds of each step, losses, loss over the whole validation split)"""
    text = run([*FAST, f"--out_dir={out_dir}", f"--seed={seed}"], REPO)
    ms, losses = (np.array(list(column(out_dir, key).values())) for key in ("step_ms", "loss"))
    return ms / 1e3, losses, val_loss(text)


def plot(curves: dict[str, tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Loss, averaged over 20 steps, against the seconds of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, (seconds, losses) in curves.items():
        mean = np.convolve(losses, np.ones(20) / 20, "valid")
        axes.plot(np.cumsum(seconds)[19:], mean, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("training loss, mean of 20 steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each, with seeds 1337, 1338, ...")
    parser.add_argument(
        "--out", type=Path, default=REPO / "docs" / "time_to_loss.png", help="the image to write"
    )
    options = parser.parse_args()
    try:
        with needed_by("the figure", "matplotlib"):
            import matplotlib.figure  # noqa: F401
    except ValueError as e:
        fail(str(e))
    ratios, curves = [], {}
    with tempfile.TemporaryDirectory(prefix="time_to_loss_") as work:
        nanogpt = Path(work) / "nanoGPT"
        shutil.copytree(options.nanogpt, nanogpt)
        for path in (REPO / "data" / "shakespeare_char").glob("*.[bp]*"):  # train.bin, val.bin, meta.pkl
            shutil.copy(path, nanogpt / "data" / "shakespeare_char")
        for i in range(options.pairs):
            theirs, ours = train_nanogpt(nanogpt), train_fast(Path(work) / f"out{i}", 1337 + i)
            for name, (seconds, losses, loss) in {"nanoGPT": theirs, "fast": ours}.items():
                print(
                    f"{name}: {len(losses)} steps, {statistics.median(seconds) * 1e3:.1f} ms each, "
                    f"{sum(seconds):.1f} s, val loss {loss:.4f}",
                    flush=True,
                )
            ratios.append(sum(theirs[0]) / sum(ours[0]))
            curves = {
                "nanoGPT's recipe, by nanoGPT": theirs[:2],
                "config/train_shakespeare_char_fast.py": ours[:2],
            }
    print(f"{statistics.median(ratios):.1f} times as fast ({min(ratios):.1f} to {max(ratios):.1f})")
    plot(curves, options.out)


if __name__ == "__main__":
    main()
