"""
What a run tells: the console's lines, metrics.jsonl, wandb, the picture of the curve; and what the device could do.
"""

import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

# Dense bfloat16 (V100, T4: float16) matmul peaks in FLOP/s, from the makers' data sheets; the first name found in
# the device's wins. TF32 runs at half of it on those that have it.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "A6000": 155e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
    "3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def now() -> str:
    """The time as metrics.jsonl has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# ---------------------------------------------------------------------------------------------------------------------
# the log


@dataclass
class Log:
    """Where a run writes. Without a file (the other ranks, an evaluation only) nothing is written."""

    out_dir: Path
    file: IO[bytes] | None = None
    wandb: Any = None
    is_full: bool = False
    stood_since: float | None = None  # when the run before this start wrote its last line: seconds since the epoch

    def event(self, name: str, iter_num: int, **facts: object) -> None:
        """Record what happened: start, resume, save, end, …"""
        self.write({"event": name, "iter": iter_num, **facts})

    def write(self, record: dict) -> None:
        """One line of metrics.jsonl; it is in the file when this returns. A full disk costs lines, not the run."""
        if not self.file:
            return
        line = json.dumps(as_json(record | {"time": now()})) + "\n"
        try:
            self.file.write(line.encode())
        except OSError as e:
            if not self.is_full:
                print(f"warning: {self.file.name} cannot be written ({e.strerror}); training goes on", flush=True)
            self.is_full = True

    def close(self) -> None:
        """Finish the files."""
        if self.file:
            self.file.close()
        if self.wandb:
            self.wandb.finish()


def as_json(value: object) -> object:
    """JSON has no nan and no infinity: they become strings."""
    if isinstance(value, dict):
        return {k: as_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [as_json(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def open_log(out_dir: str, resumed_step: int) -> Log:
    """
    The log of a run that goes on with step `resumed_step` (rank 0 only): metrics.jsonl is cut back to before it, so
    that each step stands there once; torn lines go, events stay.
    """
    log = Log(Path(out_dir))
    path = log.out_dir / "metrics.jsonl"
    if path.exists():
        records = read_log(path)
        if records and resumed_step and isinstance(records[-1].get("time"), str):
            log.stood_since = datetime.fromisoformat(records[-1]["time"]).timestamp()
        kept = [r for r in records if "event" in r or r.get("iter", 0) < resumed_step]
        other = path.with_suffix(".jsonl.tmp")
        other.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(other, path)
    log.file = open(path, "ab", buffering=0)  # unbuffered: a line is there, or an error is
    return log


def read_log(path: Path) -> list[dict]:
    """The records of a metrics.jsonl; a line that a kill tore apart is left out."""
    records = []
    with open(path, errors="replace") as f:
        for line in f:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                records.append(record)
    return records


def start_wandb(project: str, name: str, run_id: str | None, config: dict) -> Any:
    """
    Open a wandb run, or go on with the one called `run_id` (rank 0 only). One axis for everything: the step.

    Raises:
        ValueError: wandb is not installed, or cannot start.
    """
    try:
        import wandb

        return wandb.init(project=project, name=name, id=run_id, resume="allow" if run_id else None, config=config)
    except Exception as e:  # wandb's errors share no base but Exception
        reason = " ".join(str(e).split())
        raise ValueError(f"wandb cannot start ({reason}): set WANDB_MODE=offline or --wandb_log=False") from e


def send(log: Log, iter_num: int, values: dict) -> None:
    """Log to wandb, if it is on. Steps that a resumed run repeats are there already: wandb keeps the first."""
    if log.wandb:
        log.wandb.log({"iter": iter_num, **values}, step=iter_num)


# ---------------------------------------------------------------------------------------------------------------------
# the picture


def draw(out_dir: Path) -> Path | None:
    """
    Draw loss.png from metrics.jsonl: the loss of each logged step and the evaluations. None without matplotlib; a
    picture is no reason to stop a run, so neither is a failure to write one.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    records = [r for r in read_log(out_dir / "metrics.jsonl") if "event" not in r]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style in (
        ("loss", "loss of the step", dict(color="0.75", linewidth=1)),
        ("train_loss", "train, evaluated", dict(color="tab:blue", marker=".")),
        ("val_loss", "val, evaluated", dict(color="tab:orange", marker=".")),
    ):
        points = [(r["iter"], r[key]) for r in records if isinstance(r.get(key), float)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=out_dir.resolve().name)
    if axes.lines:
        axes.legend()
    axes.grid(alpha=0.3)
    path = out_dir / "loss.png"
    other = path.with_suffix(".png.tmp")
    try:
        figure.savefig(other, format="png", dpi=110)
        os.replace(other, path)
    except OSError:
        return None
    return path


# ---------------------------------------------------------------------------------------------------------------------
# the device


