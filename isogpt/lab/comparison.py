"""Which runs belong together, by what they can be compared, how they differ, and what compare.py prints."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from isogpt.checkpoint.measures import changed_measures, what_is_measured
from isogpt.common.console import aligned, visible
from isogpt.lab.runs import MORE_SEEDS, Group, Run
from isogpt.lab.significance import LEVEL, MOST_SEEDS, NO_TEST, corrected, difference
from isogpt.options.values import as_typed

# settings that are not compared, since they change neither what a run learns nor how fast it does. The seed
# is what the runs of a group differ in
NOT_COMPARED = {
    *("seed", "out_dir", "eval_interval", "log_interval", "sample_interval", "stats_interval"),
    *("save_interval", "always_save_checkpoint", "save_checkpoint", "keep_last", "mirror"),
    *("wandb_log", "wandb_project", "wandb_run_name", "tensorboard_log", "profile"),
    *("time_limit_s", "dist_timeout_s", "check_layout", "check_ranks_interval", "eval_datasets"),
}
# settings that a command for more seeds does not repeat
NOT_REPEATED = {"seed", "out_dir", "mirror", "wandb_log", "wandb_project", "wandb_run_name"}
LOSS, BITS = "val_loss", "val_bpb"  # what runs are compared by
NAMES = {LOSS: "validation loss", BITS: "number of bits per byte"}
TO_LOSS = {"iter": "steps_to_loss", "tokens": "tokens_to_loss", "seconds": "seconds_to_loss"}
CODE = "code"  # the digest of the code that trains, which distinguishes runs as a setting does


def compare(groups: list[Group], target: float = 0.0) -> dict:
    """
    Compare groups of runs with the first one. Returns what compare.py prints, as in its JSON.

    Args:
        target: a validation loss to reach; 0: none.
    """
    runs = [run for group in groups for run in group.runs]
    by, reason = what_to_compare_by(runs)
    rows = [row_of(group, target) for group in groups]
    if by:  # the best first, and last those that are incomplete
        rows.sort(key=lambda row: (bool(row["state"]), row[by]["mean"] if by in row else math.inf))
    parting = None
    if by == LOSS and len(runs) == 2 and runs[0].seed == runs[1].seed:
        parting = parting_of(*runs)
    return {
        "compared_by": by,  # LOSS or BITS; "": the runs cannot be compared
        "reason": reason,  # why not by the loss
        "groups": rows,
        "base": groups[0].name,
        "differences": differences(groups, by) if by else {},
        "parting": parting,
        "notes": [],
        "pictures": [],  # the paths of those that have been drawn
    }


def differences(groups: list[Group], by: str) -> dict[str, dict]:
    """
    How each other group differs from the first one: at their ends if both are complete, otherwise at the last
    `step` at which all of their runs were evaluated.
    """
    base, results, steps = groups[0].counted, {}, {}
    for group in groups[1:]:
        name, other = group.name, group.counted
        end, other_end = last_step(base), last_step(other)
        if any(run.state for run in base + other):
            end = other_end = steps[name] = last_step(base + other)
        results[name] = difference(values_of(base, end, by), values_of(other, other_end, by))
    return {name: asdict(one) | {"step": steps.get(name)} for name, one in corrected(results).items()}


def values_of(runs: list[Run], step: int, by: str) -> dict[int, float]:
    """{seed: finite value at a step}; none of the initial weights."""
    values = {}
    if not step:
        return values
    for run in runs:
        value = run.evaluation_at(step)[by]
        if math.isfinite(value):
            values[run.seed] = value
    return values


def last_step(runs: list[Run]) -> int:
    """The last step at which all of these runs were evaluated; 0: there is none."""
    steps = [{one["iter"] for one in run.evaluations} for run in runs]
    return max(set.intersection(*steps), default=0) if steps else 0


def parting_of(a: Run, b: Run) -> int | None:
    """The first logged step at which the training losses of two runs differ; None: there is none."""
    losses = {step["iter"]: step["loss"] for step in b.steps}
    for step in a.steps:
        number, loss = step["iter"], step["loss"]
        if number in losses and losses[number] != loss:
            return number
    return None


# ------------------------------------------------------------------------------------------------------------
# groups


def group_runs(runs: list[Run], defaults: dict) -> list[Group]:
    """
    The groups of runs that differ only in the seed, in the order of their first runs. Where a seed occurs
    twice, runs are also told apart by where they are. The settings that differ name a group; if these do not
    suffice, also what the user typed for its first run, or else the folder of this run.

    Args:
        defaults: of train.py's settings, for a setting that an older run has not recorded.
    """
    described = [description(run, defaults) for run in runs]
    names = [name for name in described[0] if len({str(one.get(name)) for one in described}) > 1]
    kinds = [str([one.get(name) for name in names]) for one in described]
    seeds = [(kind, run.seed) for kind, run in zip(kinds, runs, strict=True)]
    repeated = {kind for kind, seed in seeds if seeds.count((kind, seed)) > 1}
    by_key = {}
    for run, one, kind in zip(runs, described, kinds, strict=True):
        text = " ".join(f"{name}={as_typed(one.get(name))}" for name in names if name != CODE)
        code = one[CODE] if CODE in names else ""
        key = kind, run.place if kind in repeated else ""
        group = by_key.setdefault(key, Group(text, [], code))
        group.runs.append(run)
    groups = [*by_key.values()]
    texts = [group.name for group in groups]
    places = [f"{group.runs[0].place} {group.name}".strip() for group in groups]
    folders = [str(group.runs[0].folder) for group in groups]
    for names in (texts, places, folders):
        if all(names) and len(set(names)) == len(groups):
            break
    return [replace(group, name=name) for group, name in zip(groups, names, strict=True)]


def description(run: Run, defaults: dict) -> dict:
    """What distinguishes a run from others: its settings, and the code."""
    settings = defaults | run.settings
    for name in NOT_COMPARED & settings.keys():
        del settings[name]
    init_from = settings["init_from"].removeprefix("auto:")
    settings["init_from"] = "scratch" if init_from == "auto" else init_from
    return settings | {CODE: run.facts.get(CODE, "")}


# ------------------------------------------------------------------------------------------------------------
# what can be compared


def what_to_compare_by(runs: list[Run]) -> tuple[str, str]:
    """
    Return what runs can be compared by: LOSS if all are evaluated on the same tokens, BITS if on the same
    text, "" otherwise. Also return why they cannot be compared by the loss.
    """
    measures = [run.facts.get("measures") or what_is_measured(run.settings) for run in runs]
    for run, measured in zip(runs, measures, strict=True):
        if changed := changed_measures(measures[0], measured | {"seed": None}):
            reason = f"of {run.folder}, {', '.join(changed)} ({runs[0].folder})"
            break
    else:
        return LOSS, ""
    if len({run.facts.get("val_text") for run in runs}) > 1:
        return "", f"{reason}, and the validation texts differ too"
    if not all(BITS in one for run in runs for one in run.evaluations):
        return "", f"{reason}, and bits per byte are not recorded: run prepare.py again"
    return BITS, reason


# ------------------------------------------------------------------------------------------------------------
# numbers of groups


def row_of(group: Group, target: float) -> dict:
    """The table's row of a group, by the headings. None: not known."""
    # at the last step at which all runs that count were evaluated
    runs, step = group.runs, last_step(group.counted)
    ends = [run.evaluation_at(step) | {"best": best_loss(run, step)} for run in group.counted]
    first = ends[0] if ends else {}
    row = {
        "group": group.name,
        "code": group.code or None,
        "seeds": [run.seed for run in runs],
        "steps": first.get("iter"),
        "tokens": first.get("tokens"),
        "seconds": mean_of(ends, "seconds")["mean"],
        "parameters": runs[0].facts.get("parameters"),
    }
    for name in first:
        if name.startswith(("val_", "best")):
            row[name] = mean_of(ends, name)
    if target:
        points = [point for run in runs if (point := reaches(run, target))]
        row |= {"loss": target, "runs_to_loss": len(points)}
        for name, heading in TO_LOSS.items():
            row[heading] = mean_of(points, name)["mean"]
    steps = [step for run in runs for step in run.steps[1:]]  # the first step is slow
    row["tokens_per_s"] = row["memory_gb"] = None
    if steps:
        row["tokens_per_s"] = statistics.median(step["tokens_per_s"] for step in steps)
        row["memory_gb"] = max(step["memory_gb_max"] for step in steps)
    row["commits"] = sorted({commit_of(run) for run in runs})
    row["state"] = [run.state for run in runs if run.state]
    row["runs"] = []
    for run in runs:
        last = run.evaluations[-1] if run.evaluations else None
        row["runs"].append({"folder": str(run.folder), "state": run.state, "evaluation": last})
    return row


