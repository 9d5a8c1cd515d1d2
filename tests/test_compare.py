"""compare.py: runs are read, grouped, compared, or refused with the reason."""

import json
import math
import os
import random
import shlex
from pathlib import Path

import pytest
from runs import TINY, accepted, column, script, script_that_fails, train_defaults
from scipy import stats
from test_packages import hide  # noqa: F401

from isogpt.common.files import as_json
from isogpt.lab.runs import find_runs, read_run

MEASURES = {"dataset": "tiny", "block_size": 32, "digest": "d", "sequences": 8}
DAMAGED = "is damaged, or not written by train.py"


def start(facts=(), **settings):
    """The event of a start."""
    config = train_defaults(dataset="tiny", gradient_accumulation_steps=2, batch_size=4, block_size=32)
    known = {"parameters": 1000, "flops_per_step": 1e6, "tokens_per_step": 256, "measures": MEASURES}
    known |= {"val_text": "t", "commit": "0123456789", "changed": False}
    return {"event": "start", "iter": 0, "config": config | settings} | known | dict(facts)


def step(n, loss=3.0):
    record = {"iter": n, "loss": loss, "loss_mean": loss, "tokens": 256 * (n + 1), "seconds": 2.0 * (n + 1)}
    return record | {"tokens_per_s": 1e4, "memory_gb_max": 0.5, "step_ms": 1.0}


def evaluation(n, loss, bits=0.7):
    losses = {"train_loss": loss, "val_loss": loss, "val_bpb": loss * bits, "val_loss/wiki": 4.5}
    return {"iter": n, **losses, "tokens": 256 * n, "seconds": 2.0 * n}


def write(folder, *lines):
    """Write metrics.jsonl."""
    os.makedirs(folder, exist_ok=True)
    text = "".join(f"{json.dumps(as_json(line))}\n" for line in lines)
    Path(folder, "metrics.jsonl").write_text(text)


def write_run(folder, losses, facts=(), ending="end", bits=0.7, **settings):
    """A run with evaluations at steps 0, 10, 20, ...; a step takes two seconds."""
    lines = [start(facts, **settings), evaluation(0, losses[0], bits)]
    for i, loss in enumerate(losses[1:]):
        lines += [step(10 * i + n, losses[i]) for n in range(10)]
        lines.append(evaluation(10 * i + 10, loss, bits))
    write(folder, *lines, {"event": ending, "iter": 10 * len(losses) - 10})


def table(text):
    """The headings and the first two rows."""
    return [line.split() for line in text.splitlines()[1:4]]


@pytest.fixture
def says(at, capsys):
    """says(arguments, *texts): compare.py prints these texts; returns all that it prints."""

    def compare(arguments, *texts):
        script(at, "compare.py", ["--picture=", *arguments.split()])
        output = capsys.readouterr().out
        assert [text for text in texts if text not in output] == [], output
        return output

    return compare


# ------------------------------------------------------------------------------------------------------------
# reading


def test_a_run_that_was_killed_in_a_line_and_resumed(zygote, work, says):
    """It has the losses of the undisturbed one, and each step once."""
    args = [*TINY, "--eval_interval=3", "--save_interval=2"]
    whole = zygote.start([*args, "--out_dir=whole"], work)
    run = zygote.start([*args, "--max_iters=100000", "--out_dir=killed"], work)
    assert run.until(lambda text: "iter 7:" in text)
    run.kill()
    run.gone(10)
    with Path("killed/metrics.jsonl").open("a") as file:
        file.write('{"iter": 9, "l')
    assert read_run(work / "killed").state == "running or killed"
    last = max(column("killed", "loss")) + 4
    zygote.start([*args, "--out_dir=killed", "--init_from=resume", f"--max_iters={last}"], work).wait()
    whole.wait()
    a, b = read_run(work / "whole"), read_run(work / "killed")
    assert [one["iter"] for one in b.steps] == list(range(last + 1)) and b.state == ""
    assert [one["val_loss"] for one in a.evaluations[:3]] == [one["val_loss"] for one in b.evaluations[:3]]
    assert [one["tokens"] for one in a.evaluations] == [256 * n for n in (0, 3, 6, 9)]
    seconds = [one["seconds"] for one in b.steps]
    assert seconds == sorted(seconds)
    assert "init_from" not in says("whole killed", "max_iters")


