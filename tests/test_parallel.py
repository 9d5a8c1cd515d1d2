"""
Tensor, pipeline, context and expert parallelism: sampled text, and what a rank holds and draws. The curves
are in test_layouts.py, faults and messages in test_split.py. measure/random_layouts.py draws more layouts.
"""

import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from edits import edited_train
from test_layouts import WAYS, args_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from isogpt.common.random_numbers import normal_numbers
from isogpt.parallel import parallelize
from isogpt.parallel.local_parts import local_parts_by_name
from isogpt.parallel.mesh import connect_mesh
from isogpt.parallel.plan import UNDIVIDED
from model import GPT, GPTConfig


def slow_after(n, cases):
    """All but the first n cases with the slow tests."""
    return [*cases[:n], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[n:])]


SAMPLES = [("llama", "one", "tp2-pp2"), ("gpt2-moe", "ep2-fsdp", "pp2"), ("gpt2-moe", "one", "tp2")]


@pytest.mark.parametrize(("model", "source", "way"), slow_after(1, SAMPLES))
def test_the_text_is_that_of_one_process(zygote, shared_work, trained, model, source, way):
    """Beyond the context of 32 tokens, for the most likely tokens and for random ones."""
    out, (nproc, flags) = trained(args_of(model, source), WAYS[source][0]), WAYS[way]
    for temperature in (0, 1):
        args = [f"--out_dir={out}", "--device=cpu", "--dtype=float32", "--start=A"]
        args += ["--max_new_tokens=40", "--num_samples=3", f"--temperature={temperature}"]
        one = zygote.start(args, shared_work, script="sample.py").wait().samples()
        run = zygote.start([*args, *flags], shared_work, nproc, script="sample.py").wait()
        assert run.samples() == one and one.count("A") >= 3


# ------------------------------------------------------------------------------------------------------------
# what a rank holds

# edits of train.py: each rank writes how many elements of parameters it holds, and how many bytes the last
# forward pass has saved besides them
PROBE = [
    (
        "\n# 6. the loop",
        """
saved = {}
def pack(x):
    saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return x.detach()
# 6. the loop""",
    ),
    (
        "                with autocast:\n",
        """                saved.clear()
                with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
""",
    ),
    (
        "    gradients.finish()",
        """    gradients.finish()
    held = [p.to_local() if hasattr(p, "to_local") else p for p in raw_model.parameters()]
    for p in held:
        saved.pop(p.untyped_storage().data_ptr(), None)
    torch.save((sum(p.numel() for p in held), sum(saved.values())), f"held{ranks.rank}.pt")
""",
    ),
]


@pytest.fixture(scope="module")
def probe(zygote, shared_work):
    """What the edited train.py writes in step 1 on each rank: parameters, bytes of activations."""

    def run(model, way="one"):
        at = shared_work / f"probe-{model}-{way}"
        if not at.exists():
            shutil.copytree(shared_work / "data", at / "data")
            args = [*args_of(model, way), "--eval_interval=1000", "--save_checkpoint=False", "--max_iters=1"]
            zygote.train(args, at, WAYS[way][0], repo=edited_train(at, *PROBE))
        return [torch.load(at / f"held{rank}.pt") for rank in range(WAYS[way][0])]

    return run


# the shares of the parameters and of one process's activations that a rank should hold; None: not compared
HELD = [("gpt2-bias", "tp2-pp2", 1 / 4, None), ("gpt2-bias", "cp2", 1, 1 / 2)]
HELD += [("gpt2-bias", "tp2-cp2", 1 / 2, 1 / 4), ("gpt2-bias", "tp2", 1 / 2, 1 / 2)]
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


# ------------------------------------------------------------------------------------------------------------
# initial weights


def part_of_model(model_args, layout, rank):
    """One rank's part of a model, made as train.py makes it, with a process group that is not connected."""
    plan = replace(UNDIVIDED, device_type="cpu", **layout)
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    try:
        mesh, cpu = connect_mesh(rank, plan, timeout_s=60.0), torch.device("cpu")
        with torch.device("meta"):
            model = GPT(GPTConfig(**model_args))
        splits = parallelize.divide_model(model, plan, mesh, cpu)
        parallelize.materialize(model, cpu, splits)
    finally:
        dist.destroy_process_group()
    return model


