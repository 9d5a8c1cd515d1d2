"""
Every report of bench.py, with models so small that a launch takes seconds. No test depends on its duration.
"""

import json
import re
import shlex
import subprocess
import sys

import pytest
from runs import REPO

from isogpt.speed.step_report import split_step

TINY = ["--dataset=tiny", "--device=cpu", "--dtype=float32", "--n_layer=1", "--n_head=2", "--n_embd=16"]
TINY += ["--block_size=16", "--batch_size=2", "--steps=3"]
PARTS = ["data wait", "forward", "backward", "exposed comm", "optimizer", "other"]


def bench(zygote, work, *args, ok=True):
    """(text, JSON) of a bench.py."""
    run = zygote.start([*args, "--json_path=bench.json"], work, script="bench.py").wait(180, ok)
    assert run.codes == [0 if ok else 1]
    assert not list(work.glob("*.tmp"))
    path = work / "bench.json"
    return run.text(), json.loads(path.read_text()) if path.exists() else None


def check_split(report, processes):
    run, parts = report["run"], report["split_ms"]
    assert run["processes"] == processes and list(parts) == PARTS
    for of in ("mean", "max"):
        assert all(p[of] >= 0 for p in parts.values() if p[of] is not None)
    # medians need not add up to the median step, but nothing is counted twice: the rest is in `other`
    known = sum(p["mean"] or 0 for name, p in parts.items() if name != "other")
    assert parts["other"]["mean"] == pytest.approx(max(0, run["step_ms"]["mean"] - known))
    assert run["tokens_per_s"] == pytest.approx(run["tokens_a_step"] / run["step_ms"]["mean"] * 1e3)
    assert report["limits"]["matmul_ratio"] > 0 and report["limits"]["copy_gb_per_s"] > 0


@pytest.mark.slow
def test_report_of_one_work_with_its_trace(zygote, work):
    """The split, the limits, the JSON and, however few the steps, the trace and its table of operators."""
    text, found = bench(zygote, work, *TINY, "--profile=True", "--steps=1")
    check_split(found["report"], 1)
    for name in ("tokens/s", "ms per step", "memory", "MFU", *(p for p in PARTS if p != "exposed comm")):
        assert len(re.findall(rf"^  {name} +[\d.,]+", text, re.M)) == 1, (name, text)
    assert re.search(r"^  exposed comm +n/a +n/a$", text, re.M), "one process does not communicate"
    assert re.search(r"^  copy peak .*GB/s .*optimizer reaches (n\/a|[\d.]+%)", text, re.M)
    events = json.loads((work / "bench_trace.json").read_text())["traceEvents"]
    assert sum(e.get("name", "").startswith("ProfilerStep#") for e in events) >= 5
    operators = found["report"]["operators"]
    assert operators in text and "Self CPU" in operators
    assert len(re.findall(r"^ *\S.* [\d.]+% .* [\d.]+% ", operators, re.M)) == 15
    assert re.search(r"^ *aten::mm ", operators, re.M)


@pytest.mark.slow
def test_two_processes_that_bench_launches_itself(zygote, work):
    """The exposed communication is the difference to a second launch with grad_sync 'never'."""
    text, found = bench(zygote, work, *TINY, "--nproc=2")
    check_split(found["report"], 2)
    assert found["report"]["split_ms"]["exposed comm"]["mean"] is not None and "without communication" in text
    assert f"3 steps of {2 * 2 * 16} tokens on 2 processes" in text
    sent, gradients = found["report"]["run"]["mb_sent"], 4 * found["report"]["run"]["parameters"] / 1e6
    if sys.platform == "linux":
        assert gradients < sent["mean"] <= sent["max"] < 1.2 * gradients
        assert f"{sent['mean']:18.3f} {sent['max']:13.3f}  per rank and step" in text


