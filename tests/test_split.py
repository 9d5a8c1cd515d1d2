"""
Tensor, pipeline and context parallelism: gradients, memory, faults and messages. The curves:
test_parallel.py.
"""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from runs import REPO, TINY, column, default_plan, records, start_faulty, wait_for
from test_parallel import MODELS, ONE, WAYS, mark_of
from test_parity import same

from isogpt.checkpoint.search import newest_checkpoint
from isogpt.checkpoint.source import open_checkpoint
from isogpt.common.random_numbers import TRAIN
from isogpt.data.windows import random_windows
from isogpt.parallel.shares import share_of
from isogpt.training.degrees import check_degrees

# train.py with what this process holds: gradients before clipping, sizes of parameters and of saved
# activations
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
    found = [(name, where, piece.clone()) for name, p in gpt.named_parameters()
             for where, piece in local_parts.local_part_of(p.grad, local_parts.splits_of(p)).pieces]
    sizes = sum(local_parts.local(p).numel() for p in gpt.parameters()), sum(saved.values())
    everyone = together.gather_objects((found, sizes))
    if together.is_main():
        torch.save(everyone, "probe.pt")
gradients.complete_gradients, model.GPT.forward = probed, counted
sys.argv[0] = os.path.join(os.environ["REPO"], "train.py")
code = compile(open(sys.argv[0]).read(), sys.argv[0], "exec")
exec(code, {"__name__": "__main__", "__file__": sys.argv[0]})
"""


@pytest.fixture(scope="module")
def probe(zygote, tmp_path_factory, shared_work):
    """What PROBE finds in step 10 from one process's checkpoint, on any layout; each is run once."""
    (shared_work / "probe.py").write_text(PROBE)
    found = {}

    def run(model, way="one"):
        if (model, way) not in found:
            nproc, flags = (1, []) if way == "one" else WAYS[way]
            args = [*TINY, *ONE, "--eval_interval=1000", *MODELS[model]]
            if not (shared_work / model).exists():
                zygote.start([*args, "--max_iters=9", f"--out_dir={model}"], shared_work).wait()
            at = shared_work / f"{model}-{way}"
            shutil.copytree(shared_work / "data", at / "data")
            shutil.copytree(shared_work / model, at / "out", symlinks=True)
            args += [
                *flags,
                "--init_from=resume",
                "--max_iters=10",
                "--save_checkpoint=False",
                "--out_dir=out",
            ]
            zygote.start(args, at, nproc, script="probe.py", repo=shared_work, env={"REPO": str(REPO)}).wait()
            found[model, way] = torch.load(at / "probe.pt", weights_only=True)
        return found[model, way]

    return run


GRADIENTS = [("gpt2-bias", "tp2-pp2")]
MORE = [("nanochat", "cp2")]
MORE += [
    ("gpt2-bias", way)
    for way in (
        "tp4",
        "pp2-interleaved",
        "pp2-zero_bubble",
        "pp2-zbv",
        "cp4",
        "tp2-cp2",
        "zero1-tp2",
        "zero2-pp2",
        "fsdp-cp2-tp2",
        "hsdp-tp2",
        "3-pp2",
    )
]
MORE += [("nanochat", "pp2-zbv"), ("nanochat", "tp2"), ("llama", "fsdp-tp2-pp2")]


@pytest.mark.parametrize(
    ("model", "way"), [*GRADIENTS, *(pytest.param(*p, marks=mark_of(p[1])) for p in MORE)]
)
def test_gradients_are_those_of_one_process(probe, model, way):
    """
    Each part of each gradient: bit for bit the same on all ranks that hold it, near one process's. Norm:
    about 1.
    """
    same_gradients(probe(model), probe(model, way))


def same_gradients(one, several):
    """Compare what PROBE finds on one process and on several."""
    ((pieces, _),) = one
    expected = {name: gradient for name, _, gradient in pieces}
    parts = defaultdict(list)
    for pieces, _ in several:
        for name, where, piece in pieces:
            parts[name, where].append(piece)
    covered = dict.fromkeys(expected, 0)
    for (name, where), (first, *others) in parts.items():
        name = "transformer.wte.weight" if name == "lm_head.weight" and name not in expected else name  # tied
        assert all(torch.equal(first, other) for other in others), name
        place = tuple(slice(o, o + n) for o, n in zip(where, first.shape, strict=True))
        torch.testing.assert_close(first, expected[name][place], atol=1e-6, rtol=0, msg=name)
        covered[name] += first.numel()
    wanted = {name: gradient.numel() for name, gradient in expected.items()}
    assert all(covered[name] >= n for name, n in wanted.items())


