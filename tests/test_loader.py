"""Which sequences a step reads, how they are divided over the ranks, reading ahead, and damaged data sets."""

import collections
import gzip
import io
import itertools
import json
import os
import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import column, default_plan

from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.common.random_numbers import EVAL_TRAIN, EVAL_VAL, SHUFFLE, TRAIN
from isogpt.data import dataset
from isogpt.data.dataset import GPT2_VOCAB, open_dataset, prepared_datasets, range_of_ids, read_meta
from isogpt.data.reader import Reader, read_rows
from isogpt.data.windows import epoch_order, random_windows, shuffled_windows
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.shares import PADDING, Share, share_of

CPU = torch.device("cpu")


def plan_for(sequences, micro_batch, vocab_size=65):
    """A plan whose steps consist of this many sequences."""
    args = {"block_size": BLOCK, "vocab_size": vocab_size}
    return default_plan(
        batch_size=sequences, gradient_accumulation_steps=1, micro_batch=micro_batch, model_args=args
    )


# a meta.json
OURS = {"dtype": "uint16", "vocab_size": 128, "tokenizer": "char", "tokenizer_size": 90, "source": {}}
N, BLOCK = 1003, 8  # a text of 125 windows and a bit


# ------------------------------------------------------------------------------------------------------------
# which sequences


def drawn_by(step, seed=1337, n=6):
    """What a step draws, with each of the four streams."""
    return [
        random_windows(N, BLOCK, seed, TRAIN, step, n).tolist(),
        random_windows(N, BLOCK, seed, EVAL_TRAIN, step, n).tolist(),
        random_windows(N, BLOCK, seed, EVAL_VAL, step, n).tolist(),
        shuffled_windows(N, BLOCK, seed, step, n).tolist(),
    ]


def test_windows_depend_on_their_arguments_only():
    steps = [0, 1, 2, 20, 21, 500]
    there = {s: drawn_by(s) for s in steps}
    epoch_order.cache_clear()
    np.random.seed(5)
    torch.manual_seed(5)
    back = {s: drawn_by(s) for s in reversed(steps)}
    assert there == back
    assert drawn_by(20, seed=7) != there[20]
    assert drawn_by(20) == there[20]
    # the global generators are neither read nor advanced
    np.random.seed(5)
    torch.manual_seed(5)
    generators = np.random.get_state()[1].copy(), torch.get_rng_state()
    drawn_by(3)
    assert (np.random.get_state()[1] == generators[0]).all() and torch.equal(
        torch.get_rng_state(), generators[1]
    )


def test_windows_have_not_changed():
    """A change would change every seed's loss curve, and a resumed run would read other data than before."""
    for (seed, stream, step), golden in {
        (1337, TRAIN, 0): [948482, 257081, 229120, 928327],
        (1337, TRAIN, 600000): [650034, 261611, 224049, 96534],
        (1337, EVAL_VAL, 0): [793594, 245282, 619514, 211387],
        (7, TRAIN, 0): [211650, 225194, 60796, 120521],
    }.items():
        assert random_windows(1000003, 64, seed, stream, step, 4).tolist() == golden
    for (seed, step), golden in {
        (1337, 0): [411648, 919232, 825152, 421184],
        (1337, 5000): [764352, 233536, 180352, 576000],
        (7, 0): [531584, 179136, 70720, 329856],
    }.items():
        assert shuffled_windows(1000003, 64, seed, step, 4).tolist() == golden


def test_seeds_streams_and_steps_draw_differently():
    assert len({TRAIN, EVAL_TRAIN, EVAL_VAL, SHUFFLE}) == 4
    kinds = list(itertools.product((0, 1, 2**40), (TRAIN, EVAL_TRAIN, EVAL_VAL), (0, 1, 2, 2**40)))
    drawn = {
        tuple(random_windows(10**9, BLOCK, seed, stream, step, 8).tolist()) for seed, stream, step in kinds
    }
    assert len(drawn) == len(kinds)
    assert len(set().union(*drawn)) == 8 * len(kinds)  # no stream is a shifted copy of a different stream


