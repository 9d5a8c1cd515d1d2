"""Weights & Biases: the steps and the evaluations."""

import os
import sys

from isogpt.common.packages import needed_by
from isogpt.monitor.records import CLOSING, chart_values

FINISH_S = 60  # seconds for the upload at the end; `wandb sync` can upload the rest later


def how_to_go_on() -> str:
    """What to type if wandb does not start."""
    is_offline = os.environ.get("WANDB_MODE") == "offline"
    return "set --wandb_log=False" if is_offline else "set WANDB_MODE=offline or --wandb_log=False"


class Wandb:
    """
    Sends the numbers of steps and evaluations to a new wandb run, or to the existing run `run_id`.

    Raises:
        ValueError: wandb is not installed or cannot start.
    """

    def __init__(self, config: dict, run_id: str | None) -> None:
        # wandb sends the command line, in which these settings may contain a token
        secret = ("--alert_command=", "--mirror=", "--init_from=")
        sys.argv = [word for word in sys.argv if not word.startswith(secret)]
        with needed_by("wandb_log", "wandb"):
            from wandb import Settings, init  # a folder of logs with this name has neither
        try:
            self.run = init(
                project=config["wandb_project"],
                name=config["wandb_run_name"],
                id=run_id,
                resume="allow",
                config=config,
                settings=Settings(finish_timeout=FINISH_S, finish_timeout_raises=True),
            )
        except Exception as e:  # Exception is the only common base class of wandb's errors
            reason = " ".join(str(e).split())
            raise ValueError(f"wandb cannot start ({reason}): mend this, or {how_to_go_on()}") from e

    def write(self, record: dict, text: str) -> None:
        """Send the numbers of a record. wandb keeps the first of two values for a step."""
        if values := chart_values(record):
            self.run.log(values, step=record["iter"])
        if record.get("event") in CLOSING:
            self.run.finish()
