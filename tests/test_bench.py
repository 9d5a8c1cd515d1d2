"""
Every report of bench.py, with models so small that a launch takes seconds. No test depends on its duration.
"""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import REPO, free_port, listening, script, script_that_fails, tiny_data
from test_launchers import FORKED

from configurator import settings_of
from isogpt.data import data_folder
from isogpt.speed.bench_request import Request
from isogpt.speed.launches import reason_for
from isogpt.speed.step_report import report_step, split_step
from isogpt.speed.sweep import run_sweep
from isogpt.speed.workload import Workload, choose_workload, described_for_bench
from model import GPT

TINY = ["--dataset=tiny", "--device=cpu", "--dtype=float32", "--n_layer=1", "--n_head=2", "--n_embd=16"]
TINY += ["--block_size=16", "--batch_size=2", "--steps=3"]
PARTS = ["data wait", "forward", "backward", "exposed comm", "optimizer", "other"]
DEFAULTS = {name: setting.default for name, setting in settings_of(REPO / "train.py").items()}


def bench(zygote, work, *args, ok=True, addresses=None, script="tests/forked_bench.py"):
    """
    (text, JSON) of a bench.py, whose launches are forked unless `script` is bench.py itself. The addresses at
    which its processes listen are added to a set.
    """
    run = zygote.start([*TINY, *args, "--json_path=bench.json"], work, script=script)
    while addresses is not None and not run.poll():
        addresses |= {address for address, port in listening(run.pids[0])}
    run.wait(300, ok)
    assert run.codes == [0 if ok else 1]
    assert not list(work.glob("*.tmp"))
    path = work / "bench.json"
    return run.text(), json.loads(path.read_text()) if path.exists() else None


def launch(at, world_size):
    """As if a launcher had started this process as rank 0."""
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in variables.items():
        at.env(name, str(value))


def check_split(report, processes):
    run, parts = report["run"], report["split_ms"]
    assert run["processes"] == processes and list(parts) == PARTS
    for of in ("mean", "max"):
        assert all(p[of] >= 0 for p in parts.values() if p[of] is not None)
    # medians need not add up to the median step, but nothing is counted twice: the rest is in `other`
    known = sum(p["mean"] or 0 for name, p in parts.items() if name != "other")
    assert parts["other"]["mean"] == pytest.approx(max(0, run["step_ms"]["mean"] - known))
    assert run["tokens_per_s"] == pytest.approx(run["tokens_a_step"] / run["step_ms"]["mean"] * 1e3)
    assert report["matmul_ratio"] > 0 and report["matmul_flops"] > 1e8


# ------------------------------------------------------------------------------------------------------------
# launches


@pytest.mark.slow
def test_report_of_one_process_with_its_trace(zygote, work):
    """The split, the limits, the JSON and, however few the steps, the trace and its table of operators."""
    text, found = bench(zygote, work, "--profile=True", "--steps=1", script="bench.py")
    check_split(found["report"], 1)
    for name in ("tokens/s", "ms per step", "memory, GB", "MFU", *(p for p in PARTS if p != "exposed comm")):
        assert len(re.findall(rf"^{name} +[\d.,]+", text, re.M)) == 1, (name, text)
    assert re.search(r"^exposed comm +n/a +n/a$", text, re.M), "one process does not communicate"
    events = json.loads((work / "bench_trace.json").read_text())["traceEvents"]
    assert sum(e.get("name", "").startswith("ProfilerStep#") for e in events) >= 5
    assert {"data", "forward", "backward", "optimizer"} <= {e.get("name") for e in events}
    operators = found["report"]["operators"]
    assert operators in text and "Self CPU" in operators
    assert len(re.findall(r"^ *\S.* [\d.]+% .* [\d.]+% ", operators, re.M)) == 15
    assert re.search(r"^ *aten::mm ", operators, re.M)


@pytest.mark.slow
def test_report_of_two_processes(zygote, work):
    text, found = bench(zygote, work, "--nproc=2")
    check_split(found["report"], 2)
    assert found["report"]["split_ms"]["exposed comm"]["mean"] > 0
    assert f"3 steps of {2 * 2 * 16} tokens on 2 processes" in text


