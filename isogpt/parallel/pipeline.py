"""
Pipeline parallelism: each rank of a group holds one or two stages, which are runs of consecutive blocks, and
micro-batches pass through them. The schedules are those of torch.distributed.pipelining.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.hardware import Clock
from isogpt.kernels import KVCache
from isogpt.mesh import Mesh, stages_per_rank

# setting -> class of torch.distributed.pipelining. GPipe: Huang et al. 2018, arXiv:1811.06965. 1F1B and interleaved:
# Narayanan et al. 2021, arXiv:2104.04473. Zero bubble, zbv: Qi et al. 2023, arXiv:2401.10241.
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
             "zero_bubble": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble"}  # fmt: skip


def cut_evenly(costs: list[float], n: int) -> list[range]:
    """Cut a row of blocks into n runs of at least one block, such that the most expensive run is as cheap as it can."""

    @lru_cache(maxsize=None)
    def best(first: int, runs: int) -> tuple[float, list[range]]:
        if runs == 1:
            return sum(costs[first:]), [range(first, len(costs))]
        found = []
        for end in range(first + 1, len(costs) - runs + 2):
            cost, others = best(end, runs - 1)
            found.append((max(cost, sum(costs[first:end])), [range(first, end), *others]))
        return min(found, key=lambda choice: choice[0])

    return best(0, n)[1]


def block_costs(model: nn.Module) -> list[float]:
    """
    FLOPs of each block's forward for a token; the last one with the head. Embeddings are looked up: no FLOPs.
    """
    c, block = model.config, model.transformer.h[0]
    costs = [2.0 * sum(p.numel() for p in block.parameters()) + 2 * c.block_size * c.n_embd] * c.n_layer
    costs[-1] += 2.0 * c.vocab_size * c.n_embd
    return costs


def stages_of(rank: int, pp: int, pp_schedule: str) -> list[int]:
    """The stages of a rank of the group: in turn, or for zbv along a V, so that rank 0 has the first and the last."""
    if stages_per_rank(pp_schedule) == 1:
        return [rank]
    return [rank, 2 * pp - 1 - rank] if pp_schedule == "zbv" else [rank, rank + pp]


class Stage(nn.Module):
    """Consecutive blocks of a model, the first stage with the embeddings, the last one with the final norm and the head."""

    def __init__(self, model: nn.Module, blocks: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self.blocks = nn.ModuleDict({str(i): model.transformer.h[i] for i in blocks})
        edges = ["wte", "wpe", "ln_0"] if is_first else []
        edges += ["ln_f"] if is_last else []
        if model.config.tied and is_last:
            edges.append("wte")
        self.edges = nn.ModuleList(model.transformer[name] for name in edges if name in model.transformer)
        if is_last or (is_first and model.config.tied):
            self.edges.append(model.lm_head)
        self.methods = [model]  # in a list: the model is not a part of the stage

    def forward(self, x: Tensor, positions: Tensor | None = None, caches: list[KVCache] | None = None) -> Tensor:
        """Token ids (B, T) in the first stage, else the output of the stage before, (B, T, C) -> (B, T, C)."""
        model = self.methods[0]
        if positions is None:  # a training batch
            positions = model.positions(0, model.config.block_size, device=x.device)
        if self.is_first:
            x = model.embed(x, positions)
        x = model.run_blocks(self.blocks.items(), x, positions, caches)
        # a view, since the library detaches other outputs of the last stage in place, and the zero-bubble schedules'
        # second backward still needs the graph
        return x.view_as(x) if self.is_last else x


def split_layers(model: nn.Module, mesh: Mesh, pp_schedule: str) -> list[Stage]:
    """Remove the layers of other ranks from a model on the meta device; returns this rank's stages."""
    n = mesh.pp * stages_per_rank(pp_schedule)
    runs, own = cut_evenly(block_costs(model), n), stages_of(mesh.index("pp"), mesh.pp, pp_schedule)
    stages = [Stage(model, runs[s], s == 0, s == n - 1) for s in own]
    for i in {*range(model.config.n_layer)} - {i for s in own for i in runs[s]}:
        del model.transformer.h._modules[str(i)]  # deleting from a ModuleList would number the others anew
    has_first, has_last, tied = 0 in own, n - 1 in own, model.config.tied
    kept = {"wte": has_first or (has_last and tied), "wpe": has_first, "ln_0": has_first, "ln_f": has_last}
    for name in [name for name, keep in kept.items() if not keep and name in model.transformer]:
        del model.transformer[name]
    if not (has_last or (has_first and tied)):
        model.lm_head = None
    model.stages = nn.ModuleList(stages)  # their parameters are the model's: named_parameters lists each one once
    return stages


def timed(function: Callable, clock: Clock, context: AbstractContextManager | None = None) -> Callable:
    """A stage's forward or backward, timed: the rest of a step is the bubble."""

    def timed_function(*args: object, **kwargs: object) -> object:
        with clock("stages"), context or nullcontext():
            return function(*args, **kwargs)

    return timed_function


