"""Checkpoints on a disk: what kills, damage, slow disks and restarts leave, and what saves read and send."""

import errno
import gc
import json
import os
import re
import shutil
import signal
import statistics
import threading
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from runs import TINY, column, records, start_changed, steps_in, train_defaults

import export
from isogpt.checkpoint import huggingface
from isogpt.checkpoint.ckpt_file import nanogpt_state, write_file
from isogpt.checkpoint.folder import make_writable
from isogpt.checkpoint.search import find_checkpoint
from isogpt.training import optim
from model import GPT, GPTConfig

SHORT = ["--max_iters=5", "--save_interval=3", "--eval_interval=100", "--out_dir=out"]


@pytest.fixture
def place(trained, work):
    """A folder with the data and a run of 6 steps in out/, with checkpoints of steps 3 and 6."""
    shutil.copytree(trained(SHORT[:-1]), work / "out", symlinks=True)
    return work


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------------------------
# kills and damage


# train.py that is killed at a call that changes the run's folder, from its second checkpoint on
KILLED = """
import signal
calls, commits, rename = [], [], os.rename
def counted(function):
    def call(*args, **kwargs):
        calls.extend(commits[1:2])
        if len(calls) > NUMBER:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        commits.extend([1] * (function is rename and "/step_" in str(args[1])))
        return result
    return call
for name in ("fsync", "rename", "replace", "symlink", "unlink", "mkdir"):
    setattr(os, name, counted(getattr(os, name)))
"""


@pytest.mark.slow
def test_twenty_kills_around_saves_lose_nothing(zygote, work):
    """Each start resumes from the newest checkpoint that was complete before the kill."""
    out, before = work / "out", 0
    args = ["--save_interval=1", "--max_iters=1000", "--out_dir=out", "--init_from=auto", "--keep_last=1"]
    for number in range(20):
        changes = KILLED.replace("NUMBER", str(number))
        run = start_changed(zygote, changes, args, work).wait(ok=False)
        assert run.codes == [-signal.SIGKILL], run.text()
        assert f"out/step_{before:08d}/ckpt.pt, step {before}\n" in run.text() or not before
        found, reports = find_checkpoint(str(out))
        saved = re.findall(r"saved out/step_(\d+)", run.text())
        assert not reports and found.step >= max(before + 1, *map(int, saved)), number
        before = found.step


LEFT_BY_RUNS = {"unfinished_0123abcd_step_00000099", "unfinished_step_00000002", "owner.0123456789abcdef.tmp"}
OF_USERS = {"unfinished_thesis", "unfinished_export_0123abcd", "mine.tmp"}


def test_two_damaged_newest_checkpoints_are_passed_over(zygote, work):
    """One by a bit in what rank 1 verifies, one because a file is missing. A start also cleans up."""
    out, args = work / "out", [*SHORT, "--zero=3", "--keep_last=9", "--max_iters=8"]
    zygote.train(args, work, 2)
    flip_a_bit(out / "step_00000009/__1_0.distcp")
    (out / "step_00000006/.metadata").unlink()
    for name in LEFT_BY_RUNS | OF_USERS:
        (out / name).mkdir()
    text = zygote.train([*args, "--init_from=resume"], work, 2).text()
    assert text.count("out/step_00000009 is damaged: the checksum of __1_0.distcp does not match\n") == 1
    assert "out/step_00000006 is damaged: .metadata cannot be read (No such file" in text
    assert text.count("is damaged") == 2 and ", step 3\n" in text
    names = {path.name for path in out.iterdir()}
    assert {"damaged_step_00000006", "damaged_step_00000009", *OF_USERS} <= names and not LEFT_BY_RUNS & names


