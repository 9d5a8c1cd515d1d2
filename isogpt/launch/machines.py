"""
What the processes know about each other before there is a process group: their machines, the ranks' numbers
and names, shared cores and GPUs.

Rank 0 reads what every process says about itself, and answers each with its place. An answer lists each
machine once, since the store sends it N times.
"""

import ipaddress
import json
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from operator import attrgetter
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


@dataclass(frozen=True)
class Process:
    """What a process tells rank 0 about itself."""

    host: str
    kernel: str  # differs between machines of equal name, see network.this_machine
    cores: str  # on which the process may run: '0-15,32-47'
    local_size: int  # number of processes on its machine, as the launcher says
    agent: str = ""  # torchrun's agent, see launchers.own_agent
    gpu: str = ""  # name and identifier; "" on other devices
    master: str = ""  # the address to which MASTER_ADDR resolves on its machine

    @property
    def machine(self) -> tuple[str, str]:
        """What the processes of a machine have in common."""
        return self.host, self.kernel


class Repeated(Sequence[Value]):
    """A value for each rank. A value that neighbors have in common is stored once, with their number."""

    def __init__(self, values: Sequence[Value], counts: Sequence[int]) -> None:
        self.values = values
        self.ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, rank: int) -> Value:
        return self.values[bisect_right(self.ends, range(len(self))[rank])]


@dataclass(frozen=True)
class RankNames(Sequence[str]):
    """The ranks' names in messages: 'rank 3', with the host name if there are several hosts."""

    hosts: Sequence[str]

    def __len__(self) -> int:
        return len(self.hosts)

    def __getitem__(self, rank: int) -> str:
        first = self.hosts[0]
        has_several = any(host != first for host in self.hosts)
        return f"rank {rank} ({self.hosts[rank]})" if has_several else f"rank {rank}"


@dataclass(frozen=True)
class Place:
    """What a process learns about itself and the others."""

    rank: int  # numbered by machine
    core_sharers: int  # ranks that may run on this rank's cores, with this rank
    hosts: Sequence[str]  # host name, by rank
    local_sizes: Sequence[int]  # number of processes on each rank's machine, as the launcher says
    agents: Sequence[str]  # on rank 0, the agents of all processes, and on other ranks their own
    # where other machines reach rank 0's machine; "" if this is not known; None: there is only one machine
    master: str | None


def find_place(store: dist.Store, rank: int, world_size: int, process: Process) -> Place:
    """
    Tell rank 0 about this process, and return its place among the others (all ranks).

    Raises:
        ValueError: two processes use the same GPU.
    """
    # rank 0 collects: if every rank read all values, requests and bytes would grow with world_size squared
    store.set(f"process/{rank}", json.dumps(asdict(process)))
    agents = [process.agent]
    if rank == 0:
        told = store.multi_get([f"process/{other}" for other in range(world_size)])
        processes = [Process(**json.loads(value)) for value in told]
        agents = [other.agent for other in processes]
        answers = survey(processes)
        store.multi_set([*answers], [*answers.values()])
    shared, answer = store.multi_get(["machines", f"place/{rank}"])
    shared, (rank, core_sharers) = json.loads(zlib.decompress(shared)), json.loads(answer)
    if shared["problem"]:
        raise ValueError(shared["problem"])
    hosts, local_sizes = (Repeated(shared[name], shared["counts"]) for name in ("hosts", "local_sizes"))
    return Place(rank, core_sharers, hosts, local_sizes, agents, shared["master"])


def survey(processes: Sequence[Process]) -> dict[str, bytes | str]:
    """
    Rank 0's part of `find_place`: the answers, by their keys in the store. All ranks read "machines", and
    each its "place/RANK" with the rank that its launcher gave it.
    """
    order, sharers = order_by_machine(processes), count_core_sharers(processes)
    ordered = [processes[rank] for rank in order]
    runs = [(*same, len([*run])) for same, run in groupby(ordered, attrgetter("host", "local_size"))]
    hosts, local_sizes, counts = zip(*runs, strict=True)
    is_alone = len({process.machine for process in processes}) == 1
    shared = {
        "hosts": hosts,
        "local_sizes": local_sizes,
        "counts": counts,
        "master": None if is_alone else address_of_master(processes),
        "problem": problem_with_gpus(ordered),
    }
    places = {f"place/{before}": json.dumps([rank, sharers[before]]) for rank, before in enumerate(order)}
    # compressed, since the names of hosts are alike
    return {"machines": zlib.compress(json.dumps(shared).encode()), **places}


def order_by_machine(processes: Sequence[Process]) -> list[int]:
    """
    Return the ranks in a new order: ranks of one machine are neighbors, as with torchrun but not with
    `mpirun --map-by node`. Neighbors in a mesh, which shard a model together, are then on one machine.
    """
    firsts = {}
    for rank, process in enumerate(processes):
        firsts.setdefault(process.machine, rank)
    return sorted(range(len(processes)), key=lambda rank: (firsts[processes[rank].machine], rank))


def address_of_master(processes: Sequence[Process]) -> str:
    """
    The address at which other machines reach rank 0's machine; "" if it is not known. The machine itself
    often resolves MASTER_ADDR to a loopback address, but the others never do.
    """
    masters = {process.master for process in processes} - {""}
    return min((m for m in masters if not ipaddress.ip_address(m).is_loopback), default="")


def problem_with_gpus(processes: Sequence[Process]) -> str:
    """A sentence if two processes use the same GPU, else ''."""
    names, users = RankNames([process.host for process in processes]), {}
    for rank, process in enumerate(processes):
        user = users.setdefault((process.machine, process.gpu), rank)
        if process.gpu and user != rank:
            return (
                f"{names[user]} and {names[rank]} use the same GPU, {process.gpu}: start fewer processes on "
                f"{process.host}, let the processes see different GPUs (CUDA_VISIBLE_DEVICES, srun "
                "--gpus-per-task=1), or set --device=cpu"
            )
    return ""


def count_core_sharers(processes: Sequence[Process]) -> list[int]:
    """
    Return how many ranks share the cores of each rank: 1 if a scheduler has bound each rank to separate
    cores.
    """
    machines = defaultdict(Counter)
    for process in processes:
        machines[process.machine][process.cores] += 1
    sharers = {}
    for machine, users in machines.items():  # a machine's ranks have few different sets of cores
        sets = {cores: cores_in(cores) for cores in users}
        for cores, these in sets.items():
            overlapping = [other for other, those in sets.items() if not those.isdisjoint(these)]
            sharers[machine, cores] = sum(users[other] for other in overlapping)
    return [sharers[process.machine, process.cores] for process in processes]


def cores_in(ranges: str) -> set[int]:
    """The numbers in '0-15,32-47', the kernel's form of a list of cores."""
    ends = [tuple(map(int, part.split("-"))) for part in ranges.split(",")]
    return {core for r in ends for core in range(r[0], r[-1] + 1)}


def as_ranges(cores: Iterable[int]) -> str:
    """The kernel's form of a list of cores."""
    ends = []
    for core in sorted(cores):
        if ends and core == ends[-1][1] + 1:
            ends[-1][1] = core
        else:
            ends.append([core, core])
    return ",".join(f"{first}-{last}" for first, last in ends)
