"""
The meaning of the token ids of a data set or a model, as plain values that a checkpoint records. tokenizer.py
makes encoders and decoders from these values.
"""

import json
import operator
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from isogpt.common.files import about_pointer

GPT2_IDS = 50257
GPT2_PADDED = 51200  # the largest vocabulary taken for GPT-2's: padded to a multiple of 1024
END_OF_TEXT = "<|endoftext|>"
# names of tiktoken's encodings
ENCODINGS = ("gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony")
# names of tables of tokens in the metadata that various prepare.py scripts write, in lower case without
# underscores
TO_TOKENS = (
    "itos",
    "indextochar",
    "idxtochar",
    "idx2char",
    "inttochar",
    "int2char",
    "ixtochar",
    "idtotoken",
    "id2token",
    "idxtotoken",
    "idx2token",
    "indextoword",
    "idxtoword",
    "idx2word",
    "id2word",
    "i2c",
    "i2s",
    "chars",
    "alphabet",
)
TO_IDS = (
    "stoi",
    "chartoindex",
    "chartoidx",
    "char2idx",
    "chartoint",
    "char2int",
    "chartoix",
    "tokentoid",
    "token2id",
    "tokentoidx",
    "token2idx",
    "wordtoindex",
    "wordtoidx",
    "word2idx",
    "word2id",
    "c2i",
    "s2i",
    "vocab",
    "vocabulary",
)
SIZES = ("vocabsize", "vocabularysize", "nvocab", "numtokens")
BYTE_LEVEL_SPACE = "\u0120"  # a space in GPT-2's vocab.json
PIECE_SPACE = "\u2581"  # a space in SentencePiece
PIECE_OF_BYTE = re.compile("<0x([0-9A-F]{2})>")
# files of tokenizers that are not read, or are not read alone
UNREAD = re.compile(
    r"(merges.*\.(txt|bpe)|.*(tokenizer|vocab).*\.(txt|bpe|pkl|pickle|vocab|tiktoken)|.*\.model)", re.I
)
# the beginning of files that Hugging Face's tokenizers write, with any spaces and line breaks
TOKENIZERS_FILE = re.compile(rb'\s*\{\s*"version"\s*:\s*"[^"]*"\s*,\s*"truncation"')
ENCODING_KEYS = ("tokenizer", "tiktokenencoding", "encoding", "encodingname", "tokenizername")
# GPT-2's letters for bytes: printable characters of Latin-1 are themselves, the other bytes follow at 256
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTE_OF_LETTER = {chr(byte): byte for byte in PRINTABLE}
BYTE_OF_LETTER |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))}


@dataclass(frozen=True)
class Vocabulary:
    """
    What token ids mean.

    Args:
        kind: how to read `content`. 'table': {token: id}. If several tokens share an id, the id is decoded as
            the first of them. 'bytes': the same, for tokens of bytes. Each byte is the character of Latin-1
            with the same number. 'tiktoken': the name of an encoding of tiktoken. 'tokenizer.json': the text
            of such a file, in the format of Hugging Face's tokenizers. 'unknown': why the ids cannot be
            decoded.
        end_of_text: the token that ends a document, if the vocabulary contains the token.
        aliases: for a table, further ids of tokens with several ids. They are decoded, but text is never
            encoded to them.
    """

    kind: str
    content: str | dict[str, int]
    end_of_text: str = END_OF_TEXT
    aliases: dict[str, list[int]] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[int, str]:
        """The tokens of a table by id."""
        tokens = {i: token for token, ids in self.aliases.items() for i in ids}
        return tokens | {i: token for token, i in reversed(self.content.items())}

    @property
    def size(self) -> int | None:
        """The highest id + 1; None if it is not known without loading the tokenizer."""
        if self.kind in ("table", "bytes"):
            aliases = [i for ids in self.aliases.values() for i in ids]
            return max([*self.content.values(), *aliases], default=-1) + 1
        if self.kind == "tokenizer.json":
            return max(ids_in_json(self.content).values(), default=-1) + 1
        return None

    def describe(self) -> dict:
        """The plain values that a checkpoint records; Vocabulary(**values) restores the vocabulary."""
        return asdict(self)


