"""Reading a mirror: a resume on a machine whose disk is empty, and --init_from=URL."""

import errno
import hashlib
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from runs import column, script, start_changed, tensors_in, train_defaults
from s3_server import environment, s3  # noqa: F401  (a fixture)
from test_checkpoints import flip_a_bit as flip
from test_hostile import ALONE, seal
from test_mirror import impatient

from isogpt.checkpoint.folder import enter_folder
from isogpt.checkpoint.manifest import damage, read_manifest, steps_in
from isogpt.checkpoint.mirror import open_mirror
from isogpt.checkpoint.remote import Remote
from isogpt.checkpoint.start import find_start
from isogpt.launch.launchers import Launch
from isogpt.options.values import is_url, without_credentials
from isogpt.training.settings import check_training, without_secrets
from model import GPT

RUN = ["--eval_interval=4", "--max_iters=11", "--keep_last=0"]


def mirrored(run, folder, steps):
    """A copy of steps of a run, as a mirror contains them; returns its URL."""
    for step in steps:
        shutil.copytree(run / f"step_{step:08d}", folder / f"step_{step:08d}")
    return f"file://{folder}"  # fsspec does not decode %20


def assert_same_end(out, reference):
    """A resumed run has the bits of the undisturbed one; its log, on a new machine, begins with step 8."""
    assert column(out, "loss") == {step: column(reference, "loss")[step] for step in range(8, 12)}
    torch.testing.assert_close(tensors_in(out), tensors_in(reference), rtol=0, atol=0)


@pytest.fixture(scope="module")
def run(zygote, shared_work):
    """A run with steps 4, 8 and 12."""
    zygote.train([*RUN, "--out_dir=run"], shared_work)
    assert steps_in(shared_work / "run") == [12, 8, 4]
    return shared_work / "run"


@pytest.fixture
def url(run, at):
    """The URL of at.path/mirror, which contains steps 4 and 8 of the run."""
    return mirrored(run, at.path / "mirror", [4, 8])


@pytest.fixture
def start(url):
    """What a run with this mirror starts from; takes settings, and a launch."""

    def start(launch=None, **settings):
        config = train_defaults(out_dir="new", mirror=url, init_from="resume") | settings
        return find_start(config, replace(ALONE, launch=launch or Launch()), GPT)

    return start


def failed(capsys, start, **settings):
    """The one line with which a start ends."""
    with pytest.raises(SystemExit):
        start(**settings)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("downloading")]
    assert line.startswith("error: ")
    return line


def test_a_resume_on_a_new_machine_has_the_bits_of_the_undisturbed_run(zygote, shared_work, run, url):
    out = shared_work / "new"
    text = zygote.train([*RUN, f"--out_dir={out}", f"--mirror={url}", "--init_from=auto"], shared_work).text()
    assert re.search(rf"downloading {url}/step_00000008 \(\d+\.\d MB\) to ", text)
    assert_same_end(out, run)
    assert read_manifest(out / "step_00000008") == read_manifest(run / "step_00000008")
    assert not list(out.glob("unfinished_*"))


def test_the_best_checkpoint_is_downloaded_too(start, run, at):
    seal(Path("mirror/step_00000008"), best_step=4)
    assert start().resumed.stored.step == 8
    assert steps_in("new") == [8, 4] and not damage(Path("new/step_00000004"))


