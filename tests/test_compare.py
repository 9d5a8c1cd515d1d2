"""compare.py: runs are read, grouped, compared, or refused with the reason."""

import json
import math
import os
import random
import shlex
from datetime import UTC, datetime, timedelta

import pytest
from runs import TINY, accepted, column, records, script, script_that_fails, train_defaults
from test_packages import hide  # noqa: F401

from isogpt.lab.comparison import compare
from isogpt.lab.runs import find_runs, read_run

MEASURES = {"dataset": "tiny", "block_size": 32, "digest": "d", "sequences": 8}
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def stamp(seconds):
    return {"time": (BEGAN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")}


def start(seconds=0, event="start", step=0, facts=(), **settings):
    """The event of a start or a resume."""
    config = train_defaults(dataset="tiny", gradient_accumulation_steps=2, batch_size=4, block_size=32)
    known = {"parameters": 1000, "flops_per_step": 1e6, "tokens_per_step": 256, "measures": MEASURES}
    known |= {"val_text": "t", "val_bytes": 400, "val_tokens": 200, "commit": "0123456789", "changed": False}
    return {"event": event, "iter": step, "config": config | settings} | known | dict(facts) | stamp(seconds)


def step(n, seconds=0.0, loss=3.0, **more):
    more = {"tokens_per_s": 1e4, "memory_gb_max": 0.5, "tokens": 256 * (n + 1)} | more
    return {"iter": n, "loss": loss, "loss_mean": loss, "step_ms": 10.0, **more, **stamp(seconds)}


def evaluation(n, loss, seconds=0.0, **more):
    return {"iter": n, "train_loss": loss, "val_loss": loss, **more, **stamp(seconds)}


def write(folder, *lines):
    """Write metrics.jsonl; text lines are written as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(f"{text}\n", errors="surrogateescape")
    return folder


def write_run(folder, losses, facts=(), ending="end", **settings):
    """A run with evaluations at steps 0, 10, 20, ... and a step a second."""
    lines = [start(facts=facts, **settings)]
    for i, loss in enumerate(losses):
        lines.append(evaluation(10 * i, loss, 10 * i))
        if i < len(losses) - 1:
            lines += [step(10 * i + n, 10 * i + n + 1, loss) for n in range(10)]
    return write(folder, *lines, *([{"event": ending, "iter": 10 * len(losses) - 10}] if ending else []))


def compared(at, capsys, *args):
    """What compare.py prints."""
    script(at, "compare.py", ["--picture=", *map(str, args)])
    return capsys.readouterr().out


def pair(path, effect=-0.02, seeds=5, **facts):
    """Two groups of runs whose final losses differ by `effect`, beside much noise of the seeds."""
    rng = random.Random(0)
    for seed in range(1, seeds + 1):
        base = 3 + seed / 10
        write_run(path / f"a{seed}", [5, 4, base], facts, seed=seed, learning_rate=1e-3)
        final = base + effect + rng.gauss(0, 0.002)
        write_run(path / f"b{seed}", [5, 4, final], facts, seed=seed, learning_rate=3e-3)


# ------------------------------------------------------------------------------------------------------------
# reading


def test_seconds_and_steps_of_a_run_that_was_killed_resumed_and_rolled_back(tmp_path):
    """A step takes a second. The run is killed in step 7, and continues an hour later at step 5."""
    before = [start(), evaluation(0, 4.0)] + [step(n, n + 1) for n in range(5)]
    saved = [{"event": "save", "iter": 5, "seconds": 0.5} | stamp(5.6)]
    resume = [start(3600, "resume", 5, init_from="resume")]
    after = [step(n, 3600 + n - 4) for n in range(5, 8)]
    back = [{"event": "rollback", "iter": 8, "to": 6} | stamp(3603.5)]
    again = [step(n, 3604 + n - 5) for n in range(6, 10)]
    end = [evaluation(10, 3.0, 3609), {"event": "end", "iter": 10} | stamp(3700)]
    # what a kill tears, or leaves twice before the next resume cuts the file back
    torn = ['{"iter": 5, "loss": 3.', "\x00\x00\x00", '{"iter": 6, "lo']
    run = read_run(write(tmp_path / "out", *before, *saved, *torn, *resume, *after, *back, *again, *end))
    assert [one["iter"] for one in run.steps] == list(range(10))
    seconds = {one["iter"]: one["seconds"] for one in run.steps}
    # the state before step 5 was reached at 5.1 s: the checkpoint was reported half a second later
    assert seconds[4] == 5 and seconds[5] == pytest.approx(6.1) and seconds[9] == pytest.approx(13.1)
    last = run.evaluations[-1]
    assert (last["iter"], last["tokens"], last["flops"]) == (10, 2560, 1e7)
    assert last["seconds"] == pytest.approx(14.1) and last["val_bpb"] == pytest.approx(3 / math.log(2) / 2)
    assert run.ending == "end" and run.settings["init_from"] == "scratch"


def test_real_runs_killed_and_resumed_or_not(zygote, work, at, capsys):
    """They have the same losses, and the steps that were repeated do not count twice."""
    args = [*TINY, "--eval_interval=3", "--save_interval=2"]
    whole = zygote.start([*args, "--out_dir=whole"], work)
    run = zygote.start([*args, "--max_iters=100000", "--out_dir=killed"], work)
    assert run.until(lambda text: "iter 7:" in text)
    run.kill()
    run.gone(10)
    killed_at = max(column(work / "killed", "loss"))
    args += ["--init_from=resume", f"--max_iters={killed_at + 4}"]
    zygote.start([*args, "--out_dir=killed"], work).wait()
    whole.wait()
    a, b = read_run(work / "whole"), read_run(work / "killed")
    assert [one["iter"] for one in b.steps] == list(range(killed_at + 5)) and b.ending == "end"
    for ours, others in zip(a.evaluations[:3], b.evaluations, strict=False):
        assert (ours["iter"], ours["val_loss"]) == (others["iter"], others["val_loss"])
    assert [one["tokens"] for one in a.evaluations] == [256 * n for n in (0, 3, 6, 9)]
    launched = [record for record in records(work / "killed") if record.get("event") in ("start", "resume")]
    assert [one["event"] for one in launched] == ["start", "resume"]
    seconds = [one["seconds"] for one in b.steps]
    assert seconds == sorted(seconds)
    times = [datetime.fromisoformat(one["time"]) for one in launched]
    last = datetime.fromisoformat([r for r in records(work / "killed") if "val_loss" in r][-1]["time"])
    idle = (last - times[0]).total_seconds() - b.evaluations[-1]["seconds"]
    assert 0 < idle < (last - times[0]).total_seconds(), "the time between the kill and the resume"
    at.chdir(work)
    text = compared(at, capsys, "whole", "killed")
    assert "max_iters" in text and "val loss" in text


def test_a_long_run_is_thinned_and_its_end_stays(tmp_path):
    lines = [start()] + [step(n, n) for n in range(5000)] + [evaluation(5000, 3.0, 5000)]
    run = read_run(write(tmp_path / "out", *lines))
    assert 400 < len(run.steps) <= 1001 and run.steps[-1]["iter"] == 4999
    statistics = [{"iter": n, "statistics": {"weight_norm": {"wte": 1.0}}} for n in range(1000)]
    run = read_run(write(tmp_path / "out", start(), *statistics))
    assert 90 < len(run.statistics) <= 201 and not run.steps


@pytest.mark.parametrize(
    "lines",
    [
        ["[" * 100_000, "{" * 1000, '{"iter": 5, "val_loss": ' + "9" * 5000 + "}"],
        [
            '{"iter": 999999999999999999, "val_loss": 1}',
            {"iter": 7, "val_loss": [1]},
            {"iter": 8, "loss": {}},
        ],
        [
            {"event": ["start"], "config": 1},
            {"event": "rollback", "to": "x"},
            {"event": "save", "seconds": []},
        ],
        [{"event": "resume", "config": [], "iter": 3}, {"event": "end", "iter": True, "time": 5}],
        ["x" * 2**21, {"event": "save", "iter": 1, "seconds": 1e999, "time": "2026-01-01"}],
        [{"iter": 5, "val_loss": 1e308, "time": "99999-01-01"}, {"iter": 6, "val_loss": "-inf"}],
        [start(facts={"parameters": "x", "flops_per_step": 10**400, "val_bytes": -1, "measures": 7})],
        [start(facts={"tokens_per_step": True, "val_tokens": [1], "commit": 5}, batch_size="x", n_layer=[1])],
        ["\x1b[31m", evaluation(10, "nan"), evaluation(10, "inf"), {"iter": 11, "val_loss": None}],
    ],
)
def test_what_no_run_writes_is_left_out_or_reported(tmp_path, at, capsys, lines):
    write(tmp_path / "hostile", start(), evaluation(0, 4.0), *lines)
    write_run(tmp_path / "good", [4, 3])
    for more in ([], ["--json"], ["--loss=2"]):
        text = compared(at, capsys, tmp_path / "good", tmp_path / "hostile", *more)
        assert "val" in text and "\x1b" not in text
    (tmp_path / "hostile" / "metrics.jsonl").write_bytes(random.Random(0).randbytes(10_000))
    error = script_that_fails(at, capsys, "compare.py", [str(tmp_path / "hostile")]).err
    assert error.count("\n") == 1 and "damaged" in error


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "error: give the folders of runs: python compare.py out-a out-b, or 'out-lr/*'"),
        (["nowhere"], "error: no such folder: nowhere; give the out_dir of train.py"),
        (["zz*"], "error: no folder matches zz*: give the folders of runs"),
        (["empty"], "error: empty contains no run: give the out_dir of train.py, or a folder of such"),
        (["file"], "error: file is a file: give the folder of a run, in which train.py has written"),
        (["nanogpt"], "run with python train.py --init_from=resume --out_dir=nanogpt"),
        (["fifo"], "error: fifo/metrics.jsonl cannot be read: it is not a regular file"),
        (["good", "--x=epochs"], "error: x is 'epochs'; choose from steps | tokens | seconds | flops"),
        (["good", "--losss=1"], "no such setting; did you mean --loss?"),
    ],
)
def test_mistakes_are_reported_in_one_line(at, capsys, args, message):
    at.chdir(at.path)
    for name in ("empty", "nanogpt", "fifo"):
        (at.path / name).mkdir()
    (at.path / "file").touch()
    (at.path / "nanogpt" / "ckpt.pt").touch()
    os.mkfifo(at.path / "fifo" / "metrics.jsonl")
    write_run(at.path / "good", [4, 3])
    error = script_that_fails(at, capsys, "compare.py", args).err
    assert message in error and error.count("\n") == 1


def test_folders_of_runs_and_globs_name_each_run_once(at):
    at.chdir(at.path)
    for name in ("sweep/a", "sweep/b", "sweep/c", "out"):
        write_run(at.path / name, [4, 3])
    (at.path / "sweep" / "list.json").touch()
    (at.path / "sweep" / "unfinished").mkdir()
    for args in (["sweep"], ["sweep/*"], ["sweep/a", "sweep"], ["./sweep/a", "sweep/b", "sweep/c"]):
        runs, problems = find_runs([*args, "out"])
        assert [run.folder.name for run in runs] == ["a", "b", "c", "out"]
        assert len(problems) == ("sweep/*" in args)
    runs, problems = find_runs(["sweep/list.json", "sweep/a"])  # what a shell makes of sweep/*
    assert len(runs) == 1 and "is a file" in problems[0]


# ------------------------------------------------------------------------------------------------------------
# groups and differences


def test_two_groups_of_seeds(tmp_path, at, capsys):
    from scipy import stats

    pair(tmp_path)
    text = compared(at, capsys, f"{tmp_path}/*")
    lines = text.splitlines()
    assert lines[0].startswith("all: seeds 1-5, steps 20, tokens 5,120, time 0:20, parameters 1,000")
    assert lines[1].split() == ["learning_rate", "val", "loss", "bits/byte"]
    assert [line.split()[0] for line in lines[2:4]] == ["0.003", "0.001"], "the best first"
    assert " 3.3000 ± 0.0707 " in lines[3]
    groups = json.loads(compared(at, capsys, f"{tmp_path}/*", "--json"))
    finals = [[run["evaluation"]["val_loss"] for run in group["runs"]] for group in groups["groups"]]
    p = stats.ttest_rel(*finals).pvalue
    difference = groups["differences"]["learning_rate=0.003"]
    assert difference["p"] == pytest.approx(p, rel=1e-6) and difference["is_paired"]
    assert groups["base"] == "learning_rate=0.001" and groups["compared_by"] == "validation loss"
    sentence = next(line for line in lines if "95% interval" in line)
    by = f"by {-difference['mean']:.4f}"
    expected = f"learning_rate=0.003 has a lower validation loss than learning_rate=0.001, {by}"
    assert (
        sentence.startswith(expected)
        and "Chance alone rarely causes such a difference" in sentence
        and "over 5 seeds" in sentence
    )
    pair(tmp_path, effect=0.0002)
    text = compared(at, capsys, f"{tmp_path}/*")
    assert "This cannot be told from chance; to detect a difference of this size takes about " in text


def test_without_scipy_the_table_and_the_difference_remain(tmp_path, at, capsys, hide):  # noqa: F811
    pair(tmp_path)
    hide("scipy")
    text = compared(at, capsys, f"{tmp_path}/*")
    assert "3.3000 ± " in text and "learning_rate=0.003 has a lower validation loss" in text
    assert "no test: a p-value needs scipy" in text and "pip install scipy" in text and "p = " not in text


def test_one_run_each_does_not_decide_and_the_advice_can_be_typed(tmp_path, at, capsys):
    write_run(tmp_path / "a", [4, 3], weight_decay=0.1, n_layer=3)
    write_run(tmp_path / "b", [4, 2.9], weight_decay=0.2, n_layer=3)
    text = compared(at, capsys, tmp_path / "a", tmp_path / "b")
    assert "one run each cannot tell a change from chance" in text
    assert "training losses differ is 10" not in text  # they are equal in the whole of these runs
    command = next(line for line in text.splitlines() if "sweep.py" in line)
    words = shlex.split(command)
    assert words[:2] == ["python", "sweep.py"]
    assert {"--weight_decay=0.1,0.2", "--seed=1,2,3", "--n_layer=3"} < set(words)
    options = [word for word in words[2:] if "," not in word]
    assert accepted("train.py", *options)["batch_size"] == 4
    write_run(tmp_path / "b", [3.5, 2.9], weight_decay=0.2, n_layer=4)
    text = compared(at, capsys, tmp_path / "a", tmp_path / "b")
    assert "training losses differ is 0" in text
    assert text.count("python sweep.py") == 2 and "python compare.py" in text


def test_only_settings_that_differ_and_matter_are_shown(tmp_path, at, capsys):
    write_run(tmp_path / "a", [4, 3], wandb_run_name="x", log_interval=1, dropout=0.0, init_from="auto")
    write_run(tmp_path / "b", [4, 3.1], wandb_run_name="y", log_interval=2, dropout=0.1)
    text = compared(at, capsys, tmp_path / "a", tmp_path / "b")
    assert text.splitlines()[1].split() == ["dropout", "val", "loss", "bits/byte"]
    a = write_run(tmp_path / "a", [4, 3], {"code": "aaaa"})
    b = write_run(tmp_path / "b", [4, 3.1], {"code": "bbbb", "changed": True})
    text = compared(at, capsys, a, b)
    rows = [line.split() for line in text.splitlines()[1:4]]
    assert [[*row[:2], row[-1]] for row in rows] == [
        ["runs", "code", "commit"],
        [str(a), "aaaa", "01234567"],
        [str(b), "bbbb", "01234567-changed"],
    ]
    assert f"{b} has a higher validation loss than {a}" in text
    # an older run lacks a setting, which then had its default
    path = a / "metrics.jsonl"
    path.write_text(path.read_text().replace('"dropout": 0.0, ', ""))
    assert "dropout" not in compared(at, capsys, a, b)


def test_edited_code_without_a_commit_is_told_apart_by_what_was_typed(tmp_path, at, capsys):
    at.chdir(tmp_path)
    unknown = {"commit": "", "changed": False}
    for seed in (1, 2, 3):
        write_run(tmp_path / f"before/{seed}", [4, 3 + seed / 10], unknown, seed=seed)
        write_run(tmp_path / f"after/{seed}", [4, 2.9 + seed / 10 + seed / 1000], unknown, seed=seed)
    text = compared(at, capsys, "before", "after")
    assert "after has a lower validation loss than before" in text and "paired t-test over 3 seeds" in text
    text = compared(at, capsys, "before/1", "after/1")
    assert "after/1 has a lower validation loss than before/1" in text
    write_run(tmp_path / "copy", [4, 3.1], unknown, seed=1)
    text = compared(at, capsys, "before/1", "copy")
    assert "have the same validation loss, to the last digit: what differs has had no effect" in text


def test_commits_that_leave_the_code_alone_do_not_divide_a_group(tmp_path, at, capsys):
    for seed in (1, 2, 3):
        facts = {"code": "aaaa", "commit": f"{seed // 3}" * 10, "changed": seed == 2}
        write_run(tmp_path / f"out/{seed}", [4, 3 + seed / 10], facts, seed=seed)
    text = compared(at, capsys, tmp_path / "out")
    assert "3.2000 ± 0.0577" in text and "00000000, 00000000-changed, 11111111" in text
    write_run(tmp_path / "out/3", [4, 3.3], {"code": "bbbb"}, seed=3)
    assert "bbbb" in compared(at, capsys, tmp_path / "out"), "other code is a group of its own"


def test_several_groups_are_compared_with_the_first(tmp_path, at, capsys):
    for i, rate in enumerate((1e-3, 2e-3, 3e-3)):
        for seed in (1, 2, 3):
            final = 3 - i / 10 + seed / 10 + (i * seed**2) / 1000
            write_run(tmp_path / f"{rate}-{seed}", [4, final], seed=seed, learning_rate=rate)
    text = compared(at, capsys, f"{tmp_path}/*")
    assert "each compared with learning_rate=0.001, the first that was given:" in text
    assert text.count("paired t-test over 3 seeds") == 2 and "Holm" in text


def test_runs_that_are_not_complete(tmp_path, at, capsys):
    """They are marked, and compared at a step that all have reached; failed ones do not count in a mean."""
    write_run(tmp_path / "a", [4, 3.5, 3, 2.8], learning_rate=1e-3)
    write_run(tmp_path / "b", [4, 3.4], learning_rate=2e-3, ending="")
    text = compared(at, capsys, tmp_path / "a", tmp_path / "b")
    assert "running or killed" in text and "compared at step 10, the last one" in text
    assert "has a lower validation loss than learning_rate=0.001, by 0.1000" in text
    write_run(tmp_path / "b", [4, 3.4], learning_rate=2e-3, ending="preempted")
    write_run(tmp_path / "c", [4, 3.4, 3.1, 2.7], learning_rate=3e-3)
    text = compared(at, capsys, tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert "preempted" in text and "learning_rate=0.002 is not complete, so it is not compared" in text
    assert "learning_rate=0.003 has a lower validation loss than learning_rate=0.001, by 0.1000" in text
    write_run(tmp_path / "d", [4, 8], learning_rate=3e-3, seed=1, ending="failed")
    write_run(tmp_path / "e", [4, 3.4, 3.1, math.nan], learning_rate=3e-3, seed=2)
    text = compared(at, capsys, tmp_path / "c", tmp_path / "d", tmp_path / "e")
    assert "2.7000" in text and "1 of 3 failed, 1 of 3 diverged" in text
    write(tmp_path / "f", start())  # has only just started
    assert "running or killed" in compared(at, capsys, tmp_path / "f")
    write_run(tmp_path / "g", [4], learning_rate=9.0, ending="failed")
    text = compared(at, capsys, tmp_path / "a", tmp_path / "g")
    assert "there is no step after the start at which all runs were evaluated" in text
    assert "the same validation loss" not in text, "of the initial weights"
    assert compared(at, capsys, tmp_path / "a", tmp_path / "f")


# ------------------------------------------------------------------------------------------------------------
# what can be compared


def test_other_tokens_are_compared_by_bits_per_byte_or_refused(tmp_path, at, capsys):
    a = write_run(tmp_path / "a", [4, 3])
    other = {"measures": MEASURES | {"dataset": "bpe", "digest": "e"}, "val_tokens": 100}
    b = write_run(tmp_path / "b", [6, 4], other, dataset="bpe")
    text = compared(at, capsys, a, b)
    assert "compared by bits per byte, since the losses are over different tokens" in text
    assert "the runs were evaluated on different windows of the text" in text
    bits = (3 / 2 - 4 / 4) / math.log(2)
    assert f"dataset=bpe has fewer bits per byte than dataset=tiny, by {bits:.4f}" in text
    b = write_run(tmp_path / "b", [6, 2], other | {"val_text": "another"}, dataset="bpe")
    text = compared(at, capsys, a, b)
    assert "not compared: of " in text and "the validation texts differ too" in text and "lower" not in text
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["tiny", "bpe"], "there is no best"
    b = write_run(tmp_path / "b", [6, 2], other | {"val_text": ""}, dataset="bpe")
    assert "does not record its validation text" in compared(at, capsys, a, b)
    data = json.loads(compared(at, capsys, a, b, "--json"))
    assert data["compared_by"] is None and "validation text" in data["reason"] and not data["differences"]
    # a run of an older version records no measures, and its settings say enough
    older = {"measures": None, "val_text": None, "val_bytes": None}
    write_run(tmp_path / "c", [4, 3], older, eval_iters=20)
    write_run(tmp_path / "d", [4, 2], older, eval_iters=10)
    text = compared(at, capsys, tmp_path / "c", tmp_path / "d")
    assert "not compared: of" in text and "eval_iters * batch_size is 40, not 80" in text


def test_different_seeds_add_noise_of_the_windows_unless_the_whole_split_is_read(tmp_path, at, capsys):
    for iters in (200, 0):
        for seed in (1, 2):
            facts = {"measures": MEASURES | {"seed": seed}}
            write_run(tmp_path / "a", [4, 3], facts, seed=1, learning_rate=1e-3, eval_iters=iters)
            write_run(tmp_path / "b", [4, 3.1], facts, seed=seed, learning_rate=2e-3, eval_iters=iters)
            text = compared(at, capsys, tmp_path / "a", tmp_path / "b")
            assert ("chooses the validation windows" in text) == (iters > 0 and seed == 2)


def test_time_until_a_loss(tmp_path, at, capsys):
    """Half way between the evaluations at steps 10 and 20, of which each step takes a second."""
    write_run(tmp_path / "a", [5, 4, 3, 2], learning_rate=1e-3)
    write_run(tmp_path / "b", [5, 4.5, 4.2, 4], learning_rate=2e-3)
    runs, _ = find_runs([str(tmp_path / "a"), str(tmp_path / "b")])
    first, second = compare(runs, train_defaults(), 3.5).until
    assert (first.step.mean, first.tokens.mean, first.seconds.mean) == (15, 15 * 256, 15)
    assert second.reached == 0 and second.step is None
    text = compared(at, capsys, tmp_path / "a", tmp_path / "b", "--loss=3.5")
    assert "until the validation loss is 3.5" in text and "0 of 1" in text and "0:15" in text


def test_json_contains_everything_and_no_value_that_json_lacks(tmp_path, at, capsys):
    write_run(tmp_path / "a", [4, 3], learning_rate=1e-3)
    write_run(tmp_path / "b", [4, math.nan], learning_rate=2e-3)
    text = compared(at, capsys, tmp_path / "a", tmp_path / "b", "--json", "--loss=3.5")
    data = json.loads(text, parse_constant=pytest.fail)
    assert [group["settings"]["learning_rate"] for group in data["groups"]] == [1e-3, 2e-3]
    assert data["groups"][1]["val_loss"]["mean"] == "nan" and data["groups"][1]["state"] == "diverged"
    assert data["until"][0]["step"]["mean"] == 5 and data["target"] == 3.5


def test_further_validation_sets_have_columns(tmp_path, at, capsys):
    write(tmp_path / "a", start(), evaluation(0, 4.0, **{"val_loss/wiki": 4.5}), {"event": "end", "iter": 0})
    assert "loss of wiki" in compared(at, capsys, tmp_path / "a")


def test_a_picture_is_drawn_and_named_last(tmp_path, at, capsys):
    pair(tmp_path, seeds=2)
    at.chdir(tmp_path)
    script(at, "compare.py", ["a1", "a2", "b1", "b2", "--x=flops"])
    assert capsys.readouterr().out.splitlines()[-1] == "a picture: compare.png"
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    script(at, "compare.py", ["a1", "b1", "--picture=missing/x.png"])
    assert "note: no picture: " in capsys.readouterr().out, "the table is worth more"
