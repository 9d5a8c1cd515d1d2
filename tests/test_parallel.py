"""
Tensor, pipeline, context and expert parallelism: one curve, checkpoints for any layout, the same gradients
and the same text. measure/random_layouts.py draws more layouts; faults and messages are in test_split.py.
"""

import shutil

import pytest
import torch
from runs import REPO, TINY, column
from test_parity import same
from test_zero import tensors_of

ONE = ["--gradient_accumulation_steps=3", "--batch_size=8", "--n_layer=4", "--n_head=4", "--max_iters=19"]
ONE += ["--eval_interval=10", "--keep_last=0", "--check_ranks_interval=5", "--muon_lr=0.005"]
NANOCHAT = ["--arch=nanochat", "--n_kv_head=2", "--optimizer=muon"]
LLAMA = ["--arch=llama", "--n_kv_head=2", "--optimizer=muon"]
MODELS = {
    # at step 18 with the default seed, a change of the weights by 1e-7 moves the gradient norm by 2e-4
    "gpt2": ["--seed=1"],
    "gpt2-bias": ["--bias=True"],
    "nanochat": NANOCHAT,
    "llama": LLAMA,
    # with the default seed, rounding moves the last norm by 15% from float32's, also on one process
    "bfloat16": ["--dtype=bfloat16", "--seed=1"],
    "gpt2-moe": ["--n_expert=4", "--bias=True"],
    "nanochat-moe": ["--n_expert=4", *NANOCHAT, "--n_layer=2", "--n_hidden=51"],
    "llama-moe": ["--n_expert=4", *LLAMA, "--n_layer=2", "--n_expert_active=3", "--balance_loss=0.1"],
}
FSDP = "--zero=3"
# (processes, flags); all read 24 sequences per step
WAYS = {
    "one": (1, []),
    "ddp3": (3, []),
    "tp2": (2, ["--tp=2"]),
    "cp2": (2, ["--cp=2"]),
    "pp2": (2, ["--pp=2"]),
    "pp2-zbv": (2, ["--pp=2", "--pp_schedule=zbv"]),
    "tp2-pp2": (4, ["--tp=2", "--pp=2"]),
    "tp2-pp2-zbv": (4, ["--tp=2", "--pp=2", "--pp_schedule=zbv"]),
    "tp2-cp2": (4, ["--tp=2", "--cp=2"]),
    "ddp-tp2": (4, ["--tp=2"]),
    "zero1-tp2": (4, ["--zero=1", "--tp=2"]),
    "fsdp-cp2": (4, [FSDP, "--cp=2", "--activation_checkpointing=selective"]),
    "fsdp-tp2-pp2": (8, [FSDP, "--tp=2", "--pp=2"]),
    "hsdp-tp2": (8, [FSDP, "--dp_replicate=2", "--tp=2"]),
    "ep2": (2, ["--ep=2"]),
    "ep2-zero1": (4, ["--ep=2", "--zero=1"]),
    "ep2-fsdp": (4, ["--ep=2", FSDP]),
    "ep2-hsdp": (8, ["--ep=2", FSDP, "--dp_replicate=2", "--cpu_offload=True"]),
    "ep2-tp2": (4, ["--ep=2", "--tp=2"]),
    "ep2-pp2-fsdp": (8, ["--ep=2", "--pp=2", FSDP]),
}


def slow_after(n, cases):
    """All but the first n cases with the slow tests."""
    return [*cases[:n], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[n:])]


def args_of(model, way):
    """The settings of a run."""
    return [*ONE, *MODELS[model], *WAYS[way][1]]


def train_once(zygote, cwd, model, way="one"):
    """The folder of a run of 20 steps with checkpoints at steps 10 and 20, made when first asked for."""
    out = cwd / f"{model}-{way}"
    if not out.exists():
        zygote.train([*args_of(model, way), f"--out_dir={out}"], cwd, WAYS[way][0])
    return out


@pytest.fixture(scope="module")
def ran(zygote, shared_work):
    """`train_once` in the folder of this file's tests."""

    def run(model, way="one"):
        return train_once(zygote, shared_work, model, way)

    return run


ROUTING = {
    "expert_tokens_min": dict(absolute=4.01),
    "expert_tokens_mean": dict(relative=1e-6),
    "expert_tokens_max": dict(absolute=4.01),
    "router_entropy": dict(absolute=2e-5),
    "auxiliary_loss": dict(relative=2e-3),
}


def compare_routing(one, other):
    """
    The routers' numbers of two runs. Rounding can change the choice of a token whose second and third expert
    are about equally likely, one of 768 in each layer.
    """
    for key, tolerance in ROUTING.items():
        same(column(one, key), column(other, key), **tolerance)
    assert column(one, "dead_experts") == column(other, "dead_experts")
    assert not any(column(other, "dropped_tokens").values())


