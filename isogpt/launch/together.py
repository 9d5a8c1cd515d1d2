"""What all ranks do together: gather, broadcast, and exit if one of them found an error."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isogpt.common import console
from isogpt.common.torch_versions import all_gather_single
from isogpt.launch.pretended_ranks import is_pretended

Numbers = TypeVar("Numbers", bound=NamedTuple)
OnError = Callable[[str], object] | None  # called with the messages before an exit
NOTE_S = 60.0  # seconds until rank 0 says what it waits for
FILES = "has read or written files: if this does not end, check the disk or the file system of the rank"
# parts of the error messages of gloo and NCCL after a different rank has exited
CONNECTION_LOST = re.compile(
    "(closed|reset) by peer|remote peer|remote process exit|timed out (waiting|connecting)|connect timeout|"
    "connection was likely closed|nccl(remote|system)error|broken pipe|socket closed|"
    "communicator was aborted",
    re.IGNORECASE,
)


def is_main() -> bool:
    """Whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0 or is_pretended()


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list:
    """Gather `value` from every rank, by rank (all ranks), or from those of a group (all of these)."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def add_together(*counts: int) -> list[int]:
    """
    Add each count over the ranks (all ranks), on the CPU, since a GPU may have failed or still be busy.
    """
    totals = torch.tensor(counts, dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(totals)
    return totals.tolist()


def broadcast(value: object) -> object:
    """Return rank 0's `value` (all ranks)."""
    values = [value]
    if dist.is_initialized() and not is_pretended():  # in a dry run, this rank's
        dist.broadcast_object_list(values, src=0)
    return values[0]


def wait_together(future: Future | None, has_done: str = FILES) -> None:
    """
    Wait until every rank's future is done; None counts as done (all ranks). The ranks communicate once a
    second, so that a disk or a service slower than the collectives' timeout does not end a run. Rank 0 says
    periodically which rank is slow.

    Args:
        has_done: what the others wait for a slow rank to have done, and advice, for the note.
    """
    began, note_s, waiting = time.monotonic(), NOTE_S, True
    while waiting:
        is_waiting = future is not None and future in wait([future], timeout=1.0).not_done
        waited_s = time.monotonic() - began
        waiting, is_late = add_together(is_waiting, is_main() and waited_s >= note_s)
        if waiting and is_late:
            note_s *= 2
            slow = [rank for rank, is_slow in enumerate(gather_objects(is_waiting)) if is_slow]
            if is_main():
                text = f"note: all ranks have waited for {waited_s:.0f} s until {console.ranks_text(slow)}"
                console.print_to_stderr(f"{text} {has_done}")


def number_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which numbers are added and gathered."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


@dataclass
class Gathered(Generic[Numbers]):
    """Numbers from every rank. A GPU may not have computed them yet."""

    kind: type[Numbers]
    columns: Tensor  # (fields, world_size) on the device
    copy: Tensor  # the same on the CPU, once it has arrived
    arrived: torch.cuda.Event | None  # None: the copy is complete

    def on(self, device: torch.device) -> Numbers:
        """
        Return the same NamedTuple with tensors (world_size,) for computations on a device, without waiting.
        """
        return self.kind(*self.columns) if device == self.columns.device else self.read()

    def read(self) -> Numbers:
        """
        Return the same NamedTuple with float64 CPU tensors (world_size,). The first call waits for the
        device.
        """
        if self.arrived:
            self.arrived.synchronize()
            self.arrived = None
        return self.kind(*self.copy.double())


def gather_numbers(numbers: Numbers, device: torch.device) -> Gathered[Numbers]:
    """Gather a NamedTuple of scalars from every rank (all ranks): the one small collective of a step."""
    # numbers on the CPU go to the device in one copy from pinned memory: any other copy waits for the device
    is_there = [torch.is_tensor(v) and v.device.type == device.type for v in numbers]
    values = [0.0 if there else float(v) for there, v in zip(is_there, numbers, strict=True)]
    is_cuda = device.type == "cuda"  # MPS cannot pin memory
    mine = torch.tensor(values, dtype=number_dtype(device), pin_memory=is_cuda)
    mine = mine.to(device, non_blocking=is_cuda)  # (fields,)
    for i, v in enumerate(numbers):
        if is_there[i]:
            mine[i] = v
    rows = mine
    if dist.is_initialized() and dist.get_world_size() > 1:
        rows = mine.new_empty(dist.get_world_size() * len(mine))
        all_gather_single(rows, mine)
    columns = rows.view(-1, len(mine)).T  # (fields, world_size)
    # from a GPU the copy goes to pinned memory, behind what has been queued so far
    copy = columns.to("cpu", non_blocking=is_cuda)
    arrived = torch.cuda.current_stream().record_event() if is_cuda else None
    return Gathered(type(numbers), columns, copy, arrived)


