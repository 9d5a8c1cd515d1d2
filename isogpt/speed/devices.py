"""Speeds of devices and of the links between them: data sheets of GPUs, and measurements of this machine."""

import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, log2

import torch

from isogpt.launch.device import synchronize
from isogpt.launch.network import own_cores
from isogpt.launch.pretended_ranks import is_pretended
from isogpt.launch.together import gather_objects
from isogpt.parallel.plan import DTYPES
from isogpt.training.precision import is_emulated, set_numerics


@dataclass(frozen=True)
class Link:
    """A connection of a device: seconds per message, and bytes/s in each direction."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Hardware:
    """
    The speeds that a device reaches in large operations. Figures for GPUs are data sheets' peaks, times the
    fraction that training programs reach. Those of `h100`, `a100` and `a100-40gb` were fitted to published
    runs (docs/scaling.md compares them with the predictions).

    Args:
        memory_gb: of the device; for H100, H200 and A100 as their driver reports it, else as they are sold.
        matmul: FLOP/s of a large matmul in 16 bits, or in the dtype of the run if it was measured.
        half: the size of a matmul's smallest dimension at which the matmul reaches half of this speed.
        attention: the speed of attention as a fraction of `matmul`.
        bytes_per_s: memory traffic.
        kernel_s: seconds to launch an operation.
        micro_step_s: seconds of a micro-step in which a GPU waits for the host. On an H200 it waited for 2.8
            ms between two steps and 1.2 ms between kernels (docs/benchmarks.md).
        local, network: a link to devices of the same machine, and to other machines.
        gather, scatter: time of the bytes of an all-gather and of a reduce-scatter, as a multiple of half an
            all-reduce's; more than 1 where the backend copies, as gloo does.
        overlap: the fraction of a collective's time that computation hides, while there is any: both use the
            same memory and processors. On a CPU it hides nothing.
        fixed_gb: memory that a process takes before it allocates a model; on a GPU, this includes what NCCL
            takes, and fragments.
    """

    memory_gb: float
    matmul: float
    bytes_per_s: float
    local: Link
    network: Link
    half: float = 32.0
    attention: float = 0.38
    kernel_s: float = 4e-6
    micro_step_s: float = 3e-3
    gather: float = 1.0
    scatter: float = 1.0
    overlap: float = 0.4
    fixed_gb: float = 2.5


@dataclass(frozen=True)
class Gpu:
    """
    A GPU's data sheet.

    Args:
        matmul: peak of dense matmuls in bfloat16 (V100, T4: float16) in FLOP/s. TF32, where it exists, runs
            at half.
        bytes_per_s: memory bandwidth; 0: not needed.
        plan: the entry of HARDWARE that describes the GPU with the usual links; "": there is none.
    """

    matmul: float
    bytes_per_s: float = 0
    plan: str = ""


MI300X = "AMD Instinct MI300X( OAM)?"
# data sheets by the device's name without 'NVIDIA', which must match as a whole: laptops' GPUs, MIG slices
# and cards for PCIe are slower than the GPUs whose names they contain. Devices that are not listed are
# measured. GeForce: the peak with accumulation in float32, which is half of the peak with accumulation in
# float16. That of an RTX 5090 is a quarter of the advertised 838 TFLOP/s, which are with sparsity and
# accumulation in float16. Compared with copies of the data sheets in November 2026: A100, B200, L40S, MI300X,
# V100, T4. Compared with quotations: RTX 3090 and 5090 (NVIDIA's RTX Blackwell whitepaper, table 3: 71.2 and
# 209.5 TFLOP/s), L4 (NVIDIA's data sheet: 242 TFLOP/s with sparsity).
GPUS = {
    "B200": Gpu(2250e12, 8.0e12),
    "H200": Gpu(989e12, 4.8e12, "h200"),
    "H200 NVL": Gpu(835e12),
    "GH200 480GB": Gpu(989e12),
    "H100( 80GB HBM3)?": Gpu(989e12, 3.35e12, "h100"),
    "H100 NVL": Gpu(835e12),
    "H100 PCIe": Gpu(756e12),
    "A100-SXM4-80GB": Gpu(312e12, 2.0e12, "a100"),
    "A100-SXM4-40GB": Gpu(312e12, 1.555e12, "a100"),
    "A100-PCIE-[48]0GB|A100 80GB PCIe": Gpu(312e12),  # lacks the links of SXM
    "A10": Gpu(125e12),
    "A10G": Gpu(70e12),
    "RTX 6000 Ada Generation": Gpu(364e12),
    "RTX A6000": Gpu(155e12),
    "L40S": Gpu(362e12, 0.864e12),
    "L40": Gpu(181e12),
    "L4": Gpu(121e12, 0.3e12),
    "RTX 5090": Gpu(209.5e12, 1.792e12),
    "RTX 4090": Gpu(165e12, 1.0e12, "4090"),
    "RTX 3090": Gpu(71e12, 0.936e12),
    "V100-SXM2-(16|32)GB": Gpu(125e12, 0.9e12),
    "V100-PCIE-(16|32)GB": Gpu(112e12),
    "T4": Gpu(65e12, 0.32e12),
    MI300X: Gpu(1307e12, 5.3e12),
}

BANDWIDTH = 0.85  # fraction of a data sheet's memory bandwidth that is reached
REACHED = 0.7  # fraction of a data sheet's peak that a large matmul reaches, for --device_tflops
DATA_SHEET = "data sheet"  # a source of peaks
MOST_MEASUREMENTS = 4  # of a peak that steps exceed
START_BUDGET_S = 0.05  # seconds in which a run measures the peak before the first step
PCIE_4, SLOW_NETWORK = Link(1e-5, 20e9), Link(5e-5, 1.2e9)


def described(name: str, memory_gb: float, reached: float, local: Link, network: Link) -> Hardware:
    """The Hardware of a key of GPUS. `reached`: the fraction of the peak that a large matmul reaches."""
    sheet = GPUS[name]
    return Hardware(memory_gb, reached * sheet.matmul, BANDWIDTH * sheet.bytes_per_s, local, network)


NVLINK_3, NVLINK_4 = Link(8e-6, 230e9), Link(8e-6, 350e9)
HARDWARE = {
    # the published runs are of 2023: their attention, Triton's, reaches 180 TFLOP/s on an H100. PyTorch 2.11
    # uses cuDNN's, which reached 290 on an H200 in sequences of 1,024 tokens (docs/benchmarks.md)
    "h100": replace(
        described("H100( 80GB HBM3)?", 84.9, 0.71, NVLINK_4, Link(2e-5, 8 * 45e9)), attention=0.26
    ),
    "h200": replace(described("H200", 150.1, 0.71, NVLINK_4, Link(2e-5, 8 * 45e9)), attention=0.42),
    "a100": described("A100-SXM4-80GB", 85.0, 0.82, NVLINK_3, Link(2e-5, 8 * 22e9)),
    "a100-40gb": described("A100-SXM4-40GB", 42.3, 0.82, NVLINK_3, Link(2e-5, 8 * 22e9)),
    "4090": described("RTX 4090", 24, 0.85, PCIE_4, SLOW_NETWORK),
    # The fractions and links from here to "5090" are assumptions: no published run was compared. PCIe has
    # version 3 on a T4, 5 on a 5090 and 4 on the other cards. Without NVLink, 10 Gbit/s between machines are
    # assumed, see --network.
    "b200": described("B200", 180, 0.65, Link(8e-6, 700e9), Link(2e-5, 8 * 45e9)),
    "mi300x": described(MI300X, 192, 0.45, Link(1e-5, 310e9), Link(2e-5, 8 * 45e9)),
    "v100": described("V100-SXM2-(16|32)GB", 32, 0.7, Link(1e-5, 120e9), Link(2e-5, 4 * 11e9)),
    "l40s": described("L40S", 48, 0.65, PCIE_4, SLOW_NETWORK),
    "l4": described("L4", 24, 0.5, PCIE_4, SLOW_NETWORK),
    "t4": described("T4", 16, 0.4, Link(1e-5, 10e9), SLOW_NETWORK),
    "3090": described("RTX 3090", 24, 0.85, PCIE_4, SLOW_NETWORK),
    "5090": described("RTX 5090", 32, 0.85, Link(1e-5, 40e9), SLOW_NETWORK),
    # one core, with gloo; `--hardware=this` measures
    "cpu": Hardware(
        memory_gb=4,
        matmul=40e9,
        bytes_per_s=8e9,
        local=Link(5e-4, 1e9),
        network=Link(1e-3, 0.12e9),
        half=16,
        attention=0.4,
        kernel_s=8e-6,
        micro_step_s=0.0,
        gather=1.6,
        scatter=3.4,
        overlap=0.0,
        fixed_gb=0.42,
    ),
}


def hardware_of(device: torch.device, dtype: str, nproc: int) -> Hardware:
    """The Hardware of a known GPU, or this device as measured now, with usual links."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = known_gpu(properties.name)
        if gpu and gpu.plan:
            bandwidth = BANDWIDTH * gpu.bytes_per_s
            memory_gb = properties.total_memory / 1e9
            return replace(HARDWARE[gpu.plan], memory_gb=memory_gb, bytes_per_s=bandwidth)
    return hardware_here(device, dtype, nproc)


