"""
Check and measure isoGPT on this machine's GPUs. No network, tokenizer or data set is needed.

    python measure/gpu_check.py first --nanogpt=FOLDER --seconds=540 --out=OUT    what matters most
    python measure/gpu_check.py second --seconds=240 --out=OUT2                   what comes next
    python measure/gpu_check.py parity bits     only these checks, in this order
    python measure/gpu_check.py                 everything, with the GPUs that there are
    python measure/gpu_check.py --device=cpu    with small sizes, as in the tests

Each line of the table says what was checked, what is expected, what was found, and pass or FAIL. In brackets
is the basis of an expectation: "H200: ..." was measured on one in November 2026, "predicted" was not. A line
without a verdict is a measurement. table.md and table.json are written to --out after each line, so a kill
leaves all lines so far. The exit status is 1 if a line failed.

The program ends within --seconds. This time is divided among the checks in proportion to their seconds in
CHECKS. What a check does not use is left to those after it, and a check that is late is killed. All runs are
forked from tests/zygote.py, which imports torch and isogpt before CUDA starts; this process imports neither.
"""

import argparse
import json
import math
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

import numpy as np
from runs import REPO, TINY, Run, Zygote, column, records, steps_in, tiny_data

MARK = "RESULT "  # before a result in the output of gpu_parts.py
POLL_S = 0.02
FIRST_STEP = "iter 0: loss"  # in the output of both programs
Curve = dict[int, float] | str  # losses by step, or why there are none


@dataclass
class Line:
    """A line of the table. `passed` is None for a measurement."""

    what: str
    expected: str
    found: str
    passed: bool | None = None
    check: str = ""
    at_s: float = 0.0  # seconds since the start of the program


@dataclass
class Speed:
    """A run of GPT-2 124M; ms is the median of the later steps."""

    ms: float
    first_s: float  # from the fork to the first step
    memory_gb: float
    tokens_per_s: float = math.nan
    mfu: float | None = None
    optimizer_ms: float = math.nan

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        speed = "" if math.isnan(self.tokens_per_s) else f", {self.tokens_per_s:,.0f} tokens/s"
        return f"{self.ms:.2f} ms{speed}{mfu}, {self.memory_gb:.2f} GB, first step after {self.first_s:.1f} s"


@dataclass
class Place:
    """Where the checks run, and what later checks compare with."""

    folder: Path  # with data sets tiny and random
    device: str  # cuda or cpu
    zygote: Zygote
    nanogpt: Path | None = None
    out: Path | None = None
    name: str = "CPU"  # of the device
    processes: int = 2  # for the checks of several processes
    began: float = 0.0
    deadline: float = math.inf  # of the present check
    runs: list[Run] = field(default_factory=list)  # of the present check
    speeds: dict[str, Speed] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether sizes are real, and ratios of speeds have a verdict."""
        return self.device == "cuda"

    @property
    def is_known(self) -> bool:
        """Whether milliseconds have a verdict: what is expected is known of an H100 and an H200."""
        return bool(re.search("H[12]00", self.name))


def now() -> float:
    """The clock of all deadlines."""
    return time.monotonic()


# ------------------------------------------------------------------------------------------------------------
# runs


def start(place: Place, script: Path | str, args: list[str], nproc: int = 1) -> Run:
    """Fork a run of a script; `wait` waits for it, and it is killed when the check ends."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": f"{place.folder}/compiled-{Path(script).stem}"}
    args = [*args, f"--device={place.device}"]
    # whole: with the measured peak and a plot that is drawn, as a user's run
    run = place.zygote.start(args, place.folder, nproc, script, env=cache, whole=True)
    place.runs.append(run)
    return run


def problem_of(run: Run | None) -> str:
    """Why a run has no result; '' if it has ended well."""
    if run is None:
        return "not tried: no time was left"
    state = "not done in its time" if None in run.codes else f"exit status {run.codes}"
    return f"{state}: {run.text()[-400:]}" if any(code != 0 for code in run.codes) else ""


def pause(place: Place, *runs: Run) -> None:
    """Wait for a moment. TimeoutError: the check is late."""
    if now() > place.deadline:
        raise TimeoutError(" | ".join(filter(None, map(problem_of, runs))))
    time.sleep(POLL_S)


def wait(place: Place, *runs: Run, text: str = "") -> None:
    """Wait for the end of these runs, or until one shows a text. TimeoutError: the check is late."""
    while not all([run.poll() for run in runs]):
        if text and any(text in run.text() for run in runs):
            return
        pause(place, *runs)


def finish(place: Place, run: Run) -> Run:
    """Wait for the end of a run, which must end well."""
    wait(place, run)
    if problem := problem_of(run):
        raise RuntimeError(problem)
    return run


