"""configurator.py: which globals are settings, and how config files and command-line options change them."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure, fail, help_text, settings_of
from isogpt.options.values import Setting

HEAD = '''"""
Train a model,
on any number of processes.

A second paragraph.
"""

import math
from configurator import configure

before = 1  # stands before the first section
# an ordinary comment
# -- run -----------------------------------------------------------------------------------------------------
seed = 1337  # data order, initial weights
device = "auto"  # auto, cpu, cuda
eval_only = False  # evaluate once, then stop
start = "\\n"  # the prompt, or FILE: and the name of a file
# -- data ----------------------------------------------------------------------------------------------------
_private = 3  # no setting
computed = math.pi  # no setting
listed = [1]  # no setting
nothing = None  # no setting
batch_size = 12  # sequences of a micro-batch
accumulation = 5 * 8  # micro-steps of a step
# -- optimizer and its learning rate, in a long heading ------------------------------------------------------
learning_rate = 6e-4  # the largest
max_iters = (
    600000
)  # steps
top_k = -1  # how many; none where negative
weight_decay = 0.1  # #-1 in front
'''
TAIL = """config = configure(globals())
# -- afterwards ----------------------------------------------------------------------------------------------
later = 2
"""
DEFAULTS = {
    "seed": 1337,
    "device": "auto",
    "eval_only": False,
    "start": "\n",
    "batch_size": 12,
    "accumulation": 40,
    "learning_rate": 6e-4,
    "max_iters": 600000,
    "top_k": -1,
    "weight_decay": 0.1,
}


def sleep_on(monkeypatch, sleep):
    # Not time.sleep itself: subprocess.run waits with it.
    monkeypatch.setattr("configurator.time", SimpleNamespace(sleep=sleep))


@pytest.fixture(autouse=True)
def rank_0(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    sleep_on(monkeypatch, lambda seconds: pytest.fail("rank 0 waits for nobody"))


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The path of a script in a separate folder; the working folder is a different folder."""
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


def run(script, *argv, extra=None):
    return configure(started(script), list(argv), extra)


def config_file(text, path="c.py"):
    Path(path).write_text(text)
    return path


def problems(capsys, script, *argv, extra=None):
    """Return the lines of the error that `argv` causes, which must not change the script's globals."""
    script_globals = started(script)
    untouched = dict(script_globals)
    with pytest.raises(SystemExit) as end:
        configure(script_globals, list(argv), extra)
    assert end.value.code == 1
    assert script_globals == untouched
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


def problem(capsys, script, *argv, extra=None):
    lines = problems(capsys, script, *argv, extra=extra)
    assert len(lines) == 1, lines
    return lines[0]


# -- what the settings are


def test_settings_are_the_constants_between_the_first_section_and_configure(script):
    settings = settings_of(script)
    assert {name: setting.default for name, setting in settings.items()} == DEFAULTS
    assert list(settings) == list(DEFAULTS)
    assert [type(setting.default) for setting in settings.values()] == [
        type(value) for value in DEFAULTS.values()
    ]
    assert settings["seed"] == Setting("seed", 1337, "data order, initial weights", "run")
    assert settings["max_iters"].meaning == "steps"
    sections = [setting.section for setting in settings.values()]
    assert sections == ["run"] * 4 + ["data"] * 2 + ["optimizer and its learning rate, in a long heading"] * 4


def test_settings_of_does_not_run_the_script(script):
    script.write_text("import no_such_module\nraise SystemExit\n" + HEAD + TAIL)
    assert list(settings_of(str(script))) == list(DEFAULTS)


def test_reconfigure_is_not_the_call_that_ends_the_settings(script):
    script.write_text("import sys\nsys.stdout.reconfigure(line_buffering=True)\n" + HEAD + TAIL)
    assert list(settings_of(script)) == list(DEFAULTS)


@pytest.mark.parametrize("comment", ["", "  #"])
def test_a_setting_without_a_meaning_is_our_own_bug(script, comment):
    script.write_text(HEAD + f"bare = 1{comment}\n" + TAIL)
    with pytest.raises(AssertionError, match="bare"):
        settings_of(script)


# -- the command line


def test_no_arguments_give_the_defaults(script):
    config = run(script)
    assert config == DEFAULTS
    assert list(config) == list(DEFAULTS)


def test_values_are_set_in_the_globals_and_returned(script):
    script_globals = started(script)
    config = configure(script_globals, ["--seed=7", "--device=cpu"])
    assert config == DEFAULTS | {"seed": 7, "device": "cpu"}
    assert {name: script_globals[name] for name in DEFAULTS} == config


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--eval_only=true", True),
        ("--eval_only=True", True),
        ("--eval_only=1", True),
        ("--eval_only=YES", True),
        ("--seed=1_000", 1000),
        ("--seed=0x10", 16),
        ("--seed=1e4", 10000),
        ("--top_k=-5", -5),
        ("--learning_rate=1", 1.0),
        ("--learning_rate=1e-3", 1e-3),
        ("--learning_rate=-.5", -0.5),
        ("--learning_rate=1_0.5", 10.5),
        ("--device=cuda:0", "cuda:0"),
        ("--device=a=b", "a=b"),
        ("--device=", ""),
        ("--device=5", "5"),
        ("--device=None", "None"),
        ("--device='gpt2'", "gpt2"),
        ('--device="gpt2"', "gpt2"),
        (r"--device='a\n'", "a\n"),
        ("--device='yes' and 'no'", "'yes' and 'no'"),
        ("--device='yes' 'no'", "'yes' 'no'"),
        ("--device='open", "'open"),
        ("--device='two\nlines'", "'two\nlines'"),
    ],
)
def test_a_value_is_read_by_the_type_of_the_default(script, argument, value):
    name = argument[2:].partition("=")[0]
    config = run(script, argument)
    assert config == DEFAULTS | {name: value}
    assert type(config[name]) is type(DEFAULTS[name])


