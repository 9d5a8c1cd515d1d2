"""Devices: their peaks and utilization, deterministic algorithms, and how often the host waits for a GPU."""

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch
from runs import REPO, default_plan
from torch.utils._python_dispatch import TorchDispatchMode

from isogpt.launch import device as device_module
from isogpt.launch.together import Number, gather_numbers, is_connection_lost
from isogpt.monitor import evaluation, signals
from isogpt.monitor.signals import Stop
from isogpt.nn import kernels
from isogpt.parallel import context, gradients, mesh
from isogpt.parallel import mesh as mesh_module
from isogpt.parallel.mesh import Mesh
from isogpt.speed.clock import Clock
from isogpt.speed.devices import CARDS, HARDWARE, hardware_of
from isogpt.training import precision
from model import GPT, GPTConfig

CPU = torch.device("cpu")

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


@pytest.mark.parametrize("card, name", NAMES.items())
def test_a_card_in_the_machine_is_planned_like_that_of_its_name(monkeypatch, card, name):
    usual = HARDWARE[card]
    found = SimpleNamespace(name=name, total_memory=usual.memory_gb * 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert hardware_of(torch.device("cuda"), "bfloat16", 8) == usual
    found.total_memory = 12e9
    assert hardware_of(torch.device("cuda"), "bfloat16", 8) == replace(usual, memory_gb=12)


def test_each_card_has_a_name():
    assert NAMES.keys() == CARDS.keys() == HARDWARE.keys() - {"cpu"}


@pytest.mark.parametrize(
    "name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA T400"]
)
def test_a_card_that_is_not_known_is_refused(monkeypatch, name):
    """Its links are not known. All of a name counts: slices and laptops' GPUs are slower."""
    found = SimpleNamespace(name=name, total_memory=5e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    with pytest.raises(ValueError, match=f"{name} is not a known card: .* from h100, .*, cpu, this; to desc"):
        hardware_of(torch.device("cuda"), "bfloat16", 8)


def test_dtypes_of_gpus(monkeypatch):
    """
    ROCm reports capabilities too: (9, 0) for an MI50, which multiplies bfloat16 more slowly than float16.
    """
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
    with pytest.raises(ValueError, match="'float16' cannot be trained on mps"):
        precision.resolve_dtype("float16", torch.device("mps"))
    found.gcnArchName = "gfx942:sramecc+:xnack-"
    assert precision.best_dtype(gpu) == "bfloat16"


def test_nccl_waits_longer_than_the_watchdog():
    """NCCL's timeout ends the process: the watchdog reports before, whichever group hangs."""
    assert device_module.collectives_timeout(600, "cpu:gloo,cuda:nccl").total_seconds() == 630
    assert device_module.collectives_timeout(600, "gloo").total_seconds() == 600
    limits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mesh_module, "_set_pg_timeout", lambda timeout, group: limits.append(timeout.total_seconds())
        )
        patch.setattr(mesh_module, "get_backend_config", lambda group: group)
        for group in ("cpu:gloo,cuda:nccl", "cpu:gloo"):
            mesh.Mesh(timeout_s=60).limit(group)
    assert limits == [90, 60]
    assert is_connection_lost(
        RuntimeError("NCCL communicator was aborted on rank 1. Original reason for failure: x")
    )


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
import torch
from isogpt.speed.usage import memory_gb
from isogpt.training import precision
print(memory_gb(torch.device("cpu")))
precision.set_numerics(torch.device("cpu"), "float32", deterministic=True)
import torch._inductor.config as config
print(config.deterministic, torch.utils.deterministic.fill_uninitialized_memory)
"""


@pytest.fixture(scope="module")
def fresh():
    """What a process prints in which torch is new, and which was started by one with a gigabyte."""
    run = f"subprocess.run([sys.executable, '-c', {FRESH!r}], check=True)"
    parent = [sys.executable, "-c", f"import subprocess, sys\nheld = b'x' * 10**9\n{run}"]
    return subprocess.run(parent, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()


def test_deterministic_means_inductor_too(fresh):
    """Inductor reads its switch when it is first used."""
    assert fresh[1] == "True False"


def test_memory_of_a_process_is_not_that_of_the_one_that_started_it(fresh):
    assert 0.1 < float(fresh[0]) < 0.9


def test_flash_attention_3_is_used_where_it_is_installed_and_fits(monkeypatch):
    """A stand-in for the package, and PyTorch tries cuDNN no more."""
    cuda, calls, capability = torch.device("cuda"), [], [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: calls.append(on))
    monkeypatch.setattr(precision.attention, "activate_flash_attention_impl", calls.append)
    plan = default_plan(dtype="bfloat16", model_args={"dropout": 0.0})
    assert precision.use_flash_attention_3(cuda, plan, False) == [] == calls  # not installed
    monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: name == "flash_attn_interface")
    assert precision.use_flash_attention_3(cuda, plan, False) == ["attention uses FlashAttention-3"]
    assert calls == ["FA3", False]
    calls.clear()
    assert precision.use_flash_attention_3(cuda, plan, True) == []  # its backward pass may vary
    assert precision.use_flash_attention_3(CPU, plan, False) == []
    for changes in ({"dtype": "tf32"}, {"model_args": {"dropout": 0.1}}):
        assert precision.use_flash_attention_3(cuda, replace(plan, **changes), False) == []
    capability[0] = 10
    assert precision.use_flash_attention_3(cuda, plan, False) == [] == calls

    def broken(name):
        raise ImportError("undefined symbol: x\nmore")

    capability[0] = 9
    monkeypatch.setattr(precision.attention, "activate_flash_attention_impl", broken)
    said = "FlashAttention-3 is installed, but cannot be used: ImportError: undefined symbol: x"
    assert precision.use_flash_attention_3(cuda, plan, False) == [said] and calls == []


def test_attention_with_dropout_does_not_run_on_cudnn(monkeypatch):
    """It would drop another share of the weights. Nor does the attention of cp."""
    cuda, used = torch.device("cuda"), []

    def backends():
        return torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()

    with kernels.attention_backends(0.0, cuda):
        assert backends() == (True, True)
    with kernels.attention_backends(0.1, cuda):
        assert backends() == (False, True)
    assert backends() == (True, True)
    monkeypatch.setattr(
        kernels.F, "scaled_dot_product_attention", lambda q, *a, **kw: used.append(backends()) or q
    )
    choose = kernels.attention_backends

    def on_gpu(dropout, device, grows=False):
        return choose(dropout, cuda, grows)

    for module in (kernels, context):
        monkeypatch.setattr(module, "attention_backends", on_gpu)
    q = torch.zeros(1, 8, 2, 4)
    for dropout in (0.0, 0.1):
        kernels.causal_attention(q, q, q, dropout)
        context.attend_chunk(q, q, q, None, dropout)
    assert used == [(True, True)] * 2 + [(False, True)] * 2
    # nor that of single tokens with a growing cache, for each length of which cuDNN would make a plan
    used.clear()
    cache = kernels.KVCache(rows=1, size=16)
    for tokens in (8, 1, 1):
        kernels.causal_attention(q[:, :tokens], q[:, :tokens], q[:, :tokens], 0.0, cache)
    assert used == [(True, True)] + [(False, True)] * 2


READS_ALL = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from isogpt.data import dataset
from isogpt.data import reader as reader_module
from isogpt.parallel.mesh import Mesh
from dataclasses import replace
from isogpt.parallel.plan import UNDIVIDED
from isogpt.speed.usage import memory_gb

before = memory_gb(torch.device("cpu"))
data = dataset.open_dataset(sys.argv[2], 1024)
plan = replace(UNDIVIDED, batch_size=64, gradient_accumulation_steps=1, micro_batch=64, shares="equal",
               model_args=dict(block_size=1024, vocab_size=data.vocab_size))
reader = reader_module.Reader(data, "random", 1, plan, Mesh(), torch.device("cpu"))
for split in ("train", "val"):
    for _ in reader.evaluation(split, 6400):
        pass
print(memory_gb(torch.device("cpu")) - before)
"""