def test_the_newest_checkpoint_takes_the_place_of_a_best_one_that_is_damaged_or_gone(zygote, work):
    out = work / "out"
    zygote.train([*SHORT, "--eval_interval=2", "--keep_last=9", "--max_iters=7"], work)
    worse = ["--learning_rate=9", "--min_lr=9", "--warmup_iters=0", "--max_iters=8", "--keep_last=9"]
    run = zygote.train([*SHORT, "--init_from=auto", *worse, "--eval_interval=99"], work)
    assert "at step 8\n" in run.text()
    assert find_checkpoint(str(out), best=True)[0].step == 8
    flip_a_bit(out / "step_00000008/ckpt.pt")
    found, reports = find_checkpoint(str(out), best=True)
    assert found.step == 9 and len(reports) == 1 and "step_00000008" in reports[0]
    shutil.rmtree(out / "step_00000008")
    assert find_checkpoint(str(out), best=True) == find_checkpoint(str(out))


# ------------------------------------------------------------------------------------------------------------
# the disk

# train.py that notes what is synced and which folders are renamed, on a disk that changes what is on it. With
# REFUSES, folders cannot be synced, as on CIFS
NOTED = """
import errno, json, stat
fsync, rename = os.fsync, os.rename
def note(*event):
    with open("events", "a") as file:
        print(json.dumps(event), file=file)
def noted_fsync(descriptor):
    status = os.fstat(descriptor)
    note("fsync", status.st_ino)
    if REFUSES and stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "Invalid argument")
    fsync(descriptor)
    if status.st_size > 10**5:
        os.pwrite(descriptor, b"what nobody has written", status.st_size // 2)
def noted_rename(old, new):
    if os.path.isdir(old):
        note("rename", os.path.basename(new), *(file.inode() for file in os.scandir(old)))
    rename(old, new)
os.fsync, os.rename = noted_fsync, noted_rename
"""


@pytest.mark.parametrize("flags", [[], ["--zero=3"]], ids=["ckpt.pt", "shards"])
def test_a_checkpoint_is_on_the_disk_before_it_counts_and_before_an_older_one_is_deleted(zygote, work, flags):
    """
    Each file is synced before the rename, and the run's folder after it: else a power failure could leave
    neither checkpoint. The checksums are those of what was written, not of what can be read afterwards.
    """
    changes = NOTED.replace("REFUSES", str(bool(flags)))
    start_changed(zygote, changes, [*SHORT, "--keep_last=1", *flags], work).wait()
    events = [json.loads(line) for line in (work / "events").read_text().splitlines()]
    first, second = (number for number, event in enumerate(events) if str(event[1]).startswith("step_"))
    written = {inode for kind, inode, *_ in events[first:second] if kind == "fsync"}
    _, _, *files = events[second]
    assert len(files) > 1 and {*files} <= written
    (_, folder), (_, deleted, *_) = events[second + 1 : second + 3]
    assert folder == (work / "out").stat().st_ino and deleted == "unfinished_step_00000003"
    _, row = export.list_checkpoints(str(work / "out")).splitlines()
    assert " 6 " in row and "damaged: the checksum" in row


# a config file with which rank 1 can write no file of more than 4 KB, as on a disk that is almost full
LIMITED = """
import os, resource, sys
if os.environ["RANK"] == "1":
    sys.dont_write_bytecode = True  # the other rank would read half a .pyc
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""


def test_a_disk_that_is_full_for_one_rank_is_named(zygote, work):
    """
    torch.save and torch.distributed.checkpoint replace the error by their own, which say nothing about a
    disk.
    """
    (work / "limited.py").write_text(LIMITED)
    run = zygote.train([*SHORT, "--zero=1", "limited.py"], work, 2, ok=False)
    failed = [r["reason"] for r in records(work / "out") if r.get("event") == "save_failed"]
    assert failed == ["[Errno 27] File too large (rank 1)"] * 2, run.text()
    assert not list((work / "out").glob("*step_*")) and "Traceback" not in run.text()


# an old checkpoint that cannot be renamed, as after chattr +i, or on Windows while a program reads it
LOCKED = """
import errno
rename = os.rename
def locked_rename(old, new):
    if os.path.basename(old) == "step_00000003":
        raise OSError(errno.EBUSY, "Device or resource busy")
    rename(old, new)
