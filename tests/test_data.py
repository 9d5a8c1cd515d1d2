"""The prepare.py scripts: their output, that it is complete or absent, and their error messages.

Each test works on a copy of data/ in a temporary folder.
"""

import errno
import hashlib
import importlib.util
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from runs import REPO, SHAKESPEARE, SHARED, accepted

TOKENIZERS = Path(os.environ.get("TIKTOKEN_CACHE_DIR", SHARED / "tiktoken_cache"))
GPT2_FILE = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"  # tiktoken's name for the cached vocab.bpe
EOT = 50256

needs_shakespeare = pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f"no {SHAKESPEARE}")
needs_gpt2 = pytest.mark.skipif(
    not (TOKENIZERS / GPT2_FILE).exists(),
    reason=f"GPT-2's tokenizer is not in {TOKENIZERS} (TIKTOKEN_CACHE_DIR)",
)

sys.path.insert(0, str(REPO / "data"))
import bins
import read_files
import summary
import tokenize_documents
import write_files


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
    """Run data/<name>/prepare.py in a separate process."""
    command = [sys.executable, str(data / name / "prepare.py"), *args]
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=60)


def load_prepare(data, name):
    """Import data/<name>/prepare.py."""
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", data / name / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_text(folder, text):
    """Write a data set of the characters of a text."""
    bins.prepare_text(__file__, "", [f"--out={folder}"], lambda _: (text, {}))


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
    assert list(vocabulary["stoi"]) == sorted(vocabulary["stoi"])
    assert vocabulary["vocab_size"] == len(vocabulary["itos"]) == meta["vocab_size"] == meta["tokenizer_size"]
    characters = np.array([vocabulary["itos"][i] for i in range(vocabulary["vocab_size"])])
    text = characters[np.append(train, val)].tobytes().decode("utf-32-le")
    assert hashlib.sha256(text.encode()).hexdigest() == meta["source"]["sha256"]
    return meta, text


