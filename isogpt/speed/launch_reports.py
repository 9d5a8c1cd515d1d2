"""bench.py's launches of train.py: a report on the parts of a step, or a table of several launches."""

import math
import shutil
from pathlib import Path

from isogpt.common.console import aligned, count_text, print_result
from isogpt.lab.combinations import points_of, typed
from isogpt.speed.devices import fraction_of_peak, measured_matmul
from isogpt.speed.launches import Launches
from isogpt.speed.workload import Workload
from isogpt.training.precision import set_numerics


def report_step(launches: Launches, workload: Workload, steps: int) -> dict:
    """
    Launch train.py (all ranks); print the parts of a step and how close it is to the device's peak.

    Raises:
        ValueError: train.py failed.
    """
    run = launches.run(workload.settings | workload.batch_of(workload.processes), steps, show=True)
    if "problem" in run:
        raise ValueError(f"train.py failed: {run['problem']}")
    if launches.rank > 0:
        return {}
    peak = run["peak_flops"]  # in place of a data sheet, train.py has measured a matmul
    if workload.device.type == "cuda":
        set_numerics(workload.device, run["dtype"], False)
        peak = run["world_size"] * measured_matmul(workload.device, run["dtype"])
    run |= {"matmul_flops": peak, "matmul_ratio": fraction_of_peak(run["flops_per_s"], peak)}
    processes = count_text(run["world_size"], "process", "processes")
    tokens = f"{run['tokens_per_step']:,} tokens on {processes}, {run['dtype']}"
    print_result(f"\n{count_text(steps, 'step')} of {tokens}; medians:")
    rows = [("tokens/s", f"{run['tokens_per_s']:,.0f}", "")]
    rows += [(name, shown(mean), shown(run["max"][name])) for name, mean in run["mean"].items()]
    rows += [("MFU", shown(run["mfu"], ".1%"), "")]
    rows += [("matmul, TFLOP/s", shown(peak and peak / 1e12, ".3g"), "")]
    rows += [("of which reached", shown(run["matmul_ratio"], ".1%"), "")]
    headings = "", "mean of the ranks", "slowest rank"
    print_result("\n".join(aligned([dict(zip(headings, row, strict=True)) for row in rows])))
    if workload.config["profile"]:
        out = Path(run["settings"]["out_dir"])
        shutil.copy(out / "trace.json", "bench_trace.json")
        run["operators"] = (out / "operators.txt").read_text()
        print_result(f"wrote bench_trace.json (see https://ui.perfetto.dev)\n{run['operators']}")
    return run


def shown(value: float | None, form: str = ".2f") -> str:
    """Format a figure; n/a if it is not known."""
    return "n/a" if value is None else format(value, form)


def run_sweep(launches: Launches, workload: Workload, lists: dict, steps: int) -> list[dict]:
    """
    Launch every combination of the listed values, see `measure`. The global batch is the same in all, unless
    a list changes it or the scaling is weak.
    """
    # a number of micro-batches that divides evenly over every number of processes
    even = math.lcm(*map(int, lists.get("nproc", [workload.processes])))
    launched = []
    for point in points_of(lists):
        settings = workload.settings | point
        n = int(settings["nproc"]) if workload.config["weak"] else even
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
    print_result("\n".join(["", *aligned([row_of(run, measured[0]) for run in measured])]))
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
