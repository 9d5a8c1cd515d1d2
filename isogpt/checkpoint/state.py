"""The state of a run, which a checkpoint stores; and loading a checkpoint on any layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isogpt.checkpoint.ckpt_file import copied_state
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.common.files import reason_of
from isogpt.parallel.data_parallel import reshard
from isogpt.parallel.local_parts import LocalPart, local_part_of, local_parts_by_name, splits_of
from isogpt.parallel.slow_network import SlowNetwork
from isogpt.training import optimizer_state

WPE = "transformer.wpe.weight"  # the only parameter whose shape may change on a resume: a shorter context
Parts = dict[str, dict[str, LocalPart]]  # by a parameter's name and the name of what is kept for it


@dataclass
class TrainState:
    """
    The state of a run before step `progress.step`. `slow_network` is what gradient compression and islands
    keep from step to step.
    """

    model: nn.Module  # without the wrapper DistributedDataParallel
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    progress: Progress
    slow_network: SlowNetwork

    @property
    def step(self) -> int:
        """The next step."""
        return self.progress.step

    @property
    def is_excluded(self) -> bool:
        """Whether a rollback has excluded the next step."""
        return self.step in self.progress.skipped

    def load(self, checkpoint: OpenCheckpoint) -> None:
        """
        Continue with a checkpoint's state, on any layout; the best loss and the skipped steps stay. Each rank
        reads what it holds, and ranks do not communicate. Of the slow network, what the checkpoint lacks
        starts again; on a different number of ranks, each rank starts with the mean.

        Raises:
            ValueError: the checkpoint does not fit, or a file cannot be read or would run code.
        """
        restore_checkpoint(checkpoint, self.model, self.optimizers, self.slow_network.island)
        self.progress.rewind(checkpoint.run)
        ours = checkpoint.run["isogpt"]
        if ours.get("scaler"):
            self.scaler.load_state_dict(ours["scaler"])
        if checkpoint.is_sharded:
            shapes = saved_shapes(checkpoint)
            self.slow_network.restart(self.step, shapes)
            parts = flat({}, self.slow_network.saved_parts())
            read_shards(checkpoint, {name: parts[name] for name in parts if name in shapes}, shapes)
        else:  # a ckpt.pt contains nothing of the slow network
            self.slow_network.restart(self.step)

    def copy(self) -> dict[str, dict]:
        """
        Start to copy the state to the CPU in nanoGPT's form, from a rank that holds all of it. The copy is
        complete when the caller has waited for the device.
        """
        return copied_state(self.model, self.optimizers)

    def copy_parts(self) -> dict[str, LocalPart]:
        """Like `copy`, of what this rank holds, by the names that checkpoints in shards use."""
        weights = self.slow_network.saved_weights()
        moments = state_parts(self.model, self.optimizers, self.slow_network.island)
        parts = flat(weights, moments) | flat({}, self.slow_network.saved_parts())
        return {name: part.copy() for name, part in parts.items()}

    def describe(self) -> dict:
        """What a checkpoint stores of the state besides tensors, iter_num and best_val_loss."""
        scaler = {"scaler": self.scaler.state_dict()}
        return scaler | self.progress.describe()

    def advance(self) -> None:
        """Count a step that was taken."""
        self.progress.advance()

    def skip(self) -> None:
        """Leave out a step."""
        self.progress.skip()


def restore_checkpoint(
    checkpoint: OpenCheckpoint,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    island: tuple[int, int] = (0, 1),
    seed: int = 0,
) -> None:
    """
    Copy a checkpoint into a model, and into its optimizers if given, on any layout. Each rank reads what it
    holds, and ranks do not communicate. Position embeddings are cut if the model uses fewer. MLPs are copied
    to experts if the model contains experts; `seed` then determines the routers' weights.

    Args:
        island: (this rank's island, number of islands); islands have separate optimizer state.

    Raises:
        ValueError: the checkpoint does not fit, or a file cannot be read or would run code.
    """
    path = checkpoint.stored.path
    reshard(model)
    saved_by = checkpoint.run["config"].get("optimizer", "adamw")
    if optimizers and saved_by != optimizer_state.kind_of(optimizers):
        advice = f"set --optimizer={saved_by}, or start a new run from the weights with --init_from=FOLDER"
        raise ValueError(f"{path} was saved with optimizer {saved_by!r}: {advice}")
    moments = state_parts(model, optimizers, island)
    if checkpoint.is_sharded:
        shapes = saved_shapes(checkpoint)
        weights = weights_to_read(model, {name.removeprefix("model."): shapes[name] for name in shapes}, seed)
        read_shards(checkpoint, flat(weights, moments), shapes)
        return
    try:
        load_weights(model, checkpoint.weights, seed)
    except (KeyError, RuntimeError) as e:
        raise ValueError(f"{path} does not fit the model: {reason_of(e)[:200]}") from e
    try:
        load_moments(moments, checkpoint.optimizer)
    except (KeyError, RuntimeError) as e:
        raise ValueError(
            f"the optimizer's state in {path} does not fit the weights ({reason_of(e)[:200]}), which "
            "nanoGPT numbered differently before May 2023: start a new run from the weights, with "
            "--init_from=FOLDER and a different --out_dir"
        ) from e


def state_parts(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], island: tuple[int, int] = (0, 1)
) -> Parts:
    """
    The parts of the optimizers' tensors that this rank holds: see optimizer_state.state_by_name. With several
    islands, the parts are rows of a stack.
    """
    splits = {name: splits_of(p) for name, p in model.named_parameters()}
    return {
        name: {key: local_part_of(value, splits[name]).in_row(*island) for key, value in tensors.items()}
        for name, tensors in optimizer_state.state_by_name(model, optimizers).items()
    }


def flat(weights: dict[str, LocalPart], state: Parts) -> dict[str, LocalPart]:
    """
    The parts under their names in shards: model.NAME for weights, optim.NAME.KEY for what is kept for each.
    """
    parts = {f"model.{name}": part for name, part in weights.items()}
    for name, tensors in state.items():
        parts |= {f"optim.{name}.{key}": part for key, part in tensors.items()}
    return parts


def load_weights(model: nn.Module, weights: dict[str, Tensor], seed: int = 0) -> None:
    """Copy whole tensors by parameter name into a model on any layout, see `restore_checkpoint`."""
    shapes = {name: weight.shape for name, weight in weights.items()}
    for name, part in weights_to_read(model, shapes, seed).items():
        first_positions(name, part, weights[name].shape).put(weights[name])


def load_moments(moments: Parts, saved: dict[str, dict[str, Tensor]]) -> None:
    """Copy the whole tensors of optimizers' state, which are the same on all islands."""
    for name, tensors in saved.items():
        for key, part in moments.get(name, {}).items():
            whole = torch.as_tensor(tensors[key], dtype=torch.float32)
            first_positions(name, part.unstacked(), whole.shape).put(whole)


def weights_to_read(model: nn.Module, shapes: dict[str, torch.Size], seed: int) -> dict[str, LocalPart]:
    """
    The parts of saved weights that this rank reads, by the saved names. From a dense model, every expert is a
    copy of the MLP, and the routers are initialized.

    Args:
        shapes: of the saved weights.
    """
    parts = local_parts_by_name(model)
    if any(".router." in name for name in shapes):
        return parts
    for name in [name for name in parts if ".router." in name]:
        router = parts.pop(name)
        router.put(model.initial_weight(name, router.shape, seed))
    for name in [name for name in parts if ".experts." in name]:
        dense_name = name.replace(".experts.", ".")
        parts[dense_name] = parts.pop(name).as_copies_of(shapes[dense_name])
    return parts


def first_positions(name: str, part: LocalPart, saved: torch.Size) -> LocalPart:
    """This part of position embeddings in a longer saved tensor; any other part as it is."""
    if WPE in name and len(part.shape) > 1 and len(saved) > 1 and saved[-2] > part.shape[-2]:
        return LocalPart(torch.Size((*part.shape[:-2], *saved[-2:])), part.pieces, part.is_row)
    return part


def saved_shapes(checkpoint: OpenCheckpoint) -> dict[str, torch.Size]:
    """The shapes of the tensors in shards, see `flat`. Raises ValueError if a file cannot be read."""
    from isogpt.checkpoint import sharded_files

    return sharded_files.shapes(checkpoint.stored.path, checkpoint.unverified)


def read_shards(
    checkpoint: OpenCheckpoint, parts: dict[str, LocalPart], shapes: dict[str, torch.Size]
) -> None:
    """Fill parts from shards. Raises ValueError if a part is missing, or if a file cannot be read."""
    from isogpt.checkpoint import sharded_files

    parts = {name: first_positions(name, part, shapes.get(name, ())) for name, part in parts.items()}
    sharded_files.read(checkpoint.stored.path, parts, checkpoint.unverified)
