"""
How the cost of everything but the matmuls grows with ranks, bytes, parameters and steps. It is counted in
requests, bytes and items, so it is the same on a busy machine. docs/scaling.md has the table.

    python measure/growth.py                 all rows
    python measure/growth.py store metrics   these
"""

import ctypes
import gc
import hashlib
import json
import mmap
import os
import pickle
import re
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import isogpt.launch.torch_import  # noqa: F401, I001  (first: gloo connects on demand, as in train.py)

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.utils import _DistWrapper

from isogpt.checkpoint import manifest, search, sharded_files
from isogpt.checkpoint.commit import commit_checkpoint
from isogpt.checkpoint.folder import enter_folder, look_for_start
from isogpt.checkpoint.manifest import make_manifest
from isogpt.checkpoint.search import StoredCheckpoint, find_checkpoint
from isogpt.common import random_numbers
from isogpt.common.files import HashedFile, read_records
from isogpt.common.random_numbers import random_words
from isogpt.launch import network
from isogpt.launch.launchers import Launch
from isogpt.parallel import parallelize
from isogpt.parallel.data_parallel import in_buckets, shard
from isogpt.parallel.local_parts import LocalPart, local
from isogpt.parallel.mesh import connect_mesh
from isogpt.parallel.plan import UNDIVIDED
from model import GPT, GPTConfig


class Cost(NamedTuple):
    """What one size costs."""

    size: str  # such as "1,024 ranks"
    amount: float
    unit: str  # such as "requests a rank"


Result = TypeVar("Result")


# -- newer_checkpoints: a start from an older step beside newer checkpoints (bytes that are read)


