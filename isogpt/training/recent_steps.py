"""The losses and gradient norms of the last steps, and the limits beyond which a step is a spike."""

import math
from dataclasses import dataclass, field

WINDOW = 128  # taken steps from which the limits are computed
ENOUGH = 64  # with fewer there is no limit: the fall of a run's first losses is not noise
SIGMAS = 6  # standard deviations above the mean: the rule of OLMo 2 (2025, arXiv:2501.00656)
# The standard deviation counts as at least this fraction of the mean: without it, rounding would be a spike
# where all losses are equal.
LEAST_SIGMA = 1e-3
# Steps in succession that are skipped as spikes. A skipped step leaves the weights as they are: if several
# batches in succession are spikes, then the reason is not one of the batches.
PATIENCE = 3


@dataclass
class RecentSteps:
    """
    What a run remembers of its last WINDOW taken steps, equal on all ranks; a checkpoint stores it. A step
    that was skipped, or whose float16 gradient overflowed, is not one of them.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0  # spikes in succession that were skipped
    earlier: list[float] = field(default_factory=[math.inf, math.inf].copy)  # limits before the last step

    def limits(self, launched: int = 1) -> list[float]:
        """
        Return the largest loss and gradient norm with which the next step is not a spike; infinity allows
        any. They do not depend on the step just before it, whose outcome is often not known yet.

        Args:
            launched: how many steps are launched whose outcome is not known.
        """
        return self.latest_limits() if launched else self.earlier

    def latest_limits(self) -> list[float]:
        """The limits from all steps that are known."""
        return [limit_of(self.losses), limit_of(self.grad_norms)]

    def begin(self) -> None:
        """Keep the limits before a step is added, skipped or left out."""
        self.earlier = self.latest_limits()

    def add(self, loss: float, grad_norm: float) -> None:
        """Remember a step that was taken."""
        self.losses = [*self.losses, loss][-WINDOW:]
        self.grad_norms = [*self.grad_norms, grad_norm][-WINDOW:]
        self.skipped = 0

    def skip(self) -> bool:
        """
        Count a spike that was skipped. After PATIENCE of them in succession all steps are forgotten, so that
        the next ENOUGH steps are taken and set new limits: no run skips forever. Returns whether it forgot.
        """
        self.skipped += 1
        if self.skipped < PATIENCE:
            return False
        self.losses, self.grad_norms, self.skipped = [], [], 0
        return True


def limit_of(values: list[float]) -> float:
    """The mean plus SIGMAS standard deviations; infinity for fewer than ENOUGH values."""
    n = len(values)
    if n < ENOUGH:
        return math.inf
    # a resumed run has the same bits: fsum and dist do not depend on how the values were collected
    mean = math.fsum(values) / n
    sigma = math.dist(values, [mean] * n) / math.sqrt(n)
    return mean + SIGMAS * max(sigma, LEAST_SIGMA * abs(mean))
