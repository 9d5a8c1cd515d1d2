"""Find the checkpoint to load: the newest or the best that is not damaged."""

import hashlib
import os
import re
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.manifest import (
    damage,
    entry_of,
    is_run,
    read_manifest,
    step_folder,
    step_folders,
    step_of,
    val_loss_of,
    visible_damage,
)
from isogpt.checkpoint.measures import best_step_of, bits_per_byte, changed_measures
from isogpt.checkpoint.other_files import about_file, is_of_transformers
from isogpt.common.console import visible
from isogpt.launch.network import this_machine
from isogpt.launch.together import broadcast


@dataclass(frozen=True)
class StoredCheckpoint:
    """
    A checkpoint on disk: the ckpt.pt or the folder of shards, the step, the manifest (of a bare ckpt.pt: its
    checksum, and what its losses measure), and the validation loss of the weights (None if not known).

    `is_original` says whether this is the very file or folder that rank 0 sees, and not perhaps a copy, see
    `share_checkpoint`.
    """

    path: Path
    step: int
    manifest: dict = field(default_factory=dict)
    val_loss: float | None = None
    is_bare: bool = False  # a ckpt.pt outside of a step folder
    is_original: bool = True
    # the manifest's entries of the files that this rank verifies when it reads them, see verify.py
    unverified: dict = field(default_factory=dict)
    damaged: tuple[str, ...] = ()  # names of newer step folders that are damaged

    @property
    def bits_per_byte(self) -> float | None:
        """The validation loss in bits per byte of the text; None if not known."""
        return bits_per_byte(self.val_loss, self.manifest.get("measures", {}))

    @property
    def folder(self) -> Path:
        """The folder of the files in the manifest."""
        return self.path.parent if self.path.name in self.manifest.get("files", {}) else self.path


def open_folder(folder: Path) -> StoredCheckpoint:
    """The checkpoint in a step folder that is not damaged."""
    manifest = read_manifest(folder)
    path = folder / "ckpt.pt" if "ckpt.pt" in manifest["files"] else folder
    return StoredCheckpoint(path, manifest["step"], manifest, val_loss_of(manifest))


def open_bare(path: Path, state: dict) -> StoredCheckpoint:
    """The checkpoint in a ckpt.pt without a manifest."""
    val_loss = state["best_val_loss"] if best_step_of(state) == state["iter_num"] else None
    manifest = {"files": {path.name: entry_of(path)}}
    if isinstance(measures := state.get("isogpt", {}).get("measures"), dict):
        manifest["measures"] = measures
    return StoredCheckpoint(path, state["iter_num"], manifest, val_loss, is_bare=True)


def damage_in(folder: Path, known: dict[Path, str] | None) -> str:
    """What is wrong with a step folder; '' if nothing is known to be. See `newest_checkpoint`."""
    return damage(folder) if known is None else known.get(folder) or visible_damage(folder)


def newest_checkpoint(
    out_dir: str, step: int = -1, known: dict[Path, str] | None = None, attempts: int = 5
) -> tuple[StoredCheckpoint | None, list[str]]:
    """
    Find the checkpoint to resume from: the newest undamaged step folder, or a bare ckpt.pt that nanoGPT
    wrote.

    Args:
        step: only this step's checkpoint; -1: the newest.
        known: what is wrong with step folders, as far as it is known. The ranks verify together what is
            found, see verify.py. None: files are verified here.
        attempts: how often to look if a run that is still going deletes checkpoints meanwhile.

    Returns:
        (the checkpoint or None, a sentence for each newer checkpoint that is damaged)
    """
    out, newest, reports, damaged = Path(out_dir), None, [], ()
    for folder in (f for f in step_folders(out) if step in (-1, step_of(f))):
        if not (problem := damage_in(folder, known)):
            newest = replace(open_folder(folder), damaged=damaged)
            break
        if attempts > 1 and not folder.exists():
            return newest_checkpoint(out_dir, step, known, attempts - 1)
        reports.append(f"{folder} is damaged: {problem}")
        damaged += (folder.name,)
    bare = out / "ckpt.pt"
    # normally our link to the checkpoint that was verified above
    if step != -1 or not bare.exists() or (newest and bare.resolve() == newest.path.resolve()):
        return newest, reports
    try:
        state = read_file(bare, verify=True)
    except ValueError as e:
        return newest, reports if bare.is_symlink() else [*reports, str(e)]
    # What nanoGPT wrote, perhaps through the link, is newer than all of ours, since each of our checkpoints
    # restores the link. A copy of a checkpoint of ours is used if its step is later.
    is_later = not newest or state["iter_num"] > newest.step
    if "isogpt" not in state or (is_later and not bare.is_symlink()):
        return replace(open_bare(bare, state), damaged=damaged), reports
    return newest, reports


