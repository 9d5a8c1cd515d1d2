"""
Enter a run's folder: find the checkpoint to start from, claim the folder, set aside what earlier runs left.

    <out_dir>/step_00001200/ckpt.pt              the state in nanoGPT's form (zero 0, one process)
    <out_dir>/step_00001200/*.distcp, *.json     or in shards: each rank's part, see sharded_files.py
    <out_dir>/step_00001200/manifest.json        the layout and a checksum of each file
    <out_dir>/ckpt.pt, ckpt_best.pt              links to the newest and the best ckpt.pt

A checkpoint is written in a folder with a different name, which is renamed when the checkpoint is complete
and on the disk. So a folder called step_* is complete. The checksums detect damage that happens later.
"""

import json
import os
import re
import shutil
import socket
import threading
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from isogpt.checkpoint.commit import link_checkpoints
from isogpt.checkpoint.download import find_newest
from isogpt.checkpoint.manifest import is_run, no_checkpoint, step_folders, step_of, unfinished_folder
from isogpt.checkpoint.owner import check_owner, is_alive, keep, read_owner, was_entered_by, write_owner
from isogpt.checkpoint.search import StoredCheckpoint, best_folder, find_checkpoint
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.common import console
from isogpt.common.files import free_name, lock, read_records, read_utf8, regular_file, remove, write_whole
from isogpt.launch.launchers import Launch
from isogpt.launch.process_group import Ranks
from isogpt.launch.together import broadcast, do_together, is_main
from isogpt.nn.architecture import GPT2
from isogpt.options.values import is_url
from isogpt.parallel.compression import keeps_errors
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan

RESULT = "result.json"  # how the run has ended, see sink_files.py; a run in progress has none
MARK = "PREEMPTED"  # this file means that the run was stopped on request and is not finished
EXCLUDED = "excluded_steps.json"  # the steps that each resume leaves out
# a checkpoint that a run was writing or deleting, and files.temporary_name
LEFT_OVER = re.compile(r"unfinished_([0-9a-f]{8}_)?step_\d{8,}|.+\.[0-9a-f]{16}\.tmp")


def look_for_start(
    init_from: str, out_dir: str, launch: Launch, mirror: str = ""
) -> tuple[StoredCheckpoint | None, bool, list[str]]:
    """
    Find what `init_from` means for a training run (all ranks). A restart of the launch that entered the
    folder continues with what this launch has written, not with what the command says, because the first
    start of the launch has already followed the command.

    Returns:
        (the checkpoint to load or None, whether to resume from it or only to load its weights, warnings)

    Raises:
        ValueError: there is nothing to resume from (on all ranks). Exits as `find_checkpoint` does.
    """
    weights_from = init_from.removeprefix("auto:")
    command, _, chosen = init_from.partition(":")
    step = int(chosen) if command == "resume" and chosen else -1
    is_restart = broadcast(is_main() and was_entered_by(Path(out_dir), launch))
    if is_restart or command in ("resume", "auto"):
        newest, reports = find_newest(out_dir, -1 if is_restart else step, mirror)
        if newest:
            return newest, True, reports
        if reports or command == "resume":
            which = "checkpoint" if step == -1 else f"step {step}"
            raise no_checkpoint(out_dir, reports, f"{which} to resume from")
    # these are not paths, even if a folder here has such a name
    if weights_from in ("scratch", "auto", *GPT2) or is_url(weights_from):
        return None, False, []
    best, reports = find_checkpoint(weights_from, best=True)
    if reports and not best:
        raise ValueError("; ".join(reports))
    return best, False, reports


def make_writable(out_dir: str) -> None:
    """
    Create the run's folder, and try what a run needs there: a bucket that is mounted as a folder, for
    instance, often cannot rename folders, and then no checkpoint would be completed.

    Raises:
        ValueError: one of these fails.
    """
    tried = unfinished_folder(Path(out_dir), uuid.uuid4().hex, 0)  # after a kill, the next start removes it
    try:
        (tried / "folder").mkdir(parents=True)
        for _ in range(2):  # the second file replaces the first one
            write_whole(tried / "file", "0")
        with open(tried / "file", "a") as file:
            file.write("0")
        os.rename(tried / "folder", tried / "renamed")
    except OSError as e:
        raise unusable(out_dir, e) from e
    finally:
        shutil.rmtree(tried, ignore_errors=True)