def test_the_data_set_is_not_counted_as_memory(zygote, tmp_path):
    """Its pages belong to the system's cache: a run that reads all of a large file does not take its size."""
    for split, tokens in (("train", 2**27), ("val", 2**26)):  # files of zeros take no room on the disk
        with open(tmp_path / f"{split}.bin", "wb") as file:
            file.truncate(2 * tokens)
    (tmp_path / "reads.py").write_text(READS_ALL)
    run = zygote.start([REPO, tmp_path], tmp_path, script="reads.py", repo=tmp_path).wait()
    assert float(run.text()) < 0.1, "of 0.4 GB"


# ------------------------------------------------------------------------------------------------------------
# how often the host waits for a GPU


class Reads(TorchDispatchMode):
    """
    Lists the operators that would wait for a GPU: numbers that the host reads, and copies between devices.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        is_copy = (
            func is torch.ops.aten._to_copy.default
            and (kwargs or {}).get("device", args[0].device) != args[0].device
        )
        if is_copy or func is torch.ops.aten._local_scalar_dense.default:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_norms_of_all_gradients_are_read_together():
    """After a step that was not finite."""
    model = GPT(GPTConfig(8, 16, 1, 2, 8, bias=False), 0)
    model(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))[1].backward()
    with Reads() as reads:
        norms = gradients.gradient_norms(model)
    assert reads.found == []
    # the order in which a norm is summed depends on the threads that are free
    expected = {name: p.grad.double().norm().item() for name, p in model.named_parameters()}
    assert norms == pytest.approx(expected, rel=1e-12)


def test_an_evaluation_reads_both_losses_together(monkeypatch):
    """Its micro-batches are not waited for."""
    calls = []

    def gather_and_count(*args):
        calls.append(args)
        return gather_numbers(*args)

    told = []
    monkeypatch.setattr(evaluation, "gather_numbers", gather_and_count)
    model = GPT(GPTConfig(8, 16, 1, 2, 8, bias=False), 0)
    x, y = torch.zeros(2, 8, dtype=torch.int64), torch.arange(16).view(2, 8)
    read = {"train": [(x, y)], "val": [(x, y), (y, x)]}
    reader = SimpleNamespace(
        device=CPU,
        mesh=Mesh(),
        plan=default_plan(),
        data=SimpleNamespace(
            splits=read, val_loss=itemgetter("val"), bits_per_byte=lambda loss: None, named=()
        ),
        evaluation=lambda split, sequences: read[split],
        eval_targets=lambda split, sequences: 32,
    )
    state = SimpleNamespace(
        evaluated_weights=nullcontext, progress=SimpleNamespace(evaluated=lambda loss: None)
    )
    evaluator = evaluation.Evaluator(
        model,
        state,
        reader,
        sequences=4,
        autocast=torch.autocast("cpu", enabled=False),
        clock=Clock(CPU),
        stop=SimpleNamespace(agreed=0, in_evaluation=lambda *args: False),
        saver=SimpleNamespace(seconds_at_end=0.0, save_and_fail=print),
        report=SimpleNamespace(evaluation=lambda *losses: told.append(losses)),
    )
    with Reads() as reads:
        evaluator.run()
    assert len(calls) == 1 and len(reads.found) == 2, "the means on the CPU"
    sums = [sum(model(*batch, 1.0)[1].double().item() for batch in batches) for batches in read.values()]
    assert told == [({"train_loss": sums[0] / 32, "val_loss": sums[1] / 32}, "")]


def test_an_evaluation_on_a_gpu_asks_for_a_stop_in_advance(monkeypatch):
    """The answer is read four micro-batches later, when it has arrived."""
    asked, read = [], []

    def gather(number, device):
        mine = number.value
        asked.append(mine)
        answer = Number(torch.tensor([float(mine), 0.0]))
        return SimpleNamespace(read=lambda: read.append(mine) or answer)

    monkeypatch.setattr(signals, "gather_numbers", gather)
    stop, gpu = Stop(), torch.device("cuda")
    assert not any(stop.in_evaluation(i, gpu, 0.0) for i in range(9))
    assert asked == [0, 0, 0] and read == [0, 0]
    stop.signal = 15
    assert not stop.in_evaluation(12, gpu, 0.0) and stop.in_evaluation(16, gpu, 0.0) and stop.agreed == 15
    stop.asked, stop.signal = None, 0
    assert not stop.in_evaluation(0, gpu, 0.0), "no answer of an earlier evaluation is read"