@dataclass
class Pipeline:
    """This rank's stages and how micro-batches pass through them."""

    model: nn.Module
    mesh: Mesh
    pp_schedule: str
    stream_dtype: torch.dtype  # of what stages send to each other
    tp_parts: int  # of the sequence that a stage sends
    device: torch.device
    autocast: AbstractContextManager
    group: dist.ProcessGroup
    schedule: object = None

    def __post_init__(self) -> None:
        self.numbers = stages_of(self.mesh.index("pp"), self.mesh.pp, self.pp_schedule)
        self.n_stages = self.mesh.pp * len(self.numbers)
        self.model.forward = self.forward

    def prepare(self, micro_steps: int, rows: int, scaler: torch.amp.GradScaler, loss_divisor: float,
                clock: Clock) -> None:  # fmt: skip
        """Make the schedule for steps of `micro_steps` micro-batches of `rows` rows (all ranks)."""
        from torch.distributed import pipelining

        tokens = torch.empty(rows, self.model.config.block_size // self.mesh.cp, dtype=torch.int64, device="meta")
        hidden = torch.empty(self.shape(tokens), dtype=self.stream_dtype, device="meta", requires_grad=True)
        stages = []
        for number, module in zip(self.numbers, self.model.stages, strict=True):
            arrives = tokens if number == 0 else hidden
            stage = pipelining.PipelineStage(module, number, self.n_stages, self.device, arrives, hidden,
                                             group=self.group)  # fmt: skip
            stage.forward_one_chunk = timed(stage.forward_one_chunk, clock, self.autocast)
            stage.backward_one_chunk = timed(stage.backward_one_chunk, clock)
            stage.backward_weight_one_chunk = timed(stage.backward_weight_one_chunk, clock)
            stages.append(stage)

        def loss(x: Tensor, targets: Tensor) -> Tensor:
            with self.autocast:
                return scaler.scale(self.model.predict(x, targets, loss_divisor)[1])

        schedule = getattr(pipelining, SCHEDULES[self.pp_schedule])
        single = stages[0] if stages_per_rank(self.pp_schedule) == 1 else stages
        self.schedule = schedule(single, micro_steps, loss_fn=loss, scale_grads=False)
        self.micro_steps, self.scaler, self.clock = micro_steps, scaler, clock

    def step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """
        Forward and backward of a step's micro-batches (all ranks).

        Returns:
            this rank's share of the loss, such that the mean over all ranks is the global batch's mean: 0, except for
            the ranks with the last stage.
        """
        x, y = (torch.cat(parts) for parts in zip(*(next(batches) for _ in range(self.micro_steps)), strict=True))
        inputs, losses = (x,) if 0 in self.numbers else (), []
        self.schedule.step(*inputs, target=y if self.is_last else None, losses=losses, return_outputs=False)
        total = sum((loss.detach() for loss in losses), torch.zeros((), device=self.device))
        return total * (self.mesh.pp / self.scaler.get_scale())

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.n_stages - 1 in self.numbers

    def shape(self, idx: Tensor) -> tuple[int, int, int]:
        """The shape of what stages send to each other for token ids of this shape."""
        return idx.size(0), idx.size(1) // self.tp_parts, self.model.config.n_embd

    @torch.no_grad()
    def forward(self, idx: Tensor, targets: Tensor | None = None, target_count: float | None = None,
                caches: list[KVCache] | None = None) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """
        GPT.forward without gradients, for evaluation and generation (all ranks of the group, with the same arguments):
        logits on all ranks, or the share of the loss, see `step`.
        """
        positions, x = self.model.next_positions(idx.size(1), caches, idx.device), idx
        for number in range(self.n_stages):
            if number in self.numbers:
                x = self.model.stages[self.numbers.index(number)](x, positions, caches)
            x = self.pass_on(x, number, idx)
        for i, cache in enumerate(caches or ()):
            if str(i) not in self.model.transformer.h._modules:
                cache.length += idx.size(1)  # the other stages' caches have grown too
        if targets is not None:
            loss = self.model.predict(x, targets, target_count)[1] if self.is_last else x.new_zeros(())
            return None, loss.float() * self.mesh.pp
        logits = self.model.predict(x, None, None)[0].float().contiguous() if self.is_last else None
        if logits is None:
            logits = torch.empty(idx.size(0), 1, self.model.config.vocab_size, device=idx.device)
        dist.broadcast(logits, self.owner(self.n_stages - 1), group=self.group)
        return logits, None

    def owner(self, number: int) -> int:
        """The global rank that has a stage."""
        ranks = range(self.mesh.pp)
        index = next(r for r in ranks if number in stages_of(r, self.mesh.pp, self.pp_schedule))
        return dist.get_global_rank(self.group, index)

    def pass_on(self, x: Tensor, number: int, idx: Tensor) -> Tensor:
        """Send a stage's output to the rank with the next stage; returns it there."""
        if number == self.n_stages - 1 or self.owner(number) == self.owner(number + 1):
            return x
        if number in self.numbers:
            dist.send(x.contiguous(), self.owner(number + 1), group=self.group)
        if number + 1 in self.numbers:
            x = torch.empty(self.shape(idx), dtype=self.stream_dtype, device=self.device)
            dist.recv(x, self.owner(number), group=self.group)
        return x
