"""
Download checkpoints from a URL: for a resume with a mirror, and for --init_from=URL.

What is downloaded has another name until all of it is there: after a kill, it is complete or absent.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isogpt.checkpoint.manifest import STEP, size_of, step_folder, step_folders, unfinished_folder
from isogpt.checkpoint.owner import was_entered_by
from isogpt.checkpoint.remote import ANSWER_S, Remote, explained
from isogpt.checkpoint.search import StoredCheckpoint, find_checkpoint
from isogpt.common import console
from isogpt.common.files import free_name, remove
from isogpt.common.patience import within
from isogpt.launch.launchers import Launch
from isogpt.launch.together import broadcast, do_together, exit_together, is_main
from isogpt.options.values import without_credentials


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Raise ConnectionError if the block cannot read from the URL: file systems raise nearly anything."""
    try:
        yield
    except Exception as e:
        raise ConnectionError(f"{without_credentials(url)} cannot be read ({explained(url, e)})") from e


def steps_at(url: str, found: StoredCheckpoint | None) -> list[int]:
    """
    The steps at a URL, newest first (rank 0). If it cannot be read, a run that has found a checkpoint in its
    folder continues with this one, and prints a warning.
    """
    try:
        with reading(url):
            return within(ANSWER_S, Remote(url).steps) if is_main() else []
    except ConnectionError as e:
        if not found:  # there may be what the run should continue
            raise
        console.print_line(f"warning: mirror {console.visible(str(e))}: the run continues with {found.path}")
        return []


def fetch(url: str, step: int, out: Path, is_mine: bool, replaces: bool = False) -> None:
    """
    Download a step into `out`, on ranks with `is_mine`, if it is not there; `replaces`: also if it is, since
    it is damaged. A step that is not complete is only reported.
    """
    folder = step_folder(out, step)
    if not is_mine or (folder in step_folders(out) and not replaces):
        return
    shown, unfinished = f"{without_credentials(url)}/{folder.name}", out / f"unfinished_{folder.name}"
    with reading(url):
        remote = Remote(url)
        if not (manifest := remote.manifest(step)):
            console.print_line(f"warning: {shown} is not complete: it lacks a valid manifest.json")
            return
        console.print_to_stderr(f"downloading {shown} ({size_of(manifest) / 1e6:,.1f} MB) to {out}")
        remove(unfinished)  # of a start that was killed
        remote.get(step, manifest, unfinished)
        if folder.exists():
            os.rename(folder, free_name(out, f"damaged_{folder.name}"))
        os.rename(unfinished, folder)


def fetch_on_machines(url: str, step: int, out: Path, replaces: bool = False) -> None:
    """Download a step on rank 0, then on each machine that does not see it (all ranks). See `fetch`."""
    do_together(fetch, url, step, out, is_main(), replaces)
    is_there = broadcast(step_folder(out, step).exists())
    do_together(fetch, url, step, out, is_there and os.environ.get("LOCAL_RANK", "0") == "0")


def fetch_run(url: str, out: Path, asked: int, with_best: bool) -> None:
    """
    Download the newest step that is not damaged into `out`, unless `out` contains it or a newer one, and the
    best step (all ranks). A step is verified like any other, and if it is damaged, the next older one is
    tried. Exits with a message if the URL is needed and cannot be read.

    Args:
        asked: download this step and no other; -1: any.
    """
    found, _ = find_checkpoint(str(out), step=asked)
    there = broadcast(do_together(steps_at, url, found))
    for step in there:
        if asked in (-1, step) and not (found and found.step >= step):
            fetch_on_machines(url, step, out, replaces=True)
            found = find_checkpoint(str(out), step=step)[0] or found
    best = found.manifest.get("best_step") if found and with_best else None
    if best in there:
        fetch_on_machines(url, best, out)


def fetch_newer(config: dict, launch: Launch) -> None:
    """
    If a run resumes and the mirror contains a newer step than out_dir, download it into out_dir, before the
    run looks for what it starts from (all ranks). Exits with a message as `fetch_run` does.
    """
    url, out, init_from = config["mirror"], Path(config["out_dir"]), config["init_from"]
    is_restart = broadcast(is_main() and was_entered_by(out, launch))  # see folder.look_for_start
    if url and (is_restart or init_from.split(":")[0] in ("resume", "auto")):
        fetch_run(url, out, -1 if is_restart else config["resume_step"], with_best=True)


def fetch_weights(url: str, out_dir: str, best: bool = True) -> tuple[StoredCheckpoint, list[str]]:
    """
    Download the best checkpoint of a run at a URL, or the newest one, or the step that the URL names, into a
    new folder in out_dir (all ranks). `discard_weights` deletes it; after a kill, the next run in out_dir
    does. Exits with a message if there is none, or it cannot be read. Returns what `find_checkpoint` does.
    """
    url, asked = url.rstrip("/"), -1
    if match := STEP.fullmatch(url.rpartition("/")[2]):
        url, asked, best = url.rpartition("/")[0], int(match[1]), False
    out = Path(out_dir) / broadcast(unfinished_folder(Path(), uuid.uuid4().hex, 0).name)
    fetch_run(url, out, asked, best)
    stored, damaged = find_checkpoint(str(out), best, asked)
    with exit_together():
        if not stored:
            why = "; ".join(damaged) or "set the URL of a mirror, or of one of its steps"
            raise ValueError(f"{without_credentials(url)} contains no such checkpoint: {why}")
    return stored, damaged


def discard_weights(stored: StoredCheckpoint) -> None:
    """Delete what `fetch_weights` has downloaded, after all ranks have read it."""
    remove(stored.folder.parent)
