"""The mirror: checkpoints that are copied to a URL in the background."""

import os
import re
import shutil
import signal
import threading
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from runs import TINY, accepted, records, start_changed, train_defaults, wait_for

from isogpt.checkpoint.commit import commit_checkpoint
from isogpt.checkpoint.manifest import damage, entry_of, read_manifest, step_folders, steps_in
from isogpt.checkpoint.mirror import open_mirror
from isogpt.checkpoint.search import StoredCheckpoint
from isogpt.checkpoint.source import OpenCheckpoint

FILES = ("ckpt.pt", "more.distcp")
LEFT = {*FILES, "manifest.json", "mirror_owner"}


class Faulty(LocalFileSystem):
    """The local file system, which calls Faulty.before(operation, path) before each change."""

    protocol = ("faulty",)

    def before(operation, path):
        """Tests replace this."""

    def put_file(self, path1, path2, **kw):
        Faulty.before("put", path2)
        self.makedirs(os.path.dirname(path2), exist_ok=True)
        with open(path1, "rb") as file, open(path2, "wb") as there:
            there.write(file.read(500))
            there.flush()
            Faulty.before("put more", path2)
            there.write(file.read())

    def rm_file(self, path):
        Faulty.before("rm", path)
        super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        if self.isfile(path):
            return self.rm_file(path)
        for file in sorted(Path(path).iterdir()):
            self.rm_file(str(file))
        os.rmdir(path)


fsspec.register_implementation("faulty", Faulty, clobber=True)


def commit(out, step, best=0, keep_last=2, held=()):
    """Complete a checkpoint of two files, which differ from those of other steps."""
    unfinished = out / f"unfinished_step_{step:08d}"
    unfinished.mkdir(parents=True)
    for name in FILES:
        (unfinished / name).write_bytes(f"{name} of {step}".encode() * 100)
    files = {name: entry_of(unfinished / name) for name in FILES}
    manifest = {"step": step, "best_step": best, "val_loss": None, "files": files}
    return commit_checkpoint(unfinished, manifest, keep_last, held=held)


def copies(path, step=None, out="out", keep_last=2, url="faulty://"):
    """The mirror at path/there of a run in path/out, which resumes from a step or is new."""
    settings = dict(mirror=f"{url}{path}/there", out_dir=str(path / out), keep_last=keep_last)
    stored = StoredCheckpoint(path / out, step, {})
    resumed = OpenCheckpoint(stored, {"model_args": {}}, {}, {}) if step else None
    return open_mirror(train_defaults(**settings), resumed)


@contextmanager
def impatient():
    """In the block, whoever waits for an event, such as an answer, waits a thousandth of the time."""
    wait = threading.Event.wait
    with patch.object(threading.Event, "wait", lambda event, s=None: wait(event, s and s / 1000)):
        yield


def outcomes(mirror):
    assert mirror.idle.wait(60)
    there, mirror.outcomes = [*mirror.outcomes], deque()
    return there


def events(mirror):
    return [event for event, _, _ in outcomes(mirror)]


def warning(mirror):
    """The text of the only outcome, a failure."""
    ((event, text, _),) = outcomes(mirror)
    assert event == "mirror_failed" and text.startswith("warning: the mirror ")
    return text


def whole_steps(folder):
    """The steps that count in a folder; each of them must be whole."""
    counting = [f for f in step_folders(folder) if read_manifest(f)]
    assert not [problem for f in counting if (problem := damage(f))]
    return [read_manifest(f)["step"] for f in counting]


# ------------------------------------------------------------------------------------------------------------
# what is copied


def test_object_stores_get_files_under_their_names(tmp_path, at):
    copied = copies(tmp_path, keep_last=1, url="memory:/")
    fs, root = fsspec.url_to_fs(copied.url)
    for step in (1, 2, 3):
        copied.request(commit(tmp_path / "out", step, best=1, keep_last=1))
        assert events(copied) == ["mirror"]
    names = [f"{root}/step_{step:08d}/{name}" for step in (1, 3) for name in (*FILES, "manifest.json")]
    assert sorted(fs.find(root)) == sorted([*names, f"{root}/mirror_owner"])
    assert all(fs.cat_file(name) == (tmp_path / "out" / name[len(root) + 1 :]).read_bytes() for name in names)


