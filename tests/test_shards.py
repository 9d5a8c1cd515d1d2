"""
A split of many files: which files are read in which order, that they read like one file, and files that are
missing, damaged, of other programs, or change during the run.
"""

import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from runs import REPO
from test_loader import ids_of, refused

from isogpt.data.data_folder import files_of, find_dataset, prepared_datasets
from isogpt.data.dataset import open_dataset
from isogpt.data.token_files import DataError

sys.path.insert(0, str(REPO / "data"))
import split

BLOCK = 16
IDS = np.random.default_rng(0).zipf(1.3, 5000) % 50257
CUTS = [2500, 2501, 2503, 2510, 3700, 3705, 3709, 4900]  # a window crosses up to four shards


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty data/text in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("data/text").mkdir(parents=True)
    return Path("data/text")


def content(ids, form):
    """A file of ids: bare, with llm.c's header, or .npy."""
    if form == "npy":
        file = io.BytesIO()
        np.save(file, ids)
        return file.getvalue()
    header = np.zeros(256, np.int32)
    header[:3] = (20240520, 1, len(ids)) if ids.dtype == np.uint16 else (20240801, 7, len(ids))
    return (header.tobytes() if form == "llm.c" else b"") + ids.tobytes()


def write(folder, ids=IDS, form="bare", cuts=CUTS, dtype=np.uint16, name="train_{:06d}", val=IDS[:100]):
    """Write shards, and a val.bin if there is none."""
    suffix = ".npy" if form == "npy" else ".bin"
    paths = [folder / (name.format(i) + suffix) for i in range(len(cuts) + 1)]
    for path, part in zip(paths, np.split(ids.astype(dtype), cuts), strict=True):
        path.write_bytes(content(part, form))
    if not files_of(folder, "val"):
        (folder / "val.bin").write_bytes(content(val.astype(dtype), form))
    return paths


# ------------------------------------------------------------------------------------------------------------
# shards read like one file


def test_shards_read_like_one_file(folder):
    one = folder.parent / "one"
    one.mkdir()
    for form, dtype, name in (
        ("bare", np.uint16, "train_{:06d}"),
        ("llm.c", np.uint16, "fineweb_train_{:06d}"),  # kjj0/fineweb10B-gpt2, modded-nanogpt
        ("npy", np.int64, "train-{:06d}"),
    ):
        for path in (*folder.iterdir(), *one.iterdir()):
            path.unlink()
        write(folder, form=form, dtype=dtype, name=name)
        write(one, cuts=[], dtype=dtype, name="train")
        (one / "meta.json").write_text(json.dumps({"dtype": np.dtype(dtype).name}))
        array, whole = open_dataset("text", BLOCK), open_dataset("one", BLOCK)
        assert (len(array.train.files), len(whole.train.files)) == (9, 1)
        assert (len(array.train), array.train.dtype, array.highest) == (5000, dtype, IDS.max())
        assert array.digest == whole.digest
        for length in (1, BLOCK + 1, 1000, 5000):
            starts = np.arange(5000 - length + 1)[::-1]
            windows = array.train.read(starts, length)
            assert windows.dtype == dtype and np.array_equal(windows, whole.train.read(starts, length))


def write_many(folder):
    """Write 320 shards of 320 ids, of which 256 are open at a time."""
    return write(folder, np.arange(320 * 320) % 50000, cuts=range(320, 320 * 320, 320))


def test_few_shards_are_open_while_threads_read_many(folder):
    """Also a file that was closed for a different one while a thread reads it."""
    write_many(folder)
    train = open_dataset("text", BLOCK).train

    def read(seed):
        starts = np.random.default_rng(seed).integers(0, 320 * 320 - 17, 600)
        for part in np.split(starts, 20):
            assert np.array_equal(train.read(part, 17), (part[:, None] + np.arange(17)) % 50000)
        return sum("train_" in os.path.realpath(file) for file in Path("/proc/self/fd").glob("*"))

    with ThreadPoolExecutor(2) as threads:
        assert max(threads.map(read, range(4))) <= 256 + 2


# ------------------------------------------------------------------------------------------------------------
# which files


