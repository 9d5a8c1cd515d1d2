"""
What a run says, and to whom: the console with its status line, samples and waiting ranks; the logger and its
sinks; garbage.
"""

import json
import math
import os
import pty
import re
import shlex
import signal
import sys
import termios
import threading
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from runs import REPO, TINY, column, default_plan, records, start_changed, steps_in, wait_for

from isogpt.checkpoint.owner import write_owner
from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.data.vocabulary import of_characters
from isogpt.launch.process_group import Ranks
from isogpt.monitor import log, sink_alerts, sink_wandb
from isogpt.monitor.log import Logger
from isogpt.monitor.run_report import RunReport
from isogpt.monitor.samples import TOKENS, open_sampler
from isogpt.monitor.sink_console import Console
from isogpt.monitor.sink_files import MetricsFile
from isogpt.monitor.sink_tensorboard import TensorBoard
from isogpt.monitor.step_policy import StepPolicy
from isogpt.speed.clock import Clock
from isogpt.speed.devices import Peak
from isogpt.training.step_numbers import StepNumbers
from model import GPT, GPTConfig

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU, "none", hosts=("a",))
SAMPLED = {"sample_interval": 5, "seed": 1}


def numbers_of(loss, grad_square, loss_scale=1.0, **more):
    """The numbers of two ranks, the second of which computed these."""
    facts = {name: torch.zeros(2).double() for name in StepNumbers._fields}
    facts |= {"loss": [1.0, loss], "grad_square": [0.5, grad_square], "loss_scale": [loss_scale] * 2, **more}
    return StepNumbers(**{name: torch.as_tensor(values).double() for name, values in facts.items()})


def keep(told):
    """A sink that appends what it is told to a list."""
    return SimpleNamespace(write=lambda *args: told.append(args))


# ------------------------------------------------------------------------------------------------------------
# the console


