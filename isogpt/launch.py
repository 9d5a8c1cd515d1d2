"""The launchers' rank variables, the device of this process, and joining the other processes."""

import ctypes
import gc
import os
import re
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from isogpt import console, network
from isogpt.agree import exit_together, gather_objects
from isogpt.mesh import collectives_timeout

# The names that mpirun uses for a process's rank, world size, local rank and local world size. Open MPI comes before
# Slurm, since mpirun inside a Slurm job starts its daemons with srun. DeepSpeed, accelerate and
# torch.distributed.launch use torchrun's names.
MPI = {"Open MPI's mpirun": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
       "MPICH's mpirun": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]}  # fmt: skip
# What launchers set for each process. A variable that ends in _ stands for all that begin with it. A Slurm job's own
# variables are none of them, such as SLURM_JOB_ID.
OF_A_PROCESS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
                "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ISOGPT_STARTED",
                "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "TORCHELASTIC_", "SLURM_STEP_", "OMPI_", "PMI_",
                "PMIX_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # fmt: skip
WAITING_S = 10  # until rank 0 says that it waits for other ranks


@dataclass(frozen=True)
class Launch:
    """
    What distinguishes a launch from a later one of the same command. All restarts of a launch have it in common.

    torchrun's variables do not: its restart count is that of one agent, which does not count the failures that other
    agents see, and its run id is whatever the user passed as --rdzv-id.
    """

    agents: tuple[str, ...] = ()  # torchrun's agents; a restart has at least one of those before it
    job: str = ""  # Slurm's job
    requeued: int = 0  # how many times Slurm has put the job back into the queue

    def continues(self, before: "Launch") -> bool:
        """Whether this start is a restart of the launch that made the start `before`."""
        is_requeued = self.job != "" and self.job == before.job and self.requeued > before.requeued
        return is_requeued or not set(self.agents).isdisjoint(before.agents)


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Without a launcher: world_size 1 and no store."""

    rank: int
    world_size: int
    device: torch.device
    backend: str  # for init_process_group
    store: dist.Store | None = None
    start: str = ""  # the unique name of this start of the run, the prefix of its keys in the store
    hosts: tuple[str, ...] = ("this host",)  # host name, by rank
    network: str = "no process group"  # the backend and gloo's network interface: 'gloo over eth0 (10.0.0.1)'
    launch: Launch = Launch()
    local_sizes: tuple[int, ...] = (1,)  # by rank, the number of processes on its machine, as the launcher says

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
        return f"{self.world_size} = {nodes} x {counts[0] if len(set(counts)) == 1 else '+'.join(map(str, counts))}"

    def group_options(self, timeout_s: float) -> dict:
        """The arguments of init_process_group besides the backend; without a launcher, for a group of one process."""
        return dict(rank=self.rank, world_size=self.world_size, store=self.store or dist.HashStore(),
                    timeout=collectives_timeout(timeout_s, self.backend),
                    device_id=self.device if "nccl" in self.backend else None)  # fmt: skip


def rank_names(hosts: Sequence[str]) -> list[str]:
    """The ranks' names in messages, from their hosts: 'rank 3', with the host name if there are several hosts."""
    return [f"rank {r} ({host})" if len(set(hosts)) > 1 else f"rank {r}" for r, host in enumerate(hosts)]


# ---------------------------------------------------------------------------------------------------------------------
# launchers


def adopt_launcher_variables() -> None:
    """
    If srun or mpirun started this process, set the environment variables that torchrun would have set; the rest of the
    code reads only those. Changes nothing if RANK is set or this process was started alone.

    Raises:
        ValueError: the processes are on several machines and rank 0's address is not known.
    """
    env = os.environ
    if "RANK" in env:
        return
    found, address, job = mpi_variables() or slurm_variables() or (None, "", "")
    if not found or found[1] == "1":  # a single process, perhaps the shell of a job
        return
    env.update(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), found, strict=True))
    env.setdefault("MASTER_ADDR", address)
    # below the range of ephemeral ports, and different for each job
    env.setdefault("MASTER_PORT", str(10000 + zlib.crc32(job.encode()) % 20000))


