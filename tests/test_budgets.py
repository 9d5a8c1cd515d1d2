"""Budgets of tokens and epochs, max_tokens and max_epochs."""

import re
import signal

import pytest
from runs import TINY, column, records, train_defaults

from isogpt.speed.launches import FIXED
from isogpt.training.budget import limits_of
from isogpt.training.schedule import make_schedule
from isogpt.training.settings import check_training

DEFAULTS = train_defaults()  # 491,520 tokens per step
LIMITS = {
    "max_tokens 1,000,000,000 are 2,035 steps of 491,520 tokens": dict(max_tokens=1e9),
    "max_tokens 983,040 are 2 steps of 491,520 tokens": dict(max_tokens=983040.0),
    "max_tokens 0.5 are 1 step of 491,520 tokens": dict(max_tokens=0.5),
    "max_epochs 2 of 1,000,000 tokens are 4 steps of 491,520 tokens": dict(max_epochs=2.0),
    "max_epochs 0.1 of 1,000,000 tokens are 13 steps of 7,680 tokens": dict(
        max_epochs=0.1, batch_size=8, block_size=96, gradient_accumulation_steps=10
    ),
}


@pytest.mark.parametrize("note", LIMITS)
def test_the_steps_of_a_budget(note):
    steps = int(re.search(r"([\d,]+) steps? of", note)[1].replace(",", ""))
    # a config's max_iters does not count
    limits = limits_of(DEFAULTS | LIMITS[note] | {"max_iters": 77, "lr_decay_iters": 88.5}, 1_000_000)
    assert limits.notes == [f"{note}: max_iters {steps - 1}, lr_decay_iters {steps - 1}"]
    assert limits.settings() == {"max_iters": steps - 1, "lr_decay_iters": steps - 1}


def test_without_a_budget_the_settings_stay_as_they_are():
    limits = limits_of(DEFAULTS | {"max_iters": 7.5, "lr_decay_iters": 88}, 1_000_000)
    assert limits == (7.5, 88, [])


def test_two_budgets_are_refused():
    message = "max_tokens is 1e+09 and max_epochs is 2, but both set the number of steps: set --max_tokens=0 "
    with pytest.raises(ValueError, match=re.escape(f"{message}or --max_epochs=0")):
        check_training(DEFAULTS | {"max_tokens": 1e9, "max_epochs": 2.0})


def test_the_advice_for_a_complete_run_is_a_budget():
    for name, value in {"max_tokens": 983040.0, "max_epochs": 0.5}.items():
        config = DEFAULTS | {name: value}
        limits = limits_of(config, 2_000_000)
        advice = make_schedule(config | limits.settings()).to_continue(limits.max_iters + 1)
        assert advice == f"--{name}={2 * value:g}"


def test_measurements_take_their_own_number_of_steps():
    """bench.py and dry runs set max_iters, which a budget in a config would override."""
    assert FIXED["max_tokens"] == FIXED["max_epochs"] == 0


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
    resumed = zygote.train([*budget, "--max_epochs=0.1536"], work).text()  # of 20,000 tokens
    assert "note:    max_epochs 0.1536 of 20,000 tokens are 12 steps of 256 tokens: max_iters 11, " in resumed
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
