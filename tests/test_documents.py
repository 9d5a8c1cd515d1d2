"""Windows that begin with a document: which ones, what they leave out, and documents.bin."""

import json
import pickle
import re
import sys

import numpy as np
import pytest
import torch
from documents import documents_of, loss_of
from runs import REPO, TINY, train_defaults

from isogpt.checkpoint.start import OF_UPDATES, changes_of_curve
from isogpt.data import documents
from isogpt.data.dataset import open_dataset
from isogpt.data.documents import DocumentWindows
from isogpt.data.token_files import TokenFile
from isogpt.data.vocabulary import of_characters
from isogpt.data.windows import shuffled_windows
from model import GPT, GPTConfig

sys.path.insert(0, str(REPO / "data"))
import find_documents
import write_files

END, BLOCK = 9, 8  # the end-of-text id


@pytest.fixture(autouse=True)
def small_sections(monkeypatch):
    """Sections of 7 documents, 3 of which are counted at once."""
    monkeypatch.setattr(documents, "SECTION", 7)
    monkeypatch.setattr(documents, "AT_ONCE", 3)


def index_of(begins, folder):
    """A documents.bin with these positions."""
    path = folder / "documents.bin"
    np.asarray(begins, np.int64).tofile(path)
    return TokenFile(path, "int64")


def windows_in_a_loop(begins, n_tokens, block_size):
    """The starts of the windows, document by document."""
    starts, section = [], documents.SECTION
    for first in range(0, len(begins), section):
        at, last = first, min(first + section, len(begins))
        while at < last and begins[at] + block_size + 1 <= n_tokens:
            starts.append(begins[at])
            end = begins[at] + block_size
            following = at + 1
            while following < len(begins) and begins[following] < end:
                following += 1  # begins within this window
            is_cut = (begins + [n_tokens])[following] > end
            at = max(at + 1, following - 1) if is_cut else following
    return starts


def random_documents(rng, n, mean):
    """Positions of n documents, and the number of tokens, some of them before the first document."""
    lengths = np.maximum(1, rng.exponential(mean, n).astype(int))
    lengths[rng.random(n) < 0.2] = rng.choice([1, BLOCK - 1, BLOCK, BLOCK + 1])
    begins = np.append(0, lengths.cumsum()) + rng.integers(3)
    return begins[:-1].tolist(), int(begins[-1])


# ------------------------------------------------------------------------------------------------------------
# the windows


def test_windows_are_those_of_a_loop_over_documents(tmp_path):
    rng = np.random.default_rng(0)
    for n, mean in [(n, mean) for n in (3, 7, 8, 20, 21, 22, 61) for mean in (2, 9, 40)]:
        begins, n_tokens = random_documents(rng, n, mean)
        n_tokens += BLOCK + 1  # so that one window fits
        index = index_of(begins, tmp_path)
        windows = DocumentWindows(index, n_tokens, BLOCK)
        starts = windows_in_a_loop(begins, n_tokens, BLOCK)
        assert windows.starts(np.arange(len(windows))).tolist() == starts
        places = rng.integers(len(starts), size=40)
        assert windows.starts(places).tolist() == [starts[place] for place in places]
        assert starts == sorted(set(starts)) and set(starts) <= set(begins)
        assert starts[-1] + BLOCK + 1 <= n_tokens

        counts = np.zeros(n_tokens, int)  # how often each token is input
        for start in starts:
            counts[start : start + BLOCK] += 1
        assert windows.left_out == (counts == 0).sum()
        assert windows.repeated == np.maximum(counts - 1, 0).sum()
        for begin, end in zip(begins, [*begins[1:], n_tokens], strict=True):
            if begin + BLOCK + 1 <= n_tokens:  # those at the end of the file have no window of their own
                assert counts[begin : min(end, begin + BLOCK)].all()


def test_documents_side_by_side_are_read_once(tmp_path):
    begins = list(range(0, 20 * 4, 4))  # two fill a window: nothing is cut
    windows = DocumentWindows(index_of(begins, tmp_path), 81, BLOCK)
    # a section contains 7 documents, so that its last window also reads the first one of the next section
    assert windows.starts(np.arange(len(windows))).tolist() == [0, 8, 16, 24, 28, 36, 44, 52, 56, 64, 72]
    assert (windows.left_out, windows.repeated) == (1, 8)


