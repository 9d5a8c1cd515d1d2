"""Faults that were found by trying to break the scripts: each test failed before its repair."""

import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from runs import REPO, TINY, column, records, start_changed, start_faulty, steps_in

import export
from isogpt.checkpoint import folder as folder_module
from isogpt.checkpoint import sharded_files
from isogpt.checkpoint.ckpt_file import write_file
from isogpt.checkpoint.commit import commit_checkpoint
from isogpt.checkpoint.folder import clean_up, enter_folder, look_for_start, make_writable
from isogpt.checkpoint.manifest import damage, make_manifest, step_folders
from isogpt.checkpoint.search import find_checkpoint
from isogpt.launch.launchers import Launch, make_launch
from isogpt.parallel.local_parts import local_part_of

SHORT = ["--max_iters=5", "--save_interval=3", "--eval_interval=100", "--out_dir=out"]


@pytest.fixture
def place(trained, work):
    """A folder with the data and a run of 6 steps in out/, with checkpoints of steps 3 and 6."""
    shutil.copytree(trained(SHORT[:-1]), work / "out", symlinks=True)
    return work


# ------------------------------------------------------------------------------------------------------------
# data lost


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


def test_two_damaged_newest_checkpoints_are_passed_over(zygote, place):
    """One by a bit, one because a file is missing. Shards are in test_zero.py."""
    out = place / "out"
    zygote.train([*SHORT, "--keep_last=9", "--max_iters=8", "--init_from=auto"], place)
    flip_a_bit(out / "step_00000009/ckpt.pt")
    (out / "step_00000006/ckpt.pt").unlink()
    text = zygote.train([*SHORT, "--init_from=resume"], place).text()
    assert "out/step_00000009 is damaged: the checksum of ckpt.pt does not match\n" in text
    assert "out/step_00000006 is damaged: ckpt.pt cannot be read (No such file" in text
    assert text.count("is damaged") == 2 and ", step 3\n" in text
    assert {path.name for path in out.glob("damaged_*")} == {"damaged_step_00000006", "damaged_step_00000009"}


def test_a_start_clears_only_what_runs_leave(at):
    left = {"unfinished_0123abcd_step_00000099", "unfinished_step_00000002", "owner.0123456789abcdef.tmp"}
    kept = {"unfinished_thesis", "unfinished_export_0123abcd", "mine.tmp"}
    for name in left | kept:
        (at.path / "out" / name).mkdir(parents=True)
    clean_up(at.path / "out")
    assert {path.name for path in (at.path / "out").iterdir()} == kept


# ------------------------------------------------------------------------------------------------------------
# ranks that see different folders

# a config file with which each rank uses a different folder
OWN = "import os\nout_dir = 'out' + os.environ['RANK']\n"


@pytest.mark.slow
def test_ranks_with_folders_of_their_own(zygote, work):
    """Shards would be in several folders; a checkpoint that rank 0 writes can be written, but not resumed."""
    (work / "own.py").write_text(OWN)
    args = ["own.py", *SHORT[:-1], "--dist_timeout_s=60"]
    problem = f"rank 1: out_dir {work}/out1 is not rank 0's folder, but all ranks write shards"
    run = zygote.train([*args, "--zero=1"], work, 2, ok=False)
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
    assert "out1/step_00000006" not in text
    assert "step_00000006 is damaged: the checksum of ckpt.pt" in text
    assert "step 3\n" in text and "iter 7:" in text


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_settings_that_differ_are_named_before_they_shape_anything(zygote, work):
    """Groups of ranks, for instance, which other ranks would never join."""
    (work / "own.py").write_text("import os\ntp = 1 + int(os.environ['RANK'])\n")
    run = zygote.train([*SHORT, "own.py"], work, 2, ok=False)
    text = "error: the ranks were started with different settings: tp is 1 on rank 0, 2 on rank 1\n"
    assert set(run.codes) == {1} and run.text() == text


