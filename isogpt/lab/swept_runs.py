"""A run of a sweep, and what its folder shows: its settings, how far it is, and who trains it now."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from isogpt.checkpoint.manifest import is_run, steps_in
from isogpt.common.files import (
    as_record,
    lock,
    parse_json,
    read_records,
    read_utf8,
    regular_file,
    write_whole,
)
from isogpt.data.dataset import open_dataset
from isogpt.monitor.sink_metrics import METRICS, last_lines
from isogpt.training.budget import limits_of
from isogpt.training.settings import check_training

SETTINGS = "sweep.json"  # the settings with which the sweep has started a run
LOG = "train.log"  # what the run printed; the file is locked while the run is trained
# settings that may differ when a run continues: they change neither the weights nor the figures
MAY_CHANGE = (
    *("out_dir", "nproc", "backend", "time_limit_s", "dist_timeout_s", "keep_last", "alert_command"),
    *("mirror", "wandb_log", "wandb_project", "wandb_run_name", "tensorboard_log", "profile", "check_layout"),
)
# the events that say whether a run is complete
OF_A_RUN = ("start", "resume", "end", "preempted", "failed")


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep: train.py with `arguments`, which give the settings `config`."""

    name: str
    folder: Path
    arguments: list[str]
    config: dict

    @property
    def steps(self) -> int:
        """The number of steps: max_iters + 1, as in nanoGPT."""
        return int(self.config["max_iters"]) + 1

    @property
    def processes(self) -> int:
        """The number of processes that train.py launches."""
        return max(1, self.config["nproc"])

    def recorded_settings(self) -> dict:
        """The settings that must be the same when the run continues."""
        return {name: value for name, value in self.config.items() if name not in MAY_CHANGE}


def resumable(init_from: str) -> str:
    """The init_from with which a run first starts from the same weights, and resumes later."""
    return "auto" if init_from in ("scratch", "resume", "auto") else f"auto:{init_from.removeprefix('auto:')}"


def problems_of_settings(config: dict) -> list[str]:
    """
    Return a sentence for each reason why train.py cannot train a run with these settings. If there is none,
    `config` receives the steps that a budget of tokens or epochs sets, as in train.py.
    """
    problems = []
    if config["eval_only"] or config["dry_run_ranks"]:
        problems.append("eval_only and dry_run_ranks train nothing: omit them, or use train.py")
    try:
        check_training(config)
    except ValueError as e:
        problems += str(e).splitlines()
    try:
        data = open_dataset(
            config["dataset"], config["block_size"], config["vocab_size"], data_order=config["data_order"]
        )
    except ValueError as e:
        return problems + str(e).splitlines()
    if not problems:
        config |= limits_of(config, len(data.train)).settings()
    return problems


@dataclass(frozen=True)
class State:
    """How far a run is, as its folder shows."""

    step: int = 0  # at which it would resume, or its last one if it is complete
    ending: str = ""  # the last of the events OF_A_RUN
    val_loss: float | str | None = None  # of the last evaluation; 'nan' and 'inf' are strings
    is_complete: bool = False

    @property
    def loss_text(self) -> str:
        """The validation loss, as text."""
        loss = self.val_loss
        return f"val loss {loss:.4f}" if isinstance(loss, float) else f"val loss {loss}"

    @property
    def text(self) -> str:
        """The state, as text."""
        if self.is_complete:
            return f"complete, {self.loss_text}"
        return f"resumes at step {self.step}" if self.step else "new"


def read_state(run: SweptRun) -> State:
    """Read the state of a run: from the end of its metrics.jsonl, and the names of its checkpoints."""
    event, val_loss = {}, None
    with suppress(FileNotFoundError), open(run.folder / METRICS, "rb", opener=regular_file) as file:
        for _, line in last_lines(file):
            record = as_record(line) or {}
            if not event and record.get("event") in OF_A_RUN:
                event = record
            if val_loss is None:
                val_loss = record.get("val_loss")
            if event and val_loss is not None:
                break
    ending, last = event.get("event", ""), event.get("iter", 0)
    if ending == "end" and last > run.config["max_iters"]:
        return State(last, ending, val_loss, is_complete=True)
    return State(max(steps_in(str(run.folder)), default=0), ending, val_loss)


def problem_of_folder(run: SweptRun) -> str:
    """A sentence if the run's folder contains a run that this one cannot continue; "" if there is none."""
    if not is_run(str(run.folder)) and read_state(run).ending != "end":
        return ""  # train.py moves aside what is there
    before = None
    with suppress(FileNotFoundError, ValueError):
        before = parse_json(read_utf8(run.folder / SETTINGS))
    if not isinstance(before, dict):
        return f"{run.folder} contains a run that sweep.py did not start: set a different --out_dir="
    now = run.recorded_settings()
    changed = [name for name in now if name in before and before[name] != now[name]]
    if not changed:
        return ""
    was = ", ".join(f"{name} {before[name]} (now {now[name]})" for name in changed)
    typed = " ".join(f"--{name}={before[name]}" for name in changed)
    return f"this run was trained with {was}: type {typed} to continue it, or set a different --out_dir="


def record_settings(run: SweptRun) -> None:
    """
    Record the settings of a run that is about to start or to continue.

    Raises:
        ValueError: its folder contains a run that this one cannot continue.
    """
    if problem := problem_of_folder(run):
        raise ValueError(problem)
    if not (run.folder / SETTINGS).exists() or not is_run(str(run.folder)):
        write_whole(run.folder / SETTINGS, json.dumps(run.recorded_settings(), indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------------
# the lock


def open_log(run: SweptRun) -> BinaryIO | None:
    """
    Create the run's folder, and open and lock its log; None if a different sweep trains the run. The lock
    belongs to the open file, which the run's processes inherit as their output: it is held until all of them
    have exited, even if the sweep was killed. On a file system without locks, nothing is locked.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    log = open(run.folder / LOG, "ab")
    if lock(log):
        return log
    log.close()
    return None


def is_running(run: SweptRun) -> bool:
    """Whether a sweep trains this run now."""
    with suppress(FileNotFoundError), open(run.folder / LOG, "rb", opener=regular_file) as log:
        return not lock(log)
    return False


# ------------------------------------------------------------------------------------------------------------
# measured times


def measured_step_s(run: SweptRun) -> float | None:
    """
    Return the seconds for each step of a run since its last start, with evaluations and checkpoints; None if
    it has taken fewer than ten steps since then.
    """
    began, last = None, None
    for record in read_records(run.folder / METRICS):
        if record.get("event") in ("start", "resume"):
            began = last = record
        elif "time" in record and "iter" in record:
            last = record
    if not began or last["iter"] - began["iter"] < 10:
        return None
    seconds = (datetime.fromisoformat(last["time"]) - datetime.fromisoformat(began["time"])).total_seconds()
    return seconds / (last["iter"] - began["iter"])


def incomplete(runs: Sequence[SweptRun]) -> list[SweptRun]:
    """The runs that are not complete."""
    return [run for run in runs if not read_state(run).is_complete]
