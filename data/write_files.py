"""Write the files of a data set, whole or not at all: token ids and their metadata."""

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from isogpt.common.files import sync_folder
from isogpt.data.vocabulary import Vocabulary

VOCAB_MULTIPLE = 64  # matrix multiplications are faster with a padded vocabulary: 50257 becomes 50304
END_OF_DOCUMENT = b"\xff"  # which UTF-8 never contains, so that documents are not hashed as one text


class SplitText:
    """The number of bytes of a split's text, and its SHA-256, while the text passes by."""

    def __init__(self) -> None:
        self.bytes, self.sha256 = 0, hashlib.sha256()

    def add(self, text: bytes, documents: int = 0) -> None:
        """Add some of the text, in UTF-8, with END_OF_DOCUMENT after each document, which is only hashed."""
        self.bytes += len(text) - documents * len(END_OF_DOCUMENT)
        self.sha256.update(text)

    def facts(self, split: str) -> dict:
        """What meta.json records of the text."""
        return {f"{split}_bytes": self.bytes, f"{split}_text": self.sha256.hexdigest()}


def names_of(vocabulary: Vocabulary) -> list[str]:
    """
    Return the files of a data set in the order in which they are written: train.bin, which train.py looks
    for, is last.
    """
    kinds = {"table": ["meta.pkl"], "tokenizer.json": ["tokenizer_config.json", "tokenizer.json"]}
    return ["val.bin", *kinds.get(vocabulary.kind, []), "meta.json", "train.bin"]


@contextmanager
def atomic_files(folder: Path, *names: str) -> Iterator[dict[str, BinaryIO]]:
    """
    Open temporary files for writing, by name. On exit, sync them to disk and move them to `folder`, in the
    order of `names`. An exception leaves `folder` unchanged, also while the files are moved: earlier files
    are moved aside, and are deleted when all new files are there. The last one is moved aside first: after a
    kill it is missing, and earlier and new files are never mixed.
    """
    with TemporaryDirectory(suffix=".tmp", dir=folder) as temporary:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(Path(temporary, name), "wb")) for name in names}
            yield files
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        earlier = Path(temporary, "earlier")
        earlier.mkdir()
        # meta.pkl: the vocabulary of a previous character data set
        of_before = dict.fromkeys([*reversed(names), *(["meta.pkl"] if "meta.json" in names else [])])
        to_move = [(folder / name, earlier / name) for name in of_before if os.path.lexists(folder / name)]
        to_move += [(Path(temporary, name), folder / name) for name in names]
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


def write_meta(
    files: dict[str, BinaryIO],
    vocabulary: Vocabulary,
    size: int,
    source: dict,
    texts: dict[str, SplitText],
    **counts: int,
) -> dict:
    """
    Write the metadata and return the content of meta.json. train.bin and val.bin must be written already;
    `size` is the number of ids of the tokenizer. A table of tokens is written as nanoGPT's meta.pkl.
    """
    dtype = dtype_for(size)
    is_table = "meta.pkl" in files
    padded = size if is_table else -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if is_table:
        tables = {"itos": vocabulary.tokens, "stoi": vocabulary.content}
        files["meta.pkl"].write(pickle.dumps({"vocab_size": size} | tables))
    if vocabulary.kind == "tokenizer.json":
        files["tokenizer.json"].write(vocabulary.content.encode())
        files["tokenizer_config.json"].write(json.dumps({"eos_token": vocabulary.end_of_text}).encode())
    tokens = {f"{split}_tokens": files[f"{split}.bin"].tell() // dtype.itemsize for split in ("train", "val")}
    meta = {"dtype": dtype.name, "vocab_size": padded, "tokenizer": vocabulary.name, "tokenizer_size": size}
    meta |= tokens | texts["train"].facts("train") | texts["val"].facts("val") | counts | {"source": source}
    files["meta.json"].write((json.dumps(meta, indent=2) + "\n").encode())
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
