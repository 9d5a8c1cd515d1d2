"""Time the parts of a step."""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isogpt.launch.process_group import Ranks
from isogpt.parallel.plan import Plan

TIMED_ON_CPU = ("data",)  # the CPU waits for data; in the GPU's queue there is nothing to see
WAITING = "after the last gradient"  # the end of a backward pass, see Clock.find_waiting
NOT_OF_STEPS = ("evaluation", "save")
INSIDE_OTHERS = (WAITING, "stages")  # parts of laps


class Mark(NamedTuple):
    """A point in time: of the CPU's clock, and on a GPU also of its queue."""

    seconds: float
    event: torch.cuda.Event | None


class Clock:
    """
    Times the laps of a step, as a stopwatch does: each ends the span that began with the lap before.

        clock.start()
        x, y = next(batches)
        clock.lap("data")
        logits, loss = model(x, y)
        clock.lap("forward")
        ...
        clock.step()

    Laps of a step that have the same name are added. On a GPU a mark is an event in its queue, for which the
    CPU does not wait; elsewhere it is the CPU's time. `part` times a block that is not a lap.

    A step lasts from the end of the one before to its `step_s`, without what happens between `pause` and
    `start`: evaluations, checkpoints and samples.

    All steps of a run consist of the same laps. From the second step on, the clock thus knows the name of the
    lap that has begun: the watchdog reports it, and the profiler's trace shows it.

    Args:
        nvtx: on a GPU, also mark laps and parts as NVTX ranges, which NVIDIA's Nsight Systems shows.
        profiler: is told of each step that was taken.
    """

    def __init__(
        self, device: torch.device, nvtx: bool = False, profiler: torch.profiler.profile | None = None
    ) -> None:
        self.on_gpu = device.type == "cuda"
        self.nvtx = nvtx and self.on_gpu and has_nvtx()
        self.profiler = profiler
        # for the watchdog: a number that grows with each mark, and what the main thread does
        self.count, self.doing = 0, "the first step"
        self.finds_waiting = False
        self.is_in_step = False
        self.began = time.perf_counter()  # when the step began
        self.paused_at: float | None = None
        self.previous: Mark | None = None  # where the present lap began
        self.last_gradient: Mark | None = None
        self.range = ExitStack()  # the present lap in the profiler's trace
        self.laps: list[str] = []  # of this step
        self.laps_of_a_step: list[str] = []  # of the step before
        self.spans: dict[str, list[tuple[Mark, Mark]]] = {}  # of this step
        self.cpu: dict[str, float] = {}  # ms of this step's laps that are timed on the CPU
        self.pending = deque()  # (spans, cpu) of steps whose events the GPU may not have passed
        self.steps = deque(maxlen=1000)  # {part: ms} of each step

    def pause(self) -> None:
        """Count nothing that follows as part of a step, until `start`."""
        if self.paused_at is None:
            self.paused_at = time.perf_counter()

    def start(self) -> None:
        """Begin a step, and its first lap."""
        if self.paused_at is not None:
            self.began += time.perf_counter() - self.paused_at
            self.paused_at = None
        self.is_in_step = True
        self.laps, self.last_gradient = [], None
        self.begin_lap(self.mark())

    def lap(self, name: str) -> None:
        """End a lap: what happened since the lap before, or since `start`. The next lap begins."""
        now = self.mark()
        self.range.close()
        self.laps.append(name)
        if name in TIMED_ON_CPU:
            self.cpu[name] = self.cpu_ms(name) + (now.seconds - self.previous.seconds) * 1e3
        else:
            self.add(name, self.previous, now)
        if name == "backward" and self.last_gradient:
            self.add(WAITING, self.last_gradient, now)
            self.last_gradient = None
        self.begin_lap(now)

    def begin_lap(self, now: Mark) -> None:
        """Begin a lap, whose name is that of the same lap in the step before."""
        self.previous = now
        self.count += 1
        number = len(self.laps)
        if number < len(self.laps_of_a_step):
            self.doing = self.laps_of_a_step[number]
            self.show(self.doing, self.range)
        elif self.laps:
            self.doing = f"after {self.laps[-1]}"

    @property
    def expects_progress(self) -> bool:
        """
        Whether marks should follow each other: in a step, but not in the first one, which may compile for
        minutes. Between steps, the disk or an evaluation may be slow.
        """
        return self.is_in_step and bool(self.laps_of_a_step)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a block that is not a lap: a piece of a lap, or something between two steps."""
        with ExitStack() as shown:
            self.show(name, shown)
            start = self.mark()
            self.count, self.doing = self.count + 1, name
            yield
            self.count, self.doing = self.count + 1, f"after {name}"
            self.add(name, start, self.mark())

    def add(self, name: str, start: Mark, end: Mark) -> None:
        """Add a span to the step."""
        self.spans.setdefault(name, []).append((start, end))

    def show(self, name: str, shown: ExitStack) -> None:
        """Show what follows in the profiler's trace, and as an NVTX range, until `shown` is closed."""
        shown.enter_context(torch.profiler.record_function(name))
        if self.nvtx:
            shown.enter_context(torch.cuda.nvtx.range(name))

    def find_waiting(self, last: nn.Parameter | None) -> None:
        """
        From here on, measure the share of a step in which this rank communicates or waits for other ranks,
        see `waiting_share`. This is not for layouts that communicate inside the forward and backward passes,
        unless they only average gradients or send a pipeline's messages.

        Args:
            last: the parameter whose gradient is the last that a backward pass computes; None with a
                pipeline, which times the computation as `stages`. A hook notes when the gradient is there.
        """
        self.finds_waiting = True
        if last is not None:
            last.register_hook(self.note_gradient)

    def note_gradient(self, gradient: Tensor) -> None:
        """Note that the backward pass has computed all gradients: what follows is communication."""
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
            exposed += max(0.0, ms["pipeline"] - ms["stages"])
        elif "backward" in ms and WAITING not in ms:
            return math.nan
        total = sum(value for name, value in ms.items() if name not in (*NOT_OF_STEPS, *INSIDE_OTHERS))
        return min(1.0, exposed / total)

    def step_s(self) -> float:
        """Return the seconds of the step that ends now; the next step begins."""
        before, self.began = self.began, time.perf_counter()
        return self.began - before

    def cpu_ms(self, name: str) -> float:
        """Return the milliseconds of this step's laps with a name of TIMED_ON_CPU, up to now."""
        return self.cpu.get(name, 0.0)

    def mark(self) -> Mark:
        """Return the present point in time."""
        event = None
        if self.on_gpu:
            event = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return Mark(time.perf_counter(), event)

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds between two marks."""
        if self.on_gpu:
            return start.event.elapsed_time(end.event)
        return (end.seconds - start.seconds) * 1e3

    def step(self) -> None:
        """End a step."""
        self.laps_of_a_step = self.laps
        if self.profiler:
            self.profiler.step()
        self.pending.append((self.spans, self.cpu))
        self.forget_laps()
        if len(self.pending) > 2:  # the GPU has passed all events of the step before the last one
            spans, cpu = self.pending.popleft()
            ms = {name: sum(self.elapsed_ms(*span) for span in marks) for name, marks in spans.items()}
            self.steps.append(ms | cpu)

    def discard(self) -> None:
        """Forget a step that is not taken, and count nothing that follows until the next one starts."""
        self.forget_laps()
        self.began = self.paused_at = time.perf_counter()

    def forget_laps(self) -> None:
        """Forget the laps of this step."""
        self.is_in_step = False
        self.range.close()
        self.laps, self.spans, self.cpu = [], {}, {}

    def last(self, name: str) -> float:
        """Return a part's milliseconds in the latest step whose times are known; 0 if there is none."""
        return self.steps[-1].get(name, 0.0) if self.steps else 0.0

    def medians(self) -> dict[str, float]:
        """Return the median of each part in milliseconds, over the last thousand steps."""
        names = self.steps[-1] if self.steps else {}
        return {name: statistics.median(s[name] for s in self.steps if name in s) for name in names}


