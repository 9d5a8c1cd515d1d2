"""bench.py's launches of train.py with several settings, as rows of a table."""

import math
from dataclasses import dataclass, field
from itertools import product

from isogpt.common import console
from isogpt.parallel.plan import LAYOUT
from isogpt.speed.collective_speeds import shown
from isogpt.speed.launches import Launches
from isogpt.speed.step_report import bubble, shown_bubble, split_step
from isogpt.speed.workload import Workload

CHANGES_COMMUNICATION = set(LAYOUT) - {"activation_checkpointing"}
CHANGES_BATCH = ("batch_size", "block_size", "gradient_accumulation_steps")


@dataclass
class Table:
    """
    Launches of train.py as rows of a table, which are printed one by one (all ranks; rank 0 prints).

    Args:
        names: the settings that differ between the rows.
        shows_waits: also show what ranks wait for, which takes a second launch.
    """

    launches: Launches
    names: tuple[str, ...]
    steps: int
    shows_waits: bool = False
    runs: list[dict] = field(default_factory=list)

    def add(self, settings: dict) -> None:
        """Launch train.py with these settings."""
        point = {name: settings[name] for name in self.names}
        run = {"point": point} | self.launches.run(settings, self.steps)
        if self.shows_waits and "problem" not in run:
            silent = self.launches.run(settings | {"grad_sync": "never"}, self.steps)
            if self.launches.rank == 0:
                known = "problem" not in silent
                run["exposed_ms"] = split_step(run, silent)["exposed comm"]["mean"] if known else None
                run["bubble"] = bubble(run) if "pipeline" in run["spans_ms"] else None
        self.runs.append(run)
        if self.launches.rank == 0:
            if len(self.runs) == 1:
                console.print_line(self.header())
            console.print_line(self.row(run))

    def header(self) -> str:
        """The names of the columns."""
        text = "".join(f"  {name:>9}" for name in self.names)
        text += "  tokens/step   tokens/s   ms/step       GB    MFU  speed-up"
        text += "  efficiency" if "nproc" in self.names else ""
        return text + ("   comm ms  bubble (formula)" if self.shows_waits else "")

    def row(self, run: dict) -> str:
        """Settings and figures, or why the launch failed. The speed-up is that over the first launch."""
        text = "".join(f"  {value!s:>{max(len(name), 9)}}" for name, value in run["point"].items())
        if "problem" in run:
            return f"{text}  failed: {run['problem']}"
        first = next(other for other in self.runs if "problem" not in other)
        speed_up = run["tokens_per_s"] / first["tokens_per_s"]
        text += f" {run['tokens_a_step']:12,} {run['tokens_per_s']:10,.0f} {run['step_ms']['mean']:9.2f}"
        text += f" {run['memory_gb']['max']:8.2f} {shown(run['mfu'], '.1%'):>6} {speed_up:8.2f}x"
        if "nproc" in self.names:
            text += f" {speed_up * first['processes'] / run['processes']:11.0%}"
        if self.shows_waits:
            text += f" {shown(run['exposed_ms'], '.2f'):>9}  {shown_bubble(run['bubble'])}"
        return text


def run_sweep(launches: Launches, workload: Workload, swept: dict[str, list[str]], steps: int) -> list[dict]:
    """Launch every combination of the swept values (all ranks), print a table, and return its rows."""
    if launches.rank == 0:
        print(what_is_fixed(swept, workload.weak), flush=True)
    table = Table(launches, tuple(swept), steps, shows_waits=not CHANGES_COMMUNICATION.isdisjoint(swept))
    counts = [int(n) for n in swept.get("nproc", [str(workload.processes)]) if n.isdecimal() and int(n)]
    for values in product(*swept.values()):
        point = dict(zip(swept, values, strict=True))
        # strong scaling: a number of micro-batches that divides evenly over every number of processes
        n = math.lcm(*counts)
        if workload.weak and point["nproc"].isdecimal():
            n = int(point["nproc"])
        micro_batches = {"gradient_accumulation_steps": workload.micro_batches(n)}
        table.add(workload.settings | micro_batches | point)
    return table.runs


def what_is_fixed(swept: dict[str, list[str]], weak: bool) -> str:
    """A sentence about what the rows of a sweep have in common."""
    varied = [name for name, values in swept.items() if len(values) > 1]
    batch = [name for name in varied if name in CHANGES_BATCH]
    if batch:
        return f"the global batch varies with {', '.join(batch)}: compare tokens/s"
    if weak:
        return "held fixed: the sequences of each process, so that the speed-up by nproc is weak scaling"
    if "nproc" in varied:
        return "held fixed: the global batch, so that the speed-up by nproc is strong scaling"
    return "held fixed: the global batch"
