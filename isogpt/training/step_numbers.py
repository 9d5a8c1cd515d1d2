"""The numbers of a step that all ranks share, from which they reach the same decisions."""

import math
from typing import NamedTuple

from torch import Tensor


class StepNumbers(NamedTuple):
    """What each rank contributes to a step's decisions and to the log."""

    loss: Tensor | float  # this rank's share: the mean over the ranks is the global batch's mean loss
    # this rank's share of the gradient's squared norm: the sum over the ranks is the squared norm
    grad_square: Tensor | float
    step_ms: Tensor | float
    data_ms: Tensor | float  # time spent waiting for data
    memory_gb: Tensor | float  # peak memory
    forward_ms: Tensor | float
    stop: Tensor | float  # Stop.code
    loss_scale: Tensor | float  # factor of the loss with float16, else 1
    waiting: Tensor | float  # Clock.waiting_share
    # with exact, the squared norm consists of two parts: each is a sum without rounding
    grad_square_fine: Tensor | float = 0.0
    # beyond which the step is a spike, see RecentSteps.limits: equal on all ranks, and sent since this copies
    # them to the device
    loss_limit: Tensor | float = math.inf
    grad_norm_limit: Tensor | float = math.inf

    @property
    def grad_norm(self) -> Tensor:
        """The norm of the global batch's gradient, from gathered numbers."""
        return (self.grad_square.sum() + self.grad_square_fine.sum()).sqrt()

    @property
    def is_finite(self) -> Tensor:
        """
        Whether the loss and the gradient are finite on every rank, from gathered numbers: a bool tensor.
        """
        return self.loss.isfinite().all() & self.grad_norm.isfinite()

    def is_update(self, skips_spikes: bool) -> Tensor:
        """
        Whether the optimizers may take the step: it is finite, and no spike if spikes are skipped. From
        gathered numbers: a bool tensor. StepPolicy.takes decides the same from the same numbers on the host,
        where the mean over many ranks can differ from a GPU's in its last bit.
        """
        if not skips_spikes:
            return self.is_finite
        is_low = (self.loss.mean() <= self.loss_limit[0]) & (self.grad_norm <= self.grad_norm_limit[0])
        return self.is_finite & is_low
