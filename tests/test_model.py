"""The model: its parameters, what it computes, the loss in chunks, generation, GPT-2 from transformers."""

import copy
import dataclasses
import math
import random
import re
from functools import partial
from itertools import islice
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from edits import COUNTED, COUNTED_SHAPE, edited_gpt
from runs import settings_of_train, train_defaults
from torch.utils._python_dispatch import TorchDispatchMode

from isogpt.check.comparisons import check_model
from isogpt.nn import generation
from isogpt.nn.counts import count_model
from isogpt.nn.kernels import Dropout, KVCache, causal_attention, summed_loss
from isogpt.nn.logits import compare_logits, random_sequences
from isogpt.parallel.attach import replace_seams
from isogpt.parallel.mesh import Mesh
from isogpt.speed.workload import Workload, described_for_bench
from isogpt.training import optim, precision
from model import GPT, GPTConfig

SMALL = dict(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
LARGE_VOCAB = 2**18  # of logits, 64 rows of this are what summed_loss takes at once on a CPU


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def roughen(module, seed=0, std=0.3):
    """Weights far from where they start: near zero, all logits are alike and a wrong one is not seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=std)
    return module.eval()


def rough(seed=0, std=0.3, **changes):
    return roughen(GPT(GPTConfig(**(SMALL | changes)), seed=1), seed, std)


def ids(*shape, vocab=65, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def some_targets(*shape, vocab=65, seed=1):
    """Targets of which a fifth is ignored, the first and the last among them."""
    targets = ids(*shape, vocab=vocab, seed=seed)
    targets.view(-1)[::5] = -1
    targets.view(-1)[-1] = -1
    return targets


def apart(a, b):
    """How far a is from b, relative to b."""
    return ((a - b).norm() / b.norm()).item()


# what GPT-2's config contains in addition to nanoGPT's fields, for SMALL
GPT2 = dict(arch="gpt2", n_kv_head=2, n_hidden=128, tied=True, norm_eps=1e-5, rope_theta=1e4)
GPT2 |= dict(n_expert=0, n_expert_active=2, balance_loss=0.01, router_z_loss=0.001, residual_dtype="float32")


def same_states(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ------------------------------------------------------------------------------------------------------------
# the config


def test_defaults_are_nanogpts():
    nanogpts = dict(block_size=1024, vocab_size=50304, n_layer=12, n_head=12, n_embd=768)
    nanogpts |= dict(dropout=0.0, bias=True, gelu="none")
    assert dataclasses.asdict(GPTConfig()) == nanogpts | GPT2 | dict(n_kv_head=12, n_hidden=3072)
    small = dict(block_size=8, vocab_size=65, n_layer=1, n_head=2, n_embd=16, dropout=0.1, bias=False)
    assert GPTConfig(*small.values()) == GPTConfig(**small)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(block_size=0), "block_size is 0: it must be from 1 to 2147483648"),
        (dict(n_layer=0, n_hidden=-1), "n_layer is 0: .* 10000\nn_hidden is -1: it must be from 0 .*"),
        (dict(arch="gpt3"), "arch is 'gpt3'; choose from gpt2, nanochat, llama"),
        (dict(n_head=3), "n_embd is 32: it must be a multiple of n_head, 3: set --n_embd=33"),
        (dict(n_embd=4, n_head=6), "it must be a multiple of n_head, 6: set --n_embd=6"),
        (dict(arch="nanochat", n_embd=34), "it must be a multiple of 2 n_head, 4: set --n_embd=32"),
        (dict(arch="llama", n_kv_head=3), "n_kv_head is 3: it must divide n_head, 2: set --n_kv_head=1"),
        (dict(n_embd=48, n_head=12, n_kv_head=8), "it must divide n_head, 12: set --n_kv_head=0"),
        (dict(n_expert=2, n_expert_active=3), "n_expert_active is 3: set it to at most n_expert, 2"),
    ],
)
def test_impossible_configs_are_refused(wrong, said):
    """The advice is accepted."""
    with pytest.raises(ValueError, match=f"{said}$"):
        GPTConfig(**(SMALL | wrong))
    if advice := re.search(r"set --(\w+)=(\d+)", said):
        GPTConfig(**(SMALL | wrong | {advice[1]: int(advice[2])}))


# ------------------------------------------------------------------------------------------------------------
# parameters, by the names that nanoGPT's checkpoints have


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_have_nanogpts_names_shapes_and_order(bias):
    gpt = GPT(GPTConfig(**SMALL, bias=bias), seed=1)
    C, V, T = 32, 65, 16
    layers = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
    layers |= {"ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    modules = {f"h.{layer}.{name}": shape for layer in range(2) for name, shape in layers.items()}
    expected = {"transformer.wte.weight": (V, C), "transformer.wpe.weight": (T, C)}
    for name, shape in (modules | {"ln_f": (C,)}).items():
        expected[f"transformer.{name}.weight"] = shape
        if bias:
            expected[f"transformer.{name}.bias"] = shape[:1]
    assert [(n, tuple(p.shape)) for n, p in gpt.named_parameters()] == list(expected.items())
    stored = [(n, tuple(w.shape)) for n, w in gpt.state_dict().items()]
    assert stored == [*expected.items(), ("lm_head.weight", (65, 32))]
    assert {w.dtype for w in gpt.state_dict().values()} == {torch.float32}
    count = sum(math.prod(s) for s in expected.values())
    assert (gpt.get_num_params(non_embedding=False), gpt.get_num_params()) == (count, count - 16 * 32)
    twin = copy.deepcopy(gpt)
    assert twin.lm_head.weight is twin.transformer.wte.weight


@pytest.mark.parametrize("bias", [True, False])
def test_adamw_is_what_nanogpts_interface_makes(bias):
    """Matrices decay and come first: a ckpt.pt numbers parameters by group. No parameter is frozen."""
    gpt = GPT(GPTConfig(**SMALL, bias=bias), seed=1)
    gpt.transformer.wpe.weight.requires_grad_(False)
    theirs = gpt.configure_optimizers(0.2, 3e-4, (0.8, 0.9), "cpu").param_groups
    changes = dict(learning_rate=3e-4, weight_decay=0.2, beta1=0.8, beta2=0.9)
    (adamw,) = optim.make_optimizers(gpt, train_defaults(**changes))
    params = [p for p in gpt.parameters() if p.requires_grad]
    for group, expected, is_matrix in zip(adamw.param_groups, theirs, (True, False), strict=True):
        extra = {name: group.pop(name) for name in ("lr_scale", "optimizer")}  # not in a ckpt.pt
        assert extra == {"lr_scale": 1.0, "optimizer": "adamw"}
        numbers = [[id(p) for p in g.pop("params")] for g in (group, expected)]
        assert numbers[0] == numbers[1] == [id(p) for p in params if (p.dim() == 2) == is_matrix]
        assert group == expected and group["weight_decay"] == (0.2 if is_matrix else 0.0)
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.9), 1e-8)


# ------------------------------------------------------------------------------------------------------------
# initial weights: a function of (seed, name, place in the parameter)


def test_initial_weights_depend_on_the_seed_alone():
    """By default, it is torch's seed. The random state of torch is neither read nor advanced."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, default = GPT(GPTConfig(**SMALL), seed=5), GPT(GPTConfig(**SMALL)).state_dict()
    other = GPT(GPTConfig(**SMALL), seed=6).state_dict()
    GPT.from_state(first.config, other)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = GPT(GPTConfig(**SMALL), seed=5).state_dict()
    assert same_states(first.state_dict(), default) and same_states(default, again)
    assert not any(torch.equal(w, other[n]) for n, w in again.items() if w.dim() == 2)


def test_initial_weights_stay_the_same_numbers():
    """A change here changes the curve of every seed."""
    state = GPT(GPTConfig(**SMALL), seed=1337).state_dict()
    for name, golden in {
        "transformer.wte.weight": [-0.018607425, 0.002185281, 0.011119240],
        "transformer.h.1.mlp.c_proj.weight": [-0.010213447, 0.000156935, 0.004511042],
    }.items():
        assert state[name].flatten()[[0, 1, -1]].tolist() == pytest.approx(golden, rel=1e-4)


def test_common_blocks_start_alike_for_any_depth_and_vocabulary():
    few = GPT(GPTConfig(**SMALL), seed=5).state_dict()
    many = GPT(GPTConfig(**(SMALL | dict(n_layer=8, vocab_size=80))), seed=5).state_dict()
    for name, values in few.items():  # the embeddings of the ids that both have
        # sqrt(8 / 2): residual projections know the depth
        scale = 2.0 if name.endswith("c_proj.weight") else 1.0
        torch.testing.assert_close(values, many[name][: len(values)] * scale, rtol=1e-6, atol=0)


def test_initial_weights_are_gpt2s():
    state = GPT(GPTConfig(block_size=64, vocab_size=256, n_layer=2, n_head=4, n_embd=64), seed=5).state_dict()
    for name, w in state.items():
        if name.endswith("bias"):
            assert not w.any(), name
        elif w.dim() == 1:
            assert (w == 1).all(), name
        else:
            std = 0.02 / math.sqrt(4) if name.endswith("c_proj.weight") else 0.02
            assert w.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(w.mean().item()) < 4 * std / math.sqrt(w.numel()), name


def test_a_start_on_the_meta_device_is_the_same_start():
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**SMALL), seed=5)
    assert all(p.is_meta for p in gpt.parameters())
    gpt.to_empty(device="cpu").init_weights(5)
    assert same_states(gpt.state_dict(), GPT(GPTConfig(**SMALL), seed=5).state_dict())
    assert gpt.lm_head.weight is gpt.transformer.wte.weight


