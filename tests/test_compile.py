"""torch.compile on a CPU, where train.py does not use it: gradients, graphs, and the line about them."""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from edits import edited_train
from functorch.compile import make_boxed_func
from runs import REPO, default_plan
from test_layouts import args_of, compare
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from isogpt.nn import generation, kernels
from isogpt.parallel import compilation, parallelize
from isogpt.parallel.attach import replace_seams
from isogpt.parallel.compilation import compile_generation, compile_parts, compile_report
from isogpt.parallel.gradients import make_sums
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.recompute import recompute
from isogpt.parallel.sequence_collectives import Gather, ScatterSum
from isogpt.parallel.shares import share_of_whole
from model import GPT, GPTConfig


@pytest.fixture(autouse=True)
def dynamo():
    """Nothing compiled or tried yet, and an error is an error; a pool's processes would import torch."""
    forget()  # what tests of other files have compiled
    with torch._dynamo.config.patch(suppress_errors=False), torch._inductor.config.patch(compile_threads=1):
        yield
    forget()


def forget():
    torch._dynamo.reset()
    counters.clear()
    compilation.trial_compilation.cache_clear()


CACHE = """
import os
import tempfile
tempfile.tempdir = None  # the zygote's
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
if "CHOSEN" in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["CHOSEN"]
import isogpt.launch.torch_import
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir())
"""


def test_compiled_functions_are_kept_where_nobody_else_can_write(zygote, tmp_path):
    """/tmp/torchinductor_USER can be anybody's."""
    (tmp_path / "cache.py").write_text(f"import sys\nsys.path.insert(0, {str(REPO)!r})\n{CACHE}")
    own = f"{tmp_path}/own"
    for env in ({"HOME": str(tmp_path)}, {"HOME": str(tmp_path), "CHOSEN": own}, {"HOME": "missing"}):
        env["TMPDIR"] = str(tmp_path)
        folder = zygote.start([], tmp_path, script="cache.py", repo=tmp_path, env=env).wait().text().strip()
        default = f"{tmp_path}/.cache/torchinductor"
        if env["HOME"] == "missing":  # a new folder
            default = f"{tmp_path}/torchinductor-[0-9a-f]{{16}}"
        assert re.fullmatch(env.get("CHOSEN", default), folder)
        assert not Path(folder).stat().st_mode & 0o022


def test_the_choice_of_attention_on_a_gpu_is_in_the_graph():
    def attend(q):
        with kernels.attention_backends(0.1, torch.device("cuda")):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True)

    q = torch.randn(1, 2, 8, 8, requires_grad=True)
    torch.compile(attend, backend="aot_eager", fullgraph=True)(q).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and q.grad is not None


@pytest.mark.parametrize("pp, schedule", [(2, "zbv"), (2, "zero_bubble"), (2, "1f1b"), (1, "zbv")])
def test_zero_bubble_schedules_are_compiled_for_two_backward_passes(monkeypatch, pp, schedule):
    """Otherwise the first step on a GPU ends with: compiled with non-empty donated buffers."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = small_gpt(n_layer=4)
    plan = default_plan(pp=pp, pp_schedule=schedule, compile=True, model_args=model.describe())
    with functorch_config.patch(donated_buffer=True):
        parallelize.divide_model(model, plan, Mesh(pp=pp), torch.device("meta"))
        assert functorch_config.donated_buffer == (pp == 1 or schedule == "1f1b")


VOCABULARY = 512


def train_and_evaluate(model, times=1):
    """
    As in train.py, an evaluation with fewer rows before each step; returns loss, gradients and the routers'
    sums of the last step.
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
    found = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    return found if model.routing is None else found | {"routing": model.routing}


