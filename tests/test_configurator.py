"""configurator.py: which globals are settings, and how config files and command-line options change them."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from runs import REPO, accepted

from configurator import configure, help_text, settings_of
from isogpt.options.values import Setting

HEAD = '''"""
Train a model,
on any number of processes.

A second paragraph.
"""

import math

before = 1  # stands before the first section
# -- run -----------------------------------------------------------------------------------------------------
seed = 1337  # data order, initial weights
device = "auto"  # auto, cpu, cuda
eval_only = False  # evaluate once, then stop
start = "\\n"  # the prompt, or FILE: and the name of a file
# -- data ----------------------------------------------------------------------------------------------------
computed = math.pi  # no setting
listed = [1]  # no setting
batch_size = 12 # sequences of a micro-batch
accumulation = 5 * 8
# == rarely set ==============================================================================================
# -- optimizer and its learning rate, in a long heading ------------------------------------------------------
learning_rate = 6e-4  # the largest
max_iters = 600000  # steps [>= 0, fractions]
top_k = -1  # how many[-of-all], none where negative
weight_decay = 0.1  # -1 in front
'''
TAIL = """# --------------------------------------------------------------------------------------------------
config = configure(globals())
# -- afterwards ----------------------------------------------------------------------------------------------
later = 2
"""
DEFAULTS = dict(seed=1337, device="auto", eval_only=False, start="\n", batch_size=12, accumulation=40)
DEFAULTS |= dict(learning_rate=6e-4, max_iters=600000, top_k=-1, weight_decay=0.1)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The path of a script in a separate folder; the working folder is a different folder."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "repo" / "config").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = tmp_path / "repo" / "train.py"
    path.write_text(HEAD + TAIL)
    return path


def started(script):
    """The globals of a script that has come as far as its call of configure."""
    script_globals = {"__file__": str(script), "__name__": "__main__"}
    exec(HEAD, script_globals)
    return script_globals


def run(script, *argv):
    return configure(started(script), list(argv))


def problems(capsys, script, *argv):
    """Return the lines of the error that `argv` causes, which must not change the script's globals."""
    script_globals = started(script)
    untouched = dict(script_globals)
    with pytest.raises(SystemExit) as end:
        configure(script_globals, list(argv))
    said = capsys.readouterr()
    assert (end.value.code, script_globals, said.out) == (1, untouched, "")
    return [line.removeprefix("error: train.py: ") for line in said.err.splitlines()]


# -- what the settings are


def test_settings_are_the_constants_between_the_first_section_and_the_line_of_dashes(script):
    script.write_text("import no_such_module\nraise SystemExit\n" + HEAD + TAIL)  # the script is not run
    settings = settings_of(script)
    assert {name: setting.default for name, setting in settings.items()} == DEFAULTS
    assert settings["seed"] == Setting("seed", 1337, "data order, initial weights", "run")
    assert settings["batch_size"].meaning == "sequences of a micro-batch"
    assert settings["accumulation"] == Setting("accumulation", 40, "", "data")  # as a user may add one
    assert (settings["max_iters"].meaning, settings["max_iters"].range) == ("steps", ">= 0, fractions")
    assert settings["top_k"].meaning == "how many[-of-all], none where negative"
    assert [setting.is_rare for setting in settings.values()] == 6 * [False] + 4 * [True]
    assert settings["top_k"].section == "optimizer and its learning rate, in a long heading"


# -- the command line


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("--seed=0x10 --eval_only=YES --device=a=b", {"seed": 16, "eval_only": True, "device": "a=b"}),
        ("--seed=1e4 --eval_only=0 --learning_rate=1", {"seed": 10000, "learning_rate": 1.0}),
        (r"""--device='"a\n"'""", {"device": "a\n"}),
        (r"""--device="'yes' and 'no'" """, {"device": "'yes' and 'no'"}),
        ("--top_k -3 --learning_rate -.5", {"top_k": -3, "learning_rate": -0.5}),
        ("--device c.py c.py", {"device": "c.py", "seed": 2}),
        ("--device='~/a~' --start=x/~", {"device": "/home/me/a~", "start": "x/~"}),
        ("--eval_only --seed 7", {"eval_only": True, "seed": 7}),
        ("--local_rank=1 --local-rank 0 --seed=7", {"seed": 7}),  # some launchers add the local rank
    ],
)
def test_a_value_is_read_by_the_type_of_the_default(script, arguments, values):
    Path("c.py").write_text("seed = 2")
    script_globals = started(script)
    config = configure(script_globals, shlex.split(arguments))
    assert config == DEFAULTS | values == {name: script_globals[name] for name in DEFAULTS}
    assert all(type(config[name]) is type(DEFAULTS[name]) for name in DEFAULTS)


