"""
Import torch without garbage collection, after choosing how OpenMP's threads wait, letting gloo connect on
demand, and letting Ctrl-C end the process quietly.

libgomp's threads spin while they wait for work. On cores that other processes keep busy, this slows all
processes down. Two CPU runs at once took 125 ms a step instead of 19, and 30 with the passive policy. On an
idle machine the passive policy is slower (25 instead of 19), so it is set only if other processes are busy.
libgomp reads the variable when torch is imported.

By default, each process of a gloo group connects to every other one, even where NCCL communicates for GPUs:
N^2 addresses pass through one store, 8.8 GB with 1,024 processes, and each process keeps N - 1 sockets open
for each group. With TORCH_GLOO_LAZY_INIT=1, which gloo reads when a group is created, a process connects to
those that it exchanges messages with: to two for an all-reduce or an all-gather, to log N for a broadcast.

Where a process has lost another one, torch's C++ code logs a page of frames as a warning, also when a
launcher has just stopped all of them. TORCH_CPP_LOG_LEVEL=ERROR leaves it out: the error itself is raised.

torch's import creates objects that stay until the process ends. Searching them for garbage takes 0.8 of the
3.1 s of CPU time that the imports of torch and of torch.compile take.
"""

import isogpt.common.interrupt  # noqa: F401  (first: torch's import takes seconds)

import gc
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path


def use_passive_waiting() -> None:
    """
    Set OMP_WAIT_POLICY=passive if other processes keep half of the machine's cores busy for 30 ms (Linux).
    """
    load = Path("/proc/loadavg")
    if "OMP_WAIT_POLICY" in os.environ or not load.exists():
        return
    for _ in range(6):
        runnable = int(load.read_text().split()[3].split("/")[0])  # threads, this one among them
        if runnable - 1 < (os.cpu_count() or 1) / 2:
            return
        time.sleep(0.005)
    os.environ["OMP_WAIT_POLICY"] = "passive"


def use_own_cache() -> None:
    """
    Let torch.compile keep what it has compiled in ~/.cache/torchinductor, unless TORCHINDUCTOR_CACHE_DIR is
    set: files of earlier runs are unpickled and run, and torch's default is a name in /tmp that somebody else
    may have taken. Without a home that can be written to, it is a new name in /tmp.
    """
    home = os.path.expanduser("~")
    cache = f"{home}/.cache"
    folder = f"{cache}/torchinductor"
    parent = cache if os.path.exists(cache) else home
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        folder = f"{tempfile.gettempdir()}/torchinductor-{secrets.token_hex(8)}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)


try:
    tempfile.gettempdir()  # torchrun writes there, and so do packages that torch imports
except FileNotFoundError as e:
    sys.exit(f"error: {e.strerror}: set TMPDIR to a folder that this process can write to")
use_passive_waiting()
use_own_cache()
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
gc.disable()
cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
import torch  # noqa: E402, F401

if cores and cores != os.sched_getaffinity(0):  # OMP_PROC_BIND: bound to one, with all that starts later
    os.sched_setaffinity(0, cores)
gc.freeze()  # what exists now is never searched
gc.enable()
