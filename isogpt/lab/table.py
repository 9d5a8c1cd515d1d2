"""What compare.py prints: the table, and what a difference means."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from isogpt.common.console import duration, visible
from isogpt.lab.comparison import BITS, CODE, LOSS, Comparison, Mean, Row
from isogpt.lab.runs import Run
from isogpt.lab.significance import LEVEL, Difference
from isogpt.monitor.records import as_json

TEXTS = ("runs", "state", "group", "method")  # columns
WIDEST = 32  # characters of a cell; a longer text is cut
NAMES = {LOSS: "validation loss", BITS: "bits per byte"}
BETTER = {LOSS: "a lower validation loss", BITS: "fewer bits per byte"}
WORSE = {LOSS: "a higher validation loss", BITS: "more bits per byte"}


def report(comparison: Comparison, more_seeds: Sequence[str]) -> list[str]:
    """
    The lines that compare.py prints.

    Args:
        more_seeds: the commands that train with more seeds.
    """
    lines = [*table(comparison), ""]
    if comparison.until:
        lines += [*table_until(comparison), ""]
    lines += about_comparison(comparison)
    if len(comparison.differences) > 1:
        lines += table_of_differences(comparison)
    else:
        lines += [about_difference(name, comparison) for name in comparison.differences]
    if comparison.parting is not None:
        lines.append(about_parting(comparison.parting, comparison.groups[0].runs[0]))
    if needs_seeds(comparison) and more_seeds:
        is_edited = any(CODE in group.settings for group in comparison.groups)
        own = ", each with its own version of the code" if is_edited else ""
        lines.append(f"To know, train with several seeds{own}:")
        lines += [f"    {command}" for command in more_seeds]
    lines += [f"note: {note}" for note in comparison.notes]
    return [visible(line) for line in lines]


def as_data(comparison: Comparison, drawn: list[str]) -> str:
    """All that compare.py prints, as JSON. `drawn`: the paths of the pictures."""
    by = comparison.by
    data = {
        "compared_by": NAMES.get(by),
        "reason": comparison.reason,
        "step": comparison.step,
        "groups": [asdict(row) for row in ranked(comparison)],
        "base": comparison.base,
        "differences": {name: asdict(result) for name, result in comparison.differences.items()},
        "target": comparison.target,
        "until": [asdict(reached) for reached in comparison.until],
        "notes": comparison.notes,
        "pictures": drawn,
    }
    return json.dumps(as_json(data), indent=2)


# ------------------------------------------------------------------------------------------------------------
# the table


def table(comparison: Comparison) -> list[str]:
    """A line for each group, with the columns in which they differ, and a line of what all have in common."""
    rows = ranked(comparison)
    columns = columns_of(rows)
    if columns["best"] == columns["val loss"]:
        del columns["best"]
    kept = {name: cells for name, cells in columns.items() if any(cells) and is_shown(name, cells)}
    same = [f"{name} {cells[0]}" for name, cells in columns.items() if cells[0] and name not in kept]
    of_all = [f"all: {', '.join(same)}"] if same else []
    return of_all + aligned(kept)


def ranked(comparison: Comparison) -> list[Row]:
    """The rows, the best first; in the order in which they were given if they cannot be compared."""
    return (
        sorted(comparison.rows, key=partial(order_of, by=comparison.by)) if comparison.by else comparison.rows
    )


def order_of(row: Row, by: str) -> tuple[bool, float]:
    """The place of a row in the table: unknown values and runs that are not complete are last."""
    value = row.val_loss if by == LOSS else row.bits_per_byte
    return not row.is_complete, value.mean if value and math.isfinite(value.mean) else math.inf


def columns_of(rows: list[Row]) -> dict[str, list[str]]:
    """The cells of each column, by its heading."""
    settings = [name for name in rows[0].settings if name != CODE]
    columns = {name: [setting_text(row.settings.get(name)) for row in rows] for name in settings}
    # what the settings do not distinguish is named by its folder or argument
    if not settings or len({tuple(cells) for cells in zip(*columns.values(), strict=True)}) < len(rows):
        columns = {"runs": [row.place for row in rows]} | columns
    columns |= {
        "code": [row.settings.get(CODE, "") for row in rows],
        "seeds": [seeds_text(row) for row in rows],
        "steps": [text_of(row.step, "{:,}".format) for row in rows],
        "tokens": [text_of(row.tokens, count) for row in rows],
        "time": [text_of(row.seconds and row.seconds.mean, duration) for row in rows],
        "parameters": [text_of(row.parameters, count) for row in rows],
        "val loss": [mean_text(row.val_loss) for row in rows],
        "best": [mean_text(row.best_val_loss) for row in rows],
        "bits/byte": [mean_text(row.bits_per_byte) for row in rows],
    }
    for name in dict.fromkeys(name for row in rows for name in row.others):
        columns[f"loss of {name}"] = [mean_text(row.others.get(name)) for row in rows]
    return columns | {
        "tokens/s": [text_of(row.tokens_per_s and row.tokens_per_s.mean, count) for row in rows],
        "GB": [text_of(row.memory_gb, "{:.2f}".format) for row in rows],
        "commit": [", ".join(row.commits) for row in rows],
        "state": [row.state for row in rows],
    }


def is_shown(name: str, cells: list[str]) -> bool:
    """Whether a column is in the table: the results are, and so is what differs between rows."""
    is_result = name in ("runs", "val loss", "best", "bits/byte", "state") or name.startswith("loss of ")
    return is_result or len(set(cells)) > 1 or len(cells) == 1


def seeds_text(row: Row) -> str:
    """The seeds of a group, or how many there are."""
    seeds = sorted(run.seed for run in row.runs)
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]}-{seeds[-1]}"
    return ",".join(map(str, seeds)) if len(seeds) <= 4 else f"{len(seeds)} of them"


def text_of(value: float | None, form: Callable[[float], str]) -> str:
    """A cell; "" if the value is not known."""
    return "" if value is None or not math.isfinite(value) else form(value)


def setting_text(value: object) -> str:
    """A value of a setting in a cell."""
    text = "-" if value in (None, "") else str(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def count(number: float) -> str:
    """A number with a unit, in at most six characters."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if number >= unit:
            return f"{number / (1e3 if name == 'k' else unit):.4g}{name}"
    return f"{number:,.0f}"