def decode_documents(ids):
    """Decode GPT-2 ids into documents, each of which ends with the end-of-text token."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    ends = np.flatnonzero(ids == EOT)
    assert ends[-1] == len(ids) - 1
    return [encoding.decode(part[part != EOT].tolist()) for part in np.split(ids, ends[:-1] + 1)]


# ----- character data sets


def test_stdlib_char_is_the_same_every_time(data, tmp_path):
    """It is determined by the text, which a process with other hashes and another locale also reads."""
    result = prepare(data, "stdlib_char", cwd=tmp_path, PYTHONHASHSEED="1", LC_ALL="C")
    assert result.returncode == 0, result.stderr
    assert 3 <= len(result.stdout.splitlines()) <= 5
    files = {path.name for path in (data / "stdlib_char").iterdir()}
    assert files == {"prepare.py", "train.bin", "val.bin", "meta.pkl", "meta.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"data", "isogpt"}

    meta, text = decode_characters(data / "stdlib_char")
    library = load_prepare(data, "stdlib_char").read_library(Path(sysconfig.get_path("stdlib")))
    assert library == (text, meta["source"]["files"]) and text.isascii() and "\r" not in text
    assert (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text() in text
    assert meta["train_tokens"] == int(len(text) * 0.9) and meta["tokenizer"] == "char"
    assert meta["source"]["implementation"].lower() == sys.implementation.name
    assert meta["source"]["version"] == sys.version.split()[0].rstrip("+") and meta["source"]["files"] > 100


def test_stdlib_char_reads_only_the_library(data, tmp_path):
    library = tmp_path / "library"
    texts = {
        "B.py": "B\r\n",
        "a.py": "a\n",
        "a/b.py": "ab\n",
        "a/testing.py": "",
        "a0.py": "a0\n",
        "latin.py": "é",
    }
    left = "test/x.py a/tests/x.py a/idle_test/x.py __pycache__/x.py site-packages/x.py a/test_x.py x.pyc"
    left += " dist-packages/x.py ensurepip/_bundled/x.py _sysconfigdata_x.py config-3.11-x/x.py"
    for name, text in (texts | dict.fromkeys(left.split(), "LEFT OUT")).items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(text.encode())
    module = load_prepare(data, "stdlib_char")
    assert module.read_library(library) == ("B\n\na\n\nab\n\n\na0\n", 5)
    with pytest.raises(ValueError, match="no Python sources in .*zipped"):
        module.read_library(tmp_path / "python311.zip")


@needs_shakespeare
@needs_gpt2
def test_shakespeare_has_nanogpts_counts(data, tmp_path):
    import tiktoken

    text = SHAKESPEARE.read_text()
    for name in ("shakespeare_char", "shakespeare"):
        shutil.copyfile(SHAKESPEARE, data / name / "input.txt")
        (data / name / "meta.pkl").write_bytes(b"of an earlier data set")
        result = prepare(data, name, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert not list((data / name).glob("*.tmp"))

    meta, decoded = decode_characters(data / "shakespeare_char")
    assert (meta["vocab_size"], meta["train_tokens"], meta["val_tokens"]) == (65, 1_003_854, 111_540)
    assert meta["dtype"] == "uint16" and decoded == text

    meta, train, val = read(data / "shakespeare")
    assert (meta["train_tokens"], meta["val_tokens"]) == (301_966, 36_059)
    assert (meta["dtype"], meta["tokenizer"]) == ("uint16", "gpt2")
    assert (meta["vocab_size"], meta["tokenizer_size"]) == (50304, 50257)
    assert tiktoken.get_encoding("gpt2").decode([*train.tolist(), *val.tolist()]) == text
    assert not (data / "shakespeare" / "meta.pkl").exists()


def test_download_is_verified_and_complete(data, tmp_path, monkeypatch, capsys):
    served = tmp_path / "served.txt"
    served.write_text("To be, or not to be")
    module, folder = load_prepare(data, "shakespeare_char"), data / "shakespeare_char"
    monkeypatch.setitem(read_files.SHAKESPEARE, "url", served.as_uri())
    with pytest.raises(ValueError, match="19 bytes that are not the expected text"):
        module.main([])
    assert set(contents(folder)) == {"prepare.py"}
    monkeypatch.setitem(read_files.SHAKESPEARE, "sha256", hashlib.sha256(served.read_bytes()).hexdigest())
    module.main([])
    assert decode_characters(folder)[1] == (folder / "input.txt").read_text() == served.read_text()

    (folder / "input.txt").write_text("the user's own text")
    served.unlink()
    module.main([])
    assert decode_characters(folder)[1] == "the user's own text"


# ----- document data sets


def write_documents(folder, documents):
    """
    Write the documents to a.jsonl, b.parquet and c.txt (the last document). Returns --data_files=, in a
    different order.
    """
    import pyarrow
    import pyarrow.parquet

    half = len(documents) // 2
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(documents[:half])]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    table = pyarrow.table({"text": documents[half:-1], "id": list(range(half, len(documents) - 1))})
    pyarrow.parquet.write_table(table, folder / "b.parquet", row_group_size=7)
    (folder / "c.txt").write_text(documents[-1])
    return f"--data_files={folder / 'c.txt'},{folder / '*.parquet'},{folder / 'a.jsonl'},{folder / '?.jsonl'}"


@needs_gpt2
def test_documents_keep_their_order_with_any_number_of_processes(data, tmp_path, monkeypatch):
    # The first chunk is by far the longest, so that the workers finish out of order.
    documents = ["first " * 5000, ""]
    documents += [f"Document {i}: naïve <|endoftext|>\n" * (i % 7 + 1) for i in range(120)]
    files, folder = write_documents(tmp_path, documents), data / "openwebtext"

    def written(*args):
        load_prepare(data, "openwebtext").main([files, "--val_fraction=0.3", *args])
        return read(folder)

    meta, train, val = written("--num_proc=1", "--special_tokens=False")
    one = contents(folder)
    assert set(one) == {"prepare.py", "train.bin", "val.bin", "meta.json", "documents.bin"}
    expected = list(filter(None, documents))
    assert (meta["documents"], meta["vocab_size"], meta["dtype"]) == (len(expected), 50304, "uint16")
    sides = [decode_documents(train), decode_documents(val)]
    assert [sides[bins.goes_to_val(1337, i, 0.3)].pop(0) for i in range(len(expected))] == expected
    assert sides == [[], []]

    monkeypatch.setattr(tokenize_documents, "BATCH_BYTES", 2000)
    written("--num_proc=2", "--special_tokens=False")
    assert contents(folder) == one
    _, special, _ = written("--num_proc=1")  # each <|endoftext|> is one token, as in sample.py
    assert len(special) < len(train) and (special == EOT).sum() > (train == EOT).sum()
    written("--num_proc=1", "--seed=1", "--special_tokens=False")
    assert contents(folder)["val.bin"] != one["val.bin"]


def test_ids_are_never_wrapped(tmp_path):
    assert write_files.pack_ids([0, 65535], 65536).dtype == np.uint16
    assert write_files.pack_ids([65536], 65537).tolist() == [65536]
    for ids, size in (([50257], 50257), ([65536], 65536), ([-1], 65536), ([2**32], 2**32)):
        with pytest.raises(ValueError, match="do not fit"):
            write_files.pack_ids(ids, size)
    text = "".join(chr(code) for code in range(70_000) if not 0xD800 <= code < 0xE000)
    text += "".join(chr(code) for code in range(100_000, 105_000)) + "\0"
    write_text(tmp_path, text)
    meta, _, _ = read(tmp_path)
    assert meta["dtype"] == "uint32" and meta["vocab_size"] == len(text) - 1 > 65536
    assert decode_characters(tmp_path)[1] == text


def test_any_tokenizer_of_tiktoken_works(data, tmp_path, monkeypatch):
    """Also if the ids are above 65535."""
    import tiktoken

    ranks, special = (
        {bytes([b]): 70000 + b for b in range(256)},
        {"wide": {"<|endoftext|>": 70300}, "no_end": {}},
    )

    def get_encoding(name):
        return tiktoken.Encoding(name, pat_str="(?s).", mergeable_ranks=ranks, special_tokens=special[name])

    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: [*special])
    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    args, folder = [f"--data_files={tmp_path}/a.jsonl", "--text_key=body"], data / "fineweb"
    load_prepare(data, "fineweb").main([*args, "--tokenizer=wide", "--num_proc=1"])
    meta, train, val = read(folder)
    assert [meta[key] for key in ("dtype", "vocab_size", "tokenizer_size")] == ["uint32", 70336, 70301]
    assert (meta["tokenizer"], meta["documents"]) == ("wide", 2)
    assert train.tolist() == [*(70000 + byte for byte in b"one"), 70300]
    assert val.tolist() == [*(70000 + byte for byte in b"two"), 70300]
    before = contents(folder)
    with pytest.raises(ValueError, match=r"the tokenizer contains no <\|endoftext\|>"):
        load_prepare(data, "fineweb").main([*args, "--tokenizer=no_end"])
    assert contents(folder) == before


@needs_gpt2
def test_the_hub(data, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"page {i}" for i in range(10)], "url": ["u"] * 10}
    calls = []

    def load_dataset(path, **options):
        calls.append((path, options))
        dataset = datasets.Dataset.from_dict(rows)
        return dataset.to_iterable_dataset() if options.get("streaming") else dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("openwebtext", "fineweb"):
        load_prepare(data, name).main(["--num_proc=1", "--val_fraction=0.2"])
        meta, train, val = read(data / name)
        assert sorted(decode_documents(train) + decode_documents(val)) == rows["text"]
        assert meta["documents"] == 10
    assert calls == [
        ("Skylion007/openwebtext", {"revision": "refs/convert/parquet", "split": "train"}),
        ("HuggingFaceFW/fineweb-edu", {"name": "sample-10BT", "split": "train", "streaming": True}),
    ]
    assert "the hub contains 10 documents, not 8013769" in capsys.readouterr().out

    def breaks():
        yield from ({"text": f"page {i}"} for i in range(1500))
        raise ConnectionError("connection reset")

    before = contents(data / "fineweb")
    broken = datasets.IterableDataset.from_generator(breaks)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: broken)
    with pytest.raises(ConnectionError):
        load_prepare(data, "fineweb").main(["--num_proc=1"])
    assert contents(data / "fineweb") == before


# ----- complete or absent


@needs_gpt2
def test_a_failure_leaves_the_earlier_files(data, tmp_path, monkeypatch):
    folder = data / "openwebtext"
    files = write_documents(tmp_path, [f"document {i}" for i in range(50)])
    module = load_prepare(data, "openwebtext")
    module.main([files, "--num_proc=1"])
    before = contents(folder)
    assert set(before) == {"prepare.py", "train.bin", "val.bin", "meta.json", "documents.bin"}

    monkeypatch.setattr(tokenize_documents, "BATCH_BYTES", 1000)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a document"}\n' * 300 + '{"text": "a doc')
    with pytest.raises(ValueError, match="broken.jsonl:301: not JSON"):
        module.main([f"--data_files={broken}", "--num_proc=2"])
    assert contents(folder) == before

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        module.main([files, "--num_proc=1"])
    with pytest.raises(OSError, match="No space left"):
        write_text(folder, "some text")
    assert contents(folder) == before


ENDLESS = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
import bins

def documents(*_):
    for i in range(12):
        yield f"document {i}"
    print("reading", flush=True)
    time.sleep(60)

bins.read_documents = documents
sys.exit(bins.run(lambda argv: bins.prepare_documents("", "", argv, "", {})))
"""