os.rename = locked_rename
"""


def test_a_checkpoint_is_complete_even_if_an_old_one_cannot_be_deleted(zygote, work):
    """Each new one counted as failed, and so did the run."""
    run = start_changed(zygote, LOCKED, [*SHORT, "--keep_last=1"], work).wait()
    assert "saved out/step_00000006" in run.text() and "failed" not in run.text()
    assert "warning: out/step_00000003 cannot be deleted: " in run.text()
    assert {"step_00000003", "step_00000006"} <= {path.name for path in (work / "out").iterdir()}


# a disk on which rank 0 takes long to write and verify a checkpoint, and rank 1 to read it
SLOW_DISK = """
import hashlib, time
import torch
def slow(function, is_slow=lambda *args: True):
    return lambda *args, **kwargs: is_slow(*args) and time.sleep(9) or function(*args, **kwargs)
hashlib.file_digest = slow(hashlib.file_digest)
os.fsync = slow(os.fsync, lambda descriptor: os.fstat(descriptor).st_size > 10**5)
if os.environ["RANK"] == "1":
    torch.load = slow(torch.load)
"""


@pytest.mark.slow
def test_ranks_wait_for_a_disk_that_is_slower_than_dist_timeout_s(zygote, work):
    args = ["--max_iters=5", "--eval_interval=100", "--out_dir=out", "--dist_timeout_s=6"]
    assert "saved out/step_00000006" in start_changed(zygote, SLOW_DISK, args, work, 2).wait().text()
    args += ["--init_from=auto", "--max_iters=6", "--save_checkpoint=False"]
    assert "iter 6:" in start_changed(zygote, SLOW_DISK, args, work, 2).wait().text()


@pytest.mark.parametrize("name", ["pathlib.Path.mkdir", "os.replace", "builtins.open", "os.rename"])
def test_what_a_run_needs_of_its_folder_is_tried_at_the_start(at, name):
    """A mounted bucket cannot rename folders: such a run trained to its end, and saved nothing."""
    make_writable("out")
    assert list(at.path.iterdir()) == [at.path / "out"] and not os.listdir("out"), "nothing is left"
    refuse = Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)))
    with patch(name, refuse), pytest.raises(ValueError, match="^out_dir out .*Function not .*--out_dir"):
        make_writable("out")
    assert not os.listdir("out")


# a config file with which each rank uses a different folder
OWN = "import os\nout_dir = 'out' + os.environ['RANK']\n"


@pytest.mark.slow
def test_ranks_with_folders_of_their_own(zygote, work):
    """Shards would be in several folders; a checkpoint that rank 0 writes can be written, but not resumed."""
    (work / "own.py").write_text(OWN)
    args = ["own.py", *SHORT[:-1], "--dist_timeout_s=60"]
    run = zygote.train([*args, "--zero=1"], work, 2, ok=False)
    problem = f"rank 1: out_dir {work}/out1 is not rank 0's folder, but all ranks write shards"
    assert set(run.codes) == {1} and run.text().count(f"error: {problem}") == 1
    assert "or set --save_checkpoint=False\n" in run.text() and not (work / "out1").exists()
    zygote.train([*args, "--zero=1", "--save_checkpoint=False"], work, 2)  # the advice is accepted
    zygote.train(args, work, 2)
    run = zygote.train([*args, "--init_from=resume"], work, 2, ok=False)
    said = f"error: rank 1: {work}/out1/step_00000006/ckpt.pt is not the checkpoint that rank 0 found"
    assert set(run.codes) == {1} and said in run.text()
    shutil.copytree(work / "out0", work / "out1", symlinks=True)
    flip_a_bit(work / "out1/step_00000006/ckpt.pt")
    (work / "own.py").write_text(f"{OWN}os.environ['LOCAL_RANK'] = '0'\n")  # each is on a machine of its own
    text = zygote.train([*args, "--init_from=resume", "--max_iters=7"], work, 2).text()
    assert "out1/step_00000006" not in text and "step_00000006 is damaged" in text
    assert "step 3\n" in text and "iter 7:" in text


# ------------------------------------------------------------------------------------------------------------
# restarts

# train.py that is killed when it renames a checkpoint that the command does not ask for
KILLED_AT_START = """
import signal
rename = os.rename
def killed(old, new):
    if "abandoned_" in str(new):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(old, new)
