"""How fast a run goes: means over steps, and the time left."""

import math
import time
from dataclasses import dataclass, field
from statistics import mean

SLOW_STEPS = 3  # the first steps compile, allocate memory and start threads: no later step takes as long
ENOUGH_STEPS = 10  # before, the time left would be a guess


@dataclass
class Smoothed:
    """The mean of values with weights that decrease by a twentieth with each newer value."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> float:
        """Add a value; returns the mean so far."""
        self.total = 0.95 * self.total + value
        self.weight = 0.95 * self.weight + 1
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
    Estimates how long a run still takes, from the steps and the evaluations of this process. What a run saves
    and samples at an evaluation counts as a part of the evaluation; elsewhere, as a part of the steps.

    Constructed just before the first step.
    """

    max_iters: int
    eval_interval: int
    at: float = field(default_factory=time.perf_counter)  # when the last step ended
    steps: int = 0
    steps_s: float = 0.0  # of the steps after the first SLOW_STEPS
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
        if self.is_evaluation:
            self.evaluations_s.append(max(0.0, seconds - step_s))
            seconds -= self.evaluations_s[-1]
        self.is_evaluation = False
        self.steps += 1
        if self.steps > SLOW_STEPS:
            self.steps_s += seconds

    def seconds(self, step: int) -> float | None:
        """Estimate the seconds from the end of this step to the end of the run; None: not known yet."""
        if self.steps < ENOUGH_STEPS:
            return None
        # the state after the last step is evaluated too
        evaluations = self.max_iters // self.eval_interval - step // self.eval_interval + 1
        known_s = self.evaluations_s[1:] or self.evaluations_s or [0.0]  # the first evaluation also compiles
        step_s = self.steps_s / (self.steps - SLOW_STEPS)
        return (self.max_iters - step) * step_s + evaluations * mean(known_s)
