"""What the pictures of runs show: the right numbers, and the same bytes each time."""

import math
from pathlib import Path

import numpy as np
import pytest

from isogpt.lab.pictures import losses_figure, write
from isogpt.lab.runs import Group, Run
from isogpt.lab.significance import difference

TOKENS = 16384  # of a step


def run(seed=1, offset=0.0, last=1000, every=100, is_finished=True):
    """A run whose losses fall from 4 to 1.5."""

    def record(step, **values):
        return {"iter": step, **values, "seconds": 2.0 * step, "tokens": step * TOKENS, "flops": 2e12 * step}

    def loss(step):
        return 1.5 + 2.5 * math.exp(-step / 100) + offset + 0.01 * seed * step / 1000

    places = range(0, last + 1, every)
    evaluated = [record(step, val_loss=loss(step), val_bpb=loss(step) / 3) for step in places]
    steps = [record(step, loss_mean=loss(step) + 0.1 * (-1) ** (step // 10)) for step in range(0, last, 10)]
    ending = {"event": "end"} if is_finished else {}
    return Run(Path(f"out-{seed}-{offset}"), "", {"seed": seed}, {}, steps, evaluated, ending)


def two_groups(seeds=3):
    """The second one better by 0.02, 0.03, ... of its seeds."""
    a = [run(seed) for seed in range(1, seeds + 1)]
    b = [run(seed, -0.01 - 0.01 * seed) for seed in range(1, seeds + 1)]
    return [Group("z_loss=0.0", a), Group("z_loss=0.0001", b)]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def losses_at(of_run):
    return np.array([record["val_loss"] for record in of_run.evaluations])


def band(axes):
    """The lower and upper edge of the first band, (n,) each."""
    corners = axes.collections[0].get_paths()[0].vertices
    at = [corners[corners[:, 0] == place, 1] for place in np.unique(corners[:, 0])]
    return np.array([y.min() for y in at]), np.array([y.max() for y in at])


def test_one_run_of_each_group():
    groups = two_groups(1)
    validation, training, differences = losses_figure(groups, "steps").axes
    np.testing.assert_allclose(validation.lines[1].get_ydata(), losses_at(groups[1].runs[0]))
    assert legend(validation) == ["z_loss=0.0: 1.5101", "z_loss=0.0001: 1.4901"]
    by_seed, zero, mean = differences.lines
    assert not any(zero.get_ydata()) and np.allclose(mean.get_ydata(), -0.02)
    assert legend(differences)[0] == "(z_loss=0.0001) minus (z_loss=0.0): -0.0200"
    # the noise of +-0.1 is smoothed, and the axis leaves out the fall at the start
    assert abs(training.lines[0].get_ydata()[-1] - 1.51) < 0.04
    assert 1.6 < validation.get_ylim()[1] < 2.5


def test_seeds_are_a_mean_with_a_band_and_pairs():
    groups = two_groups(3)
    validation, _, differences = losses_figure(groups, "steps").axes
    losses = np.array([losses_at(of_seed) for of_seed in groups[0].runs])
    error = losses.std(axis=0, ddof=1) / math.sqrt(3)
    np.testing.assert_allclose(validation.lines[0].get_ydata(), losses.mean(axis=0))
    np.testing.assert_allclose(band(validation), [losses.mean(axis=0) - error, losses.mean(axis=0) + error])
    assert legend(validation)[0] == f"z_loss=0.0: {losses[:, -1].mean():.4f} ± {error[-1]:.4f}"
    # a thin line for each seed, zero, and the mean in its interval
    *by_seed, _, mean = differences.lines
    assert [round(line.get_ydata()[-1], 6) for line in by_seed] == [-0.02, -0.03, -0.04]
    np.testing.assert_allclose(mean.get_ydata(), -0.03)
    last = [{of_run.seed: losses_at(of_run)[-1] for of_run in group.runs} for group in groups]
    result = difference(*last)
    low, high = band(differences)
    np.testing.assert_allclose((low[-1], high[-1]), (result.low, result.high))
    assert legend(differences)[1] == "95% interval, paired t-test over 3 seeds"


def test_what_the_x_axis_shows():
    groups = [Group("a", [run(1), run(2)])]
    for x, unit in (("steps", 1), ("tokens", TOKENS), ("seconds", 2), ("flops", 2e12)):
        line = losses_figure(groups, x).axes[0].lines[0]
        np.testing.assert_allclose(line.get_xdata(), np.arange(0, 1001, 100) * unit)
    del groups[0].runs[1].evaluations[-1]["flops"]
    with pytest.raises(ValueError, match="out-2-0.0 does not record its flops: use --x=steps"):
        losses_figure(groups, "flops")
    # with bits per byte there is no panel of the training loss, whose tokens differ
    (axes,) = losses_figure(groups, "steps", "val_bpb").axes
    assert axes.get_ylabel() == "bits per byte"
    expected = np.mean([losses_at(of_run) / 3 for of_run in groups[0].runs], axis=0)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), expected)


def test_evaluations_at_different_steps_are_interpolated():
    a, b = run(1), run(1, -0.02, every=50, last=900)
    del b.evaluations[10]  # of step 500
    _, _, mean = losses_figure([Group("a", [a]), Group("b", [b])], "steps").axes[2].lines
    assert [*mean.get_xdata()] == [*range(0, 901, 50)]
    at_500 = np.mean([losses_at(b)[9], losses_at(b)[10]])
    assert mean.get_ydata()[10] == pytest.approx(at_500 - losses_at(a)[5])
    assert mean.get_ydata()[12] == pytest.approx(-0.02)


def test_runs_that_do_not_count_are_not_part_of_the_mean():
    runs = [run(1), run(2), run(3, last=400, is_finished=False), run(4)]
    runs[3].evaluations[-1]["val_loss"] = math.nan
    begun = Run(Path("begun"), "", {"seed": 1})
    groups = [Group("lr=1", runs), Group("lr=2", [run(1, 0.1)]), Group("lr=3", [begun])]
    axes = losses_figure(groups, "steps").axes
    mean, killed, diverged, *_ = axes[0].lines
    assert len(axes) == 2 and killed.get_xdata()[-1] == 400 and diverged.get_xdata()[-1] == 900
    np.testing.assert_allclose(mean.get_ydata(), (losses_at(runs[0]) + losses_at(runs[1])) / 2)
    assert legend(axes[0])[1:] == ["lr=2: 1.6101", "lr=3: running or killed"]
    # the difference is of the pair of seed 1
    by_seed, _, difference_ = losses_figure(groups[:2], "steps").axes[2].lines
    assert difference_.get_ydata()[-1] == pytest.approx(0.1)


def test_the_file_is_the_same_each_time(tmp_path, recwarn):
    """With many groups, and names that are no formulas or in no font."""
    names = ["lr$x^$_b", "\u5b9e\u9a8c", "very_long_name=1, " * 20, *(f"n={i}" for i in range(12))]
    groups = [Group(name, [run(1)]) for name in names]
    for name in ("a.png", "b.png"):
        write(losses_figure(groups, "steps"), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert not [str(w.message) for w in recwarn if "Glyph" in str(w.message)]