def test_a_long_run_is_thinned_and_its_end_stays(tmp_path):
    write(tmp_path, start(), *map(step, range(0, 30_000, 3)))
    iters = [one["iter"] for one in read_run(tmp_path).steps]
    assert 500 < len(iters) <= 1001 and iters[-1] == 29_997
    assert {b - a for a, b in zip(iters[:-1], iters[1:-1])} == {48}


@pytest.mark.parametrize(
    "argument, message",
    [
        ("", "give the folders of runs: python compare.py out-a out-b, or 'out-lr/*'"),
        ("good zz*", "zz* contains no run: give train.py's out_dir, or a folder of them"),
        ("good empty", "empty contains no run: give train.py's out_dir"),
        ("fifo", f"fifo/metrics.jsonl {DAMAGED} ([Errno 22] it is not"),
        ("good noise", f"noise/metrics.jsonl {DAMAGED} ('seed')"),
        ("forged", f"forged/metrics.jsonl {DAMAGED}"),
    ],
)
def test_mistakes_are_reported_in_one_line(at, capsys, argument, message):
    for name in ("empty", "fifo", "noise"):
        os.mkdir(name)
    os.mkfifo("fifo/metrics.jsonl")
    write_run("good", [4, 3])
    Path("noise/metrics.jsonl").write_bytes(random.Random(0).randbytes(10_000))
    write("forged", start(), {"iter": [1], "val_loss": {}})
    error = script_that_fails(at, capsys, "compare.py", argument.split()).err
    assert f"error: {message}" in error and error.count("\n") == 1


def test_folders_of_runs_and_globs_name_each_run_once(at):
    for name in ("sweep/a", "sweep/b", "sweep/c", "out"):
        write_run(name, [4, 3])
    Path("sweep/list.json").touch()
    for args in (["sweep"], ["sweep/*"], ["sweep/a", "sweep"], ["./sweep/a", "sweep/b", "sweep/c"]):
        assert [run.folder.name for run in find_runs([*args, "out"])] == ["a", "b", "c", "out"]


# ------------------------------------------------------------------------------------------------------------
# groups and differences


def pair(effect=-0.02, seeds=5):
    """Two groups of runs whose final losses differ by `effect`, beside much noise of the seeds."""
    rng = random.Random(0)
    for seed in range(1, seeds + 1):
        base = 3 + seed / 10
        write_run(f"a{seed}", [5, 4, base], seed=seed, learning_rate=1e-3)
        write_run(f"b{seed}", [5, 4, base + effect + rng.gauss(0, 0.002)], seed=seed, learning_rate=3e-3)


