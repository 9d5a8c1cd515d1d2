"""result.json, print_result, and the version of the code."""

import json
import math
import re
import signal
import subprocess
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from runs import REPO, column, records, start_faulty

from isogpt.monitor import code_version

LAUNCH = ["--exact=True", "--max_iters=9", "--lr_decay_iters=9", "--eval_interval=5", "--print_result=True"]


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def last_line(run):
    """The last line that rank 0 has printed."""
    return json.loads(open(run.outs[0]).read().splitlines()[-1])


def events(folder, name):
    return [r for r in records(folder) if r.get("event") == name]


def test_the_result_of_a_complete_run(zygote, work):
    """On two processes; then resumed when nothing is left to do, evaluated only, and replaced."""
    out = work / "out"
    # a byte a token
    (work / "data/tiny/meta.json").write_text(json.dumps({"val_bytes": 4000, "val_text": "0" * 64}))
    run = zygote.train([*LAUNCH, "--out_dir=out"], work, nproc=2)
    result = result_of(out)
    assert last_line(run) == result and not any(line.startswith("{") for line in open(run.outs[1]))
    losses, memory = column(out, "val_loss"), column(out, "memory_gb_max")
    assert result["val_loss"] == losses[10] and result["best_val_loss"] == min(losses.values())
    assert result["best_step"] == min(losses, key=losses.get)
    assert result["bits_per_byte"] == pytest.approx(losses[10] / math.log(2))
    assert (result["steps"], result["tokens"]) == (10, 2560) and result["memory_gb"] == max(memory.values())
    assert result["weights"] == re.search(r"weights: SHA-256 (\w+) before step 10", run.text())[1]
    step_ms, speeds = column(out, "step_ms"), column(out, "tokens_per_s")
    read = sum(speeds[i] * step_ms[i] for i in range(3, 10))
    assert result["tokens_per_s"] == pytest.approx(read / sum(step_ms[i] for i in range(3, 10)))
    assert result["seconds"] * 1e3 > sum(step_ms[i] for i in range(1, 10))
    assert (result["exit_reason"], result["reason"]) == ("complete", "")
    start = events(out, "start")[0]
    for name in ("parameters", "commit", "changed"):
        assert result[name] == start[name]
    if (REPO / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True)
        assert result["commit"] == head.stdout.strip()

    again = last_line(zygote.train([*LAUNCH, "--out_dir=out", "--init_from=resume"], work))
    assert again == result_of(out) == result | {"seconds": again["seconds"]}
    assert again["seconds"] >= max(column(out, "seconds").values())

    evaluated = zygote.train([*LAUNCH, "--out_dir=out", "--init_from=resume", "--eval_only"], work)
    assert last_line(evaluated)["val_loss"] == result["val_loss"] and result_of(out) == again

    shorter = last_line(zygote.train([*LAUNCH, "--out_dir=out", "--max_iters=0"], work))
    assert shorter["tokens_per_s"] is None and shorter["steps"] == 1 and shorter == result_of(out)
    assert result_of(out / "previous_1") == again


def test_the_result_of_a_run_that_stops(zygote, work):
    """By a signal, by a kill, and at its end: seconds and speeds are those of all launches."""
    out, args = work / "out", ["--max_iters=11", "--out_dir=out", "--print_result=True"]
    run = start_faulty(zygote, args, work, WAIT=[4, 0])
    assert run.until(lambda text: "held by the test" in text)
    run.kill(sig=signal.SIGTERM)
    (work / "go").touch()
    run.wait(ok=False)
    first = result_of(out)
    assert first == last_line(run) and (first["exit_reason"], first["reason"]) == ("preempted", "SIGTERM")
    assert first["val_loss"] is None and first["best_val_loss"] == column(out, "val_loss")[0]
    assert first["weights"] is None and first["bits_per_byte"] is None
    steps = first["steps"]
    assert 5 <= steps < 7 and steps == max(column(out, "loss")) + 1

    (work / "go").unlink()
    run = start_faulty(zygote, [*args, "--init_from=resume"], work, WAIT=[steps + 1, 0])
    assert run.until(lambda text: "held by the test" in text)
    assert not (out / "result.json").exists()
    run.kill()
    run.wait(ok=False)
    assert not (out / "result.json").exists()

    end = last_line(zygote.train([*args, "--init_from=resume"], work))
    assert end == result_of(out) and (end["exit_reason"], end["steps"]) == ("complete", 12)
    assert end["seconds"] >= first["seconds"] and len(column(out, "loss")) == 12
    step_ms, speeds = column(out, "step_ms"), column(out, "tokens_per_s")
    counted = [i for i in range(12) if i not in (0, 1, 2, steps, steps + 1, steps + 2)]  # slow after a start
    read = sum(speeds[i] * step_ms[i] for i in counted)
    assert end["tokens_per_s"] == pytest.approx(read / sum(step_ms[i] for i in counted))


