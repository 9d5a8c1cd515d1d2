"""Packages that only some uses need: what to type if one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_by(use: str, package: str) -> Iterator[None]:
    """
    In the block, a package is imported that only `use` needs. Raises ValueError with the command that
    installs the package if it, or a package that it imports, is missing or cannot be imported.
    """
    try:
        yield
    except ImportError as e:
        reason = " ".join(str(e).split())[:200]
        raise ValueError(f"{use} needs {package} ({reason}): pip install {package}") from e
