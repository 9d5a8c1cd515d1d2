"""Count the memory of the tensors that a model allocates, without allocating them."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isogpt.parallel.recompute import SAVED


def tensors_in(values: object) -> list[Tensor]:
    """The tensors among arguments or results of an operator."""
    return [value for value in tree_leaves(values) if torch.is_tensor(value)]


def is_float(value: object) -> bool:
    """Whether a value is a tensor of floating-point numbers."""
    return torch.is_tensor(value) and value.is_floating_point()


def number(x: Tensor) -> float:
    """1, for a number that was not computed."""
    return torch.ones((), dtype=x.dtype).item()


def even_choice(x: Tensor, k: int, dim: int = -1, *_: bool) -> tuple[Tensor, Tensor]:
    """The result of x.topk(k), in which each place is chosen equally often: experts get as many tokens."""
    values = x.narrow(dim, 0, k)
    return torch.empty_like(values), torch.arange(values.numel()).view(values.shape) % x.size(dim)


def grouped_matmul(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """
    The result of F.grouped_mm for rows of experts, or the gradient of their weights. For a CPU, torch has no
    such function in float32 (torch 2.13).
    """
    return a.new_empty([len(ends)] * (a.dim() == b.dim()) + [a.size(-2), b.size(-1)])


def exchanged(x: Tensor, received: list[int], _: list[int], group: str) -> Tensor:
    """The result of an all-to-all. Without this, the group would not be called."""
    dist.distributed_c10d._resolve_process_group(group).record("all_to_all", [x])
    return x.new_empty(sum(received), *x.shape[1:])


aten = torch.ops.aten
# operators whose results depend on numbers
WITHOUT_NUMBERS: dict[Any, Callable] = {
    aten._local_scalar_dense.default: number,
    aten.topk.default: even_choice,
    aten._grouped_mm.default: grouped_matmul,
    torch.ops._c10d_functional.all_to_all_single.default: exchanged,
}


class MemoryCounter(TorchDispatchMode):
    """
    While this mode is entered, computes only the shapes of tensors of floating-point numbers, which have no
    memory, and counts the bytes that all tensors would take. Tokens, positions and other whole numbers that
    do not follow from such tensors are computed.

    torch's MemTracker takes a second to import, and follows the model's modules, so that it raises an
    exception in the second step (torch 2.13).

    Attributes:
        total, peak: bytes now, and the most so far.
        matmuls: bytes of all results of matmuls and attention.
        sizes: bytes of each storage, by its address.
        pointwise: the results of pointwise operators that no other operator has read, and what they were
            computed from.
        resizable: storages that FSDP frees and allocates without an operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.total = self.peak = self.matmuls = 0
        self.sizes: dict[int, int] = {}
        self.pointwise = weakref.WeakKeyDictionary()
        self.resizable = weakref.WeakSet()

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # the operators on its local part follow
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        result = self.compute(operator, inputs, args, kwargs)
        if active_fake_mode() or operator.namespace == "prim":  # a property of a tensor
            return result
        results = tensors_in(result)
        sources, written = ({x.untyped_storage() for x in tensors} for tensors in (inputs, results))
        for storage in sources | written:
            self.track(storage)
        if operator in SAVED:
            self.matmuls += sum(tensor.nbytes for tensor in results)
        if torch.Tag.pointwise in operator.tags:
            self.pointwise |= dict.fromkeys(written - sources, [*map(weakref.ref, sources)])
        elif not operator.is_view:
            for storage in sources | written:
                self.pointwise.pop(storage, None)
        if operator.namespace == "fsdp":
            self.resizable |= sources | written
        if self.total > self.peak:
            for storage in self.resizable:
                self.track(storage)
            self.peak = max(self.peak, self.total)
        return result

    def compute(self, operator: Any, inputs: list[Tensor], args: tuple, kwargs: dict) -> Any:
        """Return the result of an operator; of floating-point numbers, only the shape."""
        if operator in WITHOUT_NUMBERS and isinstance(inputs[0], FakeTensor):
            return WITHOUT_NUMBERS[operator](*args)
        # DTensor asks for the shapes of results in a mode of its own
        if active_fake_mode() or any(isinstance(x, FakeTensor) or is_float(x) for x in inputs):
            return operator(*args, **kwargs)
        if not inputs:  # may be large
            with self.fake:
                result = operator(*args, **kwargs)
            if is_float(result):
                return result
        result = operator(*args, **kwargs)
        return self.fake.from_tensor(result) if is_float(result) else result

    def track(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or count it again if its size has changed."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, self.forget, key)
        self.total += size - self.sizes.get(key, 0)
        self.sizes[key] = size

    def forget(self, key: int) -> None:
        """Note that a storage was freed, whose address a later one may have."""
        self.total -= self.sizes.pop(key)

    def fused(self) -> int:
        """The bytes of those in `pointwise` that compiled kernels compute again from what exists."""
        results = self.pointwise.items()
        return sum(storage.nbytes() for storage, sources in results if None not in [x() for x in sources])
