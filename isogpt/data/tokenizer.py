"""Encode and decode text with a vocabulary, and convert a vocabulary to Hugging Face's format."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isogpt.common.packages import needed_by
from isogpt.data.vocabulary import END_OF_TEXT, UNTRAINED, Vocabulary, check_size

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

# a model that was not trained on chats continues the text of the messages
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SAMPLE = (
    f"It's 1234567 naïve Ünits²; 東京 🙂\u00a0\r\n\t\tdef f(x):\n    return {{x}}  # DON'T\n\n  \n"
    f"{END_OF_TEXT} \n"
)
NO_TOKEN = "\ufffd"  # an id without a token is decoded as this character


@dataclass(frozen=True)
class Tokenizer:
    """
    A tokenizer: encode(text) returns the ids of a text, decode(ids) the text of ids.

    Args:
        begin: as encode, for a text that is to be continued: without the tokens that a tokenizer.json is
            configured to add at the end, after which a model begins a new document.
        n_ids: the highest id + 1.
        end_of_text: the id that ends a document; None if there is no such token.
        note: what a user should know about the way in which text is encoded; usually empty.
    """

    encode: Callable[[str], list[int]]
    begin: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    n_ids: int
    end_of_text: int | None = None
    note: str = ""


def load(vocabulary: Vocabulary, special_tokens: bool = True) -> Tokenizer:
    """
    Make the tokenizer of a vocabulary. encode adds what a tokenizer.json is configured to add, for instance a
    token at the start.

    Args:
        special_tokens: whether the text of a special token, such as <|endoftext|>, is encoded as this token;
            otherwise it is encoded as any other text.

    Raises:
        ValueError: the ids cannot be decoded, or the tokenizer cannot be loaded. encode raises ValueError for
            a text that it cannot encode.
    """
    if vocabulary.kind == "table":
        return load_table(vocabulary)
    if vocabulary.kind == "tokenizer.json":
        return load_json(vocabulary, special_tokens)
    if vocabulary.kind == "tiktoken":
        bpe = load_encoding(vocabulary.content)
        special = "all" if special_tokens else set()
        encode = partial(bpe.encode, allowed_special=special, disallowed_special=())
        return Tokenizer(encode, encode, bpe.decode, bpe.n_vocab, bpe._special_tokens.get(END_OF_TEXT))
    raise ValueError(
        f"the ids cannot be decoded: {vocabulary.content}; set --dataset= to a data set with these ids"
    )


def load_encoding(name: str) -> "tiktoken.Encoding":
    """tiktoken's encoding of this name. Raises ValueError if the name is unknown or loading fails."""
    with needed_by(f"the tokenizer {name!r}", "tiktoken"):
        import tiktoken

    if name not in (possible := sorted(tiktoken.list_encoding_names())):
        raise ValueError(f"{name!r} is not an encoding of tiktoken; choose from {', '.join(possible)}")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as e:
        advice = "go online, or set TIKTOKEN_CACHE_DIR to a folder that contains the files"
        raise ValueError(f"tiktoken cannot load the encoding {name!r} ({str(e)[:80]}): {advice}") from e


def load_json(vocabulary: Vocabulary, special_tokens: bool) -> Tokenizer:
    """`load` for a tokenizer.json."""
    tokenizer = parse_tokenizer(vocabulary.content)
    tokenizer.encode_special_tokens = not special_tokens

    def encoding_of(text: str) -> "tokenizers.Encoding":
        try:
            return tokenizer.encode(text)
        except Exception as e:  # tokenizers raises this class
            raise ValueError(f"the tokenizer cannot encode the text: {e}") from e

    def encode(text: str) -> list[int]:
        return encoding_of(text).ids

    def begin(text: str) -> list[int]:
        encoding = encoding_of(text)
        of_text = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
        last = max(of_text, default=0)  # the ids of an empty text: a token at the start
        return encoding.ids[: last + 1]

    decode = partial(tokenizer.decode, skip_special_tokens=False)
    n_ids = max(tokenizer.get_vocab().values()) + 1
    return Tokenizer(encode, begin, decode, n_ids, tokenizer.token_to_id(vocabulary.end_of_text))


