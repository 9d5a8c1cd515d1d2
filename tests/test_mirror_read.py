"""Reading a mirror: a resume on a machine whose disk is empty, and --init_from=URL."""

import errno
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import records, script, start_changed, train_defaults
from s3_server import environment, s3  # noqa: F401  (a fixture)

from isogpt.checkpoint import download, manifest, remote
from isogpt.checkpoint.folder import clean_up, enter_folder
from isogpt.checkpoint.manifest import damage, read_manifest, sealed, sha256_of, steps_in
from isogpt.checkpoint.start import find_start
from isogpt.launch.launchers import Launch
from isogpt.launch.process_group import Ranks
from isogpt.options.values import is_url, without_credentials
from isogpt.speed import dry_run
from isogpt.training.settings import check_sampling, check_training, without_secrets

RUN = ["--eval_interval=4", "--max_iters=11", "--keep_last=0"]
ALONE = Ranks(0, 1, torch.device("cpu"), "gloo")


def mirrored(run, folder, steps):
    """A copy of steps of a run, as a mirror contains them; returns its URL."""
    for step in steps:
        shutil.copytree(run / f"step_{step:08d}", folder / f"step_{step:08d}")
    return f"file://{folder}"  # fsspec does not decode %20


def losses_since(out, step):
    """The losses of a run's steps from this one on; of a new machine, no others are known."""
    losses = {record["iter"]: record["loss"] for record in records(out) if "loss" in record}
    assert max(losses) == 11
    return {number: loss for number, loss in losses.items() if number >= step}


def same_checkpoints(one, other):
    """Whether the tensors of two ckpt.pt have the same bits."""
    states = [torch.load(f / "ckpt.pt", weights_only=True) for f in (one, other)]
    weights = [list(state["model"].values()) for state in states]
    moments = [[t for s in state["optimizer"]["state"].values() for t in s.values()] for state in states]
    pairs = [*zip(*weights, strict=True), *zip(*moments, strict=True)]
    return len(pairs) > 10 and all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def run(zygote, shared_work):
    """A run with steps 4, 8 and 12."""
    zygote.train([*RUN, "--out_dir=run"], shared_work)
    assert steps_in(shared_work / "run") == [12, 8, 4]
    return shared_work / "run"


@pytest.fixture
def start(run, at):
    """What a run starts from, with a mirror at.path/mirror of steps 4 and 8; takes settings, and a launch."""
    url = mirrored(run, at.path / "mirror", [4, 8])

    def start(launch=None, **settings):
        config = train_defaults(out_dir="new", mirror=url, init_from="resume") | settings
        return find_start(config, replace(ALONE, launch=launch or Launch()), None)

    return start


def failed(capsys, start, **settings):
    """The one line with which a start ends."""
    with pytest.raises(SystemExit):
        start(**settings)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("downloading")]
    assert line.startswith("error: ")
    return line


def test_a_resume_on_a_new_machine_has_the_bits_of_the_undisturbed_run(zygote, shared_work, run, tmp_path):
    url = mirrored(run, tmp_path / "mirror", [4, 8])
    out = shared_work / "new"
    resumed = zygote.train([*RUN, f"--out_dir={out}", f"--mirror={url}", "--init_from=auto"], shared_work)
    assert re.search(rf"downloading {url}/step_00000008 \(\d+\.\d MB\) to ", resumed.text())
    assert losses_since(out, 8) == losses_since(run, 8)
    assert same_checkpoints(out / "step_00000012", run / "step_00000012")
    assert read_manifest(out / "step_00000008") == read_manifest(run / "step_00000008")
    assert not list(out.glob("unfinished_*"))


def test_the_best_checkpoint_is_downloaded_too(start, run, at):
    manifest = read_manifest(run / "step_00000008") | {"best_step": 4, "best_val_loss": 1.0}
    Path("mirror/step_00000008/manifest.json").write_text(sealed(manifest))
    assert start().resumed.stored.step == 8
    assert steps_in("new") == [8, 4] and not damage(Path("new/step_00000004"))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "byte": lambda folder: flip(folder / "ckpt.pt"),
    "size": lambda folder: os.truncate(folder / "ckpt.pt", 1000),
    "missing file": lambda folder: (folder / "ckpt.pt").unlink(),
    "manifest": lambda folder: flip(folder / "manifest.json"),
    "torn upload": lambda folder: (folder / "manifest.json").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_step_is_reported_and_the_one_before_is_used(start, capsys, kind):
    DAMAGE[kind](Path("mirror/step_00000008"))
    assert start().resumed.stored.step == 4
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
    assert start().resumed.stored.step == 12 and steps_in("new") == [12]
    assert "downloading" not in capsys.readouterr().err
    flip(Path("new/step_00000012/ckpt.pt"))
    assert start().resumed.stored.step == 8
    os.rename("new/step_00000012", "old")
    flip(Path("new/step_00000008/ckpt.pt"))  # the mirror's copy of the same step is intact
    assert start().resumed.stored.step == 8
    assert {p.name for p in Path("new").iterdir()} == {"step_00000008", "damaged_step_00000008"}
    assert start(out_dir="other", resume_step=4).resumed.stored.step == 4


