"""Evaluation: the loss over fixed sequences, divided over the ranks."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.state import TrainState
from isogpt.data.reader import Reader
from isogpt.data.token_files import DataError
from isogpt.launch.pretended_ranks import is_pretended
from isogpt.launch.together import exit_together, gather_numbers, number_dtype
from isogpt.monitor.run_report import RunReport
from isogpt.monitor.signals import Stop
from isogpt.parallel.compare_weights import weights_digest
from isogpt.parallel.data_parallel import reshard
from isogpt.parallel.integer_sums import TOKENS_UNIT, rounded
from isogpt.speed.clock import Clock


class SplitSums(NamedTuple):
    """Sums of the losses over the sequences that this rank evaluates, for both splits."""

    train: Tensor | float
    val: Tensor | float


@dataclass
class Evaluator:
    """Evaluates a run's state and reports the losses."""

    model: nn.Module  # as it is called: with a pipeline, through all stages
    state: TrainState
    reader: Reader
    sequences: int  # of each split
    autocast: AbstractContextManager
    clock: Clock
    stop: Stop
    saver: Saver
    report: RunReport

    def run(self) -> None:
        """
        Evaluate the state (all ranks). If this fails, the state is saved and the run exits with a message. If
        a stop was requested meanwhile, `stop.agreed` is set, and there is no result. A dry run counts a step,
        and does not evaluate.
        """
        if is_pretended():
            return
        on_error = partial(self.saver.save_and_fail, self.state)
        with exit_together(on_error), self.state.evaluated_weights():
            sums = self.sum_losses()
        if self.stop.agreed:
            return
        losses = self.means(sums)
        self.state.progress.evaluated(losses.val)
        is_exact = self.reader.plan.exact
        digest = weights_digest(self.state.model, self.reader.mesh) if is_exact else ""
        self.report.evaluation(losses.train, losses.val, digest)

    @torch.no_grad()
    def sum_losses(self) -> SplitSums:
        """
        Compute the losses of this rank's sequences, until a stop is requested (all ranks). The host does not
        wait for a GPU.

        Raises:
            DataError: after the last micro-batch, so that this rank has computed as many as the others.
        """
        device, is_exact, problems = self.reader.device, self.reader.plan.exact, []
        sums = {split: 0.0 for split in SplitSums._fields}
        self.model.eval()
        for split in sums:
            try:
                for i, (x, y) in enumerate(self.reader.evaluation(split, self.sequences)):
                    with self.clock.part("evaluation"), self.autocast:
                        loss = self.model(x, y, 1.0)[1]  # the sum over the targets
                        sums[split] += (
                            rounded(loss, TOKENS_UNIT) if is_exact else loss.to(number_dtype(device))
                        )
                    if self.stop.in_evaluation(i, device, self.saver.seconds):
                        break
            except DataError as e:
                problems.append(str(e))
            if self.stop.agreed:
                break
        self.model.train()
        reshard(self.model)
        if problems:
            raise DataError("; ".join(problems))
        return SplitSums(**sums)

    def means(self, sums: SplitSums) -> SplitSums:
        """Return the mean losses over the sequences of all ranks (all ranks)."""
        over_ranks = gather_numbers(sums, self.reader.device).read()
        targets = self.sequences * self.reader.block_size * self.reader.mesh.same_tokens.size
        return SplitSums(*(values.sum().item() / targets for values in over_ranks))
