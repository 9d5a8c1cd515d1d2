"""Mixtures of data sets: which sequences a step reads, the losses of a run, what a resume says."""

import json
import math
import shutil

import numpy as np
import pytest
from runs import TINY, records
from test_exact import same_numbers
from test_loader import BLOCK, reader_of
from test_validation import plain_loss, trained_model, write

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.run_vocabulary import vocabulary_for_run
from isogpt.data.dataset import open_dataset

SEED = 5
LENGTHS = {"a": 5 * BLOCK + 3, "b": 400 * BLOCK + 1, "c": 3000 * BLOCK + 7}
QUOTAS = {"a": 7, "b": 300, "c": 693}
MIXED = "c:0.693,a:0.007,b:0.3"


@pytest.fixture
def three(tmp_path, monkeypatch):
    """Three data sets, of different dtypes, in which no id occurs twice if it is read as the whole train."""
    monkeypatch.chdir(tmp_path)
    for number, (name, n) in enumerate(LENGTHS.items()):
        folder = write(tmp_path / "data" / name, np.arange(40) % 50, train=np.arange(n) % 50, vocab_size=50)
        if number == 1:
            (np.arange(n) % 50).astype(np.int32).tofile(folder / "train.bin")
            (np.arange(40) % 50).astype(np.int32).tofile(folder / "val.bin")
            (folder / "meta.json").write_text(json.dumps({"dtype": "int32", "vocab_size": 60}))
    return tmp_path


# ------------------------------------------------------------------------------------------------------------
# which sequences


def in_sources(starts):
    """(source, start in the source) of positions in the whole train."""
    ends = np.cumsum([*LENGTHS.values()])
    numbers = np.searchsorted(ends, starts, side="right")
    assert (starts + BLOCK + 1 <= ends[numbers]).all(), "a window crosses to the next source"
    places = starts - np.append(0, ends)[numbers]
    return [([*LENGTHS][number], place) for number, place in zip(numbers, places.tolist(), strict=True)]


def test_the_draw_has_not_changed(three):
    """A change would change every seed's loss curve."""
    for order, golden in {
        "random": "c3419 b2810 c14127 c17209 c6142 b31 b1409",
        "shuffle": "c19192 b2552 c20968 c12648 c11056 b336 b656",
    }.items():
        reader = reader_of(open_dataset(MIXED, BLOCK), order, 7, SEED)
        reader.train(0, position=996 * BLOCK)
        assert " ".join(f"{name}{start}" for name, start in in_sources(reader.starts(0))) == golden