@pytest.mark.parametrize("n_tokens", [BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 30])
def test_every_window_is_drawn_and_none_exceeds_the_text(n_tokens):
    tokens = np.arange(n_tokens, dtype=np.uint16)
    drawn = np.unique(random_windows(n_tokens, BLOCK, 1, TRAIN, 3, 2000))
    assert drawn.dtype == np.int64
    assert drawn.tolist() == list(range(n_tokens - BLOCK))  # the last one ends with the text
    windows = (n_tokens - 1) // BLOCK
    shuffled = np.unique(shuffled_windows(n_tokens, BLOCK, 1, 0, windows))
    assert shuffled.tolist() == [BLOCK * w for w in range(windows)]
    for starts in drawn, shuffled:
        x, y = read_rows(tokens, starts, BLOCK)
        assert y.max() == (n_tokens - 1 if starts is drawn else windows * BLOCK)


def test_random_windows_are_uniform():
    counts = np.bincount(random_windows(108, BLOCK, 1, TRAIN, 0, 100_000), minlength=100)
    assert len(counts) == 100
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()  # 99 on average, standard deviation 14
    assert 50 < chi_squared < 160


@pytest.mark.parametrize("n", [1, 6, 25, 124, 125, 126, 300])  # sequences per step; an epoch has 125 windows
def test_each_window_appears_once_per_epoch(n):
    steps = -(-375 // n)
    stream = np.concatenate([shuffled_windows(N, BLOCK, 1, step, n) for step in range(steps)])
    assert stream.dtype == np.int64 and len(stream) == steps * n
    epochs = stream[:375].reshape(3, 125)
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 1000, BLOCK))
    for a, b in itertools.combinations([*epochs, np.arange(0, 1000, BLOCK)], 2):
        assert (a == b).sum() < 10  # the order of each epoch is different, and not the order of the text


def test_a_resume_with_a_different_batch_continues_the_epoch():
    """
    No window is repeated or left out; the steps before the change, to which a rollback goes, stay as they
    were.
    """
    data = SimpleNamespace(train=np.zeros(N, np.uint16))

    def reader_of_steps(n, progress):
        reader = Reader(data, "shuffle", 1, plan_for(n, 3), Mesh(), CPU)
        reader.train(progress.step, progress.position, progress.skipped)
        return reader

    progress, read = Progress(tokens_per_step=6 * BLOCK), []
    for n, steps in ((6, 7), (4, 10), (9, 30)):
        run = {
            "iter_num": progress.step,
            "isogpt": progress.describe(),
            "best_val_loss": float("inf"),
            "config": {},
        }
        saved = OpenCheckpoint(stored=None, run=run, shapes={"optim.": ()})
        progress = Progress(tokens_per_step=n * BLOCK)
        progress.load(saved)
        first = reader_of_steps(n, progress)
        for i in range(steps):
            read += first.starts(progress.step).tolist()
            if i == 2:
                progress.skip()  # a step that was not finite has read its windows
            else:
                progress.advance()
        again = Progress(tokens_per_step=n * BLOCK)
        again.load(saved)
        assert reader_of_steps(n, again).starts(again.step).tolist() == read[len(read) - n * steps :][:n]
    assert (
        progress.position == len(read) * BLOCK and progress.tokens == progress.position - (6 + 4 + 9) * BLOCK
    )
    assert (
        read == np.concatenate([shuffled_windows(N, BLOCK, 1, step, 1) for step in range(len(read))]).tolist()
    )


def test_a_text_of_one_window_repeats_it():
    assert shuffled_windows(BLOCK + 1, BLOCK, 1, 5, 7).tolist() == [0] * 7


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


def test_the_documented_example_of_a_share():
    assert share_of(48, 3, 7, 12) == Share(sequences=48, data_rank=3, micro_steps=1, rows_of=(7,) * 7)
    assert share_of(480, 0, 8, 12) == Share(480, 0, micro_steps=5, rows_of=(12,) * 8)  # without padding


# ------------------------------------------------------------------------------------------------------------
# reading


def test_targets_are_the_inputs_shifted_by_one():
    tokens = np.random.default_rng(0).integers(0, 2**16, N).astype(np.uint16)
    tokens[5] = 65535
    starts = [0, 5, PADDING, N - BLOCK - 1]
    x, y = read_rows(tokens, np.array(starts), BLOCK)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (4, BLOCK)
    for row, start in enumerate(starts):
        inside = start != PADDING
        assert x[row].tolist() == (tokens[start : start + BLOCK].tolist() if inside else [0] * BLOCK)
        assert y[row].tolist() == (tokens[start + 1 : start + BLOCK + 1].tolist() if inside else [-1] * BLOCK)


