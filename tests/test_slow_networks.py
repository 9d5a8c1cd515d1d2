"""Compressed gradients and islands: how far they are from the exact curve, resumed bit for bit, messages."""

import re

import pytest
import torch
from runs import REPO, column, start_changed, start_faulty
from test_parity import same

from isogpt.checkpoint.search import open_folder
from isogpt.checkpoint.source import open_checkpoint
from isogpt.parallel.local_parts import LocalPart

SHORT = ["--save_interval=10", "--max_iters=19", "--dropout=0.1"]
FOUR = ["--gradient_accumulation_steps=4"]
HSDP = ["--zero=3", "--dp_replicate=2", *FOUR]
INT8, POWERSGD = "--grad_compression=int8", "--grad_compression=powersgd:1"
ISLANDS = ["--islands=2", "--local_steps=4"]
# name: (processes, flags)
MODES = {
    "powersgd": (2, [POWERSGD, "--ddp_bucket_mb=0.02"]),
    "islands": (2, [*ISLANDS, "--outer_compression=int8"]),
    "fp16": (2, ["--grad_compression=fp16"]),
    "int8-3": (3, [INT8, "--gradient_accumulation_steps=3"]),
    "int8-hsdp": (4, [INT8, *HSDP]),
    "topk-zero1": (2, ["--grad_compression=topk:0.05", "--zero=1"]),
    "int8-tp": (4, [INT8, "--tp=2"]),
    "int8-pp": (4, [INT8, "--pp=2", *FOUR]),
    "int8-ep": (4, [INT8, "--n_expert=4", "--ep=2", *FOUR]),
    "powersgd-hsdp": (4, [POWERSGD, *HSDP]),
    "powersgd-zero1": (2, [POWERSGD, "--zero=1"]),
    "islands-muon": (2, [*ISLANDS, "--optimizer=muon", "--arch=nanochat", "--bias=False"]),
    "islands-fsdp": (4, [*ISLANDS, "--zero=3", *FOUR]),
    "islands-powersgd": (4, [*ISLANDS, POWERSGD, *FOUR]),
}
QUICK = ("powersgd", "islands")
EXTRA = ("fp16", "int8-hsdp", "islands-muon", "powersgd-zero1", "topk-zero1", "int8-ep", "islands-powersgd")
MARKED = [
    pytest.param(
        name, marks=[] if name in QUICK else pytest.mark.extra if name in EXTRA else pytest.mark.slow
    )
    for name in MODES
]


def tensors(folder):
    """Everything that a checkpoint in shards holds."""
    checkpoint = open_checkpoint(open_folder(folder))
    state = {name: torch.empty(shape) for name, shape in checkpoint.shapes.items()}
    checkpoint.read({name: LocalPart(t.shape, (((0,) * t.dim(), t),)) for name, t in state.items()})
    return state


