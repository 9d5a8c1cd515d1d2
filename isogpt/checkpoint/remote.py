"""
Read checkpoints at a URL, through fsspec. A URL contains them as a run's folder does: URL/step_00001200/ with
manifest.json, which is written last, and the files that it names. See mirror.py for how they get there.

What is downloaded is committed like a checkpoint that a run writes: after a kill, it is complete or absent.
"""

import errno
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isogpt.checkpoint.manifest import (
    STEP,
    damaged_file,
    parse_manifest,
    sealed,
    step_folder,
    steps_in,
    unfinished_folder,
    wrong_size,
)
from isogpt.checkpoint.owner import was_entered_by
from isogpt.checkpoint.search import StoredCheckpoint, newest_checkpoint, open_folder, place_of
from isogpt.common import console
from isogpt.common.files import LARGEST_TEXT, free_name, reason_of, remove, sync_folder, write_whole
from isogpt.common.packages import needed_by
from isogpt.launch.launchers import Launch
from isogpt.launch.network import attempts
from isogpt.launch.together import broadcast, do_together, exit_together, gather_objects, is_main, own_rank
from isogpt.options.values import without_credentials

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MANIFEST = "manifest.json"
ABANDONED = "abandoned_manifest.json"  # of a step that was not chosen, and does not count any more
MISSING = f"{MANIFEST} is missing"  # the upload was not completed
PAUSES_S = (1.0, 5.0)  # before a file is downloaded again
FILES_AT_ONCE = 8
VIEW_S = 5.0  # how late a network file system may show a new folder
DISK_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
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
    def name(self) -> str:
        """The name of the step's folder."""
        return step_folder(Path(), self.step).name

    @property
    def shown(self) -> str:
        """Its address, for messages."""
        return f"{without_credentials(self.url)}/{self.name}"


# ------------------------------------------------------------------------------------------------------------
# what is there


def open_url(url: str) -> tuple["AbstractFileSystem", str]:
    """
    The file system of a URL, and the path there.

    Raises:
        ValueError: the form of the URL is not known, or a package is missing.
        ConnectionError: the file system cannot be opened.
    """
    with needed_by(without_credentials(url), "fsspec"):
        import fsspec
    try:
        with reaching(url):
            files, path = fsspec.url_to_fs(url)
    except ConnectionError as e:
        protocol, cause = url.partition("://")[0], e.__cause__
        if protocol not in fsspec.available_protocols():
            possible = "s3://, gs://, hf://, abfs://, sftp:// and others"
            raise ValueError(
                f"{without_credentials(url)}: fsspec does not know {protocol}://; possible are {possible}"
            ) from e
        if isinstance(cause, ImportError):
            package = (getattr(cause.__cause__, "name", None) or protocol).partition(".")[0]
            raise ValueError(f"{protocol}:// needs the package {package}: pip install {package}") from e
        raise
    return files, path.rstrip("/")


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """
    Raise ConnectionError if the block cannot read from the URL: file systems raise nearly anything. That
    something is not there is FileNotFoundError, and a full disk of this machine the OSError as it is.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as e:
        if isinstance(e, OSError) and e.errno in DISK_FAILS:
            raise
        shown = without_credentials(url)
        reason = reason_of(e).replace(url, shown)[:300]
        raise ConnectionError(f"{shown} cannot be read ({reason})") from e


def list_steps(url: str) -> list[int]:
    """
    The steps for which there is a folder at the URL, newest first: not all need be complete. Raises as
    `open_url`.
    """
    files, path = open_url(url)
    with reaching(url):
        files.invalidate_cache()  # a listing that this process has read before
        try:
            names = [name.rstrip("/").rpartition("/")[2] for name in files.ls(path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
    return sorted((int(match[1]) for name in names if (match := STEP.fullmatch(name))), reverse=True)


def read_step(url: str, step: int) -> tuple[RemoteStep | None, str]:
    """Read a step's manifest: (the step, '') or (None, what is wrong). Raises as `open_url`."""
    files, path = open_url(url)
    path = f"{path}/{step_folder(Path(), step).name}/{MANIFEST}"
    try:
        with reaching(url):
            text = files.cat_file(path) if files.size(path) <= LARGEST_TEXT else b""
    except FileNotFoundError:
        return None, MISSING
    manifest = parse_manifest(text.decode(errors="replace"))
    if not manifest:
        return None, f"{MANIFEST} is damaged"
    if manifest["step"] != step:
        return None, f"it was renamed: its checkpoint is that of step {manifest['step']}"
    return RemoteStep(url, manifest), ""