def test_every_1000_sequences_have_the_proportions_and_every_epoch_each_window_once(three):
    """Also if the number of sequences per step changes on the way, as on a resume."""
    data, position, drawn = open_dataset(MIXED, BLOCK), 0, []
    for step, (sequences, steps) in enumerate([(480, 3), (7, 100), (33, 100), (1010, 3)]):
        reader = reader_of(data, "shuffle", sequences, SEED)
        reader.train(10 * step, position)
        for i in range(steps):
            drawn += in_sources(reader.starts(10 * step + i))
        position += steps * sequences * BLOCK
    assert len(drawn) == position // BLOCK == 8470
    orders = []
    for begin in range(0, 8000, 1000):
        names = [name for name, _ in drawn[begin : begin + 1000]]
        assert {name: names.count(name) for name in QUOTAS} == QUOTAS
        orders.append("".join(names))
    assert len(set(orders)) == 8
    for name, n in LENGTHS.items():
        windows = (n - 1) // BLOCK
        count = 8 * QUOTAS[name]
        # numbers within a source are consecutive within 1,000 sequences, so that an epoch ends within one
        starts = sorted(start for source, start in drawn[:8000] if source == name)
        times = np.bincount(np.array(starts) // BLOCK, minlength=windows)
        assert times.sum() == count and set(times.tolist()) <= {count // windows, -(-count // windows)}


def test_an_evaluation_of_train_has_the_proportions(three):
    reader = reader_of(open_dataset(MIXED, BLOCK), "shuffle")
    for n in (1, 8, 500, 2400):
        names = [name for name, _ in in_sources(reader.eval_windows("train", n))]
        assert all(abs(names.count(name) - n * quota / 1000) < 1 for name, quota in QUOTAS.items())


def test_ids_are_those_of_the_sources(three):
    data = open_dataset(MIXED, BLOCK)
    assert (data.vocab_size, len(data.train)) == (60, sum(LENGTHS.values()))
    x, y = next(reader_of(data, sequences=480).train(0, 0))
    assert ((x + 1) % 50 == y).all()


# ------------------------------------------------------------------------------------------------------------
# names and weights


def test_names_of_mixtures(three):
    by_size = open_dataset("c,b", BLOCK)
    assert by_size.quotas == (118, 882)  # 3,201 and 24,007 tokens
    assert open_dataset("a:1,b:1,c:1", BLOCK).quotas == (334, 333, 333)
    same = [open_dataset(name, BLOCK) for name in ("a:2,b:1", "b:5e-1,data/a:1", f"{three}/data/a:4, b:2,")]
    assert len({data.digest for data in same}) == 1 and same[0].quotas == (667, 333)
    assert len({open_dataset(name, BLOCK).digest for name in ("a,b", "a:2,b:1", "a:2,c:1")}) == 3
    write(three / "data/x:y", np.arange(30), train=np.arange(30), vocab_size=50)
    assert open_dataset("x:y", BLOCK).folder.name == "x:y"
    assert open_dataset("x:y:1,b:1", BLOCK).quotas == (500, 500)


def test_mixtures_that_are_refused(three):
    for name, message in {
        "a:1,b": "dataset=a:1,b: type a weight after each name, or after none",
        "a:0,b:1": "no train.bin in data/a:0 ",
        "a:1e999999999,b:1": "no train.bin in data/a:1e999999999 ",
        "a:1,b:1e9": r"of each 1,000 sequences, the data sets would get \[0, 1000\]: set a larger weight",
        "a:1,data/a:2": "data/a, data/a have the same name",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_dataset(name, BLOCK)


def test_sources_whose_ids_mean_different_things(three):
    ids = np.arange(30) % 3
    for name in ("abc", "abcd", "acb"):
        write(three / "data" / name, ids, train=ids, stoi={c: i for i, c in enumerate(name)})
    for name in ("one", "two"):
        write(three / "data" / name, ids, train=ids, tokenizer="gpt2", vocab_size=50304)
    assert open_dataset("abc,abcd", BLOCK).vocabulary.size == open_dataset("abc,abcd", BLOCK).vocab_size == 4
    assert open_dataset("abc,a", BLOCK).vocabulary.size == 3  # a does not say
    assert open_dataset("one,two", BLOCK).vocabulary.name == "gpt2"
    for other, reason in (("acb", "id 1 was 'b' and is 'c'"), ("one", "the tokenizer was char and is gpt2")):
        data = open_dataset(f"abc,{other}", BLOCK)
        with pytest.raises(ValueError, match=reason):
            vocabulary_for_run(data, None, "scratch", data.vocab_size, is_resume=False)


# ------------------------------------------------------------------------------------------------------------
# a run


def test_a_run_on_a_mixture_is_resumed_with_another(zygote, work):
    """Its losses are the means over the sources, which are also reported by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ids = np.fromfile(work / "data/tiny/train.bin", np.uint16)
    for name, part, val_bytes in (("x", ids[:7000], 1800), ("y", ids[7000:], 3600)):
        folder = write(work / "data" / name, part[:900], train=part, val_bytes=val_bytes)
        shutil.copy(work / "data/tiny/meta.pkl", folder)
    args = ["--data_order=shuffle", "--eval_interval=10", "--eval_iters=0", "--out_dir=out"]
    mixed = [*args, "--dataset=x:3,y:1", "--max_iters=29", "--tensorboard_log=True"]
    text = zygote.train(mixed, work).text()
    assert "of each 1,000 sequences data/x 750, data/y 250, 20,000 training tokens" in text
    start, *_, last = [record for record in records(work / "out") if record.get("event") in (None, "start")]
    assert (start["val_bytes"], start["val_tokens"], start["val_text"]) == (5400, 1800, "")
    model = trained_model(work / "out/ckpt.pt")
    of_sources = [plain_loss(model, work / "data" / name / "val.bin", 32) for name in "xy"]
    mean = 0.75 * of_sources[0] + 0.25 * of_sources[1]
    expected = {"val_loss": mean, "val_bpb": mean / math.log(2) / (0.75 * 2 + 0.25 * 4)}
    for name, loss, bytes_per_token in zip("xy", of_sources, (2, 4), strict=True):
        expected |= {f"val_loss/{name}": loss, f"val_bpb/{name}": loss / math.log(2) / bytes_per_token}
    assert {name: last[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    printed = (last[name] for name in ("val_loss", "val_bpb", "val_loss/x", "val_loss/y"))
    assert "val loss {:.4f}, {:.4f} bits per byte, x loss {:.4f}, y loss {:.4f}\n".format(*printed) in text
    charts = EventAccumulator(str(work / "out/tensorboard")).Reload().Tags()["scalars"]
    assert {"val/loss", "val/bpb", "val/loss_x", "val/bpb_x", "val/loss_y", "val/bpb_y"} < {*charts}
    assert read_file(work / "out/ckpt.pt")["isogpt"]["sources"]["x"]["of_1000"] == 750
    resumed = [*args, "--init_from=resume", "--dataset=x", "--max_iters=32"]
    text = zygote.train(resumed, work).text()
    assert text.count("dataset x (was x:750,y:250): the") == 1 and "have changed" not in text
    assert "sources" not in read_file(work / "out/ckpt.pt")["isogpt"]


def test_bits_per_byte_of_a_mixture_need_the_lengths_of_all_texts(three):
    write(three / "data/d", np.arange(40), train=np.arange(40), val_bytes=80)
    assert open_dataset("d", BLOCK).bits_per_byte(1.0) and not open_dataset("c,d", BLOCK).bits_per_byte(1.0)


@pytest.mark.slow
def test_a_mixture_that_was_killed_on_2_and_3_ranks_has_the_bits_of_one(
    zygote, session_work, trained, tmp_path
):
    """
    Of two sources, of which the larger one is in shards, with windows that begin with a document. 11 steps of
    120 sequences go beyond the first 1,000 sequences, over which the sources are spread.
    """
    out, args = tmp_path / "killed", ["--dataset=shards:0.7,file:0.3", "--data_order=documents"]
    args += ["--exact=True", "--gradient_accumulation_steps=4", "--batch_size=30", "--dropout=0.1"]
    args += ["--max_iters=10", "--eval_interval=6", "--save_interval=3"]
    one = trained(args)
    more = [*TINY, *args, f"--out_dir={out}", "--init_from=auto"]
    for processes, step in ((2, 4), (3, 8)):
        run = zygote.start(more, session_work, processes)
        assert run.until(lambda text, step=step: f"iter {step}:" in text and any(out.glob("step_*")))
        run.kill()
        run.wait(ok=False)
    zygote.start([*more, "--zero=3"], session_work, 2).wait()
    same_numbers(one, out)
    assert [record.get("event") for record in records(out)].count("resume") == 2
