"""Nothing is lost: a run that was killed and resumed ends bit for bit as an uninterrupted run does."""

import os
import random
import re
import shutil

import pytest
import torch
from runs import TINY, assert_same_run, column, records

DROPOUT = ["--dropout=0.1", "--max_iters=19", "--save_interval=4"]
DROPOUT += ["--gradient_accumulation_steps=4", "--batch_size=3"]


def final(path):
    """The state in a run's newest ckpt.pt, or in this file."""
    return torch.load(path / "ckpt.pt" if path.is_dir() else path, weights_only=True)


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_twice_and_resumed_has_the_same_bits(zygote, work, nproc):
    straight = zygote.train([*DROPOUT, "--out_dir=straight"], work, nproc)
    assert "warning" not in straight.text().lower()
    rng = random.Random(nproc)
    args = [*TINY, *DROPOUT, "--out_dir=killed", "--init_from=auto"]
    for step in (rng.randint(4, 8), rng.randint(9, 16)):
        run = zygote.start(args, work, nproc)
        assert run.until(lambda text, step=step: f"iter {step}:" in text), run.text()
        run.until(lambda text: any((work / "killed").glob("step_*")))  # it may take some steps
        run.kill()
        run.wait(ok=False)
    zygote.start(args, work, nproc).wait()
    assert_same_run(work / "killed", work / "straight")
    steps = [r["iter"] for r in records(work / "killed") if "loss" in r and "event" not in r]
    assert steps == list(range(20)), "each step appears once in metrics.jsonl"
    assert [r["event"] for r in records(work / "killed") if "event" in r].count("resume") == 2


