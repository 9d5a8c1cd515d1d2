"""Messages that no other test raises."""

import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import REPO, records, script_that_fails, start_changed, tiny_data

import export
from isogpt.checkpoint.progress import Progress
from isogpt.launch.process_group import Ranks
from isogpt.launch.start_checks import check_start
from isogpt.monitor.log import Logger
from isogpt.monitor.sink_files import MetricsFile
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------------------
# helpers

SHAPE = dict(n_layer=1, n_head=2, n_embd=8, block_size=16, bias=False, vocab_size=65)
CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------------------
# checkpoints


def test_a_faulty_network(at, capsys):
    at.set(dist, "all_reduce", lambda t: t.fill_(1.0))
    with pytest.raises(SystemExit):
        check_start(Ranks(0, 2, CPU, "gloo"), {})
    assert "an all-reduce over 2 ranks returned 1.0: the network is faulty" in capsys.readouterr().err


def test_a_full_disk_is_reported_once_by_the_log_and_tears_no_line(capsys, tmp_path):
    """The limit on the size of files cuts a write off, as a full disk does."""
    logger = Logger(Progress(1), [MetricsFile(str(tmp_path))])
    logger.write({"iter": 1})
    path = tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        for _ in range(2):
            logger.write({"iter": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    logger.write({"iter": 3})
    assert [record["iter"] for record in records(tmp_path)] == [1, 3]
    said = "warning: MetricsFile failed ([Errno 27] File too large); training continues"
    assert capsys.readouterr().err.count(said) == 1


# ------------------------------------------------------------------------------------------------------------
# sample.py


def test_weights_that_are_not_finite_generate_nothing(at, capsys, trained):
    state = torch.load(trained(["--max_iters=1"]) / "ckpt.pt")
    state["model"]["transformer.wpe.weight"][0] = torch.nan
    Path("out").mkdir()
    torch.save(state, "out/ckpt.pt")
    said = script_that_fails(at, capsys, "sample.py", ["--device=cpu", "--start=A"]).err
    assert "weights in out/ckpt.pt are not finite (transformer.wpe.weight): use an earlier" in said


def test_an_export_keeps_what_a_user_has_put_into_the_folder(at, capsys):
    """For example the .gguf file that llama.cpp's converter writes next to the model."""
    at.set(export.tokenizer, "save_tokenizer", lambda folder, *_: folder.mkdir())
    at.set(export.huggingface, "save", lambda folder, *_: (folder / "config.json").write_text("new"))
    for kept in ("", "hf_1", "hf_2"):
        assert export.write_hf(str(at.path), GPT(GPTConfig(**SHAPE), 0), None, "") == at.path / "hf"
        assert sorted(path.name for path in (at.path / "hf").iterdir()) == ["README.md", "config.json"]
        said = capsys.readouterr().err
        assert (f"is now {at.path / kept}\n" in said) if kept else not said
        (at.path / "hf/model.gguf").write_text("old")
    assert (at.path / "hf_1/model.gguf").exists() and (at.path / "hf_2/model.gguf").exists()


# ------------------------------------------------------------------------------------------------------------
# runs


def lines_of(run):
    return [" ".join(line.split()) for line in run.text().splitlines()]


# train.py on a machine whose matmul peak cannot be measured, with a slow rank
LACKING = """
from isogpt.monitor import slow_ranks
from isogpt.speed import devices
def unmeasured(*args):
    raise RuntimeError("no matmul")
devices.measured_matmul = unmeasured
slow_ranks.slow_ranks = lambda columns, counts: ["rank 0: forward ms 40.0, others 10.0"]
"""


def test_messages_of_a_run(zygote, work):
    """
    A run, and another one in the same folder, with everything missing that may be missing.
    """
    args = ["--n_layer=1", "--max_iters=0", "--eval_iters=1", "--out_dir=out"]
    lines = lines_of(zygote.train([*args, "--eval_interval=1"], work))
    for start in ("data:", "model:", "ranks:", "step:", "step 0: train loss ", "iter 0: loss ", "done:"):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    assert {"saved out/step_00000001", "the loss curve: out/loss.png"} < {*lines}

    more = ["--compile=False", "--profile=True", "--save_checkpoint=False"]
    lines = lines_of(start_changed(zygote, LACKING, [*args, *more], work).wait())
    for whole in (
        "out contained an earlier run, which was moved to out/previous_1",
        "peak: unknown, no mfu",
        "warning: --profile traces the steps after the fifth, so it needs 10 steps, not 1",
        "warning: a slow rank: rank 0: forward ms 40.0, others 10.0",
    ):
        assert lines.count(whole) == 1, (whole, lines)
    assert sum(line.endswith("float32; compile: off") for line in lines) == 1, lines


# ------------------------------------------------------------------------------------------------------------
# the console


ASCII = "for stream in (sys.stdout, sys.stderr): stream.reconfigure(encoding='ascii')"


def test_what_a_console_cannot_show_ends_no_run(zygote, at):
    """
    On a console that knows ASCII only: names and text that are not ASCII, and a lone surrogate, which is not
    even UTF-8.
    """
    meta = {"vocab_size": 2, "stoi": {"\u00e9": 0, "\ud800": 1}, "itos": ["\u00e9", "\ud800"]}
    (tiny_data(at.path, vocab=2) / "meta.pkl").write_bytes(pickle.dumps(meta))
    out = "--out_dir=r\u00e9sum\u00e9"
    args = ["--max_iters=0", "--eval_iters=1", out]
    train = start_changed(zygote, ASCII, args, at.path).wait()
    assert r"saved r\xe9sum\xe9/step_00000001" in train.text().splitlines()
    args = [out, "--start=\u00e9", "--num_samples=3", "--max_new_tokens=20", "--device=cpu"]
    _, *lines = start_changed(zygote, ASCII, args, at.path, script="sample.py").wait().samples().splitlines()
    assert len(lines) == 6 and lines[1::2] == ["---------------"] * 3
    assert all(re.fullmatch(r"\\xe9(\\xe9|\\ud800){20}", line) for line in lines[::2])
    assert r"\ud800" in "".join(lines)


def test_a_closed_pipe_ends_a_script_quietly(trained):
    """
    As after `| head`: no traceback, and nothing about an exception that is ignored at the exit, at which a
    process of its own is needed.
    """
    out, (read, write) = str(trained(["--max_iters=1"])), os.pipe()
    os.close(read)
    generate = [f"--out_dir={out}", "--start=A", "--num_samples=2", "--max_new_tokens=5", "--device=cpu"]
    for script, *args in (["train.py", "--help"], ["sample.py", *generate], ["export.py", out]):
        run = [sys.executable, str(REPO / script), *args]
        env = os.environ | {"PYTHONUNBUFFERED": ""}
        run = subprocess.run(run, env=env, stdout=write, stderr=subprocess.PIPE, text=True)
        assert run.returncode == 0 and "Error" not in run.stderr
        assert script == "sample.py" or not run.stderr
    os.close(write)


# ------------------------------------------------------------------------------------------------------------
# Slurm

NODE = """#!/bin/sh
case $0 in
    */srun) mkdir -p out && echo "{\\"iter\\": 7, \\"steps\\": $STEPS}" > out/PREEMPTED ;;
    */squeue) date -d "+60 seconds" +%Y-%m-%dT%H:%M:%S ;;
    */scontrol) echo "$@" >> asked ;;
esac
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="slurm.sh needs bash")
def test_messages_of_slurm_sh(at):
    """With a fake srun that stops on request, without Slurm."""
    for name in ("srun", "scontrol", "squeue"):
        (at.path / name).write_text(NODE)
        (at.path / name).chmod(0o755)
    slurm = dict(SLURM_SUBMIT_DIR=".", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n1", SLURM_JOB_NUM_NODES="1")
    env = {**os.environ, **slurm, "HEAD": "n1", "PATH": f"{at.path}:{os.environ['PATH']}"}
    command = ["bash", str(REPO / "cluster" / "slurm.sh")]
    run = subprocess.run([*command, "config/train_gpt2.py"], env=env, capture_output=True, text=True)
    assert run.returncode == 2 and "slurm.sh: set the run's folder with --out_dir=FOLDER" in run.stderr
    # a job that is stopped before its first step again and again would be requeued for ever
    for steps, is_requeued in ((1, True), (9, True), (0, True), (1, False)):
        Path("asked").write_text("")
        more = {"SAVING": "5", "STEPS": str(steps)}
        run = subprocess.run([*command, "--out_dir=out"], env=env | more, capture_output=True, text=True)
        assert run.returncode == (0 if is_requeued else 1), run.stderr
        assert run.stdout == "slurm.sh: stopped on request, requeueing the job\n" * is_requeued
        assert Path("asked").read_text() == "requeue 7\n" * is_requeued
    assert run.stderr.count("not requeued: submit it with a longer --time, and") == 1
