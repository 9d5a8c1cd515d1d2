"""
How the cost of everything but the matmuls grows with ranks, bytes, parameters and steps, counted in requests,
bytes and items, so that a busy machine shows the same. docs/scaling.md has the table.

    python measure/growth.py                 all rows
    python measure/growth.py store metrics   these
"""

import gc
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from typing import NamedTuple, TypeVar
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import isogpt.launch.torch_import  # noqa: F401  (gloo connects on demand, as in train.py)

from isogpt.launch import network
from isogpt.launch.machines import Place, Process, find_place
from isogpt.parallel.data_parallel import in_buckets

Result = TypeVar("Result")


class Cost(NamedTuple):
    """What one size costs."""

    size: str  # such as "1,024 ranks"
    amount: float
    unit: str  # such as "requests a rank"


# -- newer_checkpoints: a start from an older step beside newer checkpoints (bytes that are read)

# -- open_files: open files of a rank, and of the store's host (files)


class RankStore(torch.distributed.Store):
    """A rank's connection to a store, which counts a TCPStore's requests and the bytes of the answers."""

    def __init__(self, store: torch.distributed.Store) -> None:
        super().__init__()
        self.store, self.requests, self.answered = store, 0, 0

    def set(self, key: str, value: object) -> None:
        self.requests += 1
        self.store.set(key, value)

    def multi_set(self, keys: list[str], values: list) -> None:
        self.requests += 1
        self.store.multi_set(keys, values)

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return self.store.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.requests += 1
        self.store.wait(keys, *timeout)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 2  # the client waits for the keys first
        values = self.store.multi_get(keys)
        self.answered += sum(map(len, values))
        return values


def on_each_rank(work: Callable[[int], Result], size: int) -> list[Result]:
    """What `work` returns for each rank; all ranks work at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(work, range(size))]


def files_open() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def connect_gloo(rank: int, stores: list[RankStore]) -> torch.distributed.ProcessGroupGloo:
    """Make one of a world-wide group of gloo, and communicate as a run does at its start."""
    size = len(stores)
    group = torch.distributed.ProcessGroupGloo(stores[rank], rank, size, timedelta(seconds=300))
    number = torch.full((1,), float(rank))
    numbers = torch.empty(size)
    group._allgather_base(numbers, number).wait()
    group.allreduce([number]).wait()
    assert number.item() == numbers.sum() == size * (size - 1) / 2
    group.broadcast(number, 0).wait()
    return group


def open_files(sizes: Sequence[int] = (64, 256), host_sizes: Sequence[int] = (8, 32)) -> list[Cost]:
    """Files of a rank for a world-wide group of gloo, and of the store's host for the ranks' connections."""
    costs = []
    for size in sizes:
        stores, before = [RankStore(torch.distributed.HashStore())] * size, files_open()
        groups = on_each_rank(partial(connect_gloo, stores=stores), size)
        costs.append(Cost(f"{size:,} ranks", (files_open() - before) / size, "files a rank for gloo"))
        del groups
        gc.collect()
    for size in host_sizes:
        before = files_open()
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # two of each rank: to meet the others, and its watchdog's
        clients = [torch.distributed.TCPStore("127.0.0.1", store.port) for _ in range(2 * size)]
        host = files_open() - before - len(clients)
        costs.append(Cost(f"{size:,} ranks", host, "files of the store's host"))
        del clients, store
    return costs


# -- gloo: what gloo's groups ask of the store (requests, bytes)


def asked(size: int, stores: Sequence[RankStore]) -> list[Cost]:
    """What the ranks have asked of the store."""
    what = f"{size:,} ranks"
    return [
        Cost(what, max(store.requests for store in stores), "requests of one rank at most"),
        Cost(what, sum(store.requests for store in stores), "requests"),
        Cost(what, sum(store.answered for store in stores), "bytes from the store"),
    ]


def gloo(sizes: Sequence[int] = (64, 256)) -> list[Cost]:
    """A world-wide group of gloo. 1,024 ranks take five minutes on two cores."""
    costs = []
    for size in sizes:
        store = torch.distributed.HashStore()
        stores = [RankStore(store) for _ in range(size)]
        groups = on_each_rank(partial(connect_gloo, stores=stores), size)
        costs += asked(size, stores)
        del groups
        gc.collect()
    return costs


# -- store: a start: what ranks ask of the store to know each other (requests, bytes)


def start_rank(rank: int, stores: list[RankStore]) -> Place:
    """Meet the other ranks, and find this rank's place, as process_group.connect_ranks does."""
    size, machine = len(stores), rank // 8
    start = network.meet(stores[rank], rank, size, timeout_s=600.0)
    process = Process(
        f"node-{machine}.cluster.example.org",
        f"{uuid.uuid5(uuid.NAMESPACE_DNS, str(machine))} net:[4026531840]",
        "0-95,192-287",
        8,
        f"node-{machine} {machine} run 7 {12345678 + machine}",
        f"NVIDIA H100 80GB HBM3 GPU-{uuid.uuid4()}",
        "10.77.0.1",
    )
    return find_place(torch.distributed.PrefixStore(start, stores[rank]), rank, size, process)


def store(sizes: Sequence[int] = (256, 1024)) -> list[Cost]:
    """The start of ranks, eight on each machine, until they know each other. 4,096 ranks take two minutes."""
    costs = []
    for size in sizes:
        shared = torch.distributed.HashStore()
        stores = [RankStore(shared) for _ in range(size)]
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE=str(size)):  # for notes, if threads are slow
            places = on_each_rank(partial(start_rank, stores=stores), size)
        assert [place.rank for place in places] == [*range(size)]
        costs += asked(size, stores)
    return costs


# -- read_ahead: a window of tokens from a file larger than memory (bytes from the disk)

# -- hashing: a save in shards, and a resume (bytes that rank 0 hashes)

# -- initial_weights: a new model that is divided (numbers that a rank draws)

# -- metrics: an evaluation and a resume beside a long metrics.jsonl (bytes that are read, memory)

# -- shuffle: data_order=shuffle (bytes of memory)

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


ROWS = {
    # newer_checkpoints
    "open_files": open_files,
    "gloo": gloo,
    "store": store,
    # read_ahead
    # hashing
    # initial_weights
    # metrics
    # shuffle
    "failure_report": failure_report,
    # sharded_metadata
    "buckets": buckets,
    # memory_of_saves
    # loop_memory
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ROWS:
        for cost in ROWS[name]():
            print(f"{name:<18} {cost.size:<28} {cost.amount:>18,.6g} {cost.unit}", flush=True)
