"""
What token ids mean: read from metadata, recorded by a run, and used by sample.py, export.py and prepare.py.
"""

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import script, script_that_fails

import export
from isogpt.checkpoint.run_vocabulary import vocabulary_for_run, vocabulary_of_weights
from isogpt.data import tokenizer, vocabulary
from isogpt.data.dataset import open_dataset
from isogpt.data.vocabulary import Vocabulary, gpt2_or_unknown

TEXT = "hello world\n" * 300
ABC = {c: i for i, c in enumerate("abc")}
SHORT = ["--n_layer=1", "--n_embd=16", "--block_size=16", "--eval_interval=4", "--max_iters=3"]
SHORT += ["--out_dir=out"]


def of_meta(meta, folder="nowhere"):
    return vocabulary.vocabulary_of_data(meta, Path(folder))


def dataset(folder, text=TEXT):
    """A data set of characters, as nanoGPT's prepare.py writes one."""
    folder.mkdir(parents=True, exist_ok=True)
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = np.array([stoi[c] for c in text], dtype=np.uint16)
    for split in ("train", "val"):
        ids.tofile(folder / f"{split}.bin")
    itos = {i: c for c, i in stoi.items()}
    meta = {"vocab_size": len(stoi), "stoi": stoi, "itos": itos}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


# ------------------------------------------------------------------------------------------------------------
# reading metadata


@pytest.mark.parametrize(
    "meta",
    [
        {"itos": {1: "a", 2: "b", 3: "c"}, "stoi": {"a": 1, "b": 2, "c": 3}},
        {"stoi": {"a": 1, "b": 2, "c": 3}},
        {"itos": {1: "a", 2: "b", 3: "c"}, "tokens": 99},
        {"itos": ["<pad>", "a", "b", "c"]},
    ],
)
def test_nanogpts_tables(meta):
    table = of_meta(pickle.loads(pickle.dumps(meta)))
    loaded = tokenizer.load(table)
    assert loaded.encode("cab") == [3, 1, 2] and loaded.decode([3, 1, 2]) == "cab" and loaded.n_ids == 4
    recorded = json.loads(json.dumps(table.describe()))  # as in the manifest of a checkpoint in shards
    assert Vocabulary(**recorded) == table
    with pytest.raises(ValueError, match="characters that the vocabulary does not contain: 'Z'"):
        loaded.encode("cabZ")
    # text is never encoded to <pad>
    assert ("text is never encoded to them" in loaded.note) == ("<pad>" in table.content)


def test_texts_that_have_the_same_id():
    loaded = tokenizer.load(of_meta({"stoi": {"A": 0, "a": 0, "b": 1}, "itos": {0: "a", 1: "b"}}))
    assert loaded.encode("Aab") == [0, 0, 1] and loaded.decode([0, 1]) == "ab"


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"tokenizer": "char"}, "there is no meta.pkl"),
        ({"tokenizer": "tokenizer.json"}, "they belong to a tokenizer.json, but nowhere contains none"),
        ({"stoi": {b"a": 0}}, "do not contain text with an id each"),
        ({"stoi": {"a": -1}}, "do not contain text with an id each"),
        ({"itos": []}, "do not contain text with an id each"),
        ({"itos": "abc"}, "are not tables"),
        ({"stoi": {"a": 2, "b": 1}, "itos": {0: "a", 1: "b", 2: "a"}}, "contradict each other"),
    ],
)
def test_metadata_that_does_not_say_what_the_ids_mean(meta, reason):
    unknown = of_meta(meta)
    assert unknown.kind == "unknown" and reason in unknown.content
    with pytest.raises(ValueError, match="the ids cannot be decoded: .*; set --dataset="):
        tokenizer.load(unknown)


def test_ids_without_a_record():
    """They are GPT-2's if the model is large enough, and not much larger."""
    assert of_meta({}) is of_meta({"vocab_size": 90}) is None
    for vocab_size in (50257, 50304, 51200):
        assert gpt2_or_unknown(vocab_size, "it") == Vocabulary("tiktoken", "gpt2")
    for vocab_size in (300, 50256, 51201):
        unknown = gpt2_or_unknown(vocab_size, "it")
        assert f"it does not say what they mean, and {vocab_size} ids do not fit" in unknown.content


