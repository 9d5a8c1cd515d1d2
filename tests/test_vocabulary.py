"""
What token ids mean: read from metadata, recorded by a run, and used by sample.py, export.py and prepare.py.
"""

import json
import pickle
import re

import numpy as np
import pytest
import torch
from runs import script
from test_data import write_tokenizer
from test_sample import folder_of
from test_validation import write

import export
from isogpt.checkpoint.run_vocabulary import vocabulary_of_run
from isogpt.data import tokenizer, vocabulary
from isogpt.data.data_folder import vocabulary_in
from isogpt.data.vocabulary import Vocabulary, gpt2_or_unknown

TEXT = "hello world\n" * 300
ABC = {c: i for i, c in enumerate("abc")}
WORDS = {word: i for i, word in enumerate(["a", "b", "<|", "endoftext", "|>"])}
SHORT = ["--n_layer=1", "--n_embd=16", "--block_size=16", "--eval_interval=4", "--max_iters=3"]
SHORT += ["--out_dir=out"]


def of_meta(meta, folder):
    """The vocabulary of a data set with this metadata."""
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    named = {"tokenizer": meta["tokenizer"]} if "tokenizer" in meta else {}  # not in nanoGPT's file
    (folder / "meta.json").write_text(json.dumps(named))
    return vocabulary_in(folder)


def dataset(folder, text=TEXT):
    """A data set of characters."""
    characters = sorted(set(text))
    ids = [characters.index(c) for c in text]
    write(folder, ids, ids, stoi={c: i for i, c in enumerate(characters)})


STOI = {"a": 1, "b": 2, "c": 3, "A": 1}
TABLES = [
    {"itos": {1: "a", 2: "b", 3: "c"}, "stoi": STOI},
    {"stoi": STOI},
    {"itos": ["<pad>", "a", "b", "c"], "stoi": {"A": 1}},
]


@pytest.mark.parametrize("meta", TABLES)
def test_nanogpts_tables(tmp_path, meta):
    """Texts may share an id, which is decoded as the first of them."""
    table = of_meta(meta, tmp_path)
    loaded = tokenizer.load(table)
    assert loaded.encode("cabA") == [3, 1, 2, 1] and loaded.decode([3, 1, 2]) == "cab" and loaded.n_ids == 4
    run = {"isogpt": {"vocabulary": json.loads(json.dumps(table.describe()))}}
    assert vocabulary.recorded(run) == table and table.name == "char"
    with pytest.raises(ValueError, match="characters that the vocabulary does not contain: 'Z'"):
        loaded.encode("cabZ")


def test_metadata_that_does_not_say_what_the_ids_mean(tmp_path):
    reasons = {"tokenizer": f"{tmp_path} lacks the tokenizer char", "itos": "are not tables"}
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=f"the ids cannot be decoded: .*{reason}.*; set --dataset="):
            tokenizer.load(of_meta({name: "char"}, tmp_path))


def test_ids_without_a_record(tmp_path):
    """They are GPT-2's if the model is large enough, and not much larger."""
    assert of_meta({}, tmp_path) is of_meta({"vocab_size": 90}, tmp_path) is None
    kinds = [gpt2_or_unknown(size, "it").kind for size in (50256, 50257, 50304, 51200, 51201)]
    assert kinds == ["unknown", *["tiktoken"] * 3, "unknown"]
    (tmp_path / "merges.txt").touch()  # of a tokenizer that may be another one of the same size
    unknown = gpt2_or_unknown(50257, tmp_path)
    with pytest.raises(ValueError, match=f"merges.txt, but no tokenizer.json: type python -c .*'{tmp_path}'"):
        tokenizer.load(unknown)


def test_the_order_of_precedence(tmp_path):
    """What meta.json names, tokenizer.json, the tables."""
    tables = {"stoi": ABC, "vocab_size": 50257}
    weights = {"model_args": {"vocab_size": 50257}}
    assert vocabulary_of_run(weights, tmp_path) == Vocabulary("tiktoken", "gpt2")
    assert of_meta({"tokenizer": "cl100k_base"} | tables, tmp_path) == Vocabulary("tiktoken", "cl100k_base")
    assert of_meta(tables, tmp_path) == of_meta({"tokenizer": "char"} | tables, tmp_path)
    write_tokenizer(tmp_path, WORDS)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    for meta in ({}, tables, {"tokenizer": "tokenizer.json"} | tables):
        found = of_meta(meta, tmp_path)
        assert (found.name, found.size, tokenizer.load(found).end_of_text) == ("tokenizer.json", 6, 5)
    assert of_meta({"tokenizer": "char"} | tables, tmp_path).ids == ABC


