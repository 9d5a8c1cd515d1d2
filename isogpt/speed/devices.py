"""Speeds of devices and of the links between them: a table of GPUs, and measurements of this machine."""

import os
import re
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from isogpt.launch.device import synchronize
from isogpt.launch.network import own_cores
from isogpt.launch.together import gather_objects
from isogpt.parallel.plan import DTYPES
from isogpt.training.precision import is_emulated

BANDWIDTH = 0.85  # fraction of a data sheet's memory bandwidth that is reached
START_BUDGET_S = 0.05  # seconds in which a run measures the peak before the first step


@dataclass(frozen=True)
class Link:
    """A connection of a device: seconds per message, and bytes/s in each direction."""

    latency_s: float
    bytes_per_s: float


# between the devices of a machine
PCIE_3, PCIE_4, PCIE_5 = Link(1e-5, 10e9), Link(1e-5, 20e9), Link(1e-5, 40e9)
NVLINK_2, NVLINK_3 = Link(1e-5, 120e9), Link(8e-6, 230e9)
NVLINK_4, NVLINK_5 = Link(8e-6, 350e9), Link(8e-6, 700e9)
XGMI = Link(1e-5, 310e9)
# between machines: of eight or four devices with an adapter each, in Gbit/s, and a usual one, see --network
EIGHT_400, EIGHT_200, FOUR_100 = Link(2e-5, 8 * 45e9), Link(2e-5, 8 * 22e9), Link(2e-5, 4 * 11e9)
ONE_10 = Link(5e-5, 1.2e9)


@dataclass(frozen=True)
class Hardware:
    """
    A device: its data sheet, and the speeds that programs reach in large operations.

    Args:
        name: a pattern of a GPU's whole name without 'NVIDIA': laptops' GPUs, MIG slices and cards for PCIe
            are slower than the GPUs whose names they contain.
        tflops: peak of dense matmuls in bfloat16 (V100, T4: float16). TF32, where it exists, runs at half.
        tb_per_s: peak of the memory.
        memory_gb: of the device; for H100, H200, A100 (SXM) and T4 as their driver reports it, else as the
            largest card of the name is sold.
        local, network: a link to devices of the same machine, and to other machines.
        reached: the fraction of `tflops` that a large matmul reaches.
        attention: the speed of attention as a fraction of `matmul`, in sequences of 1,024 tokens.
        attention_half: the length of a sequence in which attention is half as fast as in the longest. A
            kernel computes whole tiles on the diagonal, half of which the mask discards, and begins and ends
            each row of tiles, however short. Those that Shah et al. 2024 (arXiv:2407.08608, figure 5)
            measured on an H100 are half as fast at 200 to 400 tokens.
        half: the size of a matmul's smallest dimension at which the matmul reaches half of its speed.
        kernel_s: seconds to launch an operation.
        micro_step_s: seconds of a micro-step in which a GPU waits for the host. On an H200 it waited for 2.8
            ms between two steps and 1.2 ms between kernels (docs/benchmarks.md).
        gather, scatter: time of the bytes of an all-gather and of a reduce-scatter, as a multiple of half an
            all-reduce's; more than 1 where the backend copies, as gloo does.
        overlap: the fraction of a collective's time that computation hides, while there is any: both use the
            same memory and processors. On a CPU it hides nothing.
        per_node: devices of a machine.
        fixed_gb: memory that a process takes before it allocates a model; on a GPU, this includes what NCCL
            takes, and fragments.
        is_compared: whether a run was compared with what is predicted for this card; if not, the fractions,
            and the links, are assumptions.
    """

    name: str
    tflops: float
    tb_per_s: float
    memory_gb: float
    local: Link = PCIE_4
    network: Link = ONE_10
    reached: float = 0.7  # where nothing else is known
    attention: float = 0.38
    attention_half: float = 400.0
    half: float = 32.0
    kernel_s: float = 4e-6
    micro_step_s: float = 3e-3
    gather: float = 1.0
    scatter: float = 1.0
    overlap: float = 0.4
    per_node: int = 8
    fixed_gb: float = 2.5
    is_compared: bool = False

    @property
    def matmul(self) -> float:
        """FLOP/s of a large matmul in 16 bits, or in the dtype of the run if it was measured."""
        return self.reached * self.tflops * 1e12

    @property
    def bytes_per_s(self) -> float:
        """Memory traffic."""
        return BANDWIDTH * self.tb_per_s * 1e12


