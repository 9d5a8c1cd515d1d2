"""
Every message that the code prints is in docs/operations.md, every row there is a message of the code, and a test raises
each. The first part compares; the second raises those that no other file does.

A message is a text that is printed (`print`, `say`, `fail`, `sys.exit`, `os.write`, the watchdog's `report`), raised,
or returned by a function of RETURNS, and one that gets into such a text by way of a variable. The value of an f-string
and what is added to a text only sometimes are `…`; of a text that is one of two, each is a message. What has no blank,
or fewer than five letters besides `error`, `warning` and `rank`, is a frame around other messages, which the page
explains. An assert is for our own mistakes.
"""

import ast
import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import REPO, TINY

import checkpoint
import configurator
import launch
import loader
import memory
import metrics
import parallel
import resilience
import shards
from model import GPT, GPTConfig

PAGE = REPO / "docs" / "operations.md"
PRINTS = {"print", "say", "fail", "sys.exit", "os.write", "watchdog.report", "self.report"}
RETURNS = {
    "_did_you_mean", "asked", "blame", "compiled", "damage", "damaged_zip", "differing", "memory_report", "newest",
    "reason_for", "seen", "step_line",
}  # fmt: skip
INSERTED = {"about_compile", "text", "todo"}  # variables whose text is a part of a message, with a row of its own
ADDS = ("append", "insert")
RUN = 12  # so many characters in a row, which no other message has, show which message a test means
PARTS = {
    ast.IfExp: ("body", "orelse"), ast.BinOp: ("left", "right"), ast.BoolOp: ("values",), ast.List: ("elts",),
    ast.Tuple: ("elts",), ast.Starred: ("value",), ast.Subscript: ("value",), ast.comprehension: ("iter",),
    ast.ListComp: ("elt", "generators"), ast.GeneratorExp: ("elt", "generators"),
}  # fmt: skip


def text_of(node):
    """The text of a string, an f-string or a sum with one in it; None of anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [text_of(node.left), text_of(node.right)]
        return None if sides == [None, None] else "".join("…" if side is None else side for side in sides)
    return None


def texts(node, names):
    """The texts that an expression may come to; variables that it takes them from are added to `names`."""
    text = text_of(node)
    if text is not None:
        yield text
    elif isinstance(node, ast.Name):
        names.add(node.id)
    else:
        parts = [getattr(node, name) for name in PARTS.get(type(node), ())]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # "; ".join(texts), "text".encode()
            parts = [node.func.value, node.args if node.func.attr == "join" else []]
        for part in parts:
            for child in part if isinstance(part, list) else [part]:
                yield from texts(child, names)


def spoken(path):
    """The texts that a script says."""
    names, found, assigned = set(INSERTED), [], []
    for node in ast.walk(ast.parse(path.read_text())):
        said = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            said = node.exc.args
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTS:
            said = node.args
        elif isinstance(node, ast.FunctionDef) and node.name in RETURNS:
            said = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return)]
        elif isinstance(node, ast.Dict):  # bench.py: why a point of a sweep has no figures
            said = [v for k, v in zip(node.keys, node.values, strict=True) if k and text_of(k) == "problem"]
        elif isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            assigned.append((target, node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDS:
            assigned.append((node.func.value, node.args[-1]))
        for expression in said:
            found += texts(expression, names)
    before = set()
    while before != names:
        before = set(names)
        for target, value in assigned:
            if isinstance(target, ast.Name) and target.id in before:
                found += texts(value, names)
    return found


def plain(text):
    return re.sub("…+", "…", " ".join(text.split()))


def is_message(text):
    return " " in text and len(re.sub(r"\b(error|warning|rank)\b|[^A-Za-z]", "", text)) >= 5


@cache
def messages():
    """Every message, and the file that says it."""
    found = {}
    for path in sorted(REPO.glob("*.py")):
        found |= {plain(text): path.name for text in spoken(path) if is_message(plain(text))}
    for path in sorted((REPO / "cluster").glob("*.sh")):
        found |= {plain(text): path.name for text in re.findall(r'echo "(slurm\.sh: .+?)"', path.read_text())}
    return found


def rows():
    """The page's messages: the first column of the tables whose head begins with `Message`."""
    found, is_ours = [], False
    for line in PAGE.read_text().splitlines():
        is_ours = line.startswith("|") and (is_ours or line.startswith("| Message |"))
        found += re.findall(r"^\| `(.+?)` \|", line) if is_ours else []
    return [plain(row.replace(r"\|", "|")) for row in found]