def test_the_order_of_precedence(tmp_path):
    """What meta.json names, tokenizer.json, the tables; next to a tokenizer of a different form, nothing."""
    tables = {"stoi": ABC, "vocab_size": 50257}
    assert vocabulary_of_weights(str(tmp_path), 50257) == Vocabulary("tiktoken", "gpt2")
    assert of_meta({"tokenizer": "cl100k_base"} | tables, tmp_path) == Vocabulary("tiktoken", "cl100k_base")
    assert of_meta(tables, tmp_path) == of_meta({"tokenizer": "char"} | tables, tmp_path)
    for name in ("merges.txt", "vocab.json", "spm.model", "vocab.bpe"):
        (tmp_path / name).touch()
        assert of_meta(tables, tmp_path).content == ABC
        for unknown in (of_meta({}, tmp_path), vocabulary_of_weights(str(tmp_path), 50257)):  # not GPT-2's
            assert unknown.kind == "unknown"
            assert f"contains {name}, but only a tokenizer.json is read" in unknown.content
        assert of_meta({"tokenizer": "gpt2"}, tmp_path) == Vocabulary("tiktoken", "gpt2")
        (tmp_path / name).unlink()
    for name in ("meta.json", "tokens.json", "tokenizer_config.json", "tokenizer.py", "train.bin"):
        (tmp_path / name).touch()
    assert of_meta({}, tmp_path) is None
    tokenizer.of_table(Vocabulary("table", ABC)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "merges.txt").touch()
    for meta in ({}, tables, {"tokenizer": "tokenizer.json"} | tables):
        assert of_meta(meta, tmp_path).kind == "tokenizer.json"
    assert of_meta({"tokenizer": "gpt2"}, tmp_path) == Vocabulary("tiktoken", "gpt2")
    assert of_meta({"tokenizer": "char"} | tables, tmp_path).kind == "table"


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
    with pytest.raises(ValueError, match=r"meta\.pkl contains 3 tokens, but meta\.json says 4"):
        open_dataset(str(tmp_path), 16)
    (tmp_path / "meta.json").write_text(json.dumps(ours | {"tokenizer": "tokenizer.json"}))
    unknown = open_dataset(str(tmp_path), 16).vocabulary
    assert unknown.kind == "unknown" and "a tokenizer.json, but" in unknown.content


def test_a_vocabulary_that_the_data_knows_only_in_part():
    """The run keeps its vocabulary; a note says that ids are unknown, too few for GPT-2's."""
    whole, part = Vocabulary("table", ABC), Vocabulary("table", {"a": 0, "b": 1})
    run = {"model_args": {"vocab_size": 3}, "config": {}, "isogpt": {"vocabulary": whole.describe()}}
    data = SimpleNamespace(
        further=(), vocabulary=part, folder="data/part", highest=1, digest="", is_mixture=False
    )
    source = SimpleNamespace(run=run)
    for is_resume in (True, False):
        assert vocabulary_for_run(data, source, "out", 3, is_resume) == (whole, [])
    data.vocabulary = Vocabulary("table", ABC | {"d": 3})
    assert vocabulary_for_run(data, source, "out", 4, True) == (data.vocabulary, [])
    data.vocabulary, data.highest = None, 57
    gpt2, (note,) = vocabulary_for_run(data, None, "scratch", 50304, False)
    assert gpt2 == Vocabulary("tiktoken", "gpt2") and "GPT-2's, although the highest id is 57" in note
    assert note.endswith("--vocab_size=58")
    data.highest = 50256
    assert vocabulary_for_run(data, None, "scratch", 50304, False) == (gpt2, [])


def test_a_tokenizer_json_next_to_the_data(tmp_path):
    tokenizer.of_table(Vocabulary("table", ABC)).save(str(tmp_path / "tokenizer.json"))
    for token, end in (({"content": "b"}, 1), ("c", 2), ("d", None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        vocabulary = of_meta({}, tmp_path)
        loaded = tokenizer.load(vocabulary)
        assert (loaded.encode("cab"), loaded.end_of_text, vocabulary.size) == ([2, 0, 1], end, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"class_name": "Tokenizer"}', "it is not in the format of Hugging Face's tokenizers"),  # of Keras
        ("version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS, .*: run git lfs pull in"),
    ],
)
def test_a_tokenizer_json_of_a_different_form(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=f"cannot load the tokenizer of {tmp_path}: {message}"):
        of_meta({}, tmp_path)


def test_differences_between_vocabularies():
    abc = Vocabulary("table", ABC)
    assert tokenizer.difference(abc, Vocabulary("table", ABC | {"d": 3})) == ""
    assert tokenizer.difference(abc, Vocabulary("table", {"a": 0, "x": 2})) == "id 2 was 'c' and is 'x'"
    assert tokenizer.difference(abc, Vocabulary("unknown", "no metadata")) == ""
    assert tokenizer.difference(abc, Vocabulary("tiktoken", "none")) == "the tokenizer was char and is none"
    converted = Vocabulary("tokenizer.json", tokenizer.of_table(abc).to_str())
    assert tokenizer.difference(abc, converted) == ""


# ------------------------------------------------------------------------------------------------------------
# a run keeps its vocabulary


