"""Every architecture: its optimizers, its residual stream, and to transformers and back."""

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from runs import accepted, column, default_plan, records, same, start_changed, train_defaults
from test_layouts import args_of
from test_model import masked_attention, roughen, same_states
from torch.fx.experimental.proxy_tensor import make_fx

from isogpt.checkpoint import huggingface
from isogpt.checkpoint.search import find_checkpoint
from isogpt.checkpoint.source import open_checkpoint
from isogpt.checkpoint.start import differences
from isogpt.nn.architecture import ARCHS
from isogpt.nn.kernels import CPUNormalize, Rotate, relu2, rotate
from isogpt.parallel.attach import replace_seams
from isogpt.training import muon, optim, precision
from model import GPT, GPTConfig


def test_a_checkpoint_of_the_other_optimizer(zygote, session_work, trained, tmp_path):
    shutil.copytree(trained(args_of("nanochat")), tmp_path / "out", symlinks=True)
    args = [*args_of("nanochat"), "--optimizer=adamw", "--init_from=resume", f"--out_dir={tmp_path}/out"]
    run = zygote.train(args, session_work, 2, ok=False)
    assert run.text().count("was saved with optimizer 'muon': set --optimizer=muon, or start a new run") == 1
    assert "Traceback" not in run.text()


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


def test_float16_keeps_the_direction_of_small_gradients():
    x = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(0))
    expected = muon.orthogonalize(x, torch.float32)
    actual = muon.orthogonalize(1e-8 * x, torch.float16)
    torch.testing.assert_close(actual.float(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_muon_brings_singular_values_close_to_1(dtype):
    """
    Also of matrices of rank 1 and of zeros, at any scale. Where the norm of a matrix is several times the
    largest singular value, the polynomials enlarge the smallest too little unless this value is bounded.
    """
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 48, 48), (1, 24, 96), (1, 96, 24)):
        x = torch.randn(*shape, generator=generator)
        for scale in (1e-6, 1.0, 1e3):
            values = torch.linalg.svdvals(muon.orthogonalize(scale * x, dtype).float())
            assert values.max() < 1.66 and (values > 0.3).float().mean() > 0.95
    u, v = torch.randn(40, 1, generator=generator), torch.randn(1, 60, generator=generator)
    for x in (u @ v, torch.ones(40, 60)):
        values = torch.linalg.svdvals(muon.orthogonalize(x[None], dtype).float())[0]
        assert 0.3 < values[0] < 1.66 and values[1:].max() < 0.3
    assert not muon.orthogonalize(torch.zeros(1, 8, 8), dtype).any()
    u, v = (torch.linalg.qr(torch.randn(64, 64, generator=generator))[0] for _ in range(2))
    x = (u * torch.logspace(0, -2.3, 64)) @ v
    values = torch.linalg.svdvals(muon.orthogonalize(x[None], dtype).float())
    assert values.min() > 0.3 and values.max() < 1.66


def said(settings, model_args, config=None, **options):
    """What `differences` says about a checkpoint with this config."""
    run = {"model_args": model_args, "isogpt": {}, "config": config}
    source = None if config is None else SimpleNamespace(run=run, notes=())
    return differences(settings, model_args, source, **options)


def test_settings_that_a_checkpoint_overrides():
    model_args = GPT(GPTConfig(8, 65, 1, 2, 8, arch="llama")).describe()
    settings = train_defaults(
        arch="llama", n_layer=1, n_head=2, n_embd=8, bias=False, init_from="auto:folder"
    )
    assert said(settings, model_args, {}) == said(settings, model_args) == []
    typed = settings | {"n_kv_head": 1, "n_hidden": 16, "head": "tied"}
    used = "n_kv_head 2, n_hidden 64, head untied of {} are used, not n_kv_head 1, n_hidden 16, head tied"
    assert said(typed, model_args, {}) == [used.format("the checkpoint")]
    assert said(typed, model_args) == [used.format("folder")]
    nanogpts = dict(n_layer=1, n_head=2, n_embd=8, block_size=8, bias=True, vocab_size=65, dropout=0.0)
    assert said(settings | {"n_expert": 4}, nanogpts, {}) == [
        "arch gpt2, bias True of the checkpoint are used, not arch llama, bias False"
    ]


