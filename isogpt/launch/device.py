"""The device of this process, and the backend for the collectives of such devices."""

import ctypes
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def collectives_timeout(timeout_s: float, backend: str) -> timedelta:
    """
    Return the timeout of a backend's collectives. NCCL gets 30 s more because it then ends the process, and
    the watchdog must report before that.
    """
    if "nccl" in backend:
        timeout_s += 30
    return timedelta(seconds=timeout_s)


def pick_device(name: str, local_rank: int, world_size: int) -> torch.device:
    """
    Return the device called `name`.

    'auto' is cuda, else mps (only for a single process, since MPS supports no collectives), else cpu. 'cuda'
    is the GPU with the number of the local rank, modulo the number of GPUs that the process sees, since a
    scheduler may let each process see only one, number 0. connect_ranks refuses ranks that share a GPU.

    Raises:
        ValueError: the device is not available.
    """
    kinds = ["cpu"]
    if world_size == 1 and torch.backends.mps.is_available():
        kinds.append("mps")
    if torch.cuda.is_available():
        kinds.append("cuda")
    if name == "auto":
        name = kinds[-1]
    kind, _, index = name.partition(":")
    if kind not in kinds or not (index or "0").isdigit():
        advice = "set --device=cpu, or choose from auto, cpu, cuda, cuda:N and mps (one process)"
        raise ValueError(f"device is {name!r}, which is not available here: {advice}")
    if kind != "cuda":
        return torch.device(kind)
    if index and world_size == 1:
        return torch.device(name)
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def pick_backend(name: str, device: torch.device, world_size: int) -> str:
    """
    Return the argument `backend` of init_process_group. With NCCL, gloo is also used, for tensors on the CPU:
    checkpoints and offloaded state. Where PyTorch lacks NCCL, as on Windows, gloo also communicates for GPUs.

    Raises:
        ValueError: the backend is not part of this PyTorch, or does not support the device.
    """
    has_nccl = device.type == "cuda" and dist.is_nccl_available()
    if name == "nccl" and not has_nccl and world_size > 1:
        raise ValueError("backend 'nccl' needs GPUs and a PyTorch with NCCL: set --backend=auto")
    return "cpu:gloo,cuda:nccl" if has_nccl and name != "gloo" else "gloo"


def keep_freed_memory() -> None:
    """
    Make the C library keep freed memory for the next step (glibc). By default, the library returns large
    pieces to the kernel and pays for page faults to get them back. This takes a tenth of a step with 10M
    parameters on a CPU.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: allocate up to 32 MiB, the maximum, from the heap
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never shrink the heap


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished what was queued."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
