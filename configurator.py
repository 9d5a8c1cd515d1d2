"""Overrides a script's settings from the command line: config files and --key=value, left to right, the last one wins.

A script's settings are plain globals between its first section comment (`# -- run ---`) and its call
`config = configure(globals())`; the comment behind each says what it means, and --help prints it.
"""

import ast
import difflib
import glob
import math
import numbers
import os
import re
import reprlib
import shlex
import sys
import textwrap
import time
import tokenize
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

Value = int | float | bool | str

SECTION = re.compile(r"# -- (.+?) -+")
QUOTED = re.compile(r"""(['"])((?!\1)[^\\\n]|\\.)*\1""")
CONSTANT = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
WANTED = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """One setting of a script, as its source states it."""

    name: str
    default: Value
    meaning: str
    section: str


def settings_of(path: str | os.PathLike) -> dict[str, Setting]:
    """The settings of the script at `path`, in order, read from its source: the script does not run."""
    with tokenize.open(path) as file:
        tree = ast.parse(file.read(), os.fspath(path))
        file.seek(0)
        tokens = list(tokenize.generate_tokens(file.readline))
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    sections = {row: SECTION.fullmatch(token.line.rstrip()) for row, token in comments.items()}
    calls = [(ast.unparse(node.func), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    end = min((row for name, row in calls if name in ("configure", "configurator.configure")), default=math.inf)

    settings = {}
    for node in tree.body:
        section = [match[1] for row, match in sections.items() if match and row < node.lineno][-1:]
        if not section or node.lineno >= end or not isinstance(node, ast.Assign):
            continue
        if not all(isinstance(part, CONSTANT) for part in ast.walk(node.value)):
            continue
        name, value = " = ".join(map(ast.unparse, node.targets)), eval(ast.unparse(node.value))
        if name.isidentifier() and not name.startswith("_") and type(value) in WANTED:
            meaning = comments[node.end_lineno].string.lstrip("# ") if node.end_lineno in comments else ""
            assert meaning, f"{path}, line {node.lineno}: the setting {name} has no comment that says what it means"
            settings[name] = Setting(name, value, meaning, section[0])
    return settings


def configure(
    script_globals: dict[str, Any], argv: list[str] | None = None, extra: dict[str, Setting] | None = None
) -> dict[str, Value]:
    """Apply `argv` (default: the command line) to the settings among `script_globals`; return all their final values.

    `extra` are another script's settings that are taken too: they are returned where they were set, and never enter the
    globals. If anything is wrong, all of it is reported at once, nothing is applied, and the process ends.
    """
    script = script_globals["__file__"]
    own = settings_of(script)
    known = (extra or {}) | own
    rest = list(sys.argv[1:] if argv is None else argv)
    if "-h" in rest or "--help" in rest:
        if _is_rank_0():
            print(help_text(script, own | known))  # own sections first
        sys.exit(0)

    final = {name: script_globals.get(name, setting.default) for name, setting in own.items()}
    problems = []
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            current = {name: setting.default for name, setting in known.items()} | final
            final |= _from_config(argument, script_globals, current, problems)
            continue
        name, equals, text = argument[2:].partition("=")
        if not equals and rest and not rest[0].startswith("--") and not rest[0].endswith(".py"):
            text = rest.pop(0)  # `--key value`: one mistake, not also a config file that is missing
        if name not in known:
            if name not in ("local_rank", "local-rank"):  # older launchers add it
                problems.append(f"command line: --{name}: no such setting{_did_you_mean(name, known, '--')}")
            continue
        kind = type(known[name].default)
        if not equals:
            shown = shlex.quote(text) if text else "True" if kind is bool else "VALUE"
            problems.append(f"command line: --{name}: type --{name}={shown}")
            continue
        try:
            final[name] = _parse(text, kind)
        except (ValueError, OverflowError, SyntaxError):
            problems.append(f"command line: --{name}={text!r}: not {WANTED[kind]}")
    if problems:
        fail("\n".join(f"{os.path.basename(script)}: {problem}" for problem in problems))
    script_globals.update({name: final[name] for name in own})
    return final


def fail(message: str) -> NoReturn:
    """End the process with status 1 for a user's mistake; rank 0 prints `message` to stderr at once."""
    if not _is_rank_0():
        # torchrun kills all workers as soon as one of them fails, so a rank that is quicker than rank 0 would kill it
        # before it has said the same. Whoever is still alive after a while has found what rank 0 has not.
        time.sleep(10)
        message = f"rank {os.environ['RANK']}: {message}"
    print(message, file=sys.stderr, flush=True)
    sys.exit(1)


def help_text(script: str | os.PathLike, settings: dict[str, Setting]) -> str:
    """What --help prints: the usage, the first paragraph of the script's docstring, the settings by section."""
    with tokenize.open(script) as file:
        docstring = ast.get_docstring(ast.parse(file.read())) or ""
    lines = [f"usage: python {os.path.basename(script)} [config/FILE.py ...] [--key=value ...]"]
    lines += ["Arguments apply left to right, the last one wins.", ""]
    lines += textwrap.wrap(re.split(r"\n\s*\n", docstring)[0], 120)
    options = {}
    for name, setting in settings.items():
        plain = not isinstance(setting.default, str) or re.fullmatch(r"[\w./:-]+", setting.default)
        options[name] = f"  --{name}={setting.default if plain else repr(setting.default)}  "
    indent = min(50, max(map(len, options.values()), default=0))  # one long default does not push all meanings right
    wrapper = textwrap.TextWrapper(120, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    for section in dict.fromkeys(setting.section for setting in settings.values()):
        members = [setting for setting in settings.values() if setting.section == section]
        lines += ["", f"{section}:"]
        lines += [line for it in members for line in wrapper.wrap(options[it.name].ljust(indent) + it.meaning)]
    return "\n".join(lines)


def _from_config(
    argument: str, script_globals: dict[str, Any], current: dict[str, Value], problems: list[str]
) -> dict[str, Value]:
    """Run the config file that `argument` names and return the settings that it set; `current` are their values now."""
    path = _find_config(argument, script_globals["__file__"], problems)
    if not path:
        return {}
    namespace = {**script_globals, **current, "__file__": path}  # a copy: only checked settings reach the script
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
        exec(compile(tree, path, "exec"), namespace)
    except (Exception, SystemExit) as error:
        rows = [row for frame, row in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
        text = str(error)
        if isinstance(error, SyntaxError) and error.filename == path:
            rows, text = [error.lineno], error.msg
        line = f", line {rows[-1]}" if rows else ""
        problems.append(f"{argument}{line}: {type(error).__name__}: {' '.join(text.split())}")
        return {}

    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    taken = {}
    for name, before in current.items():
        try:
            value = _coerce(namespace.get(name), type(before))
            if name in assigned or value != before:  # without an assignment: import *, globals()[name] = ...
                taken[name] = value
        except (ValueError, OverflowError):
            shown = " ".join(reprlib.repr(namespace.get(name)).split())
            problems.append(f"{argument}: {name} = {shown}: not {WANTED[type(before)]}")
    # A plain value that nothing reads, with nearly the name of a setting: a typo, not a helper.
    for name in sorted(namespace.keys() - current.keys() - script_globals.keys() - read):
        nearest = _did_you_mean(name, current, cutoff=0.85)
        if nearest and isinstance(namespace[name], int | float | str) and not name.startswith("_"):
            problems.append(f"{argument}: {name}: no such setting{nearest}")
    return taken


def _find_config(argument: str, script: str, problems: list[str]) -> str | None:
    """The config file's full path, from the working folder or else from the script's, wherever we are called from."""
    places = [os.path.abspath(argument), os.path.join(os.path.dirname(os.path.abspath(script)), argument)]
    for place in places:
        if os.path.isfile(place):
            return place
    problem = f"{argument}: no such config file; looked for {' and '.join(dict.fromkeys(places))}"
    for folder in dict.fromkeys(map(os.path.dirname, places)):
        files = sorted(map(os.path.basename, glob.glob("*.py", root_dir=folder)))
        near = difflib.get_close_matches(os.path.basename(argument), files)
        problem += f"; {folder} has {', '.join(near)}" if near else ""
    problems.append(problem)
    return None


def _parse(text: str, kind: type) -> Value:
    """The value of type `kind` that `text` on the command line stands for; an error if there is none."""
    if kind is str:
        return ast.literal_eval(text) if QUOTED.fullmatch(text) else text
    if kind is bool:
        return _coerce(BOOLS.get(text.lower()), bool)
    try:
        return _coerce(int(text, 0), kind)
    except ValueError:
        return _coerce(float(text), kind)


def _coerce(value: Any, kind: type) -> Value:
    """`value` as the builtin type `kind` if nothing is lost by it, else an error; numpy's scalars are numbers too."""
    if kind is str and isinstance(value, str | os.PathLike):
        return str(value)
    if kind is bool and isinstance(value, numbers.Integral) and value in (0, 1):
        return bool(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if kind is int and value == value // 1:  # never true of nan and inf
            return int(value)
        if kind is float and math.isfinite(value):
            return float(value)
    raise ValueError


def _did_you_mean(name: str, settings: dict[str, Any], dashes: str = "", cutoff: float = 0.6) -> str:
    near = difflib.get_close_matches(name, settings, 1, cutoff)
    return f"; did you mean {dashes}{near[0]}?" if near else ""


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") in ("", "0")