LONGER = dict(gradient_accumulation_steps=4, batch_size=6, block_size=8, data_order="shuffle", seed=1)
LONGER |= dict(max_iters=9, beta2=0.9)
CHANGED = {
    "sequences per step 24 (was 12)": dict(batch_size=3),
    "seed 1 (was 2)": dict(seed=2),
    "data_order shuffle (was random)": dict(data_order="random"),
    "block_size 8 (was 16)": dict(block_size=16),
    "residual_dtype float32 (was bfloat16)": dict(residual_dtype="bfloat16"),
    "beta2 0.9 (was 0.8), grad_clip 1.0 (was 0.5)": dict(beta2=0.8, grad_clip=0.5),
    "seed 1 (was 2), block_size 8 (was 16)": dict(seed=2, block_size=16),
    "": dict(max_iters=5),  # a longer run
}


@pytest.mark.parametrize("change", CHANGED)
def test_settings_that_change_what_a_resume_reads(change):
    """A new run from the checkpoint's weights reads anew."""
    model_args = GPT(GPTConfig(8, 65, 1, 2, 8)).describe()
    settings = train_defaults(n_layer=1, n_head=2, n_embd=8, bias=True, **LONGER)
    config = settings | CHANGED[change]
    sentences = [f"this run continues with {change}: the loss curve changes"] if change else []
    assert said(settings, model_args, config, is_resume=True) == sentences
    assert said(settings, model_args, config) == []
    same = settings | dict(gradient_accumulation_steps=8, batch_size=3)
    for config in (same, {}):  # nanoGPT's has some of the settings only
        assert said(settings, model_args, config, is_resume=True) == []


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
        ("float32", "float32", {"zero": 3}, "float32"),
        ("float32", "bfloat16", {"zero": 3}, "bfloat16"),  # fully_shard casts what it computes with
        ("float32", "bfloat16", {"zero": 3, "exact": True}, "float32"),  # autocast does
        ("bfloat16", "bfloat16", {"zero": 3, "exact": True}, "bfloat16"),
    ],
)
def test_the_dtype_of_the_residual_stream_in_a_plan(stream, dtype, changes, expected):
    """Of what the stages of a pipeline send, and of what a micro-batch's memory is estimated from."""
    plan = default_plan(dtype=dtype, model_args={"residual_dtype": stream}, **changes)
    assert plan.stream_dtype == getattr(torch, expected)
    assert replace(plan, model_args={}).stream_dtype in (torch.float32, plan.torch_dtype)  # not known yet


@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16"])
def test_a_stream_in_bfloat16_needs_computation_in_bfloat16(dtype):
    said = f"residual_dtype 'bfloat16' needs dtype 'bfloat16', but dtype is '{dtype}': set "
    with pytest.raises(ValueError, match=re.escape(f"{said}--residual_dtype=float32, or --dtype=bfloat16")):
        precision.check_dtypes(default_plan(dtype=dtype), "bfloat16")
    precision.check_dtypes(default_plan(dtype=dtype), "float32")
    precision.check_dtypes(default_plan(dtype="bfloat16"), "bfloat16")
    with pytest.raises(ValueError, match="residual_dtype is 'fp8'; choose from float32, bfloat16"):
        GPTConfig(residual_dtype="fp8")


