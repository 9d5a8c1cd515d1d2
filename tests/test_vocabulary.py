"""
What token ids mean: read from metadata, recorded by a run, and used by sample.py, export.py and prepare.py.
"""

import collections
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import REPO, TINY, script, script_that_fails

sys.path.insert(0, str(REPO / "data"))

import bins

import export
from isogpt.checkpoint.run_vocabulary import vocabulary_for_run, vocabulary_of_weights
from isogpt.data import tokenizer, vocabulary
from isogpt.data.dataset import open_dataset, read_meta
from isogpt.data.vocabulary import Vocabulary

TEXT = "hello world\n" * 300
ABC = {c: i for i, c in enumerate("abc")}
SHORT = [
    "--n_layer=1",
    "--n_embd=16",
    "--block_size=16",
    "--eval_interval=4",
    "--max_iters=3",
    "--out_dir=out",
]


def of_meta(meta, folder="nowhere"):
    return vocabulary.of_data(meta, Path(folder))


def dataset(folder, text=TEXT, **meta):
    """A data set of characters, as nanoGPT's prepare.py writes one."""
    folder.mkdir(parents=True, exist_ok=True)
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = np.array([stoi[c] for c in text], dtype=np.uint16)
    for split in ("train", "val"):
        ids.tofile(folder / f"{split}.bin")
    itos = {i: c for c, i in stoi.items()}
    (folder / "meta.pkl").write_bytes(
        pickle.dumps({"vocab_size": len(stoi), "stoi": stoi, "itos": itos} | meta)
    )
    return folder


# ------------------------------------------------------------------------------------------------------------
# reading metadata


@pytest.mark.parametrize(
    ("meta", "text", "ids"),
    [
        ({"itos": {1: "a", 2: "b", 3: "c"}, "stoi": {"a": 1, "b": 2, "c": 3}}, "cab", [3, 1, 2]),
        ({"stoi": ABC}, "cab", [2, 0, 1]),
        ({"itos": dict(enumerate("abc"))}, "cab", [2, 0, 1]),
        ({"itos": ["a", "b", "c"]}, "cab", [2, 0, 1]),
        ({"itos": np.array(["a", "b", "c"])}, "cab", [2, 0, 1]),
        ({"chars": ("a", "b", "c")}, "cab", [2, 0, 1]),
        ({"char_to_index": ABC, "vocabulary_size": 3}, "cab", [2, 0, 1]),
        ({"char2idx": {c: np.int64(i) for c, i in ABC.items()}}, "cab", [2, 0, 1]),
        ({"itos": {"0": "a", "1": "b", "2": "c"}}, "cab", [2, 0, 1]),
        ({"stoi": collections.OrderedDict(ABC), "itos": collections.defaultdict(int)}, "cab", [2, 0, 1]),
        ({"stoi": {b"a": 0, b"\xc3": 1, b"\xa9": 2}}, "a\u00e9", [0, 1, 2]),
        ({"stoi": {"<pad>": 0, "a": 1, " ": 2, "<|endoftext|>": 3}}, "a <|endoftext|>a", [1, 2, 3, 1]),
        ({"stoi": {"cat": 0, "the": 1, "sat": 2}}, "the cat sat", [1, 0, 2]),
        ({"stoi": {"in": 0, "ing": 1, " ": 2, "s": 3}}, "sing in", [3, 1, 2, 0]),
        ({"stoi": {"A": 0, "a": 0, "b": 1}, "itos": {0: "a", 1: "b"}}, "ab", [0, 1]),
        (
            {"stoi": {b"a": 0, b"\xc3": 1, b"\xa9": 2, "the": 3, "\u6771": 4}},
            "athe\u00e9\u6771",
            [0, 3, 1, 2, 4],
        ),
        ({"stoi": {"\u2581": 1, "\u2581a": 2, "a": 3, "<s>": 0}}, "a a <s>", [3, 2, 1, 0]),
        ({"stoi": {"\u2581a": 0, "<0xC3>": 1, "<0xA9>": 2, "\u6771": 3}}, " a\u00e9\u6771", [0, 1, 2, 3]),
        (
            {"stoi": {"\u0120": 0, "\u0120a": 1, "a": 2, "\u00c3": 3, "\u00a9": 4, "<\u6771>": 5}},
            "a a \u00e9<\u6771>",
            [2, 1, 0, 3, 4, 5],
        ),
        ({"stoi": {"\u0120": 0, "a": 1, "\u2581": 2}}, "\u0120a\u2581", [0, 1, 2]),
    ],
)
def test_tables_that_prepare_scripts_write(meta, text, ids):
    found = of_meta(pickle.loads(pickle.dumps(meta)))
    words = tokenizer.load(found)
    assert words.encode(text) == ids and words.decode(ids) == text
    assert words.n_ids == max(found.content.values()) + 1
    assert bool(words.note) == any(len(token) > 1 for token in found.content)  # how text is divided
    recorded = json.loads(json.dumps(found.describe()))  # as in the manifest of a checkpoint in shards
    assert Vocabulary(**recorded) == found
    with pytest.raises(ValueError, match="that the vocabulary does not contain: 'Z'"):
        words.encode(text + " Z" if tokenizer.contains_words(found) else text + "Z")


