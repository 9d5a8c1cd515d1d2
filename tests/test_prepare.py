"""Data sets of documents: shards, several processes, what a kill leaves, folders as input."""

import gzip
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from runs import REPO, children, wait_for
from test_data import cached_tokenizers as cached_tokenizers
from test_data import (
    contents,
    decode_documents,
    error_of,
    needs_gpt2,
    read,
    run,
    write_jsonl,
    write_tokenizer,
)

from isogpt.data.data_folder import open_split, read_meta

sys.path.insert(0, str(REPO / "data"))
from read_files import find_files, read_documents

SCRIPT = REPO / "data/openwebtext/prepare.py"
END = "<|endoftext|>"
WORDS = [END, "?", *(f"word{i}" for i in range(300))]
DOCUMENTS = [" ".join(f"word{(i * j) % 300}" for j in range(1, 3 + i % 40)) for i in range(120)]
DOCUMENTS[5:7] = [f"{END} word1 {END} word2", END]


@pytest.fixture
def source(tmp_path):
    """A folder of documents, with a small tokenizer beside it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", DOCUMENTS)
    write_tokenizer(tmp_path / "tokenizer", {word: i for i, word in enumerate(WORDS)})
    return folder


def arguments(source, out, *args):
    """Those with which SCRIPT prepares the documents."""
    options = [f"--data_files={source}", f"--out={out}", f"--tokenizer={source.parent / 'tokenizer'}"]
    return [*options, "--val_fraction=0.2", "--num_proc=1", *args]


def prepare(source, out, *args):
    """Prepare in this process."""
    run(SCRIPT, *arguments(source, out, *args))


def prepare_with_signal(number, is_moment, source, out, *args):
    """
    Prepare in a process of its own, which gets a signal before it opens, renames or deletes a file for which
    is_moment(event, name) is true. Returns its exit code.
    """

    def hook(event, names):
        if event in ("open", "os.rename", "os.remove") and is_moment(event, str(names[0])):
            os.kill(os.getpid(), number)

    if not (pid := os.fork()):
        try:
            signal.set_wakeup_fd(-1)  # with which another test's train.py watches signals
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.addaudithook(hook)
            prepare(source, out, *args)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def texts(data_files):
    return [text for _, text in read_documents(find_files(data_files))]


def joined(folder, split):
    return b"".join(path.read_bytes() for path in sorted(folder.glob(f"{split}*.bin")))


def test_where_documents_begin(source, tmp_path):
    """0, and each end-of-text token of train but the last one, also those that the text contains."""
    write_jsonl(source / "a.jsonl", [END, *DOCUMENTS[1:]])  # the first token is one too
    prepare(source, tmp_path, "--shard_tokens=100")
    ids = np.frombuffer(joined(tmp_path, "train"), np.uint16)
    begins = np.fromfile(tmp_path / "documents.bin", np.int64)
    assert begins.tolist() == sorted({0, *np.flatnonzero(ids == 0).tolist()[:-1]})
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["train_documents"] == len(begins) > 80 and meta["documents"] == len(DOCUMENTS)
    prepare(source, tmp_path / "other", "--seed=1")
    assert joined(tmp_path / "other", "val") != joined(tmp_path, "val")


def test_an_earlier_data_set_leaves_nothing_behind(source, tmp_path):
    """Also one of one text, and in the other direction; files of other names are not touched."""
    folder = tmp_path / "out"
    prepare(source, folder, "--shard_tokens=100")
    (folder / "all.bin").touch()
    (tmp_path / "text.txt").write_text("some text " * 20)
    run(REPO / "data/shakespeare_char/prepare.py", f"--data_files={tmp_path}/text.txt", f"--out={folder}")
    names = {"train.bin", "val.bin", "meta.json", "meta.pkl", "all.bin"}
    assert set(contents(folder)) == names | {"tokenizer.json", "tokenizer_config.json"}
    prepare(source, folder)
    assert "meta.pkl" not in contents(folder)


def test_folders_and_compressed_files(source, tmp_path):
    """Sorted by path, with the folders within them; without hidden files, and without other extensions."""
    (source / "b" / "c").mkdir(parents=True)
    (source / "b" / "c" / "d.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "in d"}\n'))
    (source / "b" / "e.txt").write_text("in e")
    # halves of surrogate pairs, which neither UTF-8 nor a tokenizer.json can hold, and a whole pair
    (source / "f.jsonl").write_text('{"text": "\\ud83d b"}\n{"text": "\\ude00\\ud83d\\ude00"}\n')
    (source / "README.md").write_text("no document")
    (source / ".hidden.txt").write_text("no document")
    others = ["in d", "in e", "\ufffd b", "\ufffd\U0001f600"]
    assert texts(str(source)) == DOCUMENTS + others


def test_a_file_to_which_several_links_lead_is_read_once(source):
    """Also if the folder contains a link to itself, through which it would be read 41 times."""
    (source / "a.jsonl").rename(source / "0")  # as in a cache of the hub
    for name, target in ("loop", "."), ("a.jsonl", "0"), ("b.jsonl", "0"):
        (source / name).symlink_to(target)
    assert texts(str(source)) == texts(f"{source}/**/*.jsonl") == DOCUMENTS
    assert texts(f"{source}/b.jsonl,{source}/a.jsonl,{source}/a.jsonl") == DOCUMENTS


def test_files_that_a_folder_leaves_out(tmp_path, monkeypatch, capsys):
    """A note counts them and says what to type to read them, which works; a pattern that names files does."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "some [texts]"
    (folder / "below").mkdir(parents=True)
    names = ["a.txt", *(f"below/{i}.py" for i in range(20)), *(f"{i}.md" for i in range(19)), "README"]
    for name in names:
        (folder / name).write_text(name)
    os.mkfifo(folder / "pipe.txt")
    options = ["--data_files=some [texts]", "--val_fraction=0.5", "--tokenizer=char"]
    run(REPO / "data/shakespeare_char/prepare.py", *options, "--out=out")
    said = capsys.readouterr().out
    assert said.startswith("note: left out of 'some [texts]': 20 .py, 19 .md, 1 README; set --data_files=")
    advised = re.compile(r"set --data_files=('.*?') to read .py as text")
    assert texts(*shlex.split(advised.search(said)[1])) == ["a.txt", *sorted(names[1:21])]
    (folder / "a.txt").unlink()
    with pytest.raises(ValueError) as problem:
        texts("some [texts]")
    assert texts(*shlex.split(advised.search(str(problem.value))[1])) == sorted(names[1:21])
    capsys.readouterr()
    (folder / "b.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert texts("some [[]texts]/*.json") == ['{"text": "one"}\n{"text": "two"}\n']
    assert capsys.readouterr().out.startswith("note: read as text: 1 .json; records must be in .jsonl or ")
    (folder / "b.json").rename(folder / "b.jsonl")
    assert texts("some [[]texts]/*.jsonl") == ["one", "two"]
    (folder / "c.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"c\.png, document 1: .* is not text in UTF-8 "):
        texts("some [[]texts]/*")


def test_urls(source, tmp_path, capsys):
    """What fsspec opens is read like local files; errors are one line without credentials."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["in c", "more"]}), source / "c.parquet")
    (source / "b").mkdir()
    (source / "b" / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "in d"}\n\n{"text": "end"}'))
    (source / "e.txt").write_text("in e===f")
    (source / "f.md").write_text("in f")
    memory = fsspec.filesystem("memory")
    memory.put(str(source), "/texts", recursive=True)
    everything = texts(str(source))
    capsys.readouterr()
    for url in ("memory://texts", f"file://{source}", "simplecache::memory://texts"):
        assert texts(url) == everything
        assert capsys.readouterr().out.startswith(f"note: left out of '{url}': 1 .md; ")
    assert texts("memory://texts/**/*.gz,memory://texts/*.md") == ["in d", "end", "in f"]
    files = find_files("memory://texts/e.txt")
    assert [*read_documents(files, separator="===")] == [
        ("/texts/e.txt, document 1", "in e"),
        ("/texts/e.txt, document 2", "f"),
    ]
    prepare(source, tmp_path / "local")
    prepare(source, tmp_path / "remote", "--data_files=memory://texts")
    local, remote = contents(tmp_path / "local"), contents(tmp_path / "remote")
    assert local.pop("meta.json") != remote.pop("meta.json") and local == remote
    fsspec.register_implementation("lacking", "no_such_package.fs.Class", errtxt="Install it", clobber=True)
    for url, message in {
        "memory://texts/no.txt": "memory://texts/no.txt cannot be opened: FileNotFoundError: ",
        "memory://texts/*.no": r"memory://texts/\*.no cannot be opened: FileNotFoundError: ",
        "lacking://me:secret@host/a?key=secret": "lacking://host/a cannot be opened: ImportError: Install it",
        "unknown://a": "unknown://a cannot be opened: ValueError: Protocol not known: unknown",
    }.items():
        with pytest.raises(ValueError, match=f"--data_files: {message}") as problem:
            find_files(url)
        assert "secret" not in str(problem.value)
    memory.rm("/texts", recursive=True)


@needs_gpt2
def test_a_document_that_cannot_be_encoded_is_left_out(tmp_path, capsys):
    """It is named and counted, and the files are those of the other documents; one text is an error."""
    spaces = " " * 1_200_000 + "x"
    others = [f"document {i} " * 20 for i in range(40)]
    write_jsonl(tmp_path / "all.jsonl", [*others[:16], spaces, *others[16:], spaces])
    write_jsonl(tmp_path / "others.jsonl", others)
    options = ["--val_fraction=0.3", "--seed=2", "--tokenizer=gpt2"]
    found = {}
    for name, number in (("all", 1), ("all", 2), ("others", 1)):
        out = tmp_path / f"{name}{number}"
        files = f"--data_files={tmp_path}/{name}.jsonl"
        run(SCRIPT, files, *options, f"--num_proc={number}", f"--out={out}")
        found[out.name] = contents(out)
        del found[out.name]["meta.json"]
        said = capsys.readouterr().out
        assert said.count("note: 2 documents left out, which cannot be encoded: ") == (name == "all")
        for n in (17, 42):
            assert said.count(f"{tmp_path}/all.jsonl, document {n}: Regex error") == (name == "all")
        meta, train, val = read(out)
        assert meta["documents"] == 40
        assert meta["train_bytes"] + meta["val_bytes"] == sum(map(len, others))
        assert sorted(decode_documents(train) + decode_documents(val)) == sorted(others)
        counted = {key: meta[key] for key in ("val_bytes", "val_text")}
        run(REPO / "data/count_bytes.py", out)
        assert counted == {key: read(out)[0][key] for key in counted}
    assert found["all1"] == found["all2"]
    (tmp_path / "spaces.txt").write_text(spaces + " x" * 100_000)
    options = [f"--data_files={tmp_path}/spaces.txt", f"--out={tmp_path}/text"]
    assert "Max stack size exceeded" in error_of(REPO / "data/shakespeare/prepare.py", *options)


def test_a_first_document_that_a_tokenizer_json_cannot_encode(tmp_path, capsys):
    """The first document is also the one with which a note on the tokenizer is made."""
    write_tokenizer(tmp_path / "tokenizer", {"word": 0})
    write_jsonl(tmp_path / "a.jsonl", ["unknown", *["word word"] * 40])
    (tmp_path / "a.txt").write_text("unknown")
    options = [f"--tokenizer={tmp_path}/tokenizer", "--val_fraction=0.3", f"--out={tmp_path}/out"]
    run(SCRIPT, f"--data_files={tmp_path}/a.jsonl", "--num_proc=1", *options)
    note = f"note: 1 document left out, which cannot be encoded: {tmp_path}/a.jsonl, document 1: "
    assert note in capsys.readouterr().out and read(tmp_path / "out")[0]["documents"] == 40
    said = error_of(REPO / "data/shakespeare/prepare.py", f"--data_files={tmp_path}/a.txt", *options)
    assert "the text cannot be encoded: " in said


def test_nothing_is_written_or_deleted_through_a_link(source, tmp_path):
    """Of any name that the scripts write, in the folder that they write to."""
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.bin").write_text("kept")
    folder.mkdir()
    names = ["train.bin", "val.bin", "documents.bin", "meta.json", "tokenizer.json", "tokenizer_config.json"]
    for name in (*names, *(f"{name}.tmp" for name in names), "meta.pkl", "train_000000.bin"):
        (folder / name).symlink_to(elsewhere / "train.bin")
    for name in ("unfinished.tmp", "unfinished.x.tmp"):
        (folder / name).symlink_to(elsewhere)
    for shard_tokens in (0, 100, 0):
        prepare(source, folder, f"--shard_tokens={shard_tokens}")
    (folder / "val.bin").unlink()
    (folder / "meta.json").unlink()
    run(REPO / "data/split.py", folder)
    run(REPO / "data/find_documents.py", folder)
    assert contents(elsewhere) == {"train.bin": b"kept"}


@pytest.mark.parametrize("shard_tokens", [0, 700])
def test_a_kill_at_any_moment_leaves_no_half_data_set(source, tmp_path, shard_tokens):
    """
    The earlier data set, which had more shards, is whole, or there is none that train.py reads, and the same
    command then gives the files of an undisturbed run.
    """
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    args = [f"--shard_tokens={shard_tokens}"]
    prepare(source, whole, *args)
    new = contents(whole)
    prepare(source, folder, "--shard_tokens=200", "--seed=3")
    earlier = contents(shutil.copytree(folder, tmp_path / "earlier"))
    assert len(earlier) > len(new)
    for moment in itertools.count(1, step=3):
        moments = itertools.count(1)

        def is_moment(event, name, moment=moment, moments=moments):
            return event != "open" and next(moments) == moment

        code = prepare_with_signal(signal.SIGKILL, is_moment, source, folder, *args)
        if code == 0:
            break
        assert code == -signal.SIGKILL and list(folder.glob("*.tmp"))
        if contents(folder) not in (earlier, new):
            with pytest.raises(ValueError, match="is missing|meta.json says"):
                meta = read_meta(folder)
                for split in ("train", "val"):
                    open_split(folder, split, meta, block_size=0)
        prepare(source, folder, *args)
        assert contents(folder) == new and not list(folder.glob("*.tmp"))
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "earlier", folder)
    assert moment > 20 and contents(folder) == new


