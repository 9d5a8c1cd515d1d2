"""
A run's folder at a URL, through fsspec. Its form is that of the folder on a disk:

    URL/step_00001200/<files>, manifest.json

A step counts only with its manifest, which is copied last and deleted first.
"""

from contextlib import suppress
from pathlib import Path

from isogpt.checkpoint.manifest import STEP, parse_manifest, read_manifest, sealed, step_folder, step_of
from isogpt.common.files import reason_of
from isogpt.common.packages import needed_by
from isogpt.options.values import without_credentials

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
        """Write a file in the folder."""
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
        """Copy a step's manifest, and the files that it names and that are there, into a new folder."""
        source, names = f"{self.root}/{name_of(manifest['step'])}", list(manifest["files"])
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(sealed(manifest))
        with suppress(FileNotFoundError):
            self.files.get([f"{source}/{name}" for name in names], [f"{folder}/{name}" for name in names])

    def abandon(self, step: int) -> None:
        """Make a step not count, until the run takes it again. Whoever wants it can rename its manifest."""
        folder = f"{self.root}/{name_of(step)}"
        if self.files.exists(f"{folder}/{MANIFEST}"):
            self.files.mv(f"{folder}/{MANIFEST}", f"{folder}/abandoned_{MANIFEST}")

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
    with needed_by(without_credentials(url), "fsspec"):
        from fsspec import get_filesystem_class
    try:
        get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as e:
        known = "s3://bucket/run, gs://bucket/run, hf://datasets/user/name/run or file:///mnt/disk/run"
        raise ValueError(f"{without_credentials(url)}: {e}; URLs are for example {known}") from e


def explained(error: BaseException) -> str:
    """Why something has failed, in one line without credentials."""
    return without_credentials(reason_of(error))[:300]
