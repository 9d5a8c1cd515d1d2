"""The logger and its sinks, the policy for steps that are not finite, and the watchdog's handing over."""

import ast
import inspect
import json
import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from runs import REPO

from isogpt.checkpoint.progress import Progress
from isogpt.launch.process_group import Ranks
from isogpt.monitor.log import Logger, Sink
from isogpt.monitor.not_finite import Action, NanPolicy
from isogpt.monitor.sink_alerts import Alerts
from isogpt.monitor.sink_console import Console
from isogpt.monitor.sink_metrics import MetricsFile
from isogpt.monitor.sink_plot import Plot
from isogpt.monitor.sink_tensorboard import TensorBoard
from isogpt.monitor.sink_wandb import Wandb
from isogpt.monitor.watchdog import Watchdog
from isogpt.speed.clock import Clock
from isogpt.training.step_numbers import StepNumbers

METHODS = {
    name: method for name, method in vars(Sink).items() if inspect.isfunction(method) and name[0] != "_"
}


# ------------------------------------------------------------------------------------------------------------
# sinks


@pytest.mark.parametrize("sink", [Alerts, Console, MetricsFile, Plot, TensorBoard, Wandb])
def test_a_sink_takes_what_the_logger_passes(sink):
    defined = [name for name in METHODS if hasattr(sink, name)]
    assert defined
    for name in defined:
        wanted, found = (list(inspect.signature(f).parameters) for f in (METHODS[name], getattr(sink, name)))
        assert found == wanted, name


def test_the_logger_calls_no_method_that_a_sink_cannot_define():
    """A misspelled name would be called on no sink, without a message."""
    called = set()
    for path in (REPO / "isogpt/monitor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "tell":
                called.add(node.args[0].value)
    assert called == set(METHODS)


def test_a_sink_with_a_single_method_is_told_what_it_defines():
    told = []

    class Events:
        def event(self, record, text):
            told.append((record, text))

    logger = Logger(Progress(tokens_per_step=64, step=3), [Events()])
    logger.print("a line")
    logger.event("spike", "warning: a spike", loss=9.0)
    logger.rolled_back((1, 2), rollback=1)
    logger.tell("close")
    assert told[0] == ({"event": "spike", "iter": 3, "loss": 9.0}, "warning: a spike")
    assert told[1][0] == {"event": "rollback", "iter": 3, "to": 3, "left_out": [], "rollback": 1}
    assert told[1][1] == "warning: 2 steps not finite: rolled back to step 3, excluding [1, 2]"


# ------------------------------------------------------------------------------------------------------------
# steps that are not finite

FINITE, NAN_LOSS, NAN_GRADIENT = (1.0, 2.0), (float("nan"), 2.0), (1.0, float("inf"))


def numbers_of(loss, grad_square, loss_scale=1.0):
    """The numbers of two ranks, the second of which computed these."""
    facts = {name: torch.zeros(2).double() for name in StepNumbers._fields}
    facts |= {"loss": [1.0, loss], "grad_square": [0.5, grad_square], "loss_scale": [loss_scale] * 2}
    return StepNumbers(**{name: torch.as_tensor(values).double() for name, values in facts.items()})


TAKE, SKIP, BACK, STOP = Action.TAKE, Action.SKIP, Action.ROLL_BACK, Action.STOP


@pytest.mark.parametrize(
    "on_nan, max_rollbacks, steps, actions",
    [
        ("stop", 2, [FINITE, NAN_LOSS], [TAKE, STOP]),
        ("stop", 2, [NAN_GRADIENT], [STOP]),
        ("skip", 2, [NAN_LOSS, NAN_GRADIENT, FINITE, NAN_LOSS], [SKIP, SKIP, TAKE, SKIP]),
        ("skip", 1, [NAN_LOSS] * 6, [SKIP, SKIP, BACK, SKIP, SKIP, STOP]),
        ("skip", 0, [NAN_LOSS] * 3, [SKIP, SKIP, STOP]),
    ],
)
def test_the_policy_decides(on_nan, max_rollbacks, steps, actions):
    policy = NanPolicy(on_nan, patience=3, max_rollbacks=max_rollbacks)
    verdicts = [policy.judge(numbers_of(*numbers), step) for step, numbers in enumerate(steps)]
    assert [verdict.action for verdict in verdicts] == actions
    for step, verdict in enumerate(verdicts):
        if verdict.action is BACK:
            assert verdict.not_finite == (step - 2, step - 1, step), "the steps to exclude"


def test_a_gradient_that_overflows_because_of_the_loss_scale_is_no_reason_to_skip():
    policy = NanPolicy("stop", patience=3, max_rollbacks=2)
    assert policy.judge(numbers_of(*NAN_GRADIENT, loss_scale=256.0), 0).action is TAKE
    assert policy.judge(numbers_of(*NAN_LOSS, loss_scale=256.0), 1).action is STOP


# ------------------------------------------------------------------------------------------------------------
# the watchdog


def test_a_rank_that_fails_at_the_start_or_in_a_step_is_named(monkeypatch, capsys):
    """Sinks, the clock and the saver are added to the one watchdog and the one logger."""
    codes, is_over, told = [], threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda status: (codes.append(status), is_over.set()))
    ranks = Ranks(0, 2, torch.device("cpu"), "gloo", hosts=("a", "a"))
    progress, store = Progress(1, step=4), dist.HashStore()
    logger = Logger(progress, [])
    dog = Watchdog(ranks, 600.0, progress, logger)
    assert dog.position() == (0, "step 4, the start")
    dog.clock, dog.saver = Clock(ranks.device), SimpleNamespace(writes_alone=lambda: False)
    logger.sinks.append(SimpleNamespace(event=lambda record, text: told.append(record)))
    dog.start(store)
    assert dog.position() == (0, "step 4, the first step")
    store.set("failed", "")
    assert is_over.wait(30)
    dog.stop()
    assert set(codes) == {1} and [record["event"] for record in told] == ["failed"]
    said = "error: rank 0 at step 4, the first step: a different rank has failed; rank 1 does not respond"
    assert said in capsys.readouterr().err
    assert not any(thread.is_alive() for thread in dog.threads)


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


def test_an_alert_contains_the_folder(tmp_path):
    Alerts(f"cat >> {tmp_path}/told", "out").event({"event": "failed", "iter": 3, "loss": float("nan")}, "")
    assert json.loads((tmp_path / "told").read_text()) == {
        "event": "failed",
        "iter": 3,
        "loss": "nan",
        "out_dir": "out",
    }
