"""Which runs belong together, by what they can be compared, and how they differ."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from isogpt.checkpoint.measures import changed_measures, what_is_measured
from isogpt.lab.runs import Group, Run
from isogpt.lab.significance import differences
from isogpt.options.values import as_typed

# settings that are not compared, since they change neither what a run learns nor how fast it does. The seed
# is what the runs of a group differ in
NOT_COMPARED = {
    *("seed", "out_dir", "eval_interval", "log_interval", "sample_interval", "stats_interval"),
    *("save_interval", "always_save_checkpoint", "save_checkpoint", "keep_last", "mirror", "resume_step"),
    *("wandb_log", "wandb_project", "wandb_run_name", "tensorboard_log", "print_result", "profile"),
    *("time_limit_s", "dist_timeout_s", "check_layout", "check_ranks_interval", "eval_datasets"),
}
# settings that a command for more seeds does not repeat
NOT_REPEATED = {"seed", "out_dir", "resume_step", "wandb_log", "wandb_project", "wandb_run_name"}
LOSS, BITS = "val_loss", "val_bpb"  # what runs are compared by
CODE = "code"  # the digest of the code that trains, which distinguishes runs as a setting does


def compare(groups: list[Group], target: float = 0.0) -> dict:
    """
    Compare groups of runs with the first one. Returns what compare.py prints, as in its JSON.

    Args:
        target: a validation loss to reach; 0: none.
    """
    runs = [run for group in groups for run in group.runs]
    by, reason = what_to_compare_by(runs)
    comparison = {
        "compared_by": by,  # LOSS or BITS; "": the runs cannot be compared
        "reason": reason,  # why not by the loss
        "step": None,  # at which groups are compared, if not each at its end
        "base": groups[0].name,
        "groups": ranked([row_of(group) for group in groups], by),
        "differences": {},  # of each group from the base
        "parting": parting_of(*runs) if len(runs) == 2 and by == LOSS else None,
        "target": target,
        "until": [reached_by(group, target) for group in groups] if target else [],
        "notes": [],
    }
    if by and len(groups) > 1:
        add_differences(comparison, groups)
    return comparison


def ranked(rows: list[dict], by: str) -> list[dict]:
    """The rows, the best first; those of unknown values and of runs that are not complete are last."""
    places = []
    for place, row in enumerate(rows):
        mean = row["means"].get(by, {}).get("mean", math.inf)
        places.append((bool(by) and not row["is_complete"], mean if math.isfinite(mean) else math.inf, place))
    return [rows[place] for _, _, place in sorted(places)]


def add_differences(comparison: dict, groups: list[Group]) -> None:
    """
    Compare groups with the first one, each at its end. Groups without a complete run are left out if others
    have some; otherwise all are compared at the last step at which all were evaluated.
    """
    notes = comparison["notes"]
    compared = [group for group in groups if any(run.is_finished for run in group.runs)]
    if len(compared) < 2 or groups[0] not in compared:
        compared = groups
        comparison["step"] = last_common_step([run for group in groups for run in group.counted])
        if not comparison["step"]:  # nothing, or only the initial weights
            notes.append("not compared: there is no step after the start at which all runs were evaluated")
            return
    notes += [
        f"{group.name} is not complete, so it is not compared" for group in groups if group not in compared
    ]
    values = {}
    for group in compared:
        step = comparison["step"] or last_common_step(group.counted)
        found = {run.seed: run.evaluation_at(step).get(comparison["compared_by"]) for run in group.counted}
        values[group.name] = {seed: one for seed, one in found.items() if one is not None}
    results = differences(values, groups[0].name)
    comparison["differences"] = {name: asdict(result) for name, result in results.items()}


def parting_of(a: Run, b: Run) -> int | None:
    """
    The first logged step at which the training losses of two runs with the same seed differ; None if there is
    no such step.
    """
    losses = {step["iter"]: step["loss"] for step in b.steps}
    differ = [step["iter"] for step in a.steps if losses.get(step["iter"], step["loss"]) != step["loss"]]
    return differ[0] if differ and a.seed == b.seed else None


# ------------------------------------------------------------------------------------------------------------
# groups


def group_runs(runs: list[Run], defaults: dict) -> list[Group]:
    """
    The groups of runs that differ only in the seed, in the order of their first runs. Where a seed occurs
    twice, runs are also told apart by where they are.

    Args:
        defaults: of train.py's settings, for a setting that an older run has not recorded.
    """
    described = [description(run, defaults) for run in runs]
    names = dict.fromkeys(name for one in described for name in one)
    differing = [name for name in names if len({str(one.get(name)) for one in described}) > 1]
    settings = [{name: one.get(name) for name in differing} for one in described]
    counts = Counter((str(one), run.seed) for one, run in zip(settings, runs, strict=True))
    repeated = {one for (one, _), count in counts.items() if count > 1}
    groups = {}
    for one, run in zip(settings, runs, strict=True):
        key = str(one), run.place if str(one) in repeated else ""
        groups.setdefault(key, Group("", [], one)).runs.append(run)
    name_groups(list(groups.values()))
    return list(groups.values())


def description(run: Run, defaults: dict) -> dict:
    """What distinguishes a run from others: its settings, and the code."""
    settings = {name: value for name, value in (defaults | run.settings).items() if name not in NOT_COMPARED}
    init_from = str(settings.get("init_from", "")).removeprefix("auto:")
    settings["init_from"] = "scratch" if init_from == "auto" else init_from
    return settings | {CODE: run.facts.get(CODE, "")}


def name_groups(groups: list[Group]) -> None:
    """
    Name groups by the settings that differ, and if they do not tell the groups apart, also by where the runs
    are, and by the code.
    """
    for group in groups:
        settings = [f"{name}={as_typed(value)}" for name, value in group.settings.items() if name != CODE]
        group.name = " ".join(settings)
    for more in ("place", CODE):
        if "" in (names := [group.name for group in groups]) or len(set(names)) < len(groups):
            for group in groups:
                word = group.place if more == "place" else f"code={group.settings.get(CODE)}"
                group.name = f"{group.name} {word}".strip()


# ------------------------------------------------------------------------------------------------------------
# what can be compared


def what_to_compare_by(runs: list[Run]) -> tuple[str, str]:
    """
    Return what runs can be compared by: LOSS if all are evaluated on the same tokens, BITS if on the same
    text, "" otherwise. Also return why they cannot be compared by the loss.
    """
    first, *others = runs
    changes = [(run, changed_measures(measures_of(first), measures_of(run))) for run in others]
    reasons = [
        f"of {run.folder}, {', '.join(changed)} ({first.folder})" for run, changed in changes if changed
    ]
    if not reasons:
        return LOSS, ""
    if len({run.facts.get("val_text") for run in runs}) > 1:
        return "", f"{reasons[0]}, and the validation texts differ too"
    if not all(BITS in one for run in runs for one in run.evaluations):
        return "", f"{reasons[0]}, and bits per byte are not recorded: run the data set's prepare.py again"
    return BITS, reasons[0]


def measures_of(run: Run) -> dict:
    """What determines a run's validation losses, besides the seed, see measures.what_is_measured."""
    measures = run.facts.get("measures") or what_is_measured(run.settings)
    return {name: value for name, value in measures.items() if name != "seed"}


