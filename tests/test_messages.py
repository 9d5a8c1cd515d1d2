"""Messages that no other test raises."""

import argparse
import errno
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import REPO, TINY, free_port, script, script_that_fails

import configurator
import export
from isogpt.checkpoint import search, sharded_files
from isogpt.checkpoint.ckpt_file import damaged_zip, nanogpt_state, read_file
from isogpt.checkpoint.folder import RunFolder, continue_from, make_writable
from isogpt.checkpoint.manifest import damage, sealed
from isogpt.checkpoint.measures import NONE
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.search import StoredCheckpoint, newest_checkpoint, share_checkpoint
from isogpt.checkpoint.source import check_weights, open_checkpoint
from isogpt.checkpoint.state import WPE, restore_checkpoint
from isogpt.data import dataset as dataset_module
from isogpt.data.dataset import open_dataset
from isogpt.data.vocabulary import Vocabulary
from isogpt.launch.device import pick_backend, pick_device, use_gpu
from isogpt.launch.launchers import rank_variables
from isogpt.launch.process_group import Ranks, check_gpus, connect_ranks
from isogpt.launch.start_checks import check_alike, check_start
from isogpt.monitor.crashes import explain_crashes
from isogpt.monitor.log import Logger
from isogpt.monitor.out_of_memory import MemoryUse, is_out_of_memory
from isogpt.monitor.records import step_line
from isogpt.monitor.sink_alerts import alert
from isogpt.monitor.sink_console import Console
from isogpt.monitor.sink_metrics import MetricsFile
from isogpt.monitor.watchdog import Watchdog
from isogpt.parallel import compare_weights, compilation
from isogpt.parallel.compare_weights import weight_differences
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import share_of
from isogpt.speed import collective_speeds
from isogpt.speed.memory import memory_report
from isogpt.training.precision import resolve_dtype
from isogpt.training.settings import notes_about_text, read_prompt
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------------------
# helpers

SHAPE = dict(n_layer=1, n_head=2, n_embd=8, block_size=16, bias=False, vocab_size=65)
PLAN = Plan(world_size=2, model_args=asdict(GPTConfig(**SHAPE)), batch_size=4, micro_batch=4)
CPU = torch.device("cpu")


def tiny_model():
    return GPT(GPTConfig(**SHAPE), 0)


def one_rank(world_size=1):
    """Rank 0 on a CPU, without a process group."""
    return Ranks(0, world_size, CPU, "gloo")


def tiny_logger(*sinks, step=3):
    """A logger that prints."""
    return Logger(Progress(tokens_per_step=64, step=step), [Console(), *sinks])


