"""Mixture of experts on several ranks: the routers' numbers, and dense models that become mixtures."""

import pytest
import torch
from runs import TINY, column, same, wait_for
from test_layouts import ONE, WAYS, args_of, compare_routing

from isogpt.checkpoint.ckpt_file import MODEL_ARGS
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
    nanogpts = {name: value for name, value in model.describe().items() if name in MODEL_ARGS}
    state = {"model": model.state_dict(), "model_args": nanogpts, "iter_num": 0, "best_val_loss": 9.0}
    state["isogpt"] = {"model_args": model.describe()}
    (shared_work / "lopsided").mkdir()
    torch.save(state, shared_work / "lopsided/ckpt.pt")
    return shared_work / "lopsided"


@pytest.mark.parametrize(
    "way", ["ep2", *(pytest.param(w, marks=pytest.mark.slow) for w in ("ep2-fsdp", "3"))]
)
def test_padding_rows_do_not_count_and_dead_experts_are_named(trained, lopsided, way):
    """Twenty-five sequences; with ep no token of block 2 is sent to the second rank."""
    args = [f"--init_from={lopsided}", "--gradient_accumulation_steps=5", "--batch_size=5", "--max_iters=2"]
    args += ["--learning_rate=1e-4"]
    outs = []
    for name in ("one", way):
        nproc, flags = WAYS[name]
        out = trained([*ONE, *args, *flags], nproc)
        text = (out / "output.txt").read_text()
        assert ("of padding)" in text) == (name != "one")
        steps = [line for line in text.splitlines() if line.startswith("iter ")]
        assert len(steps) == 3
        assert all(line.endswith(", dead experts (layer.expert): 1.3, 2.2, 2.3") for line in steps), steps
        tokens = dict.fromkeys(range(3), 25 * 32 * 2 / 4)
        assert column(out, "expert_tokens_mean") == pytest.approx(tokens)
        outs.append(out)
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
UPCYCLED = [("gpt2", "one", "ep2-fsdp"), ("nanochat", "one", "ep2-tp2"), ("llama", "zero3", "ep2-pp2")]


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


def test_the_number_of_active_experts_is_the_checkpoints(trained):
    args = [*args_of("llama-moe"), "--max_iters=0"]
    out = trained([*args, f"--init_from={trained(args)}", "--n_expert_active=4", "--save_checkpoint=False"])
    said = "note:    n_expert_active 3 of the checkpoint is used, not n_expert_active 4\n"
    assert said in (out / "output.txt").read_text()
    assert column(out, "expert_tokens_mean") == {0: 24 * 32 * 3 / 4}


def test_a_different_number_of_experts_is_refused_once(zygote, session_work, trained, tmp_path):
    """And in which a dense model is upcycled when it is resumed. The advice works."""
    folder, moe = (trained([*args_of(model), "--max_iters=0"]) for model in ("gpt2", "gpt2-moe"))
    dense_said = (
        "error: n_expert is 4, but the checkpoint's is 0: to start a new run in "
        f"which each expert is a copy of the MLP, set --init_from={folder} and a different --out_dir\n"
    )
    moe_said = "error: n_expert is 2, but the checkpoint's is 4: set --n_expert=4\n"
    cases = (
        (["--init_from=resume", f"--out_dir={folder}", "--n_expert=4"], dense_said),
        (["--init_from=auto", f"--out_dir={moe}", "--n_expert=2"], moe_said),
        ([f"--init_from={moe}", f"--out_dir={tmp_path}/other", "--n_expert=2"], moe_said),
    )
    for args, said in cases:
        run = zygote.train([*ONE, *args], session_work, 2, ok=False)
        assert run.codes == [1, 1] and run.text() == said
    assert not (tmp_path / "other").exists()


def test_two_processes_say_a_mistake_once(zygote, work):
    """Rank 0; the other one waits until a launcher ends it."""
    run = zygote.start([*TINY, "--n_expert=4", "--n_expert_active=1"], work, 2)
    wait_for(lambda: run.poll() or run.codes[0] is not None)
    run.kill([1])
    said = "error: n_expert_active is 1, but needs to be 2 or more: set --n_expert_active=2\n"
    assert run.codes[0] == 1 and run.text() == said
    assert not (work / "out").exists()
