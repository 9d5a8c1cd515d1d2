"""Law 2, nothing lost: a killed run that is resumed ends in the very bits of the run that was never stopped."""

import json
import random
import shutil
import signal
import time

import pytest
import torch
from runs import column, records

DROPOUT = ["--dropout=0.1", "--max_iters=39", "--save_interval=7", "--gradient_accumulation_steps=4", "--batch_size=3"]


def final(out_dir):
    return torch.load(out_dir / "ckpt.pt", weights_only=True)


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
    assert run.until(lambda text: f"iter {step}:" in text), run.text()
    return run


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_killed_twice_and_resumed_has_the_same_bits(zygote, work, nproc):
    from runs import TINY

    zygote.train([*DROPOUT, "--out_dir=straight"], work, nproc)
    rng = random.Random(nproc)
    args = [*TINY, *DROPOUT, "--out_dir=killed", "--init_from=auto"]
    for step in (rng.randint(7, 15), rng.randint(16, 36)):
        run = start_until_step(zygote, work, args, nproc, step)
        time.sleep(rng.random() * 0.01)  # a moment inside the next step: among its micro-steps, its update, its save
        run.kill()
        run.wait(ok=False)
    zygote.start(args, work, nproc).wait()
    assert_same_bits(final(work / "straight"), final(work / "killed"))
    assert column(work / "straight", "loss") == column(work / "killed", "loss")
    steps = [r["iter"] for r in records(work / "killed") if "loss" in r and "event" not in r]
    assert steps == list(range(40)), "each step stands once in metrics.jsonl"
    assert [r["event"] for r in records(work / "killed") if "event" in r].count("resume") == 2


def test_dropout_masks_differ_by_step_and_rank(zygote, work):
    """Otherwise the test above could pass on masks that never change."""
    import launch

    masks = set()
    for step in range(3):
        for rank in range(2):
            launch.seed_step(1, step, rank)
            masks.add(tuple((torch.rand(64) < 0.5).tolist()))
    assert len(masks) == 6


def test_resume_on_other_layouts_goes_on_with_the_same_curve(zygote, work):
    args = ["--max_iters=29", "--save_interval=10"]
    zygote.train([*args, "--out_dir=straight"], work)
    zygote.train([*args, "--out_dir=a", "--max_iters=9"], work, 2)
    for layout, (nproc, more) in enumerate(
        [(1, []), (3, []), (2, ["--batch_size=1", "--gradient_accumulation_steps=8"])]
    ):
        shutil.copytree(work / "a", work / f"b{layout}", symlinks=True)
        zygote.train([*args, f"--out_dir=b{layout}", "--init_from=resume", *more], work, nproc)
        one, other = column(work / "straight", "loss"), column(work / f"b{layout}", "loss")
        assert all(abs(one[s] - other[s]) < 1e-5 for s in range(30)), layout


def test_save_keeps_the_last_and_the_best(zygote, work):
    zygote.train(["--out_dir=out", "--save_interval=3", "--eval_interval=8", "--keep_last=2"], work)
    evals = column(work / "out", "val_loss")
    best = min((s for s in evals if s), key=evals.get)
    folders = sorted(int(p.name[5:]) for p in (work / "out").glob("step_*"))
    assert folders == sorted({best, 27, 30})
    assert (work / "out" / "ckpt.pt").resolve().parent.name == "step_00000030"
    assert (work / "out" / "ckpt_best.pt").resolve().parent.name == f"step_{best:08d}"
    assert not list((work / "out").glob("*unfinished*")) and not list((work / "out").glob("*.tmp"))
    assert (work / "out" / "loss.png").read_bytes()[1:4] == b"PNG"


def test_always_save_checkpoint_false_saves_at_an_evaluation_only_where_it_is_best(zygote, work):
    args = ["--out_dir=out", "--eval_interval=5", "--always_save_checkpoint=False", "--keep_last=99"]
    zygote.train([*args, "--max_iters=10"], work)
    ruin = ["--init_from=resume", "--learning_rate=0.5", "--min_lr=0.5", "--warmup_iters=0"]
    zygote.train([*args, *ruin, "--max_iters=22"], work)
    evals = column(work / "out", "val_loss")
    assert evals[5] > evals[10] < min(evals[15], evals[20]), "the test needs evaluations that are no better"
    assert sorted(int(p.name[5:]) for p in (work / "out").glob("step_*")) == [5, 10, 11, 23]


def test_a_scratch_run_sets_an_earlier_one_aside(zygote, work):
    for seed in (1, 2):
        zygote.train(["--out_dir=out", "--max_iters=4", f"--seed={seed}"], work)
    assert (work / "out" / "previous_1" / "step_00000005" / "ckpt.pt").exists()
    assert final(work / "out")["config"]["seed"] == 2
    assert final(work / "out" / "previous_1")["config"]["seed"] == 1