@pytest.mark.parametrize("name", MARKED)
def test_a_resume_has_the_same_bits(zygote, work, name):
    """Step 10 is within a period of local_steps."""
    nproc, flags = MODES[name]
    zygote.train([*SHORT, *flags, "--out_dir=straight"], work, nproc)
    zygote.train([*SHORT, *flags, "--out_dir=resumed", "--max_iters=9"], work, nproc)
    zygote.train([*SHORT, *flags, "--out_dir=resumed", "--init_from=resume"], work, nproc)
    assert column(work / "straight", "loss") == column(work / "resumed", "loss")
    if (work / "straight" / "step_00000020" / "ckpt.pt").exists():
        return
    straight, resumed = (tensors(work / out / "step_00000020") for out in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    assert [k for k in straight if not torch.equal(straight[k], resumed[k])] == []


# ------------------------------------------------------------------------------------------------------------
# curves


@pytest.fixture(scope="module")
def one(zygote, shared_work):
    """A hundred steps of one process."""
    zygote.train(["--max_iters=99", "--eval_interval=50", "--out_dir=one"], shared_work)
    return shared_work / "one"


CURVES = {
    "fp16": (2, ["--grad_compression=fp16"], 2e-3),
    "bf16": (2, ["--grad_compression=bf16"], 2e-2),
    "fp16-hsdp": (4, ["--grad_compression=fp16", *HSDP, "--batch_size=2"], 2e-3),
    "int8-tp": (4, [INT8, "--tp=2"], 2e-2),
    "int8-zero1": (2, [INT8, "--zero=1"], 2e-2),
}


@pytest.mark.parametrize("name", ["fp16", *(pytest.param(n, marks=pytest.mark.slow) for n in [*CURVES][1:])])
def test_compression_is_near_the_exact_curve(zygote, shared_work, one, name):
    nproc, flags, distance = CURVES[name]
    out = shared_work / name
    zygote.train(["--max_iters=99", "--eval_interval=50", *flags, f"--out_dir={out}"], shared_work, nproc)
    same(column(one, "loss"), column(out, "loss"), absolute=distance)
    assert column(one, "loss") != column(out, "loss")  # it was compressed


# plain SGD, in which the mean of the islands' weights after a step is DDP's weights
SGD = """
import torch
from isogpt.training import optim

def make_sgd(model, *_, **options):
    return [torch.optim.SGD([{"params": list(model.parameters()), "lr_scale": 1.0}], lr=1.0)]

optim.make_optimizers = make_sgd
"""


def test_local_sgd_of_one_step_is_ddp(zygote, shared_work):
    flags = ["--learning_rate=0.03", "--grad_clip=0", "--weight_decay=0", *FOUR]
    flags += ["--eval_interval=15", "--save_checkpoint=False"]
    islands = ["--islands=4", "--outer_lr=1", "--outer_momentum=0"]
    start_changed(zygote, SGD, [*flags, "--out_dir=sgd"], shared_work, 4).wait()
    start_changed(zygote, SGD, [*flags, *islands, "--out_dir=local"], shared_work, 4).wait()
    same(column(shared_work / "sgd", "loss"), column(shared_work / "local", "loss"), absolute=1e-6)
    one, other = column(shared_work / "sgd", "val_loss"), column(shared_work / "local", "val_loss")
    assert one.pop(30) == pytest.approx(other.pop(30), abs=3e-6)  # the final state: rounding of 30 steps
    same(one, other, absolute=1e-6)


# ------------------------------------------------------------------------------------------------------------
# against their formulas, on three ranks

FORMULAS = """
import sys
from dataclasses import replace
sys.path.insert(0, {repo!r})
import torch, torch.distributed as dist
from torch import nn
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import UNDIVIDED
from isogpt.parallel.compression import Compression, mean_over
from isogpt.parallel.local_sgd import Islands

dist.init_process_group("gloo", init_method="env://")
rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def mean(t):
    t = t.clone()
    dist.all_reduce(t)
    return t / ranks


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compressor(kind):
    amount = 0.05 if kind == "topk" else 1
    return Compression(kind, amount, Mesh(rank, dp_replicate=ranks), torch.device("cpu"))


# what is sent in 60 steps adds up to the mean gradients, but for the last errors
for kind in ("int8", "powersgd", "topk"):
    p, compression = nn.Parameter(torch.zeros(60, 50)), compressor(kind)
    total, sent = torch.zeros(60, 50), torch.zeros(60, 50)
    for step in range(60):
        torch.manual_seed(step * ranks + rank)
        p.grad = noise(1, 60, 50) * 0.1 + noise(step * ranks + rank + 2, 60, 50)
        total += mean(p.grad)
        compression.average_all([p], group, "test")
        sent += p.grad
        torch.testing.assert_close(mean(p.grad), p.grad)  # the same on all ranks
    left = mean(compression.errors[p])
    torch.testing.assert_close(sent + left, total, atol=2e-4, rtol=0)
    assert 0 < left.norm() < total.norm()

# tall matrices are approximated as a stack of square ones: three outer products need rank 1
columns = [noise(i, 50) for i in range(6)]
stack = torch.cat([torch.outer(a, b) for a, b in zip(columns[::2], columns[1::2])])
for rows, is_exact in ((150, True), (149, False)):
    p, empty = nn.Parameter(torch.zeros(rows, 50)), nn.Parameter(torch.zeros(0, 50))  # a shard without rows
    compression = compressor("powersgd")
    for _ in range(4):
        compression.errors.clear()
        p.grad, empty.grad = stack[:rows].clone(), torch.zeros(0, 50)
        compression.average_all([empty, p], group, "test")
    assert torch.allclose(p.grad, stack[:rows], atol=1e-5) == is_exact, rows

# a gradient that is not finite stays so
for kind in ("int8", "powersgd", "topk", "fp16", "bf16"):
    p, compression = nn.Parameter(torch.zeros(60, 50)), compressor(kind)
    for step in range(4):
        p.grad = noise(rank, 60, 50)
        if step == 3 and rank == 1:
            p.grad[7, 7] = float("nan")
        compression.average_all([p], group, "test")
        assert p.grad.isfinite().all() == (step < 3), (kind, step)

# after a step that was not finite, a run that was resumed before it sends the same as one that was not
sent = []
for first in (0, 5):
    p, compression = nn.Parameter(torch.zeros(60, 50)), compressor("powersgd")
    compression.restart(first, {{}})
    for step in range(first, 6):
        if step == 5:
            compression.forget()
        p.grad = noise(step * ranks + rank, 60, 50)
        compression.average_all([p], group, "test")
    sent.append(p.grad)
assert torch.equal(*sent)

# the mean of stochastic rounding is right, and the error of each element is below a level of its block
x, generator = noise(5, 4096), torch.Generator().manual_seed(rank)
means = torch.stack([mean_over(x.clone(), "int8", group, generator) for _ in range(200)])
assert (means - x).abs().max() < 2 * x.abs().max() / 127
assert (means.mean(0) - x).abs().max() < 0.2 * x.abs().max() / 127

# the outer step; step 3, at which one is due, is skipped
model = nn.Module()
model.a, model.b = (nn.Parameter(noise(i, 40)) for i in (1, 2))
changes = dict(outer_lr=0.7, outer_momentum=0.9, outer_compression="none")
plan = replace(UNDIVIDED, world_size=ranks, islands=ranks, local_steps=2, **changes)
islands = Islands(model, Mesh(rank, islands=ranks), plan)
islands.restart()
outer = torch.stack([p.detach() for p in model.parameters()])
inner, momentum = outer.clone(), torch.zeros(2, 40)
for step in (0, 1, 2, 4, 5, 6, 7):
    change = noise(100 * step + rank, 2, 40) * 0.1
    inner += change
    with torch.no_grad():
        for p, c in zip(model.parameters(), change):
            p.add_(c)
    islands.after_step(step)
    if step % 2:
        gradient = mean(outer - inner)
        momentum = 0.9 * momentum + gradient
        outer = outer - 0.7 * (gradient + 0.9 * momentum)
        inner = outer.clone()
    torch.testing.assert_close(torch.stack(list(model.parameters())).detach(), inner, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.stack(list(islands.weights.values())), outer, atol=1e-5, rtol=0)
print("formulas hold")
islands = compression = None
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_is_sent_is_what_the_formulas_say(zygote, shared_work):
    (shared_work / "formulas.py").write_text(FORMULAS.format(repo=str(REPO)))
    run = zygote.start([], shared_work, 3, script="formulas.py", repo=shared_work).wait()
    assert run.text().count("formulas hold") == 3


# ------------------------------------------------------------------------------------------------------------
# islands


def test_a_resume_after_a_skipped_step_at_which_an_average_was_due(zygote, work):
    flags = [*ISLANDS, "--on_nan=skip", "--dist_timeout_s=60"]
    for out, last in (("whole", 13), ("cut", 7), ("cut", 13)):
        args = [*flags, f"--out_dir={out}", f"--max_iters={last}", "--init_from=auto"]
        start_faulty(zygote, args, work, 2, NAN=[7, 1]).wait()
    assert column(work / "whole", "loss") == column(work / "cut", "loss")
    whole, cut = (tensors(work / out / "step_00000014") for out in ("whole", "cut"))
    assert whole.keys() == cut.keys() and [k for k in whole if not torch.equal(whole[k], cut[k])] == []


def test_the_curve_of_islands_depends_on_neither_micro_batch_nor_ranks(zygote, work):
    """
    Seven sequences on two islands: one learns from four, the other from three. The loss is the mean of all
    seven.
    """
    flags = ["--islands=2", "--local_steps=5", "--outer_lr=1", "--outer_momentum=0", "--max_iters=14"]
    for out, nproc, batch_size in (("whole", 2, 7), ("small", 2, 1), ("ranks", 4, 1)):
        batch = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={7 // batch_size}"]
        zygote.train([*flags, *batch, f"--out_dir={out}"], work, nproc)
    for out in ("small", "ranks"):
        same(column(work / "whole", "loss"), column(work / out, "loss"), absolute=1e-5)
        same(column(work / "whole", "grad_norm"), column(work / out, "grad_norm"), relative=1e-4)
    one = ["--batch_size=7", "--gradient_accumulation_steps=1", "--max_iters=0", "--out_dir=one"]
    zygote.train(one, work)
    same(column(work / "one", "loss"), {0: column(work / "whole", "loss")[0]}, absolute=1e-5)


@pytest.mark.slow
def test_an_evaluation_on_any_number_of_islands_has_the_same_loss(zygote, shared_work):
    """It is of the weights of the last average, also within a period and after a conversion to ckpt.pt."""
    flags = [*ISLANDS, *FOUR]
    first = [*SHORT, *flags, "--eval_interval=10", "--out_dir=islands", "--max_iters=10"]
    zygote.train(first, shared_work, 2)
    losses = [column(shared_work / "islands", "val_loss")[10]]
    look = ["--out_dir=islands", "--init_from=resume", "--resume_step=10", "--eval_only=True"]
    for count, on in ((1, []), (2, flags), (4, [*flags, "--islands=4"]), (2, ["--zero=3"])):
        run = zygote.train([*SHORT, *look, *on], shared_work, count)
        losses.append(float(re.search(r"val loss ([\d.]+)", run.text())[1]))
    assert max(losses) - min(losses) < 2e-4, losses
    zygote.start(["islands", "--to=ckpt.pt"], shared_work, script="export.py").wait()
    run = zygote.train([*SHORT, *look[:-1], "--resume_step=-1", "--max_iters=14"], shared_work)
    assert "step_00000011, step 11" in run.text()


@pytest.mark.slow
def test_a_run_continues_on_a_different_number_of_islands(zygote, shared_work):
    """Their errors, moments and weights become the mean of the saved ones."""
    flags = [*SHORT, *FOUR, INT8, "--out_dir=other"]
    zygote.train([*flags, *ISLANDS, "--max_iters=9"], shared_work, 4)
    for count, islands in ((4, 4), (2, 2), (2, 1)):
        more = ["--init_from=resume", "--resume_step=10", f"--islands={islands}", "--max_iters=11"]
        steps = ["--local_steps=4"] if islands > 1 else []
        zygote.train([*flags, *steps, *more], shared_work, count)
        assert max(column(shared_work / "other", "loss")) == 11


# ------------------------------------------------------------------------------------------------------------
# messages

MISTAKES = {
    "--grad_compression=zip": "grad_compression is 'zip'; choose from none, fp16, bf16, int8, powersgd:RANK",
    "--grad_compression=powersgd:0": "powersgd:RANK such as powersgd:4",
    "--grad_compression=topk:2": "topk:FRACTION such as topk:0.01",
    "--zero=3 --grad_compression=int8": "set --dp_replicate= to the number of replicas",
    "--grad_compression=int8 --grad_sync=every": "set --grad_sync=last",
    "--grad_compression=int8 --dtype=float16": "set --dtype=bfloat16 or float32, or --grad_compression=fp16",
    "--local_steps=4": "set --islands= to their number, or 0 for one on each machine",
    "--islands=9": "a step reads only 8 sequences: set --gradient_accumulation_steps=3",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_give_one_message(zygote, shared_work, flags):
    run = zygote.train([*flags.split(), "--out_dir=mistake"], shared_work, ok=False)
    assert run.codes == [1] and run.text().count(MISTAKES[flags]) == 1, run.text()
    assert "Traceback" not in run.text()