def recorded(run: dict) -> Vocabulary | None:
    """The vocabulary that a checkpoint's run records; None without a record, as in nanoGPT's checkpoints."""
    found = run["isogpt"].get("vocabulary")
    return Vocabulary(**found) if found else None


def resolve(found: Vocabulary | None, vocab_size: int, where: str) -> Vocabulary:
    """
    Return the vocabulary that was found, or GPT-2's, as in nanoGPT, if there is no other record. A model with
    vocab_size ids must be large enough for GPT-2's tokens. `where` names the place without a record.
    """
    if found:
        return found
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


def of_data(meta: dict, folder: Path) -> Vocabulary | None:
    """
    Read the vocabulary of the data set in `folder` with this metadata. It is in a tokenizer.json next to
    train.bin, in a table in the metadata, or in the encoding or file that the metadata names. None if nothing
    says what the ids mean.

    Raises:
        ValueError: a file cannot be read, or meta.json and meta.pkl do not belong together.
    """
    values = {plain(name): value for name, value in meta.items()}
    is_ours = "tokenizersize" in values  # prepare.py wrote the metadata, which says what counts
    if (not is_ours or meta["tokenizer"] == "tokenizer.json") and (found := of_folder(folder)):
        return found
    if is_ours and meta["tokenizer"] == "tokenizer.json":
        return Vocabulary("unknown", f"they belong to a tokenizer.json, but {folder} contains none")
    if is_ours and meta["tokenizer"] != "char":
        return Vocabulary("tiktoken", meta["tokenizer"])
    tables = [
        values[name] for name in (*TO_TOKENS, *TO_IDS) if isinstance(values.get(name), dict | list | tuple)
    ]
    tables += [values[name].tolist() for name in (*TO_TOKENS, *TO_IDS) if hasattr(values.get(name), "tolist")]
    names = [values[name] for name in ENCODING_KEYS if isinstance(values.get(name), str)]
    known = [name.lower() for name in names if name.lower() in ENCODINGS]
    # a table next to the name of an encoding may contain only the tokens of one split, each decoded
    # separately
    if tables and not (known and lacks_tokens(tables, vocab_size_of(meta))):
        found = of_tables(tables)
        if is_ours and found.size not in (None, meta["tokenizer_size"]):
            problem = (
                f"{folder / 'meta.pkl'} contains {found.size} tokens, but meta.json says "
                f"{meta['tokenizer_size']}"
            )
            raise ValueError(f"{problem}: they come from different prepare.py runs; run it again")
        return found
    if known:
        return Vocabulary("tiktoken", known[0])
    if not names or names == ["tiktoken"]:
        return of_other_files(folder)
    if path := next(
        filter(Path.is_file, (folder / sub / Path(names[0]).name for sub in ("", "tokenizer"))), None
    ):
        return of_file(path)
    if names[0].lower().startswith("char"):
        return Vocabulary("unknown", "they are characters, but there is no meta.pkl with a table of them")
    if found := of_other_files(folder):
        return found
    reason = f"the metadata names the tokenizer {names[0]!r}, which is not an encoding of tiktoken"
    return Vocabulary("unknown", f"{reason}, and {folder} contains no tokenizer.json")


def plain(key: object) -> str:
    """
    Return a key of metadata in lower case and without underscores, since prepare.py scripts differ in
    spelling.
    """
    return str(key).lower().replace("_", "")


def is_about_ids(key: object) -> bool:
    """Whether a key of metadata says something about the vocabulary."""
    return plain(key) in (*TO_TOKENS, *TO_IDS, *SIZES, *ENCODING_KEYS)


def vocab_size_of(meta: dict) -> object:
    """The size of the vocabulary that the metadata of a data set records; None if there is no record."""
    values = {plain(name): value for name, value in meta.items()}
    return next((values[name] for name in SIZES if name in values), None)


