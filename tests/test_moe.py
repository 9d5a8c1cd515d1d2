"""
Mixture of experts in the model: what it computes, its losses, its numbers. On several ranks: test_experts.py.
"""

import copy
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from test_model import apart, ids, one_thread, roughen, same_states  # noqa: F401  (one_thread: of this file too)

from isogpt.checkpoint.state import load_weights
from isogpt.monitor.records import routing_record, routing_text
from isogpt.nn import experts, generation
from isogpt.nn.experts import grouped_matmul
from isogpt.parallel.parallelize import take_routing
from isogpt.parallel.recompute import recompute
from model import GPT, GPTConfig, make_mlp

SMALL = dict(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32, n_expert=4, bias=False)
KINDS = {
    "gpt2": {},
    "gpt2-bias": dict(bias=True),
    "gpt2-tanh": dict(gelu="tanh"),
    "nanochat": dict(arch="nanochat"),
    "llama": dict(arch="llama", n_expert_active=3),
    "unaligned": dict(n_embd=36, n_hidden=50, bias=True),
    "one-expert": dict(n_expert=1, n_expert_active=1),
    "all-experts": dict(n_expert_active=4),
}


def config_of(kind="gpt2", **changes):
    return GPTConfig(**(SMALL | KINDS[kind] | changes))


def rough(kind="gpt2", std=0.3, **changes):
    return roughen(GPT(config_of(kind, **changes), seed=1), std=std)


def moe_of(kind):
    """The router and the experts of a block alone, with random weights."""
    torch.manual_seed(0)
    moe = make_mlp(config_of(kind))
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return moe


def slow_expert(moe, number, x):
    """An expert's output for one token: (C,) -> (C,)."""
    c, layers = moe.config, dict(moe.experts.named_children())

    def linear(name, x):
        weight = layers[name].weight.chunk(c.n_expert)[number]
        bias = None if layers[name].bias is None else layers[name].bias.chunk(c.n_expert)[number]
        return F.linear(x, weight, bias)

    hidden = linear("c_fc", x)
    if c.arch == "llama":
        hidden = F.silu(linear("c_gate", x)) * hidden
    elif c.arch == "nanochat":
        hidden = hidden.relu() ** 2
    else:
        hidden = F.gelu(hidden, approximate=c.gelu)
    return linear("c_proj", hidden)


def slow_moe(moe, x):
    """A loop over tokens and their experts: (B, T, C) -> (B, T, C)."""
    rows = []
    for token in x.flatten(0, 1):
        probs = (moe.router.weight @ token).softmax(0)
        chosen = probs.argsort(descending=True)[: moe.config.n_expert_active].tolist()
        total = sum(probs[e] for e in chosen)
        rows.append(sum(probs[e] / total * slow_expert(moe, e, token) for e in chosen))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_dropped(kind):
    """Output and gradients of the loop."""
    moe = moe_of(kind)
    x = torch.randn(3, 7, moe.config.n_embd)
    direction = torch.randn_like(x)
    found = []
    for function in (lambda moe, x: moe(x)[0], slow_moe):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        y = function(moe, leaf)
        (y * direction).sum().backward()
        found.append((y.detach(), leaf.grad, {name: p.grad.clone() for name, p in moe.named_parameters()}))
    (y, dx, grads), (slow_y, slow_dx, slow_grads) = found
    torch.testing.assert_close(y, slow_y, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dx, slow_dx, atol=1e-5, rtol=1e-5)
    assert grads.keys() == slow_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, slow_grads[name], atol=1e-5, rtol=1e-5, msg=name)


COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [0, 4, 5, 0], [9, 0, 0, 0], [0, 0, 0, 0], [17, 16, 31, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_rows(counts, dtype):
    """grouped_mm and blocks against one matmul for each expert; experts without a row have gradients of 0."""
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 24, 16, dtype=dtype, requires_grad=True)
    expected = torch.cat([rows @ w.T for rows, w in zip(x.split(counts), weight, strict=True)])
    direction = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (x, weight), direction)
    in_blocks = experts.BlockMatmul.apply(x, weight, *experts.blocks_of_rows(len(x), torch.tensor(counts)))
    # of the sum of the blocks' gradients
    rounded = dict(rtol=0.02, atol=0.02) if dtype == torch.bfloat16 else {}
    for y, tolerance in ((grouped_matmul(x, weight, torch.tensor(counts)), {}), (in_blocks, rounded)):
        torch.testing.assert_close(y, expected)
        grads = torch.autograd.grad(y, (x, weight), direction)
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a, b, **tolerance)


