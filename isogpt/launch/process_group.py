"""Join the process group: connect this process to the other ranks, number them, and leave at the end."""

import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from isogpt.launch import network
from isogpt.launch.device import (
    collectives_timeout,
    gpu_identity,
    keep_freed_memory,
    pick_backend,
    pick_device,
    use_gpu,
)
from isogpt.launch.launchers import Launch, make_launch, own_agent, rank_variables


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Without a launcher: world_size 1 and no store."""

    rank: int
    world_size: int
    device: torch.device
    backend: str  # argument of init_process_group
    store: dist.Store | None = None  # reaches all ranks of this start; None: no launcher
    start: str = ""  # the unique name of this start of the run, the prefix of its keys in the store
    hosts: tuple[str, ...] = ("this host",)  # host name, by rank
    network: str = "no process group"  # the backend and gloo's network interface: 'gloo over eth0 (10.0.0.1)'
    launch: Launch = Launch()
    # number of processes on each rank's machine, as the launcher says
    local_sizes: tuple[int, ...] = (1,)
    core_sharers: int = 1  # ranks that may run on this rank's CPU cores, with this rank

    @property
    def has_launcher(self) -> bool:
        """Whether a launcher started this process."""
        return self.store is not None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints, logs and writes what only one process should write."""
        return self.rank == 0

    def topology(self) -> str:
        """Machines x processes: '4 = 2 nodes (a, b) x 2', or '3 = 1 node x 3'."""
        names = list(dict.fromkeys(self.hosts))
        counts = [self.hosts.count(name) for name in names]
        listed = ", ".join(names if len(names) <= 4 else [*names[:4], "..."])
        nodes = f"{len(names)} nodes ({listed})" if len(names) > 1 else "1 node"
        return (
            f"{self.world_size} = {nodes} x "
            f"{counts[0] if len(set(counts)) == 1 else '+'.join(map(str, counts))}"
        )

    def group_options(self, timeout_s: float) -> dict:
        """
        Return the arguments of init_process_group besides the backend; without a launcher, for a group of one
        process.
        """
        return dict(
            rank=self.rank,
            world_size=self.world_size,
            store=self.store or dist.HashStore(),
            timeout=collectives_timeout(timeout_s, self.backend),
            device_id=self.device if "nccl" in self.backend else None,
        )


def rank_names(hosts: Sequence[str]) -> list[str]:
    """Return the ranks' names in messages: 'rank 3', with the host name if there are several hosts."""
    return [f"rank {r} ({host})" if len(set(hosts)) > 1 else f"rank {r}" for r, host in enumerate(hosts)]