def mean_text(mean: Mean | None) -> str:
    """A mean with its standard error."""
    if mean is None:
        return ""
    return f"{mean.mean:.4f}" + (f" ± {mean.error:.4f}" if mean.error is not None else "")


def aligned(columns: dict[str, list[str]]) -> list[str]:
    """The lines of a table. Text is aligned to the left, and numbers to the right."""
    shown = []
    for name, cells in columns.items():
        cells = [visible(cell) for cell in cells]
        width = max(map(len, [name, *cells]))
        is_text = name in TEXTS or not any(cell[:1].isdigit() for cell in cells)
        shown.append([f"{cell:{'<' if is_text else '>'}{width}}" for cell in [name, *cells]])
    return ["  ".join(line).rstrip() for line in zip(*shown, strict=True)]


def table_until(comparison: Comparison) -> list[str]:
    """A line for each group about when it has reached the loss."""
    columns = {
        "group": [reached.name for reached in comparison.until],
        "runs": [f"{reached.reached} of {reached.runs}" for reached in comparison.until],
        "steps": [amount(reached.step, count) for reached in comparison.until],
        "tokens": [amount(reached.tokens, count) for reached in comparison.until],
        "time": [amount(reached.seconds, duration) for reached in comparison.until],
    }
    return [
        f"until the validation loss is {comparison.target:g}, on a line between two evaluations:",
        *aligned(columns),
    ]


def amount(mean: Mean | None, form: Callable[[float], str]) -> str:
    """A mean in the table of what was reached."""
    if mean is None:
        return "-"
    return form(mean.mean) + (f" ± {form(mean.error)}" if mean.error is not None else "")