@pytest.mark.slow
def test_a_sweep_marks_launches_that_failed(zygote, work):
    """Their rows give the reason: no memory, no such value, no such setting."""
    huge = 2**20  # weights of 17 TB
    text, found = bench(zygote, work, *TINY, f"--sweep=n_embd:16,{huge},none", "--warmup_iters=0")
    good, memory, wrong = found["sweep"]
    assert good["tokens_per_s"] > 0 and good["point"] == {"n_embd": "16"}
    assert memory["problem"] == "out of memory" and "n_embd='none': not a whole number" in wrong["problem"]
    assert re.search(r"^  +16 +32 +[\d,]+ +[\d.]+ +[\d.]+ +n/a +[\d.]+% +1\.00x$", text, re.M), text
    assert (
        re.search(rf"^ +{huge}  failed: out of memory$", text, re.M)
        and "held fixed: the global batch" in text
    )
    text, found = bench(zygote, work, *TINY, "--sweep=batch_siz:2;nproc:0", ok=False)
    assert "nproc is '0'" in text and "no launch succeeded" in text and "problem" in found["sweep"][0]
    text, found = bench(zygote, work, *TINY, "--sweep=batch_siz:2;learning_rate:1", ok=False)
    assert "did you mean --batch_size?" in text
    text, _ = bench(zygote, work, *TINY, "--sweep=batch_size", ok=False)
    assert "type --sweep=" in text and "Traceback" not in text and "tokens/s" not in text


@pytest.mark.slow
def test_a_sweep_over_processes_keeps_the_global_batch(zygote, work):
    text, found = bench(zygote, work, *TINY, "--sweep=nproc:1,2")
    assert [p["processes"] for p in found["sweep"]] == [1, 2] and "strong scaling" in text
    assert {p["tokens_a_step"] for p in found["sweep"]} == {2 * 2 * 16}
    first, second = found["sweep"]
    speed_up = second["tokens_per_s"] / first["tokens_per_s"]
    assert f"{speed_up:.2f}x {speed_up / 2:11.0%}" in text


@pytest.mark.extra
def test_a_sweep_over_layouts(zygote, work):
    """
    The communication of tp is found in the trace, the bubble in the spans; a product that does not fit says
    so.
    """
    shape = ["--n_layer=2", "--vocab_size=65", "--gradient_accumulation_steps=4", "--nproc=2"]
    text, found = bench(zygote, work, *TINY, *shape, "--sweep=tp:1,2;pp:1,2")
    ddp, pipeline, tensor, both = found["sweep"]
    assert ddp["bubble"] is None and tensor["bubble"] is None and tensor["exposed_ms"] > 0
    assert pipeline["bubble"]["formula"] == pytest.approx(1 / 5) and 0 < pipeline["bubble"]["measured"] < 1
    assert "cannot be divided into pp 2 x tp 2 = 4: start 4 processes" in both["problem"]
    assert len(re.findall(r"^ +[12] +[12] .*%\)$", text, re.M)) == 1 and "bubble (formula)" in text


@pytest.mark.extra
def test_a_sweep_over_ep(zygote, work):
    """The all-to-alls are found in the trace, and so is their time in the report."""
    shape = ["--n_layer=2", "--vocab_size=65", "--gradient_accumulation_steps=4", "--nproc=2", "--n_expert=4"]
    text, found = bench(zygote, work, *TINY, *shape, "--sweep=ep:1,2,4")
    ddp, experts, wrong = found["sweep"]
    assert ddp["parameters"] == experts["parameters"] and experts["exposed_ms"] > 0
    assert "set --ep=2" in wrong["problem"]
    assert len(re.findall(r"^ +[12] .* n/a$", text, re.M)) == 2, text
    text, found = bench(zygote, work, *TINY, *shape, "--ep=2")
    check_split(found["report"], 2)
    assert found["report"]["limits"]["copy_ratio"] is None and "for each token" in text


@pytest.mark.slow
def test_collectives_on_two_processes(zygote, work):
    text, found = bench(zygote, work, "--comm=True", "--nproc=2", "--device=cpu")
    operations = {c["operation"] for c in found["comm"]}
    assert operations == {"all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all"}
    sizes = sorted({c["bytes"] for c in found["comm"]})
    assert sizes[0] == 2**10 and sizes[-1] == 2**26 and len(found["comm"]) == 5 * len(sizes)
    for c in found["comm"]:
        if "problem" not in c:
            factor = 1.0 if c["operation"] in ("broadcast", "all-reduce") else 0.5  # of two processes
            assert c["gb_per_s"] == pytest.approx(factor * c["bytes"] / c["us"] / 1e3)
    assert len(re.findall(r"^ +[\d,]+ KB( +([\d.]+|n/a)){5}$", text, re.M)) == len(sizes), text
    assert re.search(r"^ +1 KB, in µs( +([\d.]+|n/a)){5}$", text, re.M), text


