"""Weights & Biases: the steps and the evaluations."""

import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from isogpt.monitor.records import CLOSING, chart_values

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


class Wandb:
    """
    Sends the numbers of steps and evaluations to a new wandb run, or to the existing run `run_id`.

    If wandb's process is gone, each record raises an exception and starts a new process in the background,
    which continues the same run.

    Raises:
        ValueError: wandb is not installed or cannot start.
    """

    def __init__(self, config: dict, run_id: str | None) -> None:
        self.config = config
        self.run = start_run(config, run_id)
        self.next_run: Future | None = None  # which is starting, in place of a run that was lost

    def write(self, record: dict, text: str) -> None:
        """Send the numbers of a record. wandb keeps the first of two values for a step."""
        if self.next_run:
            if not self.next_run.done():
                return
            started, self.next_run = self.next_run, None
            self.run = started.result()
        try:
            if values := chart_values(record):
                self.run.log(values, step=record["iter"])
            if record.get("event") in CLOSING:
                self.run.finish()
        except Exception:  # wandb raises many types
            self.next_run = Future()
            threading.Thread(target=self.start_again, args=(self.next_run,), daemon=True).start()
            raise

    def start_again(self, started: Future) -> None:
        """Continue the run with a new process of wandb (in the background)."""
        import wandb

        try:
            with suppress(Exception):  # the process that is gone
                wandb.teardown()
            started.set_result(start_run(self.config, self.run.id))
        except ValueError as e:
            started.set_exception(e)


def start_run(config: dict, run_id: str | None) -> "Run":
    """Start a run of wandb, or continue `run_id`; for errors see `Wandb`."""
    try:
        import wandb

        return wandb.init(
            project=config["wandb_project"],
            name=config["wandb_run_name"],
            id=run_id,
            resume="allow" if run_id else None,
            config=config,
        )
    except Exception as e:  # Exception is the only common base class of wandb's errors
        reason = " ".join(str(e).split())
        raise ValueError(f"wandb cannot start ({reason}): set WANDB_MODE=offline or --wandb_log=False") from e
