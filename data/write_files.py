"""Write the files of a data set, whole or not at all: token ids and their metadata."""

import hashlib
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from isogpt.common.files import sync_folder
from isogpt.data.vocabulary import Vocabulary

LAST_SHARD = 999_999  # names with more digits would not be in order
# what a new data set replaces, whether the earlier one consists of shards or not
OF_DATA_SET = re.compile(r"(train|val)(_\d{6})?\.bin|documents\.bin|meta\.(json|pkl)")
LAST_MOVED = ("documents", "val", "train")  # after the others
TEMPORARY = ("unfinished.", ".tmp")  # how the names of temporary folders begin and end
VOCAB_MULTIPLE = 64  # matrix multiplications are faster with a padded vocabulary: 50257 becomes 50304
END_OF_DOCUMENT = b"\xff"  # which UTF-8 never contains, so that documents are not hashed as one text


class SplitText:
    """The number of bytes of a split's text, and its SHA-256, both updated while the text is written."""

    def __init__(self) -> None:
        self.bytes, self.sha256 = 0, hashlib.sha256()

    def add(self, text: bytes, documents: int = 0) -> None:
        """Add some of the text, in UTF-8, with END_OF_DOCUMENT after each document, which is only hashed."""
        self.bytes += len(text) - documents * len(END_OF_DOCUMENT)
        self.sha256.update(text)

    def facts(self, split: str) -> dict:
        """What meta.json records of the text."""
        return {f"{split}_bytes": self.bytes, f"{split}_text": self.sha256.hexdigest()}


class SplitWriter:
    """
    Writes the ids of a split: to train.bin, or to train_000000.bin and so on.

    Args:
        split: train or val.
        shard_tokens: ids of each file but the last; 0: all are in one file.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        self.folder, self.split, self.is_sharded = folder, split, shard_tokens > 0
        self.shard_tokens = shard_tokens or sys.maxsize
        self.tokens = 0
        self.file: BinaryIO | None = None

    @property
    def shards(self) -> int:
        """The number of complete files."""
        return self.tokens // self.shard_tokens

    def path(self, number: int) -> Path:
        """The file of this number."""
        if number > LAST_SHARD:
            raise ValueError(f"--shard_tokens={self.shard_tokens} gives more than {LAST_SHARD + 1:,} shards")
        return self.folder / (f"{self.split}_{number:06d}.bin" if self.is_sharded else f"{self.split}.bin")

    def write(self, ids: np.ndarray) -> None:
        """Append ids, in the dtype of the files."""
        while ids.size:
            number, begin = divmod(self.tokens, self.shard_tokens)
            self.file = self.file or open(self.path(number), "ab")
            part = ids[: self.shard_tokens - begin]
            self.file.write(part)
            self.tokens += part.size
            if begin + part.size == self.shard_tokens:
                self.close()
            ids = ids[part.size :]

    def close(self) -> None:
        """Sync the open file to disk, and close it."""
        if self.file:
            sync(self.file)
            self.file.close()
            self.file = None

    def keep(self, tokens: int, itemsize: int) -> bool:
        """
        Continue after the first `tokens` ids in files that an earlier process has written, and remove what
        follows them. Returns False if some of them are missing.
        """
        number, rest = divmod(tokens, self.shard_tokens)
        expected = {self.path(i).name: self.shard_tokens * itemsize for i in range(number)}
        if rest:
            expected[self.path(number).name] = rest * itemsize
        for path in self.folder.glob(f"{self.split}*.bin"):
            if path.name not in expected:
                path.unlink()
        for name, size in expected.items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size < size:
                return False
            os.truncate(path, size)
        self.tokens = tokens
        return True


def sync(file: BinaryIO) -> None:
    """Write what is buffered of an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, whose files are moved to `folder` on exit: all or none, see `move_in`."""
    with TemporaryDirectory(prefix=TEMPORARY[0], suffix=TEMPORARY[1], dir=folder) as temporary:
        yield Path(temporary)
        names = os.listdir(temporary)
        for name in names:
            with open(Path(temporary, name), "rb") as file:
                os.fsync(file.fileno())
        move_in(Path(temporary), folder, names)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of `atomic_folder` that killed processes have left."""
    for path in folder.glob("?*".join(TEMPORARY)):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def atomic_files(folder: Path, *names: str) -> Iterator[dict[str, BinaryIO]]:
    """Open temporary files for writing, by name. On exit, all are in `folder`, or none, see `move_in`."""
    with atomic_folder(folder) as temporary, ExitStack() as stack:
        yield {name: stack.enter_context(open(temporary / name, "wb")) for name in names}


