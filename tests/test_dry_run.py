"""Dry runs: one rank of many, without the others. What it counts is what real ranks take and send."""

import re
import signal
from types import SimpleNamespace

import pytest
import torch
from runs import REPO, accepted, start_changed, train_defaults
from torch.distributed import AllreduceOptions, ReduceOp

from isogpt.launch.pretended_ranks import Collective, PretendedGroup
from isogpt.parallel.compression import INT8_BLOCK
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


# What each rank sends per step, by formula. Everything is divisible by 4, so no part is padded. What is sent
# in each of two micro-steps counts twice.
L, C, T, V, ROWS, MICRO_STEPS = 4, 128, 256, 256, 4, 2
MODEL = [f"--n_layer={L}", f"--n_embd={C}", f"--block_size={T}", f"--vocab_size={V}", f"--batch_size={ROWS}"]
# bytes of a block's parameters, of the others (wte, wpe and the last norm), and of a micro-batch's stream
BLOCK = 4 * (12 * C**2 + 2 * C)
OTHERS = 4 * (V * C + T * C + C)
STREAM = 4 * ROWS * T * C
E, ACTIVE = 4, 2  # experts, with ep, and how many of them each token uses


def all_reduce(n, size):
    """Bytes that each of n ranks sends for the sum of tensors of `size` bytes: around a ring, twice."""
    return 2 * (n - 1) / n * size


def all_gather(n, size):
    """Bytes that each of n ranks sends so that all have the whole; also in an all-to-all of `size` bytes."""
    return (n - 1) / n * size


# NCCL sends (n - 1) / n; gloo runs an all-reduce
reduce_scatter = all_reduce


def ddp(n):
    """One all-reduce of the gradients per step."""
    return all_reduce(n, L * BLOCK + OTHERS)


def fsdp(n, of_gradients=1):
    """
    In each micro-step the parameters are gathered, those of the blocks again in the backward, and the
    gradients are reduced.
    """
    gathered = all_gather(n, 2 * L * BLOCK + OTHERS)
    return MICRO_STEPS * (gathered + of_gradients * reduce_scatter(n, L * BLOCK + OTHERS))


def tp(n):
    """
    In each micro-step, attention, MLP and the loss gather the stream, attention, MLP and the embedding add up
    their outputs, and the backward does the opposite of each. The loss reduces three numbers per token. Once
    per step, the gradients of norms and position embeddings are summed.
    """
    stream = (4 * L + 2) * (all_gather(n, STREAM) + reduce_scatter(n, STREAM))
    per_token = 3 * 4 * ROWS * T
    whole = 4 * (L * 2 * C + T * C + C)  # parameters that are on every rank
    return MICRO_STEPS * (stream + all_reduce(n, per_token)) + all_reduce(n, whole)


def pp(n):
    """
    The stream of each micro-batch crosses each of n - 1 boundaries, and its gradient crosses them back. The
    first and the last rank exchange the gradient of the tied embedding. Mean over the ranks.
    """
    micro_steps = -(-MICRO_STEPS // n) * n
    stream = STREAM * MICRO_STEPS / micro_steps  # of more and smaller micro-batches
    return (2 * (n - 1) * micro_steps * stream + 2 * 4 * V * C) / n


def cp(n):
    """
    In each micro-step, each block gathers keys and values, gathers them again in the backward and reduces
    their gradients. Once per step, the gradients are reduced as with DDP.
    """
    keys_values = 2 * STREAM
    per_block = 2 * all_gather(n, keys_values) + reduce_scatter(n, keys_values)
    return MICRO_STEPS * L * per_block + ddp(n)


def ep(n, degree):
    """
    In each micro-step, each block sends tokens to the ranks with their experts and the results back, and the
    backward does the same with gradients; first, the ranks exchange how many tokens each expert gets. Once
    per step, the gradients are reduced: those of experts over the ranks that hold the same ones, the others
    over all. Mean over the ranks: it does not depend on how even the routing is, as long as it is alike on
    all ranks, since what popular experts receive from n - 1 ranks the others do not.
    """
    routed, counts = ACTIVE * STREAM, 8 * E
    mlp = 4 * 8 * C**2
    others = L * (BLOCK - mlp + 4 * E * C) + OTHERS  # with the routers
    exchanged = MICRO_STEPS * L * (4 * all_gather(degree, routed) + all_gather(degree, counts))
    return exchanged + all_reduce(n, others) + all_reduce(n // degree, L * E * mlp / degree)


OF_EXPERTS = f"--n_expert={E} --n_expert_active={ACTIVE} --ep="
FORMULAS = {"--grad_compression=none": ddp, "--zero=3": fsdp, "--tp=N": tp, "--pp=N": pp, "--cp=N": cp}
FORMULAS |= {
    f"{OF_EXPERTS}N": lambda n: ep(n, n),
    f"{OF_EXPERTS}2": lambda n: ep(n, 2),  # pairs of ranks divide the experts, and DDP joins the pairs
    "--exact=True": lambda n: 2 * ddp(n),  # 64-bit integers
    "--exact=True --zero=3": lambda n: fsdp(n, of_gradients=2),
    "--grad_compression=fp16": lambda n: ddp(n) / 2,
    "--grad_compression=int8": lambda n: ddp(n) * (8 + 32 / INT8_BLOCK) / 32,  # with the scale of each block
}
FAST = ("--zero=3", 4), ("--pp=N", 2)


def sent_by_real_ranks(report):
    """The bytes of a report that the formulas contain, as gloo sends them."""
    total = 0.0
    for c in report.collectives:
        if c.count == 1 and c.bytes < 1000 * c.ranks:  # the step's numbers, and with experts the routers'
            continue
        gloo = {"reduce_scatter": 2}.get(c.operation, 1)
        total += gloo * c.sent
    return total


@pytest.mark.parametrize(
    ("flags", "n"),
    [
        pytest.param(flags, n, marks=[] if (flags, n) in FAST else pytest.mark.slow)
        for flags in FORMULAS
        for n in (2, 4)
    ],
)
def test_collectives_are_those_of_the_formulas(zygote, work, flags, n):
    accumulation = MICRO_STEPS * (1 if flags in ("--tp=N", "--pp=N", "--cp=N") else n)
    args = [*MODEL, *flags.replace("=N", f"={n}").split(), f"--gradient_accumulation_steps={accumulation}"]
    # some formulas are a mean over the ranks
    ranks = range(n) if "pp" in flags or "ep=" in flags else [0]
    sent = [sent_by_real_ranks(run_dry(zygote, work, n, args, rank)) for rank in ranks]
    assert sum(sent) / len(sent) == pytest.approx(FORMULAS[flags](n), rel=2e-3)


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
