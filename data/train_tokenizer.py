"""Train the tokenizer of a data set, for the option --train_tokenizer of the prepare.py scripts."""

import argparse
from collections.abc import Iterable, Iterator

from isogpt.common.packages import needed_by
from isogpt.data.vocabulary import END_OF_TEXT, Vocabulary

SMALLEST, LARGEST = 257, 1 << 20  # the 256 bytes and END_OF_TEXT
SAMPLE = 50_000_000  # characters, which one core reads in 20 s
PIECE = 10_000  # characters that are split into words at once
# GPT-4's: words with the space before them, up to three digits, punctuation with the line ends after it
WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TRAIN_HELP = (
    f"number of ids of a tokenizer to train on the first {SAMPLE:,} characters, instead of --tokenizer: "
    f"byte-level BPE, which keeps any text, with {END_OF_TEXT}, from {SMALLEST} to {LARGEST} ids"
)


def number_of_ids(text: str) -> int:
    """Parse a size of a vocabulary that can be trained."""
    if not (text.isdecimal() and SMALLEST <= int(text) <= LARGEST):
        raise argparse.ArgumentTypeError(
            f"{text} is not from {SMALLEST} to {LARGEST}: type a number such as 4096"
        )
    return int(text)


def train_tokenizer(documents: Iterable[str], n_ids: int) -> Vocabulary:
    """
    Train a byte-level BPE on the first SAMPLE characters of the documents, as Sennrich et al. (2016) and
    GPT-2 do: from the 256 bytes, the pair of tokens that is the most frequent within words becomes a token,
    until there are n_ids. The same documents always give the same tokenizer.

    A pair must occur twice: a short text gives fewer ids, which a note reports.

    Returns:
        the vocabulary, a tokenizer.json. Id 0 is END_OF_TEXT, the 256 bytes follow.
    """
    with needed_by("--train_tokenizer", "tokenizers"):
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    print(f"training a tokenizer of {n_ids:,} ids")
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_ids,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces_of(documents), trainer)
    if (trained := tokenizer.get_vocab_size()) < n_ids:
        print(f"note: the text is too short for a tokenizer of {n_ids:,} ids: it has {trained:,}")
    return Vocabulary("tokenizer.json", tokenizer.to_str(), END_OF_TEXT)


def pieces_of(documents: Iterable[str]) -> Iterator[str]:
    """Yield the first SAMPLE characters in pieces: the library needs 100 bytes per character of a piece."""
    left = SAMPLE
    for document in filter(None, documents):
        for start in range(0, min(len(document), left), PIECE):
            yield document[start : min(start + PIECE, left)]
        left -= len(document)
        if left <= 0:
            return
