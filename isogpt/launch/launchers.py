"""
The rank variables of torchrun, srun, mpirun and others, and what distinguishes a launch. A restart, as in an
elastic run, continues a launch: see Launch.
"""

import os
import re
import socket
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isogpt.common import console
from isogpt.common.files import REPOSITORY
from isogpt.launch import network

# The names that mpirun uses for a process's rank, world size, local rank and local world size. Open MPI comes
# before Slurm, since mpirun inside a Slurm job starts its daemons with srun. DeepSpeed, accelerate and
# torch.distributed.launch use torchrun's names.
MPI = {
    "Open MPI's mpirun": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MPICH's mpirun": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
}
# Variables that launchers set for each process. A name that ends in _ stands for all variables that begin
# with it. Variables of the whole Slurm job, such as SLURM_JOB_ID, are not included.
OF_A_PROCESS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ISOGPT_STARTED",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "TORCHELASTIC_",
    "SLURM_STEP_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)
# what `accelerate launch` passes on in variables -> the setting here, and its default
ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": ("dtype", "auto"),
    "ACCELERATE_USE_CPU": ("device", "auto"),
    "ACCELERATE_GRADIENT_CLIPPING": ("grad_clip", 1.0),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", 40),
    "ACCELERATE_USE_FSDP": ("zero", 0),
    "ACCELERATE_USE_DEEPSPEED": ("zero", 0),
    "FSDP_OFFLOAD_PARAMS": ("cpu_offload", False),
    "FSDP_ACTIVATION_CHECKPOINTING": ("activation_checkpointing", "none"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("cpu_offload", False),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("cpu_offload", False),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": ("dp_replicate", 1),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": ("zero", 0),
    "PARALLELISM_CONFIG_TP_SIZE": ("tp", 1),
    "PARALLELISM_CONFIG_CP_SIZE": ("cp", 1),
    "MEGATRON_LM_TP_DEGREE": ("tp", 1),
    "MEGATRON_LM_PP_DEGREE": ("pp", 1),
}
# values with which accelerate leaves a setting open or switches it off
NOT_CHOSEN = ("", "no", "none", "false", "0", "1", "-1", "auto")
CHOSEN_BY_PLAN = ("zero", "cpu_offload", "dp_replicate", "tp", "pp", "cp")  # with layout=auto


@dataclass(frozen=True)
class Launch:
    """
    Facts that distinguish a launch from a later launch of the same command. All restarts of a launch share
    them.

    torchrun's variables do not suffice. The restart count belongs to one agent, which does not count failures
    that other agents see. The run id is what the user passed as --rdzv-id.
    """

    agents: tuple[str, ...] = ()  # torchrun's agents; a restart shares one with the start before
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
    """
    ([rank, world size, local rank, local world size], rank 0's address, job) from mpirun; None without
    mpirun.
    """
    env = os.environ
    launcher = next((name for name in MPI if set(MPI[name]) <= env.keys()), None)
    if not launcher:
        return None
    found = [env[name] for name in MPI[launcher]]
    is_one_machine = found[1] == found[3]
    if not is_one_machine and "MASTER_ADDR" not in env:
        flag = "-x MASTER_ADDR=HOST" if "Open" in launcher else "-genv MASTER_ADDR HOST"
        raise ValueError(
            f"{launcher} started {found[1]} processes, {found[3]} of them on {socket.gethostname()}, but "
            f"rank 0's address is not known: start with mpirun {flag} (HOST: first machine)"
        )
    parent = str(os.getppid()) if is_one_machine else "0"  # mpirun itself, the same for all its processes
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("SLURM_JOB_ID") or parent
    return found, "127.0.0.1", job


def slurm_variables() -> tuple[list[str], str, str] | None:
    """The same from srun; None without srun, and in the shell of `srun --pty` or salloc."""
    env = os.environ
    if (
        is_in_a_shell_of_slurm()
        or not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= env.keys()
    ):
        return None
    address, tasks = slurm_nodes(
        env.get("SLURM_STEP_NODELIST", ""), env.get("SLURM_STEP_TASKS_PER_NODE", "1")
    )
    here = str(tasks[min(int(env.get("SLURM_NODEID", 0)), len(tasks) - 1)])
    found = [env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env.get("SLURM_LOCALID", "0"), here]
    return found, address, f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"


