"""Complete a checkpoint on disk, and delete the checkpoints that are not kept (rank 0)."""

import os
from collections.abc import Collection
from pathlib import Path

from isogpt.checkpoint.manifest import sealed, step_folder, step_folders, step_of
from isogpt.checkpoint.owner import check_owner
from isogpt.checkpoint.search import best_folder
from isogpt.common import console
from isogpt.common.files import free_name, reason_of, remove, sync_folder, temporary_name, write_whole


def commit_checkpoint(
    unfinished: Path, manifest: dict, keep_last: int, owner: str = "", held: Collection[Path] = ()
) -> Path:
    """
    Complete a checkpoint whose files are written: manifest, rename, links; then delete checkpoints that are
    not kept. Returns the step folder.

    Args:
        manifest: what make_manifest returned, and `files`: the entries of all files, which were hashed while
            they were written.
        held: checkpoints that are being read, which are not deleted yet.

    Raises:
        ValueError: a different run has claimed the folder.
        OSError: the disk is full, for instance.
    """
    out = unfinished.parent
    folder = step_folder(out, manifest["step"])
    write_whole(unfinished / "manifest.json", sealed(manifest))
    check_owner(out, owner)
    os.rename(unfinished, folder)
    sync_folder(out)
    best = best_folder(out, manifest)
    link_checkpoints(out, folder, best)
    prune(out, folder, best, keep_last, held)
    return folder


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
    Make `path` a relative symbolic link to `target`, atomically, where the file system knows links. A file
    that this run did not write, such as nanoGPT's, is kept under a different name.
    """
    other = temporary_name(path)  # which the next start removes, if it is left after an error
    try:
        os.symlink(target.relative_to(path.parent), other)
    except OSError:  # such as Google Drive's
        return
    if path.is_file() and not path.is_symlink():
        original = free_name(path.parent, f"original_{path.name}")
        os.rename(path, original)
        console.print_line(f"{path}, which this run did not write, is kept as {original}")
    os.replace(other, path)


def prune(out: Path, newest: Path, best: Path | None, keep_last: int, held: Collection[Path]) -> None:
    """Delete what is older than `newest`, but the last `keep_last` (0: all), the best and those `held`."""
    folders = [folder for folder in step_folders(out) if step_of(folder) <= step_of(newest)]
    for folder in folders[keep_last:] if keep_last else []:
        if folder != best and folder not in held:
            doomed = out / f"unfinished_{folder.name}"  # a half-deleted folder must not be called step_*
            try:
                os.rename(folder, doomed)
            except OSError as e:  # the new one is complete, even if an old one is locked or mounted
                console.print_line(f"warning: {folder} cannot be deleted: {reason_of(e)}")
            remove(doomed)
