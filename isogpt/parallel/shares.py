"""How the sequences of a step are divided over the data-parallel ranks."""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import count, pairwise

import numpy as np

from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan

PADDING = -1  # the start of a padding row
Speeds = tuple[float, ...]  # of the data ranks


@dataclass
class Share:
    """
    How a batch of `sequences` is divided: data rank r runs `micro_steps` micro-batches of rows_of[r] rows.
    Islands get sequences that follow each other in the batch, and the ranks of an island divide these.

    Attributes:
        island: the places in the batch of what this rank's island reads; without islands, all of them.
        island_sequences: how many these are.
        rows: this rank's rows of a micro-step.
    """

    sequences: int
    data_rank: int
    micro_steps: int
    rows_of: tuple[int, ...]  # rows of a micro-batch, by data rank
    islands: tuple[int, ...]  # sequences of each island; without islands, of the batch

    def __post_init__(self) -> None:
        size = len(self.rows_of) // len(self.islands)  # ranks of an island
        number, index = divmod(self.data_rank, size)
        start = sum(self.islands[:number])
        self.island_sequences = self.islands[number]
        self.island = range(start, start + self.island_sequences)
        rows_of = self.rows_of[number * size :][:size]
        self.rows, self.rows_before = rows_of[index], sum(rows_of[:index])
        self.island_rows = sum(rows_of)

    def first(self, micro_step: int) -> int:
        """
        The place in the batch of this rank's first row of a micro-step. Beyond the end of the batch, or of
        the island's part of it, it is the place that the row would have.
        """
        return self.island.start + micro_step * self.island_rows + self.rows_before

    def pick(self, starts: np.ndarray, micro_step: int) -> np.ndarray:
        """
        This rank's rows (rows,) of one micro-step, from the starts of the global batch; PADDING beyond the
        end of the batch, or of the island's part of it.
        """
        first, end = self.first(micro_step), self.island.stop
        picked = starts[min(first, end) : min(first + self.rows, end)]
        return np.pad(picked, (0, self.rows - len(picked)), constant_values=PADDING)

    def padding(self) -> int:
        """How many rows of the global batch are padding."""
        return self.micro_steps * sum(self.rows_of) - self.sequences