# ------------------------------------------------------------------------------------------------------------
# forward: (logits, loss)


def test_loss_is_the_mean_over_the_targets_that_count():
    gpt, x, y = rough(), ids(3, 16), some_targets(3, 16)
    logits, loss = gpt(x, y)
    assert logits.shape == (3, 16, 65)
    losses = [
        -logits[b, t].double().log_softmax(0)[y[b, t]] for b in range(3) for t in range(16) if y[b, t] != -1
    ]
    assert loss.item() == pytest.approx((sum(losses) / len(losses)).item(), rel=1e-6)
    last, none = gpt(x)  # without targets
    assert none is None and last.shape == (3, 1, 65)
    torch.testing.assert_close(last, logits[:, -1:], atol=1e-5, rtol=1e-5)


def test_dropout_is_where_gpt2_has_it():
    """On the embeddings, on attention's weights, and on what attention and MLP add."""
    gpt, places = rough(dropout=0.25), []
    torch.testing.assert_close(gpt(ids(2, 4))[0], rough()(ids(2, 4))[0])  # none outside training
    for name, module in gpt.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda m, *_, name=name: places.append((name.split(".")[-2], m.p)))
    attention = "scaled_dot_product_attention"
    with mock.patch.object(F, attention, wraps=F.scaled_dot_product_attention) as attend:
        gpt.train()(ids(2, 4))
        gpt.eval()(ids(2, 4))
    assert [call.args[4] for call in attend.call_args_list] == [0.25, 0.25, 0.0, 0.0]
    assert places[:5] == [(name, 0.25) for name in ("transformer", *("attn", "mlp") * 2)]


# ------------------------------------------------------------------------------------------------------------
# the loss without all of the logits


def plain_loss(x, weight, targets):
    logits = F.linear(x.flatten(0, 1), weight).float()
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-1)


def chunked_loss(x, weight, targets):
    # 7 rows of logits at once, 3 of these in float32, and gradients of 12 rows of the weight
    return summed_loss(x, weight, targets, at_once=(0, 7 * len(weight), 3 * len(weight)))


def loss_and_gradients(loss_of, x, weight, targets, scale=0.37):
    """The loss, and its gradients times a scale (as where it is divided by the number of targets)."""
    x, weight = x.detach().clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_of(x, weight, targets)
    (loss * scale).backward()
    return loss, x.grad, weight.grad


