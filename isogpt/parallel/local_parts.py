"""The part of each parameter that this rank holds, described in the same way for every layout."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn

Offsets = tuple[int, ...]  # where a piece begins in each dimension of the whole tensor


@dataclass(frozen=True)
class Split:
    """
    How tensor or expert parallelism (axis tp or ep of the mesh) divides a parameter along one dimension.

    Along this dimension, matrices of the heights or widths in `sections` are stacked (q, k and v; experts).
    Each matrix is divided evenly over `count` ranks, of which this rank is number `index`.
    """

    axis: str
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

    def place(self, offsets: Offsets, piece: Tensor) -> Iterator[tuple[Offsets, Tensor]]:
        """Yield the parts of a piece in each section, with their offsets in the whole parameter."""
        dim, n = self.dim, piece.size(self.dim)
        start = -offsets[dim]  # where a section begins in the piece
        for begin, length in self.ranges():
            low, high = max(start, 0), min(start + length, n)
            if low < high:
                whole_offsets = (*offsets[:dim], begin + low - start, *offsets[dim + 1 :])
                yield whole_offsets, piece.narrow(dim, low, high - low)
            start += length


@dataclass(frozen=True)
class LocalPart:
    """
    The part of a parameter, or of a tensor of equal shape such as a moment, that this rank holds.

    `pieces` are views of the tensor in this rank's memory, with offsets in the whole tensor of shape `shape`.
    """

    shape: torch.Size
    pieces: tuple[tuple[Offsets, Tensor], ...]
    is_row: bool = False  # whether the tensor is a stack with a row for each group of ranks

    def in_row(self, index: int, count: int) -> "LocalPart":
        """This part as row `index` of a stack of `count`; a stack of one is the tensor itself."""
        if count == 1:
            return self
        pieces = tuple(((index, *offsets), piece[None]) for offsets, piece in self.pieces)
        return LocalPart(torch.Size((count, *self.shape)), pieces, is_row=True)

    def unstacked(self) -> "LocalPart":
        """The part itself, not as a row."""
        if not self.is_row:
            return self
        pieces = tuple((offsets[1:], piece[0]) for offsets, piece in self.pieces)
        return LocalPart(self.shape[1:], pieces)

    def new_stack(self, count: int) -> "LocalPart":
        """Memory for this part in all rows of a stack of `count`."""
        pieces = tuple(((0, *offsets), p.new_empty(count, *p.shape)) for offsets, p in self.pieces)
        return LocalPart(torch.Size((count, *self.shape)), pieces)

    @torch.no_grad()
    def put_mean(self, stack: "LocalPart") -> None:
        """Copy the mean of the rows of a stack, see `new_stack`, to this part."""
        for (_, piece), (_, rows) in zip(self.pieces, stack.pieces, strict=True):
            piece.copy_(rows.mean(0))

    def as_copies_of(self, shape: torch.Size) -> "LocalPart":
        """
        This part of a tensor that consists of copies of a smaller tensor of this shape, one below the other,
        as pieces of the smaller tensor.
        """
        pieces, height = [], shape[0]
        for (first, *others), piece in self.pieces:
            row = first % height
            ends = tuple(range(height - row, len(piece), height))  # of copies
            for copy in piece.tensor_split(ends):
                pieces.append(((row, *others), copy))
                row = 0
        return LocalPart(shape, tuple(pieces))

    def size(self) -> torch.Size:
        """The whole tensor's shape; torch.distributed.checkpoint compares it with the saved tensor's."""
        return self.shape

    def __create_chunk_list__(self) -> list:
        """What torch.distributed.checkpoint asks of a tensor: where each piece is in the whole."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # slow to import

        return [ChunkStorageMetadata(torch.Size(offsets), piece.shape) for offsets, piece in self.pieces]

    def __create_write_items__(self, name: str, _: object) -> list:
        """What it asks before it writes: an item for each piece."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for chunk, (_, piece) in zip(self.__create_chunk_list__(), self.pieces, strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), self.shape)
            index = MetadataIndex(name, chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def places(self) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """(piece, where it is in the whole tensor) for each piece."""
        for offsets, piece in self.pieces:
            yield piece, tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))

    def cut(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(piece, the same part of `whole`) for each piece."""
        for piece, place in self.places():
            yield piece, whole[place]

    @torch.no_grad()
    def put(self, whole: Tensor) -> None:
        """
        Copy this rank's part from a whole tensor, without communication. Raises RuntimeError if shapes
        differ.
        """
        if whole.shape != self.shape:
            raise RuntimeError(f"its shape is {tuple(whole.shape)}, not {tuple(self.shape)}")
        for piece, values in self.cut(whole):
            piece.copy_(values)

    def copy(self) -> "LocalPart":
        """Copy the part to the CPU. Copies from a GPU are queued, see `copy_to_cpu`."""
        copies = [(offsets, copy_to_cpu(piece)) for offsets, piece in self.pieces]
        return replace(self, pieces=tuple(copies))


