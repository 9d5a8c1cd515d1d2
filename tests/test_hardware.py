"""Devices: what is known of them, how precisely they compute, and the memory of a process."""

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from runs import REPO, default_plan

from isogpt.launch import signals
from isogpt.launch.device import collectives_timeout
from isogpt.launch.signals import Stop
from isogpt.launch.together import is_connection_lost
from isogpt.nn import kernels
from isogpt.parallel import context, mesh
from isogpt.speed.devices import HARDWARE, changed_hardware, hardware_of
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
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return gpu


def plan_for(card):
    return hardware_of(card, GPU, "bfloat16", 4)


@pytest.mark.parametrize("card", [card for card in HARDWARE if card != "cpu"])
def test_a_card_in_the_machine_is_planned_like_that_of_its_name(gpu, card):
    usual = plan_for(card)
    gpu.name, gpu.total_memory = NAMES[card], usual.memory_gb * 1e9
    assert plan_for("this") == usual == replace(HARDWARE[card], per_node=4)
    gpu.total_memory = 12e9
    assert plan_for("this") == replace(usual, memory_gb=12)


@pytest.mark.parametrize("name", ["A100-SXM4-40GB MIG 1g.5gb", "GeForce RTX 4090 Laptop GPU", "T400"])
def test_a_card_that_is_not_known_is_refused(gpu, name):
    """Its links are not known. All of a name counts: slices and laptops' GPUs are slower."""
    gpu.name = f"NVIDIA {name}"
    with pytest.raises(ValueError, match=f"{name} is not a known card: .* from h100, .*, cpu, this; to desc"):
        plan_for("this")


def test_a_card_that_is_described():
    """It reaches the fraction of its peak that the card of this name reaches."""
    card = HARDWARE["4090"]
    assert changed_hardware(card, 0, 48, 100) == replace(card, memory_gb=48, tflops=100)
    assert changed_hardware(card, 10, 0, 100).matmul == 0.85 * 100e12
    assert changed_hardware(card, 10, 0, 0).network.bytes_per_s == pytest.approx(1.25e9, rel=0.1)


def test_dtypes_of_gpus(monkeypatch, gpu):
    """
    ROCm reports capabilities too: (9, 0) for an MI50, which multiplies bfloat16 more slowly than float16.
    """
    assert precision.best_dtype(GPU) == "bfloat16" and precision.resolve_dtype("tf32", GPU) == "tf32"
    gpu.capability = (7, 5)
    assert precision.resolve_dtype("auto", GPU, previous="tf32") == "float16", "a T4"
    gpu.capability = (9, 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert precision.best_dtype(GPU) == "float16"
    with pytest.raises(ValueError, match="'tf32' needs an NVIDIA GPU"):
        precision.resolve_dtype("tf32", GPU)
    with pytest.raises(ValueError, match="'float16' cannot be trained on mps"):
        precision.resolve_dtype("float16", torch.device("mps"))
    gpu.gcnArchName = "gfx942:sramecc+:xnack-"
    assert precision.best_dtype(GPU) == "bfloat16"


@pytest.mark.parametrize("backend, seconds", [("cpu:gloo,cuda:nccl", 90), ("cpu:gloo", 60)])
def test_nccl_waits_longer_than_the_watchdog(monkeypatch, backend, seconds):
    """NCCL's timeout ends the process: the watchdog reports before, whichever group hangs."""
    limits = []
    monkeypatch.setattr(mesh, "_set_pg_timeout", lambda timeout, group: limits.append(timeout))
    monkeypatch.setattr(mesh, "get_backend_config", lambda group: backend)
    mesh.Mesh(timeout_s=60).limit("group")
    assert limits == [timedelta(seconds=seconds)] == [collectives_timeout(60, backend)]
    assert is_connection_lost(RuntimeError("NCCL communicator was aborted on rank 1. Original reason: x"))


def test_the_loss_scale_is_kept_where_the_gradients_are():
    """
    With cpu_offload the loss is on a GPU, of which no number arrives without a wait: here the device meta.
    """
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.full((2,), 3 * 65536.0)
    scaler = precision.make_scaler("float16", p.device)
    assert scaler.scale(torch.ones((), device="meta")).is_meta
    scaler.unscale_(torch.optim.AdamW([p]))
    assert p.grad.tolist() == [3, 3] and scaler.get_scale() == 65536
    assert not precision.make_scaler("bfloat16", p.device).is_enabled()


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


def test_flash_attention_3_is_used_where_it_fits(monkeypatch, gpu):
    """A stand-in for the package, and PyTorch tries cuDNN no more."""
    calls, package = [], "flash_attn_interface"
    monkeypatch.setattr(precision, "set_numerics", lambda *_: None)
    monkeypatch.setitem(sys.modules, package, None)  # it cannot be imported
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", calls.append)

    def notes(device="cuda", deterministic=False, dtype="bfloat16", dropout=0.0):
        plan = default_plan(dtype=dtype, model_args={"dropout": dropout})
        return precision.set_up(torch.device(device), plan, deterministic, None)

    assert notes() == []
    monkeypatch.setattr(precision.importlib.util, "find_spec", package.__eq__)
    (note,) = notes()
    assert note.startswith("FlashAttention-3 is installed, but cannot be used: ModuleNotFoundError: ")
    monkeypatch.setattr(precision.attention, "activate_flash_attention_impl", calls.append)
    assert notes("cpu") == notes(dtype="tf32") == notes(dropout=0.1) == []
    assert notes(deterministic=True) == calls == []  # its backward pass may vary
    assert notes() == ["attention uses FlashAttention-3"] and calls == ["FA3", False]
    gpu.capability = (10, 0)
    assert notes() == []


def test_attention_with_dropout_does_not_run_on_cudnn(monkeypatch):
    """It would drop another share of the weights. Nor does the attention of cp."""
    used, choose = [], kernels.attention_backends

    def attention(q, *args, **kwargs):
        used.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return q

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", attention)
    for module in (kernels, context):
        monkeypatch.setattr(module, "attention_backends", lambda p, _, *grows: choose(p, GPU, *grows))
    q = torch.zeros(1, 8, 2, 4)
    for dropout in (0.0, 0.1):
        kernels.causal_attention(q, q, q, dropout)
        context.attend_chunk(q, q, q, None, dropout)
    # nor that of single tokens with a growing cache, for each length of which cuDNN would make a plan
    cache = kernels.KVCache(rows=1, size=16)
    for tokens in (q, q[:, :1], q[:, :1]):
        kernels.causal_attention(tokens, tokens, tokens, 0.0, cache)
    assert used == [(True, True)] * 2 + [(False, True)] * 2 + [(True, True)] + [(False, True)] * 2


def test_an_evaluation_on_a_gpu_asks_for_a_stop(monkeypatch):
    """Each time, it waits for the queued work."""
    asked, stop = [], Stop()
    monkeypatch.setattr(
        signals, "gather_number", lambda code, _: asked.append(code) or torch.tensor([code, 0])
    )
    assert not any(stop.in_evaluation(i, GPU, 0.0) for i in range(16)) and asked == [0, 0]
    stop.signal = 15
    assert not stop.in_evaluation(17, GPU, 0.0) and stop.in_evaluation(24, GPU, 0.0) and stop.agreed == 15
