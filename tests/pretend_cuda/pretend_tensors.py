"""
Tensors that claim to be on cuda, whose memory is a CPU tensor's, and what happens to each operator on them.
"""

import contextlib
import os

import torch
from pretend_gpu import GPU
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
MIXED = {  # operators whose indices, masks and the like may be on the CPU
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten._foreach_copy_.default,
    aten.lift_fresh.default,
}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
WAITS = {  # the shape or the value of the result is needed on the CPU
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.equal.default,
    aten._local_scalar_dense.default,
}
NOT_DETERMINISTIC = {
    aten.put_.default,
    aten.histc.default,
    aten.kthvalue.default,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
}
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
NCCL_DTYPES = {
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
}


class CudaTensor(torch.Tensor):
    """A tensor on the pretended GPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> "CudaTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device("cuda", GPU.index),
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"CudaTensor({self.inner!r})"

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, CudaTensor):
            raise RuntimeError("incompatible tensor type: the data of a cuda tensor was set to a CPU tensor")
        torch._C.TensorBase.data.__set__(self, value)
        self.inner = value.inner

    def numpy(self, *args, **kwargs):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy: use Tensor.cpu()")

    __array__ = numpy

    def tolist(self) -> list:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream) -> None:
        pass

    def pin_memory(self, *args):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def __deepcopy__(self, memo: dict) -> "CudaTensor":
        made = CudaTensor(self.inner.clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: int) -> tuple:
        GPU.wait("pickle of a cuda tensor")
        return to_gpu, (self.inner.detach().clone(),)


PLAIN = {torch.Tensor, torch.nn.Parameter, CudaTensor, torch.nn.Buffer}


class Generator(torch.Generator):
    """torch.Generator(device="cuda") too; its numbers are the CPU's."""

    def __new__(cls, device="cpu") -> "Generator":
        made = torch._C.Generator.__new__(cls, "cpu")
        made.kind = torch.device(device).type
        return made


class Mode(TorchDispatchMode):
    """Operators without an argument on the GPU, such as torch.zeros(3, device="cuda")."""

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def to_gpu(inner: torch.Tensor) -> CudaTensor:
    """A tensor on the GPU with the memory of this one."""
    return CudaTensor(inner)


def bare(value: object) -> object:
    """The CPU tensor of a tensor on the GPU; everything else is as it was."""
    return value.inner if isinstance(value, CudaTensor) else value


def is_cuda(device: object) -> bool:
    """Whether an argument names a cuda device."""
    if not isinstance(device, str | torch.device | int):
        return False
    return torch.device(device).type == "cuda"


def is_pinned(t: torch.Tensor) -> bool:
    """Whether a CPU tensor, or what it is a view of, was pinned."""
    base = t if t._base is None else t._base
    return getattr(t, "is_pretended_pinned", False) or getattr(base, "is_pretended_pinned", False)


def pin(t: torch.Tensor) -> torch.Tensor:
    """Note that a CPU tensor is pinned."""
    t.is_pretended_pinned = True
    return t


# ------------------------------------------------------------------------------------------------------------
# operators


def dispatch(func, args: tuple, kwargs: dict):
    """Run an operator: on the CPU, with the effect on the GPU's queue."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    if any(type(t) not in PLAIN for t in tensors):
        return NotImplemented  # a different wrapper, such as DTensor, which unpacks its own tensors
    device = kwargs.get("device")
    if not any(isinstance(t, CudaTensor) for t in tensors) and not is_cuda(device):
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return pin(func(*args, **(kwargs | {"pin_memory": False})))
    number = GPU.enqueue()
    if func is aten._to_copy.default:
        return to_copy(args[0], kwargs, number)
    if func is aten.copy_.default:
        return copy(*args, **kwargs, number=number)
    if device is not None and not is_cuda(device):
        return made_elsewhere(func, args, kwargs)
    check(func, args, tensors)
    count_waits(func, args, kwargs)
    return run(func, args, kwargs)


def made_elsewhere(func, args: tuple, kwargs: dict) -> torch.Tensor:
    """
    An operator on a tensor of the GPU that makes one on the CPU or on meta, such as empty_like(device="cpu").
    """
    args, kwargs = tree_map(bare, (args, kwargs))
    is_pinned = kwargs.pop("pin_memory", False)
    made = func(*args, **kwargs)
    return pin(made) if is_pinned else made


def count_waits(func, args: tuple, kwargs: dict) -> None:
    """Wait where CUDA's operator does."""
    if func in WAITS or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
        GPU.wait(str(func))
    if func in INDEXED:
        indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            GPU.wait(f"{func} with a mask")
        if any(not isinstance(index, CudaTensor) for index in indices):
            GPU.wait(f"{func}: indices from the CPU")
    if str(func).startswith("aten._grouped_mm"):
        has_kernel = GPU.capability >= (9, 0) and args[0].dtype == torch.bfloat16
        if not has_kernel:
            GPU.wait("grouped_mm's fallback, which needs offs on the CPU")