@cache
def expected_texts():
    """What the tests look for: every text in them but docstrings, an assert's own message, and what is denied."""
    found, escaped = [], re.compile(r"\\([^\w\s])")  # in a regex, dots and the like
    for path in sorted((REPO / "tests").glob("test_*.py")):
        tree, denied = ast.parse(path.read_text()), set()
        for node in ast.walk(tree):
            hidden = []
            if isinstance(node, ast.Assert) and node.msg:
                hidden = [node.msg]
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn | ast.NotEq):
                hidden = [node]
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                hidden = [node.value]
            denied |= {id(inner) for top in hidden for inner in ast.walk(top)}
        for node in ast.walk(tree):
            if id(node) not in denied and isinstance(node, ast.Constant | ast.JoinedStr):
                text = text_of(node)
                found += [plain(escaped.sub(r"\1", text))] if text else []
    return found


def runs_of(text):
    return {part[i : i + RUN] for part in text.split("…") for i in range(len(part) - RUN + 1)}


def test_every_message_is_in_the_page():
    assert sorted(set(messages()) - set(rows())) == []


def test_every_row_of_the_page_is_a_message():
    assert sorted(set(rows()) - set(messages())) == []
    assert len(rows()) == len(set(rows())), "one row for each"


def test_what_is_searched_for_messages_is_there():
    """A function or variable that is renamed would take its messages out of the comparison, without a word."""
    source = "".join(path.read_text() for path in REPO.glob("*.py"))
    for name in RETURNS:
        assert f"def {name}(" in source
    for name in INSERTED:
        assert re.search(rf"^ +{name} = |^{name} = ", source, re.M), name
    for name in PRINTS:
        assert f"{name}(" in source, name


def test_every_message_is_raised_by_a_test():
    """A test looks for RUN characters that no other message has, or for the whole of it."""
    owners = {}
    for message in messages():
        for run in runs_of(message):
            owners.setdefault(run, []).append(message)
    looked_for = {run for text in expected_texts() for run in runs_of(text)}
    seen = {owners[run][0] for run in looked_for & owners.keys() if len(owners[run]) == 1}
    for message in set(messages()) - seen:
        whole = re.compile(".*".join(map(re.escape, message.split("…"))))
        if any(whole.search(text) for text in expected_texts()):
            seen.add(message)
    assert sorted(set(messages()) - seen) == []


# ---------------------------------------------------------------------------------------------------------------------
# what is needed to raise them

SHAPE = dict(n_layer=1, n_head=2, n_embd=8, block_size=16, bias=False, vocab_size=65)
CPU = torch.device("cpu")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI")


@pytest.fixture
def at(monkeypatch, tmp_path):
    """An empty working folder and no launcher; what a test does to it is undone."""
    for name in [*os.environ]:
        if name.startswith(LAUNCHED):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(path=tmp_path, set=monkeypatch.setattr, env=monkeypatch.setenv, item=monkeypatch.setitem)


def script(at, name, args, until=None, home=REPO):
    """Run a script here, as far as the line that begins with `until`; returns its globals."""
    source = (REPO / name).read_text()
    at.set(sys, "argv", [name, *args])
    space = {"__name__": "__main__", "__file__": str(home / name)}
    exec(compile(source[: source.index(f"\n{until}") if until else None], name, "exec"), space)
    return space


def script_that_fails(at, capsys, *args, **kw):
    with pytest.raises(SystemExit) as left:
        script(at, *args, **kw)
    assert left.value.code == 1
    return capsys.readouterr()


def tiny_model():
    return GPT(GPTConfig(**SHAPE), 0)