def reader_of(vocab_size):
    return Reader(None, "random", 1, plan_for(3, 3, vocab_size), Mesh(), CPU)


def test_padding_rows_are_zeros_without_targets():
    x, y = reader_of(vocab_size=65).padding_batch()
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (3, BLOCK)
    assert (x == 0).all() and (y == -1).all()


def batches_of(tokens, share, steps, seen=None, vocab_size=2**16):
    def starts_of(step):
        if seen is not None:
            seen.append((step, threading.current_thread().name))
        return random_windows(len(tokens), BLOCK, 1, TRAIN, step, share.sequences)

    return reader_of(vocab_size).read(tokens, starts_of, steps, share)


def loaders():
    return [t for t in threading.enumerate() if t.name.startswith("loader")]


@pytest.mark.parametrize("steps", [range(3, 8), [4], [9, 2, 2]])
@pytest.mark.parametrize("rank, world", [(0, 1), (1, 3), (6, 7)])
def test_micro_batches_equal_rows_read_directly(rank, world, steps):
    tokens = np.random.default_rng(0).integers(0, 2**16, N).astype(np.uint16)
    share = share_of(20, rank, world, 3)
    got = list(batches_of(tokens, share, steps))
    assert len(got) == len(steps) * share.micro_steps
    for (x, y), (step, micro_step) in zip(
        got, itertools.product(steps, range(share.micro_steps)), strict=True
    ):
        starts = share.pick(random_windows(N, BLOCK, 1, TRAIN, step, 20), micro_step)
        expected_x, expected_y = read_rows(tokens, starts, BLOCK)
        assert torch.equal(x, expected_x) and torch.equal(y, expected_y)
    assert not loaders()


def test_no_steps_give_no_batches():
    assert list(batches_of(np.zeros(N, dtype=np.uint16), share_of(4, 0, 1, 4), [])) == []


def test_a_thread_reads_ahead():
    seen = []
    batches = batches_of(np.zeros(N, dtype=np.uint16), share_of(4, 0, 1, 4), itertools.count(), seen)
    next(batches)
    end = time.monotonic() + 10
    while len(seen) < 4 and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.02)
    assert [step for step, _ in seen] == [0, 1, 2, 3]  # in use, being copied to the device, and two more
    assert all(thread.startswith("loader") for _, thread in seen)
    next(batches)
    while len(seen) < 5 and time.monotonic() < end:
        time.sleep(0.001)
    assert [step for step, _ in seen] == [0, 1, 2, 3, 4]
    assert loaders()
    batches.close()
    del batches
    assert not loaders()


@pytest.mark.parametrize("place", [0, 3, BLOCK])  # the first input, in the middle, the last target only
def test_an_id_outside_the_vocabulary_raises_an_error_when_it_is_read(tmp_path, place):
    share = share_of(2, 0, 1, 2)
    starts = [np.array([100 * step, 100 * step + 50]) for step in range(9)]
    np.zeros(N, dtype=np.uint16).tofile(tmp_path / "train.bin")
    tokens = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r+")
    tokens[550 + place] = 65
    batches = reader_of(65).read(tokens, starts.__getitem__, range(9), share)
    read = 0
    message = r"train\.bin holds token id 65, but the vocabulary size is 65: .*vocab_size=66"
    with pytest.raises(ValueError, match=message):
        for x, _ in batches:
            assert x.max() < 65
            read += 1
    assert read in (4, 5)  # the last batch before it may be lost
    assert not loaders()
    fine = reader_of(66).read(tokens, starts.__getitem__, range(9), share)
    assert sum(int((x == 65).sum() + (y == 65).sum()) for x, y in fine) > 0


