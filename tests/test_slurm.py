"""
Slurm (Debian's slurm-wlm and munge) with two nodes on this machine: srun, preemption, time limit, scancel.
"""

import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing

import pytest
from runs import FORKED, REPO, TINY, assert_same_curve, column, free_port, records, steps_in, wait_for
from test_monitor import events
from test_signals import NAMES

PARTS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
MISSING = [part for part in PARTS if not shutil.which(part)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING} (apt-get install slurm-wlm munge)"),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid(), reason="needs Linux and root"),
]
CONF = """
ClusterName=iso
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
{nodes}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=25 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=9 State=UP
PartitionName=wide Nodes=ALL State=UP
"""
NODE = "NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=4000"
NODES = [f"n{number}" for number in range(1, len(NAMES) + 1)]  # as many as signals


class Slurm:
    def __init__(self, folder):
        self.folder, self.daemons = folder, []
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def begin(self):
        """Start the daemons, and wait for the nodes."""
        folder = self.folder
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for parent in [folder, *folder.parents][:-2]:  # munged requires these permissions
            parent.chmod(0o755)
        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
        files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
        self.start(["munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in files.items())], folder)
        wait_for((folder / "munge.socket").exists)
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(NODE.format(node=node, host=host, port=free_port()) for node in NODES)
        conf = CONF.format(folder=folder, host=host, port=free_port(), nodes=nodes)
        (folder / "slurm.conf").write_text(conf)
        self.start(["slurmctld", "-D", "-i"], folder)
        for node in NODES:
            self.start(["slurmd", "-D", "-N", node], folder)
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%t %D", "-p", "wide") == f"idle {len(NODES)}", 60)

    def start(self, command, folder):
        log = open(folder / f"{command[0]}.out", "a")
        self.daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=folder))

    def ask(self, *command, cwd=None, **env):
        """What a command of Slurm prints."""
        run = subprocess.run(command, cwd=cwd, env=self.env | env, capture_output=True, text=True)
        assert run.returncode == 0 or command[0] not in ("sbatch", "srun"), run.stdout + run.stderr
        return run.stdout.strip()

    def submit(self, work, out, *args, steps, **env):
        """
        Submit cluster/slurm.sh on both nodes with TINY; returns the job's number. Its interpreter takes the
        options of torchrun, as if it were `python -m torch.distributed.run`, and forks its workers.
        """
        python = work / out / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {REPO / FORKED} "$@"\n')
        python.chmod(0o755)
        env |= {"PYTHON": str(python), "TRAIN": str(REPO / "train.py"), "HEAD": "127.0.0.1"}
        script = str(REPO / "cluster/slurm.sh")
        command = ["sbatch", "--parsable", *(args or TWO), script, *TINY]
        command += [f"--max_iters={steps}", "--lr_decay_iters=1500", f"--out_dir={out}"]
        return self.ask(*command, cwd=work, **env)

    def state(self, job):
        return self.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T") or "GONE"

    def close(self):
        self.ask("scancel", "--full", "--user=root")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(30)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with closing(Slurm(tmp_path_factory.mktemp("slurm"))) as cluster:
        cluster.begin()
        yield cluster


TWO = ["--nodes=2", "-p", "low"]


def log_of(work, job):
    return (work / f"slurm-{job}.out").read_text()


def test_a_preempted_job_is_requeued_and_has_the_losses_of_an_uninterrupted_run(slurm, trained, work):
    job, out = slurm.submit(work, "out", steps=800), work / "out"
    wait_for(lambda: steps_in(out) > 10, 120)
    command = ["sbatch", "--parsable", "--nodes=2", "-p", "high", "-o", str(work / "urgent")]
    urgent = slurm.ask(*command, "--wrap=hostname")
    wait_for(lambda: slurm.state(urgent) in ("COMPLETED", "GONE"), 120)
    stopped = events(out)
    assert "preempted" in stopped and "end" not in stopped, log_of(work, job)
    wait_for(lambda: slurm.state(job) in ("COMPLETED", "FAILED", "GONE"), 240)
    assert events(out)[-1] == "end" and "resume" in events(out), log_of(work, job)
    assert {r["world_size"] for r in records(out) if r.get("event") in ("start", "resume")} == {2}
    assert_same_curve(out, trained(["--max_iters=800", "--lr_decay_iters=1500"]))