@pytest.mark.slow
def test_tuning_ends_in_a_command_that_runs(zygote, work):
    """It keeps the global batch, chooses settings that worked, and includes every setting that was typed."""
    text, found = bench(zygote, work, *TINY, "--tune=True", "--nproc=2", "--hardware=cpu", "--batch_size=4")
    tried, command = found["tune"]["tried"], found["tune"]["command"]
    assert text.rstrip().endswith(command) and {t["tokens_a_step"] for t in tried} == {8 * 16}
    points = [t["point"] for t in tried]
    assert len({p["zero"] for p in points}) > 1 and len({p["batch_size"] for p in points}) > 1
    assert "\nmeasured:\n" in text and "predicted:\n" in text and "--n_embd=16" in command
    best = max(tried, key=lambda t: t["tokens_per_s"])["point"]
    assert (f"--zero={best['zero']}" in command) == (
        best["zero"] > 0
    ) and f"--batch_size={best['batch_size']}" in command
    words = shlex.split(command)
    assert words[:4] == ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    assert not any("tune" in w or "steps=3" in w or "hardware" in w for w in words)
    more = ["--max_iters=2", "--eval_iters=1", "--save_checkpoint=False", "--out_dir=out"]
    run = zygote.start([*words[4:], *more], work, 2).wait()
    assert "iter 2:" in run.text() and "128 tokens" in run.text()


def test_a_plan_is_a_command_that_runs(zygote, work):
    """For a different number of devices and for other hardware; bench.py starts nothing."""
    text, found = bench(zygote, work, *TINY, "--plan=True", "--devices=2", "--hardware=cpu")
    plans, command = found["plan"]["plans"], found["plan"]["command"]
    assert text.rstrip().endswith(command) and "the global batch of 4 sequences on 2 x cpu" in text
    times = [plan["total_s"] for plan in plans]
    assert times == sorted(times) and len(plans) > 8
    words = shlex.split(command)
    assert words[:4] == ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    more = ["--max_iters=2", "--eval_iters=1", "--save_checkpoint=False", "--out_dir=out"]
    run = zygote.start([*words[4:], *more], work, 2).wait()
    assert "iter 2:" in run.text() and "64 tokens" in run.text()
    many = [
        "--plan=True",
        "--devices=64",
        "--hardware=h100",
        "--dtype=bfloat16",
        "--n_layer=8",
        "--block_size=1024",
        "--batch_size=1",
    ]
    text, found = bench(zygote, work, *TINY, *many)
    assert "torchrun --nnodes=8 --node_rank=RANK --nproc_per_node=8 --master_addr=HOST train.py" in text


def test_a_plan_compares_devices(zygote, work):
    """A line for each device, fastest first; the figures are those of each device's own plan."""
    large = ["--n_layer=32", "--n_embd=2048", "--n_head=16", "--dtype=bfloat16", "--plan=True", "--devices=1"]
    text, found = bench(zygote, work, *TINY, *large, "--hardware=l4,a100,h100 l4")
    rows = re.findall(r"^ +(1 x \S+) .* (yes|no) +(.*)$", text, re.M)
    assert [row[:2] for row in rows] == [("1 x h100", "yes"), ("1 x a100", "yes"), ("1 x l4", "no")], text
    assert rows[0][2].startswith("--") and rows[2][2] == "2 devices are the fewest on which a layout fits"
    assert text.rstrip().endswith("--devices=1 --hardware=h100")
    alone, single = bench(zygote, work, *TINY, *large, "--hardware=a100")
    assert found["plan"]["compared"][1]["found"] == single["plan"]["plans"][0]
    speed = re.search(r"^ +[\d.,]+ +([\d,]+) .*--batch_size", alone, re.M)[1]
    assert f" {speed} " in next(line for line in text.splitlines() if " a100 " in line)


