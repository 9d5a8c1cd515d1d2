"""bench.py's launches of train.py with several settings, as rows of a table."""

import math

from isogpt.common import console
from isogpt.lab.combinations import points_of, typed
from isogpt.speed.launches import Launches
from isogpt.speed.step_report import shown, shown_bubble, split_step
from isogpt.speed.workload import Workload


def run_sweep(launches: Launches, workload: Workload, lists: dict[str, list[str]], steps: int) -> list[dict]:
    """
    Launch every combination of the listed values, see `measure`. The global batch is the same in all, unless
    a list changes it or the scaling is weak.
    """
    # a number of micro-batches that divides evenly over every number of processes
    even = math.lcm(*(int(n) for n in lists.get("nproc", [workload.processes])))
    launched = []
    for point in points_of(lists):
        micro_batches = workload.micro_batches(int(point["nproc"]) if workload.weak else even)
        launched.append(workload.settings | {"gradient_accumulation_steps": micro_batches} | point)
    return measure(launches, launched, list(lists), steps)


def measure(launches: Launches, settings_of_each: list[dict], varied: list[str], steps: int) -> list[dict]:
    """
    Launch train.py with each of these settings, print a table of the launches that did not fail, and return
    all.

    Args:
        varied: names of the settings that differ.
    """
    runs = []
    for settings in settings_of_each:
        point = {name: settings[name] for name in varied}
        run = {"point": point} | launches.run(settings, steps)
        runs.append(run)
        outcome = run.get("problem") or f"{run['tokens_per_s']:,.0f} tokens/s"
        console.print_result(f"{' '.join(typed(point))}: {outcome}")
    measured = [run for run in runs if "problem" not in run]
    if measured:
        console.print_result("\n".join(["", *console.aligned(columns_of(measured, varied))]))
    return runs


def columns_of(runs: list[dict], varied: list[str]) -> dict[str, list[str]]:
    """The columns of the table, {heading: cells}. The speed-up is relative to the first launch."""
    speed = runs[0]["tokens_per_s"]
    of_each = speed / runs[0]["processes"]
    return {name: [str(run["point"][name]) for run in runs] for name in varied} | {
        "tokens/step": [f"{run['tokens_a_step']:,}" for run in runs],
        "tokens/s": [f"{run['tokens_per_s']:,.0f}" for run in runs],
        "ms/step": [f"{run['step_ms']['mean']:.2f}" for run in runs],
        "comm ms": [shown(split_step(run)["exposed comm"]["mean"], ".2f") for run in runs],
        "bubble (formula)": [shown_bubble(run) for run in runs],
        "GB": [f"{run['memory_gb']['max']:.2f}" for run in runs],
        "MFU": [shown(run["mfu"], ".1%") for run in runs],
        "speed-up": [f"{run['tokens_per_s'] / speed:.2f}x" for run in runs],
        "efficiency": [f"{run['tokens_per_s'] / run['processes'] / of_each:.0%}" for run in runs],
    }
