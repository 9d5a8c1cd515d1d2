"""
Rules for the whole repository: imports, style, settings and the commands in the docs; the scripts' output.
"""

import ast
import functools
import graphlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from documented import arguments, commands, documents, files, script_of
from runs import REPO, TINY, accepted, assert_same_curve, column, free_port, wait_for

from configurator import settings_of, with_equals_signs
from isogpt.lab.combinations import points_of, read_lists, typed

SCRIPTS = {"train", "sample", "bench", "export", "compare", "sweep"}
BANNED = r"DESIGN\.md|CONTRACT\.md|\.\./shared|(?i:\blaws? \d|\bthe contract\b|\bthe issues? asks?\b)"


def tracked_files(pattern="*"):
    """The files of the repository outside tests/, also new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        path
        for name in listed
        if not name.startswith(("tests/", "measure/")) and (path := REPO / name).exists()
    ]


# ------------------------------------------------------------------------------------------------------------
# imports


@functools.cache
def imported(path):
    """
    The dotted names that a file imports; `from a import b` gives a and a.b, which may be a module or a name
    in a.
    """
    tree, names = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@functools.cache
def package_graph():
    """{module of isogpt/: the modules of isogpt/ that it imports}, also inside functions."""
    files = {}
    for path in (REPO / "isogpt").rglob("*.py"):
        parts = path.relative_to(REPO).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {module: {name for name in imported(path) if name in files} for module, path in files.items()}


def reached_from(modules):
    """The modules of isogpt/ that these ones import, also indirectly."""
    graph, reached, waiting = package_graph(), set(), list(modules)
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def room_of(module):
    return module.split(".")[1]


def rooms_in_the_docs():
    """The rooms of isogpt/, in the order of docs/design.md."""
    section = (REPO / "docs/design.md").read_text().split("## Rooms")[1].split("\n## ")[0]
    return re.findall(r"^- `(\w+)/`: ", section, re.M)


def test_scripts_are_imported_by_nobody_and_the_package_imports_no_top_level_file():
    top_level = {path.stem for path in REPO.glob("*.py")}
    assert {"model", "configurator"} | SCRIPTS <= top_level
    for path in tracked_files("*.py"):
        banned = top_level if path.is_relative_to(REPO / "isogpt") else SCRIPTS
        names = {name.split(".")[0] for name in imported(path)} & banned
        assert not names, f"{path.relative_to(REPO)} imports {names}"


def test_imports_go_downward_only():
    """
    Each room imports rooms above it in docs/design.md, and there are no circles, not even inside functions.
    """
    graph, rooms = package_graph(), rooms_in_the_docs()
    modules = [module for module in graph if module.count(".") == 2]
    assert rooms[0] == "common" and {room_of(module) for module in modules} == set(rooms)
    assert any(graph[module] for module in modules)
    for module in modules:
        higher = {
            other for other in graph[module] if rooms.index(room_of(other)) > rooms.index(room_of(module))
        }
        assert not higher, f"{module} imports {higher}"
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as e:
        pytest.fail(f"isogpt/ has an import circle: {' <- '.join(e.args[1])}")


def test_the_model_knows_no_processes():
    names = imported(REPO / "model.py") - {"isogpt.checkpoint", "isogpt.checkpoint.huggingface"}  # in methods
    assert not any(name.startswith("torch.distributed") for name in names)
    ours = {name for name in names if name in package_graph()}
    assert "isogpt.nn.kernels" in ours
    assert {room_of(name) for name in ours | reached_from(ours)} == {"nn", "common"}


WITHOUT = """
import runpy, sys