# the share of the parameters that a rank should hold
SHARES = {
    "tp2": 1 / 2,
    "tp4": 1 / 4,
    "cp2": 1,
    "pp2": 1 / 2,
    "pp2-zbv": 1 / 2,
    "tp2-pp2": 1 / 4,
    "ddp-tp2": 1 / 2,
    "zero1-tp2": 1 / 2,
    "fsdp-tp2": 1 / 4,
    "fsdp-cp2": 1 / 4,
    "fsdp-pp2": 1 / 4,
    "fsdp-tp2-pp2": 1 / 8,
    "fsdp-cp2-tp2": 1 / 8,
    "hsdp-tp2": 1 / 4,
}
FIRST = ("tp2-pp2",)


@pytest.mark.parametrize("way", [w if w in FIRST else pytest.param(w, marks=mark_of(w)) for w in SHARES])
def test_parameters_per_rank(probe, way):
    """
    Up to 4% of the model more than its share: norms, biases and position embeddings are on all tp ranks,
    embeddings on the first and the last stage. The ranks of one copy together hold everything.
    """
    ((_, (whole, _)),) = probe("gpt2-bias")
    counts = [n for _, (n, _) in probe("gpt2-bias", way)]
    assert max(counts) <= (SHARES[way] + 0.05) * whole and sum(counts) >= whole
    assert SHARES[way] == 1 or max(counts) < whole


# the share of one process's activations that a rank should save
ACTIVATIONS = {"cp2": 1 / 2, "cp4": 1 / 4, "tp2": 1 / 2, "tp4": 1 / 4, "tp2-cp2": 1 / 4}


@pytest.mark.parametrize(
    "way", [w if w == "cp2" else pytest.param(w, marks=pytest.mark.slow) for w in ACTIVATIONS]
)
def test_activations_per_rank(probe, way):
    """
    Divided by cp; the backward gathers keys and values again. With tp, about an eighth of what one process
    saves is on every rank: the gathered inputs of the matmuls (B, T, C).
    """
    ((_, (_, whole)),) = probe("gpt2-bias")
    saved = [n for _, (_, n) in probe("gpt2-bias", way)]
    undivided = 0.13 / (2 if "cp2" in way else 1) if "tp" in way else 0
    assert 0 < max(saved) <= (ACTIVATIONS[way] * (1 - undivided) + undivided) * whole


# ------------------------------------------------------------------------------------------------------------
# faults


@pytest.fixture(scope="module")
def faulty(zygote, shared_work):
    """Start train.py with faults."""

    def start(args, nproc=1, **faults):
        return start_faulty(zygote, [*ONE, *args], shared_work, nproc, **faults)

    return start


# layout: the rank whose loss is not finite; of a pipeline one with the last stage
GUILTY = {"tp2-pp2": 2, "cp2": 1, "ddp-tp2": 3, "zero1-pp2": 3, "fsdp-tp2-pp2": 6}
KINDS = [
    ("tp2-pp2", "NAN"),
    ("cp2", "NAN"),
    ("ddp-tp2", "NAN"),
    ("fsdp-tp2-pp2", "NAN"),
    ("tp2-pp2", "NAN_GRADIENT"),
    ("cp2", "NAN_GRADIENT"),
    ("zero1-pp2", "NAN_GRADIENT"),
]


@pytest.mark.parametrize(("way", "kind"), [pytest.param(*k, marks=mark_of(k[0])) for k in KINDS])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_ranks(faulty, shared_work, way, kind):
    """
    The losses of the other steps are those of one process without that step; the guilty rank's rows are
    named.
    """
    (nproc, flags), rank, one, out = (
        WAYS[way],
        GUILTY[way],
        shared_work / "skipped",
        shared_work / f"{kind}-{way}",
    )
    args = ["--on_nan=skip", "--max_iters=11", "--save_checkpoint=False"]
    if not one.exists():
        faulty([*args, f"--out_dir={one}"], NAN=[5, 0]).wait()
    run = faulty([*args, *flags, f"--out_dir={out}"], nproc, **{kind: [5, rank]}).wait()
    assert run.text().count("the step is skipped") == 1
    same(column(one, "loss"), column(out, "loss"), absolute=2e-5)
    assert sorted(column(out, "loss")) == [s for s in range(12) if s != 5]
    (event,) = (r for r in records(out) if r.get("event") == "not_finite")
    assert event["iter"] == 5 and event["ranks"] == ([rank] if kind == "NAN" else [*range(nproc)])
    if kind == "NAN":
        assert f"step 5: not finite on rank {rank}: " in run.text()
        data_rank, data_size = {"ddp-tp2": (1, 2), "fsdp-tp2-pp2": (1, 2)}.get(way, (0, 1))
        share = share_of(24, data_rank, data_size, 8, 2 if "pp" in way else 1)
        starts = random_windows(20000, 32, 1337, TRAIN, 5, 24)
        rows = [int(s) for m in range(share.micro_steps) for s in share.pick(starts, m)]
        assert event["windows"] == {str(rank): rows}


