"""The bytes of a text and the digest of its validation part, from prepare.py to the model card."""

import hashlib
import json
import pickle
import sys

import numpy as np
import pytest
from runs import REPO
from test_data import EOT, bins, cached_tokenizers, needs_gpt2, read  # noqa: F401 (a fixture)

import export
from isogpt.checkpoint.measures import bits_per_byte, changed_measures, what_is_measured
from isogpt.checkpoint.search import best_checkpoint, open_bare
from isogpt.checkpoint.source import open_checkpoint
from isogpt.data.dataset import open_dataset

sys.path.insert(0, str(REPO / "data"))
import count_bytes
import split
import tokenize_documents

TEXT = "naïve Ünits²; 東京 🙂\n" * 50 + "def f(x):<|endoftext|>\n" * 50
DOCUMENTS = [f"Document {i}: naïve 東京 <|endoftext|>{'!' * i}" for i in range(40)]
FACTS = ("val_bytes", "val_text", "val_tokens")


def digest(data):
    return hashlib.sha256(data).hexdigest()


def prepare_text(folder, *args):
    """A data set of TEXT; returns its meta.json."""
    bins.prepare_text(__file__, "", [f"--out={folder}", *args], lambda _: (TEXT, {}))
    return read(folder)[0]


def prepare_documents(folder, *args):
    """A data set of DOCUMENTS; returns its meta.json."""
    source = folder.with_suffix(".jsonl")
    source.write_text("\n".join(json.dumps({"text": text}) for text in ["", *DOCUMENTS]))
    options = [f"--data_files={source}", f"--out={folder}", "--val_fraction=0.3", *args]
    bins.prepare_documents(__file__, "", options, "", {})
    return read(folder)[0]


def recounted(folder):
    """What count_bytes.py records in a data set whose meta.json says nothing of bytes."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in meta.items() if name not in FACTS}))
    count_bytes.main([str(folder)])
    after = json.loads(path.read_text())
    assert after == meta
    return {name: after[name] for name in FACTS}


@needs_gpt2
def test_one_text_has_the_same_bytes_in_every_vocabulary(tmp_path):
    cut = int(len(TEXT) * 0.9)
    for name, args in (
        ("char", []),
        ("gpt2", ["--tokenizer=gpt2"]),
        ("plain", ["--tokenizer=gpt2", "--special_tokens=False"]),
    ):
        meta = prepare_text(tmp_path / name, *args)
        assert meta["train_bytes"] == len(TEXT[:cut].encode()) > cut
        assert meta["val_bytes"] == len(TEXT[cut:].encode())
        assert meta["val_text"] == digest(TEXT[cut:].encode())
        recounted(tmp_path / name)  # also where <|endoftext|> is a token of the text
        data = open_dataset(str(tmp_path / name), 8)
        # a model that gives all ids the probability of a byte each
        nats = np.log(256) * meta["val_bytes"] / meta["val_tokens"]
        assert data.bits_per_byte(nats) == pytest.approx(8)
        measures = what_is_measured({}, data.digest, data.bytes_per_token)
        assert bits_per_byte(nats, measures) == pytest.approx(8)
    other = prepare_text(tmp_path / "other", "--val_fraction=0.2")
    assert other["val_text"] != meta["val_text"] and other["val_bytes"] > meta["val_bytes"]


@needs_gpt2
def test_documents_are_counted_without_end_of_text_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_documents, "BATCH_BYTES", 200)
    is_val = [bins.goes_to_val(1337, i, 0.3) for i in range(len(DOCUMENTS))]
    val = [text.encode() for text, goes in zip(DOCUMENTS, is_val, strict=True) if goes]
    plain = prepare_documents(tmp_path / "plain", "--special_tokens=False", "--num_proc=2")
    assert recounted(tmp_path / "plain")["val_bytes"] == plain["val_bytes"] == sum(map(len, val))
    assert plain["train_bytes"] == sum(len(text.encode()) for text in DOCUMENTS) - plain["val_bytes"]
    assert plain["val_text"] == digest(b"".join(text + b"\xff" for text in val)) != digest(b"".join(val))
    special = prepare_documents(tmp_path / "special", "--num_proc=1")
    assert special["val_tokens"] < plain["val_tokens"]
    assert [special[name] for name in FACTS[:2]] == [plain[name] for name in FACTS[:2]]


@needs_gpt2
def test_a_data_set_of_nanogpt(tmp_path, capsys):
    """With characters, and with GPT-2's tokens; val.bin suffices."""
    import tiktoken

    gpt2, text = tiktoken.get_encoding("gpt2"), "naïve 東京"
    ids = [*gpt2.encode(text), EOT] * 2
    np.array(ids, np.uint16).tofile(tmp_path / "val.bin")
    count_bytes.count_bytes(tmp_path)
    expected = {"val_tokens": len(ids), "val_bytes": 26, "val_text": digest((text.encode() + b"\xff") * 2)}
    assert json.loads((tmp_path / "meta.json").read_text()) == expected
    assert f"{len(ids)} tokens of gpt2, 26 bytes of text" in capsys.readouterr().out

    characters = sorted(set(text))
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters))}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    np.array([characters.index(c) for c in text], np.uint16).tofile(tmp_path / "val.bin")
    count_bytes.count_bytes(tmp_path)
    assert json.loads((tmp_path / "meta.json").read_text())["val_text"] == digest(text.encode())

    np.arange(len(characters) + 1, dtype=np.uint16).tofile(tmp_path / "val.bin")
    with pytest.raises(ValueError, match=rf"val.bin contains id {len(characters)}, which is not in the voc"):
        count_bytes.count_bytes(tmp_path)
    (tmp_path / "meta.json").write_text('{"vocab_size": 9}')
    (tmp_path / "meta.pkl").unlink()
    with pytest.raises(ValueError, match='fit GPT-2; prepare the data set again, or write "val_bytes": N'):
        count_bytes.count_bytes(tmp_path)


