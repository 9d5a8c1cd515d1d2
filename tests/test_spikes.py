"""Spikes: what one is, and that each layout skips the same steps."""

import json
import math
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
from runs import assert_same_run, column, records, start_faulty, tiny_data
from test_statistics import reader_of

from isogpt.training.recent_steps import RecentSteps
from model import GPT, GPTConfig

WINDOW, ENOUGH = 128, 64  # steps from which the limits are computed: at most, at least


# ------------------------------------------------------------------------------------------------------------
# the rule


def test_the_limits_are_those_of_the_last_taken_steps():
    recent, losses = RecentSteps(), np.random.default_rng(1).normal(3.0, 0.1, 300).tolist()
    for i, loss in enumerate(losses):
        window = losses[:i][-WINDOW:]
        limit = np.mean(window) + 6 * np.std(window) if i >= ENOUGH else math.inf
        assert recent.limits()[0] == pytest.approx(limit, rel=1e-12) and loss < limit
        recent.begin()
        assert recent.limits(launched=0) == recent.limits(), "known or not, the last step does not matter"
        recent.add(loss, 2 * loss)
    assert recent.limits()[1] == pytest.approx(2 * recent.limits()[0])
    again = RecentSteps(**json.loads(json.dumps(asdict(recent))))
    assert again == recent and len(again.losses) == WINDOW


def test_neither_a_fall_nor_rounding_is_a_spike():
    for curve in ([3.0 + i % 2 * 1e-7 for i in range(300)], [1 + 3 * 0.98**i for i in range(300)]):
        recent = RecentSteps()
        for loss in curve:
            assert loss < recent.limits()[0]
            recent.add(loss, loss)
    assert recent.limits()[0] < 1.2, "a rise to this after the fall is one"


# ------------------------------------------------------------------------------------------------------------
# runs


# the first step whose limits are known, since they do not depend on the step just before; three in succession
# and the next, whose limits were known before the third
ALONE = [ENOUGH + 1, 67, 68, 69, 70, 72 + ENOUGH]


@pytest.mark.parametrize(
    "fault, skip_steps, steps",
    [("LARGE", "none", [65, 67, 68]), ("LARGE", "spikes", ALONE), ("HIGH", "spikes", ALONE)],
)
def test_a_gradient_or_a_loss_alone_is_a_spike(zygote, work, fault, skip_steps, steps):
    """
    It is recorded and counted, or not taken, and printed. After three in succession ENOUGH steps are taken,
    which set new limits; a spike that is taken raises them. Only one that is skipped is an alert.
    """
    due, is_skipped = {*ALONE, 71}, skip_steps == "spikes"
    args = [f"--skip_steps={skip_steps}", "--out_dir=out", f"--max_iters={max(due)}"]
    args += ["--alert_command=cat >> alerts.jsonl"]
    run = start_faulty(zygote, args, work, **{fault: [[step, 0] for step in due]}).wait()
    spikes = [r for r in records(work / "out") if r.get("event") == "spike"]
    assert {r["iter"]: r["skipped"] for r in spikes} == dict.fromkeys(steps, is_skipped)
    assert column(work / "out", "loss").keys() == {*range(max(due) + 1)} - {*(steps if is_skipped else ())}
    assert {"loss", "grad_norm", "loss_limit", "grad_norm_limit"} < spikes[0].keys()
    assert run.text().count("warning: step 65 is a spike: loss ") == is_skipped == ("warning" in run.text())
    assert re.search(rf"^done: .*, {len(steps)} spikes$", run.text(), re.M)
    assert (work / "alerts.jsonl").read_text().count('"spike"') == is_skipped * len(steps)
    assert ("in succession are not due to a single batch" in run.text()) is is_skipped


# a text with poisoned windows

POISONED = [170, 175, 180, 181, 182, 184]
SKIPPED = POISONED[:-1]  # after three in succession, the next steps are taken
SAVED = 160
LAST = 190
RATES = "--learning_rate=3e-3 --warmup_iters=5 --lr_decay_iters=1000"
SPIKY = f"--skip_steps=spikes {RATES} --max_iters={LAST} --save_interval={SAVED} --keep_last=9".split()


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A folder with a data set of few characters, but random ones in the windows of some steps."""
    cwd, n_tokens = tmp_path_factory.mktemp("poisoned"), 1_000_000
    folder, rng = tiny_data(cwd), np.random.default_rng(0)
    ids = np.where(rng.random(n_tokens) < 0.9, 0, rng.integers(0, 8, n_tokens)).astype(np.uint16)
    ids.tofile(folder / "train.bin")
    reader = reader_of(cwd, GPT(GPTConfig(32, 65, 1, 1, 8)))
    for step in POISONED:
        for start in reader.starts(step):
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
    (2, "--islands=2 --local_steps=2", FAR),
    (1, "--dtype=float16", NEAR),
]


@pytest.mark.slow
def test_every_layout_skips_the_same_steps(zygote, poisoned, whole):
    for processes, flags, limit in [*LAYOUTS, (1, "--exact=True", ROUNDING), (3, "--exact=True", ROUNDING)]:
        found, expected = continued(zygote, whole, f"{processes}{flags}", flags, processes)
        assert found == pytest.approx(expected, abs=limit), (processes, flags)
    assert_same_run(*(poisoned / f"{n}--exact=True" for n in (1, 3)))


@pytest.mark.slow
def test_experts_and_every_optimizer_skip_the_same_steps(zygote, poisoned, tmp_path):
    """Whole runs, since a checkpoint of AdamW does not continue."""
    (poisoned / "other.py").write_text("from torch.optim import NAdam as Other")
    muon = "--arch=nanochat --optimizer=muon --muon_lr=0.01 --zero=1 --n_expert=4 --ep=2"
    for processes, flags in ((2, muon), (1, "--optimizer=other.py:Other")):
        out = ["--save_checkpoint=False", f"--out_dir={tmp_path}/{processes}"]
        zygote.train([*SPIKY, *flags.split(), *out], poisoned, processes)
        assert skipped_in(tmp_path / str(processes)) == SKIPPED