def unusable(out_dir: str | Path, error: OSError) -> ValueError:
    """Return the error of a folder that cannot be used on this machine."""
    problem = f"out_dir {out_dir} cannot be used on {socket.gethostname()} ({error})"
    return ValueError(f"{problem}: set another --out_dir=")


def clean_up(out: Path) -> None:
    """
    Remove the unfinished checkpoints, files and deletions that killed runs have left. The owner calls this
    before its first checkpoint.
    """
    for path in out.iterdir():
        if LEFT_OVER.fullmatch(path.name):
            remove(path)


def lock_folder(out: Path, launch: Launch) -> IO[bytes]:
    """
    Open and lock the file `owner` of a folder. A restart of the launch that owns the folder takes it over:
    the earlier start may be cut off from the network.

    Raises:
        ValueError: the run that owns the folder is alive.
        OSError: the file cannot be used.
    """
    path = out / "owner"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.unlink()  # a link or a FIFO, which somebody has put there
    file = open(path, "ab", opener=regular_file)
    before, is_locked = read_owner(out), lock(file)
    if not was_entered_by(out, launch) and is_alive(path, before, is_locked):
        process = console.visible(str(before.get("process", "a process that has just begun")))[:200]
        problem = f"{out} is the folder of a run that is alive ({process})"
        raise ValueError(f"{problem}: stop it, or set --out_dir={free_name(out.parent, out.name)}")
    return file


def check_free(out_dir: str, launch: Launch) -> None:
    """
    Raise ValueError if the folder's run is alive, before anything there is read (rank 0). `enter_folder`
    looks again.
    """
    if is_main() and os.path.exists(os.path.join(out_dir, "owner")):
        with suppress(OSError):  # which enter_folder explains
            lock_folder(Path(out_dir), launch).close()


