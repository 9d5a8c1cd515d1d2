"""A run as its folder describes it: the records of metrics.jsonl."""

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from isogpt.checkpoint.manifest import is_run
from isogpt.common.console import shortened
from isogpt.common.files import as_record, regular_file
from isogpt.data.dataset import bits_per_byte
from isogpt.monitor.curves import STEP, Curve
from isogpt.monitor.records import CLOSING
from isogpt.monitor.sink_metrics import METRICS

STATISTICS = re.compile(rb'\{"iter": (\d{1,18}), "statistics"')
LONGEST = 2**24  # bytes of a line; what is longer is not a record
MOST_STATISTICS = 200  # records of layer statistics, each of which contains hundreds of numbers
ENDINGS = (*CLOSING, "failed")
# the fields of a start that are read, and their types; a field of another type is left out
FACTS = {
    "parameters": int,
    "flops_per_step": (int, float),
    "tokens_per_step": int,
    "world_size": int,
    "measures": dict,
    "val_text": str,
    "val_bytes": int,
    "val_tokens": int,
    "code": str,
    "commit": str,
    "changed": bool,
}


@dataclass
class Run:
    """
    What metrics.jsonl contains about a run, without torn lines, and with each step once.

    `seconds` in evaluations and steps is the time since the first start, without the time between a stop and
    the resume, and without steps that were repeated after a kill.
    """

    folder: Path
    settings: dict  # of train.py, from the last start or resume; init_from is that of the first start
    facts: dict  # the other fields of this event: parameters, flops_per_step, measures, ...
    # an evaluation is {"iter": step, "train_loss": .., "val_loss": .., "val_bpb": .. or missing,
    # "seconds": .., "tokens": .., "flops": .. or missing}, in the order of steps
    evaluations: list[dict] = field(default_factory=list)
    # of a long run, as many steps as a picture shows: {"iter": .., "loss": .., "seconds": .., ..}
    steps: list[dict] = field(default_factory=list)
    statistics: list[dict] = field(default_factory=list)  # of layers: {"iter": .., "statistics": {..}}
    ending: str = ""  # end, preempted or failed; "": the run is running, or was killed
    argument: str = ""  # what the user typed that names this run

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.ending == "end"

    @property
    def tokens_per_s(self) -> float | None:
        """The median over the logged steps but the first, which is slow; None: there are no others."""
        speeds = [step["tokens_per_s"] for step in self.steps[1:] if is_finite(step.get("tokens_per_s"))]
        return statistics.median(speeds) if speeds else None

    @property
    def memory_gb(self) -> float | None:
        """The most memory that a rank has used, in GB."""
        return max((step["memory_gb_max"] for step in self.steps if "memory_gb_max" in step), default=None)


@dataclass
class Group:
    """Runs that differ only in the seed."""

    name: str  # the settings that distinguish the groups, such as learning_rate=0.001
    runs: list[Run]
    settings: dict = field(default_factory=dict)  # the settings that distinguish the groups

    @property
    def seeds(self) -> list[int]:
        """The seed of each run."""
        return [run.settings["seed"] for run in self.runs]


def is_finite(value: float | None) -> bool:
    """Whether a number is known, and neither nan nor infinite."""
    return value is not None and math.isfinite(value)


def as_number(value: Any) -> int | float | None:
    """A number of a record, in which nan and infinity are strings; None if it is something else."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and not abs(value) > 1e300 else None


def numbers_of(record: dict) -> dict[str, int | float]:
    """The fields of a record that are numbers."""
    numbers = {name: as_number(value) for name, value in record.items()}
    return {name: number for name, number in numbers.items() if number is not None}


# ------------------------------------------------------------------------------------------------------------
# reading


@dataclass
class RunClock:
    """
    The seconds that a run has trained, from the times of its records. A resume continues with the seconds at
    which its checkpoint was made.
    """

    launched: datetime | None = None  # when the process of these records started or resumed
    before: float = 0.0  # seconds of earlier processes
    now: float = 0.0  # of the last record
    saved: dict[int, float] = field(default_factory=dict)  # step of a checkpoint: seconds

    def launch(self, record: dict) -> None:
        """Begin to read what the next process has recorded, which continues at the record's step."""
        step = record.get("iter", 0)
        self.before = self.now = max(self.now, self.saved.get(step, 0.0))
        self.saved = {saved: seconds for saved, seconds in self.saved.items() if saved <= step}
        self.launched = time_of(record)

    def read(self, record: dict) -> float:
        """The seconds at a record, or at the previous one if it contains no time."""
        time = time_of(record)
        if time and self.launched:
            self.now = max(self.now, self.before + (time - self.launched).total_seconds())
        return self.now

    def save(self, record: dict) -> None:
        """Note when a checkpoint was made: it is reported when it is written, `seconds` later."""
        time, took = time_of(record), as_number(record.get("seconds")) or 0.0
        if time and self.launched:
            seconds = self.before + (time - self.launched).total_seconds() - took
            self.saved[record.get("iter", 0)] = max(seconds, 0.0)


