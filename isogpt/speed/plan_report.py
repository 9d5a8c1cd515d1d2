"""bench.py's plans: the layouts of a workload, predicted for devices that need not be here, or measured."""

import sys
from itertools import chain, product

from isogpt.common.console import aligned, count_text, duration, print_result
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.counts import flops_per_token
from isogpt.speed.devices import changed_hardware, hardware_of
from isogpt.speed.launch_reports import measure
from isogpt.speed.launches import Launches
from isogpt.speed.planner import check_fits, ranked, reason, typed
from isogpt.speed.prediction import Prediction
from isogpt.speed.workload import Workload
from isogpt.training.budget import limits_of
from isogpt.training.settings import check_training

ROWS = 18  # of the table of layouts


def report_plan(workload: Workload, counts: list[int], cards: list[str]) -> dict:
    """
    Print the layouts on a number of devices of a kind, or with several numbers or kinds the fastest on each,
    and the command of the fastest.
    """
    rankings = {f"{n} x {card}": rank(workload, n, card) for n, card in product(counts, cards)}
    fastest = print_rankings(rankings)
    length = length_text(workload.settings | fastest.plan.layout_settings(), fastest.total_s)
    command = print_command(workload, fastest, f"predicted{length}")
    plans = [as_record(name, step) for name, ranking in rankings.items() for step in sorted(chain(*ranking))]
    return {"plans": plans, "command": command}


def tune(workload: Workload, launches: Launches, card: str) -> dict:
    """Measure the best few layouts for the launched processes; print the fastest layout's command."""
    ranking = rank(workload, workload.processes, card)
    print_rankings({f"{workload.processes} x {card}": ranking})
    # of the best layout, two other schedules, recomputations or micro-batches too
    tried = [*map(min, ranking[:4]), *ranking[0][1:3]]
    tried = [step for step in tried if not step.problem]
    layouts = [step.plan.layout_settings() for step in tried]
    varied = [name for name in layouts[0] if len({layout[name] for layout in layouts}) > 1]
    print_result("\nmeasured:")
    launched = [workload.settings | layout for layout in layouts]
    runs = measure(launches, launched, varied, steps=5)
    speeds = [run.get("tokens_per_s", 0.0) for run in runs]
    fastest = tried[speeds.index(max(speeds))]
    return {"tried": runs, "command": print_command(workload, fastest, f"{max(speeds):,.0f} tokens/s")}


def rank(workload: Workload, n: int, card: str) -> list[list[Prediction]]:
    """
    Rank the layouts on n devices of a kind: a key of devices.HARDWARE, or 'this'.

    Raises:
        ValueError: the settings do not fit each other, the data or the devices.
    """
    config = workload.config
    on_machine = min(n, config["per_node"])
    check_training(workload.settings | {"out_dir": "out", "gradient_accumulation_steps": 1})
    wanted = workload.plan(n, card, machines=n // on_machine)
    usual = hardware_of(card, workload.device, wanted.dtype, on_machine)
    changes = config["network"], config["device_memory_gb"], config["device_tflops"]
    return ranked(wanted, changed_hardware(usual, *changes))


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
    shown = [(name, step) for name, ranking in rankings.items() for step in map(min, ranking[:most])]
    # those that do not fit are last, smallest first
    shown.sort(key=lambda row: (-row[1].tokens_per_s, row[1].gb))
    rows = [row_of(name, step, rankings[name][0][0]) for name, step in shown]
    print_result("\n  ".join(["predicted:", *aligned(rows)]))
    fastest = shown[0][1]
    check_fits(fastest)
    return fastest


def row_of(devices: str, step: Prediction, best: Prediction) -> dict[str, str]:
    """A row of the table: a layout, its speed, and why it is slower than the best on these devices."""
    plan, why = step.plan, reason(step, best)
    flops = step.tokens_per_s * flops_per_token(plan.counts, GPTConfig(**plan.model_args))
    speeds = {
        "ms/step": f"{step.total_s * 1e3:,.1f}",
        "tokens/s": f"{step.tokens_per_s:,.0f}",
        "TFLOP/s": f"{flops / plan.world_size / 1e12:.1f}",
    }
    if step.problem:
        speeds = dict.fromkeys(speeds, "")
    settings = typed(plan) + (f"  ({why})" if why else "")
    row = {"devices": devices, "sequences": f"{plan.sequences:,}"} | speeds
    return row | {"GB": f"{step.gb:.1f}", "settings (why they are slower)": settings}


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


def as_record(devices: str, step: Prediction) -> dict:
    """A prediction for the JSON file."""
    record = {"devices": devices} | vars(step) | {"settings": step.plan.layout_settings()}
    del record["plan"]
    return record | {"total_s": None if step.problem else step.total_s}
