"""A user's own optimizers, or rows of the rules alone, on any layout; what updates which parameter."""

import re
import shutil
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from edits import apply, copy_of_repository
from runs import REPO, accepted, assert_same_curve, column, default_plan, train_defaults
from test_layouts import args_of
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from isogpt.parallel.gradients import make_sums
from isogpt.parallel.mesh import Mesh, connect_mesh
from isogpt.parallel.shares import share_of_whole
from isogpt.training import muon, optim, optimizer_state
from isogpt.training.precision import make_scaler
from model import GPT, GPTConfig

CPU = torch.device("cpu")


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
    assert run.codes == [1]
    assert re.search("was saved with optimizer '.*:Lion': set --optimizer=.*:Lion", run.text())


def with_more_rows(folder, copies):
    """A copy of the repository in which the setting `plain` has so many copies of AdamW's rows."""
    path = copy_of_repository(folder) / "isogpt/training/optim.py"
    source = path.read_text()
    rows = re.findall(r'^ +Rule\("adamw", .*\n', source, flags=re.M)
    more = "".join(rows).replace('"adamw"', '"plain"').replace("AdamW", "torch.optim.RMSprop")
    path.write_text(source.replace(rows[0], rows[0] + more * copies))
    return folder


def test_a_row_of_the_rules_is_enough(zygote, work):
    """Its parameters are updated, and its state is saved. Two rows for a parameter are refused."""
    args = ["--optimizer=plain", "--save_interval=5", "--max_iters=9", "--warmup_iters=3"]
    repo = with_more_rows(work / "once", 1)
    run = zygote.train([*args, "--out_dir=plain"], work, repo=repo)
    updates = "RMSprop, lr 0.001, decay 0.1: wte, wpe, 8 matrices of blocks; RMSprop, lr 0.001: 5 vectors"
    assert f"optim:   {updates}\n" in run.text()
    losses = column(work / "plain", "loss")
    assert losses[0] - losses[9] > 0.01
    shutil.copytree(work / "plain", work / "plain-resumed", symlinks=True)
    shutil.rmtree(work / "plain-resumed" / "step_00000010")
    zygote.train([*args, "--init_from=resume", "--out_dir=plain-resumed", "--zero=1"], work, 2, repo=repo)
    assert_same_curve(work / "plain-resumed", work / "plain")
    run = zygote.train(args, work, repo=with_more_rows(work / "twice", 2), ok=False)
    assert run.codes == [1] and "error: 2 rows of RULES in " in run.text()


def test_muon_updates_a_linear_layer_of_any_name(zygote, work):
    """test_layout_check.py has its step on other layouts."""
    repo, args = apply("one more linear", work / "edited"), ["--optimizer=muon", "--muon_lr=0.002"]
    for nproc, flags in ((1, ["--out_dir=one"]), (2, ["--out_dir=two", "--pp=2"])):
        run = zygote.train([*args, *flags, "--max_iters=4"], work, nproc, repo=repo)
        assert "Muon, lr 0.002, decay 0.1: 10 matrices of blocks" in run.text(), "of the whole model"
    assert_same_curve(work / "two", work / "one")


@contextmanager
def as_rank(rank, size):
    """Be one of the ranks of a process group that is not connected."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize("zero", [0, 1])
def test_all_ranks_create_the_same_groups(zero):
    """Also those of a pipeline's stage that trains no matrices and no experts."""
    created, plan = [], default_plan(world_size=16, pp=2, ep=2, tp=2, zero=zero)
    for is_frozen in (False, True):
        model = tiny(n_expert=2)
        model.transformer.h.requires_grad_(not is_frozen)
        with as_rank(0, 16):
            mesh = connect_mesh(0, plan, timeout_s=60.0)
            before = len(dist.distributed_c10d._world.pg_map)
            optim.make_optimizers(model, train_defaults(optimizer="muon"), zero, mesh=mesh)
            created.append(len(dist.distributed_c10d._world.pg_map) - before)
    assert created[0] == created[1] > 0


def test_gradients_whose_memory_is_kept_are_set_to_zero():
    """Also if parameters are frozen."""
    model, x = tiny(), torch.arange(8)[None]
    model.transformer.wpe.requires_grad_(False)
    plan = default_plan(model_args=model.describe(), cuda_graphs=True)
    sums = make_sums(model, model, Mesh(), plan, share_of_whole(4, 0, 1, 2), make_scaler("float32", CPU))
    sums.allocate(x, x, nullcontext())
    kept = [p.grad for p in model.parameters()]
    model(x, x, sums.loss_divisor)[1].backward()
    assert sum(grad.any() for grad in kept) > 10
    sums.start_step()
    assert not any(grad.any() for grad in kept)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))