def test_only_the_newest_waits_and_what_is_copied_is_not_deleted(tmp_path, at):
    began, go, out = threading.Event(), threading.Event(), tmp_path / "out"

    def wait(operation, path):
        began.set()
        assert "step" not in path or go.wait(60)

    at.set(Faulty, "before", wait)
    copied = copies(tmp_path)
    for step in range(1, 6):
        copied.request(commit(out, step, best=1 if step < 3 else 3, keep_last=1, held=copied.held()))
        assert began.wait(60)
    assert steps_in(out) == [5, 4, 3, 1]  # newest, waited before, best, under way
    go.set()
    assert [facts["iter"] for _, _, facts in outcomes(copied)] == [1, 5, 3]
    assert whole_steps(tmp_path / "there") == [5, 3]
    copied.request(commit(out, 6, best=3, keep_last=1))
    outcomes(copied)
    assert steps_in(out) == [6, 3] and whole_steps(tmp_path / "there") == [6, 5, 3]


def test_steps_to_which_the_run_did_not_go_on_do_not_count(tmp_path, at):
    """
    After resume:STEP: a later start would return to them. Their files are kept, and they do not
    replace one of keep_last.
    """
    copied = copies(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        copied.request(commit(tmp_path / "out", step, keep_last=0))
        outcomes(copied)
    os.rename(tmp_path / "out/step_00000003", tmp_path / "out/damaged_step_00000003")
    copied.request(tmp_path / "out/step_00000002")
    assert outcomes(copied) == [] and whole_steps(tmp_path / "there") == [2, 1]
    copied.request(commit(tmp_path / "out", 4, keep_last=0))
    assert events(copied) == ["mirror"] and whole_steps(tmp_path / "there") == [4, 2, 1]
    abandoned = tmp_path / "there/step_00000003"
    os.rename(abandoned / "abandoned_manifest.json", abandoned / "manifest.json")
    assert not damage(abandoned)


def test_only_the_latest_of_two_launches_copies_to_a_folder(tmp_path, at):
    """Also if it begins while the other one copies, which then does not abandon newer steps."""
    first = copies(tmp_path)
    first.request(commit(tmp_path / "out", 1))
    outcomes(first)

    def overtake(operation, path):
        if operation == "put more" and "step_00000002" in path:
            at.set(Faulty, "before", print)
            second = copies(tmp_path, step=1, out="2")
            second.request(commit(tmp_path / "2", 5))
            outcomes(second)

    at.set(Faulty, "before", overtake)
    first.request(commit(tmp_path / "out", 2))
    assert events(first) == ["mirror", "mirror_failed"]
    first.request(commit(tmp_path / "out", 3))
    assert "fails at step 3: a different run now copies there: set a different --mirror=" in warning(first)
    assert whole_steps(tmp_path / "there") == [5, 2, 1]


def test_a_new_run_does_not_write_among_earlier_checkpoints(tmp_path, at, capsys):
    """Also if the server does not answer at the start, which is only reported."""
    first = copies(tmp_path)
    first.request(commit(tmp_path / "out", 7))
    outcomes(first)
    with pytest.raises(SystemExit):
        copies(tmp_path)
    assert "there: it contains checkpoints of an earlier run: set --mirror=" in capsys.readouterr().err
    gate = threading.Event()
    with at.context() as without_answer, impatient():
        without_answer.setattr(Faulty, "ls", lambda *args, **kw: gate.wait())
        late = copies(tmp_path)
    gate.set()
    assert "fails at step 0: no answer within" in warning(late)
    late.request(commit(tmp_path / "out", 8))
    assert "fails at step 8: it contains" in warning(late) and whole_steps(tmp_path / "there") == [7]


# ------------------------------------------------------------------------------------------------------------
# failures


def run_with_death(path, at, number):
    """
    Mirror the checkpoints of steps 1 to 3, the first of which is the best. The process is killed in place of
    the operation with this number; returns how many operations there were.
    """
    copied, done = copies(path, keep_last=1), []

    def before(operation, file):
        done.append(operation)
        if len(done) > number:
            os.kill(os.getpid(), signal.SIGKILL)

    at.set(Faulty, "before", before)
    for step in (1, 2, 3):
        copied.request(commit(path / "out", step, best=1, keep_last=1))
        copied.idle.wait(60)
    return len(done)


def check_and_heal(path, at):
    """What is there is whole or does not count, and the next launch completes it. Returns what was there."""
    steps = whole_steps(path / "there") if (path / "there").exists() else []
    at.set(Faulty, "before", print)
    newest = steps_in(path / "out")[0]
    copied = copies(path, step=newest, keep_last=1)
    copied.request(step_folders(path / "out")[0])
    assert set(events(copied)) <= {"mirror"}
    assert whole_steps(path / "there") == sorted({newest, 1}, reverse=True)
    assert {f.name for f in (path / "there").rglob("*") if f.is_file()} == LEFT, "no leftovers"
    shutil.rmtree(path)
    return steps


def test_a_kill_at_any_operation_leaves_whole_checkpoints(tmp_path, at):
    """A real SIGKILL, also in the middle of a file."""
    total, there = run_with_death(tmp_path / "all", at, 1000), []
    for number in range(total):
        if not (pid := os.fork()):
            with suppress(BaseException):
                run_with_death(tmp_path / str(number), at, number)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        there.append(check_and_heal(tmp_path / str(number), at))
    # an older one is deleted only when the newer one is whole
    assert total > 20 and [*dict.fromkeys(map(tuple, there))] == [(), (1,), (2, 1), (3, 2, 1), (3, 1)]


def test_the_end_waits_with_a_limit(tmp_path, at):
    copied, gate = copies(tmp_path), threading.Event()
    copied.finish(0.0)
    at.set(Faulty, "before", lambda *args: gate.wait())
    copied.request(commit(tmp_path / "out", 1))
    wait_for(copied.held)
    with impatient():
        for seconds_left, waited in ((1000.0, "1:00"), (0.1, "0:00"), (-3.0, "0:00")):
            copied.finish(seconds_left)
            assert f"it takes longer than {waited}, and the run ends" in copied.outcomes.popleft()[1]
    gate.set()
    copied.finish(60.0)
    assert events(copied) == ["mirror"]


# ------------------------------------------------------------------------------------------------------------
# the setting


def test_what_is_no_mirror_is_refused(tmp_path, at, capsys):
    fsspec.register_implementation("lacking", "no_such_package.fs.Class", clobber=True)
    for url, problem in {
        "s4://key:secret@b": "s4://b: Protocol not known",
        "lacking://b": "failed for",
    }.items():
        with pytest.raises(SystemExit):
            open_mirror(train_defaults(mirror=url), None)
        assert re.match(f"error: mirror .*{problem}", capsys.readouterr().err)
    for arguments, advice in {
        "--mirror=/mnt/disk": "mirror is '/mnt/disk', but needs a URL such as s3://bucket/run: set",
        "--mirror=s3://bucket/run --save_checkpoint=False": "needs save_checkpoint: set --mirror=",
        "--mirror=file://out": "mirror is 'file://out', but needs a place outside of out_dir out: set",
        f"--mirror=file://{tmp_path}/a/b/.. --out_dir=./a": "needs a place outside of out_dir ./a",
    }.items():
        with pytest.raises(ValueError, match=re.escape(advice)):
            accepted("train.py", *arguments.split())
    accepted("train.py", "--mirror=", "--save_checkpoint=False")
    accepted("train.py", "--mirror=file://out-2", "--out_dir=out")


# ------------------------------------------------------------------------------------------------------------
# runs

# a file system that refuses step 2
CHANGES = """
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Odd(LocalFileSystem):
    protocol = ("odd",)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).rpartition("@host")[2] or str(path))

    def put_file(self, path1, path2, **kw):
        if "step_00000002" in path2:
            raise OSError(f"odd://me:secret@host{path2} says no")
        super().put_file(path1, path2)

fsspec.register_implementation("odd", Odd)
"""


def test_a_mirror_that_fails_ends_no_run(zygote, work):
    there = f"odd://host{work}/there"
    args = ["--max_iters=5", "--eval_interval=2", "--keep_last=1", "--out_dir=out"]
    url = there.replace("host", "me:secret@host")
    text = start_changed(zygote, CHANGES, [*args, f"--mirror={url}"], work).wait().text()
    files = [path for path in (work / "out").rglob("*.*") if path.is_file()]
    assert "secret" not in text and not any(b"secret" in path.read_bytes() for path in files)
    copied = [(r["event"], r["iter"]) for r in records(work / "out") if "mirror" in r.get("event", "")]
    assert copied[0] == ("mirror_failed", 2) and copied[-1] == ("mirror", 6)
    refusal = f"{there}/step_00000002/ckpt.pt says no"
    assert text.count(f"warning: the mirror {there} fails at step 2: {refusal}\n") == 1
    assert whole_steps(work / "there") == steps_in(work / "out") == [6]


@pytest.mark.slow
def test_shards_are_mirrored_and_a_stopped_run_waits_for_the_copy(zygote, work):
    args = ["--zero=3", "--eval_interval=5", "--max_iters=100000", f"--mirror=file://{work}/there"]
    run = zygote.start([*TINY, *args, "--out_dir=out"], work, 2)
    run.until(lambda text: "copied step_00000005" in text)
    run.kill([0], signal.SIGTERM)
    run.wait(ok=False)
    assert run.codes == [0, 0] and (work / "out" / "PREEMPTED").exists()
    assert whole_steps(work / "there")[0] == steps_in(work / "out")[0] > 5
    names = {f.name for f in step_folders(work / "out")[0].iterdir()}
    assert names == {f.name for f in step_folders(work / "there")[0].iterdir()} and len(names) > 3
