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
    Return the limits that train.py's settings describe. max_tokens, if it is set, takes the place of
    max_iters and lr_decay_iters.

    Args:
        train_tokens: how many tokens the training split contains: one epoch.
    """
    number, unit = split_budget(config["max_tokens"])
    if not number:
        return Limits(config["max_iters"], config["lr_decay_iters"], [])
    names = ("gradient_accumulation_steps", "batch_size", "block_size")
    tokens_per_step = math.prod(config[name] for name in names)
    tokens = number * train_tokens if unit else number
    steps = max(1, round(tokens / tokens_per_step))
    last = steps - 1  # max_iters + 1 steps are trained
    of_what = f" {unit} of {train_tokens:,} tokens" if unit else ""
    note = (
        f"max_tokens {number:,.15g}{of_what} are {count_text(steps, 'step')} of {tokens_per_step:,} tokens: "
        f"max_iters {last}, lr_decay_iters {last}"
    )
    return Limits(last, last, [note])


def split_budget(max_tokens: str) -> tuple[float, str]:
    """The number of a budget such as 3e9 or 2epochs, and its unit: epochs, or "" for tokens; 0: no budget."""
    number = max_tokens.removesuffix("epochs")
    return float(number or 0), max_tokens[len(number) :]
