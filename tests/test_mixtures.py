"""Mixtures of data sets: which sequences a step reads, the validation losses, what a resume says."""

import json
import math
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import TINY, default_plan, records, script_that_fails, start_faulty, train_defaults
from test_validation import evaluated, plain_loss, write

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.run_vocabulary import vocabulary_of_run
from isogpt.checkpoint.start import changes_of_curve
from isogpt.common.random_numbers import MIXTURE, TRAIN, random_bits
from isogpt.data.dataset import open_dataset
from isogpt.data.mixture import PER, quotas_of
from isogpt.data.reader import Reader
from isogpt.data.windows import EvenWindows, shuffled_windows
from isogpt.lab.combinations import typed_values
from isogpt.launch.start_checks import check_alike
from isogpt.monitor.banner import about_model
from isogpt.parallel.mesh import Mesh
from isogpt.speed.dry_run import is_prepared
from model import GPT, GPTConfig

CPU = torch.device("cpu")
BLOCK, SEED = 8, 5
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


def reader_of(data, order, sequences, **fields):
    args = {"block_size": BLOCK, "vocab_size": data.vocab_size}
    plan = default_plan(
        batch_size=sequences, gradient_accumulation_steps=1, micro_batch=sequences, model_args=args
    )
    return Reader(data, order, SEED, plan, Mesh(), CPU, **fields)


# ------------------------------------------------------------------------------------------------------------
# which sequences


def by_a_plain_loop(order, first, steps, sequences):
    """(source, start in the source) of the sequences from number `first` on, one after the other."""
    drawn, orders, names = [], {}, [name for name in QUOTAS for _ in range(QUOTAS[name])]
    places = [i for name in QUOTAS for i in range(QUOTAS[name])]
    for step in range(steps):
        bits = random_bits(SEED, TRAIN, step, sequences).tolist()
        for i in range(sequences):
            block, place = divmod(first + step * sequences + i, PER)
            if block not in orders:
                keys = random_bits(SEED, MIXTURE, block, PER).tolist()
                orders[block] = sorted(range(PER), key=keys.__getitem__)
            card = orders[block][place]
            name, number = names[card], block * QUOTAS[names[card]] + places[card]
            if order == "random":
                start = bits[i] % (LENGTHS[name] - BLOCK)
            else:
                windows = EvenWindows(LENGTHS[name], BLOCK)
                start = shuffled_windows(windows, SEED, np.array([number])).item()
            drawn.append((name, start))
    return drawn


def in_sources(starts):
    """(source, start in the source) of positions in the whole train."""
    begins = dict(zip(LENGTHS, np.cumsum([0, *LENGTHS.values()]).tolist(), strict=False))
    found = []
    for start in starts.tolist():
        name = max((name for name in begins if begins[name] <= start), key=begins.get)
        found.append((name, start - begins[name]))
        assert start - begins[name] + BLOCK + 1 <= LENGTHS[name], "a window crosses to the next source"
    return found


@pytest.mark.parametrize("order", ["random", "shuffle"])
@pytest.mark.parametrize(("sequences", "shift"), [(480, 0), (7, 996)])
def test_the_draw_is_that_of_a_plain_loop(three, order, sequences, shift):
    reader = reader_of(open_dataset(MIXED, BLOCK), order, sequences, shift=shift)
    drawn = [pair for step in range(3) for pair in in_sources(reader.starts(step))]
    assert drawn == by_a_plain_loop(order, shift, 3, sequences)


def test_every_1000_sequences_have_the_proportions_and_every_epoch_each_window_once(three):
    """Also if the number of sequences per step changes on the way, as on a resume."""
    data, position, drawn = open_dataset(MIXED, BLOCK), 0, []
    for step, (sequences, steps) in enumerate([(480, 3), (7, 100), (33, 100), (1010, 3)]):
        reader = reader_of(data, "shuffle", sequences)
        reader.train(10 * step, position)
        for i in range(steps):
            drawn += in_sources(reader.starts(10 * step + i))
        position += steps * sequences * BLOCK
    assert len(drawn) == position // BLOCK == 8470
    orders = []
    for begin in range(0, 8000, PER):
        names = [name for name, _ in drawn[begin : begin + PER]]
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


def test_a_single_data_set_draws_as_without_mixtures(three):
    for name in ("b", "b:3", str(three / "data/b")):
        data = open_dataset(name, BLOCK)
        assert [*data.splits] == ["train", "val"] and data.describe() == {}
        starts = reader_of(data, "shuffle", 4, shift=990).starts(5)
        assert (
            starts.tolist()
            == shuffled_windows(EvenWindows(len(data.train), BLOCK), SEED, 1010 + np.arange(4)).tolist()
        )
        bits = random_bits(SEED, TRAIN, 5, 4)
        assert (reader_of(data, "random", 4).starts(5) == bits % np.uint64(len(data.train) - BLOCK)).all()


