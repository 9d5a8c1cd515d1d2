"""The logger and its sinks, and the watchdog."""

import errno
import os
import signal
import sys
import termios
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from runs import TINY, records, start_changed, steps_in, wait_for

from isogpt.checkpoint.owner import write_owner
from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.launch.process_group import Ranks
from isogpt.monitor import sink_alerts, sink_wandb, watchdog
from isogpt.monitor.log import Logger
from isogpt.monitor.sink_alerts import Alerts
from isogpt.monitor.sink_console import Console
from isogpt.monitor.sink_metrics import MetricsFile
from isogpt.monitor.sink_tensorboard import TensorBoard
from isogpt.monitor.sink_wandb import Wandb
from isogpt.monitor.watchdog import Watchdog
from isogpt.speed.clock import Clock
from isogpt.training.step_numbers import StepNumbers


def numbers_of(loss, grad_square, loss_scale=1.0):
    """The numbers of two ranks, the second of which computed these."""
    facts = {name: torch.zeros(2).double() for name in StepNumbers._fields}
    facts |= {"loss": [1.0, loss], "grad_square": [0.5, grad_square], "loss_scale": [loss_scale] * 2}
    return StepNumbers(**{name: torch.as_tensor(values).double() for name, values in facts.items()})


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


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot tell")
@pytest.mark.parametrize("opened", [os.pipe, os.openpty], ids=["a pager", "Ctrl-S"])
def test_a_run_does_not_wait_for_a_console_that_nobody_reads(monkeypatch, capsys, opened):
    monkeypatch.setattr(console, "PATIENCE_S", 0.01, raising=False)
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
        assert console.is_blocked(stdout, 0)
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


def test_the_log_is_appended_to_by_its_name_unless_a_different_run_has_claimed_the_folder(tmp_path):
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
    write_owner(tmp_path, "a different run", None)
    logger.write({"iter": 4})
    assert [r["iter"] for r in records(tmp_path)] == [1, 3] and logger.failed_sinks == {"MetricsFile"}


def test_tensorboard_begins_a_new_file_after_an_error(tmp_path, monkeypatch):
    """At an evaluation: its thread has ended, and raises an error for ever."""
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    logger = Logger(Progress(1), [TensorBoard(str(tmp_path), Progress(1))])
    step = {"loss": 1.0, "step_ms": 1.0}
    with monkeypatch.context() as patch:
        patch.setattr(writer, "add_scalar", Mock(side_effect=OSError(errno.ENOSPC, "a full disk")))
        logger.write({"iter": 0, **step})
    for record in ({"iter": 1, **step}, {"iter": 2, "val_loss": 1.0}, {"iter": 2, **step}):
        logger.write(record)
    logger.event("end")
    assert logger.failed_sinks == {"TensorBoard"} and len(list((tmp_path / "tensorboard").iterdir())) == 2


WANDB = {"wandb_log": True, "tensorboard_log": False, "wandb_project": "p", "wandb_run_name": "n"}


@pytest.fixture
def wandb(monkeypatch):
    """The package wandb."""
    fake = Mock()
    fake.init.return_value.id = "new"
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_killed_process_of_wandb_is_replaced(wandb):
    lost = ConnectionResetError("Connection lost")
    run, wandb.teardown.side_effect = wandb.init.return_value, lost
    run.log.side_effect = [None, lost, None]
    logger = Logger(Progress(1), [Mock()])
    logger.start_services(WANDB)
    for step in range(3):
        logger.write({"iter": step, "loss": 1.0})
    logger.event("end")
    assert logger.failed_sinks == {"Wandb"} and logger.progress.wandb_id == "new"
    assert [call.kwargs["id"] for call in wandb.init.call_args_list] == [None, "new"]
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [0, 1, 2] and run.finish.called


