"""The sums of a step's gradients over micro-batches and ranks, in floating point."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isogpt.parallel.compression import Compression
from isogpt.parallel.data_parallel import allocate_gradients
from isogpt.parallel.gradients import (
    clear_gradients,
    complete_gradients,
    norm_share,
    parameters_by_replica_count,
)
from isogpt.parallel.integer_sums import ExactSums
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import Share


@dataclass
class FloatSums:
    """
    Which micro-batches reduce gradients over the ranks, what the losses are divided by, and the gradient's
    norm. Every rank calls the same methods in each step. integer_sums.ExactSums has the same methods: some of
    them do nothing here, since autograd, DDP and FSDP add the gradients.

    Attributes:
        loss_divisor: the loss that is differentiated is a sum over tokens, divided by this number, so that
            its mean over the ranks of an island is the mean over the island's tokens.
        loss_weight: the weight of this rank's loss in the mean over all ranks, the loss of the batch.
        keeps_memory: whether gradients stay where they are, so that DDP or CUDA graphs find them.
    """

    model: nn.Module  # wrapped with DistributedDataParallel if this is used
    raw_model: nn.Module
    mesh: Mesh
    plan: Plan
    share: Share
    compression: Compression | None = None
    loss_divisor: float = field(init=False)
    loss_weight: float = field(init=False)
    keeps_memory: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        plan, share = self.plan, self.share
        tokens = share.island_sequences * plan.model_args["block_size"]
        self.loss_divisor = tokens / self.mesh.loss.size
        self.loss_weight = share.island_sequences * self.mesh.islands / plan.sequences
        self.by_replica_count = parameters_by_replica_count(self.raw_model, self.mesh)
        is_auto = plan.grad_sync == "auto"
        self.reduces_always = plan.grad_sync == "every" or (
            is_auto and plan.zero >= 2 and not plan.cpu_offload
        )
        self.adds_shards = is_auto and plan.cpu_offload  # copied to the CPU in the last micro-step

    def allocate(self, x: Tensor, y: Tensor, autocast: AbstractContextManager) -> None:
        """
        Allocate gradients before the first step (all ranks), see data_parallel.allocate_gradients. From here
        on, the buckets of DistributedDataParallel are final, and compression sends them.
        """
        self.keeps_memory = allocate_gradients(
            self.model, self.plan.cuda_graphs, x, y, self.loss_divisor, autocast
        )
        if self.compression:
            self.compression.attach(self.model)

    def start_step(self) -> None:
        """Set the gradients to zero; those whose memory is kept are not None afterwards."""
        clear_gradients([*chain(*self.by_replica_count.values())], self.keeps_memory)

    def start_micro_batch(self, micro_step: int) -> None:
        """Do nothing, since no sum depends on the number of the micro-batch."""

    def add_gradients(self, module: nn.Module | None = None) -> None:
        """Do nothing, since autograd adds to the gradients."""

    def loss_term(self, loss: Tensor) -> Tensor:
        """A micro-batch's loss as a term of the step's loss."""
        return loss.detach()

    @contextmanager
    def micro_batch(self, micro_step: int) -> Iterator[None]:
        """
        The context of a micro-batch's forward and backward pass. Gradients are reduced over the ranks in the
        last micro-batch or, with FSDP, in each, as grad_sync says.
        """
        is_last = micro_step == self.share.micro_steps - 1
        if self.reduces_always or (is_last and self.plan.grad_sync != "never"):
            yield
        elif isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        elif hasattr(self.model, "set_requires_gradient_sync"):  # FSDP2
            # with cpu_offload, shards are reduced and added on the GPU, and only the last micro-batch copies
            # them: adding on the CPU would wait for the GPU at each gradient
            model = self.model
            switch = model.set_requires_all_reduce if self.adds_shards else model.set_requires_gradient_sync
            switch(False)
            yield
            switch(True)
        else:
            yield

    def finish(self) -> None:
        """Complete the sums that the backward pass leaves open with tp, ep and pp (all ranks)."""
        reduces_data = self.plan.grad_sync != "never"
        complete_gradients(self.raw_model, self.mesh, self.plan.zero, reduces_data, self.compression)

    def norm_share(self) -> tuple[Tensor, float]:
        """
        This rank's share of the gradient's squared norm, in two parts, of which the second is 0, see
        integer_sums.sum_of_squares. The sum over all ranks is the squared norm.
        """
        return norm_share(self.by_replica_count), 0.0


def make_sums(
    model: nn.Module,
    raw_model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    share: Share,
    scaler: torch.amp.GradScaler,
    compression: Compression | None = None,
) -> FloatSums | ExactSums:
    """Make what adds a step's gradients: with exact as int64, so that sums do not depend on an order."""
    if plan.exact:
        return ExactSums(model, raw_model, mesh, plan, share, scaler)
    return FloatSums(model, raw_model, mesh, plan, share, compression)
