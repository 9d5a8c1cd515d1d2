"""
bench.py's reports: the parts of a step, a table of several launches, plans, whose layouts are predicted for
devices that need not be here, or measured, and bandwidth and latency of the collectives.
"""

import math
import shutil
import sys
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from isogpt.common.console import aligned, count_text, duration, print_result
from isogpt.common.torch_versions import all_gather_single, reduce_scatter_single
from isogpt.lab.combinations import points_of, typed
from isogpt.launch.process_group import connect_ranks, leave_process_group
from isogpt.launch.together import gather_number
from isogpt.nn.counts import flops_per_token
from isogpt.speed.devices import changed_hardware, fraction_of_peak, hardware_of, measured_matmul
from isogpt.speed.launches import Launches
from isogpt.speed.planner import check_fits, flags_of, ranked, reason
from isogpt.speed.prediction import Prediction
from isogpt.speed.workload import Workload
from isogpt.training.budget import limits_of
from isogpt.training.precision import set_numerics
from isogpt.training.settings import check_training

ROWS = 18  # of the table of layouts
ASSUMED = " (assumed)"  # see Hardware.is_compared
MESSAGE_SIZES = [2**k for k in range(10, 27, 2)]  # bytes of the messages of collectives


def shown(figure: float | None, form: str = ".2f") -> str:
    """Format a figure; n/a if it is not known."""
    return "n/a" if figure is None else format(figure, form)


def print_table(rows: list[dict[str, str]]) -> None:
    """Print rows, {heading: cell} each."""
    print_result("\n".join(aligned(rows)))


# ------------------------------------------------------------------------------------------------------------
# launches


def report_step(launches: Launches, workload: Workload, steps: int) -> dict:
    """
    Launch train.py (all ranks); print the parts of a step and how close it is to the device's peak.

    Raises:
        ValueError: train.py failed.
    """
    settings = workload.settings | workload.batch_of(workload.processes)
    run = launches.run(settings, steps, show=True)
    if "problem" in run:
        raise ValueError(f"train.py failed: {run['problem']}")
    if launches.rank > 0:
        return {}
    ranks, dtype = run["world_size"], run["dtype"]
    peak = run["peak_flops"]  # in place of a data sheet, train.py has measured a matmul
    if workload.device.type == "cuda":
        set_numerics(workload.device, dtype, False)
        peak = ranks * measured_matmul(workload.device, dtype)
    ratio = fraction_of_peak(run["flops_per_s"], peak)
    run |= {"matmul_flops": peak, "matmul_ratio": ratio}
    processes = count_text(ranks, "process", "processes")
    tokens = f"{run['tokens_per_step']:,} tokens on {processes}, {dtype}"
    print_result(f"\n{count_text(steps, 'step')} of {tokens}; medians:")
    cells = {"tokens/s": f"{run['tokens_per_s']:,.0f}"}
    for name, mean in run["mean"].items():
        cells[name] = shown(mean)
    cells["MFU"] = shown(run["mfu"], ".1%")
    cells["matmul, TFLOP/s"] = shown(peak and peak / 1e12, ".3g")
    cells["of which reached"] = shown(ratio, ".1%")
    rows = []
    for name, mean in cells.items():
        slowest = shown(run["max"][name]) if name in run["max"] else ""
        rows.append({"": name, "mean of the ranks": mean, "slowest rank": slowest})
    print_table(rows)
    if workload.config["profile"]:
        out = Path(run["settings"]["out_dir"])
        shutil.copy(out / "trace.json", "bench_trace.json")
        run["operators"] = (out / "operators.txt").read_text()
        print_result(f"wrote bench_trace.json, for https://ui.perfetto.dev\n{run['operators']}")
    return run


def run_sweep(launches: Launches, workload: Workload, lists: dict, steps: int) -> list[dict]:
    """
    Launch every combination of the listed values, see `measure`. The global batch is the same in all, unless
    a list changes it or the scaling is weak.
    """
    # a number of micro-batches that divides evenly over every number of processes
    n = math.lcm(*map(int, lists.get("nproc", [workload.processes])))
    launched = []
    for point in points_of(lists):
        settings = workload.settings | point
        if workload.config["weak"]:
            n = int(settings["nproc"])
        launched.append(settings | workload.batch_of(n) | point)
    return measure(launches, launched, list(lists), steps)


def measure(launches: Launches, launched: list[dict], varied: list[str], steps: int) -> list[dict]:
    """
    Launch train.py with each of these settings, print a table of the launches that did not fail, and return
    all.

    Args:
        varied: names of the settings that differ.

    Raises:
        ValueError: all failed.
    """
    runs = []
    for settings in launched:
        point = {name: settings[name] for name in varied}
        run = {"point": point} | launches.run(settings, steps)
        runs.append(run)
        outcome = run.get("problem") or f"{run['tokens_per_s']:,.0f} tokens/s"
        print_result(f"{' '.join(typed(point))}: {outcome}")
    measured = [run for run in runs if "problem" not in run]
    if not measured:
        raise ValueError("no launch succeeded")
    print_result("")
    print_table([row_of_launch(run, measured[0]) for run in measured])
    return runs


