"""Which runs belong together, by what they can be compared, and how they differ."""

import math
import statistics
from dataclasses import dataclass, field

from isogpt.checkpoint.measures import changed_measures, what_is_measured
from isogpt.lab import significance
from isogpt.lab.runs import Group, Run, is_finite
from isogpt.lab.significance import Difference
from isogpt.options.values import as_typed

# settings that are not compared, since they change neither what a run learns nor how fast it does. The seed
# is what the runs of a group differ in
NOT_COMPARED = {
    "seed",
    "out_dir",
    "eval_interval",
    "log_interval",
    "sample_interval",
    "stats_interval",
    "save_interval",
    "always_save_checkpoint",
    "save_checkpoint",
    "keep_last",
    "mirror",
    "resume_step",
    "wandb_log",
    "wandb_project",
    "wandb_run_name",
    "tensorboard_log",
    "print_result",
    "profile",
    "time_limit_s",
    "dist_timeout_s",
    "check_layout",
    "check_ranks_interval",
    "eval_datasets",
}
# settings that a command for more seeds does not repeat
NOT_REPEATED = {"seed", "out_dir", "resume_step", "wandb_log", "wandb_project", "wandb_run_name"}
LOSS, BITS = "val_loss", "val_bpb"  # what runs are compared by
OTHERS = f"{LOSS}/"  # the beginning of the name of a further validation set's loss
CODE = "code"  # the digest of the code that trains, which distinguishes runs as a setting does


@dataclass
class Mean:
    """The mean of the runs of a group."""

    mean: float
    error: float | None  # the standard error of the mean; None with a single run
    runs: int


@dataclass
class RunRow:
    """What the JSON contains about a run, at its last evaluation."""

    folder: str
    seed: int
    evaluation: dict | None
    best_val_loss: float | None
    tokens_per_s: float | None
    state: str


@dataclass
class Row:
    """What the table contains about a group. None: not known."""

    name: str
    settings: dict
    place: str  # the run's folder, or what the user typed for several runs
    runs: list[RunRow]
    commits: list[str]  # of the code; they may differ in a group if they change only other files
    step: int | None = None  # the last step at which all of the group's runs that count were evaluated
    tokens: int | None = None  # up to this step
    flops: float | None = None
    seconds: Mean | None = None
    parameters: int | None = None
    val_loss: Mean | None = None  # at this step
    best_val_loss: Mean | None = None  # up to this step
    bits_per_byte: Mean | None = None
    others: dict[str, Mean] = field(default_factory=dict)  # losses of further validation sets, by name
    tokens_per_s: Mean | None = None
    memory_gb: float | None = None
    is_complete: bool = False  # whether any run is
    state: str = ""  # of the others


@dataclass
class Reached:
    """When the runs of a group have reached a validation loss; None: no run has."""

    name: str
    reached: int  # runs
    runs: int
    step: Mean | None
    tokens: Mean | None
    seconds: Mean | None


@dataclass
class Comparison:
    """What compare.py prints, draws, and writes as JSON."""

    groups: list[Group]
    rows: list[Row]  # in the order of groups
    by: str  # LOSS or BITS; "": the runs cannot be compared
    reason: str = ""  # why not by the loss
    step: int | None = None  # at which groups were compared, if not each at its end
    base: str = ""  # the name of the first group, with which the others are compared
    differences: dict[str, Difference] = field(default_factory=dict)
    target: float = 0.0  # the loss to reach
    until: list[Reached] = field(default_factory=list)
    parting: int | None = None  # the first step at which the training losses of two runs of a seed differ
    notes: list[str] = field(default_factory=list)


def compare(runs: list[Run], defaults: dict, target: float = 0.0) -> Comparison:
    """
    Compare runs, in groups that differ only in the seed. The first run's group is the one with which the
    others are compared.

    Args:
        defaults: of train.py's settings, for a setting that an older run has not recorded.
        target: a validation loss to reach; 0: none.
    """
    groups = group_runs(runs, defaults)
    by, reason = what_to_compare_by(runs)
    comparison = Comparison(groups, [row_of(group) for group in groups], by, reason, base=groups[0].name)
    comparison.notes += notes_about(groups, by)
    if by and len(groups) > 1:
        add_differences(comparison)
    if target:
        comparison.target = target
        comparison.until = [reached_by(group, target) for group in groups]
    return comparison


