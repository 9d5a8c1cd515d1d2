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
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.data.data_folder import write_random_tokens
from isogpt.launch.launchers import stop_signals
from isogpt.launch.pretended_ranks import Collective, is_pretended, pretend, pretended_rank
from isogpt.parallel.compression import POWERSGD_START
from isogpt.parallel.local_parts import local
from isogpt.parallel.mesh import AXES, Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import share_of_plan
from isogpt.speed.launches import FIXED
from isogpt.speed.memory import rank_estimate
from isogpt.speed.memory_counter import MemoryCounter
from isogpt.speed.workload import vocab_size_of
from isogpt.training.optim import moments_of
from isogpt.training.optimizer_class import inner_optimizer

# settings of train.py with which a dry run takes two steps and writes nothing
SETTINGS = FIXED | {
    "init_from": "scratch",
    "nproc": 0,
    "device": "cpu",
    "check_layout": False,
    "check_ranks_interval": 0,
    "profile": False,
    "decay_lr": False,
    "on_nan": "skip",
    "data_order": "random",
    "log_interval": 10**9,
}


@dataclass
class DryRun:
    """
    A dry run. `start` makes it, and the process groups of the run refer to it.

    Attributes:
        folder: of its data; the run writes nothing.
        stack: what ends with the run.
        steps_left: until the memory is known.
        collectives: of the run so far, which the process groups record.
        optimizers: those that have taken a step. The first one's steps divide the time into steps.
        model, plan, mesh: known when `begin` is called.
        gb: what the last step has taken, None until it is done.
    """

    folder: tempfile.TemporaryDirectory
    stack: ExitStack
    steps_left: int
    collectives: list[Collective] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    counter: MemoryCounter = field(default_factory=MemoryCounter)
    model: nn.Module | None = None
    plan: Plan | None = None
    mesh: Mesh | None = None
    gb: dict[str, float] | None = None

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count the last step, and exit at its end."""
        if optimizer.param_groups[0]["params"][0] not in {*self.model.parameters()}:
            return  # make_optimizers tries a class on a small parameter
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        if optimizer is not self.optimizers[0]:
            return
        self.steps_left -= 1
        if self.steps_left == 1:
            self.counter.peak = self.counter.total
            self.collectives.clear()
        if self.steps_left == 0:
            self.gb = self.count()
            sys.exit()

    def count(self) -> dict[str, float]:
        """The parts of the peak, as in memory.memory_estimate."""
        params = list(self.model.parameters())
        states = [state for o in self.optimizers for state in inner_optimizer(o).state.values()]
        parts = {
            "weights": gb_of(params),
            "gradients": gb_of([p.grad for p in params if p.grad is not None]),
            "optimizer": gb_of([t for state in states for t in state.values() if torch.is_tensor(t)]),
        }
        total = self.counter.peak / 1e9
        return parts | {"activations": total - sum(parts.values()), "total": total}


def gb_of(tensors: list[Tensor]) -> float:
    """The GB of the storages of tensors, each once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values()) / 1e9


def start(config: dict, script: str) -> None:
    """
    With the setting dry_run_ranks, run `script` again, as one of so many ranks, print what its second step
    has taken, and exit. Returns in that run, and without the setting.

    Raises:
        ValueError: the settings cannot be dry run.
    """
    ranks, rank = config["dry_run_ranks"], config["dry_run_rank"]
    if not (ranks or rank) or pretended_rank():
        return
    check(config)
    settings = SETTINGS | {"vocab_size": vocab_size_of(config)}
    if config["islands"] != 1:
        settings["local_steps"] = 1  # the second step averages
    # PowerSGD begins later
    settings["max_iters"] = 2 + POWERSGD_START * config["grad_compression"].startswith("powersgd")
    warnings.filterwarnings("ignore", message="Set timeout is now only supported|Accessing the data pointer")
    with ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="isogpt-dry-run-", ignore_cleanup_errors=True)
        settings["out_dir"] = settings["dataset"] = stack.enter_context(folder)
        write_random_tokens(Path(folder.name), settings["vocab_size"], 2 * config["block_size"] + 1)
        run = DryRun(folder, stack, settings["max_iters"])
        pretend(rank, ranks, run)
        sys.argv += [f"--{name}={value}" for name, value in settings.items()]
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit:
            if not run.gb:
                raise
    for line in report(run, config["local_steps"]):
        console.print_line(line)
    sys.exit()


