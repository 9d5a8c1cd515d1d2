"""
What the processes know about each other before there is a process group: their machines, the ranks' numbers,
shared cores.
"""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """What a process tells rank 0 about itself."""

    host: str
    kernel: str  # differs between machines of equal name, see network.this_machine
    cores: int = 1  # on which the process may run: a mask with a bit for each
    local_size: int = 1  # number of processes on its machine, as the launcher says
    agent: str = ""  # torchrun's agent, see launchers.own_agent
    master: str = ""  # the address to which MASTER_ADDR resolves on its machine

    @property
    def machine(self) -> tuple[str, str]:
        """What the processes of a machine have in common."""
        return self.host, self.kernel


def survey(processes: Sequence[Process]) -> dict:
    """
    Return what rank 0 tells all ranks about the processes, in the order of the launcher's ranks. Each machine
    is listed once, since the store sends this to every rank.
    """
    numbers = {}  # of the machines, in the order of their first ranks
    machines = [numbers.setdefault(process.machine, len(numbers)) for process in processes]
    return {
        "machines": machines,
        "hosts": [host for host, _ in numbers],
        "local_sizes": [process.local_size for process in processes],
        "core_sharers": count_core_sharers(processes),
        # None: there is only one machine
        "master": address_of_master(processes) if len(numbers) > 1 else None,
    }


def address_of_master(processes: Sequence[Process]) -> str:
    """
    The address at which other machines reach rank 0's machine; "" if it is not known. The machine itself
    often resolves MASTER_ADDR to a loopback address, but the others never do.
    """
    masters = {process.master for process in processes} - {""}
    return min((m for m in masters if not ipaddress.ip_address(m).is_loopback), default="")


def count_core_sharers(processes: Sequence[Process]) -> list[int]:
    """
    Return how many ranks share the cores of each rank: 1 if a scheduler has bound each rank to separate
    cores.
    """
    users = defaultdict(Counter)  # of each set of cores, by machine
    for process in processes:
        users[process.machine][process.cores] += 1
    return [
        sum(count for cores, count in users[process.machine].items() if cores & process.cores)
        for process in processes
    ]