@needs_gpt2
def test_a_prepare_that_is_ended_leaves_the_earlier_files(data, tmp_path):
    """Of a kill, see test_prepare.py."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "train.bin").write_bytes(b"earlier")
    command = [sys.executable, "-c", ENDLESS, str(data), f"--out={folder}", "--data_files=x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "reading\n"
        process.terminate()
    assert process.returncode == 143
    assert contents(folder) == {"train.bin": b"earlier"}


# ----- where it is written


def test_the_home_folder_and_names_with_commas(data, tmp_path, monkeypatch):
    """A shell replaces ~ in `--out ~/d`, but not in `--out=~/d`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.txt", "b.txt", "c, d.txt"):
        (tmp_path / name).write_text(f"some text of {name}")
    load_prepare(data, "shakespeare_char").main(["--data_files=~/a.txt, ~/b.txt", "--out=~/d"])
    assert decode_characters(tmp_path / "d")[1] == "some text of a.txt\nsome text of b.txt"
    assert list(read_files.read_documents(str(tmp_path / "c, d.txt"))) == ["some text of c, d.txt"]
    with pytest.raises(ValueError, match=f"^--tokenizer={tmp_path}/d contains neither"):
        bins.vocabulary_named("~/d")


def test_links_and_other_folders(data, tmp_path):
    """A script runs from any folder, also through a link to its folder, and writes where --out says."""
    (tmp_path / "a.txt").write_text("some text, and more of it\n" * 99)
    disk, work = tmp_path / "disk" / "mine", tmp_path / "work" / "data"
    shutil.copytree(data / "shakespeare_char", disk)
    (data / "mine").symlink_to(disk)
    work.mkdir(parents=True)

    def option(script, *args, cwd=tmp_path):
        command = [sys.executable, str(script), f"--data_files={tmp_path / 'a.txt'}", *args]
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        last = result.stdout.splitlines()[-1]
        return re.fullmatch(r"next: python train.py config/\w+.py (--dataset=.+) --out_dir=out-\w+", last)[1]

    assert option(data / "mine" / "prepare.py") == "--dataset=mine" and (disk / "train.bin").exists()
    script = data / "shakespeare_char" / "prepare.py"
    assert option(script, "--out=new folder/x") == f"--dataset='{tmp_path}/new folder/x'"
    assert (tmp_path / "new folder" / "x" / "meta.json").exists()
    assert option(script, "--out=data/own", cwd=work.parent) == "--dataset=own"
    assert (work / "own/val.bin").exists() and not (script.parent / "train.bin").exists()


