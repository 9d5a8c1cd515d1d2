"""
Check and measure isoGPT on this machine's GPUs. No network and no data are needed.

    python measure/gpu_check.py                   everything, with the GPUs that there are: about 25 minutes
    python measure/gpu_check.py --nanogpt=FOLDER  also nanoGPT's train.py, alternating with ours
    python measure/gpu_check.py --seconds=540     start no check after this time, and end what still runs then
    python measure/gpu_check.py --out=FOLDER      write table.md and table.json there after each line
    python measure/gpu_check.py --device=cpu      the same checks with small sizes, as in the tests
    python measure/gpu_check.py curve resume      only these, in this order

It ends in a table: what was checked, what is expected, what was found, and pass or FAIL. A line without an
expectation is a measurement. The exit status is 1 if a line failed.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
from runs import REPO, TINY, children, column, records, steps_in, tiny_data, wait_for
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from isogpt.launch.together import gather_numbers
from isogpt.nn import generation, kernels
from isogpt.nn.counts import count_on_meta
from isogpt.parallel import compilation
from isogpt.parallel.plan import plan_of
from isogpt.speed import memory
from isogpt.speed.profiling import PROFILE_STEPS
from isogpt.training import optim
from isogpt.training.settings import model_args_of
from isogpt.training.step_numbers import StepNumbers
from model import GPT, GPTConfig


@dataclass
class Line:
    """A line of the table. `passed` is None for a measurement."""

    what: str
    expected: str
    found: str
    passed: bool | None = None


@dataclass
class Place:
    """Where the checks run: a folder with data sets tiny and random, and the devices."""

    folder: Path
    device: str  # cuda or cpu
    processes: int  # for the checks of several processes
    nanogpt: Path | None
    deadline: float = math.inf  # on the clock of time.monotonic; no run continues after it
    out: Path | None = None  # where files of measurements are kept

    @property
    def on_gpu(self) -> bool:
        """Whether sizes are real."""
        return self.device == "cuda"

    def on_cpu(self) -> "Place":
        """The same folder, with a CPU."""
        return replace(self, device="cpu", processes=1)

    def gpt2(self) -> list[str]:
        """GPT-2 124M on random tokens, or a model that a CPU trains in a second."""
        if self.on_gpu:
            return ["--dataset=random", "--vocab_size=50304", "--block_size=1024"]
        return [
            "--dataset=random",
            "--vocab_size=512",
            "--block_size=64",
            "--n_layer=2",
            "--n_head=2",
            "--n_embd=64",
        ]


def command(place: Place, script: str, args: list[str], nproc: int = 1) -> list[str]:
    """The command line of one of our scripts."""
    launcher = [sys.executable]
    if nproc > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [*launcher, str(REPO / script), *args, f"--device={place.device}"]


def run(place: Place, script: str, args: list[str], nproc: int = 1) -> str:
    """Run one of our scripts to its end; returns its output."""
    return output_of(place, command(place, script, args, nproc), place.folder)


def output_of(place: Place, line: list[str], folder: Path) -> str:
    """Run a command in a folder to its end, and return its output. RuntimeError: it fails, or is late."""
    limit = None if place.deadline == math.inf else max(1.0, place.deadline - time.monotonic())
    try:
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as e:
        raise RuntimeError(f"not done at the deadline: {' '.join(line)[-300:]}") from e
    if done.returncode:
        raise RuntimeError(f"{(done.stderr or done.stdout)[-600:]}: {' '.join(line)[-300:]}")
    return done.stdout


def losses_of(place: Place, runs: dict[str, list[str]]) -> dict[str, dict[int, float]]:
    """`losses` of several runs, by name, at the same time: starts take longer than their steps on a GPU."""
    with ThreadPoolExecutor(6 if place.on_gpu else 1) as pool:
        futures = {
            name: pool.submit(losses, place.on_cpu() if name.startswith("cpu") else place, name, args)
            for name, args in runs.items()
        }
        return {name: future.result() for name, future in futures.items()}


def losses(place: Place, name: str, args: list[str], nproc: int = 1) -> dict[int, float]:
    """Train the tiny model for 20 steps; returns its losses by step."""
    base = [*TINY, "--max_iters=19", "--save_checkpoint=False", f"--out_dir={name}"]
    run(place, "train.py", [*base, *args], nproc)
    return column(place.folder / name, "loss")


def distance(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference between two curves."""
    return max(abs(one[step] - other[step]) for step in one)


def at_most(what: str, found: float, limit: float) -> Line:
    """A line that passes if the figure is not above the limit."""
    return Line(what, f"<= {limit:g}", f"{found:.2g}", found <= limit)


def milliseconds(place: Place, statement: str, **names: object) -> float:
    """The median time of a statement."""
    names |= {"torch": torch, "wait": torch.cuda.synchronize if place.on_gpu else int}
    timer = Timer(f"{statement}; wait()", globals=names, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=1.0 if place.on_gpu else 0.05).median * 1e3