def hidden(rows, vocab, width=16):
    """Final hidden states (2, rows / 2, width), head (vocab, width) and targets (2, rows / 2)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, rows // 2, width, generator=generator)
    return x, torch.randn(vocab, width, generator=generator) * 0.5, some_targets(2, rows // 2, vocab=vocab)


@pytest.mark.parametrize("loss_of", [summed_loss, chunked_loss, partial(summed_loss, at_once=(0, 64, 3))])
def test_summed_loss_is_cross_entropy(loss_of):
    """Also of logits in the thousands: the sum of their exponentials is beyond float32."""
    x, weight, targets = hidden(40, 65)
    assert targets[0, 0] == targets[-1, -1] == -1
    for scale, atol in ((1, 1e-5), (1000, 1e-2)):
        got = loss_and_gradients(loss_of, scale * x, weight, targets)
        expected = loss_and_gradients(plain_loss, scale * x, weight, targets)
        assert got[0].dtype == torch.float32 and got[0].shape == ()
        assert got[0].item() == pytest.approx(expected[0].item(), rel=1e-6)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=atol, rtol=1e-4 if scale > 1 else 1e-5)
    for value in loss_and_gradients(loss_of, x, weight, torch.full_like(targets, -1)):
        assert (value == 0).all()


def test_gradients_are_not_scaled_by_a_rounded_target_count():
    """1 / (480 * 1024), GPT-2's count, is 0.3 % off in bfloat16: all gradients but the head's would be."""
    x, weight, targets = hidden(400, 65)
    inputs, scale = (x.bfloat16(), weight.bfloat16(), targets), 1 / (480 * 1024)
    got = loss_and_gradients(chunked_loss, *inputs, scale)[1:]
    for a, b in zip(got, loss_and_gradients(plain_loss, x, weight, targets, scale)[1:], strict=True):
        assert ((a * b).sum() / (b * b).sum()).item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("target", [0, 1])
def test_gradients_in_float16_neither_underflow_nor_overflow(target):
    """
    All rows predict token 0. With target 0, the gradients of the other logits are 3e-7, which float16 would
    round to a multiple of 6e-8, by 2.6%, and the target's is -3e-4, with an error of 2% where float32 is
    summed in vectors of 8 (AVX2). With target 1, the sum over the rows is more than 65,504 / 1024.
    """
    weight = torch.eye(1024)
    x, targets = (15 * weight[0]).expand(2, 40, 1024), torch.full((2, 40), target)
    got = loss_and_gradients(chunked_loss, x.half(), weight.half(), targets, scale=32)
    for a, b in zip(got[1:], loss_and_gradients(plain_loss, x, weight, targets, scale=32)[1:], strict=True):
        torch.testing.assert_close(a.float(), b, atol=0, rtol=0.025)


class Largest(TorchDispatchMode):
    """
    Remembers the size of the largest tensor returned by an operation, and the types of the matrices
    multiplied.
    """

    numel = 0

    def __init__(self):
        super().__init__()
        self.multiplied = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.multiplied |= {t.dtype for t in args}
        out = func(*args, **(kwargs or {}))
        returned = out if isinstance(out, (tuple, list)) else [out]
        self.numel = max([self.numel, *(t.numel() for t in returned if isinstance(t, torch.Tensor))])
        return out


@pytest.fixture(scope="module")
def large():
    """
    Rows that summed_loss must cut, (2, 66, 4) and a large vocabulary, with what cross_entropy makes of them.
    """
    x, weight, targets = hidden(132, LARGE_VOCAB, width=4)
    return (x, weight, targets), loss_and_gradients(plain_loss, x, weight, targets)


@pytest.mark.parametrize("half", [False, True])
def test_a_large_vocabulary_is_cut(large, half):
    """Without gradients too; test_compile.py has the same under torch.compile."""
    (x, weight, targets), expected = large
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
    with Largest() as largest, autocast:
        got = loss_and_gradients(summed_loss, x, weight, targets)
    assert 0 < largest.numel <= 2 ** (25 if half else 24) < 132 * LARGE_VOCAB
    assert largest.multiplied == ({torch.bfloat16} if half else {torch.float32})
    assert {value.dtype for value in got} == {torch.float32}
    assert got[0].item() == pytest.approx(expected[0].item(), rel=3e-3 if half else 1e-6)
    assert apart(got[1], expected[1]) < (0.02 if half else 1e-4)  # a sum over 262,144
    assert apart(got[2], expected[2]) < (0.02 if half else 1e-6)
    with torch.no_grad(), Largest() as largest, autocast:
        loss = summed_loss(x.clone().requires_grad_(), weight, targets)
    assert 0 < largest.numel <= 2**24 and not loss.requires_grad
    assert loss.item() == pytest.approx(expected[0].item(), rel=3e-3 if half else 1e-6)


CHUNKS_OF_A_GPU = [(80, 16384, 16384), (80, 32768, 8192), (0, 9000, 8192), (16, 9000, 3456), (4, 9000, 1334)]


@pytest.mark.parametrize("gib, rows, at_once", CHUNKS_OF_A_GPU)
def test_the_logits_of_a_gpu_at_once(monkeypatch, gib, rows, at_once):
    """
    All of them if they fit into an eighth of its memory, else up to 8,192 rows which fit; the meta device
    stands in for a GPU.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gib > 0)
    properties = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    # it does not know the meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    x, weight = (torch.empty(n, 8, device="meta", requires_grad=True) for n in (rows, 50304))
    with Largest() as largest:
        summed_loss(x[None], weight, torch.empty(1, rows, dtype=torch.int64, device="meta")).backward()
    assert largest.numel == at_once * 50304 and x.grad.shape == x.shape and weight.grad.shape == weight.shape


def test_torch_compile_evaluates_the_loss_in_one_part(large):
    """Each part would be compiled again."""
    matmuls = []

    def count(graph, inputs):
        matmuls.extend(n for n in graph.graph.nodes if n.target is F.linear or "linear" in str(n.target))
        return graph

    torch._dynamo.reset()
    x, weight, targets = large[0]
    x, targets = x[:, :40], targets[:, :40]
    with torch.no_grad():
        loss = torch.compile(summed_loss, backend=count, fullgraph=True)(x, weight, targets)
        expected = summed_loss(x, weight, targets)
    assert len(matmuls) == 1
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


