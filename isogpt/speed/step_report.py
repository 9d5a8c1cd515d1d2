"""bench.py's report on one launch: the parts of a step, and how far it is from the limits of the device."""

import os
import shutil
from pathlib import Path

import torch

from isogpt.launch.network import own_cores
from isogpt.parallel.mesh import bubble_formula
from isogpt.parallel.shares import share_of
from isogpt.speed.collective_speeds import shown
from isogpt.speed.devices import measured_copy, measured_matmul
from isogpt.speed.launches import Launches
from isogpt.training.precision import set_numerics

# files that a launch with a profile may write, and where to look at them. memory.pickle: on a GPU
VIEWERS = {"trace.json": "ui.perfetto.dev", "memory.pickle": "pytorch.org/memory_viz"}


def report_step(launches: Launches, settings: dict, steps: int, device: torch.device) -> dict:
    """
    Launch train.py (all ranks); print the parts of a step and how close the step is to the device's limits.

    Args:
        settings: train.py's.

    Raises:
        ValueError: train.py failed.
    """
    processes = settings["nproc"]
    runs = [launches.run(settings, steps, show=True)]
    if processes > 1 and settings["grad_sync"] != "never" and "problem" not in runs[0]:
        if launches.rank == 0:
            print("\nonce more, without communication (grad_sync never)", flush=True)
        runs.append(launches.run(settings | {"grad_sync": "never"}, steps))
    for run in runs:
        if "problem" in run:
            raise ValueError(f"train.py failed: {run['problem']}")
    if launches.rank > 0:
        return {}
    run, *without_communication = runs
    report = {"run": run, "split_ms": split_step(*runs), "limits": limits(run, device)}
    print_step(report, steps)
    if launches.profile:
        report["operators"] = keep_profile(Path(run["settings"]["out_dir"]))
    return report


def print_step(report: dict, steps: int) -> None:
    """Print a report of a step as a table."""
    run, best = report["run"], report["limits"]
    processes = f"{run['processes']} process{'es' if run['processes'] > 1 else ''}"
    print(f"\n{steps} steps of {run['tokens_a_step']:,} tokens on {processes}, {run['dtype']}; medians:")
    print(f"  {'':13} {'mean of the ranks':>18} {'slowest rank':>13}")
    print(f"  {'tokens/s':13} {run['tokens_per_s']:18,.0f}")
    for name, ms in {"ms per step": run["step_ms"], **report["split_ms"]}.items():
        print(f"  {name:13} {shown(ms['mean'], '.2f'):>18} {shown(ms['max'], '.2f'):>13}")
    print(f"  {'memory':13} {run['memory_gb']['mean']:18.2f} {run['memory_gb']['max']:13.2f}  GB, peak")
    print(f"  {'MFU':13} {shown(run['mfu'], '.1%'):>18}")
    if "pipeline" in run["spans_ms"]:
        print(f"  {'bubble share':13} {shown_bubble(bubble(run)):>18}  of the pipeline's time (by formula)")
    matmul, copy = f"{best['matmul_tflops']:.3g} TFLOP/s", f"{best['copy_gb_per_s']:.1f} GB/s"
    matmul_ratio, copy_ratio = shown(best["matmul_ratio"], ".1%"), shown(best["copy_ratio"], ".1%")
    cached = " (the data stays in the cache)" if (best["copy_ratio"] or 0) > 1 else ""
    print(f"  {'matmul peak':13} {matmul:>18}  of which the step reaches {matmul_ratio}")
    print(f"  {'copy peak':13} {copy:>18}  of which the optimizer reaches {copy_ratio}{cached}")


def keep_profile(out: Path) -> str:
    """Copy the files of a profile to the working directory, and print and return its table of operators."""
    for name, viewer in VIEWERS.items():
        if (out / name).exists():
            print(f"wrote {shutil.copy(out / name, f'bench_{name}')} (open it in https://{viewer})")
    operators = (out / "operators.txt").read_text()
    print(operators)
    return operators


def limits(run: dict, device: torch.device) -> dict[str, float | None]:
    """
    Measure the speed of matmuls and of copies on this device, and the fraction of each speed that the run
    reached.
    """
    if device.type == "cpu":
        torch.set_num_threads(len(own_cores()))  # torchrun sets one thread
    set_numerics(device, run["dtype"], False)
    matmul, copy = measured_matmul(device, run["dtype"]), measured_copy(device)
    settings, devices = run["settings"], run["processes"]
    replicas = settings["dp_replicate"] if settings["zero"] else devices // (settings["tp"] * settings["pp"])
    if device.type == "cpu":  # the processes of one machine share the cores
        devices //= int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    # AdamW reads weights, gradients and two moments, and writes all but the gradients: seven float32
    moved = 28 * run["parameters"] * replicas / (run["spans_ms"]["optimizer"]["mean"] / 1e3)
    # with ep, ranks hold different numbers of copies of the experts and of the rest
    is_known = not settings["cpu_offload"] and settings["ep"] == 1
    return {
        "matmul_tflops": matmul / 1e12,
        "matmul_ratio": run["mfu"] * run["peak_flops"] / (matmul * devices) if run["mfu"] else None,
        "copy_gb_per_s": copy / 1e9,
        "copy_ratio": moved / (copy * devices) if is_known else None,
    }


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
    step_ms, ms = run["step_ms"][kind], spans_of(run, kind)
    optimizer = ms["norm"] + ms["optimizer"]
    exposed, collectives = None, {}
    if silent:
        silent_ms, collectives = spans_of(silent, kind), silent.get("collectives_ms", {})
        exposed = silent_ms.get("reduce", 0.0) + sum(collectives.values())
        has_replicas = run["processes"] > run["settings"]["tp"] * run["settings"]["pp"]
        if has_replicas:  # a slower optimizer in one of the launches is not communication
            silent_step_ms = silent["step_ms"][kind] - silent_ms["norm"] - silent_ms["optimizer"]
            exposed += max(0.0, step_ms - optimizer - silent_step_ms)
        ms["backward"] = min(ms.get("backward", 0.0), silent_ms.get("backward", 0.0))
    parts = {"data wait": ms["data"]}
    for name in ("stages",) if "pipeline" in ms else ("forward", "backward"):
        parts[name] = max(0.0, ms[name] - collectives.get(name, 0.0))
    if "pipeline" in ms:
        parts["bubble"] = max(0.0, ms["pipeline"] - ms["stages"])
    parts |= {"exposed comm": exposed, "optimizer": optimizer}
    parts["other"] = max(0.0, step_ms - sum(value or 0.0 for value in parts.values()))
    return parts


def spans_of(run: dict, kind: str) -> dict[str, float]:
    """What train.py's clock measured."""
    return {name: span[kind] for name, span in run["spans_ms"].items()}


def bubble(run: dict) -> dict[str, float | None]:
    """The share of a pipeline in which a rank waits: mean over the ranks, and by formula."""
    c, spans = run["settings"], run["spans_ms"]
    data_size = run["processes"] // (c["pp"] * c["cp"] * c["tp"])
    sequences = c["gradient_accumulation_steps"] * c["batch_size"]
    share = share_of(sequences, 0, data_size, run["micro_batch"], c["pp"])
    formula = bubble_formula(c["pp"], share.micro_steps, c["pp_schedule"])
    return {"measured": 1 - spans["stages"]["mean"] / spans["pipeline"]["mean"], "formula": formula}


def shown_bubble(shares: dict | None) -> str:
    """Format both figures of `bubble`; n/a without a pipeline."""
    return f"{shares['measured']:.1%} ({shown(shares['formula'], '.1%')})" if shares else "n/a"