@pytest.mark.parametrize("text", ["false", "False", "0", "no"])
def test_false_is_false(script, text):
    assert run(script, "--eval_only=yes", f"--eval_only={text}")["eval_only"] is False


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("--eval_only=2", "True or False"),
        ("--eval_only=", "True or False"),
        ("--eval_only=maybe", "True or False"),
        ("--seed=1.5", "a whole number"),
        ("--seed=True", "a whole number"),
        ("--seed=", "a whole number"),
        ("--seed=inf", "a whole number"),
        ("--seed=nan", "a whole number"),
        ("--seed=5*8", "a whole number"),
        ("--learning_rate=fast", "a finite number"),
        ("--learning_rate=nan", "a finite number"),
        ("--learning_rate=inf", "a finite number"),
        ("--learning_rate=1e999", "a finite number"),
        ("--learning_rate=1" + "0" * 400, "a finite number"),
        ("--learning_rate=False", "a finite number"),
        (r"--device='\x'", "text"),
    ],
)
def test_a_value_of_a_different_type_is_an_error(script, capsys, argument, wanted):
    line = problem(capsys, script, argument)
    assert line.startswith(f"error: train.py: command line: {argument.partition('=')[0]}=")
    assert line.endswith(f": not {wanted}")


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("--seed 7", {"seed": 7}),
        ("--seed 7 --device cpu", {"seed": 7, "device": "cpu"}),
        ("--top_k -3 --learning_rate -.5", {"top_k": -3, "learning_rate": -0.5}),
        ("--device a=b", {"device": "a=b"}),
        ("--device 'two words'", {"device": "two words"}),
        ("--device ''", {"device": ""}),
        ("--device '\"gpt2\"'", {"device": "gpt2"}),
        ("--device true", {"device": "true"}),
        ("--device c.py", {"device": "c.py"}),  # a config file only if the setting is not a string
        ("--device c.py c.py", {"device": "c.py", "seed": 2}),
        ("c.py --seed 7", {"seed": 7}),
        ("--seed 7 c.py", {"seed": 2}),
        ("--seed 7 --seed=8", {"seed": 8}),
        ("--eval_only", {"eval_only": True}),
        ("--eval_only --seed 7", {"eval_only": True, "seed": 7}),
        ("--eval_only c.py", {"eval_only": True, "seed": 2}),
        ("--eval_only false c.py", {"seed": 2}),
        ("--eval_only=no --eval_only", {"eval_only": True}),
        ("--seed = 7 c.py --top_k= 3 --max_iters =5", {"seed": 2, "top_k": 3, "max_iters": 5}),
        ("--eval_only = yes --device = cpu", {"eval_only": True, "device": "cpu"}),
        ("--eval_only =yes --seed= 7", {"eval_only": True, "seed": 7}),
        ("--device = --seed=7", {"device": "=", "seed": 7}),  # text may be an equals sign, or begin with one
        ("--start '= Title =' --device =", {"start": "= Title =", "device": "="}),
        ("--start== --device= c.py", {"start": "=", "device": "", "seed": 2}),
        ("--config=c.py --seed=7", {"seed": 7}),
        ("--seed=7 --config c.py", {"seed": 2}),
        ("--config = c.py -config=c.py", {"seed": 2}),
        *((f"--eval_only {text}", {"eval_only": True}) for text in ("true", "True", "yes", "YES", "1")),
        *((f"--eval_only --eval_only {text}", {}) for text in ("false", "False", "no", "NO", "0")),
    ],
)
def test_a_key_without_an_equals_sign(script, arguments, values):
    config_file("seed = 2")
    assert run(script, *shlex.split(arguments)) == DEFAULTS | values


@pytest.mark.parametrize(
    "arguments", ["--seed", "--seed --eval_only=1", "--seed --eval_only", "--device --seed=7"]
)
def test_a_key_without_a_value_says_what_to_type(script, capsys, arguments):
    key, *rest = arguments.split()
    line = problem(capsys, script, key, *rest)
    assert line == f"error: train.py: command line: {key}: missing value; type {key}=VALUE"


def test_a_value_of_a_different_type_after_a_key(script, capsys):
    assert problem(capsys, script, "--seed", "x", "--top_k=2").endswith("--seed='x': not a whole number")


def test_a_bare_flag_takes_no_other_argument_as_its_value(script, capsys):
    assert problem(capsys, script, "--eval_only", "maybe").startswith(
        "error: train.py: maybe: no such config file"
    )


