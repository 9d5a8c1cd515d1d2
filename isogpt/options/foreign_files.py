"""
Configs of other tools: JSON, TOML, YAML and INI files. A config is a Python file here, so a foreign file is
refused, with all of the settings in it that are also settings of the script.
"""

import configparser
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from isogpt.options.foreign_settings import (
    OFF,
    PER_GPU,
    UNSET,
    advice_for,
    section_of_evaluation,
    settings_in,
)
from isogpt.options.values import Setting, Value, as_typed, parse_options

INI = (".ini", ".cfg", ".conf")
ENDINGS = (".yaml", ".yml", ".json", ".toml", *INI)
WHOLE_BATCH = ("train_batch_size", "global_batch_size")  # of DeepSpeed and Megatron-LM: sequences of a step
# a part of what a different name in the file chooses: {"output_dir": "run", "logging_dir": "run/logs"}
PARTS = ("log_dir", "logdir", "logging_dir", "checkpoint_dir", "folder", "data_seed")
MOST_NAMES = 10_000  # a file with more is not a config: a tokenizer.json contains each token
MOST_SHOWN = 20
# a value as it stands in the file; the elements of a list
Foreign = str | list[str]


def refusal(config: str, path: str | None, known: Mapping[str, Setting]) -> str:
    """
    A sentence about the file `config`, at `path` if it exists, with what to type for the settings in it, and
    the names of those without a translation. `known`: the script's settings.
    """
    found, others, problem, is_per_gpu = {}, [], "", False
    if path:
        try:
            found, others, is_per_gpu = translated(read_pairs(path), known)
        except ValueError as e:
            problem = f" (its settings could not be read: {e})"
    stem = os.path.splitext(os.path.basename(config))[0]
    if os.path.exists(f"{stem}.py"):  # train.yaml must not overwrite train.py
        stem += "_config"
    lines = [f"{name} = {value!r}" for name, value in found.items()]
    text = f"{config}: {'' if path else 'no such file; '}a config is a Python file{problem}"
    if found:
        options = " ".join(f"--{name}={as_typed(value)}" for name, value in found.items())
        text += f": type {options}, or write {stem}.py with lines such as {lines[0]}"
    else:
        example = "batch_size = 32" if "batch_size" in known else "seed = 1"  # sample.py
        text += f": write {stem}.py with lines such as {example}"
    if is_per_gpu:
        text += f"; gradient_accumulation_steps counts {PER_GPU}"
    if others:
        shown = [name if name.isprintable() else ascii(name) for name in others[:MOST_SHOWN]]
        rest = ["..."] if len(others) > MOST_SHOWN else []
        text += f"; not translated ({len(others)}): {', '.join(shown + rest)}"
    return text


def contains_settings(path: str, known: Mapping[str, Setting]) -> bool:
    """Whether a file contains a setting that is also a setting of the script."""
    try:
        return bool(translated(read_pairs(path), known)[0])
    except ValueError:
        return False


def read_pairs(path: str) -> list[tuple[str, Foreign]]:
    """
    Return the names and values in a config, in order. Names are dotted, as in zero_optimization.stage.

    Raises:
        ValueError: the file is not in the format that its ending names; one line says why.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
        if path.lower().endswith(INI):
            content = _read_ini(text)
        elif path.lower().endswith(".toml"):
            content = tomllib.loads(text)
        else:
            content = _read_json_or_yaml(text)
        pairs = list(islice(_flat(content), MOST_NAMES + 1))
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    except UnicodeDecodeError as e:
        raise ValueError("it is not a text file in UTF-8") from e
    except (OSError, ValueError, configparser.Error) as e:
        raise ValueError(" ".join(str(e).split())) from e
    if len(pairs) > MOST_NAMES:
        raise ValueError(f"it contains more than {MOST_NAMES:,} names")
    return pairs


def _read_json_or_yaml(text: str) -> Any:
    """Read JSON, which tabs may indent, or YAML, of which JSON without tabs is a part."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        import yaml  # takes 15 ms
    except ImportError as e:
        raise ValueError("pip install pyyaml") from e
    try:
        # all scalars are text, as they stand in the file, and tags of Python's types mean nothing
        return yaml.load(text, yaml.BaseLoader)
    except yaml.MarkedYAMLError as e:
        raise ValueError(f"line {e.problem_mark.line + 1}: {e.problem}") from e
    except yaml.YAMLError as e:
        raise ValueError("it contains a character that YAML does not allow") from e


