"""A data set on disk: find, check and map the files of token ids, and read the metadata."""

import hashlib
import json
import mmap
import operator
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isogpt.common.files import REPOSITORY, load_pickle
from isogpt.data.token_files import DTYPES, Format, declared_dtype, format_of
from isogpt.data.vocabulary import Vocabulary, vocabulary_of_data

GPT2_VOCAB = 50304  # for a data set without metadata: GPT-2's 50257 ids, padded to a multiple of 64
META_PKL = ("vocab_size", "stoi", "itos")  # what is read of nanoGPT's meta.pkl
# names of plain values that a meta.pkl may contain besides builtin values
ARRAYS = {"scalar", "_reconstruct"}
PICKLED = {
    "numpy": {"dtype", "ndarray", *DTYPES},
    "numpy._core.multiarray": ARRAYS,
    "numpy.core.multiarray": ARRAYS,
    "collections": {"OrderedDict", "defaultdict", "Counter"},
    "builtins": {"int", "float", "str", "list", "dict", "set", "tuple"},
}


@dataclass(frozen=True)
class Dataset:
    """
    The two token files of `folder`, memory-mapped, and the vocabulary size, from the metadata or GPT-2's.
    """

    folder: Path
    train: np.ndarray  # (tokens,), with one of token_files.DTYPES
    val: np.ndarray  # (tokens,)
    vocab_size: int
    highest: int  # the highest id found when the files were checked
    digest: str  # digest of lengths and samples of the files, to compare machines
    vocabulary: Vocabulary | None = None  # what the ids mean; None if the folder does not say

    def facts(self) -> dict:
        """What must be the same on all ranks, named as in messages."""
        return {"the data's digest": self.digest, "the data's vocabulary size": self.vocab_size}


def open_dataset(name: str, block_size: int, vocab_size: int = 0) -> Dataset:
    """
    Memory-map the files of a data set and check them.

    Args:
        block_size: each split must contain at least block_size + 1 tokens.
        vocab_size: ids must be below this number; 0: the size in the metadata.

    Raises:
        ValueError: a file is missing, empty, too short or truncated, an id is outside the vocabulary, or the
            metadata cannot be read.
    """
    folder = find_dataset(name)
    meta = read_meta(folder)
    vocabulary = vocabulary_of_data(meta, folder)
    known_size = vocab_size or known_vocab_size(meta, vocabulary, folder)
    vocab_size = known_size or GPT2_VOCAB
    if vocabulary and vocabulary.size and vocabulary.size > vocab_size:
        problem = f"{folder} describes {vocabulary.size} token ids, but the vocabulary size is {vocab_size}"
        raise ValueError(f"{problem}: set --vocab_size={vocabulary.size} or more")
    splits = map_splits(folder, declared_dtype(meta, folder), known_size, block_size)
    check_counts(folder, meta, splits)
    highest = max(check_split(folder / f"{split}.bin", ids, vocab_size) for split, ids in splits.items())
    digest = digest_of(splits)
    return Dataset(folder, splits["train"], splits["val"], vocab_size, highest, digest, vocabulary)


def find_dataset(name: str) -> Path:
    """
    Find the folder of data set `name`: data/<name> in the working folder or in the repository, or a path to
    the folder or the train.bin in it.

    Raises:
        ValueError: none of these folders contains a train.bin.
    """
    path = Path(name).expanduser()
    if path.name in ("train.bin", "val.bin"):
        path = path.parent
    # on Windows, paths are written with both separators
    is_path = "/" in name or os.sep in name or name.startswith((".", "~"))
    places = [path] if path.is_absolute() else [Path("data") / path, REPOSITORY / "data" / path]
    if is_path and not path.is_absolute():
        places += [path, REPOSITORY / path]
    for place in places:
        if (place / "train.bin").exists():
            return place
    searched = " or ".join(dict.fromkeys(map(str, places)))
    raise ValueError(f"no train.bin in {searched}; {how_to_prepare(places)}")


