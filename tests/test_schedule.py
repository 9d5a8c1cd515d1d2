"""The learning rate of each step, and how it follows the size of the batch."""

import itertools
import math
import re

import pytest
from runs import TINY, column, script, train_defaults

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


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_without_scaling_the_rates_are_those_of_nanogpt_bit_for_bit(kind):
    for warmup, decay, cooldown, decays in itertools.product(
        (0, 1, 7, 40), (0, 7, 30), (1, 10, 50), (True, False)
    ):
        changes = dict(lr_schedule=kind, warmup_iters=warmup, lr_decay_iters=decay, cooldown_iters=cooldown)
        c = DEFAULTS | changes | {"decay_lr": decays, "min_lr": 7e-5}
        schedule = make_schedule(c, 480)
        assert [schedule.lr(it) for it in range(60)] == [nanogpt_rate(c, it) for it in range(60)]


@pytest.mark.parametrize(
    "changes",
    [
        dict(warmup_iters=0.1, lr_decay_iters=27.0),
        dict(warmup_iters=1e-1, lr_decay_iters=22.5),
        dict(warmup_iters=2.5, lr_decay_iters=2.75),
        dict(warmup_iters=7.5, lr_decay_iters=3.5),
        dict(warmup_iters=1.5, lr_decay_iters=40.3, lr_schedule="wsd", cooldown_iters=10.5),
    ],
)
def test_fractional_steps_have_nanogpts_rates(changes):
    c = DEFAULTS | changes
    schedule = make_schedule(c, 480)
    assert [schedule.lr(it) for it in range(60)] == [nanogpt_rate(c, it) for it in range(60)]
    assert make_schedule(c | {"lr_scaling": "linear", "base_batch": 480}, 480) == schedule


def test_a_run_with_fractional_steps(zygote, work):
    """
    As in nanoGPT: the run ends after the last whole step, and an interval is due at the steps that it
    divides.
    """
    steps = (
        "max_iters = 7.5\neval_interval = max_iters * 0.2\nlog_interval = 0.5\nsave_interval = "
        "max_iters / 3\n"
    )
    (work / "c.py").write_text(f"{steps}warmup_iters = 1e-1\nlr_decay_iters = max_iters * 0.9\n")
    run = zygote.train(["c.py", "--out_dir=out", "--keep_last=0"], work)
    rates, c = (
        column(work / "out", "lr"),
        DEFAULTS | dict(learning_rate=1e-3, warmup_iters=0.1, lr_decay_iters=6.75),
    )
    assert {step: rates[step] for step in range(8)} == {step: nanogpt_rate(c, step) for step in range(8)}
    assert list(column(work / "out", "val_loss")) == [0, 3, 6, 8] and max(rates) == 7
    assert [p.name for p in sorted((work / "out").glob("step_*"))] == [f"step_{s:08d}" for s in (3, 5, 6, 8)]
    line = rf"^iter 3: loss \d+\.\d{{4}}, time \S+ms, mfu \S+%, .*, lr {rates[3]:.1e}, "
    assert re.search(line, run.text(), re.M) and "note:" not in run.text()


MUON_RISES = dict(min_lr=3e-3, optimizer="muon", lr_scaling="sqrt", base_batch=160)
NOTES = {
    (
        "min_lr 6e-05 is above learning_rate 1e-05: after the warm-up, the learning rate rises: set "
        "--min_lr=1e-06, or --decay_lr=False"
    ): dict(learning_rate=1e-5),
    (
        "min_lr 0.003 is above learning_rate 0.0006: after the warm-up, the learning rate, and Muon's in "
        "proportion, rises: set --min_lr=6e-05, or --decay_lr=False"
    ): MUON_RISES,
    (
        "the run ends at step 999, during the 2000 steps of warm-up, with a learning rate of 0.0003: set a "
        "smaller --warmup_iters"
    ): dict(max_iters=999),
    (
        "the run ends at step 3000, during the 4000 steps of warm-up, with a learning rate of 0.0009: set a "
        "smaller --warmup_iters"
    ): dict(max_iters=3000, lr_scaling="linear", base_batch=240),
    (
        "the warm-up of 2000 steps does not end before lr_decay_iters, 2000: the learning rate then drops to "
        "min_lr at once: set --lr_decay_iters=600000, or a smaller --warmup_iters"
    ): dict(lr_decay_iters=2000),
    (
        "the warm-up of 5.5 steps does not end before lr_decay_iters, 4: the learning rate then drops to "
        "min_lr at once: set a smaller --warmup_iters"
    ): dict(warmup_iters=5.5, lr_decay_iters=4, max_iters=5.5),
    (
        "from step 3000, lr_decay_iters, the learning rate is 0 and nothing is learned: set "
        "--lr_decay_iters=4000, or a smaller --max_iters"
    ): dict(max_iters=4000, lr_decay_iters=3000, min_lr=0.0),
}