def newest_whole(
    url: str, steps: Iterable[int], damaged: dict[int, str]
) -> tuple[RemoteStep | None, dict[int, str]]:
    """
    The first of these steps at the URL whose manifest is intact; None if there is none. Raises as `open_url`.

    Args:
        damaged: what is wrong with steps, as far as it is known.

    Returns:
        (the step, what is wrong with those before it)
    """
    problems = {}
    for step in steps:
        remote, problem = (None, damaged[step]) if step in damaged else read_step(url, step)
        if remote:
            return remote, problems
        problems[step] = problem
    return None, problems


def reports_of(url: str, problems: dict[int, str]) -> list[str]:
    """A sentence for each step that is not whole."""
    states = {step: "not complete" if text == MISSING else "damaged" for step, text in problems.items()}
    shown = without_credentials(url)
    return [
        f"{shown}/{step_folder(Path(), step).name} is {state}: {problems[step]}"
        for step, state in states.items()
    ]


# ------------------------------------------------------------------------------------------------------------
# downloading


def download(remote: RemoteStep, target: Path) -> str:
    """
    Download a step into a new folder. Returns what is wrong with the step's files; '' if the folder is there
    now. If it was there before, it is renamed, since its content is damaged.

    Raises:
        ConnectionError: the files cannot be read.
        OSError: the disk is full, for instance.
    """
    files, path = open_url(remote.url)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unfinished_folder(target.parent, uuid.uuid4().hex, remote.step)
    unfinished.mkdir()
    try:
        fetch = partial(fetch_file, files, f"{path}/{remote.name}", unfinished, remote.manifest["files"])
        with reaching(remote.url), ThreadPoolExecutor(FILES_AT_ONCE if files.async_impl else 1) as pool:
            for problem in pool.map(fetch, remote.manifest["files"]):
                if problem:
                    pool.shutdown(cancel_futures=True)
                    return problem
        write_whole(unfinished / MANIFEST, sealed(remote.manifest))
        if os.path.lexists(target):
            os.rename(target, free_name(target.parent, f"damaged_{target.name}"))
        os.rename(unfinished, target)
        sync_folder(target.parent)
    finally:
        remove(unfinished)  # after an error
    return ""


def fetch_file(files: "AbstractFileSystem", source: str, folder: Path, entries: dict, name: str) -> str:
    """
    Download a file of a step and compare it with its entry in the manifest. Networks fail now and then: if
    it cannot be read or differs, it is downloaded again. Returns what is wrong with it; '' if it is right.
    """
    path = folder / name
    for pause_s in (*PAUSES_S, None):
        try:
            files.get_file(f"{source}/{name}", str(path))
            problem = wrong_size(path, entries[name]) or damaged_file(path, entries)
        except FileNotFoundError:
            problem = f"{name} is missing"
        except Exception as e:
            if pause_s is None or (isinstance(e, OSError) and e.errno in DISK_FAILS):
                raise
            problem = "it cannot be read"
        if not problem:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
            break
        if pause_s is not None:
            time.sleep(pause_s)
    return problem


def fetch_together(remote: RemoteStep, target: Path) -> str:
    """
    Download a step, whose folder then is `target` on each machine (all ranks, with the same arguments). Rank
    0 is the first, then one rank on each machine that does not see the folder. Exits with a message if a file
    cannot be read.

    Returns:
        what is wrong with the step's files; '' if nothing is.
    """
    if is_main():
        size = sum(entry.get("bytes", 0) for entry in remote.manifest["files"].values())
        console.print_to_stderr(f"downloading {remote.shown} ({size / 1e6:,.1f} MB) to {target.parent}")
    if problem := broadcast(do_together(download_if, is_main(), remote, target)):
        return problem
    seen = gather_objects((place_of(target.parent), do_together(lacks, target)))
    is_first_of_lacking = seen[own_rank()][1] and seen.index(seen[own_rank()]) == own_rank()
    problem = do_together(download_if, is_first_of_lacking, remote, target)
    with exit_together():
        if problem:
            raise ValueError(f"{remote.shown} is damaged as this machine has downloaded it: {problem}")
    return ""


