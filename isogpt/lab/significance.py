"""Is a difference between two groups of runs larger than chance? t-tests over the seeds."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from isogpt.common.console import shortened
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
    low: float | None  # the interval that contains the true difference with 95% confidence
    high: float | None
    # the probability of a difference at least this large, in either direction, if there were none
    p: float | None
    is_paired: bool  # by seed
    counts: tuple[int, int]  # how many runs of a and b are compared; in pairs, equally many
    # per group, of this design, to detect a true difference of this size in 80% of experiments with p < 0.05
    seeds_needed: int | None
    method: str  # what was computed, or why it could not be
    left_out: str = ""  # which runs were not compared, and why


def difference(a: dict[int, float], b: dict[int, float]) -> Difference:
    """
    Compare two groups of runs by a value of each run, such as its final validation loss.

    If at least two seeds occur in both groups, this is the paired t-test over these seeds: runs with the same
    seed read the same data, so much of what is due to chance is the same in both and cancels. Otherwise it is
    Welch's t-test, which does not assume equal variances. Values that are not finite are left out, and
    `left_out` says so: the result then describes the runs that did not diverge.

    `seeds_needed` takes the measured difference and spread for the true ones, so with few seeds it is rough.

    Args:
        a, b: {seed: value}.
    """
    left_out = [
        f"{seeds_text(seeds)} of the {which} group, not finite"
        for which, group in (("first", a), ("second", b))
        if (seeds := {seed for seed, value in group.items() if not math.isfinite(value)})
    ]
    a = {seed: value for seed, value in a.items() if math.isfinite(value)}
    b = {seed: value for seed, value in b.items() if math.isfinite(value)}
    shared = sorted(a.keys() & b.keys())
    if len(shared) >= 2 or (shared and min(len(a), len(b)) < 2):
        if others := a.keys() ^ b.keys():
            left_out.append(f"{seeds_text(others)}, in only one group")
        result = paired([a[seed] for seed in shared], [b[seed] for seed in shared])
    else:
        result = unpaired([*a.values()], [*b.values()])
    return replace(result, left_out="; ".join(left_out))


def seeds_text(seeds: Collection[int]) -> str:
    """Return some seeds for a message."""
    name = "seed" if len(seeds) == 1 else "seeds"
    return f"{name} {shortened([str(seed) for seed in sorted(seeds)])}"


def differences(groups: dict[str, dict[int, float]], baseline: str) -> dict[str, Difference]:
    """
    Compare each other group with one, see `difference`. The p-values are corrected by Holm's method: with no
    true difference anywhere, the probability that any of them is below 0.05 is at most 5%. The intervals and
    `seeds_needed` are those of one comparison.

    Args:
        groups: {name: {seed: value}}.

    Raises:
        ValueError: `baseline` is not the name of a group.

    Source: S. Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    if baseline not in groups:
        names = shortened([repr(name) for name in groups], 10)
        raise ValueError(f"there is no group {baseline!r} to compare with; choose from {names}")
    compared = {
        name: difference(groups[baseline], group) for name, group in groups.items() if name != baseline
    }
    corrected = holm({name: result.p for name, result in compared.items() if result.p is not None})
    if len(corrected) < 2:
        return compared
    return {
        name: replace(
            result,
            p=corrected[name],
            method=f"{result.method}, p corrected for {len(corrected)} comparisons (Holm)",
        )
        if name in corrected
        else result
        for name, result in compared.items()
    }


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Return the p-values corrected for their number, by Holm's method."""
    corrected, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=itemgetter(1))):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[name] = largest
    return corrected


def has_scipy() -> bool:
    """Whether differences can be tested on this machine."""
    try:
        t_test(0.0, 1.0, 1)
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------
# the two tests


def paired(a: list[float], b: list[float]) -> Difference:
    """The paired t-test of values whose seeds are equal: the t-test of the differences of the pairs."""
    n = len(a)
    counts = (n, n)
    by_seed = [after - before for before, after in zip(a, b, strict=True)]
    mean = mean_of(by_seed)
    if n < 2:
        return Difference(mean, None, None, None, True, counts, None, "one pair of runs: no test")
    variance = variance_of(by_seed)
    if is_rounding(variance, a + b):
        return Difference(mean, None, None, None, True, counts, None, without_spread(by_seed))
    result = Difference(mean, None, None, None, True, counts, None, f"paired t-test over {n} seeds")
    return tested(result, math.sqrt(variance / n), n - 1, [variance])


