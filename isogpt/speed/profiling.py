"""Profile a run, and read the times of collectives from the profiler's trace."""

import json
import re
from pathlib import Path

import torch

from isogpt.common import console
from isogpt.common.files import reason_of
from isogpt.launch.process_group import Ranks

PROFILE_SKIP, PROFILE_STEPS = 5, 5  # the first steps are not typical
FILES = ("trace.json", "operators.txt", "memory.pickle")


def start_profiler(out_dir: str, steps: int, ranks: Ranks) -> torch.profiler.profile | None:
    """
    Start a profiler for a run of `steps` steps, on rank 0; None on other ranks. It skips 5 steps, records 5,
    and writes files to out_dir: trace.json, operators.txt (the operators by self time) and on a GPU
    memory.pickle, a snapshot for https://pytorch.org/memory_viz. The caller calls step() after each step.
    """
    if not ranks.is_main:
        return None
    out, on_gpu = Path(out_dir), torch.cuda.is_available()
    needed = PROFILE_SKIP + PROFILE_STEPS
    if steps < needed:
        text = f"--profile traces the steps after the fifth, so it needs {needed} steps, not {steps}"
        console.print_line(f"warning: {text}")

    def write(profiler: torch.profiler.profile) -> None:
        try:
            write_files(profiler)
        except (OSError, RuntimeError) as e:  # a full disk does not end the run
            console.print_to_stderr(f"warning: the profile could not be written to {out} ({reason_of(e)})")

    def write_files(profiler: torch.profiler.profile) -> None:
        for name in FILES:  # not through links to other files
            (out / name).unlink(missing_ok=True)
        profiler.export_chrome_trace(str(out / "trace.json"))
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        operators = profiler.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=50)
        (out / "operators.txt").write_text(operators)
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(out / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    if on_gpu:
        torch.cuda.memory._record_memory_history()
    schedule = torch.profiler.schedule(
        skip_first=PROFILE_SKIP - 1, wait=0, warmup=1, active=PROFILE_STEPS, repeat=1
    )
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)  # profiles the CPU and the GPU
    profiler.start()
    return profiler


def traced_collectives(path: Path, has_ep: bool) -> dict[str, float]:
    """
    Return rank 0's milliseconds per step in all-gather, all-reduce, reduce-scatter and, with ep, all-to-all,
    by the part of the step.

    The trace is of a launch that reduces no gradients, so that it contains only the collectives of tp, cp and
    ep, for which computation waits. Collectives of ZeRO-3, which run in the background, are also counted.
    """
    if not path.exists():
        return {}
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    kernels = "All|Reduce|SendRecv" if has_ep else "All|Reduce"  # a pipeline's messages are also SendRecv
    calls = [e for e in events if re.match(rf"gloo:(all|reduce)|ncclDevKernel_({kernels})", e["name"])]
    on_gpu = any(e["cat"] == "kernel" for e in calls)
    kind = "gpu_user_annotation" if on_gpu else "user_annotation"  # on a GPU, spans of the GPU's queue
    ms = {}
    for part in ("forward", "backward", "stages"):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == part and e["cat"] == kind]
        us = sum(e["dur"] for e in calls if any(start <= e["ts"] < end for start, end in spans))
        ms[part] = us / 1e3 / PROFILE_STEPS
    return ms
