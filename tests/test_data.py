"""
The prepare.py scripts: their output, and their error messages. See test_prepare.py for kills and for several
processes.
"""

import hashlib
import json
import os
import pickle
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest.mock import patch
from urllib.response import addinfourl

import numpy as np
import pytest
from runs import REPO, SHAKESPEARE, SHARED, accepted

from isogpt.data.vocabulary import of_characters

TOKENIZERS = Path(os.environ.get("TIKTOKEN_CACHE_DIR", SHARED / "tiktoken_cache"))
GPT2_FILE = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"  # tiktoken's name for the cached vocab.bpe
EOT = 50256

needs_shakespeare = pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f"no {SHAKESPEARE}")
no_gpt2 = f"GPT-2's tokenizer is not in {TOKENIZERS} (TIKTOKEN_CACHE_DIR)"
needs_gpt2 = pytest.mark.skipif(not (TOKENIZERS / GPT2_FILE).exists(), reason=no_gpt2)

sys.path.insert(0, str(REPO / "data"))
import bins  # noqa: F401 (which the scripts import, also those of a copy)


@pytest.fixture(autouse=True)
def cached_tokenizers(monkeypatch):
    """Use the cached tokenizer."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(TOKENIZERS))


@pytest.fixture
def data(tmp_path):
    """A copy of data/ without prepared files, next to the package that it imports."""
    (tmp_path / "isogpt").symlink_to(REPO / "isogpt")
    ignore = shutil.ignore_patterns("*.bin", "meta.*", "input.txt", "*.tmp", "__pycache__")
    return shutil.copytree(REPO / "data", tmp_path / "data", ignore=ignore)


def prepare(data, name, *args, cwd=None, **env):
    """Run data/<name>/prepare.py in a separate process, which must succeed; returns what it printed."""
    command = [sys.executable, str(data / name / "prepare.py"), *args]
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def run(script, *args):
    """Run a script of data/ in this process, which must succeed."""
    with patch.object(sys, "argv", [str(script), *map(str, args)]), pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert not stop.value.code


def error_of(script, *args):
    """The line with which a script that must fail ends."""
    with patch.object(sys, "argv", [str(script), *map(str, args)]), pytest.raises(SystemExit) as stop:
        with redirect_stderr(StringIO()) as said:
            runpy.run_path(str(script), run_name="__main__")
    (line,) = said.getvalue().splitlines()
    assert stop.value.code == 1
    return line


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The file that every address of the network leads to, if it exists."""

    class Handler(urllib.request.HTTPSHandler):
        def https_open(self, request):
            answer = addinfourl(open(tmp_path / "served", "rb"), {}, request.full_url, 200)
            answer.msg = "OK"
            return answer

    monkeypatch.setattr(urllib.request, "_opener", urllib.request.build_opener(Handler))
    return tmp_path / "served"


def write_tokenizer(folder, vocab):
    """Write the tokenizer.json of a {word: id}, in which <|endoftext|> is a special token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_jsonl(path, documents):
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents) + "\n")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def read(folder):
    """
    Return meta.json, the ids of train.bin and those of val.bin; check that the file sizes match meta.json.
    """
    meta = json.loads((folder / "meta.json").read_text())
    train, val = (np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"]) for split in ("train", "val"))
    assert (len(train), len(val)) == (meta["train_tokens"], meta["val_tokens"])
    assert max(train.max(), val.max()) < meta["tokenizer_size"] <= meta["vocab_size"]
    return meta, train, val


def decode_characters(folder):
    """Return meta.json and the text of a character data set, decoded with its meta.pkl."""
    meta, train, val = read(folder)
    vocabulary = pickle.loads((folder / "meta.pkl").read_bytes())
    assert type(vocabulary) is dict and set(vocabulary) == {"vocab_size", "itos", "stoi"}
    assert {(type(i), type(c)) for i, c in vocabulary["itos"].items()} == {(int, str)}
    assert vocabulary["stoi"] == {c: i for i, c in vocabulary["itos"].items()}
    assert vocabulary["vocab_size"] == len(vocabulary["itos"]) == meta["vocab_size"] == meta["tokenizer_size"]
    text = "".join(vocabulary["itos"][i] for i in np.append(train, val).tolist())
    val = text[meta["train_tokens"] :].encode()
    assert (hashlib.sha256(val).hexdigest(), len(val)) == (meta["val_text"], meta["val_bytes"])
    return meta, text


def decode_documents(ids):
    """Decode GPT-2 ids into documents, each of which ends with the end-of-text token."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    ends = np.flatnonzero(ids == EOT)
    assert ends[-1] == len(ids) - 1
    return [encoding.decode(part[part != EOT].tolist()) for part in np.split(ids, ends[:-1] + 1)]


