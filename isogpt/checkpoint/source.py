"""Open a checkpoint, read it into the parts that a rank holds, and check that it fits the model."""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from isogpt.checkpoint.ckpt_file import read_file, reading
from isogpt.checkpoint.search import StoredCheckpoint
from isogpt.common.console import shortened
from isogpt.launch.device import synchronize
from isogpt.parallel.local_parts import LocalPart, copy_to_cpu, local
from isogpt.training import optimizer_state

WPE = "transformer.wpe.weight"  # the only parameter whose shape may change on a resume: a shorter context
WRAPPERS = ("_orig_mod", "module")  # what torch.compile and DDP put around other modules


@dataclass(frozen=True)
class OpenCheckpoint:
    """
    An open checkpoint. `run` is everything that is not a tensor: model_args, iter_num, best_val_loss, config,
    isogpt.

    The tensors of a ckpt.pt, which are memory-mapped, have the names that they have in shards, see `flat`.
    """

    stored: StoredCheckpoint
    run: dict
    shapes: dict[str, torch.Size]  # of all tensors
    dtypes: dict[str, torch.dtype]  # of all tensors
    tensors: dict[str, Tensor] | None = None  # None: in shards

    @property
    def names_with_state(self) -> set[str]:
        """
        The names of the parameters for which something of an optimizer is saved; checkpoints of forks may
        contain nothing, or not AdamW's.
        """
        states = [name for name in self.shapes if name.startswith("optim.")]
        return {name.removeprefix("optim.").rpartition(".")[0] for name in states}

    def read(self, parts: dict[str, LocalPart]) -> None:
        """
        Fill parts by name, on any layout. Each rank reads what it holds, and ranks do not communicate. A row
        of a stack is filled from the saved row if there are as many, otherwise from the mean of the saved
        rows, or from a saved tensor that is no stack.

        Raises:
            ValueError: a tensor is missing or has a different shape, or a file is damaged or would run code.
        """
        if missing := sorted(parts.keys() - self.shapes.keys()):
            raise self.misfit(f"it lacks {shortened(missing)}")
        targets, stacks = {}, {}
        for name, part in parts.items():
            saved = self.shapes[name]
            target = first_positions(name, part, saved)
            if target.shape != saved:  # rows of a different number of ranks, or a row and no stack
                target = target.unstacked()
            if len(saved) == len(target.shape) + 1:
                target = stacks[name] = target.new_stack(saved[0])
            self.check_shape(name, target.shape)
            targets[name] = target
        if self.tensors is None:
            from isogpt.checkpoint import sharded_files

            sharded_files.read(self.stored.path, targets)
        else:
            for name, target in targets.items():
                target.put(self.tensors[name])
        for name, stack in stacks.items():
            parts[name].unstacked().put_mean(stack)

    def check_shape(self, name: str, shape: torch.Size) -> None:
        """Raise ValueError if a saved tensor has a different shape."""
        if shape != self.shapes[name]:
            saved = tuple(self.shapes[name])
            raise self.misfit(f"the shape of {name} is {saved}, not {tuple(shape)}")

    def misfit(self, problem: str) -> ValueError:
        """The error of a checkpoint whose tensors are not those of the model."""
        return ValueError(f"{self.stored.path} does not fit the model: {problem}")


def first_positions(name: str, part: LocalPart, saved: torch.Size) -> LocalPart:
    """This part of position embeddings in a longer saved tensor; any other part as it is."""
    if WPE not in name or min(len(part.shape), len(saved)) < 2:
        return part
    if saved[-2] <= part.shape[-2]:
        return part
    shape = torch.Size((*part.shape[:-2], *saved[-2:]))
    return LocalPart(shape, part.pieces, part.is_row)


