"""
Ranks that do not exist, for a dry run: this process is one of many ranks, and every other rank is assumed to
be a copy of it. A collective completes at once with what such copies would send, and is recorded.
"""

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.futures import Future

BACKEND = "pretended"
VARIABLE = "ISOGPT_DRY_RUN"  # 'rank of ranks' in a process that is a dry run


class Collective(NamedTuple):
    """
    A collective in which this rank has taken part.

    Args:
        operation: such as all_reduce.
        ranks: of its group, in the numbers of the world.
        size: in bytes: of one rank's tensor if it is added, sent or broadcast, and of all parts together if
            they are gathered, scattered or exchanged.
    """

    operation: str
    ranks: tuple[int, ...]
    size: int

    @property
    def sent(self) -> float:
        """The bytes that this rank sends; around a ring, as for a sum, the mean over its ranks."""
        n = len(self.ranks)
        rounds = {"all_reduce": 2, "recv": 0}.get(self.operation, 1)
        return rounds * self.size * (1 if self.operation == "send" else (n - 1) / n)


def pretended_rank() -> tuple[int, int] | None:
    """(rank, number of ranks) in a dry run, else None."""
    text = os.environ.get(VARIABLE)
    return tuple(map(int, text.split(" of "))) if text else None


def is_pretended() -> bool:
    """Whether the other ranks of the process group are pretended."""
    return dist.is_initialized() and dist.get_backend() == BACKEND


def pretend(rank: int, ranks: int, run: Any) -> None:
    """
    From here on, let process groups of BACKEND be those of `rank` among `ranks` ranks. They append each
    collective to the list `run.collectives`.
    """

    def create(options: Any, _: object) -> ProcessGroup:
        members = options.global_ranks_in_group or range(options.group_size)
        return PretendedGroup(options.group_rank, tuple(members), options.group_id, run)

    os.environ[VARIABLE] = f"{rank} of {ranks}"
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


class PretendedGroup(ProcessGroup):
    """
    A process group in which each rank holds what this rank holds. A pipeline's stage receives zeros instead,
    since its neighbor would not send what this rank sends.

    torch's own fake process group leaves results as they are in memory, NaN among them, and gives hooks of
    DistributedDataParallel an empty future (torch 2.11, 2.13).
    """

    supports_coalescing = False

    def __init__(self, rank: int, ranks: tuple[int, ...], name: str, run: Any) -> None:
        super().__init__(rank, len(ranks))
        self.ranks, self.name, self.run = ranks, name, run

    @property
    def group_name(self) -> str:
        return self.name

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> "PretendedGroup":
        return self

    def record(self, operation: str, tensors: list[Tensor], results: list[Tensor] | None = None) -> Work:
        """Note a collective of tensors that together are the whole. Its results are these unless given."""
        size = sum(tensor.nbytes for tensor in tensors)
        self.run.collectives.append(Collective(operation, self.ranks, size))
        future = Future()  # hooks of DistributedDataParallel wait for it
        future.set_result(results or tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        for tensor in tensors:
            self.add_copies(tensor, options)
        return self.record("all_reduce", tensors)

    def broadcast(self, tensors: list[Tensor], *_: Any) -> Work:
        return self.record("broadcast", tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> Work:
        for parts, part in zip(outputs, inputs, strict=True):
            for copy in parts:
                copy.copy_(part)
            work = self.record("all_gather", parts)
        return work

    def all_gather_single(self, output: Tensor, part: Tensor, *_: Any) -> Work:
        rank, copies = self.rank(), output.view(self.size(), -1)
        # this rank's copy first, of which the part may be a view
        for place in copies[rank : rank + 1], copies[:rank], copies[rank + 1 :]:
            place.copy_(part.view(1, -1))
        return self.record("all_gather", [output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], parts: list[Tensor], *_: Any) -> Work:
        return [*map(self.all_gather_single, outputs, parts)][-1]

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any = None) -> Work:
        output.copy_(whole.view(self.size(), -1)[self.rank()].view_as(output))
        self.add_copies(output, options)
        return self.record("reduce_scatter", [whole], [output])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], wholes: list[Tensor], *_: Any) -> Work:
        return [*map(self.reduce_scatter_single, outputs, wholes)][-1]

    def all_to_all_single(self, output: Tensor, whole: Tensor, _: Any, sizes: list, *others: Any) -> Work:
        parts = whole.split(sizes) if sizes else whole.chunk(self.size())
        mine = parts[self.rank()]  # what a copy of this rank sends to this rank
        output.view(self.size(), *mine.shape).copy_(mine)
        return self.record("all_to_all", [whole], [output])

    def send(self, tensors: list[Tensor], *_: Any) -> Work:
        return self.record("send", tensors)

    @torch.no_grad()
    def recv(self, tensors: list[Tensor], *_: Any) -> Work:
        for tensor in tensors:
            tensor.fill_(0 if tensor.is_floating_point() else 1)  # 1: a stage votes for shapes that are known
        return self.record("recv", tensors)

    def barrier(self, *_: Any) -> Work:
        return self.record("barrier", [])

    allreduce_coalesced = allreduce
    # the names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    @torch.no_grad()
    def add_copies(self, tensor: Tensor, options: Any) -> None:
        """Let a tensor become the sum of as many copies as there are ranks, unless their mean is wanted."""
        if options is None or options.reduceOp == ReduceOp.SUM:
            tensor.mul_(self.size())