os.rename = killed
"""


def test_a_restart_continues_what_the_launch_has_written(zygote, place):
    """
    The restart count of rank 0's agent stays 0 when other agents fail. A launch is known by its agents: here
    the zygote.
    """
    out = place / "out"

    def start(*args, is_restart=False, changes=""):
        if not is_restart:  # typed again
            (out / "owner").write_text((out / "owner").read_text().replace('"agents": ["', '"agents": ["x'))
        env = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0"}
        return start_changed(zygote, changes, [*SHORT, *args], place, group=True, env=env)

    def abandoned():
        return len(list(out.glob("abandoned_*")))

    chosen = ["--init_from=resume:3", "--max_iters=6", "--keep_last=0"]
    killed = start(*chosen, changes=KILLED_AT_START).wait(ok=False)
    assert killed.codes == [-signal.SIGKILL] and abandoned() == 0
    # what the command asks for has not happened yet
    text = start(*chosen, is_restart=True).wait().text()
    assert "step_00000003/ckpt.pt, step 3" in text and abandoned() == 1
    run = start(*chosen, "--max_iters=7", is_restart=True).wait()
    assert "step_00000007/ckpt.pt, step 7\n" in run.text() and abandoned() == 1
    assert "step_00000003/ckpt.pt, step 3" in start(*chosen).wait().text() and abandoned() == 4
    run = start("--save_interval=0", "--eval_interval=1000000", "--max_iters=1000000")
    assert run.until(lambda text: "iter 4:" in text)  # without a checkpoint
    run.kill()
    run.wait(ok=False)
    assert (out / "previous_1/step_00000007").exists()
    start(is_restart=True).wait()
    assert not (out / "previous_2").exists() and steps_in(out) == 5
    start().wait()
    assert (out / "previous_2/step_00000006").exists()


def test_a_launch_is_known_by_its_requeued_job(zygote, place):
    """Not by a command that is typed twice in a job, nor in a different one."""

    def earlier_runs(job, restarts):
        env = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts}
        zygote.start([*TINY, *SHORT, "--max_iters=1"], place, env=env).wait()
        return len(list((place / "out").glob("previous_*")))

    assert earlier_runs("7", "0") == 1 and earlier_runs("7", "0") == 2
    assert earlier_runs("7", "1") == 2 and earlier_runs("8", "2") == 3


# ------------------------------------------------------------------------------------------------------------
# what saves, resumes and conversions read, send and allocate

# train.py that says how much it hashes of files, and what ranks send about a checkpoint in shards
COUNTED = """
import hashlib, pickle
from torch.distributed.checkpoint.utils import _DistWrapper
digest = hashlib.file_digest
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def counted_digest(file, name):
    say("hashed", os.fstat(file.fileno()).st_size)
    return digest(file, name)
def count(name):
    send = getattr(_DistWrapper, name)
    def counted_send(wrapper, value):
        say(name, len(pickle.dumps(value)))
        return send(wrapper, value)
    setattr(_DistWrapper, name, counted_send)
