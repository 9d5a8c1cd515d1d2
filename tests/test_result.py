"""result.json, what records add up to over all launches, and the version of the code."""

import json
import math
import re
import shutil
import signal
import subprocess
from datetime import datetime

import pytest
import torch
from runs import REPO, column, records, start_faulty

from isogpt.lab.runs import read_run

COMPLETE = ["--out_dir=out", "--exact=True", "--max_iters=9", "--lr_decay_iters=9", "--eval_interval=5"]
TOKENS = 256  # of a step


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def speed_of(out, slow):
    """Tokens per second over the logged steps that are not `slow`, since they follow a start."""
    times = [ms for step, ms in column(out, "step_ms").items() if step not in slow]
    return pytest.approx(len(times) * TOKENS / sum(times) * 1e3)


def test_the_result_of_a_complete_run(zygote, work):
    """On two processes; then resumed when nothing is left to do, evaluated only, and replaced."""
    out = work / "out"
    # a byte a token
    (work / "data/tiny/meta.json").write_text(json.dumps({"val_bytes": 4000, "val_text": "0" * 64}))
    run = zygote.train(COMPLETE, work, nproc=2)
    result, losses = result_of(out), column(out, "val_loss")
    start = next(r for r in records(out) if r.get("event") == "start")
    expected = {
        "val_loss": losses[10],
        "best_val_loss": min(losses.values()),
        "best_step": min(losses, key=losses.get),
        "bits_per_byte": pytest.approx(losses[10] / math.log(2)),
        "steps": 10,
        "tokens": 10 * TOKENS,
        "tokens_per_s": speed_of(out, slow=(0, 1, 2)),
        "memory_gb": max(column(out, "memory_gb_max").values()),
        "weights": re.search(r"weights: SHA-256 (\w+) before step 10", run.text())[1],
        "exit_reason": "complete",
        "reason": "",
        **{name: start[name] for name in ("parameters", "commit", "changed")},
    }
    assert expected.items() <= result.items() and 0 < result["mfu"] < 1
    zygote.train([*COMPLETE, "--init_from=resume"], work)
    again = result_of(out)
    assert again == result | {"seconds": again["seconds"]}
    zygote.train([*COMPLETE, "--init_from=resume", "--eval_only"], work)
    assert result_of(out) == again
    zygote.train([*COMPLETE, "--max_iters=0"], work)
    shorter = result_of(out)
    assert shorter["tokens_per_s"] is None and shorter["steps"] == 1
    assert result_of(out / "previous_1") == again


def test_the_result_of_a_run_that_stops(zygote, work):
    """By a signal, by a kill, and at its end: speeds are those of all launches."""
    out, args = work / "out", ["--out_dir=out", "--max_iters=11"]
    run = start_faulty(zygote, args, work, WAIT=[4, 0])
    assert run.until(lambda text: "held by the test" in text)
    run.kill(sig=signal.SIGTERM)
    (work / "go").touch()
    run.wait(ok=False)
    first = result_of(out)
    expected = {"exit_reason": "preempted", "reason": "SIGTERM", "best_val_loss": column(out, "val_loss")[0]}
    assert first == first | expected | dict.fromkeys(("val_loss", "weights", "bits_per_byte"))
    steps = first["steps"]
    assert 5 <= steps < 7 and steps == max(column(out, "loss")) + 1
    (work / "go").unlink()
    run = start_faulty(zygote, [*args, "--init_from=resume"], work, WAIT=[steps + 1, 0])
    assert run.until(lambda text: "held by the test" in text)
    run.kill()
    run.wait(ok=False)
    assert not (out / "result.json").exists()
    zygote.train([*args, "--init_from=resume"], work)
    end = result_of(out)
    assert (end["exit_reason"], end["steps"]) == ("complete", 12)
    assert end["tokens_per_s"] == speed_of(out, slow=(0, 1, 2, steps, steps + 1, steps + 2))


def test_the_result_of_a_run_that_fails(zygote, work):
    """In float16, too, a loss that is not finite is no overflow of the gradient."""
    start_faulty(zygote, ["--dtype=float16", "--out_dir=out"], work, NAN=[3, 0]).wait(ok=False)
    result = result_of(work / "out")
    assert result["exit_reason"] == "failed" and result["reason"].startswith("step 3: not finite")
    assert result["tokens"] == 3 * TOKENS and result["val_loss"] is None
    assert "start again with" in result["reason"] and "--skip_steps=nan" in result["reason"]


def test_records_contain_the_tokens_and_the_seconds_of_all_launches(zygote, work):
    """Without a skipped step, and a pause; null after a checkpoint that does not say it."""
    args = ["--eval_interval=3", "--skip_steps=nan", "--out_dir=out"]
    start_faulty(zygote, [*args, "--max_iters=3"], work, NAN=[2, 0]).wait()
    zygote.train([*args, "--max_iters=4", "--init_from=resume"], work)
    found = [r for r in records(work / "out") if "event" not in r]
    assert [r["tokens"] // TOKENS for r in found if "step_ms" in r] == [1, 2, 3, 4], "after steps 0, 1, 3, 4"
    evaluated = {r["iter"]: r["tokens"] // TOKENS for r in found if "val_loss" in r}
    assert evaluated == {0: 0, 3: 2, 4: 3, 5: 4}
    first, *later = read_run(work / "out").evaluations
    per_token = [one["flops"] / one["tokens"] for one in later]
    assert first["flops"] == 0 and per_token == pytest.approx(per_token[:1] * 3), "of the same steps"
    seconds = [r["seconds"] for r in found]
    first, *_, last = (datetime.fromisoformat(r["time"]) for r in found)
    assert seconds == sorted(seconds) and seconds[-1] - seconds[0] < (last - first).total_seconds()

    state = torch.load(work / "out/ckpt.pt", weights_only=True)
    del state["isogpt"]  # as nanoGPT writes it
    (work / "old").mkdir()
    torch.save(state, work / "old/ckpt.pt")
    zygote.train(["--max_iters=6", "--out_dir=old", "--init_from=resume"], work)
    assert column(work / "old", "tokens") == {step: min(step + 1, 7) * TOKENS for step in (5, 6, 7)}
    assert {*column(work / "old", "seconds").values()} == {None}


def test_the_version_of_the_code(zygote, work):
    """A commit with an untracked file; a changed file, also in somebody else's repository; without git."""
    copy = work / "copy"

    def git(*args):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        run = subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True)
        return run.stdout.strip()

    def version(repo, **env):
        args = ["--max_iters=0", "--save_checkpoint=False", "--out_dir=out"]
        zygote.train(args, work, repo=repo, env=env)
        result = result_of(work / "out")
        return result["commit"], result["changed"]

    shutil.copytree(REPO / "isogpt", copy / "isogpt")
    for path in REPO.glob("*.py"):
        shutil.copy(path, copy)
    git("init")
    git("add", "train.py")
    git("commit", "-m", "a", "--no-verify")
    commit = git("rev-parse", "HEAD")
    assert version(copy) == (commit, False)
    with (copy / "train.py").open("a") as file:
        file.write("# an edit")
    assert version(copy) == (commit, True)
    assert version(copy, GIT_TEST_ASSUME_DIFFERENT_OWNER="1") == (commit, True)
    assert version(REPO, PATH="") == ("", False)
