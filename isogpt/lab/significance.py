"""Is a difference between two groups of runs larger than chance? t-tests over the seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

import numpy as np

from isogpt.common.packages import needed_by

LEVEL = 0.05  # of the intervals, and at which `seeds_needed` detects a difference with this power
POWER = 0.8
FAR = 30  # a shift for which even two seeds have a power of 0.98; scipy returns nan for many larger ones
MOST_SEEDS = 1000
NO_TEST = "cannot tell a change from chance"  # one run, or one pair of runs
ROUNDING = 1e-12  # a spread below this share of the values is rounding


@dataclass(frozen=True)
class Difference:
    """How the values of group b differ from those of group a; None: too few runs to know."""

    mean: float | None  # of b minus a
    method: str  # what was computed, or why it could not be
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

    Raises:
        ValueError: scipy is missing.
    """
    shared = a.keys() & b.keys()
    is_paired = len(shared) >= 2 or len(shared) == min(len(a), len(b)) == 1
    a, b = ([one[seed] for seed in (shared if is_paired else one)] for one in (a, b))
    if not a or not b:
        return Difference(None, "at no step after the start were runs of both evaluated: no comparison")
    mean = fmean(b) - fmean(a)
    if min(len(a), len(b)) == 1:
        return Difference(mean, f"one {'pair of runs' if is_paired else 'run'} {NO_TEST}")
    variances = [variance(np.subtract(b, a))] if is_paired else [variance(a), variance(b)]
    if math.sqrt(sum(variances)) <= ROUNDING * max(map(abs, a + b)):  # as in runs with `exact`
        return Difference(mean, "the seed changes nothing, so chance cannot be estimated: no test")
    with needed_by("a p-value", "scipy"):
        from scipy import stats
    if is_paired:
        test, method = stats.ttest_rel(b, a), f"paired t-test over {len(a)} seeds"
    else:
        test, method = stats.ttest_ind(b, a, equal_var=False), f"Welch's t-test of {len(a)} and {len(b)} runs"
    low, high = test.confidence_interval(1 - LEVEL)
    needed = seeds_needed(mean, variances)
    return Difference(mean, method, float(low), float(high), float(test.pvalue), needed)


def seeds_needed(mean: float, variances: Sequence[float]) -> int | None:
    """
    Return the fewest seeds per group with which a test finds this difference in 80% of experiments, from the
    noncentral t distribution, which for Welch's test is an approximation; None if it needs more than
    MOST_SEEDS. The measured difference and spread are taken for the true ones, so with few seeds it is rough.

    Args:
        variances: of the differences of pairs (the paired test), or of both groups (Welch's test).
    """
    from scipy import stats

    shift = abs(mean) / math.sqrt(sum(variances))  # with one seed
    seeds = np.arange(2, MOST_SEEDS + 1)
    degrees = (seeds - 1) * sum(variances) ** 2 / sum(one**2 for one in variances)
    limit = stats.t.isf(LEVEL / 2, degrees)
    power = stats.nct.sf(limit, degrees, np.minimum(shift * np.sqrt(seeds), FAR))
    enough = seeds[power >= POWER]
    return int(enough[0]) if len(enough) else None


def corrected(results: dict[str, Difference]) -> dict[str, Difference]:
    """
    Correct the p-values of several comparisons by Holm's method: with no true difference anywhere, the
    probability that any of them is below 0.05 is at most 5%. The intervals and `seeds_needed` are those of
    one comparison.

    Source: S. Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    tested = sorted((result.p, name) for name, result in results.items() if result.p is not None)
    results, largest = dict(results), 0.0
    for rank, (p, name) in enumerate(tested if len(tested) > 1 else ()):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        method = f"{results[name].method}, p corrected for {len(tested)} comparisons (Holm)"
        results[name] = replace(results[name], p=largest, method=method)
    return results