Splits = tuple[Split, ...]  # how a parameter is split, first by expert, then by tensor parallelism


def local_part_of(tensor: Tensor, splits: Splits = ()) -> LocalPart:
    """Return this rank's part of a tensor that may be split, and may then be a DTensor of fully_shard."""
    piece, offsets, shape = local(tensor), (0,) * tensor.dim(), list(tensor.shape)
    if is_sharded(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    pieces = [(tuple(offsets), piece)] if piece.numel() or not shape else []
    for split in reversed(splits) if shape else ():
        pieces = [placed for offsets, piece in pieces for placed in split.place(offsets, piece)]
        shape[split.dim] = sum(split.sections)
    return LocalPart(torch.Size(shape), tuple(pieces))


def splits_of(p: Tensor) -> Splits:
    """How expert and tensor parallelism have split a parameter."""
    return getattr(p, "splits", ())


def is_split(p: Tensor, axis: str) -> bool:
    """Whether ranks along an axis of the mesh, tp or ep, hold different parts of a parameter."""
    return any(split.axis == axis for split in splits_of(p))


def local_parts_by_name(model: nn.Module) -> dict[str, LocalPart]:
    """
    Return the parts of the model's parameters for a checkpoint, each once (the head can be tied to wte).
    """
    return {name: local_part_of(p.detach(), splits_of(p)) for name, p in model.named_parameters()}


def whole_tensors(parts: list[LocalPart], group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """
    Gather the whole float32 tensors of parts of equal shape, stacked, (parts, *shape) (all ranks of the
    group).

    A single collective adds the ranks' pieces: all other places contain zeros, so nothing is rounded.
    """
    stacked = torch.zeros(len(parts), *parts[0].shape, device=device)
    for part, whole in zip(parts, stacked, strict=True):
        for piece, place in part.cut(whole):
            place.copy_(piece)
    if group:
        dist.all_reduce(stacked, group=group)
    return stacked


def is_sharded(value: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which a rank may hold only a part."""
    return hasattr(value, "full_tensor")


def local(value: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return value.to_local() if is_sharded(value) else value


def like(p: nn.Parameter, value: Tensor) -> Tensor:
    """A value in the shape of this rank's part of a parameter, as a DTensor if the parameter is one."""
    if not is_sharded(p) or is_sharded(value) or value.shape != local(p).shape:
        return value
    from torch.distributed.tensor import DTensor

    # DTensor.from_local would copy to the GPU what cpu_offload keeps on the CPU
    meta = p._spec.tensor_meta._replace(dtype=value.dtype)
    return DTensor(value, replace(p._spec, tensor_meta=meta), requires_grad=False)


def copy_to_cpu(value: Tensor) -> Tensor:
    """
    Copy a tensor to the CPU. Copies from a GPU go to pinned memory and are queued: the caller waits once for
    all copies.
    """
    on_gpu = value.device.type == "cuda"
    copy = torch.empty_like(value, device="cpu", pin_memory=on_gpu)
    return copy.copy_(value, non_blocking=on_gpu)


@torch.no_grad()
def init_part(model: nn.Module, name: str, part: LocalPart, seed: int) -> None:
    """Fill this rank's part of a parameter with its initial values."""
    for piece, place in part.places():
        piece.copy_(model.initial_weight(name, part.shape, seed, place))