def how_to_prepare(places: list[Path]) -> str:
    """What a user can do if none of these folders contains a train.bin."""
    prepared = ", ".join(prepared_datasets())
    for place in places:
        if (place / "prepare.py").exists():
            others = f", or set --dataset= to a prepared data set: {prepared}" if prepared else ""
            return f"run: python {place / 'prepare.py'}{others}"
    return f"prepared data sets: {prepared or 'none'}"


def prepared_datasets() -> list[str]:
    """Names of the data sets that contain a train.bin."""
    return sorted(
        {p.parent.name for root in (Path("data"), REPOSITORY / "data") for p in root.glob("*/train.bin")}
    )


def read_meta(folder: Path) -> dict:
    """
    Read a data set's metadata: meta.json, which prepare.py writes, over the vocabulary in nanoGPT's meta.pkl;
    empty if there is neither file. The pickle may contain only plain values: nothing in it runs.

    Raises:
        ValueError: one of the files cannot be read, or a meta.pkl does not contain a vocabulary.
    """
    pkl, ours = folder / "meta.pkl", folder / "meta.json"
    content = read_dict(pkl) if pkl.exists() else {}
    meta = {name: content[name] for name in META_PKL if name in content}
    if ours.exists():
        meta |= read_dict(ours)
    if content and not meta.keys() & {*META_PKL, "tokenizer"}:
        problem = f"{pkl} contains neither vocab_size nor stoi nor itos, which nanoGPT reads"
        raise ValueError(f'{problem}: write {{"vocab_size": N}} with the number of ids to {ours}')
    return meta


def read_dict(path: Path) -> dict:
    """The dict in a meta.pkl or meta.json. Raises ValueError if the file cannot be read."""
    try:
        content = load_pickle(path, PICKLED) if path.suffix == ".pkl" else json.loads(path.read_text())
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}, not a dict")
    except Exception as e:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path} cannot be read: {e}") from e
    return content


def known_vocab_size(meta: dict, vocabulary: Vocabulary | None, folder: Path) -> int:
    """
    Return the size of the vocabulary by the metadata, else the number of ids with a meaning; 0 if both are
    unknown. Raises ValueError if the metadata contains something that is not a number.
    """
    if "vocab_size" not in meta:
        return (vocabulary and vocabulary.size) or 0
    size = meta["vocab_size"]
    try:
        return operator.index(size)
    except TypeError:
        where = " or ".join(name for name in ("meta.json", "meta.pkl") if (folder / name).exists())
        raise ValueError(f"{folder / where}: vocab_size is {size!r}, not an integer") from None


def map_splits(folder: Path, dtype: str | None, vocab_size: int, block_size: int) -> dict[str, np.ndarray]:
    """
    Map train.bin and val.bin as arrays, by split.

    Args:
        dtype: the dtype that the metadata declares; None: not declared.
        vocab_size: the size in the metadata or the settings; 0: unknown.

    Raises:
        ValueError: a file is missing, empty, truncated, too short or of an unknown format.
    """
    splits = {}
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        if not path.exists():
            raise ValueError(f"{path} does not exist; {how_to_get_val(folder)}")
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty; {how_to_repair(folder)}")
        splits[split] = map_tokens(path, format_of(path, dtype, vocab_size), block_size)
    return splits


def map_tokens(path: Path, format: Format, block_size: int) -> np.ndarray:
    """Map the file as an array. Raises ValueError if the file is truncated or too short."""
    size, item = path.stat().st_size - format.offset, np.dtype(format.dtype).itemsize
    if size % item:
        problem = f"{path} contains {size} bytes, not a multiple of {item} ({format.dtype}): it is truncated"
        raise ValueError(f"{problem}, or of a different dtype; {how_to_repair(path.parent)}")
    tokens = size // item
    if tokens < block_size + 1:
        problem = (
            f"{path} contains {tokens} tokens, but block_size {block_size} needs {block_size + 1} or more"
        )
        shorter = f"set --block_size={tokens - 1} or less, or " if tokens > 1 else ""
        raise ValueError(f"{problem}: {shorter}use more text")
    return np.memmap(path, dtype=format.dtype, mode="r", offset=format.offset)


