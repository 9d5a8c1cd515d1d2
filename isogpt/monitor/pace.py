"""How fast a run goes: means over steps, and the time left."""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

SLOW_STEPS = 3  # the first steps compile, allocate memory and start threads: no later step takes as long
ENOUGH_STEPS = 10  # before, the time left would be a guess


@dataclass
class Smoothed:
    """The mean of values, whose weights are multiplied by `keep` with each newer value."""

    keep: float = 0.95
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> float:
        """Add a value; returns the mean so far."""
        self.total = self.keep * self.total + value
        self.weight = self.keep * self.weight + 1
        return self.total / self.weight


@dataclass
class Means:
    """The means of numbers of steps, by name, without values that are not finite."""

    sums: dict[str, tuple[float, int]] = field(default_factory=dict)  # {name: (sum, number of values)}

    def add(self, numbers: dict[str, float]) -> None:
        """Add the numbers of a step."""
        for name, value in numbers.items():
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + value, count + 1) if math.isfinite(value) else (total, count)

    def read(self) -> dict[str, float | None]:
        """Return the means of the steps since the last call; None for a number that was never finite."""
        found = {name: total / count if count else None for name, (total, count) in self.sums.items()}
        self.sums = {}
        return found


@dataclass
class TimeLeft:
    """
    Estimates how long a run still takes, from the last 200 steps and from all evaluations of this process.
    Saving and sampling count too: together with an evaluation, or as pauses between steps.

    Constructed just before the first step.
    """

    max_iters: int
    eval_interval: int
    at: float = field(default_factory=time.perf_counter)  # when the last step ended
    steps: int = 0
    steps_s: deque[float] = field(default_factory=partial(deque, maxlen=200))
    pauses_s: float = 0.0  # between steps, without evaluations
    evaluations_s: list[float] = field(default_factory=list)
    is_evaluation: bool = False  # whether there was an evaluation since the last step

    def evaluated(self) -> None:
        """Count an evaluation."""
        self.is_evaluation = True

    def took(self, step_s: float, now: float) -> None:
        """
        Count a step.

        Args:
            step_s: seconds of the step itself.
            now: time.perf_counter at the end of the step.
        """
        seconds, self.at = now - self.at, now
        self.steps += 1
        if self.is_evaluation:
            self.evaluations_s.append(max(0.0, seconds - step_s))
        elif self.steps > SLOW_STEPS:
            self.pauses_s += seconds - step_s
        if self.steps > SLOW_STEPS:
            self.steps_s.append(step_s)
        self.is_evaluation = False

    def seconds(self, step: int) -> float | None:
        """Estimate the seconds from the end of this step to the end of the run; None: not known yet."""
        if self.steps < ENOUGH_STEPS:
            return None
        # the state after the last step is evaluated too
        evaluations = self.max_iters // self.eval_interval - step // self.eval_interval + 1
        known_s = self.evaluations_s[1:] or self.evaluations_s or [0.0]  # the first evaluation also compiles
        step_s = fmean(self.steps_s) + max(0.0, self.pauses_s) / (self.steps - SLOW_STEPS)
        return (self.max_iters - step) * step_s + evaluations * fmean(known_s)
