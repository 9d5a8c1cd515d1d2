"""Evaluation: the loss over fixed sequences, divided over the ranks."""

from collections import namedtuple
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from isogpt.checkpoint.state import TrainState
from isogpt.data.dataset import Dataset
from isogpt.data.reader import Reader
from isogpt.data.token_files import DataError
from isogpt.launch.together import exit_together, gather_numbers, number_dtype
from isogpt.monitor.run_report import RunReport
from isogpt.parallel.compare_weights import weights_digest
from isogpt.parallel.data_parallel import reshard
from isogpt.parallel.integer_sums import TOKENS_UNIT, rounded


@dataclass
class Evaluator:
    """Evaluates a run's state and reports the losses."""

    model: nn.Module  # as it is called: with a pipeline, through all stages
    state: TrainState
    reader: Reader
    sequences: int  # of each split; 0: whole validation sets, see Reader.evaluation
    autocast: AbstractContextManager
    report: RunReport

    def __post_init__(self) -> None:
        self.stop, self.saver = self.report.run.stop, self.report.saver

    def run(self) -> None:
        """
        Evaluate the state (all ranks). If this fails, the state is saved and the run exits with a message. If
        a stop is requested meanwhile, `stop.agreed` is set, and there is no result. A dry run, which counts a
        step, does not evaluate.
        """
        on_error = partial(self.saver.save_and_fail, self.state)
        with exit_together(on_error), self.state.evaluated_weights():
            sums = self.sum_losses()
        if self.stop.agreed:
            return
        losses = {}
        # one collective for all splits, whose names may contain anything
        numbers = namedtuple("SplitSums", sums, rename=True)(*sums.values())
        gathered = gather_numbers(numbers, self.reader.device).read()
        for split, of_ranks in zip(sums, gathered, strict=True):
            count = self.reader.eval_targets(split, self.sequences) * self.reader.mesh.same_tokens.size
            losses[split] = of_ranks.sum().item() / count
        self.state.progress.evaluated(self.reader.data.val_loss(losses))
        values = evaluation_values(losses, self.reader.data)
        if self.reader.plan.exact:
            values["weights"] = weights_digest(self.state.model, self.reader.mesh)
        self.report.evaluation(values)

    @torch.no_grad()
    def sum_losses(self) -> dict[str, Tensor | float]:
        """
        Return the sum of the losses of this rank's sequences for each of Dataset.splits (all ranks). If a
        stop is requested, these are the sums so far. The host does not wait for a GPU.

        Raises:
            DataError: after the last micro-batch, so that this rank has computed as many as the others.
        """
        device, is_exact = self.reader.device, self.reader.plan.exact
        dtype, problems = number_dtype(device), []
        sums = dict.fromkeys(self.reader.data.splits, 0.0)
        self.model.eval()
        for split in sums:
            try:
                for i, (x, y) in enumerate(self.reader.evaluation(split, self.sequences)):
                    with self.report.clock.part("evaluation"), self.autocast:
                        loss = self.model(x, y, 1.0)[1]  # the sum over the targets
                        sums[split] += rounded(loss, TOKENS_UNIT) if is_exact else loss.to(dtype)
                    if self.stop.in_evaluation(i, device, self.saver.seconds_at_end):
                        break
            except DataError as e:
                problems.append(str(e))
            if self.stop.agreed:
                break
        self.model.train()
        reshard(self.model)
        if problems:
            raise DataError("; ".join(problems))
        return sums


def evaluation_values(losses: dict[str, float], data: Dataset) -> dict[str, float]:
    """
    Return what the record of an evaluation contains: the losses, and the bits per byte where the length of
    the text is known.

    Args:
        losses: for each of Dataset.splits.
    """
    val_loss = data.val_loss(losses)
    values = {"train_loss": losses["train"], "val_loss": val_loss, "val_bpb": data.bits_per_byte(val_loss)}
    for one in data.named:
        loss = losses[f"val/{one.name}"]
        values |= {f"val_loss/{one.name}": loss, f"val_bpb/{one.name}": one.bits_per_byte(loss)}
    return {name: value for name, value in values.items() if value is not None}
