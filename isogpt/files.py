"""Writing files so that a kill cannot leave half of one, and reading pickles that cannot run code."""

import os
import pickle
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file: after a kill or a power failure `path` holds either its old content or all of the new."""
    other = path.with_name(path.name + ".tmp")
    with open(other, "wb") as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(other, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in this folder survive a power failure."""
    if os.name == "posix":  # Windows cannot do this
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def load_pickle(path: Path, allowed: dict[str, set[str]]) -> object:
    """
    Read a pickle of builtin values and of the classes in `allowed`, {module: names}. Nothing in it runs.

    Raises:
        pickle.UnpicklingError: it names something else. A damaged file raises nearly anything.
    """

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if name in allowed.get(module, ()):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"it would run {module}.{name}; only plain values are read")

    with open(path, "rb") as f:
        return PlainUnpickler(f).load()