def test_an_epoch_reads_each_window_once(tmp_path):
    begins, n_tokens = random_documents(np.random.default_rng(1), 200, 12)
    windows = DocumentWindows(index_of(begins, tmp_path), n_tokens, BLOCK)
    starts, n = windows_in_a_loop(begins, n_tokens, BLOCK), len(windows)
    first, second = shuffled_windows(windows, 1337, np.arange(2 * n)).reshape(2, n).tolist()
    assert sorted(first) == sorted(second) == starts and first != second != starts != first


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
    find_documents.main([str(folder), f"--id={END}"])
    assert (
        "documents.bin: 60 documents of 17 tokens on average, separated by token 9" in capsys.readouterr().out
    )
    begins = np.fromfile(folder / "documents.bin", np.int64)
    expected = np.append(0, (LENGTHS + 1).cumsum()[:-1]) - (0 if is_before else 1)
    assert begins.tolist() == np.maximum(expected, 0).tolist()
    meta = json.loads((folder / "meta.json").read_text())
    assert meta == {
        "dtype": "uint16",
        "vocab_size": END + 1,
        "train_documents": 60,
        "searched_tokens": len(ids),
    }
    data = open_dataset(str(folder), BLOCK, data_order="documents")
    (windows,) = (source.windows for source in data.sources)
    starts = windows.starts(np.arange(len(windows)))
    assert starts.tolist() == windows_in_a_loop(begins.tolist(), len(ids), BLOCK)
    assert set(np.array(ids)[starts[1:]]) == {END}
    assert data.digest == open_dataset(str(folder), BLOCK).digest, "evaluations stay comparable"
    assert not open_dataset(str(folder), BLOCK).documents


def test_the_vocabulary_says_what_ends_a_document(tmp_path):
    gpt2 = find_documents.gpt2_or_unknown(50304, "")
    assert find_documents.end_of_text(gpt2) == 50256
    table = of_characters({"a": 0, "<|endoftext|>": 1})
    assert find_documents.end_of_text(table) == 1


def changed(folder, **facts):
    """Replace facts in a meta.json."""
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | facts))


def test_ranks_compare_documents(tmp_path):
    digests = []
    for name in "ab":
        folder = write(tmp_path / name, ids_of_documents(False), {"train_documents": 3})
        begins = np.flatnonzero(np.array(ids_of_documents(False)) == END)[: 3 if name == "a" else 4]
        begins[-1:].tofile(folder / "documents.bin")
        np.concatenate([[0], begins[-2:]]).tofile(folder / "documents.bin")
        data = open_dataset(str(folder), BLOCK, data_order="documents")
        digests.append(data.facts()["the data's documents"][name])
    assert digests[0] != digests[1]


def refusal(folder, block_size=BLOCK):
    """The message with which a data set is refused."""
    with pytest.raises(ValueError) as e:
        open_dataset(str(folder), block_size, data_order="documents")
    assert "\n" not in str(e.value)
    return str(e.value)


def test_a_file_that_does_not_belong_to_the_tokens_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    folder = write(tmp_path / "data", ids_of_documents(False))
    command = f": type: python data/find_documents.py {folder}"
    said = refusal(folder)
    assert said.startswith("data_order 'documents' needs ") and command in said
    find_documents.main([str(folder), f"--id={END}"])
    begins = np.fromfile(folder / "documents.bin", np.int64)
    ids = ids_of_documents(False)

    for positions, count, problem in (
        (begins, 59, "480 bytes, not 8 for each of train_documents in meta.json, 59"),
        (begins, None, "not 8 for each of train_documents in meta.json, None"),
        (begins, "60", "not 8 for each of train_documents in meta.json, 60"),
        (begins[:0], 0, "contains 0 bytes"),
        (begins.astype(np.int32), 30, "belongs to other tokens|do not increase"),
        (begins + 1, 60, "belongs to other tokens: in train, its documents begin with 9 different ids"),
        (np.append(begins, len(ids) + 5), 61, "do not increase, or are not within the "),
        (begins[[*range(50), 49, *range(51, 60)]], 60, "do not increase"),
        (begins[[*range(30), 29, 28, *range(32, 60)]], 60, "do not increase"),
        (np.append(-5, begins[1:]), 60, "not within"),
    ):
        positions.tofile(folder / "documents.bin")
        changed(folder, train_documents=count)
        said = refusal(folder)
        assert re.search(problem, said) and said.endswith(command), said
    with open(folder / "documents.bin", "wb") as f:
        f.write(begins.tobytes() + b"123")
    changed(folder, train_documents=60)
    assert "483 bytes" in refusal(folder)
    find_documents.main([str(folder), f"--id={END}"])
    assert len(open_dataset(str(folder), BLOCK, data_order="documents").sources[0].windows) > 10
    with open(folder / "train.bin", "ab") as f:
        f.write(np.array([5, END], np.uint16).tobytes())
    said = refusal(folder)
    assert f"for {len(ids)} tokens, but train contains {len(ids) + 2}" in said and said.endswith(command)


def test_a_block_size_for_which_no_window_fits_is_refused(tmp_path):
    folder = write(tmp_path / "data", [END, 1, 2, 3, END, 4, 5])
    find_documents.main([str(folder), f"--id={END}"])
    data = open_dataset(str(folder), 6, data_order="documents")
    assert data.sources[0].windows.starts(np.arange(1)).tolist() == [0]
    np.array([4], np.int64).tofile(folder / "documents.bin")
    changed(folder, train_documents=1)
    assert "is followed by block_size 3 tokens: set a smaller --block_size=" in refusal(folder, 3)
    assert len(open_dataset(str(folder), 2, data_order="documents").sources[0].windows) == 1