def test_split_counts_what_it_cuts_off(tmp_path, capsys):
    """Each time, if the folder says what the ids mean; ids without a meaning need not be GPT-2's."""
    characters = sorted(set(TEXT))
    ids = np.array([characters.index(c) for c in TEXT], np.uint16)
    ids.tofile(tmp_path / "train.bin")
    split.split(tmp_path, 0.5)
    assert not (tmp_path / "meta.json").exists()
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters))}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    for fraction in (0.1, 0.2):
        split.split(tmp_path, fraction)
        cut = int(len(TEXT) * (1 - fraction))
        data = open_dataset(str(tmp_path), 8)
        assert (data.val_bytes, data.val_text) == (len(TEXT[cut:].encode()), digest(TEXT[cut:].encode()))
    (tmp_path / "meta.json").write_text('{"val_bytes": 3, "val_tokens": 1, "tokenizer": "tokenizer.json"}')
    split.split(tmp_path, 0.3)
    problem = "the ids cannot be converted"
    assert f"note: train.py will not report bits per byte: {problem}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="meta.json says 1"):
        open_dataset(str(tmp_path), 8)


def test_bits_per_byte_of_a_checkpoint():
    """Older checkpoints know no bytes; nothing else is compared because of that."""
    old, now = what_is_measured({}, "digest"), what_is_measured({}, "digest", 2.0)
    assert not changed_measures(old, now) and not changed_measures(now, old)
    changed = changed_measures(now | {"bytes_per_token": 4.0}, now)
    assert changed == ["bytes of text per token is 2.0, not 4.0"]
    assert bits_per_byte(np.log(2), now) == pytest.approx(0.5)
    assert bits_per_byte(1.0, old) is bits_per_byte(1.0, {}) is bits_per_byte(None, now) is None
    for hostile in ("2", True, [2], 0.0, -1.0, float("nan")):
        assert bits_per_byte(1.0, {"bytes_per_token": hostile}) is None


def test_a_run_keeps_its_bits_per_byte(zygote, work):
    """In checkpoints of both forms and in a copy, for sample.py, the list and the model card."""
    folder = work / "data" / "tiny"
    count_bytes.count_bytes(folder)
    zygote.train(["--max_iters=3", "--eval_interval=2", "--keep_last=1", "--out_dir=out"], work)
    stored, _ = best_checkpoint(str(work / "out"))
    bits = f"{open_dataset(str(folder), 8).bits_per_byte(stored.val_loss):.4f}"
    loss = f"{stored.val_loss:.4f}"
    args = ["--out_dir=out", "--device=cpu", "--start=A", "--num_samples=1", "--max_new_tokens=1"]
    run = zygote.start(args, work, script="sample.py").wait()
    assert f": step {stored.step}, val loss {loss} ({bits} bits per byte)\n" in run.text()
    listed = export.list_checkpoints(str(work / "out"))
    assert listed.splitlines()[0].split()[2:6] == ["val", "loss", "bits/byte", "GB"]
    assert f"  {loss:>8}  {bits:>9}  " in listed

    source = open_checkpoint(stored)
    card = export.model_card(source, export.GPT(export.GPTConfig(**source.run["model_args"])))
    assert export.CARD_IS_OURS in card and f"| validation loss | {loss} nats per token |\n" in card
    assert f"| bits per byte | {bits} |\n" in card and "| measured on | 8 sequences of val.bin |\n" in card
    assert "| data set | tiny, digest " in card
    copied = open_bare(stored.path, export.read_file(stored.path))
    assert f"{copied.bits_per_byte:.4f}" == bits