def test_a_run_keeps_its_vocabulary_wherever_the_data_has_gone(zygote, tmp_path, monkeypatch):
    """sample.py and export.py use it; a resume on data with other characters says so, and takes no step."""
    dataset(tmp_path / "data/mine")
    args = [*SHORT, "--dataset=mine"]
    zygote.train([*args, "--zero=1"], tmp_path)
    sample = ["--out_dir=out", "--start=w", "--num_samples=1", "--max_new_tokens=40", "--device=cpu"]

    def written(*more):
        run = zygote.start([*sample, *more], tmp_path, script="sample.py").wait()
        return run.samples().partition("\n")[2]

    before = written()
    stop = before[20]
    assert written(f"--stop={stop}").partition("\n---")[0] == before[0] + before[1:].partition(stop)[0]
    dataset(tmp_path / "data/mine", TEXT.replace("w", "q").replace("h", "k"))
    assert written() == before
    run = zygote.train([*args, "--init_from=resume", "--max_iters=5"], tmp_path, nproc=2, ok=False)
    assert run.codes == [1, 1] and "iter 4:" not in run.text()
    assert "do not mean what they mean in the checkpoint: id" in run.text()
    assert "--tokenizer=out" in run.text()
    other = zygote.train([*args, "--init_from=out", "--out_dir=new"], tmp_path).text()
    assert "note:    the token ids of" in other and "iter 3:" in other

    # the advice: prepare the text with the run's vocabulary
    shutil.rmtree(tmp_path / "data/mine")
    assert written() == before
    monkeypatch.chdir(tmp_path)
    export.convert("out", "hf")
    from tokenizers import Tokenizer

    assert Tokenizer.from_file("out/hf/tokenizer.json").encode("hello").ids == [4, 3, 5, 5, 6]
    (tmp_path / "own.txt").write_text("lower hold\n" * 300)
    prepare = ["--data_files=own.txt", "--tokenizer=out", "--out=data/mine"]
    zygote.start(prepare, tmp_path, script="data/shakespeare_char/prepare.py").wait()
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
    at.chdir(work)
    args = ["--device=cpu", "--num_samples=1", "--max_new_tokens=5"]
    script(at, "sample.py", [*args, "--start=o"])
    assert capsys.readouterr().out.startswith("o")
    dataset(work / "data/kept", "".join(map(chr, range(32, 97))))
    dataset(work / "data/tiny", TEXT)
    said = "tiny uses 9 ids, but the run's model 65: the data set has been prepared again since then"
    assert said in script_that_fails(at, capsys, "sample.py", args).err
    with pytest.raises(ValueError, match=said):
        export.convert("out", "hf")
    script(at, "sample.py", [*args, "--start=A", "--dataset=kept"])
    assert capsys.readouterr().out.startswith("A")
    assert export.convert("out", "hf", "kept").name == "hf"


def test_a_tokenizer_of_transformers_stays_with_the_weights(at, capsys, zygote, tmp_path):
    """
    export.py --from=hf, prepare.py --tokenizer=FOLDER, training and sampling use the folder's tokenizer.json.
    """
    from test_sample import folder_of

    folder = folder_of(tmp_path, "llama")
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


def test_special_tokens_and_stop():
    """
    One rule for prompts and data: the text of a special token is the token, unless special_tokens is False.
    """
    special = tokenizer.load(Vocabulary("tokenizer.json", special_json()))
    plain = tokenizer.load(Vocabulary("tokenizer.json", special_json()), special_tokens=False)
    assert (special.encode("a<e>b"), plain.encode("a<e>b")) == ([0, 5, 1], [0, 2, 3, 4, 1])
    # a prompt is continued: it does not end with the token that the tokenizer adds at the end of a document
    for template, ids, begun in (
        ("$A <e>", [0, 5, 1, 5], [0, 5, 1]),
        ("<e> $A", [5, 0, 5, 1], [5, 0, 5, 1]),
        ("<e> $A <e>", [5, 0, 5, 1, 5], [5, 0, 5, 1]),
    ):
        adding = tokenizer.load(Vocabulary("tokenizer.json", special_json(template)))
        assert (adding.encode("a<e>b"), adding.begin("a<e>b")) == (ids, begun)
    assert (adding.encode(""), adding.begin(""), adding.begin("a<e>")) == ([5, 5], [5], [5, 0, 5])
    assert special.begin("a<e>b") == [0, 5, 1]
    assert tokenizer.cut_at("one STOP two STOP", "STOP", 0) == "one "
    assert (
        tokenizer.cut_at("STOP two STOP", "STOP", 4) == "STOP two "
        and tokenizer.cut_at("one", "", 0) == "one"
    )


def special_json(template="$A"):
    """
    A tokenizer.json with the tokens a, b, <, e, > and the special token <e>, which it may add to a text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    json_tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate("ab<e>")}, unk_token="?"))
    json_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    json_tokenizer.add_special_tokens(["<e>"])
    json_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<e>", 5)]
    )
    return json_tokenizer.to_str()
