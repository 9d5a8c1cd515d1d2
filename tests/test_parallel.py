"""
Tensor, pipeline and context parallelism: one curve, checkpoints for any layout, the same text. See
test_split.py.
"""

import shutil

import pytest
import torch
from runs import column
from test_parity import same
from test_zero import tensors_of

ONE = ["--gradient_accumulation_steps=3", "--batch_size=8", "--n_layer=4", "--n_head=4", "--max_iters=19"]
ONE += ["--eval_interval=10", "--keep_last=0", "--check_ranks_interval=5", "--muon_lr=0.005"]
MODELS = {
    "gpt2": [],
    "gpt2-deep": ["--n_layer=8"],  # two stages for each of four ranks
    "gpt2-bias": ["--bias=True"],
    "nanochat": ["--arch=nanochat", "--n_kv_head=2", "--optimizer=muon"],
    "llama": ["--arch=llama", "--n_kv_head=2", "--optimizer=muon"],
    "bfloat16": ["--dtype=bfloat16"],
}
FSDP, PP4 = "--zero=3", "--pp=4"
# (processes, flags); all read 24 sequences per step
WAYS = {
    "ddp2": (2, []),
    "zero1": (2, ["--zero=1"]),
    "zero3": (2, [FSDP]),
    "hsdp": (4, [FSDP, "--dp_replicate=2"]),
    "3": (3, ["--tp=1"]),
    "tp2": (2, ["--tp=2"]),
    "tp4": (4, ["--tp=4"]),
    "cp2": (2, ["--cp=2"]),
    "cp4": (4, ["--cp=4"]),
    "pp2-gpipe": (2, ["--pp=2", "--pp_schedule=gpipe"]),
    "pp2": (2, ["--pp=2"]),
    "pp2-interleaved": (2, ["--pp=2", "--pp_schedule=interleaved"]),
    "pp2-zero_bubble": (2, ["--pp=2", "--pp_schedule=zero_bubble"]),
    "pp2-zbv": (2, ["--pp=2", "--pp_schedule=zbv"]),
    "pp4-gpipe": (4, [PP4, "--pp_schedule=gpipe"]),
    "pp4": (4, [PP4]),
    "pp4-interleaved": (4, [PP4, "--pp_schedule=interleaved"]),
    "pp4-zero_bubble": (4, [PP4, "--pp_schedule=zero_bubble"]),
    "pp4-zbv": (4, [PP4, "--pp_schedule=zbv"]),
    "tp2-pp2": (4, ["--tp=2", "--pp=2"]),
    "tp2-pp2-zbv": (4, ["--tp=2", "--pp=2", "--pp_schedule=zbv"]),
    "tp2-cp2": (4, ["--tp=2", "--cp=2"]),
    "pp2-cp2": (4, ["--pp=2", "--cp=2"]),
    "ddp-tp2": (4, ["--tp=2"]),
    "3-pp2": (6, ["--pp=2"]),
    "zero1-tp2": (4, ["--zero=1", "--tp=2"]),
    "zero1-pp2": (4, ["--zero=1", "--pp=2"]),
    "zero2-pp2": (4, ["--zero=2", "--pp=2"]),
    "fsdp-tp2": (4, [FSDP, "--tp=2"]),
    "fsdp-pp2": (4, [FSDP, "--pp=2"]),
    "fsdp-pp2-zero_bubble": (4, [FSDP, "--pp=2", "--pp_schedule=zero_bubble"]),
    "fsdp-pp2-zbv": (4, [FSDP, "--pp=2", "--pp_schedule=zbv"]),
    "fsdp-cp2": (4, [FSDP, "--cp=2"]),
    "fsdp-tp2-pp2": (8, [FSDP, "--tp=2", "--pp=2"]),
    "fsdp-cp2-tp2": (8, [FSDP, "--cp=2", "--tp=2"]),
    "hsdp-tp2": (8, [FSDP, "--dp_replicate=2", "--tp=2"]),
    "tp2-full": (2, ["--tp=2", "--activation_checkpointing=full"]),
    "pp2-full": (2, ["--pp=2", "--activation_checkpointing=full"]),
    "cp2-selective": (2, ["--cp=2", "--activation_checkpointing=selective"]),
    "tp2-pp2-selective": (4, ["--tp=2", "--pp=2", "--activation_checkpointing=selective"]),
}
ONLY_RESUMED = ("ddp2", "zero1", "zero3", "hsdp")  # test_zero.py compares these with one process


@pytest.fixture(scope="module")
def ran(zygote, shared_work):
    """
    The folder of a run of 20 steps with checkpoints at steps 10 and 20, made when it is first asked for.
    """

    def run(model, way="one"):
        nproc, flags = (1, []) if way == "one" else WAYS[way]
        out = shared_work / f"{model}-{way}"
        if not out.exists():
            zygote.train([*ONE, *MODELS[model], *flags, f"--out_dir={out}"], shared_work, nproc)
        return out

    return run


