"""Write the files of a data set, whole or not at all: token ids and their metadata."""

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from isogpt.common.files import sync_folder
from isogpt.data.dataset import parts_of
from isogpt.data.token_files import Tokens
from isogpt.data.vocabulary import Vocabulary

# what a new data set replaces, whether the earlier one consists of shards or not
OF_DATA_SET = re.compile(r"(train|val)(_\d{6})?\.bin|documents\.bin|meta\.(json|pkl)")
TEMPORARY = ("unfinished.", ".tmp")  # how the names of temporary folders begin and end
VOCAB_MULTIPLE = 64  # matrix multiplications are faster with a padded vocabulary: 50257 becomes 50304
END_OF_DOCUMENT = b"\xff"  # which UTF-8 never contains, so that documents are not hashed as one text


class SplitText:
    """The numbers of documents and bytes of a split's text, and its SHA-256, updated while it is written."""

    def __init__(self) -> None:
        self.documents, self.bytes, self.sha256 = 0, 0, hashlib.sha256()

    def add(self, text: bytes) -> None:
        """Add some of the text, in UTF-8, with END_OF_DOCUMENT after each document, which is only hashed."""
        documents = text.count(END_OF_DOCUMENT)
        self.documents += documents
        self.bytes += len(text) - documents
        self.sha256.update(text)

    def facts(self, split: str) -> dict:
        """What meta.json records of the text."""
        return {f"{split}_bytes": self.bytes, f"{split}_text": self.sha256.hexdigest()}


class SplitWriter(SplitText):
    """
    Writes the ids of a split to train.bin or, in shards, to train_000000.bin and so on.

    Args:
        split: train or val.
        shard_tokens: ids of each file but the last; 0: all are in one file.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        super().__init__()
        self.folder, self.split, self.shard_tokens, self.tokens = folder, split, shard_tokens, 0

    def write(self, text: bytes, ids: np.ndarray) -> None:
        """Append the ids of a text, see SplitText.add, in the dtype of the files."""
        self.add(text)
        while ids.size:
            name, room = f"{self.split}.bin", ids.size
            if self.shard_tokens > 0:
                shard, begin = divmod(self.tokens, self.shard_tokens)
                name, room = f"{self.split}_{shard:06d}.bin", self.shard_tokens - begin
            with open(self.folder / name, "ab") as file:
                file.write(ids[:room])
            self.tokens += ids[:room].size
            ids = ids[room:]


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """
    Yield a temporary folder, whose files are moved to `folder` at the end; an error leaves `folder` as it
    was. What killed processes have left there is removed.
    """
    for path in folder.glob("?*".join(TEMPORARY)):
        shutil.rmtree(path, ignore_errors=True)
    with TemporaryDirectory(prefix=TEMPORARY[0], suffix=TEMPORARY[1], dir=folder) as temporary:
        yield Path(temporary)
        move_in(Path(temporary), folder)


def move_in(temporary: Path, folder: Path) -> None:
    """
    Move files to `folder`; with a meta.json, they replace an earlier data set as a whole. The training tokens
    leave first and come last: after a kill there is no train.bin, or there are fewer tokens than meta.json
    says, which train.py refuses.
    """

    def is_train(path: Path) -> bool:
        return path.name.startswith("train")

    new = sorted(temporary.iterdir(), key=is_train)
    for path in new:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    names = {path.name for path in new}
    for path in sorted(folder.iterdir(), key=is_train, reverse=True):
        if path.name in names or "meta.json" in names and OF_DATA_SET.fullmatch(path.name):
            path.unlink()
            sync_folder(folder)  # after each file, so that the order survives a power failure
    for path in new:
        os.replace(path, folder / path.name)
        sync_folder(folder)


def write_positions(folder: Path, tokens: Tokens, token: int) -> int:
    """
    Write documents.bin: 0, and where the id `token` is, which closes one document and opens the next one; the
    last token of all opens none. Returns the number of positions.
    """
    begin, found = 0, [[0]]
    for (part,) in parts_of(tokens):
        found.append(np.flatnonzero(part == token) + begin)
        begin += len(part)
    positions = np.unique(np.concatenate(found)).astype(np.int64)
    positions = positions[positions < max(1, begin - 1)]
    positions.tofile(folder / "documents.bin")
    return len(positions)


def write_meta(
    folder: Path, vocabulary: Vocabulary, size: int, writers: dict[str, SplitWriter], facts: dict
) -> dict:
    """
    Write the metadata of new files in `folder`, and return the content of meta.json. A table of characters is
    written as nanoGPT's meta.pkl.

    Args:
        size: the number of ids of the tokenizer.
        facts: what else is recorded.
    """
    padded = -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if vocabulary.name == "char":
        padded = size
        tables = {"vocab_size": size, "itos": vocabulary.tokens, "stoi": vocabulary.ids}
        (folder / "meta.pkl").write_bytes(pickle.dumps(tables))
    elif vocabulary.kind == "tokenizer.json":
        (folder / "tokenizer.json").write_bytes(vocabulary.content.encode())
        end_of_text = json.dumps({"eos_token": vocabulary.end_of_text})
        (folder / "tokenizer_config.json").write_text(end_of_text)
    meta = {"dtype": dtype_for(size).name, "vocab_size": padded}
    meta |= {"tokenizer": vocabulary.name, "tokenizer_size": size}
    meta |= {f"{split}_tokens": writer.tokens for split, writer in writers.items()}
    for split, writer in writers.items():
        meta |= writer.facts(split)
    meta |= facts
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def dtype_for(tokenizer_size: int) -> np.dtype:
    """Return uint16 if all ids below `tokenizer_size` fit, else uint32."""
    return np.dtype(np.uint16 if tokenizer_size <= 1 << 16 else np.uint32)
