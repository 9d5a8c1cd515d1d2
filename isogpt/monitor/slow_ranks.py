"""Detect ranks that are slower than the others, or use more memory."""

from collections.abc import Iterator

import numpy as np

from isogpt.common.console import ranks_text

PATIENCE = 20  # consecutive logged steps


def slow_ranks(columns: dict[str, np.ndarray], counts: dict[str, np.ndarray]) -> Iterator[str]:
    """
    Yield a sentence for each column in which ranks have now been well above the others for PATIENCE steps:
    these ranks, their largest value and a typical one.

    Args:
        columns: {what was measured: the value of each rank, (world_size,)}.
        counts: of the steps so far in which each rank was above, by column; this step is added.
    """
    for what, values in columns.items():
        typical = np.quantile(values, 0.5, method="lower")
        margin = 0.2 if what.endswith("GB") else 5  # GB or ms: differences that do not matter
        is_above = values > 1.5 * typical + margin
        counts[what] = np.where(is_above, counts.get(what, 0) + 1, 0)
        slow = np.flatnonzero(counts[what] == PATIENCE)
        if len(slow):
            largest = values[slow].max()
            yield f"{ranks_text(slow)}: {what} {largest:.1f}, others {typical:.1f}"