def trains_on_a_cpu(output, name):
    """The last line is a command that train.py accepts, which needs no login."""
    command = output.splitlines()[-1].removeprefix("next: python train.py ")
    config = accepted("train.py", *shlex.split(command))
    assert config["dataset"] == name and not config["wandb_log"]
    # 10 million multiplications for each token take a core milliseconds
    assert config["n_layer"] * config["n_embd"] ** 2 * 12 < 10**7 and config["block_size"] <= 256


# ----- character data sets


def test_stdlib_char_is_the_same_every_time(data, tmp_path):
    """It is determined by the text, which a process with other hashes and another locale also reads."""
    output = prepare(data, "stdlib_char", cwd=tmp_path, PYTHONHASHSEED="1", LC_ALL="C")
    files = {"prepare.py", "train.bin", "val.bin", "meta.pkl", "meta.json"}
    assert set(contents(data / "stdlib_char")) == files
    meta, text = decode_characters(data / "stdlib_char")
    assert text.isascii() and "\r" not in text and "import" in text
    assert meta["train_tokens"] == int(len(text) * 0.9) and meta["tokenizer"] == "char"
    trains_on_a_cpu(output, "stdlib_char")


def test_stdlib_char_reads_only_the_library(tmp_path, monkeypatch):
    library = tmp_path / "library"
    texts = {"B.py": "B\r\n", "a.py": "a\n", "a/b.py": "ab\n", "a/testing.py": "", "latin.py": "é"}
    left = "test/x.py a/tests/x.py a/idle_test/x.py __pycache__/x.py site-packages/x.py a/test_x.py x.pyc"
    left += " dist-packages/x.py ensurepip/_bundled/x.py _sysconfigdata_x.py config-3.11-x/x.py"
    for name, text in (texts | dict.fromkeys(left.split(), "LEFT OUT")).items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(text.encode())
    monkeypatch.setattr(sysconfig, "get_path", lambda _: library)
    run(REPO / "data/stdlib_char/prepare.py", "--val_fraction=0.5", f"--out={tmp_path}")
    meta, text = decode_characters(tmp_path)
    assert (text, meta["source"]["files"]) == ("B\n\na\n\nab\n\n", 4)


@needs_shakespeare
@needs_gpt2
def test_shakespeare_has_nanogpts_counts(data, tmp_path):
    import tiktoken

    text = SHAKESPEARE.read_text()
    for name in ("shakespeare_char", "shakespeare"):
        shutil.copyfile(SHAKESPEARE, data / name / "input.txt")
        (data / name / "meta.pkl").write_bytes(b"of an earlier data set")
        trains_on_a_cpu(prepare(data, name, cwd=tmp_path), name)
        assert not list((data / name).glob("*.tmp"))

    meta, decoded = decode_characters(data / "shakespeare_char")
    assert (meta["vocab_size"], meta["train_tokens"], meta["val_tokens"]) == (65, 1_003_854, 111_540)
    assert meta["dtype"] == "uint16" and decoded == text
    meta, train, val = read(data / "shakespeare")
    assert (meta["train_tokens"], meta["val_tokens"], meta["dtype"]) == (301_966, 36_059, "uint16")
    assert (meta["vocab_size"], meta["tokenizer_size"], meta["tokenizer"]) == (50304, 50257, "gpt2")
    assert tiktoken.get_encoding("gpt2").decode([*train.tolist(), *val.tolist()]) == text
    assert not (data / "shakespeare" / "meta.pkl").exists()


def test_download(data, served):
    folder = data / "shakespeare_char"
    served.write_text("To be, or not to be")
    run(folder / "prepare.py")
    assert decode_characters(folder)[1] == (folder / "input.txt").read_text() == served.read_text()


# ----- document data sets


