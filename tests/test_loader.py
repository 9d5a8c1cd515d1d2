"""Which sequences a step reads, how they are divided over the ranks, reading ahead, and damaged data sets."""

import ctypes
import itertools
import json
import mmap
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import REPO, default_plan, wait_for
from test_validation import write

from isogpt.checkpoint.progress import Progress
from isogpt.data.data_folder import read_meta
from isogpt.data.dataset import GPT2_VOCAB, open_dataset
from isogpt.data.reader import Reader
from isogpt.parallel.mesh import make_mesh
from isogpt.parallel.shares import PADDING, share_of

CPU = torch.device("cpu")
N, BLOCK = 1003, 8  # a text of 125 windows and a bit


def reader_of(data, order="random", sequences=4, seed=1, rank=0, **fields):
    """The reader of a rank whose steps consist of this many sequences of the block size BLOCK."""
    shape = {"block_size": BLOCK, "vocab_size": data.vocab_size}
    sizes = {"batch_size": sequences, "gradient_accumulation_steps": 1, "micro_batch": sequences}
    plan = default_plan(**sizes | {"model_args": shape} | fields)
    return Reader(data, order, seed, plan, make_mesh(rank, plan), CPU)


def zeros(folder, n_tokens, block_size=BLOCK):
    """A data set of zeros, which take no room on the disk."""
    for split in ("train", "val"):
        (folder / f"{split}.bin").touch()
        os.truncate(folder / f"{split}.bin", 2 * n_tokens)
    return open_dataset(str(folder), block_size)


def numbers(folder, n_tokens):
    """A data set in which each id is its position."""
    return open_dataset(str(write(folder, range(40), train=range(n_tokens), vocab_size=2**16)), BLOCK)


# ------------------------------------------------------------------------------------------------------------
# which sequences


def test_windows_have_not_changed(tmp_path):
    """A change would change every seed's loss curve, and a resumed run would read other data than before."""
    data, shape = zeros(tmp_path, 1_000_003, 64), {"block_size": 64, "vocab_size": 9}
    for order, seed, step, golden in (
        ("random", 1337, 600000, [650034, 261611, 224049, 96534]),
        ("shuffle", 1337, 5000, [709376, 173888, 933952, 940800]),
    ):
        reader = reader_of(data, order, seed=seed, model_args=shape)
        assert reader.starts(step).tolist() == golden
    reader = reader_of(data, seed=1337, model_args=shape)
    assert reader.eval_windows("val", 4).tolist() == [793594, 245282, 619514, 211387]


def test_windows_are_uniform_and_depend_on_their_arguments_alone(tmp_path):
    """Seeds, uses and steps draw differently, and the global generators are neither read nor advanced."""
    numpys, torchs = np.random.get_state()[1].copy(), torch.get_rng_state()
    counts = np.bincount(reader_of(zeros(tmp_path, 108), sequences=100_000).starts(0), minlength=100)
    # chi-squared: 99 on average, standard deviation 14
    assert len(counts) == 100 and 50 < ((counts - 1000) ** 2 / 1000).sum() < 160
    six = reader_of(zeros(tmp_path, 6 * BLOCK + 1), "shuffle", sequences=6 * 1500)
    places = six.starts(0).reshape(1500, 6) // BLOCK
    counts = np.array([np.bincount(column, minlength=6) for column in places.T])
    assert ((counts - 250) ** 2 / 250).sum() < 50  # 25 on average, standard deviation 7
    data = zeros(tmp_path, 10**9)

    def drawn(seed):
        reader = reader_of(data, sequences=8, seed=seed)
        evaluated = [reader.eval_windows(split, 8) for split in ("train", "val")]
        return np.concatenate([*evaluated, *(reader.starts(step) for step in (0, 1, 2, 2**40))]).tolist()

    of_seeds = [drawn(seed) for seed in (0, 1, 2**40)]
    assert len(np.unique(of_seeds)) == 3 * 6 * 8 and drawn(1) == of_seeds[1]
    assert (np.random.get_state()[1] == numpys).all() and torch.equal(torch.get_rng_state(), torchs)