# ------------------------------------------------------------------------------------------------------------
# generation


def by_hand(gpt, idx, n, vocab_size=None):
    """The likeliest continuation, the long way round."""
    for _ in range(n):
        window = idx[:, -gpt.config.block_size :]
        following = gpt(window, window)[0][:, -1, :vocab_size].argmax(-1, keepdim=True)
        idx = torch.cat((idx, following), 1)
    return idx


ROTARY = {"nanochat": dict(arch="nanochat", n_kv_head=1), "llama": dict(arch="llama")}
WITHOUT_CACHE = [({}, False), *((model, False) for model in ROTARY.values())]


@pytest.mark.parametrize(("model", "use_cache"), [({}, True), *WITHOUT_CACHE])
@pytest.mark.parametrize("length", [1, 16, 20])  # below, at and beyond block_size
def test_the_likeliest_continuation(model, length, use_cache):
    """Without a cache, the last block_size tokens are all that any model sees."""
    gpt, idx = rough(**model), ids(3, length)
    out = gpt.generate(idx, 24, temperature=0, use_cache=use_cache)
    assert torch.equal(out, by_hand(gpt, idx, 24))
    assert len(out[:, length:].unique()) > 5  # not one token again and again
    limited = gpt.generate(idx, 24, temperature=0, use_cache=use_cache, vocab_size=10)
    assert torch.equal(limited, by_hand(gpt, idx, 24, vocab_size=10)) and not torch.equal(limited, out)
    assert torch.equal(gpt.generate(idx, 24, temperature=3.0, top_k=1, use_cache=use_cache), out)


@pytest.mark.parametrize("model", [{}, dict(arch="llama")])
def test_a_cached_token_is_computed_once(model):
    gpt, shapes = rough(**model), []
    gpt.transformer.wte.register_forward_hook(lambda module, args, out: shapes.append(tuple(args[0].shape)))
    gpt.generate(ids(2, 5), 14)
    # without rotary positions, the window slides from the 17th token on
    late = [(2, 1)] * 2 if model else [(2, 16)] * 2
    of_samples = shapes[shapes.index((2, 5)) :]  # before them, one row is computed to check the cache
    assert of_samples == [(2, 5)] + [(2, 1)] * 11 + late
    shapes.clear()
    gpt.generate(ids(2, 5), 14, use_cache=False)
    assert shapes == [(2, T) for T in (*range(5, 17), 16, 16)]


KINDS = [{}, dict(arch="nanochat"), dict(arch="llama", n_kv_head=1), dict(n_expert=4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("model", "length"), [*zip(KINDS, [20, 15, 16, 1])])
def test_steps_of_one_shape_have_the_tokens_of_growing_caches(model, length):
    """
    After a prompt beyond, below and of block_size. The tokens are also those without a cache, where a window
    of rotary positions does not make a difference.
    """
    gpt, idx = rough(std=0.15, **model), ids(3, length)
    for how in (dict(temperature=0), dict(temperature=0.7, top_k=5), dict(top_p=0.8, vocab_size=60)):
        replace_seams(gpt, advance=None)
        expected = gpt.generate(idx, 24, seed=3, **how)
        replace_seams(gpt, advance=generation.advance)
        assert torch.equal(gpt.generate(idx, 24, seed=3, **how), expected), how
        if not gpt.arch.rotation:
            assert torch.equal(gpt.generate(idx, 24, seed=3, use_cache=False, **how), expected), how


def test_top_k_and_vocab_size_limit_what_is_drawn():
    gpt, idx = rough(std=0.1), ids(1, 5)
    logits = gpt(idx)[0][0, 0]
    torch.manual_seed(0)
    many = idx.expand(3000, 5)
    assert set(gpt.generate(many, 1, top_k=3)[:, -1].tolist()) == set(logits.topk(3).indices.tolist())
    assert set(gpt.generate(many, 1, top_k=0, temperature=9.0)[:, -1].tolist()) == set(range(65))
    assert set(gpt.generate(many, 1, vocab_size=10, temperature=9.0)[:, -1].tolist()) == set(range(10))
    both = set(gpt.generate(many, 1, top_k=3, vocab_size=10)[:, -1].tolist())
    assert both == set(logits[:10].topk(3).indices.tolist())


@pytest.mark.parametrize(("top_p", "temperature"), [(0.0, 0.7), (0.3, 2.0), (0.9, 0.7), (1.0, 2.0)])
def test_top_p_samples_from_the_smallest_nucleus(top_p, temperature):
    """
    The most likely tokens up to the one that brings their probability to top_p, and at least one token, of a
    vocabulary that is summed in two pieces.
    """
    gpt, idx = rough(std=0.1, vocab_size=300), ids(1, 5)
    probs, order = (gpt(idx)[0][0, 0] / temperature).softmax(0).sort(descending=True)
    nucleus = [n for n in range(1, 301) if probs[:n].sum() >= top_p] if top_p < 1 else [300]
    size = min(nucleus)
    drawn = gpt.generate(idx.expand(8000, 5), 1, temperature=temperature, top_p=top_p, seed=0)[:, -1]
    expected = torch.zeros(300).scatter(0, order[:size], probs[:size] / probs[:size].sum())
    assert set(drawn.tolist()) <= set(order[:size].tolist())
    torch.testing.assert_close(drawn.bincount(minlength=300) / 8000, expected, atol=0.02, rtol=0)


@pytest.mark.parametrize(("model", "dtype"), [*zip(KINDS, [*DTYPES, torch.bfloat16])])
@pytest.mark.parametrize("packs", [True, False])
def test_prepared_for_inference(model, dtype, packs, monkeypatch):
    """
    The logits of autocast, whose cache has the dtype, from one copy of each matrix in it; the norms, the
    embeddings and the routers stay in float32.
    """
    if not packs:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    gpt, x = rough(std=0.15 if "n_expert" in model else 0.3, **model), ids(3, 9)
    caches = [KVCache(rows=3, size=16) for _ in range(2)]
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        expected = gpt(x, caches=caches)[0]
    assert {t.dtype for cache in caches for t in (cache.k, cache.v)} == {dtype}
    generation.prepare(gpt, dtype)
    matrices = {name: w for name, w in gpt.named_buffers() if name.endswith("weight")}
    assert len(matrices) == (11 if model.get("arch") == "llama" else 5 if "n_expert" in model else 9)
    matrices |= {name: p for name, p in gpt.named_parameters() if ".experts." in name}
    assert {w.dtype for w in matrices.values()} == {dtype}
    assert {p.dtype for name, p in gpt.named_parameters() if name not in matrices} == {torch.float32}
    with torch.no_grad():
        logits = gpt(x)[0]
    assert logits.dtype == dtype
    assert apart(logits, expected) < max(1e-5, 5 * torch.finfo(dtype).eps)


# ------------------------------------------------------------------------------------------------------------
# an edited model, which may not fit the cache


def masked_attention(size, uses_cache=False):
    """
    Attention to the last `size` positions, which count from the first token of a step, which is wrong with a
    cache, if uses_cache is "from the step".
    """

    def attend(q, k, v, dropout=0.0, cache=None):
        groups, T = q.size(2) // k.size(2), q.size(1)
        k, v = (t.transpose(1, 2) for t in (k, v))
        if cache is not None and uses_cache:
            k, v = cache.append(k, v)
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        S = k.size(2)
        first = 0 if uses_cache == "from the step" else S - T
        distance = torch.arange(first, first + T)[:, None] - torch.arange(S)  # (T, S)
        is_later = torch.arange(S - T, S)[:, None] < torch.arange(S)
        mask = (distance < size) & ~is_later
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask).transpose(1, 2).flatten(2)

    return attend


