"""
Tokenize text in several processes, and write the files of a data set, whole or not at all.

A batch is a split, train or val, some of its text in UTF-8, with END_OF_DOCUMENT after each document, and the
places of these documents, for messages. A part is a batch with its ids, in the dtype of the files.
"""

import hashlib
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, cycle, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from read_files import Document

from isogpt.common.console import count_text, shortened
from isogpt.data.dataset import parts_of
from isogpt.data.token_files import Tokens, open_files
from isogpt.data.tokenizer import Tokenizer
from isogpt.data.vocabulary import Vocabulary

Batch = tuple[str, bytes, list[str]]
Part = tuple[str, bytes, np.ndarray, list[str]]  # at last, which documents are left out and why

BATCH_BYTES = 1 << 20  # of text, which one core tokenizes in about 0.1 s
END_OF_DOCUMENT = b"\xff"  # which UTF-8 never contains, so that documents are not hashed as one text
# what a new data set replaces, whether the earlier one consists of shards or not, in this order
TOKEN_FILES = ("train.bin", "train_??????.bin", "val.bin", "val_??????.bin")
REPLACED = (*TOKEN_FILES, "documents.bin", "meta.json", "meta.pkl")


def batches_of(documents: Iterable[Document], seed: int, val_fraction: float) -> Iterator[Batch]:
    """Divide documents into batches; empty ones are left out."""
    texts = {"train": bytearray(), "val": bytearray()}
    places = {"train": [], "val": []}
    for index, (place, document) in enumerate(document for document in documents if document[1]):
        split = "val" if goes_to_val(seed, index, val_fraction) else "train"
        texts[split] += document.encode() + END_OF_DOCUMENT
        places[split].append(place)
        if len(texts[split]) >= BATCH_BYTES:
            yield split, bytes(texts[split]), places[split]
            texts[split], places[split] = bytearray(), []
    yield from ((split, bytes(text), places[split]) for split, text in texts.items())


def goes_to_val(seed: int, index: int, val_fraction: float) -> bool:
    """
    Whether the document at `index` goes to val.bin: a pseudo-random function of the arguments alone. One of
    the first two documents goes to each file, so that neither is empty.
    """
    if index < 2:
        return index == seed % 2
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64


def tokenize(batches: Iterable[Batch], tokenizer: Tokenizer, make: Callable, num_proc: int) -> Iterator[Part]:
    """
    Yield a part for each batch, in order.

    Args:
        make: returns the tokenizer.
        num_proc: 1: in this process; else in so many others, to which the batches are dealt in turn.

    Raises:
        ValueError: a text without documents cannot be encoded, the tokenizer lacks the token that ends a
            document, or a process has been killed.
    """
    batches = iter(batches)
    first = list(islice(batches, num_proc))
    if tokenizer.end_of_text is None and any(places for _, _, places in first):
        raise ValueError("the tokenizer lacks a token that ends a document: set --tokenizer=gpt2")
    if num_proc == 1:
        yield from (encode(tokenizer, batch) for batch in chain(first, batches))
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is not for the processes
    processes = [start_process() for _ in first]
    signal.signal(signal.SIGINT, before)
    with deaths_reported():
        for process, batch in zip(processes, first, strict=True):
            process.send(make)
            process.send(batch)
    for batch, process in zip(chain(batches, [None] * len(first)), cycle(processes), strict=False):
        with deaths_reported():
            part = process.recv()
            if batch:
                process.send(batch)
        yield part


@contextmanager
def deaths_reported() -> Iterator[None]:
    """Raise ValueError if the block cannot write to a tokenizing process or read from it."""
    try:
        yield
    except (EOFError, OSError) as error:  # OSError: also in the middle of a message
        problem = "A tokenizing process has been killed, perhaps for lack of memory"
        raise ValueError(f"{problem}: set --num_proc=1 to use less") from error


def start_process() -> Connection:
    """
    Start a process that runs `serve`, and return this end of its own pipe: a queue that several processes
    share would stay locked if one of them is killed.
    """
    context = get_context("spawn")  # a fork would copy threads of the libraries that read files
    ours, its = context.Pipe()
    context.Process(target=serve, args=(its,), daemon=True).start()
    its.close()  # so that its end closes this one
    return ours


def serve(connection: Connection) -> None:
    """Receive a function that makes the tokenizer, and then texts, until the main process ends or closes."""
    with suppress(EOFError, OSError):
        tokenizer = connection.recv()()
        while True:
            connection.send(encode(tokenizer, connection.recv()))


def encode(tokenizer: Tokenizer, batch: Batch) -> Part:
    """
    The part of a batch, with the end-of-text token after each document. Documents that the tokenizer cannot
    encode are left out.
    """
    split, text, places = batch
    *documents, rest = text.split(END_OF_DOCUMENT)
    kept, ids, left_out = [], [], []
    for document, place in zip(documents, places, strict=True):
        try:
            of_document = tokenizer.encode(document.decode())
        except ValueError as error:
            left_out.append(f"{place}: {error}")
            continue
        kept.append(document + END_OF_DOCUMENT)
        ids += of_document
        if of_document[-1:] != [tokenizer.end_of_text]:
            ids.append(tokenizer.end_of_text)
    if rest:
        ids = tokenizer.encode(rest.decode())
    dtype = np.uint16 if tokenizer.n_ids <= 1 << 16 else np.uint32
    return split, b"".join([*kept, rest]), np.array(ids, dtype), left_out