@needs_gpt2
def test_documents_keep_their_order(tmp_path):
    """With several processes, of which the first has by far the most to do, and in shards or not."""
    import pyarrow
    import pyarrow.parquet

    documents = ["first " * 500_000, ""]
    documents += [f"Document {i}: naïve <|endoftext|>\n" * (i % 7 * 300 + 1) for i in range(120)]
    write_jsonl(tmp_path / "a.jsonl", [*documents[:60], ""])
    table = pyarrow.table({"text": documents[60:-1]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    (tmp_path / "c.txt").write_text(documents[-1])
    # each once, and sorted
    files = ",".join(str(tmp_path / name) for name in ("c.txt", "*.parquet", "a.jsonl", "?.jsonl"))
    options = [f"--data_files={files}", "--val_fraction=0.3", "--special_tokens=False"]
    for out, more in (("one", ["--num_proc=2"]), ("shards", ["--num_proc=1", "--shard_tokens=100_000"])):
        run(REPO / "data/openwebtext/prepare.py", *options, f"--out={tmp_path / out}", *more)
    meta, train, val = read(tmp_path / "one")
    expected = list(filter(None, documents))
    assert (meta["documents"], meta["vocab_size"], meta["dtype"]) == (len(expected), 50304, "uint16")
    sides = [[expected.index(text) for text in decode_documents(ids)] for ids in (train, val)]
    assert sides == [sorted(sides[0]), sorted(sides[1])] and sorted(sum(sides, [])) == [*range(121)]
    assert 20 < len(sides[1]) < 60
    one, shards = contents(tmp_path / "one"), contents(tmp_path / "shards")
    for name in ("meta.json", "documents.bin"):
        assert one[name] == shards[name]
    for split in ("train", "val"):
        parts = [shards[name] for name in sorted(shards) if name.startswith(split)]
        assert b"".join(parts) == one[f"{split}.bin"]
        assert {*map(len, parts[:-1])} == {200_000} and 0 < len(parts[-1]) <= 200_000


def test_ids_above_65535(tmp_path):
    write_tokenizer(tmp_path, {"?": 0, "one": 70000, "two": 70001, "<|endoftext|>": 70300})
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    files = f"--data_files={tmp_path}/a.jsonl", "--text_key=body"
    run(REPO / "data/fineweb/prepare.py", *files, f"--tokenizer={tmp_path}", f"--out={tmp_path / 'out'}")
    meta, train, val = read(tmp_path / "out")
    assert [meta[key] for key in ("dtype", "vocab_size", "tokenizer_size")] == ["uint32", 70336, 70301]
    assert (meta["tokenizer"], meta["documents"]) == ("tokenizer.json", 2)
    assert (train.tolist(), val.tolist()) == ([70000, 70300], [70001, 70300])


@needs_gpt2
def test_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"page {i}" for i in range(10)], "url": ["u"] * 10}
    calls, streamed = [], {"split": "train", "streaming": True}

    def load_dataset(path, **options):
        calls.append((path, options))
        return datasets.Dataset.from_dict(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("openwebtext", "fineweb", "tinystories"):
        options = ["--num_proc=1", "--val_fraction=0.2", "--tokenizer=gpt2", f"--out={tmp_path / name}"]
        run(REPO / "data" / name / "prepare.py", *options)
        meta, train, val = read(tmp_path / name)
        assert sorted(decode_documents(train) + decode_documents(val)) == rows["text"]
        assert meta["documents"] == 10
    assert dict(calls) == {
        "Skylion007/openwebtext": {"revision": "refs/convert/parquet"} | streamed,
        "HuggingFaceFW/fineweb-edu": {"name": "sample-10BT"} | streamed,
        "roneneldan/TinyStories": streamed,
    }


def test_a_stream_of_the_hub_that_breaks_is_one_line(tmp_path, monkeypatch):
    """Its libraries also raise errors that are neither of the system nor of a value."""
    datasets = pytest.importorskip("datasets")

    def rows():
        yield from ({"text": f"page {i}"} for i in range(1500))
        raise RuntimeError("the client has been closed")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: stream)
    said = error_of(REPO / "data/fineweb/prepare.py", "--train_tokenizer=300", f"--out={tmp_path}")
    assert said == "error: HuggingFaceFW/fineweb-edu, document 1001: the client has been closed"


# ----- where it is written


def test_links_and_other_folders(data, tmp_path):
    """A script runs from any folder, also through a link to its folder, and writes where --out says."""
    write_jsonl(tmp_path / "a.jsonl", ["some text, and more of it"] * 99)
    disk = tmp_path / "disk" / "mine"
    shutil.copytree(data / "shakespeare_char", disk)
    (data / "mine").symlink_to(disk)

    for name, out, dataset in (
        ("mine", [], "mine"),
        ("tinystories", ["--num_proc=1"], "tinystories"),
        ("shakespeare_char", ["--out=new folder/x"], f"{tmp_path}/new folder/x"),
    ):
        trains_on_a_cpu(prepare(data, name, "--data_files=a.jsonl", *out, cwd=tmp_path), dataset)
    assert (disk / "train.bin").exists()
    assert (tmp_path / "new folder" / "x" / "meta.json").exists()
    assert not (data / "shakespeare_char" / "train.bin").exists()


# ----- error messages