def test_sys_argv_is_rewritten_with_equals_signs(script, monkeypatch):
    """The scripts pass it on to the processes that they launch."""
    config_file("seed = 2")
    arguments = [
        "--device",
        "a b",
        "--eval_only",
        "c.py",
        "--top_k=-1",
        "--eval_only",
        "no",
        "--local_rank",
        "0",
    ]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    assert configure(started(script)) == DEFAULTS | {"seed": 2, "device": "a b"}
    rewritten = ["--device=a b", "--eval_only=True", "c.py", "--top_k=-1", "--eval_only=no", "--local_rank=0"]
    assert sys.argv == [str(script), *rewritten]
    run(script, "--seed", "3")
    assert sys.argv == [str(script), *rewritten]


def test_a_key_without_value_swallows_no_config_file(script, capsys):
    config_file("seed = 'text'")
    assert len(problems(capsys, script, "--seed", "c.py")) == 2


@pytest.mark.parametrize(
    ("argument", "key"), [("--learning_rat=1", "learning_rat"), ("--learning-rate", "learning-rate")]
)
def test_an_unknown_key_names_the_nearest(script, capsys, argument, key):
    line = problem(capsys, script, argument)
    assert line == f"error: train.py: command line: --{key}: no such setting; did you mean --learning_rate?"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-max_iters=5", "-max_iters=5: type --max_iters=5"),
        ("-max_iters 5", "-max_iters=5: type --max_iters=5"),
        ("max_iters=5", "max_iters=5: type --max_iters=5"),
        ("'device=a b'", "device=a b: type --device='a b'"),
        ("\u2013max_iters=5", "\u2013max_iters=5: type --max_iters=5"),
        ("\u2014\u2014max_iters = 5", "\u2014\u2014max_iters=5: type --max_iters=5"),
        ("---seed=5", "---seed=5: type --seed=5"),
        ("-seed", "-seed: type --seed=VALUE"),
        ("-eval_only", "-eval_only=True: type --eval_only=True"),
        ("-help", "-help: type --help"),
        ("-lr=1", "-lr=1: no such setting; type --learning_rate=1"),
        ("--lr 1", "--lr: no such setting; type --learning_rate=1"),
        ("--bs=1", "--bs: no such setting; type --batch_size=1"),
        ("sed=1", "sed=1: no such setting; did you mean --seed?"),
        ("-zzz", "-zzz: no such setting"),
        ("--max-iters=5", "--max-iters: no such setting; did you mean --max_iters?"),
        ("--sede=5", "--sede: no such setting; did you mean --seed?"),  # two letters swapped
        ("--no-eval-only", "--no-eval-only: no such setting; type --eval_only=False"),
        ("--no_eval_only", "--no_eval_only: no such setting; type --eval_only=False"),
        ("--eval-only False", "--eval-only: no such setting; did you mean --eval_only?"),
        ("--max_iters==5", "--max_iters='=5': not a finite number"),
        ("--out_dir==x", "--out_dir==x: type --out_dir=x"),
        ("--out_dir =x", "--out_dir==x: type --out_dir=x"),
        ("--config", "--config: missing value; type --config=FILE.py, or only FILE.py"),
        ("--config=", "--config: missing value; type --config=FILE.py, or only FILE.py"),
    ],
)
def test_what_was_meant_by_a_word(script, capsys, arguments, said):
    """One line that says what to type, and it is accepted when it is typed."""
    out_dir = {"out_dir": Setting("out_dir", "out", "the run's folder", "run")}
    line = problem(capsys, script, *shlex.split(arguments), extra=out_dir)
    assert line == f"error: train.py: command line: {said}"
    typed = said.partition(": type ")[2] or said.partition("; type ")[2]
    if typed and "VALUE" not in typed and "FILE" not in typed and typed != "--help":
        run(script, *shlex.split(typed), extra=out_dir)


@pytest.mark.parametrize(
    ("name", "text", "said", "others"),
    [
        (
            "ds.json",
            '{"zero": {"stage": 2}, "max_iters": 5, "lr": "auto"}',
            "--max_iters=5",
            "zero.stage, lr",
        ),
        ("c.yaml", "seed: 7\nmax_steps: 5  # steps\nother: 3\n", "--seed=7 --max_iters=5", "other"),
        ("c.toml", 'seed = 7\ndevice = "cpu"\n[training]\n', "--seed=7 --device=cpu", ""),
        ("a.ini", "[run]\nseed = 7\ndevice = the cpu\n", "--seed=7 --device='the cpu'", ""),
        ("C.YML", "list: [1]", "", "list"),
        ("missing.cfg", None, "", ""),
    ],
)
def test_configs_of_other_tools_are_refused(script, capsys, name, text, said, others):
    """The message contains the file's settings as options, which are accepted, and a line of a config."""
    if text is not None:
        config_file(text, name)
    extra = {"lr_decay_iters": Setting("lr_decay_iters", 5, "x", "run")} if name == "c.yaml" else {}
    said += " --lr_decay_iters=5" if extra else ""
    stem = name.partition(".")[0]
    line = problem(capsys, script, name, extra=extra)
    missing = "no such file; " if text is None else ""
    start = (
        f"error: train.py: {name}: {missing}a config is a Python file: {f'type {said}, or ' if said else ''}"
    )
    assert line.startswith(f"{start}write {stem}.py with lines such as ")
    line, _, named = line.partition("; not translated ")
    assert named == (f"({len(others.split())}): {others}" if others else "")
    config_file(line.partition("such as ")[2], f"{stem}.py")
    assert run(script, f"{stem}.py", *shlex.split(said), extra=extra) != DEFAULTS


