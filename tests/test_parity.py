"""One curve: the losses do not depend on the number of processes or the micro-batch size."""

import pytest
import torch
from runs import column


def same(a, b, absolute=0.0, relative=0.0):
    assert a.keys() == b.keys() and len(a) > 0
    for step in a:
        assert a[step] == pytest.approx(b[step], abs=absolute, rel=relative), f"step {step}"


# name: (processes, accumulation, batch_size); all read 48 sequences per step
LAYOUTS = {
    "1": (1, 4, 12),
    "1-b24": (1, 2, 24),
    "1-b1": (1, 48, 1),
    "2": (2, 4, 12),
    "3": (3, 4, 12),
    "4": (4, 4, 12),
    "7": (7, 4, 12),
    "3-b1": (3, 48, 1),
    "4-b24": (4, 2, 24),
}


SLOW = ("1-b1", "4", "3-b1", "4-b24")


@pytest.fixture(scope="module")
def ran(zygote, shared_work):
    """The folder of a run of thirty steps on a layout, with evaluations, made when it is first asked for."""

    def run(name):
        (nproc, accumulation, batch), out = LAYOUTS[name], shared_work / f"out{name}"
        if not out.exists():
            args = [
                f"--out_dir={out}",
                f"--gradient_accumulation_steps={accumulation}",
                f"--batch_size={batch}",
            ]
            zygote.train(
                [*args, "--eval_interval=10", f"--eval_iters={24 // batch or 1}"], shared_work, nproc
            )
        return out

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS if n != "1"]
)
def test_every_layout_has_the_curve_of_one_process(ran, name):
    one, other = ran("1"), ran(name)
    assert len(column(other, "loss")) == 30
    same(column(one, "loss"), column(other, "loss"), absolute=1e-5)
    same(column(one, "grad_norm"), column(other, "grad_norm"), relative=1e-4)
    if LAYOUTS[name][2] == 12:  # an evaluation's sequences are counted in batch_size
        for key in ("train_loss", "val_loss"):
            same(column(one, key), column(other, key), absolute=1e-5)
    a, b = (torch.load(o / "ckpt.pt", weights_only=True)["model"] for o in (one, other))
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-4, rtol=1e-3)


def test_training_learns(ran):
    losses = column(ran("1"), "loss")
    assert losses[29] < losses[0] - 0.5


def test_more_processes_than_sequences(zygote, shared_work):
    args = ["--gradient_accumulation_steps=1", "--batch_size=2", "--max_iters=9"]
    for nproc in (1, 3):
        run = zygote.train([*args, f"--out_dir=few{nproc}"], shared_work, nproc)
        said = "warning: 1 of 3 data-parallel ranks read only padding: a step reads 2 sequences"
        assert run.text().count(said) == run.text().count("warning:") == (nproc == 3)
    for key, tolerance in (("loss", dict(absolute=1e-5)), ("grad_norm", dict(relative=1e-4))):
        same(column(shared_work / "few1", key), column(shared_work / "few3", key), **tolerance)
