"""Launch train.py for some steps, for bench.py, and read what it recorded."""

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from tempfile import mkdtemp

from isogpt.common import console
from isogpt.common.files import REPOSITORY
from isogpt.lab.combinations import typed
from isogpt.lab.runs import read_run
from isogpt.speed.clock import WAITING
from isogpt.speed.devices import fraction_of_peak
from isogpt.speed.memory import OUT_OF_MEMORY
from isogpt.speed.profiling import PROFILE_SKIP, PROFILE_STEPS

# settings of train.py with which a launch only takes steps and logs each
FIXED = {"log_interval": 1, "eval_interval": 10**9, "eval_iters": 1}
FIXED |= dict.fromkeys(("max_iters", "time_limit_s", "sample_interval", "stats_interval"), 0)
FIXED |= dict.fromkeys(("eval_only", "save_checkpoint", "wandb_log", "tensorboard_log"), False)
FIXED |= dict.fromkeys(("out_dir", "mirror", "eval_datasets", "alert_command"), "")
FIXED |= dict.fromkeys(("dry_run_ranks", "max_tokens"), "")
GRACE_S = 60.0  # for a launch that is asked to end


@dataclass(frozen=True)
class Launches:
    """
    Launches of train.py, one after the other. Under a launcher there is only one, for which each rank starts
    train.py with the launcher's variables.

    Args:
        train_py: the script.
        folder: where the launches write.
        is_launched: whether a launcher has started this process.
    """

    train_py: Path
    folder: Path
    rank: int
    is_launched: bool

    def run(self, settings: dict, steps: int, show: bool = False) -> dict:
        """
        Train for `steps` steps after a warm-up (all ranks). Returns `figures` on rank 0 and {} on other
        ranks, or {"problem": why the launch failed}.
        """
        warm_up = PROFILE_SKIP + PROFILE_STEPS + 1 if settings["profile"] else max(3, steps // 4)
        out = Path(mkdtemp(dir=self.folder))
        settings = settings | FIXED | {"out_dir": out, "max_iters": warm_up + steps - 1}
        if self.is_launched or int(settings["nproc"]) == 1:
            settings["nproc"] = 0  # else train.py launches as many processes
        code, errors = self.start(settings, show)
        if code:
            return {"problem": reason_for(code, errors)}
        return figures(out, steps) if self.rank == 0 else {}

    def start(self, settings: dict, show: bool = False, limit_s: float | None = None) -> tuple[int, str]:
        """
        Run train.py. Returns its exit status and what it wrote to stderr.

        Args:
            show: also print what it prints.
            limit_s: without `show`, end it after this many seconds.
        """
        command = [sys.executable, self.train_py, *typed(settings)]
        path = self.folder / "errors.txt"
        with path.open("w") as stderr, Popen(command, stdout=PIPE if show else DEVNULL, stderr=stderr) as run:
            for line in run.stdout or ():
                if not line.startswith(b"the loss curve: "):  # whose folder bench.py deletes
                    console.print_line(line.decode(errors="replace"), end="")
            try:
                run.wait(limit_s)
            except TimeoutExpired:
                run.terminate()  # torchrun ends its workers, after 30 s by force
                with suppress(TimeoutExpired):
                    run.wait(GRACE_S)
                run.kill()
                stderr.write(f"error: no result within {limit_s:.0f} s\n")
        errors = path.read_text(errors="replace")
        if show:
            sys.stderr.write(errors)
        return run.returncode, errors


def reason_for(code: int, errors: str) -> str:
    """
    Why a launch failed, in one line, from its exit status and stderr: after a traceback, with the last line
    of our code that led to it.
    """
    if OUT_OF_MEMORY.search(errors):
        return "out of memory"
    # the first: other ranks may have lost this one
    message = re.search(r"^error: (.*)((?:\n(?:Traceback|[ \t]).*)*)", errors, re.M)
    if code == -9 or "Signal 9 (SIGKILL)" in errors:
        return "killed (SIGKILL), probably because the machine ran out of memory"
    if message:
        return message[1] + place_in(message[2])
    before_report = re.split(r"^E\d{4} ", errors, flags=re.M)[0]  # torchrun's, of the failure
    lines = re.findall(r"^(?:\[rank\d+\]: ?)?(\S.*)", before_report, re.M)
    return lines[-1] + place_in(before_report) if lines else f"exit status {code}"


def place_in(traceback: str) -> str:
    """The last place in a traceback that is in our code, in parentheses; "" if there is none."""
    places = re.findall(rf'File "{re.escape(str(REPOSITORY))}/(.*)", line (\d+)', traceback)
    places = [place for place in places if "site-packages" not in place[0]]  # of an environment in the folder
    return " ({}, line {})".format(*places[-1]) if places else ""


def figures(out: Path, steps: int) -> dict:
    """
    Return what train.py recorded in folder `out`: the facts of its start, and of the last `steps` steps
    medians of the ranks' mean and maximum.
    """
    run = read_run(out)
    record = run.facts | {"settings": run.settings}
    for kind, suffix in (("max", "_max"), ("mean", "")):
        step_ms = median(step[f"step_ms{suffix}"] for step in run.steps[-steps:])
        ms = {name: span[kind] for name, span in run.ending["spans_ms"].items()}
        record[kind] = {"ms per step": step_ms} | split_step(step_ms, ms)
        record[kind]["memory, GB"] = run.steps[-1][f"memory_gb{suffix}"]
    for name in ("tokens", "flops"):
        record[f"{name}_per_s"] = record[f"{name}_per_step"] / step_ms * 1e3
    record["mfu"] = fraction_of_peak(record["flops_per_s"], record["peak_flops"])
    return record


def split_step(step_ms: float, ms: dict[str, float]) -> dict[str, float | None]:
    """
    Return the parts of a step from what Clock has timed, in milliseconds; None: not known. In a pipeline, a
    rank computes in `stages` and waits in the bubble. Communication is exposed if no computation hides it.
    The slowest rank's parts need not add up to the slowest step.
    """
    exposed, parts = ms["reduce"] + ms["agree"], {"data wait": ms["data"]}
    if "pipeline" in ms:
        parts |= {"stages": ms["stages"], "bubble": ms["pipeline"] - ms["stages"]}
    else:
        waiting = ms.get(WAITING, 0.0)
        parts |= {"forward": ms["forward"], "backward": ms["backward"] - waiting}
        exposed += waiting
    parts["exposed comm"] = exposed if WAITING in ms else None  # ranks may also wait inside the passes
    parts["optimizer"] = ms["norm"] + ms["optimizer"]
    parts["other"] = max(0.0, step_ms - sum(filter(None, parts.values())))
    return parts
