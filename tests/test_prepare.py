"""Data sets of documents: shards, several processes, what a kill leaves, folders as input."""

import gzip
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import REPO, children, wait_for
from test_data import cached_tokenizers as cached_tokenizers
from test_data import contents, error_of, needs_gpt2, run, write_jsonl, write_tokenizer

from isogpt.data.data_folder import open_split, read_meta

sys.path.insert(0, str(REPO / "data"))
from read_files import read_documents

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
    assert list(read_documents(str(source))) == DOCUMENTS + others


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


def test_a_tokenizing_process_that_is_killed_is_reported(source, tmp_path):
    """As for want of memory: in one line, not by waiting for its answer."""
    write_jsonl(source / "a.jsonl", ["word1 " * 1000] * 2000)
    command = [sys.executable, SCRIPT, *arguments(source, tmp_path / "out", "--num_proc=2")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        wait_for(lambda: list(tmp_path.glob("out/*/train.bin")))
        commands = {Path(f"/proc/{pid}/cmdline").read_text(): pid for pid in children(running.pid)}
        os.kill(next(pid for command, pid in commands.items() if "spawn_main" in command), signal.SIGKILL)
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
    documents = read_documents(str(tmp_path))
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
