"""Launch train.py for some steps, for bench.py, and read what it recorded."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

from isogpt.lab.runs import read_run
from isogpt.speed.devices import fraction_of_peak
from isogpt.speed.memory import OUT_OF_MEMORY
from isogpt.speed.profiling import PROFILE_SKIP, PROFILE_STEPS

# settings of train.py with which a launch only takes steps and logs each
FIXED = {
    "out_dir": "",
    "max_iters": 0,
    "max_tokens": 0.0,
    "max_epochs": 0.0,
    "log_interval": 1,
    "eval_interval": 10**9,
    "eval_iters": 1,
    "eval_datasets": "",
    "eval_only": False,
    "save_checkpoint": False,
    "mirror": "",
    "time_limit_s": 0,
    "wandb_log": False,
    "tensorboard_log": False,
    "alert_command": "",
    "sample_interval": 0,
    "stats_interval": 0,
}


@dataclass(frozen=True)
class Launches:
    """
    Launches of train.py, one after the other. Under a launcher there is only one, for which each rank starts
    train.py with the launcher's variables.

    Args:
        train_py: the script.
        folder: where the launches write.
        is_launched: whether a launcher has started this process.
        profile: whether a launch that is shown writes a trace.
    """

    train_py: Path
    folder: Path
    rank: int = 0
    is_launched: bool = False
    profile: bool = False

    def run(self, settings: dict, steps: int, show: bool = False) -> dict:
        """
        Train for `steps` steps after a warm-up (all ranks). Returns `figures` on rank 0 and {} on other
        ranks, or {"problem": why the launch failed}.
        """
        nproc, is_traced = int(settings["nproc"]), self.profile and show
        warm_up = PROFILE_SKIP + PROFILE_STEPS + 1 if is_traced else max(3, steps // 4)
        out = Path(mkdtemp(dir=self.folder))
        settings = settings | FIXED
        settings |= {"profile": is_traced, "out_dir": out, "max_iters": warm_up + steps - 1}
        settings["gradient_accumulation_steps"] = settings["gradient_accumulation_steps"] or nproc
        # train.py launches as many processes
        settings["nproc"] = 0 if self.is_launched or nproc == 1 else nproc
        code, errors = self.start(settings, show)
        if code:
            return {"problem": reason_for(code, errors)}
        return figures(out, steps) if self.rank == 0 else {}

    def start(self, settings: dict, show: bool = False) -> tuple[int, str]:
        """Run train.py. Returns its exit status and what it wrote to stderr."""
        command = [sys.executable, self.train_py, *(f"--{name}={value}" for name, value in settings.items())]
        stdout = None if show else subprocess.DEVNULL
        run = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace")
        if show:
            sys.stderr.write(run.stderr)
        return run.returncode, run.stderr


def reason_for(code: int, errors: str) -> str:
    """Why a launch failed, in one line, from its exit status and stderr."""
    if OUT_OF_MEMORY.search(errors):
        return "out of memory"
    if code == -9 or "Signal 9 (SIGKILL)" in errors:
        return "killed (SIGKILL), probably because the machine ran out of memory"
    if message := re.search(r"^error: (.*)", errors, re.M):  # the first: other ranks may have lost this one
        return message[1]
    before_report = re.split(r"^E\d{4} ", errors, flags=re.M)[0]  # torchrun's, of the failure
    lines = re.findall(r"^(?:\[rank\d+\]: ?)?(\S.*)", before_report, re.M)
    return lines[-1] if lines else f"exit status {code}"


def figures(out: Path, steps: int) -> dict:
    """
    Return what train.py recorded in folder `out`: mostly medians over the last `steps` steps of the ranks'
    mean and maximum.
    """
    run = read_run(out)
    timed, facts = run.steps[-steps:], run.facts
    step_ms = median(step["step_ms"] for step in timed)
    tokens, flops_per_s = facts["tokens_per_step"], facts["flops_per_step"] / step_ms * 1e3
    return {name: facts[name] for name in ("dtype", "micro_batch", "parameters", "peak_flops")} | {
        "processes": facts["world_size"],
        "tokens_a_step": tokens,
        "tokens_per_s": tokens / step_ms * 1e3,
        "step_ms": {"mean": step_ms, "max": median(step["step_ms_max"] for step in timed)},
        "spans_ms": run.ending["spans_ms"],
        "memory_gb": {"mean": timed[-1]["memory_gb"], "max": timed[-1]["memory_gb_max"]},
        "flops_per_s": flops_per_s,
        "mfu": fraction_of_peak(flops_per_s, facts["peak_flops"]),
        "settings": run.settings,
    }
