"""
Find where the documents of a training set begin and write documents.bin, which --data_order=documents of
train.py needs. Data sets of nanoGPT or llm.c, for example, do not contain this file.
"""

import argparse
import sys
from pathlib import Path

from bins import run
from count_bytes import record
from write_files import atomic_folder, write_positions

from isogpt.data.data_folder import open_split, read_meta
from isogpt.data.dataset import GPT2_VOCAB
from isogpt.data.tokenizer import load
from isogpt.data.vocabulary import GPT2_IDS, Vocabulary, gpt2_or_unknown, vocabulary_of_data

ADVICE = "give the id with --id=, or train on the text as a whole with --data_order=shuffle"


def find_documents(folder: Path, token: int | None) -> None:
    """
    Write documents.bin, and record in meta.json the number of its positions and that of the tokens.

    Args:
        token: the id with which documents begin or end; None: the end-of-text token of the vocabulary.

    Raises:
        ValueError: a file is missing or cannot be read, the end-of-text token is not known, or there are
            fewer than two documents.
    """
    meta = read_meta(folder)
    size = meta.get("vocab_size", 0)
    tokens = open_split(folder, "train", meta, block_size=1)
    if token is None:
        vocabulary = vocabulary_of_data(meta, folder) or gpt2_or_unknown(size or GPT2_VOCAB, str(folder))
        token = end_of_text(vocabulary)
    with atomic_folder(folder) as temporary:
        count = write_positions(temporary, tokens, token)
        if count < 2:
            problem = f"token {token}, which should separate documents, separates none in {tokens.path}"
            raise ValueError(f"{problem}: {ADVICE}")
    # a kill before this leaves a count that train.py refuses, as it refuses a different number of tokens
    record(folder, {"train_documents": count, "searched_tokens": len(tokens)})
    found = f"{count:,} documents of {len(tokens) / count:,.0f} tokens on average, separated by token {token}"
    print(f"{folder / 'documents.bin'}: {found}")


def end_of_text(vocabulary: Vocabulary) -> int:
    """The id of the end-of-text token. Raises ValueError if the vocabulary lacks it or is not known."""
    if vocabulary.kind == "unknown":
        raise ValueError(f"it is not known which id ends a document: {vocabulary.content}; {ADVICE}")
    is_gpt2 = (vocabulary.kind, vocabulary.content) == ("tiktoken", "gpt2")
    token = GPT2_IDS - 1 if is_gpt2 else load(vocabulary).end_of_text  # tiktoken needs a network or a cache
    if token is None:
        raise ValueError(f"the vocabulary contains no {vocabulary.end_of_text} to end documents: {ADVICE}")
    return token


def main(argv: list[str]) -> None:
    """Parse the arguments and search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder that contains the training set")
    parser.add_argument("--id", type=int, help="the token that separates documents, if not <|endoftext|>")
    args = parser.parse_args(argv)
    find_documents(args.folder, args.id)


if __name__ == "__main__":
    sys.exit(run(main))