def parse_tokenizer(text: str) -> "tokenizers.Tokenizer":
    """
    Parse the text of a tokenizer.json, without the file's padding and truncation, which transformers also
    ignores. Raises ValueError if the text is damaged.
    """
    with needed_by("a tokenizer.json", "tokenizers"):
        from tokenizers import Tokenizer as JsonTokenizer

    try:
        tokenizer = JsonTokenizer.from_str(text)
    except Exception as e:  # tokenizers raises this class
        raise ValueError(f"cannot load the tokenizer: {(str(e).splitlines() or [e])[0][:200]}") from e
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def load_table(vocabulary: Vocabulary) -> Tokenizer:
    """`load` for a table: each character is encoded, and tokens are joined, as in nanoGPT."""
    ids, tokens = vocabulary.content, vocabulary.tokens

    def encode(text: str) -> list[int]:
        if unknown := set(text) - ids.keys():
            shown = " ".join(map(repr, sorted(unknown)[:20]))
            raise ValueError(f"the text contains characters that the vocabulary does not contain: {shown}")
        return [ids[character] for character in text]

    def decode(sample: list[int]) -> str:
        return "".join(tokens.get(i, NO_TOKEN) for i in sample)

    note = ""
    if any(len(token) > 1 for token in ids):
        note = (
            "some tokens of the vocabulary are longer than a character, and text is never encoded to them: "
            "if it should be, put a tokenizer.json with these ids in the data set's folder"
        )
    return Tokenizer(encode, encode, decode, vocabulary.size, ids.get(END_OF_TEXT), note)


def bytes_by_id(vocabulary: Vocabulary) -> dict[int, bytes]:
    """
    The bytes in UTF-8 that each id stands for; those of a special token are its text.

    Raises:
        ValueError: this is not known for the vocabulary, as for a tokenizer.json, whose decoder may depend on
            the preceding ids.
    """
    if vocabulary.kind == "table":
        return {i: token.encode() for i, token in vocabulary.tokens.items()}
    if vocabulary.kind == "tiktoken":
        bpe = load_encoding(vocabulary.content)
        special = {i: token.encode() for token, i in bpe._special_tokens.items()}
        return {i: token for token, i in bpe._mergeable_ranks.items()} | special
    reason = vocabulary.content if vocabulary.kind == "unknown" else "they belong to a tokenizer.json"
    advice = 'prepare the data set again, or write "val_bytes": N with the bytes of the text to its meta.json'
    raise ValueError(f"the ids cannot be converted to bytes: {reason}; {advice}")


def cut_at(text: str, stop: str, start: int) -> str:
    """
    The text without what follows the first occurrence of `stop` at `start` or after it; '': the whole text.
    """
    end = text.find(stop, start) if stop else -1
    return text if end < 0 else text[:end]


# ------------------------------------------------------------------------------------------------------------
# comparing


def difference(before: Vocabulary, now: Vocabulary) -> str:
    """
    Describe the first id that differs in meaning between two vocabularies; '' if no id is known to differ.
    """
    if "unknown" in (before.kind, now.kind) or before == now:
        return ""
    if "tiktoken" in (before.kind, now.kind):
        changed = f"the tokenizer was {before.name} and is {now.name}"
        if "table" in (before.kind, now.kind):
            return changed
        try:  # the vocabularies may be two forms of the same tokenizer
            is_same = load(before).encode(SAMPLE) == load(now).encode(SAMPLE)
        except ValueError as e:
            return f"{changed}, and whether they are the same is not known: {e}"
        return "" if is_same else changed
    old, new = before.tokens, now.tokens
    changed = sorted(i for i in old.keys() & new.keys() if old[i] != new[i])
    return f"id {changed[0]} was {old[changed[0]]!r} and is {new[changed[0]]!r}" if changed else ""


# ------------------------------------------------------------------------------------------------------------
# Hugging Face's format


def save_tokenizer(folder: Path, vocabulary: Vocabulary, vocab_size: int, block_size: int) -> dict:
    """
    Write tokenizer.json, tokenizer_config.json and chat_template.jinja, which transformers.AutoTokenizer
    reads.

    encode gives the ids of `load`, and decode gives the text exactly. The chat template joins the messages
    and adds nothing. Padded batches, transformers' Trainer and lm_eval need tokens that a vocabulary may
    lack: then UNTRAINED is added, with the id after the others, which is beyond the model's ids if they are
    all used. It pads a batch, ends a text if no other token does, and stands for characters that a table does
    not contain. Ids with holes get no such token.

    Args:
        vocab_size: the model's number of ids. Ids beyond the tokenizer's exist only in the model.
        block_size: the model's context; the tokenizer warns about longer texts.

    Returns:
        bos_token_id, eos_token_id and pad_token_id, for the model's configuration: None if there is no such
        token. The defaults of LlamaConfig and GPT2Config would end the text at any character with the id of
        their token. suppress_tokens: the ids that must not be generated, since sample.py does not sample them
        either.

    Raises:
        ValueError: the tokenizer contains more ids than the model, or cannot be loaded or converted.
    """
    with needed_by("an export to transformers", "transformers"):
        import tokenizers  # noqa: F401  (which `converted` imports)
        from transformers import PreTrainedTokenizerFast

    tokenizer, is_table = converted(vocabulary), vocabulary.kind == "table"
    n_ids = max(tokenizer.get_vocab().values()) + 1
    check_size(n_ids, vocab_size)
    end = vocabulary.end_of_text if vocabulary.end_of_text in tokenizer.get_vocab() else None
    pad = end
    if is_table:
        tokenizer = of_table(replace(vocabulary, content=vocabulary.content | {UNTRAINED: n_ids}))
        pad = UNTRAINED
    elif end is None and tokenizer.get_vocab_size() == n_ids:
        tokenizer.add_special_tokens([UNTRAINED])
        pad = UNTRAINED
    end = end or pad
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=pad,
        unk_token=pad if is_table else None,
        chat_template=CHAT_TEMPLATE,
        model_max_length=block_size,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    ids = {name: token and tokenizer.token_to_id(token) for name, token in ids.items()}
    n_generated = max(vocab_size, n_ids + (pad == UNTRAINED))
    return ids | {"suppress_tokens": list(range(n_ids, n_generated)) or None}


