"""Budgets: how many steps a number of tokens or epochs is."""

import math
from typing import NamedTuple

from isogpt.common.console import count_text


class Limits(NamedTuple):
    """How long a run trains, and over how many steps its learning rate decays."""

    max_iters: int | float  # steps may be fractions, as in nanoGPT
    lr_decay_iters: int | float
    notes: list[str]  # what a user should know

    def settings(self) -> dict:
        """These limits, as settings of train.py."""
        return {"max_iters": self.max_iters, "lr_decay_iters": self.lr_decay_iters}


def limits_of(config: dict, train_tokens: int) -> Limits:
    """
    Return the limits that train.py's settings describe. max_tokens or max_epochs, if it is set, takes the
    place of max_iters and lr_decay_iters.

    Args:
        train_tokens: how many tokens the training split contains: one epoch.
    """
    tokens, of_what = config["max_tokens"], ""
    if config["max_epochs"]:
        tokens, of_what = config["max_epochs"] * train_tokens, f" of {train_tokens:,} tokens"
    if not tokens:
        return Limits(config["max_iters"], config["lr_decay_iters"], [])
    tokens_per_step = math.prod(
        config[name] for name in ("gradient_accumulation_steps", "batch_size", "block_size")
    )
    steps = steps_of(tokens, tokens_per_step)
    last = steps - 1  # max_iters + 1 steps are trained
    name = "max_epochs" if config["max_epochs"] else "max_tokens"
    note = (
        f"{name} {config[name]:,.15g}{of_what} are {count_text(steps, 'step')} of {tokens_per_step:,} "
        f"tokens: max_iters {last}, lr_decay_iters {last}"
    )
    return Limits(last, last, [note])


def steps_of(tokens: float, tokens_per_step: int) -> int:
    """The number of steps that comes closest to this many tokens, at least one."""
    return max(1, round(tokens / tokens_per_step))
