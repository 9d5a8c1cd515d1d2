"""Weights & Biases: the steps and the evaluations."""

import sys

from isogpt.monitor.records import CLOSING, chart_values


class Wandb:
    """
    Sends the numbers of steps and evaluations to a new wandb run, or to the existing run `run_id`.

    Raises:
        ValueError: wandb is not installed or cannot start.
    """

    def __init__(self, config: dict, run_id: str | None) -> None:
        project, name = config["wandb_project"], config["wandb_run_name"]
        resume = "allow" if run_id else None
        # wandb sends the command line, in which this setting may contain a token
        sys.argv = [word for word in sys.argv if not word.startswith("--alert_command=")]
        try:
            import wandb

            self.run = wandb.init(project=project, name=name, id=run_id, resume=resume, config=config)
        except Exception as e:  # Exception is the only common base class of wandb's errors
            reason = " ".join(str(e).split())
            raise ValueError(
                f"wandb cannot start ({reason}): set WANDB_MODE=offline or --wandb_log=False"
            ) from e

    def write(self, record: dict, text: str) -> None:
        """Send the numbers of a record. wandb keeps the first of two values for a step."""
        if values := chart_values(record):
            self.run.log(values, step=record["iter"])
        if record.get("event") in CLOSING:
            self.run.finish()
