"""
What happens on each signal, whoever receives it: the table of docs/fault-tolerance.md, which these tests
check.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from runs import REPO, TINY, children, steps_in, wait_for
from test_launchers import pod

from isogpt.checkpoint.search import newest_checkpoint
from isogpt.launch.launchers import STOP_SIGNALS, stop_signals
from isogpt.monitor.signals import watch_signals

TRAIN = str(REPO / "train.py")
LONG = [*TINY, "--max_iters=100000", "--out_dir=out"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
MPIRUN += ["--mca", "odls_base_sigkill_timeout", "5"]  # as the page advises
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def documented_table():
    """{(signal, receiver): outcome} of the table in the page."""
    page = (REPO / "docs/fault-tolerance.md").read_text()
    lines = re.search(r"^\| signal \|.*\n((?:\|.*\n)+)", page, re.M)[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {(row[0], receiver): cell for row in rows for receiver, cell in zip(head[2:], row[2:])}


TABLE = documented_table()


def test_the_table_has_all_signals_on_which_a_run_stops():
    assert [*dict.fromkeys(name for name, _ in TABLE)] == [name.removeprefix("SIG") for name in STOP_SIGNALS]
    slurm = (REPO / "cluster/slurm.sh").read_text()
    assert re.search(r'^signals="(.*)"', slurm, re.M)[1].split() == [*dict.fromkeys(n for n, _ in TABLE)]


def test_each_signal_is_recorded():
    """Also if nobody reads what is printed on it, and without SIGHUP under nohup."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    stderr, (read, write) = os.dup(2), os.pipe()
    os.close(read)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        os.dup2(write, 2)  # as after a terminal was closed
        for number in stop_signals():
            stop = watch_signals()
            os.kill(os.getpid(), number)
            assert stop.signal == number
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in stop_signals() and signal.SIGTERM in stop_signals()
    finally:
        os.dup2(stderr, 2)
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


def started(receiver, work):
    """
    Start a run; returns (the process that the shell has started, the process that receives the signal, all
    others).
    """
    command, env = [sys.executable, TRAIN, *LONG], os.environ
    if receiver == "`--nproc`":
        command += ["--nproc=2"]
    elif receiver in ("torchrun", "a worker"):
        command = [*TORCHRUN, "--standalone", TRAIN, *LONG]
    elif receiver == "mpirun":
        # a shell that starts pytest with & lets it ignore QUIT, as mpirun then does too
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        command = [*MPIRUN, *command, "--log_interval=100"]  # a longer output would make rank 0 wait
    elif receiver == "a pod":
        command, env = pod(LONG, work / "out", 1)
        command = [*NAMESPACE, *command]
    for program in ("mpirun", "unshare"):
        if command[0] == program and (not shutil.which(program) or os.geteuid()):
            pytest.skip(f"needs {program} and root")
    with open(work / "log", "w") as log:
        process = subprocess.Popen(command, cwd=work, env=env, stdout=log, stderr=log)
    try:
        wait_for(lambda: steps_in(work / "out") > 5 or process.poll() is not None, 120)
        assert process.poll() is None, (work / "log").read_text()[-3000:]
    except BaseException:
        process.kill()
        raise
    pids = descendants(process.pid)
    receives = process.pid
    if receiver == "a pod":
        (receives,) = children(process.pid)  # sh, process 1 of its namespace
    if receiver == "a worker":
        (receives,) = (pid for pid in pids if b"\0RANK=1\0" in environment(pid))
    return process, receives, pids


def descendants(pid):
    """The processes that a process has started, and those that they have started."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def environment(pid):
    """The variables of a process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            return b"\0" + f.read()
    except OSError:
        return b""


def has_ended(pid):
    """Whether a process has ended, although nobody may have waited for it."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in TABLE))
@pytest.mark.parametrize(
    "receiver", [receiver for receiver in dict.fromkeys(who for _, who in TABLE) if receiver != "Slurm job"]
)
def test_a_run_saves_on_each_signal_as_the_table_says(work, receiver, name):
    process, receives, pids = started(receiver, work)
    try:
        os.kill(receives, getattr(signal, f"SIG{name}"))
        process.wait(90)
        wait_for(lambda: all(map(has_ended, pids)), 60)  # the workers may save after their agent has ended
    finally:
        for pid in (process.pid, *pids):
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)
    assert outcome(work / "out") == TABLE[name, receiver], (work / "log").read_text()[-3000:]


def outcome(out):
    """What a run has left: "saved" if it can resume at the step before which it stopped."""
    if not (out / "PREEMPTED").exists():
        return "lost"
    step = json.loads((out / "PREEMPTED").read_text())["iter"]
    stored, reports = newest_checkpoint(out)
    return "saved" if stored and stored.step == step and step > 5 and not reports else "not resumable"
