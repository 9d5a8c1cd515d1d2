"""
Find where the documents of a training set begin and write documents.bin, which --data_order=documents of
train.py needs. Data sets of nanoGPT or llm.c, for example, do not contain this file.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bins import run
from count_bytes import record

from isogpt.common.files import write_whole
from isogpt.data.data_folder import open_split, read_meta
from isogpt.data.dataset import GPT2_VOCAB, parts_of
from isogpt.data.documents import FILE
from isogpt.data.token_array import Tokens
from isogpt.data.tokenizer import load
from isogpt.data.vocabulary import GPT2_IDS, Vocabulary, gpt2_or_unknown, vocabulary_of_data


def find_documents(folder: Path, token: int | None) -> None:
    """
    Write documents.bin, and record in meta.json the number of its positions and that of the tokens.

    Args:
        token: the id with which documents begin or end; None: the end-of-text token of the vocabulary.

    Raises:
        ValueError: a file is missing or cannot be read, the end-of-text token is not known, or there are
            fewer than two documents.
    """
    meta, path = read_meta(folder), folder / FILE
    size = meta.get("vocab_size", 0)
    tokens = open_split(folder, "train", meta, size, block_size=1)
    if token is None:
        vocabulary = vocabulary_of_data(meta, folder) or gpt2_or_unknown(size or GPT2_VOCAB, str(folder))
        token = end_of_text(vocabulary)
    with TemporaryFile(dir=folder) as positions:
        positions.writelines(find_positions(tokens, token))
        count = positions.tell() // np.dtype(np.int64).itemsize
        if count < 2:
            problem = f"token {token}, which should separate documents, separates none in {tokens.path}"
            raise ValueError(f"{problem}: {advice()}")
        positions.seek(0)
        write_whole(path, positions)
    # a kill before this leaves a count that train.py refuses, as it refuses a different number of tokens
    record(folder, {"train_documents": count, "searched_tokens": len(tokens)})
    mean = len(tokens) / count
    print(f"{path}: {count:,} documents of {mean:,.0f} tokens on average, separated by token {token}")


def end_of_text(vocabulary: Vocabulary) -> int:
    """The id of the end-of-text token. Raises ValueError if the vocabulary lacks it or is not known."""
    if vocabulary.kind == "unknown":
        raise ValueError(f"it is not known which id ends a document: {vocabulary.content}; {advice()}")
    is_gpt2 = (vocabulary.kind, vocabulary.content) == ("tiktoken", "gpt2")
    token = GPT2_IDS - 1 if is_gpt2 else load(vocabulary).end_of_text  # tiktoken needs a network or a cache
    if token is None:
        raise ValueError(f"the vocabulary contains no {vocabulary.end_of_text} to end documents: {advice()}")
    return token


def advice() -> str:
    """What a user can do where no documents are found."""
    return "give the id with --id=, or train on the text as a whole with --data_order=shuffle"


def find_positions(tokens: Tokens, token: int) -> Iterator[np.ndarray]:
    """
    Yield the positions at which documents begin, part by part: 0, and where the id `token` is. An end-of-text
    token closes one document and opens the next one; the last token of all opens none.
    """
    begin = 0
    for (part,) in parts_of(tokens):
        is_begin = part == token
        if begin == 0:
            is_begin[0] = True
        if begin + len(part) == len(tokens):
            is_begin[-1] = False
        yield np.flatnonzero(is_begin) + begin
        begin += len(part)


def main(argv: list[str]) -> None:
    """Parse the arguments and search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder that contains the training set")
    parser.add_argument("--id", type=int, help="the token that separates documents, if not <|endoftext|>")
    args = parser.parse_args(argv)
    find_documents(args.folder, args.id)


if __name__ == "__main__":
    sys.exit(run(main))
