"""Is a difference between two groups larger than chance? On simulated runs, and compared with scipy."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from isogpt.lab import significance
from isogpt.lab.significance import difference, differences, power, seeds_needed

EXPERIMENTS = 20_000  # a share of 80% of them has a standard error of 0.3 percent points
EFFECT = 0.004  # the true difference


def simulated(rng, experiments, seeds, is_paired, spreads):
    """
    Losses of two groups whose true difference is EFFECT, (experiments, seeds) each. The chance of a run is
    that of its seed, which is the same for both runs of a pair, and its own, with the group's spread.
    """
    shape = (experiments, seeds)
    own = [rng.normal(0, spread, shape) for spread in spreads]
    of_seed = rng.normal(0, 0.01, shape) if is_paired else 0
    return 1.5 + of_seed + own[0], 1.5 + EFFECT + of_seed + own[1]


def by_seed(values, first=1):
    return dict(enumerate(values.tolist(), first))


DESIGNS = {
    "paired": (True, (0.003, 0.003)),
    "unpaired": (False, (0.003, 0.003)),
    "unequal variances": (False, (0.006, 0.003)),
}
designs = pytest.mark.parametrize("is_paired, spreads", DESIGNS.values(), ids=DESIGNS)


@designs
def test_the_number_of_seeds_has_a_power_of_80_percent(is_paired, spreads):
    squares = [spread**2 for spread in spreads]
    variances = [sum(squares)] if is_paired else squares
    needed = seeds_needed(EFFECT, *variances)
    assert needed > 5
    assert power(needed, EFFECT, *variances) >= 0.8 > power(needed - 1, EFFECT, *variances)
    for seeds in (needed, needed - 1):
        a, b = simulated(np.random.default_rng(1), EXPERIMENTS, seeds, is_paired, spreads)
        test = stats.ttest_rel(a, b, axis=1) if is_paired else stats.ttest_ind(a, b, axis=1, equal_var=False)
        share = (test.pvalue < 0.05).mean()
        assert abs(share - power(seeds, EFFECT, *variances)) < 0.015


@designs
def test_it_equals_scipy(is_paired, spreads):
    rng = np.random.default_rng(2)
    for seeds in (2, 3, 5, 20):
        for a, b in zip(*simulated(rng, 20, seeds, is_paired, spreads), strict=True):
            a = a if is_paired else np.append(a, 1.5)  # groups of different sizes
            result = difference(by_seed(a), by_seed(b, 1 if is_paired else 101))
            test = stats.ttest_rel(b, a) if is_paired else stats.ttest_ind(b, a, equal_var=False)
            low, high = test.confidence_interval(0.95)
            computed = (result.mean, result.p, result.low, result.high)
            expected = (b.mean() - a.mean(), test.pvalue, low, high)
            np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-12)
            assert result.counts == (len(a), len(b))


def test_the_power_has_a_value_for_each_size():
    """Where scipy's noncentral t distribution is nan, too."""
    for seeds in (2, 3, 5, 10, 100, 1000, 100_000):
        values = [power(seeds, shift / math.sqrt(seeds), 1.0) for shift in np.linspace(0, 100, 301)]
        assert values[0] == pytest.approx(0.05) and values[-1] > 0.9999
        assert all(0 <= before <= after + 1e-4 <= 1.001 for before, after in zip(values, values[1:]))
    assert (
        seeds_needed(1e9, 1.0) == 2 and seeds_needed(0.0, 1.0) is None and seeds_needed(1e-200, 1.0) is None
    )
    assert seeds_needed(1.0, 1.0) == 10  # a difference of one standard deviation: Cohen's tables
    assert seeds_needed(1.0, 1.0, 1.0) == 17


# ------------------------------------------------------------------------------------------------------------
# what cannot be tested says so


def test_seeds_of_one_group_only_are_left_out():
    a, b = {1: 1.0, 2: 2.0, 3: 3.5, 4: 9.0}, {2: 1.5, 3: 3.4, 1: 0.5, 7: 9.0}
    result = difference(a, b)
    assert result.is_paired and result.counts == (3, 3) and result.mean == pytest.approx(-1.1 / 3)
    assert result.left_out == "seeds 4, 7, in only one group"
    assert result.method == "paired t-test over 3 seeds"
    # with one seed in common there are no pairs to test
    few = difference(a, {1: 1.1, 8: 2.0})
    assert not few.is_paired and few.counts == (4, 2) and few.left_out == "" and few.p is not None


def test_a_run_that_diverged_is_left_out_and_named():
    result = difference({1: 1.0, 2: math.nan, 3: 1.2}, {1: 1.1, 2: 1.0, 3: 1.4, 4: math.inf})
    assert result.mean == pytest.approx(0.15) and result.counts == (2, 2)
    assert result.left_out == (
        "seed 2 of the first group, not finite; seed 4 of the second group, not finite; "
        "seed 2, in only one group"
    )
    nothing = difference({1: 1.0}, {1: math.nan})
    assert (nothing.mean, nothing.p) == (None, None) and nothing.method.startswith("a group without runs")


def test_too_few_runs_have_a_difference_and_no_test():
    pair = difference({1: 1.0}, {1: 1.5})
    assert (pair.mean, pair.low, pair.high, pair.p, pair.seeds_needed) == (0.5, None, None, None, None)
    assert pair.is_paired and pair.method == "one pair of runs: no test"
    assert difference({1: 1.0, 2: 8.0}, {1: 1.5}).mean == 0.5  # of the pair: seed 2 has no second run
    others = difference({1: 1.0}, {2: 1.5, 3: 2.5})
    assert (others.mean, others.p, others.is_paired) == (1.0, None, False)


@pytest.mark.parametrize("first", [1, 11], ids=["paired", "unpaired"])
def test_runs_without_any_chance(first):
    """Equal runs, as with a setting that changes nothing, have no p; nor do runs without spread."""
    values = np.array([1.5, 1.6, 1.7])
    if first == 11:
        values[:] = 1.6
    equal = difference(by_seed(values), by_seed(values, first))
    assert (equal.mean, equal.p, equal.low, equal.seeds_needed) == (0.0, None, None, None)
    assert equal.method == "the runs are equal"
    moved = difference(by_seed(values), by_seed(values + 0.1, first))
    assert moved.mean == pytest.approx(0.1) and moved.p is None
    assert moved.method == "the seed changes nothing, so chance cannot be estimated: no test"


def test_several_groups_are_corrected_by_holm():
    rng = np.random.default_rng(3)
    groups = {str(i): by_seed(rng.normal(1.5 + 0.004 * i, 0.01, 8)) for i in range(4)}
    groups["one run"] = {1: 1.5}
    results = differences(groups, "0")
    assert [*results] == ["1", "2", "3", "one run"] and results["one run"].p is None
    single = {name: difference(groups["0"], groups[name]) for name in results}
    order = sorted("123", key=lambda name: single[name].p)
    expected = [3 * single[order[0]].p, 2 * single[order[1]].p, single[order[2]].p]
    expected = np.minimum(np.maximum.accumulate(expected), 1)
    assert [results[name].p for name in order] == pytest.approx([*expected], abs=1e-15)
    for name in order:
        assert "p corrected for 3 comparisons (Holm)" in results[name].method
        assert replace(results[name], p=0, method="") == replace(single[name], p=0, method="")
    with pytest.raises(ValueError, match="no group 'x' to compare with; choose from '0', '1'"):
        differences(groups, "x")
    alone = differences({"a": groups["0"], "b": groups["1"]}, "a")
    assert alone["b"] == single["1"]
    assert significance.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": 0.03, "c": 0.06, "b": 0.06}