def time_of(record: dict) -> datetime | None:
    """When a record was written; None if it does not say."""
    try:
        time = datetime.fromisoformat(record["time"])
    except (KeyError, TypeError, ValueError):
        return None
    return time if time.tzinfo else None  # times with and without a zone cannot be subtracted


@dataclass
class Reading:
    """What has been read of a metrics.jsonl so far. Its lines are added in their order."""

    settings: dict | None = None
    facts: dict = field(default_factory=dict)
    evaluations: list[dict] = field(default_factory=list)
    steps: Curve = field(default_factory=Curve)  # of records instead of losses
    statistics: Curve = field(default_factory=partial(Curve, limit=MOST_STATISTICS))
    ending: str = ""
    clock: RunClock = field(default_factory=RunClock)
    waiting: bytes = b""  # the last step, if no picture needs it: it is parsed if nothing follows

    def add(self, line: bytes) -> None:
        """Read a line. Of steps, only those that are kept are parsed."""
        match = STEP.match(line)
        if line.startswith(b'{"event"'):
            if record := as_record(line):
                self.add_event(record)
        elif of_layers := STATISTICS.match(line):
            if self.statistics.has_room(int(of_layers[1])) and (record := as_record(line)):
                self.statistics.add(record["iter"], record)
        elif not match:
            return
        elif b'"val_loss"' in line:
            self.add_waiting()
            if record := as_record(line):
                self.add_evaluation(record)
        else:
            self.waiting = line
            if self.steps.has_room(int(match[1])):
                self.add_waiting()

    def add_waiting(self) -> None:
        """Parse the last step, if this has not been done."""
        if record := as_record(self.waiting):
            step = numbers_of(record)
            self.steps.add(step["iter"], step | {"seconds": self.clock.read(record)})
        self.waiting = b""

    def add_event(self, record: dict) -> None:
        """Read an event."""
        event = record["event"]
        if event in ("start", "resume") and isinstance(record.get("config"), dict):
            self.begin(record)
        elif event == "rollback" and isinstance(record.get("to"), int):
            self.add_waiting()
            self.cut_back(record["to"])
        elif event == "save":
            self.clock.save(record)
        elif event in ENDINGS:
            self.ending = event

    def begin(self, record: dict) -> None:
        """Read the start of a process. A resume continues what earlier processes have recorded."""
        self.add_waiting()
        settings = dict(record["config"])
        if record["event"] == "start":
            self.evaluations, self.steps, self.clock = [], Curve(), RunClock()
            self.statistics = Curve(limit=MOST_STATISTICS)
        elif self.settings:
            settings["init_from"] = self.settings.get("init_from")
        self.cut_back(record.get("iter", 0))
        self.clock.launch(record)
        self.settings, self.ending = settings, ""
        self.facts = {name: record[name] for name, kind in FACTS.items() if is_of(record.get(name), kind)}

    def cut_back(self, step: int) -> None:
        """Leave out what follows the state before `step`, which will be repeated."""
        self.evaluations = [e for e in self.evaluations if e["iter"] <= step]
        self.steps, self.statistics = self.steps.before(step), self.statistics.before(step)

    def add_evaluation(self, record: dict) -> None:
        """Read an evaluation; one that is repeated counts once."""
        numbers = numbers_of(record)
        if "val_loss" not in numbers:
            return
        step = numbers["iter"]
        while self.evaluations and self.evaluations[-1]["iter"] >= step:
            self.evaluations.pop()
        reached = {"seconds": self.clock.read(record), "tokens": self.tokens_before(step)}
        self.evaluations.append(numbers | reached)

    def tokens_before(self, step: int) -> int:
        """The tokens that the state before `step` has seen, without those of steps that were skipped."""
        per_step = tokens_per_step(self.settings or {}, self.facts)
        for seen, record in self.steps.shown()[-1:]:
            if "tokens" in record:
                return record["tokens"] + (step - 1 - seen) * per_step
        return step * per_step


