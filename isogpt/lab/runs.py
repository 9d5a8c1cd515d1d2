"""A run as its folder describes it: the records of metrics.jsonl."""

import math
import statistics
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

from isogpt.common.console import shortened
from isogpt.common.files import METRICS, read_records

MOST = 2000  # steps that are kept, which is more than a picture shows
STARTS, ENDINGS = ("start", "resume"), ("end", "preempted", "failed")  # events
NOT_FINITE = ("nan", "inf", "-inf")  # how these numbers are written in a record


@dataclass
class Run:
    """What metrics.jsonl contains about a run: whole records, in the order of steps, and each step once."""

    folder: Path
    place: str = ""  # the folder of runs that the user typed, or this run's
    settings: dict = field(default_factory=dict)  # of train.py, from the last start or resume
    facts: dict = field(default_factory=dict)  # the other fields of this event: parameters, measures, ...
    steps: list[dict] = field(default_factory=list)  # of very many, evenly spaced ones, and the last
    evaluations: list[dict] = field(default_factory=list)
    statistics: list[dict] = field(default_factory=list)  # of layers
    ending: dict = field(default_factory=dict)  # the last event; {}: the run is running, or was killed

    @property
    def seed(self) -> int:
        """The seed."""
        return self.settings["seed"]

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.ending.get("event") == "end"

    @property
    def state(self) -> str:
        """ "" if the run is complete, or else a phrase about how it has ended."""
        if self.evaluations and not math.isfinite(self.evaluations[-1]["val_loss"]):
            return "diverged"
        return "" if self.is_finished else self.ending.get("event", "running or killed")

    @property
    def tokens_per_s(self) -> float | None:
        """The median over the logged steps but the first, which is slow; None: there are no others."""
        speeds = [step["tokens_per_s"] for step in self.steps[1:] if "tokens_per_s" in step]
        return statistics.median(speeds) if speeds else None

    @property
    def memory_gb(self) -> float | None:
        """The most memory that a rank has used, in GB."""
        return max((step["memory_gb_max"] for step in self.steps if "memory_gb_max" in step), default=None)

    def evaluation_at(self, step: int | None) -> dict:
        """The evaluation of the state before a step; {} if there is none."""
        return next((one for one in self.evaluations if one["iter"] == step), {})


@dataclass
class Group:
    """Runs that differ only in the seed."""

    name: str  # the settings that distinguish the groups, such as learning_rate=0.001
    runs: list[Run]
    settings: dict = field(default_factory=dict)  # the settings that distinguish the groups

    @property
    def place(self) -> str:
        """Where the runs are."""
        more = len({run.place for run in self.runs}) - 1
        return self.runs[0].place + (f" and {more} more" if more else "")

    @property
    def counted(self) -> list[Run]:
        """
        The runs that count. Of those with evaluations that have not diverged, these are the complete ones; if
        there are none, those that have not failed, or else all.
        """
        finite = [run for run in self.runs if run.evaluations and run.state != "diverged"]
        complete = [run for run in finite if run.is_finished]
        return complete or [run for run in finite if run.state != "failed"] or finite


# ------------------------------------------------------------------------------------------------------------
# reading


def read_run(folder: Path, place: str = "") -> Run:
    """
    Read a run's folder. What a resume repeats counts once.

    Args:
        place: the folder of runs that the user typed; "": this run's.

    Raises:
        ValueError: there is no run that train.py has recorded.
    """
    run, path = Run(folder, place or str(folder)), folder / METRICS
    if not path.exists():
        raise ValueError(
            f"{folder} contains no run: give the out_dir of train.py, or a folder of such folders"
        )
    try:
        read_into(run, path)
    except OSError as e:
        raise ValueError(f"{path} cannot be read: {e.strerror}") from e
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is damaged, or not written by train.py") from e
    return run


def read_into(run: Run, path: Path) -> None:
    """Read metrics.jsonl. Raises KeyError, TypeError or ValueError if its records are not those of a run."""
    steps, evaluations, layers = {}, {}, {}  # {step: record}
    last, spacing = {}, 1
    for record in map(with_numbers, read_records(path)):
        event, step = record.get("event"), record.get("iter", 0)
        if event in STARTS:
            settings = record.pop("config")
            # a resume does not say where the weights come from
            run.settings = settings | {"init_from": run.settings.get("init_from", settings.get("init_from"))}
            run.facts, run.ending, last = record, {}, {}
            steps = {n: one for n, one in steps.items() if n < step}
            evaluations = {
                n: one for n, one in evaluations.items() if n <= step
            }  # of the state before a step
            layers = {n: one for n, one in layers.items() if n < step}
        elif event in ENDINGS:
            run.ending = record
        elif event == "peak":  # measured again
            run.facts["peak_flops"] = record["peak_flops"]
        elif "val_loss" in record:
            evaluations[step] = record | {"val_loss": float(record["val_loss"])}
        elif "statistics" in record:
            layers[step] = record
        elif "loss" in record:
            last = {step: record}
            if step % spacing == 0:
                steps[step] = record
            if len(steps) > MOST:
                spacing *= 2
                steps = {n: one for n, one in steps.items() if n % spacing == 0}
    int(run.settings["seed"])
    steps |= last
    run.steps, run.evaluations, run.statistics = (
        [records[n] for n in sorted(records)] for records in (steps, evaluations, layers)
    )
    add_flops(run)


def with_numbers(record: dict) -> dict:
    """The record with numbers that are not finite, which JSON does not have, as numbers."""
    return {name: float(value) if value in NOT_FINITE else value for name, value in record.items()}


def add_flops(run: Run) -> None:
    """Add the FLOPs up to each step and evaluation, if they are known."""
    if "flops_per_step" in run.facts and "tokens_per_step" in run.facts:
        per_token = run.facts["flops_per_step"] / run.facts["tokens_per_step"]
        for record in run.steps + run.evaluations:
            if "tokens" in record:
                record["flops"] = record["tokens"] * per_token


# ------------------------------------------------------------------------------------------------------------
# finding


def find_runs(arguments: list[str]) -> tuple[list[Run], list[str]]:
    """
    Read the runs that folders, folders of runs, and globs name, each once and in this order. Returns them,
    and a sentence about each folder that was left out because it contains no run.

    Raises:
        ValueError: nothing was found.
    """
    if not arguments:
        raise ValueError("give the folders of runs: python compare.py out-a out-b, or 'out-lr/*'")
    runs, problems = {}, []
    for match in [Path(match) for argument in arguments for match in sorted(glob(argument)) or [argument]]:
        below = [] if (match / METRICS).exists() else sorted(match.glob(f"*/{METRICS}"))
        for folder in [path.parent for path in below] or [match]:
            if folder.resolve() not in runs:
                try:
                    runs[folder.resolve()] = read_run(folder, str(match))
                except ValueError as e:
                    problems.append(str(e))
    if not runs:
        raise ValueError(shortened(problems, between="; "))
    return list(runs.values()), problems
