"""sweep.py: combinations, what is refused before anything starts, the queue, kills, signals, two at once."""

import json
import os
import random
import signal
import sys
from contextlib import suppress

import pytest
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

from isogpt.lab import slots
from isogpt.lab.combinations import folder_name, part_of_task, points_of, swept_settings, words_of

FORKED = "tests/forked_sweep.py"
LISTS = ["--learning_rate=1e-3,3e-3", "--seed=1,2"]
NAMES = [f"learning_rate={rate},seed={seed}" for rate in ("0.001", "0.003") for seed in (1, 2)]


def events(folder):
    return [record["event"] for record in records(folder) if "event" in record]


# ------------------------------------------------------------------------------------------------------------
# combinations


def test_every_combination_or_one_setting_at_a_time():
    words = ["config/x.py", "--seed=1,2", "--batch_size=4", "--learning_rate=1e-3,2e-3", "--dtype=float32"]
    known = settings_of_train()
    swept = swept_settings(words, known)
    assert swept == {"seed": ["1", "2"], "learning_rate": ["1e-3", "2e-3"]}
    pairs = [(point["seed"], point["learning_rate"]) for point in points_of(swept, each=False)]
    assert pairs == [("1", "1e-3"), ("1", "2e-3"), ("2", "1e-3"), ("2", "2e-3")]
    point = {"seed": "2", "learning_rate": "1e-3"}
    expected = ["config/x.py", "--seed=2", "--batch_size=4", "--learning_rate=1e-3", "--dtype=float32"]
    assert words_of(words, point, known) == expected

    swept = {"a": ["1", "2", "3"], "b": ["x", "y"], "seed": ["1", "2"]}
    texts = ["".join(point.values()) for point in points_of(swept, each=True)]
    assert texts == ["1x1", "1x2", "2x1", "2x2", "3x1", "3x2", "1y1", "1y2"]
    assert len(points_of(swept, each=False)) == 12
    assert points_of({"seed": ["1", "2"]}, each=True) == [{"seed": "1"}, {"seed": "2"}]


def test_values_that_contain_commas_are_separated_by_semicolons():
    known = settings_of_train()
    words = ["--shares=2,1", "--dataset=a,b;c", "--init_from=x,y;", "--alert_command=a; b,c", "--out_dir=a,b"]
    assert swept_settings(words, known) == {"dataset": ["a,b", "c"]}
    single = ["--shares=2,1", "--dataset=c", "--init_from=x,y", "--alert_command=a; b,c", "--out_dir=a,b"]
    assert words_of(words, {"dataset": "c"}, known) == single
    assert swept_settings(["--shares=2,1;1,1"], known) == {"shares": ["2,1", "1,1"]}
    assert swept_settings(["--seed=1,2", "--seed=3"], known) == {}, "the last one counts"
    assert words_of(["--seed=1,2", "--seed=3"], {}, known) == ["--seed=2", "--seed=3"]


def test_folders_have_different_names_that_are_safe():
    known = settings_of_train()
    assert folder_name({"learning_rate": "1e-3", "seed": "2"}, known) == "learning_rate=0.001,seed=2"
    paths = ["/data/a", "_data/a", "_data_a", "data:a", "x" * 500, "x" * 499 + "y", "..", "a b"]
    names = [folder_name({"dataset": path}, known) for path in paths]
    assert len({*names}) == len(names)
    assert not any(set(name) & set("/: ") or len(name) > 200 for name in names)
    assert names[2] == "dataset=_data_a" and names[0].startswith("dataset=_data_a,")


