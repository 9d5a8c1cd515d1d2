"""Start the scripts on any number of processes and read what they wrote (see zygote.py)."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parent.parent
FORKED = "tests/forked_torchrun.py"  # torchrun, whose ranks are forked
SHARED = Path(os.environ.get("ISOGPT_SHARED", REPO.parent / "shared"))
# Tiny Shakespeare: a copy outside the repository, or what data/shakespeare_char/prepare.py has downloaded
TEXTS = (SHARED / "data" / "tinyshakespeare.txt", REPO / "data" / "shakespeare_char" / "input.txt")
SHAKESPEARE = next(filter(Path.exists, TEXTS), TEXTS[-1])
CHARACTERS = sorted("\n !$&',-.3:;?" + string.ascii_letters)  # Shakespeare's, as many as a vocabulary of 65
# a model and few steps, since steps cost most of the suite's time; the settings of a test come after these
TINY = """
--dataset=tiny --device=cpu --dtype=float32 --n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4
--gradient_accumulation_steps=2 --learning_rate=1e-3 --warmup_iters=10 --max_iters=8 --lr_decay_iters=100
--eval_interval=1000 --eval_iters=2 --log_interval=1 --check_layout=False
""".split()  # test_layout_check.py checks the layouts

# tokens of each shard: windows of 33 tokens cross several of the small ones
SHARDS = [7000, 20, 5, 6000, 33]

# nanoGPT's recipe for a CPU, with config/train_shakespeare_char.py
CPU_RECIPE = """
--compile=False --eval_iters=20 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
""".split()


def free_port():
    """
    A port that no process listens on. It lies below the ports that the system gives to connections: a test
    that runs at the same time could otherwise be given the port before the user of the port listens.
    """
    while True:
        port = random.SystemRandom().randrange(10000, 32000)  # a worker of pytest-xdist draws different ports
        with socket.socket() as s, suppress(OSError):
            s.bind(("", port))
            return port


def is_served(port):
    """Whether a process listens on this port."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


class Run:
    """The processes of one run; `outs` are the files with each rank's output."""

    def __init__(self, zygote, pids, outs):
        self.zygote, self.pids, self.outs = zygote, pids, outs
        self.codes = [None] * len(pids)

    def poll(self):
        """Whether all processes have exited."""
        for i, pid in enumerate(self.pids):
            if self.codes[i] is None:
                self.codes[i] = self.zygote.ask({"poll": pid})
        return all(c is not None for c in self.codes)

    def wait(self, timeout=120, ok=True):
        """Wait for all processes; with `ok`, they must all exit with status 0."""
        end = time.monotonic() + timeout
        while not self.poll():
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"still running after {timeout} s:\n{self.text()}")
            time.sleep(0.01)
        if ok:
            assert self.codes == [0] * len(self.codes), f"exit {self.codes}:\n{self.text()}"
        return self

    def kill(self, ranks=None, sig=signal.SIGKILL):
        """Send a signal to these ranks, or to all."""
        for i in range(len(self.pids)) if ranks is None else ranks:
            if self.codes[i] is None:
                os.kill(self.pids[i], sig)

    def gone(self, within):
        """Whether all processes exit within this many seconds."""
        end = time.monotonic() + within
        while not self.poll() and time.monotonic() < end:
            time.sleep(0.005)
        return self.poll()

    def text(self):
        """The output of all ranks."""
        return "".join(Path(out).read_text(errors="replace") for out in self.outs if Path(out).exists())

    def samples(self):
        """What sample.py printed, without its last line, the speed."""
        *lines, speed = self.text().splitlines(keepends=True)
        assert re.fullmatch(
            r"[\d,]+ tokens in [\d.]+ s, [\d,]+ tokens/s \((1 sample|\d+ samples)\)\n", speed
        ), speed
        return "".join(lines)

    def until(self, seen, timeout=60):
        """Wait until seen(output of all ranks) is true or the run has ended; returns whether it was seen."""
        end = time.monotonic() + timeout
        while not seen(self.text()):
            if self.poll():
                return bool(seen(self.text()))
            assert time.monotonic() < end, f"not seen in {timeout} s:\n{self.text()}"
            time.sleep(0.002)
        return True


