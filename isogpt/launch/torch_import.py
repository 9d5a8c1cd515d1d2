"""
Import torch without garbage collection, after choosing how OpenMP's threads wait and letting gloo connect on
demand.

libgomp's threads spin while they wait for work. On cores that other processes keep busy, this slows all
processes down. Two CPU runs at once took 125 ms a step instead of 19, and 30 with the passive policy. On an
idle machine the passive policy is slower (25 instead of 19), so it is set only if other processes are busy.
libgomp reads the variable when torch is imported.

By default, each process of a gloo group connects to every other one, even where NCCL communicates for GPUs:
N^2 addresses pass through one store, 8.8 GB with 1,024 processes, and each process keeps N - 1 sockets open
for each group. With TORCH_GLOO_LAZY_INIT=1, which gloo reads when a group is created, a process connects to
those that it exchanges messages with: to two for an all-reduce or an all-gather, to log N for a broadcast.

torch's import creates objects that stay until the process ends. Searching them for garbage takes 0.8 of the
3.1 s of CPU time that the imports of torch and of torch.compile take.
"""

import gc
import os
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


use_passive_waiting()
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
try:
    tempfile.gettempdir()  # torchrun writes there, and so do packages that torch imports
except FileNotFoundError as e:
    sys.exit(f"error: {e.strerror}: set TMPDIR to a folder that this process can write to")
gc.disable()
import torch  # noqa: E402, F401

gc.freeze()  # what exists now is never searched
gc.enable()
