"""What compare.py prints: the table, and what a difference means."""

import math
from collections.abc import Callable, Sequence

from isogpt.common.console import aligned, duration, visible
from isogpt.lab.comparison import BITS, CODE, LOSS
from isogpt.lab.significance import LEVEL

WIDEST = 32  # characters of a setting; a longer text is cut
NAMES = {LOSS: "validation loss", BITS: "number of bits per byte"}
RESULTS = ("runs", "val loss", "best", "bits/byte", "state")  # columns that are always in the table
COUNT = "{:,.0f}".format


def report(comparison: dict, more_seeds: Sequence[str]) -> list[str]:
    """
    The lines that compare.py prints.

    Args:
        more_seeds: the commands that train with more seeds.
    """
    rows, results = comparison["groups"], comparison["differences"]
    lines = [*table(rows), ""]
    if comparison["until"]:
        lines += [*table_until(comparison), ""]
    if not comparison["compared_by"]:
        lines.append(f"not compared: {comparison['reason']}")
    elif comparison["reason"]:
        lines.append(
            f"compared by bits per byte, since the losses are over different tokens: {comparison['reason']}"
        )
    if comparison["step"]:
        lines.append(
            f"compared at step {comparison['step']:,}, the last one at which all runs were evaluated, since "
            "not all are complete"
        )
    lines += [sentence(name, comparison) for name in results]
    if comparison["parting"] is not None:
        lines.append(
            f"the first logged step at which their training losses differ is {comparison['parting']:,}"
        )
    if len(rows) == 2 and any(max(result["counts"]) == 1 and result["mean"] for result in results.values()):
        own = ", each with its own version of the code" if CODE in rows[0]["settings"] else ""
        lines += [f"To know, train with several seeds{own}:", *(f"    {command}" for command in more_seeds)]
    lines += [f"note: {note}" for note in comparison["notes"]]
    return [visible(line) for line in lines]


# ------------------------------------------------------------------------------------------------------------
# tables


def table(rows: list[dict]) -> list[str]:
    """A line for each group, with the columns in which they differ, and a line of what all have in common."""
    columns = {name: cells for name, cells in columns_of(rows).items() if any(cells)}
    if columns.get("best") == columns.get("val loss"):
        columns.pop("best", None)
    differing = {name for name, cells in columns.items() if len(set(cells)) > 1 or len(rows) == 1}
    is_shown = differing.union(RESULTS, (name for name in columns if name.startswith("loss of ")))
    same = [f"{name} {cells[0]}" for name, cells in columns.items() if name not in is_shown]
    of_all = [f"all: {', '.join(same)}"] if same else []
    return of_all + aligned({name: cells for name, cells in columns.items() if name in is_shown})


def columns_of(rows: list[dict]) -> dict[str, list[str]]:
    """The cells of each column, by its heading."""
    settings = [name for name in rows[0]["settings"] if name != CODE]
    columns = {name: [setting_text(row["settings"][name]) for row in rows] for name in settings}
    # what the settings do not distinguish is named by its folder
    if len(set(zip(*columns.values(), strict=True))) < len(rows):
        columns = {"runs": [row["place"] for row in rows]} | columns
    columns |= {
        "code": [row["settings"].get(CODE, "") for row in rows],
        "seeds": [",".join(str(run["seed"]) for run in row["runs"]) for row in rows],
        "steps": [number(row["step"], COUNT) for row in rows],
        "tokens": [number(row["tokens"], COUNT) for row in rows],
        "time": [number(row["seconds"], duration) for row in rows],
        "parameters": [number(row["parameters"], COUNT) for row in rows],
        "val loss": [loss_text(row, LOSS) for row in rows],
        "best": [loss_text(row, "best") for row in rows],
        "bits/byte": [loss_text(row, BITS) for row in rows],
    }
    for name in dict.fromkeys(name for row in rows for name in row["means"]):
        if name.startswith(f"{LOSS}/"):  # of a further validation set
            columns[f"loss of {name.removeprefix(f'{LOSS}/')}"] = [loss_text(row, name) for row in rows]
    return columns | {
        "tokens/s": [number(row["tokens_per_s"], COUNT) for row in rows],
        "GB": [number(row["memory_gb"], "{:.2f}".format) for row in rows],
        "commit": [", ".join(row["commits"]) for row in rows],
        "state": [row["state"] for row in rows],
    }


def setting_text(value: object) -> str:
    """A value of a setting in a cell."""
    text = "-" if value in (None, "") else str(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def number(value: float | None, form: Callable[[float], str]) -> str:
    """A cell; "" if the value is not known."""
    return "" if value is None or not math.isfinite(value) else form(value)


def loss_text(row: dict, name: str) -> str:
    """The mean of a loss, with its standard error."""
    return mean_text(row["means"].get(name, {}), "{:.4f}".format)


def mean_text(mean: dict, form: Callable[[float], str]) -> str:
    """A mean with its standard error, if there is one."""
    text, error = number(mean.get("mean"), form), number(mean.get("error"), form)
    return f"{text} ± {error}" if error else text


def table_until(comparison: dict) -> list[str]:
    """A line for each group about when it has reached the loss."""
    until = comparison["until"]
    columns = {
        "group": [reached["name"] for reached in until],
        "runs": [f"{reached['reached']} of {reached['runs']}" for reached in until],
        "steps": [mean_text(reached["iter"], COUNT) for reached in until],
        "tokens": [mean_text(reached["tokens"], COUNT) for reached in until],
        "time": [mean_text(reached["seconds"], duration) for reached in until],
    }
    target = f"until the validation loss is {comparison['target']:g}, on a line between two evaluations:"
    return [target, *aligned(columns)]


def sentence(name: str, comparison: dict) -> str:
    """A sentence about the difference of a group from the first one."""
    result, base = comparison["differences"][name], comparison["base"]
    measured, mean = NAMES[comparison["compared_by"]], result["mean"]
    if mean is None:
        return f"{name} and {base}: {result['method']}"
    if mean == 0 and result["p"] is None:
        return (
            f"{name} and {base} have the same {measured}, to the last digit: what differs has had no effect"
        )
    text = f"{name} has a {'lower' if mean < 0 else 'higher'} {measured} than {base}, by {abs(mean):.4f}"
    if max(result["counts"]) == 1:
        return f"{text}; one run each cannot tell a change from chance"
    if result["p"] is None:
        return f"{text}; {result['method']}"
    p = "p < 0.0001" if result["p"] < 1e-4 else f"p = {result['p']:.2g}"
    text += f" (95% interval: {result['low']:+.4f} to {result['high']:+.4f}), {p}, {result['method']}"
    chance = "Chance alone rarely causes such a difference"
    if result["p"] >= LEVEL:
        chance = "This cannot be told from chance"
    needed = f"about {result['seeds_needed']:,}" if result["seeds_needed"] else "more than a million"
    return f"{text}. {chance}; to detect a difference of this size takes {needed} seeds each"
