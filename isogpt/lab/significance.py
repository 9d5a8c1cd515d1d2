"""Is a difference between two groups of runs larger than chance? t-tests over the seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from isogpt.common.packages import needed_by

CONFIDENCE = 0.95  # of the intervals
LEVEL = 0.05  # at which `seeds_needed` detects a difference, with this power
POWER = 0.8
NORMAL_SHIFT = 2.8015  # the mean of a normal distribution that exceeds LEVEL's limit, 1.96, with this power
FAR = 30  # a shift for which even two seeds have a power of 0.98; scipy returns nan for many larger ones
MOST_SEEDS = 1_000_000  # a difference that needs more of them counts as none
ROUNDING = 1e-12  # a spread below this share of the values is rounding


@dataclass(frozen=True)
class Difference:
    """How the values of group b differ from those of group a; None: too few runs to know."""

    mean: float | None  # of b minus a
    method: str  # what was computed, or why it could not be
    is_paired: bool  # by seed
    counts: tuple[int, int]  # how many runs of a and b are compared; in pairs, equally many
    low: float | None = None  # the interval that contains the true difference with 95% confidence
    high: float | None = None
    # the probability of a difference at least this large, in either direction, if there were none
    p: float | None = None
    # per group, of this design, to detect a true difference of this size in 80% of experiments with p < 0.05
    seeds_needed: int | None = None


def difference(a: dict[int, float], b: dict[int, float]) -> Difference:
    """
    Compare two groups of runs by a value of each run, such as its final validation loss.

    If at least two seeds occur in both groups, this is the paired t-test over these seeds: runs with the same
    seed read the same data, so much of what is due to chance is the same in both and cancels. Otherwise it is
    Welch's t-test, which does not assume equal variances.

    Args:
        a, b: {seed: value}. The values are finite.
    """
    shared = a.keys() & b.keys()
    is_paired = len(shared) >= 2 or len(shared) == min(len(a), len(b)) == 1
    seeds_a, seeds_b = (shared, shared) if is_paired else (a, b)
    return t_test([a[seed] for seed in seeds_a], [b[seed] for seed in seeds_b], is_paired)


def t_test(a: list[float], b: list[float], is_paired: bool) -> Difference:
    """Compare values; in pairs, those of a seed are at the same place."""
    result = Difference(None, "a group without runs: no comparison", is_paired, (len(a), len(b)))
    if not a or not b:
        return result
    result = replace(result, mean=fmean(b) - fmean(a))
    if min(result.counts) < 2:
        return replace(result, method="one run in a group: no test")
    variances = [variance(a), variance(b)]
    method = f"Welch's t-test of {len(a)} and {len(b)} runs (fewer than two seeds are in both groups)"
    if is_paired:
        variances = [variance(after - before for before, after in zip(a, b, strict=True))]
        method = f"paired t-test over {len(a)} seeds"
    if math.sqrt(sum(variances)) <= ROUNDING * max(map(abs, a + b)):  # as in runs with `exact`
        no_spread = "the seed changes nothing, so chance cannot be estimated: no test"
        return replace(result, method=no_spread if result.mean else "the runs are equal")
    try:
        with needed_by("a p-value", "scipy"):
            from scipy import stats
    except ValueError as e:
        return replace(result, method=f"no test: {e}")
    test = stats.ttest_rel(b, a) if is_paired else stats.ttest_ind(b, a, equal_var=False)
    low, high = map(float, test.confidence_interval(CONFIDENCE))
    needed = seeds_needed(result.mean, variances)
    return replace(result, method=method, low=low, high=high, p=float(test.pvalue), seeds_needed=needed)


def seeds_needed(mean: float, variances: Sequence[float]) -> int | None:
    """
    Return the fewest seeds per group with which a test finds this difference in 80% of experiments, from the
    noncentral t distribution, an approximation for Welch's test; None if it is zero or needs more than a
    million of them. It takes the measured difference and spread for the true ones, so with few seeds it is
    rough.

    Args:
        variances: of the differences of pairs (the paired test), or of both groups (Welch's test).
    """
    from scipy import stats

    shift = abs(mean) / math.sqrt(sum(variances))  # with one seed
    if shift * math.sqrt(MOST_SEEDS) < NORMAL_SHIFT:
        return None
    # a normal distribution would need this many, and a t distribution needs a few more
    n = max(2, math.floor((NORMAL_SHIFT / shift) ** 2))
    while True:
        degrees = (n - 1) * sum(variances) ** 2 / sum(one**2 for one in variances)
        limit = stats.t.isf(LEVEL / 2, degrees)
        if stats.nct.sf(limit, degrees, min(shift * math.sqrt(n), FAR)) >= POWER:
            return n
        n += 1


def differences(groups: dict[str, dict[int, float]], base: str) -> dict[str, Difference]:
    """
    Compare each other group with one, see `difference`. The p-values are corrected by Holm's method: with no
    true difference anywhere, the probability that any of them is below 0.05 is at most 5%. The intervals and
    `seeds_needed` are those of one comparison.

    Args:
        groups: {name: {seed: value}}.
        base: the name of the group to compare with.

    Source: S. Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    compared = {name: difference(groups[base], group) for name, group in groups.items() if name != base}
    tested = [name for name, result in compared.items() if result.p is not None]
    if len(tested) < 2:
        return compared
    largest = 0.0
    for rank, name in enumerate(sorted(tested, key=lambda name: compared[name].p)):
        result = compared[name]
        largest = max(largest, min(1.0, (len(tested) - rank) * result.p))
        method = f"{result.method}, p corrected for {len(tested)} comparisons (Holm)"
        compared[name] = replace(result, p=largest, method=method)
    return compared