def long_window(q, k, v, dropout=0.0, cache=None):
    """Attention to the last 4 positions in passes over more than 256, and to all in a step."""
    return (masked_attention(4) if q.size(1) > 256 else causal_attention)(q, k, v, dropout, cache)


def without_a_cache(q, k, v, dropout=0.0, cache=None):
    if cache is not None:
        raise TypeError("attention takes no cache")
    return causal_attention(q, k, v, dropout)


UNFIT = {
    "shift": (dict(shifts=True), "differ by"),
    "from the step": (dict(attention=masked_attention(1, uses_cache="from the step")), "differ by"),
    "window": (dict(attention=masked_attention(4)), "differ by"),
    "slight shift": (dict(shifts=3e-5), "differ by"),
    "raises": (dict(attention=without_a_cache), "the model raises TypeError: attention takes no cache"),
}


def edited(attention=causal_attention, shifts=False, **changes):
    """A model with other attention, or in which each position also sees the embedding of the one before."""
    gpt = rough(**changes)
    replace_seams(gpt, attention=attention)
    if shifts:
        gpt.transformer.drop.register_forward_hook(
            lambda module, args, x: x + shifts * F.pad(x, (0, 0, 1, -1))
        )
    return gpt


@pytest.mark.parametrize(
    ("name", "model", "length", "new"),
    [
        *((name, {}, *tokens) for name in UNFIT for tokens in ((1, 2), (5, 24))),
        ("shift", dict(arch="llama", n_kv_head=1), 4, 9),
        ("window", dict(arch="nanochat", n_expert=4), 5, 24),
    ],
)
def test_a_model_that_does_not_fit_the_cache_generates_without_it(capsys, name, model, length, new):
    """Also if no token is appended to the cache, and past block_size, and with steps of one shape."""
    edit, reason = UNFIT[name]
    gpt, idx = edited(**edit, **model), ids(3, length)
    expected = by_hand(gpt, idx, new)
    for advance in (None, generation.advance):
        replace_seams(gpt, advance=advance)
        assert torch.equal(gpt.generate(idx, new, temperature=0), expected)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("note: generating without the cache (slower), since with it ")
        assert reason in line or (advance and "the model raises " in line)  # without keys in the cache
    assert torch.equal(gpt.generate(idx, new, temperature=0, use_cache=False), expected)
    assert capsys.readouterr().err == ""


def test_other_attention_can_use_the_cache(capsys):
    gpt, idx = edited(masked_attention(4, uses_cache=True)), ids(3, 4)
    assert torch.equal(gpt.generate(idx, 12, temperature=0), by_hand(gpt, idx, 12))
    assert capsys.readouterr().err == "" and not torch.equal(by_hand(gpt, idx, 12), by_hand(rough(), idx, 12))


def test_a_window_that_only_long_sequences_have_is_seen():
    gpt = edited(long_window, block_size=300)
    assert "differ by" in generation.problem_of_cache(gpt, ids(1, 290), 4)
    assert generation.problem_of_cache(gpt, ids(1, 200), 4) == ""


@pytest.mark.parametrize(("model", "dtype"), [*zip(KINDS[:3], DTYPES)])
def test_rounding_is_no_difference(model, dtype):
    """Nor is it in steps of one shape; a context may be too short for a step."""
    for shifts in (False, True):
        gpt = edited(shifts=shifts, block_size=64, **model)
        generation.prepare(gpt, dtype)
        for advance in (None, generation.advance):
            replace_seams(gpt, advance=advance)
            problems = [generation.problem_of_cache(gpt, ids(1, n), new) for n, new in ((1, 2), (9, 99))]
            assert [bool(problem) for problem in problems] == [shifts] * 2, problems
    for block_size in (1, 2, 3):
        assert rough(block_size=block_size, **model).generate(ids(2, 5), 6).shape == (2, 11)


