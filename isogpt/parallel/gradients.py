"""
The gradients of a step: their sums over micro-batches and ranks in floating point, and their norm. With the
setting `exact`, the sums are those of integer_sums.
"""

import math
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isogpt.launch.together import gather_objects, number_dtype
from isogpt.parallel.compression import Compression, average_bucket
from isogpt.parallel.data_parallel import Norms, norms_of, sum_in_buckets, tied_over_ranks, uses_ddp
from isogpt.parallel.integer_sums import ExactSums
from isogpt.parallel.local_parts import is_split, local, local_part_of, splits_of
from isogpt.parallel.mesh import Mesh, Role
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import Share


@dataclass
class FloatSums:
    """
    Which micro-batches reduce gradients over the ranks, what the losses are divided by, and the gradient's
    norm. Every rank calls `start_step`, then `micro_batch` for each micro-batch or a pipeline's step, then
    `finish`. integer_sums.ExactSums has the same methods.

    Attributes:
        model: wrapped with DistributedDataParallel if this is used.
        loss_divisor: what a micro-batch's loss, a sum over tokens, is divided by before it is differentiated,
            so that the mean of the ranks' gradients is that of an island's tokens.
        keeps_memory: whether gradients stay where they are, so that DDP or CUDA graphs find them.
    """

    model: nn.Module
    raw_model: nn.Module
    mesh: Mesh
    plan: Plan
    share: Share
    compression: Compression | None = None
    keeps_memory: bool = False

    def __post_init__(self) -> None:
        plan = self.plan
        self.uses_ddp = uses_ddp(plan, self.mesh)
        tokens = self.share.island_sequences * plan.model_args["block_size"]
        self.loss_divisor = tokens / self.mesh.loss.size
        self.params = list(self.raw_model.parameters())
        self.norms: Norms = {}  # of the last step's gradients
        self.by_replica_count = parameters_by_replica_count(self.raw_model, self.mesh)
        is_auto = plan.grad_sync == "auto"
        self.reduces_always = plan.grad_sync == "every" or (is_auto and plan.zero >= 2)
        self.adds_shards = is_auto and plan.cpu_offload

    def allocate(self, x: Tensor, y: Tensor, autocast: AbstractContextManager) -> None:
        """
        Allocate, before the first step (all ranks), gradients that keep their memory for the whole run, if
        DDP or CUDA graphs need them.

        DDP's gradients are views of buckets. DDP reorders the buckets after the first backward pass, and with
        three or more ranks a different order of summation gives different bits. Without one discarded forward
        and backward pass, a resumed run would differ in the last bits from an uninterrupted run. The pass is
        called exactly as in a step, so that torch.compile does not compile a second graph.

        With CUDA graphs, autograd would use the graph's output as the first micro-batch's gradient, and the
        graph's next run would overwrite it (pytorch issue 169545). If the gradient already exists, autograd
        adds the output to it.
        """
        self.keeps_memory = self.uses_ddp or self.plan.cuda_graphs
        if self.uses_ddp:
            with autocast:
                _, loss = self.model(x, y, self.loss_divisor)
            loss.backward()
            self.model.zero_grad(set_to_none=False)
            if self.compression:
                state = (self.compression, self.mesh.replicas.group)
                self.model.register_comm_hook(state, average_bucket)
        elif self.plan.cuda_graphs:
            for p in self.model.parameters():
                p.grad = torch.zeros_like(p)

    def start_step(self) -> None:
        """
        Set gradients to None, or to zero if their memory is kept. Module.zero_grad looks for the parameters
        in all modules, which takes 0.15 ms with GPT-2's 12 layers while a GPU waits for the host, and sets
        each gradient to zero with a separate kernel.
        """
        if self.keeps_memory:
            grads = [local(p.grad) for p in self.params if p.grad is not None]
            if grads:  # not if all parameters are frozen
                torch._foreach_zero_(grads)
            return
        for p in self.params:
            p.grad = None

    def micro_batch(self, is_last: bool) -> AbstractContextManager:
        """
        The context of a micro-batch's forward and backward pass. Gradients are reduced over the ranks in the
        last micro-batch or, with FSDP, in each, as grad_sync says.
        """
        reduces = is_last and self.plan.grad_sync != "never"
        if self.adds_shards:
            # on the GPU, and only the last micro-batch copies them: adding on the CPU would wait for the GPU
            # at each gradient
            self.model.set_requires_all_reduce(reduces)
        elif self.reduces_always:
            return nullcontext()
        elif self.plan.zero >= 2:
            self.model.set_requires_gradient_sync(reduces)
        elif self.uses_ddp and not reduces:
            return self.model.no_sync()
        return nullcontext()

    def add_gradients(self, module: nn.Module, micro_step: int) -> None:
        """Do nothing after a micro-batch of a pipeline's stage, since autograd has added its gradients."""

    def finish(self) -> None:
        """
        Add the gradients that the backward pass has left on several ranks (all ranks).

        With tp, gradients of parameters that are on every rank, each from a part of the sequence, are added.
        With ep, gradients of the same experts are added. With pp, gradients of data-parallel ranks are
        averaged, since the pipeline's stages are not wrapped with DDP. Gradients of wte and the tied head are
        added if these are on different ranks. With compression, gradients of the replicas of sharded
        parameters are averaged.
        """
        mesh = self.mesh
        if not (mesh.splits_model or self.compression):
            return
        params = [p for p in self.params if p.grad is not None]
        if mesh.tp > 1:
            whole = [p for p in params if not is_split(p, "tp")]
            sum_in_buckets([local(p.grad) for p in whole], mesh.group("tp"))
        experts = [p for p in params if is_split(p, "ep")]
        # experts' gradients contain the gradients of all ranks of ep already; the mean over the other axes
        # follows
        if experts:
            torch._foreach_div_([local(p.grad) for p in experts], mesh.ep)
        if self.plan.zero >= 2:
            if self.compression:
                self.average(params, mesh.replicas)
        else:
            self.average(experts, mesh.replicas.without("ep"))
            if mesh.pp > 1:
                self.average([p for p in params if not is_split(p, "ep")], mesh.replicas)
        tied = tied_over_ranks(self.raw_model)
        if tied is not None and tied.requires_grad:
            add_from_other_end(local(tied.grad), mesh)

    def average(self, params: list[nn.Parameter], ranks: Role) -> None:
        """Replace gradients by their mean over these ranks (all of them)."""
        group = ranks.group
        if not (group and params) or self.plan.grad_sync == "never":
            return
        if self.compression:
            self.compression.average_all(params, group, " ".join(ranks.axes))
            return
        grads = [local(p.grad) for p in params]
        sum_in_buckets(grads, group)
        torch._foreach_div_(grads, group.size())

    def loss_term(self, loss: Tensor) -> Tensor:
        """A micro-batch's loss as a term of the step's loss."""
        return loss.detach()

    def mean_loss(self, loss_sum: Tensor) -> Tensor:
        """This rank's term of the mean over all ranks, the loss of the batch."""
        return loss_sum * (self.share.island_sequences * self.mesh.islands / self.plan.sequences)

    def norm_share(self) -> tuple[Tensor, float]:
        """
        This rank's share of the gradient's squared norm, in two parts, of which the second is 0, see
        integer_sums.squares_of. The sum over all ranks is the squared norm.
        """
        self.norms, shares = norms_of(self.params), []
        for n, params in self.by_replica_count.items():
            held = [norm for p in params for norm in self.norms.get(p, ())]
            norms = torch.stack(held) if held else torch.zeros(0)
            shares.append(norms.to(number_dtype(norms.device)).square().sum() / n)
        return torch.stack(shares).sum(), 0.0


