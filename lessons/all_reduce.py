"""
All-reduce as a ring, as a tree and by recursive doubling, with their messages counted.

    torchrun --standalone --nproc_per_node=4 lessons/all_reduce.py [--picture=lessons/all_reduce.png]
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from math import log2

import torch
import torch.distributed as dist
from torch import Tensor

picture = "".join(sys.argv[1:]).removeprefix("--picture=")
rank, p = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if p < 4 or p & (p - 1):
    raise SystemExit(f"start 4 or 8 ranks, not {p}, since recursive doubling needs a power of two")
levels = round(log2(p))
dist.init_process_group("gloo")
counts = Counter()  # of this rank: steps, and the messages and bytes that it sends


def log(text: str) -> None:
    if rank == 0:
        print(text, flush=True)


# 1. Three ways to replace x by the sum over all ranks.
def exchange(to: int, sent: Tensor | None, source: int, received: Tensor | None) -> None:
    """One step: send a message and receive another at the same time, or do one of the two."""
    works = [] if received is None else [dist.irecv(received, source)]
    if sent is not None:
        works.append(dist.isend(sent, to))
        counts.update(messages=1, bytes=sent.nbytes)
    for work in works:
        work.wait()
    counts.update(steps=1)


def ring(x: Tensor, history: list[Tensor] | None = None) -> None:
    """Reduce-scatter, then all-gather: in each step, every rank sends a chunk to its right neighbor."""
    chunks, right, left = x.chunk(p), (rank + 1) % p, (rank - 1) % p
    received = torch.empty_like(chunks[0])
    for step in range(2 * (p - 1)):
        chunk = chunks[(rank - step - 1) % p]  # the one that the left neighbor sends
        exchange(right, chunks[(rank - step) % p], left, received)
        if step < p - 1:
            chunk += received  # a sum that grows by one rank in each step
        else:
            chunk.copy_(received)  # a complete sum
        if history is not None:
            history.append(x.clone())


def tree(x: Tensor) -> None:
    """Reduce to rank 0, then broadcast from it: on each level, half of the ranks send to the other half."""
    received = torch.empty_like(x)
    partners = [rank ^ 2**level for level in range(levels) if rank % 2**level == 0]
    for partner in partners:
        exchange(partner, x if partner < rank else None, partner, received if partner > rank else None)
        if partner > rank:
            x += received
    for partner in reversed(partners):
        exchange(partner, x if partner > rank else None, partner, x if partner < rank else None)


def doubling(x: Tensor) -> None:
    """In each step, pairs of ranks exchange all that they have, twice as far apart as in the step before."""
    received = torch.empty_like(x)
    for level in range(levels):
        partner = rank ^ 2**level
        exchange(partner, x, partner, received)
        x += received


# 2. Count. The integers that are added here need no rounding, so all sums must be equal.
def measure(all_reduce: Callable, numbers: Tensor) -> tuple[Tensor, float]:
    """The sum, and the shortest of five times in seconds."""
    times = []
    for _ in range(5):
        counts.clear()
        x = numbers.clone()
        dist.barrier()
        started = time.perf_counter()
        all_reduce(x)
        times.append(time.perf_counter() - started)
    return x, min(times)


numbers = torch.arange(1_000_000.0) % 1000 + rank
n = numbers.nbytes
expected, seconds = measure(dist.all_reduce, numbers)
measured = [f"dist.all_reduce {1e3 * seconds:.1f} ms"]
log(f"{p} ranks, n = {n} bytes     steps   messages   from rank 0  from all (bytes)")
predictions = {  # rank 0 sends no less than any other rank
    ring: (2 * (p - 1), 2 * (p - 1) * p, 2 * (p - 1) * n // p, 2 * (p - 1) * n),
    tree: (2 * levels, 2 * (p - 1), levels * n, 2 * (p - 1) * n),
    doubling: (levels, levels * p, levels * n, levels * p * n),
}
for all_reduce, predicted in predictions.items():
    x, seconds = measure(all_reduce, numbers)
    assert torch.equal(x, expected)
    measured.append(f"{all_reduce.__name__} {1e3 * seconds:.1f} ms")
    total = torch.tensor([counts["messages"], counts["bytes"]])
    dist.all_reduce(total)
    counted = counts["steps"], total[0].item(), counts["bytes"], total[1].item()
    for kind, row in (("predicted", predicted), ("counted", counted)):
        log("  {:9} {:14} {:7} {:10} {:13} {:9}".format(all_reduce.__name__, kind, *row))
log(f"measured: {', '.join(measured)}")

# 3. The order of the additions. In float32, 2**24 + 1 is rounded to 2**24.
log("the sum of 1, 2**24, -2**24 and 1, which ranks 0 to 3 contribute, in each chunk")
for all_reduce, dtype in ((ring, torch.float32), (tree, torch.float32), (ring, torch.int64)):
    x = torch.full((p,), {0: 1, 1: 2**24, 2: -(2**24), 3: 1}.get(rank, 0), dtype=dtype)
    all_reduce(x)
    log(f"  {all_reduce.__name__:5} in {str(dtype).removeprefix('torch.'):8} {x.long().tolist()}")

# 4. Predict. A step takes a latency alpha, and beta for each byte.
alpha, beta = 0.01, 1e-7  # in ms
log("predicted ms with alpha = 10 us, 1 / beta = 10 GB/s    ring      tree  doubling")
for ranks, name, size in ((8, "1 KB", 1e3), (8, "1 GB", 1e9), (64, "1 KB", 1e3), (64, "1 GB", 1e9)):
    in_ring = 2 * (ranks - 1) * (alpha + size / ranks * beta)
    in_doubling = log2(ranks) * (alpha + size * beta)
    log(f"  {ranks:2} ranks, {name:35} {in_ring:9.3f} {2 * in_doubling:9.3f} {in_doubling:9.3f}")

# 5. The picture. Each rank contributes a bit of its own, so that a sum shows which ranks it contains.
history = [torch.full((p,), 2**rank)]
ring(history[0].clone(), history)
gathered = [torch.empty(2 * p - 1, p, dtype=torch.long) for _ in range(p)]
dist.all_gather(gathered, torch.stack(history))
if picture and rank == 0:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.2), dpi=110, layout="constrained")
    for step, axes in enumerate(figure.subplots(1, 2 * p - 1, sharey=True)):
        sums = [chunks[step].tolist() for chunks in gathered]  # by rank and chunk
        axes.imshow([[s.bit_count() for s in row] for row in sums], "Blues", vmin=0, vmax=p + 2)
        for i, j in product(range(p), range(p)):
            ranks = [str(r) for r in range(p) if sums[i][j] >> r & 1]
            axes.text(j, i, "+".join(ranks) if len(ranks) < p else "all", ha="center", va="center", size=7)
        phase = "reduce-scatter" if step < p else "all-gather"
        axes.set_title(f"{phase} {(step - 1) % (p - 1) + 1}" if step else "before", size=8)
        axes.set(xticks=range(p), yticks=range(p), xlabel="chunk", ylabel="" if step else "rank")
    figure.savefig(picture)
dist.destroy_process_group()