def is_in_a_shell_of_slurm() -> bool:
    """
    Whether a person started this process in the shell of `srun --pty` or salloc. The variable does not tell:
    an `srun` that is typed there passes it on to its tasks. But Slurm gives a terminal only to the first task
    of `srun --pty`, here the shell, and slurmstepd is the parent of each task.
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
    """
    The first name in Slurm's list of nodes, 'gpu[03-05,9],login', and the tasks of each node, '2(x3),1'.
    """
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.match(r"(\[[^\]]*\]|[^,\[])*", nodes)[0])
    counts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in tasks.split(",")]
    return first, [int(c[1]) for c in counts if c for _ in range(int(c[2] or 1))] or [1]


def start_workers(nproc: int, script: str) -> None:
    """
    Replace this process by torchrun, with `nproc` workers of `script` on this machine and the same arguments.
    Returns if nproc is 0 or a launcher has started this process: the workers come here, too.

    Raises:
        ValueError: the launcher started a different number of processes.
    """
    if not nproc or console.is_worker_of_nproc():  # a worker of this function; its config may set nproc again
        return
    if "RANK" in os.environ:
        if nproc != (started := rank_variables()[3]):
            raise ValueError(f"nproc is {nproc}, but the launcher started {started} processes: omit --nproc")
        return
    os.environ["ISOGPT_STARTED"] = str(os.getpid())  # torchrun replaces this process
    sys.stdout.flush()
    # torchrun would take --nproc as an abbreviation of a torchrun option; configure has made it --nproc=N
    code = f"import sys; sys.path[:1] = [{str(REPOSITORY)!r}]; from isogpt.launch.nproc import main; main()"
    torchrun = [sys.executable, "-c", code, "--standalone", f"--nproc_per_node={nproc}"]
    arguments = [word for word in sys.argv[1:] if not word.startswith("--nproc=")]
    os.execv(torchrun[0], [*torchrun, script, *arguments])


def print_unapplied_settings(config: Mapping[str, object]) -> None:
    """
    Warn of what was set in `accelerate launch`, where the run's setting still has its default (printed by
    rank 0).
    """
    planned = CHOSEN_BY_PLAN if config["layout"] == "auto" else ()
    dropped, settings = [], []
    for variable, (name, default) in ACCELERATE.items():
        value = os.environ.get(variable, "")
        if value.lower() not in NOT_CHOSEN and config[name] == default and name not in planned:
            dropped.append(f"{variable}={value}")
            settings.append(f"--{name}")
    if dropped and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: train.py does not read accelerate's {', '.join(dropped)}: set "
            f"{', '.join(dict.fromkeys(settings))} (docs/migrating.md)",
            file=sys.stderr,
            flush=True,
        )


def rank_variables() -> tuple[int, int, int, int]:
    """
    (rank, world size, local rank, local world size) from torchrun's variables; (0, 1, 0, 1) without a
    launcher.

    Raises:
        ValueError: some of the variables are missing or contradict each other.
    """
    if "RANK" not in os.environ:
        return 0, 1, 0, 1
    if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"RANK is set but {', '.join(missing)} is not: no launcher started this process, and "
            f"RANK={os.environ['RANK']} is left over in the shell. Type unset RANK, or start with torchrun"
        )
    local_size = os.environ.get("LOCAL_SIZE", os.environ["WORLD_SIZE"])  # LOCAL_SIZE is DeepSpeed's name
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
    """
    When torchrun's agent, the parent of this process, was started, in clock ticks since boot; None: not
    known.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError, ValueError, IndexError):  # there is no /proc
            return int(Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[19])
    return None


def own_agent() -> str:
    """
    A name of this process's torchrun agent, unique among all processes, also over time; '' without an agent.
    """
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