def test_every_window_is_drawn_and_none_exceeds_the_text(tmp_path):
    for n_tokens in (BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 30):
        reader = reader_of(numbers(tmp_path, n_tokens), sequences=300)
        assert np.unique(reader.starts(3)).tolist() == [*range(n_tokens - BLOCK)]
        x, y = next(reader.train(3, 0))
        assert torch.equal(x + 1, y) and y.max() == n_tokens - 1


def test_each_window_appears_once_per_epoch(tmp_path):
    """Whatever is left of the text after the last one."""
    for n in (*range(1, 20), 63, 64, 65, 99, 4095, 4096, 4097, 99991):
        reader = reader_of(zeros(tmp_path, n * BLOCK + 1 + n % BLOCK), "shuffle", sequences=n)
        epochs = [reader.starts(step).tolist() for step in range(3)]
        assert [sorted(epoch) for epoch in epochs] == [[*range(0, n * BLOCK, BLOCK)]] * 3, n
        assert n < 20 or epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_shuffle_keeps_nothing_of_the_data_set(tmp_path):
    data = zeros(tmp_path, 10**11)  # of more windows than 32 bits count
    reader_of(data, "shuffle").starts(7)  # imports what numpy needs
    reader = reader_of(data, "shuffle", sequences=480)
    tracemalloc.start()
    starts = reader.starts(7)
    stays, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6 and stays - starts.nbytes < 1000
    assert len(np.unique(starts)) == 480 and starts.min() >= 0 and 0.9e11 < starts.max() < 1e11 - BLOCK


def test_a_resume_with_a_different_batch_continues_the_epoch(tmp_path):
    """No window is repeated or left out: a step that was not finite has read its windows, too."""
    data, position, read = zeros(tmp_path, N), 0, []
    for n, first, steps in ((6, 0, 7), (4, 7, 10), (9, 17, 30)):
        progress = Progress(tokens_per_step=n * BLOCK, step=first, position=position)
        reader = reader_of(data, "shuffle", sequences=n)
        reader.train(progress.step, progress.position)
        for i in range(steps):
            read += reader.starts(progress.step).tolist()
            if i == 2:
                progress.skip()
            else:
                progress.advance()
        position = progress.describe()["position"]
    assert position == len(read) * BLOCK
    assert progress.step == 47 and progress.tokens == 29 * 9 * BLOCK
    assert read == reader_of(data, "shuffle", sequences=len(read)).starts(0).tolist()


# ------------------------------------------------------------------------------------------------------------
# how they are divided over the ranks


def test_shares_are_even_and_add_up_to_the_batch():
    for sequences, batch_size in itertools.product((1, 2, 5, 12, 48, 97), (1, 2, 5, 12, 200)):
        starts = 1000 + 10 * np.random.default_rng(0).permutation(sequences)
        for world in (1, 2, 3, 4, 7, 8, 100):
            shares = [share_of(sequences, rank, world, batch_size) for rank in range(world)]
            micro_steps, rows = shares[0].micro_steps, shares[0].rows
            assert 1 <= rows <= batch_size
            assert (micro_steps - 1) * batch_size * world < sequences  # one micro-step fewer: not enough
            assert (rows - 1) * micro_steps * world < sequences  # nor one row fewer
            picked = np.array([[share.pick(starts, i) for i in range(micro_steps)] for share in shares])
            assert picked.shape == (world, micro_steps, rows) and picked.dtype == np.int64
            assert sorted(picked[picked != PADDING]) == sorted(starts)


# ------------------------------------------------------------------------------------------------------------
# reading


def ids_of(tokens):
    """All ids of a file."""
    return tokens.read(np.array([0]), len(tokens))[0].tolist()