@pytest.mark.parametrize("note", NOTES)
def test_unusual_rates_are_noted(note):
    c = DEFAULTS | NOTES[note]
    schedule = make_schedule(c, 480)
    assert schedule.notes(c) == [note]
    quiet = c | {"eval_only": True}, c | {"decay_lr": False}
    assert all(make_schedule(other, 480).notes(other) == [] for other in quiet)


def test_usual_rates_are_not_noted():
    for changes in ({}, dict(max_iters=2000), dict(lr_decay_iters=2001), dict(min_lr=6e-4), dict(min_lr=0)):
        assert make_schedule(DEFAULTS | changes, 480).notes(DEFAULTS | changes) == []


def test_a_complete_run_that_continues_as_advised_learns():
    """The recipe of train_small.py ends at a learning rate of 0, which would stay with more steps alone."""
    complete = dict(max_iters=1000, lr_decay_iters=1000, min_lr=0.0, warmup_iters=5, lr_schedule="linear")
    advice = make_schedule(DEFAULTS | complete, 480).to_continue(1001)
    assert advice == "--max_iters=2002 --lr_decay_iters=2002"
    longer = DEFAULTS | complete | {name: int(n) for name, n in re.findall(r"--(\w+)=(\d+)", advice)}
    assert make_schedule(longer, 480).notes(longer) == []
    assert make_schedule(longer, 480).lr(1001) > 0.4 * DEFAULTS["learning_rate"]
    # a decay that lasts as long, or none, stays as it is
    for same in (dict(lr_decay_iters=2002), dict(decay_lr=False)):
        assert make_schedule(DEFAULTS | complete | same, 480).to_continue(1001) == "--max_iters=2002"


def test_the_rates_that_advice_gives_are_accepted(zygote, work):
    """Each note once, from two processes too; after the advice, none."""
    args = [
        "--max_iters=1",
        "--warmup_iters=5",
        "--lr_decay_iters=3",
        "--learning_rate=1e-6",
        "--keep_last=1",
    ]
    text = zygote.train(args, work, 2).text()
    assert (
        text.count("note:    min_lr 6e-05 is above ") == text.count("note:    the run ends at step 1, ") == 1
    )
    assert text.count("note:") == 2
    text = zygote.train([*args, "--min_lr=1e-07", "--warmup_iters=1"], work).text()
    assert "note:" not in text


# lr_scaling, sequences per step: factor of the rates, steps of warm-up; by hand, for base_batch 100 and 50
# steps
FACTORS = {
    ("linear", 400): (4, 200),
    ("sqrt", 400): (2, 100),
    ("linear", 50): (0.5, 25),
    ("sqrt", 100): (1, 50),
    ("linear", 101): (1.01, 50),
    ("sqrt", 6400): (8, 400),
}


@pytest.mark.parametrize(("kind", "sequences"), FACTORS)
def test_the_rates_and_the_warm_up_follow_the_batch(kind, sequences):
    factor, warmup = FACTORS[kind, sequences]
    c = DEFAULTS | dict(
        lr_scaling=kind, base_batch=100, warmup_iters=50, lr_decay_iters=1000, learning_rate=1e-3, min_lr=1e-4
    )
    schedule = make_schedule(c, sequences)
    assert schedule.factor == pytest.approx(factor) and schedule.warmup_iters == warmup
    assert schedule.lr(0) == pytest.approx(factor * 1e-3 / (warmup + 1))
    assert schedule.lr(warmup) == pytest.approx(factor * 1e-3)
    assert schedule.lr(1000) == pytest.approx(factor * 1e-4)
    constant = make_schedule(c | {"decay_lr": False}, sequences)
    assert constant.lr(0) == constant.lr(5000) == pytest.approx(factor * 1e-3)


