"""Encode and decode text with a vocabulary, and convert a vocabulary to Hugging Face's format."""

import reprlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isogpt.common.packages import needed_by
from isogpt.data.vocabulary import UNTRAINED, Vocabulary, check_size, parse_tokenizer

# a model that was not trained on chats continues the text of the messages
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SAMPLE = "It's 1234567 naïve Ünits² 東京 🙂\u00a0\r\n\t\tf(x):\n    return {x}  DON'T\n\n  \n<|endoftext|> \n"


@dataclass(frozen=True)
class Tokenizer:
    """
    A tokenizer: encode(text) returns the ids of a text, decode(ids) the text of ids.

    Args:
        n_ids: the highest id + 1.
        end_of_text: the id that ends a document; None if there is no such token.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    n_ids: int
    end_of_text: int | None = None


def load(vocabulary: Vocabulary, special_tokens: bool = True) -> Tokenizer:
    """
    Make the tokenizer of a vocabulary. encode adds the tokens that a tokenizer.json is configured to add
    before a text, unless the text begins with them, but none after it: text that is generated would follow
    them.

    Args:
        special_tokens: whether the text of a special token, such as <|endoftext|>, is encoded as this token;
            otherwise it is encoded as any other text.

    Raises:
        ValueError: the ids cannot be decoded, or the tokenizer cannot be loaded. encode raises ValueError for
            a text that it cannot encode.
    """
    if vocabulary.is_table:
        return load_table(vocabulary)
    if vocabulary.kind == "tokenizer.json":
        tokenizer = parse_tokenizer(vocabulary.content)
        tokenizer.encode_special_tokens = not special_tokens
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        end_of_text = tokenizer.token_to_id(vocabulary.end_of_text)
        return Tokenizer(partial(encode_prompt, tokenizer), decode, vocabulary.size, end_of_text)
    bpe = load_encoding(vocabulary)
    special = "all" if special_tokens else set()
    encode = partial(bpe.encode, allowed_special=special, disallowed_special=())
    end_of_text = bpe._special_tokens.get(vocabulary.end_of_text)
    return Tokenizer(encode, bpe.decode, bpe.n_vocab, end_of_text)


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text with a tokenizers.Tokenizer, as `load` describes them."""
    try:
        # an empty text does not show which of the added tokens are before it
        encoding = tokenizer.encode(text or min(tokenizer.get_vocab()))
    except Exception as e:  # the library raises this class
        raise ValueError(f"the text cannot be encoded: {e}") from e
    added = encoding.special_tokens_mask  # 1 for each token that is added before and after the text
    start, n = (added + [0]).index(0), added.count(0) if text else 0
    before, own = encoding.ids[:start], encoding.ids[start : start + n]
    return own if own[:start] == before else before + own


def load_table(vocabulary: Vocabulary) -> Tokenizer:
    """`load` for a table of characters, as in nanoGPT: a dict is faster than the library, and needs none."""
    ids, tokens = vocabulary.ids, vocabulary.tokens

    def encode(text: str) -> list[int]:
        if unknown := set(text) - ids.keys():
            shown = " ".join(map(repr, sorted(unknown)[:20]))
            problem = "the text contains characters that the vocabulary does not contain"
            raise ValueError(f"{problem}: {shown}")
        return [ids[character] for character in text]

    def decode(sample: list[int]) -> str:
        return "".join(tokens.get(i, "\ufffd") for i in sample)

    return Tokenizer(encode, decode, vocabulary.size, ids.get(vocabulary.end_of_text))


def load_encoding(vocabulary: Vocabulary) -> Any:
    """The tiktoken.Encoding that a vocabulary names. Raises ValueError if it cannot be loaded."""
    name = vocabulary.content
    if vocabulary.kind != "tiktoken":
        advice = "set --dataset= to a data set with these ids"
        raise ValueError(f"the ids cannot be decoded: {name}; {advice}")
    with needed_by(f"the tokenizer {reprlib.repr(name)}", "tiktoken"):
        import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as e:
        names = tiktoken.list_encoding_names()
        is_known = name in names
        cached = "go online, or set TIKTOKEN_CACHE_DIR to a folder that tiktoken has filled"
        advice = cached if is_known else f"choose from {', '.join(names)}, or, for --tokenizer, a folder"
        raise ValueError(f"tiktoken cannot load {reprlib.repr(name)} ({e!r:.80}): {advice}") from e


def ids_of_encoding(encoding: Any) -> dict[bytes, int]:
    """The ids of a tiktoken.Encoding by the bytes of each token, which are the text of a special one."""
    special = {token.encode(): i for token, i in encoding._special_tokens.items()}
    return encoding._mergeable_ranks | special


