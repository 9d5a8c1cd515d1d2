"""
The rank variables of torchrun, srun, mpirun and others, and what distinguishes a launch. A restart, as in an
elastic run, continues a launch: see Launch.
"""

import os
import re
import signal
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from isogpt.common import console
from isogpt.common.files import REPOSITORY
from isogpt.launch import network

# The names that mpirun uses for a process's rank, world size, local rank and local world size. Open MPI comes
# before Slurm, since mpirun inside a Slurm job starts its daemons with srun. DeepSpeed, accelerate and
# torch.distributed.launch use torchrun's names.
OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
MPICH = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
# the beginnings of the names of variables that launchers set for each process. Variables of the whole Slurm
# job, such as SLURM_JOB_ID, are not included.
OF_A_PROCESS = re.compile(
    "RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|ISOGPT_STARTED|TORCHELASTIC_|OMPI_|PMI|MPI_LOCAL|"
    "SLURM_(PROCID|LOCALID|NODEID|STEP_)"
)
# what network.choose_interface sets on a single machine. A command that a rank starts does not get it, since
# it may submit a job for several machines
OF_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
# the signals with which people, terminals and batch systems ask a process to stop: docs/fault-tolerance.md
STOP_SIGNALS = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "ALRM", "XCPU", "PWR")


@dataclass(frozen=True)
class Launch:
    """
    Facts that distinguish a launch from a later launch of the same command. All restarts of a launch share
    them.

    torchrun's variables do not suffice. The restart count belongs to one agent, which does not count failures
    that other agents see. The run id is what the user passed as --rdzv-id.
    """

    # torchrun's agents; a restart shares one with the previous start. Ranks other than 0 know only their own
    agents: tuple[str, ...] = ()
    job: str = ""  # id of Slurm's job
    requeued: int = 0  # how many times Slurm has put the job back into the queue

    def continues(self, before: "Launch") -> bool:
        """Whether this start is a restart of the launch that made the start `before`."""
        is_requeued = self.job != "" and self.job == before.job and self.requeued > before.requeued
        return is_requeued or not set(self.agents).isdisjoint(before.agents)


def adopt_launcher_variables() -> None:
    """
    If srun or mpirun started this process, set the environment variables that torchrun would have set; the
    rest of the code reads only those. Changes nothing if RANK is set or this process was started alone.
    """
    env = os.environ
    if "RANK" in env:
        return
    variables = variables_of_mpirun() or variables_of_srun()
    if not variables or variables[1] == "1":  # a single process, perhaps the shell of a job
        return
    *numbers, address, job = variables
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env.update(zip(names, numbers, strict=True))
    env.setdefault("MASTER_ADDR", address)
    # below the range of ephemeral ports, and different for each job
    port = 10000 + zlib.crc32(job.encode()) % 20000
    env.setdefault("MASTER_PORT", str(port))


def variables_of_mpirun() -> tuple[str, ...] | None:
    """
    From mpirun's variables: rank, world size, local rank, local world size, rank 0's address ('' if it is not
    known) and a name of the job; None without mpirun.
    """
    env = os.environ
    names = OPEN_MPI if OPEN_MPI[0] in env else MPICH
    if not set(names) <= env.keys():
        return None
    numbers = [env[name] for name in names]
    if numbers[1] == numbers[3]:  # one machine; mpirun itself is the parent of all its processes
        return *numbers, network.LOOPBACK, str(os.getppid())
    return *numbers, "", env.get("PMIX_NAMESPACE", "")


def variables_of_srun() -> tuple[str, ...] | None:
    """The same from srun's variables; None without srun."""
    env = os.environ
    if not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= env.keys():
        return None
    # the numbers of tasks, such as 2(x3),1 for four nodes, and the nodes, such as rack[1-2]gpu[03-05,9],login
    text, tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "1"), []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [count] * int(times or 1)
    nodes = re.match(r"(\[[^\]]*\]|[^,\[])*", env.get("SLURM_STEP_NODELIST", ""))
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes[0])
    rank, size = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"]
    local_rank = env.get("SLURM_LOCALID", "0")
    local_size = tasks[int(env.get("SLURM_NODEID", 0))]
    address = first if len(tasks) > 1 else network.LOOPBACK
    job = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    return rank, size, local_rank, local_size, address, job


def environment_without_launcher() -> dict[str, str]:
    """The environment for a command that is not a rank of this run, although a rank starts it."""
    others = os.environ.items() - OF_ONE_MACHINE.items()
    return {name: value for name, value in others if not OF_A_PROCESS.match(name)}


