"""Windows that begin with a document: which ones, what they leave out, and documents.bin."""

import itertools
import re
import sys

import numpy as np
import pytest
from runs import REPO, TINY
from test_loader import reader_of
from test_validation import write

from isogpt.data.dataset import open_dataset

sys.path.insert(0, str(REPO / "data"))
import find_documents

END, BLOCK = 9, 8  # the end-of-text id


def windows_in_a_loop(begins, n_tokens, block_size):
    """The starts of the windows: of each block, the first document that begins in it or after it."""
    fitting = [begin for begin in begins if begin + block_size + 1 <= n_tokens]
    blocks = range(0, n_tokens - block_size, block_size)
    return sorted({min([b for b in fitting if b >= block], default=fitting[-1]) for block in blocks})


# ------------------------------------------------------------------------------------------------------------
# the windows


def test_windows_are_those_of_a_loop_over_documents(tmp_path):
    rng = np.random.default_rng(0)
    for n, mean in itertools.product((3, 8, 61), (2, 9, 40)):
        lengths = np.maximum(1, rng.exponential(mean, n).astype(int))
        lengths[rng.random(n) < 0.2] = rng.choice([1, BLOCK - 1, BLOCK, BLOCK + 1])
        # some of the tokens are before the first document, and one window fits
        begins = (np.append(0, lengths.cumsum()) + rng.integers(3)).tolist()
        n_tokens = begins.pop() + BLOCK + 1
        write(tmp_path, range(20), train=np.zeros(n_tokens), vocab_size=20, train_documents=n)
        np.array(begins).tofile(tmp_path / "documents.bin")
        data = open_dataset(str(tmp_path), BLOCK, data_order="documents")
        starts = windows_in_a_loop(begins, n_tokens, BLOCK)
        counts = np.zeros(n_tokens, int)  # how often each token is input
        for start in starts:
            counts[start : start + BLOCK] += 1
        assert data.windows.unread == pytest.approx((counts == 0).mean())
        assert data.windows.repeated == pytest.approx(np.maximum(counts - 1, 0).mean())
        reader = reader_of(data, "documents", sequences=len(starts))
        epochs = [reader.starts(step).tolist() for step in (0, 1)]
        assert [sorted(epoch) for epoch in epochs] == [starts, starts], "each once per epoch"
    assert epochs[0] != epochs[1] != starts != epochs[0], "in a random order"


# ------------------------------------------------------------------------------------------------------------
# documents.bin


LENGTHS = np.random.default_rng(2).integers(1, 30, 60)
LENGTHS[20] = 300_000  # more ids than are searched at a time


def ids_of_documents(is_before, lengths=LENGTHS):
    """Documents of random ids, with the end-of-text id before each, as in llm.c, or after each, as here."""
    rng, pieces = np.random.default_rng(3), []
    for length in lengths:
        ids = rng.integers(0, END, length).tolist()
        pieces += [END, *ids] if is_before else [*ids, END]
    return pieces


@pytest.mark.parametrize("is_before", [True, False])
def test_documents_begin_with_the_end_of_text_token_before_them(tmp_path, is_before, capsys):
    ids = ids_of_documents(is_before)
    write(tmp_path, ids, train=ids, vocab_size=20)
    find_documents.find_documents(tmp_path, END)
    assert "60 documents of 5,0" in capsys.readouterr().out
    begins = np.fromfile(tmp_path / "documents.bin", np.int64)
    expected = np.append(0, (LENGTHS + 1).cumsum()[:-1]) - (0 if is_before else 1)
    assert begins.tolist() == np.maximum(expected, 0).tolist()
    data, plain = (open_dataset(str(tmp_path), 1024, data_order=order) for order in ("documents", "random"))
    starts = data.windows.starts(np.arange(len(data.windows)))
    assert starts.tolist() == windows_in_a_loop(begins.tolist(), len(ids), 1024)
    assert set(np.array(ids)[starts[1:]]) == {END}
    assert data.digest == plain.digest, "evaluations stay comparable"
    assert data.describe() and not plain.describe()


def test_a_file_that_does_not_belong_to_the_tokens_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    ids = ids_of_documents(False, LENGTHS[:20])
    folder = write(tmp_path / "data", ids, train=ids, vocab_size=20)
    message = f"documents.bin .*: type python data/find_documents.py {folder}$"
    for name, content in ("documents.bin", b""), ("documents.bin", bytes(8)), ("train.bin", bytes(len(ids))):
        find_documents.find_documents(folder, END)
        (folder / name).unlink()
        if content:
            (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_dataset(str(folder), BLOCK, data_order="documents")


@pytest.mark.parametrize(("ids", "token"), [([1, 2, 3, END], END), ([1, END, 3], None)])
def test_a_text_without_documents_is_refused(tmp_path, ids, token):
    folder = write(tmp_path / "data", ids, train=ids, vocab_size=20)
    problem = f"train.bin: no documents, which token {token} would separate; set --id="
    with pytest.raises(ValueError, match=problem):
        find_documents.find_documents(folder, token)
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin", "meta.json"}


# ------------------------------------------------------------------------------------------------------------
# train.py


def test_a_run_reads_documents(zygote, tmp_path):
    ids = ids_of_documents(False, LENGTHS[:20]) * 12
    folder = write(tmp_path / "tiny", ids, train=ids, vocab_size=20)
    find_documents.find_documents(folder, END)
    args = [*TINY, f"--dataset={folder}", "--block_size=8", "--data_order=documents", "--out_dir=out"]
    text = zygote.train([*args, "--max_iters=3"], tmp_path).text()
    data = open_dataset(str(folder), 8, data_order="documents")
    left_out, twice = f"{data.windows.unread:.1%}", f"{data.windows.repeated:.1%}"
    assert re.search(f"windows: tiny: {len(data.windows)}; {left_out} .* {twice} read twice", text)
    assert "iter 3: loss" in text
    text = zygote.train([*args, "--max_iters=4", "--init_from=resume"], tmp_path).text()
    assert "this run continues with" not in text
    find_documents.find_documents(folder, 5)
    other = open_dataset(str(folder), 8, data_order="documents")
    assert other.facts() != data.facts(), "ranks with different documents do not start"
    text = zygote.train([*args, "--max_iters=5", "--init_from=resume"], tmp_path).text()
    assert re.search(r"this run continues with documents of tiny \w{8} \(was \w{8}\): the loss", text)
