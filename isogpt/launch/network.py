"""
The network and this machine: rendezvous of the processes, interfaces, shares of the cores.
"""

import ipaddress
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from isogpt.common import console
from isogpt.launch import open_files
from isogpt.launch.machines import cores_in

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


# ------------------------------------------------------------------------------------------------------------
# rendezvous


def store_address() -> str:
    """The address of the store, for messages."""
    return with_port(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT"))


def with_port(address: str, port: object) -> str:
    """HOST:PORT, with an address of IPv6 in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def attempts(timeout_s: float, longest_pause_s: float = 0.25) -> Iterator[bool]:
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
        pause = min(2 * pause, longest_pause_s)


def listen_on_one_machine() -> int | None:
    """
    Listen at MASTER_ADDR and MASTER_PORT for a store of ranks that are all on this machine, as the launcher
    says. Returns the file descriptor, or None if ranks may be on other machines: they may know this machine
    by an address to which MASTER_ADDR does not resolve here, so TCPStore has to listen at all addresses.

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
        ValueError: no process listens there within timeout_s.
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
    """
    Rank 0's part of `meet`: return the name of this start when every rank has confirmed it. Each request
    covers all ranks.
    """
    start = uuid.uuid4().hex
    awaited = hellos = [f"hello/{rank}" for rank in range(1, world_size)]
    if not hellos:
        return start
    for is_late in attempts(timeout_s, longest_pause_s=1):
        if store.check(hellos):
            # perhaps of processes that have exited, until they are replaced
            names = [name.decode() for name in store.multi_get(hellos)]
            store.multi_set([f"welcome/{name}" for name in names], [start] * len(names))
            awaited = [f"{start}/here/{name}" for name in names]
            if store.check(awaited):
                return start
        if is_late:
            say_waiting(missing_ranks(store, awaited))
    missing = missing_ranks(store, awaited)
    raise ValueError(f"{missing} of {world_size} did not join within {timeout_s:g} s{LEFT_OVER}")


def missing_ranks(store: dist.Store, keys: Sequence[str]) -> str:
    """The ranks from 1 on whose keys are not in the store, for messages."""
    return console.ranks_text([rank for rank, key in enumerate(keys, start=1) if not store.check([key])])


def find_rank_0(store: dist.Store, rank: int, timeout_s: float) -> str:
    """The other ranks' part of `meet`: return the name of the start with which rank 0 has answered."""
    name = uuid.uuid4().hex
    for is_late in attempts(timeout_s, longest_pause_s=1):
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


def answer_of(request: Callable[[], Answer], limit_s: float) -> Answer:
    """
    Return what a request to the store returns. The request runs in a thread because it may never return, not
    even after its timeout, if the store's machine was cut off or suspended.

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
        problem = open_files.explained(str(e).splitlines()[0])
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
    """Return (the container that numbers this process, on its machine, or '' if it is not known; number)."""
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


def own_cores() -> list[int]:
    """
    Return the cores that this process may run on; a container or a scheduler often allows fewer than there
    are.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def divide_cores(cores: int, sharers: int, local_size: int) -> None:
    """
    Limit torch's threads to this rank's share of the cores that the machine's ranks share. Thread pools on
    the same cores slow each other down, and torchrun's default is one thread.

    Args:
        cores: how many cores this rank may run on.
        sharers: how many ranks may run on them; 1 if a scheduler has bound each rank to separate cores.
        local_size: number of processes on this machine, as the launcher says.
    """
    if max(sharers, local_size) > 1:
        torch.set_num_threads(max(1, cores // sharers))


def bind_to_gpu(gpu: object) -> None:
    """
    Run on the cores of the GPU's NUMA node (Linux), unless the launcher has bound this process: memory of a
    different socket is slower to access. `gpu` is what torch.cuda.get_device_properties returns.
    """
    with suppress(OSError, AttributeError, ValueError):
        pci = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        near = cores_in((PCI / pci / "local_cpulist").read_text()) & os.sched_getaffinity(0)
        if near and len(os.sched_getaffinity(0)) == os.cpu_count():
            os.sched_setaffinity(0, near)


# ------------------------------------------------------------------------------------------------------------
# network interfaces


def choose_interface(master: str | None = None) -> str:
    """
    Set GLOO_SOCKET_IFNAME, if it is not set, to the interface that leads to rank 0's machine, or to loopback
    on a single machine. By default, gloo takes the interface of the host name's address, which on many
    systems is a loopback address. NCCL chooses independently (NCCL_SOCKET_IFNAME), but on a single machine it
    also gets loopback: both listen at an address of the interface, where no other machine has to reach them.

    Args:
        master: the address of rank 0's machine, "" if it is not known; None: all ranks are on this machine.

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
    this_address = address_towards(master) if master else loopback()
    if name := addresses.get(this_address):
        os.environ["GLOO_SOCKET_IFNAME"] = name
        if master is None:
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
