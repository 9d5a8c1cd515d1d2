"""
isogpt/data/tokenizer.py: what AutoTokenizer reads gives tiktoken's ids and the data set's, and exactly the
text.
"""

import random
import re

import pytest
import tiktoken
from test_data import cached_tokenizers, needs_gpt2  # noqa: F401 (a fixture)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from isogpt.data import tokenizer, vocabulary
from isogpt.data.vocabulary import Vocabulary, of_characters

CHARACTERS = sorted({*map(chr, range(256)), *"東京🙂Ġ▁\u0301\u200d\u2028\ufeff\U0010ffff"})
PIECES = [*re.split(r"(?<=\s)(?=\S)", tokenizer.SAMPLE), "<|fim|>", "<|endoftext", "   ", "\r\n\r\n", "WE'LL"]
PIECES += ["e\u0301", "👩\u200d💻", "\u2028", "\x00", "a", "Z", ".", ",,", "ſ"]
SPECIAL = {"<|endoftext|>": 2000, "<|fim|>": 2010}  # ids with a hole, as in cl100k_base
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| "
    r"?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def random_texts(n):
    """Texts of PIECES and of any characters but surrogates."""
    rng = random.Random(1)
    for _ in range(n):
        anything = (chr(rng.randrange(rng.choice([128, 0x3000, 0xD800]))) for _ in range(20))
        astral = (chr(rng.randrange(0xE000, 0x110000)) for _ in range(3))
        pieces = [*anything, *astral, *rng.choices(PIECES, k=20)]
        rng.shuffle(pieces)
        yield "".join(pieces)


def small_encoding(pattern):
    """A tiktoken encoding of PIECES, whose ranks are random, so that no merges lead to some of its tokens."""
    rng = random.Random(0)
    text = " ".join(PIECES)
    parts = {text[i : i + n].encode() for n in (1, 2, 3, 5, 8) for i in range(len(text))}
    parts |= {part[:n] for part in parts for n in (2, 3)}
    tokens = [bytes([byte]) for byte in range(256)] + sorted(part for part in parts if len(part) > 1)[:600]
    rng.shuffle(tokens)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens=SPECIAL)


def use_encoding(monkeypatch, encoding):
    monkeypatch.setattr(tiktoken, "get_encoding", {"small": encoding}.get)
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
    assert [*ids.values()] == [50256, 50256, 50256, list(range(50257, 50304))]
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(saved), saved.model_max_length, saved.eos_token_id) == (50257, 1024, 50256)
    assert_equal(saved, tiktoken.get_encoding("gpt2"), random_texts(300))
    batch = saved(["one", "two and three"], padding=True)
    assert [len(row) for row in batch["input_ids"]] == [3, 3] and batch["attention_mask"][0] == [1, 0, 0]


@pytest.mark.parametrize("pattern", [CL100K, "(?s)."], ids=["cl100k", "bytes"])
def test_an_encoding_of_tiktoken(tmp_path, monkeypatch, pattern):
    encoding = small_encoding(pattern)
    ids = tokenizer.save_tokenizer(tmp_path, use_encoding(monkeypatch, encoding), 2011, 64)
    assert [*ids.values()] == [2000, 2000, 2000, None]
    assert_equal(AutoTokenizer.from_pretrained(tmp_path), encoding, random_texts(300))


def test_characters(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nanochat"}')
    stoi = {c: i for i, c in enumerate(CHARACTERS)}
    ids, n = tokenizer.save_tokenizer(tmp_path, of_characters(stoi), 300, 64), len(stoi)
    assert [*ids.values()] == [None, n, n, list(range(n, 300))]
    saved, rng = AutoTokenizer.from_pretrained(tmp_path), random.Random(0)
    for _ in range(100):
        text = "".join(rng.choices(CHARACTERS, k=30) + rng.choices(" \n\t.,'?", k=20))
        assert saved.encode(text) == saved(text)["input_ids"] == [stoi[c] for c in text]
        assert saved.decode(saved.encode(text)) == text
    assert saved.decode([stoi["a"], 299, stoi["b"]]) == "ab"  # 299 exists in the model only
    unknown = [stoi["a"], n]
    assert saved.encode("a\u0416") == unknown and saved.decode(unknown, skip_special_tokens=True) == "a"
    messages = [{"role": "system", "content": " a\n"}, {"role": "user", "content": "\n  {{ b }} \n"}]
    chat = saved.apply_chat_template(messages, add_generation_prompt=True)
    assert saved.decode(chat["input_ids"]) == " a\n\n  {{ b }} \n"

    imported = vocabulary.tokenizer_in(tmp_path)
    assert imported.name == "char" and imported.ids == stoi
    assert tokenizer.save_tokenizer(tmp_path / "again", imported, 300, 64) == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "again").encode("a\u0416") == unknown


