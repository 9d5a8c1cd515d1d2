"""
The scripts on a pretended GPU, and what torch.compile makes of the model on one; see pretend_cuda/README.md.
"""

import re

import pytest
from pretend_cuda.cuda_guard import missing
from pretend_cuda.rehearse import (
    CASES,
    DAILY,
    ON_CPU,
    ON_GPU,
    SHORT,
    WAITS,
    Case,
    curves_on_a_cpu,
    folder_of,
    prepared,
    rehearse,
    start,
    start_case,
    table,
)
from runs import REPO, column

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "not skipped")

OTHERS = [name for name in CASES if name not in DAILY]
MISTAKES = """
import torch


def error_of(action):
    try:
        action()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing was raised"


def copy_late():
    pinned.copy_(x.sum(0).cpu())


x = torch.ones(4, 4, device="cuda")
pinned = torch.zeros(4).pin_memory()
events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
for event in events:
    event.record()
print("mixed", error_of(lambda: x + torch.ones(4, 4)))
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
torch.cuda.set_sync_debug_mode("error")
print("sync", error_of(x.sum().item))
torch.cuda.set_sync_debug_mode("default")
torch.use_deterministic_algorithms(True)
print("cumsum", error_of(lambda: x.cumsum(0)))
"""

SAMPLES = """
import os, sys

sys.path.insert(0, os.environ["PRETEND_CUDA_ROOT"])
import torch

from isogpt.nn import generation
from isogpt.parallel.attach import replace_seams
from model import GPT, GPTConfig


def advance(*args):
    steps.append(1)
    torch.cuda.set_sync_debug_mode("error")
    generation.advance(*args)
    torch.cuda.set_sync_debug_mode("default")


for changes in (dict(), dict(arch="nanochat"), dict(arch="llama", n_kv_head=1), dict(n_expert=4)):
    shape = dict(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
    model, prompts, steps = GPT(GPTConfig(**shape | changes), seed=1).eval(), torch.arange(15).view(3, 5), []
    how = dict(temperature=0.9, top_k=50, top_p=0.9, vocab_size=60, seed=1)
    expected = model.generate(prompts, 20, **how)
    generation.prepare(model.to("cuda"), torch.float32)
    replace_seams(model, advance=advance)
    found = model.generate(prompts.to("cuda"), 20, **how).cpu()
    print("same" if torch.equal(found, expected) else "different", len(steps))
"""


@pytest.fixture(scope="module")
def pretended():
    """Starts runs with pretended GPUs."""
    zygote = prepared()
    yield zygote
    zygote.close()


def assert_rehearsed(pretended, work, names):
    found = dict(rehearse(pretended, work, names, timeout=600))
    wrong = {name: f"{result.wrong} {result.waits}" for name, result in found.items() if result.wrong}
    assert not wrong and found.keys() == set(names), wrong


def test_the_table_of_waits_has_cases_that_exist():
    assert set(WAITS) <= set(CASES) and set(DAILY) <= set(CASES)
    assert all(count != 1 and reason for count, reason in WAITS.values())
    documented = (REPO / "docs" / "benchmarks.md").read_text()
    assert table() in documented, "print it with python tests/pretend_cuda/rehearse.py --table"


def test_mistakes_that_a_gpu_punishes_are_found(pretended, work):
    (work / "mistakes.py").write_text(MISTAKES)
    run, report = start(pretended, work, str(work / "mistakes.py"), [], Case(""))
    text = run.wait().text()
    assert "mixed RuntimeError: Expected all tensors to be on the same device" in text
    assert "scalar nothing was raised" in text
    assert "numpy TypeError: can't convert cuda:0" in text
    assert "timing RuntimeError: CUDA error: device not ready" in text
    assert "early nan\nlate 16.0 nothing was raised" in text
    assert "sync RuntimeError: called a synchronizing CUDA operation" in text
    assert "cumsum RuntimeError: aten.cumsum.default does not have a deterministic implementation" in text
    assert "a pinned source of a non_blocking copy was changed" in report.read_text()


