"""
What only GPUs can show, the most important first: within nine minutes on one GPU. On several, layouts follow.

    pytest -m gpu --results=gpu.jsonl     if .ng is a clone of nanoGPT, its steps are timed too

Each test appends its result, and what it has measured, to this file. The limits are those that an H200 kept
(docs/benchmarks.md) unless a comment says otherwise. Without a GPU, other commands of pytest rehearse these
tests in small on the CPU, where no speed is judged.
"""

import json
import math
import os
import pickle
import re
import shutil
import signal
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # one of the tests runs this file

import numpy as np
import pytest
import torch
from runs import REPO, TINY, column, steps_in, tiny_data, wait_for

from isogpt.parallel import compilation
from model import GPT, GPTConfig

ON_GPU = torch.cuda.is_available()
DEVICE, PROCESSES = ("cuda", min(8, torch.cuda.device_count())) if ON_GPU else ("cpu", 2)
NAME = torch.cuda.get_device_name() if ON_GPU else "CPU"
IS_KNOWN = re.search("H[12]00", NAME) is not None  # on which limits of speed were measured
NANOGPT = REPO / ".ng"
BEGAN, SECONDS = time.monotonic(), 530 if PROCESSES == 1 else 3600
pytestmark = pytest.mark.gpu


def limited(seconds, slow=True):
    """The limit of a test on a GPU; elsewhere, whether it is a slow test."""
    if ON_GPU:
        return pytest.mark.timeout(seconds)
    return pytest.mark.slow if slow else pytest.mark.gpu