def enter_folder(out_dir: str, resumed: StoredCheckpoint | None, launch: Launch) -> str:
    """
    Prepare the folder for this run, which resumes from `resumed` or starts from scratch, and make the run the
    owner as long as this process lives (rank 0). Returns the owner's identifier, on other ranks ''.

    Raises:
        ValueError: the folder cannot be used, or its run is alive.
    """
    if not is_main():
        return ""
    out, owner = Path(out_dir), uuid.uuid4().hex
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = lock_folder(out, launch)
        make_writable(out_dir)
        is_restart = was_entered_by(out, launch)
        write_owner(out, owner, launch if is_restart else None)
        threading.Thread(target=keep, args=(out.absolute(), owner, file), daemon=True, name="owner").start()
        clean_up(out)
        if resumed:
            continue_from(out, resumed)
        # what a restart finds was written by this launch before its first checkpoint
        elif not is_restart and (aside := set_aside(out)):
            console.print_line(f"{out_dir} contained an earlier run, which was moved to {aside}")
        for name in (MARK, RESULT):  # of an earlier run, or an earlier start of this one
            (out / name).unlink(missing_ok=True)
        write_owner(out, owner, launch)  # from here on, what is in the folder is this launch's
    except OSError as e:
        raise unusable(out_dir, e) from e
    return owner


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. Without an owner, as with eval_only, nothing is written to the folder."""

    path: Path
    owner: str = ""


def claim_folder(
    config: dict, resumed: OpenCheckpoint | None, ranks: Ranks, plan: Plan, mesh: Mesh
) -> RunFolder:
    """
    Claim the run's folder, which `enter_folder` prepares (all ranks; rank 0 claims the folder). With
    eval_only nothing is written, and the folder stays as it is. Exits with a message if the folder cannot be
    written to, or if ranks see different folders and checkpoints would be incomplete.

    Args:
        resumed: the checkpoint whose run continues; None for a new run.
    """
    if config["eval_only"]:
        return RunFolder(Path(config["out_dir"]))
    # removing and copying what earlier runs left may take a while
    owner = do_together(enter_folder, config["out_dir"], resumed and resumed.stored, ranks.launch)
    folder = RunFolder(Path(config["out_dir"]), broadcast(owner))
    if config["save_checkpoint"] and is_sharded(plan, mesh):
        do_together(check_folder, folder)
    return folder


def is_sharded(plan: Plan, mesh: Mesh) -> bool:
    """Whether ranks hold different parts of the state, so that each writes its part."""
    has_errors = keeps_errors(plan.replica_compression) and plan.world_size > 1
    return plan.zero > 0 or mesh.splits_model or mesh.islands > 1 or has_errors


def check_folder(folder: RunFolder) -> None:
    """
    Raise ValueError if this rank cannot write to the folder that rank 0 has claimed: a checkpoint in shards
    would be incomplete. If rank 0 writes everything, other ranks need the folder only for a resume.
    """
    with suppress(OSError):
        os.listdir(folder.path)  # NFS then looks for new files
    if read_owner(folder.path).get("owner") != folder.owner:
        problem = f"out_dir {folder.path.absolute()} is not rank 0's folder, but all ranks write shards"
        raise ValueError(f"{problem}: share one folder, or set --save_checkpoint=False")
    make_writable(str(folder.path))


def mark_preempted(folder: RunFolder, step: int, reason: str, steps_kept: int) -> None:
    """
    Write the file that says that the run was stopped on request before its end, and how many steps of this
    start a resume need not repeat: a job that gains none again and again must not be requeued. The next start
    removes the file.

    Raises:
        ValueError: a different run has claimed the folder. A file here would put that run back into the
            queue.
    """
    check_owner(folder.path, folder.owner)
    mark = json.dumps({"iter": step, "reason": reason, "steps": steps_kept})
    write_whole(folder.path / MARK, f"{mark}\n")


def exclude_steps(folder: RunFolder, steps: Iterable[int]) -> None:
    """
    Record that each resume leaves out these steps, which were not finite.

    Raises:
        ValueError: a different run has claimed the folder.
    """
    check_owner(folder.path, folder.owner)
    write_whole(folder.path / EXCLUDED, json.dumps(sorted(steps)))


def excluded_steps(out_dir: str) -> list[int]:
    """The steps that a resume leaves out."""
    path = Path(out_dir, EXCLUDED)
    return json.loads(read_utf8(path)) if path.exists() else []


def continue_from(out: Path, resumed: StoredCheckpoint) -> None:
    """
    Prepare the folder for a run that resumes from `resumed`. Newer checkpoints, which are damaged or were not
    chosen, are renamed, since they must not count as kept. They are not read: there may be terabytes.
    """
    for folder in step_folders(out):
        if step_of(folder) > resumed.step:
            kind = "damaged" if folder.name in resumed.damaged else "abandoned"
            os.rename(folder, free_name(out, f"{kind}_{folder.name}"))
    if not resumed.is_bare:
        link_checkpoints(out, resumed.folder, best_folder(out, resumed.manifest))


def set_aside(out: Path) -> Path | None:
    """
    Prepare the folder for a run from scratch: move an earlier run's checkpoints and what its sinks wrote,
    including all files called metrics*, to previous_1, previous_2, ..., so that nothing is overwritten or
    mistaken for the new run's. Returns the folder to which they were moved; None if there was no earlier run.
    """
    has_losses = any({"loss", "val_loss"} & r.keys() for r in read_records(out / "metrics.jsonl"))
    if not (has_losses or is_run(out)):
        return None
    previous = free_name(out, "previous", first=1)
    previous.mkdir()
    names = ("ckpt.pt", "ckpt_best.pt", "loss.png", "tensorboard", RESULT, EXCLUDED)
    others = [out / name for name in names if os.path.lexists(out / name)]
    for path in [*step_folders(out), *others, *out.glob("metrics*")]:
        os.rename(path, previous / path.name)
    return previous
