"""
Find where the documents of a training set begin and write documents.bin, which --data_order=documents of
train.py needs. Data sets of nanoGPT or llm.c, for example, do not contain this file.
"""

from pathlib import Path

from bins import run_on_folder
from count_bytes import record, vocabulary_or_gpt2
from write_files import document_begins

from isogpt.common.files import write_whole
from isogpt.data.data_folder import open_split, read_meta
from isogpt.data.tokenizer import load
from isogpt.data.vocabulary import GPT2_IDS


def find_documents(folder: Path, token: int | None) -> None:
    """
    Write documents.bin, and record in meta.json the number of its positions and that of the tokens.

    Args:
        token: the id with which documents begin or end; None: the end-of-text token of the vocabulary.

    Raises:
        ValueError: a file is missing or cannot be read, or there are fewer than two documents.
    """
    tokens = open_split(folder, "train", read_meta(folder), block_size=1)
    vocabulary = vocabulary_or_gpt2(folder)
    if token is None and vocabulary.content == "gpt2":
        token = GPT2_IDS - 1  # tiktoken needs a network or a cache
    elif token is None and vocabulary.kind != "unknown":
        token = load(vocabulary).end_of_text
    begins = () if token is None else document_begins(tokens, token)
    if len(begins) < 2:
        problem = f"no documents, which token {token} would separate"
        raise ValueError(f"{tokens.path}: {problem}; set --id=")
    # a kill after this leaves a count that train.py refuses, as it refuses a different number of tokens
    write_whole(folder / "documents.bin", begins.tobytes())
    record(folder, {"train_documents": len(begins), "searched_tokens": len(tokens)})
    mean = len(tokens) / len(begins)
    print(f"{len(begins):,} documents of {mean:,.0f} tokens on average, separated by token {token}")


if __name__ == "__main__":
    token = dict(type=int, dest="token", help="of the token that separates documents")
    run_on_folder(find_documents, __doc__, id=token)
