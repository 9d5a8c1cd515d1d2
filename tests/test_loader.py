"""Which sequences a step reads, how they are divided over the ranks, reading ahead, and damaged data sets."""

import gzip
import itertools
import json
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import default_plan, wait_for
from test_hostile import Evil

from isogpt.checkpoint.progress import Progress
from isogpt.common.random_numbers import EVAL_TRAIN, EVAL_VAL, TRAIN
from isogpt.data import data_folder
from isogpt.data.data_folder import read_meta
from isogpt.data.dataset import GPT2_VOCAB, highest_id, open_dataset
from isogpt.data.reader import Reader, read_rows
from isogpt.data.token_files import open_files
from isogpt.data.windows import Windows, permuted, random_windows, shuffled_windows
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.shares import PADDING, share_of

CPU = torch.device("cpu")


def plan_for(sequences, micro_batch, vocab_size=65):
    """A plan whose steps consist of this many sequences."""
    args = {"block_size": BLOCK, "vocab_size": vocab_size}
    sizes = {"batch_size": sequences, "gradient_accumulation_steps": 1, "micro_batch": micro_batch}
    return default_plan(**sizes, model_args=args)


N, BLOCK = 1003, 8  # a text of 125 windows and a bit


def shuffled(n_tokens, block_size, seed, step, n):
    """The windows of a step of n sequences, in shuffled order."""
    return shuffled_windows(Windows(n_tokens, block_size), seed, step * n + np.arange(n))


# ------------------------------------------------------------------------------------------------------------
# which sequences


def test_windows_have_not_changed():
    """A change would change every seed's loss curve, and a resumed run would read other data than before."""
    for (seed, stream, step), golden in {
        (1337, TRAIN, 600000): [650034, 261611, 224049, 96534],
        (1337, EVAL_VAL, 0): [793594, 245282, 619514, 211387],
        (7, TRAIN, 0): [211650, 225194, 60796, 120521],
    }.items():
        assert random_windows(1000003, 64, seed, stream, step, 4).tolist() == golden
    for (seed, step), golden in {
        (1337, 5000): [709376, 173888, 933952, 940800],
        (7, 0): [256, 205312, 736768, 300736],
    }.items():
        assert shuffled(1000003, 64, seed, step, 4).tolist() == golden


def test_windows_are_uniform_and_depend_on_their_arguments_alone():
    """Seeds, uses and steps draw differently, and the global generators are neither read nor advanced."""
    numpys, torchs = np.random.get_state()[1].copy(), torch.get_rng_state()
    counts = np.bincount(random_windows(108, BLOCK, 1, TRAIN, 0, 100_000), minlength=100)
    # chi-squared: 99 on average, standard deviation 14
    assert len(counts) == 100 and 50 < ((counts - 1000) ** 2 / 1000).sum() < 160
    orders = np.array([permuted(np.arange(6), 6, 1337, epoch) for epoch in range(1500)])
    places = np.array([np.bincount(column, minlength=6) for column in orders.T])
    assert ((places - 250) ** 2 / 250).sum() < 50  # 25 on average, standard deviation 7
    kinds = [*itertools.product((0, 1, 2**40), (TRAIN, EVAL_TRAIN, EVAL_VAL), (0, 1, 2, 2**40))]
    drawn = [random_windows(10**9, BLOCK, *kind, 8).tolist() for kind in kinds]
    assert len(np.unique(drawn)) == 8 * len(kinds)
    assert [random_windows(10**9, BLOCK, *kind, 8).tolist() for kind in reversed(kinds)] == drawn[::-1]
    assert (np.random.get_state()[1] == numpys).all() and torch.equal(torch.get_rng_state(), torchs)