@pytest.mark.slow
def test_a_sweep_marks_launches_that_failed(zygote, work):
    """Their rows give the reason: no memory, no such value, no such setting."""
    huge = 2**20  # weights of 17 TB
    text, found = bench(zygote, work, f"--sweep=n_embd:16,{huge},none", "--warmup_iters=0")
    good, memory, wrong = found["sweep"]
    assert good["tokens_per_s"] > 0 and good["point"] == {"n_embd": "16"}
    assert memory["problem"] == "out of memory" and "n_embd='none': not a whole number" in wrong["problem"]
    assert re.search(r"^  +16 +32 +[\d,]+ +[\d.]+ +[\d.]+ +[\d.]+% +1\.00x +100%$", text, re.M), text
    assert re.search(rf"^ +{huge}  failed: out of memory$", text, re.M)
    text, found = bench(zygote, work, "--sweep=batch_siz:2;learning_rate:1", ok=False)
    assert "did you mean --batch_size?" in text and "no launch succeeded" in text
    assert "problem" in found["sweep"][0]


@pytest.mark.slow
def test_a_sweep_under_torchrun(zygote, work):
    """Several launches share one torchrun's store; all ranks continue after a launch that failed."""
    sweep = [REPO / "tests/forked_bench.py", *TINY, "--sweep=zero:0,5,3"]
    command = ["--standalone", "--nproc_per_node=2", *sweep]
    text = zygote.start(command, work, script=FORKED).wait(300).text()
    rows = re.findall(r"^ +(\d)  (failed: zero is 5|.*1\.00x|.*[\d.]+x)", text, re.M)
    assert [r[0] for r in rows] == ["0", "5", "3"] and "failed" in rows[1][1], text


@pytest.mark.slow
def test_tuning_ends_in_a_command_that_runs(zygote, work):
    """It keeps the global batch, chooses settings that worked, and includes every setting that was typed."""
    text, found = bench(zygote, work, "--tune=True", "--nproc=2", "--hardware=cpu", "--batch_size=4")
    tried, command = found["tune"]["tried"], found["tune"]["command"]
    assert text.rstrip().endswith(command) and {t["tokens_a_step"] for t in tried} == {8 * 16}
    points = [t["point"] for t in tried]
    assert len({p["zero"] for p in points}) > 1 and len({p["batch_size"] for p in points}) > 1
    assert "\nmeasured:\n" in text and "predicted:\n" in text and "--n_embd=16" in command
    best = max(tried, key=lambda t: t["tokens_per_s"])
    assert f"\nthe fastest, {best['tokens_per_s']:,.0f} tokens/s:\n" in text
    assert (f"--zero={best['point']['zero']}" in command) == (best["point"]["zero"] > 0)
    assert f"--batch_size={best['point']['batch_size']}" in command
    words = shlex.split(command)
    assert words[:4] == ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    assert not any("tune" in w or "steps=3" in w or "hardware" in w for w in words)
    more = ["--max_iters=2", "--eval_iters=1", "--save_checkpoint=False", "--out_dir=out"]
    run = zygote.start([*words[4:], *more], work, 2).wait()
    assert "iter 2:" in run.text() and "128 tokens" in run.text()


def test_a_launch_that_fails_prints_why(zygote, work):
    text, found = bench(zygote, work, "--head=untied", ok=False, script="bench.py")
    assert "error: train.py failed: arch 'gpt2' uses a tied head" in text and found is None


def test_why_a_launch_failed():
    assert reason_for(3, "") == "exit status 3"
    assert reason_for(-9, "") == "killed (SIGKILL), probably because the machine ran out of memory"
    assert reason_for(1, "[rank0]: Traceback:\n[rank0]:  line\n[rank0]: KeyError: 3") == "KeyError: 3"


def figures(**ms):
    """What a launch of train.py on two processes might have recorded, with these parts of a step."""
    both = {"mean": 100.0, "max": 110.0}
    return {
        "tokens_a_step": 64,
        "tokens_per_s": 640.0,
        "step_ms": both,
        "processes": 2,
        "micro_batch": 1,
        "dtype": "float32",
        "flops_per_s": 5e11,
        "peak_flops": 1e12,
        "spans_ms": {name: {"mean": value, "max": value} for name, value in (PARTS_MS | ms).items()},
        "memory_gb": both,
        "mfu": 0.25,
        "settings": {"out_dir": ".", "tp": 1, "pp": 2, "cp": 1, "pp_schedule": "1f1b", "batch_size": 1}
        | {"gradient_accumulation_steps": 8},
    }


