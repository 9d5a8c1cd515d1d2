"""
What a data set of 1 TB in 10,000 shards costs compared with an ordinary one: the time of a start, memory, and
open files. The shards are sparse files, each with llm.c's header and some tokens, so they take up only 80 MB.

    python measure/any_data.py             all
    python measure/any_data.py --pairs     print commands that compare the time of a step on an idle machine
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
from runs import SHAKESPEARE, tiny_data

from isogpt.data.dataset import open_dataset

SHARDS, TOKENS = 10_000, 50_000_000  # 1 TB with ids of 16 bits
RUNS = 5
# nanoGPT's model for a CPU, with steps of some 20 ms
MODEL = ["--device=cpu", "--dtype=float32", "--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=64"]
MODEL += ["--batch_size=12", "--gradient_accumulation_steps=1", "--eval_iters=2", "--eval_interval=100000"]
MODEL += ["--save_checkpoint=False", "--learning_rate=1e-3", "--warmup_iters=10", "--check_layout=False"]


class Start(NamedTuple):
    """What a run has needed by its first step, and by its last one."""

    seconds: float
    memory: float  # resident, in bytes, after the first step
    memory_later: float
    files: int  # the most that were open


def sparse_data(folder: Path, shards: int = SHARDS, tokens: int = TOKENS) -> Path:
    """
    Write a data set in shards of so many tokens, of which only the first ones are written. Exits if the file
    system does not leave out the others.
    """
    folder.mkdir(parents=True)
    ordinary = folder.parent / "ordinary"
    text = np.fromfile(ordinary / "train.bin", np.uint16)[:1000]
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, tokens
    for number in range(shards):
        split = "train" if number else "val"
        path = folder / f"text_{split}_{number:06d}.bin"
        path.write_bytes(header.tobytes() + np.roll(text, number).tobytes())
        os.truncate(path, header.nbytes + tokens * text.itemsize)
    stat = path.stat()
    if stat.st_blocks * 512 > stat.st_size / 100 + 2**16:
        shutil.rmtree(folder)
        sys.exit(f"the file system of {folder} does not support sparse files: set TMPDIR to one that does")
    shutil.copy(ordinary / "meta.pkl", folder)
    return folder


def time_of_opening(folder: Path, order: str) -> float:
    """The seconds that open_dataset takes in a separate process, whose imports do not count."""
    work = "from isogpt.data.dataset import open_dataset; import time; start = time.perf_counter(); "
    work += f"open_dataset({str(folder)!r}, 64, data_order={order!r}); print(time.perf_counter() - start)"
    run = subprocess.run([sys.executable, "-c", work], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(run.stdout)


def time_of_reading(folder: Path) -> float:
    """Seconds in which a process reads 12 windows of 65 tokens at random positions, the mean of 500."""
    tokens, times = open_dataset(str(folder), 64).train, 500
    starts = np.random.default_rng(0).integers(0, len(tokens) - 65, (times, 12))
    begin = time.perf_counter()
    for windows in starts:
        tokens.read(windows, 65)
    return (time.perf_counter() - begin) / times


def start_of(folder: Path, order: str, steps: int = 300) -> Start:
    """Run train.py for so many steps, and watch its memory and its open files."""
    command = command_of(folder, order, steps)
    began, files = time.perf_counter(), 0
    process = subprocess.Popen(command, cwd=folder.parent, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if not (match := re.match(r"iter (\d+): loss", line)):
            continue
        step = int(match[1])
        files = max(files, len(os.listdir(f"/proc/{process.pid}/fd")))
        if step == 1:
            seconds, memory = time.perf_counter() - began, resident(process.pid)
        elif step == steps - 5:  # it cannot have ended
            memory_later = resident(process.pid)
    if process.wait():
        sys.exit(f"exit status {process.returncode}: {' '.join(command)}")
    return Start(seconds, memory, memory_later, files)


def resident(pid: int) -> int:
    """The bytes of a process that are in memory."""
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def command_of(folder: Path, order: str, steps: int) -> list[str]:
    """A run on a data set."""
    settings = [f"--dataset={folder}", f"--data_order={order}", f"--max_iters={steps}"]
    settings += [f"--lr_decay_iters={steps}", f"--out_dir={folder.parent}/out-{folder.name}"]
    return [sys.executable, str(ROOT / "train.py"), *MODEL, *settings]


def in_turn(works: list[Callable[[], object]]) -> list[list]:
    """The results of each measurement. They alternate in RUNS rounds."""
    rounds = [[work() for work in works] for _ in range(RUNS)]
    return [list(results) for results in zip(*rounds, strict=True)]


def compare(work: Path, order: str) -> None:
    """Print what a sparse data set costs in an order of its sequences."""
    folders = [work / "data" / name for name in ("ordinary", "sparse")]
    few, many = in_turn([lambda folder=folder: time_of_opening(folder, order) for folder in folders])
    print(
        f"{order}: open_dataset takes {statistics.median(many):.3f} s, "
        f"ordinary {statistics.median(few):.3f} s"
    )
    few, many = map(time_of_reading, folders)
    print(f"{order}: a micro-batch of 12 windows takes {many * 1e3:.2f} ms, ordinary {few * 1e3:.2f} ms")
    few, many = (
        Start(*map(statistics.median, zip(*starts, strict=True)))
        for starts in in_turn([partial(start_of, folder, order) for folder in folders])
    )
    print(f"{order}: up to step 1 {many.seconds:.2f} s, ordinary {few.seconds:.2f} s")
    for name, a, b in (
        ("after step 1", few.memory, many.memory),
        ("at the end", few.memory_later, many.memory_later),
    ):
        print(f"{order}: memory {name} {b / 1e6:.0f} MB, ordinary {a / 1e6:.0f} MB: {(b - a) / 1e6:+.0f} MB")
    print(f"{order}: at most {many.files} open files, ordinary {few.files}", flush=True)


def prepare(work: Path) -> None:
    """Write the ordinary and the sparse data set."""
    if not SHAKESPEARE.exists():
        sys.exit("the text is missing: run python data/shakespeare_char/prepare.py")
    tiny_data(work, tokens=1_000_000, name="ordinary")
    start = time.perf_counter()
    sparse_data(work / "data/sparse")
    print(f"{SHARDS:,} shards of {TOKENS * 2 / 1e6:.0f} MB written in {time.perf_counter() - start:.0f} s")


def main() -> None:
    """See the head of this file."""
    if sys.argv[1:] == ["--pairs"]:
        work = Path(tempfile.mkdtemp(prefix="any_data"))
        prepare(work)
        for order in ("random", "shuffle"):
            commands = [command_of(work / "data" / name, order, 400) for name in ("ordinary", "sparse")]
            print(f"pair -n 10 --skip 50 -- {' --- '.join(map(' '.join, commands))}")
        print(f"rm -r {work}")
        return
    with tempfile.TemporaryDirectory(prefix="any_data") as folder:
        prepare(Path(folder))
        for order in ("random", "shuffle"):
            compare(Path(folder), order)


if __name__ == "__main__":
    main()
