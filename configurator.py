"""Override a script's settings with config files and command-line options, applied from left to right.

A script's settings are the plain globals between its first section comment (`# -- run ---`) and a line of
dashes. The comment after each setting describes it and is printed by --help. The settings under a comment
that begins with `# ==` are rare: only --help=all prints them. At its end, a comment may contain the range
of the values in square brackets, see isogpt/options/ranges.py.
"""

import ast
import difflib
import math
import os
import pickle
import re
import sys
import textwrap
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from isogpt.common import console
from isogpt.options import ranges
from isogpt.options.suggestions import nearest
from isogpt.options.values import BOOLS, WANTED, Setting, Value, as_typed

SECTION = re.compile(r"# -- (.+?) -+")
CONSTANT = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
NOT_PYTHON = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf")
CONFIGS = "[config/FILE.py ...]"  # in --help: what a command line contains besides settings
# modules that nanoGPT's scripts have imported when they run a config
VISIBLE = {"math": math, "np": np, "os": os, "pickle": pickle, "sys": sys, "time": time, "torch": torch}


def settings_of(path: str | os.PathLike) -> dict[str, Setting]:
    """
    Return the settings of the script at `path`, in order. They are parsed from the source; the script is not
    run.
    """
    source = Path(path).read_text(encoding="utf-8")
    assignments = {node.lineno: node for node in ast.parse(source).body if isinstance(node, ast.Assign)}
    lines = source.split("\n")
    settings, section, is_rare = {}, "", False
    for row, line in enumerate(lines, 1):
        if heading := SECTION.fullmatch(line):
            section = heading[1]
        elif line.startswith("# =="):
            is_rare = True
        elif section and line.startswith("# ----"):
            break
        elif section and row in assignments:
            node = assignments[row]
            if not all(isinstance(part, CONSTANT) for part in ast.walk(node.value)):
                continue  # computed from other values, or a list
            name = ast.unparse(node.targets[0])
            value = eval(ast.unparse(node.value))
            comment = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            if type(value) in WANTED and not name.startswith("_"):
                meaning, values = ranges.split_comment(comment.lstrip("# "))
                settings[name] = Setting(name, value, meaning, section, is_rare, values)
    return settings


def separate(argv: list[str], settings: dict[str, Setting]) -> tuple[list[str], list[str]]:
    """
    Divide a command line into its words and its options, as --key=value, for a script whose words are not
    configs: `configure` gets the options.
    """
    arguments = with_equals_signs(argv, settings)
    options = [argument for argument in arguments if argument.startswith("--") or argument == "-h"]
    return [argument for argument in arguments if argument not in options], options


def configure(
    script_globals: dict[str, Any],
    argv: list[str] | None = None,
    extra: dict[str, Setting] | None = None,
    words: str = CONFIGS,
) -> dict[str, Value]:
    """
    Apply `argv` to the settings in `script_globals` and return their final values. All errors are reported
    together; then nothing is applied and the process exits with status 1.

    Args:
        script_globals: the globals of the script, with its `__file__`.
        argv: by default the command line. In that case, sys.argv is rewritten with --key=value throughout,
            the only form that code which passes the arguments on to other processes must understand.
        extra: settings of a different script that are also accepted. Those that were set are returned, but
            never assigned to the globals. Their defaults are only shown by --help and read by configs.
        words: what the command line contains besides settings, for --help.
    """
    console.prepare()
    script = script_globals["__file__"]
    settings = settings_of(script)
    # the script's settings come first in --help, and take precedence over extra settings of the same name
    known = settings | (extra or {}) | settings
    arguments = sys.argv[1:] if argv is None else argv
    if any(argument == "-h" or argument.startswith("--help") for argument in arguments):
        if _is_rank_0():
            console.print_result(help_text(script, known, "--help=all" in arguments, words))
        sys.exit(0)

    arguments = with_equals_signs(arguments, known)
    if argv is None:
        sys.argv[1:] = arguments
    values = {name: script_globals.get(name, setting.default) for name, setting in settings.items()}
    final, problems = apply_arguments(arguments, values, script_globals, known)
    if problems:
        fail("\n".join(problems))
    script_globals.update({name: final[name] for name in settings})
    return final


