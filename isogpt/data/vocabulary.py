"""
The meaning of the token ids of a data set or a model, as plain values that a checkpoint records. tokenizer.py
makes encoders and decoders from these values.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from isogpt.common.files import about_pointer, parse_json, read_utf8

GPT2_IDS = 50257
GPT2_PADDED = 51200  # the largest vocabulary taken for GPT-2's: padded to a multiple of 1024
END_OF_TEXT = "<|endoftext|>"
# a token that only exported tokenizers contain, see tokenizer.save_tokenizer: no model is trained on it
UNTRAINED = "<|untrained|>"
# files of tokenizers that are not read: next to them, ids are not taken for GPT-2's
UNREAD = ("vocab.*", "merges.txt", "*.model")


@dataclass(frozen=True)
class Vocabulary:
    """
    What token ids mean.

    Args:
        kind: how to read `content`. 'table': {token: id}. If several tokens share an id, the id is decoded as
            the first of them. 'tiktoken': the name of an encoding of tiktoken. 'tokenizer.json': the text of
            such a file, in the format of Hugging Face's tokenizers. 'unknown': why the ids cannot be decoded.
        end_of_text: the token that ends a document, if the vocabulary contains the token.
    """

    kind: str
    content: str | dict[str, int]
    end_of_text: str = END_OF_TEXT

    @property
    def name(self) -> str:
        """The tokenizer, as a meta.json names it."""
        return {"table": "char", "tiktoken": self.content}.get(self.kind, self.kind)

    @property
    def ids(self) -> dict[str, int]:
        """The ids of the tokens; {} if they are not known without loading the tokenizer."""
        if self.kind == "tokenizer.json":
            return ids_in_json(self.content)
        return self.content if self.kind == "table" else {}

    @property
    def tokens(self) -> dict[int, str]:
        """The tokens by id; {} if they are not known without loading the tokenizer."""
        return {i: token for token, i in reversed(self.ids.items())}

    @property
    def size(self) -> int | None:
        """The highest id + 1; None if it is not known without loading the tokenizer."""
        return max(self.ids.values(), default=-1) + 1 or None

    def describe(self) -> dict:
        """The plain values that a checkpoint records, see `recorded`."""
        return asdict(self)


def recorded(run: dict) -> Vocabulary | None:
    """The vocabulary that a checkpoint's run records; None without a record, as in nanoGPT's checkpoints."""
    values = run["isogpt"].get("vocabulary")
    if not values:
        return None
    try:
        vocabulary = Vocabulary(values["kind"], values["content"], values["end_of_text"])
        are_ids = all(isinstance(t, str) and isinstance(i, int) and i >= 0 for t, i in vocabulary.ids.items())
        if not (are_ids and isinstance(values["end_of_text"], str)):
            raise TypeError("it does not consist of text with an id each")
    except Exception as e:  # a checkpoint that somebody else has written may contain anything
        raise ValueError(f"the vocabulary that the checkpoint records cannot be read: {e!r:.100}") from e
    return vocabulary


def gpt2_or_unknown(vocab_size: int, where: str) -> Vocabulary:
    """
    Return GPT-2's vocabulary, as in nanoGPT, for ids whose meaning is not recorded anywhere. A model with
    vocab_size ids must be large enough for GPT-2's tokens. `where` names the place without a record.
    """
    if GPT2_IDS <= vocab_size <= GPT2_PADDED:
        return Vocabulary("tiktoken", "gpt2")
    return Vocabulary(
        "unknown", f"{where} does not say what they mean, and {vocab_size} ids do not fit GPT-2"
    )


def check_size(n_ids: int | None, vocab_size: int) -> None:
    """Raise ValueError if a vocabulary with ids below n_ids does not fit a model with vocab_size ids."""
    if n_ids is not None and n_ids > vocab_size:
        advice = "set --dataset= to the data set that the model was trained on"
        raise ValueError(f"the tokenizer uses {n_ids} ids, but the model {vocab_size}: {advice}")


# ------------------------------------------------------------------------------------------------------------
# reading


def vocabulary_of_data(meta: dict, folder: Path) -> Vocabulary | None:
    """
    Find the vocabulary of the data set in `folder` with this metadata, in order of precedence. None if
    nothing says what the ids mean.

    Raises:
        ValueError: a file cannot be read, or meta.json and meta.pkl do not belong together.
    """
    return (
        declared_vocabulary(meta, folder)
        or tokenizer_in(folder)
        or table_in(meta)
        or unread_tokenizer(folder)
    )


def declared_vocabulary(meta: dict, folder: Path) -> Vocabulary | None:
    """
    The vocabulary that `tokenizer` in the meta.json names: char, tokenizer.json, or an encoding of tiktoken.
    """
    name = meta.get("tokenizer")
    if name is None:
        return None
    if name == "tokenizer.json":
        missing = Vocabulary("unknown", f"they belong to a tokenizer.json, but {folder} contains none")
        return tokenizer_in(folder) or missing
    if name != "char":
        return Vocabulary("tiktoken", name)
    table = table_in(meta)
    if not table:
        return Vocabulary("unknown", "they are characters, but there is no meta.pkl with a table of them")
    recorded_size = meta.get("tokenizer_size", table.size)
    if table.size not in (None, recorded_size):
        problem = f"{folder / 'meta.pkl'} contains {table.size} tokens, but meta.json says {recorded_size}"
        raise ValueError(f"{problem}: they come from different prepare.py runs; run it again")
    return table


def tokenizer_in(folder: Path | str) -> Vocabulary | None:
    """
    Read the tokenizer.json in a folder, and which token ends a document; None without this file. UNTRAINED is
    left out. A table that export.py has written becomes a table again, since its next export needs UNTRAINED
    again.

    Raises:
        ValueError: the file cannot be read.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        original = read_utf8(path)
        text = without_untrained(original)
        tokens = ids_in_json(text)
        is_table = UNTRAINED in ids_in_json(original) and is_of_table(text)
    except Exception as e:  # a file of any other form raises nearly anything
        reason = " ".join(str(e).split())[:200]
        raise ValueError(f"cannot load the tokenizer of {folder}: {about_pointer(path) or reason}") from e
    end_of_text = end_of_text_in(folder, tokens)
    return Vocabulary(*(("table", tokens) if is_table else ("tokenizer.json", text)), end_of_text)


