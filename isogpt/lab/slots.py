"""Where a sweep trains runs at the same time: on shares of this machine's cores, or on its GPUs."""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass, field

import torch

from isogpt.launch.network import own_cores


@dataclass(frozen=True)
class Slot:
    """
    What one run at a time uses.

    Args:
        cores: numbers of the cores; (): not limited.
        variables: environment variables.
    """

    cores: tuple[int, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]


def make_slots(jobs: int, processes: int, device: str) -> list[Slot]:
    """
    Divide this machine between runs. Each run gets a GPU for each of its processes, or, on a CPU, a share of
    the cores, on which the bits of a run may depend.

    Args:
        jobs: the number of slots; 0: on GPUs, as many as they suffice for, else one.
        processes: of each run.
        device: as for train.py.

    Raises:
        ValueError: the machine has too few GPUs or cores.
    """
    has_gpus = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if has_gpus:
        return slots_of_gpus(jobs, processes, visible_gpus())
    if device != "cpu" and not (device == "auto" and not torch.backends.mps.is_available()):
        return [Slot() for _ in range(jobs or 1)]  # cuda:N or mps, which all runs share
    return slots_of_cores(jobs or 1, own_cores())


def slots_of_gpus(jobs: int, processes: int, gpus: list[str]) -> list[Slot]:
    """A slot with `processes` GPUs for each of the jobs. Each process runs on the cores near its GPU."""
    most = len(gpus) // processes
    if most == 0:
        raise ValueError(
            f"nproc is {processes}, but the number of GPUs is {len(gpus)}: set --nproc={len(gpus)} or less"
        )
    if jobs > most:
        needed = f"{processes} GPUs" if processes > 1 else "one GPU"
        raise ValueError(
            f"jobs is {jobs}, but each run uses {needed}, and the number of GPUs is {len(gpus)}: set "
            f"--jobs={most} or less"
        )
    groups = [gpus[processes * slot : processes * (slot + 1)] for slot in range(jobs or most)]
    return [Slot(variables={"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups]


def slots_of_cores(jobs: int, cores: list[int]) -> list[Slot]:
    """A slot with an equal share of the cores for each of the jobs."""
    share = len(cores) // jobs
    if share == 0:
        raise ValueError(
            f"jobs is {jobs}, but the number of cores is {len(cores)}: set --jobs={len(cores)} or less"
        )
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        variables = {} if jobs == 1 else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}
        return [Slot(variables=variables) for _ in range(jobs)]
    return [Slot(tuple(cores[share * slot : share * (slot + 1)])) for slot in range(jobs)]


def enter(slot: Slot, sweep: int) -> None:
    """
    Prepare a process that will become train.py: it receives SIGTERM when the sweep, whose process id is
    `sweep`, is killed, and runs on the slot's cores (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != sweep:  # it was killed before this call
            os._exit(1)
        if slot.cores:
            os.sched_setaffinity(0, slot.cores)
