"""The state of a run, which a checkpoint stores; and loading a checkpoint on any layout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.source import OpenCheckpoint, first_positions, flat, flat_extra
from isogpt.parallel.compression import Compression
from isogpt.parallel.data_parallel import kept_weights, reshard
from isogpt.parallel.local_parts import (
    LocalPart,
    init_part,
    local,
    local_part_of,
    local_parts_by_name,
    splits_of,
)
from isogpt.parallel.local_sgd import Islands
from isogpt.training import optimizer_state
from isogpt.training.optimizer_class import evaluates_average, set_mode


@dataclass
class TrainState:
    """
    The state of a run before step `progress.step`. A run compresses gradients, or trains on islands, or does
    neither.
    """

    model: nn.Module  # without the wrapper DistributedDataParallel
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    progress: Progress
    compression: Compression | None
    islands: Islands | None
    # what a checkpoint holds besides: {key: tensor that is equal on all ranks, or {name of a parameter:
    # tensor like the parameter on this rank}}. A resume fills it, on any layout
    extra: dict[str, Tensor | dict[str, Tensor]] = field(default_factory=dict)
    evaluated: dict[str, Tensor] | None = None  # weights to evaluate in place of the model's, as in `extra`

    @property
    def step(self) -> int:
        """The first step whose outcome is not known: all steps before it are in the state."""
        return self.progress.step

    @property
    def next_step(self) -> int:
        """The next step to launch: `step`, or the one after it if `step` is launched."""
        return self.progress.step + self.progress.launched

    def skip(self) -> None:
        """Leave out the next step: `batches` does not contain what it would have read."""
        self.progress.skip()

    def advance(self) -> None:
        """Count a step that was taken, and average the weights of islands if that is due (all ranks)."""
        if self.islands:
            self.islands.after_step(self.step)
        self.progress.advance()

    def load(self, checkpoint: OpenCheckpoint) -> None:
        """
        Continue with a checkpoint's tensors, on any layout, after `Progress.begin`. Each rank reads what it
        holds, and ranks do not communicate. What the checkpoint lacks of the slow network's state starts
        anew; on a different number of ranks, each of them starts with the mean.

        Raises:
            ValueError: the checkpoint does not fit, or a file cannot be read or would run code.
        """
        restore_checkpoint(checkpoint, self.model, self.optimizers, island=self.island)
        if scaler := checkpoint.run["isogpt"].get("scaler"):
            self.scaler.load_state_dict(scaler)
        # begins with the weights that were read, and allocates what shards hold of the slow network
        self.restart(checkpoint.shapes)
        parts = flat({}, self.parts_of_network())
        checkpoint.read({name: part for name, part in parts.items() if name in checkpoint.shapes})
        self.extra = read_extra(checkpoint, self.model, self.island)

    def restart(self, saved: dict[str, torch.Size]) -> None:
        """
        Start from the model's weights, without compression errors or an outer momentum. Tensors are allocated
        for what a checkpoint saved, by names (see source.flat) and shapes.
        """
        if self.compression:
            self.compression.restart(self.step, saved)
        if self.islands:
            self.islands.restart()

    @property
    def island(self) -> tuple[int, int]:
        """(the number of this rank's island, how many islands there are)."""
        return self.islands.place if self.islands else (0, 1)

    def parts_of_network(self) -> dict[str, dict[str, LocalPart]]:
        """What this rank holds of the state of compression or islands."""
        sends = self.compression or self.islands
        return sends.saved_parts() if sends else {}

    def parts_of_extra(self) -> dict[str, LocalPart]:
        """
        What this rank holds of `extra`. With several islands, tensors like parameters are rows of a stack.

        Raises:
            ValueError: a key contains a dot, a value is not a tensor, or does not have its parameter's shape.
        """
        return parts_of_extra(self.model, self.extra, self.island)

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """
        In the block, the model contains the weights to evaluate (all ranks): with islands, those of the last
        average; with an optimizer that has `eval`, those of its average; or those in `evaluated`. Afterwards,
        the weights have the same bits as before.
        """
        if not (self.islands or self.evaluated or evaluates_average(self.optimizers)):
            yield
            return
        with kept_weights(self.model):
            if self.islands:
                self.islands.put_outer_weights()
            set_mode(self.optimizers, "eval")
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            for name, weight in (self.evaluated or {}).items():
                local(parameters[name].detach()).copy_(local(weight.detach()))
            try:
                yield
            finally:
                set_mode(self.optimizers, "train")

    def parts(self) -> dict[str, LocalPart]:
        """What this rank holds of a checkpoint, by the names that checkpoints in shards use."""
        moments = optimizer_state.state_by_name(self.model, self.optimizers)
        moments = parts_of_state(self.model, moments, self.island)
        weights = self.islands.saved_weights() if self.islands else local_parts_by_name(self.model)
        return flat(weights, moments) | flat({}, self.parts_of_network()) | self.parts_of_extra()


def parts_of_extra(model: nn.Module, extra: dict, island: tuple[int, int]) -> dict[str, LocalPart]:
    """See TrainState.parts_of_extra."""
    parameters, parts = dict(model.named_parameters(remove_duplicate=False)), {}  # with a head tied to wte
    for saved, value in flat_extra(extra).items():
        if not torch.is_tensor(value):
            raise ValueError(f"state.{saved} is not a tensor: use torch.tensor(...)")
        p = parameters.get("".join(saved.split(".", 2)[2:]))
        if p is not None and p.shape != value.shape:
            raise ValueError(f"state.{saved} has the shape {tuple(value.shape)}, not {tuple(p.shape)}")
        part = local_part_of(value.detach(), () if p is None else splits_of(p))
        parts[saved] = part if p is None else part.in_row(*island)
    return parts


def read_extra(
    checkpoint: OpenCheckpoint, model: nn.Module, island: tuple[int, int] = (0, 1)
) -> dict[str, Tensor | dict[str, Tensor]]:
    """This rank's part of what TrainState.extra contained; for errors and `island` see restore_checkpoint."""
    parameters, extra = dict(model.named_parameters(remove_duplicate=False)), {}
    for saved, shape in checkpoint.shapes.items():
        kind, key, name = (*saved.split(".", 2), "")[:3]
        if kind != "extra" or (f"model.{name}" in checkpoint.shapes and name not in parameters):
            continue  # with pp, a different rank holds the parameter
        like, dtype = parameters.get(name), checkpoint.dtypes[saved]
        if like is None:
            new = torch.empty(shape, dtype=dtype, device=next(model.parameters()).device)
        else:
            new = torch.empty_like(like, dtype=dtype, requires_grad=False)
        if name:
            extra.setdefault(key, {})[name] = new
        else:
            extra[key] = new
    checkpoint.read(parts_of_extra(model, extra, island))
    return extra


def restore_checkpoint(
    checkpoint: OpenCheckpoint,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    seed: int = 0,
    island: tuple[int, int] = (0, 1),
) -> None:
    """
    Copy a checkpoint into a model, and into its optimizers if given, on any layout. For errors see
    `TrainState.load`.

    Args:
        seed: determines the routers' weights if MLPs are copied to experts.
        island: (this rank's island, number of islands); islands have separate optimizer state.
    """
    saved_by = checkpoint.run["config"].get("optimizer", "adamw")
    if optimizers and not optimizer_state.is_of_kind(optimizers, saved_by):
        raise ValueError(
            f"{checkpoint.stored.path} was saved with optimizer {saved_by!r:.300}: set "
            f"--optimizer={saved_by!s:.300}, or "
            "start a new run from the weights with --init_from=FOLDER"
        )
    reshard(model)
    shapes = {name.removeprefix("model."): shape for name, shape in checkpoint.shapes.items()}
    names = checkpoint.names_with_state
    with optimizer_state.filled_state(model, optimizers if names else (), names) as state:
        weights = weights_to_read(model, shapes, seed)
        checkpoint.read(flat(weights, parts_of_state(model, state, island)))


def parts_of_state(
    model: nn.Module, state: dict[str, dict[str, Tensor]], island: tuple[int, int]
) -> dict[str, dict[str, LocalPart]]:
    """
    The parts of the optimizers' tensors that this rank holds, of those that optimizer_state has returned by
    name. With several islands, the parts are rows of a stack.
    """
    splits = {name: splits_of(p) for name, p in model.named_parameters()}
    return {
        name: {key: local_part_of(value, splits[name]).in_row(*island) for key, value in tensors.items()}
        for name, tensors in state.items()
    }


def load_weights(model: nn.Module, weights: dict[str, Tensor], seed: int = 0) -> None:
    """Copy whole tensors by parameter name into a model on any layout, see `restore_checkpoint`."""
    shapes = {name: weight.shape for name, weight in weights.items()}
    for name, part in weights_to_read(model, shapes, seed).items():
        first_positions(name, part, weights[name].shape).put(weights[name])


def weights_to_read(model: nn.Module, shapes: dict[str, torch.Size], seed: int) -> dict[str, LocalPart]:
    """
    The parts of saved weights that this rank reads, by the saved names. From a dense model, every expert is a
    copy of the MLP, and the routers are initialized.

    Args:
        shapes: of the saved weights.
    """
    parts = local_parts_by_name(model)
    if not model.config.n_expert or any(".router." in name for name in shapes):
        return parts
    for name in [name for name in parts if ".router." in name]:
        init_part(model, name, parts.pop(name), seed)
    for name in [name for name in parts if ".experts." in name]:
        dense_name = name.replace(".experts.", ".")
        parts[dense_name] = parts.pop(name).as_copies_of(shapes[dense_name])
    return parts