@pytest.mark.parametrize(
    ("name", "tokens", "tokenizer", "small", "large"),
    [
        ("stdlib_char", 10**7, "char", "train_stdlib_char.py", "train_stdlib_char.py"),
        ("shakespeare_char", 10**6, "char", "train_shakespeare_char_fast.py", "train_shakespeare_char.py"),
        ("shakespeare", 10**5, "gpt2", "train_small.py", "train_small.py"),
        ("mine", 10**6, "char", "train_small.py", "train_shakespeare_char.py"),
        ("fineweb", 10**10, "gpt2", "train_small.py", "train_gpt2.py"),
    ],
)
def test_the_next_command_suits_the_device(name, tokens, tokenizer, small, large, capsys):
    """Nothing needs a login. The commands are accepted when typed."""
    meta = {"train_tokens": tokens, "tokenizer": tokenizer, "val_tokens": 9, "dtype": "uint16"}
    meta |= {"tokenizer_size": 65, "vocab_size": 50304 if tokenizer == "gpt2" else 96}
    summary.report(REPO / "data" / name, meta)
    *_, before, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"next: python train.py config/{small}")
    assert small == large or before.startswith(f"on a GPU: python train.py config/{large}")
    for command in {before, last} if small != large else {last}:
        config = accepted("train.py", *shlex.split(command.partition(": ")[2])[2:])
        assert config["dataset"] == name and not config["wandb_log"]


