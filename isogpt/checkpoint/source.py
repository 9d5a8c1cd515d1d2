"""Open a checkpoint, read it into the parts that a rank holds, and check that it fits the model."""

from dataclasses import dataclass, fields
from math import prod
from numbers import Integral, Real
from typing import TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.forks import nanogpt_args, without_wrappers
from isogpt.checkpoint.manifest import LARGEST_STEP
from isogpt.checkpoint.search import StoredCheckpoint
from isogpt.common.console import shortened, visible
from isogpt.launch.device import synchronize
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.local_parts import LocalPart, copy_to_cpu, local
from isogpt.training import optimizer_state
from isogpt.training.recent_steps import is_description

Value = TypeVar("Value")  # a tensor, or the part of it that a rank holds
WPE = "transformer.wpe.weight"  # the only parameter whose shape may change on a resume: a shorter context
WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
# the types of what is recorded: in model_args those of GPTConfig's defaults,
# in config and isogpt those that a resume reads
KIND_OF = {int: Integral, float: Real, bool: Integral, str: str}
OF_CONFIG = dict.fromkeys(("gradient_accumulation_steps", "batch_size", "block_size", "eval_iters"), Integral)
OF_CONFIG |= {"optimizer": str, "dataset": str}
OF_ISOGPT = {
    "best_step": int,
    "documents": dict,
    "dtype": str,
    "kind_of_device": dict,
    "left_out": list,
    "measures": dict,
    "model_args": dict,
    "position": int,
    "recent_steps": dict,
    "scaler": dict,
    "shares": list,
    "shuffle_version": int,
    "sources": dict,
    "tokens": int,
    "vocabulary": dict | None,
    "wandb_id": str | None,
}


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
        """
        Raise ValueError if the model has settings that GPTConfig lacks, or what is recorded has other types
        or sizes than a run records, since building and reading the model could then take forever.
        """
        if problem := problem_of_run(self.run) or problem_of_sizes(self):
            raise ValueError(f"{self.stored.path} cannot be loaded: {problem}")
        unknown = self.run["model_args"].keys() - {known.name for known in fields(GPTConfig)}
        if unknown:
            raise ValueError(
                f"{self.stored.path} contains a model with {shortened(sorted(unknown))}, which GPTConfig in "
                "isogpt/nn/architecture.py lacks: load it with the code that trained it"
            )

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


def problem_of_run(run: dict) -> str:
    """The first value of a wrong type in what a checkpoint records besides tensors; '' if there is none."""
    fields_of_model = {known.name: known.default for known in fields(GPTConfig)}
    kinds = {name: KIND_OF.get(type(default), object) for name, default in fields_of_model.items()}
    for part, types in (("model_args", kinds), ("config", OF_CONFIG), ("isogpt", OF_ISOGPT)):
        if not isinstance(run.get(part), dict):
            return f"{part} is not a dict"
        for name, kind in types.items():
            if name in run[part] and not isinstance(run[part][name], kind):
                return f"{name} in {part} is {run[part][name]!r:.60}"
    if not all(isinstance(step, int) for step in run["isogpt"].get("left_out", [])):
        return "left_out in isogpt does not contain steps"
    if not all(isinstance(share, Real) for share in run["isogpt"].get("shares", [])):
        return "shares in isogpt does not contain numbers"
    if "recent_steps" in run["isogpt"] and not is_description(run["isogpt"]["recent_steps"]):
        return "recent_steps in isogpt does not contain the losses and gradient norms of steps"
    if not all(map(is_source, run["isogpt"].get("sources", {}).items())):
        return "sources in isogpt does not contain digests and quotas of data sets"
    step, loss = run.get("iter_num"), run.get("best_val_loss")
    if not (isinstance(step, int) and 0 <= step < LARGEST_STEP and isinstance(loss, Real)):
        return f"iter_num is {step!r:.60}, and best_val_loss {loss!r:.60}"
    return ""


def is_source(item: tuple) -> bool:
    """Whether a name and a value are what a run records of a source of its mixture."""
    name, value = item
    if not (isinstance(name, str) and isinstance(value, dict)):
        return False
    return isinstance(value.get("digest"), str) and isinstance(value.get("of_1000"), int)


