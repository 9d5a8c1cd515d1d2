"""
A run's folder at a URL, through fsspec. Its form is that of the folder on a disk:

    URL/step_00001200/<files>, manifest.json

A step counts only with its manifest. mirror.py writes such a folder, and download.py reads it.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isogpt.checkpoint.manifest import STEP, parse_manifest, step_folder
from isogpt.common.files import LARGEST_TEXT, reason_of
from isogpt.common.packages import needed_by
from isogpt.options.values import hide_credentials, without_credentials

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MANIFEST = "manifest.json"
ABANDONED = "abandoned_manifest.json"  # of a step that does not count any more
MISSING = f"{MANIFEST} is missing"  # the upload was not completed
# file systems in which a file is whole or absent while it is written; on others, it is first written under
# a temporary name
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "hf", "memory")
PAUSES_S = (1.0, 5.0)  # between the attempts to transfer a file
DISK_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class RemoteFolder:
    """A run's folder at a URL. Each method may raise nearly any exception: see `reaching`."""

    url: str
    files: "AbstractFileSystem"
    root: str  # the folder's path in `files`

    @property
    def is_object_store(self) -> bool:
        """Whether a file is whole or absent while it is written."""
        return self.url.partition("://")[0] in OBJECT_STORES

    def path(self, step: int, name: str) -> str:
        """The path of a file of a step."""
        return f"{self.root}/{name_of(step)}/{name}"

    def steps(self) -> list[int]:
        """The steps that have a folder, newest first: not all need be complete."""
        self.files.invalidate_cache()
        try:
            names = [path.rstrip("/").rpartition("/")[2] for path in self.files.ls(self.root, detail=False)]
        except (FileNotFoundError, NotADirectoryError):  # the folder is created with the first file
            return []
        return sorted((int(match[1]) for name in names if (match := STEP.fullmatch(name))), reverse=True)

    def read(self, path: str) -> str:
        """The text of a file; '' if there is none, or if it is too large."""
        self.files.invalidate_cache()
        try:
            is_small = self.files.size(path) <= LARGEST_TEXT
            return self.files.cat_file(path).decode(errors="replace") if is_small else ""
        except FileNotFoundError:
            return ""

    def manifest(self, step: int) -> tuple[dict, str]:
        """A step's manifest: (the manifest, ''), or ({}, what is wrong with it)."""
        if not (text := self.read(self.path(step, MANIFEST))):
            return {}, MISSING
        if not (manifest := parse_manifest(text)):
            return {}, f"{MANIFEST} is damaged"
        if manifest["step"] != step:
            return {}, f"it was renamed: its checkpoint is that of step {manifest['step']}"
        return manifest, ""


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return step_folder(Path(), step).name


def check_url(url: str) -> None:
    """
    Check that fsspec knows the form of a URL, and that the package for it is installed. Nothing is sent.

    Raises:
        ValueError: one of these is not so.
    """
    with needed_by(without_credentials(url), "fsspec"):
        from fsspec.registry import get_filesystem_class, known_implementations, registry
    protocol = url.partition("://")[0]
    if protocol not in (*known_implementations, *registry):
        possible = "s3://bucket/run, gs://bucket/run, hf://datasets/user/name/run or file:///mnt/disk/run"
        shown = without_credentials(url)
        raise ValueError(f"{shown}: fsspec does not know {protocol}://: set a URL such as {possible}")
    try:
        get_filesystem_class(protocol)
    except ImportError as e:
        package = (getattr(e.__cause__, "name", None) or protocol).partition(".")[0]
        raise ValueError(f"{protocol}:// needs the package {package}: type pip install {package}") from e


def open_url(url: str) -> RemoteFolder:
    """Open a folder at a URL, see `check_url`. Some file systems connect to the server."""
    import fsspec

    files, root = fsspec.url_to_fs(url, skip_instance_cache=True)  # not one that has failed
    return RemoteFolder(url, files, root.rstrip("/"))


class DamagedFile(ValueError):
    """A file at a URL is missing, or is not the one that the manifest describes."""


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """
    Raise ConnectionError if the block cannot read from the URL: file systems raise nearly anything. If a file
    is damaged, DamagedFile is raised, and if this machine's disk is full, the OSError as it is.
    """
    try:
        yield
    except Exception as e:
        if isinstance(e, DamagedFile) or is_of_disk(e):
            raise
        raise ConnectionError(f"{without_credentials(url)} cannot be read ({explained(url, e)})") from e


def explained(url: str, error: BaseException) -> str:
    """Why something has failed, in one line without credentials."""
    return hide_credentials(reason_of(error), url)[:300]


def is_of_disk(error: BaseException) -> bool:
    """Whether a disk is full, or must not be written to."""
    return isinstance(error, OSError) and error.errno in DISK_FAILS


def repeated(transfer: Callable, *arguments: object) -> None:
    """Transfer a file; if that fails, try again twice. Raises what the last attempt raises."""
    for pause_s in PAUSES_S:
        try:
            return transfer(*arguments)
        except Exception as e:
            if isinstance(e, FileNotFoundError) or is_of_disk(e):
                raise
        time.sleep(pause_s)
    return transfer(*arguments)


def within(limit_s: float, work: Callable, *arguments: object) -> object:
    """
    Return what `work(*arguments)` returns or raises. Raises TimeoutError if there is no answer within
    `limit_s` seconds; the work then goes on in a thread, which does not keep the process from exiting.
    """
    answer = Future()

    def run() -> None:
        try:
            answer.set_result(work(*arguments))
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=run, daemon=True, name="remote").start()
    wait([answer], limit_s)
    if not answer.done():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()
