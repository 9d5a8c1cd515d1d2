"""TensorBoard: the steps and the evaluations."""

from pathlib import Path
from typing import TYPE_CHECKING

from isogpt.common.packages import needed_by
from isogpt.monitor.records import CLOSING, chart_values
from isogpt.monitor.sink_metrics import METRICS, evaluation_at

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def check_tensorboard() -> None:
    """Raise ValueError if TensorBoard is not installed."""
    with needed_by("tensorboard_log", "tensorboard"):
        import torch.utils.tensorboard  # noqa: F401


class TensorBoard:
    """
    Writes the numbers of steps and evaluations to the folder `tensorboard` in the run's folder.

    metrics.jsonl must already have been cut back to the step. After an error, such as a full disk, the next
    evaluation begins a new file, because SummaryWriter's thread prints the error and ends.
    """

    def __init__(self, out_dir: str, step: int) -> None:
        self.out_dir = Path(out_dir)
        self.open(step)

    def open(self, step: int) -> None:
        """
        Begin a new file. Readers then ignore what earlier files contain of this and later steps.

        An evaluation of this step is written again if metrics.jsonl still contains it, because it will not be
        repeated.
        """
        self.writer = self.begin_file(purge_step=step)
        if evaluation := evaluation_at(self.out_dir / METRICS, step):
            self.add(evaluation)

    def begin_file(self, purge_step: int | None = None) -> "SummaryWriter":
        """Begin a new file, which replaces what earlier files contain from purge_step on."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.out_dir / "tensorboard", purge_step=purge_step)

    def write(self, record: dict, text: str) -> None:
        """Write the values of a record that are numbers."""
        if not self.writer:
            if "val_loss" not in record:
                return
            self.writer = self.begin_file()
        try:
            self.add(record)
        except Exception:
            self.writer = None
            raise

    def add(self, record: dict) -> None:
        """`write` to the open file."""
        for name, value in chart_values(record).items():
            if name != "iter" and isinstance(value, int | float):
                self.writer.add_scalar(name, value, record["iter"])
        if record.get("event") in CLOSING:
            self.writer.close()
