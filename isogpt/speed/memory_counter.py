"""Count the memory of the tensors that a model allocates, without allocating them."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isogpt.parallel.recompute import KEPT


def tensors_in(values: object) -> list[Tensor]:
    """The tensors among arguments or results of an operator."""
    return [value for value in tree_leaves(values) if torch.is_tensor(value)]


def is_float(value: object) -> bool:
    """Whether a value is a tensor of floating-point numbers."""
    return torch.is_tensor(value) and value.is_floating_point()


def has_dtensor(types: tuple[type, ...]) -> bool:
    """Whether an operator gets a DTensor: the operators on its local part follow."""
    return any(kind.__name__ == "DTensor" for kind in types)


class FakeFloats(TorchDispatchMode):
    """
    Computes only the shapes of tensors of floating-point numbers, which have no memory. Tokens, positions and
    other whole numbers that do not follow from them are computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_dtensor(types):
            return NotImplemented
        inputs = tensors_in((args, kwargs))
        if operator in WITHOUT_NUMBERS and isinstance(inputs[0], FakeTensor):
            return WITHOUT_NUMBERS[operator](*args)
        # DTensor asks for the shapes of results in a mode of its own
        if active_fake_mode() or any(isinstance(x, FakeTensor) or is_float(x) for x in inputs):
            return operator(*args, **kwargs)
        if inputs:  # whole numbers
            result = operator(*args, **kwargs)
            return self.fake.from_tensor(result) if is_float(result) else result
        with self.fake:
            result = operator(*args, **kwargs)
        return result if is_float(result) else operator(*args, **kwargs)


def number(x: Tensor) -> float:
    """1, for a number that was not computed."""
    return torch.ones((), dtype=x.dtype).item()


def no_places(x: Tensor) -> Tensor:
    """The result of x.nonzero() if x is 0 everywhere."""
    return torch.zeros(0, x.dim(), dtype=torch.int64)


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
    aten.nonzero.default: no_places,
    aten.topk.default: even_choice,
    aten._grouped_mm.default: grouped_matmul,
    torch.ops._c10d_functional.all_to_all_single.default: exchanged,
}


class MemoryCounter(TorchDispatchMode):
    """
    Counts the bytes of all tensors that exist while this mode is entered, and what selective recomputation
    and compiled kernels would keep.

    torch's MemTracker takes a second to import, and follows the model's modules, so that it raises an
    exception in the second step (torch 2.13).

    Attributes:
        total, peak: bytes now, and the most so far.
        sizes: bytes of each storage, by its address.
        resizable: storages that FSDP frees and allocates without an operator.
        matmuls: bytes of all results of matmuls and attention.
        pointwise: the results of pointwise operators that no other operator has read, and what they were
            computed from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = self.peak = self.matmuls = 0
        self.sizes: dict[int, int] = {}
        self.references: dict[int, weakref.ref] = {}
        self.resizable: set[int] = set()
        self.pointwise: dict[int, list[weakref.ref]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if has_dtensor(types):
            return NotImplemented
        result = operator(*args, **kwargs or {})
        if active_fake_mode() or operator.namespace == "prim":  # a property of a tensor
            return result
        inputs = {self.track(tensor) for tensor in tensors_in((args, kwargs))}
        results = {self.track(tensor) for tensor in tensors_in(result)}
        if operator in KEPT:
            self.matmuls += sum(tensor.nbytes for tensor in tensors_in(result))
        if torch.Tag.pointwise in operator.tags:
            self.pointwise |= dict.fromkeys(results - inputs, [self.references[key] for key in inputs])
        elif not operator.is_view:
            for key in inputs | results:
                self.pointwise.pop(key, None)
        if operator.namespace == "fsdp":
            self.resizable |= inputs | results
        if self.total > self.peak:
            for key in self.resizable & self.references.keys():
                self.set_size(key, self.references[key]().nbytes())
            self.peak = max(self.peak, self.total)
        return result

    def track(self, tensor: Tensor) -> int:
        """Count a tensor's storage, or count it again if its size has changed; return its address."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.references:
            # the address may be that of a later storage
            self.references[key] = weakref.ref(storage, partial(self.forget, key))
        self.set_size(key, storage.nbytes())
        return key

    def set_size(self, key: int, size: int) -> None:
        """Note the bytes of a storage."""
        self.total += size - self.sizes.get(key, 0)
        self.sizes[key] = size

    def forget(self, key: int, _: weakref.ref) -> None:
        """Note that a storage was freed."""
        self.total -= self.sizes.pop(key)
        del self.references[key]
        self.pointwise.pop(key, None)
        self.resizable.discard(key)

    def fused(self) -> int:
        """The bytes of those in `pointwise` that compiled kernels compute again from what exists."""
        found = [key for key, sources in self.pointwise.items() if all(ref() is not None for ref in sources)]
        return sum(self.sizes[key] for key in found)
