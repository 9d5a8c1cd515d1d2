"""What a run starts from: a checkpoint to resume, weights from elsewhere, or initial weights."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from torch import nn

from isogpt.checkpoint.differences import differences
from isogpt.checkpoint.folder import look_for_start
from isogpt.checkpoint.manifest import steps_in
from isogpt.checkpoint.restore import load_weights, restore_checkpoint
from isogpt.checkpoint.run_vocabulary import vocabulary_for_run
from isogpt.checkpoint.search import share_found
from isogpt.checkpoint.source import OpenCheckpoint, check_weights, open_checkpoint
from isogpt.checkpoint.state import TrainState
from isogpt.data.dataset import Dataset
from isogpt.data.vocabulary import Vocabulary
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.launch.together import (
    broadcast,
    do_together,
    exit_together,
    gather_objects,
    is_main,
    wait_together,
)
from isogpt.parallel.parallelize import init_weights
from isogpt.training.settings import model_args_of


@dataclass(frozen=True)
class Start:
    """What a run starts from. Without a checkpoint and a pretrained model: initial weights."""

    name: str  # init_from, without auto:
    is_resume: bool = False
    checkpoint: OpenCheckpoint | None = None
    pretrained: nn.Module | None = None  # a whole model, from weights of transformers

    @property
    def resumed(self) -> OpenCheckpoint | None:
        """The checkpoint whose run continues; None for a new run."""
        return self.checkpoint if self.is_resume else None

    @property
    def description(self) -> str:
        """Where the weights are from, for the user."""
        if not self.checkpoint:
            return self.name
        return f"{self.checkpoint.found.path}, step {self.checkpoint.found.step}"

    def model_args(self, config: dict, vocab_size: int) -> dict:
        """The fields of GPTConfig of the model to start with, which settings describe if it is new."""
        if self.checkpoint:
            return self.checkpoint.run["model_args"]
        return self.pretrained.describe() if self.pretrained else model_args_of(config, vocab_size)

    def vocabulary(self, config: dict, data: Dataset, vocab_size: int) -> tuple[Vocabulary, list[str]]:
        """
        Find the vocabulary that the run's checkpoints record, and what a user should know about settings and
        data that differ from the checkpoint's (all ranks). Exits if the data does not fit.
        """
        weights_from = config["out_dir"] if self.is_resume else self.name
        with exit_together():
            found, notes = vocabulary_for_run(data, self.checkpoint, weights_from, vocab_size, self.is_resume)
            args = self.model_args(config, data.vocab_size)
            return found, differences(config, args, self.checkpoint, self.is_resume) + notes

    def check(self, model: nn.Module) -> None:
        """Exit if a checkpoint's weights do not fit the model, which is not divided yet (all ranks)."""
        with exit_together():
            if self.checkpoint:
                check_weights(self.checkpoint, model)

    def load(self, state: TrainState, seed: int) -> None:
        """
        Fill the state: all of it on a resume, otherwise the model's weights (all ranks). Exits if a file
        cannot be read or does not fit.

        Args:
            seed: determines initial weights.
        """
        if self.is_resume:
            do_together(partial(state.load, self.checkpoint))
            return
        if self.checkpoint:
            do_together(partial(restore_checkpoint, self.checkpoint, state.model, seed=seed))
        else:
            with exit_together():
                if self.pretrained:
                    load_weights(state.model, self.pretrained.state_dict(), seed)
                else:
                    init_weights(state.model, seed)
        state.slow_network.restart(state.step)


def find_start(
    init_from: str, out_dir: str, resume_step: int, ranks: Ranks, from_pretrained: Callable[[str], nn.Module]
) -> Start:
    """
    Find and open what `init_from` asks for (all ranks; rank 0 looks for a checkpoint). Exits with a message
    if a checkpoint is needed and there is none, or if weights cannot be loaded.

    Args:
        from_pretrained: loads a model with weights of transformers, by name.
    """
    name = init_from.removeprefix("auto:")
    found, is_resume, steps_seen = None, False, gather_objects(steps_in(out_dir))
    look = partial(look_for_start, init_from, out_dir, resume_step, ranks.launch)
    future = ThreadPoolExecutor(1).submit(look) if is_main() else None
    wait_together(future)  # verifying a large checkpoint can take longer than the collectives' timeout
    with exit_together():
        if future:
            found, is_resume, reports = future.result()
            for report in reports:
                print(f"warning: {report}", flush=True)
            if is_resume or init_from.split(":")[0] == "auto":
                check_views(out_dir, found.step if found else -1, steps_seen, rank_names(ranks.hosts))
    is_resume = broadcast(is_resume)
    found = share_found(found, out_dir if is_resume else name)
    if found:  # opening may verify a copy, which takes long
        return Start(name, is_resume, do_together(partial(open_checkpoint, found)))
    if name in ("scratch", "auto"):
        return Start(name)
    return Start(name, pretrained=do_together(partial(from_pretrained, name)))


def check_views(out_dir: str, step: int, steps_seen: list[list[int]], names: list[str]) -> None:
    """
    Check that no rank sees a newer checkpoint than rank 0 has chosen, unless rank 0 also sees it.

    Args:
        step: the checkpoint's step; -1: rank 0 has found none.
        steps_seen: the steps of the checkpoints in each rank's out_dir.

    Raises:
        ValueError: a rank sees a newer checkpoint: out_dir is not one folder.
    """
    newer = [[s for s in steps if s > step and s not in steps_seen[0]] for steps in steps_seen]
    found = [f"{name} sees step {', '.join(map(str, s))}" for name, s in zip(names, newer, strict=True) if s]
    if found:
        own = f"step {step} is the newest one" if step >= 0 else "there is none"
        raise ValueError(
            f"{'; '.join(found)} in out_dir {out_dir}, but on {names[0]} {own}: the ranks' out_dir is not "
            "the same "
            "folder. Set --out_dir= to a folder on a file system that all machines share, or copy the "
            "checkpoint "
            f"to the machine of {names[0]}"
        )