for name in {names}:
    sys.modules[name] = None  # importing it raises ImportError
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, *{args}]
runpy.run_path({script!r}, run_name="__main__")
"""
# what takes a second or more to import, and is imported where it is used; training's optimizers use the first
NOT_AT_A_START = "torch._dynamo torch._inductor sympy torch.distributed.tensor transformers wandb".split()


def test_samples_need_no_module_that_takes_a_second_to_import(zygote, work):
    """The processes from which tests fork runs have imported all of them."""
    zygote.train(["--max_iters=0", "--out_dir=out"], work)
    args = ["--out_dir=out", "--device=cpu", "--num_samples=1", "--max_new_tokens=5"]
    code = WITHOUT.format(names=NOT_AT_A_START, folder=str(REPO), script=str(REPO / "sample.py"), args=args)
    done = subprocess.run([sys.executable, "-c", code], cwd=work, capture_output=True, text=True)
    assert done.returncode == 0 and "5 tokens in " in done.stderr, done.stdout[-2000:] + done.stderr[-2000:]


def test_nothing_refers_to_what_is_not_in_the_repository():
    for path in tracked_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            assert not re.search(BANNED, line), f"{path.relative_to(REPO)}, line {number}: {line}"


# ------------------------------------------------------------------------------------------------------------
# settings


def test_settings_that_scripts_share_have_one_default():
    # two differ in nanoGPT too: sample.py resumes, and does not compile by default; its data set is that of
    # the run
    known = {("sample", "init_from"), ("sample", "compile"), ("sample", "dataset")}
    train = settings_of(REPO / "train.py")
    for script in ("sample", "bench"):
        for name, setting in settings_of(REPO / f"{script}.py").items():
            if name in train and (script, name) not in known:
                assert setting.default == train[name].default, f"{script}.{name}"


NANOGPT = """
out_dir eval_interval=2000 log_interval=1 eval_iters=200 eval_only always_save_checkpoint init_from wandb_log
wandb_project wandb_run_name dataset=openwebtext gradient_accumulation_steps=40 batch_size=12 block_size=1024
n_layer=12 n_head=12 n_embd=768 dropout=0.0 bias=False learning_rate=6e-4 max_iters=600000 weight_decay=0.1
beta1=0.9 beta2=0.95 grad_clip=1.0 decay_lr warmup_iters=2000 lr_decay_iters=600000 min_lr=6e-5 backend device
dtype compile
"""
NANOGPT_SAMPLE = """
init_from out_dir start num_samples max_new_tokens temperature top_k seed device dtype compile
"""
NANOGPT_BENCH = """
--batch_size=12 --block_size=1024 --bias=False --real_data=True --seed=1337 --device=cuda --dtype=bfloat16
--compile=True --profile=False
"""


def test_settings_and_defaults_of_nanogpt():
    names = [word.partition("=")[0] for word in NANOGPT.split()]
    assert len(names) == 33 and set(names) <= set(settings_of(REPO / "train.py"))
    defaults = [f"--{word}" for word in NANOGPT.split() if "=" in word]
    assert len(defaults) == 21 and accepted("train.py", *defaults) == accepted("train.py")
    assert set(NANOGPT_SAMPLE.split()) <= set(settings_of(REPO / "sample.py"))
    assert accepted("bench.py", *NANOGPT_BENCH.split(), extra=settings_of(REPO / "train.py"))["seed"] == 1337


# ------------------------------------------------------------------------------------------------------------
# docs


def test_the_scripts_accept_every_command_in_the_docs(at):
    """And the files that a command names exist."""
    for folder in ("out-stdlib-char", "my-folder", "path/to/model"):
        (at.path / folder).mkdir(parents=True)
    for name, content in files():
        (at.path / name).write_text(content)
    seen = 0
    for where, command in commands():
        words = shlex.split(command)
        for word in words:
            if word.endswith((".py", ".txt")) and not re.search(r"FILE|\*|^--|^llama\.cpp/", word):
                path = word.replace("data/mine/", "data/shakespeare_char/")  # the copy that a user makes
                assert (REPO / path).exists(), f"{where}: {command}"
        name = "train.py" if "cluster/slurm.sh" in words else script_of(words)
        if name in ("train.py", "sample.py", "bench.py", "sweep.py") and "--help" not in command:
            args = arguments(command, name)
            extra = settings_of(REPO / "train.py") if name in ("bench.py", "sweep.py") else None
            if extra:
                args = with_equals_signs(args, settings_of(REPO / name))
                lists, args = read_lists(args, extra)
                args += typed(points_of(lists)[0])
            try:
                accepted(name, *args, extra=extra)
            except (SystemExit, ValueError) as e:
                pytest.fail(f"{where}: {command}: {e}")
            seen += 1
    assert seen >= 50


def test_the_readme_is_short_and_lists_every_page():
    text = (REPO / "README.md").read_text()
    assert len(text.split()) <= 900
    listed = set(re.findall(r"\]\((\S+?\.md)\)", text.split("\n## Documentation\n")[1]))
    lessons = {str(path.relative_to(REPO)) for path in (REPO / "lessons").glob("[0-9]-*.md")}
    assert listed == {str(path.relative_to(REPO)) for path in documents()} - lessons - {"README.md"}
    course = (REPO / "lessons" / "README.md").read_text()
    assert {f"lessons/{name}" for name in re.findall(r"\]\((\d-\S+?\.md)\)", course)} == lessons


def test_the_edit_in_the_readme_applies():
    diff = re.search(r"^```diff\n(.*?)^```", (REPO / "README.md").read_text(), re.S | re.M)[1].splitlines()
    *added, after = [line[1:] for line in diff[3:]]
    code = (REPO / "model.py").read_text()
    assert len(added) == 2 and code.count(f"{after}\n") == 1
    compile(code.replace(after, "\n".join([*added, after])), "model.py", "exec")


def test_ci_runs_the_quick_start_of_the_readme():
    listed = subprocess.run([REPO / ".ci/run", "--print"], capture_output=True, text=True, check=True).stdout
    block = re.search(r"^## Quick start\n.*?^```sh\n(.*?)^```", (REPO / "README.md").read_text(), re.S | re.M)
    *quick_start, tests = listed.splitlines()
    assert [line.partition(" --max_iters=")[0] for line in quick_start] == block[1].splitlines()
    assert [shlex.split(line)[1] for line in quick_start[1:]] == [
        "data/stdlib_char/prepare.py",
        "train.py",
        "sample.py",
    ]
    assert "--max_iters=20" in quick_start[2] and tests.endswith("&& pytest")


def test_ci_names_tests_that_exist():
    """Those of torch 2.11 run only after a change of the core."""
    named = re.findall(r"(tests/\w+\.py)::(\w+)", (REPO / ".ci/run").read_text())
    assert named
    for file, name in named:
        assert f"def {name}(" in (REPO / file).read_text(), name


HANGING = """
from pathlib import Path

