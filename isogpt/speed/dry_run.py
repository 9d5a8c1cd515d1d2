"""
Dry runs: train.py runs as one of many ranks, without the others, see launch/pretended_ranks.py. It takes two
steps; the memory and collectives of the second are counted, and printed beside the planner's prediction.
"""

import json
import os
import runpy
import signal
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from isogpt.checkpoint.state import TrainState
from isogpt.common import console
from isogpt.data.dataset import GPT2_VOCAB
from isogpt.data.mixture import find_sources
from isogpt.launch.launchers import stop_signals
from isogpt.launch.pretended_ranks import Collective, is_pretended, pretend, pretended_rank
from isogpt.parallel.compression import POWERSGD_START
from isogpt.parallel.local_parts import local
from isogpt.parallel.mesh import AXES, Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import share_of_plan
from isogpt.parallel.slow_network import keeps_errors
from isogpt.speed.devices import memory_of
from isogpt.speed.launches import FIXED
from isogpt.speed.memory import rank_estimate
from isogpt.training.optim import moments_of
from isogpt.training.optimizer_class import inner_optimizer

# what takes a CPU longer, or does not fit, is computed with tensors without memory
MOST_REAL_FLOPS = 2e12
MOST_REAL_SHARE = 0.4  # of the machine's memory
MEANINGS = {
    "weights": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations, temporary",
    "total": "total",
}
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
}


