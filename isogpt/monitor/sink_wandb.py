"""Weights & Biases: the steps and the evaluations."""

import sys
import threading
from queue import Full, Queue

from isogpt.common.packages import needed_by
from isogpt.common.patience import within
from isogpt.monitor.records import CLOSING, chart_values

WAITING = 1000  # records that may wait for wandb
FINISH_S = 60  # seconds for the upload at the end; `wandb sync` can upload the rest later


class Wandb:
    """
    Sends the numbers of steps and evaluations to a new wandb run, or to the existing run `run_id`.

    A thread sends them, since wandb can block for as long as its server does not answer.

    Raises:
        ValueError: wandb is not installed or cannot start.
    """

    def __init__(self, config: dict, run_id: str | None) -> None:
        # wandb sends the command line, in which these settings may contain a token
        secret = ("--alert_command=", "--mirror=", "--init_from=")
        sys.argv = [word for word in sys.argv if not word.startswith(secret)]
        with needed_by("wandb_log", "wandb"):
            import wandb
        try:
            self.run = wandb.init(
                project=config["wandb_project"],
                name=config["wandb_run_name"],
                id=run_id,
                resume="allow",
                config=config,
                settings=wandb.Settings(finish_timeout=FINISH_S, finish_timeout_raises=True),
            )
        except Exception as e:  # Exception is the only common base class of wandb's errors
            reason = " ".join(str(e).split())
            advice = "mend this, or set WANDB_MODE=offline or --wandb_log=False"
            raise ValueError(f"wandb cannot start ({reason}): {advice}") from e
        self.records: Queue[dict] = Queue(WAITING)
        self.failure: Exception | None = None  # the last one that `write` has not raised
        self.thread = threading.Thread(target=self.send, daemon=True, name="wandb")
        self.thread.start()

    def write(self, record: dict, text: str) -> None:
        """Pass a record to the thread; at the end of the run, wait for it. Raises what the thread raised."""
        is_last = record.get("event") in CLOSING
        try:
            self.records.put(record, timeout=FINISH_S if is_last else 0)
        except Full:
            raise TimeoutError(f"wandb has not taken {WAITING} records") from None
        if is_last:
            within(2 * FINISH_S, self.thread.join)  # wandb itself gives up after FINISH_S
        if self.failure:
            failure, self.failure = self.failure, None
            raise failure

    def send(self) -> None:
        """Send the numbers of records (in the thread). wandb keeps the first of two values for a step."""
        record = {}
        while record.get("event") not in CLOSING:
            record = self.records.get()
            try:
                if values := chart_values(record):
                    self.run.log(values, step=record["iter"])
                if record.get("event") in CLOSING:
                    self.run.finish()
            except Exception as e:
                self.failure = e
