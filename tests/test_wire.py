"""The bytes that each way of parallelism sends are those of the formulas in wire.py (docs/parallelism.md)."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from runs import REPO
from wire import LAYOUTS

HAS_NAMESPACES = (
    sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
)


@pytest.mark.extra
@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs Linux, root, unshare and iproute2")
def test_the_bytes_sent_are_those_of_the_formulas():
    names = [key for key in LAYOUTS if key.endswith("2")] + ["tp 4", "pp 4", "ep2 4"]
    command = [sys.executable, str(REPO / "measure" / "wire.py"), *names]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if "unshare failed" in run.stderr:
        pytest.skip("no network namespace can be made here")
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^(\w+ \d) +([\d,]+) +([\d,]+) ", run.stdout, re.M)
    assert [key for key, *_ in rows] == names, run.stdout
    for key, *numbers in rows:
        formula, counted = (int(number.replace(",", "")) for number in numbers)
        assert counted == pytest.approx(formula, rel=0.02), (key, run.stdout)