def test_an_annotation_without_a_value_is_an_error(script, capsys):
    config_file("seed: int = 3\nbatch_size: 32\nif seed:\n    device: cuda\nlr: 3e-4\ntop_k: int\n")
    assert problems(capsys, script, "c.py") == [
        "error: train.py: c.py, line 2: batch_size: 32 assigns nothing: write batch_size = 32",
        "error: train.py: c.py, line 5: lr: 0.0003 assigns nothing: write lr = 0.0003",
        "error: train.py: c.py, line 6: top_k: int assigns nothing: write top_k = VALUE",
        "error: train.py: c.py, line 4: device: cuda assigns nothing: write device = cuda",
    ]
    config_file("helper: int\nclass A:\n    seed: int\ndef f():\n    top_k: int\nseed: int = 3\n")
    assert run(script, "c.py") == DEFAULTS | {"seed": 3}


def test_a_config_with_a_name_of_a_different_tool(script, capsys):
    config_file("lr = 0.5\nepochs = 3\nhelper = 1\nwarmup_steps = 7\nwarmup = warmup_steps\n")
    assert run(script, "c.py") == DEFAULTS
    assert capsys.readouterr().err.splitlines() == [
        "note: c.py: lr is not used: no such setting; write learning_rate = 0.5"
    ]


def test_words_that_look_like_options_but_are_files(script):
    for name in ("-x.py", "seed=5.py", "\u2013max_iters=5"):
        assert run(script, config_file("seed = 6", name)) == DEFAULTS | {"seed": 6}


def test_a_path_may_begin_with_the_home_folder(script, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USERPROFILE", "/home/me")
    names = ("out_dir", "dataset", "init_from", "json_path")
    extra = {name: Setting(name, "", "a folder", "run") for name in names}
    config_file("dataset = '~/data'\ndevice = '~/x'")
    typed = ["--out_dir=~/a~", "c.py", "--init_from=auto:~/w", "--json_path=x/~", "--start=~/y"]
    config = run(script, *typed, extra=extra)
    assert [config[name] for name in names] == ["/home/me/a~", "/home/me/data", "auto:/home/me/w", "x/~"]
    assert (config["device"], config["start"]) == ("~/x", "~/y")


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbfseed = 2\r\ndevice = 'a'\r\n", b"# coding: latin-1\r\nseed = 2 # \xe9\ndevice = 'a'"],
)
def test_how_an_editor_may_save_a_config(script, content):
    Path("c.py").write_bytes(content)
    assert run(script, "c.py") == DEFAULTS | {"seed": 2, "device": "a"}


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
def test_a_config_that_is_not_in_utf_8(script, capsys, encoding):
    Path("c.py").write_bytes("device = '\u00e9'".encode(encoding))
    expected = "error: train.py: c.py: not a text file in UTF-8: save it in this encoding"
    assert problem(capsys, script, "c.py") == expected


def test_the_nearest_of_several_near_names(script, capsys):
    extra = {name: Setting(name, 1, "x", "run") for name in ("learning_rates", "learning_rat3s")}
    assert problem(capsys, script, "--learning_rat=1", extra=extra).endswith("did you mean --learning_rate?")


def test_an_unknown_key_like_no_other(script, capsys):
    assert problem(capsys, script, "--zzz=1") == "error: train.py: command line: --zzz: no such setting"
    assert problem(capsys, script, "--zzz", "1") == "error: train.py: command line: --zzz: no such setting"


@pytest.mark.parametrize("name", ["_private", "computed", "listed", "nothing", "before", "later", "math"])
def test_other_globals_are_no_settings(script, capsys, name):
    assert f"--{name}: no such setting" in problem(capsys, script, f"--{name}=1")


def test_the_local_rank_of_a_launcher_is_ignored(script):
    assert run(script, "--local_rank=1", "--local-rank=1") == DEFAULTS
    assert run(script, "--local_rank", "0", "--local-rank", "1", "--seed=7") == DEFAULTS | {"seed": 7}


def test_a_setting_named_local_rank_is_set(script):
    script.write_text(HEAD + "local_rank = 0  # ours\n" + TAIL)
    assert run(script, "--local_rank=3")["local_rank"] == 3


# -- config files


def test_arguments_apply_left_to_right(script):
    config_file("seed = 2\ndevice = 'cpu'")
    config_file("seed = 3", "d.py")
    assert run(script, "--seed=1", "--seed=9")["seed"] == 9
    assert run(script, "--seed=1", "c.py")["seed"] == 2
    assert run(script, "c.py", "--seed=1")["seed"] == 1
    assert run(script, "c.py", "d.py") == DEFAULTS | {"seed": 3, "device": "cpu"}
    assert run(script, "d.py", "c.py")["seed"] == 2


def test_a_config_is_looked_up_in_the_working_folder_then_next_to_the_script(script):
    config_file("seed = 1", script.parent / "config" / "x.py")
    assert run(script, "config/x.py")["seed"] == 1
    os.mkdir("config")
    config_file("seed = 2", "config/x.py")
    assert run(script, "config/x.py")["seed"] == 2
    assert run(script, str(script.parent / "config" / "x.py"))["seed"] == 1