def apply_arguments(
    arguments: list[str], values: dict[str, Value], script_globals: dict[str, Any], known: dict[str, Setting]
) -> tuple[dict[str, Value], list[str]]:
    """
    Return `values` after the arguments, configs and --key=value, and a sentence for each mistake.

    Args:
        script_globals: what configs may read besides the settings, with the script's `__file__`.
        known: all settings, to which arguments assign.
    """
    script, final, problems = script_globals["__file__"], dict(values), []
    for argument in arguments:
        try:
            if argument.startswith("--"):
                final |= _read_option(argument, known)
            else:
                path = _find_config(argument, script, known)
                defaults = {name: setting.default for name, setting in known.items()}
                visible = VISIBLE | script_globals | defaults | final
                final |= _run_config(argument, path, visible, known)
        except ValueError as e:
            problems += str(e).splitlines()
    problems = [f"{os.path.basename(script)}: {problem}" for problem in problems]
    return final, problems + ranges.problems(known, final)


def fail(message: str) -> NoReturn:
    """Exit with status 1 because of a user's mistake. Rank 0 prints `message` to stderr immediately."""
    source = ""
    if not _is_rank_0():
        # Usually every rank fails with the same message. torchrun kills all workers as soon as one fails, so
        # other ranks must not exit before rank 0 has printed. A rank that survives the wait is the only one
        # with this problem.
        time.sleep(10)
        source = f"rank {os.environ['RANK']}: "
    console.print_error(message, source)
    sys.exit(1)


