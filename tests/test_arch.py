"""Every architecture and optimizer: one curve on any layout, bitwise resume, to transformers and back."""

import pytest
from runs import column
from test_parity import same

ONE = ["--gradient_accumulation_steps=4", "--batch_size=12", "--n_layer=3", "--n_head=4", "--max_iters=19"]
MODELS = {
    "gpt2-muon": ["--optimizer=muon"],
    "nanochat": ["--arch=nanochat"],
    "nanochat-muon": ["--arch=nanochat", "--optimizer=muon", "--n_kv_head=2"],
    "llama": ["--arch=llama", "--n_kv_head=1"],
    "llama-muon": ["--arch=llama", "--optimizer=muon", "--n_kv_head=2", "--head=tied"],
}
WAYS = {
    "ddp-2": (2, []),
    "ddp-3": (3, []),
    "ddp-4": (4, []),
    "zero1-2": (2, ["--zero=1"]),
    "zero1-3": (3, ["--zero=1"]),
    "zero2-2": (2, ["--zero=2"]),
    "zero3-2": (2, ["--zero=3"]),
    "zero3-3": (3, ["--zero=3"]),
    "hsdp-4": (4, ["--zero=3", "--dp_replicate=2"]),
    "offload-2": (2, ["--zero=3", "--cpu_offload=True"]),
    "full": (1, ["--activation_checkpointing=full"]),
    "selective": (1, ["--activation_checkpointing=selective"]),
    "every-2": (1, ["--activation_checkpointing=every:2"]),
}
QUICK = [("nanochat-muon", "zero3-3"), ("nanochat-muon", "zero1-2"), ("llama-muon", "ddp-2"), ("llama", "selective"),
         ("gpt2-muon", "zero1-3")]  # fmt: skip
ALL = [(m, w) if (m, w) in QUICK else pytest.param(m, w, marks=pytest.mark.slow) for m in MODELS for w in WAYS]


@pytest.fixture(scope="module")
def one(zygote, shared_work):
    """{model: folder of a run on one process}, made when it is first asked for."""
    made = {}

    def make(model):
        if model not in made:
            made[model] = shared_work / f"one-{model}"
            zygote.train([*ONE, *MODELS[model], "--eval_interval=10", f"--out_dir={made[model]}"], shared_work)
        return made[model]

    return make


@pytest.mark.parametrize(("model", "way"), ALL)
def test_every_layout_has_the_curve_of_one_process(zygote, shared_work, one, model, way):
    nproc, flags = WAYS[way]
    out = shared_work / f"{model}-{way}"
    zygote.train([*ONE, *MODELS[model], *flags, "--eval_interval=10", f"--out_dir={out}"], shared_work, nproc)
    assert len(column(out, "loss")) == 20
    same(column(one(model), "loss"), column(out, "loss"), absolute=1e-5)
    same(column(one(model), "grad_norm"), column(out, "grad_norm"), relative=1e-4)
    same(column(one(model), "val_loss"), column(out, "val_loss"), absolute=1e-5)