def is_of(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether a field of a start has its type, and if it is a number, is one to calculate with."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, kind) and (not isinstance(value, int | float) or as_number(value) is not None)


def tokens_per_step(settings: dict, facts: dict) -> int:
    """The tokens of a step; 0 if this is not known."""
    names = ("gradient_accumulation_steps", "batch_size", "block_size")
    factors = [settings.get(name) for name in names]
    known = all(is_of(factor, int) for factor in factors)
    return facts.get("tokens_per_step", math.prod(factors) if known else 0)


def read_run(folder: Path, argument: str = "") -> Run:
    """
    Read a run's folder. Of a million steps, as many are kept as a picture shows; reading them takes a few
    seconds and hardly any memory.

    Args:
        argument: what the user typed that names the run; "": the folder.

    Raises:
        ValueError: there is no run that train.py has recorded.
    """
    reading = Reading()
    try:
        with open(folder / METRICS, "rb", opener=regular_file) as file:
            for line in iter(partial(file.readline, LONGEST), b""):
                reading.add(line)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise ValueError(about_folder(folder)) from e
    except OSError as e:
        raise ValueError(f"{folder / METRICS} cannot be read: {e.strerror}") from e
    reading.add_waiting()
    if not reading.settings or not is_of(reading.settings.get("seed"), int):
        raise ValueError(
            f"{folder / METRICS} contains no start of a run with its settings: it is damaged, or not "
            "written by train.py"
        )
    run = Run(folder, reading.settings, reading.facts, reading.evaluations)
    run.steps = [record for _, record in reading.steps.shown()]
    run.statistics = [record for _, record in reading.statistics.shown()]
    run.ending, run.argument = reading.ending, argument or str(folder)
    complete(run)
    return run


def complete(run: Run) -> None:
    """Add what follows from other numbers: the FLOPs up to an evaluation or a step, and bits per byte."""
    per_step = run.facts.get("flops_per_step")
    tokens, size = run.facts.get("val_tokens", 0), run.facts.get("val_bytes", 0)
    for evaluation in run.evaluations:
        if per_step:
            evaluation["flops"] = evaluation["iter"] * per_step
        if tokens > 0 and size > 0:
            evaluation.setdefault("val_bpb", bits_per_byte(evaluation["val_loss"], tokens, size))
    for step in run.steps if per_step else ():
        step["flops"] = (step["iter"] + 1) * per_step


def about_folder(folder: Path) -> str:
    """Why a folder contains no run that can be read, and what to do."""
    if not folder.exists():
        return f"no such folder: {folder}"
    if not folder.is_dir():
        return f"{folder} is a file: give the folder of a run, in which train.py has written {METRICS}"
    if is_run(str(folder)):
        return (
            f"{folder} contains checkpoints, but no {METRICS}, which nanoGPT does not write: continue the "
            f"run with python train.py --init_from=resume --out_dir={folder}"
        )
    return f"{folder} contains no run: give the out_dir of train.py, or a folder of such folders"


# ------------------------------------------------------------------------------------------------------------
# finding


def find_runs(arguments: list[str]) -> tuple[list[Run], list[str]]:
    """
    Read the runs that folders, folders of runs, and globs name, each once and in this order. Returns them,
    and a sentence about each argument that was left out because it contains no run.

    Raises:
        ValueError: nothing was found, or an argument names nothing that exists.
    """
    if not arguments:
        raise ValueError("give the folders of runs: python compare.py out-a out-b, or 'out-lr/*'")
    runs, problems = {}, []
    for argument in arguments:
        for folder in folders_of(argument):
            if folder.resolve() in runs:
                continue
            try:
                runs[folder.resolve()] = read_run(folder, argument)
            except ValueError as e:
                problems.append(str(e))
    if not runs:
        raise ValueError(shortened(problems, between="; "))
    return list(runs.values()), problems


def folders_of(argument: str) -> Iterator[Path]:
    """
    The folders that an argument names: a run's folder, the runs in a folder, or what matches a glob.

    Raises:
        ValueError: it names nothing that exists.
    """
    path = Path(argument).expanduser()
    matches = [path]
    if not path.exists() and has_magic(argument):
        matches = [Path(match) for match in sorted(glob(str(path))) if Path(match).is_dir()]
        if not matches:
            raise ValueError(f"no folder matches {argument}: give the folders of runs")
    elif not path.exists():
        raise ValueError(f"no such folder: {argument}; give the out_dir of train.py")
    for match in matches:
        below = [] if (match / METRICS).exists() else sorted(match.glob(f"*/{METRICS}"))
        yield from [metrics.parent for metrics in below] or [match]
