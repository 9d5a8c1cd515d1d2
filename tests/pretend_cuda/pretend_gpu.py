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
import torch.distributed as dist

HERE = os.path.dirname(os.path.realpath(__file__))
# files of torch that say nothing about the cause of a wait
NO_PLACE = ("_python_dispatch.py", "eval_frame.py", "_compile.py", "_ops.py", "_tensor.py")


def step_now() -> object:
    """The step of train.py's loop, 'start' before it, 'end' after it."""
    main = vars(sys.modules.get("__main__", types))
    progress = main.get("progress")
    if "batches" not in main or progress is None:
        return "start"
    return "end" if "is_preempted" in main else progress.step


def failure(kind: str) -> Exception:
    """An error as PyTorch raises it on a GPU without free memory."""
    if kind == "oom":
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ...")
    if kind == "cuda":
        return torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ...")
    if kind == "cublas":
        return RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    return dist.DistBackendError(
        "NCCL error in: ..., unhandled cuda error, NCCL version 2.28.9\nncclUnhandledCudaError: Call to "
        "CUDA function "
        "failed.\nLast error:\nCuda failure 2 'out of memory'"
    )


@dataclass
class Gpu:
    """Read from the environment by `configure`; see README.md for the variables."""

    count: int = 1  # of GPUs
    capability: tuple[int, int] = (9, 0)
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 80 * 10**9  # bytes
    root: str = ""  # the folder of the program, whose lines are named
    fails_in: str = ""  # the step in which one operator raises, on this rank
    fails_with: str = ""  # how, see `failure`; '' from when it has
    fails_after: int = 50  # operators of this step
    index: int = 0  # the current device
    queued: int = 0  # operators that were sent to the GPU
    done: int = 0  # of those, how many the GPU is known to have finished
    allocated: int = 0  # bytes, in all: Python cannot see when a storage is freed
    sync_debug_mode: int = 0  # torch.cuda.set_sync_debug_mode
    is_reported: bool = False
    # (step, kind, place) -> how often
    waits: collections.Counter = field(default_factory=collections.Counter)
    problems: collections.Counter = field(default_factory=collections.Counter)
    pending: collections.deque = field(
        default_factory=collections.deque
    )  # (number in the queue, what happens there)
    # addresses in collectives
    sent: collections.deque = field(default_factory=lambda: collections.deque(maxlen=256))
    lock: object = field(default_factory=threading.RLock)

    def configure(self) -> None:
        """Read the environment."""
        env = os.environ
        self.count = int(env.get("PRETEND_CUDA_DEVICES", "1"))
        major, minor = env.get("PRETEND_CUDA_CAPABILITY", "9.0").split(".")
        self.capability = (int(major), int(minor))
        self.name = env.get("PRETEND_CUDA_NAME", self.name)
        self.memory = int(float(env.get("PRETEND_CUDA_GB", "80")) * 1e9)
        self.root = os.path.realpath(env.get("PRETEND_CUDA_ROOT", os.getcwd()))
        rank, _, rest = env.get("PRETEND_CUDA_FAIL", "").partition(":")
        if rest and rank == env.get("RANK", "0"):
            self.fails_in, _, self.fails_with = rest.partition(":")

    def place(self) -> str:
        """The innermost line of the program, and the innermost line of torch below it."""
        frame = sys._getframe(1)
        inner = ""
        while frame:
            name = os.path.realpath(frame.f_code.co_filename)
            if not name.startswith(HERE + os.sep):
                if name.startswith(self.root + os.sep):
                    where = f"{os.path.relpath(name, self.root)}:{frame.f_lineno} {frame.f_code.co_name}"
                    return f"{where} ({inner})" if inner else where
                if not inner and f"{os.sep}torch{os.sep}" in name and not name.endswith(NO_PLACE):
                    inner = f"torch/{name.rpartition(os.sep + 'torch' + os.sep)[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return inner or "C++"

    def enqueue(self) -> int:
        """Send an operator to the GPU; returns its number."""
        self.queued += 1
        if self.fails_with and str(step_now()) == self.fails_in:
            self.fails_after -= 1
            if self.fails_after == 0:
                kind, self.fails_with = self.fails_with, ""
                raise failure(kind)
        return self.queued

    def later(self, number: int, action: Callable[[], None]) -> None:
        """Do this when the GPU has come to the operator of this number."""
        self.pending.append((number, action))

    def finish(self, number: int) -> None:
        """The host knows that the GPU has finished the first `number` operators."""
        with self.lock:
            self.done = max(self.done, number)
            while self.pending and self.pending[0][0] <= self.done:
                self.pending.popleft()[1]()

    def wait(self, kind: str, number: int | None = None) -> None:
        """The host waits until the GPU has finished the first `number` operators, or all."""
        where = self.place()
        if self.sync_debug_mode and not kind.startswith(("Event", "synchronize", "Stream")):
            if self.sync_debug_mode == 2:
                raise RuntimeError(f"called a synchronizing CUDA operation: {kind} at {where}")
            print(f"called a synchronizing CUDA operation: {kind} at {where}", file=sys.stderr)
        self.waits[step_now(), kind, where] += 1
        self.finish(self.queued if number is None else number)

    def track(self, inner: torch.Tensor) -> None:
        """Count an allocation."""
        self.allocated += inner.untyped_storage().nbytes()

    def report(self) -> None:
        """Write what was found: a line of JSON to the file PRETEND_CUDA_REPORT, else a text to stderr."""
        if not self.queued or self.is_reported:
            return
        self.is_reported = True
        steps = collections.defaultdict(list)
        for (step, kind, where), count in self.waits.items():
            steps[step].append((count, kind, where))
        if path := os.environ.get("PRETEND_CUDA_REPORT"):
            found = {
                "argv": sys.argv,
                "rank": int(os.environ.get("RANK", "0")),
                "operators": self.queued,
                "waits": {str(step): sorted(rows, reverse=True) for step, rows in steps.items()},
                "problems": dict(self.problems),
            }
            with open(path, "a") as f:
                f.write(json.dumps(found) + "\n")
            return
        print(self.text(steps), file=sys.stderr, flush=True)

    def text(self, steps: dict[object, list]) -> str:
        """
        The report for people: the waits of the start, of the end and of the last two steps, and the problems.
        """
        rank = os.environ.get("RANK", "0")
        allocated = self.allocated / 1e6
        out = [f"pretended GPU: {self.queued:,} operators, rank {rank}, {allocated:.1f} MB allocated in all"]
        numbers = sorted(step for step in steps if isinstance(step, int))
        for step in [*(name for name in ("start", "end") if name in steps), *numbers[-2:]]:
            rows = sorted(steps[step], reverse=True)
            out.append(f"  step {step}: the host waits {sum(row[0] for row in rows)} times")
            out += [f"    {count:5} x {kind}: {where}" for count, kind, where in rows[:40]]
        out += [f"  PROBLEM {count} x {text}" for text, count in self.problems.items()]
        return "\n".join(out)


GPU = Gpu()
