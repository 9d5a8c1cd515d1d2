"""
Pretend CUDA: run a program on a machine without a GPU with tensors that claim to be on device cuda, while
their values are computed on the CPU. Import this module before torch and call `install`; sitecustomize.py
does. See README.md.
"""

import cuda_guard

cuda_guard.load()

import atexit
import contextlib
import os
import threading
import time
import types

import torch
import torch.distributed as dist
import torch.distributed.optim  # uses torch.jit, which cannot script our torch.tensor
import torch.nn.attention.bias
from pretend_gpu import GPU, NAMES
from pretend_tensors import CudaTensor, Generator, Mode, is_cuda, is_pinned, pin
from torch.utils._pytree import tree_map

REAL = types.SimpleNamespace(
    tensor=torch.tensor,
    init_process_group=dist.init_process_group,
    get_future=dist.Work.get_future,
    thread_run=threading.Thread.run,
    exit=os._exit,
)


# ------------------------------------------------------------------------------------------------------------
# streams and events


class Stream:
    """torch.cuda.Stream; there is one queue, for all streams."""

    def __init__(self, device=None, priority=0, **kwargs) -> None:
        self.device = torch.device("cuda", GPU.index)

    def record_event(self, event=None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event) -> None:
        pass

    def wait_stream(self, stream) -> None:
        pass

    def synchronize(self) -> None:
        GPU.wait("Stream.synchronize")


