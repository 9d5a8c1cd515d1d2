"""
Every report of bench.py, with models so small that a launch takes seconds. No test depends on its duration.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
from runs import FORKED, REPO, free_port, listening, script, script_that_fails, tiny_data

from isogpt.common.console import duration
from isogpt.speed.devices import KNOWN_CARDS
from isogpt.speed.launches import Launches

TINY = ["--dataset=tiny", "--device=cpu", "--dtype=float32", "--n_layer=1", "--n_head=2", "--n_embd=16"]
TINY += ["--block_size=16", "--batch_size=2", "--steps=3"]


def bench(zygote, work, *args, ok=True, addresses=None):
    """(text, JSON) of a bench.py. The addresses at which its processes listen are added to a set."""
    run = zygote.start([*TINY, *args, "--json_path=bench.json"], work, script="bench.py")
    while addresses is not None and not run.poll():
        addresses |= {address for address, port in listening(run.pids[0])}
    run.wait(300, ok)
    path = work / "bench.json"
    return run.text(), json.loads(path.read_text()) if path.exists() else None


# ------------------------------------------------------------------------------------------------------------
# launches


@pytest.mark.slow
def test_report_of_one_process_with_its_trace(zygote, work):
    """The split, the limits, the JSON and, however few the steps, the trace and its table of operators."""
    text, found = bench(zygote, work, "--profile=True", "--steps=1")
    report = found["report"]
    mean = report["mean"]
    # medians need not add up to the median step, but nothing is counted twice: the rest is in `other`
    parts = sum(mean[name] for name in ("data wait", "forward", "backward", "optimizer"))
    assert mean["other"] == pytest.approx(max(0, mean["ms per step"] - parts))
    assert report["tokens_per_s"] == pytest.approx(report["tokens_per_step"] / mean["ms per step"] * 1e3)
    assert report["matmul_ratio"] > 0 and report["matmul_flops"] > 1e8
    for name in ("tokens/s", "MFU", *mean.keys() - {"exposed comm"}):
        assert len(re.findall(rf"^{name} +[\d.,]+", text, re.M)) == 1, (name, text)
    assert re.search(r"^exposed comm +n/a +n/a$", text, re.M), "one process does not communicate"
    names = [e.get("name", "") for e in json.loads((work / "bench_trace.json").read_text())["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 5
    assert {"data", "forward", "backward", "optimizer"} <= {*names}
    assert report["operators"] in text and re.search(r"^ *aten::mm ", report["operators"], re.M)


@pytest.mark.slow
def test_report_of_a_pipeline(zygote, work):
    """Which also has a bubble."""
    text, found = bench(zygote, work, "--nproc=2", "--pp=2", "--n_layer=2", "--gradient_accumulation_steps=8")
    assert found["report"]["mean"]["bubble"] > 0 and re.search(r"^bubble +[\d.]+ +[\d.]+$", text, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("args", ["--nproc=1,2", "--nproc=1,2 --weak", "--batch_size=2,4"])
def test_the_global_batch_of_a_sweep(zygote, work, args):
    """It grows with weak scaling only, or if a list changes it."""
    text, found = bench(zygote, work, *args.split(), "--gradient_accumulation_steps=3")
    second = 6 if args == "--nproc=1,2" else 12
    assert [run["tokens_per_step"] // 16 for run in found["sweep"]] == [6, second]
    assert re.search(r"efficiency\n.* 1\.00x +100%\n.*[\d.]+x +\d+%$", text, re.M), text
    communicates = [(run["mean"]["exposed comm"] or 0) > 0 for run in found["sweep"]]
    assert communicates == [False, "nproc" in args]


@pytest.mark.slow
def test_a_sweep_names_launches_that_failed(zygote, work):
    """And why: no memory, no such value."""
    huge = 2**20  # weights of 17 TB
    text, found = bench(zygote, work, f"--n_embd=16,{huge},none", "--warmup_iters=0")
    good, memory, wrong = found["sweep"]
    assert good["tokens_per_s"] > 0 and good["point"] == {"n_embd": "16"}
    assert memory["problem"] == "out of memory" and f"--n_embd={huge}: out of memory\n" in text
    assert "n_embd='none': not a whole number" in wrong["problem"]
    assert re.search(r"^ *16 +32 +[\d,]+ +[\d.]+ +n/a +n/a +[\d.]+ .* 1\.00x +100%$", text, re.M), text
    assert "no launch succeeded" in bench(zygote, work, "--n_embd=none,x", ok=False)[0]


@pytest.mark.slow
def test_a_report_under_torchrun(zygote, work):
    """Each rank starts train.py, which meets the others at torchrun's store."""
    command = ["--standalone", "--nproc_per_node=2", REPO / "bench.py", *TINY]
    text = zygote.start(command, work, script=FORKED).wait(300).text()
    assert text.count("3 steps of 64 tokens on 2 processes") == 1