def test_targets_are_the_inputs_shifted_by_one(tmp_path):
    """Of three sequences on two ranks; a padding row takes the place of a fourth one."""
    ids = np.random.default_rng(0).integers(0, 2**16, N)
    ids[:500:9] = 65535
    data = open_dataset(str(write(tmp_path, ids, train=ids, vocab_size=2**16)), BLOCK)
    readers = [reader_of(data, sequences=3, rank=rank, world_size=2, micro_batch=2) for rank in (0, 1)]
    starts, rows = readers[0].starts(4).tolist(), []
    for reader in readers:
        x, y = next(reader.train(4, 0))
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (2, BLOCK)
        rows += zip(x.tolist(), y.tolist(), strict=True)
    padding = ([0] * BLOCK, [-1] * BLOCK)
    windows = [ids[start : start + BLOCK + 1].tolist() for start in starts]
    assert sorted(rows) == sorted([(window[:-1], window[1:]) for window in windows] + [padding])


def test_a_thread_reads_ahead(tmp_path):
    """Two micro-batches more than the one in use, of which each raises an error here when it is read."""
    reader = reader_of(numbers(tmp_path, N), model_args={"block_size": BLOCK, "vocab_size": 0})
    others, batches = threading.enumerate(), reader.train(0, 0)
    for number in range(2):
        next(batches)
        wait_for(lambda n=number: len(reader.problems) == 3 + n)
    batches.close()  # waits for what has been begun
    assert {*threading.enumerate()} <= {*others} and len(reader.problems) == 4


def test_an_id_outside_the_vocabulary_raises_an_error_when_it_is_read(tmp_path):
    """As the first input of a window, and as the last target of the one before; padding takes its place."""
    ids = np.where(np.arange(N) == 40 * BLOCK, 65, 0)
    data = open_dataset(str(write(tmp_path, range(40), train=ids, vocab_size=66)), BLOCK)
    reader = reader_of(data, "shuffle", sequences=1, model_args={"block_size": BLOCK, "vocab_size": 65})
    starts = [reader.starts(step).item() // BLOCK for step in range(125)]
    batches = zip(starts, reader.train(0, 0), strict=False)
    padded = [place for place, (x, y) in batches if (y == -1).all() and not x.any()]
    assert sorted(padded) == [39, 40]
    assert ["train.bin holds token id 65," in str(problem) for problem in reader.problems] == [True] * 2


def cached_bytes(path):
    """The bytes of a file that are in the system's page cache."""
    content = np.memmap(path, np.uint8, "r")
    is_cached = (ctypes.c_ubyte * -(-content.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.nbytes), is_cached) == 0
    return int(np.count_nonzero(np.frombuffer(is_cached, np.uint8) & 1)) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="what is read cannot be counted")
def test_windows_read_their_own_pages(tmp_path):
    """Of a large file, from which the start reads little, too. The system reads zeros ahead like others."""
    data = zeros(tmp_path, 10**9, 1024)
    assert cached_bytes(data.train.path) < 20e6
    with open(data.train.path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = cached_bytes(data.train.path)
    shape = {"block_size": 1024, "vocab_size": 50304}
    [*reader_of(data, micro_batch=64, model_args=shape).evaluation("train", 64)]
    assert cached_bytes(data.train.path) - before < 64 * 3 * 4096


# ------------------------------------------------------------------------------------------------------------
# the data set on disk


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """data/text in the working folder: 100 and 50 tokens, highest id 89, no metadata."""
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "data" / "text", [89, *range(49)], train=np.arange(100) % 40)
    (folder / "meta.json").unlink()
    return folder


def refused(message, name="text", block_size=BLOCK, **options):
    """open_dataset raises ValueError with this message."""
    with pytest.raises(ValueError, match=message):
        open_dataset(name, block_size, **options)


