"""What a step's numbers contain besides the loss and the gradient: times, memory, and requests to stop."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from isogpt.checkpoint.save import Saver
from isogpt.launch.together import Gathered, gather_numbers
from isogpt.monitor.signals import Stop
from isogpt.parallel.parallelize import take_routing
from isogpt.speed.clock import Clock
from isogpt.speed.usage import memory_gb
from isogpt.training.step_numbers import StepNumbers


@dataclass
class Meter:
    """
    Measures steps, and gathers what all ranks decide from.

    A step takes the time from the one before to its `gather`, without what stands between `pause` and
    `resume`: evaluations, checkpoints and samples.
    """

    model: nn.Module
    device: torch.device
    scaler: torch.amp.GradScaler
    clock: Clock
    stop: Stop
    saver: Saver
    log_interval: int
    began: float = field(default_factory=time.perf_counter)
    paused_at: float = 0.0
    routing: Tensor | None = None  # of the step, see parallelize.take_routing; arrives with its numbers

    def pause(self) -> None:
        """What follows does not belong to a step."""
        self.paused_at = time.perf_counter()

    def resume(self) -> None:
        """A step goes on, or begins."""
        self.began += time.perf_counter() - self.paused_at

    def restart(self) -> None:
        """Begin to measure a step, after one that was not taken."""
        self.began = time.perf_counter()

    def gather(self, step: int, loss: Tensor, grad_square: tuple[Tensor, Tensor | float]) -> Gathered:
        """
        Gather the StepNumbers of all ranks (all ranks): the one small collective of a step; with experts,
        there is a second one if the step is logged. The host does not wait for a GPU.

        Args:
            loss, grad_square: see StepNumbers.
        """
        now = time.perf_counter()
        step_s, self.began = now - self.began, now
        self.routing = take_routing(self.model, step % self.log_interval == 0, self.device)
        coarse, fine = grad_square
        return gather_numbers(
            StepNumbers(
                loss=loss,
                grad_square=coarse,
                grad_square_fine=fine,
                step_ms=step_s * 1e3,
                data_ms=self.clock.cpu_ms("data"),
                memory_gb=memory_gb(self.device),
                forward_ms=self.clock.last("forward"),
                stop=self.stop.code(step_s, self.saver.seconds),  # 0, a signal, or the time limit
                # get_scale would wait for the GPU
                loss_scale=self.scaler.scale(torch.ones((), device=self.device)),
                waiting=self.clock.waiting_share(),
            ),
            self.device,
        )
