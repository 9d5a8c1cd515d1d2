"""Read and write a ckpt.pt: torch.load of a file that may be damaged or hostile, torch.save."""

import hashlib
import json
import math
import operator
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from isogpt.checkpoint.forks import MODEL_ARGS
from isogpt.common.files import about_pointer, reason_of
from isogpt.launch.device import synchronize
from isogpt.parallel.local_parts import copy_to_cpu
from isogpt.training import optimizer_state

# A numpy scalar is plain data: a value and its dtype. NumPy 1 called the module numpy.core.
SCALAR = np._core.multiarray.scalar if hasattr(np, "_core") else np.core.multiarray.scalar
PLAIN = (
    (SCALAR, "numpy._core.multiarray.scalar"),
    (SCALAR, "numpy.core.multiarray.scalar"),
    np.dtype,
    *{type(np.dtype(kind)) for kind in (*np.typecodes["AllInteger"], *np.typecodes["Float"], "?")},
)


def digest_of_records(path: Path) -> str:
    """
    A digest of the names, sizes and checksums in the directory of a torch.save file; '' without a directory.
    """
    try:
        with zipfile.ZipFile(path) as z:
            records = [(entry.filename, entry.file_size, entry.CRC) for entry in z.infolist()]
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return ""
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def damaged_zip(path: Path) -> str:
    """What is wrong with a torch.save file: '' if the checksums of its zip records match."""
    try:
        with zipfile.ZipFile(path) as z:
            bad = z.testzip()
        return f"the checksum of the record {bad} does not match" if bad else ""
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as e:
        return str(e)


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
    if verify and (problem := damaged_zip(path)):
        raise ValueError(f"{path} is damaged: {problem}")
    try:
        with torch.serialization.safe_globals(PLAIN):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # a damaged or hostile file raises nearly anything
        raise ValueError(f"{path} cannot be loaded: {why_not_loaded(e)}") from e
    missing = [
        k for k in ("model", "model_args", "iter_num") if not isinstance(state, dict) or k not in state
    ]
    if missing:
        raise ValueError(f"{path} is not a nanoGPT or isoGPT checkpoint: it lacks {', '.join(missing)}")
    step, best_loss, config = (state.get(name) for name in ("iter_num", "best_val_loss", "config"))
    try:
        state["iter_num"] = operator.index(step)
    except TypeError:
        raise ValueError(f"{path}: iter_num is {step!r}") from None
    if state["iter_num"] < 0:
        raise ValueError(f"{path}: iter_num is {step!r}")
    try:  # nanoGPT stores best_val_loss as a tensor
        state["best_val_loss"] = math.inf if best_loss is None else float(best_loss)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{path}: best_val_loss is {best_loss!r}, not a number") from None
    state["config"] = config if isinstance(config, dict) else {}
    return state


def why_not_loaded(error: Exception) -> str:
    """Why torch.load refused a file, in one line: PyTorch's message has several lines, with escape codes."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return f"it contains {refused[1]}, and only tensors and plain values are read"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def nanogpt_state(run: dict, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """
    Copy the state to the CPU in nanoGPT's form, which nanoGPT's train.py and sample.py load if the model is a
    GPT-2.
    """
    copied = copied_state(model, optimizers)
    synchronize(next(model.parameters()).device)
    return in_nanogpts_form(run, copied)


def copied_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict:
    """
    Copy the weights and the optimizer's state to the CPU: complete when the caller has waited for the device.
    """
    weights = {name: copy_to_cpu(p.detach()) for name, p in model.named_parameters()}
    state = optimizer_state.saved_state(model, optimizers)
    state["state"] = {i: {k: copy_to_cpu(v) for k, v in old.items()} for i, old in state["state"].items()}
    if model.config.tied:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return {"model": weights, "optimizer": state}


def in_nanogpts_form(run: dict, copied: dict) -> dict:
    """What nanoGPT stores, from a run's description and `copied_state`."""
    args, others = {}, {}
    for name, value in run["model_args"].items():  # other fields are unknown to nanoGPT
        (args if name in (*MODEL_ARGS, "dropout") else others)[name] = value
    extra = run["isogpt"] | {"model_args": others}
    return {**copied, **run, "model_args": args, "isogpt": extra}


def write_file(path: Path, state: dict) -> None:
    """Write a ckpt.pt to the disk, in a new folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as f:
        try:
            torch.save(state, f)
        except RuntimeError as e:  # torch.save hides an OSError, such as a full disk
            raise OSError(reason_of(e)) from e
        f.flush()
        os.fsync(f.fileno())