def test_each_file_is_read_once(start, run, at):
    shutil.copytree(run / "step_00000012", "new/step_00000012")
    read = []
    at.set(manifest, "sha256_of", lambda path: read.append(path.name) or sha256_of(path))
    assert start().resumed.stored.step == 12 and read == ["ckpt.pt"]


def test_a_mirror_that_cannot_be_read(start, run, at, capsys):
    reset = ConnectionResetError(104, "Connection reset by peer")
    at.set("fsspec.implementations.local.LocalFileSystem.ls", raising(reset))
    for init_from in ("resume", "auto", "auto:gpt2"):
        problem = "mirror cannot be read ([Errno 104] Connection reset by peer)"
        assert failed(capsys, start, init_from=init_from).endswith(problem)
    shutil.copytree(run / "step_00000004", "new/step_00000004")
    assert start().resumed.stored.step == 4
    printed = capsys.readouterr().out
    assert "cannot be read ([Errno 104] Connection reset by peer): the run continues with what new" in printed
    shutil.rmtree("new")
    problem = "error: xyz://a cannot be read (Protocol not known: xyz)"
    assert problem in failed(capsys, start, mirror="xyz://key:secret@a")
    assert "gs://a/b cannot be read (Please install gcsfs" in failed(capsys, start, mirror="gs://a/b")


def test_a_download_that_fails_is_not_replaced_by_an_older_step(start, at, capsys):
    """What is newer would be lost; also when the disk is full."""
    for failing in (TimeoutError("timed out"), OSError(errno.ENOSPC, "No space left on device", "ckpt.pt")):
        at.set("fsspec.implementations.local.LocalFileSystem.get_file", raising(failing))
        assert f"cannot be read ({failing})" in failed(capsys, start)
        assert steps_in("new") == []


def test_a_job_that_slurm_requeues_to_an_empty_disk_resumes(start, at):
    launch = Launch((), job="7", requeued=1)
    assert start(launch, init_from="scratch").resumed.stored.step == 8
    enter_folder("new", None, launch)  # and moves what is there aside, like a start of its own
    assert start(replace(launch, requeued=2), init_from="scratch").resumed.stored.step == 8


PHASES = {
    "a file": "LocalFileSystem.get_file = die",
    "the rename": "os.rename = die",
    "after the rename": "rename = os.rename; os.rename = lambda *paths: (rename(*paths), die())",
}


@pytest.mark.parametrize("phase", PHASES)
def test_after_a_kill_a_downloaded_step_is_complete_or_absent(start, phase):
    out = Path("new")
    if not (child := os.fork()):
        from fsspec.implementations.local import LocalFileSystem

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            exec(PHASES[phase], {"LocalFileSystem": LocalFileSystem, "os": os, "die": die})
            download.fetch(Path("mirror").absolute().as_uri(), 8, out, is_mine=True)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert steps_in(out) == ([8] if phase == "after the rename" else [])
    assert start().resumed.stored.step == 8 and not damage(out / "step_00000008")
    clean_up(out)
    assert [p.name for p in out.iterdir()] == ["step_00000008"]


def test_a_manifest_does_not_lead_out_of_its_folder(start):
    path = Path("mirror/step_00000008/manifest.json")
    manifest = read_manifest(path.parent)
    for name in ("../evil", "..", "", "/etc/evil", "a/b", "a\nb"):
        files = manifest["files"] | {name: {"sha256": "", "bytes": 4}}
        path.write_text(sealed(manifest | {"files": files}))
        assert remote.Remote(Path("mirror").absolute().as_uri()).manifest(8) == {}
    assert start().resumed.stored.step == 4


def raising(error):
    def refuse(*_, **__):
        raise error

    return refuse


def test_a_server_that_does_not_answer_does_not_hang_the_start(start, run, at, capsys):
    go = threading.Event()
    at.set(download, "ANSWER_S", 0.05)
    at.set("fsspec.implementations.local.LocalFileSystem.ls", lambda *_, **__: go.wait(60) and [])
    assert "cannot be read (no answer within 0.05 s)" in failed(capsys, start)
    url = Path("mirror").absolute().as_uri()
    assert "cannot be read (no answer" in failed(capsys, start, init_from=url, mirror="")
    go.set()


