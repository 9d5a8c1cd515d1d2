"""Dry runs: one rank of many, without the others. What it counts is what real ranks take and send."""

import re
import signal
from types import SimpleNamespace

import pytest
import torch
import wire
from runs import REPO, accepted, start_changed, train_defaults
from torch.distributed import AllreduceOptions, ReduceOp

from isogpt.launch.pretended_ranks import Collective, PretendedGroup
from isogpt.speed import dry_run

# a model whose activations and parameters take alike
SMALL = [
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--block_size=256",
    "--vocab_size=256",
    "--batch_size=4",
    "--dtype=float32",
    "--device=cpu",
    "--eval_iters=1",
]
# a dry run reads no data
NO_DATA = ["--dataset=not_there:1,nor_there:2", "--data_order=documents"]
MEMORY = r"^  (parameters|gradients|optimizer state|activations, temporary|total) +([\d.e-]+) +([\d.e-]+)$"
COLLECTIVE = r"^  (\w+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)  ([\w ]+)$"


def number(text):
    return float(text.replace(",", ""))


def read_report(text):
    """What a dry run reported: {part: GB} counted and predicted, and its collectives."""
    memory = re.findall(MEMORY, text, re.M)
    assert len(memory) == 5, text
    rows = re.findall(COLLECTIVE, text, re.M)
    fields = ("operation", "ranks", "count", "bytes", "sent", "axes")
    return SimpleNamespace(
        counted={name: float(gb) for name, gb, _ in memory},
        predicted={name: float(gb) for name, _, gb in memory},
        collectives=[
            SimpleNamespace(**dict(zip(fields, (op, *map(number, numbers), axes), strict=True)))
            for op, *numbers, axes in rows
        ],
        text=text,
    )


def run_dry(zygote, work, ranks, args, rank=0, timeout=120, changes=""):
    """Run train.py as one of so many ranks."""
    args = [*SMALL, *NO_DATA, *args, f"--dry_run_ranks={ranks}", f"--dry_run_rank={rank}", "--out_dir=dry"]
    run = start_changed(zygote, changes, args, work) if changes else zygote.start(args, work)
    report = read_report(run.wait(timeout).text())
    assert not (work / "dry").exists()
    return report


# ------------------------------------------------------------------------------------------------------------
# the pretended ranks


def test_a_collective_gives_what_copies_of_this_rank_would_send():
    run = SimpleNamespace(collectives=[])
    group = PretendedGroup(1, (4, 5, 6), "three", run)
    x = torch.arange(3.0)
    mean = AllreduceOptions()
    mean.reduceOp = ReduceOp.AVG
    group.allreduce([x], mean).wait()
    assert x.tolist() == [0, 1, 2]
    assert group.allreduce([x]).get_future().wait()[0].tolist() == [0, 3, 6]
    output = torch.empty(9)
    group.all_gather_single(output, x)
    assert output.tolist() == [0, 3, 6] * 3
    group.all_gather_single(output, output[3:6])  # FSDP gathers in place
    assert output.tolist() == [0, 3, 6] * 3
    group.reduce_scatter_single(x, torch.arange(9.0))
    assert x.tolist() == [9, 12, 15]
    group.all_to_all_single(output, torch.arange(9.0), [], [])
    assert output.tolist() == [3, 4, 5] * 3
    group.recv([x], 0, 0)
    assert x.tolist() == [0, 0, 0], "not what is in memory, which may be NaN"
    sizes = [(c.operation, c.size) for c in run.collectives]
    assert sizes[:2] == [("all_reduce", 12)] * 2 and sizes[-1] == ("recv", 12)
    assert run.collectives[0].ranks == (4, 5, 6)


def test_bytes_that_a_rank_sends():
    four = (0, 1, 2, 3)
    assert Collective("all_reduce", four, 100).sent == 150
    assert Collective("all_gather", four, 100).sent == Collective("reduce_scatter", four, 100).sent == 75
    assert Collective("broadcast", four, 100).sent == 75, "each rank but the last passes it on"
    assert Collective("send", four, 100).sent == 100 and Collective("recv", four, 100).sent == 0


