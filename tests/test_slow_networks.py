"""Compressed gradients and islands: how far they are from the exact curve, resumed bit for bit, messages."""

import re

import pytest
import torch
from runs import REPO, column, start_changed, start_faulty
from test_parity import same

from isogpt.checkpoint import sharded_files
from isogpt.parallel.local_parts import LocalPart

SHORT = ["--save_interval=10", "--max_iters=19", "--dropout=0.1"]
HSDP = ["--zero=3", "--dp_replicate=2"]
ISLANDS = ["--islands=2", "--local_steps=4"]
# name: (processes, flags)
MODES = {
    "fp16": (2, ["--grad_compression=fp16"]),
    "bf16": (2, ["--grad_compression=bf16"]),
    "int8": (2, ["--grad_compression=int8"]),
    "sign-3": (3, ["--grad_compression=sign", "--gradient_accumulation_steps=3"]),
    "powersgd": (2, ["--grad_compression=powersgd:1", "--ddp_bucket_mb=0.02"]),
    "topk": (2, ["--grad_compression=topk:0.05"]),
    "int8-hsdp": (4, ["--grad_compression=int8", *HSDP, "--gradient_accumulation_steps=4"]),
    "powersgd-hsdp": (4, ["--grad_compression=powersgd:1", *HSDP, "--gradient_accumulation_steps=4"]),
    "sign-tp": (4, ["--grad_compression=sign", "--tp=2"]),
    "topk-zero1": (2, ["--grad_compression=topk:0.05", "--zero=1"]),
    "int8-pp": (4, ["--grad_compression=int8", "--pp=2", "--gradient_accumulation_steps=4"]),
    "int8-ep": (4, ["--grad_compression=int8", "--n_expert=4", "--ep=2", "--gradient_accumulation_steps=4"]),
    "islands": (2, ISLANDS),
    "islands-muon": (2, [*ISLANDS, "--optimizer=muon", "--arch=nanochat", "--bias=False"]),
    "islands-stream": (2, [*ISLANDS, "--outer_parts=2", "--outer_compression=int8"]),
    "islands-fsdp": (4, [*ISLANDS, "--zero=3", "--outer_parts=4", "--gradient_accumulation_steps=4"]),
    "islands-topk": (4, [*ISLANDS, "--grad_compression=topk:0.1", "--gradient_accumulation_steps=4"]),
}
QUICK = ("powersgd", "islands-stream")
EXTRA = ("fp16", "bf16", "int8-hsdp", "islands-muon", "topk-zero1", "int8-ep", "islands-topk")
MARKED = [
    *QUICK,
    *(
        pytest.param(name, marks=pytest.mark.extra if name in EXTRA else pytest.mark.slow)
        for name in MODES
        if name not in QUICK
    ),
]


def tensors(folder):
    """Everything that a checkpoint in shards holds."""
    state = {name: torch.empty(shape) for name, shape in sharded_files.shapes(folder).items()}
    parts = {name: LocalPart(t.shape, (((0,) * t.dim(), t),)) for name, t in state.items()}
    sharded_files.dcp.load(
        parts,
        storage_reader=sharded_files.PlainReader(folder),
        planner=sharded_files.LoadPlanner(**sharded_files.FLAT),
        no_dist=True,
    )
    return state


@pytest.mark.parametrize("name", MARKED)
def test_a_resume_has_the_same_bits(zygote, work, name):
    """Step 10 is within a period of local_steps, and with outer_parts a part is being sent."""
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


@pytest.mark.slow
def test_a_resume_with_a_different_rank_resets_powersgd(zygote, work):
    args = ["--n_embd=64", "--max_iters=9"]
    for rank, other in ((1, 2), (2, 1)):
        for out, first in (("fresh", rank), ("resumed", other)):
            flags = [*args, f"--out_dir={out}{rank}"]
            zygote.train([*flags, f"--grad_compression=powersgd:{first}", "--max_iters=4"], work, 2)
            zygote.train([*flags, f"--grad_compression=powersgd:{rank}", "--init_from=resume"], work, 2)
        fresh, resumed = (
            sharded_files.shapes(work / f"{out}{rank}" / "step_00000010") for out in ("fresh", "resumed")
        )
        assert fresh == resumed and any(f"powersgd:{rank}." in name for name in fresh)


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
    "fp16-hsdp": (
        4,
        ["--grad_compression=fp16", *HSDP, "--gradient_accumulation_steps=4", "--batch_size=2"],
        2e-3,
    ),
    "int8-tp": (4, ["--grad_compression=int8", "--tp=2"], 2e-2),
    "fp16-zero1": (2, ["--grad_compression=fp16", "--zero=1"], 2e-3),
}


