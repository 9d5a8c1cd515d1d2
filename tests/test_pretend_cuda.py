"""
The scripts on a pretended GPU, see pretend_cuda/README.md. A layout that sends, waits or computes in a
different way belongs in a case of this file. A case may have several, since each wait is counted with its
place.
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pretend_cuda.cuda_guard import missing
from runs import REPO, TINY, Zygote, column, records, same, start_faulty, write_mixture

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "not skipped")

# the step whose waits are counted: no evaluation, nothing saved unless the case says so. The numbers of the
# first two steps are read at once, and those of the last before the end
STEP = "3"
SHORT = [*TINY, "--max_iters=4", "--eval_iters=1"]
ON_GPU = ["--device=auto", "--compile=False", "--dtype=tf32"]  # tf32 has the bits of float32 here
# after a config, to shrink it
SHRUNK = " ".join([*SHORT, *ON_GPU, "--dtype=auto", "--wandb_log=False"])
# settings that a curve depends on
OF_A_MODEL = ("--arch", "--optim", "--muon", "--n_", "--bias", "--data", "--max_")
T4, A100, H100 = "7.5", "8.0", "9.0"

EXACT = 1e-4  # how far losses may be from the CPU's in float32
HALF = 0.03  # in bfloat16 and float16
NEAR = 0.3  # with gradients that are compressed, or weights that are averaged


@dataclass(frozen=True)
class Case:
    """
    A run of train.py. Without a limit, which dropout needs, the losses are not compared.

    Args:
        waits: how often the host waits for the GPU in a step: once where it reads the numbers from which all
            ranks decide.
        is_late: whether these are the numbers of the step before, so that the GPU computes meanwhile.
    """

    flags: str
    processes: int = 1
    limit: float | None = EXACT
    gpu: str = H100
    waits: int = 1
    is_late: bool = True
    marks: tuple = field(default=(pytest.mark.slow,))


def daily(*args, **options):
    """A case of the quick tests."""
    return Case(*args, **options, marks=())


MUON = "--arch=nanochat --optimizer=muon --muon_lr=0.005"
WHOLE = "--exact=True --batch_size=2 --gradient_accumulation_steps=4"
# FSDP waits for the copy of each gradient to the CPU, and the host for the scale of the loss in float16
OFFLOAD, OFFLOAD_SCALED = 16, 19
# one for the number of tokens for other ranks in each of two layers, which the all-to-all needs on the CPU
TOKENS = 3
# PyTorch's hook waits once; in the first compressed step, it draws the matrices on the CPU
POWERSGD = 2
# sums and maxima are read at once; with cpu_offload, the norms of three kinds go to the GPU
STATISTICS, OFFLOAD_STATISTICS = 3, 22
CASES = {
    # precision
    "plain": daily(""),
    "bf16": daily("--dtype=auto", limit=HALF, gpu=A100),
    "fp16": daily("--dtype=auto", limit=HALF, gpu=T4),
    # the configs of docs/getting-started.md on Colab and Kaggle, and one that sets a stream in bfloat16
    "shakespeare T4": daily(f"config/train_shakespeare_char.py {SHRUNK}", limit=None, gpu=T4),
    "2 shakespeare T4": Case(f"config/train_shakespeare_char.py {SHRUNK}", 2, None, T4),
    "gpt2 T4": Case(f"config/train_gpt2.py {SHRUNK}", limit=HALF, gpu=T4),
    "2 gpt2 T4": daily(f"config/train_gpt2.py {SHRUNK}", 2, HALF, T4),
    "gpt2_fast T4": Case(f"config/train_gpt2_fast.py {SHRUNK}", limit=None, gpu=T4),
    "deterministic dropout": daily("--deterministic=True --dropout=0.1", limit=None),
    # one process, sharded
    "zero 3": daily("--zero=3 --activation_checkpointing=every:1"),
    # the CPU, which updates the weights, needs the step's numbers
    "cpu_offload": daily("--zero=2 --cpu_offload=True", waits=OFFLOAD, is_late=False),
    # the update must not change weights that are being copied to the GPU
    "cpu_offload statistics": Case(
        "--zero=3 --cpu_offload=True --stats_interval=1", waits=OFFLOAD_STATISTICS, is_late=False
    ),
    "cpu_offload fp16": Case(
        "--zero=3 --cpu_offload=True --dtype=float16", limit=HALF, gpu=T4, waits=OFFLOAD_SCALED, is_late=False
    ),
    # architectures and optimizers
    "muon": daily(f"{MUON} --skip_steps=spikes"),
    "muon bf16 stream": daily(f"{MUON} --dtype=bfloat16 --residual_dtype=bfloat16", limit=HALF),
    "muon fp16": Case(f"{MUON} --dtype=float16", limit=0.05, gpu=T4),
    "muon zero 3 bf16": Case(f"{MUON} --zero=3 --dtype=bfloat16", limit=HALF),
    "llama gqa": Case("--arch=llama --n_kv_head=1 --activation_checkpointing=selective"),
    "experts": Case("--n_expert=4 --bias=True --deterministic=True"),
    "experts bf16 statistics": daily(
        "--n_expert=4 --dtype=bfloat16 --stats_interval=1", limit=HALF, waits=STATISTICS, is_late=False
    ),
    "experts bf16 A100": Case("--n_expert=4 --dtype=bfloat16", limit=HALF, gpu=A100),
    "exact experts bf16": Case("--exact=True --n_expert=4 --dtype=bfloat16", limit=HALF),
    "an optimizer that reads no numbers": Case("--optimizer=own_optimizers.py:OnDevice", limit=None),
    # the log, checks
    "profile": Case("--profile=True --max_iters=9"),
    "check_ranks": Case("--check_ranks_interval=2", waits=2),  # the step's own numbers too
    "save_interval": Case("--save_interval=1", waits=2, is_late=False),
    # two processes
    "2 ddp": daily("--skip_steps=spikes", 2),
    "2 ddp fp16 hook": Case("--dtype=float16 --grad_compression=fp16", 2, HALF, T4),
    "2 zero 1 whole split": Case("--zero=1 --eval_iters=0 --eval_datasets=tiny", 2),
    "2 zero 3 fp16": daily("--zero=3 --dtype=float16", 2, HALF, T4),
    "2 hsdp statistics": Case(
        "--zero=3 --dp_replicate=2 --stats_interval=1", 2, waits=STATISTICS, is_late=False
    ),
    "2 tp bf16": daily("--tp=2 --dtype=bfloat16", 2, HALF),
    "2 cp statistics": daily("--cp=2 --stats_interval=1", 2, waits=STATISTICS, is_late=False),
    "2 pp bf16 stream": daily("--pp=2 --dtype=bfloat16 --residual_dtype=bfloat16", 2, HALF),
    "2 pp statistics fp16": Case("--pp=2 --stats_interval=1 --dtype=float16", 2, HALF, T4, STATISTICS, False),
    "2 pp gpipe zero 2": Case("--pp=2 --pp_schedule=gpipe --zero=2", 2),
    "2 pp zbv": Case("--pp=2 --pp_schedule=zbv --n_layer=4", 2),
    "2 ep": daily("--n_expert=4 --ep=2", 2, waits=TOKENS),
    "2 ep zero 3": Case("--n_expert=4 --ep=2 --zero=3", 2, waits=TOKENS),
    "2 muon": Case(MUON, 2),
    "2 muon tp statistics": Case(f"{MUON} --tp=2 --stats_interval=1", 2, waits=STATISTICS, is_late=False),
    # errors of a compression, and an average of islands, contain a step whose outcome is known
    "2 int8": Case("--grad_compression=int8", 2, 0.02, is_late=False),
    "2 topk": Case("--grad_compression=topk:0.05", 2, NEAR, is_late=False),
    "2 powersgd": Case("--grad_compression=powersgd:1", 2, NEAR, waits=POWERSGD, is_late=False),
    "2 islands": Case("--islands=2 --local_steps=2", 2, NEAR, waits=2),
    "2 exact": daily(WHOLE, 2),
    "2 exact muon zero 1": Case(f"{MUON} --exact=True --zero=1", 2),
    "2 exact zero 3 fp16": daily("--exact=True --zero=3 --dtype=float16", 2, HALF, T4),
    "2 exact hsdp": Case("--exact=True --zero=3 --dp_replicate=2", 2),
    "2 exact muon pp": Case(f"{MUON} --exact=True --pp=2", 2),
    "2 shares of shards": Case("--shares=auto --dataset=shards:0.7,file:0.3 --data_order=documents", 2),
}


@pytest.fixture(scope="module")
def pretended():
    """Starts runs with pretended GPUs."""
    zygote = Zygote({"PRETEND_CUDA": "loaded", "PYTHONPATH": f"{REPO / 'tests/pretend_cuda'}:{REPO}"})
    yield zygote
    zygote.close()


@pytest.fixture
def curve(trained):
    """The losses of a case's model on the CPU; each is computed once."""

    def losses(case):
        flags = [flag for flag in case.flags.split() if flag.startswith(OF_A_MODEL)]
        return column(trained([*SHORT, *flags]), "loss")

    return losses


