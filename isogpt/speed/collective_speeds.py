"""Measure bus bandwidth and latency of the collectives, by message size."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from isogpt.common import console
from isogpt.common.torch_versions import all_gather_single, reduce_scatter_single
from isogpt.launch.process_group import connect_ranks, leave_process_group
from isogpt.launch.together import gather_number

MESSAGE_SIZES = [2**k for k in range(10, 27, 2)]  # bytes


def measure_collectives(device: str, backend: str, timeout_s: float) -> list[dict]:
    """
    Measure each collective with each message size (all ranks) and print a table. As in nccl-tests, a message
    is the input or the output, whichever is larger, and bus bandwidth is what each link carries.

    Returns:
        {operation, bytes, ranks, us, gb_per_s} for each measurement.

    Raises:
        ValueError: there is only one process, or the others cannot be reached.
    """
    ranks = connect_ranks(device, backend, timeout_s)
    if ranks.world_size == 1:
        raise ValueError(
            "comm needs two processes or more: set --nproc=2, and --device=cpu if there is one GPU"
        )
    dist.init_process_group(ranks.backend, **ranks.group_options(timeout_s))
    rows = [measure_all(size, ranks.world_size, ranks.device) for size in MESSAGE_SIZES]
    if ranks.is_main:
        devices = f"{ranks.world_size} processes on {ranks.device.type}, {ranks.network}"
        print(f"{devices}; bus bandwidth in GB/s, and the time of the smallest message:")
        columns = {"message": [f"{size / 1024:,.0f} KB" for size in MESSAGE_SIZES] + ["1 KB, in µs"]}
        for cells in zip(*rows, strict=True):
            figures = [f"{cell['gb_per_s']:.3f}" for cell in cells]
            columns[cells[0]["operation"]] = [*figures, f"{cells[0]['us']:.1f}"]
        for line in console.aligned(columns):
            print(f"  {line}")
    leave_process_group()
    return [cell for row in rows for cell in row]


def measure_all(size: int, n: int, device: torch.device) -> list[dict]:
    """Measure the collectives of n ranks with messages of `size` bytes, or slightly less (all ranks)."""
    whole, other = (torch.zeros(size // 4 // n * n, device=device) for _ in range(2))
    part = torch.zeros(len(whole) // n, device=device)
    cells = []
    # factor: bytes that each link carries per byte of the message
    for name, factor, function, *arguments in (
        ("all-reduce", 2 * (n - 1) / n, dist.all_reduce, whole),
        ("all-gather", (n - 1) / n, all_gather_single, whole, part),
        ("reduce-scatter", (n - 1) / n, reduce_scatter_single, part, whole),
        ("broadcast", 1.0, dist.broadcast, whole, 0),
        ("all-to-all", (n - 1) / n, dist.all_to_all_single, other, whole),
    ):
        seconds = mean_seconds(device, function, *arguments)
        figures = {"us": seconds * 1e6, "gb_per_s": factor * whole.nbytes / seconds / 1e9}
        cells.append({"operation": name, "bytes": whole.nbytes, "ranks": n} | figures)
    return cells


def mean_seconds(device: torch.device, function: Callable, *arguments: object, budget: float = 0.1) -> float:
    """
    Return the slowest rank's mean time of a call, over as many calls as fit into `budget` seconds (all
    ranks).
    """
    names = {"function": function, "arguments": arguments}
    timer = Timer("function(*arguments)", globals=names, num_threads=torch.get_num_threads())
    first = gather_number(timer.timeit(1).mean, device).max().item()  # after two calls that are not timed
    count = int(min(max(budget / first, 1), 200))
    return gather_number(timer.timeit(count).mean, device).max().item()
