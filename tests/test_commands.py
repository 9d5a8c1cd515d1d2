"""The commands of README.md and docs/ run, shrunk: a tiny model, two steps, no network and few processes."""

import math
import re
import shutil
import sys

import pytest
from documented import arguments, commands, files
from runs import REPO, column, script, tiny_data

sys.path.insert(0, str(REPO / "data"))
import find_documents

SMALL = [
    "--dataset=tiny",
    "--device=cpu",
    "--dtype=float32",
    "--compile=False",
    "--n_layer=2",
    "--n_head=8",
    "--n_embd=64",
    "--block_size=64",
    "--eval_iters=1",
    "--eval_interval=1000",
    "--log_interval=1",
    "--wandb_log=False",
]
SHORT = [*SMALL, "--batch_size=2", "--gradient_accumulation_steps=4", "--max_iters=2", "--lr_decay_iters=2"]
# what a shrunk command of train.py does not keep
OURS = tuple(f"{word.partition('=')[0]}=" for word in SHORT)
REPLACED = (*OURS, "--nproc=", "--layout=", "--save_interval=", "--out_dir=")
OF_A_CHECKPOINT = ("--n_layer=", "--n_head=", "--n_embd=")
DIVIDES = "nproc|nproc_per_node|num_processes|num_gpus|tp|pp|cp|ep|dp_replicate|islands|shares"


def commands_of(name):
    """The commands that run this script, without those that are the same once they are shrunk."""
    found = {}
    for _, command in commands():
        args = arguments(command, name)
        if args is not None and not {"--help", "--help=all"} & set(args):
            rest = without(args, *REPLACED) if name == "train.py" else args
            found.setdefault((*rest, processes_of(command)), command)
    return [*found.values()]


def without(args, *starts):
    return [arg for arg in args if not arg.startswith(starts)]


def processes_of(command):
    """As many as the settings of the command need, and two if the command starts several."""
    if "--dry_run_ranks=" in command:
        return 1
    given = dict(re.findall(rf"--({DIVIDES})=(\S+)", command))
    needed = math.prod(int(given.get(name, 1)) for name in ("tp", "pp", "cp", "ep", "dp_replicate"))
    if "dp_replicate" in given or given.get("islands") == "0":
        needed = max(needed, 2) * 2  # two groups of two ranks
    several = not command.startswith("python ") or "--nproc=" in command
    return max(needed, given.get("shares", "").count(",") + 1, 2 if several else 1)


