"""What sharding and recomputation save, counted and measured; running out of memory; full disks."""

import json
import re
import subprocess
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from edits import COUNTED, COUNTED_SHAPE, edited_gpt
from runs import assert_same_curve, column, records, start_changed
from test_planner import plan_with

from isogpt.checkpoint.search import find_checkpoint
from isogpt.parallel.plan import Plan
from isogpt.speed import devices, memory, prediction
from model import GPT, GPTConfig

# raises ERROR in every training forward of more than ROWS rows, on the ranks in ON
INJECT = """
import time, torch
def recorded():
    return os.path.exists("out/micro_batch.json") and open("out/micro_batch.json").read()
# if both ranks fail, rank 1 fails when rank 0 has recorded smaller micro-batches and is about to exit
before, is_late = recorded(), (os.environ["RANK"], os.environ["ON"]) == ("1", "01")
def limit(module, args):
    is_large = args[0].dtype == torch.int64 and args[0].dim() == 2 and len(args[0]) > int(os.environ["ROWS"])
    if is_large and module.training and os.environ["RANK"] in os.environ["ON"]:
        while is_late and recorded() == before:
            time.sleep(0.01)
        raise eval(os.environ["ERROR"])
torch.nn.modules.module.register_module_forward_pre_hook(limit)
"""
CUDA = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1 TiB')"
CUBLAS = "RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate')"
NCCL = "torch.distributed.DistBackendError(\"Call failed.\\nLast error:\\nCuda failure 2 'out of memory'\")"


def test_out_of_memory_continues_with_half_the_micro_batch(zygote, work):
    args = ["--batch_size=8", "--gradient_accumulation_steps=2", "--max_iters=4", "--out_dir=out"]

    def start(*more, on, error=CUDA):
        env = {"ROWS": "2", "ON": on, "ERROR": error}
        return start_changed(zygote, INJECT, [*args, *more], work, 2, env=env)

    for smaller, on, error in ((4, "1", NCCL), (2, "01", CUBLAS)):  # rank 1 alone, then both
        run = start(on=on, error=error).wait(ok=False)
        text = run.text()
        assert set(run.codes) == {1} and text.count(": out of memory with micro-batches of") == 1, text
        if on == "1":
            assert "error: rank 1: out of memory with micro-batches of 8: Cuda failure 2 'out of m" in text
            assert "rank 1 has failed (Cuda failure 2 'out of memory'), its" in text
        for part in ("weights", "gradients", "optimizer", "activations", "--activation_checkpointing=full"):
            assert part in text
        recorded = (work / "out" / "micro_batch.json").read_text()
        assert json.loads(recorded)["micro_batch"] == smaller
    other = start("--n_head=4", on="01").wait(ok=False).text()
    assert ": out of memory with micro-batches of 8: OutOfMemoryError" in other, "of a different model"
    (work / "out" / "micro_batch.json").write_text(recorded)
    assert "micro-batches of 2 instead of 8" in start(on="01").wait().text()
    zygote.train([*args, "--out_dir=roomy"], work)
    assert_same_curve(work / "out", work / "roomy")
    config = next(r for r in records(work / "out") if r.get("event") == "start")["config"]
    assert config["batch_size"] == 8, "the settings do not change"


def test_other_forms_of_running_out_of_memory():
    """The first test raises those of CUDA, cuBLAS and NCCL."""
    for text in ("CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory: you tried"):
        assert memory.OUT_OF_MEMORY.search(text), text
    assert not memory.OUT_OF_MEMORY.search("CUDA error: an illegal memory access was encountered")


def test_out_of_memory_while_the_model_is_allocated(zygote, work):
    """The user is told, and the folder is not touched."""
    args = ["--n_embd=20000000", "--out_dir=out", "--alert_command=cat >> told.jsonl"]
    text = zygote.train(args, work, 2, ok=False).text()
    assert text.count("out of memory while the model was allocated") == 1 and "Traceback" not in text
    assert "uses micro-batches of" not in text and not (work / "out").exists()
    assert re.search('"event": "failed".*allocate memory', (work / "told.jsonl").read_text())