def start_workers(nproc: int, script: str) -> None:
    """
    Replace this process by torchrun, with `nproc` workers of `script` on this machine and the same arguments.
    If a launcher has started one process on each machine, as Kubeflow does, the torchruns of all machines
    join. Returns if nproc is 0 or this process is already a worker, since workers call this function, too.

    Raises:
        ValueError: the launcher started a different number of processes, or its variables contradict each
            other.
    """
    if not nproc or console.is_worker_of_nproc():  # a worker of this function; its config may set nproc again
        return
    env = os.environ
    node, nodes, _, started = rank_variables()
    if "RANK" in env and "LOCAL_RANK" in env:
        if nproc != started:
            problem = f"nproc is {nproc}, but the launcher's WORLD_SIZE is {started}: omit --nproc"
            raise ValueError(f"{problem}, or, if no launcher started this process, type {to_start_alone()}")
        return
    # newer versions of Kubeflow set PET_NNODES, PET_NODE_RANK and others, which torchrun reads
    machines = [] if "PET_NNODES" in env else ["--standalone"]
    if "RANK" in env:  # older ones and Volcano number the pods with RANK and WORLD_SIZE
        master = [f"--master_addr={env['MASTER_ADDR']}", f"--master_port={env['MASTER_PORT']}"]
        machines = [f"--nnodes={nodes}", f"--node_rank={node}", *master]
    env["ISOGPT_STARTED"] = str(os.getpid())  # torchrun replaces this process
    console.flush()
    # torchrun would take --nproc as an abbreviation of a torchrun option; configure has made it --nproc=N
    code = f"import sys; sys.path[:1] = [{str(REPOSITORY)!r}]; from isogpt.launch.nproc import main; main()"
    torchrun = [sys.executable, "-c", code, *machines, f"--nproc_per_node={nproc}"]
    arguments = [word for word in sys.argv[1:] if not word.startswith("--nproc=")]
    os.execv(torchrun[0], [*torchrun, script, *arguments])


def stop_signals() -> list[signal.Signals]:
    """
    Return the signals of this system on which a run saves and stops. Not SIGHUP if this process was started
    by nohup, which ignores it.
    """
    names = [f"SIG{name}" for name in STOP_SIGNALS]
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [s for s in known if s.name != "SIGHUP" or signal.getsignal(s) != signal.SIG_IGN]


def rank_variables() -> tuple[int, int, int, int]:
    """
    (rank, world size, local rank, local world size) from torchrun's variables; (0, 1, 0, 1) without a
    launcher.

    Raises:
        ValueError: some of the variables are missing or contradict each other, or there is no such port.
    """
    env = os.environ
    if "RANK" not in env:
        return 0, 1, 0, 1
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: env.get(name, "") for name in names}
    if (port := given["MASTER_PORT"]) and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT is {port!r}: set it to a port that is free, from 1024 to 65535")
    given["LOCAL_RANK"] = env.get("LOCAL_RANK", given["RANK"])
    size = env.get("LOCAL_SIZE", given["WORLD_SIZE"])  # DeepSpeed's name
    given["LOCAL_WORLD_SIZE"] = env.get("LOCAL_WORLD_SIZE", size)
    with suppress(ValueError):  # not a number
        numbers = [int(value) for name, value in given.items() if name != "MASTER_ADDR"]
        rank, world_size, _, local_rank, local_size = numbers
        if 0 <= rank < world_size and 0 <= local_rank < local_size and given["MASTER_ADDR"]:
            return rank, world_size, local_rank, local_size
    listed = ", ".join(f"{name}={value}" for name, value in given.items())
    advice = f"start with torchrun or mpirun -x MASTER_ADDR=HOST, or type {to_start_alone()}"
    raise ValueError(f"the launcher's variables contradict each other ({listed}): {advice}")


def to_start_alone() -> str:
    """What to type so that the next process does not count as a rank: the shell may be a task of srun."""
    names = ("RANK", OPEN_MPI[0], MPICH[0], "SLURM_PROCID")
    return " ".join(["unset", *(name for name in names if name in os.environ)])


def agent_start() -> int | None:
    """
    When torchrun's agent, the parent of this process, was started, in clock ticks since boot; None if this is
    not known.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    facts = network.facts_of_process(os.getppid())
    return int(facts[19]) if facts else None


def own_agent() -> str:
    """
    A name for this process's torchrun agent that no other process has, now or later; '' without an agent.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return f"{network.this_machine()} {os.getppid()} {agent_start()}"


def make_launch(agents: Sequence[str]) -> Launch:
    """The launch that started this process, with the own_agent of each rank that is known."""
    env = os.environ
    job = env.get("SLURM_JOB_ID", "")
    requeued = int(env.get("SLURM_RESTART_COUNT", 0))
    names = sorted(set(agents) - {""})
    return Launch(tuple(names), job, requeued)
