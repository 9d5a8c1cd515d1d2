"""
Saving and loading a run: whole or absent, verified, newest good one first; and nanoGPT's ckpt.pt, both ways.

    <out_dir>/step_00001200/ckpt.pt         the state in nanoGPT's form
    <out_dir>/step_00001200/manifest.json   a checksum of each file
    <out_dir>/ckpt.pt, ckpt_best.pt         links to the newest and the best one's ckpt.pt

A save is written in a folder of another name, its manifest last, and renamed into place when all of it is on the disk:
what is called step_* is whole. The checksums are there for what happens to it afterwards.
"""

import copy
import hashlib
import json
import os
import re
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from model import GPT

STEP = re.compile(r"step_(\d{8,})")
ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")  # of model_args


@dataclass(frozen=True)
class Save:
    """One save on disk: the file that holds it, its step, and its manifest (empty for a bare ckpt.pt of nanoGPT's)."""

    path: Path
    step: int
    manifest: dict = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------------
# saving


class HashedFile:
    """A file to write to that knows the SHA-256 of what it was given: a save is not read again to be summed."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save(out_dir: str, state: dict, best_step: int, keep_last: int, val_loss: float | None = None) -> Path:
    """
    Save `state` (nanoGPT's dict, with iter_num) as one step of `out_dir` (one rank only).

    Earlier saves go only when this one is whole: the last `keep_last`, the one of `best_step`, and any of another
    block_size (from before the context was shortened) stay.

    Returns:
        The step's folder. One that is there already and whole is left as it is: the same step is the same state.

    Raises:
        ValueError: a weight is not finite; nothing is written.
        OSError: it cannot be written (disk full, no permission); nothing else is touched, and no piece of it stays.
    """
    step = state["iter_num"]
    bad = [name for name, w in state["model"].items() if not torch.isfinite(w).all()]
    if bad:
        raise ValueError(f"weights are not finite at step {step} ({bad[0]} and {len(bad) - 1} more): not saved")
    out = Path(out_dir)
    folder = out / f"step_{step:08d}"
    if folder.exists() and not damage(folder):
        link_newest(out, folder, best_step)
        return folder
    unfinished = out / f"unfinished_step_{step:08d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        with open(unfinished / "ckpt.pt", "wb") as f:
            hashed = HashedFile(f)
            torch.save(state, hashed)
            f.flush()
            os.fsync(f.fileno())
            size = f.tell()
        manifest = {
            "step": step,
            "best_step": best_step,
            "val_loss": val_loss,
            "block_size": state["model_args"]["block_size"],
            "layout": {"world_size": state["isogpt"]["world_size"], "zero": 0},
            "torch": torch.__version__,
            "files": {"ckpt.pt": {"bytes": size, "sha256": hashed.hash.hexdigest()}},
        }
        write_whole(unfinished / "manifest.json", sealed(manifest))
        if folder.exists():  # a damaged save of the same step: this one takes its place
            shutil.rmtree(folder)
        os.rename(unfinished, folder)
        sync_folder(out)
    except RuntimeError as e:  # torch.save wraps the OSError of a full disk
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(str(e).splitlines()[0]) from e
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    link_newest(out, folder, best_step)
    prune(out, folder, best_step, keep_last, manifest["block_size"])
    return folder


def sealed(manifest: dict) -> str:
    """The text of manifest.json, whose last entry is a checksum of all the others."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "manifest_sha256": digest}, indent=1)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is either as it was or all there, on the disk."""
    other = path.with_name(path.name + ".tmp")
    with open(other, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(other, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in this folder last through a power failure."""
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def link_newest(out: Path, folder: Path, best_step: int) -> None:
    """Point ckpt.pt at the newest save, and ckpt_best.pt at the best one where it is there."""
    point(out / "ckpt.pt", folder / "ckpt.pt")
    best = out / f"step_{best_step:08d}"
    if best.exists():
        point(out / "ckpt_best.pt", best / "ckpt.pt")


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, or a copy where the file system has none; never half of it."""
    other = link.with_name(link.name + ".tmp")
    other.unlink(missing_ok=True)
    try:
        os.symlink(target.relative_to(link.parent), other)
    except OSError:
        shutil.copyfile(target, other)
    os.replace(other, link)


def prune(out: Path, newest: Path, best_step: int, keep_last: int, block_size: int) -> None:
    """Delete what `save` need not keep."""
    folders = [f for f in step_folders(out) if int(STEP.fullmatch(f.name)[1]) <= int(STEP.fullmatch(newest.name)[1])]
    for folder in folders[keep_last:]:
        manifest = read_manifest(folder)
        if folder.name != f"step_{best_step:08d}" and manifest.get("block_size", block_size) == block_size:
            gone = folder.with_name("unfinished_" + folder.name)  # a half-deleted save must not look like one
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# finding


def step_folders(out: Path) -> list[Path]:
    """The step folders, newest first."""
    return sorted((f for f in out.glob("step_*") if STEP.fullmatch(f.name)), key=lambda f: -int(f.name[5:]))


def read_manifest(folder: Path) -> dict:
    """A save's manifest; empty where it is missing or not what was written."""
    try:
        text = (folder / "manifest.json").read_text()
        manifest = {k: v for k, v in json.loads(text).items() if k != "manifest_sha256"}
    except (OSError, ValueError, AttributeError):
        return {}
    return manifest if text == sealed(manifest) else {}


def damage(folder: Path) -> str:
    """What is wrong with a save: '' if each file is, byte for byte, what was written."""
    manifest = read_manifest(folder)
    if not manifest or folder.name != f"step_{manifest['step']:08d}":
        return "its manifest.json is missing or damaged"
    for name, expected in manifest["files"].items():
        try:
            with open(folder / name, "rb") as f:
                actual = hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as e:
            return f"{name} cannot be read ({e.strerror})"
        if actual != expected["sha256"]:
            return f"{name} is not what was written (its checksum differs)"
    return ""


def newest(out_dir: str) -> tuple[Save | None, list[str]]:
    """
    The save to resume from: the newest that verifies, be it a step folder or a bare ckpt.pt that nanoGPT left.

    Returns:
        (the save or None, a sentence for each that was passed over because it is damaged)
    """
    out, reports, found = Path(out_dir), [], None
    for folder in step_folders(out):
        problem = damage(folder)
        if not problem:
            found = Save(folder / "ckpt.pt", read_manifest(folder)["step"], read_manifest(folder))
            break
        reports.append(f"{folder} is damaged: {problem}")
    bare = out / "ckpt.pt"
    if not bare.exists():
        return found, reports
    # Our link to a save that was looked at above says nothing new. But a file of its own, or a step's file that
    # nanoGPT wrote over through our link, is to be resumed where it is whole and further on.
    linked = STEP.fullmatch(bare.resolve().parent.name)
    known = max(found.step if found else -1, int(linked[1]) if linked else -1)
    if not linked or not found or int(linked[1]) > found.step:
        problem = damaged_zip(bare)
        step = -1 if problem else load(bare)["iter_num"]
        if step > known:
            return Save(bare, step), reports
        if problem and not linked:
            reports.append(f"{bare} is damaged: {problem}")
    return found, reports


def damaged_zip(path: Path) -> str:
    """What is wrong with a torch.save file, by the checksums of its own zip records: '' if nothing."""
    try:
        with zipfile.ZipFile(path) as z:
            bad = z.testzip()
        return f"its record {bad} does not match its checksum" if bad else ""
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as e:
        return str(e)


# ---------------------------------------------------------------------------------------------------------------------
# loading


def load(path: Path) -> dict:
    """
    The dict in a ckpt.pt, on the CPU and mapped rather than read, in nanoGPT's form without torch.compile's prefix.
    Nothing in it runs: torch's weights_only reader takes tensors and plain values.

    Raises:
        ValueError: it cannot be read, wants to run something, or lacks a part.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # a damaged or hostile file raises nearly anything
        raise ValueError(f"{path} cannot be loaded: {str(e).splitlines()[0] if str(e) else type(e).__name__}") from e
    missing = [k for k in ("model", "model_args", "iter_num") if not isinstance(state, dict) or k not in state]
    if missing:
        raise ValueError(f"{path} is no checkpoint of nanoGPT's or ours: it lacks {', '.join(missing)}")
    state["model"] = {name.removeprefix("_orig_mod."): w for name, w in state["model"].items()}
    absent = [k for k in ARGS if k != "dropout" and k not in state["model_args"]]
    if absent:
        raise ValueError(f"{path}: its model_args lack {', '.join(absent)}")
    return state


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """
    Give an optimizer its saved moments, but leave it the settings (betas, weight decay, kernel) of this run.

    Raises:
        ValueError: they do not fit the model.
    """
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        settings = {k: v for k, v in group.items() if k != "params"}
        saved.update({k: v for k, v in settings.items() if k in saved})
    try:
        # a copy: loaded tensors are mapped from the file, which may be replaced while they are in use
        optimizer.load_state_dict(copy.deepcopy(state))
    except (ValueError, KeyError) as e:
        raise ValueError(f"the checkpoint's optimizer state does not fit: {e}") from e


def crop_optimizer(state: dict | None, model: GPT, block_size: int) -> None:
    """Shorten the saved moments of the position embeddings to `block_size` rows, before the model's are."""
    decayed = [name for name, p in model.named_parameters() if p.dim() >= 2]
    moments = state["state"].get(decayed.index("transformer.wpe.weight"), {}) if state else {}
    for name in ("exp_avg", "exp_avg_sq"):
        if name in moments:
            moments[name] = moments[name][:block_size]


def set_aside(out_dir: str) -> Path | None:
    """
    A run from scratch into a folder that holds one: move what that run left into previous_1, previous_2 and so on, so
    that nothing is overwritten and nothing old is taken for the new run's. Returns where to, or None.
    """
    out = Path(out_dir)
    names = ("ckpt.pt", "ckpt_best.pt", "metrics.jsonl", "loss.png")
    left = [*step_folders(out), *(out / n for n in names if (out / n).is_symlink() or (out / n).exists())]
    if not left:
        return None
    number = 1 + max((int(p.name[9:]) for p in out.glob("previous_*") if p.name[9:].isdigit()), default=0)
    previous = out / f"previous_{number}"
    previous.mkdir()
    for path in left:
        os.rename(path, previous / path.name)
    return previous