def test_ids_that_have_the_same_text():
    found = of_meta({"stoi": {b"a": 0, b"b": 1, "a": 2}, "itos": {0: b"a", 1: b"b", 2: "a"}})
    words = tokenizer.load(found)
    assert words.encode("ab") == [2, 1] and words.decode([0, 1, 2]) == "aba" and words.n_ids == 3
    assert Vocabulary(**json.loads(json.dumps(found.describe()))) == found
    assert tokenizer.load(of_meta({"itos": ["x", "x", "a", "x"]})).decode([0, 2, 1, 3]) == "xaxx"


def test_an_encoding_next_to_a_table():
    meta = {"tokenizer": "tiktoken", "tiktoken_encoding": "gpt2", "vocab_size": 50257}
    part = {"itos": {11: ",", 16398: " drown"}}  # the tokens of a part of the text
    assert of_meta(meta | part) == Vocabulary("tiktoken", "gpt2")
    assert of_meta(meta | part | {"vocab_size": 2}).kind == "table"
    # parts of characters
    assert of_meta(meta | {"itos": ["\ufffd"] * 50257}) == Vocabulary("tiktoken", "gpt2")


def test_metadata_that_does_not_say_what_the_ids_mean(tmp_path):
    assert of_meta({}) is of_meta({"vocab_size": 90}) is of_meta({"tokenizer": "tiktoken"}) is None
    assert of_meta({"tokenizer": "tiktoken", "tiktoken_encoding": "gpt2"}) == Vocabulary("tiktoken", "gpt2")
    assert of_meta({"tokenizer": "cl100k_base", "tokenizer_size": 100277}) == Vocabulary(
        "tiktoken", "cl100k_base"
    )
    for meta, reason in (
        ({"tokenizer": "char"}, "there is no meta.pkl"),
        ({"tokenizer": "my-bpe"}, "'my-bpe', which is not an encoding of tiktoken, and nowhere contains no"),
        ({"stoi": {0: 1, 1: 2}}, "contains int, not text or bytes"),
        ({"itos": []}, "contains nothing, not text"),
        ({"itos": {0: None}}, "contains NoneType, not text"),
    ):
        found = of_meta(meta)
        assert found.kind == "unknown" and reason in found.content, meta
        with pytest.raises(ValueError, match="the ids cannot be decoded: .*; set --dataset="):
            tokenizer.load(found)
    assert vocabulary.resolve(None, 50304, "it") == Vocabulary("tiktoken", "gpt2")
    assert "it does not say what they mean, and 300 ids" in vocabulary.resolve(None, 300, "it").content


def test_metadata_of_different_data_sets(tmp_path):
    """
    A meta.pkl that does not belong to our meta.json is an error; a tokenizer.json that is missing is no
    encoding.
    """
    ours = {"dtype": "uint16", "vocab_size": 4, "tokenizer": "char", "tokenizer_size": 4, "source": {}}
    dataset(tmp_path, "abcd" * 100)
    (tmp_path / "meta.json").write_text(json.dumps(ours))
    assert open_dataset(str(tmp_path), 16).vocabulary.size == 4
    dataset(tmp_path, "abc" * 100)
    with pytest.raises(
        ValueError, match=r"meta\.pkl contains 3 tokens, but meta\.json says 4: they come from diff"
    ):
        open_dataset(str(tmp_path), 16)
    (tmp_path / "meta.json").write_text(json.dumps(ours | {"tokenizer": "tokenizer.json"}))
    found = open_dataset(str(tmp_path), 16).vocabulary
    assert found.kind == "unknown" and "a tokenizer.json, but" in found.content