def tiny_watchdog(timeout_s, step=0, store=None):
    """A watchdog of one rank, which is in the forward pass."""
    logger = tiny_logger(step=step)
    clock, saver = SimpleNamespace(count=5, doing="forward"), SimpleNamespace(writes_alone=lambda: False)
    return Watchdog(one_rank(), timeout_s, logger.progress, logger, store, clock, saver)


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
    state = nanogpt_state(run, model, [model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")])
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


class Evil:
    def __reduce__(self):
        return os.system, ("touch PWNED",)


def rank_of_two(at, **changes):
    values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **changes}
    for name, value in values.items():
        at.env(name, value)


def shards_that_hold(at, content):
    (at.path / ".metadata").write_bytes(pickle.dumps(content))
    sharded_files.read(at.path, {})


def metadata_of_objects():
    from torch.distributed.checkpoint.metadata import Metadata

    return Metadata(state_dict_metadata={"x": 1})


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


def numbered_by_name(state):
    """AdamW's state as nanoGPT numbered it before May 2023."""
    shapes = {name: p.shape for name, p in tiny_model().named_parameters()}
    names = sorted(shapes, key=lambda name: (len(shapes[name]) < 2, name))
    return {
        i: {"step": 1, "exp_avg": torch.ones(shapes[n]), "exp_avg_sq": torch.ones(shapes[n])}
        for i, n in enumerate(names)
    }


def weights_without(at, name, use=restore_checkpoint):
    source = opened(at)
    del source.weights[name]
    use(source, tiny_model())


def not_finite():
    model = tiny_model()
    model.transformer.wpe.weight.data[0, 0] = torch.nan
    plan = Plan(model_args=SHAPE)
    saver = Saver(RunFolder(Path("out"), "owner"), plan, Mesh(), config={}, vocabulary=None, log=None)
    saver.check(model, 7)


def transformers_that_lack(at, key):
    loaded = lambda *args, **kw: (None, {"missing_keys": {key}})  # noqa: E731
    config = SimpleNamespace(from_pretrained=lambda name, **kw: SimpleNamespace(model_type="gpt2"))
    gpt2 = SimpleNamespace(from_pretrained=loaded)
    at.item(sys.modules, "transformers", SimpleNamespace(AutoConfig=config, GPT2LMHeadModel=gpt2))
    GPT.from_pretrained("other")


def two_gpus(at):
    at.set(torch.cuda, "is_available", lambda: True)
    at.set(torch.cuda, "device_count", lambda: 2)


def unusable_gpu(at, error):
    """The first kernel fails on this machine's GPU."""

    def fail(*args, **kw):
        raise RuntimeError(error)

    found = SimpleNamespace(name="GTX 1080", major=6, minor=1)
    at.set(torch.cuda, "set_device", lambda device: None)
    at.set(torch.cuda, "get_device_properties", lambda device: found)
    at.set(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    at.set(torch, "__version__", "2.0")
    at.set(torch, "ones", fail)
    use_gpu(torch.device("cuda", 0))


def mps(at, there, count):
    at.set(torch.backends.mps, "is_available", lambda: there)
    pick_device("mps", 0, count)


def convert_twice(at):
    folder = save_in(at.path / "out")
    export.convert(str(folder), "shards")
    export.convert(str(folder), "shards")


def command_line(at, *args):
    at.set(sys, "argv", ["export.py", *args])
    export.main()


# ------------------------------------------------------------------------------------------------------------
# messages of single functions

RAISED = {
    "device is 'tpu'; possible are auto, cpu, cuda, cuda:N, mps": lambda at: pick_device("tpu", 0, 1),
    "device is 'cuda', but torch finds no GPU: set --device=cpu or --device=auto": lambda at: (
        at.set(torch.cuda, "is_available", lambda: False),
        pick_device("cuda", 0, 1),
    ),
    "device is 'cuda:2', but torch finds only cuda:0, cuda:1": lambda at: (
        two_gpus(at),
        pick_device("cuda:2", 0, 1),
    ),
    "rank 0, rank 2 use the same GPU, T4 (GPU-1): start at most 2 processes on a, or let the processes see "
    "different "
    "GPUs (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1), or set --device=cpu": lambda at: check_gpus(
        [("a", "1")] * 3, [["T4", "GPU-1"], ["T4", "GPU-2"], ["T4", "GPU-1"]]
    ),
    "cuda:0 (GTX 1080) has compute capability 6.1, but this PyTorch, 2.0, has kernels for sm_75, sm_80 "
    "only: install a "
    "PyTorch that supports this GPU (https://pytorch.org/get-started/previous-versions), or set "
    "--device=cpu": (
        lambda at: unusable_gpu(
            at, "CUDA error: no kernel image is available for execution on the device\nCompile"
        )
    ),
    "cuda:0 cannot be used (CUDA error: out of memory): look at nvidia-smi for other programs on this GPU, "
    "or set "
    "--device=cpu": lambda at: unusable_gpu(at, "CUDA error: out of memory\nCUDA kernel errors might be"),
    "backend is 'nccl', but this PyTorch contains no NCCL: set --backend=gloo or --backend=auto": lambda at: (
        at.set(dist, "is_nccl_available", lambda: False),
        pick_backend("nccl", torch.device("cuda", 0), 2),
    ),
    "device is 'mps', but torch does not find one: set --device=cpu or --device=auto": lambda at: mps(
        at, False, 1
    ),
    "several processes cannot share device 'mps': set --device=cpu, or start one process": lambda at: mps(
        at, True, 2
    ),
    "dtype is 'fp8'; possible are auto, float32, tf32, bfloat16, float16": lambda at: resolve_dtype(
        "fp8", CPU
    ),
    "dtype 'tf32' needs an NVIDIA GPU of the Ampere generation or later, not cpu": lambda at: resolve_dtype(
        "tf32", CPU
    ),
    "dtype 'float16' cannot be trained on mps: set --dtype=float32 or --dtype=bfloat16": lambda at: (
        resolve_dtype("float16", torch.device("mps"))
    ),
    "backend is 'mpi'; possible are auto, nccl (GPUs) and gloo (CPU)": lambda at: connect_ranks(
        "cpu", "mpi", 1
    ),
    "backend 'nccl' needs GPUs, the device is cpu: set --backend=gloo": lambda at: (
        rank_of_two(at),
        connect_ranks("cpu", "nccl", 1),
    ),
    "RANK is set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not: no launcher started this process, and "
    "RANK=0 "
    "is left over in the shell. Type unset RANK, or start with torchrun": lambda at: (
        at.env("RANK", "0"),
        rank_variables(),
    ),
    "WORLD_SIZE is 'abc', LOCAL_WORLD_SIZE is 'abc': not a number; start with torchrun, or type unset "
    "RANK": lambda at: (rank_of_two(at, WORLD_SIZE="abc"), rank_variables()),
    "the launcher's variables contradict each other: RANK 2, WORLD_SIZE 2, LOCAL_RANK 2, LOCAL_WORLD_SIZE 2, "
    "MASTER_PORT 29500; start with torchrun, or type unset RANK": lambda at: (
        rank_of_two(at, RANK="2"),
        rank_variables(),
    ),
    "the ranks were started with different settings: seed is 1 on rank 0, 2 on rank 1": lambda at: (
        check_alike([{"seed": 1, "host": "a"}, {"seed": 2, "host": "a"}])
    ),
    # data
    "no train.bin in data/nowhere or": lambda at: open_dataset("nowhere", 8),
    "train.bin is empty; write train.bin": lambda at: open_dataset(data_in(at.path / "d", train=[]), 8),
    "holds a list, not a dict": lambda at: open_dataset(data_in(at.path / "d", pkl=[1]), 8),
    "meta.json cannot be read: ": lambda at: open_dataset(data_in(at.path / "d", meta="{"), 8),
    # checkpoints
    "ckpt.pt cannot be loaded: ": lambda at: ((at.path / "ckpt.pt").touch(), read_file(at.path / "ckpt.pt")),
    "ckpt.pt is not a nanoGPT or isoGPT checkpoint: it lacks model, model_args, iter_num": lambda at: (
        torch.save({}, "ckpt.pt"),
        read_file(Path("ckpt.pt")),
    ),
    "ckpt.pt is a pointer of Git LFS, not the file itself: run git lfs pull in .": lambda at: (
        Path("ckpt.pt").write_text("version https://git-lfs"),
        read_file(Path("ckpt.pt")),
    ),
    "ckpt.pt: the model is not a dict of tensors": lambda at: opened(at, model=[1]),
    "ckpt.pt: model_args lacks n_layer, n_head": lambda at: opened(at, model_args={}),
    "ckpt.pt: iter_num is '9'": lambda at: opened(at, iter_num="9"),
    "ckpt.pt does not fit the model: 'transformer.wpe.weight'": lambda at: weights_without(at, WPE),
    "ckpt.pt: best_val_loss is 'low', not a number": lambda at: opened(at, best_val_loss="low"),
    (
        "out/ckpt.pt: use_rope=True, norm='rms' in model_args changes the model, which is not nanoGPT's"
    ): lambda at: fork(at, args={"use_rope": True, "norm": "rms", "use_alibi": False}),
    "ckpt.pt does not fit the model: it lacks transformer.wpe.weight": lambda at: weights_without(
        at, WPE, check_weights
    ),
    "also contains transformer.h.0.attn.q_norm.weight, which nanoGPT's model does not contain": lambda at: (
        fork(at, model={"transformer.h.0.attn.q_norm.weight": torch.ones(4)})
    ),
    "lm_head.weight and transformer.wte.weight should be the same weights, but differ": lambda at: fork(
        at, model={"lm_head.weight": torch.ones(65, 8)}
    ),
    (
        "before May 2023: start a new run from the weights, with --init_from=FOLDER and a different --out_dir"
    ): lambda at: resume_fork(at, optimizer={"state": numbered_by_name(at)}),
    "it contains posix.system, and only tensors and plain values are read": lambda at: (
        torch.save({"x": Evil()}, "ckpt.pt"),
        read_file(Path("ckpt.pt")),
    ),
    (
        "no valid checkpoint in out; out/ckpt.pt cannot be loaded: it contains argparse.Namespace, and only"
    ): lambda at: export.convert(
        str(save_in(at.path / "out", config=argparse.Namespace()).relative_to(at.path)), "ckpt.pt"
    ),
    "weights are not finite at step 7 (transformer.wpe.weight): no checkpoint was written": lambda at: (
        not_finite()
    ),
    "file/out cannot be written to (": lambda at: (Path("file").touch(), make_writable("file/out")),
    "): set a different --out_dir=": lambda at: (Path("file").touch(), make_writable("file/out")),
    "no valid checkpoint in empty": lambda at: (os.mkdir("empty"), export.convert("empty", "ckpt.pt")),
    "step_00000003 is in shards already": convert_twice,
    "error: nowhere is not a folder": lambda at: command_line(at, "nowhere"),
    "it would run posix.system": lambda at: shards_that_hold(at, Evil()),
    "it holds objects other than tensors": lambda at: shards_that_hold(at, metadata_of_objects()),
    # models
    "dropout is 1.0: it must be in [0, 1)": lambda at: GPTConfig(dropout=1.0),
    "this gpt2 uses settings that are not supported: scale_attn_weights=False": lambda at: GPT.from_hf(
        SimpleNamespace(config=SimpleNamespace(model_type="gpt2", scale_attn_weights=False))
    ),
    "'other' is not a complete GPT2LMHeadModel: lm_head.weight is missing": lambda at: transformers_that_lack(
        at, "lm_head.weight"
    ),
}


@pytest.mark.parametrize("text", RAISED)
def test_message_of_a_function(at, text):
    with pytest.raises((ValueError, SystemExit, pickle.UnpicklingError)) as error:
        RAISED[text](at)
    assert text in str(error.value)
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("form", ["ckpt.pt", "shards", "bare"])
def test_copies_of_a_checkpoint_on_other_machines_are_compared_and_verified(at, form):
    """Rank 0 verifies what is in its folder. A rank that sees a copy of it verifies what this rank reads."""
    save_in(at.path / "rank0")
    if form == "bare":
        state = torch.load("rank0/ckpt.pt", weights_only=True)
        del state["isogpt"]
        torch.save(state, "rank0/ckpt.pt")
    elif form == "shards":
        export.convert("rank0", "shards")
    else:
        continue_from("rank0", newest_checkpoint("rank0")[0])
    found, sent = newest_checkpoint("rank0")[0], []
    at.set(search, "broadcast", lambda value: sent.append(value) or value)
    assert share_checkpoint(found, "rank0").is_verified
    shutil.copytree("rank0", "copy", symlinks=True)
    os.symlink("rank0", "link")

    def resume(folder):
        """What a rank does that sees rank 0's checkpoint in this folder."""
        received = iter(sent)
        with at.context() as others:
            others.setattr(search, "broadcast", lambda _: next(received))
            found = share_checkpoint(None, folder)
        assert found.path.is_relative_to(folder) and found.is_verified == (folder == "link")
        restore_checkpoint(open_checkpoint(found), tiny_model())

    resume("link")
    resume("copy")
    path = (
        next(Path("copy").rglob("*.distcp"))
        if form == "shards"
        else Path("copy") / found.path.relative_to("rank0")
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match="is damaged.* the checksum of .* does not match.* from rank 0's machine"
    ):
        resume("copy")
    if form == "bare":  # a different file that is not damaged
        torch.save({**state, "model": {name: w + 1 for name, w in state["model"].items()}}, path)
        with pytest.raises(ValueError, match="copy/ckpt.pt on .* is not the checkpoint that rank 0 found"):
            resume("copy")


def test_a_faulty_network(at, capsys):
    at.set(dist, "all_reduce", lambda t: t.fill_(1.0))
    with pytest.raises(SystemExit):
        check_start(one_rank(world_size=2), {})
    assert (
        capsys.readouterr().err == "error: an all-reduce over 2 ranks returned 1.0: the network is faulty\n"
    )


def test_what_is_wrong_with_a_checkpoint(at):
    folder = Path("out/step_00000003")
    folder.mkdir(parents=True)
    assert newest_checkpoint("out") == (None, [f"{folder} is damaged: manifest.json is missing or damaged"])
    manifest = {"step": 3, "files": {"ckpt.pt": {"sha256": "0"}}}
    (folder / "manifest.json").write_text(sealed(manifest))
    assert damage(folder) == "ckpt.pt cannot be read (No such file or directory)"
    (folder / "ckpt.pt").touch()
    assert damage(folder) == "the checksum of ckpt.pt does not match"
    with zipfile.ZipFile("ckpt.pt", "w") as z:
        z.writestr("data", "abc" * 99)
    Path("ckpt.pt").write_bytes(Path("ckpt.pt").read_bytes().replace(b"abcabc", b"abcabd", 1))
    assert damaged_zip(Path("ckpt.pt")) == "the checksum of the record data does not match"


def test_checkpoints_of_nanogpts_forks(at, capsys):
    """Numpy scalars, missing entries, wrappers' prefixes, other optimizers and fields that change nothing."""
    # what changes nothing is not an error
    args = {
        "use_rope": False,
        "flash_attn": True,
        "n_kv_head": 2,
        "norm_eps": 1e-5,
        "memory": 3,
        "dropout": None,
    }
    args |= {
        "rope_base": 1e4,
        "normalization": "LayerNorm",
        "k_norm": "None",
        "swiglu": False,
        "swiglu_mult": 8 / 3,
    }
    numbers = {"iter_num": np.int64(3), "best_val_loss": np.float64(1.5), "config": None, "optimizer": None}
    source = fork(at, args=args | {"n_layer": np.int64(1)}, **numbers)
    assert (source.run["iter_num"], source.run["best_val_loss"], source.run["config"]) == (3, 1.5, {})
    assert set(source.run["model_args"]) == {*SHAPE, "dropout"} and source.stored.val_loss == 1.5
    ignored = [note.split(" in model_args of out/ckpt.pt is not used: ") for note in source.notes]
    assert [what for what, _ in ignored] == ["flash_attn=True", "memory=3"]
    assert ignored[0][1] == "it does not change the model" and "as rope=True would" in ignored[1][1]
    Path("out/vocab.json").write_text(json.dumps({chr(32 + i): i for i in range(65)}))
    script(at, "sample.py", ["--device=cpu", "--dtype=float32"], until="# the prompt")
    said = capsys.readouterr().err.splitlines()
    assert said == ["out/ckpt.pt: step 3, val loss 1.5000", *(f"note: {note}" for note in source.notes)]
    # no moments: a resume says so, and nothing else needs them
    for saved in (
        None,
        [1],
        {"state": {}},
        {"state": {0: {"momentum_buffer": torch.ones(1)}}},
        {"state": [1]},
    ):
        shutil.rmtree("out")
        assert resume_fork(at, optimizer=saved, config={"optimizer": "lion"}) == [
            "out/ckpt.pt contains no state of AdamW: the moments start at zero"
        ]
    assert export.convert("out", "shards").name == "step_00000003"
    # moments of an optimizer that has more of them than AdamW
    shutil.rmtree("out")
    state = torch.load(save_in(at.path / "out") / "ckpt.pt", weights_only=True)["optimizer"]
    shutil.rmtree("out")
    assert resume_fork(at, optimizer=state) == []
    shutil.rmtree("out")
    for moments in state["state"].values():
        moments["max_exp_avg_sq"] = moments["exp_avg_sq"]
    assert resume_fork(at, optimizer=state) == [
        "out/ckpt.pt contains max_exp_avg_sq of an optimizer that is not used here: the run continues with "
        "AdamW, "
        "whose steps are different"
    ]
    # the prefixes of wrappers, in any order and place
    for prefix in ("module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module._orig_mod."):
        shutil.rmtree("out")
        state = torch.load(save_in(at.path / "out") / "ckpt.pt", weights_only=True)
        model = {
            prefix + name.replace("h.0.", "h.0._checkpoint_wrapped_module."): w
            for name, w in state["model"].items()
        }
        torch.save({**state, "model": model}, "out/ckpt.pt")
        check_weights(open_checkpoint(newest_checkpoint("out")[0]), tiny_model())
    # without a loss, and with a loss of a different step
    for changes in ({"best_val_loss": None}, {"best_val_loss": 1.5, "config": {"eval_interval": 2}}):
        shutil.rmtree("out")
        source, progress = fork(at, **changes), Progress(64)
        assert progress.load(source) == [] and progress.best_step == NONE and source.stored.val_loss is None
        assert export.list_checkpoints("out").splitlines()[1].split()[:3] == ["3", "bare", "-"]


def test_a_converted_checkpoint_has_the_settings_of_the_run(at):
    """nanoGPT continues with the betas and the weight decay that are in the file."""
    config = {"learning_rate": 0.25, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.125, "dataset": "letters"}
    save_in(at.path / "out", config=config)
    export.convert("out", "shards")
    for changes, expected in ((config, (0.25, (0.5, 0.75), [0.125, 0])), ({}, (6e-4, (0.9, 0.95), [0.1, 0]))):
        path = export.convert("out", "ckpt.pt")
        state = torch.load(path, weights_only=True)
        if not changes:  # as of a model of transformers, which has no run
            path = export.convert_hf(str(export.write_hf("out", tiny_model(), Vocabulary("table", {"A": 0}))))
            state = torch.load(path, weights_only=True)
        groups = state["optimizer"]["param_groups"]
        assert (groups[0]["lr"], groups[0]["betas"], [g["weight_decay"] for g in groups]) == expected


def test_export_prints_what_it_wrote(at, capsys):
    save_in(at.path / "out")
    command_line(at, "out", "--to=ckpt.pt")
    assert capsys.readouterr().out == "wrote out/ckpt.pt\n"


def test_the_note_about_compilation(at):
    model = SimpleNamespace(compile=lambda **options: None, transformer=SimpleNamespace(h=[]))

    def note(device):
        return compilation.compile_model(model, device, by_block=False)

    assert note(CPU) == "compile: off, since it gains nothing on a CPU"
    at.set(torch, "ones", lambda *shape, device=None, **kw: torch.full(shape, 1.0, **kw))
    at.set(torch, "compile", lambda f: f)
    elsewhere = SimpleNamespace(type="xpu")
    with torch._dynamo.config.patch(suppress_errors=False):  # restores the setting afterwards
        assert note(elsewhere) == "compile: the first step takes about a minute longer"
    at.set(compilation, "gather_objects", lambda mine: [mine, "RuntimeError: no C++ compiler"])
    text = (
        "compile: does not work on this machine, training without it (slower): RuntimeError: no C++ compiler"
    )
    assert note(elsewhere) == text


def test_many_parameters_that_differ(at):
    at.set(
        compare_weights,
        "gather_objects",
        lambda sums: [sums, {piece: value + 1 for piece, value in sums.items()}],
    )
    text = weight_differences(tiny_model())
    assert re.match(r"(transformer\.\S+ differs on rank [01]; ){3}", text) and text.endswith(
        "; and 6 more"
    ), text


def test_the_parts_of_memory():
    text = memory_report(PLAN)
    assert text.startswith("GB on each rank, estimated: weights 0.00, ") and "--batch_size=2 " in text


def test_a_logged_step():
    record = dict(
        iter=7, loss=3.0, step_ms=200.0, mfu=0.05, tokens_per_s=1234.5, grad_norm=0.5, data_ms_max=1.5
    )
    record["lr"] = 6e-4
    line = "iter 7: loss 3.0000, time 200.00ms, mfu 5.00%, 1,234 tokens/s, grad norm 0.500, lr 6.0e-04, "
    line += "data 1.5ms, 2.50 GB, 1:01 left"
    assert step_line({**record, "memory_gb_max": 2.5}, 61) == line


def test_a_full_disk_is_reported_once_by_the_log(capsys, tmp_path):
    config = {"out_dir": str(tmp_path), "max_iters": 9, "eval_interval": 1}
    metrics = MetricsFile(config, "", Console(), step=3)
    metrics.file.close()
    metrics.file = open("/dev/full", "ab", buffering=0)
    logger = tiny_logger(metrics)
    for _ in range(2):
        logger.event("save")
    text = "warning: /dev/full cannot be written (No space left on device); training continues\n"
    assert capsys.readouterr().out == text


def test_a_line_that_does_not_fit_does_not_tear_the_next_line(capsys, tmp_path):
    """The limit on the size of files cuts a write off, as a full disk does."""
    metrics = MetricsFile({"out_dir": str(tmp_path), "max_iters": 9, "eval_interval": 1}, "", Console(), 3)
    metrics.write({"iter": 1})
    path = tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        metrics.write({"iter": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    metrics.write({"iter": 3})
    assert [json.loads(line)["iter"] for line in path.read_text().splitlines()] == [1, 3]
    assert capsys.readouterr().out.count("cannot be written (No space left on device)") == 1


# ------------------------------------------------------------------------------------------------------------
# hangs and crashes


def test_a_hang_in_which_all_ranks_respond(at, capsys):
    codes = []
    at.set(os, "_exit", lambda status: (codes.append(status), dog.over.set()))
    dog = tiny_watchdog(timeout_s=0.1, step=5, store=dist.HashStore())
    dog.armed = True
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


def test_out_of_memory(at, capsys):
    def leave(status):
        raise SystemExit(status)

    at.set(os, "_exit", leave)
    at.set(sys, "excepthook", sys.excepthook)
    reader = SimpleNamespace(share=share_of(4, 0, 1, 4), plan=PLAN)
    explain_crashes(tiny_watchdog(timeout_s=600), MemoryUse("out", reader, first_step=0))
    with pytest.raises(SystemExit):
        sys.excepthook(torch.OutOfMemoryError, torch.OutOfMemoryError("tried to allocate 1 TiB"), None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("GB on each rank, estimated: ")
    assert [lines[0], *lines[2:]] == [
        "error: out of memory with micro-batches of 4: tried to allocate 1 TiB",
        "the next start in out uses micro-batches of 2 (same global batch, same curve): torchrun "
        "--max-restarts does "
        "so by itself, otherwise repeat the command",
    ]


NCCL = (
    "NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function "
    "failed.\nLast error:"
)
FORMS = [
    (
        torch.OutOfMemoryError,
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14 GiB",
    ),
    (
        torch.AcceleratorError,
        "CUDA error: out of memory\nCUDA kernel errors might be reported at some other call",
    ),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (dist.DistBackendError, f"{NCCL}\nCuda failure 2 'out of memory'"),
    (
        RuntimeError,
        "[enforce fail at alloc_cpu.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    ),
    (RuntimeError, "MPS backend out of memory (MPS allocated: 5.00 GB, other allocations: 2.00 GB)"),
    (RuntimeError, "HIP error: out of memory"),
    (RuntimeError, "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
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
    memory_use = MemoryUse("out", reader, first_step=50)
    dog.ranks = Ranks(3, 4, CPU, "gloo", hosts=("a",) * 4)
    for number, (kind, text) in enumerate(FORMS):
        dog.store = dist.PrefixStore(str(number), store)
        explain_crashes(dog, memory_use)
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
        assert dog.errors() == {3: f"{kind.__name__}: {line}"}
    assert not is_out_of_memory(RuntimeError("Triton: out of resource: shared memory, Required: 1"))


def test_an_alert_that_cannot_be_started(at, capsys):
    def refuse(*args, **kw):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    at.set(subprocess, "Popen", refuse)
    alert("mail me", {"event": "end"})
    assert capsys.readouterr().err.startswith("warning: alert_command: [Errno ")


# ------------------------------------------------------------------------------------------------------------
# the command line


def test_mistakes_on_the_command_line_and_in_a_config(at, capsys):
    Path("mine.py").write_text("batch_sise = 4\nmax_iters = 'x'\n")
    wrong = ["--batch_sise=3", "--learning_rate=fast", "--seed", "none.py", "mine.py"]
    with pytest.raises(SystemExit):
        configurator.configure({"__file__": str(REPO / "train.py")}, wrong)
    lines = [line.partition("; looked for ")[0] for line in capsys.readouterr().err.splitlines()]
    assert sorted(lines) == [
        "error: train.py: command line: --batch_sise: no such setting; did you mean --batch_size?",
        "error: train.py: command line: --learning_rate='fast': not a finite number",
        "error: train.py: command line: --seed: missing value; type --seed=VALUE",
        "error: train.py: mine.py: max_iters = 'x': not a finite number",
        "error: train.py: none.py: no such config file",
        "note: mine.py: batch_sise is not used: no such setting; did you mean batch_size?",
    ]


WRONG = {
    "--batch_size=0": "batch_size is 0: it must be at least 1",
    "--max_iters=-1": "max_iters is -1: it must not be negative",
    "--beta1=1": "beta1 is 1.0: it must be in [0, 1)",
    "--dist_timeout_s=0": "dist_timeout_s is 0.0: it must be above 0",
    f"--seed={2**63}": f"seed is {2**63}: it must be below 2**63",
    f"--gradient_accumulation_steps={10**26}": (
        f"gradient_accumulation_steps is {10**26}: it must be below 2**31"
    ),
    f"--eval_iters={2**31}": f"eval_iters is {2**31}: it must be below 2**31",
    "--n_embd=33": (
        "n_embd is 33: it must be a multiple of n_head, 12: set --n_head=11 or 33, or --n_embd=24 or 36"
    ),
    "--data_order=sorted": "data_order is 'sorted'; possible are random and shuffle",
    "--out_dir= ": "out_dir is empty: set --out_dir= to a folder",
    "--init_from=resum": (
        "init_from is 'resum'; possible: scratch, resume, auto, gpt2[-medium|-large|-xl], a folder of a run "
        "or of Hugging Face weights, or a ckpt.pt"
    ),
    "--resume_step=3": "resume_step needs init_from 'resume', but it is 'resum': set --init_from=resume",
    "--on_nan=ignore": "on_nan is 'ignore'; possible are stop and skip",
    "--activation_checkpointing=every:0": (
        "activation_checkpointing is 'every:0'; possible are none, full, selective and every:K (K >= 1)"
    ),
    "--zero=-1": "zero is -1; possible are 0, 1, 2 and 3",
    "--grad_sync=often": "grad_sync is 'often'; possible are auto, last, every and never",
    "--cpu_offload=True": "cpu_offload and dp_replicate need zero 2 or 3, but zero is -1: set --zero=3",
}


def test_settings_of_train_py(at, capsys):
    """All mistakes at once; then those that exclude others."""
    output = script_that_fails(at, capsys, "train.py", list(WRONG))
    assert sorted(output.err.splitlines()) == sorted(f"error: {problem}" for problem in WRONG.values())
    excluding = ["--fsdp=True", "--zero=1", "--grad_sync=never", "--cuda_graphs=True", "--compile=False"]
    output = script_that_fails(at, capsys, "train.py", excluding)
    assert sorted(output.err.splitlines()) == [
        "error: cuda_graphs needs compile: set --compile=True, or --cuda_graphs=False",
        "error: cuda_graphs needs gradients that stay in place, and zero 2 and 3 allocate new gradients: set "
        "--zero=0 --fsdp=False, or --cuda_graphs=False",
        "error: fsdp is short for zero=3, but zero is 1: set only one of them",
        "error: grad_sync 'never' is for measuring communication, the ranks' weights drift apart: set "
        "--save_checkpoint=False",
    ]


def test_prompts_of_sample_py(at, capsys, monkeypatch):
    """
    A file's text is not changed, but for its byte order mark; what a shell's user may have meant is one note.
    """
    monkeypatch.setenv("HOME", str(at.path))
    monkeypatch.setenv("USERPROFILE", str(at.path))
    Path("p.txt").write_bytes(b"\xef\xbb\xbfA\\nB\n")
    assert read_prompt("FILE:p.txt") == read_prompt("FILE:~/p.txt") == "A\\nB\n"
    assert read_prompt("~/p.txt \\n") == "~/p.txt \\n"
    Path("p.txt").write_text("A", encoding="utf-16")
    with pytest.raises(
        ValueError, match=r"^--start=FILE:p.txt cannot be read as text: 'utf-8' .*; save it in UTF-8$"
    ):
        read_prompt("FILE:p.txt")
    assert not any(notes_about_text(text, "") for text in ("A\n", "FILE:\\new.txt", ""))
    for text in ("ROMEO:\\n", 'it\'s \\n "so"', "\u00e9\\n"):
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

    wrong = [f"--seed={2**63}", "--init_from=scratch", "--num_samples=0", "--top_k=-1", "--top_p=2"]
    assert sorted(fails(*wrong).splitlines()) == [
        "error: init_from is 'scratch'; possible: resume, gpt2[-medium|-large|-xl], a folder of Hugging "
        "Face weights",
        "error: num_samples is 0: it must be at least 1",
        f"error: seed is {2**63}: it must be below 2**63",
        "error: top_k is -1: it must not be negative",
        "error: top_p is 2.0: it must be in (0, 1]; 1 samples among all tokens",
    ]
    assert fails("--start=AB\u00e9").splitlines() == [
        "out/ckpt.pt: step 3, val loss 1.5000",
        "error: --start: the text contains characters that the vocabulary does not contain: 'B' 'é'",
    ]
    assert "--start is empty: give at least one character" in fails("--start=")
    assert "--start=FILE:none.txt cannot be read as text: [Errno 2]" in fails("--start=FILE:none.txt")
    state = torch.load("out/ckpt.pt", weights_only=True)
    state["model"]["transformer.wpe.weight"][0] = torch.nan
    save_in(at.path / "bad/out", model=state["model"])
    problem = (
        "weights in bad/out/ckpt.pt are not finite (transformer.wpe.weight), so that the model "
        "predicts nothing"
    )
    advice = "use a checkpoint from before the loss became NaN"
    assert f"error: {problem}: {advice}\n" in fails("--out_dir=bad/out", "--start=A")
    with pytest.raises(ValueError, match=re.escape(problem)):
        export.convert("bad/out", "hf")
    shutil.rmtree("data")
    unknown = (
        "the ids cannot be decoded: the checkpoint, whose data set letters is not here, does not say "
        "what they mean"
    )
    assert unknown in fails("--start=A")


# ------------------------------------------------------------------------------------------------------------
# runs


def lines_of(run):
    return [" ".join(line.split()) for line in run.text().splitlines()]


# train.py without matplotlib, on a machine whose matmul peak cannot be measured, with a slow rank
LACKING = """
import os, sys
sys.path.insert(0, os.environ["REPO"])
from isogpt.monitor import anomalies
from isogpt.speed import devices
sys.modules["matplotlib.figure"] = None
def unmeasured(*args):
    raise RuntimeError("no matmul")
devices.measured_matmul = unmeasured
anomalies.SlowRanks.seen = lambda self, columns: ["rank 0: forward ms 40.0, others 10.0"]
sys.argv[0] = os.path.join(os.environ["REPO"], "train.py")
code = compile(open(sys.argv[0]).read(), sys.argv[0], "exec")
exec(code, {"__name__": "__main__", "__file__": sys.argv[0]})
"""


def test_messages_of_a_run(zygote, work):
    """
    A run, a run in the same folder with everything missing that may be missing, and a run on other data.
    """
    args = ["--n_layer=1", "--max_iters=0", "--eval_iters=1", "--out_dir=out"]
    lines = lines_of(zygote.train([*args, "--eval_interval=1"], work))
    for start in (
        "data: data/tiny, 20,000 training tokens, vocabulary size 65",
        "model: 0.01M parameters, from scratch",
        "ranks: 1 = 1 node x 1 on cpu, no process group, float32; compile: off, since it gains nothing on a "
        "CPU",
        "step: 8 sequences x 32 = 256 tokens, on each rank 2 micro-steps x 4 rows",
        "peak: ",
        "step 0: train loss ",
        "iter 0: loss ",
        "saved out/step_00000001",
        "the loss curve: out/loss.png",
        "try: python sample.py --out_dir=out",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    for line in (
        r"peak: \S+ TFLOP/s \(measured matmul\)",
        r"done: 1 steps in \d+:\d\d, best val loss 4\.\d+ at step [01]",
    ):
        assert sum(bool(re.fullmatch(line, printed)) for printed in lines) == 1, (line, lines)

    (work / "lacking.py").write_text(LACKING)
    more = ["--compile=False", "--profile=True", "--save_checkpoint=False"]
    env = {"REPO": str(REPO)}
    run = zygote.start([*TINY, *args, *more], work, script="lacking.py", repo=work, env=env).wait()
    lines = lines_of(run)
    for whole in (
        "out contained an earlier run, which was moved to out/previous_1",
        "peak: unknown, no mfu",
        "warning: --profile traces the steps after the fifth: 1 steps give no trace, 10 do",
        "warning: a slow rank: rank 0: forward ms 40.0, others 10.0",
        "no plot of the loss curve: pip install matplotlib",
    ):
        assert lines.count(whole) == 1, (whole, lines)
    assert sum(line.endswith("float32; compile: off") for line in lines) == 1, lines

    earlier = ["--init_from=auto", "--out_dir=out/previous_1", "--eval_interval=1"]
    lines = lines_of(zygote.train([*args[:-1], *earlier, "--max_iters=9", "--time_limit_s=1"], work))
    assert lines[-1] == "stopped on request before step 1: resume with --init_from=resume or auto"

    tokens = np.fromfile(work / "data/tiny/val.bin", np.uint16)
    tokens[5] = 70
    tokens.tofile(work / "data/tiny/val.bin")
    run = zygote.train([*args[:-1], *earlier, "--vocab_size=99"], work, ok=False)
    text = "error: data/tiny contains token id 70, but the checkpoint's vocabulary size is 65"
    assert run.codes == [1] and lines_of(run) == [f"{text}: it was trained on a different data set"]


# train.py without the tensorboard package
NO_TENSORBOARD = """
import os, sys
sys.path.insert(0, os.environ["REPO"])
sys.modules["tensorboard"] = None
sys.argv[0] = os.path.join(os.environ["REPO"], "train.py")
code = compile(open(sys.argv[0]).read(), sys.argv[0], "exec")
exec(code, {"__name__": "__main__", "__file__": sys.argv[0]})
"""


def test_without_tensorboard_an_earlier_run_stays_in_place(zygote, work):
    """The missing package is reported before the earlier run is moved aside."""
    args = ["--n_layer=1", "--max_iters=1", "--out_dir=out"]
    zygote.train(args, work)
    before = sorted(path.name for path in (work / "out").iterdir())
    (work / "lacking.py").write_text(NO_TENSORBOARD)
    more, env = ["--tensorboard_log=True"], {"REPO": str(REPO)}
    run = zygote.start([*TINY, *args, *more], work, script="lacking.py", repo=work, env=env).wait(ok=False)
    assert run.codes == [1] and run.text().startswith("error: tensorboard_log: ")
    assert run.text().endswith("; run: pip install tensorboard\n") and run.text().count("\n") == 1
    assert sorted(path.name for path in (work / "out").iterdir()) == before


# ------------------------------------------------------------------------------------------------------------
# bench.py


def bench(at, *args):
    """bench.py's globals before its first launch."""
    return script(at, "bench.py", ["--device=cpu", *args], until="with TemporaryDirectory(")


def figures(*args, **kw):
    """What a launch of train.py might have recorded."""
    both = {"mean": 10.0, "max": 12.0}
    return {
        "tokens_a_step": 64,
        "tokens_per_s": 6400.0,
        "step_ms": both,
        "processes": 1,
        "dtype": "float32",
        "spans_ms": dict.fromkeys(
            ("data", "forward", "backward", "clip", "optimizer"), {"mean": 1.0, "max": 1.5}
        ),
        "memory_gb": both,
        "mb_sent": both,
        "mfu": 0.25,
        "settings": {"out_dir": ".", "tp": 1, "pp": 1, "ep": 1},
    }


def test_why_a_launch_failed(at):
    reason = bench(at)["reason_for"]
    assert reason(3, "") == "exit status 3"
    assert reason(-9, "") == "killed (SIGKILL), probably because the machine ran out of memory"
    assert reason(1, "RuntimeError: CUDA out of memory. Tried") == "out of memory"


def test_the_report_of_bench(at, capsys):
    space = bench(at, "--steps=3")
    peaks = {"matmul_tflops": 2.0, "matmul_ratio": 0.5, "copy_gb_per_s": 20.0, "copy_ratio": None}
    space |= {"processes": 2, "run_train": figures, "limits": lambda run: peaks}
    space["run_report"]()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "once more, without communication (grad_sync never)",
        "3 steps of 64 tokens on 2 processes, float32; medians:",
        "memory 10.00 12.00 GB, peak",
        "MB sent 10.000 12.000 per rank and step, over TCP",
        "matmul peak 2 TFLOP/s of which the step reaches 50.0%",
        "copy peak 20.0 GB/s of which the optimizer reaches n/a",
    ):
        assert line in lines, lines


def test_a_trace_and_a_snapshot_are_kept(at, capsys):
    space = bench(at, "--profile")
    peaks = {"matmul_tflops": 2.0, "matmul_ratio": 0.5, "copy_gb_per_s": 20.0, "copy_ratio": None}
    run = figures() | {"settings": {"out_dir": "out"}}
    space |= {"run_train": lambda *args, **kw: run, "limits": lambda run: peaks}
    os.mkdir("out")
    Path("out/trace.json").write_text('{"traceEvents": []}')
    Path("out/memory.pickle").touch()
    Path("out/operators.txt").write_text("the table")
    assert space["run_report"]()["operators"] == "the table"
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "wrote bench_trace.json (open it in https://ui.perfetto.dev)",
        "wrote bench_memory.pickle (open it in https://pytorch.org/memory_viz)",
        "the table",
    ]
    assert Path("bench_trace.json").exists() and Path("bench_memory.pickle").exists()


def test_the_tables_of_a_sweep_and_of_a_search(at, capsys):
    space = bench(at, "--sweep=nproc:1,0")
    run_train = space["run_train"]
    space["run_train"] = lambda work, timed: figures() if work["nproc"] != "0" else run_train(work, timed)
    capsys.readouterr()
    space["run_sweep"]()
    out = capsys.readouterr().out
    assert out.startswith("held fixed: the global batch, so that the speed-up by nproc is strong scaling\n")
    assert re.search(r"\n +nproc .* speed-up  efficiency\n +1 .* 1\.00x +100%\n", out), out
    assert "failed: nproc is '0': it must be a whole number of at least 1" in out
    space["work"] |= {"batch_size": 2, "nproc": 1, "block_size": 256}
    space |= {"processes": 1, "cards": ["cpu"]}
    space["run_tune"]()
    out = capsys.readouterr().out
    assert out.startswith("the global batch of 2 sequences on 1 x cpu, 1 on each machine, predicted:\n")
    assert "\nmeasured:\n" in out and "\nthe fastest, 6,400 tokens/s:\npython train.py" in out
    space = bench(at, "--sweep=nproc:1,2", "--weak", "--gradient_accumulation_steps=3")
    batches = []
    space["run_train"] = lambda work, timed: batches.append(work["gradient_accumulation_steps"]) or figures()
    capsys.readouterr()
    space["run_sweep"]()
    out = capsys.readouterr().out
    assert out.startswith("held fixed: the sequences of each process, so that the speed-up by nproc is weak")
    assert batches == [3, 6]
    space = bench(at, "--sweep=zero:0,1")
    space["run_train"] = figures
    capsys.readouterr()
    space["run_sweep"]()
    assert capsys.readouterr().out.startswith("held fixed: the global batch\n")
    space = bench(at, "--sweep=batch_size:2,4")
    space["run_train"] = figures
    capsys.readouterr()
    space["run_sweep"]()
    assert capsys.readouterr().out.startswith("the global batch varies with batch_size: compare tokens/s\n")


CARDS = ["a100-40gb", "RTX-3090", "v100", "nvidia_tesla_t4", "l4", "l40s", "5090", "b200", "mi300x"]


@pytest.mark.parametrize("name", CARDS)
def test_a_plan_for_each_listed_card(at, capsys, name):
    """And weak scaling: the global batch grows with the devices."""
    args = ["--plan", "--devices=2", f"--hardware={name}", "--vocab_size=65", "--n_layer=2", "--n_embd=64"]
    space = bench(at, *args, "--n_head=2", "--weak", "--gradient_accumulation_steps=2", "--batch_size=4")
    plans, command = space["make_plans"](2)
    assert not plans[0].problem and command.startswith("torchrun --standalone --nproc_per_node=2")
    assert capsys.readouterr().out.count("\nthe global batch of 16 sequences on 2 x ") == 1


def test_a_plan_for_a_card_of_ones_own(at, capsys):
    shape = ["--plan", "--devices=1", "--vocab_size=65", "--n_layer=2", "--n_embd=64", "--n_head=2"]
    shape += ["--batch_size=4", "--block_size=64"]
    slow, fast = (
        bench(at, *shape, "--hardware=t4", f"--device_tflops={n}")["make_plans"](1)[0][0].total_s
        for n in (1, 1000)
    )
    assert slow > fast
    with pytest.raises(ValueError, match="no layout fits on 1 device$"):
        bench(at, *shape, "--hardware=t4", "--device_memory_gb=1")["make_plans"](1)
    for args, advice in (
        (["--plan", "--device_tflops=100"], "set --hardware= to this card, such as --hardware=4090"),
        (["--hardware=l4", "--device_memory_gb=48"], "are for a plan: set --plan=True"),
    ):
        output = script_that_fails(at, capsys, "bench.py", ["--device=cpu", *args], until="with TemporaryD")
        assert advice in output.err and len(output.err.splitlines()) == 1
    with pytest.raises(SystemExit):
        bench(at, "--sweep=batch_size:1,2", "--weak")["run_sweep"]()
    assert "such as --sweep=nproc:1,2,4" in capsys.readouterr().err


def test_collectives_that_a_backend_does_not_support(at, capsys):
    def unknown(*args):
        raise RuntimeError("no such collective")

    two_ranks = Ranks(0, 2, CPU, "gloo", network="gloo")
    at.set(collective_speeds, "connect_ranks", lambda *args: two_ranks)
    at.set(dist, "init_process_group", lambda *args, **kw: None)
    at.set(collective_speeds, "mean_seconds", unknown)
    collective_speeds.measure_collectives("cpu", "auto", 1)
    out = capsys.readouterr().out
    assert out.startswith("2 processes on cpu, gloo; bus bandwidth in GB/s:\n")
    assert "\n  all-reduce: not supported by this backend: no such collective\n" in out
    rank_of_two(at, WORLD_SIZE="1")
    at.set(collective_speeds, "connect_ranks", lambda *args: one_rank())
    text = "error: comm needs two processes or more: set --nproc=2, and --device=cpu if there is one GPU\n"
    assert script_that_fails(at, capsys, "bench.py", ["--comm", "--device=cpu"]).err == text


def test_the_estimate(at, capsys):
    small = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=8", "--vocab_size=65"]
    with pytest.raises(SystemExit):
        bench(at, *small, "--estimate_world_size=2")
    assert "estimated GB per rank, with world size 2 and micro-batches of 12:" in capsys.readouterr().out


def test_mistakes_of_bench_py(at, capsys):
    def fails(*args):
        return script_that_fails(at, capsys, "bench.py", ["--device=cpu", *args])

    rank_of_two(at, MASTER_PORT=str(free_port()))  # rank 0 serves a store there
    at.set(dataset_module, "REPOSITORY", at.path)  # where no data set is prepared
    assert fails("--steps=0", "--nproc=-1", "--comm", "--tune", "--json_path=nowhere/x").err.splitlines() == [
        "error: steps is 0: it must be at least 1",
        "error: nproc is -1: it must not be negative",
        "error: comm, sweep, plan and tune are separate reports: set one of them",
        "error: json_path is 'nowhere/x': no such folder",
    ]
    assert fails("--nproc=3").err == "error: nproc is 3, but the launcher started 2 processes: omit --nproc\n"
    output = fails("--tune", "--n_layer=1")
    machine, text = output.out.splitlines()
    assert re.fullmatch(r".+, \d+ cores, torch \d\S+", machine)
    assert text == "random tokens, since openwebtext is not prepared"
    text = "error: a plan needs no launcher: start bench.py without torchrun, with --devices=N or --nproc=N\n"
    assert output.err == text
    text = "error: a sweep over nproc launches the processes itself: start bench.py without torchrun\n"
    assert fails("--sweep=nproc:1").err == text
    text = "error: sweep is 'batch_size': type --sweep='nproc:1,2;batch_size:4,8' or the like\n"
    assert fails("--sweep=batch_size").err == text


# ------------------------------------------------------------------------------------------------------------
# the console


def started(script, *args, stdout=subprocess.PIPE):
    """A separate process, whose console knows ASCII only."""
    command = [sys.executable, str(REPO / script), *args]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(command, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_what_a_console_cannot_show_ends_no_run(at):
    """Names and text that are not ASCII, and a lone surrogate, which is not even UTF-8."""
    meta = {"vocab_size": 2, "stoi": {"\u00e9": 0, "\ud800": 1}, "itos": ["\u00e9", "\ud800"]}
    data_in(at.path / "data" / "tiny", pkl=meta, train=[0, 1] * 40)
    out = "--out_dir=r\u00e9sum\u00e9"
    train = started("train.py", *TINY, "--block_size=8", "--max_iters=0", "--eval_iters=1", out)
    said, errors = train.communicate(timeout=120)
    assert train.returncode == 0, errors
    assert r"saved r\xe9sum\xe9/step_00000001" in said.splitlines()
    sample = started(
        "sample.py", out, "--start=\u00e9", "--num_samples=3", "--max_new_tokens=20", "--device=cpu"
    )
    export = started("export.py", "r\u00e9sum\u00e9", "--to=shards")
    said, errors = sample.communicate(timeout=120)
    lines = said.splitlines()
    assert sample.returncode == 0 and len(lines) == 6 and lines[1::2] == ["---------------"] * 3, errors
    assert all(re.fullmatch(r"\\xe9(\\xe9|\\ud800){20}", line) for line in lines[::2]) and r"\ud800" in said
    assert export.communicate(timeout=120) == ("wrote r\\xe9sum\\xe9/step_00000001\n", "")


def test_a_closed_pipe_ends_a_script_quietly(at):
    """As after `| head`: no traceback, and nothing about an exception that is ignored at the exit."""
    save_in(at.path / "out")
    read, write = os.pipe()
    os.close(read)
    generate = ["--start=A", "--num_samples=2", "--max_new_tokens=5", "--device=cpu"]
    commands = ["train.py", "--help"], ["sample.py", *generate], ["export.py", "--help"], ["export.py", "out"]
    runs = [started(*command, stdout=write) for command in commands]
    errors = ["\n".join(run.communicate(timeout=120)[1].splitlines()) for run in runs]
    os.close(write)
    assert [run.returncode for run in runs] == [0, 0, 0, 0], errors
    assert errors[0] == errors[2] == errors[3] == "" and "Error" not in errors[1]


# ------------------------------------------------------------------------------------------------------------
# Slurm

NODE = """#!/bin/sh
case $0 in
    */srun) mkdir -p out && touch out/PREEMPTED ;;
    */scontrol) echo "$@" >> asked ;;
esac
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="slurm.sh needs bash")
def test_messages_of_slurm_sh(at):
    """With a fake srun that stops on request, without Slurm."""
    for name in ("srun", "scontrol"):
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
    assert run.returncode == 0 and run.stdout == "slurm.sh: stopped on request, requeueing the job\n", (
        run.stderr
    )
    assert Path("asked").read_text() == "requeue 7\n"
    env["HOME"] = str(at.path)
    run = subprocess.run([*command, "--out_dir=~/out"], env=env, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "slurm.sh: stopped on request, requeueing the job\n", (
        run.stderr
    )