@pytest.mark.slow
def test_weights_that_differ_across_ranks_are_detected(faulty):
    """Ranks 1 and 3 hold the same parts: either one may be right."""
    nproc, flags = WAYS["ddp-tp2"]
    run = faulty([*flags, "--out_dir=differ"], nproc, DIFFER=[7, 3]).wait(ok=False)
    assert set(run.codes) == {1} and run.text().count("error:") == 1 and "Traceback" not in run.text()
    assert re.search(
        r"step 10: weights differ across ranks: transformer\.wte\.weight differs on rank [13]\n", run.text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("tp2-pp2", marks=pytest.mark.extra), "zero1-tp2"])
def test_float16_with_an_overflow_on_one_rank(faulty, shared_work, way):
    """The scaler skips the step on all ranks and halves its scale."""
    (nproc, flags), one, out = WAYS[way], shared_work / "float16", shared_work / f"float16-{way}"
    if not one.exists():
        faulty(["--dtype=float16", "--grad_clip=0", f"--out_dir={one}"], OVERFLOW=[0, 0]).wait()
    faulty(
        ["--dtype=float16", "--grad_clip=0", *flags, f"--out_dir={out}"], nproc, OVERFLOW=[0, nproc - 1]
    ).wait()
    same(column(one, "loss"), column(out, "loss"), absolute=5e-3)
    run = open_checkpoint(newest_checkpoint(str(out))[0]).run
    assert run["isogpt"]["scaler"]["scale"] == 2**15


LOST = [("tp2-pp2", "SIGKILL"), ("cp2", "SIGKILL"), ("tp2-pp2", "SIGSTOP"), ("cp2", "SIGSTOP")]


@pytest.mark.parametrize(
    ("way", "name"),
    [
        LOST[0],
        *(pytest.param(*p, marks=pytest.mark.extra if p[0] == "cp2" else pytest.mark.slow) for p in LOST[1:]),
    ],
)
def test_a_rank_that_is_lost_is_named_and_the_run_resumes(zygote, work, way, name):
    nproc, flags = WAYS[way]
    lose_a_rank(zygote, work, [*TINY, *ONE, *flags], nproc, name)


def lose_a_rank(zygote, work, args, nproc, name):
    """Send rank 1 a signal: the others name it and exit; the run resumes."""
    args = [*args, "--out_dir=out", "--save_interval=5", "--dist_timeout_s=3"]
    run = zygote.start([*args, "--max_iters=100000"], work, nproc)
    wait_for(lambda: (work / "out/step_00000005/manifest.json").exists() or run.poll())
    run.kill([1], getattr(signal, name))
    others = [r for r in range(nproc) if r != 1]
    end = time.monotonic() + 30
    while any(run.codes[r] is None for r in others) and time.monotonic() < end:
        run.poll()
        time.sleep(0.02)
    run.kill([1])
    run.wait(ok=False)
    assert [run.codes[r] for r in others] == [1] * len(others), f"{run.codes}:\n{run.text()[-2000:]}"
    for rank in others:
        assert re.search(rf"error: rank {rank} at step \d+, .*rank 1 does not respond", run.text())
    last = max(column(work / "out", "loss")) + 3
    zygote.start([*args, "--init_from=resume", f"--max_iters={last}"], work, nproc).wait()
    assert sorted(column(work / "out", "loss")) == [*range(last + 1)]


# ------------------------------------------------------------------------------------------------------------
# messages