@pytest.mark.parametrize("n_tokens", [BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 30])
def test_every_window_is_drawn_and_none_exceeds_the_text(tmp_path, n_tokens):
    tokens = file_of(np.arange(n_tokens, dtype=np.uint16), tmp_path)
    drawn = np.unique(random_windows(n_tokens, BLOCK, 1, TRAIN, 3, 2000))
    assert drawn.dtype == np.int64
    assert drawn.tolist() == list(range(n_tokens - BLOCK))  # the last one ends with the text
    windows = (n_tokens - 1) // BLOCK
    each_once = np.unique(shuffled(n_tokens, BLOCK, 1, 0, windows))
    assert each_once.tolist() == [BLOCK * w for w in range(windows)]
    for starts in drawn, each_once:
        x, y = read_rows(tokens, starts, BLOCK)
        assert y.max() == (n_tokens - 1 if starts is drawn else windows * BLOCK)


def test_each_window_appears_once_per_epoch():
    for n in [*range(1, 150), 4095, 4096, 4097, 99991]:
        order = permuted(np.arange(n), n, 1337, 0)
        assert np.array_equal(np.sort(order), np.arange(n)), n
        assert np.array_equal(order[::-3], permuted(np.arange(n)[::-3], n, 1337, 0)), n
    places = np.arange(10**15 - 500, 10**15)
    order = permuted(places, 10**15, 1337, 0)
    assert len(np.unique(order)) == 500 and order.min() >= 0 and order.max() < 10**15


def test_a_resume_with_a_different_batch_continues_the_epoch():
    """No window is repeated or left out: a step that was not finite has read its windows, too."""
    source = SimpleNamespace(windows=Windows(N, BLOCK))
    data = SimpleNamespace(train=range(N), sources=[source], quotas=[1000], begins=np.zeros(1, np.int64))
    progress, read = Progress(tokens_per_step=6 * BLOCK), []
    for n, steps in ((6, 7), (4, 10), (9, 30)):
        run = {"iter_num": progress.step, "isogpt": progress.describe()}
        progress = Progress(tokens_per_step=n * BLOCK)
        progress.rewind(SimpleNamespace(run=run, stored=SimpleNamespace(val_loss=None)))
        reader = Reader(data, "shuffle", 1, plan_for(n, 3), Mesh(), CPU)
        reader.train(progress.step, progress.position)
        for i in range(steps):
            read += reader.starts(progress.step).tolist()
            if i == 2:
                progress.skip()
            else:
                progress.advance()
    assert progress.position == len(read) * BLOCK == progress.tokens + (6 + 4 + 9) * BLOCK
    one_by_one = [shuffled(N, BLOCK, 1, number, 1) for number in range(len(read))]
    assert read == np.concatenate(one_by_one).tolist()


# ------------------------------------------------------------------------------------------------------------
# how they are divided over the ranks


@pytest.mark.parametrize("sequences", [1, 2, 5, 12, 48, 97])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 12, 200])
def test_shares_are_even_and_add_up_to_the_batch(sequences, batch_size):
    starts = 1000 + 10 * np.random.default_rng(0).permutation(sequences)
    for world in 1, 2, 3, 4, 7, 8, 100:
        shares = [share_of(sequences, rank, world, batch_size) for rank in range(world)]
        assert len({(s.micro_steps, s.rows) for s in shares}) == 1
        micro_steps, rows = shares[0].micro_steps, shares[0].rows
        assert 1 <= rows <= batch_size
        assert (micro_steps - 1) * batch_size * world < sequences  # one micro-step fewer would not suffice
        assert (rows - 1) * micro_steps * world < sequences  # nor one row fewer
        picked = [share.pick(starts, step) for share in shares for step in range(micro_steps)]
        assert all(p.shape == (rows,) and p.dtype == np.int64 for p in picked)
        together = np.concatenate(picked)
        assert sorted(together[together != PADDING]) == sorted(starts)


# ------------------------------------------------------------------------------------------------------------
# reading


def file_of(ids, folder):
    """A file train.bin of these ids."""
    ids.tofile(folder / "train.bin")
    return open_files([folder / "train.bin"], ids.dtype.name)


