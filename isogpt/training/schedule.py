"""The schedule of the learning rate."""

import math
from dataclasses import dataclass, fields

from isogpt.training.budget import split_budget


@dataclass(frozen=True)
class Schedule:
    """
    Linear warm-up, decay to min_lr by lr_schedule, then min_lr; without decay_lr, learning_rate throughout.
    """

    learning_rate: float  # the maximum
    min_lr: float
    warmup_iters: int | float  # steps may be fractions, as in nanoGPT
    lr_decay_iters: int | float
    cooldown_iters: int | float
    lr_schedule: str  # cosine, linear or wsd
    decay_lr: bool
    max_tokens: str  # if it is set, lr_decay_iters follows from it, see budget.py

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        if not self.decay_lr:
            return self.learning_rate
        if step < self.warmup_iters:
            return self.learning_rate * (step + 1) / (self.warmup_iters + 1)
        if step >= self.lr_decay_iters:
            return self.min_lr
        start = self.warmup_iters
        if self.lr_schedule == "wsd":
            start = max(start, self.lr_decay_iters - self.cooldown_iters)
        decayed = max(0, step - start) / (self.lr_decay_iters - start)  # grows from 0 to 1
        if self.lr_schedule == "cosine":
            remaining = 0.5 * (1 + math.cos(math.pi * decayed))
        else:
            assert self.lr_schedule in ("linear", "wsd"), f"lr has no branch for {self.lr_schedule}"
            remaining = 1 - decayed
        return self.min_lr + remaining * (self.learning_rate - self.min_lr)

    def notes(self, config: dict) -> list[str]:
        """A sentence for each unusual property of these rates in a run with train.py's settings `config`."""
        if not self.decay_lr or config["eval_only"]:
            return []
        peak, min_lr, last = self.learning_rate, self.min_lr, config["max_iters"]
        warmup, decay = self.warmup_iters, self.lr_decay_iters
        notes = []
        if min_lr > peak:
            notes.append(
                f"min_lr {min_lr:g} is above learning_rate {peak:g}, so rates rise after the warm-up: set "
                f"--min_lr={peak / 10:g}, or --decay_lr=False"
            )
        if last < warmup:
            notes.append(
                f"the run ends at step {last}, in the warm-up (warmup_iters {warmup}): set a smaller "
                "--warmup_iters"
            )
        elif warmup >= decay:
            longer = f"--lr_decay_iters={last}, or " if last > warmup else ""
            notes.append(
                f"the learning rate drops to min_lr after the warm-up, since warmup_iters {warmup} is not "
                f"smaller than lr_decay_iters {decay}: set {longer}a smaller --warmup_iters"
            )
        if min_lr == 0 and warmup < decay < last:
            notes.append(
                f"from step {decay}, lr_decay_iters, the learning rate is 0: set --lr_decay_iters={last}, or "
                "a smaller --max_iters"
            )
        return notes

    def to_continue(self, step: int) -> str:
        """What to type to continue a complete run, which is at `step`, with twice as many steps."""
        budget, unit = split_budget(self.max_tokens)
        if budget:
            longer = 2 * step / (self.lr_decay_iters + 1)
            return f"--max_tokens={longer * budget:.6g}{unit}"
        options = f"--max_iters={2 * step}"
        if self.decay_lr and self.lr_decay_iters < 2 * step:  # otherwise, the rate would stay at min_lr
            options += f" --lr_decay_iters={2 * step}"
        return options


def make_schedule(config: dict) -> Schedule:
    """The schedule of train.py's settings."""
    return Schedule(**{field.name: config[field.name] for field in fields(Schedule)})
