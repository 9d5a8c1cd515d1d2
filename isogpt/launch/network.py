"""
The network and the machines: rendezvous of the processes, numbering by machine, interfaces, shares of the
cores.
"""

import ipaddress
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from isogpt.common import console

Answer = TypeVar("Answer")
# seconds beyond the timeout of a request after which the store counts as dead
ANSWER_S = 10
WAITING_S = 15  # seconds until a rank says which ranks it waits for
LOOPBACK = ("127.0.0.1", "::1")
PCI = Path("/sys/bus/pci/devices")
# the end of messages about variables of a launcher that has exited; configurator.fail names the rank
UNSET = (
    "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE"
)
LEFT_OVER = f". If no launcher started this process, RANK is left over in the shell: type {UNSET}"


@dataclass(frozen=True)
class Process:
    """What all ranks know of a process before there is a process group."""

    host: str
    kernel: str  # differs between machines of equal name, see this_machine
    cores: Sequence[int]  # on which the process may run
    local_size: int  # number of processes on its machine, as the launcher says
    agent: str = ""  # torchrun's agent, see launchers.own_agent
    gpu: str = ""  # name and identifier; "" on other devices
    master: str = ""  # the address to which MASTER_ADDR resolves on its machine

    @property
    def machine(self) -> tuple[str, str]:
        """What is equal for the processes of a machine."""
        return self.host, self.kernel


# ------------------------------------------------------------------------------------------------------------
# rendezvous


def store_address() -> str:
    """The address of the store, for messages."""
    return with_port(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT"))


def with_port(address: str, port: object) -> str:
    """HOST:PORT, with an address of IPv6 in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def attempts(timeout_s: float) -> Iterator[bool]:
    """
    Yield until timeout_s have passed, with pauses that grow. The value is True once, after WAITING_S: then
    the caller says what is missing.
    """
    began, pause, was_late = time.monotonic(), 0.005, False
    while (waited_s := time.monotonic() - began) < timeout_s:
        is_late = waited_s >= WAITING_S
        yield is_late and not was_late
        was_late = is_late
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def listen_on_one_machine() -> int | None:
    """
    Listen at MASTER_ADDR and MASTER_PORT for a store of ranks that are all on this machine, as the launcher
    says. Returns the file descriptor. None if ranks may be on other machines: these may know this machine by
    an address to which MASTER_ADDR does not resolve here, so that TCPStore has to listen at all addresses.

    Raises:
        ValueError: the port is used, or the address is not this machine's.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # not the name localhost, which Kubeflow gives to the first of several pods
    is_loopback = host.startswith("127.") or host == "::1"
    local_size = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE"))  # the latter: DeepSpeed's
    if not is_loopback and local_size != os.environ["WORLD_SIZE"]:
        return None
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family).detach()
    except OSError as e:
        raise ValueError(
            f"cannot reach the other ranks at {store_address()}, since this process cannot listen there "
            f"({e.strerror}): set MASTER_PORT to a port that is free, and on one machine MASTER_ADDR to "
            f"{loopback()}{LEFT_OVER}"
        ) from e


def wait_for_server(timeout_s: float) -> None:
    """
    Wait until a process listens at MASTER_ADDR and MASTER_PORT. TCPStore also waits, but prints a page of C++
    frames at each attempt.

    Raises:
        ValueError: there is none within timeout_s.
    """
    problem = None
    for is_late in attempts(timeout_s):
        try:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(address, timeout=5).close()
            return
        except OSError as e:
            problem = e
        if is_late:
            say_waiting(f"rank 0: nothing listens at {store_address()} ({problem})")
    raise ValueError(
        f"cannot reach the other ranks at {store_address()} within {timeout_s:g} s: {problem}{LEFT_OVER}"
    )


