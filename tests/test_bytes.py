"""The bytes of a text and the digest of its validation part, from prepare.py and count_bytes.py."""

import hashlib
import json
import pickle

import numpy as np
import pytest
from runs import REPO
from test_data import EOT, cached_tokenizers, error_of, needs_gpt2, read, run  # noqa: F401 (a fixture)

from isogpt.data.dataset import open_dataset

TEXT = "naïve Ünits²; 東京 🙂\n" * 50 + "def f(x):<|endoftext|>\n" * 50
DOCUMENTS = [f"Document {i}: naïve 東京 <|endoftext|>{'!' * i}" for i in range(40)]
FACTS = ("val_bytes", "val_text", "val_tokens")
DATA = REPO / "data"


def digest(data):
    return hashlib.sha256(data).hexdigest()


def prepare(at, name, file, *args):
    """The meta.json of a data set in the folder `new`, of which count_bytes.py records the same facts."""
    run(DATA / name / "prepare.py", f"--data_files={file}", "--out=new", *args)
    path = at.path / "new/meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in meta.items() if name not in FACTS}))
    run(DATA / "count_bytes.py", "new")
    assert json.loads(path.read_text()) == meta
    return meta


@needs_gpt2
def test_one_text_has_the_same_bytes_in_every_vocabulary(at):
    cut = int(len(TEXT) * 0.9)
    (at.path / "text.txt").write_text(TEXT)
    for args in (["--tokenizer=char"], ["--tokenizer=gpt2"], ["--tokenizer=gpt2", "--special_tokens=False"]):
        meta = prepare(at, "shakespeare", "text.txt", *args)
        assert meta["train_bytes"] == len(TEXT[:cut].encode()) > cut
        assert meta["val_bytes"] == len(TEXT[cut:].encode())
        assert meta["val_text"] == digest(TEXT[cut:].encode())
        data = open_dataset("new", 8)
        # a model that gives all ids the probability of a byte each
        nats = np.log(256) * meta["val_bytes"] / meta["val_tokens"]
        assert data.bits_per_byte(nats) == pytest.approx(8)


@needs_gpt2
def test_documents_are_counted_without_end_of_text_tokens(at):
    import tiktoken

    (at.path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ["", *DOCUMENTS]))
    args = ["openwebtext", "texts.jsonl", "--val_fraction=0.3", "--num_proc=1"]
    plain = prepare(at, *args, "--special_tokens=False")
    ends = tiktoken.get_encoding("gpt2").decode(read(at.path / "new")[2].tolist()).split("!<|endoftext|>")
    assert plain["val_bytes"] + plain["train_bytes"] == sum(len(text.encode()) for text in DOCUMENTS)
    val = [text.encode() for text in DOCUMENTS if text.removesuffix("!") in ends or text in ends]
    assert len(val) > 5 and plain["val_text"] == digest(b"".join(text + b"\xff" for text in val))
    run(DATA / "openwebtext/prepare.py", "--data_files=texts.jsonl", "--out=new", *args[2:])
    special = read(at.path / "new")[0]
    # takes such a token for the end of a document, but prepare.py knows better
    run(DATA / "count_bytes.py", "new")
    assert read(at.path / "new")[0] == special
    assert special["val_tokens"] < plain["val_tokens"]
    assert [special[name] for name in FACTS[:2]] == [plain[name] for name in FACTS[:2]]


@needs_gpt2
def test_a_data_set_of_nanogpt(at):
    """With GPT-2's tokens, and with characters; val.bin suffices."""
    import tiktoken

    gpt2, text, folder = tiktoken.get_encoding("gpt2"), "naïve 東京", at.path
    ids = [*gpt2.encode(text), EOT] * 2
    np.array(ids, np.uint16).tofile(folder / "val.bin")
    run(DATA / "count_bytes.py", folder)
    expected = {"val_tokens": len(ids), "val_bytes": 26, "val_text": digest((text.encode() + b"\xff") * 2)}
    assert json.loads((folder / "meta.json").read_text()) == expected

    characters = sorted(set(TEXT))
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    (folder / "val.bin").unlink()
    np.array([characters.index(c) for c in TEXT], np.uint16).tofile(folder / "train.bin")
    run(DATA / "split.py", folder, "--val_fraction=0.2")
    run(DATA / "count_bytes.py", folder)
    val = TEXT[int(len(TEXT) * 0.8) :].encode()
    data = open_dataset(str(folder), 8)
    assert (data.val_bytes, data.val_text) == (len(val), digest(val))

    np.arange(len(characters) + 1, dtype=np.uint16).tofile(folder / "val.bin")
    said = error_of(DATA / "count_bytes.py", folder)
    assert f"val.bin contains id {len(characters)}, which" in said
    (folder / "meta.json").write_text('{"vocab_size": 9}')
    (folder / "meta.pkl").unlink()
    said = error_of(DATA / "count_bytes.py", folder)
    assert "(unknown): prepare the data set again" in said


def test_documents_of_gpt2_are_found_without_a_network(at, monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", None)
    np.array([1, EOT, 2, EOT, 3, 4], np.uint16).tofile(at.path / "train.bin")
    run(DATA / "find_documents.py", ".")
    assert np.fromfile(at.path / "documents.bin", np.int64).tolist() == [0, 1, 3]