def test_a_missing_config_lists_both_places_and_near_names(script, capsys):
    (script.parent / "config" / "train_gpt2.py").touch()
    (script.parent / "config" / "unlike.py").touch()
    places = [f"{folder}/config/train_gpt.py" for folder in (os.getcwd(), script.parent)]
    line = problem(capsys, script, "config/train_gpt.py")
    start = "error: train.py: config/train_gpt.py: no such config file; looked for "
    assert line.startswith(start + " and ".join(places))
    assert line.endswith(f"; {script.parent}/config contains train_gpt2.py")
    line = problem(capsys, script, "train_gpt")  # without the folder and the ending
    assert line.endswith(f"; {script.parent}/config contains train_gpt2.py")
    os.mkdir("config")
    Path("config/train_gpt3.py").touch()
    assert f"; {os.getcwd()}/config contains train_gpt3.py; " in problem(
        capsys, script, "config/train_gpt.py"
    )
    text = "error: train.py: config: a folder, not a config file; "
    assert problem(capsys, script, "config") == text + "type the name of a file in it: train_gpt3.py"
    for number in range(4, 9):
        Path(f"config/train_gpt{number}.py").touch()
    assert problem(capsys, script, "config").endswith("train_gpt6.py, train_gpt7.py, ...")
    assert "=y.py: no such config file; looked for " in problem(capsys, script, "--config=x=y.py")
    os.mkdir("out")
    assert problem(capsys, script, "out") == "error: train.py: out: a folder, not a config file"
    out_dir = {"out_dir": Setting("out_dir", "out", "the run's folder", "run")}
    assert problem(capsys, script, "out", extra=out_dir).endswith(
        "; for the folder of a run, type --out_dir=out"
    )


def test_a_config_written_for_nanogpt(script):
    config_file(
        "import time\n"
        "from math import floor\n"
        "eval_only = True # override via the command line\n"
        "device = 'x' + str(time.time())\n"
        "accumulation = 5 * 8 * 2\n"
        "max_iters = max_iters * 2\n"
        "learning_rate = 1\n"
        "gpus = 8\n"
        "batch_size = 480 // gpus\n"
        "def half(value):\n    return value * 0.5\n"
        "weight_decay = half(weight_decay)\n"
    )
    config = run(script, "c.py")
    assert re.fullmatch(r"x\d+\.\d+", config["device"])
    changed = {
        "eval_only": True,
        "accumulation": 80,
        "max_iters": 1200000,
        "learning_rate": 1.0,
        "batch_size": 60,
    }
    assert config == DEFAULTS | changed | {"weight_decay": 0.05, "device": config["device"]}
    assert type(config["learning_rate"]) is float


def test_a_config_reads_what_arguments_before_it_set(script):
    config_file("seed = seed * 2")
    assert run(script, "--seed=5", "c.py", "c.py", "--device=cpu")["seed"] == 20


def test_a_config_runs_in_a_copy_of_the_globals(script):
    config_file("helper = 5\nbefore = 7\nseed = math.floor(2.5)\ndevice = __file__\nstart = __name__")
    script_globals = started(script)
    config = configure(script_globals, ["c.py"])
    assert (config["seed"], config["device"], config["start"]) == (2, os.path.abspath("c.py"), "__main__")
    assert script_globals["before"] == 1
    assert script_globals["__file__"] == str(script)
    assert "helper" not in script_globals


def test_settings_that_a_config_gets_without_an_assignment(script, monkeypatch):
    monkeypatch.syspath_prepend(os.getcwd())
    config_file("seed = 5", "configurator_test_base.py")
    config_file("from configurator_test_base import *\nglobals()['batch_size'] = 3")
    assert run(script, "c.py") == DEFAULTS | {"seed": 5, "batch_size": 3}


@pytest.mark.parametrize(
    ("name", "expression", "value"),
    [
        ("learning_rate", "2", 2.0),
        ("learning_rate", "np.float32(0.5)", 0.5),
        ("learning_rate", "np.int64(3)", 3.0),
        ("seed", "1e4", 10000),
        ("seed", "np.int64(3)", 3),
        ("seed", "np.float64(4)", 4),
        ("eval_only", "1", True),
        ("eval_only", "True", True),
        ("eval_only", "np.int64(1)", True),
        ("eval_only", "0", False),
        ("device", "np.str_('cpu')", "cpu"),
        ("device", "__import__('pathlib').Path('a') / 'b'", "a/b"),
    ],
)
def test_a_config_value_becomes_a_builtin_of_the_right_type(script, name, expression, value):
    config_file(f"import numpy as np\n{name} = {expression}")
    config = run(script, "c.py")
    assert config == DEFAULTS | {name: value}
    assert type(config[name]) is type(DEFAULTS[name])
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize(
    ("name", "expression", "shown", "wanted"),
    [
        ("seed", "True", "True", "a whole number"),
        ("seed", "1.5", "1.5", "a whole number"),
        ("seed", "'5'", "'5'", "a whole number"),
        ("seed", "None", "None", "a whole number"),
        ("seed", "float('inf')", "inf", "a whole number"),
        ("batch_size", "batch_size == 12", "True", "a whole number"),
        ("learning_rate", "True", "True", "a finite number"),
        ("learning_rate", "'1e-3'", "'1e-3'", "a finite number"),
        ("learning_rate", "float('nan')", "nan", "a finite number"),
        ("learning_rate", "None", "None", "a finite number"),
        ("eval_only", "2", "2", "True or False"),
        ("eval_only", "1.0", "1.0", "True or False"),
        ("eval_only", "'True'", "'True'", "True or False"),
        ("eval_only", "None", "None", "True or False"),
        ("device", "5", "5", "text"),
        ("device", "None", "None", "text"),
        ("device", "[1]", "[1]", "text"),
    ],
)
def test_a_config_value_of_a_different_type_is_an_error(script, capsys, name, expression, shown, wanted):
    config_file(f"{name} = {expression}")
    assert problem(capsys, script, "c.py") == f"error: train.py: c.py: {name} = {shown}: not {wanted}"