class Clock:
    """
    Where the time of a step goes: `with clock("forward"):`. On a GPU a span is measured there, by events, for which
    the CPU does not wait; elsewhere by the CPU's clock. In a profiler's trace the spans have the same names.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.now = device.type == "cuda", {}
        self.count, self.doing = 0, "the start"  # for the watchdog: grows with each span; the span
        self.waiting, self.steps = deque(), deque(maxlen=1000)  # a dict of spans for each step

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            start = self.mark()
            self.count, self.doing = self.count + 1, name
            yield
            self.count, self.doing = self.count + 1, f"after {name}"
            self.now.setdefault(name, []).append((start, self.mark()))

    def mark(self) -> object:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(self, **more_ms: float) -> None:
        """The step is over; spans that were measured in another way, in ms, are added to its own."""
        self.waiting.append((self.now, more_ms))
        self.now = {}
        if len(self.waiting) > 2:  # a GPU has passed the events of the step before the last one: the loop waits for it
            spans, more = self.waiting.popleft()
            took = (lambda a, b: a.elapsed_time(b)) if self.on_gpu else (lambda a, b: (b - a) * 1e3)
            self.steps.append({name: sum(took(*pair) for pair in pairs) for name, pairs in spans.items()} | more)

    def last(self, name: str) -> float:
        """A span of the newest step that is known, in ms; 0 where there is none."""
        return self.steps[-1].get(name, 0.0) if self.steps else 0.0

    def medians(self) -> dict[str, float]:
        """The median of each span in ms, over the last thousand steps."""
        names = self.steps[-1] if self.steps else {}
        return {name: statistics.median(s[name] for s in self.steps if name in s) for name in names}


def summary(medians: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of every rank's Clock.medians: {span: {mean, max}} over the ranks."""
    values = {name: [m[name] for m in medians if name in m] for name in medians[0]}
    return {name: {"mean": statistics.mean(v), "max": max(v)} for name, v in values.items()}


def memory_gb(device: torch.device) -> float:
    """The most memory that this process has used so far, in GB: the GPU's, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def utilization(device: torch.device) -> float | None:
    """Percent of the last second in which the GPU did something; None where that cannot be read (it wants pynvml)."""
    try:
        return float(torch.cuda.utilization(device)) if device.type == "cuda" else None
    except Exception:  # a missing package, a driver that does not tell: nothing to stop a run for
        return None


def peak_flops(device: torch.device, dtype: str) -> tuple[float | None, str]:
    """
    (matmul FLOP/s that this device can do in `dtype`, where the figure is from): its data sheet's, or measured here;
    (None, 'unknown') where neither can be had.
    """
    if device.type == "cuda" and dtype != "float32":
        name = torch.cuda.get_device_name(device)
        peak = next((p for known, p in PEAKS.items() if known in name), None)
        if peak:
            return (peak / 2 if dtype == "tf32" else peak), "data sheet"
    try:
        return measured_matmul(device, dtype), "matmul measured here"
    except RuntimeError:
        return None, "unknown"


def measured_matmul(device: torch.device, dtype: str, seconds: float = 0.15) -> float:
    """FLOP/s of a square matmul, the best of as many as fit into `seconds`."""
    n = 1024 if device.type == "cpu" else 8192 if device.type == "cuda" else 2048
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in "ab")
    wait_for = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    best, end = math.inf, time.perf_counter() + seconds
    while True:
        wait_for()
        start = time.perf_counter()
        a @ b
        wait_for()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            return 2 * n**3 / best


def start_profiler(out_dir: str) -> torch.profiler.profile:
    """
    A profiler that skips 5 steps, traces 5, and writes <out_dir>/trace.json, on a GPU also what its memory holds, as
    memory.pickle for https://pytorch.org/memory_viz; call its step() after each step.
    """

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(os.path.join(out_dir, "trace.json"))
        if cuda:
            torch.cuda.memory._dump_snapshot(os.path.join(out_dir, "memory.pickle"))

    cuda = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, *cuda],
        schedule=torch.profiler.schedule(skip_first=4, wait=0, warmup=1, active=5, repeat=1),
        on_trace_ready=write,
    )
    if cuda:
        torch.cuda.memory._record_memory_history()
    profiler.start()
    return profiler


# ---------------------------------------------------------------------------------------------------------------------
# the console


def step_line(record: dict, left_s: float) -> str:
    """A logged step for the console; its start, up to the mfu, is the line that nanoGPT's tools parse."""
    mfu = f"{record['mfu'] * 100:.2f}%" if record["mfu"] is not None else "n/a"
    return (
        f"iter {record['iter']}: loss {record['loss']:.4f}, time {record['step_ms']:.2f}ms, mfu {mfu}, "
        f"{record['tokens_per_s']:,.0f} tokens/s, grad norm {record['grad_norm']:.3f}, "
        f"data {record['data_ms_max']:.1f}ms, {record['memory_gb_max']:.2f} GB, {duration(left_s)} left"
    )


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def step_record(
    iter_num: int, rows: Tensor, lr: float, tokens: int, tokens_a_step: int, flops_a_step: float, peak: float | None
) -> dict:
    """
    What a logged step says, from the row of every rank: (loss, grad_norm, step_ms, data_ms, memory_gb, …). The loss is
    the mean over the ranks, which is the mean over the whole global batch; for what a slow rank hides, the largest
    value stands beside the mean.
    """
    mean, most = rows.mean(0).tolist(), rows.max(0).values.tolist()
    step_s = mean[2] / 1e3
    return {
        "iter": iter_num,
        "loss": mean[0],
        "grad_norm": mean[1],
        "lr": lr,
        "step_ms": mean[2],
        "step_ms_max": most[2],
        "data_ms": mean[3],
        "data_ms_max": most[3],
        "memory_gb": mean[4],
        "memory_gb_max": most[4],
        "tokens_per_s": tokens_a_step / step_s,
        "mfu": flops_a_step / step_s / peak if peak else None,
        "tokens": tokens,
    }
