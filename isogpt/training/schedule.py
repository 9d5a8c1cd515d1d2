"""The schedule of the learning rate."""

import math
from dataclasses import dataclass, fields

from isogpt.training import optim
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
        max_iters, peak, min_lr = config["max_iters"], config["learning_rate"], config["min_lr"]
        notes = []
        if min_lr > peak:
            muon = ", and Muon's in proportion," if optim.uses_muon(config["optimizer"]) else ""
            notes.append(
                f"min_lr {min_lr:g} is above learning_rate {peak:g}: after the warm-up, the learning rate"
                f"{muon} rises: set --min_lr={peak / 10:g}, or --decay_lr=False"
            )
        if max_iters < self.warmup_iters:
            notes.append(
                f"the run ends at step {max_iters}, in the warm-up (warmup_iters {self.warmup_iters}), with "
                f"a learning rate of {self.lr(int(max_iters)):.3g}: set a smaller --warmup_iters"
            )
        elif self.warmup_iters >= self.lr_decay_iters:
            decay = f"--lr_decay_iters={max_iters}, or " if max_iters > self.warmup_iters else ""
            notes.append(
                f"warmup_iters, {self.warmup_iters}, is not smaller than lr_decay_iters, "
                f"{self.lr_decay_iters}: the learning rate then drops to min_lr at once: set {decay}"
                "a smaller --warmup_iters"
            )
        if min_lr == 0 and self.warmup_iters < self.lr_decay_iters < max_iters:
            notes.append(
                f"from step {self.lr_decay_iters}, lr_decay_iters, the learning rate is 0 and nothing is "
                f"learned: set --lr_decay_iters={max_iters}, or a smaller --max_iters"
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