def converted(vocabulary: Vocabulary) -> "tokenizers.Tokenizer":
    """The vocabulary as a tokenizer of Hugging Face. Raises ValueError if that is not possible."""
    if vocabulary.kind == "table":
        return of_table(vocabulary)
    if vocabulary.kind == "tokenizer.json":
        return parse_tokenizer(vocabulary.content)
    if vocabulary.kind == "tiktoken":
        return of_encoding(load_encoding(vocabulary.content))
    raise ValueError(f"the ids cannot be decoded: {vocabulary.content}")


def of_table(vocabulary: Vocabulary) -> "tokenizers.Tokenizer":
    """
    Make a tokenizer with the tokens of a table, to which each character is encoded. A character that is not a
    token becomes UNTRAINED if the table contains that, and otherwise raises an exception.

    Raises:
        ValueError: characters share their id with a longer token.
    """
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as JsonTokenizer

    # no text in UTF-8 contains a lone surrogate
    ids = {token: i for token, i in vocabulary.content.items() if not re.search("[\ud800-\udfff]", token)}
    firsts = {i: token for token, i in reversed(ids.items())}
    vocab = {token: i for i, token in firsts.items()}
    tokenizer = JsonTokenizer(models.WordLevel(vocab, unk_token=UNTRAINED))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # the default joins tokens with spaces
    # WordLevel keeps one token for each id: the others become this one before they are encoded
    others = {token: firsts[i] for token, i in ids.items() if token not in vocab and len(token) == 1}
    if long := [first for first in others.values() if len(first) != 1]:
        problem = f"characters share their id with {long[0]!r}"
        raise ValueError(f"transformers contains no tokenizer for this vocabulary: {problem}")
    if others:
        replacements = [normalizers.Replace(token, first) for token, first in others.items()]
        tokenizer.normalizer = normalizers.Sequence(replacements)
    return tokenizer


def of_encoding(encoding: "tiktoken.Encoding") -> "tokenizers.Tokenizer":
    """
    Make a byte-level BPE with the ids of a tiktoken encoding.

    Raises:
        ValueError: a sample text gets different ids, since the two libraries support different regular
            expressions.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as JsonTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

    letters = bytes_to_unicode()
    ranks = {
        "".join(letters[byte] for byte in token): rank for token, rank in encoding._mergeable_ranks.items()
    }
    # as in tiktoken, two tokens whose concatenation is a token are merged. With ignore_merges, a word that is
    # a token stays whole, even if no merges lead to it
    merges = generate_merges(ranks, None)
    tokenizer = JsonTokenizer(models.BPE(ranks | encoding._special_tokens, merges, ignore_merges=True))
    tokenizer.add_special_tokens(sorted(encoding._special_tokens))
    tokenizer.decoder = decoders.ByteLevel()
    # {1,3}+ is possessive in tiktoken, but repeats the repetition in tokenizers, where (?s) is spelled (?m)
    pattern = encoding._pat_str.replace("{1,3}+", "{1,3}").replace("(?s)", "(?m)")
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as e:  # tokenizers raises this class
        raise ValueError(f"the tokenizers library cannot read the pattern of {encoding.name}: {e}") from e
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    if tokenizer.encode(SAMPLE).ids != encoding.encode(SAMPLE, allowed_special="all"):
        raise ValueError(
            f"the tokenizers library splits text differently from tiktoken's encoding {encoding.name}"
        )
    return tokenizer
