"""Tokenize documents in batches, in several processes, in order."""

import hashlib
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context, parent_process
from threading import Thread

import numpy as np
from write_files import END_OF_DOCUMENT, dtype_for

from isogpt.data.tokenizer import load
from isogpt.data.vocabulary import Vocabulary

BATCH_BYTES = 1 << 20  # of text, which one core tokenizes in about 0.1 s
AT_ONCE = 2  # batches for each process that are read while as many are tokenized
OF_PROCESS = {}  # "tokenizer": that of this process


def batches_of(documents: Iterable[str], seed: int, val_fraction: float) -> Iterator[tuple[str, bytes]]:
    """
    Divide documents into batches: a split and some of its text, with END_OF_DOCUMENT after each document.
    None of the documents may be empty.
    """
    texts = {"train": bytearray(), "val": bytearray()}
    for index, document in enumerate(documents):
        split = "val" if goes_to_val(seed, index, val_fraction) else "train"
        texts[split] += document.encode() + END_OF_DOCUMENT
        if len(texts[split]) >= BATCH_BYTES:
            yield split, bytes(texts[split])
            texts[split].clear()
    yield from texts.items()


def goes_to_val(seed: int, index: int, val_fraction: float) -> bool:
    """
    Whether the document at `index` goes to val.bin: a pseudo-random function of the arguments alone. One of
    the first two documents goes to each file, so that neither is empty.
    """
    if index < 2:
        return index == seed % 2
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64


def tokenize(
    batches: Iterator[tuple[str, bytes]], vocabulary: Vocabulary, special_tokens: bool, num_proc: int
) -> Iterator[tuple[tuple[str, bytes], np.ndarray]]:
    """
    Yield each batch with its ids, in order. No more processes are started than there are batches.

    Raises:
        ValueError: a text cannot be encoded.
        BrokenProcessPool: a process has been killed, for instance for lack of memory.
    """
    context = get_context("spawn")  # a fork would copy threads of the libraries that read files
    with ProcessPoolExecutor(num_proc, context, start_process, (vocabulary, special_tokens)) as pool:
        earlier = ()
        while some := list(islice(batches, AT_ONCE * num_proc)):
            ids = pool.map(ids_of, some)  # starts, and does not wait
            yield from earlier
            earlier = zip(some, ids, strict=True)
        yield from earlier


def start_process(vocabulary: Vocabulary, special_tokens: bool) -> None:
    """Prepare a tokenizing process, which ends with the main one, also after a kill and after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which reaches all processes
    Thread(target=end_with_parent, daemon=True).start()
    OF_PROCESS["tokenizer"] = load(vocabulary, special_tokens)


def end_with_parent() -> None:
    """Wait until the main process has ended, and end this one."""
    parent_process().join()
    os._exit(1)


def ids_of(batch: tuple[str, bytes]) -> np.ndarray:
    """The ids of a batch, with the end-of-text token after each document, in a tokenizing process."""
    tokenizer, ids = OF_PROCESS["tokenizer"], []
    for document in batch[1].split(END_OF_DOCUMENT)[:-1]:
        of_document = tokenizer.encode(document.decode())
        ids += of_document
        if of_document[-1:] != [tokenizer.end_of_text]:
            ids.append(tokenizer.end_of_text)
    return np.array(ids, dtype_for(tokenizer.n_ids))
