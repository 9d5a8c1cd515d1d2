"""
nanoGPT and isoGPT, alternating, on an idle machine: docs/benchmarks.md and docs/recipes.md have the figures.
They need data/shakespeare_char. nanoGPT runs in a temporary copy.

    python measure/against_nanogpt.py speed --nanogpt=FOLDER   FOLDER: a clone of karpathy/nanoGPT

    speed         milliseconds per step         loss          validation losses after 500 steps
    start         seconds to the first step     sampling      tokens per second of one thread's CPU time
    memory        peaks of the resident sets    time_to_loss  also draws docs/time_to_loss.png
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import CPU_RECIPE

BOTH = ["--device=cpu", "--log_interval=1", "--wandb_log=False"]
SHORT = ["--eval_interval=100000", "--eval_iters=1", "--gradient_accumulation_steps=1"]
CHARACTERS, FAST = "config/train_shakespeare_char.py", "config/train_shakespeare_char_fast.py"
EAGER = "--compile=False"
RANDOM = "--dataset={random}"  # tokens
GPT2 = [RANDOM, "--n_layer=12", "--n_head=12", "--n_embd=768", "--block_size=1024"]
FOUR_LAYERS = [RANDOM, "--n_layer=4", "--n_head=8", "--n_embd=512", "--block_size=512"]
SPEED = {  # name: arguments of both programs, steps, of which the first are not counted
    "10.65M parameters, 64 sequences, dropout 0.2": ([CHARACTERS], 6, 2),
    "--batch_size=8": ([CHARACTERS, "--batch_size=8"], 14, 4),
    "--batch_size=8 --dropout=0.0": ([CHARACTERS, "--batch_size=8", "--dropout=0.0"], 14, 4),
    "the Shakespeare model for a CPU": ([CHARACTERS, *CPU_RECIPE], 150, 20),
    "GPT-2 124M, 1 x 1024 tokens": ([*GPT2, "--batch_size=1"], 6, 2),
}
MEMORY = {
    "vocabulary 50304, 4 layers of 512, 8 x 512 tokens": [*FOUR_LAYERS, "--batch_size=8"],
    "GPT-2 124M, 4 x 1024 tokens": [*GPT2, "--batch_size=4"],
}
SAMPLE = """
import time, torch
from model import GPT, GPTConfig
torch.manual_seed(1337)
torch.set_num_threads(1)
"""
THEIR_SAMPLE = f"""{SAMPLE}
model = GPT(GPTConfig(bias=False)).eval()
start = time.process_time()
model.generate(torch.full((1, 1), 198), 256, 0.8, 200)
print("nanoGPT, one sample:", 256 / (time.process_time() - start), "tokens/s")
"""
OUR_SAMPLE = f"""{SAMPLE}
from isogpt.launch.device import keep_freed_memory
from isogpt.nn.generation import prepare
keep_freed_memory()
for dtype in (torch.bfloat16, torch.float32):
    model = GPT(GPTConfig(), 1337).eval()
    prepare(model, dtype)
    start = time.process_time()
    model.generate(torch.full((10, 1), 198), 256, 0.8, 200, vocab_size=50257)
    print(f"isoGPT, ten samples, {{dtype}}:", 2560 / (time.process_time() - start), "tokens/s")