def hardware_here(device: torch.device, dtype: str, nproc: int, local: Link | None = None) -> Hardware:
    """
    Measure a large matmul and a copy on this machine, whose cores `nproc` processes share. Other figures are
    the usual ones.

    Args:
        local: the link between its devices, if it was measured.
    """
    set_numerics(device, dtype, False)
    is_gpu, threads = device.type == "cuda", torch.get_num_threads()
    if not is_gpu:
        torch.set_num_threads(len(own_cores()))
    devices = 1 if is_gpu else nproc
    usual = HARDWARE["4090" if is_gpu else "cpu"]
    machine = replace(
        usual,
        memory_gb=memory_of(device) / 1e9 / devices,
        matmul=measured_matmul(device, dtype) / devices,
        bytes_per_s=measured_copy(device) / devices,
        local=local or usual.local,
    )
    torch.set_num_threads(threads)
    return machine


def measured_link(collectives: list[dict]) -> Link:
    """The link between the devices of this machine, from the result of measure_collectives."""
    reductions = [cell for cell in collectives if cell["operation"] == "all-reduce"]
    smallest = reductions[0]
    latency = smallest["us"] * 1e-6 / (2 * ceil(log2(smallest["ranks"])))
    return Link(latency, max(cell["gb_per_s"] for cell in reductions) * 1e9)


