"""
Every launcher starts the same training: rank variables, the order of ranks, the network and cores.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import FORKED, REPO, TINY, assert_same_curve, children, column, free_port, listening, same
from torch.distributed import run as torchrun

from configurator import settings_of
from isogpt.launch import network, nproc
from isogpt.launch.launchers import adopt_launcher_variables, rank_variables, start_workers

FIVE = "--max_iters=4"
TRAIN = str(REPO / "train.py")
# what stands before train.py
LAUNCHERS = {
    "torchrun": "torchrun --standalone --nproc_per_node=2",
    "accelerate": "accelerate launch --multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no "
    "--dynamo_backend=no --main_process_port=PORT",
    "deepspeed": "deepspeed --num_gpus=2 --master_port=PORT",
    "mpirun": "mpirun --allow-run-as-root --oversubscribe -n 2 PYTHON",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_launcher_trains_to_the_same_losses(name, trained, work):
    port = str(free_port())
    command = LAUNCHERS[name].replace("PORT", port).replace("PYTHON", sys.executable).split()
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    command += [TRAIN, *TINY, FIVE, "--out_dir=out"]
    run = subprocess.run(command, cwd=work, env=env, timeout=400, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("ranks:   2 = 1 node x 2 on cpu, gloo over lo (127.0.0.1)") == 1, run.stdout
    assert_same_curve(work / "out", trained([FIVE]))


OMPI = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
OMPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OMPI.items()}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {"JOB_ID": "17", "STEP_ID": "0", "PROCID": "4", "STEP_NUM_TASKS": "5", "LOCALID": "0", "NODEID": "2"}
SLURM |= {"STEP_TASKS_PER_NODE": "2(x2),1", "STEP_NODELIST": "a100-[07-08],login"}
SLURM = {f"SLURM_{name}": value for name, value in SLURM.items()}
ONE_NODE = {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_LOCALID": "4"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h1", "MASTER_PORT": "1"}
NAMES = (*TORCHRUN, "LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def variables(monkeypatch, given):
    """Set these variables of a launcher, and unset all others."""
    others = [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI", "MPI_"))]
    for name in (*NAMES, *others):
        monkeypatch.setenv(name, "")  # what adopt_launcher_variables sets is undone when the test ends
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_rank_variables_of_each_launcher(monkeypatch):
    """And the ports of Slurm's jobs, of which two may share a machine."""
    ports = set()
    for given, ranks, address in (
        (OMPI, (3, 4, 1, 4), "127.0.0.1"),
        (MPICH | {"MASTER_ADDR": "h1"}, (5, 8, 1, 4), "h1"),
        (SLURM | {"SLURM_JOB_ID": "1"}, (4, 5, 0, 1), "a100-07"),
        (SLURM | {"SLURM_STEP_NODELIST": "n1,n2"}, (4, 5, 0, 1), "n1"),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[1]node[03-04,7],login"}, (4, 5, 0, 1), "rack1node03"),
        (SLURM | ONE_NODE, (4, 5, 4, 5), "127.0.0.1"),
        (SLURM | TORCHRUN, (0, 2, 0, 2), "h1"),  # torchrun under srun
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0, 1), None),  # the shell of a job
        (TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, (3, 4, 0, 2), "h1"),  # DeepSpeed
    ):
        variables(monkeypatch, given)
        adopt_launcher_variables()
        assert rank_variables() == ranks and os.environ.get("MASTER_ADDR") == address
        if ranks[1] == 5:  # a job of Slurm
            ports.add(int(os.environ["MASTER_PORT"]))
    assert len(ports) == 2 and ports < {*range(10000, 30000)}


