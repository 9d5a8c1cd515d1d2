"""
Ranks of different speed read different numbers of rows of the same steps. That the curve is the one of equal
shares: test_layouts.py.
"""

import itertools
import re
import shutil

import numpy as np
import pytest
import torch
from edits import edited_train
from runs import TINY, assert_same_run, script_that_fails, start_changed, tiny_data

from isogpt.parallel.shares import PADDING, Share, about_unused_ranks, share_of

ONE = "--gradient_accumulation_steps=4 --batch_size=6 --max_iters=5 --eval_interval=3"

# ------------------------------------------------------------------------------------------------------------
# how rows are divided

# sequences, data ranks, batch_size, pp: the start of the warning; by hand
UNUSED = {
    (4, 8, 12, 1): "4 of 8 data-parallel ranks read only padding",
    (12, 2, 12, 1): "each rank computes 6 sequences at a time, of batch_size 12",
    (12, 1, 12, 4): "each rank computes 3 sequences at a time, of batch_size 12",
    (9, 4, 1, 1): "",  # 3 micro-steps, 3 of 12 rows are padding
    (5, 4, 3, 1): "1 of 4 data-parallel ranks read only padding",
    (480, 32, 16, 1): "",  # 15 rows are nearly as fast as 16
    (13, 2, 12, 1): "",
}


@pytest.mark.parametrize("case", UNUSED)
def test_ranks_that_are_not_used_are_reported(case):
    """The advice uses all ranks."""
    sequences, ranks, batch_size, pp = case
    said = about_unused_ranks(share_of(sequences, 0, ranks, batch_size, pp), batch_size, pp)
    assert said.startswith(UNUSED[case]) and bool(said) == bool(UNUSED[case])
    if said:
        steps, more = map(int, re.search(r"_steps=(\d+): a step then reads (\d+) seq", said).groups())
        share = share_of(more, 0, ranks, batch_size, pp)
        assert steps * batch_size == more and not share.padding()
        assert not about_unused_ranks(share, batch_size, pp)
    assert not about_unused_ranks(share_of(5, 0, 2, 9, speeds=(2, 1)), 9)
    assert not about_unused_ranks(share_of(2, 0, 4, 9, islands=2), 9)


# sequences, weights, batch_size: micro-steps, rows; by hand
DIVIDED = {
    (48, (2, 1), 12): (3, (11, 5)),
    (40, (3, 1, 1), 12): (2, (12, 4, 4)),
    (3, (100, 1, 1), 8): (1, (1, 1, 1)),  # no rank without rows
}


@pytest.mark.parametrize("case", DIVIDED)
def test_rows_are_in_proportion_to_the_weights(case):
    sequences, weights, batch_size = case
    share = share_of(sequences, 0, len(weights), batch_size, speeds=weights)
    assert (share.micro_steps, share.rows_of) == DIVIDED[case]


@pytest.mark.parametrize("weights", [(2, 1), (1, 3), (3, 1, 1), (1.5, 4, 1, 2.25), (16, 1), (1,) * 9 + (2,)])
def test_shares_add_up_to_the_batch(weights):
    for sequences in (1, 2, 7, 48, 97):
        starts = 1000 + 10 * np.random.default_rng(0).permutation(sequences)
        for batch_size in (1, 2, 12, 200):
            ranks = range(len(weights))
            shares = [share_of(sequences, r, len(ranks), batch_size, speeds=weights) for r in ranks]
            assert len({(s.micro_steps, s.rows_of) for s in shares}) == 1  # all ranks have the same plan
            assert all(1 <= s.rows <= batch_size for s in shares)
            picked = [s.pick(starts, step) for step in range(shares[0].micro_steps) for s in shares]
            assert [len(p) for p in picked] == [s.rows for s in shares] * shares[0].micro_steps
            padding = [PADDING] * shares[0].padding()
            assert np.concatenate(picked).tolist() == [*starts, *padding], "in the order of the batch"


@pytest.mark.parametrize("weights", [(2, 1), (3, 1, 1), (1.5, 4, 1)])
def test_no_other_rows_of_a_micro_step_take_less_time(weights):
    for total in range(len(weights), 20):
        share = share_of(total, 0, len(weights), total, speeds=weights)
        assert share.micro_steps == 1 and sum(share.rows_of) == total
        splits = (r for r in np.ndindex(*(total + 1,) * len(weights)) if sum(r) == total and min(r) >= 1)
        fastest = min(max(n / w for n, w in zip(r, weights, strict=True)) for r in splits)
        assert max(n / w for n, w in zip(share.rows_of, weights, strict=True)) == fastest


def test_equal_weights_are_equal_shares():
    for weights in ((), (1, 1, 1), (2.5, 2.5, 2.5)):
        assert share_of(7, 2, 3, 4, speeds=weights) == Share(7, 2, 1, (3, 3, 3), islands=(7,))