@pytest.mark.parametrize("n_expert, wrong, compared", [(4, (1, 2), 3), (4, (1, 2, 3), 3), (0, (1,), 1)])
def test_a_token_that_another_expert_gets_is_no_difference(n_expert, wrong, compared):
    """In one sequence of several; without experts, one sequence is enough."""
    gpt, sequences = rough(n_expert=n_expert), []

    def sometimes_wrong(tokens):
        sequences.append(tokens)
        return gpt(tokens, tokens)[0] + (ids(65) if len(sequences) in wrong else 0)

    tokens = random_sequences(gpt.config, 5, torch.device("cpu"))
    problem = compare_logits(sometimes_wrong, lambda tokens: gpt(tokens, tokens)[0], tokens)
    assert bool(problem) == (len(wrong) == compared) and len(sequences) == compared


def test_the_check_of_the_cache_draws_no_random_numbers():
    """Dropout draws some in training; then, each pass differs, and nothing is compared."""
    gpt = rough(dropout=0.5).train()
    before = torch.get_rng_state()
    assert generation.problem_of_cache(gpt, ids(1, 5), 9) == ""
    assert generation.problem_of_cache(edited(shifts=True), ids(1, 5), 9) != ""
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------------------------------------------------------------------------------------
# past block_size


@pytest.mark.parametrize(("arch", "length"), [("nanochat", 1), ("llama", 20)])
def test_rotary_models_attend_to_the_last_block_size_positions(arch, length):
    """The reference computes all positions for each token, in a model with a longer context."""
    gpt, idx = rough(**ROTARY[arch]), ids(3, length)
    out = gpt.generate(idx, 45 - length, temperature=0)
    longer = rough(**ROTARY[arch], block_size=64)
    replace_seams(longer, attention=masked_attention(16))
    used = min(length, 16)  # the last block_size tokens of the prompt
    expected = by_hand(longer, idx[:, -used:], 45 - length)
    assert torch.equal(out[:, length:], expected[:, used:])
    assert not torch.equal(out, by_hand(gpt, idx, 45 - length)), "the test needs a model whose window matters"


@pytest.mark.parametrize("model", [{}, ROTARY["llama"]])
def test_several_tokens_can_follow_cached_ones(model):
    """Up to block_size; in a rotary model, then one at a time."""
    gpt, x = rough(**model), ids(2, 16)
    caches = [KVCache(rows=2, size=16) for _ in range(2)]
    for part in x.split([4, 6, 6], dim=1):
        logits, _ = gpt(part, caches=caches)
    torch.testing.assert_close(logits, gpt(x)[0], atol=1e-5, rtol=1e-5)
    if model:
        gpt(ids(2, 1), caches=caches)
    with pytest.raises(ValueError, match=f"{18 + bool(model)} tokens is longer than block_size 16"):
        gpt(ids(2, 2), caches=caches)
    with pytest.raises(ValueError, match="17 tokens is longer than block_size 16"):
        gpt(ids(1, 17))


# ------------------------------------------------------------------------------------------------------------
# many samples


@pytest.mark.parametrize("how", [{}, dict(top_k=7), dict(temperature=0.5, top_k=9, top_p=0.9)])
def test_a_sample_depends_on_its_number_and_not_on_its_batch(how):
    """A common prompt is computed once."""
    gpt, idx, shapes = rough(std=0.1), ids(6, 5), []
    out = gpt.generate(idx, 20, seed=3, **how)
    parts = [gpt.generate(idx[i:j], 20, seed=3, first_sample=i, **how) for i, j in ((0, 1), (1, 4), (4, 6))]
    assert torch.equal(out, torch.cat(parts))
    assert torch.equal(out[:, :15], gpt.generate(idx, 10, seed=3, **how))  # and not on how many tokens follow
    assert not torch.equal(out, gpt.generate(idx, 20, seed=4, **how))
    torch.manual_seed(3)  # from which the default is drawn
    drawn = gpt.generate(idx, 20, **how)
    assert not torch.equal(drawn, gpt.generate(idx, 20, **how))
    torch.manual_seed(3)
    assert torch.equal(drawn, gpt.generate(idx, 20, **how))
    gpt.transformer.wte.register_forward_hook(lambda module, args, out: shapes.append(args[0].shape))
    together = gpt.generate(idx[:1].expand(6, 5), 20, seed=3, **how)
    assert shapes[shapes.index((1, 5)) :] == [(1, 5)] + [(6, 1)] * 11 + [(6, 16)] * 8
    one_by_one = [gpt.generate(idx[:1], 20, seed=3, first_sample=i, **how) for i in range(6)]
    assert torch.equal(together, torch.cat(one_by_one)) and len(together.unique(dim=0)) == 6


@pytest.mark.parametrize(("number", "expected"), [(0.0, 1), (1 - 2**-23, 4)])
def test_the_largest_and_the_smallest_random_number(number, expected):
    """No token of probability 0 is drawn, neither before the first likely one nor after the last."""
    gpt, logits = rough(vocab_size=7), torch.tensor([-200.0, 1.0, 0.3, -200.0, 0.9, -200.0, -200.0])

    def advance(model, samples):
        samples.numbers.fill_(number)
        generation.advance(model, samples)

    gpt.lm_head.register_forward_hook(lambda module, args, out: logits.expand_as(out))
    replace_seams(gpt, advance=advance)
    assert gpt.generate(ids(1, 1, vocab=7), 3)[0, -1].item() == expected


# ------------------------------------------------------------------------------------------------------------
# weights from elsewhere


def test_from_state_copies_in_float32_and_ignores_masks():
    source = rough()
    half = GPT.from_state(source.config, source.half().state_dict()).state_dict()
    assert {w.dtype for w in half.values()} == {torch.float32}
    source.float()
    state = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 16, 16) for n in range(2)} | source.state_dict()
    gpt = GPT.from_state(source.config, state)
    assert same_states(gpt.state_dict(), source.state_dict())
    assert gpt.lm_head.weight is gpt.transformer.wte.weight
    assert all(p.requires_grad and not p.is_meta for p in gpt.parameters())
    with torch.no_grad():
        source.transformer.wte.weight.zero_()
    assert gpt.transformer.wte.weight.any()