def test_settings_that_torchrun_takes_for_abbreviations_of_its_options(capsys):
    """torchrun would exit before the script starts; sample.py says to type `--` before a start."""
    refused = set()
    for script in ("train.py", "sample.py", "bench.py"):
        for name in settings_of(REPO / script):
            try:
                torchrun.parse_args(["--standalone", script, f"--{name}=1"])
            except SystemExit:
                refused.add(name)
    assert refused <= {"nproc", "start"}, capsys.readouterr().err  # Python 3.11 refuses both
    parsed = torchrun.parse_args(["--standalone", "--", "sample.py", "--start=A"])
    assert parsed.training_script == "sample.py"


def test_the_interface_is_the_one_that_leads_to_other_machines(monkeypatch):
    """test_hosts.py has several machines."""
    loopback, gloos = "lo (127.0.0.1)", "an interface of its choice"
    for other, given, interface in (
        ("127.0.0.1", "", loopback),  # a single machine
        ("127.0.0.2", "", loopback),  # a different one: NCCL chooses
        ("127.0.0.1", "lo,lo", "lo,lo"),
        ("", "", gloos),  # without IPv4
        ("255.255.255.255", "", gloos),  # no route
    ):
        for name, value in (("GLOO", given), ("NCCL", "")):
            monkeypatch.setenv(f"{name}_SOCKET_IFNAME", value)
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")  # undone when the test ends
        assert network.choose_interface(other) == interface
        assert os.environ["GLOO_SOCKET_IFNAME"] == ("lo" if interface == loopback else given)
        is_alone = interface == loopback and other == "127.0.0.1"
        assert os.environ.get("NCCL_SOCKET_IFNAME") == ("=lo" if is_alone else None)
    for wrong in ("ib7", "^docker"):  # of a different machine; an exclusion, which only NCCL knows
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", wrong)
        found = f"GLOO_SOCKET_IFNAME is '{wrong}', but this machine has "
        with pytest.raises(
            ValueError, match=f"^{re.escape(found)}.*lo.*: set it to one of these, or type un"
        ):
            network.choose_interface()


def command_of(monkeypatch, given, nproc, *arguments):
    """The command by which start_workers replaces a process with these variables; None: it replaces none."""
    variables(monkeypatch, given)
    commands = [None]
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append(words[3:]))
    monkeypatch.setattr(sys, "argv", ["train.py", f"--nproc={nproc}", *arguments])
    start_workers(nproc, "/x/train.py")
    return commands[-1]


PODS = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
TORCHRUNS = [
    ({"SLURM_JOB_ID": "7"}, "--standalone"),
    # Kubeflow numbers the pods, not the processes: one process in each would train without a message
    (PODS, "--nnodes=3 --node_rank=1 --master_addr=a --master_port=7"),
    ({"PET_NNODES": "3", "PET_NODE_RANK": "1"}, ""),  # Kubeflow's trainer: torchrun reads the variables
]


@pytest.mark.parametrize("given, options", TORCHRUNS)
def test_nproc_starts_torchrun(monkeypatch, given, options):
    monkeypatch.setenv("ISOGPT_STARTED", "1")  # left over in a shell
    command = command_of(monkeypatch, given, 3, "--batch_size=2")
    assert command == [*options.split(), "--nproc_per_node=3", "/x/train.py", "--batch_size=2"]
    torchrun.parse_args(command)
    monkeypatch.setattr(os, "getppid", os.getpid)  # torchrun has replaced this process, and started a worker
    assert command_of(monkeypatch, given, 7) is None, "a config may set nproc again"


def test_nproc_under_a_launcher(monkeypatch):
    assert command_of(monkeypatch, {}, 0) is command_of(monkeypatch, TORCHRUN, 2) is None
    with pytest.raises(ValueError, match="nproc is 3, but the launcher's WORLD_SIZE is 2: omit --nproc"):
        command_of(monkeypatch, TORCHRUN, 3)


