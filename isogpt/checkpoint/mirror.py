"""
Copy a run's checkpoints to a URL, in the background (rank 0).

A kill at any moment leaves a step that is complete or does not count, see remote.py. What fails is reported,
and the next checkpoint is tried.
"""

import threading
import time
import uuid
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from isogpt.checkpoint.manifest import read_manifest, sealed, size_of, step_of
from isogpt.checkpoint.remote import MANIFEST, Remote, check_url, explained, name_of
from isogpt.checkpoint.search import best_folder
from isogpt.common import console
from isogpt.common.console import duration
from isogpt.common.patience import within
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

    def __init__(self, url: str, out: Path, keep_last: int, start: int | None = None) -> None:
        self.url, self.out, self.keep_last, self.start = url, out, keep_last, start
        self.shown = without_credentials(url).rstrip("/")
        self.seconds = 0.0  # that the last copy took
        self.outcomes: deque[Outcome] = deque()  # which are not reported yet
        self.owner = uuid.uuid4().hex  # what this launch writes at the URL
        self.has_claimed = False  # whether it has done so
        self.lock = threading.Lock()  # of the three below
        self.copying: set[Path] = set()  # step folders
        self.wanted: Path | None = None  # the step folder to copy next
        self.skipped: list[str] = []  # names of those that a newer one has replaced
        self.idle = threading.Event()  # set: there is no thread
        self.idle.set()

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
            return (self.copying | {self.wanted}) - {None}

    def finish(self, seconds_left: float) -> None:
        """
        Wait until nothing is left to copy, for a limited time of at most `seconds_left`; then report what is
        left.
        """
        size = sum(map(size_of, filter(None, map(read_manifest, self.held()))))
        limit_s = max(0.0, min(PATIENCE_S + size / SLOWEST, seconds_left))
        if self.idle.wait(min(1.0, limit_s)):
            return
        names = ", ".join(sorted(folder.name for folder in self.held()))
        console.print_to_stderr(f"copying {names} to {self.shown}: this may take up to {duration(limit_s)}")
        if not self.idle.wait(limit_s):
            for folder in self.held():
                self.fail(folder, f"it takes longer than {duration(limit_s)}, and the run ends")

    def run(self) -> None:
        """Copy what is wanted until there is nothing left (in the thread)."""
        while True:
            with self.lock:
                newest, skipped = self.wanted, self.skipped
                self.copying, self.wanted, self.skipped = {newest}, None, []
                if not newest:
                    return self.idle.set()
            try:
                self.copy(newest, skipped)
            except Exception as e:  # each file system raises different types
                if newest.exists():  # it has not been renamed by a rollback
                    self.fail(newest, f"{explained(self.url, e)}; the next checkpoint is tried")

    def copy(self, newest: Path, skipped: list[str]) -> None:
        """
        Copy the newest step folder and the best one, unless they are there. Then delete what the run does not
        keep either, and steps beyond the newest one, which the run has abandoned.
        """
        remote, manifest = self.connect(), read_manifest(newest)
        best = best_folder(self.out, manifest) or newest
        with self.lock:
            self.copying = {newest, best}
        for folder in dict.fromkeys((newest, best)):
            began, here = time.perf_counter(), read_manifest(folder)
            there = remote.manifest(step_of(folder))
            if there.get("files") == here["files"]:
                if there != here:  # the loss was recorded later, see Saver.record_loss
                    remote.write(f"{folder.name}/{MANIFEST}", sealed(here))
                continue
            remote.put(folder)
            size, self.seconds = size_of(here), time.perf_counter() - began
            text = f"copied {folder.name} to {self.shown} ({size / 1e6:,.1f} MB in {self.seconds:.1f} s)"
            if others := [name for name in skipped if name != best.name]:
                text += f", but not {', '.join(others)}: copying is slower than saving"
            facts = {"folder": folder.name, "seconds": self.seconds, "bytes": size, "skipped": others}
            self.outcomes.append(Outcome("mirror", text, step_of(folder), facts))
            skipped = []
        steps, step_here = self.connect().steps(), manifest["step"]  # unless a later launch copies there now
        older = [step for step in steps if step <= step_here]
        kept = {*older[: self.keep_last or None], manifest["best_step"], step_of(best)}
        for step in steps:
            if step > step_here or step not in kept:
                remote.remove(step)

    def fail(self, folder: Path | None, reason: str) -> None:
        """Report at which step folder the mirror fails (None: at the start), and why."""
        place = f" at {folder.name}" if folder else ""
        step = step_of(folder) if folder else self.start or 0
        text = f"warning: the mirror {self.shown} fails{place}: {reason}"
        self.outcomes.append(Outcome("mirror_failed", text, step, {"reason": reason}))

    def connect(self) -> Remote:
        """
        Open the folder at the URL and claim it for this launch. Raises ValueError if nothing may be copied
        there.
        """
        remote = Remote(self.url)
        is_first = self.start is None and not self.has_claimed
        earlier = next(filter(remote.manifest, remote.steps() if is_first else []), None)
        if earlier is not None:
            raise ValueError(
                f"{self.shown} contains {name_of(earlier)} of an earlier run: set --mirror= to a different "
                "folder, or --init_from=resume to continue that run"
            )
        owner = remote.read("mirror_owner")
        if self.has_claimed and owner not in ("", self.owner):
            raise ValueError("a different run now copies there: set a different --mirror=")
        if owner != self.owner:
            remote.write("mirror_owner", self.owner)  # also shows whether credentials are right
        self.has_claimed = True
        return remote


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
    try:
        within(START_S, mirror.connect)
    except ValueError:
        raise
    except Exception as e:  # each file system raises different types
        mirror.fail(None, f"{explained(mirror.url, e)}; the next checkpoint is tried")
