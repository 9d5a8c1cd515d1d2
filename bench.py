"""
Measure how fast train.py runs on this machine: launch it for a few steps and read what it recorded.
train.py's configs and settings are also accepted. If they do not choose a model, a GPU trains GPT-2 124M and
other devices a small model of 10.65M parameters, which takes a minute.

    python bench.py config/train_shakespeare_char.py --batch_size=8    a config, with one setting changed
    python bench.py --nproc=2                               two processes; or torchrun ... bench.py
    python bench.py --sweep='nproc:1,2,4;batch_size:4,8'    every combination, in separate launches
    python bench.py --nproc=4 --sweep='tp:1,2;pp:1,2'       layouts of four processes; also cp, ep and zero
    python bench.py --comm --nproc=2                        the collectives, by message size
    python bench.py config/train_gpt2.py --plan --devices=64 --hardware=h100    predict the fastest layouts
    python bench.py config/train_gpt2.py --plan --devices=1,8 --hardware=l4,4090    compare GPUs and numbers
    python bench.py config/train_gpt2.py --tune             measure the plan's best few layouts here
"""

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import numpy as np
import torch
from torch.distributed import DistError

from configurator import configure, fail, settings_of
from isogpt.common import console
from isogpt.common.files import write_whole
from isogpt.data.dataset import GPT2_VOCAB, open_dataset, prepared_datasets
from isogpt.launch.device import pick_device
from isogpt.launch.launchers import adopt_launcher_variables, rank_variables, start_workers
from isogpt.launch.network import own_cores
from isogpt.launch.process_group import connect_store
from isogpt.nn.huggingface import GPT2
from isogpt.parallel.plan import DEFAULTS, LAYOUT, Plan, normalized, plan_of
from isogpt.parallel.shares import parse_shares, share_of
from isogpt.speed import layouts, memory
from isogpt.speed.collective_speeds import measure_collectives, shown
from isogpt.speed.devices import Hardware, hardware_here, measured_copy, measured_matmul, named_hardware
from isogpt.speed.prediction import Prediction, calibrated, two_blocks
from isogpt.speed.profiler import PROFILE_SKIP, PROFILE_STEPS
from isogpt.speed.step_report import bubble, figures, own_lines, reason_for, shown_bubble, split_step
from isogpt.training import precision
from isogpt.training.settings import check_training, model_args_of, problems_of, report
from model import GPT, GPTConfig

# -- what to run ---------------------------------------------------------------------------------------------
batch_size = 12  # sequences per micro-batch; by default, a GPU takes as many as fit (small model: 8)
block_size = 1024  # tokens per sequence (small model: 256)
bias = False  # biases in Linear and LayerNorm
real_data = True  # False: random tokens, which are also used if the default data set is not prepared
seed = 1337  # seed of the weights and the data
nproc = 0  # processes to launch on this machine (0: one, or as many as the launcher started)
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
dtype = "auto"  # auto (the fastest that the device trains well in), float32, tf32, bfloat16 or float16
compile = True  # torch.compile; not used on a CPU, or if it does not work on this machine
steps = 20  # steps to measure, after a quarter as many for warm-up
# -- what to report ------------------------------------------------------------------------------------------
sweep = ""  # settings and values, such as nproc:1,2;batch_size:4,8: launch every combination
weak = False  # with a sweep over nproc, or a plan: weak scaling, the global batch grows with the processes
comm = False  # measure the collectives' bandwidth and latency by message size; no training
plan = False  # predict time and memory of all layouts for the same global batch; no training
tune = False  # measure the best few plans for the launched processes, and print the fastest command
devices = ""  # to plan for: a number, or several (1,2,8), which are compared ("": the launched processes)
per_node = 8  # devices of each machine
hardware = "this"  # to plan for: a GPU such as h100 or 4090, several (l4,3090), cpu (a core), this (measured)
device_memory_gb = 0.0  # with a plan: memory of a card that is otherwise like hardware (0: as hardware)
device_tflops = 0.0  # with a plan: 16-bit TFLOP/s on the data sheet of such a card (0: as hardware)
network = 0.0  # Gbit/s between machines (0: usual for the hardware)
profile = False  # also write a torch.profiler trace, bench_trace.json, and print the slowest operators
json_path = ""  # also write all results to this JSON file
estimate = False  # first print an estimate of the memory on each rank, without allocating it
estimate_world_size = 0  # estimate for this many processes and launch nothing (0: the launched processes)
# ------------------------------------------------------------------------------------------------------------
HERE = Path(__file__).resolve().parent
SMALL = dict(dataset="shakespeare_char", n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8)
FIXED = dict(out_dir="", max_iters=0, log_interval=1, eval_interval=10**9, eval_iters=1, eval_only=False)
FIXED |= dict(
    save_checkpoint=False, always_save_checkpoint=False, save_interval=0, keep_last=0, time_limit_s=0
)
FIXED |= dict(wandb_log=False, tensorboard_log=False, alert_command="", sample_interval=0)
CHANGES_COMMUNICATION = set(LAYOUT) - {"activation_checkpointing"}
launches = itertools.count()  # numbers the launches of train.py, the same on all ranks


