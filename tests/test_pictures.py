"""What the pictures of runs show: the right numbers, legible names, and the same bytes each time."""

import importlib.util
import math
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from test_packages import hide  # noqa: F401, a fixture

from isogpt.lab import pictures, significance
from isogpt.lab.pictures import draw, draw_statistics, losses_figure, statistics_figure
from isogpt.lab.runs import Group, Run
from isogpt.lab.significance import difference

TOKENS = 16384  # of a step


def run(seed=1, offset=0.0, last=1000, every=100, folder="out", bad_from=math.inf, speed=1.0):
    """A run whose losses fall from 4 to 1.5, and are not finite from a step on."""

    def record(step, **values):
        values = {name: value if step < bad_from else "nan" for name, value in values.items()}
        return {"iter": step, **values, "seconds": step * speed, "tokens": step * TOKENS}

    def loss(step):
        return 1.5 + 2.5 * math.exp(-step / 100) + offset + 0.01 * seed * step / 1000

    evaluated = [*range(0, last + 1, every)]
    evaluations = [record(step, val_loss=loss(step), val_bpb=loss(step) / 3) for step in evaluated]
    steps = [record(step, loss=loss(step) + 0.1 * (-1) ** (step // 10)) for step in range(0, last, 10)]
    facts = {"flops_per_step": 2e12, "tokens_per_step": TOKENS}
    return Run(Path(folder), {"seed": seed}, facts, evaluations, steps)


def two_groups(seeds=3):
    """The second one better by 0.02, 0.03, ... of its seeds."""
    a = [run(seed) for seed in range(1, seeds + 1)]
    b = [run(seed, -0.01 - 0.01 * seed) for seed in range(1, seeds + 1)]
    return [Group("z_loss=0.0", a), Group("z_loss=0.0001", b)]


def panels(figure):
    """{the first line of the title: the panel}"""
    return {axes.get_title(loc="left").splitlines()[0].partition(":")[0]: axes for axes in figure.axes}


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def losses_at(of_run, key="val_loss"):
    return np.array([record[key] for record in of_run.evaluations])


def band(axes, index=0):
    """The lower and upper edge of a band, (n,) each."""
    corners = axes.collections[index].get_paths()[0].vertices
    places = np.unique(corners[:, 0])
    at = [corners[corners[:, 0] == place, 1] for place in places]
    return np.array([y.min() for y in at]), np.array([y.max() for y in at])


# ------------------------------------------------------------------------------------------------------------
# losses


def test_one_run_of_each_group():
    groups = two_groups(1)
    figure = losses_figure(groups, "steps")
    assert [*panels(figure)] == [
        "Validation loss",
        "Training loss, smoothed",
        "Difference of the validation losses",
    ]
    validation, training, differences = panels(figure).values()
    for line, group in zip(validation.lines, groups, strict=True):
        np.testing.assert_allclose(line.get_xydata()[:, 0], range(0, 1001, 100))
        np.testing.assert_allclose(line.get_xydata()[:, 1], losses_at(group.runs[0]))
    assert not validation.collections and validation.get_ylabel() == "loss (nats per token)"
    zero, mean = differences.lines
    assert not any(zero.get_ydata()) and np.allclose(mean.get_ydata(), -0.02)
    assert "\N{MINUS SIGN}0.0200 at the end; below zero, z_loss=0.0001 is better" in differences.get_title(
        "left"
    )
    assert legend(figure) == ["z_loss=0.0: 1.5101", "z_loss=0.0001: 1.4901"]
    # the noise of +-0.1 is smoothed, and the axis shows what follows the fall
    assert abs(training.lines[0].get_ydata()[-1] - 1.51) < 0.03
    low, high = validation.get_ylim()
    assert low < 1.49 and 1.6 < high < 2


def test_seeds_are_a_mean_with_a_band_and_pairs():
    groups = two_groups(3)
    figure = losses_figure(groups, "steps")
    validation, _, differences = panels(figure).values()
    assert len(validation.lines) == len(validation.collections) == 2
    losses = np.array([losses_at(of_seed) for of_seed in groups[0].runs])
    np.testing.assert_allclose(validation.lines[0].get_ydata(), losses.mean(axis=0))
    error = losses.std(axis=0, ddof=1) / math.sqrt(3)
    low, high = band(validation)
    np.testing.assert_allclose(high, losses.mean(axis=0) + error)
    np.testing.assert_allclose(low, losses.mean(axis=0) - error)
    assert legend(figure)[0] == f"z_loss=0.0: {losses[:, -1].mean():.4f} ± {error[-1]:.4f} (3 seeds)"
    # the zero line, a thin line for each seed, and the mean in its interval
    zero, *by_seed, mean = differences.lines
    assert [round(line.get_ydata()[-1], 6) for line in by_seed] == [-0.02, -0.03, -0.04]
    np.testing.assert_allclose(mean.get_ydata(), -0.03)
    last = [{of_run.settings["seed"]: losses_at(of_run)[-1] for of_run in group.runs} for group in groups]
    result = difference(*last)
    low, high = band(differences)
    np.testing.assert_allclose((low[-1], high[-1]), (result.low, result.high))
    minus = "\N{MINUS SIGN}"
    interval = f"95% interval {result.low:+.4f} to {result.high:+.4f}".replace("-", minus)
    interval += " (paired t-test over 3 seeds)"
    assert f"{minus}0.0300 at the end, {interval}; below" in differences.get_title("left")


def test_what_the_x_axis_shows():
    groups = [Group("a", [run(1), run(2, speed=3.0)])]
    for x, unit, label in (
        ("steps", 1, "training step"),
        ("tokens", TOKENS / 1e6, "training tokens (M)"),
        ("seconds", 2 / 60, "training time (minutes)"),  # the mean of both runs
        ("flops", 2e12 / 1e15, "training computation (PFLOP)"),
    ):
        for axes in losses_figure(groups, x).axes:
            assert axes.get_xlabel() == label
        validation = panels(losses_figure(groups, x))["Validation loss"]
        np.testing.assert_allclose(validation.lines[0].get_xdata(), np.arange(0, 1001, 100) * unit)
    with pytest.raises(ValueError, match="x='time': choose from steps, tokens, seconds, flops"):
        losses_figure(groups, "time")
    del groups[0].runs[1].facts["flops_per_step"]
    with pytest.raises(ValueError, match="out does not record its flops: use --x=steps"):
        losses_figure(groups, "flops")


def test_evaluations_at_different_steps_are_interpolated():
    """Of seeds, and of pairs, whose difference is shown where both have been evaluated."""
    a, b = run(1, every=100), run(1, -0.02, every=50, last=900)
    b.evaluations = [record for record in b.evaluations if record["iter"] != 500]
    figure = losses_figure([Group("a", [a]), Group("b", [b])], "tokens")
    _, mean = panels(figure)["Difference of the validation losses"].lines
    places = [step for step in range(0, 901, 50)]
    np.testing.assert_allclose(mean.get_xdata(), np.array(places) * TOKENS / 1e6)
    at_500 = np.mean([losses_at(b)[9], losses_at(b)[10]])
    assert mean.get_ydata()[places.index(500)] == pytest.approx(at_500 - losses_at(a)[5])
    assert mean.get_ydata()[places.index(600)] == pytest.approx(-0.02)
    # one group: the mean of both, as far as both are
    seeds = losses_figure([Group("a", [a, b])], "steps").axes[0].lines[0]
    assert seeds.get_xdata()[-1] == 900 and len(seeds.get_xdata()) == len(places)


def test_runs_that_stopped_or_diverged_are_not_part_of_the_mean():
    runs = [run(1), run(2), run(3, last=400), run(4, bad_from=700)]
    figure = losses_figure([Group("lr=1", runs), Group("lr=2", [run(1, 0.1)])], "steps")
    lines = panels(figure)["Validation loss"].lines
    mean, killed, killed_end, diverged, diverged_end, _ = lines
    np.testing.assert_allclose(mean.get_ydata(), (losses_at(runs[0]) + losses_at(runs[1])) / 2)
    assert killed.get_xdata()[-1] == killed_end.get_xdata()[0] == 400 and killed_end.get_marker() == "x"
    assert diverged.get_xdata()[-1] == diverged_end.get_xdata()[0] == 600
    assert "(2 of 4 seeds)" in legend(figure)[0] and legend(figure)[1] == "lr=2: 1.6101"
    assert legend(figure)[2] == "a run that diverged or stopped before the others, not part of the mean"
    # only the pair of seed 1 is left
    assert "+0.1000 at the end; below" in figure.axes[2].get_title("left")


def test_a_group_that_diverged_or_stopped_says_so():
    """Its last finite loss is not its result."""
    groups = [Group(name, [of_run]) for name, of_run in zip("abc", [run(), run(bad_from=500), run(last=300)])]
    figure = losses_figure(groups, "steps")
    assert legend(figure)[:3] == [
        "a: 1.5101",
        "b: diverged",
        f"c: {losses_at(groups[2].runs[0])[-1]:.4f} at step 300",
    ]
    assert [line.get_marker() for line in figure.axes[0].lines] == [".", "None", "x", "."]
    assert len(losses_figure(groups[:2], "steps").axes) == 2  # there is no difference to show


def test_groups_without_an_evaluation():
    begun = run(1)
    begun.evaluations, begun.steps = [], []
    figure = losses_figure([Group("a", [run(1)]), Group("b", [begun])], "steps")
    assert len(figure.axes) == 2 and legend(figure) == ["a: 1.5101", "b: no evaluation"]
    with pytest.raises(ValueError, match="nothing to draw: no run has an evaluation with val_loss"):
        losses_figure([Group("b", [begun])], "steps")


def test_bits_per_byte_and_other_validation_sets():
    groups = two_groups(2)
    figure = losses_figure(groups, "steps", "val_bpb")
    assert [*panels(figure)] == ["Validation loss", "Difference of the validation losses"]
    assert figure.axes[0].get_ylabel() == "loss (bits per byte)"
    expected = np.mean([losses_at(of_run, "val_bpb") for of_run in groups[1].runs], axis=0)
    np.testing.assert_allclose(figure.axes[0].lines[1].get_ydata(), expected)
    for record in groups[0].runs[0].evaluations:
        record["val_loss/code"] = 3.0
    figure = losses_figure(groups[:1], "steps", "val_loss/code")
    assert "Validation loss of code" in panels(figure) and legend(figure) == [
        "z_loss=0.0: 3.0000 (1 of 2 seeds)"
    ]


def test_without_scipy_there_is_no_panel_of_differences(hide):  # noqa: F811
    hide("scipy")
    assert [*panels(losses_figure(two_groups(), "steps"))] == ["Validation loss", "Training loss, smoothed"]
    result = difference({1: 1.0, 2: 2.0}, {1: 2.0, 2: 2.5})
    assert result.mean == 0.75 and result.p is None
    assert re.fullmatch(r"no test: a p-value needs scipy \(.*\): pip install scipy", result.method)
    assert not significance.has_scipy()


def test_a_diverged_run_does_not_flatten_the_others():
    wild = run(1)
    for record in wild.evaluations[3:]:
        record["val_loss"] = 1e6
    axes = losses_figure([Group("a", [run(1)]), Group("b", [wild])], "steps").axes[0]
    assert axes.get_ylim()[1] < 4.2  # the loss of the first evaluation


# ------------------------------------------------------------------------------------------------------------
# files


def chunks(path):
    """The names of the chunks of a PNG file."""
    content, names, at = path.read_bytes(), [], 8
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        names.append(content[at + 4 : at + 8])
        at += size + 12
    return set(names)


def test_the_file_is_the_same_each_time_and_tells_nothing_else(tmp_path, recwarn):
    """With many groups, and names that are no formulas, in no font or no text."""
    names = ["lr$x^$_b", "\u5b9e\u9a8c", os.fsdecode(b"caf\xe9"), "very_long_name=1, " * 20]
    groups = [Group("", [run(1, folder=name)]) for name in names]
    groups += [Group(f"n={i}", [run(1, i / 10)]) for i in range(9)]
    first = draw(groups, "steps", tmp_path / "a.png").read_bytes()
    assert draw(groups, "steps", tmp_path / "b.png").read_bytes() == first
    assert chunks(tmp_path / "a.png") == {b"IHDR", b"pHYs", b"IDAT", b"IEND"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]
    assert not [str(w.message) for w in recwarn if "Glyph" in str(w.message)]


def test_a_missing_matplotlib_is_named(hide, tmp_path):  # noqa: F811
    assert importlib.util.find_spec("matplotlib")
    hide("matplotlib")
    with pytest.raises(ValueError, match=r"^the picture needs matplotlib \(.*\): pip install matplotlib$"):
        draw(two_groups(), "steps", tmp_path / "a.png")
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------------------------------------
# the statistics of layers


def with_statistics(depth=3):
    of_run = run(1)
    for step in (0, 100, 200):
        norms = {
            f"{block}.{kind}": 3.0 + block for block in range(depth) for kind in ("attn.c_attn", "mlp.c_fc")
        }
        others = {"wte": 10.0, "lm_head": 10.0}
        of_run.statistics.append(
            {
                "iter": step,
                "statistics": {
                    "weight_norm": norms | others,
                    "grad_norm": {name: "nan" if step == 200 else 0.5 for name in norms} | others,
                    "update_norm": {
                        name: norm / 10 ** (2 + step / 200) for name, norm in (norms | others).items()
                    },
                    "activation_rms": {
                        f"{block}.{part}": 2.0 for block in range(depth) for part in ("attn", "mlp")
                    },
                    "attention_logit": {f"{block}.attn": 5.0 + step + block for block in range(depth)},
                },
            }
        )
    return of_run


def test_the_statistics_of_blocks(tmp_path):
    groups = [
        Group("a=1", [run(1), with_statistics()]),
        Group("a=2", [with_statistics(12)]),
        Group("a=3", [run()]),
    ]
    figure = statistics_figure(groups)
    grid = np.array(figure.axes).reshape(5, 2)
    titles = [axes.get_title("left").splitlines() for axes in grid[:, 0]]
    assert titles[0] == ["a=1", "norm of the weights"] and grid[0, 1].get_title("left").startswith("a=2\n")
    assert [title[-1] for title in titles] == [title for _, title, _ in pictures.PANELS]
    weights, gradients, ratios, activations, logits = (axes.lines for axes in grid[:, 0])
    # blocks 0 to 2, and wte and lm_head
    assert [line.get_ydata()[0] for line in weights] == pytest.approx(
        [math.sqrt(2) * (3 + i) for i in range(3)] + [10] * 2
    )
    expected = [0.01, 0.01 / math.sqrt(10), 0.001]
    assert all(line.get_ydata() == pytest.approx(expected) for line in ratios)
    assert [axes.get_yscale() for axes in grid[:, 1]] == ["linear", "log", "log", "linear", "linear"]
    assert [*gradients[0].get_ydata()[:2]] == pytest.approx([math.sqrt(0.5)] * 2)
    assert math.isnan(gradients[0].get_ydata()[2])
    assert all(line.get_ydata() == pytest.approx([2.0] * 3) for line in activations) and len(activations) == 3
    assert [line.get_ydata()[-1] for line in logits] == [205.0, 206.0, 207.0]
    assert [*logits[0].get_xdata()] == [0, 100, 200] and len(grid[0, 1].lines) == 14
    assert legend(figure) == ["block 0", "block 3", "block 6", "block 8", "block 11", "lm_head", "wte"]
    # the same block has one color in all panels
    assert weights[2].get_color() is not None and np.array_equal(
        weights[2].get_color(), logits[2].get_color()
    )
    assert not np.array_equal(weights[1].get_color(), weights[2].get_color())
    path = draw_statistics(groups, tmp_path / "statistics.png")
    assert chunks(path) == {b"IHDR", b"pHYs", b"IDAT", b"IEND"}
    assert draw_statistics(groups[2:], tmp_path / "none.png") is None and not (tmp_path / "none.png").exists()