def row_of_launch(run: dict, first: dict) -> dict[str, str]:
    """A row of the table of launches. The speed-up is relative to the first launch."""
    speed_up = run["tokens_per_s"] / first["tokens_per_s"]
    added = run["world_size"] / first["world_size"]
    row = {name: str(value) for name, value in run["point"].items()}
    row["tokens/step"] = f"{run['tokens_per_step']:,}"
    row["tokens/s"] = f"{run['tokens_per_s']:,.0f}"
    for name in ("ms per step", "exposed comm", "bubble"):
        row[name] = shown(run["mean"].get(name))
    row["memory, GB"] = shown(run["max"]["memory, GB"])
    row["MFU"] = shown(run["mfu"], ".1%")
    row["speed-up"] = f"{speed_up:.2f}x"
    row["efficiency"] = f"{speed_up / added:.0%}"
    return row


# ------------------------------------------------------------------------------------------------------------
# plans


def report_plan(workload: Workload, counts: list[int], cards: list[str]) -> dict:
    """
    Print the layouts on a number of devices of a kind, or with several numbers or kinds the fastest on each,
    and the command of the fastest.
    """
    rankings = {}
    for n, card in product(counts, cards):
        rankings |= rank(workload, n, card)
    fastest = print_rankings(rankings)
    length = length_text(workload.settings | fastest.plan.layout_settings(), fastest.total_s)
    command = print_command(workload, fastest, f"predicted{length}")
    plans = []
    for devices, ranking in rankings.items():
        for step in sorted(chain(*ranking)):
            record = {"devices": devices} | vars(step)
            plan = record.pop("plan")
            record["settings"] = plan.layout_settings()
            if step.problem:
                record["total_s"] = None
            plans.append(record)
    return {"plans": plans, "command": command}


def tune(workload: Workload, launches: Launches, card: str) -> dict:
    """Measure the best few layouts for the launched processes; print the fastest layout's command."""
    rankings = rank(workload, workload.processes, card)
    print_rankings(rankings)
    (ranking,) = rankings.values()
    # of the best layout, two other schedules, recomputations or micro-batches too
    tried = [steps[0] for steps in ranking[:4]] + ranking[0][1:3]
    tried = [step for step in tried if not step.problem]
    layouts = [step.plan.layout_settings() for step in tried]
    varied = [name for name in layouts[0] if len({layout[name] for layout in layouts}) > 1]
    print_result("\nmeasured:")
    launched = [workload.settings | layout for layout in layouts]
    runs = measure(launches, launched, varied, steps=5)
    speeds = [run.get("tokens_per_s", 0.0) for run in runs]
    most = max(speeds)
    command = print_command(workload, tried[speeds.index(most)], f"{most:,.0f} tokens/s")
    return {"tried": runs, "command": command}


