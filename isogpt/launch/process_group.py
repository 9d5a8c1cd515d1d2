"""Join the process group: connect this process to the other ranks, number them, and leave at the end."""

import ctypes
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import gcd

import torch
import torch.distributed as dist

from isogpt.launch import machines, network, open_files, pretended_ranks
from isogpt.launch.device import (
    collectives_timeout,
    gpu_identity,
    keep_freed_memory,
    pick_backend,
    pick_device,
)
from isogpt.launch.launchers import MPICH, OPEN_MPI, Launch, make_launch, own_agent, rank_variables
from isogpt.launch.machines import Process, RankNames, as_ranges


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Without a launcher: world_size 1 and no store."""

    rank: int
    world_size: int
    device: torch.device
    backend: str  # argument of init_process_group
    store: dist.Store | None = None  # reaches all ranks of this start; None: no launcher
    start: str = ""  # the unique name of this start of the run, the prefix of its keys in the store
    hosts: Sequence[str] = ("this host",)  # host name, by rank
    network: str = "no process group"  # the backend and gloo's network interface: 'gloo over eth0 (10.0.0.1)'
    launch: Launch = Launch()
    # number of processes on each rank's machine, as the launcher says
    local_sizes: Sequence[int] = (1,)
    core_sharers: int = 1  # ranks that may run on this rank's CPU cores, with this rank

    @property
    def has_launcher(self) -> bool:
        """Whether a launcher started this process, or a dry run pretends that one did."""
        return self.store is not None or self.world_size > 1

    @property
    def is_main(self) -> bool:
        """
        Whether this is rank 0, which prints, logs and writes what only one process should write. In a dry
        run, the one process is any rank.
        """
        return self.rank == 0 or self.backend == pretended_ranks.BACKEND

    def topology(self) -> str:
        """Machines x processes: '4 = 2 nodes (a, b) x 2', or '3 = 1 node x 3'."""
        counts = Counter(self.hosts)
        names, counts = [*counts], [*counts.values()]
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


def rank_names(hosts: Sequence[str]) -> Sequence[str]:
    """Return the ranks' names in messages: 'rank 3', with the host name if there are several hosts."""
    return RankNames(hosts)