def say(text: str) -> None:
    """Print on rank 0."""
    if rank == 0:
        console.print_line(text)


# ------------------------------------------------------------------------------------------------------------
# one launch of train.py


def run_train(work: dict, timed: int, show: bool = False) -> dict:
    """
    Train for `timed` steps after a warm-up; returns the figures that train.py recorded (rank 0), or the
    problem. Under a launcher, each rank starts one train.py, which inherits the launcher's variables.
    """
    number, n = next(launches), str(work["nproc"])
    if not n.isdecimal() or int(n) == 0:
        return {"problem": f"nproc is {n!r}: it must be a whole number of at least 1"}
    # with grad_sync never, only the collectives of tp, cp and ep remain: the trace contains their durations
    has_others = any(str(work[name]) != "1" for name in ("tp", "cp", "ep"))
    is_traced = (profile and show) or (work["grad_sync"] == "never" and has_others)
    out = scratch / f"launch{number}"
    warm_up = PROFILE_SKIP + PROFILE_STEPS + 1 if is_traced else max(3, timed // 4)
    arguments = work | FIXED | {"profile": is_traced, "out_dir": out, "max_iters": warm_up + timed - 1}
    arguments["gradient_accumulation_steps"] = work["gradient_accumulation_steps"] or n
    arguments["nproc"] = 0 if is_launched or int(n) == 1 else n  # train.py launches as many processes
    env, command = dict(os.environ), [sys.executable, str(HERE / "train.py")]
    if is_launched:  # by torchrun's agent, or by rank 0 of this script: `store`
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    command += [f"--{name}={value}" for name, value in arguments.items()]
    with TemporaryFile("w+", errors="replace") as stderr:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env) as process:
            for line in process.stdout:
                # these lines are about the short launch, which ends before the settings' warm-up does
                unwanted = ("step ", "done", "waiting", "the loss curve", "no plot", "note:    the run ends")
                if show and not line.startswith(unwanted):
                    console.print_line(line.rstrip("\n"))
        stderr.seek(0)
        errors = stderr.read()
    if show:
        sys.stderr.write(own_lines(errors))
    if process.returncode:
        return {"problem": reason_for(process.returncode, errors)}
    return figures(out, timed) if rank == 0 else {}


