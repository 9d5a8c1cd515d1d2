"""Every architecture: its optimizers, its residual stream, and to transformers and back."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from runs import TINY, accepted, column, default_plan, records, start_changed, tensors_in, train_defaults
from test_layouts import args_of
from test_model import masked_attention, roughen, same_states
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from isogpt.checkpoint import huggingface
from isogpt.checkpoint.search import find_checkpoint
from isogpt.nn.architecture import ARCHS
from isogpt.nn.kernels import RMSNorm, relu2, rotate
from isogpt.parallel.attach import replace_seams
from isogpt.training import optim
from model import GPT, GPTConfig

OVERFLOW = """
import torch
unscale = torch.amp.GradScaler.unscale_
def overflow(scaler, optimizer):
    if optimizer.__class__.__name__ == {!r}:
        optimizer.param_groups[0]["params"][0].grad[0, 0] = float("inf")
    unscale(scaler, optimizer)
torch.amp.GradScaler.unscale_ = overflow
"""


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_an_overflow_in_one_optimizer_skips_the_step_of_both(zygote, work, kind):
    args = ["--optimizer=muon", "--dtype=float16", "--grad_clip=0", "--max_iters=1", "--out_dir=out"]
    start_changed(zygote, OVERFLOW.format(kind), args, work).wait()
    state = torch.load(work / "out" / "ckpt.pt", weights_only=True)
    initial = GPT(GPTConfig(**state["model_args"], **state["isogpt"]["model_args"]), seed=1337).state_dict()
    assert all(torch.equal(w, initial[name]) for name, w in state["model"].items())
    assert state["isogpt"]["scaler"]["scale"] == 2**14


def orthogonalized(gradients, dtype=torch.float32):
    """How the first step of Muon moves a matrix of a block with these gradients (matrices, rows, columns)."""
    model = GPT(GPTConfig(8, 16, 1, 1, 8, bias=False), 0)
    rows, columns = gradients.shape[1:]
    params = [nn.Parameter(torch.zeros(rows, columns)) for _ in gradients]
    for layer, (p, gradient) in enumerate(zip(params, gradients, strict=True)):
        linear = nn.Linear(columns, rows, bias=False)
        linear.weight, p.grad = p, gradient.clone()
        model.transformer.h[0].add_module(f"linear{layer}", linear)
    settings = train_defaults(optimizer="muon", muon_lr=1.0)
    for optimizer in optim.make_optimizers(model, settings, muon_dtype=dtype):
        optimizer.step()
    return torch.stack([-p.detach() for p in params]) / max(1, rows / columns) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_muon_brings_singular_values_close_to_1(dtype):
    """
    Also of matrices of rank 1 and of zeros, at any scale, which leaves their direction. Where the norm of a
    matrix is several times the largest singular value, the polynomials enlarge the smallest too little unless
    this value is bounded.
    """
    generator, rounding = torch.Generator().manual_seed(0), 0.05 if dtype == torch.bfloat16 else 0.02
    for shape in ((2, 48, 48), (1, 24, 96), (1, 96, 24)):
        x = torch.randn(*shape, generator=generator)
        for scale in (1e-8, 1.0, 1e3):
            found = orthogonalized(scale * x, dtype)
            torch.testing.assert_close(found, orthogonalized(x), atol=rounding, rtol=0)
            values = torch.linalg.svdvals(found)
            assert values.max() < 1.66 and (values > 0.3).float().mean() > 0.95
    u, v = torch.randn(40, 1, generator=generator), torch.randn(1, 60, generator=generator)
    for x in (u @ v, torch.ones(40, 60)):
        values = torch.linalg.svdvals(orthogonalized(x[None], dtype))[0]
        assert 0.3 < values[0] < 1.66 and values[1:].max() < 0.3
    assert not orthogonalized(torch.zeros(1, 8, 8), dtype).any()
    u, v = (torch.linalg.qr(torch.randn(64, 64, generator=generator))[0] for _ in range(2))
    values = torch.linalg.svdvals(orthogonalized(((u * torch.logspace(0, -2.3, 64)) @ v)[None], dtype))
    assert values.min() > 0.3 and values.max() < 1.66


def test_settings_that_a_checkpoint_overrides(zygote, session_work, trained, tmp_path):
    """A resume says what it changes; a new run from the weights reads anew."""
    source = trained(args_of("llama"))
    shutil.copytree(source, tmp_path / "out", symlinks=True)
    of_shape = ["--n_kv_head=1", "--head=untied"]
    of_curve = "--seed=1 --data_order=shuffle --block_size=16 --beta2=0.9 --grad_clip=0.5".split()
    said = [
        "n_kv_head 2, head tied of the checkpoint are used, not n_kv_head 1, head untied",
        "this run continues with seed 1 (was 1337), data_order shuffle (was random), block_size 16 (was 32), "
        "beta2 0.9 (was 0.95), grad_clip 0.5 (was 1.0): the loss curve changes",
    ]
    for more, sentences in (
        # a longer run with the same sequences in each step
        (["--init_from=resume", "--max_iters=10", "--batch_size=4", "--gradient_accumulation_steps=6"], []),
        (["--init_from=resume", "--max_iters=11", *of_shape, *of_curve], said),
        ([f"--init_from={source}", "--max_iters=0", *of_shape, *of_curve], said[:1]),
    ):
        args = [*args_of("llama"), *more, f"--out_dir={tmp_path}/out"]
        notes = re.findall(
            "^note:    (.* used, .*|.* curve changes)$", zygote.train(args, session_work).text(), re.M
        )
        assert notes == sentences


# ------------------------------------------------------------------------------------------------------------
# the residual stream


@pytest.mark.parametrize("n_expert", [0, 4])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_residual_stream_in_bfloat16(arch, n_expert):
    """Under autocast in bfloat16 only, with gradients in float32 that differ by rounding."""
    shape = dict(block_size=32, vocab_size=65, n_layer=3, n_head=2, n_embd=32, bias=arch == "gpt2")
    x, gradients = torch.randint(65, (2, 32), generator=torch.Generator().manual_seed(0)), []
    for stream in ("float32", "bfloat16"):
        config = GPTConfig(arch=arch, n_expert=n_expert, residual_dtype=stream, **shape)
        model, dtypes = GPT(config, seed=1), set()
        norms = [norm for block in model.transformer.h for norm in (block.ln_1, block.ln_2)]
        for norm in [*norms, model.transformer.ln_f]:
            norm.register_forward_pre_hook(lambda _, args: dtypes.add(args[0].dtype))
        for autocast, expected in ((torch.bfloat16, getattr(torch, stream)), (None, torch.float32)):
            dtypes.clear()
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = model(x, x, 64.0)[1]
            assert dtypes == {expected}
            if autocast:
                loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(grad.dtype == torch.float32 for grad in gradients[1])
    pairs = zip(*gradients, strict=True)
    tolerance = 0.15 if n_expert else 0.05  # a token between two experts may go to the other one
    square = sum((a - b).square().sum() for a, b in pairs)
    assert 0 < square <= tolerance**2 * sum(a.square().sum() for a in gradients[0])


@pytest.mark.parametrize(
    ("stream", "dtype", "changes", "expected"),
    [
        ("float32", "bfloat16", {}, "float32"),
        ("bfloat16", "bfloat16", {}, "bfloat16"),
        ("bfloat16", "float32", {}, "float32"),  # sample.py --dtype=float32
        ("bfloat16", "float16", {}, "float32"),
        ("float32", "bfloat16", {"zero": 3}, "bfloat16"),  # fully_shard casts what it computes with
        ("float32", "bfloat16", {"zero": 3, "exact": True}, "float32"),  # autocast does
    ],
)
def test_the_dtype_of_the_residual_stream_in_a_plan(stream, dtype, changes, expected):
    """Of what the stages of a pipeline send, and of what a micro-batch's memory is estimated from."""
    plan = default_plan(dtype=dtype, model_args={"residual_dtype": stream}, **changes)
    assert plan.stream_dtype == getattr(torch, expected)
    assert replace(plan, model_args={}).stream_dtype in (torch.float32, plan.torch_dtype)  # not known yet