def test_what_cannot_be_dry_run_is_refused():
    def refused(**settings):
        with pytest.raises(ValueError) as refusal:
            dry_run.start(train_defaults(**settings), str(REPO / "train.py"))
        return str(refusal.value)

    assert "set --dry_run_ranks=2 or more" in refused(dry_run_ranks=1)
    assert "set --dry_run_ranks=5 or more, or a lower --dry_run_rank=" in refused(
        dry_run_ranks=4, dry_run_rank=4
    )
    assert "set --dry_run_ranks=4 or more" in refused(dry_run_rank=3), "not a run that trains"
    assert "set --init_from=scratch" in refused(dry_run_ranks=4, init_from="resume")
    assert "set --shares=equal" in refused(dry_run_ranks=4, shares="auto")
    assert "set --vocab_size=50304" in refused(dry_run_ranks=4, dataset="not_there")
    accepted("train.py", "--dry_run_ranks=4", "--dry_run_rank=3")
    assert dry_run.start(train_defaults(), "train.py") is None, "a run that is not dry goes on"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_dry_run_at_once(zygote, work, name):
    args = [*SMALL, *NO_DATA, "--dry_run_ranks=2", "--gradient_accumulation_steps=200", "--out_dir=dry"]
    run = zygote.start(args, work, env={"TMPDIR": str(work)})
    assert run.until(lambda text: "peak:" in text)
    run.kill(sig=getattr(signal, name))
    run.wait(ok=False)
    assert run.codes == [128 + getattr(signal, name)] and "Traceback" not in run.text()
    assert not list(work.glob("isogpt-dry-run-*"))


# ------------------------------------------------------------------------------------------------------------
# what is counted


def sent_by_real_ranks(report, name):
    """The bytes of a report that the formulas of measure/wire.py contain, as gloo sends them."""
    total = 0.0
    for c in report.collectives:
        if c.count == 1 and c.bytes < 1000 * c.ranks:  # the step's numbers, and with experts the routers'
            continue
        gloo = {"reduce_scatter": 2}.get(c.operation, 1)
        total += gloo * c.sent
    return total


FAST = ("fsdp 4", "pp 2")


@pytest.mark.parametrize(
    "layout", [pytest.param(key, marks=[] if key in FAST else pytest.mark.slow) for key in wire.LAYOUTS]
)
def test_collectives_are_those_of_the_formulas(zygote, work, layout):
    name, n = wire.LAYOUTS[layout]
    args = [word for word in wire.arguments(name, n) if not word.startswith("--dataset=")]
    # their formulas are a mean over the ranks
    ranks = range(n) if name in ("pp", "ep", "ep2") else [0]
    sent = [sent_by_real_ranks(run_dry(zygote, work, n, args, rank), name) for rank in ranks]
    assert sum(sent) / len(sent) == pytest.approx(getattr(wire, name)(n), rel=2e-3)


