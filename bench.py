"""
How fast does train.py run here? Launches train.py itself, for a few steps, and reads what it recorded.

    python bench.py                                                    a fitting work for this machine, in a minute
    python bench.py config/train_shakespeare_char.py --batch_size=8    train.py's configs and settings are taken too
    python bench.py --nproc=2                                          on two processes; so does torchrun … bench.py
    python bench.py --sweep='nproc:1,2,4;batch_size:4,8'               each combination in a launch of its own
    python bench.py --comm=True --nproc=2                              the collectives by message size
    python bench.py config/train_gpt2.py --tune=True                   the fastest settings for the same global batch

A step has one micro-batch for each process, unless gradient_accumulation_steps says otherwise.
"""

import itertools
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from json import dumps, loads
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import launch
import loader
import metrics
from configurator import configure, fail, settings_of

# -- the work ---------------------------------------------------------------------------------------------------------
batch_size = 12  # sequences in a micro-batch
block_size = 1024  # tokens in a sequence
bias = False  # biases in Linear and LayerNorm
real_data = True  # read the data set; False, and where none is prepared: random tokens
seed = 1337  # of weights and data
# -- how --------------------------------------------------------------------------------------------------------------
nproc = 0  # processes to start on this machine; 0: those that torchrun started, else one
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
dtype = "auto"  # auto (the best that the device runs fast), float32, tf32, bfloat16 or float16 (with a GradScaler)
compile = True  # torch.compile; left out on a CPU and, aloud, where it does not work
steps = 20  # how many to measure, after a quarter as many that are not
# -- what to report ---------------------------------------------------------------------------------------------------
sweep = ""  # settings and values, as nproc:1,2;batch_size:4,8: each combination is launched, and stands in a table
comm = False  # bandwidth and latency of the collectives by message size; trains nothing
tune = False  # find the fastest micro-batch, recompute, compile and communication for the same global batch
profile = False  # also write a torch.profiler trace, bench_trace.json in this folder, and list the top operators
json = ""  # also write everything that is reported to this file
estimate = False  # first say how much memory each part takes on each rank, without allocating it
world_size = 0  # the estimate is for so many processes, and nothing is run; 0: for those that are here
# ---------------------------------------------------------------------------------------------------------------------
HERE = Path(__file__).resolve().parent
try:
    launch.understand_launcher()
except ValueError as e:
    fail(str(e))
theirs = settings_of(HERE / "train.py")
config = configure(globals(), extra=theirs)

SMALL = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8, dropout=0.0)  # 10.65M parameters
launches = itertools.count()  # numbers train.py's starts; the same on all ranks

under_launcher = "RANK" in os.environ
rank = int(os.environ.get("RANK", 0))
here = int(os.environ.get("WORLD_SIZE", 1)) if under_launcher else max(nproc, 1)
say = print if rank == 0 else lambda *_, **__: None


# ---------------------------------------------------------------------------------------------------------------------
# one launch of train.py


def reason_for(code: int, errors: str) -> str:
    """One line that says why a launch failed, from its exit status and what it wrote to stderr."""
    if re.search(r"out of memory|OutOfMemoryError|DefaultCPUAllocator", errors):
        return "out of memory"
    if code == -9 or "Signal 9 (SIGKILL)" in errors:
        return "killed (SIGKILL), which is how a machine that runs out of memory ends a process"
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in own_lines(errors)]
    lines = [x for x in lines if x.strip() and not x.startswith((" ", "Traceback")) and "lost the connection" not in x]
    marked = [x for x in lines if x.startswith("error: ")]
    return (marked or lines or [f"exit status {code}"])[-1].removeprefix("error: ")


def own_lines(errors: str) -> list[str]:
    """The lines of stderr that train.py wrote: torchrun's warnings come before them, its report of the end after."""
    lines = errors.splitlines()
    end = next((i for i, line in enumerate(lines) if re.match(r"E\d{4} ", line)), len(lines))
    return [line for line in lines[:end] if not re.match(r"[WI]\d{4} ", line)]