def has_nvtx() -> bool:
    """Whether this PyTorch can mark NVTX ranges."""
    try:
        torch.cuda.nvtx.mark("clock")
    except RuntimeError:
        return False
    return True


def make_clock(
    ranks: Ranks, plan: Plan, model: nn.Module, profile: bool, profiler: torch.profiler.profile | None
) -> Clock:
    """
    Make the clock of a run. It finds the share of a step in which ranks wait for each other, except on
    layouts that also communicate inside the forward and backward passes.

    Args:
        model: not wrapped with DistributedDataParallel.
        profile: whether the run is profiled, on any rank.
        profiler: see Clock; only rank 0 has one.
    """
    clock = Clock(ranks.device, nvtx=profile, profiler=profiler)
    if ranks.world_size > 1 and plan.zero < 2 and max(plan.tp, plan.cp, plan.ep) == 1:
        # the gradient of wte is the last that the backward pass computes: then only communication is left
        last = None if plan.pp > 1 else model.transformer.wte.weight
        if last is None or last.requires_grad:
            clock.find_waiting(last)
    return clock


def over_ranks(medians: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """{part: {mean, max}} over the ranks, from every rank's Clock.medians."""
    values = {name: [m[name] for m in medians if name in m] for name in medians[0]}
    return {name: {"mean": statistics.mean(v), "max": max(v)} for name, v in values.items()}
