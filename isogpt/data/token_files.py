"""
The format of files of token ids: concluded from the metadata, a header or the content.

Our files and nanoGPT's contain only uint16. Other files contain integers of 8, 32 or 64 bits, begin with
llm.c's header, or are not token files at all: read as uint16, they would give wrong tokens.
"""

import codecs
import gzip
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isogpt.common.files import about_pointer

DTYPES = ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
# llm.c's header, also written by modded-nanogpt: 256 int32, which begin with this number, a version, and the
# number of tokens
HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # number: (version, dtype of the tokens)
EVALUATION_HEADER = 20240522  # llm.c's multiple-choice questions
HEADER_BYTES = 1024
LARGEST_ID = 2**20  # more than the ids of any tokenizer
ENOUGH = 64  # ids other than 0 from which a width is concluded
# more different ids than this are certainly wide: a text in which a space of id 0 follows each letter
# contains fewer
CERTAIN = {"int32": 256, "int64": 2}


@dataclass(frozen=True)
class Format:
    """How to read a token file: the ids' dtype, and the number of bytes before the first id."""

    dtype: str
    offset: int = 0


def parse_dtype(value: object, where: Path) -> str:
    """
    Return the name of a declared dtype, such as 'uint16', numpy.uint16, '<u2' or 'torch.int32'.

    Raises:
        ValueError: ids are not stored in this dtype.
    """
    name = value.__name__ if isinstance(value, type) else str(value)
    for prefix in ("torch.", "numpy.", "np."):
        name = name.removeprefix(prefix)
    with suppress(TypeError, ValueError, SyntaxError):
        dtype = np.dtype(name)
        if dtype.name in DTYPES and dtype.isnative:
            return dtype.name
    raise ValueError(f"{where}: dtype is {value!r}, possible are {', '.join(DTYPES[:-1])} and {DTYPES[-1]}")


def formats_of(
    paths: Sequence[Path], declared: str | None, vocab_size: int
) -> tuple[list[Format], list[str]]:
    """
    Return the format of each file of a data set, and notes for the user about what was concluded from the
    content.

    Args:
        declared: the dtype in the metadata; None: conclude it from the content. A header takes precedence.
        vocab_size: the size in the metadata or the settings; 0: unknown.

    Raises:
        ValueError: a file does not contain token ids, begins with an unknown header, or its width cannot be
            decided.
    """
    headers = [read_header(path) for path in paths]
    for path, header in zip(paths, headers, strict=True):
        if not header and (kind := other_kind(path, may_be_text=declared == "uint8")):
            raise ValueError(f"{path} is {kind}")
    notes = [
        f"{path} begins with llm.c's header, which is skipped: {header.dtype} ids"
        for path, header in zip(paths, headers, strict=True)
        if header
    ]
    bare = [path for path, header in zip(paths, headers, strict=True) if not header]
    dtype = declared
    if bare and not declared:
        dtype, note = conclude_dtype(bare, vocab_size)
        notes += [note] if note else []
    return [header or Format(dtype) for header in headers], notes


def read_header(path: Path) -> Format | None:
    """
    Read llm.c's header; None without a header. Raises ValueError if the version is unknown or tokens are
    missing.
    """
    with open(path, "rb") as f:
        start = f.read(HEADER_BYTES)
    if len(start) < HEADER_BYTES:
        return None
    magic, version, tokens = np.frombuffer(start, np.int32)[:3].tolist()
    if magic == EVALUATION_HEADER and version == 1:
        raise ValueError(
            f"{path} contains llm.c's multiple-choice questions, not a text: use a different data set"
        )
    if magic not in HEADERS:
        return None
    known, dtype = HEADERS[magic]
    if version != known:
        raise ValueError(
            f"{path} begins with llm.c's header {magic} of version {version}, but only version {known} is "
            "known: write the file again, without a header"
        )
    expected = HEADER_BYTES + tokens * np.dtype(dtype).itemsize
    if path.stat().st_size != expected:
        raise ValueError(
            f"{path} contains {path.stat().st_size} bytes, but the header announces {tokens} tokens, that is "
            f"{expected} bytes: the file is truncated or damaged; copy or prepare the file again"
        )
    return Format(dtype, HEADER_BYTES)


def other_kind(path: Path, may_be_text: bool) -> str:
    """What a file without bare token ids is, and what to do about it; '' if it may contain bare ids."""
    with open(path, "rb") as f:
        start = f.read(2**16)
    if start.startswith(b"\x93NUMPY"):
        return (
            "a .npy file, whose header would be read as tokens: write the ids with numpy's tofile "
            "instead of save"
        )
    if pointer := about_pointer(path):
        return pointer
    if start.startswith(b"PK\x03\x04") and zipfile.is_zipfile(path):
        return "a zip archive (.zip, .npz, or written by torch.save): write the ids with numpy's tofile"
    if start.startswith(b"\x1f\x8b\x08") and is_gzip(path):
        return "compressed by gzip: decompress it with gunzip"
    if may_be_text or not is_text(start):
        return ""
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "a web page (HTML), not token ids: a download has failed, download it again"
    text = path.with_suffix(".txt")
    return (
        f"text, not token ids: rename it to {text.name}, then run: python data/shakespeare/prepare.py "
        f"--data_files={text} --out={path.parent}"
    )


def is_gzip(path: Path) -> bool:
    """Whether the beginning of the file can be decompressed."""
    with suppress(OSError, EOFError), gzip.open(path) as f:
        f.read(1024)
        return True
    return False


