"""
Who am I: each launcher's rank variables, the device, the network interface, the process group; and the two ways in
which ranks come to one mind, `agreement` for a mistake that any of them found and `gather_rows` for a step's numbers.
"""

import ctypes
import gc
import hashlib
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,  # stored as float32, multiplied by tensor cores with 10 bits of mantissa
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Ranks:
    """This process among the others. `world_size` 1 and no process group where nothing launched it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    store: dist.Store | None = None  # a connection for the watchdog's thread, where there are other ranks
    hosts: tuple[str, ...] = ("this host",)  # the machine's name, by rank
    network: str = "no process group"  # the backend, and the interface where it is known

    @property
    def first(self) -> bool:
        """Rank 0: the one that prints, logs and writes what one process writes."""
        return self.rank == 0

    def names(self) -> list[str]:
        """What messages call the ranks: 'rank 3', with the machine's name where there are several machines."""
        several = len(set(self.hosts)) > 1
        return [f"rank {r}" + f" ({host})" * several for r, host in enumerate(self.hosts)]

    def topology(self) -> str:
        """Machines x processes: '4 = 2 nodes (a, b) x 2', or '3 = 1 node x 3'."""
        names = list(dict.fromkeys(self.hosts))
        counts = [self.hosts.count(name) for name in names]
        shown = ", ".join(names[:4]) + ", ..." * (len(names) > 4)
        nodes = f"{len(names)} nodes ({shown})" if len(names) > 1 else "1 node"
        return f"{self.world_size} = {nodes} x {counts[0] if len(set(counts)) == 1 else '+'.join(map(str, counts))}"


# What other launchers than torchrun call a process's rank, world size, local rank and local world size; in this order,
# since mpirun inside a Slurm job starts through srun. DeepSpeed's, accelerate's and torch.distributed.launch use
# torchrun's names.
MPI = {
    "Open MPI's mpirun": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MPICH's mpirun": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
}


def understand_launcher() -> None:
    """
    Where srun or mpirun started this process among others, give the environment the variables that torchrun would have
    set: the rest of the code knows only those. Changes nothing where RANK is set or this process was started alone.

    Raises:
        ValueError: the processes are on several machines and nothing says where rank 0 is.
    """
    env = os.environ
    if "RANK" in env:
        if "LOCAL_SIZE" in env:  # DeepSpeed's name for it
            env.setdefault("LOCAL_WORLD_SIZE", env["LOCAL_SIZE"])
        return
    for launcher, names in MPI.items():
        if all(name in env for name in names):
            found, address = [env[name] for name in names], "127.0.0.1"
            if found[1] != found[3] and "MASTER_ADDR" not in env:
                flag = "-x MASTER_ADDR=HOST" if "Open" in launcher else "-genv MASTER_ADDR HOST"
                raise ValueError(
                    f"{launcher} started {found[1]} processes, {found[3]} of them on {socket.gethostname()}, and "
                    f"nothing says where rank 0 is: start with mpirun {flag}, an address of the first machine's"
                )
            job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("SLURM_JOB_ID")
            job = job or (str(os.getppid()) if found[1] == found[3] else "0")  # mpirun's, the same for all on a machine
            break
    else:
        names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
        if not all(name in env for name in names) or "SLURM_PTY_PORT" in env:  # a shell of srun --pty is no rank
            return
        address, tasks = slurm_nodes(env.get("SLURM_STEP_NODELIST", ""), env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        here = str(tasks[min(int(env.get("SLURM_NODEID", 0)), len(tasks) - 1)])
        found = [env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env.get("SLURM_LOCALID", "0"), here]
        job = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    if found[1] == "1":  # one process, a shell's within a job perhaps: it is alone
        return
    env.update(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), found, strict=True))
    env.setdefault("MASTER_ADDR", address)
    # below the ports that the kernel gives to others, and another one for each job
    env.setdefault("MASTER_PORT", str(10000 + zlib.crc32(job.encode()) % 20000))