def test_the_tasks_of_an_array_job_divide_the_runs():
    def part(count, task, first, last, step=1):
        values = {"ID": task, "MIN": first, "MAX": last, "STEP": step}
        values["COUNT"] = (last - first) // step + 1
        return part_of_task(count, {f"SLURM_ARRAY_TASK_{name}": str(n) for name, n in values.items()})

    assert part_of_task(3, {}) == [0, 1, 2]
    for count, first, last, step in ((7, 0, 2, 1), (7, 5, 7, 1), (2, 1, 4, 1), (9, 2, 8, 3)):
        parts = [part(count, task, first, last, step) for task in range(first, last + 1, step)]
        assert sorted(sum(parts, [])) == list(range(count)), "each run belongs to one task"
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    uneven = {"ID": "2", "MIN": "1", "MAX": "7", "STEP": "1", "COUNT": "3"}
    with pytest.raises(ValueError, match="--array=0-3"):
        part_of_task(4, {f"SLURM_ARRAY_TASK_{name}": n for name, n in uneven.items()})


def test_runs_at_the_same_time_have_separate_cores_and_gpus():
    gpus = [
        slot.variables["CUDA_VISIBLE_DEVICES"]
        for slot in slots.slots_of_gpus(0, 2, ["0", "1", "3", "5", "6"])
    ]
    assert gpus == ["0,1", "3,5"]
    with pytest.raises(ValueError, match="set --jobs=2 or less"):
        slots.slots_of_gpus(3, 2, ["0", "1", "2", "3"])
    with pytest.raises(ValueError, match="set --nproc=1 or less"):
        slots.slots_of_gpus(0, 2, ["0"])
    with pytest.raises(ValueError, match="set --jobs=2 or less"):
        slots.slots_of_cores(3, [0, 1])
    if sys.platform == "linux":
        cores = [slot.cores for slot in slots.slots_of_cores(2, [0, 2, 4, 6, 8])]
        assert cores == [(0, 2), (4, 6)], "equal shares: the bits may depend on their size"


# ------------------------------------------------------------------------------------------------------------
# before anything starts


@pytest.mark.parametrize(
    "args, messages",
    [
        ([], ["no setting has several values: type a list such as --seed=1,2,3"]),
        (["--seed=1,x,y"], ["--seed: 'x', 'y' is not a whole number"]),
        (
            ["--seed=1,2,1", "--learning_rate=0.1,1e-1"],
            ["1 occurs more than once", "0.1 occurs more than once"],
        ),
        (
            ["--seed=1,-1,-2", "--n_head=2,3"],
            [
                "n_head=2,seed=-1; n_head=3,seed=-1: seed is -1: it must be >= 0",
                "n_head=2,seed=-2; n_head=3,seed=-2: seed is -2",
                "n_head=3,seed=1: n_embd is 32: it must be a multiple of n_head, 3",
            ],
        ),
        (["--seed=1,2", "later.py"], ["seed is 5 in a config after --seed: type --seed= after the config"]),
        (["--seed=1,2", "--arch=llama", "--bias=True"], ["error: arch 'llama' uses no biases"]),
        (["--dataset=tiny;huge"], ["dataset=huge: no train.bin in data/huge"]),
        (["--seed=1,2", "--eval_only"], ["eval_only and dry_run_ranks train nothing"]),
        (["--seed=1,2", "--sead=3"], ["--sead: no such setting; did you mean --seed?"]),
        (["--seed=1,2", "--jobs=9999"], ["jobs is 9999, but the number of cores is"]),
        (["--seed=1,2", "--out_dir=run"], ["out_dir run contains a run"]),
        (["--seed=1,2", "--out_dir=later.py"], ["out_dir later.py is a file"]),
    ],
)
def test_mistakes_are_reported_before_anything_starts(at, capsys, args, messages):
    tiny_data(at.path)
    (at.path / "later.py").write_text("seed = 5\n")
    (at.path / "run" / "step_00000010").mkdir(parents=True)
    order = ["--n_head="] if "--n_head=2,3" in args else []
    words = [word for word in TINY if not word.startswith(tuple(order))]
    output = script_that_fails(at, capsys, "sweep.py", [*words, "--out_dir=out", *sorted(args)])
    for message in messages:
        assert message in output.err, output.err
    assert output.err.count("error:") == len(messages) and not (at.path / "out").exists()


