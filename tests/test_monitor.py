"""
What a run says, and to whom: the console with its status line, samples and waiting ranks; the logger and its
sinks; garbage.
"""

import fcntl
import json
import math
import os
import pickle
import pty
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import termios
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from runs import (
    REPO,
    TINY,
    assert_same_run,
    column,
    default_plan,
    records,
    start_changed,
    steps_in,
    tiny_data,
    wait_for,
)

from isogpt.checkpoint.progress import Progress
from isogpt.data.vocabulary import of_characters
from isogpt.launch.process_group import Ranks
from isogpt.monitor import banner
from isogpt.monitor.log import Logger
from isogpt.monitor.samples import open_sampler
from isogpt.monitor.sink_wandb import Wandb
from isogpt.speed.clock import Clock

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU, "none", hosts=("a",))
LONG = "--max_iters=1000000"


def events(folder):
    return [r["event"] for r in records(folder) if "event" in r]


# ------------------------------------------------------------------------------------------------------------
# the console


def receive(descriptor):
    """What has arrived there since the last time."""
    pieces = []
    with suppress(OSError):  # nothing more, or every process has closed it
        while piece := os.read(descriptor, 4096):
            pieces.append(piece)
    return b"".join(pieces).decode()


def received(columns, start):
    """What a terminal receives from a run, which `start` starts on the terminal of this name."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    termios.tcsetwinsize(slave, (24, columns))
    run, pieces = start(os.ttyname(slave)), []
    wait_for(lambda: pieces.append(receive(master)) or run.poll())
    pieces.append(receive(master))
    run.wait()
    os.close(slave)
    os.close(master)
    return "".join(pieces)


# other lines are printed while a status line is shown
OTHERS = """
from isogpt.common.console import print_error
from torch.optim.optimizer import register_optimizer_step_pre_hook
register_optimizer_step_pre_hook(lambda *args: print_error("a problem"))
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
        assert rows.count("error: a problem") >= 12
        assert sum(row.startswith("saved out/step_") for row in rows) == 3
        sample = shlex.quote(os.path.relpath(REPO / "sample.py", work))
        assert rows[-2:] == [f"try: python {sample} --out_dir=out", "the loss curve: out/loss.png"]
    assert sum(row.startswith("step ") for row in rows) == 4, "the evaluations"
    assert not any(row.startswith("iter ") for row in rows), "the status line is removed"


PIPES = """
for stream in ("stdout", "stderr"):  # the zygote's are for files
    setattr(sys, stream, open(getattr(sys, stream).fileno(), "w", buffering=1, closefd=False))
"""


@pytest.mark.slow
def test_a_run_waits_neither_for_its_reader_nor_for_its_alerts(zygote, work):
    """
    A pager that reads no further; a terminal after Ctrl-S; a command that does not end: it is killed with
    what it has started, which would hold the file system of the run. What it prints is not shown.
    """
    for name in ("pager", "held"):
        os.mkfifo(work / name)
    pager, held = (os.open(work / name, os.O_RDONLY | os.O_NONBLOCK) for name in ("pager", "held"))
    fcntl.fcntl(pager, fcntl.F_SETPIPE_SZ, 2**14)
    terminal, end = pty.openpty()
    os.set_blocking(terminal, False)
    command = "read line; echo $line >> told; echo much; case $line in *start*) sleep 1000 > held;; esac"
    paged = [LONG, f"--alert_command={command}", "--save_interval=20", "--out_dir=paged"]
    runs = {
        "paged": start_changed(zygote, PIPES, paged, work, out=str(work / "pager")),
        "stopped": zygote.start([*TINY, LONG, "--out_dir=stopped"], work, out=os.ttyname(end)),
    }
    wait_for(lambda: read_beyond(terminal, 0))
    termios.tcflow(end, termios.TCOOFF)
    for name in runs:
        wait_for(lambda name=name: steps_in(work / name) > 0 and "sink_failed" in events(work / name))
        step = steps_in(work / name)
        wait_for(lambda name=name, step=step: steps_in(work / name) > step + 20)
    wait_for(lambda: "sink_failed" in (work / "told").read_text())  # the first command has been killed
    os.set_blocking(held, True)
    assert os.read(held, 1) == b"", "nobody holds its other end any more"
    termios.tcflow(end, termios.TCOON)
    for (name, run), descriptor in zip(runs.items(), (pager, terminal), strict=True):
        receive(descriptor)
        lines = wait_for(lambda d=descriptor, step=steps_in(work / name): read_beyond(d, step))
        assert "much" not in lines
        run.kill(sig=signal.SIGTERM)
        wait_for(lambda run=run, d=descriptor: receive(d) == "" and run.poll())
        assert [r["sink"] for r in records(work / name) if r.get("event") == "sink_failed"] == ["Console"]
    told = [json.loads(line)["event"] for line in (work / "told").read_text().splitlines()]
    assert told == ["start", "sink_failed", "preempted"], "not the saves"
    for descriptor in (pager, held, terminal, end):
        os.close(descriptor)


