"""Budgets of tokens and epochs: max_tokens."""

import re
import signal

import pytest
from runs import TINY, column, records, train_defaults

from isogpt.speed.launches import FIXED
from isogpt.training.budget import limits_of
from isogpt.training.schedule import make_schedule
from isogpt.training.settings import check_training

DEFAULTS = train_defaults()  # 491,520 tokens per step


@pytest.mark.parametrize(
    ("max_tokens", "last", "note"),
    [
        ("1e9", 2034, "1,000,000,000 are 2,035 steps"),
        (".5", 0, "0.5 are 1 step"),
        ("2epochs", 40, "2 epochs of 10,000,000 tokens are 41 steps"),
        ("0.1 epochs", 1, "0.1 epochs of 10,000,000 tokens are 2 steps"),
    ],
)
def test_the_steps_of_a_budget(max_tokens, last, note):
    # a config's max_iters does not count
    config = check_training(DEFAULTS | dict(max_tokens=max_tokens, max_iters=77, lr_decay_iters=8.5))
    limits = limits_of(config, 10_000_000)
    note += " of 491,520 tokens"
    assert limits.notes == [f"max_tokens {note}: max_iters {last}, lr_decay_iters {last}"]
    assert limits.settings() == {"max_iters": last, "lr_decay_iters": last}


def test_without_a_budget_the_settings_stay_as_they_are():
    for none in ("", "0"):
        settings = check_training(DEFAULTS | {"max_iters": 7.5, "max_tokens": none})
        assert limits_of(settings, 1_000_000) == (7.5, DEFAULTS["lr_decay_iters"], [])


@pytest.mark.parametrize("max_tokens", ["-1e9", "2 days", "1.2.3", "epochs"])
def test_what_is_no_budget_is_refused(max_tokens):
    message = f"max_tokens is {max_tokens!r}; choose from tokens such as 3e9, and epochs such as"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_training(DEFAULTS | {"max_tokens": max_tokens})


def test_the_advice_for_a_complete_run_is_a_budget():
    for max_tokens, twice in {"983040": "1.96608e+06", "0.5epochs": "1epochs"}.items():
        config = DEFAULTS | {"max_tokens": max_tokens}
        limits = limits_of(config, 2_000_000)
        advice = make_schedule(config | limits.settings()).to_continue(limits.max_iters + 1)
        assert advice == f"--max_tokens={twice}"
        check_training(DEFAULTS | {"max_tokens": twice})


def test_measurements_take_their_own_number_of_steps():
    """bench.py and dry runs set max_iters, which a budget in a config would override."""
    assert FIXED["max_tokens"] == ""


def test_a_run_with_a_budget(zygote, work):
    """It is the run with as many steps, and continues after a stop, with the same budget and a larger one."""
    same = ["--max_iters=11", "--lr_decay_iters=11", "--warmup_iters=2"]
    zygote.train([*same, "--out_dir=steps"], work)
    (work / "c.py").write_text("max_iters = 3\nlr_decay_iters = 5\nwarmup_iters = 2\n")
    budget = ["c.py", "--out_dir=out", "--init_from=auto"]
    run = zygote.start([*TINY, *budget, "--max_tokens=3072"], work)  # 12 * 256
    assert run.until(lambda text: "iter 4:" in text)
    run.kill(sig=signal.SIGTERM)
    run.wait(ok=False)
    resumed = zygote.train([*budget, "--max_tokens=0.1536epochs"], work).text()  # of 20,000 tokens
    assert "note:    max_tokens 0.1536 epochs of 20,000 tokens are 12 steps" in resumed
    assert "the loss curve changes" not in resumed
    for key in ("loss", "lr", "val_loss"):
        assert column(work / "out", key) == column(work / "steps", key)
    starts = [r["config"] for r in records(work / "out") if r.get("event") in ("start", "resume")]
    assert [(c["max_iters"], c["lr_decay_iters"]) for c in starts] == [(11, 11)] * 2
    complete = zygote.train([*budget, "--max_tokens=3072"], work).text()
    assert "which is beyond max_iters: to continue, set --max_tokens=6144 or so" in complete
    longer = zygote.train([*budget, "--max_tokens=4000"], work).text()  # 15.6 steps
    assert "this run continues with lr_decay_iters 15 (was 11): the loss curve changes" in longer
    assert [*column(work / "out", "loss")] == [*range(16)]
