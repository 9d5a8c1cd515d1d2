"""
Mixture of experts and expert parallelism: one curve on any layout, checkpoints for any layout, the same text.
"""

import shutil

import pytest
import torch
from runs import REPO, TINY, column, records, start_faulty, wait_for
from test_parallel import ONE, compare, compare_texts, resume_with_the_same_bits
from test_parity import same
from test_split import PROBE, lose_a_rank, refuse_degrees, same_gradients

from isogpt.checkpoint.forks import MODEL_ARGS
from isogpt.checkpoint.search import newest_checkpoint
from isogpt.checkpoint.source import open_checkpoint
from isogpt.common.random_numbers import TRAIN
from isogpt.data.windows import random_windows
from isogpt.parallel.shares import share_of
from model import GPT, GPTConfig

MODELS = {
    "gpt2": ["--bias=True"],
    "nanochat": ["--arch=nanochat", "--n_kv_head=2", "--optimizer=muon", "--n_layer=2"],
    "llama": [
        "--arch=llama",
        "--n_kv_head=2",
        "--optimizer=muon",
        "--n_layer=2",
        "--n_expert_active=3",
        "--balance_loss=0.1",
    ],
    "bfloat16": ["--dtype=bfloat16"],
    "uneven": ["--arch=nanochat", "--n_hidden=51", "--optimizer=muon"],
}
FSDP = "--zero=3"
# (processes, flags); all read 24 sequences per step
WAYS = {
    "ddp2": (2, []),
    "ddp3": (3, []),
    "ep2": (2, ["--ep=2"]),
    "ep4": (4, ["--ep=4"]),
    "ep2-dp2": (4, ["--ep=2"]),
    "ep2-zero1": (4, ["--ep=2", "--zero=1"]),
    "ep2-zero2": (2, ["--ep=2", "--zero=2"]),
    "ep2-fsdp": (4, ["--ep=2", FSDP]),
    "ep2-hsdp": (8, ["--ep=2", FSDP, "--dp_replicate=2"]),
    "ep2-tp2": (4, ["--ep=2", "--tp=2"]),
    "ep2-cp2": (4, ["--ep=2", "--cp=2"]),
    "ep2-pp2": (4, ["--ep=2", "--pp=2"]),
    "ep2-pp2-zbv": (4, ["--ep=2", "--pp=2", "--pp_schedule=zbv"]),
    "ep2-tp2-fsdp": (8, ["--ep=2", "--tp=2", FSDP]),
    "ep2-pp2-fsdp": (8, ["--ep=2", "--pp=2", FSDP]),
    "ep2-every-full": (2, ["--ep=2", "--grad_sync=every", "--activation_checkpointing=full"]),
    "ep2-fsdp-last": (4, ["--ep=2", FSDP, "--grad_sync=last"]),
    "ep2-offload": (4, ["--ep=2", FSDP, "--cpu_offload=True"]),
    "ep2-fsdp-selective": (2, ["--ep=2", FSDP, "--activation_checkpointing=selective"]),
    "pp2-interleaved": (2, ["--pp=2", "--pp_schedule=interleaved"]),
    "fsdp-tp2-pp2": (8, [FSDP, "--tp=2", "--pp=2"]),
}
STARTS = {"one": (1, [])} | WAYS
SLOW = pytest.mark.slow
EXTRA = (
    "ddp2",
    "ep2-zero2",
    "ep2-pp2",
    "ep2-fsdp-last",
    "ep2-offload",
    "ep2-tp2-fsdp",
    "pp2-interleaved",
    "fsdp-tp2-pp2",
    "ep2-fsdp-selective",
    "ddp3",
    "ep2-hsdp",
    "ep2-pp2-zbv",
    "ep2-every-full",
)
EXTRA_PAIRS = (("gpt2", "ep2-pp2-fsdp"), ("nanochat", "ep2-pp2-fsdp"))


def first_quick(cases, n):
    """All but the first n cases with the slow tests."""
    return [
        *cases[:n],
        *(
            pytest.param(
                *case, marks=pytest.mark.extra if case[1] in EXTRA or case[:2] in EXTRA_PAIRS else SLOW
            )
            for case in dict.fromkeys(cases[n:])
            if case not in cases[:n]
        ),
    ]


def args_of(model, way):
    """The settings of a run."""
    return [*ONE, "--n_expert=4", *MODELS[model], *STARTS[way][1]]


@pytest.fixture(scope="module")
def ran(zygote, shared_work):
    """
    The folder of a run of 20 steps with checkpoints at steps 10 and 20, made when it is first asked for.
    """

    def run(model, way="one"):
        out = shared_work / f"{model}-{way}"
        if not out.exists():
            zygote.train([*args_of(model, way), f"--out_dir={out}"], shared_work, STARTS[way][0])
        return out

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


