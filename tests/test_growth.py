"""
What grows with ranks, bytes, parameters and steps: requests, bytes and items, see docs/scaling.md. Ranks are
threads here.
"""

import isogpt.launch.torch_import  # noqa: F401  (gloo connects on demand, as in train.py)

import ctypes
import gc
import json
import mmap
import os
import random
import resource
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import wait_for
from torch.testing._internal.distributed.fake_pg import FakeStore

from isogpt.common import random_numbers
from isogpt.common.random_numbers import normal_numbers, random_words
from isogpt.data.dataset import open_dataset
from isogpt.data.reader import Reader
from isogpt.data.token_files import opened
from isogpt.data.windows import Windows, shuffled_windows
from isogpt.launch import network, together
from isogpt.monitor import log
from isogpt.monitor.sink_files import MetricsFile, Plot
from isogpt.parallel import parallelize
from isogpt.parallel.data_parallel import in_buckets
from isogpt.parallel.local_parts import local_parts_by_name
from isogpt.parallel.mesh import Mesh, connect_mesh
from isogpt.parallel.plan import UNDIVIDED
from model import GPT, GPTConfig


def on_each_rank(work, size):
    """What `work` returns for each rank; all ranks work at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(work, range(size))]


def bytes_read(reader):
    """How many bytes `self` or `thread-self` has read so far, from the disk or the page cache (Linux)."""
    text = Path("/proc", reader, "io").read_text()
    return int(text.split()[text.split().index("rchar:") + 1])


# -- open_files, gloo


def files_of_rank(size):
    """Open files of a rank of a world-wide group of gloo, which communicates as a run does at its start."""
    store, before = dist.HashStore(), len(os.listdir("/proc/self/fd"))

    def connect(rank):
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=300))
        number, numbers = torch.full((1,), float(rank)), torch.empty(size)
        group._allgather_base(numbers, number).wait()
        group.allreduce([number]).wait()
        assert number.item() == numbers.sum() == size * (size - 1) / 2
        group.broadcast(number, 0).wait()
        return group

    groups = on_each_rank(connect, size)
    more = len(os.listdir("/proc/self/fd")) - before
    del groups
    gc.collect()
    return more / size


def test_a_rank_connects_to_few_others():
    """In the full mesh of gloo's default, a rank has N - 1 sockets, and asks for as many addresses."""
    few, many = files_of_rank(8), files_of_rank(24)
    assert many <= few + 0.5 < 9


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_the_limit_of_open_files_is_raised(at):
    raised = []
    at.set(resource, "prlimit", lambda *arguments: raised.append(arguments) or (1024, 4096))
    at.env("TORCHELASTIC_RUN_ID", "none")
    network.allow_connections()
    both = [(process, resource.RLIMIT_NOFILE, (4096, 4096)) for process in (0, os.getppid())]
    assert raised[1::2] == both, "torchrun may serve the store"


# -- store


class CountingStore:
    """A store that counts the requests of all ranks and the bytes that it answers."""

    def __init__(self):
        self.store, self.answers = dist.HashStore(), []

    def __getattr__(self, name):
        def request(*arguments):
            answer = getattr(self.store, name)(*arguments)
            self.answers.append(sum(map(len, answer)) if isinstance(answer, list) else len(str(answer)))
            return answer

        return request


