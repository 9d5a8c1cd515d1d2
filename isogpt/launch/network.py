"""
The network and this machine: rendezvous of the processes, interfaces, cores.
"""

import json
import os
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from isogpt.common import console

LOOPBACK = "127.0.0.1"


class Process(NamedTuple):
    """What a process tells rank 0 about itself."""

    machine: str  # see this_machine
    cores: int = 1  # on which the process may run: a mask with a bit for each
    agent: str = ""  # torchrun's agent, see launchers.own_agent
    address: str = ""  # of its machine, on the route to MASTER_ADDR
    gpu: str = ""  # the GPU with which it uses NCCL


def survey(processes: Sequence[Process]) -> dict:
    """
    Return what rank 0 tells all ranks about the processes, in the order of the launcher's ranks. Each machine
    is named once, since the store sends this to every rank.
    """
    numbers = {}  # of the machines, in the order of their first ranks
    machines = [numbers.setdefault(process.machine, len(numbers)) for process in processes]
    sharers = Counter((process.machine, process.cores) for process in processes)
    gpus = Counter((process.machine, process.gpu) for process in processes if process.gpu)
    # rank 0's machine often resolves MASTER_ADDR to a loopback address, but the others never do
    addresses = {process.address for process in processes if not process.address.startswith("127.")}
    return {
        "machines": machines,
        "hosts": [machine.partition(" ")[0] for machine in numbers],
        "core_sharers": [sharers[process.machine, process.cores] for process in processes],
        "network": max(addresses, default="") if len(numbers) > 1 else LOOPBACK,
        "gpu_sharers": [rank for rank, its in enumerate(processes) if gpus[its.machine, its.gpu] > 1],
    }


# ------------------------------------------------------------------------------------------------------------
# rendezvous


def store_address() -> str:
    """The address of the store, for messages."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def uses_agent_store() -> bool:
    """Whether torchrun's agent serves the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(timeout_s: float, serves: bool = False) -> dist.Store:
    """
    Return the keys of this start in the store at MASTER_ADDR and MASTER_PORT, which this process serves if
    `serves`. If all ranks are on this machine, as the launcher says, it listens only there. Else others may
    know this machine by an address to which MASTER_ADDR does not resolve here, so TCPStore listens at all
    addresses.

    Raises:
        OSError or DistError: nobody serves the store within timeout_s, or this process cannot.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    local_size = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE"))  # the latter: DeepSpeed's
    # not the name localhost, which Kubeflow gives to the first of several pods
    is_one_machine = address.startswith("127.") or local_size == os.environ["WORLD_SIZE"]
    # only `meet` waits for the other ranks, and names the ranks that are missing
    options = {"wait_for_workers": False}
    if not serves:
        wait_for_server(address, port, timeout_s)
    elif is_one_machine:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        options["master_listen_fd"] = socket.create_server((address, port), family=family).detach()
    store = dist.TCPStore(address, port, None, serves, timedelta(seconds=timeout_s), **options)
    # The agent's store is also that of the starts before, and contains what their ranks have written. Where
    # several agents may restart, they count differently (pytorch#135712), and
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE gives each start a store of its own
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT") if uses_agent_store() else None
    return dist.PrefixStore(f"start {number}", store)


def wait_for_server(address: str, port: int, timeout_s: float) -> None:
    """
    Wait until a process listens there. TCPStore also waits, but tries ever less often: seconds too late after
    half a minute.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((address, port), timeout=5).close()
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)


def meet(store: dist.Store, rank: int, world_size: int, process: Process, timeout_s: float) -> dict:
    """
    Tell rank 0 about this process, and return its `survey` of all of them (all ranks); on rank 0 with the
    agents. If every rank read what all others write, bytes would grow with world_size squared.

    Raises:
        TimeoutError: some ranks are missing after timeout_s.
    """
    store.set(f"process/{rank}", json.dumps(process))
    if rank:
        return json.loads(zlib.decompress(store.get("survey"))) | {"agents": [process.agent]}
    keys, end = [f"process/{other}" for other in range(world_size)], time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() >= end:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(f"{console.ranks_text(missing)} of {world_size} did not join")
        time.sleep(0.02)
    processes = [Process(*json.loads(told)) for told in store.multi_get(keys)]
    answer = survey(processes)
    store.set("survey", zlib.compress(json.dumps(answer).encode()))
    return answer | {"agents": [other.agent for other in processes]}


