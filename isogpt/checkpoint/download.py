"""
Download checkpoints from a URL: for a resume with a mirror, and for --init_from=URL.

What is downloaded is committed like a checkpoint that a run writes: after a kill, it is complete or absent.
"""

import os
import shutil
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from isogpt.checkpoint.manifest import STEP, damaged_file, sealed, size_of, step_folder, unfinished_folder
from isogpt.checkpoint.owner import was_entered_by
from isogpt.checkpoint.remote import (
    MANIFEST,
    MISSING,
    DamagedFile,
    RemoteFolder,
    check_url,
    name_of,
    open_url,
    reaching,
    repeated,
    within,
)
from isogpt.checkpoint.search import StoredCheckpoint, look, open_folder
from isogpt.common import console
from isogpt.common.files import free_name, remove, sync_folder, write_whole
from isogpt.launch.launchers import Launch
from isogpt.launch.network import attempts, this_machine
from isogpt.launch.together import broadcast, do_together, exit_together, gather_objects, is_main, own_rank
from isogpt.options.values import without_credentials

FILES_AT_ONCE = 8
ANSWER_S = 120.0  # how long a start waits for the manifests
VIEW_S = 5.0  # how late a network file system may show a new folder
ADVICE = "check the address, the network and the credentials"


@dataclass(frozen=True)
class RemoteStep:
    """A checkpoint at a URL whose manifest is intact."""

    url: str  # of the run
    manifest: dict

    @property
    def step(self) -> int:
        """The step."""
        return self.manifest["step"]

    @property
    def shown(self) -> str:
        """Its address, for messages."""
        return f"{without_credentials(self.url)}/{name_of(self.step)}"


# ------------------------------------------------------------------------------------------------------------
# what is there


def choose_step(
    url: str, asked: int, beyond: int, damaged: dict[int, str]
) -> tuple[RemoteStep | None, RemoteStep | None, dict[int, str]]:
    """
    Find the newest step at a URL whose manifest is intact, and the best one by that manifest, among those
    beyond a step, or only the one that is asked for (-1: any). Raises nearly any exception: see
    remote.reaching.

    Args:
        damaged: what is wrong with steps, as far as it is known.

    Returns:
        (the newest one or None; the best one, None if it is the newest one or not intact; what is wrong with
        newer ones)
    """
    folder, problems = open_url(url), {}
    for step in [step for step in folder.steps() if step > beyond and asked in (-1, step)]:
        newest, problem = ({}, damaged[step]) if step in damaged else folder.manifest(step)
        if newest:
            has_other = newest["best_step"] not in (-1, step, *damaged)
            best = folder.manifest(newest["best_step"])[0] if has_other else {}
            return RemoteStep(url, newest), RemoteStep(url, best) if best else None, problems
        problems[step] = problem
    return None, None, problems


def reports_of(url: str, problems: dict[int, str]) -> list[str]:
    """A sentence for each step that is not whole."""
    shown, states = without_credentials(url), {MISSING: "not complete"}
    return [
        f"{shown}/{name_of(step)} is {states.get(text, 'damaged')}: {text}" for step, text in problems.items()
    ]


# ------------------------------------------------------------------------------------------------------------
# downloading