def test_from_state_refuses_what_does_not_fit():
    state, name = rough().state_dict(), "transformer.h.1.mlp.c_fc.weight"
    lacking = {n: w for n, w in state.items() if n != name}
    wrong = lacking, lacking | {name: torch.ones(128, 31)}, state | {f"{name}.x": torch.ones(1)}
    cases = [*(({}, weights, name) for weights in wrong), (dict(block_size=8), state, "wpe")]
    for changes, weights, said in [*cases, (dict(bias=False), state, "bias")]:
        with pytest.raises(ValueError, match=said):
            GPT.from_state(GPTConfig(**(SMALL | changes)), weights)


def test_crop_block_size():
    gpt, x = rough(), ids(2, 9)
    before = gpt(x, x)[0]
    gpt.crop_block_size(9)
    for block_size in (0, 10):
        with pytest.raises(ValueError, match=f"block_size {block_size} is outside 1 to 9"):
            gpt.crop_block_size(block_size)
    assert gpt.describe()["block_size"] == 9 and torch.equal(gpt(x, x)[0], before)
    assert torch.equal(gpt.generate(x, 8, temperature=0), by_hand(gpt, x, 8))


def test_mfu_of_gpt2():
    with torch.device("meta"):
        gpt = GPT(GPTConfig(vocab_size=50257))
    assert gpt.get_num_params(non_embedding=False) == 124_439_808
    assert gpt.get_num_params() == 123_653_376
    # 6 * 123,653,376 + 12 * 12 layers * 768 * 1024 positions
    assert gpt.flops_per_token() == 741_920_256 + 113_246_208
    # 12 sequences of 1024 tokens in half a second: 2.1016571e13 a second, of an A100's 3.12e14
    assert gpt.estimate_mfu(12, 0.5) == pytest.approx(0.067360, rel=1e-4)
    assert gpt.estimate_mfu(12, 0.5, peak_flops=624e12) == pytest.approx(0.033680, rel=1e-4)


@pytest.mark.parametrize("edit", COUNTED)
def test_parameters_and_flops_of_an_edited_model_are_counted(edit):
    """What is looked up has no FLOPs, and what blocks share has its FLOPs in each."""
    config, (parameters, used) = GPTConfig(**COUNTED_SHAPE), COUNTED[edit]
    with torch.device("meta"):
        usual, edited = GPT(config), edited_gpt(edit)(config)
    assert edited.get_num_params() == usual.get_num_params() + parameters
    assert count_model(edited).parameters == edited.get_num_params(non_embedding=False)
    assert edited.flops_per_token() == usual.flops_per_token() + 6 * used


NORMALIZED = "weights that are normalized in the forward pass"


@pytest.mark.parametrize("edit", ["ternary MLP", "one more linear", NORMALIZED])
def test_a_model_is_prepared_for_generation_if_it_computes_the_same(edit):
    """A subclass of Linear stays as it is; a forward pass that reads weights cannot read packed ones."""
    model, x = roughen(edited_gpt(edit)(GPTConfig(**COUNTED_SHAPE), 1)), ids(1, 8)
    expected = model(x)[0]
    problem = generation.problem_of_prepare(model, torch.float32)
    if edit == NORMALIZED:
        assert "packed the model raises " in problem
    else:
        generation.prepare(model, torch.float32)
        torch.testing.assert_close(model(x)[0], expected, rtol=1e-4, atol=1e-4)
        assert problem == ""


def answers(gpt, rows):
    """{name: (state, text)} of the first rows of bench.py --check."""
    config = COUNTED_SHAPE | dict(nproc=1, plan=False, tune=False, real_data=False)
    described, cpu = described_for_bench(settings_of_train()), torch.device("cpu")
    workload = Workload(config, described, cpu, ["cpu"], gpt)
    return {name: (state, text) for name, state, text in islice(check_model(None, workload, 1), rows)}


@pytest.mark.parametrize(("edit", "state"), [("buffer", "holds"), ("blocks applied twice", "refused")])
def test_what_an_edit_computes_more_than_is_counted_is_said(edit, state):
    """The blocks are applied twice, and have no parameter more."""
    found, text = answers(edited_gpt(edit), 3)["parameters and FLOPs"]
    assert found == state and ("FLOPs of matmuls per token" in text) == (state == "refused")


class DroppedPaths(GPT):
    """In training, samples omit the last block at random."""

    def embed(self, idx, positions):
        self.kept = torch.rand(idx.size(0), 1, 1) > 0.8
        return super().embed(idx, positions)

    def run_blocks(self, blocks, x, *more):
        y, routing = super().run_blocks(blocks, x, *more)
        return torch.where(self.kept, y, x) if self.training else y, routing


class Penalized(GPT):
    """The loss contains a term of the weights: of each micro-batch."""

    def predict_tokens(self, x, targets, *more):
        logits, loss = super().predict_tokens(x, targets, *more)
        return logits, loss + self.penalty(targets, *more) if targets is not None else None

    def penalty(self, targets, *more):
        return self.lm_head.weight.square().sum()


class PenalizedByTarget(Penalized):
    """Of the micro-batch's share of the step."""

    def penalty(self, targets, target_count, *more):
        count = (targets != -1).sum()
        return super().penalty(targets) * count / (target_count or count)


@pytest.mark.parametrize(
    "gpt, problem, is_noted",
    [
        (GPT, "", False),
        (DroppedPaths, "", True),
        (Penalized, "a term of the loss counts once per micro-batch", True),
        (PenalizedByTarget, "", True),
    ],
)
def test_what_the_loss_contains_besides_the_tokens_is_said(gpt, problem, is_noted):
    """A term that exists in training alone, or counts right, is no fault."""
    rows = answers(gpt, 4)
    state, text = rows["one process"]
    assert text.startswith(problem or "AdamW") and (state == "differs") == bool(problem)
    state, text = rows["loss by logits"]
    assert state == "holds" and ("the cross-entropy of the logits is " in text) == is_noted


# ------------------------------------------------------------------------------------------------------------
# GPT-2 from transformers; nothing is downloaded


def gpt2_of_transformers(**changes):
    """A small GPT2LMHeadModel of rough weights."""
    transformers = pytest.importorskip("transformers")
    shape = dict(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=65)
    torch.manual_seed(0)
    return roughen(transformers.GPT2LMHeadModel(transformers.GPT2Config(**(shape | changes))), std=0.15)