def read_beyond(descriptor, step):
    """What arrives, if it contains the line of a step after this one."""
    text = receive(descriptor)
    return text if any(int(n) > step for n in re.findall(r"iter (\d+): loss", text)) else ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_run_whose_output_is_on_a_full_disk(zygote, work):
    """It is saved after a signal, and Python reports nothing at the end, which would change the status."""
    args = [*TINY, "--out_dir=out", "--max_iters=100000", "--sample_interval=2"]
    run = zygote.start(args, work, out="/dev/full")
    wait_for(lambda: steps_in(work / "out") > 2)
    run.kill(sig=signal.SIGTERM)
    run.wait(ok=False)
    assert run.codes == [128 + signal.SIGTERM]
    assert events(work / "out").count("sink_failed") == 1
    assert list((work / "out").glob("step_*/ckpt.pt"))


ASCII = "for stream in (sys.stdout, sys.stderr): stream.reconfigure(encoding='ascii')"


def test_what_a_console_cannot_show_ends_no_run(zygote, tmp_path):
    """
    On a console that knows ASCII only: names and text that are not ASCII, and a lone surrogate, which is not
    even UTF-8.
    """
    meta = {"vocab_size": 2, "stoi": {"\u00e9": 0, "\ud800": 1}, "itos": ["\u00e9", "\ud800"]}
    (tiny_data(tmp_path, vocab=2) / "meta.pkl").write_bytes(pickle.dumps(meta))
    out = "--out_dir=r\u00e9sum\u00e9"
    args = ["--max_iters=0", "--eval_iters=1", out]
    train = start_changed(zygote, ASCII, args, tmp_path).wait()
    assert r"saved r\xe9sum\xe9/step_00000001" in train.text().splitlines()
    args = [out, "--start=\u00e9", "--num_samples=3", "--max_new_tokens=20", "--device=cpu"]
    _, *lines = start_changed(zygote, ASCII, args, tmp_path, script="sample.py").wait().samples().splitlines()
    assert len(lines) == 6 and lines[1::2] == ["---------------"] * 3
    assert all(re.fullmatch(r"\\xe9(\\xe9|\\ud800){20}", line) for line in lines[::2])
    assert r"\ud800" in "".join(lines)


