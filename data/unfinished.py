"""
A data set of documents while it is written, in the folder unfinished.tmp. A journal there says how much is on
the disk, so that the same command continues after a kill.
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from tokenize_documents import Batch, BatchIds, batches_of
from write_files import END_OF_DOCUMENT, SplitText, SplitWriter, move_in, sync, write_meta

from isogpt.common.files import lock, parse_json, read_utf8, write_whole
from isogpt.data.vocabulary import Vocabulary

FOLDER = "unfinished.tmp"
JOURNAL = "journal.json"
POSITIONS = "documents.bin"
POSITION = np.dtype(np.int64)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota, a limit of the size of files
EVERY = 1 << 25  # tokens between two entries in the journal: seconds of work
SPLITS = ("train", "val")


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """
    Lock a folder, so that only one prepare.py at a time writes to it. Raises ValueError if a different one is
    writing.
    """
    if os.name != "posix":  # Windows opens no folders
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor):
            advice = "wait for it, or set a different folder with --out="
            raise ValueError(f"a different prepare.py is writing to {folder}: {advice}")
        yield
    except OSError as error:
        if error.errno in FULL:  # these name no file
            error.filename = error.filename or str(folder)
        raise
    finally:
        os.close(descriptor)


def complete_moves(folder: Path) -> dict:
    """
    If a kill has interrupted the move of a finished data set to `folder`, complete it. Returns the arguments
    with which it was prepared; {} if there was nothing to complete.
    """
    path = folder / FOLDER
    journal = read_journal(path)
    if "names" not in journal:
        return {}
    move_in(path, folder, journal["names"])
    remove(path)
    return journal["arguments"]


def read_journal(path: Path) -> dict:
    """The journal in a folder; {} if there is none."""
    try:
        return parse_json(read_utf8(path / JOURNAL))
    except FileNotFoundError:
        return {}


def remove(path: Path) -> None:
    """Remove the folder of a data set, the journal first, so that after a kill the rest does not count."""
    (path / JOURNAL).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def unfinished_in(
    folder: Path, arguments: dict, shard_tokens: int, dtype: np.dtype
) -> Iterator["Unfinished"]:
    """The data set that is being written to `folder`; for the arguments see Unfinished."""
    unfinished = Unfinished(folder, arguments, shard_tokens, dtype)
    try:
        yield unfinished
    except BaseException:
        unfinished.stop()
        raise


class Unfinished:
    """
    A data set of documents that is being written.

    Args:
        arguments: what determines the content. Work that was begun with different ones is discarded.
        shard_tokens: see SplitWriter.
        dtype: of the ids.
    """

    def __init__(self, folder: Path, arguments: dict, shard_tokens: int, dtype: np.dtype) -> None:
        self.folder, self.path, self.arguments = folder, folder / FOLDER, arguments
        self.shard_tokens, self.dtype = shard_tokens, dtype
        self.journal = read_journal(self.path)
        if self.journal and (before := self.journal["arguments"]) != arguments:
            changed = [name for name, value in arguments.items() if before.get(name) != value]
            print(f"note: {self.path} was begun with a different {' and '.join(changed)}: beginning anew")
            self.journal = {}
        if not self.journal:
            self.clear()
        self.begin()

    def clear(self) -> None:
        """Discard what is there."""
        remove(self.path)
        self.path.mkdir()
        self.journal = {}

    def begin(self) -> None:
        """Begin with no documents."""
        self.documents = 0
        self.texts = {split: SplitText() for split in SPLITS}
        self.writers = {split: SplitWriter(self.path, split, self.shard_tokens) for split in SPLITS}
        self.saved_tokens = self.saved_shards = 0
        self.positions = open(self.path / POSITIONS, "ab")

    @property
    def tokens(self) -> int:
        """The number of ids so far."""
        return sum(writer.tokens for writer in self.writers.values())

    def facts(self) -> dict:
        """What the journal says of the content."""
        facts = {"documents": self.documents, "positions": self.positions.tell()}
        for split in SPLITS:
            facts |= self.texts[split].facts(split) | {f"{split}_tokens": self.writers[split].tokens}
        return facts

    def skip(self, documents: Iterator[str], is_val: Callable[[int], bool]) -> bool:
        """
        Read again the documents that the journal counts, since a digest cannot be stored half-way. Returns
        False if they, or the files, are not what they were: then everything begins anew, and so must
        `documents`.
        """
        if not self.journal:
            return True
        count = self.journal["documents"]
        print(f"continuing at document {count + 1:,}: those before it are only read and compared", flush=True)
        for batch in batches_of(islice(documents, count), is_val, 0):
            self.add_text(batch)
        are_kept = [
            self.writers[split].keep(self.journal[f"{split}_tokens"], self.dtype.itemsize) for split in SPLITS
        ]
        is_long_enough = self.positions.tell() >= self.journal["positions"]
        if is_long_enough:
            self.positions.truncate(self.journal["positions"])
            self.positions.seek(0, os.SEEK_END)
        if all(are_kept) and is_long_enough and self.facts().items() <= self.journal.items():
            self.saved_tokens, self.saved_shards = self.tokens, self.shards
            return True
        print(f"note: the documents, or the files in {self.path}, have changed: beginning anew", flush=True)
        self.positions.close()
        self.clear()
        self.begin()
        return False

    def add_text(self, batch: Batch) -> None:
        """Count and hash the text of a batch."""
        self.documents += batch.documents
        for split in SPLITS:
            text = getattr(batch, split)
            self.texts[split].add(text, documents=text.count(END_OF_DOCUMENT))

    def write(self, batch: Batch, ids: BatchIds) -> None:
        """Append a batch, and now and then record in the journal what is on the disk."""
        self.add_text(batch)
        begins = np.maximum(ids.begins + self.writers["train"].tokens, 0)
        if not self.writers["train"].tokens:
            begins = np.unique(begins)  # a document may itself begin with an end-of-text token
        self.positions.write(begins.astype(POSITION))
        for split in SPLITS:
            self.writers[split].write(getattr(ids, split))
        if self.shards > self.saved_shards or self.tokens - self.saved_tokens >= EVERY:
            self.save()

    @property
    def shards(self) -> int:
        """The number of complete shards."""
        return sum(writer.shards for writer in self.writers.values())

    def save(self, **more: object) -> None:
        """Write the journal, after everything that it counts."""
        for writer in self.writers.values():
            writer.close()
        sync(self.positions)
        write_whole(self.path / JOURNAL, json.dumps({"arguments": self.arguments, **self.facts(), **more}))
        self.saved_tokens, self.saved_shards = self.tokens, self.shards

    def stop(self) -> None:
        """After an error: keep what the journal counts, if anything."""
        files = [self.positions, *(writer.file for writer in self.writers.values())]
        for file in filter(None, files):
            with suppress(OSError):  # a full disk has no space for what is buffered either
                file.close()
        if read_journal(self.path):
            print(f"note: the finished part is kept in {self.path}: the same command continues it")
        else:
            remove(self.path)

    def finish(self, vocabulary: Vocabulary, size: int, source: dict) -> dict:
        """
        Write the metadata, and move everything to the folder. Returns the content of meta.json; for the
        arguments see write_meta.
        """
        counts = {f"{split}_tokens": self.writers[split].tokens for split in SPLITS}
        counts |= {"documents": self.documents}
        counts |= {"train_documents": self.positions.tell() // POSITION.itemsize}
        meta = write_meta(self.path, vocabulary, size, source, self.texts, **counts)
        names = [name for name in os.listdir(self.path) if not name.startswith(JOURNAL)]  # nor a half one
        for name in names:
            with open(self.path / name, "rb") as file:
                os.fsync(file.fileno())
        self.save(names=names)
        self.positions.close()
        complete_moves(self.folder)
        return meta