DAMAGE = {
    "byte": lambda folder: flip(folder / "ckpt.pt"),
    "missing file": lambda folder: (folder / "ckpt.pt").unlink(),
    "manifest": lambda folder: flip(folder / "manifest.json"),
    "torn upload": lambda folder: (folder / "manifest.json").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_step_is_reported_and_the_one_before_is_used(start, capsys, kind):
    DAMAGE[kind](Path("mirror/step_00000008"))
    stored = start().resumed.stored
    assert stored.step == 4 and stored.damaged == ("step_00000008",)
    has_manifest = kind not in ("torn upload", "manifest")
    assert capsys.readouterr().out.count("new/step_00000008 is damaged: ") == has_manifest
    DAMAGE[kind](Path("mirror/step_00000004"))
    shutil.rmtree("new")
    assert "no checkpoint to resume from in new" in failed(capsys, start)
    if has_manifest:
        assert "new/step_00000004 is damaged" in failed(capsys, start, init_from="auto:gpt2")
    else:  # nothing is complete: a new run may begin
        assert not start(init_from="auto").checkpoint


def test_the_newer_of_folder_and_mirror_continues(start, run, at, capsys):
    shutil.copytree(run / "step_00000012", "new/step_00000012")
    read, digest = [], hashlib.file_digest
    at.set(hashlib, "file_digest", lambda file, name: read.append(str(file.name)) or digest(file, name))
    assert start().resumed.stored.step == 12 and steps_in("new") == [12]
    assert "downloading" not in capsys.readouterr().err
    assert read == ["new/step_00000012/ckpt.pt"]
    flip(Path("new/step_00000012/ckpt.pt"))
    assert start().resumed.stored.step == 8
    os.rename("new/step_00000012", "old")
    flip(Path("new/step_00000008/ckpt.pt"))  # the mirror's copy of the same step is intact
    assert start().resumed.stored.step == 8
    assert {p.name for p in Path("new").iterdir()} == {"step_00000008", "damaged_step_00000008"}
    assert start(out_dir="other", init_from="resume:4").resumed.stored.step == 4


def test_a_mirror_that_cannot_be_read(start, url, run, at, capsys):
    gate = threading.Event()
    at.set(LocalFileSystem, "ls", lambda *args, **kw: gate.wait())
    with impatient():
        assert "cannot be read (no answer within 60 s)" in failed(capsys, start)
        assert "cannot be read (no answer" in failed(capsys, start, init_from=url, mirror="")
    gate.set()
    at.set(LocalFileSystem, "ls", Mock(side_effect=ConnectionResetError(104, "Connection reset by peer")))
    problem = f"{url} cannot be read ([Errno 104] Connection reset by peer)"
    for init_from in ("resume", "auto", "auto:gpt2"):
        assert failed(capsys, start, init_from=init_from) == f"error: {problem}"
    shutil.copytree(run / "step_00000004", "new/step_00000004")
    assert start().resumed.stored.step == 4
    assert f"warning: {problem}: the run continues with what new contains" in capsys.readouterr().out
    shutil.rmtree("new")
    problem = "error: xyz://a cannot be read (Protocol not known: xyz)"
    assert problem in failed(capsys, start, mirror="xyz://key:secret@a")
    assert "gs://a/b cannot be read (Please install gcsfs" in failed(capsys, start, mirror="gs://a/b")


def test_a_download_that_fails_is_not_replaced_by_an_older_step(start, at, capsys):
    """What is newer would be lost; also when the disk is full."""
    full = OSError(errno.ENOSPC, "No space left on device", "ckpt.pt")
    at.set(Remote, "get_file", Mock(side_effect=full))
    assert f"cannot be read ({full})" in failed(capsys, start) and steps_in("new") == []


def test_a_job_that_slurm_requeues_to_an_empty_disk_resumes(start, at):
    launch = Launch((), job="7", requeued=1)
    assert start(launch, init_from="scratch").resumed.stored.step == 8
    enter_folder("new", None, launch)  # and moves what is there aside, like a start of its own
    assert start(replace(launch, requeued=2), init_from="scratch").resumed.stored.step == 8


PHASES = {
    "a file": "Remote.get_file = die",
    "the rename": "os.rename = die",
    "after the rename": "rename = os.rename; os.rename = lambda *paths: (rename(*paths), die())",
}


@pytest.mark.parametrize("phase", PHASES)
def test_after_a_kill_a_downloaded_step_is_complete_or_absent(start, phase):
    out = Path("new")
    if not (child := os.fork()):

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            exec(PHASES[phase], {"Remote": Remote, "os": os, "die": die})
            start()
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert steps_in(out) == ([8] if phase == "after the rename" else [])
    stored = start().resumed.stored
    assert stored.step == 8 and not damage(out / "step_00000008")
    enter_folder("new", stored, Launch())
    assert steps_in(out) == [8] and not list(out.glob("unfinished_*"))


def test_a_manifest_does_not_lead_out_of_its_folder(start):
    newest = Path("mirror/step_00000008")
    files = read_manifest(newest)["files"]
    for name in ("../evil", "..", "", "/etc/evil", "a/b", "a\nb"):
        seal(newest, files=files | {name: {"sha256": "", "bytes": 4}})
        assert start().resumed.stored.step == 4
        shutil.rmtree("new")
    seal(newest, files=files)
    assert start().resumed.stored.step == 8


def test_nothing_is_read_beyond_the_size_in_the_manifest(start, at):
    """Whoever writes to the mirror could otherwise fill the disk of each machine that resumes."""
    newest, read = Path("mirror/step_00000008"), []
    for name in read_manifest(newest)["files"]:
        with open(newest / name, "ab") as file:
            file.truncate(10**9)  # sparse
    opener = LocalFileSystem.open

    def counted(files, path, *args, **kw):
        file = opener(files, path, *args, **kw)
        at.set(file, "read", lambda *n, read_of=file.read: read.append(read_of(*n)) or read[-1])
        return file

    at.set(LocalFileSystem, "open", counted)
    found = start().resumed.stored
    assert found.step == 8 and not damage(found.folder)
    assert max(map(len, read)) < 10**6
    with open(newest / "ckpt.pt", "r+b") as file:
        file.write(b"other")
    shutil.rmtree("new")
    assert start().resumed.stored.step == 4


def test_weights_from_a_url(start, url, run, capsys):
    for init_from, step in ((url, 8), (f"{url}/", 8), (f"{url}/step_00000004", 4), (f"auto:{url}", 8)):
        found = start(init_from=init_from, mirror="")
        assert not found.is_resume and found.checkpoint.stored.step == step
        assert found.description == f"{init_from.removeprefix('auto:')}, step {step}"
        assert found.checkpoint.shapes and len(list(Path("new").iterdir())) == 1
        shutil.rmtree("new")
    seal(Path("mirror/step_00000008"), best_step=4)
    assert start(init_from=url, mirror="").checkpoint.stored.step == 4
    flip(Path("mirror/step_00000004/ckpt.pt"))
    assert "step_00000004 is damaged" in failed(capsys, start, init_from=f"{url}/step_00000004", mirror="")
    assert start(init_from=url, mirror="").checkpoint.stored.step == 8
    problem = f"{url}s contains no such checkpoint: set the URL of a mirror"
    assert problem in failed(capsys, start, init_from=f"{url}s", mirror="")


def test_scripts_read_a_url_or_refuse_it(url, at, capsys):
    options = ["--num_samples=1", "--max_new_tokens=5", "--device=cpu", f"--init_from={url}"]
    script(at, "sample.py", options)
    printed = capsys.readouterr()
    assert ": step 8, val loss" in printed.err and len(printed.out.splitlines()) > 1
    assert not Path("out").exists()
    with pytest.raises(ValueError, match="weights, which a dry run does not read: set --init_from=scratch"):
        check_training(train_defaults(dry_run_ranks="2", init_from="s3://a/b"))


def test_no_credentials_are_recorded():
    for url in ("auto:s3://key:secret@bucket/run?versionId=3", "https://secret@host/run?Signature=secret"):
        recorded = without_secrets(train_defaults(init_from=url, mirror=url, alert_command="curl secret"))
        assert is_url(without_credentials(url).removeprefix("auto:")) and "secret" not in str(recorded)


APART = """
folder, os.environ["LOCAL_RANK"] = "rank" + os.environ["RANK"], "0"
os.makedirs(folder, exist_ok=True)
os.chdir(folder)
"""


@pytest.mark.slow
def test_many_ranks_on_one_folder_or_on_several_disks(zygote, work):
    flags = [*RUN, "--zero=3", f"--dataset={work / 'data/tiny'}"]
    zygote.train([*flags, "--out_dir=run"], work, 2)
    url = mirrored(work / "run", work / "mirror", [4, 8])
    resumed = zygote.train([*flags, "--out_dir=new", f"--mirror={url}", "--init_from=resume"], work, 2)
    assert resumed.text().count("downloading") == 1
    assert list((work / "new/step_00000012").glob("*.distcp"))
    assert_same_end(work / "new", work / "run")
    # as on two machines, which share no disk: each downloads the step, also if the other one is new
    url = mirrored(work / "run", work / "other mirror", [4, 8])
    shutil.copytree(work / "mirror/step_00000004", work / "rank0/own/step_00000004")
    flags.remove("--zero=3")
    resume = [*flags, f"--mirror={url}", "--init_from=resume", "--out_dir=own"]
    start_changed(zygote, APART, resume, work, 2).wait(120)
    assert all(not damage(work / f"rank{rank}/own/step_00000008") for rank in range(2))
    weights = [*flags, f"--init_from={url}", "--out_dir=weights"]
    text = start_changed(zygote, APART, weights, work, 2).wait(120).text()
    assert f"from {url}, step 12" in text  # which the run before has copied there
    assert not list(work.glob("rank*/weights/unfinished_*"))


@pytest.mark.slow
def test_a_server_of_s3(zygote, shared_work, run, s3, at, start):  # noqa: F811
    url, out = f"{s3}/a run", at.path / "new"
    files, path = fsspec.url_to_fs(url)
    files.put(str(at.path / "mirror"), path, recursive=True)
    assert not start(mirror="s3://missing/run", init_from="auto").checkpoint
    flags = [*RUN, "--keep_last=1", f"--mirror={url}"]
    resume = [*flags, f"--out_dir={out}", "--init_from=resume"]
    text = zygote.train(resume, shared_work, env=environment()).text()
    assert f"copied step_00000012 to {url}" in text and "Unclosed" not in text
    assert_same_end(out, run)
    files.invalidate_cache()
    whole = [f"{path}/step_00000012/{name}" for name in ("ckpt.pt", "manifest.json")]
    assert files.find(path) == [f"{path}/mirror_owner", *whole]
    refused = zygote.train([*flags, "--out_dir=other"], shared_work, ok=False, env=environment())
    assert refused.codes == [1] and not (shared_work / "other").exists()
    assert f"error: mirror {url}: it contains" in refused.text()
    assert start(init_from=f"{url}/step_00000012", mirror="").checkpoint.stored.step == 12
    lacking = open_mirror(train_defaults(mirror="s3://no-such-bucket/run", out_dir=str(out)), None)
    assert "fails at step 0: The specified bucket does not exist" in lacking.outcomes[0][1]