import pytest
from runs import wait_for


@pytest.mark.timeout(0.5)
def test_that_hangs():
    wait_for(lambda: False)


def test_that_runs():
    wait_for(Path("stopped").exists)


def test_that_waits():
    pass
"""


def test_a_test_that_hangs_fails_and_sigterm_shows_what_has_not_run(tmp_path):
    """As .ci/run sends it at a time limit."""
    (tmp_path / "conftest.py").symlink_to(REPO / "tests/conftest.py")
    (tmp_path / "test_it.py").write_text(HANGING)
    options = ["-vv", "-n1", "-c", REPO / "pyproject.toml", "--rootdir=.", "--results=results"]
    command, log = [sys.executable, "-m", "pytest", *options, "test_it.py"], tmp_path / "log"
    process = subprocess.Popen(command, cwd=tmp_path, stdout=log.open("w"))
    wait_for(lambda: "test_that_runs" in log.read_text())
    process.terminate()
    (tmp_path / "stopped").touch()
    process.wait(60)
    assert "Failed: Timeout (>0.5s) from pytest-timeout" in log.read_text()
    left = "still running: test_it.py::test_that_runs\nnot run: test_it.py::test_that_waits\n"
    assert left in log.read_text()
    first, *_ = map(json.loads, (tmp_path / "results").read_text().splitlines())
    assert first["test"] == "test_it.py::test_that_hangs" and first["outcome"] == "failed"


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_tests_that_the_docs_name_exist():
    tests = "".join(path.read_text() for path in (REPO / "tests").glob("test_*.py"))
    for path in documents():
        for name in re.findall(r"`(test_\w+)`", path.read_text()):
            assert f"def {name}(" in tests or (REPO / "tests" / f"{name}.py").exists(), f"{path.name}: {name}"
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
            if "://" not in target:
                page = path.parent / target if target else path
                assert page.exists(), f"{path.name}: {target}"
                assert not anchor or anchor in anchors(page), f"{path.name}: {target}#{anchor}"


# ------------------------------------------------------------------------------------------------------------
# the scripts


@pytest.mark.slow
def test_torchrun_on_one_node_and_on_two_gives_one_curve(zygote, work):
    """nanoGPT's two torchrun commands: --standalone, and two launches with a master's address."""
    script = [str(REPO / "train.py"), *TINY, "--max_iters=9"]
    master = ["--nproc_per_node=1", "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    launches = [[*master, f"--node_rank={rank}", *script, "--out_dir=two"] for rank in range(2)]
    launches += [["--standalone", "--nproc_per_node=2", *script, "--out_dir=standalone"]]
    run = [sys.executable, "-m", "torch.distributed.run"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = [subprocess.Popen([*run, *arguments], cwd=work, **pipes) for arguments in launches]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], outputs
    assert "iter 9:" in outputs[0] and "iter" not in outputs[1], "only rank 0 prints"
    zygote.train([*script[1:], "--out_dir=one"], work)
    for other in ("two", "standalone"):
        assert_same_curve(work / other, work / "one")


def test_sample_from_a_run(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=4", "--eval_interval=2", "--warmup_iters=0"], work)
    ruin = ["--init_from=resume", "--learning_rate=0.5", "--min_lr=0.5", "--warmup_iters=0"]
    zygote.train(["--out_dir=out", "--max_iters=6", "--eval_interval=2", *ruin], work)
    (work / "prompt.txt").write_text("AB:")
    args = "--out_dir=out --start=FILE:prompt.txt --num_samples=3 --max_new_tokens=40 --device=cpu".split()
    one = zygote.start(args, work, script="sample.py").wait().samples()
    assert one.count("AB:") >= 3 and one.count("---------------\n") == 3
    newest = zygote.start([*args, "--best=False"], work, script="sample.py").wait().text()
    assert "step_00000007" in newest and "step_00000005" in one, (
        "the final state of the first run is the best"
    )


COMPUTED = """
import time
batch_size = 4 * 2
max_iters = min(max_iters, 3)
wandb_run_name = 'x' + str(time.time())
dataset = 'tiny'
n_layer, n_head, n_embd, block_size = 1, 2, 16, 16
eval_iters = 1
device = 'cpu'
"""


def test_works_from_any_folder_and_on_nanogpt_configs(zygote, work):
    """A config next to train.py, and a config that computes, imports and reads what it overrides."""
    (work / "mine.py").write_text(COMPUTED)
    args = ["config/train_stdlib_char.py", "mine.py", "--out_dir=out", "--log_interval=1"]
    text = zygote.start(args, work).wait().text()
    assert "8 sequences x 16" in text and "iter 3:" in text and "iter 4:" not in text
    assert (work / "out" / "ckpt.pt").exists()


def test_console_lines_that_tools_parse(zygote, work):
    text = zygote.train(["--out_dir=out", "--max_iters=4", "--eval_interval=2"], work, nproc=2).text()
    iters = re.findall(
        r"^iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d{2})ms, mfu (-?\d+\.\d{2})%", text, re.M
    )
    assert [int(i[0]) for i in iters] == [0, 1, 2, 3, 4]
    steps = re.findall(r"^step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})$", text, re.M)
    assert [int(s[0]) for s in steps] == [0, 2, 4, 5], "at each interval, and the final state"
    assert text.count("parameters") == 1, "one banner, not one per rank"


def test_wandb_offline_and_resumed_under_the_same_id(zygote, work):
    pytest.importorskip("wandb")
    import torch

    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(work)}
    command = "cat >> told.jsonl; : TOKEN"  # what people write here often contains one
    args = ["--wandb_log=True", "--out_dir=out", "--eval_interval=2", f"--alert_command={command}"]
    zygote.train([*args, "--max_iters=2"], work, env=env)
    first = torch.load(work / "out/ckpt.pt", weights_only=True)["isogpt"]["wandb_id"]
    zygote.train([*args, "--max_iters=4", "--init_from=resume"], work, env=env)
    assert torch.load(work / "out/ckpt.pt", weights_only=True)["isogpt"]["wandb_id"] == first
    assert len(list(Path(work).glob(f"wandb/offline-run-*-{first}"))) >= 1
    assert (work / "told.jsonl").exists()
    written = [path for path in Path(work).rglob("*") if path.is_file()]
    assert not [path for path in written if b"TOKEN" in path.read_bytes()], "it is passed on to nobody"


def test_shuffle_has_the_same_curve_on_two_processes(zygote, work):
    args = ["--data_order=shuffle", "--out_dir=out", "--max_iters=5"]
    zygote.train(args, work)
    zygote.train([*args, "--out_dir=out2"], work, 2)
    assert_same_curve(work / "out2", work / "out")
    zygote.train(["--out_dir=random", "--max_iters=5"], work)
    assert column(work / "out", "loss") != column(work / "random", "loss")
