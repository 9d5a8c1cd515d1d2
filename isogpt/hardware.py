"""What the device does and could do: timing the parts of a step, memory, matmul peaks, and the profiler."""

import json
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from isogpt.agree import gather_number, gather_objects
from isogpt.precision import DTYPES


@dataclass(frozen=True)
class Gpu:
    """
    A GPU's data sheet.

    Args:
        matmul: peak of dense matmuls in bfloat16 (V100, T4: float16) in FLOP/s. TF32, where it exists, runs at half.
        bytes_per_s: of the memory; 0: not needed.
        plan: the entry of devices.HARDWARE that describes it with its usual links; "": there is none.
    """

    matmul: float
    bytes_per_s: float = 0
    plan: str = ""


# by the device's name without 'NVIDIA', which must match as a whole: laptops' GPUs, MIG slices and cards for PCIe are
# slower than the GPUs whose names they contain. Devices that are not listed are measured.
GPUS = {
    "B200": Gpu(2250e12),
    "H200": Gpu(989e12, 4.8e12, "h200"),
    "H200 NVL": Gpu(835e12),
    "GH200 480GB": Gpu(989e12),
    "H100( 80GB HBM3)?": Gpu(989e12, 3.35e12, "h100"),
    "H100 NVL": Gpu(835e12),
    "H100 PCIe": Gpu(756e12),
    "A100-SXM4-80GB": Gpu(312e12, 2.0e12, "a100"),
    "A100-SXM4-40GB": Gpu(312e12, 1.555e12, "a100"),
    "A100-PCIE-[48]0GB|A100 80GB PCIe": Gpu(312e12),  # without the links of SXM
    "A10": Gpu(125e12),
    "A10G": Gpu(70e12),
    "RTX 6000 Ada Generation": Gpu(364e12),
    "RTX A6000": Gpu(155e12),
    "L40S": Gpu(362e12),
    "L40": Gpu(181e12),
    "L4": Gpu(121e12),
    "RTX 4090": Gpu(165e12, 1.0e12, "4090"),
    "RTX 3090": Gpu(71e12),
    "V100-SXM2-(16|32)GB": Gpu(125e12),
    "V100-PCIE-(16|32)GB": Gpu(112e12),
    "T4": Gpu(65e12),
}


def known_gpu(device_name: str) -> Gpu | None:
    """The data sheet of a device with this name: 'NVIDIA A100-SXM4-80GB'; None if it is not known."""
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )*", "", device_name)
    return next((gpu for pattern, gpu in GPUS.items() if re.fullmatch(pattern, name)), None)


def peak_flops(device: torch.device, dtype: str) -> tuple[float | None, str]:
    """
    (matmul FLOP/s of this device in `dtype`, source of the figure): from its data sheet, or measured here;
    (None, 'unknown') if neither is possible.
    """
    if device.type == "cuda" and dtype != "float32" and (gpu := known_gpu(torch.cuda.get_device_name(device))):
        return (gpu.matmul / 2 if dtype == "tf32" else gpu.matmul), "data sheet"
    try:
        return measured_matmul(device, dtype), "measured matmul"
    except RuntimeError:
        return None, "unknown"
    finally:
        forget_peak_memory(device)  # up to 0.8 GB that no step needs


def total_peak_flops(device: torch.device, dtype: str) -> tuple[float | None, str]:
    """The sum of all ranks' peak_flops (all ranks), None if one is unknown, and the source of rank 0's figure."""
    peak, source = peak_flops(device, dtype)
    peaks = gather_objects(peak)
    return (sum(peaks), source) if all(peaks) else (None, "unknown")


def measured_matmul(device: torch.device, dtype: str) -> float:
    """FLOP/s of a square matmul."""
    n = {"cpu": 1024, "cuda": 8192}.get(device.type, 2048)
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in "ab")
    return 2 * n**3 / fastest(a.matmul, b)


def measured_copy(device: torch.device) -> float:
    """Bytes/s read and written by a copy of 256 MiB."""
    source = torch.ones(2**26, device=device)
    return 2 * source.nbytes / fastest(torch.empty_like(source).copy_, source, 0.3)