def test_a_failure_leaves_the_earlier_files(source, tmp_path, capfd):
    """A file that is damaged at its end, a disk that is full, Ctrl-C."""
    folder = tmp_path / "out"
    prepare(source, folder)
    before = contents(folder)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "word1 word2"}\n' * 300 + '{"text": "a doc')
    for number in (1, 2):
        said = error_of(SCRIPT, *arguments(source, folder, f"--data_files={broken}", f"--num_proc={number}"))
        assert said.startswith(f"error: {broken}, document 301: ")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        said = error_of(SCRIPT, *arguments(source, folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said == "error: [Errno 27] File too large"
    capfd.readouterr()
    in_val = (signal.SIGINT, lambda event, name: name.endswith(".tmp/val.bin"))
    assert prepare_with_signal(*in_val, source, folder) == 1
    assert capfd.readouterr().err == "error: KeyboardInterrupt\n"
    assert contents(folder) == before and not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("is_starting", [True, False])
def test_a_tokenizing_process_that_is_killed_is_reported(source, tmp_path, is_starting):
    """As for want of memory: in one line, not by waiting until it answers, or takes a large tokenizer."""
    write_jsonl(source / "a.jsonl", ["word1 " * 1000] * 2000)
    write_tokenizer(tmp_path / "tokenizer", {word: i for i, word in enumerate([*WORDS, "long" * 50_000])})
    command = [sys.executable, SCRIPT, *arguments(source, tmp_path / "out", "--num_proc=2")]

    def of_pool():
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children(running.pid)}
        return [pid for pid, command in commands.items() if "spawn_main" in command]

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        wait_for(of_pool if is_starting else lambda: list(tmp_path.glob("out/*/train.bin")))
        os.kill(of_pool()[0], signal.SIGKILL)
        line = running.stderr.read()
    assert running.returncode == 1 and re.fullmatch("error: A .*process.*\n", line)
    assert not list((tmp_path / "out").iterdir())


def test_a_row_group_of_parquet_is_streamed(tmp_path):
    """A file may consist of one, which would need as much memory."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    text = np.random.default_rng(0).bytes(5_000_000).hex()  # which cannot be compressed to less than half
    rows = [text[i : i + 500] for i in range(0, len(text), 500)]
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", use_dictionary=False)
    size, before = (tmp_path / "a.parquet").stat().st_size, pyarrow.total_allocated_bytes()
    documents = (text for _, text in read_documents(find_files(str(tmp_path))))
    assert next(documents) == rows[0]
    assert pyarrow.total_allocated_bytes() - before < size / 2
    assert list(documents) == rows[1:]


@needs_gpt2
@pytest.mark.slow
def test_memory_is_bounded_and_no_process_survives_a_kill(tmp_path):
    """Of 100 MB, a few remain in memory; a killed run leaves no tokenizing process behind."""
    line = json.dumps({"text": "What is it to be? " * 600})
    with open(tmp_path / "a.jsonl", "w") as file:
        file.writelines(f"{line}\n" for _ in range(100_000_000 // len(line)))
    command = [sys.executable, str(SCRIPT), f"--data_files={tmp_path}/a.jsonl"]
    command += [f"--out={tmp_path}/out", "--num_proc=2", "--shard_tokens=1_000_000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as killed:
        wait_for(lambda: list(tmp_path.glob("out/*/train_000001.bin")))
        of_run = children(killed.pid)
        killed.kill()
    assert len(of_run) >= 2
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in of_run))
    # in a small process, since what a process starts counts the memory of this one until it runs
    measuring = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
    measuring += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    measured = [sys.executable, "-c", measuring, *command]
    done = subprocess.run(measured, capture_output=True, text=True, check=True)
    assert len(list((tmp_path / "out").glob("train_*.bin"))) > 20
    assert int(done.stdout.split()[-1]) < 400_000  # KB, of the largest process
