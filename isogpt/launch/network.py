"""
The network and the machines: rendezvous of the processes, numbering by machine, interfaces, shares of the
cores.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

Answer = TypeVar("Answer")
# seconds beyond the timeout of a request after which the store counts as dead
ANSWER_S = 10
WAITING_S = 15  # seconds until a rank says which ranks it waits for
PCI = Path("/sys/bus/pci/devices")
# the end of messages about variables of a launcher that has exited; configurator.fail names the rank
UNSET = (
    "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE"
)
LEFT_OVER = f". If no launcher started this process, RANK is left over in the shell: type {UNSET}"


def meet(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """
    Meet the other ranks of this start (all ranks); returns a unique name for the start.

    After a restart, torchrun (2.4 to 2.13) gives the workers the store of the previous attempt. That store
    contains addresses of processes that have exited, and the restart count differs across nodes
    (pytorch#135712). So each process registers under a unique name, and rank 0 answers each name with the
    name of this start. The start is complete when every rank has confirmed it.

    Raises:
        ValueError: some ranks are missing after timeout_s.
    """
    mine, began, pause = uuid.uuid4().hex, time.monotonic(), 0.005
    welcomed, is_welcome, has_said = {}, False, False  # on rank 0: the name that was answered, by rank
    while time.monotonic() - began < timeout_s:
        if not has_said and time.monotonic() - began >= WAITING_S:
            has_said = True
            missing = not_here(store, mine, welcomed, world_size) if rank == 0 else "0"
            say_waiting(rank, world_size, "ranks that rank 0 names" if is_welcome else f"rank {missing}")
        if rank == 0:
            for r in range(1, world_size):
                if store.check([f"hello/{r}"]) and (name := store.get(f"hello/{r}").decode()) != welcomed.get(
                    r
                ):
                    store.set(f"welcome/{name}", mine)
                    welcomed[r] = name
            if len(welcomed) == world_size - 1 and all(
                store.check([f"{mine}/here/{n}"]) for n in welcomed.values()
            ):
                store.set(f"{mine}/go", "")
                return mine
        else:
            store.set(f"hello/{rank}", mine)
            if is_welcome := store.check([f"welcome/{mine}"]):
                start = store.get(f"welcome/{mine}").decode()
                store.set(f"{start}/here/{mine}", "")
                if store.check([f"{start}/go"]):
                    return start
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    if rank > 0:
        raise ValueError(f"did not find rank 0 within {timeout_s:g} s{LEFT_OVER}")
    missing = not_here(store, mine, welcomed, world_size)
    raise ValueError(f"rank {missing} of {world_size} did not join within {timeout_s:g} s{LEFT_OVER}")


def not_here(store: dist.Store, start: str, welcomed: dict[int, str], world_size: int) -> str:
    """The ranks that have not confirmed the start (rank 0), as '1, 2'; `welcomed` are names by rank."""
    others = range(1, world_size)
    return ", ".join(str(r) for r in others if not store.check([f"{start}/here/{welcomed.get(r)}"]))


def say_waiting(rank: int, world_size: int, for_what: str) -> None:
    """Print what a rank waits for at the start. Only the first rank of each machine prints."""
    if rank == 0 or os.environ.get("LOCAL_RANK", str(rank)) == "0":
        note = f"note: rank {rank} of {world_size} on {socket.gethostname()} waits for {for_what}"
        print(f"{note}{LEFT_OVER}", file=sys.stderr, flush=True)


def gather_through_store(store: dist.Store, rank: int, world_size: int, key: str, value: object) -> list:
    """
    Gather `value` from every rank, by rank, through the store (all ranks): for use before there is a process
    group.
    """
    store.set(f"{key}/{rank}", json.dumps(value))
    # rank 0 collects the values: if every rank read all values, requests would grow with world_size squared
    if rank == 0:
        store.set(key, json.dumps([json.loads(store.get(f"{key}/{r}")) for r in range(world_size)]))
    return json.loads(store.get(key))


def answer_of(request: Callable[[], Answer], limit_s: float) -> Answer:
    """
    Return what a request to the store returns. The request runs in a thread: if the store's machine was cut
    off or suspended, a request may never return, not even after the timeout of the request.

    Raises:
        TimeoutError: there is no answer within limit_s. Errors of the request are raised as well.
    """
    answer = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except Exception as e:
            answer.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(limit_s)


# ------------------------------------------------------------------------------------------------------------
# machines and cores


def this_machine() -> tuple[str, str, list[int]]:
    """
    Return (host name, identifier that differs between machines of equal name, cores available to this
    process).
    """
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    # containers can share a kernel and a host name; a container with a separate network counts as a machine
    unique = (
        f"{boot.read_text().strip()} {os.readlink(network)}" if boot.exists() and network.is_symlink() else ""
    )
    return socket.gethostname(), unique, own_cores()


def order_by_machine(machines: list[tuple[str, str]]) -> list[int]:
    """
    Return the ranks in a new order: ranks of one machine are neighbours, as with torchrun but not with
    `mpirun --map-by node`. Neighbours in a mesh, which shard a model together, are then on one machine.
    """
    return sorted(range(len(machines)), key=lambda r: (machines.index(machines[r]), r))


def own_cores() -> list[int]:
    """
    Return the cores that this process may run on; a container or a scheduler often allows fewer than there
    are.
    """
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def divide_cores(machines: list[list], rank: int, local_world_size: int) -> int:
    """
    Limit torch's threads to this rank's share of the cores that the machine's ranks share. Thread pools on
    the same cores slow each other down, and torchrun's default is one thread. Returns how many ranks share
    this rank's cores: 1 if a scheduler has bound each rank to separate cores.
    """
    *here, cores = machines[rank]
    sharing = sum(there == here and bool(set(other) & set(cores)) for *there, other in machines)
    if max(sharing, local_world_size) > 1:
        torch.set_num_threads(max(1, len(cores) // sharing))
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


def choose_interface(several_machines: bool, addresses_of_rank_0: list[str]) -> str:
    """
    Set GLOO_SOCKET_IFNAME to the interface that leads to rank 0's machine, or to loopback on a single
    machine. By default, gloo takes the interface of the host name's address, which on many systems is a
    loopback address. A variable that is already set is kept. NCCL chooses independently (NCCL_SOCKET_IFNAME).

    Args:
        addresses_of_rank_0: MASTER_ADDR as each rank resolves it; rank 0's own machine may resolve it
            differently.

    Returns:
        The interface and its address, as 'eth0 (10.0.0.1)'; '' if not known.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME names no interface of this machine, or several interfaces are possible.
    """
    addresses, host = interfaces(), socket.gethostname()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    listed = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    if addresses and any(name not in addresses for name in chosen.split(",") if name):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME is {chosen!r}, but {host} has {listed}: set one of these, or unset it"
        )
    if not chosen and addresses:
        names = [
            name for name, address in addresses.items() if address.startswith("127.") != several_machines
        ]
        if several_machines and len(names) > 1:
            targets = dict.fromkeys([os.environ["MASTER_ADDR"], *addresses_of_rank_0, host])
            ways = [address_towards(target) for target in targets]
            names = [name for way in ways for name in names if addresses[name] == way][:1] or names
            if len(names) > 1:
                raise ValueError(
                    f"{host} has several network interfaces, {listed}, and the route to rank 0 does not "
                    f"determine one: set GLOO_SOCKET_IFNAME={names[0]} or a different interface"
                )
        if names:
            os.environ["GLOO_SOCKET_IFNAME"] = chosen = names[0]
    return f"{chosen} ({addresses[chosen]})" if chosen in addresses else chosen


def interfaces() -> dict[str, str]:
    """The IPv4 addresses of network interfaces, by name (Linux; empty elsewhere)."""
    found = {}
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # the interface lacks an address
                    # SIOCGIFADDR
                    reply = fcntl.ioctl(s.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
                    found[name] = socket.inet_ntoa(reply[20:24])
    return found


def address_of(host: str) -> str:
    """The address that the host name resolves to on this machine; '' if there is none."""
    with suppress(OSError):
        return socket.gethostbyname(host)
    return ""


def address_towards(host: str) -> str:
    """This machine's address on the route to `host`; '' if there is none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # connecting a datagram socket sends nothing
        return s.getsockname()[0]
    return ""