def test_missing_files_are_named(folder):
    (folder / "train.bin").unlink()
    write(folder.parent / "other", (), train=())
    refused(rf"no train\.bin in data.text or {REPO}.data.text or text or .*; prepared data sets: .*\bother\b")
    (folder / "prepare.py").touch()
    refused(r"no train\.bin .*; run: python data.text.prepare\.py")


@pytest.mark.parametrize("split", ["train", "val"])
def test_invalid_token_files_are_refused(folder, split):
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint32", "vocab_size": 20}))
    for file in (folder / "train.bin", folder / "val.bin"):
        np.arange(20 + (file.stem == split), dtype=np.uint32).tofile(file)
    refused(rf"{split}\.bin holds token id 20,.* set --vocab_size=21,")
    data = open_dataset("text", BLOCK, vocab_size=21)  # the setting takes precedence over the metadata
    assert (data.vocab_size, data.highest, data.train.dtype) == (21, 20, np.uint32)
    (folder / f"{split}.bin").write_bytes(bytes(79))
    refused(rf"{split}\.bin cannot be read, or is of a different dtype: ", vocab_size=21)


def test_the_highest_id_of_a_large_file(tmp_path):
    """Samples reach both ends of the file."""
    write(tmp_path, range(5), train=(), dtype="uint8", vocab_size=10)
    # zeros take no room on the disk
    ids = np.memmap(tmp_path / "train.bin", np.uint8, "w+", shape=2**26 + 5000)
    for place in (0, 4095, -4096, -1, slice(40_000_000, 40_100_000)):
        ids[place] = 9
        assert open_dataset(str(tmp_path), BLOCK).highest == 9
        ids[place] = 0
    assert open_dataset(str(tmp_path), BLOCK).highest < 9


def test_a_file_that_was_written_in_part(work, zygote, monkeypatch):
    """As nanoGPT's scripts do it, which allocate a whole file: one note, from one of the ranks."""
    monkeypatch.chdir(work)
    assert open_dataset("tiny", BLOCK).notes == ()
    path = Path("data/tiny/train.bin")
    ids = np.memmap(path, np.uint16, "r+")
    ids[len(ids) // 2 :] = 0
    shutil.copytree("data/tiny", "data/other")
    (note,) = open_dataset("tiny", BLOCK).notes
    assert re.match(rf"in [45]\d% of the samples of {path}, id 0 is repeated 256 times", note)
    assert len(open_dataset("other,tiny", BLOCK).notes) == 2
    shutil.copy(path, "data/other/val.bin")
    assert len(open_dataset("tiny", BLOCK, eval_datasets="other").notes) == 2
    run = zygote.train(["--max_iters=0", "--out_dir=out"], work, 2)
    assert run.text().count("is repeated 256 times") == 1


def test_invalid_metadata_is_refused(folder):
    for text, message in {
        '{"dtype": "float32"}': r"train.bin is not one row of ids: shape \(50,\), float32, 0 bytes",
        '{"vocab_size": 90': "meta.json cannot be read",
        '{"val_bytes": 1.5}': "val_bytes is 1.5, not a number",
        '{"train_tokens": 99}': "100 tokens, but meta.json says 99",
    }.items():
        (folder / "meta.json").write_text(text)
        refused(message)


def test_what_is_read_of_metadata(folder):
    """
    Without any, the vocabulary is GPT-2's. Of a meta.pkl what nanoGPT reads; forks add entries with names of
    ours. A meta.json takes precedence. A pickle that would run code is refused and does not run.
    """
    assert open_dataset("text", BLOCK).vocab_size == GPT2_VOCAB
    path, bad = folder / "meta.pkl", b"cos\nsystem\n(S'touch PWNED'\ntR."
    path.write_bytes(pickle.dumps({"vocab_size": 95, "stoi": {"a": 0}, "tokenizer": "own", "dtype": "int8"}))
    assert read_meta(folder) == {"vocab_size": 95, "stoi": {"a": 0}}
    (folder / "meta.json").write_text('{"vocab_size": 96}')
    assert open_dataset("text", BLOCK).vocab_size == 96
    path.write_bytes(bad)
    refused(r"meta\.pkl cannot be read: .*only plain values are read")
    assert not Path("PWNED").exists()
    pickle.loads(bad)
    assert Path("PWNED").exists(), "unpickling it does run the code"


def test_where_data_sets_are_searched(tmp_path):
    """In the working folder, then in the repository, here a copy."""
    repository, working = tmp_path / "repository", tmp_path / "working"
    shutil.copytree(REPO / "isogpt", repository / "isogpt")
    write(repository / "data" / "beside", [44] * 9, train=range(9))
    write(repository / "data" / "text", [33] * 9, train=range(9))
    write(working / "data" / "text", [77] * 9, train=range(9))
    write(working / "data" / "mine" / "v2", [55] * 9, train=range(9))  # as in nanoGPT
    elsewhere = write(tmp_path / "elsewhere", [66] * 9, train=range(9))
    names = ("beside", "data/beside", "text", "data/text", "mine/v2", str(elsewhere), "~/elsewhere")
    code = "import sys; from isogpt.data.dataset import open_dataset; "
    code += "print([open_dataset(name, 8).highest for name in sys.argv[1:]])"
    env = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(repository)}
    found = subprocess.check_output([sys.executable, "-c", code, *names], cwd=working, env=env, text=True)
    assert json.loads(found) == [44, 44, 77, 77, 55, 66, 66]