# ------------------------------------------------------------------------------------------------------------
# the data set on disk


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """data/text in the working folder: 100 and 50 tokens, highest id 89, no metadata."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dataset, "REPOSITORY", tmp_path / "repository")
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
    assert data.vocab_size == GPT2_VOCAB == 50304
    assert data.train.tolist() == [i % 40 for i in range(100)] and len(data.val) == 50
    assert data.train.dtype == data.val.dtype == np.uint16
    assert isinstance(data.train, np.memmap) and not data.train.flags.writeable
    assert data.highest == 89


def test_uint32_is_read_from_the_metadata(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_data(tmp_path / "data" / "text", np.uint32, highest=100_000)
    (path / "meta.json").write_text(json.dumps({"dtype": "uint32", "vocab_size": 128_000}))
    data = open_dataset("text", BLOCK)
    assert (data.vocab_size, data.highest, data.train.dtype) == (128_000, 100_000, np.uint32)
    assert data.val[7] == 100_000 and len(data.val) == 50
    assert read_rows(data.val, np.array([0]), BLOCK)[0][0, 7] == 100_000


def test_missing_files_are_named(folder, tmp_path):
    (folder / "val.bin").unlink()
    refused(
        r"data.text.val\.bin does not exist; take it from the end of train\.bin: python .*split\.py "
        r"data.text$"
    )
    (folder / "train.bin").unlink()
    refused(r"no train\.bin in data.text or .*repository.data.text; prepared data sets: none")
    write_data(tmp_path / "data" / "other")
    refused("prepared data sets: other", name="nosuch")
    (folder / "prepare.py").touch()
    refused(r"no train\.bin .*; run: python data.text.prepare\.py")


@pytest.mark.parametrize("split", ["train", "val"])
def test_invalid_token_files_are_refused(folder, split):
    path = folder / f"{split}.bin"
    whole = path.read_bytes()
    path.write_bytes(b"")
    refused(rf"{split}\.bin is empty")
    path.write_bytes(whole[:-1])
    refused(rf"{split}\.bin contains {len(whole) - 1} bytes, not a multiple of 2 \(uint16\)")
    path.write_bytes(bytes(2 * BLOCK))
    refused(rf"{split}\.bin contains 8 tokens, but block_size 8 needs 9 or more: set --block_size=7")
    path.write_bytes(bytes(2 * (BLOCK + 1)))
    open_dataset("text", BLOCK)
    other = "val" if split == "train" else "train"
    for s in split, other:
        np.zeros(20, dtype=np.uint32).tofile(folder / f"{s}.bin")
    (folder / "meta.json").write_text('{"dtype": "uint32"}')
    open_dataset("text", BLOCK)
    path.write_bytes(bytes(6))
    refused(rf"{split}\.bin contains 6 bytes, not a multiple of 4 \(uint32\)")


@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_outside_the_vocabulary_are_refused(folder, split):
    (folder / "meta.json").write_text('{"vocab_size": 90}')
    assert open_dataset("text", BLOCK).vocab_size == 90
    tokens = np.fromfile(folder / f"{split}.bin", dtype=np.uint16)
    tokens[-1] = 90
    tokens.tofile(folder / f"{split}.bin")
    refused(rf"{split}\.bin holds token id 90, but the vocabulary size is 90: set --vocab_size=91")
    data = open_dataset("text", BLOCK, vocab_size=91)  # the setting takes precedence over the metadata
    assert (data.vocab_size, data.highest) == (91, 90)
    refused(r"train\.bin holds token id .*, but the vocabulary size is 39", vocab_size=39)


def test_samples_for_the_highest_id_of_a_large_file_reach_both_ends():
    tokens = np.zeros(2**26 + 5000, dtype=np.uint8)
    assert range_of_ids(tokens) == (0, 0)
    for place in 0, 4095, -4096, -1:
        tokens[place] = 7
        assert range_of_ids(tokens) == (0, 7)
        tokens[place] = 0
    tokens[: 2**26][40_000_000:40_100_000] = 9
    assert range_of_ids(tokens) == (0, 9)
    assert range_of_ids(np.array([3, 70_000, -5], dtype=np.int32)) == (-5, 70_000)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            '{"dtype": "float32"}',
            r"meta\.json: dtype is 'float32', possible are uint8, .*, uint32, int64 and uint64",
        ),
        ('{"dtype": null}', r"meta\.json: dtype is None"),
        ('{"vocab_size": 90', r"meta\.json cannot be read"),
        ("", r"meta\.json cannot be read"),
        ("\xff\xfe\x00", r"meta\.json cannot be read"),
        ("[90]", r"meta\.json cannot be read"),
        ('{"vocab_size": "many"}', r"vocab_size is 'many'"),
        ('{"vocab_size": null}', r"vocab_size is None"),
        (json.dumps(OURS | {"train_tokens": 99}), "100 tokens, but meta.json says 99"),
    ],
)
def test_invalid_metadata_is_refused(folder, text, message):
    (folder / "meta.json").write_text(text, encoding="latin-1")
    refused(message)


def test_meta_json_takes_precedence_over_meta_pkl(folder):
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 95, "stoi": {"a": 0}}))
    assert open_dataset("text", BLOCK).vocab_size == 95
    (folder / "meta.json").write_text('{"vocab_size": 96}')
    assert open_dataset("text", BLOCK).vocab_size == 96
    assert read_meta(folder) == {"vocab_size": 96, "stoi": {"a": 0}}


def test_what_is_read_of_a_meta_pkl(folder):
    """What nanoGPT reads; forks add entries with names of ours."""
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 95, "tokenizer": "own", "dtype": "int8"}))
    assert read_meta(folder) == {"vocab_size": 95}
    (folder / "meta.pkl").write_bytes(pickle.dumps({"char_to_id": {"a": 0}}))
    refused(
        r'meta\.pkl contains neither vocab_size nor stoi nor itos, .*: write {"vocab_size": N} .* to data'
    )
    (folder / "meta.json").write_text('{"vocab_size": 96}')
    assert open_dataset("text", BLOCK).vocab_size == 96


class Run:
    """An object whose pickle calls a function."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(folder, tmp_path):
    mark = tmp_path / "ran"
    touch, code = f"touch {mark}", f"open({str(mark)!r}, 'w')"
    calls = [
        Run(os.system, touch),
        Run(eval, code),
        Run(exec, code),
        Run(Path.touch, mark),
        Run(np.load, "x.npy"),
        Run(collections.ChainMap),
    ]
    pickles = [pickle.dumps(d) for call in calls for d in (call, {"vocab_size": 90, "stoi": {"a": [call]}})]
    pickles.append(f"cos\nsystem\n(S'{touch}'\ntR.".encode())  # protocol 0
    pickles.append(b"cnumpy\nf2py.os.system\n(S'" + touch.encode() + b"'\ntR.")
    for bad in pickles:
        (folder / "meta.pkl").write_bytes(bad)
        refused(r"meta\.pkl cannot be read: .*only plain values are read")
        assert not mark.exists()
    assert pickle.loads(pickles[0]) == 0 and mark.exists()  # unpickling it does run the code