CURVES = [("gpt2", "ep2"), ("llama", "ep2-tp2"), ("nanochat", "ep2-zero1")]
CURVES += [("gpt2", way) for way in WAYS]
CURVES += [(arch, way) for arch in ("nanochat", "llama") for way in ("ep2", "ep2-pp2-fsdp")]
CURVES += [("uneven", "ep2-tp2-fsdp")]


@pytest.mark.parametrize(("model", "way"), first_quick(CURVES, 1))
def test_every_layout_has_the_curve_of_one_process(ran, model, way):
    """And the same tokens per expert."""
    compare(ran(model), ran(model, way))
    compare_routing(ran(model), ran(model, way))
    assert column(ran(model, way), "dropped_tokens") == dict.fromkeys(range(20), 0)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("ep2", marks=pytest.mark.extra),
        pytest.param("ep2-fsdp", marks=SLOW),
        pytest.param("ep2-pp2", marks=pytest.mark.extra),
    ],
)
def test_bfloat16(ran, way):
    compare(ran("bfloat16"), ran("bfloat16", way), loss=5e-3, norm=0.05)


SAME_BITS = (("gpt2", "ep2-fsdp"), ("nanochat", "ep2-zero1"))
MORE_BITS = (("gpt2", "ep2"), ("gpt2", "ep2-tp2"), ("gpt2", "ep2-pp2"))


@pytest.mark.parametrize(
    ("model", "way"),
    [
        *(pytest.param(*pair, marks=SLOW) for pair in SAME_BITS),
        *(pytest.param(*pair, marks=pytest.mark.extra) for pair in MORE_BITS),
    ],
)
def test_a_resume_on_the_same_layout_has_the_same_bits(zygote, shared_work, model, way):
    resume_with_the_same_bits(zygote, shared_work, way, args_of(model, way), WAYS[way][0])


RESUMES = [
    ("gpt2", "ep2", "one"),
    ("gpt2", "ep2-fsdp", "ep2"),
    ("gpt2", "ep2-fsdp", "ep2-pp2"),
    ("gpt2", "one", "ep2"),
    ("gpt2", "ep4", "ep2-fsdp"),
    ("gpt2", "ep2-fsdp", "ep2-tp2"),
    ("gpt2", "ep2-pp2", "ep2"),
    ("gpt2", "ddp2", "ep2-zero1"),
    ("gpt2", "ep2-hsdp", "ep2-cp2"),
    ("nanochat", "ep2-zero1", "one"),
    ("llama", "one", "ep2-tp2-fsdp"),
]


@pytest.mark.parametrize(("model", "before", "after"), first_quick(RESUMES, 1))
def test_a_checkpoint_resumes_on_a_different_layout(zygote, shared_work, ran, model, before, after):
    """Step 10's."""
    out = shared_work / f"{model}-{before}-to-{after}"
    shutil.copytree(ran(model, before), out, symlinks=True)
    assert (out / "step_00000010/ckpt.pt").exists() == (before in ("one", "ddp2"))
    args = [
        *args_of(model, after),
        "--n_expert=0",
        "--init_from=resume",
        "--resume_step=10",
        f"--out_dir={out}",
    ]
    zygote.train(args, shared_work, STARTS[after][0])
    compare(ran(model), out, steps=10)


@SLOW
@pytest.mark.parametrize(
    ("model", "way"), [("gpt2", "ep2-fsdp"), ("gpt2", "ep2-tp2"), ("nanochat", "ep2-cp2")]
)
def test_gradients_are_those_of_one_process(zygote, shared_work, model, way):
    """In step 1, by parameter."""
    (shared_work / "probe.py").write_text(PROBE)
    found = []
    for name in ("one", way):
        at = shared_work / f"probe-{model}-{name}"
        if not at.exists():
            shutil.copytree(shared_work / "data", at / "data")
            args = [
                *TINY,
                *args_of(model, name),
                "--max_iters=1",
                "--eval_interval=1000",
                "--save_checkpoint=False",
            ]
            zygote.start(
                args, at, STARTS[name][0], script="probe.py", repo=shared_work, env={"REPO": str(REPO)}
            ).wait()
        found.append(torch.load(at / "probe.pt", weights_only=True))
    same_gradients(*found)


# ------------------------------------------------------------------------------------------------------------
# numbers of the routers