def compare(one, other, model, first_step=0):
    """Losses, gradient norms, validation losses and the routers' numbers of two runs."""
    # bfloat16 has 8 bits: sums in a different order differ by up to 2**-8 of a loss of 4
    loss, norm = (5e-3, 0.05) if model == "bfloat16" else (2e-5, 1e-4)
    tolerances = {
        "loss": dict(absolute=loss),
        "grad_norm": dict(relative=norm),
        "val_loss": dict(absolute=loss),
    }
    for key, tolerance in tolerances.items():
        a, b = ({s: v for s, v in column(out, key).items() if s >= first_step} for out in (one, other))
        same(a, b, **tolerance)
    assert len(column(other, "loss")) == 20
    if "moe" in model and not first_step:
        compare_routing(one, other)


# whole runs of train.py; test_layout_check.py compares a step of many more layouts
CURVES = [("gpt2", "pp2"), ("llama", "cp2"), ("gpt2-moe", "ep2"), ("nanochat", "tp2")]
CURVES += [("gpt2", "fsdp-tp2-pp2"), ("gpt2", "tp2-pp2-zbv"), ("nanochat", "fsdp-cp2"), ("bfloat16", "tp2")]
CURVES += [("gpt2-moe", "ep2-hsdp"), ("llama-moe", "ep2-pp2-fsdp")]


@pytest.mark.parametrize(("model", "way"), slow_after(3, CURVES))
def test_every_layout_has_the_curve_of_one_process(ran, model, way):
    compare(ran(model), ran(model, way), model)


RESUMES = [("gpt2", "one", "tp2"), ("gpt2-moe", "ep2", "one"), ("gpt2", "tp2-pp2-zbv", "one")]
RESUMES += [
    ("gpt2", "cp2", "zero1-tp2"),
    ("nanochat", "fsdp-cp2", "one"),
    ("gpt2-moe", "ep2-fsdp", "ep2-tp2"),
]


@pytest.mark.parametrize(("model", "before", "after"), slow_after(2, RESUMES))
def test_a_checkpoint_resumes_on_a_different_layout(zygote, shared_work, ran, model, before, after):
    """
    Step 10's: ckpt.pt of one process and cp, else shards. Its number of experts applies, not the settings'.
    """
    out = shared_work / f"{model}-{before}-to-{after}"
    shutil.copytree(ran(model, before), out, symlinks=True)
    assert (out / "step_00000010/ckpt.pt").exists() == (before in ("one", "cp2"))
    args = [
        *args_of(model, after),
        "--n_expert=0",
        "--init_from=resume",
        "--resume_step=10",
        f"--out_dir={out}",
    ]
    zygote.train(args, shared_work, WAYS[after][0])
    compare(ran(model), out, model, first_step=10)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "way"), [("gpt2", "pp2"), ("gpt2", "tp2"), ("nanochat-moe", "ep2-zero1")])
def test_a_resume_on_the_same_layout_has_the_same_bits(zygote, shared_work, model, way):
    """With dropout, eight steps: losses, weights, and the optimizer's state."""
    args, nproc = [*args_of(model, way), "--dropout=0.1", "--max_iters=7"], WAYS[way][0]
    straight, stopped = shared_work / f"straight-{way}", shared_work / f"stopped-{way}"
    zygote.train([*args, "--save_interval=4", f"--out_dir={straight}"], shared_work, nproc)
    shutil.copytree(straight, stopped, symlinks=True)
    shutil.rmtree(stopped / "step_00000008")
    zygote.train([*args, "--init_from=resume", f"--out_dir={stopped}"], shared_work, nproc)
    assert len(column(stopped, "loss")) == 8 and column(straight, "loss") == column(stopped, "loss")
    a, b = tensors_of(straight), tensors_of(stopped)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.slow
def test_export_puts_the_parts_together(zygote, shared_work, ran):
    """
    Shards of tp x pp hold what export.py puts together: nanoGPT's ckpt.pt, near the weights of one process.
    """
    out = shared_work / "exported"
    shutil.copytree(ran("gpt2", "tp2-pp2-zbv"), out, symlinks=True)
    zygote.start([out, "--to=ckpt.pt"], shared_work, script="export.py").wait()
    weights = torch.load(out / "ckpt.pt", weights_only=True)["model"]
    shards = tensors_of(ran("gpt2", "tp2-pp2-zbv"))
    one = torch.load(ran("gpt2") / "step_00000020/ckpt.pt", weights_only=True)["model"]
    assert weights.keys() == one.keys()
    for name, value in weights.items():
        assert torch.equal(value, shards[name.replace("lm_head.weight", "transformer.wte.weight")])
        torch.testing.assert_close(value, one[name], atol=1e-4, rtol=1e-3)


