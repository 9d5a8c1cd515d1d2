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
def sharded_metadata(sizes: tuple[int, ...] = (16, 64, 256), tensors: int = 102) -> list[Cost]:
    """
    What rank 0 gathers of pieces, and what a rank reads to resume on the same layout, with as many tensors as
    the weights and moments of 34 parameters, a tenth of those of a model of 10B, divided by rows (ZeRO-3).
    The ranks are simulated and write one after the other into a folder, with one number in a row.
    """
    costs = []
    for ranks in sizes:
        with tempfile.TemporaryDirectory() as folder:
            first, later, read, total = shards_of(Path(folder), ranks, tensors)
        costs += [
            Cost(f"{ranks:,} ranks, gathered once", first, "bytes on rank 0"),
            Cost(f"{ranks:,} ranks, gathered later", later, "bytes on rank 0"),
            Cost(f"{ranks:,} ranks, same layout", read, "bytes of indices that a rank reads"),
            Cost(f"{ranks:,} ranks, other layout", total, "bytes of indices that a rank reads at most"),
        ]
    return costs


def shards_of(folder: Path, ranks: int, tensors: int, replicas: int = 1) -> tuple[int, int, int, int]:
    """
    Write a checkpoint of simulated ranks: (bytes that rank 0 gathers at the first save, at later ones, bytes
    of indices and of tensors.json that the last rank reads, bytes of all of these).
    """
    import pickle
    from unittest.mock import patch

    from isogpt.checkpoint import sharded_files

    parts = [rows_of(rank // replicas, ranks // replicas, tensors) for rank in range(ranks)]
    digests = [sharded_files.digests_of(part) for part in parts]
    writers = sharded_files.choose_writers(digests)
    with patch("os.fsync"):
        written = [
            sharded_files.write_pieces(folder, part, of_rank, rank)
            for rank, (part, of_rank) in enumerate(zip(parts, writers, strict=True))
        ]
        sharded_files.complete(folder, written)
    opened = []
    read_json = sharded_files.PlainReader.read_json

    def noted(reader: sharded_files.PlainReader, path: Path) -> dict:
        opened.append(path.stat().st_size)
        return read_json(reader, path)

    own = ranks - 1  # it stands last in a search through all indices
    target = rows_of(own // replicas, ranks // replicas, tensors, value=0.0)
    with (
        patch.object(sharded_files.PlainReader, "read_json", noted),
        patch.object(sharded_files, "own_rank", return_value=own),
    ):
        sharded_files.read(folder, target, {})
    for name, part in parts[own].items():
        assert all(a.equal(b) for (_, a), (_, b) in zip(part.pieces, target[name].pieces, strict=True))
    total = sum(path.stat().st_size for path in folder.glob("*.json"))
    return sum(map(len, map(pickle.dumps, digests))), len(pickle.dumps(written)), sum(opened), total


def rows_of(index: int, count: int, tensors: int, value: float | None = None) -> dict:
    """The parts of a rank that holds one of `count` rows of each tensor, and a number."""
    import torch

    from isogpt.parallel.local_parts import LocalPart

    names = [f"optim.transformer.h.{i // 21}.mlp.c_proj.weight.{i % 21}" for i in range(tensors)]
    shape = torch.Size((count, 1))
    parts = {
        name: LocalPart(shape, (((index, 0), torch.full((1, 1), float(index) if value is None else value)),))
        for name in names
    }
    return parts | {"optim.step": LocalPart(torch.Size(()), (((), torch.tensor(7.0)),))}


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
    "sharded_metadata": sharded_metadata,
    # buckets
    "memory_of_saves": memory_of_saves,
    # loop_memory
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ROWS:
        for cost in ROWS[name]():
            print(f"{name:<18} {cost.size:<28} {cost.amount:>18,.6g} {cost.unit}", flush=True)