def limits(run: dict) -> dict[str, float | None]:
    """
    Measure the speed of matmuls and of copies on this device, and the fraction of each speed that the run
    reached.
    """
    if where.type == "cpu":
        torch.set_num_threads(len(own_cores()))  # torchrun sets one thread
    precision.set_numerics(where, run["dtype"], False)
    matmul, copy = measured_matmul(where, run["dtype"]), measured_copy(where)
    config, n = run["settings"], run["processes"]
    # the processes of one machine share the cores
    devices = n // int(os.environ.get("LOCAL_WORLD_SIZE", n)) if where.type == "cpu" else n
    replicas = config["dp_replicate"] if config["zero"] else n // (config["tp"] * config["pp"])
    # AdamW reads weights, gradients and two moments, and writes all but the gradients: seven float32
    # (not available with ep)
    moved = 28 * run["parameters"] * replicas / (run["spans_ms"]["optimizer"]["mean"] / 1e3)
    return {
        "matmul_tflops": matmul / 1e12,
        "matmul_ratio": run["mfu"] * run["peak_flops"] / (matmul * devices) if run["mfu"] else None,
        "copy_gb_per_s": copy / 1e9,
        "copy_ratio": None if config["cpu_offload"] or config["ep"] > 1 else moved / (copy * devices),
    }


def run_report() -> dict:
    """
    Launch train.py (all ranks); print the parts of a step and how close the step is to the device's limits.
    """
    run, silent = run_train(work, steps, show=True), None
    if processes > 1 and work["grad_sync"] != "never" and "problem" not in run:
        say("\nonce more, without communication (grad_sync never)")
        silent = run_train(work | {"grad_sync": "never"}, steps)
    for result in (run, silent or {}):
        if "problem" in result:
            fail(f"train.py failed: {result['problem']}")
    if rank > 0:
        return {}

    parts, best, gb = split_step(run, silent), limits(run), run["memory_gb"]
    count = f"{processes} process{'es' if processes > 1 else ''}"
    print(f"\n{steps} steps of {run['tokens_a_step']:,} tokens on {count}, {run['dtype']}; medians:")
    print(f"  {'':13} {'mean of the ranks':>18} {'slowest rank':>13}")
    print(f"  {'tokens/s':13} {run['tokens_per_s']:18,.0f}")
    for name, ms in {"ms per step": run["step_ms"], **parts}.items():
        print(f"  {name:13} {shown(ms['mean'], '.2f'):>18} {shown(ms['max'], '.2f'):>13}")
    print(f"  {'memory':13} {gb['mean']:18.2f} {gb['max']:13.2f}  GB, peak")
    print(f"  {'MFU':13} {shown(run['mfu'], '.1%'):>18}")
    if "pipeline" in run["spans_ms"]:
        print(f"  {'bubble share':13} {shown_bubble(bubble(run)):>18}  of the pipeline's time (by formula)")
    matmul, copy = f"{best['matmul_tflops']:.3g} TFLOP/s", f"{best['copy_gb_per_s']:.1f} GB/s"
    print(
        f"  {'matmul peak':13} {matmul:>18}  of which the step reaches {shown(best['matmul_ratio'], '.1%')}"
    )
    cached = " (the data stays in the cache)" if (best["copy_ratio"] or 0) > 1 else ""
    print(
        f"  {'copy peak':13} {copy:>18}  of which the optimizer reaches "
        f"{shown(best['copy_ratio'], '.1%')}{cached}"
    )
    result = {"run": run, "split_ms": parts, "limits": best}
    if profile:
        out = Path(run["settings"]["out_dir"])
        for name, viewer in (("trace.json", "ui.perfetto.dev"), ("memory.pickle", "pytorch.org/memory_viz")):
            if (out / name).exists():  # memory.pickle only on a GPU
                print(f"wrote {shutil.copy(out / name, f'bench_{name}')} (open it in https://{viewer})")
        result["operators"] = (out / "operators.txt").read_text()
        print(result["operators"])
    return result


# ------------------------------------------------------------------------------------------------------------
# many launches


def try_point(point: dict, work: dict, timed: int, tried: list[dict]) -> dict:
    """
    Launch with the settings of `point` (all ranks), append the figures to `tried` and print them as a row.
    """
    run = {"point": point} | run_train(work | point, timed)
    if shows_waits(point) and "problem" not in run:
        silent = run_train(work | point | {"grad_sync": "never"}, timed)
        if rank == 0:
            run["exposed_ms"] = (
                None if "problem" in silent else split_step(run, silent)["exposed comm"]["mean"]
            )
            run["bubble"] = bubble(run) if "pipeline" in run["spans_ms"] else None
    tried.append(run)
    if rank == 0:
        console.print_line(row_of(tried[-1], tried))
    return tried[-1]


