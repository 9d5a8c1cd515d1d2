"""
What grows with ranks, bytes, parameters and steps: the requests, bytes and items that docs/scaling.md names.
Ranks are threads here.
"""

import isogpt.launch.torch_import  # noqa: F401  (gloo connects on demand, as in train.py)

import ctypes
import gc
import hashlib
import mmap
import os
import pickle
import random
import re
import statistics
import sys
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import column, train_defaults
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.testing._internal.distributed.fake_pg import FakeStore

import export
from isogpt.checkpoint import huggingface, manifest, search, sharded_files
from isogpt.checkpoint.ckpt_file import nanogpt_state, write_file
from isogpt.checkpoint.commit import commit_checkpoint
from isogpt.checkpoint.folder import enter_folder, look_for_start
from isogpt.checkpoint.manifest import make_manifest
from isogpt.checkpoint.search import find_checkpoint
from isogpt.checkpoint.source import flat
from isogpt.checkpoint.state import parts_of_state
from isogpt.common import random_numbers
from isogpt.common.files import HashedFile
from isogpt.common.random_numbers import normal_numbers, random_words
from isogpt.data.dataset import open_dataset
from isogpt.data.reader import Reader
from isogpt.data.token_files import opened
from isogpt.data.windows import Windows, shuffled_windows
from isogpt.launch.launchers import Launch
from isogpt.parallel import parallelize
from isogpt.parallel.data_parallel import in_buckets
from isogpt.parallel.local_parts import LocalPart, local_parts_by_name
from isogpt.parallel.mesh import Mesh, connect_mesh
from isogpt.parallel.plan import UNDIVIDED
from isogpt.training import optim, optimizer_state
from model import GPT, GPTConfig


def on_each_rank(work, size):
    """What `work` returns for each rank; all ranks work at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(work, range(size))]


class PlannerOfRank(sharded_files.SavePlanner):
    """DCP's planner keeps a process's last plan, but here all ranks are threads of one process."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self._cached_plans_key = f"rank {dist.get_rank()} of {dist.get_world_size()}"


def on_ranks(count, work):
    """What `work(rank)` returns on so many ranks, which have collectives."""
    isolate, store = torch._C._distributed_c10d._set_thread_isolation_mode, dist.HashStore()

    def run(rank):
        dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
        try:
            return work(rank)
        except BaseException as e:
            threaded.ProcessLocalGroup.exception_handle(e)  # ends the collectives of the others
            raise
        finally:
            with suppress(AttributeError):  # torch 2.11's world of threads is not complete
                dist.destroy_process_group()

    isolate(True)
    threaded._install_threaded_pg()
    try:
        with patch.object(sharded_files, "SavePlanner", PlannerOfRank):
            return on_each_rank(run, count)
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        isolate(False)


def manifest_of(step, entries):
    """The manifest of a run's checkpoint with these files."""
    run = {"iter_num": step, "best_val_loss": 9.0, "model_args": {"block_size": 8}, "config": {}}
    run["isogpt"] = {}
    return make_manifest(run, 1, 0, None) | {"run": run, "files": entries}


# -- newer_checkpoints


def bytes_read(reader):
    """How many bytes `self` or `thread-self` has read so far, from the disk or the page cache (Linux)."""
    text = Path("/proc", reader, "io").read_text()
    return int(text.split()[text.split().index("rchar:") + 1])


def start_beside_newer(out, size):
    """Bytes that a start from step 1 reads beside five newer checkpoints, in sparse files of `size` bytes."""
    for step in range(1, 7):
        (out / "unfinished").mkdir(parents=True)
        file = out / "unfinished/ckpt.pt"
        file.write_bytes(bytes(1000))
        entry = {"bytes": 1000, "sha256": hashlib.sha256(bytes(1000)).hexdigest()}  # of the first step
        if step > 1:
            os.truncate(file, size)
            entry["bytes"] = size
        commit_checkpoint(file.parent, manifest_of(step, {"ckpt.pt": entry}), keep_last=0)
    before = bytes_read("self")
    stored, *_ = look_for_start("resume:1", str(out), Launch())
    enter_folder(str(out), stored, Launch())
    assert len([*out.glob("abandoned_*")]) == 5
    return bytes_read("self") - before


def test_newer_checkpoints_are_not_read(tmp_path):
    """A start from an older step renames them. Threads of earlier tests may read meanwhile, hence twice."""
    assert min(start_beside_newer(tmp_path / name, 2 * 10**7) for name in "ab") < 10**6


# -- read_ahead


def cached_bytes(path):
    """The bytes of a file that are in the system's page cache."""
    content = np.memmap(path, np.uint8, "r")
    is_cached = (ctypes.c_ubyte * -(-content.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.nbytes), is_cached) == 0
    return int(np.count_nonzero(np.frombuffer(is_cached, np.uint8) & 1)) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="what is read cannot be counted")