def run(func, args: tuple, kwargs: dict):
    """Run an operator on the tensors' memory, and give results of the GPU the label cuda."""
    outer = {}  # by the id of its CPU tensor

    def unwrap(value):
        if isinstance(value, CudaTensor):
            outer[id(value.inner)] = value
            return value.inner
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        if isinstance(value, Generator) and value.kind != "cuda":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return value

    def wrap(value):
        if not isinstance(value, torch.Tensor) or isinstance(value, CudaTensor):
            return value
        if id(value) in outer:
            return outer[id(value)]
        if value._base is None:
            GPU.track(value)
        return CudaTensor(value)

    bare_args, bare_kwargs = tree_map(unwrap, (args, kwargs))
    if "device" in bare_kwargs:
        bare_kwargs["device"] = torch.device("cpu")
    if bare_kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    out = tree_map(wrap, EMULATED.get(func, func)(*bare_args, **bare_kwargs))
    if func.namespace == "aten" and out is not None:
        return return_and_correct_aliasing(func, args, kwargs, out)
    return out


def mm_dtype(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """torch.mm(out_dtype=...), which a CPU does not have."""
    is_wider = out_dtype == torch.float32 and a.dtype in (torch.float16, torch.bfloat16)
    if out_dtype != a.dtype and not is_wider:
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    return (a.float() @ b.float()).to(out_dtype)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """
    torch.mm, which is not computed if it is as large as only a measurement of speed is: it would take
    seconds.
    """
    if a.size(0) * a.size(1) * b.size(1) >= 4096**3:
        return a.new_zeros(a.size(0), b.size(1))
    return aten.mm.default(a, b)


EMULATED = {aten.mm.default: mm, aten.mm.dtype: mm_dtype}


# ------------------------------------------------------------------------------------------------------------
# what CUDA and NCCL refuse


def check(func, args: tuple, tensors: list[torch.Tensor]) -> None:
    """Raise what CUDA would raise."""
    name = str(func)
    others = [t for t in tensors if not isinstance(t, CudaTensor) and t.device.type != "meta"]
    if func.namespace in COLLECTIVES:
        check_collective(name, tensors, others)
    elif func not in MIXED:
        check_devices(func, others)
    if "mkldnn" in name or "_for_cpu" in name or "quantized" in name:
        raise NotImplementedError(f"Could not run '{name}' with arguments from the 'CUDA' backend.")
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        check_determinism(func, args)


def check_devices(func, others: list[torch.Tensor]) -> None:
    """Raise if an operator gets tensors on the CPU too; scalars may be, in operators on single elements."""
    name = str(func)
    if name.startswith(("fsdp.", "aten.is_same_size", "aten.detach")):
        return
    is_pointwise = torch.Tag.pointwise in func.tags
    allows_scalars = is_pointwise or name.startswith(("aten._foreach", "aten.lerp", "aten.fill"))
    if wrong := [tuple(t.shape) for t in others if t.dim() > 0 or not allows_scalars]:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:{GPU.index} and cpu! ({name}, CPU tensors of shapes {wrong})"
        )


