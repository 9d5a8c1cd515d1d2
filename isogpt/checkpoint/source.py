"""Open a checkpoint, and check that it fits the model."""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.forks import nanogpt_args, shortened, without_wrappers
from isogpt.checkpoint.search import StoredCheckpoint, check_same
from isogpt.launch.device import synchronize
from isogpt.parallel.local_parts import copy_to_cpu, local
from isogpt.training import optimizer_state

ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class OpenCheckpoint:
    """
    An open checkpoint. `run` is everything that is not a tensor: model_args, iter_num, best_val_loss, config,
    isogpt. `weights` and `optimizer` are full tensors by parameter name, memory-mapped; None if the tensors
    are in shards.
    """

    stored: StoredCheckpoint
    run: dict
    weights: dict[str, Tensor] | None = None
    optimizer: dict[str, dict[str, Tensor]] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the tensors are in shards."""
        return self.weights is None

    @property
    def unverified(self) -> dict | None:
        """The manifest by which a rank verifies shards that rank 0 has not read; None: they are verified."""
        return None if self.stored.is_verified else self.stored.manifest

    @property
    def dtype(self) -> str | None:
        """The dtype that the run computed in; None in nanoGPT's checkpoints."""
        return self.run["isogpt"].get("dtype")

    @property
    def unused_state(self) -> list[str]:
        """What a fork's optimizer stored besides AdamW's moments, such as max_exp_avg_sq with amsgrad."""
        if self.run["isogpt"] or not self.optimizer:  # only this program writes isogpt
            return []
        return sorted({key for moments in self.optimizer.values() for key in moments} - ADAMW_STATE)


def open_checkpoint(stored: StoredCheckpoint) -> OpenCheckpoint:
    """
    Read everything but the tensors.

    Raises:
        ValueError: the file does not have the form of a nanoGPT or isoGPT checkpoint, is not what rank 0
            found, or is a damaged copy of it.
    """
    check_same(stored)
    if stored.path.is_dir():
        return OpenCheckpoint(stored, stored.manifest["run"])
    path, state = stored.path, read_file(stored.path)
    if not isinstance(state["model"], dict) or not all(torch.is_tensor(w) for w in state["model"].values()):
        raise ValueError(f"{path}: the model is not a dict of tensors")
    weights = {without_wrappers(name): w for name, w in state["model"].items()}
    # nanoGPT without flash attention stores the causal mask of each block
    weights = {name: w for name, w in weights.items() if not name.endswith(".attn.bias")}
    run = {"isogpt": {}} | {k: v for k, v in state.items() if k not in ("model", "optimizer")}
    run["model_args"] = nanogpt_args(path, state["model_args"]) | run["isogpt"].get("model_args", {})
    if "isogpt" not in state:  # a fork's settings may use the same names as ours
        run["config"] = {k: v for k, v in state["config"].items() if v is not None and k != "optimizer"}
    return OpenCheckpoint(stored, run, weights, optimizer_state.by_name(weights, state.get("optimizer")))


def check_weights(source: OpenCheckpoint, model: nn.Module) -> None:
    """
    Check, as nanoGPT does, that a model that is not divided yet uses exactly the weights of a ckpt.pt.

    Raises:
        ValueError: weights are missing or not used.
    """
    if source.is_sharded:  # only this program writes shards
        return
    path, head, wte = source.stored.path, "lm_head.weight", "transformer.wte.weight"
    used = {name for name, _ in model.named_parameters()}
    dense = {name.replace(".experts.", ".") for name in used if ".router." not in name}
    wanted = used if source.run["model_args"].get("n_expert") else dense  # an MLP is copied to experts
    lacking = sorted(wanted - source.weights.keys())
    if lacking:
        raise ValueError(f"{path} does not fit the model: it lacks {shortened(lacking)}")
    if (
        model.config.tied
        and head in source.weights
        and not same_values(source.weights[head], source.weights[wte])
    ):
        raise ValueError(
            f"{path} does not fit the model: {head} and {wte} should be the same weights, but differ"
        )
    unused = sorted(source.weights.keys() - wanted - ({head} if model.config.tied else set()))
    if unused:
        raise ValueError(
            f"{path} does not fit the model: it also contains {shortened(unused)}, which nanoGPT's model "
            "does not contain"
        )


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal. Tied weights are a single tensor in the file: then nothing is read."""
    is_same_kind = a.shape == b.shape and a.dtype == b.dtype
    return is_same_kind and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def names_of_not_finite(model: nn.Module) -> list[str]:
    """The names of the parameters whose values on this rank are not all finite. Waits for the device once."""
    flags = {name: local(p).isfinite().all() for name, p in model.named_parameters()}
    is_finite = copy_to_cpu(torch.stack(list(flags.values())))
    synchronize(next(model.parameters()).device)
    return [name for name, ok in zip(flags, is_finite.tolist(), strict=True) if not ok]


def check_finite(model: nn.Module, where: object) -> None:
    """Raise ValueError if weights from `where` are not finite: nanoGPT also saves such weights."""
    if bad := names_of_not_finite(model):
        problem = f"weights in {where} are not finite ({shortened(bad)}), so that the model predicts nothing"
        raise ValueError(f"{problem}: use a checkpoint from before the loss became NaN")