hashlib.file_digest = counted_digest
count("gather_object"), count("broadcast_object")
"""


def counts_of(run, what):
    """For each rank, the numbers that train.py with COUNTED has said."""
    texts = [Path(out).read_text() for out in run.outs]
    return [[int(n) for n in re.findall(rf"^{what} (\d+)$", text, re.M)] for text in texts]


def sent(run):
    """The bytes that ranks send to rank 0 in the first and in the last save, and that rank 0 sends back."""
    of_saves = np.reshape(counts_of(run, "gather_object"), (len(run.outs), 3, -1)).sum((0, 2))
    return of_saves[0], of_saves[-1], sum(counts_of(run, "broadcast_object")[0])


def test_ranks_hash_write_and_describe_their_parts(zygote, work):
    """
    Of a checkpoint in shards, each rank hashes what it writes, and verifies its part at a resume. Copies are
    written once, by all of their holders. Later saves send only where the pieces are.
    """
    args = ["--zero=3", "--n_embd=128", "--max_iters=2", "--save_interval=1", "--keep_last=0"]
    few = start_changed(zygote, COUNTED, [*args, "--out_dir=few"], work, 2).wait()
    args += ["--dp_replicate=2", "--out_dir=many"]
    many = start_changed(zygote, COUNTED, args, work, 4).wait()
    for first, last, others in (sent(few), sent(many)):
        assert last < 0.6 * first and others < 1000
    assert sent(many)[1] < 2.2 * sent(few)[1]
    assert not sum(counts_of(many, "hashed"), [])
    step = work / "many/step_00000003"
    sizes = {path.name: path.stat().st_size for path in step.iterdir() if path.name != "manifest.json"}
    shards = [size for name, size in sizes.items() if name.endswith(".distcp")]
    assert len(shards) == 4 and max(shards) < 1.2 * min(shards)
    resumed = start_changed(zygote, COUNTED, [*args, "--init_from=resume", "--max_iters=3"], work, 4).wait()
    hashed = [*map(sum, counts_of(resumed, "hashed"))]
    assert max(hashed) < 1.5 * min(hashed) and sum(hashed) == sum(sizes.values())


def peak_of(work):
    """By how many bytes work() raises the process's memory, without pages of files, at most."""

    def memory():
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    def watch():
        while not is_done.wait(0.001):
            highest.append(memory())

    gc.collect()
    before = memory()
    highest, is_done = [before], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    is_done.set()
    thread.join()
    return max(highest) - before


def bytes_of_conversions(zygote, work, n_embd):
    """Bytes per parameter that a save and conversions allocate beyond the state of a run of GPT-2."""
    out = work / f"out{n_embd}"
    shape = {"n_layer": 4, "n_head": 8, "n_embd": n_embd, "block_size": 64}
    settings = [f"--{name}={value}" for name, value in shape.items()]
    zygote.train([*settings, "--zero=3", "--max_iters=0", f"--out_dir={out}"], work)
    model = GPT(GPTConfig(**shape, vocab_size=65))
    count, config = sum(p.numel() for p in model.parameters()), train_defaults()
    optimizers = optim.make_optimizers(model, config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        optimizer.step()
    run = dict(model_args=model.describe(), iter_num=5, best_val_loss=3.0, config=config, isogpt={})
    file = out / "saved/ckpt.pt"
    save = peak_of(lambda: write_file(file, nanogpt_state(run, model, optimizers, copy=True)))
    to_file = peak_of(lambda: export.convert(str(out), "ckpt.pt"))
    to_hf = peak_of(lambda: huggingface.save(out / "hf", model, {}, file_size="8MB"))
    return [peak / count for peak in (save, to_file, to_hf)]


@pytest.mark.slow  # imports transformers
def test_what_saves_and_conversions_allocate(zygote, work):
    """A save: a copy of weights and moments. A conversion: at most the state itself, once."""
    bytes_of_conversions(zygote, work, 8)  # imports what is imported when it is first used
    save, to_file, to_hf = bytes_of_conversions(zygote, work, 512)
    assert save < 13
    assert to_file < 13.5, "24 in the commit before"
    assert to_hf < 1.5, "a file's weights"


@pytest.mark.slow
def test_a_run_that_evaluates_and_saves_takes_no_more_memory_with_each_step(zygote, work):
    """The peak of a run can rise by a megabyte or two when its threads happen to need memory together."""
    args = ["--compile=False", "--max_iters=1500", "--eval_interval=20", "--out_dir=out"]
    zygote.train(args, work, env={"OMP_NUM_THREADS": "1"})
    memory = {step: gb * 1e9 for step, gb in column(work / "out", "memory_gb").items()}
    # memory that stays after each evaluation keeps raising the peak; threads that need it together do so once
    rises = [memory[step + 100] - memory[step] for step in range(1000, 1500, 100)]
    assert 10 * statistics.median(rises) < 1e6, "3.5 MB in 1,000 steps in the code of e430e46"
    assert sum(rises) < 5e6
