"""
Copy a run's checkpoints to a URL, in the background (rank 0).

The manifest of a step is uploaded last and deleted first: a kill at any moment leaves a step that is complete
or does not count. What fails is reported, and the next checkpoint is tried.
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from isogpt.checkpoint.manifest import read_manifest, size_of, step_of
from isogpt.checkpoint.remote import (
    ABANDONED,
    MANIFEST,
    RemoteFolder,
    check_url,
    explained,
    name_of,
    open_url,
    repeated,
    within,
)
from isogpt.checkpoint.search import best_folder
from isogpt.common import console
from isogpt.common.console import duration
from isogpt.launch.pretended_ranks import is_pretended
from isogpt.launch.together import do_together, is_main
from isogpt.options.values import without_credentials

if TYPE_CHECKING:
    from isogpt.checkpoint.source import OpenCheckpoint

START_S = 10.0  # how long the start of a run waits for an answer
SLOWEST = 5e6  # bytes per second: at the end, a run waits for a copy at this speed
PATIENCE_S = 60.0  # and this much longer


class Outcome(NamedTuple):
    """What became of a copy: an event, a sentence for the user, the step and facts."""

    event: str
    text: str
    step: int
    facts: dict


@dataclass
class Mirror:
    """
    Copies the newest checkpoint, and the best one, to a URL. A thread copies one checkpoint at a time. Of
    those that are committed meanwhile, only the newest waits: there is no queue.

    Args:
        url: of a folder, for fsspec.
        out: the run's folder.
        keep_last: newest checkpoints to keep at the URL, in addition to the best one (0: all).
        start: the step at which the run continues; None: it is new, so it must not write among the
            checkpoints of an earlier one.
    """

    url: str
    out: Path
    keep_last: int
    start: int | None = None
    seconds: float = 0.0  # that the last copy took
    outcomes: deque = field(default_factory=deque)  # of Outcome, which are not reported yet
    remote: RemoteFolder | None = None  # None: the server has not answered yet
    owner: str = field(init=False)  # what this launch writes at the URL, to claim the folder there
    has_claimed: bool = False  # whether it has done so
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the four below
    wanted: Path | None = None  # the step folder to copy next
    copying: Path | None = None  # the one that is being copied
    skipped: list[str] = field(default_factory=list)  # names of those that a newer one has replaced
    idle: threading.Event = field(default_factory=threading.Event)  # set: there is no thread

    def __post_init__(self) -> None:
        self.owner = uuid.uuid4().hex
        self.idle.set()

    @property
    def shown(self) -> str:
        """The URL without credentials, for messages."""
        return without_credentials(self.url).rstrip("/")

    # -- what the run calls

    def request(self, folder: Path) -> None:
        """Copy this step folder, which is complete, as soon as the copy under way is (returns at once)."""
        with self.lock:
            if self.wanted and self.wanted != folder:
                self.skipped.append(self.wanted.name)
            self.wanted = folder
            if self.idle.is_set():
                self.idle.clear()
                # a daemon: a server that does not respond must not keep the process from exiting
                threading.Thread(target=self.run, daemon=True, name="mirror").start()

    def held(self) -> set[Path]:
        """The step folders that must not be deleted, since they are being copied or are next."""
        with self.lock:
            return {folder for folder in (self.copying, self.wanted) if folder}

    def finish(self, seconds_left: float) -> None:
        """
        Wait until nothing is left to copy, for a limited time of at most `seconds_left`; then report what is
        left.
        """
        manifests = filter(None, map(read_manifest, self.held()))
        size = sum(map(size_of, manifests))
        limit_s = max(0.0, min(PATIENCE_S + size / SLOWEST, seconds_left))
        if self.idle.wait(min(1.0, limit_s)):
            return
        names = ", ".join(sorted(folder.name for folder in self.held()))
        console.print_to_stderr(f"copying {names} to {self.shown}: this may take up to {duration(limit_s)}")
        if not self.idle.wait(limit_s):
            for folder in self.held():
                self.fail(step_of(folder), f"it takes longer than {duration(limit_s)}, and the run ends")

    # -- in the thread

    def run(self) -> None:
        """Copy what is wanted until there is nothing left."""
        while True:
            with self.lock:
                self.copying, self.wanted = self.wanted, None
                folder, skipped = self.copying, self.skipped
                self.skipped = []
                if not folder:
                    return self.idle.set()
            self.copy_with_best(folder, skipped)

    def copy_with_best(self, newest: Path, skipped: list[str]) -> None:
        """Copy the newest step folder, and the best one if it is not there; then remove what is not kept."""
        folder = newest
        try:
            if refusal := self.connect():
                return self.fail(step_of(folder), refusal)
            best = best_folder(self.out, read_manifest(newest))
            self.copy(newest, [name for name in skipped if not best or name != best.name])
            if best and best != newest:
                with self.lock:
                    self.copying = folder = best
                self.copy(best)
            self.tidy(read_manifest(newest), best)
        except Exception as e:  # each file system raises different types
            self.remote = None  # connects again
            # the run may have deleted the folder meanwhile: a better one has replaced it, or a rollback
            if read_manifest(folder):
                self.fail(step_of(folder), f"{explained(self.url, e)}; the next checkpoint is tried")

    def fail(self, step: int | None, reason: str) -> None:
        """Report at which step the mirror fails (None: at the start), and why."""
        place = "" if step is None else f" at {name_of(step)}"
        text = f"warning: the mirror {self.shown} fails{place}: {reason}"
        self.outcomes.append(Outcome("mirror_failed", text, step or self.start or 0, {"reason": reason}))

    def connect(self) -> str:
        """
        Open the folder at the URL and claim it for this launch, unless that has been done. Returns why
        nothing may be copied there, or ''.
        """
        remote = self.remote or open_url(self.url)
        is_first = self.start is None and not self.has_claimed
        if earlier := next((s for s in remote.steps() if remote.manifest(s)[0]), None) if is_first else None:
            return (
                f"{self.shown} contains {name_of(earlier)} of an earlier run: set --mirror= to a different "
                "folder, or --init_from=resume to continue that run"
            )
        path = f"{remote.root}/mirror_owner"
        owner = remote.read(path)
        if self.has_claimed and owner not in ("", self.owner):
            return "a different run now copies there, so this one no longer does: set a different --mirror="
        if owner != self.owner:  # also shows whether credentials are right
            if not remote.is_object_store:
                remote.files.makedirs(remote.root, exist_ok=True)
            remote.files.pipe_file(path, self.owner.encode())
        self.remote, self.has_claimed = remote, True
        return ""

    def copy(self, folder: Path, skipped: Sequence[str] = ()) -> None:
        """
        Copy a step folder and report it, unless it is there already. If its files are there, because only the
        loss was recorded later, copy the manifest alone.
        """
        began, step, manifest = time.perf_counter(), step_of(folder), read_manifest(folder)
        there, files = self.remote.manifest(step)[0], manifest["files"]
        if there == manifest:
            return
        if there.get("files") == files:
            return repeated(self.upload, folder / MANIFEST)
        try:
            self.remove(step)
            for name in (*files, MANIFEST):
                repeated(self.upload, folder / name)
        except Exception:
            with suppress(Exception):  # makes room, as far as possible
                self.remove(step)
            raise
        size, self.seconds = size_of(manifest), time.perf_counter() - began
        text = f"copied {folder.name} to {self.shown} ({size / 1e6:,.1f} MB in {self.seconds:.1f} s)"
        if skipped:
            text += f", but not {', '.join(skipped)}: copying takes longer than the time between checkpoints"
        facts = {"folder": folder.name, "seconds": self.seconds, "bytes": size, "skipped": [*skipped]}
        self.outcomes.append(Outcome("mirror", text, step, facts))

    def upload(self, path: Path) -> None:
        """Upload a file of a step, whole or not at all. Raises OSError if its size is different there."""
        files, final = self.remote.files, self.remote.path(step_of(path.parent), path.name)
        target = final
        if not self.remote.is_object_store:
            files.makedirs(final.rpartition("/")[0], exist_ok=True)
            target = f"{final}.tmp"
        files.put_file(str(path), target)
        files.invalidate_cache()
        size, written = path.stat().st_size, files.size(target)
        if written != size:
            raise OSError(f"{path.name} has {written:,} bytes there, and {size:,} here")
        if target != final:
            files.mv(target, final)

    def remove(self, step: int) -> None:
        """Delete a step at the URL, if there is one: the manifest first, so that it does not count."""
        if step not in self.remote.steps():
            return
        with suppress(FileNotFoundError):
            self.remote.files.rm_file(self.remote.path(step, MANIFEST))
        self.remote.files.invalidate_cache()
        with suppress(FileNotFoundError):
            self.remote.files.rm(self.remote.path(step, "").rstrip("/"), recursive=True)

    def tidy(self, newest: dict, best: Path | None) -> None:
        """
        Clean up after the step with the manifest `newest` was copied. Steps beyond it, which the run has
        abandoned, no longer count, as on the disk, see folder.continue_from. Then delete what the run's
        folder would not keep either, see commit.prune_checkpoints, and steps without a manifest.
        """
        steps, remote = self.remote.steps(), self.remote
        for step in steps:
            if step > newest["step"] and remote.manifest(step)[0]:
                remote.files.mv(remote.path(step, MANIFEST), remote.path(step, ABANDONED))
        if not self.keep_last:
            return
        manifests = {step: remote.manifest(step)[0] for step in steps if step <= newest["step"]}
        complete = [step for step, manifest in manifests.items() if manifest]
        kept = {*complete[: self.keep_last], newest["best_step"], best and step_of(best)}
        for step in manifests.keys() - kept:
            if manifests[step].get("block_size", newest["block_size"]) == newest["block_size"]:
                self.remove(step)


def open_mirror(config: dict, resumed: "OpenCheckpoint | None") -> Mirror | None:
    """
    Make the Mirror that copies a run's checkpoints to config["mirror"] (all ranks; rank 0 copies). Returns
    None without the setting, with eval_only and in a dry run. Exits with a message if the URL cannot be used,
    or if a new run would write among the checkpoints of an earlier one. A server that does not answer is only
    reported.

    Args:
        resumed: the checkpoint whose run continues; None for a new run.
    """
    if not config["mirror"] or config["eval_only"] or is_pretended():
        return None
    start = resumed.stored.step if resumed else None
    mirror = Mirror(config["mirror"], Path(config["out_dir"]), config["keep_last"], start)
    do_together(start_mirror, mirror)
    return mirror


def start_mirror(mirror: Mirror) -> None:
    """Try to reach the server (rank 0). Raises ValueError for what the user must correct."""
    if not is_main():
        return
    check_url(mirror.url)
    refusal = ""
    try:
        refusal = within(START_S, mirror.connect)
    except Exception as e:  # each file system raises different types
        mirror.fail(None, f"{explained(mirror.url, e)}; the next checkpoint is tried")
    if refusal:
        raise ValueError(refusal)