def test_a_vocabulary_that_the_data_knows_only_in_part():
    """The run keeps its vocabulary; a note says that ids are unknown, too few for GPT-2's."""
    whole, part = Vocabulary("table", ABC), Vocabulary("table", {"a": 0, "b": 1})
    run = {"model_args": {"vocab_size": 3}, "config": {}, "isogpt": {"vocabulary": whole.describe()}}
    data = SimpleNamespace(vocabulary=part, folder="data/part", highest=1, digest="")
    source = SimpleNamespace(run=run)
    for is_resume in (True, False):
        assert vocabulary_for_run(data, source, "out", 3, is_resume) == (whole, [])
    data.vocabulary = Vocabulary("table", ABC | {"d": 3})
    assert vocabulary_for_run(data, source, "out", 4, True) == (data.vocabulary, [])
    data.vocabulary, data.highest = None, 57
    found, (note,) = vocabulary_for_run(data, None, "scratch", 50304, False)
    assert found == Vocabulary("tiktoken", "gpt2") and "GPT-2's, although the highest id is 57" in note
    assert note.endswith("--vocab_size=58")
    data.highest = 50256
    assert vocabulary_for_run(data, None, "scratch", 50304, False) == (found, [])


def test_no_tokens_next_to_the_metadata_of_earlier_ones(tmp_path, monkeypatch):
    """
    A prepare.py that is killed between two renames leaves no data set; a file that is named twice is read
    once.
    """
    (tmp_path / "a.txt").write_text("ABC" * 100)
    texts = bins.read_documents(f"{tmp_path}/a.txt,{tmp_path}/./a.txt,{tmp_path}/*.txt")
    assert list(texts) == ["ABC" * 100]
    rename = os.replace
    for last in range(4):
        bins.write_text_dataset(tmp_path, "ABC" * 100, {})
        renamed = []

        def killed_later(old, new, last=last, renamed=renamed):
            if len(renamed) == last:
                raise InterruptedError
            renamed.append(new)
            rename(old, new)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", killed_later)
            with pytest.raises(InterruptedError):
                bins.write_text_dataset(tmp_path, "XYZ" * 100, {})
        with pytest.raises(ValueError, match=r"no train\.bin in"):
            open_dataset(str(tmp_path), 16)


def test_ids_with_the_same_text_are_kept_by_prepare():
    """The metadata that bins.py writes decodes every id of a run's vocabulary."""
    words = Vocabulary("table", {"a": 0, "b": 1}, aliases={"a": [2]})
    for kind in ("table", "bytes"):
        files = {name: io.BytesIO() for name in ("train.bin", "val.bin", "meta.pkl", "meta.json")}
        bins.write_meta(files, replace(words, kind=kind), 3, {})
        found = of_meta(
            pickle.loads(files["meta.pkl"].getvalue()) | json.loads(files["meta.json"].getvalue())
        )
        assert (
            found.tokens == {0: "a", 1: "b", 2: "a"} and found.content == words.content and found.kind == kind
        )


def test_plain_classes_in_a_pickle_are_read_and_others_are_not(tmp_path):
    for value in (
        collections.Counter("abc"),
        np.array(["a"]),
        np.float64(1.5),
        collections.defaultdict(list, a=[1]),
    ):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"x": value}))
        assert np.all(read_meta(tmp_path)["x"] == value)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"x": collections.ChainMap()}))
    with pytest.raises(ValueError, match="ChainMap"):
        read_meta(tmp_path)


