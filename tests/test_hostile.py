"""
Folders that somebody else has written: nothing in them runs, leads to a file outside of them, waits forever
or ends a script with a traceback.
"""

import copy
import errno
import io
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import socket
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import accepted, start_changed, train_defaults

import export
from isogpt.checkpoint import manifest, search, sharded_files
from isogpt.checkpoint.ckpt_file import write_file
from isogpt.checkpoint.commit import commit_checkpoint
from isogpt.checkpoint.folder import continue_from, enter_folder, look_for_start
from isogpt.checkpoint.manifest import (
    damage,
    hash_files,
    read_manifest,
    sealed,
    sha256_of,
    step_folders,
    step_of,
)
from isogpt.checkpoint.owner import check_owner, was_entered_by, write_owner
from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.run_vocabulary import vocabulary_of_run
from isogpt.checkpoint.search import best_checkpoint
from isogpt.checkpoint.source import check_weights, open_checkpoint
from isogpt.checkpoint.start import differences
from isogpt.checkpoint.state import restore_checkpoint
from isogpt.common import console
from isogpt.common.files import recorded, write_whole
from isogpt.data.dataset import open_dataset
from isogpt.launch import start_checks
from isogpt.launch.launchers import Launch
from isogpt.monitor.sink_metrics import MetricsFile
from isogpt.parallel.local_parts import local_part_of
from isogpt.parallel.parallelize import materialize
from model import GPT, GPTConfig

SEED = os.environ.get("SEED", "")  # tests other changes
LIMIT_S = 20  # for what takes a fraction of a second
DEEP = "[" * 200_000
BOUND = [*range(-2, 3), 2**31, 2**40, 2**63, 2**70, 10**300, 0.5, -0.5, math.nan, math.inf, 1e308, True]
NASTY = [
    *BOUND,
    None,
    "",
    "x",
    "\x1b[2J\n",
    "../../x",
    "/etc/passwd",
    "\0",
    "a" * 10**4,
    [],
    {},
    [[]],
    [None],
]
NASTY += [{"a": {}}, {"": None}, [2**70], "\ud800"]


@contextmanager
def within_limit():
    """Fail if the block takes longer than LIMIT_S."""

    def stop(number, frame):
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def runs(zygote, shared_work):
    """Two runs with two checkpoints each: files in nanoGPT's form, and shards."""
    for out, flags in (("whole", []), ("shards", ["--zero=3"])):
        args = ["--n_layer=1", "--n_embd=8", "--save_interval=2", "--max_iters=3", "--keep_last=0"]
        zygote.train([*args, *flags, f"--out_dir={out}"], shared_work)
    return shared_work


@pytest.fixture
def copy_of(runs, tmp_path, at):
    """Copies a run, and the data, to a folder that a test may change."""

    def make(name):
        folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(runs / "data", tmp_path / "data", dirs_exist_ok=True)
        return Path(shutil.copytree(runs / name, folder, symlinks=True))

    return make


def changed(value, rng):
    """A copy of nested dicts and lists in which one value or name is a different one."""
    value = copy.copy(value)
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(NASTY)
    name = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    what = rng.random()
    if what < 0.15 and isinstance(value, dict):
        value[rng.choice(["x", "../x", "\x1b[2J\n", *([7] if rng.random() < 0.1 else [])])] = value.pop(name)
    elif what < 0.3:
        del value[name]
    else:
        value[name] = changed(value[name], rng)
    return value


def seal(folder, manifest=None):
    """Give a step folder a manifest with valid checksums, as whoever changes a file can."""
    (folder / "manifest.json").unlink(missing_ok=True)
    files = hash_files(folder)
    manifest = manifest(files) if callable(manifest) else {**manifest, "files": files}
    text = sealed(manifest) if isinstance(manifest, dict) else json.dumps(manifest)
    (folder / "manifest.json").write_text(text)


def use(out):
    """What train.py, sample.py and export.py do with a folder; returns the checkpoint that they take."""
    export.list_checkpoints(str(out))
    best_checkpoint(str(out))
    assert not was_entered_by(out, Launch(("agent",)))
    stored, is_resume, reports = look_for_start("resume", str(out), -1, Launch())
    source = open_checkpoint(stored)
    config = train_defaults(dataset="tiny", n_embd=8, n_layer=1, init_from="resume")
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.run["model_args"]))
    check_weights(source, model)
    vocabulary_of_run(source.run, out)
    differences(config, source.run["model_args"], source, True)
    progress = Progress(64)
    progress.begin(config, SimpleNamespace(digest="digest", bytes_per_token=None, describe=dict), source, {})
    materialize(model, torch.device("cpu"))
    restore_checkpoint(source, model, export.optimizers_of(model, source.run["config"]))
    MetricsFile(config | {"out_dir": str(out)}, progress.step)
    return stored