def test_a_wandb_that_blocks_does_not_block_the_run(wandb, monkeypatch, capsys):
    monkeypatch.setattr(sink_wandb, "WAITING", 3)
    monkeypatch.setattr(sink_wandb, "FINISH_S", 0.1)
    may_log = threading.Event()
    wandb.init.return_value.log.side_effect = lambda *args, **options: may_log.wait()
    logger = Logger(Progress(1), [Wandb(WANDB, None)])
    for step in range(5):
        logger.write({"iter": step, "loss": 1.0})
    logger.event("end")
    assert "Wandb failed (wandb has not taken 3 records); training continues" in capsys.readouterr().err
    may_log.set()  # the thread ends


def test_alert_commands_that_do_not_end_are_killed_with_what_they_have_started(monkeypatch, capfd, tmp_path):
    """They would go on after the run, with the file system of its log."""
    monkeypatch.setattr(sink_alerts, "LIMIT_S", 0.1)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    alerts = Alerts({"alert_command": f"echo much; sleep 1000 > {fifo}; exit", "out_dir": "out"})
    for event in ("start", "end"):
        alerts.write({"event": event}, "")
    assert not any(thread.is_alive() for thread in alerts.threads)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "nobody holds its other end any more"
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------------------
# the watchdog


def test_a_rank_that_fails_at_the_start_or_in_a_step_is_named(monkeypatch, capsys):
    """Sinks, the clock and the saver are added to the one watchdog and the one logger."""
    codes, is_over, told = [], threading.Event(), []

    def leave(status):
        codes.append(status)
        is_over.set()

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watchdog, "BEAT_S", 0.1)
    monkeypatch.setattr(watchdog, "LINGER_S", 0.0)
    progress, store = Progress(1, step=4), dist.HashStore()
    monkeypatch.setattr(watchdog.network, "connect_store", lambda timeout_s: store)
    ranks = Ranks(0, 2, torch.device("cpu"), "gloo", store, hosts=("a", "a"))
    logger = Logger(progress, [])
    dog = Watchdog("out", ranks, 600.0, logger)
    assert dog.position == "step 4, the start"
    dog.clock, dog.saver = Clock(ranks.device), SimpleNamespace(writes_alone=lambda: False)
    logger.sinks.append(SimpleNamespace(write=lambda record, text: told.append(record)))
    dog.problem = "lost the connection"
    store.set("beat/1", "1.0: step 3, forward")
    dog.start()
    assert is_over.wait(30) and codes == [1] and [record["event"] for record in told] == ["failed"]
    said = "error: rank 0 at step 4, the first step: lost the connection; rank 1 does not respond"
    assert f"{said}, its last position was step 3, forward\n" in capsys.readouterr().err


def test_only_a_step_after_the_first_is_watched():
    """Compilation, an evaluation and a slow disk are no hang."""
    clock = Clock(torch.device("cpu"))
    watched = []
    for _ in range(2):
        watched.append(clock.expects_progress)
        clock.start()
        watched.append(clock.expects_progress)
        clock.lap("forward")
        clock.step()
    clock.start()
    clock.discard()
    assert watched == [False, False, False, True] and not clock.expects_progress


# Every step leaves 50 objects that refer to themselves
CYCLES = """
import gc
from isogpt.training import precision
seed_step, alive, collected = precision.seed_step, [], []
class Cycle:
    def __init__(self):
        self.itself = self
        alive.append(self)
    def __del__(self):
        gone.append(1)
def noted(seed, step, rank):
    for _ in range(50):
        Cycle()
    alive.clear()
    print("step", step, "left", 50 * (step + 1) - len(gone), "collections", collected, flush=True)
    collected.clear()
    seed_step(seed, step, rank)
gone = []
precision.seed_step = noted
gc.callbacks.append(lambda phase, info: phase == "start" and collected.append(info["generation"]))
"""


def test_garbage_is_collected_once_in_each_step_and_does_not_grow(zygote, work):
    """Where the host waits for a GPU, and not when Python's counters of allocations say so."""
    text = start_changed(zygote, CYCLES, ["--max_iters=9"], work).wait().text()
    for step in range(2, 10):
        assert f"step {step} left 50 collections [1]" in text
