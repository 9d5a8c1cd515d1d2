"""Time the parts of a step."""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

WAITING = "after the last gradient"  # the end of a backward pass, see Clock.find_waiting
NOT_OF_STEPS = ("evaluation", "save")
INSIDE_OTHERS = (WAITING, "stages")  # parts of parts


class Clock:
    """
    Times the parts of a step: `with clock("forward"):`. On a GPU a part is timed by events, for which the CPU
    does not wait; elsewhere by the CPU's clock. The profiler's trace shows the same names.

    Args:
        nvtx: on a GPU, also mark the parts as NVTX ranges, which NVIDIA's Nsight Systems shows.
    """

    def __init__(self, device: torch.device, nvtx: bool = False) -> None:
        self.on_gpu, self.now = device.type == "cuda", {}
        self.nvtx = nvtx and self.on_gpu and has_nvtx()
        self.finds_waiting, self.last_gradient = False, None
        # for the watchdog: a number that grows with each part, and the current part
        self.count, self.doing = 0, "the first step"
        self.cpu = {}  # ms of parts of the current step that are timed on the CPU
        self.waiting, self.steps = deque(), deque(maxlen=1000)  # {part: ms} for each step

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name), self.range(name):
            start = self.mark()
            self.count, self.doing = self.count + 1, name
            yield
            self.count, self.doing = self.count + 1, f"after {name}"
            end = self.mark()
            self.now.setdefault(name, []).append((start, end))
            if self.last_gradient:
                self.now.setdefault(WAITING, []).append((self.last_gradient, end))
                self.last_gradient = None

    @contextmanager
    def on_cpu(self, name: str) -> Iterator[None]:
        """Time a part by the CPU's clock, such as waiting for data, which the GPU does not see."""
        start = time.perf_counter()
        with self.range(name):
            yield
        self.cpu[name] = self.cpu_ms(name) + (time.perf_counter() - start) * 1e3

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark the block as an NVTX range, if this was asked for."""
        if self.nvtx:
            torch.cuda.nvtx.range_push(name)
        yield
        if self.nvtx:
            torch.cuda.nvtx.range_pop()

    def find_waiting(self, last: nn.Parameter | None) -> None:
        """
        Measure from here on in which share of a step this rank communicates or waits for other ranks, see
        `waiting_share`. Not for layouts that communicate inside the forward and backward passes, except for
        the average of gradients and the messages of a pipeline.

        Args:
            last: the parameter whose gradient is the last that a backward pass computes; None with a
                pipeline, which times the computation as `stages`. A hook notes when the gradient is there.
        """
        self.finds_waiting = True
        if last is not None:
            last.register_hook(self.note_gradient)

    def note_gradient(self, gradient: Tensor) -> None:
        """Note that the backward pass has computed all gradients: what follows is communication."""
        if self.doing == "backward":
            self.last_gradient = self.mark()

    def waiting_share(self) -> float:
        """
        Return the share of the latest step whose times are known in which this rank communicated or waited
        for other ranks, and no computation hid it; nan if the share is not known.

        This is the time from the last gradient to the end of the backward pass, in `reduce` and in `agree`;
        with a pipeline, also the time outside of `stages`.
        """
        if not self.finds_waiting or not self.steps:
            return math.nan
        ms = self.steps[-1]
        exposed = sum(ms.get(name, 0.0) for name in (WAITING, "reduce", "agree"))
        if "pipeline" in ms:
            exposed += max(0.0, ms["pipeline"] - ms["stages"] - ms.get("data", 0.0))
        elif "backward" in ms and WAITING not in ms:
            return math.nan
        total = sum(value for name, value in ms.items() if name not in (*NOT_OF_STEPS, *INSIDE_OTHERS))
        return min(1.0, exposed / total)

    def cpu_ms(self, name: str) -> float:
        """The milliseconds that a part timed by `on_cpu` has taken in this step."""
        return self.cpu.get(name, 0.0)

    def mark(self) -> object:
        """The current time, or an event in the GPU's queue."""
        if self.on_gpu:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def elapsed_ms(self, start: object, end: object) -> float:
        """Milliseconds between two marks."""
        return start.elapsed_time(end) if self.on_gpu else (end - start) * 1e3

    def step(self) -> None:
        """End a step."""
        self.waiting.append((self.now, self.cpu))
        self.now, self.cpu = {}, {}
        if len(self.waiting) > 2:  # the GPU has passed all events of the step before the last one
            parts, cpu = self.waiting.popleft()
            self.steps.append(
                {name: sum(self.elapsed_ms(*m) for m in marks) for name, marks in parts.items()} | cpu
            )

    def discard(self) -> None:
        """Forget the parts of a step that is not taken."""
        self.now, self.cpu, self.last_gradient = {}, {}, None

    def last(self, name: str) -> float:
        """A part's milliseconds in the latest step whose times are known; 0 before."""
        return self.steps[-1].get(name, 0.0) if self.steps else 0.0

    def medians(self) -> dict[str, float]:
        """The median of each part in milliseconds, over the last thousand steps."""
        names = self.steps[-1] if self.steps else {}
        return {name: statistics.median(s[name] for s in self.steps if name in s) for name in names}


def has_nvtx() -> bool:
    """Whether this PyTorch can mark NVTX ranges."""
    try:
        torch.cuda.nvtx.mark("clock")
    except RuntimeError:
        return False
    return True


def over_ranks(medians: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """{part: {mean, max}} over the ranks, from every rank's Clock.medians."""
    values = {name: [m[name] for m in medians if name in m] for name in medians[0]}
    return {name: {"mean": statistics.mean(v), "max": max(v)} for name, v in values.items()}