# architectures and optimizers besides GPT-2 and AdamW
MODERN = (["--arch=nanochat", "--optimizer=muon", "--muon_lr=0.005"], ["--arch=llama", "--n_kv_head=1"])


# ------------------------------------------------------------------------------------------------------------
# exactness


def curve(place: Place) -> Iterator[Line]:
    """The curve of a CPU in float32, in each dtype, layout and way to recompute that one device has."""
    exact = ["--dtype=float32", "--compile=False"]
    layouts = [["--zero=3"], ["--activation_checkpointing=full"], ["--zero=2", "--cpu_offload=True"]]
    models = MODERN if place.on_gpu else MODERN[:1]
    dtypes = ("tf32", "bfloat16", "float16") if place.on_gpu else ("bfloat16", "float16")
    # the scale of the loss, the gradients and the number that divides them are on different devices
    offloaded = ["--zero=2", "--cpu_offload=True", "--dtype=float16"]
    runs = {"cpu": exact, "f32": exact, "offloaded": [*offloaded, "--compile=False"]}
    runs |= {" ".join(flags): [*exact, *flags] for flags in layouts}
    runs |= {dtype: [f"--dtype={dtype}", "--compile=False"] for dtype in dtypes}
    for i, model in enumerate(models):
        runs |= {f"cpu model {i}": [*model, *exact], f"model {i}": [*model, *exact]}
        runs[f"model {i} --zero=3"] = [*model, *exact, "--zero=3"]
    curves = losses_of(place, runs)
    reference = curves["cpu"]
    what = "float32: losses of 20 steps against the CPU's"
    yield at_most(what, distance(reference, curves["f32"]), 1e-4)
    for flags in layouts:
        yield at_most(f"float32 {' '.join(flags)}", distance(reference, curves[" ".join(flags)]), 1e-4)
    for i, model in enumerate(models):
        for suffix in ("", " --zero=3"):
            difference = distance(curves[f"cpu model {i}"], curves[f"model {i}{suffix}"])
            yield at_most(f"float32 {' '.join(model[:2])}{suffix}", difference, 1e-4)
    for dtype in dtypes:
        yield at_most(f"{dtype}: losses against float32's", distance(reference, curves[dtype]), 0.03)
    what = f"{' '.join(offloaded)}: losses against float32's"
    yield at_most(what, distance(reference, curves["offloaded"]), 0.03)
    memory_gb = max(column(place.folder / "f32", "memory_gb").values())
    yield Line(
        "memory of a tiny model, without the matmul that measures the peak",
        "<= 0.3 GB" if place.on_gpu else "",
        f"{memory_gb:.2f} GB",
        memory_gb <= 0.3 if place.on_gpu else None,
    )


def compiled(place: Place) -> Iterator[Line]:
    """What torch.compile makes of the model."""
    plain = losses(place, "plain", ["--dtype=float32", "--compile=False"])
    for flags in (
        [],
        ["--zero=3"],
        ["--zero=3", "--activation_checkpointing=full"],
        ["--activation_checkpointing=selective"],
        *MODERN,
    ):
        name = f"compile {' '.join(flags)}".strip()
        args = [
            *TINY,
            *flags,
            "--max_iters=19",
            "--save_checkpoint=False",
            "--eval_interval=10",
            "--out_dir=compiled",
        ]
        text = run(place, "train.py", args)
        said = re.findall(r"compile: [^\n]*", text)[-1]
        if not place.on_gpu:
            yield Line(name, "off on a CPU", said, "gains nothing on a CPU" in said)
            return
        yield Line(name, "0 graph breaks", said, ", 0 graph breaks" in said and "failed" not in said)
        if flags in MODERN:
            plain = losses(place, "plain", [*flags, "--dtype=float32", "--compile=False"])
        yield at_most(f"{name}: losses", distance(plain, column(place.folder / "compiled", "loss")), 1e-4)


def cuda_graphs(place: Place) -> Iterator[Line]:
    """A small model whose kernels are launched together, with one micro-batch a step and with several."""
    base = [*TINY, "--dtype=float32", "--batch_size=12", "--max_iters=19", "--eval_interval=10"]
    for accumulation in (1, 4):
        found, ms = [], []
        for value in (False, True):
            args = [*base, f"--gradient_accumulation_steps={accumulation}", f"--cuda_graphs={value}"]
            said = run(place, "train.py", [*args, "--save_checkpoint=False", "--out_dir=graphs"])
            found.append(column(place.folder / "graphs", "loss"))
            ms.append(
                statistics.median(r["step_ms"] for r in records(place.folder / "graphs") if "step_ms" in r)
            )
        name = f"--cuda_graphs --gradient_accumulation_steps={accumulation}"
        yield at_most(f"{name}: losses", distance(*found), 1e-4)
        report = re.findall(r"compile: [^\n]*", said)[-1]
        is_recorded = "0 graph breaks" in report and "without CUDA graphs" not in report
        yield Line(f"{name}: graphs", "all recorded", report, is_recorded or not place.on_gpu)
        yield Line(f"{name}: ms per step, without and with", "", f"{ms[0]:.2f} and {ms[1]:.2f}")


