"""
A run's folder at a URL, through fsspec. Its form is that of the folder on a disk:

    URL/step_00001200/<files>, manifest.json

A step counts only with its manifest, which is copied last and deleted first.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

from isogpt.checkpoint.manifest import STEP, parse_manifest, read_manifest, sealed, step_folder, step_of
from isogpt.common.files import reason_of
from isogpt.common.packages import needed_by
from isogpt.options.values import hide_credentials, without_credentials

MANIFEST = "manifest.json"


class Remote:
    """A run's folder at a URL. Each method may raise nearly any exception, as file systems do."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        self.files, root = fsspec.url_to_fs(url, skip_instance_cache=True)  # not one that has failed
        self.root = root.rstrip("/")

    def shown(self, step: int) -> str:
        """The address of a step, for messages."""
        return f"{without_credentials(self.url).rstrip('/')}/{name_of(step)}"

    def steps(self) -> list[int]:
        """The steps that have a folder, newest first: not all need be complete."""
        self.files.invalidate_cache()
        try:
            paths = self.files.ls(self.root, detail=False)
        except FileNotFoundError:  # the folder is created with the first file
            return []
        matches = [STEP.fullmatch(Path(path).name) for path in paths]
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def read(self, name: str) -> str:
        """The text of a file; '' if there is none."""
        try:
            return self.files.cat_file(f"{self.root}/{name}").decode(errors="replace")
        except FileNotFoundError:
            return ""

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        self.make_folder(self.root)
        self.files.pipe_file(f"{self.root}/{name}", text.encode())

    def make_folder(self, path: str) -> None:
        """Create a folder; object stores have none."""
        if not self.files.async_impl:
            self.files.makedirs(path, exist_ok=True)

    def manifest(self, step: int) -> dict:
        """A step's manifest; empty if it is missing or damaged."""
        manifest = parse_manifest(self.read(f"{name_of(step)}/{MANIFEST}"))
        return manifest if manifest.get("step") == step else {}

    def put(self, folder: Path) -> None:
        """Copy a step folder. After an error, nothing is left of it, as far as possible."""
        target, names = f"{self.root}/{folder.name}", list(read_manifest(folder)["files"])
        try:
            self.remove(step_of(folder))
            self.make_folder(target)
            self.files.put([f"{folder}/{name}" for name in names], [f"{target}/{name}" for name in names])
            self.files.put_file(f"{folder}/{MANIFEST}", f"{target}/{MANIFEST}")
        except Exception:
            with suppress(Exception):
                self.remove(step_of(folder))
            raise

    def get(self, manifest: dict, folder: Path) -> None:
        """Copy the files that a step's manifest names, and the manifest, into a new folder."""
        source, names = f"{self.root}/{name_of(manifest['step'])}", list(manifest["files"])
        folder.mkdir(parents=True)
        self.files.get([f"{source}/{name}" for name in names], [f"{folder}/{name}" for name in names])
        (folder / MANIFEST).write_text(sealed(manifest))

    def remove(self, step: int) -> None:
        """Delete a step, if there is one."""
        if step in self.steps():
            path = f"{self.root}/{name_of(step)}"
            if self.files.exists(f"{path}/{MANIFEST}"):
                self.files.rm_file(f"{path}/{MANIFEST}")
            self.files.rm(path, recursive=True)


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return step_folder(Path(), step).name


def check_url(url: str) -> None:
    """
    Check that fsspec knows the form of a URL, and that the package for it is installed. Nothing is sent.

    Raises:
        ValueError: one of these is not so.
    """
    shown, protocol = without_credentials(url), url.partition("://")[0]
    with needed_by(shown, "fsspec"):
        from fsspec.registry import get_filesystem_class, known_implementations, registry
    if protocol not in (*known_implementations, *registry):
        possible = "s3://bucket/run, gs://bucket/run, hf://datasets/user/name/run or file:///mnt/disk/run"
        raise ValueError(f"{shown}: fsspec does not know {protocol}://: set a URL such as {possible}")
    try:
        get_filesystem_class(protocol)
    except ImportError as e:
        package = (getattr(e.__cause__, "name", None) or protocol).partition(".")[0]
        raise ValueError(f"{protocol}:// needs the package {package}: type pip install {package}") from e


def explained(url: str, error: BaseException) -> str:
    """Why something has failed, in one line without credentials."""
    return hide_credentials(reason_of(error), url)[:300]


def within(limit_s: float, work: Callable, *arguments: object) -> object:
    """
    Return what `work(*arguments)` returns or raises. Raises TimeoutError if there is no answer within
    `limit_s` seconds; the work then goes on in a thread, which does not keep the process from exiting.
    """
    answer = Future()
    threading.Thread(target=put_answer, args=(answer, work, *arguments), daemon=True, name="remote").start()
    wait([answer], limit_s)
    if not answer.done():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()


def put_answer(answer: Future, work: Callable, *arguments: object) -> None:
    """What the thread of `within` does."""
    try:
        answer.set_result(work(*arguments))
    except BaseException as e:
        answer.set_exception(e)