def lacks_tokens(tables: list[dict | list | tuple], vocab_size: object) -> bool:
    """
    Whether tables lack tokens of a vocabulary with vocab_size ids, or contain the same text for several
    tokens.
    """
    tokens = {token for table in tables for token, _ in pairs_of(table) if isinstance(token, str | bytes)}
    return is_id(vocab_size) and len(tokens) < vocab_size


def of_tables(tables: list[dict | list | tuple]) -> Vocabulary:
    """
    The vocabulary of tables from tokens to ids, or from ids to tokens; earlier tables decide how an id is
    decoded. Among bytes, text is converted to UTF-8. Marks of spaces in tokenizers' tables become spaces.
    """
    pairs = [pair for table in tables for pair in pairs_of(table)]
    others = sorted({type(token).__name__ for token, _ in pairs if not isinstance(token, str | bytes)})
    if others or not pairs:
        found = " and ".join(others) or "nothing"
        return Vocabulary("unknown", f"the table in the metadata contains {found}, not text or bytes")
    texts = {token for token, _ in pairs if isinstance(token, str)}
    if marks_spaces(BYTE_LEVEL_SPACE, texts):
        pairs = [(bytes_of_letters(token), i) for token, i in pairs]
    elif marks_spaces(PIECE_SPACE, texts):
        pairs = [(text_of_piece(token), i) for token, i in pairs]
    if any(isinstance(token, bytes) for token, _ in pairs):
        pairs = [
            (token.encode("utf-8", "surrogatepass") if isinstance(token, str) else token, i)
            for token, i in pairs
        ]
        return table_of("bytes", [(token.decode("latin-1"), i) for token, i in pairs])
    return table_of("table", [(str(token), i) for token, i in pairs])


def table_of(kind: str, pairs: list[tuple[str, int]]) -> Vocabulary:
    """The vocabulary of pairs of a token and an id, of which later pairs decide how a token is encoded."""
    content, found = dict(pairs), {}
    for token, i in pairs:
        if i != content[token]:
            found.setdefault(token, set()).add(i)
    return Vocabulary(kind, content, aliases={token: sorted(ids) for token, ids in found.items()})


def marks_spaces(mark: str, texts: set[str]) -> bool:
    """
    Whether a character stands for a space in these tokens: it begins some longer tokens, and no token begins
    with a space.
    """
    first = {text[0] for text in texts if len(text) > 1}
    return mark in first and " " not in first


def bytes_of_letters(token: str | bytes) -> str | bytes:
    """
    Decode a token of a byte-level BPE such as GPT-2's, in whose table each byte is a letter; return other
    tokens unchanged.
    """
    if isinstance(token, bytes) or not BYTE_OF_LETTER.keys() >= set(token):
        return token
    return bytes(BYTE_OF_LETTER[letter] for letter in token)


