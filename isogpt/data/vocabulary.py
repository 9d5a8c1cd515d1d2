"""
The meaning of the token ids of a data set or a model, as plain values that a checkpoint records. tokenizer.py
makes encoders and decoders from these values.
"""

import json
import reprlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from isogpt.common.console import shortened
from isogpt.common.files import read_utf8
from isogpt.common.packages import needed_by

GPT2_IDS = 50257
GPT2_PADDED = 51200  # the largest vocabulary taken for GPT-2's: padded to a multiple of 1024
END_OF_TEXT = "<|endoftext|>"
# stands for characters that a table does not contain, and pads batches, see tokenizer.save_tokenizer; its id
# is beyond those of the model
UNTRAINED = "<|untrained|>"
# advice if a model lacks ids
OTHER_IDS = "set --dataset=NAME, or add {tokens} to the model, see docs/recipes.md#added-tokens"
# writes the tokenizer.json of a folder whose tokenizer has other files, such as merges.txt or tokenizer.model
CONVERT = 'python -c "import transformers as t; t.AutoTokenizer.from_pretrained(f:={!r}).save_pretrained(f)"'


@dataclass(frozen=True)
class Vocabulary:
    """
    What token ids mean.

    Args:
        kind: how to read `content`. 'tokenizer.json': the text of such a file, in the format of Hugging
            Face's tokenizers. 'tiktoken': the name of an encoding of tiktoken. 'unknown': why the ids cannot
            be decoded.
        end_of_text: the token that ends a document, if the vocabulary contains the token.
    """

    kind: str
    content: str
    end_of_text: str = END_OF_TEXT

    @cached_property
    def model(self) -> dict:
        """The entry `model` of a tokenizer.json; {} for other kinds."""
        return json.loads(self.content)["model"] if self.kind == "tokenizer.json" else {}

    @property
    def is_table(self) -> bool:
        """Whether `of_characters` has made the vocabulary."""
        return self.model.get("unk_token") == UNTRAINED

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids of the tokens but UNTRAINED; {} if they are not known without tiktoken."""
        if self.kind != "tokenizer.json":
            return {}
        ids = self.model["vocab"] if self.is_table else parse_tokenizer(self.content).get_vocab()
        return {token: i for token, i in ids.items() if token != UNTRAINED}

    @property
    def name(self) -> str:
        """The tokenizer, as a meta.json names it."""
        if self.kind == "tiktoken":
            return self.content
        return "char" if self.is_table else self.kind

    @property
    def tokens(self) -> dict[int, str]:
        """The tokens by id; {} if they are not known without tiktoken."""
        return {i: token for token, i in reversed(self.ids.items())}

    @property
    def size(self) -> int:
        """The highest id + 1; 0 if it is not known without tiktoken."""
        return max(self.ids.values(), default=-1) + 1

    def describe(self) -> dict:
        """The plain values that a checkpoint records, see `recorded`."""
        return asdict(self)


def of_characters(ids: dict[str, int]) -> Vocabulary:
    """
    The vocabulary of a table {token: id}, as in nanoGPT: each character is encoded, and the texts of ids are
    joined. If several tokens share an id, the id is decoded as the first of them. Raises TypeError if
    something else than text has an id.
    """
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    vocab = ids | {UNTRAINED: max(ids.values(), default=-1) + 1}
    content = {
        "pre_tokenizer": split,
        "decoder": {"type": "Fuse"},  # the default joins tokens with spaces
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": UNTRAINED},
    }
    return Vocabulary("tokenizer.json", json.dumps(content))


def parse_tokenizer(text: str) -> Any:
    """
    Make a tokenizers.Tokenizer of the text of a tokenizer.json, without the file's padding and truncation,
    which transformers also ignores. Raises ValueError if the text is damaged.
    """
    with needed_by("a tokenizer.json", "tokenizers"):
        import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # tokenizers raises this class
        raise ValueError(f"it is not in the format of Hugging Face's tokenizers ({str(e)[:200]})") from e
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def recorded(run: dict) -> Vocabulary | None:
    """The vocabulary that a checkpoint's run records; None without a record, as in nanoGPT's checkpoints."""
    values = run.get("isogpt", {}).get("vocabulary")
    if not values:
        return None
    try:
        if values["kind"] == "table":  # recorded until November 2026
            return of_characters(values["content"])
        vocabulary = Vocabulary(**values)
        len(vocabulary.ids)  # the content can be read
        return vocabulary
    except Exception as e:  # a checkpoint that somebody else has written may contain anything
        raise ValueError(f"the vocabulary in the checkpoint cannot be read: {e!r:.100}") from e


def gpt2_or_unknown(vocab_size: int, where: object) -> Vocabulary:
    """
    Return GPT-2's vocabulary, as in nanoGPT, for ids whose meaning is not recorded anywhere. A model with
    vocab_size ids must be large enough for GPT-2's tokens. `where` names the place without a record.
    """
    if Path(str(where), "merges.txt").exists():  # its tokenizer may be that of another language
        reason = f"{where} has a merges.txt, but no tokenizer.json: type {CONVERT.format(str(where))}"
    elif GPT2_IDS <= vocab_size <= GPT2_PADDED:
        return Vocabulary("tiktoken", "gpt2")
    else:
        reason = f"{where} does not say what they mean, and {vocab_size} ids do not fit GPT-2"
    return Vocabulary("unknown", reason)


def check_size(vocabulary: Vocabulary, vocab_size: int, n_ids: int = 0, advice: str = OTHER_IDS) -> None:
    """
    Raise ValueError if a vocabulary does not fit a model with vocab_size ids.

    Args:
        n_ids: if more ids are used than those of the tokens that are known.
        advice: what to type; {ids} and {tokens} stand for what the model lacks.
    """
    n_ids = max(n_ids, vocabulary.size)
    if n_ids > vocab_size:
        added = [reprlib.repr(token) for i, token in sorted(vocabulary.tokens.items()) if i >= vocab_size]
        advice = advice.format(ids=n_ids, tokens=shortened(added) or "ids")
        raise ValueError(f"the tokenizer uses {n_ids} ids, but the model {vocab_size}: {advice}")


# ------------------------------------------------------------------------------------------------------------
# reading


def vocabulary_of_data(meta: dict, folder: Path) -> Vocabulary | None:
    """
    Find the vocabulary of the data set in `folder` with this metadata: what meta.json names, a
    tokenizer.json, the tables of meta.pkl. None if nothing says what the ids mean. Raises ValueError if a
    file cannot be read.
    """
    name = meta.get("tokenizer")
    if name not in (None, "char", "tokenizer.json"):
        return Vocabulary("tiktoken", name)
    found = None if name == "char" else tokenizer_in(folder)
    found = found or table_in(meta)
    if name and not found:
        return Vocabulary("unknown", f"{folder} lacks the tokenizer {name} that its meta.json names")
    return found


def tokenizer_in(folder: Path | str) -> Vocabulary | None:
    """
    Read the tokenizer.json in a folder, and which token ends a document; None without this file.

    Raises:
        ValueError: the file cannot be read.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        return None
    try:
        vocabulary = Vocabulary("tokenizer.json", read_utf8(path))
        config = path.with_name("tokenizer_config.json")
        end = json.loads(read_utf8(config)).get("eos_token") if config.exists() else None
        if isinstance(end, dict):
            end = end.get("content")
        return replace(vocabulary, end_of_text=end) if end in vocabulary.ids else vocabulary
    except Exception as e:  # a file of any other form raises nearly anything
        raise ValueError(f"cannot load the tokenizer of {folder}: {e}") from e


def table_in(meta: dict) -> Vocabulary | None:
    """
    The vocabulary in nanoGPT's tables: text is encoded by stoi, ids are decoded by itos, a dict or a list.
    One of them suffices; None if there is neither.
    """
    stoi, itos = meta.get("stoi"), meta.get("itos")
    if stoi is None and itos is None:
        return None
    try:
        texts = dict(enumerate(itos)) if isinstance(itos, list | tuple) else dict(itos or {})
        return of_characters({token: i for i, token in texts.items()} | dict(stoi or {}))
    except (TypeError, ValueError) as e:
        return Vocabulary("unknown", f"stoi and itos in the metadata are not tables: {e}")
