"""What grows with ranks, bytes, parameters and steps (measure/growth.py): counted, not timed."""

import growth
import pytest

# -- newer_checkpoints

# -- open_files

# -- gloo

# -- store

# -- read_ahead

# -- hashing

# -- initial_weights

# -- metrics

# -- shuffle

# -- failure_report

# -- sharded_metadata


def test_a_rank_reads_its_own_index_and_rank_0_gathers_16_bytes_a_piece(tmp_path):
    few, many = (growth.shards_of(tmp_path / str(ranks), ranks, tensors=30) for ranks in (4, 16))
    for ranks, (first, later, _, _) in ((4, few), (16, many)):
        assert first < ranks * (16 * 30 + 300), "a digest and a size for each piece, once a run"
        assert later < ranks * 500 + 30 * 200, "names of files, and the shape of each tensor"
    assert many[2] < 1.1 * few[2], "a resume on the same layout reads as much with four times as many ranks"
    assert many[3] > 3 * few[3]


def test_copies_are_written_once_by_all_of_their_holders(tmp_path):
    """Four ranks hold each row: each writes a quarter, and reads only the indices of these four."""
    *_, read, total = growth.shards_of(tmp_path, ranks=16, tensors=32, replicas=4)
    assert len({path.stat().st_size for path in tmp_path.glob("*.distcp")}) == 1
    assert read < 0.5 * total


# -- buckets

# -- memory_of_saves


@pytest.mark.slow  # imports transformers
def test_what_saves_and_conversions_allocate():
    """A save: a copy of weights and moments. A conversion: at most the state itself, once."""
    save, to_shards, to_file, to_hf = (cost.amount for cost in growth.memory_of_saves())
    assert save < 13
    assert to_shards < 2, "24 in the commit before"
    assert to_file < 13, "24 in the commit before"
    assert to_hf < 1.5, "a file's weights"


# -- loop_memory
