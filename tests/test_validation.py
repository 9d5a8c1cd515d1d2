"""Validation that can be compared: the whole split, further validation sets, bits per byte."""

import json
import math
import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from runs import column, default_plan, records

from isogpt.checkpoint.ckpt_file import read_file
from isogpt.checkpoint.run_vocabulary import vocabulary_for_run
from isogpt.data.dataset import open_dataset
from isogpt.data.reader import Reader
from isogpt.parallel.mesh import make_mesh
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


def reader_of(data, seed=1, rank=0, **layout):
    """The reader of a rank with micro-batches of three sequences."""
    args = {"block_size": BLOCK, "vocab_size": 1000}
    plan = default_plan(micro_batch=3, model_args=args, **layout)
    return Reader(data, "random", seed, plan, make_mesh(rank, plan), CPU)


def test_the_whole_split_predicts_each_token_once(tmp_path):
    """On any number of ranks, all of which compute as many micro-batches."""
    layouts = [{"exact": True, "world_size": 3}, {"shares": "2,1,1", "world_size": 3}]
    layouts += [{"world_size": n} for n in (1, 2, 7)] + [{"cp": 2, "world_size": 2 * n} for n in (1, 3)]
    for tokens in (BLOCK + 1, 6 * BLOCK + 1, 6 * BLOCK + 2, 7 * BLOCK, 50 * BLOCK + 4):
        write(tmp_path / "a", range(tokens), train=range(100))
        data = open_dataset(str(tmp_path / "a"), BLOCK, 1000)
        for layout in layouts:
            read, micro_steps = [], set()
            for rank in range(layout["world_size"]):
                reader = reader_of(data, rank=rank, **layout)
                batches = list(reader.evaluation("val", 0))
                micro_steps.add(len(batches))
                for x, y in batches:
                    assert torch.equal(x[y >= 0] + 1, y[y >= 0]) and y.min() >= -1
                    read += y[y >= 0].tolist()
            assert sorted(read) == list(range(1, tokens)) and len(micro_steps) == 1, layout
            assert reader.eval_targets("val", 0) == tokens - 1


def test_of_train_as_many_random_windows_are_read(tmp_path):
    write(tmp_path / "a", range(30), train=range(100))
    data = open_dataset(str(tmp_path / "a"), BLOCK, 100)
    readers = [reader_of(data, seed) for seed in (1, 1, 2)]
    rows = [[y.tolist() for _, y in reader.evaluation("train", 0)] for reader in readers]
    assert rows[0] == rows[1] != rows[2] and sum(map(len, rows[0])) == 4  # 29 targets in windows of 8
    assert readers[0].eval_targets("train", 0) == 32
    assert readers[0].eval_targets("val", 5) == readers[0].eval_targets("train", 5) == 40


# ------------------------------------------------------------------------------------------------------------
# the loss


LAYOUTS = {  # name: processes, settings
    "zero3": (3, "--zero=3 --batch_size=3"),  # not 4: the micro-batch does not matter
    "tp": (2, "--tp=2"),
    "pp": (2, "--pp=2"),
    "cp": (2, "--cp=2"),
    "uneven": (2, "--shares=3,1"),
    "exact-1": (1, "--exact=True"),
    "exact-3": (3, "--exact=True --zero=1"),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("tp", "pp", "cp", "uneven")]


def trained_model(path):
    """The model in a checkpoint of one file."""
    state = read_file(path)
    args = state["model_args"] | state["isogpt"]["model_args"]
    return GPT.from_state(GPTConfig(**args), state["model"]).eval()


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
    return trained_model(shared_work / "run/ckpt.pt")


def evaluate(zygote, cwd, model, name):
    """Evaluate `trained` on a layout, compare the losses with those of a loop, and return the record."""
    processes, settings = LAYOUTS[name]
    args = ["--init_from=run", "--max_iters=0", "--eval_iters=0", "--eval_datasets=other"]
    text = zygote.train([*args, f"--out_dir=of-{name}", *settings.split()], cwd, processes).text()
    start, record, *_ = records(cwd / f"of-{name}")
    for key, dataset in (("val_loss", "tiny"), ("val_loss/other", "other")):
        loss = plain_loss(model, cwd / "data" / dataset / "val.bin", 32)
        assert record[key] == pytest.approx(loss, abs=1e-6)
    assert record["val_bpb/other"] == pytest.approx(record["val_loss/other"] / math.log(2))
    assert "val_bpb" not in record  # tiny does not say how long its text is
    line = f"val loss {record['val_loss']:.4f}, other loss {record['val_loss/other']:.4f}\n"
    assert f"step 0: train loss {record['train_loss']:.4f}, {line}" in text
    assert start["measures"]["sequences"] == 0 and start["measures"]["seed"] is None
    assert start["val_tokens"] == 4000 and start["val_bytes"] == 0 and start["val_text"] == ""
    return record


