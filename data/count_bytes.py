"""
Count the bytes of the text in val.bin, or its shards, and record their number in meta.json, so that train.py
reports bits per byte. Data sets of nanoGPT, for example, do not contain this number.
"""

import json
from pathlib import Path

from bins import run_on_folder
from write_files import END_OF_DOCUMENT, SplitText

from isogpt.common.files import write_whole
from isogpt.data.data_folder import open_split, read_dict, read_meta, vocabulary_in
from isogpt.data.dataset import GPT2_VOCAB, parts_of
from isogpt.data.tokenizer import ids_of_encoding, load_encoding
from isogpt.data.vocabulary import Vocabulary, gpt2_or_unknown


def count_bytes(folder: Path) -> None:
    """
    Decode val.bin, and record what prepare.py records of its text. In a data set of documents, an end-of-text
    token is the end of a document. Takes seconds for ten million tokens. What prepare.py has recorded stays.

    Raises:
        ValueError: a file is missing or cannot be read, or the bytes of an id are not known.
    """
    meta = read_meta(folder)
    val_tokens = meta.pop("val_tokens", None)  # perhaps of an earlier val.bin
    tokens = open_split(folder, "val", meta, block_size=0)
    if {"source", "val_bytes"} <= meta.keys() and val_tokens == len(tokens):
        # it knows the text, in which a user may have written an end-of-text token
        print(f"{tokens.path}: prepare.py has counted {meta['val_bytes']:,} bytes of text")
        return
    text = SplitText()
    vocabulary = vocabulary_or_gpt2(folder)
    if vocabulary.is_table:
        table = {i: token.encode() for i, token in vocabulary.tokens.items()}
    elif vocabulary.kind == "tiktoken":
        table = {i: token for token, i in ids_of_encoding(load_encoding(vocabulary)).items()}
    else:  # the decoder of a tokenizer.json may depend on the preceding ids
        advice = "prepare the data set again, or write val_bytes to meta.json"
        raise ValueError(f"the bytes of its ids are not known ({vocabulary.name}): {advice}")
    if "source" not in meta or "documents" in meta:  # prepare.py adds no end-of-text tokens to one text
        end = vocabulary.end_of_text.encode()
        for i, token in table.items():
            if token == end:
                table[i] = END_OF_DOCUMENT
    for (ids,) in parts_of(tokens):
        try:
            text.add(b"".join(table[i] for i in ids.tolist()))
        except KeyError as e:
            problem = f"contains id {e}, which is not in the vocabulary"
            raise ValueError(f"{tokens.path} {problem}") from e
    text.tokens = len(tokens)
    record(folder, text.facts())
    print(f"{tokens.path}: {text.tokens:,} tokens of {vocabulary.name}, {text.bytes:,} bytes of text")


def vocabulary_or_gpt2(folder: Path) -> Vocabulary:
    """What the ids of a data set mean: GPT-2's, if nothing says it and the size allows it."""
    size = read_meta(folder).get("vocab_size", GPT2_VOCAB)
    return vocabulary_in(folder) or gpt2_or_unknown(size, folder)


def record(folder: Path, facts: dict) -> None:
    """Add `facts` to the meta.json in `folder`, which is created if there is none."""
    path = folder / "meta.json"
    recorded = read_dict(path) if path.exists() else {}
    write_whole(path, json.dumps(recorded | facts, indent=2) + "\n")


if __name__ == "__main__":
    run_on_folder(count_bytes, __doc__)