@pytest.fixture(scope="module")
def prepared(zygote, tmp_path_factory):
    """A folder with a data set, two runs of train.py, and a model in the format of transformers."""
    work = tmp_path_factory.mktemp("prepared")
    find_documents.find_documents(tiny_data(work), 0)  # a line is a document
    zygote.start(["config/train_stdlib_char.py", *SHORT, "--out_dir=out-stdlib-char"], work).wait()
    zygote.start([*SHORT, "--out_dir=out"], work).wait()
    zygote.start(["out", "--to=hf"], work, script="export.py").wait()
    shutil.copytree(work / "out" / "hf", work / "my-folder")
    for name, content in files():
        (work / name).write_text(content)
    return work


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy of the prepared folder."""
    shutil.copytree(prepared, tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of("train.py"))
def test_a_command_of_the_docs_trains(zygote, folder, command):
    args = [re.sub(r"(gpt2-?\w*|path/to/model)$", "my-folder", arg) for arg in arguments(command, "train.py")]
    args = ["--islands=2" if arg == "--islands=0" else arg for arg in args]  # not one on each machine
    resumes = "--init_from=resume" in args or "--init_from=auto" in args
    short = without(SHORT, *OF_A_CHECKPOINT) if "--init_from=" in command else SHORT
    if "--residual_dtype=" in command:  # which float32 does not have
        short = [*without(short, "--dtype="), "--dtype=bfloat16"]
    of_the_config = "out-stdlib-char" if "stdlib_char.py" in command else "out"
    out = next((arg.partition("=")[2] for arg in args if arg.startswith("--out_dir=")), of_the_config)
    if resumes and not (folder / out).exists():
        shutil.copytree(folder / "out-stdlib-char", folder / out)
    args = [*without(args, *REPLACED), *short, f"--out_dir={out}"]
    last = 4 if resumes else 2
    args += [f"--max_iters={last}", f"--lr_decay_iters={last}"]
    tokens = (last + 1) * 512  # a step reads 512
    args = [re.sub(r"(--max_tokens=).*", rf"\g<1>{tokens}", arg) for arg in args]
    if "eval_gpt2" in command:
        args = [*without(args, *OF_A_CHECKPOINT), "--init_from=my-folder"]
    if "--dry_run_ranks=" in command:  # as many heads as --tp=8 divides
        args += ["--vocab_size=72", "--n_head=8", "--n_embd=64", "--n_hidden=64"]
    run = zygote.start(args, folder, processes_of(command)).wait()
    if "--dry_run_ranks=" in command:
        assert "collectives of a step" in run.text()
    elif "eval_gpt2" not in command:
        assert f"iter {last}:" in run.text()
        assert all(math.isfinite(loss) for loss in column(folder / out, "loss").values())


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of("sample.py"))
def test_a_command_of_the_docs_samples(zygote, folder, command):
    args = [re.sub(r"(--init_from=)gpt2.*", r"\1my-folder", arg) for arg in arguments(command, "sample.py")]
    args = [re.sub(r"--start=.*", "--start=A", arg) for arg in args]  # a text of the tiny data set
    if not any(arg.startswith(("--init_from=", "--out_dir=")) for arg in args):
        args += ["--out_dir=out"]
    out = next((arg.partition("=")[2] for arg in args if arg.startswith("--out_dir=")), "out")
    if not (folder / out).exists():
        shutil.copytree(folder / "out", folder / out)
    args += ["--max_new_tokens=5", "--device=cpu"]
    run = zygote.start(args, folder, processes_of(command), script="sample.py").wait()
    assert "A" in run.samples()


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of("export.py"))
def test_a_command_of_the_docs_exports(zygote, folder, command):
    args = [arg.replace("OUT_DIR", "out") for arg in arguments(command, "export.py")]
    assert zygote.start(args, folder, script="export.py").wait().text()


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of("compare.py"))
def test_a_command_of_the_docs_compares(at, prepared, capsys, command):
    args = arguments(command, "compare.py")
    for name in without(args, "--"):
        shutil.copytree(prepared / "out", at.path / name.replace("*", "a"))
    script(at, "compare.py", args)
    assert re.search("val.loss", capsys.readouterr().out) and (at.path / "compare.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of("sweep.py"))
def test_a_command_of_the_docs_sweeps(zygote, folder, command):
    config, *args = arguments(command, "sweep.py")
    args = [arg for arg in args if "," in arg or not arg.startswith(OURS)]  # lists are kept
    run = zygote.start([config, *SHORT, *args], folder, script="tests/forked_sweep.py").wait()
    assert re.search(r"runs left: 0, |in parallel: 1, time left: n/a", run.text())


PLANS = [command for command in commands_of("bench.py") if re.search("--hardware|--estimate", command)]


@pytest.mark.slow
@pytest.mark.parametrize("command", PLANS)
def test_a_command_of_the_docs_plans(at, capsys, command):
    assert re.search("--plan|--estimate_world_size", command), (
        "this command would measure a step of its model"
    )
    tiny_data(at.path)
    try:
        script(at, "bench.py", [*arguments(command, "bench.py"), "--dataset=tiny", "--vocab_size=50304"])
    except SystemExit as end:
        assert not end.code  # after an estimate, nothing is left to do
    assert re.search(r"GB|ms/step", capsys.readouterr().out)
