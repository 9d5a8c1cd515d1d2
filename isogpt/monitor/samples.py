"""Samples of what a model writes: during training, and the command that prints samples afterwards."""

import os
import shlex
import textwrap
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import torch
from torch import nn

from isogpt.checkpoint.manifest import is_run
from isogpt.checkpoint.state import TrainState
from isogpt.common import console
from isogpt.common.files import REPOSITORY
from isogpt.data.tokenizer import Tokenizer
from isogpt.data.tokenizer import load as load_tokenizer
from isogpt.data.vocabulary import Vocabulary
from isogpt.launch.process_group import Ranks
from isogpt.launch.together import exit_together
from isogpt.monitor.log import Logger
from isogpt.options.values import as_typed
from isogpt.parallel.plan import Plan

LINES, COLUMNS = 2, 70  # shown of a sample
TOKENS = 150  # generated for a sample; if a token is a character, two lines


@dataclass(frozen=True)
class Sampler:
    """
    Writes a few lines with the model that is being trained, on rank 0, which holds the whole model.

    A sample is drawn with separate random numbers, which are the same each time. So training has the same
    bits with and without samples, and samples of different steps can be compared.
    """

    interval: int  # steps between samples; 0: no samples
    tokenizer: Tokenizer | None  # None on other ranks
    seed: int

    def write(self, model: nn.Module, autocast: AbstractContextManager) -> str:
        """
        Return a sample. The other ranks wait at their next collective until it is written.

        Args:
            model: a GPT, which is not changed.
        """
        device = next(model.parameters()).device
        # a second model with the same weights: torch.compile would compile each length of the text, and
        # context parallelism has replaced what the layers of `model` compute
        with torch.device("meta"):
            twin = type(model)(model.config)
        twin.load_state_dict(model.state_dict(), assign=True)
        twin.tie_weights()
        twin.eval()
        prompt = []
        with suppress(ValueError):  # the vocabulary contains no line break
            prompt = self.tokenizer.encode("\n")
        idx = torch.tensor([prompt or [self.tokenizer.end_of_text or 0]], device=device)  # (1, T)
        with autocast:
            ids = twin.generate(idx, TOKENS, 0.8, 200, vocab_size=self.tokenizer.n_ids, seed=self.seed)
        return self.tokenizer.decode(ids[0].tolist())

    def report(
        self, state: TrainState, is_last: bool, autocast: AbstractContextManager, logger: Logger
    ) -> None:
        """
        If a sample is due, which the last one always is, report to the logger a sample of the weights that
        are evaluated, see `write` (all ranks).
        """
        if not self.interval or (state.next_step % self.interval and not is_last):
            return
        with state.evaluated_weights():
            text = self.write(state.model, autocast) if self.tokenizer else ""
        logger.event("sample", "\n".join(f"sample:  {line}" for line in first_lines(text)), sample=text)


def open_sampler(config: dict, vocabulary: Vocabulary, plan: Plan, ranks: Ranks) -> Sampler:
    """
    Return what writes samples every sample_interval steps (all ranks). If the model is divided, it writes
    none, and a note says so. Exits with a message if the ids cannot be decoded.
    """
    interval, seed = config["sample_interval"], config["seed"]
    if not interval:
        return Sampler(0, None, seed)
    divided = [f"zero {plan.zero}"] if plan.zero >= 2 else []
    divided += [f"{name} {getattr(plan, name)}" for name in ("tp", "pp", "ep") if getattr(plan, name) > 1]
    if divided:  # the setting may come from a config that fits other layouts
        if ranks.is_main:
            console.print_line(
                "note:    sample_interval needs the whole model on one process, but "
                f"{', '.join(divided)} divides it, so no samples are written. Run sample.py on a checkpoint"
            )
        return Sampler(0, None, seed)
    with exit_together():
        try:
            tokenizer = load_tokenizer(vocabulary) if ranks.is_main else None
        except ValueError as e:
            raise ValueError(f"sample_interval: {e}, or set --sample_interval=0") from e
    return Sampler(interval, tokenizer, seed)


def first_lines(text: str) -> list[str]:
    """Return the first lines of a text that are not blank, cut to COLUMNS, without control characters."""
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in text.expandtabs(4))
    return [part for line in shown.split("\n") for part in textwrap.wrap(line, COLUMNS)][:LINES]


def how_to_sample(out_dir: str, vocabulary: Vocabulary) -> str:
    """The command that prints samples of a run's model; "" without a checkpoint or a vocabulary."""
    if not is_run(out_dir) or vocabulary.kind == "unknown":
        return ""
    script = shlex.quote(os.path.relpath(REPOSITORY / "sample.py"))
    return f"try: python {script} --out_dir={as_typed(out_dir)}"