def test_a_resume_that_reads_other_sequences_says_so(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=3", "--data_order=shuffle"], work)
    more = ["--init_from=resume", "--max_iters=4", "--gradient_accumulation_steps=1", "--seed=7"]
    more += ["--n_layer=4", "--bias=True"]
    text = zygote.train(["--out_dir=out", "--data_order=shuffle", *more], work).text()
    assert "note:    n_layer 2, bias False of the checkpoint are used, not n_layer 4, bias True\n" in text
    changes = "sequences per step 4 (was 8), seed 7 (was 1337): the loss curve changes\n"
    assert f"note:    this run continues with {changes}" in text and text.count("note:") == 4
    assert "note:    the best val loss so far," in text and "note:    the run ends at step 4" in text
    assert final(work / "out")["isogpt"]["position"] == (4 * 8 + 4) * 32


def test_save_checkpoint_false_writes_none(zygote, work):
    """The log and the plot are written, also if the command is repeated."""
    args = ["--out_dir=out", "--save_interval=2", "--eval_interval=4", "--save_checkpoint=False"]
    for _ in range(2):
        zygote.train([*args, "--max_iters=5"], work)
        assert len(column(work / "out", "loss")) == 6 and (work / "out" / "loss.png").exists()
        assert set(column(work / "out", "val_loss")) == {0, 4, 6}, "the last one is of the final state"
        assert not [*(work / "out").rglob("*.pt"), *(work / "out").glob("*step_*")]


def steps_saved(out):
    return sorted(int(p.name[5:]) for p in out.glob("step_*"))


def test_resume_from_a_chosen_step(zygote, work):
    """
    Later checkpoints are renamed and not read, since there may be terabytes. The curve from there on is the
    same, bit for bit.
    """
    args = ["--dropout=0.1", "--save_interval=2", "--keep_last=0"]
    zygote.train([*args, "--out_dir=straight", "--max_iters=7"], work)
    out = work / "out"
    shutil.copytree(work / "straight", out, symlinks=True)
    for number, last in enumerate((4, 7)):
        for newer in [folder for folder in out.glob("step_*") if folder.name > "step_00000002"]:
            (newer / "ckpt.pt").unlink()
            os.mkfifo(newer / "ckpt.pt")  # cannot be read
        chosen = ["--init_from=resume:2", f"--max_iters={last}"]
        run = zygote.train([*args, "--out_dir=out", *chosen], work)
        assert "step_00000002/ckpt.pt, step 2" in run.text() and "iter 2: loss" in run.text()
        steps = [r["iter"] for r in records(out) if "loss" in r and "event" not in r]
        assert steps == list(range(last + 1)), "each step counts once"
        names = ["00000004", "00000006", "00000008"] + ["00000004_1", "00000005"] * number
        assert {p.name for p in out.glob("*abandoned*")} == {f"abandoned_step_{name}" for name in names}
    assert steps_saved(out) == [2, 4, 6, 8]
    assert_same_run(out, work / "straight")


def test_a_new_run_from_the_weights_of_a_different_run(zygote, work):
    """
    Step 0, a new optimizer, a new log: as after a resume at step 0 with these weights and no optimizer state.
    """
    zygote.train(["--out_dir=source", "--max_iters=9", "--learning_rate=1e-2"], work)
    lacking = ("optimizer", "isogpt", "best_val_loss")
    state = {name: value for name, value in final(work / "source").items() if name not in lacking}
    (work / "reference").mkdir()
    torch.save(state | {"iter_num": 0}, work / "reference/ckpt.pt")
    args = ["--max_iters=6", "--block_size=16", "--dropout=0.1", "--seed=7"]
    zygote.train([*args, "--init_from=resume", "--out_dir=reference"], work, 2)
    run = zygote.train([*args, "--init_from=source", "--out_dir=new"], work, 2)
    assert "from source/step_00000010/ckpt.pt, step 10" in run.text()
    assert_same_run(work / "new", work / "reference")
    assert {v["step"].item() for v in final(work / "new")["optimizer"]["state"].values()} == {7}
    # a file: a copy of the ckpt.pt alone
    shutil.copyfile(work / "source/ckpt.pt", work / "weights.pt")
    run = zygote.train([*args, "--init_from=weights.pt", "--out_dir=of_file", "--max_iters=1"], work, 2)
    assert "from weights.pt, step 10" in run.text()
    assert column(work / "of_file", "loss")[0] == column(work / "reference", "loss")[0]
    # the weights are used once
    run = zygote.train([*args, "--init_from=auto:source", "--out_dir=new", "--max_iters=8"], work, 2)
    assert "from new/step_00000007/ckpt.pt, step 7" in run.text()
    # in the folder of the other run itself, that run is moved aside
    zygote.train([*args, "--init_from=source", "--out_dir=source"], work, 2)
    assert column(work / "source", "loss") == column(work / "reference", "loss")
    assert (work / "source/previous_1/step_00000010/ckpt.pt").exists()


def test_the_best_checkpoint_stays_the_best_until_evaluations_measure_something_else(zygote, work):
    out, args = work / "out", ["--out_dir=out", "--eval_interval=5", "--save_interval=4", "--keep_last=2"]
    zygote.train([*args, "--max_iters=12"], work)
    ruin = ["--init_from=resume", "--learning_rate=0.5", "--min_lr=0.5", "--warmup_iters=0"]
    run = zygote.train([*args, *ruin, "--max_iters=20"], work)
    losses = column(out, "val_loss")
    assert steps_saved(out) == [13, 20, 21] and losses[13] < min(losses[15], losses[20], losses[21])
    assert f"best val loss {losses[13]:.4f} at step 13" in run.text()
    linked = [(out / name).resolve().parent.name for name in ("ckpt_best.pt", "ckpt.pt")]
    assert linked == ["step_00000013", "step_00000021"]
    assert not [*out.glob("*unfinished*"), *out.glob("*.tmp")]
    run_of_best = zygote.train(["--init_from=out", "--out_dir=new", "--max_iters=1"], work)
    assert "from out/step_00000013/ckpt.pt, step 13" in run_of_best.text()
    # the micro-batch and the number of processes change nothing
    smaller = ["--batch_size=2", "--eval_iters=4", "--gradient_accumulation_steps=4"]
    run = zygote.train([*args, *ruin, "--max_iters=21", *smaller], work, 2)
    assert "note:" not in run.text() and steps_saved(out) == [13, 21, 22]
    # more sequences: a worse loss is the best of those that are comparable
    run = zygote.train([*args, *ruin, "--max_iters=22", "--eval_iters=3"], work)
    assert "evaluations measure something different: eval_iters * batch_size is 12, not 8\n" in run.text()
    assert steps_saved(out) == [22, 23] and column(out, "val_loss")[23] > losses[13]


def test_tensorboard_has_each_step_once(zygote, work):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = ["--tensorboard_log=True", "--out_dir=out", "--save_interval=5", "--keep_last=0"]
    zygote.train([*args, "--max_iters=12"], work, nproc=2)
    zygote.train([*args, "--init_from=resume:5", "--max_iters=17"], work)
    events = EventAccumulator(str(work / "out" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(18))
    for name, key in (("loss", "loss"), ("val/loss", "val_loss")):
        logged = column(work / "out", key)
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(logged, rel=1e-6)
    assert {"lr", "mfu", "train/loss", "grad_norm"} <= set(events.Tags()["scalars"])
    # the last evaluation of a run that had come to its end
    zygote.train([*args, "--init_from=resume", "--max_iters=20"], work)
    assert [e.step for e in events.Reload().Scalars("val/loss")] == [0, 18, 21]


def test_the_last_multiple_and_the_state_after_the_last_step_are_both_evaluated_and_saved(zygote, work):
    """
    max_iters + 1 steps are trained, so step max_iters may be a multiple of eval_interval, as in nanoGPT's
    configs. nanoGPT evaluates at multiples only. A state that is both is evaluated once.
    """
    for last, expected in ((4, [0, 2, 4, 5]), (5, [0, 2, 4, 6])):
        out = work / f"out{last}"
        args = [f"--max_iters={last}", "--eval_interval=2", "--keep_last=0", f"--out_dir={out.name}"]
        text = zygote.train(args, work).text()
        assert [r["iter"] for r in records(out) if "val_loss" in r and "event" not in r] == expected
        assert len(re.findall(r"^step \d+: train loss", text, re.M)) == len(expected)
        assert steps_saved(out) == [step for step in expected if step > 0], "the initial state is not saved"


def test_no_checkpoint_has_weights_that_are_not_finite(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=4"], work)
    args = ["--out_dir=out", "--init_from=resume", "--warmup_iters=0", "--save_interval=1", "--grad_clip=0"]
    args += ["--max_iters=30", "--keep_last=100"]
    # with the first rate, weights are not finite after a finite step; with the second, a step is not finite
    for rate, said in (("1e39", "weights are not finite at step 6"), ("1e30", "not finite on rank")):
        run = zygote.train([*args, f"--learning_rate={rate}", f"--min_lr={rate}"], work, nproc=2, ok=False)
        assert set(run.codes) == {1} and run.text().count("error:") == 1 and said in run.text(), run.text()
    for path in (work / "out").glob("step_*/ckpt.pt"):
        assert all(w.isfinite().all() for w in torch.load(path, weights_only=True)["model"].values()), path


@pytest.mark.slow
def test_float16_scaler_is_saved_and_restored(zygote, work):
    args = ["--dtype=float16", "--save_interval=5", "--max_iters=11", "--keep_last=0"]
    zygote.train([*args, "--out_dir=straight"], work)
    shutil.copytree(work / "straight", work / "out", symlinks=True)
    chosen = ["--dtype=auto", "--out_dir=out", "--init_from=resume:5"]
    run = zygote.train([*args, *chosen], work)
    assert "float16" in run.text(), "on a resume, dtype auto is the dtype of the run"
    assert_same_run(work / "out", work / "straight")
    for path, steps in ((work / "out/step_00000005", 5), (work / "out", 12)):
        assert final(path)["isogpt"]["scaler"]["_growth_tracker"] == steps


def test_eval_only_and_a_finished_run(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=4"], work)
    before = (work / "out" / "metrics.jsonl").read_text()
    resume = ["--out_dir=out", "--init_from=resume", "--max_iters=4"]
    run = zygote.train([*resume, "--eval_only=True"], work, nproc=2)
    assert "step 5: train loss" in run.text() and (work / "out" / "metrics.jsonl").read_text() == before
    assert "--max_iters=" in zygote.train(resume, work).text()