def test_which_files_are_read_in_which_order(folder):
    """By name; a prefix of zeros makes this the order of the numbers."""
    for names, chosen in {
        "train_10.bin train_9.bin val_0.bin": "train_10.bin train_9.bin",
        "train_2.bin train.bin train_1.bin": "train.bin",
        "train.npy val.bin train_1.bin.0123.tmp .train_1.bin": "train.npy",
        "a_train_1.bin train_1.bin": "train_1.bin",
        "a_train_2.bin a_train_1.npy ._a_train_3.bin train.txt": "a_train_1.npy a_train_2.bin",
        "a_train_1.bin a_val_000000.bin": "a_train_1.bin",
    }.items():
        for path in folder.iterdir():
            path.unlink()
        for name in names.split():
            (folder / name).touch()
        assert [path.name for path in files_of(folder, "train")] == chosen.split()
    assert files_of(folder, "val") == [folder / "a_val_000000.bin"]
    assert find_dataset("text", "val") == folder and "text" in prepared_datasets()


def test_shards_without_a_validation_set(folder):
    write(folder, form="npy", name="edufineweb_train_{:06d}")  # build-nanogpt
    (folder / "val.bin").unlink()
    refused("val.bin is missing: type python .*split.py data/text$")
    with pytest.raises(ValueError, match="contains 9 files of training tokens, not one"):
        split.split(folder, 0.1)
    (folder / "edufineweb_train_000008.npy").rename(folder / "val.npy")
    assert len(open_dataset("text", BLOCK).train) == CUTS[-1]


@pytest.mark.parametrize("form", ["llm.c", "npy"])
def test_one_file_with_a_header_is_divided(folder, form):
    """Whatever it is called."""
    (path,) = write(folder, form=form, cuts=[], dtype=np.uint32)
    with pytest.raises(ValueError, match="val.bin exists already: delete it"):
        split.split(folder, 0.1)
    (folder / "val.bin").unlink()
    with pytest.raises(ValueError, match="leaves train.bin or val.bin empty: set 0.1"):
        split.split(folder, 0.99999)
    before = path.read_bytes()
    for fraction in (0.1, 0.2):  # the second time from all.bin
        split.split(folder, fraction)
        data = open_dataset("text", BLOCK)
        assert ids_of(data.train) + ids_of(data.val) == IDS.tolist() and len(data.val) == fraction * 5000
        assert (folder / "all.bin").read_bytes() == before
        assert {path.name for path in folder.iterdir()} == {"all.bin", "train.bin", "val.bin", "meta.json"}


# ------------------------------------------------------------------------------------------------------------
# files that are refused


def test_shards_that_do_not_belong_together(folder):
    paths = write(folder)
    third = np.arange(700, 707).astype(np.uint16)
    for form, dtype in ("llm.c", np.uint16), ("npy", np.int64):
        paths[3].write_bytes(content(third.astype(dtype), form))
        refused("^files of several dtypes, or not all with a header: .*train_000008.bin.*train_000003.bin")
    for damaged in (b"", content(third, "llm.c")[:1024], content(third, "npy")[:-1]):
        paths[3].write_bytes(damaged)
        refused("train_000003.bin cannot be read")
    for form in "llm.c", "npy":
        paths[3].write_bytes(content(third, form) + b"1")
        refused("train_000003.bin .*, 1 bytes more")
    for array in (IDS.reshape(2, -1), IDS.astype(np.float32), IDS.astype(">u2"), np.array(7)):
        np.save(folder / "train.npy", array)  # which is read instead
        refused("train.npy is not one row of ids")


def test_shards_that_change_during_the_run(folder):
    paths = write_many(folder)  # the start leaves the last ones open
    original, later = paths[3].read_bytes(), paths[3].stat().st_mtime_ns + 10**9
    for reason, change in (
        ("has changed since the start of the run", lambda: os.utime(paths[3], ns=(later, later))),
        ("can no longer be read: No such file", paths[3].unlink),
    ):
        paths[3].write_bytes(original)
        train = open_dataset("text", BLOCK).train
        change()
        train.read(np.array([0, 640]), 320)
        with pytest.raises(DataError, match=rf"data/text/train_000003\.bin {reason}"):
            train.read(np.array([0, 950]), 17)
    paths[3].write_bytes(original)
    train = open_dataset("text", BLOCK).train
    os.truncate(paths[-2], 638)
    with pytest.raises(DataError, match=r"train_000318\.bin has been truncated since the start of the run"):
        train.read(np.array([319 * 320 - 10]), 17)


def test_an_id_outside_the_vocabulary_names_its_shard(folder):
    (folder / "meta.json").write_text('{"dtype": "int32"}')
    for place, value in ((1500, 60000), (1999, -1)):
        ids = np.where(np.arange(5000) == place, value, IDS)
        write(folder, ids, cuts=range(500, 5000, 500), dtype=np.int32)
        refused(rf"^data/text/train_000003\.bin holds token id {value},")