def tiny(**fields):
    return GPT(GPTConfig(8, 16, 2, 2, 8, **{"bias": False, **fields}), 0)


def test_each_trained_parameter_is_in_one_group():
    model = tiny(n_expert=2, bias=True)
    model.transformer.h[1].scale = nn.Parameter(torch.zeros(()))
    model.transformer.h[1].gate = nn.Linear(8, 4)
    model.transformer.h[1].values = nn.Embedding(16, 8)
    model.transformer.wpe.requires_grad_(False)
    optimizers = optim.make_optimizers(model, train_defaults(optimizer="muon"))
    line = optim.describe_updates(model, optimizers, Mesh())
    adamw = "AdamW, lr 0.0006: wte, 20 vectors, 2 mlp.router, values"
    assert line == f"{adamw}; Muon, lr 0.02, decay 0.1: 9 matrices of blocks; frozen: wpe"


UNTIED = {"AdamW, lr 0.3: wte", "AdamW, lr 0.01: 5 vectors, 2 mlp.router, lm_head"}


@pytest.mark.parametrize(
    ("tied", "adamw"), [(False, UNTIED), (True, {"AdamW, lr 0.01: wte, 5 vectors, 2 mlp.router"})]
)
def test_the_rate_and_weight_decay_of_each_parameter(tied, adamw):
    """Muon's matrices are those of attention, 2 in each block, and of all experts, 3."""
    model = tiny(n_expert=2, arch="llama", tied=tied)
    settings = train_defaults(optimizer="muon", learning_rate=1e-2, muon_lr=0.04, embedding_lr=0.3)
    optimizers = optim.make_optimizers(model, settings)
    described = optim.describe_updates(model, optimizers, Mesh())
    assert {*described.split("; ")} == adamw | {"Muon, lr 0.04, decay 0.1: 10 matrices of blocks"}
    optim.set_rates(optimizers, 0, 5e-3, 0.95)
    rates = sorted({group["lr"] for optimizer in optimizers for group in optimizer.param_groups})
    assert rates == pytest.approx([5e-3, 0.02] if tied else [5e-3, 0.02, 0.15])


# shapes of parameters, and the heights of the matrices that are stacked in them
STACKS = [((36, 12), (12, 12, 12)), ((16, 12), (8, 4, 4)), ((32, 8), (32,))]
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


def test_compiled_muon_is_muon(at):
    """With one compilation for each shape, and none when a rate changes."""
    expected = muon_steps()
    torch._dynamo.reset()
    counters.clear()
    at.set(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(muon_steps(compiles=True), expected, rtol=0, atol=1e-5)
    # of each shape: momentum, update, and matrices, of which the second shape contains two heights
    assert counters["stats"]["unique_graphs"] == 3 * len(STACKS) + 1
    torch._dynamo.reset()


@pytest.mark.parametrize("shares", [[5], [3, 2], [2, 2, 1, 0]])
def test_ranks_divide_muons_matrices(shares):
    """One after the other, since momentum does not depend on weights. The last of 4 computes nothing."""
    flops = []
    for rank in range(len(shares)):
        with as_rank(rank, len(shares)), FlopCounterMode(display=False) as counter:
            muon_steps(workers=dist.group.WORLD)
        flops.append(counter.get_total_flops())
    assert flops == [sum(flops) * share / PARAMETERS for share in shares] and flops[0] > 0


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
    "mine.py:LBFGS": "optimizer LBFGS.* fails: TypeError: .*missing 1 required .*'closure'",
    "mine.py:Adafactor": "Adafactor is not element-wise: row_var has another shape",
}


@pytest.mark.parametrize("value", WRONG)
def test_a_class_that_cannot_be_used_is_refused_in_one_line(at, value):
    shutil.copy(REPO / "tests/own_optimizers.py", "mine.py")
    with pytest.raises(ValueError, match=WRONG[value]) as error:
        accepted("train.py", f"--optimizer={value}")
    assert "\n" not in str(error.value)


def test_what_a_class_does_not_go_with(at):
    shutil.copy(REPO / "tests/own_optimizers.py", "mine.py")
    accepted("train.py", "--optimizer=mine.py:Lion", "--exact=True")
    accepted("train.py", "--optimizer=muon+mine.py:Lion", "--islands=2")
    with pytest.raises(ValueError, match="exact: zero 3 changes the bits: set --zero=0"):
        accepted("train.py", "--optimizer=mine.py:Lion", "--exact=True", "--fsdp=True")
    with pytest.raises(ValueError, match=r"islands is 2, but needs an optimizer that .*: set --islands=1"):
        accepted("train.py", "--optimizer=mine.py:Free", "--islands=2")
    assert optim.moments_of("muon+mine.py:Free") == (1, 1) and optim.moments_of("mine.py:SGD") == (0, 0)