def problem_of_sizes(checkpoint: "OpenCheckpoint") -> str:
    """
    Which tensor is larger than the files that contain it, or which size of the model no tensor has; '' if all
    are possible.
    """
    path = checkpoint.stored.path
    files = path.iterdir() if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    for name, shape in checkpoint.shapes.items():
        if prod(max(1, length) for length in shape) > size:  # at least a byte each
            return f"the shape of {visible(name)} is {tuple(shape)}, but there are only {size:,} bytes"
    args = checkpoint.run["model_args"]
    longest = max((max(shape, default=1) for shape in checkpoint.shapes.values()), default=0)
    widths = ("n_embd", "vocab_size", "n_head", "n_kv_head", "n_hidden", "n_expert")
    limits = dict.fromkeys(widths, longest)
    limits["n_layer"] = len(checkpoint.shapes)
    for name, limit in limits.items():
        if args.get(name, 0) > limit:
            return f"{name} in model_args is {args[name]}, which does not fit the weights"
    return ""


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
    path, state = stored.path, read_file(stored.path)
    saved = state["model"]
    if not isinstance(saved, dict) or not all(isinstance(n, str) and is_plain(w) for n, w in saved.items()):
        raise ValueError(f"{path}: the model is not a dict of tensors")
    weights = {without_wrappers(name): w for name, w in saved.items()}
    # nanoGPT without flash attention stores the causal mask of each block
    weights = {name: w for name, w in weights.items() if not name.endswith(".attn.bias")}
    run = {"isogpt": {}} | {k: v for k, v in state.items() if k not in ("model", "optimizer")}
    if not isinstance(run["isogpt"].get("model_args", {}), dict):
        raise ValueError(f"{path} cannot be loaded: model_args in isogpt is not a dict")
    run["model_args"] = nanogpt_args(path, state["model_args"]) | run["isogpt"].get("model_args", {})
    if "isogpt" not in state:  # a fork's settings may use the same names as ours
        run["config"] = {
            name: value
            for name, value in state["config"].items()
            if value is not None and name != "optimizer" and isinstance(value, OF_CONFIG.get(name, object))
        }
    named = flat(weights, optimizer_state.by_name(weights, state.get("optimizer")))
    try:
        tensors = {name: torch.as_tensor(value) for name, value in named.items()}  # step may be an int
    except (RuntimeError, TypeError, ValueError) as e:
        raise ValueError(f"{path}: the state of the optimizer does not consist of numbers ({e})") from e
    if unusable := [name for name, tensor in tensors.items() if not is_plain(tensor)]:
        raise ValueError(f"{path} contains tensors that are not plain numbers: {shortened(unusable)}")
    return OpenCheckpoint(stored, run, {name: tensor.shape for name, tensor in tensors.items()}, tensors)


def is_plain(value: object) -> bool:
    """Whether a value is a tensor of real numbers in memory."""
    return (
        torch.is_tensor(value)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_complex() or value.is_quantized)
    )


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
    used = {name for name, _ in model.named_parameters()}
    wanted = used
    if model.config.n_expert and not source.run["model_args"].get("n_expert"):  # MLPs are copied to experts
        wanted = {name.replace(".experts.", ".") for name in used if ".router." not in name}
    names = {name.removeprefix("model.") for name in source.tensors if name.startswith("model.")}
    if lacking := sorted(wanted - names):
        raise ValueError(f"{path} does not fit the model: it lacks {shortened(lacking)}")
    unused = names - wanted
    if model.config.tied and HEAD in unused:
        unused.remove(HEAD)
        if not torch.equal(source.tensors[f"model.{HEAD}"], source.tensors[f"model.{WTE}"]):
            raise ValueError(
                f"{path} does not fit the model: {HEAD} and {WTE} should be the same weights, but differ"
            )
    if unused:
        raise ValueError(
            f"{path} does not fit the model: it also contains {shortened(sorted(unused))}, which nanoGPT's "
            "model does not contain"
        )


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
