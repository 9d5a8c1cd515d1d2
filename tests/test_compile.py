"""torch.compile on a CPU, where train.py does not use it: gradients, graphs, and the line about them."""

import json
import re
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from functorch.compile import make_boxed_func
from runs import REPO, default_plan
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from isogpt.nn import experts, generation, kernels
from isogpt.parallel import compilation, context, sequence_collectives
from isogpt.parallel.attach import replace_seams
from isogpt.parallel.compilation import compile_generation, compile_parts, compile_report
from isogpt.parallel.gradients import FloatSums
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.recompute import recompute
from isogpt.parallel.shares import share_of_whole
from model import GPT, GPTConfig


@pytest.fixture(autouse=True)
def dynamo():
    """Nothing compiled yet, and an error is an error."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()
    counters.clear()


def test_the_choice_of_attention_on_a_gpu_is_in_the_graph():
    def attend(q):
        with kernels.attention_backends(0.1, torch.device("cuda")):
            return kernels.F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True)

    q = torch.randn(1, 2, 8, 8, requires_grad=True)
    torch.compile(attend, backend="aot_eager", fullgraph=True)(q).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and q.grad is not None


@pytest.mark.parametrize("pp, schedule", [(2, "zbv"), (2, "zero_bubble"), (2, "1f1b"), (1, "zbv")])
def test_zero_bubble_schedules_are_compiled_for_two_backward_passes(monkeypatch, pp, schedule):
    """Otherwise the first step on a GPU ends with: compiled with non-empty donated buffers."""
    monkeypatch.setattr(compilation, "trial_compilation", lambda device: "")
    monkeypatch.setattr(compilation, "compile_parts", lambda *args, **options: None)
    plan = default_plan(pp=pp, pp_schedule=schedule)
    with functorch_config.patch(donated_buffer=True), torch._dynamo.config.patch(suppress_errors=False):
        compilation.compile_model(torch.nn.Linear(1, 1), torch.device("cuda"), plan, Mesh(pp=pp))
        assert functorch_config.donated_buffer == (pp == 1 or schedule == "1f1b")


VOCABULARY = 512


@pytest.fixture
def chunks(monkeypatch):
    """The loss of 128 rows in two chunks, as a GPU computes that of more rows; an evaluation's in parts."""
    monkeypatch.setattr(kernels, "logits_at_once", lambda *_: (2**13, 2**15, 2**15))