@pytest.mark.parametrize(
    "name", [n if n == "fp16" else pytest.param(n, marks=pytest.mark.slow) for n in CURVES]
)
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
    sgd = torch.optim.SGD([{"params": list(model.parameters()), "lr_scale": 1.0}], lr=1.0)
    return [sgd]

optim.make_optimizers = make_sgd
"""


def test_local_sgd_of_one_step_is_ddp(zygote, shared_work):
    flags = [
        "--learning_rate=0.03",
        "--grad_clip=0",
        "--weight_decay=0",
        "--gradient_accumulation_steps=4",
        "--eval_interval=15",
        "--save_checkpoint=False",
    ]
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
import os, sys
from dataclasses import replace
sys.path.insert(0, {repo!r})
import torch, torch.distributed as dist
from torch import nn
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import UNDIVIDED
from isogpt.parallel.compression import KEPT, Bucket, Compression, mean_over
from isogpt.parallel.local_sgd import Islands

dist.init_process_group("gloo", init_method="env://")
rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
cpu = torch.device("cpu")


def mean(t):
    t = t.clone()
    dist.all_reduce(t)
    return t / ranks


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# what is sent in 60 steps adds up to the mean gradients, but for the errors and what is dropped of them;
# without feedback much is missing. With signs, also if all of the errors are kept.
part = KEPT["sign"]
cases = (("int8", 0, 1), ("sign", 0, 1), ("sign", 0, part), ("topk", 0.05, 1), ("powersgd", 1, 1))
for kind, amount, kept in cases:
    missing, KEPT[kind] = {{}}, kept
    for feedback in (True, False):
        p = nn.Parameter(torch.zeros(60, 50))
        compression = Compression(kind, amount, Mesh(rank, dp_replicate=ranks), cpu, uses_feedback=feedback)
        total, sent, dropped = (torch.zeros(60, 50) for _ in range(3))
        for step in range(60):
            torch.manual_seed(step * ranks + rank)
            p.grad = noise(1, 60, 50) * 0.1 + noise(step * ranks + rank + 2, 60, 50)
            total += mean(p.grad)
            compression.average_all([p], group, "test")
            sent += p.grad
            assert torch.equal(mean(p.grad)[0], p.grad[0]) or torch.allclose(mean(p.grad), p.grad)
            left = mean(compression.errors[p])
            dropped += left * (1 / kept - 1)
        missing[feedback] = (total - sent).norm().item() / total.norm().item()
        if feedback:
            torch.testing.assert_close(sent + left + dropped, total, atol=2e-4, rtol=0)
    print(kind, kept, missing)
    bound = 1.2 if kind == "int8" else 0.7 if kept == 1 else 0.9
    assert missing[True] < missing[False] * bound, (kind, kept, missing)

assert 0 < part < 1

# tall matrices are approximated as a stack of square ones: three outer products need rank 1
columns = [noise(i, 50) for i in range(6)]
stack = torch.cat([torch.outer(a, b) for a, b in zip(columns[::2], columns[1::2])])
for rows, is_exact in ((150, True), (149, False)):
    p, empty = nn.Parameter(torch.zeros(rows, 50)), nn.Parameter(torch.zeros(0, 50))  # a shard without rows
    compression = Compression("powersgd", 1, Mesh(rank, dp_replicate=ranks), cpu, uses_feedback=False)
    for _ in range(4):
        p.grad, empty.grad = stack[:rows].clone(), torch.zeros(0, 50)
        compression.average_all([empty, p], group, "test")
    assert torch.allclose(p.grad, stack[:rows], atol=1e-5) == is_exact, rows

# a gradient that is not finite stays so
for kind, amount in (("int8", 0), ("sign", 0), ("topk", 0.05), ("powersgd", 1), ("fp16", 0), ("bf16", 0)):
    p = nn.Parameter(torch.zeros(60, 50))
    compression = Compression(kind, amount, Mesh(rank, dp_replicate=ranks), cpu)
    for step in range(4):
        p.grad = noise(rank, 60, 50)
        if step == 3 and rank == 1:
            p.grad[7, 7] = float("nan")
        compression.average_all([p], group, "test")
        assert p.grad.isfinite().all() == (step < 3), (kind, step)

# after a step that was not finite, a run that was resumed before it sends the same as one that was not
sent = []
for first in (0, 5):
    p = nn.Parameter(torch.zeros(60, 50))
    compression = Compression("powersgd", 1, Mesh(rank, dp_replicate=ranks), cpu)
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
found = torch.stack([mean_over(x.clone(), "int8", group, generator) for _ in range(200)])
assert (found - x).abs().max() < 2 * x.abs().max() / 127
assert (found.mean(0) - x).abs().max() < 0.2 * x.abs().max() / 127

# the outer step, at once and in parts
for parts, steps in ((1, 2), (2, 4)):
    model = nn.Module()
    model.a, model.b = (nn.Parameter(noise(i, 40)) for i in (1, 2))
    changes = dict(outer_lr=0.7, outer_momentum=0.9, outer_compression="none", outer_parts=parts)
    plan = replace(UNDIVIDED, world_size=ranks, islands=ranks, local_steps=steps, **changes)
    islands = Islands(model, Mesh(rank, islands=ranks), plan)
    islands.restart(0)
    outer = {{name: p.detach().clone() for name, p in model.named_parameters()}}
    inner = {{name: p.clone() for name, p in outer.items()}}
    momentum = {{name: torch.zeros(40) for name in outer}}
    flying, due = {{}}, ()
    turns = {{steps: ("a", "b")}} if parts == 1 else {{2: ("a",), 4: ("b",)}}
    for step in range(12):
        due += turns.get(step % steps + 1, ())
        if step in (3, 7, 8):  # it is skipped: what is due takes place after the next one
            continue
        for i, (name, p) in enumerate(model.named_parameters()):
            change = noise(100 * step + 10 * rank + i, 40) * 0.1
            with torch.no_grad():
                p.add_(change)
            inner[name] += change
        islands.after_step(step)
        if due:
            for name, was in list(flying.items()) if parts > 1 else []:
                gradient = mean(outer[name] - was)
                momentum[name] = 0.9 * momentum[name] + gradient
                outer[name] = outer[name] - 0.7 * (gradient + 0.9 * momentum[name])
                inner[name] = outer[name] + inner[name] - was
            flying = {{name: inner[name].clone() for name in due}}
            for name, was in list(flying.items()) if parts == 1 else []:
                gradient = mean(outer[name] - was)
                momentum[name] = 0.9 * momentum[name] + gradient
                inner[name] = outer[name] = outer[name] - 0.7 * (gradient + 0.9 * momentum[name])
                inner[name] = inner[name].clone()
            due = ()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), inner[name], atol=1e-5, rtol=0)
            torch.testing.assert_close(islands.weights[name], outer[name], atol=1e-5, rtol=0)
    islands.wait()
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
    """Once it is due at the first step after the resume; once it is computed in the background."""
    flags = [*ISLANDS, "--outer_parts=2", "--outer_compression=int8", "--on_nan=skip", "--dist_timeout_s=60"]
    for out, last in (("whole", 13), ("cut", 9), ("cut", 10), ("cut", 13)):
        args = [*flags, f"--out_dir={out}", f"--max_iters={last}", "--init_from=auto"]
        start_faulty(zygote, args, work, 2, NAN=[9, 1]).wait()
    assert column(work / "whole", "loss") == column(work / "cut", "loss")
    whole, cut = (tensors(work / out / "step_00000014") for out in ("whole", "cut"))
    assert whole.keys() == cut.keys() and [k for k in whole if not torch.equal(whole[k], cut[k])] == []


def test_the_curve_of_islands_depends_on_neither_micro_batch_nor_ranks(zygote, work):
    """
    Seven sequences on two islands: one learns from four, the other from three. The loss is the mean of all
    seven.
    """
    flags = [
        "--islands=2",
        "--local_steps=5",
        "--outer_lr=1",
        "--outer_momentum=0",
        "--max_iters=14",
        "--dist_timeout_s=60",
    ]
    ways = {"whole": (2, 7), "small": (2, 1), "ranks": (4, 1)}
    for out, (nproc, batch_size) in ways.items():
        more = [
            f"--batch_size={batch_size}",
            f"--gradient_accumulation_steps={7 // batch_size}",
            f"--out_dir={out}",
        ]
        zygote.train([*flags, *more], work, nproc)
    for out in ("small", "ranks"):
        same(column(work / "whole", "loss"), column(work / out, "loss"), absolute=1e-5)
        same(column(work / "whole", "grad_norm"), column(work / out, "grad_norm"), relative=1e-4)
    one = ["--batch_size=7", "--gradient_accumulation_steps=1", "--max_iters=0", "--out_dir=one"]
    zygote.train(one, work)
    same(column(work / "one", "loss"), {0: column(work / "whole", "loss")[0]}, absolute=1e-5)


@pytest.mark.slow
def test_an_evaluation_on_any_number_of_islands_has_the_same_loss(zygote, shared_work):
    """It is of the weights of the last average, also within a period and after a conversion to ckpt.pt."""
    ours, flags = (
        shared_work / "islands",
        ["--islands=2", "--local_steps=4", "--gradient_accumulation_steps=4"],
    )
    zygote.train(
        [*SHORT, *flags, "--eval_interval=10", "--out_dir=islands", "--max_iters=10"], shared_work, 2
    )
    found = {"while it trained": column(ours, "val_loss")[10]}
    look = ["--out_dir=islands", "--init_from=resume", "--resume_step=10", "--eval_only=True"]
    for count, on in ((1, []), (2, flags), (4, [*flags, "--islands=4"]), (2, ["--zero=3"])):
        run = zygote.train([*SHORT, *look, *on], shared_work, count)
        found[f"{count} {on}"] = float(re.search(r"val loss ([\d.]+)", run.text())[1])
    assert max(found.values()) - min(found.values()) < 2e-4, found
    zygote.start(["islands", "--to=ckpt.pt"], shared_work, script="export.py").wait()
    run = zygote.train([*SHORT, *look[:-1], "--resume_step=-1", "--max_iters=14"], shared_work)
    assert "step_00000011, step 11" in run.text()


@pytest.mark.slow
def test_a_run_continues_on_a_different_number_of_islands(zygote, shared_work):
    """Their errors, moments and weights become the mean of the saved ones."""
    flags = ["--local_steps=4", "--gradient_accumulation_steps=4", "--grad_compression=topk:0.1"]
    zygote.train([*SHORT, *flags, "--islands=2", "--max_iters=9", "--out_dir=other"], shared_work, 4)
    for count, islands, parts in ((4, 4, 1), (2, 2, 3), (2, 1, 1)):
        more = ["--init_from=resume", "--resume_step=10", f"--islands={islands}", "--max_iters=11"]
        steps = [*flags, f"--outer_parts={parts}"] if islands > 1 else [*flags, "--local_steps=1"]
        zygote.train([*SHORT, *steps, *more, "--out_dir=other"], shared_work, count)
        assert max(column(shared_work / "other", "loss")) == 11


# ------------------------------------------------------------------------------------------------------------
# messages

MISTAKES = [
    (
        ["--grad_compression=zip"],
        "grad_compression is 'zip'; possible are none, fp16, bf16, int8, sign, powersgd:",
    ),
    (["--grad_compression=topk:2"], "FRACTION of at most 1, such as topk:0.01"),
    (["--grad_compression=powersgd:0"], "powersgd:RANK such as powersgd:4"),
    (["--outer_momentum=1"], "outer_momentum is 1.0: it must be < 1"),
    (["--zero=3", "--grad_compression=int8"], "set --dp_replicate= to the number of replicas"),
    (["--grad_compression=int8", "--grad_sync=every"], "set --grad_sync=last"),
    (
        ["--grad_compression=sign", "--dtype=float16"],
        "set --dtype=bfloat16 or float32, or --grad_compression=fp16",
    ),
    (["--local_steps=4"], "set --islands= to their number, or 0 for one on each machine"),
    (["--islands=2", "--outer_parts=3"], "outer_parts is 3: it must not be above local_steps, 1"),
    (["--islands=9"], "islands is 9, but a step reads only 8 sequences: set --gradient_accumulation_steps=3"),
]


@pytest.mark.parametrize(("flags", "said"), MISTAKES, ids=[" ".join(flags) for flags, _ in MISTAKES])
def test_mistakes_give_one_message(zygote, shared_work, flags, said):
    run = zygote.train([*flags, "--out_dir=mistake"], shared_work, ok=False)
    assert run.codes == [1]
    assert run.text().count(said) == 1, run.text()
    assert "Traceback" not in run.text()
