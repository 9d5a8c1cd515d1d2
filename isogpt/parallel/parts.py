"""Which part of each parameter this rank holds, whatever the layout: the common language of the ways of sharding."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Split:
    """
    How tensor parallelism divides a parameter: along one dimension, where matrices of these heights or widths are
    stacked (q, k and v), each of which is divided evenly over `count` ranks. This rank is number `index` of them.
    """

    dim: int
    sections: tuple[int, ...]
    index: int
    count: int

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(start in the whole parameter, length) of each section's part on this rank."""
        first = 0
        for n in self.sections:
            start = min(self.index * ceil(n / self.count), n)
            yield first + start, min(ceil(n / self.count), n - start)
            first += n

    def length(self) -> int:
        """This rank's length along the dimension."""
        return sum(length for _, length in self.ranges())


@dataclass(frozen=True)
class Part:
    """
    The part of a parameter, or of a tensor of its shape such as a moment, that this rank holds: `pieces` are views of
    the tensor in this rank's memory, with their offsets in the whole tensor of shape `shape`.
    """

    shape: torch.Size
    pieces: tuple[tuple[tuple[int, ...], Tensor], ...]

    def size(self) -> torch.Size:
        """The whole tensor's shape; torch.distributed.checkpoint compares it with the saved tensor's."""
        return self.shape

    def piece(self, offsets: tuple[int, ...]) -> Tensor:
        """The piece at these offsets."""
        return dict(self.pieces)[tuple(offsets)]

    def cut(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(piece, the same part of `whole`) for each piece."""
        for offsets, piece in self.pieces:
            yield piece, whole[tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))]

    @torch.no_grad()
    def put(self, whole: Tensor) -> None:
        """Copy this rank's part of a whole tensor: no communication. Raises RuntimeError if its shape is another."""
        if whole.shape != self.shape:
            raise RuntimeError(f"its shape is {tuple(whole.shape)}, not {tuple(self.shape)}")
        for piece, values in self.cut(whole):
            piece.copy_(values)

    def copy(self) -> "Part":
        """A copy on the CPU. From a GPU into pinned memory: the caller waits once for all queued copies."""
        return Part(self.shape, tuple((offsets, copy_to_cpu(piece)) for offsets, piece in self.pieces))


def part_of(tensor: Tensor, split: Split | None = None) -> Part:
    """What this rank holds of a tensor, which may be a DTensor of fully_shard and may be split."""
    here, offsets, shape = local(tensor), [0] * tensor.dim(), list(tensor.shape)
    if is_sharded(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        offsets = list(compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)[1])
    if split is None or not shape:
        return Part(tensor.shape, ((tuple(offsets), here),) if here.numel() or not shape else ())
    dim, start, pieces = split.dim, 0, []  # start: of a section in what this rank of the tp group holds
    first, end = offsets[dim], offsets[dim] + here.size(dim)  # of what fully_shard has left here
    for begin, length in split.ranges():
        low, high = max(start, first), min(start + length, end)
        if low < high:
            where = [*offsets[:dim], begin + low - start, *offsets[dim + 1 :]]
            pieces.append((tuple(where), here.narrow(dim, low - first, high - low)))
        start += length
    shape[dim] = sum(split.sections)
    return Part(torch.Size(shape), tuple(pieces))


def split_of(p: Tensor) -> Split | None:
    """How tensor parallelism has split a parameter; None if it has not."""
    return getattr(p, "tp_split", None)


def parts_by_name(model: nn.Module) -> dict[str, Part]:
    """The parts of the model's parameters for a checkpoint, each parameter once (the head can be tied to wte)."""
    return {name: part_of(p.detach(), split_of(p)) for name, p in model.named_parameters()}


def whole_tensors(parts: list[Part], group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """
    The whole float32 tensors of parts of equal shape, stacked: (parts, *shape) (all ranks of the group that shares
    them). The sum of the ranks' pieces, in a single collective: the other places hold zeros, so nothing is rounded.
    """
    new = torch.zeros if group else torch.empty
    stacked = new(len(parts), *parts[0].shape, device=device)
    for part, whole in zip(parts, stacked, strict=True):
        for piece, place in part.cut(whole):
            place.copy_(piece)
    if group:
        dist.all_reduce(stacked, group=group)
    return stacked


def is_sharded(value: Tensor) -> bool:
    """Whether it is a DTensor, of which a rank may hold only a part."""
    return hasattr(value, "full_tensor")


def local(value: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return value.to_local() if is_sharded(value) else value


def copy_to_cpu(value: Tensor) -> Tensor:
    """A copy on the CPU. From a GPU into pinned memory: the copies are queued, and the caller waits for all at once."""
    on_gpu = value.device.type == "cuda"
    return torch.empty_like(value, device="cpu", pin_memory=on_gpu).copy_(value, non_blocking=on_gpu)