@pytest.mark.parametrize("n_tokens", [10**8, 10**9])
def test_windows_read_their_own_pages(tmp_path, n_tokens):
    """
    This does not depend on the size of the file, nor does what the start reads. Files of zeros take no room
    on the disk, but the system reads them ahead like others.
    """
    for split, length in (("train", n_tokens), ("val", 10**6)):
        (tmp_path / f"{split}.bin").touch()
        os.truncate(tmp_path / f"{split}.bin", 2 * length)
    data, windows = open_dataset(str(tmp_path), block_size=1024), 64
    assert cached_bytes(data.train.path) < 20e6
    os.posix_fadvise(opened(data.train.files[0]).fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = cached_bytes(data.train.path)
    shape = {"block_size": 1024, "vocab_size": 50304}
    plan = replace(UNDIVIDED, micro_batch=64, shares="equal", model_args=shape)
    [*Reader(data, "random", 1, plan, Mesh(), torch.device("cpu")).evaluation("train", windows)]
    assert cached_bytes(data.train.path) - before < windows * 3 * 4096


# -- hashing


@pytest.mark.parametrize("ranks, size", [(4, 10**7), pytest.param(4, 10**9, marks=pytest.mark.slow)])
def test_each_rank_hashes_its_part(tmp_path, ranks, size):
    """
    Of a checkpoint of `size` bytes in shards, at a save and at a resume. Each rank sees the folder by a
    different name.
    """
    (tmp_path / "run").mkdir()
    links, hashed = [tmp_path / f"of_rank_{rank}" for rank in range(ranks)], Counter()
    for link in links:
        link.symlink_to("run")
    read, numbers = manifest.sha256_of, size // 4 // ranks

    def rank_of(path):
        return int(str(path).split("of_rank_")[1].split("/")[0])

    def sha256_of(path):
        hashed[rank_of(path)] += path.stat().st_size
        return read(path)

    class Counted(HashedFile):
        def write(self, data):
            hashed[rank_of(self.name)] += memoryview(data).nbytes
            return super().write(data)

    def save(rank):
        unfinished = links[rank] / "unfinished"
        pieces = (((rank * numbers,), torch.zeros(numbers)),)
        part = {"weight": LocalPart(torch.Size([numbers * ranks]), pieces)}
        written = sharded_files.write(unfinished, part, dist.group.WORLD)
        if rank == 0:
            commit_checkpoint(unfinished, manifest_of(1, written), keep_last=0)

    def resume(rank):
        stored, reports = find_checkpoint(str(links[rank]))
        assert stored and not reports

    for work in (save, resume):
        with (
            patch.object(manifest, "sha256_of", sha256_of),
            patch.object(sharded_files, "HashedFile", Counted),
            patch.object(search, "do_together", lambda work, *args, **_: work(*args)),
        ):
            on_ranks(ranks, work)
        for rank in range(ranks):  # rank 0 also the small files that describe the checkpoint
            assert size / ranks <= hashed[rank] < size / ranks + 10**5
        hashed.clear()


# -- initial_weights


def part_of_model(model_args, layout, rank):
    """One rank's part of a model, made as train.py makes it, with a process group that is not connected."""
    plan = replace(UNDIVIDED, device_type="cpu", **layout)
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    try:
        mesh, cpu = connect_mesh(rank, plan, timeout_s=60.0), torch.device("cpu")
        with torch.device("meta"):
            model = GPT(GPTConfig(**model_args))
        splits = parallelize.divide_model(model, plan, mesh, cpu)
        parallelize.materialize(model, cpu, splits)
    finally:
        dist.destroy_process_group()
    return model


def numbers_drawn(model, seed):
    """Fill a rank's part of a model with initial weights, and count the numbers that are drawn for it."""
    counts = []

    def counted(key, first, n):
        counts.append(2 * (first % 4 + n))
        return random_words(key, first, n)

    with patch.object(random_numbers, "random_words", counted):
        parallelize.init_weights(model, seed)
    return sum(counts)


SMALL = dict(arch="llama", n_layer=4, n_embd=96, n_head=4, n_kv_head=2, n_hidden=164, block_size=8)
SMALL |= dict(vocab_size=67, bias=False, tied=False)
# layouts, with ranks that hold parts of different sizes: with zero 3, some ranks hold nothing
PARTS = [
    ({"zero": 3, "world_size": 3}, range(3)),
    ({"zero": 3, "world_size": 40}, (0, 33, 34, 39)),
    ({"tp": 2, "world_size": 2}, range(2)),
    ({"pp": 2, "pp_schedule": "zbv", "world_size": 2}, range(2)),
    ({"ep": 2, "zero": 3, "tp": 2, "world_size": 8}, (0, 3, 7)),
]


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize(("layout", "ranks"), PARTS)
def test_a_rank_draws_its_part_of_the_initial_weights(layout, ranks):
    """The numbers that it holds, which are the bits of one process."""
    args = SMALL | ({"n_expert": 4} if "ep" in layout else {})
    whole = {name: p.detach() for name, p in GPT(GPTConfig(**args), seed=7).named_parameters()}
    for rank in ranks:
        model = part_of_model(args, layout, rank)
        drawn, held = numbers_drawn(model, seed=7), 0
        for name, part in local_parts_by_name(model).items():
            for piece, values in part.cut(whole[name]):
                assert torch.equal(piece, values), name
                held += piece.numel()
        # up to 8 numbers more for each run of numbers, such as the columns of a row that tp divides
        assert drawn <= 1.25 * held < 0.9 * sum(p.numel() for p in whole.values())


@pytest.mark.parametrize("shape", [(9, 7), (8, 16), (3, 5, 7), (70000,), (2, 70001), ()])
def test_parts_of_normal_numbers_are_the_bits_of_the_whole(shape):
    """Wherever a part begins and ends: in no part does the place in memory change what numpy computes."""
    whole = normal_numbers(1, "name", shape, [slice(0, n) for n in shape])
    places = random.Random(0)
    for _ in range(40):
        part = tuple(slice(*sorted(places.choices(range(n + 1), k=2))) for n in shape)
        values = normal_numbers(1, "name", shape, part)
        assert values.tobytes() == whole[part].tobytes()
    assert not (whole == normal_numbers(2, "name", shape, [slice(0, n) for n in shape])).any()


def test_normal_numbers_are_normal():
    """Moments, the frequency beyond 1, 2, 3 and 4, and neighbours that are independent, to four sigma."""
    x = torch.from_numpy(normal_numbers(1, "name", (2**20,), (slice(0, 2**20),))).double()
    sigma = len(x) ** -0.5
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 4 * sigma * variance**0.5
    for limit in (1.0, 2.0, 3.0, 4.0):
        p = torch.special.erfc(torch.tensor(limit / 2**0.5).double())
        assert abs((x.abs() > limit).double().mean() - p) < 4 * sigma * p**0.5
    for distance in (1, 2, 8):  # of the same word, of the next word, of the next count
        pairs = x[:-distance] * x[distance:], x[:-distance].square() * x[distance:].square() - 1
        assert abs(pairs[0].mean()) < 4 * sigma and abs(pairs[1].mean()) < 4 * sigma * 8**0.5


# -- shuffle


@pytest.mark.parametrize("n_tokens", [10**9, 10**12])
def test_the_shuffle_keeps_nothing_of_the_data_set(n_tokens):
    numbers = 7 * 480 + np.arange(480)  # of the sequences of step 7
    shuffled_windows(Windows(10**6, 1024), 1337, numbers)  # imports what numpy needs
    tracemalloc.start()
    starts = shuffled_windows(Windows(n_tokens, 1024), 1337, numbers)
    stays, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6 and stays - starts.nbytes < 1000


# -- sharded_metadata


def rows_of(index, count, tensors, value=None):
    """The parts of a rank that holds one of `count` rows of each tensor, and a number."""
    names = [f"optim.transformer.h.{i // 21}.mlp.c_proj.weight.{i % 21}" for i in range(tensors)]
    row = torch.full((1, 1), float(index) if value is None else value)
    parts = {name: LocalPart(torch.Size((count, 1)), (((index, 0), row.clone()),)) for name in names}
    return parts | {"optim.step": LocalPart(torch.Size(()), (((), torch.tensor(7.0)),))}


def shards_of(out, ranks, tensors, replicas=1):
    """
    Save twice and resume, with tensors whose rows are divided; returns the bytes of the plan that rank 0
    gathers at the first and at the second save, that others receive, and that a rank reads.
    """
    gathered, received = [], []

    def noting(name, sizes):
        send = getattr(_DistWrapper, name)

        def noted(wrapper, value):
            sizes.append(len(pickle.dumps(value)))
            return send(wrapper, value)

        return patch.object(_DistWrapper, name, noted)

    def parts(rank, **value):
        return rows_of(rank // replicas, ranks // replicas, tensors, **value)

    def resume(rank):
        target = parts(rank, value=0.0)
        sharded_files.read(out / "1", target)
        for name, part in parts(rank).items():
            (_, a), (_, b) = *part.pieces, *target[name].pieces
            assert a.equal(b)

    sums = []
    with patch("os.fsync"), noting("gather_object", gathered), noting("broadcast_object", received):
        for number in ("0", "1"):
            gathered.clear(), received.clear()
            on_ranks(ranks, lambda rank: sharded_files.write(out / number, parts(rank), dist.group.WORLD))
            sums.append(sum(gathered))
    on_ranks(ranks, resume)
    return *sums, sum(received), (out / "1/.metadata").stat().st_size


def test_the_plan_of_a_save_is_gathered_once(tmp_path):
    """Later, rank 0 gathers where the pieces are, and other ranks receive nothing about them."""
    few, many = (shards_of(tmp_path / str(ranks), ranks, tensors=30) for ranks in (4, 8))
    for first, later, others, read in (few, many):
        assert later < 0.6 * first and others < 1000 and read < first
    assert many[1] < 2.2 * few[1]


def test_copies_are_written_once_by_all_of_their_holders(tmp_path):
    shards_of(tmp_path, ranks=8, tensors=32, replicas=4)
    sizes = [path.stat().st_size for path in (tmp_path / "1").glob("*.distcp")]
    assert len(sizes) == 8 and max(sizes) < 1.2 * min(sizes)


# -- buckets


class CountedTensor:
    """Stands for a tensor of 1 KB, and counts how often its size is read."""

    reads = 0

    @property
    def nbytes(self):
        CountedTensor.reads += 1
        return 2**10


def test_buckets_are_linear_and_the_same():
    tensors = [CountedTensor() for _ in range(2000)]
    assert sum(map(len, in_buckets(tensors))) == 2000 and CountedTensor.reads < 2.1 * 2000
    sizes = [3, 0, 4, 5, 9, 8, 0, 1, 7, 20, 0, 6, 2, 2, 2]
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    buckets = [[len(t) for t in bucket] for bucket in in_buckets(tensors, 8)]
    assert buckets == [*([3, 0, 4], [5], [9], [8, 0], [1, 7], [20], [0, 6, 2], [2, 2])]
    assert [*in_buckets([])] == []


# -- memory_of_saves


def peak_of(work):
    """By how many bytes work() raises the process's memory, without pages of files, at most."""

    def memory():
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    def watch():
        while not is_done.wait(0.001):
            highest.append(memory())

    gc.collect()
    before = memory()
    highest, is_done = [before], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    is_done.set()
    thread.join()
    return max(highest) - before


def bytes_of_conversions(folder, n_embd):
    """Bytes per parameter that a save and conversions allocate beyond the state of a run of GPT-2."""
    model = GPT(GPTConfig(n_layer=4, n_head=8, n_embd=n_embd, block_size=64, vocab_size=1024))
    count, config = sum(p.numel() for p in model.parameters()), train_defaults()
    optimizers = optim.make_optimizers(model, config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        optimizer.step()
    run = {"model_args": model.describe(), "iter_num": 5, "best_val_loss": 3.0}
    run |= {"config": config, "isogpt": {}}
    file = folder / "unfinished/ckpt.pt"
    save = peak_of(lambda: write_file(file, nanogpt_state(run, model, optimizers, copy=True)))
    file.unlink()
    moments = optimizer_state.state_by_name(model, optimizers)
    parts = flat(local_parts_by_name(model), parts_of_state(model, moments, (0, 1)))
    written = sharded_files.write(file.parent, parts, None)
    whole = make_manifest(run, 1, 3, None) | {"run": run, "files": written}
    commit_checkpoint(file.parent, whole, keep_last=0)
    to_file = peak_of(partial(export.convert, str(folder), "ckpt.pt"))
    to_hf = peak_of(partial(huggingface.save, folder / "hf", model, {}))
    return [peak / count for peak in (save, to_file, to_hf)]


@pytest.mark.slow  # imports transformers
def test_what_saves_and_conversions_allocate(tmp_path, monkeypatch):
    """A save: a copy of weights and moments. A conversion: at most the state itself, once."""
    monkeypatch.setattr(huggingface, "FILE_SIZE", "8MB")
    bytes_of_conversions(tmp_path / "first", 8)  # imports what is imported when it is first used
    save, to_file, to_hf = bytes_of_conversions(tmp_path / "second", 384)
    assert save < 13
    assert to_file < 13, "24 in the commit before"
    assert to_hf < 1.5, "a file's weights"


# -- loop_memory


@pytest.mark.slow
def test_a_run_that_evaluates_and_saves_takes_no_more_memory_with_each_step(zygote, work):
    """The peak of a run can rise by a megabyte or two when its threads happen to need memory together."""
    args = ["--compile=False", "--max_iters=1500", "--eval_interval=20", "--out_dir=out"]
    zygote.train(args, work, env={"OMP_NUM_THREADS": "1"})
    memory = {step: gb * 1e9 for step, gb in column(work / "out", "memory_gb").items()}
    # memory that stays after each evaluation keeps raising the peak; threads that need it together do so once
    rises = [memory[step + 100] - memory[step] for step in range(1000, 1500, 100)]
    assert 10 * statistics.median(rises) < 1e6, "3.5 MB in 1,000 steps in the code of e430e46"
    assert sum(rises) < 5e6
