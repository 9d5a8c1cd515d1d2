"""Statistics of the layers: their numbers on one process and on many, and that a run keeps its bits."""

import math

import numpy as np
import pytest
import torch
from runs import assert_same_run, column, records, start_faulty
from torch._dynamo.utils import counters

from isogpt.common.random_numbers import EVAL_TRAIN, TRAIN
from isogpt.data.windows import random_windows
from isogpt.monitor import statistics
from isogpt.monitor.records import chart_values
from isogpt.monitor.statistics import Observed, largest_logit, observing, short_name
from isogpt.parallel.compilation import compile_parts
from model import GPT, GPTConfig

SEED, LENGTH, ROWS = 1337, 32, 4  # of runs.TINY
SHAPE = dict(block_size=LENGTH, vocab_size=65, n_layer=2, n_head=2, n_embd=32)


def statistics_of(out_dir):
    """{step: {kind/name: number}} of a run, each step once."""
    found = [r for r in records(out_dir) if "statistics" in r]
    assert len({r["iter"] for r in found}) == len(found)
    return {r["iter"]: {k: v for k, v in chart_values(r).items() if k != "iter"} for r in found}


def windows(folder, stream, step, count):
    """Inputs and targets of a run of runs.TINY, each (count, LENGTH)."""
    tokens = np.fromfile(folder / "data/tiny/train.bin", np.uint16).astype(np.int64)
    starts = random_windows(len(tokens), LENGTH, SEED, stream, step, count)
    rows = torch.from_numpy(np.stack([tokens[start : start + LENGTH + 1] for start in starts]))
    return rows[:, :-1], rows[:, 1:]


def norms(kind, tensors):
    return {f"{kind}/{short_name(name)}": t.norm().item() for name, t in tensors.items()}


@torch.no_grad()
def observed_by_hand(model, x):
    """The RMS of outputs, and the largest logits from what the projections of q, k and v return."""
    numbers, x = {}, model.eval().transformer.wte(x) + model.transformer.wpe.weight[:LENGTH]
    for i, block in enumerate(model.transformer.h):
        normed = block.ln_1(x)
        q, k, _ = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in block.attn.c_attn(normed).chunk(3, -1))
        logits = q @ k.mT / math.sqrt(16)  # (rows, 2, LENGTH, LENGTH)
        is_past = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        numbers[f"attention_logit/{i}.attn"] = logits[..., is_past].max().item()
        attended = block.attn(normed)
        written = block.mlp(block.ln_2(x + attended))
        x = x + attended + written
        for name, y in ((f"{i}", x), (f"{i}.attn", attended), (f"{i}.mlp", written)):
            numbers[f"activation_rms/{name}"] = y.square().mean().sqrt().item()
    model.train()
    return numbers


def test_the_numbers_are_those_of_a_plain_loop(zygote, work):
    args = ["--stats_interval=2", "--max_iters=4", "--decay_lr=False", "--grad_clip=0.5", "--bias=True"]
    run = zygote.train([*args, "--out_dir=out", "--log_interval=3"], work)
    assert "statistics" not in run.text() and "weight_norm" not in run.text()
    found = statistics_of(work / "out")
    assert [*found] == [0, 2, 4] and {"weight_norm/wte", "grad_norm/1.mlp.c_fc.bias"} < found[0].keys()
    model = GPT(GPTConfig(**SHAPE, bias=True), seed=SEED)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    for step in range(5):
        optimizer.zero_grad()
        x, y = windows(work, TRAIN, step, 2 * ROWS)
        for rows in (slice(0, ROWS), slice(ROWS, None)):
            (model(x[rows], y[rows])[1] / 2).backward()
        parameters = dict(model.named_parameters())
        before = {name: p.detach().clone() for name, p in parameters.items()}
        expected = norms("weight_norm", before)
        expected |= norms("grad_norm", {name: p.grad for name, p in parameters.items()})
        expected |= observed_by_hand(model, windows(work, EVAL_TRAIN, 0, ROWS)[0])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected |= norms("update_norm", {name: p - before[name] for name, p in parameters.items()})
        if step in found:
            assert found[step].keys() == expected.keys()
            assert found[step] == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_largest_logit_is_that_of_a_key_that_is_not_later(monkeypatch):
    """In pieces, with keys in any order, and with heads that share keys."""
    monkeypatch.setattr(statistics, "LOGITS_AT_ONCE", 100)
    q, k, order = torch.randn(3, 8, 2, 4), torch.randn(3, 8, 1, 4), torch.randperm(8)
    found = largest_logit(q[:, 2:5], k[:, order], torch.arange(2, 5), order)
    pairs = [(i, j, h) for i in range(2, 5) for j in range(i + 1) for h in range(2)]
    for row in range(3):
        expected = max(float(q[row, i, h] @ k[row, j, 0]) / 2 for i, j, h in pairs)
        assert found[row].item() == pytest.approx(expected, rel=1e-5)


