"""bench.py's report on one launch: the parts of a step, and how far it is from the limits of the device."""

import os
import shutil
from pathlib import Path

import torch

from isogpt.common.console import count_text
from isogpt.launch.network import own_cores
from isogpt.parallel.mesh import bubble_formula
from isogpt.parallel.shares import share_of
from isogpt.speed.devices import MOST_MEASUREMENTS, fraction_of_peak, measured_matmul
from isogpt.speed.launches import Launches
from isogpt.training.precision import is_emulated, set_numerics

# files that a launch with a profile may write, and where to look at them. memory.pickle: on a GPU
VIEWERS = {"trace.json": "ui.perfetto.dev", "memory.pickle": "pytorch.org/memory_viz"}


def report_step(launches: Launches, settings: dict, steps: int, device: torch.device) -> dict:
    """
    Launch train.py (all ranks); print the parts of a step and how close it is to the device's peak.

    Args:
        settings: train.py's.

    Raises:
        ValueError: train.py failed.
    """
    runs = [launches.run(settings, steps, show=True)]
    if settings["nproc"] > 1 and settings["grad_sync"] != "never" and "problem" not in runs[0]:
        if launches.rank == 0:
            print("\nonce more, without communication (grad_sync never)", flush=True)
        runs.append(launches.run(settings | {"grad_sync": "never"}, steps))
    if "problem" in runs[-1]:
        raise ValueError(f"train.py failed: {runs[-1]['problem']}")
    if launches.rank > 0:
        return {}
    run, peak = runs[0], 0.0
    for _ in range(MOST_MEASUREMENTS):
        peak = max(peak, matmul_peak(run, device))
        if run["flops_per_s"] <= peak:  # otherwise, other programs use the machine now
            break
    reached = fraction_of_peak(run["flops_per_s"], peak)
    report = {"run": run, "split_ms": split_step(*runs), "matmul_flops": peak, "matmul_ratio": reached}
    print_step(report, steps)
    if launches.profile:
        report["operators"] = keep_profile(Path(run["settings"]["out_dir"]))
    return report


def print_step(report: dict, steps: int) -> None:
    """Print a report of a step as a table."""
    run = report["run"]
    processes = count_text(run["processes"], "process", "processes")
    tokens = f"{run['tokens_a_step']:,} tokens on {processes}, {run['dtype']}"
    print(f"\n{count_text(steps, 'step')} of {tokens}; medians:")
    print(f"  {'':13} {'mean of the ranks':>18} {'slowest rank':>13}")
    print(f"  {'tokens/s':13} {run['tokens_per_s']:18,.0f}")
    for name, ms in {"ms per step": run["step_ms"], **report["split_ms"]}.items():
        print(f"  {name:13} {shown(ms['mean'], '.2f'):>18} {shown(ms['max'], '.2f'):>13}")
    print(f"  {'memory':13} {run['memory_gb']['mean']:18.2f} {run['memory_gb']['max']:13.2f}  GB, peak")
    print(f"  {'MFU':13} {shown(run['mfu'], '.1%'):>18}")
    if "pipeline" in run["spans_ms"]:
        print(f"  {'bubble share':13} {shown_bubble(run):>18}  of the pipeline's time (by formula)")
    tflops, reached = report["matmul_flops"] / 1e12, shown(report["matmul_ratio"], ".1%")
    print(f"  {'matmul peak':13} {tflops:18.3g}  TFLOP/s, measured, of which the step reaches {reached}")


def keep_profile(out: Path) -> str:
    """Copy the files of a profile to the working directory, and print and return its table of operators."""
    for name, viewer in VIEWERS.items():
        if (out / name).exists():
            print(f"wrote {shutil.copy(out / name, f'bench_{name}')} (open it in https://{viewer})")
    operators = (out / "operators.txt").read_text()
    print(operators)
    return operators


