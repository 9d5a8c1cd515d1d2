"""Spikes: what one is, and that each layout skips the same steps."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import column, records, tiny_data
from test_monitor import numbers_of

from isogpt.checkpoint.progress import Progress
from isogpt.common.random_numbers import TRAIN
from isogpt.data.windows import random_windows
from isogpt.monitor.step_policy import StepPolicy
from isogpt.training.recent_steps import ENOUGH, PATIENCE, SIGMAS, WINDOW, RecentSteps


def noise(n, mean=3.0, sigma=0.1):
    """Losses of n steps."""
    return np.random.default_rng(1).normal(mean, sigma, n).tolist()


# ------------------------------------------------------------------------------------------------------------
# the rule


def test_the_limits_are_those_of_the_last_taken_steps():
    recent, losses = RecentSteps(), noise(300)
    for i, loss in enumerate(losses):
        window = losses[:i][-WINDOW:]
        limit = np.mean(window) + SIGMAS * np.std(window) if i >= ENOUGH else math.inf
        assert recent.limits()[0] == pytest.approx(limit, rel=1e-12) and loss < limit
        recent.add(loss, 2 * loss)
    assert recent.limits()[1] == pytest.approx(2 * recent.limits()[0])
    again = RecentSteps()
    again.rewind(json.loads(json.dumps(recent.describe())))
    assert again == recent and len(again.losses) == WINDOW


def test_neither_a_fall_nor_rounding_is_a_spike():
    for curve in ([3.0 + i % 2 * 1e-7 for i in range(300)], [1 + 3 * 0.98**i for i in range(300)]):
        recent = RecentSteps()
        for loss in curve:
            assert loss < recent.limits()[0]
            recent.add(loss, loss)
    assert recent.limits()[0] < 1.2, "a rise to this after the fall is one"


@pytest.fixture
def told():
    """What a policy reports: (event, text, facts), or a line."""
    return []


@pytest.fixture
def policy(told):
    """A policy that skips, and that remembers enough steps."""
    logger = SimpleNamespace(event=lambda *event, **facts: told.append((*event, facts)), print=told.append)
    state = SimpleNamespace(step=7, progress=Progress(tokens_per_step=64))
    for loss in noise(WINDOW):
        state.progress.recent_steps.add(loss, 1.0)
    return StepPolicy("skip", "skip", state, None, None, logger)


def numbers_with_limits(policy, loss, grad_norm=1.0, **more):
    """The numbers of a step of two ranks with this mean loss."""
    numbers, limits = numbers_of(2 * loss - 1, grad_norm**2 - 0.5, **more), ("loss_limit", "grad_norm_limit")
    pairs = zip(limits, policy.state.progress.recent_steps.limits(), strict=True)
    return numbers._replace(**{name: torch.full((2,), limit).double() for name, limit in pairs})


@pytest.mark.parametrize("on_spike", ["report", "skip"])
def test_a_spike_is_reported_and_with_skip_not_taken(policy, told, on_spike):
    policy.on_spike, is_skipped = on_spike, on_spike == "skip"
    recent = policy.state.progress.recent_steps
    for loss, grad_norm in ((9.0, 1.0), (3.0, 2.0)):
        numbers = numbers_with_limits(policy, loss, grad_norm)
        assert not numbers.is_update(skips_spikes=True) and numbers.is_update(skips_spikes=False)
        assert policy.takes(numbers) is not is_skipped
        assert (recent.losses[-1] == loss) is not is_skipped
    numbers = numbers_with_limits(policy, 3.0)
    assert numbers.is_update(skips_spikes=True) and policy.takes(numbers) and recent.skipped == 0
    (name, text, facts), (_, second, _) = told
    assert name == "spike" and facts["skipped"] is is_skipped and facts["loss_limit"] > 3.0
    assert text.startswith("warning: step 7 is a spike: loss 9, loss_limit 3.") and "grad_norm 2, " in second


def test_no_run_skips_forever(policy, told):
    """After PATIENCE spikes in succession the new level is the level, and a spike is judged by it."""
    taken = [policy.takes(numbers_with_limits(policy, 9.0 + i % 7 / 100)) for i in range(300)]
    assert taken == [False] * PATIENCE + [True] * (300 - PATIENCE)
    assert len(told) == PATIENCE + 1 and "in succession are not due to a single batch" in told[-1]
    assert not policy.takes(numbers_with_limits(policy, 20.0))


def test_a_step_that_is_not_finite_is_not_taken_unless_the_loss_scale_is_the_cause(policy, told):
    """That may be the cause of a gradient, but not of a loss. Neither is a spike."""
    before = policy.state.progress.recent_steps.describe()
    for loss, grad_norm, scale, in_succession in (
        (math.nan, 1.0, 1.0, 1),
        (3.0, math.inf, 1.0, 2),
        (3.0, math.inf, 256.0, 0),
        (math.nan, math.inf, 256.0, 1),
    ):
        numbers = numbers_with_limits(policy, loss, grad_norm, loss_scale=scale)
        assert policy.takes(numbers) is (in_succession == 0) and len(policy.not_finite) == in_succession
    assert policy.state.progress.recent_steps.describe() == before and not told
    assert policy.takes(numbers_with_limits(policy, 3.0)) and not policy.not_finite


# ------------------------------------------------------------------------------------------------------------
# runs on a text with poisoned windows

POISONED = [170, 175, 180, 181, 182, 184]
SKIPPED = POISONED[:-1]  # after three in succession, the next steps are taken
SAVED = 160
LAST = 190
SPIKY = [
    *("--on_spike=skip", "--learning_rate=3e-3", "--warmup_iters=5", "--lr_decay_iters=1000"),
    *(f"--max_iters={LAST}", f"--save_interval={SAVED}", "--keep_last=9"),
]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A folder with a data set of few characters, but random ones in the windows of some steps."""
    cwd, n_tokens = tmp_path_factory.mktemp("poisoned"), 1_000_000
    folder, rng = tiny_data(cwd), np.random.default_rng(0)
    ids = np.where(rng.random(n_tokens) < 0.9, 0, rng.integers(0, 8, n_tokens)).astype(np.uint16)
    ids[:4000].tofile(folder / "val.bin")
    for step in POISONED:
        for start in random_windows(n_tokens, 32, 1337, TRAIN, step, 8):
            ids[start : start + 33] = rng.integers(8, 65, 33)
    ids.tofile(folder / "train.bin")
    return cwd