def newer_checkpoints(sizes: Sequence[int] = (0, 10**9, 50 * 10**9)) -> list[Cost]:
    """A start from step 1 beside five newer checkpoints, in sparse files of so many bytes in all."""
    costs = []
    for size in sizes:
        with TemporaryDirectory() as folder:
            for step in range(1, 7):
                sparse_checkpoint(Path(folder), step, size // 5 if step > 1 else 1000)
            before = bytes_read()
            stored, *_ = look_for_start("resume", folder, 1, Launch())
            enter_folder(folder, stored, Launch())
            costs.append(
                Cost(f"{size / 1e9:g} GB of newer ones", bytes_read() - before, "bytes that are read")
            )
            assert len(list(Path(folder).glob("abandoned_*"))) == 5
    return costs


def sparse_checkpoint(out: Path, step: int, size: int) -> None:
    """Write a checkpoint whose ckpt.pt consists of so many zeros, which take no space."""
    unfinished = out / "unfinished"
    unfinished.mkdir()
    (unfinished / "ckpt.pt").touch()
    os.truncate(unfinished / "ckpt.pt", size)
    digest = hashlib.sha256(bytes(size)) if size < 10**6 else hashlib.sha256(b"not computed here")
    entry = {"bytes": size, "sha256": digest.hexdigest()}
    commit_checkpoint(unfinished, run_manifest(step) | {"files": {"ckpt.pt": entry}}, keep_last=0)


def run_manifest(step: int) -> dict:
    """The manifest of a run's checkpoint."""
    run = {
        "iter_num": step,
        "best_val_loss": 9.0,
        "model_args": {"block_size": 8},
        "config": {},
        "isogpt": {},
    }
    return make_manifest(run, 1, 0, None) | {"run": run}


def bytes_read() -> int:
    """How many bytes this process has read so far, from the disk or the page cache (Linux)."""
    text = Path("/proc/self/io").read_text()
    return int(text.split()[text.split().index("rchar:") + 1])


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


def start_rank(rank: int, stores: list[RankStore]) -> dict:
    """Meet the other ranks, as connect_ranks does."""
    size, machine = len(stores), rank // 8
    boot = uuid.uuid5(uuid.NAMESPACE_DNS, str(machine))
    process = network.Process(
        f"node-{machine}.cluster.example.org {boot} net:[4026531840]",
        cores=2**96 - 1,
        agent=f"node-{machine} {machine} {12345678 + machine}",
        address=f"10.77.0.{machine}",
    )
    return network.meet(stores[rank], rank, size, process, timeout_s=600.0)


def store(sizes: Sequence[int] = (256, 1024)) -> list[Cost]:
    """The start of ranks, eight on each machine, until they know each other. 4,096 ranks take two minutes."""
    costs = []
    for size in sizes:
        shared = torch.distributed.HashStore()
        stores = [RankStore(shared) for _ in range(size)]
        others = on_each_rank(partial(start_rank, stores=stores), size)
        assert all(other["machines"] == [rank // 8 for rank in range(size)] for other in others)
        costs += asked(size, stores)
    return costs


# -- read_ahead: a window of tokens from a file larger than memory (bytes from the disk)


def read_ahead(sizes: tuple[int, ...] = (10**9, 10**12), windows: int = 256) -> list[Cost]:
    """
    What is read when a data set of so many tokens is opened, and for each window of 1,024 tokens. Files of
    zeros take no room on the disk, but the system reads them ahead like others. Only Linux counts this.
    """
    from isogpt.data.dataset import open_dataset
    from isogpt.data.reader import Reader
    from isogpt.data.token_files import opened
    from isogpt.parallel.mesh import Mesh

    shape = {"block_size": 1024, "vocab_size": 50304}
    plan = replace(UNDIVIDED, micro_batch=64, shares="equal", model_args=shape)
    costs = []
    for n_tokens in sizes:
        with TemporaryDirectory() as folder:
            for split, length in (("train", n_tokens), ("val", 10**6)):
                with open(Path(folder, f"{split}.bin"), "wb") as file:
                    file.truncate(2 * length)
            data = open_dataset(folder, block_size=1024)
            at_start = cached_bytes(data.train.path)
            os.posix_fadvise(opened(data.train.files[0]).fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            before = cached_bytes(data.train.path)
            for _ in Reader(data, "random", 1, plan, Mesh(), torch.device("cpu")).evaluation(
                "train", windows
            ):
                pass
            read = cached_bytes(data.train.path) - before
            size = f"{n_tokens:,} tokens"
            costs += [
                Cost(size, read / windows, "bytes from the disk a window"),
                Cost(size, at_start, "bytes from the disk at the start"),
            ]
    return costs


def cached_bytes(path: Path) -> int:
    """The bytes of a file that are in the system's page cache."""
    tokens = np.memmap(path, np.uint8, "r")
    mincore, part = ctypes.CDLL(None, use_errno=True).mincore, 2**30
    is_cached, pages = (ctypes.c_ubyte * (part // mmap.PAGESIZE))(), 0
    for start in range(0, tokens.nbytes, part):
        length = min(part, tokens.nbytes - start)
        if mincore(ctypes.c_void_p(tokens.ctypes.data + start), ctypes.c_size_t(length), is_cached):
            raise OSError(ctypes.get_errno(), "mincore")
        pages += np.count_nonzero(np.frombuffer(is_cached, np.uint8)[: -(-length // mmap.PAGESIZE)] & 1)
    return pages * mmap.PAGESIZE


# -- hashing: a save in shards, and a resume (bytes that rank 0 hashes)


def hashing(ranks: Sequence[int] = (1, 4, 16), size: int = 10**9) -> list[Cost]:
    """
    A checkpoint of `size` bytes in shards, written and then verified by these numbers of ranks, which are
    threads: the bytes that rank 0 hashes, and the most that any rank does.
    """
    costs = []
    for count in ranks:
        with TemporaryDirectory() as folder:
            saved, resumed = hashed_by_rank(Path(folder), count, size)
        for what, hashed in (("a save", saved), ("a resume", resumed)):
            costs.append(Cost(f"{count} ranks, {what}", hashed[0], "bytes that rank 0 hashes"))
            costs.append(Cost(f"{count} ranks, {what}", max(hashed.values()), "bytes, the most of a rank"))
    return costs


def hashed_by_rank(out: Path, count: int, size: int) -> tuple[Counter, Counter]:
    """The bytes that each rank hashes in a save and in a resume; each sees the folder by a different name."""
    links = [out / f"of_rank_{rank}" for rank in range(count)]
    (out / "run").mkdir()
    for link in links:
        link.symlink_to("run")
    numbers = size // 4 // count
    saved, resumed = Counter(), Counter()

    def save(rank: int) -> None:
        unfinished = links[rank] / "unfinished"
        pieces = (((rank * numbers,), torch.zeros(numbers)),)
        part = {"weight": LocalPart(torch.Size([numbers * count]), pieces)}
        written = sharded_files.write(unfinished, part, dist.group.WORLD)
        if rank == 0:
            commit_checkpoint(unfinished, run_manifest(step=1) | {"files": written}, keep_last=0)

    with counting(saved):
        on_ranks(count, save)
    with counting(resumed), patch.object(search, "do_together", run_here):
        found = on_ranks(count, lambda rank: find_checkpoint(str(links[rank])))
    assert all(isinstance(stored, StoredCheckpoint) and not reports for stored, reports in found)
    return saved, resumed


def run_here(work: Callable[..., Result], *arguments: object, **_: object) -> Result:
    """Takes the place of do_together, in whose threads there is no group of `on_ranks`."""
    return work(*arguments)


@contextmanager
def counting(hashed: Counter) -> Iterator[None]:
    """Count the bytes that are hashed in the block, by the number at the end of of_rank_N in the path."""
    read = manifest.sha256_of

    def rank_of(path: object) -> int:
        return int(str(path).split("of_rank_")[1].split("/")[0])

    def sha256_of(path: Path) -> str:
        hashed[rank_of(path)] += path.stat().st_size
        return read(path)

    class Counted(HashedFile):
        def write(self, data: bytes | memoryview) -> int:
            hashed[rank_of(self.name)] += memoryview(data).nbytes
            return super().write(data)

    with patch.object(manifest, "sha256_of", sha256_of):
        with patch.object(sharded_files, "HashedFile", Counted):
            yield


class PlannerOfRank(sharded_files.SavePlanner):
    """DCP's planner keeps a process's last plan, but here all ranks are threads of one process."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)
        self._cached_plans_key = f"rank {dist.get_rank()} of {dist.get_world_size()}"


def on_ranks(count: int, work: Callable[[int], object]) -> list:
    """What `work(rank)` returns on so many ranks, which are threads, with collectives; by rank."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    store, results = dist.HashStore(), [None] * count

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
        try:
            results[rank] = work(rank)
        except BaseException as e:
            results[rank] = e
            threaded.ProcessLocalGroup.exception_handle(e)  # ends the collectives of the others
        with suppress(AttributeError):  # torch 2.11's world of threads is not complete
            dist.destroy_process_group()

    isolate(True)
    threaded._install_threaded_pg()
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    with patch.object(sharded_files, "SavePlanner", PlannerOfRank):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    threaded._uninstall_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    isolate(False)
    if failed := [result for result in results if isinstance(result, BaseException)]:
        raise failed[0]
    return results


# -- initial_weights: a new model that is divided (numbers that a rank draws)

LLAMA = dict(arch="llama", n_layer=16, n_embd=1024, n_head=16, n_kv_head=8, n_hidden=4096)
LLAMA |= dict(vocab_size=32768, block_size=1024, bias=False, tied=False)
LAYOUTS = (
    {},
    *({"zero": 3, "world_size": n} for n in (4, 64, 1024)),
    *({"tp": n, "world_size": n} for n in (4, 8)),
    *({"pp": n, "world_size": n} for n in (4, 16)),
    *({"ep": 8, "zero": zero, "world_size": n} for zero, n in ((0, 8), (3, 1024))),
    {"tp": 8, "pp": 8, "zero": 3, "world_size": 1024},
)


def initial_weights(
    model_args: dict = LLAMA, layouts: Sequence[dict] = LAYOUTS, n_expert: int = 8
) -> list[Cost]:
    """
    The numbers that rank 0 draws for the initial weights, beside those that it holds.

    Args:
        layouts: fields of Plan.
        n_expert: experts of the model in layouts with ep, in place of its MLPs.
    """
    costs = []
    for layout in layouts:
        experts = {"n_expert": n_expert} if "ep" in layout else {}
        model = part_of_model(model_args | experts, layout, rank=0)
        size = f"{layout.get('world_size', 1):,} ranks"
        name = " ".join(f"{key} {n}" for key, n in layout.items() if key != "world_size")
        size = f"{size}, {name}" if name else size
        rules = model.initial_rules
        held = sum(local(p).numel() for n, p in model.named_parameters() if rules[n] == "normal")
        costs.append(Cost(size, numbers_drawn(model), f"numbers that rank 0 draws, and it holds {held:,}"))
    return costs


def part_of_model(model_args: dict, layout: dict, rank: int) -> nn.Module:
    """One rank's part of a model, made as train.py makes it, with a process group that is not connected."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plan = replace(UNDIVIDED, device_type="cpu", fsdp_prefetch=1, grad_compression="none", **layout)
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    try:
        mesh, cpu = connect_mesh(rank, plan, timeout_s=60.0), torch.device("cpu")
        with torch.device("meta"):
            model = GPT(GPTConfig(**model_args))
        splits = parallelize.split_model(model, mesh, plan.pp_schedule, cpu)
        if plan.zero >= 2:
            shard(model, mesh, cpu, plan)
        parallelize.materialize(model, cpu, splits)
    finally:
        dist.destroy_process_group()
    return model


def numbers_drawn(model: nn.Module, seed: int = 1) -> int:
    """Fill a rank's part of a model with initial weights, and count the numbers that are drawn for it."""
    counts = []

    def counted(key: int, first: int, n: int) -> np.ndarray:
        counts.append(2 * (first % 4 + n))
        return random_words(key, first, n)

    with patch.object(random_numbers, "random_words", counted):
        parallelize.init_weights(model, seed)
    return sum(counts)


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
    A resume and the first evaluation after it: what training waits for, and the memory, including that of the
    thread that draws.
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
            ms = (time.thread_time() - began) * 1e3  # first: the other thread is drawing by now
            evaluation = bytes_of_this_thread() - read, ms
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


def shuffle(sizes: tuple[int, ...] = (10**9, 10**12), sequences: int = 480) -> list[Cost]:
    """The memory with which a rank finds a step's windows of 1,024 tokens, and how much of it stays."""
    from isogpt.data.windows import Windows, shuffled_windows

    numbers = 7 * sequences + np.arange(sequences)  # of the sequences of step 7
    shuffled_windows(Windows(10**6, 1024), 1337, numbers)  # imports what numpy needs
    costs = []
    for n_tokens in sizes:
        tracemalloc.start()
        starts = shuffled_windows(Windows(n_tokens, 1024), 1337, numbers)
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
        hurry: the factor by which pauses are shortened.
    """
    sleep, costs = time.sleep, []
    with patch.object(time, "sleep", lambda seconds: sleep(seconds / hurry)):
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
        """Ends the loop of beats after some seconds, which pass at once."""

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


# -- sharded_metadata: the metadata of a checkpoint in shards (bytes)
def sharded_metadata(sizes: tuple[int, ...] = (4, 16, 64), tensors: int = 102) -> list[Cost]:
    """
    What rank 0 gathers of pieces, and what a rank reads to resume, with as many tensors as the weights and
    moments of 34 parameters, a tenth of those of a model of 10B, divided by rows (ZeRO-3).
    """
    costs = []
    for ranks in sizes:
        with TemporaryDirectory() as folder:
            first, later, others, read = shards_of(Path(folder), ranks, tensors)
        costs += [
            Cost(f"{ranks:,} ranks, the first save", first, "bytes that rank 0 gathers"),
            Cost(f"{ranks:,} ranks, later saves", later, "bytes that rank 0 gathers"),
            Cost(f"{ranks:,} ranks, later saves", others, "bytes that other ranks receive"),
            Cost(f"{ranks:,} ranks, a resume", read, "bytes of metadata that a rank reads"),
        ]
    return costs


def shards_of(out: Path, ranks: int, tensors: int, replicas: int = 1) -> tuple[int, int, int, int]:
    """
    Save twice and resume on ranks that are threads, in the folders 0 and 1: see `sharded_metadata` for the
    numbers that are returned.
    """
    gathered, received = [], []
    gather, broadcast = _DistWrapper.gather_object, _DistWrapper.broadcast_object

    def noted_gather(wrapper: _DistWrapper, value: object) -> list | None:
        gathered.append(len(pickle.dumps(value)))
        return gather(wrapper, value)

    def noted_broadcast(wrapper: _DistWrapper, value: object) -> object:
        received.append(len(pickle.dumps(value)))
        return broadcast(wrapper, value)

    def save(number: int, rank: int) -> None:
        mine = rows_of(rank // replicas, ranks // replicas, tensors)
        sharded_files.write(out / str(number), mine, dist.group.WORLD)

    def resume(rank: int) -> None:
        mine = rows_of(rank // replicas, ranks // replicas, tensors)
        target = rows_of(rank // replicas, ranks // replicas, tensors, value=0.0)
        sharded_files.read(out / "1", target)
        for name, part in mine.items():
            assert all(a.equal(b) for (_, a), (_, b) in zip(part.pieces, target[name].pieces, strict=True))

    sums = []
    with (
        patch("os.fsync"),
        patch.object(_DistWrapper, "gather_object", noted_gather),
        patch.object(_DistWrapper, "broadcast_object", noted_broadcast),
    ):
        for number in range(2):
            gathered.clear(), received.clear()
            on_ranks(ranks, partial(save, number))
            sums.append(sum(gathered))
    on_ranks(ranks, resume)
    return *sums, sum(received), (out / "1/.metadata").stat().st_size


def rows_of(index: int, count: int, tensors: int, value: float | None = None) -> dict:
    """The parts of a rank that holds one of `count` rows of each tensor, and a number."""
    names = [f"optim.transformer.h.{i // 21}.mlp.c_proj.weight.{i % 21}" for i in range(tensors)]
    shape = torch.Size((count, 1))
    parts = {
        name: LocalPart(shape, (((index, 0), torch.full((1, 1), float(index) if value is None else value)),))
        for name in names
    }
    return parts | {"optim.step": LocalPart(torch.Size(()), (((), torch.tensor(7.0)),))}


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
    import export
    from configurator import settings_of
    from isogpt.checkpoint.ckpt_file import nanogpt_state, write_file
    from isogpt.checkpoint.source import flat
    from isogpt.checkpoint.state import parts_of_state
    from isogpt.nn import huggingface
    from isogpt.parallel.local_parts import local_parts_by_name
    from isogpt.training import optim, optimizer_state

    model = GPT(GPTConfig(n_layer=4, n_head=8, n_embd=n_embd, block_size=64, vocab_size=1024))
    count = sum(p.numel() for p in model.parameters())
    config = {name: setting.default for name, setting in settings_of(ROOT / "train.py").items()}
    optimizers = optim.make_optimizers(model, config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        optimizer.step()
    run = {"model_args": model.describe(), "iter_num": 5, "best_val_loss": 3.0}
    run |= {"config": config, "isogpt": {}}
    amounts = {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "unfinished" / "ckpt.pt"

        def save() -> None:
            write_file(file, nanogpt_state(run, model, optimizers, copy=True))

        amounts["a save"] = peak_of(save)
        file.unlink()
        moments = optimizer_state.state_by_name(model, optimizers)
        parts = flat(local_parts_by_name(model), parts_of_state(model, moments, (0, 1)))
        written = sharded_files.write(file.parent, parts, None)
        manifest = make_manifest(run, 1, 3, None) | {"run": run, "files": written}
        commit_checkpoint(file.parent, manifest, keep_last=0)
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


def loop_memory(steps: int = 3000, evaluations: int = 150, warm_up: int = 1000) -> list[Cost]:
    """The peak memory of a run that evaluates and saves: how much it rises after a warm-up."""
    from runs import TINY, tiny_data

    with TemporaryDirectory() as folder:
        tiny_data(folder)
        settings = [f"--max_iters={steps}", f"--eval_interval={steps // evaluations}", "--out_dir=out"]
        command = [sys.executable, str(ROOT / "train.py"), *TINY, "--compile=False", *settings]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=one_thread)
        records = list(read_records(Path(folder) / "out/metrics.jsonl"))
    memory = {r["iter"]: r["memory_gb"] * 1e9 for r in records if "step_ms" in r}
    # memory that stays after each evaluation keeps raising the peak; threads that need it together do so once
    rises = [memory[step + 100] - memory[step] for step in range(warm_up, steps, 100)]
    return [
        Cost(f"steps {warm_up:,} to {steps:,}", sum(rises), "bytes more at peak"),
        Cost("median of 100 steps", 10 * statistics.median(rises), "bytes more at peak in 1,000 steps"),
    ]


ROWS = {
    "newer_checkpoints": newer_checkpoints,
    "open_files": open_files,
    "gloo": gloo,
    "store": store,
    "read_ahead": read_ahead,
    "hashing": hashing,
    "initial_weights": initial_weights,
    "metrics": metrics,
    "shuffle": shuffle,
    "failure_report": failure_report,
    "sharded_metadata": sharded_metadata,
    "buckets": buckets,
    "memory_of_saves": memory_of_saves,
    "loop_memory": loop_memory,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ROWS:
        for cost in ROWS[name]():
            print(f"{name:<18} {cost.size:<28} {cost.amount:>18,.6g} {cost.unit}", flush=True)