def run_command(zygote, work, command):
    """What two steps of a command for two processes print."""
    words = shlex.split(command)
    assert words[:4] == ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    more = ["--max_iters=2", "--eval_iters=1", "--save_checkpoint=False", "--out_dir=out"]
    text = zygote.start([*words[4:], *more], work, 2).wait().text()
    assert "iter 2:" in text
    return text


@pytest.mark.slow
def test_tuning_ends_in_a_command_that_runs(zygote, work):
    """It keeps the global batch, chooses settings that worked, and includes every setting that was typed."""
    text, found = bench(zygote, work, "--tune=True", "--nproc=2", "--hardware=cpu", "--batch_size=4")
    tried, command = found["tune"]["tried"], found["tune"]["command"]
    points = [t["point"] for t in tried]
    assert len({p["zero"] for p in points}) > 1 and len({p["batch_size"] for p in points}) > 1
    best = max(tried, key=lambda t: t["tokens_per_s"])
    assert text.endswith(f"\nthe fastest, {best['tokens_per_s']:,.0f} tokens/s:\n{command}\n")
    assert (f"--zero={best['point']['zero']}" in command) == (best["point"]["zero"] > 0)
    assert f"--batch_size={best['point']['batch_size']}" in command and "--n_embd=16" in command
    assert "128 tokens" in run_command(zygote, work, command)


def test_a_launch_that_fails_prints_why(zygote, work):
    text, found = bench(zygote, work, "--head=untied", ok=False)
    assert "error: train.py failed: " in text and "untied" in text and found is None


def launch(folder, script):
    """What a launch returns of a script in place of train.py."""
    (folder / "train.py").write_text(script)
    launches = Launches(folder / "train.py", folder, rank=0, is_launched=False)
    return launches.run({"profile": False, "nproc": 1}, steps=3)


@pytest.mark.parametrize(
    "script, problem",
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed (SIGKILL)"),
        ("raise SystemExit('[rank0]: Traceback:\\n[rank0]:  line\\n[rank0]: KeyError: 3')", "KeyError: 3"),
    ],
)
def test_the_reason_of_a_launch_that_failed(tmp_path, script, problem):
    assert launch(tmp_path, script)["problem"].split(",")[0] == problem


RECORDS = """
import json, sys
out = next(word.removeprefix("--out_dir=") for word in sys.argv if word.startswith("--out_dir="))
step = {"step_ms": 100, "step_ms_max": 100, "memory_gb": 1, "memory_gb_max": 1}
facts = {"config": {"seed": 1, "init_from": "scratch"}, "peak_flops": None}
facts |= {"tokens_per_step": 10, "flops_per_step": 1}
records = [{"event": "start"} | facts, *({"iter": i} | step for i in range(6))]
records.append({"event": "end", "spans_ms": {name: {"mean": t, "max": t} for name, t in ms.items()}})
with open(out + "/metrics.jsonl", "w") as file:
    file.writelines(json.dumps(record) + "\\n" for record in records)
"""
DDP = {"forward": 25, "backward": 50}
PIPELINE = {"pipeline": 75, "stages": 50}


@pytest.mark.parametrize(
    "ms, parts",
    [
        (DDP | {"waiting": 15}, {"forward": 25, "backward": 35, "exposed comm": 25, "other": 5}),
        (DDP, {"forward": 25, "backward": 50, "exposed comm": None, "other": 15}),
        (PIPELINE | {"waiting": 25}, {"stages": 50, "bubble": 25, "exposed comm": 10, "other": 5}),
    ],
)
def test_the_parts_of_a_step(tmp_path, ms, parts):
    """Communication is known where there is none inside of the passes, and is not in the bubble."""
    ms |= {"data": 2, "reduce": 4, "agree": 6, "norm": 3, "optimizer": 5}
    parts |= {"ms per step": 100, "memory, GB": 1, "data wait": 2, "optimizer": 8}
    assert launch(tmp_path, f"ms = {ms}\n{RECORDS}")["mean"] == parts


# ------------------------------------------------------------------------------------------------------------
# collectives


@pytest.mark.slow
def test_collectives_on_two_processes(zygote, work):
    addresses = set()
    text, found = bench(zygote, work, "--comm=True", "--nproc=2", addresses=addresses)
    assert addresses == {"127.0.0.1"}, "no other machine can connect"
    sizes = {c["bytes"] for c in found["comm"]}
    assert min(sizes) == 2**10 and max(sizes) == 2**26 and len(found["comm"]) == 5 * len(sizes)
    for c in found["comm"]:
        factor = 1.0 if c["operation"] in ("broadcast", "all-reduce") else 0.5  # of two processes
        assert c["gb_per_s"] == pytest.approx(factor * c["bytes"] / c["us"] / 1e3)
    assert len(re.findall(r"^ *[\d,]+ KB(?:, in µs)?(?: +[\d.]+){5}$", text, re.M)) == len(sizes) + 1, text