def resume(place: Place) -> Iterator[Line]:
    """A run that is stopped and resumed ends with the bits of a run that is not stopped."""
    ways = (["--dtype=float32"], ["--dtype=bfloat16"], ["--dtype=float32", "--zero=3"])
    with ThreadPoolExecutor(len(ways) if place.on_gpu else 1) as pool:
        counts = pool.map(partial(differences_after_a_stop, place), ways)
        for flags, different in zip(ways, counts, strict=True):
            what, text = f"resume {' '.join(flags)} --dropout=0.1", f"{different} of 20 losses differ"
            yield Line(what, "the same bits", text, different == 0)


def differences_after_a_stop(place: Place, flags: list[str]) -> int:
    """The number of losses that differ between a run that is stopped and resumed and one that is not."""
    args = [*TINY, *flags, "--deterministic=True", "--dropout=0.1", "--save_interval=10"]
    whole, parts = ("-".join((name, *flags)) for name in ("whole", "parts"))
    run(place, "train.py", [*args, "--max_iters=19", f"--out_dir={whole}"])
    run(place, "train.py", [*args, "--max_iters=9", f"--out_dir={parts}"])
    run(place, "train.py", [*args, "--max_iters=19", f"--out_dir={parts}", "--init_from=resume"])
    one, other = (column(place.folder / name, "loss") for name in (whole, parts))
    return sum(one[step] != other[step] for step in one)


def exact(place: Place) -> Iterator[Line]:
    """With exact, layouts compute the same bits: on one device sharded or not, and on several devices."""
    layouts = [(1, "--zero=3")]
    if place.processes > 1:
        layouts += [(place.processes, flags) for flags in ("--zero=0", "--zero=1", "--zero=3")]
    for dtype in ("float32", "bfloat16"):
        args = [
            f"--dtype={dtype}",
            *MODERN[0],
            "--exact=True",
            "--gradient_accumulation_steps=4",
            "--dropout=0.1",
        ]
        reference = losses(place, "exact", args)
        for n, flags in layouts:
            other = losses(place, "exact-other", [*args, flags], n)
            different = sum(reference[step] != other[step] for step in reference)
            yield Line(
                f"exact in {dtype}, {n} processes {flags}",
                "the same bits",
                f"{different} of 20 losses differ",
                different == 0,
            )


def gradients(place: Place) -> Iterator[Line]:
    """Compiled gradients against eager ones, with a loss in chunks, for each architecture."""
    device, vocab = torch.device(place.device), 50304 if place.on_gpu else 512
    shape = dict(block_size=256, vocab_size=vocab, n_layer=2, n_head=4, n_embd=256)
    torch.set_float32_matmul_precision("highest")
    chunks = (1, 128 * vocab, 128 * vocab)
    ids = torch.randint(vocab, (4, 256), generator=torch.Generator().manual_seed(0)).to(device)
    for args in ({}, {"arch": "nanochat"}, {"arch": "llama", "n_kv_head": 2, "n_expert": 4}):
        found = []
        for is_compiled in (False, True):
            model = GPT(GPTConfig(**shape, **args), seed=1).to(device)
            model.reset_routing(device)
            if is_compiled:
                torch._dynamo.reset()
                options = {} if place.on_gpu else {"backend": "aot_eager"}
                compilation.compile_parts(model, by_block=False, **options)
            with patch.object(kernels, "logits_at_once", lambda *_: chunks):
                model(ids, ids, 1024.0)[1].backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
        eager, compiled = found
        errors = {
            name: ((compiled[name] - g).norm() / g.norm()).item() if compiled[name] is not None else math.inf
            for name, g in eager.items()
        }
        worst = max(errors, key=errors.get)
        text = f"{errors[worst]:.1e} ({worst})"
        yield Line(f"compiled gradients, {args or 'gpt2'}", "<= 1e-5", text, errors[worst] <= 1e-5)


# ------------------------------------------------------------------------------------------------------------
# speed and memory


