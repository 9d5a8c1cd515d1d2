"""Measure bus bandwidth and latency of the collectives, by message size."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from isogpt.common.console import aligned, print_result
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
    n = ranks.world_size
    if n == 1:
        raise ValueError("comm needs two processes: set --nproc=2, and --device=cpu if there is one GPU")
    dist.init_process_group(ranks.backend, **ranks.group_options(timeout_s))
    rows, table, others = [], [], (n - 1) / n
    for size in MESSAGE_SIZES:
        whole, other = (torch.zeros(size // 4 // n * n, device=ranks.device) for _ in range(2))
        part = torch.zeros(len(whole) // n, device=ranks.device)
        line = {"message": f"{size / 1024:,.0f} KB"}
        # factor: bytes that each link carries per byte of the message
        for name, factor, function, *arguments in (
            ("all-reduce", 2 * others, dist.all_reduce, whole),
            ("all-gather", others, all_gather_single, whole, part),
            ("reduce-scatter", others, reduce_scatter_single, part, whole),
            ("broadcast", 1.0, dist.broadcast, whole, 0),
            ("all-to-all", others, dist.all_to_all_single, other, whole),
        ):
            seconds = mean_seconds(ranks.device, function, *arguments)
            speed = factor * whole.nbytes / seconds / 1e9
            row = {"operation": name, "bytes": whole.nbytes, "ranks": n}
            rows.append(row | {"us": seconds * 1e6, "gb_per_s": speed})
            line[name] = f"{speed:.3f}"
        table.append(line)
    latencies = {row["operation"]: f"{row['us']:.1f}" for row in rows[:5]}
    table.append({"message": "1 KB, in µs"} | latencies)
    print_result(f"{n} processes on {ranks.device.type}, {ranks.network}; bus bandwidth in GB/s:")
    print_result("\n".join(aligned(table)))
    leave_process_group()
    return rows


def mean_seconds(device: torch.device, function: Callable, *arguments: object) -> float:
    """
    Return the slowest rank's mean time of a call, over as many calls as fit into 0.1 seconds (all ranks).
    """
    timer = Timer("function(*arguments)", globals=locals(), num_threads=torch.get_num_threads())
    first = gather_number(timer.timeit(1).mean, device).max().item()  # after two calls that are not timed
    count = int(min(max(0.1 / first, 1), 200))
    return gather_number(timer.timeit(count).mean, device).max().item()
