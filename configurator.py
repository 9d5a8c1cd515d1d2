"""Override a script's settings with config files and command-line options, applied from left to right.

A script's settings are the plain globals between its first section comment (`# -- run ---`) and a line of
dashes. The comment after each setting describes it and is printed by --help. The settings under a comment
that begins with `# ==` are rare: only --help=all prints them. At its end, a comment may contain the range
of the values in square brackets, see isogpt/options/values.py.
"""

import ast
import difflib
import math
import os
import pickle
import re
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from isogpt.common import console
from isogpt.options.values import BOOLS, WANTED, Setting, Value, as_typed

SECTION = re.compile(r"# -- (.+?) -+")
# name = value  # meaning [range]
SETTING = re.compile(r"([A-Za-z]\w*) = (.+?)(?:\s+#\s*(.*?)(?:\s*\[([^][]*)\])?)?")
# what everyone types who comes from transformers, Lightning, torchtitan or nanochat. Similar names, such as
# max_steps for max_iters, need no entry. docs/migrating.md lists more names, with their values
OTHER_NAMES = {
    "bf16": "dtype",
    "world_size": "nproc",
    "resume": "init_from",
    "seq_len": "block_size",
    "gradient_checkpointing": "activation_checkpointing",
    "hidden_size": "n_embd",
    "lr": "learning_rate",
    "epochs": "max_tokens",
    "max_epochs": "max_tokens",
    "max_grad_norm": "grad_clip",
    "on_nan": "skip_steps",
    "on_spike": "skip_steps",
    "resume_step": "init_from",
}
Settings, Values = dict[str, Setting], dict[str, Value]
# modules that nanoGPT's scripts have imported when they run a config
VISIBLE = {"math": math, "np": np, "os": os, "pickle": pickle, "sys": sys, "time": time, "torch": torch}


def settings_of(path: str | os.PathLike) -> Settings:
    """Return the settings of the script at `path`, in order. They are read from the source, line by line."""
    settings, section, is_rare = {}, "", False
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if heading := SECTION.fullmatch(line):
            section = heading[1]
        elif section and line.startswith("# ----"):
            break
        elif line.startswith("# =="):
            is_rare = True
        elif section and (match := SETTING.fullmatch(line)):
            name, text, meaning, allowed = match.groups("")
            with suppress(Exception):  # it is computed from other values
                value = eval(text, {"__builtins__": {}})  # perhaps 5 * 8
                if type(value) in WANTED:
                    settings[name] = Setting(name, value, meaning, section, is_rare, allowed)
    return settings


def configure(script_globals: dict, argv: list[str] | None = None, extra: Settings | None = None) -> Values:
    """
    Apply `argv` to the settings in `script_globals` and return their final values. All errors are reported
    together; then nothing is applied and the process exits with status 1.

    Args:
        script_globals: the globals of the script, with its `__file__`.
        argv: by default the command line. In that case, sys.argv is rewritten with --key=value throughout,
            the only form that code which passes the arguments on to other processes must understand.
        extra: settings of a different script that are also accepted. Those that were set are returned, but
            never assigned to the globals. Their defaults are only shown by --help and read by configs.
    """
    console.prepare()
    script = script_globals["__file__"]
    settings = settings_of(script)
    # the script's settings come first in --help, and take precedence over extra settings of the same name
    known = settings | (extra or {}) | settings
    arguments = sys.argv[1:] if argv is None else argv
    if any(argument == "-h" or argument.startswith("--help") for argument in arguments):
        if _is_rank_0():
            console.print_result(help_text(script, known, "--help=all" in arguments))
        sys.exit(0)

    arguments = with_equals_signs(arguments, known)
    if argv is None:
        sys.argv[1:] = arguments
    values = {name: setting.default for name, setting in settings.items()}
    final, problems = apply_arguments(arguments, values, script_globals, known)
    if problems:
        fail("\n".join(problems))
    script_globals.update({name: final[name] for name in settings})
    return final


def apply_arguments(
    arguments: list[str], values: Values, script_globals: dict[str, Any], known: Settings
) -> tuple[Values, list[str]]:
    """
    Return `values` after the arguments, configs and --key=value, and a sentence for each mistake.

    Args:
        script_globals: what configs may read besides the settings, with the script's `__file__`.
        known: all settings, to which arguments assign.
    """
    script, final, problems = script_globals["__file__"], dict(values), []
    defaults = {name: setting.default for name, setting in known.items()}
    for argument in arguments:
        try:
            if argument.startswith("-") or "=" in argument:
                final |= _read_option(argument, known)
            else:
                final |= _run_config(argument, VISIBLE | script_globals | defaults | final, known)
        except ValueError as e:
            problems += [f"{os.path.basename(script)}: {problem}" for problem in str(e).splitlines()]
    problems += filter(None, (known[name].problem(value) for name, value in final.items()))
    return final, problems


