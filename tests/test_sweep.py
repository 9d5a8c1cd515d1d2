"""sweep.py: combinations, what is refused before anything starts, runs, kills, signals, two at once."""

import json
import os
import random
import signal
import sys
from contextlib import suppress

import pytest
import torch
from runs import (
    TINY,
    assert_same_run,
    children,
    records,
    script,
    script_that_fails,
    steps_in,
    tiny_data,
    train_defaults,
)

from isogpt.lab.combinations import folder_name, part_of_task, points_of, read_lists
from isogpt.lab.queue import SweptRun, make_slots
from isogpt.training.settings import check_training

FORKED = "tests/forked_sweep.py"
LISTS = ["--learning_rate=1e-3,3e-3", "--seed=1,2", "--out_dir=out"]
NAMES = [f"learning_rate={rate},seed={seed}" for rate in ("0.001", "0.003") for seed in (1, 2)]


# ------------------------------------------------------------------------------------------------------------
# combinations


def test_arguments_that_are_lists():
    """Values that contain commas are separated by semicolons; some settings are never lists."""
    others = ["config/x.py", "--dtype='x,y'", "--shares=2,1", "--alert_command=a; b,c", "--out_dir=a,b"]
    words = ["--seed=3", "--seed=1,2", "--dataset=a,b;c", *others]
    known = {word[2:].partition("=")[0]: None for word in words}
    assert read_lists(words, known) == ({"seed": ["1", "2"], "dataset": ["a,b", "c"]}, others)


def test_one_setting_at_a_time():
    points = points_of({"a": ["1", "2", "3"], "b": ["x", "y"], "seed": ["1", "2"]}, each=True)
    values = ["".join(point.values()) for point in points]
    assert values == ["1x1", "1x2", "2x1", "2x2", "3x1", "3x2", "1y1", "1y2"]


def test_folders_have_different_names_that_are_safe():
    assert folder_name({"learning_rate": 1e-3, "seed": 2}) == "learning_rate=0.001,seed=2"
    paths = ["/data/a", "_data/a", "_data_a", "data:a", "x" * 500, "x" * 499 + "y", "..", "a b"]
    names = {folder_name({"dataset": path}) for path in paths}
    assert len(names) == len(paths) and not any(set(name) & set("/: ") or len(name) > 200 for name in names)


def test_the_tasks_of_an_array_job_divide_the_runs():
    array = {"SLURM_ARRAY_TASK_MAX": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
    parts = [part_of_task([*range(7)], array | {"SLURM_ARRAY_TASK_ID": task}) for task in "012"]
    assert parts == [[0, 3, 6], [1, 4], [2, 5]] and part_of_task([5, 6], {}) == [5, 6]
    with pytest.raises(ValueError, match="--array=0-3"):
        part_of_task([5, 6], array | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "3"})


@pytest.mark.skipif(sys.platform != "linux", reason="taskset is Linux's")
def test_runs_have_separate_cores_and_gpus(at):
    at.set(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6, 8})
    for jobs, shares in ((1, []), (2, ["0,2", "4,6"]), (9, ["0", "2", "4", "6", "8"])):
        assert make_slots(jobs, 1, "cpu") == ([["taskset", "-c", share] for share in shares] or [[]])
    at.set(torch.cuda, "is_available", lambda: True)
    at.set(torch.cuda, "device_count", lambda: 5)
    visible = "CUDA_VISIBLE_DEVICES"
    at.env(visible, "0,1,3,5,6")
    for jobs, groups in ((0, ["0,1", "3,5"]), (1, ["0,1"]), (3, ["0,1", "3,5"])):
        assert make_slots(jobs, 2, "auto") == [["env", f"{visible}={group}"] for group in groups]
    assert make_slots(0, 5, "cuda") == [[]] and make_slots(3, 1, "cuda:1") == [[]] * 3
    with pytest.raises(ValueError, match="set --nproc=5"):
        make_slots(0, 6, "auto")


# ------------------------------------------------------------------------------------------------------------
# before anything starts


COMPLETE = {"exit_reason": "complete", "val_loss": 1.5, "seconds": 60.0, "steps": 30}


