"""measure/roofline.py: what operators read, write and compute, and a compiled step against formulas."""

import json
import subprocess
import sys

import pytest
import torch
from runs import REPO

sys.path.append(str(REPO / "measure"))

import roofline
from roofline import ATTENTION, BACKWARD, CARDS, FORWARD, MATMUL, MLP, TRITON, UPDATE, Kernel

aten = torch.ops.aten


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Tensors of these shapes without memory."""
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def test_bytes_of_operators():
    a, b, row = tensors((100, 8), (100, 8), (1, 8))
    assert roofline.traffic(aten.add.Tensor, (a, b), {}, a + b) == 3 * 3200
    assert roofline.traffic(aten.add_.Tensor, (a, b), {}, a) == 3 * 3200  # reads both, writes one
    assert roofline.traffic(aten.zero_.default, (a,), {}, a) == 3200
    assert roofline.traffic(aten.copy_.default, (a, b), {}, a) == 2 * 3200
    # what is expanded is read once
    assert roofline.traffic(aten.mul.Tensor, (a, row.expand(100, 8)), {}, a * row) == 2 * 3200 + 32
    assert roofline.traffic(aten.view.default, (a, [800]), {}, a.view(800)) == 0
    (index,) = tensors((5,), dtype=torch.int64)
    assert roofline.traffic(aten.embedding.default, (a, index), {}, a[:5]) == 2 * 160 + 40


@pytest.mark.parametrize(("clips", "bytes_each"), [(False, 28), (True, 32)])
def test_fused_adamw_moves_28_bytes_a_parameter(clips, bytes_each):
    lists = [tensors((1000, 10)) for _ in range(4)]
    kwargs = {"grad_scale": tensors(())[0] if clips else None}
    size = roofline.traffic(aten._fused_adamw_.default, (*lists, [], []), kwargs, None)
    assert size // 10_000 == bytes_each  # and 4 bytes of the divisor


def test_flops_of_matmuls_and_attention():
    a, b = tensors((30, 20), (20, 50))
    assert roofline.flops_of(aten.mm.default, (a, b), {}, a @ b) == 2 * 30 * 20 * 50
    rows, experts = tensors((30, 20), (4, 20, 50))
    assert roofline.flops_of(aten._grouped_mm.default, (rows, experts), {}, None) == 2 * 30 * 20 * 50
    q, k, v = tensors(*[(2, 3, 64, 16)] * 3)
    attention = aten._scaled_dot_product_flash_attention.default
    whole = 2 * 2 * 2 * 3 * 64 * 64 * 16
    assert roofline.flops_of(attention, (q, k, v), {}, (q,)) == whole
    assert roofline.flops_of(attention, (q, k, v, 0.0, True), {}, (q,)) == whole / 2


def test_time_is_the_longer_of_bytes_and_flops():
    card = CARDS["h100"]
    assert Kernel(TRITON, MLP, FORWARD, "", card.bytes_per_s).seconds(card) == 1
    assert Kernel(MATMUL, MLP, FORWARD, "", card.bytes_per_s / 2, 3 * card.matmul).seconds(card) == 3
    assert Kernel(ATTENTION, MLP, BACKWARD, "", 0, card.attention[1]).seconds(card) == 1


@pytest.mark.slow
@pytest.mark.skipif(bool(roofline.LACKING), reason=roofline.LACKING or "not skipped")
def test_a_compiled_step_has_the_flops_and_the_bytes_of_the_formulas(tmp_path):
    shape = ["--n_layer=2", "--n_head=2", "--n_embd=64", "--vocab_size=256", "--block_size=128"]
    options = ["--batch_size=4", "--optimizer=muon", f"--json={tmp_path / 'step'}"]
    subprocess.run(
        [sys.executable, "measure/roofline.py", *shape, *options], cwd=REPO, check=True, timeout=250
    )
    kernels = json.loads((tmp_path / "step").read_text())["kernels"]
    update = [k for k in kernels if k["pass_"] == UPDATE]
    passes = [k for k in kernels if k["pass_"] != UPDATE]
    flops = {
        kind: sum(k["flops"] * k["launches"] for k in passes if k["kind"] == kind)
        for kind in (MATMUL, ATTENTION)
    }
    of_blocks, vocabulary = 2 * 12 * 64 * 64, 256 * 64
    assert flops[MATMUL] == 6 * (of_blocks + vocabulary) * 4 * 128
    # two matmuls forward, five backward, without the scores above the diagonal
    assert flops[ATTENTION] == 2 * 7 * 4 * 128 * 128 * 64

    # Muon: 9 matmuls for each of four shapes. Gradients and momentum are read and momentum and updates
    # written, then updates and weights are read and weights written: at least
    assert sum(k["launches"] for k in update if k["kind"] == MATMUL) == 36
    moved = sum(k["bytes"] * k["launches"] for k in update if k["kind"] == TRITON)
    assert moved >= 7 * 4 * of_blocks
    # AdamW: embeddings and norms
    adamw = [k for k in kernels if k["name"] == "_fused_adamw_"]
    moved = sum(k["bytes"] * k["launches"] for k in adamw)
    assert {k["pass_"] for k in adamw} == {UPDATE}
    assert moved == pytest.approx(32 * (vocabulary + 128 * 64 + 5 * 64), rel=0.01)