def test_a_plan_compares_numbers_of_devices(zygote, work):
    """One global batch, or with --weak one that grows. The figures are those of the number's own plan."""
    large = [
        "--n_layer=8",
        "--n_embd=512",
        "--n_head=8",
        "--dtype=bfloat16",
        "--plan=True",
        "--hardware=a100",
    ]
    large += ["--block_size=512", "--gradient_accumulation_steps=2"]
    for weak, growth in (("False", [1, 1, 1]), ("True", [8, 2, 1])):
        args = [*TINY, *large, f"--weak={weak}"]
        text, found = bench(zygote, work, *args, "--devices=1 2, 8,2")
        compared = found["plan"]["compared"]
        tokens = {choice["devices"]: choice["tokens"] for choice in compared}
        assert [tokens[n] // tokens[1] for n in (8, 2, 1)] == growth, text
        speeds = [choice["tokens"] / choice["found"]["total_s"] for choice in compared]
        assert speeds == sorted(speeds, reverse=True) and len(speeds) == 3, text
        _, single = bench(zygote, work, *args, "--devices=2")
        assert single["plan"]["plans"][0] in [choice["found"] for choice in compared]
    args = [*TINY, *large[:-1], "--gradient_accumulation_steps=0", "--devices=1,2"]
    text, found = bench(zygote, work, *args)
    assert "a global batch that grows with the devices (--gradient_accumulation_steps=2: the same" in text
    text, found = bench(zygote, work, *args, "--gradient_accumulation_steps=2")
    assert "the global batch of 4 sequences, predicted" in text
    assert len({choice["tokens"] for choice in found["plan"]["compared"]}) == 1


def test_a_plan_for_pretrained_weights_says_how_long_the_run_takes(zygote, work):
    """OpenAI's models are planned by name, without data or weights; the command keeps the name."""
    finetune = ["config/finetune_shakespeare.py", "--plan=True", "--devices=1"]
    text, found = bench(zygote, work, *finetune, "--init_from=auto:gpt2-large", "--hardware=h100")
    words = shlex.split(found["plan"]["command"])
    assert "--init_from=auto:gpt2-large" in words and not any("n_layer" in word for word in words), text
    minutes = 21 * found["plan"]["plans"][0]["total_s"] / 60
    assert f"the fastest, predicted, 21 steps in {minutes:.1f} minutes without evaluations" in text
    shape = ["--n_layer=36", "--n_head=20", "--n_embd=1280", "--bias=True", "--vocab_size=50257"]
    _, by_shape = bench(zygote, work, *finetune, "--init_from=scratch", *shape, "--hardware=h100")
    assert by_shape["plan"]["plans"] == found["plan"]["plans"]

    text, _ = bench(zygote, work, "config/finetune_shakespeare.py", "--estimate_world_size=1")
    assert float(re.search(r"weights +([\d.]+)", text)[1]) == pytest.approx(1.5576 * 4, abs=0.01)  # gpt2-xl


def test_a_plan_that_does_not_fit_says_what_does(zygote, work):
    finetune = ["config/finetune_shakespeare.py", "--plan=True", "--devices=1", "--hardware=4090"]
    text, _ = bench(zygote, work, *finetune, ok=False)
    assert "start with 2, the fewest that do, or set --zero=3 --cpu_offload=True" in text
    text, found = bench(zygote, work, *finetune, "--zero=3", "--cpu_offload=True")
    assert not found["plan"]["plans"][0]["problem"], text
    for args, message in (
        (["--init_from=."], "init_from is '.': a plan and an estimate know the shapes of gpt2, "),
        (["--init_from=scratch", "--dataset=none"], "to predict without the data, set --vocab_size=50304"),
    ):
        text, _ = bench(zygote, work, *finetune, *args, ok=False)
        assert message in text
    bench(zygote, work, *finetune, "--init_from=scratch", "--dataset=none", "--vocab_size=50304")


@pytest.mark.slow
def test_sweep_under_torchrun(work):
    """Several launches share one torchrun's store; all ranks continue after a launch that failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(REPO / "bench.py"), *TINY, "--sweep=zero:0,5,3"]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^ +(\d)  (failed: zero is 5|.*1\.00x|.*[\d.]+x)", run.stdout, re.M)
    assert [r[0] for r in rows] == ["0", "5", "3"] and "failed" in rows[1][1], run.stdout


def test_mistakes_exit_with_one_line(zygote, work):
    for args, message in (
        (["--nproc=-1"], "must not be negative"),
        (["--steps=0"], "at least 1"),
        (["--tune=True", "--comm=True"], "set one of them"),
        (["--json_path=nowhere/x.json"], "no such folder"),
        (["--device=tpu"], "possible are auto"),
        (["--hardware=l4,3090"], "set --plan=True"),
        (["--hardware=4090"], "but bench.py measures this machine: to predict, set --plan=True"),
        (["--devices=8"], "to predict, set --plan=True; to measure N processes, set --nproc=N"),
        (["--help=zero"], "command line: --help=zero: type --help"),
        (["--plan=True", "--hardware=l4,9090"], "hardware is '9090'; possible are"),
        (["--plan=True", "--devices=1,x"], "or several such as --devices=1,2,8"),
        (["--plan=True", "--devices=-1"], "devices is '-1': type a number"),
        (["--devices=2,4"], "devices is '2,4': to predict, set --plan=True"),
        (["--plan=True", "--devices=1000000000000"], "set each number to at most 131072"),
        (["--plan=True", "--devices=1 2 x"], "type a number, or several such as --devices=1,2,8"),
        (["--plan=True", "--hardware=l4,3090", "--device_memory_gb=9"], "set --hardware= to this card"),
    ):
        run = zygote.start(args, work, script="bench.py").wait(ok=False)
        assert run.codes == [1] and len(run.text().splitlines()) == 1 and message in run.text(), run.text()


def test_a_launch_that_fails_prints_why(zygote, work):
    text, found = bench(zygote, work, *TINY, "--head=untied", ok=False)
    assert "arch 'gpt2' uses a tied head" in text and found is None


def test_exposed_communication_is_what_the_silent_launch_saves():
    def run(step, backward, clip, optimizer):
        spans = {
            "data": 1,
            "forward": 30,
            "backward": backward,
            "clip": clip,
            "optimizer": optimizer,
            "agree": 2,
        }
        return {
            "processes": 2,
            "settings": {"tp": 1, "pp": 1},
            "step_ms": {"mean": step, "max": step},
            "spans_ms": {k: {"mean": v, "max": v} for k, v in spans.items()},
        }

    wanted = {"data wait": 1, "forward": 30, "backward": 35, "exposed comm": 20, "optimizer": 15, "other": 4}
    # a slower optimizer in the second launch is not communication
    parts = split_step(run(105, 50, 5, 10), run(90, 35, 8, 12))
    assert parts == {name: {"mean": v, "max": v} for name, v in wanted.items()}
    assert split_step(run(105, 50, 5, 10), run(120, 60, 5, 10))["exposed comm"] == {"mean": 0, "max": 0}, (
        "noise"
    )
    assert split_step(run(105, 50, 5, 10), None)["exposed comm"] == {"mean": None, "max": None}


def test_help_shows_the_defaults_of_bench(zygote, work):
    text = zygote.start(["--help=all"], work, script="bench.py").wait().text()
    fixed = text[text.index("set by bench.py") :].split("\n\n")[0]
    for option in ("out_dir", "max_iters", "log_interval", "eval_interval", "save_checkpoint", "wandb_log"):
        assert f"  --{option}=" in fixed, option
    assert "--gradient_accumulation_steps=0 " in text
    for option, value in dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8).items():
        assert re.search(rf"^  --{option}=.*\(small model: {value}\)$", text, re.M), option


def test_a_comparison_with_nanogpt_needs_a_clone(tmp_path):
    """One line for each mistake, before any run starts."""
    clone = tmp_path / "clone"
    (clone / "data").mkdir(parents=True)
    (clone / "train.py").touch()
    for args, message in (
        ([f"--nanogpt={tmp_path}"], f"{tmp_path} is not a clone of nanoGPT: it lacks train.py or data/"),
        ([f"--nanogpt={clone}", "--pairs=0"], "--pairs is 0: set it to at least 1"),
    ):
        command = [sys.executable, str(REPO / "measure" / "against_nanogpt.py"), "speed", *args]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 2 and run.stderr.splitlines()[-1].endswith(f"error: {message}"), run.stderr
