"""The folders of checkpoints, and the manifest that describes a checkpoint's files and their checksums."""

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path

import torch

from isogpt.checkpoint.measures import best_step_of, measures_of
from isogpt.launch.network import this_machine

REPLACED = "unfinished_was_"  # a checkpoint that a different form of it replaces: see `commit_checkpoint`
STEP = re.compile(rf"(?:{REPLACED})?step_(\d{{8,}})")
# a checkpoint that a run was writing or deleting
UNFINISHED = re.compile(r"unfinished_([0-9a-f]{8}_)?step_\d{8,}")


def step_folders(out: Path) -> list[Path]:
    """
    The step folders, newest first. A replaced folder counts until the new folder of the step is in place.
    """
    paths = sorted((f for f in out.glob("*step_*") if STEP.fullmatch(f.name)), reverse=True)
    folders = {step_of(f): f for f in paths}  # step_* comes last, and thus counts if a step has two folders
    return [folders[step] for step in sorted(folders, reverse=True)]


def step_of(folder: Path) -> int:
    """The step in the name of a step folder."""
    return int(STEP.fullmatch(folder.name)[1])


def step_folder(out: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return out / f"step_{step:08d}"


def unfinished_folder(out: Path, owner: str, step: int) -> Path:
    """The folder in which `owner` writes a step's checkpoint until it is complete."""
    return out / f"unfinished_{owner[:8]}_step_{step:08d}"


def steps_in(folder: str) -> list[int]:
    """The steps of the checkpoints in a folder, newest first."""
    return [step_of(step_folder) for step_folder in step_folders(Path(folder))]


def is_run(folder: str) -> bool:
    """Whether a folder contains checkpoints of a run: ours or nanoGPT's."""
    return bool(folder) and (bool(step_folders(Path(folder))) or (Path(folder) / "ckpt.pt").exists())


def advice_on_folder() -> str:
    """What to type if out_dir contains no checkpoint, with up to four runs in the current folder."""
    runs = sorted(str(path) for path in Path().iterdir() if is_run(str(path)))
    if not runs:
        return "set --out_dir= to the run's folder, or train first, see README.md"
    more = ", ..." if len(runs) > 4 else ""
    return f"set --out_dir= to the run's folder (here: {', '.join(runs[:4])}{more})"


def make_manifest(run: dict, world_size: int, zero: int, val_loss: float | None) -> dict:
    """
    What manifest.json contains besides the files' checksums.

    Args:
        run: the state that is not tensors.
        val_loss: the loss of this state, if it was evaluated.
    """
    return {
        "step": run["iter_num"],
        "best_step": best_step_of(run),
        "best_val_loss": run["best_val_loss"],
        "val_loss": val_loss,
        "measures": measures_of(run),
        "layout": {"world_size": world_size, "zero": zero},
        "block_size": run["model_args"]["block_size"],
        "torch": torch.__version__,
    }


def sealed(manifest: dict) -> str:
    """The text of manifest.json, whose last entry is a checksum of all others."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "manifest_sha256": digest}, indent=1)


def read_manifest(folder: Path) -> dict:
    """The manifest of a step folder; empty if it is missing or damaged."""
    try:
        text = (folder / "manifest.json").read_text()
        manifest = {k: v for k, v in json.loads(text).items() if k != "manifest_sha256"}
    except (OSError, ValueError, AttributeError):
        return {}
    return manifest if text == sealed(manifest) else {}


def hash_files(folder: Path) -> dict:
    """The manifest's entries for all files in a folder: size and SHA-256."""
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
    }


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def damage(folder: Path) -> str:
    """What is wrong with a step folder: '' if every file's checksum matches the manifest."""
    manifest = read_manifest(folder)
    if not manifest or step_of(folder) != manifest["step"]:
        return "manifest.json is missing or damaged"
    problems = (damaged_file(folder / name, manifest) for name in manifest["files"])
    return next((problem for problem in problems if problem), "")


def damaged_file(path: Path, manifest: dict) -> str:
    """What is wrong with a file of a step folder: '' if its checksum matches the manifest."""
    try:
        actual = sha256_of(path)
    except OSError as e:
        return f"{path.name} cannot be read ({e.strerror})"
    if actual != manifest["files"][path.name]["sha256"]:
        return f"the checksum of {path.name} does not match"
    return ""


def val_loss_of(manifest: dict) -> float | None:
    """The validation loss of the checkpoint with this manifest; None if it is not known."""
    if manifest["best_step"] == manifest["step"]:
        return manifest["best_val_loss"]
    return manifest["val_loss"]


def identity(path: Path) -> tuple[str, int, int] | None:
    """
    Identify a file or folder: equal for two processes that see the same file on the same machine. A folder
    that two machines share counts as two. None if there is nothing.
    """
    with suppress(OSError):
        status = path.stat()
        return this_machine()[1], status.st_dev, status.st_ino
    return None
