"""Dry runs: one rank of many, without the others. What it counts is what real ranks take and send."""

import json
import re
import signal
from collections import namedtuple

import pytest
from edits import apply, diff_of, documented
from runs import REPO, TINY, train_defaults

from isogpt.speed import dry_run
from isogpt.training.settings import check_training

# a model whose activations and parameters take alike
L, C, T, V, ROWS = 4, 128, 256, 256, 4
SMALL = [f"--n_layer={L}", "--n_head=4", f"--n_embd={C}", f"--block_size={T}", f"--vocab_size={V}"]
SMALL += [f"--batch_size={ROWS}", "--dtype=float32", "--device=cpu"]
# a dry run reads no data
NO_DATA = ["--dataset=not_there:1,nor_there:2", "--data_order=documents"]
MEMORY = r"^(weights|gradients|optimizer|activations|total) +([\d.e-]+) +([\d.e-]+)$"
PARTS = ("weights", "gradients", "optimizer")
COLLECTIVE = r"^(\w+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)  ([\w ]+)$"


Row = namedtuple("Row", "operation ranks count bytes sent axes")
Report = namedtuple("Report", "counted collectives text")


def run_dry(zygote, work, ranks, args, rank=0, repo=REPO):
    """
    Run train.py as one of so many ranks: {part: GB} counted, near the prediction, and the collectives.
    """
    args = [*SMALL, *NO_DATA, *args, f"--dry_run_ranks={rank}/{ranks}", "--out_dir=dry"]
    text = zygote.start(args, work, repo=repo).wait(120).text()
    memory, collectives = re.findall(MEMORY, text, re.M), []
    assert len(memory) == 5 and not (work / "dry").exists(), text
    for operation, *numbers, axes in re.findall(COLLECTIVE, text, re.M):
        collectives.append(Row(operation, *(int(number.replace(",", "")) for number in numbers), axes))
    counted, predicted = ({row[0]: float(row[i]) for row in memory} for i in (1, 2))
    assert collectives and predicted["total"] == pytest.approx(counted["total"], rel=0.15), text
    return Report(counted, collectives, text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dry_run_ranks": "1"}, "set --dry_run_ranks=0/2"),
        ({"dry_run_ranks": "4/4"}, "set --dry_run_ranks=4/5"),
        ({"dry_run_ranks": "3/"}, "choose from ranks such as 8, and 3/8 for rank 3 of 8"),
        ({"dry_run_ranks": "4", "init_from": "resume"}, "set --init_from=scratch"),
        ({"dry_run_ranks": "4", "shares": "auto"}, "set --shares=equal"),
        ({"dry_run_ranks": "4", "dataset": "not_there"}, "set --vocab_size=50304"),
    ],
)
def test_what_cannot_be_dry_run_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        dry_run.start(check_training(train_defaults(**settings)), "train.py")


# a user's optimizer, which says that the first of two steps has been counted
BEGUN = """
import os, torch
class Begun(torch.optim.SGD):
    def step(self):
        if self.param_groups[0]["params"][0].numel() > 1000:  # else train.py tries it
            os.write(2, b"begun")
        super().step()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_dry_run_at_once(zygote, work, name):
    (work / "begun.py").write_text(BEGUN)
    args = [*SMALL, *NO_DATA, "--dry_run_ranks=2", "--gradient_accumulation_steps=60", "--out_dir=dry"]
    run = zygote.start([*args, "--optimizer=begun.py:Begun"], work, env={"TMPDIR": str(work)})
    assert run.until(lambda text: "begun" in text)
    run.kill(sig=getattr(signal, name))
    run.wait(ok=False)
    assert run.codes == [128 + getattr(signal, name)] and "Traceback" not in run.text()
    assert not list(work.glob("isogpt-dry-run-*"))


# ------------------------------------------------------------------------------------------------------------
# what is counted


# What each rank sends per step, by formula. Everything is divisible by 4, so no part is padded. What is sent
# in each of two micro-steps counts twice.
MICRO_STEPS = 2
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


def fsdp(n, of_gradients=1, gathers=2):
    """
    In each micro-step the parameters are gathered, with zero 3 those of the blocks again in the backward, and
    the gradients are reduced.
    """
    gathered = all_gather(n, gathers * L * BLOCK + OTHERS)
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
    over all. Tokens are routed evenly.
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
    "--grad_sync=every": lambda n: MICRO_STEPS * ddp(n),
    "--zero=1": lambda n: 1.5 * ddp(n),  # each rank also sends the parameters that it has updated
    "--zero=2": lambda n: fsdp(n, gathers=1),
    "--zero=3 --grad_sync=last": lambda n: fsdp(n, of_gradients=1 / MICRO_STEPS),
    "--exact=True": lambda n: 2 * ddp(n),  # 64-bit integers
    "--exact=True --zero=3": lambda n: fsdp(n, of_gradients=2),
    "--grad_compression=fp16": lambda n: ddp(n) / 2,
    "--grad_compression=int8": lambda n: ddp(n) * (8 + 32 / 256) / 32,  # with the scale of each block
}
FAST = ("--zero=3", 4), ("--pp=N", 2), (f"{OF_EXPERTS}N", 2)


def sent_by_real_ranks(report):
    """The bytes of a report that the formulas contain, as gloo sends them."""
    total = 0.0
    for c in report.collectives:
        if c.count > 1 or c.bytes >= 1000 * c.ranks:  # else the step's numbers, and the routers'
            total += c.sent * (2 if c.operation == "reduce_scatter" else 1)
    return total


SLOW = [pytest.param(flags, 4, marks=pytest.mark.slow) for flags in FORMULAS if (flags, 4) not in FAST]


@pytest.mark.parametrize(("flags", "n"), [*FAST, *SLOW])
def test_collectives_are_those_of_the_formulas(zygote, work, flags, n):
    accumulation = MICRO_STEPS * (1 if flags in ("--tp=N", "--pp=N", "--cp=N") else n)
    args = [*flags.replace("=N", f"={n}").split(), f"--gradient_accumulation_steps={accumulation}"]
    ranks = range(n) if "pp" in flags else [0]  # the formula is a mean over the ranks
    sent = [sent_by_real_ranks(run_dry(zygote, work, n, args, rank)) for rank in ranks]
    assert sum(sent) / len(sent) == pytest.approx(FORMULAS[flags](n), rel=2e-3)


# train.py, with the allocations of torch's allocator in a trace
TRACED = f"""
import os, runpy, sys
from torch.profiler import ProfilerActivity, profile
sys.path.insert(0, {str(REPO)!r})
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    runpy.run_path({str(REPO / "train.py")!r}, run_name="__main__")
profiler.export_chrome_trace(f"trace{{os.environ['RANK']}}.json")
"""


def peak_of(trace):
    """The GB at the peak of a process, with what threads have freed that are not in the trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    return max(e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]") / 1e9