def download(is_chosen: bool, step: RemoteStep, target: Path) -> str:
    """
    Download a step into a new folder, on a rank that is chosen. Returns what is wrong with the step's files;
    '' if the folder is complete. A folder that was there before is renamed, since its content is damaged.

    Raises:
        ConnectionError: the files cannot be read.
        OSError: the disk is full, for instance.
    """
    if not is_chosen:
        return ""
    target.parent.mkdir(parents=True, exist_ok=True)
    size = size_of(step.manifest)
    disk = shutil.disk_usage(target.parent)
    if disk.free < size and disk.total > 0:  # some network file systems do not tell
        raise ValueError(
            f"{step.shown} has {size / 1e9:.3g} GB, and the disk of {target.parent.absolute()} has "
            f"{disk.free / 1e9:.3g} GB of free space: make room, or set --out_dir= to a larger disk"
        )
    unfinished = unfinished_folder(target.parent, uuid.uuid4().hex, step.step)
    unfinished.mkdir()
    try:
        with reaching(step.url):
            folder = open_url(step.url)
            fetch = partial(repeated, fetch_file, folder, step, unfinished)
            with ThreadPoolExecutor(FILES_AT_ONCE if folder.files.async_impl else 1) as pool:
                deque(pool.map(fetch, step.manifest["files"]), maxlen=0)  # an error cancels the others
        write_whole(unfinished / MANIFEST, sealed(step.manifest))
        if os.path.lexists(target):
            os.rename(target, free_name(target.parent, f"damaged_{target.name}"))
        os.rename(unfinished, target)
        sync_folder(target.parent)
    except DamagedFile as e:
        return str(e)
    finally:
        remove(unfinished)  # after an error
    return ""


def fetch_file(folder: RemoteFolder, step: RemoteStep, unfinished: Path, name: str) -> None:
    """Download a file of a step once. Raises DamagedFile if it is not the one in the manifest."""
    path, entries = unfinished / name, step.manifest["files"]
    try:
        folder.files.get_file(folder.path(step.step, name), str(path))
    except FileNotFoundError as e:
        raise DamagedFile(f"{name} is missing") from e
    if problem := damaged_file(path, entries):
        raise DamagedFile(problem)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def fetch_together(step: RemoteStep, target: Path) -> str:
    """
    Download a step, whose folder then is `target` on each machine (all ranks, with the same arguments). Rank
    0 downloads it first, then one rank on each machine that does not see the folder. Exits with a message if
    a file cannot be read.

    Returns:
        what is wrong with the step's files; '' if nothing is.
    """
    if is_main():
        text = f"downloading {step.shown} ({size_of(step.manifest) / 1e6:,.1f} MB) to {target.parent}"
        console.print_to_stderr(text)
    if problem := broadcast(do_together(download, is_main(), step, target)):
        return problem
    place = (this_machine()[1], str(target.parent.resolve()))
    seen = gather_objects((place, do_together(lacks, target)))
    is_first_of_lacking = seen[own_rank()][1] and seen.index(seen[own_rank()]) == own_rank()
    problem = do_together(download, is_first_of_lacking, step, target)
    with exit_together():
        if problem:
            raise ValueError(f"the copy of {step.shown} on this machine is damaged: {problem}")
    return ""


def lacks(target: Path) -> bool:
    """Whether this machine does not see a folder that rank 0 has created; waits for network file systems."""
    for _ in attempts(VIEW_S):
        if target.parent.is_dir() and target.name in os.listdir(target.parent):
            return False
    return True


# ------------------------------------------------------------------------------------------------------------
# a resume from a mirror


def fetch_newer(config: dict, launch: Launch, known: dict[Path, str]) -> list[str]:
    """
    If a run resumes and the mirror contains a newer step than out_dir, download it into out_dir, after the
    best step if that is not there, before the run looks for what it starts from (all ranks). Exits with a
    message if the mirror is needed and cannot be read.

    Args:
        known: what is wrong with the folders in out_dir, on rank 0, see search.newest_checkpoint.

    Returns:
        on rank 0 a sentence for each newer step that is not whole, or about a mirror that cannot be read
    """
    damaged = {}
    while config["mirror"]:
        step, reports = do_together(look_at_mirror, config, launch, known, damaged)
        if not (step := broadcast(step)):
            return reports
        target = step_folder(Path(config["out_dir"]), step.step)
        if problem := fetch_together(step, target):
            damaged[step.step] = problem
        else:
            known.pop(target, None)
    return []