def run_pretended(pretended, work, script, args, case, **env):
    """Run a script on the pretended GPUs of a case; returns the run, and what each process reports."""
    report = work / f"report{next(pretended.number)}.jsonl"
    report.touch()
    env |= {"PRETEND_CUDA_REPORT": str(report), "PRETEND_CUDA_DEVICES": str(case.processes)}
    env |= {"PRETEND_CUDA_CAPABILITY": case.gpu}
    args = [str(REPO / script), *args]
    run = pretended.start(args, work, case.processes, "tests/pretend_cuda/run.py", env=env).wait(300)
    return run, [json.loads(line) for line in report.read_text().splitlines()]


def train(pretended, work, case, *more):
    """Run train.py as a case says."""
    if "shards" in case.flags:
        write_mixture(work)
    shutil.copy(REPO / "tests/own_optimizers.py", work)
    args = [*SHORT, *ON_GPU, *case.flags.split(), "--out_dir=out", *more]
    return run_pretended(pretended, work, "train.py", args, case)


@pytest.mark.parametrize("name", [pytest.param(name, marks=case.marks) for name, case in CASES.items()])
def test_a_step_waits_as_often_as_expected_and_has_the_cpus_loss(pretended, work, curve, name):
    case = CASES[name]
    run, reports = train(pretended, work, case)
    assert len(reports) == case.processes and not any(report["problems"] for report in reports), reports
    assert "grad norm nan" not in run.text(), "float16 skips such steps without a word"
    waits = [[row for row in report["waits"] if row[0] == STEP] for report in reports]
    assert max(sum(row[1] for row in rows) for rows in waits) == case.waits, waits
    late = [sum(count for _, count, _, _, is_late in rows if is_late) for rows in waits]
    assert late == [int(case.is_late)] * case.processes, waits
    if case.limit is not None:
        same(column(work / "out", "loss"), curve(case), absolute=case.limit)