@pytest.mark.parametrize("broken", [b"", b"no pickle", pickle.dumps({"a": 1})[:-3], pickle.dumps([90])])
def test_a_damaged_pickle_is_refused(folder, broken):
    (folder / "meta.pkl").write_bytes(broken)
    refused(r"meta\.pkl")


@pytest.mark.parametrize(
    "value",
    [
        np.int64(95),
        np.uint16(95),
        np.float64(1.5),
        np.array(["a"]),
        collections.Counter("abc"),
        collections.defaultdict(list, a=[1]),
    ],
)
def test_plain_classes_in_a_pickle_are_read(folder, value):
    for protocol in 3, 4:
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 95, "itos": value}, protocol))
        assert np.all(read_meta(folder)["itos"] == value)
    # as written by numpy 1
    old = pickle.dumps({"itos": value}, 3).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    (folder / "meta.pkl").write_bytes(old)
    assert np.all(read_meta(folder)["itos"] == value)


def test_the_vocabulary_size_may_be_a_number_of_numpy(folder):
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": np.int64(95)}))
    assert (
        type(open_dataset("text", BLOCK).vocab_size) is int and open_dataset("text", BLOCK).vocab_size == 95
    )


def test_where_data_sets_are_searched(tmp_path, monkeypatch):
    repository, working = tmp_path / "repository", tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setattr(dataset, "REPOSITORY", repository)
    beside = write_data(repository / "data" / "text")
    assert open_dataset("text", BLOCK).folder == beside
    write_data(working / "data" / "text", highest=77)
    data = open_dataset("text", BLOCK)  # the working folder's takes precedence
    assert data.folder.resolve() == (working / "data" / "text").resolve() and data.highest == 77
    assert prepared_datasets() == ["text"]

    elsewhere = write_data(tmp_path / "elsewhere" / "mine", highest=66)
    assert open_dataset(str(elsewhere), BLOCK).highest == 66
    assert open_dataset("../elsewhere/mine", BLOCK).highest == 66
    write_data(working / "data" / "mine" / "v2", highest=55)  # as in nanoGPT
    assert open_dataset("mine/v2", BLOCK).highest == 55
    refused(r"no train\.bin in .*nosuch", name=str(tmp_path / "nosuch"))


