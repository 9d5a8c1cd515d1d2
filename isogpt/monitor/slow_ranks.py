"""Detect ranks that are slower than the others, or use more memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from isogpt.common.console import ranks_text


@dataclass
class SlowRanks:
    """Detects ranks that stay well above the other ranks in forward time, in data wait or in memory."""

    patience: int = 20  # consecutive logged steps
    counts: dict[str, np.ndarray] = field(default_factory=dict)  # consecutive steps of each rank, by column

    def seen(self, columns: dict[str, np.ndarray]) -> Iterator[str]:
        """
        Yield a sentence for each column in which ranks have now been above the others for `patience` steps:
        these ranks, their largest value and a typical one.

        Args:
            columns: {what was measured: the value of each rank, (world_size,)}.
        """
        for what, values in columns.items():
            typical = np.quantile(values, 0.5, method="lower")
            margin = 0.2 if what.endswith("GB") else 5  # GB or ms: differences that do not matter
            is_above = values > 1.5 * typical + margin
            self.counts[what] = np.where(is_above, self.counts.get(what, 0) + 1, 0)
            if len(slow := np.flatnonzero(self.counts[what] == self.patience)):
                yield f"{ranks_text(slow)}: {what} {values[slow].max():.1f}, others {typical:.1f}"