class MemoryCounter(TorchDispatchMode):
    """
    Counts the bytes of all tensors that exist while this mode is entered. With a FakeTensorMode, tensors of
    floating-point numbers have no memory: only their shapes are computed.

    torch's MemTracker raises an exception in the second step, since it follows the model's modules (torch
    2.13).
    """

    def __init__(self, fake: Any = None) -> None:
        super().__init__()
        self.fake = fake
        self.sizes: dict[int, int] = {}  # bytes of each storage, by its address
        self.references: dict[int, weakref.ref] = {}
        self.resizable: set[int] = set()  # FSDP frees and allocates these without an operator
        self.total = self.peak = 0

    def __torch_dispatch__(
        self, operator: Any, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # the operators on its local part come here
        kwargs = kwargs or {}
        if active_fake_mode():  # DTensor asks for the shapes of results
            return operator(*args, **kwargs)
        inputs = list(tensors_in((*args, *kwargs.values())))
        if operator is torch.ops.aten._local_scalar_dense.default and is_fake(args[0]):
            return torch.ones((), dtype=args[0].dtype).item()  # a number of which only the shape is known
        if operator is torch.ops.aten.nonzero.default and is_fake(args[0]):
            return torch.zeros(0, args[0].dim(), dtype=torch.int64)
        if operator is torch.ops._c10d_functional.all_to_all_single.default and is_fake(args[0]):
            # only the shape of the result is computed, and the group is not called
            dist.distributed_c10d._resolve_process_group(args[-1]).record("all_to_all", [args[0]])
        if operator is torch.ops.aten._grouped_mm.default and is_fake(args[0]):
            result = args[0].new_empty(shape_of_grouped_mm(*args[:3]))
        elif self.fake and not inputs:
            with self.fake:
                result = operator(*args, **kwargs)
            if torch.is_tensor(result) and not result.is_floating_point():  # tokens, positions
                result = operator(*args, **kwargs)
        else:
            result = operator(*args, **kwargs)
        is_of_fsdp = operator.namespace == "fsdp"
        for tensor in (*inputs, *tensors_in((result,))):
            self.track(tensor, is_of_fsdp)
        if self.total > self.peak:
            self.find_resized()
            self.peak = max(self.peak, self.total)
        return result

    def track(self, tensor: Tensor, is_resizable: bool = False) -> None:
        """Count a tensor's storage, or count it again if its size has changed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.references:
            # the storage's address may be that of a later storage
            self.references[key] = weakref.ref(storage, partial(self.forget, key))
        if is_resizable:
            self.resizable.add(key)
        self.set_size(key, storage.nbytes())

    def set_size(self, key: int, size: int) -> None:
        """Note the bytes of a storage."""
        self.total += size - self.sizes.get(key, 0)
        self.sizes[key] = size

    def forget(self, key: int, _: weakref.ref) -> None:
        """Note that a storage was freed."""
        self.total -= self.sizes.pop(key, 0)
        del self.references[key]
        self.resizable.discard(key)

    def find_resized(self) -> None:
        """Look at the storages that FSDP may have freed."""
        for key in list(self.resizable):
            storage = self.references[key]()
            if storage is not None:
                self.set_size(key, storage.nbytes())

    def bytes_of(self, tensors: list[Tensor]) -> int:
        """The bytes of the storages of tensors, each once."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in map(local, tensors)}
        return sum(storages.values())


def tensors_in(values: tuple | list) -> Iterator[Tensor]:
    """The tensors among arguments or results of an operator."""
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def shape_of_grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> list[int]:
    """
    The shape of F.grouped_mm of rows of experts, or the gradient of their weights. For a CPU, torch has no
    such function in float32 (torch 2.13).
    """
    return [len(ends)] * (a.dim() == b.dim()) + [a.size(-2), b.size(-1)]


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape, but no memory."""
    return type(tensor).__name__ == "FakeTensor"


@dataclass
class Counted:
    """What the second step of a dry run has taken, in bytes."""

    parameters: int
    gradients: int
    optimizer: int  # its state, and what compression and islands keep
    peak: int
    parts: int  # of a checkpoint, on this rank
    collectives: list[Collective]


@dataclass
class DryRun:
    """
    A dry run. `start` makes it, and the process groups of the run refer to it.

    Attributes:
        collectives: of the run so far, which the process groups record.
        plan, mesh: known when `begin` is called.
        counted: None until the second step is done.
    """

    rank: int
    ranks: int
    stack: ExitStack
    steps_left: int
    collectives: list[Collective] = field(default_factory=list)
    plan: Plan | None = None
    mesh: Mesh | None = None
    counter: MemoryCounter | None = None
    counted: Counted | None = None

    def begin(self, plan: Plan, mesh: Mesh) -> None:
        """Count memory from here on, with tensors without memory if those of the plan are too large."""
        self.plan, self.mesh, fake = plan, mesh, None
        if not fits_here(plan, mesh):
            from torch._subclasses.fake_tensor import FakeTensorMode

            fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.counter = self.stack.enter_context(MemoryCounter(fake))

    def watch(self, state: TrainState) -> None:
        """Count the last step, between the ends of the last optimizer's last two steps."""

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if optimizer is not state.optimizers[-1]:
                return
            self.steps_left -= 1
            if self.steps_left == 1:
                self.counter.peak = self.counter.total
                self.collectives.clear()
            if self.steps_left == 0:
                self.counted = self.count(state)
                hook.remove()

        hook = register_optimizer_step_post_hook(after_step)

    def count(self, state: TrainState) -> Counted:
        """What the state and the step before have taken."""
        params, network = list(state.model.parameters()), state.slow_network
        kept = [held for o in state.optimizers for held in inner_optimizer(o).state.values()]
        if network.compression:
            kept.append(network.compression.errors)
        if network.islands:
            kept += [network.islands.weights, network.islands.momentum]
        tensors = [t for held in filter(None, kept) for t in held.values() if torch.is_tensor(t)]
        return Counted(
            parameters=self.counter.bytes_of(params),
            gradients=self.counter.bytes_of([p.grad for p in params if p.grad is not None]),
            optimizer=self.counter.bytes_of(tensors),
            peak=self.counter.peak,
            parts=sum(piece.nbytes for part in state.parts().values() for _, piece in part.pieces),
            collectives=list(self.collectives),
        )


# ------------------------------------------------------------------------------------------------------------
# what train.py calls: these functions do nothing without the setting dry_run_ranks


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
    folder = tempfile.TemporaryDirectory(prefix="isogpt-dry-run-", ignore_cleanup_errors=True)
    with ExitStack() as stack:
        settings = SETTINGS | {"out_dir": stack.enter_context(folder)}
        if config["islands"] != 1:
            settings["local_steps"] = 1  # the second step averages
        if not is_prepared(config):
            write_random_tokens(Path(folder.name), config)
            settings |= {"dataset": folder.name, "data_order": "random"}
        # PowerSGD begins later
        steps = 2 + POWERSGD_START * config["grad_compression"].startswith("powersgd")
        settings["max_iters"] = steps - 1
        run = DryRun(rank, ranks, stack, steps)
        pretend(rank, ranks, run)
        sys.argv += [f"--{name}={value}" for name, value in settings.items()]
        for number in stop_signals():
            signal.signal(number, partial(exit_at_once, folder))
        warnings.filterwarnings(
            "ignore", message="Set timeout is now only supported|Accessing the data pointer"
        )
        runpy.run_path(script, run_name="__main__")
    for line in report(run, config["local_steps"]):
        console.print_line(line)
    sys.exit()


def check(config: dict) -> None:
    """Raise ValueError if settings cannot be dry run."""
    ranks, rank = config["dry_run_ranks"], config["dry_run_rank"]
    if ranks == 1:
        raise ValueError("dry_run_ranks is 1, but a dry run needs several: set --dry_run_ranks=2 or more")
    if rank >= ranks:
        raise ValueError(
            f"dry_run_rank is {rank}, but dry_run_ranks is {ranks}: set --dry_run_ranks={rank + 1} or more, "
            "or a lower --dry_run_rank="
        )
    if "RANK" in os.environ:
        raise ValueError("a dry run is one process: start train.py without a launcher")
    if config["init_from"] not in ("scratch", "auto"):
        raise ValueError(
            f"init_from is {config['init_from']!r}, but a dry run reads no weights: set --init_from=scratch, "
            "and the model's shape with --n_layer, --n_head and --n_embd"
        )
    if config["shares"] == "auto":
        raise ValueError("shares 'auto' measures all ranks, but a dry run has only one: set --shares=equal")


def exit_at_once(folder: tempfile.TemporaryDirectory, number: int, _: object) -> None:
    """End a dry run that was asked to stop; its folder is deleted."""
    folder.cleanup()
    os._exit(128 + number)  # Python ignores SystemExit in a weak reference's callback


def is_prepared(config: dict) -> bool:
    """Whether the data set is there. Raises ValueError if neither it nor the vocabulary's size is known."""
    try:
        find_sources(config["dataset"])
    except ValueError as e:
        if not config["vocab_size"]:
            raise ValueError(
                f"{e}; to dry run without the data, set --vocab_size={GPT2_VOCAB} for GPT-2's tokens"
            ) from e
        return False
    return True


def write_random_tokens(folder: Path, config: dict) -> None:
    """Write a data set of random tokens."""
    length, ids = 2 * config["block_size"] + 1, config["vocab_size"]
    for split in ("train", "val"):
        tokens = np.random.default_rng(0).integers(0, ids, length, dtype=np.uint32)
        tokens.tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint32"}))


def current() -> DryRun | None:
    """The dry run that this process is."""
    return dist.group.WORLD.run if is_pretended() else None


def begin(plan: Plan, mesh: Mesh) -> None:
    """In a dry run, count the memory of all tensors from here on."""
    if run := current():
        run.begin(plan, mesh)


def watch(state: TrainState, sinks: list[Any]) -> None:
    """In a dry run, count what the last step takes, and report no steps: their losses mean nothing."""
    if run := current():
        sinks.clear()
        run.watch(state)


def fits_here(plan: Plan, mesh: Mesh) -> bool:
    """Whether this machine computes a rank's three steps in its memory, and within a minute or so."""
    needed = 1e9 * prediction(plan, mesh)["total"]
    share = share_of_plan(plan, mesh)
    tokens = share.rows * share.micro_steps * plan.model_args["block_size"]
    flops = 6 * plan.counts.parameters / (mesh.pp * mesh.cp * mesh.tp) * tokens
    return needed < MOST_REAL_SHARE * memory_of(torch.device("cpu")) and flops < MOST_REAL_FLOPS


# ------------------------------------------------------------------------------------------------------------
# the report


def report(run: DryRun, local_steps: int) -> Iterator[str]:
    """The lines of a dry run's report."""
    plan, mesh, counted = run.plan, run.mesh, run.counted
    kind = "tensors without memory" if run.counter.fake else "real tensors"
    degrees = " x ".join(f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1)
    share = share_of_plan(plan, mesh)
    yield f"\ndry run: rank {run.rank} of {run.ranks:,} ({degrees}), zero {plan.zero}, on a CPU with {kind}"
    tokens = plan.model_args["block_size"]
    count = console.count_text(share.micro_steps, "micro-batch", "micro-batches")
    yield f"a step: {count} of {share.rows} x {tokens:,} tokens on this rank"

    predicted = prediction(plan, mesh)
    kept = {"weights": counted.parameters, "gradients": counted.gradients, "optimizer": counted.optimizer}
    kept["activations"] = counted.peak - sum(kept.values())
    kept["total"] = counted.peak
    yield f"\n  {'GB at the peak':28} {'counted':>10} {'predicted':>10}"
    for name, size in kept.items():
        yield f"  {MEANINGS[name]:28} {size / 1e9:10.4g} {predicted[name]:10.4g}"

    sums: dict[tuple, list[Collective]] = {}
    for collective in counted.collectives:
        if len(collective.ranks) == 1:  # nothing is sent
            continue
        sums.setdefault((collective.operation, collective.ranks), []).append(collective)
    yield f"\n  {'collectives of a step':28} {'ranks':>6} {'count':>8} {'bytes':>18} {'sent':>18}  along"
    for (operation, ranks), members in sums.items():
        size, sent = sum(c.size for c in members), sum(c.sent for c in members)
        numbers = f"{len(ranks):6,} {len(members):8,} {size:18,} {round(sent):18,}"
        yield f"  {operation:28} {numbers}  {axes_of(ranks, mesh)}"
    if plan.islands > 1 and local_steps > 1:
        yield f"  those along islands take place once in {local_steps:,} steps"

    whole = f" of about {checkpoint_bytes(plan) / 1e9:.4g} GB"
    if plan.islands > 1 or keeps_errors(plan.grad_compression):  # what these keep is more
        whole = ""
    yield f"\ncheckpoint: this rank holds {counted.parts / 1e9:.4g} GB{whole}"


def checkpoint_bytes(plan: Plan) -> float:
    """Roughly the bytes of the weights and the optimizer's moments in a checkpoint, over all ranks."""
    of_blocks, of_others = moments_of(plan.optimizer)  # with Muon, one for the matrices of the blocks
    in_blocks = sum(block.parameters for block in plan.counts.blocks)
    return 4 * (plan.counts.parameters * (1 + of_others) - in_blocks * (of_others - of_blocks))


def prediction(plan: Plan, mesh: Mesh) -> dict[str, float]:
    """The planner's estimate of this rank's memory, in GB."""
    rows = max(share_of_plan(plan, mesh).rows_of)
    return rank_estimate(replace(plan, micro_batch=rows), mesh.index("pp"), 0.0)


def axes_of(ranks: tuple[int, ...], mesh: Mesh) -> str:
    """The axes of the mesh along which ranks differ."""
    places = [replace(mesh, rank=rank) for rank in ranks]
    return " x ".join(axis for axis in AXES if len({place.index(axis) for place in places}) > 1)