def train_and_evaluate(model, times=1):
    """
    As in train.py, an evaluation with fewer rows before each step; returns loss and gradients of the last
    step.
    """
    x = torch.randint(0, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))
    for _ in range(times):
        model.eval()
        with torch.no_grad():
            model(x[:1], x[:1], 1.0)
        model.train()
        model.zero_grad()
        model.reset_routing(torch.device("cpu"))
        _, loss = model(x, x, 512.0)
        loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_same(actual, expected, limit=1e-5):
    """Each tensor is the same, relative to its norm."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= limit * value.norm(), name


def small_gpt(seed=1, **changes):
    shape = dict(block_size=64, vocab_size=VOCABULARY, n_layer=1, n_head=2, n_embd=32, bias=False)
    return GPT(GPTConfig(**shape | changes), seed)


def assert_compiles_once(changes, mode, by_block, backend):
    """A model has the gradients of eager mode, by the same graphs in each step."""
    model = small_gpt(n_layer=2 if by_block else 1, **changes)  # two blocks share their graphs
    expected, routing = train_and_evaluate(model), model.routing
    recompute(model, mode)
    # not fullgraph, which would trace the tolist of experts' counts, for which a GPU waits
    compile_parts(model, by_block, backend=backend)
    assert_same(train_and_evaluate(model, times=2), expected)
    graphs = counters["stats"]["unique_graphs"]
    # one graph for training and one for evaluation; a block that is recomputed and one that is not differ,
    # and the loss of a model that is compiled by block has its own
    assert graphs == (2 if not by_block else 6 if mode == "every:2" else 4)
    assert_same(train_and_evaluate(model), expected)
    if routing is not None:
        assert_same({"routing": model.routing}, {"routing": routing})
    assert counters["stats"]["unique_graphs"] == graphs, "recompiled after the second step"
    assert compile_report() == f"compile: {graphs} graphs, 0 graph breaks"


NANOCHAT, LLAMA = {"arch": "nanochat"}, {"arch": "llama", "n_kv_head": 1}
EXPERTS = {"n_expert": 4, "bias": True}
# (model, recomputation, compiled by block): DDP and one process compile the whole model, all others blocks
COMPILED = [
    ({}, "none", False),
    (NANOCHAT, "selective", True),
    (LLAMA, "none", False),
    (EXPERTS, "every:2", True),
    pytest.param(NANOCHAT | EXPERTS, "none", False, marks=pytest.mark.slow),
    pytest.param(LLAMA | EXPERTS, "selective", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("changes, mode, by_block", COMPILED)
def test_compiled_gradients_are_those_of_eager_mode(chunks, changes, mode, by_block):
    """
    ChunkedLoss is in each of them, Reorder and BlockMatmul in those with experts; see test_a_function.
    """
    assert_compiles_once(changes, mode, by_block, "aot_eager")


def rotate_on_cpu(rope, eps, x):
    return kernels.CPURotate.apply(x, rope, eps)


def rotate_on_gpu(rope, eps, x):
    return kernels.Rotate.apply(x, rope, eps)


def functions():
    """
    {autograd.Function: [(what eager mode calls, what torch.compile is given, inputs)]}. A CPU's kernels are
    left to the compiler: an operator is compiled without them, and has the gradients of the Function.
    """
    torch.manual_seed(0)
    rows, weight, heads = torch.randn(64, 32), torch.randn(VOCABULARY, 32) / 16, torch.randn(2, 160, 2, 8)
    targets = torch.randint(-1, VOCABULARY, (64,))
    order, counts = torch.randperm(64), torch.tensor([10, 0, 30, 24])
    rope = small_gpt(**NANOCHAT, n_embd=16, vocab_size=9, block_size=160).rotary_angles(torch.arange(160))
    eps = 1e-5
    loss, blocks, group = kernels.ChunkedLoss.apply, experts.BlockMatmul.apply, dist.group.WORLD
    reorder = experts.Reorder.apply
    gather, scatter = sequence_collectives.Gather.apply, sequence_collectives.ScatterSum.apply
    norm = kernels.RMSNorm(32, eps, elementwise_affine=False)
    return {
        kernels.ChunkedLoss: [
            (loss, loss, (rows, weight, targets, cap, 2**14, 2**14)) for cap in (0.0, 15.0)
        ],
        experts.Reorder: [
            (reorder, reorder, (rows, order, order.argsort())),
            (reorder, reorder, (rows[:32], order, order.argsort(), 2)),
        ],
        experts.BlockMatmul: [
            (blocks, blocks, (rows, torch.randn(4, 16, 32), *experts.blocks_of_rows(64, counts)))
        ],
        sequence_collectives.Gather: [(gather, gather, (heads, group))],
        sequence_collectives.ScatterSum: [(scatter, scatter, (heads, group))],
        kernels.CPUNormalize: [(lambda x: kernels.CPUNormalize.apply(x, eps, x.dtype), norm, (rows,))],
        kernels.Rotate: [
            (partial(rotate_on_gpu, rope, e), partial(rotate_on_gpu, rope, e), (heads,)) for e in (None, eps)
        ],
        kernels.CPURotate: [
            (partial(rotate_on_cpu, rope, e), partial(kernels.rotate, rope=rope, eps=e), (heads,))
            for e in (None, eps)
        ],
        kernels.CPURelu2: [(kernels.CPURelu2.apply, kernels.relu2, (rows,))],
        kernels.CPUHalfAttention: [
            (kernels.CPUHalfAttention.apply, kernels.causal_attention, (heads, heads + 1, heads - 1, 0.0))
        ],
    }


def gradients_of(function, inputs):
    """The output's version, and output and gradients of a function."""
    inputs = [
        t.clone().requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs
    ]
    y = function(*inputs)
    version = y._version
    (y * torch.linspace(0.1, 1, y.numel()).view_as(y)).sum().backward()
    grads = {str(i): t.grad for i, t in enumerate(inputs) if torch.is_tensor(t) and t.grad is not None}
    return version, {"output": y.detach()} | grads


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_a_function_has_the_gradients_of_eager_mode(one_rank):
    """
    torch.compile of torch 2.11 gives a Function no gradient, without a message, if forward returns what an
    operation in place has returned, or one such as contiguous() that returned its argument (pytorch #180642).
    torch 2.13 gives the gradient: there, only the output's version tells of the first.
    """
    for function, cases in functions().items():
        for eager, compiled, inputs in cases:
            torch._dynamo.reset()
            graph = torch.compile(compiled, backend="aot_eager", fullgraph=True, dynamic=False)
            version, expected = gradients_of(eager, inputs)
            _, actual = gradients_of(graph, inputs)
            assert len(expected) > 1
            assert_same(actual, expected)
            # the collectives write to a view
            assert version == 0 or eager is not compiled or function.__module__.endswith("collectives")