def island_count(ranks: Ranks) -> int:
    """
    Return the number of islands if each machine is an island.

    Raises:
        ValueError: the launcher has started different numbers of processes on the machines.
    """
    if len(set(ranks.local_sizes)) > 1:
        raise ValueError(
            "islands is 0, one on each machine, but the numbers of processes differ: start the same number "
            f"on each machine, or set --islands= to a number that divides {ranks.world_size}"
        )
    return max(1, ranks.world_size // ranks.local_sizes[0])


def connect_ranks(device: str, backend: str, timeout_s: float) -> Ranks:
    """
    Set up this process's device, and connect to the other ranks' store if a launcher started several ranks.
    Waits for all ranks and numbers them by machine. There are no collectives before init_process_group.

    Raises:
        ValueError: the device or the backend is not available here, other ranks are missing after timeout_s,
            or too few files may be open.
    """
    if pretended := pretended_ranks.pretended_rank():
        return pretend_ranks(*pretended)
    rank, world_size, local_rank, local_world_size = rank_variables()
    stop_with_launcher()
    picked = pick_device(device, local_rank, world_size)
    group_backend = pick_backend(backend, picked, world_size)
    if picked.type == "cuda":
        try:
            torch.cuda.set_device(picked)
            torch.ones(1, device=picked)  # runs a kernel
        except RuntimeError as e:
            raise ValueError(
                f"{picked} cannot be used ({str(e).splitlines()[0]}): look at nvidia-smi for other programs "
                "on this GPU, install a PyTorch that supports it (https://pytorch.org/get-started), or set "
                "--device=cpu"
            ) from e
        network.bind_to_gpu(torch.cuda.get_device_properties(picked))
    if picked.type == "cpu":
        keep_freed_memory()
    if "RANK" not in os.environ:
        network.choose_interface()  # for the group of a single process, which also listens
        return Ranks(rank, world_size, picked, group_backend, launch=make_launch([]))

    open_files.allow_connections(rank, world_size)
    # the store: all ranks meet, describe their processes, and are numbered by machine
    start, store = meet_ranks(rank, world_size, timeout_s)
    process = describe_process(picked, local_world_size)
    find = partial(machines.find_place, store, rank, world_size, process)
    place = network.answer_of(find, timeout_s + network.ANSWER_S)
    os.environ["RANK"] = str(place.rank)

    interface = network.choose_interface(place.master)
    # also with GPUs: with cpu_offload the optimizer runs on the CPU
    network.divide_cores(len(machines.cores_in(process.cores)), place.core_sharers, local_world_size)
    is_nccl = "nccl" in group_backend
    return Ranks(
        rank=place.rank,
        world_size=world_size,
        device=picked,
        backend=group_backend,
        store=store,
        start=start,
        hosts=place.hosts,
        network="nccl" if is_nccl else f"gloo over {interface}" if interface else "gloo",
        launch=make_launch(place.agents),
        local_sizes=place.local_sizes,
        core_sharers=place.core_sharers,
    )


def pretend_ranks(rank: int, world_size: int) -> Ranks:
    """The ranks of a dry run, eight on each machine."""
    local_size = gcd(world_size, 8)
    return Ranks(
        rank,
        world_size,
        torch.device("cpu"),
        pretended_ranks.BACKEND,
        hosts=tuple(f"machine {other // local_size}" for other in range(world_size)),
        network="a dry run",
        local_sizes=(local_size,) * world_size,
    )


def stop_with_launcher() -> None:
    """
    Receive SIGTERM when torchrun's agent, mpirun or DeepSpeed's launcher ends without its processes, for
    instance because of a signal that it does not pass on (Linux), since nobody would stop or watch them. If
    torchrun has several agents, the others may start again at once, and this process would write to the same
    files as the workers of the next attempt, so it is killed. On other systems, folder.enter_folder ensures
    that its checkpoints do not count.
    """
    has_agent = "TORCHELASTIC_RUN_ID" in os.environ
    has_parent = any(name in os.environ for name in (OPEN_MPI[0], MPICH[0], "CROSS_RANK"))
    if sys.platform == "linux" and (has_agent or has_parent):
        has_other_agents = has_agent and os.environ.get("GROUP_WORLD_SIZE") != "1"
        number = signal.SIGKILL if has_other_agents else signal.SIGTERM
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def describe_process(device: torch.device, local_size: int) -> Process:
    """Describe this process for the other ranks."""
    host, kernel = network.this_machine()
    cores, master = as_ranges(network.own_cores()), network.address_of(os.environ["MASTER_ADDR"])
    return Process(host, kernel, cores, local_size, own_agent(), gpu_identity(device), master)


def meet_ranks(rank: int, world_size: int, timeout_s: float) -> tuple[str, dist.Store]:
    """Wait for the other ranks (all ranks); returns the name of this start, and the store with its keys."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = connect_store(timeout_s, serves=rank == 0 and not has_agent)
    meet = partial(network.meet, store, rank, world_size, timeout_s)
    start = network.answer_of(meet, timeout_s + network.ANSWER_S)
    store = dist.PrefixStore(start, store)
    store.set_timeout(timedelta(seconds=timeout_s))
    return start, store


def connect_store(timeout_s: float, serves: bool = False) -> dist.TCPStore:
    """
    Connect to the store at MASTER_ADDR and MASTER_PORT, which this process serves if `serves`.

    Raises:
        ValueError: nobody serves the store within timeout_s, or what listens there does not answer.
    """
    listener = network.listen_on_one_machine() if serves else None
    if not serves:
        network.wait_for_server(timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # only network.meet waits for the other ranks, and names the ranks that are missing
    timeout = timedelta(seconds=timeout_s)
    options = {"wait_for_workers": False, "master_listen_fd": listener}
    connect = partial(dist.TCPStore, address, port, None, serves, timeout, **options)
    return network.answer_of(connect, timeout_s + network.ANSWER_S)


def leave_process_group() -> None:
    """
    Destroy the process group, if there is one. The caller must have deleted references to a wrapped model.
    """
    gc.collect()  # the model's objects that reference the group can make its destruction hang
    if dist.is_initialized():
        dist.destroy_process_group()