OPTIONS = {
    "": 2,
    "--optimizer=muon --arch=nanochat --vocab_size=8192": 2,
    "--zero=1 --grad_sync=every": 2,
    "--pp=2 --pp_schedule=zbv": 2,
    "--exact=True": 2,
    "--grad_compression=int8": 2,
    "--zero=3 --dp_replicate=2 --optimizer=muon": 4,
    "--activation_checkpointing=selective --dtype=bfloat16": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", OPTIONS)
def test_memory_is_that_of_real_ranks(zygote, work, flags):
    """Of ranks that hold as much, the smallest peak is compared."""
    n, args = OPTIONS[flags], [*flags.split(), "--gradient_accumulation_steps=4"]
    report = run_dry(zygote, work, n, args)
    (work / "traced.py").write_text(TRACED)
    real = [*TINY, *SMALL, *args, "--max_iters=2", "--eval_iters=1", "--save_checkpoint=False"]
    zygote.start(real, work, n, script="traced.py", repo=work).wait(180)
    peak = min(peak_of(work / f"trace{rank}.json") for rank in range(n))
    assert report.counted["total"] == pytest.approx(peak, rel=0.02)
    held, whole = re.search(r"this rank holds ([\d.]+) GB of about ([\d.]+) GB$", report.text, re.M).groups()
    if not flags:  # a rank holds the whole checkpoint
        assert float(held) == pytest.approx(float(whole), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--zero=3 --dtype=bfloat16", "--pp=2 --tp=2 --zero=3"])
@pytest.mark.parametrize("mode", ["full", "every:2"])
def test_memory_of_combinations_is_near_the_prediction(zygote, work, layout, mode):
    """The others that are predicted are in other tests."""
    args = [*layout.split(), f"--activation_checkpointing={mode}", "--gradient_accumulation_steps=4"]
    run_dry(zygote, work, 4, args)


@pytest.mark.slow
def test_weights_gradients_and_moments_are_divided_by_the_ranks(zygote, work):
    """With zero 1 the moments, with zero 2 and 3 all: between steps, ZeRO-2 holds shards too."""
    whole, *divided = (run_dry(zygote, work, 4, [f"--zero={zero}"]).counted for zero in range(4))
    size = (L * BLOCK + OTHERS) / 1e9
    assert [whole[name] for name in PARTS] == pytest.approx([size, size, 2 * size], rel=0.01)
    shares = [[round(counted[name] / whole[name], 2) for name in PARTS] for counted in divided]
    assert shares[0][:2] == [1, 1] and shares[0][2] < 0.45 and shares[1:] == [[0.25] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize("heading", [name for name, text in documented().items() if diff_of(text)])
def test_the_memory_of_a_documented_edit_is_predicted(zygote, work, heading):
    args = ["--vocab_size=8192", "--dtype=bfloat16", "--gradient_accumulation_steps=4"]
    run_dry(zygote, work, 2, args, repo=apply(heading, work / "copy"))


@pytest.mark.slow
def test_1024_ranks_with_pipelines_tensor_parallelism_and_shards(zygote, work):
    args = ["--pp=8", "--tp=8", "--zero=3", "--n_layer=16", "--n_head=8", "--gradient_accumulation_steps=256"]
    report = run_dry(zygote, work, 1024, args, rank=1023)
    assert "rank 1023 of 1,024 (pp 8 x dp_shard 16 x tp 8)" in report.text
    expected = {("all_gather", 16, "dp_shard"), ("reduce_scatter", 16, "dp_shard")}
    expected |= {("all_gather", 8, "tp"), ("send", 8, "pp")}
    assert {(c.operation, c.ranks, c.axes) for c in report.collectives} >= expected