def test_srun_time_limit_and_scancel(slurm, trained, work):
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, str(REPO / "train.py"), *TINY]
    # only Slurm knows the names n1 and n2
    printed = slurm.ask(*srun, "--out_dir=srun", cwd=work, MASTER_ADDR="127.0.0.1")
    assert "ranks:   2 = " in printed and printed.count("iter 8:") == 1
    assert_same_curve(work / "srun", trained([]))

    # a minute, of which 25 seconds are for saving: the job stops itself and is requeued until it is done
    job, out = slurm.submit(work, "limit", "--time=1", *TWO, steps=100000, SAVING="25"), work / "limit"
    wait_for(lambda: (out / "PREEMPTED").exists(), 240)
    assert "resume" not in events(out)
    wait_for(lambda: "resume" in events(out), 240)
    # scancel: the job saves and is not requeued
    at = steps_in(out)
    wait_for(lambda: steps_in(out) > at + 5, 60)
    slurm.ask("scancel", job)
    wait_for(lambda: slurm.state(job) in ("CANCELLED", "GONE"), 60)
    last = max(column(out, "loss"))
    assert events(out)[-1] == "preempted" and (out / f"step_{last + 1:08d}").is_dir(), log_of(work, job)


def test_each_signal_to_a_job(slurm, work):
    """
    To the tasks of srun, or only to the script: the job saves, is requeued and resumes. SIGTERM is scancel's.
    All at the same time, a job for each, since Slurm takes its time.
    """
    names = [name for name in NAMES if name != "TERM"]
    signals = [*zip(names, itertools.cycle([[], ["--batch"]])), ("USR1", [])]  # the usual one in both ways
    jobs = {}
    for number, (name, flags) in enumerate(signals):
        job = slurm.submit(work, f"out{number}", "--nodes=1", "-p", "wide", steps=1000000)
        jobs[job] = name, flags, work / f"out{number}"
    for job, (name, flags, out) in jobs.items():
        wait_for(lambda out=out: steps_in(out) > 5, 300)
        number = int(getattr(signal, f"SIG{name}"))  # scancel does not know the name PWR
        slurm.ask("scancel", *flags, f"--signal={number}", job)
    for job, (name, _, out) in jobs.items():
        wait_for(lambda out=out: "preempted" in events(out), 120)
        (stop,) = (r for r in records(out) if r.get("event") == "preempted")
        wait_for(lambda out=out: "resume" in events(out), 240)
        resumed = next(r["iter"] for r in records(out) if r.get("event") == "resume")
        assert stop["reason"] == f"SIG{name}" and resumed == stop["iter"] > 5, log_of(work, job)
        slurm.ask("scancel", job)
    for job in jobs:
        wait_for(lambda job=job: slurm.state(job) in ("CANCELLED", "GONE"))


def test_the_tasks_of_an_array_job_train_each_run_of_a_sweep_once(slurm, work):
    sweep = [sys.executable, str(REPO / "tests/forked_sweep.py"), *TINY]
    sweep += ["--max_iters=2", "--seed=1,2,3", "--out_dir=out"]
    command = ["sbatch", "--parsable", "--array=0-1", "-p", "low", "-o", f"{work}/task%a.txt"]
    job = slurm.ask(*command, "--wrap", f"srun {shlex.join(sweep)}", cwd=work)
    wait_for(lambda: slurm.ask("squeue", "-h", "-j", job) == "", 240)
    texts = [(work / f"task{task}.txt").read_text() for task in (0, 1)]
    assert [text.count("start  ") for text in texts] == [2, 1], texts
    for seed in (1, 2, 3):
        first, *_, last = events(work / "out" / f"seed={seed}")
        assert (first, last) == ("start", "end"), texts
