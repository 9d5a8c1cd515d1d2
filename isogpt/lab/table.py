"""What compare.py prints: the table, and what a difference means."""

import math
from collections.abc import Sequence

from isogpt.common.console import aligned, visible
from isogpt.lab.comparison import BITS, LOSS
from isogpt.lab.significance import LEVEL, MOST_SEEDS, NO_TEST

NAMES = {LOSS: "validation loss", BITS: "number of bits per byte"}
BY_BITS = "compared by bits per byte, since the losses are over different tokens"


def report(comparison: dict, more_seeds: Sequence[str]) -> list[str]:
    """
    The lines that compare.py prints.

    Args:
        more_seeds: the commands that train with more seeds.
    """
    rows, reason, results = (comparison[name] for name in ("groups", "reason", "differences"))
    lines = [*table(rows), ""]
    if reason:
        lines.append(f"{BY_BITS if comparison['compared_by'] else 'not compared'}: {reason}")
    lines += [sentence(name, comparison) for name in results]
    if (step := comparison["parting"]) is not None:
        lines.append(f"the first logged step at which their training losses differ is {step:,}")
    if len(results) == 1 and any(NO_TEST in result["method"] for result in results.values()):
        edited = ", each with its own version of the code" if any(row["code"] for row in rows) else ""
        lines += [f"To know, train with several seeds{edited}:", *(f"    {line}" for line in more_seeds)]
    lines += [f"note: {note}" for note in comparison["notes"]]
    lines += [f"a picture: {path}" for path in comparison["pictures"]]
    return [visible(line) for line in lines]


def table(rows: list[dict]) -> list[str]:
    """A line for each row, with the columns in which they differ, and a line of what all have in common."""
    cells = [{name: text_of(value) for name, value in row.items() if name != "runs"} for row in rows]
    names = dict.fromkeys(name for one in cells for name in one if one[name])
    same = [name for name in names if len(rows) > 1 and len({one.get(name, "") for one in cells}) == 1]
    of_all = ", ".join(f"{name} {cells[0][name]}" for name in same)
    lines = aligned([{name: one.get(name, "") for name in names if name not in same} for one in cells])
    return [f"all: {of_all}", *lines] if same else lines


def text_of(value: object) -> str:
    """A value as text; "" if it is not known."""
    if isinstance(value, dict):  # a mean loss
        error = "" if math.isnan(value["error"]) else f" ± {value['error']:.4f}"
        return f"{value['mean']:.4f}{error}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"
    return str(value or "")


def sentence(name: str, comparison: dict) -> str:
    """A sentence about the difference of a group from the first one."""
    result, base = comparison["differences"][name], comparison["base"]
    measured, mean, p = NAMES[comparison["compared_by"]], result["mean"], result["p"]
    at = f" at step {result['step']:,}, the last one that all have evaluated" if result["step"] else ""
    if mean is None:
        return f"{name} and {base}: {result['method']}"
    if mean == 0 and p is None:
        equal = "to the last digit: what differs has had no effect"
        return f"{name} and {base} have the same {measured}{at}, {equal}"
    text = f"{name} has a {'lower' if mean < 0 else 'higher'} {measured} than {base}, by {abs(mean):.4f}{at}"
    if p is None:
        return f"{text}; {result['method']}"
    interval = f"95% interval: {result['low']:+.4f} to {result['high']:+.4f}"
    verdict = "This cannot be told from chance"
    if p < LEVEL:
        verdict = "Chance alone rarely causes such a difference"
    needed = f"about {result['seeds_needed']}" if result["seeds_needed"] else f"more than {MOST_SEEDS:,}"
    text += f" ({interval}), p = {p:.2g}, {result['method']}. {verdict}"
    return f"{text}; to detect a difference of this size takes {needed} seeds each"
