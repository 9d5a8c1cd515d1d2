"""What grows with ranks, bytes, parameters and steps (measure/growth.py): counted, not timed."""

import itertools
import json
import math
import random
import threading

import pytest
from growth import loop_memory, metrics

from isogpt.checkpoint.owner import write_owner
from isogpt.common import files
from isogpt.common.files import as_record, read_records
from isogpt.monitor import curves, sink_plot
from isogpt.monitor.records import as_json
from isogpt.monitor.sink_metrics import MetricsFile, cut_back
from isogpt.monitor.sink_plot import Plot

# -- newer_checkpoints

# -- open_files

# -- gloo

# -- store

# -- read_ahead

# -- hashing

# -- initial_weights

# -- metrics


def test_training_reads_as_much_of_a_long_log_as_of_a_short_one():
    short, long = ({c.unit: c.amount for c in metrics((steps,))} for steps in (1_500, 12_000))
    for name in ("a resume", "an evaluation"):
        bytes_read = f"bytes that {name} reads"
        assert abs(long[bytes_read] - short[bytes_read]) < 100
    assert long["bytes that an evaluation reads"] < 1000 and long["MB at peak"] < 1.5 * short["MB at peak"]


def kept_by_definition(lines, step, repeats_evaluation):
    """What metrics.jsonl keeps when it is cut back to `step`, from reading all of it."""
    records = [r for r in map(as_record, lines) if r is not None]
    kept = [r for r in records if "event" in r or r["iter"] < step]
    evaluations = [r for r in records if "val_loss" in r and r["iter"] == step][-1:]
    return kept + (evaluations if not repeats_evaluation else [])


@pytest.mark.parametrize("seed", range(12))
def test_cutting_the_log_back_keeps_what_reading_all_of_it_would_keep(tmp_path, seed, monkeypatch):
    """Steps, evaluations and events in a run's order, and what a kill or somebody else leaves."""
    rng, path, lines = random.Random(seed), tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(files, "BLOCK", rng.choice([1, 7, 200, 2**16]))
    for step in range(rng.choice([0, 1, 12])):
        if step % 4 == 0:
            lines.append(json.dumps({"iter": step, "train_loss": 1.0, "val_loss": rng.random()}))
        lines.append(json.dumps({"iter": step, "loss": 1.0, "text": "x" * rng.randrange(300)}))
        lines += [json.dumps({"event": "save", "iter": step})] * rng.randrange(3)
    torn = rng.choice(["", '{"iter": 12, "lo', '{"iter": 12, "train_loss": 1.0, "val_loss": 2.0}', "\0\0"])
    path.write_text("".join(line + "\n" for line in lines) + rng.choice(["", "\n"]) + torn)
    for step in (13, 12, 8, 5, 0):
        repeats = rng.random() < 0.5
        expected = kept_by_definition(path.read_bytes().split(b"\n"), step, repeats)
        cut_back(path, step, repeats)
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        assert sorted(map(json.dumps, kept)) == sorted(map(json.dumps, expected))
        assert [r["iter"] for r in kept if "loss" in r] == [r["iter"] for r in expected if "loss" in r]


