"""Sharding and recompute change the memory, not the curve; a save on any layout resumes on any other."""

import shutil

import pytest
import torch
from runs import column, records
from test_parity import same

ONE = ["--gradient_accumulation_steps=4", "--batch_size=12", "--n_layer=3"]
# name: (processes, flags); all read 48 sequences a step and are compared with one process
WAYS = {
    "zero1": (2, ["--zero=1"]),
    "zero2": (2, ["--zero=2"]),
    "zero3": (2, ["--fsdp=True"]),
    "zero1-last-accum1": (2, ["--zero=1", "--gradient_accumulation_steps=1", "--batch_size=48"]),
    "zero2-last": (2, ["--zero=2", "--grad_sync=last"]),
    "zero3-last": (2, ["--zero=3", "--grad_sync=last"]),
    "zero0-every": (2, ["--grad_sync=every"]),
    "zero3-offload": (2, ["--zero=3", "--cpu_offload=True"]),
    "zero2-offload": (2, ["--zero=2", "--cpu_offload=True"]),
    "zero3-accum1": (2, ["--zero=3", "--gradient_accumulation_steps=1", "--batch_size=48"]),
    "hsdp-2": (2, ["--zero=3", "--dp_replicate=2"]),
    "hsdp-4": (4, ["--zero=3", "--dp_replicate=2"]),
    "hsdp-4-zero2": (4, ["--zero=2", "--dp_replicate=2"]),
    "zero1-3": (3, ["--zero=1"]),
    "zero2-3": (3, ["--zero=2"]),
    "zero3-3": (3, ["--zero=3"]),
    "zero3-4": (4, ["--zero=3"]),
    "zero1-7": (7, ["--zero=1"]),
    "zero3-7": (7, ["--zero=3"]),
    "full": (1, ["--activation_checkpointing=full"]),
    "selective": (1, ["--activation_checkpointing=selective"]),
    "every:2": (1, ["--activation_checkpointing=every:2"]),
    "ddp-full": (2, ["--activation_checkpointing=full"]),
    "zero3-selective": (2, ["--zero=3", "--activation_checkpointing=selective"]),
    "zero3-full": (2, ["--zero=3", "--activation_checkpointing=full"]),
    "zero2-every:2": (2, ["--zero=2", "--activation_checkpointing=every:2"]),
    "zero3-alone": (1, ["--zero=3"]),
}


@pytest.fixture(scope="module")
def one(zygote, shared_work):
    zygote.train([*ONE, "--out_dir=one", "--eval_interval=15"], shared_work)
    return shared_work / "one"


@pytest.mark.parametrize("name", WAYS)
def test_the_curve_of_one_process(zygote, shared_work, one, name):
    nproc, flags = WAYS[name]
    out = shared_work / name.replace(":", "-")
    zygote.train([*ONE, "--eval_interval=15", *flags, f"--out_dir={out}"], shared_work, nproc)
    same(column(one, "loss"), column(out, "loss"), absolute=1e-5)
    same(column(one, "grad_norm"), column(out, "grad_norm"), relative=1e-4)
    if "accum1" not in name:
        same(column(one, "val_loss"), column(out, "val_loss"), absolute=1e-5)
    assert len(column(out, "loss")) == 30
