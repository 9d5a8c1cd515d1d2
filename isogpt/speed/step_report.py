"""bench.py's report on one launch: the parts of a step, and how far it is from the limits of the device."""

import shutil
from pathlib import Path

from isogpt.common.console import aligned, count_text, print_result
from isogpt.speed.devices import fraction_of_peak, measured_matmul
from isogpt.speed.launches import Launches
from isogpt.speed.workload import Workload
from isogpt.training.precision import set_numerics

# files that a launch with a profile may write, and where to look at them. memory.pickle: on a GPU
VIEWERS = {"trace.json": "ui.perfetto.dev", "memory.pickle": "pytorch.org/memory_viz"}


def report_step(launches: Launches, workload: Workload, steps: int) -> dict:
    """
    Launch train.py (all ranks); print the parts of a step and how close it is to the device's peak.

    Raises:
        ValueError: train.py failed.
    """
    micro_batches = workload.micro_batches(workload.processes)
    settings = workload.settings | {"gradient_accumulation_steps": micro_batches}
    run = launches.run(settings, steps, show=True)
    if "problem" in run:
        raise ValueError(f"train.py failed: {run['problem']}")
    if launches.rank > 0:
        return {}
    peak = run["peak_flops"]  # in place of a data sheet, train.py has measured a matmul
    device = workload.device
    if device.type == "cuda":
        set_numerics(device, run["dtype"], False)
        peak = run["world_size"] * measured_matmul(device, run["dtype"])
    run |= {"matmul_flops": peak, "matmul_ratio": fraction_of_peak(run["flops_per_s"], peak)}
    print_step(run, steps)
    if settings["profile"]:
        run["operators"] = keep_profile(Path(run["settings"]["out_dir"]))
    return run


def print_step(run: dict, steps: int) -> None:
    """Print the figures of a launch as a table."""
    processes = count_text(run["world_size"], "process", "processes")
    tokens = f"{run['tokens_per_step']:,} tokens on {processes}, {run['dtype']}"
    print_result(f"\n{count_text(steps, 'step')} of {tokens}; medians:")
    rows = [("tokens/s", f"{run['tokens_per_s']:,.0f}", "")]
    rows += [(name, shown(mean), shown(run["max"][name])) for name, mean in run["mean"].items()]
    tflops = run["matmul_flops"] and run["matmul_flops"] / 1e12
    rows += [
        ("MFU", shown(run["mfu"], ".1%"), ""),
        ("matmul, TFLOP/s", shown(tflops, ".3g"), ""),
        ("of which reached", shown(run["matmul_ratio"], ".1%"), ""),
    ]
    names, mean, slowest = zip(*rows, strict=True)
    print_result("\n".join(aligned({"": names, "mean of the ranks": mean, "slowest rank": slowest})))


def keep_profile(out: Path) -> str:
    """Copy the files of a profile to the working directory, and print and return its table of operators."""
    for name, viewer in VIEWERS.items():
        if (out / name).exists():
            print_result(f"wrote {shutil.copy(out / name, f'bench_{name}')} (open it in https://{viewer})")
    operators = (out / "operators.txt").read_text()
    print_result(operators)
    return operators


def shown(value: float | None, form: str = ".2f") -> str:
    """Format a figure; n/a if it is not known."""
    return "n/a" if value is None else format(value, form)
