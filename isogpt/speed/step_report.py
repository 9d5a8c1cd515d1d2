"""bench.py's report on one launch: the parts of a step, and how far it is from the limits of the device."""

import shutil
from pathlib import Path

import torch

from isogpt.common.console import aligned, count_text, print_result
from isogpt.parallel.mesh import bubble_formula
from isogpt.parallel.shares import share_of
from isogpt.speed.clock import COMMUNICATION, WAITING
from isogpt.speed.devices import fraction_of_peak, measured_matmul
from isogpt.speed.launches import Launches
from isogpt.training.precision import set_numerics

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
    run = launches.run(settings, steps, show=True)
    if "problem" in run:
        raise ValueError(f"train.py failed: {run['problem']}")
    if launches.rank > 0:
        return {}
    peak = run["peak_flops"]  # in place of a data sheet, train.py has measured a matmul
    if device.type == "cuda":
        set_numerics(device, run["dtype"], False)
        peak = run["processes"] * measured_matmul(device, run["dtype"])
    reached = fraction_of_peak(run["flops_per_s"], peak)
    report = {"run": run, "split_ms": split_step(run), "matmul_flops": peak, "matmul_ratio": reached}
    print_step(report, steps)
    if launches.profile:
        report["operators"] = keep_profile(Path(run["settings"]["out_dir"]))
    return report


def print_step(report: dict, steps: int) -> None:
    """Print a report of a step as a table."""
    run = report["run"]
    processes = count_text(run["processes"], "process", "processes")
    tokens = f"{run['tokens_a_step']:,} tokens on {processes}, {run['dtype']}"
    print_result(f"\n{count_text(steps, 'step')} of {tokens}; medians:")
    rows = {"tokens/s": (f"{run['tokens_per_s']:,.0f}", "")}
    for name, ms in {"ms per step": run["step_ms"], **report["split_ms"]}.items():
        rows[name] = (shown(ms["mean"], ".2f"), shown(ms["max"], ".2f"))
    rows["memory, GB"] = tuple(f"{run['memory_gb'][kind]:.2f}" for kind in ("mean", "max"))
    rows["MFU"] = (shown(run["mfu"], ".1%"), "")
    if "pipeline" in run["spans_ms"]:
        rows["bubble (formula)"] = (shown_bubble(run), "")
    tflops = report["matmul_flops"] and report["matmul_flops"] / 1e12
    rows["matmul, TFLOP/s"] = (shown(tflops, ".3g"), "")
    rows["of which reached"] = (shown(report["matmul_ratio"], ".1%"), "")
    mean, slowest = zip(*rows.values(), strict=True)
    print_result("\n".join(aligned({"": [*rows], "mean of the ranks": mean, "slowest rank": slowest})))


def keep_profile(out: Path) -> str:
    """Copy the files of a profile to the working directory, and print and return its table of operators."""
    for name, viewer in VIEWERS.items():
        if (out / name).exists():
            print_result(f"wrote {shutil.copy(out / name, f'bench_{name}')} (open it in https://{viewer})")
    operators = (out / "operators.txt").read_text()
    print_result(operators)
    return operators


def split_step(run: dict) -> dict[str, dict[str, float | None]]:
    """
    Return the parts of a step in milliseconds, as the mean over the ranks and as the slowest rank's, whose
    parts need not add up to the slowest step; None: not known. See `split_of`.
    """
    mean, most = (split_of(run, kind) for kind in ("mean", "max"))
    return {name: {"mean": mean[name], "max": most[name]} for name in mean}


def split_of(run: dict, kind: str) -> dict[str, float | None]:
    """
    Return the parts of a step for the mean over the ranks ('mean') or for the slowest rank ('max'). In a
    pipeline, a rank computes in `stages` and waits in the bubble. Communication is exposed if no computation
    hides it.
    """
    ms = {name: span[kind] for name, span in run["spans_ms"].items()}
    is_known = WAITING in ms  # else the forward and backward passes contain communication
    exposed = sum(ms[name] for name in COMMUNICATION) if is_known else None
    parts = {"data wait": ms["data"]}
    if "pipeline" in ms:
        parts |= {"stages": ms["stages"], "bubble": ms["pipeline"] - ms["stages"]}
        exposed = exposed - ms[WAITING] if is_known else None
    else:
        parts |= {"forward": ms["forward"], "backward": ms["backward"] - ms.get(WAITING, 0.0)}
    parts |= {"exposed comm": exposed, "optimizer": ms["norm"] + ms["optimizer"]}
    parts["other"] = max(0.0, run["step_ms"][kind] - sum(value or 0.0 for value in parts.values()))
    return parts


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