def run_train(scratch: Path, settings: dict, processes: int, untimed: int, timed: int, aloud: bool = False) -> dict:
    """
    Train for untimed + timed steps (all ranks: each starts a train.py of its own, which inherits the launcher's
    variables and joins the others) and return the figures that train.py recorded; with `problem` where it failed.
    """
    number = next(launches)
    out = scratch / f"launch{number}"
    args = settings | {"max_iters": untimed + timed - 1, "log_interval": 1, "eval_interval": 10**9, "eval_iters": 1}
    args |= {"out_dir": out, "keep_last": 0, "save_interval": 0, "eval_only": False, "wandb_log": False}
    args |= {"profile": profile and aloud, "stop_after_s": 0, "alert_command": ""}
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    if under_launcher and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # rank 0's train.py serves the addresses itself: the next one must not meet the one that is leaving
        env["MASTER_PORT"] = str(int(env["MASTER_PORT"]) + number)
    command = [sys.executable]
    if processes > 1 and not under_launcher:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        env.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets by itself, with a warning
    command += [str(HERE / "train.py"), *(f"--{k}={v}" for k, v in args.items())]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        try:
            for line in process.stdout:
                if aloud and not line.startswith(("step ", "writing", "done", "the loss curve", "no picture")):
                    print(line, end="", flush=True)
            code = process.wait()
        finally:
            process.terminate()
            process.wait()
        errors.seek(0)
        text = errors.read()
    if aloud and not code:
        sys.stderr.writelines(f"{line}\n" for line in own_lines(text))
    if code:
        return {"problem": reason_for(code, text), "errors": "\n".join(own_lines(text)), "processes": processes}
    return figures(out, untimed) if rank == 0 else {}


def figures(out: Path, untimed: int) -> dict:
    """What train.py recorded in folder `out` (rank 0): medians over the timed steps, mean and largest of the ranks."""
    records = metrics.read_log(out / "metrics.jsonl")
    start = next(r for r in records if r.get("event") == "start")
    end = next((r for r in records if r.get("event") in ("end", "preempted")), {"spans_ms": {}})
    timed, settings = [r for r in records if "step_ms" in r][untimed:], start["config"]

    def over_ranks(key: str) -> dict[str, float]:
        return {n: statistics.median(r[key + s] for r in timed) for n, s in (("mean", ""), ("max", "_max"))}

    step = over_ranks("step_ms")
    tokens = settings["gradient_accumulation_steps"] * settings["batch_size"] * settings["block_size"]
    mfu = None if timed[0]["mfu"] is None else statistics.median(r["mfu"] for r in timed)
    return {
        "processes": start["world_size"],
        "dtype": start["dtype"],
        "micro_batch": start["micro_batch"],
        "parameters": start["parameters"],
        "steps": len(timed),
        "tokens_a_step": tokens,
        "tokens_per_s": tokens / step["mean"] * 1e3,
        "step_ms": step,
        "spans_ms": end["spans_ms"],
        "memory_gb": {"mean": timed[-1]["memory_gb"], "max": timed[-1]["memory_gb_max"]},
        "mfu": mfu,
        "tflops": None if mfu is None else mfu * start["peak_flops"] / 1e12,
        "settings": settings,
    }


# ---------------------------------------------------------------------------------------------------------------------
# the report of one work


def split_step(run: dict, silent: dict | None) -> dict[str, dict[str, float | None]]:
    """
    The ms of a step by what they went for, each as mean over the ranks and as the slowest rank's; these need not add
    up to the slowest step. `silent` is the same work with grad_sync 'never': what the step takes longer than that is
    communication that nothing hid, and its backward is one that waits for nobody.
    """
    parts = {}
    for of in ("mean", "max"):
        one, other = (
            {k: v[of] for k, v in r["spans_ms"].items()} | {"step": r["step_ms"][of]} for r in (run, silent or run)
        )
        without = [s["step"] - s["clip"] - s["optimizer"] for s in (one, other)]
        part = {
            "data wait": one["data"],
            "forward": one["forward"],
            "backward": min(one["backward"], other["backward"]),
            "exposed comm": max(0.0, without[0] - without[1]) if silent else None,
            "optimizer": one["clip"] + one["optimizer"],
        }
        part["other"] = max(0.0, one["step"] - sum(v or 0.0 for v in part.values()))
        for name, value in part.items():
            parts.setdefault(name, {})[of] = value
    return parts