def unpaired(a: list[float], b: list[float]) -> Difference:
    """
    Welch's t-test of values whose seeds differ.

    Source: B. L. Welch, The generalization of Student's problem when several different population variances
    are involved, 1947.
    """
    counts = (len(a), len(b))
    if min(counts) == 0:
        return Difference(None, None, None, None, False, counts, None, "a group without runs: no comparison")
    mean = mean_of(b) - mean_of(a)
    if min(counts) < 2:
        return Difference(mean, None, None, None, False, counts, None, "one run in a group: no test")
    variances = variance_of(a), variance_of(b)
    if is_rounding(sum(variances), a + b):
        return Difference(mean, None, None, None, False, counts, None, without_spread([mean]))
    squares = variances[0] / len(a), variances[1] / len(b)  # of the standard errors
    degrees = sum(squares) ** 2 / (squares[0] ** 2 / (len(a) - 1) + squares[1] ** 2 / (len(b) - 1))
    method = f"Welch's t-test of {len(a)} and {len(b)} runs (fewer than two seeds are in both groups)"
    result = Difference(mean, None, None, None, False, counts, None, method)
    return tested(result, math.sqrt(sum(squares)), degrees, variances)


def tested(result: Difference, error: float, degrees: float, variances: Sequence[float]) -> Difference:
    """
    Return a result with the interval, p and the seeds needed; without scipy, with the reason for their lack.

    Args:
        error, degrees: see `t_test`.
        variances: see `seeds_needed`.
    """
    try:
        low, high, p = t_test(result.mean, error, degrees)
    except ValueError as e:
        return replace(result, method=f"no test: {e}")
    return replace(result, low=low, high=high, p=p, seeds_needed=seeds_needed(result.mean, *variances))


def without_spread(differences: list[float]) -> str:
    """Why there is no test of values that chance did not change, as in runs with `exact`."""
    if any(differences):
        return "the seed changes nothing, so chance cannot be estimated: no test"
    return "the runs are equal"


def is_rounding(variance: float, values: list[float]) -> bool:
    """Whether the variance of differences of these values is that of their rounding."""
    return math.sqrt(variance) <= ROUNDING * max(abs(value) for value in values)


def mean_of(values: list[float]) -> float:
    """The mean."""
    return math.fsum(values) / len(values)


def variance_of(values: list[float]) -> float:
    """The unbiased estimate of the variance, of at least two values."""
    mean = mean_of(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def t_test(mean: float, error: float, degrees: float) -> tuple[float, float, float]:
    """
    Return the ends of the confidence interval and the two-sided p-value.

    Args:
        error: the standard error of the mean.
        degrees: of freedom.
    """
    with needed_by("a p-value", "scipy"):
        from scipy.special import stdtr, stdtrit  # Student's distribution, and its inverse

    half = float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error
    return mean - half, mean + half, float(2 * stdtr(degrees, -abs(mean) / error))


# ------------------------------------------------------------------------------------------------------------
# how many seeds a difference needs


def seeds_needed(mean: float, *variances: float) -> int | None:
    """
    Return the fewest seeds per group with which a test finds this difference in 80% of experiments, or None
    if it is zero or needs more than a million of them.

    Args:
        mean: the true difference.
        variances: of the differences of pairs (the paired test), or of both groups (Welch's test).
    """
    shift = abs(mean) / math.sqrt(sum(variances))  # with one seed
    if shift * math.sqrt(MOST_SEEDS) < NORMAL_SHIFT:
        return None
    # a normal distribution would need this many, and a t distribution needs a few more
    n = max(2, math.floor((NORMAL_SHIFT / shift) ** 2))
    while power(n, mean, *variances) < POWER:
        n += 1
    return n


def power(n: int, mean: float, *variances: float) -> float:
    """
    Return the probability that p < 0.05 with n seeds per group, from the noncentral t distribution; for
    Welch's test, this is an approximation. The arguments are those of `seeds_needed`.
    """
    with needed_by("the number of seeds", "scipy"):
        from scipy.special import nctdtr, stdtrit

    shift = abs(mean) / math.sqrt(sum(variances) / n)
    degrees = (n - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
    limit = float(stdtrit(degrees, 1 - LEVEL / 2))
    if shift > FAR:
        return 1.0
    # the other end, where scipy returns nan, has no mass from a shift of 6 on
    other_end = float(nctdtr(degrees, shift, -limit)) if shift < 6 else 0.0
    return 1 - float(nctdtr(degrees, shift, limit)) + other_end
