"""The tokenizer of a data set or of a Hugging Face folder, and the conversion of the former to the latter's format."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isogpt import huggingface, loader

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

Tokenizer = tuple[Callable[[str], list[int]], Callable[[list[int]], str], int]  # encode, decode, number of ids
GPT2_IDS = 50257
GPT2_PADDED = 51200  # the largest vocabulary taken for GPT-2's: padded to a multiple of 1024
END_OF_TEXT = "<|endoftext|>"
# a model that was not trained on chats continues the text of the messages
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SAMPLE = f"It's 1234567 naïve Ünits²; 東京 🙂\u00a0\r\n\t\tdef f(x):\n    return {{x}}  # DON'T\n\n  \n{END_OF_TEXT} \n"


def find_meta(name: str, vocab_size: int) -> dict:
    """
    The metadata of data set `name`. It is empty, which means GPT-2's tokenizer, if there is none, if `name` is empty,
    or if the data set is not on this machine and GPT-2's ids are below vocab_size, the model's.

    Raises:
        ValueError: the metadata cannot be read, or the data set is absent and the model is too small for GPT-2's ids.
    """
    try:
        return loader.read_meta(loader.find_dataset(name)) if name else {}
    except ValueError as e:
        if vocab_size < GPT2_IDS:
            raise ValueError(f"the run's data set {name} is needed for its vocabulary: {e}") from e
        return {}  # most likely it has GPT-2's tokens


def load_tokenizer(meta: dict, name: str) -> Tokenizer:
    """
    (encode, decode, number of ids) of the data set `name` with this metadata.

    Raises:
        ValueError: tiktoken cannot load the encoding. encode raises it for characters that the data set does not have.
    """
    if "stoi" not in meta:
        bpe = load_encoding(meta)
        return partial(bpe.encode, allowed_special="all"), bpe.decode, bpe.n_vocab
    stoi, itos = meta["stoi"], meta["itos"]

    def encode(text: str) -> list[int]:
        unknown = " ".join(map(repr, sorted(set(text) - set(stoi))))
        if unknown:
            raise ValueError(f"--start has characters that data set {name} does not have: {unknown}")
        return [stoi[c] for c in text]

    return encode, lambda ids: "".join(itos[i] for i in ids), len(itos)


def load_folder(folder: str, vocab_size: int) -> Tokenizer:
    """
    (encode, decode, number of ids) of the tokenizer.json in a folder that transformers wrote. encode adds the special
    tokens that the tokenizer is configured to add, for instance one at the start. Without a tokenizer.json: GPT-2's, if
    vocab_size, the model's, can be that of GPT-2. No code in the folder runs.

    Raises:
        ValueError: the tokenizer is missing or cannot be loaded. encode raises it for a text that it cannot encode.
    """
    if not (Path(folder) / "tokenizer.json").exists():
        if GPT2_IDS <= vocab_size <= GPT2_PADDED:
            return load_tokenizer({}, "")
        raise ValueError(f"{folder} has no tokenizer.json, and the model's vocabulary size, {vocab_size}, is not that "
                         f"of GPT-2: save the model's tokenizer in the folder")  # fmt: skip
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **huggingface.RUN_NO_CODE)
    except Exception as e:  # transformers and tokenizers raise many types
        reason = (str(e).splitlines() or [e])[0]
        if huggingface.needs_code(e):
            reason = ("its tokenizer_config.json names Python code, which is not run; if tokenizer.json is complete "
                      "without this code, remove auto_map from tokenizer_config.json")  # fmt: skip
        raise ValueError(f"cannot load the tokenizer of {folder}: {reason}") from e

    def encode(text: str) -> list[int]:
        try:
            return tokenizer.encode(text)
        except Exception as e:  # tokenizers raises this class
            raise ValueError(f"the tokenizer of {folder} cannot encode --start: {e}") from e

    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return encode, decode, max(tokenizer.get_vocab().values()) + 1


def load_encoding(meta: dict) -> "tiktoken.Encoding":
    """tiktoken's encoding that the metadata names, or GPT-2's. Raises ValueError if it cannot be loaded."""
    import tiktoken

    name = meta.get("tokenizer", "gpt2")
    if name == "char":
        raise ValueError("the data set has characters as tokens, but no meta.pkl with stoi: run its prepare.py again")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as e:
        advice = "go online or set TIKTOKEN_CACHE_DIR"
        raise ValueError(f"tiktoken cannot load its tokenizer ({str(e)[:80]}): {advice}") from e


def save_tokenizer(folder: Path, meta: dict, vocab_size: int, block_size: int) -> dict[str, int | None]:
    """
    Write tokenizer.json, tokenizer_config.json and chat_template.jinja, which transformers.AutoTokenizer reads.

    encode gives the ids of load_tokenizer, without tokens at the start or the end, and decode gives the text exactly.
    The chat template joins the messages and adds nothing. A character that the data set does not have raises an
    exception in encode: an unknown token would need an id that the model was not trained on.

    Args:
        vocab_size: of the model. Ids beyond the tokenizer's exist in the model only.
        block_size: of the model; the tokenizer warns about longer texts.

    Returns:
        bos_token_id, eos_token_id and pad_token_id, for the model's configuration: None if there is no such token.
        The defaults of LlamaConfig and GPT2Config would end the text at any character that has the id of their token.

    Raises:
        ValueError: the tokenizer has more ids than the model, or cannot be loaded or converted.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = of_characters(meta["stoi"]) if "stoi" in meta else of_encoding(load_encoding(meta))
    n_ids = max(tokenizer.get_vocab().values()) + 1
    if n_ids > vocab_size:
        advice = "the metadata of its data set is missing or is not that of the run"
        raise ValueError(f"the tokenizer has {n_ids} ids, but the model has {vocab_size}: {advice}")
    end = END_OF_TEXT if END_OF_TEXT in tokenizer.get_vocab() else None
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, chat_template=CHAT_TEMPLATE,
        model_max_length=block_size, clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    return {"bos_token_id": None, "eos_token_id": end_id, "pad_token_id": end_id}


