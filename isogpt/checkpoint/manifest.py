"""The folders of checkpoints, and the manifest that describes a checkpoint's files and their checksums."""

import errno
import hashlib
import json
import re
from pathlib import Path

import torch

from isogpt.checkpoint.measures import best_step_of, measures_of
from isogpt.common.files import parse_json, read_utf8, regular_file

STEP = re.compile(r"step_(\d{8,})")
# errors after which a file that cannot be read may still be intact, unlike one that is missing
MAY_PASS = (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
LARGEST = 2**53  # up to here, float64 represents every whole number
# the types of a manifest's fields
FIELDS = {
    "step": int,
    "best_step": int,
    "best_val_loss": int | float,
    "val_loss": int | float | None,
    "measures": dict,
    "block_size": int,
    "files": dict,
}
# a checkpoint that a run was writing or deleting
UNFINISHED = re.compile(r"unfinished_([0-9a-f]{8}_)?step_\d{8,}")


def step_folders(out: Path) -> list[Path]:
    """The step folders, newest first."""
    return sorted((f for f in out.glob("step_*") if STEP.fullmatch(f.name)), key=step_of, reverse=True)


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


def make_manifest(run: dict, world_size: int, zero: int, val_loss: float | None) -> dict:
    """
    What manifest.json contains besides the files' checksums.

    Args:
        run: the part of the state that is not tensors.
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


def size_of(manifest: dict) -> int:
    """The bytes of a checkpoint's files, by its manifest."""
    return sum(entry.get("bytes", 0) for entry in manifest["files"].values())


def sealed(manifest: dict) -> str:
    """The text of manifest.json, whose last entry is a checksum of all others."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "manifest_sha256": digest}, indent=1)


def read_manifest(folder: Path) -> dict:
    """The manifest of a step folder; empty if it is missing or damaged, or not one that a run writes."""
    try:
        return parse_manifest(read_utf8(folder / "manifest.json"))
    except (OSError, ValueError):
        return {}


def parse_manifest(text: str) -> dict:
    """
    The content of a manifest.json; empty if it is damaged, or not one that a run writes. No file that it
    names is outside of the folder: a checksum says nothing about who has written the manifest.
    """
    try:
        manifest = parse_json(text)
        del manifest["manifest_sha256"]
        files = manifest["files"]
        is_valid = (
            text == sealed(manifest)
            and all(isinstance(manifest[name], kind) for name, kind in FIELDS.items())
            and all(Path(name).name == name not in ("", "..") and name.isprintable() for name in files)
            and all(entry["bytes"] in range(LARGEST) for entry in files.values())
            and ("ckpt.pt" in files or isinstance(manifest["run"], dict))  # of shards
        )
    except (ValueError, AttributeError, KeyError, TypeError):
        return {}
    return manifest if is_valid else {}


def entry_of(path: Path) -> dict:
    """A file's entry in the manifest: size and SHA-256. Reads the file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb", opener=regular_file) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def damaged_manifest(folder: Path) -> str:
    """What is wrong with the manifest of a step folder; '' if nothing is. Raises ValueError as `damage`."""
    path = folder / "manifest.json"
    if not (manifest := read_manifest(folder)):
        damaged_file(path, {path.name: {"sha256": ""}})  # raises ValueError
        return "manifest.json is missing or damaged"
    if step_of(folder) != manifest["step"]:
        return f"it was renamed: its checkpoint is that of step {manifest['step']}"
    return ""


def damage(folder: Path) -> str:
    """
    What is wrong with a step folder: '' if every file's checksum matches the manifest. Reads all files.

    Raises:
        ValueError: a file cannot be read, but may be intact.
    """
    if problem := damaged_manifest(folder):
        return problem
    files = read_manifest(folder)["files"]
    return next(filter(None, (damaged_file(folder / name, files) for name in files)), "")


def damaged_file(path: Path, files: dict) -> str:
    """
    What is wrong with a file: '' if its size and checksum match its entry in `files`, see `hash_files`.
    Raises ValueError if it cannot be read, but may be intact.
    """
    try:
        size = path.stat().st_size
        if size != files[path.name].get("bytes", size):
            return f"the size of {path.name} does not match"
        digest = sha256_of(path)
    except OSError as e:
        if e.errno not in MAY_PASS:
            return f"{path.name} cannot be read ({e.strerror or e})"
        raise ValueError(
            f"{path} cannot be read ({e.strerror}), and may be intact: make it readable, for example with "
            f"chmod or chown, and start again, or rename {path.parent} if an older checkpoint will do"
        ) from e
    return "" if digest == files[path.name]["sha256"] else f"the checksum of {path.name} does not match"


def val_loss_of(manifest: dict) -> float | None:
    """The validation loss of the checkpoint with this manifest; None if it is not known."""
    if manifest["best_step"] == manifest["step"]:
        return manifest["best_val_loss"]
    return manifest["val_loss"]
