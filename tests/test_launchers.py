"""
Every launcher starts the same training: rank variables, the order of ranks, network interfaces and cores.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from runs import REPO, TINY, accepted, children, column, free_port, wait_for
from torch.distributed import run as torchrun

from configurator import settings_of
from isogpt.launch import launchers, network, process_group
from isogpt.launch.launchers import adopt_launcher_variables, rank_variables, slurm_nodes, start_workers
from isogpt.launch.process_group import Ranks, connect_ranks, rank_names
from isogpt.monitor.sink_alerts import Alerts

FIVE = [*TINY, "--max_iters=4"]
TRAIN = str(REPO / "train.py")
MODULE = [sys.executable, "-m"]
# by name: (the program that must be installed, the command before train.py)
LAUNCHERS = {
    "torchrun": ("torchrun", ["torchrun", "--standalone", "--nproc_per_node=2"]),
    "torch.distributed.run": (None, [*MODULE, "torch.distributed.run", "--standalone", "--nproc_per_node=2"]),
    "torch.distributed.launch": (
        None,
        [*MODULE, "torch.distributed.launch", "--nproc_per_node=2", "--master_port=PORT"],
    ),
    "accelerate": (
        "accelerate",
        [
            "accelerate",
            "launch",
            "--multi_gpu",
            "--num_processes=2",
            "--num_machines=1",
            "--mixed_precision=no",
            "--dynamo_backend=no",
            "--main_process_port=PORT",
        ],
    ),
    "accelerate, config file": ("accelerate", ["accelerate", "launch", "--config_file=accelerate.yaml"]),
    "deepspeed": ("deepspeed", ["deepspeed", "--num_gpus=2", "--master_port=PORT"]),
    "mpirun": ("mpirun", ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]),
    "accelerate, mpirun": ("mpirun", ["accelerate", "launch", "--config_file=mpi.yaml"]),
    "none": (None, [sys.executable]),
}
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: 2
num_machines: 1
machine_rank: 0
main_process_port: PORT
mixed_precision: 'no'
use_cpu: false
"""
OVER_MPI = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_processes: 2
num_machines: 1
machine_rank: 0
main_process_ip: 127.0.0.1
main_process_port: PORT
mixed_precision: 'no'
use_cpu: true
mpirun_config:
  mpirun_hostfile: hostfile
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_launcher_trains_to_the_same_losses(name, zygote, work):
    program, before = LAUNCHERS[name]
    if program and not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    zygote.start([*FIVE, "--out_dir=one"], work).wait()
    port = str(free_port())
    (work / "accelerate.yaml").write_text(ACCELERATE.replace("PORT", port))
    (work / "mpi.yaml").write_text(OVER_MPI.replace("PORT", port))
    (work / "hostfile").write_text("127.0.0.1 slots=2\n")
    own = ["--nproc=2"] if name == "none" else []
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONUNBUFFERED": "1"}
    run = subprocess.run(
        [*(w.replace("PORT", port) for w in before), TRAIN, *FIVE, *own, "--out_dir=out"],
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.count("ranks:   2 = 1 node x 2 on cpu, gloo over lo (127.0.0.1)") == 1, (
        run.stdout + run.stderr
    )
    one, other = column(work / "one", "loss"), column(work / "out", "loss")
    assert one.keys() == other.keys() and len(one) == 5
    assert max(abs(one[s] - other[s]) for s in one) < 1e-5


def variables(monkeypatch, **given):
    """Set these variables of a launcher, and unset all others."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    for name in [*os.environ]:
        if name in names or name.startswith(("SLURM_", "OMPI_", "PMI", "MPI_")):
            monkeypatch.delenv(name)
    for name in names:  # what adopt_launcher_variables sets is undone when the test ends
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_rank_variables_of_each_launcher(monkeypatch):
    ompi = dict(RANK="3", SIZE="4", LOCAL_RANK="1", LOCAL_SIZE="4")
    ompi = {f"OMPI_COMM_WORLD_{k}": v for k, v in ompi.items()}
    variables(monkeypatch, **ompi)
    adopt_launcher_variables()
    assert rank_variables() == (3, 4, 1, 4) and os.environ["MASTER_ADDR"] == "127.0.0.1"
    variables(monkeypatch, **ompi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    with pytest.raises(
        ValueError, match="rank 0's address is not known: start with mpirun -x MASTER_ADDR=HOST"
    ):
        adopt_launcher_variables()
    variables(
        monkeypatch, PMI_RANK="5", PMI_SIZE="8", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="4", MASTER_ADDR="h1"
    )
    adopt_launcher_variables()
    assert rank_variables() == (5, 8, 1, 4) and os.environ["MASTER_ADDR"] == "h1"
    step = dict(
        SLURM_JOB_ID="17", SLURM_STEP_ID="0", SLURM_PROCID="4", SLURM_STEP_NUM_TASKS="5", SLURM_LOCALID="0"
    )
    step |= dict(
        SLURM_NODEID="2", SLURM_STEP_TASKS_PER_NODE="2(x2),1", SLURM_STEP_NODELIST="gpu[07-08],login"
    )
    variables(monkeypatch, **step)
    adopt_launcher_variables()
    assert rank_variables() == (4, 5, 0, 1)
    assert os.environ["MASTER_ADDR"] == "gpu07" and 10000 <= int(os.environ["MASTER_PORT"]) < 30000
    port = os.environ["MASTER_PORT"]
    variables(monkeypatch, **step | {"SLURM_JOB_ID": "18"})
    adopt_launcher_variables()
    assert os.environ["MASTER_PORT"] != port, "two jobs on a machine use different ports"
    # what is typed in the shell of srun --pty; srun, typed in this shell; srun --pty without a shell
    for terminal, parent, is_rank in (
        (True, "bash", False),
        (False, "bash", True),
        (True, "slurmstepd", True),
    ):
        variables(monkeypatch, **step, SLURM_PTY_PORT="1")
        monkeypatch.setattr(launchers, "has_terminal", Mock(return_value=terminal))
        with monkeypatch.context() as only_here:
            only_here.setattr(Path, "read_text", lambda path, name=parent: f"{name}\n")
            adopt_launcher_variables()
        assert ("RANK" in os.environ) == is_rank, (terminal, parent)
    # torchrun under srun: torchrun's variables; the shell of a job: a single process
    variables(
        monkeypatch, **step, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="h1", MASTER_PORT="1"
    )
    adopt_launcher_variables()
    assert rank_variables()[:2] == (0, 2)
    variables(monkeypatch, **step | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    adopt_launcher_variables()
    assert rank_variables() == (0, 1, 0, 1)
    # DeepSpeed's launcher
    deepspeed = dict(
        RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_SIZE="2", MASTER_ADDR="h1", MASTER_PORT="1"
    )
    variables(monkeypatch, **deepspeed)
    adopt_launcher_variables()
    assert rank_variables() == (3, 4, 1, 2)


def test_process_is_bound_to_the_cores_near_its_gpu(monkeypatch, tmp_path):
    bound = []
    monkeypatch.setattr(network, "PCI", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    network.bind_to_gpu(gpu)  # there is no such file, for instance in a container
    (tmp_path / "0000:dc:00.0").mkdir()
    (tmp_path / "0000:dc:00.0" / "local_cpulist").write_text("0-1,5,6-31\n")
    network.bind_to_gpu(gpu)
    assert bound == [{0, 1, 5, 6, 7}]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    network.bind_to_gpu(gpu)
    assert len(bound) == 1, "the launcher has bound it already"


def test_slurm_node_lists():
    assert slurm_nodes("n1,n2", "1(x2)") == ("n1", [1, 1])
    assert slurm_nodes("gpu[03-05,9],login", "2(x3),1") == ("gpu03", [2, 2, 2, 1])
    assert slurm_nodes("a100-[12]", "8") == ("a100-12", [8])
    assert slurm_nodes("rack[1-2]node[03-04,7],login", "1") == ("rack1node03", [1])
    assert slurm_nodes("", "") == ("", [1])


def test_ranks_of_one_machine_are_consecutive():
    a, b = ("a", "1"), ("b", "2")
    assert network.order_by_machine([a, a, b, b]) == [0, 1, 2, 3]
    assert network.order_by_machine([a, b, a, b]) == [0, 2, 1, 3], "mpirun --map-by node"
    assert network.order_by_machine([b, ("b", "other"), b]) == [0, 2, 1], "two machines with the same name"
    ranks = Ranks(0, 5, torch.device("cpu"), "gloo", hosts=("a", "a", "b", "b", "b"))
    assert ranks.topology() == "5 = 2 nodes (a, b) x 2+3"
    assert rank_names(ranks.hosts)[4] == "rank 4 (b)"
    assert Ranks(0, 2, torch.device("cpu"), "gloo", hosts=("a", "a")).topology() == "2 = 1 node x 2"


def test_cores_are_divided_among_the_ranks_that_share_them(monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    shared = [["a", "1", [0, 1, 2, 3]]] * 2 + [["b", "2", [0, 1, 2, 3]]]
    assert [network.divide_cores(shared, rank, 1) for rank in range(3)] == [2, 2, 1]
    bound = [["a", "1", [0, 1]], ["a", "1", [2, 3]]]
    assert network.divide_cores(bound, 1, 2) == 1  # the scheduler has bound each rank to its own cores
    assert threads == [2, 2, 2]
    assert network.divide_cores([["a", "1", [0]]] * 3, 0, 3) == 3
    assert threads[3:] == [1]


def test_settings_that_torchrun_takes_for_abbreviations_of_its_options(capsys):
    """
    torchrun would exit before the script starts. Behind `--` it reads no options; --nproc is instead of
    torchrun.
    """
    refused = set()
    for script in ("train.py", "sample.py", "bench.py"):
        for name in settings_of(REPO / script):
            try:
                torchrun.parse_args(["--standalone", script, f"--{name}=1"])
            except SystemExit:
                refused.add(name)
    assert refused <= {"nproc", "start"}, capsys.readouterr().err  # Python 3.11 refuses both
    command = next(
        line for line in (REPO / "sample.py").read_text().splitlines() if "-- sample.py --start" in line
    )
    parsed = torchrun.parse_args(shlex.split(command.partition("   --")[0])[1:])
    assert (parsed.training_script, parsed.training_script_args) == ("sample.py", ["--start=def main("])


def test_cores_are_divided_among_ranks_with_gpus_too(monkeypatch):
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    monkeypatch.setattr(os, "environ", os.environ | variables)
    monkeypatch.setattr(process_group, "pick_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(process_group, "gpu_identity", lambda device: ["T4", "GPU-1"])
    for where, name in ((process_group, "use_gpu"), (network, "divide_cores")):
        monkeypatch.setattr(where, name, Mock())
    assert connect_ranks("cuda", "auto", 30).device.type == "cuda"
    (machine,), rank, local_world_size = network.divide_cores.call_args.args
    assert (machine[-1], rank, local_world_size) == (network.own_cores(), 0, 1)


def test_interface_is_chosen_or_the_candidates_are_listed(monkeypatch):
    cards = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "docker0": "172.17.0.1"}
    ways = {"10.0.0.1": "10.0.0.7", "h1": "127.0.1.1"}
    monkeypatch.setattr(network, "interfaces", lambda: cards)
    monkeypatch.setattr(network, "address_towards", lambda host: ways.get(host, ""))
    monkeypatch.setattr(network.socket, "gethostname", lambda: "h1")

    def chosen(several, master, given=None, seen=()):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
        monkeypatch.setenv("MASTER_ADDR", master)
        return network.choose_interface(several, [*seen])

    assert chosen(True, "10.0.0.1") == "eth0 (10.0.0.7)" and os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert chosen(False, "h1") == "lo (127.0.0.1)"
    assert chosen(True, "h1", "docker0") == "docker0 (172.17.0.1)"
    ways["10.0.0.7"] = "10.0.0.7"
    assert chosen(True, "h1", seen=["127.0.1.1", "10.0.0.7"]) == "eth0 (10.0.0.7)", (
        "the other ranks know its address"
    )
    with pytest.raises(
        ValueError, match=r"several network interfaces, lo .*docker0 .*set GLOO_SOCKET_IFNAME=eth0"
    ):
        chosen(True, "h1")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME is 'eth9', but h1 has lo"):
        chosen(True, "10.0.0.1", "eth9")
    del cards["docker0"]
    assert chosen(True, "h1") == "eth0 (10.0.0.7)", "it is the only one"
    cards.clear()
    assert chosen(True, "h1") == "", "not Linux: gloo chooses"
    monkeypatch.undo()
    if sys.platform == "linux":
        assert (
            network.interfaces().get("lo") == "127.0.0.1"
            and network.address_towards("127.0.0.1") == "127.0.0.1"
        )


def test_nproc_starts_torchrun_and_contradictions_are_errors(monkeypatch):
    variables(monkeypatch)
    monkeypatch.setenv("ISOGPT_STARTED", "")  # what start_workers sets is undone when the test ends
    monkeypatch.delenv("ISOGPT_STARTED")
    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["train.py", "--nproc=3", "--batch_size=2"])
    start_workers(3, "/x/train.py")
    assert started[0][-2:] == ["/x/train.py", "--batch_size=2"] and "--nproc_per_node=3" in started[0]
    assert os.environ["ISOGPT_STARTED"] == str(os.getpid()), "torchrun replaces this process"
    monkeypatch.setattr(os, "getppid", os.getpid)
    start_workers(7, "/x/train.py")  # in a worker of start_workers, a config may set nproc again
    monkeypatch.setenv("ISOGPT_STARTED", "1")  # left over in a shell
    start_workers(3, "/x/train.py")
    assert len(started) == 2 and started[1] == started[0]
    monkeypatch.delenv("ISOGPT_STARTED")
    start_workers(0, "/x/train.py")
    variables(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1")
    start_workers(2, "/x/train.py")
    assert len(started) == 2
    with pytest.raises(ValueError, match="nproc is 3, but the launcher started 2 processes: omit --nproc"):
        start_workers(3, "/x/train.py")


def test_a_command_that_a_rank_starts_is_no_rank(monkeypatch, tmp_path):
    """
    alert_command's command may start train.py or torch: it inherits no launcher's variables, but a job's
    number.
    """
    ours = dict(
        RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="h1", MASTER_PORT="1"
    )
    ours |= dict(
        GROUP_RANK="0", ROLE_NAME="default", TORCHELASTIC_RUN_ID="x", TORCHELASTIC_USE_AGENT_STORE="True"
    )
    ours |= dict(
        OMPI_COMM_WORLD_RANK="0", PMI_RANK="0", PMIX_NAMESPACE="x", MPI_LOCALRANKID="0", ISOGPT_STARTED="1"
    )
    ours |= dict(
        SLURM_PROCID="0", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2", SLURM_LOCALID="0", LOCAL_SIZE="2"
    )
    variables(monkeypatch, **ours, SLURM_JOB_ID="17", MAIL="me")
    command = f"env > {tmp_path}/env; cat > {tmp_path}/event"
    Alerts({"alert_command": command, "out_dir": "out"}).write({"event": "end"}, "")
    inherited = dict(
        line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line
    )
    assert (
        not ours.keys() & inherited.keys() and inherited["SLURM_JOB_ID"] == "17" and inherited["MAIL"] == "me"
    )
    assert os.environ["RANK"] == "0"


@pytest.mark.parametrize(
    ("rank", "local_rank", "served", "note"),
    [
        ("1", "1", False, ""),  # a rank of this machine has said it
        ("1", "0", False, "rank 1 of 3 on HOST waits for rank 0: nothing listens at 127.0.0.1:PORT"),
        ("0", "0", False, "rank 0 of 3 on HOST waits for rank 0: nothing listens at 127.0.0.1:PORT"),
        ("0", "0", True, "rank 0 of 3 on HOST waits for rank 1, 2. If"),
    ],
)
def test_variables_of_a_launcher_that_has_exited(monkeypatch, capfd, rank, local_rank, served, note):
    """A rank says early what it waits for. The error says what to type, in a sentence without C++ frames."""
    unset = "If no launcher started this process, RANK is left over in the shell: type unset RANK WORLD_SIZE "
    port = str(free_port())
    group = dict(WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_RANK=local_rank)
    monkeypatch.setattr(network, "WAITING_S", 0)
    agent = {} if served else {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables(monkeypatch, RANK=rank, **group)
    monkeypatch.setattr(os, "environ", {**os.environ, **agent})
    problem = f"cannot reach the other ranks at 127.0.0.1:{port}"
    problem = "rank 1, 2 of 3 did not join" if served else problem
    with pytest.raises(ValueError, match=f"^{problem} within 0.5 s.*{unset}"):
        connect_ranks("cpu", "gloo", 0.5)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == bool(note)
    for line in said:
        assert unset in line and line.startswith(
            "note: " + note.replace("HOST", socket.gethostname()).replace("PORT", port)
        )


def test_a_debug_level_with_which_torch_crashes(zygote, work):
    """
    A segmentation fault in DistributedDataParallel (torch 2.13). The other layouts and the level INFO work.
    """
    run = zygote.start([*FIVE, "--out_dir=ddp"], work, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}).wait(
        ok=False
    )
    errors = [line for line in run.text().splitlines() if line.startswith("error: ")]
    assert run.codes == [1, 1] and len(errors) == 1, run.text()
    assert (
        errors[0].startswith("error: TORCH_DISTRIBUTED_DEBUG is DETAIL")
        and "=INFO, or set --zero=2" in errors[0]
    )
    assert not (work / "ddp").exists()
    for level, flag in (("INFO", "--zero=0"), ("DETAIL", "--zero=2"), ("DETAIL", "--pp=2")):
        zygote.start([*FIVE, "--out_dir=out", flag], work, 2, env={"TORCH_DISTRIBUTED_DEBUG": level}).wait()


def test_jobs_that_restart_need_no_login():
    """wandb without a login ends each start of a job: config/train_gpt2.py logs to wandb."""
    places = (
        "cluster/pytorchjob.yaml",
        "cluster/slurm.sh",
        "docs/launchers.md",
        "docs/getting-started.md",
        "README.md",
    )
    for place in places:
        text = (REPO / place).read_text()
        for command in re.findall(
            r"(?:train\.py|slurm\.sh) config/train_gpt2\.py --out_dir[^`&#]*#?[^`&#]*", text
        ):
            assert "--wandb_log=False" in command, f"{place}: {command}"


def test_kubernetes_manifest_has_only_fields_of_the_operator():
    """
    Names as in the CRD of Kubeflow's training-operator 1.9, against which the whole file was checked once.
    """
    job = yaml.safe_load((REPO / "cluster" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, worker = job["spec"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    elastic = {
        "maxReplicas",
        "maxRestarts",
        "metrics",
        "minReplicas",
        "nProcPerNode",
        "rdzvBackend",
        "rdzvConf",
    }
    assert set(spec["elasticPolicy"]) <= elastic | {"rdzvHost", "rdzvId", "rdzvPort", "standalone"}
    assert isinstance(spec["nprocPerNode"], str) and set(worker) == {"replicas", "restartPolicy", "template"}
    assert spec["elasticPolicy"]["minReplicas"] <= worker["replicas"] <= spec["elasticPolicy"]["maxReplicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    volumes = {v["name"] for v in worker["template"]["spec"]["volumes"]}
    assert {v["name"] for v in container["volumeMounts"]} == volumes
    assert container["command"][:2] == ["sh", "-c"]
    for argument in shlex.split(container["command"][2]):
        if argument.startswith("--"):
            assert argument[2:].split("=")[0] in settings_of(TRAIN), argument


def test_slurm_script_passes_only_settings_to_train():
    words = shlex.split((REPO / "cluster" / "slurm.sh").read_text().split('"$train" ')[1].splitlines()[0])
    flags = [word for word in words if word.startswith("--")]
    assert flags and all(flag[2:].split("=")[0] in settings_of(TRAIN) for flag in flags), flags


@pytest.mark.slow
def test_pods_of_the_kubernetes_manifest_train_together(zygote, work):
    """The manifest's command, twice, with the variables that the operator sets in each pod."""
    zygote.start([*FIVE, "--out_dir=one"], work).wait()
    spec = yaml.safe_load((REPO / "cluster" / "pytorchjob.yaml").read_text())["spec"]
    policy, (container,) = (
        spec["elasticPolicy"],
        spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"],
    )
    env = os.environ | {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{c['key']}={c['value']}" for c in policy["rdzvConf"]),
        "PET_NNODES": "2:2",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": "1",
    }
    script = container["command"][2].replace("/runs/gpt2", str(work / "out"))
    script = script.replace("train.py config/train_gpt2.py", f"{TRAIN} {shlex.join(FIVE)}")
    script = script.replace("--dataset=/data/openwebtext", "").replace(
        "torchrun", f"{sys.executable} -m torch.distributed.run"
    )
    command = [*container["command"][:2], script]
    pods = [subprocess.Popen(command, cwd=work, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [pod.communicate(timeout=120)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], texts
    one, other = column(work / "one", "loss"), column(work / "out", "loss")
    assert one.keys() == other.keys() and max(abs(one[s] - other[s]) for s in one) < 1e-5


@pytest.mark.slow
def test_nproc_without_a_launcher(work):
    """An error is printed once; a signal to the launcher makes the run save."""
    command = [sys.executable, TRAIN, *TINY, "--nproc=2", "--out_dir=out"]
    run = subprocess.run([*command, "--zero=7"], cwd=work, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and run.stderr.count("zero is 7") == 1 and run.stderr.count("\n") == 1
    with open(work / "log", "w") as log:
        started = subprocess.Popen([*command, "--max_iters=100000"], cwd=work, stdout=log, stderr=log)
        wait_for(lambda: "iter 20:" in (work / "log").read_text())
        started.terminate()
        started.wait(30)
    assert (work / "out" / "PREEMPTED").exists(), (work / "log").read_text()[-2000:]


@pytest.mark.slow
def test_a_killed_rank_of_nproc_is_named_in_the_last_line(work):
    command = [sys.executable, TRAIN, *TINY, "--nproc=2", "--out_dir=out", "--max_iters=100000"]
    with open(work / "log", "w") as log:
        started = subprocess.Popen(command, cwd=work, stdout=log, stderr=log)
        try:
            wait_for(lambda: "iter 20:" in (work / "log").read_text())
            environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in children(started.pid)}
            (rank_1,) = (pid for pid, variables in environments.items() if b"\0RANK=1\0" in variables)
            os.kill(rank_1, signal.SIGKILL)
            assert started.wait(60) == 1
        finally:
            started.terminate()
    lines = (work / "log").read_text().splitlines()
    assert lines[-1] == "error: rank 1 was ended by SIGKILL", lines[-20:]


LAUNCHED_BY_ACCELERATE = {  # what it sets if nobody chose anything
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "RANK": "0",
}


@pytest.mark.parametrize(
    ("variables", "arguments", "wanted"),
    [
        ({}, [], []),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "false"}, [], ["--zero"]),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}, [], ["--zero", "--cpu_offload"]),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}, ["--layout=auto"], []),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "fp16"},
            ["--zero=1"],
            ["--dtype"],
        ),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, [], ["--gradient_accumulation_steps"]),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_CP_SIZE": "1"}, [], ["--tp"]),
        ({"ACCELERATE_USE_FSDP": "true", "RANK": "1"}, [], []),
    ],
)
def test_what_accelerate_was_told_is_not_dropped_silently(monkeypatch, capsys, variables, arguments, wanted):
    for name, value in (LAUNCHED_BY_ACCELERATE | variables).items():
        monkeypatch.setenv(name, value)
    launchers.print_unapplied_settings(accepted("train.py", *arguments))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(wanted)
    assert [word.strip(",") for line in lines for word in line.split() if word.startswith("--")] == wanted


def test_the_table_of_accelerates_variables_has_the_defaults_of_train_py():
    settings = settings_of(TRAIN)
    assert all(settings[name].default == default for name, default in launchers.ACCELERATE.values())
