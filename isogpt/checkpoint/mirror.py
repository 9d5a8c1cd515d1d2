"""
Copy a run's checkpoints to a URL, in the background (rank 0).

    URL/step_00001200/<files>          as in the run's folder
    URL/step_00001200/manifest.json    uploaded last and deleted first: without it, a step does not count

A kill at any moment leaves a step folder that is complete or has no manifest. What fails is reported, and the
next checkpoint is tried.
"""

import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from isogpt.checkpoint.manifest import STEP, read_manifest, step_folder, step_of
from isogpt.checkpoint.search import best_folder
from isogpt.common.console import duration
from isogpt.common.files import parse_json, read_utf8, reason_of
from isogpt.common.packages import needed_by
from isogpt.launch.pretended_ranks import is_pretended
from isogpt.launch.together import do_together, is_main
from isogpt.options.values import is_url, without_credentials

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from isogpt.checkpoint.source import OpenCheckpoint

MANIFEST = "manifest.json"
# file systems in which an object is whole or absent while it is written: others get a temporary name first
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "hf", "memory")
START_S = 10.0  # how long the start of a run waits for an answer
PAUSES_S = (1.0, 5.0)  # between the attempts to upload a file
SLOWEST = 5e6  # bytes per second: at the end, a run waits for a copy at this speed
PATIENCE_S = 60.0  # and for as long in addition


class Outcome(NamedTuple):
    """What became of a copy: an event, a sentence for the user, the step and facts."""

    event: str
    text: str
    step: int
    facts: dict