def test_a_number_too_large_for_a_float_is_an_error(script, capsys):
    config_file("learning_rate = 10 ** 400")
    assert problem(capsys, script, "c.py").endswith("not a finite number")


TYPOS = "learning_rat = 1e-3\nmax_iter = 5\nbatchsize = True\nweight_deca = '1'"
TYPO_NOTES = [
    "c.py: batchsize is not used: no such setting; did you mean batch_size?",
    "c.py: learning_rat is not used: no such setting; did you mean learning_rate?",
    "c.py: max_iter is not used: no such setting; did you mean max_iters?",
    "c.py: weight_deca is not used: no such setting; did you mean weight_decay?",
]


def test_a_variable_of_a_config_that_resembles_a_setting_is_noted(script, capsys, monkeypatch):
    """
    nanoGPT accepts it: it may be a variable of the config. Rank 0 or the launcher prints the notes.
    """
    config_file(TYPOS)
    assert run(script, "c.py") == DEFAULTS
    assert capsys.readouterr() == ("", "".join(f"note: {note}\n" for note in TYPO_NOTES))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("ISOGPT_STARTED", str(os.getppid()))
    assert run(script, "c.py") == DEFAULTS and capsys.readouterr() == ("", "")
    monkeypatch.delenv("ISOGPT_STARTED")
    monkeypatch.setenv("RANK", "1")
    assert run(script, "c.py") == DEFAULTS and capsys.readouterr() == ("", "")
    monkeypatch.delenv("RANK")
    config_file(TYPOS + "\nseed = 'x'")  # an error: a note may explain it
    notes = [f"note: {note}" for note in TYPO_NOTES]
    assert problems(capsys, script, "c.py") == [
        *notes,
        "error: train.py: c.py: seed = 'x': not a whole number",
    ]


def test_a_value_of_a_different_tool_in_a_config(tmp_path, monkeypatch, capsys):
    """transformers' fsdp is text. The line that is advised is accepted."""
    monkeypatch.chdir(tmp_path)
    config_file("fsdp = 'full_shard offload'")
    train = {"__file__": str(Path(__file__).parent.parent / "train.py")}
    with pytest.raises(SystemExit):
        configure(dict(train), ["c.py"])
    problem, _, advised = capsys.readouterr().err.partition("; write ")
    assert problem == "error: train.py: c.py: fsdp = 'full_shard offload': not True or False"
    config_file(advised.replace(", ", "\n"))
    config = configure(dict(train), ["c.py"])
    assert config["zero"] == 3 and config["cpu_offload"]


def test_no_note_about_helpers_that_resemble_settings(script, capsys):
    """What the config reads, functions, and the variables of the script are no forgotten settings."""
    config_file(
        "from math import floor as max_iter\n"
        "learning_rat = 1e-3\n"
        "learning_rate = learning_rat * 2\n"
        "def batchsize(): pass\n"
    )
    script_globals = started(script) | {"weight_deca": 1}
    assert configure(script_globals, ["c.py"]) == DEFAULTS | {"learning_rate": 2e-3}
    assert capsys.readouterr() == ("", "")


def test_names_that_nanogpts_scripts_have_imported(script):
    """A config may use them without an import, and what it imports or defines itself counts."""
    config_file(
        "seed = np.int64(3) + int(math.floor(literal_eval('2.5')))\n"
        "with nullcontext():\n    device = os.path.basename(config_file) + sys.byteorder\n"
        "def size(): return len(pickle.dumps(time.time())) and 7\n"
        "batch_size = size()\n"
        "eval_only = 'seed' in config_keys and torch.cuda.device_count() >= 0\n"
        "top_k = init_process_group.__name__.count('process') + "
        "destroy_process_group.__name__.count('process')\n"
        "start = DDP.__name__\n"
    )
    config = run(script, "c.py")
    changed = {"seed": 5, "device": f"c.py{sys.byteorder}", "batch_size": 7, "eval_only": True, "top_k": 2}
    assert config == DEFAULTS | changed | {"start": "DistributedDataParallel"}
    config_file("import types\nnp = types.SimpleNamespace(pi=3)\nseed = np.pi\n")
    assert run(script, "c.py") == DEFAULTS | {"seed": 3}


