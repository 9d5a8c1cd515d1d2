"""
Copy a run's checkpoints to a URL, in the background (rank 0).

A kill at any moment leaves a step that is complete or does not count, see remote.py. What fails is reported,
and the next checkpoint is tried.
"""

import threading
import time
import uuid
from collections import deque
from itertools import islice
from pathlib import Path

from isogpt.checkpoint.manifest import read_manifest, size_of, step_of
from isogpt.checkpoint.remote import ANSWER_S, Remote, explained
from isogpt.checkpoint.search import best_folder
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.common.console import duration
from isogpt.common.patience import within
from isogpt.launch.together import do_together, is_main
from isogpt.options.values import without_credentials

SLOWEST = 5e6  # bytes per second: at the end, a run waits for a copy at this speed
PATIENCE_S = 60.0  # and this much longer


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
        # events for the log, which are not reported yet: name, a sentence for the user, facts
        self.outcomes: deque[tuple[str, str, dict]] = deque()
        self.owner = ""  # what this launch has written at the URL
        self.lock = threading.Lock()  # of the two below
        self.copying: set[Path] = set()  # step folders
        self.wanted: set[Path] = set()  # the step folder to copy next, if there is one
        self.idle = threading.Event()  # set: there is no thread
        self.idle.set()

    def request(self, folder: Path) -> None:
        """Copy this step folder, which is complete, as soon as the copy under way is (returns at once)."""
        with self.lock:
            self.wanted = {folder}
            if self.idle.is_set():
                self.idle.clear()
                # a daemon: a server that does not respond must not keep the process from exiting
                threading.Thread(target=self.run, daemon=True, name="mirror").start()

    def held(self) -> set[Path]:
        """The step folders that must not be deleted, since they are being copied or are next."""
        with self.lock:
            return self.copying | self.wanted

    def finish(self, seconds_left: float) -> None:
        """
        Wait until nothing is left to copy, for a limited time of at most `seconds_left`; then report what is
        left.
        """
        size = sum(map(size_of, filter(None, map(read_manifest, self.held()))))
        limit_s = max(0.0, min(PATIENCE_S + size / SLOWEST, seconds_left))
        if not self.idle.wait(limit_s):
            for folder in self.held():
                self.fail(step_of(folder), f"it takes longer than {duration(limit_s)}, and the run ends")

    def run(self) -> None:
        """Copy what is wanted until there is nothing left (in the thread)."""
        while True:
            with self.lock:
                self.copying, self.wanted = self.wanted, set()
                if not self.copying:
                    return self.idle.set()
            (newest,) = self.copying
            try:
                self.copy(newest)
            except Exception as e:  # each file system raises different types
                self.fail(step_of(newest), explained(e))

    def copy(self, newest: Path) -> None:
        """
        Copy the newest step folder and the best one, unless they are there. Then delete what the run does not
        keep either. Steps beyond the newest one, which the run has abandoned, do not count any more.
        """
        remote, manifest = self.connect(), read_manifest(newest)
        best = best_folder(self.out, manifest) or newest
        self.copying = {newest, best}
        for folder in dict.fromkeys((newest, best)):
            began, step, here = time.perf_counter(), step_of(folder), read_manifest(folder)
            if remote.manifest(step).get("files") == here["files"]:
                continue
            remote.put(folder)
            size, self.seconds = size_of(here) / 1e6, time.perf_counter() - began
            text = f"copied {folder.name} to {self.shown} ({size:,.1f} MB in {self.seconds:.1f} s)"
            self.outcomes.append(("mirror", text, {"iter": step, "folder": folder.name}))
        steps = self.connect().steps()  # unless a later launch copies there now
        older = [step for step in steps if step <= manifest["step"]]
        # the oldest to keep, of those that count; with keep_last 0, nothing is older
        oldest = min(islice(filter(remote.manifest, older), self.keep_last), default=0)
        for step in {*older} - {manifest["best_step"], step_of(best)}:
            if step < oldest:
                remote.remove(step)
        for step in {*steps} - {*older}:
            remote.abandon(step)

    def fail(self, step: int, reason: str) -> None:
        """Report at which step the mirror fails, and why."""
        text = f"warning: the mirror {self.shown} fails at step {step}: {reason}"
        self.outcomes.append(("mirror_failed", text, {"iter": step, "reason": reason}))

    def connect(self) -> Remote:
        """
        Open the folder at the URL and claim it for this launch. Raises ValueError if nothing may be copied
        there.
        """
        remote = Remote(self.url)
        file = f"{remote.root}/mirror_owner"
        if self.owner:
            if remote.read(file) not in ("", self.owner):
                raise ValueError("a different run now copies there: set a different --mirror=")
            return remote
        if self.start is None and any(map(remote.manifest, remote.steps())):
            problem = "it contains checkpoints of an earlier run"
            raise ValueError(f"{problem}: set --mirror= to a new folder, or --init_from=resume")
        owner = uuid.uuid4().hex
        remote.files.pipe_file(file, owner.encode())  # also shows whether credentials are right
        self.owner = owner
        return remote

    def begin(self) -> None:
        """
        Try to reach the server (rank 0). Raises ValueError for what the user must correct; a server that does
        not answer is only reported.
        """
        if not is_main():
            return
        try:
            within(ANSWER_S, self.connect)
        except (ImportError, ValueError) as e:
            raise ValueError(f"mirror {self.shown}: {explained(e)}") from e
        except Exception as e:  # each file system raises different types
            self.fail(self.start or 0, explained(e))


def open_mirror(config: dict, resumed: OpenCheckpoint | None) -> Mirror | None:
    """
    Make the Mirror that copies a run's checkpoints to config["mirror"] (all ranks; rank 0 copies). Returns
    None without the setting and with eval_only. Exits with a message if the URL cannot be used,
    or if a new run would write among the checkpoints of an earlier one.

    Args:
        resumed: the checkpoint whose run continues; None for a new run.
    """
    if not config["mirror"] or config["eval_only"]:
        return None
    start = resumed.stored.step if resumed else None
    mirror = Mirror(config["mirror"], Path(config["out_dir"]), config["keep_last"], start)
    do_together(mirror.begin)
    return mirror
