"""
Folders that somebody else has written: nothing in them runs, leads to a file outside of them, waits forever
or ends a script with a traceback.
"""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
from functools import reduce
from pathlib import Path

import pytest
import torch
from runs import start_changed, train_defaults

import export
from isogpt.checkpoint.manifest import step_folders
from isogpt.checkpoint.start import find_start
from isogpt.checkpoint.state import restore_checkpoint
from isogpt.common import console
from isogpt.common.files import read_records
from isogpt.common.patience import within
from isogpt.data.dataset import open_dataset
from isogpt.launch.launchers import Launch
from isogpt.launch.process_group import Ranks
from isogpt.parallel.parallelize import materialize
from isogpt.training import optim
from model import GPT, GPTConfig

ALONE = Ranks(0, 1, torch.device("cpu"), "gloo", launch=Launch(("agent",)))
SHAPE = ["--n_layer=1", "--n_embd=8"]
LIMIT_S = 20  # for what takes a fraction of a second


@pytest.fixture(scope="module")
def runs(zygote, shared_work):
    """Two runs with two checkpoints each: files in nanoGPT's form, and shards."""
    for out, flags in (("whole", []), ("shards", ["--zero=3"])):
        args = [*SHAPE, "--save_interval=2", "--max_iters=3", "--keep_last=0"]
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


def seal(folder, **changes):
    """Give a step folder a manifest with valid checksums, as whoever changes a file can."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["manifest_sha256"]
    for file in folder.iterdir():
        if file != path:
            content = file.read_bytes()
            entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            manifest["files"][file.name] = entry
    manifest |= changes
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    path.write_text(json.dumps({**manifest, "manifest_sha256": digest}, indent=1))


def start(init_from, out):
    """What train.py starts from."""
    return find_start(train_defaults(init_from=init_from, out_dir=str(out)), ALONE, GPT)


def use(out):
    """What train.py, sample.py and export.py do with a folder whose newest checkpoint is step 4."""
    export.list_checkpoints(str(out))
    found = start("resume", out)
    with torch.device("meta"):
        model = GPT(GPTConfig(**found.checkpoint.run["model_args"]))
    found.check(model)
    materialize(model, torch.device("cpu"))
    restore_checkpoint(found.checkpoint, model, optim.make_optimizers(model, train_defaults()))
    assert [*read_records(out / "metrics.jsonl")] and found.checkpoint.stored.step <= 4


@pytest.fixture
def check_law(capsys):
    """The folder is used, an older checkpoint is taken, or there is a message that shows nothing else."""

    def check(what, work, *arguments):
        try:
            within(LIMIT_S, work, *arguments)
        except TimeoutError:  # an OSError, too
            raise
        except (ValueError, OSError, SystemExit) as e:
            message = f"{e}{capsys.readouterr().err}".replace("\n", "")
            assert len(message) < 3000 and message.isprintable(), (what, message)

    return check


class Evil:
    """Its pickle creates a file when it is loaded without restrictions."""

    def __reduce__(self):
        return Path.touch, (Path("PWNED"),)


@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_no_code_of_a_file_runs(copy_of, check_law, capsys, kind):
    """In no file of a checkpoint, wherever it stands in it; nor in a ckpt.pt alone."""
    out = copy_of(kind)
    newest = step_folders(out)[0]
    for path in [path for path in newest.iterdir() if path.name != "manifest.json"]:
        content = path.read_bytes()
        for evil in (pickle.dumps(Evil()), saved({"model": Evil()}), saved({"model": {}, "config": Evil()})):
            path.write_bytes(evil)
            seal(newest)
            check_law(path.name, use, out)
            (out / "alone.pt").write_bytes(evil)
            with pytest.raises(SystemExit):
                start(str(out / "alone.pt"), out)
            assert "alone.pt is not a checkpoint" in capsys.readouterr().err
        path.write_bytes(content)
    assert not [*Path().rglob("PWNED"), *out.rglob("PWNED")]


def saved(content):
    """The bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


SPECIAL = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
}
FILES = ["step_00000004/ckpt.pt", "step_00000004/manifest.json", "owner", "metrics.jsonl", "tiny/meta.pkl"]
FILES += ["tiny/meta.json", "tiny/train.bin"]


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file(copy_of, check_law, kind):
    """Reading a FIFO waits for its writer, and /dev/zero has no end."""
    for name in FILES:
        out = copy_of("whole")
        data = Path(shutil.copytree(out.parent / "data/tiny", out / "tiny"))
        (out / name).unlink(missing_ok=True)
        SPECIAL[kind](out / name)
        check_law(name, use, out)
        check_law(name, open_dataset, str(data), 8)


