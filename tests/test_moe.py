"""
Mixture of experts in the model: what it computes, its losses, its numbers. On several ranks: test_experts.py.
"""

import pytest
import torch
import torch.nn.functional as F
from test_model import Largest, apart, ids, one_thread, roughen, same_states  # noqa: F401  (one_thread: of this file too)

from isogpt.checkpoint.state import load_weights
from isogpt.nn.experts import ExpertLinear
from isogpt.parallel import parallelize
from model import GPT, GPTConfig, make_mlp

CPU = torch.device("cpu")
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
    x = torch.randn(3, 7, moe.config.n_embd, requires_grad=True)
    direction = torch.randn_like(x)
    outputs = moe(x)[0], slow_moe(moe, x)
    found, expected = ([y, *torch.autograd.grad(y, (x, *moe.parameters()), direction)] for y in outputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [9, 0, 0, 0], [0, 0, 0, 0], [17, 16, 31, 1], [399, 0, 0, 1]]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("n_out", "dtype"), [(24, torch.float32), (50, torch.float32), (24, torch.bfloat16)])
def test_experts_without_rows(n_out, dtype, is_compiled):
    """
    Against one matmul for each expert; experts without a row have gradients of 0. PyTorch's kernel takes no
    rows of 50, and a compiled layer multiplies float32 in blocks, which add at most half as many rows.
    """
    torch.manual_seed(0)
    layer, largest = ExpertLinear(4, 16, n_out, bias=False).to(dtype), Largest()
    torch.nn.init.normal_(layer.weight)

    def watched(graph, inputs):
        def run(*args):
            with largest:
                return graph(*args)

        return run

    torch._dynamo.reset()
    function = torch.compile(layer, backend=watched, fullgraph=True) if is_compiled else layer
    for counts in COUNTS:
        x = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
        weights = layer.weight.view(4, n_out, 16)
        expected = torch.cat([rows @ w.T for rows, w in zip(x.split(counts), weights, strict=True)])
        y, direction = function(x, torch.tensor(counts)), torch.randn_like(expected)
        torch.testing.assert_close(y, expected)
        pairs = (torch.autograd.grad(z, (x, layer.weight), direction) for z in (y, expected))
        rounding = 0.02 if dtype == torch.bfloat16 else 1e-4
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)
    assert largest.numel <= (1.5 * len(x) + 2 * 4) * n_out


def test_the_router_computes_in_float32():
    """Its scores in bfloat16 would have three digits."""
    moe = moe_of("gpt2")
    x = torch.randn(2, 8, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        scores = moe.router(x)
        assert moe(x)[0].dtype == torch.bfloat16
    assert scores.dtype == torch.float32 and torch.equal(scores, x.float() @ moe.router.weight.T)


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
    routers = [f"transformer.h.{layer}.mlp.router.weight" for layer in range(2)]
    other = GPT(config_of(kind), seed=8)
    for seed, changed in ((3, []), (4, routers)):
        load_weights(other, dense.state_dict(), seed=seed)
        state = moe.state_dict()
        assert [n for n, w in other.state_dict().items() if not torch.equal(w, state[n])] == changed


# ------------------------------------------------------------------------------------------------------------
# auxiliary losses


def scores_of(model, idx):
    """The routers' scores of each layer, (B, T, E), with their graphs."""
    found = []
    for block in model.transformer.h:
        block.mlp.router.register_forward_hook(lambda m, i, y: found.append(y))
    model(idx)
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
    assert parallelize.take_routing(model, False, CPU) is None
    routing = parallelize.take_routing(model, True, CPU)  # (L, E + 2), divided by the tokens
    assert not model.routing.any() and tokens.sum() == 2 * 2 * 112 and tokens[1, 3] == 0
    torch.testing.assert_close(routing[:, 2:] * 112, tokens)
    assert routing[:, 1].mean().item() == pytest.approx(entropy, rel=1e-4)
    assert routing[:, 0].sum().item() == pytest.approx(auxiliary, rel=1e-4)


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


@pytest.mark.parametrize("kind", ["gpt2-bias", "llama", "unaligned"])
def test_copies_of_a_model(kind):
    """Experts start with different weights, and a copy has all of them."""
    model = GPT(config_of(kind), seed=1)
    state, c = model.state_dict(), model.config
    assert state["transformer.h.0.mlp.router.weight"].shape == (c.n_expert, c.n_embd)
    experts = state["transformer.h.0.mlp.experts.c_fc.weight"].view(c.n_expert, c.n_hidden, c.n_embd)
    assert len(experts.unique(dim=0)) == c.n_expert
    copied = GPT.from_state(GPTConfig(**model.describe()), state)
    assert same_states(copied.state_dict(), state)


def test_dropout_of_the_sum_and_not_within_experts():
    model = GPT(config_of("gpt2", dropout=0.5), seed=1)
    for block in model.transformer.h:
        assert block.mlp.dropout.p == 0.5 and block.mlp.experts.dropout.p == 0
    moe = moe_of("gpt2")
    moe.dropout.p = 0.5
    y, kept = moe(torch.randn(2, 16, 32))[0], moe.eval()
    assert 0.3 < (y == 0).float().mean() < 0.7 and kept(torch.randn(2, 16, 32))[1] is None
