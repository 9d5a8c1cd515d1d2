"""Measure how fast each rank computes alone."""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn
from torch.utils.benchmark import Timer

from isogpt.checkpoint.state import TrainState
from isogpt.data.reader import Reader
from isogpt.launch.together import gather_number


def with_measured_shares(reader: Reader, state: TrainState, autocast: AbstractContextManager) -> Reader:
    """
    Return a reader whose shares of a step are in proportion to the ranks' speeds (all ranks), with
    shares=auto: as multiples of the slowest rank's speed in steps of 1/8. Each rank computes alone, so the
    model must not communicate. A resumed run keeps the shares that it began with.
    """
    if reader.plan.shares != "auto":
        return reader
    progress = state.progress
    if len(progress.shares) != reader.mesh.data_size:
        # only the measurement uses this shape, for which compilation would take a minute
        with torch.compiler.set_stance("force_eager"):
            seconds = seconds_per_pass(state.model, reader, autocast)
        state.model.zero_grad(set_to_none=True)
        seconds = gather_number(seconds, reader.device)  # (world_size,)
        progress.shares = tuple(((seconds.max() / seconds * 8).round() / 8).tolist())
    return replace(reader, speeds=progress.shares)


def seconds_per_pass(
    model: nn.Module, reader: Reader, autocast: AbstractContextManager, budget: float = 3.0
) -> float:
    """
    Measure the median seconds of a forward and backward pass (all ranks), of as many as fit into `budget`
    seconds. The ranks begin together: ranks of one machine share the memory bandwidth, as in a step.
    """
    batch = reader.padding_batch()

    def run_pass() -> None:
        with autocast:
            _, loss = model(*batch, 1.0)
        loss.backward()

    timer = Timer("run_pass()", globals=locals(), num_threads=torch.get_num_threads())
    timer.timeit(1)  # warms up
    gather_number(0.0, reader.device)
    return timer.blocked_autorange(min_run_time=budget).median
