"""Train the tokenizer of a data set, for the option --train_tokenizer of the prepare.py scripts."""

from collections.abc import Iterable, Iterator

from isogpt.common.packages import needed_by
from isogpt.data.vocabulary import END_OF_TEXT, Vocabulary

SAMPLE = 50_000_000  # characters, which one core reads in 20 s
PIECE = 2_000  # characters that are split into words at once
# GPT-4's: words with the space before them, up to three digits, punctuation with the line ends after it
WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def train_tokenizer(documents: Iterable[str], n_ids: int, sample: int = SAMPLE) -> Vocabulary:
    """
    Train a byte-level BPE on the first `sample` characters of the documents, as Sennrich et al. (2016) and
    GPT-2 do: from the 256 bytes, the pair of tokens that is the most frequent within words becomes a token,
    until there are n_ids. The same documents always give the same tokenizer.

    A pair must occur twice: a short text gives fewer ids, which a note reports.

    Returns:
        the vocabulary, a tokenizer.json. Id 0 is END_OF_TEXT, the 256 bytes follow.

    Raises:
        ValueError: there are fewer ids than bytes.
    """
    if n_ids < 257:
        raise ValueError(f"--train_tokenizer={n_ids} is below 257: type a number such as 4096")
    with needed_by("--train_tokenizer", "tokenizers"):
        from tokenizers import ByteLevelBPETokenizer, Regex
        from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    print(f"training a tokenizer of {n_ids:,} ids")
    tokenizer = ByteLevelBPETokenizer()
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(Regex(WORDS), "isolated"), to_bytes])
    pieces = pieces_of(documents, sample)
    tokenizer.train_from_iterator(pieces, n_ids, special_tokens=[END_OF_TEXT], show_progress=False)
    if (trained := tokenizer.get_vocab_size()) < n_ids:
        print(f"note: the text is too short for a tokenizer of {n_ids:,} ids: it has {trained:,}")
    return Vocabulary("tokenizer.json", tokenizer.to_str(), END_OF_TEXT)


def pieces_of(documents: Iterable[str], left: int) -> Iterator[str]:
    """Yield the first characters in pieces: the library needs 100 bytes per character of a piece."""
    for document in documents:
        text = document[:left]
        for start in range(0, len(text), PIECE):
            yield text[start : start + PIECE]
        left -= len(text)
        if not left:
            return
