"""Devices: what is known of them, how precisely they compute, and the memory of a process."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from runs import REPO, default_plan, script, script_that_fails

from isogpt.launch.device import collectives_timeout
from isogpt.launch.together import is_connection_lost
from isogpt.speed.devices import HARDWARE, find_peak
from isogpt.training import precision

# what drivers call the cards
NAMES = """
h100=NVIDIA H100 80GB HBM3, h100-nvl=NVIDIA H100 NVL, h100-pcie=NVIDIA H100 PCIe, gh200=NVIDIA GH200 480GB
h200=NVIDIA H200, h200-nvl=NVIDIA H200 NVL, b200=NVIDIA B200, a100=NVIDIA A100-SXM4-80GB
a100-40gb=NVIDIA A100-SXM4-40GB, a100-pcie=NVIDIA A100 80GB PCIe, a100-pcie-40gb=NVIDIA A100-PCIE-40GB
a10=NVIDIA A10, a10g=NVIDIA A10G, a6000=NVIDIA RTX A6000, 6000-ada=NVIDIA RTX 6000 Ada Generation
l4=NVIDIA L4, l40=NVIDIA L40, l40s=NVIDIA L40S, t4=Tesla T4, mi300x=AMD Instinct MI300X
v100=Tesla V100-SXM2-32GB, v100-pcie=Tesla V100-PCIE-32GB
3090=NVIDIA GeForce RTX 3090, 4090=NVIDIA GeForce RTX 4090, 5090=NVIDIA GeForce RTX 5090
"""
NAMES = dict(pair.split("=") for pair in NAMES.strip().replace("\n", ", ").split(", "))


GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """What the driver says of the GPU."""
    gpu = SimpleNamespace(capability=(9, 0), gcnArchName="gfx906:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu.name)
    return gpu


def test_a_card_is_known_by_its_name(gpu):
    assert NAMES.keys() == HARDWARE.keys() - {"cpu"}
    for card, gpu.name in NAMES.items():
        assert find_peak(GPU, "bfloat16") == (HARDWARE[card].tflops * 1e12, "data sheet")


@pytest.fixture
def machine(at, gpu):
    """A machine with this GPU, on which bench.py computes nothing."""
    gpu.name, gpu.total_memory = NAMES["h100"], 12 * 10**9
    at.set(torch.cuda, "is_available", lambda: True)
    at.set(torch.cuda, "device_count", lambda: 1)
    at.set(torch.cuda, "set_device", lambda device: None)
    at.set(torch.cuda, "mem_get_info", lambda device: (0, gpu.total_memory))
    return at


PLAN = ["--plan", "--devices=2", "--n_layer=2", "--n_head=2", "--n_embd=64", "--vocab_size=65"]


def test_a_card_in_the_machine_is_planned_with_its_memory(machine):
    here, there = (
        script(machine, "bench.py", [*PLAN, *flags])["result"]["plan"]["plans"]
        for flags in ([], ["--hardware=h100", "--device_memory_gb=12"])
    )
    assert [step["total_s"] for step in here] == [step["total_s"] for step in there] and len(here) > 8


@pytest.mark.parametrize("card, has_effect", [("h100", True), ("t4", False)])
def test_a_plan_for_a_card_without_bfloat16_has_its_stream_in_float32(machine, card, has_effect):
    args = [*PLAN, f"--hardware={card}"]
    whole, half = (
        [step["gb"] for step in script(machine, "bench.py", [*args, *flags])["result"]["plan"]["plans"]]
        for flags in ([], ["--residual_dtype=bfloat16"])
    )
    assert (whole != half) == has_effect


@pytest.mark.parametrize("name", ["A100-SXM4-40GB MIG 1g.5gb", "GeForce RTX 4090 Laptop GPU", "T400"])
def test_a_card_that_is_not_known_is_refused(machine, capsys, gpu, name):
    """Its links are not known. All of a name counts: slices and laptops' GPUs are slower."""
    gpu.name = f"NVIDIA {name}"
    error = script_that_fails(machine, capsys, "bench.py", PLAN).err
    assert f"{name} is not a known card" in error and "choose --hardware= from h100, " in error


def test_a_micro_batch_that_is_not_set_fills_four_fifths_of_the_memory(machine, capsys, gpu):
    def estimate(*args):
        with pytest.raises(SystemExit):
            script(machine, "bench.py", ["--estimate_world_size=1", "--vocab_size=50304", *args])
        text = capsys.readouterr().out
        names, numbers = (line.split() for line in text.splitlines()[-2:])
        return int(re.search(r"micro-batches of (\d+)", text)[1]), float(numbers[names.index("total")])

    sizes = []
    for gpu.total_memory in (10**8, 24 * 10**9, 80 * 10**9, 10**15):
        rows, gb = estimate()
        sizes.append(rows)
        if 1 < rows < 256:
            assert gb <= 0.8 * gpu.total_memory / 1e9 < estimate(f"--batch_size={2 * rows}")[1]
    assert sizes[0] == 1 and sizes[-1] == 256 and sizes == sorted({*sizes})