def check(config: dict) -> None:
    """Raise ValueError if settings cannot be dry run."""
    ranks, rank = config["dry_run_ranks"], config["dry_run_rank"]
    if ranks < max(2, rank + 1):
        raise ValueError(f"dry_run_ranks is {ranks}: set --dry_run_ranks={max(2, rank + 1)} or more")
    if "RANK" in os.environ:
        raise ValueError("a dry run is one process: start train.py without a launcher")
    if config["init_from"] not in ("scratch", "auto"):
        raise ValueError(
            f"init_from is {config['init_from']!r}, but a dry run reads no weights: set --init_from=scratch, "
            "and the model's shape with --n_layer, --n_head and --n_embd"
        )
    if config["shares"] == "auto":
        raise ValueError("shares 'auto' measures all ranks, but a dry run has only one: set --shares=equal")


def begin(model: nn.Module, plan: Plan, mesh: Mesh, progress: Progress) -> None:
    """In a dry run, compute only shapes from here on, and count the memory of all tensors."""
    if not is_pretended():
        return
    run = dist.group.WORLD.run
    run.model, run.plan, run.mesh = model, plan, mesh
    progress.step = 1  # step 0 would be evaluated
    signal.set_wakeup_fd(-1)  # nothing is saved: a signal ends the run at once
    for number in stop_signals():
        signal.signal(number, partial(exit_at_once, run.folder))
    run.stack.callback(register_optimizer_step_post_hook(run.after_step).remove)
    run.stack.enter_context(run.counter)


def exit_at_once(folder: tempfile.TemporaryDirectory, number: int, _: object) -> None:
    """End a dry run that was asked to stop; its folder is deleted."""
    folder.cleanup()
    os._exit(128 + number)  # Python ignores SystemExit in a weak reference's callback


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
    columns = {"counted": run.gb, "predicted": predicted}
    columns = {name: [f"{gb:.4g}" for gb in parts.values()] for name, parts in columns.items()}
    yield from console.aligned({"GB at the peak": list(predicted), **columns})
    yield ""
    columns = {name: [] for name in ("collectives of a step", "ranks", "count", "bytes", "sent", "along")}
    for operation, ranks in dict.fromkeys((c.operation, c.ranks) for c in run.collectives if c.size):
        members = [c for c in run.collectives if (c.operation, c.ranks) == (operation, ranks)]
        numbers = [
            len(ranks),
            len(members),
            sum(c.size for c in members),
            round(sum(c.sent for c in members)),
        ]
        cells = [operation, *(f"{number:,}" for number in numbers), axes_of(ranks, mesh)]
        if len(ranks) > 1:  # else nothing is sent
            for column, cell in zip(columns.values(), cells, strict=True):
                column.append(cell)
    yield from console.aligned(columns)
    if plan.islands > 1 and local_steps > 1:
        yield f"those along islands take place once in {local_steps:,} steps"
    held, whole = run.gb["weights"] + run.gb["optimizer"], checkpoint_bytes(plan) / 1e9
    yield f"\ncheckpoint, weights and moments: this rank holds {held:.4g} GB of about {whole:.4g} GB"


def axes_of(ranks: tuple[int, ...], mesh: Mesh) -> str:
    """The axes of the mesh along which ranks differ."""
    places = [replace(mesh, rank=rank) for rank in ranks]
    return " x ".join(axis for axis in AXES if len({place.index(axis) for place in places}) > 1)


def checkpoint_bytes(plan: Plan) -> float:
    """Roughly the bytes of the weights and the optimizer's moments in a checkpoint, over all ranks."""
    of_blocks, of_others = moments_of(plan.optimizer)  # with Muon, one for the matrices of the blocks
    in_blocks = sum(block.parameters for block in plan.counts.blocks)
    return 4 * (plan.counts.parameters * (1 + of_others) - in_blocks * (of_others - of_blocks))