# GeForce: the peak with accumulation in float32, which is half of the peak with accumulation in float16. That
# of an RTX 5090 is a quarter of the advertised 838 TFLOP/s, which are with sparsity and accumulation in
# float16. Compared with copies of the data sheets in November 2026: A100, B200, L40S, MI300X, V100, T4.
# Compared with quotations: RTX 3090 and 5090 (NVIDIA's RTX Blackwell whitepaper, table 3: 71.2 and 209.5
# TFLOP/s), L4 (NVIDIA's data sheet: 242 TFLOP/s with sparsity), and the bandwidths of H100 PCIe and NVL, H200
# NVL, V100 PCIe and RTX A6000.
HARDWARE = {  # by names for --hardware
    # What these reach was fitted to published runs (docs/scaling.md compares them with the predictions), the
    # GH200 excepted. The H100's attention is FlashAttention-2's in PyTorch 2.8 and 2.9, the H200's cuDNN's in
    # PyTorch 2.11, which reached 290 TFLOP/s in sequences of 1,024 tokens (docs/benchmarks.md)
    "h100": Hardware("H100( 80GB HBM3)?", 989, 3.35, 84.9, NVLINK_4, EIGHT_400, 0.71, 0.26, is_compared=True),
    "h200": Hardware("H200", 989, 4.8, 150.1, NVLINK_4, EIGHT_400, 0.71, 0.42, is_compared=True),
    "gh200": Hardware("GH200 480GB", 989, 4.0, 96, NVLINK_4, EIGHT_400, attention=0.26, is_compared=True),
    "a100": Hardware("A100-SXM4-80GB", 312, 2.0, 85.0, NVLINK_3, EIGHT_200, 0.82, is_compared=True),
    "a100-40gb": Hardware("A100-SXM4-40GB", 312, 1.555, 42.3, NVLINK_3, EIGHT_200, 0.82, is_compared=True),
    # Cards for PCIe are taken to have no bridges.
    "b200": Hardware("B200", 2250, 8.0, 180, NVLINK_5, EIGHT_400, 0.65),
    "h200-nvl": Hardware("H200 NVL", 835, 4.8, 141, PCIE_5, attention=0.42),
    "h100-nvl": Hardware("H100 NVL", 835, 3.9, 94, PCIE_5, attention=0.26),
    "h100-pcie": Hardware("H100 PCIe", 756, 2.0, 80, PCIE_5, attention=0.26),
    "a100-pcie": Hardware("A100 80GB PCIe|A100-PCIE-80GB", 312, 1.935, 80),
    "a100-pcie-40gb": Hardware("A100-PCIE-40GB", 312, 1.555, 40),
    "a10": Hardware("A10", 125, 0.6, 24),
    "a10g": Hardware("A10G", 70, 0.6, 24),
    "6000-ada": Hardware("RTX 6000 Ada Generation", 364, 0.96, 48),
    "a6000": Hardware("RTX A6000", 155, 0.768, 48),
    "l40s": Hardware("L40S", 362, 0.864, 48, reached=0.65),
    "l40": Hardware("L40", 181, 0.864, 48),
    "l4": Hardware("L4", 121, 0.3, 24, reached=0.5),
    "5090": Hardware("RTX 5090", 209.5, 1.792, 32, PCIE_5, reached=0.85),
    "4090": Hardware("RTX 4090", 165, 1.0, 24, reached=0.85),
    "3090": Hardware("RTX 3090", 71, 0.936, 24, reached=0.85),
    "v100": Hardware("V100-SXM2-(16|32)GB", 125, 0.9, 32, NVLINK_2, FOUR_100),
    "v100-pcie": Hardware("V100-PCIE-(16|32)GB", 112, 0.9, 32, PCIE_3),
    "t4": Hardware("T4", 65, 0.32, 15.6, PCIE_3, reached=0.4),
    "mi300x": Hardware("AMD Instinct MI300X( OAM)?", 1307, 5.3, 192, XGMI, EIGHT_400, 0.45),
    # one core, with gloo; `--hardware=this` measures
    "cpu": Hardware(
        name="",
        tflops=0.04,
        tb_per_s=0.008 / BANDWIDTH,
        memory_gb=4,
        local=Link(5e-4, 1e9),
        network=Link(1e-3, 0.12e9),
        reached=1.0,
        attention=0.4,
        attention_half=0.0,
        half=16,
        kernel_s=8e-6,
        micro_step_s=0.0,
        gather=1.6,
        scatter=3.4,
        overlap=0.0,
        fixed_gb=0.42,
        is_compared=True,
    ),
}
COMPARED = [name for name, card in HARDWARE.items() if card.is_compared]
ASSUMED = [name for name in HARDWARE if name not in COMPARED]
KNOWN_CARDS = (
    f"choose --hardware= from {', '.join(COMPARED)}, this, or with assumed speeds {', '.join(ASSUMED)}; to "
    "describe another card, name the closest one, with --device_tflops, --device_bandwidth, "
    "--device_memory_gb and --network"
)