def add_differences(comparison: Comparison) -> None:
    """
    Compare groups with the first one, each at its end. Groups without a complete run are left out if others
    have some; otherwise all are compared at the last step at which all were evaluated.
    """
    groups = comparison.groups
    complete = [group for group, row in zip(groups, comparison.rows, strict=True) if row.is_complete]
    if len(complete) < 2 or groups[0] not in complete:
        complete = groups
        comparison.step = last_common_step([run for group in groups for run in counted(group.runs)])
        if not comparison.step:  # nothing, or only the initial weights
            comparison.notes.append(
                "not compared: there is no step after the start at which all runs were evaluated"
            )
            return
    for group in groups:
        if group not in complete:
            comparison.notes.append(f"{group.name} is not complete, so it is not compared")
    values = {group.name: values_of(group, comparison.by, comparison.step) for group in complete}
    comparison.differences = significance.differences(values, groups[0].name)
    comparison.parting = parting_of(groups) if comparison.by == LOSS else None


# ------------------------------------------------------------------------------------------------------------
# groups


def group_runs(runs: list[Run], defaults: dict) -> list[Group]:
    """
    The groups of runs that differ only in the seed, in the order of their first runs. Runs with the same seed
    and no recorded difference are told apart by the argument that names them, or by their folders.
    """
    described = [description(run, defaults) for run in runs]
    names = dict.fromkeys(name for one in described for name in one)
    differing = [name for name in names if len({typed(one.get(name)) for one in described}) > 1]
    settings = [{name: one.get(name) for name in differing} for one in described]
    keys = [tuple(map(typed, one.values())) for one in settings]
    by_key = dict(zip(keys, settings, strict=True))
    groups = [
        Group("", part, by_key[key])
        for key, alike in grouped([*zip(keys, runs, strict=True)]).items()
        for part in told_apart(alike)
    ]
    for group, name in zip(groups, names_of(groups), strict=True):
        group.name = name
    return groups


def names_of(groups: list[Group]) -> list[str]:
    """
    The names of groups: the settings that differ, and if they do not tell the groups apart, also what the
    user typed, and the code.
    """
    settings = [
        " ".join(f"{name}={typed(value)}" for name, value in group.settings.items() if name != CODE)
        for group in groups
    ]
    places = [place_of(group.runs) for group in groups]
    codes = [f"code={group.settings.get(CODE)}" for group in groups]
    for columns in ([settings], [settings, places], [settings, places, codes]):
        names = [" ".join(filter(None, parts)) for parts in zip(*columns, strict=True)]
        if all(names) and len(set(names)) == len(groups):
            break
    return names


def typed(value: object) -> str:
    """A value as it is typed on the command line."""
    return as_typed(value) if isinstance(value, bool | int | float | str) else str(value)


def description(run: Run, defaults: dict) -> dict:
    """What distinguishes a run from others: its settings, and the code."""
    settings = {name: value for name, value in (defaults | run.settings).items() if name not in NOT_COMPARED}
    init_from = str(settings.get("init_from", ""))
    settings["init_from"] = init_from.removeprefix("auto:") if init_from != "auto" else "scratch"
    return settings | {CODE: run.facts.get(CODE, "")}


def commit_of(run: Run) -> str:
    """The commit of a run's code, and whether files differed from it."""
    return run.facts.get("commit", "")[:8] + ("-changed" if run.facts.get("changed") else "")


def grouped(keyed: list[tuple[object, Run]]) -> dict[object, list[Run]]:
    """{key: its runs}, in the order of the first ones."""
    groups = {}
    for key, run in keyed:
        groups.setdefault(key, []).append(run)
    return groups


def told_apart(runs: list[Run]) -> list[list[Run]]:
    """Divide runs among which a seed occurs twice: by the argument that names them, or else by folder."""
    if are_seeds(runs):
        return [runs]
    by_argument = list(grouped([(run.argument, run) for run in runs]).values())
    return by_argument if all(map(are_seeds, by_argument)) else [[run] for run in runs]


def are_seeds(runs: list[Run]) -> bool:
    """Whether no two runs have the same seed."""
    return len({run.settings["seed"] for run in runs}) == len(runs)


def place_of(runs: list[Run]) -> str:
    """Where runs are: the folder of one; of several, what the user typed, or their parent folder."""
    if len(runs) == 1:
        return str(runs[0].folder)
    return runs[0].argument if len({run.argument for run in runs}) == 1 else str(runs[0].folder.parent)


# ------------------------------------------------------------------------------------------------------------
# what can be compared


def measures_of(run: Run) -> dict:
    """What determines a run's validation losses, besides the seed, see measures.what_is_measured."""
    measures = run.facts.get("measures") or what_is_measured(run.settings)
    return {name: value for name, value in measures.items() if name != "seed"}


