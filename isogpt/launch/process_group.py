"""Join the process group: connect this process to the other ranks, number them, and leave at the end."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import torch.distributed as dist

from isogpt.common import console
from isogpt.common.patience import within
from isogpt.launch import network, pretended_ranks
from isogpt.launch.device import collectives_timeout, keep_freed_memory, pick_backend, pick_device
from isogpt.launch.launchers import (
    MPICH,
    OPEN_MPI,
    Launch,
    make_launch,
    own_agent,
    rank_variables,
    to_start_alone,
)

ANSWER_S = 10  # seconds beyond dist_timeout_s after which the store counts as dead


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Without a launcher: world_size 1 and no store."""

    rank: int
    world_size: int
    device: torch.device
    backend: str  # argument of init_process_group
    store: dist.Store | None = None  # reaches all ranks of this start; None: no launcher
    hosts: Sequence[str] = ("this host",)  # host name, by rank
    machines: Sequence[int] = (0,)  # number of the machine, by rank: host names may be equal
    network: str = "no process group"  # the backend and gloo's network interface: 'gloo over eth0 (10.0.0.1)'
    launch: Launch = Launch()
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

    def group_options(self, timeout_s: float) -> dict:
        """
        Return the arguments of init_process_group besides the backend; without a launcher, for a group of one
        process.
        """
        options = {"rank": self.rank, "world_size": self.world_size}
        options["store"] = self.store or dist.HashStore()
        options["timeout"] = collectives_timeout(timeout_s, self.backend)
        if "nccl" in self.backend:
            options["device_id"] = self.device
        return options


def rank_names(hosts: Sequence[str]) -> list[str]:
    """Return the ranks' names in messages: 'rank 3', with the host name if there are several hosts."""
    if len(set(hosts)) == 1:
        return [f"rank {rank}" for rank in range(len(hosts))]
    return [f"rank {rank} ({host})" for rank, host in enumerate(hosts)]


def connect_ranks(device: str, backend: str, timeout_s: float) -> Ranks:
    """
    Set up this process's device, and connect to the other ranks' store if a launcher started several ranks.
    Waits for all ranks and numbers them by machine. There are no collectives before init_process_group.

    Raises:
        ValueError: the device or the backend is not available here, ranks are missing after timeout_s, or
            NCCL would fail because ranks share a GPU.
    """
    if pretended := pretended_ranks.pretended_rank():
        rank, world_size = pretended
        machines = [other // gcd(world_size, 8) for other in range(world_size)]  # eight ranks on each
        hosts = [f"machine {number}" for number in machines]
        cpu, backend = torch.device("cpu"), pretended_ranks.BACKEND
        return Ranks(rank, world_size, cpu, backend, None, hosts, machines, "a dry run")
    rank, world_size, local_rank, _ = rank_variables()
    stop_with_launcher()
    picked = pick_device(device, local_rank, world_size)
    group_backend = pick_backend(backend, picked, world_size)
    if picked.type == "cuda":
        torch.cuda.set_device(picked)
    else:
        keep_freed_memory()
    if not network.chosen_threads():  # threads beyond a container's limit would wait for each other
        torch.set_num_threads(min(torch.get_num_threads(), network.usable_cores()))
    if "RANK" not in os.environ:
        try:
            network.choose_interface()  # for the group of a single process, which also listens
        except ValueError:  # the interface is another machine's: gloo chooses one
            del os.environ["GLOO_SOCKET_IFNAME"]
        return Ranks(rank, world_size, picked, group_backend, launch=make_launch([]))

    network.allow_connections()
    gpu = ""
    if "nccl" in group_backend:
        uuid = torch.cuda.get_device_properties(picked).uuid
        # the slices of a GPU (MIG) may have its UUID
        gpu = f"{uuid} {os.environ.get('CUDA_VISIBLE_DEVICES')}"
    store, others = meet_ranks(rank, world_size, gpu, timeout_s)
    if others["gpu_sharers"]:
        sharers = console.ranks_text(others["gpu_sharers"])
        raise ValueError(f"{sharers} share GPUs: start fewer processes, let them see different GPUs")
    # ranks of one machine become neighbors, as with torchrun but not with `mpirun --map-by node`, since
    # neighbors in a mesh shard a model together
    machines, core_sharers = others["machines"], others["core_sharers"][rank]
    order = sorted(range(world_size), key=machines.__getitem__)
    os.environ["RANK"] = str(order.index(rank))
    interface = network.choose_interface(others["network"])
    # thread pools on the same cores slow each other down; also with GPUs: with cpu_offload the optimizer runs
    # on the CPU. torchrun sets OMP_NUM_THREADS to 1, so only another number is known to be a user's choice
    if machines.count(machines[rank]) > 1 and network.chosen_threads() <= 1:
        torch.set_num_threads(max(1, network.usable_cores() // core_sharers))
    machines = sorted(machines)
    hosts = [others["hosts"][machine] for machine in machines]
    over = "nccl" if "nccl" in group_backend else f"gloo over {interface}"
    launch = make_launch(others["agents"])
    this = order.index(rank), world_size, picked, group_backend, store
    return Ranks(*this, hosts, machines, over, launch, core_sharers)


def meet_ranks(rank: int, world_size: int, gpu: str, timeout_s: float) -> tuple[dist.Store, dict]:
    """
    Connect to the store of all ranks, and wait for them (all ranks): in a thread, since a request never
    returns if the store's machine was cut off or suspended. Returns the store, and what rank 0 says about the
    ranks.
    """
    cores = sum(1 << core for core in network.own_cores())
    address = network.address_towards(os.environ["MASTER_ADDR"])
    process = network.Process(network.this_machine(), cores, own_agent(), address, gpu)
    limit = timeout_s + ANSWER_S
    try:
        serves = rank == 0 and not network.uses_agent_store()
        store = within(limit, network.connect_store, timeout_s, serves)
        return store, within(limit, network.meet, store, rank, world_size, process, timeout_s)
    except (OSError, dist.DistError) as e:
        reason, _, _ = str(e).partition("\n")
        where = f"at {network.store_address()} within {timeout_s:g} s"
        problem = f"cannot reach the other ranks {where}: {reason}"
        raise ValueError(f"{problem}. If no launcher started this process, type {to_start_alone()}") from e


def stop_with_launcher() -> None:
    """
    Receive SIGTERM when torchrun's agent, mpirun or DeepSpeed's launcher ends without its processes, for
    instance because of a signal that it does not pass on (Linux), since nobody would stop or watch them. If
    torchrun has several agents, the others may start again at once, and this process would write to the same
    files as the workers of the next attempt, so it is killed. On other systems, folder.enter_folder ensures
    that its checkpoints do not count.
    """
    env = os.environ
    has_agent = "TORCHELASTIC_RUN_ID" in env
    has_parent = any(name in env for name in (OPEN_MPI[0], MPICH[0], "CROSS_RANK"))
    if sys.platform == "linux" and (has_agent or has_parent):
        has_other_agents = has_agent and env.get("GROUP_WORLD_SIZE") != "1"
        number = signal.SIGKILL if has_other_agents else signal.SIGTERM
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def leave_process_group() -> None:
    """
    Destroy the process group, if there is one. The caller must have deleted references to a wrapped model.
    """
    gc.collect()  # the model's objects that reference the group can make its destruction hang
    if dist.is_initialized():
        dist.destroy_process_group()