# ----- a val.bin for files that others prepared


def test_val_bin_from_the_end_of_train_bin(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("split", REPO / "data" / "split.py")
    split = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(split)
    ids = (np.arange(5000) * 7 % 50257).astype(np.uint32)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "meta.json").write_text('{"dtype": "uint32"}')

    def divide(*args):
        monkeypatch.setattr(sys, "argv", ["split.py", str(folder), *args])
        status = bins.run(split.main)
        return status, capsys.readouterr().err

    assert divide() == (1, f"error: no train.bin in {folder}: give the folder that contains it\n")
    ids.tofile(folder / "train.bin")
    (folder / "val.bin").touch()
    assert "val.bin exists already: delete it" in divide()[1]
    (folder / "val.bin").unlink()
    assert "leaves train.bin or val.bin empty (tokens in all: 5,000)" in divide("--val_fraction=0.99999")[1]
    (folder / "unfinished.a.tmp").mkdir()  # as a kill leaves it
    for args, val in ((["--val_fraction=0.3"], 1500), ([], 500)):  # the second time from all.bin
        assert divide(*args) == (0, "")
        train, rest = (np.fromfile(folder / f"{name}.bin", np.uint32) for name in ("train", "val"))
        assert (train.tolist(), rest.tolist()) == (ids[:-val].tolist(), ids[-val:].tolist())
        assert not list(folder.glob("*.tmp"))
    assert set(contents(folder)) == {"all.bin", "train.bin", "val.bin", "meta.json"}


