"""
The checks of gpu_check.py that one process computes alone, and what gpu_check.py reads with torch. Each runs
in a separate process, in which no other check has initialized CUDA, allocated memory or compiled.

    python measure/gpu_parts.py ceilings --device=cuda

Each result is printed as a line of JSON.
"""

import gzip
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

from gpu_check import MARK, ROOT, Line, bounded, failed

sys.path.insert(0, str(ROOT))

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from isogpt.common.files import read_records
from isogpt.launch.together import gather_numbers
from isogpt.nn import generation, kernels
from isogpt.nn.counts import count_on_meta
from isogpt.parallel import compilation
from isogpt.parallel.plan import plan_of
from isogpt.speed import memory
from isogpt.speed.devices import known_gpu
from isogpt.speed.profiling import PROFILE_STEPS
from isogpt.training import optim
from isogpt.training.settings import model_args_of
from isogpt.training.step_numbers import StepNumbers
from model import GPT, GPTConfig


def milliseconds(device: torch.device, statement: str, **names: object) -> float:
    """The median time of a statement."""
    on_gpu = device.type == "cuda"
    names |= {"torch": torch, "wait": torch.cuda.synchronize if on_gpu else int}
    timer = Timer(f"{statement}; wait()", globals=names, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.5 if on_gpu else 0.05).median * 1e3


def facts(device: torch.device) -> dict:
    """The name and the number of the devices, and torch's version."""
    name, count = "CPU", 1
    if device.type == "cuda":
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name() if count else ""
    return {"name": name, "count": count, "torch": torch.__version__}


def of_sheet(share: float) -> str:
    """The share of a data sheet's figure; '' without a data sheet."""
    return "" if math.isnan(share) else f", {share:.0%} of the data sheet"