def prepare_run(folder, steps, result=None, **settings):
    """The folder of a run that has taken so many steps, without weights."""
    (folder / f"step_{steps:08d}").mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps(settings))
    (folder / "result.json").write_text(json.dumps(result or {}))


@pytest.mark.parametrize(
    "args, message",
    [
        (["--seed=1"], "no setting has several values: type a list such as --seed=1,2,3"),
        (["--seed=3,x,2"], "--seed='x': not a whole number"),
        (["--seed=3,-1"], "seed is -1: it must be >= 0"),
        (["--n_head=2,3"], "n_embd is 32: it must be a multiple of n_head, 3"),
        (["--dataset=tiny;huge"], "no train.bin in data/huge"),
        (["--seed=7,1"], "out/seed=1 was trained with --n_embd=64: type them"),
        (["--seed=7,2"], "out/seed=2 was trained with unknown settings"),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(at, capsys, args, message):
    tiny_data(at.path)
    prepare_run(at.path / "out" / "seed=1", 10, seed=1, n_embd=64)
    prepare_run(at.path / "out" / "seed=2", 10)
    output = script_that_fails(at, capsys, "sweep.py", [*TINY, "--out_dir=out", *args])
    assert message in output.err and output.err.count("error:") == 1 and len([*at.path.glob("out/*")]) == 2


def test_a_dry_run_lists_states_and_times_and_writes_nothing(at, capsys):
    """The number of steps may follow from a budget."""
    tiny_data(at.path)
    args = ["--max_tokens=7680", "--init_from=scratch,.", "--seed=1,2", "--out_dir=out", "--dry_run"]
    names = [f"init_from={start},seed={seed}" for start in ("scratch", ".") for seed in (1, 2)]
    prepare_run(at.path / "out" / names[0], 30, COMPLETE, seed=1)
    prepare_run(at.path / "out" / names[1], 10, seed=2)
    (at.path / "out" / names[1] / "train.log").write_text("starts\nerror: x\n")
    before = sorted(at.path.rglob("*"))
    with pytest.raises(SystemExit):
        script(at, "sweep.py", [*TINY, *args])
    states = ["complete, val loss 1.5000", "at step 10, its last line: error: x", "new", "new"]
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [f"out/{name}: {state}" for name, state in zip(names, states, strict=True)]
    assert last == "runs: 4, in parallel: 1, time left: about 2:40" and sorted(at.path.rglob("*")) == before


@pytest.mark.skipif(sys.platform == "win32", reason="has neither")
def test_a_log_that_is_a_fifo_or_a_link_is_refused(tmp_path):
    run, other = SweptRun(tmp_path, [], {}), tmp_path / "other"
    os.mkfifo(tmp_path / "train.log")
    refused = "it is not a regular file: .*train.log"
    with pytest.raises(OSError, match=refused):
        _ = run.state
    other.touch()
    for make in (os.mkfifo, lambda log: log.symlink_to(other)):
        (tmp_path / "train.log").unlink()
        make(tmp_path / "train.log")
        with pytest.raises(OSError, match=refused):
            run.start(tmp_path / "train.py", [])
    assert other.read_text() == ""


def test_a_url_with_a_password_is_neither_stored_nor_printed(at):
    tiny_data(at.path)
    config = train_defaults(dataset="tiny", block_size=32, init_from="auto:memory://me:SECRET@run")
    run = SweptRun(at.path / "out", [], config)
    assert run.start(at.path / "missing.py", []) and run.process.wait() == 2
    run.log.close()
    assert "SECRET" not in (run.folder / "sweep.json").read_text()
    (run.folder / "step_00000001").mkdir()
    run.check()  # the same settings
    with pytest.raises(ValueError, match=" with --init_from=auto:memory://run: type them"):
        SweptRun(run.folder, [], config | {"init_from": "auto:memory://me:SECRET@other"}).check()
    with pytest.raises(ValueError, match="mirror is 's3://bucket', but needs save_checkpoint"):
        check_training(config | {"mirror": "s3://me:SECRET@bucket", "save_checkpoint": False})


# ------------------------------------------------------------------------------------------------------------
# runs


def events(folder):
    names = [record.get("event") for record in records(folder)]
    return [name for name in names if name in ("start", "resume", "preempted", "end")]


def test_runs_have_the_bits_of_train_py(zygote, trained, work):
    args = [*TINY, "--max_iters=9", *LISTS]
    first = zygote.start([*args, "--learning_rate=1e-3,1e30"], work, script=FORKED).wait(ok=False)
    assert first.codes == [1] and first.text().count("1e+30,seed=1: new, failed: step 1: not finite") == 2
    assert f"compare.py out/{NAMES[0]} out/{NAMES[1]}\n" in first.text()
    before = {path: path.stat().st_mtime_ns for name in NAMES[:2] for path in (work / "out" / name).glob("*")}
    again = zygote.start([*args, "--nproc=1"], work, script=FORKED).wait()
    assert f"end    out/{NAMES[3]}: complete, val loss" in again.text() and "runs left: 0, " in again.text()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert_same_run(trained(["--max_iters=9", "--learning_rate=3e-3", "--seed=2"]), work / "out" / NAMES[3])
    assert "done: 10 steps" in (work / "out" / NAMES[3] / "train.log").read_text()


@pytest.mark.slow
def test_a_sweep_continues_after_a_signal(zygote, work):
    args = [*TINY, "--max_iters=150", "--seed=1,2,3", "--out_dir=out"]
    folders = [work / "out" / f"seed={seed}" for seed in (1, 2, 3)]
    for number, folder in ((signal.SIGINT, folders[0]), (signal.SIGTERM, folders[1])):
        run = zygote.start(args, work, script=FORKED)
        run.until(lambda text, folder=folder: steps_in(folder) > 5)
        run.kill(sig=number)
        text = run.wait(ok=False).text()
        assert run.codes == [128 + number] and "repeat the command" in text, text
        assert f"preempted: {signal.Signals(number).name}; " in text
        assert events(folder)[-1] == "preempted" and not folders[2].exists()
    zygote.start(args, work, script=FORKED).wait()
    assert [(events(folder)[-1], steps_in(folder)) for folder in folders] == [("end", 150)] * 3


@pytest.mark.slow
def test_two_sweeps_at_once_divide_the_runs(zygote, work):
    """Without forks; two processes in each run."""
    args = [*TINY, "--max_iters=9", "--nproc=2", "--seed=1,2,3", "--out_dir=out"]
    both = [zygote.start(args, work, script="sweep.py") for _ in range(2)]
    text = "".join(run.wait(300).text() for run in both)
    for folder in ("out/seed=1", "out/seed=2", "out/seed=3"):
        assert events(work / folder) == ["start", "end"] and text.count(f"start  {folder}") == 1, text
        assert records(work / folder)[0]["world_size"] == 2


@pytest.mark.slow
def test_a_killed_sweep_has_the_bits_of_an_undisturbed_one(zygote, work):
    """Killed six times, twice with its runs."""
    args = [*TINY, "--dropout=0.1", "--eval_interval=20", "--save_interval=5", "--max_iters=39"]
    args += [*LISTS, "--jobs=2"]
    rng, straight, killed = random.Random(1), work / "straight", work / "killed"
    zygote.start([*args, f"--out_dir={straight}"], work, script=FORKED).wait(300)
    for kill, moment in enumerate(sorted(rng.randrange(4 * 40) for _ in range(6))):
        sweep = zygote.start([*args, f"--out_dir={killed}"], work, script=FORKED)
        # until its runs have logged so many steps
        sweep.until(lambda _, n=moment: sum(steps_in(run) + 1 for run in killed.glob("*")) >= n, 300)
        runs = children(sweep.pids[0]) if kill in (2, 4) and not sweep.poll() else []
        sweep.kill()
        for run in runs:
            with suppress(ProcessLookupError):
                os.kill(run, signal.SIGKILL)
        sweep.wait(ok=False)
    zygote.start([*args, f"--out_dir={killed}"], work, script=FORKED).wait(300)
    for name in NAMES:
        assert_same_run(killed / name, straight / name)