def end_runs(place: Place, within: float = 5) -> None:
    """Kill what still runs, with its children, and wait until it is gone."""
    for run in place.runs:
        for pid, code in zip(run.pids, run.codes, strict=True):
            if code is None:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
    for run in place.runs:
        run.gone(within)
    place.runs.clear()


def results(place: Place, part: str, *folders: Path | None) -> Iterator[dict]:
    """What a function of gpu_parts.py prints in a separate process, as it arrives."""
    args = [part, *(str(folder) for folder in folders if folder)]
    run, count, is_done = start(place, "measure/gpu_parts.py", args), 0, False
    while not is_done:
        is_done = run.poll()
        printed = [text for text in run.text().split("\n")[:-1] if text.startswith(MARK)]
        for text in printed[count:]:
            yield json.loads(text.removeprefix(MARK))
        count = len(printed)
        pause(place, run)
    finish(place, run)


def part(place: Place, name: str, *folders: Path | None) -> Iterator[Line]:
    """The lines of a function of gpu_parts.py."""
    for result in results(place, name, *folders):
        yield Line(**result)


def start_tiny(place: Place, name: str, args: list[str], nproc: int = 1) -> Run:
    """Start 20 steps of the tiny model, on a CPU if the name begins with cpu."""
    base = [*TINY, "--max_iters=19", "--save_checkpoint=False", f"--out_dir={name}"]
    where = replace(place, device="cpu") if name.startswith("cpu") else place  # shares the list of runs
    return start(where, "train.py", [*base, *args], nproc)


def run_tiny(place: Place, settings: dict[str, list[str]], at_once: int = 6) -> dict[str, Run | None]:
    """
    Train the tiny model with several settings, by name, at the same time, because on a GPU the starts take
    longer than the steps. If a run fails or is late, the others go on.
    """
    names, runs = list(settings), dict.fromkeys(settings)
    at_once = at_once if place.on_gpu else 2
    for i in range(0, len(names), at_once):
        some = {name: start_tiny(place, name, settings[name]) for name in names[i : i + at_once]}
        runs |= some
        try:
            wait(place, *some.values())
        except TimeoutError:
            break
    return runs


def curve_of(place: Place, name: str, run: Run | None) -> Curve:
    """What a run has logged, or its problem."""
    return problem_of(run) or column(place.folder / name, "loss")


def train_tiny(place: Place, settings: dict[str, list[str]], at_once: int = 6) -> dict[str, Curve]:
    """The curves of the tiny model with several settings, by name."""
    runs = run_tiny(place, settings, at_once)
    return {name: curve_of(place, name, run) for name, run in runs.items()}


def train_ranks(place: Place, name: str, args: list[str]) -> Curve:
    """The curve of the tiny model on all processes."""
    run = start_tiny(place, name, args, place.processes)
    wait(place, run)
    return curve_of(place, name, run)


def gpt2(place: Place, *flags: str) -> list[str]:
    """Settings that nanoGPT has too: GPT-2 124M on random tokens, or a model for a CPU."""
    shape = "--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=2 --dtype=float32 --max_iters=12"
    if place.on_gpu:
        shape = "--block_size=1024 --batch_size=16 --dtype=bfloat16 --max_iters=40"
    rest = "--gradient_accumulation_steps=1 --eval_interval=100000 --eval_iters=1 --log_interval=1"
    rest += f" --bias=False --dropout=0.0 --compile={place.on_gpu}"
    return [*shape.split(), *rest.split(), f"--dataset={place.folder}/data/random", *flags]


