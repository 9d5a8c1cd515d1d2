"""Windows that begin with a document: which ones, what they leave out, and documents.bin."""

import itertools
import json
import re
import sys

import numpy as np
import pytest
from runs import REPO, TINY

from isogpt.data.dataset import open_dataset
from isogpt.data.documents import DocumentWindows
from isogpt.data.windows import shuffled_windows

sys.path.insert(0, str(REPO / "data"))
import find_documents
import write_files

END, BLOCK = 9, 8  # the end-of-text id


def windows_in_a_loop(begins, n_tokens, block_size):
    """The starts of the windows: of each block, the first document that begins in it or after it."""
    fitting = [begin for begin in begins if begin + block_size + 1 <= n_tokens]
    blocks = range(0, n_tokens - block_size, block_size)
    return sorted({min([b for b in fitting if b >= block], default=fitting[-1]) for block in blocks})


# ------------------------------------------------------------------------------------------------------------
# the windows


def test_windows_are_those_of_a_loop_over_documents():
    rng = np.random.default_rng(0)
    for n, mean in itertools.product((3, 8, 61), (2, 9, 40)):
        lengths = np.maximum(1, rng.exponential(mean, n).astype(int))
        lengths[rng.random(n) < 0.2] = rng.choice([1, BLOCK - 1, BLOCK, BLOCK + 1])
        # some of the tokens are before the first document, and one window fits
        begins = (np.append(0, lengths.cumsum()) + rng.integers(3)).tolist()
        n_tokens = begins.pop() + BLOCK + 1
        windows = DocumentWindows(np.array(begins), n_tokens, BLOCK)
        starts = windows_in_a_loop(begins, n_tokens, BLOCK)
        assert windows.starts(np.arange(len(windows))).tolist() == starts
        counts = np.zeros(n_tokens, int)  # how often each token is input
        for start in starts:
            counts[start : start + BLOCK] += 1
        assert windows.unread == pytest.approx((counts == 0).mean())
        assert windows.repeated == pytest.approx(np.maximum(counts - 1, 0).mean())
        epochs = shuffled_windows(windows, 1337, np.arange(2 * len(starts))).reshape(2, -1).tolist()
        assert [sorted(epoch) for epoch in epochs] == [starts, starts], "each once per epoch"
    assert epochs[0] != epochs[1] != starts != epochs[0], "in a random order"


# ------------------------------------------------------------------------------------------------------------
# documents.bin


LENGTHS = np.random.default_rng(2).integers(1, 30, 60)


def ids_of_documents(is_before):
    """Documents of random ids, with the end-of-text id before each, as in llm.c, or after each, as here."""
    rng, pieces = np.random.default_rng(3), []
    for length in LENGTHS:
        ids = rng.integers(0, END, length).tolist()
        pieces += [END, *ids] if is_before else [*ids, END]
    return pieces


def write(folder, train, meta=None):
    """A data set with these ids."""
    folder.mkdir()
    for split in ("train", "val"):
        np.array(train, np.uint16).tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": END + 1} | (meta or {})))
    return folder


@pytest.mark.parametrize("is_before", [True, False])
def test_documents_begin_with_the_end_of_text_token_before_them(tmp_path, is_before, monkeypatch, capsys):
    ids = ids_of_documents(is_before)
    folder = write(tmp_path / "data", ids)
    parts = write_files.parts_of

    def small_parts(tokens):  # of 10 ids, as parts of a file
        return (part[:, i : i + 10] for part in parts(tokens) for i in range(0, part.shape[1], 10))

    monkeypatch.setattr(write_files, "parts_of", small_parts)
    find_documents.find_documents(folder, END)
    assert "60 documents of 17 tokens on average, separated by token 9\n" in capsys.readouterr().out
    begins = np.fromfile(folder / "documents.bin", np.int64)
    expected = np.append(0, (LENGTHS + 1).cumsum()[:-1]) - (0 if is_before else 1)
    assert begins.tolist() == np.maximum(expected, 0).tolist()
    meta = {"dtype": "uint16", "vocab_size": END + 1, "train_documents": 60, "searched_tokens": len(ids)}
    assert json.loads((folder / "meta.json").read_text()) == meta
    data = open_dataset(str(folder), BLOCK, data_order="documents")
    starts = data.windows.starts(np.arange(len(data.windows)))
    assert starts.tolist() == windows_in_a_loop(begins.tolist(), len(ids), BLOCK)
    assert set(np.array(ids)[starts[1:]]) == {END}
    assert data.digest == open_dataset(str(folder), BLOCK).digest, "evaluations stay comparable"
    assert not open_dataset(str(folder), BLOCK).describe()


def test_a_file_that_does_not_belong_to_the_tokens_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    ids = ids_of_documents(False)
    folder = write(tmp_path / "data", ids)
    command = f"type python data/find_documents.py {folder}"
    message = f"^{folder}/documents.bin is missing or of another train.bin: {command}$"
    for name, content in ("documents.bin", b""), ("documents.bin", bytes(8)), ("train.bin", bytes(len(ids))):
        find_documents.find_documents(folder, END)
        (folder / name).unlink()
        if content:
            (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_dataset(str(folder), BLOCK, data_order="documents")


@pytest.mark.parametrize(("ids", "token"), [([1, 2, 3, END], END), ([1, END, 3], None)])
def test_a_text_without_documents_is_refused(tmp_path, ids, token):
    folder = write(tmp_path / "data", ids)
    problem = f"train.bin: no documents, which token {token} would separate; set --id="
    with pytest.raises(ValueError, match=problem):
        find_documents.find_documents(folder, token)
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin", "meta.json"}


# ------------------------------------------------------------------------------------------------------------
# train.py


def test_a_run_reads_documents(zygote, tmp_path):
    ids = ids_of_documents(False) * 4
    folder = write(tmp_path / "tiny", ids)
    find_documents.find_documents(folder, END)
    args = [*TINY, f"--dataset={folder}", "--block_size=8", "--data_order=documents", "--out_dir=out"]
    text = zygote.train([*args, "--max_iters=3"], tmp_path).text()
    windows = open_dataset(str(folder), 8, data_order="documents").windows
    read = f"{windows.unread:.1%} of the tokens are left out, {windows.repeated:.1%} read twice"
    assert f"windows: tiny: {len(windows)}; {read}" in text
    assert "iter 3: loss" in text
    text = zygote.train([*args, "--max_iters=4", "--init_from=resume"], tmp_path).text()
    assert "this run continues with" not in text
    find_documents.find_documents(folder, 5)
    compared = open_dataset(str(folder), 8, data_order="documents").facts()["the data's documents"]
    assert compared != {"tiny": windows.digest}, "ranks with different documents do not start"
    text = zygote.train([*args, "--max_iters=5", "--init_from=resume"], tmp_path).text()
    assert re.search(r"this run continues with documents of tiny \w{8} \(was \w{8}\): the loss", text)
