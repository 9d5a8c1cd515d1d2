"""Compressed gradients and islands: how far they are from the exact curve, resumed bit for bit, messages."""

import re
from dataclasses import replace

import pytest
from runs import (
    REPO,
    TINY,
    assert_same_run,
    column,
    default_plan,
    same,
    script_that_fails,
    start_faulty,
    tiny_data,
)

from isogpt.parallel.local_sgd import notes

FOUR = ["--gradient_accumulation_steps=4"]
INT8 = "--grad_compression=int8"
ISLANDS = ["--islands=2", "--local_steps=4"]


def test_local_sgd_of_one_step_is_ddp(zygote, shared_work):
    """With plain SGD, the mean of the islands' weights after a step is DDP's weights."""
    sgd = [f"--optimizer={REPO}/tests/own_optimizers.py:SGD", "--learning_rate=0.03", "--weight_decay=0"]
    flags = [*sgd, "--grad_clip=0", *FOUR, "--max_iters=8", "--eval_interval=5", "--save_checkpoint=False"]
    islands = ["--islands=4", "--outer_lr=1", "--outer_momentum=0"]
    zygote.train([*flags, "--out_dir=sgd"], shared_work, 4)
    zygote.train([*flags, *islands, "--out_dir=local"], shared_work, 4)
    for key in ("loss", "val_loss"):
        same(column(shared_work / "sgd", key), column(shared_work / "local", key), absolute=1e-6)


# ------------------------------------------------------------------------------------------------------------
# against their formulas, on three ranks

