"""Memory of this process, and utilization of the GPU."""

import re
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch


def memory_gb(device: torch.device) -> float:
    """
    Return the peak memory of this process in GB: what PyTorch has allocated on the GPU. On a CPU it is the
    resident set: what the process has allocated, and the code of libraries. 0 if the system gives no figure.
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


def utilization(device: torch.device) -> float | None:
    """
    Return the percentage of a second in which the GPU was busy, read every five seconds; None if it cannot be
    read (needs pynvml).
    """
    return read_utilization(device, int(time.monotonic() / 5))


@lru_cache(maxsize=1)
def read_utilization(device: torch.device, period: int) -> float | None:
    """The percentage of this period; asking the driver takes a millisecond."""
    with suppress(Exception):  # a missing package or a driver without support is no reason to stop a run
        return float(torch.cuda.utilization(device)) if device.type == "cuda" else None
