"""A setting of a script, and how its values are typed."""

import ast
import json
import math
import numbers
import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from isogpt.common.console import visible

Value = int | float | bool | str

BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
WANTED = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text"}
# in the range of a number of steps: a config of nanoGPT may compute max_iters = 3e9 / 491520
FRACTIONS = "fractions"
# user:password@, or a token@; abfs://container@account contains neither
CREDENTIALS = re.compile(r"(?<=://)[^/?#]*:[^/?#]*@|(?<=http://)[^/?#]*@|(?<=https://)[^/?#]*@")


@dataclass(frozen=True)
class Setting:
    """
    A setting of a script, which --help prints under its section, or only --help=all if it is rare. For the
    range of its values see ranges.py.
    """

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
        """Convert text that was typed on the command line. Raise ValueError if this is not possible."""
        if self.kind is str:
            return self.convert(without_quotes(text))
        if self.kind is bool:
            return self.convert(BOOLS.get(text.lower()))
        try:
            return self.convert(int(text, 0))
        except ValueError:
            return self.convert(float(text))

    def convert(self, value: object) -> Value:
        """
        Convert a value that a config assigned, for example a NumPy scalar, to the builtin type of the
        setting. Raise ValueError if the conversion is not exact.
        """
        if self.kind is str and isinstance(value, str | os.PathLike):
            text = str(value)  # a shell replaces ~ in `--key ~/x`, but not in `--key=~/x`
            return os.path.expanduser(text) if text.startswith("~/") else text
        if self.kind is bool and isinstance(value, numbers.Integral) and value in (0, 1):
            return bool(value)
        if self.kind in (int, float) and isinstance(value, numbers.Real) and not isinstance(value, bool):
            if self.kind is int and value == value // 1:  # false for nan and inf
                return int(value)
            if math.isfinite(value) and (self.kind is float or FRACTIONS in self.range):
                return float(value)
        raise ValueError(f"{value!r} is not {WANTED[self.kind]}")


def is_url(text: str) -> bool:
    """Whether a setting's value is a URL, which fsspec may open."""
    return "://" in text


def without_credentials(text: str) -> str:
    """A URL, also after auto:, without what gives access to it: user:password@ and ?query."""
    if not is_url(text):
        return text
    return CREDENTIALS.sub("", text).partition("?")[0]


def is_inside(url: str, folder: str) -> bool:
    """Whether a URL is that of a folder on this machine which is `folder` or inside of it."""
    protocol, _, path = url.partition("://")
    path = Path(path).expanduser().resolve()
    return protocol in ("file", "local") and path.is_relative_to(Path(folder).expanduser().resolve())


def hide_credentials(text: str, url: str) -> str:
    """A text about a URL, such as an error message, without what gives access to the URL."""
    text = text.replace(url, without_credentials(url))
    secrets = [url.partition("?")[2], *(c[:-1].rpartition(":")[2] for c in CREDENTIALS.findall(url))]
    for secret in filter(None, [*secrets, *map(unquote, secrets)]):
        text = text.replace(secret, "...")
    return text


def problem_of_folder(option: str, path: str) -> str:
    """A sentence if `path`, the value of `option`, cannot be meant as the path of a folder; else ""."""
    if re.match(r"\w\w+:/", path):  # Path has removed a slash
        shown = f"{without_credentials(path)}, an address of {path.partition(':')[0]}"
        return f"{option} is {shown}: set the path of a folder, such as a mounted bucket"
    if path != visible(path):
        return f"{option} is {path!r}: rename the file or folder, whose name contains control characters"
    return ""


def without_quotes(text: str) -> str:
    """The string that `text` is in Python, if it begins with a quote; otherwise `text` itself."""
    if text[:1] in ("'", '"'):
        with suppress(SyntaxError, ValueError):
            value = ast.literal_eval(text)
            return value if isinstance(value, str) else text
    return text


def as_typed(value: Value) -> str:
    """
    Return how `value` is typed in a shell: text with a line break is quoted twice, once for the shell and
    once for the script.
    """
    text = str(value)
    return shlex.quote(text if text.isprintable() else json.dumps(text, ensure_ascii=False))