SHAPE = dict(n_layer=2, n_head=4, n_kv_head=0, n_embd=32, block_size=32, vocab_size=65)
MISTAKES = {
    "4 processes cannot be divided into tp 3: start 3 or 6 processes, or set --tp=2": (
        4,
        dict(tp=3),
        dict(n_head=12, block_size=96),
    ),
    "4 processes cannot be divided into pp 3 x tp 2 = 6: start 6 processes, or lower a degree": (
        4,
        dict(tp=2, pp=3),
        dict(n_layer=4),
    ),
    "6 processes cannot be divided into cp 2 x tp 2 = 4: start 4 or 8 processes, or lower a degree": (
        6,
        dict(tp=2, cp=2),
        {},
    ),
    "4 processes cannot be divided into dp_replicate 4 x tp 2 = 8: start 8 processes, or lower a degree": (
        4,
        dict(tp=2, dp_replicate=4),
        {},
    ),
    "3 processes cannot be divided into islands 2: start 2 or 4 processes, or set --islands=1": (
        3,
        dict(islands=2),
        {},
    ),
    "tp is 4: it must divide n_head, 6: set --tp=2": (4, dict(tp=4), dict(n_head=6)),
    "tp is 4: it must divide n_kv_head, 2: set --tp=2": (4, dict(tp=4), dict(n_kv_head=2)),
    "pp_schedule '1f1b' makes 4 stages with pp 4, but there are only 2 layers: set --pp=2": (
        4,
        dict(pp=4),
        {},
    ),
    (
        "pp_schedule 'zbv' makes 4 stages with pp 2, but there are only 2 layers: set --pp=1 or "
        "--pp_schedule=1f1b"
    ): (2, dict(pp=2, pp_schedule="zbv"), {}),
    "block_size is 33: it must be a multiple of tp, 2: set --block_size=32 or 34": (
        2,
        dict(tp=2),
        dict(block_size=33),
    ),
    "block_size is 36: it must be a multiple of 2 x cp x tp, 8: set --block_size=32 or 40": (
        4,
        dict(cp=2, tp=2),
        dict(block_size=36),
    ),
    "cuda_graphs is for one process, but there are 2: set --cuda_graphs=False": (
        2,
        dict(cuda_graphs=True),
        {},
    ),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_degrees_that_do_not_divide(said):
    refuse_degrees(said, *MISTAKES[said])


def refuse_degrees(said, world_size, degrees, shape):
    """The message, and what it advises is accepted."""
    wanted = default_plan(world_size=world_size, model_args=SHAPE | shape, **degrees)
    with pytest.raises(ValueError) as problem:
        check_degrees(wanted)
    assert str(problem.value) == said
    for name, value in re.findall(r"--(\w+)=(\w+)", said):
        changed = {name: int(value) if value.isdigit() else {"False": False}.get(value, value)}
        settings = {k: v for k, v in changed.items() if k in vars(wanted)}
        check_degrees(replace(wanted, model_args=wanted.model_args | changed, **settings))
    for counts in re.findall(r"start ([\d or]+) processes", said):
        for n in counts.split(" or "):
            args = wanted.model_args | dict(n_layer=4, n_head=12, block_size=96)
            check_degrees(replace(wanted, world_size=int(n), model_args=args))


def test_one_hint_about_tp():
    """Not three hints, each of which would lead to the next problem. The advice is accepted."""
    said = "tp is 3: it must divide the number of processes, 1, the heads, 4, and block_size, 32: set --tp=1"
    said += ", or start 2 processes and set --tp=2"
    with pytest.raises(ValueError, match=f"^{said}$"):
        check_degrees(default_plan(world_size=1, model_args=SHAPE, tp=3))
    check_degrees(default_plan(world_size=2, model_args=SHAPE, tp=2))
    said = "tp is 3: it must divide the number of processes, 4, the heads, 4, and block_size, 32: set --tp=2"
    with pytest.raises(ValueError, match=f"^{said}$"):
        check_degrees(default_plan(world_size=4, model_args=SHAPE, tp=3))
    check_degrees(default_plan(world_size=4, model_args=SHAPE, tp=2))


@pytest.mark.slow
def test_all_mistakes_are_said_once_by_four_processes(work):
    command = [
        sys.executable,
        str(REPO / "train.py"),
        *TINY,
        "--nproc=4",
        "--tp=4",
        "--pp=3",
        "--block_size=30",
    ]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    for said in (
        "4 processes cannot be divided into pp 3 x tp 4 = 12",
        "tp is 4: it must divide n_head, 2",
        "'1f1b' makes 3 stages with pp 3",
        "block_size is 30: it must be a multiple of tp, 4",
    ):
        assert run.stderr.count(said) == 1, run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: "), "torchrun's report does not follow"
    assert not (work / "out").exists()


def test_a_checkpoint_that_cannot_be_divided(zygote, work):
    """Its shape applies, not the one of the command line: it is known only after all ranks have met."""
    zygote.train(["--out_dir=out", "--max_iters=1"], work)
    args = ["--out_dir=out", "--init_from=resume", "--n_head=4", "--n_layer=4", "--tp=4"]
    run = zygote.train(args, work, 4, ok=False)
    assert run.codes == [1] * 4 and run.text() == "error: tp is 4: it must divide n_head, 2: set --tp=2\n"
