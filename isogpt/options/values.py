"""
A setting of a script: how its values are typed, and which are allowed.

The range of its values is in square brackets at the end of the comment that describes the setting:

    grad_clip = 1.0  # maximum norm of the gradient (0: no clipping) [>= 0]
    beta1 = 0.9  # AdamW's decay rate of the first moment [>= 0, < 1]
    zero = 0  # sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters [0 | 1 | 2 | 3]
    max_iters = 600000  # number of the last step, perhaps computed as 3e9 / 491520 [>= 0, fractions]
"""

import ast
import json
import math
import numbers
import operator
import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass

Value = int | float | bool | str

BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
WANTED = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text in quotes"}
LIMIT = re.compile(r"(>=|>|<=|<) *([\d.]+)")
COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
# user:password@, a token@, or ?query; abfs://container@account contains none of them
CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*:[^/?#\s]*@|((?<=http://)|(?<=https://))[^/?#\s]*@|\?\S+")


@dataclass(frozen=True)
class Setting:
    """A setting of a script, which --help prints under its section, or only --help=all if it is rare."""

    name: str
    default: Value
    meaning: str
    section: str
    is_rare: bool = False
    range: str = ""  # "": all values of the type

    @property
    def kind(self) -> type:
        """The type of the default, and of the values."""
        return type(self.default)

    def parse(self, text: str) -> Value:
        """
        Convert text that was typed on the command line: numbers and quoted text are written as in Python, and
        5e3 is a whole number, too. Raise ValueError if this is not possible.
        """
        if self.kind is bool:
            return self.convert(BOOLS.get(text.lower()))
        if self.kind is not str or text[:1] in ("'", '"'):
            with suppress(SyntaxError, ValueError):
                return self.convert(ast.literal_eval(text))
        return self.convert(text if self.kind is str else float(text))

    def convert(self, value: object) -> Value:
        """
        Convert a value that a config assigned, for example a NumPy scalar, to the builtin type of the
        setting. Raise ValueError if the conversion is not exact.
        """
        if self.kind is str and isinstance(value, str | os.PathLike):
            return os.path.expanduser(value)  # a shell replaces ~ in `--key ~/x`, but not in `--key=~/x`
        if self.kind is bool and isinstance(value, numbers.Integral) and value in (0, 1):
            return bool(value)
        if self.kind in (int, float) and isinstance(value, numbers.Real) and not isinstance(value, bool):
            if self.kind is int and value == value // 1:  # false for nan and inf
                return int(value)
            with suppress(OverflowError):  # a whole number that no float can represent
                if math.isfinite(value) and (self.kind is float or "fractions" in self.range):
                    return float(value)
        raise ValueError(f"{value!r} is not {WANTED[self.kind]}")

    def problem(self, value: Value) -> str:
        """A sentence if a value is not in the range of the setting, else ""."""
        if self.name in ("out_dir", "dataset", "eval_datasets") and is_url(value):
            return f"{self.name} is {without_credentials(value)}: set the path of a folder on a disk"
        if "|" in self.range and str(value) not in self.range.split(" | "):
            return f"{self.name} is {value!r}; choose from {self.range}"
        if isinstance(value, int) and value >= 2**63:  # neither NumPy nor PyTorch can compute with it
            return f"{self.name} is too large: it must be < 2**63"
        for sign, bound in LIMIT.findall(self.range):
            if not COMPARISONS[sign](value, float(bound)):
                return f"{self.name} is {value}: it must be {sign} {bound}"
        return ""


def is_url(text: str) -> bool:
    """Whether a setting's value is a URL, which fsspec may open."""
    return "://" in text


def without_credentials(text: str) -> str:
    """
    Return a URL, or a text about one such as an error message, without what gives access to it:
    user:password@ and ?query.
    """
    return CREDENTIALS.sub("", text)


def as_typed(value: Value) -> str:
    """
    Return how `value` is typed in a shell: text with a line break is quoted twice, once for the shell and
    once for the script.
    """
    text = str(value)
    return shlex.quote(text if text.isprintable() else json.dumps(text, ensure_ascii=False))
