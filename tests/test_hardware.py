"""Devices: their peaks and utilization, and deterministic algorithms."""

import subprocess
import sys

import pytest
import torch
from runs import REPO

from isogpt import hardware
from isogpt.hardware import data_sheet_peak


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 3090", 71),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        ("NVIDIA T400", None),
        ("NVIDIA A1000", None),
        ("NVIDIA GB2000", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_of_a_device(name, tflops):
    """Names are compared as whole words: an L40 is not an L4, an A10G not an A10, an H100 NVL not an H100 SXM."""
    assert data_sheet_peak(name) == (tflops and tflops * 1e12)


def test_the_gpus_utilization_is_read_every_five_seconds(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 50)
    hardware.read_utilization.cache_clear()
    for second in (100.0, 101.0, 104.9, 105.1):
        monkeypatch.setattr(hardware.time, "monotonic", lambda now=second: now)
        assert hardware.utilization(torch.device("cuda", 0)) == 50
    assert len(asked) == 2
    hardware.read_utilization.cache_clear()


def test_deterministic_means_inductor_too():
    """Inductor reads its switch when it is first used."""
    code = ("import torch; from isogpt import precision; "
            "precision.set_numerics(torch.device('cpu'), 'float32', deterministic=True); "
            "import torch._inductor.config as c; assert c.deterministic; print('yes')")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.stdout == "yes\n", done.stderr


def test_memory_of_a_process_is_not_that_of_the_one_that_started_it():
    child = "import torch\nfrom isogpt.hardware import memory_gb\nprint(memory_gb(torch.device('cpu')))"
    run = f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    parent = f"import subprocess, sys\nheld = b'x' * 10**9\n{run}"
    result = subprocess.run([sys.executable, "-c", parent], cwd=REPO, capture_output=True, text=True, check=True)
    assert 0.1 < float(result.stdout) < 0.9


READS_ALL = """
import sys
import torch
from isogpt import loader
from isogpt.hardware import memory_gb
from isogpt.mesh import Mesh

before = memory_gb(torch.device("cpu"))
data = loader.open_dataset(sys.argv[1], 1024)
reader = loader.Reader(data, "random", 1, 1024, 64, Mesh(), 64, data.vocab_size, torch.device("cpu"))
for split in ("train", "val"):
    for _ in reader.evaluation(split, 6400):
        pass
print(memory_gb(torch.device("cpu")) - before)
"""


def test_the_data_set_is_not_counted_as_memory(tmp_path):
    """Its pages belong to the system's cache: a run that reads all of a large file does not take its size."""
    for split, tokens in (("train", 2**27), ("val", 2**26)):  # files of zeros take no room on the disk
        with open(tmp_path / f"{split}.bin", "wb") as file:
            file.truncate(2 * tokens)
    command = [sys.executable, "-c", READS_ALL, str(tmp_path)]
    grown = float(subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout)
    assert grown < 0.1, "of 0.4 GB"