# each rank prints what it has counted: the same code as in a dry run, on ranks that are there
COUNT = """
import contextlib, os
import isogpt.launch.torch_import
from isogpt.speed import dry_run
dry_run.MOST_REAL_FLOPS = float("inf")
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
run = dry_run.DryRun(rank, ranks, contextlib.ExitStack(), 2)
dry_run.current = lambda: run
count = dry_run.DryRun.count
def counted(self, state):
    result = count(self, state)
    print("counted", rank, result.parameters, result.gradients, result.optimizer, result.peak, flush=True)
    return result
dry_run.DryRun.count = counted
"""
WITHOUT_MEMORY = "import isogpt.launch.torch_import, isogpt.speed.dry_run as d; d.MOST_REAL_FLOPS = 0"
EXPERTS = ["--n_expert=4", "--n_expert_active=2"]
# name -> (ranks, settings)
LAYOUTS = {
    "ddp": (2, []),
    "zero 1": (2, ["--zero=1", "--grad_sync=every"]),
    "zero 3, bfloat16": (2, ["--zero=3", "--dtype=bfloat16"]),
    "tp": (2, ["--tp=2"]),
    "cp": (2, ["--cp=2"]),
    "pp": (2, ["--pp=2"]),
    "zbv": (2, ["--pp=2", "--pp_schedule=zbv"]),
    "experts": (2, ["--ep=2", *EXPERTS]),
    "exact": (2, ["--exact=True"]),
    "int8": (2, ["--grad_compression=int8"]),
    "hsdp, muon": (4, ["--zero=3", "--dp_replicate=2", "--optimizer=muon"]),
    "pp x tp, zero 3": (4, ["--pp=2", "--tp=2", "--zero=3", "--activation_checkpointing=full"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_is_that_of_real_ranks_and_near_the_prediction(zygote, work, name):
    n, args = LAYOUTS[name]
    args = [*SMALL, *args, "--gradient_accumulation_steps=4"]
    report = run_dry(zygote, work, n, args)
    real = [
        *args,
        "--dataset=tiny",
        "--out_dir=real",
        "--max_iters=1",
        "--decay_lr=False",
        "--save_checkpoint=False",
    ]
    text = start_changed(zygote, COUNT, real, work, n).wait(180).text()
    counts = re.findall(r"^counted (\d+) (\d+) (\d+) (\d+) (\d+)$", text, re.M)
    ranks = {int(rank): [int(size) for size in sizes] for rank, *sizes in counts}
    *parts, peak = ranks[0]
    if name == "experts":  # some get more tokens, others fewer
        peak = sum(sizes[-1] for sizes in ranks.values()) / n
    counted = [report.counted[part] for part in ("parameters", "gradients", "optimizer state")]
    assert counted == pytest.approx([part / 1e9 for part in parts], rel=0.02)
    assert report.counted["total"] == pytest.approx(peak / 1e9, rel=0.02)
    assert report.predicted["total"] == pytest.approx(report.counted["total"], rel=0.15), report.text


@pytest.mark.parametrize(
    "args", [[], pytest.param(["--optimizer=muon", "--arch=nanochat"], marks=pytest.mark.slow)]
)
def test_with_ddp_a_rank_holds_the_whole_checkpoint(zygote, work, args):
    text = run_dry(zygote, work, 2, [*args, "--gradient_accumulation_steps=2"]).text
    part, whole = re.search(r"this rank holds ([\d.]+) GB of about ([\d.]+) GB$", text, re.M).groups()
    assert float(part) == pytest.approx(float(whole), rel=0.01)


@pytest.mark.parametrize(
    "args",
    [
        ["--zero=3", "--dp_replicate=2", "--tp=2"],
        pytest.param(["--pp=2", "--ep=2", "--dtype=bfloat16", *EXPERTS], marks=pytest.mark.slow),
        pytest.param(["--cp=2", "--optimizer=muon", "--zero=1"], marks=pytest.mark.slow),
    ],
)
def test_tensors_without_memory_count_as_real_ones(zygote, work, args):
    args = [*args, "--gradient_accumulation_steps=8", "--n_layer=2", "--block_size=64"]
    real, shapes = run_dry(zygote, work, 8, args), run_dry(zygote, work, 8, args, changes=WITHOUT_MEMORY)
    assert "with real tensors" in real.text and "with tensors without memory" in shapes.text
    assert shapes.counted == pytest.approx(real.counted, rel=1e-3)
    assert shapes.collectives == real.collectives


@pytest.mark.slow
def test_1024_ranks_with_pipelines_tensor_parallelism_and_shards(zygote, work):
    args = ["--pp=8", "--tp=8", "--zero=3", "--n_layer=16", "--n_head=8", "--gradient_accumulation_steps=256"]
    report = run_dry(zygote, work, 1024, args, rank=1023)
    assert "rank 1023 of 1,024 (pp 8 x dp_shard 16 x tp 8)" in report.text
    assert report.predicted["total"] == pytest.approx(report.counted["total"], rel=0.15)
    assert {(c.operation, c.ranks, c.axes) for c in report.collectives} >= {
        ("all_gather", 16, "dp_shard"),
        ("reduce_scatter", 16, "dp_shard"),
        ("all_gather", 8, "tp"),
        ("send", 8, "pp"),
    }