class CountingPhilox(np.random.Philox):
    """Counts the random numbers that are drawn, two for each word."""

    drawn = 0

    def random_raw(self, size):
        CountingPhilox.drawn += 2 * size
        return super().random_raw(size)


SMALL = dict(arch="llama", n_layer=4, n_embd=96, n_head=4, n_kv_head=2, n_hidden=164, block_size=8)
SMALL |= dict(vocab_size=67, bias=False, tied=False)
# layouts, with ranks that hold parts of different sizes: with zero 3, some ranks hold nothing
PARTS = [
    ({"zero": 3, "world_size": 3}, range(3)),
    ({"zero": 3, "world_size": 40}, (0, 33, 34, 39)),
    ({"tp": 2, "world_size": 2}, range(2)),
    ({"pp": 2, "pp_schedule": "zbv", "world_size": 2}, range(2)),
    ({"ep": 2, "zero": 3, "tp": 2, "world_size": 8}, (0, 3, 7)),
]


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize(("layout", "ranks"), PARTS)
def test_a_rank_draws_its_part_of_the_initial_weights(monkeypatch, layout, ranks):
    """The numbers that it holds, which are the bits of one process."""
    args = SMALL | ({"n_expert": 4} if "ep" in layout else {})
    whole = {name: p.detach() for name, p in GPT(GPTConfig(**args), seed=7).named_parameters()}
    for rank in ranks:
        model = part_of_model(args, layout, rank)
        CountingPhilox.drawn, held = 0, 0
        with monkeypatch.context() as patch:
            patch.setattr(np.random, "Philox", CountingPhilox)
            parallelize.init_weights(model, seed=7)
        for name, part in local_parts_by_name(model).items():
            for piece, values in part.cut(whole[name]):
                assert torch.equal(piece, values), name
                held += piece.numel()
        # up to 8 numbers more for each run of numbers, such as the columns of a row that tp divides
        assert 0.9 * held <= CountingPhilox.drawn <= 1.25 * held
        assert 1.25 * held < 0.9 * sum(p.numel() for p in whole.values())


@pytest.mark.parametrize("shape", [(9, 7), (8, 16), (3, 5, 7), (70000,), (2, 70001), ()])
def test_parts_of_normal_numbers_are_the_bits_of_the_whole(shape):
    """Wherever a part begins and ends: in no part does the place in memory change what numpy computes."""
    whole = normal_numbers(1, "name", shape, [slice(0, n) for n in shape])
    places = random.Random(0)
    for _ in range(40):
        part = tuple(slice(*sorted(places.choices(range(n + 1), k=2))) for n in shape)
        values = normal_numbers(1, "name", shape, part)
        assert values.tobytes() == whole[part].tobytes()
    assert not (whole == normal_numbers(2, "name", shape, [slice(0, n) for n in shape])).any()


def test_normal_numbers_are_normal():
    """Moments, the frequency beyond 1, 2, 3 and 4, and neighbours that are independent, to four sigma."""
    x = torch.from_numpy(normal_numbers(1, "name", (2**20,), (slice(0, 2**20),))).double()
    sigma = len(x) ** -0.5
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 4 * sigma * variance**0.5
    for limit in (1.0, 2.0, 3.0, 4.0):
        p = torch.special.erfc(torch.tensor(limit / 2**0.5).double())
        assert abs((x.abs() > limit).double().mean() - p) < 4 * sigma * p**0.5
    for distance in (1, 2, 8):  # of the same word, of the next word, of the next count
        pairs = x[:-distance] * x[distance:], x[:-distance].square() * x[distance:].square() - 1
        assert abs(pairs[0].mean()) < 4 * sigma and abs(pairs[1].mean()) < 4 * sigma * 8**0.5
