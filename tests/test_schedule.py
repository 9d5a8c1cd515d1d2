"""The learning rate of each step."""

import itertools
import math
import re

import pytest
from runs import column, train_defaults

from isogpt.training.schedule import make_schedule

DEFAULTS = train_defaults()


def nanogpt_rate(c, it):
    """The rate by nanoGPT's formula, with two more ways to decay."""
    if not c["decay_lr"]:
        return c["learning_rate"]
    if it < c["warmup_iters"]:
        return c["learning_rate"] * (it + 1) / (c["warmup_iters"] + 1)
    if it >= c["lr_decay_iters"]:
        return c["min_lr"]
    begin = c["warmup_iters"]
    if c["lr_schedule"] == "wsd":
        begin = max(begin, c["lr_decay_iters"] - c["cooldown_iters"])
    ratio = max(0, it - begin) / (c["lr_decay_iters"] - begin)
    coeff = 0.5 * (1.0 + math.cos(math.pi * ratio)) if c["lr_schedule"] == "cosine" else 1 - ratio
    return c["min_lr"] + coeff * (c["learning_rate"] - c["min_lr"])


def same_rates(**changes):
    """Whether a schedule has nanoGPT's rates, bit for bit."""
    c = DEFAULTS | {"min_lr": 7e-5} | changes
    return [make_schedule(c).lr(it) for it in range(60)] == [nanogpt_rate(c, it) for it in range(60)]


def test_the_rates_are_those_of_nanogpt_bit_for_bit():
    kinds, warmups, decays = ("cosine", "linear", "wsd"), (0, 1, 7, 40, 0.1, 2.5), (0, 7, 30, 27.5)
    for kind, warmup, decay, cooldown in itertools.product(kinds, warmups, decays, (1, 10, 50.5)):
        changes = dict(lr_schedule=kind, warmup_iters=warmup, lr_decay_iters=decay, cooldown_iters=cooldown)
        assert same_rates(**changes), changes
    assert same_rates(decay_lr=False)


def test_a_run_with_fractional_steps(zygote, work):
    """
    As in nanoGPT: the run ends after the last whole step, and an interval is due at the steps that it
    divides.
    """
    steps = "max_iters = 7.5\neval_interval = max_iters * 0.2\nlog_interval = 0.5\n"
    steps += "save_interval = max_iters / 3\nwarmup_iters = 1e-1\nlr_decay_iters = max_iters * 0.9\n"
    (work / "c.py").write_text(steps)
    run = zygote.train(["c.py", "--out_dir=out", "--keep_last=0"], work)
    rates = column(work / "out", "lr")
    c = DEFAULTS | dict(learning_rate=1e-3, warmup_iters=0.1, lr_decay_iters=6.75)
    assert {step: rates[step] for step in range(8)} == {step: nanogpt_rate(c, step) for step in range(8)}
    assert list(column(work / "out", "val_loss")) == [0, 3, 6, 8] and max(rates) == 7
    assert [p.name for p in sorted((work / "out").glob("step_*"))] == [f"step_{s:08d}" for s in (3, 5, 6, 8)]
    line = rf"^iter 3: loss \d+\.\d{{4}}, time \S+ms, mfu \S+%, .*, lr {rates[3]:.1e}, "
    assert re.search(line, run.text(), re.M) and "note:" not in run.text()


NOTES = {
    "min_lr 6e-05 is above .*: set --min_lr=1e-06, or --decay_lr=False": dict(learning_rate=1e-5),
    "the run ends at step 999, .*2000.*: set a smaller --warmup_iters": dict(max_iters=999),
    "the learning rate drops to min_lr .*: set --lr_decay_iters=600000, or .*": dict(lr_decay_iters=2000),
    "from step 3000, .* --lr_decay_iters=4000, .*": dict(max_iters=4000, lr_decay_iters=3000, min_lr=0.0),
}


@pytest.mark.parametrize("note", NOTES)
def test_unusual_rates_are_noted(note):
    c = DEFAULTS | NOTES[note]
    schedule = make_schedule(c)
    (found,) = schedule.notes(c)
    assert re.fullmatch(note, found)
    quiet = c | {"eval_only": True}, c | {"decay_lr": False}
    assert all(make_schedule(other).notes(other) == [] for other in quiet)


def test_usual_rates_are_not_noted():
    for changes in ({}, dict(max_iters=2000), dict(lr_decay_iters=2001), dict(min_lr=6e-4), dict(min_lr=0)):
        assert make_schedule(DEFAULTS | changes).notes(DEFAULTS | changes) == []


def test_a_complete_run_that_continues_as_advised_learns():
    """The recipe of train_small.py ends at a learning rate of 0, which would stay with more steps alone."""
    complete = dict(max_iters=1000, lr_decay_iters=1000, min_lr=0.0, warmup_iters=5, lr_schedule="linear")
    advice = make_schedule(DEFAULTS | complete).to_continue(1001)
    assert advice == "--max_iters=2002 --lr_decay_iters=2002"
    longer = DEFAULTS | complete | {name: int(n) for name, n in re.findall(r"--(\w+)=(\d+)", advice)}
    assert make_schedule(longer).notes(longer) == []
    assert make_schedule(longer).lr(1001) > 0.4 * DEFAULTS["learning_rate"]
    # a decay that lasts as long, or none, stays as it is
    for same in (dict(lr_decay_iters=2002), dict(decay_lr=False)):
        assert make_schedule(DEFAULTS | complete | same).to_continue(1001) == "--max_iters=2002"


def test_the_rates_that_advice_gives_are_accepted(zygote, work):
    """Each note once, from two processes too; after the advice, none."""
    args = ["--max_iters=1", "--warmup_iters=5", "--lr_decay_iters=3", "--learning_rate=1e-6"]
    text = zygote.train(args, work, 2).text()
    for note in ("min_lr 6e-05 is above ", "the run ends at step 1, "):
        assert text.count(f"note:    {note}") == 1
    assert text.count("note:") == 2
    text = zygote.train([*args, "--min_lr=1e-07", "--warmup_iters=1"], work).text()
    assert "note:" not in text