def test_a_shell_that_is_one_of_many_tasks_is_told_how_to_start_alone(monkeypatch):
    """srun --pty bash in a job of several tasks: `unset RANK` alone would change nothing."""
    variables(monkeypatch, SLURM | ONE_NODE)
    adopt_launcher_variables()
    with pytest.raises(ValueError, match="if no launcher .* type unset RANK SLURM_PROCID$") as problem:
        start_workers(2, "/x/train.py")
    for name in str(problem.value).partition("type unset ")[2].split():
        monkeypatch.delenv(name)
    adopt_launcher_variables()
    assert rank_variables() == (0, 1, 0, 1)


def test_ranks_of_nproc_have_time_to_save_after_a_signal(monkeypatch):
    """torchrun's 30 seconds are less than some steps take; then, nothing was saved, without a message."""
    waits = []
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    monkeypatch.setattr(sys, "argv", ["", "--nproc_per_node=2", "train.py"])

    def start(arguments):
        config, _, _ = torchrun.config_from_args(torchrun.parse_args(arguments))
        waits.append(config.shutdown_timeout)

    monkeypatch.setattr(torchrun, "main", start)
    nproc.main()
    assert waits[0] >= 600


def test_a_machine_without_a_temporary_folder():
    """A container with a read-only file system: torch's import and torchrun ended with tracebacks."""
    code = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc']; "
    code += "import isogpt.launch.torch_import"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    line = r"error: No usable temporary directory found in .*: set TMPDIR to a folder .*\n"
    assert run.returncode == 1 and re.fullmatch(line, run.stderr)


def test_variables_that_are_incomplete(monkeypatch):
    for given in TORCHRUN | {"MASTER_ADDR": ""}, OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}:
        variables(monkeypatch, given)
        adopt_launcher_variables()
        with pytest.raises(ValueError, match="MASTER_ADDR=,.*with torchrun or mpirun -x MASTER_ADDR=HOST"):
            rank_variables()
    # computed from a job's number; of a service of Kubernetes that is called master
    for port in ("70000", "0", "tcp://10.0.0.1:80"):
        variables(monkeypatch, TORCHRUN | {"MASTER_PORT": port})
        with pytest.raises(ValueError, match=f"^MASTER_PORT is '{port}': set it to a port that is free, fr"):
            rank_variables()