def how_to_repair(folder: Path) -> str:
    """What a user can do about missing or damaged token files."""
    if (folder / "prepare.py").exists():
        return f"run: python {folder / 'prepare.py'}"
    return f"write train.bin and val.bin in {folder} again"


def how_to_get_val(folder: Path) -> str:
    """What a user can do about a missing val.bin."""
    split = f"take it from the end of train.bin: {split_command(folder)}"
    if (folder / "prepare.py").exists():
        return f"run: python {folder / 'prepare.py'}, or {split}"
    return split


def split_command(folder: Path) -> str:
    """The command that divides a train.bin."""
    return f"python {os.path.relpath(REPOSITORY / 'data' / 'split.py')} {folder}"


def check_counts(folder: Path, meta: dict, splits: dict[str, np.ndarray]) -> None:
    """Raise ValueError if the files do not contain as many tokens as prepare.py has recorded."""
    for split, tokens in splits.items():
        recorded = meta.get(f"{split}_tokens", len(tokens))
        if recorded != len(tokens):  # some of the files were copied or written separately
            problem = f"{folder / split}.bin contains {len(tokens)} tokens, but meta.json says {recorded}"
            todo = how_to_repair(folder)
            raise ValueError(f"{problem}: they come from different prepare.py runs; {todo}")


class DataError(ValueError):
    """The data is not what the check at the start of the run found."""


def check_split(path: Path, tokens: np.ndarray, vocab_size: int) -> int:
    """Return the highest id of a file. Raises DataError if an id is outside the vocabulary."""
    lowest, highest = range_of_ids(tokens)
    check_ids(highest, vocab_size, path, lowest)
    return highest


def range_of_ids(tokens: np.ndarray) -> tuple[int, int]:
    """
    Return the lowest and the highest id in a small file, or in a thousand samples of a large file (each batch
    is checked when it is read).
    """
    parts = np.array_split(tokens, 64) if len(tokens) <= 2**26 else samples(tokens, 1000)
    lowest, highest = [], []
    for part in parts:
        if len(part):
            lowest.append(int(part.min()))
            highest.append(int(part.max()))
            release_pages(tokens)
    return min(lowest), max(highest)


def check_ids(highest: int, vocab_size: int, path: Path, lowest: int = 0) -> None:
    """
    Raise DataError if an id is outside the vocabulary: on a GPU the embedding would fail with an opaque
    error.
    """
    if lowest < 0:
        raise DataError(
            f"{path} holds token id {lowest}: remove the ids below 0, such as padding, and write it again"
        )
    if highest >= vocab_size:
        advice = f"set --vocab_size={highest + 1} or more, or run prepare.py again (meta.json may be wrong)"
        raise DataError(f"{path} holds token id {highest}, but the vocabulary size is {vocab_size}: {advice}")


def release_pages(tokens: np.ndarray) -> None:
    """
    Remove the pages of a mapped file from this process's resident set, which would otherwise grow to the size
    of the file. The pages stay in the system's page cache.
    """
    if isinstance(tokens.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        tokens.base.madvise(mmap.MADV_DONTNEED)


def digest_of(splits: dict[str, np.ndarray]) -> str:
    """A digest of the lengths and of samples of the files, with which machines and runs are compared."""
    content = b"".join(len(t).to_bytes(8, "little") + b"".join(samples(t, 64)) for t in splits.values())
    return hashlib.sha256(content).hexdigest()[:12]


def samples(tokens: np.ndarray, n: int) -> list[np.ndarray]:
    """n evenly spaced samples of a file: 4096 tokens each."""
    starts = np.linspace(0, max(0, len(tokens) - 4096), n).astype(np.int64)
    return [tokens[s : s + 4096] for s in starts]