def slurm_nodes(nodes: str, tasks: str) -> tuple[str, list[int]]:
    """The first name in Slurm's list of nodes, 'gpu[03-05,9],login', and the tasks of each, '2(x3),1'."""
    first = re.match(r"([^\[,]*)(?:\[(\w+))?", nodes)
    counts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in tasks.split(",")]
    return first[1] + (first[2] or ""), [int(c[1]) for c in counts if c for _ in range(int(c[2] or 1))] or [1]


def start_workers(nproc: int, script: str) -> None:
    """
    Become torchrun with so many workers of `script` on this machine (all arguments but --nproc are passed on); returns
    where a launcher has started this process, and where nproc is 0.

    Raises:
        ValueError: a launcher started another number of processes here.
    """
    if not nproc or "ISOGPT_STARTED" in os.environ:  # where this function started it, a config may say another number
        return
    if "RANK" in os.environ:
        here = rank_variables()[3]
        if nproc != here:
            raise ValueError(f"nproc is {nproc}, but the launcher started {here} processes here: leave --nproc out")
        return
    # torchrun would take --nproc for an option of its own
    passed = [argument for argument in sys.argv[1:] if not argument.startswith("--nproc=")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    os.environ["ISOGPT_STARTED"] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [*command, script, *passed])


def rank_variables() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size) as torchrun sets them; (0, 1, 0, 1) without a launcher."""
    if "RANK" not in os.environ:
        return 0, 1, 0, 1
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"RANK is set but {', '.join(missing)} is not: start with torchrun, or unset RANK")
    values = {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], **os.environ}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    wrong = [f"{name} is {values[name]!r}" for name in names if not values[name].isdigit()]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not a number; start with torchrun, or unset RANK")
    rank, world_size, local_rank, local_world_size, port = (int(values[name]) for name in names)
    if rank >= world_size or local_rank >= local_world_size or port > 65535:
        shown = ", ".join(f"{name} {values[name]}" for name in names)
        raise ValueError(f"the launcher's variables cannot be right: {shown}; start with torchrun, or unset RANK")
    return rank, world_size, local_rank, local_world_size


def pick_device(name: str, local_rank: int, world_size: int) -> torch.device:
    """
    The device called `name`: 'auto' is cuda, else mps (one process only: it has no collectives), else cpu; 'cuda' is
    the local rank's own GPU.

    Raises:
        ValueError: it is not there.
    """
    if name == "auto":
        mps = torch.backends.mps.is_available() and world_size == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdigit()):
        raise ValueError(f"device is {name!r}; possible are auto, cpu, cuda, cuda:N, mps")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ValueError("device is 'cuda', but torch finds no GPU here: set --device=cpu or --device=auto")
        number = int(index) if index and world_size == 1 else local_rank
        if number >= count:
            raise ValueError(f"GPU {number} is asked for, but there are {count}: start at most {count} processes here")
        return torch.device("cuda", number)
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device is 'mps', but torch finds none here: set --device=cpu or --device=auto")
    if kind == "mps" and world_size > 1:
        raise ValueError("several processes cannot share device 'mps': set --device=cpu, or start one process")
    return torch.device(kind)


def meet(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """
    Come together with the other ranks of this very start (all ranks); returns a name for it that was never used.

    After a restart torchrun (2.4 to 2.13) hands its workers the store of the attempt before, in which a rank finds
    the addresses of processes that are gone and fails with "connection refused"; its restart count is not the same on
    all nodes (pytorch#135712). So each process says hello by a name that nobody had before, and rank 0 answers each
    by that name with the name of this start, until all of them have been seen in it.

    Raises:
        ValueError: after timeout_s, some ranks are still missing.
    """
    mine, deadline, pause = uuid.uuid4().hex, time.monotonic() + timeout_s, 0.005
    welcomed = {}  # rank 0's: by rank, the name that it was answered under
    while time.monotonic() < deadline:
        if rank == 0:
            for r in range(1, world_size):
                if store.check([f"hello/{r}"]) and (name := store.get(f"hello/{r}").decode()) != welcomed.get(r):
                    store.set(f"welcome/{name}", mine)
                    welcomed[r] = name
            if (
                all(store.check([f"{mine}/here/{name}"]) for name in welcomed.values())
                and len(welcomed) == world_size - 1
            ):
                store.set(f"{mine}/go", "")
                return mine
        else:
            store.set(f"hello/{rank}", mine)
            if store.check([f"welcome/{mine}"]):
                start = store.get(f"welcome/{mine}").decode()
                store.set(f"{start}/here/{mine}", "")
                if store.check([f"{start}/go"]):
                    return start
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    if rank > 0:
        raise ValueError(f"rank {rank} found no rank 0 within {timeout_s:g} s")
    missing = [r for r in range(1, world_size) if not store.check([f"{mine}/here/{welcomed.get(r)}"])]
    raise ValueError(f"rank {', '.join(map(str, missing))} of {world_size} did not come within {timeout_s:g} s")


def join(device: str = "auto", backend: str = "auto", alone: bool = False, timeout_s: float = 600) -> Ranks:
    """
    Take this process's device and enter the process group, where a launcher made one.

    Args:
        alone: without a launcher, make a group of this one process (sharding wants one).
        timeout_s: how long to wait for the others, at the start and in each collective.

    Raises:
        ValueError: the device or the backend cannot be had here, or other ranks do not come.
    """
    rank, world_size, local_rank, local_world_size = rank_variables()
    die_with_the_launcher()
    chosen = pick_device(device, local_rank, world_size)
    if backend == "auto":
        backend = "nccl" if chosen.type == "cuda" else "gloo"
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend is {backend!r}; possible are auto, nccl (GPUs) and gloo (CPU)")
    if backend == "nccl" and chosen.type != "cuda" and world_size > 1:
        raise ValueError(f"backend 'nccl' works between GPUs, not on {chosen.type}: set --backend=gloo")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        bind_to_gpu(torch.cuda.get_device_properties(chosen))
    if chosen.type == "cpu":
        keep_freed_memory()
    # the CPU has a backend as well: checkpoints and offloaded state are there
    kinds = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    if "RANK" not in os.environ:
        if alone:
            dist.init_process_group(kinds, store=dist.HashStore(), rank=0, world_size=1)
        return Ranks(rank, world_size, local_rank, local_world_size, chosen)

    where, timeout = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", timedelta(seconds=timeout_s)
    longer = timedelta(seconds=30 * (backend == "nccl"))  # NCCL aborts without a word: the watchdog speaks first
    own = {"device_id": chosen} if backend == "nccl" else {}
    watched = None
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # meet does the waiting, and says who is missing
        store = dist.TCPStore(address, port, None, keeps, timeout, wait_for_workers=False)
        start = meet(store, rank, world_size, timeout_s)
        store = dist.PrefixStore(start, store)
        store.set_timeout(timeout)
        machines = tell_all(store, rank, world_size, "machine", this_machine())
        order = by_machine([(name, boot) for name, boot, _ in machines])
        rank, machines = order.index(rank), [machines[r] for r in order]
        os.environ["RANK"] = str(rank)
        seen = tell_all(store, rank, world_size, "rank 0 seen at", address_of(os.environ["MASTER_ADDR"]))
        network, problem = backend, ""
        try:
            over = choose_interface(len({(name, boot) for name, boot, _ in machines}) > 1, seen)
            network += over * (backend == "gloo")  # beside NCCL there is gloo too, for what is on the CPU
        except ValueError as e:
            problem = str(e)
        if problems := [p for p in tell_all(store, rank, world_size, "problem", problem) if p]:
            raise ValueError(problems[0])
        if chosen.type == "cpu":
            divide_cores(machines, rank, local_world_size)
        dist.init_process_group(kinds, store=store, rank=rank, world_size=world_size, timeout=timeout + longer, **own)
        if world_size > 1:
            watched = dist.PrefixStore(start, dist.TCPStore(address, port, is_master=False, timeout=timeout))
            watched.set_timeout(timedelta(seconds=5))
    except (dist.DistNetworkError, dist.DistStoreError) as e:
        raise ValueError(f"rank {rank} cannot reach the others through {where}: {str(e).splitlines()[0]}") from e
    hosts = tuple(name for name, _, _ in machines)
    return Ranks(rank, world_size, local_rank, local_world_size, chosen, watched, hosts, network)


def tell_all(store: dist.Store, rank: int, world_size: int, what: str, value: object) -> list:
    """`value` of every rank, by rank, through the store: before there is a process group (all ranks)."""
    store.set(f"{what}/{rank}", json.dumps(value))
    if rank == 0:  # which reads them all, once: every rank reading every other's would ask it world_size squared times
        values = [json.loads(store.get(f"{what}/{r}")) for r in range(world_size)]
        store.set(what, json.dumps(values))
    return json.loads(store.get(what))


def this_machine() -> tuple[str, str, list[int]]:
    """(name, what tells it from another of that name, the cores that this process may run on)."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    # containers may share a kernel and a name: they are machines of their own where their network is
    which = f"{boot.read_text().strip()} {os.readlink(network)}" if boot.exists() and network.is_symlink() else ""
    return socket.gethostname(), which, own_cores()


def by_machine(machines: list[tuple[str, str]]) -> list[int]:
    """
    The ranks in the order in which they are numbered anew: those of one machine next to each other, as torchrun does it
    and `mpirun --map-by node` does not. Neighbours in a mesh (who shard a model together) then share a machine.
    """
    return sorted(range(len(machines)), key=lambda r: (machines.index(machines[r]), r))


def divide_cores(machines: list[list], rank: int, local_world_size: int) -> None:
    """
    Give this process its share of the cores that the ranks on one machine share: pools of threads on the same cores
    fight, and torchrun gives each process one thread. Ranks that were bound to cores of their own use all of those.
    """
    *here, cores = machines[rank]
    sharing = sum(there == here and bool(set(other) & set(cores)) for *there, other in machines)
    if max(sharing, local_world_size) > 1:
        torch.set_num_threads(max(1, len(cores) // sharing))


def choose_interface(several_machines: bool, seen: list[str]) -> str:
    """
    Have gloo use the network interface by which this machine reaches rank 0's, and loopback on one machine. By itself
    it takes the one that the machine's name resolves to, on many systems a loopback address that no other machine
    reaches. Where GLOO_SOCKET_IFNAME is set, it decides. NCCL chooses for itself (NCCL_SOCKET_IFNAME).

    Args:
        seen: the addresses at which the ranks look for rank 0; its own machine may know another by that name.

    Returns:
        what to show: ' over eth0 (10.0.0.1)', '' where it is not known.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME names none that is here, or there are several and nothing tells which.
    """
    addresses, host = interfaces(), socket.gethostname()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    shown = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    if addresses and any(name not in addresses for name in chosen.split(",") if name):
        raise ValueError(f"GLOO_SOCKET_IFNAME is {chosen!r}, but {host} has {shown}: name one of these, or unset it")
    if not chosen and addresses:
        names = [name for name, address in addresses.items() if address.startswith("127.") != several_machines]
        if several_machines and len(names) > 1:
            ways = [address_towards(there) for there in dict.fromkeys([os.environ["MASTER_ADDR"], *seen, host])]
            names = [name for way in ways for name in names if addresses[name] == way][:1] or names
            if len(names) > 1:
                raise ValueError(
                    f"{host} has several network interfaces, {shown}, and {os.environ['MASTER_ADDR']}, where rank 0 "
                    f"is, does not tell which to use: set GLOO_SOCKET_IFNAME={names[0]} or another on this machine"
                )
        if names:
            os.environ["GLOO_SOCKET_IFNAME"] = chosen = names[0]
    return f" over {chosen} ({addresses[chosen]})" if chosen in addresses else f" over {chosen}" * bool(chosen)


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one (Linux; empty elsewhere)."""
    found = {}
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # it has none
                    reply = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                    found[name] = socket.inet_ntoa(reply[20:24])
    return found


def address_of(host: str) -> str:
    """What its name resolves to on this machine; '' where it does not."""
    with suppress(OSError):
        return socket.gethostbyname(host)
    return ""


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`; '' where there is no way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # of a datagram socket: sends nothing
        return s.getsockname()[0]
    return ""


def bind_to_gpu(gpu: object) -> None:
    """
    Run on the cores beside the GPU with these properties, its NUMA node's (Linux), unless the launcher has bound this
    process already: memory of another socket's is slower to read and to copy from.
    """
    with suppress(OSError, AttributeError, ValueError):
        pci = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        ranges = (PCI / pci / "local_cpulist").read_text().strip().split(",")  # 0-15,32-47
        ends = [tuple(map(int, r.split("-"))) for r in ranges]
        near = {core for r in ends for core in range(r[0], r[-1] + 1)} & os.sched_getaffinity(0)
        if near and len(os.sched_getaffinity(0)) == os.cpu_count():
            os.sched_setaffinity(0, near)


def die_with_the_launcher() -> None:
    """
    A worker of torchrun's ends when its agent is killed (Linux): an orphan would go on writing where the workers of
    the next attempt do. Elsewhere checkpoint.take_over keeps its saves from counting.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def keep_freed_memory() -> None:
    """
    Have the C library keep what is freed for the next step (glibc). By default it returns large pieces to the kernel
    and gets them back page by page, which took a tenth of a step of 10M parameters on a CPU.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: pieces below 32 MiB, the most that it takes, come from the heap
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and the heap does not shrink


def own_cores() -> list[int]:
    """Cores that this process may run on (a container or a scheduler often gives fewer than there are)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cpu_count() -> int:
    """How many cores that is."""
    return len(own_cores())


def leave() -> None:
    """Leave the process group, where there is one; whoever holds a wrapped model has let go of it."""
    gc.collect()  # what is left of the model would hold the group, and taking that apart then can hang
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_objects(value: object) -> list:
    """`value` of every rank, by rank (all ranks)."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rows(row: list[Tensor | float], device: torch.device) -> Tensor:
    """
    One row of numbers from every rank (all ranks): (world size, len(row)) float64 on the CPU. The one small
    collective of a step, and where the loop waits for the device.
    """
    kept = torch.float32 if device.type == "mps" else torch.float64
    mine = torch.stack([torch.as_tensor(v, dtype=kept, device=device) for v in row])  # (n,)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine[None].cpu().double()
    rows = mine.new_empty(dist.get_world_size() * len(row))
    # torch 2.13's name for it, which warns of the old one; 2.11 has the old one only
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(rows, mine)
    return rows.view(-1, len(row)).cpu()


@contextmanager
def agreement(last_words: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """
    Do something that can fail on any rank (all ranks, no collective inside): where it raised ValueError or OSError on
    some, rank 0 says so, once, and all leave with status 1, each with its `last_words` about it.
    """
    problem = None
    try:
        yield
    except (ValueError, OSError) as e:
        problem = str(e)
    problems = gather_objects(problem)
    if not any(problems):
        return
    last_words("; ".join(dict.fromkeys(p for p in problems if p)))
    if not dist.is_initialized() or dist.get_rank() == 0:
        for message in dict.fromkeys(p for p in problems if p):
            ranks = [r for r, p in enumerate(problems) if p == message]
            who = "" if 0 in ranks else f"rank {', '.join(map(str, ranks))}: "
            print(f"error: {who}{message}", file=sys.stderr, flush=True)
    if not dist.is_initialized():
        sys.exit(1)
    with suppress(RuntimeError):  # the others may be gone: they knew
        dist.barrier()  # no rank leaves, and has the launcher kill rank 0, before it is printed
    # at once: taking a process group apart while a DDP model still holds it has been seen to hang (torch 2.13, gloo)
    sys.stdout.flush()
    os._exit(1)


def best_dtype(device: torch.device) -> str:
    """The fastest dtype that trains safely: what the device multiplies in hardware."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    if device.type == "cpu" and any(cpu_has(f) for f in ("avx512_bf16", "amx_bf16", "amx_tile")):
        return "bfloat16"
    return "float32"


def cpu_has(feature: str) -> bool:
    """Whether the processor names this feature (a processor without it emulates bfloat16, slower than float32)."""
    try:
        with open("/proc/cpuinfo") as f:
            return any(feature in line.split() for line in f if line.startswith("flags"))
    except OSError:
        return False


def dtype_for(wanted: str, device: torch.device, before: str | None = None) -> str:
    """
    The dtype to compute in: `wanted`, or for 'auto' the one used `before` the resume, or the device's best.

    Raises:
        ValueError: unknown, or not for this device.
    """
    if wanted == "auto":
        try:
            return dtype_for(before or best_dtype(device), device)
        except ValueError:  # what was used before, on another device, cannot be had here
            return best_dtype(device)
    if wanted not in DTYPES:
        raise ValueError(f"dtype is {wanted!r}; possible are auto, {', '.join(DTYPES)}")
    if wanted == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise ValueError(f"dtype 'tf32' needs an NVIDIA GPU of the Ampere generation or later, not {device.type}")
    if wanted == "float16" and device.type == "mps":
        raise ValueError("dtype 'float16' cannot be trained on mps: set --dtype=float32 or --dtype=bfloat16")
    return wanted


def start_facts(config: dict) -> dict:
    """What should be alike on all ranks besides the data: settings, code, torch; and the name of this machine."""
    here = Path(__file__).resolve().parent
    code = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(here.glob("*.py")))).hexdigest()[:12]
    return config | {"torch": torch.__version__, "the code's digest": code, "host": socket.gethostname()}


def check_alike(facts: list[dict]) -> None:
    """
    Raise ValueError where the ranks, whose start_facts these are, were started with different ones: they would train
    weights that drift apart. Paths may differ by machine, and a name for wandb may have the time in it.
    """
    own = ("out_dir", "dataset", "host", "alert_command")
    names = [k for k in facts[0] if k not in own and not k.startswith("wandb")]
    differ = [k for k in names if any(f.get(k) != facts[0][k] for f in facts)]
    if differ:
        hosts = {f["host"] for f in facts}
        place = [f"rank {r}" + f" ({f['host']})" * (len(hosts) > 1) for r, f in enumerate(facts)]
        values = [f"{k} is {', '.join(f'{f.get(k)!r} on {place[r]}' for r, f in enumerate(facts))}" for k in differ]
        raise ValueError(f"the ranks were started with different settings: {'; '.join(values)}")


def check_collective(ranks: Ranks) -> None:
    """Where an all-reduce does not give the right sum, all ranks leave with a message (all ranks)."""
    total = torch.full((), ranks.rank + 1.0, device=ranks.device)
    if ranks.world_size > 1:
        dist.all_reduce(total)
    with agreement():
        if ranks.world_size > 1 and total.item() != ranks.world_size * (ranks.world_size + 1) / 2:
            raise ValueError(f"an all-reduce over {ranks.world_size} ranks gave {total.item()}: the network is broken")


def agree_on_dtype(mine: str) -> str:
    """One dtype for all ranks (all ranks): the most careful that any of them has to take."""
    offers = gather_objects(mine)
    return next(d for d in ("float32", "tf32", "float16", "bfloat16") if d in offers)


def set_numerics(device: torch.device, dtype: str, deterministic: bool) -> None:
    """Process-wide switches: TF32 unless float32 is to be exact, and algorithms that give the same bits each time."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS has no deterministic mode without it
        torch.use_deterministic_algorithms(True)


def seed_step(seed: int, step: int, rank: int) -> None:
    """
    Seed every generator for one step. Dropout's masks become a function of (seed, step, rank): a resumed run has the
    random state of the run that never stopped, on any layout, without one having been saved.
    """
    number = int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
    if torch.accelerator.is_available():
        torch.manual_seed(number)  # every device's generator too
    else:  # the same on a CPU alone, where looking for other devices takes 0.1 ms
        torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
