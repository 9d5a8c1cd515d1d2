"""Files of text: which ones a folder stands for, how their names are shown, and their decoding."""

import glob
import os
import shlex
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from isogpt.common.console import shortened
from isogpt.options.values import is_url, without_credentials

KINDS = (".txt", ".jsonl", ".parquet")  # which a folder stands for


def known_of(paths: list[str], folder: str) -> list[str]:
    """
    The files of a folder that end in one of KINDS. A note says which ones do not, or a ValueError if none
    does.
    """
    known = [path for path in paths if kind_of(path) in KINDS]
    if others := endings_of(paths):
        ending = others[0].partition(" ")[2]
        names = [folder] * bool(known) + [f"{glob.escape(folder).rstrip('/')}/**/*{ending}"]
        advice = f"set --data_files={shlex.quote(','.join(names))} to read {ending} as text"
        left_out = f"left out of {folder!r}: {shortened(others, 10)}; {advice}"
        if not known:
            raise ValueError(left_out)
        print(f"note: {left_out}")
    return known


def endings_of(paths: Iterable[str]) -> list[str]:
    """'20 .md', '3 .py': how many files of no kind have which ending, or which name if it has none."""
    others = sorted(shown(path) for path in paths if kind_of(path) not in KINDS)
    endings = Counter(os.path.splitext(path)[1] or os.path.basename(path) or path for path in others)
    return [f"{count:,} {ending}" for ending, count in endings.most_common()]


def kind_of(path: str) -> str:
    """The ending of a file's name in small letters, without that of gzip."""
    return os.path.splitext(shown(path).lower().removesuffix(".gz"))[1]


def shown(names: str) -> str:
    """--data_files, or a path or a pattern of it, as messages and metadata show it: without credentials."""
    return ",".join(without_credentials(name) if is_url(name) else name for name in names.split(","))


def read_text(path: Path) -> str:
    """Return the text of a file, see `decode`."""
    return decode(path.read_bytes(), str(path))


def decode(content: bytes, name: str) -> str:
    """
    Return the text of the file `name` with '\\n' line endings and no byte order mark. Raises ValueError if it
    is in neither encoding.
    """
    is_utf16 = content.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    try:
        # any other encoding would be a guess
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeError as e:
        raise ValueError(f"{name} is not text in UTF-8 ({e}): save it as UTF-8") from e
