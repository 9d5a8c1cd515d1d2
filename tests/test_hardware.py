"""Devices: their peaks and utilization, and deterministic algorithms."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from runs import REPO

from isogpt import devices, hardware, mesh, precision
from isogpt.hardware import known_gpu
from isogpt.watchdog import is_connection_lost

# a device's name, its peak, and the entry of devices.HARDWARE for plans
NAMES = [
    ("NVIDIA L4", 121, ""),
    ("NVIDIA L40", 181, ""),
    ("NVIDIA L40S", 362, ""),
    ("NVIDIA A10", 125, ""),
    ("NVIDIA A10G", 70, ""),
    ("NVIDIA A100-SXM4-80GB", 312, "a100"),
    ("NVIDIA A100-SXM4-40GB", 312, "a100"),
    ("NVIDIA A100-PCIE-40GB", 312, ""),
    ("NVIDIA A100 80GB PCIe", 312, ""),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, ""),
    ("NVIDIA H100 80GB HBM3", 989, "h100"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, ""),
    ("NVIDIA H100 PCIe", 756, ""),
    ("NVIDIA H100 NVL", 835, ""),
    ("NVIDIA GH200 480GB", 989, ""),
    ("NVIDIA H200", 989, "h200"),
    ("NVIDIA H200 NVL", 835, ""),
    ("NVIDIA B200", 2250, ""),
    ("NVIDIA RTX A6000", 155, ""),
    ("NVIDIA RTX 6000 Ada Generation", 364, ""),
    ("NVIDIA RTX 5000 Ada Generation", None, ""),
    ("Quadro RTX 6000", None, ""),
    ("NVIDIA GeForce RTX 4090", 165, "4090"),
    ("NVIDIA GeForce RTX 4090 D", None, ""),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None, ""),
    ("NVIDIA GeForce RTX 3090", 71, ""),
    ("NVIDIA GeForce RTX 3090 Ti", None, ""),
    ("Tesla V100-SXM2-16GB", 125, ""),
    ("Tesla V100-PCIE-32GB", 112, ""),
    ("Tesla T4", 65, ""),
    ("NVIDIA T400", None, ""),
    ("NVIDIA A1000", None, ""),
    ("NVIDIA GB2000", None, ""),
    ("NVIDIA GeForce GTX 1080", None, ""),
]


@pytest.mark.parametrize("name, tflops, plan", NAMES)
def test_what_is_known_of_a_device(monkeypatch, name, tflops, plan):
    """All of its name counts: an L40 is not an L4, and an H100 for PCIe is not planned as one with NVLink."""
    gpu = known_gpu(name)
    assert (gpu and gpu.matmul) == (tflops and tflops * 1e12)
    assert (gpu.plan if gpu else "") == plan
    found = SimpleNamespace(name=name, total_memory=40e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(devices, "hardware_here", lambda *_: "measured")
    hw = devices.hardware_of(torch.device("cuda"), "bfloat16", 8)
    if plan:
        usual = devices.HARDWARE[plan]
        assert (hw.memory_gb, hw.matmul, hw.local) == (40, usual.matmul, usual.local)
        assert hw.bytes_per_s == devices.BANDWIDTH * gpu.bytes_per_s
        assert 0.6 < usual.matmul / gpu.matmul < 0.9  # both tables are of the same device
    else:
        assert hw == "measured"


def test_a_planned_device_is_a_known_one():
    """The bandwidth that is planned for --hardware=NAME is that of the device of this name with the most memory."""
    for key in devices.HARDWARE.keys() - {"cpu"}:
        best = max(gpu.bytes_per_s for gpu in hardware.GPUS.values() if gpu.plan == key)
        assert devices.HARDWARE[key].bytes_per_s == devices.BANDWIDTH * best


@pytest.mark.parametrize("has_room", [True, False])
def test_measuring_a_peak_leaves_no_trace_in_the_memory_of_a_step(monkeypatch, has_room):
    gpu, allocated, peak = torch.device("cuda", 0), 5e9, [5e9]

    def matmul(device, dtype):
        peak[0] = allocated + 0.8e9
        if not has_room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1e12

    monkeypatch.setattr(hardware, "measured_matmul", matmul)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    expected = (1e12, "measured matmul") if has_room else (None, "unknown")
    assert hardware.peak_flops(gpu, "float32") == expected
    assert hardware.memory_gb(gpu) == 5


def test_the_gpus_utilization_is_read_every_five_seconds(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 50)
    hardware.read_utilization.cache_clear()
    for second in (100.0, 101.0, 104.9, 105.1):
        monkeypatch.setattr(hardware.time, "monotonic", lambda now=second: now)
        assert hardware.utilization(torch.device("cuda", 0)) == 50
    assert len(asked) == 2
    hardware.read_utilization.cache_clear()


def test_dtypes_of_gpus(monkeypatch):
    """ROCm reports capabilities too: (9, 0) for an MI50, which multiplies bfloat16 more slowly than float16."""
    gpu, found = torch.device("cuda", 0), SimpleNamespace(gcnArchName="gfx906:sramecc+:xnack-")
    capability = [(7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert precision.resolve_dtype("auto", gpu, previous="tf32") == "float16", "a T4"
    capability[0] = (9, 0)
    assert precision.best_dtype(gpu) == "bfloat16" and precision.resolve_dtype("tf32", gpu) == "tf32"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert precision.best_dtype(gpu) == "float16"
    with pytest.raises(ValueError, match="'tf32' needs an NVIDIA GPU"):
        precision.resolve_dtype("tf32", gpu)
    found.gcnArchName = "gfx942:sramecc+:xnack-"
    assert precision.best_dtype(gpu) == "bfloat16"


def test_nccl_waits_longer_than_the_watchdog():
    """NCCL's timeout ends the process: the watchdog reports before, whichever group hangs."""
    assert mesh.collectives_timeout(600, "cpu:gloo,cuda:nccl").total_seconds() == 630
    assert mesh.collectives_timeout(600, "gloo").total_seconds() == 600
    limits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "_set_pg_timeout", lambda timeout, group: limits.append(timeout.total_seconds()))
        patch.setattr(mesh, "get_backend_config", lambda group: group)
        for group in ("cpu:gloo,cuda:nccl", "cpu:gloo"):
            mesh.Mesh(timeout_s=60).limit(group)
    assert limits == [90, 60]
    assert is_connection_lost(RuntimeError("NCCL communicator was aborted on rank 1. Original reason for failure: x"))


def test_the_loss_scale_is_kept_where_the_gradients_are():
    """With cpu_offload the loss is on a GPU, of which no number arrives without a wait: here the device meta."""
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.full((2,), 3 * 65536.0)
    scaler = precision.make_scaler("float16", p.device)
    assert scaler.scale(torch.ones((), device="meta")).is_meta
    scaler.unscale_(torch.optim.AdamW([p]))
    assert p.grad.tolist() == [3, 3] and scaler.get_scale() == 65536
    assert not precision.make_scaler("bfloat16", p.device).is_enabled()


def test_deterministic_means_inductor_too():
    """Inductor reads its switch when it is first used."""
    code = ("import torch; from isogpt import precision; "
            "precision.set_numerics(torch.device('cpu'), 'float32', deterministic=True); "
            "import torch._inductor.config as c; assert c.deterministic; "
            "assert not torch.utils.deterministic.fill_uninitialized_memory; print('yes')")  # fmt: skip
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