def _read_ini(text: str) -> dict[str, Any]:
    """Read an INI file, with or without sections."""
    parser = configparser.ConfigParser(
        allow_no_value=True, strict=False, interpolation=None, inline_comment_prefixes=("#", ";")
    )
    parser.optionxform = str  # names keep their case
    parser.read_string(f"[{parser.default_section}]\n{text}")
    top = dict(parser.defaults())
    sections = {name: parser.items(name) for name in parser.sections()}
    # configparser lists the names at the top of the file in each section too
    return top | {
        name: dict(item for item in items if item not in top.items()) for name, items in sections.items()
    }


def _flat(content: Any, name: str = "") -> Iterator[tuple[str, Foreign]]:
    """Yield the dotted names and the values in nested dicts. A list with dicts or lists in it is empty."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _flat(value, f"{name}.{key}".lstrip("."))
    elif name and isinstance(content, list):
        yield name, [] if any(isinstance(it, dict | list) for it in content) else [str(it) for it in content]
    elif name:
        yield name, "" if content is None else str(content)


def translated(
    pairs: list[tuple[str, Foreign]], known: Mapping[str, Setting]
) -> tuple[dict[str, Value], list[str], bool]:
    """
    Return the settings that a foreign file contains, as they are called here, the names that have no
    translation, and whether the number of micro-batches may be that of each GPU.
    """
    off, parts, implied, exact, order, others = {}, {}, {}, {}, {}, []
    for name, value in pairs:
        settings = settings_for(name, value, known)
        order |= settings
        if not settings:
            others.append(name)
        elif isinstance(value, str) and value.lower() in OFF:
            off = settings | off  # DeepSpeed's files may switch fp16 on and bf16 off, or the reverse
        elif name.rpartition(".")[2] in PARTS:
            parts |= settings
        elif len(settings) > 1:  # an offload implies a stage of ZeRO; the file may contain the stage too
            implied |= settings
        else:
            exact |= settings
    found = order | off | parts | implied | exact
    if "zero" in found:  # more exact than fsdp; both are refused together
        found.pop("fsdp", None)
    is_per_gpu = "gradient_accumulation_steps" in found
    if "gradient_accumulation_steps" in known and (count := micro_batches_in(pairs, found)):
        found["gradient_accumulation_steps"], is_per_gpu = count, False
        others = [it for it in others if not it.endswith((*WHOLE_BATCH, "gradient_accumulation_steps"))]
    return found, list(dict.fromkeys(others)), is_per_gpu


def micro_batches_in(pairs: list[tuple[str, Foreign]], found: Mapping[str, Value]) -> int:
    """
    The micro-batches of a step over all processes, from a foreign file that contains both the sequences of a
    step and, translated in `found`, those of a micro-batch. 0: the file contains no such numbers.
    """
    whole = [value for name, value in pairs if name.rpartition(".")[2] in WHOLE_BATCH]
    rows = found.get("batch_size")
    if not rows or len(whole) != 1 or not str(whole[0]).isdigit() or int(str(whole[0])) % rows:
        return 0
    return int(str(whole[0])) // rows


def settings_for(name: str, value: Foreign, known: Mapping[str, Setting]) -> dict[str, Value]:
    """
    Return the settings of this script that stand for a setting of this or of a different tool; empty if there
    are none, or if they would only be an example.
    """
    last = name.rpartition(".")[2]  # litgpt's train.save_interval
    text = value if isinstance(value, str) else " ".join(value)
    advice = [it for it in advice_for(name) if known.keys() >= set(settings_in(it.options(text)))]
    options = [it.options(text) for it in advice if it.translates(value)]
    is_set = isinstance(value, str) and value.lower() not in UNSET
    is_of_training = section_of_evaluation(name) is None
    if last in known and (name in known or (not advice and is_of_training)) and is_set:
        options = [f"--{last}={as_typed(value)}", *options]
    for found in options:
        try:
            if settings := parse_options(found, known):
                return settings
        except ValueError:  # a value that only the different tool knows
            continue
    return {}