def check_law(out, newest, what):
    """The folder is used, an older checkpoint is taken, or there is a message that shows nothing else."""
    with within_limit():
        try:
            return use(out).step <= newest
        except (ValueError, OSError) as e:
            text = io.StringIO()
            with redirect_stderr(text):
                console.print_error(str(e))
            shown = text.getvalue()
            assert shown.startswith("error: ") and "\x1b" not in shown and len(shown) < 3000, (what, shown)
            assert all(line.startswith("error: ") for line in shown.splitlines()), (what, shown)
            return False


@pytest.mark.parametrize("kind", ["manifest", "whole", "shards", "metadata", "owner", "metrics"])
def test_whatever_a_folder_contains(copy_of, kind):
    """The checksums are right: whoever changes files can change the manifest, too."""
    rng, taken = random.Random(f"{kind}{SEED}"), 0
    out = copy_of("whole" if kind != "shards" and kind != "metadata" else "shards")
    newest = step_folders(out)[0]
    manifest = read_manifest(newest)
    state = torch.load(newest / "ckpt.pt") if kind == "whole" else None
    described = (newest / ".metadata").read_bytes() if kind == "metadata" else b""
    owner = json.loads((out / "owner").read_text())
    log = (out / "metrics.jsonl").read_text().splitlines()
    for number in range(40):
        if kind == "manifest":
            seal(newest, lambda files: changed(manifest, rng) if rng.random() < 0.9 else {})
        elif kind == "whole":
            torch.save(new := changed(state, rng), newest / "ckpt.pt")
            seal(newest, manifest)
        elif kind == "shards":
            seal(newest, manifest | {"run": changed(manifest["run"], rng)})
        elif kind == "metadata":
            damaged = bytearray(described)
            for _ in range(rng.choice([1, 20])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            (newest / ".metadata").write_bytes(damaged[: rng.choice([None, len(damaged) // 2])])
            seal(newest, manifest)
        elif kind == "owner":
            text = json.dumps(changed(owner, rng))
            (out / "owner").write_text(rng.choice([text, text[:9], DEEP]))
        else:
            lines = [json.dumps(changed(json.loads(line), rng)) for line in log]
            (out / "metrics.jsonl").write_text("\n".join([*lines, DEEP, "\x1b[2J", log[0]]), errors="replace")
        taken += check_law(out, 4, (kind, number, locals().get("new")))
        for log_file in out.glob("damaged_*"):
            log_file.rename(newest)
    assert taken or kind == "metadata", "some changes harm nothing, or an older checkpoint is taken"


SPECIAL = {
    "a FIFO": os.mkfifo,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "deep JSON": lambda path: path.write_text(DEEP),
    "a link to itself": lambda path: path.symlink_to(path),
}
FILES = ["step_00000004/ckpt.pt", "step_00000004/manifest.json", "owner", "metrics.jsonl", "layout.json"]
FILES += [
    "tiny/meta.pkl",
    "tiny/meta.json",
    "tiny/train.bin",
    "tiny/tokenizer.json",
    "tiny/tokenizer_config.json",
]


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file(copy_of, kind, at):
    """Reading a FIFO waits for its writer, and /dev/zero has no end."""
    for name in FILES:
        out = copy_of("whole")
        data = Path(shutil.copytree(out.parent / "data/tiny", out / "tiny"))
        (data / "tokenizer.json").write_text("{}")
        (out / name).unlink(missing_ok=True)
        at.chdir(out)
        SPECIAL[kind](out / name)
        at.chdir(out.parent)
        if name.startswith("tiny"):
            with within_limit(), suppress(ValueError, OSError):
                open_dataset(str(data), 8)
        else:
            check_law(out, 4, name)
            with within_limit():
                assert recorded(out / "layout.json", {}) is None
        shutil.rmtree(out)


def test_a_model_of_transformers_whose_config_is_no_file(at):
    os.mkfifo(at.path / "config.json")
    with within_limit():
        assert start_checks.start_facts({"init_from": str(at.path)})["has_weights"]


def test_a_pickle_of_anything(at, runs):
    rng = random.Random(0)
    data = Path(shutil.copytree(runs / "data/tiny", at.path / "data/tiny"))
    meta = pickle.loads((data / "meta.pkl").read_bytes())
    for number in range(150):
        content = pickle.dumps(changed(meta, rng))
        if number % 3 == 0:
            place = rng.randrange(len(content))
            content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
        (data / "meta.pkl").write_bytes(content)
        with within_limit():
            try:
                open_dataset("tiny", 8)
            except ValueError as e:
                assert "\x1b" not in console.visible(str(e))


# a link under the name of the next checkpoint, after the run has cleaned its folder up; its owner is known
PLANTED = """
import uuid
from isogpt.monitor.run_report import RunReport
uuid.uuid4 = lambda: uuid.UUID(int=0)
end_of_start = RunReport.__post_init__
def plant(self):
    end_of_start(self)
    os.symlink(os.path.abspath("victim/folder"), "out/unfinished_00000000_step_00000006")
    os.mkdir("out/unfinished_00000000_step_00000008")
    os.symlink(os.path.abspath("victim/file"), "out/unfinished_00000000_step_00000008/ckpt.pt")
RunReport.__post_init__ = plant
"""


def test_nothing_outside_of_the_folder_is_written(zygote, runs, tmp_path):
    """Links under each name that a run writes, to files and folders of somebody else."""
    shutil.copytree(runs / "data", tmp_path / "data")
    out, victim = tmp_path / "out", tmp_path / "victim"
    shutil.copytree(runs / "whole", out)
    (victim / "folder").mkdir(parents=True)
    for name in ("file", "folder/ckpt.pt", "folder/other", "folder/manifest.json"):
        (victim / name).write_text("precious")
    names = ["owner", "metrics.jsonl", "loss.png", "PREEMPTED", "ckpt.pt", "ckpt_best.pt", "manifest.json"]
    for name in [*names, *(f"{name}.tmp" for name in names), "trace.json", "operators.txt"]:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(victim / "file")
    (out / "ckpt.pt").unlink()
    shutil.copyfile(out / "step_00000004/ckpt.pt", out / "ckpt.pt")  # becomes step_00000004
    shutil.rmtree(out / "step_00000004")
    folders = (
        "step_00000004",
        "unfinished_step_00000004",
        "unfinished_step_00000002",
        "previous_1",
        "step_00000006",
    )
    for name in (*folders, "link"):
        (out / name).symlink_to(victim / "folder")
    args = [
        "--n_layer=1",
        "--n_embd=8",
        "--out_dir=out",
        "--save_interval=2",
        "--profile=True",
        "--keep_last=1",
    ]
    run = start_changed(zygote, PLANTED, [*args, "--init_from=resume", "--max_iters=12"], tmp_path).wait()
    assert "a checkpoint failed" not in run.text()
    zygote.train([*args, "--max_iters=100000", "--time_limit_s=1"], tmp_path)  # PREEMPTED, previous_
    assert (out / "PREEMPTED").is_file() and not (out / "PREEMPTED").is_symlink()
    for write in (write_shards, write_ckpt):  # a link that nobody may remove
        with pytest.raises(OSError, match="it is a link"):
            write(out / "link")
        (out / "new").mkdir()
        for name in ("ckpt.pt", "__0_0.distcp"):
            (out / "new" / name).symlink_to(victim / "file")
        with pytest.raises(OSError, match="File exists"):
            write(out / "new")
        shutil.rmtree(out / "new")
    files = [path for path in victim.rglob("*") if path.is_file()]
    assert len(files) == 4 and all(path.read_text() == "precious" for path in files)


def write_shards(folder):
    sharded_files.write(folder, {"x": local_part_of(torch.ones(1))}, group=None)


def write_ckpt(folder):
    write_file(folder / "ckpt.pt", {})


def test_a_checkpoint_that_cannot_be_read_is_not_damaged(copy_of, at):
    """The disk may be away, or the files may belong to a different user: a resume must not give up steps."""
    out = copy_of("whole")
    newest, older, *_ = step_folders(out)

    def read(path):
        if newest in path.parents and path.name == unreadable:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return sha256_of(path)

    at.set(manifest, "sha256_of", read)
    for unreadable in ("ckpt.pt", "manifest.json"):
        if unreadable == "manifest.json":
            at.set(manifest, "read_manifest", lambda folder: {})
        with pytest.raises(ValueError, match=f"^{newest}/{unreadable} cannot be read .*may be intact: "):
            look_for_start("auto", str(out), -1, Launch())
        assert f"{unreadable} cannot be read (Permission denied)" in export.list_checkpoints(str(out))
    at.set(manifest, "read_manifest", read_manifest)
    unreadable = "ckpt.pt"
    stored, *_ = look_for_start("resume", str(out), step_of(older), Launch())
    continue_from(str(out), stored)
    assert (out / f"abandoned_{newest.name}").is_dir() and stored.path.parent == older


def test_what_stands_in_the_place_of_links_makes_no_checkpoint_fail(copy_of, capsys):
    out = copy_of("whole")
    newest, older, *_ = step_folders(out)
    for name in ("ckpt.pt", "ckpt_best.pt"):
        (out / name).unlink()
        (out / name).mkdir()
    (out / f"unfinished_{older.name}").write_text("a file")
    shutil.copytree(newest, out / "new")
    (out / "new" / "manifest.json").unlink()
    commit_checkpoint(out / "new", read_manifest(newest) | {"step": 8}, keep_last=1)
    assert [step_of(folder) for folder in step_folders(out)] == [8, step_of(newest)], "the best one is kept"
    assert not [*out.glob("*.tmp"), *out.glob("unfinished_*")]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(f"warning: {out}/step_00000008 is complete, but" in line for line in lines)


def test_an_owner_that_is_no_text_is_none(at):
    for owner in (None, 7, ["x"]):
        (at.path / "owner").write_text(json.dumps({"owner": owner, "launch": None}))
        check_owner(at.path, "this run")
    write_owner(at.path, "other", None)
    with pytest.raises(ValueError, match="a different run was started"):
        check_owner(at.path, "this run")


def test_a_run_that_goes_on_deletes_what_was_found(copy_of, at):
    out = copy_of("whole")
    newest, older, *_ = step_folders(out)
    shutil.copytree(newest, out / "kept")

    def deleted(folder):
        """A run saves the next checkpoint and deletes the last while it is verified."""
        if folder == newest and (out / "kept").exists():
            shutil.rmtree(newest)
            (out / "kept").rename(out / "step_00000009")
            seal(out / "step_00000009", read_manifest(out / "step_00000009") | {"step": 9})
        return damage(folder)

    at.set(search, "damage", deleted)
    stored, reports = search.newest_checkpoint(str(out))
    assert (stored.step, reports) == (9, [])
    shutil.rmtree(out / "step_00000009")
    with pytest.raises(ValueError, match="has just been deleted by a run that is still going: start again"):
        open_checkpoint(stored)
    search.newest_checkpoint(str(out))


def test_sizes_that_no_file_has(copy_of):
    """They would take forever, or all memory, before anything is compared."""
    for name in ("n_layer", "n_embd", "n_head", "vocab_size", "block_size"):
        out = copy_of("whole")
        newest = step_folders(out)[0]
        state = torch.load(newest / "ckpt.pt")
        state["model_args"][name] = 2**40
        torch.save(state, newest / "ckpt.pt")
        seal(newest, read_manifest(newest))
        with within_limit(), pytest.raises(ValueError, match=f"{name}"):
            use(out)
    out = copy_of("whole")
    newest = step_folders(out)[0]
    state = torch.load(newest / "ckpt.pt")
    state["model"]["transformer.wte.weight"] = torch.zeros(1, 1).expand(2**30, 2**20)  # a byte on the disk
    torch.save(state, newest / "ckpt.pt")
    seal(newest, read_manifest(newest))
    with within_limit(), pytest.raises(ValueError, match="there are only"):
        use(out)
    for setting in ("--n_layer=1e9", "--n_embd=1000000000000", "--nproc=1000000"):
        with pytest.raises((ValueError, SystemExit)):
            accepted("train.py", setting)


def test_names_are_printed_visibly(at, capsys):
    """A folder's name may contain escape codes and lines that look like ours."""
    name = "x\x1b[2J\nerror: nothing"
    for setting in ("out_dir", "dataset", "init_from"):
        with pytest.raises(SystemExit):
            accepted("train.py", f"--{setting}={name}")
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1 and "\x1b" not in shown and "control characters" in shown, shown
    (at.path / name).mkdir()
    (at.path / name / "ckpt.pt").touch()
    with pytest.raises(ValueError, match="no checkpoint to resume from") as error:
        look_for_start("resume", "out", -1, Launch())
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)
    assert console.visible("a\tb\n\x9b\u202e", but="\n") == "a\\tb\n\\x9b\\u202e"


def test_an_interrupted_write_leaves_nothing_for_long(at):
    (at.path / "out").mkdir()
    for name in ("owner.0123456789abcdef.tmp", "mine.tmp"):
        (at.path / "out" / name).touch()
    write_whole(at.path / "out/file", "text")
    enter_folder("out", None, Launch())
    assert sorted(path.name for path in (at.path / "out").iterdir()) == ["file", "mine.tmp", "owner"]
    assert not re.search("tmp", str(read_manifest(at.path / "out")))
