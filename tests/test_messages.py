"""Messages that no other test raises."""

import argparse
import json
import math
import os
import pickle
import re
import resource
import shlex
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import REPO, default_plan, script_that_fails, settings_of_train, start_changed, train_defaults

import configurator
import export
from isogpt.checkpoint.ckpt_file import nanogpt_state, read_file
from isogpt.checkpoint.measures import NONE
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.search import StoredCheckpoint, newest_checkpoint
from isogpt.checkpoint.source import WPE, check_weights, open_checkpoint
from isogpt.checkpoint.start import Start
from isogpt.checkpoint.state import TrainState, restore_checkpoint
from isogpt.data.vocabulary import Vocabulary
from isogpt.launch.process_group import Ranks
from isogpt.launch.start_checks import check_start
from isogpt.monitor import watchdog
from isogpt.monitor.crashes import explain_crashes
from isogpt.monitor.log import Logger
from isogpt.monitor.out_of_memory import MemoryUse, is_out_of_memory
from isogpt.monitor.sink_console import Console
from isogpt.monitor.sink_metrics import MetricsFile
from isogpt.monitor.watchdog import Watchdog
from isogpt.nn.counts import count_on_meta
from isogpt.options import ranges
from isogpt.parallel.shares import share_of
from isogpt.parallel.slow_network import SlowNetwork
from isogpt.training import optim
from isogpt.training.settings import check_training, notes_about_text, read_prompt
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------------------
# helpers

SHAPE = dict(n_layer=1, n_head=2, n_embd=8, block_size=16, bias=False, vocab_size=65)
ARGS = asdict(GPTConfig(**SHAPE))
COUNTS = count_on_meta(GPT, ARGS)
PLAN = default_plan(world_size=2, model_args=ARGS, counts=COUNTS, batch_size=4, micro_batch=4)
CPU = torch.device("cpu")
ADAMW = ("step", "exp_avg", "exp_avg_sq")


def tiny_model():
    return GPT(GPTConfig(**SHAPE), 0)


def one_rank(world_size=1):
    """Rank 0 on a CPU, without a process group."""
    return Ranks(0, world_size, CPU, "gloo")


def tiny_watchdog(timeout_s, step):
    """A watchdog of one rank, which is in the forward pass."""
    progress = Progress(tokens_per_step=64, step=step)
    dog = Watchdog(one_rank(), timeout_s, progress, Logger(progress, [Console()]))
    dog.clock = SimpleNamespace(count=5, doing="forward", expects_progress=True)
    dog.saver = SimpleNamespace(writes_alone=lambda: False)
    return dog


def save_in(folder, dataset="letters", **changes):
    """Write a ckpt.pt in nanoGPT's form and a data set with its vocabulary."""
    model = tiny_model()
    run = {
        "model_args": dict(SHAPE),
        "iter_num": 3,
        "best_val_loss": 1.5,
        "config": {"dataset": dataset},
        "isogpt": {},
    }
    state = nanogpt_state(run, model, optim.make_optimizers(model, train_defaults()))
    folder.mkdir(parents=True)
    torch.save({**state, **changes}, folder / "ckpt.pt")
    data_in(folder.parent / "data" / "letters", {"stoi": {"A": 0}, "itos": ["A"], "vocab_size": 65})
    return folder


