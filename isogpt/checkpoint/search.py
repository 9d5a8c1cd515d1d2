"""Find the checkpoint to load: the newest or the best that is not damaged."""

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.manifest import damage, entry_of, read_manifest, step_folder, step_folders, step_of
from isogpt.checkpoint.measures import best_step_of, measures_of
from isogpt.data.dataset import bits_per_byte
from isogpt.launch.together import broadcast, do_together, gather_objects, is_main, own_rank


@dataclass(frozen=True)
class StoredCheckpoint:
    """
    A checkpoint on disk: the ckpt.pt or the folder of shards, the step, the manifest (of a bare ckpt.pt: its
    checksum, and what its losses measure), and the validation loss of the weights (None if not known).
    """

    path: Path
    step: int
    manifest: dict
    val_loss: float | None = None
    is_bare: bool = False  # a ckpt.pt outside of a step folder
    damaged: tuple[str, ...] = ()  # names of step folders that are damaged

    @property
    def bits_per_byte(self) -> float | None:
        """The validation loss in bits per byte of the text; None if not known."""
        if self.val_loss is None:
            return None
        size = self.manifest.get("measures", {}).get("bytes_per_token")
        return bits_per_byte(self.val_loss, size)

    @property
    def folder(self) -> Path:
        """The folder of the files in the manifest."""
        is_file = self.path.name in self.manifest["files"]
        return self.path.parent if is_file else self.path


Result = tuple[StoredCheckpoint | None, list[str]]  # a checkpoint; what is wrong with newer ones


def open_folder(folder: Path) -> StoredCheckpoint:
    """The checkpoint in a step folder that is not damaged."""
    manifest = read_manifest(folder)
    name = "ckpt.pt" if "ckpt.pt" in manifest["files"] else ""
    step, val_loss = manifest["step"], manifest["val_loss"]
    return StoredCheckpoint(folder / name, step, manifest, val_loss)


def open_bare(path: Path, damaged: dict[str, str]) -> StoredCheckpoint | None:
    """The checkpoint in a ckpt.pt without a manifest, such as nanoGPT's; a sentence in `damaged` if it is."""
    if not path.exists() or path.name in damaged:
        return None
    try:
        state = read_file(path, verify=True)
    except ValueError as e:
        damaged[path.name] = str(e)
        return None
    step, val_loss = state["iter_num"], None
    if best_step_of(state) == step:
        val_loss = state["best_val_loss"]
    files = {path.name: entry_of(path)}
    manifest = {"files": files, "measures": measures_of(state)}
    return StoredCheckpoint(path, step, manifest, val_loss, is_bare=True)


def find_checkpoint(out_dir: str, best: bool = False, step: int = -1) -> Result:
    """
    Find and verify the newest checkpoint of a run, or the one with the best validation loss (all ranks). Rank
    0 looks, each rank verifies a part of the files, and if one of them is damaged, rank 0 takes the next
    older checkpoint. A ckpt.pt outside of a step folder is read only if there are no step folders. Exits with
    a message if a file cannot be read but may be intact, or if a rank sees a different folder.

    Args:
        out_dir: the run's folder, or a ckpt.pt.
        step: only this step's checkpoint; -1: any.

    Returns:
        (the checkpoint or None, a sentence for each one that is damaged)
    """
    damaged = {}  # sentences, by the name of a step folder or file
    while True:
        stored, damaged = broadcast(do_together(look, Path(out_dir), best, step, damaged))
        if not stored:
            return None, [*damaged.values()]
        # machines may mount the same folder under different paths, or contain copies
        stored = replace(stored, path=out_dir / stored.path)
        problems = gather_objects(do_together(verify, stored))
        problems = [problem for problem in problems if problem]
        if not problems:
            return replace(stored, damaged=(*damaged,)), [*damaged.values()]
        place = stored.path if stored.is_bare else stored.folder
        damaged[place.name] = f"{place} is damaged: {problems[0]}"


def look(out: Path, best: bool, step: int, damaged: dict[str, str]) -> tuple[StoredCheckpoint | None, dict]:
    """
    Rank 0's part of `find_checkpoint`, which reads only manifests: what may be the checkpoint, with a path
    relative to `out`, and what is known to be damaged.
    """
    if not is_main():
        return None, {}
    folders, stored = step_folders(out), None
    for folder in folders:
        is_asked = step in (-1, step_of(folder))
        if not is_asked or folder.name in damaged:
            continue
        if manifest := read_manifest(folder):
            chosen = best_folder(out, manifest, damaged) if best else None
            stored = open_folder(chosen or folder)
            break
        damaged[folder.name] = f"{folder} is damaged: {damage(folder)}"
    if step == -1 and not folders:
        path = out if out.is_file() else out / "ckpt.pt"
        stored = open_bare(path, damaged)
    if stored:
        path = os.path.relpath(stored.path, out)
        stored = replace(stored, path=Path(path))
    return stored, damaged


def verify(stored: StoredCheckpoint) -> str:
    """
    Verify this rank's part of the files: of shards every N-th, and of a ckpt.pt, which all ranks read, the
    whole on the first rank of each machine. Returns what is damaged.

    Raises:
        ValueError: a file cannot be read but may be intact, or this rank sees a different checkpoint.
    """
    files = stored.manifest["files"]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    names = sorted(files)[own_rank() :: ranks]
    if stored.path.name in files:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        names = files if is_first else ()
    if not stored.is_bare:
        seen = read_manifest(stored.folder)
        if str(seen) != str(stored.manifest):  # texts, since a NaN that was sent differs from a NaN
            problem = f"{stored.path.absolute()} is not the checkpoint that rank 0 found"
            raise ValueError(f"{problem}: share a folder")
    return damage(stored.folder, {name: files[name] for name in names})


def best_folder(out: Path, manifest: dict, damaged: Collection[str] = ()) -> Path | None:
    """
    The checkpoint with the best validation loss, by the newest checkpoint's manifest. None if no checkpoint
    was evaluated, or the best one could not be saved or is damaged.
    """
    folder = step_folder(out, manifest["best_step"])
    if folder.name in damaged or not read_manifest(folder):
        return None
    return folder