def train_gpt2(place: Place, name: str, *flags: str, nproc: int = 1) -> Speed:
    """Train GPT-2 while nothing else runs; metrics are in the folder of this name."""
    began = now()
    args = gpt2(place, f"--out_dir={name}", "--save_checkpoint=False", "--check_layout=False", *flags)
    run = start(place, "train.py", args, nproc)
    wait(place, run, text=FIRST_STEP)
    first_s = now() - began
    finish(place, run)
    rows = [r for r in records(place.folder / name) if "step_ms" in r]
    later = rows[len(rows) // 3 :]
    mfus = [r["mfu"] for r in later if r["mfu"]]  # None: unknown, or above 100%
    return Speed(
        ms=statistics.median(r["step_ms"] for r in later),
        first_s=first_s,
        memory_gb=rows[-1]["memory_gb_max"],
        tokens_per_s=statistics.median(r["tokens_per_s"] for r in later),
        mfu=statistics.median(mfus) if mfus else None,
        optimizer_ms=records(place.folder / name)[-1]["spans_ms"]["optimizer"]["mean"],
    )


def plain(place: Place) -> Speed:
    """GPT-2 with the default settings, which other settings are compared with."""
    if "plain" not in place.speeds:
        place.speeds["plain"] = train_gpt2(place, "plain")
    return place.speeds["plain"]


# nanoGPT's unchanged train.py, and its memory
THEIRS = """import os, sys, torch
os.chdir({folder!r})
sys.path.insert(0, {folder!r})
path = {folder!r} + "/train.py"
exec(compile(open(path).read(), path, "exec"), {{"__name__": "__main__", "__file__": path}})
print(f"memory {{torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0:.3f}} GB")
"""


def train_nanogpt(place: Place) -> Speed:
    """The same as train_gpt2, with nanoGPT."""
    (place.folder / "nanogpt.py").write_text(THEIRS.format(folder=str(place.nanogpt)))
    began, args = now(), gpt2(place, f"--out_dir={place.folder}/theirs", "--wandb_log=False")
    run = start(place, place.folder / "nanogpt.py", args)
    wait(place, run, text=FIRST_STEP)
    first_s = now() - began
    finish(place, run)
    times = [float(ms) for ms in re.findall(r"time ([0-9.]+)ms", run.text())]
    memory_gb = float(re.findall(r"memory ([0-9.]+) GB", run.text())[-1])
    return Speed(statistics.median(times[len(times) // 3 :]), first_s, memory_gb)


def bounded(
    judged: bool, what: str, value: float, text: str, basis: str, least: float = 0, most: float = math.inf
) -> Line:
    """A line that passes if a figure is within its bounds; without a verdict on a CPU, if it is a speed."""
    limits = f"{least:g} to {most:g}" if least else f"<= {most:g}"
    if most == math.inf:
        limits = f">= {least:g}"
    return Line(what, f"{limits} ({basis})", text, least <= value <= most if judged else None)


def close(what: str, one: Curve, other: Curve, limit: float, basis: str = "rounding") -> Line:
    """A line that passes if two curves differ by no more than the limit; 0: they must be equal."""
    expected = f"<= {limit:g} ({basis})" if limit else f"the same bits ({basis})"
    for curve in (one, other):
        if isinstance(curve, str):
            return Line(what, expected, curve, False)
    differences = [abs(one[step] - other[step]) for step in one]
    text = f"{max(differences):.2g}"
    if not limit:
        text = f"{sum(d != 0 for d in differences)} of {len(one)} losses differ"
    return Line(what, expected, text, all(d <= limit for d in differences))  # not with NaN


def failed(what: str, error: Exception) -> Line:
    """The line of a check that has raised an error."""
    return Line(what, "no error", " ".join(f"{type(error).__name__}: {error}".split())[:600], False)


# ------------------------------------------------------------------------------------------------------------
# speed and memory


def cold(place: Place) -> Iterator[Line]:
    """GPT-2 124M with an empty cache of torch.compile, whose modules `gradients` has imported before."""
    speed, what = plain(place), "GPT-2 124M, one micro-batch of 16: ms a step"
    basis = "H200: 34.8 to 35.6; H100: 31.5 predicted, and 4 of waiting"
    yield bounded(place.is_known, what, speed.ms, str(speed), basis, most=37)
    what, basis = "seconds to the first step", "H200: 40 to 46 for a run"
    yield bounded(place.is_known, what, speed.first_s, f"{speed.first_s:.1f}", basis, most=50)
    yield from part(place, "memory_use", place.folder / "plain")


def nanogpt(place: Place) -> Iterator[Line]:
    """nanoGPT with the same data, model, micro-batch, dtype and compile, and an empty cache."""
    if not place.nanogpt:
        yield Line("nanoGPT", "", "not tried: --nanogpt=FOLDER names a clone")
        return
    ours, theirs = plain(place), train_nanogpt(place)
    yield Line("nanoGPT, the same: ms a step", "(H200: 33.9 to 34.8)", str(theirs))
    ratio, what = theirs.first_s / ours.first_s, "nanoGPT's seconds to the first step / ours"
    yield bounded(place.on_gpu, what, ratio, f"{ratio:.2f}", "H200: 0.8 to 1.2", least=0.8)
    yield Line("our GB / nanoGPT's", "", f"{ours.memory_gb:.2f} / {theirs.memory_gb:.2f}")


def warm(place: Place) -> Iterator[Line]:
    """Pairs of runs with warm caches, as many as there is time for."""
    for pair in range(1, 4):
        began = now()
        ours = train_gpt2(place, "ours")
        yield Line(f"with a warm cache, run {pair}: ms a step", "", str(ours))
        if place.nanogpt:
            theirs, what = train_nanogpt(place), f"nanoGPT's step / ours, pair {pair}"
            ratio, text = theirs.ms / ours.ms, f"{theirs.ms / ours.ms:.3f}: nanoGPT {theirs}"
            basis = "parity: both compile to the same kernels; H200: 0.96 to 0.99"
            yield bounded(place.on_gpu, what, ratio, text, basis, least=0.95)
        if now() + 1.3 * (now() - began) > place.deadline:
            return


def trace(place: Place) -> Iterator[Line]:
    """The kernels of a step."""
    train_gpt2(place, "traced", "--profile=True", "--max_iters=12")
    yield from part(place, "traced", place.folder / "traced", place.out)


def changed(place: Place, flags: str, limit: float, basis: str, optimizer: float = 0) -> Iterator[Line]:
    """
    The step with these settings against the plain one, and its memory.

    Args:
        optimizer: how much longer the optimizer may take, as a share of the step; 0: not compared.
    """
    base, speed = plain(place), train_gpt2(place, flags, *flags.split())
    ratio, what = speed.ms / base.ms, f"the step with {flags} / the plain one"
    text = f"{ratio:.3f}: {speed}; {speed.memory_gb / base.memory_gb:.2f} of the memory"
    yield bounded(place.on_gpu, what, ratio, text, basis, most=limit)
    if optimizer:
        share = (speed.optimizer_ms - base.optimizer_ms) / speed.ms
        what = "how much longer its optimizer takes, as a share of the step"
        text = f"{share:.1%}: {speed.optimizer_ms:.2f} ms, plain {base.optimizer_ms:.2f} ms"
        yield bounded(place.on_gpu, what, share, text, "predicted: 0.06", most=optimizer)


def batch64(place: Place) -> Iterator[Line]:
    """A micro-batch of 64: the MFU."""
    flag = f"--batch_size={64 if place.on_gpu else 8}"
    speed = train_gpt2(place, "batch64", flag)
    mfu = speed.mfu or 0.0  # None if it is above 100%
    yield bounded(place.on_gpu, f"{flag[2:]}: MFU", mfu, str(speed), "H200: 0.486", least=0.46)
    yield from part(place, "memory_use", place.folder / "batch64")


def experts(place: Place) -> Iterator[Line]:
    """Mixture of experts: the curve, and the step of a dense model with equal active parameters."""
    n, model = place.processes, ["--n_expert=4"]
    runs = {"cpu experts": [*UNCOMPILED, *model], "float32": [*UNCOMPILED, *model]}
    curves = train_tiny(place, runs | {"bfloat16": [*UNCOMPILED, *model, "--dtype=bfloat16"]})
    reference = curves["cpu experts"]
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 0.03)):
        what = f"4 experts, {dtype}: losses of 20 steps against the CPU's in float32"
        yield close(what, reference, curves[dtype], limit)
    for flags in ("--ep=2", "--ep=2 --zero=3") if n % 2 == 0 else ():
        curve = train_ranks(place, "experts ep", [*UNCOMPILED, *model, *flags.split()])
        yield close(f"4 experts, float32 on {n} processes {flags}", reference, curve, 1e-4)
    width, batch = (768, 8) if place.on_gpu else (64, 2)
    dense = train_gpt2(place, "dense", f"--batch_size={batch}", f"--n_hidden={8 * width}")
    sparse = ["--n_expert=8", f"--n_hidden={4 * width}"]
    moe = train_gpt2(place, "moe", f"--batch_size={batch}", *sparse)
    ratio, text = moe.ms / dense.ms, f"{moe.ms / dense.ms:.2f}: {moe}; dense {dense}"
    what = "the step with 8 experts, 2 active / dense with equal active parameters"
    yield bounded(place.on_gpu, what, ratio, text, "predicted", most=1.5)


def graphs(place: Place) -> Iterator[Line]:
    """A small model whose kernels are launched together, with one micro-batch a step and with several."""
    runs = {}
    for accumulation in (1, 4):
        base = ["--dtype=float32", "--batch_size=12", f"--gradient_accumulation_steps={accumulation}"]
        runs |= {f"graphs {accumulation} {on}": [*base, f"--cuda_graphs={on}"] for on in (False, True)}
    curves = train_tiny(place, runs)
    for accumulation in (1, 4):
        what = f"--cuda_graphs --gradient_accumulation_steps={accumulation}: losses"
        yield close(what, *(curves[f"graphs {accumulation} {on}"] for on in (False, True)), 1e-4)
    texts = []
    for on in (False, True):  # one after the other, with a warm cache
        run = finish(place, start_tiny(place, f"graphs 1 {on}", runs[f"graphs 1 {on}"]))
        rows = [r["step_ms"] for r in records(place.folder / f"graphs 1 {on}") if "step_ms" in r]
        texts.append(f"{statistics.median(rows[6:]):.2f}")
    said = re.findall(r"compile: [^\n]*", run.text())[-1]
    is_recorded = "0 graph breaks" in said and "without CUDA graphs" not in said
    yield Line("--cuda_graphs", "all recorded", said, is_recorded if place.on_gpu else None)
    yield Line("a small model without and with --cuda_graphs: ms a step", "", " and ".join(texts))


def layers(place: Place) -> Iterator[Line]:
    """Statistics of the layers in each step: the bits of the run, and the time."""
    base = ["--deterministic=True", "--dtype=bfloat16"]
    runs = {f"statistics {n}": [*base, f"--stats_interval={n}"] for n in (0, 1)}
    yield close("--stats_interval=1: losses", *train_tiny(place, runs).values(), 0, "nothing is changed")
    # 2% at an interval of 100 are two steps
    yield from changed(place, "--stats_interval=1", 3.0, "predicted: 1.5")


def large(place: Place, flags: str) -> Iterator[Line]:
    """GPT-2 XL on one device: full recomputation, with the parameters held as by DDP or by FSDP."""
    shape = ["--n_layer=48", "--n_head=25", "--n_embd=1600", "--batch_size=4"] if place.on_gpu else []
    args = [*shape, "--max_iters=9", "--activation_checkpointing=full", *flags.split()]
    speed = train_gpt2(place, "large", *args)
    is_finite = all(map(math.isfinite, column(place.folder / "large", "loss").values()))
    yield Line(f"GPT-2 XL, full recomputation {flags}".strip(), "trains", str(speed), is_finite)


# ------------------------------------------------------------------------------------------------------------
# exactness

UNCOMPILED = ["--dtype=float32", "--compile=False"]
# architectures and optimizers besides GPT-2 and AdamW
MODERN = (["--arch=nanochat", "--optimizer=muon", "--muon_lr=0.005"], ["--arch=llama", "--n_kv_head=1"])


def parity(place: Place) -> Iterator[Line]:
    """The curve of a CPU in float32: layouts and ways to recompute that one device has, and bfloat16."""
    layouts = ([], ["--zero=3"], ["--activation_checkpointing=full"], ["--zero=2", "--cpu_offload=True"])
    runs = {"cpu": UNCOMPILED, "bfloat16": ["--dtype=bfloat16", "--compile=False"]}
    compared = {}  # a run, and the CPU's
    for flags in layouts:
        compared[" ".join(["float32", *flags])] = "cpu", flags
    for model in MODERN if place.on_gpu else MODERN[:1]:
        runs[f"cpu {model[0]}"] = [*UNCOMPILED, *model]
        for flags in ([], ["--zero=3"]):
            compared[" ".join(["float32", *model[:2], *flags])] = f"cpu {model[0]}", [*model, *flags]
    curves = train_tiny(place, runs | {name: [*UNCOMPILED, *flags] for name, (_, flags) in compared.items()})
    for name, (cpu, _) in compared.items():
        what = f"{name}: losses of 20 steps against the CPU's"
        yield close(what, curves[cpu], curves[name], 1e-4, "H200: 1e-6")
    what = "bfloat16: losses against float32's"
    yield close(what, curves["cpu"], curves["bfloat16"], 0.03, "H200: 1.2e-4")
    if not isinstance(curves["float32"], str):
        memory_gb = max(column(place.folder / "float32", "memory_gb").values())
        text, what = f"{memory_gb:.2f} GB", "memory of the tiny model, GB"
        yield bounded(place.on_gpu, what, memory_gb, text, "no matmul that measures the peak", most=0.3)


def dtypes(place: Place) -> Iterator[Line]:
    """float16 and tf32 against float32."""
    # offloaded: the scale of the loss, the gradients and their divisor are on different devices
    names = {"--dtype=float16": "1.7e-5", "--dtype=float16 --zero=2 --cpu_offload=True": "1.7e-5"}
    names |= {"--dtype=tf32": "1.1e-5"} if place.on_gpu else {}
    runs = {"cpu": UNCOMPILED} | {name[2:]: [*UNCOMPILED, *name.split()] for name in names}
    curves = train_tiny(place, runs)
    for name, measured in names.items():
        what = f"{name}: losses against float32's"
        yield close(what, curves["cpu"], curves[name[2:]], 0.03, f"H200: {measured}")


def bits(place: Place) -> Iterator[Line]:
    """
    A run that is stopped and resumed ends with the bits of a run that is not stopped; with exact, so does a
    sharded one.
    """
    ways = ("--dtype=float32", "--dtype=bfloat16", "--dtype=float32 --zero=3")
    runs, resumed = {}, {}
    for way in ways:
        saving = [*way.split(), "--deterministic=True", "--dropout=0.1"]
        saving += ["--save_checkpoint=True", "--save_interval=10"]
        runs |= {f"whole {way}": saving, f"parts {way}": [*saving, "--max_iters=9"]}
        resumed[f"parts {way}"] = [*saving, "--init_from=resume"]
    for dtype in ("float32", "bfloat16"):
        exact = [*MODERN[0], f"--dtype={dtype}", "--exact=True", "--gradient_accumulation_steps=4"]
        exact += ["--dropout=0.1"]
        runs |= {f"exact {dtype}": exact, f"exact {dtype} --zero=3": [*exact, "--zero=3"]}
    # each compiles, for which another round would not leave enough time
    curves = train_tiny(place, runs, at_once=10) | train_tiny(place, resumed)
    for way in ways:
        what = f"resume {way} --deterministic --dropout=0.1"
        yield close(what, curves[f"whole {way}"], curves[f"parts {way}"], 0, "H200: 0 differ")
    for dtype in ("float32", "bfloat16"):
        what = f"--exact with Muon in {dtype}, with and without --zero=3"
        yield close(what, curves[f"exact {dtype}"], curves[f"exact {dtype} --zero=3"], 0, "H200: 0 differ")


def compiled(place: Place) -> Iterator[Line]:
    """What torch.compile makes of the model, in each layout and architecture."""
    layouts = [[], ["--zero=3"], ["--zero=3", "--activation_checkpointing=full"]]
    layouts += [["--activation_checkpointing=selective"], *MODERN]
    layouts = layouts if place.on_gpu else layouts[:1]
    runs = {"plain": UNCOMPILED}
    runs |= {f"plain {model[0]}": [*UNCOMPILED, *model] for model in MODERN}
    for flags in layouts:
        runs[" ".join(["compile", *flags])] = [*flags, "--eval_interval=10"]
    started = run_tiny(place, runs)
    curves = {name: curve_of(place, name, run) for name, run in started.items()}
    for flags in layouts:
        name = " ".join(["compile", *flags])
        said = (re.findall(r"compile: [^\n]*", started[name].text() if started[name] else "") or [""])[-1]
        is_whole = ", 0 graph breaks" in said and "failed" not in said
        yield Line(name, "0 graph breaks", said, is_whole if place.on_gpu else None)
        reference = curves[f"plain {flags[0]}" if flags in MODERN else "plain"]
        yield close(f"{name}: losses", reference, curves[name], 1e-4)


# ------------------------------------------------------------------------------------------------------------
# several processes


def planned(place: Place) -> Iterator[Line]:
    """--layout=auto: the curve, and the predicted and the measured step."""
    n = place.processes
    reference = train_tiny(place, {"cpu planned": UNCOMPILED})["cpu planned"]
    curve = train_ranks(place, "planned", [*UNCOMPILED, "--layout=auto"])
    what = f"float32 on {n} processes --layout=auto: losses of 20 steps against the CPU's"
    yield close(what, reference, curve, 1e-4)
    flags = ["--layout=auto", f"--gradient_accumulation_steps={8 * n}", "--batch_size=8"]
    speed = train_gpt2(place, "predicted", *flags, "--max_iters=23", nproc=n)
    text = place.runs[-1].text()
    predicted = float(re.search(r"by prediction: ([\d,.]+) ms", text)[1].replace(",", ""))
    ratio, text = predicted / speed.ms, f"{predicted / speed.ms:.2f}: {predicted:.1f} and {speed.ms:.1f} ms"
    what = f"--layout=auto on {n} processes: the predicted step / the measured one"
    yield bounded(place.on_gpu, what, ratio, text, "predicted", least=0.75, most=1.25)


def networks(place: Place) -> Iterator[Line]:
    """
    How far compressed gradients and islands take the curve from the exact one; the lossy ones have to learn.
    """
    n = place.processes
    reference = train_tiny(place, {"cpu networks": UNCOMPILED})["cpu networks"]
    limits = {"fp16": 2e-3, "bf16": 0.02, "int8": 0.02, "powersgd:1": 0.3}
    modes = {f"--grad_compression={kind}": limit for kind, limit in limits.items()}
    modes |= {"--islands=2 --local_steps=4": 0.3} if n % 2 == 0 else {}
    for flags, limit in modes.items():
        curve = train_ranks(place, "networks", [*UNCOMPILED, *flags.split()])
        yield close(f"float32 on {n} processes {flags}", reference, curve, limit)


def several(place: Place) -> Iterator[Line]:
    """The curve on several devices, also with exact."""
    n = place.processes
    exact = [*MODERN[0], "--exact=True", "--gradient_accumulation_steps=4", "--dropout=0.1"]
    curves = train_tiny(place, {"one": UNCOMPILED, "one exact": exact})
    layouts = ["", "--zero=1", "--zero=2", "--zero=3"]
    if n % 2 == 0:
        layouts += ["--zero=3 --dp_replicate=2", "--tp=2", "--pp=2", "--cp=2", "--zero=3 --tp=2"]
    if n % 8 == 0:
        layouts.append("--zero=3 --tp=2 --pp=2")
    layouts.append("--ddp_bucket_mb=0.02 --compile=True")
    for flags in layouts:
        curve = train_ranks(place, "several", [*UNCOMPILED, *flags.split()])
        yield close(f"float32 on {n} processes {flags}".strip(), curves["one"], curve, 1e-4)
    for flags in ("--zero=0", "--zero=1", "--zero=3"):
        curve = train_ranks(place, "several", [*exact, flags])
        yield close(f"--exact on {n} processes {flags}", curves["one exact"], curve, 0, "exact")


def collectives(place: Place) -> Iterator[Line]:
    """The bandwidth of large messages."""
    finish(place, start(place, "bench.py", ["--comm=True", "--json_path=comm.json"], place.processes))
    for cell in json.loads((place.folder / "comm.json").read_text())["comm"][-5:]:
        text = cell.get("problem") or f"{cell['gb_per_s']:.1f} GB/s of bus bandwidth"
        yield Line(f"{cell['operation']}, {cell['bytes'] / 2**20:.0f} MiB", "", text)


def killed(place: Place) -> Iterator[Line]:
    """SIGKILL to the last rank: how long until the others have said so and exited."""
    run = start_tiny(place, "killed", [*UNCOMPILED, "--max_iters=1000000"], place.processes)
    while steps_in(place.folder / "killed") < 20:
        pause(place, run)
    began = now()
    run.kill([place.processes - 1])
    run.gone(60)
    took, named = now() - began, re.findall(r"rank \d+ does not respond", run.text())
    text, passed = f"{took:.1f} s, {named[:1]}", took < 20 and bool(named)
    yield Line("a killed rank: named, and the others exit", "within 20 s", text, passed)


# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Lines of the table that one function finds."""

    name: str
    group: str  # first, second or last
    seconds: float  # that it may take on an H100 or H200; they determine its share of --seconds
    lines: Callable[[Place], Iterator[Line]]
    needs: str = ""  # a setting of train.py, without which the check is left out
    least: int = 1  # devices, without which it is not tried


EXACT = "predicted for sums in few kernels; H200: 1.31 before"
MUON = "--arch=nanochat --optimizer=muon"
RESIDUAL = partial(
    changed, flags="--dtype=bfloat16 --residual_dtype=bfloat16", limit=0.97, basis="H200, with a patch: 0.96"
)

# in order of importance; a new setting that changes the step's speed is one more line
CHECKS = (
    Check("ceilings", "first", 10, partial(part, name="ceilings")),
    Check("gradients", "first", 60, partial(part, name="gradients")),
    Check("cold", "first", 55, cold),
    Check("nanogpt", "first", 50, nanogpt),
    Check("warm", "first", 40, warm),
    Check("trace", "first", 15, trace),
    Check("parity", "first", 60, parity),
    Check("bits", "first", 40, bits),
    Check("batch64", "first", 50, batch64),
    Check("zero3", "first", 35, partial(changed, flags="--zero=3", limit=1.1, basis="predicted")),
    Check("exact", "first", 60, partial(changed, flags="--exact=True", limit=1.1, basis=EXACT)),
    Check("muon", "first", 55, partial(changed, flags=MUON, limit=1.15, basis="H200: 1.12", optimizer=0.08)),
    Check("generation", "second", 40, partial(part, name="generate")),
    Check("residual", "second", 60, RESIDUAL, "residual_dtype"),
    Check("experts", "second", 100, experts),
    Check("dtypes", "second", 30, dtypes),
    Check("graphs", "second", 30, graphs),
    Check("layers", "last", 90, layers),
    Check("operators", "last", 60, partial(part, name="operators")),
    Check("compiled", "last", 150, compiled),
    Check("large", "last", 120, partial(large, flags="")),
    Check("large_zero3", "last", 120, partial(large, flags="--zero=3")),
    Check("planned", "last", 120, planned),
    Check("networks", "last", 120, networks, least=2),
    Check("several", "last", 300, several, least=2),
    Check("collectives", "last", 60, collectives, least=2),
    Check("killed", "last", 60, killed, least=2),
)


def main() -> None:
    by_name = {check.name: check for check in CHECKS}
    groups = {check.group: [c for c in CHECKS if c.group == check.group] for check in CHECKS}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join([*groups, *by_name]))
    parser.add_argument("--nanogpt", type=Path, help="a clone of karpathy/nanoGPT")
    parser.add_argument("--out", type=Path, help="write the table to this folder after each line")
    parser.add_argument("--seconds", type=float, help="end within this time; by default, the sum of CHECKS")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    if unknown := set(options.checks) - by_name.keys() - groups.keys():
        possible = ", ".join([*groups, *by_name])
        parser.error(f"no such check: {', '.join(sorted(unknown))}; choose from {possible}")
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        parser.error(f"--seconds={options.seconds:g}: set it to a number above 0")
    if options.nanogpt and not (options.nanogpt / "train.py").exists():
        parser.error(f"{options.nanogpt} is not a clone of nanoGPT: it has no train.py")
    if options.out:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            parser.error(f"--out={options.out}: {e.strerror}")
    checks = [c for name in options.checks or groups for c in groups.get(name) or [by_name[name]]]
    checks = [check for check in checks if exists(check.needs)]
    seconds = options.seconds or sum(check.seconds for check in checks)
    with tempfile.TemporaryDirectory(prefix="isogpt-gpu-check-") as folder:
        place = Place(
            folder=Path(folder),
            device=options.device,
            zygote=Zygote({"TMPDIR": folder}),
            nanogpt=options.nanogpt and options.nanogpt.resolve(),
            out=options.out and options.out.resolve(),
            began=now(),
        )
        # the last resort: if this process itself waits for something that never comes
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, give_up)
        signal.setitimer(signal.ITIMER_REAL, seconds - reserve(seconds) / 2)
        try:
            lines = measure(place, checks, seconds)
            print(f"\n{table_of(lines, place)}")
        finally:
            with suppress(subprocess.TimeoutExpired):
                place.zygote.close(timeout=2)
            place.zygote.process.kill()
    print(f"took {now() - place.began:.1f} of {seconds:g} s")
    sys.exit(any(line.passed is False for line in lines))