def island_count(ranks: Ranks) -> int:
    """
    Return the number of islands if each machine is an island.

    Raises:
        ValueError: the launcher has started different numbers of processes on the machines.
    """
    if len(set(ranks.local_sizes)) > 1:
        sizes = {host: n for host, n in zip(ranks.hosts, ranks.local_sizes, strict=True)}
        counts = ", ".join(f"{n} on {host}" for host, n in list(sizes.items())[:8])
        raise ValueError(
            f"islands is 0, one on each machine, but the numbers of processes differ: {counts}. Start "
            "equally many on each machine, or set --islands= to a number that divides "
            f"{ranks.world_size}"
        )
    return max(1, ranks.world_size // ranks.local_sizes[0])


def check_gpus(machines: Sequence[tuple[str, str]], gpus: Sequence[list[str]]) -> None:
    """
    Check that no two processes use the same GPU.

    Args:
        machines: (host name, identifier) by rank.
        gpus: gpu_identity by rank.

    Raises:
        ValueError: two processes use the same GPU.
    """
    ranks_of = {}
    for rank, (machine, gpu) in enumerate(zip(machines, gpus, strict=True)):
        if gpu:
            ranks_of.setdefault((*machine, *gpu), []).append(rank)
    names = rank_names([host for host, _ in machines])
    for (host, unique, gpu, uuid), ranks in ranks_of.items():
        if len(ranks) == 1:
            continue
        count = sum(key[:2] == (host, unique) for key in ranks_of)
        processes = f"{count} processes" if count > 1 else "one process"
        raise ValueError(
            f"{', '.join(names[r] for r in ranks)} use the same GPU, {gpu} ({uuid}): start at most "
            f"{processes} on {host}, or let the processes see different GPUs (CUDA_VISIBLE_DEVICES, "
            "srun --gpus-per-task=1), or set --device=cpu"
        )


def connect_ranks(device: str, backend: str, timeout_s: float) -> Ranks:
    """
    Set up this process's device, and connect to the other ranks' store if a launcher started several ranks.
    Waits for all ranks and numbers them by machine. There are no collectives before init_process_group.

    Raises:
        ValueError: the device or the backend is not available here, or other ranks are missing after
            timeout_s.
    """
    rank, world_size, local_rank, local_world_size = rank_variables()
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # exit when torchrun's agent is killed: a worker would otherwise keep writing where the workers of the
        # next attempt write. On other systems, folder.enter_folder makes the worker's checkpoints not count.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    chosen = pick_device(device, local_rank, world_size)
    group_backend = pick_backend(backend, chosen, world_size)
    if chosen.type == "cuda":
        use_gpu(chosen)
    if chosen.type == "cpu":
        keep_freed_memory()
    if "RANK" not in os.environ:
        return Ranks(rank, world_size, chosen, group_backend, launch=make_launch([]))

    limit_s = timeout_s + network.ANSWER_S

    def exchange(key: str, value: object) -> list:
        return network.answer_of(
            partial(network.gather_through_store, store, rank, world_size, key, value), limit_s
        )

    try:
        store = connect_store(
            timeout_s, rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        )
        start = network.answer_of(partial(network.meet, store, rank, world_size, timeout_s), limit_s)
        store = dist.PrefixStore(start, store)
        store.set_timeout(timedelta(seconds=timeout_s))
        machines = exchange("machine", network.this_machine())
        order = network.order_by_machine([(name, unique) for name, unique, _ in machines])
        rank, machines = order.index(rank), [machines[r] for r in order]
        os.environ["RANK"] = str(rank)
        address = network.address_of(os.environ["MASTER_ADDR"])
        started = exchange("process", (own_agent(), local_world_size, gpu_identity(chosen), address))
        agents, local_sizes, gpus, addresses = zip(*started, strict=True)
        check_gpus([(name, unique) for name, unique, _ in machines], gpus)
        interface, problem = "", ""
        try:
            interface = network.choose_interface(
                len({(name, unique) for name, unique, _ in machines}) > 1, addresses
            )
        except ValueError as e:
            problem = str(e)
        if problems := [p for p in exchange("problem", problem) if p]:
            raise ValueError(problems[0])
    except dist.DistError as e:
        raise ValueError(
            f"cannot reach the other ranks at {store_address()}: {str(e).splitlines()[0]}"
        ) from e
    except TimeoutError as e:
        raise ValueError(no_answer(limit_s)) from e
    core_sharers = 1
    if chosen.type != "mps":  # also with GPUs: with cpu_offload the optimizer runs on the CPU
        core_sharers = network.divide_cores(machines, rank, local_world_size)
    hosts = tuple(name for name, _, _ in machines)
    used = "nccl" if "nccl" in group_backend else f"gloo over {interface}" if interface else "gloo"
    launch = make_launch(agents)
    return Ranks(
        rank, world_size, chosen, group_backend, store, start, hosts, used, launch, local_sizes, core_sharers
    )


def connect_store(timeout_s: float, serves: bool = False) -> dist.TCPStore:
    """
    Connect to the store at MASTER_ADDR and MASTER_PORT, which this process serves if `serves`.

    Raises:
        ValueError: nobody serves the store within timeout_s, or what listens there does not answer.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not serves:
        wait_for_server(address, port, timeout_s)
    # only network.meet waits for the other ranks, and names the ranks that are missing
    timeout, limit_s = timedelta(seconds=timeout_s), timeout_s + network.ANSWER_S
    connecting = partial(dist.TCPStore, address, port, None, serves, timeout, wait_for_workers=False)
    try:
        return network.answer_of(connecting, limit_s)
    except TimeoutError as e:
        raise ValueError(no_answer(limit_s)) from e


def no_answer(limit_s: float) -> str:
    """What to print if requests to the store do not return."""
    return (
        f"no answer from {store_address()} within {limit_s:g} s, although something listens there: rank 0 "
        "or the agent of rank 0 is suspended, the machine was cut off, or a different program uses the port. "
        f"Check the machine of rank 0, or choose a different port{network.LEFT_OVER}"
    )


def store_address() -> str:
    """The address of the store, for messages."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def check_debug_level() -> None:
    """
    Raise ValueError if DistributedDataParallel cannot be used. With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch
    2.13 wraps process groups, and DDP's constructor ends with a segmentation fault. Other layouts work.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG is DETAIL, with which PyTorch crashes in DistributedDataParallel: "
            "type export TORCH_DISTRIBUTED_DEBUG=INFO, or set --zero=2"
        )


def wait_for_server(address: str, port: int, timeout_s: float) -> None:
    """
    Wait until a process listens at this address. TCPStore also waits, but prints a page of C++ frames at each
    attempt.

    Raises:
        ValueError: there is none within timeout_s.
    """
    began, pause, has_said = time.monotonic(), 0.02, False
    deadline = began + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), max(left, 0.1)).close()
            return
        except OSError as e:
            if left <= pause:
                problem = f"cannot reach the other ranks at {store_address()} within {timeout_s:g} s: {e}"
                raise ValueError(f"{problem}{network.LEFT_OVER}") from e
            if not has_said and time.monotonic() - began >= network.WAITING_S:
                has_said = True
                rank, world_size, *_ = rank_variables()
                network.say_waiting(rank, world_size, f"rank 0: nothing listens at {store_address()} ({e})")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def leave_process_group() -> None:
    """
    Destroy the process group, if there is one. The caller must have deleted references to a wrapped model.
    """
    gc.collect()  # the model's objects that reference the group can make its destruction hang
    if dist.is_initialized():
        dist.destroy_process_group()