def shows_waits(point: dict) -> bool:
    """Whether a row shows what ranks wait for, which takes a second launch: in sweeps of layouts."""
    return bool(sweep) and not CHANGES_COMMUNICATION.isdisjoint(point)


def row_of(run: dict, tried: list[dict]) -> str:
    """A row of the table: settings and figures, or why the launch failed. The first row includes a header."""
    point, row = run["point"], ""
    if len(tried) == 1:
        row = "".join(f"  {name:>9}" for name in point) + "  tokens/step   tokens/s   ms/step       GB"
        row += "    MFU  speed-up"
        row += "  efficiency" if "nproc" in point else ""
        row += "   comm ms  bubble (formula)\n" if shows_waits(point) else "\n"
    row += "".join(f"  {value!s:>{max(len(name), 9)}}" for name, value in point.items())
    if "problem" in run:
        return f"{row}  failed: {run['problem']}"
    first = next(other for other in tried if "problem" not in other)
    speed_up = run["tokens_per_s"] / first["tokens_per_s"]
    row += f" {run['tokens_a_step']:12,} {run['tokens_per_s']:10,.0f} {run['step_ms']['mean']:9.2f}"
    row += f" {run['memory_gb']['max']:8.2f} {shown(run['mfu'], '.1%'):>6}"
    row += f" {speed_up:8.2f}x"
    row += f" {speed_up * first['processes'] / run['processes']:11.0%}" if "nproc" in point else ""
    has_more = "exposed_ms" in run
    return f"{row} {shown(run['exposed_ms'], '.2f'):>9}  {shown_bubble(run['bubble'])}" if has_more else row


def global_micro_batches(n: int) -> int:
    """
    The gradient_accumulation_steps of n processes: what the user has set, times n if the scaling is weak; n
    if the user has set nothing.
    """
    chosen = work["gradient_accumulation_steps"]
    return chosen * n if chosen and weak else chosen or n


def run_sweep() -> list[dict]:
    """Launch every combination of the swept values (all ranks) and print a table."""
    text = sweep.replace(" ", "").strip(";")
    if not re.fullmatch(r"\w+:[^;]+(;\w+:[^;]+)*", text):
        fail(f"sweep is {sweep!r}: type --sweep='nproc:1,2;batch_size:4,8' or the like")
    pairs = [part.split(":", 1) for part in text.split(";")]
    axes = {name: values.split(",") for name, values in pairs}
    if len(axes) < len(pairs):
        fail(f"sweep is {sweep!r}: it names a setting twice; list all values of a setting after one name")
    if is_launched and "nproc" in axes:
        fail("a sweep over nproc launches the processes itself: start bench.py without torchrun")
    counts = [int(value) for value in axes.get("nproc", [str(processes)]) if value.isdecimal() and int(value)]
    varied = [name for name, values in axes.items() if len(values) > 1]
    varied = [name for name in varied if name in ("batch_size", "block_size", "gradient_accumulation_steps")]
    scales = len(axes.get("nproc", [])) > 1
    if weak and not scales:
        fail("weak scaling needs a sweep over nproc, such as --sweep=nproc:1,2,4")
    if varied:
        say(f"the global batch varies with {', '.join(varied)}: compare tokens/s")
    elif weak:
        say("held fixed: the sequences of each process, so that the speed-up by nproc is weak scaling")
    elif scales:
        say("held fixed: the global batch, so that the speed-up by nproc is strong scaling")
    else:
        say("held fixed: the global batch")
    tried = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        # strong scaling: a number that divides evenly over every number of processes
        n = int(point["nproc"]) if weak and point["nproc"].isdecimal() else math.lcm(*counts)
        accumulation = global_micro_batches(n)
        try_point(point, work | {"gradient_accumulation_steps": accumulation}, steps, tried)
    return tried