@dataclass
class Mirror:
    """
    Copies the newest checkpoint, and the best one, to a URL. A thread copies one checkpoint after the other.
    What is committed meanwhile waits, but only the newest: there is no queue.

    Args:
        url: of a folder, for fsspec.
        out: the run's folder.
        keep_last: newest checkpoints to keep at the URL, in addition to the best one (0: all).
        step: of the newest checkpoint at the URL that may be this run's; None: it is a new run.
    """

    url: str
    out: Path
    keep_last: int
    step: int | None = None
    seconds: float = 0.0  # that the last copy took
    outcomes: SimpleQueue = field(default_factory=SimpleQueue)  # of Outcome, which are not reported yet
    fs: "AbstractFileSystem | None" = None  # None: the server has not answered yet
    root: str = ""  # the folder in fs
    # the step folders at the URL, by name, with the text of the manifest ("": there is none; None: not read)
    there: dict[str, str | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the four below
    wanted: Path | None = None  # the step folder to copy next
    copying: Path | None = None  # the one that is being copied
    skipped: list[str] = field(default_factory=list)  # names of those that a newer one has replaced
    refusal: str = ""  # why nothing may be copied to this URL
    thread: threading.Thread | None = None  # None: there is nothing to do
    idle: threading.Event = field(default_factory=threading.Event)  # set if there is nothing to do

    def __post_init__(self) -> None:
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
            self.idle.clear()
            if not self.thread:
                # a daemon: a server that does not respond must not keep the process from exiting
                self.thread = threading.Thread(target=self.run, daemon=True, name="mirror")
                self.thread.start()

    def held(self) -> set[Path]:
        """The step folders that must not be deleted, since they are being copied or are next."""
        with self.lock:
            return {folder for folder in (self.copying, self.wanted) if folder}

    def next_outcome(self) -> Outcome | None:
        """The next outcome that is not reported yet; None: there is none."""
        with suppress(Empty):
            return self.outcomes.get_nowait()
        return None

    def limit_s(self, seconds_left: float) -> float:
        """
        How long the end of a run may wait for what is left to copy.

        Args:
            seconds_left: until the run must have ended.
        """
        manifests = filter(None, map(read_manifest, self.held()))
        size = sum(entry.get("bytes", 0) for m in manifests for entry in m["files"].values())
        return max(0.0, min(PATIENCE_S + size / SLOWEST, seconds_left))

    def about_rest(self, limit_s: float) -> str:
        """A sentence about what the end of a run waits for; '' if it is copied within a second."""
        if self.idle.wait(min(1.0, limit_s)):
            return ""
        names = ", ".join(sorted(folder.name for folder in self.held()))
        return f"copying {names} to {self.shown}: this may take up to {duration(limit_s)}"

    def finish(self, limit_s: float) -> None:
        """Wait until nothing is left to copy, or report at the limit what is."""
        if not self.idle.wait(limit_s):
            for folder in self.held():
                self.fail(folder.name, f"it takes longer than {duration(limit_s)}, and the run ends")

    # -- in the thread

    def run(self) -> None:
        """Copy what is wanted until there is nothing left."""
        while True:
            with self.lock:
                self.copying, self.wanted = self.wanted, None
                folder, skipped = self.copying, self.skipped
                self.skipped = []
                if not folder:
                    self.thread = None
                    self.idle.set()
                    return
            self.copy_with_best(folder, skipped)

    def copy_with_best(self, folder: Path, skipped: list[str]) -> None:
        """Copy a step folder, and the best one if it is not there; then delete what is not kept."""
        name = folder.name
        try:
            self.connect()
            best = best_folder(self.out, read_manifest(folder))
            self.copy(folder, [skip for skip in skipped if not best or skip != best.name])
            if best and best != folder and not self.manifest_at(best.name):
                with self.lock:
                    self.copying = best
                name = best.name
                self.copy(best)
            self.prune(folder, best)
        except Exception as e:  # each file system raises different types
            self.fs = None  # connects again, and looks what is there now
            # the run may have replaced the best one by a better one meanwhile, and deleted it
            if read_manifest(self.out / name):
                self.fail(name, f"{self.explained(e)}; the next checkpoint is tried")

    def fail(self, name: str, reason: str) -> None:
        """Report at which step folder the mirror fails, and why."""
        text = f"warning: the mirror {self.shown} fails at {name}: {reason}"
        self.outcomes.put(Outcome("mirror_failed", text, int(STEP.fullmatch(name)[1]), {"reason": reason}))

    def explained(self, error: BaseException) -> str:
        """Why something failed, in one line without credentials."""
        reason = reason_of(error).replace(self.url, self.shown)
        password = urlsplit(self.url).password
        return (reason.replace(password, "...") if password else reason)[:300]

    def connect(self) -> None:
        """
        Open the file system, look what is there, and try to write, unless all this has succeeded before.

        Raises:
            ValueError: there are checkpoints of a different run.
            Exception: the file system does not work; each raises different types.
        """
        if self.fs:
            return
        import fsspec

        fs, root = fsspec.url_to_fs(self.url, skip_instance_cache=True)  # not one that has failed
        there = dict.fromkeys(step_names(fs, root))
        beyond = [name for name in there if self.step is None or by_step(name) > self.step]
        newest = next((name for name in beyond if read_text(fs, f"{root}/{name}/{MANIFEST}")), None)
        if newest and self.step is None:
            self.refusal = (
                f"{self.shown} contains {newest} of an earlier run: set --mirror= to a different folder, or "
                "--init_from=resume to continue that run"
            )
            raise ValueError(self.refusal)
        if newest:
            reason = f"it contains {newest}, which is beyond step {self.step}: delete that, or resume from it"
            text = f"warning: the mirror {self.shown}: {reason}"
            self.outcomes.put(Outcome("mirror_failed", text, self.step, {"reason": reason}))
        if not is_object_store(self.url):
            fs.makedirs(root, exist_ok=True)
        fs.pipe_file(f"{root}/trial.tmp", b"trial")
        fs.rm_file(f"{root}/trial.tmp")
        self.there, self.root, self.fs = there, root, fs

    def manifest_at(self, name: str) -> str:
        """The text of the manifest of a step folder at the URL; '': there is none."""
        if self.there.get(name, "") is None:
            self.there[name] = read_text(self.fs, f"{self.root}/{name}/{MANIFEST}")
        return self.there.get(name) or ""

    def copy(self, folder: Path, skipped: list[str] | None = None) -> None:
        """
        Copy a step folder and report it. If its files are there already, since only the loss was recorded
        later, copy the manifest alone.
        """
        began, name, text = time.perf_counter(), folder.name, read_utf8(folder / MANIFEST)
        there, files = self.manifest_at(name), parse_json(text)["files"]
        if there == text:
            return
        self.step = max(self.step or 0, step_of(folder))
        is_new = not there or parse_json(there).get("files") != files
        if is_new:
            self.remove(name)
            self.there[name] = ""
            for file, entry in files.items():
                self.upload(folder / file, entry["bytes"])
        self.upload(folder / MANIFEST, len(text.encode()))
        self.there[name] = text
        if not is_new:
            return
        size, self.seconds = sum(entry["bytes"] for entry in files.values()), time.perf_counter() - began
        text = f"copied {name} to {self.shown} ({size / 1e6:,.1f} MB in {self.seconds:.1f} s)"
        if skipped:
            text += f", but not {', '.join(skipped)}: it takes longer than the time between two checkpoints"
        facts = {"folder": name, "seconds": self.seconds, "bytes": size, "skipped": skipped or []}
        self.outcomes.put(Outcome("mirror", text, step_of(folder), facts))

    def upload(self, path: Path, size: int) -> None:
        """Upload a file of a step folder, whole or not at all; attempts that fail are repeated."""
        for pause_s in (*PAUSES_S, None):
            try:
                return self.try_upload(path, size)
            except Exception:
                if pause_s is None or not path.exists():
                    raise
                time.sleep(pause_s)

    def try_upload(self, path: Path, size: int) -> None:
        """Upload a file once. Raises OSError if its size is not `size` afterwards."""
        folder = f"{self.root}/{path.parent.name}"
        final = target = f"{folder}/{path.name}"
        if not is_object_store(self.url):
            self.fs.makedirs(folder, exist_ok=True)
            target = f"{final}.tmp"
        self.fs.put_file(str(path), target)
        self.fs.invalidate_cache()
        if (written := self.fs.info(target)["size"]) != size:
            raise OSError(f"{path.name} has {written:,} bytes there, and {size:,} here")
        if target != final:
            self.fs.mv(target, final)

    def remove(self, name: str) -> None:
        """Delete a step folder at the URL, if there is one: the manifest first, so that it does not count."""
        if name not in self.there:
            return
        with suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.root}/{name}/{MANIFEST}")
        self.there[name] = ""
        self.fs.invalidate_cache()
        with suppress(FileNotFoundError):
            self.fs.rm(f"{self.root}/{name}", recursive=True)
        del self.there[name]

    def prune(self, newest: Path, best: Path | None) -> None:
        """
        Delete what the run's folder would not keep either, see commit.prune_checkpoints, and folders without
        a manifest. `newest` has just been copied. Newer ones stay: an earlier run left them, see `connect`.
        """
        manifest = read_manifest(newest)
        if not self.keep_last or not manifest:
            return
        names = [name for name in self.there if by_step(name) <= step_of(newest)]
        names.sort(key=by_step, reverse=True)
        complete = [name for name in names if self.manifest_at(name)]
        kept = {*complete[: self.keep_last], step_folder(self.out, manifest["best_step"]).name}
        kept |= {best.name} if best else set()
        for name in names:
            text = self.manifest_at(name)
            has_other_length = text and parse_json(text).get("block_size") != manifest["block_size"]
            if name not in kept and not has_other_length:
                self.remove(name)


