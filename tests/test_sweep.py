"""sweep.py: combinations, what is refused before anything starts, runs, kills, signals, two at once."""

import json
import os
import random
import signal
from contextlib import suppress

import pytest
import torch
from runs import (
    REPO,
    TINY,
    assert_same_run,
    children,
    column,
    records,
    script,
    script_that_fails,
    settings_of_train,
    steps_in,
    tiny_data,
    wait_for,
)

from isogpt.lab import queue
from isogpt.lab.combinations import folder_name, part_of_task, points_of, read_lists

FORKED = "tests/forked_sweep.py"
LISTS = ["--learning_rate=1e-3,3e-3", "--seed=1,2"]
NAMES = [f"learning_rate={rate},seed={seed}" for rate in ("0.001", "0.003") for seed in (1, 2)]


def events(folder):
    return [record["event"] for record in records(folder) if "event" in record]


# ------------------------------------------------------------------------------------------------------------
# combinations


def test_every_combination_or_one_setting_at_a_time():
    words = ["config/x.py", "--seed=3", "--seed=1,2", "--dtype=float32", "--learning_rate=1e-3,2e-3"]
    lists, others = read_lists(words, settings_of_train())
    assert lists == {"seed": ["1", "2"], "learning_rate": ["1e-3", "2e-3"]}
    assert others == ["config/x.py", "--dtype=float32"]
    pairs = [(point["seed"], point["learning_rate"]) for point in points_of(lists)]
    assert pairs == [("1", "1e-3"), ("1", "2e-3"), ("2", "1e-3"), ("2", "2e-3")]

    lists = {"a": ["1", "2", "3"], "b": ["x", "y"], "seed": ["1", "2"]}
    texts = ["".join(point.values()) for point in points_of(lists, each=True)]
    assert texts == ["1x1", "1x2", "2x1", "2x2", "3x1", "3x2", "1y1", "1y2"]
    assert points_of({"seed": ["1", "2"]}, each=True) == [{"seed": "1"}, {"seed": "2"}]


def test_values_that_contain_commas_are_separated_by_semicolons():
    words = ["--shares=2,1", "--dataset=a,b;c", "--alert_command=a; b,c", "--out_dir=a,b", "--dtype='x,y'"]
    lists, others = read_lists(words, settings_of_train())
    assert lists == {"dataset": ["a,b", "c"]} and others == [words[0], *words[2:]]


def test_folders_have_different_names_that_are_safe():
    assert folder_name({"learning_rate": 1e-3, "seed": 2}) == "learning_rate=0.001,seed=2"
    paths = ["/data/a", "_data/a", "_data_a", "data:a", "x" * 500, "x" * 499 + "y", "..", "a b"]
    names = [folder_name({"dataset": path}) for path in paths]
    assert len({*names}) == len(names) and not any(set(name) & set("/: ") for name in names)
    assert max(map(len, names)) < 200