@pytest.mark.parametrize("n", [1, 8, 500, 2400])
def test_an_evaluation_of_train_has_the_proportions(three, n):
    reader = reader_of(open_dataset(MIXED, BLOCK), "shuffle", 4)
    names = [name for name, _ in in_sources(reader.eval_windows("train", n))]
    assert all(abs(names.count(name) - n * quota / PER) < 1 for name, quota in QUOTAS.items())


def test_ids_are_those_of_the_sources(three):
    data = open_dataset(MIXED, BLOCK)
    assert (data.vocab_size, len(data.train)) == (60, sum(LENGTHS.values()))
    x, y = next(reader_of(data, "random", 480).train(0, 0))
    assert ((x + 1) % 50 == y).all()
    (line, _) = about_model(
        data, SimpleNamespace(model_args={"vocab_size": 60}, counts=SimpleNamespace(experts=0)), 0, ""
    )
    parts = "data/a 7, data/b 300, data/c 693"
    assert line == f"data:    of each 1,000 sequences {parts}, 27,251 training tokens, vocabulary size 60"


# ------------------------------------------------------------------------------------------------------------
# names and weights


def test_quotas_by_the_largest_remainder():
    assert quotas_of({"a": 1, "b": 1, "c": 1}) == [334, 333, 333]
    assert quotas_of({"a": Fraction("0.7"), "b": Fraction("0.3")}) == [700, 300]
    assert quotas_of({"a": 10**15, "b": 3 * 10**15 + 1}) == [250, 750]
    assert quotas_of({"a": Fraction("5e-4"), "b": Fraction("9.995e-1")}) == [1, 999]


def test_names_of_mixtures(three):
    by_size = open_dataset("c,b", BLOCK)
    assert by_size.quotas == [118, 882]  # 3,201 and 24,007 tokens
    same = [open_dataset(name, BLOCK) for name in ("a:2,b:1", "b:5e-1,data/a:1", f"{three}/data/a:4, b:2,")]
    assert len({data.digest for data in same}) == 1 != same[0].quotas == [667, 333]
    assert len({open_dataset(name, BLOCK).digest for name in ("a,b", "a:2,b:1", "a:2,c:1")}) == 3
    for name in ("x,y:1", "x:1,y:2", "x:3"):  # folders
        write(three / "data" / name, np.arange(30), train=np.arange(30), vocab_size=50)
        assert open_dataset(name, BLOCK).folder.name == name
    assert open_dataset("x:3:1,b:1", BLOCK).quotas == [500, 500]


def test_a_mixture_longer_than_the_name_of_a_file(three):
    names = [f"{'long' * 10}{i}" for i in range(9)]
    for name in names:
        write(three / "data" / name, np.arange(30), train=np.arange(30), vocab_size=50)
    assert len(",".join(names)) > 255 and len(open_dataset(",".join(names), BLOCK).sources) == 9
    with pytest.raises(ValueError, match=r"no train.bin in data/x+:x.*; prepared data sets: a, b, c, long"):
        open_dataset(f"{300 * 'x'}:x:1,a:1", BLOCK)
    with pytest.raises(ValueError, match=r"no train.bin in data/~nosuch/x or "):
        open_dataset("~nosuch/x", BLOCK)


def test_mixtures_that_are_refused(three, at, capsys):
    write(three / "elsewhere/a", np.arange(30), train=np.arange(30))
    Path("data/link").symlink_to("a")
    for name, message in {
        "a:1,b": "gives no weight to b: type a weight after each name, such as --dataset=a:1,b:1, or after",
        "a:0,b:1": "'0' is not a positive number, and there is no folder a:0: type NAME:WEIGHT",
        "a:-1,b:1": "'-1' is not a positive",
        "a:nan,b:1": "'nan' is not a positive",
        "a:1e999999999,b:1": "'1e999999999' is not a positive",
        "a:1e-999999999,b:1": "'1e-999999999' is not a positive",
        "a:x,b:1": "'x' is not a positive",
        "a:1,b:1e9": "a is 1e-06 of each 1,000 sequences of the mixture, which is rounded to 0: give it",
        "a:1,data/a:2": "contains data/a twice: name it once, with the sum of the weights",
        "a:1,link:2": r"contains data/link twice \(data/a is the same folder\): name it once",
        "a:1,elsewhere/a:2": "losses are reported by the folder's name, 'a': rename one",
        "a:1,nosuch:2": "no train.bin in data/nosuch or .*; prepared data sets: a, b, c, link",
    }.items():
        with pytest.raises(ValueError, match=message) as e:
            open_dataset(name, BLOCK)
        assert "\n" not in str(e.value)
    with pytest.raises(
        ValueError, match="eval_datasets contains b, but .*: leave it out of --eval_datasets="
    ):
        open_dataset("a,b", BLOCK, 0, "b")
    printed = script_that_fails(at, capsys, "train.py", [*TINY, "--dataset=a:1,b"])
    assert printed.err.count("\n") == 1 and "gives no weight to b" in printed.err


