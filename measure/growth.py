"""
How the cost of everything but the matmuls grows with ranks, bytes, parameters and steps, counted in requests,
bytes and items, so that a busy machine shows the same. docs/scaling.md has the table.

    python measure/growth.py                 all rows
    python measure/growth.py store metrics   these
"""

import ctypes
import mmap
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from isogpt.parallel.data_parallel import in_buckets


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


class CountedMap(mmap.mmap):
    """A mapped file that counts the bytes of which it is told that they are not needed any more."""

    released = 0

    def madvise(self, advice: int, start: int = 0, length: int | None = None) -> None:
        if advice == mmap.MADV_DONTNEED:
            rest = len(self) - start
            self.released += rest if length is None else min(length, rest)
        super().madvise(advice, start, length if length is not None else len(self) - start)


def read_ahead(sizes: tuple[int, ...] = (10**9, 10**12), windows: int = 256) -> list[Cost]:
    """
    What is read when a data set of so many tokens is opened, and for each window of 1,024 tokens. Files of
    zeros take no room on the disk, but the system reads them ahead like others. Only Linux counts this.
    """
    import torch

    from isogpt.data.dataset import open_dataset
    from isogpt.data.reader import Reader
    from isogpt.parallel.mesh import Mesh
    from isogpt.parallel.plan import UNDIVIDED

    shape = {"block_size": 1024, "vocab_size": 50304}
    plan = replace(UNDIVIDED, micro_batch=64, shares="equal", model_args=shape)
    costs = []
    for n_tokens in sizes:
        with TemporaryDirectory() as folder, mock.patch("mmap.mmap", CountedMap):
            for split, length in (("train", n_tokens), ("val", 10**6)):
                with open(Path(folder, f"{split}.bin"), "wb") as file:
                    file.truncate(2 * length)
            data = open_dataset(folder, block_size=1024)
            tokens = data.train
            at_start, released = cached_bytes(tokens), tokens.base.released
            with open(tokens.filename, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            before = cached_bytes(tokens)
            for _ in Reader(data, "random", 1, plan, Mesh(), torch.device("cpu")).evaluation(
                "train", windows
            ):
                pass
            read, released = cached_bytes(tokens) - before, tokens.base.released - released
            size = f"{n_tokens:,} tokens"
            costs += [
                Cost(size, read / windows, "bytes from the disk a window"),
                Cost(size, released / windows, "bytes released a window"),
                Cost(size, at_start, "bytes from the disk at the start"),
            ]
    return costs


def cached_bytes(tokens: np.memmap) -> int:
    """The bytes of a mapped file that are in the system's page cache."""
    mincore, part = ctypes.CDLL(None, use_errno=True).mincore, 2**30
    is_cached, pages = (ctypes.c_ubyte * (part // mmap.PAGESIZE))(), 0
    for start in range(0, tokens.nbytes, part):
        length = min(part, tokens.nbytes - start)
        if mincore(ctypes.c_void_p(tokens.ctypes.data + start), ctypes.c_size_t(length), is_cached):
            raise OSError(ctypes.get_errno(), "mincore")
        pages += np.count_nonzero(np.frombuffer(is_cached, np.uint8)[: -(-length // mmap.PAGESIZE)] & 1)
    return pages * mmap.PAGESIZE


# -- hashing: a save in shards, and a resume (bytes that rank 0 hashes)

# -- initial_weights: a new model that is divided (numbers that a rank draws)

# -- metrics: an evaluation and a resume beside a long metrics.jsonl (bytes that are read, memory)

# -- shuffle: data_order=shuffle (bytes of memory)


def shuffle(sizes: tuple[int, ...] = (10**9, 10**12), sequences: int = 480) -> list[Cost]:
    """The memory in which a rank finds the windows of a step, of 1,024 tokens each, and what of it stays."""
    from isogpt.data.windows import shuffled_windows

    shuffled_windows(10**6, 1024, seed=1337, step=7, n=sequences)  # imports what numpy needs
    costs = []
    for n_tokens in sizes:
        tracemalloc.start()
        starts = shuffled_windows(n_tokens, 1024, seed=1337, step=7, n=sequences)
        stays, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        size = f"{n_tokens:,} tokens"
        costs += [Cost(size, peak, "bytes at peak"), Cost(size, stays - starts.nbytes, "bytes that stay")]
    return costs


# -- failure_report: watching, and the report of a failure (requests, bytes)


class CountingStore:
    """A store that counts the requests of all ranks and the bytes that it answers."""

    def __init__(self) -> None:
        self.store = torch.distributed.HashStore()
        self.answers = []  # the bytes of each

    def __getattr__(self, name: str) -> Callable:
        def request(*arguments: object) -> object:
            answer = getattr(self.store, name)(*arguments)
            self.answers.append(sum(map(len, answer)) if isinstance(answer, list) else len(str(answer)))
            return answer

        return request


def failure_report(sizes: Sequence[int] = (128, 1024), hurry: float = 1.0) -> list[Cost]:
    """
    The watchdogs of all ranks, through one store: what they ask in a second of training; then what they ask
    and print if one rank does not respond, and if half of the ranks crash.

    Args:
        hurry: how much shorter pauses are.
    """
    sleep, costs = time.sleep, []
    with mock.patch.object(time, "sleep", lambda seconds: sleep(seconds / hurry)):
        for size in sizes:
            costs += cost_of_failure(size, "1 hangs", range(1, 2))
            costs += cost_of_failure(size, f"{size // 2:,} crash", range(1, 1 + size // 2))
    return costs


def watchdogs(size: int) -> list:
    """The watchdogs of so many ranks, which share a store."""
    from isogpt.checkpoint.progress import Progress
    from isogpt.launch.process_group import Ranks
    from isogpt.monitor.log import Logger
    from isogpt.monitor.watchdog import Watchdog

    store, cpu = CountingStore(), torch.device("cpu")
    hosts = tuple(f"node-{rank // 8}.cluster.example.org" for rank in range(size))
    logger = Logger(Progress(1, step=4), [])
    all_ranks = [Ranks(rank, size, cpu, "gloo", hosts=hosts) for rank in range(size)]
    return [Watchdog(ranks, 600.0, logger.progress, logger, store=store) for ranks in all_ranks]


def cost_of_failure(size: int, problem: str, lost: range) -> list[Cost]:
    """`failure_report` of so many ranks."""
    dogs, per_second = watchdogs(size), []
    store = dogs[0].store

    class Over(threading.Event):
        """The end of the loop of beats after some seconds, which pass at once."""

        def wait(self, interval_s: float) -> bool:
            asked, self.asked = getattr(self, "asked", None), len(store.answers)
            if asked:
                per_second.append((self.asked - asked) / interval_s)
            return len(per_second) % 3 == 0 and asked is not None

    for dog in dogs:
        dog.over = Over()
        dog.beat()
    store.answers.clear()
    for rank in lost if len(lost) > 1 else ():  # as the crash hook does
        dogs[rank].turn("exception")
        dogs[rank].leave("RuntimeError: " + "what happened " * 14, has_failed=True)
    reason = "lost the connection to a different rank (Connection closed by peer [10.77.0.1]:29500)"
    others = [dog for dog in dogs if dog.ranks.rank not in lost]
    threads = [threading.Thread(target=dog.report, args=(reason,)) for dog in others]
    with redirect_stderr(StringIO()) as printed:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = printed.getvalue().splitlines()
    what = f"{size:,} ranks, {problem}"
    return [
        Cost(what, sum(per_second) / len(per_second) * size, "requests a second while training"),
        Cost(what, len(store.answers), "requests for the report"),
        Cost(what, sum(store.answers), "bytes for the report"),
        Cost(what, len(lines), "lines"),
        Cost(what, max(map(len, lines)), "bytes in the longest line"),
    ]


# -- sharded_metadata: the metadata of a checkpoint in shards (items, bytes)

# -- buckets: dividing tensors into buckets (comparisons)


class CountedTensor:
    """Stands for a tensor of 1 KB, and counts how often its size is read."""

    reads = 0

    @property
    def nbytes(self) -> int:
        CountedTensor.reads += 1
        return 2**10


def buckets(sizes: Sequence[int] = (3_000, 12_000)) -> list[Cost]:
    """The gradients of many small layers in buckets of 32 MB."""
    costs = []
    for size in sizes:
        CountedTensor.reads = 0
        assert sum(map(len, in_buckets([CountedTensor() for _ in range(size)]))) == size
        costs.append(Cost(f"{size:,} tensors", CountedTensor.reads, "sizes that are read"))
    return costs


# -- memory_of_saves: a save of one process, and an export (bytes a parameter)

# -- loop_memory: a long run (bytes that stay)


ROWS = {"read_ahead": read_ahead, "failure_report": failure_report, "shuffle": shuffle, "buckets": buckets}

if __name__ == "__main__":
    for name in sys.argv[1:] or ROWS:
        for cost in ROWS[name]():
            print(f"{name:<18} {cost.size:<28} {cost.amount:>18,.6g} {cost.unit}", flush=True)