def received(columns, start):
    """What a terminal receives from a run, which `start` starts on the terminal of this name."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
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


@pytest.mark.parametrize("term, columns", [("xterm", 80), ("xterm", 30), ("dumb", 80)])
def test_a_run_on_a_terminal(zygote, work, term, columns):
    """
    Steps are shown in place, other lines stay above, and no status line is longer than a row. Where lines
    cannot be drawn again, they are plain.
    """
    args = ["--max_iters=11", "--eval_interval=4", "--out_dir=out"]
    env = {"TERM": term, "COLUMNS": ""}  # pytest-xdist sets COLUMNS
    output = received(columns, lambda tty: start_changed(zygote, OTHERS, args, work, env=env, out=tty))
    # each row is drawn after the last time that it was erased; a status line that wraps would be several
    rows = [row.rpartition("\x1b[J")[2].strip("\r") for row in output.split("\n")]
    rows = [row for row in rows if row]
    drawn = re.findall(r"\x1b\[J(iter \d+: [^\r\n]+)\r", output)
    if term == "dumb":
        assert "\x1b" not in output and sum(row.startswith("iter ") for row in rows) == 12
        return
    assert len(drawn) >= 12 and all(len(text) < columns for text in drawn)
    if columns == 80:
        line = r"iter 11: loss \d\.\d{4}, time [\d.]+ms, mfu \S+, \d:\d\d left, [\d,]+ tokens/s"
        assert re.match(line, drawn[-1])
        assert rows.count("error: a problem") >= 3
        assert sum(row.startswith("saved out/step_") for row in rows) == 3
        sample = shlex.quote(os.path.relpath(REPO / "sample.py", work))
        assert rows[-2:] == [f"try: python {sample} --out_dir=out", "the loss curve: out/loss.png"]
    assert sum(row.startswith("step ") for row in rows) == 4, "the evaluations"
    assert not any(row.startswith("iter ") for row in rows), "the status line is removed"


def test_what_is_told_of_a_step(monkeypatch):
    """
    Means and maxima over the ranks and since the last logged step; the time left after ten steps. The rank
    that arrives last waits for no other: what it spends in communication is communication.
    """
    now, told = 0.0, []
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = Progress(64)
    logger = Logger(progress, [keep(told)])
    run = SimpleNamespace(config={"log_interval": 4, "max_iters": 16})
    reader, saver = SimpleNamespace(device=CPU), SimpleNamespace(poll=lambda: None)
    state = SimpleNamespace(progress=progress)
    report = RunReport(run, None, state, reader, saver, None, logger, 1e9, Peak(1e11))
    of_ranks = {"step_ms": [100, 300], "data_ms": [0, 20], "waiting": [0.4, 0.1]}
    for progress.step in range(17):
        now += 8.0 if progress.step == 11 else 1.0  # an evaluation takes 7 s
        numbers = numbers_of(3.0, 15.5 + progress.step, **of_ranks)
        report.step(numbers._replace(loss=numbers.loss + progress.step), 1e-3)
        progress.tokens += 64
    steps, lines = zip(*told, strict=True)
    assert [record["loss_mean"] for record in steps] == [2, 4.5, 8.5, 12.5, 16.5]
    assert [record["left_s"] for record in steps] == [None, None, None, pytest.approx(4 * 1.7), 0]
    record = steps[3]
    expected = {"iter": 12, "loss": 14, "grad_norm": 28**0.5, "lr": 1e-3, "tokens": 832, "tokens_per_s": 320}
    expected |= {"step_ms": 200, "step_ms_max": 300, "data_ms": 10, "data_ms_max": 20, "mfu": 0.05}
    expected |= {"data_percent": 5, "comm_percent": 10, "slowest_percent": 15}
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    assert lines[3].startswith("iter 12: loss 14.0000, time 200.00ms, mfu 5.00%, 0:07 left, 320 tokens/s")
    said = "waiting: 10% of a step for communication, 15% for the slowest rank, 5% for data"
    assert lines[3].endswith(said)
    report.peak = Peak()
    report.step(numbers._replace(waiting=torch.tensor([0.4, math.nan])), 0.0)
    record, line = told[-1]
    assert record["mfu"] is record["comm_percent"] is record["slowest_percent"] is None
    assert "mfu n/a" in line and "waiting" not in line


@pytest.mark.parametrize("opened", [os.pipe, os.openpty], ids=["a pager", "Ctrl-S"])
def test_a_run_does_not_wait_for_a_console_that_nobody_reads(monkeypatch, capsys, opened):
    monkeypatch.setattr(console, "PATIENCE_S", 0.01)
    read, write = opened()
    os.set_blocking(write, False)  # a line that would wait raises BlockingIOError
    if opened is os.openpty:
        termios.tcflow(write, termios.TCOOFF)
    logger = Logger(Progress(1), [Console()])
    with open(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        for _ in range(2000):
            logger.print("x" * 60)
        assert capsys.readouterr().err.count("warning: Console failed (nobody reads stdout") == 1
        if opened is os.openpty:
            termios.tcflow(write, termios.TCOON)
        else:
            os.read(read, 2**20)
        logger.print("read again")
        assert b"read again" in os.read(read, 2**16)
    os.close(read)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_run_whose_output_is_on_a_full_disk(zygote, work):
    """It is saved after a signal, and Python reports nothing at the end, which would change the status."""
    args = [*TINY, "--out_dir=out", "--max_iters=100000", "--sample_interval=2"]
    run = zygote.start(args, work, out="/dev/full")
    wait_for(lambda: steps_in(work / "out") > 2)
    run.kill(sig=signal.SIGTERM)
    run.wait(ok=False)
    assert run.codes == [128 + signal.SIGTERM]
    assert [r["sink"] for r in records(work / "out") if r.get("event") == "sink_failed"] == ["Console"]
    assert list((work / "out").glob("step_*/ckpt.pt"))


# ------------------------------------------------------------------------------------------------------------
# samples


@pytest.mark.parametrize("nproc, layout", [(1, []), (2, ["--zero=1"]), (2, ["--cp=2"])])
def test_samples_change_no_bit_of_training(zygote, work, nproc, layout):
    """Nor the random numbers of dropout."""
    dropout = [] if "--cp=2" in layout else ["--dropout=0.1"]
    args = ["--max_iters=2", "--eval_interval=3", *layout, *dropout]
    zygote.train([*args, "--out_dir=without"], work, nproc)
    run = zygote.train([*args, "--sample_interval=2", "--out_dir=with"], work, nproc)
    for name in ("loss", "val_loss", "grad_norm"):
        assert column(work / "with", name) == column(work / "without", name)
    texts = {r["iter"]: r["sample"] for r in records(work / "with") if r.get("event") == "sample"}
    assert [*texts] == [0, 2, 3] and len({*texts.values()}) > 1
    assert all(len(text) == 151 and text[0] == "\n" for text in texts.values())
    lines = [line for line in run.text().splitlines() if line.startswith("sample:  ")]
    assert 3 <= len(lines) <= 6 and all(len(line) < 80 for line in lines)


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
    assert open_sampler(SAMPLED, of_characters({"a": 0}), default_plan(**layout), ALONE).interval == 0
    assert f"but {named} divides it, so no samples are written. Run sample.py" in capsys.readouterr().out


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
    clock = Clock(CPU)
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


def test_what_a_clock_knows_while_a_step_is_taken(monkeypatch):
    """
    Only a step after the first is watched: compilation, an evaluation and a slow disk are no hang. With a
    profile on a GPU, parts are NVTX ranges, which begin with their names, known from the step before.
    """
    told, watched, gpu = [], [], torch.device("cuda")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    assert not Clock(gpu).nvtx and not Clock(CPU, nvtx=True).nvtx
    clock = Clock(gpu, nvtx=True)
    clock.on_gpu = False  # the times are the CPU's
    for _ in range(2):
        watched.append(clock.expects_progress)
        clock.start()
        watched.append(clock.expects_progress)
        clock.lap("data")
        with clock.part("stages"):
            pass
        clock.lap("pipeline")
        clock.step()
    assert told == ["stages", "end", "data", "end", "pipeline", "stages", "end", "end"]
    clock.start()
    clock.discard()
    assert watched == [False, False, False, True] and not clock.expects_progress


# ------------------------------------------------------------------------------------------------------------
# sinks that fail


def test_a_sink_that_fails_warns_once_and_is_tried_again(capsys):
    failing, working = Mock(), Mock()
    failing.write.side_effect = [ConnectionResetError("Connection lost")] * 3 + [None, None]
    logger = Logger(Progress(1), [failing, working])
    for step in range(4):
        logger.write({"iter": step})
    seen = [call.args[0].get("event") or call.args[0]["iter"] for call in working.write.call_args_list]
    assert seen == ["sink_failed", 0, 1, 2, 3] and failing.write.call_count == 5, "the event was lost, too"
    said = "warning: Mock failed (Connection lost); training continues, and it is tried again\n"
    assert capsys.readouterr().err == said


def test_the_log_is_appended_to_by_its_name(tmp_path):
    """A removed file is begun anew, and a line that a kill or a full disk has torn does not tear the next."""
    path = tmp_path / "metrics.jsonl"
    write_owner(tmp_path, "me", None)
    logger = Logger(Progress(1), [MetricsFile(str(tmp_path), "me")])
    logger.write({"iter": 0})
    path.unlink()
    logger.write({"iter": 1})
    with open(path, "a") as file:
        file.write('{"iter": 2, "lo')
    logger.write({"iter": 3})
    assert [r["iter"] for r in records(tmp_path)] == [1, 3] and not logger.failed_sinks


def test_tensorboard_begins_a_new_file_after_an_error(tmp_path, monkeypatch):
    """At an evaluation: its thread has ended, and raises an error for ever."""
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    logger = Logger(Progress(1), [TensorBoard(str(tmp_path), Progress(1))])
    step = {"loss": 1.0, "step_ms": 1.0}
    with monkeypatch.context() as patch:
        patch.setattr(writer, "add_scalar", Mock(side_effect=OSError("a full disk")))
        logger.write({"iter": 0, **step})
    for record in ({"iter": 1, **step}, {"iter": 2, "val_loss": 1.0}, {"iter": 2, **step}):
        logger.write(record)
    logger.event("end")
    assert logger.failed_sinks == {"TensorBoard"} and len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_a_wandb_that_fails_is_tried_again_and_one_that_blocks_does_not_block_the_run(monkeypatch, capsys):
    wandb, lost, may_log = Mock(), ConnectionResetError("Connection lost"), threading.Event()
    run = wandb.init.return_value
    run.id, run.log.side_effect = "new", [None, lost, None]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = {"wandb_log": True, "tensorboard_log": False, "wandb_project": "p", "wandb_run_name": "n"}
    logger = Logger(Progress(1), [Mock()])
    logger.start_services(config)
    for step in range(3):
        logger.write({"iter": step, "loss": 1.0})
    logger.event("end")
    assert logger.failed_sinks == {"Wandb"} and logger.progress.wandb_id == "new"
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [0, 1, 2] and run.finish.called

    monkeypatch.setattr(log, "WAITING", 3)
    monkeypatch.setattr(log, "END_S", 0.1)
    run.log.side_effect = lambda *args, **options: may_log.wait()
    logger = Logger(Progress(1), [log.InThread(sink_wandb.Wandb(config, None))])
    for step in range(5):
        logger.write({"iter": step, "loss": 1.0})
    logger.event("end")
    assert "Wandb failed (it has not taken 3 records); training continues" in capsys.readouterr().err
    may_log.set()  # the thread ends


def test_alert_commands_that_do_not_end_are_killed_with_what_they_have_started(monkeypatch, capfd, tmp_path):
    """They would go on after the run, with the file system of its log. Neither saves nor samples are told."""
    monkeypatch.setattr(sink_alerts, "LIMIT_S", 0.1)
    fifo, told = tmp_path / "fifo", tmp_path / "told"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    command = f"cat >> {told}; echo much; sleep 1000 > {fifo}; exit"
    alerts = sink_alerts.Alerts({"alert_command": command, "out_dir": "out"})
    for event in ("start", "save", "sample", "end"):
        alerts.write({"event": event}, "")
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "nobody holds its other end any more"
    assert sorted(json.loads(line)["event"] for line in open(told)) == ["end", "start"]
    assert capfd.readouterr() == ("", "")


def test_an_overflow_in_float16_is_the_gradient_s_and_not_the_loss_s():
    state = SimpleNamespace(step=7, progress=Progress(64))
    policy = StepPolicy("nan", state, None, SimpleNamespace(saver=None, logger=None))
    for loss, loss_scale, is_overflow in ((3.0, 256.0, True), (math.nan, 256.0, False), (3.0, 1.0, False)):
        assert policy.decide(numbers_of(loss, math.inf, loss_scale)) is is_overflow


# Every step leaves 50 objects that refer to themselves
CYCLES = """
import gc, weakref
from isogpt.training import precision
seed_step, collected, alive = precision.seed_step, [], weakref.WeakSet()
class Cycle:
    def __init__(self):
        self.itself = self
        alive.add(self)
def noted(seed, step, rank):
    print("before step", step, "left", len(alive), "collections", collected, flush=True)
    collected.clear()
    for _ in range(50):
        Cycle()
    seed_step(seed, step, rank)
precision.seed_step = noted
gc.callbacks.append(lambda phase, info: phase == "start" and collected.append(info["generation"]))
"""


def test_garbage_is_collected_once_in_each_step_and_does_not_grow(zygote, work):
    """Where the host waits for a GPU, and not when Python's counters of allocations say so."""
    text = start_changed(zygote, CYCLES, ["--max_iters=9"], work).wait().text()
    for step in range(2, 10):
        assert f"before step {step} left 0 collections [1]" in text