def test_a_few_bytes_that_have_no_end(zygote, runs, tmp_path):
    """A list that contains a list twice, which contains a list twice, and so on."""
    nested = reduce(lambda part, _: [part, part], range(60), [])
    data, out = (shutil.copytree(runs / name, tmp_path / name) for name in ("data/tiny", "whole"))
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": nested}))
    assert (data / "meta.pkl").stat().st_size < 400
    state = torch.load(out / "ckpt.pt")
    state["isogpt"]["model_args"]["residual_dtype"] = nested
    torch.save(state, out / "ckpt.pt")
    shutil.rmtree(out / "step_00000004")
    shutil.rmtree(out / "step_00000002")
    for arguments, script, problem in (
        ([f"--dataset={data}", "--device=cpu"], "train.py", "meta.pkl cannot be read: it contains more than"),
        ([f"--out_dir={out}", "--device=cpu"], "sample.py", "ckpt.pt is not a checkpoint .*it contains more"),
    ):
        run = zygote.start(arguments, tmp_path, script=script).wait(LIMIT_S, ok=False)
        assert re.search(f"error: .*{problem}", run.text())


def test_a_log_that_is_no_file_ends_no_run(zygote, copy_of):
    out = copy_of("whole")
    for name in ("owner", "metrics.jsonl"):
        (out / name).unlink()
        os.mkfifo(out / name)
    zygote.train([*SHAPE, f"--out_dir={out}", "--init_from=resume", "--max_iters=4"], out.parent)
    assert step_folders(out)[0].name == "step_00000005"


# links under the names of the next checkpoints, after the run has cleaned its folder up; its owner is known
PLANTED = """
import uuid
from torch.nn.modules.module import register_module_forward_pre_hook
uuid.uuid4 = lambda: uuid.UUID(int=0)
def plant(*args):
    first_pass.remove()
    os.symlink(os.path.abspath("victim/folder"), "out/unfinished_00000000_step_00000006")
    os.mkdir("out/unfinished_00000000_step_00000008")
    os.symlink(os.path.abspath("victim/file"), "out/unfinished_00000000_step_00000008/ckpt.pt")
first_pass = register_module_forward_pre_hook(plant)
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
    shutil.rmtree(out / "step_00000004")
    for name in ("step_00000004", "unfinished_step_00000002", "previous_1", "step_00000006"):
        (out / name).symlink_to(victim / "folder")
    args = [*SHAPE, "--out_dir=out", "--save_interval=2", "--keep_last=1", "--profile=1"]
    resume = [*args, "--init_from=resume", "--max_iters=12"]
    assert "a checkpoint failed" not in start_changed(zygote, PLANTED, resume, tmp_path).wait().text()
    zygote.train([*args, "--max_iters=100000", "--time_limit_s=1"], tmp_path)  # PREEMPTED, previous_
    assert (out / "PREEMPTED").is_file() and not (out / "PREEMPTED").is_symlink()
    files = [path for path in victim.rglob("*") if path.is_file()]
    assert len(files) == 4 and all(path.read_text() == "precious" for path in files)


def test_a_checkpoint_that_cannot_be_read_is_not_damaged(copy_of, capsys):
    """The disk may be away, or the files may belong to a different user: a resume must not give up steps."""
    out = copy_of("whole")
    file = step_folders(out)[0] / "ckpt.pt"
    file.unlink()
    file.mkdir()
    with pytest.raises(SystemExit):
        start("auto", out)
    assert re.match(f"error: {file} cannot be read .*may be intact: ", capsys.readouterr().err)
    _, newest, older = export.list_checkpoints(str(out)).splitlines()
    assert "ckpt.pt cannot be read" in newest and "valid" in older


def test_sizes_that_no_file_has(copy_of, capsys):
    """They would take all memory before anything is compared."""
    out = copy_of("whole")
    newest = step_folders(out)[0]
    state = torch.load(newest / "ckpt.pt")
    for name in ("n_embd", "n_head", "vocab_size", "block_size"):
        torch.save(state | {"model_args": state["model_args"] | {name: 2**40}}, newest / "ckpt.pt")
        seal(newest)
        with pytest.raises(SystemExit):
            within(LIMIT_S, use, out)
        assert re.search("does not fit the model|not a checkpoint", capsys.readouterr().err)


def test_names_are_printed_visibly(at, capsys):
    """A folder's name may contain escape codes and lines that look like ours."""
    name = "x\x1b[2J\nerror: nothing"
    (at.path / name).mkdir()
    (at.path / name / "ckpt.pt").touch()
    with pytest.raises(SystemExit):
        start("resume", "out")
    assert re.fullmatch(r"error: no checkpoint to resume from [ -~]*\n", capsys.readouterr().err)
    assert console.visible("a\tb\n\x9b\u202e", but="\n") == "a\\tb\n\\x9b\\u202e"