def test_dtypes_of_gpus(monkeypatch, gpu):
    """
    ROCm reports capabilities too: (9, 0) for an MI50, which multiplies bfloat16 more slowly than float16.
    """
    assert [precision.resolve_dtype(dtype, GPU) for dtype in ("auto", "tf32")] == ["bfloat16", "tf32"]
    gpu.capability = (7, 5)
    assert precision.resolve_dtype("auto", GPU, previous="tf32") == "float16", "a T4"
    gpu.capability = (9, 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert precision.resolve_dtype("auto", GPU) == "float16"
    with pytest.raises(ValueError, match="'tf32' needs an NVIDIA GPU"):
        precision.resolve_dtype("tf32", GPU)
    with pytest.raises(ValueError, match="'float16' cannot be trained on mps"):
        precision.resolve_dtype("float16", torch.device("mps"))
    gpu.gcnArchName = "gfx942:sramecc+:xnack-"
    assert precision.resolve_dtype("auto", GPU) == "bfloat16"


def test_nccl_waits_longer_than_the_watchdog():
    """NCCL's timeout ends the process: the watchdog reports before, whichever group hangs."""
    seconds = [collectives_timeout(60, backend).seconds for backend in ("cpu:gloo,cuda:nccl", "cpu:gloo")]
    assert seconds == [90, 60]
    assert is_connection_lost(RuntimeError("NCCL communicator was aborted on rank 1. Original reason: x"))


FRESH = """
import sys
import torch
from isogpt.data.dataset import open_dataset
from isogpt.data.reader import Reader
from isogpt.parallel.mesh import Mesh
from isogpt.speed.usage import memory_gb
from isogpt.training import precision
sys.path.append("tests")
from runs import default_plan
cpu = torch.device("cpu")
print(memory_gb(cpu))
precision.set_numerics(cpu, "float32", deterministic=True)
import torch._inductor.config as config
print(config.deterministic, torch.utils.deterministic.fill_uninitialized_memory)
data = open_dataset(sys.argv[1], 1024)
shape = {"block_size": 1024, "vocab_size": data.vocab_size}
plan = default_plan(batch_size=64, gradient_accumulation_steps=1, micro_batch=64, model_args=shape)
reader = Reader(data, "random", 1, plan, Mesh(), cpu)
before = memory_gb(cpu)
for split in ("train", "val"):
    list(map(len, reader.evaluation(split, 6400)))
print(memory_gb(cpu) - before)
"""


def test_a_process_that_is_new(tmp_path):
    """
    Its memory is not that of the one that started it, which holds a gigabyte. Deterministic algorithms are
    those of inductor too, which reads its switch when it is first used. The pages of a data set belong to the
    system's cache: a run that reads all of a large file does not take its size.
    """
    for split, tokens in (("train", 2**27), ("val", 2**26)):  # files of zeros take no room on the disk
        (tmp_path / f"{split}.bin").touch()
        os.truncate(tmp_path / f"{split}.bin", 2 * tokens)
    command = [sys.executable, "-c", FRESH, str(tmp_path)]
    run = [sys.executable, "-c", f"import subprocess; held = b'x' * 10**9; subprocess.run({command})"]
    output = subprocess.run(run, cwd=REPO, capture_output=True, text=True)
    memory_gb, switches, read_gb = output.stdout.splitlines()
    assert 0.1 < float(memory_gb) < 0.9 and switches == "True False"
    assert float(read_gb) < 0.1, "of 0.4 GB"


@pytest.fixture
def switches(monkeypatch):
    """The process-wide switches are as they were when the test ends."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, ":4096:8" if name.startswith("CUBLAS") else "1")
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_flash_attention_3_is_used_where_it_fits(monkeypatch, tmp_path, gpu, switches):
    """A stand-in for the package, and PyTorch tries cuDNN no more."""

    def notes(device="cuda", deterministic=False, dtype="bfloat16", dropout=0.0):
        plan = default_plan(dtype=dtype, model_args={"dropout": dropout})
        return precision.set_up(torch.device(device), plan, deterministic, None)

    # on a CPU without bfloat16, a note says so
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"sse2": True, "avx512_bf16": True})
    assert notes() == []
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('made for another PyTorch')")
    monkeypatch.syspath_prepend(tmp_path)
    (note,) = notes()
    assert "FlashAttention-3" in note and "made for another PyTorch" in note
    calls = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", calls.append)
    assert notes("cpu") == notes(dtype="tf32") == notes(dropout=0.1) == []
    assert notes(deterministic=True) == calls == []  # its backward pass may vary
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert "FlashAttention-3" in notes()[0] and calls == ["FA3"]
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    gpu.capability = (10, 0)
    assert notes() == []