def test_every_function_is_compared(one_rank):
    """Of isogpt/ and model.py. A new one belongs in `functions`."""
    sources = [path.read_text() for path in [REPO / "model.py", *(REPO / "isogpt").glob("**/*.py")]]
    defined = re.findall(r"^class (\w+)\([\w.]*Function\):", "\n".join(sources), re.MULTILINE)
    assert {*defined} == {function.__name__ for function in functions()}


@pytest.mark.parametrize("changes", [{}, NANOCHAT, LLAMA | {"n_expert": 4}])
def test_tokens_are_generated_by_one_graph(changes):
    """With fullgraph, a wait for a value such as tolist() raises. Other samples use the same graph."""
    model, prompts = small_gpt(vocab_size=65, **changes).eval(), torch.arange(15).view(3, 5)
    how = dict(temperature=0.9, top_k=50, top_p=0.9, vocab_size=60)
    expected = [model.generate(prompts, 20, seed=seed, **how) for seed in (1, 2)]
    advance = torch.compile(generation.advance, fullgraph=True, dynamic=False, backend="aot_eager")
    replace_seams(model, advance=advance)
    for seed in (1, 2):
        assert torch.equal(model.generate(prompts, 20, seed=seed, **how), expected[seed - 1])
    assert compile_report() == "compile: 1 graph, 0 graph breaks"


def test_a_step_that_cannot_be_compiled_runs_without(capsys):
    def broken(graph, inputs):
        raise RuntimeError("no ptxas\nmore")

    model, prompt = small_gpt().eval(), torch.arange(5)[None]
    expected = model.generate(prompt, 9, seed=1)
    replace_seams(model, advance=torch.compile(generation.advance, fullgraph=True, backend=broken))
    assert torch.equal(model.generate(prompt, 9, seed=1), expected)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: compile: failed, generating without it (slower): ") and "no ptxas" in line