# ------------------------------------------------------------------------------------------------------------
# plans and estimates


@pytest.fixture
def plan(at, capsys):
    """A plan of bench.py in this process: (text, result)."""
    tiny_data(at.path)

    def planned(*args):
        result = script(at, "bench.py", [*TINY, "--plan=True", *args])["result"]["plan"]
        return capsys.readouterr().out, result

    return planned


def test_a_plan_is_a_command_that_runs(zygote, work):
    """For a different number of devices and for other hardware; bench.py starts nothing."""
    text, found = bench(zygote, work, "--plan=True", "--devices=2", "--hardware=cpu")
    plans, command = found["plan"]["plans"], found["plan"]["command"]
    assert text.rstrip().endswith(command) and re.search("^ +2 x cpu +4 ", text, re.M)
    times = [plan["total_s"] for plan in plans]
    assert times == sorted(times) and len(plans) > 8
    assert "64 tokens" in run_command(zygote, work, command)


def test_the_command_of_a_plan_repeats_what_a_config_sets(plan):
    """A layout that the command line has set back to the default, and several machines."""
    Path("sharded.py").write_text("zero = 3\ncp = 2\n")
    many = ["--devices=64", "--hardware=h100", "--dtype=bfloat16", "--n_layer=8", "--block_size=1024"]
    text, found = plan(*many, "sharded.py", "--zero=0")
    assert "torchrun --nnodes=8 --node_rank=RANK --nproc_per_node=8 --master_addr=HOST train.py" in text
    words = shlex.split(found["command"])
    assert "sharded.py" in words and "--cp=2" not in words
    assert sum(word.startswith("--zero=") for word in words) == 1
    layouts = [step["settings"] for step in found["plans"]]
    assert {(layout["zero"], layout["cp"]) for layout in layouts} == {(0, 2)}
    assert len({layout["tp"] for layout in layouts}) > 1, "what is not typed is chosen"


def test_a_plan_compares_devices(plan):
    """A line for each device, fastest first; the figures are those of each device's own plan."""
    large = ["--n_layer=32", "--n_embd=2048", "--n_head=16", "--dtype=bfloat16", "--devices=1"]
    text, found = plan(*large, "--hardware=l4,a100,h100,l4")
    rows = re.findall(r"^ +1 x (\S+) .*?  (--.*)$", text, re.M)
    assert [row[0] for row in rows] == ["h100", "a100", "l4"] and "(does not fit: " in rows[2][1], text
    _, single = plan(*large, "--hardware=a100")
    assert [step for step in found["plans"] if step["devices"] == "1 x a100"] == single["plans"]


@pytest.mark.parametrize("weak, batches", [("False", "4 4 4"), ("True", "32 8 4")])
def test_a_plan_compares_numbers_of_devices(plan, weak, batches):
    """One global batch, or with --weak one that grows."""
    large = ["--n_layer=8", "--n_embd=512", "--dtype=bfloat16", "--gradient_accumulation_steps=2"]
    text, _ = plan(*large, "--hardware=a100", "--devices=1,2,8,2", f"--weak={weak}")
    rows = re.findall(r"^ +(\d) x a100 +(\d+) ", text, re.M)
    assert [row[1] for row in sorted(rows, reverse=True)] == batches.split(), text


FINETUNE = [str(REPO / "config" / "finetune_shakespeare.py"), "--devices=1", "--dtype=auto"]
SAVES = "--save_checkpoint=True"


def test_a_plan_for_pretrained_weights(plan):
    """
    OpenAI's models are planned by name, without data or weights; the command keeps the name, but no secrets.
    """
    secrets = ["--mirror=s3://me:SECRET@bucket/run", "--alert_command=curl -H SECRET https://example.com"]
    text, found = plan(*FINETUNE, "--init_from=auto:gpt2-large", "--hardware=h100", *secrets, SAVES)
    assert "SECRET" not in text and "SECRET" not in found["command"]
    assert "--init_from=auto:gpt2-large" in shlex.split(found["command"]), text
    shape = ["--n_layer=36", "--n_head=20", "--n_embd=1280", "--bias=True", "--vocab_size=50257"]
    for budget, steps in ((), 21), (["--max_iters=59"], 60), (["--max_tokens=51200"], 100):
        # of the config, of the command line, or of tokens, 32 * 16 in each step
        text, by_shape = plan(*FINETUNE, "--init_from=scratch", *shape, "--hardware=h100", *budget)
        took = duration(steps * found["plans"][0]["total_s"])
        assert f"the fastest, predicted, {steps:,} steps in {took} without evaluations" in text
        assert by_shape["plans"] == found["plans"]
    assert "steps in" not in plan(*FINETUNE, "--init_from=gpt2", "--hardware=h100", "--max_tokens=2epochs")[0]