def share_of(
    sequences: int,
    data_rank: int,
    data_size: int,
    batch_size: int,
    pp: int = 1,
    speeds: Speeds = (),
    islands: int = 1,
) -> Share:
    """
    Return one rank's share: the same number of micro-steps and rows on every rank. There are as few
    micro-steps as batch_size allows, and then as few rows as possible. 48 sequences on 7 ranks at batch_size
    12 are one micro-step of 7 rows, one of which is padding. With a pipeline of `pp` ranks, the number of
    micro-steps is a multiple of pp. If the `speeds` of the data ranks differ, rows are in proportion to them,
    see `divide_rows`.

    The sequences of an island depend on the batch, the number of islands and the sums of their ranks'
    speeds. So neither batch_size nor the number of ranks in an island changes what the island learns.
    """
    if len(set(speeds)) > 1:
        size = len(speeds) // islands
        by_island = [speeds[i : i + size] for i in range(0, len(speeds), size)]
        counts = divide_rows(sequences, tuple(map(sum, by_island)), sequences)[1]
        parts = list(zip(counts, by_island, strict=True))
        # all islands run as many micro-steps as the island that needs most
        micro_steps = max(divide_rows(*part, batch_size)[0] for part in parts)
        rows_of = sum((divide_rows(*part, batch_size, micro_steps)[1] for part in parts), ())
    else:
        bounds = [i * sequences // islands for i in range(islands + 1)]
        counts = tuple(end - start for start, end in pairwise(bounds))
        most = quotient_up(sequences, data_size)
        micro_steps = multiple_up(quotient_up(most, batch_size), pp)
        rows_of = (quotient_up(most, micro_steps),) * data_size
    return Share(sequences, data_rank, micro_steps, rows_of, counts)


def share_of_whole(sequences: int, data_rank: int, data_size: int, batch_size: int, pp: int = 1) -> Share:
    """
    `share_of` in which every micro-batch contains batch_size rows, so that the micro-batches do not depend on
    the layout: the ranks take turns. 8 micro-batches on 3 ranks are 3 micro-steps, and one rank reads only
    padding in the last micro-step.
    """
    share = share_of(sequences, data_rank, data_size, batch_size, pp)
    return replace(share, rows_of=(batch_size,) * data_size)


def share_of_plan(plan: Plan, mesh: Mesh, speeds: Speeds = ()) -> Share:
    """A rank's share of a step of a plan. With exact, micro-batches stay whole, and speeds do not matter."""
    sizes = (plan.sequences, mesh.data_rank, mesh.data_size, plan.micro_batch, mesh.pp)
    return share_of_whole(*sizes) if plan.exact else share_of(*sizes, speeds, mesh.islands)


def quotient_up(n: int, divisor: int) -> int:
    """n / divisor, rounded up."""
    return -(-n // divisor)


def multiple_up(n: int, factor: int) -> int:
    """The smallest multiple of `factor` that is at least n."""
    return quotient_up(n, factor) * factor


@lru_cache
def divide_rows(sequences: int, speeds: Speeds, most: int, least: int = 1) -> tuple[int, tuple[int, ...]]:
    """
    Return the fewest micro-steps for which no rank runs more than `most` rows, but at least `least`, and the
    rows of each rank, in proportion to the speeds, but at least 1. 48 sequences for speeds 2, 1 and at most
    12 rows are 3 micro-steps of 11 and 5 rows.
    """
    for micro_steps in count(max(least, quotient_up(sequences, most * len(speeds)))):
        rows = rows_by_speed(quotient_up(sequences, micro_steps), speeds)
        if max(rows) <= most:
            return micro_steps, tuple(rows)


def rows_by_speed(total: int, speeds: Speeds) -> list[int]:
    """
    Divide the rows of a micro-step, of which each rank gets at least one. A micro-step takes as long as the
    largest rows / speed, so each further row goes to the rank that would then have the smallest.
    """
    rows = [1] * len(speeds)
    times = [(2 / speed, rank) for rank, speed in enumerate(speeds)]  # with one more row
    heapify(times)
    for _ in range(len(speeds), total):
        _, rank = times[0]
        rows[rank] += 1
        heapreplace(times, ((rows[rank] + 1) / speeds[rank], rank))
    return rows


def about_unused_ranks(share: Share, batch_size: int, pp: int = 1) -> str:
    """
    A sentence about data ranks that compute less than they could, with what would use them; "" if all are
    used. In other tools, more GPUs mean a larger batch; here, the batch of a step is fixed. Shares that a
    user or a measurement has chosen are not judged, nor are more rows than half of batch_size: the batch_size
    of a plan, which divides the global batch, may exceed what a rank computes (15 rows of 16).
    """
    if len(share.islands) > 1 or len(set(share.rows_of)) > 1:
        return ""
    ranks, rows = len(share.rows_of), share.rows
    idle = ranks - quotient_up(share.sequences, rows)
    if idle > 0:
        observation = f"{idle} of {ranks} data-parallel ranks read only padding"
    elif 2 * rows <= batch_size and share.micro_steps <= pp:
        observation = f"each rank computes {rows} sequences at a time, of batch_size {batch_size}"
    else:
        return ""
    steps = ranks * pp
    advice = f"set --gradient_accumulation_steps={steps}"
    effect = f"a step then reads {steps * batch_size} sequences, which changes the curve"
    return f"{observation}: a step reads {share.sequences} sequences. To use all ranks, {advice}: {effect}"


def parse_shares(shares: str, data_size: int | None = None) -> Speeds:
    """
    Return the speeds in a list such as 2,1,1, one for each of data_size ranks (if known); () for equal and
    auto.

    Raises:
        ValueError: the list does not contain one positive number for each rank.
    """
    if shares in ("equal", "auto"):
        return ()
    with suppress(ValueError):
        speeds = tuple(map(float, shares.split(",")))
        if data_size in (None, len(speeds)) and all(0 < speed < math.inf for speed in speeds):
            return speeds
    in_all = f", {data_size} in all" if data_size else ""
    example = spell_shares((2, *[1] * ((data_size or 3) - 1)))
    advice = f"set --shares={example} or the like, or --shares=equal"
    needed = f"a positive number for each data-parallel rank{in_all}"
    raise ValueError(f"shares is {shares!r}: it needs {needed}: {advice}")


def spell_shares(speeds: Speeds) -> str:
    """Return speeds in the form in which they are typed."""
    return ",".join(f"{speed:g}" for speed in speeds)
