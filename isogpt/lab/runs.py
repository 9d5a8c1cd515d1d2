"""A run as its folder describes it: the records of metrics.jsonl."""

import math
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

from isogpt.common.files import METRICS, read_records

MOST = 1000  # steps that are kept, which is more than a picture shows
MORE_SEEDS = "-seeds"  # the end of the name of a folder with the runs of more seeds, beside their first run


@dataclass
class Run:
    """What metrics.jsonl contains about a run: whole records, in the order of steps, and each step once."""

    folder: Path
    place: str = ""  # the folder of runs that the user typed, or this run's
    settings: dict = field(default_factory=dict)  # of train.py, from the last start or resume
    facts: dict = field(default_factory=dict)  # the other fields of this event: parameters, measures, ...
    steps: list[dict] = field(default_factory=list)  # of very many, evenly spaced ones, and the last
    evaluations: list[dict] = field(default_factory=list)
    ending: dict = field(default_factory=dict)  # the last event; {}: the run is running, or was killed

    @property
    def seed(self) -> int:
        """The seed."""
        return self.settings["seed"]

    @property
    def state(self) -> str:
        """How the run has ended, or that it has not; "" if it is complete."""
        if self.evaluations and not math.isfinite(self.evaluations[-1]["val_loss"]):
            return "diverged"
        event = self.ending.get("event", "running or killed")
        return "" if event == "end" else event

    def evaluation_at(self, step: int | None) -> dict:
        """The evaluation of the state before a step; {} if there is none."""
        return next((one for one in self.evaluations if one["iter"] == step), {})


@dataclass
class Group:
    """Runs that differ only in the seed."""

    name: str  # the settings that distinguish the groups, such as learning_rate=0.001
    runs: list[Run]
    code: str = ""  # the digest of the code that trains, if it distinguishes the groups

    @property
    def counted(self) -> list[Run]:
        """
        The runs that count, the last one of each seed. Of those with evaluations that have not diverged,
        these are the complete ones; if there are none, those that have not failed, or else all.
        """
        finite = [run for run in self.runs if run.evaluations and run.state != "diverged"]
        complete = [run for run in finite if not run.state]
        counted = complete or [run for run in finite if run.state != "failed"] or finite
        return [*{run.seed: run for run in counted}.values()]


# ------------------------------------------------------------------------------------------------------------
# reading


def read_run(folder: Path, place: str = "") -> Run:
    """
    Read a run's folder. What a resume repeats counts once.

    Args:
        place: the folder of runs that the user typed.

    Raises:
        OSError, KeyError, TypeError or ValueError: the records are not those of a run.
    """
    run = Run(folder, place)
    steps, evaluations, last = {}, {}, {}  # {step: record}
    spacing = 1
    for record in read_records(folder / METRICS):
        # numbers that are not finite are strings in JSON
        record |= {name: float(value) for name, value in record.items() if value in ("nan", "inf", "-inf")}
        event, step = record.get("event"), record.get("iter", 0)
        if "tokens" in record and "flops_per_step" in run.facts:
            steps_taken = record["tokens"] / run.facts["tokens_per_step"]
            record["flops"] = steps_taken * run.facts["flops_per_step"]
        if event in ("start", "resume"):
            settings = record.pop("config")
            # a resume does not say where the weights come from
            settings["init_from"] = run.settings.get("init_from", settings["init_from"])
            run.settings, run.facts, run.ending = settings, record, {}
            # the evaluation of the state before a step is not repeated
            steps, evaluations, last = before(steps, step), before(evaluations, step + 1), {}
        elif event in ("end", "preempted", "failed"):
            run.ending = record
        elif event == "peak":  # measured again
            run.facts["peak_flops"] = record["peak_flops"]
        elif "val_loss" in record:
            record["val_loss"] = float(record["val_loss"])
            evaluations[step] = record
        elif "step_ms" in record:
            last = {step: record}
            if step % spacing == 0:
                steps[step] = record
            if len(steps) > MOST:
                spacing *= 2
                steps = {n: one for n, one in steps.items() if n % spacing == 0}
    run.steps, run.evaluations = [*(steps | last).values()], [*evaluations.values()]
    int(run.settings["seed"])
    return run


def before(records: dict[int, dict], end: int) -> dict[int, dict]:
    """The records before a step."""
    return {step: record for step, record in records.items() if step < end}


# ------------------------------------------------------------------------------------------------------------
# finding


def find_runs(arguments: list[str]) -> list[Run]:
    """
    Read the runs that folders, folders of runs, and globs name, each once and in this order.

    Raises:
        ValueError: an argument names no run, or a run cannot be read.
    """
    if not arguments:
        raise ValueError("give the folders of runs: python compare.py out-a out-b, or 'out-lr/*'")
    places = {}  # {path: (folder of a run, what was typed)}
    for argument in arguments:
        matches = [Path(match) for match in sorted(glob(argument)) or [argument]]
        folders = [(folder, match) for match in matches for folder in folders_in(match)]
        if not folders:
            raise ValueError(f"{argument} contains no run: give train.py's out_dir, or a folder of them")
        for folder, match in folders:
            places.setdefault(folder.resolve(), (folder, str(match)))
    runs = []
    for folder, place in places.values():
        try:
            runs.append(read_run(folder, place))
        except (OSError, KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{folder / METRICS} is damaged, or not written by train.py ({e})") from e
    return runs


def folders_in(folder: Path) -> list[Path]:
    """The folder of a run, or the folders of the runs in it, with those of more seeds."""
    if (folder / METRICS).exists():
        return [folder]
    patterns = (f"*/{METRICS}", f"*{MORE_SEEDS}/*/{METRICS}")
    return sorted(path.parent for pattern in patterns for path in folder.glob(pattern))