"""


def train(folder: Path, *args: str) -> SimpleNamespace:
    """
    Run train.py in a folder; returns the seconds to its first step, each step's ms and loss, the validation
    losses and the peak of the resident set in GB.
    """
    first_s, lines, began = 0.0, [], time.perf_counter()
    command = [sys.executable, "-u", "train.py", *args, *BOTH]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        lines.append(line)
        if line.startswith("iter 0:"):
            first_s = time.perf_counter() - began
    _, status, usage = os.wait4(process.pid, 0)
    text = "".join(lines)
    if status:
        sys.exit(text[-2000:])
    steps = np.array(re.findall(r"^iter \d+: loss ([\d.]+), time ([\d.]+)ms", text, re.M), float)
    val_losses = [float(loss) for loss in re.findall(r"val loss ([\d.]+)", text)]
    peak_gb = usage.ru_maxrss * 1024 / 1e9
    losses, ms = steps.reshape(-1, 2).T
    return SimpleNamespace(first_s=first_s, ms=ms, losses=losses, val_losses=val_losses, peak_gb=peak_gb)


def pairs(place: SimpleNamespace, args: list[str], count: int) -> list[tuple]:
    """Alternate runs of nanoGPT and of isoGPT."""
    args = [arg.format(random=place.random) for arg in args]
    config, *more = args
    theirs, ours = [config, *SHORT, *more], [config, *SHORT, *more, *place.ours]
    return [(train(place.nanogpt, *theirs), train(ROOT, *ours)) for _ in range(count)]


def show(name: str, unit: str, found: list[tuple[float, float]]) -> None:
    """Print the ratio of each pair, and both medians."""
    theirs, ours = zip(*found, strict=True)
    ratios = [a / b for a, b in found]
    spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"{name}: nanoGPT / isoGPT {spread}, medians {median(theirs):.2f} and {median(ours):.2f} {unit}")


def speed(place: SimpleNamespace, count: int) -> None:
    for name, (args, steps, skipped) in SPEED.items():
        found = pairs(place, [*args, EAGER, f"--max_iters={steps}"], count)
        show(name, "ms per step", [tuple(median(run.ms[skipped:]) for run in pair) for pair in found])


def start(place: SimpleNamespace, count: int) -> None:
    work = [CHARACTERS, "--batch_size=8", "--dropout=0.0", "--max_iters=1"]
    for name, args in (("without torch.compile", [EAGER]), ("with both programs' defaults", [])):
        _, *found = pairs(place, [*work, *args], count + 1)  # the first pair fills torch.compile's cache
        show(f"first step of 10.65M parameters, {name}", "s", [(a.first_s, b.first_s) for a, b in found])


def memory(place: SimpleNamespace, count: int) -> None:
    for name, args in MEMORY.items():
        found = pairs(place, [*args, EAGER, "--max_iters=3"], count)
        show(name, "GB", [(a.peak_gb, b.peak_gb) for a, b in found])


def loss(place: SimpleNamespace, count: int) -> None:
    """Print the validation losses after 500 steps: of nanoGPT, and of isoGPT with `count` seeds."""
    for name in ("--batch_size=8 --dropout=0.0", "the Shakespeare model for a CPU"):
        steps = "--gradient_accumulation_steps=1 --max_iters=500 --eval_interval=500 --eval_iters=20"
        args = [*SPEED[name][0], EAGER, *steps.split()]
        seeds = [f"--seed={seed}" for seed in (1337, *range(1, count))]
        ours = [train(ROOT, *args, *place.ours, seed).val_losses[1] for seed in seeds]
        theirs = train(place.nanogpt, *args).val_losses[1]
        print(f"{name}: nanoGPT {theirs:.4f}, isoGPT {', '.join(f'{x:.4f}' for x in ours)}", flush=True)


def sampling(place: SimpleNamespace, count: int) -> None:
    """nanoGPT generates one sample at a time; isoGPT generates ten together."""
    for _ in range(count):
        for folder, code in ((place.nanogpt, THEIR_SAMPLE), (ROOT, OUR_SAMPLE)):
            subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def time_to_loss(place: SimpleNamespace, count: int) -> None:
    """nanoGPT's recipe for Shakespeare on a CPU, by nanoGPT itself, and our fast one."""
    whole_split = "--eval_only=True --eval_iters=145 --batch_size=12 --block_size=64 --dtype=float32"
    whole_split += f" --dataset=shakespeare_char --init_from={place.nanogpt / 'out'}"
    recipe = [CHARACTERS, *CPU_RECIPE, "--eval_interval=2000", "--out_dir=out"]
    ratios = []
    for seed in range(1337, 1337 + count):
        theirs = train(place.nanogpt, *recipe)
        theirs.val_losses = train(ROOT, *whole_split.split()).val_losses
        # without the first and the last step, whose times include an evaluation
        theirs.ms, theirs.losses = theirs.ms[1:-1], theirs.losses[1:-1]
        ours = train(ROOT, FAST, *place.ours, f"--seed={seed}")
        for name, run in {"nanoGPT": theirs, "fast": ours}.items():
            took = f"{len(run.ms)} steps, {median(run.ms):.1f} ms each, {sum(run.ms) / 1e3:.1f} s"
            print(f"{name}: {took}, val loss {run.val_losses[-1]:.4f}", flush=True)
        ratios.append(sum(theirs.ms) / sum(ours.ms))
    print(f"{median(ratios):.1f} times as fast ({min(ratios):.1f} to {max(ratios):.1f})")
    plot({"nanoGPT's recipe, by nanoGPT": theirs, FAST: ours})


def plot(curves: dict[str, SimpleNamespace]) -> None:
    """Loss, averaged over 20 steps, against the seconds of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, run in curves.items():
        mean = np.convolve(run.losses, np.ones(20) / 20, "valid")
        axes.plot(np.cumsum(run.ms / 1e3)[19:], mean, label=name)
    axes.set(xscale="log", xlabel="seconds of training", ylabel="training loss, mean of 20 steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(ROOT / "docs/time_to_loss.png")


def main() -> None:
    kinds = {kind.__name__: kind for kind in (speed, start, memory, loss, sampling, time_to_loss)}
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    prepared = ROOT / "data/shakespeare_char"
    if not (prepared / "train.bin").is_file():
        parser.error(f"run python {prepared}/prepare.py first")
    with tempfile.TemporaryDirectory(prefix="against_nanogpt_") as work:
        nanogpt = Path(work) / "nanoGPT"
        shutil.copytree(options.nanogpt, nanogpt)
        random = nanogpt / "data/random"
        random.mkdir(exist_ok=True)
        tokens = np.random.default_rng(1337).integers(0, 50257, 10**6, dtype=np.uint16)
        for split in ("train", "val"):
            tokens.tofile(random / f"{split}.bin")
        for path in prepared.glob("*.[bp]*"):  # train.bin, val.bin, meta.pkl
            shutil.copy(path, nanogpt / "data/shakespeare_char")
        ours = [f"--out_dir={work}/out", "--save_checkpoint=False"]
        place = SimpleNamespace(nanogpt=nanogpt, random=random, ours=ours)
        kinds[options.what](place, options.pairs)


if __name__ == "__main__":
    main()