def test_an_estimate_for_pretrained_weights(zygote, work):
    """With --hardware, also of the process."""
    args = [*FINETUNE, "--estimate_world_size=1", "--device=cpu", "--hardware=h100"]
    text = zygote.start(args, work, script="bench.py").wait().text()
    names, numbers = (line.split()[:6] for line in text.splitlines()[1:3])
    assert names == ["weights", "gradients", "optimizer", "activations", "process", "total"]
    *parts, total = map(float, numbers)
    assert parts[0] == pytest.approx(1.5576 * 4, abs=0.01) and parts[4] == 2.5  # gpt2-xl
    assert total == pytest.approx(sum(parts), abs=0.003)


UNPREPARED = ["--init_from=scratch", "--dataset=none", "--vocab_size=50304"]


def test_a_card_of_ones_own_is_planned(plan):
    """Like the card that is named, of whose data sheet it reaches the same fractions."""

    def total_s(**sheet):
        flags = [f"--device_{name}={value}" for name, value in sheet.items()]
        args = [*FINETUNE, *UNPREPARED, *TINY[3:6], "--hardware=4090", *flags]
        return plan(*args)[1]["plans"][0]["total_s"]

    named = total_s()
    assert total_s(tflops=165, bandwidth=1000, memory_gb=24) == named
    for name in ("tflops", "bandwidth"):
        assert total_s(**{name: 1}) > named > total_s(**{name: 10**5})


def test_a_plan_says_what_it_assumes(plan):
    """Of cards with which no run was compared; also where their names are listed."""
    args = [*FINETUNE, *UNPREPARED, *TINY[3:6]]
    text, found = plan(*args, "--hardware=b200,h100")
    assert {step["devices"] for step in found["plans"]} == {"1 x b200 (assumed)", "1 x h100"}
    assert "\npredicted; (assumed): no run was compared with " in text
    assert "assumed" not in plan(*args, "--hardware=h100")[0]
    assert re.search(r"h100, .*, or with assumed speeds b200, ", KNOWN_CARDS)


# ------------------------------------------------------------------------------------------------------------
# settings


LACKS = ["--plan", *FINETUNE, "--hardware=4090"]


@pytest.mark.parametrize(
    "ranks, args, messages",
    [
        (0, ["--nproc=0,2", "--json_path=no/x"], ["nproc is '0,2': type numbers", "in a folder that exists"]),
        (0, ["--comm", "--weak", "--tp=1,2"], ["are separate reports: type one", "needs a list of nproc"]),
        (0, ["--devices=2,x"], ["devices is '2,x': type numbers", "are for predictions: set --plan; "]),
        (0, ["--plan", "--device_memory_gb=9"], ["change a listed card"]),
        (0, ["--check", "--nproc=3"], ["nproc is 3: to check layouts, set --nproc=2, 4 or 8"]),
        (0, ["--tune", "--hardware=l4,3090"], ["are for predictions: set --plan; "]),
        (0, ["--plan", "--hardware=l4,9090", "--devices=12"], ["a multiple of per_node, 8", "'9090'"]),
        (0, LACKS, ["no layout fits on 1 device"]),
        (0, [*LACKS, "--init_from=."], ["init_from is '.': a plan and an estimate"]),
        (0, [*LACKS, "--dtype=float32"], ["for 4090, set --dtype=bfloat16 or float16"]),
        (1, ["--comm"], ["comm needs two processes: set --nproc=2"]),
        (2, ["--nproc=3"], ["nproc is 3, but the launcher's WORLD_SIZE is 2: omit --nproc"]),
        (2, ["--zero=1,2"], ["starts processes: start bench.py without a launcher"]),
    ],
)
def test_mistakes_are_reported_at_once(at, capsys, ranks, args, messages):
    """Also if a launcher seems to have started this process, as rank 0."""
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_PORT": free_port()}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1"} if ranks else {}).items():
        at.env(name, str(value))
    errors = script_that_fails(at, capsys, "bench.py", ["--device=cpu", *args]).err.splitlines()
    assert len(errors) == len(messages) and all(map(str.__contains__, errors, messages)), errors


def test_help_shows_the_defaults_of_bench(zygote, work):
    text = zygote.start(["--help=all"], work, script="bench.py").wait().text()
    fixed = text[text.index("set by bench.py") :].split("\n\n")[0]
    assert "  --out_dir=" in fixed and "  --max_iters=" in fixed
    assert "--gradient_accumulation_steps=0 " in text
    assert "--block_size=256 --batch_size=8.\n" in text, "the small model"