def best_loss(run: Run, step: int) -> float:
    """The lowest validation loss up to a step."""
    losses = [one[LOSS] for one in run.evaluations if one["iter"] <= step]
    return min(filter(math.isfinite, losses), default=math.nan)


def commit_of(run: Run) -> str:
    """The commit of a run's code, and whether files differed from it."""
    return run.facts.get("commit", "")[:8] + ("-changed" if run.facts.get("changed") else "")


def mean_of(records: list[dict], name: str) -> dict:
    """The mean of a number in some records and its standard error; nan: not known."""
    known = [record[name] for record in records if record.get(name) is not None]
    mean = error = math.nan
    if known:
        mean = statistics.fmean(known)
    if len(known) > 1:
        error = statistics.stdev(known) / math.sqrt(len(known))
    return {"mean": mean, "error": error}


def reaches(run: Run, target: float) -> dict[str, float]:
    """
    Step, tokens and seconds at which a run's validation loss is first as low as `target`, on a straight line
    between two evaluations; {}: it never is.
    """
    finite = [one for one in run.evaluations if math.isfinite(one[LOSS])]
    for before, after in zip(finite[:1] + finite, finite, strict=False):
        if after[LOSS] <= target:
            losses = [after[LOSS], before[LOSS]]
            names = TO_LOSS.keys() & after
            return {name: np.interp(target, losses, [after[name], before[name]]) for name in names}
    return {}


