"""
How the cost of everything but the matmuls grows with ranks, bytes, parameters and steps, counted in requests,
bytes and items, so that a busy machine shows the same. docs/scaling.md has the table.

    python measure/growth.py                 all rows
    python measure/growth.py store metrics   these
"""

import sys
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
    # memory_of_saves
    # loop_memory
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ROWS:
        for cost in ROWS[name]():
            print(f"{name:<18} {cost.size:<28} {cost.amount:>18,.6g} {cost.unit}", flush=True)