@pytest.fixture(scope="module")
def lopsided(shared_work):
    """
    A folder with a model in which no token chooses the last expert of block 1, and the last two of block 2.
    """
    model = GPT(GPTConfig(32, 65, 4, 4, 32, n_expert=4), seed=1)
    for number, scores in ((1, [0.0, 0.0, 0.0, -1.0]), (2, [0.0, 0.0, -1.0, -1.0])):
        block = model.transformer.h[number]
        with torch.no_grad():
            block.ln_2.bias[0] = 50.0
            block.mlp.router.weight[:, 0] = torch.tensor(scores)
    nanogpts = {name: value for name, value in model.describe().items() if name in MODEL_ARGS}
    state = {"model": model.state_dict(), "model_args": nanogpts, "iter_num": 0, "best_val_loss": 9.0}
    state["isogpt"] = {"model_args": model.describe()}
    (shared_work / "lopsided").mkdir()
    torch.save(state, shared_work / "lopsided/ckpt.pt")
    return shared_work / "lopsided"


@pytest.mark.parametrize(
    "way",
    [
        "ep2",
        pytest.param("ep2-fsdp", marks=SLOW),
        *(pytest.param(w, marks=pytest.mark.extra) for w in ("ddp3", "ep2-pp2")),
    ],
)
def test_padding_rows_do_not_count_and_dead_experts_are_named(zygote, shared_work, lopsided, way):
    """Twenty-five sequences; with ep no token of block 2 is sent to the second rank."""
    args = ["--init_from=lopsided", "--gradient_accumulation_steps=5", "--batch_size=5", "--max_iters=5"]
    args += ["--learning_rate=1e-4"]
    outs = {}
    for name in ("one", way):
        nproc, flags = STARTS[name]
        outs[name] = shared_work / f"padded-{name}"
        if not outs[name].exists():
            run = zygote.train([*ONE, *args, *flags, f"--out_dir={outs[name]}"], shared_work, nproc)
            assert ("rows are padding" in run.text()) == (name not in ("one", "tp2", "cp2"))
            steps = [line for line in run.text().splitlines() if line.startswith("iter ")]
            assert len(steps) == 6
            assert all(line.endswith(", dead experts (layer.expert): 1.3, 2.2, 2.3") for line in steps), steps
            assert column(outs[name], "expert_tokens_mean") == pytest.approx(
                dict.fromkeys(range(6), 25 * 32 * 2 / 4)
            )
    same(column(outs["one"], "loss"), column(outs[way], "loss"), absolute=2e-5)
    compare_routing(outs["one"], outs[way])


@SLOW
def test_numbers_between_logged_steps_are_averages(zygote, shared_work, ran):
    args = [*args_of("gpt2", "ep2"), "--log_interval=4", "--out_dir=every4"]
    zygote.train(args, shared_work, 2)
    each, mean = (column(out, "router_entropy") for out in (ran("gpt2", "ep2"), shared_work / "every4"))
    assert sorted(mean) == [0, 4, 8, 12, 16]
    for step in (4, 8, 12, 16):
        assert mean[step] == pytest.approx(sum(each[s] for s in range(step - 3, step + 1)) / 4, abs=1e-5)


# ------------------------------------------------------------------------------------------------------------
# upcycling


@pytest.fixture(scope="module")
def dense(zygote, shared_work):
    """The folder of a run of five steps without experts: ckpt.pt, or shards with zero 3."""

    def run(model, way):
        out = shared_work / f"dense-{model}-{way}"
        if not out.exists():
            nproc, flags = {"one": (1, []), "zero3": (2, [FSDP])}[way]
            zygote.train(
                [*ONE, *MODELS[model], *flags, "--max_iters=4", f"--out_dir={out}"], shared_work, nproc
            )
        return out

    return run


UPCYCLED = [
    ("gpt2", "one", "ep2-fsdp"),
    ("gpt2", "zero3", "one"),
    ("nanochat", "one", "ep2-tp2"),
    ("llama", "zero3", "ep2-pp2"),
]


@pytest.mark.parametrize(("model", "source", "way"), first_quick(UPCYCLED, 0))
def test_a_dense_model_is_upcycled(zygote, shared_work, dense, model, source, way):
    """The first losses are the dense model's; the next ones depend on the routers, and not on the layout."""
    folder = dense(model, source)
    args = [*ONE, *MODELS[model], f"--init_from={folder}", "--max_iters=1", "--save_checkpoint=False"]
    outs = {name: shared_work / f"upcycled-{model}-{source}-{name}" for name in ("dense", "one", way)}
    for name, out in outs.items():
        if not out.exists():
            nproc, flags = STARTS.get(name, (1, []))
            experts = ["--n_expert=4"] if name != "dense" else []
            zygote.train([*args, *experts, *flags, f"--out_dir={out}"], shared_work, nproc)
    for key in ("loss", "val_loss", "train_loss"):
        assert column(outs[way], key)[0] == pytest.approx(column(outs["dense"], key)[0], abs=1e-5)
    same(column(outs["one"], "loss"), column(outs[way], "loss"), absolute=2e-5)
    same(column(outs["one"], "grad_norm"), column(outs[way], "grad_norm"), relative=1e-4)


