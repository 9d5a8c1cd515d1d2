"""Tokenize documents in batches, in this process or in several others, in order."""

import hashlib
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository

from write_files import END_OF_DOCUMENT, pack_ids

from isogpt.data.tokenizer import Tokenizer, load
from isogpt.data.vocabulary import Vocabulary

BATCH_BYTES = 1 << 20  # of text, which one core tokenizes in about 0.1 s
ENDED = (EOFError, OSError)  # what a pipe raises if the other side has ended, even in the middle of a message
IN_FLIGHT = 3  # at most so many batches for each process wait for an earlier batch


class Batch(NamedTuple):
    """Consecutive documents: their number, and the text of each split, with END_OF_DOCUMENT after each."""

    documents: int
    train: bytes
    val: bytes


class BatchIds(NamedTuple):
    """
    The ids of a batch, and where documents of train begin, counted from its first id: the end-of-text token
    that ends a document opens the next one, so that the first one begins at -1.
    """

    train: np.ndarray
    val: np.ndarray
    begins: np.ndarray


class Entry:
    """A batch that is being tokenized; `ids` is None until it is done."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.ids = batch, None


def batches_of(documents: Iterable[str], is_val: Callable[[int], bool], first: int) -> Iterator[Batch]:
    """Divide documents, none of which is empty, into batches. `first` is the index of the first document."""
    parts, size, begin = {False: [], True: []}, 0, first
    for index, document in enumerate(documents, first):
        text = document.encode() + END_OF_DOCUMENT
        parts[is_val(index)].append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield Batch(index + 1 - begin, *map(b"".join, parts.values()))
            parts, size, begin = {False: [], True: []}, 0, index + 1
    if size:
        yield Batch(sum(map(len, parts.values())), *map(b"".join, parts.values()))


def goes_to_val(seed: int, index: int, val_fraction: float) -> bool:
    """
    Whether the document at `index` goes to val.bin: a pseudo-random function of the arguments alone. One of
    the first two documents goes to each file, so that neither is empty.
    """
    if index < 2:
        return index == seed % 2
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64


def ids_of(batch: Batch, tokenizer: Tokenizer) -> BatchIds:
    """Tokenize a batch, with the end-of-text token after each document."""
    train, val = (ids_of_text(text, tokenizer) for text in (batch.train, batch.val))
    begins = np.flatnonzero(train[:-1] == tokenizer.end_of_text)
    return BatchIds(train, val, np.concatenate([[-1] if train.size else [], begins]).astype(np.int64))


def ids_of_text(text: bytes, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a text's documents, each of which is followed by END_OF_DOCUMENT, as in a .bin file."""
    ids, end = [], tokenizer.end_of_text
    for document in text.split(END_OF_DOCUMENT)[:-1]:
        of_document = tokenizer.encode(document.decode())
        ids += of_document
        if of_document[-1:] != [end]:
            ids.append(end)
    return pack_ids(ids, tokenizer.n_ids)


def tokenize(
    batches: Iterator[Batch], vocabulary: Vocabulary, special_tokens: bool, num_proc: int
) -> Iterator[tuple[Batch, BatchIds]]:
    """
    Yield each batch with its ids, in order. No more processes are started than there are batches; with one
    process, or a single batch, none is started.

    Raises:
        ValueError: a text cannot be encoded, or a process has ended.
    """
    first = list(islice(batches, num_proc))
    batches = chain(first, batches)
    if len(first) > 1:
        with tokenizing_processes(len(first), vocabulary, special_tokens) as pipes:
            yield from in_order(batches, pipes)
    else:
        tokenizer = load(vocabulary, special_tokens)
        for batch in batches:
            yield batch, ids_of(batch, tokenizer)


@contextmanager
def tokenizing_processes(
    number: int, vocabulary: Vocabulary, special_tokens: bool
) -> Iterator[list[Connection]]:
    """Start processes, each of which tokenizes the batches that it gets through its pipe."""
    context = get_context("spawn")  # a fork would copy threads of the libraries that read files
    pipes, processes = [], []
    try:
        for _ in range(number):
            pipe, other_end = context.Pipe()
            arguments = (other_end, vocabulary, special_tokens)
            process = context.Process(target=answer_batches, args=arguments, daemon=True)
            start_without_ctrl_c(process)
            other_end.close()
            pipes.append(pipe)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def start_without_ctrl_c(process: BaseProcess) -> None:
    """
    Start a process that ignores Ctrl-C from the beginning, because it inherits that: Ctrl-C reaches all
    processes, and the main one ends the others.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, handler)


def answer_batches(pipe: Connection, vocabulary: Vocabulary, special_tokens: bool) -> None:
    """What a tokenizing process does, until the main process ends, which closes the pipe."""
    tokenizer = load(vocabulary, special_tokens)
    with suppress(*ENDED):
        while True:
            batch = pipe.recv()
            try:
                answer = ids_of(batch, tokenizer)
            except ValueError as error:
                answer = error
            pipe.send(answer)


def in_order(batches: Iterable[Batch], idle: list[Connection]) -> Iterator[tuple[Batch, BatchIds]]:
    """
    Give each batch to a process without work, and yield the batches with their ids in order. A process gets a
    batch only when it has answered the last one, since neither side could read while both of them write.
    """
    entries, busy, most = deque(), {}, IN_FLIGHT * len(idle)
    for batch in batches:
        if not idle:
            collect(busy, idle)
        entry, pipe = Entry(batch), idle.pop()
        send(pipe, batch)
        busy[pipe] = entry
        entries.append(entry)
        yield from completed(entries, busy, idle, most)
    yield from completed(entries, busy, idle, 0)


def completed(
    entries: deque[Entry], busy: dict[Connection, Entry], idle: list[Connection], most: int
) -> Iterator[tuple[Batch, BatchIds]]:
    """Yield the first entries while they are done, and wait until no more than `most` entries are left."""
    while entries and (entries[0].ids or len(entries) > most):
        if entries[0].ids:
            entry = entries.popleft()
            yield entry.batch, entry.ids
        else:
            collect(busy, idle)


def collect(busy: dict[Connection, Entry], idle: list[Connection]) -> None:
    """Wait until processes have answered, and take their answers."""
    for pipe in wait(list(busy)):
        try:
            answer = pipe.recv()
        except ENDED as error:
            raise process_ended() from error
        if isinstance(answer, ValueError):
            raise answer
        busy.pop(pipe).ids = answer
        idle.append(pipe)


def send(pipe: Connection, batch: Batch) -> None:
    """Give a batch to a process. Raises ValueError if the process has ended."""
    try:
        pipe.send(batch)
    except ENDED as error:
        raise process_ended() from error


def process_ended() -> ValueError:
    """The error to raise if a tokenizing process has ended."""
    problem = "a tokenizing process has ended, probably for lack of memory"
    return ValueError(f"{problem}: set a smaller --num_proc, or divide long documents")