def test_what_was_recorded_for_a_job_is_not_used_for_a_different_job():
    """
    A smaller micro-batch and a layout. Each setting that memory or time are computed from makes a new job.
    """
    plan = plan_with(dict(vocab_size=65, bias=False, n_expert=4, arch="llama"), 8)
    job, args = plan.job(), plan.model_args
    # the micro-batch follows from the batch and the ranks; the outer rates cost nothing
    without_effect = {"micro_batch", "outer_lr", "outer_momentum"}
    for name in {f.name for f in fields(Plan)} - {"model_args"}:
        assert (replace(plan, **{name: 3}).job() == job) == (name in without_effect), name
    slow = replace(plan, outer_lr=3.0, outer_momentum=3.0)
    seconds = [prediction.predict(p, devices.HARDWARE["h100"]).seconds for p in (plan, slow)]
    assert seconds[0] == seconds[1]
    for name in args:
        assert replace(plan, model_args=args | {name: 7}).job() != job, name
    logs = dict(learning_rate=1.0, out_dir="x", wandb_log=True, seed=2)
    assert plan_with(args, 8, **logs).job() == job
    assert plan_with(args, 8, fsdp=True).job() == plan_with(args, 8, zero=3).job() != job
    assert json.loads(json.dumps(job)) == job  # as it is recorded


def test_what_settings_do_to_the_parts_of_an_estimate():
    shape = dict(n_layer=12, n_embd=256, n_head=4, vocab_size=65, bias=False)

    def plan(dtype="float32", dropout=0.0, ranks=4, **settings):
        return plan_with(shape | {"dropout": dropout}, ranks, 2, dtype=dtype, **settings)

    def parts(**settings):
        return memory.memory_estimate(plan(**settings))

    none, full, sharded = parts(), parts(activation_checkpointing="full"), parts(zero=3)
    assert full["activations"] < 0.4 * none["activations"] and full["optimizer"] == none["optimizer"]
    assert sharded["optimizer"] == pytest.approx(none["optimizer"] / 4)
    half, masked = parts(dtype="bfloat16"), parts(dtype="bfloat16", dropout=0.1)
    assert half["activations"] < none["activations"] and half["activations"] * 1.03 < masked["activations"]
    assert parts(optimizer="muon")["optimizer"] < 0.6 * none["optimizer"]
    # graphs keep a second set of gradients
    graphs = plan(cuda_graphs=True)
    assert memory.memory_estimate(graphs)["gradients"] == 2 * none["gradients"]
    assert f"--cuda_graphs=False {none['total']:.2f}" in memory.memory_report(graphs)
    # offloading adds up gradients on the device, unless they are reduced in every micro-step
    offloaded = plan(zero=3, cpu_offload=True)
    on_cpu = parts(zero=3, cpu_offload=True, grad_sync="every")
    shard = offloaded.counts.parameters / 1e9
    assert memory.memory_estimate(offloaded)["gradients"] - on_cpu["gradients"] == pytest.approx(shard)
    assert f"--grad_sync=every {on_cpu['total']:.2f}" in memory.memory_report(offloaded)
    # bytes per parameter, besides the 8 of the moments: errors, or what islands need for the outer step
    hybrid = dict(ranks=8, islands=2, zero=3, dp_replicate=2, grad_compression="int8")
    for total, settings in (
        (8, dict(grad_compression="fp16")),
        (12, dict(grad_compression="int8")),
        (20, dict(islands=2)),
        (20 / 2, hybrid),  # inside islands, nothing is compressed
    ):
        assert parts(**settings)["optimizer"] == pytest.approx(total / 8 * none["optimizer"])


@pytest.mark.parametrize("gib, compile, of_a_logit", [(80, False, 12), (80, True, 2), (16, True, 1.3)])
def test_the_estimate_knows_when_a_gpu_computes_the_loss_in_chunks(monkeypatch, gib, compile, of_a_logit):
    """
    16 sequences of 1,024 tokens in bfloat16: all logits at once, or five chunks, at 6 bytes per logit of a
    chunk. The card is the one that is planned for, or else this machine's.
    """
    plan = plan_with(dict(n_layer=1, n_head=1, n_embd=16), rows=16, compile=compile, zero=3)
    planned = memory.memory_estimate(plan, gib * 2**30 / 1e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: card)
    assert memory.memory_estimate(plan) == planned
    assert 1e9 * planned["activations"] == pytest.approx(16 * 1024 * 50304 * of_a_logit, rel=0.05)


def bytes_of_a_block(args, **settings):
    """What each block adds to the estimated activations, for each token of 256."""
    rows, blocks = 64, (8, 9)  # so many that they are most of a step's memory
    plans = [plan_with(args | {"n_layer": n, "block_size": 256}, rows=rows, **settings) for n in blocks]
    few, more = (memory.memory_estimate(plan)["activations"] for plan in plans)
    return 1e9 * (more - few) / (rows * 256)