def rank(workload: Workload, n: int, card: str) -> dict[str, list[list[Prediction]]]:
    """
    Rank the layouts on n devices of a kind: a key of devices.HARDWARE, or 'this'.

    Returns:
        {devices: predictions of each layout, ranked}.

    Raises:
        ValueError: the settings do not fit each other, the data or the devices.
    """
    config = workload.config
    on_machine = min(n, config["per_node"])
    check_training(workload.settings | {"out_dir": "out", "gradient_accumulation_steps": 1})
    wanted = workload.plan(n, card, machines=n // on_machine)
    usual = hardware_of(card, workload.device, wanted.dtype, on_machine)
    sheet = config["device_memory_gb"], config["device_tflops"], config["device_bandwidth"]
    hw = changed_hardware(usual, config["network"], *sheet)
    return {f"{n} x {card}{'' if hw.is_compared else ASSUMED}": ranked(wanted, hw)}


def print_rankings(rankings: dict[str, list[list[Prediction]]]) -> Prediction:
    """
    Print a table of the layouts on some devices, or of the fastest on each of several, fastest first. Returns
    the fastest.

    Args:
        rankings: {devices: predictions of each layout, ranked}.

    Raises:
        ValueError: no layout fits.
    """
    most = ROWS if len(rankings) == 1 else 1
    best = []
    for devices, ranking in rankings.items():
        best += [(devices, steps[0]) for steps in ranking[:most]]
    # those that do not fit are last, smallest first
    best.sort(key=lambda row: (-row[1].tokens_per_s, row[1].gb))
    rows = [row_of_plan(devices, step, rankings[devices][0][0]) for devices, step in best]
    heading = "predicted:"
    if any(ASSUMED in devices for devices in rankings):
        heading = "predicted; (assumed): no run was compared with what is predicted for this card:"
    print_result("\n  ".join([heading, *aligned(rows)]))
    fastest = best[0][1]
    check_fits(fastest)
    return fastest


def row_of_plan(devices: str, step: Prediction, best: Prediction) -> dict[str, str]:
    """A row of the table: a layout, its speed, and why it is slower than the best on these devices."""
    plan, why = step.plan, reason(step, best)
    model = plan.counts.model_class.config_class(**plan.model_args)
    flops = step.tokens_per_s * flops_per_token(plan.counts, model)
    row = {"devices": devices, "sequences": f"{plan.sequences:,}"}
    row |= dict.fromkeys(("ms/step", "tokens/s", "TFLOP/s"), "")
    if not step.problem:
        row["ms/step"] = f"{step.total_s * 1e3:,.1f}"
        row["tokens/s"] = f"{step.tokens_per_s:,.0f}"
        row["TFLOP/s"] = f"{flops / plan.world_size / 1e12:.1f}"
    row["GB"] = f"{step.gb:.1f}"
    row["settings (why they are slower)"] = flags_of(plan) + (f"  ({why})" if why else "")
    return row


def length_text(settings: dict, step_s: float) -> str:
    """How long the whole run takes; "" if that is not set, or in epochs of data that a plan does not read."""
    limits = limits_of(settings, train_tokens=0)
    if settings["max_tokens"].endswith("epochs") or not limits.max_iters:
        return ""
    steps = int(limits.max_iters) + 1  # as in nanoGPT
    return f", {count_text(steps, 'step')} in {duration(steps * step_s)} without evaluations and checkpoints"


def print_command(workload: Workload, fastest: Prediction, speed: str) -> str:
    """Print and return the command that trains with the fastest layout."""
    command = workload.command(fastest.plan, sys.argv[1:])
    print_result(f"\nthe fastest, {speed}:\n{command}")
    return command


# ------------------------------------------------------------------------------------------------------------
# collectives


def measure_collectives(device: str, settings: dict) -> list[dict]:
    """
    Measure each collective with each message size (all ranks) and print a table. As in nccl-tests, a message
    is the input or the output, whichever is larger, and bus bandwidth is what each link carries.

    Returns:
        {operation, bytes, ranks, us, gb_per_s} for each measurement.

    Raises:
        ValueError: there is only one process, or the others cannot be reached.
    """
    timeout_s = settings["dist_timeout_s"]
    ranks = connect_ranks(device, settings["backend"], timeout_s)
    n = ranks.world_size
    if n == 1:
        raise ValueError("comm needs two processes: set --nproc=2, and --device=cpu if there is one GPU")
    dist.init_process_group(ranks.backend, **ranks.group_options(timeout_s))
    rows, table = [], []
    others = (n - 1) / n
    for size in MESSAGE_SIZES:
        part = torch.zeros(size // 4 // n, device=ranks.device)
        whole = part.repeat(n)
        other = torch.zeros_like(whole)
        line = {"message": f"{size / 1024:,.0f} KB"}
        # factor: bytes that each link carries per byte of the message
        for name, factor, function, *arguments in (
            ("all-reduce", 2 * others, dist.all_reduce, whole),
            ("all-gather", others, all_gather_single, whole, part),
            ("reduce-scatter", others, reduce_scatter_single, part, whole),
            ("broadcast", 1.0, dist.broadcast, whole, 0),
            ("all-to-all", others, dist.all_to_all_single, other, whole),
        ):
            seconds = mean_seconds(ranks.device, function, *arguments)
            speed = factor * whole.nbytes / seconds / 1e9
            row = {"operation": name, "bytes": whole.nbytes, "ranks": n}
            rows.append(row | {"us": seconds * 1e6, "gb_per_s": speed})
            line[name] = f"{speed:.3f}"
        table.append(line)
    latencies = {row["operation"]: f"{row['us']:.1f}" for row in rows[:5]}
    table.append({"message": "1 KB, in µs"} | latencies)
    print_result(f"{n} processes on {ranks.device.type}, {ranks.network}; bus bandwidth in GB/s:")
    print_table(table)
    leave_process_group()
    return rows


def mean_seconds(device: torch.device, function: Callable, *arguments: object) -> float:
    """
    Return the slowest rank's mean time of a call, over as many calls as fit into 0.1 seconds (all ranks).
    """
    timer = Timer("function(*arguments)", globals=locals(), num_threads=torch.get_num_threads())
    count = 1  # after two calls that are not timed
    for _ in range(2):  # the first time says how many calls the second measures
        mean = timer.timeit(count).mean
        slowest = gather_number(mean, device).max().item()
        count = int(min(max(0.1 / slowest, 1), 200))
    return slowest