def mpi_variables() -> tuple[list[str], str, str] | None:
    """([rank, world size, local rank, local world size], rank 0's address, job) from mpirun; None without it."""
    env = os.environ
    launcher = next((name for name in MPI if set(MPI[name]) <= env.keys()), None)
    if not launcher:
        return None
    found = [env[name] for name in MPI[launcher]]
    is_one_machine = found[1] == found[3]
    if not is_one_machine and "MASTER_ADDR" not in env:
        flag = "-x MASTER_ADDR=HOST" if "Open" in launcher else "-genv MASTER_ADDR HOST"
        raise ValueError(f"{launcher} started {found[1]} processes, {found[3]} of them on {socket.gethostname()}, but "
                         f"rank 0's address is not known: start with mpirun {flag} (HOST: first machine)")  # fmt: skip
    parent = str(os.getppid()) if is_one_machine else "0"  # mpirun itself, the same for all its processes
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("SLURM_JOB_ID") or parent
    return found, "127.0.0.1", job


def slurm_variables() -> tuple[list[str], str, str] | None:
    """The same from srun; None without it, and in the shell of `srun --pty` or salloc."""
    env = os.environ
    if is_in_a_shell_of_slurm() or not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= env.keys():
        return None
    address, tasks = slurm_nodes(env.get("SLURM_STEP_NODELIST", ""), env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    here = str(tasks[min(int(env.get("SLURM_NODEID", 0)), len(tasks) - 1)])
    found = [env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env.get("SLURM_LOCALID", "0"), here]
    return found, address, f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"


def is_in_a_shell_of_slurm() -> bool:
    """
    Whether a person started this process in the shell of `srun --pty` or salloc. The variable does not tell: an `srun`
    that is typed there passes it on to its tasks. But Slurm gives a terminal only to the first task of `srun --pty`,
    here the shell, and slurmstepd is the parent of each task.
    """
    if "SLURM_PTY_PORT" not in os.environ or not has_terminal():
        return False
    with suppress(OSError):  # there is no /proc
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() != "slurmstepd"
    return True


def has_terminal() -> bool:
    """Whether this process has a controlling terminal, wherever its input and output go."""
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR))
        return True
    return False


def environment_without_launcher() -> dict[str, str]:
    """The environment for a command that is not a rank of this run, although a rank starts it."""
    groups = tuple(name for name in OF_A_PROCESS if name.endswith("_"))
    return {k: v for k, v in os.environ.items() if k not in OF_A_PROCESS and not k.startswith(groups)}


def slurm_nodes(nodes: str, tasks: str) -> tuple[str, list[int]]:
    """The first name in Slurm's list of nodes, 'gpu[03-05,9],login', and the tasks of each node, '2(x3),1'."""
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.match(r"(\[[^\]]*\]|[^,\[])*", nodes)[0])
    counts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in tasks.split(",")]
    return first, [int(c[1]) for c in counts if c for _ in range(int(c[2] or 1))] or [1]


def start_workers(nproc: int, script: str) -> None:
    """
    Replace this process by torchrun with `nproc` workers of `script` on this machine and the same arguments. Returns
    if nproc is 0 or a launcher has started this process.

    Raises:
        ValueError: the launcher started another number of processes.
    """
    if not nproc or console.is_worker_of_nproc():  # a worker of this function; its config may set nproc again
        return
    if "RANK" in os.environ:
        if nproc != (started := rank_variables()[3]):
            raise ValueError(f"nproc is {nproc}, but the launcher started {started} processes: omit --nproc")
        return
    os.environ["ISOGPT_STARTED"] = str(os.getpid())  # torchrun's, since it replaces this process
    sys.stdout.flush()
    # torchrun would take --nproc as an abbreviation of its own option; configure has normalized it to --nproc=N
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    os.execv(torchrun[0], [*torchrun, script, *(word for word in sys.argv[1:] if not word.startswith("--nproc="))])


