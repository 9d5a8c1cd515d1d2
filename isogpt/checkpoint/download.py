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
from isogpt.checkpoint.remote import Remote, check_url, explained, within
from isogpt.checkpoint.search import StoredCheckpoint, find_checkpoint, open_folder
from isogpt.common import console
from isogpt.common.files import free_name, remove
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
        raise ConnectionError(f"{without_credentials(url)} cannot be read ({explained(url, e)})") from e


def fetch(remote: Remote, step: int, out: Path) -> str:
    """
    Download a step into `out`, in which a folder of this name is damaged. Returns why the step is not used;
    '' if it was downloaded.
    """
    folder = step_folder(out, step)
    if not (manifest := remote.manifest(step)):
        return f"{remote.shown(step)} is not complete: manifest.json is missing or damaged"
    size = size_of(manifest) / 1e6
    console.print_to_stderr(f"downloading {remote.shown(step)} ({size:,.1f} MB) to {out}")
    unfinished = unfinished_folder(out, uuid.uuid4().hex, step)  # the next start deletes it
    try:
        remote.get(manifest, unfinished / folder.name)
        problem = damage(unfinished / folder.name)
        if not problem and folder.exists():
            os.rename(folder, free_name(out, f"damaged_{folder.name}"))
        if not problem:
            os.rename(unfinished / folder.name, folder)
    except FileNotFoundError as e:
        problem = str(e)
    finally:
        remove(unfinished)
    return f"{remote.shown(step)} is damaged: {problem}" if problem else ""


def fetch_first(remote: Remote, steps: Iterable[int], out: Path) -> tuple[list[int], list[str]]:
    """
    Download the first of these steps that is whole into `out`. Returns it, and a sentence for each one before
    it.
    """
    reports = []
    for step in steps:
        if not (report := fetch(remote, step, out)):
            return [step], reports
        reports.append(report)
    return [], reports


def fetch_missing(url: str, steps: list[int], out: Path) -> None:
    """Download what rank 0 has downloaded, on the first rank of a machine that does not see it."""
    here = step_folders(out)
    for step in steps:
        if step_folder(out, step) not in here and os.environ.get("LOCAL_RANK", "0") == "0":
            with reading(url):
                report = fetch(Remote(url), step, out)
            if report:
                raise ValueError(report)


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
    check_url(url)
    try:
        with reading(url):
            remote = Remote(url)
            there = within(ANSWER_S, remote.steps)
    except ConnectionError as e:
        if local:
            return [], [f"mirror {e}: the run continues with {local.path}"]
        raise ValueError(f"mirror {e}, and {out} contains no checkpoint to resume from: {ADVICE}") from e
    newer = [step for step in there if step > (local.step if local else -1) and asked in (-1, step)]
    with reading(url):
        fetched, reports = fetch_first(remote, newer, out)
        newest = read_manifest(step_folder(out, fetched[0])) if fetched else local.manifest if local else {}
        best = newest.get("best_step")
        if best in there and not step_folder(out, best).exists():
            more, reports_of_best = fetch_first(remote, [best], out)
            return fetched + more, reports + reports_of_best
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
    steps, reports = broadcast(do_together(find_weights, run, out, asked, best))
    do_together(fetch_missing, run, steps, out)
    for report in reports if is_main() else []:
        console.print_to_stderr(f"warning: {console.visible(report)}")
    return open_folder(step_folder(out, steps[0]))


def find_weights(run: str, out: Path, asked: int, best: bool) -> tuple[list[int], list[str]]:
    """Rank 0's part of `fetch_weights`: the step, and a sentence for each better one that is not whole."""
    if not is_main():
        return [], []
    check_url(run)
    with reading(run):
        remote = Remote(run)
        there = within(ANSWER_S, remote.steps)
        newest = next(filter(None, map(remote.manifest, there)), {})
        first = newest.get("best_step") if asked == -1 and best else asked
        steps = sorted(there, key=lambda step: step != first)  # the order stays otherwise
        fetched, reports = fetch_first(remote, steps if asked == -1 else [asked], out)
    if not fetched:
        text = f"init_from {without_credentials(run)} contains no checkpoint of a run"
        raise ValueError("; ".join([text, *(reports or ["set the URL of a mirror, or of one of its steps"])]))
    return fetched, reports


def discard_weights(stored: StoredCheckpoint) -> None:
    """Delete what `fetch_weights` has downloaded, after all ranks have read it."""
    out = stored.folder.parent
    remove(out)
    with suppress(OSError):  # it is not empty, or another rank has deleted it
        out.parent.rmdir()