def test_a_warm_up_that_leaves_no_time_to_decay():
    c = DEFAULTS | dict(
        lr_scaling="linear", base_batch=100, warmup_iters=50, lr_decay_iters=190, cooldown_iters=20
    )
    said = (
        "lr_scaling multiplies warmup_iters by 4, to 200 steps: more than {}: set --warmup_iters={} or less"
    )
    with pytest.raises(ValueError, match=said.format("lr_decay_iters, 190", 47)):
        make_schedule(c, 400)
    with pytest.raises(ValueError, match=said.format("lr_decay_iters - cooldown_iters, 170", 42)):
        make_schedule(c | {"lr_schedule": "wsd"}, 400)
    assert make_schedule(c | {"warmup_iters": 47}, 400).warmup_iters == 188
    assert make_schedule(c | {"decay_lr": False}, 400).lr(0) == 4 * c["learning_rate"]


def test_a_run_uses_and_prints_the_scaled_rate(zygote, work):
    """The log has it, and Muon's follows. 12 sequences, three times base_batch."""
    args = ["--gradient_accumulation_steps=3", "--max_iters=4", "--warmup_iters=1", "--lr_decay_iters=40"]
    run = zygote.train([*args, "--lr_scaling=linear", "--base_batch=4", "--out_dir=out"], work)
    line = (
        "rate:    0.003 = learning_rate 0.001 x 3 (linear in 12 sequences per step, base_batch 4), "
        "warm-up of 3 steps"
    )
    assert run.text().count(line) == 1
    rates = column(work / "out", "lr")
    assert [rates[s] for s in range(4)] == pytest.approx([0.00075, 0.0015, 0.00225, 0.003])
    by_hand = [
        "--learning_rate=0.003",
        f"--min_lr={3 * DEFAULTS['min_lr']}",
        "--warmup_iters=3",
        "--out_dir=by-hand",
    ]
    text = zygote.train([*args, *by_hand], work).text()
    assert "rate:" not in text and column(work / "by-hand", "loss") == column(work / "out", "loss")


def test_muon_follows(at):
    """Its groups' rates are ratios of learning_rate, which the schedule has multiplied."""
    from isogpt.training import optim
    from model import GPT, GPTConfig

    c = DEFAULTS | dict(lr_scaling="sqrt", base_batch=10, decay_lr=False)
    gpt = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=1, n_embd=8))
    optimizers = optim.make_optimizers(gpt, c | {"optimizer": "muon"})
    optim.set_rates(optimizers, 0, make_schedule(c, 40).lr(0), 0.95)
    rates = {type(o).__name__: o.param_groups[0]["lr"] for o in optimizers}
    assert rates == {"AdamW": pytest.approx(2 * c["learning_rate"]), "Muon": pytest.approx(0.04)}


MISTAKES = {
    "lr_scaling 'sqrt' needs the batch for which learning_rate was chosen: set --base_batch=": [
        "--lr_scaling=sqrt"
    ],
    "base_batch is 8, but lr_scaling is 'none': set --lr_scaling=linear or sqrt, or --base_batch=0": [
        "--base_batch=8"
    ],
    (
        "lr_scaling multiplies warmup_iters by 16, to 160 steps: more than lr_decay_iters, 100: set "
        "--warmup_iters=6"
    ): ["--lr_scaling=linear", "--base_batch=1", "--batch_size=8"],
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes(at, capsys, said):
    with pytest.raises(SystemExit) as exit:
        script(at, "train.py", [*TINY, *MISTAKES[said]])
    out, err = capsys.readouterr()
    assert exit.value.code == 1 and not out and err.count("\n") == 1 and said in re.sub(r"\s+", " ", err)
