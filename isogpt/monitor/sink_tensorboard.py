"""TensorBoard: the steps and the evaluations."""

from pathlib import Path

from isogpt.checkpoint.progress import Progress
from isogpt.common.packages import needed_by
from isogpt.monitor.records import CLOSING, chart_values


def check_tensorboard() -> None:
    """Raise ValueError if TensorBoard is not installed."""
    with needed_by("tensorboard_log", "tensorboard"):
        import torch.utils.tensorboard  # noqa: F401


class TensorBoard:
    """
    Writes the numbers of steps and evaluations to the folder `tensorboard` in the run's folder.

    After an error, such as a full disk, the next evaluation begins a new file, because SummaryWriter's thread
    prints the error and ends.

    Args:
        progress: the run's, at the step at which it continues.
    """

    def __init__(self, out_dir: str, progress: Progress) -> None:
        self.folder = Path(out_dir, "tensorboard")
        self.open(purge_step=progress.step)  # readers then ignore what earlier files contain from there on
        if progress.val_loss is not None:  # of the state before this step, which need not be evaluated again
            self.writer.add_scalar("val/loss", progress.val_loss, progress.step)

    def open(self, purge_step: int | None = None) -> None:
        """Begin a new file, which replaces what earlier files contain from purge_step on."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.folder, purge_step=purge_step)

    def write(self, record: dict, text: str) -> None:
        """Write the values of a record that are numbers."""
        if not self.writer:
            if "val_loss" not in record:
                return
            self.open()
        writer, self.writer = self.writer, None  # which it stays after an error
        for name, value in chart_values(record).items():
            if name != "iter" and isinstance(value, int | float):
                writer.add_scalar(name, value, record["iter"])
        if record.get("event") in CLOSING:
            writer.close()
        self.writer = writer
