"""
One curve: a model that is trained in any way has the losses of one process. A resume has the same bits in the
same way, and the same curve in any other. A step in many more ways: test_layout_check.py.
"""

import shlex
import shutil

import pytest
import torch
from runs import REPO, assert_same_run, column, records, same, tensors_in

# ten steps of 24 sequences, with an evaluation and a checkpoint in the middle and at the end
ONE = ["--gradient_accumulation_steps=3", "--batch_size=8", "--n_layer=4", "--n_head=4", "--max_iters=9"]
ONE += ["--eval_interval=5", "--eval_iters=3", "--keep_last=0", "--check_ranks_interval=5"]
ONE += ["--muon_lr=0.005"]  # as small as the learning rate at which the other curves are compared
NANOCHAT = "--arch=nanochat --n_kv_head=2 --optimizer=muon"
LLAMA = "--arch=llama --n_kv_head=2 --optimizer=muon"
OWN = f"--warmup_iters=3 --muon_lr=0.002 {shlex.quote(f'--optimizer={REPO}/tests/own_optimizers.py')}"
MODELS = {
    "gpt2": "",
    "gpt2-bias": "--bias=True",
    "gpt2-muon": "--optimizer=muon",
    "nanochat": NANOCHAT,
    "llama": f"{LLAMA} --head=tied",
    "bfloat16": "--dtype=bfloat16",
    "float16": "--dtype=float16",
    "gpt2-moe": "--n_expert=4 --bias=True",
    "llama-moe": f"--n_expert=4 {LLAMA} --n_layer=2 --n_expert_active=3",
    "two sequences": "--gradient_accumulation_steps=1 --batch_size=2",
    # beyond the first 1,000 sequences, over which the sources are spread
    "mixture": "--dataset=shards:0.7,file:0.3 --data_order=documents --batch_size=40",
    "whole micro-batches": "--dropout=0.2 --gradient_accumulation_steps=6 --batch_size=4",
    "lion": f"{OWN}:Lion",
    "schedule-free": f"{OWN}:Free",
    "sgd": f"{OWN}:SGD",
    "muon+free": OWN.replace("=/", "=muon+/") + ":Free",
    # compared with themselves
    "dropout": "--dropout=0.1",
    "nanochat-dropout": f"{NANOCHAT} --dropout=0.1 --embedding_lr=0.01 --lr_schedule=wsd --cooldown_iters=90",
    "moe-dropout": "--n_expert=4 --bias=True --dropout=0.1",
    "nanochat-moe-dropout": f"--n_expert=4 {NANOCHAT} --n_layer=2 --n_hidden=51 --dropout=0.1",
}
HSDP = "--zero=3 --dp_replicate=2"
POWERSGD, ISLANDS = "--grad_compression=powersgd:1", "--islands=2 --local_steps=4"
# processes, flags
WAYS = {
    "one": (1, ""),
    "b12": (1, "--batch_size=12 --gradient_accumulation_steps=2 --eval_iters=2"),
    "b1": (1, "--batch_size=1 --gradient_accumulation_steps=24 --eval_iters=24"),
    **{str(nproc): (nproc, "") for nproc in (2, 3, 7)},
    "zero1": (2, "--zero=1"),
    "zero1-3": (3, "--zero=1"),
    "zero2": (2, "--zero=2"),
    "zero3-alone": (1, "--zero=3"),
    "zero3": (2, "--fsdp=True"),
    "zero3-b24": (2, "--zero=3 --batch_size=24 --gradient_accumulation_steps=1 --eval_iters=1"),
    "zero3-3": (3, "--zero=3"),
    "zero3-7": (7, "--zero=3"),
    "offload": (2, "--zero=3 --cpu_offload=True"),
    "hsdp": (4, HSDP),
    "tp2": (2, "--tp=2"),
    "cp2": (2, "--cp=2"),
    "pp2": (2, "--pp=2"),
    "tp2-pp2": (4, "--tp=2 --pp=2"),
    "tp2-pp2-zbv": (4, "--tp=2 --pp=2 --pp_schedule=zbv"),
    "tp2-cp2": (4, "--tp=2 --cp=2"),
    "ddp-tp2": (4, "--tp=2"),
    "zero1-tp2": (4, "--zero=1 --tp=2"),
    "fsdp-cp2": (4, "--zero=3 --cp=2 --activation_checkpointing=selective"),
    "fsdp-tp2-pp2": (8, "--zero=3 --tp=2 --pp=2"),
    "ep2": (2, "--ep=2"),
    "ep2-zero1": (4, "--ep=2 --zero=1"),
    "ep2-fsdp": (4, "--ep=2 --zero=3"),
    "ep2-hsdp": (8, f"--ep=2 {HSDP} --cpu_offload=True"),
    "ep2-tp2": (4, "--ep=2 --tp=2"),
    "ep2-pp2": (4, "--ep=2 --pp=2"),
    "ep2-pp2-fsdp": (8, "--ep=2 --pp=2 --zero=3"),
    "shares-2-1-zero1": (2, "--shares=2,1 --zero=1"),
    "shares-2-1-zero3": (2, "--shares=2,1 --zero=3"),
    "shares-3-1-1": (3, "--shares=3,1,1"),
    "shares-1-3-b24": (2, "--shares=1,3 --batch_size=24 --gradient_accumulation_steps=1 --eval_iters=1"),
    "shares-2-1-cp2": (4, "--shares=2,1 --cp=2"),
    "shares-3-1-ep2": (2, "--shares=3,1 --ep=2"),
    # compressed gradients, and islands
    "bf16": (2, "--grad_compression=bf16"),
    "fp16-hsdp": (4, f"--grad_compression=fp16 {HSDP}"),
    "int8-3": (3, "--grad_compression=int8"),
    "int8-hsdp": (4, f"--grad_compression=int8 {HSDP}"),
    "int8-tp": (4, "--grad_compression=int8 --tp=2"),
    "int8-pp": (4, "--grad_compression=int8 --pp=2"),
    "int8-ep": (4, "--grad_compression=int8 --ep=2"),
    "topk-zero1": (2, "--grad_compression=topk:0.05 --zero=1"),
    "powersgd": (2, f"{POWERSGD} --n_embd=128"),  # in two buckets
    "powersgd-zero1": (2, f"{POWERSGD} --zero=1"),
    "powersgd-hsdp": (4, f"{POWERSGD} {HSDP}"),
    "islands": (2, f"{ISLANDS} --grad_compression=int8"),
    "islands-fsdp": (4, f"{ISLANDS} --zero=3"),
}
WAYS = {name: (processes, flags.split()) for name, (processes, flags) in WAYS.items()}