ANY = {  # arguments: message, of each kind of data set
    "--data_files=two.jsonl,tables.csv": "there is no file at 'tables.csv'",
    "--data_files=key.jsonl": "key.jsonl, document 2: no string at 'text' in {'content': .* set --text_key=",
    "--data_files=two.jsonl --val_fraction=1.5": "--val_fraction must be between 0 and 1",
    "--data_files=letter.txt": "train.bin or val.bin would be empty: use more text",
    "--data_files=latin.txt": "latin.txt, document 1: .* [Ss]ave it as UTF-8",
    "--data_files=null.parquet --text_key=body": ".*: no column 'body' in .'text'.: set --text_key=",
    "--data_files=two.jsonl --tokenizer=folder": "folder has no tokenizer.json and no checkpoint: type ",
    "--data_files=two.jsonl --tokenizer=flder": "tiktoken cannot load 'flder' .*, or, .* a folder",
}
DOCUMENTS = {
    "--data_files=latin.txt --tokenizer=char": "--tokenizer=char is for one text: ",  # before it is read
    "--data_files=two.jsonl --tokenizer=characters": "the tokenizer lacks .* set --tokenizer=gpt2",
}
KINDS = {"shakespeare_char": ANY | {"": ".*No such file"}, "openwebtext": ANY | DOCUMENTS}


@pytest.fixture
def inputs(tmp_path, monkeypatch, served):
    """Files for --data_files in the working folder."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("characters").mkdir()
    for name, content in {
        "two.jsonl": '{"text": "one"}\n{"text": "two"}\n',
        "key.jsonl": '{"text": "one"}\n{"content": "two", "id": 3}\n',
        "letter.txt": "x",
        "latin.txt": "\xe9",
        "table.csv": "text",
        "characters/tokenizer.json": of_characters({"a": 0}).content,
    }.items():
        Path(name).write_text(content, encoding="latin-1")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None, "two"]}), "null.parquet")


@needs_gpt2
@pytest.mark.parametrize("name", KINDS)
def test_an_error_is_one_line_and_leaves_the_folder(data, inputs, name):
    before = contents(data / name)
    for args, message in KINDS[name].items():
        line = error_of(data / name / "prepare.py", *args.split())
        assert re.match(f"error: .*{message}", line), line
    assert contents(data / name) == before


def test_what_is_read_with_a_note(inputs, capsys):
    """Null is no text; text that the tokenizer loses."""
    write_tokenizer(Path("folder"), {"one": 0, "two": 1, "?": 2})
    for encoding in ("utf-8-sig", "utf-16"):  # each text begins with a byte order mark
        Path(f"{encoding}.txt").write_text("one two\nONE\r\n" * 80, encoding=encoding, newline="")
    text = [0, 1, 2] * 80
    for file, ids in {"null.parquet": [0, 1], "utf-8-sig.txt": text, "utf-16.txt": text}.items():
        options = [f"--data_files={file}", "--tokenizer=folder", "--val_fraction=0.5"]
        run(REPO / "data/shakespeare/prepare.py", *options, "--out=out")
        _, train, val = read(Path("out"))
        assert [*train, *val] == ids
    assert "note: the tokenizer does not keep the text" in capsys.readouterr().out
    words = "This is Some Text"
    write_tokenizer(Path("words"), {word: i for i, word in enumerate(words.split())} | {"?": 4})
    for between in (" ", "\n", "  "):  # the decoder writes a space between two words
        Path("lines.txt").write_text(between.join([words] * 80))
        options = ["--data_files=lines.txt", "--tokenizer=words"]
        run(REPO / "data/shakespeare/prepare.py", *options, "--out=out")
        assert ("note: " in capsys.readouterr().out) == (between != " ")


def test_chats_and_instructions(at):
    """What data/README.md shows, which refuses what it does not know."""
    chats = (REPO / "data" / "README.md").read_text().partition("### Chats and instructions")[2]
    snippet = chats.split("```")[1].removeprefix("python")
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    alpaca = {"instruction": "add", "output": "3", "id": 1}
    Path("messages.jsonl").write_text(f"{json.dumps(chat)}\n{json.dumps(alpaca | {'input': ''})}\n")
    exec(snippet, {})
    options = ["--data_files=chats.jsonl", "--val_fraction=0.5", "--out=out"]
    run(REPO / "data/shakespeare_char/prepare.py", *options)
    assert decode_characters(Path("out"))[1] == "user: hi\nadd\n3"
    contents = [None, [{"type": "text", "text": "hi"}], 3]
    unknown = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now"}}]}
    unknown += [{"messages": [call]}, {"messages": [{"from": "user", "value": "hi"}]}, {"messages": "hi"}]
    unknown += [{"conversations": []}, alpaca | {"output": None}, {"prompt": "hi", "completion": "ho"}, {}]
    for record in unknown:
        Path("messages.jsonl").write_text(f"{json.dumps(alpaca)}\n{json.dumps(record)}\n")
        with pytest.raises(ValueError, match="record 2: "):
            exec(snippet, {})