def write_unfinished(folder, name):
    """Write a checkpoint's file in a folder; returns its manifest."""
    run = {"iter_num": 3, "best_val_loss": 9.0, "config": {}, "model_args": {}, "isogpt": {}}
    if name == "ckpt.pt":
        written = write_file(folder / name, {"w": torch.zeros(1000)})
    else:
        written = sharded_files.write(folder, {"w": local_part_of(torch.zeros(1000))}, group=None)
    return make_manifest(run, 1, 0, None) | {"run": run, "files": written}


@pytest.mark.parametrize("name", ["ckpt.pt", "__0_0.distcp"])
def test_a_checkpoint_is_on_the_disk_before_it_counts_and_before_an_older_one_is_deleted(at, name):
    """
    Each file is synced before the rename, and the run's folder after it: else a power failure could leave
    neither checkpoint. The checksums are those of what was written, not of what can be read afterwards.
    """
    events, fsync, rename = [], os.fsync, os.rename
    at.set(os, "fsync", lambda fd: events.append(os.fstat(fd).st_ino) or fsync(fd))
    # not of .metadata, before the folder is synced
    at.set(os, "rename", lambda old, new: events.extend(["rename"] * Path(old).is_dir()) or rename(old, new))
    (at.path / "step_00000001").mkdir()
    manifest = write_unfinished(at.path / "unfinished", name)
    flip_a_bit(at.path / "unfinished" / name)
    folder = commit_checkpoint(at.path / "unfinished", manifest, keep_last=1)
    committed = events.index("rename")
    assert {path.stat().st_ino for path in folder.iterdir()} <= {*events[:committed]}
    assert events[committed + 1 :] == [at.path.stat().st_ino, "rename"]
    assert step_folders(at.path) == [folder]
    assert damage(folder) == f"the checksum of {name} does not match"
    flip_a_bit(folder / name)  # back
    assert not damage(folder)


def test_folders_that_cannot_be_synced(at):
    """As on CIFS: a checkpoint is complete there, too."""
    fsync, refuse = os.fsync, Mock(side_effect=OSError(errno.EINVAL, "Invalid argument"))
    at.set(os, "fsync", lambda fd: (refuse if stat.S_ISDIR(os.fstat(fd).st_mode) else fsync)(fd))
    make_writable("out")
    manifest = write_unfinished(at.path / "unfinished", "ckpt.pt")
    assert not damage(commit_checkpoint(at.path / "unfinished", manifest, keep_last=0)) and refuse.called


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


SLOW_DISK = """
import time
from isogpt.checkpoint import save, search, state
def slow(room, name):
    work = getattr(room, name)
    setattr(room, name, lambda *args, **kwargs: time.sleep(10) or work(*args, **kwargs))
slow(save, "write_file")
slow(search, "verify")
if os.environ["RANK"] == "1":
    slow(state, "restore_checkpoint")
"""


@pytest.mark.slow
def test_ranks_wait_for_a_disk_that_is_slower_than_dist_timeout_s(zygote, work):
    """Which writes, verifies and reads checkpoints."""
    args = [*SHORT, "--dist_timeout_s=6"]
    run = start_changed(zygote, SLOW_DISK, args, work, 2).wait()
    assert "saved out/step_00000003" in run.text() and "saved out/step_00000006" in run.text()
    args += ["--init_from=auto", "--max_iters=6", "--save_checkpoint=False"]
    assert "iter 6:" in start_changed(zygote, SLOW_DISK, args, work, 2).wait().text()


# ------------------------------------------------------------------------------------------------------------
# restarts