@pytest.mark.parametrize("renames", range(8))
def test_files_that_cannot_be_moved_leave_the_earlier_ones(tmp_path, monkeypatch, renames):
    """A file system that cannot rename, or fails while it does; train.bin is away first and back last."""
    names = ["val.bin", "meta.json", "train.bin"]
    replace, done = os.replace, []

    def fails(old, new):
        done.append(new)
        if len(done) == renames + 1:
            raise OSError(errno.EIO, "Input/output error")
        replace(old, new)
        present = (tmp_path / "train.bin").exists()
        assert not present or len({path.read_bytes() for path in tmp_path.glob("*.*n")}) == 1

    def write(content):
        with write_files.atomic_files(tmp_path, *names) as files:
            for file in files.values():
                file.write(content)

    write(b"earlier")
    (tmp_path / "meta.pkl").write_bytes(b"earlier")
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        if renames < 7:  # 4 earlier files are moved aside, 3 new ones take their places
            with pytest.raises(OSError, match="Input/output error"):
                write(b"new")
            assert contents(tmp_path) == before
        else:
            write(b"new")
            assert contents(tmp_path) == dict.fromkeys(names, b"new")


@pytest.mark.parametrize("number", ["EINVAL", "ENOTSUP"])
def test_a_folder_that_cannot_be_synced(tmp_path, monkeypatch, number):
    """As on CIFS and some of FUSE; an error of the disk is one."""
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    for content in (b"one", b"two"):
        with write_files.atomic_files(tmp_path, "val.bin", "train.bin") as files:
            for file in files.values():
                file.write(content)
    assert contents(tmp_path) == {"val.bin": b"two", "train.bin": b"two"}
    number = "EIO"
    refused = pytest.raises(OSError, match="Input/output error.*")
    with refused, write_files.atomic_files(tmp_path, "train.bin"):
        pass
    assert contents(tmp_path) == {"val.bin": b"two", "train.bin": b"two"}