# ------------------------------------------------------------------------------------------------------------
# files that others wrote

LETTERS = np.random.default_rng(0).integers(0, 65, 6000)  # as in a text of 65 different characters
WORDS = np.random.default_rng(1).zipf(1.3, 6000) % 50257


def foreign(folder, train, val, **meta):
    """Write the files of somebody else, and their meta.json."""
    train.tofile(folder / "train.bin")
    val.tofile(folder / "val.bin")
    (folder / "meta.json").write_text(json.dumps(meta))


def test_ids_of_a_different_width_are_refused_until_they_are_declared(folder):
    for ids, dtypes, meta in (
        (WORDS, ("int32", "uint32", "int64", "uint64"), {}),
        (LETTERS, ("int32", "int64"), {"vocab_size": 65}),
        (LETTERS % 2, ("int32", "int64"), {}),
        (LETTERS * 900 + 30_000, ("int32",), {}),
        (WORDS, ("int32",), {"vocab_size": 128_256}),
    ):
        for dtype in dtypes:
            for train, split in ((ids.astype(dtype), "train"), (ids.astype(np.uint16), "val")):
                foreign(folder, train, ids.astype(dtype), **meta)
                refused(f'/{split}.bin holds ids of 32 or 64 bits: add {{"dtype": "uint32"}} to meta')
            foreign(folder, ids.astype(dtype), ids[:1500].astype(dtype), **meta, dtype=dtype)
            data = open_dataset("text", BLOCK, vocab_size=meta.get("vocab_size", 100_000))
            assert ids_of(data.train) == ids.tolist() and ids_of(data.val) == ids[:1500].tolist()


def test_uint16_is_never_taken_for_a_different_width(folder):
    rng = np.random.default_rng(2)
    alike = [LETTERS % n for n in (2, 4, 16, 65)] + [WORDS * n for n in (0, 1)] + [WORDS[:100], LETTERS[:37]]
    alike += [np.where(rng.random(6000) < 0.99, 0, LETTERS), np.arange(6000) % 40, np.arange(6000) % 2 * 7]
    for ids in [*alike, rng.integers(0, 50304, 6000), rng.integers(32768, 50304, 6000)]:
        for meta in ({"vocab_size": 65536}, {}) if ids.max() < GPT2_VOCAB else ({"vocab_size": 65536},):
            foreign(folder, ids.astype(np.uint16), ids.astype(np.uint16), **meta)
            assert ids_of(open_dataset("text", BLOCK).train) == ids.tolist()
