"""TensorBoard: the steps and the evaluations."""

from pathlib import Path
from typing import Any

from isogpt.common.files import read_records
from isogpt.monitor.records import evaluation_values, step_values
from isogpt.monitor.sink_metrics import METRICS, evaluations_of


def check_tensorboard() -> None:
    """Raise ValueError if TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as e:
        raise ValueError(f"tensorboard_log: {e}; run: pip install tensorboard") from e


class TensorBoard:
    """
    Writes the numbers of steps and evaluations to the folder `tensorboard` in the run's folder.

    metrics.jsonl must have been cut back to `step` before.
    """

    def __init__(self, out_dir: str | Path, step: int) -> None:
        self.out_dir = Path(out_dir)
        self.writer = self.open(step)

    def open(self, step: int) -> Any:
        """
        Return a new SummaryWriter. Readers then ignore what earlier writers wrote for this and later steps.

        An evaluation of this step is written again if metrics.jsonl still contains the evaluation, because it
        will not be repeated.
        """
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(self.out_dir / "tensorboard", purge_step=step)
        for evaluation in evaluations_of(read_records(self.out_dir / METRICS), step):
            for split in ("train", "val"):
                writer.add_scalar(f"{split}/loss", evaluation[f"{split}_loss"], step)
        return writer

    def rewind(self, step: int) -> None:
        """Continue at an earlier step."""
        self.writer.close()
        self.writer = self.open(step)

    def step(self, record: dict, left_s: float | None) -> None:
        """Write the numbers of a step."""
        self.write(record["iter"], step_values(record))

    def evaluation(self, record: dict, lr: float) -> None:
        """Write the losses of an evaluation."""
        self.write(record["iter"], evaluation_values(record, lr))

    def write(self, step: int, values: dict) -> None:
        """Write the values that are numbers."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the event files."""
        self.writer.close()
