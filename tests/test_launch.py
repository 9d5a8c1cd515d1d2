"""Devices, dtypes, torch.compile, the numbers that a run logs, and the rendezvous of its processes."""

import math
import re
import socket
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from runs import column, default_plan, records

from isogpt.checkpoint.progress import Progress
from isogpt.launch import network, process_group
from isogpt.launch.device import gpu_identity, pick_backend, pick_device
from isogpt.launch.process_group import check_gpus, connect_ranks
from isogpt.monitor import banner
from isogpt.monitor.records import step_line, step_record
from isogpt.parallel import compilation
from isogpt.parallel.mesh import Mesh
from isogpt.speed import devices
from isogpt.speed.devices import peak_flops
from isogpt.training import precision
from isogpt.training.step_numbers import StepNumbers
from model import GPT, GPTConfig

CPU = torch.device("cpu")


def test_device_choice(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto", 0, 1).type == "mps"
    assert pick_device("auto", 1, 2).type == "cpu", "mps has no collectives"
    assert pick_device("cpu", 0, 1).type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto", 0, 1).type == "cpu"
    for wrong in ("cuda", "cuda:0", "mps", "tpu", "cuda:x"):
        with pytest.raises(ValueError, match="auto|cpu"):
            pick_device(wrong, 0, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto", 1, 2) == torch.device("cuda:1")
    assert pick_device("cuda:0", 1, 2) == torch.device("cuda:1"), "each process has its own GPU"
    assert pick_device("cuda:1", 0, 1) == torch.device("cuda:1")
    assert pick_device("cuda", 2, 4) == torch.device("cuda:0"), "of the two that this process sees"


def test_each_process_may_see_one_gpu_only(monkeypatch):
    """
    srun --gpus-per-task=1, or CUDA_VISIBLE_DEVICES=$LOCAL_RANK: all use number 0, and their UUIDs differ.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert {pick_device(name, rank, 4).index for name in ("cuda", "auto") for rank in range(4)} == {0}
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="GPU-7")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert gpu_identity(torch.device("cuda", 0)) == [found.name, "GPU-7"]
    found.name += " MIG 1g.10gb"
    assert gpu_identity(torch.device("cuda", 0)) == [found.name, "GPU-7 MIG-1"], "slices of the same GPU"
    assert gpu_identity(CPU) == []
    one, other = ["T4", "GPU-1"], ["T4", "GPU-2"]
    check_gpus([("a", "1")] * 2, [one, other])
    check_gpus([("a", "1"), ("b", "2"), ("a", "3")], [one, one, one])
    check_gpus([("a", "1")] * 2, [[], []])
    with pytest.raises(
        ValueError, match=r"^rank 1 \(b\), rank 2 \(b\) use .* start at most one process on b, or let"
    ):
        check_gpus([("a", "1"), ("b", "2"), ("b", "2")], [one, one, one])


def test_gloo_communicates_for_gpus_where_there_is_no_nccl(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert pick_backend("auto", gpu, 2) == pick_backend("nccl", gpu, 2) == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert pick_backend("auto", gpu, 2) == pick_backend("nccl", gpu, 1) == "gloo"


def test_dtype_choice(monkeypatch):
    monkeypatch.setattr(precision, "cpu_has", lambda feature: feature == "avx512_bf16")
    assert precision.resolve_dtype("auto", CPU) == "bfloat16"
    assert precision.resolve_dtype("auto", CPU, previous="float32") == "float32", (
        "a resumed run keeps its dtype"
    )
    assert precision.resolve_dtype("auto", CPU, previous="tf32") == "bfloat16", "unless this device lacks it"
    assert precision.resolve_dtype("float16", CPU, previous="float32") == "float16"
    monkeypatch.setattr(precision, "cpu_has", lambda feature: False)
    assert precision.resolve_dtype("auto", CPU) == "float32"
    assert precision.common_dtype(["bfloat16", "float32"]) == "float32"


def test_a_dtype_that_the_cpu_only_emulates_is_noted(monkeypatch):
    note = "this CPU does not multiply {} in hardware, so steps take several times as long: set --dtype={}"
    monkeypatch.setattr(precision, "cpu_has", lambda feature: feature in ("sse2", "avx512_bf16"))
    assert precision.notes_about_dtype("float16", CPU) == [note.format("float16", "bfloat16")]
    assert precision.notes_about_dtype("bfloat16", CPU) == precision.notes_about_dtype("float32", CPU) == []
    assert precision.notes_about_dtype("float16", torch.device("cuda")) == []
    # with the speed of an emulated matmul, mfu would be above 100%: the model's kernels compute in float32
    monkeypatch.setattr(devices, "measured_matmul", lambda device, dtype, budget: {"float32": 7.0}[dtype])
    assert peak_flops(CPU, "float16") == (7.0, "measured matmul in float32")
    monkeypatch.setattr(precision, "cpu_has", lambda feature: feature == "sse2")
    assert precision.notes_about_dtype("bfloat16", CPU) == [note.format("bfloat16", "float32")]
    monkeypatch.setattr(precision, "cpu_has", lambda feature: False)  # not an x86 CPU: nothing is known
    assert precision.notes_about_dtype("float16", CPU) == []


@pytest.mark.parametrize(
    ("processes", "device", "is_said"),
    [(8, "cpu", True), (2, "cpu", False), (1, "cpu", False), (8, "cuda", False)],
)
def test_processes_that_share_cores_are_reported(monkeypatch, processes, device, is_said):
    monkeypatch.setattr(banner, "own_cores", lambda: [0, 1])
    ranks = SimpleNamespace(device=torch.device(device), core_sharers=processes)
    plan = SimpleNamespace(micro_batch=1, batch_size=1)
    lines = [line for line in banner.about_machine(ranks, plan, None, "") if line.startswith("cores:")]
    said = "cores:   8 processes share 2 CPU cores: this tests a layout, and is slower than --nproc=2"
    assert lines == ([said] if is_said else [])


def test_failing_compilation_is_skipped_on_all_ranks(monkeypatch):
    """
    A CPU skips it. On other devices, a trial that fails on one rank makes all ranks skip it, with a message.
    """
    model = GPT(GPTConfig(block_size=8, vocab_size=8, n_layer=1, n_head=1, n_embd=8))
    compiled = []
    monkeypatch.setattr(GPT, "compile", lambda self: compiled.append(self))
    assert "off" in compilation.compile_model(model, CPU, default_plan(), Mesh()) and not compiled

    class OtherDevice:
        type = "xpu"

    monkeypatch.setattr(torch, "ones", lambda *a, device=None, **k: torch.full(a, 1.0, **k))
    monkeypatch.setattr(torch, "compile", lambda f: (_ for _ in ()).throw(RuntimeError("no compiler here")))
    message = compilation.compile_model(model, OtherDevice(), default_plan(), Mesh())
    assert not compiled and "no compiler here" in message and "without it" in message
    monkeypatch.setattr(torch, "compile", lambda f: f)
    monkeypatch.setattr(
        compilation, "gather_objects", lambda mine: [mine, "RuntimeError: the other rank's problem"]
    )
    message = compilation.compile_model(model, OtherDevice(), default_plan(), Mesh())
    assert not compiled and "other rank's problem" in message


def test_mfu_uses_the_peak_of_this_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda", 0), "bfloat16") == (989e12, "data sheet")
    assert peak_flops(torch.device("cuda", 0), "tf32")[0] == 989e12 / 2
    measured, source = peak_flops(CPU, "float32")
    assert measured > 1e8 and "measured" in source
    monkeypatch.setattr(devices, "measured_matmul", lambda *a: (_ for _ in ()).throw(RuntimeError("no")))
    assert peak_flops(CPU, "float32") == (None, "unknown")
    columns = dict(
        loss=[2, 4],
        grad_square=[9, 16],
        grad_square_fine=[0, 0],
        step_ms=[100, 300],
        data_ms=[1, 5],
        memory_gb=[3, 1],
    )
    columns |= dict(forward_ms=[0, 0], stop=[0, 0], loss_scale=[1, 1], waiting=[0, 0])
    numbers = StepNumbers(**{name: torch.tensor(c, dtype=torch.float64) for name, c in columns.items()})
    progress = Progress(tokens_per_step=64, step=7, tokens=576)
    record = step_record(progress, numbers, 1e-3, 1e9, 1e11)
    assert record["tokens"] == 640 and record["grad_norm"] == 5.0
    assert record["loss"] == 3.0 and record["step_ms"] == 200.0 and record["step_ms_max"] == 300.0
    assert record["data_ms"] == 3.0 and record["data_ms_max"] == 5.0 and record["memory_gb_max"] == 3.0
    assert record["tokens_per_s"] == pytest.approx(320) and record["mfu"] == pytest.approx(1e9 / 0.2 / 1e11)
    line = step_line(record | {"left_s": 61})
    assert re.match(r"iter 7: loss 3\.0000, time 200\.00ms, mfu 5\.00%", line)
    unknown = step_record(progress, numbers, 1e-3, 1e9, None)
    assert unknown["mfu"] is None and "mfu n/a" in step_line(unknown | {"left_s": None})


def test_fields_and_events_of_the_metrics(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=3", "--eval_interval=2"], work, 2)
    lines = records(work / "out")
    step = next(r for r in lines if "loss" in r and "event" not in r)
    names = "iter loss grad_norm lr step_ms data_ms memory_gb tokens_per_s mfu tokens time"
    names += " step_ms_max data_ms_max memory_gb_max"
    assert set(names.split()) <= set(step)
    assert step["tokens"] == 2 * 4 * 32 and step["mfu"] > 0
    assert [r["event"] for r in lines if "event" in r] == ["start", "save", "save", "end"]
    assert set(column(work / "out", "val_loss")) == {0, 2, 4}


def test_warmup_as_long_as_the_decay(zygote, work):
    """The learning rate follows nanoGPT's formula, also if warm-up and decay end at the same step or at 0."""
    common = ["--learning_rate=1e-3", "--min_lr=1e-4", "--max_iters=6"]
    cases = {(3, 3): None, (0, 0): None, (2, 6): None}
    for warmup, decay in cases:
        out = f"lr{warmup}-{decay}"
        zygote.train(
            [*common, f"--warmup_iters={warmup}", f"--lr_decay_iters={decay}", f"--out_dir={out}"], work
        )
        for it, lr in column(work / out, "lr").items():
            if it < warmup:
                expected = 1e-3 * (it + 1) / (warmup + 1)
            elif it >= decay:
                expected = 1e-4
            else:
                expected = 1e-4 + 0.5 * (1 + math.cos(math.pi * (it - warmup) / (decay - warmup))) * 9e-4
            assert lr == pytest.approx(expected, rel=1e-12), (warmup, decay, it)


def test_padded_ids_are_not_sampled():
    model = GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    with torch.no_grad():
        model.lm_head.weight[50:] = 5 * model.lm_head.weight[:1].sign()
        model.transformer.ln_f.bias.copy_(model.lm_head.weight[0].sign())
    idx = torch.zeros(8, 1, dtype=torch.long)
    torch.manual_seed(0)
    assert model.generate(idx, 12).max() >= 50, "the test needs a model that samples them"
    assert model.generate(idx, 12, vocab_size=50).max() < 50


def test_a_resume_needs_no_more_memory(zygote, work):
    """The checkpoint is memory-mapped and freed: a resumed run's peak is that of a new run."""
    big = ["--n_layer=4", "--n_embd=512", "--n_head=4", "--max_iters=2", "--batch_size=1"]  # 12.6M parameters
    zygote.train([*big, "--out_dir=out"], work)
    fresh = max(column(work / "out", "memory_gb").values())
    zygote.train([*big, "--out_dir=out", "--init_from=resume", "--max_iters=5"], work)
    resumed = column(work / "out", "memory_gb")[5]
    state = sum(p.stat().st_size for p in (work / "out").glob("step_00000003/ckpt.pt")) / 1e9
    assert resumed < fresh + 0.75 * state, (fresh, resumed, state)


@pytest.mark.slow
def test_half_precision_trains_on_the_cpu(zygote, work):
    for dtype in ("bfloat16", "float16"):
        zygote.train([f"--dtype={dtype}", f"--out_dir={dtype}"], work, 2)
        losses = column(work / dtype, "loss")
        assert losses[29] < losses[0] - 0.4
    zygote.train(["--out_dir=float32"], work)
    exact = column(work / "float32", "loss")
    for dtype in ("bfloat16", "float16"):
        losses = column(work / dtype, "loss")
        assert all(abs(losses[s] - exact[s]) < 0.05 for s in losses) and losses != exact


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_deterministic_resume_has_the_same_bits(zygote, work):
    from test_resume import DROPOUT, assert_same_bits, final

    gpu = [*DROPOUT, "--device=cuda", "--dtype=bfloat16", "--deterministic=True"]
    zygote.train([*gpu, "--out_dir=straight"], work, timeout=300)
    zygote.train([*gpu, "--out_dir=out", "--max_iters=13"], work, timeout=300)
    zygote.train([*gpu, "--out_dir=out", "--init_from=resume"], work, timeout=300)
    assert_same_bits(final(work / "straight"), final(work / "out"))


def test_a_restart_ignores_what_the_previous_attempt_left_in_the_store():
    """torchrun gives restarted workers the store of the previous attempt (pytorch#135712)."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    clients = [dist.TCPStore("127.0.0.1", server.port) for _ in range(3)]
    starts = []
    # the second and third find keys of earlier starts, and of a process that exited while it waited
    for _ in range(3):
        clients[0].set("hello/2", "a process that has exited")
        found = [None] * 3

        def meet(rank, found=found):
            found[rank] = network.meet(clients[rank], rank, 3, 20)

        threads = [threading.Thread(target=meet, args=(r,)) for r in (2, 0, 1)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert found[0] == found[1] == found[2] is not None, "all ranks join the same start"
        starts.append(found[0])
    assert len(set(starts)) == 3, "each start has a unique name"


def test_a_store_that_does_not_answer_is_named(at):
    """
    The port of a different program, rank 0 is suspended, its cable is cut: requests to the store never
    return.
    """
    at.set(network, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        for name, value in variables.items():
            at.env(name, value)
        said = "no answer from 127.0.0.1:.* within 0.7 s, although something listens there"
        with pytest.raises(ValueError, match=said):
            connect_ranks("cpu", "auto", 0.5)
        # connected before the store became silent
        ask = threading.Event().wait
        requests = SimpleNamespace(
            set=lambda *_: ask(), check=lambda _: ask(), get=lambda _: ask(), set_timeout=print
        )
        at.set(process_group, "connect_store", lambda *args: requests)
        with pytest.raises(ValueError, match=said):
            connect_ranks("cpu", "auto", 0.5)
        at.set(network, "meet", lambda *args: "start")
        at.set(dist, "PrefixStore", lambda start, store: store)
        with pytest.raises(ValueError, match=said):
            connect_ranks("cpu", "auto", 0.5)


def test_missing_ranks_are_named(monkeypatch, capsys):
    monkeypatch.setattr(network, "WAITING_S", 0.05)
    store = dist.HashStore()
    store.set("hello/1", "a process that has exited")
    with pytest.raises(ValueError, match="rank 1, 2 of 3 did not join within 0.2 s"):
        network.meet(store, 0, 3, 0.2)
    with pytest.raises(
        ValueError,
        match="^did not find rank 0 within 0.2 s. If no launcher started this process, .* type unset RANK ",
    ):
        network.meet(store, 1, 3, 0.2)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" waits for ")[1].split(".")[0] for line in said] == ["rank 1, 2"]
    # the first rank of a machine also says it, until rank 0 has answered
    for has_answered, what in ((False, "rank 0"), (True, "ranks that rank 0 names")):
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setattr(network.uuid, "uuid4", lambda: SimpleNamespace(hex="mine"))
        if has_answered:
            store.set("welcome/mine", "start")
        with pytest.raises(ValueError, match="did not find rank 0"):
            network.meet(store, 1, 3, 0.2)
        assert f"waits for {what}. If" in capsys.readouterr().err