def compare(one, other, steps=20, loss=2e-5, norm=1e-4):
    """Losses, gradient norms and validation losses of two runs' last steps."""
    for key, tolerance in (
        ("loss", {"absolute": loss}),
        ("grad_norm", {"relative": norm}),
        ("val_loss", {"absolute": loss}),
    ):
        a, b = ({s: v for s, v in column(out, key).items() if s >= 20 - steps} for out in (one, other))
        same(a, b, **tolerance)
    assert len(column(other, "loss")) == 20


# each in the quick tests, all with the slow ones
QUICK = [("gpt2", "pp2"), ("llama", "cp2")]
ALONE = [way for way in WAYS if way not in ONLY_RESUMED]
MORE = [("gpt2-deep" if PP4 in WAYS[way][1] else "gpt2", way) for way in ALONE]
MORE += [(arch, way) for arch in ("nanochat", "llama") for way in ("tp2", "pp2", "cp2", "fsdp-tp2-pp2")]
MORE += [("nanochat", "fsdp-cp2-tp2"), ("nanochat", "fsdp-tp2")]
MORE += [("gpt2-bias", "fsdp-tp2-pp2")]
EXTRA = (
    "pp2-gpipe",
    "pp2-zero_bubble",
    "pp4-gpipe",
    "pp4-interleaved",
    "pp4-zero_bubble",
    "cp4",
    "ddp-tp2",
    "zero2-pp2",
    "fsdp-pp2-zero_bubble",
    "hsdp-tp2",
    "fsdp-cp2-tp2",
    "tp2-full",
    "pp2-full",
    "pp4",
    "tp2-pp2-zbv",
    "zero1-pp2",
    "fsdp-pp2-zbv",
    "cp2-selective",
    "pp2-cp2",
)


def mark_of(way):
    """The mark of tests of a way that is not among the quick ones."""
    return pytest.mark.extra if way in EXTRA else pytest.mark.slow


EXTRA_PAIRS = (
    ("nanochat", "fsdp-cp2-tp2"),
    ("nanochat", "fsdp-tp2-pp2"),
    ("gpt2-bias", "fsdp-tp2-pp2"),
    ("llama", "fsdp-tp2-pp2"),
    ("nanochat", "cp2"),
    ("llama", "pp2"),
    ("gpt2", "fsdp-tp2"),
    ("gpt2", "tp2-pp2-selective"),
)
PAIRS = QUICK + [
    pytest.param(*pair, marks=pytest.mark.extra if pair in EXTRA_PAIRS else mark_of(pair[1]))
    for pair in MORE
    if pair not in QUICK
]


@pytest.mark.parametrize(("model", "way"), PAIRS)
def test_every_layout_has_the_curve_of_one_process(ran, model, way):
    compare(ran(model), ran(model, way))


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("tp2", marks=pytest.mark.slow),
        pytest.param("pp2-zbv", marks=pytest.mark.extra),
        pytest.param("fsdp-cp2", marks=pytest.mark.extra),
    ],
)
def test_bfloat16(ran, way):
    """bfloat16 has 8 bits: sums in a different order differ by up to 2**-8 of a loss of 4."""
    compare(ran("bfloat16"), ran("bfloat16", way), loss=5e-3, norm=0.05)


@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("tp2", "pp2", "fsdp-tp2-pp2")),
        *(pytest.param(way, marks=pytest.mark.extra) for way in ("pp2-zero_bubble", "cp2")),
    ],
)
def test_a_resume_on_the_same_layout_has_the_same_bits(zygote, shared_work, way):
    """With dropout; nanochat with Muon on eight processes."""
    nproc, flags = WAYS[way]
    args = [*ONE, *MODELS["nanochat" if nproc == 8 else "gpt2"], *flags]
    resume_with_the_same_bits(zygote, shared_work, way, args, nproc)


def resume_with_the_same_bits(zygote, cwd, name, args, nproc):
    """
    A run of eight steps, and the same one resumed after step 4: losses, weights, and the optimizer's state.
    """
    args = [*args, "--dropout=0.1", "--max_iters=7"]
    straight, stopped = cwd / f"straight-{name}", cwd / f"stopped-{name}"
    zygote.train([*args, "--save_interval=4", f"--out_dir={straight}"], cwd, nproc)
    shutil.copytree(straight, stopped, symlinks=True)
    shutil.rmtree(stopped / "step_00000008")
    zygote.train([*args, "--init_from=resume", f"--out_dir={stopped}"], cwd, nproc)
    assert len(column(stopped, "loss")) == 8 and column(straight, "loss") == column(stopped, "loss")
    a, b = tensors_of(straight), tensors_of(stopped)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