def known_gpu(device_name: str) -> Hardware | None:
    """The card with this name, such as 'NVIDIA A100-SXM4-80GB'; None if it is not in the table."""
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )*", "", device_name)
    return next((card for card in HARDWARE.values() if re.fullmatch(card.name, name)), None)


def hardware_of(card: str, device: torch.device, dtype: str, per_node: int) -> Hardware:
    """
    A kind of device, of which each machine contains `per_node`.

    Args:
        card: a key of HARDWARE, or "this": what `device` is. A GPU is one of these cards, and a CPU's speeds
            are in proportion to a matmul measured now on the cores that `per_node` processes share.

    Raises:
        ValueError: the GPU is not in the table, so its links are not known.
    """
    if card != "this":
        return replace(HARDWARE[card], per_node=per_node)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        if hw := known_gpu(gpu.name):
            return replace(hw, memory_gb=gpu.total_memory / 1e9, per_node=per_node)
        raise ValueError(f"{gpu.name} is not a known card: in bench.py --plan, {KNOWN_CARDS}")
    hw, share = HARDWARE["cpu"], len(own_cores()) / per_node / torch.get_num_threads()
    speed = share * measured_matmul(device, dtype) / hw.matmul
    speeds = {"tflops": speed * hw.tflops, "tb_per_s": speed * hw.tb_per_s}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return replace(hw, memory_gb=memory / 1e9 / per_node, per_node=per_node, **speeds)


def changed_hardware(
    hw: Hardware, network_gbit: float, memory_gb: float, tflops: float, bandwidth: float
) -> Hardware:
    """
    Return the Hardware of a card that is like `hw`, except for the values that are not 0. It reaches the same
    fractions of its data sheet, which is an assumption.

    Args:
        network_gbit: each machine's bandwidth to other machines.
        tflops, bandwidth: the peaks of the card's data sheet, in TFLOP/s and in GB/s.
    """
    network = Link(hw.network.latency_s, network_gbit * 1e9 / 8 * 0.94) if network_gbit else hw.network
    changes = {"memory_gb": memory_gb, "tflops": tflops, "tb_per_s": bandwidth / 1e3}
    is_compared = hw.is_compared and not (tflops or bandwidth)
    changes = {name: value for name, value in changes.items() if value}
    return replace(hw, network=network, is_compared=is_compared, **changes)


class Peak(NamedTuple):
    """The matmul FLOP/s of devices, and the source of this figure; None: it is unknown."""

    flops: float | None = None
    source: str = "unknown"


def find_peak(device: torch.device, dtype: str) -> Peak:
    """The peak of all ranks' devices together, which may differ; the source is rank 0's (all ranks)."""
    peaks = gather_objects(peak_of(device, dtype))
    flops = [peak.flops for peak in peaks]
    return Peak(sum(flops), peaks[0].source) if all(flops) else Peak()


def peak_of(device: torch.device, dtype: str) -> Peak:
    """The peak of this device: from the data sheet, or else measured."""
    on_gpu, source = device.type == "cuda", "measured matmul"
    card = known_gpu(torch.cuda.get_device_name(device)) if on_gpu else None
    if card and dtype != "float32":
        return Peak(card.tflops * 1e12 / (2 if dtype == "tf32" else 1), "data sheet")
    if is_emulated(dtype, device):  # the model's kernels convert to float32, but a plain matmul takes seconds
        dtype, source = "float32", "measured matmul in float32"
    try:
        return Peak(measured_matmul(device, dtype, START_BUDGET_S), source)
    except RuntimeError:
        return Peak()
    finally:
        if on_gpu:  # up to 0.8 GB that no step needs
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def fraction_of_peak(flops_per_s: float, peak: float | None) -> float | None:
    """Which fraction of a peak is reached; None if the peak is unknown, or too low to be one."""
    return flops_per_s / peak if peak and flops_per_s <= peak else None


def measured_matmul(device: torch.device, dtype: str, budget: float = 0.15) -> float:
    """FLOP/s of a square matmul: the fastest of as many as fit into `budget` seconds."""
    n = {"cpu": 1024, "cuda": 8192}.get(device.type, 2048)
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in "ab")
    times, end = [], time.perf_counter() + budget
    while not times or time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        a.matmul(b)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)
