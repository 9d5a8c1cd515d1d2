"""Complete a checkpoint on disk, and delete the checkpoints that are not kept (rank 0)."""

import os
import shutil
from pathlib import Path

from isogpt.checkpoint.manifest import (
    REPLACED,
    damage,
    hash_files,
    read_manifest,
    sealed,
    step_folder,
    step_folders,
    step_of,
)
from isogpt.checkpoint.owner import check_owner
from isogpt.checkpoint.search import best_folder
from isogpt.common.files import sync_folder, write_whole


def commit_checkpoint(
    unfinished: Path, manifest: dict, keep_last: int, owner: str = "", replace: bool = False
) -> Path:
    """
    Complete a checkpoint whose files are written: checksums, rename, links; then delete checkpoints that are
    not kept.

    Args:
        manifest: what make_manifest returned.
        replace: whether to replace a valid checkpoint of the same step. Otherwise the existing checkpoint is
            kept, since a run's state at a step is always the same.

    Raises:
        ValueError: a different run has claimed the folder.
        OSError: the disk is full, for instance.
    """
    out = unfinished.parent
    folder = step_folder(out, manifest["step"])
    try:
        write_whole(unfinished / "manifest.json", sealed(manifest | {"files": hash_files(unfinished)}))
        if owner:
            check_owner(out, owner)
        if folder.exists() and not replace and not damage(folder):
            shutil.rmtree(unfinished)
        else:
            old = out / f"{REPLACED}{folder.name}"  # also found here until the new folder is in place
            if folder.exists():
                os.rename(folder, old)
            os.rename(unfinished, folder)
            shutil.rmtree(old, ignore_errors=True)
        sync_folder(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    best = best_folder(out, manifest)
    link_checkpoints(out, folder, best)
    prune_checkpoints(out, folder, best, keep_last, manifest["block_size"])
    return folder


def link_checkpoints(out: Path, newest_folder: Path, best: Path | None) -> None:
    """
    Point ckpt.pt and ckpt_best.pt to the newest and the best checkpoint (None: there is none), unless it is
    in shards.
    """
    for path, target in ((out / "ckpt.pt", newest_folder), (out / "ckpt_best.pt", best)):
        if target and (target / "ckpt.pt").exists():
            point_link(path, target / "ckpt.pt")
        elif path.is_symlink() and (not target or not path.exists()):
            # the link points to a checkpoint that was deleted or renamed, or that is no longer the best
            path.unlink()


def point_link(path: Path, target: Path) -> None:
    """
    Make `path` a relative symbolic link to `target`, or a copy if the file system lacks links; atomically.
    """
    other = path.with_name(path.name + ".tmp")
    other.unlink(missing_ok=True)
    try:
        os.symlink(target.relative_to(path.parent), other)
    except OSError:
        shutil.copyfile(target, other)
    os.replace(other, path)


def prune_checkpoints(
    out: Path, newest_folder: Path, best: Path | None, keep_last: int, block_size: int
) -> None:
    """
    Delete all checkpoints but the last `keep_last` (0: keep all) and the best. Checkpoints of a different
    block_size stay: they are from before the context was shortened.
    """
    folders = [f for f in step_folders(out) if step_of(f) <= step_of(newest_folder)]
    for folder in folders[keep_last:] if keep_last else []:
        if folder != best and read_manifest(folder).get("block_size", block_size) == block_size:
            doomed = out / f"unfinished_{folder.name}"  # a half-deleted folder must not be called step_*
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    link_checkpoints(out, newest_folder, best)  # ckpt.pt may have pointed to a deleted checkpoint