SAMPLES = [("llama", "one", "tp2-pp2"), ("gpt2-moe", "ep2-fsdp", "pp2"), ("gpt2-moe", "one", "tp2")]


@pytest.mark.parametrize(("model", "trained", "way"), slow_after(1, SAMPLES))
def test_the_text_is_that_of_one_process(zygote, shared_work, ran, model, trained, way):
    """Beyond the context of 32 tokens, for the most likely tokens and for random ones."""
    nproc, flags = WAYS[way]
    for temperature in (0, 1):
        args = [f"--out_dir={ran(model, trained)}", "--device=cpu", "--dtype=float32", "--start=A"]
        args += ["--max_new_tokens=40", "--num_samples=3", f"--temperature={temperature}"]
        one = zygote.start(args, shared_work, script="sample.py").wait().samples()
        run = zygote.start([*args, *flags], shared_work, nproc, script="sample.py").wait()
        assert run.samples() == one and one.count("A") >= 3


# ------------------------------------------------------------------------------------------------------------
# what a rank holds

# train.py with what this process holds: sizes of parameters and of saved activations
PROBE = """
import os, sys
sys.path.insert(0, os.environ["REPO"])
import torch, model
from isogpt.launch import together
from isogpt.parallel import gradients
from isogpt.parallel import local_parts
complete, forward = gradients.complete_gradients, model.GPT.forward
saved = {}
def counted(self, *args):
    has_dtensors = any(hasattr(p, "full_tensor") for p in self.parameters())
    if not self.training or has_dtensors or self.config.n_expert:
        return forward(self, *args)
    saved.clear()
    weights = {p.untyped_storage().data_ptr() for p in self.parameters()}
    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return x.detach()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return forward(self, *args)
def probed(gpt, *args):
    complete(gpt, *args)
    sizes = sum(local_parts.local(p).numel() for p in gpt.parameters()), sum(saved.values())
    everyone = together.gather_objects(sizes)
    if together.is_main():
        torch.save(everyone, "probe.pt")
gradients.complete_gradients, model.GPT.forward = probed, counted
sys.argv[0] = os.path.join(os.environ["REPO"], "train.py")
code = compile(open(sys.argv[0]).read(), sys.argv[0], "exec")
exec(code, {"__name__": "__main__", "__file__": sys.argv[0]})
"""


@pytest.fixture(scope="module")
def probe(zygote, shared_work):
    """What PROBE gathers in step 1 from each rank: parameters, bytes of activations."""
    (shared_work / "probe.py").write_text(PROBE)

    def run(model, way="one"):
        at = shared_work / f"probe-{model}-{way}"
        if not at.exists():
            shutil.copytree(shared_work / "data", at / "data")
            args = [*TINY, *args_of(model, way), "--eval_interval=1000", "--save_checkpoint=False"]
            env = {"REPO": str(REPO)}
            zygote.start(
                [*args, "--max_iters=1"], at, WAYS[way][0], "probe.py", repo=shared_work, env=env
            ).wait()
        return torch.load(at / "probe.pt", weights_only=True)

    return run


# the shares of the parameters and of one process's activations that a rank should hold; None: not compared
HELD = [("gpt2-bias", "tp2-pp2", 1 / 4, None), ("gpt2-bias", "cp2", 1, 1 / 2)]
HELD += [("gpt2-bias", "tp2-cp2", 1 / 2, 1 / 4), ("gpt2-bias", "tp2", 1 / 2, 1 / 2)]
HELD += [("gpt2-bias", "pp2-zbv", 1 / 2, None), ("gpt2-bias", "hsdp-tp2", 1 / 4, None)]
HELD += [("llama", "fsdp-tp2-pp2", 1 / 8, None), ("gpt2-moe", "ep2-fsdp", 1 / 4, None)]


@pytest.mark.parametrize(("model", "way", "parameters", "activations"), slow_after(2, HELD))
def test_what_a_rank_holds(probe, model, way, parameters, activations):
    """
    Parameters: up to 5% of the model more than a rank's share, since norms, biases and position embeddings
    are on all tp ranks, and embeddings on the first and the last stage. Activations: with tp, about an eighth
    of what one process saves is on every rank, the gathered inputs of the matmuls (B, T, C).
    """
    ((parameters_of_one, activations_of_one),) = probe(model)
    ranks = probe(model, way)
    counts = [rank[0] for rank in ranks]
    assert max(counts) <= (parameters + 0.05) * parameters_of_one <= sum(counts) + 0.05 * parameters_of_one
    if activations:
        undivided = 0.13 / (2 if "cp2" in way else 1) if "tp" in way else 0
        largest = max(rank[1] for rank in ranks)
        assert 0 < largest <= (activations * (1 - undivided) + undivided) * activations_of_one