def args_of(model, way="one"):
    """The settings of a run."""
    return [*ONE, *shlex.split(MODELS[model]), *WAYS[way][1]]


def rows(fast, slow):
    """The (model, way) of tables {model: ways}, of which those of the second are slow."""
    tables = (fast, []), (slow, pytest.mark.slow)
    return [
        pytest.param(model, way, marks=marks, id=f"{model}-{way}")
        for table, marks in tables
        for model, ways in table.items()
        for way in ways.split()
    ]


# ------------------------------------------------------------------------------------------------------------
# the curve of one process

CURVES = {
    "gpt2": "b12 2 3 7 zero1 zero3 pp2 shares-2-1-zero1 shares-3-1-1",
    "gpt2-muon": "zero1-3",
    "llama": "2 cp2",
    "gpt2-moe": "ep2",
    "two sequences": "3",
    "lion": "2",
    "schedule-free": "zero3",
}
SLOW_CURVES = {
    "gpt2": "b1 zero2 zero3-alone zero3-b24 zero3-7 offload hsdp tp2-pp2-zbv fsdp-tp2-pp2 "
    "shares-2-1-zero3 shares-1-3-b24 shares-2-1-cp2 bf16 fp16-hsdp int8-3 int8-tp",
    "nanochat": "zero3 fsdp-cp2",
    "bfloat16": "tp2",
    "float16": "zero1 zero3",
    "gpt2-moe": "ep2-hsdp shares-3-1-ep2",
    "llama-moe": "ep2-pp2-fsdp",
    "mixture": "3 pp2 cp2",
    "whole micro-batches": "2 3",
    "lion": "pp2",
    "schedule-free": "zero1",
    "sgd": "cp2",
    "muon+free": "zero3",
}
# how far models and ways with fewer bits may be from float32 on one process
ROUNDING = {
    "bfloat16": dict(loss=1e-3, norm=1e-2, weights=1e-2),
    "float16": dict(loss=5e-4, norm=2e-3, weights=1e-2),
    "fp16": dict(loss=2e-5, norm=5e-4, weights=1e-2),
    "bf16": dict(loss=1e-4, norm=1e-3, weights=1e-2),
    "int8": dict(loss=5e-4, norm=1e-2, weights=1e-2),
}
ROUTING = {
    "expert_tokens_min": dict(absolute=4.01),
    "expert_tokens_mean": dict(relative=1e-6),
    "expert_tokens_max": dict(absolute=4.01),
    "router_entropy": dict(absolute=2e-5),
    "auxiliary_loss": dict(relative=2e-3),
}


def compare_routing(one, other):
    """
    The routers' numbers of two runs. Rounding can change the choice of a token whose second and third expert
    are about equally likely, one of 768 in each layer.
    """
    for key, tolerance in ROUTING.items():
        same(column(one, key), column(other, key), **tolerance)
    assert column(one, "dead_experts") == column(other, "dead_experts")


def compare(one, other, loss=5e-6, norm=1e-5, weights=1e-4):
    """The numbers of each step and evaluation of two runs, their last weights, and the optimizers' steps."""
    keys = {key for record in records(one) for key in record if key.startswith(("train_loss", "val_loss"))}
    for key in ("loss", *keys):
        same(column(one, key), column(other, key), absolute=loss)
    same(column(one, "grad_norm"), column(other, "grad_norm"), relative=norm)
    if column(one, "router_entropy"):
        compare_routing(one, other)
    a, b = tensors_in(one), tensors_in(other)
    # not moments, nor what compression keeps
    names, others = ({n for n in t if n.startswith("model.") or n.endswith(".step")} for t in (a, b))
    assert names ^ others <= {"model.lm_head.weight"}, "a tied head is in ckpt.pt only"
    for name in names & others:
        torch.testing.assert_close(a[name], b[name], atol=weights, rtol=0, msg=name)