@pytest.mark.parametrize("name", ["zero3", *SLOW])
def test_every_layout_has_the_loss_of_a_plain_loop(zygote, shared_work, trained, name):
    evaluate(zygote, shared_work, trained, name)


@pytest.mark.slow
def test_with_exact_the_loss_has_the_same_bits(zygote, shared_work, trained):
    one, three = (evaluate(zygote, shared_work, trained, name) for name in ("exact-1", "exact-3"))
    assert one | {name: three[name] for name in ("time", "seconds")} == three


# ------------------------------------------------------------------------------------------------------------
# which losses can be compared


def test_a_resume_keeps_the_best_loss_of_the_whole_split_only(zygote, work):
    np.fromfile(work / "data/tiny/val.bin", np.uint16)[:640].tofile(work / "data/tiny/val.bin")
    (work / "data/tiny/meta.json").write_text(json.dumps({"val_bytes": 1280}))
    zygote.train(["--out_dir=out", "--max_iters=1", "--eval_iters=2", "--eval_interval=1"], work)
    resume = ["--out_dir=out", "--init_from=resume", "--eval_iters=0", "--eval_interval=1", "--block_size=16"]
    text = zygote.train([*resume, "--max_iters=2"], work).text()
    assert "block_size is 16, not 32" in text and "eval_iters * batch_size is 0, not 8" in text
    text = zygote.train([*resume, "--max_iters=3", "--seed=5", "--batch_size=2"], work).text()
    assert "something different" not in text, "neither the seed nor the batch matters"
    losses = [r["val_loss"] for r in records(work / "out") if "val_loss" in r and r["iter"] > 1]
    best = read_file(work / "out/ckpt.pt")["best_val_loss"]
    assert len(losses) > 1 and best == min(losses)
    bits = best / math.log(2) / 2
    assert re.search(rf"^done: .*best val loss {best:.4f} at step \d, {bits:.4f} bits per byte$", text, re.M)


def test_always_save_checkpoint_saves_at_evaluations_that_are_not_the_best_too(zygote, work):
    args = ["--eval_interval=2", "--keep_last=0", "--max_iters=9", "--learning_rate=0.3", "--warmup_iters=0"]
    for value in "01":
        zygote.train([*args, f"--always_save_checkpoint={value}", f"--out_dir={value}"], work)
    losses = column(work / "0", "val_loss")
    best = {step for step in losses if step and losses[step] == min(losses[n] for n in losses if n <= step)}
    assert 0 < len(best) < 5
    for value, steps in {"0": best | {10}, "1": {2, 4, 6, 8, 10}}.items():
        assert {int(path.name[5:]) for path in (work / value).glob("step_*")} == steps


# ------------------------------------------------------------------------------------------------------------
# further validation sets that do not fit


def test_validation_sets_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data/a", range(30), train=range(30))
    write(tmp_path / "data/b", range(30))
    write(tmp_path / "elsewhere/b", range(30))
    write(tmp_path / "data/short", range(8))
    for names, message in (
        ("b,elsewhere/b", "data/b, elsewhere/b have the same name"),
        ("b,c", r"no val.bin in data/c or .*\ba, b, (.*, )?short\b"),
        ("short", "short/val.bin contains 8 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            open_dataset("a", BLOCK, 30, names)
    data = open_dataset("a", BLOCK, 30, " b, ")
    assert [*data.splits] == ["train", "val", "val/b"]


def test_a_validation_set_of_another_tokenizer_is_refused(tmp_path):
    for tables, ids, vocab_size, message in (
        ("abc acb", 3, 3, "id 1 was 'b' and is 'c'"),
        ("abc abc", 9, 3, "id 8 is beyond the model's 3 ids"),
        ("abc abc", 9, 9, ""),
        ("abc abcd", 3, 3, ""),
        ("abc ", 3, 3, ""),  # it does not say what its ids mean
        (" abc", 3, 9, ""),
    ):
        metas = [{"stoi": {c: i for i, c in enumerate(t)}} if t else {} for t in tables.split(" ")]
        write(tmp_path / "a", np.arange(30) % 3, train=np.arange(30) % 3, **metas[0])
        write(tmp_path / "b", np.arange(30) % ids, **metas[1])
        data = open_dataset(str(tmp_path / "a"), BLOCK, eval_datasets=str(tmp_path / "b"))
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            vocabulary_for_run(data, None, "scratch", vocab_size, is_resume=False)


def test_ranks_compare_their_validation_sets(tmp_path):
    """Their contents and not their places."""
    write(tmp_path / "a", range(30), train=range(30))
    facts = []
    for place, first in (("one", 0), ("two", 0), ("three", 1)):
        other = write(tmp_path / place / "b", np.arange(30) + first)
        facts.append(open_dataset(str(tmp_path / "a"), BLOCK, 40, str(other)).facts())
    assert facts[0] == facts[1] != facts[2]