def exists(setting: str) -> bool:
    """Whether train.py has this setting; True for ''."""
    return not setting or f"\n{setting} = " in (REPO / "train.py").read_text()


def reserve(seconds: float) -> float:
    """The part of the program's seconds that is kept for killing what is late and for the end."""
    return min(10.0, 0.05 * seconds)


def give_up(number: int, frame: object) -> None:
    """End the program, after a signal."""
    raise SystemExit(f"gpu_check: ended by {signal.Signals(number).name}; the table has what was measured")


def measure(place: Place, checks: list[Check], seconds: float) -> list[Line]:
    """Run checks; write and return their lines. It ends within these seconds since place.began."""
    lines, end = [], place.began + seconds - reserve(seconds)
    make_data(place)
    write_table(lines, place)
    place.deadline = end
    (facts,) = results(place, "facts")
    place.name = f"{facts['name']}, torch {facts['torch']}"
    if place.on_gpu:
        place.processes = min(8, facts["count"])
    if not place.processes:
        sys.exit("torch finds no GPU: --device=cpu runs the checks with small sizes")
    for i, check in enumerate(checks):
        began = now()
        share = check.seconds / sum(c.seconds for c in checks[i:])
        place.deadline = began + share * (end - began)
        for line in lines_of(check, place):
            lines.append(replace(line, check=check.name, at_s=round(now() - place.began, 1)))
            print(f"{check.name}: {line.what}: {line.found}", flush=True)
            write_table(lines, place)
        print(f"({check.name} took {now() - began:.0f} of {place.deadline - began:.0f} s)", flush=True)
    return lines


