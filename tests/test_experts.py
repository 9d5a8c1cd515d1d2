"""Mixture of experts on several ranks: the routers' numbers, and dense models that become mixtures."""

import re
from itertools import islice

import pytest
import torch
from runs import column, same, train_defaults
from test_layouts import ONE, WAYS, args_of, compare_routing
from test_model import roughen
from test_statistics import LENGTH, reader_of

from isogpt.checkpoint import huggingface
from isogpt.checkpoint.ckpt_file import nanogpt_state
from isogpt.training import optim
from model import GPT, GPTConfig


@pytest.fixture(scope="module")
def lopsided(shared_work):
    """
    A folder with a model in which no token chooses the last expert of block 1, and the last two of block 2.
    """
    model = GPT(GPTConfig(32, 65, 4, 4, 32, n_expert=4), seed=1)
    for number, scores in ((1, [0.0, 0.0, 0.0, -1.0]), (2, [0.0, 0.0, -1.0, -1.0])):
        block = model.transformer.h[number]
        with torch.no_grad():
            block.ln_2.bias[0] = 50.0
            block.mlp.router.weight[:, 0] = torch.tensor(scores)
    run = {"model_args": model.describe(), "iter_num": 0, "best_val_loss": 9.0, "config": {}, "isogpt": {}}
    folder = shared_work / "lopsided"
    folder.mkdir()
    optimizers = optim.make_optimizers(model, train_defaults())
    torch.save(nanogpt_state(run, model, optimizers), folder / "ckpt.pt")
    return folder, model


def first_step(folder, model, *sizes):
    """The micro-batches that a run reads in its first step on one process."""
    reader = reader_of(folder, model, *sizes)
    return islice(reader.train(0, 0), reader.share.micro_steps)


def routing_of(model, batches):
    """What is in the record of the routers, from a model's numbers."""
    for x, y in batches:
        model.train()(x, y)
    loss, entropy, *counts = model.routing.T  # of each layer
    n_tokens, counts = 25 * LENGTH, torch.stack(counts)
    record = {f"expert_tokens_{name}": getattr(counts, name)().item() for name in ("min", "mean", "max")}
    entropy, loss = entropy.mean().item() / n_tokens, loss.sum().item() / n_tokens
    return record | {"router_entropy": entropy, "auxiliary_loss": loss}


@pytest.mark.parametrize("way", ["ep2", pytest.param("ep2-fsdp", marks=pytest.mark.slow)])
def test_padding_rows_do_not_count_and_dead_experts_are_named(trained, session_work, lopsided, way):
    """An odd number of sequences; with ep no token of block 2 is sent to the second rank."""
    folder, model = lopsided
    args = [f"--init_from={folder}", "--gradient_accumulation_steps=5", "--batch_size=5", "--max_iters=2"]
    outs = []
    for name in ("one", way):
        nproc, flags = WAYS[name]
        out = trained([*ONE, *args, "--learning_rate=1e-4", *flags], nproc)
        text = (out / "output.txt").read_text()
        assert ("of padding)" in text) == (name != "one")
        steps = [line for line in text.splitlines() if line.startswith("iter ")]
        assert len(steps) == 3
        assert all(line.endswith(", dead experts (layer.expert): 1.3, 2.2, 2.3") for line in steps), steps
        outs.append(out)
    expected = routing_of(model, first_step(session_work, model, 5, 5))
    assert {key: column(outs[0], key)[0] for key in expected} == pytest.approx(expected, rel=1e-4)
    same(*(column(out, "loss") for out in outs), absolute=2e-5)
    compare_routing(*outs)


@pytest.mark.slow
def test_numbers_between_logged_steps_are_averages(trained):
    args = args_of("gpt2-moe", "ep2")
    each, mean = (column(trained([*args, *more], 2), "router_entropy") for more in ([], ["--log_interval=4"]))
    assert sorted(mean) == [0, 4, 8]
    for step in (4, 8):
        assert mean[step] == pytest.approx(sum(each[s] for s in range(step - 3, step + 1)) / 4, abs=1e-5)


# ------------------------------------------------------------------------------------------------------------
# upcycling


# a model without experts, the way in which it is trained, and the way of the model with experts
UPCYCLED = [("gpt2", "one", "ep2-fsdp"), ("llama", "zero3", "ep2-pp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "source", "way"), UPCYCLED)
def test_a_dense_model_is_upcycled(trained, model, source, way):
    """The first losses are the dense model's; the next ones depend on the routers, and not on the layout."""
    folder = trained([*args_of(model, source), "--max_iters=4"], WAYS[source][0])
    args = [f"--init_from={folder}", "--max_iters=1", "--save_checkpoint=False"]
    dense = trained([*args_of(model), *args])
    one, other = (
        trained([*args_of(model, name), *args, "--n_expert=4"], WAYS[name][0]) for name in ("one", way)
    )
    for key in ("loss", "val_loss", "train_loss"):
        assert column(other, key)[0] == pytest.approx(column(dense, key)[0], abs=1e-5)
    same(column(one, "loss"), column(other, "loss"), absolute=2e-5)
    same(column(one, "grad_norm"), column(other, "grad_norm"), relative=1e-4)


@pytest.mark.slow
def test_experts_from_a_dense_model_of_transformers(zygote, work):
    """Each expert is a copy of the MLP: the first loss is the dense model's."""
    model = roughen(GPT(GPTConfig(LENGTH, 65, 2, 4, 32, arch="llama", n_kv_head=1)), std=0.1)
    huggingface.save(work / "dense", model, {})
    zygote.train(["--init_from=dense", "--max_iters=0", "--n_expert=4", "--ep=2", "--zero=3"], work, 2)
    losses = [model(x, y, 8.0 * LENGTH)[1].item() for x, y in first_step(work, model)]
    assert column(work / "out", "loss")[0] == pytest.approx(sum(losses), abs=1e-5)


def test_the_number_of_active_experts_is_the_checkpoints(trained):
    args = [*args_of("llama-moe"), "--max_iters=0"]
    out = trained([*args, f"--init_from={trained(args)}", "--n_expert_active=4", "--save_checkpoint=False"])
    said = "note:    n_expert_active 3 of the checkpoint is used, not n_expert_active 4\n"
    assert said in (out / "output.txt").read_text()
    assert column(out, "expert_tokens_mean") == {0: 24 * 32 * 3 / 4}


def test_a_different_number_of_experts_is_refused_once(zygote, session_work, trained):
    """And in which a dense model is upcycled when it is resumed."""
    folder, moe = (trained([*args_of(model), "--max_iters=0"]) for model in ("gpt2", "gpt2-moe"))
    advice = f"to start a new run in which .*, set --init_from={folder} and a different --out_dir"
    dense_said = f"error: n_expert is 4, but the checkpoint's is 0: {advice}\n"
    moe_said = "error: n_expert is 2, but the checkpoint's is 4: set --n_expert=4\n"
    for out, n_expert, said in ((folder, 4, dense_said), (moe, 2, moe_said)):
        args = [*ONE, "--init_from=resume", f"--out_dir={out}", f"--n_expert={n_expert}"]
        run = zygote.train(args, session_work, 2, ok=False)
        assert run.codes == [1, 1] and re.fullmatch(said, run.text())