def test_a_stream_in_bfloat16_has_no_effect_on_computation_in_another_dtype(trained):
    """And the run says so."""
    run = trained([*TINY, "--residual_dtype=bfloat16"])
    assert column(run, "loss") == column(trained(TINY), "loss")
    note = "note:    residual_dtype bfloat16 has no effect, because dtype is float32"
    assert (run / "output.txt").read_text().count(note) == 1


ANGLES = torch.arange(3.0, dtype=torch.float64)[:, None, None] * torch.tensor([1.0, 0.3])  # (T, 1, D / 2)
ROPE = torch.stack((ANGLES.cos().repeat(1, 1, 2), torch.cat((-ANGLES.sin(), ANGLES.sin()), -1)))
OPERATORS = {
    "norm": RMSNorm(4, 1e-6, elementwise_affine=False),
    "rotate": lambda x: rotate(x, ROPE),
    "rotate and norm": lambda x: rotate(x, ROPE, 1e-6),
    "relu2": relu2,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_the_operators_in_float64(name):
    x = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    assert torch.autograd.gradcheck(OPERATORS[name], x.requires_grad_())


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rotation_and_norm_are_those_of_pytorchs_operators(dtype, eps):
    """Neither pass rotates what follows from a sum, which would divide it into two kernels."""
    x, grad = torch.randn(2, 2, 3, 2, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide, graphs = x.double().requires_grad_(), []
    expected = wide * ROPE[0] + wide.roll(2, -1) * ROPE[1]
    if eps:
        expected = expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + eps)
    expected = expected, torch.autograd.grad(expected, wide, grad.double())[0]

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(rotate, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    y = compiled(x.requires_grad_(), ROPE.float(), eps)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    for actual, pass_ in zip((y, torch.autograd.grad(y, x, grad)[0]), expected, strict=True):
        assert actual.dtype == dtype and (actual - pass_).norm() <= tolerance * pass_.norm()
    for graph in graphs:  # of the forward and the backward pass
        after_a_sum, swaps = set(), 0
        for node in graph.nodes:
            is_after = "mean" in node.name or any(n in after_a_sum for n in node.all_input_nodes)
            is_swap = "flip" in node.name or "roll" in node.name
            assert not (is_swap and is_after)
            swaps += is_swap
            after_a_sum |= {node} if is_after else set()
        assert swaps == 1
    assert len(graphs) == 2


# ------------------------------------------------------------------------------------------------------------
# transformers


SHAPES = {
    "gpt2": {},
    "gpt2-bias": dict(bias=True, gelu="tanh"),
    "nanochat": {},
    "nanochat-kv-tied": dict(n_kv_head=2, tied=True),
    "llama": dict(rope_theta=5e4),
    "llama-kv-tied": dict(n_kv_head=1, tied=True, n_hidden=80, norm_eps=1e-6),
    "llama-experts": dict(n_expert=5, n_expert_active=3, balance_loss=0.02, n_kv_head=1, tied=True),
}
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def moved(name):
    """A model with random weights, in the norms and biases too."""
    changes = {"bias": False, **SHAPES[name]}
    gpt = GPT(GPTConfig(48, 97, 3, 4, 32, arch=name.partition("-")[0], **changes), seed=1)
    roughen(gpt, seed=2, std=0.1).lm_head.weight.data *= 0.2  # a tied head of nanochat gives large logits
    return gpt


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_model_in_transformers_and_back(tmp_path, name):
    """Logits and the likeliest text."""
    from transformers import AutoModelForCausalLM

    gpt = moved(name)
    huggingface.save(tmp_path, gpt, NO_IDS)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    x = torch.randint(97, (3, 48), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(hf(x).logits, gpt(x, x)[0], atol=1e-5, rtol=0)
    mask = torch.ones_like(x[:, :8])
    theirs = hf.generate(x[:, :8], attention_mask=mask, max_new_tokens=40, do_sample=False)
    assert torch.equal(theirs, gpt.generate(x[:, :8], 40, temperature=0))
    back = GPT.from_pretrained(str(tmp_path))
    assert back.config == gpt.config and same_states(back.state_dict(), gpt.state_dict())


def window(gpt):
    """Attention to the last 40 of 48 positions."""
    replace_seams(gpt, attention=masked_attention(40))


def layer(gpt):
    """One more Linear in attention, whose weights do not fit."""
    gpt.transformer.h[1].attn.c_gate = torch.nn.Linear(32, 4)


def wide(gpt):
    """A gate whose rows are stacked in c_attn."""
    gpt.transformer.h[0].attn.c_attn.weight.data = torch.ones(99, 32)


def tanh(gpt):
    """The other GELU, which differs from the config's by 5e-4 at most."""
    for block in gpt.transformer.h:
        block.mlp.gelu = "tanh"


def separator(gpt):
    """What the last id changes."""
    gpt.transformer.wte.register_forward_hook(lambda module, args, x: x * (1 + (args[0] == 96).any()))


EDITS = {
    window: r"^\w+ of transformers does not compute what model.py does: the logits differ by 0\.\d+ \(their ",
    layer: r"^the weights of model.py do not fit .*Unexpected .* \"transformer\.h\.1\.attn\.c_gate\.weight\"",
    wide: "^the weights of model.py do not fit NanoChatForCausalLM of transformers: ",
    separator: r"^GPT2LMHeadModel of .*: the logits differ by ",
    tanh: r"^GPT2LMHeadModel of .*: the logits differ by \d\.?\d*e-0[456] \(their ",
}


@pytest.mark.parametrize(
    ("name", "edit"),
    [("gpt2", window), ("gpt2-bias", layer), ("nanochat", wide), ("gpt2", separator), ("gpt2", tanh)],
)
def test_a_model_that_transformers_does_not_compute_is_not_exported(tmp_path, name, edit):
    gpt = moved(name)
    edit(gpt)
    with pytest.raises(ValueError, match=EDITS[edit]) as error:
        huggingface.save(tmp_path, gpt, NO_IDS)
    assert str(error.value).count("set --to=ckpt.pt") == 1 and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_an_architecture_that_transformers_lacks_is_not_exported(tmp_path):
    gpt = GPT(GPTConfig(8, 97, 1, 2, 8, arch="nanochat", n_expert=3))
    with pytest.raises(ValueError, match="no class for arch 'nanochat' with n_expert 3, but only for gpt2, "):
        huggingface.save(tmp_path, gpt, NO_IDS)


SHARDS_OF_EXPERTS = pytest.param("llama-moe", ["--ep=2", "--zero=3"], marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "flags"), [("nanochat", []), SHARDS_OF_EXPERTS])
def test_export_and_import_of_a_run(zygote, session_work, trained, tmp_path, model, flags):
    """
    The loss of an imported model is the same bits; a new run can start from the folder, and records the shape
    that is used, not the one that was typed. A run in OUT_DIR/hf is not deleted.
    """
    out, folder = tmp_path / "out", tmp_path / "imported"
    for copy in (out, out / "hf"):
        shutil.copytree(trained([*args_of(model), *flags], 2 if flags else 1), copy, symlinks=True)
    zygote.start([out, "--to=hf"], tmp_path, script="export.py").wait()
    assert find_checkpoint(str(out / "hf_1"))[0].step == 10
    shutil.copytree(out / "hf", folder)
    zygote.start([folder, "--from=hf"], tmp_path, script="export.py").wait()
    losses, typed = set(), ["--arch=gpt2", "--n_layer=1", "--n_embd=64", "--eval_iters=4"]
    for source in (out, out / "hf", folder):
        # of a checkpoint, which keeps its ids; to a model of transformers, they would be added
        ids = [] if source == out / "hf" else ["--vocab_size=80"]
        args = [f"--init_from={source}", f"--out_dir={tmp_path}/new", "--max_iters=0", *typed, *ids]
        text = zygote.train(args, session_work).text()
        losses.add(re.search("step 0: train loss ([0-9.]+)", text)[1])
        origin = source if source == out / "hf" else "the checkpoint"
        assert re.search(
            f"^note: .*{' vocab_size 65' * len(ids)}.* of {origin} are used, not arch gpt2, n_layer 1, ",
            text,
            re.M,
        )
    assert len(losses) == 1
    recorded = torch.load(tmp_path / "new/ckpt.pt", weights_only=True)["config"]
    (in_log,) = [r["config"] for r in records(tmp_path / "new") if r.get("event") == "start"]
    shape = GPT.from_pretrained(str(out / "hf")).describe()
    names = ("arch", "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "vocab_size", "bias", "n_expert")
    assert in_log == recorded and recorded.items() >= {name: shape[name] for name in names}.items()
    weights = torch.load(folder / "ckpt.pt", weights_only=True)["model"]
    stored = tensors_in(out)
    assert same_states(weights, {name: stored[f"model.{name}"] for name in weights})


MISTAKES = {
    "--n_kv_head=1": "n_kv_head is 1, but needs arch llama or nanochat: set --n_kv_head=0",
    "--arch=llama --bias=True": "bias is True, but needs arch gpt2: set --bias=False",
    "--lr_schedule=wsd": "lr_schedule 'wsd' needs the steps of its decay: set --cooldown_iters=",
    "--optimizer=muon --learning_rate=0 --min_lr=0": "learning_rate is 0.0, but needs to be above 0",
}


@pytest.mark.parametrize("args", MISTAKES)
def test_mistakes(args):
    with pytest.raises(ValueError, match=MISTAKES[args]):
        accepted("train.py", *args.split())


def test_a_model_that_is_not_supported(tmp_path):
    from transformers import GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, NanoChatConfig

    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for config, unsupported in (
        (MistralConfig(), "model_type is 'mistral': use a model of type gpt2 or nanochat"),
        (LlamaConfig(attention_bias=True), "this llama uses settings that are not .*: attention_bias=True"),
        (LlamaConfig(rope_parameters=linear), "rope_type=linear"),
        (NanoChatConfig(head_dim=64), "head_dim=64"),
        (MixtralConfig(hidden_act="gelu", sliding_window=8), "hidden_act=gelu, sliding_window=8"),
        (GPT2Config(activation_function="relu", scale_attn_weights=False), "=relu, scale_attn_weights=False"),
        (GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (GPT2Config(tie_word_embeddings=False), "tie_word_embeddings=False"),
    ):
        config.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=unsupported):
            GPT.from_pretrained(str(tmp_path))


def test_muon_orthogonalizes_each_matrix():
    """
    q, k and v separately; in the direction of torch.optim.Muon; AdamW keeps the rest, without weight
    decay.
    """
    gpt = moved("nanochat-kv-tied")
    adamw, matrices = optim.make_optimizers(gpt, train_defaults(optimizer="muon", learning_rate=1e-3))
    assert not any(group["weight_decay"] for group in adamw.param_groups)
    weight = gpt.transformer.h[1].attn.c_attn.weight  # (heads: 4, 2 and 2) x 8 features
    gpt(x := torch.arange(96).view(2, 48), x)[1].backward()
    before, gradient = weight.detach().clone(), weight.grad.clone()
    optim.set_rates([adamw, matrices], 300, 1e-3, 0.95)
    matrices.step()
    update = (before * (1 - 0.02 * 0.1) - weight.detach()) / 0.02
    for part, g in zip(update.split((32, 16, 16)), gradient.split((32, 16, 16)), strict=True):
        values = torch.linalg.svdvals(part)
        assert 0.3 < values.median() < 1.6 and values.max() < 1.66
        expected = torch.nn.Parameter(torch.zeros_like(g))
        expected.grad = g
        torch.optim.Muon([expected], lr=1.0, weight_decay=0.0).step()
        assert torch.cosine_similarity(part.flatten(), -expected.detach().flatten(), 0) > 0.85
