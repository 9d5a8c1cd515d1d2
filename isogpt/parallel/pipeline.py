"""
Pipeline parallelism: each rank of a group holds one or two stages (runs of consecutive blocks), and
micro-batches pass through the stages. The schedules are those of torch.distributed.pipelining.
"""

import logging
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.nn.counts import ModelCounts, count_model
from isogpt.nn.kernels import KVCache
from isogpt.parallel.data_parallel import shared_parameter
from isogpt.parallel.gradients import Sums
from isogpt.parallel.mesh import Mesh, stages_per_rank
from isogpt.parallel.plan import LayoutError, Plan
from isogpt.parallel.shares import Share

# the last stage returns a view, see Stage.forward: nothing changes the view in place
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
# setting -> class of torch.distributed.pipelining. GPipe: Huang et al. 2018, arXiv:1811.06965. 1F1B and
# interleaved: Narayanan et al. 2021, arXiv:2104.04473. Zero bubble, zbv: Qi et al. 2023, arXiv:2401.10241.
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


@lru_cache
def cut_evenly(costs: tuple[float, ...], n: int) -> tuple[range, ...]:
    """
    Cut a row of blocks into n runs of at least one block, so that the most expensive run is as cheap as
    possible.
    """
    before = (0.0, *accumulate(costs))

    @cache
    def best(first: int, runs: int) -> tuple[float, int]:
        """The cost of the most expensive of the runs that begin at `first`, and where the first run ends."""
        if runs == 1:
            return before[-1] - before[first], len(costs)
        ends = range(first + 1, len(costs) - runs + 2)
        return min((max(best(end, runs - 1)[0], before[end] - before[first]), end) for end in ends)

    starts = [0]
    for runs in range(n, 0, -1):
        starts.append(best(starts[-1], runs)[1])
    return tuple(range(*ends) for ends in pairwise(starts))


def block_costs(counts: ModelCounts, block_size: int, n_embd: int) -> tuple[float, ...]:
    """
    Return the FLOPs of each block's forward pass for a token, the first block with what comes before it, the
    last block with the final norm and the head. Those of attention come from a formula.
    """
    costs = [2.0 * block.used + 2 * block_size * n_embd for block in counts.blocks]
    first, last = edges_of(0, 2, tied=False), edges_of(1, 2, tied=False)
    for name, edge in counts.outside.items():
        costs[0] += 2.0 * edge.used * (name in first)
        costs[-1] += 2.0 * edge.used * (name in last)
    return tuple(costs)


def stages_of(rank: int, pp: int, pp_schedule: str) -> list[int]:
    """
    Return the stages of a rank of the group: in order, or for zbv along a V (rank 0 holds the first and the
    last).
    """
    if stages_per_rank(pp_schedule) == 1:
        return [rank]
    return [rank, 2 * pp - 1 - rank] if pp_schedule == "zbv" else [rank, rank + pp]


def edges_of(stage: int, n: int, tied: bool) -> set[str]:
    """The modules that one of n stages contains besides blocks; a tied wte and head are at both ends."""
    names = set()
    if stage == 0:
        names |= {"wte", "wpe", "ln_0"}
    if stage == n - 1:
        names |= {"ln_f", "lm_head"}
    return names | {"wte", "lm_head"} if tied and names else names


