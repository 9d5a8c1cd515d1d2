"""
Dry runs: train.py runs as one of many ranks, without the others, see launch/pretended_ranks.py, on tensors
without memory. It takes two steps; the memory and collectives of the second are counted, and printed beside
the planner's prediction.
"""

import os
import runpy
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.data.data_folder import write_random_tokens
from isogpt.lab.combinations import typed
from isogpt.launch.launchers import stop_signals
from isogpt.launch.pretended_ranks import Collective, is_pretended, pretend
from isogpt.parallel.compression import POWERSGD_START
from isogpt.parallel.local_parts import local
from isogpt.parallel.mesh import AXES, Mesh
from isogpt.parallel.plan import UNDIVIDED, Plan
from isogpt.parallel.shares import share_of_plan
from isogpt.speed.launches import FIXED
from isogpt.speed.memory import part_of, rank_estimate, state_bytes
from isogpt.speed.memory_counter import MemoryCounter, tensors_in
from isogpt.speed.workload import vocab_size_of
from isogpt.training.optimizer_class import inner_optimizer

# settings of train.py with which a dry run takes two steps and writes nothing
SETTINGS = FIXED | {"device": "cpu", "skip_steps": "nan", "data_order": "random", "log_interval": 10**9}
SETTINGS |= {
    "nproc": 0,
    "check_ranks_interval": 0,
    "check_layout": False,
    "profile": False,
    "decay_lr": False,
}
SETTINGS["local_steps"] = 1  # the second step averages over islands


@dataclass
class DryRun:
    """
    A dry run. `start` makes it, and the process groups of the run refer to it.

    Attributes:
        folder: of its data; the run writes nothing.
        last_step: the number of the step that is counted.
        collectives: of the step, which the process groups record.
        steps: how many steps each optimizer has taken.
        model, plan, mesh: known when `begin` is called.
    """

    folder: tempfile.TemporaryDirectory
    last_step: int
    collectives: list[Collective] = field(default_factory=list)
    counter: MemoryCounter = field(default_factory=MemoryCounter)
    steps: Counter[torch.optim.Optimizer] = field(default_factory=Counter)
    model: nn.Module | None = None
    plan: Plan | None = None
    mesh: Mesh | None = None

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """At the end of a step, after its last optimizer, begin to count anew, or exit."""
        if optimizer.param_groups[0]["params"][0] not in {*self.model.parameters()}:
            return  # it updates the parts of another one
        self.steps[optimizer] += 1
        if len({*self.steps.values()}) > 1:
            return
        if self.steps[optimizer] == self.last_step:
            self.counter.__exit__(None, None, None)
            sys.exit()
        self.counter.peak = self.counter.total
        self.collectives.clear()

    def count(self) -> dict[str, float]:
        """The GB of the parts of the peak, as in memory.memory_estimate."""
        params = list(self.model.parameters())
        parts = {
            "weights": gb_of(params),
            "gradients": gb_of([p.grad for p in params]),
            "optimizer": gb_of([dict(inner_optimizer(o).state) for o in self.steps]),
        }
        total = self.counter.peak / 1e9
        return parts | {"activations": total - sum(parts.values()), "total": total}

    def stop(self, number: int, _: object) -> None:
        """End at once on a signal; the folder is deleted."""
        self.folder.cleanup()
        os._exit(128 + number)  # Python ignores SystemExit in a weak reference's callback


def gb_of(values: object) -> float:
    """The GB of the storages of all tensors in lists and dicts, each once."""
    storages = {local(tensor).untyped_storage() for tensor in tensors_in(values)}
    return sum(storage.nbytes() for storage in storages) / 1e9


