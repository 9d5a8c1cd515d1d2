"""Write the files of a data set, whole or not at all: token ids and their metadata."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from isogpt.common.files import sync_folder
from isogpt.data.dataset import parts_of
from isogpt.data.shards import open_files
from isogpt.data.token_array import Tokens
from isogpt.data.tokenizer import Tokenizer
from isogpt.data.vocabulary import Vocabulary

# what a new data set replaces, whether the earlier one consists of shards or not, in this order
TOKEN_FILES = ("train.bin", "train_??????.bin", "val.bin", "val_??????.bin")
OF_DATA_SET = (*TOKEN_FILES, "documents.bin", "meta.json", "meta.pkl")
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

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        super().__init__()
        self.folder, self.split, self.dtype = folder, split, dtype
        self.shard_tokens, self.tokens = shard_tokens, 0

    def write(self, text: bytes, ids: Sequence[int]) -> None:
        """Append the ids of a text, see SplitText.add."""
        self.add(text)
        ids = np.asarray(ids, self.dtype)
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
    Yield a temporary folder, whose files replace the data set in `folder` at the end; an error leaves
    `folder` as it was. The training tokens leave first and come last: after a kill there is no train.bin, or
    there are fewer tokens than meta.json says, which train.py refuses.
    """
    for path in folder.glob("unfinished.*.tmp"):  # of killed processes
        shutil.rmtree(path, ignore_errors=True)
    with TemporaryDirectory(prefix="unfinished.", suffix=".tmp", dir=folder) as temporary:
        yield Path(temporary)
        new = sorted(Path(temporary).iterdir(), key=lambda path: path.name.startswith("train"))
        for path in new:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        for pattern in OF_DATA_SET:
            for path in folder.glob(pattern):
                path.unlink()
            sync_folder(folder)  # each time, so that the order survives a power failure
        for path in new:
            os.replace(path, folder / path.name)
            sync_folder(folder)


def document_begins(tokens: Tokens, token: int) -> np.ndarray:
    """
    The content of documents.bin: 0, and where the id `token` is, which closes one document and opens the next
    one; the last token of all opens none.
    """
    begin, found = 0, [[0]]
    for (part,) in parts_of(tokens):
        found.append(np.flatnonzero(part == token) + begin)
        begin += len(part)
    begins = np.unique(np.concatenate(found))
    return begins[begins < max(1, begin - 1)]


def write_data_set(
    folder: Path,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    parts: Iterable[tuple[tuple[str, bytes], Sequence[int]]],
    source: dict,
    shard_tokens: int,
) -> dict:
    """
    Write a data set to `folder`, and return the content of its meta.json. A table of characters is written as
    nanoGPT's meta.pkl.

    Args:
        parts: part by part, the split and its text, see SplitText.add, and the ids.
        source: what meta.json records of the text's origin.

    Raises:
        ValueError: one of the splits is empty.
    """
    size = tokenizer.n_ids
    dtype = dtype_for(size)
    with atomic_folder(folder) as temporary:
        writers = {split: SplitWriter(temporary, split, dtype, shard_tokens) for split in ("train", "val")}
        for (split, text), ids in parts:
            writers[split].write(text, ids)
        if not all(writer.tokens for writer in writers.values()):
            advice = "use more text or documents, or set --val_fraction=0.1 or the like"
            raise ValueError(f"train.bin or val.bin would be empty: {advice}")
        is_char, padded = vocabulary.name == "char", -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        meta = {"dtype": dtype.name, "vocab_size": size if is_char else padded}
        meta |= {"tokenizer": vocabulary.name, "tokenizer_size": size}
        meta |= {f"{split}_tokens": writer.tokens for split, writer in writers.items()}
        for split, writer in writers.items():
            meta |= writer.facts(split)
        if documents := sum(writer.documents for writer in writers.values()):
            tokens = open_files(sorted(temporary.glob("train*.bin")), dtype.name, size)
            begins = document_begins(tokens, tokenizer.end_of_text)
            begins.tofile(temporary / "documents.bin")
            meta |= {"documents": documents, "train_documents": len(begins)}
        meta |= {"source": source}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        if is_char:
            tables = {"vocab_size": size, "itos": vocabulary.tokens, "stoi": vocabulary.ids}
            (temporary / "meta.pkl").write_bytes(pickle.dumps(tables))
        elif vocabulary.kind == "tokenizer.json":
            (temporary / "tokenizer.json").write_bytes(vocabulary.content.encode())
            end_of_text = json.dumps({"eos_token": vocabulary.end_of_text})
            (temporary / "tokenizer_config.json").write_text(end_of_text)
    return meta


def dtype_for(tokenizer_size: int) -> np.dtype:
    """Return uint16 if all ids below `tokenizer_size` fit, else uint32."""
    return np.dtype(np.uint16 if tokenizer_size <= 1 << 16 else np.uint32)