def difference(before: Vocabulary, now: Vocabulary) -> str:
    """
    Describe the first id that differs in meaning between two vocabularies; '' if no id is known to differ.
    Raises ValueError if two that may be forms of the same tokenizer cannot be loaded.
    """
    kinds = (before.kind, now.kind)
    if "unknown" in kinds or before == now:
        return ""
    if "tiktoken" in kinds:
        is_table = before.is_table or now.is_table
        if is_table or load(before).encode(SAMPLE) != load(now).encode(SAMPLE):
            return f"the tokenizer was {before.name} and is {now.name}"
    old, new = before.tokens, now.tokens
    for i in sorted(old.keys() & new.keys()):
        if old[i] != new[i]:
            return f"id {i} was {reprlib.repr(old[i])} and is {reprlib.repr(new[i])}"
    return ""


# ------------------------------------------------------------------------------------------------------------
# Hugging Face's format


def save_tokenizer(folder: Path, vocabulary: Vocabulary, vocab_size: int, block_size: int) -> dict:
    """
    Write tokenizer.json, tokenizer_config.json and chat_template.jinja, which transformers.AutoTokenizer
    reads.

    encode gives the ids of `load`, and those that a tokenizer.json adds after a text; decode gives the text
    exactly. The chat template joins the messages and adds nothing. Padded batches, transformers' Trainer and
    lm_eval need tokens that a vocabulary may lack: then UNTRAINED is added, with the id after the others,
    which is beyond the model's ids if they are all used. It pads a batch, ends a text if no other token does,
    and stands for characters that a table does not contain. Ids with holes get no such token.

    Args:
        vocab_size: the model's number of ids. Ids beyond the tokenizer's exist only in the model.
        block_size: the model's context; the tokenizer warns about longer texts.

    Returns:
        bos_token_id, eos_token_id and pad_token_id, for the model's configuration: None if there is no such
        token. The defaults of LlamaConfig and GPT2Config would end the text at any character with the id of
        their token, and llama.cpp's would begin an empty prompt with a comma. suppress_tokens: the ids that
        must not be generated, since sample.py does not sample them either.

    Raises:
        ValueError: the tokenizer contains more ids than the model, or cannot be loaded or converted.
    """
    with needed_by("an export to transformers", "transformers"):
        import transformers

    class PreTrainedTokenizerFast(transformers.PreTrainedTokenizerFast):
        """Is saved under this name, which transformers 4 also knows."""

    if len(vocabulary.tokens) < len(vocabulary.ids):
        raise ValueError("transformers contains no tokenizer for tokens that share an id")
    if vocabulary.kind == "tokenizer.json":
        tokenizer = parse_tokenizer(vocabulary.content)
    else:
        tokenizer = of_encoding(load_encoding(vocabulary))
    ids = tokenizer.get_vocab()
    ids.pop(UNTRAINED, None)
    n_ids = max(ids.values()) + 1
    check_size(vocabulary, vocab_size, n_ids)
    end = pad = vocabulary.end_of_text if vocabulary.end_of_text in ids else None
    has_holes = len(ids) < n_ids
    if vocabulary.is_table or not (end or has_holes):
        pad = UNTRAINED
        tokenizer.add_special_tokens([UNTRAINED])
    # what the tokenizer itself puts before a text; else what is before each document in training
    first = next(map(tokenizer.id_to_token, encode_prompt(tokenizer, "")), end)
    end = end or pad
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=first,
        eos_token=end,
        pad_token=pad,
        unk_token=pad if vocabulary.is_table else None,
        chat_template=CHAT_TEMPLATE,
        model_max_length=block_size,
        clean_up_tokenization_spaces=False,
        # transformers 4 would add token_type_ids, with which a GPT-2 computes something else
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)
    n_generated = max(vocab_size, n_ids + (pad == UNTRAINED))
    return {
        "bos_token_id": first and tokenizer.token_to_id(first),
        "eos_token_id": end and tokenizer.token_to_id(end),
        "pad_token_id": pad and tokenizer.token_to_id(pad),
        "suppress_tokens": list(range(n_ids, n_generated)) or None,
    }


def of_encoding(encoding: Any) -> Any:
    """
    Make a byte-level BPE, a tokenizers.Tokenizer, with the ids of a tiktoken.Encoding.

    Raises:
        ValueError: a sample text gets different ids, since the two libraries support different regular
            expressions.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        """Takes the ids from the encoding instead of a file, with those of special tokens."""

        load_tiktoken_bpe = staticmethod(ids_of_encoding)

    # {1,3}+ is possessive in tiktoken, but repeats the repetition in tokenizers, where (?s) is spelled (?m)
    pattern = encoding._pat_str.replace("{1,3}+", "{1,3}").replace("(?s)", "(?m)")
    special = sorted(encoding._special_tokens)
    with suppress(Exception):  # tokenizers raises this class for a pattern that it does not support
        tokenizer = Converter(encoding, pattern, extra_special_tokens=special).converted()
        if tokenizer.encode(SAMPLE).ids == encoding.encode(SAMPLE, allowed_special="all"):
            return tokenizer
    raise ValueError(f"the tokenizers library splits text differently from {encoding.name}")