def test_all_rows_have_a_place_in_the_blocks():
    """Whatever the counts, rows of one expert are in blocks of this expert."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        E, N = (int(torch.randint(1, n, (), generator=generator)) for n in (9, 100))
        chosen = (torch.rand(N, generator=generator) ** 3 * E).long().sort().values
        place, expert, size = experts.blocks_of_rows(N, chosen.bincount(minlength=E))
        assert len(place.unique()) == N and place.max() < len(expert) * size <= 1.5 * N + 2 * E
        assert torch.equal(expert[place // size], chosen)


def test_widths_that_the_kernel_does_not_take(monkeypatch):
    """The fallback equals the kernel with the weights padded with zeros."""
    torch.manual_seed(0)
    counts = torch.tensor([4, 0, 7])
    x, weight = torch.randn(11, 36), torch.randn(3, 50, 36)
    with_kernel = grouped_matmul(x, F.pad(weight, (0, 0, 0, 2)), counts)
    monkeypatch.delattr(F, "grouped_mm")
    torch.testing.assert_close(grouped_matmul(x, weight, counts), with_kernel[:, :50])
    with pytest.raises(AttributeError):
        grouped_matmul(x, F.pad(weight, (0, 0, 0, 2)), counts)


def test_the_router_computes_in_float32():
    """Its scores in bfloat16 would have three digits."""
    moe = moe_of("gpt2")
    x = torch.randn(2, 8, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        scores = moe.router(x)
        assert moe(x)[0].dtype == torch.bfloat16
    assert scores.dtype == torch.float32 and torch.equal(scores, x.float() @ moe.router.weight.T)


@pytest.mark.parametrize("kind", ["gpt2-bias", "nanochat", "llama"])
def test_a_sequence_does_not_depend_on_the_others(kind):
    """Neither do its routers' numbers, nor a token on those that follow."""
    model = rough(kind).train()
    idx = ids(4, 16)
    logits, _ = model(idx, idx)
    together, model.routing = model.routing, None
    alone = torch.cat([model(row[None], row[None])[0] for row in idx])
    torch.testing.assert_close(alone, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.routing, together, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(idx[:, :9], idx[:, :9])[0], logits[:, :9], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2-bias", "nanochat", "llama", "one-expert"])
def test_equal_experts_are_the_dense_model(kind):
    """Whatever the routers do, and also in bfloat16."""
    dense = rough(kind, n_expert=0)
    moe = GPT(config_of(kind), seed=7).eval()
    load_weights(moe, dense.state_dict(), seed=3)
    idx = ids(2, 16)
    torch.testing.assert_close(moe(idx, idx)[1], dense(idx, idx)[1], atol=1e-5, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(moe(idx, idx)[1], dense(idx, idx)[1], atol=0.02, rtol=0)
    same_routers = GPT(config_of(kind), seed=8)
    load_weights(same_routers, dense.state_dict(), seed=3)
    assert same_states(moe.state_dict(), same_routers.state_dict())
    load_weights(same_routers, dense.state_dict(), seed=4)
    changed = [n for n, w in same_routers.state_dict().items() if not torch.equal(w, moe.state_dict()[n])]
    assert changed == [f"transformer.h.{layer}.mlp.router.weight" for layer in range(2)]


# ------------------------------------------------------------------------------------------------------------
# auxiliary losses


def scores_of(model, idx):
    """The routers' scores of each layer, (B, T, E), with their graphs."""
    found, routers = [], [block.mlp.router for block in model.transformer.h]
    hooks = [router.register_forward_hook(lambda m, i, y: found.append(y)) for router in routers]
    model(idx)
    for hook in hooks:
        hook.remove()
    return found


def auxiliary_of(scores, config):
    """
    The auxiliary loss of one sequence in one layer, from the router's scores (T, E): a mean over its tokens.
    """
    probs, (T, E) = scores.softmax(-1), scores.shape
    tokens = [0] * E
    for row in probs:
        for e in row.argsort(descending=True)[: config.n_expert_active].tolist():
            tokens[e] += 1
    balance = E * sum(n / (T * config.n_expert_active) * probs[:, e].mean() for e, n in enumerate(tokens))
    z = scores.exp().sum(-1).log().square().mean()
    return config.balance_loss * balance + config.router_z_loss * z


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("kind", ["gpt2-bias", "nanochat", "llama"])
def test_the_loss_is_the_tokens_alone_and_its_gradient_has_the_auxiliary_losses(kind, divided):
    """The last row is padding: none of its tokens counts."""
    model = rough(kind, balance_loss=0.5, router_z_loss=0.1).train()
    idx, targets = ids(4, 16), ids(4, 16, seed=1)
    targets[-1] = -1
    logits = model(idx, targets)[0]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    layers = scores_of(model, idx)
    auxiliary = sum(auxiliary_of(scores[b], model.config) for scores in layers for b in range(3)) / 3
    names, params = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(loss + auxiliary, params, retain_graph=True)
    alone = dict(zip(names, torch.autograd.grad(loss, params), strict=True))
    model.routing = None
    found = model(idx, targets, 3 * 16.0 if divided else None)[1]
    torch.testing.assert_close(found, loss, atol=1e-5, rtol=0)
    assert model.eval()(idx, targets)[1].item() == pytest.approx(loss.item(), abs=1e-5)
    for name, grad, wanted in zip(names, torch.autograd.grad(found, params), expected, strict=True):
        assert apart(grad, wanted) < 1e-4, name
        assert ".router." not in name or apart(grad, alone[name]) > 0.01, name
    assert model.routing[:, 0].sum().item() / 48 == pytest.approx(auxiliary.item(), rel=1e-4)


def test_the_balance_loss_is_its_coefficient_for_each_token_if_the_router_is_even():
    """With scores of 0 the z-loss is log(n_expert) squared and the entropy log(n_expert)."""
    moe = moe_of("gpt2")
    torch.nn.init.zeros_(moe.router.weight)
    x = torch.randn(3, 8, 32)
    log = torch.tensor(4.0).log().item()
    for balance, z in ((1.0, 0.0), (0.01, 0.0), (0.0, 1.0)):
        moe.config = replace(moe.config, balance_loss=balance, router_z_loss=z)
        routing = moe(x)[1]
        torch.testing.assert_close(routing[:, 0], torch.full((3,), 8 * (balance + z * log**2)))
        torch.testing.assert_close(routing[:, 1], torch.full((3,), 8 * log))
    assert routing[:, 2:].sum(1).tolist() == [16] * 3
    one_hot = moe_of("gpt2")
    one_hot.config = replace(one_hot.config, n_expert_active=1, balance_loss=1.0, router_z_loss=0.0)
    with torch.no_grad():
        one_hot.router.weight.zero_()[2, 0] = 100.0
    routing = one_hot(torch.ones(3, 8, 32))[1]
    torch.testing.assert_close(routing[:, 0], torch.full((3,), 8 * 4.0))  # all tokens for one of four experts
    assert routing[:, 2:].tolist() == [[0, 0, 8, 0]] * 3


def test_the_numbers_in_the_record():
    """
    Tokens per expert, entropy and the auxiliary loss of two micro-batches, one with a padding row, by hand.
    """
    model = rough("gpt2-bias").train()
    with torch.no_grad():  # the second layer's router never chooses its last expert
        block = model.transformer.h[1]
        block.ln_2.bias.zero_()[0] = 50.0
        block.mlp.router.weight[:, 0] = torch.tensor([0.0, 0.0, 0.0, -1.0])
    tokens, entropy, auxiliary = torch.zeros(2, 4), 0.0, 0.0
    for seed, rows in ((0, 4), (1, 3)):
        idx, targets = ids(4, 16, seed=seed), ids(4, 16, seed=seed)
        targets[rows:] = -1
        for layer, scores in enumerate(scores_of(model, idx)):
            probs = scores[:rows].softmax(-1).detach()
            tokens[layer] += F.one_hot(probs.topk(2).indices, 4).sum((0, 1, 2))
            entropy -= (probs * probs.log()).sum().item() / (2 * 7 * 16)
            auxiliary += sum(auxiliary_of(s, model.config) for s in scores[:rows].detach()).item() / 7
        model(idx, targets, 112.0)
    assert take_routing(model, False, torch.device("cpu")) is None
    found = routing_record(take_routing(model, True, torch.device("cpu")), 112)
    assert not model.routing.any() and tokens.sum() == 2 * 2 * 112
    assert found.pop("dead_experts") == ["1.3"]
    expected = {"expert_tokens_min": 0, "expert_tokens_mean": 56, "expert_tokens_max": tokens.max().item()}
    expected |= {"router_entropy": entropy, "auxiliary_loss": auxiliary}
    assert found == pytest.approx(expected, rel=1e-4)


def test_dead_experts_are_named_on_the_console():
    routing = torch.full((2, 7), 0.1)
    routing[:, 2:] = torch.tensor([[0.0, 1, 0, 0, 0], [0.4, 0.6, 0, 0, 0]])
    record = routing_record(routing, 10)
    assert record["dead_experts"] == ["0.0", "0.2", "0.3", "0.4", "1.2", "1.3", "1.4"]
    text = routing_text(record)
    assert text.endswith(", dead experts (layer.expert): 0.0, 0.2, 0.3 and 4 more")
    routing[:, 2:] = 0.2
    text = routing_text(routing_record(routing, 10))
    assert text == "tokens per expert 2 to 2, mean 2, entropy 0.10"


# ------------------------------------------------------------------------------------------------------------
# the model


@pytest.mark.parametrize("kind", ["gpt2", "gpt2-bias", "nanochat", "llama", "unaligned"])
def test_flops_count_the_experts_that_a_token_uses(kind):
    """With one active expert, a dense model's and the routers'."""
    dense = GPT(config_of(kind, n_expert=0))
    moe = GPT(config_of(kind, n_expert_active=1))
    mlp = sum(p.numel() for p in dense.transformer.h[0].mlp.parameters())
    routers = 2 * 4 * moe.config.n_embd
    assert moe.get_num_params() == dense.get_num_params() + 2 * 3 * mlp + routers
    assert moe.flops_per_token() == dense.flops_per_token() + 6 * routers
    two = GPT(config_of(kind, n_expert_active=2))
    assert two.flops_per_token() == moe.flops_per_token() + 6 * 2 * mlp


def test_without_experts_their_settings_do_not_matter():
    a, b = (GPT(GPTConfig(**(SMALL | dict(n_expert=0, n_expert_active=n))), seed=1) for n in (1, 2))
    assert same_states(a.state_dict(), b.state_dict()) and ".experts." not in "".join(a.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_model(kind):
    """state_dict, from_state and copy.deepcopy keep the weights; experts start with different ones."""
    model = GPT(config_of(kind), seed=1)
    state, c = model.state_dict(), model.config
    assert state["transformer.h.0.mlp.router.weight"].shape == (c.n_expert, c.n_embd)
    assert state["transformer.h.0.mlp.experts.c_fc.weight"].shape == (c.n_expert * c.n_hidden, c.n_embd)
    first, *others = state["transformer.h.0.mlp.experts.c_fc.weight"].chunk(c.n_expert)
    assert not any(torch.equal(first, other) for other in others)
    again = GPT(GPTConfig(**model.describe()), seed=2)
    again.load_state_dict(state)
    built = GPT.from_state(GPTConfig(**asdict(c)), state)
    idx = ids(2, 16)
    for other in (again, built, copy.deepcopy(model)):
        assert same_states(other.state_dict(), state)
        assert torch.equal(other(idx, idx)[0], model(idx, idx)[0])
    del state["transformer.h.1.mlp.router.weight"]
    with pytest.raises(ValueError, match="router"):
        GPT.from_state(c, state)


@pytest.mark.parametrize("kind", ["gpt2-bias", "nanochat", "llama", "unaligned"])
@pytest.mark.parametrize("prepared", [None, torch.float32, torch.bfloat16])
def test_generation_with_a_cache(kind, prepared):
    """The most likely tokens, also past block_size; a row's text does not depend on the other rows."""
    model = rough(kind)
    if prepared:
        generation.prepare(model, prepared)
    prompts = ids(3, 5)
    # in bfloat16 a different order of sums changes a choice sooner
    length = 24 if prepared != torch.bfloat16 else 8
    cached = model.generate(prompts, length, 0.0)
    assert cached.shape == (3, 5 + length) and torch.equal(cached[:, :5], prompts)
    assert model.routing is None
    if prepared == torch.bfloat16:
        return
    within = 16 if model.arch.rotation else 29  # rotary models attend past the context with a cache only
    assert torch.equal(cached[:, :within], model.generate(prompts, length, 0.0, use_cache=False)[:, :within])
    assert torch.equal(cached[1:2], model.generate(prompts[1:2], length, 0.0))


def test_experts_compute_in_bfloat16_for_sampling():
    model = rough("gpt2-bias")
    generation.prepare(model, torch.bfloat16)
    layers = [m for m in model.modules() if isinstance(m, experts.ExpertLinear)]
    assert len(layers) == 4 and {p.dtype for m in layers for p in m.parameters()} == {torch.bfloat16}
    assert model.transformer.h[0].mlp.router.weight.dtype == torch.float32
    fresh = rough("gpt2-bias")
    idx = ids(2, 16)
    assert apart(model(idx)[0].float(), fresh(idx)[0]) < 0.05


def test_dropout_of_the_sum_and_not_within_experts():
    model = GPT(config_of("gpt2", dropout=0.5), seed=1)
    for block in model.transformer.h:
        assert block.mlp.dropout.p == 0.5 and block.mlp.experts.dropout.p == 0
    moe = moe_of("gpt2")
    moe.dropout.p = 0.5
    y, kept = moe(torch.randn(2, 16, 32))[0], moe.eval()
    assert 0.3 < (y == 0).float().mean() < 0.7 and kept(torch.randn(2, 16, 32))[1] is None


@pytest.mark.parametrize("mode", ["full", "selective", "every:2"])
def test_recomputation_counts_tokens_once(mode):
    """Gradients and the routers' numbers are those without recomputation."""
    plain, other = (rough("gpt2-bias").train() for _ in range(2))
    recompute(other, mode)
    for model in (plain, other):
        for seed in range(2):
            model(ids(2, 16, seed=seed), ids(2, 16, seed=seed + 2), 64.0)[1].backward()
    assert torch.equal(plain.routing, other.routing)
    for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