PARTS_MS = {"data": 2, "reduce": 4, "agree": 6, "norm": 3, "optimizer": 5}
DDP = {"forward": 25, "backward": 50}
PIPELINE = {"pipeline": 75, "stages": 50}


@pytest.mark.parametrize(
    "ms, wanted",
    [
        (DDP | {"waiting": 15}, {"forward": 25, "backward": 35, "exposed comm": 25, "other": 5}),
        (DDP, {"forward": 25, "backward": 50, "exposed comm": None, "other": 15}),
        (PIPELINE | {"waiting": 25}, {"stages": 50, "bubble": 25, "exposed comm": 10, "other": 5}),
        (PIPELINE, {"stages": 50, "bubble": 25, "exposed comm": None, "other": 15}),
    ],
)
def test_the_parts_of_a_step(ms, wanted):
    """Communication is known where there is none inside of the passes, and is not in the bubble."""
    found = {name: part["mean"] for name, part in split_step(figures(**ms)).items()}
    assert found == {"data wait": 2, "optimizer": 8} | wanted


def launches_of(run):
    """In place of Launches: (launches that all record `run`, the settings of each launch)."""
    launched = []

    def record(settings, steps, show=False):
        launched.append(settings)
        return run

    return SimpleNamespace(rank=0, profile=False, run=record), launched


def test_the_report_of_a_step_in_a_pipeline(at, capsys):
    """With a trace and, as on a GPU, a snapshot of its memory, which are kept. One launch suffices."""
    (at.path / "trace.json").write_text("{}")
    (at.path / "memory.pickle").touch()
    (at.path / "operators.txt").write_text("the table")
    launches, launched = launches_of(figures(**PIPELINE))
    launches.profile = True
    assert report_step(launches, {}, 3, torch.device("cpu"))["operators"] == "the table"
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert len(launched) == 1 and lines[-1] == "the table"
    for line in (
        "3 steps of 64 tokens on 2 processes, float32; medians:",
        "exposed comm n/a n/a",
        "memory, GB 100.00 110.00",
        "bubble (formula) 33.3% (11.1%)",
        "matmul, TFLOP/s 1",
        "of which reached 50.0%",
        "wrote bench_memory.pickle (open it in https://pytorch.org/memory_viz)",
    ):
        assert line in lines, lines
    assert Path("bench_trace.json").exists() and Path("bench_memory.pickle").exists()


def test_a_plan_keeps_a_layout_that_was_typed_at_its_default():
    settings = described_for_bench(settings_of(REPO / "train.py"))
    config = {
        "plan": True,
        "tune": False,
        "weak": False,
        "real_data": False,
        "n_layer": 2,
        "tp": 1,
        "zero": 0,
    }
    request = Request(8, [8], ["h100"], {})
    cpu = torch.device("cpu")
    workload = choose_workload(config, settings, ["--n_layer=2", "--tp=1", "--zero=0"], cpu, request, GPT)
    assert workload.plan(8, "h100").kept == ["zero", "tp"]


@pytest.mark.parametrize(
    "swept, weak, micro_batches, batches",
    [
        ({"nproc": "12"}, False, 0, [2, 2]),
        ({"nproc": "12"}, True, 3, [3, 6]),
        ({"zero": "01"}, False, 0, [2, 2]),
        ({"batch_size": "24"}, False, 3, [3, 3]),
    ],
)
def test_the_rows_of_a_sweep(capsys, swept, weak, micro_batches, batches):
    """The global batch grows with weak scaling only; a layout's rows say what ranks wait for."""
    settings = DEFAULTS | {"gradient_accumulation_steps": micro_batches, "nproc": 2}
    workload = Workload(settings, {}, [], {}, torch.device("cpu"), 2, weak, is_random=False, model_class=GPT)
    launches, launched = launches_of(figures(**DDP))
    rows = run_sweep(launches, workload, {name: list(values) for name, values in swept.items()}, 3)
    out = capsys.readouterr().out
    assert re.search(r"efficiency.*\n.* 1\.00x +100%.*\n.* 1\.00x +100%", out) and len(rows) == 2
    assert [run["gradient_accumulation_steps"] for run in launched] == batches
    assert ("comm ms" in out) == ("zero" in swept)


