"""torch.compile on a CPU, where train.py does not use it: graphs, recompilations, and the line about them."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from functorch.compile import make_boxed_func
from runs import REPO, default_plan
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from isogpt.nn import experts, generation, kernels
from isogpt.parallel import compilation, context
from isogpt.parallel.attach import replace_seams
from isogpt.parallel.compilation import compile_generation, compile_parts, compile_report
from isogpt.parallel.data_parallel import allocate_gradients
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.recompute import recompute
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


def test_buckets_of_any_size():
    """DDP's buckets divide the graph of torch.compile, which fails where they are below 1 MiB."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = GPT(GPTConfig(block_size=64, vocab_size=96, n_layer=1, n_head=1, n_embd=16))
        model.compile(dynamic=False, backend="eager")
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=True)
        x = torch.zeros(2, 64, dtype=torch.long)
        buckets = []
        assert allocate_gradients(ddp, False, x, x, 128.0, nullcontext(), passes=0)

        def reduce(state, bucket):
            buckets.append(bucket.index())
            return allreduce_hook(state, bucket)

        ddp.register_comm_hook(dist.group.WORLD, reduce)
        for _ in range(2):  # after the first backward pass, DDP makes the buckets that are used from then on
            buckets.clear()
            ddp(x, x, 128.0)[1].backward()
        assert counters["stats"]["unique_graphs"] and len(buckets) > 1
    finally:
        dist.destroy_process_group()


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


def train_and_evaluate(model, vocab_size, times=1):
    """
    As in train.py, an evaluation with fewer rows before each step; returns loss and gradients of the last
    step.
    """
    x = torch.randint(0, vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    for _ in range(times):
        model.eval()
        with torch.no_grad():
            model(x[:3], x[:3], 1.0)
        model.train()
        model.zero_grad()
        _, loss = model(x, x, 512.0)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def assert_compiles_once(mode, by_block, vocab_size, backend):
    model = GPT(
        GPTConfig(block_size=64, vocab_size=vocab_size, n_layer=2, n_head=2, n_embd=32, bias=False), seed=1
    )
    expected = train_and_evaluate(model, vocab_size)
    recompute(model, mode)
    compile_parts(model, by_block, backend=backend, fullgraph=True)
    train_and_evaluate(model, vocab_size, times=2)
    graphs = counters["stats"]["unique_graphs"]
    # one graph for training and one for evaluation; a block that is recomputed and one that is not differ,
    # and the loss of a model that is compiled by block has its own
    assert graphs == (2 if not by_block else 6 if mode == "every:2" else 4)
    actual = train_and_evaluate(model, vocab_size, times=2)
    assert counters["stats"]["unique_graphs"] == graphs, "recompiled after the second step"
    assert compile_report() == f"compile: {graphs} graphs, 0 graph breaks"
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


MODES = [
    ("none", False),
    ("none", True),
    ("full", True),
    ("selective", True),
    ("every:2", True),
    ("selective", False),
]


@pytest.mark.parametrize("mode, by_block", MODES)
def test_a_graph_for_training_and_one_for_evaluation(mode, by_block):
    assert_compiles_once(mode, by_block, 65, "aot_eager")


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"arch": "nanochat"}, {"arch": "llama", "n_kv_head": 1}, {"arch": "nanochat", "n_expert": 4}],
)
def test_compiled_gradients_are_those_of_eager_mode(monkeypatch, changes, by_block):
    """Of each architecture, with a loss in chunks: every autograd.Function of a GPU's step is compiled."""
    monkeypatch.setattr(kernels, "logits_at_once", lambda *_: (64 * 100, 64 * 128, 64 * 64))
    x = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))
    gradients = []
    for is_compiled in (False, True):
        shape = dict(block_size=32, vocab_size=512, n_layer=2, n_head=2, n_embd=32, bias=False)
        model = GPT(GPTConfig(**shape, **changes), seed=1)
        model.reset_routing(torch.device("cpu"))
        if is_compiled:
            compile_parts(model, by_block, backend="aot_eager", fullgraph=True)
        model(x, x, 64.0)[1].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    eager, compiled = gradients
    for name, grad in eager.items():
        assert (compiled[name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_function_changes_its_output_in_place(dtype):
    """torch.compile of torch 2.11 gives such a Function no gradient, without a message (pytorch #180642)."""
    x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(16, 8, dtype=dtype, requires_grad=True)
    order = torch.randperm(6)
    stacked, counts = weight.view(2, 8, 8), torch.tensor([2, 4])
    outputs = [
        kernels.ChunkedLoss.apply(x, weight, torch.arange(6), 0.0, 32, 16),
        experts.Reorder.apply(x, order, order.argsort()),
        experts.BlockMatmul.apply(x, stacked, *experts.blocks_of_rows(6, counts)),
    ]
    assert [output._version for output in outputs] == [0, 0, 0]


MODELS = [dict(), dict(arch="nanochat"), dict(arch="llama", n_kv_head=1), dict(arch="llama", n_expert=4)]


@pytest.mark.parametrize("changes", MODELS)
def test_tokens_are_generated_by_one_graph(changes):
    """With fullgraph, a wait for a value such as tolist() raises. Other samples use the same graph."""
    shape = dict(block_size=32, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
    model, prompts = GPT(GPTConfig(**shape | changes), seed=1).eval(), torch.arange(15).view(3, 5)
    how = dict(temperature=0.9, top_k=50, top_p=0.9, vocab_size=60)
    expected = [model.generate(prompts, 20, seed=seed, **how) for seed in (1, 2)]
    advance = torch.compile(generation.advance, fullgraph=True, dynamic=False, backend="aot_eager")
    replace_seams(model, advance=advance)
    for seed in (1, 2):
        assert torch.equal(model.generate(prompts, 20, seed=seed, **how), expected[seed - 1])
    assert compile_report() == "compile: 1 graphs, 0 graph breaks"


def test_a_step_that_cannot_be_compiled_runs_without(capsys):
    def broken(graph, inputs):
        raise RuntimeError("no ptxas\nmore")

    shape = dict(block_size=32, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
    model, prompt = GPT(GPTConfig(**shape), seed=1).eval(), torch.arange(5)[None]
    expected = model.generate(prompt, 9, seed=1)
    replace_seams(model, advance=torch.compile(generation.advance, fullgraph=True, backend=broken))
    assert torch.equal(model.generate(prompt, 9, seed=1), expected)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: compile: failed, generating without it (slower): ") and "no ptxas" in line


@pytest.mark.parametrize("device, splits_model", [("cpu", False), ("meta", True)])
def test_generation_that_is_not_compiled_says_so(device, splits_model):
    model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=1, n_embd=8))
    assert compile_generation(model, torch.device(device), splits_model).startswith("compile: off, since ")
    assert model.seams.advance is None


def test_generation_on_a_machine_without_a_compiler(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no compiler")

    model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=1, n_embd=8))
    monkeypatch.setattr(torch, "compile", broken)
    note = compile_generation(model, torch.device("meta"), splits_model=False)
    assert note.endswith(", generating without it (slower): RuntimeError: no compiler")
    assert model.seams.advance is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_compile_once_and_without_waiting_for_counts(dtype):
    """A graph for training and a graph for evaluation, for any counts of the routers and any dtype."""
    shape = dict(block_size=64, vocab_size=65, n_layer=2, n_head=2, n_embd=32, bias=False)
    model = GPT(GPTConfig(n_expert=4, n_expert_active=2, **shape), seed=1)
    model.reset_routing(torch.device("cpu"))
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with autocast:
        expected, counted = train_and_evaluate(model, 65, times=3), model.routing
    # fullgraph would trace tolist, which waits for a GPU
    compile_parts(model, by_block=False, backend="aot_eager")
    for _ in range(2):
        model.reset_routing(torch.device("cpu"))
        with autocast:
            actual = train_and_evaluate(model, 65, times=3)
    assert compile_report() == "compile: 2 graphs, 0 graph breaks"
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 100)
    torch.testing.assert_close(model.routing, counted, rtol=tolerance, atol=1)


