"""
Tensor, pipeline, context and expert parallelism: what a rank holds, and sampled text. The curves are in
test_layouts.py, faults and messages in test_split.py. measure/random_layouts.py draws more layouts.
"""

import shutil

import pytest
import torch
from runs import start_changed
from test_layouts import WAYS, args_of


def slow_after(n, cases):
    """All but the first n cases with the slow tests."""
    return [*cases[:n], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[n:])]


@pytest.fixture(scope="module")
def ran(trained):
    """The folder of a run of a model in a way, see test_layouts.py."""
    return lambda model, way="one": trained(args_of(model, way), WAYS[way][0])


SAMPLES = [("llama", "one", "tp2-pp2"), ("gpt2-moe", "ep2-fsdp", "pp2"), ("gpt2-moe", "one", "tp2")]


@pytest.mark.parametrize(("model", "source", "way"), slow_after(1, SAMPLES))
def test_the_text_is_that_of_one_process(zygote, shared_work, ran, model, source, way):
    """Beyond the context of 32 tokens, for the most likely tokens and for random ones."""
    nproc, flags = WAYS[way]
    for temperature in (0, 1):
        args = [f"--out_dir={ran(model, source)}", "--device=cpu", "--dtype=float32", "--start=A"]
        args += ["--max_new_tokens=40", "--num_samples=3", f"--temperature={temperature}"]
        one = zygote.start(args, shared_work, script="sample.py").wait().samples()
        run = zygote.start([*args, *flags], shared_work, nproc, script="sample.py").wait()
        assert run.samples() == one and one.count("A") >= 3


# ------------------------------------------------------------------------------------------------------------
# what a rank holds

# train.py with what this process holds: sizes of parameters and of saved activations
PROBE = """
import torch, model
from isogpt.launch import together
from isogpt.parallel import gradients
from isogpt.parallel import local_parts
finish, forward = gradients.FloatSums.finish, model.GPT.forward
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
def probed(sums):
    finish(sums)
    numbers = [local_parts.local(p).numel() for p in sums.raw_model.parameters()]
    sizes = sum(numbers), sum(saved.values())
    everyone = together.gather_objects(sizes)
    if together.is_main():
        torch.save(everyone, "probe.pt")
gradients.FloatSums.finish, model.GPT.forward = probed, counted
"""


@pytest.fixture(scope="module")
def probe(zygote, shared_work):
    """What PROBE gathers in step 1 from each rank: parameters, bytes of activations."""

    def run(model, way="one"):
        at = shared_work / f"probe-{model}-{way}"
        if not at.exists():
            shutil.copytree(shared_work / "data", at / "data")
            args = [*args_of(model, way), "--eval_interval=1000", "--save_checkpoint=False"]
            start_changed(zygote, PROBE, [*args, "--max_iters=1"], at, WAYS[way][0]).wait()
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
