"""The numbers of a step, which besides the loss and the gradient contain times, memory and stop requests."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isogpt.checkpoint.save import Saver
from isogpt.data.reader import Reader
from isogpt.launch.together import Gathered, gather_numbers
from isogpt.monitor.signals import Stop
from isogpt.parallel.parallelize import take_routing
from isogpt.speed.clock import Clock
from isogpt.speed.usage import memory_gb
from isogpt.training.recent_steps import RecentSteps
from isogpt.training.step_numbers import StepNumbers


@dataclass
class Meter:
    """Gathers what all ranks decide from and report after a step."""

    model: nn.Module
    device: torch.device
    scaler: torch.amp.GradScaler
    clock: Clock
    stop: Stop
    saver: Saver
    reader: Reader
    log_interval: int
    recent_steps: RecentSteps
    routing: Tensor | None = None  # of the step, see parallelize.take_routing; arrives with its numbers

    def gather(self, step: int, loss: Tensor, grad_square: tuple[Tensor, Tensor | float]) -> Gathered:
        """
        Gather the StepNumbers of all ranks (all ranks). This is the one small collective of a step; with
        experts, there is a second one if the step is logged. The host does not wait for a GPU.

        Args:
            loss, grad_square: see StepNumbers.
        """
        step_s = self.clock.step_s()
        self.routing = take_routing(self.model, step % self.log_interval == 0, self.device)
        coarse, fine = grad_square
        loss_limit, grad_norm_limit = self.recent_steps.limits()
        return gather_numbers(
            StepNumbers(
                # a step with padding in place of data must not be taken, on any rank: see NanPolicy.recover
                loss=math.nan if self.reader.problems else loss,
                grad_square=coarse,
                grad_square_fine=fine,
                step_ms=step_s * 1e3,
                data_ms=self.clock.cpu_ms("data"),
                memory_gb=memory_gb(self.device),
                forward_ms=self.clock.last("forward"),
                stop=self.stop.code(step_s, self.saver.seconds_at_end),  # 0, a signal, or the time limit
                # get_scale would wait for the GPU
                loss_scale=self.scaler.scale(torch.ones((), device=self.device)),
                waiting=self.clock.waiting_share(),
                loss_limit=loss_limit,
                grad_norm_limit=grad_norm_limit,
            ),
            self.device,
        )
