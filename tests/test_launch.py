"""Devices, dtypes, torch.compile, the numbers that a run logs, and the rendezvous of its processes."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from runs import column, default_plan, free_port, listening, records, start_changed

from isogpt.launch import network, process_group
from isogpt.launch.device import pick_backend, pick_device
from isogpt.launch.network import LOOPBACK, Process, survey
from isogpt.launch.process_group import connect_ranks, rank_names
from isogpt.monitor import banner
from isogpt.parallel import compilation
from isogpt.parallel.mesh import Mesh
from isogpt.speed import devices
from isogpt.speed.devices import peak_of
from isogpt.training import precision
from model import GPT, GPTConfig

CPU = torch.device("cpu")


def test_device_choice(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto", 0, 1).type == "mps"
    assert pick_device("auto", 1, 2).type == "cpu", "mps has no collectives"
    for wrong in ("cuda", "cuda:0", "mps", "tpu", "cuda:x"):
        with pytest.raises(ValueError, match=f"^device is '{wrong}', which is not available here: set --dev"):
            pick_device(wrong, 0, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto", 1, 2) == torch.device("cuda:1")
    assert pick_device("cuda:0", 1, 2) == torch.device("cuda:1"), "each process has its own GPU"
    assert pick_device("cuda:1", 0, 1) == torch.device("cuda:1")
    assert pick_device("cuda", 2, 4) == torch.device("cuda:0"), "of the two that this process sees"


def test_ranks_know_each_other(at):
    """Two machines, whose ranks mpirun --map-by node has interleaved; the ranks of one share their cores."""
    cores, addresses = (0b11, 0b01, 0b11, 0b10), ("127.0.0.1", "10.0.0.2", "127.0.0.1", "")
    store, ranks = dist.HashStore(), range(4)
    told = [Process("ab"[r % 2] + " k", cores[r], f"agent {r % 2}", addresses[r]) for r in ranks]
    at.env("RANK", "0")
    with ThreadPoolExecutor(4) as pool:
        meet = [pool.submit(network.meet, store, rank, 4, told[rank], 30) for rank in reversed(ranks)]
        others = [future.result() for future in reversed(meet)]
    assert others[0].pop("agents") == ["agent 0", "agent 1"] * 2 and others[1].pop("agents") == ["agent 1"]
    assert others[0] == others[1] and others[0]["machines"] == [0, 1, 0, 1]
    assert others[0]["hosts"] == ["a", "b"]
    assert others[0]["core_sharers"] == [2, 1, 2, 1] and others[0]["network"] == "10.0.0.2"
    at.set(network, "connect_store", lambda *args: store)
    at.set(network, "meet", lambda *args: others[2] | {"agents": []})
    at.set(network, "choose_interface", lambda other: "eth0 (10.0.0.2)")
    as_rank(at, 2, 4, 1)
    threads = []
    at.set(torch, "set_num_threads", threads.append)
    at.set(network, "own_cores", lambda: [0, 1, 2, 3])
    found = connect_ranks("cpu", "auto", 30)
    assert threads == [2], "ranks that share cores divide them"
    assert found.rank == 1 == int(os.environ["RANK"]), "those of a machine are neighbors"
    assert banner.topology(found) == "4 = 2 nodes (a, b) x 2"
    assert found.network == "gloo over eth0 (10.0.0.2)"
    assert rank_names(found.hosts)[2] == "rank 2 (b)" and rank_names(["a", "a"])[1] == "rank 1"
    assert survey(told[:1] * 2)["network"] == LOOPBACK, "there is one machine"


def test_ranks_that_share_a_gpu_are_refused(at):
    """NCCL would fail with C++ frames. gloo communicates for them."""
    told = [Process(machine, gpu=gpu) for machine, gpu in zip("aabbcc", [*"1211", "", ""], strict=True)]
    assert survey(told)["gpu_sharers"] == [2, 3]
    as_rank(at, 0, 1, free_port())
    at.set(process_group, "pick_device", lambda *_: torch.device("cuda", 0))
    at.set(torch.cuda, "set_device", lambda device: None)
    at.set(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    at.set(dist, "is_nccl_available", lambda: True)
    assert connect_ranks("cuda", "auto", 30).backend == "cpu:gloo,cuda:nccl"
    at.set(network, "survey", lambda processes: survey([*processes, *processes]))
    with pytest.raises(ValueError, match="^rank 0, 1 share GPUs: start fewer processes, let them see diff"):
        connect_ranks("cuda", "auto", 30)
    assert connect_ranks("cuda", "gloo", 30).backend == "gloo"


def test_gloo_communicates_for_gpus_where_there_is_no_nccl(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert pick_backend("auto", gpu, 2) == pick_backend("nccl", gpu, 1) == "gloo"
    with pytest.raises(ValueError, match="needs GPUs and a PyTorch with NCCL: set --backend=auto"):
        pick_backend("nccl", gpu, 2)


def test_dtype_choice(monkeypatch):
    monkeypatch.setattr(precision, "cpu_has", lambda feature: feature == "avx512_bf16")
    assert precision.resolve_dtype("auto", CPU) == "bfloat16"
    kept = precision.resolve_dtype("auto", CPU, previous="float32")
    assert kept == "float32", "a resumed run keeps its dtype"
    assert precision.resolve_dtype("auto", CPU, previous="tf32") == "bfloat16", "unless this device lacks it"
    assert precision.resolve_dtype("float16", CPU, previous="float32") == "float16"
    changed = "this run continues with dtype float32 (was bfloat16): the loss curve changes"
    assert precision.set_up(CPU, default_plan(dtype="float32"), False, "bfloat16") == [changed]
    assert precision.set_up(CPU, default_plan(dtype="bfloat16"), False, None) == []
    monkeypatch.setattr(precision, "cpu_has", lambda feature: False)
    assert precision.resolve_dtype("auto", CPU) == "float32"
    assert precision.common_dtype(["bfloat16", "float32"]) == "float32"


def test_a_dtype_that_the_cpu_only_emulates_is_noted(monkeypatch):
    monkeypatch.setattr(precision, "cpu_has", lambda feature: feature in ("sse2", "avx512_bf16"))
    (note,) = precision.set_up(CPU, default_plan(dtype="float16"), False, "float16")
    assert note == "this CPU only emulates float16, which is slow: set --dtype=bfloat16"
    assert not precision.is_emulated("float16", torch.device("cuda"))
    # with the speed of an emulated matmul, mfu would be above 100%: the model's kernels compute in float32
    monkeypatch.setattr(devices, "measured_matmul", lambda device, dtype, budget: {"float32": 7.0}[dtype])
    assert peak_of(CPU, "float16") == (7.0, "measured matmul in float32")


def test_processes_that_share_cores_are_reported(monkeypatch):
    monkeypatch.setattr(banner, "own_cores", lambda: [0, 1])
    plan = SimpleNamespace(micro_batch=1, batch_size=1)
    line = "cores:   8 processes share 2 CPU cores: this tests a layout, and is slower than --nproc=2"
    for processes, device, is_said in (8, "cpu", True), (2, "cpu", False), (8, "cuda", False):
        ranks = SimpleNamespace(device=torch.device(device), core_sharers=processes)
        assert (line in banner.about_machine(ranks, plan, devices.Peak())) == is_said


def test_failing_compilation_is_skipped_on_all_ranks(monkeypatch):
    """A trial that fails on one rank makes all ranks skip it, with a message."""
    model = GPT(GPTConfig(block_size=8, vocab_size=8, n_layer=1, n_head=1, n_embd=8))
    compiled, problem = [], "RuntimeError: the other rank's problem"
    monkeypatch.setattr(GPT, "compile", lambda self: compiled.append(self))
    plan, other = default_plan(), torch.device("xpu")
    compilation.compile_model(model, CPU, plan, Mesh())
    assert "off" in compilation.compile_note(CPU, plan)
    monkeypatch.setattr(torch, "ones", lambda *a, device=None, **k: torch.full(a, 1.0, **k))
    monkeypatch.setattr(torch, "compile", lambda f: f)
    monkeypatch.setattr(compilation, "gather_objects", lambda mine: [mine, problem])
    compilation.compile_model(model, other, plan, Mesh())
    message = compilation.compile_note(other, plan)
    assert not compiled and problem in message and "without it" in message


def test_mfu_uses_the_peak_of_this_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA H100 80GB HBM3")
    assert peak_of(torch.device("cuda", 0), "bfloat16") == (989e12, "data sheet")
    assert peak_of(torch.device("cuda", 0), "tf32")[0] == 989e12 / 2


def test_padded_ids_are_not_sampled():
    model = GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    with torch.no_grad():
        model.lm_head.weight[50:] = 5 * model.lm_head.weight[:1].sign()
        model.transformer.ln_f.bias.copy_(model.lm_head.weight[0].sign())
    idx = torch.zeros(8, 1, dtype=torch.long)
    torch.manual_seed(0)
    assert model.generate(idx, 12).max() >= 50 > model.generate(idx, 12, vocab_size=50).max()


def test_a_resume_needs_no_more_memory(zygote, work):
    """The checkpoint is memory-mapped and freed: a resumed run's peak is that of a new run."""
    big = ["--n_layer=4", "--n_embd=512", "--n_head=4", "--max_iters=2", "--batch_size=1"]  # 12.6M parameters
    zygote.train([*big, "--out_dir=out"], work)
    fresh = max(column(work / "out", "memory_gb").values())
    zygote.train([*big, "--out_dir=out", "--init_from=resume", "--max_iters=5"], work)
    resumed = column(work / "out", "memory_gb")[5]
    state = sum(p.stat().st_size for p in (work / "out").glob("step_00000003/ckpt.pt")) / 1e9
    assert resumed < fresh + 0.75 * state, (fresh, resumed, state)


