"""What devices and their links reach: known GPUs, and this machine, measured."""

import os
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from isogpt.hardware import fastest, measured_copy, measured_matmul, seconds_per_pass
from isogpt.network import own_cores
from isogpt.precision import DTYPES, set_numerics


@dataclass(frozen=True)
class Link:
    """A connection of a device: seconds per message, and bytes/s in each direction."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Hardware:
    """
    What a device reaches in large operations. The figures for GPUs are data sheets' peaks, times the share of them that
    training programs reach (docs/scaling.md compares predictions with published runs).

    Args:
        matmul: FLOP/s of a large matmul in 16 bits, or in the dtype of the run if it was measured.
        half: the size of a matmul's smallest dimension at which it reaches half of this speed.
        attention: the speed of attention as a fraction of `matmul`.
        bytes_per_s: memory traffic.
        kernel_s: seconds to launch an operation.
        local, network: a device's link to others on its machine, and a machine's link to other machines.
        overlaps: whether collectives run beside computation; on a CPU they take its time.
        sharing: processes per device; more than 1 where processes share the cores of a CPU.
        fixed_gb: memory that a process takes before it has a model.
    """

    memory_gb: float
    matmul: float
    bytes_per_s: float
    local: Link
    network: Link
    half: float = 96.0
    attention: float = 0.55
    kernel_s: float = 4e-6
    overlaps: bool = True
    sharing: float = 1.0
    fixed_gb: float = 1.5


HARDWARE = {
    "h100": Hardware(80, 0.65 * 989e12, 0.85 * 3.35e12, Link(8e-6, 350e9), Link(2e-5, 8 * 45e9), half=128),
    "h200": Hardware(141, 0.65 * 989e12, 0.85 * 4.8e12, Link(8e-6, 350e9), Link(2e-5, 8 * 45e9), half=128),
    "a100": Hardware(80, 0.75 * 312e12, 0.85 * 2.0e12, Link(8e-6, 230e9), Link(2e-5, 8 * 22e9)),
    "4090": Hardware(24, 0.85 * 165e12, 0.85 * 1.0e12, Link(1e-5, 20e9), Link(5e-5, 1.2e9)),
    # of a core; `--hardware=this` measures
    "cpu": Hardware(4, 40e9, 8e9, Link(5e-5, 1e9), Link(1e-4, 0.12e9), 16, 0.4, 8e-6, overlaps=False, fixed_gb=0.4),
}


def hardware_here(device: torch.device, dtype: str, nproc: int, collectives: list[dict]) -> Hardware:
    """
    This machine with `nproc` processes, measured now: a large and a narrow matmul, attention, and a copy.

    Args:
        collectives: what measure_collectives found for that many processes; empty for one.
    """
    set_numerics(device, dtype, False)
    matmul, narrow = measured_matmul(device, dtype), 64
    a, b = (torch.randn(size, device=device).to(DTYPES[dtype]) for size in ((1024, narrow), (narrow, 1024)))
    small = 2 * 1024 * narrow * 1024 / fastest(a.matmul, b)
    q = torch.randn(4, 8, 512, 64, device=device).to(DTYPES[dtype])
    causal = partial(F.scaled_dot_product_attention, key=q, value=q, is_causal=True)
    attention = 2 * q.numel() * q.size(2) / fastest(causal, q)
    tiny, is_gpu, (local, network) = torch.ones(1, device=device), device.type == "cuda", links_of(collectives)
    memory = torch.cuda.mem_get_info(device)[1] if is_gpu else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    half, copy = narrow * max(0.0, matmul / small - 1), measured_copy(device)
    found = Hardware(
        memory / 1e9, matmul, copy, local, network, half, attention / matmul, fastest(tiny.add, tiny), is_gpu
    )
    if is_gpu:
        return found
    # a process is a device: it has some of the cores, and shares them if there are more processes than cores
    cores = len(own_cores())
    part = max(1, cores // nproc) / cores
    return replace(found, memory_gb=found.memory_gb / nproc, matmul=part * matmul, bytes_per_s=part * copy,
                   sharing=max(1.0, nproc * part), fixed_gb=0.4)  # fmt: skip


def calibrated(hw: Hardware, model: nn.Module, rows: int, dtype: str, predicted_s: float, nproc: int) -> Hardware:
    """
    `hw` with the speeds that make a forward and backward of `rows` sequences take as long as it does: a prediction
    knows the large operations only. A process of `nproc` has its share of the cores while this is measured.
    """
    device, threads = next(model.parameters()).device, torch.get_num_threads()
    tokens = torch.randint(model.config.vocab_size, (rows, model.config.block_size), device=device)
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(own_cores()) // nproc))
    autocast = torch.autocast(device.type, DTYPES[dtype], enabled=DTYPES[dtype].itemsize == 2)
    factor = predicted_s / seconds_per_pass(model, (tokens, tokens), autocast, device, 1.0)
    torch.set_num_threads(threads)
    return replace(hw, matmul=factor * hw.matmul, bytes_per_s=factor * hw.bytes_per_s)


def links_of(collectives: list[dict]) -> tuple[Link, Link]:
    """The links that measured all-reduces show; all are taken for links within the machine."""
    found = [cell for cell in collectives if cell["operation"] == "all-reduce" and "us" in cell]
    if not found:
        return HARDWARE["cpu"].local, HARDWARE["cpu"].network
    large = median(cell["gb_per_s"] for cell in found if cell["bytes"] >= 2**20) * 1e9
    return Link(found[0]["us"] * 1e-6 / (2 * (found[0]["ranks"] - 1)), large), HARDWARE["cpu"].network


def named_hardware(name: str, network_gbit: float, here: Hardware | None = None) -> Hardware:
    """A key of HARDWARE, or 'this' machine as it was measured; network_gbit: of each machine to others (0: usual)."""
    found = here if name == "this" else HARDWARE[name]
    if network_gbit:
        found = replace(found, network=replace(found.network, bytes_per_s=network_gbit * 1e9 / 8 * 0.94))
    return found