def is_text(start: bytes) -> bool:
    """
    Whether the beginning of a file is UTF-8 without control characters, which are half of most ids below
    8192.
    """
    if len(start) < ENOUGH:
        return False
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character may be incomplete
    except UnicodeDecodeError:
        return False
    return not any(c < " " and c not in "\t\n\r\f" for c in text)


def sample_bytes(path: Path) -> np.ndarray:
    """
    Return a small file, or evenly spaced samples that begin at multiples of 8 bytes: (n,) uint8, n a multiple
    of 8.
    """
    content = np.memmap(path, np.uint8, "r")
    if len(content) <= 2**19:
        return content[: len(content) // 8 * 8]
    starts = np.linspace(0, len(content) - 8192, 64).astype(np.int64) // 8 * 8
    return np.concatenate([content[start : start + 8192] for start in starts])


def conclude_dtype(paths: list[Path], vocab_size: int) -> tuple[str, str]:
    """
    Conclude the dtype of the ids in these files; returns it with a note for the user, or ''. It is uint16
    unless the content contradicts this.

    Raises:
        ValueError: the content is equally likely in two dtypes, or the files differ.
    """
    found = {path: sample_bytes(path) for path in paths if path.stat().st_size >= 8}
    both, here = " and ".join(path.name for path in paths), paths[0].parent
    for dtype in ("int64", "int32"):
        wide = {
            path: wide_ids(content, dtype)
            for path, content in found.items()
            if path.stat().st_size % np.dtype(dtype).itemsize == 0
        }
        wide = {path: ids for path, ids in wide.items() if ids is not None}
        ids = np.concatenate([*wide.values(), np.empty(0, dtype)])
        ids = ids[ids != 0]
        different = len(np.unique(ids))
        if len(ids) < ENOUGH:
            continue
        is_certain = different > CERTAIN[dtype] or ids.max() >= 2**16 or vocab_size > 2**16
        bits = 8 * np.dtype(dtype).itemsize
        if len(wide) < len(found):
            if is_certain:
                names = [
                    " and ".join(path.name for path in found if (path in wide) == is_wide)
                    for is_wide in (1, 0)
                ]
                raise ValueError(
                    f"{here}: {names[0]} holds ids of {bits} bits, but {names[1]} of 16 bits: write both "
                    f"with the same dtype"
                )
        elif is_certain:
            return dtype, (
                f"{both} in {here}: ids of {bits} bits, read as {dtype}; if they are uint16, "
                f"{declaration(here, 'uint16')}"
            )
        elif different > 2:
            raise ValueError(
                f"{both} in {here}: ids of {bits} bits, or ids of 16 bits of which every second is 0: "
                f"{declaration(here, dtype)}, or with uint16"
            )
        else:
            return "uint16", (
                f"{both} in {here}: every second id is 0; if the ids are of {bits} bits, "
                f"{declaration(here, dtype)}"
            )
    return conclude_narrow(found, vocab_size, both, here)


def conclude_narrow(found: dict[Path, np.ndarray], vocab_size: int, both: str, here: Path) -> tuple[str, str]:
    """`conclude_dtype` for files that do not contain ids of 32 or 64 bits."""
    content = np.concatenate([*found.values(), np.empty(0, np.uint8)])
    if 0 < vocab_size <= 256 and len(content) and content.max() < vocab_size <= content.view(np.uint16).max():
        return "uint8", (
            f"{both} in {here}: ids of 8 bits, read as uint8: with 16 bits they would exceed the "
            f"vocabulary size, {vocab_size}"
        )
    if not vocab_size and is_of_bytes(content):
        raise ValueError(
            f"{both} in {here}: probably ids of 8 bits: {declaration(here, 'uint8')}, or with uint16"
        )
    if vocab_size > 2**16:
        return "uint16", (
            f"{both} in {here}: read as uint16, whose ids end at 65535, but the vocabulary size is "
            f"{vocab_size}: larger ids were lost when the files were written"
        )
    return "uint16", ""


def wide_ids(content: np.ndarray, dtype: str) -> np.ndarray | None:
    """The bytes as ids of 32 or 64 bits; None if this is unlikely, since ids are small, or -1 for padding."""
    ids = content.view(dtype)
    if not np.all((ids >= -1) & (ids < LARGEST_ID)):
        return None
    # two ids of 16 bits from an alphabet of a few letters also give small numbers of 32 bits
    is_small_alphabet = len(ids) > 0 and ids.max() >= 2**16 and (ids & 0xFFFF).max() < LARGEST_ID >> 16
    return None if is_small_alphabet else ids


def is_of_bytes(content: np.ndarray) -> bool:
    """Whether the two bytes of the 16-bit numbers are distributed alike, as if each byte were an id."""
    if len(content) < 4096 or content.max() >= 128:
        return False
    counts = [np.bincount(part[part > 0], minlength=128) for part in (content[0::2], content[1::2])]
    if any(np.count_nonzero(count) < 3 or count.sum() < 1024 for count in counts):
        return False
    first, second = (count / count.sum() for count in counts)
    return bool(np.abs(first - second).sum() / 2 < 0.2)


def declaration(folder: Path, dtype: str) -> str:
    """How a user says what the dtype is."""
    if (folder / "meta.json").exists():
        return f'add "dtype": "{dtype}" to {folder / "meta.json"}'
    return f'write {{"dtype": "{dtype}"}} to {folder / "meta.json"}'