def test_groups_of_seeds(says):
    pair()
    lines = says("*").splitlines()
    assert lines[0].startswith("all: seeds 1,2,3,4,5, steps 20, tokens 5,120, seconds 40, parameters 1,000")
    assert lines[1].split() == ["group", "val_loss", "val_bpb", "best"] and "val_loss/wiki 4.5000" in lines[0]
    assert lines[2].startswith("learning_rate=0.003"), "the best first"
    assert lines[3].startswith("learning_rate=0.001  3.3000 ± 0.0707  ")
    data = json.loads(says("* --json"))
    finals = [[run["evaluation"]["val_loss"] for run in group["runs"]] for group in data["groups"]]
    test, result = stats.ttest_rel(*finals), data["differences"]["learning_rate=0.003"]
    assert result["p"] == pytest.approx(test.pvalue, rel=1e-6)
    assert data["base"] == "learning_rate=0.001" and data["compared_by"] == "val_loss"
    low, high = test.confidence_interval(0.95)
    lower = "learning_rate=0.003 has a lower validation loss than learning_rate=0.001"
    interval = f"by {-result['mean']:.4f} (95% interval: {low:+.4f} to {high:+.4f})"
    chance = "paired t-test over 5 seeds. Chance alone rarely causes such a difference"
    seeds = "to detect a difference of this size takes about 3 seeds each"
    assert lines[-1] == f"{lower}, {interval}, p = {test.pvalue:.2g}, {chance}; {seeds}"
    pair(effect=0.0002)
    says("*", "This cannot be told from chance; to detect a difference of this size takes about ")
    write_run("c", [5, 4, 3.2], seed=1, learning_rate=9e-3)
    write_run("d", [5, 4, 3.25], seed=2, learning_rate=9e-3)
    of_all = "p corrected for 2 comparisons (Holm)"
    says("*", f"paired t-test over 5 seeds, {of_all}", f"paired t-test over 2 seeds, {of_all}")


def test_a_missing_scipy_is_named(at, capsys, hide):  # noqa: F811
    pair(seeds=2)
    hide("scipy")
    error = script_that_fails(at, capsys, "compare.py", ["*"]).err
    assert "error: a p-value needs scipy" in error and "pip install scipy" in error


def test_one_run_each_does_not_decide(says):
    write_run("out/a", [4, 3], weight_decay=0.1)
    write_run("out/b", [4, 2.9], weight_decay=0.2)
    text = says("out", "; one pair of runs cannot tell a change from chance")
    assert "training losses differ is" not in text  # they are equal in the whole of these runs
    first, second, compare = map(shlex.split, text.split("    python ")[1:])
    assert first[0] == "sweep.py" and "--seed=1,2,3" in first
    assert "--weight_decay=0.2" in second and "--weight_decay=0.2" not in first
    options = [word for word in second[1:] if "," not in word]
    assert accepted("train.py", *options)["batch_size"] == 4
    assert compare == ["compare.py", "out/a-seeds", "out/b-seeds"]
    write_run("out/b", [3.5, 2.9], weight_decay=0.2)
    says("out", "the first logged step at which their training losses differ is 0")
    for seed in (1, 2, 3):
        write_run(f"out/a-seeds/seed={seed}", [3.5, 3 + seed / 10], weight_decay=0.1, seed=seed)
    says("out", "1337,1,2,3")  # the same comparison contains the new runs


def test_only_settings_that_differ_and_matter_are_shown(says):
    write_run("a", [4, 3], wandb_run_name="x", log_interval=1, dropout=0.0, init_from="auto")
    write_run("b", [4, 3.1], wandb_run_name="y", log_interval=2, dropout=0.1)
    assert [row[0] for row in table(says("a b"))] == ["group", "dropout=0.0", "dropout=0.1"]
    write_run("a", [4, 3], {"code": "aaaa"})
    write_run("b", [4, 3.1], {"code": "bbbb", "changed": True})
    headings, *rows = table(says("a b", "b has a higher validation loss than a"))
    assert headings == ["group", "code", "val_loss", "val_bpb", "best", "commits"]
    ends = [(*row[:2], row[-1]) for row in rows]
    assert ends == [("a", "aaaa", "01234567"), ("b", "bbbb", "01234567-changed")]
    # an older run lacks a setting, which then had its default, and the seconds
    path = Path("a/metrics.jsonl")
    path.write_text(path.read_text().replace('"dropout": 0.0, ', "").replace('"seconds"', '"other"'))
    assert "dropout" not in says("a b")