ANGLES = torch.arange(3.0, dtype=torch.float64)[:, None, None] * torch.tensor([1.0, 0.3])  # (T, 1, D / 2)
ROPE = torch.stack((ANGLES.cos().repeat(1, 1, 2), torch.cat((-ANGLES.sin(), ANGLES.sin()), -1)))
OPERATORS = {
    "norm": lambda x: CPUNormalize.apply(x, 1e-6, x.dtype),
    "rotate": lambda x: rotate(x, ROPE),
    "rotate and norm": lambda x: rotate(x, ROPE, 1e-6),
    "rotate on a GPU": lambda x: Rotate.apply(x, ROPE, None),
    "rotate and norm on a GPU": lambda x: Rotate.apply(x, ROPE, 1e-6),
    "relu2": relu2,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_the_operators_in_float64(name):
    x = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    assert torch.autograd.gradcheck(OPERATORS[name], x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_norm_are_those_of_pytorchs_operators(dtype):
    """On a GPU; and neither pass rotates what follows from a sum, which would divide it into two kernels."""
    x, grad = torch.randn(2, 2, 3, 2, 4, generator=torch.Generator().manual_seed(0)).to(dtype)

    def passes(x, grad):
        x = x.detach().requires_grad_()
        y = Rotate.apply(x, ROPE.float(), 1e-6)
        return y.detach(), torch.autograd.grad(y, x, grad)[0]

    wide = x.double().requires_grad_()
    rotated = wide * ROPE[0] + wide.roll(2, -1) * ROPE[1]
    expected = rotated * torch.rsqrt(rotated.square().mean(-1, keepdim=True) + 1e-6)
    expected = expected, torch.autograd.grad(expected, wide, grad.double())[0]
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    for actual, pass_ in zip(passes(x, grad), expected, strict=True):
        assert actual.dtype == dtype and (actual - pass_).norm() <= tolerance * pass_.norm()

    after_a_sum, swaps = set(), 0
    for node in make_fx(passes)(x, grad).graph.nodes:
        is_after = "mean" in node.name or any(n in after_a_sum for n in node.all_input_nodes)
        is_swap = "flip" in node.name or "roll" in node.name
        assert not (is_swap and is_after)
        swaps += is_swap
        after_a_sum |= {node} if is_after else set()
    assert swaps == 2


# ------------------------------------------------------------------------------------------------------------
# transformers


SHAPES = {
    "gpt2": {},
    "gpt2-bias": dict(bias=True, gelu="tanh"),
    "nanochat": {},
    "nanochat-kv-tied": dict(n_kv_head=2, tied=True),
    "llama": dict(rope_theta=5e4),
    "llama-kv-tied": dict(n_kv_head=1, tied=True, n_hidden=80, norm_eps=1e-6),
    "llama-experts": dict(n_expert=4, rope_theta=5e4),
}
EXPERTS = dict(n_expert=5, n_expert_active=3, balance_loss=0.02)
SHAPES["llama-experts-kv-tied"] = SHAPES["llama-kv-tied"] | EXPERTS
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def moved(name):
    """A model with random weights, in the norms and biases too."""
    changes = {"bias": False, **SHAPES[name]}
    gpt = GPT(GPTConfig(48, 97, 3, 4, 32, arch=name.partition("-")[0], **changes), seed=1)
    roughen(gpt, seed=2, std=0.1).lm_head.weight.data *= 0.2  # a tied head of nanochat gives large logits
    return gpt


@torch.no_grad()
def assert_equal_to(hf, gpt):
    """Compare logits and greedy text with a model of transformers."""
    x = torch.randint(97, (3, 48), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(hf.eval()(x).logits, gpt(x, x)[0], atol=1e-5, rtol=0)
    mask = torch.ones_like(x[:, :8])
    theirs = hf.generate(x[:, :8], attention_mask=mask, max_new_tokens=40, do_sample=False)
    assert torch.equal(theirs, gpt.generate(x[:, :8], 40, temperature=0))


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_model_in_transformers_and_back(tmp_path, name):
    from transformers import AutoModelForCausalLM

    gpt = moved(name)
    huggingface.save(tmp_path, gpt, NO_IDS)
    assert_equal_to(AutoModelForCausalLM.from_pretrained(tmp_path), gpt)
    back = GPT.from_pretrained(str(tmp_path))
    assert back.config == gpt.config and same_states(back.state_dict(), gpt.state_dict())


def shift(gpt):
    """Each position also sees the embedding of the one before."""
    gpt.transformer.drop.register_forward_hook(lambda module, args, x: x + F.pad(x, (0, 0, 1, -1)))


def window(gpt):
    """Attention to the last 40 of 48 positions."""
    replace_seams(gpt, attention=masked_attention(40))


def hidden_buffer(gpt):
    """A buffer that no checkpoint contains scales the logits."""
    gpt.register_buffer("scale", torch.tensor(1.01), persistent=False)
    gpt.lm_head.register_forward_hook(lambda module, args, logits: logits * gpt.scale)


def layer(gpt):
    """One more Linear in attention, whose weights do not fit."""
    gpt.transformer.h[1].attn.c_gate = torch.nn.Linear(32, 4)


def wide(gpt):
    """A gate whose rows are stacked in c_attn."""
    gpt.transformer.h[0].attn.c_attn.weight.data = torch.ones(99, 32)


DIFFERS = r"^{} of transformers does not compute what model.py does: the logits differ by 0\.\d+ \(their "
UNFIT = "^the weights of model.py do not fit {} of transformers: "
EDITS = {
    shift: DIFFERS,
    window: DIFFERS,
    hidden_buffer: DIFFERS,
    layer: UNFIT + r".*Unexpected .* \"transformer\.h\.1\.attn\.c_gate\.weight\", ",
    wide: UNFIT,
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["gpt2", "gpt2-bias", "nanochat", "llama-kv-tied", "llama-experts"])
def test_a_model_that_transformers_does_not_compute_is_not_exported(tmp_path, name, edit):
    gpt = moved(name)
    edit(gpt)
    kind = huggingface.kind_of(gpt.config)
    with pytest.raises(ValueError, match=EDITS[edit].format(huggingface.CLASSES[kind])) as error:
        huggingface.save(tmp_path, gpt, NO_IDS)
    assert str(error.value).count("set --to=ckpt.pt") == 1 and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("arch", "n_expert"), [("mine", 0), ("nanochat", 3)])
def test_an_architecture_that_transformers_lacks_is_not_exported(tmp_path, monkeypatch, arch, n_expert):
    monkeypatch.setitem(ARCHS, "mine", ARCHS["llama"])
    gpt = GPT(GPTConfig(8, 97, 1, 2, 8, arch=arch, n_expert=n_expert))
    said = f"no class for arch '{arch}' with n_expert {n_expert}, but only for gpt2, nano"
    with pytest.raises(ValueError, match=said):
        huggingface.save(tmp_path, gpt, NO_IDS)


def test_what_is_recorded_of_a_model_of_transformers(zygote, work):
    """The shape that is used, not the one that was typed, which is noted once."""
    shape = dict(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, n_hidden=64, vocab_size=65)
    gpt = GPT(GPTConfig(block_size=32, arch="llama", **shape), seed=1)
    huggingface.save(work / "weights", gpt, NO_IDS)
    args = ["--init_from=weights", "--max_iters=0", "--eval_iters=1", "--n_layer=4", "--vocab_size=80"]
    text = zygote.train([*args, "--n_head=2", "--n_embd=64"], work, 2).text()
    notes = [line for line in text.splitlines() if line.startswith("note:") and "warm-up" not in line]
    used = "arch llama, n_layer 1, n_embd 16, vocab_size 65 of weights are used"
    assert notes == [f"note:    {used}, not arch gpt2, n_layer 4, n_embd 64, vocab_size 80"]
    recorded = shape | {"arch": "llama", "head": "untied", "bias": False, "n_expert": 0}
    in_checkpoint = torch.load(work / "out" / "ckpt.pt", weights_only=True)["config"]
    (in_log,) = [r["config"] for r in records(work / "out") if r.get("event") == "start"]
    assert in_checkpoint == in_log and in_log.items() >= recorded.items()
    assert (in_log["block_size"], in_log["learning_rate"]) == (32, 1e-3)


def test_import_of_a_mixtral(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM, set_seed

    set_seed(0)
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=72, num_hidden_layers=2)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=48)
    experts = dict(num_local_experts=4, num_experts_per_tok=3, router_aux_loss_coef=0.03)
    hf = MixtralForCausalLM(MixtralConfig(**shape, **experts, initializer_range=0.2, **NO_IDS))
    hf.save_pretrained(tmp_path)
    gpt = GPT.from_pretrained(str(tmp_path)).eval()
    assert_equal_to(hf, gpt)
    assert (gpt.config.n_expert, gpt.config.n_expert_active, gpt.config.balance_loss) == (4, 3, 0.03)


@pytest.mark.slow
def test_export_of_experts_from_shards(zygote, shared_work):
    out = shared_work / "sharded"
    args = [*args_of("llama-moe"), "--ep=2", "--zero=3", "--max_iters=0", f"--out_dir={out}"]
    zygote.train(args, shared_work, 2)
    assert find_checkpoint(str(out))[0].path.is_dir()
    for form in ("hf", "ckpt.pt"):
        zygote.start([out, f"--to={form}"], shared_work, script="export.py").wait()
    weights = torch.load(out / "ckpt.pt", weights_only=True)["model"]
    assert same_states(GPT.from_pretrained(str(out / "hf")).state_dict(), weights)


@pytest.mark.slow
def test_experts_from_a_dense_model_of_transformers(zygote, shared_work):
    """Each expert is a copy of the MLP: the first loss is the dense model's."""
    gpt, folder, losses = moved("llama-kv-tied"), shared_work / "dense", []
    huggingface.save(folder, gpt, NO_IDS)
    for nproc, flags in ((1, []), (2, ["--n_expert=4", "--ep=2", "--zero=3"])):
        out = shared_work / f"from-dense-{nproc}"
        args = [f"--init_from={folder}", "--max_iters=0", *flags, f"--out_dir={out}"]
        zygote.train(args, shared_work, nproc)
        losses.append(column(out, "loss"))
    same(*losses, absolute=1e-5)


@pytest.mark.parametrize("model", ["nanochat", pytest.param("llama-moe", marks=pytest.mark.slow)])
def test_export_and_import_of_a_run(zygote, session_work, trained, tmp_path, model):
    """The loss of an imported model is the same bits; a new run can start from the folder."""
    out, folder = tmp_path / "out", tmp_path / "imported"
    shutil.copytree(trained(args_of(model)), out, symlinks=True)
    zygote.start([out, "--to=hf"], tmp_path, script="export.py").wait()
    shutil.copytree(out / "hf", folder)
    zygote.start([folder, "--from=hf"], tmp_path, script="export.py").wait()
    losses = set()
    for source in (out, out / "hf", folder):
        args = [f"--init_from={source}", f"--out_dir={tmp_path}/new", "--eval_only=True", "--eval_iters=4"]
        text = zygote.train(args, session_work).text()
        losses.add(re.search("step 0: train loss ([0-9.]+)", text)[1])
    assert len(losses) == 1
    tensors = open_checkpoint(find_checkpoint(str(out), best=True)[0]).tensors  # sample.py uses the best one
    weights = {name.removeprefix("model."): w for name, w in tensors.items() if name.startswith("model.")}
    imported = torch.load(folder / "ckpt.pt", weights_only=True)["model"]
    assert same_states(weights, imported)


def test_an_export_deletes_no_checkpoints(zygote, trained, tmp_path):
    """A run may have been started in OUT_DIR/hf, or --from=hf has written a ckpt.pt there."""
    out = tmp_path / "exported"
    for folder in (out, out / "hf"):
        shutil.copytree(trained(args_of("nanochat")), folder, symlinks=True)
    zygote.start([out, "--to=hf"], tmp_path, script="export.py").wait()
    assert find_checkpoint(str(out / "hf_1"))[0].step == 10


MISTAKES = {
    "--arch=gpt3": "arch is 'gpt3'; choose from gpt2, nanochat, llama",
    "--arch=llama --n_kv_head=5": "n_kv_head is 5: it must divide n_head, 12",
    "--n_kv_head=1": "n_kv_head is 1, but needs arch llama or nanochat: set --n_kv_head=0",
    "--head=untied": "head is 'untied', but needs arch llama or nanochat: set --head=auto",
    "--arch=llama --bias=True": "bias is True, but needs arch gpt2: set --bias=False",
    "--lr_schedule=wsd": "lr_schedule 'wsd' needs the steps of its decay: set --cooldown_iters=",
    "--optimizer=muon --learning_rate=0 --min_lr=0": "learning_rate is 0.0, but needs to be above 0",
}


@pytest.mark.parametrize("args", MISTAKES)
def test_mistakes(args):
    with pytest.raises(ValueError, match=MISTAKES[args]):
        accepted("train.py", *args.split())


def test_a_model_that_is_not_supported(tmp_path):
    from transformers import LlamaConfig, MistralConfig, MixtralConfig, NanoChatConfig

    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    MistralConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type is 'mistral': use a model of type gpt2 or nanochat"):
        GPT.from_pretrained(str(tmp_path))
    for config, unsupported in (
        (LlamaConfig(attention_bias=True), "this llama uses settings that are not .*: attention_bias=True"),
        (LlamaConfig(head_dim=64), "head_dim=64"),
        (LlamaConfig(rope_parameters=linear), "rope_type=linear"),
        (NanoChatConfig(head_dim=64), "this nanochat uses settings that are not supported: head_dim=64"),
        (MixtralConfig(hidden_act="gelu", sliding_window=8), "hidden_act=gelu, sliding_window=8"),
    ):
        with pytest.raises(ValueError, match=unsupported):
            huggingface.model_args(config)


def test_weights_that_do_not_belong_to_the_config(tmp_path):
    gpt = moved("llama")
    huggingface.save(tmp_path, gpt, NO_IDS)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 97', '"vocab_size": 98'))
    with pytest.raises(ValueError, match=r"lm_head.weight is \(97, 32\), but config.json says \(98, 32\)"):
        GPT.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(("head", "embedding_lr"), [("untied", 0.3), ("untied", 0.0), ("tied", 0.3)])
def test_the_optimizer_rate_and_weight_decay_of_each_parameter(head, embedding_lr):
    shape = dict(block_size=8, vocab_size=16, n_layer=2, n_head=2, n_embd=8, n_expert=2)
    gpt = GPT(GPTConfig(**shape, arch="llama", tied=head == "tied"))
    settings = train_defaults(
        optimizer="muon", learning_rate=1e-2, weight_decay=0.1, muon_lr=0.04, embedding_lr=embedding_lr
    )
    name_of, found = {p: name for name, p in gpt.named_parameters()}, {}
    for optimizer in optim.make_optimizers(gpt, settings):
        for group in optimizer.param_groups:
            for p in group["params"]:
                assert name_of[p] not in found
                how = (type(optimizer).__name__, group["lr"], group["lr_scale"], group["weight_decay"])
                found[name_of[p]] = how
    rest = ("AdamW", 1e-2, 1.0, 0.0)
    expected = dict.fromkeys(name_of.values(), rest)
    if embedding_lr and head == "untied":
        expected["transformer.wte.weight"] = ("AdamW", 0.3, 0.3 / 1e-2, 0.0)
    matrices = ("attn.c_attn", "attn.c_proj", *(f"mlp.experts.c_{part}" for part in ("gate", "fc", "proj")))
    for name in (f"transformer.h.{i}.{matrix}.weight" for i in (0, 1) for matrix in matrices):
        assert expected[name] == rest
        expected[name] = ("Muon", 0.04, 0.04 / 1e-2, 0.1)
    assert found == expected
    assert (rest in found.values()) and "transformer.h.1.mlp.router.weight" in found


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