# ------------------------------------------------------------------------------------------------------------
# what to type for more seeds


def commands_for_seeds(groups: list[Group], defaults: dict) -> list[str]:
    """The commands that train each group with several seeds, and the one that compares them."""
    commands, together = [], "python compare.py"
    for group in groups:
        first, command = group.runs[0], "python sweep.py"
        for name, value in first.settings.items():
            if name not in NOT_REPEATED and value != defaults.get(name, value):
                command += f" --{name}={as_typed(value)}"
        folder = as_typed(f"{first.folder}{MORE_SEEDS}")
        commands.append(f"{command} --seed=1,2,3 --out_dir={folder}")
        together += f" {folder}"
    return [*commands, together]


# ------------------------------------------------------------------------------------------------------------
# what is printed


def report(comparison: dict, more_seeds: Sequence[str]) -> list[str]:
    """
    The lines that compare.py prints.

    Args:
        more_seeds: the commands that train with more seeds.
    """
    rows, results = comparison["groups"], comparison["differences"]
    lines = [*table(rows), ""]
    if comparison["reason"]:
        outcome = "not compared"
        if comparison["compared_by"]:
            outcome = "compared by bits per byte, since the losses are over different tokens"
        lines.append(f"{outcome}: {comparison['reason']}")
    lines += [sentence(name, comparison) for name in results]
    if (step := comparison["parting"]) is not None:
        lines.append(f"the first logged step at which their training losses differ is {step:,}")
    untested = [result for result in results.values() if NO_TEST in result["method"]]
    if untested and len(results) == 1:
        edited = ", each with its own version of the code" if any(row["code"] for row in rows) else ""
        lines.append(f"To know, train with several seeds{edited}:")
        lines += [f"    {command}" for command in more_seeds]
    lines += [f"note: {note}" for note in comparison["notes"]]
    lines += [f"a picture: {path}" for path in comparison["pictures"]]
    return [visible(line) for line in lines]


def table(rows: list[dict]) -> list[str]:
    """A line for each row, with the columns in which they differ, and a line of what all have in common."""
    headings = dict.fromkeys(name for row in rows for name in row if name != "runs")
    cells, same = [{} for _ in rows], []
    for name in headings:
        column = [text_of(row.get(name)) for row in rows]
        if not any(column):
            continue
        if len(rows) > 1 and len(set(column)) == 1:
            same.append(f"{name} {column[0]}")
            continue
        for row, text in zip(cells, column, strict=True):
            row[name] = text
    lines = aligned(cells)
    return [f"all: {', '.join(same)}", *lines] if same else lines


def text_of(value: object) -> str:
    """A value as text; "" if it is not known."""
    if isinstance(value, dict):  # a mean loss
        mean, error = f"{value['mean']:.4f}", value["error"]
        return mean if math.isnan(error) else f"{mean} ± {error:.4f}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"
    return str(value or "")


def sentence(name: str, comparison: dict) -> str:
    """A sentence about the difference of a group from the first one."""
    base, measured = comparison["base"], NAMES[comparison["compared_by"]]
    result = comparison["differences"][name]
    mean, p = result["mean"], result["p"]
    method, seeds = result["method"], result["seeds_needed"]
    at = ""
    if result["step"]:
        at = f" at step {result['step']:,}, the last one that all have evaluated"
    if mean is None:
        return f"{name} and {base}: {method}"
    if mean == 0 and p is None:
        equal = "to the last digit: what differs has had no effect"
        return f"{name} and {base} have the same {measured}{at}, {equal}"
    kind = "lower" if mean < 0 else "higher"
    text = f"{name} has a {kind} {measured} than {base}, by {abs(mean):.4f}{at}"
    if p is None:
        return f"{text}; {method}"
    interval = f"95% interval: {result['low']:+.4f} to {result['high']:+.4f}"
    verdict = "This cannot be told from chance"
    if p < LEVEL:
        verdict = "Chance alone rarely causes such a difference"
    needed = f"about {seeds}" if seeds else f"more than {MOST_SEEDS:,}"
    text += f" ({interval}), p = {p:.2g}, {method}. {verdict}"
    return f"{text}; to detect a difference of this size takes {needed} seeds each"