def test_what_does_not_fit_is_left_out():
    """Parts of an edited model may return anything."""
    observed = Observed(torch.arange(4), torch.arange(4), None, is_read=torch.tensor([True, False]))
    for output in ({}, None, (), (None, 1), torch.ones(2, 3).long(), torch.ones(2), torch.ones(3, 3)):
        observed.add_output("odd", None, (), output)
    assert not observed.outputs
    observed.add_output("even", None, (), (torch.tensor([[3.0, 4.0], [9.0, 9.0]]), "routing"))
    observed.add_output("even", None, (), torch.tensor([[1.0], [torch.nan]]))
    assert observed.outputs["even"].tolist() == pytest.approx([26.0, 3.0])
    q = torch.ones(2, 3, 1, 4)  # not at all positions
    assert observed.attend("odd", lambda q, k, v, dropout, cache: q + v, q, q, 1, 0.0, None).sum() == 48
    assert not observed.logits


def observe(model, rows):
    """What a forward pass of a model on one process shows, for these token ids."""
    observed = Observed(torch.arange(LENGTH), torch.arange(LENGTH), None, torch.ones(len(rows)).bool())
    with torch.no_grad(), observing(model.eval(), observed):
        model(rows, rows, 1.0)
    model.train()
    return observed.outputs, observed.logits


@pytest.mark.parametrize("by_block", [False, True])
def test_a_compiled_model_is_not_compiled_again(by_block):
    torch._dynamo.reset()
    counters.clear()
    model = GPT(GPTConfig(**SHAPE | {"n_layer": 1}, n_expert=4), seed=1)
    rows = torch.arange(2 * LENGTH).view(2, LENGTH) % 65
    expected = observe(model, rows)
    model.reset_routing(torch.device("cpu"))
    compile_parts(model, by_block, backend="eager")
    model(rows, rows, 1.0)[1].backward()
    graphs, routing = dict(counters["stats"]), model.routing.clone()
    torch.testing.assert_close((*observe(model, rows), model.routing), (*expected, routing), rtol=0, atol=0)
    model(rows, rows, 1.0)[1].backward()
    assert dict(counters["stats"]) == graphs


def test_a_skipped_step_and_a_resume(zygote, work):
    """A step that is skipped updates nothing; steps that a resume repeats are measured again."""
    args = ["--stats_interval=2", "--max_iters=7", "--save_interval=3", "--keep_last=0", "--out_dir=out"]
    start_faulty(zygote, [*args, "--skip_steps=nan", "--eval_interval=3"], work, NAN=[4, 0]).wait()
    found = statistics_of(work / "out")
    zygote.train([*args, "--init_from=resume:3"], work)
    again = statistics_of(work / "out")
    assert [*found] == [*again] == [0, 2, 4, 6]
    assert again[0] == found[0] and again[2] == found[2]
    for numbers, is_skipped in ((found[4], True), (found[6], False), (again[4], False)):
        updates = [value for name, value in numbers.items() if name.startswith("update_norm")]
        assert updates and (max(updates) == 0.0 if is_skipped else min(updates) > 0)


MUON = ["--exact=True", "--arch=nanochat", "--optimizer=muon", "--muon_lr=0.005"]


@pytest.mark.parametrize(
    "nproc, flags",
    [
        (1, ["--dropout=0.1", "--n_expert=4"]),
        pytest.param(2, ["--zero=3", "--dropout=0.1"], marks=pytest.mark.slow),
        pytest.param(2, MUON, marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_same_bits(zygote, work, nproc, flags):
    """Dropout draws the same masks, and routers count the same tokens."""
    for name, interval in (("without", 0), ("with", 2)):
        args = [*flags, "--max_iters=3", f"--out_dir={name}", f"--stats_interval={interval}"]
        zygote.train(args, work, nproc)
    assert_same_run(work / "with", work / "without")
    entropy, expected = (column(work / name, "router_entropy") for name in ("with", "without"))
    assert entropy == expected


ZBV = "--pp=2 --pp_schedule=zbv --zero=2"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--zero=3", "--tp=2", "--pp=2", "--cp=2", "--ep=2", ZBV])
def test_a_layout_has_the_numbers_of_one_process(zygote, work, layout):
    experts = ["--n_expert=4"] if layout == "--ep=2" else []
    args = ["--stats_interval=2", "--max_iters=2", "--n_layer=4", *experts]
    zygote.train([*args, "--out_dir=one"], work)
    zygote.train([*args, *layout.split(), "--out_dir=two"], work, 2)
    found, expected = statistics_of(work / "two"), statistics_of(work / "one")
    assert [*found] == [*expected] == [0, 2]
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=1e-4)
