"""
What a run says on the console: the status line on a terminal, plain lines elsewhere, the time left, samples,
and in which parts of a step ranks wait.
"""

import fcntl
import json
import math
import os
import pty
import re
import struct
import termios
import threading
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from runs import TINY, column, default_plan, records, start_changed
from test_monitor import numbers_of

from isogpt.checkpoint.progress import Progress
from isogpt.data.vocabulary import of_characters
from isogpt.launch.process_group import Ranks
from isogpt.monitor.log import Logger
from isogpt.monitor.records import step_line, waiting_percent, waiting_text
from isogpt.monitor.run_report import RunReport
from isogpt.monitor.samples import TOKENS, first_lines, open_sampler
from isogpt.speed.clock import Clock
from isogpt.speed.devices import Peak
from model import GPT, GPTConfig

ALONE = Ranks(0, 1, torch.device("cpu"), "none", hosts=("a",))
SAMPLED = {"sample_interval": 5, "seed": 1}


def received(columns, start):
    """What a terminal receives from a run, which `start` starts on the terminal of this name."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    pieces = []

    def read():
        with suppress(OSError):  # every process has closed the terminal
            while True:
                pieces.append(os.read(master, 4096))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    start(os.ttyname(slave)).wait()
    os.close(slave)
    reader.join(30)
    os.close(master)
    return b"".join(pieces).decode()


# train.py in which other lines are printed while a status line is shown
OTHERS = """
from isogpt.common import console
from isogpt.monitor import records
format_seconds = console.duration
def duration(seconds):
    console.print_error("a problem")
    return format_seconds(seconds)
