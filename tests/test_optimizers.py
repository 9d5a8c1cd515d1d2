"""Optimizers of a user's file, or of RULES alone, on any layout; which optimizer updates which parameter."""

import re
import shutil
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from runs import REPO, accepted, assert_same_curve, column, default_plan, start_changed, train_defaults
from test_layouts import args_of
from torch import nn
from torch._dynamo.utils import counters

from isogpt.parallel.gradients import FloatSums
from isogpt.parallel.local_parts import Split
from isogpt.parallel.shares import share_of_whole
from isogpt.training import muon, optim, optimizer_state
from model import GPT, GPTConfig

FILE = (REPO / "tests/own_optimizers.py").read_text()
SHORT = ["--max_iters=9", "--save_interval=5", "--eval_interval=5", "--warmup_iters=3", "--muon_lr=0.002"]


def test_a_checkpoint_of_a_class_is_converted_without_its_file(zygote, trained, tmp_path):
    """No file that the checkpoint names is run: the weights alone are converted."""
    out = tmp_path / "out"
    shutil.copytree(trained(args_of("schedule-free", "zero3"), 2), out, symlinks=True)
    text = zygote.start([out, "--to=ckpt.pt"], tmp_path, script="export.py").wait().text()
    assert "note: the state of your own optimizer is left out" in text
    state = torch.load(out / "ckpt.pt", weights_only=True)
    assert state["iter_num"] == 10 and not state["optimizer"]["state"]


def test_a_checkpoint_of_another_class(zygote, session_work, trained, tmp_path):
    shutil.copytree(trained(args_of("lion")), tmp_path / "out", symlinks=True)
    args = [*args_of("sgd"), "--init_from=resume", f"--out_dir={tmp_path}/out"]
    run = zygote.train(args, session_work, ok=False)
    assert run.codes == [1] and re.search(
        "was saved with optimizer '.*:Lion': set --optimizer=.*:Lion", run.text()
    )


ROWS = """
import torch
from isogpt.training import optim
ROLES = optim.BLOCK_MATRIX, optim.TOKEN_EMBEDDING, optim.OTHER_MATRIX, optim.VECTOR
optim.RULES += (optim.Rule("plain", ROLES, torch.optim.RMSprop, "learning_rate", "weight_decay"),)
"""


def test_a_row_of_the_rules_is_enough(zygote, work):
    """Its parameters are updated, and its state is saved."""
    args = [*SHORT, "--optimizer=plain"]
    run = start_changed(zygote, ROWS, [*args, "--out_dir=plain"], work).wait()
    updates = "RMSprop, lr 0.001, decay 0.1: wte, wpe, 5 vectors, 8 matrices of blocks"
    assert f"optim:   {updates}\n" in run.text()
    losses = column(work / "plain", "loss")
    assert losses[0] - losses[9] > 0.01
    shutil.copytree(work / "plain", work / "plain-resumed", symlinks=True)
    shutil.rmtree(work / "plain-resumed" / "step_00000010")
    resume = [*args, "--init_from=resume", "--out_dir=plain-resumed", "--zero=1"]
    start_changed(zygote, ROWS, resume, work, 2).wait()
    assert_same_curve(work / "plain-resumed", work / "plain")


GATE = """
import model
from torch import nn
make, compute = model.Block.__init__, model.Block.compute
def with_gate(self, config):
    make(self, config)
    self.gate = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
def gated(self, x, rope, cache):
    a, b = self.gate(x).chunk(2, -1)
    return compute(self, x + a * b.sigmoid(), rope, cache)
model.Block.__init__, model.Block.compute = with_gate, gated
"""
GATED = ["--max_iters=4", "--muon_lr=0.002", "--optimizer=muon"]


@pytest.fixture(scope="module")
def gated(zygote, shared_work):
    run = start_changed(zygote, GATE, [*GATED, "--out_dir=gated"], shared_work).wait()
    assert "Muon, lr 0.002, decay 0.1: 10 matrices of blocks\n" in run.text()
    return shared_work / "gated"