def test_a_step_that_a_gpu_leaves_out_is_followed_by_the_cpus_steps(pretended, zygote, work):
    """Also the momentum of Muon stays as it is; the host learns of the step when the next one is launched."""
    args = [*SHORT, *MUON.split(), "--skip_steps=nan", "--max_iters=7", "--weight_decay=50"]
    args.append("--warmup_iters=0")
    faults = {"NAN_BACKWARD": [[3, 0], [5, 0]]}
    start_faulty(zygote, [*args, "--out_dir=cpu"], work, **faults).wait()
    args += [*ON_GPU, "--out_dir=gpu"]
    run_pretended(pretended, work, "tests/faulty_train.py", args, Case(""), FAULTS=json.dumps(faults))
    of_cpu, of_gpu = (column(work / out, "loss") for out in ("cpu", "gpu"))
    assert [*of_gpu] == [0, 1, 2, 4, 6, 7]
    same(of_gpu, of_cpu, absolute=EXACT)
    told = [[r for r in records(work / out) if r.get("event") == "not_finite"] for out in ("cpu", "gpu")]
    (cpu, _), (gpu, _) = told
    assert cpu["windows"] == gpu["windows"] and [*cpu["largest_gradients"]] == [*gpu["largest_gradients"]]


MISTAKES = """
import torch


def error_of(action):
    try:
        action()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing was raised"


x = torch.ones(4, 4, device="cuda")
pinned = torch.zeros(4).pin_memory()
events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
for event in events:
    event.record()
print("devices", error_of(lambda: x + torch.ones(4, 4)))
print("scalar", error_of(lambda: x + torch.tensor(1.0)))
print("numpy", error_of(x.numpy))
print("timing", error_of(lambda: events[0].elapsed_time(events[1])))
early = x.sum().to("cpu", non_blocking=True)
print("early", float(early))
torch.cuda.synchronize()
print("late", float(early), error_of(lambda: events[0].elapsed_time(events[1])))
y = pinned.to("cuda", non_blocking=True)
pinned.fill_(1.0)
torch.cuda.synchronize()
x.sum().item()
torch.use_deterministic_algorithms(True)
print("cumsum", error_of(lambda: x.cumsum(0)))
"""


def test_mistakes_that_a_gpu_punishes_are_found(pretended, work):
    (work / "mistakes.py").write_text(MISTAKES)
    run, (report,) = run_pretended(pretended, work, work / "mistakes.py", [], Case(""))
    text = run.text()
    assert "devices RuntimeError: Expected all tensors to be on the same device" in text
    assert "scalar nothing was raised" in text
    assert "numpy TypeError: can't convert cuda:0" in text
    assert "timing RuntimeError: CUDA error: device not ready" in text
    assert "early nan\nlate 16.0 nothing was raised" in text
    assert "cumsum RuntimeError: aten.cumsum.default does not have a deterministic implementation" in text
    assert "a pinned source of a non_blocking copy was changed" in report["problems"][0]
    assert [row[1] for row in report["waits"] if row[2] == "aten._local_scalar_dense.default"] == [1]