def as_rank(at, rank, world_size, port, **more):
    """Set torchrun's variables."""
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | more).items():
        at.env(name, str(value))


def test_the_store_of_one_machine_is_not_open_to_others(at):
    # mpirun and DeepSpeed, torchrun, Kubeflow: its name for the first of several pods
    cases = [(LOOPBACK, 1, False), ("localhost", 2, False), ("localhost", 1, True)]
    for master, local_size, is_open in cases:
        port = free_port()
        as_rank(at, 0, 2, port, MASTER_ADDR=master, LOCAL_WORLD_SIZE=local_size)
        store = network.connect_store(5, serves=True)
        store.set("key", "value")
        (address,) = (address for address, served in listening(os.getpid()) if served == port)
        assert (address in ("::", "0.0.0.0")) == is_open, address


def test_missing_ranks_are_named(at, capfd):
    """The error says what to type, in a sentence without C++ frames."""
    for rank, problem in ((0, "rank 1, 2 of 3 did not join"), (1, ".*[Cc]onnection refused")):
        as_rank(at, rank, 3, free_port())
        with pytest.raises(ValueError, match=f"^cannot reach .* within 1 s: {problem}.*type unset RANK$"):
            connect_ranks("cpu", "gloo", 1)
    assert not capfd.readouterr().err


def test_a_store_that_does_not_answer_is_named(at):
    """The port of a different program, rank 0 is suspended, its cable is cut: requests never return."""
    at.set(process_group, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        as_rank(at, 1, 2, silent.getsockname()[1])
        with pytest.raises(ValueError, match="cannot reach .* within 0.5 s: no answer within 0.7 s"):
            connect_ranks("cpu", "auto", 0.5)