RESUMES = [
    ("gpt2", "one", "tp2"),
    ("gpt2", "tp2-pp2-zbv", "one"),
    ("gpt2", "one", "fsdp-tp2-pp2"),
    ("gpt2", "ddp2", "tp2"),
    ("gpt2", "zero1", "pp2-zbv"),
    ("gpt2", "hsdp", "cp2"),
    ("gpt2", "tp2", "one"),
    ("gpt2", "pp2", "tp2"),
    ("gpt2", "pp2-zbv", "pp2"),
    ("gpt2", "cp2", "pp2-zbv"),
    ("gpt2", "tp2-pp2", "cp2"),
    ("gpt2", "tp4", "zero3"),
    ("gpt2", "fsdp-tp2", "fsdp-pp2"),
    ("gpt2", "fsdp-pp2", "zero1-tp2"),
    ("gpt2", "zero1-tp2", "fsdp-tp2"),
    ("gpt2", "fsdp-tp2-pp2", "one"),
    ("gpt2", "fsdp-cp2-tp2", "hsdp"),
    ("gpt2", "fsdp-tp2-pp2", "fsdp-cp2-tp2"),
    ("nanochat", "fsdp-tp2-pp2", "one"),
    ("llama", "fsdp-cp2-tp2", "tp2"),
]


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        RESUMES[0],
        *(pytest.param(*r, marks=pytest.mark.slow) for r in RESUMES[1:6]),
        *(pytest.param(*r, marks=pytest.mark.extra) for r in RESUMES[6:]),
    ],
)
def test_a_checkpoint_resumes_on_a_different_layout(zygote, shared_work, ran, model, before, after):
    """Step 10's: ckpt.pt of one process, DDP and cp, else shards."""
    nproc, flags = ({"one": (1, [])} | WAYS)[after]
    out = shared_work / f"{model}-{before}-to-{after}"
    shutil.copytree(ran(model, before), out, symlinks=True)
    assert (out / "step_00000010/ckpt.pt").exists() == (before in ("one", "ddp2", "cp2"))
    args = [*ONE, *MODELS[model], *flags, "--init_from=resume", "--resume_step=10", f"--out_dir={out}"]
    zygote.train(args, shared_work, nproc)
    compare(ran(model), out, steps=10)


@pytest.mark.slow
def test_export_puts_the_parts_together(zygote, shared_work, ran):
    """
    Shards of tp x pp hold what export.py puts together: nanoGPT's ckpt.pt, near the weights of one process.
    """
    out = shared_work / "exported"
    shutil.copytree(ran("gpt2", "tp2-pp2-zbv"), out, symlinks=True)
    zygote.start([out, "--to=ckpt.pt"], shared_work, script="export.py").wait()
    weights, ours = (
        torch.load(out / "ckpt.pt", weights_only=True)["model"],
        tensors_of(ran("gpt2", "tp2-pp2-zbv")),
    )
    one = torch.load(ran("gpt2") / "step_00000020/ckpt.pt", weights_only=True)["model"]
    assert weights.keys() == one.keys()
    for name, value in weights.items():
        assert torch.equal(value, ours[name.replace("lm_head.weight", "transformer.wte.weight")])
        torch.testing.assert_close(value, one[name], atol=1e-4, rtol=1e-3)


SAMPLERS = {
    "tp2": (2, ["--tp=2"]),
    "pp2": (2, ["--pp=2"]),
    "tp2-pp2": (4, ["--tp=2", "--pp=2"]),
    "ddp-pp2": (4, ["--pp=2"]),
}
SAMPLES = [("llama", "tp2-pp2"), *((arch, way) for arch in ("gpt2", "nanochat", "llama") for way in SAMPLERS)]


@pytest.mark.parametrize(
    ("model", "way"),
    [SAMPLES[0], *(pytest.param(*s, marks=pytest.mark.slow) for s in dict.fromkeys(SAMPLES[1:4]))],
)
def test_the_text_is_that_of_one_process(zygote, shared_work, ran, model, way):
    compare_texts(zygote, shared_work, ran(model), *SAMPLERS[way])


def compare_texts(zygote, cwd, out, nproc, flags):
    """
    Beyond the context of 32 tokens; the most likely tokens, and random ones, which differ more from each
    other.
    """
    for temperature in (0, 1):
        args = [
            f"--out_dir={out}",
            "--device=cpu",
            "--dtype=float32",
            "--start=A",
            "--max_new_tokens=40",
            "--num_samples=3",
            f"--temperature={temperature}",
        ]
        one = zygote.start(args, cwd, script="sample.py").wait().samples()
        run = zygote.start([*args, *flags], cwd, nproc, script="sample.py").wait()
        assert run.samples() == one and one.count("A") >= 3