def rank_variables() -> tuple[int, int, int, int]:
    """
    (rank, world size, local rank, local world size) from torchrun's variables; (0, 1, 0, 1) without a launcher.

    Raises:
        ValueError: some of the variables are missing or contradict each other.
    """
    if "RANK" not in os.environ:
        return 0, 1, 0, 1
    if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"RANK is set but {', '.join(missing)} is not: no launcher started this process, and "
                         f"RANK={os.environ['RANK']} is left over in the shell. Type unset RANK, or start with torchrun"
                         )  # fmt: skip
    local_size = os.environ.get("LOCAL_SIZE", os.environ["WORLD_SIZE"])  # DeepSpeed's name for it
    values = {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": local_size, **os.environ}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    if wrong := [f"{name} is {values[name]!r}" for name in names if not values[name].isdigit()]:
        raise ValueError(f"{', '.join(wrong)}: not a number; start with torchrun, or type unset RANK")
    rank, world_size, local_rank, local_world_size, port = (int(values[name]) for name in names)
    if rank >= world_size or local_rank >= local_world_size or port > 65535:
        text = ", ".join(f"{name} {values[name]}" for name in names)
        raise ValueError(
            f"the launcher's variables contradict each other: {text}; start with torchrun, or type unset RANK"
        )
    return rank, world_size, local_rank, local_world_size


def agent_start() -> int | None:
    """When torchrun's agent, the parent of this process, was started, in clock ticks since boot; None: not known."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError, ValueError, IndexError):  # there is no /proc
            return int(Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[19])
    return None


def own_agent() -> str:
    """A name of this process's torchrun agent that no other process has, not even on another day; '' without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    host, unique, _ = network.this_machine()
    return f"{host} {unique} {os.environ['TORCHELASTIC_RUN_ID']} {os.getppid()} {agent_start()}"


def make_launch(agents: Sequence[str]) -> Launch:
    """The launch that started this process, with the own_agent of each rank."""
    env = os.environ
    job = f"{env.get('SLURM_CLUSTER_NAME', '')} {env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else ""
    requeued = env.get("SLURM_RESTART_COUNT", "0")
    return Launch(tuple(sorted(set(agents) - {""})), job, int(requeued) if requeued.isdigit() else 0)


def machine_count() -> int:
    """How many machines the processes are on, if there are equally many on each."""
    _, world_size, _, local_world_size = rank_variables()
    return max(1, world_size // local_world_size)


def island_count(ranks: Ranks) -> int:
    """
    The number of islands if each machine is one.

    Raises:
        ValueError: the launcher has started different numbers of processes on the machines.
    """
    if len(set(ranks.local_sizes)) > 1:
        sizes = {host: n for host, n in zip(ranks.hosts, ranks.local_sizes, strict=True)}
        counts = ", ".join(f"{n} on {host}" for host, n in list(sizes.items())[:8])
        raise ValueError(f"islands is 0, one on each machine, but the numbers of processes differ: {counts}. Start "
                         "equally many on each machine, or set --islands= to a number that divides "
                         f"{ranks.world_size}")  # fmt: skip
    return max(1, ranks.world_size // ranks.local_sizes[0])


# ---------------------------------------------------------------------------------------------------------------------
# this process


def pick_device(name: str, local_rank: int, world_size: int) -> torch.device:
    """
    The device called `name`: 'auto' is cuda, else mps (a single process only: it has no collectives), else cpu; 'cuda'
    is the GPU with the number of the local rank. Schedulers may let each process see a GPU of its own only, which has
    number 0 in every process: the numbers start again at 0. check_gpus finds processes that share a GPU.

    Raises:
        ValueError: it is not available.
    """
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "mps" if has_mps and world_size == 1 else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdigit()):
        raise ValueError(f"device is {name!r}; possible are auto, cpu, cuda, cuda:N, mps")
    if kind == "cuda":
        if not has_cuda:
            raise ValueError("device is 'cuda', but torch finds no GPU: set --device=cpu or --device=auto")
        count = torch.cuda.device_count()
        if world_size > 1 or not index:
            return torch.device("cuda", local_rank % count)
        if int(index) >= count:
            names = ", ".join(f"cuda:{number}" for number in range(count))
            raise ValueError(f"device is {name!r}, but torch finds only {names}")
        return torch.device("cuda", int(index))
    if kind == "mps" and not has_mps:
        raise ValueError("device is 'mps', but torch does not find one: set --device=cpu or --device=auto")
    if kind == "mps" and world_size > 1:
        raise ValueError("several processes cannot share device 'mps': set --device=cpu, or start one process")
    return torch.device(kind)


def pick_backend(name: str, device: torch.device, world_size: int) -> str:
    """
    The argument `backend` of init_process_group. With NCCL there is gloo too, for tensors on the CPU: checkpoints and
    offloaded state. Where PyTorch has no NCCL, as on Windows, gloo communicates for GPUs too.

    Raises:
        ValueError: the backend is unknown, not part of this PyTorch, or does not support the device.
    """
    if name not in ("auto", "nccl", "gloo"):
        raise ValueError(f"backend is {name!r}; possible are auto, nccl (GPUs) and gloo (CPU)")
    if name == "nccl" and device.type != "cuda" and world_size > 1:
        raise ValueError(f"backend 'nccl' needs GPUs, the device is {device.type}: set --backend=gloo")
    has_nccl = dist.is_nccl_available()
    if name == "nccl" and not has_nccl and world_size > 1:
        raise ValueError("backend is 'nccl', but this PyTorch has no NCCL: set --backend=gloo or --backend=auto")
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and has_nccl and name != "gloo" else "gloo"


def use_gpu(device: torch.device) -> None:
    """
    Make a GPU the current device of this process, and run on the cores near it.

    Raises:
        ValueError: the GPU runs no kernel.
    """
    try:
        torch.cuda.set_device(device)
        network.bind_to_gpu(torch.cuda.get_device_properties(device))
        torch.ones(1, device=device)  # runs a kernel
    except RuntimeError as e:
        raise ValueError(about_unusable_gpu(device, str(e))) from e


def about_unusable_gpu(device: torch.device, error: str) -> str:
    """What to do about a GPU that runs no kernel, from the error of the first kernel."""
    if "no kernel image" in error or "invalid device function" in error:  # CUDA's words, and HIP's
        found = torch.cuda.get_device_properties(device)
        kind = found.gcnArchName if torch.version.hip else f"compute capability {found.major}.{found.minor}"
        return (f"{device} ({found.name}) has {kind}, but this PyTorch, {torch.__version__}, has kernels for "
                f"{', '.join(torch.cuda.get_arch_list())} only: install a PyTorch that supports this GPU "
                "(https://pytorch.org/get-started/previous-versions), or set --device=cpu")  # fmt: skip
    return (f"{device} cannot be used ({error.splitlines()[0]}): look at nvidia-smi for other programs on this GPU, or "
            "set --device=cpu")  # fmt: skip


def gpu_identity(device: torch.device) -> list[str]:
    """[name, what distinguishes this GPU from the others of its machine]; [] for other devices."""
    if device.type != "cuda":
        return []
    found = torch.cuda.get_device_properties(device)
    # slices of a GPU may all have the UUID of the GPU; a process sees a single slice
    visible_slice = os.environ.get("CUDA_VISIBLE_DEVICES", "") if "MIG" in found.name else ""
    return [found.name, f"{found.uuid} {visible_slice}".strip()]


def check_gpus(machines: Sequence[tuple[str, str]], gpus: Sequence[list[str]]) -> None:
    """
    Check that no two processes use the same GPU.

    Args:
        machines: (host name, identifier) by rank.
        gpus: gpu_identity by rank.

    Raises:
        ValueError: two processes do.
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
        raise ValueError(f"{', '.join(names[r] for r in ranks)} use the same GPU, {gpu} ({uuid}): start at most "
                         f"{processes} on {host}, or let the processes see different GPUs (CUDA_VISIBLE_DEVICES, "
                         "srun --gpus-per-task=1), or set --device=cpu")  # fmt: skip


def keep_freed_memory() -> None:
    """
    Make the C library keep freed memory for the next step (glibc). By default it returns large pieces to the kernel
    and pays for page faults to get them back: a tenth of a step with 10M parameters on a CPU.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: allocate up to 32 MiB, the maximum, from the heap
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never shrink the heap


def connect(device: str, backend: str, timeout_s: float) -> Ranks:
    """
    Set up this process's device and connect to the other ranks' store, if a launcher started several. Waits for all
    ranks and numbers them by machine. The caller calls init_process_group next.

    Raises:
        ValueError: the device or the backend is not available here, or other ranks are missing after timeout_s.
    """
    rank, world_size, local_rank, local_world_size = rank_variables()
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # exit when torchrun's agent is killed: a worker would otherwise keep writing where the workers of the next
        # attempt write. On other systems run_folder.enter_folder makes its checkpoints not count.
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
        return network.answer_of(partial(network.exchange, store, rank, world_size, key, value), limit_s)

    try:
        with saying_that_it_waits(rank, world_size):
            store = connect_store(timeout_s, rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
            start = network.answer_of(partial(network.meet, store, rank, world_size, timeout_s), limit_s)
        store = dist.PrefixStore(start, store)
        store.set_timeout(timedelta(seconds=timeout_s))
        machines = exchange("machine", network.this_machine())
        order = network.order_by_machine([(name, unique) for name, unique, _ in machines])
        rank, machines = order.index(rank), [machines[r] for r in order]
        os.environ["RANK"] = str(rank)
        started = exchange("launch", (own_agent(), local_world_size))
        agents, local_sizes = zip(*started, strict=True)
        gpus = exchange("gpu", gpu_identity(chosen))
        check_gpus([(name, unique) for name, unique, _ in machines], gpus)
        addresses = exchange("address", network.address_of(os.environ["MASTER_ADDR"]))
        interface, problem = "", ""
        try:
            interface = network.choose_interface(len({(name, unique) for name, unique, _ in machines}) > 1, addresses)
        except ValueError as e:
            problem = str(e)
        if problems := [p for p in exchange("problem", problem) if p]:
            raise ValueError(problems[0])
    except dist.DistError as e:
        raise ValueError(f"cannot reach the other ranks at {store_address()}: {str(e).splitlines()[0]}") from e
    except TimeoutError as e:
        raise ValueError(no_answer(limit_s)) from e
    if chosen.type != "mps":  # GPUs too: with cpu_offload the optimizer runs on the CPU
        network.divide_cores(machines, rank, local_world_size)
    hosts = tuple(name for name, _, _ in machines)
    used = "nccl" if "nccl" in group_backend else f"gloo over {interface}" if interface else "gloo"
    launch = make_launch(agents)
    return Ranks(rank, world_size, chosen, group_backend, store, start, hosts, used, launch, local_sizes)


def connect_store(timeout_s: float, serves: bool = False) -> dist.TCPStore:
    """
    A connection to the store at MASTER_ADDR and MASTER_PORT, which this process serves if `serves`.

    Raises:
        ValueError: nobody serves it within timeout_s, or what listens there does not answer.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not serves:
        wait_for_server(address, port, timeout_s)
    # does not wait for the other ranks: network.meet does, and names those that are missing
    timeout, limit_s = timedelta(seconds=timeout_s), timeout_s + network.ANSWER_S
    connecting = partial(dist.TCPStore, address, port, None, serves, timeout, wait_for_workers=False)
    try:
        return network.answer_of(connecting, limit_s)
    except TimeoutError as e:
        raise ValueError(no_answer(limit_s)) from e


def no_answer(limit_s: float) -> str:
    """What to print if requests to the store do not return."""
    return (f"no answer from {store_address()} within {limit_s:g} s, although something listens there: rank 0 or its "
            "agent is suspended, its machine was cut off, or the port is that of a different program. Check rank 0's "
            f"machine, or choose a different port{network.LEFT_OVER}")  # fmt: skip


def store_address() -> str:
    """Where the store is, for messages."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def check_debug_level() -> None:
    """
    Raise ValueError if DistributedDataParallel cannot be used: torch 2.13 ends with a segmentation fault in its
    constructor, since with DETAIL it wraps process groups. The other layouts work.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise ValueError("TORCH_DISTRIBUTED_DEBUG is DETAIL, with which PyTorch crashes in DistributedDataParallel: "
                         "type export TORCH_DISTRIBUTED_DEBUG=INFO, or set --zero=2")  # fmt: skip


def wait_for_server(address: str, port: int, timeout_s: float) -> None:
    """
    Wait until a process listens at this address. TCPStore waits too, but prints a page of C++ frames at each attempt.

    Raises:
        ValueError: there is none within timeout_s.
    """
    deadline, pause = time.monotonic() + timeout_s, 0.02
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), max(left, 0.1)).close()
            return
        except OSError as e:
            if left <= pause:
                problem = f"cannot reach the other ranks at {store_address()} within {timeout_s:g} s: {e}"
                raise ValueError(f"{problem}{network.LEFT_OVER}") from e
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


@contextmanager
def saying_that_it_waits(rank: int, world_size: int) -> Iterator[None]:
    """Rank 0 prints a note if the block takes long: the other ranks may not exist."""
    text = (f"note: rank 0 of {world_size} waits for the other ranks at {store_address()}, as the environment "
            f"says{network.LEFT_OVER}")  # fmt: skip
    timer = threading.Timer(WAITING_S, print, [text], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave() -> None:
    """Destroy the process group, if there is one. The caller has deleted its references to a wrapped model."""
    gc.collect()  # objects of the model that reference the group can make its destruction hang
    if dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# checks at the start


def check_start(ranks: Ranks, config: dict) -> None:
    """Exit with a message if the ranks were started differently or an all-reduce gives a wrong sum (all ranks)."""
    facts, n = gather_objects(start_facts(config)), ranks.world_size
    with exit_together():
        check_alike(facts)
    if n == 1:
        return
    total = torch.full((), ranks.rank + 1.0, device=ranks.device)
    dist.all_reduce(total)
    with exit_together():
        if total.item() != n * (n + 1) / 2:
            raise ValueError(f"an all-reduce over {n} ranks returned {total.item()}: the network is faulty")


def start_facts(config: dict) -> dict:
    """What should be the same on all ranks besides the data: settings, code, torch; and this machine's host name."""
    repository = Path(__file__).resolve().parent.parent
    sources = sorted([*repository.glob("*.py"), *repository.glob("isogpt/**/*.py")])
    code = zlib.crc32(b"".join(path.read_bytes() for path in sources))
    facts = config | {"torch": torch.__version__, "the code's digest": code, "host": socket.gethostname()}
    weights = Path(config.get("init_from", "").removeprefix("auto:"))
    if (weights / "config.json").exists():  # a model of transformers; checkpoints of a run: run_folder.check_same
        sizes = [(path.name, path.stat().st_size) for path in sorted(weights.glob("*.*"))]
        facts |= {"the weights' digest": zlib.crc32(f"{sizes}{(weights / 'config.json').read_text()}".encode())}
    return facts | {"has_weights": weights.is_dir()}


def check_alike(facts: list[dict]) -> None:
    """
    Compare the start_facts of all ranks: with different ones they would train weights that drift apart. Paths may
    differ between machines, that of a folder in init_from too, and a run name for wandb may contain the time.

    Raises:
        ValueError: they differ.
    """
    may_differ = {"out_dir", "dataset", "host", "alert_command", "has_weights"}
    if all(f.get("has_weights") for f in facts):
        may_differ.add("init_from")
    compared = [k for k in facts[0] if k not in may_differ and not k.startswith("wandb")]
    if differ := [k for k in compared if any(f.get(k) != facts[0][k] for f in facts)]:
        names = rank_names([f["host"] for f in facts])
        values = [f"{k} is " + ", ".join(f"{f.get(k)!r} on {names[r]}" for r, f in enumerate(facts)) for k in differ]
        raise ValueError(f"the ranks were started with different settings: {'; '.join(values)}")