def open_checkpoint(stored: StoredCheckpoint, config_class: type = dict) -> OpenCheckpoint:
    """
    Read everything but the tensors.

    Args:
        config_class: of the model into which the checkpoint will be read. Default: any.

    Raises:
        ValueError: the file does not have the form of a nanoGPT or isoGPT checkpoint, or `config_class` does
            not know its model, which edited code may have trained.
    """
    if stored.path.is_dir():
        from isogpt.checkpoint import sharded_files

        run = stored.manifest["run"]
        with reading(stored.path):
            config_class(**run["model_args"])
        return OpenCheckpoint(stored, run, *sharded_files.shapes(stored.path))
    state = read_file(stored.path)
    with reading(stored.path):
        config_class(**state["model_args"])
        weights = {}
        for name, weight in state.pop("model").items():
            # nanoGPT without flash attention stores the causal mask of each block
            if not name.endswith(".attn.bias"):
                parts = [part for part in name.split(".") if part not in WRAPPERS]
                weights[".".join(parts)] = weight
        moments = optimizer_state.by_name(weights, state.pop("optimizer", None))
        extra = state.pop("extra", {}) if "isogpt" in state else {}  # a fork of nanoGPT may use this name
        named = flat(weights, moments) | flat_extra(extra)
        tensors = {name: torch.as_tensor(value) for name, value in named.items()}  # step may be an int
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return OpenCheckpoint(stored, {"isogpt": {}} | state, shapes, dtypes, tensors)


def flat(weights: dict, state: dict[str, dict]) -> dict:
    """
    Tensors or parts under their names in a checkpoint: model.NAME for weights, optim.NAME.KEY for the
    optimizer's state of each.
    """
    named = {f"model.{name}": weight for name, weight in weights.items()}
    for name, kept in state.items():
        named |= {f"optim.{name}.{key}": value for key, value in kept.items()}
    return named


def flat_extra(extra: dict) -> dict:
    """
    What TrainState.extra contains under its names in a checkpoint: extra.KEY for a tensor, extra.KEY.NAME for
    each tensor of a dict. Raises ValueError if a key contains a dot.
    """
    named = {}
    for key, value in extra.items():
        if "." in key:
            raise ValueError(f"state.extra[{key!r}]: choose a key without a dot")
        if isinstance(value, dict):
            named |= {f"extra.{key}.{name}": part for name, part in value.items()}
        else:
            named[f"extra.{key}"] = value
    return named


def check_weights(source: OpenCheckpoint, model: nn.Module) -> None:
    """
    Check, as nanoGPT does, that a model that is not divided yet uses all weights of a checkpoint, in
    their shapes. `OpenCheckpoint.read` finds those that are missing.

    Raises:
        ValueError: weights are not used, or have a different shape.
    """
    used = {name for name, _ in model.named_parameters()}
    used |= {name.replace(".experts.", ".") for name in used}  # an MLP is copied to experts
    for name, p in model.named_parameters():  # before memory is allocated for shapes that do not fit
        saved_name = f"model.{name}"
        if saved := source.shapes.get(saved_name):
            part = first_positions(name, LocalPart(p.shape, ()), saved)
            source.check_shape(saved_name, part.shape)
    tensors = source.tensors or {}
    head = tensors.get("model.lm_head.weight")
    wte = tensors.get("model.transformer.wte.weight")
    if model.config.tied and head is not None and torch.equal(head, wte):
        used.add("lm_head.weight")
    names = {name.removeprefix("model.") for name in source.shapes if name.startswith("model.")}
    if unused := sorted(names - used):
        raise source.misfit(f"it also contains {shortened(unused)}")


def names_of_not_finite(model: nn.Module) -> list[str]:
    """The names of the parameters whose values on this rank are not all finite. Waits for the device once."""
    parameters = dict(model.named_parameters())
    flags = torch.stack([local(p).isfinite().all() for p in parameters.values()])
    is_finite = copy_to_cpu(flags)
    synchronize(flags.device)
    return [name for name, ok in zip(parameters, is_finite.tolist(), strict=True) if not ok]


def check_finite(model: nn.Module, where: object) -> None:
    """Raise ValueError if weights from `where` are not finite, since nanoGPT saves such weights, too."""
    if bad := names_of_not_finite(model):
        problem = f"weights in {where} are not finite ({shortened(bad)})"
        raise ValueError(f"{problem}: use an earlier checkpoint or other weights")