def assert_same(actual, expected, limit=1e-5):
    """Each tensor is the same, relative to its norm."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= limit * value.norm(), name


def small_gpt(seed=1, **changes):
    shape = dict(block_size=64, vocab_size=VOCABULARY, n_layer=1, n_head=2, n_embd=32, bias=False)
    return GPT(GPTConfig(**shape | changes), seed)


NANOCHAT, LLAMA = {"arch": "nanochat"}, {"arch": "llama", "n_kv_head": 1}
EXPERTS = {"n_expert": 4, "bias": True}
# model, recomputation, compiled by block (DDP and one process compile the whole model), backend
COMPILED = [
    ({}, "none", False, "aot_eager"),
    (NANOCHAT, "selective", True, "aot_eager"),
    (LLAMA, "none", False, "aot_eager"),
    (EXPERTS, "every:2", True, "aot_eager"),
    pytest.param(NANOCHAT | EXPERTS, "none", False, "aot_eager", marks=pytest.mark.slow),
    pytest.param(LLAMA | EXPERTS, "selective", False, "aot_eager", marks=pytest.mark.slow),
    pytest.param({}, "full", True, "inductor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("changes, mode, by_block, backend", COMPILED)
def test_compiled_gradients_are_those_of_eager_mode(changes, mode, by_block, backend):
    """By the same graphs in each step."""
    model = small_gpt(n_layer=2 if by_block else 1, **changes)  # two blocks share their graphs
    expected = train_and_evaluate(model)
    recompute(model, mode)
    assert_same(train_and_evaluate(model), expected)
    # not fullgraph, which would trace the tolist of experts' counts, for which a GPU waits
    compile_parts(model, by_block, backend=backend)
    assert_same(train_and_evaluate(model, times=2), expected)
    graphs = counters["stats"]["unique_graphs"]
    # one graph for training and one for evaluation; a block that is recomputed and one that is not differ,
    # and the loss of a model that is compiled by block has its own
    assert graphs == (2 if not by_block else 6 if mode == "every:2" else 4)
    assert_same(train_and_evaluate(model), expected)
    assert counters["stats"]["unique_graphs"] == graphs, "recompiled after the second step"
    assert compile_report() == f"compile: {graphs} graphs, 0 graph breaks"


def test_dropout_divides_no_graph():
    """On a GPU, what is beside the graph would be slow, and nothing else would say so."""
    model = small_gpt(dropout=0.1)
    compile_parts(model, by_block=False, backend="aot_eager")
    train_and_evaluate(model, times=2)
    assert compile_report() == "compile: 2 graphs, 0 graph breaks"


def test_a_function_has_the_gradients_of_eager_mode():
    """
    torch.compile of torch 2.11 gives a Function no gradient, without a message, if forward returns what an
    operation in place has returned, or one such as contiguous() that returned its argument (pytorch #180642).
    These are not in the models above: the loss in chunks, and collectives.
    """
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    heads, rows, weight = torch.randn(2, 160, 2, 8), torch.randn(64, 32), torch.randn(VOCABULARY, 32) / 16
    chunks = [(rows, weight, torch.randint(-1, VOCABULARY, (64,)), cap, 2**14, 2**14) for cap in (0.0, 15.0)]
    cases = [(kernels.ChunkedLoss, inputs) for inputs in chunks]
    cases += [(f, (heads, dist.group.WORLD)) for f in (Gather, ScatterSum)]
    for function, (x, *others) in cases:
        graph = torch.compile(function.apply, backend="aot_eager", fullgraph=True, dynamic=False)
        results = []
        for call in (function.apply, graph):
            leaf = x.clone().requires_grad_()
            y = call(leaf, *others)
            (y * torch.linspace(0.1, 1, y.numel()).view_as(y)).sum().backward()
            results.append({"output": y.detach(), "gradient": leaf.grad})
        assert_same(*results)
    dist.destroy_process_group()


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
    model, meta = small_gpt(), torch.device("meta")
    for device, splits_model in ((torch.device("cpu"), False), (meta, True)):
        assert compile_generation(model, device, splits_model).startswith("compile: off, since ")
    note = compile_generation(model, meta, splits_model=False)
    assert note.endswith(", going on without it (slower): RuntimeError: no compiler")
    assert model.seams.advance is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_experts_compile_once_in_16_bits(dtype):
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
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    sums = make_sums(model, model, Mesh(), plan, share_of_whole(6, 0, 1, 2), scaler)
    sums.allocate(ids[0], ids[0], nullcontext())
    for step in range(2):
        sums.start_step()
        for x in ids[3 * step : 3 * step + 3]:
            model(x, x, 384.0)[1].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_accumulation_with_graphs_that_reuse_their_memory():
    """As with cuda_graphs, which keeps the gradients' memory."""
    model = small_gpt()
    expected = accumulated_gradients(model, False)
    replays = aot_autograd(fw_compiler=replayed, bw_compiler=replayed)
    compile_parts(model, by_block=False, backend=replays)
    assert_same(accumulated_gradients(model, True), expected)
    overwritten = accumulated_gradients(model, False)
    assert not any(torch.allclose(overwritten[name], grad, rtol=0.1) for name, grad in expected.items())


# model, settings of a layout of two processes: one of each
LAYOUTS = [
    ("gpt2-bias", "--n_layer=2 --n_embd=128"),  # DDP, whose buckets divide the graph
    ("nanochat", "--n_layer=2 --zero=3 --activation_checkpointing=every:2"),
    ("llama", "--n_layer=2 --tp=2 --activation_checkpointing=full"),
    ("nanochat", "--n_layer=2 --cp=2"),
    ("gpt2-moe", "--n_layer=2 --ep=2"),
    ("gpt2", "--pp=2 --pp_schedule=zero_bubble"),
    ("gpt2", "--n_layer=2 --exact=True --zero=3"),
]
# what train.py compiles on a GPU, with a compiler that needs none
COMPILE = """
from dataclasses import replace
from functools import partial
from isogpt.parallel import compilation
torch.compile = partial(torch.compile, backend="aot_eager")
compilation.compile_model(raw_model, torch.device("meta"), replace(plan, compile=True), mesh)
autocast ="""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "flags"), LAYOUTS)
def test_a_compiled_run_of_each_layout_has_the_curve_of_one_process(zygote, work, model, flags):
    args = [*args_of(model), "--max_iters=1", "--eval_iters=1"]
    args += [flag for flag in flags.split() if flag.startswith("--n_")]
    zygote.train([*args, "--out_dir=one"], work)
    edited_train(work, ("\nautocast =", COMPILE), ("bucket_cap_mb=25", "bucket_cap_mb=1"))
    text = zygote.train([*args, *flags.split(), "--out_dir=compiled"], work, 2, repo=work).text()
    compare(work / "one", work / "compiled")
    assert re.search(r"^compile: \d+ graph", text, re.M) and "failed" not in text
    assert "--tp" not in flags or ", 0 graph breaks" in text, "collectives are in the graphs"
