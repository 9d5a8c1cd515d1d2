"""Tokenize documents in batches, in several processes, in order."""

import hashlib
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from threading import Thread

import numpy as np
from write_files import END_OF_DOCUMENT, dtype_for

from isogpt.data.tokenizer import Tokenizer, load
from isogpt.data.vocabulary import Vocabulary

BATCH_BYTES = 1 << 20  # of text, which one core tokenizes in about 0.1 s
IN_FLIGHT = 3  # at most so many batches for each process wait for an earlier batch
OF_PROCESS = {}  # "tokenizer": that of this process


def batches_of(documents: Iterable[str], seed: int, val_fraction: float) -> Iterator[dict[str, bytearray]]:
    """
    Divide documents into batches: the text of each split, with END_OF_DOCUMENT after each document. None of
    the documents may be empty.
    """
    batch = {"train": bytearray(), "val": bytearray()}
    for index, document in enumerate(documents):
        split = "val" if goes_to_val(seed, index, val_fraction) else "train"
        batch[split] += document.encode() + END_OF_DOCUMENT
        if len(batch["train"]) + len(batch["val"]) >= BATCH_BYTES:
            yield batch
            batch = {"train": bytearray(), "val": bytearray()}
    yield batch


def goes_to_val(seed: int, index: int, val_fraction: float) -> bool:
    """
    Whether the document at `index` goes to val.bin: a pseudo-random function of the arguments alone. One of
    the first two documents goes to each file, so that neither is empty.
    """
    if index < 2:
        return index == seed % 2
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64


def ids_of(text: bytearray, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a text of documents, with the end-of-text token after each, as in a .bin file."""
    ids, end = [], tokenizer.end_of_text
    for document in text.split(END_OF_DOCUMENT)[:-1]:
        of_document = tokenizer.encode(document.decode())
        ids += of_document
        if of_document[-1:] != [end]:
            ids.append(end)
    return np.array(ids, dtype_for(tokenizer.n_ids))


def tokenize(
    batches: Iterable[dict[str, bytearray]], vocabulary: Vocabulary, special_tokens: bool, num_proc: int
) -> Iterator[tuple[dict[str, bytearray], dict[str, np.ndarray]]]:
    """
    Yield each batch with its ids, in order. No more processes are started than there are batches.

    Raises:
        ValueError: a text cannot be encoded, or a process has ended.
    """
    context = get_context("spawn")  # a fork would copy threads of the libraries that read files
    waiting = deque()
    try:
        with ProcessPoolExecutor(num_proc, context, start_process, (vocabulary, special_tokens)) as pool:
            for batch in batches:
                waiting.append((batch, pool.submit(answer, batch)))
                if len(waiting) > IN_FLIGHT * num_proc:
                    batch, ids = waiting.popleft()
                    yield batch, ids.result()
            for batch, ids in waiting:
                yield batch, ids.result()
    except BrokenProcessPool as error:
        problem = "a tokenizing process has ended, probably for lack of memory"
        raise ValueError(f"{problem}: set a smaller --num_proc, or divide long documents") from error


def start_process(vocabulary: Vocabulary, special_tokens: bool) -> None:
    """Prepare a tokenizing process, which ends with the main one, also after a kill and after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which reaches all processes
    Thread(target=end_with_parent, daemon=True).start()
    OF_PROCESS["tokenizer"] = load(vocabulary, special_tokens)


def end_with_parent() -> None:
    """Wait until the main process has ended, and end this one."""
    parent_process().join()
    os._exit(1)


def answer(batch: dict[str, bytearray]) -> dict[str, np.ndarray]:
    """The ids of a batch, in a tokenizing process."""
    return {split: ids_of(text, OF_PROCESS["tokenizer"]) for split, text in batch.items()}
