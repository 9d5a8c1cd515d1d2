"""Find the checkpoint to load: the newest or the best that is not damaged."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.manifest import (
    damaged_file,
    damaged_manifest,
    entry_of,
    is_run,
    read_manifest,
    sealed,
    step_folder,
    step_folders,
    step_of,
    steps_in,
    val_loss_of,
)
from isogpt.checkpoint.measures import best_step_of, bits_per_byte, changed_measures
from isogpt.common.console import visible
from isogpt.launch.together import broadcast, do_together, gather_objects, is_main, own_rank


@dataclass(frozen=True)
class StoredCheckpoint:
    """
    A checkpoint on disk: the ckpt.pt or the folder of shards, the step, the manifest (of a bare ckpt.pt: its
    checksum, and what its losses measure), and the validation loss of the weights (None if not known).
    """

    path: Path
    step: int
    manifest: dict = field(default_factory=dict)
    val_loss: float | None = None
    is_bare: bool = False  # a ckpt.pt outside of a step folder
    damaged: tuple[str, ...] = ()  # names of step folders that are damaged

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


def newest_checkpoint(out_dir: str, step: int = -1) -> tuple[StoredCheckpoint | None, list[str]]:
    """What `find_checkpoint` returns for the newest checkpoint, or for that of a step."""
    return find_checkpoint(out_dir, step=step)


def best_checkpoint(out_dir: str) -> tuple[StoredCheckpoint | None, list[str]]:
    """What `find_checkpoint` returns for the best checkpoint."""
    return find_checkpoint(out_dir, best=True)


def find_checkpoint(
    out_dir: str, best: bool = False, step: int = -1, on_error: Callable[[str], object] | None = None
) -> tuple[StoredCheckpoint | None, list[str]]:
    """
    Find and verify the newest checkpoint of a run, or the one with the best validation loss (all ranks). Rank
    0 looks, each rank verifies a part of the files, and if one of them is damaged, rank 0 takes the next
    older checkpoint. A ckpt.pt outside of a step folder is read only if there are no step folders. Exits with
    a message if a file cannot be read but may be intact, or if a rank sees a different folder.

    Args:
        out_dir: the run's folder, or a ckpt.pt.
        step: only this step's checkpoint; -1: any.
        on_error: as in exit_together.

    Returns:
        (the checkpoint or None, a sentence for each one that is damaged)
    """
    damaged = {}  # sentences, by the name of a step folder or file
    while True:
        found = do_together(look, Path(out_dir), best, step, damaged, on_error=on_error)
        stored, damaged = broadcast(found)
        if not stored:
            return None, [*damaged.values()]
        # machines may mount the same folder under different paths, or contain copies
        stored = replace(stored, path=out_dir / stored.path)
        problems = gather_objects(do_together(verify, stored, on_error=on_error))
        if not any(problems):
            return replace(stored, damaged=(*damaged,)), [*damaged.values()]
        place = stored.path if stored.is_bare else stored.folder
        damaged[place.name] = f"{place} is damaged: {next(filter(None, problems))}"


def look(
    out: Path, best: bool, step: int, damaged: dict[str, str]
) -> tuple[StoredCheckpoint | None, dict[str, str]]:
    """
    Rank 0's part of `find_checkpoint`, which reads only manifests: what may be the checkpoint, with a path
    relative to `out`, and what is known to be damaged.
    """
    if not is_main():
        return None, {}
    folders, stored = step_folders(out), None
    is_there = {folder.name for folder in folders}  # a run that goes on may have deleted some
    damaged = {name: text for name, text in damaged.items() if name in is_there or not folders}
    for folder in folders:
        if step not in (-1, step_of(folder)) or folder.name in damaged:
            continue
        if not (problem := damaged_manifest(folder)):
            stored = open_best(folder, damaged) if best else open_folder(folder)
            break
        damaged[folder.name] = f"{folder} is damaged: {problem}"
    if step == -1 and not folders:
        stored = look_for_bare(out, best, damaged)
    if stored:
        stored = replace(stored, path=Path(os.path.relpath(stored.path, out)))
    return stored, damaged


def open_best(newest_folder: Path, damaged: Collection[str]) -> StoredCheckpoint:
    """The checkpoint with the best validation loss, by the manifest of the newest one."""
    newest = open_folder(newest_folder)
    folder = best_folder(newest_folder.parent, newest.manifest, damaged)
    best = open_folder(folder) if folder else newest
    if best.step == newest.manifest["best_step"]:  # the state may be evaluated only after it was saved
        best = replace(best, val_loss=newest.manifest["best_val_loss"])
    return best


def look_for_bare(out: Path, best: bool, damaged: dict[str, str]) -> StoredCheckpoint | None:
    """The ckpt.pt of nanoGPT, or a copy without its step folder."""
    names = [out] if out.is_file() else [out / "ckpt_best.pt"] * best + [out / "ckpt.pt"]
    for path in names:
        if path.exists() and path.name not in damaged:
            try:
                return open_bare(path, read_file(path, verify=True))
            except ValueError as e:
                damaged[path.name] = str(e)
    return None


def verify(stored: StoredCheckpoint) -> str:
    """
    Verify this rank's part of the files: of shards every N-th, and of a ckpt.pt, which all ranks read, the
    whole on the first rank of each machine. Returns what is damaged.

    Raises:
        ValueError: a file cannot be read but may be intact, or this rank sees a different checkpoint.
    """
    files, ranks = stored.manifest["files"], dist.get_world_size() if dist.is_initialized() else 1
    names = sorted(files)[own_rank() :: ranks]
    if stored.path.name in files:
        names = [*files] if os.environ.get("LOCAL_RANK", "0") == "0" else []
    # their texts, since a NaN that was sent differs from a NaN
    is_found = is_main() or stored.is_bare or sealed(read_manifest(stored.folder)) == sealed(stored.manifest)
    if not is_found:
        raise ValueError(
            f"{stored.path.absolute()} is not the checkpoint that rank 0 found, which all ranks must read: "
            "use a folder on a file system that all machines share, or copy the checkpoint from rank 0's "
            "machine to the others"
        )
    return next(filter(None, (damaged_file(stored.folder / name, files) for name in names)), "")


def best_folder(out: Path, manifest: dict, damaged: Collection[str] = ()) -> Path | None:
    """
    Find the checkpoint with the best validation loss, by the newest checkpoint's manifest. If the step that
    the manifest names was not saved (because the disk was full, for instance) or is damaged, find the
    checkpoint with the lowest comparable loss. None if no checkpoint was evaluated.
    """
    named, losses = step_folder(out, manifest["best_step"]), {}
    if named.name not in damaged and read_manifest(named):
        return named
    for folder in step_folders(out):
        other = {} if folder.name in damaged else read_manifest(folder)
        if not other or other["step"] > manifest["step"] or val_loss_of(other) is None:
            continue
        if not changed_measures(other["measures"], manifest["measures"]):
            losses[folder] = val_loss_of(other)
    return min(losses, key=losses.get, default=None)


def about_folder(folder: Path) -> str:
    """What to do about a folder that contains a model of transformers; '' for other folders."""
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        return ""
    return f"{folder} contains a model of transformers: set --init_from={folder}, or see export.py --from=hf"


def advice_on_folder(out_dir: str) -> str:
    """What to type if out_dir contains no checkpoint, with up to four runs in the current folder."""
    if text := about_folder(Path(out_dir)):
        return text
    if steps := steps_in(out_dir):
        return f"it contains {', '.join(map(str, steps))}: set --resume_step= to one of these steps"
    runs = sorted(visible(str(path)) for path in Path().iterdir() if is_run(str(path)))
    if not runs:
        return "set --out_dir= to the run's folder, or train first, see README.md"
    more = ", ..." if len(runs) > 4 else ""
    return f"set --out_dir= to the run's folder (here: {', '.join(runs[:4])}{more})"
