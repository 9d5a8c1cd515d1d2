"""
What a run says on the console: the status line on a terminal, plain lines elsewhere, the time left, samples,
and in which parts of a step ranks wait.
"""

import fcntl
import math
import os
import pty
import re
import struct
import sys
import termios
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from runs import TINY, column, default_plan, records
from test_monitor import numbers_of

from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.data.vocabulary import Vocabulary
from isogpt.launch.process_group import Ranks
from isogpt.monitor.log import Logger
from isogpt.monitor.pace import TimeLeft
from isogpt.monitor.records import waiting_percent, waiting_text
from isogpt.monitor.run_report import RunReport
from isogpt.monitor.samples import CHARACTERS, first_lines, open_sampler
from isogpt.monitor.sink_console import Console
from isogpt.monitor.status_line import REDRAW_S, Status, status_text
from isogpt.speed.clock import WAITING, Clock
from model import GPT, GPTConfig

HALFWAY = Status(step=1025, last_step=2050, loss=1.4321, tokens_per_s=15432.1, left_s=62)


class Terminal:
    """A terminal whose output is read in the background, and what its screen then shows."""

    def __init__(self, columns=80):
        self.master, self.slave = pty.openpty()
        self.resize(columns)
        self.received = b""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def resize(self, columns):
        self.columns = columns
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self):
        while True:
            try:
                data = os.read(self.master, 4096)
            except OSError:  # every process has closed the terminal
                return
            self.received += data

    def hang_up(self):
        """Close the terminal, as its window does, while programs still use it."""
        os.close(self.master)
        with suppress(OSError):  # the reader was not reading
            os.write(self.slave, b"\n")  # ends the reader's read, which kept the terminal open
        self.reader.join(30)
        assert not self.reader.is_alive()

    def close(self):
        """Wait until everything was read."""
        os.close(self.slave)
        self.reader.join(30)
        os.close(self.master)
        return self.received.decode()


