"""What grows with ranks, bytes, parameters and steps (measure/growth.py): counted, not timed."""

import random

import pytest
import torch
from growth import initial_weights, numbers_drawn, part_of_model

from isogpt.common.random_numbers import normal_numbers
from isogpt.parallel.local_parts import local_parts_by_name
from model import GPT, GPTConfig

# -- newer_checkpoints

# -- open_files

# -- gloo

# -- store

# -- read_ahead

# -- hashing

# -- initial_weights

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


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_the_numbers_that_a_rank_draws_shrink_with_the_ranks():
    layouts = [{"zero": 3, "world_size": n} for n in (1, 4, 64)]
    one, few, many = (cost.amount for cost in initial_weights(SMALL | {"n_embd": 256}, layouts))
    assert one / few == pytest.approx(4, rel=0.05) and one / many == pytest.approx(64, rel=0.1)


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

# -- shuffle

# -- failure_report

# -- sharded_metadata

# -- buckets

# -- memory_of_saves

# -- loop_memory
