"""
The names and values in configs of other tools: JSON, TOML, YAML and INI files. Lists, and what YAML writes in
several lines, are named without being read.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

SECTION = re.compile(r"\s*\[+([\w.-]+)\]+")
ENTRY = re.compile(r"""(\s*(?:- )?)["']?([\w.-]+)["']?\s*[:=]\s*([^#]*)""")


def pairs_in(text: str) -> list[tuple[str, str]]:
    """
    The names and values in the text of a config, in order. Names are dotted, as in zero_optimization.stage.
    The value of a list is "".
    """
    for read in (json.loads, tomllib.loads):
        with suppress(ValueError):
            return list(flat(read(text)))
    return list(by_indentation(text))


def flat(content: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names and the values in nested dicts."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from flat(value, f"{name}.{key}".lstrip("."))
    elif name:
        yield name, "" if isinstance(content, list) else str(content)


def by_indentation(text: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted names and the values in the lines of a YAML or INI file."""
    section, parents = "", {}  # parents: indentation -> dotted name
    for line in text.splitlines():
        if match := SECTION.fullmatch(line.rstrip()):
            section, parents = f"{match[1]}.", {}
        elif match := ENTRY.match(line):
            indent, value = len(match[1]), match[3].strip(" \t,'\"")
            parents = {depth: name for depth, name in parents.items() if depth < indent}
            name = f"{next(reversed(parents.values()), section)}{match[2]}"
            if value:
                yield name, "" if value[0] in "[{|>&*" else value
            else:
                parents[indent] = f"{name}."