def ids_of(tokens):
    """All ids of a file."""
    return tokens.read(np.array([0]), len(tokens))[0].tolist()


def reader_of(vocab_size):
    return Reader(None, "random", 1, plan_for(3, 3, vocab_size), Mesh(), CPU)


def test_targets_are_the_inputs_shifted_by_one(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 2**16, N).astype(np.uint16)
    tokens[5] = 65535
    starts = [0, 5, PADDING, N - BLOCK - 1]
    x, y = read_rows(file_of(tokens, tmp_path), np.array(starts), BLOCK)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (4, BLOCK)
    for row, start in enumerate(starts):
        window = tokens[start : start + BLOCK + 1].tolist()
        is_padding = start == PADDING
        assert x[row].tolist() == ([0] * BLOCK if is_padding else window[:-1])
        assert y[row].tolist() == ([-1] * BLOCK if is_padding else window[1:])
    padding = reader_of(65).padding_batch()
    assert all(map(torch.equal, padding, (x[[2] * 3], y[[2] * 3])))


def loaders():
    return [t for t in threading.enumerate() if t.name.startswith("loader")]


@pytest.mark.parametrize("rank, world", [(0, 1), (6, 7)])
def test_a_thread_reads_ahead(tmp_path, rank, world):
    """The rows that are read directly; each step is in use or one of two more."""
    tokens = file_of(np.random.default_rng(0).integers(0, 2**16, N).astype(np.uint16), tmp_path)
    share, seen = share_of(20, rank, world, 20), []

    def starts_of(step):
        seen.append((step, threading.current_thread().name))
        return random_windows(N, BLOCK, 1, TRAIN, step, 20)

    batches = reader_of(2**16).read(tokens, map(starts_of, itertools.count()), share, [])
    for number in range(2):
        starts = share.pick(random_windows(N, BLOCK, 1, TRAIN, number, 20), 0)
        assert all(map(torch.equal, next(batches), read_rows(tokens, starts, BLOCK)))
        wait_for(lambda n=number: len(seen) >= 3 + n)
    assert loaders()
    batches.close()  # waits for what has been begun
    assert not loaders()
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert all(thread.startswith("loader") for _, thread in seen)


@pytest.mark.parametrize("place", [0, BLOCK])  # the first input, the last target only
def test_an_id_outside_the_vocabulary_raises_an_error_when_it_is_read(tmp_path, place):
    share, problems = share_of(2, 0, 1, 2), []
    starts = [np.array([100 * step, 100 * step + 50]) for step in range(9)]
    tokens = file_of(np.where(np.arange(N) == 550 + place, 65, 0).astype(np.uint16), tmp_path)
    micro_batches = list(reader_of(65).read(tokens, starts, share, problems))
    assert len(micro_batches) == 9 and not loaders()
    padded = [i for i, (x, y) in enumerate(micro_batches) if (y == -1).all() and not x.any()]
    assert padded == [5], "padding takes its place"
    assert "train.bin holds token id 65, but the vocabulary size is 65: set --" in str(problems[0])
    assert len(list(reader_of(66).read(tokens, starts, share, problems))) == 9 and len(problems) == 1