def test_a_text_without_documents_is_refused(tmp_path):
    for ids, args, problem in (
        ([1, 2, 3, END], ["--id=9"], "token 9, which should separate documents, separates none in "),
        (
            [1, 2, 3],
            ["--id=9"],
            "separates none in .*train.bin: give the id with --id=, or train on the text ",
        ),
        ([1, 2, 3], ["--id=100000"], "separates none"),
        (
            [1, END, 3],
            [],
            "it is not known which id ends a document: .* do not fit GPT-2; give the id with --id=",
        ),
        (
            [1, 1, 2],
            ["char"],
            "the vocabulary contains no <|endoftext|> to end documents".replace("|", r"\|"),
        ),
    ):
        folder = write(tmp_path / f"{len(list(tmp_path.iterdir()))}", ids)
        if args == ["char"]:
            args = []
            changed(folder, tokenizer="char", stoi={"a": 0, "b": 1, "c": 2})
            (folder / "meta.pkl").write_bytes(pickle.dumps({"stoi": {"a": 0, "b": 1, "c": 2}}))
        before = (folder / "meta.json").read_text()
        with pytest.raises(ValueError, match=problem):
            find_documents.main([str(folder), *args])
        assert (folder / "meta.json").read_text() == before
        names = {path.name for path in folder.iterdir()} - {"meta.pkl"}
        assert names == {"train.bin", "val.bin", "meta.json"}


# ------------------------------------------------------------------------------------------------------------
# train.py


def test_a_resume_says_that_windows_are_cut_anew():
    config = dict.fromkeys(OF_UPDATES, 0) | {"dataset": "a", "seed": 1, "gradient_accumulation_steps": 1}
    config |= {"batch_size": 1, "block_size": 8, "data_order": "documents"}
    run = {"config": config | {"block_size": 16}}
    (sentence,) = changes_of_curve(config, run, {})
    assert "block_size 8 (was 16)" in sentence
    (sentence,) = changes_of_curve(config, {"config": config | {"data_order": "shuffle"}}, {})
    assert "data_order documents (was shuffle)" in sentence


def test_a_resume_says_that_documents_have_changed(tmp_path):
    ids = np.array(ids_of_documents(False))
    begins = np.append(0, np.flatnonzero(ids == END)[:-1])
    folder = write(tmp_path / "data", ids, {"train_documents": 60})

    def described(begins):
        begins.tofile(folder / "documents.bin")
        changed(folder, train_documents=len(begins))
        return open_dataset(str(folder), BLOCK, data_order="documents").describe()

    config = train_defaults(data_order="documents", block_size=BLOCK)
    now, before = described(begins), described(begins[begins != begins[30]])
    assert [*now] == ["documents"] and open_dataset(str(folder), BLOCK).describe() == {}

    def said(data, recorded, **was):
        run = {"config": config | was, "isogpt": recorded}
        return changes_of_curve(config, run, data)

    assert said(now, now) == said(now, {}) == []
    (sentence,) = said(now, before)
    other = "windows that begin with other documents of data"
    assert sentence == f"this run continues with {other}: the loss curve changes"
    (sentence,) = said(now, before, block_size=4)
    assert "block_size 8 (was 4):" in sentence and other not in sentence
    (sentence,) = said({}, before, data_order="shuffle")
    assert other not in sentence


def test_a_run_reads_documents(zygote, tmp_path):
    ids = ids_of_documents(False) * 4
    folder = write(tmp_path / "tiny", ids)
    find_documents.main([str(folder), f"--id={END}"])
    args = [*TINY, f"--dataset={folder}", "--block_size=8", "--data_order=documents", "--out_dir=out"]
    text = zygote.train([*args, "--max_iters=3"], tmp_path).text()
    (windows,) = open_dataset(str(folder), 8, data_order="documents").documents.values()
    left_out, repeated = (f"{n / len(ids):.1%}" for n in (windows.left_out, windows.repeated))
    begin = f"windows: tiny: {len(windows)}, each of which begins with one of 240 documents; "
    assert f"{begin}{left_out} of the tokens are left out" in text and f" {repeated} are read twice" in text
    assert "iter 3: loss" in text


def test_the_loss_on_documents_is_that_of_each_document_alone(tmp_path):
    texts = [[1, 2, 3], [4], [*range(1, 9), *range(1, 9)], [5, 6]]  # the third one is longer than a window
    ids = np.array([END, *(token for text in texts for token in (*text, END))], np.uint16)
    for split in ("train", "val"):
        ids.tofile(tmp_path / f"{split}.bin")
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 10}))
    find_documents.main([str(tmp_path), f"--id={END}"])
    of_val = documents_of(open_dataset(str(tmp_path), BLOCK, data_order="documents"))
    assert [document.tolist() for document in of_val] == [[END, *text, END] for text in texts]
    model = GPT(GPTConfig(block_size=BLOCK, vocab_size=10, n_layer=1, n_head=1, n_embd=8), seed=1).eval()
    total, count = 0.0, 0
    for text in texts:
        tokens = torch.tensor([END, *text, END])[None, : BLOCK + 1]
        _, mean = model(tokens[:, :-1], tokens[:, 1:])
        total += mean.item() * (tokens.size(1) - 1)
        count += tokens.size(1) - 1
    assert loss_of(model, of_val) == pytest.approx(total / count, rel=1e-6)
