"""
Several machines, each a network namespace with its own name, address and cable (Linux, root, iproute2): with
a master address and with an elastic rendezvous; a cut cable, a machine that fails, one that joins late.
"""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from hosts import HAS_NAMESPACES, Hosts
from runs import FORKED, REPO, TINY, assert_same_curve, children, column, records, steps_in, wait_for

from isogpt.checkpoint.search import find_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_NAMESPACES, reason="needs Linux, root and iproute2"),
]
TORCHRUN = [sys.executable, str(REPO / FORKED), "--nproc_per_node=1"]
MASTER = "--master_addr=10.77.0.1 --master_port=29500"
ELASTIC = "--nnodes=1:2 --max-restarts=20 --rdzv-backend=c10d --rdzv-endpoint=h1:29400 --rdzv-id=hosts "
ELASTIC += "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=30"
JOB = [*TINY, "--gradient_accumulation_steps=6", "--save_interval=10"]


@pytest.fixture
def hosts(work, request):
    def make(number):
        made = Hosts(work, number)
        request.addfinalizer(made.close)
        return made

    return make


def by_address(hosts, args):
    """One torchrun on each host, with the first one's address."""
    nodes = [*TORCHRUN, f"--nnodes={len(hosts.spaces)}", *MASTER.split()]
    script = [str(REPO / "train.py"), *args]
    return {
        host: hosts.start(host, [*nodes, f"--node_rank={i}", *script]) for i, host in enumerate(hosts.spaces)
    }


def world_sizes(folder):
    return [r["world_size"] for r in records(folder) if r.get("event") in ("start", "resume")]


def test_three_hosts_by_master_address_have_the_curve_of_one_process(hosts, trained, work):
    h = hosts(3)
    agents = by_address(h, [*JOB, "--out_dir=out"])
    assert [a.wait(120) for a in agents.values()] == [0] * 3, "".join(map(h.text, h.spaces))
    assert_same_curve(work / "out", trained(["--gradient_accumulation_steps=6"]))
    assert "ranks:   3 = 3 nodes (h1, h2, h3) x 1 on cpu, gloo over eth0 (10.77.0.1)" in h.text("h1")


def test_folders_that_hosts_do_not_share_and_folders_under_different_paths(hosts, zygote, work):
    """A disk of h2 alone, a folder that h2 cannot write to, a different path of the shared folder."""
    h, out = hosts(2), work / "out"
    args = [*TINY, "--max_iters=5", "--save_interval=2", "--zero=1", "--dist_timeout_s=60"]
    out.mkdir()
    (work / "elsewhere").mkdir()

    def train(flags, mount, more=(), code=0):
        """The output of h1 after a run in which only h2's mounts and settings are different."""
        processes = h.train([*args, f"--out_dir={out}", *flags], {"h2": ([*more], mount)})
        assert [p.wait(120) for p in processes.values()] == [code] * 2, h.text("h1") + h.text("h2")
        return h.text("h1")

    read_only = f"mount --bind {out} {out} && mount -o remount,ro,bind {out}"
    assert "Read-only file system" in train([], read_only, code=1)
    assert not list(out.glob("*step_*"))
    zygote.start([*args, "--max_iters=3", f"--out_dir={out}"], work, 2).wait()
    moved = f"mount --bind {out} {work}/elsewhere && mount -t tmpfs none {out}"  # no path of h1 is there
    train(["--init_from=resume"], moved, [f"--out_dir={work}/elsewhere"])
    assert sorted(column(out, "loss")) == [*range(6)] and find_checkpoint(out)[0].step == 6
    said = train(["--init_from=auto"], f"mount -t tmpfs none {out}", code=1)
    assert said.count("error:") == 2 and "Traceback" not in said + h.text("h2")


@pytest.mark.parametrize(("fault", "gone"), [("cut", "h3"), ("power", "h2")])
def test_without_restarts_every_survivor_names_the_failed_host(hosts, work, fault, gone):
    """A cut cable, where the host that is cut off survives too; a host without power."""
    h = hosts(3)
    agents = by_address(h, [*JOB, "--out_dir=out", "--max_iters=100000", "--dist_timeout_s=15"])
    wait_for(lambda: steps_in(work / "out") > 20, 90)
    h.cable(gone, "down") if fault == "cut" else h.kill(gone)
    rank = list(h.spaces).index(gone)
    for host in h.spaces:
        cause = rf"rank {rank} \({gone}\) does not respond, its last position was step"
        said = rf"error: rank \d \({host}\) at step \d+, .*{cause}"
        if host == gone and fault == "cut":
            said = rf"error: rank {rank} .*the store of rank 0 .* 10.77.0.1:29500 does not respond"
        if host != gone or fault == "cut":
            wait_for(lambda: re.search(said, h.text(host)))
    assert all(agents[host].wait(60) for host in h.spaces if host != gone)


def test_a_host_that_joins_does_not_start_the_run_again(hosts, zygote, work):
    """
    The restart count of rank 0's agent stays 0: what resume:STEP chose at the start must not be chosen
    again. The losses are those of a run on one process, also after a worker was killed.
    """
    job = [*JOB, "--learning_rate=1e-4"]
    zygote.start([*job, "--max_iters=25", "--keep_last=0", "--out_dir=out"], work).wait()
    h, out = hosts(2), work / "out"
    chosen = ["--init_from=resume:10", "--max_iters=1000000", "--keep_last=0", "--dist_timeout_s=60"]
    nodes = [*TORCHRUN, *ELASTIC.split(), str(REPO / "train.py"), *job, *chosen, "--out_dir=out"]
    h.start("h1", nodes)
    wait_for(lambda: steps_in(out) > 45, 90)
    abandoned = sorted(path.name for path in out.glob("abandoned_*"))
    assert abandoned == ["abandoned_step_00000020", "abandoned_step_00000026"]
    agent = h.start("h2", nodes)
    wait_for(lambda: world_sizes(out)[-1] == 2, 90)
    at = steps_in(out)
    wait_for(lambda: steps_in(out) > at + 5, 90)
    (worker,) = (pid for pid in children(agent.pid) if "train.py" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(worker, signal.SIGKILL)
    before = len(world_sizes(out))
    wait_for(lambda: len(world_sizes(out)) > before, 90)
    killed = steps_in(out)
    wait_for(lambda: steps_in(out) > killed + 5, 90)
    assert sorted(path.name for path in out.glob("abandoned_*")) == abandoned, h.text("h1")[-3000:]
    starts = [r["iter"] for r in records(out) if r.get("event") in ("start", "resume")]
    assert starts[:2] == [0, 10] and min(starts[2:]) >= 40
    h.close()
    joined = column(out, "loss")
    args = [*job, f"--max_iters={max(joined)}", "--out_dir=one"]
    zygote.start(args, work, env={"OMP_NUM_THREADS": "1"}).wait(400)
    assert_same_curve(work / "one", out)