Sums = FloatSums | ExactSums


def make_sums(
    model: nn.Module,
    raw_model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    share: Share,
    scaler: torch.amp.GradScaler,
    compression: Compression | None = None,
) -> Sums:
    """
    The sums of a run's steps. `model` is wrapped with DistributedDataParallel if data_parallel.uses_ddp.
    """
    if plan.exact:
        return ExactSums(raw_model, mesh, plan, share, scaler)
    return FloatSums(model, raw_model, mesh, plan, share, compression)


def add_from_other_end(grad: Tensor, mesh: Mesh) -> None:
    """Add the gradient of the tied weight at the other end of a pipeline (the first and the last rank)."""
    end = mesh.pp - 1 - mesh.index("pp")
    other, theirs = dict(group=mesh.group("pp"), group_peer=end), torch.empty_like(grad)
    sent = dist.P2POp(dist.isend, grad.clone(), **other)
    received = dist.P2POp(dist.irecv, theirs, **other)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    grad += theirs


def parameters_by_replica_count(model: nn.Module, mesh: Mesh) -> dict[int, list[nn.Parameter]]:
    """
    Group this rank's parameters by the number of ranks that hold the same part. Islands count as well,
    although their gradients differ, so that the squared norm is the mean over the islands.
    """
    groups, tied = defaultdict(list), tied_over_ranks(model)
    for p in model.parameters():
        ends = 2 if p is tied else 1  # of the pipeline
        groups[ends * mesh.holders(p).size].append(p)
    return groups


def gradient_norms(model: nn.Module, norms: Norms | None = None) -> dict[str, float]:
    """
    Return the norm of each parameter's gradient over all ranks (all ranks).

    Args:
        norms: those of a step, from `norms_of`; None: of the gradients that the parameters have now.
    """
    norms = norms_of(model.parameters()) if norms is None else norms
    mine = {}
    for name, p in model.named_parameters():
        if p in norms:
            places = tuple(offsets for offsets, _ in local_part_of(p, splits_of(p)).pieces)
            mine[name, places] = torch.stack(norms[p]).double().square().sum()
    values = torch.stack(list(mine.values())).tolist() if mine else []  # a single copy from the device
    squares = {}
    for rank_squares in gather_objects(dict(zip(mine, values, strict=True))):
        for key, square in rank_squares.items():
            # with exact, a gradient that is not finite is NaN only on the rank that computed it
            if key not in squares or not math.isfinite(square):
                squares[key] = square
    sums = defaultdict(float)
    for (name, _), square in squares.items():
        sums[name] += square
    return {name: total**0.5 for name, total in sums.items()}
