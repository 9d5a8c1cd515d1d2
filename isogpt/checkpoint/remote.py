"""
A run's folder at a URL, through fsspec. Its form is that of the folder on a disk:

    URL/step_00001200/<files>, manifest.json

A step counts only with its manifest, which is copied last and deleted first.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from isogpt.checkpoint.manifest import STEP, parse_manifest, read_manifest, sealed, step_folder, step_of
from isogpt.common.files import reason_of
from isogpt.options.values import without_credentials

MANIFEST = "manifest.json"
ANSWER_S = 60.0  # how long a start waits for a server
PART = 2**24  # bytes that are read at a time
AT_ONCE = 8  # files that are downloaded


class Remote:
    """A run's folder at a URL. Each method may raise nearly any exception, as file systems do."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.files, root = fsspec.url_to_fs(url, skip_instance_cache=True)  # not one that has failed
        self.files.auto_mkdir = True  # a disk creates a folder with its first file, as object stores do
        self.root = root.rstrip("/")

    def path(self, step: int) -> str:
        """The folder of a step."""
        return f"{self.root}/{step_folder(Path(), step).name}"

    def steps(self) -> list[int]:
        """The steps that have a folder, newest first: not all need be complete."""
        self.files.invalidate_cache()
        try:
            paths = self.files.ls(self.root, detail=False)
        except FileNotFoundError:  # the folder is created with the first file
            return []
        matches = [STEP.fullmatch(Path(path).name) for path in paths]
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def read(self, path: str) -> str:
        """The text of a file; '' if there is none."""
        try:
            return self.files.cat_file(path).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def manifest(self, step: int) -> dict:
        """A step's manifest; empty if it is missing or damaged."""
        return parse_manifest(self.read(f"{self.path(step)}/{MANIFEST}"))

    def put(self, folder: Path) -> None:
        """Copy a step folder."""
        target, names = self.path(step_of(folder)), list(read_manifest(folder)["files"])
        self.remove(step_of(folder))
        self.files.put([f"{folder}/{name}" for name in names], [f"{target}/{name}" for name in names])
        self.files.put_file(f"{folder}/{MANIFEST}", f"{target}/{MANIFEST}")

    def get(self, step: int, manifest: dict, folder: Path) -> None:
        """Copy a step's files that its manifest names and that are there into a new folder."""
        folder.mkdir(parents=True)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            sources = (f"{self.path(step)}/{name}" for name in manifest["files"])
            targets = (folder / name for name in manifest["files"])
            sizes = (entry["bytes"] for entry in manifest["files"].values())
            list(pool.map(self.get_file, sources, targets, sizes))  # raises what one of them raises
        (folder / MANIFEST).write_text(sealed(manifest))

    def get_file(self, source: str, target: Path, size: int) -> None:
        """
        Copy the first `size` bytes of a file, if it is there, to a new file. Nothing more is read, however
        long the file is: a different content shows in its checksum.
        """
        with (
            suppress(FileNotFoundError),
            self.files.open(source, "rb", cache_type="none") as theirs,  # the others read ahead
            open(target, "xb") as ours,
        ):
            while size > 0 and (part := theirs.read(min(size, PART))):
                size -= ours.write(part)

    def abandon(self, step: int) -> None:
        """Make a step not count, until the run takes it again. Whoever wants it can rename its manifest."""
        manifest = f"{self.path(step)}/{MANIFEST}"
        if self.files.exists(manifest):
            self.files.mv(manifest, f"{self.path(step)}/abandoned_{MANIFEST}")

    def remove(self, step: int) -> None:
        """Delete a step, if there is one."""
        for path in (f"{self.path(step)}/{MANIFEST}", self.path(step)):
            if self.files.exists(path):
                self.files.rm(path, recursive=True)


def explained(error: Exception) -> str:
    """Why something has failed, in one line without credentials."""
    return without_credentials(reason_of(error))[:300]