def test_halves_of_surrogate_pairs_are_replaced(tmp_path, capsys):
    """JSON can hold them, but neither UTF-8 nor a tokenizer.json; whole pairs are characters."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "\\ud83d b"}\n{"text": "\\ude00\\ud83d\\ude00"}\n')
    assert list(read_files.read_documents(str(path))) == ["a", "\ufffd b", "\ufffd\U0001f600"]
    note = f"note: {path}, document 2: halves of surrogate pairs are replaced by U+FFFD\n"
    assert capsys.readouterr().out == note


# ----- error messages

ANY = {  # arguments: message, of each kind of data set
    "--data_files=two.jsonl,no*.txt": "no file matches 'no\\*.txt'",
    "--data_files=folder": "the folder 'folder' contains no file that ends in .txt, .*: type --data",
    "--data_files=pages": "the folder 'pages' contains no file .*; type: zstd -d pages/two.jsonl.zst$",
    "--data_files=lost.txt": "'lost.txt' is a link to gone.txt, which does not exist",
    "--data_files=two.jsonl --out=s3://bucket/d": "--out is s3:/bucket/d, an address of s3: set the path",
    "--data_files=two.jsonl,table.csv": "table.csv: only files that end in .txt, .*, .parquet can be read"
    "; type: python -c 'import pandas; pandas.read_csv",
    "--data_files=two.txt.gz": "two.txt.gz: only files that end in .* type: gunzip -k two.txt.gz$",
    "--data_files=torn.jsonl.gz": "torn.jsonl.gz: not readable as gzip",
    "--data_files=page.html": "page.html: only files .* if page.html contains plain text, rename it to .txt$",
    "--data_files=key.jsonl": "key.jsonl:2: no string at 'text' in {'content': 'two', 'id': 3}; "
    "set --text_key=content$",
    "--data_files=alpaca.jsonl": ".*; set --text_key=instruction or output, or write one text",
    "--data_files=chat.jsonl": r"chat.jsonl:1: no string at 'text' in .*; write one text .*'Chats and instr",
    "--data_files=list.jsonl": r"list.jsonl:1: no string at 'text' in \[1\]",
    "--data_files=bad.jsonl": "bad.jsonl:2: not JSON",
    "--data_files=deep.jsonl": "deep.jsonl:1: not JSON .the JSON is nested too deeply",
    "--data_files=latin.txt": "latin.txt is not UTF-8: byte 0 is 0xe9. Save it as UTF-8$",
    "--data_files=windows.txt": "windows.txt is not UTF-8: byte 4 is 0x93. If this looks right: 'She “said” "
    "so, and .*', type: iconv -f cp1252 -t utf-8 windows.txt",
    "--data_files=wide.txt": "wide.txt contains the character 0 at 1: it is probably UTF-16: iconv",
    "--data_files=fake.parquet": "fake.parquet: not readable as Parquet",
    "--data_files=two.jsonl --tokenizer=gpt": "'gpt' is not an encoding .*gpt2",
    "--data_files=two.jsonl --tokenizer=no/where": "--tokenizer=no/where: no such folder",
    "--data_files=two.jsonl --tokenizer=folder": "folder contains neither a tokenizer.json nor a checkpoint$",
    "--data_files=two.jsonl --tokenizer=two.jsonl": "--tokenizer=two.jsonl: it is a file: give a folder",
    "--data_files=two.jsonl --tokenizer=spm": ".*, but a tokenizer in another form: copy the",
    "--data_files=two.jsonl --tokenizer=spm/x.model": ".* or write the ids with the package sentencepiece",
    "--data_files=two.jsonl --tokenizer=bpe": ".*: write it with transformers' GPT2Tokenizer.from_pretrained",
}
ONE_TEXT = {
    "--data_files=letter.txt": "--val_fraction=0.1 .* .characters in all: 1.: use files with more text$",
    "": "could not download file://.*put the text at .*/data/shakespeare_char/input.txt",
}
DOCUMENTS = {
    "--data_files=empty.txt": "2 non-empty documents or more are needed, but there is none: use files",
    "--data_files=letter.txt": "needed, but there is 1: data/shakespeare/prepare.py splits one text",
}
KINDS = {"shakespeare_char": ANY | ONE_TEXT, "openwebtext": ANY | DOCUMENTS}


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Files for --data_files in the working folder."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(read_files.SHAKESPEARE, "url", (tmp_path / "absent").as_uri())
    for folder in ("folder", "pages", "spm", "bpe"):
        Path(folder).mkdir()
    Path("lost.txt").symlink_to("gone.txt")
    for name, content in {
        "two.jsonl": '{"text": "one"}\n{"text": "two"}\n',
        "key.jsonl": '{"text": "one"}\n{"content": "two", "id": 3}\n',
        "list.jsonl": "[1]\n",
        "bad.jsonl": '{"text": "one"}\n{"text": \n',
        "deep.jsonl": "[" * 200_000,
        "empty.txt": "",
        "letter.txt": "x",
        "latin.txt": "\xe9",
        "windows.txt": "She \x93said\x94 so, and then he left. " * 9,
        "wide.txt": "w\0i\0d\0e\0",
        "alpaca.jsonl": '{"instruction": "add", "output": "3", "id": 1}\n',
        "chat.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}\n',
        "two.txt.gz": "",
        "torn.jsonl.gz": "\x1f\x8b\x08",
        "pages/two.jsonl.zst": "",
        "page.html": "",
        "spm/x.model": "",
        "bpe/vocab.json": "",
        "bpe/merges.txt": "",
        "fake.parquet": "not parquet",
        "table.csv": "text",
    }.items():
        Path(name).write_text(content, encoding="latin-1")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None, "two"]}), "null.parquet")


@needs_gpt2
@pytest.mark.parametrize(
    ("name", "args", "message"), [(name, *case) for name, cases in KINDS.items() for case in cases.items()]
)
def test_an_error_is_one_line_and_leaves_the_folder(data, inputs, monkeypatch, capsys, name, args, message):
    before = contents(data / name)
    monkeypatch.setattr(sys, "argv", ["prepare.py", *args.split()])
    assert bins.run(load_prepare(data, name).main) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{message}", line), line
    assert contents(data / name) == before


TOKENIZER = {"model": {"type": "WordLevel", "vocab": {"one": 0, "two": 1, "?": 2}, "unk_token": "?"}}


def test_what_is_read_with_a_note(data, inputs, capsys):
    """Null is no text; a tokenizer in a file; text that the tokenizer loses; a val.bin without a sequence."""
    rules = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    rules |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    Path("folder/tokenizer.json").write_text(json.dumps(rules | TOKENIZER))
    module, folder = load_prepare(data, "shakespeare"), data / "shakespeare"
    given = ["--data_files=null.parquet", "--tokenizer=folder/tokenizer.json"]
    module.main([*given, "--val_fraction=0.5"])
    _, train, val = read(folder)
    assert [*train, *val] == [0, 1]
    printed = capsys.readouterr().out
    assert "note: null.parquet: left out the records with null at 'text', 1 in all\n" in printed
    assert "keep the text" not in printed and "next:" not in printed
    assert "note: val.bin is shorter than a sequence of 64 tokens: use files with more text\n" in printed

    # each text begins with a byte order mark
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        Path("mark.txt").write_text("one two\nONE\r\n" * 80, encoding=encoding, newline="")
        module.main(["--data_files=mark.txt", *given[1:]])
        _, train, val = read(folder)
        assert [*train, *val] == [0, 1, 2] * 80
    printed = capsys.readouterr().out
    assert "note: the tokenizer does not keep the text: 'ONE' becomes '?'\n" in printed
    assert "note: val.bin is shorter than a sequence of 64 tokens: set --val_fraction=0.55" not in printed
    module.main(["--data_files=mark.txt", *given[1:], "--val_fraction=0.2"])
    *_, note, command = capsys.readouterr().out.splitlines()
    assert note == "note: val.bin is shorter than a sequence of 64 tokens: use files with more text"
    config = accepted("train.py", *shlex.split(command)[3:])
    assert config["block_size"] < len(read(folder)[2])


def test_the_way_on_from_other_files(data, inputs, capsys):
    """What the messages advise works when it is typed."""
    Path("rows.csv").write_text("text,n\none,1\ntwo,2\n")
    Path("messages.jsonl").write_text(Path("chat.jsonl").read_text() + Path("alpaca.jsonl").read_text())
    chats = (REPO / "data" / "README.md").read_text().partition("### Chats and instructions")[2]
    exec(chats.split("```")[1].removeprefix("python"), {})
    text = "She “said” so, and then he left.\n" * 9
    Path("windows.txt").write_text(text, encoding="cp1252")
    module = load_prepare(data, "shakespeare_char")
    for name, result in (("rows.csv", "rows.parquet"), ("windows.txt", "utf8.txt"), ("chats.jsonl", None)):
        if result:
            with pytest.raises(ValueError, match="type: ") as error:
                module.main([f"--data_files={name}"])
            command = str(error.value).partition("type: ")[2].replace("python -c", f"{sys.executable} -c")
            subprocess.run(command, shell=True, check=True)
        module.main([f"--data_files={result or name}", "--val_fraction=0.5"])
        expected = {"rows.csv": "one\ntwo", "windows.txt": text}
        assert decode_characters(data / "shakespeare_char")[1] == expected.get(name, "user: hi\nadd\n3")


def test_options_that_do_not_exist_or_are_out_of_range(data, capsys):
    for option in (
        "--data_file=two.jsonl",
        "--seed=1",
        "--val_fraction=1.5",
        "--val_fraction=much",
        "--shard_tokens=-1",
        "--num_proc=0",
        "one.txt",
    ):
        with pytest.raises(SystemExit) as stop:
            load_prepare(data, "shakespeare").main([option])
        assert stop.value.code == 2 and option.partition("=")[0] in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch, capsys):
    """And the handlers of signals are those from before."""
    monkeypatch.setattr(sys, "argv", ["prepare.py"])
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert bins.run(lambda argv: __import__("absent_package")) == 1
    assert capsys.readouterr().err == "error: No module named 'absent_package'\n"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