def start(config: dict, script: str) -> None:
    """
    With the setting dry_run_ranks, run `script` again, as one of these ranks, print what its second step
    has taken, and exit. Returns in that run, and without the setting.

    Raises:
        ValueError: the size of the vocabulary is not known.
    """
    if not config["dry_run_ranks"]:  # or this is one of them, see FIXED
        return
    settings = SETTINGS | {"vocab_size": vocab_size_of(config)}
    # PowerSGD begins later
    settings["max_iters"] = 2 + POWERSGD_START * config["grad_compression"].startswith("powersgd")
    folder = tempfile.TemporaryDirectory(prefix="isogpt-dry-run-", ignore_cleanup_errors=True)
    settings["out_dir"] = settings["dataset"] = folder.name
    run = DryRun(folder, settings["max_iters"])
    rank, _, ranks = config["dry_run_ranks"].rpartition("/")
    pretend(int(rank or 0), int(ranks), run)
    sys.argv += typed(settings)
    warnings.filterwarnings("ignore", message="Set timeout is now only supported|Accessing the data pointer")
    with folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        write_random_tokens(Path(folder.name), settings["vocab_size"], 2 * config["block_size"] + 1)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as e:
            if e.code:
                raise
    for line in report(run, config["local_steps"]):
        console.print_line(line)
    sys.exit()


def begin(model: nn.Module, plan: Plan, mesh: Mesh, progress: Progress) -> None:
    """In a dry run, compute only shapes from here on, and count the memory of all tensors."""
    if not is_pretended():
        return
    run = dist.group.WORLD.run
    run.model, run.plan, run.mesh = model, plan, mesh
    progress.step = 1  # step 0 would be evaluated
    for number in stop_signals():
        signal.signal(number, run.stop)
    register_optimizer_step_post_hook(run.after_step)
    run.counter.__enter__()


# ------------------------------------------------------------------------------------------------------------
# the report


def report(run: DryRun, local_steps: int) -> Iterator[str]:
    """The lines of a dry run's report."""
    plan, mesh = run.plan, run.mesh
    share = share_of_plan(plan, mesh)
    degrees = " x ".join(f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1)
    count = console.count_text(share.micro_steps, "micro-batch", "micro-batches")
    yield f"dry run: rank {mesh.rank} of {plan.world_size:,} ({degrees}), zero {plan.zero}, on a CPU"
    yield f"a step: {count} of {share.rows} x {plan.model_args['block_size']:,} tokens on this rank"
    yield ""
    predicted = rank_estimate(replace(plan, micro_batch=max(share.rows_of)), mesh.index("pp"), 0.0)
    counted, rows = run.count(), []
    for name, gb in predicted.items():
        row = {"GB at the peak": name, "counted": f"{counted[name]:.4g}", "predicted": f"{gb:.4g}"}
        rows.append(row)
    yield from console.aligned(rows)
    yield ""
    groups, rows = {}, []
    for c in run.collectives:
        if c.size and len(c.ranks) > 1:  # else nothing is sent
            groups.setdefault((c.operation, c.ranks), []).append(c)
    for (operation, ranks), members in groups.items():
        row = {"collectives of a step": operation, "ranks": f"{len(ranks):,}"}
        row["count"] = f"{len(members):,}"
        row["bytes"] = f"{sum(c.size for c in members):,}"
        row["sent"] = f"{sum(c.sent for c in members):,.0f}"
        rows.append(row | {"along": axes_of(ranks, mesh)})
    yield from console.aligned(rows)
    if plan.islands > 1 and local_steps > 1:
        yield f"along islands, only once in {local_steps:,} steps"
    alone = replace(UNDIVIDED, model_args=plan.model_args, counts=plan.counts, optimizer=plan.optimizer)
    undivided = state_bytes(alone, part_of(alone, 0))
    held = counted["weights"] + counted["optimizer"]
    whole = (undivided["weights"] + undivided["optimizer"]) / 1e9
    yield f"\ncheckpoint, weights and moments: this rank holds {held:.4g} GB of about {whole:.4g} GB"


def axes_of(ranks: tuple[int, ...], mesh: Mesh) -> str:
    """The axes of the mesh along which ranks differ."""
    places = [replace(mesh, rank=rank) for rank in ranks]
    return " x ".join(axis for axis in AXES if len({place.index(axis) for place in places}) > 1)
