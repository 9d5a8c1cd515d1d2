"""Tokenizers that prepare.py trains, and TinyStories: any text is kept, the same text gives the same ids."""

import math
import random

import numpy as np
import pytest
from runs import REPO, column, script
from test_data import contents, read, run
from test_data import prepare as prepare_apart
from train_tokenizer import train_tokenizer

import export
from isogpt.checkpoint.search import find_checkpoint
from isogpt.data.tokenizer import load
from isogpt.data.vocabulary import tokenizer_in

pytest.importorskip("tokenizers")

TEXT = (REPO / "docs/design.md").read_text() + "naïve Ünits²; 東京 🙂\r\n\t\tdef f(x):\n\n"
NAMES = ("Lily", "Tom", "Mia")
STORIES = [f"{name} saw {n} birds.\n\n“How nice!” said {name}." for n in range(40) for name in NAMES]
FILES = {"documents.bin", "train.bin", "val.bin", "meta.json", "tokenizer.json", "tokenizer_config.json"}


def write_stories(path, separator="\n<|endoftext|>\n"):
    """As the files of TinyStories: a line with the separator after each story."""
    path.write_text("\n" + "".join(story + separator for story in STORIES))
    return f"--data_files={path}"


@pytest.mark.parametrize("n_ids", [257, 700])
def test_any_text_is_kept(n_ids):
    tokenizer = load(train_tokenizer([TEXT], n_ids))
    assert (tokenizer.n_ids, tokenizer.end_of_text) == (n_ids, 0)
    anything = random.Random(n_ids)
    characters = [*map(chr, range(0x300)), "\u2028", "\ufffd", "\U0010ffff", "<|endoftext|>", "\r\n"]
    for text in (TEXT, "", " ", "".join(characters), "".join(anything.choices(characters, k=3000))):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert n_ids == 257 or len(tokenizer.encode(TEXT)) < len(TEXT) / 2


def test_the_same_text_gives_the_same_tokenizer(at):
    (at.path / "text.txt").write_text(TEXT)
    args = ["--data_files=text.txt", "--out=.", "--train_tokenizer=700"]
    prepare_apart(REPO / "data", "shakespeare", *args, RAYON_NUM_THREADS="1", PYTHONHASHSEED="1")
    assert (at.path / "tokenizer.json").read_text() == train_tokenizer([TEXT], 700).content


def test_only_the_first_characters_are_read():
    documents = iter([TEXT, TEXT, "not read"])
    trained = train_tokenizer(documents, 300, len(TEXT) + 1000)
    assert trained == train_tokenizer([TEXT, TEXT[:1000]], 300) and list(documents) == ["not read"]


def prepare(at, *args, out="new"):
    run(REPO / "data/tinystories/prepare.py", f"--out={out}", *args)
    return read(at.path / out)[0]


def test_tinystories(at, capsys):
    """From a .txt file, whose stories are documents, with its own tokenizer and another."""
    files = write_stories(at.path / "V2-train.txt")
    meta = prepare(at, files, "--val_fraction=0.1")
    assert set(contents(at.path / "new")) == FILES
    _, *splits = read(at.path / "new")
    text = load(tokenizer_in("new")).decode(np.concatenate(splits).tolist())
    assert sorted(text.split("<|endoftext|>")) == ["", *sorted(STORIES)] and text.endswith("<|endoftext|>")
    assert (meta["tokenizer"], meta["documents"]) == ("tokenizer.json", len(STORIES))
    assert meta["train_bytes"] + meta["val_bytes"] == sum(len(story.encode()) for story in STORIES)
    assert meta["tokenizer_size"] < 4096 and meta["vocab_size"] % 64 == 0
    said = capsys.readouterr().out
    assert "training a tokenizer of 4,096 ids\nnote: the text is too short" in said

    # another tokenizer takes the place of the one that is trained by default
    before = contents(at.path / "new")
    files = write_stories(at.path / "V2-train.txt", "\n===\n")
    prepare(at, files, "--val_fraction=0.1", "--tokenizer=new", "--document_separator====", out="b")
    assert contents(at.path / "b")["train.bin"] == before["train.bin"]
    assert "training a tokenizer" not in capsys.readouterr().out


def test_a_run_keeps_its_tokenizer(at, capsys, zygote):
    """
    A checkpoint and its export contain the tokenizer and the bits per byte: sampling, exporting and listing
    need no data set.
    """
    files = write_stories(at.path / "stories.txt")
    meta = prepare(at, files, "--val_fraction=0.2", "--train_tokenizer=300", out="data/mine")
    assert (meta["tokenizer_size"], meta["vocab_size"]) == (300, 320)
    tokenizer = load(tokenizer_in("data/mine"))
    short = ["--dataset=mine", "--eval_interval=5", "--max_iters=5", "--sample_interval=5", "--out_dir=out"]
    zygote.train(short, at.path)
    (at.path / "data/mine").rename(at.path / "moved")
    stored, _ = find_checkpoint("out", best=True)
    bits = stored.val_loss / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
    assert column(at.path / "out", "val_bpb")[stored.step] == pytest.approx(bits, rel=1e-3)
    loss, bits = f"{stored.val_loss:.4f}", f"{bits:.4f}"
    assert f"  {loss:>8}  {bits:>9}  " in export.list_checkpoints("out")

    def sample(folder):
        capsys.readouterr()
        args = ["--device=cpu", "--num_samples=1", "--max_new_tokens=8", "--start=Lily saw", "--top_k=1"]
        script(at, "sample.py", [f"--out_dir={folder}", *args])
        said = capsys.readouterr()
        assert f": step {stored.step}, val loss {loss}\n" in said.err or folder != "out"
        return said.out.partition("\n---")[0]

    assert (sampled := sample("out")).startswith("Lily saw")
    exported = export.convert("out", "hf")
    card = (exported / "README.md").read_text()
    assert f"Validation loss: {loss} nats per token, {bits} bits per byte.\n" in card
    assert "val.bin): dataset mine, " in card and ", sequences 8, " in card
    assert load(tokenizer_in(exported)).encode(STORIES[0]) == tokenizer.encode(STORIES[0])
    of_transformers = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(exported)
    assert of_transformers(STORIES[0] + "<|endoftext|>").input_ids == [*tokenizer.encode(STORIES[0]), 0]
    export.convert_hf(str(exported))
    assert sample(exported) == sampled