def matmul_peak(run: dict, device: torch.device) -> float:
    """Measure the FLOP/s of large matmuls on the devices of a run; the processes of a machine share a CPU."""
    # see devices.peak_flops
    dtype = "float32" if is_emulated(run["dtype"], device) else run["dtype"]
    set_numerics(device, dtype, False)
    if device.type != "cpu":
        return run["processes"] * measured_matmul(device, dtype)
    torch.set_num_threads(len(own_cores()))  # torchrun sets one thread
    machines = run["processes"] // int(os.environ.get("LOCAL_WORLD_SIZE", run["processes"]))
    return machines * measured_matmul(device, dtype)


# ------------------------------------------------------------------------------------------------------------
# the parts of a step


def split_step(run: dict, silent: dict | None = None) -> dict[str, dict[str, float | None]]:
    """
    Return the parts of a step in milliseconds, each as the mean over the ranks and the slowest rank's.

    The slowest rank's parts need not add up to the slowest step. In a pipeline, a rank computes in `stages`
    and waits in the bubble.

    Args:
        silent: the same launch with grad_sync 'never', whose backward pass does not wait for other ranks. The
            difference is the exposed communication, which no computation hides. The collectives of tp, cp and
            ep, and what is reduced after the backward pass, are also exposed.
    """
    by_kind = {kind: split_of(run, silent, kind) for kind in ("mean", "max")}
    return {name: {kind: by_kind[kind][name] for kind in by_kind} for name in by_kind["mean"]}


def split_of(run: dict, silent: dict | None, kind: str) -> dict[str, float | None]:
    """`split_step` for the mean over the ranks ('mean') or for the slowest rank ('max')."""
    ms = spans_of(run, kind)
    rest = run["step_ms"][kind] - ms["norm"] - ms["optimizer"]
    exposed, collectives = None, {}
    if silent:
        silent_ms, collectives = spans_of(silent, kind), silent["collectives_ms"]
        exposed = silent_ms.get("reduce", 0.0) + sum(collectives.values())
        # a slower optimizer in one of the launches is not communication
        silent_rest = silent["step_ms"][kind] - silent_ms["norm"] - silent_ms["optimizer"]
        exposed += max(0.0, rest - silent_rest)
        ms["backward"] = min(ms.get("backward", 0.0), silent_ms.get("backward", 0.0))
    parts = {"data wait": ms["data"]}
    for name in ("stages",) if "pipeline" in ms else ("forward", "backward"):
        parts[name] = max(0.0, ms[name] - collectives.get(name, 0.0))
    if "pipeline" in ms:
        parts["bubble"] = max(0.0, ms["pipeline"] - ms["stages"])
    parts |= {"exposed comm": exposed, "optimizer": ms["norm"] + ms["optimizer"]}
    parts["other"] = max(0.0, run["step_ms"][kind] - sum(value or 0.0 for value in parts.values()))
    return parts


def spans_of(run: dict, kind: str) -> dict[str, float]:
    """What train.py's clock measured."""
    return {name: span[kind] for name, span in run["spans_ms"].items()}


def shown_bubble(run: dict) -> str:
    """
    The share of a pipeline in which a rank waits: the mean over the ranks, and by formula; n/a without a
    pipeline.
    """
    c, spans = run["settings"], run["spans_ms"]
    if "pipeline" not in spans:
        return "n/a"
    data_size = run["processes"] // (c["pp"] * c["cp"] * c["tp"])
    sequences = c["gradient_accumulation_steps"] * c["batch_size"]
    share = share_of(sequences, 0, data_size, run["micro_batch"], c["pp"])
    formula = bubble_formula(c["pp"], share.micro_steps, c["pp_schedule"])
    measured = 1 - spans["stages"]["mean"] / spans["pipeline"]["mean"]
    return f"{measured:.1%} ({shown(formula, '.1%')})"


def shown(value: float | None, form: str) -> str:
    """Format a figure; n/a if it is not known."""
    return "n/a" if value is None else format(value, form)