records.duration = duration
"""


@pytest.mark.parametrize("columns", [80, 30])
def test_a_run_on_a_terminal(zygote, work, columns):
    """Steps are shown in place, other lines stay above, and no status line is longer than a row."""
    args = ["--max_iters=11", "--eval_interval=4", "--out_dir=out"]
    env = {"TERM": "xterm", "COLUMNS": ""}  # pytest-xdist sets COLUMNS
    output = received(columns, lambda tty: start_changed(zygote, OTHERS, args, work, env=env, out=tty))
    # each row is drawn after the last time that it was erased; a status line that wraps would be several
    rows = [row.rpartition("\x1b[J")[2].strip("\r") for row in output.split("\n")]
    rows = [row for row in rows if row]
    drawn = re.findall(r"\x1b\[J(iter \d+: [^\r\n]+)\r", output)
    assert len(drawn) >= 12 and all(len(text) < columns for text in drawn)
    if columns == 80:
        line = r"iter 11: loss \d\.\d{4}, time [\d.]+ms, mfu \S+, \d:\d\d left, [\d,]+ tokens/s"
        assert re.match(line, drawn[-1])
        assert rows.count("error: a problem") >= 3
        assert sum(row.startswith("saved out/step_") for row in rows) == 3
        assert rows[-2].endswith("sample.py --out_dir=out") and rows[-1] == "the loss curve: out/loss.png"
    assert sum(row.startswith("step ") for row in rows) == 4, "the evaluations"
    assert not any(row.startswith("iter ") for row in rows), "the status line is removed"


def test_where_lines_cannot_be_drawn_again_they_are_plain(zygote, work):
    args, env = [*TINY, "--max_iters=1"], {"TERM": "dumb"}
    output = received(80, lambda tty: zygote.start(args, work, env=env, out=tty))
    assert "\x1b" not in output and output.count("\niter ") == 2


def test_what_is_told_of_a_step(monkeypatch):
    """Means and maxima over the ranks and since the last logged step; the time left after ten steps."""
    now, told = 0.0, []
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = Progress(64)
    logger = Logger(progress, [SimpleNamespace(write=lambda *args: told.append(args))])
    reader = SimpleNamespace(device=ALONE.device)
    config, peak = {"log_interval": 4, "max_iters": 16}, Peak(ALONE.device, "float32", flops=1e11)
    report = RunReport(logger, config, *[None] * 5, reader=reader, flops_per_step=1e9, peak=peak)
    for progress.step in range(17):
        now += 8.0 if progress.step == 11 else 1.0  # an evaluation takes 7 s
        numbers = numbers_of(3.0, 15.5 + progress.step, step_ms=[100, 300], data_ms=[1, 5])
        report.step(numbers._replace(loss=numbers.loss + progress.step), 1e-3)
        progress.tokens += 64
    steps, lines = zip(*told, strict=True)
    assert [record["loss_mean"] for record in steps] == [2, 4.5, 8.5, 12.5, 16.5]
    assert [record["left_s"] for record in steps] == [None, None, None, pytest.approx(4 * 1.7), 0]
    record = steps[3]
    expected = {"iter": 12, "loss": 14, "grad_norm": 28**0.5, "lr": 1e-3, "tokens": 832, "tokens_per_s": 320}
    expected |= {"step_ms": 200, "step_ms_max": 300, "data_ms": 3, "data_ms_max": 5, "mfu": 0.05}
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    assert lines[3].startswith("iter 12: loss 14.0000, time 200.00ms, mfu 5.00%, 0:07 left, 320 tokens/s")
    report.peak.flops = None
    unknown = report.record(numbers, 0.0)
    assert unknown["mfu"] is None and "mfu n/a" in step_line(unknown)


# ------------------------------------------------------------------------------------------------------------
# samples


@pytest.mark.parametrize("nproc, layout", [(1, []), (2, ["--zero=1"]), (2, ["--cp=2"])])
def test_samples_change_no_bit_of_training(zygote, work, nproc, layout):
    """Nor the random numbers of dropout."""
    dropout = [] if "--cp=2" in layout else ["--dropout=0.1"]
    args = ["--max_iters=2", "--eval_interval=3", *layout, *dropout]
    zygote.train([*args, "--out_dir=without"], work, nproc)
    told = "--alert_command=cat >> told.jsonl"
    run = zygote.train([*args, "--sample_interval=2", "--out_dir=with", told], work, nproc)
    for name in ("loss", "val_loss", "grad_norm"):
        assert column(work / "with", name) == column(work / "without", name)
    texts = {r["iter"]: r["sample"] for r in records(work / "with") if r.get("event") == "sample"}
    assert [*texts] == [0, 2, 3] and len({*texts.values()}) > 1
    assert all(len(text) == 151 and text[0] == "\n" for text in texts.values())
    lines = [line for line in run.text().splitlines() if line.startswith("sample:  ")]
    assert 3 <= len(lines) <= 6 and all(len(line) < 80 for line in lines)
    events = [json.loads(line)["event"] for line in (work / "told.jsonl").read_text().splitlines()]
    assert sorted(events) == ["end", "start"], "neither saves nor samples"


@pytest.mark.parametrize("arch", ["llama", "nanochat"])
def test_a_sample_is_what_the_model_writes(arch):
    letters = of_characters({chr(97 + i): i for i in range(20)})
    args = dict(arch=arch, n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=24)
    model = GPT(GPTConfig(**args, dropout=0.5, tied=True), seed=1).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    text = open_sampler(SAMPLED, letters, default_plan(), ALONE).write(model, nullcontext())
    assert model.training and all(p.grad is None for p in model.parameters())
    idx = torch.tensor([[0]])  # the vocabulary contains no line's end
    ids = model.eval().generate(idx, TOKENS, 0.8, 200, vocab_size=20, seed=1)
    assert text == "".join(chr(97 + i) for i in ids[0].tolist())


@pytest.mark.parametrize("layout, named", [({"zero": 2, "tp": 2}, "zero 2, tp 2"), ({"pp": 2}, "pp 2")])
def test_samples_need_the_whole_model_on_one_process(layout, named, capsys):
    """The run goes on without samples: the setting may come from a config."""
    assert open_sampler(SAMPLED, of_characters({"a": 0}), default_plan(**layout), ALONE) is None
    assert f"but {named} divides it, so no samples are written. Run sample.py" in capsys.readouterr().out


def test_two_lines_of_a_sample_are_shown():
    text = "\n\ndef main(\n    \n\treturn\x1b[2J\x07 1\nthird"
    assert first_lines(text) == ["def main(", "    return [2J  1"]
    assert first_lines("x" * 100) == ["x" * 70, "x" * 30] and first_lines("\n ") == []


# ------------------------------------------------------------------------------------------------------------
# waiting


@pytest.mark.parametrize(
    "laps, share",
    [
        ({"data": 5, "last gradient": 50, "backward": 20, "reduce": 4, "agree": 6, "optimizer": 15}, 0.3),
        ({"data": 5, "stages": 50, "pipeline": 25, "reduce": 5, "agree": 5, "optimizer": 10}, 0.35),
        ({"data": 5, "backward": 80, "reduce": 5, "agree": 10}, math.nan),  # no gradient was seen
    ],
)
def test_the_share_of_a_step_in_which_a_rank_waits(monkeypatch, laps, share):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock(torch.device("cpu"))
    clock.waits_in_pipeline = "pipeline" in laps
    for _ in range(3):  # of which the first is known
        clock.start()
        for name, ms in laps.items():
            with clock.part("stages") if name == "stages" else nullcontext():
                now += ms / 1e3
            if name == "last gradient":
                clock.note_gradient(torch.zeros(()))
            elif name != "stages":
                clock.lap(name)
        with clock.part("evaluation"):
            now += 1
        clock.step()
    assert clock.waiting_share() == pytest.approx(share, nan_ok=True)


def test_what_the_slowest_rank_costs_is_not_communication():
    """The rank that arrives last waits for no other: what it spends in communication is communication."""
    times = {"data_ms": [0, 10], "step_ms": [90, 110]}
    found = waiting_percent(numbers_of(1.0, 1.0, waiting=[0.4, 0.1], **times))
    assert found == pytest.approx({"data_percent": 5, "comm_percent": 10, "slowest_percent": 15})
    text = "waiting: 10% of a step for communication, 15% for the slowest rank, 5% for data"
    assert waiting_text(found) == text and waiting_text(found | {"comm_percent": None}) == ""
    unknown = waiting_percent(numbers_of(1.0, 1.0, waiting=[0.4, math.nan], **times))
    assert math.isnan(unknown["comm_percent"]) and math.isnan(unknown["slowest_percent"])


@pytest.mark.parametrize(
    "nproc, layout, is_known",
    [(1, [], False), (2, [], True), (2, ["--pp=2"], True), (2, ["--zero=3"], False)],
)
def test_a_run_says_in_which_parts_of_a_step_ranks_wait(zygote, work, nproc, layout, is_known):
    run = zygote.train(["--max_iters=9", "--log_interval=3", "--out_dir=out", *layout], work, nproc)
    for name in ("comm_percent", "slowest_percent"):
        found = [*column(work / "out", name).values()]
        assert len(found) == 4 and found[:2] == [None] * 2, "the first step has not been timed yet"
        assert all(0 <= value <= 100 for value in found[2:]) if is_known else found == [None] * 4
    lines = re.findall(r"waiting: \d+% of a step for communication, \d+% for the slowest rank", run.text())
    assert len(lines) == (3 if is_known else 0), "two steps, and the end"
    assert all(value >= 0 for value in column(work / "out", "data_percent").values())


def test_with_a_profile_the_parts_of_a_step_are_nvtx_ranges(monkeypatch):
    """On a GPU: a range begins with its name, which the clock knows from the step before."""
    told, gpu = [], torch.device("cuda")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    assert not Clock(gpu).nvtx and not Clock(torch.device("cpu"), nvtx=True).nvtx
    clock = Clock(gpu, nvtx=True)
    clock.on_gpu = False  # the times are the CPU's
    for _ in range(2):
        clock.start()
        clock.lap("data")
        with clock.part("stages"):
            pass
        clock.lap("pipeline")
        clock.step()
    assert told == ["stages", "end", "data", "end", "pipeline", "stages", "end", "end"]
