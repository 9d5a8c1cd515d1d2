"""Faults that were found by trying to break the scripts: each test failed before its repair."""

import errno
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from runs import REPO, TINY, accepted, column, records, start_changed, steps_in, tiny_data, wait_for

from isogpt.checkpoint import folder as folder_module
from isogpt.checkpoint import sharded_files
from isogpt.checkpoint.ckpt_file import write_file
from isogpt.checkpoint.commit import commit_checkpoint, link_checkpoints, prune_checkpoints
from isogpt.checkpoint.folder import (
    RunFolder,
    about_space,
    clean_up,
    enter_folder,
    look_for_start,
    make_writable,
)
from isogpt.checkpoint.manifest import damage, make_manifest, read_manifest, step_folders
from isogpt.checkpoint.owner import is_owned, was_entered_by
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.search import best_checkpoint, best_folder, newest_checkpoint
from isogpt.common.files import load_pickle, write_whole
from isogpt.data.vocabulary import Vocabulary, of_characters
from isogpt.launch.launchers import Launch, make_launch
from isogpt.monitor.curves import read_curves
from isogpt.monitor.log import Logger
from isogpt.monitor.run_report import RunReport
from isogpt.monitor.samples import how_to_sample
from isogpt.monitor.sink_console import Console
from isogpt.monitor.sink_metrics import MetricsFile
from isogpt.monitor.sink_plot import plot_loss
from isogpt.monitor.sink_tensorboard import TensorBoard
from isogpt.monitor.statistics import LayerStatistics
from isogpt.parallel.local_parts import local_part_of

SHORT = ["--max_iters=5", "--save_interval=3", "--eval_interval=100", "--out_dir=out"]
RESUME = [*SHORT, "--init_from=auto", "--max_iters=7"]
# train.py, with checkpoints that take longer to write, to verify and, on one rank, to read than
# dist_timeout_s
SLOW_DISK = """
import time
from isogpt.checkpoint import folder
from isogpt.checkpoint import state
from isogpt.checkpoint import save
def slow(work):
    def after_a_while(*args, **kwargs):
        time.sleep(10)
        return work(*args, **kwargs)
    return after_a_while
save.write_file, folder.look_for_start = slow(save.write_file), slow(folder.look_for_start)
if os.environ["RANK"] == "1":
    state.read_checkpoint = slow(state.read_checkpoint)
"""


@pytest.fixture(scope="module")
def trained(zygote, tmp_path_factory):
    """A folder with the data and a run of 6 steps in out/, with checkpoints of steps 3 and 6."""
    path = tmp_path_factory.mktemp("trained")
    tiny_data(path)
    zygote.train(SHORT, path)
    return path


@pytest.fixture
def place(trained, tmp_path):
    """A copy of it."""
    shutil.copytree(trained, tmp_path / "place", symlinks=True)
    return tmp_path / "place"


def export(zygote, place, *args, ok=True):
    return zygote.start(args, place, script="export.py").wait(ok=ok)


# ------------------------------------------------------------------------------------------------------------
# data lost


def test_a_conversion_that_fails_late_loses_nothing(zygote, place, monkeypatch):
    import export

    def full(old, new):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            export.convert(str(place / "out"), "ckpt.pt")
    assert newest_checkpoint(place / "out")[0].step == 6 and not list((place / "out").glob("unfinished_e*"))
    assert "iter 6:" in zygote.train(RESUME, place).text()


def test_only_the_owner_clears_a_folder_and_only_what_runs_leave(zygote, place):
    """A conversion deletes nothing of a live run, a start nothing of a conversion or of the user."""
    live = place / "out/unfinished_0123abcd_step_00000099"
    live.mkdir()
    export(zygote, place, "out", "--to=ckpt.pt")
    assert live.exists()
    kept = [place / "out" / name for name in ("unfinished_thesis", "unfinished_export_0123abcd")]
    for folder in kept:
        folder.mkdir()
    zygote.train(RESUME, place)
    assert not live.exists() and all(folder.exists() for folder in kept)


def test_links_do_not_dangle_after_a_resume_from_an_older_step(zygote, place):
    args = [*SHORT, "--init_from=resume", "--resume_step=3", "--max_iters=3", "--save_checkpoint=False"]
    zygote.train(args, place)
    assert (place / "out/ckpt.pt").resolve().parent.name == "step_00000003"
    best = place / "out/ckpt_best.pt"
    assert best.exists() or not best.is_symlink()


# ------------------------------------------------------------------------------------------------------------
# ranks that see different folders

# a config file with which each rank uses a different folder
OWN = "import os\nout_dir = 'out' + os.environ['RANK']\n"
# and one with which rank 1 sees the same folder, but no path of rank 0
MOVED = """
import os
if os.environ["RANK"] == "1":
    os.makedirs("moved", exist_ok=True)
    os.chdir("moved")
    out_dir, dataset = f"../{out_dir}", "../data/tiny"
    init_from = init_from.replace("out", "../out")
"""