@pytest.mark.parametrize("flags", ["--zero=3", "--tp=2", "--pp=2"])
def test_muon_updates_a_linear_layer_of_any_name(zygote, work, gated, flags):
    run = start_changed(zygote, GATE, [*GATED, flags, "--out_dir=gated-2"], work, 2).wait()
    assert "Muon, lr 0.002, decay 0.1: 10 matrices of blocks" in run.text(), "of the whole model"
    assert_same_curve(work / "gated-2", gated)


@pytest.mark.parametrize("zero", [0, 1])
def test_all_ranks_create_the_same_groups(at, zero):
    """Also those of a pipeline's stage that trains no matrices or no experts."""
    calls = []
    at.set(optim.Mesh, "group", lambda mesh, *axes: calls.append(axes))
    mesh = optim.Mesh(pp=2, dp_replicate=2, ep=2, tp=2)
    frozen, whole = tiny(n_expert=2), with_split_experts()
    frozen.transformer.h.requires_grad_(False)
    optim.make_optimizers(frozen, train_defaults(optimizer="muon"), zero, mesh=mesh)
    expected = calls.copy()
    calls.clear()
    optim.make_optimizers(whole, train_defaults(optimizer="muon"), zero, mesh=mesh)
    assert calls == expected != []


def test_gradients_whose_memory_is_kept_are_set_to_zero():
    """Also if a group of parameters that as many ranks hold is frozen."""
    model = with_split_experts()
    plan, share = default_plan(model_args=model.describe()), share_of_whole(4, 0, 1, 2)
    sums = FloatSums(model, model, optim.Mesh(ep=2), plan, share)
    assert len(sums.by_replica_count) == 2
    trained = [p for p in model.parameters() if not hasattr(p, "splits")]
    for p in trained:
        p.grad = torch.ones_like(p)
    sums.keeps_memory = True
    sums.start_step()
    assert not any(p.grad.any() for p in trained)


def tiny(**fields):
    return GPT(GPTConfig(8, 16, 2, 2, 8, **{"bias": False, **fields}), 0)


def with_split_experts():
    model = tiny(n_expert=2)
    for p in model.transformer.h[0].mlp.experts.parameters():
        p.splits = (Split("ep", 0, (16, 16), 0, 2),)
    return model


def test_each_trained_parameter_is_in_one_group(at):
    model = tiny(n_expert=2, bias=True)
    model.transformer.h[1].scale = nn.Parameter(torch.zeros(()))
    model.transformer.h[1].gate = nn.Linear(8, 4)
    model.transformer.h[1].values = nn.Embedding(16, 8)
    model.transformer.wpe.requires_grad_(False)
    optimizers = optim.make_optimizers(model, train_defaults(optimizer="muon"))
    line = optim.describe_updates(model, optimizers, optim.Mesh())
    adamw = "AdamW, lr 0.0006: wte, 20 vectors, 2 mlp.router, values"
    assert line == f"{adamw}; Muon, lr 0.02, decay 0.1: 9 matrices of blocks; frozen: wpe"
    row = optim.Rule("mine", (optim.BLOCK_MATRIX, optim.OTHER_MATRIX), torch.optim.SGD, "learning_rate", None)
    for count, described in ((1, "0 rows .*vectors"), (2, "2 rows .*other matrices")):
        at.set(optim, "RULES", [row] * count)
        with pytest.raises(ValueError, match=described):
            optim.make_optimizers(model, train_defaults(optimizer="mine"))


# shapes of parameters, and the heights of the matrices that are stacked in them
STACKS = [
    ((36, 12), (12, 12, 12)),
    ((16, 12), (8, 4, 4)),
    ((32, 8), (32,)),
    ((8, 32), (8,)),
    ((24, 8), (12, 12)),
]
PARAMETERS = 5  # of each shape


