"""Is a difference of two groups larger than chance? On simulated runs, and compared with scipy."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy import stats

from isogpt.lab.significance import NO_TEST, Difference, corrected, difference, seeds_needed

EXPERIMENTS = 20_000  # a share of 80% of them has a standard error of 0.3 percent points
NO_CHANCE = "the seed changes nothing, so chance cannot be estimated: no test"
EFFECT = 0.004  # the true difference


@pytest.mark.parametrize("is_paired, spreads", [(True, (3, 3)), (False, (3, 3)), (False, (6, 3))])
def test_the_number_of_seeds_has_a_power_of_80_percent(is_paired, spreads):
    """The chance of a run is that of its seed, which a pair shares, and one with the group's spread."""
    squares = [(spread / 1000) ** 2 for spread in spreads]
    needed = seeds_needed(EFFECT, [sum(squares)] if is_paired else squares)
    assert needed > 5
    rng, shares = np.random.default_rng(1), []
    for seeds in (needed - 1, needed):
        shape = (EXPERIMENTS, seeds)
        of_seed = rng.normal(0, 0.01, shape) if is_paired else 0
        a, b = (rng.normal(0, spread / 1000, shape) + of_seed for spread in spreads)
        test = stats.ttest_rel if is_paired else partial(stats.ttest_ind, equal_var=False)
        shares.append((test(a, b + EFFECT, axis=1).pvalue < 0.05).mean())
    assert shares[0] < 0.815 and shares[1] > 0.785


def test_the_seeds_that_any_difference_needs():
    assert seeds_needed(1e9, [1.0]) == 2
    assert seeds_needed(0.0, [1.0]) is None and seeds_needed(1e-200, [1.0]) is None
    # a difference of one standard deviation: Cohen's tables
    assert seeds_needed(1.0, [1.0]) == 10 and seeds_needed(1.0, [1.0, 1.0]) == 17


def test_only_seeds_of_both_groups_are_pairs():
    a, b = {1: 1.0, 2: 2.0, 3: 3.5, 4: 9.0}, {2: 1.5, 3: 3.4, 1: 0.5, 7: 9.0}
    result = difference(a, b)
    assert result.method == "paired t-test over 3 seeds" and result.mean == pytest.approx(-1.1 / 3)
    # with one seed in common there are no pairs to test
    few = difference(a, {1: 1.1, 8: 2.0})
    test = stats.ttest_ind([1.1, 2.0], [*a.values()], equal_var=False)
    assert few.method == "Welch's t-test of 4 and 2 runs" and few.p == pytest.approx(test.pvalue)
    assert (few.low, few.high) == pytest.approx(test.confidence_interval(0.95))


@pytest.mark.parametrize(
    "a, b, mean, method",
    [
        ({1: 1.0}, {}, None, "at no step after the start were runs of both evaluated: no comparison"),
        ({1: 1.0}, {1: 1.5}, 0.5, f"one pair of runs {NO_TEST}"),
        ({1: 1.0, 2: 8.0}, {1: 1.5}, 0.5, f"one pair of runs {NO_TEST}"),  # seed 2 has no second run
        ({1: 1.0}, {2: 1.5, 3: 2.5}, 1.0, f"one run {NO_TEST}"),
        ({1: 1.5, 2: 1.5}, {3: 1.5, 4: 1.5}, 0.0, NO_CHANCE),
        ({1: 1.5, 2: 1.6}, {1: 1.6, 2: 1.7}, 0.1, NO_CHANCE),
    ],
)
def test_what_cannot_be_tested_says_so(a, b, mean, method):
    result = difference(a, b)
    assert result.mean == (None if mean is None else pytest.approx(mean)) and result.method == method
    assert (result.p, result.low, result.high, result.seeds_needed) == (None,) * 4


def test_several_groups_are_corrected_by_holm():
    """The smallest p of five counts five times, the next four times, and no p falls below the one before."""
    tests = {p: Difference(0.1, "test", p=p) for p in (0.04, 0.8, 0.01, 0.9, 0.03)}
    results = corrected(tests | {"one run": Difference(0.1, NO_TEST)})
    assert results.pop("one run") == Difference(0.1, NO_TEST)
    assert [result.p for result in results.values()] == pytest.approx([0.12, 1, 0.05, 1, 0.12])
    for p, result in results.items():
        assert replace(result, p=p, method="test") == tests[p]
        assert result.method == "test, p corrected for 5 comparisons (Holm)"
    assert corrected({"a": tests[0.8]}) == {"a": tests[0.8]}