def text_of_piece(token: str | bytes) -> str | bytes:
    """
    A piece of SentencePiece with spaces for marks of spaces; <0x0A>, which stands for a byte, as this byte.
    """
    if isinstance(token, str) and (byte := PIECE_OF_BYTE.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    return token.replace(PIECE_SPACE, " ") if isinstance(token, str) else token


def pairs_of(table: dict | list | tuple) -> list[tuple[object, int]]:
    """
    (token, id) of each entry of a table in either direction; a list contains the tokens in the order of ids.
    """
    if not isinstance(table, dict):
        return [(token, i) for i, token in enumerate(table)]
    if all(is_id(value) for value in table.values()):
        return [(token, operator.index(i)) for token, i in table.items()]
    if all(is_id(key) for key in table):
        return [(token, operator.index(i)) for i, token in table.items()]
    if all(isinstance(key, str) and key.isdecimal() for key in table):  # JSON allows only text as keys
        return [(token, int(i)) for i, token in table.items()]
    return [(value, 0) for value in table.values()]


def is_id(value: object) -> bool:
    """Whether the value is a whole number that is not negative."""
    with suppress(TypeError):
        return not isinstance(value, bool) and operator.index(value) >= 0
    return False


def of_folder(folder: Path | str) -> Vocabulary | None:
    """
    Read the vocabulary of a folder's tokenizer files: tokenizer.json; vocab.json with merges.txt, a BPE of
    bytes as GPT-2's; or vocab.json alone, a table. None without these files.

    Raises:
        ValueError: a file cannot be read.
    """
    folder = Path(folder)
    whole, vocab = folder / "tokenizer.json", folder / "vocab.json"
    path = whole if whole.exists() else vocab
    return of_file(path) if path.exists() else None


def of_other_files(folder: Path | str) -> Vocabulary | None:
    """
    Read the vocabulary of a folder's only tokenizer file, if the file's name differs from the names in
    `of_folder`. The kind is 'unknown' if there are several files, or only files that are not read: then the
    ids are not GPT-2's. None without such files.

    Raises:
        ValueError: the file cannot be read.
    """
    folder = Path(folder)
    found = sorted(filter(is_tokenizers_file, folder.glob("*.json")))
    if len(found) == 1:
        return of_file(found[0])
    if found:
        names = ", ".join(path.name for path in found)
        return Vocabulary(
            "unknown", f"{folder} contains several tokenizers, {names}: rename theirs to tokenizer.json"
        )
    unread = sorted(path.name for path in folder.glob("*") if UNREAD.fullmatch(path.name))
    if not unread:
        return None
    reason = f"{folder} contains {unread[0]}, but neither a tokenizer.json nor a vocab.json"
    if (folder / "train.bin").exists():
        reason += f' (if they are GPT-2\'s, write {{"tokenizer": "gpt2"}} to {folder / "meta.json"})'
    return Vocabulary("unknown", reason)


def is_tokenizers_file(path: Path) -> bool:
    """
    Whether a file begins like the files that Hugging Face's tokenizers write; only the beginning is read.
    """
    with suppress(OSError), open(path, "rb") as f:
        return bool(TOKENIZERS_FILE.match(f.read(256)))
    return False


def of_file(path: Path) -> Vocabulary:
    """
    Read the vocabulary of a tokenizer.json, under any name, or of a vocab.json, with the merges.txt next to
    it if there is one. Raises ValueError if a file cannot be read.
    """
    folder, merges = path.parent, path.with_name("merges.txt")
    is_vocab = path.name == "vocab.json"
    try:
        text = path.read_text(encoding="utf-8")
        if is_vocab and not merges.exists():
            return of_tables([json.loads(text)])
        if is_vocab:
            text = of_merges(path, merges)
        tokens = ids_in_json(text)
    except Exception as e:  # tokenizers, or a file of any other form, raises nearly anything
        reason = " ".join(str(e).split())[:200]
        raise ValueError(f"cannot load the tokenizer of {folder}: {about_pointer(path) or reason}") from e
    return Vocabulary("tokenizer.json", text, end_of_text_in(folder, tokens))


def of_merges(vocab: Path, merges: Path) -> str:
    """The tokenizer.json of a BPE of bytes in the two files that GPT-2 was published with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if END_OF_TEXT in tokenizer.get_vocab():
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer.to_str()


def ids_in_json(text: str) -> dict[str, int]:
    """{token: id} of a tokenizer.json. Raises an exception of any type if the text is something else."""
    content = json.loads(text)
    if not isinstance(content, dict) or "vocab" not in (content.get("model") or {}):
        raise ValueError("it is not in the format of Hugging Face's tokenizers")
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: a token and a score for each id
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    return vocab | {added["content"]: added["id"] for added in content.get("added_tokens") or []}


def end_of_text_in(folder: Path, tokens: dict[str, int]) -> str:
    """The token that ends a document according to transformers' files in a folder, or <|endoftext|>."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token")
            found = found.get("content") if isinstance(found, dict) else found
            if found in tokens:
                return found
    return END_OF_TEXT
