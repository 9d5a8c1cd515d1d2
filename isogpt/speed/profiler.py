"""The profiler, and what its trace says about collectives."""

import json
import re
from pathlib import Path

import torch

PROFILE_SKIP, PROFILE_STEPS = 5, 5  # the first steps are not typical


def start_profiler(out_dir: str, steps: int) -> torch.profiler.profile:
    """
    A profiler for a run of `steps` steps that skips 5, records 5, and writes to out_dir: trace.json,
    operators.txt (the operators by their own time) and on a GPU memory.pickle, a snapshot for
    https://pytorch.org/memory_viz. Assign it to Clock.profiler.
    """
    out, on_gpu, needed = Path(out_dir), torch.cuda.is_available(), PROFILE_SKIP + PROFILE_STEPS
    if steps < needed:
        text = f"--profile traces the steps after the fifth: {steps} steps give no trace, {needed} do"
        print(f"warning: {text}", flush=True)

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(out / "trace.json"))
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        averages = profiler.key_averages()
        (out / "operators.txt").write_text(
            averages.table(sort_by=key, row_limit=15, max_name_column_width=50)
        )
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(out / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    if on_gpu:
        torch.cuda.memory._record_memory_history()
    schedule = torch.profiler.schedule(
        skip_first=PROFILE_SKIP - 1, wait=0, warmup=1, active=PROFILE_STEPS, repeat=1
    )
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)  # of the CPU and the GPU
    profiler.start()
    return profiler


def traced_collectives(path: Path, has_ep: bool) -> dict[str, float]:
    """
    Rank 0's ms per step in all-gather, all-reduce, reduce-scatter and, with ep, all-to-all, by the part of
    the step: from a trace of a launch in which no gradients are reduced, so that only the collectives of tp,
    cp and ep are in it. Computation waits for them. Those of ZeRO-3, which run in the background, count too.
    """
    if not path.exists():
        return {}
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    kernels = "All|Reduce|SendRecv" if has_ep else "All|Reduce"  # a pipeline's messages are SendRecv too
    calls = [e for e in events if re.match(rf"gloo:(all|reduce)|ncclDevKernel_({kernels})", e["name"])]
    kinds, found = {e["cat"] for e in calls}, {}  # on a GPU, spans of its own queue
    kinds = {"gpu_user_annotation"} if "kernel" in kinds else {"user_annotation"}
    for part in ("forward", "backward", "stages"):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == part and e["cat"] in kinds]
        us = sum(e["dur"] for e in calls if any(start <= e["ts"] < end for start, end in spans))
        found[part] = us / 1e3 / PROFILE_STEPS
    return found