def test_runs_are_told_apart_by_what_was_typed_and_not_by_commits(says):
    for seed in (1, 2, 3):
        facts = {"code": "aaaa", "commit": f"{seed // 3}" * 10, "changed": seed == 2}
        write_run(f"before/{seed}", [4, 3 + seed / 10], facts, seed=seed)
        write_run(f"after/{seed}", [4, 2.9 + seed / 10 + seed / 1000], seed=seed)
    says("before", "3.2000 ± 0.0577", "00000000,00000000-changed,11111111")
    says("before after", "after has a lower validation loss than before", "paired t-test over 3 seeds")
    says("before/1 after/1", "after/1 has a lower validation loss than before/1")
    write_run("copy", [4, 3.1], seed=1)
    says("before/1 copy", "have the same validation loss, to the last digit: what differs has had no effect")


def test_runs_that_are_not_complete(says):
    """They are marked, and compared at a step that all have reached; failed ones do not count in a mean."""
    write_run("a", [4, 3.5, 3, 2.8], learning_rate=1e-3)
    write_run("b", [4, 3.4], learning_rate=2e-3, ending="preempted")
    write_run("c", [4, 3.4, 3.1, 2.7], learning_rate=3e-3)
    text = says("a b c", "preempted", "by 0.1000 at step 10, the last one that all have evaluated;")
    assert "learning_rate=0.003 has a lower validation loss than learning_rate=0.001, by 0.1000;" in text
    write_run("d", [4, 8], learning_rate=3e-3, seed=1, ending="failed")
    write_run("e", [4, 3.4, 3.1, math.nan], learning_rate=3e-3, seed=2)
    says("c d e", "2.7000", "failed,diverged")
    write_run("h", [4, 1], learning_rate=4e-3, ending="failed")
    assert [row[0][-5:] for row in table(says("h a"))[1:]] == ["0.001", "0.004"]
    write("f", start())  # has only just started
    says("a f", "running or killed")
    write_run("g", [4], learning_rate=9.0, ending="failed")
    assert "the same" not in says("a g", "at no step after the start"), "of the initial weights"


# ------------------------------------------------------------------------------------------------------------
# what can be compared


def test_other_tokens_are_compared_by_bits_per_byte_or_refused(says):
    write_run("a", [4, 3])
    other = {"measures": MEASURES | {"dataset": "bpe", "digest": "e"}}
    write_run("b", [6, 4], other, bits=0.5, dataset="bpe")
    text = says("a b", "compared by bits per byte, since the losses are over different tokens")
    assert "dataset=bpe has a lower number of bits per byte than dataset=tiny, by 0.1000" in text
    write_run("b", [6, 2], other | {"val_text": "another"}, dataset="bpe")
    text = says("a b", "not compared: of ", "the validation texts differ too")
    assert [row[0] for row in table(text)[1:]] == ["dataset=tiny", "dataset=bpe"]
    assert "lower" not in text
    # a run of an older version records no measures, and its settings say enough
    write_run("c", [4, 3], {"measures": None, "val_text": "other"}, eval_iters=20)
    write_run("d", [4, 2], {"measures": None}, eval_iters=10)
    says("c d", "eval_iters * batch_size is 40, not 80")


def test_time_until_a_loss(says):
    """Half way between the evaluations at steps 10 and 20, of which each step takes two seconds."""
    write_run("a", [5, 4, 3, math.nan], learning_rate=1e-3)
    write_run("b", [5, 4.5, 4.2, 4], learning_rate=2e-3)
    never, first = json.loads(says("a b --loss=3.5 --json"), parse_constant=pytest.fail)["groups"]
    assert [first[f"{name}_to_loss"] for name in ("steps", "tokens", "seconds")] == [15, 15 * 256, 30]
    assert (never["runs_to_loss"], never["steps_to_loss"], first["state"]) == (0, "nan", ["diverged"])
    says("a b --loss=1.5", "loss 1.50, runs_to_loss 0, steps_to_loss nan, tokens_to_loss nan")


def test_a_picture_is_drawn_and_named_last(says):
    pair(seeds=2)
    text = says("a1 a2 b1 b2 --x=flops --picture=compare.png")
    assert text.splitlines()[-1] == "a picture: compare.png"
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")
    says("a1 b1 --picture=missing/x.png", "note: no picture: ", "cannot tell a change from chance")