INDUCTOR = [("none", True, 2**17), ("full", True, 65), ("selective", True, 65)]


@pytest.mark.parametrize(
    "mode, by_block, vocab_size",
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in INDUCTOR),
        pytest.param("none", False, 2**17, marks=pytest.mark.extra),
    ],
)
def test_inductor(mode, by_block, vocab_size):
    """The loss of the first two is computed in chunks."""
    assert_compiles_once(mode, by_block, vocab_size, "inductor")


def test_what_is_said_about_compilation():
    assert compile_report() == ""
    torch._dynamo.config.suppress_errors = True
    torch.compile(lambda x: (torch._dynamo.graph_break(), x + 1)[1], backend="eager")(torch.ones(3))
    assert ", 1 graph breaks (" in compile_report() and "failed" not in compile_report()

    def broken(graph, inputs):
        raise RuntimeError("no compiler")

    torch.compile(lambda x: x * 2, backend=broken)(torch.ones(3))
    assert "1 functions failed and run uncompiled: TORCH_LOGS=dynamo" in compile_report()
    counters["inductor"]["cudagraph_skips"] = 2
    assert ", 2 without CUDA graphs: TORCH_LOGS=cudagraphs shows why, 1 functions failed" in compile_report()


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


def accumulated_gradients(cuda_graphs, backend):
    """Gradients after two steps of three micro-batches each, as in train.py."""
    model = GPT(GPTConfig(block_size=64, vocab_size=65, n_layer=1, n_head=2, n_embd=32, bias=False), seed=1)
    compile_parts(model, by_block=False, backend=backend)
    ids = torch.randint(0, 65, (6, 2, 64), generator=torch.Generator().manual_seed(0))
    keeps_gradients = allocate_gradients(model, cuda_graphs, ids[0], ids[0], 384.0, nullcontext())
    assert keeps_gradients == cuda_graphs
    for step in range(2):
        model.zero_grad(set_to_none=not keeps_gradients)
        for x in ids[3 * step : 3 * step + 3]:
            model(x, x, 384.0)[1].backward()
    return [p.grad for p in model.parameters()]