def test_the_number_of_active_experts_is_the_checkpoints(zygote, shared_work, ran):
    args = [*args_of("llama", "one"), f"--init_from={ran('llama')}", "--n_expert_active=4", "--max_iters=0"]
    text = zygote.train([*args, "--save_checkpoint=False", "--out_dir=active"], shared_work).text()
    assert "note:    n_expert_active 3 of the checkpoint is used, not n_expert_active 4\n" in text
    assert column(shared_work / "active", "expert_tokens_mean") == {0: 24 * 32 * 3 / 4}


def test_a_different_number_of_experts_is_refused_once(zygote, shared_work, ran, dense):
    """And in which a dense model is upcycled when it is resumed. The advice works."""
    folder, moe = dense("gpt2", "one"), ran("gpt2")
    dense_said = (
        "error: n_expert is 4, but the checkpoint contains no experts: to start a new run in "
        f"which each expert is a copy of the MLP, set --init_from={folder} and a different --out_dir\n"
    )
    moe_said = "error: n_expert is 2, but the checkpoint contains 4 experts: set --n_expert=4\n"
    cases = (
        (["--init_from=resume", f"--out_dir={folder}", "--n_expert=4"], dense_said),
        (["--init_from=auto", f"--out_dir={moe}", "--n_expert=2"], moe_said),
        ([f"--init_from={moe}", "--out_dir=other", "--n_expert=2"], moe_said),
    )
    for args, said in cases:
        run = zygote.train([*ONE, *args], shared_work, 2, ok=False)
        assert run.codes == [1, 1] and run.text() == said
    assert not (shared_work / "other").exists()


# ------------------------------------------------------------------------------------------------------------
# text


SAMPLERS = [
    ("llama", "ep2-tp2", 2, ["--tp=2"]),
    ("gpt2", "ep2-fsdp", 2, ["--pp=2"]),
    ("gpt2", "one", 4, ["--tp=2", "--pp=2"]),
    ("nanochat", "ep2-zero1", 2, []),
]


@pytest.mark.parametrize(
    ("model", "way", "nproc", "flags"),
    [pytest.param(*case, marks=SLOW if i < 2 else pytest.mark.extra) for i, case in enumerate(SAMPLERS)],
)
def test_the_text_is_that_of_one_process(zygote, shared_work, ran, model, way, nproc, flags):
    """From ckpt.pt or shards."""
    compare_texts(zygote, shared_work, ran(model, way), nproc, flags)


@SLOW
@pytest.mark.parametrize(("nproc", "flags"), [(1, []), (2, ["--tp=2"])])
def test_text_in_bfloat16(zygote, shared_work, ran, nproc, flags):
    args = [
        f"--out_dir={ran('gpt2', 'ep2-fsdp')}",
        "--device=cpu",
        "--dtype=bfloat16",
        "--start=A",
        "--num_samples=2",
        "--max_new_tokens=8",
        "--temperature=0",
    ]
    run = zygote.start([*args, *flags], shared_work, nproc, script="sample.py").wait()
    texts = run.samples().partition("\n")[2].split("\n---------------\n")[:-1]
    assert len(texts) == 2 and all(len(text) == 9 and text[0] == "A" for text in texts)


# ------------------------------------------------------------------------------------------------------------
# faults


@pytest.fixture(scope="module")
def faulty(zygote, shared_work):
    """Start train.py with faults."""

    def start(way, args, **faults):
        args = [*args_of("gpt2", way), *args]
        return start_faulty(zygote, args, shared_work, STARTS[way][0], **faults)

    return start


FAULTS = [("ep2-fsdp", "NAN"), ("ep2-zero1", "NAN_INPUT"), ("ep2-fsdp", "NAN_GRADIENT")]