def ceilings(place: Place) -> Iterator[Line]:
    """What the device reaches: a copy, and large matmuls by dtype."""
    device, n, length = (
        torch.device(place.device),
        8192 if place.on_gpu else 256,
        2**30 if place.on_gpu else 2**20,
    )
    a = torch.empty(length, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    ms = milliseconds(place, "b.copy_(a)", a=a, b=b)
    yield Line("copy, bytes read and written", "", f"{2 * length / ms / 1e6:,.0f} GB/s")
    for name, dtype, precision in (
        ("bfloat16", torch.bfloat16, "high"),
        ("float16", torch.float16, "high"),
        ("tf32", torch.float32, "high"),
        ("float32", torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        x, y = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        ms = milliseconds(place, "x @ y", x=x, y=y)
        yield Line(f"matmul {n} x {n} x {n} in {name}", "", f"{2 * n**3 / ms / 1e9:,.0f} TFLOP/s")
    torch.set_float32_matmul_precision("highest")


def speed(place: Place) -> Iterator[Line]:
    """
    Tokens/s and MFU of GPT-2 124M by micro-batch, the split of the best one's step, and memory against
    estimates.
    """
    sizes = "16,64" if place.on_gpu else "2,4"
    base = [*place.gpt2(), "--gradient_accumulation_steps=1", "--steps=10"]
    base += ["--dtype=bfloat16"] if place.on_gpu else []
    run(place, "bench.py", [*base, f"--sweep=batch_size:{sizes}", "--json_path=sweep.json"])
    sweep = [r for r in json.loads((place.folder / "sweep.json").read_text())["sweep"] if "problem" not in r]
    for r in sweep:
        mfu = "n/a" if r["mfu"] is None else f"{r['mfu']:.1%}"
        yield Line(
            f"GPT-2 124M, micro-batch {r['point']['batch_size']}",
            "",
            f"{r['tokens_per_s']:,.0f} tokens/s, MFU {mfu}, {r['memory_gb']['max']:.2f} GB",
        )
    best = max(sweep, key=lambda r: r["tokens_per_s"])
    run(place, "bench.py", [*base, f"--batch_size={best['point']['batch_size']}", "--json_path=report.json"])
    report = json.loads((place.folder / "report.json").read_text())["report"]
    modern = ["--arch=nanochat", "--optimizer=muon", f"--batch_size={best['point']['batch_size']}"]
    run(place, "bench.py", [*base, *modern, "--json_path=modern.json"])
    spans = json.loads((place.folder / "modern.json").read_text())["report"]["run"]["spans_ms"]
    ms = {part: spans[part]["mean"] for part in ("forward", "backward", "optimizer")}
    share = ms["optimizer"] / sum(ms.values())
    yield Line(
        "nanochat with Muon: the optimizer's share of the step",
        "<= 15%",
        f"{share:.1%}",
        share <= 0.15 if place.on_gpu else None,
    )
    split = ", ".join(
        f"{part} {ms['mean']:.2f}" for part, ms in report["split_ms"].items() if ms["mean"] is not None
    )
    yield Line("its step in ms", "", f"{report['run']['step_ms']['mean']:.2f}: {split}")
    if place.on_gpu:
        mfu = best["mfu"] or 0.0  # n/a if it is above 100%
        yield Line("MFU at the best micro-batch", ">= 45%", f"{mfu:.1%}", mfu >= 0.45)
        for r in sweep:
            estimated, measured = estimate(r), r["memory_gb"]["max"]
            yield Line(
                f"memory at micro-batch {r['point']['batch_size']}: estimated / measured",
                "0.85 to 1.15",
                f"{estimated / measured:.2f}",
                0.85 <= estimated / measured <= 1.15,
            )


def estimate(r: dict) -> float:
    """GB that memory.py estimates for a launch of bench.py."""
    c = r["settings"]
    model_args = asdict(GPTConfig(**model_args_of(c, c["vocab_size"])))
    counts = count_on_meta(GPT, model_args)
    plan = plan_of(c, 1, model_args=model_args, counts=counts, dtype=r["dtype"], device_type="cuda")
    return memory.memory_estimate(plan)["total"]


def nanogpt(place: Place) -> Iterator[Line]:
    """nanoGPT's train.py and ours, alternating, with the same data, model, micro-batch, dtype and compile."""
    if not place.nanogpt:
        return
    batch, steps = (16, 40) if place.on_gpu else (2, 12)
    shape = [a for a in place.gpt2() if not a.startswith(("--dataset", "--vocab_size"))]
    shape += [
        f"--batch_size={batch}",
        "--gradient_accumulation_steps=1",
        f"--max_iters={steps}",
        "--log_interval=1",
    ]
    shape += [
        "--eval_interval=100000",
        "--eval_iters=1",
        f"--compile={place.on_gpu}",
        "--bias=False",
        "--dropout=0.0",
    ]
    shape += ["--dtype=bfloat16" if place.on_gpu else "--dtype=float32", f"--device={place.device}"]
    data = f"--dataset={place.folder}/data/random"  # without metadata nanoGPT takes 50304 token ids
    theirs = [
        sys.executable,
        "train.py",
        *shape,
        data,
        f"--out_dir={place.folder}/theirs",
        "--wandb_log=False",
    ]
    ours = [
        sys.executable,
        str(REPO / "train.py"),
        *shape,
        data,
        "--vocab_size=50304",
        "--save_checkpoint=False",
        f"--out_dir={place.folder}/ours",
    ]
    times, ratios, starts = {}, [], {}
    for pair in range(3):  # the first pair also compiles
        for name, line, folder in (("ours", ours, place.folder), ("theirs", theirs, place.nanogpt)):
            began = time.monotonic()
            ms = [float(t) for t in re.findall(r"time ([0-9.]+)ms", output_of(place, line, folder))]
            starts.setdefault(name, time.monotonic() - began)
            times[name] = statistics.median(ms[steps // 3 :])
        ratios.append(times["theirs"] / times["ours"])
        if pair == 0:
            text = f"ours {starts['ours']:.0f} s, nanoGPT's {starts['theirs']:.0f} s"
            yield Line(f"a run of {steps + 1} steps with nothing compiled before", "", text)
        # kernels and matmuls are the same: the step is predicted to be as fast
        yield Line(
            f"nanoGPT's step / ours, micro-batch {batch}, pair {pair + 1}",
            ">= 1",
            f"{ratios[-1]:.3f}; nanoGPT {times['theirs']:.2f}, ours {times['ours']:.2f} ms",
            ratios[-1] >= 1 if place.on_gpu and pair else None,
        )
    yield from profiled(place, ours)


# parts of a step by the names of their kernels
PARTS = {
    "attention": r"flash|fmha|sdpa|attention",
    "matmul": r"gemm|nvjet|cutlass|cublas|wgmma|xmma",
    "triton": r"^triton_",
    "optimizer": r"multi_tensor|adam",
    "copies": r"memcpy|memset",
}


def profiled(place: Place, line: list[str]) -> Iterator[Line]:
    """The kernels of a step of this command of train.py, by part, from a trace."""
    out = place.folder / "profiled"
    kept = [a for a in line if not a.startswith(("--out_dir", "--max_iters"))]
    output_of(place, [*kept, f"--out_dir={out}", "--max_iters=12", "--profile=True"], place.folder)
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    sums, by_name = dict.fromkeys((*PARTS, "other"), 0.0), {}
    for e in kernels:
        names = (part for part, names in PARTS.items() if re.search(names, e["name"], re.IGNORECASE))
        sums[next(names, "other")] += e["dur"] / 1e3 / PROFILE_STEPS
        count, ms = by_name.get(e["name"], (0, 0.0))
        by_name[e["name"]] = count + 1, ms + e["dur"] / 1e3 / PROFILE_STEPS
    text = ", ".join(f"{part} {ms:.2f}" for part, ms in sums.items())
    yield Line("kernels of a step, ms", "", f"{sum(sums.values()):.2f}: {text}")
    if place.out:
        largest = sorted(by_name.items(), key=lambda item: -item[1][1])[:60]
        rows = [f"{ms:9.4f} ms {count / PROFILE_STEPS:7.1f} {name[:150]}" for name, (count, ms) in largest]
        (place.out / "kernels.txt").write_text("\n".join(rows) + "\n")


def chunked_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss as it is computed on a GPU that is too small for all logits."""
    _, *per_chunk = kernels.logits_at_once(x.device.type == "cpu", x.itemsize, len(weight))
    return kernels.ChunkedLoss.apply(x.flatten(0, 1), weight, targets.flatten(), 0.0, *per_chunk)


def parts(place: Place) -> Iterator[Line]:
    """The loss, attention by back end, and the optimizer, each alone."""
    device, dtype = torch.device(place.device), torch.bfloat16
    rows, vocab, width, heads = (16 * 1024, 50304, 768, 12) if place.on_gpu else (256, 512, 64, 2)
    x = torch.randn(1, rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (1, rows), device=device)
    loss = {"x": x, "weight": weight, "targets": targets}
    ways = {"plain": kernels.summed_loss, "in chunks": chunked_loss, "deterministic, in chunks": chunked_loss}
    ways |= {"compiled": torch.compile(kernels.summed_loss, dynamic=False)} if place.on_gpu else {}
    found = []
    for name, f in ways.items():
        torch.use_deterministic_algorithms("deterministic" in name, warn_only=True)
        found.append(f"{name} {milliseconds(place, 'f(x, weight, targets).backward()', f=f, **loss):.2f}")
    torch.use_deterministic_algorithms(False)
    yield Line(f"loss of {rows:,} x {vocab:,}, ms", "", ", ".join(found))

    length = 1024 if place.on_gpu else 64
    q = torch.randn(
        rows // length, heads, length, width // heads, device=device, dtype=dtype, requires_grad=True
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    ways, times = {"PyTorch's choice": nullcontext()}, {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        ways[name.lower().partition("_")[0]] = sdpa_kernel(getattr(SDPBackend, name))
    for name, only in ways.items():
        with only, suppress(RuntimeError):  # a back end that does not run here
            times[name] = milliseconds(place, "f(q, q, q, is_causal=True).sum().backward()", q=q, f=attention)
    found = ", ".join(f"{name} {times[name]:.2f}" if name in times else f"{name} n/a" for name in ways)
    yield Line(f"attention, {rows // length} x {heads} heads x {length}, ms", "", found)
    fastest = min(times, key=times.get)
    ratio = times["PyTorch's choice"] / times[fastest]
    yield Line(
        "attention: PyTorch's choice / the fastest back end",
        "<= 1.1",
        f"{ratio:.2f} ({fastest})",
        ratio <= 1.1 if place.on_gpu else None,
    )

    # with these values, the output is the attention weights, of which 0.1 are dropped
    q, values = (torch.zeros(64, 64, heads, 64, device=device, dtype=dtype) for _ in "qv")
    values += torch.eye(64, device=device, dtype=dtype)[:, None]
    weights = kernels.causal_attention(q, q, values, 0.1).unflatten(-1, (heads, 64)).movedim(2, 1)
    dropped = 1 - (weights != 0).sum().item() / (64 * heads * 64 * 65 / 2)
    expected, is_near = "0.1, at most 0.005 beside", abs(dropped - 0.1) <= 0.005
    yield Line("attention weights that dropout 0.1 drops", expected, f"{dropped:.4f}", is_near)

    shape = {} if place.on_gpu else dict(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)
    model = GPT(GPTConfig(**shape)).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), device.type)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    ms = milliseconds(place, "optimizer.step()", optimizer=optimizer)
    moved = 28 * sum(p.numel() for p in model.parameters()) / ms / 1e6
    yield Line("AdamW", "", f"{ms:.2f} ms, {moved:,.0f} GB/s")
    numbers = StepNumbers(**dict.fromkeys(StepNumbers._fields, torch.ones((), device=device)))
    gathered, said = gather_numbers(numbers, device), "does not wait"
    if place.on_gpu:
        torch.cuda.set_sync_debug_mode("error")  # an operation that waits for the GPU raises
    try:
        optim.clip_and_step([optimizer], torch.amp.GradScaler(place.device, enabled=False), gathered, 0.5)
    except RuntimeError as e:
        said = str(e)
    if place.on_gpu:
        torch.cuda.set_sync_debug_mode("default")
    yield Line("clipping and AdamW: the host", "does not wait", said, said == "does not wait")

    yield from sampling(place, model, dtype)


def sampling(place: Place, model: GPT, dtype: torch.dtype) -> Iterator[Line]:
    """Tokens/s of sample.py without and with --compile, after a first generation that compiles."""
    generation.prepare(model.eval(), dtype)
    device, tokens = torch.device(place.device), (256 if place.on_gpu else 16)
    prompt = torch.zeros(8, 1, dtype=torch.long, device=device)
    texts, speeds = [], []
    note = ""
    for is_compiled in (False, True):
        if is_compiled:
            note = compilation.compile_generation(model, device, splits_model=False)
        model.generate(prompt, tokens, seed=1)
        began = time.perf_counter()
        texts.append(model.generate(prompt, tokens, seed=1).tolist())
        speeds.append(8 * tokens / (time.perf_counter() - began))
    eager, compiled = speeds
    name = f"sampling 8 x {tokens} tokens, without and with --compile"
    found = note or f"{eager:,.0f} and {compiled:,.0f} tokens/s: {compiled / eager:.1f} times"
    # a failed compilation also prints a note
    is_fast = not note and compiled >= 3 * eager
    yield Line(name, ">= 3 times", found, is_fast if place.on_gpu else None)
    same = sum(a == b for one, two in zip(*texts, strict=True) for a, b in zip(one, two, strict=True))
    yield Line(f"{name}: equal tokens", "", f"{same / (8 * (tokens + 1)):.0%}")


def large(place: Place) -> Iterator[Line]:
    """GPT-2 XL on one device: full recomputation, with DDP's and with FSDP's way to hold the parameters."""
    shape = (
        ["--n_layer=48", "--n_head=25", "--n_embd=1600", "--batch_size=4"]
        if place.on_gpu
        else ["--batch_size=2"]
    )
    for flags in ([], ["--zero=3"]):
        args = [
            *place.gpt2(),
            *shape,
            *flags,
            "--gradient_accumulation_steps=1",
            "--max_iters=8",
            "--eval_iters=1",
            "--eval_interval=100000",
            "--activation_checkpointing=full",
            "--save_checkpoint=False",
            "--warmup_iters=5",
            "--out_dir=large",
        ]
        run(place, "train.py", args)
        rows = [r for r in records(place.folder / "large") if "step_ms" in r][3:]
        speed, memory_gb = statistics.median(r["tokens_per_s"] for r in rows), rows[-1]["memory_gb_max"]
        yield Line(
            f"GPT-2 XL, full recomputation {' '.join(flags)}".strip(),
            "trains",
            f"{speed:,.0f} tokens/s, {memory_gb:.1f} GB",
            math.isfinite(rows[-1]["loss"]),
        )


def experts(place: Place) -> Iterator[Line]:
    """Mixture of experts: the curve, and the step of a dense model with equal active parameters."""
    n, model, exact = place.processes, ["--n_expert=4"], ["--dtype=float32", "--compile=False"]
    reference = losses(place.on_cpu(), "experts", [*model, *exact])
    found = distance(reference, losses(place, "experts", [*model, *exact]))
    yield at_most("4 experts, float32: losses of 20 steps against the CPU's", found, 1e-4)
    for flags in (["--ep=2"], ["--ep=2", "--zero=3"]) if n % 2 == 0 else ():
        found = distance(reference, losses(place, "experts", [*model, *exact, *flags], n))
        yield at_most(f"4 experts, float32 on {n} processes {' '.join(flags)}", found, 1e-4)
    found = distance(reference, losses(place, "experts", [*model, "--dtype=bfloat16", "--compile=False"]))
    yield at_most("4 experts, bfloat16: losses against float32's", found, 0.03)
    base = [
        *place.gpt2(),
        "--gradient_accumulation_steps=1",
        "--max_iters=23",
        "--eval_interval=100000",
        "--eval_iters=1",
        "--save_checkpoint=False",
        "--out_dir=experts",
    ]
    base += ["--batch_size=8", "--dtype=bfloat16"] if place.on_gpu else ["--batch_size=2"]
    width = 768 if place.on_gpu else 64
    times = []
    for shape in ([f"--n_hidden={8 * width}"], ["--n_expert=8", f"--n_hidden={4 * width}"]):
        run(place, "train.py", [*base, *shape])
        rows = [r for r in records(place.folder / "experts") if "step_ms" in r][8:]
        times.append(statistics.median(r["step_ms"] for r in rows))
    dense, moe = times
    yield Line(
        "the step with 8 experts, 2 active / dense with equal active parameters",
        "<= 1.5",
        f"{moe / dense:.2f} ({moe:.2f} and {dense:.2f} ms)",
        moe / dense <= 1.5 if place.on_gpu else None,
    )


# ------------------------------------------------------------------------------------------------------------
# several processes


def planned(place: Place) -> Iterator[Line]:
    """--layout=auto: the curve, and the predicted and the measured step."""
    n, exact = place.processes, ["--dtype=float32", "--compile=False"]
    reference = losses(place.on_cpu(), "planned", exact)
    found = distance(reference, losses(place, "planned", [*exact, "--layout=auto"], n))
    yield at_most(
        f"float32 on {n} processes --layout=auto: losses of 20 steps against the CPU's", found, 1e-4
    )
    args = [
        *place.gpt2(),
        "--layout=auto",
        "--max_iters=23",
        "--eval_interval=100000",
        "--eval_iters=1",
        f"--gradient_accumulation_steps={8 * n}",
        "--batch_size=8",
        "--save_checkpoint=False",
        "--out_dir=predicted",
    ]
    text = run(place, "train.py", args, n)
    predicted = float(re.search(r"by prediction: ([\d,.]+) ms", text)[1].replace(",", ""))
    rows = [r for r in records(place.folder / "predicted") if "step_ms" in r][8:]
    measured = statistics.median(r["step_ms"] for r in rows)
    yield Line(
        f"--layout=auto on {n} processes: the predicted step / the measured one",
        "0.75 to 1.25",
        f"{predicted / measured:.2f} ({predicted:.1f} and {measured:.1f} ms)",
        0.75 <= predicted / measured <= 1.25 if place.on_gpu else None,
    )


def slow_networks(place: Place) -> Iterator[Line]:
    """
    How far compressed gradients and islands take the curve from the exact one; the lossy ones have to learn.
    """
    n, exact = place.processes, ["--dtype=float32", "--compile=False"]
    if n % 2:
        yield Line("slow networks", "", "an odd number of devices: not tried")
        return
    reference = losses(place.on_cpu(), "networks", exact)
    modes = {
        f"--grad_compression={kind}": limit
        for kind, limit in (("fp16", 2e-3), ("bf16", 0.02), ("int8", 0.02), ("powersgd:1", 0.3))
    }
    modes["--islands=2 --local_steps=4"] = 0.3
    for flags, limit in modes.items():
        found = distance(reference, losses(place, "networks", [*exact, *flags.split()], n))
        yield at_most(f"float32 on {n} processes {flags}", found, limit)


def several(place: Place) -> Iterator[Line]:
    """The curve on several devices, the collectives, and a killed rank."""
    n = place.processes
    if n < 2:
        yield Line("several GPUs", "", "there is one: not tried")
        return
    uncompiled = ["--dtype=float32", "--compile=False"]
    reference = losses(place, "one", uncompiled)
    layouts = [[], ["--zero=1"], ["--zero=2"], ["--zero=3"]]
    if n % 2 == 0:
        layouts += [
            ["--zero=3", "--dp_replicate=2"],
            ["--tp=2"],
            ["--pp=2"],
            ["--cp=2"],
            ["--zero=3", "--tp=2"],
        ]
    if n % 8 == 0:
        layouts.append(["--zero=3", "--tp=2", "--pp=2"])
    layouts.append(["--ddp_bucket_mb=0.02", "--compile=True"])
    for flags in layouts:
        found = distance(reference, losses(place, "several", [*uncompiled, *flags], n))
        yield at_most(f"float32 on {n} processes {' '.join(flags)}".strip(), found, 1e-4)
    run(place, "bench.py", ["--comm=True", f"--nproc={n}", "--json_path=comm.json"])
    for cell in json.loads((place.folder / "comm.json").read_text())["comm"][-5:]:
        found = cell.get("problem") or f"{cell['gb_per_s']:.1f} GB/s of bus bandwidth"
        yield Line(f"{cell['operation']}, {cell['bytes'] / 2**20:.0f} MiB", "", found)
    yield from killed(place, n)


def killed(place: Place, n: int) -> Iterator[Line]:
    """SIGKILL to the last rank: how long until the others have said so and exited."""
    args = [*TINY, "--max_iters=1000000", "--out_dir=killed", "--compile=False"]
    with open(place.folder / "killed.txt", "w") as log:
        agent = subprocess.Popen(
            command(place, "train.py", args, n), cwd=place.folder, stdout=log, stderr=log
        )
        wait_for(lambda: steps_in(place.folder / "killed") > 20, 120)
        workers = sorted(children(agent.pid))
        began = time.monotonic()
        os.kill(workers[-1], signal.SIGKILL)
        agent.wait(60)
    took, text = time.monotonic() - began, (place.folder / "killed.txt").read_text()
    named = re.findall(r"rank \d+ does not respond", text)
    yield Line(
        "a killed rank: named, and the others exit",
        "within 20 s",
        f"{took:.1f} s, {named[:1]}",
        took < 20 and bool(named),
    )


# ------------------------------------------------------------------------------------------------------------

# in the order of their worth: --seconds cuts off the last
CHECKS = (
    ceilings,
    gradients,
    nanogpt,
    curve,
    resume,
    exact,
    speed,
    parts,
    compiled,
    cuda_graphs,
    large,
    experts,
    planned,
    slow_networks,
    several,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(c.__name__ for c in CHECKS))
    parser.add_argument("--nanogpt", type=Path, help="a clone of karpathy/nanoGPT")
    parser.add_argument("--out", type=Path, help="write the table to this folder after each line")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    by_name = {check.__name__: check for check in CHECKS}
    if unknown := set(options.checks) - by_name.keys():
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU: --device=cpu runs the checks with small sizes")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    lines = []
    with tempfile.TemporaryDirectory(prefix="isogpt-gpu-check-") as folder:
        place = Place(
            folder=Path(folder),
            device=options.device,
            processes=min(8, torch.cuda.device_count()) if options.device == "cuda" else 2,
            nanogpt=options.nanogpt and options.nanogpt.resolve(),
            deadline=deadline,
            out=options.out and options.out.resolve(),
        )
        make_data(place)
        for name in options.checks or by_name:
            began = time.monotonic()
            if began > deadline:
                print(f"{name}: not tried, {options.seconds:.0f} s have passed", flush=True)
                continue
            for line in lines_of(by_name[name], place):
                lines.append(line)
                print(f"{name}: {line.what}: {line.found}", flush=True)
                write_table(lines, place)
            print(f"({name} took {time.monotonic() - began:.0f} s)", flush=True)
        print(f"\n{table_of(lines, place)}")
    sys.exit(any(line.passed is False for line in lines))


def make_data(place: Place) -> None:
    """The data sets of the checks: tiny and random."""
    tiny_data(str(place.folder))
    (place.folder / "data/random").mkdir()
    for split in ("train", "val"):
        ids = np.random.default_rng(0).integers(0, 512, 2**20 if place.on_gpu else 2**14, dtype=np.uint16)
        ids.tofile(place.folder / f"data/random/{split}.bin")


def lines_of(check: Callable[[Place], Iterator[Line]], place: Place) -> Iterator[Line]:
    """The lines of a check; an exception is a line that failed, and the other checks still run."""
    try:
        yield from check(place)
    except Exception as e:
        text = " ".join(f"{type(e).__name__}: {e}".split())[:600]
        yield Line(check.__name__, "no error", text, False)


def table_of(lines: list[Line], place: Place) -> str:
    """The table in Markdown, with the device and the version of torch."""
    name = torch.cuda.get_device_name() if place.on_gpu else "CPU"
    rows = [f"{name}, torch {torch.__version__}\n", "| what | expected | found | |", "|---|---|---|---|"]
    for line in lines:
        verdict = "" if line.passed is None else "pass" if line.passed else "FAIL"
        rows.append(f"| {line.what} | {line.expected} | {line.found} | {verdict} |")
    return "\n".join(rows)


def write_table(lines: list[Line], place: Place) -> None:
    """Write all lines so far to place.out: a run that is killed leaves what it has."""
    if place.out:
        (place.out / "table.md").write_text(table_of(lines, place) + "\n")
        (place.out / "table.json").write_text(json.dumps([asdict(line) for line in lines], indent=1))


if __name__ == "__main__":
    main()
