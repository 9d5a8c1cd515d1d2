"""
The commands of README.md and docs/ run, shrunk: a tiny model, two steps, no network and few processes. One
launch runs all commands of a script that need the same number of ranks (see in_turn.py).
"""

import json
import math
import re
import shutil
import sys

import pytest
from documented import arguments, commands, files
from runs import REPO, column, free_port, script, tiny_data

sys.path.insert(0, str(REPO / "data"))
import find_documents

SHORT = """
--dataset=tiny --device=cpu --dtype=float32 --compile=False --n_layer=2 --n_head=8 --n_embd=64 --block_size=64
--eval_iters=1 --eval_interval=1000 --log_interval=1 --wandb_log=False --batch_size=2
--gradient_accumulation_steps=4 --max_iters=2 --lr_decay_iters=2
""".split()
# what a shrunk command of train.py does not keep
OURS = tuple(f"{word.partition('=')[0]}=" for word in SHORT)
REPLACED = (*OURS, "--n_kv_head=", "--nproc=", "--layout=", "--save_interval=", "--out_dir=")
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
    assert found, f"no page has a command of {name}"
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


def run_in_turn(zygote, folder, name, jobs, ranks=1):
    """Run a script with each (folder, arguments) in one launch; returns what each of them printed."""
    lines = [{"folder": str(work), "args": args, "port": free_port()} for work, args in jobs]
    (folder / "jobs").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = zygote.start([name, folder / "jobs"], folder, ranks, script="tests/in_turn.py").wait(600)
    _, *printed = re.split(r"^next job\n", (folder / run.outs[0]).read_text(), flags=re.M)
    assert len(printed) == len(jobs)
    return printed


def copies(prepared, folder, count):
    """So many copies of the prepared folder."""
    return [shutil.copytree(prepared, folder / str(number)) for number in range(count)]


def shrunk(args):
    """The arguments of train.py and the step at which they end."""
    args = [re.sub(r"(gpt2-?\w*|path/to/model)$", "my-folder", arg) for arg in args]
    args = ["--islands=2" if arg == "--islands=0" else arg for arg in args]  # not one on each machine
    short = without(SHORT, *OF_A_CHECKPOINT) if any("--init_from=" in arg for arg in args) else SHORT
    last = 4 if {"--init_from=resume", "--init_from=auto"} & {*args} else 2
    args = [*without(args, *REPLACED), *short, f"--max_iters={last}", f"--lr_decay_iters={last}"]
    tokens = (last + 1) * 512  # a step reads 512
    args = [re.sub(r"(--max_tokens=).*", rf"\g<1>{tokens}", arg) for arg in args]
    if "config/eval_gpt2.py" in args:
        args = [*without(args, *OF_A_CHECKPOINT), "--init_from=my-folder"]
    if any("--dry_run_ranks=" in arg for arg in args):  # as many heads as --tp=8 divides
        args += ["--vocab_size=72", "--n_head=8", "--n_embd=64", "--n_hidden=64"]
    return args, last


def out_dir_of(args, default):
    return next((arg.partition("=")[2] for arg in args if arg.startswith("--out_dir=")), default)


def launches_of(name):
    """(ranks, commands) of a launch each; a dry run has its own, since it ends with a process group."""
    launches = {}
    for command in commands_of(name):
        dry_run = command if "--dry_run_ranks=" in command else ""
        launches.setdefault((processes_of(command), dry_run), []).append(command)
    return [(ranks, commands) for (ranks, _), commands in sorted(launches.items())]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, chosen", launches_of("train.py"))
def test_the_commands_of_the_docs_train(zygote, prepared, tmp_path, ranks, chosen):
    jobs, expected = [], []
    for command, work in zip(chosen, copies(prepared, tmp_path, len(chosen)), strict=True):
        typed = arguments(command, "train.py")
        out = out_dir_of(typed, "out-stdlib-char" if "stdlib_char.py" in command else "out")
        args, last = shrunk(typed)
        if last == 4 and not (work / out).exists():
            shutil.copytree(work / "out-stdlib-char", work / out)
        jobs.append((work, [*args, f"--out_dir={out}"]))
        expected.append((work / out, last))
    printed = run_in_turn(zygote, tmp_path, "train.py", jobs, ranks)
    for command, text, (out, last) in zip(chosen, printed, expected, strict=True):
        if "--dry_run_ranks=" in command:
            assert "collectives of a step" in text, command
        elif "eval_gpt2" not in command:
            assert f"iter {last}:" in text, command
            assert all(math.isfinite(loss) for loss in column(out, "loss").values()), command


@pytest.mark.slow
@pytest.mark.parametrize("ranks, chosen", launches_of("sample.py"))
def test_the_commands_of_the_docs_sample(zygote, prepared, tmp_path, ranks, chosen):
    jobs = []
    for command, work in zip(chosen, copies(prepared, tmp_path, len(chosen)), strict=True):
        args = [
            re.sub(r"(--init_from=)gpt2.*", r"\1my-folder", arg) for arg in arguments(command, "sample.py")
        ]
        args = [re.sub(r"--start=.*", "--start=A", arg) for arg in args]  # a text of the tiny data set
        if not any(arg.startswith(("--init_from=", "--out_dir=")) for arg in args):
            args += ["--out_dir=out"]
        out = work / out_dir_of(args, "out")
        if not out.exists():
            shutil.copytree(work / "out", out)
        jobs.append((work, [*args, "--max_new_tokens=5", "--device=cpu"]))
    for command, text in zip(chosen, run_in_turn(zygote, tmp_path, "sample.py", jobs, ranks), strict=True):
        assert "A" in text and "tokens/s" in text, command


@pytest.mark.slow
def test_the_commands_of_the_docs_export(zygote, prepared, tmp_path):
    chosen = [arguments(command, "export.py") for command in commands_of("export.py")]
    args = [[arg.replace("OUT_DIR", "out") for arg in words] for words in chosen]
    jobs = [*zip(copies(prepared, tmp_path, len(args)), args, strict=True)]
    assert all(run_in_turn(zygote, tmp_path, "export.py", jobs))


@pytest.mark.slow
def test_the_commands_of_the_docs_compare(at, prepared, capsys):
    for command in commands_of("compare.py"):
        args = arguments(command, "compare.py")
        for name in without(args, "--"):
            shutil.copytree(prepared / "out", at.path / name.replace("*", "a"), dirs_exist_ok=True)
        (at.path / "compare.png").unlink(missing_ok=True)
        script(at, "compare.py", args)
        assert re.search("val.loss", capsys.readouterr().out), command
        assert (at.path / "compare.png").exists(), command


@pytest.mark.slow
def test_the_commands_of_the_docs_plan(at, capsys):
    """The other commands of bench.py would measure a step of their model; test_project.py parses them."""
    tiny_data(at.path)
    for command in commands_of("bench.py"):
        if re.search("--plan|--estimate_world_size", command):
            args = [*arguments(command, "bench.py"), "--dataset=tiny", "--vocab_size=50304"]
            try:
                script(at, "bench.py", args)
            except SystemExit as end:
                assert not end.code, command  # after an estimate, nothing is left to do
            assert re.search(r"GB|ms/step", capsys.readouterr().out), command