def ceilings(device: torch.device) -> Iterator[Line]:
    """What the device reaches: a copy, and large matmuls by dtype."""
    on_gpu = device.type == "cuda"
    sheet = known_gpu(torch.cuda.get_device_name()) if on_gpu else None
    length, n = (2**30, 8192) if on_gpu else (2**20, 256)
    a = torch.empty(length, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    gb_per_s = 2 * length / milliseconds(device, "b.copy_(a)", a=a, b=b) / 1e6
    share = gb_per_s * 1e9 / sheet.bytes_per_s if sheet and sheet.bytes_per_s else math.nan
    text, basis = f"{gb_per_s:,.0f} GB/s{of_sheet(share)}", "H200: 86%"
    yield bounded(share > 0, "copy, bytes read and written", share, text, basis, least=0.8)
    torch.set_float32_matmul_precision("high")
    one, scaled = torch.ones((), device=device), "f(x, y.t(), one, one, out_dtype=torch.bfloat16)"
    for name, dtype, code, least, basis in (
        ("bfloat16", torch.bfloat16, "x @ y", 0.6, "H200: 67%"),
        ("tf32", torch.float32, "x @ y", 0.3, "H200: 36%"),
        ("fp8", torch.float8_e4m3fn, scaled, 1.0, "predicted from bfloat16"),
    ):
        x, y = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        ms = milliseconds(device, code, f=torch._scaled_mm, x=x, y=y, one=one)
        flops = 2 * n**3 / ms * 1e3
        share = flops / sheet.matmul if sheet else math.nan
        text = f"{flops / 1e12:,.0f} TFLOP/s{of_sheet(share)}"
        yield bounded(share > 0, f"matmul of {n}^3 in {name}", share, text, f"of bfloat16; {basis}", least)


def gradients(device: torch.device) -> Iterator[Line]:
    """Compiled gradients against eager ones, for each architecture."""
    models = ({}, {"arch": "nanochat"}, {"arch": "llama", "n_kv_head": 2, "n_expert": 4})
    for args in models if device.type == "cuda" else models[:1]:
        what = f"compiled gradients, {args or 'gpt2'}"
        try:
            errors = gradient_errors(device, args)
        except Exception as e:  # also of a compiler: the other models are still compared
            yield failed(what, e)
            continue
        worst = max(errors, key=errors.get)
        yield bounded(True, what, errors[worst], f"{errors[worst]:.1e} ({worst})", "H200: 8e-7", most=1e-5)


def gradient_errors(device: torch.device, args: dict) -> dict[str, float]:
    """The relative difference between compiled and eager gradients by parameter, with a loss in chunks."""
    on_gpu = device.type == "cuda"
    vocab = 50304 if on_gpu else 512
    shape = dict(block_size=256, vocab_size=vocab, n_layer=2, n_head=4, n_embd=256)
    torch.set_float32_matmul_precision("highest")
    chunks = (1, 128 * vocab, 128 * vocab)
    ids = torch.randint(vocab, (4, 256), generator=torch.Generator().manual_seed(0)).to(device)
    both = []
    for is_compiled in (False, True):
        model = GPT(GPTConfig(**shape, **args), seed=1).to(device)
        model.reset_routing(device)
        if is_compiled:
            torch._dynamo.reset()
            options = {} if on_gpu else {"backend": "aot_eager"}
            compilation.compile_parts(model, by_block=False, **options)
        with patch.object(kernels, "logits_at_once", lambda *_: chunks):
            model(ids, ids, 1024.0)[1].backward()
        both.append({name: p.grad for name, p in model.named_parameters()})
    eager, compiled = both
    return {
        name: ((compiled[name] - g).norm() / g.norm()).item() if compiled[name] is not None else math.inf
        for name, g in eager.items()
    }


def generate(device: torch.device) -> Iterator[Line]:
    """Tokens/s of sample.py without and with --compile, after a first generation that compiles."""
    on_gpu = device.type == "cuda"
    shape = {} if on_gpu else dict(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)
    model = GPT(GPTConfig(**shape)).to(device)
    generation.prepare(model.eval(), torch.bfloat16)
    tokens = 256 if on_gpu else 16
    prompt = torch.zeros(8, 1, dtype=torch.long, device=device)
    texts, speeds, note = [], [], ""
    name = f"sampling 8 x {tokens} tokens"
    for is_compiled in (False, True):
        if is_compiled:
            note = compilation.compile_generation(model, device, splits_model=False)
        began = time.perf_counter()
        model.generate(prompt, tokens, seed=1)
        first, began = time.perf_counter() - began, time.perf_counter()
        texts.append(model.generate(prompt, tokens, seed=1).tolist())
        speeds.append(8 * tokens / (time.perf_counter() - began))
        what = f"{name}, {'with' if is_compiled else 'without'} --compile"
        yield Line(what, "", note or f"{speeds[-1]:,.0f} tokens/s; the first time {first:.1f} s")
    ratio = 0.0 if note else speeds[1] / speeds[0]  # a failed compilation also gives a note
    yield bounded(on_gpu, f"{name}: --compile / eager", ratio, f"{ratio:.1f}", "H200: 5.2", least=3)
    same = sum(a == b for one, two in zip(*texts, strict=True) for a, b in zip(one, two, strict=True))
    yield Line(f"{name}: equal tokens", "", f"{same / (8 * (tokens + 1)):.0%}")


def chunked_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss as it is computed on a GPU that is too small for all logits."""
    _, *per_chunk = kernels.logits_at_once(x.device.type == "cpu", x.itemsize, len(weight))
    return kernels.ChunkedLoss.apply(x.flatten(0, 1), weight, targets.flatten(), 0.0, *per_chunk)


def operators(device: torch.device) -> Iterator[Line]:
    """The loss, attention by back end, and the optimizer, each alone."""
    on_gpu, dtype = device.type == "cuda", torch.bfloat16
    rows, vocab, width, heads = (16 * 1024, 50304, 768, 12) if on_gpu else (256, 512, 64, 2)
    x = torch.randn(1, rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (1, rows), device=device)
    loss = {"x": x, "weight": weight, "targets": targets}
    ways = {"plain": kernels.summed_loss, "in chunks": chunked_loss, "deterministic, in chunks": chunked_loss}
    ways |= {"compiled": torch.compile(kernels.summed_loss, dynamic=False)} if on_gpu else {}
    texts = []
    for name, f in ways.items():
        torch.use_deterministic_algorithms("deterministic" in name, warn_only=True)
        texts.append(f"{name} {milliseconds(device, 'f(x, weight, targets).backward()', f=f, **loss):.2f}")
    torch.use_deterministic_algorithms(False)
    yield Line(f"loss of {rows:,} x {vocab:,}, ms", "", ", ".join(texts))

    length = 1024 if on_gpu else 64
    shape = (rows // length, heads, length, width // heads)
    q = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    attention = torch.nn.functional.scaled_dot_product_attention
    ways, times = {"PyTorch's choice": nullcontext()}, {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        ways[name.lower().partition("_")[0]] = sdpa_kernel(getattr(SDPBackend, name))
    code = "f(q, q, q, is_causal=True).sum().backward()"
    for name, only in ways.items():
        with only, suppress(RuntimeError):  # a back end that does not run here
            times[name] = milliseconds(device, code, q=q, f=attention)
    text = ", ".join(f"{name} {times[name]:.2f}" if name in times else f"{name} n/a" for name in ways)
    yield Line(f"attention, {rows // length} x {heads} heads x {length}, ms", "", text)
    fastest = min(times, key=times.get)
    ratio = times["PyTorch's choice"] / times[fastest]
    what = "attention: PyTorch's choice / the fastest back end"
    yield bounded(on_gpu, what, ratio, f"{ratio:.2f} ({fastest})", "H200: 1.0", most=1.1)

    # with these values, the output is the attention weights, of which 0.1 are dropped
    q, values = (torch.zeros(64, 64, heads, 64, device=device, dtype=dtype) for _ in "qv")
    values += torch.eye(64, device=device, dtype=dtype)[:, None]
    weights = kernels.causal_attention(q, q, values, 0.1).unflatten(-1, (heads, 64)).movedim(2, 1)
    dropped = 1 - (weights != 0).sum().item() / (64 * heads * 64 * 65 / 2)
    expected, is_near = "0.1, at most 0.005 beside", abs(dropped - 0.1) <= 0.005
    yield Line("attention weights that dropout 0.1 drops", expected, f"{dropped:.4f}", is_near)

    shape = {} if on_gpu else dict(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)
    model = GPT(GPTConfig(**shape)).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), device.type)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    ms = milliseconds(device, "optimizer.step()", optimizer=optimizer)
    moved = 28 * sum(p.numel() for p in model.parameters()) / ms / 1e6
    yield Line("AdamW", "", f"{ms:.2f} ms, {moved:,.0f} GB/s (H200: 2,958)")
    numbers = StepNumbers(**dict.fromkeys(StepNumbers._fields, torch.ones((), device=device)))
    gathered, said = gather_numbers(numbers, device), "does not wait"
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")  # an operation that waits for the GPU raises
    try:
        optim.clip_and_step([optimizer], scaler, gathered, 0.5, skips_spikes=True)
    except RuntimeError as e:
        said = str(e)
    if on_gpu:
        torch.cuda.set_sync_debug_mode("default")
    yield Line("clipping and AdamW: the host", "does not wait", said, said == "does not wait")


def memory_use(device: torch.device, run: Path) -> Iterator[Line]:
    """The memory that memory.py estimates for a run of train.py, and what the run measured."""
    records = list(read_records(run / "metrics.jsonl"))
    start = next(r for r in records if r.get("event") == "start")
    measured = max(r["memory_gb_max"] for r in records if "step_ms" in r)
    c = start["config"]
    model_args = asdict(GPTConfig(**model_args_of(c, c["vocab_size"])))
    counts = count_on_meta(GPT, model_args)
    plan = plan_of(c, 1, model_args=model_args, counts=counts, dtype=start["dtype"], device_type=device.type)
    estimated = memory.memory_estimate(plan)["total"]
    ratio, text = estimated / measured, f"{estimated / measured:.2f}: {measured:.2f} GB"
    what = f"memory at micro-batch {c['batch_size']}: estimated / measured"
    yield bounded(device.type == "cuda", what, ratio, text, "predicted", 0.85, 1.15)


# parts of a step by the names of their kernels
PARTS_OF_A_STEP = {
    "attention": r"flash|fmha|sdpa|attention",
    "matmul": r"gemm|nvjet|cutlass|cublas|wgmma|xmma",
    "triton": r"^triton_",
    "optimizer": r"multi_tensor|adam",
    "copies": r"memcpy|memset",
}


def traced(device: torch.device, run: Path, *out: Path) -> Iterator[Line]:
    """The kernels of a step, by part, from a run's trace, which is kept in `out` with the largest kernels."""
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    sums, by_name = dict.fromkeys((*PARTS_OF_A_STEP, "other"), 0.0), {}
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        matches = (p for p, names in PARTS_OF_A_STEP.items() if re.search(names, e["name"], re.IGNORECASE))
        sums[next(matches, "other")] += e["dur"] / 1e3 / PROFILE_STEPS
        count, ms = by_name.get(e["name"], (0, 0.0))
        by_name[e["name"]] = count + 1, ms + e["dur"] / 1e3 / PROFILE_STEPS
    total, text = sum(sums.values()), ", ".join(f"{part} {ms:.2f}" for part, ms in sums.items())
    basis, text = "H200: 30.4 to 31.4; H100: 31.5 predicted", f"{total:.2f}: {text}"
    judged = device.type == "cuda" and re.search("H[12]00", torch.cuda.get_device_name()) is not None
    yield bounded(judged, "kernels of a step, ms", total, text, basis, most=33)
    largest = sorted(by_name.items(), key=lambda item: -item[1][1])[:60]
    rows = [f"{ms:9.4f} ms {count / PROFILE_STEPS:7.1f} {name[:150]}" for name, (count, ms) in largest]
    for folder in out:
        (folder / ".kernels.txt").write_text("\n".join(rows) + "\n")
        (folder / ".kernels.txt").rename(folder / "kernels.txt")
        with open(run / "trace.json", "rb") as whole, gzip.open(folder / ".trace.json.gz", "wb", 5) as packed:
            shutil.copyfileobj(whole, packed)
        (folder / ".trace.json.gz").rename(folder / "trace.json.gz")


PARTS = {f.__name__: f for f in (ceilings, gradients, generate, operators, memory_use, traced)}

if __name__ == "__main__":
    name, *folders, device = sys.argv[1:]
    device = torch.device(device.partition("=")[2])
    if name == "facts":
        print(MARK + json.dumps(facts(device)), flush=True)
    else:
        for line in PARTS[name](device, *map(Path, folders)):
            print(MARK + json.dumps(asdict(line)), flush=True)