def test_a_name_that_is_not_installed_is_unknown(script, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    config_file("seed = tiktoken.nothing")
    assert (
        problem(capsys, script, "c.py")
        == "error: train.py: c.py, line 1: NameError: name 'tiktoken' is not defined"
    )


def test_a_number_of_steps_may_be_a_fraction(script, capsys):
    config_file("max_iters = max_iters * 0.9 + 0.5")
    assert run(script, "c.py") == DEFAULTS | {"max_iters": 540000.5}
    config = run(script, "c.py", "c.py")
    assert config == DEFAULTS | {"max_iters": 540000.5 * 0.9 + 0.5}
    config_file("max_iters = max_iters * 2")
    config = run(script, "--max_iters=2500.5", "c.py")  # bench.py passes what a config has set to train.py
    assert config == DEFAULTS | {"max_iters": 5001} and type(config["max_iters"]) is int
    expected = "error: train.py: command line: --max_iters='x': not a finite number"
    assert problem(capsys, script, "--max_iters=x") == expected
    config_file("max_iters = True\nbatch_size = 0.5\naccumulation = float('inf')")
    assert [line.rpartition(": ")[2] for line in problems(capsys, script, "c.py")] == [
        "not a whole number",
        "not a whole number",
        "not a finite number",
    ]


def test_helpers_in_a_config_are_no_typos(script):
    config_file(
        "learning_rat = 1e-3\nlearning_rate = learning_rat\n"  # read
        "_max_iters = 5\n"  # private
        "max_iter = [5]\n"  # no plain value
        "def batchsize(): pass\n"
        "dev = 'cpu'\nunlike = 5\n"  # not near enough
    )
    assert run(script, "c.py") == DEFAULTS | {"learning_rate": 1e-3}


def test_a_global_of_the_script_is_no_typo_of_the_config(script):
    config_file("seed = 1")
    assert configure(started(script) | {"max_iter": 5}, ["c.py"]) == DEFAULTS | {"seed": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed = 1\n\nseed = 1 / 0\n", ", line 3: ZeroDivisionError: division by zero"),
        ("def f():\n    return no_name\nf()\n", ", line 2: NameError: name 'no_name' is not defined"),
        (
            "import json\njson.loads('')\n",
            ", line 2: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
        ("raise ValueError('two\\nlines')\n", ", line 1: ValueError: two lines"),
        ("seed = 1\nseed = (\n", ", line 2: SyntaxError: '(' was never closed"),
        ("import sys\nsys.exit('stop')\n", ", line 2: SystemExit: stop"),
        ("exec('1 +')\n", ", line 1: SyntaxError: invalid syntax (<string>, line 1)"),
    ],
)
def test_an_exception_in_a_config_is_one_line(script, capsys, text, said):
    config_file(text)
    assert problem(capsys, script, "c.py") == f"error: train.py: c.py{said}"


# -- errors


def test_all_problems_are_reported_at_once_and_nothing_is_applied(script, capsys):
    config_file("seed = 'one'\nbatch_size = 0.5\nbatchsize = 3\ndevice = 'cpu'")
    config_file("1 / 0", "d.py")
    arguments = ["--max_iters=5", "c.py", "d.py", "nowhere.py", "--sed=1", "--top_k=x", "--batch_size"]
    lines = problems(capsys, script, *arguments, "--seed=8")  # checks that nothing is applied
    starts = ["c.py: seed = 'one'", "c.py: batch_size = 0.5", "d.py, line 1", "nowhere.py"]
    starts += ["command line: --sed:", "command line: --top_k='x'", "command line: --batch_size:"]
    assert lines.pop(0).startswith("note: c.py: batchsize is not used")
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts):
        assert line.startswith(f"error: train.py: {start}")


@pytest.mark.parametrize("rank", [None, "", "0"])
def test_fail_prints_once_on_rank_0(capsys, monkeypatch, rank):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as end:
        fail("what is wrong")
    assert end.value.code == 1
    assert capsys.readouterr() == ("", "error: what is wrong\n")


