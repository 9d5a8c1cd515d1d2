"""
Download checkpoints from a URL: for a resume with a mirror, and for --init_from=URL.

What is downloaded has another name until all of it is there: after a kill, it is complete or absent.
"""

import os
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from isogpt.checkpoint.manifest import STEP, is_run, size_of, step_folder, steps_in, unfinished_folder
from isogpt.checkpoint.remote import ANSWER_S, Remote, explained
from isogpt.checkpoint.search import Result, StoredCheckpoint, find_checkpoint
from isogpt.common import console
from isogpt.common.files import free_name, remove
from isogpt.common.patience import within
from isogpt.launch.together import broadcast, do_together, exit_together, is_main
from isogpt.options.values import without_credentials


def list_steps(url: str, out: Path) -> tuple[list[int], list[int]]:
    """
    The steps in `out` and at a URL, newest first (rank 0). If the URL cannot be read, a run whose folder
    contains checkpoints continues without it, and prints a warning.
    """
    if not is_main():
        return [], []
    here = steps_in(out)
    try:
        return here, within(ANSWER_S, Remote(url).steps)
    except Exception as e:
        if not is_run(out):  # there may be what the run should continue
            raise unreadable(url, e) from e
        console.print_line(f"warning: {unreadable(url, e)}: the run continues with what {out} contains")
        return here, []


def unreadable(url: str, error: Exception) -> ConnectionError:
    """The error of a URL that cannot be read: file systems raise nearly anything."""
    problem = f"{without_credentials(url)} cannot be read ({explained(error)})"
    return ConnectionError(console.visible(problem))


def fetch(url: str, step: int, out: Path, is_mine: bool, replaces: bool = False) -> None:
    """
    Download a step into `out`, on ranks with `is_mine`, if it is not there; `replaces`: also if it is, since
    it is damaged. Nothing happens if the step does not count.
    """
    folder = step_folder(out, step)
    unfinished = out / f"unfinished_{folder.name}"
    if not is_mine or (step in steps_in(out) and not replaces):
        return
    try:
        remote = Remote(url)
        if not (manifest := remote.manifest(step)):
            return
        size = f"{size_of(manifest) / 1e6:,.1f} MB"
        shown = f"{without_credentials(url)}/{folder.name}"
        console.print_to_stderr(f"downloading {shown} ({size}) to {out}")
        remove(unfinished)  # of a start that was killed
        remote.get(step, manifest, unfinished)
    except Exception as e:
        raise unreadable(url, e) from e
    if folder.exists():
        os.rename(folder, free_name(out, f"damaged_{folder.name}"))
    os.rename(unfinished, folder)


def fetch_on_machines(url: str, step: int, out: Path, replaces: bool = False) -> None:
    """Download a step on rank 0, then on each machine that does not see it (all ranks). See `fetch`."""
    do_together(fetch, url, step, out, is_main(), replaces)
    do_together(fetch, url, step, out, os.environ.get("LOCAL_RANK", "0") == "0")


def find_newest(out_dir: str, asked: int, url: str) -> Result:
    """
    What `find_checkpoint` returns for the newest checkpoint of a run, which is downloaded first, with the
    best one, if only the URL contains it (all ranks). What is damaged in `out_dir` may be intact there. Exits
    with a message if the URL is needed and cannot be read.

    Args:
        asked: this step and no other; -1: any.
        url: of a mirror; "": there is none.
    """
    out, reports, damaged = Path(out_dir), [], []
    here, there = broadcast(do_together(list_steps, url, out)) if url else ([], [])
    for step in sorted({*here, *there} if asked == -1 else {asked}, reverse=True):
        if step in there:
            fetch_on_machines(url, step, out)
        found, problems = find_checkpoint(out_dir, step=step)
        if not found and step in here and step in there:
            fetch_on_machines(url, step, out, replaces=True)
            found, _ = find_checkpoint(out_dir, step=step)
        reports += problems
        if found:
            best = found.manifest["best_step"]
            if asked == -1 and best in there:
                fetch_on_machines(url, best, out)
            return replace(found, damaged=(*found.damaged, *damaged)), reports
        damaged.append(step_folder(out, step).name)
    return (None, reports) if reports else find_checkpoint(out_dir, step=asked)


def fetch_weights(url: str, out_dir: str, best: bool = True) -> Result:
    """
    Download the best checkpoint of a run at a URL, or the newest one, or the step that the URL names, into a
    new folder in out_dir (all ranks). `discard_weights` deletes it; after a kill, the next run in out_dir
    does. Exits with a message if there is none, or it cannot be read. Returns what `find_checkpoint` does.
    """
    url, asked = url.rstrip("/"), -1
    root, _, name = url.rpartition("/")
    if match := STEP.fullmatch(name):
        url, asked, best = root, int(match[1]), False
    out = unfinished_folder(Path(out_dir), broadcast(uuid.uuid4().hex), 0)
    stored, damaged = find_newest(str(out), asked, url)
    if stored and best and stored.step != stored.manifest["best_step"]:
        stored, damaged = find_checkpoint(str(out), best=True)
    with exit_together():
        if not stored:
            why = "; ".join(damaged) or "set the URL of a mirror or of a step"
            raise ValueError(f"{without_credentials(url)} contains no such checkpoint: {why}")
    return stored, damaged


def discard_weights(stored: StoredCheckpoint) -> None:
    """Delete what `fetch_weights` has downloaded, after all ranks have read it, and an empty out_dir."""
    remove(stored.folder.parent)
    with suppress(OSError):  # out_dir contains a run
        stored.folder.parents[1].rmdir()