def start_of(size):
    """What ranks, eight on each machine, ask of the store until they know each other, as in connect_ranks."""
    store, keys = CountingStore(), [f"process/{rank}" for rank in range(1, size)]

    def start(rank):
        if rank == 0:  # asks again and again while it waits for the others
            wait_for(lambda: store.store.check(keys))
        m = rank // 8
        name, agent = f"node-{m}.cluster.example.org {m:036} net:[4026531840]", f"node-{m} {m} {12345678 + m}"
        process = network.Process(name, cores=2**96 - 1, agent=agent, address=f"10.77.0.{m}")
        others = network.meet(store, rank, size, process, timeout_s=600.0)
        assert others["machines"] == [rank // 8 for rank in range(size)]

    on_each_rank(start, size)
    return store.answers


def test_ranks_know_each_other_by_few_bytes():
    """Every rank used to read every rank's cores: 944 N^2 bytes."""
    few, many = start_of(32), start_of(128)
    assert len(many) <= 3 * 128
    assert sum(many) < 128 * 1000 and sum(many) < 8 * sum(few)


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


# -- metrics


def read_of_a_resume(folder, steps):
    """Bytes that a resume and the first evaluation after it read beside so many lines, and MB at peak."""
    folder.mkdir()
    step = dict.fromkeys(("loss", "loss_mean", "grad_norm", "lr", "step_ms", "tokens_per_s"), 1.5)
    evaluation, lines = {"train_loss": 1.5, "val_loss": 1.5}, []
    for number in range(steps):
        lines += [{"iter": number} | evaluation] if number % (steps // 100) == 0 else []
        lines.append({"iter": number} | step)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    tracemalloc.start()
    before = bytes_read("thread-self")
    log = MetricsFile(str(folder))
    resumed = bytes_read("thread-self")
    log.write({"iter": steps - 5} | step, "")
    log.write({"iter": steps - 4} | evaluation, "")
    evaluated = bytes_read("thread-self")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return resumed - before, evaluated - resumed, peak / 1e6


def test_training_reads_as_much_of_a_long_log_as_of_a_short_one(tmp_path):
    read_of_a_resume(tmp_path / "first", 100)  # what matplotlib allocates once
    short, long = (read_of_a_resume(tmp_path / str(steps), steps) for steps in (1_500, 12_000))
    assert abs(long[0] - short[0]) < 100 and abs(long[1] - short[1]) < 100
    assert long[1] < 1000 and long[2] < 1.5 * short[2]


class Slow(Plot):
    """A plot for which the test lets go."""

    def __init__(self, out_dir):
        self.release, self.drawn = threading.Semaphore(0), 0
        super().__init__(out_dir)

    def draw(self):
        self.release.acquire(timeout=60)
        self.drawn += 1


EVALUATION, END = {"iter": 6, "val_loss": 1.0}, {"event": "end"}


def test_a_slow_plot_delays_no_step_and_the_next_one_waits_until_the_end(tmp_path, capsys):
    slow = Slow(str(tmp_path))
    plot = log.InThread(slow)
    for record in 3 * ({"iter": 5, "loss": 1.0}, EVALUATION):
        plot.write(record, "")
    assert not slow.drawn
    slow.release.release(2)
    plot.write(END, "")
    assert slow.drawn == 2, "after the first evaluation and at the end"
    assert capsys.readouterr().out == f"the loss curve: {tmp_path}/loss.png\n"


def test_a_plot_that_fails_or_never_ends_is_said_at_the_end(tmp_path, capsys, monkeypatch):
    Plot(str(tmp_path)).write(END, "")
    assert "no plot of the loss curve: " in capsys.readouterr().out
    monkeypatch.setattr(log, "END_S", 0.01)
    with pytest.raises(TimeoutError, match="no answer within 0.01 s"):
        log.InThread(Slow(str(tmp_path))).write(END, "")


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


# -- failures


def test_ranks_that_agree_gather_nothing(at):
    """Neither while they wait for a disk nor when no rank has failed."""
    at.set(together, "gather_objects", lambda value: pytest.fail("gathered"))
    together.wait_together(None)
    with together.exit_together():
        pass


def test_errors_of_many_ranks_are_a_few_lines(capsys):
    together.print_failures({("no disk", True): [*range(1, 1024)]})
    assert capsys.readouterr().err == "error: rank 1, 2, 3, 4, 5, 6, 7, 8 and 1,015 more: no disk\n"
    together.print_failures({(f"no {rank}", True): [rank] for rank in range(1, 1024)})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: rank 1: no 1" and lines[8:] == ["error: and 1,015 more from other ranks"]


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
