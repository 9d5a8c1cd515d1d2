"""Write a ckpt.pt with torch.save, and read nanoGPT's and ours, which may be damaged or hostile."""

import math
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from isogpt.common.files import HashedFile, reason_of, regular_file
from isogpt.parallel.local_parts import copy_to_cpu
from isogpt.training import optimizer_state

MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")  # required in model_args
# A numpy scalar, such as a setting computed by numpy, is plain data. NumPy 1 called the module numpy.core.
SCALAR = np._core.multiarray.scalar if hasattr(np, "_core") else np.core.multiarray.scalar
PLAIN = (
    (SCALAR, "numpy._core.multiarray.scalar"),
    (SCALAR, "numpy.core.multiarray.scalar"),
    np.dtype,
    *{type(np.dtype(kind)) for kind in (*np.typecodes["AllInteger"], *np.typecodes["Float"], "?")},
)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """
    Raise ValueError if the block cannot read a checkpoint: what is damaged, hostile or of a different program
    raises nearly anything.
    """
    try:
        yield
    except Exception as e:
        first_line = (str(e).splitlines() or [type(e).__name__])[0][:300]  # PyTorch's has several, with codes
        refused = re.search(r"GLOBAL (\S+)", str(e))
        reason = f"it contains {refused[1]}" if refused else first_line
        raise ValueError(
            f"{path} is not a checkpoint that isoGPT reads ({reason}): see docs/migrating.md"
        ) from e


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
        with torch.serialization.safe_globals(PLAIN):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if missing := [key for key in ("model", "model_args") if key not in state]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        best = float(state.get("best_val_loss") or math.inf)  # nanoGPT stores a tensor, which may be NaN
        config, ours = state.get("config") or {}, state.get("isogpt", {})
        return {
            **state,
            "model_args": nanogpt_args(state["model_args"]) | ours.get("model_args", {}),
            "iter_num": whole_number(state.get("iter_num", 0)),
            "best_val_loss": math.inf if math.isnan(best) else best,
            "config": {name: plain(value) for name, value in config.items()},
        }


def plain(value: object) -> object:
    """A setting without numpy's or PyTorch's type, which JSON does not know."""
    is_number = isinstance(value, np.generic) or (torch.is_tensor(value) and value.dim() == 0)
    return value.item() if is_number else value


def whole_number(value: object) -> int:
    """A size or a step, which may be stored as a float or a tensor. Raises ValueError if it is not whole."""
    if int(value) != value:
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def nanogpt_args(saved: dict) -> dict:
    """
    Return nanoGPT's fields of the model_args in a ckpt.pt. Raises ValueError if there are others, of a fork,
    which may change what the model computes.
    """
    # before February 2023, nanoGPT had no setting bias, and its models always had biases
    saved = {"bias": True, "dropout": 0.0} | saved
    if absent := [name for name in MODEL_ARGS if name not in saved]:
        raise ValueError(f"model_args lacks {', '.join(absent)}")
    if others := sorted(saved.keys() - {*MODEL_ARGS, "dropout"}):
        raise ValueError(f"model_args contains {', '.join(others)}")
    args = {name: whole_number(saved[name]) for name in MODEL_ARGS}
    return args | {"bias": bool(saved["bias"]), "dropout": float(saved["dropout"] or 0.0)}


def copied_state(run: dict, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """
    Start to copy `nanogpt_state` to the CPU, so that a training run can go on while it is written. The copy
    is complete when the caller has waited for the device.
    """
    state, copies = nanogpt_state(run, model, optimizers), {}
    for tensors in (state["model"], *state["optimizer"]["state"].values()):
        for name, tensor in tensors.items():
            if tensor not in copies:  # the head can be tied to wte
                copies[tensor] = copy_to_cpu(tensor)
            tensors[name] = copies[tensor]
    return state


def nanogpt_state(run: dict, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """
    The state in nanoGPT's form, which nanoGPT's train.py and sample.py load if the model is a GPT-2. The
    tensors are those of the model and the optimizers, not copies.

    Args:
        run: the part of the state that is not tensors.
    """
    weights = {name: p.detach() for name, p in model.named_parameters()}
    state = optimizer_state.saved_state(model, optimizers)
    state["state"] = {i: dict(kept) for i, kept in state["state"].items()}
    if model.config.tied:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    args, others = {}, {}
    for name, value in run["model_args"].items():  # other fields are unknown to nanoGPT
        (args if name in (*MODEL_ARGS, "dropout") else others)[name] = value
    extra = run["isogpt"] | {"model_args": others}
    return {"model": weights, "optimizer": state, **run, "model_args": args, "isogpt": extra}


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
