"""The logger, which distributes what a run reports to sinks, and the sinks of a run."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Logger:
    """
    Distributes lines, events, steps and evaluations to sinks. On ranks other than 0 there are no sinks.

    train.py uses two loggers: until the run's folder is claimed, a logger with `start_sinks`; then the logger
    that `open_logger` returns.
    """

    progress: Progress
    sinks: list[Any]  # each defines some methods of Sink
    interrupted_at: float | None = None  # see MetricsFile

    def tell(self, method: str, *args: object) -> None:
        """Call a method of each sink that defines the method."""
        for sink in self.sinks:
            if hasattr(sink, method):
                getattr(sink, method)(*args)

    def print(self, text: str) -> None:
        """Report a line for the user."""
        self.tell("print", text)

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


def start_sinks(ranks: Ranks, out_dir: str, alert_command: str) -> list[Any]:
    """Return the sinks that work before the run's folder is claimed; no sinks on ranks other than 0."""
    return [Console(), Alerts(alert_command, out_dir)] if ranks.is_main else []


def start_services(config: dict, progress: Progress) -> list[Wandb]:
    """
    Start what may fail before the run's folder is changed (all ranks; rank 0 starts): a wandb run, which
    continues the run progress.wandb_id. Also check that TensorBoard is installed if it is used. Exits with a
    message if something cannot start.

    Returns:
        The sinks that were started, for `open_logger`.
    """
    services = []
    with exit_together():
        if is_main() and config["tensorboard_log"]:
            check_tensorboard()
        if is_main() and config["wandb_log"]:
            services.append(Wandb(config, progress.wandb_id))
            progress.wandb_id = services[0].run.id
    return services


def open_logger(config: dict, progress: Progress, owner: str, services: list[Wandb]) -> Logger:
    """
    Return the logger of a run that continues at progress.step (all ranks). Exits with a message if a file
    cannot be written.

    Args:
        owner: who has claimed the run's folder; '': nobody, then no files are written.
        services: from `start_services`.
    """
    with exit_together():
        if not is_main():
            return Logger(progress, sinks=[])
        out_dir, console = config["out_dir"], Console()
        sinks, interrupted_at = [console], None
        if owner:
            metrics = MetricsFile(config, owner, console, progress.step)
            interrupted_at = metrics.interrupted_at
            sinks += [metrics, Plot(out_dir, console)]
            if config["tensorboard_log"]:
                sinks.append(TensorBoard(out_dir, progress.step))
        sinks += services
        sinks.append(Alerts(config["alert_command"], out_dir))  # last: the command may read metrics.jsonl
        return Logger(progress, sinks, interrupted_at)
