"""Is a difference of two groups larger than chance? On simulated runs, and compared with scipy."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from isogpt.lab.comparison import compare
from isogpt.lab.runs import Group, Run

EXPERIMENTS = 20_000  # a share of 80% of them has a standard error of 0.3 percent points
EFFECT = 0.004  # the true difference


def run_with(seed, loss):
    """A complete run with this validation loss at its end."""
    run = Run(Path("out"), "", {"seed": seed}, {"measures": {"digest": "d"}})
    run.evaluations, run.ending = [{"iter": 10, "val_loss": loss}], {"event": "end"}
    return run


def differences(*groups):
    """How groups of runs, {seed: loss}, differ from the first one."""
    named = [Group(f"{n}", [run_with(*one) for one in losses.items()]) for n, losses in enumerate(groups)]
    return [*compare(named, 0.0)["differences"].values()]


def needed_for(effect, *variances):
    """The seeds that this difference needs: of pairs, or of groups with these variances."""
    spreads = [(variance / 2) ** 0.5 for variance in variances]  # of two values around their mean
    if len(variances) == 1:
        groups = {1: 0.0, 2: 0.0}, {1: effect - spreads[0], 2: effect + spreads[0]}
    else:
        groups = {1: -spreads[0], 2: spreads[0]}, {3: effect - spreads[1], 4: effect + spreads[1]}
    (result,) = differences(*groups)
    return result["seeds_needed"]


@pytest.mark.parametrize("is_paired, spreads", [(True, (3, 3)), (False, (3, 3)), (False, (6, 3))])
def test_the_number_of_seeds_has_a_power_of_80_percent(is_paired, spreads):
    """The chance of a run is that of its seed, which a pair shares, and one with the group's spread."""
    squares = [(spread / 1000) ** 2 for spread in spreads]
    needed = needed_for(EFFECT, *([sum(squares)] if is_paired else squares))
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
    assert needed_for(1e9, 1.0) == 2
    assert needed_for(0.0, 1.0) is None and needed_for(1e-200, 1.0) is None
    # a difference of one standard deviation: Cohen's tables
    assert needed_for(1.0, 1.0) == 10 and needed_for(1.0, 1.0, 1.0) == 17


def test_only_seeds_of_both_groups_are_pairs():
    a, b = {1: 1.0, 2: 2.0, 3: 3.5, 4: 9.0}, {2: 1.5, 3: 3.4, 1: 0.5, 7: 9.0}
    (result,) = differences(a, b)
    assert result["method"] == "paired t-test over 3 seeds" and result["mean"] == pytest.approx(-1.1 / 3)
    # with one seed in common there are no pairs to test
    (few,) = differences(a, {1: 1.1, 8: 2.0})
    test = stats.ttest_ind([1.1, 2.0], [*a.values()], equal_var=False)
    assert few["method"] == "Welch's t-test of 4 and 2 runs" and few["p"] == pytest.approx(test.pvalue)
    assert (few["low"], few["high"]) == pytest.approx(test.confidence_interval(0.95))


@pytest.mark.parametrize(
    "a, b, mean, reason",
    [
        ({1: 1.0}, {1: 1.5}, 0.5, "one pair of runs cannot tell a change from chance"),
        ({1: 1.0, 2: 8.0}, {1: 1.5}, 0.5, "one pair of runs"),  # seed 2 has no second run
        ({1: 1.0}, {2: 1.5, 3: 2.5}, 1.0, "one run cannot tell a change from chance"),
        ({1: 1.5, 2: 1.5}, {3: 1.5, 4: 1.5}, 0.0, "the seed changes nothing"),
        ({1: 1.5, 2: 1.6}, {1: 1.6, 2: 1.7}, 0.1, "the seed changes nothing"),
    ],
)
def test_what_cannot_be_tested_says_so(a, b, mean, reason):
    (result,) = differences(a, b)
    assert result["mean"] == pytest.approx(mean) and reason in result["method"]
    assert [result[name] for name in ("p", "low", "high", "seeds_needed")] == [None] * 4


def test_several_groups_are_corrected_by_holm():
    """The smallest p of five counts five times, the next four times, and no p falls below the one before."""
    rng, base, factor, largest = np.random.default_rng(2), dict(enumerate([3.0, 3.1, 3.2])), 5, 0.0
    shifts = [0.9, 0.01, 0.3, 0.05, 0.31]
    groups = [{seed: loss + shift + rng.normal(0, 0.1) for seed, loss in base.items()} for shift in shifts]
    alone = [differences(base, group)[0] for group in groups]
    *together, untested = differences(base, *groups, {0: 3.0})
    assert untested["p"] is None
    for one, result in sorted(zip(alone, together, strict=True), key=lambda pair: pair[0]["p"]):
        largest = max(largest, min(1.0, factor * one["p"]))
        method = f"{one['method']}, p corrected for 5 comparisons (Holm)"
        assert result == one | {"p": pytest.approx(largest), "method": method}
        factor -= 1
    assert largest > 0.5 > min(result["p"] for result in together)