def prepare_run(folder, steps, of, seconds=2.0, **settings):
    """The folder of a run that has taken `steps` of `of` steps at a speed, without weights."""
    folder.mkdir(parents=True)
    lines = [{"event": "start", "iter": 0, "time": "2026-01-01T00:00:00.000+00:00"}]
    minutes, rest = divmod(int(seconds * steps), 60)
    time = f"2026-01-01T00:{minutes:02d}:{rest:02d}.000+00:00"
    lines.append({"iter": steps, "train_loss": 2.0, "val_loss": 1.5, "time": time})
    if steps == of:
        lines.append({"event": "end", "iter": steps, "time": time})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    (folder / f"step_{steps:08d}").mkdir()
    (folder / "sweep.json").write_text(json.dumps(settings))


def test_a_dry_run_lists_states_and_times_and_writes_nothing(at, capsys):
    tiny_data(at.path)
    prepare_run(at.path / "out" / "seed=1", 30, of=30)
    prepare_run(at.path / "out" / "seed=2", 10, of=30)
    before = sorted(at.path.rglob("*"))
    with pytest.raises(SystemExit) as exit:
        script(at, "sweep.py", [*TINY, "--max_iters=29", "--seed=1,2,3", "--out_dir=out", "--dry_run"])
    assert not exit.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "out/seed=1: complete, val loss 1.5000"
    assert lines[1] == "out/seed=2: resumes at step 10, 20 steps in about 0:40"
    assert lines[2] == "out/seed=3: new, 30 steps in about 1:00"
    assert (
        lines[3]
        == "3 runs, 1 at the same time: about 1:40, plus the time for starts, evaluations and checkpoints"
    )
    assert sorted(at.path.rglob("*")) == before


