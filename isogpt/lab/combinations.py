"""Settings with lists of values, the combinations of these values, and the names of the runs' folders."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product

from isogpt.common.console import shortened
from isogpt.options.values import WANTED, Setting

# text settings whose values may contain commas, so that only semicolons separate the values
WITH_COMMAS = ("dataset", "shares", "eval_datasets")
# a folder of the sweep, a URL of folders, and a shell command, perhaps with semicolons
NEVER_LISTS = ("out_dir", "mirror", "alert_command")
SEED = "seed"
LONGEST_NAME = 120  # characters of a folder's name, without the digest
UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+-]")  # in a file name, or in a shell

Point = dict[str, str]  # {swept setting: one of its values, as it was typed}


def typed_values(name: str, text: str) -> list[str]:
    """
    Separate the values in --name=text: at semicolons if there are any, else at commas, unless commas belong
    to values of this setting. A single value that contains a comma ends with a semicolon.
    """
    if name in NEVER_LISTS or text[:1] in ("'", '"'):
        return [text]
    if ";" in text:
        return [part for part in text.split(";") if part]
    return [text] if name in WITH_COMMAS else text.split(",")


def swept_settings(words: Iterable[str], known: Mapping[str, Setting]) -> dict[str, list[str]]:
    """
    Return {setting: its values} of the arguments --name=value that contain lists, in the order typed. The
    last argument counts if a setting occurs twice.
    """
    lists = {}
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and equals and name in known:
            lists[name] = typed_values(name, text)
    return {name: values for name, values in lists.items() if len(values) > 1}


def points_of(swept: Mapping[str, list[str]], each: bool) -> list[Point]:
    """
    Return the combinations of the swept values, the last setting's changing fastest. With `each`, only one
    setting at a time differs from the first values; the seed is combined with all of these.
    """
    if not each:
        return [dict(zip(swept, values, strict=True)) for values in product(*swept.values())]
    base = {name: values[0] for name, values in swept.items()}
    variants = [base]
    variants += [base | {name: value} for name in swept if name != SEED for value in swept[name][1:]]
    seeds = [{SEED: value} for value in swept[SEED]] if SEED in swept else [{}]
    return [variant | seed for variant in variants for seed in seeds]


def words_of(words: Iterable[str], point: Point, known: Mapping[str, Setting]) -> list[str]:
    """Return the arguments with the point's values in place of the lists."""
    single = []
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and equals and name in known:
            word = f"--{name}={point.get(name, typed_values(name, text)[-1])}"
        single.append(word)
    return single


def folder_name(point: Point, known: Mapping[str, Setting]) -> str:
    """
    Return the name of a point's folder, such as learning_rate=0.001,seed=2. If a character is not safe in a
    file name, or the name is too long, it ends with a digest, so that different points have different names.
    """
    text = ",".join(f"{name}={known[name].parse(value)}" for name, value in point.items())
    safe = UNSAFE.sub("_", text)
    if safe == text and len(text) <= LONGEST_NAME:
        return text
    return f"{safe[:LONGEST_NAME]},{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def problems_of_lists(swept: Mapping[str, list[str]], known: Mapping[str, Setting]) -> list[str]:
    """Return a sentence for each value that is not one of its setting, or occurs twice in its list."""
    problems = []
    for name, values in swept.items():
        wrong = [value for value in values if not is_value(value, known[name])]
        if wrong:
            problems.append(f"--{name}: {shortened([*map(repr, wrong)])} is not {WANTED[known[name].kind]}")
            continue
        counts = Counter(str(known[name].parse(value)) for value in values)
        if repeated := [value for value, count in counts.items() if count > 1]:
            problems.append(f"--{name}: {shortened(repeated)} occurs more than once: type each value once")
    return problems


def is_value(text: str, setting: Setting) -> bool:
    """Whether a setting can be set to what was typed."""
    try:
        setting.parse(text)
    except ValueError:
        return False
    return text != ""


def problems_by_run(problems: Mapping[str, list[str]]) -> list[str]:
    """
    Return each problem once, with the runs that have it, unless all have it.

    Args:
        problems: {name of a run: its problems}.
    """
    runs = {}
    for name, sentences in problems.items():
        for sentence in filter(None, dict.fromkeys(sentences)):
            runs.setdefault(sentence, []).append(name)
    return [
        sentence if len(names) == len(problems) else f"{shortened(names, between='; ')}: {sentence}"
        for sentence, names in runs.items()
    ]


def part_of_task(count: int, variables: Mapping[str, str]) -> list[int]:
    """
    Return the numbers of those of `count` runs that this task of a Slurm array job trains; all runs without
    such a job. Each run belongs to one task: run i to task i modulo the number of tasks.

    Args:
        variables: the environment.

    Raises:
        ValueError: the numbers of the tasks are not evenly spaced.
    """
    if "SLURM_ARRAY_TASK_ID" not in variables:
        return list(range(count))
    names = ("ID", "MIN", "MAX", "STEP", "COUNT")
    task, first, last, step, tasks = (int(variables.get(f"SLURM_ARRAY_TASK_{name}", 1)) for name in names)
    if first + step * (tasks - 1) != last or (task - first) % step:
        raise ValueError(
            f"the array job has {tasks} tasks between {first} and {last}, not evenly spaced: submit "
            "it with a range such as --array=0-3"
        )
    return list(range((task - first) // step, count, tasks))