def test_accumulation_with_graphs_that_reuse_their_memory():
    expected = accumulated_gradients(False, "eager")
    replays = aot_autograd(fw_compiler=replayed, bw_compiler=replayed)
    torch.testing.assert_close(accumulated_gradients(True, replays), expected, rtol=1e-4, atol=1e-6)
    overwritten = accumulated_gradients(False, replays)
    assert not any(torch.allclose(*pair, rtol=0.1) for pair in zip(overwritten, expected, strict=True))


def test_the_masks_of_context_parallelism_on_a_gpu_are_in_the_graph(monkeypatch):
    """A rank with both chunks of the sequence; PyTorch's GPU masks also work on a CPU."""
    monkeypatch.setattr(context, "Gather", SimpleNamespace(apply=lambda keys, group: keys))
    model = GPT(GPTConfig(block_size=64, vocab_size=65, n_layer=2, n_head=2, n_embd=32, bias=False), seed=1)
    expected = train_and_evaluate(model, 65)
    own = [(c, context.last_rows_mask(32, (c + 1) * 32, torch.device("cuda"))) for c in range(2)]
    assert None not in (mask for _, mask in own)
    ranks = context.ContextRanks(None, torch.arange(64), [0, 1], own)
    replace_seams(model, attention=partial(context.context_attention, ranks))
    compile_parts(model, by_block=False, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(train_and_evaluate(model, 65, times=2), expected, rtol=1e-4, atol=1e-6)
    assert compile_report() == "compile: 2 graphs, 0 graph breaks"


LAYOUT = """
import os, sys
sys.path.insert(0, os.environ["REPO"])
import torch
import torch.distributed as dist
from isogpt.parallel import parallelize
from isogpt.parallel.compilation import compile_parts
from isogpt.parallel.compilation import compile_report
from isogpt.parallel.context import parallelize_context
from isogpt.parallel.mesh import Mesh
from model import GPT, GPTConfig
dist.init_process_group("gloo")
mesh = Mesh(dist.get_rank(), **{sys.argv[1]: 2})
mesh.connect("cpu")
found = []
for is_compiled in (False, True):
    with torch.device("meta"):
        shape = dict(n_layer=2, n_head=4, n_embd=32, block_size=32, vocab_size=65, bias=False)
        experts = dict(n_expert=4, n_expert_active=2) if mesh.ep > 1 else {}
        model = GPT(GPTConfig(arch=sys.argv[2], **shape, **experts))
    splits = parallelize.split_model(model, mesh, "1f1b", torch.device("cpu"))
    if mesh.cp > 1:
        parallelize_context(model, mesh, torch.device("cpu"))
    if is_compiled:
        compile_parts(model, mesh.splits_model, backend="aot_eager")
    parallelize.materialize(model, torch.device("cpu"), splits)
    parallelize.init_weights(model, 1)
    for step in range(3):
        ids = torch.randint(65, (2, 32), generator=torch.Generator().manual_seed(step))
        ids = ids[:, mesh.own_positions(32)]
        model.zero_grad()
        loss = model(ids.view(2, -1), ids.view(2, -1), 64.0)[1]
        loss.backward()
    found.append([loss.detach(), *(p.grad for p in model.parameters())])
torch.testing.assert_close(*found)
print(compile_report(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "arch", "said"),
    [
        ("tp", "gpt2", "compile: 1 graphs, 0 graph breaks\n"),  # by block: all blocks share it
        ("tp", "llama", "compile: 1 graphs, 0 graph breaks\n"),
        ("cp", "nanochat", "compile: 1 graphs, 0 graph breaks\n"),  # the whole model
        # what is before and after the experts; the number of their rows is different in each step
        (
            "ep",
            "gpt2",
            "compile: 5 graphs, 4 graph breaks (Skip calling `torch.compiler.disable()`d function",
        ),
    ],
)
def test_the_graphs_of_each_layout(zygote, tmp_path, way, arch, said):
    """Collectives are in them, and no step compiles more."""
    (tmp_path / "layout.py").write_text(LAYOUT)
    run = zygote.start([way, arch], tmp_path, 2, "layout.py", repo=tmp_path, env={"REPO": str(REPO)}).wait()
    assert run.text().count(said) == 2, run.text()[-2000:]