# ------------------------------------------------------------------------------------------------------------
# collectives


@pytest.mark.slow
def test_collectives_on_two_processes(zygote, work):
    addresses = set()
    text, found = bench(zygote, work, "--comm=True", "--nproc=2", addresses=addresses, script="bench.py")
    assert addresses == {"127.0.0.1"}, "no other machine can connect"
    operations = {c["operation"] for c in found["comm"]}
    assert operations == {"all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all"}
    sizes = sorted({c["bytes"] for c in found["comm"]})
    assert sizes[0] == 2**10 and sizes[-1] == 2**26 and len(found["comm"]) == 5 * len(sizes)
    for c in found["comm"]:
        factor = 1.0 if c["operation"] in ("broadcast", "all-reduce") else 0.5  # of two processes
        assert c["gb_per_s"] == pytest.approx(factor * c["bytes"] / c["us"] / 1e3)
    assert len(re.findall(r"^ +[\d,]+ KB( +[\d.]+){5}$", text, re.M)) == len(sizes), text
    assert re.search(r"^ +1 KB, in µs( +[\d.]+){5}$", text, re.M), text


def test_collectives_need_two_processes(at, capsys):
    launch(at, world_size=1)
    text = "error: comm needs two processes or more: set --nproc=2, and --device=cpu if there is one GPU\n"
    assert script_that_fails(at, capsys, "bench.py", ["--comm", "--device=cpu"]).err == text


def test_a_dry_run_is_not_measured(at, capsys):
    error = script_that_fails(at, capsys, "bench.py", ["--dry_run_ranks=4", "--device=cpu"]).err
    assert error == "error: a dry run measures no speed: start train.py with --dry_run_ranks=, not bench.py\n"


# ------------------------------------------------------------------------------------------------------------
# plans and estimates


@pytest.fixture
def plan(at, capsys):
    """A plan of bench.py in this process: (text, result)."""
    tiny_data(at.path)

    def planned(*args):
        capsys.readouterr()
        result = script(at, "bench.py", [*TINY, "--plan=True", *args])["result"]["plan"]
        return capsys.readouterr().out, result

    return planned


def test_a_plan_is_a_command_that_runs(zygote, work):
    """For a different number of devices and for other hardware; bench.py starts nothing."""
    text, found = bench(zygote, work, "--plan=True", "--devices=2", "--hardware=cpu")
    plans, command = found["plan"]["plans"], found["plan"]["command"]
    assert text.rstrip().endswith(command) and "the global batch of 4 sequences on 2 x cpu" in text
    times = [plan["total_s"] for plan in plans]
    assert times == sorted(times) and len(plans) > 8
    words = shlex.split(command)
    assert words[:4] == ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    more = ["--max_iters=2", "--eval_iters=1", "--save_checkpoint=False", "--out_dir=out"]
    run = zygote.start([*words[4:], *more], work, 2).wait()
    assert "iter 2:" in run.text() and "64 tokens" in run.text()


def test_the_command_of_a_plan_repeats_what_a_config_sets(plan):
    """A layout that the command line has set back to the default, and several machines."""
    Path("sharded.py").write_text("zero = 3\ncp = 2\n")
    many = ["--devices=64", "--hardware=h100", "--dtype=bfloat16", "--n_layer=8", "--block_size=1024"]
    text, found = plan(*many, "sharded.py", "--zero=0")
    assert "torchrun --nnodes=8 --node_rank=RANK --nproc_per_node=8 --master_addr=HOST train.py" in text
    words = shlex.split(found["command"])
    assert "sharded.py" in words and "--cp=2" not in words
    assert sum(word.startswith("--zero=") for word in words) == 1


LARGE = ["--n_layer=8", "--n_embd=512", "--n_head=8", "--block_size=512", "--dtype=bfloat16"]


