"""The range of a setting: the end of its comment in a script, which the configurator checks."""

import numbers

import pytest
from runs import REPO

from configurator import configure, settings_of
from isogpt.options.ranges import problems, split_comment
from isogpt.options.values import Setting

# script, argument, the error's line
REFUSED = [
    ("train.py", "--batch_size=0", "batch_size is 0: it must be >= 1"),
    ("train.py", "--max_iters=-0.5", "max_iters is -0.5: it must be >= 0"),
    ("train.py", "--learning_rate=-1", "learning_rate is -1.0: it must be >= 0"),
    ("train.py", "--dist_timeout_s=0", "dist_timeout_s is 0.0: it must be > 0"),
    ("train.py", "--beta1=1", "beta1 is 1.0: it must be < 1"),
    ("train.py", f"--seed={2**64}", f"seed is {2**64}: it must be < 2**63"),
    ("train.py", "--zero=4", "zero is 4; choose from 0, 1, 2 and 3"),
    ("train.py", "--grad_sync=", "grad_sync is ''; choose from auto, last, every and never"),
    ("sample.py", "--top_p=1.5", "top_p is 1.5: it must be <= 1"),
    ("bench.py", "--nproc=-1", "nproc is -1: it must be >= 0"),
]
# what has no range: text, switches, and numbers of which each value is possible
FREE = {"resume_step"}


def refused(capsys, script, *arguments, extra=None):
    """The lines of the error with which a script refuses arguments."""
    with pytest.raises(SystemExit) as exit:
        configure({"__file__": str(REPO / script)}, list(arguments), extra)
    assert exit.value.code == 1
    return [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(("script", "argument", "said"), REFUSED)
def test_a_value_out_of_range_is_refused(capsys, script, argument, said):
    assert refused(capsys, script, argument) == [said]


def test_all_mistakes_are_said_at_once(capsys, tmp_path):
    """Those of values that cannot be read too, and those of values that a config file computes."""
    config = tmp_path / "c.py"
    config.write_text("batch_size = 8 - 8")
    lines = refused(capsys, "train.py", "--on_nan=ignore", "--seed=x", str(config), "--beta1=2")
    assert sorted(lines) == [
        "batch_size is 0: it must be >= 1",
        "beta1 is 2.0: it must be < 1",
        "on_nan is 'ignore'; choose from stop and skip",
        "train.py: command line: --seed='x': not a whole number",
    ]


def test_settings_of_a_different_script_are_checked(capsys):
    train = settings_of(REPO / "train.py")
    assert refused(capsys, "bench.py", "--tp=0", extra=train) == ["tp is 0: it must be >= 1"]


@pytest.mark.parametrize("script", ["train.py", "sample.py", "bench.py"])
def test_every_number_has_a_range_that_contains_its_default(script):
    settings = settings_of(REPO / script)
    assert not problems(settings, {name: setting.default for name, setting in settings.items()})
    for name, setting in settings.items():
        is_number = isinstance(setting.default, numbers.Real) and not isinstance(setting.default, bool)
        assert bool(setting.range) == (name not in FREE) or not is_number, name


@pytest.mark.parametrize(
    ("values", "inside", "outside"),
    [
        (">= 1", (1, 1.5, 2**62), (0, 0.99, -1)),
        ("> 0, fractions", (1, 1e-9), (0, 0.0, -1)),
        (">= 0, < 1", (0, 0.999), (1, 1.0, -0.1)),
        ("> 0, <= 1", (0.1, 1, 1.0), (0, 1.01)),
        ("<= 0.5", (0.5, -3), (0.51,)),
        ("auto | last", ("auto", "last"), ("", "auto | last", "Last")),
        ("0|1|2", (0, 2), (3, -1)),
        ("", (0, -1, "", True), ()),
    ],
)
def test_the_notation(values, inside, outside):
    setting = Setting("x", inside[0], "meaning", "run", range=values)
    for value in inside:
        assert not problems({"x": setting}, {"x": value})
    for value in outside:
        assert len(problems({"x": setting}, {"x": value})) == 1


def test_a_range_is_the_end_of_a_comment():
    assert split_comment("steps (0: none) [>= 0, < 1]") == ("steps (0: none)", ">= 0, < 1")
    for comment in ("gpt2[-medium|-large], or a folder", "no range", ""):
        assert split_comment(comment) == (comment, "")


@pytest.mark.parametrize("values", ["=> 1", ">= one", "0 to 1", "see below", ">= 1 < 2"])
def test_a_range_that_is_not_understood(values):
    setting = Setting("x", 1, "meaning", "run", range=values)
    with pytest.raises(ValueError, match=r"setting x: \[.*\] is not a range: write limits such as"):
        problems({"x": setting}, {"x": 1})