def test_sources_whose_ids_mean_different_things(three):
    def table(name, characters):
        write(
            three / "data" / name,
            np.arange(30) % 3,
            train=np.arange(30) % 3,
            stoi={c: i for i, c in enumerate(characters)},
        )

    for name, characters in {"abc": "abc", "abcd": "abcd", "acb": "acb"}.items():
        table(name, characters)
    gpt2 = {"tokenizer": "gpt2", "vocab_size": 50304}
    for name in ("one", "two"):
        write(three / "data" / name, np.arange(30), train=np.arange(30), **gpt2)
    assert open_dataset("abc,abcd", BLOCK).vocabulary.size == open_dataset("abc,abcd", BLOCK).vocab_size == 4
    assert open_dataset("abc,a", BLOCK).vocabulary.size == 3  # a does not say
    assert open_dataset("one,two", BLOCK).vocabulary.name == "gpt2"
    for name, message in {
        "abc,acb": "data/acb are not those of data/abc, .* id 1 was 'b' and is 'c'. Run the prepare.py of",
        "abc,one": "Run the prepare.py of data/abc with the tokenizer of data/one: --tokenizer=gpt2$",
    }.items():
        with pytest.raises(ValueError, match=message) as e:
            open_dataset(name, BLOCK)
        assert "\n" not in str(e.value)
    run = {"model_args": {"vocab_size": 4}, "config": {"dataset": "abc:1,abcd:2"}, "isogpt": {}}
    assert (
        vocabulary_of_run(run, Path("out"), "abc,abcd").size == vocabulary_of_run(run, Path("out")).size == 4
    )
    run["config"]["dataset"] = "abc:1,gone:2"
    assert "whose data set abc:1,gone:2 is not here" in vocabulary_of_run(run, Path("out")).content


def test_other_users_of_the_setting(three):
    assert is_prepared({"dataset": "a:1,b:1", "vocab_size": 9}) and not is_prepared(
        {"dataset": "a,x", "vocab_size": 9}
    )
    assert typed_values("dataset", "a:1,b:1") == ["a:1,b:1"]  # a mixture for sweep.py too
    assert typed_values("dataset", "a:1,b:1;c") == ["a:1,b:1", "c"]
    facts = [open_dataset(name, BLOCK).facts() for name in ("a:1,b:1", f"{three}/data/a,b", "a:1,b:1")]
    check_alike([facts[0], facts[2]], ["rank 0", "rank 1"])
    with pytest.raises(ValueError, match="the data's sources is {'a': .*'of_1000': 500}.* on rank 0, {'a'"):
        check_alike(facts[:2], ["rank 0", "rank 1"])


# ------------------------------------------------------------------------------------------------------------
# the validation loss


@pytest.mark.parametrize("sequences", [0, 3])
def test_the_loss_is_the_mean_over_the_sources(three, sequences):
    for name, tokens, size in (("a", 40, 80), ("b", 65, 260)):
        meta = json.loads((three / "data" / name / "meta.json").read_text()) | {"val_bytes": size}
        ids = np.random.default_rng(tokens).integers(0, 50, tokens)
        ids.astype(meta["dtype"]).tofile(three / "data" / name / "val.bin")
        (three / "data" / name / "meta.json").write_text(json.dumps(meta))
    data = open_dataset("a:0.25,b:0.75", BLOCK)
    assert [*data.splits] == ["train", "val/a", "val/b"]
    model = GPT(GPTConfig(BLOCK, 60, 1, 1, 4, bias=False), 0).eval()
    for p in model.parameters():
        p.data.mul_(20)
    values = evaluated(data, model, sequences)
    alone = {name: evaluated(open_dataset(name, BLOCK, 60), model, sequences) for name in ("a", "b")}
    for name in alone:
        assert values[f"val_loss/{name}"] == alone[name]["val_loss"]
        assert values[f"val_bpb/{name}"] == pytest.approx(alone[name]["val_bpb"])
    mean = 0.25 * alone["a"]["val_loss"] + 0.75 * alone["b"]["val_loss"]
    assert (
        values["val_loss"] == pytest.approx(mean, rel=1e-12)
        and alone["a"]["val_loss"] != alone["b"]["val_loss"]
    )
    assert values["val_bpb"] == pytest.approx(mean / math.log(2) / (0.25 * 2 + 0.75 * 4))
    assert data.validation() == {"val_text": "", "val_bytes": 340, "val_tokens": 105}
    assert "val_bpb" not in evaluated(open_dataset("a,c", BLOCK, 60), model, sequences)