# ------------------------------------------------------------------------------------------------------------
# numbers of groups


def row_of(group: Group) -> dict:
    """What the table contains about a group. None: not known."""
    step = last_common_step(group.counted)  # the last one at which all runs that count were evaluated
    found = [
        run.evaluation_at(step) | {"best": best_loss(run, step)} for run in group.counted if step is not None
    ]
    first = found[0] if found else {}
    return {
        "name": group.name,
        "settings": group.settings,
        "place": group.place,
        "runs": [row_of_run(run) for run in group.runs],
        "commits": sorted({commit_of(run) for run in group.runs}),
        "step": step,
        "tokens": first.get("tokens"),
        "seconds": mean_of(one.get("seconds") for one in found)["mean"],
        "means": {name: mean_of(one.get(name) for one in found) for name in first},
        "parameters": group.runs[0].facts.get("parameters"),
        "tokens_per_s": mean_of(run.tokens_per_s for run in group.runs)["mean"],
        "memory_gb": max((run.memory_gb for run in group.runs if run.memory_gb), default=None),
        "is_complete": any(run.is_finished for run in group.runs),
        "state": state_of(group.runs),
    }


def row_of_run(run: Run) -> dict:
    """What the JSON contains about a run."""
    return {
        "folder": str(run.folder),
        "seed": run.seed,
        "evaluation": run.evaluations[-1] if run.evaluations else None,
        "best_val_loss": best_loss(run, math.inf),
        "tokens_per_s": run.tokens_per_s,
        "state": state_of([run]),
    }