def test_all_mistakes_are_reported_at_once(script, capsys):
    """Values of a different type or out of range, what does not exist, and what a config raises."""
    Path("c.py").write_text("seed = True\nmax_iters = 'x'\neval_only = 2\ndevice = None")
    Path("d.py").write_text("seed = 1\n\nseed = 1 / 0\n")
    Path("e.py").write_text("seed = (\n")
    Path("f.py").write_text("import sys\nsys.exit('stop')\n")
    options = ["--eval_only=2", "--seed=1.5", "--learning_rate=nan", "--sed=1", "--max_iters=-5"]
    assert problems(capsys, script, "c.py", "d.py", "e.py", "f.py", "nowhere.py", *options) == [
        "c.py: seed = True: not a whole number",
        "c.py: device = None: not text in quotes",
        "c.py: eval_only = 2: not True or False",
        "c.py: max_iters = 'x': not a whole number",
        "d.py, line 3: ZeroDivisionError: division by zero",
        "e.py: SyntaxError: '(' was never closed (e.py, line 1)",
        "f.py, line 2: SystemExit: stop",
        "nowhere.py: no such config file",
        "command line: --eval_only='2': not True or False",
        "command line: --seed='1.5': not a whole number",
        "command line: --learning_rate='nan': not a finite number",
        "command line: --sed: no such setting; did you mean --seed?",
        "error: max_iters is -5: it must be >= 0",
    ]


def test_sys_argv_is_rewritten_with_equals_signs(script, monkeypatch):
    """The scripts pass it on to the processes that they launch."""
    Path("c.py").write_text("seed = 2")
    typed = ["--device", "a b", "--eval_only", "c.py", "--eval_only", "no", "--local_rank", "0"]
    monkeypatch.setattr(sys, "argv", [str(script), *typed])
    assert configure(started(script)) == DEFAULTS | {"seed": 2, "device": "a b"}
    rewritten = ["--device=a b", "--eval_only=True", "c.py", "--eval_only=no", "--local_rank=0"]
    assert sys.argv == [str(script), *rewritten]


def test_what_was_meant_by_a_word(script, capsys):
    meant = {
        "-seed": "seed",
        "device": "device",
        "\u2013max_iters": "max_iters",  # a dash
        "--sede": "seed",  # two letters swapped
        "--max-iters": "max_iters",
        "--lr": "learning_rate",
        "--training.max_steps": "max_iters",
    }
    said = [f"{typed}: no such setting; did you mean --{name}?" for typed, name in meant.items()]
    said += ["--zzz: no such setting", "--device: missing value; type --device=VALUE"]
    typed = [f"{word}=a b" for word in meant]
    lines = problems(capsys, script, *typed, "--zzz", "1", "--device", "--eval_only")
    assert lines == [f"command line: {problem}" for problem in said]


def test_train_accepts_each_row_of_the_table_of_names():
    table = (REPO / "docs/migrating.md").read_text().partition("## Names of other tools")[2]
    here = "\n".join(re.findall(r"^\| .+ \| (.+) \|$", table, re.M))
    examples = re.findall(r"`(--\w+=[^.].*?)`", here)
    assert len(examples) >= 60
    for options in examples:
        accepted("train.py", *shlex.split(options))


# -- config files


def test_configs_are_looked_up_here_then_next_to_the_script_and_apply_left_to_right(script):
    beside = str(script.parent / "config/x.py")
    Path(beside).write_text("seed = seed * 2\ndevice = 'cpu'")
    assert run(script, "--seed=1", "config/x.py", "config/x.py")["seed"] == 4
    os.mkdir("config")
    Path("config/x.py").write_text("seed = 3")
    assert run(script, beside, "config/x.py") == DEFAULTS | {"seed": 3, "device": "cpu"}


