"""
The pretended GPU of a process: what it is, what waits in its queue, and how often the host has waited for it.
"""

import collections
import json
import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
# files of torch that say nothing about the cause of a wait
NO_PLACE = ("_python_dispatch.py", "eval_frame.py", "_compile.py", "_ops.py", "_tensor.py")
NAMES = {(7, 5): "Tesla T4", (8, 0): "NVIDIA A100-SXM4-40GB", (9, 0): "NVIDIA H100 80GB HBM3"}


def current_step() -> object:
    """The step of train.py's loop, 'start' before it, 'end' after it."""
    main = vars(sys.modules.get("__main__", types))
    if "batches" not in main:
        return "start"
    return main.get("step", "start") if "state" in main and "status" not in main else "end"


@dataclass
class Gpu:
    """Read from the environment by `configure`; see README.md for the variables."""

    count: int = 1  # of GPUs
    capability: tuple[int, int] = (9, 0)
    memory: int = 80 * 10**9  # bytes
    index: int = 0  # the current device
    queued: int = 0  # operators that were sent to the GPU
    done: int = 0  # of those, how many the GPU is known to have finished
    step: object = "start"  # of the last one
    before: int = 0  # how many were sent before this step
    allocated: int = 0  # bytes, in all: Python cannot see when a storage is freed
    is_reported: bool = False
    # (step, kind, place, whether it was for operators of an earlier step only) -> how often
    waits: collections.Counter = field(default_factory=collections.Counter)
    problems: set = field(default_factory=set)
    # (number in the queue, what happens there)
    pending: collections.deque = field(default_factory=collections.deque)
    # addresses in collectives
    sent: collections.deque = field(default_factory=lambda: collections.deque(maxlen=256))
    lock: object = field(default_factory=threading.RLock)

    def configure(self) -> None:
        """Read the environment."""
        self.count = int(os.environ.get("PRETEND_CUDA_DEVICES", "1"))
        major, minor = os.environ.get("PRETEND_CUDA_CAPABILITY", "9.0").split(".")
        self.capability = (int(major), int(minor))

    def place(self) -> str:
        """The innermost line of the repository, and the innermost line of torch below it."""
        frame = sys._getframe(1)
        inner = ""
        while frame:
            name = os.path.realpath(frame.f_code.co_filename)
            if not name.startswith(HERE + os.sep):
                if name.startswith(ROOT + os.sep):
                    where = f"{os.path.relpath(name, ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
                    return f"{where} ({inner})" if inner else where
                if not inner and f"{os.sep}torch{os.sep}" in name and not name.endswith(NO_PLACE):
                    inner = f"torch/{name.rpartition(os.sep + 'torch' + os.sep)[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return inner or "C++"

    def enqueue(self) -> int:
        """Send an operator to the GPU; returns its number."""
        if self.step != (step := current_step()):
            self.step, self.before = step, self.queued
        self.queued += 1
        return self.queued

    def later(self, number: int, action: Callable[[], None]) -> None:
        """Do this when the GPU has come to the operator of this number."""
        self.pending.append((number, action))

    def wait(self, kind: str, number: int | None = None) -> None:
        """The host waits until the GPU has finished the first `number` operators, or all."""
        is_late = number is not None and number <= self.before
        self.waits[current_step(), kind, self.place(), is_late] += 1
        with self.lock:
            self.done = max(self.done, self.queued if number is None else number)
            while self.pending and self.pending[0][0] <= self.done:
                self.pending.popleft()[1]()

    def track(self, inner: torch.Tensor) -> None:
        """Count an allocation."""
        self.allocated += inner.untyped_storage().nbytes()

    def report(self) -> None:
        """Append the waits and the problems, as a line of JSON, to the file PRETEND_CUDA_REPORT."""
        path = os.environ.get("PRETEND_CUDA_REPORT")
        if not path or not self.queued or self.is_reported:
            return
        self.is_reported = True
        waits = [(str(step), count, *others) for (step, *others), count in self.waits.items()]
        with open(path, "a") as f:
            f.write(json.dumps({"waits": waits, "problems": sorted(self.problems)}) + "\n")


GPU = Gpu()
