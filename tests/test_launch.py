"""Devices, dtypes, compile, what a run measures: without a launch where that can be."""

import math
import re
import threading

import pytest
import torch
import torch.distributed as dist
from runs import column, records

import launch
import metrics
import parallel
from model import GPT, GPTConfig

CPU = torch.device("cpu")


def test_device_choice(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert launch.pick_device("auto", 0, 1).type == "mps"
    assert launch.pick_device("auto", 1, 2).type == "cpu", "mps has no collectives"
    assert launch.pick_device("cpu", 0, 1).type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert launch.pick_device("auto", 0, 1).type == "cpu"
    for wrong in ("cuda", "cuda:0", "mps", "tpu", "cuda:x"):
        with pytest.raises(ValueError, match="auto|cpu"):
            launch.pick_device(wrong, 0, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch.pick_device("auto", 1, 2) == torch.device("cuda:1")
    assert launch.pick_device("cuda:0", 1, 2) == torch.device("cuda:1"), "each process its own GPU"
    assert launch.pick_device("cuda:1", 0, 1) == torch.device("cuda:1")
    with pytest.raises(ValueError, match="at most 2 processes"):
        launch.pick_device("cuda", 2, 3)


def test_dtype_choice(monkeypatch):
    monkeypatch.setattr(launch, "cpu_has", lambda feature: feature == "avx512_bf16")
    assert launch.dtype_for("auto", CPU) == "bfloat16"
    assert launch.dtype_for("auto", CPU, before="float32") == "float32", "a resume keeps what was used"
    assert launch.dtype_for("auto", CPU, before="tf32") == "bfloat16", "unless this device cannot"
    assert launch.dtype_for("float16", CPU, before="float32") == "float16"
    monkeypatch.setattr(launch, "cpu_has", lambda feature: False)
    assert launch.dtype_for("auto", CPU) == "float32"
    monkeypatch.setattr(launch, "gather_objects", lambda mine: [mine, "float32"])
    assert launch.agree_on_dtype("bfloat16") == "float32"


def test_compile_that_fails_is_left_out_by_all(monkeypatch):
    """On a CPU it is left out; elsewhere a failing trial on any rank leaves it out on all, aloud."""
    model = GPT(GPTConfig(block_size=8, vocab_size=8, n_layer=1, n_head=1, n_embd=8))
    assert parallel.compiled(model, launch.Ranks(0, 1, 0, 1, CPU))[0] is False

    class Elsewhere:
        type = "xpu"

    ranks = launch.Ranks(0, 1, 0, 1, Elsewhere())
    monkeypatch.setattr(torch, "ones", lambda *a, device=None, **k: torch.full(a, 1.0, **k))
    monkeypatch.setattr(torch, "compile", lambda f: (_ for _ in ()).throw(RuntimeError("no compiler here")))
    done, message = parallel.compiled(model, ranks)
    assert not done and "no compiler here" in message and "without it" in message
    monkeypatch.setattr(torch, "compile", lambda f: f)
    monkeypatch.setattr(parallel, "gather_objects", lambda mine: [mine, "RuntimeError: the other rank's trouble"])
    done, message = parallel.compiled(model, ranks)
    assert not done and "other rank's trouble" in message


def test_mfu_is_against_this_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA H100 80GB HBM3")
    assert metrics.peak_flops(torch.device("cuda", 0), "bfloat16") == (989e12, "data sheet")
    assert metrics.peak_flops(torch.device("cuda", 0), "tf32")[0] == 989e12 / 2
    measured, source = metrics.peak_flops(CPU, "float32")
    assert measured > 1e8 and "measured" in source
    monkeypatch.setattr(metrics, "measured_matmul", lambda *a: (_ for _ in ()).throw(RuntimeError("no")))
    assert metrics.peak_flops(CPU, "float32") == (None, "unknown")
    rows = torch.tensor([[2.0, 1.0, 100.0, 1.0, 3.0], [4.0, 1.0, 300.0, 5.0, 1.0]], dtype=torch.float64)
    record = metrics.step_record(7, rows, 1e-3, 640, 64, 1e9, 1e11)
    assert record["loss"] == 3.0 and record["step_ms"] == 200.0 and record["step_ms_max"] == 300.0
    assert record["data_ms"] == 3.0 and record["data_ms_max"] == 5.0 and record["memory_gb_max"] == 3.0
    assert record["tokens_per_s"] == pytest.approx(320) and record["mfu"] == pytest.approx(1e9 / 0.2 / 1e11)
    assert re.match(r"iter 7: loss 3\.0000, time 200\.00ms, mfu 5\.00%", metrics.step_line(record, 61))
    unknown = metrics.step_record(7, rows, 1e-3, 640, 64, 1e9, None)
    assert unknown["mfu"] is None and "mfu n/a" in metrics.step_line(unknown, 61)


def test_metrics_carry_what_the_design_lists(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=3", "--eval_interval=2"], work, 2)
    lines = records(work / "out")
    step = next(r for r in lines if "loss" in r and "event" not in r)
    names = "iter loss grad_norm lr step_ms data_ms memory_gb tokens_per_s mfu tokens time"
    names += " step_ms_max data_ms_max memory_gb_max"
    assert set(names.split()) <= set(step)
    assert step["tokens"] == 2 * 4 * 32 and step["mfu"] > 0
    assert [r["event"] for r in lines if "event" in r] == ["start", "save", "save", "end"]
    assert set(column(work / "out", "val_loss")) == {0, 2}


def test_warmup_that_is_as_long_as_the_decay(zygote, work):
    """lr follows the contract's formula, also where warm-up and decay end together or lie at 0."""
    common = ["--learning_rate=1e-3", "--min_lr=1e-4", "--max_iters=6"]
    cases = {(3, 3): None, (0, 0): None, (2, 6): None}
    for warmup, decay in cases:
        out = f"lr{warmup}-{decay}"
        zygote.train([*common, f"--warmup_iters={warmup}", f"--lr_decay_iters={decay}", f"--out_dir={out}"], work)
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
    assert model.generate(idx, 12).max() >= 50, "the test needs a model that would"
    assert model.generate(idx, 12, n_tokens=50).max() < 50


def test_a_resume_needs_no_more_memory(zygote, work):
    """The checkpoint is read on the CPU, mapped, and let go: a resumed run's peak is a fresh one's."""
    big = ["--n_layer=4", "--n_embd=512", "--n_head=4", "--max_iters=2", "--batch_size=1"]  # 12.6M parameters
    zygote.train([*big, "--out_dir=out"], work)
    fresh = max(column(work / "out", "memory_gb").values())
    zygote.train([*big, "--out_dir=out", "--init_from=resume", "--max_iters=5"], work)
    resumed = column(work / "out", "memory_gb")[5]
    state = sum(p.stat().st_size for p in (work / "out").glob("step_00000003/ckpt.pt")) / 1e9
    assert resumed < fresh + 0.75 * state, (fresh, resumed, state)


def test_half_precision_on_the_cpu_learns(zygote, work):
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


def test_a_restart_is_not_misled_by_what_the_attempt_before_left_in_the_store():
    """torchrun hands a restarted worker the store of the attempt before (pytorch#135712)."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    clients = [dist.TCPStore("127.0.0.1", server.port) for _ in range(3)]
    starts = []
    for _ in range(3):  # the second and third start find what the ones before left, and a newcomer that died waiting
        clients[0].set("hello/2", "somebody who is gone")
        found = [None] * 3

        def come(rank, found=found):
            found[rank] = launch.meet(clients[rank], rank, 3, 20)

        threads = [threading.Thread(target=come, args=(r,)) for r in (2, 0, 1)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert found[0] == found[1] == found[2] is not None, "all are in the same start"
        starts.append(found[0])
    assert len(set(starts)) == 3, "a start has a name of its own"


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set("hello/1", "somebody who is gone")
    with pytest.raises(ValueError, match="rank 1, 2 of 3 did not come within 0.2 s"):
        launch.meet(store, 0, 3, 0.2)
    with pytest.raises(ValueError, match="rank 1 found no rank 0"):
        launch.meet(store, 1, 3, 0.2)