def changed_hardware(hw: Hardware, network_gbit: float, memory_gb: float, tflops: float) -> Hardware:
    """
    Return the Hardware of a card that is like `hw`, except for the values that are not 0.

    Args:
        network_gbit: each machine's bandwidth to other machines.
        tflops: the peak of the card's data sheet.
    """
    network = replace(hw.network, bytes_per_s=network_gbit * 1e9 / 8 * 0.94) if network_gbit else hw.network
    matmul = REACHED * tflops * 1e12 if tflops else hw.matmul
    return replace(hw, network=network, memory_gb=memory_gb or hw.memory_gb, matmul=matmul)


def known_gpu(device_name: str) -> Gpu | None:
    """The data sheet of a device with this name: 'NVIDIA A100-SXM4-80GB'; None if it is not known."""
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )*", "", device_name)
    return next((gpu for pattern, gpu in GPUS.items() if re.fullmatch(pattern, name)), None)


def peak_flops(device: torch.device, dtype: str) -> tuple[float | None, str]:
    """
    (matmul FLOP/s of this device in `dtype`, source of the figure): from the data sheet, or measured here;
    (None, 'unknown') if neither is possible.
    """
    if is_pretended():  # a dry run reports no speeds
        return None, "unknown"
    if device.type == "cuda" and dtype != "float32":
        gpu = known_gpu(torch.cuda.get_device_name(device))
        if gpu:
            return (gpu.matmul / 2 if dtype == "tf32" else gpu.matmul), DATA_SHEET
    source = "measured matmul"
    if is_emulated(dtype, device):  # the model's kernels convert to float32, but a plain matmul takes seconds
        dtype, source = "float32", "measured matmul in float32"
    try:
        return measured_matmul(device, dtype, START_BUDGET_S), source
    except RuntimeError:
        return None, "unknown"
    finally:
        forget_peak_memory(device)  # up to 0.8 GB that no step needs


