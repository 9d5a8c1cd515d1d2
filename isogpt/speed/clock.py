"""Time the parts of a step."""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """
    Times the parts of a step: `with clock("forward"):`. On a GPU a part is timed by events, for which the CPU
    does not wait; elsewhere by the CPU's clock. The profiler's trace shows the same names.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.now = device.type == "cuda", {}
        # for the watchdog: a number that grows with each part, and the current part
        self.count, self.doing = 0, "the first step"
        self.cpu = {}  # ms of parts of the current step that are timed on the CPU
        self.waiting, self.steps = deque(), deque(maxlen=1000)  # {part: ms} for each step

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            start = self.mark()
            self.count, self.doing = self.count + 1, name
            yield
            self.count, self.doing = self.count + 1, f"after {name}"
            self.now.setdefault(name, []).append((start, self.mark()))

    @contextmanager
    def on_cpu(self, name: str) -> Iterator[None]:
        """Time a part by the CPU's clock, such as waiting for data, which the GPU does not see."""
        start = time.perf_counter()
        yield
        self.cpu[name] = self.cpu_ms(name) + (time.perf_counter() - start) * 1e3

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
        self.now, self.cpu = {}, {}

    def last(self, name: str) -> float:
        """A part's milliseconds in the latest step whose times are known; 0 before."""
        return self.steps[-1].get(name, 0.0) if self.steps else 0.0

    def medians(self) -> dict[str, float]:
        """The median of each part in milliseconds, over the last thousand steps."""
        names = self.steps[-1] if self.steps else {}
        return {name: statistics.median(s[name] for s in self.steps if name in s) for name in names}


def over_ranks(medians: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """{part: {mean, max}} over the ranks, from every rank's Clock.medians."""
    values = {name: [m[name] for m in medians if name in m] for name in medians[0]}
    return {name: {"mean": statistics.mean(v), "max": max(v)} for name, v in values.items()}
