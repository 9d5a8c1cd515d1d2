"""Override a script's settings with config files and command-line options, applied from left to right.

A script's settings are the plain globals between its first section comment (`# -- run ---`) and its call
`config = configure(globals())`. The comment after each setting describes it and is printed by --help.
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
from tokenize import COMMENT
from typing import Any, NoReturn

Value = int | float | bool | str

SECTION = re.compile(r"# -- (.+?) -+")
QUOTED = re.compile(r"""(['"])((?!\1)[^\\\n]|\\.)*\1""")
CONSTANT = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
WANTED = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """A setting of a script: its default, its description, and the section that lists it in --help."""

    name: str
    default: Value
    meaning: str
    section: str


def settings_of(path: str | os.PathLike) -> dict[str, Setting]:
    """Return the settings of the script at `path`, in order. They are parsed from its source; the script is not run."""
    with open(path, "rb") as file:
        comments = {token.start[0]: token for token in tokenize.tokenize(file.readline) if token.type == COMMENT}
        file.seek(0)
        tree = ast.parse(file.read(), os.fspath(path))
    sections = {row: SECTION.fullmatch(token.line.rstrip()) for row, token in comments.items()}
    calls = [(ast.unparse(node.func), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    end = min((row for name, row in calls if name in ("configure", "configurator.configure")), default=math.inf)

    settings = {}
    for node in tree.body:
        section = [match[1] for row, match in sections.items() if match and row < node.lineno][-1:]
        is_setting = section and node.lineno < end and isinstance(node, ast.Assign)
        if not is_setting or not all(isinstance(part, CONSTANT) for part in ast.walk(node.value)):
            continue
        name, value = " = ".join(map(ast.unparse, node.targets)), eval(ast.unparse(node.value))
        if name.isidentifier() and not name.startswith("_") and type(value) in WANTED:
            meaning = comments[node.end_lineno].string.lstrip("# ") if node.end_lineno in comments else ""
            assert meaning, f"{path}, line {node.lineno}: setting {name} needs a comment that describes it"
            settings[name] = Setting(name, value, meaning, section[0])
    return settings


def configure(script_globals: dict[str, Any], argv: list[str] | None = None, extra: dict[str, Setting] | None = None,
              renamed: dict[str, str] | None = None) -> dict[str, Value]:  # fmt: skip
    """Apply `argv` to the settings in `script_globals` and return their final values.

    `argv` defaults to the command line. In that case, sys.argv is rewritten with --key=value throughout, the only form
    that the code which passes it on to other processes has to understand.

    `extra` holds settings of another script that are accepted too. Those that were set are returned, but never assigned
    to the globals; their defaults are only shown by --help and read by config files. `renamed` maps old names of
    settings to new ones; using an old name is an error that gives the new one. All errors are reported together; then
    nothing is applied and the process exits with status 1.
    """
    script, renamed = script_globals["__file__"], renamed or {}
    own = settings_of(script)
    known = own | (extra or {}) | own  # own settings come first in --help, and win over extra ones of the same name
    arguments = sys.argv[1:] if argv is None else argv
    if "-h" in arguments or "--help" in arguments:
        if _is_rank_0():
            print(help_text(script, known))
        sys.exit(0)

    arguments = _with_equals_signs(arguments, known, renamed)
    if argv is None:
        sys.argv[1:] = arguments
    final = {name: script_globals.get(name, setting.default) for name, setting in own.items()}
    problems = []
    for argument in arguments:
        if not argument.startswith("--"):
            current = {name: setting.default for name, setting in known.items()} | final
            final |= _from_config(argument, script_globals, current, renamed, problems)
            continue
        name, equals, text = argument[2:].partition("=")
        if name in renamed:
            value = shlex.quote(text) if equals else "VALUE"
            problems.append(f"command line: --{name} was renamed: type --{renamed[name]}={value}")
        elif name in known and equals:
            kind = type(known[name].default)
            try:
                final[name] = _parse(text, kind)
            except (ValueError, OverflowError, SyntaxError):
                problems.append(f"command line: --{name}={text!r}: not {WANTED[kind]}")
        elif name in known:
            problems.append(f"command line: --{name}: missing value; type --{name}=VALUE")
        elif name not in ("local_rank", "local-rank"):  # added by older launchers
            problems.append(f"command line: --{name}: no such setting{_did_you_mean(name, known, '--')}")
    if problems:
        fail("\n".join(f"{os.path.basename(script)}: {problem}" for problem in problems))
    script_globals.update({name: final[name] for name in own})
    return final


def fail(message: str) -> NoReturn:
    """Exit with status 1 because of a user's mistake. Rank 0 prints `message` to stderr immediately."""
    if not _is_rank_0():
        # Usually every rank fails with the same message. torchrun kills all workers as soon as one fails, so another
        # rank must not exit before rank 0 has printed. A rank that survives the wait is the only one with this problem.
        time.sleep(10)
        message = f"rank {os.environ['RANK']}: {message}"
    print(message, file=sys.stderr, flush=True)
    from isogpt.agree import about_restarts  # imports torch, which --help does not need

    if note := about_restarts():
        print(note, file=sys.stderr, flush=True)
    sys.exit(1)


def help_text(script: str | os.PathLike, settings: dict[str, Setting]) -> str:
    """Return the text of --help: usage, first paragraph of the script's docstring, and the settings by section."""
    with tokenize.open(script) as file:
        docstring = ast.get_docstring(ast.parse(file.read())) or ""
    lines = [f"usage: python {os.path.basename(script)} [config/FILE.py ...] [--key=value ...]"]
    lines += ["Arguments apply from left to right; later values override earlier ones."]
    lines += ["--key value also works, and --key alone sets a boolean to True.", ""]
    lines += textwrap.wrap(docstring.partition("\n\n")[0], 120)
    options = {}
    for name, setting in settings.items():
        plain = not isinstance(setting.default, str) or re.fullmatch(r"[\w./:-]+", setting.default)
        options[name] = f"  --{name}={setting.default if plain else repr(setting.default)}  "
    indent = min(50, max(map(len, options.values()), default=0))  # a long default must not shift every description
    wrapper = textwrap.TextWrapper(120, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    for section in dict.fromkeys(setting.section for setting in settings.values()):
        members = [setting for setting in settings.values() if setting.section == section]
        lines += ["", f"{section}:"]
        lines += [line for it in members for line in wrapper.wrap(options[it.name].ljust(indent) + it.meaning)]
    return "\n".join(lines)


def _with_equals_signs(arguments: list[str], settings: dict[str, Setting], renamed: dict[str, str]) -> list[str]:
    """Rewrite `--key value` as `--key=value`, and `--key` alone as `--key=True` if the setting is a boolean."""
    rest, rewritten = list(arguments), []
    while rest:
        argument = rest.pop(0)
        if argument.startswith("--") and "=" not in argument:
            name = renamed.get(argument[2:], argument[2:])
            kind = type(settings[name].default) if name in settings else None
            if rest and _is_value(rest[0], kind):
                argument += f"={rest.pop(0)}"
            elif kind is bool:
                argument += "=True"
        rewritten.append(argument)
    return rewritten


def _is_value(text: str, kind: type | None) -> bool:
    """Whether `text`, the argument after `--key`, is its value. `kind` is the setting's type, None if it is unknown."""
    if kind is bool:
        return text.lower() in BOOLS
    return not text.startswith("--") and (kind is str or not text.endswith(".py"))


def _from_config(config: str, script_globals: dict[str, Any], current: dict[str, Value], renamed: dict[str, str],
                 problems: list[str]) -> dict[str, Value]:  # fmt: skip
    """Run the file `config` and return the settings it sets. `current` maps all settings to their values."""
    path = _find_config(config, script_globals["__file__"], problems)
    if not path:
        return {}
    namespace = {**script_globals, **current, "__file__": path}  # a copy: only valid settings reach the script
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
        problems.append(f"{config}{line}: {type(error).__name__}: {' '.join(text.split())}")
        return {}

    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    taken = {}
    for name, before in current.items():
        try:
            value = _coerce(namespace.get(name), type(before))
            if name in assigned or value != before:  # set without an assignment: import *, globals()[name]
                taken[name] = value
        except (ValueError, OverflowError):
            shown = " ".join(reprlib.repr(namespace.get(name)).split())
            problems.append(f"{config}: {name} = {shown}: not {WANTED[type(before)]}")
    # A plain value that the file does not read is no helper: an old or almost correct name is meant as a setting.
    plain = {name for name, it in namespace.items() if isinstance(it, Value) and it is not script_globals.get(name)}
    for name in sorted(plain - current.keys() - read):
        nearest = _did_you_mean(name, current, cutoff=0.85)
        if name in renamed:
            problems.append(f"{config}: {name} was renamed to {renamed[name]}")
        elif nearest and not name.startswith("_"):
            problems.append(f"{config}: {name}: no such setting{nearest}")
    return taken


def _find_config(config: str, script: str, problems: list[str]) -> str | None:
    """Return the full path of a config file, which is relative to the working directory or to the script's."""
    places = [os.path.abspath(config), os.path.join(os.path.dirname(os.path.abspath(script)), config)]
    if found := next(filter(os.path.isfile, places), None):
        return found
    problem = f"{config}: no such config file; looked for {' and '.join(dict.fromkeys(places))}"
    for folder in dict.fromkeys(map(os.path.dirname, places)):
        near = difflib.get_close_matches(os.path.basename(config), sorted(glob.glob("*.py", root_dir=folder)))
        problem += f"; {folder} has {', '.join(near)}" if near else ""
    problems.append(problem)
    return None


def _parse(text: str, kind: type) -> Value:
    """Convert `text`, as typed on the command line, to a value of type `kind`; raise an error if it is not one."""
    if kind is str:
        return ast.literal_eval(text) if QUOTED.fullmatch(text) else text
    if kind is bool:
        return _coerce(BOOLS.get(text.lower()), bool)
    try:
        return _coerce(int(text, 0), kind)
    except ValueError:
        return _coerce(float(text), kind)


def _coerce(value: Any, kind: type) -> Value:
    """Convert `value`, for example a NumPy scalar, to the builtin type `kind`. Raise ValueError if it is not exact."""
    if kind is str and isinstance(value, str | os.PathLike):
        return str(value)
    if kind is bool and isinstance(value, numbers.Integral) and value in (0, 1):
        return bool(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if kind is int and value == value // 1:  # false for nan and inf
            return int(value)
        if kind is float and math.isfinite(value):
            return float(value)
    raise ValueError


def _did_you_mean(name: str, settings: dict[str, Any], dashes: str = "", cutoff: float = 0.6) -> str:
    near = difflib.get_close_matches(name, settings, 1, cutoff)
    return f"; did you mean {dashes}{near[0]}?" if near else ""


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") in ("", "0")