class Stage(nn.Module):
    """
    Consecutive blocks of a model. The first stage also contains the embeddings, the last stage the final norm
    and the head.
    """

    def __init__(self, model: nn.Module, number: int, n_stages: int, blocks: range) -> None:
        super().__init__()
        self.number, self.is_first, self.is_last = number, number == 0, number == n_stages - 1
        self.block_numbers = blocks
        self.blocks = nn.ModuleDict({str(i): model.transformer.h[i] for i in blocks})
        names = edges_of(number, n_stages, model.config.tied)
        modules = {**model.transformer, "lm_head": model.lm_head}
        # in the model's order, in which FSDP gathers the parameters on all ranks
        self.edges = nn.ModuleDict({name: modules[name] for name in modules if name in names})
        self.methods = [model]  # in a list: the model is not a part of the stage

    def forward(
        self,
        x: Tensor,
        routing: Tensor | None = None,
        positions: Tensor | None = None,
        caches: list[KVCache] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Run the blocks on token ids (B, T) in the first stage, else on the output of the stage before, (B, T,
        C).

        Returns (B, T, C); in training with experts, also what run_blocks returns for all experts up to here.
        """
        model = self.methods[0]
        if positions is None:  # a training batch
            positions = model.seams.positions(0, model.config.block_size, device=x.device)
        if self.is_first:
            x = model.embed(x, positions)
        x, stage_routing = model.run_blocks(self.blocks.items(), x, positions, caches)
        outputs = [x]
        if stage_routing is not None:
            outputs.append(stage_routing if routing is None else torch.cat((routing, stage_routing)))
        if self.is_last:
            # views: the library detaches other outputs of the last stage in place, and the second backward
            # pass of the zero-bubble schedules still needs the graph
            outputs = [output.view_as(output) for output in outputs]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


def split_layers(model: nn.Module, mesh: Mesh, pp_schedule: str) -> list[Stage]:
    """Remove the layers of other ranks from a model on the meta device; returns this rank's stages."""
    n = mesh.pp * stages_per_rank(pp_schedule)
    costs = block_costs(count_model(model), model.config.block_size, model.config.n_embd)
    runs = cut_evenly(costs, n)
    if name := shared_parameter(model, [[model.transformer.h[i] for i in run] for run in runs]):
        raise LayoutError(f"blocks of two pipeline stages share {name}: set --pp=1")
    numbers = stages_of(mesh.index("pp"), mesh.pp, pp_schedule)
    stages = [Stage(model, number, n, runs[number]) for number in numbers]
    held = {name for stage in stages for name in (*stage.blocks, *stage.edges)}
    for name in {*model.transformer.h._modules} - held:
        del model.transformer.h._modules[name]  # deleting from a ModuleList would renumber the others
    for name in edges_of(0, 1, tied=False) - held:
        model.transformer._modules.pop(name, None)
    if "lm_head" not in held:
        model.lm_head = None
    # the stages' parameters are the model's: named_parameters lists each parameter once
    model.stages = nn.ModuleList(stages)
    return stages


def cause_of(error: BaseException) -> BaseException:
    """
    Return the first error of a chain: torch.distributed.pipelining raises a RuntimeError from what a stage
    raised.
    """
    while error.__cause__:
        error = error.__cause__
    return error


class Pipeline(nn.Module):
    """
    What is called in place of a model whose layers are divided over the ranks of a group: this rank's stages,
    and how micro-batches pass through them.

    Args:
        model: the model that `split_layers` has divided.
        tp_parts: how many parts a sequence is divided into.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, plan: Plan, device: torch.device, tp_parts: int) -> None:
        super().__init__()
        self.model, self.mesh, self.plan = model, mesh, plan
        self.device, self.tp_parts = device, tp_parts
        self.config, self.arch, self.seams = model.config, model.arch, model.seams  # also for generate
        self.group, self.stages = mesh.group("pp"), list(model.stages)
        self.has_last = self.stages[-1].is_last
        # the rank of the group that holds each stage
        self.owners = {s: r for r in range(mesh.pp) for s in stages_of(r, mesh.pp, plan.pp_schedule)}

    def prepare(self, share: Share, scaler: torch.amp.GradScaler, sums: Sums, timer: Callable) -> None:
        """
        Make the schedule for steps with this rank's share of a batch, whose gradients `sums` receives. A
        `timer`, such as Clock.part, times a block of code under a name.
        """
        from torch.distributed import pipelining

        from isogpt.parallel.pipeline_stage import TimedStage

        # if a stage fails, the library would log the whole schedule before the error is raised
        logging.getLogger(pipelining.schedules.__name__).setLevel(logging.CRITICAL)
        plan = self.plan
        autocast = torch.autocast(self.device.type, plan.torch_dtype, enabled=plan.uses_autocast)
        stages = []
        for stage in self.stages:
            arrives = self.sent_before(stage.block_numbers.start, share.rows)
            leaves = self.sent_before(stage.block_numbers.stop, share.rows)
            place = (stage.number, len(self.owners), self.device)
            stages.append(TimedStage(timer, autocast, sums, stage, *place, arrives, leaves))

        def scaled_loss(output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
            x, routing = output if isinstance(output, tuple) else (output, None)
            with timer("stages"), autocast:
                return scaler.scale(self.model.predict(x, routing, targets, sums.loss_divisor)[1])

        self.scaler, self.sums = scaler, sums
        schedule = getattr(pipelining, SCHEDULES[plan.pp_schedule])
        held = stages if stages_per_rank(plan.pp_schedule) > 1 else stages[0]
        self.schedule = schedule(held, share.micro_steps, loss_fn=scaled_loss, scale_grads=False)

    def sent_before(self, block: int, rows: int) -> tuple[Tensor, ...]:
        """
        Return, on the meta device, what the stage that begins with this block receives for `rows` sequences:
        token ids, or a hidden state and, with experts, what those of the blocks before have returned.
        """
        c = self.config
        with torch.device("meta"):
            tokens = torch.empty(rows, c.block_size // self.mesh.cp, dtype=torch.int64)
            if block == 0:
                return (tokens,)
            hidden = torch.empty(self.shape(tokens), dtype=self.plan.stream_dtype, requires_grad=True)
            if not c.n_expert:
                return (hidden,)
            return hidden, torch.empty(block, rows, c.n_expert + 2, requires_grad=True)

    def shape(self, idx: Tensor) -> tuple[int, int, int]:
        """The shape of what stages send to each other for these token ids."""
        return idx.size(0), idx.size(1) // self.tp_parts, self.config.n_embd

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """
        Run the forward and backward passes of a step's micro-batches (all ranks).

        Returns:
            This rank's share of the loss, such that the mean over all ranks is the global batch's mean: 0 on
            ranks without the last stage.
        """
        x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        losses = []
        inputs, target = [x] if self.stages[0].is_first else [], y if self.has_last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        # scaler.get_scale() would wait for the GPU
        scale = self.scaler.scale(torch.ones((), device=self.device))
        if not losses:
            return torch.zeros((), device=self.device)
        terms = [self.sums.loss_term(loss / scale) for loss in losses]
        return torch.stack(terms).sum() * self.mesh.pp

    @torch.no_grad()
    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        target_count: float | None = None,
        caches: list[KVCache] | None = None,
        with_logits: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """
        Run GPT.forward without gradients, for evaluation and generation (all ranks of the group, with the
        same arguments). Returns logits on all ranks, or the share of the loss, see `step`.
        """
        if with_logits:
            raise LayoutError("with pp, only the last stage has logits: set --pp=1")
        x, me = idx, self.mesh.index("pp")
        positions = self.model.next_positions(idx, caches)
        for stage in self.stages:
            before, after = (self.owners.get(stage.number + i, me) for i in (-1, 1))
            if before != me:
                x = torch.empty(self.shape(idx), dtype=self.plan.stream_dtype, device=self.device)
                dist.recv(x, group=self.group, group_src=before)
            x = stage(x, positions=positions, caches=caches)
            if after != me:
                dist.send(x.contiguous(), group=self.group, group_dst=after)
        for i in range(len(caches or ())):
            if str(i) not in self.model.transformer.h._modules:
                caches[i].length += idx.size(1)  # the other ranks' caches have grown too
        if targets is not None:
            loss = x.new_zeros(())
            if self.has_last:
                _, loss = self.model.predict(x, None, targets, target_count)
            return None, loss.float() * self.mesh.pp
        logits = torch.empty(idx.size(0), 1, self.config.vocab_size, device=idx.device)
        if self.has_last:
            logits.copy_(self.model.predict(x, None, None, None)[0])
        dist.broadcast(logits, group=self.group, group_src=self.owners[max(self.owners)])
        return logits, None
