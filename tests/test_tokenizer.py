"""
isogpt/data/tokenizer.py: what AutoTokenizer reads gives tiktoken's ids and the data set's, and exactly the
text.
"""

import json
import os
import random
import re
from pathlib import Path

import pytest
import tiktoken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from isogpt.data import tokenizer, vocabulary
from isogpt.data.vocabulary import Vocabulary

GPT2_FILE = Path(os.environ.get("TIKTOKEN_CACHE_DIR", "")) / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
needs_gpt2 = pytest.mark.skipif(
    not GPT2_FILE.exists(), reason="GPT-2's tokenizer is not in TIKTOKEN_CACHE_DIR"
)
CHARACTERS = sorted({*map(chr, range(256)), *"東京🙂Ġ▁\u0301\u200d\u2028\ufeff\U0010ffff"})
PIECES = [*re.split(r"(?<=\s)(?=\S)", tokenizer.SAMPLE), "<|fim|>", "<|endoftext", "   ", "\r\n\r\n", "WE'LL"]
PIECES += ["e\u0301", "👩\u200d💻", "\u2028", "\x00", "a", "Z", ".", ",,", "ſ"]
SPECIAL = {"<|endoftext|>": 2000, "<|fim|>": 2010}  # ids with a hole, as in cl100k_base
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| "
    r"?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
WORDS = r"\p{L}+|\p{N}{1,3}|[^\p{L}\p{N}]+"


def random_texts(n):
    """Texts of PIECES and of any characters but surrogates."""
    rng = random.Random(1)
    for _ in range(n):
        anything = (chr(rng.randrange(rng.choice([128, 0x3000, 0xD800]))) for _ in range(20))
        astral = (chr(rng.randrange(0xE000, 0x110000)) for _ in range(3))
        pieces = [*anything, *astral, *rng.choices(PIECES, k=20)]
        rng.shuffle(pieces)
        yield "".join(pieces)


def small_encoding(pattern=CL100K, merges=600):
    """
    A tiktoken encoding of PIECES. Its ranks are random, so that not all of its tokens can be reached by
    merges.
    """
    rng = random.Random(0)
    text = " ".join(PIECES)
    parts = {text[i : i + n].encode() for n in (1, 2, 3, 5, 8) for i in range(len(text))}
    parts |= {part[:n] for part in parts for n in (2, 3)}
    tokens = [bytes([byte]) for byte in range(256)] + sorted(part for part in parts if len(part) > 1)[:merges]
    rng.shuffle(tokens)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens=SPECIAL)


def use_encoding(monkeypatch, encoding):
    monkeypatch.setattr(
        tiktoken, "get_encoding", lambda name: encoding if name == "small" else pytest.fail(name)
    )
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["small"])
    return Vocabulary("tiktoken", "small")


def assert_equal(saved, encoding, texts):
    for text in texts:
        ids = encoding.encode(text, allowed_special="all")
        assert saved.encode(text) == saved(text)["input_ids"] == ids, ascii(text)
        assert saved.decode(ids) == text


@needs_gpt2
def test_gpt2s_tokenizer(tmp_path):
    # a model with a custom tokenizer class
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    ids = tokenizer.save_tokenizer(tmp_path, Vocabulary("tiktoken", "gpt2"), 50304, 1024)
    assert [*ids.values()] == [None, 50256, 50256, list(range(50257, 50304))]
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(saved), saved.model_max_length, saved.eos_token_id) == (50257, 1024, 50256)
    assert_equal(saved, tiktoken.get_encoding("gpt2"), random_texts(300))
    batch = saved(["one", "two and three"], padding=True)
    assert [len(row) for row in batch["input_ids"]] == [3, 3] and batch["attention_mask"][0] == [1, 0, 0]


@pytest.mark.parametrize("pattern", [CL100K, WORDS, "(?s)."], ids=["cl100k", "words", "bytes"])
def test_an_encoding_of_tiktoken(tmp_path, monkeypatch, pattern):
    encoding = small_encoding(pattern)
    model = tokenizer.of_encoding(encoding).model
    model.ignore_merges = False
    tokens = set(tokenizer.of_encoding(encoding).get_vocab()) - SPECIAL.keys()
    assert sum(len(model.tokenize(token)) > 1 for token in tokens) > 10  # tokens that no merges lead to
    ids = tokenizer.save_tokenizer(tmp_path, use_encoding(monkeypatch, encoding), 2011, 64)
    assert [*ids.values()] == [None, 2000, 2000, None]
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert (saved.model_max_length, saved.eos_token_id, saved.pad_token_id) == (64, 2000, 2000)
    assert_equal(saved, encoding, random_texts(300))


def test_an_encoding_without_end_of_text(tmp_path, monkeypatch):
    encoding = tiktoken.Encoding(
        "small", pat_str="(?s).", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={}
    )
    ids = tokenizer.save_tokenizer(tmp_path, use_encoding(monkeypatch, encoding), 256, 64)
    assert [*ids.values()] == [None, 256, 256, [256]]  # one more id than the model's
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(saved, encoding, random_texts(20))
    assert (saved.eos_token_id, saved.pad_token_id, saved.unk_token) == (256, 256, None)
    read = vocabulary.tokenizer_in(tmp_path)
    assert read.size == 256 and tokenizer.load(read).encode("a") == [97]