def fastest(function: Callable[[torch.Tensor], object], argument: torch.Tensor, budget: float = 0.15) -> float:
    """Seconds of the fastest call of function(argument), of as many as fit into `budget` seconds."""
    best, end = math.inf, time.perf_counter() + budget
    while best == math.inf or time.perf_counter() < end:
        synchronize(argument.device)
        start = time.perf_counter()
        function(argument)
        synchronize(argument.device)
        best = min(best, time.perf_counter() - start)
    return best


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished what was queued."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def memory_gb(device: torch.device) -> float:
    """
    Peak memory of this process in GB: what PyTorch has allocated on the GPU. On a CPU, the resident set: what the
    process has allocated, and the code of libraries, but not the data set, whose pages loader.release_pages gives back.
    0 if the system does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    with suppress(OSError, TypeError):  # Linux, whose ru_maxrss begins with the peak of the parent process
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024 / 1e9
    with suppress(ImportError):  # Windows
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9  # bytes on macOS
    return 0.0


def forget_peak_memory(device: torch.device) -> None:
    """Give cached memory back to the GPU, and let memory_gb begin at what is allocated now. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if device.type == "mps":
        torch.mps.empty_cache()


def utilization(device: torch.device) -> float | None:
    """Percent of a second in which the GPU was busy, read every five seconds; None if it cannot be (needs pynvml)."""
    return read_utilization(device, int(time.monotonic() / 5))


@lru_cache(maxsize=1)
def read_utilization(device: torch.device, period: int) -> float | None:
    """The percentage of this period; asking the driver takes a millisecond."""
    with suppress(Exception):  # a missing package or a driver without support: no reason to stop a run
        return float(torch.cuda.utilization(device)) if device.type == "cuda" else None


# ---------------------------------------------------------------------------------------------------------------------
# the speed of each rank


def measured_speeds(model: nn.Module, batch: tuple[Tensor, Tensor], autocast: AbstractContextManager,
                    device: torch.device) -> tuple[float, ...]:  # fmt: skip
    """
    How fast each rank computes a micro-batch by itself, by rank, as a multiple of the slowest one's speed in steps of
    1/8 (all ranks; the model does not communicate). Leaves no gradients.
    """
    is_compiled = device.type == "cuda"  # with this shape only for the measurement: compiling it would take a minute
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        seconds = seconds_per_pass(model, batch, autocast, device)
    model.zero_grad(set_to_none=True)
    seconds = gather_number(seconds, device)  # (world_size,)
    return tuple(((seconds.max() / seconds * 8).round() / 8).tolist())


def seconds_per_pass(model: nn.Module, batch: tuple[Tensor, Tensor], autocast: AbstractContextManager,
                     device: torch.device, budget: float = 3.0) -> float:  # fmt: skip
    """
    Mean seconds of a forward and backward (all ranks), of as many as fit into `budget` seconds, at least three. The
    ranks begin together: those of one machine share its memory bandwidth, as in a step.
    """

    def run_pass() -> None:
        with autocast:
            _, loss = model(*batch, 1.0)
        loss.backward()
        synchronize(device)

    run_pass()  # warms up
    run_pass()
    gather_number(0.0, device)
    began, passes = time.perf_counter(), 0
    while passes < 3 or time.perf_counter() - began < budget:
        run_pass()
        passes += 1
    return (time.perf_counter() - began) / passes


# ---------------------------------------------------------------------------------------------------------------------
# the parts of a step