def test_tokenizer_files_next_to_the_data(tmp_path):
    table = Vocabulary("table", {"a": 0, "b": 1, "ab": 2})
    tokenizer.of_table(table).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "b"}}))
    found = of_meta({}, tmp_path)
    words = tokenizer.load(found)
    assert (words.encode("abb"), words.end_of_text, found.size) == ([2, 1], 1, 3)
    # metadata of prepare.py says what counts
    assert of_meta({"tokenizer": "gpt2", "tokenizer_size": 50257}, tmp_path).content == "gpt2"
    (tmp_path / "tokenizer.json").write_text('{"class_name": "Tokenizer"}')  # of Keras
    with pytest.raises(
        ValueError, match="cannot load the tokenizer of .*: it is not in the format of Hugging Face"
    ):
        of_meta({}, tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="a pointer of Git LFS, not the file itself: run git lfs pull in"):
        of_meta({}, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    for folder in (tmp_path, tmp_path / "tokenizer"):  # a file that the metadata names
        folder.mkdir(exist_ok=True)
        tokenizer.of_table(table).save(str(folder / "my-bpe.json"))
        assert tokenizer.load(of_meta({"tokenizer": "data/x/my-bpe.json"}, tmp_path)).encode("abb") == [2, 1]
        (folder / "my-bpe.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    assert of_meta({}, tmp_path) == Vocabulary("table", {"a": 0, "b": 1})
    tokens = {"h": 0, "i": 1, "hi": 2, "\u0120": 3, "<|endoftext|>": 4}
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "merges.txt").touch()
    for found in (of_meta({}, tmp_path), vocabulary_of_weights(str(tmp_path), 50257)):  # not GPT-2's
        assert (
            found.kind == "unknown"
            and "contains merges.txt, but neither a tokenizer.json nor" in found.content
        )
    assert of_meta({"stoi": {"a": 0}}, tmp_path).kind == "table"
    (tmp_path / "vocab.json").write_text(json.dumps(tokens))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    words = tokenizer.load(of_meta({}, tmp_path))
    assert words.encode("hi h<|endoftext|>") == [2, 3, 0, 4] and words.decode([2, 3, 0]) == "hi h"
    assert words.end_of_text == 4


def test_tokenizer_files_of_other_names(tmp_path):
    """They say what the ids mean, or at least that they are not GPT-2's."""
    table = Vocabulary("table", {"a": 0, "b": 1, "ab": 2})
    for name in ("wiki_tokenizer_8k.json", "bpe.json"):
        for pretty in (False, True):
            tokenizer.of_table(table).save(str(tmp_path / name), pretty=pretty)
            found = of_meta({"vocab_size": 8192}, tmp_path)
            assert tokenizer.load(found).encode("abb") == [2, 1]
        assert (
            of_meta({"tokenizer": "my own"}, tmp_path) == vocabulary_of_weights(str(tmp_path), 50257) == found
        )
        assert of_meta({"stoi": {"a": 0}}, tmp_path).kind == "table"
        assert of_meta({"tokenizer": "gpt2"}, tmp_path) == Vocabulary("tiktoken", "gpt2")
        (tmp_path / name).rename(tmp_path / f"{name}.old")
    for name in ("a.json", "b.json"):
        tokenizer.of_table(table).save(str(tmp_path / name))
    assert "contains several tokenizers, a.json, b.json: rename theirs to" in of_meta({}, tmp_path).content
    for name in ("a.json", "b.json", "meta.json", "tokens.json"):
        (tmp_path / name).write_text('{"version": "1.0", "rows": []}')
    assert of_meta({}, tmp_path) is None
    (tmp_path / "train.bin").touch()
    for name in ("spm.model", "tokenizer.pkl", "my_vocab.txt", "vocab.bpe", "merges_8k.txt"):
        (tmp_path / name).touch()
        found = of_meta({}, tmp_path)
        assert (
            found.kind == "unknown" and f"contains {name}, but neither a tokenizer.json nor" in found.content
        )
        assert '(if they are GPT-2\'s, write {"tokenizer": "gpt2"} to' in found.content
        (tmp_path / name).unlink()


def test_differences_between_vocabularies():
    abc = Vocabulary("table", ABC)
    assert tokenizer.difference(abc, Vocabulary("table", ABC | {"d": 3})) == ""
    assert tokenizer.difference(abc, Vocabulary("table", {"a": 0, "x": 2})) == "id 2 was 'c' and is 'x'"
    assert tokenizer.difference(abc, Vocabulary("unknown", "no metadata")) == ""
    assert (
        tokenizer.difference(abc, Vocabulary("tiktoken", "none"))
        == "the ids were those of a table and are none's"
    )
    converted = Vocabulary("tokenizer.json", tokenizer.of_table(abc).to_str())
    assert tokenizer.difference(abc, converted) == ""


def test_words_and_pieces_become_a_tokenizer_that_encodes_them():
    for table, text in (
        ({"cat": 0, "the": 1}, "the cat the"),
        ({"in": 0, "ing": 1, "s": 2, " ": 3}, "sing in s"),
    ):
        words, converted = (
            tokenizer.load(Vocabulary("table", table)),
            tokenizer.of_table(Vocabulary("table", table)),
        )
        assert converted.encode(text).ids == words.encode(text)
        assert converted.decode(words.encode(text)) == text and words.note


# ------------------------------------------------------------------------------------------------------------
# a run keeps its vocabulary


def test_a_run_keeps_its_vocabulary_wherever_the_data_has_gone(zygote, tmp_path, monkeypatch):
    """sample.py and export.py use it; a resume on data with other characters says so, and takes no step."""
    dataset(tmp_path / "data/mine")
    args = [*SHORT, "--dataset=mine"]
    zygote.train([*args, "--zero=1"], tmp_path)
    sample = ["--out_dir=out", "--start=w", "--num_samples=1", "--max_new_tokens=40", "--device=cpu"]
    before = zygote.start(sample, tmp_path, script="sample.py").wait().samples()
    dataset(tmp_path / "data/mine", TEXT.replace("w", "q").replace("h", "k"))
    assert zygote.start(sample, tmp_path, script="sample.py").wait().samples() == before
    run = zygote.train([*args, "--init_from=resume", "--max_iters=5"], tmp_path, nproc=2, ok=False)
    assert run.codes == [1, 1] and "iter 4:" not in run.text()
    assert (
        "do not mean what they meant to the checkpoint: id" in run.text() and "--tokenizer=out" in run.text()
    )
    other = zygote.train([*args, "--init_from=out", "--out_dir=new"], tmp_path).text()
    assert "note:    the token ids of" in other and "iter 3:" in other

    # the advice: prepare the text with the run's vocabulary
    shutil.rmtree(tmp_path / "data/mine")
    assert zygote.start(sample, tmp_path, script="sample.py").wait().samples() == before
    monkeypatch.chdir(tmp_path)
    export.convert("out", "hf")
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained("out/hf").encode("hello") == [4, 3, 5, 5, 6]
    shutil.copytree(
        REPO / "data/shakespeare_char", tmp_path / "data/mine", ignore=shutil.ignore_patterns("*.bin")
    )
    shutil.copy(REPO / "data/bins.py", tmp_path / "data")
    (tmp_path / "isogpt").symlink_to(REPO / "isogpt")
    (tmp_path / "own.txt").write_text("lower hold\n" * 300)
    prepare = [sys.executable, "data/mine/prepare.py", "--data_files=own.txt", "--tokenizer=out"]
    assert subprocess.run(prepare, capture_output=True, text=True).returncode == 0
    text = zygote.train([*args, "--init_from=resume", "--max_iters=5", "--zero=1"], tmp_path).text()
    assert "iter 5:" in text and "have changed since the checkpoint was written" in text


def test_a_checkpoint_of_nanogpt_uses_the_data_set_by_name(at, capsys, zygote, work):
    """
    A data set that was prepared again with a different number of ids is not used; --dataset gives the right
    one.
    """
    zygote.train([*SHORT], work)
    state = torch.load(work / "out/ckpt.pt", weights_only=True)
    del state["isogpt"]
    shutil.rmtree(work / "out")
    (work / "out").mkdir()
    torch.save(state, work / "out/ckpt.pt")
    at.set("os.getcwd", lambda: str(work))
    import os

    os.chdir(work)
    args = ["--device=cpu", "--num_samples=1", "--max_new_tokens=5", "--start=o"]
    script(at, "sample.py", args)
    assert capsys.readouterr().out.startswith("o")
    dataset(work / "data/kept", "".join(map(chr, range(32, 97))))
    dataset(work / "data/tiny", TEXT)
    for name, run in (("sample.py", args), ("export.py", ["out", "--to=hf"])):
        errors = script_that_fails(at, capsys, name, run).err if name == "sample.py" else ""
        if name == "export.py":
            with pytest.raises(ValueError) as error:
                export.convert("out", "hf")
            errors = str(error.value)
        assert "tiny uses 9 ids, but the run's model 65: the data set was prepared again since" in errors
    script(at, "sample.py", [*args[:-1], "--start=A", "--dataset=kept"])
    assert capsys.readouterr().out.startswith("A")
    assert export.convert("out", "hf", "kept").name == "hf"


def test_a_tokenizer_of_transformers_stays_with_the_weights(at, capsys, zygote, tmp_path):
    """
    export.py --from=hf, prepare.py --tokenizer=FOLDER, training and sampling use the folder's tokenizer.json.
    """
    import os

    from test_sample import folder_of

    folder = folder_of(tmp_path, "llama")
    os.chdir(tmp_path)
    export.convert_hf(str(folder))
    (folder / "tokenizer.json").rename(tmp_path / "moved.json")
    args = ["--device=cpu", "--num_samples=1", "--max_new_tokens=20", "--start=cab"]
    script(at, "sample.py", [f"--out_dir={folder}", *args])
    assert set(capsys.readouterr().out.splitlines()[0]) <= set("abcdef")
    # ids without metadata belong to the weights' tokenizer
    data = tmp_path / "data/ids"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        np.arange(400, dtype=np.uint16).__mod__(6).tofile(data / f"{split}.bin")
    short = ["--n_layer=1", "--block_size=16", "--eval_interval=4", "--max_iters=3"]
    zygote.train([*short, "--dataset=ids", f"--init_from={folder}", "--out_dir=tuned"], tmp_path)
    script(at, "sample.py", ["--out_dir=tuned", *args])
    assert set(capsys.readouterr().out.splitlines()[0]) <= set("abcdef")


def test_special_tokens_and_stop(at, capsys, zygote, work):
    """
    One rule for prompts and data: the text of a special token is the token, unless special_tokens is False.
    """
    words = tokenizer.load(Vocabulary("tokenizer.json", special_json()))
    plain = tokenizer.load(Vocabulary("tokenizer.json", special_json()), special_tokens=False)
    assert (words.encode("a<e>b"), plain.encode("a<e>b")) == ([0, 5, 1], [0, 2, 3, 4, 1])
    # a prompt is continued: it does not end with the token that the tokenizer adds at the end of a document
    for template, ids, begun in (
        ("$A <e>", [0, 5, 1, 5], [0, 5, 1]),
        ("<e> $A", [5, 0, 5, 1], [5, 0, 5, 1]),
        ("<e> $A <e>", [5, 0, 5, 1, 5], [5, 0, 5, 1]),
    ):
        adding = tokenizer.load(Vocabulary("tokenizer.json", special_json(template)))
        assert (adding.encode("a<e>b"), adding.begin("a<e>b")) == (ids, begun)
    assert (adding.encode(""), adding.begin(""), adding.begin("a<e>")) == ([5, 5], [5], [5, 0, 5])
    assert words.begin("a<e>b") == [0, 5, 1]
    assert tokenizer.cut_at("one STOP two STOP", "STOP", 0) == "one "
    assert (
        tokenizer.cut_at("STOP two STOP", "STOP", 4) == "STOP two "
        and tokenizer.cut_at("one", "", 0) == "one"
    )
    zygote.train(SHORT, work)
    args = ["--out_dir=out", "--start=A", "--device=cpu", "--num_samples=1", "--max_new_tokens=60"]
    whole = zygote.start(args, work, script="sample.py").wait().samples().partition("\n")[2]
    letter = whole[20]
    cut = (
        zygote.start([*args, f"--stop={letter}"], work, script="sample.py")
        .wait()
        .samples()
        .partition("\n")[2]
    )
    assert cut.partition("\n---")[0] == whole[0] + whole[1:].partition(letter)[0]


def special_json(template="$A"):
    """
    A tokenizer.json with the tokens a, b, <, e, > and the special token <e>, which it may add to a text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate("ab<e>")}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(["<e>"])
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<e>", 5)])
    return made.to_str()


def test_a_model_with_too_few_ids(zygote, work, tmp_path):
    """
    Training on more ids than the model has is an error, and so is a data set with more ids than vocab_size.
    """
    zygote.train(SHORT, work)
    dataset(work / "data/more", "".join(map(chr, range(32, 127))))
    run = zygote.train([*SHORT, "--dataset=more", "--init_from=out", "--out_dir=new"], work, ok=False)
    assert "token id 94, but the checkpoint's vocabulary size is 65" in run.text()
    run = zygote.train([*TINY, "--dataset=more", "--vocab_size=80", "--out_dir=new"], work, ok=False)
    assert "describes 95 token ids, but the vocabulary size is 80: set --vocab_size=95 or more" in run.text()
