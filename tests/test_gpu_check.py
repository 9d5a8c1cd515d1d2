"""gpu_check.py: with small sizes on a CPU, so that it does not rot; on GPUs where there are some."""

import json
import subprocess
import sys

import pytest
import torch
from runs import REPO


def check(tmp_path, *args):
    command = [sys.executable, str(REPO / "measure/gpu_check.py"), f"--out={tmp_path}", *args]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return json.loads((tmp_path / "table.json").read_text())


@pytest.mark.slow
def test_checks_of_one_process_run_on_a_cpu(tmp_path):
    lines = check(tmp_path, "--device=cpu", "ceilings", "gradients", "curve", "resume", "exact", "parts")
    assert len(lines) > 8 and sum(line["passed"] is True for line in lines) > 3


@pytest.mark.extra
def test_every_check_runs_on_a_cpu(tmp_path):
    lines = check(tmp_path, "--device=cpu")
    assert len(lines) > 25 and sum(line["passed"] is True for line in lines) > 15


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_check_passes_on_a_gpu(tmp_path):
    check(tmp_path)