class Event:
    """torch.cuda.Event, which can be read when the host has waited for it."""

    def __init__(
        self, device=None, enable_timing=False, blocking=False, interprocess=False, external=False
    ) -> None:
        self.enable_timing = enable_timing
        self.number = None  # in the queue
        self.time = 0.0

    def record(self, stream=None) -> None:
        self.number = GPU.enqueue()
        self.time = time.perf_counter()

    def wait(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        if self.number is not None:
            GPU.wait("Event.synchronize", self.number)

    def elapsed_time(self, end: "Event") -> float:
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.number is None or end.number is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(self.number, end.number) > GPU.done:
            raise RuntimeError(
                "CUDA error: device not ready (cudaEventElapsedTime before the events were completed)"
            )
        return (end.time - self.time) * 1e3


# ------------------------------------------------------------------------------------------------------------
# functions of torch


def properties(device=None) -> types.SimpleNamespace:
    """What torch.cuda.get_device_properties returns."""
    return types.SimpleNamespace(
        name=NAMES[GPU.capability],
        major=GPU.capability[0],
        minor=GPU.capability[1],
        total_memory=GPU.memory,
        multi_processor_count=132,
        uuid=f"pretend-{GPU.index}",
        gcnArchName="",
    )


def constant(value: object):
    """A function that returns this value for any arguments."""

    def function(*args, **kwargs):
        return value

    return function


def without_mode(function):
    """The same function, outside of all dispatch modes."""

    def call(*args, **kwargs):
        with torch.utils._python_dispatch._disable_current_modes():
            return function(*args, **kwargs)

    return call


def set_device(device) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= GPU.count:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    GPU.index = index or 0


def utilization(*args):
    raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported.")


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return including_emulation or GPU.capability >= (8, 0)


def tensor(data, *, dtype=None, device=None, requires_grad=False, pin_memory=False) -> torch.Tensor:
    """torch.tensor, which on a GPU is a blocking copy."""
    on_gpu = is_cuda(device)
    made = REAL.tensor(data, dtype=dtype, device="cpu" if on_gpu else device)
    if on_gpu:
        GPU.enqueue()
        GPU.wait("torch.tensor on the GPU, a blocking copy")
        GPU.track(made)
        made = CudaTensor(made)
    elif pin_memory:
        made = pin(made)
    return made.requires_grad_(requires_grad)


def pin_memory(self: torch.Tensor, device=None) -> torch.Tensor:
    return self if is_pinned(self) else pin(self.clone())


def is_tensor_pinned(self: torch.Tensor, *args) -> bool:
    return is_pinned(self)


def init_process_group(backend=None, *args, device_id=None, **kwargs) -> None:
    """NCCL's part is played by gloo."""
    REAL.init_process_group("cpu:gloo,cuda:gloo", *args, **kwargs)


def get_future(self: dist.Work) -> torch.futures.Future:
    """
    Of a collective: gloo's future has the tensors that it was given, and not those on the pretended GPU.
    """

    def on_gpu(t):
        is_plain = isinstance(t, torch.Tensor) and not isinstance(t, CudaTensor)
        return CudaTensor(t) if is_plain and t.data_ptr() in GPU.sent else t

    def all_on_gpu(future):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is None:
            Mode().__enter__()  # in gloo's thread, which runs the callbacks that follow
        return tree_map(on_gpu, future.value())

    return REAL.get_future(self).then(all_on_gpu)


def thread_run(self: threading.Thread) -> None:
    """A dispatch mode is entered in one thread: enter ours in each new thread."""
    with Mode():
        REAL.thread_run(self)


def leave(code: int) -> None:
    """os._exit, after the report."""
    GPU.report()
    REAL.exit(code)


# ------------------------------------------------------------------------------------------------------------
# installing


def stand_ins() -> dict[str, object]:
    """The functions of torch.cuda that return the same value each time."""
    stream = Stream()
    return {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": GPU.count,
        "is_current_stream_capturing": False,
        "get_device_capability": GPU.capability,
        "get_device_name": NAMES[GPU.capability],
        "mem_get_info": (GPU.memory - 10**9, GPU.memory),
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "_lazy_init": None,
        "current_stream": stream,
        "default_stream": stream,
    }


def current_device() -> int:
    return GPU.index


def synchronize(*args) -> None:
    GPU.wait("synchronize")


def install_cuda() -> None:
    """Replace what torch.cuda and torch.accelerator contain."""
    c = torch.cuda
    for name, value in stand_ins().items():
        setattr(c, name, constant(value))
    c.is_bf16_supported = is_bf16_supported
    c.max_memory_allocated = c.memory_allocated = lambda *args: GPU.allocated
    c.current_device = current_device
    c.set_device = set_device
    c.device = c._DeviceGuard = c.stream = c.StreamContext = contextlib.nullcontext
    c.get_device_properties = properties
    c.Stream = c.streams.Stream = Stream
    c.Event = c.streams.Event = Event
    c.synchronize = synchronize
    c.utilization = utilization
    c.get_rng_state = lambda *args: torch.random.get_rng_state()
    c.set_rng_state = constant(None)
    c.nvtx.mark = c.nvtx.range_push = c.nvtx.range_pop = constant(None)
    c.memory._record_memory_history = constant(None)
    c.memory._dump_snapshot = constant(None)
    a = torch.accelerator
    a.is_available = constant(True)
    a.device_count = constant(GPU.count)
    a.synchronize = synchronize
    a.current_accelerator = constant(torch.device("cuda"))
    a.current_device_index = current_device
    torch.backends.cuda.is_built = constant(True)
    torch._C._get_accelerator = constant(torch.device("cuda"))
    torch.version.cuda = "12.8"


def install() -> None:
    """From now on this process has a GPU, described by the environment."""
    GPU.configure()
    install_cuda()
    torch._has_compatible_shallow_copy_type = lambda a, b: (
        type(a) is type(b)
    )  # Module.to makes new parameters
    dist.Work.get_future = get_future
    dist.is_nccl_available = constant(True)
    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    torch._C._set_only_lift_cpu_tensors(True)
    bias = torch.nn.attention.bias
    bias.causal_lower_right = without_mode(bias.causal_lower_right)  # makes a subclass of Tensor
    torch.tensor = tensor
    torch.Generator = Generator
    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = is_tensor_pinned
    threading.Thread.run = thread_run
    Mode().__enter__()
    atexit.register(GPU.report)
    os._exit = leave
