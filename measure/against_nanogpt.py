"""
The pairs of docs/benchmarks.md: nanoGPT and isoGPT, alternating, on an idle machine. They need
data/shakespeare_char. nanoGPT runs in a temporary copy.

    python measure/against_nanogpt.py speed --nanogpt=FOLDER     FOLDER: a clone of nanoGPT
    python measure/against_nanogpt.py start --nanogpt=FOLDER     seconds from the command to the first step
    python measure/against_nanogpt.py memory --nanogpt=FOLDER    the peaks of the resident sets
    python measure/against_nanogpt.py loss --nanogpt=FOLDER      validation losses after 500 steps
    python measure/against_nanogpt.py sampling --nanogpt=FOLDER  tokens per second of one thread's CPU time
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import CPU_RECIPE, REPO

BOTH = ["--device=cpu", "--log_interval=1", "--eval_interval=100000", "--eval_iters=1"]
BOTH += ["--gradient_accumulation_steps=1", "--wandb_log=False"]
EAGER = "--compile=False"
CHARACTERS = "config/train_shakespeare_char.py"
CHARACTERS_DATA = REPO / "data" / "shakespeare_char"
RANDOM_TOKENS = "--dataset=random"  # replaced by the path of a data set of random tokens
GPT2 = [RANDOM_TOKENS, "--n_layer=12", "--n_head=12", "--n_embd=768", "--block_size=1024"]
SPEED = {  # name: (arguments of both programs, steps, of which the first are not counted)
    "10.65M parameters, 64 sequences, dropout 0.2": ([CHARACTERS, EAGER], 6, 2),
    "--batch_size=8": ([CHARACTERS, EAGER, "--batch_size=8"], 14, 4),
    "--batch_size=8 --dropout=0.0": ([CHARACTERS, EAGER, "--batch_size=8", "--dropout=0.0"], 14, 4),
    "the Shakespeare model for a CPU": ([CHARACTERS, *CPU_RECIPE, EAGER], 150, 20),
    "GPT-2 124M, 1 x 1024 tokens": ([*GPT2, EAGER, "--batch_size=1"], 6, 2),
}
MEMORY = {  # name: arguments of both programs
    "vocabulary 50304, 4 layers of 512, 8 x 512 tokens": [
        *(RANDOM_TOKENS, "--n_layer=4", "--n_head=8", "--n_embd=512", "--block_size=512"),
        "--batch_size=8",
    ],
    "GPT-2 124M, 4 x 1024 tokens": [*GPT2, "--batch_size=4"],
}
SAMPLE = """
import time, torch
from model import GPT, GPTConfig
torch.manual_seed(1337)
torch.set_num_threads(1)
model = GPT(GPTConfig(bias=False)).eval()
prompt = torch.full((1, 1), 198)
start = time.process_time()
model.generate(prompt, 256, 0.8, 200)
print("tokens/s:", 256 / (time.process_time() - start))
"""


class Run(NamedTuple):
    """What a run of train.py took."""

    first_s: float  # from the command to the line of the first step
    step_ms: list[float]
    peak_gb: float  # the largest resident set
    val_losses: list[float]  # of each evaluation


def train(folder: Path, args: list[str], last: list[str] | None = None) -> Run:
    """Run train.py in a folder. The arguments in `last` come after those of all runs."""
    first_s, lines, began = 0.0, [], time.perf_counter()
    command = [sys.executable, "-u", "train.py", *args, *BOTH, *(last or [])]  # a config file comes first
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout:
        lines.append(line)
        if line.startswith("iter 0:"):
            first_s = time.perf_counter() - began
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit("".join(lines)[-2000:])
    times = re.findall(r"^iter \d+: .*?time ([\d.]+)ms", "".join(lines), re.M)
    losses = re.findall(r"^step \d+: train loss [\d.]+, val loss ([\d.]+)", "".join(lines), re.M)
    return Run(
        first_s, [float(ms) for ms in times], usage.ru_maxrss * 1024 / 1e9, [float(loss) for loss in losses]
    )


def pairs(nanogpt: Path, isogpt: list[str], args: list[str], count: int) -> list[tuple[Run, Run]]:
    """Alternate runs of nanoGPT with `args` and of isoGPT with `args` and `isogpt`."""
    tokens = f"--dataset={nanogpt / 'data' / 'random'}"
    args = [tokens if arg == RANDOM_TOKENS else arg for arg in args]
    return [(train(nanogpt, args), train(REPO, [*args, *isogpt])) for _ in range(count)]


def shown(name: str, unit: str, theirs: list[float], ours: list[float]) -> str:
    """A line: the ratio of each pair, and both medians."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    medians = f"{statistics.median(theirs):.2f} and {statistics.median(ours):.2f} {unit}"
    return f"{name}: nanoGPT / isoGPT {spread}, medians {medians}"


