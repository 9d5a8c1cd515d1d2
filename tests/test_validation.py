"""Validation that can be compared: the whole split, further validation sets, bits per byte."""

import json
import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import default_plan, records, train_defaults

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.measures import changed_measures, what_is_measured
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.run_vocabulary import vocabulary_for_run
from isogpt.checkpoint.save import Saver
from isogpt.common.random_numbers import EVAL_TRAIN, EVAL_VAL
from isogpt.data.dataset import open_dataset
from isogpt.data.reader import Reader
from isogpt.data.windows import random_windows
from isogpt.launch.start_checks import check_alike
from isogpt.monitor import evaluation
from isogpt.monitor.records import chart_values, evaluation_line
from isogpt.parallel.mesh import Mesh, make_mesh
from isogpt.speed.clock import Clock
from model import GPT, GPTConfig

CPU = torch.device("cpu")
BLOCK = 8


def write(folder, val, train=None, **meta):
    """A data set of uint16 ids."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, ids in (("train", train), ("val", val)):
        if ids is not None:
            np.asarray(ids).astype(np.uint16).tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint16", **meta}))
    return folder


# ------------------------------------------------------------------------------------------------------------
# what an evaluation reads


@pytest.mark.parametrize("tokens", [BLOCK + 1, 6 * BLOCK + 1, 6 * BLOCK + 2, 7 * BLOCK, 50 * BLOCK + 4])
@pytest.mark.parametrize("layout", [{}, {"exact": True}, {"cp": 2}, {"shares": "2,1,1"}])
def test_the_whole_split_predicts_each_token_once(tmp_path, tokens, layout):
    """On any number of ranks, all of which compute as many micro-batches."""
    write(tmp_path / "a", range(tokens), train=range(100))
    data = open_dataset(str(tmp_path / "a"), BLOCK, 1000)
    for world in (3,) if "shares" in layout else (1, 2, 3, 7):
        world *= layout.get("cp", 1)
        read, micro_steps = [], set()
        for rank in range(world):
            args = {"block_size": BLOCK, "vocab_size": 1000}
            plan = default_plan(world_size=world, micro_batch=3, model_args=args, **layout)
            reader = Reader(data, "random", 1, plan, make_mesh(rank, plan), CPU)
            batches = list(reader.evaluation("val", 0))
            micro_steps.add(len(batches))
            for x, y in batches:
                assert torch.equal(x[y >= 0] + 1, y[y >= 0]) and y.min() >= -1
                read += y[y >= 0].tolist()
        assert sorted(read) == list(range(1, tokens)) and len(micro_steps) == 1
        assert reader.eval_targets("val", 0) == tokens - 1


def test_of_train_as_many_random_windows_are_read(tmp_path):
    write(tmp_path / "a", range(30), train=range(100))
    plan = default_plan(micro_batch=3, model_args={"block_size": BLOCK, "vocab_size": 100})
    readers = [
        Reader(open_dataset(str(tmp_path / "a"), BLOCK, 100), "random", seed, plan, Mesh(), CPU)
        for seed in (1, 1, 2)
    ]
    rows = [[y.tolist() for _, y in reader.evaluation("train", 0)] for reader in readers]
    assert rows[0] == rows[1] != rows[2] and sum(map(len, rows[0])) == 4  # 29 targets in windows of 8
    # of streams of their own, so that they are not the windows that a step reads
    for split, n_tokens, stream in (("train", 100, EVAL_TRAIN), ("val", 30, EVAL_VAL)):
        windows = random_windows(n_tokens, BLOCK, 1, stream, 0, 5)
        assert readers[0].eval_windows(split, 5).tolist() == windows.tolist()
    assert readers[0].eval_targets("train", 0) == 32
    assert readers[0].eval_targets("val", 5) == readers[0].eval_targets("train", 5) == 40


# ------------------------------------------------------------------------------------------------------------
# the loss


def evaluated(data, model, sequences=0):
    """What an evaluation of a model on one process reports."""
    reported = []
    plan = default_plan(micro_batch=4, model_args={"block_size": BLOCK, "vocab_size": data.vocab_size})
    evaluator = evaluation.Evaluator(
        model,
        SimpleNamespace(evaluated_weights=nullcontext, progress=SimpleNamespace(evaluated=reported.append)),
        Reader(data, "random", 1, plan, Mesh(), CPU),
        sequences=sequences,
        autocast=nullcontext(),
        report=SimpleNamespace(
            clock=Clock(CPU),
            run=SimpleNamespace(stop=SimpleNamespace(agreed=0, in_evaluation=lambda *args: False)),
            saver=SimpleNamespace(seconds_at_end=0.0, save_and_fail=print),
            evaluation=reported.append,
        ),
    )
    evaluator.run()
    val_loss, values = reported
    assert val_loss == values["val_loss"]
    return values


@pytest.mark.parametrize("sequences", [0, 3])
def test_bits_per_byte_do_not_depend_on_the_tokenizer(tmp_path, sequences):
    """Models that predict uniformly need 8 bits for a byte, whether a token is one byte or two."""
    text = np.random.default_rng(0).integers(0, 256, 1002, dtype=np.uint8)
    write(tmp_path / "bytes", text, train=text, vocab_size=256, val_bytes=1002)
    pairs = text.view(np.uint16)
    write(tmp_path / "pairs", pairs, train=pairs, vocab_size=2**16, val_bytes=1002)
    write(tmp_path / "unknown", text, train=text, vocab_size=256)
    for name, loss in (("bytes", math.log(256)), ("pairs", math.log(2**16)), ("unknown", math.log(256))):
        data = open_dataset(str(tmp_path / name), BLOCK, eval_datasets=str(tmp_path / name))
        model = GPT(GPTConfig(BLOCK, data.vocab_size, 1, 1, 4, bias=False), 0)
        for p in model.parameters():
            p.data.zero_()
        values = evaluated(data, model, sequences)
        assert values["val_loss"] == pytest.approx(loss) and values["train_loss"] == pytest.approx(loss)
        assert values[f"val_loss/{name}"] == values["val_loss"]
        bits = [value for key, value in values.items() if "bpb" in key]
        assert bits == pytest.approx([] if name == "unknown" else [8.0, 8.0])


# name: (processes, settings)
LAYOUTS = {
    "one": (1, "--batch_size=3"),  # not 4: the micro-batch does not matter
    "ddp": (2, ""),
    "zero3": (3, "--zero=3"),
    "tp": (2, "--tp=2"),
    "pp": (2, "--pp=2"),
    "cp": (2, "--cp=2"),
    "uneven": (2, "--shares=3,1"),
}
EXACT = {"exact-1": (1, "--exact=True"), "exact-3": (3, "--exact=True --zero=1")}
NAMES = [name if name == "zero3" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]


def plain_loss(model, path, block_size):
    """The mean loss over a file of uint16 ids, each of which but the first is predicted once."""
    ids = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, block_size):
            window = ids[start : start + block_size + 1]
            total += model(window[None, :-1], window[None, 1:], 1.0)[1].item()
    return total / (len(ids) - 1)


@pytest.fixture(scope="module")
def trained(zygote, shared_work):
    """A short run in the folder `run`, its model, and a folder `other` that contains only a val.bin."""
    zygote.train(["--out_dir=run", "--max_iters=9", "--learning_rate=0.01", "--eval_iters=2"], shared_work)
    ids = np.fromfile(shared_work / "data/tiny/val.bin", np.uint16)
    write(shared_work / "data/other", ids[1500:2222], val_bytes=722)
    state = read_file(shared_work / "run/ckpt.pt")
    args = state["model_args"] | state["isogpt"]["model_args"]
    return GPT.from_state(GPTConfig(**args), state["model"]).eval()


def evaluate(zygote, cwd, name):
    """Evaluate the folder `run` on a layout; returns the first event and evaluation, and the output."""
    processes, settings = (LAYOUTS | EXACT)[name]
    args = ["--init_from=run", "--max_iters=0", "--eval_iters=0", "--eval_datasets=other"]
    run = zygote.train([*args, f"--out_dir=of-{name}", *settings.split()], cwd, processes)
    return *records(cwd / f"of-{name}")[:2], run.text()


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_has_the_loss_of_a_plain_loop(zygote, shared_work, trained, name):
    start, record, text = evaluate(zygote, shared_work, name)
    for key, dataset in (("val_loss", "tiny"), ("val_loss/other", "other")):
        loss = plain_loss(trained, shared_work / "data" / dataset / "val.bin", 32)
        assert record[key] == pytest.approx(loss, abs=1e-6)
    assert record["val_bpb/other"] == pytest.approx(record["val_loss/other"] / math.log(2))
    assert "val_bpb" not in record  # tiny does not say how long its text is
    line = f"val loss {record['val_loss']:.4f}, other loss {record['val_loss/other']:.4f}\n"
    assert f"step 0: train loss {record['train_loss']:.4f}, {line}" in text
    assert start["tokens_per_step"] == 2 * 32 * (3 if name == "one" else 4)
    assert start["measures"]["sequences"] == 0 and start["measures"]["seed"] is None
    assert start["val_tokens"] == 4000 and start["val_bytes"] == 0 and start["val_text"] == ""


@pytest.mark.slow
def test_with_exact_the_loss_has_the_same_bits(zygote, shared_work, trained):
    one, three = (evaluate(zygote, shared_work, name)[1] for name in EXACT)
    assert one | {name: three[name] for name in ("time", "seconds")} == three


# ------------------------------------------------------------------------------------------------------------
# which losses can be compared


def test_losses_of_sequences_of_another_length_are_different():
    config = {"dataset": "a", "block_size": 8, "seed": 1, "batch_size": 4, "eval_iters": 0}
    before, now = (what_is_measured(config | {"block_size": n}, "d") for n in (8, 16))
    assert changed_measures(before, now) == ["block_size is 16, not 8"]


def test_a_resume_keeps_the_best_loss_of_the_whole_split_only(zygote, work):
    np.fromfile(work / "data/tiny/val.bin", np.uint16)[:640].tofile(work / "data/tiny/val.bin")
    (work / "data/tiny/meta.json").write_text(json.dumps({"val_bytes": 1280}))
    zygote.train(["--out_dir=out", "--max_iters=1", "--eval_iters=2", "--eval_interval=1"], work)
    resume = ["--out_dir=out", "--init_from=resume", "--eval_iters=0", "--eval_interval=1"]
    text = zygote.train([*resume, "--max_iters=2"], work).text()
    assert "different: eval_iters * batch_size is 0, not 8\n" in text
    text = zygote.train([*resume, "--max_iters=3", "--seed=5", "--batch_size=2"], work).text()
    assert "something different" not in text, "neither the seed nor the batch matters"
    losses = [r["val_loss"] for r in records(work / "out") if "val_loss" in r and r["iter"] > 1]
    best = read_file(work / "out/ckpt.pt")["best_val_loss"]
    assert len(losses) > 1 and best == min(losses)
    bits = best / math.log(2) / 2
    assert re.search(rf"^done: .*best val loss {best:.4f} at step \d, {bits:.4f} bits per byte$", text, re.M)


def test_always_save_checkpoint_saves_at_evaluations_that_are_not_the_best_too(tmp_path):
    place = SimpleNamespace(path=tmp_path), default_plan(), Mesh()
    for is_always in (True, False):
        config = train_defaults(always_save_checkpoint=is_always)
        saver, progress = Saver(*place, config, None, None), Progress(1)
        for loss, is_due in ((3.0, True), (4.0, is_always), (2.0, True), (None, False)):
            progress.advance()
            if loss:
                progress.evaluated(loss)
            state = SimpleNamespace(progress=progress, step=progress.step)
            assert saver.is_due(state, is_last=False) == is_due
        assert saver.is_due(state, is_last=True)


# ------------------------------------------------------------------------------------------------------------
# further validation sets that do not fit


def test_validation_sets_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data/a", range(30), train=range(30))
    write(tmp_path / "data/b", range(30))
    write(tmp_path / "elsewhere/b", range(30))
    write(tmp_path / "data/short", range(8))
    for names, message in (
        ("b,elsewhere/b", "data/b, elsewhere/b have the same name, by which losses are reported: rename one"),
        ("b,b", "data/b, data/b have the same name"),
        ("b,c", "no val.bin in data/c or .*; prepared data sets: a, b, short"),
        ("short", "short/val.bin contains 8 tokens, but block_size 8 needs 9 or more"),
    ):
        with pytest.raises(ValueError, match=message) as e:
            open_dataset("a", BLOCK, 30, names)
        assert "\n" not in str(e.value)
    data = open_dataset("a", BLOCK, 30, " b, ")
    assert [*data.splits] == ["train", "val", "val/b"]


@pytest.mark.parametrize(
    ("tables", "ids", "vocab_size", "message"),
    [
        ("abc acb", 3, 3, "are not those of the run: id 1 was 'b' and is 'c'. Prepare it with the run's"),
        ("abc abc", 9, 3, "id 8 is beyond the model's 3 ids. Prepare it"),
        ("abc abc", 9, 9, ""),
        ("abc abcd", 3, 3, ""),
        ("abc ", 3, 3, ""),  # it does not say what its ids mean
        (" abc", 3, 9, ""),
    ],
)
def test_a_validation_set_of_another_tokenizer_is_refused(tmp_path, tables, ids, vocab_size, message):
    metas = [{"stoi": {c: i for i, c in enumerate(t)}} if t else {} for t in tables.split(" ")]
    write(tmp_path / "a", np.arange(30) % 3, train=np.arange(30) % 3, **metas[0])
    write(tmp_path / "b", np.arange(30) % ids, **metas[1])
    data = open_dataset(str(tmp_path / "a"), BLOCK, eval_datasets=str(tmp_path / "b"))
    with pytest.raises(ValueError) if message else nullcontext() as e:
        vocabulary_for_run(data, None, "scratch", vocab_size, is_resume=False)
    assert not message or message in str(e.value) and "\n" not in str(e.value)


def test_all_ranks_see_the_same_validation_sets(tmp_path):
    write(tmp_path / "a", range(30), train=range(30))
    facts = []
    for place in ("one", "two"):
        other = write(tmp_path / place / "b", np.arange(30) + (place == "two"))
        data = open_dataset(str(tmp_path / "a"), BLOCK, 40, str(other))
        facts.append({"eval_datasets": str(other)} | data.facts())
    check_alike([facts[0], facts[0] | {"eval_datasets": "elsewhere/b"}], ["rank 0", "rank 1"])
    with pytest.raises(ValueError, match="the digest of eval_datasets is {'b': '.*'} on rank 0, {'b': "):
        check_alike(facts, ["rank 0", "rank 1"])


# ------------------------------------------------------------------------------------------------------------
# how it is told


def test_names_of_an_evaluation():
    record = {"iter": 5, "train_loss": 2.0, "val_loss": 1.5, "val_bpb": 1.25}
    charts = {"iter": 5, "train/loss": 2.0, "val/loss": 1.5, "val/bpb": 1.25}
    line = "step 5: train loss 2.0000, val loss 1.5000, 1.2500 bits per byte"
    further = {"val_loss/wiki": 3.0, "val_bpb/wiki": 2.5, "val_loss/code": 1.0}
    assert evaluation_line(record | further) == f"{line}, wiki loss 3.0000, code loss 1.0000"
    named = {"val/loss_wiki": 3.0, "val/bpb_wiki": 2.5, "val/loss_code": 1.0}
    assert chart_values(record | further) == charts | named
