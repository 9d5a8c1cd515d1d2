"""Two starts in one folder: a live run loses no step, and a dead run's folder is free at once."""

import json
import os
import re
import shutil
import signal
import threading
import time

import pytest
from runs import TINY, column, records, start_faulty, wait_for

from isogpt.checkpoint import owner
from isogpt.checkpoint.folder import enter_folder
from isogpt.launch.launchers import Launch
from isogpt.launch.network import this_kernel

ARGS = ["--out_dir=out", "--save_interval=5", "--max_iters=12"]
ALIVE = (
    r"error: out is the folder of a run that is alive \(process {} on .*\): stop it, or set --out_dir=out_1"
)


@pytest.fixture(params=[1, 2])
def nproc(request):
    return request.param


@pytest.fixture
def begin(zygote, work, nproc):
    """Start a run in `out`; with `hold`, it waits in step 7 until there is a file `go`."""

    def begin(init_from="scratch", hold=False, *args):
        args = [*ARGS, f"--init_from={init_from}", *args]
        if not hold:
            return zygote.start([*TINY, *args], work, nproc)
        (work / "go").unlink(missing_ok=True)
        run = start_faulty(zygote, args, work, nproc, WAIT=[[7, rank] for rank in range(nproc)])
        assert run.until(lambda text: text.count("held by the test") == nproc)
        # step 5 is written in the background
        wait_for(lambda: (work / "out/step_00000005/manifest.json").exists())
        return run

    return begin


def assert_complete(run, work):
    """Let a run that waits go on; all of its steps must be there."""
    (work / "go").touch()
    assert "failed" not in run.wait().text()
    assert [*column(work / "out", "loss")] == [*range(13)] and records(work / "out")[-1]["event"] == "end"
    assert (work / "out/step_00000013").exists()


def test_a_second_start_is_refused_while_the_first_one_lives(begin, work, nproc):
    first = begin(hold=True)
    for init_from in ("scratch", "resume", "auto"):
        second = begin(init_from).wait(ok=False)
        # rank 0 is the process that has claimed the folder
        assert len(re.findall(ALIVE.format(first.pids[0]), second.text())) == 1, second.text()
        assert second.codes == [1] * nproc
    assert "step 5" in begin("resume", False, "--eval_only=True").wait().text()
    first.kill(sig=signal.SIGSTOP)
    assert 1 in begin("auto").wait(ok=False).codes
    first.kill(sig=signal.SIGCONT)
    assert_complete(first, work)
    assert not list(work.glob("out/previous*"))


def test_of_starts_at_the_same_time_one_trains(begin, work, nproc):
    starts = [begin(init_from) for init_from in ("scratch", "auto", "scratch")]
    codes = sorted(set(run.wait(ok=False).codes).pop() for run in starts)
    assert codes == [0, 1, 1]
    assert sum("is the folder of a run that is alive" in run.text() for run in starts) == 2
    assert [*column(work / "out", "loss")] == [*range(13)] and not list(work.glob("out/previous*"))


def test_the_folder_of_a_run_that_has_ended_is_free_at_once(begin, work, nproc):
    first = begin(hold=True)
    first.kill([0])
    wait_for(lambda: first.poll() or first.codes[0] is not None)  # the other rank may not have noticed yet
    second = begin("resume", hold=True)
    second.kill()
    second.wait(ok=False)
    third = begin("auto", hold=True)
    third.kill([0], signal.SIGTERM)
    (work / "go").touch()
    assert third.wait(ok=False) and (work / "out/PREEMPTED").exists()
    fourth = begin("auto").wait().text()
    assert "step_00000009" in fourth and "sign of life" not in fourth
    assert [*column(work / "out", "loss")] == [*range(13)] and not list(work.glob("out/previous*"))
    assert "which was moved to out/previous_1" in begin().wait().text()
    first.wait(ok=False)


def claim_elsewhere(out):
    """Claim the folder as a run on a different machine, which shares no locks; its touches follow later."""
    (out / "owner").write_text(json.dumps({"owner": "x", "process": "process 7 on b", "kernel": "other"}))


def test_a_run_on_a_different_machine_is_known_by_its_touches(tmp_path, at, capsys):
    for name, value in {"BEAT_S": 0.1, "SILENCE_S": 1.0}.items():
        at.set(owner, name, value)
    out = tmp_path / "out"
    out.mkdir()
    claim_elsewhere(out)
    beating = threading.Thread(target=owner.keep, args=(out, "x", open(out / "owner")))
    beating.start()
    with pytest.raises(ValueError, match=r"alive \(process 7 on b\): stop it, or set --out_dir=.*out_1"):
        enter_folder(str(out), None, Launch())
    owner.write_owner(out, "y", None)  # ends it
    beating.join()
    claim_elsewhere(out)
    began = time.monotonic()
    assert enter_folder(str(out), None, Launch()) and "waiting up to 1 s" in capsys.readouterr().out
    assert time.monotonic() - began < 10
    with pytest.raises(ValueError, match=f"alive .process {os.getpid()} "):
        enter_folder(str(out), None, Launch())
    # a run that ended long ago is not waited for
    other = tmp_path / "other"
    other.mkdir()
    claim_elsewhere(other)
    os.utime(other / "owner", (0, 0))
    assert enter_folder(str(other), None, Launch()) and not capsys.readouterr().out
    # a restart of a launch takes over what an earlier start may still hold
    again = tmp_path / "again"
    again.mkdir()
    launch = Launch(agents=("one",))
    enter_folder(str(again), None, launch)
    assert enter_folder(str(again), None, Launch(agents=("one", "two")))
    assert this_kernel() in (again / "owner").read_text()


def test_a_run_touches_its_own_folder_after_a_change_of_the_working_directory(at):
    at.set(owner, "BEAT_S", 0.05)
    folders = [at.path / "a/out", at.path / "b/out"]
    folders[0].parent.mkdir()
    at.chdir(folders[0].parent)
    enter_folder("out", None, Launch())
    shutil.copytree(folders[0], folders[1])
    at.chdir(folders[1].parent)
    for folder in folders:
        os.utime(folder / "owner", (0, 0))
    for _ in range(3):  # the first touch may have begun before the change
        wait_for(lambda: (folders[0] / "owner").stat().st_mtime)
        os.utime(folders[0] / "owner", (0, 0))
    assert not (folders[1] / "owner").stat().st_mtime


def test_a_folder_that_cannot_be_prepared_says_what_to_type(at):
    """As with checkpoints of a different user in a folder that everybody can write to."""

    def refused(*paths):
        raise PermissionError(13, "Permission denied")

    (at.path / "out").mkdir()
    (at.path / "out/metrics.jsonl").write_text('{"iter": 0, "loss": 4.0}\n')
    rename = os.rename
    at.set(os, "rename", lambda old, new: refused() if "previous" in str(new) else rename(old, new))
    with pytest.raises(ValueError, match="out_dir out cannot be used on .*denied.*: set another --out_dir="):
        enter_folder("out", None, Launch())
