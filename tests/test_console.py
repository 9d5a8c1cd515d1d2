"""The console: the status line on a terminal, plain lines elsewhere, and the time left."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from types import SimpleNamespace

import pytest
from runs import TINY

from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.launch.process_group import Ranks
from isogpt.monitor.log import Logger
from isogpt.monitor.pace import TimeLeft
from isogpt.monitor.run_report import RunReport
from isogpt.monitor.sink_console import Console
from isogpt.monitor.status_line import REDRAW_S, Status, status_text

from test_monitor import numbers_of  # isort: skip

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


def test_the_line_is_removed_at_the_end(terminal):
    sink = terminal.sink()
    sink.status(HALFWAY)
    sink.done("done: 3 steps in 0:01")
    sink.print("the loss curve: out/loss.png")
    sink.close()
    assert shown(terminal) == ["done: 3 steps in 0:01", "the loss curve: out/loss.png"]


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


def test_the_line_before_the_time_left_and_a_val_loss_are_known():
    text = status_text(HALFWAY._replace(left_s=None), None, 79)
    assert text == "step 1025/2050  50%  loss 1.4321  15,432 tokens/s"


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
    os.close(terminal.master)  # the window
    terminal.reader.join(30)
    sys.stderr = open(os.devnull, "w")
    try:
        for step in range(3):
            sink.print(f"line {step}")
        sink.status(HALFWAY)
        sink.close()
    finally:
        sys.stderr.close()


def test_a_run_on_a_terminal(zygote, work):
    """The real train.py on a terminal of 80 columns: every step was shown in place, no row is too long."""
    terminal = Terminal()
    args = [*TINY, "--max_iters=29", "--eval_interval=10", "--out_dir=out"]
    env = {"TERM": "xterm", "CI": ""}
    run = zygote.start(args, work, env=env, out=os.ttyname(terminal.slave))
    run.wait(ok=False)
    output = terminal.close()
    assert run.codes == [0], output
    rows = screen(output)
    lines = [line for line in output.replace("\r\n", "\n").split("\n") if line]
    drawn = [text for line in lines for text in re.findall(r"\x1b\[J(step \d+/29  [^\r]+)\r", line)]
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
        now += step_s
        left.took(step_s, now)
        found[step] = left.seconds(step)
    assert all(found[step] is None for step in range(9))
    assert found[9] == pytest.approx(90 * 2.0 + 4 * 100.0)  # no other evaluation is known
    assert found[24] == pytest.approx(75 * 2.0 + 4 * 100.0)
    assert found[25] == pytest.approx(74 * 2.0 + 3 * 7.0)
    assert found[99] == pytest.approx(7.0)


def test_a_run_reports_where_it_is_after_each_step():
    """Also after steps that are not logged."""
    told = []
    sink = SimpleNamespace(status=told.append, step=lambda record, left_s: told.append(left_s))
    progress = Progress(tokens_per_step=1000)
    import torch

    ranks = Ranks(0, 1, torch.device("cpu"), "none", hosts=("a",))
    report = RunReport(Logger(progress, [sink]), ranks, 20, 5, 10, 1.0, None)
    numbers = numbers_of(3.0, 1.0)._replace(step_ms=torch.tensor([50.0, 150.0], dtype=torch.double))
    for _ in range(20):
        report.step(numbers, 1e-3, None)
        progress.advance()
    statuses = [status for status in told if isinstance(status, Status)]
    assert [status.step for status in statuses] == [*range(20)] and len(told) == 22
    assert statuses[-1].loss == pytest.approx(2.0) and statuses[-1].tokens_per_s == pytest.approx(10_000)
    assert [status.left_s is None for status in statuses] == [True] * 9 + [False] * 11
    assert told[1] is None and told[12] == statuses[10].left_s
