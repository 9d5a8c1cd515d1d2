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
    step_of,
    unfinished_folder,
)
from isogpt.checkpoint.owner import was_entered_by
from isogpt.checkpoint.remote import Remote, check_url, explained, name_of, within
from isogpt.checkpoint.search import StoredCheckpoint, open_folder
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
    Download a step into `out`, unless it is there. Returns what is wrong with it; '' if it is complete. A
    folder that is there, but damaged, is renamed.
    """
    folder = step_folder(out, step)
    if not (manifest := remote.manifest(step)):
        return "not complete: manifest.json is missing or damaged"
    place = f"{without_credentials(remote.url)}/{folder.name}"
    console.print_to_stderr(f"downloading {place} ({size_of(manifest) / 1e6:,.1f} MB) to {out}")
    unfinished = unfinished_folder(out, uuid.uuid4().hex, step)  # the next start deletes it
    try:
        remote.get(manifest, unfinished / folder.name)
        if problem := damage(unfinished / folder.name):
            return f"damaged: {problem}"
        if folder.exists():
            os.rename(folder, free_name(out, f"damaged_{folder.name}"))
        os.rename(unfinished / folder.name, folder)
    except FileNotFoundError as e:
        return f"damaged: {e}"
    finally:
        remove(unfinished)
    return ""


def fetch_first(remote: Remote, steps: Iterable[int], out: Path, reports: list[str]) -> list[int]:
    """
    Download the first of these steps that is whole into `out`. Returns it, and adds a sentence to `reports`
    for each one before.
    """
    for step in steps:
        if not (problem := fetch(remote, step, out)):
            return [step]
        reports.append(f"{without_credentials(remote.url)}/{name_of(step)} is {problem}")
    return []


def fetch_elsewhere(url: str, steps: list[int], out: Path) -> list[int]:
    """
    Download what rank 0 has downloaded on each machine that does not see the folder, on its first rank (all
    ranks). Returns the steps on all ranks.
    """
    steps = broadcast(steps)
    do_together(fetch_missing, url, steps, out)
    return steps


def fetch_missing(url: str, steps: list[int], out: Path) -> None:
    """This rank's part of `fetch_elsewhere`."""
    here = {path.name for path in out.glob("step_*")}
    missing = [step for step in steps if name_of(step) not in here]
    if missing and os.environ.get("LOCAL_RANK", "0") == "0":
        reports = []
        with reading(url):
            for step in missing:
                fetch_first(Remote(url), [step], out, reports)
        if reports:
            raise ValueError("; ".join(reports))


def fetch_newer(config: dict, launch: Launch, known: dict[Path, str]) -> list[str]:
    """
    If a run resumes and the mirror contains a newer step than out_dir, download it into out_dir, and the best
    step if that is not there, before the run looks for what it starts from (all ranks). Exits with a message
    if the mirror is needed and cannot be read.

    Args:
        known: what is wrong with folders in out_dir, on rank 0, which do not count.

    Returns:
        on rank 0 a sentence for each newer step that is not whole, or about a mirror that cannot be read
    """
    if not config["mirror"]:
        return []
    steps, reports = do_together(fetch_for_resume, config, launch, known)
    fetch_elsewhere(config["mirror"], steps, Path(config["out_dir"]))
    return reports


def fetch_for_resume(config: dict, launch: Launch, known: dict[Path, str]) -> tuple[list[int], list[str]]:
    """Rank 0's part of `fetch_newer`. Returns the steps that it has downloaded, and the sentences."""
    url, out, init_from = config["mirror"], Path(config["out_dir"]), config["init_from"]
    is_restart = was_entered_by(out, launch)  # goes on with the newest, see folder.look_for_start
    if not is_main() or not (is_restart or init_from.split(":")[0] in ("resume", "auto")):
        return [], []  # mirror.py refuses to replace another run's checkpoints
    check_url(url)
    here = [step_of(f) for f in step_folders(out) if f not in known and read_manifest(f)]
    reports = []
    try:
        with reading(url):
            remote = Remote(url)
            there = within(ANSWER_S, remote.steps)
    except ConnectionError as e:
        if here:
            return [], [f"mirror {e}: the run continues with {step_folder(out, here[0])}"]
        raise ValueError(f"mirror {e}, and {out} contains no checkpoint to resume from: {ADVICE}") from e
    asked = -1 if is_restart else config["resume_step"]
    newer = [step for step in there if step > max(here, default=-1)]
    if asked != -1:
        newer = [step for step in there if step == asked and step not in here]
    with reading(url):
        fetched = fetch_first(remote, newer, out, reports)
        newest = (fetched or here)[:1]
        best = [read_manifest(step_folder(out, step))["best_step"] for step in newest]
        lacking = [step for step in best if step in there and step not in (*here, *newest)]
        fetched += fetch_first(remote, lacking, out, reports)
    for step in fetched:
        known.pop(step_folder(out, step), None)
    if not newest and (init_from == "resume" or any(" is damaged" in report for report in reports)):
        text = f"no checkpoint to resume from in {out} or at {without_credentials(url)}"
        raise ValueError("; ".join([text, *reports]))
    return fetched, reports


def fetch_weights(url: str, out_dir: str, best: bool = True) -> StoredCheckpoint:
    """
    Download the best checkpoint of a run at a URL, or the newest one, or the step that the URL names, into a
    new folder in out_dir (all ranks). `discard_weights` deletes it; after a kill, the next run in out_dir
    does. Exits with a message if there is none, or it cannot be read.
    """
    run, name = url.rstrip("/"), url.rstrip("/").rpartition("/")[2]
    if match := STEP.fullmatch(name):
        run = run.removesuffix(f"/{name}")
    out = Path(out_dir) / broadcast(unfinished_folder(Path(), uuid.uuid4().hex, 0).name)
    steps, reports = do_together(find_weights, run, out, int(match[1]) if match else None, best)
    (step,) = fetch_elsewhere(run, steps, out)
    for report in reports:
        console.print_to_stderr(f"warning: {console.visible(report)}")
    return open_folder(step_folder(out, step))


def find_weights(run: str, out: Path, asked: int | None, best: bool) -> tuple[list[int], list[str]]:
    """Rank 0's part of `fetch_weights`: the step, and a sentence for each better one that is not whole."""
    if not is_main():
        return [], []
    check_url(run)
    reports = []
    with reading(run):
        remote = Remote(run)
        steps = there = within(ANSWER_S, remote.steps)
        if best:
            newest = next(filter(None, map(remote.manifest, there)), {})
            steps = sorted(there, key=lambda step: step != newest.get("best_step"))
        found = fetch_first(remote, steps if asked is None else [asked], out, reports)
    if not found:
        text = f"init_from {without_credentials(run)} contains no checkpoint of a run"
        raise ValueError("; ".join([text, *(reports or ["set the URL of a mirror, or of one of its steps"])]))
    return found, reports


def discard_weights(stored: StoredCheckpoint) -> None:
    """Delete what `fetch_weights` has downloaded, after all ranks have read it."""
    out = stored.folder.parent
    remove(out)
    with suppress(OSError):  # it is not empty, or another rank has deleted it
        out.parent.rmdir()