def what_to_compare_by(runs: list[Run]) -> tuple[str, str]:
    """
    Return what runs can be compared by: LOSS if all are evaluated on the same tokens, BITS if on the same
    text, "" otherwise. Also return why they cannot be compared by the loss.
    """
    first = runs[0]
    for other in runs[1:]:
        if changed := changed_measures(measures_of(first), measures_of(other)):
            difference = f"of {other.folder}, {', '.join(changed)} ({first.folder})"
            break
    else:
        return LOSS, ""
    texts = {run.facts.get("val_text", "") for run in runs}
    if "" in texts:
        unknown = next(run for run in runs if not run.facts.get("val_text"))
        return "", (
            f"{difference}, and {unknown.folder} does not record its validation text, without which bits per "
            "byte cannot be compared: run the data set's prepare.py again, then train"
        )
    if len(texts) > 1:
        return "", f"{difference}, and the validation texts differ too"
    if not all(BITS in e for run in runs for e in run.evaluations):
        return "", f"{difference}, and some evaluations do not record bits per byte"
    return BITS, difference


def notes_about(groups: list[Group], by: str) -> list[str]:
    """What a reader of the table should know."""
    runs, notes = [run for group in groups for run in group.runs], []
    is_whole = all(run.settings.get("eval_iters") == 0 for run in runs)
    seeds = {frozenset(group.seeds) for group in groups}
    if by == BITS and not is_whole:
        notes.append(
            "the runs were evaluated on different windows of the text, which adds noise: train with "
            "--eval_iters=0, which reads the whole validation text"
        )
    elif by and len(groups) > 1 and not is_whole and len(seeds) > 1:
        notes.append(
            "the seed also chooses the validation windows, and the groups have different seeds, which adds "
            "noise: train with the same seeds, or with --eval_iters=0, which reads the whole validation text"
        )
    return notes


# ------------------------------------------------------------------------------------------------------------
# numbers of groups


def counted(runs: list[Run]) -> list[Run]:
    """
    The runs of a group that count. Of those with evaluations, these are the complete ones; if there are none,
    those that have not failed, or else all.
    """
    evaluated = [run for run in runs if run.evaluations]
    complete = [run for run in evaluated if run.is_finished]
    return complete or [run for run in evaluated if run.ending != "failed"] or evaluated


def last_common_step(runs: list[Run]) -> int | None:
    """The last step at which all of these runs were evaluated; None: there is none."""
    steps = [{e["iter"] for e in run.evaluations} for run in runs]
    return max(set.intersection(*steps), default=None) if steps else None


def evaluation_at(run: Run, step: int | None) -> dict | None:
    """A run's evaluation at a step."""
    return next((e for e in run.evaluations if e["iter"] == step), None)


def values_of(group: Group, by: str, step: int | None) -> dict[int, float]:
    """{seed: value} of the runs that count, at a step or, if it is None, at their last common one."""
    runs = counted(group.runs)
    step = last_common_step(runs) if step is None else step
    at_step = {run.settings["seed"]: evaluation_at(run, step) for run in runs}
    return {seed: one.get(by, math.nan) if one else math.nan for seed, one in at_step.items()}


def parting_of(groups: list[Group]) -> int | None:
    """
    The first step at which two runs with the same seed have different training losses, among the steps that
    were read; None if there is no such step, or if these are not two such runs.
    """
    runs = [run for group in groups for run in group.runs]
    if len(runs) != 2 or len({run.settings["seed"] for run in runs}) != 1:
        return None
    a, b = ({step["iter"]: step.get("loss") for step in run.steps} for run in runs)
    return next((step for step, loss in a.items() if step in b and b[step] != loss), None)


