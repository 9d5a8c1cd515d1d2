"""Profile a run."""

from pathlib import Path

import torch
from torch.profiler import profile, schedule

from isogpt.common import console
from isogpt.common.files import reason_of
from isogpt.launch.process_group import Ranks

PROFILE_SKIP, PROFILE_STEPS = 5, 5  # the first steps are not typical
FILES = ("trace.json", "operators.txt", "memory.pickle")


def start_profiler(out_dir: str, steps: int, ranks: Ranks) -> profile | None:
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

    def write(profiler: profile) -> None:
        try:
            for name in FILES:  # not through links to other files
                (out / name).unlink(missing_ok=True)
            profiler.export_chrome_trace(str(out / "trace.json"))
            key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
            operators = profiler.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=50)
            (out / "operators.txt").write_text(operators)
            if on_gpu:
                torch.cuda.memory._dump_snapshot(str(out / "memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as e:  # a full disk does not end the run
            console.print_to_stderr(f"warning: the profile could not be written to {out} ({reason_of(e)})")

    if on_gpu:
        torch.cuda.memory._record_memory_history()
    steps_of = schedule(skip_first=PROFILE_SKIP - 1, wait=0, warmup=1, active=PROFILE_STEPS, repeat=1)
    profiler = profile(schedule=steps_of, on_trace_ready=write)  # profiles the CPU and the GPU
    profiler.start()
    return profiler