# ------------------------------------------------------------------------------------------------------------
# machines and cores


def this_kernel() -> str:
    """A name for the running kernel, which containers of a machine share; without Linux the host name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def this_machine() -> str:
    """
    The host name, and what differs between machines of equal name. Containers can share a kernel and a host
    name; a container with a separate network counts as a machine.
    """
    name = socket.gethostname()
    with suppress(OSError):  # not on Linux
        return f"{name} {this_kernel()} {os.readlink('/proc/self/ns/net')}"
    return name


def facts_of_process(number: int) -> list[str]:
    """What Linux tells about a process, from its state on (proc_pid_stat); [] if it has exited."""
    with suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()
    return []


def allow_connections() -> None:
    """
    Let this process, and torchrun's agent, which may serve the store of all ranks, open as many files as they
    may without root (Linux). Each connection to another process is one, and most shells allow 1,024.
    """
    with suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        for process in (0, os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else (0,):
            _, most = resource.prlimit(process, resource.RLIMIT_NOFILE)
            resource.prlimit(process, resource.RLIMIT_NOFILE, (most, most))


def own_cores() -> list[int]:
    """Return the cores that this process may run on; a scheduler often allows fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many cores this process may use at once: its own, or fewer if its container's time is limited."""
    cores = len(own_cores())
    for names in ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):  # cgroup v2, v1
        with suppress(OSError, ValueError):  # docker's --cpus, a pod's limit; "max" is no number
            texts = " ".join(Path("/sys/fs/cgroup", name).read_text() for name in names)
            time_us, period_us = map(int, texts.split())
            if time_us > 0:  # -1: no limit
                return max(1, min(cores, time_us // period_us))
    return cores


def chosen_threads() -> int:
    """OMP_NUM_THREADS; 0 if it is not set or no positive integer: OpenMP then ignores it too."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # OpenMP also takes a list
    return int(threads) if threads.isdecimal() else 0


# ------------------------------------------------------------------------------------------------------------
# network interfaces


def choose_interface(other: str = LOOPBACK) -> str:
    """
    Set GLOO_SOCKET_IFNAME, if it is not set, to the interface that leads to other machines, or to loopback on
    a single machine. By default, gloo takes the interface of the host name's address, which on many systems
    is a loopback address. NCCL chooses independently (NCCL_SOCKET_IFNAME), but on a single machine it
    also gets loopback: both listen at an address of the interface, where no other machine has to reach them.

    Args:
        other: the address of a machine; "" if it is not known, LOOPBACK if there is only one machine.

    Returns the interface and its address, as 'eth0 (10.0.0.1)'.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME names an interface that this machine does not have.
    """
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        names = [name for _, name in socket.if_nameindex()]
        if not {*chosen.split(",")} <= {*names}:  # not a prefix or an exclusion, which NCCL also takes
            found = f"GLOO_SOCKET_IFNAME is {chosen!r}, but this machine has {', '.join(names)}"
            raise ValueError(f"{found}: set it to one of these, or type unset GLOO_SOCKET_IFNAME")
        return chosen
    address = address_towards(other) if other else ""
    if not (name := interfaces().get(address)):
        return "an interface of its choice"
    os.environ["GLOO_SOCKET_IFNAME"] = name
    if other == LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # =: not a prefix
    return f"{name} ({address})"


def interfaces() -> dict[str, str]:
    """The names of network interfaces, by their IPv4 addresses (Linux; empty elsewhere)."""
    names = {}
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # the interface lacks an address
                    # SIOCGIFADDR
                    reply = fcntl.ioctl(s.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
                    names[socket.inet_ntoa(reply[20:24])] = name
    return names


def address_towards(host: str) -> str:
    """This machine's IPv4 address on the route to `host`; '' if there is none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # connecting a datagram socket sends nothing
        return s.getsockname()[0]
    return ""
