"""Time the parts of a step."""

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isogpt.launch.process_group import Ranks
from isogpt.parallel.plan import Plan
from isogpt.speed.profiling import start_profiler

WAITING = "waiting"  # for other ranks, while nothing is computed: a part of the lap backward or pipeline
COMMUNICATION = (WAITING, "reduce", "agree")  # which no computation hides


class Mark(NamedTuple):
    """A point in time: of the CPU's clock, and on a GPU also of its queue."""

    seconds: float
    event: torch.cuda.Event | None


class Clock:
    """
    Times the laps of a step, as a stopwatch does: each ends the span that began with the lap before.

        batches = clock.laps("data", batches)
        clock.start()
        x, y = next(batches)
        logits, loss = model(x, y)
        clock.lap("forward")
        ...
        clock.step()

    Laps of a step that have the same name are added. On a GPU a mark is an event in its queue, for which the
    CPU does not wait; elsewhere it is the CPU's time. `part` times a block that is not a lap.

    A step lasts from one `end_step` to the next, without what is `uncounted` and the evaluations, checkpoints
    and samples of a pause between `step` and `start`.

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
        self.nvtx = nvtx and self.on_gpu
        self.profiler = profiler
        # for the watchdog: a number that grows with each mark, and what the main thread does
        self.count, self.doing = 0, "the first step"
        self.waits_in_pipeline = False
        self.counts_from: Mark | None = None  # None: what happens now is not a part of a step
        self.counted: list[tuple[Mark, Mark]] = []  # of this step, before counts_from
        self.latest_s = math.nan  # seconds of the latest step that is known
        self.previous: Mark | None = None  # where the present lap began; None: no lap, so none is watched
        self.last_gradient: Mark | None = None
        self.range = ExitStack()  # the present lap in the profiler's trace
        self.names: list[str] = []  # of this step's laps
        self.names_before: list[str] = []  # of those of the step before
        self.spans: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)  # of this step
        # the spans of steps, of which the device has passed all events of the first
        self.recent = deque(maxlen=4 if self.on_gpu else 1)
        self.steps = deque([{}], maxlen=1000)  # {part: ms} of each step that is known

    def start(self) -> None:
        """Begin a step, and its first lap."""
        now = self.mark()
        self.counts_from = self.counts_from or now
        self.last_gradient = None
        self.begin_lap(now)

    def lap(self, name: str) -> None:
        """End a lap: what happened since the lap before, or since `start`. The next lap begins."""
        now = self.mark()
        self.range.close()
        self.names.append(name)
        self.doing = f"after {name}"
        self.spans[name].append((self.previous, now))
        if self.last_gradient:
            self.spans[WAITING].append((self.last_gradient, now))
            self.last_gradient = None
        self.begin_lap(now)

    def laps(self, name: str, items: Iterable) -> Iterator:
        """Yield the items; what follows the lap before, until an item is there, is a lap of this name."""
        for item in items:
            self.lap(name)
            yield item

    def begin_lap(self, now: Mark) -> None:
        """Begin a lap, whose name is that of the same lap in the step before."""
        self.previous = now
        if len(self.names) < len(self.names_before):
            self.doing = self.names_before[len(self.names)]
            self.range.enter_context(self.shown(self.doing))

    @property
    def expects_progress(self) -> bool:
        """
        Whether marks should follow each other: in a step, but not in the first one, which may compile for
        minutes. Between steps, the disk or an evaluation may be slow.
        """
        return self.previous is not None and bool(self.names_before)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a block that is not a lap: a piece of a lap, or something between two steps."""
        with self.shown(name):
            start = self.mark()
            self.doing = name
            yield
            self.doing = f"after {name}"
            self.spans[name].append((start, self.mark()))

    @contextmanager
    def shown(self, name: str) -> Iterator[None]:
        """Show a block in the profiler's trace, and as an NVTX range."""
        nvtx = torch.cuda.nvtx.range(name) if self.nvtx else nullcontext()
        with torch.profiler.record_function(name), nvtx:
            yield

    def note_gradient(self, gradient: Tensor) -> None:
        """Note that the backward pass has computed all gradients: what follows is communication."""
        self.last_gradient = self.mark()

    def waiting_share(self) -> float:
        """
        Return the share of the latest step whose times are known in which this rank communicated or waited
        for other ranks, and no computation hid it; nan if the share is not known.
        """
        ms = self.steps[-1]
        if WAITING not in ms:
            return math.nan
        total = sum(ms[name] for name in set(self.names_before))
        return sum(ms[name] for name in COMMUNICATION) / total

    def end_step(self) -> list[tuple[Mark, Mark]]:
        """End a step at the last lap, and begin the next one. Returns the step's spans for `seconds_of`."""
        spans = [*self.counted, (self.counts_from, self.previous)]
        self.counted, self.counts_from = [], self.previous
        return spans

    def seconds_of(self, spans: list[tuple[Mark, Mark]]) -> float:
        """Return the seconds of a step, which a GPU must have computed."""
        self.latest_s = self.milliseconds(spans, self.on_gpu) / 1e3
        return self.latest_s

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count what happens in the block as a part of a step."""
        self.pause()
        yield
        self.counts_from = self.mark()

    def pause(self) -> None:
        """Count nothing until the next step starts."""
        self.counted.append((self.counts_from, self.mark()))
        self.counts_from = None

    def mark(self) -> Mark:
        """Return the present point in time, and count it."""
        self.count += 1
        event = None
        if self.on_gpu:
            event = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return Mark(time.perf_counter(), event)

    def milliseconds(self, spans: list[tuple[Mark, Mark]], in_queue: bool = False) -> float:
        """Return the milliseconds of spans together, of the CPU's clock or in a GPU's queue."""
        if in_queue:
            return sum(start.event.elapsed_time(end.event) for start, end in spans)
        return sum(end.seconds - start.seconds for start, end in spans) * 1e3

    def step(self, pauses: bool = True) -> None:
        """
        End a step. Nothing that follows is a part of one, until the next step starts.

        Args:
            pauses: whether the device has computed all steps: the time until the start does not count.
        """
        self.names_before = self.names
        if self.profiler:
            self.profiler.step()
        self.recent.append(self.spans)
        self.previous = None
        self.range.close()
        self.names, self.spans = [], defaultdict(list)
        if pauses:
            self.pause()
        if len(self.recent) == self.recent.maxlen:
            # the CPU waits for data; in the GPU's queue is nothing to see
            ms = {
                name: self.milliseconds(spans, self.on_gpu and name != "data")
                for name, spans in self.recent[0].items()
            }
            if self.waits_in_pipeline:
                ms[WAITING] = ms["pipeline"] - ms["stages"]
            self.steps.append(ms)

    def medians(self) -> dict[str, float]:
        """Return the median of each part in milliseconds, over the last thousand steps."""
        return {name: statistics.median(s[name] for s in self.steps if name in s) for name in self.steps[-1]}


def make_clock(config: dict, ranks: Ranks, plan: Plan, model: nn.Module, step: int) -> Clock:
    """
    Make the clock of a run that begins at this step; with the setting profile, also profile steps. It finds
    the share of a step in which ranks wait for each other, except on layouts that also communicate inside the
    forward and backward passes.

    Args:
        config: train.py's settings.
        model: not wrapped with DistributedDataParallel.
    """
    profiler = None
    if config["profile"]:
        profiler = start_profiler(config["out_dir"], config["max_iters"] - step + 1, ranks)
    clock = Clock(ranks.device, nvtx=config["profile"], profiler=profiler)
    if ranks.world_size > 1 and plan.zero < 2 and max(plan.tp, plan.cp, plan.ep) == 1:
        clock.waits_in_pipeline = plan.pp > 1
        # the gradient of wte is the last that the backward pass computes: then only communication is left
        if plan.pp == 1 and model.transformer.wte.weight.requires_grad:
            model.transformer.wte.weight.register_hook(clock.note_gradient)
    return clock


def over_ranks(medians: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """{part: {mean, max}} over the ranks, from every rank's Clock.medians."""
    values = {name: [m[name] for m in medians if name in m] for name in medians[0]}
    return {name: {"mean": statistics.mean(v), "max": max(v)} for name, v in values.items()}
