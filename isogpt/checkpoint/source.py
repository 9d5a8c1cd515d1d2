"""Open a checkpoint, read it into the parts that a rank holds, and check that it fits the model."""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from isogpt.checkpoint.ckpt_file import read_file, reading
from isogpt.checkpoint.search import StoredCheckpoint
from isogpt.common.console import shortened
from isogpt.launch.device import synchronize
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.local_parts import LocalPart, copy_to_cpu, local
from isogpt.training import optimizer_state

Value = TypeVar("Value")  # a tensor, or the part of it that a rank holds
WPE = "transformer.wpe.weight"  # the only parameter whose shape may change on a resume: a shorter context
WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


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
    tensors: dict[str, Tensor] | None = None  # None: in shards

    def __post_init__(self) -> None:
        """Raise ValueError if GPTConfig does not know the model, which edited code may have trained."""
        with reading(self.stored.path):
            GPTConfig(**self.run["model_args"])

    @property
    def is_sharded(self) -> bool:
        """Whether the tensors are in shards."""
        return self.tensors is None

    @property
    def has_moments(self) -> bool:
        """Whether there is an optimizer's state; checkpoints of forks may contain none, or not AdamW's."""
        return any(name.startswith("optim.") for name in self.shapes)

    @property
    def names_with_state(self) -> set[str]:
        """The names of the parameters for which something of an optimizer is saved."""
        states = [name for name in self.shapes if name.startswith("optim.")]
        return {name.removeprefix("optim.").rpartition(".")[0] for name in states}

    @property
    def dtype(self) -> str | None:
        """The dtype that the run computed in; None in nanoGPT's checkpoints."""
        return self.run["isogpt"].get("dtype")

    def read(self, parts: dict[str, LocalPart]) -> None:
        """
        Fill parts by name, on any layout. Each rank reads what it holds, and ranks do not communicate. A row
        of a stack is filled from the saved row if there are as many, otherwise from the mean of the saved
        rows, or from a saved tensor that is no stack.

        Raises:
            ValueError: a tensor is missing or has a different shape, or a file is damaged or would run code.
        """
        path = self.stored.path
        if missing := sorted(parts.keys() - self.shapes.keys()):
            raise ValueError(f"{path} does not fit the model: it lacks {shortened(missing)}")
        targets, stacks = self.targets_for(parts)
        if self.is_sharded:
            from isogpt.checkpoint import sharded_files

            sharded_files.read(path, targets)
        else:
            for name, target in targets.items():
                target.put(self.tensors[name])
        for name, stack in stacks.items():
            parts[name].unstacked().put_mean(stack)

    def targets_for(self, parts: dict[str, LocalPart]) -> tuple[dict[str, LocalPart], dict[str, LocalPart]]:
        """
        What to fill with the saved tensors: the parts themselves, or new stacks for the rows of a different
        number of ranks. Returns (all of these, the stacks).
        """
        targets, stacks = {}, {}
        for name, part in parts.items():
            saved = self.shapes[name]
            part = first_positions(name, part, saved)
            targets[name] = part if part.shape == saved else part.unstacked()
            if len(saved) == len(part.unstacked().shape) + 1 and saved != part.shape:
                targets[name] = stacks[name] = part.unstacked().new_stack(saved[0])
            if targets[name].shape != saved:
                sizes = f"the shape of {name} is {tuple(saved)}, not {tuple(targets[name].shape)}"
                raise ValueError(f"{self.stored.path} does not fit the model: {sizes}")
        return targets, stacks


def first_positions(name: str, part: LocalPart, saved: torch.Size) -> LocalPart:
    """This part of position embeddings in a longer saved tensor; any other part as it is."""
    if WPE in name and len(part.shape) > 1 and len(saved) > 1 and saved[-2] > part.shape[-2]:
        return LocalPart(torch.Size((*part.shape[:-2], *saved[-2:])), part.pieces, part.is_row)
    return part


