"""The logger and its sinks, the policy for steps that are not finite, and the watchdog."""

import json
import os
import subprocess
import threading
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from isogpt.checkpoint.progress import Progress
from isogpt.launch import network
from isogpt.launch.process_group import Ranks
from isogpt.monitor.log import Logger
from isogpt.monitor.not_finite import NanPolicy
from isogpt.monitor.watchdog import Silence, Watchdog
from isogpt.speed.clock import Clock
from isogpt.training.step_numbers import StepNumbers


def numbers_of(loss, grad_square, loss_scale=1.0):
    """The numbers of two ranks, the second of which computed these."""
    facts = {name: torch.zeros(2).double() for name in StepNumbers._fields}
    facts |= {"loss": [1.0, loss], "grad_square": [0.5, grad_square], "loss_scale": [loss_scale] * 2}
    return StepNumbers(**{name: torch.as_tensor(values).double() for name, values in facts.items()})


FINITE, NAN_LOSS, NAN_GRADIENT = (1.0, 2.0), (float("nan"), 2.0), (1.0, float("inf"))


@pytest.mark.parametrize(
    "on_nan, rollbacks, steps, decisions",
    [
        ("stop", 0, [FINITE, NAN_LOSS], ["take", "stop"]),
        ("stop", 0, [NAN_GRADIENT], ["stop"]),
        ("skip", 0, [NAN_LOSS, NAN_GRADIENT, FINITE, NAN_LOSS], ["skip", "skip", "take", "skip"]),
        ("skip", 1, [NAN_LOSS] * 3, ["skip", "skip", "roll back"]),
        ("skip", 2, [NAN_LOSS] * 3, ["skip", "skip", "stop"]),
        # the loss scale may be the cause of a gradient, but not of a loss
        ("stop", 0, [(*NAN_GRADIENT, 256.0), (*NAN_LOSS, 256.0)], ["take", "stop"]),
    ],
)
def test_the_policy_decides(on_nan, rollbacks, steps, decisions):
    policy = NanPolicy(on_nan, rollbacks=rollbacks)
    for step, (numbers, decision) in enumerate(zip(steps, decisions, strict=True)):
        is_taken = policy.takes(numbers_of(*numbers), step)
        assert ("take" if is_taken else policy.decide()) == decision


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
    logger.sinks.append(SimpleNamespace(write=lambda record, text: told.append(record)))
    dog.start(store)
    assert dog.position() == (0, "step 4, the first step")
    store.set("failed", "")
    assert is_over.wait(30)
    dog.stop()
    assert set(codes) == {1} and [record["event"] for record in told] == ["failed"]
    said = "error: rank 0 at step 4, the first step: a different rank has failed; rank 1 does not respond"
    assert said in capsys.readouterr().err
    assert not any(thread.is_alive() for thread in dog.threads)


def test_a_suspended_rank_gets_dist_timeout_s_and_one_that_has_exited_does_not():
    """A live migration suspends a machine for many seconds; nobody can tell it from one without power."""
    exited = subprocess.Popen(["true"])
    exited.wait()
    here, number = network.own_process()

    def seconds_until_lost(process, timeout_s):
        silence, beat = Silence(), json.dumps([17, "step 3, forward", process])
        return next(second for second in count() if silence.is_too_long(beat, timeout_s))

    assert seconds_until_lost((here, number), 600) == 600
    assert seconds_until_lost(("elsewhere", exited.pid), 600) == 600
    assert seconds_until_lost(("", exited.pid), 600) == 600, "not known, as on a Mac"
    assert seconds_until_lost((here, number), 3) == 8
    if here:
        assert seconds_until_lost((here, exited.pid), 600) == 8
    silence = Silence()
    assert not any(silence.is_too_long(json.dumps([n, "", (here, number)]), 8) for n in range(99)), "it beats"
    assert not any(silence.is_too_long(None, 8) for _ in range(100)), "it has not begun"


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
