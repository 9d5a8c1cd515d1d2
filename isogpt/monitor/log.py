"""The logger, which distributes what a run reports to sinks, and the sinks of a run."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from isogpt.checkpoint.progress import Progress
from isogpt.launch.process_group import Ranks
from isogpt.launch.together import exit_together, is_main
from isogpt.monitor.sink_alerts import Alerts
from isogpt.monitor.sink_console import Console
from isogpt.monitor.sink_metrics import MetricsFile
from isogpt.monitor.sink_plot import Plot
from isogpt.monitor.sink_tensorboard import TensorBoard, check_tensorboard
from isogpt.monitor.sink_wandb import Wandb
from isogpt.monitor.status_line import Status


class Sink(Protocol):
    """
    The methods that a sink may define. Each sink is a plain class that defines some of these methods.

    An exception that a method raises ends the run. A sink whose files outlive a run is constructed with the
    step at which the run continues, and treats this step as `rewind` does.
    """

    def print(self, text: str) -> None:
        """Report a line for the user."""

    def event(self, record: dict, text: str) -> None:
        """Report an event: `record` contains event, iter and facts, `text` is for the user ('': nothing)."""

    def status(self, status: Status) -> None:
        """Report where the run is; called after each step, before `step` if the step is logged."""

    def step(self, record: dict, left_s: float | None) -> None:
        """
        Report a logged step.

        Args:
            record: records.step_record, gpu_percent and, with experts, records.routing_record. Values may be
                None, a list, or a float that is not finite.
            left_s: the estimated seconds until the end of the run; None: not known yet.
        """

    def evaluation(self, record: dict, lr: float) -> None:
        """Report an evaluation: `record` contains iter, train_loss and val_loss."""

    def draw(self) -> object:
        """Draw what has been reported so far; called after an evaluation."""

    def rewind(self, step: int) -> object:
        """Continue at an earlier step after a rollback; this and the later steps will be repeated."""

    def done(self, text: str) -> None:
        """Report the end of training: `text` is a summary."""

    def close(self) -> None:
        """Close files and connections at the end of the run."""


@dataclass
class Logger:
    """
    Distributes lines, events, steps and evaluations to sinks. On ranks other than 0 there are no sinks.

    At the start, a run prints and alerts (`start_sinks`). Services and the files in the run's folder are
    added by `start_services` and `open_files`.
    """

    progress: Progress
    sinks: list[Any]  # each defines some methods of Sink
    notes: list[str] = field(default_factory=list)  # what a user should know, printed before the first step
    interrupted_at: float | None = None  # see MetricsFile

    def tell(self, method: str, *args: object) -> None:
        """Call a method of each sink that defines the method."""
        for sink in self.sinks:
            if hasattr(sink, method):
                getattr(sink, method)(*args)

    def print(self, text: str) -> None:
        """Report a line for the user."""
        self.tell("print", text)

    def print_lines(self, lines: list[str]) -> None:
        """Report several lines for the user."""
        if lines:
            self.print("\n".join(lines))

    def event(self, name: str, text: str = "", **facts: object) -> None:
        """Report an event: a sentence for the user, if there is one, and the facts."""
        self.tell("event", {"event": name, "iter": self.progress.step, **facts}, text)

    def failed(self, reason: str) -> None:
        """Report why the run ends. The caller prints the reason."""
        self.event("failed", reason=reason)

    def rolled_back(self, steps: tuple[int, ...], rollback: int) -> None:
        """
        Report that the run has gone back to progress.step and excludes `steps`, and cut the sinks back.

        Args:
            rollback: the number of this rollback, from 1.
        """
        step, excluded = self.progress.step, sorted(self.progress.skipped)
        text = f"warning: {len(steps)} steps not finite: rolled back to step {step}, excluding {list(steps)}"
        self.event("rollback", text, to=step, left_out=excluded, rollback=rollback)
        self.tell("rewind", step)

    def start_services(self, config: dict) -> None:
        """
        Start what may fail before the run's folder is changed (all ranks; rank 0 starts): a wandb run, which
        continues the run progress.wandb_id. Also check that TensorBoard is installed if it is used. Exits
        with a message if something cannot start.
        """
        with exit_together():
            if is_main() and config["tensorboard_log"]:
                check_tensorboard()
            if is_main() and config["wandb_log"]:
                service = Wandb(config, self.progress.wandb_id)
                self.progress.wandb_id = service.run.id
                self.insert(service)

    def open_files(self, config: dict, owner: str) -> None:
        """
        Open the files of a run that continues at progress.step (all ranks; rank 0 opens). Exits with a
        message if a file cannot be written.

        Args:
            owner: who has claimed the run's folder; '': nobody, then no files are written.
        """
        with exit_together():
            if not (is_main() and owner):
                return
            out_dir, step = config["out_dir"], self.progress.step
            console = next(sink for sink in self.sinks if isinstance(sink, Console))
            metrics = MetricsFile(config, owner, console, step)
            self.interrupted_at = metrics.interrupted_at
            self.insert(metrics)
            self.insert(Plot(out_dir, console))
            if config["tensorboard_log"]:
                self.insert(TensorBoard(out_dir, step))

    def insert(self, sink: object) -> None:
        """Add a sink before the alerts, whose command may read what the others have written."""
        self.sinks.insert(len(self.sinks) - 1, sink)


def start_sinks(ranks: Ranks, out_dir: str, alert_command: str) -> list[Any]:
    """Return the sinks that work before the run's folder is claimed; no sinks on ranks other than 0."""
    return [Console(), Alerts(alert_command, out_dir)] if ranks.is_main else []