def case(name, seconds, slow=True):
    """A parameter with a limit."""
    return pytest.param(name, marks=limited(seconds, slow))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the data sets tiny and random, which has nanoGPT's metadata."""
    path = tmp_path_factory.mktemp("gpu")
    random = path / "data/random"
    random.mkdir(parents=True)
    size, vocab_size = (2**20, 50304) if ON_GPU else (2**14, 512)
    (random / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    for split in ("train", "val"):
        np.random.default_rng(0).integers(0, 512, size, np.uint16).tofile(random / f"{split}.bin")
    tiny_data(path)
    return path


@pytest.fixture(scope="module")
def plain():
    """What the last run of GPT-2 with the default settings has measured."""
    return {}


@pytest.fixture
def place(zygote, folder, request, record_property):
    """Starts scripts, of which those that still run when the test ends are killed, and notes results."""
    if (request.config.option.markexpr == "gpu") != ON_GPU:
        pytest.skip("pytest -m gpu needs a GPU to itself" if ON_GPU else "torch finds no GPU")
    if ON_GPU:
        limit = request.node.get_closest_marker("timeout").args[0]
        if time.monotonic() - BEGAN + limit > SECONDS:
            pytest.skip(f"of {SECONDS} s, less than {limit} are left")
    record_property("device", f"{NAME}, torch {torch.__version__}")
    runs = []

    def start(script, args, nproc=1, device=DEVICE, cwd=None):
        env = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled-{Path(script).parent.name}"}
        args = [*args, f"--device={device}"]
        # on a GPU with the measured peak and a plot that is drawn, as a user's run
        runs.append(zygote.start(args, cwd or folder, nproc, script, env=env, whole=ON_GPU))
        return runs[-1]

    yield SimpleNamespace(start=start, note=record_property, folder=folder)
    for run in runs:
        for pid, code in zip(run.pids, run.codes, strict=True):
            with suppress(ProcessLookupError):
                if code is None:
                    os.killpg(pid, signal.SIGKILL)  # with the processes that it has started
        run.gone(within=5)


def test_a_forked_run_may_use_a_gpu(zygote, tmp_path):
    """Red with a wheel of torch for CUDA if an import of the zygote asks the driver."""
    asks = "import torch\nprint(torch.cuda._is_in_bad_fork(), torch.cuda.is_available)"
    (tmp_path / "asks.py").write_text(asks)
    text = zygote.start([], tmp_path, script=tmp_path / "asks.py").wait().text()
    assert text.startswith("False <function is_available")


# ------------------------------------------------------------------------------------------------------------
# losses

FLOAT32, OF_A_MODEL = "--dtype=float32 --compile=False", re.compile("--(arch|optimizer|muon_lr|n_)")
MUON = "--arch=nanochat --optimizer=muon --muon_lr=0.005"
LLAMA, EXPERTS = "--arch=llama --n_kv_head=1", "--n_expert=4"
EXACT = f"{MUON} --exact=True --gradient_accumulation_steps=4 --dropout=0.1"
# how far losses may be from a CPU's in float32, with which flags
CURVES = {
    "float32": (1e-4, ["", "--zero=3", "--activation_checkpointing=full", "--zero=2 --cpu_offload=True"]),
    "models": (1e-4, [MUON, f"{MUON} --zero=3", LLAMA, f"{LLAMA} --zero=3", EXPERTS]),
    "half": (0.03, ["--dtype=bfloat16", "--dtype=float16", "--dtype=float16 --zero=2 --cpu_offload=True"]),
}
if ON_GPU:
    CURVES["half"][1].append("--dtype=tf32")
    options = ["", "--activation_checkpointing=selective", "--cuda_graphs=True"]
    CURVES["compiled"] = 1e-4, [f"--compile=True {flags}" for flags in options]


def train(place, rows, nproc=1):
    """
    The losses of 20 steps of a tiny model by name, from flags by name; NaN if a run fails. Those whose names
    begin with cpu are trained there.
    """
    names, losses = list(rows), {}
    at_once = 8 if ON_GPU and nproc == 1 else 2  # on a GPU, the starts take longer than the steps
    while names:
        runs = {}
        for name in names[:at_once]:
            args = [*TINY, "--max_iters=19", "--save_checkpoint=False", *rows[name].split()]
            where = (1, "cpu") if name.startswith("cpu") else (nproc, DEVICE)
            runs[name] = place.start("train.py", [*args, f"--out_dir={place.folder}/{name}"], *where)
        for name, run in runs.items():
            has_failed = any(run.wait(math.inf, ok=False).codes)
            losses[name] = [math.nan] if has_failed else [*column(place.folder / name, "loss").values()]
            if has_failed:
                print(name, run.codes, run.text()[-2000:])
        del names[:at_once]
    return losses


def difference(one, other):
    """The largest difference of two curves; NaN if one of the runs has failed."""
    return float(np.abs(np.subtract(one, other)).max())


def differences_from_cpu(place, rows, nproc=1):
    """Of rows of flags: the largest difference between their losses and those of the CPU in float32."""
    models = {row: " ".join(filter(OF_A_MODEL.match, row.split())) for row in rows}
    runs = {f"cpu {model}": f"{FLOAT32} {model}" for model in models.values()}
    losses = train(place, runs | {f"row {row}": f"{FLOAT32} {row}" for row in rows}, nproc)
    return {row: difference(losses[f"cpu {models[row]}"], losses[f"row {row}"]) for row in rows}


@pytest.mark.parametrize("group", [case(group, 60, slow=group != "float32") for group in CURVES])
def test_curves_are_those_of_a_cpu(place, group):
    most, rows = CURVES[group]
    found = differences_from_cpu(place, rows)
    place.note("differences", found)
    assert all(far <= most for far in found.values()), found


@limited(80, slow=False)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(place):
    ways = ["--dtype=float32", "--dtype=bfloat16", "--dtype=float32 --zero=3"]
    saved = "--deterministic=True --dropout=0.1 --save_checkpoint=True --save_interval=10"
    whole = {f"whole {way}": f"{way} {saved}" for way in ways}
    parts = {f"parts {way}": f"{way} {saved}" for way in ways}
    losses = train(place, whole | {name: f"{flags} --max_iters=9" for name, flags in parts.items()})
    losses |= train(place, {name: f"{flags} --init_from=resume" for name, flags in parts.items()})
    found = {way: difference(losses[f"whole {way}"], losses[f"parts {way}"]) for way in ways}
    place.note("differences", found)
    assert not any(found.values()), found


@limited(60)
def test_exact_has_the_same_bits_with_zero_3(place):
    rows = [f"{EXACT} --dtype={dtype}" for dtype in ("float32", "bfloat16")]
    losses = train(place, {f"{row} --zero={zero}": f"{row} --zero={zero}" for row in rows for zero in (0, 3)})
    found = {row: difference(losses[f"{row} --zero=0"], losses[f"{row} --zero=3"]) for row in rows}
    place.note("differences", found)
    assert not any(found.values()), found


@limited(80)
def test_compiled_gradients_are_those_of_eager_mode(place):
    text = place.start("tests/test_gpu.py", []).wait(math.inf).text()
    found = json.loads(text.splitlines()[-1])
    place.note("differences", found)
    assert all(far <= 1e-5 for far in found.values()), found


def gradient_errors(model_args):
    """The largest relative difference between compiled and eager gradients, with a loss in chunks."""
    vocab_size, most = 2**14, 2**24  # of logits without chunks, on a CPU
    if ON_GPU:  # 12 bytes of each take an eighth of the memory
        vocab_size, most = 50304, torch.cuda.get_device_properties().total_memory // (8 * 12)
    width = 256 if ON_GPU else 64
    shape = dict(block_size=256, vocab_size=vocab_size, n_layer=2, n_head=4, n_embd=width)
    rows = most // vocab_size // 256 + 1
    ids = torch.randint(vocab_size, (rows, 256), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    both = []
    for options in (None, {} if ON_GPU else {"backend": "aot_eager"}):
        model = GPT(GPTConfig(**shape, **model_args), seed=1).to(DEVICE)
        model.reset_routing(torch.device(DEVICE))
        if options is not None:
            torch._dynamo.reset()
            compilation.compile_parts(model, by_block=False, **options)
        model(ids, ids, 1024.0)[1].backward()
        both.append([p.grad for p in model.parameters()])
    return max(((b - a).norm() / a.norm()).item() for a, b in zip(*both, strict=True))


# ------------------------------------------------------------------------------------------------------------
# speed

# flags: how long a step of GPT-2 124M may take, relative to one with the default settings
SETTINGS = {
    "--exact=True": 1.1,  # predicted; 1.31 before it was compiled
    "--arch=nanochat --optimizer=muon": 1.15,
    "--dtype=bfloat16 --residual_dtype=bfloat16": 0.97,  # with a patch
}


def gpt2(place, flags="", script="train.py", cwd=None):
    """
    Train GPT-2 124M on random tokens, or a model for a CPU, with settings that nanoGPT has too. Returns the
    output, and the median of the later steps in ms with the seconds from the start to the first step.
    """
    shape = "--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=2 --dtype=float32 --max_iters=12"
    if ON_GPU:
        shape = "--block_size=1024 --batch_size=16 --dtype=bfloat16 --max_iters=40"
    rest = "--gradient_accumulation_steps=1 --eval_interval=100000 --eval_iters=1 --log_interval=1"
    rest += f" --bias=False --dropout=0.0 --compile={ON_GPU} --out_dir={place.folder}/gpt2"
    data, began = f"--dataset={place.folder}/data/random", time.monotonic()
    run = place.start(script, [*shape.split(), *rest.split(), data, *flags.split()], cwd=cwd)
    run.until(lambda text: "iter 0: loss" in text, math.inf)
    first_s = time.monotonic() - began
    text = run.wait(math.inf).text()
    times = [float(ms) for ms in re.findall(r"time ([0-9.]+)ms", text)]
    return text, {"step_ms": statistics.median(times[len(times) // 3 :]), "first_s": first_s}


def ours(place, flags=""):
    """Train GPT-2 with isoGPT; also returns the peak of the memory."""
    text, found = gpt2(place, f"--save_checkpoint=False --check_layout=False {flags}")
    assert not ON_GPU or ", 0 graph breaks" in text
    return found | {"memory_gb": max(column(place.folder / "gpt2", "memory_gb_max").values())}


@pytest.mark.parametrize("cache", [case("cold", 130, slow=False), case("warm", 60)])
def test_a_step_takes_as_long_as_nanogpts(place, plain, cache):
    plain |= ours(place)
    place.note("isoGPT", dict(plain))
    if NANOGPT.exists():
        clone = place.folder / "nanoGPT"
        shutil.copytree(NANOGPT, clone, ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
        _, theirs = gpt2(place, "--wandb_log=False", clone / "train.py", clone)
        place.note("nanoGPT", theirs)
        assert not ON_GPU or theirs["step_ms"] >= 0.95 * plain["step_ms"]
        assert not ON_GPU or cache == "warm" or theirs["first_s"] >= 0.8 * plain["first_s"]
    assert not IS_KNOWN or plain["step_ms"] <= 37


@limited(70)
@pytest.mark.parametrize("flags", SETTINGS)
def test_how_much_longer_a_step_takes_with_a_setting(place, plain, flags):
    plain |= plain or ours(place)
    found = ours(place, flags)
    place.note("isoGPT", found)
    assert not IS_KNOWN or found["step_ms"] <= SETTINGS[flags] * plain["step_ms"]


# ------------------------------------------------------------------------------------------------------------
# several GPUs, which were never tried

# flags: what divides the number of GPUs, and how far losses may be from a CPU's
LAYOUTS = dict.fromkeys(["", "--zero=1", "--zero=2", "--zero=3", "--layout=auto"], (1, 1e-4))
LAYOUTS |= dict.fromkeys(["--tp=2", "--pp=2", "--cp=2", "--zero=3 --tp=2"], (2, 1e-4))
LAYOUTS |= dict.fromkeys(["--zero=3 --dp_replicate=2", f"{EXPERTS} --ep=2 --zero=3"], (2, 1e-4))
LAYOUTS |= {"--zero=3 --tp=2 --pp=2": (8, 1e-4), "--grad_compression=fp16": (1, 2e-3)}
LAYOUTS |= dict.fromkeys(["--grad_compression=bf16", "--grad_compression=int8"], (1, 0.02))
LAYOUTS |= {"--grad_compression=powersgd:1": (1, 0.3), "--islands=2 --local_steps=4": (2, 0.3)}
if ON_GPU:
    LAYOUTS["--compile=True"] = 1, 1e-4
else:  # test_layouts.py and others train the others on a CPU
    LAYOUTS = {flags: LAYOUTS[flags] for flags in ("--zero=3", "--pp=2", "--grad_compression=int8")}


@limited(60)
@pytest.mark.parametrize("flags", LAYOUTS)
def test_layouts_have_the_curve_of_a_cpu(place, flags):
    divisor, most = LAYOUTS[flags]
    skip_unless(divisor)
    found = differences_from_cpu(place, [flags], PROCESSES)[flags]
    place.note("difference", found)
    assert found <= most


@limited(60)
@pytest.mark.parametrize("zero", [0, 1, 3] if ON_GPU else [3])
def test_exact_has_the_same_bits_on_several_gpus(place, zero):
    skip_unless(1)
    rows = {"exact": f"{EXACT} --dtype=float32 --zero={zero}"}
    one, several = (train(place, rows, n)["exact"] for n in (1, PROCESSES))
    assert difference(one, several) == 0


@limited(60)
def test_a_killed_rank_ends_the_others(place):
    skip_unless(1)
    args = [*TINY, *FLOAT32.split(), "--max_iters=1000000", f"--out_dir={place.folder}/killed"]
    run = place.start("train.py", args, PROCESSES)
    wait_for(lambda: run.poll() or steps_in(place.folder / "killed") >= 20)
    run.kill([PROCESSES - 1])
    assert run.gone(within=20) and f"rank {PROCESSES - 1}" in run.text()


def skip_unless(divisor):
    """Skip a test that needs several GPUs, whose number this one divides."""
    if PROCESSES < 2 or PROCESSES % divisor:
        pytest.skip(f"torch finds {PROCESSES} GPU")


if __name__ == "__main__":  # in a process of its own, which can be killed
    models = {"gpt2": {}, "nanochat": {"arch": "nanochat"}}
    models["llama"] = {"arch": "llama", "n_kv_head": 2, "n_expert": 4}
    found = {name: gradient_errors(args) for name, args in list(models.items())[: 3 if ON_GPU else 1]}
    print(json.dumps(found))