@pytest.mark.parametrize(
    "form",
    [
        "data/mine",
        "data/mine/",
        "mine/",
        "./data/mine",
        "{}/data/mine/train.bin",
        "data/mine/val.bin",
        "~/mine",
    ],
)
def test_forms_of_a_data_sets_name(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "data"))
    write_data(tmp_path / "data" / "mine", highest=44)
    assert open_dataset(form.format(tmp_path), BLOCK).highest == 44


def test_the_working_folder_as_a_data_set(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    assert open_dataset(".", BLOCK).highest == 89
    monkeypatch.setattr(dataset, "REPOSITORY", tmp_path)  # found there from any working folder
    assert open_dataset("data/text", BLOCK).highest == 89
    monkeypatch.setattr(os, "sep", "\\")  # Windows
    assert open_dataset("data/text", BLOCK).highest == 89


# ------------------------------------------------------------------------------------------------------------
# files that others wrote

LETTERS = np.random.default_rng(0).integers(0, 65, 6000)  # as in a text of 65 different characters
WORDS = np.random.default_rng(1).zipf(1.3, 6000) % 50257
CHARACTERS = {"vocab_size": 65}


def foreign(folder, train, val=None, **meta):
    """Write the files of somebody else, and their meta.json; val: the end of train."""
    val = train[-len(train) // 4 :] if val is None else val
    for split, content in (("train", train), ("val", val)):
        (folder / f"{split}.bin").write_bytes(content if isinstance(content, bytes) else content.tobytes())
    (folder / "meta.json").write_text(json.dumps(meta))
    if not meta:
        (folder / "meta.json").unlink()


WIDE = "every second number of 16 bits is 0, as in files with ids of 32 or 64 bits"


@pytest.mark.parametrize(
    ("ids", "dtypes", "meta", "message"),
    [
        (WORDS, ("int32", "uint32", "int64", "uint64"), {}, WIDE),
        (LETTERS, ("int32", "int64"), CHARACTERS, WIDE),
        (LETTERS % 2, ("int32", "int64"), {}, WIDE),
        (np.arange(6000) * 11 % 50_000 + 40_000, ("int32",), {}, "every second number of 16 bits is small"),
        (WORDS, ("uint16", "int32"), {"vocab_size": 128_256}, "size is 128256, but ids of 16 bits end at"),
        (LETTERS, ("uint8",), {}, "no byte is above 127, as in files with ids of 8 bits"),
        (LETTERS, ("uint8",), CHARACTERS, "no byte is above 127"),
    ],
)
def test_ids_of_a_different_width_are_refused_until_they_are_declared(folder, ids, dtypes, meta, message):
    for dtype in dtypes:
        foreign(folder, ids.astype(dtype), **meta)
        declare = "add .*" if meta else "write .*"
        refused(
            f'^data/text/train.bin: .*{message}.*: {declare}"dtype": .* data/text/meta.json, or .*uint64$'
        )
        foreign(folder, ids.astype(np.uint16), ids.astype(dtype), **meta)
        refused(message)  # in val.bin alone, or in both
        foreign(folder, ids.astype(dtype), **meta, dtype=dtype)
        data = open_dataset("text", BLOCK, vocab_size=meta.get("vocab_size", 100_000))
        assert data.train.tolist() == ids.tolist() and data.val.tolist() == ids[-1500:].tolist()


def test_ids_below_0_are_refused(folder):
    padded = WORDS.astype(np.int32)
    padded[5::10] = -1
    foreign(folder, padded)
    refused("holds token id 65535, but the vocabulary size is 50304")
    foreign(folder, padded, dtype="int32")
    refused("train.bin holds token id -1: remove the ids below 0")


def test_uint16_is_never_taken_for_a_different_width(folder):
    rng = np.random.default_rng(2)
    mostly_zero = np.where(rng.random(6000) < 0.99, 0, rng.integers(0, 65, 6000))
    for ids in (
        LETTERS,
        WORDS,
        LETTERS % 4,
        LETTERS % 16,
        LETTERS % 2,
        WORDS * 0,
        mostly_zero,
        np.arange(6000) % 40,
        np.arange(6000) % 2 * 7,
        rng.integers(0, 2**16, 6000),
        rng.integers(32768, 50304, 6000),
        WORDS[:100],
        LETTERS[:37],
    ):
        for vocab_size in (65536, 0):
            if vocab_size or ids.max() < GPT2_VOCAB:
                foreign(folder, ids.astype(np.uint16), **({"vocab_size": vocab_size} if vocab_size else {}))
                assert open_dataset("text", BLOCK).train.tolist() == ids.tolist()


def with_header(ids, magic, version, tokens=None):
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids) if tokens is None else tokens
    return header.tobytes() + ids.tobytes()


def test_the_header_of_llm_c_is_skipped(folder):
    for magic, version, dtype in ((20240520, 1, np.uint16), (20240801, 7, np.uint32)):
        ids = WORDS.astype(dtype)
        foreign(folder, with_header(ids, magic, version), with_header(ids[-1500:], magic, version))
        assert open_dataset("text", BLOCK).train.tolist() == ids.tolist()
        assert open_dataset("text", BLOCK).val.tolist() == ids[-1500:].tolist()
        foreign(folder, with_header(ids, magic, version, 6001), b"")
        (folder / "val.bin").write_bytes((folder / "train.bin").read_bytes())
        refused(
            "train.bin contains .* bytes, but the header announces 6001 tokens, .*: the file is truncated"
        )
        foreign(folder, with_header(ids, magic, 2), with_header(ids, magic, 2))
        refused(f"header {magic} of version 2, but only version {version} is known")
    # the end of the file is where the header says, also while the run reads
    ids = WORDS.astype(np.uint16)
    foreign(folder, with_header(ids, 20240520, 1), with_header(ids, 20240520, 1))
    data = open_dataset("text", BLOCK)
    os.truncate(folder / "train.bin", 1024 + 2 * len(ids) - 2)
    reader = Reader(data, "random", 1, plan_for(4, 4, GPT2_VOCAB), Mesh(), CPU)
    with pytest.raises(ValueError, match="has been truncated"):
        list(reader.evaluation("train", 4))


def in_archive(save, *args):
    file = io.BytesIO()
    save(file, *args)
    return file.getvalue()


TEXT = "First Citizen: Before we proceed \u2014 any further, hear me speak.\n".encode() * 2000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (in_archive(np.save, WORDS), "is a .npy file, .*: write the ids with numpy's tofile"),
        (in_archive(np.savez, WORDS), "is a zip archive, such as a .npz: write the ids with numpy's tofile"),
        (gzip.compress(bytes(9999), mtime=0), "is compressed by gzip: decompress it with gunzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid 12\n", "is a pointer of Git LFS, .*: run git lfs"),
        (with_header(WORDS.astype(np.uint16), 20240522, 1), "is llm.c's multiple-choice questions"),
        (
            TEXT,
            "is text, not token ids: rename it to train.txt, then run: python data/shakespeare/prepare.py "
            "--data_files=data/text/train.txt --out=data/text$",
        ),
    ],
)
def test_files_without_ids_are_named(folder, content, message):
    foreign(folder, content, content)
    refused(f"^data/text/train.bin {message}")


def test_the_bytes_of_a_text_may_be_ids(folder):
    foreign(folder, TEXT, vocab_size=256, dtype="uint8")
    assert open_dataset("text", BLOCK).train[:5].tolist() == list(TEXT[:5])


def test_the_same_tokens_in_other_formats_give_the_same_losses(zygote, work):
    """On two ranks, in training and evaluation: with a header, and with a declared dtype."""
    zygote.train(["--out_dir=one", "--max_iters=3", "--eval_interval=2"], work)
    for split in ("train", "val"):
        path = work / "data" / "tiny" / f"{split}.bin"
        ids = np.fromfile(path, np.uint16)
        path.write_bytes(
            with_header(ids, 20240520, 1) if split == "train" else ids.astype(np.int64).tobytes()
        )
    (work / "data/tiny/meta.json").write_text('{"dtype": "int64"}')
    zygote.train(["--out_dir=other", "--max_iters=3", "--eval_interval=2"], work, 2)
    for key in ("loss", "val_loss"):
        expected = column(work / "one", key)
        assert expected and column(work / "other", key) == pytest.approx(expected, abs=1e-5)