SAMPLES = """
import torch
from pretend_gpu import GPU

from isogpt.nn import generation
from model import GPT, GPTConfig


def generated(model, prompts, tokens):
    before = GPU.waits.total()
    result = model.generate(prompts, tokens, temperature=0.9, top_k=50, top_p=0.9, vocab_size=60, seed=1)
    return result.cpu(), GPU.waits.total() - before


for changes in (dict(), dict(arch="nanochat"), dict(arch="llama", n_kv_head=1, n_expert=4)):
    shape = dict(block_size=32, vocab_size=65, n_layer=1, n_head=2, n_embd=32)
    model, prompts = GPT(GPTConfig(**shape | changes), seed=1).eval(), torch.arange(15).view(3, 5)
    expected, _ = generated(model, prompts, 25)
    generation.prepare(model.to("cuda"), torch.float32)
    (_, few), (tokens, many) = (generated(model, prompts.to("cuda"), n) for n in (5, 25))
    print("same" if torch.equal(tokens, expected) else "different", many - few)
"""


def test_the_host_waits_for_no_token_of_a_sample(pretended, work):
    """In steps of one shape, and the tokens are those of the CPU."""
    (work / "samples.py").write_text(SAMPLES)
    run, (report,) = run_pretended(pretended, work, work / "samples.py", [], Case(""))
    assert run.text().splitlines() == ["same 0"] * 3
    assert not report["problems"]


STOPS = """
import torch

from isogpt.launch.signals import Stop

stop, gpu = Stop(signal=15), torch.device("cuda", 0)
print([number for number in range(1, 25) if stop.in_evaluation(number, gpu, 0.0)])
"""


def test_an_evaluation_on_a_gpu_stops_at_some_micro_batches(pretended, work):
    """Not at each: to ask the other ranks is to wait for the queued work."""
    (work / "stops.py").write_text(STOPS)
    run, _ = run_pretended(pretended, work, work / "stops.py", [], Case(""))
    assert run.text() == "[8, 16, 24]\n"


ATTENDS = f"""
import sys

import torch
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled

from isogpt.nn import kernels


class Watched(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            dropout = args[4] if len(args) > 4 else kwargs["dropout_p"]
            print("attends", dropout > 0, cudnn_sdp_enabled(), flash_sdp_enabled())
        return func(*args, **kwargs or {{}})


Watched().__enter__()
q, cache = torch.zeros(1, 8, 2, 4, device="cuda"), kernels.KVCache(rows=1, size=16)
kernels.causal_attention(q, q, q, 0.0)
kernels.causal_attention(q, q, q, 0.1)
for tokens in (q, q[:, :1], q[:, :1]):
    kernels.causal_attention(tokens, tokens, tokens, 0.0, cache)
__file__ = sys.argv[0] = {str(REPO / "train.py")!r}
exec(compile(open(__file__).read(), __file__, "exec"))
"""


def test_attention_with_dropout_does_not_run_on_cudnn(pretended, work):
    """
    It would drop another share of the weights. Nor does that of single tokens with a growing cache, for each
    length of which cuDNN would make a plan, and that of cp.
    """
    (work / "attends.py").write_text(ATTENDS)
    case = Case("--cp=2 --dropout=0.1", 2)
    args = [*SHORT, *ON_GPU, *case.flags.split(), "--out_dir=out"]
    run, _ = run_pretended(pretended, work, work / "attends.py", args, case)
    lines = re.findall(r"attends (.*)", Path(run.outs[0]).read_text())
    plain, dropout, single = "False True True", "True False True", "False False True"
    assert lines[:5] == [plain, dropout, plain, single, single] and {*lines[5:]} == {plain, dropout}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "cpu_offload", "2 pp gpipe zero 2"])
def test_a_resumed_run_and_its_samples_are_those_of_the_cpu(pretended, work, curve, zygote, name):
    case = CASES[name]
    train(pretended, work, case, "--max_iters=1")
    train(pretended, work, case, "--init_from=resume")
    same(column(work / "out", "loss"), curve(case), absolute=case.limit)
    args = ["--out_dir=out", "--start=A", "--num_samples=2", "--max_new_tokens=20", "--dtype=float32"]
    expected = zygote.start([*args, "--device=cpu"], work, script="sample.py").wait().samples()
    run, reports = run_pretended(pretended, work, "sample.py", args, Case("", case.processes))
    assert Path(run.outs[0]).read_text().startswith(expected)
    assert not any(report["problems"] for report in reports)


@pytest.mark.slow
def test_bench_measures_the_pretended_gpu(pretended, work):
    args = ["--dataset=tiny", "--n_layer=1", "--n_embd=24", "--block_size=16", "--steps=6", *ON_GPU]
    # it launches train.py, which imports torch
    run, _ = run_pretended(pretended, work, "bench.py", args, Case(""), PRETEND_CUDA="1")
    text = run.text()
    for figure in ("tokens/s", "ms per step", "data wait", "memory, GB", "MFU"):
        assert len(re.findall(rf"^{figure} +[\d.,]+", text, re.M)) == 1, text