def of_characters(stoi: dict[str, int]) -> "tokenizers.Tokenizer":
    """A tokenizer with one token per character. Without an unknown token in its vocabulary, it raises an exception."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for c, i in stoi.items() if not "\ud800" <= c <= "\udfff"}  # no text in UTF-8 has a lone surrogate
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # a dot does not match a newline
    tokenizer.decoder = decoders.Fuse()  # the default joins tokens with spaces
    return tokenizer


def of_encoding(encoding: "tiktoken.Encoding") -> "tokenizers.Tokenizer":
    """
    A byte-level BPE with the ids of a tiktoken encoding.

    Raises:
        ValueError: a sample text gets other ids, as the two libraries differ in the regular expressions that they know.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

    letters = bytes_to_unicode()
    ranks = {"".join(letters[byte] for byte in token): rank for token, rank in encoding._mergeable_ranks.items()}
    # like tiktoken: two tokens whose concatenation is a token are merged, and (ignore_merges) a word that is a token is
    # taken as it is, even if no merges lead to it
    merges = generate_merges(ranks, None)
    tokenizer = Tokenizer(models.BPE(ranks | encoding._special_tokens, merges, ignore_merges=True))
    tokenizer.add_special_tokens(sorted(encoding._special_tokens))
    tokenizer.decoder = decoders.ByteLevel()
    # {1,3}+ is possessive in tiktoken and repeats the repetition in tokenizers; (?s) is (?m) there
    pattern = encoding._pat_str.replace("{1,3}+", "{1,3}").replace("(?s)", "(?m)")
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as e:  # tokenizers raises this class
        raise ValueError(f"the tokenizers library cannot read the pattern of {encoding.name}: {e}") from e
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    if tokenizer.encode(SAMPLE).ids != encoding.encode(SAMPLE, allowed_special="all"):
        raise ValueError(f"the tokenizers library splits text otherwise than tiktoken's encoding {encoding.name}")
    return tokenizer
