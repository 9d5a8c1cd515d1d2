"""
How the cost of everything but the matmuls grows with ranks, bytes, parameters and steps, counted in requests,
bytes and items, so that a busy machine shows the same. docs/scaling.md has the table.

    python measure/growth.py                 all rows
    python measure/growth.py store metrics   these
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from isogpt.common import random_numbers
from isogpt.common.random_numbers import random_words
from isogpt.parallel import parallelize
from isogpt.parallel.data_parallel import shard
from isogpt.parallel.local_parts import local
from isogpt.parallel.mesh import connect_mesh
from isogpt.parallel.plan import UNDIVIDED
from model import GPT, GPTConfig


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

# -- shuffle: data_order=shuffle (bytes of memory)

# -- failure_report: watching, and the report of a failure (requests, bytes)

# -- sharded_metadata: the metadata of a checkpoint in shards (items, bytes)

# -- buckets: dividing tensors into buckets (comparisons)

# -- memory_of_saves: a save of one process, and an export (bytes a parameter)

# -- loop_memory: a long run (bytes that stay)


ROWS = {
    # newer_checkpoints
    # open_files
    # gloo
    # store
    # read_ahead
    # hashing
    "initial_weights": initial_weights
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
