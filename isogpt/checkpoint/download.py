"""
Download checkpoints from a URL: for a resume with a mirror, and for --init_from=URL.

What is downloaded has another name until its checksums match: after a kill, it is complete or absent.
"""

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isogpt.checkpoint.manifest import (
    STEP,
    damage,
    read_manifest,
    size_of,
    step_folder,
    step_folders,
    unfinished_folder,
)
from isogpt.checkpoint.owner import was_entered_by
from isogpt.checkpoint.remote import Remote, check_url, explained
from isogpt.checkpoint.search import StoredCheckpoint, find_checkpoint, open_folder
from isogpt.common import console
from isogpt.common.files import free_name, remove
from isogpt.common.patience import within
from isogpt.launch.launchers import Launch
from isogpt.launch.together import broadcast, do_together, is_main
from isogpt.options.values import without_credentials

ANSWER_S = 120.0  # how long a start waits for the list of steps
ADVICE = "check the address, the network and the credentials"


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Raise ConnectionError if the block cannot read from the URL: file systems raise nearly anything."""
    try:
        yield
    except Exception as e:
        raise ConnectionError(f"{without_credentials(url)} cannot be read ({explained(e)})") from e


def open_run(url: str) -> tuple[Remote, list[int]]:
    """Open a run's folder at a URL. Returns it, and its steps, newest first."""
    check_url(url)
    with reading(url):
        remote = Remote(url)
        return remote, within(ANSWER_S, remote.steps)


def fetch(remote: Remote, manifest: dict, out: Path) -> str:
    """
    Download the step with this manifest into `out`, in which a folder of this name is damaged. Returns what
    is wrong with it; '' if it was downloaded.
    """
    folder = step_folder(out, manifest["step"])
    shown, size = remote.shown(manifest["step"]), size_of(manifest) / 1e6
    console.print_to_stderr(f"downloading {shown} ({size:,.1f} MB) to {out}")
    unfinished = unfinished_folder(out, uuid.uuid4().hex, manifest["step"])  # the next start deletes it
    try:
        remote.get(manifest, unfinished / folder.name)
        if problem := damage(unfinished / folder.name):
            return f"{shown} is damaged: {problem}"
        if folder.exists():
            os.rename(folder, free_name(out, f"damaged_{folder.name}"))
        os.rename(unfinished / folder.name, folder)
    finally:
        remove(unfinished)
    return ""


def fetch_first(remote: Remote, steps: Iterable[int], out: Path, reports: list[str]) -> list[int]:
    """
    Download the first of these steps that is whole into `out`. Returns it, and adds a sentence to `reports`
    for each one before it.
    """
    for step in steps:
        report = f"{remote.shown(step)} is not complete: manifest.json is missing or damaged"
        if manifest := remote.manifest(step):
            report = fetch(remote, manifest, out)
        if not report:
            return [step]
        reports.append(report)
    return []


def fetch_missing(url: str, steps: list[int], out: Path) -> None:
    """Download what rank 0 has downloaded, on the first rank of a machine that does not see it."""
    here, reports = step_folders(out), []
    lacking = [step for step in steps if step_folder(out, step) not in here]
    if lacking and os.environ.get("LOCAL_RANK", "0") == "0":
        with reading(url):
            found = [fetch_first(Remote(url), [step], out, reports) for step in lacking]
        if not all(found):
            raise ValueError("; ".join(reports))


def fetch_newer(config: dict, launch: Launch) -> list[str]:
    """
    If a run resumes and the mirror contains a newer step than out_dir, download it into out_dir, and the best
    step if that is not there, before the run looks for what it starts from (all ranks). Exits with a message
    if the mirror is needed and cannot be read.

    Returns:
        a sentence for each newer step that is not whole, or about a mirror that cannot be read
    """
    url, out, init_from = config["mirror"], Path(config["out_dir"]), config["init_from"]
    if not url:
        return []
    is_restart = broadcast(is_main() and was_entered_by(out, launch))  # see folder.look_for_start
    if not is_restart and init_from.split(":")[0] not in ("resume", "auto"):
        return []  # mirror.py refuses to replace another run's checkpoints
    asked = -1 if is_restart else config["resume_step"]
    # what is damaged here may be intact there, where it would be deleted if the run went back beyond it
    local, damaged = find_checkpoint(str(out), step=asked)
    steps, reports = broadcast(do_together(fetch_for_resume, url, out, asked, local))
    do_together(fetch_missing, url, steps, out)
    is_needed = init_from == "resume" or any(" is damaged" in report for report in reports)
    if is_needed and not (local or steps):
        where = f"no checkpoint to resume from in {out} or at {without_credentials(url)}"
        raise ValueError("; ".join([where, *damaged, *reports]))
    return reports


def fetch_for_resume(
    url: str, out: Path, asked: int, local: StoredCheckpoint | None
) -> tuple[list[int], list[str]]:
    """Rank 0's part of `fetch_newer`. Returns the steps that it has downloaded, and the sentences."""
    if not is_main():
        return [], []
    try:
        remote, there = open_run(url)
    except ConnectionError as e:
        if local:
            return [], [f"mirror {e}: the run continues with {local.path}"]
        raise ValueError(f"mirror {e}, and {out} contains no checkpoint to resume from: {ADVICE}") from e
    newer = [step for step in there if step > (local.step if local else -1) and asked in (-1, step)]
    reports = []
    with reading(url):
        fetched = fetch_first(remote, newer, out, reports)
        newest = read_manifest(step_folder(out, fetched[0])) if fetched else local.manifest if local else {}
        best = newest.get("best_step")
        if best in there and not step_folder(out, best).exists():
            fetched += fetch_first(remote, [best], out, reports)
    return fetched, reports


def fetch_weights(url: str, out_dir: str, best: bool = True) -> StoredCheckpoint:
    """
    Download the best checkpoint of a run at a URL, or the newest one, or the step that the URL names, into a
    new folder in out_dir (all ranks). `discard_weights` deletes it; after a kill, the next run in out_dir
    does. Exits with a message if there is none, or it cannot be read.
    """
    run, _, name = url.rstrip("/").rpartition("/")
    match = STEP.fullmatch(name)
    run, asked = (run, int(match[1])) if match else (url.rstrip("/"), -1)
    out = Path(out_dir) / broadcast(unfinished_folder(Path(), uuid.uuid4().hex, 0).name)
    steps = broadcast(do_together(find_weights, run, out, asked, best))
    do_together(fetch_missing, run, steps, out)
    return open_folder(step_folder(out, steps[0]))


def find_weights(run: str, out: Path, asked: int, best: bool) -> list[int]:
    """Rank 0's part of `fetch_weights`: the step that it has downloaded."""
    if not is_main():
        return []
    (remote, there), reports = open_run(run), []
    with reading(run):
        if asked == -1:
            newest = next(filter(None, map(remote.manifest, there)), {"step": -1, "best_step": -1})
            asked = newest["best_step"] if best and newest["best_step"] in there else newest["step"]
        fetched = fetch_first(remote, [asked] if asked in there else [], out, reports)
    if not fetched:
        why = reports or ["set the URL of a mirror, or of one of its steps"]
        raise ValueError(f"init_from {without_credentials(run)} contains no such checkpoint; {why[0]}")
    return fetched


def discard_weights(stored: StoredCheckpoint) -> None:
    """Delete what `fetch_weights` has downloaded, after all ranks have read it."""
    out = stored.folder.parent
    remove(out)
    with suppress(OSError):  # it is not empty, or another rank has deleted it
        out.parent.rmdir()
