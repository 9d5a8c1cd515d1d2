"""
How the cost of everything but the matmuls grows with ranks, bytes, parameters and steps, counted in requests,
bytes and items, so that a busy machine shows the same. docs/scaling.md has the table.

    python measure/growth.py                 all rows
    python measure/growth.py store metrics   these
"""

import hashlib
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from isogpt.checkpoint import manifest, sharded_files
from isogpt.checkpoint.commit import commit_checkpoint
from isogpt.checkpoint.folder import enter_folder, look_for_start
from isogpt.checkpoint.manifest import make_manifest
from isogpt.checkpoint.search import StoredCheckpoint
from isogpt.checkpoint.verify import find_together
from isogpt.common.files import HashedFile
from isogpt.launch.launchers import Launch
from isogpt.parallel.local_parts import LocalPart


class Cost(NamedTuple):
    """What one size costs."""

    size: str  # such as "1,024 ranks"
    amount: float
    unit: str  # such as "requests a rank"


# -- newer_checkpoints: a start from an older step beside newer checkpoints (bytes that are read)


def newer_checkpoints(sizes: Sequence[int] = (0, 10**9, 50 * 10**9)) -> list[Cost]:
    """A start from step 1 beside five newer checkpoints, in sparse files of these many bytes in all."""
    costs = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
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
    commit_checkpoint(unfinished, run_manifest(step), keep_last=0, written={"ckpt.pt": entry})


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

# -- gloo: what gloo's groups ask of the store (requests, bytes)

# -- store: a start: what ranks ask of the store to know each other (requests, bytes)

# -- read_ahead: a window of tokens from a file larger than memory (bytes from the disk)

# -- hashing: a save in shards, and a resume (bytes that rank 0 hashes)


def hashing(ranks: Sequence[int] = (1, 4, 16), size: int = 10**9) -> list[Cost]:
    """
    A checkpoint of `size` bytes in shards, written and then verified by these numbers of ranks, which are
    threads: the bytes that rank 0 hashes, and the most that any rank does.
    """
    costs = []
    for count in ranks:
        with tempfile.TemporaryDirectory() as folder:
            saved, resumed = hashed_by_rank(Path(folder), count, size)
        for what, hashed in (("a save", saved), ("a resume", resumed)):
            costs.append(Cost(f"{count} ranks, {what}", hashed[0], "bytes that rank 0 hashes"))
            costs.append(Cost(f"{count} ranks, {what}", max(hashed.values()), "bytes, the most of a rank"))
    return costs


def hashed_by_rank(out: Path, count: int, size: int) -> tuple[Counter, Counter]:
    """The bytes that each rank hashes in a save and in a resume; each sees the folder under its own name."""
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
        _, written = sharded_files.write(unfinished, part, dist.group.WORLD)
        if rank == 0:
            commit_checkpoint(unfinished, run_manifest(step=1), keep_last=0, written=written)

    with counting(saved):
        on_ranks(count, save)
    with counting(resumed):
        found = on_ranks(count, lambda rank: find_together(str(links[rank])))
    assert all(isinstance(stored, StoredCheckpoint) and not reports for stored, reports in found)
    return saved, resumed


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
            hashed[rank_of(self.file.name)] += memoryview(data).nbytes
            return super().write(data)

    with mock.patch.object(manifest, "sha256_of", sha256_of):
        with mock.patch.object(sharded_files, "HashedFile", Counted):
            yield


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

# -- metrics: an evaluation and a resume beside a long metrics.jsonl (bytes that are read, memory)

# -- shuffle: data_order=shuffle (bytes of memory)

# -- failure_report: watching, and the report of a failure (requests, bytes)

# -- sharded_metadata: the metadata of a checkpoint in shards (items, bytes)

# -- buckets: dividing tensors into buckets (comparisons)

# -- memory_of_saves: a save of one process, and an export (bytes a parameter)

# -- loop_memory: a long run (bytes that stay)


ROWS = {
    # newer_checkpoints
    "newer_checkpoints": newer_checkpoints,
    # open_files
    # gloo
    # store
    # read_ahead
    # hashing
    "hashing": hashing,
    # initial_weights
    # metrics
    # shuffle
    # failure_report
    # sharded_metadata
    # buckets
    # memory_of_saves
    # loop_memory
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ROWS:
        for cost in ROWS[name]():
            print(f"{name:<18} {cost.size:<28} {cost.amount:>18,.6g} {cost.unit}", flush=True)