def last_common_step(runs: list[Run]) -> int | None:
    """The last step at which all of these runs were evaluated; None: there is none."""
    steps = [{one["iter"] for one in run.evaluations} for run in runs]
    return max(set.intersection(*steps), default=None) if steps else None


def best_loss(run: Run, step: float) -> float:
    """The lowest validation loss up to a step; nan if none is finite."""
    losses = [one[LOSS] for one in run.evaluations if one["iter"] <= step]
    return min(filter(math.isfinite, losses), default=math.nan)


def commit_of(run: Run) -> str:
    """The commit of a run's code, and whether files differed from it."""
    return run.facts.get("commit", "")[:8] + ("-changed" if run.facts.get("changed") else "")


def mean_of(values: Iterable[float | None]) -> dict:
    """
    The mean of the values that are known and finite, nan if there are none; its standard error, None if there
    is one; and their number.
    """
    known = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    mean = statistics.fmean(known) if known else math.nan
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return {"mean": mean, "error": error, "runs": len(known)}


def state_of(runs: list[Run]) -> str:
    """A phrase about runs that are not complete or have diverged; "" if there are none."""
    states = Counter(run.state for run in runs if run.state)
    if len(runs) == 1:
        return runs[0].state
    return ", ".join(f"{count} of {len(runs)} {state}" for state, count in states.items())


# ------------------------------------------------------------------------------------------------------------
# time to a loss


def reached_by(group: Group, target: float) -> dict:
    """When the runs of a group have reached a validation loss: means over those that have."""
    points = [point for run in group.runs if (point := reaches(run, target))]
    means = {name: mean_of(point.get(name) for point in points) for name in ("iter", "tokens", "seconds")}
    return {"name": group.name, "reached": len(points), "runs": len(group.runs)} | means


def reaches(run: Run, target: float) -> dict[str, float]:
    """
    Step, tokens and seconds at which a run's validation loss is first as low as `target`, on a straight line
    between two evaluations; {}: it never is.
    """
    before = {}
    for after in run.evaluations:
        if not math.isfinite(after[LOSS]):
            continue
        if after[LOSS] <= target:
            share = (before[LOSS] - target) / (before[LOSS] - after[LOSS]) if before else 1.0
            known = [name for name in ("iter", "tokens", "seconds") if after.get(name) is not None]
            return {name: before.get(name, 0) * (1 - share) + after[name] * share for name in known}
        before = after
    return {}


# ------------------------------------------------------------------------------------------------------------
# what to type for more seeds


def commands_for_seeds(groups: list[Group], defaults: dict) -> list[str]:
    """The commands that train each group with several seeds, and the one that compares them."""
    commands, folders = [], []
    for group in groups:
        run = group.runs[0]
        settings = {
            name: as_typed(value)
            for name, value in run.settings.items()
            if name in defaults and name not in NOT_REPEATED and value != defaults[name]
        }
        folders.append(as_typed(f"{run.folder}-seeds"))
        settings |= {"seed": "1,2,3", "out_dir": folders[-1]}
        commands.append(" ".join(["python sweep.py", *(f"--{name}={v}" for name, v in settings.items())]))
    return [*commands, " ".join(["python compare.py", *folders])]
