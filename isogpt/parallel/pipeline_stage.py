"""
A stage of a pipeline as torch.distributed.pipelining calls it. Importing the library takes a second, so this
file is imported only where a schedule is made.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.pipelining import PipelineStage

from isogpt.parallel.gradients import Sums


class TimedStage(PipelineStage):
    """
    A stage that times its passes, since the rest of a step is the bubble, and adds the gradients of each
    micro-batch to the step's sums.
    """

    def __init__(self, timer: Callable, autocast: AbstractContextManager, sums: Sums, *stage: Any) -> None:
        super().__init__(*stage, group=sums.mesh.group("pp"))
        self.timer, self.autocast, self.sums = timer, autocast, sums

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """A micro-batch's forward pass."""
        with self.timer("stages"), self.autocast:
            return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, micro_step: int, *args: Any, **options: Any) -> Any:
        """A micro-batch's backward pass; in zero-bubble schedules, without the gradients of weights."""
        with self.timer("stages"):
            result = super().backward_one_chunk(micro_step, *args, **options)
        self.sums.add_gradients(self.submod, micro_step)
        return result

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        """The gradients of weights that zero-bubble schedules compute later."""
        with self.timer("stages"):
            return super().backward_weight_one_chunk(*args, **options)