def test_ids_with_holes_get_no_more_tokens(tmp_path):
    """The id after the others is then taken for a token's."""
    content = json.loads(tokenizer.of_table(Vocabulary("table", {"a": 0, "b": 5})).to_str())
    ids = tokenizer.save_tokenizer(tmp_path, Vocabulary("tokenizer.json", json.dumps(content)), 8, 64)
    assert [*ids.values()] == [None, None, None, [6, 7]]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"\p{L}{1,2}+|(?s:.)", "cannot read the pattern of small"),
        (r"\p{L}{1,2}+|[\s\S]", "splits text differently"),
    ],
)
def test_a_pattern_that_means_something_else_is_an_error(tmp_path, monkeypatch, pattern, message):
    meta = use_encoding(monkeypatch, small_encoding(pattern))
    with pytest.raises(ValueError, match=message):
        tokenizer.save_tokenizer(tmp_path, meta, 3000, 64)


@pytest.mark.parametrize("model", [None, "gpt2", "llama", "nanochat"])
def test_characters(tmp_path, model):
    if model:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    stoi = {c: i for i, c in enumerate(CHARACTERS)}
    ids, n = tokenizer.save_tokenizer(tmp_path, Vocabulary("table", stoi), 300, 64), len(stoi)
    assert [*ids.values()] == [None, n, n, list(range(n, 300))]
    saved, rng = AutoTokenizer.from_pretrained(tmp_path), random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(CHARACTERS, k=30) + rng.choices(" \n\t.,'?", k=20))
        assert saved.encode(text) == saved(text)["input_ids"] == [stoi[c] for c in text]
        assert saved.decode(saved.encode(text)) == text
    assert saved.decode([stoi["a"], 299, stoi["b"]]) == "ab"  # 299 exists in the model only
    assert (
        saved.encode("a\u0416") == [stoi["a"], n]
        and saved.decode([stoi["a"], n], skip_special_tokens=True) == "a"
    )
    imported = vocabulary.tokenizer_in(tmp_path)
    read = tokenizer.load(imported)
    assert read.n_ids == n and read.decode(read.encode("a\n")) == "a\n"
    with pytest.raises(ValueError, match="does not contain: '\u0416'"):  # nothing is trained on such a token
        read.encode("a\u0416")
    assert tokenizer.save_tokenizer(tmp_path / "again", imported, 300, 64) == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "again").encode("a\u0416") == [stoi["a"], n]


def test_characters_that_share_an_id(tmp_path):
    """A table may ignore capital letters: all are encoded, and an id is decoded as its first character."""
    table = Vocabulary("table", {"a": 0, "A": 0, "b": 1, "B": 1, "\\": 2, "/": 2, "AB": 0})
    tokenizer.save_tokenizer(tmp_path, table, 3, 64)
    exported, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer.load(table)
    read = tokenizer.load(vocabulary.tokenizer_in(tmp_path))
    assert (
        exported.encode("BAab/\\") == read.encode("BAab/\\") == ours.encode("BAab/\\") == [1, 0, 0, 1, 2, 2]
    )
    assert exported.decode([0, 1, 2]) == read.decode([0, 1, 2]) == ours.decode([0, 1, 2]) == "ab\\"
    with pytest.raises(ValueError, match="characters share their id with 'ab'"):
        tokenizer.save_tokenizer(tmp_path, Vocabulary("table", {"ab": 0, "a": 0}), 1, 64)


def test_characters_that_no_text_has(tmp_path):
    """A lone surrogate, which .jsonl files can hold, keeps its id but cannot be stored."""
    tokenizer.save_tokenizer(tmp_path, Vocabulary("table", {"a": 0, "\ud800": 1, "b": 2}), 3, 64)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("ab") == [0, 2]


def test_a_chat_is_the_text_of_its_messages(tmp_path):
    tokenizer.save_tokenizer(tmp_path, Vocabulary("table", {c: i for i, c in enumerate(CHARACTERS)}), 300, 64)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": " a\n"}, {"role": "user", "content": "\n  {{ b }} \n"}]
    chat = saved.apply_chat_template(messages, add_generation_prompt=True)
    assert saved.decode(chat["input_ids"]) == " a\n\n  {{ b }} \n"


def test_padding_and_truncation_in_a_file_are_not_applied(tmp_path):
    """They would cut a document and fill up a prompt. transformers ignores them too."""
    json_tokenizer = tokenizer.of_table(Vocabulary("table", {"a": 0, "b": 1, "<pad>": 2}))
    json_tokenizer.enable_padding(pad_id=2, pad_token="<pad>", length=8)
    json_tokenizer.enable_truncation(4)
    json_tokenizer.save(str(tmp_path / "tokenizer.json"))
    saved = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    loaded = tokenizer.load(vocabulary.tokenizer_in(tmp_path))
    for text, ids in (("ab", [0, 1]), ("abababab", [0, 1] * 4)):
        assert loaded.encode(text) == saved(text)["input_ids"] == ids


def test_a_tokenizer_that_does_not_fit_the_model(tmp_path):
    message = (
        "the tokenizer uses 3 ids, but the model 2: set --dataset= to the data set that the model was trained"
    )
    with pytest.raises(ValueError, match=message):
        tokenizer.save_tokenizer(tmp_path, Vocabulary("table", {"a": 0, "b": 2}), 2, 64)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_cannot_be_loaded(tmp_path, monkeypatch):
    def offline(url):
        raise OSError("no network")

    monkeypatch.setattr("tiktoken.load.read_file", offline)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    message = (
        "tiktoken cannot load the encoding 'p50k_base' (no network): go online, or set TIKTOKEN_CACHE_DIR"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer.save_tokenizer(tmp_path, Vocabulary("tiktoken", "p50k_base"), 50304, 64)
    with pytest.raises(
        ValueError, match="'no-such' is not an encoding of tiktoken; choose from cl100k_base, gpt2"
    ):
        tokenizer.load(Vocabulary("tiktoken", "no-such"))