def speed(nanogpt: Path, isogpt: list[str], count: int) -> None:
    for name, (args, steps, skipped) in SPEED.items():
        found = pairs(nanogpt, isogpt, [*args, f"--max_iters={steps}"], count)
        theirs, ours = (
            [statistics.median(run.step_ms[skipped:]) for run in runs] for runs in zip(*found, strict=True)
        )
        print(shown(name, "ms per step", theirs, ours), flush=True)


def start(nanogpt: Path, isogpt: list[str], count: int) -> None:
    work = [CHARACTERS, "--batch_size=8", "--dropout=0.0", "--max_iters=1"]
    for name, args in (("without torch.compile", [EAGER]), ("with both programs' defaults", [])):
        pairs(nanogpt, isogpt, [*work, *args], 1)  # fills torch.compile's cache
        found = pairs(nanogpt, isogpt, [*work, *args], count)
        theirs, ours = ([run.first_s for run in runs] for runs in zip(*found, strict=True))
        print(shown(f"first step of 10.65M parameters, {name}", "s", theirs, ours), flush=True)


def memory(nanogpt: Path, isogpt: list[str], count: int) -> None:
    for name, args in MEMORY.items():
        found = pairs(nanogpt, isogpt, [*args, EAGER, "--max_iters=3"], count)
        theirs, ours = ([run.peak_gb for run in runs] for runs in zip(*found, strict=True))
        print(shown(name, "GB", theirs, ours), flush=True)


def loss(nanogpt: Path, isogpt: list[str], count: int) -> None:
    """Print the validation losses after 500 steps: of nanoGPT, and of isoGPT with `count` seeds."""
    last = ["--max_iters=500", "--eval_interval=500", "--eval_iters=20"]
    for name in ("--batch_size=8 --dropout=0.0", "the Shakespeare model for a CPU"):
        args, *_ = SPEED[name]
        theirs = train(nanogpt, args, last).val_losses[1]
        seeds = [1337, *range(1, count)]
        ours = [train(REPO, [*args, *isogpt, f"--seed={seed}"], last).val_losses[1] for seed in seeds]
        print(f"{name}: nanoGPT {theirs:.4f}, isoGPT {', '.join(f'{x:.4f}' for x in ours)}", flush=True)


def sampling(nanogpt: Path, isogpt: list[str], count: int) -> None:
    """nanoGPT generates one sample at a time; isoGPT generates ten together, in measure/costs.py."""
    commands = {"nanoGPT": ["-c", SAMPLE], "isoGPT": [str(ROOT / "measure" / "costs.py"), "sampling"]}
    for _ in range(count):
        for name, command in commands.items():
            done = subprocess.run(
                [sys.executable, *command], cwd=nanogpt, capture_output=True, text=True, check=True
            )
            print(f"{name}\n{done.stdout}", end="", flush=True)


def main() -> None:
    kinds = {found.__name__: found for found in (speed, start, memory, loss, sampling)}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"--pairs is {options.pairs}: set it to at least 1")
    if not (options.nanogpt / "train.py").is_file() or not (options.nanogpt / "data").is_dir():
        parser.error(f"{options.nanogpt} is not a clone of nanoGPT: it lacks train.py or data/")
    if not (CHARACTERS_DATA / "train.bin").is_file():
        parser.error(f"run python {CHARACTERS_DATA}/prepare.py first")
    with tempfile.TemporaryDirectory(prefix="against_nanogpt_") as work:
        nanogpt = Path(work) / "nanoGPT"
        shutil.copytree(options.nanogpt, nanogpt)
        data, characters = nanogpt / "data" / "random", nanogpt / "data" / "shakespeare_char"
        for folder in (data, characters):
            folder.mkdir(exist_ok=True)
        tokens = np.random.default_rng(1337).integers(0, 50257, 10**6, dtype=np.uint16)
        for split in ("train", "val"):
            tokens.tofile(data / f"{split}.bin")
        for path in CHARACTERS_DATA.glob("*.[bp]*"):  # train.bin, val.bin, meta.pkl
            shutil.copy(path, characters)
        isogpt = [f"--out_dir={Path(work) / 'out'}", "--save_checkpoint=False"]
        kinds[options.what](nanogpt, isogpt, options.pairs)


if __name__ == "__main__":
    main()