@pytest.mark.parametrize(("theirs", "ours"), [("gelu", "none"), ("gelu_pytorch_tanh", "tanh")])
def test_the_same_model_as_transformers(tmp_path, theirs, ours):
    """
    GPT-2 was trained with the tanh approximation; nanoGPT, and so a model from scratch, has the exact GELU.
    """
    hf, x = gpt2_of_transformers(activation_function=theirs), ids(3, 16)
    hf.save_pretrained(tmp_path)
    gpt = GPT.from_pretrained(str(tmp_path)).eval()
    assert gpt.describe() == dict(SMALL, dropout=0.0, bias=True, gelu=ours, **GPT2)
    assert gpt.lm_head.weight is gpt.transformer.wte.weight
    torch.testing.assert_close(gpt(x, x)[0], hf(x).logits, atol=1e-5, rtol=0)


def test_weights_that_are_not_there_are_not_made_up(tmp_path):
    """Only dropout can be overridden."""
    hf, folder, name = gpt2_of_transformers(), tmp_path / "whole", "transformer.h.1.mlp.c_fc.weight"
    hf.save_pretrained(folder)
    assert GPT.from_pretrained(str(folder), dict(dropout=0.25)).config.dropout == 0.25
    with pytest.raises(ValueError, match="only dropout .* not .*'block_size'"):
        GPT.from_pretrained(str(folder), dict(dropout=0.25, block_size=8))
    partly = {n: w for n, w in hf.state_dict().items() if n not in (name, "lm_head.weight")}
    hf.save_pretrained(tmp_path / "partly", state_dict=partly)
    config, weights = folder / "config.json", folder / "model.safetensors"
    config.write_bytes(config.read_bytes().replace(b": 65", b": 66"))
    with pytest.raises(ValueError, match=r"wte.weight is \(65, 32\), but .* says \(66, 32\)"):
        GPT.from_pretrained(str(folder))
    weights.write_bytes(weights.read_bytes()[:-100])
    for path, said in (("whole", "cannot load"), ("partly", f"{name} is missing"), ("absent", "cannot load")):
        with pytest.raises(ValueError, match=said):
            GPT.from_pretrained(str(tmp_path / path))


def test_a_head_of_its_own_that_config_json_ties(tmp_path):
    """It is read, as transformers does."""
    safetensors = pytest.importorskip("safetensors.torch")
    hf, x, path = gpt2_of_transformers(), ids(3, 16), tmp_path / "model.safetensors"
    hf.save_pretrained(tmp_path)
    weights = safetensors.load_file(path) | {"lm_head.weight": torch.randn(65, 32)}
    safetensors.save_file(weights, path, metadata={"format": "pt"})
    gpt = GPT.from_pretrained(str(tmp_path)).eval()
    torch.testing.assert_close(gpt.lm_head.weight, weights["lm_head.weight"], atol=0, rtol=0)
    torch.testing.assert_close(gpt(x, x)[0], type(hf).from_pretrained(tmp_path)(x).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("T", "dropout"), [(1, 0.0), (128, 0.0), (600, 0.0), (160, 0.25)])
def test_attention_in_halves_on_a_cpu_is_attention(T, dropout):
    """As near to float32's as the rounding of bfloat16 allows, forward and backward, with what it drops."""
    torch.manual_seed(0)
    D, factors = (T if dropout else 16), 1.0
    qkv, grad = torch.randn(2, T, 3, 3, D).bfloat16(), torch.randn(2, T, 3 * D).bfloat16()

    def attend(q, k, v):
        torch.manual_seed(7)  # the same mask each time
        return causal_attention(q, k, v, dropout)

    if dropout:  # the weights are what reads values that are a unit vector for each position
        q, k, v = qkv.unbind(2)
        weights = attend(q, k, torch.eye(T).bfloat16()[:, None].expand_as(v)).unflatten(-1, (3, T))
        is_kept = weights.transpose(1, 2) > 0  # (B, H, T, T)
        assert 0.7 < is_kept.sum() / (2 * 3 * T * (T + 1) / 2) < 0.8
        factors = is_kept / (1 - dropout)
    expected, x = qkv.float().requires_grad_(), qkv.requires_grad_()
    q, k, v = (t.transpose(1, 2) for t in expected.unbind(2))
    is_later = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / D**0.5).masked_fill(is_later, -math.inf).softmax(-1)
    right = ((weights * factors) @ v).transpose(1, 2).flatten(2)
    right.backward(grad.float())
    y = attend(*x.unbind(2))
    y.backward(grad)
    assert apart(y.float(), right) < 0.01 and apart(x.grad.float(), expected.grad) < 0.01


def test_a_step_and_a_micro_batch_seed_every_generator():
    """An edited model may draw from Python's and from numpy's too."""
    seeds = [partial(precision.seed_step, *key) for key in ((1, 2, 0), (2, 2, 0), (1, 3, 0), (1, 2, 1))]
    seeds += [partial(precision.seed_micro_batch, 1, 2, number, Mesh()) for number in (0, 4)]

    def drawn(seed):
        seed()
        return random.random(), np.random.random(), torch.rand(()).item()

    numbers = [drawn(seed) for seed in seeds]
    assert [drawn(seed) for seed in seeds] == numbers
    assert len({number for of_seed in numbers for number in of_seed}) == 3 * len(seeds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_drops_that_many_and_keeps_the_mean(dtype, p):
    torch.manual_seed(0)
    layer, ones = Dropout(p), torch.ones(500, 401, dtype=dtype)
    factors = layer(ones)
    assert factors.dtype == dtype
    assert set(factors.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p), dtype=dtype).item()}
    assert abs((factors == 0).float().mean() - p) < 0.005
    neighbours = torch.stack([factors[:, :-1].flatten(), factors[:, 1:].flatten()]).float()
    assert abs(torch.corrcoef(neighbours)[0, 1]) < 0.01
    assert not torch.equal(factors, layer(ones)) and layer.eval()(ones) is ones