class Clock:
    """
    Times the parts of a step: `with clock("forward"):`. On a GPU a part is timed by events, for which the CPU does not
    wait; elsewhere by the CPU's clock. The profiler's trace shows the same names.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.now = device.type == "cuda", {}
        self.count, self.doing = 0, "the start"  # for the watchdog: grows with each part; the current part
        self.cpu, self.profiler = {}, None  # ms of parts of the current step that are timed on the CPU
        self.waiting, self.steps = deque(), deque(maxlen=1000)  # for each step {part: ms}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            start = self.mark()
            self.count, self.doing = self.count + 1, name
            yield
            self.count, self.doing = self.count + 1, f"after {name}"
            self.now.setdefault(name, []).append((start, self.mark()))

    @contextmanager
    def on_cpu(self, name: str) -> Iterator[None]:
        """Time a part by the CPU's clock: waiting for data, which the GPU does not see."""
        start = time.perf_counter()
        yield
        self.cpu[name] = self.cpu_ms(name) + (time.perf_counter() - start) * 1e3

    def cpu_ms(self, name: str) -> float:
        """The ms that a part timed by `on_cpu` has taken in this step."""
        return self.cpu.get(name, 0.0)

    def mark(self) -> object:
        """The current time, or an event in the GPU's queue."""
        if self.on_gpu:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def elapsed_ms(self, start: object, end: object) -> float:
        """Milliseconds between two marks."""
        return start.elapsed_time(end) if self.on_gpu else (end - start) * 1e3

    def step(self) -> None:
        """End a step."""
        self.waiting.append((self.now, self.cpu))
        self.now, self.cpu = {}, {}
        if len(self.waiting) > 2:  # the GPU has passed all events of the step before the last one
            parts, cpu = self.waiting.popleft()
            self.steps.append({name: sum(self.elapsed_ms(*m) for m in marks) for name, marks in parts.items()} | cpu)
        if self.profiler:
            self.profiler.step()

    def discard(self) -> None:
        """Forget the parts of a step that is not taken."""
        self.now, self.cpu = {}, {}

    def last(self, name: str) -> float:
        """A part's ms in the latest step that is known; 0 before there is one."""
        return self.steps[-1].get(name, 0.0) if self.steps else 0.0

    def medians(self) -> dict[str, float]:
        """The median of each part in ms, over the last thousand steps."""
        names = self.steps[-1] if self.steps else {}
        return {name: statistics.median(s[name] for s in self.steps if name in s) for name in names}


def over_ranks(medians: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """{part: {mean, max}} over the ranks, from every rank's Clock.medians."""
    values = {name: [m[name] for m in medians if name in m] for name in medians[0]}
    return {name: {"mean": statistics.mean(v), "max": max(v)} for name, v in values.items()}


# ---------------------------------------------------------------------------------------------------------------------
# the profiler

PROFILE_SKIP, PROFILE_STEPS = 5, 5  # the first steps are not typical


def start_profiler(out_dir: str, steps: int) -> torch.profiler.profile:
    """
    A profiler for a run of `steps` steps that skips 5, records 5, and writes to out_dir: trace.json, operators.txt (the
    operators by their own time) and on a GPU memory.pickle, a snapshot for https://pytorch.org/memory_viz. Assign it to
    Clock.profiler.
    """
    out, on_gpu, needed = Path(out_dir), torch.cuda.is_available(), PROFILE_SKIP + PROFILE_STEPS
    if steps < needed:
        text = f"--profile traces the steps after the fifth: {steps} steps give no trace, {needed} do"
        print(f"warning: {text}", flush=True)

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(out / "trace.json"))
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        averages = profiler.key_averages()
        (out / "operators.txt").write_text(averages.table(sort_by=key, row_limit=15, max_name_column_width=50))
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(out / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    if on_gpu:
        torch.cuda.memory._record_memory_history()
    schedule = torch.profiler.schedule(skip_first=PROFILE_SKIP - 1, wait=0, warmup=1, active=PROFILE_STEPS, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)  # of the CPU and the GPU
    profiler.start()
    return profiler


def traced_collectives(path: Path, has_ep: bool) -> dict[str, float]:
    """
    Rank 0's ms per step in all-gather, all-reduce, reduce-scatter and, with ep, all-to-all, by the part of the step:
    from a trace of a launch in which no gradients are reduced, so that only the collectives of tp, cp and ep are in it.
    Computation waits for them. Those of ZeRO-3, which run in the background, count too.
    """
    if not path.exists():
        return {}
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    kernels = "All|Reduce|SendRecv" if has_ep else "All|Reduce"  # a pipeline's messages are SendRecv too
    calls = [e for e in events if re.match(rf"gloo:(all|reduce)|ncclDevKernel_({kernels})", e["name"])]
    kinds, found = {e["cat"] for e in calls}, {}  # on a GPU, spans of its own queue
    kinds = {"gpu_user_annotation"} if "kernel" in kinds else {"user_annotation"}
    for part in ("forward", "backward", "stages"):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == part and e["cat"] in kinds]
        us = sum(e["dur"] for e in calls if any(start <= e["ts"] < end for start, end in spans))
        found[part] = us / 1e3 / PROFILE_STEPS
    return found