class Zygote:
    """
    A process that has imported torch and forks all runs of a session, with more variables if they are given.
    """

    number = itertools.count()  # of all zygotes: two may write to the same folder

    def __init__(self, more=None):
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "RANK", "WORLD_SIZE", "LOCAL_"))
        }
        env["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")  # runs share the cores
        env.update(more or {})
        self.process = subprocess.Popen(
            [sys.executable, str(REPO / "tests" / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def ask(self, request):
        """Send a request and return the reply."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self, args, cwd, nproc=1, script="train.py", repo=REPO, env=None, group=None, whole=False, out=None
    ):
        """
        Start `script` in folder `cwd` on nproc processes; without a launcher's variables if nproc is 1.
        `whole`: with a plot that is drawn. `out`: a terminal in place of the files.
        """
        n, size = next(self.number), str(nproc)
        base = {"PYTHONUNBUFFERED": "1", **(env or {})}
        envs = [base] * nproc
        if group or (group is None and nproc > 1):
            base |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            envs = [base | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(nproc)]
        outs = [str(Path(cwd) / f"run{n}.rank{r}.txt") for r in range(nproc)]
        argv = [str(Path(repo) / script), *map(str, args)]
        job = {"argv": argv, "cwd": str(cwd), "envs": envs, "whole": whole}
        job["outs"] = [out] * nproc if out else outs
        return Run(self, self.ask(job), outs)

    def train(self, args, cwd, nproc=1, ok=True, timeout=120, **kw):
        """Run train.py until it ends."""
        return self.start([*TINY, *args], cwd, nproc, **kw).wait(timeout, ok)

    def close(self, timeout=120):
        """End the process and its children."""
        self.process.stdin.close()
        self.process.wait(timeout)


def start_faulty(zygote, args, cwd, nproc=1, **faults):
    """Start train.py with injected faults, see faulty_train.py: NAN=[step, rank]."""
    env = {"FAULTS": json.dumps(faults)}
    return zygote.start([*TINY, *args], cwd, nproc, script="tests/faulty_train.py", env=env)


CHANGED = """
import os, sys
sys.path.insert(0, {repo!r})
{changes}
sys.argv[0] = {repo!r} + "/{script}"
code = compile(open(sys.argv[0]).read(), sys.argv[0], "exec")
exec(code, {{"__name__": "__main__", "__file__": sys.argv[0]}})
"""


def start_changed(zygote, changes, args, cwd, nproc=1, script="train.py", **kw):
    """Start train.py or another script after Python code that replaces functions which it will import."""
    (Path(cwd) / "changed.py").write_text(CHANGED.format(repo=str(REPO), changes=changes, script=script))
    tiny = TINY if script == "train.py" else []
    return zygote.start([*tiny, *args], cwd, nproc, script="changed.py", repo=cwd, **kw)


def script(at, name, args, until=None, home=REPO):
    """Run a script in this process, up to the line that begins with `until`; returns its globals."""
    source = (REPO / name).read_text()
    at.set(sys, "argv", [name, *args])
    space = {"__name__": "__main__", "__file__": str(home / name)}
    exec(compile(source[: source.index(f"\n{until}") if until else None], name, "exec"), space)
    return space


def accepted(name, *args, extra=None):
    """The settings that a script accepts with these arguments, without running it; see configure."""
    from configurator import configure
    from isogpt.training.settings import check_training

    config = configure({"__file__": str(REPO / name)}, list(args), extra)
    if name == "train.py":
        check_training(config)
    return config


@cache
def settings_of_train():
    """The settings of train.py."""
    from configurator import settings_of

    return settings_of(REPO / "train.py")


def train_defaults(**changes):
    """The defaults of train.py's settings, which stand in train.py alone, with changes."""
    return {name: setting.default for name, setting in settings_of_train().items()} | changes


def default_plan(**fields):
    """The plan of train.py's defaults in float32, with these fields."""
    from isogpt.parallel.plan import plan_of

    return replace(plan_of(train_defaults(dtype="float32"), islands=1), **fields)


def script_that_fails(at, capsys, *args, **kw):
    """Run a script that must exit with status 1; returns its output."""
    import pytest  # not above: measure/ also uses this file

    with pytest.raises(SystemExit) as exit:
        script(at, *args, **kw)
    assert exit.value.code == 1
    return capsys.readouterr()


def tiny_data(cwd, vocab=65, tokens=20000, name="tiny"):
    """
    A data set in cwd/data: Shakespeare's characters if the file is available, else a repetitive random text
    of the same characters.
    """
    folder = Path(cwd) / "data" / name
    folder.mkdir(parents=True, exist_ok=True)
    source = SHAKESPEARE
    if source.exists() and vocab == 65:
        text = source.read_text()
        chars = sorted(set(text))
        ids = np.searchsorted(np.array(chars), np.array(list(text[: tokens + 4000])))
    else:
        rng = np.random.default_rng(0)
        ids = np.cumsum(rng.integers(0, 3, tokens + 4000)) % vocab
        chars = CHARACTERS if vocab == 65 else [chr(33 + i) for i in range(min(vocab, 90))]
    ids[:tokens].astype(np.uint16).tofile(folder / "train.bin")
    ids[tokens:].astype(np.uint16).tofile(folder / "val.bin")
    import pickle

    meta = {"vocab_size": vocab, "stoi": {c: i for i, c in enumerate(chars)}, "itos": dict(enumerate(chars))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def write_mixture(path):
    """Data sets in path/data: tiny, file, and shards, which contains the same tokens as tiny."""
    tiny = tiny_data(path)
    tiny_data(path, tokens=9000, name="file")
    for name in ("tiny", "file"):
        add_documents(path / "data" / name)
    in_shards(tiny, "shards")


def in_shards(folder, name):
    """Copy a data set, with its training tokens in shards that are named as those of llm.c."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    ids = np.fromfile(copy / "train.bin", np.uint16)
    (copy / "train.bin").unlink()
    (copy / "val.bin").rename(copy / "text_val_000000.bin")
    header = np.zeros(256, np.int32)
    for number, part in enumerate(np.split(ids, np.cumsum(SHARDS)), 1):
        header[:3] = 20240520, 1, len(part)
        (copy / f"text_train_{number:06d}.bin").write_bytes(header.tobytes() + part.tobytes())


def add_documents(folder):
    """Write documents.bin: a document begins at each line break before a speaker's name."""
    ids = np.fromfile(folder / "train.bin", np.uint16)
    is_break = ids == 0  # the first of the characters
    begins = np.flatnonzero(is_break[:-1] & is_break[1:])
    begins = np.unique([0, *begins + 1])
    begins.astype(np.int64).tofile(folder / "documents.bin")
    (folder / "meta.json").write_text(json.dumps({"train_documents": len(begins)}))


def records(out_dir):
    """
    The records of a run's metrics.jsonl that count: without steps that a resume has repeated, and torn lines.
    """
    from isogpt.common.files import read_records

    found = []
    for record in read_records(Path(out_dir) / "metrics.jsonl"):
        if record.get("event") == "resume":
            found = [r for r in found if "event" in r or r["iter"] < record["iter"] + ("val_loss" in r)]
        found.append(record)
    return found


def column(out_dir, key):
    """{step: value} of a logged number."""
    return {r["iter"]: r[key] for r in records(out_dir) if key in r and "event" not in r}


def assert_same_curve(folder, reference):
    """The losses of two runs are equal up to rounding."""
    same(column(folder, "loss"), column(reference, "loss"), absolute=1e-5)


def same(a, b, absolute=0.0, relative=0.0):
    """Two columns have the same steps, and numbers that are equal up to rounding."""
    import pytest

    assert a.keys() == b.keys() and len(a) > 0
    for step in a:
        assert a[step] == pytest.approx(b[step], abs=absolute, rel=relative), f"step {step}"


def assert_same_run(folder, reference):
    """Two runs have the same losses and norms, and end with the same tensors, bit for bit."""
    import torch

    for key in ("loss", "grad_norm", "train_loss", "val_loss"):
        assert column(folder, key) == column(reference, key), key
    a, b = tensors_in(folder), tensors_in(reference)
    assert a.keys() == b.keys() and [name for name in a if not torch.equal(a[name], b[name])] == []


def tensors_in(folder):
    """All tensors of a run's newest checkpoint, put together from shards if it consists of them."""
    import torch

    from isogpt.checkpoint.search import find_checkpoint
    from isogpt.checkpoint.source import open_checkpoint
    from isogpt.parallel.local_parts import LocalPart

    found, reports = find_checkpoint(str(folder))
    assert found and not reports
    source = open_checkpoint(found)
    tensors = {name: torch.empty(shape) for name, shape in source.shapes.items()}
    source.read({name: LocalPart(t.shape, (((0,) * t.dim(), t),)) for name, t in tensors.items()})
    return tensors


def children(pid):
    """The child processes of pid."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def listening(pid):
    """Where a process and the processes that it has started listen: TCP addresses with their ports."""
    inodes = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            words, port = local.split(":")
            if state == "0A":
                # 32-bit numbers in the machine's order
                address = np.frombuffer(bytes.fromhex(words), ">u4").astype(np.uint32).tobytes()
                inodes[f"socket:[{inode}]"] = socket.inet_ntop(family, address), int(port, 16)
    addresses, pids = set(), [pid]
    for process in pids:
        with suppress(OSError):  # it has just exited
            pids += children(process)
            for fd in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    addresses.add(inodes.get(os.readlink(fd)))
    return addresses - {None}


def wait_for(what, seconds=60):
    """Wait until what() is true; returns its value."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "not seen in time"
        time.sleep(0.02)
    return value


def steps_in(folder):
    """The last step that a run has logged; -1 before the first."""
    return max(column(folder, "loss"), default=-1) if (folder / "metrics.jsonl").exists() else -1