def move_in(temporary: Path, folder: Path, names: Sequence[str]) -> None:
    """
    Move files from a folder within `folder` to it; with a meta.json, they replace an earlier data set as a
    whole. Earlier files are moved aside, to temporary/earlier. The training tokens leave first and come last,
    and meta.json comes first: after a kill, train.bin is missing, or there are fewer tokens than meta.json
    says, and the same call completes the moves. After an exception, the earlier files are back.
    """
    earlier = temporary / "earlier"
    earlier.mkdir(exist_ok=True)
    replaced = {*names, *(["documents.bin"] if "train.bin" in names else [])}
    if "meta.json" in names:
        replaced |= set(filter(OF_DATA_SET.fullmatch, os.listdir(folder)))
    # a new file that is no longer in `temporary` is in its place: an earlier call has moved it
    waiting = set(os.listdir(temporary)) & set(names)
    of_before = [name for name in replaced - (set(names) - waiting) if os.path.lexists(folder / name)]
    to_move = [(folder / name, earlier / name) for name in sorted(of_before, key=place_of, reverse=True)]
    to_move += [(temporary / name, folder / name) for name in sorted(waiting, key=place_of)]
    moved = []
    try:
        for source, target in to_move:
            os.replace(source, target)
            moved.append((source, target))
            sync_folder(folder)  # after each file, so that the order survives a power failure
    except BaseException:
        for source, target in reversed(moved):
            os.replace(target, source)
        raise


def place_of(name: str) -> tuple[int, str]:
    """Where a file stands in the order in which a data set is moved to its folder."""
    kind = re.split("[._]", name)[0]
    return (LAST_MOVED.index(kind) if kind in LAST_MOVED else -1), name


def write_meta(
    folder: Path, vocabulary: Vocabulary, size: int, source: dict, texts: dict[str, SplitText], **counts: int
) -> dict:
    """
    Write the metadata of new files in `folder`, and return the content of meta.json. A table of tokens is
    written as nanoGPT's meta.pkl.

    Args:
        size: the number of ids of the tokenizer.
        counts: train_tokens, val_tokens, and what else is recorded by its name.
    """
    padded = -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if vocabulary.characters:
        padded = size
        tables = {"itos": vocabulary.tokens, "stoi": vocabulary.characters}
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": size} | tables))
    elif vocabulary.kind == "tokenizer.json":
        (folder / "tokenizer.json").write_bytes(vocabulary.content.encode())
        end_of_text = json.dumps({"eos_token": vocabulary.end_of_text})
        (folder / "tokenizer_config.json").write_text(end_of_text)
    meta = {"dtype": dtype_for(size).name, "vocab_size": padded}
    meta |= {"tokenizer": vocabulary.name, "tokenizer_size": size}
    tokens = {name: counts.pop(name) for name in ("train_tokens", "val_tokens")}
    meta |= tokens | texts["train"].facts("train") | texts["val"].facts("val") | counts | {"source": source}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def pack_ids(ids: list[int], tokenizer_size: int) -> np.ndarray:
    """
    Convert `ids` to dtype_for(tokenizer_size). Raises ValueError if an id is not in [0, tokenizer_size).
    """
    wide = np.asarray(ids, dtype=np.int64)
    if wide.size and not 0 <= wide.min() <= wide.max() < tokenizer_size:
        raise ValueError(
            f"token ids from {wide.min()} to {wide.max()} do not fit a tokenizer of {tokenizer_size} ids"
        )
    return wide.astype(dtype_for(tokenizer_size))


def dtype_for(tokenizer_size: int) -> np.dtype:
    """Return uint16 if all ids below `tokenizer_size` fit, else uint32."""
    return np.dtype(np.uint16 if tokenizer_size <= 1 << 16 else np.uint32)