def test_a_budget_says_when_a_run_is_complete(at, capsys):
    tiny_data(at.path)
    prepare_run(at.path / "out" / "max_tokens=2560.0", 10, of=10)
    prepare_run(at.path / "out" / "max_tokens=7680.0", 10, of=30)
    with pytest.raises(SystemExit):
        args = ["--max_tokens=2560,7680", "--batch_size=4", "--gradient_accumulation_steps=2"]
        script(at, "sweep.py", [*TINY, *args, "--max_iters=999", "--out_dir=out", "--dry_run"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "out/max_tokens=2560.0: complete, val loss 1.5000"
    assert lines[1] == "out/max_tokens=7680.0: resumes at step 10, 20 steps in about 0:40"


def test_a_run_with_other_settings_is_not_continued(at, capsys):
    tiny_data(at.path)
    prepare_run(at.path / "out" / "seed=1", 10, of=30, n_embd=64, weight_decay=0.1, nproc=4)
    prepare_run(at.path / "out" / "seed=2", 30, of=30)
    (at.path / "out" / "seed=2" / "sweep.json").unlink()
    output = script_that_fails(at, capsys, "sweep.py", [*TINY, "--seed=1,2,3", "--out_dir=out"])
    assert "seed=1: this run was trained with n_embd 64 (now 32): type --n_embd=64 to continue" in output.err
    assert "seed=2: out/seed=2 contains a run that sweep.py did not start" in output.err
    assert not (at.path / "out" / "seed=3").exists()


def test_init_from_is_kept_for_the_first_start(at):
    tiny_data(at.path)
    (at.path / "weights").mkdir()
    args = [*TINY, "--init_from=scratch,weights", "--out_dir=out", "--dry_run"]
    space = script(at, "sweep.py", args, until="# train them")
    starts = [[word for word in run.arguments if word.startswith("--init_from=")] for run in space["runs"]]
    assert [start[-1] for start in starts] == ["--init_from=auto", "--init_from=auto:weights"]
    assert [run.name for run in space["runs"]] == ["init_from=scratch", "init_from=weights"]


# ------------------------------------------------------------------------------------------------------------
# the queue


def test_runs_have_the_bits_of_train_py_and_complete_ones_are_left_alone(zygote, work):
    args = [*TINY, "--max_iters=9", *LISTS, "--out_dir=out"]
    first = zygote.start([*args, "--learning_rate=1e-3,1e30"], work, script=FORKED).wait(ok=False)
    assert first.codes == [1], first.text()
    assert first.text().count("failed    learning_rate=1e+30") == 2, first.text()
    assert "not complete: 2 of 4 runs" in first.text()
    assert (
        f"would run {REPO / 'compare.py'} out/{NAMES[0]} out/{NAMES[1]}\n" in first.text()
        or "is missing" in first.text()
    )
    before = {path: path.stat().st_mtime_ns for name in NAMES[:2] for path in (work / "out" / name).glob("*")}
    again = zygote.start(args, work, script=FORKED).wait()
    assert "4 runs in out: 2 complete, 2 to train, 1 at the same time" in again.text()
    assert f"end       {NAMES[3]}: val loss" in again.text() and "; 0 left" in again.text()
    assert {path: path.stat().st_mtime_ns for path in before} == before

    alone = ["--max_iters=9", "--learning_rate=3e-3", "--seed=2", "--out_dir=alone"]
    zygote.train(alone, work)
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
        assert f"stopped   {folder.name}: resumes at step" in run.text()
        assert f"to continue, repeat the command:\npython {REPO / 'sweep.py'} --dataset=tiny" in run.text()
        assert events(folder)[-1] == "preempted" and not folders[2].exists()
    run = zygote.start([*args, "--max_iters=150"], work, script=FORKED).wait()
    for folder in folders:
        assert events(folder)[-1] == "end" and list(column(folder, "loss")) == list(range(151))


@pytest.mark.slow
def test_two_sweeps_at_once_divide_the_runs(zygote, work):
    args = [*TINY, "--max_iters=30", *LISTS, "--out_dir=out"]
    both = [zygote.start(args, work, script=FORKED) for _ in range(2)]
    texts = [run.wait().text() for run in both]
    assert all("; 0 left" in text or "complete  " in text for text in texts)
    for name in NAMES:
        starts = [event for event in events(work / "out" / name) if event in ("start", "resume", "end")]
        assert starts == ["start", "end"], texts
        assert sum(text.count(f"start     {name}") for text in texts) == 1


def test_the_tasks_of_an_array_job_train_their_parts(zygote, work):
    names = {"MIN": "3", "MAX": "4", "STEP": "1", "COUNT": "2"}
    env = {f"SLURM_ARRAY_TASK_{name}": value for name, value in names.items()}
    args = [*TINY, "--max_iters=2", "--seed=1,2,3", "--out_dir=out"]
    texts = []
    for task in ("4", "3"):
        run = zygote.start(args, work, script=FORKED, env=env | {"SLURM_ARRAY_TASK_ID": task})
        texts.append(run.wait().text())
    assert "3 runs in out, 1 of them in this task of the array job: 0 complete, 1 to train" in texts[0]
    assert "complete: 1 of 3 runs; other tasks train the others" in texts[0]
    assert texts[1].count("start  ") == 2 and "other tasks" not in texts[1]


# ------------------------------------------------------------------------------------------------------------
# kills


@pytest.mark.slow
def test_a_killed_and_repeated_sweep_has_the_bits_of_an_undisturbed_one(zygote, work):
    """Killed three times, the second time with its runs."""
    args = [*TINY, "--dropout=0.1", "--eval_interval=20", "--save_interval=5", "--max_iters=39"]
    args += [*LISTS, "--jobs=2"]
    rng, straight, killed = random.Random(1), work / "straight", work / "killed"
    zygote.start([*args, f"--out_dir={straight}"], work, script=FORKED).wait(300)
    for kill, moment in enumerate(sorted(rng.randrange(4 * 40) for _ in range(3))):
        sweep = zygote.start([*args, f"--out_dir={killed}"], work, script=FORKED)
        # until its runs have logged so many steps
        sweep.until(lambda _, n=moment: sum(steps_in(run) + 1 for run in killed.glob("*")) >= n, 300)
        runs = children(sweep.pids[0]) if kill == 1 and not sweep.poll() else []
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
        assert started["world_size"] == 2 and f"end       seed={seed}: val loss" in run.text()
