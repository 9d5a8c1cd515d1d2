"""Write a ckpt.pt with torch.save, and read one, which may be damaged or hostile, with torch.load."""

import math
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from isogpt.checkpoint.forks import MODEL_ARGS
from isogpt.checkpoint.manifest import LARGEST_STEP
from isogpt.checkpoint.other_files import about_content, about_file
from isogpt.common.files import HashedFile, about_pointer, check_no_link, check_regular, reason_of
from isogpt.parallel.local_parts import copy_to_cpu
from isogpt.training import optimizer_state

# A numpy scalar, such as a setting computed by numpy, is plain data. NumPy 1 called the module numpy.core.
SCALAR = np._core.multiarray.scalar if hasattr(np, "_core") else np.core.multiarray.scalar
PLAIN = (
    (SCALAR, "numpy._core.multiarray.scalar"),
    (SCALAR, "numpy.core.multiarray.scalar"),
    np.dtype,
    *{type(np.dtype(kind)) for kind in (*np.typecodes["AllInteger"], *np.typecodes["Float"], "?")},
)


def read_file(path: Path, verify: bool = False) -> dict:
    """
    Read the dict in a ckpt.pt, memory-mapped. Nothing in the file runs: weights_only accepts only tensors and
    plain values.

    Args:
        verify: check the file's checksums, which reads the whole file.

    Raises:
        ValueError: the file is damaged, cannot be loaded, would run code, or is not a checkpoint.
    """
    if pointer := about_pointer(path):
        raise ValueError(f"{path} is {pointer}")
    try:
        check_regular(path)
    except OSError as e:
        raise ValueError(f"{path} cannot be loaded: {reason_of(e)}") from e
    if text := about_file(path):
        raise ValueError(f"{path} is {text}")
    try:
        if verify and (bad := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"the checksum of the record {bad} does not match")
        with torch.serialization.safe_globals(PLAIN):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if text := about_content(state):
            raise ValueError(text)
        if missing := [key for key in ("model", "model_args") if key not in state]:
            raise ValueError(f"it is not a checkpoint of nanoGPT or isoGPT: it lacks {', '.join(missing)}")
        state = {"iter_num": 0, **state}
        for name in ("model", "model_args", "config", "isogpt"):
            is_none = name == "config" and state.get(name) is None
            if not (name not in state or is_none or isinstance(state[name], dict)):
                raise ValueError(f"{name} is of type {type(state[name]).__name__}, not a dict")
        for name in ("model_args", "config"):
            state[name] = {key: plain(value) for key, value in (state.get(name) or {}).items()}
        if not 0 <= state["iter_num"] < LARGEST_STEP:
            raise ValueError(f"iter_num is {state['iter_num']}")
        best = state.get("best_val_loss")  # nanoGPT stores a tensor, which may be NaN
        best = math.inf if best is None else float(best)
        return {
            **state,
            "iter_num": int(state["iter_num"]),
            "best_val_loss": math.inf if math.isnan(best) else best,
        }
    except Exception as e:  # a damaged or hostile file raises nearly anything
        raise ValueError(f"{path} cannot be loaded: {why_not_loaded(e)}") from e


def plain(value: object) -> object:
    """A setting without numpy's or PyTorch's type, which JSON does not know."""
    is_number = isinstance(value, np.generic) or (torch.is_tensor(value) and value.dim() == 0)
    return value.item() if is_number else value


def why_not_loaded(error: Exception) -> str:
    """Why torch.load refused a file, in one line: PyTorch's message has several lines, with escape codes."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return f"it contains {refused[1]}, and only tensors and plain values are read"
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


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
    check_no_link(path.parent)
    with open(path, "xb") as f:  # x: it does not follow a link (O_EXCL)
        try:
            hashed = HashedFile(f)
            torch.save(state, hashed)
        except RuntimeError as e:  # torch.save hides an OSError, such as a full disk
            raise OSError(reason_of(e)) from e
        f.flush()
        os.fsync(f.fileno())
    return {path.name: hashed.entry()}