class Number(NamedTuple):
    """A single number."""

    value: Tensor | float


def gather_number(value: Tensor | float, device: torch.device) -> Tensor:
    """One number from every rank (all ranks): (world_size,) float64 on the CPU."""
    return gather_numbers(Number(value), device).read().value


@contextmanager
def exit_together(on_error: OnError = None) -> Iterator[None]:
    """
    Run a block that can fail on any rank (all ranks; no collectives inside). If it raised ValueError or
    OSError on any of them, rank 0 prints each distinct message once and all ranks exit with status 1. Any
    other exception, such as a bug or running out of memory, is raised again on the first rank where it
    occurred. Rank 0 names this rank, and the other ranks exit.

    Args:
        on_error: called with the messages before the exit, for instance to log them. The crash hook of a rank
            that raises again logs the exception.
    """
    error = None
    try:
        yield
    except BaseException as e:
        error = e
    failures = gather_failures(error)
    unexpected = [ranks[0] for (_, is_expected), ranks in failures.items() if not is_expected]
    if min(unexpected, default=None) == own_rank():
        raise error
    if failures:
        if on_error:
            on_error(console.shortened([message for message, _ in failures], console.RANKS_SHOWN, "; "))
        if is_main():
            print_failures(failures)
        leave_with_others()


def own_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather_failures(error: BaseException | None) -> dict[tuple[str, bool], list[int]]:
    """
    Gather the failures of all ranks (all ranks); `error` is the exception of this rank. If no rank has
    failed, this is one small sum.

    Returns:
        the ranks of each failure: its message, and whether it is a user's mistake or the disk's.
    """
    is_expected = isinstance(error, ValueError | OSError)
    message = str(error) if is_expected else f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        (failed,) = add_together(error is not None)
        failures = gather_objects((message, is_expected) if error else None) if failed else []
    except RuntimeError as lost:  # after Ctrl-C, the other ranks may have left already
        raise error or lost from None
    ranks = {}
    for rank, failure in enumerate(failures):
        if failure:
            ranks.setdefault(failure, []).append(rank)
    return ranks


def print_failures(failures: dict[tuple[str, bool], list[int]]) -> None:
    """
    Print each distinct message once, on rank 0, with the ranks that have it unless rank 0 is one of them. At
    most RANKS_SHOWN are printed, since many messages may differ only in a name.
    """
    for (message, _), ranks in [*failures.items()][: console.RANKS_SHOWN]:
        console.print_error(message, f"{console.ranks_text(ranks)}: " if 0 not in ranks else "")
    if len(failures) > console.RANKS_SHOWN:
        console.print_to_stderr(f"error: and {len(failures) - console.RANKS_SHOWN:,} more from other ranks")


def leave_with_others() -> NoReturn:
    """Exit with status 1 when rank 0 has printed (all ranks)."""
    if not dist.is_initialized():
        sys.exit(1)
    # the launcher sends SIGTERM to the ranks that leave last, which would then announce that they stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not is_main():  # PyTorch would report, with C++ frames, that the store of rank 0 is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with suppress(RuntimeError):  # other ranks may have left already
        # a rank that leaves early makes the launcher kill ranks that have not printed yet. The number is on
        # the CPU, since a barrier would use the GPU, which may have failed
        dist.all_reduce(torch.zeros(1), async_op=True).wait(timedelta(seconds=10))
    # destroying a process group that a DDP model still references was seen to hang (torch 2.13, gloo)
    console.flush()
    os._exit(1)


def do_together(work: Callable, *arguments: object, on_error: OnError = None, has_done: str = FILES) -> Any:
    """
    Return `work(*arguments)` of this rank (all ranks; no collectives inside). The work, such as reading
    files, runs in a thread, while the ranks communicate: on some ranks it may take longer than the
    collectives' timeout. Exits like exit_together.
    """
    thread = {}
    if torch.cuda.is_initialized():  # a new thread would use GPU 0
        thread = {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)}
    future = ThreadPoolExecutor(1, **thread).submit(work, *arguments)
    wait_together(future, has_done)
    with exit_together(on_error):
        return future.result()


def is_connection_lost(error: BaseException) -> bool:
    """
    Return whether a collective or the store failed because a different rank exited or did not respond in
    time.
    """
    has_failed = isinstance(error, RuntimeError) and CONNECTION_LOST.search(str(error)) is not None
    return has_failed or isinstance(error, dist.DistStoreError | dist.DistNetworkError)
