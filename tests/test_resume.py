"""Nothing is lost: a run that was killed and resumed ends bit for bit as an uninterrupted run does."""

import json
import random
import re
import shutil
import time

import pytest
import torch
from runs import TINY, column, records, same

import export
from isogpt.checkpoint.manifest import damage, read_manifest, val_loss_of
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.search import best_checkpoint, newest_checkpoint
from isogpt.monitor.log import Logger
from isogpt.monitor.sink_metrics import MetricsFile

DROPOUT = ["--dropout=0.1", "--max_iters=19", "--save_interval=4"]
DROPOUT += ["--gradient_accumulation_steps=4", "--batch_size=3"]


def final(path):
    """The state in a run's newest ckpt.pt, or in this file."""
    return torch.load(path / "ckpt.pt" if path.is_dir() else path, weights_only=True)


def assert_same_bits(a, b):
    """Two checkpoints' weights and optimizer state are equal, bit for bit."""
    assert a["iter_num"] == b["iter_num"]
    assert a["model"].keys() == b["model"].keys()
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    for i, moments in a["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, b["optimizer"]["state"][i][name]), (i, name)


def start_until_step(zygote, work, args, nproc, step):
    run = zygote.start(args, work, nproc)
    assert run.until(lambda text: any(int(n) >= step for n in re.findall(r"iter (\d+):", text))), run.text()
    return run


@pytest.mark.parametrize("nproc", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_killed_twice_and_resumed_has_the_same_bits(zygote, work, nproc):
    zygote.train([*DROPOUT, "--out_dir=straight"], work, nproc)
    rng = random.Random(nproc)
    args = [*TINY, *DROPOUT, "--out_dir=killed", "--init_from=auto"]
    for step in (rng.randint(4, 8), rng.randint(9, 16)):
        run = start_until_step(zygote, work, args, nproc, step)
        # on a busy machine a checkpoint takes some steps
        run.until(lambda text: any((work / "killed").glob("step_*")))
        time.sleep(rng.random() * 0.01)  # during the next step: its micro-steps, its update or a checkpoint
        run.kill()
        run.wait(ok=False)
    zygote.start(args, work, nproc).wait()
    assert_same_bits(final(work / "straight"), final(work / "killed"))
    assert column(work / "straight", "loss") == column(work / "killed", "loss")
    steps = [r["iter"] for r in records(work / "killed") if "loss" in r and "event" not in r]
    assert steps == list(range(20)), "each step appears once in metrics.jsonl"
    assert [r["event"] for r in records(work / "killed") if "event" in r].count("resume") == 2


def test_a_resume_that_reads_other_sequences_says_so(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=3", "--data_order=shuffle"], work)
    more = ["--init_from=resume", "--max_iters=4", "--gradient_accumulation_steps=1", "--seed=7"]
    text = zygote.train(["--out_dir=out", "--data_order=shuffle", *more], work).text()
    changes = "sequences per step 4 (was 8), seed 7 (was 1337): the loss curve changes\n"
    assert f"note:    this run continues with {changes}" in text and text.count("note:") == 3
    assert "note:    the best val loss so far," in text and "note:    the run ends at step 4" in text
    assert final(work / "out")["isogpt"]["position"] == (4 * 8 + 4) * 32


def test_the_last_and_the_best_checkpoints_are_kept(zygote, work):
    args = ["--max_iters=9", "--save_interval=3", "--eval_interval=5", "--keep_last=2"]
    zygote.train([*args, "--out_dir=out"], work)
    evals = column(work / "out", "val_loss")
    best = min((s for s in evals if s), key=evals.get)
    folders = sorted(int(p.name[5:]) for p in (work / "out").glob("step_*"))
    assert folders == sorted({best, 9, 10})
    assert (work / "out" / "ckpt.pt").resolve().parent.name == "step_00000010"
    assert (work / "out" / "ckpt_best.pt").resolve().parent.name == f"step_{best:08d}"
    assert not list((work / "out").glob("*unfinished*")) and not list((work / "out").glob("*.tmp"))
    assert (work / "out" / "loss.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("flags", [[], ["--zero=3"]], ids=["ckpt.pt", "shards"])
def test_save_checkpoint_false_writes_none(zygote, work, flags):
    """The log and the plot are written, also if the command is repeated."""
    args = ["--out_dir=out", "--save_interval=2", "--eval_interval=4", "--save_checkpoint=False", *flags]
    for _ in range(2):
        zygote.train([*args, "--max_iters=5"], work)
        assert len(column(work / "out", "loss")) == 6
        assert set(column(work / "out", "val_loss")) == {0, 4, 6}, "the last one is of the final state"
        assert (work / "out" / "loss.png").exists()
        assert not [r for r in records(work / "out") if r.get("event") in ("save", "save_failed")]
        assert not list((work / "out").rglob("*.pt")) and not list((work / "out").glob("*step_*"))


def steps_saved(out):
    return sorted(int(p.name[5:]) for p in out.glob("step_*"))


def test_resume_from_a_chosen_step(zygote, work):
    """
    Later checkpoints are renamed, the log is cut back, and the curve from there on is the same, bit for bit.
    """
    args = ["--dropout=0.1", "--save_interval=2", "--keep_last=0"]
    zygote.train([*args, "--out_dir=straight", "--max_iters=7"], work)
    out = work / "out"
    shutil.copytree(work / "straight", out, symlinks=True)
    for number, last in enumerate((4, 7)):
        chosen = ["--init_from=resume", "--resume_step=2", f"--max_iters={last}"]
        run = zygote.train([*args, "--out_dir=out", *chosen], work)
        assert "step_00000002/ckpt.pt, step 2" in run.text() and "iter 2: loss" in run.text()
        steps = [r["iter"] for r in records(out) if "loss" in r and "event" not in r]
        assert steps == list(range(last + 1)), "the log is cut back: each step appears once"
        names = ["00000004", "00000006", "00000008"] + ["00000004_1", "00000005"] * number
        assert {p.name for p in out.glob("*abandoned*")} == {f"abandoned_step_{name}" for name in names}
    assert steps_saved(out) == [2, 4, 6, 8]
    assert column(out, "loss") == column(work / "straight", "loss")
    assert_same_bits(final(work / "straight"), final(out))
    assert_same_bits(final(work / "straight"), final(out / "abandoned_step_00000008"))
    for folder in ("step_00000002", "step_00000008"):
        assert not damage(out / folder)
    found, reports = newest_checkpoint(str(out))
    assert found.step == 8 and not reports, "abandoned checkpoints do not count"


def test_an_exported_file_of_abandoned_steps_is_not_resumed(zygote, work):
    """
    The next resume does not use a ckpt.pt that export.py wrote from shards of a later step than the chosen
    one.
    """
    args, out = ["--out_dir=out", "--zero=3", "--save_interval=2", "--keep_last=0"], work / "out"
    zygote.train([*args, "--max_iters=5"], work)
    export.convert(str(out), "ckpt.pt")
    zygote.train([*args, "--init_from=resume", "--resume_step=2", "--max_iters=3"], work)
    assert final(work / "out/abandoned_ckpt.pt")["iter_num"] == 6 and not (out / "ckpt.pt").exists()
    run = zygote.train([*args, "--init_from=resume", "--max_iters=4"], work)
    assert "from out/step_00000004, step 4" in run.text() and "iter 4: loss" in run.text()
    # nor is a file of nanoGPT lost, for which a link is put
    state = {k: v for k, v in final(out / "abandoned_ckpt.pt").items() if k != "isogpt"} | {"iter_num": 3}
    torch.save(state, out / "ckpt.pt")
    zygote.train(["--out_dir=out", "--init_from=resume", "--resume_step=4", "--max_iters=4"], work)
    assert final(out / "abandoned_ckpt.pt_1")["iter_num"] == 3 and final(out)["iter_num"] == 5


def fresh_run(out, folder):
    """
    A folder to resume from at step 0 with the weights of `out` and without optimizer state: a reference for
    --init_from=FOLDER.
    """
    state = {k: v for k, v in final(out).items() if k not in ("optimizer", "isogpt", "best_val_loss")}
    folder.mkdir()
    torch.save({**state, "iter_num": 0}, folder / "ckpt.pt")


def files_in(folder):
    return {str(p.relative_to(folder)): p.lstat().st_mtime_ns for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_new_run_from_the_weights_of_a_different_run(zygote, work, nproc):
    """Step 0, a new optimizer, a new log; the folder of the other run does not change."""
    zygote.train(["--out_dir=source", "--max_iters=9", "--learning_rate=1e-2"], work)
    before = files_in(work / "source")
    fresh_run(work / "source", work / "reference")
    args = ["--max_iters=6", "--block_size=16", "--dropout=0.1", "--seed=7"]
    zygote.train([*args, "--init_from=resume", "--out_dir=reference"], work, nproc)
    run = zygote.train([*args, "--init_from=source", "--out_dir=new"], work, nproc)
    assert "from source/step_00000010/ckpt.pt, step 10" in run.text()
    assert column(work / "new", "loss") == column(work / "reference", "loss")
    assert (
        column(work / "new", "lr") == column(work / "reference", "lr")
        and len(column(work / "new", "loss")) == 7
    )
    assert_same_bits(final(work / "reference"), final(work / "new"))
    assert {v["step"].item() for v in final(work / "new")["optimizer"]["state"].values()} == {7}
    assert next(r for r in records(work / "new") if "event" in r)["event"] == "start"
    assert files_in(work / "source") == before
    # a file: a copy of the ckpt.pt alone
    (work / "weights.pt").write_bytes((work / "source/ckpt.pt").read_bytes())
    run = zygote.train([*args, "--init_from=weights.pt", "--out_dir=of_file", "--max_iters=1"], work, nproc)
    assert "from weights.pt, step 10" in run.text()
    assert column(work / "of_file", "loss")[0] == column(work / "reference", "loss")[0]
    # auto: uses the weights once and resumes after that
    run = zygote.train([*args, "--init_from=auto:source", "--out_dir=new", "--max_iters=8"], work, nproc)
    assert "from new/step_00000007/ckpt.pt, step 7" in run.text()
    assert sorted(column(work / "new", "loss")) == list(range(9))
    # in the folder of the other run itself, that run is moved aside
    zygote.train([*args, "--init_from=source", "--out_dir=source"], work, nproc)
    assert column(work / "source", "loss") == column(work / "reference", "loss")
    assert (work / "source/previous_1/step_00000010/ckpt.pt").exists()


def test_a_new_run_takes_the_best_weights(zygote, work):
    args = ["--out_dir=source", "--eval_interval=5", "--keep_last=1"]
    zygote.train([*args, "--max_iters=10"], work)
    ruin = ["--init_from=resume", "--learning_rate=0.5", "--min_lr=0.5", "--warmup_iters=0"]
    zygote.train([*args, *ruin, "--max_iters=16"], work)
    evals = column(work / "source", "val_loss")
    assert set(evals) == {0, 5, 10, 11, 15, 17}, "the evaluation at the end of the first run stays in the log"
    assert evals[11] == min(evals.values()), "the test needs a checkpoint that is better than the newest"
    run = zygote.train(["--init_from=source", "--out_dir=new", "--max_iters=1"], work)
    assert "from source/step_00000011/ckpt.pt, step 11" in run.text()


def as_nanogpt(out, **changes):
    """Leave in the folder what nanoGPT would: its ckpt.pt and nothing else. Returns the state."""
    state = {k: v for k, v in final(out).items() if k != "isogpt"}
    ours = ("seed", "save_interval", "keep_last")
    state["config"] = {k: v for k, v in state["config"].items() if k not in ours}
    state |= {"best_val_loss": torch.tensor(state["best_val_loss"])} | changes
    shutil.rmtree(out)
    out.mkdir()
    torch.save(state, out / "ckpt.pt")
    return state


def test_nanogpts_best_checkpoint_stays_the_best_until_evaluations_measure_something_else(zygote, work):
    out, args = work / "out", ["--out_dir=out", "--eval_interval=5", "--keep_last=1"]
    zygote.train([*args, "--max_iters=12"], work)
    losses = column(out, "val_loss")
    assert set(losses) == {0, 5, 10, 13} and losses[13] == min(losses.values()), (
        "the final state is the best one"
    )
    assert best_checkpoint(str(out))[0].val_loss == losses[13] == final(out)["best_val_loss"]
    as_nanogpt(out, config=final(out)["config"] | {"eval_interval": 13})  # nanoGPT saves where it evaluates

    ruin = ["--init_from=resume", "--learning_rate=0.5", "--min_lr=0.5", "--warmup_iters=0"]
    run = zygote.train([*args, *ruin, "--max_iters=20"], work)
    losses = column(out, "val_loss") | {13: losses[13]}
    assert steps_saved(out) == [13, 21] and losses[13] < min(losses[15], losses[20], losses[21])
    assert f"best val loss {losses[13]:.4f} at step 13" in run.text()
    (note,) = re.findall(r"note: +(.*)", run.text())
    assert note.startswith("this run continues with learning_rate 0.5 (was 0.001), warmup_iters 0 (was 10)")
    assert (out / "ckpt_best.pt").resolve().parent.name == "step_00000013"
    assert best_checkpoint(str(out))[0].val_loss == pytest.approx(losses[13])
    sample = ["--out_dir=out", "--num_samples=1", "--max_new_tokens=2", "--device=cpu", "--dtype=float32"]
    texts = [
        zygote.start([*sample, *more], work, script="sample.py").wait().text()
        for more in ([], ["--best=False"])
    ]
    assert f"step_00000013/ckpt.pt: step 13, val loss {losses[13]:.4f}\n" in texts[0]
    assert f"step_00000021/ckpt.pt: step 21, val loss {losses[21]:.4f}\n" in texts[1]

    # the micro-batch and the number of processes change nothing
    smaller = ["--batch_size=2", "--eval_iters=4", "--gradient_accumulation_steps=4"]
    run = zygote.train([*args, *ruin, "--max_iters=21", *smaller], work, 2)
    assert "note:" not in run.text() and steps_saved(out) == [13, 22]
    # more sequences: a worse loss is the best of those that are comparable
    run = zygote.train([*args, *ruin, "--max_iters=22", "--eval_iters=3"], work)
    assert "evaluations measure something different: eval_iters * batch_size is 12, not 8\n" in run.text()
    assert "at step 23\n" in run.text() and steps_saved(out) == [23]
    assert best_checkpoint(str(out))[0].step == 23 > 13 and column(out, "val_loss")[23] > losses[13]


def test_tensorboard_has_each_step_once(zygote, work):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = ["--tensorboard_log=True", "--out_dir=out", "--save_interval=5", "--keep_last=0"]
    zygote.train([*args, "--max_iters=12"], work, nproc=2)
    zygote.train([*args, "--init_from=resume", "--resume_step=5", "--max_iters=17"], work)
    events = EventAccumulator(str(work / "out" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(18))
    for name, key in (("loss", "loss"), ("val/loss", "val_loss")):
        logged = column(work / "out", key)
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(logged, rel=1e-6)
    tags = set(events.Tags()["scalars"])
    assert {"lr", "mfu", "train/loss", "grad_norm"} <= tags and "iter" not in tags
    for name in tags:  # no number twice at a step with an evaluation
        steps = [e.step for e in events.Scalars(name)]
        assert len(steps) == len(set(steps)), name


def test_without_always_save_checkpoint_only_the_best_evaluation_saves(zygote, work):
    args = ["--out_dir=out", "--eval_interval=5", "--always_save_checkpoint=False", "--keep_last=99"]
    zygote.train([*args, "--max_iters=10"], work)
    ruin = ["--init_from=resume", "--learning_rate=0.5", "--min_lr=0.5", "--warmup_iters=0"]
    zygote.train([*args, *ruin, "--max_iters=22"], work)
    evals = column(work / "out", "val_loss")
    assert evals[5] > evals[10] < min(evals[15], evals[20]), "the test needs evaluations that are not better"
    assert sorted(int(p.name[5:]) for p in (work / "out").glob("step_*")) == [5, 10, 11, 23]


def test_a_checkpoint_that_was_not_evaluated_gets_its_loss_after_a_resume(zygote, work):
    """The state is not saved again, but its checkpoint can be the best one from then on."""
    args, out = ["--out_dir=out", "--save_interval=3", "--max_iters=5"], work / "out"
    zygote.train(args, work)
    shutil.rmtree(out / "step_00000006")
    assert val_loss_of(read_manifest(out / "step_00000003")) is None
    zygote.train([*args, "--eval_interval=3", "--init_from=resume"], work)
    assert val_loss_of(read_manifest(out / "step_00000003")) == column(out, "val_loss")[3]


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
        steps = [int(folder.name[5:]) for folder in out.glob("step_*")]
        assert sorted(steps) == [step for step in expected if step > 0], "the initial state is not saved"


def test_damaged_checkpoints_are_reported_and_skipped(zygote, work):
    """A flipped byte in any file, at many places; a truncated file; a missing one."""
    zygote.train(["--out_dir=out", "--max_iters=1"], work)
    step = work / "out" / "step_00000002"
    rng = random.Random(0)
    for name in ("ckpt.pt", "manifest.json"):
        good = (step / name).read_bytes()
        places = {0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(40))}
        for place in places:
            flipped = bytes([good[place] ^ (1 << rng.randrange(8))])
            (step / name).write_bytes(good[:place] + flipped + good[place + 1 :])
            assert damage(step), (name, place, good[max(0, place - 20) : place + 20])
        for cut in (0, 1, len(good) // 2, len(good) - 1):
            (step / name).write_bytes(good[:cut])
            assert damage(step), (name, cut)
        (step / name).unlink()
        assert damage(step)
        (step / name).write_bytes(good)
    assert not damage(step)


def test_no_checkpoint_has_weights_that_are_not_finite(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=4"], work)
    before = final(work / "out")
    args = ["--out_dir=out", "--init_from=resume", "--warmup_iters=0", "--save_interval=1", "--grad_clip=0"]
    args += ["--max_iters=30", "--keep_last=100"]
    # with the first rate, weights are not finite after a finite step; with the second, a step is not finite
    for rate, said in (("1e39", "weights are not finite at step 6"), ("1e30", "not finite on rank")):
        run = zygote.train([*args, f"--learning_rate={rate}", f"--min_lr={rate}"], work, nproc=2, ok=False)
        assert set(run.codes) == {1} and run.text().count("error:") == 1 and said in run.text(), run.text()
    for path in (work / "out").glob("step_*/ckpt.pt"):
        assert all(w.isfinite().all() for w in torch.load(path, weights_only=True)["model"].values()), path
    assert torch.equal(
        before["model"]["transformer.wte.weight"],
        torch.load(work / "out/step_00000005/ckpt.pt")["model"]["transformer.wte.weight"],
    )


@pytest.mark.slow
def test_float16_scaler_is_saved_and_restored(zygote, work):
    args = ["--dtype=float16", "--save_interval=5", "--max_iters=11"]
    zygote.train([*args, "--out_dir=straight"], work)
    zygote.train([*args, "--out_dir=out", "--max_iters=4"], work)
    scaler = final(work / "out")["isogpt"]["scaler"]
    assert scaler["_growth_tracker"] == 5
    run = zygote.train([*args, "--dtype=auto", "--out_dir=out", "--init_from=resume"], work)
    assert "float16" in run.text(), "on a resume, dtype auto is the dtype of the run"
    assert_same_bits(final(work / "straight"), final(work / "out"))
    assert final(work / "out")["isogpt"]["scaler"]["_growth_tracker"] == 12
    # while nothing overflows, other layouts take the same steps
    zygote.train([*args, "--batch_size=1", "--gradient_accumulation_steps=8", "--out_dir=other"], work, 2)
    assert final(work / "other")["isogpt"]["scaler"] == final(work / "straight")["isogpt"]["scaler"]
    same(column(work / "straight", "loss"), column(work / "other", "loss"), absolute=1e-3)


def test_eval_only_and_a_finished_run(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=4"], work)
    before = (work / "out" / "metrics.jsonl").read_text()
    run = zygote.train(
        ["--out_dir=out", "--init_from=resume", "--eval_only=True", "--max_iters=4"], work, nproc=2
    )
    assert "step 5: train loss" in run.text() and (work / "out" / "metrics.jsonl").read_text() == before
    run = zygote.train(["--out_dir=out", "--init_from=resume", "--max_iters=4"], work)
    assert "--max_iters=" in run.text()


@pytest.mark.slow
def test_kills_do_not_damage_checkpoints(zygote, work):
    """The short form of soak.py: the newest checkpoint is never older than the last complete one."""
    from soak import kill_around_saves

    report = kill_around_saves(zygote, work, kills=12, seed=3)
    assert report["kills"] == 12 and report["older"] == 0 and report["failed"] == 0


def test_a_torn_metrics_file_is_cut_back(tmp_path):
    lines = [{"iter": i, "loss": 1.0 * i} for i in range(8)] + [{"event": "save", "iter": 7}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in lines) + '{"iter": 8, "lo')
    config = {"out_dir": str(tmp_path), "max_iters": 9, "eval_interval": 1}
    metrics = MetricsFile(config, step=5)
    Logger(Progress(256, step=5), [metrics]).event("resume")
    metrics.file.close()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["iter"] for r in kept if "event" not in r] == [0, 1, 2, 3, 4]
    assert [r["event"] for r in kept if "event" in r] == ["save", "resume"]