def predictions_for(n: int, card: str) -> tuple[Plan, Hardware, list[Prediction]]:
    """
    The plan that the settings describe for n devices of a kind, the kind's speeds, and all layouts, fastest
    first.
    """
    if is_launched:
        fail("a plan needs no launcher: start bench.py without torchrun, with --devices=N or --nproc=N")
    machine = min(n, per_node)
    if n % machine:
        fail(
            f"devices is {n}: it must be a multiple of per_node, {per_node}: set --devices={n - n % machine}"
        )
    check_training(work | shape_of_pretrained() | {"out_dir": "out", "gradient_accumulation_steps": 1})
    wanted = plan_for(n, work["islands"] or n // machine, card)
    here = measured_machine(wanted, machine) if card == "this" else None
    hw = named_hardware(card, network, here, device_memory_gb, device_tflops)
    return wanted, hw, layouts.ranked(wanted, hw, machine)


def make_plans(n: int) -> tuple[list[Prediction], str]:
    """Rank the plans for n devices; prints a table and returns the plans and the best plan's command."""
    wanted, hw, found = predictions_for(n, cards[0])
    print(
        f"the global batch of {wanted.sequences} sequences on {n} x {cards[0]}, {min(n, per_node)} on each "
        "machine, predicted:"
    )
    with torch.device("meta"):
        flops = GPT(GPTConfig(**wanted.model_args)).flops_per_token()
    print(layouts.table(found, wanted.sequences * work["block_size"], n, flops))
    layouts.check_fits(found, wanted, hw, per_node)
    return found, command_for(found[0].settings, n)


def compare_choices(counts: list[int]) -> dict:
    """
    Print the fastest layout on each number of devices of each kind in `hardware`, the fastest first. Where no
    layout fits, the line says how many devices suffice.
    """
    choices = []
    for n, card in itertools.product(counts, cards):
        wanted, hw, (found, *_) = predictions_for(n, card)
        fewest = layouts.smallest_world(wanted, hw, per_node) if found.problem else 0
        choices.append(layouts.Choice(n, card, wanted.sequences * work["block_size"], found, fewest))
    choices = layouts.fastest_first(choices)
    batch = f"the global batch of {wanted.sequences} sequences"
    if len({choice.tokens for choice in choices}) > 1:
        batch = "a global batch that grows with the devices"
        if not weak:  # nothing was set, and each process reads a micro-batch
            batch += f" (--gradient_accumulation_steps={max(counts)}: the same on any number)"
    print(f"{batch}, predicted:")
    print(layouts.table_of_choices(choices))
    if choices[0].tokens_per_s:
        fastest = f"--devices={choices[0].devices} --hardware={choices[0].hardware}"
        print(f"\nall layouts, and the command: choose one line, such as {fastest}")
    return {"compared": [choice._asdict() | {"found": described(choice.found)} for choice in choices]}


def measured_machine(wanted: Plan, n: int) -> Hardware:
    """Measure this machine with n processes: large operations, collectives, and two of the model's blocks."""
    links, target = [], scratch / "comm.json"
    if n > 1:
        command = [sys.executable, str(HERE / "bench.py"), "--comm", f"--nproc={n}", f"--device={device}"]
        subprocess.run([*command, f"--json_path={target}"], stdout=subprocess.DEVNULL, check=True)
        links = json.loads(target.read_text())["comm"]
    found = hardware_here(where, wanted.dtype, n, links)
    if where.type == "cuda":
        return found
    run = run_train(work | shape_of_pretrained() | two_blocks(wanted, n) | {"nproc": n}, 5)
    return found if "problem" in run else calibrated(found, wanted, n, run["step_ms"]["mean"] / 1e3)


def command_for(point: dict, n: int) -> str:
    """The command that trains with the settings of `point` on n devices."""
    # settings of a config file must be set again
    chosen = small | {
        k: value
        for k, value in point.items()
        if value != getattr(DEFAULTS, k, None) or k in config or k in layouts.BATCH
    }
    kept = accepted.keys() - chosen.keys() - set(LAYOUT) - {"fsdp", "nproc", "profile", "layout"}
    typed = [a for a in sys.argv[1:] if not a.startswith("--") or a[2:].partition("=")[0] in kept]
    program = f"torchrun --standalone --nproc_per_node={n}" if n > 1 else "python"
    if n > per_node:
        program = (
            f"torchrun --nnodes={n // per_node} --node_rank=RANK --nproc_per_node={per_node} "
            "--master_addr=HOST"
        )
    return f"{program} train.py {shlex.join([*typed, *(f'--{name}={chosen[name]}' for name in chosen)])}"


def run_plan() -> dict:
    """Print the plans for `devices` devices and the best command, or compare several numbers or kinds."""
    counts = [int(number) or processes for number in numbers]
    if len(counts) * len(cards) > 1:
        return compare_choices(list(dict.fromkeys(counts)))
    plans, command = make_plans(*counts)
    print(f"\nthe fastest, predicted{time_of_run(plans[0].total_s)}:\n{command}")
    return {"plans": [described(found) for found in plans], "command": command}


def time_of_run(step_s: float) -> str:
    """How long the run takes with steps of `step_s` seconds; empty if nothing sets max_iters."""
    if not work["max_iters"]:
        return ""
    count = work["max_iters"] + 1  # as in nanoGPT
    minutes = count * step_s / 60
    took = f"{minutes:.1f} minutes" if minutes < 60 else f"{minutes / 60:,.1f} hours"
    return f", {count:,} steps in {took} without evaluations and checkpoints"


def described(found: Prediction) -> dict:
    """A prediction for the JSON file."""
    total_s = None if found.problem else found.total_s
    facts = {"gb": found.gb, "seconds": found.seconds, "problem": found.problem, "total_s": total_s}
    return {"settings": found.settings} | facts


def run_tune() -> dict:
    """Measure the best few plans for the launched processes; print the fastest plan's command."""
    plans, _ = make_plans(processes)
    fitting = [plan for plan in plans if not plan.problem]
    few = layouts.best_of_layouts(fitting)[:4]
    few += [plan for plan in fitting if plan not in few and layouts.degrees(plan) == layouts.degrees(few[0])][
        :2
    ]
    varied = [name for name in few[0].settings if len({plan.settings[name] for plan in few}) > 1]
    print("\nmeasured:")
    tried = []
    for plan in few:
        try_point({name: plan.settings[name] for name in varied}, work | plan.settings, 5, tried)
    best = max(tried, key=lambda run: run.get("tokens_per_s", 0.0))
    if "problem" in best:
        return {"tried": tried}
    command = command_for(few[tried.index(best)].settings, processes)
    print(f"\nthe fastest, {best['tokens_per_s']:,.0f} tokens/s:\n{command}")
    return {"tried": tried, "command": command}


def shape_of_pretrained() -> dict:
    """
    The settings of the model from which training starts, with init_from=gpt2-xl and the like; empty if
    n_layer, n_head and n_embd describe the model.

    Raises:
        ValueError: init_from is a folder or a file.
    """
    start = work["init_from"].removeprefix("auto:")
    if start in ("scratch", "auto", "resume"):
        return {}
    if start not in GPT2:
        raise ValueError(
            f"init_from is {work['init_from']!r}: a plan and an estimate know the shapes of "
            f"{', '.join(GPT2)} only. For a different model, set --init_from=scratch, --n_layer, --n_head "
            "and --n_embd"
        )
    return GPT2[start] | {"init_from": "scratch", "arch": "gpt2", "bias": True, "vocab_size": 50257}


def plan_for(world_size: int, islands: int, card: str) -> Plan:
    """The plan that the settings describe for this many processes, on devices of a kind in `hardware`."""
    settings = work | shape_of_pretrained()
    settings |= {"gradient_accumulation_steps": global_micro_batches(world_size)}
    if card in ("this", "cpu"):
        kind, dtype = where.type, precision.resolve_dtype(work["dtype"], where)
    elif work["dtype"] in ("auto", "bfloat16", "float16"):
        kind, dtype = "cuda", work["dtype"].replace("auto", "bfloat16")
    else:
        raise ValueError(f"dtype is {work['dtype']!r}: for {card}, set --dtype=bfloat16 or float16")
    vocab_size = settings["vocab_size"] or vocabulary_of_dataset()
    args = asdict(GPTConfig(**model_args_of(settings, vocab_size)))
    found = plan_of(settings, islands, world_size=world_size, device_type=kind, dtype=dtype, model_args=args)
    data_size = max(1, world_size // (found.pp * found.cp * found.tp))
    speeds = parse_shares(found.shares, data_size)
    share = share_of(found.sequences, 0, data_size, found.batch_size, found.pp, speeds)
    return replace(found, micro_batch=max(share.rows_of))


def vocabulary_of_dataset() -> int:
    """The vocabulary size of the data set. Raises ValueError if the data set is not prepared."""
    try:
        return open_dataset(work["dataset"], work["block_size"]).vocab_size
    except ValueError as e:
        hint = f"; to predict without the data, set --vocab_size={GPT2_VOCAB} for GPT-2's tokens"
        raise ValueError(f"{e}{hint}") from e


# ------------------------------------------------------------------------------------------------------------
accepted = settings_of(HERE / "train.py")
changes = {name: {"default": value, "section": "set by bench.py"} for name, value in FIXED.items()}
changes |= {
    name: {"meaning": f"{accepted[name].meaning} (small model: {value})"} for name, value in SMALL.items()
}
changes["gradient_accumulation_steps"] = {
    "default": 0,
    "meaning": "micro-batches per step (0: one per process)",
}
accepted |= {name: replace(accepted[name], **change) for name, change in changes.items()}
try:
    adopt_launcher_variables()
    rank, world_size, *_ = rank_variables()
    config = configure(globals(), extra=accepted)
    is_launched, processes = "RANK" in os.environ, max(nproc, world_size)
    where = pick_device(device, 0, 1)
    if config.get("gradient_accumulation_steps") == 0:
        del config["gradient_accumulation_steps"]
    names = re.split(r"[\s,]+", hardware.strip().lower())
    # RTX4090 and nvidia-l4 are the cards 4090 and l4
    cards = list(dict.fromkeys(re.sub(r"^((nvidia|geforce|tesla|rtx)[-_]?)+", "", name) for name in names))
    numbers = re.split(r"[\s,]+", devices.strip()) if devices else ["0"]
    problems = [problem for card in cards for problem in problems_of({"hardware": card})]
    problems += problems_of(config | {"hardware": "this"})
    if not all(number.isdecimal() for number in numbers):
        problems.append(f"devices is {devices!r}: type a number, or several such as --devices=1,2,8")
    elif any(len(number) > 9 or int(number) > layouts.MOST_DEVICES for number in numbers):
        problems.append(f"devices is {devices!r}: set each number to at most {layouts.MOST_DEVICES}")
    if len(cards) > 1 and not plan:
        problems.append(f"hardware is {hardware!r}: several devices are compared by a plan: set --plan=True")
    if (device_memory_gb or device_tflops) and (len(cards) > 1 or cards[0] in ("this", "cpu")):
        problems.append(
            "device_memory_gb and device_tflops describe a card that is otherwise like a listed card: set "
            "--hardware= to this card, such as --hardware=4090 for a card without NVLink"
        )
    if not (plan or tune or estimate or estimate_world_size):
        if cards != ["this"] and len(cards) == 1 and not (device_memory_gb or device_tflops):
            problems.append(
                f"hardware is {hardware!r}, but bench.py measures this machine: to predict, set --plan=True"
            )
        if devices:
            problems.append(
                f"devices is {devices!r}: to predict, set --plan=True; to measure N processes, set --nproc=N"
            )
    if (device_memory_gb or device_tflops) and not plan:
        problems.append("device_memory_gb and device_tflops are for a plan: set --plan=True")
    if [comm, bool(sweep), plan, tune].count(True) > 1:
        problems.append("comm, sweep, plan and tune are separate reports: set one of them")
    if not Path(json_path).absolute().parent.is_dir():
        problems.append(f"json_path is {json_path!r}: no such folder")
    elif json_path and (
        Path(json_path).is_dir() or not os.access(Path(json_path).absolute().parent, os.W_OK)
    ):
        problems.append(f"json_path is {json_path!r}: it cannot be written, set a different file")
    report(problems)
    if is_launched:
        start_workers(nproc, __file__)  # the launcher has started the processes: this only checks nproc
    elif comm:
        start_workers(nproc or (torch.cuda.device_count() if where.type == "cuda" else 2), __file__)

    # these settings of train.py, or a config file, choose a model
    chooses_model = re.compile(r"--(n_layer|n_head|n_embd|block_size|batch_size|init_from)=|(?!--)")
    is_default = not any(map(chooses_model.match, sys.argv[1:]))
    is_small = is_default and where.type != "cuda" and {*cards} <= {"this", "cpu"}
    small = SMALL | {"dataset": config.get("dataset", SMALL["dataset"])} if is_small else {}
    work = {name: config.get(name, setting.default) for name, setting in accepted.items()}
    work |= small | {"nproc": processes} | ({"layout": "manual"} if plan or tune else {})
    work = normalized(work)
    is_random = not real_data or ("dataset" not in config and work["dataset"] not in prepared_datasets())
    if is_random:
        work["vocab_size"] = work["vocab_size"] or (65 if is_small else GPT2_VOCAB)
    if is_default and where.type == "cuda":  # GPT-2 124M, with the micro-batch that fills the GPU
        work["batch_size"] = memory.largest_micro_batch(
            plan_for(processes, max(1, work["islands"]), cards[0]), torch.cuda.mem_get_info(where)[1] / 1e9
        )
    if estimate or estimate_world_size:
        wanted = plan_for(estimate_world_size or processes, max(1, work["islands"]), cards[0])
        say(
            f"estimated GB per rank, with world size {wanted.world_size} and micro-batches of "
            f"{wanted.micro_batch}:"
        )
        for name, gb in memory.memory_estimate(wanted).items():
            say(f"  {name:12} {gb:8.3f}")
    if estimate_world_size:
        sys.exit()
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = (re.findall(r"model name\s*: (.+)", cpuinfo) or [where.type])[0]
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else cpu
    cores = len(own_cores())
    result = {"machine": {"device": name, "cores": cores, "torch": torch.__version__}}
    say(f"{name}, {cores} cores, torch {torch.__version__}")
    if comm:
        result["comm"] = measure_collectives(device, work["backend"], work["dist_timeout_s"])
except (ValueError, DistError) as e:
    fail(str(e))
store = None
if rank == 0 and is_launched and not comm and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
    # serve the store for all launches: a port that each launch opened again might be in use by then
    store = connect_store(work["dist_timeout_s"], serves=True)
with TemporaryDirectory(prefix="isogpt-bench-", ignore_cleanup_errors=True) as folder:
    scratch = Path(folder)
    try:
        if is_random and not comm:
            say(f"random tokens, since {work['dataset']} is not prepared" if real_data else "random tokens")
            length, ids = max(2**20, 2 * work["block_size"]), min(work["vocab_size"], 50257)
            for split in ("train", "val"):
                np.random.default_rng(0).integers(0, ids, length, dtype=np.uint16).tofile(
                    scratch / f"{split}.bin"
                )
            work["dataset"] = folder
        if sweep:
            result["sweep"] = run_sweep()
        elif plan:
            result["plan"] = run_plan()
        elif tune:
            result["tune"] = run_tune()
        elif not comm:
            result["report"] = run_report()
    except ValueError as e:
        fail(str(e))
    finally:
        store = None  # closes the port
if json_path and rank == 0:
    write_whole(Path(json_path), json.dumps(result, indent=2) + "\n")
tried = result.get("sweep") or result.get("tune", {}).get("tried", [])
if rank == 0 and tried and all("problem" in run for run in tried):
    fail("no launch succeeded")