# ------------------------------------------------------------------------------------------------------------
# resumes


def test_what_a_resume_says(three):
    settings = train_defaults(data_order="shuffle")

    def said(now, was, **changes):
        described = [open_dataset(name, BLOCK).describe() for name in (now, was)]
        run = {"config": settings | {"dataset": was}, "isogpt": {"shuffle_version": 2, **described[1]}}
        return changes_of_curve(settings | {"dataset": now} | changes, run, described[0])

    assert said("a:1,b:1", "b:5,data/a:5") == said("a", "a") == []
    (note,) = said("a:1,b:3", "a:1,b:1")
    ends = ": the loss curve changes"
    assert note == f"this run continues with dataset a:250,b:750 (was a:500,b:500){ends}"
    (note,) = said("a:1,c:1", "a", data_order="random")
    assert "dataset a:500,c:500 (was a), data_order random (was shuffle)" in note
    (note,) = said("b", "a:1,b:1")
    assert "dataset b (was a:500,b:500)" in note
    before = open_dataset("a:1,b:1", BLOCK).describe()["sources"]
    run = {"config": settings, "isogpt": {"shuffle_version": 2, "sources": before}}
    (note,) = changes_of_curve(settings, run, {"sources": before | {"b": before["b"] | {"digest": "other"}}})
    assert "with other tokens in dataset a:500,b:500" in note


@pytest.mark.slow
def test_a_run_on_a_mixture_is_killed_and_resumed(zygote, work):
    """With exact; then resumed with other weights, and with a single data set."""
    ids = np.fromfile(work / "data/tiny/train.bin", np.uint16)
    meta = (work / "data/tiny/meta.pkl").read_bytes()
    for name, part in (("x", ids[:7000]), ("y", ids[7000:])):
        folder = write(work / "data" / name, part[:900], train=part, val_bytes=900)
        (folder / "meta.pkl").write_bytes(meta)
    args = [
        "--dataset=x:3,y:1",
        "--data_order=shuffle",
        "--exact=True",
        "--eval_interval=10",
        "--eval_iters=0",
    ]
    zygote.train([*args, "--out_dir=straight", "--max_iters=29"], work)
    killed = [*args, "--out_dir=out", "--max_iters=29", "--save_interval=4"]
    run = start_faulty(zygote, killed, work, WAIT=[14, 0])
    assert run.until(lambda text: "held by the test" in text)
    run.kill()
    run.wait(ok=False)
    resume = [*args, "--out_dir=out", "--init_from=resume"]
    text = zygote.train([*resume, "--max_iters=29"], work).text()
    assert "this run continues with" not in text and "does not count" not in text
    kept = [[r for r in records(work / out) if "event" not in r] for out in ("straight", "out")]
    for name in ("loss", "val_loss", "val_loss/x", "val_loss/y", "val_bpb"):
        a, b = ({r["iter"]: r[name] for r in one if name in r} for one in kept)
        assert a == b and a
    state = read_file(work / "out/ckpt.pt")
    args_of_model = state["model_args"] | state["isogpt"]["model_args"]
    model = GPT.from_state(GPTConfig(**args_of_model), state["model"]).eval()
    losses = [plain_loss(model, work / "data" / name / "val.bin", 32) for name in ("x", "y")]
    assert kept[1][-1]["val_loss"] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1], abs=1e-6)
    assert state["isogpt"]["sources"]["x"]["of_1000"] == 750
    line = (
        r"^step 30: train loss [\d.]+, val loss [\d.]+, [\d.]+ bits per byte, x loss [\d.]+, y loss [\d.]+$"
    )
    assert re.search(line, text, re.M)
    text = zygote.train([*resume, "--dataset=x:1,y:1", "--max_iters=31"], work).text()
    assert text.count("dataset x:500,y:500 (was x:750,y:250), in which") == 1 and "have changed" not in text
    text = zygote.train([*resume, "--dataset=x", "--max_iters=32"], work).text()
    assert text.count("dataset x (was x:500,y:500), in which an epoch") == 1 and "have changed" not in text
    assert "sources" not in read_file(work / "out/ckpt.pt")["isogpt"]