# ------------------------------------------------------------------------------------------------------------
# sentences


def about_comparison(comparison: Comparison) -> list[str]:
    """By what, and at which step, groups are compared."""
    lines = []
    if not comparison.by:
        lines.append(f"not compared: {comparison.reason}")
    elif comparison.reason:
        lines.append(
            f"compared by bits per byte, since the losses are over different tokens: {comparison.reason}"
        )
    if comparison.by and comparison.differences and comparison.step is not None:
        lines.append(
            f"compared at step {comparison.step:,}, the last one at which all runs were evaluated, since not "
            "all are complete"
        )
    if len(comparison.differences) > 1:
        lines.append(f"each compared with {comparison.base}, the first that was given:")
    return lines


def about_parting(step: int, run: Run) -> str:
    """A sentence about the first logged step at which the training losses of two runs differ."""
    interval = run.settings.get("log_interval", 1)
    logged = "" if interval == 1 else f"; one in {interval:,} is logged (--log_interval=1 logs all)"
    return f"the first logged step at which their training losses differ is {step:,}{logged}"


def about_difference(name: str, comparison: Comparison) -> str:
    """A sentence about the difference of a group from the first one."""
    result, base, by = comparison.differences[name], comparison.base, comparison.by
    if result.mean is None or not math.isfinite(result.mean):
        return f"{name} and {base}: {result.method}"
    if result.mean == 0 and result.p is None:
        return (
            f"{name} and {base} have the same {NAMES[by]}, to the last digit: what differs has had no effect"
        )
    better = BETTER[by] if result.mean < 0 else WORSE[by]
    sentence = f"{name} has {better} than {base}, by {abs(result.mean):.4f}"
    if result.p is None:
        why = result.method if max(result.counts) > 1 else "one run each cannot tell a change from chance"
        return f"{sentence}; {why}"
    sentence += f" (95% interval: {interval(result)}), {p_text(result.p)}, {result.method}"
    if result.left_out:
        sentence += f" (left out: {result.left_out})"
    return f"{sentence}. {verdict(result)}"


def table_of_differences(comparison: Comparison) -> list[str]:
    """A line for each group about its difference from the first one."""
    results = comparison.differences.values()
    columns = {
        "group": list(comparison.differences),
        "difference": [text_of(result.mean, "{:+.4f}".format) for result in results],
        "95% interval": [signed_interval(result) for result in results],
        "p": [text_of(result.p, "{:.2g}".format) for result in results],
        "seeds needed": [text_of(result.seeds_needed, "{:,}".format) for result in results],
        "method": [result.method for result in results],
    }
    return aligned({name: cells for name, cells in columns.items() if any(cells)})


def signed_interval(result: Difference) -> str:
    """The ends of the interval; "" if they are not known."""
    return "" if result.low is None else f"{result.low:+.4f} to {result.high:+.4f}"


def interval(result: Difference) -> str:
    """The ends of the interval, in the direction of the difference."""
    ends = sorted((result.low, result.high), key=abs)
    if result.low * result.high > 0:
        return f"{abs(ends[0]):.4f} to {abs(ends[1]):.4f}"
    return f"{abs(result.low):.4f} lower to {abs(result.high):.4f} higher"


def p_text(p: float) -> str:
    """A p-value."""
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def verdict(result: Difference) -> str:
    """Whether the difference is larger than chance, and how many seeds one of its size needs."""
    needed = f"about {result.seeds_needed:,}" if result.seeds_needed else "more than a million"
    needed = f"to detect a difference of this size takes {needed} seeds each"
    if result.p >= LEVEL:
        return f"This cannot be told from chance; {needed}"
    return f"Chance alone rarely causes such a difference; {needed}"


def needs_seeds(comparison: Comparison) -> bool:
    """Whether the difference of two groups cannot be judged because there is one run of each."""
    results = list(comparison.differences.values())
    return len(results) == 1 and results[0].p is None and max(results[0].counts) == 1 and results[0].mean != 0