def test_other_ranks_wait_before_they_speak(script, capsys, monkeypatch):
    """If rank 0 fails too, only rank 0 prints a message; if not, the other ranks print theirs."""
    waited = []
    monkeypatch.setenv("RANK", "1")
    sleep_on(monkeypatch, lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    said = problems(capsys, script, "--zzz=1")
    assert (
        waited == [(10, "")] and len(said) == 1 and said[0].startswith("error: rank 1: ") and "zzz" in said[0]
    )


# -- help


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_printed_despite_other_mistakes(script, capsys, flag):
    with pytest.raises(SystemExit) as end:
        run(script, "--zzz=1", flag)
    assert end.value.code == 0
    assert capsys.readouterr() == (help_text(script, settings_of(script)) + "\n", "")


def test_other_ranks_print_no_help(script, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        run(script, "--help")
    assert end.value.code == 0
    assert capsys.readouterr() == ("", "")


def test_help_text(script):
    assert help_text(script, settings_of(script)) == (
        "usage: python train.py [config/FILE.py ...] [--key=value ...]\n"
        "Arguments apply from left to right; later values override earlier ones.\n"
        "--key value also works, and --key alone sets a boolean to True.\n"
        "\n"
        "Train a model, on any number of processes.\n"
        "\n"
        "run:\n"
        "  --seed=1337             data order, initial weights\n"
        "  --device=auto           auto, cpu, cuda\n"
        "  --eval_only=False       evaluate once, then stop\n"
        "  --start='\"\\n\"'          the prompt, or FILE: and the name of a file\n"
        "\n"
        "data:\n"
        "  --batch_size=12         sequences of a micro-batch\n"
        "  --accumulation=40       micro-steps of a step\n"
        "\n"
        "optimizer and its learning rate, in a long heading:\n"
        "  --learning_rate=0.0006  the largest\n"
        "  --max_iters=600000      steps\n"
        "  --top_k=-1              how many; none where negative\n"
        "  --weight_decay=0.1      -1 in front"
    )


def test_help_wraps_at_120_columns(script):
    meaning = " ".join(f"word{number}" for number in range(40))
    long = {"long": Setting("long", "a/" * 60, "what it means", "run"), "x": Setting("x", 1, meaning, "run")}
    script.write_text('"""' + meaning + '"""')
    text = help_text(script, long)
    lines = text.splitlines()
    assert all(len(line) <= 120 for line in lines if "a/" not in line)
    assert lines[4].startswith("word0 ") and lines[5].startswith("word")
    at = next(number for number, line in enumerate(lines) if line.startswith("  --x=1"))
    assert lines[at].index("word0") == 50
    assert re.match(" {50}word", lines[at + 1])
    assert lines[at - 1].strip() == "what it means"


def test_help_of_a_script_without_a_docstring(script):
    script.write_text((HEAD + TAIL).partition('"""\n\n')[2])
    assert help_text(script, settings_of(script)).splitlines()[3:6] == ["", "", "run:"]


# -- settings of a different script


EXTRA = {
    "dropout": Setting("dropout", 0.0, "share", "model"),
    "n_layer": Setting("n_layer", 12, "blocks", "model"),
    "seed": Setting("seed", 1.5, "another default and type: the script's own setting counts", "run"),
}


def test_extra_settings_are_returned_where_they_were_set_and_never_in_the_globals(script):
    script_globals = started(script)
    assert configure(script_globals, ["--n_layer=3", "--seed=4"], EXTRA) == DEFAULTS | {
        "seed": 4,
        "n_layer": 3,
    }
    assert "n_layer" not in script_globals and "dropout" not in script_globals
    assert run(script, extra=EXTRA) == DEFAULTS


def test_a_config_reads_and_sets_extra_settings(script):
    config_file("n_layer = n_layer * 2")
    assert run(script, "c.py", extra=EXTRA) == DEFAULTS | {"n_layer": 24}
    assert run(script, "--n_layer=3", "c.py", extra=EXTRA) == DEFAULTS | {"n_layer": 6}
    config_file("dropout = 0.0")  # its default counts as set, too
    assert run(script, "c.py", extra=EXTRA) == DEFAULTS | {"dropout": 0.0}


def test_extra_settings_are_checked_suggested_and_helped(script, capsys):
    config_file("n_layers = 3\ndropout = 'much'")
    assert len(problems(capsys, script, "c.py", "--dropout=x", extra=EXTRA)) == 3  # and a note about n_layers
    assert "did you mean --n_layer?" in problem(capsys, script, "--n_layr=1", extra=EXTRA)
    assert "a whole number" in problem(capsys, script, "--seed=1.5", extra=EXTRA)
    with pytest.raises(SystemExit):
        run(script, "--help", extra=EXTRA)
    text = capsys.readouterr().out
    assert text.index("--seed=1337") < text.index("--weight_decay") < text.index("--dropout=0.0")


def test_extra_settings_with_other_defaults(script, capsys):
    """
    As bench.py replaces some of train.py's: --help shows them, config files read them, and they are not
    returned.
    """
    meaning = "micro-batches per step (0: one per process)"
    accumulated = Setting("accumulated", 0, meaning, "model")
    extra = EXTRA | {"n_layer": replace(EXTRA["n_layer"], default=6), "accumulated": accumulated}
    extra["dropout"] = replace(EXTRA["dropout"], section="accepted, without effect")
    assert run(script, extra=extra) == DEFAULTS
    assert run(script, "--n_layer", "3", "--accumulated=0", extra=extra) == DEFAULTS | {
        "n_layer": 3,
        "accumulated": 0,
    }
    config_file("n_layer = n_layer * 2")
    assert run(script, "c.py", extra=extra) == DEFAULTS | {"n_layer": 12}
    with pytest.raises(SystemExit):
        run(script, "--help", extra=extra)
    text = capsys.readouterr().out
    assert re.search(
        r"^model:\n  --n_layer=6 +blocks\n  --accumulated=0 +micro-batches .*\(0: one per", text, re.M
    )
    assert re.search(r"^accepted, without effect:\n  --dropout=0.0 +share$", text, re.M)


# -- as a user runs it


def test_as_a_command_from_a_different_folder(script):
    script.write_text(
        HEAD + TAIL + "import json, sys\nprint(json.dumps([config, seed, sorted(sys.modules)]))\n"
    )
    config_file("seed = 2\nmax_iters = max_iters * 2", script.parent / "config" / "x.py")
    command = [sys.executable, str(script), "config/x.py", "--device=a=b"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    config, seed, modules = json.loads(result.stdout)
    assert config == DEFAULTS | {"seed": 2, "max_iters": 1200000, "device": "a=b"}
    assert seed == 2
    assert not {"torch", "numpy"} & set(modules)  # --help and errors come at once
    result = subprocess.run(
        [*command, "--sed=1"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: train.py: command line: --sed: no such setting; did you mean --seed?\n"