def test_damaged_saves_are_reported_and_passed_over(zygote, work):
    """A flipped byte in any file, at many places; a cut file; a missing one."""
    import checkpoint

    zygote.train(["--out_dir=out", "--save_interval=10", "--keep_last=3", "--max_iters=20"], work)
    out, step = work / "out", work / "out" / "step_00000021"
    rng = random.Random(0)
    for name in ("ckpt.pt", "manifest.json"):
        good = (step / name).read_bytes()
        places = {0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(40))}
        for place in places:
            (step / name).write_bytes(good[:place] + bytes([good[place] ^ (1 << rng.randrange(8))]) + good[place + 1 :])
            problem = checkpoint.damage(step)
            assert problem, (name, place, good[max(0, place - 20) : place + 20])
        for cut in (0, 1, len(good) // 2, len(good) - 1):
            (step / name).write_bytes(good[:cut])
            assert checkpoint.damage(step), (name, cut)
        (step / name).unlink()
        assert checkpoint.damage(step)
        (step / name).write_bytes(good)
    assert not checkpoint.damage(step)

    data = (step / "ckpt.pt").read_bytes()
    (step / "ckpt.pt").write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    run = zygote.train(["--out_dir=out", "--init_from=resume", "--max_iters=22"], work)
    assert "step_00000021 is damaged" in run.text() and "step_00000020/ckpt.pt, step 20" in run.text()
    assert set(column(out, "loss")) == set(range(23))


def test_nothing_is_saved_from_weights_or_losses_that_are_not_finite(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=4"], work)
    before = final(work / "out")
    args = ["--out_dir=out", "--init_from=resume", "--learning_rate=1e30", "--min_lr=1e30", "--warmup_iters=0",
            "--save_interval=1", "--grad_clip=0", "--max_iters=30", "--keep_last=100"]  # fmt: skip
    run = zygote.train(args, work, nproc=2, ok=False)
    assert set(run.codes) == {1} and run.text().count("error:") == 1
    for path in (work / "out").glob("step_*/ckpt.pt"):
        assert all(w.isfinite().all() for w in torch.load(path, weights_only=True)["model"].values()), path
    assert torch.equal(before["model"]["transformer.wte.weight"],
                       torch.load(work / "out/step_00000005/ckpt.pt")["model"]["transformer.wte.weight"])  # fmt: skip


def test_float16_scaler_is_saved_and_restored(zygote, work):
    args = ["--dtype=float16", "--save_interval=5", "--max_iters=11"]
    zygote.train([*args, "--out_dir=straight"], work)
    zygote.train([*args, "--out_dir=out", "--max_iters=4"], work)
    scaler = final(work / "out")["isogpt"]["scaler"]
    assert scaler["_growth_tracker"] == 5
    run = zygote.train([*args, "--dtype=auto", "--out_dir=out", "--init_from=resume"], work)
    assert "float16" in run.text(), "dtype auto keeps on a resume what the run used"
    assert_same_bits(final(work / "straight"), final(work / "out"))
    assert final(work / "out")["isogpt"]["scaler"]["_growth_tracker"] == 12


def test_smaller_block_size_on_resume_crops_and_keeps_the_longer_saves(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=5"], work)
    zygote.train(["--out_dir=out", "--init_from=resume", "--block_size=16", "--max_iters=20", "--save_interval=3",
                  "--keep_last=1"], work)  # fmt: skip
    assert final(work / "out")["model"]["transformer.wpe.weight"].shape == (16, 32)
    kept = torch.load(work / "out/step_00000006/ckpt.pt", weights_only=True)
    assert kept["model"]["transformer.wpe.weight"].shape == (32, 32)
    assert len(list((work / "out").glob("step_*"))) == 2


def test_finished_run_and_eval_only(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=4"], work)
    before = (work / "out" / "metrics.jsonl").read_text()
    run = zygote.train(["--out_dir=out", "--init_from=resume", "--eval_only=True", "--max_iters=4"], work, nproc=2)
    assert "step 5: train loss" in run.text() and (work / "out" / "metrics.jsonl").read_text() == before
    run = zygote.train(["--out_dir=out", "--init_from=resume", "--max_iters=4"], work)
    assert "--max_iters=" in run.text()


def test_signals_do_not_tear_a_save(zygote, work):
    """The short form of soak.py: kills around saves; what is found is never older than the last completed save."""
    from soak import kill_around_saves

    report = kill_around_saves(zygote, work, kills=12, seed=3)
    assert report["kills"] == 12 and report["older"] == 0 and report["failed"] == 0


def test_metrics_of_a_torn_file(tmp_path):
    import metrics

    lines = [{"iter": i, "loss": 1.0 * i} for i in range(8)] + [{"event": "save", "iter": 7}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in lines) + '{"iter": 8, "lo')
    log = metrics.open_log(str(tmp_path), 5)
    log.event("resume", 5)
    log.close()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["iter"] for r in kept if "event" not in r] == [0, 1, 2, 3, 4]
    assert [r["event"] for r in kept if "event" in r] == ["save", "resume"]


def test_sigint_and_sigterm_leave_the_saves_whole(zygote, work):
    from runs import TINY

    import checkpoint

    for sig in (signal.SIGINT, signal.SIGTERM):
        args = [*TINY, "--out_dir=out", "--init_from=auto", "--save_interval=2", "--max_iters=100000"]
        run = zygote.start(args, work)
        run.until(lambda text: text.count("saved ") >= 3)
        run.kill(sig=sig)
        run.wait(ok=False)
        assert run.codes[0] != 0
        found, reports = checkpoint.newest(str(work / "out"))
        assert found and not reports


@pytest.mark.slow
def test_auto_starts_from_given_weights_the_first_time_and_resumes_after_that(zygote, work):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=32, vocab_size=65)
    transformers.GPT2LMHeadModel(config).save_pretrained(work / "weights")
    zygote.train(["--init_from=weights", "--out_dir=plain", "--max_iters=3"], work)
    args = ["--init_from=auto:weights", "--out_dir=out"]
    zygote.train([*args, "--max_iters=3"], work)
    assert column(work / "out", "loss") == column(work / "plain", "loss")
    assert "step_00000004/ckpt.pt, step 4" in zygote.train([*args, "--max_iters=5"], work).text()
    assert sorted(column(work / "out", "loss")) == list(range(6))
    assert "possible: scratch" in zygote.train(["--init_from=auto:nowhere"], work, ok=False).text()