@dataclass
class Peak:
    """
    The matmul FLOP/s of all ranks' devices together. A figure that was measured while other programs used
    the machine is too low, and can be measured again; the best measurement counts.

    Args:
        flops: None: unknown.
        source: of rank 0's figure, see peak_flops.
    """

    device: torch.device
    dtype: str
    flops: float | None = None
    source: str = "unknown"
    measurements: int = 0

    def measure(self) -> None:
        """Find the figure, or measure it again (all ranks)."""
        self.measurements += 1
        figures = gather_objects(peak_flops(self.device, self.dtype))
        peaks = [flops for flops, _ in figures]
        if all(peaks):
            # rank 0's source, since devices may differ, and all ranks must measure again or none
            self.flops, self.source = max(self.flops or 0.0, sum(peaks)), figures[0][1]

    def is_doubtful(self, flops_per_s: float) -> bool:
        """Whether a step was faster than the peak, and the peak may be measured again."""
        may_be_measured = self.flops is not None and self.source != DATA_SHEET
        return may_be_measured and flops_per_s > self.flops and self.measurements < MOST_MEASUREMENTS


def find_peak(device: torch.device, dtype: str) -> Peak:
    """The peak of all ranks' devices (all ranks)."""
    peak = Peak(device, dtype)
    peak.measure()
    return peak


def fraction_of_peak(flops_per_s: float, peak: float | None) -> float | None:
    """Which fraction of a peak is reached; None if the peak is unknown, or too low to be one."""
    return flops_per_s / peak if peak and flops_per_s <= peak else None


def measured_matmul(device: torch.device, dtype: str, budget: float = 0.15) -> float:
    """FLOP/s of a square matmul, of which as many are computed as fit into `budget` seconds."""
    n = {"cpu": 1024, "cuda": 8192}.get(device.type, 2048)
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in "ab")
    return 2 * n**3 / fastest(a.matmul, b, budget)


def measured_copy(device: torch.device) -> float:
    """Bytes/s read and written by a copy of 256 MiB."""
    source = torch.ones(2**26, device=device)
    return 2 * source.nbytes / fastest(torch.empty_like(source).copy_, source, 0.3)


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU's memory, otherwise of the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fastest(
    function: Callable[[torch.Tensor], object], argument: torch.Tensor, budget: float = 0.15
) -> float:
    """Seconds of the fastest call of function(argument), among as many calls as fit into `budget` seconds."""
    best, end = math.inf, time.perf_counter() + budget
    while best == math.inf or time.perf_counter() < end:
        synchronize(argument.device)
        start = time.perf_counter()
        function(argument)
        synchronize(argument.device)
        best = min(best, time.perf_counter() - start)
    return best


def forget_peak_memory(device: torch.device) -> None:
    """
    Give cached memory back to the GPU, and restart the peak of memory_gb at what is allocated now. Does
    nothing on a CPU.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if device.type == "mps":
        torch.mps.empty_cache()