def by_step(name: str) -> int:
    """The step of a step folder's name."""
    return step_of(Path(name))


def step_names(fs: "AbstractFileSystem", root: str) -> list[str]:
    """The names of the step folders in a folder of a file system, newest first."""
    fs.invalidate_cache()
    try:
        names = [path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False)]
    except FileNotFoundError:  # the folder is created with the first file
        return []
    return sorted(filter(STEP.fullmatch, names), key=by_step, reverse=True)


def read_text(fs: "AbstractFileSystem", path: str) -> str:
    """The text of a manifest; '': there is none, or it is damaged."""
    try:
        text = fs.cat_file(path).decode(errors="replace")
        return text if isinstance(parse_json(text), dict) else ""
    except (FileNotFoundError, ValueError):
        return ""


def is_object_store(url: str) -> bool:
    """Whether an upload to this URL is whole or absent at any moment."""
    return urlsplit(url).scheme in OBJECT_STORES


# ------------------------------------------------------------------------------------------------------------
# the start and the end of a run


def open_mirror(config: dict, resumed: "OpenCheckpoint | None") -> Mirror | None:
    """
    Open what copies a run's checkpoints to config["mirror"] (all ranks; rank 0 copies); None without the
    setting, with eval_only and in a dry run. Exits with a message if the URL cannot be used, or if a new run
    would write among the checkpoints of an earlier one. A server that does not answer is only reported.

    Args:
        resumed: the checkpoint whose run continues; None for a new run.
    """
    if not config["mirror"] or config["eval_only"] or is_pretended():
        return None
    out, step = Path(config["out_dir"]), resumed.stored.step if resumed else None
    mirror = Mirror(config["mirror"], out, config["keep_last"], step)
    do_together(start_mirror, mirror)
    return mirror


def start_mirror(mirror: Mirror) -> None:
    """
    Check the URL, and try to reach the server (rank 0). Raises ValueError for what the user must correct.
    """
    if not is_main():
        return
    check_url(mirror.url)
    answer = Future()

    def connect() -> None:
        try:
            answer.set_result(mirror.connect())
        except Exception as e:  # each file system raises different types
            answer.set_exception(e)

    threading.Thread(target=connect, daemon=True, name="mirror").start()
    try:
        answer.result(START_S)
    except Exception as e:
        if mirror.refusal:
            raise ValueError(mirror.refusal) from e
        reason = mirror.explained(e) if answer.done() else f"no answer within {START_S:g} s"
        text = f"warning: the mirror {mirror.shown} fails: {reason}; the next checkpoint is tried"
        mirror.outcomes.put(Outcome("mirror_failed", text, mirror.step or 0, {"reason": reason}))


def check_url(url: str) -> None:
    """
    Check that a URL names a file system whose package is installed. Nothing is sent.

    Raises:
        ValueError: it does not.
    """
    with needed_by("mirror", "fsspec"):
        from fsspec.registry import get_filesystem_class, known_implementations, registry
    protocol = url.partition("://")[0]
    if not is_url(url) or protocol not in (*known_implementations, *registry):
        problem = f"fsspec does not know {protocol}://" if is_url(url) else f"{url!r} is no URL"
        raise ValueError(
            f"mirror: {problem}: set --mirror= to one such as s3://bucket/run, gs://bucket/run, "
            "hf://datasets/user/name/run or file:///mnt/disk/run"
        )
    try:
        get_filesystem_class(protocol)
    except ImportError as e:
        package = (getattr(e.__cause__, "name", None) or protocol).partition(".")[0]
        raise ValueError(f"mirror {protocol}:// needs {package}: type pip install {package}") from e