def meet(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """
    Meet the other ranks of this start (all ranks); returns a unique name for the start.

    After a restart, torchrun (2.4 to 2.13) gives the workers the store of the previous attempt. That store
    contains addresses of processes that have exited, and the restart count differs across nodes
    (pytorch#135712). So each process registers under a unique name, and rank 0 answers each name with the
    name of this start.

    Raises:
        ValueError: some ranks are missing after timeout_s.
    """
    if rank == 0:
        return welcome_ranks(store, world_size, timeout_s)
    return find_rank_0(store, rank, timeout_s)


def welcome_ranks(store: dist.Store, world_size: int, timeout_s: float) -> str:
    """Rank 0's part of `meet`: return the name of this start when every rank has confirmed it."""
    start, missing = uuid.uuid4().hex, ""
    for is_late in attempts(timeout_s):
        ranks = [rank for rank in range(1, world_size) if not welcome(store, start, rank)]
        if not ranks:
            return start
        missing = f"rank {', '.join(map(str, ranks))}"
        if is_late:
            say_waiting(missing)
    raise ValueError(f"{missing} of {world_size} did not join within {timeout_s:g} s{LEFT_OVER}")


def welcome(store: dist.Store, start: str, rank: int) -> bool:
    """Tell a rank that has registered the name of the start; returns whether the rank has confirmed it."""
    if not store.check([f"hello/{rank}"]):
        return False
    name = store.get(f"hello/{rank}").decode()  # perhaps of a process that has exited, until it is replaced
    store.set(f"welcome/{name}", start)
    return store.check([f"{start}/here/{name}"])


def find_rank_0(store: dist.Store, rank: int, timeout_s: float) -> str:
    """The other ranks' part of `meet`: return the name of the start that rank 0 has answered."""
    name = uuid.uuid4().hex
    for is_late in attempts(timeout_s):
        store.set(f"hello/{rank}", name)
        if store.check([f"welcome/{name}"]):
            start = store.get(f"welcome/{name}").decode()
            store.set(f"{start}/here/{name}", "")
            return start
        if is_late:
            say_waiting("rank 0")
    raise ValueError(f"did not find rank 0 within {timeout_s:g} s{LEFT_OVER}")


def say_waiting(for_what: str) -> None:
    """Print what this rank waits for at the start. Only the first rank of each machine prints."""
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if rank == "0" or os.environ.get("LOCAL_RANK", rank) == "0":
        note = f"note: rank {rank} of {world_size} on {socket.gethostname()} waits for {for_what}"
        console.print_to_stderr(f"{note}{LEFT_OVER}")


def gather_processes(store: dist.Store, rank: int, world_size: int, process: Process) -> list[Process]:
    """Gather the Process of every rank, by rank, through the store (all ranks)."""
    store.set(f"process/{rank}", json.dumps(vars(process)))
    # rank 0 collects the values: if every rank read all values, requests would grow with world_size squared
    if rank == 0:
        values = [json.loads(store.get(f"process/{other}")) for other in range(world_size)]
        store.set("processes", json.dumps(values))
    return [Process(**value) for value in json.loads(store.get("processes"))]


def answer_of(request: Callable[[], Answer], limit_s: float) -> Answer:
    """
    Return what a request to the store returns. The request runs in a thread: if the store's machine was cut
    off or suspended, a request may never return, not even after the timeout of the request.

    Raises:
        ValueError: there is no answer within limit_s, or the store cannot be reached. Other errors of the
            request are raised as they are.
    """
    answer = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except Exception as e:
            answer.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(limit_s)
    except dist.DistError as e:
        problem = str(e).splitlines()[0]
        raise ValueError(f"cannot reach the other ranks at {store_address()}: {problem}") from e
    except TimeoutError as e:
        raise ValueError(
            f"no answer from {store_address()} within {limit_s:g} s, although something listens there: "
            "rank 0 or its agent is suspended, its machine was cut off, or a different program uses the "
            f"port: check this machine, or choose a different port{LEFT_OVER}"
        ) from e


# ------------------------------------------------------------------------------------------------------------
# machines and cores


def this_machine() -> tuple[str, str]:
    """Return (host name, identifier that differs between machines of equal name)."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    # containers can share a kernel and a host name; a container with a separate network counts as a machine
    kernel = ""
    if boot.exists() and network.is_symlink():
        kernel = f"{boot.read_text().strip()} {os.readlink(network)}"
    return socket.gethostname(), kernel


def this_process() -> tuple[str, int]:
    """Return (what numbers this process, number): its container on its machine; '' if this is not known."""
    boot, numbers = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    is_known = boot.exists() and numbers.is_symlink()
    return f"{boot.read_text().strip()} {os.readlink(numbers)}" if is_known else "", os.getpid()


def has_exited(process: tuple[str, int]) -> bool:
    """Whether the `this_process` of a different rank has exited; False if this cannot be seen from here."""
    numbered_by, number = process
    if not numbered_by or numbered_by != this_process()[0]:
        return False
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def order_by_machine(processes: Sequence[Process]) -> list[int]:
    """
    Return the ranks in a new order: ranks of one machine are neighbours, as with torchrun but not with
    `mpirun --map-by node`. Neighbours in a mesh, which shard a model together, are then on one machine.
    """
    machines = [process.machine for process in processes]
    return sorted(range(len(machines)), key=lambda rank: (machines.index(machines[rank]), rank))


def own_cores() -> list[int]:
    """
    Return the cores that this process may run on; a container or a scheduler often allows fewer than there
    are.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def divide_cores(processes: Sequence[Process], rank: int) -> int:
    """
    Limit torch's threads to this rank's share of the cores that the machine's ranks share. Thread pools on
    the same cores slow each other down, and torchrun's default is one thread. Returns how many ranks share
    this rank's cores: 1 if a scheduler has bound each rank to separate cores.
    """
    this = processes[rank]
    neighbors = [process for process in processes if process.machine == this.machine]
    sharing = sum(not set(neighbor.cores).isdisjoint(this.cores) for neighbor in neighbors)
    if max(sharing, this.local_size) > 1:
        torch.set_num_threads(max(1, len(this.cores) // sharing))
    return sharing


def bind_to_gpu(gpu: object) -> None:
    """
    Run on the cores of the GPU's NUMA node (Linux), unless the launcher has bound this process: memory of a
    different socket is slower to access. `gpu` is what torch.cuda.get_device_properties returns.
    """
    with suppress(OSError, AttributeError, ValueError):
        pci = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        ranges = (PCI / pci / "local_cpulist").read_text().split(",")  # 0-15,32-47
        ends = [tuple(map(int, r.split("-"))) for r in ranges]
        near = {core for r in ends for core in range(r[0], r[-1] + 1)} & os.sched_getaffinity(0)
        if near and len(os.sched_getaffinity(0)) == os.cpu_count():
            os.sched_setaffinity(0, near)


# ------------------------------------------------------------------------------------------------------------
# network interfaces


def choose_interface(processes: Sequence[Process] = ()) -> str:
    """
    Set GLOO_SOCKET_IFNAME, if it is not set, to the interface that leads to rank 0's machine, or to loopback
    on a single machine. By default, gloo takes the interface of the host name's address, which on many
    systems is a loopback address. NCCL chooses independently (NCCL_SOCKET_IFNAME), but on a single machine it
    also gets loopback: both listen at an address of the interface, and need nobody else there.

    Args:
        processes: of all ranks; (): they are on this machine.

    Returns the interface and its address, as 'eth0 (10.0.0.1)'; '' if gloo chooses.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME names an interface that this machine does not have.
    """
    addresses = interfaces()
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        names = [name for _, name in socket.if_nameindex()]  # also of interfaces without an address
        if not set(chosen.split(",")) <= set(names):
            raise ValueError(
                f"GLOO_SOCKET_IFNAME is {chosen!r}, but {socket.gethostname()} has {', '.join(names)}: set "
                "one of these, or unset it"
            )
        address = next((address for address, name in addresses.items() if name == chosen), "")
        return f"{chosen} ({address})" if address else chosen
    this_address = loopback()
    has_others = len({process.machine for process in processes}) > 1
    if has_others:
        # rank 0's own machine often resolves MASTER_ADDR to a loopback address, the others never do
        masters = {process.master for process in processes} - {""}
        masters = {master for master in masters if not ipaddress.ip_address(master).is_loopback}
        this_address = address_towards(min(masters)) if masters else this_address
    if name := addresses.get(this_address):
        os.environ["GLOO_SOCKET_IFNAME"] = name
        if not has_others:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # =: not a prefix
        return f"{name} ({this_address})"
    return ""


def loopback() -> str:
    """The loopback address: that of IPv6 on a machine without IPv4."""
    addresses = interfaces()
    return next((address for address in LOOPBACK if address in addresses), LOOPBACK[0])


def interfaces() -> dict[str, str]:
    """
    The names of network interfaces, by their addresses: first those of IPv4, then those of IPv6 (Linux; empty
    elsewhere).
    """
    names = {}
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # the interface lacks an IPv4 address
                    # SIOCGIFADDR
                    reply = fcntl.ioctl(s.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
                    names[socket.inet_ntoa(reply[20:24])] = name
        with suppress(OSError):  # a kernel without IPv6
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                names[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return names


def address_of(host: str) -> str:
    """The address, of IPv4 if there is one, to which the host name resolves on this machine; '' if none."""
    with suppress(OSError):
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        return min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0].partition("%")[0]
    return ""


def address_towards(address: str) -> str:
    """This machine's address on the route to `address`; '' if there is none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((address, 9))  # connecting a datagram socket sends nothing
        return s.getsockname()[0]
    return ""