def without_untrained(text: str) -> str:
    """The text of a tokenizer.json without the token UNTRAINED. Raises an exception of any type."""
    if UNTRAINED not in text:
        return text
    content = parse_json(text)
    added = content.get("added_tokens") or []
    content["added_tokens"] = [token for token in added if token["content"] != UNTRAINED]
    if isinstance(vocab := content["model"]["vocab"], dict):
        vocab.pop(UNTRAINED, None)
    return json.dumps(content, ensure_ascii=False)


def is_of_table(text: str) -> bool:
    """Whether tokenizer.of_table has written the text of a tokenizer.json, with one token for each id."""
    content = parse_json(text)
    return content["model"].get("unk_token") == UNTRAINED and not content.get("normalizer")


def ids_in_json(text: str) -> dict[str, int]:
    """{token: id} of a tokenizer.json. Raises an exception of any type if the text is something else."""
    content = parse_json(text)
    if not isinstance(content, dict) or "vocab" not in (content.get("model") or {}):
        raise ValueError("it is not in the format of Hugging Face's tokenizers")
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: a token and a score for each id
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    return vocab | {added["content"]: added["id"] for added in content.get("added_tokens") or []}


def end_of_text_in(folder: Path, tokens: dict[str, int]) -> str:
    """The token that ends a document according to a folder's tokenizer_config.json, or <|endoftext|>."""
    with suppress(OSError, ValueError, AttributeError):
        token = parse_json(read_utf8(folder / "tokenizer_config.json")).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in tokens:
            return token
    return END_OF_TEXT


def table_in(meta: dict) -> Vocabulary | None:
    """
    The vocabulary in nanoGPT's tables: text is encoded by stoi, ids are decoded by itos, a dict or a list.
    One of them suffices; None if there is neither.
    """
    if "stoi" not in meta and "itos" not in meta:
        return None
    stoi, itos = meta.get("stoi", {}), meta.get("itos", {})
    texts = dict(enumerate(itos)) if isinstance(itos, list | tuple) else itos
    if not isinstance(stoi, dict) or not isinstance(texts, dict):
        return Vocabulary("unknown", "stoi and itos in the metadata are not tables")
    pairs = [(token, i) for i, token in texts.items()] + list(stoi.items())
    if not pairs or not all(isinstance(token, str) and isinstance(i, int) and i >= 0 for token, i in pairs):
        return Vocabulary("unknown", "stoi and itos in the metadata do not contain text with an id each")
    table = Vocabulary("table", dict(pairs))
    if any(table.tokens.get(i) != token for i, token in texts.items()):
        return Vocabulary("unknown", "stoi and itos in the metadata contradict each other")
    return table


def unread_tokenizer(folder: Path | str) -> Vocabulary | None:
    """
    An unknown vocabulary if a folder contains a tokenizer in a form that is not read: then the ids are
    probably not GPT-2's. None without such a file.
    """
    names = sorted(path.name for pattern in UNREAD for path in Path(folder).glob(pattern))
    if not names:
        return None
    return Vocabulary(
        "unknown",
        f"{folder} contains {names[0]}, but only a tokenizer.json is read: "
        f"{how_to_write_json(Path(folder))}. If the ids of a data set are GPT-2's all the same, write "
        '{"tokenizer": "gpt2"} to its meta.json',
    )


def how_to_write_json(folder: Path) -> str:
    """
    How to make a tokenizer.json from a tokenizer of another form in a folder. Without a configuration,
    transformers' choice of a class may give other ids.
    """
    name = ""
    if any((folder / config).exists() for config in ("tokenizer_config.json", "config.json")):
        name = "AutoTokenizer"
    elif all((folder / file).exists() for file in ("vocab.json", "merges.txt")):
        name = "GPT2Tokenizer"
    if name:
        place = repr(str(folder))
        return f"write it with transformers' {name}.from_pretrained({place}).save_pretrained({place})"
    return (
        "copy the tokenizer_config.json of its model to this folder and write it with transformers' "
        "AutoTokenizer, or write the ids with the package sentencepiece, as data/README.md shows"
    )