@pytest.fixture(scope="module")
def whole(zygote, poisoned):
    """The folder of a run on one process."""
    zygote.train([*SPIKY, "--out_dir=whole"], poisoned)
    return poisoned / "whole"


def skipped_in(folder):
    """The steps that a run has skipped as spikes."""
    return [r["iter"] for r in records(folder) if r.get("event") == "spike" and r["skipped"]]


def continued(zygote, whole, name, flags="", processes=1, last=(LAST,)):
    """Continue the run on one process from its checkpoint; returns its losses and those of one process."""
    out = whole.parent / name
    shutil.copytree(whole / f"step_{SAVED:08d}", out / f"step_{SAVED:08d}")
    for step in last:
        args = [*flags.split(), f"--out_dir={out}", "--init_from=resume", f"--max_iters={step}"]
        zygote.train([*SPIKY, *args], whole.parent, processes)
    assert skipped_in(out) == SKIPPED, name
    expected = {step: loss for step, loss in column(whole, "loss").items() if step >= SAVED}
    return column(out, "loss"), expected


def test_a_poisoned_batch_is_skipped_on_one_and_two_processes_also_after_a_resume(zygote, whole):
    assert skipped_in(whole) == SKIPPED
    losses = column(whole, "loss")
    assert sorted(losses) == [s for s in range(LAST + 1) if s not in SKIPPED] and losses[184] > 3
    # a stop between the window's steps and the poison, and one between spikes in succession
    found, expected = continued(zygote, whole, "cut", last=(165, 180, LAST))
    assert found == expected
    found, expected = continued(zygote, whole, "two", processes=2)
    assert found == pytest.approx(expected, abs=ROUNDING)


ROUNDING, NEAR, FAR = 1e-4, 0.02, 0.5
# (processes, flags, how far losses may be from one process's): runs that continue the one on one process
LAYOUTS = [
    (3, "", ROUNDING),
    (2, "--zero=1", ROUNDING),
    (2, "--zero=3", ROUNDING),
    (2, "--tp=2", ROUNDING),
    (2, "--pp=2", ROUNDING),
    (2, "--cp=2", ROUNDING),
    (2, "--grad_compression=int8", FAR),
    (2, "--islands=2 --local_steps=2", FAR),
    (1, "--dtype=float16", NEAR),
    (1, "--dtype=bfloat16", NEAR),
]


@pytest.mark.slow
def test_every_layout_skips_the_same_steps(zygote, poisoned, whole):
    for processes, flags, limit in [*LAYOUTS, (1, "--exact=True", ROUNDING), (3, "--exact=True", ROUNDING)]:
        found, expected = continued(zygote, whole, f"{processes}{flags}", flags, processes)
        assert found == pytest.approx(expected, abs=limit), (processes, flags)
    one, three = (poisoned / f"{n}--exact=True" for n in (1, 3))
    for name in ("loss", "grad_norm"):
        assert column(one, name) == column(three, name)


# whole runs, since a checkpoint of AdamW does not continue
MODELS = [
    (2, "--arch=nanochat --optimizer=muon --muon_lr=0.01 --zero=1"),
    (2, "--n_expert=4 --ep=2"),
    (1, "--optimizer=other.py:Other"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "flags"), MODELS)
def test_experts_and_every_optimizer_skip_the_same_steps(zygote, poisoned, processes, flags):
    (poisoned / "other.py").write_text("from torch.optim import NAdam as Other")
    out = poisoned / flags.replace(" ", "").replace("/", "")
    zygote.train([*SPIKY, *flags.split(), f"--out_dir={out}", "--save_checkpoint=False"], poisoned, processes)
    assert skipped_in(out) == SKIPPED