@pytest.mark.slow
def test_ranks_with_folders_of_their_own(zygote, work):
    """Shards would be in several folders; a checkpoint that rank 0 writes can be written, but not resumed."""
    (work / "own.py").write_text(OWN)
    args = ["own.py", *SHORT[:-1], "--dist_timeout_s=60"]

    def said(*flags):
        run = zygote.train([*args, *flags], work, 2, ok=False)
        text = run.text()
        assert set(run.codes) == {1} and text.count("error:") == 1 and "Traceback" not in text
        return text

    problem = (
        f"rank 0 keeps this run in {work}/out0, which is not the out_dir of other ranks: rank 1 looks in"
    )
    for flags in (["--zero=1"], ["--islands=2", "--local_steps=2"]):
        text = said(*flags)
        assert f"error: {problem} {work}/out1. All ranks write" in text
        assert "machines share, after any config that computes it, or --save_checkpoint=False" in text
    assert not (work / "out1").exists()
    zygote.train([*args, "--zero=1", "--save_checkpoint=False"], work, 2)  # the advice is accepted
    run = zygote.train(args, work, 2)
    assert f"warning: {problem}" in run.text() and steps_in(work / "out0") == 5
    assert f"error: rank 1: {work}/out1/step_00000006/ckpt.pt on " in said("--init_from=resume")
    # rank 1 sees what rank 0 does not: a newer checkpoint, or one where rank 0 has none
    shutil.copytree(work / "out0", work / "out1", symlinks=True)
    shutil.rmtree(work / "out0/step_00000006")
    run = zygote.train([*args, "--init_from=auto"], work, 2, ok=False)
    text = "error: rank 1 sees step 6 in out_dir out0, which rank 0 does not see: the ranks' out_dir is not"
    assert text in run.text()
    shutil.rmtree(work / "out0")
    run = zygote.train([*args, "--init_from=auto"], work, 2, ok=False)
    assert text in run.text()
    assert not (work / "out0").exists()


def test_the_same_folder_under_different_paths(zygote, work):
    """Shards and a ckpt.pt are resumed, and are the start of a new run."""
    (work / "moved.py").write_text(MOVED)
    for flags in (["--zero=1"], []):
        zygote.train([*SHORT, *flags, "moved.py"], work, 2)
        run = zygote.train([*SHORT, *flags, "--init_from=resume", "--max_iters=7", "moved.py"], work, 2)
        assert "step 6" in run.text() and "iter 7:" in run.text() and "iter 5:" not in run.text()
        run = zygote.train([*SHORT[:-1], *flags, "--init_from=out", "--out_dir=new", "moved.py"], work, 2)
        assert "out/step_0000000" in run.text() and "iter 5:" in run.text()
        assert not list((work / "moved").rglob("step_*"))


def test_a_shard_in_a_different_folder_makes_no_checkpoint(tmp_path):
    """
    Each rank tells rank 0 its files: one that is missing or too short is noticed before the checkpoint
    counts, and so are pieces that no rank has written.
    """
    parts = {"w": local_part_of(torch.zeros(1000))}
    (writers,) = sharded_files.choose_writers([sharded_files.digests_of(parts)])
    written = sharded_files.write_pieces(tmp_path, parts, writers, rank=0)
    sharded_files.complete(tmp_path, {}, [written])
    (tmp_path / "tensors.json").unlink()
    with pytest.raises(ValueError, match="pieces are missing"):
        sharded_files.complete(tmp_path, {}, [written._replace(count=999)])
    (file,) = tmp_path.glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(
        OSError, match="files of the checkpoint that are missing or too short in .*: 1 of 2 .*__0_0"
    ):
        sharded_files.complete(tmp_path, {}, [written])


def write_unfinished(folder, name):
    """Write a checkpoint's file in a folder; returns what commit_checkpoint needs."""
    run = {"iter_num": 3, "best_val_loss": 9.0, "config": {}, "model_args": {"block_size": 8}, "isogpt": {}}
    if name == "ckpt.pt":
        written = write_file(folder / name, {"w": torch.zeros(1000)})
    else:
        _, written = sharded_files.write(folder, {"w": local_part_of(torch.zeros(1000))}, group=None)
    return {"manifest": make_manifest(run, 1, 0, None) | {"run": run}, "written": written}


FORMS = pytest.mark.parametrize("name", ["ckpt.pt", "__0_0.distcp"])


