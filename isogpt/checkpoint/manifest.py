"""The folders of checkpoints, and the manifest that describes a checkpoint's files and their checksums."""

import hashlib
import json
import re
from pathlib import Path

from isogpt.checkpoint.measures import best_step_of, measures_of
from isogpt.common.console import shortened
from isogpt.common.files import parse_json, read_utf8, regular_file

STEP = re.compile(r"step_(\d{8,})")


def step_folders(out: Path) -> list[Path]:
    """The step folders, newest first."""
    folders = [f for f in out.glob("step_*") if STEP.fullmatch(f.name)]
    return sorted(folders, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The step in the name of a step folder."""
    return int(STEP.fullmatch(folder.name)[1])


def step_folder(out: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return out / f"step_{step:08d}"


def unfinished_folder(out: Path, owner: str, step: int) -> Path:
    """The folder in which `owner` writes a step's checkpoint until it is complete."""
    return out / f"unfinished_{owner[:8]}_step_{step:08d}"


def steps_in(folder: str | Path) -> list[int]:
    """The steps of the checkpoints in a folder, newest first."""
    return [step_of(step_folder) for step_folder in step_folders(Path(folder))]


def is_run(folder: str | Path) -> bool:
    """Whether a folder contains checkpoints of a run: ours or nanoGPT's."""
    return bool(folder and (steps_in(folder) or Path(folder, "ckpt.pt").exists()))


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
        "val_loss": val_loss,
        "measures": measures_of(run),
        "layout": {"world_size": world_size, "zero": zero},
    }


def size_of(manifest: dict) -> int:
    """The bytes of a checkpoint's files, by its manifest."""
    return sum(entry["bytes"] for entry in manifest["files"].values())


def sealed(manifest: dict) -> str:
    """The text of manifest.json, whose last entry is a checksum of all others."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "manifest_sha256": digest}, indent=1)


def read_manifest(folder: Path) -> dict:
    """The manifest of a step folder; empty if it is missing, damaged, of a different step or not a run's."""
    try:
        manifest = parse_manifest(read_utf8(folder / "manifest.json"))
    except (OSError, ValueError):
        return {}
    return manifest if manifest.get("step") == step_of(folder) else {}


def parse_manifest(text: str) -> dict:
    """
    The content of a manifest.json; empty if it is damaged. No file that it names is outside of the folder: a
    checksum says nothing about who has written the manifest.
    """
    try:
        manifest = parse_json(text)
        del manifest["manifest_sha256"]
        names = manifest["files"]
        are_inside = all(Path(name).name == name not in ("", "..") and name.isprintable() for name in names)
    except (ValueError, KeyError, TypeError):
        return {}
    return manifest if are_inside and text == sealed(manifest) else {}


def entry_of(path: Path) -> dict:
    """A file's entry in the manifest: size and SHA-256. Reads the file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb", opener=regular_file) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def damage(folder: Path, files: dict | None = None) -> str:
    """
    What is wrong with files in a step folder: '' if size and checksum of each are those of its entry. Raises
    ValueError if a file cannot be read, but may be intact.

    Args:
        files: entries of a manifest, by name; None: those of the folder's manifest, which must be intact.
    """
    if files is None:
        files = read_manifest(folder).get("files", {"manifest.json": {}})
    for name, entry in files.items():
        try:
            if entry_of(folder / name) != entry:
                return f"the checksum of {name} does not match"
        except FileNotFoundError as e:
            return f"{name} cannot be read ({e.strerror})"
        except OSError as e:
            problem = f"{folder / name} cannot be read ({e.strerror}), and may be intact"
            raise ValueError(f"{problem}: make it readable, or rename the step's folder") from e
    return ""


def no_checkpoint(out_dir: str, damaged: list[str], what: str = "checkpoint") -> ValueError:
    """
    The error that `what` is not in out_dir: which checkpoints are damaged, or what to type, with up to four
    runs in the current folder.
    """
    if damaged:
        why = "; ".join(damaged)
    elif steps := steps_in(out_dir):
        why = f"it contains {shortened([*map(str, steps)], 4)}: set --init_from=resume:{steps[0]} or the like"
    else:
        runs = sorted(str(path) for path in Path().iterdir() if is_run(path))
        here = f" (here: {shortened(runs, 4)})" if runs else ", or train first, see README.md"
        why = f"set --out_dir= to the run's folder{here}"
    return ValueError(f"no {what} in {out_dir}: {why}")