def test_generation_that_is_not_compiled_says_so(monkeypatch):
    """On a CPU, on several processes, and on a machine without a compiler."""

    def broken(*args, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    compilation.trial_compilation.cache_clear()
    model, meta = small_gpt(), torch.device("meta")
    for device, splits_model in ((torch.device("cpu"), False), (meta, True)):
        assert compile_generation(model, device, splits_model).startswith("compile: off, since ")
    note = compile_generation(model, meta, splits_model=False)
    assert note.endswith(", going on without it (slower): RuntimeError: no compiler")
    assert model.seams.advance is None
    compilation.trial_compilation.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_experts_compile_once_in_16_bits(chunks, dtype):
    """Without waiting for counts: the same graphs for any."""
    model = small_gpt(seed=2, n_expert=4)  # with seed 1, rounding sends a token to another expert
    autocast = torch.autocast("cpu", dtype)
    with autocast:
        expected, counted = train_and_evaluate(model), model.routing
        compile_parts(model, by_block=False, backend="aot_eager")
        actual = train_and_evaluate(model, times=2)
    assert compile_report() == "compile: 2 graphs, 0 graph breaks"
    assert_same(actual, expected, limit=max(0.02, 5 * torch.finfo(dtype).eps))
    torch.testing.assert_close(model.routing, counted, rtol=0.02, atol=1)


@pytest.mark.slow
def test_inductor(chunks):
    """The compiler itself, with recomputation."""
    with torch._inductor.config.patch(compile_threads=1):  # a pool's processes would import torch
        assert_compiles_once({}, "full", True, "inductor")


def test_what_is_said_about_compilation():
    assert compile_report() == ""
    torch._dynamo.config.suppress_errors = True
    torch.compile(lambda x: (torch._dynamo.graph_break(), x + 1)[1], backend="eager")(torch.ones(3))
    assert ", 1 graph break (" in compile_report() and "failed" not in compile_report()

    def broken(graph, inputs):
        raise RuntimeError("no compiler")

    torch.compile(lambda x: x * 2, backend=broken)(torch.ones(3))
    assert ", 1 function failed to compile: TORCH_LOGS=dynamo" in compile_report()
    counters["inductor"]["cudagraph_skips"] = 2
    assert ", 2 without CUDA graphs: TORCH_LOGS=cudagraphs shows why, 1 function failed" in compile_report()


def replayed(graph, inputs):
    """A graph that writes its outputs to the same memory each time, as a CUDA graph does."""
    kept = {}

    def run(*args):
        outputs = graph(*args)
        for i, output in enumerate(outputs):
            if torch.is_tensor(output):
                kept.setdefault(i, torch.empty_like(output)).copy_(output)
        return [kept[i].detach() if i in kept else output for i, output in enumerate(outputs)]

    return make_boxed_func(run)


def accumulated_gradients(model, cuda_graphs):
    """Gradients after two steps of three micro-batches each, as in train.py."""
    model.zero_grad()
    ids = torch.randint(0, VOCABULARY, (6, 2, 64), generator=torch.Generator().manual_seed(0))
    plan = default_plan(model_args=model.describe(), cuda_graphs=cuda_graphs)
    sums = FloatSums(model, model, Mesh(), plan, share_of_whole(6, 0, 1, 2))
    sums.allocate(ids[0], ids[0], nullcontext())
    for step in range(2):
        sums.start_step()
        for x in ids[3 * step : 3 * step + 3]:
            model(x, x, 384.0)[1].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_accumulation_with_graphs_that_reuse_their_memory(chunks):
    """As with cuda_graphs, which keeps the gradients' memory."""
    model = small_gpt()
    expected = accumulated_gradients(model, False)
    replays = aot_autograd(fw_compiler=replayed, bw_compiler=replayed)
    compile_parts(model, by_block=False, backend=replays)
    assert_same(accumulated_gradients(model, True), expected)
    overwritten = accumulated_gradients(model, False)
    assert not any(torch.allclose(overwritten[name], grad, rtol=0.1) for name, grad in expected.items())


def test_the_masks_of_context_parallelism_on_a_gpu_are_in_the_graph(chunks, monkeypatch):
    """A rank with both chunks of the sequence; PyTorch's GPU masks also work on a CPU."""
    monkeypatch.setattr(context, "Gather", SimpleNamespace(apply=lambda keys, group: keys))
    model = small_gpt()
    expected = train_and_evaluate(model)
    own = [(c, context.last_rows_mask(32, (c + 1) * 32, torch.device("cuda"))) for c in range(2)]
    assert None not in (mask for _, mask in own)
    ranks = context.ContextRanks(None, torch.arange(64), [0, 1], own)
    replace_seams(model, attention=partial(context.context_attention, ranks))
    compile_parts(model, by_block=False, backend="aot_eager", fullgraph=True)
    assert_same(train_and_evaluate(model, times=2), expected)
    assert compile_report() == "compile: 2 graphs, 0 graph breaks"


# model, settings of a layout: one of each
LAYOUTS = [
    ({"bias": True, "n_embd": 128}, {}),  # DDP, whose buckets divide the graph
    (LLAMA | EXPERTS, {"zero": 2, "activation_checkpointing": "selective"}),
    (NANOCHAT, {"zero": 3, "activation_checkpointing": "every:2"}),
    (LLAMA | {"n_kv_head": 2}, {"tp": 2, "activation_checkpointing": "full"}),
    (NANOCHAT, {"cp": 2}),
    (EXPERTS, {"ep": 2}),
    ({"n_layer": 4}, {"pp": 2, "pp_schedule": "zero_bubble"}),
    ({}, {"exact": True}),
]


@pytest.mark.slow
def test_compiled_gradients_of_each_layout_are_those_of_eager_mode(zygote, tmp_path):
    """Collectives are in the graphs: Gather and ScatterSum with tp and cp. The loss is computed in chunks."""
    path = tmp_path / "layouts.json"
    path.write_text(json.dumps(LAYOUTS))
    zygote.start([path], tmp_path, 2, "tests/compiled_layouts.py").wait(900)
    for rank in range(2):
        found = json.loads(path.with_suffix(f".rank{rank}").read_text())
        for layout, (difference, name, report) in zip(LAYOUTS, found, strict=True):
            assert difference <= 1e-5, (layout, name)
            assert report.startswith("compile: ") and "failed" not in report, layout
            if "tp" in layout[1]:  # by block: all blocks share it
                assert report == "compile: 1 graph, 0 graph breaks"
