"""
The range of a setting, in square brackets at the end of the comment that describes the setting:

    grad_clip = 1.0  # maximum norm of the gradient (0: no clipping) [>= 0]
    beta1 = 0.9  # AdamW's decay rate of the first moment [>= 0, < 1]
    on_nan = "stop"  # if a loss or gradient is not finite: stop the run, or skip the step [stop | skip]
    max_iters = 600000  # number of the last step, perhaps computed as 3e9 / 491520 [>= 0, fractions]

The configurator checks the values of all settings, and --help shows the ranges.
"""

import operator
import re
from collections.abc import Mapping

from isogpt.options.values import Setting, Value, problem_of_folder

AT_THE_END = re.compile(r"(.*?)\s*\[([^][]*)\]")
LIMIT = re.compile(r"(>=|>|<=|<) *([\d.]+)")
FOLDERS = ("out_dir", "dataset", "eval_datasets")  # settings that name folders, separated by commas
LARGEST = 2**63 - 1  # whole number that NumPy and PyTorch can compute with
COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def split_comment(comment: str) -> tuple[str, str]:
    """Split a comment into the description of a setting and its range; "" if there is no range."""
    match = AT_THE_END.fullmatch(comment)
    return (match[1], match[2]) if match else (comment, "")


def problems(settings: Mapping[str, Setting], values: Mapping[str, Value]) -> list[str]:
    """Return a sentence for each value that is not in the range of its setting."""
    folders = [(name, part) for name in FOLDERS for part in values.get(name, "").split(",")]
    sentences = [problem_of_folder(name, part) for name, part in folders]
    for name, value in values.items():
        check = problem_of_choice if "|" in settings[name].range else problem_of_limits
        sentences.append(check(settings[name], value))
    return [sentence for sentence in sentences if sentence]


def problem_of_choice(setting: Setting, value: Value) -> str:
    """A sentence if the value is not one of the setting's choices, else ""."""
    *others, last = (choice.strip() for choice in setting.range.split("|"))
    if str(value) in (*others, last):
        return ""
    return f"{setting.name} is {value!r}; choose from {', '.join(others)} and {last}"


def problem_of_limits(setting: Setting, value: Value) -> str:
    """A sentence about the first of the setting's limits that the value does not meet; "" if it meets all."""
    if isinstance(value, int) and value > LARGEST:
        return f"{setting.name} is {value}: it must be < 2**63"
    for sign, bound in LIMIT.findall(setting.range):
        if not COMPARISONS[sign](value, float(bound)):
            return f"{setting.name} is {value}: it must be {sign} {bound}"
    return ""