# ------------------------------------------------------------------------------------------------------------
# the data set on disk


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """data/text in the working folder: 100 and 50 tokens, highest id 89, no metadata."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_folder, "REPOSITORY", tmp_path / "repository")
    return write_data(tmp_path / "data" / "text")


def write_data(path, dtype=np.uint16, highest=89):
    path.mkdir(parents=True)
    (np.arange(100) % 40).astype(dtype).tofile(path / "train.bin")
    val = (np.arange(50) % 40).astype(dtype)
    val[7] = highest
    val.tofile(path / "val.bin")
    return path


def refused(message, name="text", block_size=BLOCK, **options):
    """open_dataset raises ValueError with this message."""
    with pytest.raises(ValueError, match=message):
        open_dataset(name, block_size, **options)


def test_a_data_set_without_metadata_has_gpt2s_vocabulary(folder):
    data = open_dataset("text", BLOCK)
    assert (data.vocab_size, data.highest, data.train.dtype) == (GPT2_VOCAB, 89, np.uint16)
    assert ids_of(data.train) == [i % 40 for i in range(100)] and len(data.val) == 50


def test_missing_files_are_named(folder, tmp_path):
    (folder / "train.bin").unlink()
    refused(r"no train\.bin in data.text or .*repository.data.text or text or .*; prepared data sets: none")
    write_data(tmp_path / "data" / "other")
    refused("prepared data sets: other", name="nosuch")
    (folder / "prepare.py").touch()
    refused(r"no train\.bin .*; run: python data.text.prepare\.py")


@pytest.mark.parametrize("split", ["train", "val"])
def test_invalid_token_files_are_refused(folder, split):
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint32", "vocab_size": 20}))
    for file in (folder / "train.bin", folder / "val.bin"):
        np.arange(20 + (file.stem == split), dtype=np.uint32).tofile(file)
    refused(rf"{split}\.bin holds token id 20, but the vocabulary size is 20: set --vocab_size=21")
    data = open_dataset("text", BLOCK, vocab_size=21)  # the setting takes precedence over the metadata
    assert (data.vocab_size, data.highest, data.train.dtype) == (21, 20, np.uint32)
    (folder / f"{split}.bin").write_bytes(bytes(79))
    refused(rf"{split}\.bin cannot be read, or is of a different dtype: ", vocab_size=21)
    (folder / f"{split}.bin").write_bytes(bytes(32))
    refused(rf"{split}\.bin contains 8 tokens, but block_size 8 needs 9 or more$")


def test_the_highest_id_of_a_large_file(tmp_path):
    """Samples reach both ends of the file."""
    # zeros take no room on the disk
    ids = np.memmap(tmp_path / "train.bin", np.uint8, "w+", shape=2**26 + 5000)
    tokens = open_files([tmp_path / "train.bin"], "uint8")
    assert highest_id(tokens, 8) == 0  # opens the file, before it changes
    for place in 0, 4095, -4096, -1:
        ids[place] = 7
        assert highest_id(tokens, 8) == 7
        ids[place] = 0
    ids[40_000_000:40_100_000] = 9
    assert highest_id(tokens, 10) == 9


def test_invalid_metadata_is_refused(folder):
    for text, message in {
        '{"dtype": "float32"}': r"train.bin is not one row of ids: shape \(50,\), float32, 0 bytes",
        '{"vocab_size": 90': "meta.json cannot be read",
        '{"val_bytes": 1.5}': "val_bytes is 1.5, not a number",
        '{"train_tokens": 99}': "100 tokens, but meta.json says 99",
    }.items():
        (folder / "meta.json").write_text(text)
        refused(message)


def test_what_is_read_of_a_meta_pkl(folder):
    """What nanoGPT reads; forks add entries with names of ours. A meta.json takes precedence."""
    path = folder / "meta.pkl"
    path.write_bytes(pickle.dumps({"vocab_size": 95, "stoi": {"a": 0}, "tokenizer": "own", "dtype": "int8"}))
    assert read_meta(folder) == {"vocab_size": 95, "stoi": {"a": 0}}
    (folder / "meta.json").write_text('{"vocab_size": 96}')
    assert open_dataset("text", BLOCK).vocab_size == 96
    path.write_bytes(pickle.dumps({"a": 1})[:-3])
    refused("meta.pkl cannot be read")


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(folder):
    nested = {"vocab_size": 90, "stoi": {"a": [Evil()]}}
    protocol_0 = b"cos\nsystem\n(S'touch PWNED'\ntR."
    for bad in (pickle.dumps(Evil()), pickle.dumps(nested), protocol_0):
        (folder / "meta.pkl").write_bytes(bad)
        refused(r"meta\.pkl cannot be read: .*only plain values are read")
        assert not Path("PWNED").exists()
    pickle.loads(bad)
    assert Path("PWNED").exists(), "unpickling it does run the code"


def test_where_data_sets_are_searched(tmp_path, monkeypatch):
    repository, working = tmp_path / "repository", tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(data_folder, "REPOSITORY", repository)
    beside = write_data(repository / "data" / "text")
    assert open_dataset("text", BLOCK).folder == open_dataset("data/text", BLOCK).folder == beside
    write_data(working / "data" / "text", highest=77)  # the working folder's takes precedence
    write_data(working / "data" / "mine" / "v2", highest=55)  # as in nanoGPT
    elsewhere = write_data(tmp_path / "elsewhere", highest=66)
    names = ("text", "data/text", "mine/v2", str(elsewhere), "~/elsewhere")
    assert [open_dataset(name, BLOCK).highest for name in names] == [77, 77, 55, 66, 66]


# ------------------------------------------------------------------------------------------------------------
# files that others wrote

LETTERS = np.random.default_rng(0).integers(0, 65, 6000)  # as in a text of 65 different characters
WORDS = np.random.default_rng(1).zipf(1.3, 6000) % 50257


def foreign(folder, train, val=None, **meta):
    """Write the files of somebody else, and their meta.json; val: the end of train."""
    val = train[-len(train) // 4 :] if val is None else val
    for split, content in (("train", train), ("val", val)):
        (folder / f"{split}.bin").write_bytes(bytes(content))
    (folder / "meta.json").write_text(json.dumps(meta))


WIDE = [  # ids, dtypes, metadata
    (WORDS, ("int32", "uint32", "int64", "uint64"), {}),
    (LETTERS, ("int32", "int64"), {"vocab_size": 65}),
    (LETTERS % 2, ("int32", "int64"), {}),
    (LETTERS * 900 + 30_000, ("int32",), {}),
    (WORDS, ("int32",), {"vocab_size": 128_256}),
]


@pytest.mark.parametrize("ids, dtypes, meta", WIDE)
def test_ids_of_a_different_width_are_refused_until_they_are_declared(folder, ids, dtypes, meta):
    for dtype in dtypes:
        for train, split in ((ids.astype(dtype), "train"), (ids.astype(np.uint16), "val")):
            foreign(folder, train, ids.astype(dtype), **meta)
            refused(f'^data/text/{split}.bin holds ids of 32 or 64 bits: add {{"dtype": "uint32"}} to meta')
        foreign(folder, ids.astype(dtype), **meta, dtype=dtype)
        data = open_dataset("text", BLOCK, vocab_size=meta.get("vocab_size", 100_000))
        assert ids_of(data.train) == ids.tolist() and ids_of(data.val) == ids[-1500:].tolist()


def test_uint16_is_never_taken_for_a_different_width(folder):
    rng = np.random.default_rng(2)
    alike = [LETTERS % n for n in (2, 4, 16, 65)] + [WORDS * n for n in (0, 1)] + [WORDS[:100], LETTERS[:37]]
    alike += [np.where(rng.random(6000) < 0.99, 0, LETTERS), np.arange(6000) % 40, np.arange(6000) % 2 * 7]
    for ids in [*alike, rng.integers(0, 50304, 6000), rng.integers(32768, 50304, 6000)]:
        for meta in ({"vocab_size": 65536}, {}) if ids.max() < GPT2_VOCAB else ({"vocab_size": 65536},):
            foreign(folder, ids.astype(np.uint16), **meta)
            assert ids_of(open_dataset("text", BLOCK).train) == ids.tolist()


def test_files_of_something_else_are_refused_for_their_ids(folder):
    ids = WORDS.astype(np.uint16)
    for content in (gzip.compress(ids.tobytes()), WORDS.astype(np.float32), ids.byteswap()):
        foreign(folder, content, content)
        refused("^data/text/train.bin holds token id .*, but .* size is 50304: .* write the file again$")