def test_the_sequences_of_an_island_depend_on_neither_micro_batch_nor_ranks():
    cases = ((24, 2, ()), (7, 3, ()), (22, 2, (2, 1)), (22, 2, (4, 2)), (9, 2, (1, 3)))
    reads = {}
    for (sequences, islands, weights), size, batch_size in itertools.product(cases, (1, 2, 3), (1, 2, 5, 24)):
        # speeds also differ within an island
        speeds = tuple(w / size + (0.1, -0.1, 0)[i] * (size > 1) for w in weights for i in range(size))
        ranks = range(islands * size)
        shares = [share_of(sequences, r, len(ranks), batch_size, 1, speeds, islands) for r in ranks]
        assert len({(s.micro_steps, s.rows_of) for s in shares}) == 1 and shares[0].rows <= batch_size
        rows = [[s.pick(np.arange(sequences), m) for m in range(s.micro_steps)] for s in shares]
        parts = [
            {*np.concatenate(sum(rows[i * size : (i + 1) * size], [])).tolist()} - {PADDING}
            for i in range(islands)
        ]
        assert sum(map(len, parts)) == sequences and set.union(*parts) == set(range(sequences))
        assert [len(part) for part in parts] == [shares[i * size].island_sequences for i in range(islands)]
        ratio = weights and weights[0] / weights[1]
        reads.setdefault((sequences, islands, ratio), []).append(parts)
    assert all(parts == found[0] for found in reads.values() for parts in found)


# ------------------------------------------------------------------------------------------------------------
# measured shares

# other measured seconds on each rank
MEASURED = """
from torch.utils.benchmark import Timer
def blocked_autorange(timer, **options):
    measurement = timer.timeit(1)
    assert measurement.raw_times[0] > 0
    measurement.raw_times[:] = [SECONDS[int(os.environ["RANK"])]]
    print("measured")
    return measurement
Timer.blocked_autorange = blocked_autorange
"""


def auto(zygote, cwd, args, seconds):
    """A run with shares=auto in which the ranks' passes take these seconds; returns its output."""
    changes = MEASURED.replace("SECONDS", str(seconds))
    return (
        start_changed(zygote, changes, [*ONE.split(), "--shares=auto", *args], cwd, len(seconds))
        .wait()
        .text()
    )


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_measured_shares_have_the_bits_of_the_list_that_is_printed(zygote, work, zero):
    """
    The measurement leaves nothing behind, with dropout too. 0.52 s is 2.31 times the slowest one's speed.
    """
    args = ["--dropout=0.1", f"--zero={zero}"]
    text = auto(zygote, work, [*args, "--out_dir=auto"], [0.52, 1.2])
    assert text.count("shares:  in proportion to measured speeds, as --shares=2.25,1\n") == 1
    assert text.count("measured\n") == 2
    assert text.count("on each rank 3 micro-steps x 6, 2 rows\n") == 1
    zygote.train([*ONE.split(), *args, "--shares=2.25,1", "--out_dir=list"], work, 2)
    assert_same_run(work / "auto", work / "list")


def test_a_resume_keeps_the_measured_shares_and_has_the_same_bits(zygote, work):
    """Another measurement would give other shares; with three ranks there has to be one."""
    args = ["--dropout=0.1", "--save_interval=4", "--max_iters=7"]
    assert auto(zygote, work, [*args, "--out_dir=straight"], [1.0, 2.0]).count("measured\n") == 2
    shutil.copytree(work / "straight", work / "stopped", symlinks=True)
    shutil.rmtree(work / "stopped/step_00000008")
    text = auto(zygote, work, [*args, "--init_from=resume", "--out_dir=stopped"], [5.0, 1.0])
    assert "as --shares=2,1\n" in text and "measured\n" not in text
    assert_same_run(work / "stopped", work / "straight")
    more = ["--init_from=resume", "--max_iters=9", "--out_dir=stopped"]
    text = auto(zygote, work, more, [1.0, 3.0, 1.0])
    assert "as --shares=3,1,3\n" in text and text.count("measured\n") == 3
    assert torch.load(work / "stopped/ckpt.pt", weights_only=True)["isogpt"]["shares"] == [3, 1, 3]


@pytest.mark.slow
def test_a_slow_rank_gets_fewer_rows(zygote, work):
    slow = (
        "import time\nif ranks.rank == 0:\n    raw_model.register_forward_hook(lambda *_: time.sleep(0.2))\n"
    )
    edited_train(work, ("reader = rank_speeds", f"{slow}reader = rank_speeds"))
    args = f"{ONE} --shares=auto --batch_size=24"
    text = zygote.train(args.split(), work, 2, repo=work).text()
    first, second = map(int, re.search(r"micro-steps? x (\d+), (\d+) rows", text).groups())
    assert 2 * first < second


# ------------------------------------------------------------------------------------------------------------
# mistakes and memory

NOT_A_LIST = "it needs a positive number for each data-parallel rank"
MISTAKES = {
    **{value: f"shares is '{value}': {NOT_A_LIST}" for value in ("fast", "2,,1", "2,0", "nan,1")},
    "2,1 --pp=2": "shares is '2,1', but needs pp 1: set --shares=equal",
    "auto --zero=2": "but needs zero 0 or 1, and tp, cp and ep 1: set --shares=equal",
    "2,1": f"{NOT_A_LIST}, 1 in all: set --shares=2 or the like, or --shares=equal",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_mistakes(at, capsys, given):
    tiny_data(at.path)
    value, *flags = given.split(" ")
    out, err = script_that_fails(at, capsys, "train.py", [*TINY, f"--shares={value}", *flags])
    assert not out and err.count("\n") == 1 and MISTAKES[given] in err


def test_the_estimate_of_memory_is_that_of_the_largest_share(zygote, work):
    args = (
        "--estimate_world_size=2 --device=cpu --dataset=tiny --batch_size=12 --gradient_accumulation_steps=1"
    )
    text = zygote.start([*args.split(), "--shares=2,1"], work, script="bench.py").wait().text()
    assert "micro-batches of 8:" in text
    run = zygote.start([*args.split(), "--shares=2,1,1"], work, script="bench.py").wait(ok=False)
    assert run.codes == [1] and "rank, 2 in all: set --shares=2,1 or" in run.text()