def save_in(folder, dataset="letters", **changes):
    """A ckpt.pt of nanoGPT's form, and a data set that knows its characters."""
    model = tiny_model()
    run = {"model_args": dict(SHAPE), "iter_num": 3, "best_val_loss": 1.5, "config": {"dataset": dataset}, "isogpt": {}}
    state = checkpoint.nanogpt_state(run, model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu"))
    checkpoint.write_ckpt(folder, {**state, **changes})
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
    shards.read(at.path, {})


def metadata_of_objects():
    from torch.distributed.checkpoint.metadata import Metadata

    return Metadata(state_dict_metadata={"x": 1})


def weights_without(at, name):
    source = checkpoint.open_save(checkpoint.Save(save_in(at.path / "out") / "ckpt.pt", 3))
    del source.weights[name]
    checkpoint.fill(source, tiny_model())


def not_finite():
    model = tiny_model()
    model.transformer.wpe.weight.data[0, 0] = torch.nan
    checkpoint.check_finite(model, 7)


def transformers_that_lack(at, key):
    loaded = lambda *args, **kw: (None, {"missing_keys": {key}})  # noqa: E731
    at.item(sys.modules, "transformers", SimpleNamespace(GPT2LMHeadModel=SimpleNamespace(from_pretrained=loaded)))
    GPT.from_pretrained("other")


def two_gpus(at):
    at.set(torch.cuda, "is_available", lambda: True)
    at.set(torch.cuda, "device_count", lambda: 2)


def mps(at, there, count):
    at.set(torch.backends.mps, "is_available", lambda: there)
    launch.pick_device("mps", 0, count)


def convert_twice(at):
    folder = save_in(at.path / "out")
    checkpoint.convert(str(folder), "shards")
    checkpoint.convert(str(folder), "shards")


def command_line(at, *args):
    at.set(sys, "argv", ["checkpoint.py", *args])
    checkpoint.main()


# ---------------------------------------------------------------------------------------------------------------------
# raised by a call

RAISED = {
    "device is 'tpu'; possible are auto, cpu, cuda, cuda:N, mps": lambda at: launch.pick_device("tpu", 0, 1),
    "device is 'cuda', but torch finds no GPU here: set --device=cpu or --device=auto": lambda at: (
        at.set(torch.cuda, "is_available", lambda: False), launch.pick_device("cuda", 0, 1)),
    "GPU 2 is asked for, but there are 2: start at most 2 processes here": lambda at: (
        two_gpus(at), launch.pick_device("cuda", 2, 3)),
    "device is 'mps', but torch finds none here: set --device=cpu or --device=auto": lambda at: mps(at, False, 1),
    "several processes cannot share device 'mps': set --device=cpu, or start one process": lambda at: mps(at, True, 2),
    "dtype is 'fp8'; possible are auto, float32, tf32, bfloat16, float16": lambda at: launch.dtype_for("fp8", CPU),
    "dtype 'tf32' needs an NVIDIA GPU of the Ampere generation or later, not cpu": lambda at: (
        launch.dtype_for("tf32", CPU)),
    "dtype 'float16' cannot be trained on mps: set --dtype=float32 or --dtype=bfloat16": lambda at: (
        launch.dtype_for("float16", torch.device("mps"))),
    "backend is 'mpi'; possible are auto, nccl (GPUs) and gloo (CPU)": lambda at: launch.join("cpu", "mpi"),
    "backend 'nccl' works between GPUs, not on cpu: set --backend=gloo": lambda at: (
        rank_of_two(at), launch.join("cpu", "nccl")),
    "RANK is set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not: start with torchrun, or unset RANK": lambda at: (
        at.env("RANK", "0"), launch.rank_variables()),
    "WORLD_SIZE is 'abc', LOCAL_WORLD_SIZE is 'abc': not a number; start with torchrun, or unset RANK": lambda at: (
        rank_of_two(at, WORLD_SIZE="abc"), launch.rank_variables()),
    "the launcher's variables cannot be right: RANK 2, WORLD_SIZE 2, LOCAL_RANK 2, LOCAL_WORLD_SIZE 2, "
    "MASTER_PORT 29500; start with torchrun, or unset RANK": lambda at: (
        rank_of_two(at, RANK="2"), launch.rank_variables()),
    "the ranks were started with different settings: seed is 1 on rank 0, 2 on rank 1": lambda at: (
        launch.check_alike([{"seed": 1, "host": "a"}, {"seed": 2, "host": "a"}])),
    # data
    "no train.bin in data/nowhere or": lambda at: loader.open_dataset("nowhere", 8),
    "train.bin is empty; run: python": lambda at: loader.open_dataset(data_in(at.path / "d", train=[]), 8),
    "holds a list, not a dict": lambda at: loader.open_dataset(data_in(at.path / "d", pkl=[1]), 8),
    "meta.json cannot be read: ": lambda at: loader.open_dataset(data_in(at.path / "d", meta="{"), 8),
    # checkpoints
    "ckpt.pt cannot be loaded: ": lambda at: ((at.path / "ckpt.pt").touch(), checkpoint.load(at.path / "ckpt.pt")),
    "ckpt.pt is no checkpoint of nanoGPT's or ours: it lacks model, model_args, iter_num": lambda at: (
        torch.save({}, "ckpt.pt"), checkpoint.load(Path("ckpt.pt"))),
    "ckpt.pt: its model is no dict of tensors": lambda at: (
        checkpoint.load(save_in(at.path / "out", model=[1]) / "ckpt.pt")),
    "ckpt.pt: its model_args lack n_layer, n_head": lambda at: (
        checkpoint.load(save_in(at.path / "out", model_args={}) / "ckpt.pt")),
    "ckpt.pt: its iter_num is '9'": lambda at: checkpoint.load(save_in(at.path / "out", iter_num="9") / "ckpt.pt"),
    "ckpt.pt: its optimizer has no state of AdamW's": lambda at: (
        checkpoint.load(save_in(at.path / "out", optimizer=[1]) / "ckpt.pt")),
    "ckpt.pt does not fit the model: 'transformer.wpe.weight'": lambda at: weights_without(at, checkpoint.WPE),
    "weights are not finite at step 7 (transformer.wpe.weight and 0 more): not saved": lambda at: not_finite(),
    "file/out cannot be written to (": lambda at: (Path("file").touch(), checkpoint.make_folder("file/out")),
    "): set another --out_dir=": lambda at: (Path("file").touch(), checkpoint.make_folder("file/out")),
    "no save in empty": lambda at: (os.mkdir("empty"), checkpoint.convert("empty", "ckpt.pt")),
    "step_00000003 is in shards already": convert_twice,
    "error: nowhere is no folder": lambda at: command_line(at, "nowhere"),
    "it wants to run posix.system": lambda at: shards_that_hold(at, Evil()),
    "it holds objects other than tensors": lambda at: shards_that_hold(at, metadata_of_objects()),
    # models
    "dropout is 1.0: it must be in [0, 1)": lambda at: GPTConfig(dropout=1.0),
    "this GPT-2 is computed in another way than ours: layer_norm_epsilon=1e-06": lambda at: (
        GPT.from_hf(SimpleNamespace(config=SimpleNamespace(layer_norm_epsilon=1e-6)))),
    "'other' is no GPT-2: it lacks lm_head.weight, among others": lambda at: (
        transformers_that_lack(at, "lm_head.weight")),
}  # fmt: skip


@pytest.mark.parametrize("text", RAISED)
def test_what_a_call_raises(at, text):
    with pytest.raises((ValueError, SystemExit, pickle.UnpicklingError)) as error:
        RAISED[text](at)
    assert text in str(error.value)
    assert not Path("PWNED").exists()


def test_a_network_that_adds_wrongly(at, capsys):
    at.set(dist, "all_reduce", lambda t: t.fill_(1.0))
    with pytest.raises(SystemExit):
        launch.check_collective(launch.Ranks(0, 2, 0, 2, CPU))
    assert capsys.readouterr().err == "error: an all-reduce over 2 ranks gave 1.0: the network is broken\n"


def test_what_is_wrong_with_a_save(at):
    folder = Path("out/step_00000003")
    folder.mkdir(parents=True)
    assert checkpoint.newest("out") == (None, [f"{folder} is damaged: its manifest.json is missing or damaged"])
    manifest = {"step": 3, "files": {"ckpt.pt": {"sha256": "0"}}}
    (folder / "manifest.json").write_text(checkpoint.sealed(manifest))
    assert checkpoint.damage(folder) == "ckpt.pt cannot be read (No such file or directory)"
    (folder / "ckpt.pt").touch()
    assert checkpoint.damage(folder) == "ckpt.pt is not what was written (its checksum differs)"
    with zipfile.ZipFile("ckpt.pt", "w") as z:
        z.writestr("data", "abc" * 99)
    Path("ckpt.pt").write_bytes(Path("ckpt.pt").read_bytes().replace(b"abcabc", b"abcabd", 1))
    assert checkpoint.damaged_zip(Path("ckpt.pt")) == "its record data does not match its checksum"


def test_checkpoint_py_says_what_it_wrote(at, capsys):
    save_in(at.path / "out")
    command_line(at, "out", "--to=ckpt.pt")
    assert capsys.readouterr().out == "wrote out/ckpt.pt\n"


def test_how_compile_fares(at):
    model = SimpleNamespace(compile=lambda: None)
    say = lambda device: parallel.compiled(model, SimpleNamespace(device=device))[1]  # noqa: E731
    assert say(CPU) == "compile: left out on the CPU, where it gains nothing"
    at.set(torch, "ones", lambda *shape, device=None, **kw: torch.full(shape, 1.0, **kw))
    at.set(torch, "compile", lambda f: f)
    elsewhere = SimpleNamespace(type="xpu")
    with torch._dynamo.config.patch(suppress_errors=False):  # and what it was after it
        assert say(elsewhere) == "compile: the first step takes about a minute longer"
    at.set(parallel, "gather_objects", lambda mine: [mine, "RuntimeError: no C++ compiler"])
    text = "compile: does not work here, going on without it (slower): RuntimeError: no C++ compiler"
    assert say(elsewhere) == text


def test_many_parameters_that_differ(at):
    def gather(digests, mine):
        digests[0].copy_(mine)
        digests[1].copy_(mine + 1)

    at.set(dist, "all_gather", gather)
    text = parallel.differing(tiny_model(), launch.Ranks(0, 2, 0, 2, CPU), 1)
    assert re.match(r"(transformer\.\S+ differs on rank [01]; ){3}", text) and text.endswith("; and 6 more"), text


def test_the_parts_of_memory():
    cost = dict(model_args=SHAPE, rows=4, dtype="float32", world_size=2, zero=0, dp_replicate=1, sync_every=False,
                cpu_offload=False, mode="none", on_cpu=True)  # fmt: skip
    text = memory.memory_report(cost)
    assert text.startswith("GB on each rank, estimated: weights 0.00, ") and "--batch_size=2 " in text


def test_a_logged_step():
    record = dict(iter=7, loss=3.0, step_ms=200.0, mfu=0.05, tokens_per_s=1234.5, grad_norm=0.5, data_ms_max=1.5)
    line = "iter 7: loss 3.0000, time 200.00ms, mfu 5.00%, 1,234 tokens/s, grad norm 0.500, data 1.5ms, 2.50 GB, "
    line += "1:01 left"
    assert metrics.step_line({**record, "memory_gb_max": 2.5}, 61) == line


def test_a_log_on_a_full_disk_is_told_once(capsys):
    def full(line):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = metrics.Log(Path("out"), SimpleNamespace(name="out/metrics.jsonl", write=full))
    for _ in range(2):
        log.event("save", 3)
    text = "warning: out/metrics.jsonl cannot be written (No space left on device); training goes on\n"
    assert capsys.readouterr().out == text


# ---------------------------------------------------------------------------------------------------------------------
# hangs and crashes


def test_a_hang_in_which_every_rank_answers(at, capsys):
    left = []
    at.set(os, "_exit", lambda status: (left.append(status), dog.over.set()))
    dog = resilience.Watchdog(dist.HashStore(), 0, ["rank 0"], 0.1, lambda: (5, "step 5, forward"))
    dog.armed = True
    assert dog.over.wait(20) and left == [1]
    dog.stop()
    text = "error: rank 0 at step 5, forward: no progress for 0.1 s; all ranks answer: rank 0 at step 5, forward\n"
    assert text in capsys.readouterr().err
    at.env("MASTER_ADDR", "h1")
    at.env("MASTER_PORT", "29500")
    silence = threading.Event()
    said = dog.asked(lambda: silence.wait(60) and "", 0.05)
    silence.set()
    assert said == "the store, which rank 0 or its agent keeps at h1:29500, does not answer"


def test_out_of_memory_where_the_estimate_fails_too(at, capsys):
    def leave(status):
        raise SystemExit(status)

    at.set(os, "_exit", leave)
    at.set(sys, "excepthook", sys.excepthook)
    dog = resilience.Watchdog(None, 0, ["rank 0"], 600, lambda: (0, "the start"))
    explain = lambda: {}["weights"]  # noqa: E731
    resilience.explain_crashes("out", {}, 4, 0, loader.DataError, lambda: True, explain, dog, lambda: None)
    with pytest.raises(SystemExit):
        sys.excepthook(torch.OutOfMemoryError, torch.OutOfMemoryError("tried to allocate 1 TiB"), None)
    assert capsys.readouterr().err.splitlines() == [
        "error: out of memory with micro-batches of 4: tried to allocate 1 TiB",
        "(no estimate: 'weights')",
        "the next start in out uses micro-batches of 2 (same steps, same curve): torchrun --max-restarts does it by "
        "itself, else type the same command again",
    ]


def test_an_alert_that_cannot_be_started(at, capsys):
    def refuse(*args, **kw):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    at.set(subprocess, "Popen", refuse)
    resilience.alert("mail me", {"event": "end"})
    assert capsys.readouterr().err.startswith("warning: alert_command: [Errno ")


# ---------------------------------------------------------------------------------------------------------------------
# the command line


def test_mistakes_on_the_command_line_and_in_a_config(at, capsys):
    Path("mine.py").write_text("batch_sise = 4\nmax_iters = 'x'\n")
    wrong = ["--batch_sise=3", "--learning_rate=fast", "--seed", "none.py", "mine.py"]
    with pytest.raises(SystemExit):
        configurator.configure({"__file__": str(REPO / "train.py")}, wrong)
    lines = [line.partition("; looked for ")[0] for line in capsys.readouterr().err.splitlines()]
    assert sorted(lines) == [
        "train.py: command line: --batch_sise: no such setting; did you mean --batch_size?",
        "train.py: command line: --learning_rate='fast': not a finite number",
        "train.py: command line: --seed: type --seed=VALUE",
        "train.py: mine.py: batch_sise: no such setting; did you mean batch_size?",
        "train.py: mine.py: max_iters = 'x': not a whole number",
        "train.py: none.py: no such config file",
    ]


WRONG = {
    "--batch_size=0": "batch_size is 0: it must be at least 1",
    "--max_iters=-1": "max_iters is -1: it must not be negative",
    "--beta1=1": "beta1 is 1.0: it must be in [0, 1)",
    "--timeout_s=0": "timeout_s is 0.0: it must be above 0",
    f"--seed={2**63}": f"seed is {2**63}: it must be below 2**63",
    "--n_embd=33": "n_embd is 33: it must be a multiple of n_head, 12",
    "--data_order=sorted": "data_order is 'sorted'; possible are random and shuffle",
    "--out_dir= ": "out_dir is empty: name a folder, with --out_dir=",
    "--init_from=resum": ("init_from is 'resum'; possible: scratch, resume, auto, gpt2[-medium|-large|-xl], a folder"),
    "--on_nan=ignore": "on_nan is 'ignore'; possible are stop and skip",
    "--activation_checkpointing=every:0": (
        "activation_checkpointing is 'every:0'; possible are none, full, selective and every:K (K >= 1)"
    ),
    "--zero=-1": "zero is -1; possible are 0, 1, 2 and 3",
    "--grad_sync=often": "grad_sync is 'often'; possible are auto, last, every and never",
    "--cpu_offload=True": "cpu_offload and dp_replicate need zero 2 or 3, but zero is -1: set --zero=3",
}


def test_settings_of_train_py(at, capsys):
    """All mistakes at once; the two that exclude others by themselves."""
    said = script_that_fails(at, capsys, "train.py", list(WRONG), until="# who, where")
    assert sorted(said.err.splitlines()) == sorted(WRONG.values())
    said = script_that_fails(at, capsys, "train.py", ["--fsdp=True", "--zero=1", "--grad_sync=never"], until="# who")
    assert said.err.splitlines() == [
        "fsdp is short for zero=3, but zero is 1: set one of them",
        "grad_sync is 'never', by which bench.py times communication: ranks drift apart, so set --keep_last=0",
    ]


def test_mistakes_of_sample_py(at, capsys):
    save_in(at.path / "out")
    fails = lambda *args: script_that_fails(at, capsys, "sample.py", ["--device=cpu", *args]).err  # noqa: E731
    wrong = [f"--seed={2**63}", "--init_from=scratch", "--num_samples=0", "--top_k=-1"]
    assert sorted(fails(*wrong).splitlines()) == [
        "init_from is 'scratch'; possible: resume, gpt2[-medium|-large|-xl], a folder",
        "num_samples is 0: it must be at least 1",
        f"seed is {2**63}: it must be below 2**63",
        "top_k is -1: it must not be negative",
    ]
    assert fails("--start=AB\u00e9").splitlines() == [
        "out/ckpt.pt: step 3, best val loss 1.5000",
        "--start has characters that data set letters has not: 'B' 'é'",
    ]
    assert "--start is empty: give at least one character" in fails("--start=")
    assert "--start=FILE:none.txt cannot be read as text: [Errno 2]" in fails("--start=FILE:none.txt")
    shutil.rmtree("data")
    assert "the run's data set letters is needed for its characters: no train.bin in" in fails("--start=A")


# ---------------------------------------------------------------------------------------------------------------------
# runs


def lines_of(run):
    return [" ".join(line.split()) for line in run.text().splitlines()]


# train.py on a machine without matplotlib, whose matmul cannot be measured, with a rank that is slow
LACKING = """
import os, sys
sys.path.insert(0, os.environ["REPO"])
import metrics, resilience
sys.modules["matplotlib.figure"] = None
def unmeasured(*args):
    raise RuntimeError("no matmul")
metrics.measured_matmul = unmeasured
resilience.SlowRanks.seen = lambda self, columns: ["rank 0: forward ms 40.0, others 10.0"]
sys.argv[0] = os.path.join(os.environ["REPO"], "train.py")
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"), {"__name__": "__main__", "__file__": sys.argv[0]})
"""


def test_what_a_run_says(zygote, work):
    """A run, another one into its folder with all that may be lacking, and one on other data."""
    args = ["--n_layer=1", "--max_iters=0", "--eval_iters=1", "--out_dir=out"]
    lines = lines_of(zygote.train([*args, "--eval_interval=1"], work))
    for start in (
        "writing to out",
        "data: data/tiny, 20,000 training tokens, vocabulary 65",
        "model: 0.01M parameters, from scratch",
        "ranks: 1 = 1 node x 1 on cpu, no process group, float32; compile: left out on the CPU",
        "step: 8 sequences x 32 = 256 tokens, on each rank 2 micro-steps x 4 rows",
        "peak: ",
        "step 0: train loss ",
        "iter 0: loss ",
        "saved out/step_00000001",
        "the loss curve: out/loss.png",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    for line in (
        r"peak: \S+ TFLOP/s \(matmul measured here\)",
        r"done: 1 steps in \d+:\d\d, best val loss 4\.\d+ at step 0",
    ):
        assert sum(bool(re.fullmatch(line, said)) for said in lines) == 1, (line, lines)

    (work / "lacking.py").write_text(LACKING)
    more = ["--compile=False", "--profile=True", "--keep_last=0"]
    env = {"REPO": str(REPO)}
    run = zygote.start([*TINY, *args, *more], work, script="lacking.py", repo=work, env=env).wait()
    lines = lines_of(run)
    for whole in (
        "out held an earlier run, which is in out/previous_1 now",
        "peak: unknown, so mfu is n/a",
        "warning: --profile traces the steps after the fifth: 1 steps give no trace, 10 do",
        "warning: a slow rank: rank 0: forward ms 40.0, others 10.0",
        "no picture of the loss curve: pip install matplotlib",
    ):
        assert lines.count(whole) == 1, (whole, lines)
    assert sum(line.endswith("float32; compile: off") for line in lines) == 1, lines

    earlier = ["--init_from=auto", "--out_dir=out/previous_1", "--eval_interval=1"]
    lines = lines_of(zygote.train([*args[:-1], *earlier, "--max_iters=9", "--stop_after_s=1"], work))
    assert lines[-1] == "stopped as asked before step 1: go on with --init_from=resume or auto"

    tokens = np.fromfile(work / "data/tiny/val.bin", np.uint16)
    tokens[5] = 70
    tokens.tofile(work / "data/tiny/val.bin")
    run = zygote.train([*args[:-1], *earlier, "--vocab_size=99"], work, ok=False)
    text = "error: data/tiny holds token id 70, but the weights know 65 ids: they were trained on another data set"
    assert run.codes == [1] and lines_of(run) == [text]


# ---------------------------------------------------------------------------------------------------------------------
# bench.py


def bench(at, *args):
    """bench.py's functions."""
    return script(at, "bench.py", args, until="try:\n    where = launch.pick_device")


def made_up(batch_size=2):
    """Figures that a launch of train.py might have recorded."""
    both = {"mean": 10.0, "max": 12.0}
    return {
        "steps": 3, "tokens_a_step": 64, "tokens_per_s": 6400.0, "step_ms": both, "processes": 1, "dtype": "float32",
        "spans_ms": dict.fromkeys(("data", "forward", "backward", "clip", "optimizer"), {"mean": 1.0, "max": 1.5}),
        "memory_gb": both, "mfu": 0.25, "settings": {"out_dir": "."},
    }  # fmt: skip


def test_why_a_launch_failed(at):
    reason = bench(at)["reason_for"]
    assert reason(3, "") == "exit status 3"
    assert reason(-9, "") == "killed (SIGKILL), which is how a machine that runs out of memory ends a process"
    assert reason(1, "RuntimeError: CUDA out of memory. Tried") == "out of memory"


def test_the_report_of_one_work(at, capsys):
    space = bench(at)
    space |= {"here": 2, "run_train": lambda *args, **kw: made_up()}
    peaks = {"matmul_tflops": 2.0, "matmul_ratio": 0.5, "copy_gb_per_s": 20.0, "copy_ratio": None}
    space["limits"] = lambda run, where: peaks
    space["report"](at.path, {}, CPU, 0.5)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "once more, without communication (2 processes, grad_sync never)",
        "3 steps of 64 tokens on 2 processes, float32; medians:",
        "memory 10.00 12.00 GB at its peak",
        "estimated 0.50 GB, without what the process takes before any model (0.4 on a CPU)",
        "matmul peak 2 TFLOP/s of which the step reaches 50.0%",
        "copy peak 20.0 GB/s of which the optimizer reaches n/a",
    ):
        assert line in lines, lines


def test_a_trace_and_a_snapshot_are_kept(at, capsys):
    profiled = bench(at)["profiled"]
    with pytest.raises(SystemExit):
        profiled(Path("."))
    text = "train.py wrote no trace: metrics.start_profiler wants more steps than bench.py gives it\n"
    assert capsys.readouterr().err == text
    os.mkdir("out")
    Path("out/trace.json").write_text('{"traceEvents": []}')
    Path("out/memory.pickle").touch()
    assert profiled(Path("out")) == []
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [
        "trace bench_trace.json (open in https://ui.perfetto.dev)",
        "snapshot bench_memory.pickle (open in https://pytorch.org/memory_viz)",
    ]
    assert Path("bench_trace.json").exists() and Path("bench_memory.pickle").exists()


def test_the_heads_of_a_sweep_and_of_a_search(at, capsys):
    space = bench(at, "--sweep=nproc:1,0")
    space |= {"run_train": lambda *args, **kw: made_up(), "is_small": False}
    space["run_sweep"](at.path, {"batch_size": 2})
    out = capsys.readouterr().out
    assert out.startswith("held fixed: the global batch, so that speed-up is strong scaling\n")
    assert "\nspeed-up: tokens/s over those of the first point that ran; efficiency: " in out
    assert "failed: nproc is '0': not a whole number of at least 1" in out
    space["run_tune"](at.path, {"batch_size": 2}, CPU)
    out = capsys.readouterr().out
    assert out.startswith("held fixed: the global batch of 2 sequences, on 1 process")
    assert "\nthe fastest, 6,400 tokens/s:\npython train.py" in out


def test_collectives_that_a_backend_has_not(at, capsys):
    def unknown(*args):
        raise RuntimeError("no such collective")

    space = bench(at)
    space["mean_seconds"] = unknown
    at.set(launch, "join", lambda *args: launch.Ranks(0, 1, 0, 1, CPU))
    with pytest.raises(SystemExit):
        space["time_collectives"]()
    text = "comm needs two processes or more: set --nproc=2, or --device=cpu where there is one GPU\n"
    assert capsys.readouterr().err == text
    at.set(launch, "join", lambda *args: launch.Ranks(0, 2, 0, 2, CPU))
    space["time_collectives"]()
    out = capsys.readouterr().out
    assert out.startswith("2 processes on cpu, gloo: GB/s on the bus, and latency\n")
    assert "\n  all-reduce: not supported by gloo: no such collective\n" in out


def test_the_estimate(at, capsys):
    small = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=8", "--vocab_size=65", "--device=cpu"]
    with pytest.raises(SystemExit):
        script(at, "bench.py", [*small, "--estimate=True", "--world_size=2"])
    assert "estimated GB on each of 2 ranks, micro-batches of 12:" in capsys.readouterr().out


def test_mistakes_of_bench_py(at, capsys):
    rank_of_two(at)
    fails = lambda *args, home=REPO: script_that_fails(at, capsys, "bench.py", args, home=home)  # noqa: E731
    wrong = ["--steps=0", "--nproc=-1", "--comm=True", "--tune=True", "--json=nowhere/x", "--world_size=2"]
    assert fails(*wrong).err.splitlines() == [
        "steps is 0: it must be at least 1",
        "nproc is -1: it must not be negative",
        "nproc is -1, but torchrun started 2 processes",
        "comm, sweep and tune are reports of their own: set one of them",
        "json is 'nowhere/x': no such folder",
        "world_size is for --estimate=True: to run, set --nproc or start with torchrun",
    ]
    # a copy, beside which no data set is prepared
    for name in ("bench.py", "train.py"):
        shutil.copy(REPO / name, at.path)
    said = fails("--tune=True", "--n_layer=1", "--device=cpu", home=at.path)
    about, text = said.out.splitlines()
    assert re.fullmatch(r".+, \d+ cores, torch \d\S+", about)
    assert text == "data set openwebtext is not prepared here: random tokens instead"
    assert said.err == "a search starts the processes itself: start bench.py without torchrun, with --nproc=N\n"
    said = fails("--sweep=nproc:1", "--device=cpu", home=at.path)
    assert said.err == "a sweep over nproc starts the processes itself: start bench.py without torchrun\n"
    with pytest.raises(SystemExit):
        bench(at)["axes_of"]("batch_size")
    text = "sweep: 'batch_size' is not NAME:VALUE,VALUE; type --sweep='nproc:1,2;batch_size:4,8' or the like\n"
    assert capsys.readouterr().err == text


# ---------------------------------------------------------------------------------------------------------------------
# Slurm

NODE = """#!/bin/sh
case $0 in
    */srun) mkdir -p out && touch out/PREEMPTED ;;
    */scontrol) echo "$@" >> asked ;;
esac
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="slurm.sh wants bash")
def test_slurm_sh(at):
    """With an srun that is stopped as asked, and no Slurm behind it."""
    for name in ("srun", "scontrol"):
        (at.path / name).write_text(NODE)
        (at.path / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": ".", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    env = {**os.environ, **slurm, "HEAD": "n1", "PATH": f"{at.path}:{os.environ['PATH']}"}
    command = ["bash", str(REPO / "cluster" / "slurm.sh")]
    run = subprocess.run([*command, "config/train_gpt2.py"], env=env, capture_output=True, text=True)
    text = "slurm.sh: name the run's folder with --out_dir=, so that the job can tell whether it is done\n"
    assert run.returncode == 2 and run.stderr == text
    run = subprocess.run([*command, "--out_dir=out"], env=env, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "slurm.sh: stopped as asked, back into the queue\n", run.stderr
    assert Path("asked").read_text() == "requeue 7\n"