# ------------------------------------------------------------------------------------------------------------
# a run keeps its vocabulary


def test_a_vocabulary_that_the_data_knows_only_in_part(zygote, tmp_path):
    """The run keeps its vocabulary, until the data knows more."""
    for last, (known, kept) in enumerate((("abc", "abc"), ("ab", "abc"), ("abcd", "abcd")), 1):
        stoi = {c: i for i, c in enumerate(known)}
        write(tmp_path / "data/mine", [0, 1] * 99, [0, 1] * 99, stoi=stoi, vocab_size=4)
        zygote.train([*SHORT, "--dataset=mine", "--init_from=auto", f"--max_iters={last}"], tmp_path)
        run = torch.load(tmp_path / "out/ckpt.pt", weights_only=True)
        assert vocabulary.recorded(run).ids.keys() == {*kept}


def test_data_with_other_ids_than_the_run(zygote, tmp_path):
    """A resume on data with other characters says so, and takes no step."""
    dataset(tmp_path / "data/mine")
    args = [*SHORT, "--dataset=mine"]
    zygote.train([*args, "--zero=1"], tmp_path)
    dataset(tmp_path / "data/mine", TEXT.replace("w", "q").replace("h", "k"))
    run = zygote.train([*args, "--init_from=resume", "--max_iters=5"], tmp_path, nproc=2, ok=False)
    assert run.codes == [1, 1] and "iter 4:" not in run.text()
    # the advice: prepare the text with the run's vocabulary
    assert re.search("do not mean what they mean in the checkpoint: id.*--tokenizer=out", run.text(), re.S)
    (tmp_path / "own.txt").write_text("lower hold\n" * 300)
    prepare = ["--data_files=own.txt", "--tokenizer=out", "--out=data/mine"]
    zygote.start(prepare, tmp_path, script="data/shakespeare_char/prepare.py").wait()
    text = zygote.train([*args, "--init_from=resume", "--max_iters=5", "--zero=1"], tmp_path).text()
    assert "iter 5:" in text and "since evaluations measure something different: the digest" in text


def test_a_checkpoint_of_nanogpt_uses_the_data_set_by_name(at, capsys, zygote, work):
    """Unless --dataset names a different one."""
    zygote.train([*SHORT, "--out_dir=whole"], work)
    state = torch.load(work / "whole/ckpt.pt", weights_only=True)
    del state["isogpt"]
    (work / "out").mkdir()
    torch.save(state, work / "out/ckpt.pt")
    args = ["--device=cpu", "--num_samples=1", "--max_new_tokens=5"]
    script(at, "sample.py", [*args, "--start=o"])
    assert capsys.readouterr().out.startswith("o")
    dataset(work / "data/kept", "".join(map(chr, range(32, 97))))
    assert export.convert("out", "hf", "kept").name == "hf"


def test_a_tokenizer_of_transformers_stays_with_the_weights(at, capsys, zygote, tmp_path):
    """Ids without metadata belong to it."""
    folder = folder_of(tmp_path, "llama")
    write(tmp_path / "data/ids", np.arange(400) % 6, np.arange(400) % 6)
    zygote.train([*SHORT, "--dataset=ids", f"--init_from={folder}", "--out_dir=tuned"], tmp_path)
    args = ["--out_dir=tuned", "--device=cpu", "--num_samples=1", "--max_new_tokens=20", "--start=cab"]
    script(at, "sample.py", args)
    assert set(capsys.readouterr().out.splitlines()[0]) <= set("abcdef")


def test_special_tokens(tmp_path):
    """
    One rule for prompts and data: the text of a special token is the token, unless special_tokens is False.
    """
    write_tokenizer(tmp_path, WORDS)
    words, text = vocabulary_in(tmp_path), "a <|endoftext|> b"
    assert tokenizer.load(words).encode(text) == [0, 5, 1]
    assert tokenizer.load(words, special_tokens=False).encode(text) == [0, 2, 3, 4, 1]