def muon_steps(dtype=torch.float32, **options):
    """Parameters and momentum after three steps of Muon, at rates that change."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for shape, rows in STACKS:
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(PARAMETERS)]
        groups.append({"params": params, "rows": rows, "weight_decay": 0.1})
    optimizer = muon.Muon(groups, 0.1, dtype, **options)
    for step in range(3):
        optimizer.grad_scale = 1.0 + step
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = 0.1 / (step + 1), 0.85 + step / 30
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [t for p, state in optimizer.state.items() for t in (p.detach(), state["momentum_buffer"])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_compiled_muon_is_muon(at, dtype):
    """With one compilation for each shape, and none when a rate changes."""
    expected = muon_steps(dtype)
    torch._dynamo.reset()
    counters.clear()
    at.set(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(muon_steps(dtype, compiles=True), expected, rtol=0, atol=tolerance)
    # of each shape: momentum, update, and matrices, of which the second shape contains two heights
    assert counters["stats"]["unique_graphs"] == 3 * len(STACKS) + 1
    torch._dynamo.reset()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_divide_muons_matrices(at, ranks):
    """One after the other, since momentum does not depend on weights. The last of 4 computes nothing."""
    expected = muon_steps()
    orthogonalize, computed, shares = muon.orthogonalize, Counter(), []

    def counted(x, dtype):
        is_tall = x.size(1) > x.size(2)  # then it is called again
        computed[len(shares)] += 0 if is_tall else x.numel()
        return orthogonalize(x, dtype)

    def gather(gathered, share, group):
        shares[-1].append(share.clone())
        number = len(shares[-1]) - 1
        gathered.copy_(torch.cat([own[number] for own in shares] + [share] * (ranks - len(shares))))

    at.set(muon, "all_gather_single", gather)
    at.set(muon, "orthogonalize", counted)
    for rank in range(ranks):
        shares.append([])
        workers = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        results = muon_steps(workers=workers)
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-5)
    elements = 3 * sum(torch.Size(shape).numel() for shape, _ in STACKS)
    per_rank = {2: [3, 2], 4: [2, 2, 1, 0]}[ranks]
    assert [computed[rank + 1] for rank in range(ranks)] == [elements * n for n in per_rank]


def test_a_frozen_parameter_does_not_shift_nanogpts_numbers():
    """nanoGPT numbers all parameters: the state of the others is saved by name."""
    model = tiny()
    weights = dict(model.named_parameters())
    saved = optimizer_state.saved_state(model, optim.make_optimizers(model, train_defaults()))
    assert {*saved["state"]} == {*range(len(weights))} and len(saved["param_groups"]) == 2
    model.transformer.wpe.requires_grad_(False)
    optimizers = optim.make_optimizers(model, train_defaults())
    state = optimizer_state.by_name(weights, optimizer_state.saved_state(model, optimizers))
    assert state.keys() == weights.keys() - {"transformer.wpe.weight"}


WRONG = {
    "ada": "optimizer is 'ada'; choose from adamw, muon, FILE.py:CLASS and muon.FILE.py:CLASS",
    "muon+adamw": "optimizer is 'muon.adamw'; choose from",
    "none.py:Lion": "none.py of --optimizer=none.py:Lion fails: FileNotFoundError",
    "mine.py:torch": "the optimizers in mine.py are: Adafactor, Free, LBFGS, Lion",
    "bad.py:Lion": "bad.py of --optimizer=bad.py:Lion fails: ZeroDivisionError",
    "mine.py:LBFGS": "optimizer LBFGS.* fails: TypeError: .*missing 1 required .*'closure'",
    "mine.py:Adafactor": "Adafactor is not element-wise: row_var has another shape",
}


@pytest.mark.parametrize("value", WRONG)
def test_a_class_that_cannot_be_used_is_refused_in_one_line(at, value):
    (at.path / "mine.py").write_text(FILE)
    (at.path / "bad.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=WRONG[value]) as error:
        accepted("train.py", f"--optimizer={value}")
    assert "\n" not in str(error.value)


def test_what_a_class_does_not_go_with(at):
    (at.path / "mine.py").write_text(FILE)
    accepted("train.py", "--optimizer=mine.py:Lion", "--exact=True")
    accepted("train.py", "--optimizer=muon+mine.py:Lion", "--islands=2")
    with pytest.raises(ValueError, match="exact: zero 3 changes the bits: set --zero=0"):
        accepted("train.py", "--optimizer=mine.py:Lion", "--exact=True", "--fsdp=True")
    with pytest.raises(ValueError, match=r"islands is 2, but needs an optimizer that .*: set --islands=1"):
        accepted("train.py", "--optimizer=mine.py:Free", "--islands=2")
    assert optim.moments_of("muon+mine.py:Free") == (1, 1) and optim.moments_of("mine.py:SGD") == (0, 0)
