"""Open the checkpoint that a run starts from, and check that it fits the model."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.folder import look_for_start
from isogpt.checkpoint.forks import nanogpt_args, some_of, without_wrappers
from isogpt.checkpoint.manifest import steps_in
from isogpt.checkpoint.search import FoundCheckpoint, check_same, share_found
from isogpt.launch.device import synchronize
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.launch.together import (
    broadcast,
    do_together,
    exit_together,
    gather_objects,
    is_main,
    wait_together,
)
from isogpt.parallel.local_parts import copy_to_cpu, local
from isogpt.training import optimizer_state

ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class OpenCheckpoint:
    """
    An open checkpoint. `run` is everything that is not a tensor: model_args, iter_num, best_val_loss, config,
    isogpt. `weights` and `optimizer` are full tensors by parameter name, memory-mapped; None if the tensors
    are in shards. `notes` are sentences about parts of a fork's checkpoint that are not used.
    """

    found: FoundCheckpoint
    run: dict
    weights: dict[str, Tensor] | None = None
    optimizer: dict[str, dict[str, Tensor]] | None = None
    notes: tuple[str, ...] = ()

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


def find_start(
    init_from: str, out_dir: str, resume_step: int, ranks: Ranks
) -> tuple[OpenCheckpoint | None, bool]:
    """
    Find and open the checkpoint that `init_from` asks for (all ranks; rank 0 looks). Exits with a message if
    a checkpoint is needed and there is none.

    Returns:
        (the checkpoint or None, whether the run resumes from it or only starts with its weights)
    """
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
    found = share_found(found, out_dir if is_resume else init_from.removeprefix("auto:"))
    if not found:
        return None, is_resume
    return do_together(partial(open_checkpoint, found)), is_resume  # may verify a copy, which takes long


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


def open_checkpoint(found: FoundCheckpoint) -> OpenCheckpoint:
    """
    Read everything but the tensors.

    Raises:
        ValueError: the file does not have the form of a nanoGPT or isoGPT checkpoint, is not what rank 0
            found, or is a damaged copy of it.
    """
    check_same(found)
    if found.path.is_dir():
        return OpenCheckpoint(found, found.manifest["run"])
    path, state = found.path, read_file(found.path)
    if not isinstance(state["model"], dict) or not all(torch.is_tensor(w) for w in state["model"].values()):
        raise ValueError(f"{path}: its model is not a dict of tensors")
    weights = {without_wrappers(name): w for name, w in state["model"].items()}
    # nanoGPT without flash attention stores the causal mask of each block
    weights = {name: w for name, w in weights.items() if not name.endswith(".attn.bias")}
    run = {"isogpt": {}} | {k: v for k, v in state.items() if k not in ("model", "optimizer")}
    args, notes = nanogpt_args(path, state["model_args"])
    run["model_args"] = args | run["isogpt"].get("model_args", {})
    if "isogpt" not in state:  # a fork's settings may have the names of ours
        run["config"] = {k: v for k, v in state["config"].items() if v is not None and k != "optimizer"}
    return OpenCheckpoint(
        found, run, weights, optimizer_state.by_name(weights, state.get("optimizer")), notes
    )


def check_weights(source: OpenCheckpoint, model: nn.Module) -> None:
    """
    Check, as nanoGPT does, that a model that is not divided yet uses exactly the weights of a ckpt.pt.

    Raises:
        ValueError: weights are missing or not used.
    """
    if source.weights is None:  # in shards, which only this program writes
        return
    path, head, wte = source.found.path, "lm_head.weight", "transformer.wte.weight"
    used = {name for name, _ in model.named_parameters()}
    dense = {name.replace(".experts.", ".") for name in used if ".router." not in name}
    wanted = used if source.run["model_args"].get("n_expert") else dense  # an MLP is copied to experts
    lacking = sorted(wanted - source.weights.keys())
    if lacking:
        raise ValueError(f"{path} does not fit the model: it has no {some_of(lacking)}")
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
            f"{path} does not fit the model: it also contains {some_of(unused)}, which nanoGPT's model "
            f"does not have"
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
        problem = f"weights in {where} are not finite ({some_of(bad)}), so that the model predicts nothing"
        raise ValueError(f"{problem}: use a checkpoint from before the loss became NaN")
