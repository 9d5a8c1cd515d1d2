"""bench.py's launches of train.py with several settings, as rows of a table."""

import math
from dataclasses import dataclass, field
from itertools import product

from isogpt.common import console
from isogpt.parallel.plan import LAYOUT
from isogpt.speed.launches import Launches
from isogpt.speed.step_report import shown, shown_bubble, split_step
from isogpt.speed.workload import Workload

CHANGES_COMMUNICATION = set(LAYOUT) - {"activation_checkpointing"}
HEADER = "  tokens/step   tokens/s   ms/step       GB    MFU  speed-up  efficiency"


@dataclass
class Table:
    """
    Launches of train.py as rows of a table, which are printed one by one (all ranks; rank 0 prints).

    Args:
        names: the settings that differ between the rows.
        shows_waits: also show what ranks wait for.
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
        if "spans_ms" in run:  # on rank 0, if the launch did not fail
            run["exposed_ms"] = split_step(run)["exposed comm"]["mean"]
        self.runs.append(run)
        if self.launches.rank == 0:
            if len(self.runs) == 1:
                names = "".join(f"  {name:>9}" for name in self.names)
                waits = "   comm ms  bubble (formula)" if self.shows_waits else ""
                console.print_result(f"{names}{HEADER}{waits}")
            console.print_result(self.row(run))

    def row(self, run: dict) -> str:
        """Settings and figures, or why the launch failed. The speed-up is relative to the first launch."""
        text = "".join(f"  {value!s:>{max(len(name), 9)}}" for name, value in run["point"].items())
        if "problem" in run:
            return f"{text}  failed: {run['problem']}"
        first = next(other for other in self.runs if "problem" not in other)
        speed_up = run["tokens_per_s"] / first["tokens_per_s"]
        efficiency = speed_up * first["processes"] / run["processes"]
        text += f" {run['tokens_a_step']:12,} {run['tokens_per_s']:10,.0f} {run['step_ms']['mean']:9.2f}"
        text += f" {run['memory_gb']['max']:8.2f} {shown(run['mfu'], '.1%'):>6}"
        text += f" {speed_up:8.2f}x {efficiency:11.0%}"
        if self.shows_waits:
            text += f" {shown(run['exposed_ms'], '.2f'):>9}  {shown_bubble(run)}"
        return text


def run_sweep(launches: Launches, workload: Workload, swept: dict[str, list[str]], steps: int) -> list[dict]:
    """
    Launch every combination of the swept values (all ranks), print a table, and return its rows. The global
    batch is the same in all, unless a swept setting changes it or the scaling is weak.
    """
    table = Table(launches, tuple(swept), steps, shows_waits=not CHANGES_COMMUNICATION.isdisjoint(swept))
    # a number of micro-batches that divides evenly over every number of processes
    even = math.lcm(*(int(n) for n in swept.get("nproc", [workload.processes])))
    for values in product(*swept.values()):
        point = dict(zip(swept, values, strict=True))
        n = int(point["nproc"]) if workload.weak else even
        table.add(workload.settings | {"gradient_accumulation_steps": workload.micro_batches(n)} | point)
    return table.runs
