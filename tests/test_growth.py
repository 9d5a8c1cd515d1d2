"""What grows with ranks, bytes, parameters and steps (measure/growth.py): counted, not timed."""

import sys

import pytest
from growth import read_ahead, shuffle

# -- newer_checkpoints

# -- open_files

# -- gloo

# -- store

# -- read_ahead


@pytest.mark.skipif(sys.platform != "linux", reason="what is read cannot be counted")
def test_windows_read_and_release_their_own_pages():
    """Neither depends on the size of the file, nor does what the start reads."""
    for n_tokens in 10**8, 10**9:
        read, released, at_start = (cost.amount for cost in read_ahead((n_tokens,), windows=64))
        assert read < 3 * 4096 and released <= 2 * 2**21 and at_start < 20e6, f"{n_tokens} tokens"


# -- hashing

# -- initial_weights

# -- metrics

# -- shuffle


@pytest.mark.parametrize("n_tokens", [10**9, 10**12])
def test_the_shuffle_keeps_nothing_of_the_data_set(n_tokens):
    peak, stays = (cost.amount for cost in shuffle((n_tokens,)))
    assert peak < 1e6 and stays < 1000


# -- failure_report

# -- sharded_metadata

# -- buckets

# -- memory_of_saves

# -- loop_memory
