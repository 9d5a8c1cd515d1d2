"""What devices and their links reach: known GPUs, and this machine, measured."""

import os
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log2

import numpy as np
import torch
import torch.nn.functional as F

from isogpt.hardware import fastest, known_gpu, measured_copy, measured_matmul
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
        gather, scatter: time of the bytes of an all-gather and of a reduce-scatter, as a multiple of half an
            all-reduce's; more than 1 where the backend copies, as gloo does.
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
    gather: float = 1.0
    scatter: float = 1.0
    overlaps: bool = True
    sharing: float = 1.0
    fixed_gb: float = 1.5


BANDWIDTH = 0.85  # the share of a data sheet's memory bandwidth that is reached
HARDWARE = {
    "h100": Hardware(80, 0.65 * 989e12, BANDWIDTH * 3.35e12, Link(8e-6, 350e9), Link(2e-5, 8 * 45e9), half=128),
    "h200": Hardware(141, 0.65 * 989e12, BANDWIDTH * 4.8e12, Link(8e-6, 350e9), Link(2e-5, 8 * 45e9), half=128),
    "a100": Hardware(80, 0.75 * 312e12, BANDWIDTH * 2.0e12, Link(8e-6, 230e9), Link(2e-5, 8 * 22e9)),
    "4090": Hardware(24, 0.85 * 165e12, BANDWIDTH * 1.0e12, Link(1e-5, 20e9), Link(5e-5, 1.2e9)),
    # of a core, with gloo; `--hardware=this` measures
    "cpu": Hardware(4, 40e9, 8e9, Link(5e-4, 1e9), Link(1e-3, 0.12e9), half=16, attention=0.4, kernel_s=8e-6,
                    gather=1.6, scatter=3.4, overlaps=False, fixed_gb=0.42),
}  # fmt: skip


def hardware_of(device: torch.device, dtype: str, nproc: int) -> Hardware:
    """What is known of a GPU, or this device as it is measured now, with usual links."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = known_gpu(properties.name)
        if gpu and gpu.plan:
            return replace(HARDWARE[gpu.plan], memory_gb=properties.total_memory / 1e9,
                           bytes_per_s=BANDWIDTH * gpu.bytes_per_s)  # fmt: skip
    return hardware_here(device, dtype, nproc, [])


def hardware_here(device: torch.device, dtype: str, nproc: int, collectives: list[dict]) -> Hardware:
    """
    This machine with `nproc` processes, measured now: a large and a narrow matmul, attention, and a copy.

    Args:
        collectives: what measure_collectives found for that many processes; empty for one.
    """
    set_numerics(device, dtype, False)
    is_gpu, threads, cores = device.type == "cuda", torch.get_num_threads(), len(own_cores())
    if not is_gpu:
        torch.set_num_threads(cores)
    matmul, narrow = measured_matmul(device, dtype), 64
    a, b = (torch.randn(size, device=device).to(DTYPES[dtype]) for size in ((1024, narrow), (narrow, 1024)))
    small = 2 * 1024 * narrow * 1024 / fastest(a.matmul, b)
    q = torch.randn(4, 8, 512, 64, device=device).to(DTYPES[dtype])
    causal = partial(F.scaled_dot_product_attention, key=q, value=q, is_causal=True)
    attention = 2 * q.numel() * q.size(2) / fastest(causal, q)
    tiny, links = torch.ones(1, device=device), links_of(collectives, is_gpu)
    memory = torch.cuda.mem_get_info(device)[1] if is_gpu else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    half, copy = narrow * max(0.0, matmul / small - 1), measured_copy(device)
    found = Hardware(memory / 1e9, matmul, copy, half=half, attention=attention / matmul,
                     kernel_s=fastest(tiny.add, tiny), overlaps=is_gpu, **links)  # fmt: skip
    if is_gpu:
        return found
    # a process is a device: it has some of the cores, and shares them if there are more processes than cores
    torch.set_num_threads(threads)
    part = max(1, cores // nproc) / cores
    return replace(found, memory_gb=found.memory_gb / nproc, matmul=part * matmul, bytes_per_s=part * copy,
                   sharing=max(1.0, nproc * part), fixed_gb=0.42 if nproc > 1 else 0.38)  # fmt: skip


def links_of(collectives: list[dict], is_gpu: bool) -> dict:
    """
    The fields of Hardware that describe links: as measured within the machine, and usual ones where nothing is known.
    """
    usual = HARDWARE["4090" if is_gpu else "cpu"]
    links = {name: getattr(usual, name) for name in ("local", "network", "gather", "scatter")}
    found = {name: [cell for cell in collectives if cell["operation"] == name and "us" in cell]
             for name in ("all-reduce", "all-gather", "reduce-scatter")}  # fmt: skip
    if not all(found.values()):
        return links
    large = [[cell["gb_per_s"] * 1e9 for cell in cells if cell["bytes"] >= 2**20] for cells in found.values()]
    (reduce, gather, scatter), smallest = map(np.array, large), found["all-reduce"][0]
    latency = smallest["us"] * 1e-6 / (2 * ceil(log2(smallest["ranks"])))
    # between computations threads have to be woken up, which takes as long again as a small collective
    local = Link(latency if is_gpu else 2 * latency, float(np.median(reduce)))
    slowness = {"gather": float(np.median(reduce / gather)), "scatter": float(np.median(reduce / scatter))}
    return links | {"local": local} | slowness


def named_hardware(name: str, network_gbit: float, here: Hardware | None = None) -> Hardware:
    """A key of HARDWARE, or 'this' machine as it was measured; network_gbit: of each machine to others (0: usual)."""
    found = here if name == "this" else HARDWARE[name]
    if network_gbit:
        found = replace(found, network=replace(found.network, bytes_per_s=network_gbit * 1e9 / 8 * 0.94))
    return found
