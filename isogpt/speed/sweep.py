"""bench.py's launches of train.py with several settings, as rows of a table."""

import math

from isogpt.common import console
from isogpt.lab.combinations import points_of, typed
from isogpt.speed.launches import Launches
from isogpt.speed.step_report import shown
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
        settings = workload.settings | point
        n = int(settings["nproc"]) if workload.config["weak"] else even
        launched.append(settings | {"gradient_accumulation_steps": workload.micro_batches(n)} | point)
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
        rows = [row_of(run, measured[0]) for run in measured]
        columns = {heading: [row[heading] for row in rows] for heading in rows[0]}
        console.print_result("\n".join(["", *console.aligned(columns)]))
    return runs


def row_of(run: dict, first: dict) -> dict[str, str]:
    """A row of the table: {heading: cell}. The speed-up is relative to the first launch."""
    speed_up = run["tokens_per_s"] / first["tokens_per_s"]
    return {name: str(value) for name, value in run["point"].items()} | {
        "tokens/step": f"{run['tokens_per_step']:,}",
        "tokens/s": f"{run['tokens_per_s']:,.0f}",
        **{name: shown(run["mean"].get(name)) for name in ("ms per step", "exposed comm", "bubble")},
        "memory, GB": shown(run["max"]["memory, GB"]),
        "MFU": shown(run["mfu"], ".1%"),
        "speed-up": f"{speed_up:.2f}x",
        "efficiency": f"{speed_up / run['world_size'] * first['world_size']:.0%}",
    }