def make_data(place: Place) -> None:
    """The data sets of the checks: tiny, and random ids with nanoGPT's metadata."""
    tiny_data(place.folder)
    folder, size, vocab = place.folder / "data/random", 2**14, 512
    if place.on_gpu:
        size, vocab = 2**20, 50304
    folder.mkdir()
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab}))
    for split in ("train", "val"):
        ids = np.random.default_rng(0).integers(0, 512, size, dtype=np.uint16)
        ids.tofile(folder / f"{split}.bin")


def lines_of(check: Check, place: Place) -> Iterator[Line]:
    """The lines of a check; an exception is a line that failed, and the other checks still run."""
    try:
        if place.processes < check.least:
            yield Line(check.name, f"{check.least} devices", "not tried")
        else:
            yield from check.lines(place)
    except Exception as e:
        yield failed(check.name, e)
    finally:
        end_runs(place)


def table_of(lines: list[Line], place: Place) -> str:
    """The table in Markdown, with the device and the version of torch."""
    head = f"{place.name}, {now() - place.began:.0f} s"
    rows = [f"{head}\n", "| check | what | expected | found | |", "|---|---|---|---|---|"]
    for line in lines:
        verdict = "" if line.passed is None else "pass" if line.passed else "FAIL"
        found = " ".join(line.found.split()).replace("|", "\\|")
        rows.append(f"| {line.check} | {line.what} | {line.expected} | {found} | {verdict} |")
    return "\n".join(rows)


def write_table(lines: list[Line], place: Place) -> None:
    """Replace the tables in place.out by all lines so far: a kill at any moment leaves whole ones."""
    as_json = json.dumps([asdict(line) for line in lines], indent=1)
    texts = {"table.md": table_of(lines, place), "table.json": as_json}
    for name, text in texts.items() if place.out else ():
        (place.out / f".{name}").write_text(text + "\n")
        os.replace(place.out / f".{name}", place.out / name)


if __name__ == "__main__":
    main()