def check_determinism(func, args: tuple) -> None:
    """Raise if the operator has no deterministic implementation."""
    name = str(func)
    is_float_cumsum = name.startswith("aten.cumsum") and args[0].is_floating_point()
    if func in NOT_DETERMINISTIC or is_float_cumsum:
        raise RuntimeError(
            f"{name} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'"
        )
    if func in MATMULS and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RuntimeError("Deterministic behavior was enabled ... CUBLAS_WORKSPACE_CONFIG=:4096:8")


def check_collective(name: str, tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Raise what NCCL would raise, whose part gloo plays."""
    GPU.sent.extend(t.data_ptr() for t in tensors if isinstance(t, CudaTensor))
    if others:
        raise RuntimeError(f"{name}: tensors on the CPU and on a GPU in one collective")
    for t in tensors:
        if not t.is_contiguous():
            raise ValueError(f"{name}: Tensors must be contiguous")
        if t.dtype not in NCCL_DTYPES:
            raise TypeError(
                f"{name}: Input tensor data type is not supported for NCCL process group: {t.dtype}"
            )


# ------------------------------------------------------------------------------------------------------------
# copies between the CPU and the GPU


def to_copy(source: torch.Tensor, kwargs: dict, number: int) -> torch.Tensor:
    """x.to(device, dtype): between the CPU and the GPU, or between dtypes."""
    kwargs = dict(kwargs)
    target = kwargs.pop("device", None)
    target = source.device if target is None else torch.device(target)
    non_blocking = kwargs.pop("non_blocking", False)
    kwargs.pop("pin_memory", None)
    copied = aten._to_copy.default(bare(source), **kwargs, device=torch.device("cpu"))
    if not isinstance(source, CudaTensor):
        read_from_cpu(source, non_blocking, number)
    elif target.type == "meta":
        return copied.to("meta")
    elif target.type == "cpu" and non_blocking:
        return arrive_later(torch.empty_like(copied), copied, number)
    elif target.type == "cpu":
        GPU.wait("copy to the CPU")
        return copied
    GPU.track(copied)
    return CudaTensor(copied)


def copy(
    target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False, *, number: int
) -> torch.Tensor:
    """target.copy_(source) with at least one of them on the GPU."""
    if isinstance(target, CudaTensor) and isinstance(source, CudaTensor):
        target.inner.copy_(source.inner)
    elif isinstance(target, CudaTensor):
        # gloo's result of a collective has the memory of its argument
        if source.untyped_storage().data_ptr() != target.inner.untyped_storage().data_ptr():
            read_from_cpu(source, non_blocking, number)
        target.inner.copy_(source)
    elif non_blocking and is_pinned(target):
        arrive_later(target, source.inner.to(target.dtype).expand_as(target).clone(), number)
    else:
        GPU.wait("non_blocking copy to memory that is not pinned" if non_blocking else "copy to the CPU")
        target.copy_(source.inner)
    return target


def read_from_cpu(source: torch.Tensor, non_blocking: bool, number: int) -> None:
    """A copy to the GPU: the host waits, or the source must stay as it is until the GPU has read it."""
    if not non_blocking:
        GPU.wait("blocking copy from the CPU")
    elif not is_pinned(source):
        GPU.wait("non_blocking copy from memory that is not pinned")
    else:
        watch_source(source, number)


def arrive_later(target: torch.Tensor, values: torch.Tensor, number: int) -> torch.Tensor:
    """Fill a CPU tensor with garbage, until the GPU has come to this copy."""
    garbage = -77
    if target.is_floating_point():
        garbage = float("nan")
    elif target.dtype == torch.bool:
        garbage = True
    with contextlib.suppress(RuntimeError):
        target.fill_(garbage)

    def arrive() -> None:
        target.copy_(values)

    GPU.later(number, arrive)
    return pin(target)


def watch_source(source: torch.Tensor, number: int) -> None:
    """Report a pinned source that was changed before the GPU had read it."""
    before = source.clone()
    where = GPU.place()

    def compare() -> None:
        if not torch.equal(torch.nan_to_num(source), torch.nan_to_num(before)):
            GPU.problems.add(f"a pinned source of a non_blocking copy was changed before it had run: {where}")

    GPU.later(number, compare)
