"""What the pictures of runs show: the right numbers, and the same bytes each time."""

import math
from pathlib import Path

import numpy as np
import pytest
from pytest import approx
from scipy import stats
from test_compare import write_run

from isogpt.lab.pictures import losses_figure, write
from isogpt.lab.runs import Group, Run, read_run


def run(seed=1, offset=0.0, last=10, ending="end"):
    """A run whose losses fall from 4 to 1.5 in 100 steps, with noise."""
    losses = [1.5 + 2.5 * math.exp(-n) + offset + seed * n / 1000 for n in range(last + 1)]
    folder = Path(f"out-{seed}-{offset}")
    write_run(folder, losses, ending=ending, seed=seed)
    noisy = read_run(folder)
    for record in noisy.steps:
        record["loss_mean"] += 0.1 * (-1) ** record["iter"]
    return noisy


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def losses_at(of_run):
    return np.array([record["val_loss"] for record in of_run.evaluations])


def band(axes):
    """The lower and upper edge of the first band, (2, n)."""
    corners = axes.collections[0].get_paths()[0].vertices
    at = [corners[corners[:, 0] == place, 1] for place in np.unique(corners[:, 0])]
    return np.array([(y.min(), y.max()) for y in at]).T


def test_seeds_are_a_mean_with_a_band_and_pairs(at):
    a, b = ([run(seed, -offset * (1 + seed)) for seed in (1, 2, 3)] for offset in (0.0, 0.01))
    before, after = (np.array([losses_at(of_seed) for of_seed in runs]) for runs in (a, b))
    groups = [Group("z_loss=0.0", a), Group("z_loss=0.0001", b)]
    validation, training, differences = losses_figure(groups, "steps").axes
    center, error = before.mean(axis=0), stats.sem(before)
    assert validation.lines[0].get_ydata() == approx(center)
    assert band(validation) == approx(np.array([center - error, center + error]))
    assert legend(validation)[0] == f"z_loss=0.0: {center[-1]:.4f} ± {error[-1]:.4f}"
    # the noise of +-0.1 is smoothed, and the axis leaves out the fall at the start
    assert abs(training.lines[0].get_ydata()[-1] - 1.52) < 0.04
    assert 1.6 < validation.get_ylim()[1] < 2.5
    # a thin line for each seed, zero, and the mean in its interval
    *by_seed, zero, mean = differences.lines
    assert [line.get_ydata()[-1] for line in by_seed] == approx([-0.02, -0.03, -0.04])
    assert not any(zero.get_ydata()) and mean.get_ydata() == approx(-0.03)
    interval = stats.ttest_rel(after[:, -1], before[:, -1]).confidence_interval(0.95)
    assert band(differences)[:, -1] == approx([*interval])
    minus, interval = legend(differences)
    assert minus == "(z_loss=0.0001) minus (z_loss=0.0): -0.0300"
    assert interval == "95% interval, paired t-test over 3 seeds"


def test_what_the_x_axis_shows(at):
    groups = [Group("a", [run(1), run(2)])]
    for x, unit in (("steps", 1), ("tokens", 256), ("seconds", 2), ("flops", 1e6)):
        line = losses_figure(groups, x).axes[0].lines[0]
        assert line.get_xdata() == approx(np.arange(0, 101, 10) * unit)
    del groups[0].runs[1].evaluations[-1]["flops"]
    with pytest.raises(ValueError, match="out-2-0.0 does not record its flops: use --x=steps"):
        losses_figure(groups, "flops")
    # with bits per byte there is no panel of the training loss, whose tokens differ
    (axes,) = losses_figure(groups, "steps", "val_bpb").axes
    assert axes.get_ylabel() == "bits per byte"
    assert axes.lines[0].get_ydata() == approx(0.7 * sum(map(losses_at, groups[0].runs)) / 2)


def test_evaluations_at_different_steps_are_interpolated(at):
    a, b = run(), run(offset=-0.02, last=9)
    expected = (losses_at(b)[3] + losses_at(b)[5]) / 2 - losses_at(a)[4]
    del a.evaluations[1::2], b.evaluations[4]
    _, _, mean = losses_figure([Group("a", [a]), Group("b", [b])], "steps").axes[2].lines
    assert [*mean.get_xdata()] == [*range(0, 91, 10)]
    assert mean.get_ydata()[[4, 6]] == approx([expected, -0.02])


def test_runs_that_do_not_count_are_not_part_of_the_mean(at):
    runs = [run(1), run(2), run(3, last=4, ending="preempted"), run(4)]
    runs[3].evaluations[-1]["val_loss"] = math.nan
    begun = Run(Path("begun"), "", {"seed": 1})
    groups = [Group("lr=1", runs), Group("lr=2", [run(1, 0.1)]), Group("lr=3", [begun])]
    axes = losses_figure(groups, "steps").axes
    mean, killed, diverged, *_ = axes[0].lines
    assert len(axes) == 2 and killed.get_xdata()[-1] == 40 and diverged.get_xdata()[-1] == 90
    assert mean.get_ydata() == approx((losses_at(runs[0]) + losses_at(runs[1])) / 2)
    assert legend(axes[0])[1:] == ["lr=2: 1.6101", "lr=3: running or killed"]
    # the difference is of the pair of seed 1
    *_, mean = losses_figure(groups[:2], "steps").axes[2].lines
    assert mean.get_ydata()[-1] == approx(0.1)


def test_the_file_is_the_same_each_time(at, recwarn):
    """With many groups, and names that are no formulas or in no font."""
    names = ["lr$x^$_b", "\u5b9e\u9a8c", "very_long_name=1, " * 20, *(f"n={i}" for i in range(12))]
    groups = [Group(name, [run(1)]) for name in names]
    for name in ("a.png", "b.png"):
        write(losses_figure(groups, "steps"), Path(name))
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert not [str(w.message) for w in recwarn if "Glyph" in str(w.message)]