def mean_of(values: list[float | None]) -> Mean | None:
    """The mean and its standard error of the values that are finite; None if there are none."""
    known = [value for value in values if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    if not finite:
        return Mean(math.nan, None, 0) if known else None
    error = statistics.stdev(finite) / math.sqrt(len(finite)) if len(finite) > 1 else None
    return Mean(statistics.fmean(finite), error, len(finite))


def row_of(group: Group) -> Row:
    """
    What the table contains about a group, up to the last step at which all runs that count were evaluated.
    """
    runs = counted(group.runs)
    step = last_common_step(runs)
    runs_of_group = [row_of_run(run) for run in group.runs]
    commits = sorted({commit_of(run) for run in group.runs})
    row = Row(group.name, group.settings, place_of(group.runs), runs_of_group, commits, step)
    row.parameters = group.runs[0].facts.get("parameters")
    row.is_complete = any(run.is_finished for run in group.runs)
    row.state = state_of(group.runs)
    row.tokens_per_s = mean_of([run.tokens_per_s for run in group.runs])
    row.memory_gb = max(filter(is_finite, (run.memory_gb for run in group.runs)), default=None)
    found = [one for run in runs if (one := evaluation_at(run, step))]
    if not found:
        return row
    row.tokens, row.flops = found[0]["tokens"], found[0].get("flops")
    row.seconds = mean_of([one["seconds"] for one in found])
    row.val_loss = mean_of([one[LOSS] for one in found])
    row.bits_per_byte = mean_of([one.get(BITS) for one in found])
    others = [name for name in found[0] if name.startswith(OTHERS)]
    row.others = {name.removeprefix(OTHERS): mean_of([one.get(name) for one in found]) for name in others}
    row.best_val_loss = mean_of([best_loss(run, step) for run in runs])
    return row


def row_of_run(run: Run) -> RunRow:
    """What the JSON contains about a run."""
    last = run.evaluations[-1] if run.evaluations else None
    best = best_loss(run, last["iter"]) if last else None
    seed = run.settings["seed"]
    return RunRow(str(run.folder), seed, last, best, run.tokens_per_s, state_of_run(run))


def best_loss(run: Run, step: int) -> float:
    """The lowest validation loss up to a step; nan if none is finite."""
    losses = [e[LOSS] for e in run.evaluations if e["iter"] <= step and is_finite(e[LOSS])]
    return min(losses, default=math.nan)


def state_of(runs: list[Run]) -> str:
    """A phrase about runs that are not complete; "" if all are, and none has diverged."""
    states = [state for run in runs if (state := state_of_run(run))]
    if len(runs) == 1:
        return "".join(states)
    return ", ".join(f"{states.count(state)} of {len(runs)} {state}" for state in dict.fromkeys(states))


def state_of_run(run: Run) -> str:
    """How a run has ended, if it is not complete or has diverged."""
    if not run.is_finished:
        return run.ending or "running or killed"
    return "" if not run.evaluations or is_finite(run.evaluations[-1][LOSS]) else "diverged"


# ------------------------------------------------------------------------------------------------------------
# time to a loss


def reached_by(group: Group, target: float) -> Reached:
    """When the runs of a group have reached a validation loss: means over those that have."""
    points = [point for run in group.runs if (point := reaches(run, target))]
    means = [mean_of([point[name] for point in points]) for name in ("iter", "tokens", "seconds")]
    return Reached(group.name, len(points), len(group.runs), *means)


def reaches(run: Run, target: float) -> dict[str, float] | None:
    """
    Step, tokens and seconds at which a run's validation loss is first as low as `target`, on a straight line
    between two evaluations; None: it never is.
    """
    before = None
    for after in run.evaluations:
        if after[LOSS] <= target:
            share = 1.0
            if before and is_finite(before[LOSS]) and is_finite(after[LOSS]):
                share = (before[LOSS] - target) / (before[LOSS] - after[LOSS])
            start = before or after
            return {n: start[n] + share * (after[n] - start[n]) for n in ("iter", "tokens", "seconds")}
        before = after
    return None


# ------------------------------------------------------------------------------------------------------------
# what to type for more seeds


def sweep_commands(groups: list[Group], defaults: dict) -> list[str]:
    """
    The commands that train two groups with several seeds: one if they differ in a single setting of
    train.py, else one for each group, and the command that compares them.
    """
    names = {name for group in groups for name in group.settings}
    if len(names) == 1 and (name := names.pop()) in defaults:
        values = ",".join(dict.fromkeys(typed(group.settings[name]) for group in groups))
        return [sweep_command(groups[0].runs[0], defaults, f"--{name}={values}", "out-sweep")]
    firsts = [group.runs[0] for group in groups[:2]]
    folders = [f"{run.folder}-seeds" for run in firsts]
    commands = [sweep_command(run, defaults, "", folder) for run, folder in zip(firsts, folders, strict=True)]
    return [*commands, " ".join(["python compare.py", *map(typed, folders)])]


def sweep_command(run: Run, defaults: dict, swept: str, out_dir: str) -> str:
    """The command that trains a run with three seeds. `swept`: a setting with its values, or ""."""
    name = swept.partition("=")[0].lstrip("-")
    words = ["python sweep.py", *options_of(run, defaults, name), swept, "--seed=1,2,3"]
    return " ".join(filter(None, [*words, f"--out_dir={typed(out_dir)}"]))


def options_of(run: Run, defaults: dict, but: str) -> list[str]:
    """The settings of a run that are not train.py's defaults, as they are typed, except the setting `but`."""
    left_out = NOT_REPEATED | {but}
    values = {n: v for n, v in run.settings.items() if n in defaults and n not in left_out}
    if values.get("init_from") in ("resume", "auto"):
        del values["init_from"]
    return [f"--{name}={typed(value)}" for name, value in values.items() if value != defaults[name]]
