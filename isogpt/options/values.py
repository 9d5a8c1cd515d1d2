"""The settings of a script, and how their values are written on the command line."""

import ast
import json
import math
import numbers
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Value = int | float | bool | str

QUOTED = re.compile(r"""(['"])((?!\1)[^\\\n]|\\.)*\1""")
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
WANTED = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    numbers.Real: "a finite number",
}
# numbers of steps that may be fractions, as in nanoGPT, which only compares and divides them
STEPS = frozenset(
    (
        "max_iters",
        "eval_interval",
        "log_interval",
        "save_interval",
        "warmup_iters",
        "lr_decay_iters",
        "cooldown_iters",
    )
)


@dataclass(frozen=True)
class Setting:
    """
    A setting of a script: its default, its description, the section that lists it in --help, and the range of
    its values, see ranges.py.
    """

    name: str
    default: Value
    meaning: str
    section: str
    range: str = ""  # "": all values of the type

    @property
    def kind(self) -> type:
        """The type of the values. Real: a whole number or a fraction, which becomes an int or a float."""
        return numbers.Real if self.name in STEPS else type(self.default)


def parse(text: str, kind: type) -> Value:
    """
    Convert `text`, as typed on the command line, to a value of type `kind`. Raise ValueError if this is not
    possible.
    """
    try:
        if kind is str:
            return ast.literal_eval(text) if QUOTED.fullmatch(text) else text
        if kind is bool:
            return coerce(BOOLS.get(text.lower()), bool)
    except SyntaxError as e:  # quoted text with an escape that Python does not know
        raise ValueError(str(e)) from e
    try:
        return coerce(int(text, 0), kind)
    except ValueError:
        return coerce(float(text), kind)


def coerce(value: Any, kind: type) -> Value:
    """
    Convert `value`, for example a NumPy scalar, to the builtin type `kind`. Raise ValueError if the
    conversion is not exact.
    """
    if kind is str and isinstance(value, str | os.PathLike):
        return str(value)
    if kind is bool and isinstance(value, numbers.Integral) and value in (0, 1):
        return bool(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if kind in (int, numbers.Real) and value == value // 1:  # false for nan and inf
            return int(value)
        with suppress(OverflowError):  # a whole number beyond the range of float
            if kind in (float, numbers.Real) and math.isfinite(value):
                return float(value)
    raise ValueError(f"{value!r} is not {WANTED[kind]}")


def as_typed(value: Value) -> str:
    """
    Return how `value` is typed in a shell: text with a line break is quoted twice, once for the shell and
    once for the script.
    """
    text = str(value)
    is_plain = text.isprintable() and not QUOTED.fullmatch(text)
    return shlex.quote(text if is_plain else json.dumps(text, ensure_ascii=False))


def parse_options(options: str, known: Mapping[str, Setting]) -> dict[str, Value]:
    """
    Return the settings in options such as `--zero=3 --cpu_offload=True`. Raise ValueError if a script with
    the settings `known` would refuse them, or if a number of steps is below 1: other tools count in fractions
    of a run, as in `--save_steps 0.1`.
    """
    settings = {}
    for word in shlex.split(options):
        name, equals, text = word.removeprefix("--").partition("=")
        if name not in known or not equals:
            raise ValueError(f"{word} is not an option")
        settings[name] = value = parse(text, known[name].kind)
        if name in STEPS and 0 < value < 1:
            raise ValueError(f"{word} is a fraction")
    return settings
