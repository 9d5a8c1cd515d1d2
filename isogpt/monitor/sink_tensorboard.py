"""TensorBoard: the steps and the evaluations."""

from pathlib import Path

from isogpt.common.files import read_records
from isogpt.monitor.records import CLOSING, chart_values
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

    metrics.jsonl must have been cut back to the step before.
    """

    def __init__(self, out_dir: str, step: int) -> None:
        self.out_dir = Path(out_dir)
        self.open(step)

    def open(self, step: int) -> None:
        """
        Begin a new file. Readers then ignore what earlier files contain of this and later steps.

        An evaluation of this step is written again if metrics.jsonl still contains the evaluation, because it
        will not be repeated.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.out_dir / "tensorboard", purge_step=step)
        for evaluation in evaluations_of(read_records(self.out_dir / METRICS), step):
            self.write(evaluation, "")

    def write(self, record: dict, text: str) -> None:
        """Write the values of a record that are numbers."""
        for name, value in chart_values(record).items():
            if name != "iter" and isinstance(value, int | float):
                self.writer.add_scalar(name, value, record["iter"])
        event = record.get("event")
        if event == "rollback" or event in CLOSING:
            self.writer.close()
        if event == "rollback":
            self.open(record["to"])