def test_the_host_waits_for_no_token_of_a_sample(pretended, work):
    """In steps of one shape, and the tokens are those of the CPU."""
    (work / "samples.py").write_text(SAMPLES)
    run, report = start(pretended, work, str(work / "samples.py"), [], Case(""))
    assert run.wait().text().splitlines() == ["same 11", *["same 19"] * 2, "same 11"]
    assert '"problems": {}' in report.read_text()


def test_a_step_waits_as_often_as_the_table_says_and_has_the_cpus_loss(pretended, work):
    assert_rehearsed(pretended, work, DAILY)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_every_other_case(pretended, work, processes):
    assert_rehearsed(pretended, work, [name for name in OTHERS if CASES[name].processes == processes])


@pytest.mark.slow
def test_a_resumed_run_and_its_samples_are_those_of_the_cpu(pretended, work):
    names = ["plain", "cpu_offload", "2 zero 3", "2 pp"]
    curves = curves_on_a_cpu(pretended, work, names)
    for name in names:
        start_case(pretended, work, name, "--max_iters=1")[0].wait()
        start_case(pretended, work, name, "--init_from=resume")[0].wait()
        losses = column(work / folder_of(name), "loss")
        assert losses == pytest.approx(curves[()], abs=1e-4), name
    for name, processes in (("plain", 1), ("2_zero_3", 2)):
        args = [f"--out_dir={name}", "--start=A", "--num_samples=2", "--max_new_tokens=20", "--compile=False"]
        expected = pretended.start([*args, *ON_CPU], work, script="sample.py").wait().samples()
        run, report = start(pretended, work, "sample.py", [*args, "--dtype=float32"], Case("", processes))
        assert run.wait().samples() == expected
        assert '"problems": {}' in report.read_text()


@pytest.mark.slow
def test_bench_measures_the_pretended_gpu(pretended, work):
    args = ["--dataset=tiny", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=2"]
    args += ["--steps=6", *ON_GPU]
    run, _ = start(pretended, work, "bench.py", args, Case(""), PRETEND_CUDA="1")
    text = run.wait(300).text()  # it launches train.py, which imports torch
    for figure in ("tokens/s", "ms per step", "data wait", "memory", "MFU"):
        assert len(re.findall(rf"^  {figure} +[\d.,]+", text, re.M)) == 1, text


@pytest.mark.slow
def test_out_of_memory_on_any_rank_ends_all_with_a_message(pretended, work):
    """In the second step, by the error of the allocator, of CUDA, of cuBLAS and of NCCL."""
    for kind, rank, processes in (
        ("cuda", 0, 1),
        ("cublas", 0, 1),
        ("oom", 0, 2),
        ("oom", 1, 2),
        ("nccl", 1, 2),
    ):
        out = f"{kind}{rank}"
        args = [*SHORT, *ON_GPU, f"--out_dir={out}"]
        env = {"PRETEND_CUDA_FAIL": f"{rank}:1:{kind}"}
        run, _ = start(pretended, work, "train.py", args, Case("", processes), **env)
        run.wait(ok=False)
        text = run.text()
        assert all(run.codes), text
        assert len(re.findall(r"^error: (rank \d: )?out of memory", text, re.M)) == 1, text
        assert text.count(f"the next start in {out} uses micro-batches of 2") == 1, text


@pytest.mark.slow
def test_torch_compile_has_no_graph_breaks_on_a_gpu(pretended, work):
    """Forward, backward and evaluation of a small model, without kernels."""
    cases = {"gpt2 bf16": 2, "blocks nanochat bf16": 2, "experts bf16": 2, "experts f32": 2, "cp bf16": 1}
    cases |= {"generate gpt2 bf16": 1, "generate experts bf16": 1}
    args = [*cases, "--graphs_only", "--n_embd=64", "--sm=90"]
    text = pretended.start(args, work, script="tests/pretend_cuda/compile_rehearsal.py").wait(300).text()
    for case, graphs in cases.items():
        assert re.search(rf"^{case} +{graphs} +0 +0 +0 .* ok$", text, re.M), text