def test_the_tasks_of_an_array_job_divide_the_runs():
    def part(count, **values):
        return [*part_of_task(count, {f"SLURM_ARRAY_TASK_{name}": str(n) for name, n in values.items()})]

    assert part(3) == [0, 1, 2]
    assert [part(7, ID=task, MAX=2, COUNT=3) for task in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    with pytest.raises(ValueError, match="--array=0-3"):
        part(4, ID=2, MAX=7, COUNT=3)


def test_runs_at_the_same_time_have_separate_cores_and_gpus(at):
    at.set(queue, "own_cores", lambda: [0, 2, 4, 6, 8])
    for jobs, shares in ((0, [[0, 2, 4, 6, 8]]), (2, [[0, 2], [4, 6]]), (9, [[0], [2], [4], [6], [8]])):
        assert [slot.cores for slot in queue.make_slots(jobs, 1, "cpu")] == shares
    at.set(queue, "pick_device", lambda *args: torch.device("cuda"))
    at.env("CUDA_VISIBLE_DEVICES", "0,1,3,5,6")
    for jobs, groups in ((0, ["0,1", "3,5"]), (1, ["0,1"]), (3, ["0,1", "3,5"])):
        assert [slot.gpus for slot in queue.make_slots(jobs, 2, "auto")] == groups
    assert queue.make_slots(3, 1, "cuda:1") == [queue.Slot()] * 3
    with pytest.raises(ValueError, match="set --nproc=5"):
        queue.make_slots(0, 6, "auto")


# ------------------------------------------------------------------------------------------------------------
# before anything starts


@pytest.mark.parametrize(
    "args, message",
    [
        (["--seed=1"], "no setting has several values: type a list such as --seed=1,2,3"),
        (["--seed=1,x,2"], "--seed='x': not a whole number"),
        (["--seed=1,-1"], "seed is -1: it must be >= 0"),
        (["--n_head=2,3"], "n_embd is 32: it must be a multiple of n_head, 3"),
        (["--dataset=tiny;huge"], "no train.bin in data/huge"),
        (["--seed=1,2", "--eval_only"], "eval_only and dry_run_ranks train nothing"),
        (["--seed=1,2", "--sead=3"], "--sead: no such setting; did you mean --seed?"),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(at, capsys, args, message):
    tiny_data(at.path)
    output = script_that_fails(at, capsys, "sweep.py", [*TINY, "--out_dir=out", *args])
    assert message in output.err and output.err.count("error:") == 1 and not (at.path / "out").exists()


def prepare_run(folder, steps, result=None, **settings):
    """The folder of a run that has taken so many steps, without weights."""
    (folder / f"step_{steps:08d}").mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps(settings))
    if result:
        (folder / "result.json").write_text(json.dumps(result | {"steps": steps}))


DONE = {"exit_reason": "complete", "val_loss": 1.5, "seconds": 60.0}


def test_a_dry_run_lists_states_and_times_and_writes_nothing(at, capsys):
    """The number of steps may follow from a budget."""
    tiny_data(at.path)
    budget = ["--max_tokens=7680", "--init_from=scratch,.", "--seed=1,2", "--out_dir=out", "--dry_run"]
    names = [
        "init_from=scratch,seed=1",
        "init_from=scratch,seed=2",
        "init_from=.,seed=1",
        "init_from=.,seed=2",
    ]
    prepare_run(at.path / "out" / names[0], 30, DONE, seed=1)
    prepare_run(at.path / "out" / names[1], 10, seed=2)
    before = sorted(at.path.rglob("*"))
    space = script(at, "sweep.py", [*TINY, *budget], until="    raise SystemExit\n")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"out/{names[0]}: complete, val loss 1.5000", f"out/{names[1]}: at step 10"]
    assert lines[2:] == [
        *(f"out/{name}: new" for name in names[2:]),
        "4 runs, 1 at the same time: about 2:40 left",
    ]
    assert sorted(at.path.rglob("*")) == before
    starts = [[word for word in run.arguments if word.startswith("--init_from=")] for run in space["runs"]]
    assert [start[-1] for start in starts] == ["--init_from=auto:scratch"] * 2 + ["--init_from=auto:."] * 2


def test_a_run_with_other_settings_is_not_continued(at, capsys):
    tiny_data(at.path)
    prepare_run(at.path / "out" / "seed=1", 10, seed=1, n_embd=64, weight_decay=0.1)
    prepare_run(at.path / "other" / "seed=1", 30, DONE)
    for out, text in (
        ("out", "--n_embd=64: type them, or a different --out_dir="),
        ("other", "unknown settings"),
    ):
        output = script_that_fails(at, capsys, "sweep.py", [*TINY, "--seed=1,2", f"--out_dir={out}"])
        assert f"{out}/seed=1 was trained with {text}" in output.err
        assert not (at.path / out / "seed=2").exists()


# ------------------------------------------------------------------------------------------------------------
# runs


def test_runs_have_the_bits_of_train_py_and_complete_ones_are_left_alone(zygote, work):
    args = [*TINY, "--max_iters=9", *LISTS, "--out_dir=out"]
    first = zygote.start([*args, "--learning_rate=1e-3,1e30"], work, script=FORKED).wait(ok=False)
    assert first.codes == [1], first.text()
    for seed in (1, 2):
        assert f"error: out/learning_rate=1e+30,seed={seed}: failed" in first.text(), first.text()
    assert f"would run {REPO / 'compare.py'} out/{NAMES[0]} out/{NAMES[1]}\n" in first.text()
    before = {path: path.stat().st_mtime_ns for name in NAMES[:2] for path in (work / "out" / name).glob("*")}
    again = zygote.start([*args, "--nproc=1"], work, script=FORKED).wait()
    assert "4 of 4 runs in out: 2 complete, 2 to train, 1 at the same time" in again.text()
    assert f"end       out/{NAMES[3]}: complete, val loss" in again.text() and "; 0 left" in again.text()
    assert {path: path.stat().st_mtime_ns for path in before} == before

    zygote.train(["--max_iters=9", "--learning_rate=3e-3", "--seed=2", "--out_dir=alone"], work)
    for key in ("loss", "val_loss"):
        assert column(work / "alone", key) == column(work / "out" / NAMES[3], key)
    assert "done: 10 steps" in (work / "out" / NAMES[3] / "train.log").read_text()


@pytest.mark.slow
def test_signals_stop_a_sweep_and_the_same_command_continues(zygote, work):
    args = [*TINY, "--max_iters=150", "--seed=1,2,3", "--out_dir=out"]
    folders = [work / "out" / f"seed={seed}" for seed in (1, 2, 3)]
    for number, folder in ((signal.SIGINT, folders[0]), (signal.SIGTERM, folders[1])):
        run = zygote.start(args, work, script=FORKED)
        log = folder / "train.log"
        wait_for(lambda log=log: log.exists() and "iter 5:" in log.read_text())
        run.kill(sig=number)
        run.wait(ok=False)
        assert run.codes == [128 + number], run.text()
        assert f"preempted: {signal.Signals(number).name}; " in run.text(), run.text()
        assert f"to continue, repeat the command:\npython {REPO / 'sweep.py'} --dataset=tiny" in run.text()
        assert events(folder)[-1] == "preempted" and not folders[2].exists()
    zygote.start(args, work, script=FORKED).wait()
    for folder in folders:
        assert events(folder)[-1] == "end" and list(column(folder, "loss")) == list(range(151))


@pytest.mark.slow
@pytest.mark.parametrize("is_array_job", [False, True])
def test_two_sweeps_at_once_divide_the_runs(zygote, work, is_array_job):
    args = [*TINY, "--max_iters=30", *LISTS, "--out_dir=out"]
    array = {"SLURM_ARRAY_TASK_MAX": "1", "SLURM_ARRAY_TASK_COUNT": "2"}
    envs = [array | {"SLURM_ARRAY_TASK_ID": task} if is_array_job else {} for task in ("0", "1")]
    both = [zygote.start(args, work, script=FORKED, env=env) for env in envs]
    texts = [run.wait().text() for run in both]
    for name in NAMES:
        starts = [event for event in events(work / "out" / name) if event in ("start", "resume", "end")]
        assert starts == ["start", "end"], texts
        assert sum(text.count(f"start     out/{name}") for text in texts) == 1
    assert all(("2 of 4 runs" in text) == is_array_job for text in texts)


@pytest.mark.slow
def test_a_killed_and_repeated_sweep_has_the_bits_of_an_undisturbed_one(zygote, work):
    """Killed ten times, twice with its runs."""
    args = [*TINY, "--dropout=0.1", "--eval_interval=20", "--save_interval=5", "--max_iters=39"]
    args += [*LISTS, "--jobs=2"]
    rng, straight, killed = random.Random(1), work / "straight", work / "killed"
    zygote.start([*args, f"--out_dir={straight}"], work, script=FORKED).wait(300)
    for kill, moment in enumerate(sorted(rng.randrange(4 * 40) for _ in range(10))):
        sweep = zygote.start([*args, f"--out_dir={killed}"], work, script=FORKED)
        # until its runs have logged so many steps
        sweep.until(lambda _, n=moment: sum(steps_in(run) + 1 for run in killed.glob("*")) >= n, 300)
        runs = children(sweep.pids[0]) if kill in (3, 7) and not sweep.poll() else []
        sweep.kill()
        for run in runs:
            with suppress(ProcessLookupError):
                os.kill(run, signal.SIGKILL)
        sweep.wait(ok=False)
    zygote.start([*args, f"--out_dir={killed}"], work, script=FORKED).wait(300)
    assert len([*straight.glob("*/")]) == 4
    for run in straight.glob("*/"):
        assert_same_run(killed / run.name, run)


@pytest.mark.slow
def test_a_sweep_starts_processes_with_their_cores(zygote, work):
    """Without forks; two processes in each run."""
    args = [*TINY, "--max_iters=2", "--seed=1,2", "--nproc=2", "--out_dir=out"]
    run = zygote.start(args, work, script="sweep.py").wait(300)
    for seed in (1, 2):
        started = next(r for r in records(work / "out" / f"seed={seed}") if r.get("event") == "start")
        assert started["world_size"] == 2 and f"end       out/seed={seed}: complete" in run.text()
