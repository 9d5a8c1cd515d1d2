"""Write a ckpt.pt with torch.save, and read nanoGPT's and ours, which may be damaged or hostile."""

import math
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from isogpt.common.files import HashedFile, check_extent, reason_of, regular_file
from isogpt.parallel.local_parts import copy_to_cpu
from isogpt.training import optimizer_state

# nanoGPT's fields of model_args
MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """
    Raise ValueError if the block cannot read a checkpoint: what is damaged, hostile or of a different program
    raises nearly anything.
    """
    try:
        yield
    except Exception as e:
        # of a refusal to run code, PyTorch's text is about how to run it
        refused = re.search(r"GLOBAL (\S+)", str(e))
        reason = f"it contains {refused[1]}" if refused else reason_of(e)[:300]
        problem = f"{path} is not a checkpoint that isoGPT reads ({reason}): see docs/migrating.md"
        raise ValueError(problem) from e


def read_file(path: Path, verify: bool = False) -> dict:
    """
    Read the dict in a ckpt.pt, memory-mapped. Nothing in the file runs: weights_only accepts only tensors and
    plain values.

    Args:
        verify: check the file's checksums, which reads the whole file.

    Raises:
        ValueError: the file is damaged, would run code, or is not a checkpoint.
    """
    with reading(path):
        open(path, "rb", opener=regular_file).close()
        if verify and (bad := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"the checksum of the record {bad} does not match")
        state = check_extent(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        # before February 2023, nanoGPT had no setting bias, and its models always had biases
        args = {"bias": True, "dropout": 0.0} | state.get("model_args", {})
        if others := sorted(args.keys() ^ MODEL_ARGS):  # of a fork, they may change what the model computes
            raise ValueError(f"model_args lacks or also contains {', '.join(others)}")
        return {
            **state,
            "model_args": args | state.get("isogpt", {}).get("model_args", {}),
            "iter_num": int(state.get("iter_num", 0)),
            "best_val_loss": float(state.get("best_val_loss", math.inf)),  # nanoGPT stores a tensor
            "config": dict(state.get("config") or {}),
        }


def nanogpt_state(
    run: dict, model: nn.Module, optimizers: list[Optimizer], extra: dict | None = None, copy: bool = False
) -> dict:
    """
    The state in nanoGPT's form, which nanoGPT's train.py and sample.py load if the model is a GPT-2.

    Args:
        run: the part of the state that is not tensors.
        extra: see TrainState.extra, which nanoGPT does not read.
        copy: start to copy the tensors to the CPU, so that a training run can go on while they are written;
            the copy is complete when the caller has waited for the device. False: they are those of the model
            and the optimizers.
    """
    taken = copy_to_cpu if copy else torch.Tensor.detach
    weights = {name: taken(p.detach()) for name, p in model.named_parameters()}
    if model.config.tied:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    state = optimizer_state.saved_state(model, optimizers)
    for number, kept in state["state"].items():
        state["state"][number] = {key: taken(tensor) for key, tensor in kept.items()}
    copied = tree_map(lambda tensor: taken(tensor.detach()), extra or {})
    others = dict(run["model_args"])
    args = {name: others.pop(name) for name in MODEL_ARGS}
    ours = run["isogpt"] | {"model_args": others}
    tensors = {"model": weights, "optimizer": state} | ({"extra": copied} if copied else {})
    return tensors | run | {"model_args": args, "isogpt": ours}


def write_file(path: Path, state: dict) -> dict:
    """Write a ckpt.pt to the disk, in a new folder. Returns its entry in the manifest, by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with HashedFile(path) as file:
            torch.save(state, file)
            os.fsync(file.fileno())
    except RuntimeError as e:  # torch.save hides an OSError, such as a full disk
        raise OSError(reason_of(e)) from e
    return {path.name: file.entry()}