FORMULAS = """
import sys
sys.path[:0] = {repo!r}, {repo!r} + "/tests"
import torch, torch.distributed as dist
from torch import nn
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.compression import Compression
from isogpt.parallel.local_sgd import Islands
from runs import default_plan

dist.init_process_group("gloo", init_method="env://")
rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def mean(t):
    t = t.clone()
    dist.all_reduce(t)
    return t / ranks


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


for kind in ("int8", "powersgd", "topk"):
    # what is sent in 60 steps adds up to the mean gradients, but for the last errors
    model = nn.Linear(50, 150, bias=False)
    compression = Compression(model, Mesh(rank, dp_replicate=ranks), kind, 0.05 if kind == "topk" else 3)
    p = model.weight
    total, sent = torch.zeros(150, 50), torch.zeros(150, 50)
    for step in range(60):
        torch.manual_seed(step * ranks + rank)
        p.grad = noise(1, 150, 50) * 0.1 + noise(step * ranks + rank + 2, 150, 50)
        total += mean(p.grad)
        compression.average_all([p], group, "test")
        sent += p.grad
        torch.testing.assert_close(mean(p.grad), p.grad)  # the same on all ranks
    left = mean(compression.errors[p])
    torch.testing.assert_close(sent + left, total, atol=5e-4, rtol=0)
    assert 0 < left.norm() < total.norm()

# the mean of stochastic rounding is right, and the error of each element is below a level of its block
x, model = noise(5, 64, 64), nn.Linear(64, 64, bias=False)
compression, p, means = Compression(model, Mesh(rank, dp_replicate=ranks), "int8", 0.0), model.weight, []
for _ in range(200):
    p.grad = x.clone()
    compression.forget()
    compression.average_all([p], group, "test")
    means.append(p.grad)
means = torch.stack(means)
assert (means - x).abs().max() < 2 * x.abs().max() / 127
assert (means.mean(0) - x).abs().max() < 0.2 * x.abs().max() / 127

# the outer step; step 3, at which one is due, is skipped
model = nn.Linear(8, 5, bias=False)
plan = default_plan(world_size=ranks, islands=ranks, local_steps=2, outer_lr=0.7, outer_momentum=0.9)
model.weight.data = noise(1, 5, 8)
islands = Islands(model, Mesh(rank, islands=ranks), plan)
islands.restart()
outer, momentum = model.weight.detach().clone(), torch.zeros(5, 8)
inner = outer.clone()
for step in (0, 1, 2, 4, 5, 6, 7):
    change = noise(100 * step + rank, 5, 8) * 0.1
    inner += change
    model.weight.data += change
    islands.after_step(step)
    if step % 2:
        gradient = mean(outer - inner)
        momentum = 0.9 * momentum + gradient
        outer = outer - 0.7 * (gradient + 0.9 * momentum)
        inner = outer.clone()
    torch.testing.assert_close(model.weight.detach(), inner, atol=1e-5, rtol=0)
    torch.testing.assert_close(islands.weights[0], outer, atol=1e-5, rtol=0)
islands = compression = None
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_is_sent_is_what_the_formulas_say(zygote, shared_work):
    (shared_work / "formulas.py").write_text(FORMULAS.format(repo=str(REPO)))
    zygote.start([], shared_work, 3, script="formulas.py", repo=shared_work).wait()


# ------------------------------------------------------------------------------------------------------------
# islands


@pytest.mark.parametrize("flags", [ISLANDS, ["--grad_compression=powersgd:1"], [INT8]], ids=str)
def test_a_resume_after_a_skipped_step(zygote, work, flags):
    """At the step, an average of the islands was due, or errors were compressed that were not finite."""
    flags = [*flags, "--skip_steps=nan", "--dist_timeout_s=60", "--eval_interval=4"]
    for out, last in (("whole", 8), ("cut", 3), ("cut", 8)):
        args = [*flags, f"--out_dir={out}", f"--max_iters={last}", "--init_from=auto"]
        start_faulty(zygote, args, work, 2, NAN=[3, 1]).wait()
    assert_same_run(work / "cut", work / "whole")


def test_the_curve_of_islands_depends_on_neither_micro_batch_nor_ranks(zygote, work):
    """
    Seven sequences on two islands: one learns from four, the other from three. The loss is the mean of all
    seven.
    """
    flags = ["--islands=2", "--local_steps=3", "--outer_lr=1", "--outer_momentum=0", "--max_iters=5"]
    for out, nproc, batch_size in (("whole", 2, 7), ("small", 2, 1), ("ranks", 4, 1)):
        batch = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={7 // batch_size}"]
        zygote.train([*flags, *batch, f"--out_dir={out}"], work, nproc)
        same(column(work / "whole", "loss"), column(work / out, "loss"), absolute=1e-5)
        same(column(work / "whole", "grad_norm"), column(work / out, "grad_norm"), relative=1e-4)
    one = ["--batch_size=7", "--gradient_accumulation_steps=1", "--max_iters=0", "--out_dir=one"]
    zygote.train(one, work)
    same(column(work / "one", "loss"), {0: column(work / "whole", "loss")[0]}, absolute=1e-5)


@pytest.mark.slow
def test_on_a_different_number_of_islands_a_run_has_the_same_loss_and_continues(zygote, shared_work):
    """
    The loss is that of the weights of the last average, also within a period and after a conversion to
    ckpt.pt; islands, errors and moments continue from their mean.
    """
    flags = [*FOUR, INT8, "--out_dir=out"]
    zygote.train([*flags, *ISLANDS, "--eval_interval=5", "--max_iters=5"], shared_work, 4)
    losses = [column(shared_work / "out", "val_loss")[5]]
    resume = [*flags, "--init_from=resume:5"]
    for nproc, layout in ((1, []), (2, ISLANDS), (2, ["--zero=3", "--grad_compression=none"])):
        run = zygote.train([*resume, *layout, "--eval_only=True"], shared_work, nproc)
        losses.append(float(re.search(r"val loss ([\d.]+)", run.text())[1]))
    assert max(losses) - min(losses) < 2e-4, losses
    for nproc, layout in ((4, ["--islands=4", "--local_steps=4"]), (2, ISLANDS), (2, [])):
        zygote.train([*resume, *layout, "--max_iters=6"], shared_work, nproc)
    zygote.start(["out", "--to=ckpt.pt"], shared_work, script="export.py").wait()
    zygote.train([*FOUR, "--out_dir=out", "--init_from=resume", "--max_iters=8"], shared_work)
    assert max(column(shared_work / "out", "loss")) == 8


# ------------------------------------------------------------------------------------------------------------
# messages

MISTAKES = {
    "--grad_compression=zip": "grad_compression is 'zip'; choose from none, fp16, bf16, int8, powersgd:RANK",
    "--grad_compression=powersgd:0": "powersgd:RANK",
    "--grad_compression=topk:2": "topk:FRACTION, such as topk:0.01",
    "--zero=3 --grad_compression=int8": "zero 0 or 1, or dp_replicate: set --grad_compression=none",
    "--grad_compression=int8 --grad_sync=every": "set --grad_sync=last",
    "--grad_compression=int8 --dtype=float16": "dtype float32 or bfloat16: set --grad_compression=fp16",
    "--islands=2 --grad_compression=topk:0.1": "but needs islands 1: set --grad_compression=int8",
    "--local_steps=4": "local_steps is 4, but needs islands: set --local_steps=1",
    "--islands=9": "islands is above a step's 8 sequences: set --gradient_accumulation_steps=3",
}


def test_steps_after_the_last_average_are_noted():
    """Evaluations and exports do not contain them. What the note says to type leaves none."""
    config = {"max_iters": 20, "max_tokens": "", "eval_only": False}
    plan = default_plan(islands=2, local_steps=8, model_args={"block_size": 64})
    (note,) = notes(plan, config)
    assert "the last 5 of 21 steps" in note and "set --max_iters=23, or" in note
    (note,) = notes(plan, config | {"max_tokens": "1e6"})
    tokens = int(re.search(r"--max_tokens=(\d+),", note)[1])
    assert tokens == 24 * plan.sequences * 64
    (note,) = notes(replace(plan, local_steps=100), config)  # the weights would stay the initial ones
    assert "the last 21 of 21 steps" in note and "set --max_iters=99, or" in note
    for steps in (23, 24):  # 24 steps; 25, as most people type
        assert not notes(plan, config | {"max_iters": steps})
    assert not notes(replace(plan, islands=1, local_steps=1), config)


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_give_one_message(at, capsys, flags):
    tiny_data(at.path)
    out, err = script_that_fails(at, capsys, "train.py", [*TINY, *flags.split()])
    assert not out and err.count(MISTAKES[flags]) == 1