def download_if(is_chosen: bool, remote: RemoteStep, target: Path) -> str:
    """What `download` returns on a rank that is chosen; '' on other ranks."""
    return download(remote, target) if is_chosen else ""


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
    Before a run looks for what it starts from: if it resumes and the mirror contains a newer step than
    out_dir, download this step into out_dir, after the best one if it is not there (all ranks). Exits with a
    message if the mirror is needed and cannot be read.

    Args:
        known: what is wrong with the folders in out_dir, on rank 0, see search.newest_checkpoint.

    Returns:
        on rank 0 a sentence for each newer step that is not whole, or about a mirror that cannot be read
    """
    damaged = {}
    while True:
        remote, reports = do_together(look_at_mirror, config, launch, known, damaged)
        if not (remote := broadcast(remote)):
            return reports
        target = step_folder(Path(config["out_dir"]), remote.step)
        if problem := fetch_together(remote, target):
            damaged[remote.step] = problem
        else:
            known.pop(target, None)


def look_at_mirror(
    config: dict, launch: Launch, known: dict[Path, str], damaged: dict[int, str]
) -> tuple[RemoteStep | None, list[str]]:
    """Rank 0's part of `fetch_newer`: the step to download next, and the sentences."""
    if not is_main():
        return None, []
    is_restart = was_entered_by(Path(config["out_dir"]), launch)
    if is_restart:  # goes on with the newest, see folder.look_for_start
        return step_to_download(config | {"resume_step": -1}, known, damaged)
    if config["init_from"].split(":")[0] in ("resume", "auto"):
        return step_to_download(config, known, damaged)
    return None, []  # mirror.py refuses to replace another run's checkpoints


def step_to_download(
    config: dict, known: dict[Path, str], damaged: dict[int, str]
) -> tuple[RemoteStep | None, list[str]]:
    """
    The step of the mirror to download for a resume, and a sentence for each newer one that is not whole. None
    if the mirror contains nothing newer than out_dir.

    Raises:
        ValueError: there is nothing to resume from, or the mirror may contain it but cannot be read.
    """
    url, out_dir, resume_step = config["mirror"], config["out_dir"], config["resume_step"]
    local, local_reports = newest_checkpoint(out_dir, resume_step, known)
    try:
        steps = [s for s in list_steps(url) if resume_step in (-1, s) and (not local or s > local.step)]
        newest, problems = newest_whole(url, steps, damaged)
        best = newest and best_beside(newest, damaged, steps_in(out_dir))
    except ConnectionError as e:
        if local:
            return None, [f"mirror {e}: the run continues with {local.path}"]
        raise ValueError(f"mirror {e}, and {out_dir} contains no checkpoint to resume from: {ADVICE}") from e
    reports = reports_of(url, problems)
    is_damaged = local_reports or any(problem != MISSING for problem in problems.values())
    if not (newest or local) and (config["init_from"] == "resume" or is_damaged):
        step = "" if resume_step == -1 else f" of step {resume_step}"
        text = f"no checkpoint{step} to resume from in {out_dir} or at {without_credentials(url)}"
        raise ValueError("; ".join([text, *local_reports, *reports]))
    return best or newest, reports


def best_beside(newest: RemoteStep, damaged: dict[int, str], there: Iterable[int] = ()) -> RemoteStep | None:
    """
    The step with the best validation loss, by the newest one's manifest, if it is another one, intact as far
    as is known, and not `there` already.
    """
    step = newest.manifest["best_step"]
    if step in (-1, newest.step, *there, *damaged):
        return None
    return read_step(newest.url, step)[0]


def abandon_newer(url: str, step: int) -> None:
    """
    After a resume from an older step, let the newer steps of a mirror count no longer, as does
    folder.continue_from on the disk: their manifests are renamed. Prints a warning if this is not possible.
    """
    try:
        files, path = open_url(url)
        for newer in list_steps(url):
            folder = f"{path}/{step_folder(Path(), newer).name}"
            with reaching(url):
                if newer > step and files.exists(f"{folder}/{MANIFEST}"):
                    files.mv(f"{folder}/{MANIFEST}", f"{folder}/{ABANDONED}")
    except (OSError, ValueError) as e:
        text = f"the mirror may still contain steps after {step}, to which a later resume would return"
        console.print_to_stderr(f"warning: {console.visible(str(e))}: {text}")


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
        remote, reports = do_together(find_weights, url, best, damaged)
        remote = broadcast(remote)
        problem = fetch_together(remote, target)
        damaged[remote.step] = problem
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
    run, _, name = url.rstrip("/").rpartition("/")
    if match := STEP.fullmatch(name):
        steps = [int(match[1])]
    else:
        run = url.rstrip("/")
        steps = list_steps(run)
    newest, problems = newest_whole(run, steps, damaged)
    reports = reports_of(run, damaged | problems)
    if not newest:
        text = f"init_from {without_credentials(url)} contains no checkpoint of a run"
        details = reports or ["set the URL of a mirror, or of one of its steps"]
        raise ValueError("; ".join([text, *details]))
    other = best_beside(newest, damaged) if best and not match else None
    return other or newest, reports