def test_a_restart_continues_what_the_launch_has_written(zygote, place):
    """
    The restart count of rank 0's agent stays 0 when other agents fail. A launch is known by its agents: here
    the zygote.
    """
    out = place / "out"

    def start(*args, is_restart=False):
        if not is_restart:  # typed again
            (out / "owner").write_text((out / "owner").read_text().replace('"agents": ["', '"agents": ["x'))
        env = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0"}
        return zygote.start([*TINY, *SHORT, *args], place, group=True, env=env)

    def abandoned():
        return len(list(out.glob("abandoned_*")))

    chosen = ["--init_from=resume:3", "--max_iters=6", "--keep_last=0"]
    assert "step_00000003/ckpt.pt, step 3" in start(*chosen).wait().text() and abandoned() == 1
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


def test_a_launch_is_known_by_its_requeued_job(at):
    assert not Launch().continues(Launch()), "without a launcher there are no restarts"
    at.env("SLURM_JOB_ID", "7")
    job = make_launch([""])
    assert not job.continues(job), "a command that is typed twice in a job"
    at.env("SLURM_RESTART_COUNT", "1")
    assert make_launch([""]).continues(job) and not make_launch([""]).continues(Launch(job="8"))


def test_a_start_that_is_killed_while_it_enters_a_folder_is_no_start(place):
    """What the command asks for has not happened yet: a restart must do it."""
    now, out = Launch(("agent",)), str(place / "out")
    found = find_checkpoint(out, step=3)[0]
    at_its_end = patch.object(folder_module, "continue_from", side_effect=KeyboardInterrupt)
    with at_its_end, pytest.raises(KeyboardInterrupt):
        enter_folder(out, found, now)
    assert look_for_start("resume:3", out, now)[0].step == 3


# ------------------------------------------------------------------------------------------------------------
# runs that die


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_the_run(work):
    """train.py ... | head -3"""
    command = [sys.executable, str(REPO / "train.py"), *TINY, *SHORT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=work, text=True, **pipes) as run:
        for _ in range(3):
            run.stdout.readline()
        run.stdout.close()
        errors = run.stderr.read()
    assert run.returncode == 0 and errors.count("Console failed") == 1 and "Traceback" not in errors
    assert (work / "out/step_00000006/ckpt.pt").exists() and (work / "out/loss.png").exists()


UNREADABLE = [  # processes, split, step, flags
    (1, "val", 10, ""),  # at the end
    (2, "val", 8, "--eval_interval=8 --islands=2 --local_steps=3"),
    (2, "train", 3, "--eval_interval=99 --zero=3"),
]


@pytest.mark.parametrize("nproc, split, due, flags", UNREADABLE)
def test_data_that_cannot_be_read_ends_a_run_whose_state_is_saved(zygote, work, nproc, split, due, flags):
    """
    In an evaluation or a step, on one of two ranks that compute together, and at the end of a run. The
    resumed run has the same bits.
    """
    args = ["--out_dir=out", "--max_iters=9", "--init_from=auto", "--eval_iters=3", *flags.split()]
    run = start_faulty(zygote, args, work, nproc, **{split: [due, nproc - 1]}).wait(ok=False)
    step = steps_in(work / "out") + 1
    # training reads a few steps in advance
    assert due <= step <= due + (5 if split == "train" else 0), run.text()
    assert set(run.codes) == {1} and "Traceback" not in run.text()
    rank = "rank 1: " if nproc > 1 else ""
    message = f"error: {rank}data/tiny/{split}.bin has been truncated since the start of the run\n"
    assert run.text().count(message) == 1 and f"saved out/step_{step:08d}\n" in run.text()
    zygote.train([*args, "--max_iters=10"], work, nproc)
    zygote.train([*args, "--max_iters=10", "--out_dir=straight"], work, nproc)
    assert column(work / "out", "loss") == column(work / "straight", "loss")


