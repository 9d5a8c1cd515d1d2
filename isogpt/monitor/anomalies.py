"""Detect loss spikes, repeated overflows and slow ranks."""

import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np


@dataclass
class LossSpikes:
    """Detects a loss far above the losses of the last hundred logged steps."""

    losses: deque = field(default_factory=lambda: deque(maxlen=100))

    def seen(self, loss: float) -> bool:
        """Return whether a loss is a spike, and remember the loss."""
        before = np.array(self.losses)
        self.losses.append(loss)
        return len(before) >= 20 and loss > before.mean() + max(6 * before.std(), 0.1 * abs(before.mean()))


@dataclass
class Overflows:
    """
    Detects consecutive float16 steps that are skipped: the gradient overflows whatever the loss scale is.
    """

    patience: int = 8  # a run's first steps often overflow; after 8 steps the scale is 1/256
    count: int = 0

    def seen(self, is_finite: bool) -> bool:
        """Return whether a step is the last of `patience` consecutive skipped steps: True once."""
        self.count = 0 if is_finite else self.count + 1
        return self.count == self.patience


@dataclass
class SlowRanks:
    """Detects a rank that stays well above the other ranks in forward time, in data wait or in memory."""

    patience: int = 20  # consecutive logged steps
    counts: dict = field(default_factory=dict)  # consecutive steps by (column, rank)

    def seen(self, columns: dict[str, list[float]]) -> list[str]:
        """
        Args:
            columns: {what was measured: the value of each rank}.

        Returns:
            A sentence for each rank that has been above the other ranks for exactly `patience` steps.
        """
        sentences = []
        for what, values in columns.items():
            typical = statistics.median_low(values)
            margin = 0.2 if what.endswith("GB") else 5  # GB or ms: differences that do not matter
            for rank, value in enumerate(values):
                is_above = value > 1.5 * typical + margin
                self.counts[what, rank] = self.counts.get((what, rank), 0) + 1 if is_above else 0
                if self.counts[what, rank] == self.patience:
                    sentences.append(f"rank {rank}: {what} {value:.1f}, others {typical:.1f}")
        return sentences