@pytest.mark.slow
def test_a_closed_pipe_ends_neither_a_run_nor_what_is_printed(work):
    """
    As after `| head -3`: no traceback, and nothing about an exception that is ignored at the exit, at which a
    process of its own is needed.
    """
    train = [*TINY, "--max_iters=5", "--out_dir=out"]
    generate = ["--out_dir=out", "--start=A", "--num_samples=2", "--max_new_tokens=5", "--device=cpu"]
    commands = {"train.py": train, "sample.py": generate, "export.py": ["out"]}
    for script, args in commands.items():
        command = [sys.executable, str(REPO / script), *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        env = os.environ | {"PYTHONUNBUFFERED": ""}
        with subprocess.Popen(command, cwd=work, env=env, **pipes) as run:
            for _ in range(3 if script == "train.py" else 0):
                run.stdout.readline()
            run.stdout.close()
            errors = run.stderr.read()
        assert run.returncode == 0 and "Error" not in errors and "Traceback" not in errors, errors
        assert errors.count("Console failed") == (script == "train.py")
    assert (work / "out/step_00000006/ckpt.pt").exists() and (work / "out/loss.png").exists()


# ------------------------------------------------------------------------------------------------------------
# lines and records


# a core of a machine that was busy while it measured its peak: in the first matmul, 100 s pass
BUSY_AT_THE_START = """
import time, torch
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
clock, matmul, passed = time.perf_counter, torch.Tensor.matmul, [0]
def busy(a, b):
    torch.Tensor.matmul = matmul
    passed[0] += 100
    return a.matmul(b)
torch.Tensor.matmul, time.perf_counter = busy, lambda: clock() + passed[0]
"""
# one on which no matmul can be measured
UNMEASURED = """
import torch
def fail(*args):
    raise RuntimeError("no matmul")
torch.Tensor.matmul = fail
"""


def test_fields_events_and_lines_of_a_run(zygote, work):
    """And those of another run in the same folder, with everything missing that may be missing."""
    args = ["--out_dir=out", "--max_iters=3", "--eval_interval=2"]
    run = start_changed(zygote, BUSY_AT_THE_START, args, work, 2, whole=True).wait()
    found = records(work / "out")
    steps = [r for r in found if "step_ms" in r]
    names = "iter loss grad_norm lr step_ms data_ms memory_gb tokens_per_s mfu tokens time"
    names += " step_ms_max data_ms_max memory_gb_max"
    assert set(names.split()) <= steps[0].keys() and steps[0]["tokens"] == 2 * 4 * 32
    assert events(work / "out") == ["start", "peak", "save", "save", "end"]
    assert set(column(work / "out", "val_loss")) == {0, 2, 4}
    first, again = (r["peak_flops"] for r in found if "peak_flops" in r)
    assert first == pytest.approx(2 * 2 * 1024**3 / 100, rel=0.1) and again > 10 * first
    assert all(0 < r["mfu"] < 1 for r in steps)
    for start in ("data:", "model:", "ranks:", "step:", "step 0: train loss ", "iter 0: loss ", "done:"):
        assert re.findall(f"^{start}", run.text(), re.M) == [start], run.text()
    for said in ("(measured matmul), measured again", "saved out/step_00000004\n", "curve: out/loss.png\n"):
        assert run.text().count(said) == 1, "by all ranks"
    assert "cores:   2 processes share 1 CPU cores: " in run.text()

    args = ["--max_iters=0", "--eval_iters=1", "--compile=False", "--profile=True", "--save_checkpoint=False"]
    text = start_changed(zygote, UNMEASURED, [*args, "--out_dir=out"], work, whole=True).wait().text()
    for said in ("moved to out/previous_1\n", "peak:    unknown", ", mfu n/a,", "10 steps, not 1\n"):
        assert text.count(said) == 1, text
    assert "float32; compile: off\n" in text and "cores:" not in text


def test_how_often_the_training_data_is_read():
    reader = Mock(block_size=32, data=Mock(train=range(1000)))
    reader.share = Mock(sequences=8, micro_steps=2, rows_of=[4, 3], islands=[1, 1], padding=lambda: 0)
    config = {"max_iters": 99, "eval_only": False, "shares": "even"}
    _, second, *_ = banner.about_step(config, reader)
    assert second == "epochs:  100 steps read the training tokens 25.6 times"
    for changes in ({"max_iters": 2}, {"eval_only": True}, {"max_iters": math.inf}):
        assert not [line for line in banner.about_step(config | changes, reader) if "epochs" in line]


# ------------------------------------------------------------------------------------------------------------
# samples


LAYOUTS = [(1, "--arch=llama --dropout=0.1"), (2, "--zero=1 --arch=nanochat --dropout=0.1"), (2, "--cp=2")]


@pytest.mark.parametrize("nproc, layout", LAYOUTS)
def test_samples_change_no_bit_of_training(zygote, trained, work, nproc, layout):
    """Nor the random numbers of dropout. They are those of sample.py."""
    args = ["--max_iters=2", "--eval_interval=3", *layout.split()]
    run = zygote.train([*args, "--sample_interval=2", "--out_dir=with"], work, nproc)
    assert_same_run(work / "with", trained(args, nproc))
    texts = {r["iter"]: r["sample"] for r in records(work / "with") if r.get("event") == "sample"}
    assert [*texts] == [0, 2, 3] and len({*texts.values()}) > 1
    assert all(len(text) == 151 and text[0] == "\n" for text in texts.values())
    lines = [line for line in run.text().splitlines() if line.startswith("sample:  ")]
    assert 3 <= len(lines) <= 6 and all(len(line) < 80 for line in lines)
    args = ["--out_dir=with", "--num_samples=1", "--max_new_tokens=150", "--device=cpu"]
    assert f"{texts[3]}\n---" in zygote.start(args, work, script="sample.py").wait().samples()


@pytest.mark.parametrize("layout, named", [({"zero": 2, "tp": 2}, "zero 2, tp 2"), ({"pp": 2}, "pp 2")])
def test_samples_need_the_whole_model_on_one_process(layout, named, capsys):
    """The run goes on without samples: the setting may come from a config."""
    config = {"sample_interval": 5, "seed": 1}
    assert open_sampler(config, of_characters({"a": 0}), default_plan(**layout), ALONE).interval == 0
    assert f"but {named} divides it, so no samples are written. Run sample.py" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------
# waiting


@pytest.mark.parametrize(
    "laps, share",
    [
        ({"data": 5, "last gradient": 50, "backward": 20, "reduce": 4, "agree": 6, "optimizer": 15}, 0.3),
        ({"data": 5, "stages": 50, "pipeline": 25, "reduce": 5, "agree": 5, "optimizer": 10}, 0.35),
    ],
)
def test_the_share_of_a_step_in_which_a_rank_waits(monkeypatch, laps, share):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock(CPU)
    clock.waits_in_pipeline = "pipeline" in laps
    for _ in range(2):  # of which the first is known
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
    assert clock.waiting_share() == pytest.approx(share)


@pytest.mark.parametrize(
    "nproc, layout, is_known",
    [(1, [], False), (2, [], True), (2, ["--pp=2"], True), (2, ["--zero=3"], False)],
)
def test_what_a_run_says_of_its_steps(zygote, work, nproc, layout, is_known):
    """Also in which parts of a step ranks wait; the time left after ten steps."""
    run = zygote.train(["--max_iters=12", "--log_interval=3", "--out_dir=out", *layout], work, nproc)
    start, *steps = (r for r in records(work / "out") if r.get("event") == "start" or "step_ms" in r)
    lines = re.findall(r"^iter .*", run.text(), re.M)
    assert len(steps) == len(lines) == 5
    for record, line in zip(steps, lines, strict=True):
        speed = 1e3 / record["step_ms"]
        assert record["tokens_per_s"] == pytest.approx(256 * speed)
        assert record["mfu"] == pytest.approx(start["flops_per_step"] * speed / start["peak_flops"])
        said = f"loss {record['loss']:.4f}, time {record['step_ms']:.2f}ms, mfu {record['mfu'] * 100:.2f}%, "
        assert line.startswith(f"iter {record['iter']}: {said}")
        assert f" {record['tokens_per_s']:,.0f} tokens/s, grad norm {record['grad_norm']:.3f}, lr" in line
        for name in ("step_ms", "data_ms", "memory_gb"):
            assert record[f"{name}_max"] >= record[name]
        percent = [record[f"{name}_percent"] for name in ("comm", "slowest", "data")]
        if record["iter"] < 3 or not is_known:  # the first step has not been timed yet
            assert percent[:2] == [None] * 2 and "waiting" not in line
        else:
            assert all(0 <= value <= 100 for value in percent)
            said = "waiting: {:.0f}% of a step for communication, {:.0f}% for the slowest rank, {:.0f}% for"
            assert said.format(*percent) in line
    left = [record["left_s"] for record in steps]
    assert left[:3] == [None] * 3 and left[3] > 0 == left[4] and lines[4].count(", 0:00 left, ") == 1
    assert run.text().count("waiting:") == (5 if is_known else 0), "four steps, and the end"


# rank 1 takes 50 ms longer for each forward pass
SLOW_RANK = """
import time, torch
if os.environ["RANK"] == "1":
    from model import GPT
    slow = lambda module, inputs: time.sleep(0.05 * isinstance(module, GPT))
    torch.nn.modules.module.register_module_forward_pre_hook(slow)
"""


def test_a_slow_rank_is_named_and_the_others_wait_for_it(zygote, work):
    """The rank that arrives last waits for no other: what it spends in communication is communication."""
    run = start_changed(zygote, SLOW_RANK, [LONG, "--out_dir=out"], work, 2)
    assert run.until(lambda text: "warning: a slow rank: rank 1: forward ms " in text)
    run.kill([0], signal.SIGTERM)
    run.wait()
    shares = [column(work / "out", f"{name}_percent") for name in ("slowest", "comm")]
    assert statistics.median(shares[0][step] - shares[1][step] for step in range(3, 20)) > 0
    # a mean over two ranks, of which one waits for nobody
    assert max(filter(None, shares[0].values())) < 51
    assert "slow_rank" in events(work / "out")
    zygote.train(["--max_iters=6", "--log_interval=3", "--out_dir=thinned"], work, 2)
    losses, means = column(work / "out", "loss"), column(work / "thinned", "loss_mean")
    for step in (3, 6):  # means since the last logged step
        assert means[step] == pytest.approx(sum(losses[n] for n in (step - 2, step - 1, step)) / 3)


def test_what_a_clock_knows_while_a_step_is_taken(monkeypatch):
    """
    Only a step after the first is watched: compilation, an evaluation and a slow disk are no hang. With a
    profile on a GPU, parts are NVTX ranges, which begin with their names, known from the step before.
    """
    told, watched = [], []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    for name in ("current_stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    clock = Clock(torch.device("cuda"), nvtx=True)
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
    clock.step()
    assert watched == [False, False, False, True] and not clock.expects_progress


def test_the_time_of_a_step_is_without_pauses(monkeypatch):
    """From one gathering to the next: what follows the last one before a pause is a part of the next step."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock, seconds = Clock(CPU), []
    for pauses, measures in ((False, False), (True, False), (False, True), (False, False)):
        clock.start()
        now += 3
        clock.lap("norm")
        seconds.append(clock.seconds_of(clock.end_step()))
        now += 2
        clock.lap("agree")
        clock.step(pauses)
        with clock.uncounted() if measures else nullcontext():
            now += 100 * (pauses or measures)
    assert seconds == [3, 5, 5, 5]


# ------------------------------------------------------------------------------------------------------------
# sinks that fail


def test_a_log_that_is_removed_torn_or_on_a_full_disk(zygote, work):
    """
    It is appended to by its name, and a torn line does not tear the next. The full disk, which is a limit on
    the size of files, is reported once, and the log is tried again. A plot that fails is said at the end.
    """
    out, log = work / "out", work / "out/metrics.jsonl"
    (out / "loss.png").mkdir(parents=True)
    run = zygote.start([*TINY, LONG, "--alert_command=cat >> told", "--out_dir=out"], work)
    wait_for(lambda: steps_in(out) > 3)
    log.unlink()
    wait_for(lambda: steps_in(out) > 3)
    with log.open("a") as file:
        file.write('{"iter": 2, "lo')
    torn = steps_in(out)
    wait_for(lambda: steps_in(out) > torn + 3)
    _, most = resource.prlimit(run.pids[0], resource.RLIMIT_FSIZE)
    resource.prlimit(run.pids[0], resource.RLIMIT_FSIZE, (log.stat().st_size + 1000, most))
    assert run.until(lambda text: "warning: MetricsFile failed ([Errno 27] File too large); " in text)
    full = steps_in(out)
    wait_for(lambda: int(re.findall(r"iter (\d+): loss", run.text())[-1]) > full + 9)
    resource.prlimit(run.pids[0], resource.RLIMIT_FSIZE, (most, most))
    wait_for(lambda: steps_in(out) > full)
    run.kill(sig=signal.SIGTERM)
    text = run.wait(ok=False).text()
    steps = sorted(column(out, "loss"))
    after = next(step for step in steps if step > full)
    assert steps == [*range(steps[0], full + 1), *range(after, steps[-1] + 1)] and after > full + 9
    assert text.count("MetricsFile failed") == 1 and "no plot of the loss curve: " in text
    told = [json.loads(line)["event"] for line in (work / "told").read_text().splitlines()]
    assert told == ["start", "sink_failed", "preempted"]


FAILS_ONCE = """
from torch.utils.tensorboard import SummaryWriter
add_scalar = SummaryWriter.add_scalar
def fail(*args):
    SummaryWriter.add_scalar = add_scalar
    raise OSError("a full disk")
SummaryWriter.add_scalar = fail
"""


def test_tensorboard_begins_a_new_file_after_an_error(zygote, work):
    """At an evaluation: its thread has ended, and raises an error for ever."""
    pytest.importorskip("torch.utils.tensorboard")
    args = ["--tensorboard_log=True", "--eval_interval=2", "--max_iters=3", "--out_dir=out"]
    text = start_changed(zygote, FAILS_ONCE, args, work).wait().text()
    assert text.count("TensorBoard failed (a full disk)") == 1
    assert len(list((work / "out/tensorboard").iterdir())) == 2


def test_a_wandb_that_fails_is_tried_again_and_one_that_blocks_does_not_block_the_run(monkeypatch, capsys):
    wandb, lost, may_log = Mock(), ConnectionResetError("Connection lost"), threading.Event()
    run = wandb.init.return_value
    run.id, run.log.side_effect = "new", [None, lost, None]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = {"wandb_log": True, "tensorboard_log": False, "wandb_project": "p", "wandb_run_name": "n"}
    logger = Logger(Progress(1), [])
    logger.start_services(config)
    for step in range(3):
        logger.write({"iter": step, "loss": 1.0})
    logger.event("end")
    assert capsys.readouterr().err.count("Wandb failed") == 1 and logger.progress.wandb_id == "new"
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [0, 1, 2] and run.finish.called

    run.log.side_effect = lambda *args, **options: may_log.wait()
    blocked = Logger(Progress(1), [], end_s=0.1)
    blocked.start_services(config)
    for step in range(10_002):
        blocked.write({"iter": step, "loss": 1.0})
    blocked.event("end")
    assert capsys.readouterr().err.count("Wandb failed (it has not taken 10,000 records)") == 1
    may_log.set()  # the thread ends


@pytest.mark.parametrize("mode, advice", [("", "set WANDB_MODE=offline or --w"), ("offline", "set --w")])
def test_what_to_type_if_wandb_does_not_start(monkeypatch, mode, advice):
    """Without a home folder, wandb fails offline too."""
    wandb = Mock()
    wandb.init.side_effect = RuntimeError("Could not determine home directory.")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(ValueError, match=rf"home directory\.\): mend this, or {advice}andb_log=False$"):
        Wandb({"wandb_project": "p", "wandb_run_name": "n"}, None)


def test_a_folder_of_logs_is_not_wandb(monkeypatch):
    """Where wandb is not installed, Python imports the folder that an earlier run has left."""
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(ValueError, match="wandb_log needs wandb .*: pip install wandb$"):
        Wandb({"wandb_project": "p", "wandb_run_name": "n"}, None)


HELD_PLOT = """
import time
import matplotlib.figure
def save_slowly(figure, file, **options):
    print("draws", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    file.write(b"\\x89PNG")
matplotlib.figure.Figure.savefig = save_slowly
"""


def test_a_slow_plot_delays_no_step_and_the_next_one_waits_until_the_end(zygote, work):
    args = [LONG, "--eval_interval=5", "--keep_last=1", "--out_dir=out"]
    run = start_changed(zygote, HELD_PLOT, args, work)
    assert run.until(lambda text: text.count("saved out/step_") >= 4)
    run.kill(sig=signal.SIGTERM)
    assert run.until(lambda text: "stopped on request" in text)
    (work / "go").touch()
    text = run.wait(ok=False).text()
    assert text.count("draws\n") == 2 and text.endswith("the loss curve: out/loss.png\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_training_reads_as_much_of_a_long_log_as_of_a_short_one(zygote, work):
    """At a resume and at the evaluations after it; the plot, which reads all of it, has its own thread."""
    zygote.train(["--max_iters=4", "--out_dir=short"], work)
    shutil.copytree(work / "short", work / "long", symlinks=True)
    log, read = work / "long/metrics.jsonl", {}
    first, *others = log.read_text().splitlines(keepends=True)
    log.write_text(first + 10_000 * others[-2] + "".join(others))
    for name in ("short", "long"):
        args = [*TINY, LONG, "--eval_interval=3", "--init_from=resume", f"--out_dir={name}"]
        run = zygote.start(args, work)
        assert run.until(lambda text: "iter 12:" in text)
        io = Path(f"/proc/{run.pids[0]}/task/{run.pids[0]}/io").read_text()
        read[name] = int(re.search(r"rchar: (\d+)", io)[1])
        run.kill()
        run.gone(10)
    assert log.stat().st_size > 1.5e6 and abs(read["long"] - read["short"]) < 3e5


# every step leaves 50 objects that refer to themselves
CYCLES = """
import gc, weakref
from torch.optim.optimizer import register_optimizer_step_pre_hook
collected, alive = [], weakref.WeakSet()
class Cycle:
    def __init__(self):
        self.itself = self
        alive.add(self)
def begin(*args):
    print("a step: left", len(alive), "collections", collected, flush=True)
    collected.clear()
    for _ in range(50):
        Cycle()
register_optimizer_step_pre_hook(begin)
gc.callbacks.append(lambda phase, info: phase == "start" and collected.append(info["generation"]))
"""


def test_garbage_is_collected_once_in_each_step_and_does_not_grow(zygote, work):
    """Where the host waits for a GPU, and not when Python's counters of allocations say so."""
    text = start_changed(zygote, CYCLES, ["--max_iters=9"], work).wait().text()
    assert text.count("a step: left 0 collections [1]\n") >= 8
