"""
How the cost of everything but the matmuls grows with ranks, bytes, parameters and steps, counted in requests,
bytes and items, so that a busy machine shows the same. docs/scaling.md has the table.

    python measure/growth.py                 all rows
    python measure/growth.py store metrics   these
"""

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from isogpt.common.files import read_records  # noqa: E402


class Cost(NamedTuple):
    """What one size costs."""

    size: str  # such as "1,024 ranks"
    amount: float
    unit: str  # such as "requests a rank"


# -- newer_checkpoints: a start from an older step beside newer checkpoints (bytes that are read)

# -- open_files: open files of a rank, and of the store's host (files)

# -- gloo: what gloo's groups ask of the store (requests, bytes)

# -- store: a start: what ranks ask of the store to know each other (requests, bytes)

# -- read_ahead: a window of tokens from a file larger than memory (bytes from the disk)

# -- hashing: a save in shards, and a resume (bytes that rank 0 hashes)

# -- initial_weights: a new model that is divided (numbers that a rank draws)

# -- metrics: an evaluation and a resume beside a long metrics.jsonl (bytes that are read, memory)
FIELDS = {
    name: 1.5 for name in ("loss", "grad_norm", "lr", "step_ms", "step_ms_max", "data_ms", "data_ms_max")
}
FIELDS |= {
    "memory_gb": 1.0,
    "tokens_per_s": 1e6,
    "mfu": 0.4,
    "tokens": 10**9,
    "loss_mean": 1.5,
    "left_s": 9.9,
}


def write_metrics(folder: Path, steps: int) -> None:
    """Write the metrics.jsonl of a run that was evaluated 100 times."""
    end = json.dumps(FIELDS)[1:]
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(steps):
            if step % (steps // 100) == 0:
                file.write(json.dumps({"iter": step, "train_loss": 1.5, "val_loss": 1.5}) + "\n")
            file.write(f'{{"iter": {step}, {end}\n')


def bytes_of_this_thread() -> int:
    """The bytes that this thread has read so far (Linux)."""
    return int(Path("/proc/thread-self/io").read_text().split()[1])


def metrics(sizes: tuple[int, ...] = (1_000, 1_000_000)) -> list[Cost]:
    """
    A resume and the first evaluation after it: what training waits for, and the memory, also of the thread
    that draws.
    """
    from matplotlib.figure import Figure

    from isogpt.monitor.sink_metrics import MetricsFile
    from isogpt.monitor.sink_plot import Plot

    Figure(layout="constrained").add_subplot()  # what matplotlib allocates once
    costs = []
    for steps in sizes:
        with TemporaryDirectory() as folder:
            write_metrics(Path(folder), steps)
            config = {"out_dir": folder, "max_iters": 2 * steps, "eval_interval": 10**9}
            tracemalloc.start()
            read, began = bytes_of_this_thread(), time.thread_time()
            log, plot = MetricsFile(config, steps - 5), Plot(folder, steps - 5)
            resume = bytes_of_this_thread() - read, (time.thread_time() - began) * 1e3
            read, began = bytes_of_this_thread(), time.thread_time()
            evaluation = {"iter": steps - 4, "train_loss": 1.5, "val_loss": 1.5}
            for record in ({"iter": steps - 5} | FIELDS, evaluation):
                log.write(record, "")
                plot.write(record, "")
            evaluation = bytes_of_this_thread() - read, (time.thread_time() - began) * 1e3
            plot.is_idle.wait()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            log.file.close()
        if "loss.png" not in plot.result:
            raise RuntimeError(plot.result)
        size = f"{steps:,} lines"
        for name, (count, ms) in {"a resume": resume, "an evaluation": evaluation}.items():
            costs.append(Cost(size, count, f"bytes that {name} reads"))
            costs.append(Cost(size, ms, f"ms of CPU time of {name}"))
        costs.append(Cost(size, peak / 1e6, "MB at peak"))
    return costs


# -- shuffle: data_order=shuffle (bytes of memory)

# -- failure_report: watching, and the report of a failure (requests, bytes)

# -- sharded_metadata: the metadata of a checkpoint in shards (items, bytes)

# -- buckets: dividing tensors into buckets (comparisons)

# -- memory_of_saves: a save of one process, and an export (bytes a parameter)

# -- loop_memory: a long run (bytes that stay)


def loop_memory(steps: int = 3000, evaluations: int = 150, warm_up: int = 1000) -> list[Cost]:
    """The peak memory of a run that evaluates and saves: how much it rises after a warm-up."""
    from runs import TINY, tiny_data

    with TemporaryDirectory() as folder:
        tiny_data(folder)
        settings = [f"--max_iters={steps}", f"--eval_interval={steps // evaluations}", "--out_dir=out"]
        command = [sys.executable, str(ROOT / "train.py"), *TINY, "--compile=False", *settings]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        records = read_records(Path(folder) / "out/metrics.jsonl")
    memory = {r["iter"]: r["memory_gb"] * 1e9 for r in records if "step_ms" in r}
    return [Cost(f"steps {warm_up:,} to {steps:,}", memory[steps] - memory[warm_up], "bytes more at peak")]


ROWS = {
    # newer_checkpoints
    # open_files
    # gloo
    # store
    # read_ahead
    # hashing
    # initial_weights
    "metrics": metrics,
    # shuffle
    # failure_report
    # sharded_metadata
    # buckets
    # memory_of_saves
    "loop_memory": loop_memory,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ROWS:
        for cost in ROWS[name]():
            print(f"{name:<18} {cost.size:<28} {cost.amount:>18,.6g} {cost.unit}", flush=True)