def test_a_config_written_for_nanogpt(script):
    Path("c.py").write_text(
        "import time\nfrom math import floor\n"
        "eval_only = True # override via the command line\n"
        "accumulation = 5 * 8 * 2\n"
        "max_iters = max_iters * 2\n"
        "gpus = 8\nbatch_size = 480 // gpus\n"
        "def half(value):\n    return value * 0.5\n"
        "weight_decay = half(weight_decay)\n"
        # without an import: nanoGPT's scripts have imported these
        "seed = int(np.int64(3)) + int(math.floor(2.5)) + len(torch.ones(0))\n"
        "start = os.path.basename('a/b') + sys.byteorder\n"
        "def size(): return len(pickle.dumps(time.time())) and 7\n"
        "top_k = size()\n"
    )
    changed = {"eval_only": True, "accumulation": 80, "max_iters": 1200000, "batch_size": 60, "top_k": 7}
    changed |= {"weight_decay": 0.05, "start": f"b{sys.byteorder}", "seed": 5}
    assert run(script, "c.py") == DEFAULTS | changed


def test_settings_that_a_config_gets_without_an_assignment(script, monkeypatch):
    monkeypatch.syspath_prepend(os.getcwd())
    Path("configurator_test_base.py").write_text("seed = 5")
    Path("c.py").write_text("from configurator_test_base import *\nbefore = 7\ndevice = __file__")
    script_globals = started(script)
    assert configure(script_globals, ["c.py"]) == DEFAULTS | {"seed": 5, "device": os.path.abspath("c.py")}
    assert script_globals["before"] == 1  # only settings reach the script


@pytest.mark.filterwarnings("error")
def test_a_config_value_becomes_a_builtin_of_the_right_type(script):
    Path("c.py").write_text(
        "weight_decay = 2\nlearning_rate = np.float32(0.5)\nseed = 1e4\neval_only = 1\n"
        "device = __import__('pathlib').Path('a') / 'b'\nstart = '~/data'\n"
        "max_iters = max_iters * 0.9 + 0.5\n"
    )
    values = {"weight_decay": 2.0, "learning_rate": 0.5, "seed": 10000, "eval_only": True}
    values |= {"device": "a/b", "start": "/home/me/data", "max_iters": 540000.5}
    config = run(script, "c.py")
    assert config == DEFAULTS | values
    assert all(type(config[name]) is type(value) for name, value in values.items())
    typed = (f"--{name}={value}" for name, value in values.items())
    assert run(script, *typed) == config  # as bench.py passes them to train.py


def test_a_variable_of_a_config_that_resembles_a_setting_is_noted(script, capsys, monkeypatch):
    """nanoGPT accepts it: it may be a variable of the config. Rank 0 or the launcher prints the notes."""
    Path("c.py").write_text(
        "max_iter = 5\nlearning_rat = 1e-3\nlearning_rate = learning_rat * 2\n"  # learning_rat is read
        "def batchsize(): pass\ndev = 'cpu'\n"
    )
    note = "note: c.py: max_iter is not used; did you mean max_iters?\n"
    for rank, nproc, printed in (("0", "", note), ("1", "", ""), ("0", str(os.getppid()), "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("ISOGPT_STARTED", nproc)
        assert run(script, "c.py") == DEFAULTS | {"learning_rate": 2e-3}
        assert capsys.readouterr() == ("", printed)


# -- help


def test_help_is_printed_despite_other_mistakes(script, capsys, monkeypatch):
    def printed_help(*argv):
        with pytest.raises(SystemExit) as end:
            run(script, *argv)
        said = capsys.readouterr()
        assert end.value.code == 0 and said.err == ""
        return said.out.splitlines()

    usage, *others = printed_help("--zzz=1", "-h")
    assert usage == "usage: python train.py [PATH ...] [--key=value ...]"
    assert {"on any number of processes.", "run:", "data:", "  --accumulation=40"} <= {*others}
    assert """  --start='"\\n"'                     the prompt, or FILE: and the name of a file""" in others
    assert not any("learning_rate" in line for line in others)
    lines = printed_help("--help=all")
    assert "  --max_iters=600000                 steps [>= 0, fractions]" in lines
    monkeypatch.setenv("RANK", "1")
    assert printed_help("--help") == []


# -- the scripts


@pytest.mark.parametrize("name", ["train.py", "sample.py"])
def test_the_help_of_a_script(name):
    """At most nanoGPT's settings and about as many more as a screen has room for; each with a description."""
    settings = settings_of(REPO / name)
    assert all(setting.meaning for setting in settings.values())
    usual = [name for name, setting in settings.items() if not setting.is_rare]
    assert len(usual) <= 45
    assert re.findall(r"^  --(\w+)=", help_text(REPO / name, settings), re.M) == usual
