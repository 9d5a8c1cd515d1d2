"""Short forms of scripts in measure/: runs that are killed, and a run over slow links."""

import random
import re
import subprocess
import sys

import pytest
from hosts import HAS_NAMESPACES, ip
from runs import REPO, TINY

sys.path.append(str(REPO / "measure"))
from soak import kill_around_saves


@pytest.mark.slow
def test_kills_do_not_damage_checkpoints(zygote, work):
    """The newest checkpoint is never older than the last complete one."""
    assert kill_around_saves(zygote, work, random.Random(3), kills=8) == 0


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs Linux, root and iproute2")
def test_a_run_over_slow_links(work):
    """The curve is that of one machine, and a step of DDP sends each gradient once."""
    command = [sys.executable, REPO / "measure" / "slow_network.py", "--rate=100mbit", "--hosts=2", "--"]
    command += [*TINY, "--max_iters=5", f"--dataset={work / 'data' / 'tiny'}"]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (megabytes,) = re.findall(r"^6 steps on 2 hosts at 100mbit: .* ([\d.]+) MB sent", run.stdout, re.M)
    losses = [float(loss) for loss in re.search(r"^losses: (.+)$", run.stdout, re.M)[1].split()]
    assert len(losses) == 6 and losses[0] > losses[-1]
    parameters = 65 * 32 + 32 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32
    assert float(megabytes) == pytest.approx(4 * parameters / 1e6, rel=0.05)
    with subprocess.Popen([*command, "--n_head=3"], cwd=work, stderr=subprocess.PIPE, text=True) as failed:
        assert "error: h1: n_embd is 32" in failed.communicate(timeout=300)[1]
    assert failed.returncode == 1
    assert f"iso{failed.pid}" not in ip("netns", "list"), "no hosts are left behind"