def measured_copy(where: torch.device, seconds: float = 0.3) -> float:
    """Bytes per second, read and written, of a copy in the device's memory: the best of as many as fit in."""
    source = torch.ones((64 if where.type == "cpu" else 256) * 2**20, device=where)
    target = torch.empty_like(source)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        synchronize(where)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(where)
        times.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(times)


def synchronize(where: torch.device) -> None:
    """Wait until the device has done what it was given."""
    {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(where.type, lambda: None)()


def limits(run: dict, where: torch.device) -> dict[str, float | None]:
    """What this device could do (measured now, with nothing else running) and which part of that the run reached."""
    if where.type == "cpu":
        torch.set_num_threads(launch.cpu_count())  # torchrun gave this process one thread
    launch.set_numerics(where, run["dtype"], False)
    matmul, copy = metrics.measured_matmul(where, run["dtype"]), measured_copy(where)
    s, n = run["settings"], run["processes"]
    # the processes of one machine share its cores, so that what was measured is theirs together
    devices = n // int(os.environ.get("LOCAL_WORLD_SIZE", n)) if where.type == "cpu" else n
    stage = 3 if s["fsdp"] else s["zero"]
    held = run["parameters"] * (s["dp_replicate"] if stage else n)  # over all ranks, their copies counted
    # AdamW reads weight, gradient and two moments and writes all but the gradient: seven float32
    moved = 28 * held / (run["spans_ms"]["optimizer"]["mean"] / 1e3)
    return {
        "matmul_tflops": matmul / 1e12,
        "matmul_ratio": None if run["tflops"] is None else run["tflops"] * 1e12 / (matmul * devices),
        "copy_gb_per_s": copy / 1e9,
        "copy_ratio": None if s["cpu_offload"] or not moved else moved / (copy * devices),
    }


def report(scratch: Path, settings: dict, where: torch.device, total: float | None) -> dict:
    """Run the work (all ranks), print where its time goes and how far from the device's limits it is."""
    # the profiler skips 5 steps and traces 5 (metrics.start_profiler): the timed ones come after those
    run = run_train(scratch, settings, here, max(11 if profile else 3, steps // 4), steps, aloud=True)
    silent = None
    if here > 1 and settings.get("grad_sync") != "never" and "problem" not in run:
        say(f"\nonce more, without communication ({here} processes, grad_sync never)", flush=True)
        silent = run_train(scratch, settings | {"grad_sync": "never"}, here, max(3, steps // 4), steps)
    for r in (run, silent or {}):
        if "problem" in r:
            fail(r["errors"] or r["problem"])
    if rank > 0:
        return {}

    parts, could = split_step(run, silent), limits(run, where)
    processes = f"{here} process{'es' * (here > 1)}"
    say(f"\n{run['steps']} steps of {run['tokens_a_step']:,} tokens on {processes}, {run['dtype']}; medians:")
    say(f"  {'':13} {'mean of the ranks':>18} {'slowest rank':>13}")
    say(f"  {'tokens/s':13} {run['tokens_per_s']:18,.0f}")
    for name, value in {"ms per step": run["step_ms"], **parts}.items():
        say(f"  {name:13} {shown(value['mean'], '.2f'):>18} {shown(value['max'], '.2f'):>13}")
    say(f"  {'memory':13} {run['memory_gb']['mean']:18.2f} {run['memory_gb']['max']:13.2f}  GB at its peak")
    if total is not None:  # a GPU's memory is the tensors' alone; a process's on a CPU holds Python and torch as well
        say(f"  {'estimated':13} {total:18.2f}  GB, without what the process takes before any model (0.4 on a CPU)")
    say(f"  {'MFU':13} {shown(run['mfu'], '.1%'):>18}")
    matmul, copy = f"{could['matmul_tflops']:.3g} TFLOP/s", f"{could['copy_gb_per_s']:.1f} GB/s"
    say(f"  {'matmul peak':13} {matmul:>18}  of which the step reaches {shown(could['matmul_ratio'], '.1%')}")
    cached = " (what it moves stays in the cache)" * ((could["copy_ratio"] or 0) > 1)
    say(f"  {'copy peak':13} {copy:>18}  of which the optimizer reaches {shown(could['copy_ratio'], '.1%')}{cached}")
    result = {"run": run, "split_ms": parts, "limits": could, "estimated_gb": total}
    return result | ({"operators": profiled(Path(run["settings"]["out_dir"]))} if profile else {})


def shown(value: float | None, form: str) -> str:
    """A figure, or n/a where it could not be had."""
    return "n/a" if value is None else format(value, form)


def profiled(out: Path) -> list[dict]:
    """Keep the trace, and the memory snapshot where there is one; print and return the operators that take longest."""
    if not (out / "trace.json").exists():
        fail("train.py wrote no trace: metrics.start_profiler wants more steps than bench.py gives it")
    shutil.copy(out / "trace.json", "bench_trace.json")
    say("  trace         bench_trace.json (open in https://ui.perfetto.dev)")
    if (out / "memory.pickle").exists():
        shutil.copy(out / "memory.pickle", "bench_memory.pickle")
        say("  snapshot      bench_memory.pickle (open in https://pytorch.org/memory_viz)")
    operators = top_operators(loads(Path("bench_trace.json").read_text())["traceEvents"])
    say(f"\n  {'self time in the traced steps, ms':64} {'share':>8} {'calls':>8}")
    for o in operators:
        say(f"  {o['name'][:52]:52} {o['self_ms']:11.2f} {o['share']:8.1%} {o['calls']:8}")
    return operators


def top_operators(events: list[dict], most: int = 15) -> list[dict]:
    """A GPU's kernels, else the CPU's operators, by the time spent in them and not in those that they call."""
    spans = [e for e in events if e.get("ph") == "X"]
    kind = "kernel" if any(e.get("cat") == "kernel" for e in spans) else "cpu_op"
    spans = sorted((e for e in spans if e.get("cat") == kind), key=lambda e: (e["ts"], -e["dur"]))
    took, calls, open_spans = {}, {}, {}
    for e in spans:
        stack = open_spans.setdefault((e["pid"], e["tid"]), [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= e["ts"]:
            stack.pop()
        took[e["name"]] = took.get(e["name"], 0.0) + e["dur"] / 1e3
        calls[e["name"]] = calls.get(e["name"], 0) + 1
        if stack:
            took[stack[-1]["name"]] -= e["dur"] / 1e3
        stack.append(e)
    whole = sum(took.values())
    names = sorted(took, key=took.get, reverse=True)[:most]
    return [{"name": n, "self_ms": took[n], "share": took[n] / whole, "calls": calls[n]} for n in names]


# ---------------------------------------------------------------------------------------------------------------------
# many works


def axes_of(text: str) -> dict[str, list[str]]:
    """The settings of a sweep and their values: 'nproc:1,2;batch_size:4,8'."""
    axes = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, colon, values = part.partition(":")
        axes[name.strip()] = [v.strip() for v in values.split(",") if v.strip()]
        if not colon or not axes[name.strip()]:
            fail(f"sweep: {part!r} is not NAME:VALUE,VALUE; type --sweep='nproc:1,2;batch_size:4,8' or the like")
    return axes


def header_of(widths: dict[str, int]) -> str:
    """The first line of a table whose first columns are settings of these widths."""
    names = "  ".join(f"{k:>{w}}" for k, w in widths.items())
    line = f"  {names} {'tokens/step':>12} {'tokens/s':>10} {'ms/step':>9} {'GB':>8} {'MFU':>6} {'speed-up':>9}"
    return line + "  efficiency" * ("nproc" in widths)


def row_of(point: dict, widths: dict[str, int], run: dict, first: dict) -> str:
    """The line of one point; without figures but with the reason where it failed."""
    line = "  " + "  ".join(f"{point[k]!s:>{w}}" for k, w in widths.items())
    if "problem" in run:
        return f"{line}  failed: {run['problem']}"
    faster = run["tokens_per_s"] / first["tokens_per_s"]
    line += f" {run['tokens_a_step']:12,} {run['tokens_per_s']:10,.0f} {run['step_ms']['mean']:9.2f}"
    line += f" {run['memory_gb']['max']:8.2f} {shown(run['mfu'], '.1%'):>6} {faster:8.2f}x"
    more = run["processes"] / first["processes"]
    return line + f" {faster / more:11.0%}" * ("nproc" in widths)


def run_sweep(scratch: Path, settings: dict) -> list[dict]:
    """Launch every combination of the swept values (all ranks) and print the table; a point that fails is marked."""
    axes = axes_of(sweep)
    if under_launcher and "nproc" in axes:
        fail("a sweep over nproc starts the processes itself: start bench.py without torchrun")
    counts = [int(v) for v in axes.get("nproc", [str(here)]) if v.isdecimal() and int(v)]
    settings = {"gradient_accumulation_steps": math.lcm(*counts)} | settings  # divides evenly over each point's ranks
    own = sorted({"batch_size", "block_size", "gradient_accumulation_steps"} & axes.keys())
    fixed = f"not the global batch, by {', '.join(own)}: compare tokens/s" if own else "the global batch"
    say(f"held fixed: {fixed}{', so that speed-up is strong scaling' * ('nproc' in axes and not own)}")
    efficiency = f"; efficiency: speed-up by times the processes ({launch.cpu_count()} cores here)" * ("nproc" in axes)
    say(f"speed-up: tokens/s over those of the first point that ran{efficiency}")
    widths = {name: max(map(len, [name, *values])) for name, values in axes.items()}
    say(header_of(widths), flush=True)
    results, first = [], None
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        changed = {k: v for k, v in point.items() if k != "nproc"}
        count = point.get("nproc", str(here))
        run = {"problem": f"nproc is {count!r}: not a whole number of at least 1"}
        if count.isdecimal() and int(count):
            run = run_train(scratch, settings | changed, int(count), max(3, steps // 4), steps)
        if rank == 0:
            first = first or (None if "problem" in run else run)
            say(row_of(point, widths, run, first), flush=True)
            results.append({"point": point, **run})
    return results


def run_tune(scratch: Path, settings: dict, where: torch.device) -> dict:
    """
    Search for the fastest settings that fit, one at a time, each point in a launch of its own: first the micro-batch,
    with as much accumulation as keeps the global batch, then the others. Prints what was tried and the command to use.
    """
    if under_launcher:
        fail("a search starts the processes itself: start bench.py without torchrun, with --nproc=N")
    sharded = settings.get("fsdp") or settings.get("zero", 0) >= 2
    start = {"batch_size": settings["batch_size"], "activation_checkpointing": "none"}
    start |= {"compile": compile} if where.type == "cuda" else {}  # on a CPU train.py leaves it out
    start |= {"grad_sync": "every" if sharded else "last"} if here > 1 else {}  # what auto is
    if here > 1:
        name = "prefetch" if sharded else "bucket_mb"
        start[name] = theirs[name].default
    start |= {k: v for k, v in settings.items() if k in start and v != "auto"}
    sequences = start["batch_size"] * settings.get("gradient_accumulation_steps", here)
    most = -(-sequences // here)
    sizes = {int(start["batch_size"] * 2.0**k) for k in range(-16, 17)}
    sizes = sorted(b for b in sizes if 0 < b <= max(most, start["batch_size"]) and sequences % b == 0)
    widths = {k: max(len(k), 9) for k in ("accumulation", *start)}
    say(f"held fixed: the global batch of {sequences} sequences, on {here} process{'es' * (here > 1)}")
    say(header_of(widths), flush=True)
    tried, first = {}, None

    def speed(point: dict) -> float:
        """Tokens/s of a point, which runs once; 0 where it fails."""
        nonlocal first
        key = tuple(point.values())
        if key not in tried:
            accumulation = sequences // point["batch_size"]
            run = run_train(scratch, settings | point | {"gradient_accumulation_steps": accumulation}, here, 3, 5)
            first = first or (None if "problem" in run else run)
            say(row_of(point | {"accumulation": accumulation}, widths, run, first), flush=True)
            tried[key] = {"point": point, **run}
        return tried[key].get("tokens_per_s", 0.0)

    def pick(best: dict, others: list[dict]) -> dict:
        """The fastest; another than the best so far where it gains 3%: less is noise in so few steps."""
        return max([best, *others], key=lambda point: speed(point) * (1.03 if point == best else 1))

    def climb(best: dict, sizes: list[int]) -> dict:
        """Go on to the next micro-batch for as long as that is faster, or as nothing has run yet."""
        for size in sizes:
            if speed(best | {"batch_size": size}) > speed(best):
                best = best | {"batch_size": size}
            elif speed(best):
                break
        return best

    if not speed(start) and "memory" not in tried[tuple(start.values())]["problem"]:  # smaller ones fail as well
        return {"tried": list(tried.values()), "command": None}
    best = climb(start, [b for b in sizes if b > start["batch_size"]] if speed(start) else [])
    if best == start:
        best = climb(start, [b for b in reversed(sizes) if b < start["batch_size"]])
    for mode in ("none", "selective", "full"):
        # recompute is slower by itself: it pays where it makes room for a micro-batch that failed
        other = best | {"activation_checkpointing": mode}
        failed = {t["point"]["batch_size"] for t in tried.values() if "problem" in t}
        best = pick(best, [other, *(other | {"batch_size": b} for b in sorted(failed))])
    options = {"compile": (True, False), "grad_sync": ("last", "every"), "bucket_mb": (5.0, 25.0, 100.0)}
    options |= {"prefetch": (1, 2, 3)}
    options = {name: values for name, values in options.items() if name in start}
    if sequences // here <= best["batch_size"]:  # one micro-step: its gradients are reduced, either way
        options.pop("grad_sync", None)
    for name, values in options.items():
        best = pick(best, [best | {name: v} for v in values])
    if not speed(best):
        return {"tried": list(tried.values()), "command": None}

    added = (SMALL | {"dataset": default} if is_small else {}) | best
    added |= {"gradient_accumulation_steps": sequences // best["batch_size"]}
    left_out = (settings_of(__file__).keys() - theirs.keys()) | added.keys() | {"nproc"}
    typed = [a for a in sys.argv[1:] if not a.startswith("--") or a[2:].partition("=")[0] not in left_out]
    program = f"torchrun --standalone --nproc_per_node={here}" if here > 1 else "python"
    command = f"{program} train.py {shlex.join([*typed, *(f'--{k}={v}' for k, v in added.items())])}"
    say(f"\nthe fastest, {speed(best):,.0f} tokens/s:\n{command}")
    return {"tried": list(tried.values()), "command": command}


# ---------------------------------------------------------------------------------------------------------------------
# the network


def time_collectives() -> list[dict]:
    """
    Time each collective over message sizes (all ranks) and print the table. By the convention of nccl-tests, a
    message is the larger of what goes in and out, and bus bandwidth is what each link carries.
    """
    try:
        ranks = launch.join(device, config.get("backend", "auto"))
        if ranks.world_size == 1:
            raise ValueError("comm needs two processes or more: set --nproc=2, or --device=cpu where there is one GPU")
    except ValueError as e:
        fail(str(e))
    n, where = ranks.world_size, ranks.device
    # torch 2.13's names for them, which warns of the old ones; 2.11 has the old ones only
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    operations = {  # with the bytes that a link carries for each byte of the message
        "all-reduce": (lambda whole, other, part: dist.all_reduce(whole), 2 * (n - 1) / n),
        "all-gather": (lambda whole, other, part: gather(whole, part), (n - 1) / n),
        "reduce-scatter": (lambda whole, other, part: scatter(part, whole), (n - 1) / n),
        "broadcast": (lambda whole, other, part: dist.broadcast(whole, 0), 1),
        "all-to-all": (lambda whole, other, part: dist.all_to_all_single(other, whole), (n - 1) / n),
    }
    backend = "gloo" if where.type == "cpu" or config.get("backend") == "gloo" else "nccl"
    say(f"{n} processes on {where.type}, {backend}: GB/s on the bus, and latency")
    say(f"  {'message':>12}" + "".join(f"{name:>16}" for name in operations))
    table = []
    for size in (2**k for k in range(10, 27, 2)):
        whole, other = (torch.zeros(size // 4 // n * n, device=where) for _ in range(2))
        part, row = torch.zeros(len(whole) // n, device=where), []
        for name, (operation, factor) in operations.items():
            cell = {"operation": name, "bytes": whole.nbytes}
            try:
                seconds = mean_seconds(partial(operation, whole, other, part), where)
                cell |= {"us": seconds * 1e6, "gb_per_s": factor * whole.nbytes / seconds / 1e9}
            except (RuntimeError, NotImplementedError) as e:  # this backend has no such collective
                cell |= {"problem": f"not supported by {backend}: {(str(e).splitlines() or [''])[0]}"}
            row.append(cell)
        say(f"  {size / 1024:9,.0f} KB" + "".join(f"{shown(c.get('gb_per_s'), '.3f'):>16}" for c in row), flush=True)
        table += row
    row = table[: len(operations)]
    say(f"  {'1 KB, in µs':>12}" + "".join(f"{shown(c.get('us'), '.1f'):>16}" for c in row))
    say("".join(f"  {c['operation']}: {c['problem']}\n" for c in row if "problem" in c), end="")
    launch.leave()
    return table


def mean_seconds(operation: Callable[[], object], where: torch.device, budget: float = 0.1) -> float:
    """How long a collective takes (all ranks): the slowest rank's mean over as many as fit into `budget` seconds."""
    count = 1
    for _ in range(3):  # the first connects the ranks, the second shows how many fit
        dist.barrier()
        synchronize(where)
        began = time.perf_counter()
        for _ in range(count):
            operation()
        synchronize(where)
        took = launch.gather_rows([(time.perf_counter() - began) / count], where).max().item()
        count = int(min(max(budget / took, 1), 200))
    return took


# ---------------------------------------------------------------------------------------------------------------------
# what it needs


def random_tokens(folder: Path, length: int, vocabulary: int) -> str:
    """A data set of random tokens in `folder`; returns its path."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        rng.integers(0, vocabulary, length, dtype=np.uint16).tofile(folder / f"{split}.bin")
    return str(folder)


def print_estimate(settings: dict, processes: int, where: torch.device) -> float:
    """Print the parts of the memory that the settings take on each rank; returns their total in GB."""
    import memory  # half a second that only this needs

    s = {k: v.default for k, v in theirs.items()} | settings
    try:
        vocabulary = int(loader.read_meta(loader.find_dataset(s["dataset"])).get("vocab_size", 0))
    except ValueError:
        vocabulary = 0
    stage = 3 if s["fsdp"] else s["zero"]
    accumulation = settings.get("gradient_accumulation_steps", processes)
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
    cost = dict(
        model_args={k: s[k] for k in names} | {"vocab_size": s["vocab_size"] or vocabulary or loader.GPT2_VOCAB},
        rows=loader.share_of(accumulation * s["batch_size"], 0, processes, s["batch_size"]).rows,
        dtype=launch.dtype_for(s["dtype"], where),
        world_size=processes,
        zero=stage,
        dp_replicate=s["dp_replicate"],
        sync_every=s["grad_sync"] == "every" or (s["grad_sync"] == "auto" and stage >= 2),
        prefetch=s["prefetch"],
        cpu_offload=s["cpu_offload"],
        mode=s["activation_checkpointing"],
        on_cpu=where.type == "cpu",
    )
    parts = memory.memory_estimate(**cost)
    print(f"estimated GB on each of {processes} rank{'s' * (processes > 1)}, micro-batches of {cost['rows']}:")
    for name, size in parts.items():
        print(f"  {name:12} {size:8.3f}")
    return parts["total"]


def machine(where: torch.device) -> dict[str, object]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    if where.type == "cpu" and Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else name
    return {"device": name, "cores": launch.cpu_count(), "torch": torch.__version__}


def write_whole(path: Path, value: dict) -> None:
    """Write JSON; whoever reads the file finds all of it or what was there before."""
    other = path.with_name(path.name + ".tmp")
    other.write_text(dumps(value, indent=2) + "\n")
    os.replace(other, path)


# ---------------------------------------------------------------------------------------------------------------------
try:
    where = launch.pick_device(device, 0, 1)
except ValueError as e:
    fail(str(e))
problems = [f"steps is {steps}: it must be at least 1"] if steps < 1 else []
problems += [f"nproc is {nproc}: it must not be negative"] if nproc < 0 else []
problems += (
    [f"nproc is {nproc}, but torchrun started {here} processes"] if under_launcher and nproc not in (0, here) else []
)
problems += ["comm, sweep and tune are reports of their own: set one of them"] if comm + bool(sweep) + tune > 1 else []
problems += [f"json is {json!r}: no such folder"] if json and not Path(json).absolute().parent.is_dir() else []
if world_size and not estimate:
    problems += ["world_size is for --estimate=True: to run, set --nproc or start with torchrun"]
if problems:
    fail("\n".join(problems))

if comm and not under_launcher:
    count = nproc or (torch.cuda.device_count() if where.type == "cuda" else 2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would, with a warning; launch.join divides the cores
    again = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", __file__]
    # torchrun would take --nproc for one of its own
    sys.exit(subprocess.run([*again, *(a for a in sys.argv[1:] if not a.startswith("--nproc="))]).returncode)

# without arguments that say what to run: what this machine can do in a minute
typed_names = {a[2:].partition("=")[0] for a in sys.argv[1:] if a.startswith("--")}
is_named = typed_names & (SMALL.keys() | {"init_from"}) or any(not a.startswith("--") for a in sys.argv[1:])
is_small = where.type != "cuda" and not is_named
settings = {k: v for k, v in config.items() if k in theirs and k != "nproc"} | (SMALL if is_small else {})
default = "shakespeare_char" if is_small else theirs["dataset"].default
is_prepared = any((p / default / "train.bin").exists() for p in (Path("data"), HERE / "data"))
is_random = not real_data or ("dataset" not in settings and not is_prepared)
if is_random and is_small:
    settings.setdefault("vocab_size", 65)
settings.setdefault("dataset", default)

total = None
if estimate and rank == 0:
    total = print_estimate(settings, world_size or here, where)
if world_size:
    sys.exit()
about = machine(where)
say(f"{about['device']}, {about['cores']} cores, torch {about['torch']}", flush=True)
with tempfile.TemporaryDirectory(prefix="isogpt-bench-") as folder:
    result = {"machine": about}
    if comm:
        result["comm"] = time_collectives()
    else:
        if is_random:
            if real_data:
                say(f"data set {default} is not prepared here: random tokens instead", flush=True)
            vocabulary = min(settings.get("vocab_size", 0) or 50257, 50257)
            length = max(2**20, 2 * settings["block_size"])
            settings["dataset"] = random_tokens(Path(folder) / "random", length, vocabulary)
        if sweep:
            result["sweep"] = run_sweep(Path(folder), settings)
        elif tune:
            result["tune"] = run_tune(Path(folder), settings, where)
        else:
            settings.setdefault("gradient_accumulation_steps", here)
            result["report"] = report(Path(folder), settings, where, total)
    if json and rank == 0:
        write_whole(Path(json), result)
points = result.get("sweep", result.get("tune", {}).get("tried", []))
if rank == 0 and points and all("problem" in p for p in points):
    fail("no point ran")