def look_at_mirror(
    config: dict, launch: Launch, known: dict[Path, str], damaged: dict[int, str]
) -> tuple[RemoteStep | None, list[str]]:
    """
    Rank 0's part of `fetch_newer`: the step of the mirror to download next, and a sentence for each newer one
    that is not whole. None if the mirror contains nothing newer than out_dir.

    Raises:
        ValueError: there is nothing to resume from, or the mirror may contain it but cannot be read.
    """
    if not is_main():
        return None, []
    url, out_dir, init_from = config["mirror"], config["out_dir"], config["init_from"]
    is_restart = was_entered_by(Path(out_dir), launch)  # goes on with the newest, see folder.look_for_start
    if not is_restart and init_from.split(":")[0] not in ("resume", "auto"):
        return None, []  # mirror.py refuses to replace another run's checkpoints
    asked = -1 if is_restart else config["resume_step"]
    check_url(url)
    local, damaged_here = look(Path(out_dir), False, asked, {})
    local_reports = [*damaged_here.values()]
    try:
        with reaching(url):
            beyond = local.step if local else -1
            newest, best, problems = within(ANSWER_S, choose_step, url, asked, beyond, damaged)
    except ConnectionError as e:
        if local:
            return None, [f"mirror {e}: the run continues with {out_dir}/{local.path}"]
        raise ValueError(f"mirror {e}, and {out_dir} contains no checkpoint to resume from: {ADVICE}") from e
    reports = reports_of(url, problems)
    is_damaged = local_reports or any(problem != MISSING for problem in problems.values())
    if not (newest or local) and (init_from == "resume" or is_damaged):
        which = "" if asked == -1 else f" of step {asked}"
        text = f"no checkpoint{which} to resume from in {out_dir} or at {without_credentials(url)}"
        raise ValueError("; ".join([text, *local_reports, *reports]))
    is_best_here = best and step_folder(Path(out_dir), best.step).exists()
    return best if best and not is_best_here else newest, reports


# ------------------------------------------------------------------------------------------------------------
# weights


def fetch_weights(url: str, out_dir: str, best: bool = True) -> StoredCheckpoint:
    """
    Download the best checkpoint of a run at a URL, or the newest one, or the step that the URL names, into a
    new folder in out_dir (all ranks). `discard_weights` deletes it; after a kill, the next run in out_dir
    does. Exits with a message if there is none, or it cannot be read.
    """
    damaged, problem = {}, "not tried"
    name = broadcast(unfinished_folder(Path(), uuid.uuid4().hex, 0).name)
    target = Path(out_dir) / name
    while problem:
        step, reports = do_together(find_weights, url, best, damaged)
        step = broadcast(step)
        problem = fetch_together(step, target)
        damaged[step.step] = problem
    for report in reports:
        console.print_to_stderr(f"warning: {console.visible(report)}")
    return open_folder(target)


def discard_weights(stored: StoredCheckpoint) -> None:
    """Delete what `fetch_weights` has downloaded, after all ranks have read it."""
    remove(stored.folder)
    with suppress(OSError):  # it is not empty, or another rank has deleted it
        stored.folder.parent.rmdir()


def find_weights(url: str, best: bool, damaged: dict[int, str]) -> tuple[RemoteStep | None, list[str]]:
    """
    Rank 0's part of `fetch_weights`: the step to download, and a sentence for each one that would be better,
    but is not whole. Raises ValueError if there is none.
    """
    if not is_main():
        return None, []
    run, asked = url.rstrip("/"), -1
    if match := STEP.fullmatch(run.rpartition("/")[2]):
        run, asked = run.rpartition("/")[0], int(match[1])
    check_url(url)
    with reaching(url):
        newest, other, problems = within(ANSWER_S, choose_step, run, asked, -1, damaged)
    reports = reports_of(run, damaged | problems)
    if not newest:
        text = f"init_from {without_credentials(url)} contains no checkpoint of a run"
        details = reports or ["set the URL of a mirror, or of one of its steps"]
        raise ValueError("; ".join([text, *details]))
    return other if other and best and asked == -1 else newest, reports