def test_a_log_that_is_cut_back_changes_no_other_file(tmp_path):
    """It may be a link, or have a second name in a backup of the folder."""
    text = "".join(json.dumps({"iter": step, "loss": 1.0}) + "\n" for step in range(9))
    for name in ("symlink_to", "hardlink_to"):
        out, other = tmp_path / name, tmp_path / f"{name}.jsonl"
        out.mkdir()
        other.write_text(text)
        log = out / "metrics.jsonl"
        getattr(log, name)(other)
        MetricsFile({"out_dir": str(out), "max_iters": 9, "eval_interval": 9}, 5).file.close()
        assert other.read_text() == text and not log.is_symlink()
        assert [json.loads(line)["iter"] for line in log.read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_a_run_that_has_lost_its_folder_does_not_write_to_the_log(tmp_path):
    config = {"out_dir": str(tmp_path), "max_iters": 99, "eval_interval": 9}
    write_owner(tmp_path, "one", None)
    one = MetricsFile(config, 0, "one")
    for step in range(9):
        one.write({"iter": step, "loss": 1.0}, "")
    write_owner(tmp_path, "two", None)
    two = MetricsFile(config, 5, "two")
    with pytest.raises(ValueError, match="a different run was started"):
        one.write({"iter": 9, "loss": 1.0}, "")
    with open(tmp_path / "metrics.jsonl", "a") as file:  # as of somebody who ignores the owner
        file.write("a note\n")
    two.write({"iter": 5, "loss": 2.0}, "")
    assert [r["iter"] for r in read_records(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_a_thinned_curve_is_that_of_the_whole_run(tmp_path, monkeypatch):
    """Whenever a run was stopped or rolled back, the points are the same; they are few and evenly spread."""
    monkeypatch.setattr(curves, "LIMIT", 50)
    records = []
    for step in range(0, 3000, 3):
        if step % 30 == 0:
            records.append({"iter": step, "train_loss": step / 2, "val_loss": math.nan if step % 60 else 1.0})
        records.append({"iter": step, "loss": step + 0.5, "loss_mean": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(as_json(r)) + "\n" for r in [{"event": "start"}, *records]))
    whole = curves.Curves()
    for record in records:
        whole.add(record)
    assert curves.read_curves(path) == whole
    for began, rollback in ((600, 2400), (2400, 600), (2994, 2997)):
        later, past = curves.Curves(), curves.read_curves(path, began)
        for r in records:
            if r["iter"] >= began:
                later.add(r)
        later, began = later.before(rollback), min(began, rollback)
        for r in records:
            if r["iter"] >= max(began, rollback):
                later.add(r)
        joined = past.before(began).followed_by(later)
        assert {n: c.shown()[-1] for n, c in joined.by_name()} == {
            n: c.shown()[-1] for n, c in whole.by_name()
        }
        if rollback > began:
            assert joined == whole
    steps = [step for step, _ in whole.loss.points]
    assert 25 <= len(steps) <= 50 and {b - a for a, b in itertools.pairwise(steps)} <= {63, 66}
    assert whole.loss.shown()[-1] == (2997, 2997.5)


class Slow(Plot):
    """A plot for which the test lets go."""

    def __init__(self, *args):
        super().__init__(*args)
        self.release, self.drawn = threading.Semaphore(0), []  # the last step of each plot

    def draw(self, losses, began):
        self.release.acquire(timeout=60)
        self.drawn.append(losses.loss.last[0][0])
        self.result = "the loss curve: loss.png"


def test_a_slow_plot_delays_no_step_and_the_last_one_is_complete(tmp_path, capsys):
    plot = Slow(str(tmp_path), 0)
    for step in range(8):
        plot.write({"iter": step, "loss": 1.0, "step_ms": 1.0}, "")
        if step in (1, 3, 5):
            plot.write({"iter": step, "train_loss": 1.0, "val_loss": 1.0}, "")
    assert not plot.is_idle.is_set() and not plot.drawn
    for _ in range(2):
        plot.release.release()
    plot.write({"event": "end"}, "")
    assert plot.drawn == [1, 7], "one at a time, and the last steps are there"
    assert capsys.readouterr().out.count("the loss curve: loss.png") == 1


def test_a_plot_that_fails_or_never_ends_is_said_at_the_end(tmp_path, capsys, monkeypatch):
    (tmp_path / "loss.png").mkdir()
    for kind in (Plot, Slow):
        monkeypatch.setattr(sink_plot, "END_S", 60 if kind is Plot else 0.01)
        plot = kind(str(tmp_path), 0)
        plot.write({"iter": 0, "loss": 1.0, "step_ms": 1.0}, "")
        plot.write({"event": "end"}, "")
        assert "no plot of the loss curve: " in capsys.readouterr().out
    plot.release.release()
    assert plot.is_idle.wait(60)


# -- shuffle

# -- failure_report

# -- sharded_metadata

# -- buckets

# -- memory_of_saves

# -- loop_memory


@pytest.mark.slow
def test_a_run_that_evaluates_and_saves_takes_no_more_memory_with_each_step():
    (cost,) = loop_memory(steps=2000, evaluations=100)
    assert cost.amount < 2e6