def open_checkpoint(stored: StoredCheckpoint) -> OpenCheckpoint:
    """
    Read everything but the tensors.

    Raises:
        ValueError: the file does not have the form of a nanoGPT or isoGPT checkpoint.
    """
    if stored.path.is_dir():
        from isogpt.checkpoint import sharded_files

        shapes = sharded_files.shapes(stored.path)
        return OpenCheckpoint(stored, stored.manifest["run"], shapes)
    state = read_file(stored.path)
    with reading(stored.path):
        weights = {without_wrappers(name): weight for name, weight in state["model"].items()}
        # nanoGPT without flash attention stores the causal mask of each block
        weights = {name: weight for name, weight in weights.items() if not name.endswith(".attn.bias")}
        run = {"isogpt": {}} | {k: v for k, v in state.items() if k not in ("model", "optimizer")}
        if "isogpt" not in state:  # a fork's settings may use the same names as ours
            run["config"] = {k: v for k, v in run["config"].items() if v is not None and k != "optimizer"}
        named = flat(weights, optimizer_state.by_name(weights, state.get("optimizer")))
        tensors = {name: torch.as_tensor(value) for name, value in named.items()}  # step may be an int
    return OpenCheckpoint(stored, run, {name: tensor.shape for name, tensor in tensors.items()}, tensors)


def without_wrappers(name: str) -> str:
    """A parameter's name without the names of modules that torch.compile and DDP put around others."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def flat(weights: dict[str, Value], state: dict[str, dict[str, Value]]) -> dict[str, Value]:
    """
    Tensors or parts under their names in a checkpoint: model.NAME for weights, optim.NAME.KEY for the
    optimizer's state of each.
    """
    named = {f"model.{name}": weight for name, weight in weights.items()}
    for name, kept in state.items():
        named |= {f"optim.{name}.{key}": value for key, value in kept.items()}
    return named


def check_weights(source: OpenCheckpoint, model: nn.Module) -> None:
    """
    Check, as nanoGPT does, that a model that is not divided yet uses exactly the weights of a ckpt.pt.

    Raises:
        ValueError: weights are missing or not used.
    """
    path = source.stored.path
    for name, parameter in model.named_parameters():  # before memory is allocated for shapes that do not fit
        saved, shape = source.shapes.get(f"model.{name}", parameter.shape), parameter.shape
        is_longer = name == WPE and saved[1:] == shape[1:] and saved[0] > shape[0]
        if saved != shape and not is_longer:
            sizes = f"the shape of {name} is {tuple(saved)}, not {tuple(shape)}"
            raise ValueError(f"{path} does not fit the model: {sizes}")
    if source.is_sharded:  # only this program writes shards
        return
    wanted = {name for name, _ in model.named_parameters()}
    if model.config.n_expert and not source.run["model_args"].get("n_expert"):  # MLPs are copied to experts
        wanted = {name.replace(".experts.", ".") for name in wanted if ".router." not in name}
    names = {name.removeprefix("model.") for name in source.tensors if name.startswith("model.")}
    head, wte = (source.tensors.get(f"model.{name}") for name in (HEAD, WTE))
    if model.config.tied and head is not None and torch.equal(head, wte):
        names.remove(HEAD)
    for problem, others in (("lacks", wanted - names), ("also contains", names - wanted)):
        if others:
            raise ValueError(f"{path} does not fit the model: it {problem} {shortened(sorted(others))}")


def names_of_not_finite(model: nn.Module) -> list[str]:
    """The names of the parameters whose values on this rank are not all finite. Waits for the device once."""
    flags = {name: local(p).isfinite().all() for name, p in model.named_parameters()}
    is_finite = copy_to_cpu(torch.stack(list(flags.values())))
    synchronize(next(model.parameters()).device)
    return [name for name, ok in zip(flags, is_finite.tolist(), strict=True) if not ok]


def check_finite(model: nn.Module, where: object) -> None:
    """Raise ValueError if weights from `where` are not finite, since nanoGPT saves such weights, too."""
    if bad := names_of_not_finite(model):
        problem = f"weights in {where} are not finite ({shortened(bad)}), so the model predicts nothing"
        raise ValueError(f"{problem}: use a checkpoint from before the loss became NaN")
