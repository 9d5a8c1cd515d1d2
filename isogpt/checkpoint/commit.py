"""Complete a checkpoint on disk, and delete the checkpoints that are not kept (rank 0)."""

import os
import shutil
from pathlib import Path

from isogpt.checkpoint.manifest import hash_files, read_manifest, sealed, step_folder, step_folders, step_of
from isogpt.checkpoint.owner import check_owner
from isogpt.checkpoint.search import best_folder
from isogpt.common.files import sync_folder, write_whole


def commit_checkpoint(unfinished: Path, manifest: dict, keep_last: int, owner: str = "") -> Path:
    """
    Complete a checkpoint whose files are written: checksums, rename, links; then delete checkpoints that are
    not kept. Returns the step folder.

    Args:
        manifest: what make_manifest returned.

    Raises:
        ValueError: a different run has claimed the folder.
        OSError: the disk is full, for instance.
    """
    out = unfinished.parent
    folder = step_folder(out, manifest["step"])
    write_whole(unfinished / "manifest.json", sealed(manifest | {"files": hash_files(unfinished)}))
    check_owner(out, owner)
    if folder.exists():  # a conversion, or nanoGPT has saved this step too
        replace_files(unfinished, folder)
    else:
        os.rename(unfinished, folder)
    sync_folder(out)
    best = best_folder(out, manifest)
    link_checkpoints(out, folder, best)
    prune_checkpoints(out, folder, best, keep_last, manifest["block_size"])
    return folder


def replace_files(unfinished: Path, folder: Path) -> None:
    """
    Replace the files of a step folder. The manifest, which says which files count, is replaced after the
    other files are there and before the old ones are deleted, so that a kill loses nothing if new files have
    other names than old ones, or the same content.
    """
    for path in unfinished.iterdir():
        if path.name != "manifest.json":
            os.replace(path, folder / path.name)
    sync_folder(folder)
    os.replace(unfinished / "manifest.json", folder / "manifest.json")
    sync_folder(folder)
    kept = {"manifest.json", *read_manifest(folder)["files"]}
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    shutil.rmtree(unfinished)  # not empty if nanoGPT has written through our link: the same file


def link_checkpoints(out: Path, newest_folder: Path, best: Path | None) -> None:
    """
    Point ckpt.pt and ckpt_best.pt to the newest and the best checkpoint (None: there is none). A checkpoint
    in shards has no link.
    """
    for path, folder in ((out / "ckpt.pt", newest_folder), (out / "ckpt_best.pt", best)):
        if folder and (folder / "ckpt.pt").exists():
            point_link(path, folder / "ckpt.pt")
        elif path.is_symlink():
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
            delete_folder(doomed)


def delete_folder(folder: Path) -> None:
    """Delete a folder, as far as possible. Of a link, which a user has put in its place, only the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