def help_text(
    script: str | os.PathLike, settings: dict[str, Setting], with_rare: bool = False, words: str = CONFIGS
) -> str:
    """
    Return the text of --help: usage, first paragraph of the script's docstring, and the settings by section.
    """
    docstring = ast.get_docstring(ast.parse(Path(script).read_text(encoding="utf-8"))) or ""
    lines = [f"usage: python {os.path.basename(script)} {words} [--key=value ...]"]
    lines += ["Arguments apply from left to right; later values override earlier ones."]
    lines += ["--key value also works, and --key alone sets a boolean to True.", ""]
    lines += textwrap.wrap(docstring.partition("\n\n")[0], 120)
    shown = [setting for setting in settings.values() if with_rare or not setting.is_rare]
    options = {setting.name: f"  --{setting.name}={as_typed(setting.default)}  " for setting in shown}
    # a long default must not shift every description
    indent = min(50, max(map(len, options.values()), default=0))
    wrapper = textwrap.TextWrapper(
        120, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    for section in dict.fromkeys(setting.section for setting in shown):
        lines += ["", f"{section}:"]
        for setting in shown:
            if setting.section == section:
                allowed = f" [{setting.range}]" if setting.range else ""
                lines += wrapper.wrap(options[setting.name].ljust(indent) + setting.meaning + allowed)
    if len(shown) < len(settings):
        lines += ["", f"--help=all also prints the {len(settings) - len(shown)} settings that few runs need."]
    return "\n".join(lines)


def with_equals_signs(arguments: list[str], settings: dict[str, Setting]) -> list[str]:
    """
    Rewrite `--key value` as `--key=value`, and `--key` alone as `--key=True` if the setting is a boolean.
    """
    rest, rewritten = list(arguments), []
    while rest:
        argument = rest.pop(0)
        if argument.startswith("--") and "=" not in argument:
            is_flag = argument[2:] in settings and settings[argument[2:]].kind is bool
            if rest and (rest[0].lower() in BOOLS if is_flag else not rest[0].startswith("--")):
                argument += f"={rest.pop(0)}"
            elif is_flag:
                argument += "=True"
        rewritten.append(argument)
    return rewritten


def _read_option(argument: str, known: dict[str, Setting]) -> dict[str, Value]:
    """Return the setting that `argument`, --key=value, sets. Raise ValueError about a mistake."""
    name, equals, text = argument[2:].partition("=")
    if name in ("local_rank", "local-rank") and name not in known:  # added by launchers
        return {}
    if name not in known:
        raise ValueError(f"command line: --{name}: no such setting{_did_you_mean(name, known)}")
    if not equals:
        raise ValueError(f"command line: --{name}: missing value; type --{name}=VALUE")
    try:
        return {name: known[name].parse(text)}
    except ValueError as e:
        raise ValueError(f"command line: --{name}={text!r}: not {WANTED[known[name].kind]}") from e


def _did_you_mean(name: str, known: dict[str, Setting]) -> str:
    """The end of a sentence about an option that does not exist."""
    meant = nearest(name, known)
    return f"; did you mean --{meant}?" if meant else ""


def _find_config(config: str, script: str, known: dict[str, Setting]) -> str:
    """
    Return the full path of a config, which is relative to the working directory or to the script's. Raise
    ValueError if there is none.
    """
    if config.lower().endswith(NOT_PYTHON):
        raise ValueError(
            f"{config}: a config is a Python file with lines such as seed = 1; docs/migrating.md lists what "
            "other tools' settings are called here"
        )
    folders = list(dict.fromkeys((os.getcwd(), os.path.dirname(os.path.abspath(script)))))
    for folder in folders:
        path = os.path.abspath(os.path.join(folder, config))
        if os.path.isfile(path):
            return path
    name, equals, _ = config.lstrip("-").partition("=")
    if equals or config.startswith("-"):  # -seed=1, seed=1
        raise ValueError(f"command line: {config}: no such setting{_did_you_mean(name, known)}")
    configs = [
        str(file.relative_to(folder)) for folder in folders for file in Path(folder).glob("config/*.py")
    ]
    similar = difflib.get_close_matches(config, configs, 1)
    meant = f"; did you mean {similar[0]}?" if similar else ""
    places = " and ".join(os.path.join(folder, config) for folder in folders)
    raise ValueError(f"{config}: no such config file; looked for {places}{meant}")


def _run_config(
    config: str, path: str, visible: dict[str, Any], known: dict[str, Setting]
) -> dict[str, Value]:
    """
    Run the file `config`, at `path`, and return the settings that it sets. Raise ValueError about mistakes,
    one on each line. `visible` contains the names that the file may read, all settings among them, and their
    values.
    """
    namespace = visible | {"__file__": path}  # a copy: only settings reach the script
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
    except Exception as error:
        raise ValueError(f"{config}{_about_exception(error, path)}") from error
    _check_annotations(config, tree, known)
    try:
        exec(compile(tree, path, "exec"), namespace)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{config}{_about_exception(error, path)}") from error

    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    _note_unused(config, {name: namespace.get(name) for name in assigned - read - known.keys()}, known)
    values, problems = {}, []
    for name, setting in known.items():
        value = namespace.get(name)
        if name in assigned or value is not visible[name]:  # the latter by import *, or globals()[name]
            try:
                values[name] = setting.convert(value)
            except ValueError:
                problems.append(f"{config}: {name} = {value!r:.60}: not {WANTED[setting.kind]}")
    if problems:
        raise ValueError("\n".join(problems))
    return values


def _check_annotations(config: str, tree: ast.Module, known: dict[str, Setting]) -> None:
    """Raise ValueError about lines such as `seed: 1`, as in YAML: in Python, they assign nothing."""
    bare = [node for node in tree.body if isinstance(node, ast.AnnAssign) and node.value is None]
    declared = {id(node.target) for node in bare}
    stores = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names = {node.id for node in stores if id(node) not in declared}
    problems = [
        f"{config}, line {node.lineno}: {ast.unparse(node)} sets nothing: type = instead of the colon"
        for node in bare
        if isinstance(node.target, ast.Name) and node.target.id in known and node.target.id not in names
    ]
    if problems:
        raise ValueError("\n".join(problems))


def _note_unused(config: str, unused: dict[str, Any], known: dict[str, Setting]) -> None:
    """
    Print a note about each name that `config` assigns and does not read, if it resembles a setting. It may be
    meant as one, or be a variable that a different program reads: nanoGPT accepts both.
    """
    # rank 0, or the process that started torchrun for --nproc, prints
    if not _is_rank_0() or console.is_worker_of_nproc():
        return
    for name, value in sorted(unused.items()):
        meant = nearest(name, known)
        if meant and isinstance(value, Value) and not name.startswith("_"):
            note = f"note: {config}: {name} is not used: no such setting; did you mean {meant}?"
            console.print_to_stderr(note)


def _about_exception(error: BaseException, path: str) -> str:
    """The line of the config at `path` that raised an exception, and the exception, in one line."""
    rows = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename == path:
        rows, text = [error.lineno], error.msg
    line = f", line {rows[-1]}" if rows else ""
    return f"{line}: {type(error).__name__}: {' '.join(text.split())}"


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") in ("", "0")