def test_the_token_at_the_start_is_the_one_that_the_tokenizer_adds(tmp_path):
    from tokenizers import Tokenizer, models, processors

    added = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    template = {"single": "<s> $A </s>", "special_tokens": [("<s>", 1), ("</s>", 2)]}
    added.post_processor = processors.TemplateProcessing(**template)
    added.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    ids = tokenizer.save_tokenizer(tmp_path / "hf", vocabulary.tokenizer_in(tmp_path), 3, 64)
    assert [*ids.values()] == [1, 2, 2, None]
    saved = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert saved.bos_token == "<s>" and saved.encode("a") == [1, 0, 2]


def test_vocabularies_that_transformers_cannot_hold(tmp_path, monkeypatch):
    pattern = use_encoding(monkeypatch, small_encoding(r"\p{L}{1,2}+|[\s\S]"))
    for message, wrong in {
        "splits text differently": pattern,
        "no tokenizer for tokens that share an id": of_characters({"a": 0, "A": 0}),
        "the tokenizer uses 3001 ids, but the model 3000: set --dataset=": of_characters({"a": 3000}),
    }.items():
        with pytest.raises(ValueError, match=message):
            tokenizer.save_tokenizer(tmp_path, wrong, 3000, 64)
    assert not list(tmp_path.iterdir())


def test_padding_and_truncation_in_a_file(tmp_path):
    """They would cut a document and fill up a prompt: transformers ignores them too."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    json_tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    json_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    json_tokenizer.enable_padding(pad_id=5, pad_token="b", length=8)
    json_tokenizer.enable_truncation(4)
    json_tokenizer.save(str(tmp_path / "tokenizer.json"))
    saved = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    read = vocabulary.tokenizer_in(tmp_path)
    for text, ids in (("ab", [0, 5]), ("abababab", [0, 5] * 4)):
        assert tokenizer.load(read).encode(text) == saved(text)["input_ids"] == ids


def test_tokens_that_a_file_adds(tmp_path):
    """Before a text only, since samples continue it, and not twice, as a chat template writes them too."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    json_tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 3}, unk_token="?"))
    json_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    json_tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [(token, json_tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    begin, end = dict(special).values()
    json_tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=special)
    json_tokenizer.save(str(tmp_path / "tokenizer.json"))
    encode = tokenizer.load(vocabulary.tokenizer_in(tmp_path)).encode
    assert encode("aa") == encode("<s>aa") == [begin, 0, 0]
    assert encode("a</s>a</s>") == encode("<s>a</s>a</s>") == [begin, 0, end, 0, end]
    assert encode("<s>") == encode("") == [begin]
    json_tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=special)
    json_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.load(vocabulary.tokenizer_in(tmp_path)).encode("") == []


def test_a_tokenizer_that_cannot_be_loaded(tmp_path, monkeypatch):
    def offline(url):
        raise OSError("no network")

    monkeypatch.setattr("tiktoken.load.read_file", offline)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    message = r"tiktoken cannot load 'p50k_base' \(OSError\('no network'\)\): go online, or set .* filled"
    with pytest.raises(ValueError, match=message):
        tokenizer.save_tokenizer(tmp_path, Vocabulary("tiktoken", "p50k_base"), 50304, 64)
    with pytest.raises(ValueError, match="tiktoken cannot load 'gpt3' .*: choose from .*gpt2"):
        tokenizer.load(Vocabulary("tiktoken", "gpt3"))
