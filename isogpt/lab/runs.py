"""A run as its folder tells: the records of metrics.jsonl."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Run:
    """
    What metrics.jsonl contains of a run, without torn lines, and each step once.

    `seconds` in evaluations and steps is the time since the first start, without the time between a stop and
    the resume, and without steps that were repeated after a kill.
    """

    folder: Path
    settings: dict  # of train.py, from the last start or resume
    facts: dict  # the other fields of this event: parameters, flops_per_step, measures, ...
    # an evaluation is {"iter": step, "train_loss": .., "val_loss": .., "val_bpb": .. or missing,
    # "seconds": .., "tokens": ..}, in the order of steps
    evaluations: list[dict] = field(default_factory=list)
    # of a long run, as many steps as a picture shows: {"iter": .., "loss": .., "seconds": .., ..}
    steps: list[dict] = field(default_factory=list)
    statistics: list[dict] = field(default_factory=list)  # of layers: {"iter": .., "statistics": {..}}
    ending: str = ""  # end, preempted or failed; "": the run is running, or was killed


@dataclass
class Group:
    """Runs that differ only in the seed."""

    name: str  # the settings that distinguish the groups, such as learning_rate=0.001
    runs: list[Run]

    @property
    def seeds(self) -> list[int]:
        """The seed of each run."""
        return [run.settings["seed"] for run in self.runs]
