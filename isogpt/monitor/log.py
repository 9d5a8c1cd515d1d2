"""The logger, which passes what a run reports to its sinks."""

import threading
from dataclasses import dataclass, field
from queue import Full, Queue
from typing import Any

from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.common.files import reason_of
from isogpt.common.patience import within
from isogpt.data.dataset import Dataset
from isogpt.launch.process_group import Ranks
from isogpt.launch.together import do_together, exit_together, is_main
from isogpt.monitor.records import FINAL
from isogpt.monitor.sink_alerts import Alerts
from isogpt.monitor.sink_console import Console
from isogpt.monitor.sink_files import MetricsFile, Plot, Result
from isogpt.monitor.sink_tensorboard import TensorBoard, check_tensorboard
from isogpt.monitor.sink_wandb import Wandb, how_to_go_on

WAITING = 10_000  # records that may wait for a sink in a thread
END_S = 120  # seconds that the end of a run waits for it, which is longer than wandb itself waits


class InThread:
    """
    A sink that may be slow or blocked, as wandb is if its server does not answer: a thread passes the records
    to it, so that training goes on. One thread for all records, since the C library would not reuse the
    memory of one thread for the next.
    """

    def __init__(self, sink: Any, end_s: float = END_S) -> None:
        self.sink, self.end_s = sink, end_s
        self.records: Queue[tuple[dict, str]] = Queue(WAITING)
        self.failure = ""  # why the sink has lost a record
        self.thread = threading.Thread(target=self.pass_on, daemon=True)
        self.thread.start()

    def write(self, record: dict, text: str) -> None:
        """Pass a record to the thread; at the end of the run, wait for it. Raises why it has lost one."""
        is_last = record.get("event") in FINAL
        try:
            self.records.put((record, text), timeout=self.end_s if is_last else 0)
        except Full:
            raise TimeoutError(f"it has not taken {WAITING:,} records") from None
        if is_last:
            within(self.end_s, self.thread.join)
        if self.failure:
            raise RuntimeError(self.failure)

    def pass_on(self) -> None:
        """Pass records to the sink (in the thread)."""
        record = {}
        while record.get("event") not in FINAL:
            record, text = self.records.get()
            try:
                self.sink.write(record, text)
            except Exception as e:
                self.failure = reason_of(e)


@dataclass
class Logger:
    """
    Passes records to sinks. On ranks other than 0 there are no sinks.

    A sink is a plain class with a method `write(record, text)`, which uses those of these records that it
    needs:

    - a logged step: what RunReport.record returns, which alone contains step_ms. A value may be None, a
      list, or a float that is not finite;
    - an evaluation, which alone contains val_loss;
    - the statistics of a step's layers: iter and statistics, {kind: {name: number}}. This record is written
      after the step's record or before it, and before those of later steps;
    - an event: event (its name), iter and facts, with a sentence for the user, or "";
    - a line for the user: the record is empty. A step and an evaluation come with their lines, too.

    A sink that raises an exception loses the record, and gets the next one, so that a full disk or a service
    that is gone does not end a run. The first failure of each sink is an event and a warning.

    At the start, a run prints and alerts (`start_sinks`). Services and the files in the run's folder are
    added by `start_services` and `open_files`.
    """

    progress: Progress
    sinks: list[Any]
    end_s: float = END_S  # that the end of a run waits for a service
    failed_sinks: set[str] = field(default_factory=set)  # which have raised an exception

    def write(self, record: dict, text: str = "") -> None:
        """Pass a record and its line for the user to all sinks."""
        for sink in self.sinks:
            try:
                sink.write(record, text)
            except Exception as e:  # wandb, TensorBoard and matplotlib raise many types
                name = type(sink.sink if isinstance(sink, InThread) else sink).__name__
                reason = reason_of(e)
                if name not in self.failed_sinks:
                    self.failed_sinks.add(name)
                    problem = f"warning: {name} failed ({reason})"
                    console.print_to_stderr(f"{problem}; training continues, and it is tried again")
                    self.event("sink_failed", sink=name, reason=reason)

    def print(self, *lines: str) -> None:
        """Report lines for the user; an empty one is none."""
        for line in filter(None, lines):
            self.write({}, line)

    def event(self, name: str, text: str = "", **facts: object) -> None:
        """Report an event: a sentence for the user, if there is one, and the facts."""
        self.write({"event": name, "iter": self.progress.step, **facts}, text)

    def failed(self, reason: str) -> None:
        """Report why the run ends. The caller prints the reason."""
        self.event("failed", reason=reason)

    def start_services(self, config: dict) -> None:
        """
        Start what may fail before the run's folder is changed (all ranks; rank 0 starts): a wandb run, which
        continues the run progress.wandb_id. Also check that TensorBoard is installed if it is used. Exits
        with a message if something cannot start.
        """
        what = f"has started wandb: if this does not end, {how_to_go_on()}"
        if config["wandb_log"] or config["tensorboard_log"]:
            do_together(self.start_on_main, config, has_done=what)

    def start_on_main(self, config: dict) -> None:
        """Do what start_services says (rank 0)."""
        if is_main() and config["tensorboard_log"]:
            check_tensorboard()
        if is_main() and config["wandb_log"]:
            service = Wandb(config, self.progress.wandb_id)
            self.progress.wandb_id = service.run.id
            self.sinks.insert(-1, InThread(service, self.end_s))

    def open_files(self, config: dict, owner: str, data: Dataset) -> None:
        """
        Open the files of a run that continues at progress.step (all ranks; rank 0 opens). Exits with a
        message if a file cannot be written. The alerts stay last, since their command may read the files.

        Args:
            owner: who has claimed the run's folder; '': nobody, then no files are written.
            data: of the validation losses.
        """
        out_dir = config["out_dir"]
        with exit_together():
            if not is_main():
                return
            result = Result(out_dir, self.progress, data, owner)
            # the result is before the plot, for which a stopped run may lack the time
            sinks = [MetricsFile(out_dir, owner), result, InThread(Plot(out_dir))] if owner else [result]
            if owner and config["tensorboard_log"]:
                sinks.append(TensorBoard(out_dir, self.progress))
            self.sinks[-1:-1] = sinks


def start_sinks(ranks: Ranks, config: dict) -> list[Any]:
    """Return the sinks that work before the run's folder is claimed; no sinks on ranks other than 0."""
    return [Console(), InThread(Alerts(config))] if ranks.is_main else []