def best_checkpoint(
    out_dir: str, known: dict[Path, str] | None = None
) -> tuple[StoredCheckpoint | None, list[str]]:
    """
    Find the checkpoint with the best validation loss, or the newest if the best is damaged; with the
    arguments and results of `newest_checkpoint`.
    """
    newest, reports = newest_checkpoint(out_dir, known=known)
    alone = Path(out_dir) / "ckpt_best.pt"
    if not newest and alone.exists() and not alone.is_symlink():  # the file was copied without its folder
        return open_bare(alone, read_file(alone, verify=True)), reports
    folder = best_folder(Path(out_dir), newest.manifest) if newest and not newest.is_bare else None
    if not folder:
        return newest, reports
    if problem := damage_in(folder, known):
        return newest, [*reports, f"{folder} is damaged: {problem}"]
    best = open_folder(folder)
    if best.step == newest.manifest["best_step"]:  # the state may be evaluated only after it was saved
        best = replace(best, val_loss=newest.manifest["best_val_loss"])
    return best, reports


def best_folder(out: Path, manifest: dict) -> Path | None:
    """
    Find the checkpoint with the best validation loss, by the newest checkpoint's manifest. If the step that
    the manifest names was not saved (because the disk was full, for instance), find the checkpoint with the
    lowest comparable loss. None if no checkpoint was evaluated.
    """
    named = step_folder(out, manifest["best_step"])
    if named.exists():
        return named
    losses = {}
    for folder in step_folders(out):
        other = read_manifest(folder)
        if not other or other["step"] > manifest["step"] or val_loss_of(other) is None:
            continue
        if not changed_measures(other["measures"], manifest["measures"]):
            losses[folder] = val_loss_of(other)
    return min(losses, key=losses.get, default=None)


def share_checkpoint(stored: StoredCheckpoint | None, folder: str) -> StoredCheckpoint | None:
    """
    Share rank 0's `stored`, which is in `folder`, with the path under which this rank sees it (all ranks).
    Machines may mount the same folder under different paths, or contain copies.
    """
    # only a name below the folder is sent: rank 0's path need not exist on other machines
    name = str(stored.path.relative_to(folder)) if stored else None
    stored, name, place = broadcast((stored, name, stored and place_of(stored.path)))
    if not stored:
        return None
    path = Path(folder) / name
    return replace(stored, path=path, is_original=place_of(path) == place)


def place_of(path: Path) -> str:
    """A digest of the machine and the path. A folder that two machines share counts as two."""
    return hashlib.sha256(os.fsencode(f"{this_machine()[1]} {path.resolve()}")).hexdigest()[:16]


def where(stored: StoredCheckpoint) -> str:
    """The path and the host, for messages."""
    return f"{stored.path.absolute()} on {socket.gethostname()}"


def is_here(stored: StoredCheckpoint) -> bool:
    """Whether, by its manifest, this machine's disk contains `stored`, which may come from rank 0."""
    return stored.is_bare or read_manifest(stored.folder) == stored.manifest


def check_same(stored: StoredCheckpoint) -> None:
    """Raise ValueError if this machine's disk does not contain `stored`, which may come from rank 0."""
    if stored.is_original and not stored.path.exists():
        raise ValueError(f"{where(stored)} has just been deleted by a run that is still going: start again")
    if not is_here(stored):
        raise ValueError(
            f"{where(stored)} is not the checkpoint that rank 0 found, which all ranks must read: use a "
            "folder on a file system that all machines share, or copy the checkpoint from rank 0's machine "
            "to the others"
        )


# ------------------------------------------------------------------------------------------------------------
# if there is none


def about_folder(folder: Path) -> str:
    """What to do about a folder that contains something other than a run; '' if nothing is recognized."""
    models = [folder, *sorted(folder.glob("checkpoint-*"), key=number_in)]  # those of transformers' Trainer
    if model := next(filter(is_of_transformers, reversed(models)), None):
        return (
            f"{model} contains a model of transformers: set --init_from={model}, or see export.py --from=hf"
        )
    files = sorted(filter(Path.is_file, folder.glob("*")), key=number_in)
    checkpoints = [path for path in files if path.suffix in (".pt", ".pth", ".ckpt")]
    if not checkpoints:
        return next((f"{path} is {text}" for path in files if (text := about_file(path))), "")
    newest = checkpoints[-1]
    try:
        read_file(newest)
    except ValueError as e:
        return str(e)
    return f"{newest} is not called ckpt.pt: type: cp {newest} {folder / 'ckpt.pt'}"


def number_in(path: Path) -> tuple[bool, int, str]:
    """The last number in a file's name, to sort by; files of an optimizer come first."""
    numbers = re.findall(r"\d+", path.stem)
    return "optim" not in path.name, int(numbers[-1]) if numbers else -1, path.name


def advice_on_folder(out_dir: str) -> str:
    """What to type if out_dir contains no checkpoint, with up to four runs in the current folder."""
    if Path(out_dir).is_file():
        return f"it is a file: set --out_dir={Path(out_dir).parent}"
    if not is_run(out_dir) and (text := about_folder(Path(out_dir))):
        return text
    runs = sorted(visible(str(path)) for path in Path().iterdir() if is_run(str(path)))
    if not runs:
        return "set --out_dir= to the run's folder, or train first, see README.md"
    more = ", ..." if len(runs) > 4 else ""
    return f"set --out_dir= to the run's folder (here: {', '.join(runs[:4])}{more})"
