"""
How the cost of everything but the matmuls grows with ranks, bytes, parameters and steps, counted in requests,
bytes and items, so that a busy machine shows the same. docs/scaling.md has the table.

    python measure/growth.py                 all rows
    python measure/growth.py store metrics   these
"""

import gc
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


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

# -- shuffle: data_order=shuffle (bytes of memory)

# -- failure_report: watching, and the report of a failure (requests, bytes)

# -- sharded_metadata: the metadata of a checkpoint in shards (items, bytes)

# -- buckets: dividing tensors into buckets (comparisons)


# -- memory_of_saves: a save of one process, and an export (bytes a parameter)
def memory_of_saves(n_embd: int = 384, file_size: str = "8MB") -> list[Cost]:
    """
    What a checkpoint of one process and conversions of checkpoints allocate beyond the state of the run:
    weights, gradients and two moments. Memory-mapped pages of a checkpoint's file are not counted.
    """
    from isogpt.nn import huggingface

    usual, huggingface.FILE_SIZE = huggingface.FILE_SIZE, file_size
    try:
        memory_of_conversions(8)  # imports what is imported when it is first used
        return memory_of_conversions(n_embd)
    finally:
        huggingface.FILE_SIZE = usual


def memory_of_conversions(n_embd: int) -> list[Cost]:
    """See memory_of_saves, of a GPT-2 of four layers."""
    import torch

    import export
    from isogpt.checkpoint.ckpt_file import copied_state, write_file
    from isogpt.checkpoint.commit import commit_checkpoint
    from isogpt.checkpoint.manifest import make_manifest
    from isogpt.nn import huggingface
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(n_layer=4, n_head=8, n_embd=n_embd, block_size=64, vocab_size=1024))
    count = sum(p.numel() for p in model.parameters())
    optimizers = export.optimizers_of(model, {})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        optimizer.step()
    run = {"model_args": model.describe(), "iter_num": 5, "best_val_loss": 3.0, "config": {}, "isogpt": {}}
    amounts = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "unfinished" / "ckpt.pt"

        def save() -> None:
            write_file(file, copied_state(run, model, optimizers))

        amounts["a save"] = peak_of(save)
        commit_checkpoint(file.parent, make_manifest(run, 1, 0, None), keep_last=0)
        amounts["--to=shards"] = peak_of(partial(export.convert, folder, "shards"))
        amounts["--to=ckpt.pt"] = peak_of(partial(export.convert, folder, "ckpt.pt"))
        amounts["--to=hf, the model apart"] = peak_of(
            partial(huggingface.save, Path(folder) / "hf", model, {})
        )
    size = f"{count / 1e6:,.1f}M parameters"
    return [Cost(f"{size}, {what}", amount / count, "bytes a parameter") for what, amount in amounts.items()]


def peak_of(work: Callable[[], object]) -> int:
    """By how many bytes work() raises the process's memory, without mapped files, at most."""
    gc.collect()
    before = anonymous_memory()
    highest, is_done = [before], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.001):
            highest.append(anonymous_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        is_done.set()
        thread.join()
    return max(highest) - before


def anonymous_memory() -> int:
    """The bytes of this process's memory that are not pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


# -- loop_memory: a long run (bytes that stay)


ROWS = {
    # newer_checkpoints
    # open_files
    # gloo
    # store
    # read_ahead
    # hashing
    # initial_weights
    # metrics
    # shuffle
    # failure_report
    # sharded_metadata
    # buckets
    "memory_of_saves": memory_of_saves
    # loop_memory
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ROWS:
        for cost in ROWS[name]():
            print(f"{name:<18} {cost.size:<28} {cost.amount:>18,.6g} {cost.unit}", flush=True)
