"""The policy for spikes, steps whose loss or gradient norm is far above the last ones: report, or skip."""

from dataclasses import dataclass

from isogpt.monitor.log import Logger
from isogpt.training.recent_steps import ENOUGH, PATIENCE, RecentSteps
from isogpt.training.step_numbers import StepNumbers

WARNING_INTERVAL = 100  # steps between two warnings; each spike is an event


@dataclass
class SpikePolicy:
    """Reports spikes and decides whether they are taken, from numbers that are equal on all ranks."""

    on_spike: str  # report or skip
    recent_steps: RecentSteps
    logger: Logger
    next_warning: int = 0  # the first step at which a spike is printed again

    def takes(self, numbers: StepNumbers, step: int) -> bool:
        """
        Return whether a finite step is taken, as clip_and_step has decided. A step that is taken is
        remembered, and a spike is reported.
        """
        facts = {
            "loss": numbers.loss.mean().item(),
            "grad_norm": numbers.grad_norm.item(),
            "loss_limit": numbers.loss_limit[0].item(),
            "grad_norm_limit": numbers.grad_norm_limit[0].item(),
        }
        above = [name for name in ("loss", "grad_norm") if facts[name] > facts[f"{name}_limit"]]
        is_taken = not above or self.on_spike == "report"
        is_forgotten = False
        if is_taken:
            self.recent_steps.add(facts["loss"], facts["grad_norm"])
        else:
            is_forgotten = self.recent_steps.skip()
        if above:
            text = self.warning(facts, above, step, is_forgotten)
            self.logger.event("spike", text, **facts, skipped=not is_taken)
        return is_taken

    def warning(self, facts: dict, above: list[str], step: int, is_forgotten: bool) -> str:
        """The line for the user; '' if the last one was printed recently and nothing is forgotten."""
        if step < self.next_warning and not is_forgotten:
            return ""
        self.next_warning = step + WARNING_INTERVAL
        numbers = " and ".join(
            f"{name.replace('_', ' ')} {facts[name]:.4g} (limit {facts[f'{name}_limit']:.4g})"
            for name in above
        )
        text = f"warning: step {step} is a spike: {numbers}"
        if self.on_spike == "report":
            return f"{text}; --on_spike=skip would leave it out"
        text += ": the step is skipped"
        if is_forgotten:
            text += (
                f". It is number {PATIENCE} in succession, so the cause is not a single batch: the next "
                f"{ENOUGH} steps are taken and set new limits"
            )
        return text