def test_weights_from_a_url(start, run, at, capsys):
    url = Path("mirror").absolute().as_uri()
    for init_from, step in ((url, 8), (f"{url}/", 8), (f"{url}/step_00000004", 4), (f"auto:{url}", 8)):
        found = start(init_from=init_from, mirror="")
        assert not found.is_resume and found.checkpoint.stored.step == step
        assert found.description == f"{init_from.removeprefix('auto:')}, step {step}"
        assert found.checkpoint.shapes and len(list(Path("new").iterdir())) == 1
        download.discard_weights(found.checkpoint.stored)
        assert not list(Path("new").iterdir())
    manifest = read_manifest(run / "step_00000008") | {"best_step": 4}
    Path("mirror/step_00000008/manifest.json").write_text(sealed(manifest))
    assert start(init_from=url, mirror="").checkpoint.stored.step == 4
    flip(Path("mirror/step_00000004/ckpt.pt"))
    problem = "step_00000004 is damaged: the checksum of ckpt.pt does not match"
    assert problem in failed(capsys, start, init_from=f"{url}/step_00000004", mirror="")
    assert start(init_from=url, mirror="").checkpoint.stored.step == 8
    nothing = Path("nothing").absolute().as_uri()
    problem = f"{nothing} contains no such checkpoint: set the URL of a mirror"
    assert problem in failed(capsys, start, init_from=nothing, mirror="")


def test_scripts_read_a_url_or_refuse_it(start, at, capsys):
    url = Path("mirror").absolute().as_uri()
    options = ["--num_samples=1", "--max_new_tokens=5", "--device=cpu", f"--init_from={url}"]
    script(at, "sample.py", options)
    printed = capsys.readouterr()
    assert ": step 8, val loss" in printed.err and len(printed.out.splitlines()) > 1
    assert not list(Path("out").iterdir())
    with pytest.raises(ValueError, match="choose from resume .* or the URL of a run's mirror"):
        check_sampling({"init_from": "nothing"})
    with pytest.raises(ValueError, match="a dry run reads no weights"):
        dry_run.check(train_defaults(dry_run_ranks=2, init_from="s3://a/b"))
    check_training(train_defaults(init_from="auto:s3://a/b"))


def test_no_credentials_are_recorded():
    for url in (
        "auto:s3://key:secret@bucket/run?versionId=3",
        "https://secret@host/run?X-Amz-Signature=secret",
    ):
        recorded = without_secrets(train_defaults(init_from=url, mirror=url, alert_command="curl secret"))
        assert is_url(without_credentials(url).removeprefix("auto:")) and "secret" not in str(recorded)


APART = """
import os
import re
os.makedirs("rank" + os.environ["RANK"], exist_ok=True)
os.chdir("rank" + os.environ["RANK"])
os.environ["LOCAL_RANK"] = "0"
"""


@pytest.mark.slow
def test_many_ranks_on_one_folder_or_on_several_disks(zygote, work):
    flags = [*RUN, "--zero=3", f"--dataset={work / 'data/tiny'}"]
    zygote.train([*flags, "--out_dir=run"], work, 2)
    url = mirrored(work / "run", work / "mirror", [4, 8])
    resumed = zygote.train([*flags, "--out_dir=new", f"--mirror={url}", "--init_from=resume"], work, 2)
    assert resumed.text().count("downloading") == 1
    assert losses_since(work / "new", 8) == losses_since(work / "run", 8)
    whole, new = (read_manifest(work / name / "step_00000012") for name in ("run", "new"))
    shards = [name for name in whole["files"] if name.endswith(".distcp")]
    assert shards and all(whole["files"][name] == new["files"][name] for name in shards)
    # as on two machines, which share no disk: each downloads the step, also if the other one is new
    url = mirrored(work / "run", work / "other mirror", [4, 8])
    shutil.copytree(work / "mirror/step_00000004", work / "rank0/own/step_00000004")
    ddp = [*RUN, f"--dataset={work / 'data/tiny'}", f"--mirror={url}", "--init_from=resume", "--out_dir=own"]
    start_changed(zygote, APART, ddp, work, 2).wait(120)
    assert all(not damage(work / f"rank{rank}/own/step_00000008") for rank in range(2))
    weights = start_changed(
        zygote, APART, [*ddp[:-3], f"--init_from={url}", "--out_dir=weights"], work, 2
    ).wait(120)
    assert f"from {url}, step 12" in weights.text()  # which the run before has copied there
    assert not list(work.glob("rank*/weights/unfinished_*"))


@pytest.mark.slow
def test_an_s3_server(zygote, shared_work, run, s3, start):  # noqa: F811
    import fsspec

    files, path = fsspec.url_to_fs(f"{s3}/a run")
    files.put(str(Path("mirror").absolute()), path, recursive=True)
    out, url = Path("new").absolute(), f"{s3}/a run"
    there = remote.Remote(url)
    assert there.steps() == [8, 4] and remote.Remote("s3://missing/run").steps() == []
    flags = [f"--mirror={url}", f"--out_dir={out}", "--init_from=resume"]
    zygote.train([*RUN, *flags], shared_work, env=environment())
    assert losses_since(out, 8) == losses_since(run, 8)
    assert same_checkpoints(out / "step_00000012", run / "step_00000012")
    assert there.steps() == [12, 8, 4]
    files.pipe(f"{path}/step_00000012/ckpt.pt", b"torn")
    assert start(out_dir="other", mirror=url).resumed.stored.step == 8
    assert start(init_from=f"{url}/step_00000004", mirror="").checkpoint.stored.step == 4