def data_in(folder, meta=None, train=range(65), pkl=None):
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        np.array(train, np.uint16).tofile(folder / f"{split}.bin")
    if meta is not None:
        (folder / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    if pkl is not None:
        (folder / "meta.pkl").write_bytes(pickle.dumps(pkl))
    return str(folder)


def opened(at, **changes):
    """Open a ckpt.pt with changes."""
    return open_checkpoint(StoredCheckpoint(save_in(at.path / "out", **changes) / "ckpt.pt", 3))


def fork(at, model=None, args=None, **changes):
    """
    Open and check the ckpt.pt of a nanoGPT fork: `model` and `args` are added to its weights and model_args.
    """
    state = torch.load(save_in(at.path / "out") / "ckpt.pt", weights_only=True)
    del state["isogpt"]
    state |= {
        "model": state["model"] | (model or {}),
        "model_args": state["model_args"] | (args or {}),
        **changes,
    }
    torch.save(state, at.path / "out/ckpt.pt")
    source = open_checkpoint(newest_checkpoint("out")[0])
    check_weights(source, tiny_model())
    return source


def resume_fork(at, **changes):
    """Resume it on a model with AdamW; returns what a user is told."""
    source, model = fork(at, **changes), tiny_model()
    restore_checkpoint(source, model, [model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")])
    return Progress(64).load(source)


def weights_without(at, name):
    source = opened(at)
    del source.tensors[f"model.{name}"]
    check_weights(source, tiny_model())


def convert_twice(at):
    folder = save_in(at.path / "out")
    export.convert(str(folder), "shards")
    export.convert(str(folder), "shards")


# ------------------------------------------------------------------------------------------------------------
# messages of single functions

RAISED = {
    "ckpt.pt is a pointer of Git LFS, not the file itself: run git lfs pull in .": lambda at: (
        Path("ckpt.pt").write_text("version https://git-lfs"),
        read_file(Path("ckpt.pt")),
    ),
    "ckpt.pt cannot be loaded: could not convert string to float: 'low'": lambda at: opened(
        at, best_val_loss="low"
    ),
    "ckpt.pt cannot be loaded: iter_num is -3": lambda at: opened(at, iter_num=-3),
    "ckpt.pt cannot be loaded: config is of type list, not a dict": lambda at: opened(at, config=[1]),
    "ckpt.pt cannot be loaded: isogpt is of type int, not a dict": lambda at: opened(at, isogpt=5),
    (
        "out/ckpt.pt: nanoGPT's model does not know use_rope=True, norm='rms' in model_args: load it with the"
    ): lambda at: fork(at, args={"use_rope": True, "norm": "rms", "flash_attn": True}),
    "ckpt.pt does not fit the model: it lacks transformer.wpe.weight": lambda at: weights_without(at, WPE),
    "also contains transformer.h.0.attn.q_norm.weight, which nanoGPT's model does not": lambda at: fork(
        at, model={"transformer.h.0.attn.q_norm.weight": torch.ones(4)}
    ),
    "lm_head.weight and transformer.wte.weight should be the same weights, but differ": lambda at: fork(
        at, model={"lm_head.weight": torch.ones(65, 8)}
    ),
    "the shape of optim.transformer.wte.weight.exp_avg is (1,), not (65, 8)": lambda at: resume_fork(
        at, optimizer={"state": dict.fromkeys(range(99), dict.fromkeys(ADAMW, torch.ones(1)))}
    ),
    (
        "no valid checkpoint in out; out/ckpt.pt cannot be loaded: it contains argparse.Namespace, and only"
    ): lambda at: export.convert(
        str(save_in(at.path / "out", config=argparse.Namespace()).relative_to(at.path)), "ckpt.pt"
    ),
    "step_00000003 is in shards already": convert_twice,
}


@pytest.mark.parametrize("text", RAISED)
def test_message_of_a_function(at, text):
    with pytest.raises((ValueError, SystemExit, pickle.UnpicklingError)) as error:
        RAISED[text](at)
    assert text in str(error.value)


def test_a_faulty_network(at, capsys):
    at.set(dist, "all_reduce", lambda t: t.fill_(1.0))
    with pytest.raises(SystemExit):
        check_start(one_rank(world_size=2), {})
    assert (
        capsys.readouterr().err == "error: an all-reduce over 2 ranks returned 1.0: the network is faulty\n"
    )


def test_checkpoints_of_nanogpts_forks(at):
    """Missing entries, wrappers' prefixes, other optimizers and fields that change nothing."""
    args = {"flash_attn": True, "device": "cuda", "dropout": None}
    source = fork(at, args=args, config=None, optimizer=None)
    assert (source.run["iter_num"], source.run["best_val_loss"], source.run["config"]) == (3, 1.5, {})
    assert set(source.run["model_args"]) == {*SHAPE, "dropout"} and source.stored.val_loss == 1.5
    # no moments: a resume says so, and nothing else needs them
    for saved in (None, {"state": {0: {"momentum_buffer": torch.ones(1)}}}):
        shutil.rmtree("out")
        assert resume_fork(at, optimizer=saved, config={"optimizer": "lion"}) == [
            "out/ckpt.pt contains no state of AdamW: the moments start at zero"
        ]
    assert export.convert("out", "shards").name == "step_00000003"
    # the prefixes of wrappers, in any order and place
    for prefix in ("module._orig_mod.", "_fsdp_wrapped_module._orig_mod."):
        shutil.rmtree("out")
        state = torch.load(save_in(at.path / "out") / "ckpt.pt", weights_only=True)
        model = {
            prefix + name.replace("h.0.", "h.0._checkpoint_wrapped_module."): w
            for name, w in state["model"].items()
        }
        torch.save({**state, "model": model}, "out/ckpt.pt")
        check_weights(open_checkpoint(newest_checkpoint("out")[0]), tiny_model())
    # without a loss
    shutil.rmtree("out")
    source, progress = fork(at, best_val_loss=float("inf")), Progress(64)
    assert progress.load(source) == [] and progress.best_step == NONE and source.stored.val_loss is None
    assert export.list_checkpoints("out").splitlines()[1].split()[:3] == ["3", "bare", "-"]


def test_numbers_of_numpy_in_a_checkpoint_are_plain_values(at):
    """nanoGPT stores all settings, also those that a config has computed with numpy."""
    config = {"learning_rate": np.float64(0.25), "max_iters": np.int64(4)}
    run = opened(at, config=config, best_val_loss=None).run
    assert run["config"] == config and run["best_val_loss"] == math.inf


def test_a_converted_checkpoint_has_the_settings_of_the_run(at):
    """nanoGPT continues with the betas and the weight decay that are in the file."""
    config = {"learning_rate": 0.25, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.125, "dataset": "letters"}
    save_in(at.path / "out", config=config)
    export.convert("out", "shards")
    for changes, expected in ((config, (0.25, (0.5, 0.75), [0.125, 0])), ({}, (6e-4, (0.9, 0.95), [0.1, 0]))):
        path = export.convert("out", "ckpt.pt")
        state = torch.load(path, weights_only=True)
        if not changes:  # as of a model of transformers, which has no run
            path = export.convert_hf(
                str(export.write_hf("out", tiny_model(), Vocabulary("table", {"A": 0}), ""))
            )
            state = torch.load(path, weights_only=True)
        groups = state["optimizer"]["param_groups"]
        assert (groups[0]["lr"], groups[0]["betas"], [g["weight_decay"] for g in groups]) == expected


def test_a_full_disk_is_reported_once_by_the_log_and_tears_no_line(capsys, tmp_path):
    """The limit on the size of files cuts a write off, as a full disk does."""
    metrics = MetricsFile({"out_dir": str(tmp_path), "max_iters": 9, "eval_interval": 1}, 3)
    logger = Logger(Progress(1), [metrics])
    logger.write({"iter": 1})
    path = tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        for _ in range(2):
            logger.write({"iter": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    logger.write({"iter": 3})
    assert [json.loads(line)["iter"] for line in path.read_text().splitlines()] == [1, 3]
    said = f"warning: MetricsFile failed ([Errno 28] No space left on device: '{path}'); training continues"
    assert capsys.readouterr().err.count(said) == 1


# ------------------------------------------------------------------------------------------------------------
# hangs and crashes


def test_a_hang_in_which_all_ranks_respond(at, capsys):
    codes = []
    at.set(watchdog, "BEAT_S", 0.1)
    at.set(os, "_exit", lambda status: (codes.append(status), dog.over.set()))
    dog = tiny_watchdog(timeout_s=0.1, step=5)
    dog.start(dist.HashStore())
    assert dog.over.wait(20) and codes == [1]
    dog.stop()
    text = (
        "error: rank 0 at step 5, forward: no progress for 0.1 s; all ranks respond: rank 0 at step 5, "
        "forward\n"
    )
    assert text in capsys.readouterr().err
    at.env("MASTER_ADDR", "h1")
    at.env("MASTER_PORT", "29500")
    silence = threading.Event()
    answer = dog.ask(lambda: silence.wait(60) and "", 0.05)
    silence.set()
    assert answer == "the store of rank 0 or its agent at h1:29500 does not respond"


NCCL = (
    "NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function "
    "failed.\nLast error:"
)
FORMS = [
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
    (torch.AcceleratorError, "CUDA error: out of memory\nCUDA kernel errors might be reported at some other"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (dist.DistBackendError, f"{NCCL}\nCuda failure 2 'out of memory'"),
    (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried"),
    (RuntimeError, "MPS backend out of memory (MPS allocated: 5.00 GB, other allocations: 2.00 GB)"),
]


def test_forms_of_running_out_of_memory_on_any_rank(at, capsys):
    """
    The first rank that has this problem explains it, whichever it is, and tells the others what ended it.
    """

    def leave(status):
        raise SystemExit(status)

    at.set(os, "_exit", leave)
    at.set(sys, "excepthook", sys.excepthook)
    dog, store = tiny_watchdog(timeout_s=600, step=50), dist.HashStore()
    reader = SimpleNamespace(share=share_of(4, 0, 1, 4), plan=PLAN)
    dog.memory_use = MemoryUse("out", reader, first_step=50)
    dog.ranks = Ranks(3, 4, CPU, "gloo", hosts=("a",) * 4)
    for number, (kind, text) in enumerate(FORMS):
        dog.store = dist.PrefixStore(str(number), store)
        explain_crashes(dog)
        for is_first in (True, False):
            with pytest.raises(SystemExit):
                sys.excepthook(kind, kind(text), None)
            said = capsys.readouterr().err
            line = "Cuda failure 2 'out of memory'" if "NCCL" in text else text.splitlines()[0]
            assert (
                said.startswith(f"error: rank 3: out of memory with micro-batches of 4: {line}\nGB on")
                == is_first
            )
            assert is_first or not said
            assert ("the next start in out uses micro-batches of 2 (same global batch" in said) == is_first
        assert dog.read_beats()[3].fate == f"{kind.__name__}: {line}"
        dog.fate = None
    assert not is_out_of_memory(RuntimeError("Triton: out of resource: shared memory, Required: 1"))


# ------------------------------------------------------------------------------------------------------------
# sample.py


@pytest.mark.parametrize(
    "path, said",
    [
        ("s3://bucket/run", "is s3://bucket/run, an address of s3: set the path of a folder"),
        ("s3:/bucket", "an address of s3"),
        ("$HOME/x", "only a shell replaces $HOME"),
        ("a/${USER}", "only a shell replaces ${USER}"),
        ("C:\\runs\\a", "a path of Windows, but this is "),
        ("n" * 300, "a name of 300 characters, which is too long"),
        ("link/run", ""),
        ("link", "is link, a link to nowhere, which does not exist: create it, or delete the link"),
        ("loop", "a link to loop, which does not exist"),
        ("a:b/c $", ""),
    ],
)
def test_names_that_are_no_folders(at, path, said):
    at.chdir(at.path)
    Path("link").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    settings = settings_of_train()
    for name in ("out_dir", "dataset", "init_from"):
        sentences = ranges.problems(settings, train_defaults(**{name: path}))
        if name == "init_from" and "://" in path:  # a URL of a run's mirror
            assert not sentences
            continue
        assert [sentence.startswith(f"{name} is ") for sentence in sentences] == [True] * bool(said)
        assert said in "".join(sentences)
    assert not ranges.problems(settings, train_defaults(init_from="auto:/runs/a"))


def test_advice_on_heads_of_keys_and_values_works_with_gpt2():
    for n_kv_head in (3, 5, 8, 24):  # of 12 heads
        with pytest.raises(ValueError, match="^n_kv_head .*: set --n_kv_head=0|^arch.*--n_kv_head=0.*$") as e:
            check_training(train_defaults(n_kv_head=n_kv_head))
        assert "\n" not in str(e.value)


def test_prompts_of_sample_py(at, capsys, monkeypatch):
    """
    A file's text is not changed, but for its byte order mark; what a shell's user may have meant is one note.
    """
    monkeypatch.setenv("HOME", str(at.path))
    monkeypatch.setenv("USERPROFILE", str(at.path))
    Path("p.txt").write_bytes(b"\xef\xbb\xbfA\\nB\n")
    assert read_prompt("FILE:p.txt") == read_prompt("FILE:~/p.txt") == "A\\nB\n"
    Path("p.txt").write_text("A", encoding="utf-16")
    with pytest.raises(
        ValueError, match=r"^--start=FILE:p.txt must name a file of text in UTF-8: 'utf-8' .*$"
    ):
        read_prompt("FILE:p.txt")
    assert not any(notes_about_text(text, "") for text in ("A\n", "FILE:\\new.txt"))
    for text in ("ROMEO:\\n", 'it\'s \\n "so"'):
        for name, note in zip(("start", "stop"), notes_about_text(text, text), strict=True):
            typed = note.removeprefix(rf"--{name} contains \n as two characters: for a line break, type ")
            settings_of_sample = configurator.configure(
                {"__file__": str(REPO / "sample.py")}, shlex.split(typed)
            )
            assert settings_of_sample[name] == text.replace("\\n", "\n")
    save_in(at.path / "out")
    output = script_that_fails(at, capsys, "sample.py", ["--device=cpu", "--start=A\\n"]).err.splitlines()
    note = """note: --start contains \\n as two characters: for a line break, type --start='"A\\n"'"""
    assert (
        len(output) == 3 and output[1] == note and output[2].startswith("error: --start: the text contains")
    )


def test_mistakes_of_sample_py(at, capsys):
    save_in(at.path / "out")

    def fails(*args):
        return script_that_fails(at, capsys, "sample.py", ["--device=cpu", *args]).err

    state = torch.load("out/ckpt.pt", weights_only=True)
    state["model"]["transformer.wpe.weight"][0] = torch.nan
    save_in(at.path / "bad/out", model=state["model"])
    problem = (
        "weights in bad/out/ckpt.pt are not finite (transformer.wpe.weight), so the model predicts nothing"
    )
    advice = "use a checkpoint from before the loss became NaN"
    assert f"error: {problem}: {advice}\n" in fails("--out_dir=bad/out", "--start=A")
    with pytest.raises(ValueError, match=re.escape(problem)):
        export.convert("bad/out", "hf")
    checkpoint, model = open_checkpoint(newest_checkpoint("bad/out")[0]), tiny_model()
    optimizers = optim.make_optimizers(model, train_defaults())
    state = TrainState(model, optimizers, None, Progress(64), SlowNetwork(model, None, None))
    for is_resume in (True, False):
        with pytest.raises(SystemExit):
            Start("resume", is_resume, checkpoint).load(state, seed=0)
        assert capsys.readouterr().err == f"error: {problem}: {advice}\n"
    shutil.rmtree("data")
    unknown = (
        "the ids cannot be decoded: the checkpoint, whose data set letters is not here, does not say "
        "what they mean"
    )
    assert unknown in fails("--start=A")


def test_the_optimizers_state_may_be_infinite_but_not_nan():
    model = tiny_model()
    optimizers = optim.make_optimizers(model, train_defaults())
    state = TrainState(model, optimizers, None, Progress(64), None)
    state.check_finite("out")
    for optimizer in optimizers:
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p] = {"step": torch.ones(()), "exp_avg": torch.zeros_like(p)}
            optimizer.state[p]["exp_avg_sq"] = torch.full_like(p, torch.inf)
    state.check_finite("out")
    optimizer.state[p]["exp_avg"][0] = torch.nan
    with pytest.raises(
        ValueError, match=r"the optimizer's state in out is NaN \(.*\.exp_avg\): use an older"
    ):
        state.check_finite("out")


def test_an_export_keeps_what_a_user_has_put_into_the_folder(at, capsys):
    """For example the .gguf file that llama.cpp's converter writes next to the model."""

    def save(folder, *_):
        (folder / "config.json").write_text("new")

    at.set(export.tokenizer, "save_tokenizer", lambda folder, *_: folder.mkdir())
    at.set(export.huggingface, "save", save)
    (at.path / "hf").mkdir()
    for name in ("config.json", "model.gguf"):
        (at.path / "hf" / name).write_text("old")
    for kept in ("hf_1", "", "hf_2", "hf_3"):
        if kept == "hf_2":
            (at.path / "hf/notes").mkdir()
        if kept == "hf_3":
            (at.path / "hf/README.md").write_text("a model card that somebody has written")
        assert export.write_hf(str(at.path), tiny_model(), None, export.CARD_HEAD) == at.path / "hf"
        assert sorted(path.name for path in (at.path / "hf").iterdir()) == ["README.md", "config.json"]
        assert (at.path / "hf/config.json").read_text() == "new"
        said = capsys.readouterr().err
        assert (f"it is now {at.path / kept}\n" in said) if kept else not said
    assert (at.path / "hf_1/model.gguf").read_text() == "old" and (at.path / "hf_2/notes").is_dir()


# ------------------------------------------------------------------------------------------------------------
# runs


def lines_of(run):
    return [" ".join(line.split()) for line in run.text().splitlines()]


# train.py on a machine whose matmul peak cannot be measured, with a slow rank
LACKING = """
from isogpt.monitor import anomalies
from isogpt.speed import devices
def unmeasured(*args):
    raise RuntimeError("no matmul")
devices.measured_matmul = unmeasured
anomalies.SlowRanks.seen = lambda self, columns: ["rank 0: forward ms 40.0, others 10.0"]
"""


def test_messages_of_a_run(zygote, work):
    """
    A run, and others in the same folder: with a package missing that is needed, which is reported before the
    earlier run is moved aside, and with everything missing that may be missing.
    """
    args = ["--n_layer=1", "--max_iters=0", "--eval_iters=1", "--out_dir=out"]
    lines = lines_of(zygote.train([*args, "--eval_interval=1"], work))
    for start in (
        "data:",
        "model:",
        "ranks:",
        "step:",
        "peak:",
        "step 0: train loss ",
        "iter 0: loss ",
        "done:",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    assert {"saved out/step_00000001", "the loss curve: out/loss.png"} < {*lines}

    before = sorted(path.name for path in (work / "out").iterdir())
    lacking = 'sys.modules["tensorboard"] = None'
    run = start_changed(zygote, lacking, [*args, "--tensorboard_log=True"], work).wait(ok=False)
    assert run.codes == [1] and run.text().startswith("error: tensorboard_log needs tensorboard (")
    assert run.text().endswith("): pip install tensorboard\n") and run.text().count("\n") == 1
    assert sorted(path.name for path in (work / "out").iterdir()) == before

    more = ["--compile=False", "--profile=True", "--save_checkpoint=False"]
    run = start_changed(zygote, LACKING, [*args, *more], work).wait()
    lines = lines_of(run)
    for whole in (
        "out contained an earlier run, which was moved to out/previous_1",
        "peak: unknown, no mfu",
        "warning: --profile traces the steps after the fifth, so it needs 10 steps, not 1",
        "warning: a slow rank: rank 0: forward ms 40.0, others 10.0",
    ):
        assert lines.count(whole) == 1, (whole, lines)
    assert sum(line.endswith("float32; compile: off") for line in lines) == 1, lines


# ------------------------------------------------------------------------------------------------------------
# the console


ASCII = "for stream in (sys.stdout, sys.stderr): stream.reconfigure(encoding='ascii')"


def test_what_a_console_cannot_show_ends_no_run(zygote, at):
    """
    On a console that knows ASCII only: names and text that are not ASCII, and a lone surrogate, which is not
    even UTF-8.
    """
    meta = {"vocab_size": 2, "stoi": {"\u00e9": 0, "\ud800": 1}, "itos": ["\u00e9", "\ud800"]}
    data_in(at.path / "data" / "tiny", pkl=meta, train=[0, 1] * 40)
    out = "--out_dir=r\u00e9sum\u00e9"
    args = ["--block_size=8", "--max_iters=0", "--eval_iters=1", out]
    train = start_changed(zygote, ASCII, args, at.path).wait()
    assert r"saved r\xe9sum\xe9/step_00000001" in train.text().splitlines()
    args = [out, "--start=\u00e9", "--num_samples=3", "--max_new_tokens=20", "--device=cpu"]
    _, *lines = start_changed(zygote, ASCII, args, at.path, script="sample.py").wait().samples().splitlines()
    assert len(lines) == 6 and lines[1::2] == ["---------------"] * 3
    assert all(re.fullmatch(r"\\xe9(\\xe9|\\ud800){20}", line) for line in lines[::2])
    assert r"\ud800" in "".join(lines)
    args = ["r\u00e9sum\u00e9", "--to=shards"]
    export = start_changed(zygote, ASCII, args, at.path, script="export.py").wait()
    assert export.text() == "wrote r\\xe9sum\\xe9/step_00000001\n"


def test_a_closed_pipe_ends_a_script_quietly(at):
    """
    As after `| head`: no traceback, and nothing about an exception that is ignored at the exit, at which a
    process of its own is needed.
    """
    save_in(at.path / "out")
    read, write = os.pipe()
    os.close(read)
    generate = ["--start=A", "--num_samples=2", "--max_new_tokens=5", "--device=cpu"]
    for script, *args in (["train.py", "--help"], ["sample.py", *generate], ["export.py", "out"]):
        run = [sys.executable, str(REPO / script), *args]
        env = os.environ | {"PYTHONUNBUFFERED": ""}
        run = subprocess.run(run, env=env, stdout=write, stderr=subprocess.PIPE, text=True)
        assert run.returncode == 0 and "Error" not in run.stderr
        assert script == "sample.py" or not run.stderr
    os.close(write)


# ------------------------------------------------------------------------------------------------------------
# Slurm

NODE = """#!/bin/sh
case $0 in
    */srun) mkdir -p out && echo "{\\"iter\\": 7, \\"steps\\": $STEPS}" > out/PREEMPTED ;;
    */squeue) date -d "+60 seconds" +%Y-%m-%dT%H:%M:%S ;;
    */scontrol) echo "$@" >> asked ;;
esac
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="slurm.sh needs bash")
def test_messages_of_slurm_sh(at):
    """With a fake srun that stops on request, without Slurm."""
    for name in ("srun", "scontrol", "squeue"):
        (at.path / name).write_text(NODE)
        (at.path / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": ".",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
    }
    env = {**os.environ, **slurm, "HEAD": "n1", "PATH": f"{at.path}:{os.environ['PATH']}"}
    command = ["bash", str(REPO / "cluster" / "slurm.sh")]
    run = subprocess.run([*command, "config/train_gpt2.py"], env=env, capture_output=True, text=True)
    text = (
        "error: slurm.sh: set the run's folder with --out_dir=FOLDER, which tells the job whether the run is "
        "complete\n"
    )
    assert run.returncode == 2 and run.stderr == text
    weights = [*command, "--out_dir=out", "--init_from=gpt2-xl"]
    run = subprocess.run(weights, env=env, capture_output=True, text=True)
    assert run.returncode == 2 and "type --init_from=auto:gpt2-xl to start from weights" in run.stderr
    run = subprocess.run([*command, "--out_dir=out"], env=env, capture_output=True, text=True)
    assert run.returncode == 2 and "of which SAVING=120 s are reserved" in run.stderr
    assert "longer --time, or with a smaller SAVING" in run.stderr
    # a job that is stopped before its first step again and again would be requeued for ever
    for steps, is_requeued in ((1, True), (9, True), (0, True), (1, False)):
        Path("asked").write_text("")
        more = {"SAVING": "5", "STEPS": str(steps)}
        run = subprocess.run([*command, "--out_dir=out"], env=env | more, capture_output=True, text=True)
        assert run.returncode == (0 if is_requeued else 1), run.stderr
        assert run.stdout == "slurm.sh: stopped on request, requeueing the job\n" * is_requeued
        assert Path("asked").read_text() == "requeue 7\n" * is_requeued
    assert run.stderr.count("not requeued: submit it with a longer --time, and") == 1