def test_the_newest_checkpoint_takes_the_place_of_a_best_one_that_is_damaged_or_gone(zygote, place):
    out = place / "out"
    shutil.rmtree(out)
    zygote.train([*SHORT, "--eval_interval=2", "--keep_last=9", "--max_iters=7"], place)
    worse = ["--learning_rate=9", "--min_lr=9", "--warmup_iters=0", "--max_iters=8", "--keep_last=9"]
    run = zygote.train([*SHORT, "--init_from=auto", *worse, "--eval_interval=99"], place)
    assert "at step 8\n" in run.text()
    assert find_checkpoint(str(out), best=True)[0].step == 8
    flip_a_bit(out / "step_00000008/ckpt.pt")
    found, reports = find_checkpoint(str(out), best=True)
    assert found.step == 9 and len(reports) == 1 and "step_00000008 is damaged" in reports[0]
    shutil.rmtree(out / "step_00000008")
    assert find_checkpoint(str(out), best=True) == find_checkpoint(str(out))


# ------------------------------------------------------------------------------------------------------------
# misleading messages


@pytest.mark.parametrize("name", ["mkdir", "replace", "open", "rename"])
def test_what_a_run_needs_of_its_folder_is_tried_at_the_start(at, name):
    """A mounted bucket cannot rename folders: such a run trained to its end, and saved nothing."""
    make_writable("out")
    assert list(at.path.iterdir()) == [at.path / "out"] and not os.listdir("out"), "nothing is left"
    refuse = Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)))
    place = {"mkdir": Path, "open": folder_module}.get(name, os)
    problem = "^out_dir out cannot be used on .*Function not .*--out_dir"
    with patch.object(place, name, refuse, create=True), pytest.raises(ValueError, match=problem):
        make_writable("out")
    assert not os.listdir("out")


def test_a_stop_before_the_first_checkpoint_does_not_advise_to_resume(zygote, work):
    run = zygote.start([*TINY, "--eval_iters=100000", "--out_dir=out"], work)
    assert run.until(lambda text: "peak:" in text)
    run.kill(sig=signal.SIGTERM)
    assert run.wait(ok=False).codes == [143] and "no checkpoint to resume" in run.text()
    assert "--init_from=resume" not in run.text() and "Traceback" not in run.text()


# ------------------------------------------------------------------------------------------------------------
# code in files, and errors in blocks that ranks share


RAISES = """
from isogpt.data import dataset
def fail(*args):
    if os.environ["RANK"] in "RANKS":
        raise KIND("what happened\\nand more")
dataset.open_dataset = fail
"""


@pytest.mark.parametrize("failing, kind", [("012", "KeyError"), ("2", "KeyboardInterrupt")])
def test_any_exception_in_a_shared_block_ends_all_ranks(zygote, work, failing, kind):
    """At once, with the traceback of the first rank that failed."""
    run = start_changed(zygote, RAISES.replace("RANKS", failing).replace("KIND", kind), SHORT, work, 3)
    text, first = run.wait(40, ok=False).text(), failing[0]
    assert all(run.codes) and "model:" not in text
    assert text.count(f"error: rank {failing}: {kind}: ") == (first != "0")
    assert text.count("Traceback") == 1 and "Traceback" in Path(run.outs[int(first)]).read_text()


def test_an_exported_ckpt_pt_is_a_file_and_not_a_link(place):
    """
    Through a link, nanoGPT's train.py would overwrite the checkpoint. Without step folders it is read, and
    not exported again.
    """
    path = export.convert(str(place / "out"), "ckpt.pt")
    assert path == place / "out/ckpt.pt" and not path.is_symlink()
    newest = place / "out/step_00000006/ckpt.pt"
    a, b = torch.load(path), torch.load(newest)
    assert a.keys() == b.keys() and a["iter_num"] == 6 and a["config"] == b["config"]
    assert find_checkpoint(place / "out")[0].path == newest
    (place / "bare").mkdir()
    bare = path.rename(place / "bare/ckpt.pt")
    written = bare.stat().st_mtime_ns
    for out_dir in (bare.parent, bare):
        assert export.convert(str(out_dir), "ckpt.pt") == bare and bare.stat().st_mtime_ns == written
        assert find_checkpoint(out_dir)[0].path == bare