def screen(output, columns=80):
    """The rows that a terminal shows after an output. No row is higher than the cursor but those above."""
    rows, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[J|\r|\n|[^\x1b\r\n]", output):
        if piece == "\x1b[J":
            rows = [*rows[:row], rows[row][:column]]
        elif piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
        else:
            if column == columns:  # the terminal wraps
                row, column = row + 1, 0
            if row == len(rows):
                rows.append("")
            rows[row] = rows[row][:column] + piece + rows[row][column + 1 :]
            column += 1
        if row == len(rows):
            rows.append("")
    return rows


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns, whose method `sink` returns a console that prints to it."""
    opened = Terminal()
    opened.stream = open(os.dup(opened.slave), "w")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)

    def sink():
        # not before the test begins: pytest captures the output of fixtures and tests separately
        monkeypatch.setattr(sys, "stdout", opened.stream)
        monkeypatch.setattr(sys, "stderr", opened.stream)
        return Console()

    opened.sink = sink
    return opened


def shown(terminal):
    """What the screen shows after everything was written, without empty rows at the end."""
    terminal.stream.close()
    return [*filter(None, screen(terminal.close(), terminal.columns))]


def test_one_line_is_drawn_in_place_and_others_above_it(terminal, monkeypatch):
    sink = terminal.sink()
    monkeypatch.setattr("isogpt.monitor.status_line.REDRAW_S", 0)
    record = {"iter": 410, "train_loss": 1.5, "val_loss": 1.6}
    for step in range(400, 420):
        sink.status(HALFWAY._replace(step=step))
        sink.step({}, 1.0)  # prints nothing: the status line contains the step
        if step == 410:
            sink.evaluation(record, 1e-3)
            sink.event({"event": "save"}, "saved out/step_00000410")
            sink.print("x" * 200)  # longer than a row
            console.print_error("a problem")
    rows = shown(terminal)
    assert rows == [
        "step 410: train loss 1.5000, val loss 1.6000",
        "saved out/step_00000410",
        *("x" * 80, "x" * 80, "x" * 40),
        "error: a problem",
        "step 419/2050  20%  loss 1.4321  val 1.6000  15,432 tokens/s  1:02 left",
    ]


def test_short_steps_do_not_flood_a_terminal(terminal):
    sink = terminal.sink()
    for step in range(10_000):
        sink.status(HALFWAY._replace(step=step))
    terminal.stream.close()
    assert terminal.close().count("loss") < 1000, f"more than a line in {REDRAW_S} s"


@pytest.mark.parametrize("columns", [80, 79, 60, 40, 20, 5, 1])
def test_the_line_fits_a_terminal_that_was_resized(terminal, columns):
    sink = terminal.sink()
    sink.status(HALFWAY)
    terminal.resize(columns)
    sink.print("a")
    sink.print("b")
    terminal.stream.close()
    last = re.findall(r"\x1b\[Jb\r\n(.*)\r", terminal.close())[-1]
    assert len(last) < columns


def test_what_matters_least_is_left_out():
    status = Status(123456, 600000, 3.1234, 1_234_567.0, 101 * 3600)
    for width in range(82):
        text = status_text(status, 3.2011, width)
        assert len(text) <= width and text.startswith("step 123456/600000"[:width])
        assert ("tokens/s" in text) == (width >= 80), "a long run with all numbers just misses 80 columns"
        assert ("loss" in text) == (width >= 31)
        assert ("left" in text) == (width >= 47)


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": ""}, {"CI": "true"}, {"CI": "1"}])
def test_where_lines_cannot_be_drawn_again_they_are_plain(terminal, monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    sink = terminal.sink()
    sink.status(HALFWAY)
    record = dict(iter=7, loss=3.0, step_ms=200.0, mfu=None, tokens_per_s=1234.5, grad_norm=0.5)
    record |= dict(data_ms_max=1.5, lr=6e-4, memory_gb_max=2.5)
    sink.step(record, None)
    console.print_error("a problem")
    sink.done("done")
    terminal.stream.close()
    text = terminal.close()
    assert "\x1b" not in text
    line, error, done, _ = text.split("\r\n")
    assert line.startswith("iter 7: loss 3.0000, time 200.00ms, mfu n/a, ") and line.endswith(", 2.50 GB")
    assert (error, done) == ("error: a problem", "done")


def test_a_terminal_that_was_closed_costs_lines_not_the_run(terminal):
    sink = terminal.sink()
    sink.status(HALFWAY)
    terminal.hang_up()
    sys.stderr = open(os.devnull, "w")
    try:
        for step in range(3):
            sink.print(f"line {step}")
        sink.status(HALFWAY)
        sink.close()
    finally:
        sys.stderr.close()


def test_a_run_on_a_terminal(zygote, work):
    """The real train.py on a terminal of 80 columns: steps were shown in place, no row is too long."""
    terminal = Terminal()
    args = [*TINY, "--max_iters=29", "--eval_interval=10", "--out_dir=out"]
    env = {"TERM": "xterm", "CI": ""}
    run = zygote.start(args, work, env=env, out=os.ttyname(terminal.slave))
    run.wait(ok=False)
    output = terminal.close()
    assert run.codes == [0], output
    rows = screen(output)
    lines = [line for line in output.replace("\r\n", "\n").split("\n") if line]
    # a fast machine takes all steps within REDRAW_S: then the status line is only drawn below other lines
    drawn = [text for line in lines for text in re.findall(r"(?:\x1b\[J|^)(step \d+/29  [^\r]+)\r", line)]
    assert drawn and all(len(text) < 80 for text in drawn)
    assert re.fullmatch(r"step \d+/29  \d+%  loss \d\.\d{4}  val \d\.\d{4}  [\d,]+ tokens/s.*", drawn[-1])
    assert sum(row.startswith("step ") for row in rows) == 4, "the evaluations; the status line is removed"
    assert not any(row.startswith("iter ") for row in rows)
    assert sum(row.startswith("saved out/step_") for row in rows) == 3
    end = [row for row in rows if row][-3:]
    assert end[0].startswith("done: 30 steps in ") and end[1:] == [
        "the loss curve: out/loss.png",
        "try: python sample.py --out_dir=out",
    ]


# ------------------------------------------------------------------------------------------------------------
# the time left


def test_the_time_left_leaves_out_the_first_steps_and_counts_evaluations():
    left, now = TimeLeft(max_iters=99, eval_interval=25, at=0.0), 0.0
    found = {}
    for step in range(100):
        if step % 25 == 0:
            left.evaluated()
            now += 100.0 if step == 0 else 7.0  # the first evaluation compiles
        step_s = 30.0 if step < 3 else 2.0
        now += step_s + (9.7 if step == 60 else 0.0)  # a checkpoint
        left.took(step_s, now)
        found[step] = left.seconds(step)
    assert all(found[step] is None for step in range(9))
    assert found[9] == pytest.approx(90 * 2.0 + 4 * 100.0)  # no other evaluation is known
    assert found[24] == pytest.approx(75 * 2.0 + 4 * 100.0)
    assert found[25] == pytest.approx(74 * 2.0 + 3 * 7.0)
    assert found[59] == pytest.approx(40 * 2.0 + 2 * 7.0)
    assert found[99] == pytest.approx(7.0) and found[98] == pytest.approx(2.0 + 9.7 / 96 + 7.0)


def test_a_run_reports_where_it_is_after_each_step():
    """Also after steps that are not logged."""
    told = []
    sink = SimpleNamespace(status=told.append, step=lambda record, left_s: told.append(left_s))
    progress = Progress(tokens_per_step=1000)
    ranks = Ranks(0, 1, torch.device("cpu"), "none", hosts=("a",))
    meter = SimpleNamespace(routing=None)
    report = RunReport(Logger(progress, [sink]), meter, ranks, 20, 5, 10, 1.0, None)
    numbers = numbers_of(3.0, 1.0)._replace(step_ms=torch.tensor([50.0, 150.0], dtype=torch.double))
    for _ in range(20):
        report.step(numbers, 1e-3)
        progress.advance()
    statuses = [status for status in told if isinstance(status, Status)]
    assert [status.step for status in statuses] == [*range(20)] and len(told) == 22
    assert statuses[-1].loss == pytest.approx(2.0) and statuses[-1].tokens_per_s == pytest.approx(10_000)
    assert [status.left_s is None for status in statuses] == [True] * 9 + [False] * 11
    assert told[1] is None and told[12] == statuses[10].left_s


# ------------------------------------------------------------------------------------------------------------
# samples


def samples(out):
    """{step: text} of the samples of a run."""
    return {r["iter"]: r["sample"] for r in records(out) if r.get("event") == "sample"}


@pytest.mark.parametrize("nproc, layout", [(1, []), (2, ["--zero=1"]), (2, ["--cp=2"])])
def test_samples_change_no_bit_of_training(zygote, work, nproc, layout):
    """Nor the random numbers of dropout."""
    dropout = [] if "--cp=2" in layout else ["--dropout=0.1"]
    args = ["--max_iters=9", "--eval_interval=5", *layout, *dropout]
    zygote.train([*args, "--out_dir=without"], work, nproc)
    alerts = "--alert_command=cat >> told.jsonl"
    run = zygote.train([*args, "--sample_interval=3", "--out_dir=with", alerts], work, nproc)
    for name in ("loss", "val_loss", "grad_norm"):
        assert column(work / "with", name) == column(work / "without", name)
    found = samples(work / "with")
    assert [*found] == [0, 3, 6, 9, 10] and not samples(work / "without")
    assert all(len(text) == 151 and text[0] == "\n" for text in found.values()) and len({*found.values()}) > 1
    lines = [line for line in run.text().splitlines() if line.startswith("sample:  ")]
    assert 5 <= len(lines) <= 10 and all(len(line) < 80 for line in lines)
    assert "sample" not in {line.split('"')[3] for line in (work / "told.jsonl").read_text().splitlines()}


@pytest.mark.parametrize("arch", ["llama", "nanochat"])
def test_a_sample_is_what_the_model_writes(arch, work):
    """The text of the trained model itself, which is not changed."""

    words = Vocabulary("table", {chr(97 + i): i for i in range(20)})
    args = dict(arch=arch, n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=24)
    model = GPT(GPTConfig(**args, dropout=0.5, tied=True), seed=1).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.full_like(p, 0.01))
    config = {"sample_interval": 1, "dataset": "mine", "seed": 5}
    plan = default_plan(model_args=args)
    sampler = open_sampler(config, words, plan, Ranks(0, 1, torch.device("cpu"), "none", hosts=("a",)))
    before, state = torch.get_rng_state(), {n: p.clone() for n, p in model.named_parameters()}
    text = sampler.write(model, torch.autocast("cpu", enabled=False))
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(p, state[n]) and p.grad is None for n, p in model.named_parameters())
    idx = torch.tensor([[0]])  # the vocabulary contains no line's end
    ids = model.eval().generate(idx, CHARACTERS, 0.8, 200, vocab_size=20, seed=5)
    assert text == "".join(chr(97 + i) for i in ids[0].tolist())


ALONE = Ranks(0, 1, torch.device("cpu"), "none", hosts=("a",))
SAMPLED = {"sample_interval": 5, "dataset": "mine", "seed": 1}


@pytest.mark.parametrize(
    "layout, named",
    [
        ({"zero": 3}, "zero 3"),
        ({"zero": 2, "tp": 2}, "zero 2, tp 2"),
        ({"pp": 2}, "pp 2"),
        ({"ep": 2}, "ep 2"),
    ],
)
def test_samples_need_the_whole_model_on_one_process(layout, named, capsys):
    """The run goes on without samples: the setting may come from a config."""
    assert open_sampler(SAMPLED, Vocabulary("table", {"a": 0}), default_plan(**layout), ALONE) is None
    assert f"but {named} divides it: there are no samples. Run sample.py" in capsys.readouterr().out


def test_samples_of_ids_without_a_meaning_are_an_error_at_the_start(capsys):
    words = Vocabulary("unknown", "no meta.pkl")
    with pytest.raises(SystemExit):
        open_sampler(SAMPLED, words, default_plan(model_args={"vocab_size": 9}), ALONE)
    assert "error: sample_interval: the ids cannot be decoded: no meta.pkl" in capsys.readouterr().err
    assert open_sampler(SAMPLED | {"sample_interval": 0}, words, default_plan(), ALONE) is None


def test_two_lines_of_a_sample_are_shown():

    assert first_lines("\n\ndef main(\n    \n\treturn\x1b[2J\x07 1\nthird") == [
        "def main(",
        r"    return\x1b[2J\x07 1",
    ]
    assert first_lines("ab " * 50) == [("ab " * 23).rstrip(), ("ab " * 23).rstrip()]
    assert first_lines("x" * 100) == ["x" * 70, "x" * 30] and first_lines("\n ") == []


# ------------------------------------------------------------------------------------------------------------
# waiting


def clock_after(ms, finds_waiting=True):
    """A clock whose latest step consisted of these parts."""

    clock = Clock(torch.device("cpu"))
    clock.finds_waiting = finds_waiting
    clock.steps.append(ms)
    return clock


def test_the_share_of_a_step_in_which_a_rank_waits():

    step = {"data": 5, "forward": 20, "backward": 50, "reduce": 4, "norm": 1, "agree": 6, "optimizer": 14}
    share = clock_after({**step, WAITING: 20, "evaluation": 1000, "save": 500}).waiting_share()
    assert share == pytest.approx((20 + 4 + 6) / 100)
    assert math.isnan(clock_after(step).waiting_share()), "no gradient was seen"
    assert math.isnan(clock_after({**step, WAITING: 20}, finds_waiting=False).waiting_share())
    assert math.isnan(Clock(torch.device("cpu")).waiting_share())
    pipeline = {"data": 5, "pipeline": 75, "stages": 50, "reduce": 5, "agree": 5, "norm": 5, "optimizer": 5}
    assert clock_after(pipeline).waiting_share() == pytest.approx((75 - 50 + 5 + 5) / 100)


def test_the_clock_notes_when_the_last_gradient_is_there():

    clock, weight = Clock(torch.device("cpu")), torch.nn.Parameter(torch.ones(3))
    clock.find_waiting(weight)
    (weight * 2).sum().backward()  # not timed
    clock.start()
    loss = (weight * 2).sum()
    clock.lap("forward")
    assert WAITING not in clock.spans
    loss.backward()
    clock.lap("backward")
    ((begin, end),), ((start, other),) = clock.spans[WAITING], clock.spans["backward"]
    assert start <= begin <= end == other
    for _ in range(3):
        clock.step()
    assert 0 <= clock.waiting_share() <= 1


def test_what_the_slowest_rank_costs_is_not_communication():
    """The rank that arrives last waits for no other: what it spends in communication is communication."""

    numbers = numbers_of(1.0, 1.0)._replace(
        waiting=torch.tensor([0.4, 0.1]).double(),
        data_ms=torch.tensor([0.0, 10.0]).double(),
        step_ms=torch.tensor([90.0, 110.0]).double(),
    )
    found = waiting_percent(numbers)
    assert found == pytest.approx({"data_percent": 5, "comm_percent": 10, "slowest_percent": 15})
    text = "waiting: 10% of a step for communication, 15% for the slowest rank, 5% for data"
    assert waiting_text(found) == text and waiting_text(found | {"comm_percent": None}) == ""
    unknown = waiting_percent(numbers._replace(waiting=torch.tensor([0.4, math.nan]).double()))
    assert math.isnan(unknown["comm_percent"]) and math.isnan(unknown["slowest_percent"])


@pytest.mark.parametrize(
    "nproc, layout, is_known",
    [
        (1, [], False),
        (2, [], True),
        (2, ["--exact=True"], True),
        (2, ["--islands=2", "--local_steps=3"], True),
        (2, ["--pp=2"], True),
        (2, ["--zero=3"], False),
        (2, ["--tp=2"], False),
    ],
)
def test_a_run_says_in_which_parts_of_a_step_ranks_wait(zygote, work, nproc, layout, is_known):
    run = zygote.train(["--max_iters=14", "--log_interval=7", "--out_dir=out", *layout], work, nproc)
    for name in ("comm_percent", "slowest_percent"):
        found = [*column(work / "out", name).values()]
        assert len(found) == 3 and found[0] is None, "no step has been timed yet"
        assert all(0 <= value <= 100 for value in found[1:]) if is_known else found == [None] * 3
    lines = re.findall(r"waiting: \d+% of a step for communication, \d+% for the slowest rank", run.text())
    assert len(lines) == (3 if is_known else 0), "two steps, and the end"
    assert all(value >= 0 for value in column(work / "out", "data_percent").values())


def test_the_mean_loss_between_two_logged_steps(zygote, work):
    zygote.train(["--max_iters=8", "--out_dir=all"], work)
    zygote.train(["--max_iters=8", "--log_interval=4", "--out_dir=some"], work)
    loss, means = column(work / "all", "loss"), column(work / "some", "loss_mean")
    wanted = {0: loss[0], **{end: sum(loss[i] for i in range(end - 3, end + 1)) / 4 for end in (4, 8)}}
    assert means == pytest.approx(wanted, abs=1e-12) and column(work / "all", "loss_mean") == loss


def test_with_a_profile_the_parts_of_a_step_are_nvtx_ranges(monkeypatch):
    """On a GPU, if this PyTorch has NVTX."""

    told, gpu = [], torch.device("cuda")
    assert not Clock(gpu, nvtx=True).nvtx or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda.nvtx, "mark", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    assert not Clock(gpu).nvtx and not Clock(torch.device("cpu"), nvtx=True).nvtx and not told
    clock = Clock(gpu, nvtx=True)
    clock.on_gpu = False  # the times are the CPU's
    told.clear()
    for _ in range(2):
        clock.start()
        clock.lap("data")
        with clock.part("stages"):
            pass
        clock.lap("pipeline")
        clock.step()
    first, later = ["stages", "end"], ["data", "end", "pipeline", "stages", "end", "end"]
    assert told == first + later, "a range begins with its name, which the clock knows from the step before"