@pytest.mark.parametrize("n_expert", [0, 8])
@pytest.mark.parametrize("arch", ["gpt2", "nanochat", "llama"])
def test_parameters_and_activations_of_a_block_are_counted(arch, n_expert):
    """Against a model that has memory: its parameters, and what autograd saves in a float32 forward."""
    shape = dict(n_layer=1, n_head=4, n_embd=64, block_size=256, vocab_size=65)
    model = GPT(GPTConfig(arch=arch, n_expert=n_expert, **shape))
    args, block, saved = model.describe(), model.transformer.h[0], {}
    counted = plan_with(args).counts
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    counts = [sum(p.numel() for p in params) for params in (model.parameters(), block.parameters(), experts)]
    assert [counted.parameters, counted.blocks[0].parameters, counted.experts] == counts

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rope = model.rotary_angles(torch.arange(256)) if model.arch.rotation else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = block(torch.randn(4, 256, 64, requires_grad=True), rope)
    for p in model.parameters():
        saved.pop(p.untyped_storage().data_ptr(), None)
    kept = sum(saved.values()) / (4 * 256)
    assert bytes_of_a_block(args, device_type="cpu", dtype="float32") == pytest.approx(kept, rel=0.02), result


@pytest.mark.parametrize(("arch", "hidden"), [("gpt2", 2), ("nanochat", 2), ("llama", 3)])
def test_compiled_kernels_keep_what_matmuls_read(arch, hidden):
    """In bfloat16, and the stream; of SwiGLU three of four vectors. Attention also keeps rotated q and k."""
    C, width = 256, 704
    args = dict(arch=arch, n_embd=C, n_head=4, n_hidden=width)
    vectors = {"gpt2": 8, "nanochat": 10, "llama": 10}[arch] * C + hidden * width
    fused, eager = (bytes_of_a_block(args, zero=3, compile=compile) for compile in (True, False))
    assert fused == pytest.approx(2 * vectors, rel=0.02)
    assert eager - fused == pytest.approx(2 * width if arch == "llama" else 0, abs=8)


@pytest.mark.parametrize("edit", COUNTED)
def test_an_estimate_follows_an_edit_of_the_model(edit):
    """Of the activations, see test_dry_run.py."""
    (parameters, _), models = COUNTED[edit], (GPT, edited_gpt(edit))

    def more(optimizer):
        plans = (plan_with(COUNTED_SHAPE, model_class=model, optimizer=optimizer) for model in models)
        usual, edited = map(memory.memory_estimate, plans)
        return {name: round(1e9 * (edited[name] - usual[name])) for name in edited}

    found = more("adamw")
    assert found["weights"] == found["gradients"] == 4 * parameters and found["optimizer"] == 8 * parameters
    # Muon keeps one moment, but not for what is looked up
    looked_up = edit in ("value embeddings", "factorized embedding")
    assert more("muon")["optimizer"] == (8 if looked_up else 4) * parameters


@pytest.mark.parametrize("flags", [[], ["--zero=3"]], ids=["ckpt.pt", "shards"])
def test_a_run_survives_a_full_disk(zygote, work, flags):
    """
    A checkpoint fails, training continues, the one before is kept, and the next is written when there is
    space.
    """
    out = work / "out"
    out.mkdir()
    if subprocess.run(f"mount -t tmpfs -o size=1900k tmpfs {out}", shell=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        # checkpoints of 1.3 MB
        args = ["--out_dir=out", "--save_interval=3", "--n_embd=64", "--keep_last=9", *flags]
        run = zygote.train([*args, "--max_iters=7"], work, 2, ok=False)
        assert "warning: out: a checkpoint failed (" in run.text() and "saved out/step_00000003" in run.text()
        assert run.codes == [1, 1]
        assert run.text().count("the final checkpoint could not be written to out") == 1
        found, reports = find_checkpoint(str(out))
        assert found.step == 3 and not reports and not list(out.glob("unfinished*"))
        assert len(column(out, "loss")) == 8
        subprocess.run(["mount", "-o", "remount,size=64m", out], check=True)
        zygote.train([*args, "--max_iters=7", "--init_from=resume"], work, 2)
        assert find_checkpoint(str(out))[0].step == 8
    finally:
        subprocess.run(["umount", "-l", out], check=True)


# says how many storages hold the gradients at each micro-step
GRADIENTS = """
import torch
def look(module, args):
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        storages = {grad.untyped_storage().data_ptr() for grad in grads}
        print(f"gradients in {len(storages)} storages", flush=True)
torch.nn.modules.module.register_module_forward_pre_hook(look)
"""


@pytest.mark.parametrize("zero", [0, 1])
def test_accumulated_gradients_are_in_ddps_buckets(zygote, work, zero):
    """Not in additional tensors: with them, a step of 42.5M parameters took 160 MB more."""
    args = [f"--zero={zero}", "--gradient_accumulation_steps=6", "--max_iters=3", "--out_dir=out"]
    run = start_changed(zygote, GRADIENTS, args, work, 2).wait()
    assert {*re.findall("gradients in (.*) storages", run.text())} == {"0", "1"}, run.text()
