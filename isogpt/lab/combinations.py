"""Settings with lists of values, the combinations of these values, and the names of the runs' folders."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from itertools import product

from isogpt.options.values import Setting, Value

# text settings whose values may contain commas, so that only semicolons separate the values
WITH_COMMAS = ("dataset", "shares", "eval_datasets")
# a folder of the sweep, a URL of folders, and a shell command, perhaps with semicolons
NEVER_LISTS = ("out_dir", "mirror", "alert_command")
SEED = "seed"
LONGEST_NAME = 120  # characters of a folder's name, without the digest
UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+-]")  # in a file name, or in a shell

Lists = Mapping[str, list[str]]  # the values of settings


def values_in(name: str, text: str) -> list[str]:
    """
    Separate the values in --name=text: at semicolons if there are any, else at commas, unless commas belong
    to values of this setting. Text in quotes is one value.
    """
    if name in NEVER_LISTS or text.startswith(("'", '"')):
        return [text]
    return text.split(";" if ";" in text or name in WITH_COMMAS else ",")


def read_lists(words: Iterable[str], known: Mapping[str, Setting]) -> tuple[Lists, list[str]]:
    """
    Return {setting: its values} of the arguments --name=value that contain lists, in the order typed, and the
    arguments that set other settings. The last argument counts if a setting occurs twice.
    """
    values = {}
    for word in words:
        name, _, text = word.removeprefix("--").partition("=")
        if name in known:
            values[name] = values_in(name, text)
    lists = {name: texts for name, texts in values.items() if len(texts) > 1}
    return lists, without(words, lists)


def without(words: Iterable[str], names: Iterable[str]) -> list[str]:
    """The arguments that do not set one of these settings."""
    options = tuple(f"--{name}=" for name in names)
    return [word for word in words if not word.startswith(options)]


def points_of(lists: Lists, each: bool = False) -> list[dict[str, str]]:
    """
    Return the combinations of the values, each as {setting: value}; the last setting's change fastest. With
    `each`, only one setting at a time differs from the first values; the seed is combined with all of these.
    """
    if not each:
        return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    others = dict(lists)
    seeds = [{SEED: value} for value in others.pop(SEED, [])] or [{}]
    base = {name: values[0] for name, values in lists.items()}
    variants = [base]
    for name, (_, *values) in others.items():
        variants += [base | {name: value} for value in values]
    return [variant | seed for variant in variants for seed in seeds]


def typed(point: Mapping[str, str]) -> list[str]:
    """The arguments that set the values of a point."""
    return [f"--{name}={value}" for name, value in point.items()]


def folder_name(values: Mapping[str, Value]) -> str:
    """
    Return the name of a folder for these values, such as learning_rate=0.001,seed=2. If a character is not
    safe in a file name, or the name is too long, it ends with a digest, so that different values have
    different names.
    """
    text = ",".join(f"{name}={value}" for name, value in values.items())
    name = UNSAFE.sub("_", text)[:LONGEST_NAME]
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text if name == text else f"{name},{digest[:8]}"


def part_of_task(runs: list, variables: Mapping[str, str]) -> list:
    """
    Return those of the runs that this task of a Slurm array job trains; all runs without such a job. Each run
    belongs to one task.

    Args:
        variables: the environment.

    Raises:
        ValueError: the tasks are not numbered from 0.
    """
    task = int(variables.get("SLURM_ARRAY_TASK_ID", 0))
    tasks = int(variables.get("SLURM_ARRAY_TASK_COUNT", 1))
    if int(variables.get("SLURM_ARRAY_TASK_MAX", 0)) != tasks - 1:
        raise ValueError("the job array is not numbered from 0: type --array=0-3")
    return runs[task::tasks]
