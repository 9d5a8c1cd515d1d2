"""Statistics of the layers: their numbers on one process and on many, and that a run keeps its bits."""

import math
import re
from contextlib import nullcontext

import pytest
import torch
from edits import edited_gpt
from runs import assert_same_run, column, default_plan, records, start_faulty
from test_model import roughen
from torch import nn
from torch._dynamo.utils import counters

from isogpt.checkpoint.progress import Progress
from isogpt.data.dataset import open_dataset
from isogpt.data.reader import Reader
from isogpt.monitor.log import Logger
from isogpt.monitor.statistics import LayerStatistics
from isogpt.nn.kernels import causal_attention
from isogpt.parallel.attach import replace_seams
from isogpt.parallel.compilation import compile_parts
from isogpt.parallel.mesh import Mesh
from model import GPT, GPTConfig

LENGTH, ROWS = 32, 4  # of runs.TINY
SHAPE = dict(block_size=LENGTH, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
CPU = torch.device("cpu")


def numbers_of(record):
    """{kind/name: number} of a record."""
    kinds = record["statistics"].items()
    return {f"{kind}/{name}": number for kind, numbers in kinds for name, number in numbers.items()}


def statistics_of(out_dir):
    """{step: {kind/name: number}} of a run, each step once."""
    found = [r for r in records(out_dir) if "statistics" in r]
    assert len({r["iter"] for r in found}) == len(found)
    return {r["iter"]: numbers_of(r) for r in found}


def reader_of(folder, model, batch_size=ROWS, micro_steps=2):
    """The reader of a run of this model on one process, with the settings of runs.TINY."""
    sizes = dict(batch_size=batch_size, gradient_accumulation_steps=micro_steps)
    plan = default_plan(model_args=model.describe(), **sizes)
    data = open_dataset(str(folder / "data/tiny"), model.config.block_size)
    return Reader(data, "random", 1337, plan, Mesh(), CPU)


class Sink(list):
    """Keeps all records."""

    def write(self, record, text):
        self.append(record)


def measured(folder, model, rows=ROWS):
    """{kind/name: number} of a model before a step in which nothing is updated."""
    logger = Logger(Progress(1), [Sink()])
    layers = LayerStatistics(1, model, model, reader_of(folder, model), rows, nullcontext(), logger)
    with layers.of_update(0):
        pass
    ((record,),) = logger.sinks
    return numbers_of(record)


def norms(kind, tensors):
    """{kind/name: norm}, with the names of a record."""
    found = {re.sub(r"^transformer\.(h\.)?|\.weight$", "", name): t.norm() for name, t in tensors.items()}
    return {f"{kind}/{name}": norm.item() for name, norm in found.items()}


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
    model = GPT(GPTConfig(**SHAPE, bias=True), seed=1337)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    reader = reader_of(work, model)
    ((rows, _),) = reader.evaluation("train", ROWS)
    for step, (x, y) in zip(range(5), reader.train(0, 0), strict=False):
        optimizer.zero_grad()
        model(x, y)[1].backward()
        parameters = dict(model.named_parameters())
        before = {name: p.detach().clone() for name, p in parameters.items()}
        expected = norms("weight_norm", before)
        expected |= norms("grad_norm", {name: p.grad for name, p in parameters.items()})
        expected |= observed_by_hand(model, rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected |= norms("update_norm", {name: p - before[name] for name, p in parameters.items()})
        if step in found:
            assert found[step] == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_largest_logit_is_that_of_a_key_that_is_not_later(shared_work):
    """With heads that share keys, and of so many positions that it is computed in two pieces."""
    config = GPTConfig(2048, 65, 1, 8, 16, arch="llama", n_kv_head=2)
    model, seen = roughen(GPT(config, seed=1), seed=2), []
    found = measured(shared_work, model, rows=1)["attention_logit/0.attn"]

    def attend(q, k, v, *others):
        seen.append((q, k.repeat_interleave(4, dim=2)))
        return causal_attention(q, k, v, *others)

    replace_seams(model, attention=attend)
    ((x, _),) = reader_of(shared_work, model).evaluation("train", 1)
    with torch.no_grad():
        model(x)
    q, k = (t[0].transpose(0, 1) for t in seen[0])  # (H, T, D)
    logits = q @ k.mT / math.sqrt(2)
    of_queries = logits.tril().amax((0, 2))  # (T,); the largest is not negative
    assert found == pytest.approx(of_queries.max().item(), rel=1e-5)
    assert of_queries.argmax() >= 1024 and logits.max() > found, "the test needs such a model"


def test_what_does_not_fit_is_left_out(shared_work):
    """Parts of an edited model may return anything, and attention may be computed of other positions."""
    model = edited_gpt("register tokens")(GPTConfig(**SHAPE), 1)
    block = model.transformer.h[1]
    block.odd = nn.Sequential(nn.Identity())  # returns what it is given

    def call(*args):
        floats = torch.ones(ROWS), torch.ones(ROWS + 1, 3)
        for output in ({}, None, (), (None, 1), torch.ones(ROWS, 3).long(), *floats):
            block.odd(output)

    block.ln_1.register_forward_hook(call)
    found = measured(shared_work, model)
    assert "activation_rms/1.odd" not in found and "activation_rms/1.attn" in found
    assert not any(name.startswith("attention_logit") for name in found)


@pytest.mark.parametrize("by_block", [False, True])
def test_a_compiled_model_is_not_compiled_again(shared_work, by_block):
    torch._dynamo.reset()
    counters.clear()
    model = GPT(GPTConfig(**SHAPE | {"n_layer": 1}, n_expert=4), seed=1)
    rows = torch.arange(2 * LENGTH).view(2, LENGTH) % 65
    expected = measured(shared_work, model)
    model.reset_routing(CPU)
    compile_parts(model, by_block, backend="eager")
    model(rows, rows, 1.0)[1].backward()
    graphs, routing = dict(counters["stats"]), model.routing.clone()
    model.zero_grad()
    assert measured(shared_work, model) == expected and torch.equal(model.routing, routing)
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


MUON = "--exact=True --arch=nanochat --optimizer=muon --muon_lr=0.005"
SLOW = [pytest.param(2, flags, marks=pytest.mark.slow) for flags in ("--zero=3 --dropout=0.1", MUON)]


@pytest.mark.parametrize("nproc, flags", [(1, "--dropout=0.1 --n_expert=4"), *SLOW])
def test_a_run_has_the_same_bits(zygote, work, nproc, flags):
    """Dropout draws the same masks, and routers count the same tokens."""
    for name, interval in (("without", 0), ("with", 2)):
        args = f"{flags} --max_iters=3 --out_dir={name} --stats_interval={interval}".split()
        zygote.train(args, work, nproc)
    assert_same_run(work / "with", work / "without")
    entropy, expected = (column(work / name, "router_entropy") for name in ("with", "without"))
    assert entropy == expected


ZBV = (2, "--pp=2 --pp_schedule=zbv --zero=2")
# of three ranks, some read padding
LAYOUTS = [(3, "--zero=3"), (2, "--tp=2"), (2, "--pp=2"), (2, "--cp=2"), (2, "--ep=2"), ZBV]


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "layout"), LAYOUTS)
def test_a_layout_has_the_numbers_of_one_process(zygote, work, nproc, layout):
    args = f"--stats_interval=2 --max_iters=2 --n_layer=4 --n_expert={4 * (layout == '--ep=2')}".split()
    zygote.train([*args, "--out_dir=one"], work)
    zygote.train([*args, *layout.split(), "--out_dir=two"], work, nproc)
    found, expected = statistics_of(work / "two"), statistics_of(work / "one")
    assert [*found] == [*expected] == [0, 2]
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=1e-4)