@FORMS
def test_what_a_disk_changes_after_the_write_is_noticed(tmp_path, name):
    """The checksums are those of what was written, not of what can be read afterwards."""
    unfinished = tmp_path / "unfinished"
    checkpoint = write_unfinished(unfinished, name)
    content = bytearray((unfinished / name).read_bytes())
    content[len(content) // 2] ^= 1
    (unfinished / name).write_bytes(content)
    folder = commit_checkpoint(unfinished, keep_last=0, **checkpoint)
    content[len(content) // 2] ^= 1
    assert damage(folder) == f"the checksum of {name} does not match"
    (folder / name).write_bytes(content)
    assert not damage(folder)


@FORMS
def test_a_checkpoint_is_on_the_disk_before_it_counts_and_before_an_older_one_is_deleted(
    tmp_path, monkeypatch, name
):
    """
    Each file is synced before the rename, and the run's folder after it: else a power failure could leave
    neither checkpoint.
    """
    calls, fsync, rename = [], os.fsync, os.rename

    def noted_fsync(descriptor):
        calls.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def noted_rename(old, new):
        calls.append("rename")
        rename(old, new)

    (tmp_path / "step_00000001").mkdir()
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    checkpoint = write_unfinished(tmp_path / "unfinished", name)
    folder = commit_checkpoint(tmp_path / "unfinished", keep_last=1, **checkpoint)
    committed = calls.index("rename")
    assert {path.stat().st_ino for path in folder.iterdir()} <= {*calls[:committed]}
    assert calls[committed + 1 :] == [tmp_path.stat().st_ino, "rename"]
    assert step_folders(tmp_path) == [folder]


# a config file with which rank 1 can write no file of more than 4 KB, as on a disk that is almost full
LIMITED = """
import os, resource
if os.environ["RANK"] == "1":
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


@pytest.mark.parametrize("setting", ["tp", "zero"])
def test_settings_that_differ_are_named_before_they_shape_anything(zygote, work, setting):
    """Groups of ranks, for instance, which other ranks would never join."""
    (work / "own.py").write_text(f"import os\n{setting} = 1 + int(os.environ['RANK'])\n")
    run = zygote.train([*SHORT, "own.py", "--dist_timeout_s=30"], work, 2, ok=False, timeout=25)
    text = f"error: the ranks were started with different settings: {setting} is 1 on rank 0, 2 on rank 1\n"
    assert set(run.codes) == {1} and run.text() == text


# a config file with which two of three ranks are on one machine
UNEVEN = """
import os
alone = os.environ["RANK"] == "2"
os.environ.update(LOCAL_WORLD_SIZE="1" if alone else "2", LOCAL_RANK="0" if alone else os.environ["RANK"])
del alone
"""


def test_machines_with_different_numbers_of_processes_are_no_islands(zygote, work):
    (work / "own.py").write_text(UNEVEN)
    args = [*SHORT, "own.py", "--dist_timeout_s=30", "--gradient_accumulation_steps=3"]
    run = zygote.train([*args, "--islands=0"], work, 3, ok=False, timeout=25)
    problem = "error: islands is 0, one on each machine, but the numbers"
    assert set(run.codes) == {1} and run.text().startswith(problem) and run.text().count("error:") == 1
    assert "set --islands= to a number that divides 3" in run.text()
    zygote.train([*args, "--islands=3"], work, 3)


# ------------------------------------------------------------------------------------------------------------
# restarts


def test_a_restart_continues_what_the_launch_has_written(zygote, place):
    """
    The restart count of rank 0's agent stays 0 when other agents fail. A launch is known by its agents: here
    the zygote, with a run id for each launch.
    """
    out = place / "out"

    def start(launch, *args):
        env = {"TORCHELASTIC_RUN_ID": launch, "TORCHELASTIC_RESTART_COUNT": "0"}
        return zygote.start([*TINY, *SHORT, *args], place, group=True, env=env)

    chosen = ["--init_from=resume", "--resume_step=3", "--max_iters=6", "--keep_last=0"]
    assert "step_00000003/ckpt.pt, step 3" in start("a", *chosen).wait().text()
    assert len(list(out.glob("abandoned_*"))) == 1
    run = start("a", *chosen, "--max_iters=7").wait()  # a restart
    assert "restart: continues what this launch has written to out, step 7\n" in run.text()
    assert len(list(out.glob("abandoned_*"))) == 1
    run = start("b", *chosen).wait()  # typed again
    assert "restart:" not in run.text() and "step_00000003/ckpt.pt, step 3" in run.text()
    assert len(list(out.glob("abandoned_*"))) == 4

    run = start("c", "--save_interval=0", "--eval_interval=1000000", "--max_iters=1000000")
    assert run.until(lambda text: "iter 4:" in text)  # without a checkpoint
    run.kill()
    run.wait(ok=False)
    assert (out / "previous_1/step_00000007").exists()
    start("c").wait()
    assert not (out / "previous_2").exists() and sorted(column(out, "loss")) == [*range(6)]
    run = start("c", "--max_iters=8").wait()  # from scratch
    assert "restart: continues what this launch has written to out, step 6" in run.text()
    assert not (out / "previous_2").exists() and sorted(column(out, "loss")) == [*range(9)]
    assert "restart:" not in start("d").wait().text() and (out / "previous_2/step_00000009").exists()


def test_a_launch_is_known_by_its_agents_or_by_its_requeued_job(at):
    assert Launch(("a", "b")).continues(Launch(("b", "c"))) and not Launch(("a",)).continues(Launch(("b",)))
    assert not Launch().continues(Launch()), "without a launcher there are no restarts"
    at.env("SLURM_JOB_ID", "7")
    job = make_launch([""])
    assert not job.continues(job), "a command that is typed twice in a job"
    at.env("SLURM_RESTART_COUNT", "1")
    assert make_launch([""]).continues(job) and not job.continues(make_launch([""]))
    at.env("SLURM_JOB_ID", "8")
    assert not make_launch([""]).continues(job)

    out = at.path / "out"
    owner = enter_folder(str(out), None, job)
    assert is_owned(out, owner, 0) and not was_entered_by(out, job)
    at.env("SLURM_JOB_ID", "7")
    assert was_entered_by(out, make_launch([""]))
    for text in ("", "[]", "{}", '{"launch": null}', '{"launch": {"agents": 3}}', "0123abcd"):
        (out / "owner").write_text(text)
        assert not was_entered_by(out, make_launch([""]))


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_says_if_its_launch_has_written_nothing_to_the_folder(at, name):
    """A config that computes out_dir from the time gives each start a new folder."""
    now, out = Launch(("agent",)), str(at.path / "12_00_01")
    for count in ("0", "-"):
        at.env(name, count)
        assert look_for_start("auto", out, -1, now) == (None, False, [])
    at.env(name, "2")
    for init_from in ("scratch", "auto"):
        start, is_resume, (warning,) = look_for_start(init_from, out, -1, now)
        assert not (start or is_resume) and warning.startswith("restart 2, but no earlier start")
        assert "set --out_dir= after it" in warning
    enter_folder(out, None, now)
    assert look_for_start("auto", out, -1, now) == (None, False, [])


def test_a_start_that_is_killed_while_it_enters_a_folder_is_no_start(at, place):
    """What the command asks for has not happened yet: a restart must do it."""
    now, out = Launch(("agent",)), str(place / "out")
    found = newest_checkpoint(out, 3)[0]
    with at.context() as patch:
        patch.setattr(folder_module, "continue_from", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            enter_folder(out, found, now)
    assert look_for_start("resume", out, 3, now)[0].step == 3
    enter_folder(out, found, now)
    # as if it had been trained again
    os.rename(place / "out/abandoned_step_00000006", place / "out/step_00000006")
    assert look_for_start("resume", out, 3, now)[0].step == 6


# ------------------------------------------------------------------------------------------------------------
# runs that die


@pytest.mark.slow
def test_ranks_wait_for_a_disk_that_is_slower_than_dist_timeout_s(zygote, work):
    args = [*SHORT, "--dist_timeout_s=6"]
    run = start_changed(zygote, SLOW_DISK, args, work, 2).wait()
    assert "saved out/step_00000003" in run.text() and "saved out/step_00000006" in run.text()
    args += ["--init_from=auto", "--max_iters=6", "--save_checkpoint=False"]
    run = start_changed(zygote, SLOW_DISK, args, work, 2).wait()
    assert "iter 6:" in run.text() and "iter 5:" not in run.text()


# train.py, whose last rank is killed while the others make the group in which shards are written
DYING = """
import signal, time
from isogpt.checkpoint import save
make = save.Saver.__post_init__
def noted(saver):
    open("waits" + os.environ["RANK"], "w").close()
    make(saver)
def die(saver):
    while not os.path.exists("waits0") or not os.path.exists("waits1"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
save.Saver.__post_init__ = die if os.environ["RANK"] == "2" else noted
"""


@pytest.mark.slow
def test_a_rank_that_dies_during_the_start_is_named(zygote, work):
    args = [*SHORT, "--zero=1", "--dist_timeout_s=60"]
    run = start_changed(zygote, DYING, args, work, 3).wait(ok=False, timeout=55)
    assert run.codes == [1, 1, -9] and "Traceback" not in run.text()
    for rank in (0, 1):
        assert re.search(rf"error: rank {rank} at step 0, .*: .*; rank 2 does not respond", run.text())


def test_what_the_plot_shows(tmp_path, monkeypatch):
    """All steps, and the legend contains the last values."""
    losses = [2.0 + 8.0 * 0.5**i + 0.1 * (-1) ** i for i in range(200)]
    steps = [{"iter": i, "loss": loss, "loss_mean": loss} for i, loss in enumerate(losses)]
    evaluations = [{"iter": i, "train_loss": 10.0 if i == 0 else 1.9, "val_loss": 2.2} for i in (0, 199)]
    lines = "".join(json.dumps(record) + "\n" for record in [*steps, *evaluations])
    (tmp_path / "metrics.jsonl").write_text(lines)
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kw: figures.append(figure))
    plot_loss(tmp_path, read_curves(tmp_path / "metrics.jsonl"))
    (axes,) = figures[0].axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[2:] == ["evaluation, train: 1.9000 at the end", "evaluation, val: 2.2000 at the end"]
    assert abs(float(re.search(r"smoothed: ([\d.]+) at", labels[1])[1]) - 2.0) < 0.02
    assert axes.get_ylim()[1] > 10 and axes.get_ylim()[0] < 2
    # a few steps are not smoothed
    (tmp_path / "metrics.jsonl").write_text("".join(lines.splitlines(keepends=True)[:10]))
    plot_loss(tmp_path, read_curves(tmp_path / "metrics.jsonl"))
    (axes,) = figures[1].axes
    assert len(axes.lines) == 1


def test_a_name_that_the_font_cannot_write(tmp_path, recwarn):
    folder = tmp_path / "\u5b9e\u9a8c-\ud14c\uc2a4\ud2b8"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"iter": 0, "loss": 2.0}) + "\n")
    assert plot_loss(folder, read_curves(folder / "metrics.jsonl")).stat().st_size > 1000
    assert not [str(w.message) for w in recwarn if "Glyph" in str(w.message)]


@pytest.mark.parametrize(
    "step, stop, val_loss, said",
    [
        (4, 0, 2.20591, "done: 4 steps in 0:00, best val loss 2.2059 at step 2"),  # the same digits once
        (4, 0, 2.3, "done: 4 steps in 0:00, val loss 2.3000, best val loss 2.2059 at step 2"),
        (4, 15, 2.3, "done: 4 steps in 0:00, val loss 2.3000, best val loss 2.2059 at step 2"),  # too late
        (3, 15, 2.3, "stopped: 4 steps in 0:00, val loss 2.3000, best val loss 2.2059 at step 2"),
    ],
)
def test_the_last_line_of_a_run(capsys, step, stop, val_loss, said):
    progress = Progress(1, step=step, best_val_loss=2.20589, best_step=2, val_loss=val_loss)
    ranks, data = SimpleNamespace(is_main=True), SimpleNamespace(bits_per_byte=lambda loss: None)
    meter = SimpleNamespace(stop=SimpleNamespace(agreed=stop), reader=SimpleNamespace(data=data))
    logger = Logger(progress, [Console()])
    RunReport(logger, meter, ranks, 3, 1, 1.0, None, LayerStatistics(0, *[None] * 5), steps_taken=4).done("")
    assert capsys.readouterr().out == f"{said}\n"


def test_how_to_sample(at):
    """Only if there is a checkpoint, and the ids mean something; from any folder."""
    table, unknown = of_characters({"a": 0}), Vocabulary("unknown", "no meta.pkl")
    for name in ("my run", os.fsdecode(b"not\xffUTF-8")):
        out = at.path / name
        out.mkdir()
        assert how_to_sample(str(out), table) == ""
        (out / "ckpt.pt").touch()
        assert how_to_sample(str(out), unknown) == ""
        printed = how_to_sample(str(out), table).encode(errors="backslashreplace").decode()
        _, _, script, *args = shlex.split(printed)
        assert Path(script).samefile(REPO / "sample.py")
        assert accepted("sample.py", *args)["out_dir"] == str(out)


@pytest.mark.parametrize("name", ["lr$x^$_b", os.fsdecode(b"caf\xe9"), "\U00012345"])
def test_a_plot_is_no_reason_to_stop(zygote, work, name):
    run = zygote.train(["--max_iters=2", "--eval_interval=2", f"--out_dir={name}"], work, whole=True)
    assert "the loss curve: " in run.text() and (work / name / "loss.png").stat().st_size > 1000


def test_a_plot_that_cannot_be_written_says_why(zygote, work):
    (work / "out/loss.png").mkdir(parents=True)
    run = zygote.train(["--max_iters=2", "--eval_interval=2", "--out_dir=out"], work)
    assert "no plot of the loss curve: [Errno 21]" in run.text() and "pip install" not in run.text()
    assert not list((work / "out").glob("*.tmp"))


@pytest.mark.parametrize("nproc", [1, 2])
def test_out_of_memory_while_the_model_is_allocated(zygote, work, nproc):
    """The user is told, and the folder is not touched."""
    args = ["--n_embd=20000000", "--out_dir=out", "--alert_command=cat >> told.jsonl"]
    run = zygote.train(args, work, nproc, ok=False)
    assert set(run.codes) == {1} and "Traceback" not in run.text()
    assert run.text().count("out of memory while the model was allocated") == 1
    assert "uses micro-batches of" not in run.text() and not (work / "out").exists()
    told = [json.loads(line) for line in (work / "told.jsonl").read_text().splitlines()]
    assert told and all(t["event"] == "failed" and "out of memory" in t["reason"] for t in told)
    assert not any(t["reason"].startswith("error") for t in told), "a prefix of the console"


def test_data_that_is_replaced_or_truncated_during_a_run(zygote, work):
    """A run reads the file that it has opened, not a new one of the same name; a shorter one ends the run."""
    run = zygote.start([*TINY, "--max_iters=100000", "--out_dir=out"], work)
    path, opened = work / "data/tiny/train.bin", work / "data/tiny/opened"
    wait_for(lambda: steps_in(work / "out") > 3)
    path.rename(opened)
    began = steps_in(work / "out")
    wait_for(lambda: steps_in(work / "out") > began + 3)  # no file has the name
    path.write_bytes(bytes(4096))
    began = steps_in(work / "out")
    wait_for(lambda: steps_in(work / "out") > began + 3)
    os.truncate(opened, 4096)
    run.wait(ok=False)
    assert run.codes == [1] and "train.bin has been truncated" in run.text() and "Traceback" not in run.text()
    assert f"saved out/step_{steps_in(work / 'out') + 1:08d}\n" in run.text()


# train.py in which rank 1 cannot read a split any more after step LAST
UNREADABLE = """
from isogpt.data import dataset, reader
from isogpt.monitor import run_report
check_ids, report_step, is_late = dataset.check_ids, run_report.RunReport.step, []
def check(windows, vocab_size, tokens, starts):
    if is_late and tokens.path.name == "SPLIT.bin" and os.environ.get("RANK", "1") == "1":
        raise dataset.DataError(f"{tokens.path} has been truncated since the start of the run")
    check_ids(windows, vocab_size, tokens, starts)
def noted(report, *args):
    if report.progress.step == LAST:
        is_late.append(True)
    return report_step(report, *args)
reader.check_ids, run_report.RunReport.step = check, noted
"""


@pytest.mark.parametrize(
    "nproc, split, flags",
    [
        (1, "val", []),
        (2, "val", ["--eval_interval=8", "--zero=3"]),
        (2, "val", ["--eval_interval=8", "--islands=2", "--local_steps=3"]),
        (2, "train", ["--eval_interval=99", "--zero=3"]),
    ],
    ids=["at the end", "zero", "islands", "a step"],
)
def test_data_that_cannot_be_read_ends_a_run_whose_state_is_saved(zygote, work, nproc, split, flags):
    """
    In an evaluation or a step, on one of two ranks that compute together, and at the end of a run. The
    resumed run has the same bits.
    """
    args = ["--out_dir=out", "--max_iters=9", "--init_from=auto", "--eval_iters=3", *flags]
    # training reads a few steps in advance
    changes = UNREADABLE.replace("SPLIT", split).replace("LAST", "2" if split == "train" else "6")
    run = start_changed(zygote, changes, args, work, nproc).wait(ok=False)
    step = steps_in(work / "out") + 1
    assert 3 <= step <= 8 if split == "train" else step == (8 if flags else 10)
    assert set(run.codes) == {1} and "Traceback" not in run.text()
    rank = "rank 1: " if nproc > 1 else ""
    message = f"error: {rank}data/tiny/{split}.bin has been truncated since the start of the run\n"
    assert run.text().count(message) == 1 and f"saved out/step_{step:08d}\n" in run.text()
    text = Path(run.outs[0]).read_text()
    assert text.endswith(message) and f"step {step}:" not in text
    assert [r for r in records(work / "out") if r.get("event") == "failed"][0]["reason"] in message
    found, reports = best_checkpoint(str(work / "out"))
    assert found.step == step and not reports and found.val_loss is None
    run = zygote.train([*args, "--max_iters=10"], work, nproc)
    assert f"iter {step}: loss" in run.text()
    zygote.train([*args, "--max_iters=10", "--out_dir=straight"], work, nproc)
    assert column(work / "out", "loss") == column(work / "straight", "loss")


def test_the_best_checkpoint_of_a_run_whose_best_one_could_not_be_saved(zygote, place):
    """It is the one with the lowest loss that is there, and it is not deleted."""
    out = place / "out"
    shutil.rmtree(out)
    zygote.train([*SHORT, "--eval_interval=2", "--keep_last=9", "--max_iters=7"], place)
    assert best_checkpoint(str(out))[0].step == 8
    worse = ["--learning_rate=9", "--min_lr=9", "--warmup_iters=0", "--max_iters=8", "--keep_last=9"]
    run = zygote.train([*RESUME, *worse, "--eval_interval=99"], place)
    assert "at step 8\n" in run.text()
    shutil.rmtree(out / "step_00000008")
    found, _ = best_checkpoint(str(out))
    assert found.step == 6 and found.val_loss == column(out, "val_loss")[6]
    assert export(zygote, place, "out", "--list").text().count(f"{found.val_loss:8.4f}") == 1
    manifest = read_manifest(out / "step_00000009")
    best = best_folder(out, manifest)
    link_checkpoints(out, out / "step_00000009", best)
    prune_checkpoints(out, out / "step_00000009", best, 1, 32)
    assert [f.name for f in step_folders(out)] == ["step_00000009", "step_00000006"]
    (out / "elsewhere").mkdir()
    for name in ("step_00000004", "unfinished_step_00000002"):  # an old checkpoint on a different disk
        (out / name).symlink_to("elsewhere")
    prune_checkpoints(out, out / "step_00000009", best, 1, 32)
    clean_up(out)
    assert not [path for path in out.iterdir() if path.name[-1] in "24"] and (out / "elsewhere").exists()
    moved = (out / "step_00000009").rename(out / "step_00000100")
    assert damage(moved) == "it was renamed: its checkpoint is that of step 9"
    moved.rename(out / "step_00000009")
    assert (out / "ckpt_best.pt").resolve().parent.name == "step_00000006"
    data = bytearray((out / "step_00000006/ckpt.pt").read_bytes())
    data[5000] ^= 1
    (out / "step_00000006/ckpt.pt").write_bytes(data)
    found, reports = best_checkpoint(str(out))
    assert found.step == 9 and len(reports) == 1 and "step_00000006 is damaged" in reports[0]


def test_foreign_lines_in_the_log(zygote, place):
    with open(place / "out/metrics.jsonl", "a") as f:
        f.write('{"iter": null}\n[1]\n{"iter": "7", "loss": 1}\n{"note": "mine"}\n')
        f.write('{"iter": 5, "loss": 2.5, "time": "yesterday"}\n')
    zygote.train(RESUME, place)
    # the lines before the last one of an earlier step are neither read nor written: "7" stays
    steps = [step for step in column(place / "out", "loss") if step != "7"]
    assert len(steps) == 8 and {"note": "mine"} in records(place / "out")


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_the_run(work):
    """train.py ... | head -3"""
    command = [sys.executable, str(REPO / "train.py"), *TINY, *SHORT]
    env = os.environ | {"MPLBACKEND": "of_a_notebook"}  # the plot needs no backend
    run = subprocess.Popen(
        command, cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(3):
        run.stdout.readline()
    run.stdout.close()
    errors = run.stderr.read()
    assert run.wait(60) == 0 and errors.count("stdout was closed") == 1 and "Traceback" not in errors
    assert (work / "out/step_00000006/ckpt.pt").exists() and (work / "out/loss.png").exists()


# ------------------------------------------------------------------------------------------------------------
# misleading messages


def test_no_module_is_imported_after_the_first_step(zygote, work):
    """A checkout may be changed or moved while a run goes on: it must not load a mixture of versions."""
    changes = """
from isogpt.monitor.run_report import RunReport
loaded, step, end = [], RunReport.step, RunReport.end
def noted_step(self, *args):
    loaded.extend(() if loaded else sys.modules)
    return step(self, *args)
def noted_end(self, *args):
    end(self, *args)
    print("late:", [name for name in sys.modules if "isogpt" in name and name not in loaded])
RunReport.step, RunReport.end = noted_step, noted_end
"""
    args = ["--out_dir=out", "--max_iters=2", "--zero=1"]
    assert "late: []\n" in start_changed(zygote, changes, args, work).wait().text()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, before[1]))
    with pytest.raises(OSError, match="File too large"):
        write_file(tmp_path / "ckpt.pt", {"w": torch.zeros(10**5)})
    with pytest.raises(OSError, match="File too large"):
        sharded_files.write(tmp_path, {"w": local_part_of(torch.zeros(10**5))}, group=None)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left on device: .*x"):
        write_whole(tmp_path / "x", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["__0_0.distcp", "ckpt.pt"]


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("mkdir", "EROFS", "out_dir out cannot be written to on .* .Read-only file system.: set a different"),
        (
            "replace",
            "ENOTSUP",
            "file system that cannot replace files on .*: set .*, such as a folder on a local",
        ),
        ("open", "EOPNOTSUPP", "file system that cannot append to files on"),
        ("rename", "ENOSYS", "file system that cannot rename folders on .* .Function not implemented.: set"),
    ],
)
def test_what_a_run_needs_of_its_folder_is_tried_at_the_start(at, name, number, said):
    """A mounted bucket cannot rename folders: such a run trained to its end, and saved nothing."""
    code = getattr(errno, number)
    error = OSError(code, os.strerror(code))
    real_open = open

    def open_(path, mode="r", *args, **kwargs):
        if mode == "ab":
            raise error
        return real_open(path, mode, *args, **kwargs)

    make_writable("out")
    assert list(at.path.iterdir()) == [at.path / "out"] and not os.listdir("out"), "nothing is left"
    with at.context() as patch:
        if name == "open":
            patch.setattr(folder_module, "open", open_, raising=False)
        elif name == "mkdir":
            patch.setattr(Path, name, Mock(side_effect=error))
        else:
            patch.setattr(os, name, Mock(side_effect=error))
        with pytest.raises(ValueError, match=said):
            make_writable("out")
    assert not os.listdir("out") and not [path for path in at.path.iterdir() if path.name != "out"]


def test_a_file_system_that_loses_what_is_appended(at):
    with at.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: b"\0")
        with pytest.raises(ValueError, match="a file has a different content afterwards"):
            make_writable("out")


def test_a_disk_with_too_little_space_is_a_warning_at_the_start(at):
    """A run needs space for two checkpoints, and for one where there is one."""
    plan = SimpleNamespace(counts=SimpleNamespace(parameters=10**9), optimizer="adamw")
    disk = {"free": 30e9, "total": 100e9}
    at.set(shutil, "disk_usage", lambda _: SimpleNamespace(**disk))
    assert about_space(at.path, plan) == ""
    disk["free"] = 20e9
    said = about_space(at.path, plan)
    assert said.startswith("a checkpoint takes at least 12 GB, and is kept until the next one is complete")
    assert f"but {at.path} has 20 GB of free space" in said
    plan.optimizer = "muon"
    assert about_space(at.path, plan) == "", "one moment of most matrices"
    plan.optimizer = "adamw"
    (at.path / "step_00000003").mkdir()
    assert about_space(at.path, plan) == ""
    disk |= {"free": 0, "total": 0}
    assert about_space(at.path, plan) == "", "a file system that does not tell"
    at.set(shutil, "disk_usage", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    assert about_space(at.path, plan) == ""


def test_a_run_that_has_saved_nothing_says_so(tmp_path):
    saver = SimpleNamespace(run_folder=RunFolder(tmp_path), problem="No space left", failures=1)
    first = Saver.about_failure(saver)
    saver.failures = 2
    second = Saver.about_failure(saver)
    assert "\n" not in first and first.endswith("no older one: if the run ends now, all its steps are lost")
    frame, text, advice, end = second.splitlines()
    assert frame == end == "!" * 100 and text == first and advice.startswith("2 checkpoints in succession")
    (tmp_path / "step_00000003").mkdir()
    assert Saver.about_failure(saver) == f"{first.partition(';')[0]}; older checkpoints are kept"


@pytest.mark.parametrize("kind", ["signal", "eval_only"])
def test_a_stop_before_the_first_checkpoint_does_not_advise_to_resume(zygote, work, kind):
    args = [*TINY, "--eval_iters=100000", "--out_dir=out", f"--eval_only={kind == 'eval_only'}"]
    run = zygote.start(args, work)
    assert run.until(lambda text: "peak:" in text)
    run.kill(sig=signal.SIGTERM)
    run.wait(ok=False)
    assert run.codes == [128 + signal.SIGTERM] and "no checkpoint to resume" in run.text()
    assert "--init_from=resume" not in run.text() and "Traceback" not in run.text()


def test_a_resume_says_which_settings_do_not_apply(zygote, place):
    tiny_data(place, name="other")
    run = zygote.train([*RESUME, "--n_layer=4", "--bias=True", "--vocab_size=80", "--dataset=other"], place)
    assert (
        "n_layer 2, bias False, vocab_size 65 of the checkpoint are used, not n_layer 4, bias True"
        in run.text()
    )
    assert "this run continues with dataset other (was tiny): the loss curve changes" in run.text()
    used = [r["config"] for r in records(place / "out") if r.get("event") == "resume"][-1]
    assert (used["n_layer"], used["bias"], used["vocab_size"], used["dataset"]) == (2, False, 65, "other")
    quiet = zygote.train([*RESUME, "--max_iters=8", "--dataset=other"], place)
    assert "of the checkpoint" not in quiet.text() and "continues with" not in quiet.text()
    coarser = zygote.train([*RESUME, "--max_iters=9", "--dataset=other", "--dtype=bfloat16"], place)
    assert "this run continues with dtype bfloat16 (was float32): the loss curve changes" in coarser.text()


def test_a_second_of_tensorboards_steps_after_a_rollback(tmp_path):
    """The reader drops what was logged before the rollback."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = {"out_dir": str(tmp_path), "max_iters": 9, "eval_interval": 4}
    metrics = MetricsFile(config, step=0)
    logger = Logger(Progress(1), [metrics, TensorBoard(str(tmp_path), step=0)])
    for first in (0, 3):
        for step in range(first, 5):
            logger.write({"iter": step, "loss": 1.0, "step_ms": 1.0, "mfu": None})
        logger.event("end" if first else "rollback", to=3)
    metrics.file.close()
    assert sorted(column(tmp_path, "loss")) == [0, 1, 2, 3, 4]
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss")] == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------------------
# code in files, and errors in blocks that ranks share


def test_a_pickle_may_read_members_of_enums_and_no_other_attributes(tmp_path):
    class Reads:
        def __init__(self, *what):
            self.what = what

        def __reduce__(self):
            return getattr, self.what

    path, allowed = tmp_path / "it.pkl", {"signal": {"Signals"}, "numpy": {"dtype"}}
    path.write_bytes(pickle.dumps(Reads(signal.Signals, "SIGTERM")))
    assert load_pickle(path, allowed) is signal.SIGTERM
    path.write_bytes(pickle.dumps(Reads(np.dtype, "mro")))
    with pytest.raises(pickle.UnpicklingError, match="only plain values are read"):
        load_pickle(path, allowed)


EXITS = """
import builtins, datetime, sys
sys.path.insert(0, {repo!r})
import torch.distributed as dist
from isogpt.launch.together import exit_together

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
failing, kind = [int(rank) for rank in sys.argv[1].split(",")], getattr(builtins, sys.argv[2])
if kind is MemoryError:
    sys.excepthook = lambda kind, error, trace: print("the hook explains", kind.__name__)
with exit_together(lambda text: print("logged", text)):
    if dist.get_rank() in failing:
        raise kind("what happened\\nand more")
print("went on")
"""


@pytest.mark.parametrize(
    "failing, kind",
    [("1", "KeyError"), ("0,1,2", "KeyError"), ("1,2", "MemoryError"), ("2", "KeyboardInterrupt")],
)
def test_any_exception_in_a_shared_block_ends_all_ranks(zygote, tmp_path, failing, kind):
    """At once, with the traceback or the crash hook's message of the first rank that failed."""
    (tmp_path / "exits.py").write_text(EXITS.format(repo=str(REPO)))
    run = zygote.start([failing, kind], tmp_path, nproc=3, script="exits.py", repo=tmp_path).wait(
        40, ok=False
    )
    text, first = run.text(), failing[0]
    assert all(run.codes) and "went on" not in text
    said = "KeyError: 'what happened" if kind == "KeyError" else f"{kind}: what happened"
    line = f"error: rank {', '.join(failing.split(','))}: {said}"
    assert text.count(line) == (first != "0") and text.count("logged") == 2
    if kind == "MemoryError":
        assert text.count("the hook explains MemoryError") == 1 and "Traceback" not in text
    else:
        assert text.count("Traceback") == 1 and "Traceback" in Path(run.outs[int(first)]).read_text()