class SplitText:
    """
    The numbers of documents and bytes of a split's text, and its SHA-256, updated while it is written; the
    ids are written to train.bin or, in shards, to train_000000.bin and so on.

    Args:
        folder: of the files; None: the ids are not written.
        split: train or val.
        per_file: ids of each shard but the last; 0: all are in one file.
    """

    def __init__(self, folder: Path | None = None, split: str = "val", per_file: int = 0) -> None:
        self.folder, self.split, self.per_file = folder, split, per_file
        self.documents, self.bytes, self.tokens = 0, 0, 0
        self.sha256 = hashlib.sha256()

    def facts(self) -> dict:
        """What meta.json records of the text."""
        facts = {"tokens": self.tokens, "bytes": self.bytes, "text": self.sha256.hexdigest()}
        return {f"{self.split}_{name}": value for name, value in facts.items()}

    def add(self, text: bytes, ids: np.ndarray | tuple = ()) -> None:
        """
        Add some of the text, with END_OF_DOCUMENT after each document, which is only hashed, and write its
        ids, in the dtype of the files.
        """
        documents = text.count(END_OF_DOCUMENT)
        self.documents += documents
        self.bytes += len(text) - documents
        self.sha256.update(text)
        while len(ids):
            name, room = f"{self.split}.bin", len(ids)
            if self.per_file > 0:
                shard, begin = divmod(self.tokens, self.per_file)
                name, room = f"{self.split}_{shard:06d}.bin", self.per_file - begin
            with open(self.folder / name, "ab") as file:
                file.write(ids[:room])
            self.tokens += len(ids[:room])
            ids = ids[room:]


def write_data_set(
    folder: Path, vocabulary: Vocabulary, tokenizer: Tokenizer, source: dict, parts: Iterable, per_file: int
) -> dict:
    """
    Write a data set to a temporary folder, move it to `folder`, and return the content of its meta.json. An
    error leaves `folder` as it was.

    Args:
        source: what meta.json records of the text's origin.
        parts: see tokenize.

    Raises:
        ValueError: one of the splits is empty.
    """
    size = tokenizer.n_ids
    for path in folder.glob("unfinished.*.tmp"):  # of killed processes
        shutil.rmtree(path, ignore_errors=True)
    with TemporaryDirectory(prefix="unfinished.", suffix=".tmp", dir=folder) as name:
        temporary = Path(name)
        writers = {split: SplitText(temporary, split, per_file) for split in ("train", "val")}
        left_out = []
        for split, text, ids, errors in parts:
            writers[split].add(text, ids)
            left_out += errors
        if left_out:
            count = count_text(len(left_out), "document")
            print(f"note: {count} left out, which cannot be encoded: {shortened(left_out, between='; ')}")
        if not all(writer.tokens for writer in writers.values()):
            raise ValueError("train.bin or val.bin would be empty: use more text, or set --val_fraction=0.1")
        meta = {"dtype": ids.dtype.name, "vocab_size": write_vocabulary(temporary, vocabulary, size)}
        meta |= {"tokenizer": vocabulary.name, "tokenizer_size": size}
        meta |= writers["train"].facts() | writers["val"].facts()
        if documents := sum(writer.documents for writer in writers.values()):
            tokens = open_files(sorted(temporary.glob("train*.bin")), meta["dtype"])
            begins = document_begins(tokens, tokenizer.end_of_text)
            begins.tofile(temporary / "documents.bin")
            meta |= {"documents": documents, "train_documents": len(begins)}
        (temporary / "meta.json").write_text(json.dumps(meta | {"source": source}, indent=2) + "\n")
        for path in temporary.iterdir():  # a power failure could otherwise leave names of empty files
            with open(path, "ab") as file:
                os.fsync(file.fileno())
        # the training tokens leave first and come last: after a kill there is no train.bin, or there are
        # fewer tokens than meta.json says, which train.py refuses
        for pattern in REPLACED:
            for path in folder.glob(pattern):
                path.unlink()
        for path in sorted(temporary.iterdir(), key=lambda path: path.name.startswith("train")):
            os.replace(path, folder / path.name)
    return meta


def write_vocabulary(folder: Path, vocabulary: Vocabulary, size: int) -> int:
    """
    Write a table of `size` characters as nanoGPT's meta.pkl, or a tokenizer.json. Returns the number of ids
    of a model.
    """
    if vocabulary.name == "char":
        tables = {"vocab_size": size, "itos": vocabulary.tokens, "stoi": vocabulary.ids}
        (folder / "meta.pkl").write_bytes(pickle.dumps(tables))
        return size
    if vocabulary.kind == "tokenizer.json":
        (folder / "tokenizer.json").write_bytes(vocabulary.content.encode())
        end_of_text = json.dumps({"eos_token": vocabulary.end_of_text})
        (folder / "tokenizer_config.json").write_text(end_of_text)
    return -(-size // 64) * 64  # matrix multiplications are faster: 50257 becomes 50304


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