@pytest.mark.parametrize(("model", "way"), rows(CURVES, SLOW_CURVES))
def test_every_layout_has_the_curve_of_one_process(trained, model, way):
    one, other = trained(args_of(model)), trained(args_of(model, way), WAYS[way][0])
    losses, compression = column(one, "loss"), way.partition("-")[0]
    assert len(losses) == 10 and len(column(one, "val_loss")) == 3
    assert losses[0] - losses[9] > 0.01, "it learns"
    compare(one, other, **ROUNDING.get(model, ROUNDING.get(compression, {})))
    assert compression not in ROUNDING or column(other, "loss") != losses


def test_more_processes_than_sequences(trained):
    said = "warning: 1 of 3 data-parallel ranks read only padding: a step reads 2 sequences"
    for nproc, way in ((1, "one"), (3, "3")):
        text = (trained(args_of("two sequences", way), nproc) / "output.txt").read_text()
        assert text.count(said) == text.count("warning:") == (nproc == 3)
        assert text.count("on each rank 1 micro-step x 1 row (1 row of padding)") == (nproc == 3)


@pytest.mark.parametrize("flags", ["", "--pp=2"])
def test_ranks_that_do_not_reduce_their_gradients_part(zygote, session_work, tmp_path, flags):
    """With grad_sync never, which measures communication: by DDP, and where no wrapper reduces."""
    args = [*args_of("gpt2"), *flags.split(), "--grad_sync=never", "--save_checkpoint=False"]
    nproc = 4 if flags else 2
    run = zygote.train([*args, f"--out_dir={tmp_path}/out"], session_work, nproc, ok=False)
    assert set(run.codes) == {1} and "step 5: weights differ across ranks" in run.text()


# ------------------------------------------------------------------------------------------------------------
# resumes

BITS = {"dropout": "zero3 powersgd islands", "lion": "2", "schedule-free": "zero3"}
SLOW_BITS = {
    "dropout": "zero2 hsdp tp2 pp2 int8-hsdp int8-pp topk-zero1 powersgd-zero1 powersgd-hsdp islands-fsdp",
    "nanochat-dropout": "3 zero1",
    "moe-dropout": "int8-ep",
    "nanochat-moe-dropout": "ep2-zero1",
    "schedule-free": "zero1",
}


@pytest.mark.parametrize(("model", "way"), rows(BITS, SLOW_BITS))
def test_a_resume_in_the_same_way_has_the_same_bits(zygote, session_work, trained, tmp_path, model, way):
    """From step 5, which is within a period of local_steps."""
    args, nproc = args_of(model, way), WAYS[way][0]
    straight, out = trained(args, nproc), tmp_path / "out"
    shutil.copytree(straight, out, symlinks=True)
    shutil.rmtree(out / "step_00000010")
    zygote.train([*args, "--init_from=resume", f"--out_dir={out}"], session_work, nproc)
    assert [r["iter"] for r in records(out) if r.get("event") == "resume"] == [5]
    assert_same_run(out, straight)


# the ways in which a run is trained, two steps in each
CHANGES = {"gpt2": "one>zero3>zero1>one>tp2", "nanochat": "2>zero3-3", "gpt2-moe": "ep2>one"}
SLOW_CHANGES = {
    "gpt2": "one>hsdp>zero2>3 zero1>zero1-3>zero3>offload>2 cp2>zero1-tp2 tp2-pp2-zbv>one",
    "nanochat": "zero3-3>one>zero1>hsdp fsdp-cp2>one",
    "gpt2-moe": "ep2-fsdp>ep2-tp2",
    "schedule-free": "zero3>one zero1>zero3",
}
IN_ONE_FILE = ("one", "2", "3", "cp2")


@pytest.mark.parametrize(("model", "ways"), rows(CHANGES, SLOW_CHANGES))
def test_a_run_that_goes_on_in_other_ways_has_the_curve_of_one_process(
    zygote, session_work, trained, tmp_path, model, ways
):
    """The checkpoint's number of experts applies, not the settings'."""
    common, step = ["--eval_interval=2", f"--out_dir={tmp_path}/out"], 0
    for way in ways.split(">"):
        args = [*args_of(model, way), *common, f"--max_iters={step + 1}"]
        args += ["--init_from=resume", "--n_expert=0"] if step else []
        text = zygote.train(args, session_work, WAYS[way][0]).text()
        assert not [note for note in ("start at zero", "the loss curve changes") if note in text]
        step += 2
        assert (tmp_path / f"out/step_{step:08d}/ckpt.pt").exists() == (way in IN_ONE_FILE)
    one = trained([*args_of(model), *common[:1], f"--max_iters={step - 1}"])
    assert len(column(one, "loss")) == step
    compare(one, tmp_path / "out")
