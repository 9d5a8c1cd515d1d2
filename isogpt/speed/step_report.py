"""Report on a launch of train.py, for bench.py: figures, parts of a step, and why the launch failed."""

import re
from pathlib import Path
from statistics import median

from isogpt.common.files import read_records
from isogpt.parallel.mesh import bubble_formula
from isogpt.parallel.shares import share_of
from isogpt.speed.collective_speeds import shown
from isogpt.speed.memory import OUT_OF_MEMORY
from isogpt.speed.profiler import traced_collectives


def own_lines(errors: str) -> str:
    """
    Return what train.py wrote to stderr, without torchrun's warnings before and torchrun's report of a
    failure after.
    """
    return re.sub(r"^[WI]\d{4} .*\n", "", re.split(r"^E\d{4} ", errors, flags=re.M)[0], flags=re.M)


def reason_for(code: int, errors: str) -> str:
    """Why a launch failed, in one line, from its exit status and stderr."""
    if OUT_OF_MEMORY.search(errors):
        return "out of memory"
    if code == -9 or "Signal 9 (SIGKILL)" in errors:
        return "killed (SIGKILL), probably because the machine ran out of memory"
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in own_lines(errors).splitlines()]
    lines = [
        x
        for x in lines
        if x.strip() and not x.startswith((" ", "Traceback")) and "lost the connection" not in x
    ]
    messages = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (messages or lines or [f"exit status {code}"])[-1]


def figures(out: Path, timed: int) -> dict:
    """
    Return what train.py recorded in folder `out`: mostly medians over the timed steps of the ranks' mean and
    maximum.
    """
    records = read_records(out / "metrics.jsonl")
    start, steps = records[0], [r for r in records if "step_ms" in r][-timed:]
    config, mean_ms = start["config"], median(r["step_ms"] for r in steps)
    tokens = config["gradient_accumulation_steps"] * config["batch_size"] * config["block_size"]
    return {name: start[name] for name in ("dtype", "micro_batch", "parameters", "peak_flops")} | {
        "processes": start["world_size"],
        "tokens_a_step": tokens,
        "tokens_per_s": tokens / mean_ms * 1e3,
        "step_ms": {"mean": mean_ms, "max": median(r["step_ms_max"] for r in steps)},
        "spans_ms": records[-1]["spans_ms"],
        "collectives_ms": traced_collectives(out / "trace.json", config["ep"] > 1),
        "memory_gb": {"mean": steps[-1]["memory_gb"], "max": steps[-1]["memory_gb_max"]},
        "mfu": median(r["mfu"] for r in steps) if start["peak_flops"] else None,
        "settings": config,
    }


def bubble(run: dict) -> dict[str, float | None]:
    """The share of a pipeline in which a rank waits: mean over the ranks, and by formula."""
    c, spans = run["settings"], run["spans_ms"]
    data_size = run["processes"] // (c["pp"] * c["cp"] * c["tp"])
    sequences = c["gradient_accumulation_steps"] * c["batch_size"]
    share = share_of(sequences, 0, data_size, run["micro_batch"], c["pp"])
    formula = bubble_formula(c["pp"], share.micro_steps, c["pp_schedule"])
    return {"measured": 1 - spans["stages"]["mean"] / spans["pipeline"]["mean"], "formula": formula}


def shown_bubble(found: dict | None) -> str:
    """Format both figures of `bubble`; n/a without a pipeline."""
    return f"{found['measured']:.1%} ({shown(found['formula'], '.1%')})" if found else "n/a"


def split_step(run: dict, silent: dict | None) -> dict[str, dict[str, float | None]]:
    """
    Return the parts of a step in milliseconds, each as the mean over the ranks and the slowest rank's.

    The slowest rank's parts need not add up to the slowest step. `silent` is the same launch with grad_sync
    'never', whose backward pass does not wait for other ranks. The difference is the exposed communication,
    which no computation hides. The collectives of tp, cp and ep, and what is reduced after the backward pass,
    are also exposed. In a pipeline, a rank computes in `stages` and waits in the bubble.
    """
    parts = {}
    for kind in ("mean", "max"):
        step_ms, exposed = run["step_ms"][kind], None
        ms = {name: span[kind] for name, span in run["spans_ms"].items()}
        waits = (silent or {}).get("collectives_ms", {})
        if silent:
            other = {name: span[kind] for name, span in silent["spans_ms"].items()}
            without = silent["step_ms"][kind] - other["clip"] - other["optimizer"]
            # whether there are replicas, over which gradients are averaged
            has_copies = run["processes"] > run["settings"]["tp"] * run["settings"]["pp"]
            exposed = max(0.0, step_ms - ms["clip"] - ms["optimizer"] - without) if has_copies else 0.0
            exposed += other.get("reduce", 0.0) + sum(waits.values())
            ms["backward"] = min(ms.get("backward", 0.0), other.get("backward", 0.0))
        names, part = ("stages",) if "pipeline" in ms else ("forward", "backward"), {"data wait": ms["data"]}
        part |= {name: max(0.0, ms[name] - waits.get(name, 0.0)) for name in names}
        part |= {"bubble": max(0.0, ms["pipeline"] - ms["stages"] - ms["data"])} if "pipeline" in ms else {}
        part |= {"exposed comm": exposed, "optimizer": ms["clip"] + ms["optimizer"]}
        part["other"] = max(0.0, step_ms - sum(value or 0.0 for value in part.values()))
        for name, value in part.items():
            parts.setdefault(name, {})[kind] = value
    return parts