def test_a_command_that_a_rank_starts_is_no_rank(zygote, work):
    """
    alert_command's command may start train.py or torch: it inherits no launcher's variables, but a job's
    number, and no interface that leads nowhere from a different machine.
    """
    names = ("GROUP_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "ISOGPT_STARTED")
    of_a_rank = TORCHRUN | OMPI | MPICH | dict.fromkeys((*names, "SLURM_STEP_ID"), "0")
    of_a_rank |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    others = {"SLURM_JOB_ID": "17", "MAIL": "me"}
    command = "--alert_command=env > variables; cat >> told"
    zygote.train(["--max_iters=0", command], work, 2, env=of_a_rank | others)
    inherited = dict(line.split("=", 1) for line in (work / "variables").read_text().splitlines())
    assert others.items() <= inherited.items() and not of_a_rank.keys() & inherited.keys()
    told = [json.loads(line)["event"] for line in (work / "told").read_text().splitlines()]
    assert told == ["start", "end"]


NODE = """#!/bin/sh
case $0 in
    */srun)
        [ "$OMP_PROC_BIND" ] && exit 9
        mkdir -p out && echo "{\\"iter\\": 7, \\"steps\\": $STEPS}" > out/PREEMPTED ;;
    */squeue) date -d "+60 seconds" +%Y-%m-%dT%H:%M:%S ;;
    */scontrol) echo "$@" >> asked ;;
esac
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="slurm.sh needs bash")
def test_slurm_sh_requeues_a_job_that_was_stopped(at):
    """With a fake srun that stops on request, without Slurm."""
    for name in ("srun", "scontrol", "squeue"):
        (at.path / name).write_text(NODE)
        (at.path / name).chmod(0o755)
    slurm = dict(SLURM_SUBMIT_DIR=".", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n1", SLURM_JOB_NUM_NODES="1")
    env = {**os.environ, **slurm, "HEAD": "n1", "PATH": f"{at.path}:{os.environ['PATH']}"}
    env["OMP_PROC_BIND"] = "true"  # would bind torchrun, and with it all ranks, to one core
    command = ["bash", str(REPO / "cluster" / "slurm.sh")]
    run = subprocess.run([*command, "config/train_gpt2.py"], env=env, capture_output=True, text=True)
    assert run.returncode == 2 and "slurm.sh: set the run's folder with --out_dir=FOLDER" in run.stderr
    # a job that is stopped before its first step again and again would be requeued for ever
    for steps, is_requeued in ((1, True), (9, True), (0, True), (1, False)):
        Path("asked").write_text("")
        more = {"SAVING": "5", "STEPS": str(steps)}
        run = subprocess.run([*command, "--out_dir=out"], env=env | more, capture_output=True, text=True)
        assert run.returncode == (0 if is_requeued else 1), run.stderr
        assert run.stdout == "slurm.sh: stopped on request, requeueing the job\n" * is_requeued
        assert Path("asked").read_text() == "requeue 7\n" * is_requeued
    assert run.stderr.count("not requeued: submit it with a longer --time, and") == 1


def pod(args, out, nodes):
    """
    The command and the environment of one of `nodes` pods: the manifest's, with torchrun's workers forked,
    and what the operator sets.
    """
    job = yaml.safe_load((REPO / "cluster/pytorchjob.yaml").read_text())["spec"]
    policy = job["elasticPolicy"]
    (container,) = job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]} | {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{c['key']}={c['value']}" for c in policy["rdzvConf"]),
        "PET_NNODES": f"{nodes}:{nodes}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": "1",
    }
    *shell, script = container["command"]
    for text, here in {
        "/runs/gpt2": str(out),
        "train.py config/train_gpt2.py": f"{TRAIN} {shlex.join(args)}",
        "--dataset=/data/openwebtext": "",
        "torchrun": f"{sys.executable} {REPO / FORKED}",
    }.items():
        script = script.replace(text, here)
    return [*shell, script], os.environ | env


@pytest.mark.slow
def test_pods_of_the_kubernetes_manifest_train_together(trained, work):
    """The manifest's command, twice, with the variables that the operator sets in each pod."""
    command, env = pod([*TINY, FIVE], work / "out", 2)
    pods = [subprocess.Popen(command, cwd=work, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [pod.communicate(timeout=400)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], texts
    assert_same_curve(work / "out", trained([FIVE]))


@pytest.mark.slow
def test_nproc_without_a_launcher(zygote, trained, work):
    """
    The losses are those of one process. An error is printed once; a killed rank is named in the last line;
    all ports are loopback's.
    """
    args = ["--nproc=2", *TINY, "--max_iters=100000", "--out_dir=out"]
    run = zygote.start([*args, "--zero=7"], work, script=FORKED).wait(ok=False)
    assert run.codes == [1] and re.fullmatch("error: zero is 7.*\n", run.text())
    run = zygote.start(args, work, script=FORKED)
    assert run.until(lambda text: "iter 20:" in text, 120)
    assert "ranks:   2 = 1 node x 2 on cpu, gloo over lo (127.0.0.1)" in run.text()
    one, losses = (column(folder, "loss") for folder in (trained(["--max_iters=20"]), work / "out"))
    same(one, {step: losses[step] for step in one}, absolute=1e-5)
    addresses = {address for address, port in listening(run.pids[0])}
    assert addresses == {"127.0.0.1"}, "the store and gloo: no other machine can connect"
    _, rank_1 = children(run.pids[0])
    os.kill(rank_1, signal.SIGKILL)
    run.wait(ok=False)
    assert run.codes == [1] and run.text().endswith("error: rank 1 was ended by SIGKILL\n")