@SLOW
@pytest.mark.parametrize(("way", "kind"), FAULTS)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_ranks(faulty, shared_work, way, kind):
    """
    Experts on a different rank compute with the tokens; the message names the rank and the rows of the loss.
    """
    one, out = shared_work / "skipped", shared_work / f"{kind}-{way}"
    args = ["--on_nan=skip", "--max_iters=11", "--save_checkpoint=False"]
    if not one.exists():
        faulty("one", [*args, f"--out_dir={one}"], NAN=[5, 0]).wait()
    run = faulty(way, [*args, f"--out_dir={out}"], **{kind: [5, 2]}).wait()
    assert run.text().count("the step is skipped") == 1
    same(column(one, "loss"), column(out, "loss"), absolute=2e-5)
    compare_routing(one, out)
    assert sorted(column(out, "loss")) == [s for s in range(12) if s != 5]
    (event,) = (r for r in records(out) if r.get("event") == "not_finite")
    assert event["iter"] == 5 and event["ranks"] == ([0, 1, 2, 3] if kind == "NAN_GRADIENT" else [2])
    if kind != "NAN_GRADIENT":
        starts = random_windows(20000, 32, 1337, TRAIN, 5, 24)
        assert event["windows"] == {"2": [int(s) for s in share_of(24, 2, 4, 8).pick(starts, 0)]}


@SLOW
@pytest.mark.parametrize("way", ["ep2-fsdp"])
def test_float16_with_an_overflow_on_one_rank(faulty, shared_work, way):
    """The scaler skips the step on all ranks, in the optimizers of all parameters, and halves its scale."""
    one, out = shared_work / "float16", shared_work / f"float16-{way}"
    args = ["--dtype=float16", "--grad_clip=0"]
    if not one.exists():
        faulty("one", [*args, f"--out_dir={one}"], OVERFLOW=[0, 0]).wait()
    faulty(way, [*args, f"--out_dir={out}"], OVERFLOW=[0, WAYS[way][0] - 1]).wait()
    same(column(one, "loss"), column(out, "loss"), absolute=5e-3)
    run = open_checkpoint(newest_checkpoint(str(out))[0]).run
    assert run["isogpt"]["scaler"]["scale"] == 2**15


@SLOW
def test_a_rank_that_is_lost_is_named_and_the_run_resumes(zygote, work):
    lose_a_rank(zygote, work, [*TINY, *args_of("gpt2", "ep2-fsdp")], 4, "SIGKILL")


# ------------------------------------------------------------------------------------------------------------
# messages

MISTAKES = {
    "2 processes cannot be divided into ep 4: start 4 processes, or set --ep=2": (
        2,
        dict(ep=4),
        dict(n_expert=4),
    ),
    "6 processes cannot be divided into ep 4: start 4 or 8 processes, or set --ep=3": (
        6,
        dict(ep=4),
        dict(n_expert=12),
    ),
    "6 processes cannot be divided into ep 2 x tp 2 = 4: start 4 or 8 processes, or lower a degree": (
        6,
        dict(ep=2, tp=2),
        dict(n_expert=4),
    ),
    "ep is 4: it must divide n_expert, 6: set --ep=2": (4, dict(ep=4), dict(n_expert=6)),
    "ep is 3: it must divide n_expert, 8: set --ep=1": (3, dict(ep=3), dict(n_expert=8)),
    "ep is 2, but the model contains no experts: set --ep=1, or --n_expert=8": (2, dict(ep=2), {}),
    "ep is 3, but the model contains no experts: set --ep=1, or --n_expert=9": (3, dict(ep=3), {}),
    "ep is 16, but the model contains no experts: set --ep=1, or --n_expert=16": (16, dict(ep=16), {}),
    "cuda_graphs is for models without experts: set --cuda_graphs=False": (
        1,
        dict(cuda_graphs=True),
        dict(n_expert=4),
    ),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_degrees_that_do_not_divide(said):
    refuse_degrees(said, *MISTAKES[said])


SAID = {
    "ep is 2: it must divide n_expert, 3: set --ep=1": ["--ep=2", "--n_expert=3"],
    "n_expert_active is 5: set it to at most n_expert, 4": ["--n_expert=4", "--n_expert_active=5"],
    "n_expert is -4: it must be >= 0": ["--n_expert=-4"],
    "n_expert_active is 1: the weights of a token's experts add up to 1, and a router of a single expert "
    "learns nothing: set --n_expert_active=2": ["--n_expert=4", "--n_expert_active=1"],
}


def test_two_processes_say_a_mistake_once(zygote, work):
    """Rank 0; the other one waits until a launcher ends it."""
    for said, args in SAID.items():
        run = zygote.start([*TINY, *args], work, 2)
        wait_for(lambda: run.poll() or run.codes[0] is not None)
        run.kill([1])
        assert run.codes[0] == 1 and run.text().removeprefix("error: ") == f"{said}\n"
    assert not (work / "out").exists()