def test_a_plan_compares_devices(plan):
    """A line for each device, fastest first; the figures are those of each device's own plan."""
    large = ["--n_layer=32", "--n_embd=2048", "--n_head=16", "--dtype=bfloat16", "--devices=1"]
    text, found = plan(*large, "--hardware=l4,a100,h100 l4")
    rows = re.findall(r"^ +1 x (\S+) .*?  (--.*|does not fit.*)$", text, re.M)
    assert [row[0] for row in rows] == ["h100", "a100", "l4"], text
    assert rows[2][1] == "does not fit"
    assert text.rstrip().endswith("--devices=1 --hardware=h100")
    _, single = plan(*large, "--hardware=a100")
    assert found["compared"][1].items() >= single["plans"][0].items()
    cards = ["a100-40gb", "RTX-3090", "v100", "nvidia_tesla_t4", "l4", "l40s", "5090", "b200", "mi300x"]
    text, found = plan(*LARGE, "--devices=2", f"--hardware={','.join(cards)}")
    assert len(found["compared"]) == len(cards) and text.count("  --") == len(cards), text


@pytest.mark.parametrize("weak, growth", [("False", [1, 1, 1]), ("True", [8, 2, 1])])
def test_a_plan_compares_numbers_of_devices(plan, weak, growth):
    """One global batch, or with --weak one that grows."""
    large = [*LARGE, "--hardware=a100", "--gradient_accumulation_steps=2", f"--weak={weak}"]
    text, found = plan(*large, "--devices=1 2, 8,2")
    tokens = {}
    for choice in found["compared"]:
        batch = choice["settings"]["batch_size"] * choice["settings"]["gradient_accumulation_steps"]
        tokens[choice["devices"]] = batch
    assert [tokens[n] // tokens[1] for n in (8, 2, 1)] == growth, text
    speeds = [tokens[choice["devices"]] / choice["total_s"] for choice in found["compared"]]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == 3, text
    text, _ = plan(*LARGE, "--hardware=a100", "--devices=1,2")
    assert re.findall(r"^ +(. x a100) +(\d+) ", text, re.M) == [("2 x a100", "4"), ("1 x a100", "2")], text


def test_a_plan_for_pretrained_weights_says_how_long_the_run_takes(plan, at, capsys):
    """OpenAI's models are planned by name, without data or weights; the command keeps the name."""
    finetune = [str(REPO / "config" / "finetune_shakespeare.py"), "--devices=1", "--dtype=auto"]
    text, found = plan(*finetune, "--init_from=auto:gpt2-large", "--hardware=h100")
    assert "--init_from=auto:gpt2-large" in shlex.split(found["command"]), text
    minutes, seconds = divmod(round(21 * found["plans"][0]["total_s"]), 60)
    assert f"the fastest, predicted, 21 steps in {minutes}:{seconds:02} without evaluations" in text
    long, found = plan(*finetune, "--init_from=gpt2-large", "--hardware=h100", "--max_iters=5999999")
    hours, rest = divmod(round(6000000 * found["plans"][0]["total_s"]), 3600)
    assert hours > 24
    assert f", 6,000,000 steps in {hours}:{rest // 60:02}:{rest % 60:02} without evaluations" in long
    budget, _ = plan(*finetune, "--init_from=gpt2-large", "--hardware=h100", "--max_tokens=51200")
    assert ", 100 steps in " in budget  # of 32 * 16 tokens
    epochs, _ = plan(*finetune, "--init_from=gpt2-large", "--hardware=h100", "--max_epochs=2")
    assert "the fastest, predicted:\n" in epochs, "the 21 steps of the config"
    shape = ["--n_layer=36", "--n_head=20", "--n_embd=1280", "--bias=True", "--vocab_size=50257"]
    _, by_shape = plan(*finetune, "--init_from=scratch", *shape, "--hardware=h100")
    assert by_shape["plans"] == found["plans"]

    with pytest.raises(SystemExit):
        script(at, "bench.py", [*finetune, "--estimate_world_size=1", "--device=cpu"])
    text = capsys.readouterr().out
    assert float(re.search(r"^ +([\d.]+)", text, re.M)[1]) == pytest.approx(1.5576 * 4, abs=0.01)  # gpt2-xl


def test_a_plan_that_does_not_fit_says_what_does(plan, at, capsys):
    """And what is missing, for a model or a vocabulary that is not known."""
    xl = [str(REPO / "config" / "finetune_shakespeare.py"), "--devices=1", "--hardware=4090"]
    for args, message in (
        (xl, "no layout fits on 1 device: bench.py --plan --devices=1,2,4,8 predicts"),
        ([*xl, "--init_from=."], "init_from is '.': a plan and an estimate know only the shapes of gpt2, "),
        (
            [*xl, "--init_from=scratch", "--dataset=none"],
            "to predict without the data, set --vocab_size=50304",
        ),
        (["--n_layer=1", "--hardware=4090", "--dtype=float32"], "for 4090, set --dtype=bfloat16 or float16"),
    ):
        output = script_that_fails(at, capsys, "bench.py", ["--plan=True", "--device=cpu", *args])
        assert message in output.err
    assert not plan(*xl, "--dtype=auto", "--zero=3", "--cpu_offload=True")[1]["plans"][0]["problem"]
    unprepared = ["--init_from=scratch", "--dataset=none", "--vocab_size=50304", "--dtype=auto"]
    slow, fast = (plan(*xl, *unprepared, *TINY[3:6], f"--device_tflops={n}")[1] for n in (1, 1000))
    assert slow["plans"][0]["total_s"] > fast["plans"][0]["total_s"]


# ------------------------------------------------------------------------------------------------------------
# settings


@pytest.mark.parametrize(
    "args, messages",
    [
        (
            ["--comm", "--tune", "--json_path=nowhere/x"],
            ["comm, sweep, plan, tune and check are separate reports: set one of them"]
            + ["json_path is 'nowhere/x', but there is no such folder: create it"],
        ),
        (["--json_path=."], ["json_path is '.', which is a folder: set a file in it"]),
        (["--device=tpu"], ["choose from auto"]),
        (["--hardware=4090"], ["set --plan=True; to measure N processes, set --nproc=N"]),
        (["--devices=2,4"], ["set --plan=True; to measure N processes, set --nproc=N"]),
        (["--plan", "--hardware=l4,9090"], ["hardware is '9090', which is not known: choose"]),
        (["--plan", "--devices=1 2 x"], ["devices is '1 2 x': type a number, or several such as --dev"]),
        (["--plan", "--devices=1000000000000"], ["devices is '1000000000000': type a number"]),
        (["--plan", "--devices=12"], ["it must be a multiple of per_node, 8: set --devices=8"]),
        (["--plan", "--hardware=l4,3090", "--device_memory_gb=9"], ["set --hardware= to this card"]),
        (["--plan", "--device_tflops=100"], ["set --hardware= to this card, such as --hardware=4090"]),
        (["--tune", "--hardware=l4,3090"], ["are for a plan: set --plan=True"]),
        (["--sweep=batch_size"], ["type --sweep='nproc:1,2;batch_size:4,8' or the like"]),
        (["--sweep=zero:1;nproc:1;zero:2"], ["or the like, each setting once"]),
        (["--sweep=nproc:0,2"], ["type numbers of processes"]),
        (["--sweep=batch_size:1,2", "--weak"], ["such as --sweep=nproc:1,2,4"]),
    ],
)
def test_mistakes_are_reported_at_once(at, capsys, args, messages):
    at.set(data_folder, "REPOSITORY", at.path)  # where no data set is prepared
    errors = script_that_fails(at, capsys, "bench.py", ["--device=cpu", *args]).err.splitlines()
    assert len(errors) == len(messages) and all(map(str.__contains__, errors, messages)), errors


def test_mistakes_under_a_launcher(at, capsys):
    launch(at, world_size=2)
    for args, message in (
        (["--nproc=3"], "nproc is 3, but the launcher's WORLD_SIZE is 2: omit --nproc"),
        (["--tune"], "start bench.py without a launcher"),
        (["--sweep=nproc:1"], "start bench.py without a launcher"),
    ):
        output = script_that_fails(at, capsys, "bench.py", ["--device=cpu", *args])
        assert message in output.err and output.err.count("\n") == 1 and not output.out


def test_help_shows_the_defaults_of_bench(zygote, work):
    text = zygote.start(["--help=all"], work, script="bench.py").wait().text()
    fixed = text[text.index("set by bench.py") :].split("\n\n")[0]
    for option in ("out_dir", "max_iters", "log_interval", "eval_interval", "save_checkpoint", "wandb_log"):
        assert f"  --{option}=" in fixed, option
    assert "--gradient_accumulation_steps=0 " in text
    for option, value in dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8).items():
        assert re.search(rf"^  --{option}=.*\(small model: {value}\)\s+\[>= 1\]$", text, re.M), option
