"""What holds over the whole repository: imports, shared defaults, launchers, README."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import REPO, TINY, column, free_port

from configurator import settings_of

README = (REPO / "README.md").read_text()
# DESIGN.md: imports go downward only, and nobody imports a script
MAY_IMPORT = {
    **dict.fromkeys(["configurator", "launch", "model", "loader", "metrics", "resilience"], set()),
    "parallel": {"launch"},
    "memory": {"model", "parallel"},
    "shards": set(),
    "checkpoint": {"launch", "model", "parallel", "shards"},
    **dict.fromkeys(
        ["train", "sample", "bench"],
        {"configurator", "launch", "model", "loader", "metrics", "resilience", "parallel", "memory", "checkpoint"},
    ),
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_imports_go_downward_only():
    modules = {p.stem for p in REPO.glob("*.py")}
    assert modules <= set(MAY_IMPORT)
    for name in modules:
        ours = {i.split(".")[0] for i in imports(REPO / f"{name}.py")} & set(MAY_IMPORT)
        assert ours <= MAY_IMPORT[name], f"{name} imports {ours - MAY_IMPORT[name]}"
    assert not any(i.startswith("torch.distributed") for i in imports(REPO / "model.py"))


def test_heavy_packages_are_imported_where_they_are_used():
    for path in REPO.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [n.name for n in node.names] if isinstance(node, ast.Import) else [node.module]
                heavy = {n.split(".")[0] for n in names} & {
                    "wandb",
                    "datasets",
                    "transformers",
                    "matplotlib",
                    "tiktoken",
                }
                assert not heavy, f"{path.name} imports {heavy} at its top"


def test_a_setting_that_scripts_share_has_one_default():
    # nanoGPT's interface makes two differ: sample.py resumes, and does not compile unless asked to
    known = {("sample", "init_from"), ("sample", "compile")}
    train = settings_of(REPO / "train.py")
    for script in ("sample", "bench"):
        for name, setting in settings_of(REPO / f"{script}.py").items():
            if name in train and (script, name) not in known:
                assert setting.default == train[name].default, f"{script}.{name}"


def test_the_contract_settings_are_there():
    wanted = [
        "out_dir",
        "eval_interval",
        "log_interval",
        "eval_iters",
        "eval_only",
        "always_save_checkpoint",
        "init_from",
        "wandb_log",
        "wandb_project",
        "wandb_run_name",
        "dataset",
        "gradient_accumulation_steps",
        "batch_size",
        "block_size",
        "n_layer",
        "n_head",
        "n_embd",
        "dropout",
        "bias",
        "learning_rate",
        "max_iters",
        "weight_decay",
        "beta1",
        "beta2",
        "grad_clip",
        "decay_lr",
        "warmup_iters",
        "lr_decay_iters",
        "min_lr",
        "backend",
        "device",
        "dtype",
        "compile",
    ]
    train = settings_of(REPO / "train.py")
    assert len(wanted) == 33 and set(wanted) <= set(train)
    for name, value in dict(
        eval_interval=2000, log_interval=1, eval_iters=200, dataset="openwebtext", gradient_accumulation_steps=40,
        batch_size=12, block_size=1024, n_layer=12, n_head=12, n_embd=768, dropout=0.0, bias=False, learning_rate=6e-4,
        max_iters=600000, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0, warmup_iters=2000,
        lr_decay_iters=600000, min_lr=6e-5,
    ).items():  # fmt: skip
        assert train[name].default == value, name
    sample = [
        "init_from",
        "out_dir",
        "start",
        "num_samples",
        "max_new_tokens",
        "temperature",
        "top_k",
        "seed",
        "device",
        "dtype",
        "compile",
    ]
    assert set(sample) <= set(settings_of(REPO / "sample.py"))
    bench = ["batch_size", "block_size", "bias", "real_data", "seed", "device", "dtype", "compile", "profile"]
    assert set(bench) <= set(settings_of(REPO / "bench.py"))


def commands():
    """Every command of the README's code blocks, one a line."""
    for block in re.findall(r"```sh\n(.*?)```", README, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                if command.split("#")[0].strip():
                    yield command.split("#")[0].strip()


def test_every_command_in_the_readme_has_real_files_and_settings():
    seen = 0
    for command in commands():
        words = shlex.split(command)
        script = next((w for w in words if w in ("train.py", "sample.py", "bench.py")), None)
        for word in words:
            if word.endswith((".py", ".txt")) and "FILE" not in word and not word.startswith("--"):
                assert (REPO / word).exists(), command
        if script:
            known = set(settings_of(REPO / script)) | (
                set(settings_of(REPO / "train.py")) if script == "bench.py" else set()
            )
            for word in words[words.index(script) + 1 :]:
                if word.startswith("--"):
                    assert word[2:].split("=")[0] in known | {"help"}, command
            seen += 1
    assert seen >= 10


def test_each_of_the_32_complaints_is_answered_in_the_readme():
    """Each line names a test that is there, or says what to do."""
    tests = "".join(p.read_text() for p in (REPO / "tests").glob("test_*.py"))
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", README, re.M)
    assert [int(n) for n, _, _ in rows] == list(range(1, 33))
    for number, _, answer in rows:
        for name in re.findall(r"`(test_\w+)`", answer):
            assert f"def {name}(" in tests or (REPO / "tests" / f"{name}.py").exists(), f"{number}: {name}"
        assert "`test_" in answer or len(answer) > 60, number


def test_torchrun_on_one_node_and_on_two_gives_one_curve(zygote, work):
    """The contract's two torchrun commands, for real: --standalone, and two launches with a master's address."""
    args = [*TINY, "--max_iters=9"]
    run = [sys.executable, "-m", "torch.distributed.run"]
    zygote.train([*args, "--out_dir=one"], work)
    port = free_port()
    nodes = [
        subprocess.Popen(
            [*run, "--nproc_per_node=1", "--nnodes=2", f"--node_rank={n}", "--master_addr=127.0.0.1",
             f"--master_port={port}", str(REPO / "train.py"), *args, "--out_dir=two"],
            cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) for n in range(2)
    ]  # fmt: skip
    outputs = [n.communicate(timeout=120)[0] for n in nodes]
    assert [n.returncode for n in nodes] == [0, 0], outputs
    assert "iter 9:" in outputs[0] and "iter" not in outputs[1], "rank 0 alone speaks"
    standalone = subprocess.run(
        [*run, "--standalone", "--nproc_per_node=2", str(REPO / "train.py"), *args, "--out_dir=standalone"],
        cwd=work, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert standalone.returncode == 0, standalone.stderr
    one = column(work / "one", "loss")
    for other in ("two", "standalone"):
        losses = column(work / other, "loss")
        assert losses.keys() == one.keys() and len(one) == 10
        assert all(losses[s] == pytest.approx(one[s], abs=1e-5) for s in one)


def test_bench_alone_and_under_torchrun(zygote, work):
    """bench.py runs train.py's own step and reads what it recorded, with random data too."""
    small = [
        "--n_layer=1",
        "--n_head=2",
        "--n_embd=16",
        "--block_size=16",
        "--batch_size=2",
        "--steps=6",
        "--device=cpu",
    ]
    for nproc, more in ((1, ["--real_data=False", "--profile=True"]), (2, ["--dataset=tiny"])):
        run = zygote.start([*small, *more], work, nproc, script="bench.py").wait()
        text = run.text()
        tokens = 2 * 16 * nproc
        assert f"6 steps of {tokens} tokens on {nproc} process" in text, text
        for figure in ("tokens/s", "ms per step", "data wait", "memory", "MFU"):
            assert len(re.findall(rf"^  {figure} +[\d.,]+", text, re.M)) == 1, text
    assert (work / "bench_trace.json").stat().st_size > 1000
    run = zygote.start(["--n_layre=1"], work, script="bench.py").wait(ok=False)
    assert run.codes == [1] and "n_layer" in run.text()


def test_sample_from_a_run(zygote, work):
    zygote.train(["--out_dir=out", "--max_iters=20", "--eval_interval=10"], work)
    (work / "prompt.txt").write_text("AB:")
    args = ["--out_dir=out", "--start=FILE:prompt.txt", "--num_samples=3", "--max_new_tokens=40", "--device=cpu"]
    one, two = (zygote.start(args, work, script="sample.py").wait().text() for _ in range(2))
    assert one == two and one.count("AB:") >= 3 and one.count("---------------\n") == 3
    newest = zygote.start([*args, "--best=False"], work, script="sample.py").wait().text()
    assert "step_00000021" in newest and "step_00000020" in one


def test_works_from_any_folder_and_on_nanogpt_configs(zygote, work):
    """A config looked up beside train.py, one that computes, imports and reads what it overrides."""
    (work / "mine.py").write_text(
        "import time\nbatch_size = 4 * 2\nmax_iters = min(max_iters, 3)\nwandb_run_name = 'x' + str(time.time())\n"
        "dataset = 'tiny'\nn_layer, n_head, n_embd, block_size = 1, 2, 16, 16\neval_iters = 1\ndevice = 'cpu'\n"
    )
    args = ["config/train_stdlib_char.py", "mine.py", "--out_dir=out", "--log_interval=1"]
    text = zygote.start(args, work).wait().text()
    assert "8 sequences x 16" in text and "iter 3:" in text and "iter 4:" not in text
    assert (work / "out" / "ckpt.pt").exists()


def test_console_lines_that_tools_parse(zygote, work):
    text = zygote.train(["--out_dir=out", "--max_iters=4", "--eval_interval=2"], work, nproc=2).text()
    iters = re.findall(r"^iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d{2})ms, mfu (-?\d+\.\d{2})%", text, re.M)
    assert [int(i[0]) for i in iters] == [0, 1, 2, 3, 4]
    steps = re.findall(r"^step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})$", text, re.M)
    assert [int(s[0]) for s in steps] == [0, 2, 4]
    assert text.count("parameters") == 1, "one banner, not one a rank"


def test_wandb_offline_and_resumed_under_the_same_id(zygote, work):
    pytest.importorskip("wandb")
    import torch

    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(work)}
    args = ["--wandb_log=True", "--out_dir=out", "--eval_interval=2"]
    zygote.train([*args, "--max_iters=2"], work, env=env)
    first = torch.load(work / "out/ckpt.pt", weights_only=True)["isogpt"]["wandb_id"]
    zygote.train([*args, "--max_iters=4", "--init_from=resume"], work, env=env)
    assert torch.load(work / "out/ckpt.pt", weights_only=True)["isogpt"]["wandb_id"] == first
    assert len(list(Path(work).glob(f"wandb/offline-run-*-{first}"))) >= 1


def test_shuffle_reads_each_window_once_an_epoch(zygote, work):
    args = ["--data_order=shuffle", "--out_dir=out", "--max_iters=5"]
    zygote.train(args, work)
    zygote.train([*args, "--out_dir=out2"], work, 2)
    one, two = column(work / "out", "loss"), column(work / "out2", "loss")
    assert all(one[s] == pytest.approx(two[s], abs=1e-5) for s in one)
    zygote.train(["--out_dir=random", "--max_iters=5"], work)
    assert one != column(work / "random", "loss")


def test_what_the_mutations_take_out_is_there():
    from mutate import MUTATIONS

    for name, (file, old, _, tests) in MUTATIONS.items():
        assert (REPO / file).read_text().count(old) == 1, f"{name}: {old!r} in {file}"
        assert (REPO / tests.split("::")[0]).exists()