def fail(message: str) -> NoReturn:
    """Exit with status 1 because of a user's mistake. Rank 0 prints `message` to stderr immediately."""
    rank = os.environ.get("RANK") or "0"
    if rank != "0":
        # Usually every rank fails with the same message. torchrun kills all workers as soon as one fails, so
        # other ranks must not exit before rank 0 has printed. A rank that survives the wait is the only one
        # with this problem.
        time.sleep(10)
    console.print_error(message, "" if rank == "0" else f"rank {rank}: ")
    sys.exit(1)


def help_text(script: str | os.PathLike, settings: Settings, with_rare: bool = False) -> str:
    """
    Return the text of --help: usage, first paragraph of the script's docstring, and the settings by section.
    """
    docstring = ast.get_docstring(ast.parse(Path(script).read_text(encoding="utf-8"))) or ""
    lines = [f"usage: python {os.path.basename(script)} [PATH ...] [--key=value ...]"]
    lines += ["Arguments apply from left to right; later values override earlier ones."]
    lines += ["--key value also works, and --key alone sets a boolean to True."]
    lines += ["--help=all prints all settings, also those that few runs need.", ""]
    lines += [docstring.partition("\n\n")[0]]
    shown = [setting for setting in settings.values() if with_rare or not setting.is_rare]
    for section in dict.fromkeys(setting.section for setting in shown):
        lines += ["", f"{section}:"]
        for setting in shown:
            if setting.section == section:
                option = f"--{setting.name}={as_typed(setting.default)}"
                allowed = f" [{setting.range}]" if setting.range else ""
                lines.append(f"  {option:33}  {setting.meaning}{allowed}".rstrip())
    return "\n".join(lines)


def with_equals_signs(arguments: list[str], settings: Settings) -> list[str]:
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


def _read_option(argument: str, known: Settings) -> Values:
    """Return the setting that `argument`, --key=value, sets. Raise ValueError about a mistake."""
    typed, equals, text = argument.partition("=")
    name = typed.removeprefix("--")
    if name in ("local_rank", "local-rank") and name not in known:  # added by launchers
        return {}
    if name not in known or name == typed:  # also -seed=1 and seed=1
        meant = nearest(name, known)
        advice = f"; did you mean --{meant}?" if meant else ""
        raise ValueError(f"command line: {typed}: no such setting{advice}")
    if not equals:
        raise ValueError(f"command line: --{name}: missing value; type --{name}=VALUE")
    try:
        return {name: known[name].parse(text)}
    except ValueError as e:
        raise ValueError(f"command line: --{name}={text!r}: not {WANTED[known[name].kind]}") from e


def _run_config(config: str, visible: dict[str, Any], known: Settings) -> Values:
    """
    Run a config, which is relative to the working folder or to the script's, and return the settings that it
    sets. Raise ValueError about mistakes, one on each line. `visible` contains the names that the config may
    read, all settings among them, and their values.
    """
    folders = (Path.cwd(), Path(visible["__file__"]).absolute().parent)
    path = next((str(folder / config) for folder in folders if (folder / config).is_file()), "")
    if not path:
        raise ValueError(f"{config}: no such config file")
    namespace = visible | {"__file__": path}  # a copy: only settings reach the script
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
        exec(compile(tree, path, "exec"), namespace)
    except (Exception, SystemExit) as e:
        rows = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
        place = f", line {rows[-1]}" if rows else ""
        raise ValueError(f"{config}{place}: {type(e).__name__}: {' '.join(str(e).split())}") from e

    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    for name in sorted(assigned - read - known.keys()):
        # nanoGPT accepts it: it may be meant as a setting, or be a variable that a different program reads
        if (meant := nearest(name, known)) and _is_rank_0() and not console.is_worker_of_nproc():
            console.print_to_stderr(f"note: {config}: {name} is not used; did you mean {meant}?")
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


def nearest(name: str, known: Settings) -> str:
    """The setting that was probably meant by a name that is not one; "" if none is similar."""
    name = name.strip("-").lower().replace("-", "_").rpartition(".")[2]  # also torchtitan's optimizer.lr
    # 0.75 of at most 1: two letters that are swapped in a name of four
    return "".join(difflib.get_close_matches(OTHER_NAMES.get(name, name), known, 1, 0.75))


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") in ("", "0")
