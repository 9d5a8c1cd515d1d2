"""
A run saves on each signal of docs/fault-tolerance.md, whoever receives it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import FORKED, REPO, TINY, children, steps_in, wait_for
from test_launchers import pod

from isogpt.checkpoint.search import find_checkpoint
from isogpt.launch.launchers import stop_signals

TRAIN = str(REPO / "train.py")
LONG = [*TINY, "--max_iters=100000", "--log_interval=5"]
# with what the page advises
MPIRUN = "mpirun --allow-run-as-root --oversubscribe -n 2 --mca odls_base_sigkill_timeout 5"
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


RECEIVERS = ("a process", "--nproc", "torchrun", "a worker", "mpirun", "a pod")
NAMES = re.search(r'^signals="(.*)"', (REPO / "cluster/slurm.sh").read_text(), re.M)[1].split()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have fewer signals")
def test_slurm_sh_and_the_documentation_have_all_signals_on_which_a_run_stops():
    stops = {number.name for number in stop_signals()} | {"SIGHUP"}  # which nohup ignores
    assert stops == {f"SIG{name}" for name in NAMES}
    page = (REPO / "docs/fault-tolerance.md").read_text().partition("| signal |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([A-Z0-9]+) \|", page, re.M) == NAMES


def test_nohup_protects_a_process():
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals() and signal.SIGTERM in stop_signals()
    signal.signal(signal.SIGHUP, handler)


def has_loaded(pid, library):
    """Whether a process has opened this shared library."""
    maps = Path(f"/proc/{pid}/maps")
    return maps.exists() and library in maps.read_text()


AGENT = "from isogpt.launch.nproc import main; main()"  # what --nproc becomes
IMPORTING = [  # the words of a command, and what it loads early in its imports
    (["train.py"], "libtorch_cpu"),
    (["-c", AGENT, "--standalone", "--nproc_per_node=2", "train.py"], "libtorch_cpu"),
    (["export.py", "out"], "libtorch_cpu"),
    (["data/stdlib_char/prepare.py", "--help"], "_multiarray_umath"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_while_modules_are_imported_ends_a_script_without_a_traceback():
    for words, library in IMPORTING:
        command = [sys.executable, *words]
        with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            wait_for(lambda pid=process.pid, name=library: has_loaded(pid, name))
            process.send_signal(signal.SIGINT)
            assert process.communicate()[0] == b"" and process.returncode == -signal.SIGINT, words


# a shell that starts pytest with & lets it ignore QUIT, as mpirun then does too
EXEC = """
import os, signal, sys
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def started(zygote, receiver, work, out):
    """Start a run; its first process is the one that the shell would start."""
    args = [*LONG, f"--out_dir={out}"]
    if receiver == "a process":
        return zygote.start(args, work)
    if receiver in ("--nproc", "torchrun", "a worker"):
        options = ["--nproc=2"] if receiver == "--nproc" else ["--standalone", "--nproc_per_node=2", TRAIN]
        return zygote.start([*options, *args], work, script=FORKED)
    if receiver == "mpirun":  # a longer output would make rank 0 wait
        command, env = [*MPIRUN.split(), sys.executable, TRAIN, *args, "--log_interval=100"], {}
    else:
        command, env = pod(args, work / out, 1)
        command = [*NAMESPACE, *command]
    if not shutil.which(command[0]) or os.geteuid():
        pytest.skip(f"needs {command[0]} and root")
    return zygote.start(command, work, script="exec.py", repo=work, env=env)


def descendants(pid):
    """The processes that a process has started, and those that they have started."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def has_ended(pid):
    """Whether a process has ended, although nobody may have waited for it."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or " Z " in stat.read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "names", [NAMES[first : first + 3] for first in range(0, len(NAMES), 3)], ids=" ".join
)
@pytest.mark.parametrize("receiver", RECEIVERS)
def test_runs_save_on_each_signal(zygote, work, receiver, names):
    """Three runs at the same time, since launchers spend seconds with waiting."""
    (work / "exec.py").write_text(EXEC)
    runs, pids = {name: started(zygote, receiver, work, name) for name in names}, []
    try:
        for name, run in runs.items():
            wait_for(lambda name=name, run=run: steps_in(work / name) > 5 or run.poll(), 120)
            assert not run.poll(), run.text()
            (receives,) = run.pids
            own = descendants(receives)
            pids += own
            if receiver == "a pod":
                (receives,) = children(receives)  # sh, process 1 of its namespace
            if receiver == "a worker":
                receives = own[-1]
            os.kill(receives, getattr(signal, f"SIG{name}"))
        for run in runs.values():
            run.wait(90, ok=False)
        wait_for(lambda: all(map(has_ended, pids)))  # the workers may save after their agent has ended
    finally:
        for run in runs.values():
            run.kill()
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
    for name, run in runs.items():
        step = json.loads((work / name / "PREEMPTED").read_text())["iter"]
        stored, reports = find_checkpoint(work / name)
        assert stored.step == step > 5 and not reports, run.text()[-3000:]