def test_records_contain_the_tokens_and_the_seconds_of_all_launches(zygote, work):
    """Without a skipped step, a pause, and what was lost; null after a checkpoint that does not say it."""
    args = ["--eval_interval=3", "--on_nan=skip"]
    start_faulty(zygote, [*args, "--max_iters=3", "--out_dir=out"], work, NAN=[2, 0]).wait()
    zygote.train([*args, "--max_iters=4", "--out_dir=out", "--init_from=resume"], work)
    found = [r for r in records(work / "out") if "event" not in r]
    steps = [r["tokens"] for r in found if "step_ms" in r]
    assert steps == [256 * n for n in (1, 2, 3, 4)], "after steps 0, 1, 3 and 4"
    evaluated = [(r["iter"], r["tokens"]) for r in found if "val_loss" in r]
    assert evaluated == [(0, 0), (3, 512), (4, 768), (5, 1024)]
    seconds = [r["seconds"] for r in found]
    assert seconds == sorted(seconds) and seconds[0] > 0
    first, *_, last = (datetime.fromisoformat(r["time"]) for r in found)
    assert seconds[-1] - seconds[0] < (last - first).total_seconds(), "the time between the launches"

    state = torch.load(work / "out/ckpt.pt", weights_only=True)
    del state["isogpt"]  # as nanoGPT writes it
    (work / "old").mkdir()
    torch.save(state, work / "old/ckpt.pt")
    zygote.train(["--max_iters=6", "--out_dir=old", "--init_from=resume"], work)
    assert column(work / "old", "tokens") == {5: 6 * 256, 6: 7 * 256, 7: 7 * 256}
    assert {*column(work / "old", "seconds").values()} == {None}


def test_the_result_of_a_run_that_fails(zygote, work):
    run = start_faulty(zygote, ["--out_dir=out", "--print_result=True"], work, NAN=[3, 0]).wait(ok=False)
    result = result_of(work / "out")
    lines = [line for line in run.text().splitlines() if line.startswith("{")]
    assert [json.loads(line) for line in lines] == [result]
    assert result["exit_reason"] == "failed" and result["reason"].startswith("step 3: not finite")
    assert result["tokens"] == 3 * 256 and result["val_loss"] is None


def test_the_version_of_the_code(at):
    def version(is_main=True):
        at.set(code_version, "STATUS", ("git", "-C", str(at.path), "status"))
        return code_version.code_version(code_version.ask_git(SimpleNamespace(is_main=is_main)))

    def git(*args):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    unknown = {"commit": "", "changed": False}
    at.env("GIT_CEILING_DIRECTORIES", str(at.path.parent))
    assert version() == unknown
    git("init")
    assert version() == unknown
    (at.path / "train.py").write_text("a\n")
    git("add", "train.py")
    git("commit", "-m", "a", "--no-verify")
    (at.path / "untracked").write_text("")
    commit = git("rev-parse", "HEAD")
    assert version() == {"commit": commit, "changed": False} and version(is_main=False) == unknown
    (at.path / "train.py").write_text("b\n")
    assert version() == {"commit": commit, "changed": True}
    at.env("PATH", str(at.path))
    assert version() == unknown
