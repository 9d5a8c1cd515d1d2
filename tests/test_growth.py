"""What grows with ranks, bytes, parameters and steps (measure/growth.py): counted, not timed."""

import growth
import pytest

# -- newer_checkpoints


def test_newer_checkpoints_are_not_read():
    """A start from an older step renames them."""
    without, beside = growth.newer_checkpoints((0, 10**8))
    assert without.amount < 10**6 and abs(beside.amount - without.amount) < 10**4


# -- open_files

# -- gloo

# -- store

# -- read_ahead

# -- hashing


@pytest.mark.parametrize("ranks, size", [(4, 10**7), pytest.param(4, 10**9, marks=pytest.mark.slow)])
def test_each_rank_hashes_its_part(ranks, size):
    """Rank 0 no more than others, but for the small files that describe the checkpoint."""
    for cost in growth.hashing((ranks,), size):
        assert size / ranks <= cost.amount < size / ranks + 10**5, cost


# -- initial_weights

# -- metrics

# -- shuffle

# -- failure_report

# -- sharded_metadata

# -- buckets

# -- memory_of_saves

# -- loop_memory
