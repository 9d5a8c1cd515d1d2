"""
The same bits on any number of processes, the setting `exact`: sums without an order.

A sum of floating-point numbers depends on the order of the terms, and the order depends on the layout. Here
each micro-batch is computed by one rank, with the same kernels on any rank, and the micro-batch's gradient is
rounded to multiples of UNIT. The multiples are added as 64-bit integers. Integer addition has no order.

Gradients of a micro-batch arrive in one of three ways:
- in the flat buckets of DistributedDataParallel (zero 0 and 1), which a hook reduces during the last
  micro-batch's backward pass;
- in fully_shard's reduce-scatter (zero 2 and 3), which is replaced;
- in `p.grad` (one process, one shard, a pipeline).
"""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isogpt.common.torch_versions import reduce_scatter_single
from isogpt.parallel.data_parallel import allocate_gradients, fsdp_units, sum_in_buckets
from isogpt.parallel.local_parts import local
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import Share

# What a gradient is rounded to. float32 numbers above 2^-27 (7e-9) are multiples of it: these are not
# rounded.
UNIT = 2.0**-50
# The integers of all micro-batches must add up to less than this, so that no partial sum overflows: in any
# order, an element of the gradient can reach 2^12.
LARGEST_SUM = 2.0**62
# What losses and the squared norm are rounded to. float64 numbers that are multiples of a unit add up
# exactly, in any order, up to 2^53 units.
LOSS_UNIT = 2.0**-32  # of a mean over the tokens of a step
TOKENS_UNIT = 2.0**-20  # of a sum over tokens
COARSE_UNIT, FINE_UNIT = 2.0**-6, 2.0**-42  # parts of the squared norm, which reaches 2^47 in coarse units
# Elements that are converted at once: by each thread of a CPU, whose cache holds intermediate results of this
# size, and on a GPU, where these results take little memory
CHUNK, GPU_CHUNK = 2**15, 2**22


def in_chunks(*flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same parts of flat tensors of equal length."""
    size = CHUNK * torch.get_num_threads() if flat[0].device.type == "cpu" else GPU_CHUNK
    return zip(*(t.split(size) for t in flat), strict=True)


def rounded(x: Tensor, unit: float) -> Tensor:
    """
    x in float64, rounded to multiples of `unit`, a power of two. From 2^51 units on, the multiples are
    coarser.
    """
    shift = 1.5 * 2.0**52 * unit  # float64 numbers of this size are multiples of the unit
    return (x.double() + shift).sub_(shift)


def add_rounded(totals: Tensor, values: Tensor, factor: Tensor) -> None:
    """Add `values` (n,) times `factor`, rounded to integers, to the int64 `totals` (n,), in place."""
    for total, part in in_chunks(totals, values):
        total += (part * factor).round_().to(torch.int64)


def write_sums(totals: Tensor, factor: Tensor, values: Tensor) -> None:
    """Write the int64 `totals` (n,) times `factor` to the float32 `values` (n,)."""
    for total, part in in_chunks(totals, values):
        torch.mul(total, factor, out=part)  # rounds once, since the factor is a power of two


def sum_of_squares(grads: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """
    Return the sum of the squares of flat float32 tensors as (multiple of COARSE_UNIT, multiple of FINE_UNIT
    below COARSE_UNIT). Both are exact sums of each element's rounded square: the same however elements are
    divided over tensors and ranks.
    """
    coarse, fine = [], []
    for grad in grads:
        for (part,) in in_chunks(grad):
            square = part.double().square_()  # float64 holds the square of a float32 number exactly
            high = rounded(square, COARSE_UNIT)
            coarse.append(high.sum())
            fine.append(rounded(square.sub_(high), FINE_UNIT).sum())
    if not grads:
        return torch.zeros(2, dtype=torch.float64, device=device).unbind()
    high, low = torch.stack(coarse).sum(), torch.stack(fine).sum()
    carry = (low / COARSE_UNIT).floor() * COARSE_UNIT
    return high + carry, low - carry


@dataclass(eq=False)
class ExactSums:
    """
    The sums of a step over all micro-batches. Every rank calls `start_step`, then `micro_batch` for each
    micro-batch, then `finish`. A pipeline calls `start_micro_batch` and `add_gradients` itself.

    Attributes:
        wrapped: the model that is called: wrapped with DistributedDataParallel if this is used.
        model: the model, distributed but not wrapped.
        share: which micro-batches this rank computes.
        scaler: the scaler of the loss, whose scale is a power of two.
        loss_divisor: the loss that is differentiated is a sum over tokens, divided by the tokens of a step.
        loss_weight: the weight of this rank's loss in the mean over all ranks, the loss of the batch.
    """

    wrapped: nn.Module
    model: nn.Module
    mesh: Mesh
    plan: Plan
    share: Share
    scaler: torch.amp.GradScaler
    keeps_memory: bool = field(init=False, default=False)  # see FloatSums
    totals: dict[Hashable, Tensor] = field(default_factory=dict)  # int64 sums, by bucket, unit or parameter
    fits: dict[Hashable, Tensor] = field(default_factory=dict)  # whether this rank's terms of a sum did fit
    buckets: list[Tensor] = field(default_factory=list)  # DDP's flat gradients
    is_padding: bool = False  # whether the current micro-batch consists of padding rows
    is_last: bool = False  # whether the current micro-batch is the rank's last of the step

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.loss_divisor = float(self.plan.sequences * self.plan.model_args["block_size"])
        self.loss_weight = self.mesh.data_size
        replicas = self.mesh.replicas
        self.group = replicas.group  # the ranks with the same parameters
        # each parameter's norm is computed by one of the ranks that hold it
        self.counted = list(self.model.parameters())[replicas.index :: replicas.size]
        # of a micro-batch's integers; the number of micro-batches does not depend on the layout
        self.largest = LARGEST_SUM / (self.share.sequences // self.share.rows)
        self.reduces_shards = self.mesh.shards.size > 1
        for unit in fsdp_units(self.model) if self.reduces_shards else ():
            unit.set_custom_reduce_scatter(IntegerReduceScatter(self))
            unit.set_gradient_divide_factor(1.0)  # the loss is divided by the targets of the batch
            unit.set_force_sum_reduction_for_comms(True)

    def allocate(self, x: Tensor, y: Tensor, autocast: AbstractContextManager) -> None:
        """
        Allocate gradients before the first step (all ranks), see data_parallel.allocate_gradients. From here
        on, the buckets of DistributedDataParallel are final, and they are reduced as integers.
        """
        self.keeps_memory = allocate_gradients(
            self.wrapped, self.plan.cuda_graphs, x, y, self.loss_divisor, autocast, passes=2
        )
        if not isinstance(self.wrapped, DistributedDataParallel):
            return
        grads = [p.grad for p in self.model.parameters() if p.requires_grad]
        flat = {grad.untyped_storage().data_ptr(): grad for grad in grads}
        self.buckets = [
            grad.as_strided((grad.untyped_storage().nbytes() // 4,), (1,), 0) for grad in flat.values()
        ]
        self.wrapped.register_comm_hook(self, reduce_bucket)

    @torch.no_grad()
    def start_step(self) -> None:
        """Set the gradients to zero, begin new sums, and read the loss scale."""
        self.wrapped.zero_grad(set_to_none=not self.keeps_memory)
        scale = self.scaler.scale(torch.ones((), device=self.device))
        self.to_units, self.from_units = 1 / (UNIT * scale), UNIT * scale
        for total in self.totals.values():
            total.zero_()
        self.fits.clear()
        if self.model.config.n_expert:
            self.routing = self.model.routing.double()

    @contextmanager
    def micro_batch(self, micro_step: int) -> Iterator[None]:
        """
        The context of a micro-batch's forward and backward pass, whose gradients are added. With DDP, only
        the last micro-batch reduces the buckets.
        """
        self.start_micro_batch(micro_step)
        # not FSDP's no_sync, also for a single shard: it would add micro-batches before they are rounded
        with self.wrapped.no_sync() if self.buckets and not self.is_last else nullcontext():
            yield
        self.add_gradients()

    def start_micro_batch(self, micro_step: int) -> None:
        """Note which micro-batch the next forward and backward pass are for."""
        self.is_padding = self.share.first(micro_step) >= self.share.sequences
        self.is_last = micro_step == self.share.micro_steps - 1
        self.model.reset_routing(self.device)

    @torch.no_grad()
    def add_gradients(self, module: nn.Module | None = None) -> None:
        """
        Add the gradients that a backward pass has left on this rank, of all parameters or of a module's.
        Nothing is left by FSDP, and by DDP's last micro-batch.
        """
        if self.model.config.n_expert and not self.is_padding:
            self.routing += rounded(self.model.routing, TOKENS_UNIT)
        if self.reduces_shards or (self.buckets and self.is_last):
            return
        for flat in self.buckets:
            self.add(flat.data_ptr(), flat)
            flat.zero_()
        for p in (module or self.model).parameters() if not self.buckets else ():
            if p.grad is not None:
                self.add(p, local(p.grad).flatten())
                p.grad = None

    def add(self, key: Hashable, values: Tensor) -> None:
        """Add this micro-batch's flat gradients to a sum."""
        total = self.total(key, values)
        if not self.is_padding:
            self.add_terms(key, total, values)

    def total(self, key: Hashable, values: Tensor) -> Tensor:
        """The integers of a sum, as many as `values`."""
        if key not in self.totals:
            self.totals[key] = torch.zeros(values.numel(), dtype=torch.int64, device=values.device)
        return self.totals[key]

    def add_terms(self, key: Hashable, total: Tensor, values: Tensor) -> None:
        """Add values to integers, and note whether they can be added: they are finite and small enough."""
        if not values.numel():
            return
        low, high = (bound * self.to_units for bound in torch.aminmax(values))
        fit = (low >= -self.largest) & (high <= self.largest)  # False for NaN
        self.fits[key] = fit & self.fits[key] if key in self.fits else fit
        add_rounded(total, values, self.to_units)

    def write(self, key: Hashable, values: Tensor) -> None:
        """Write a complete sum as flat gradients: NaN if this rank's terms did not fit."""
        factor = self.from_units
        if key in self.fits:
            factor = torch.where(self.fits[key], factor, torch.nan)
        write_sums(self.totals[key], factor, values)

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the step's sums where neither DDP nor FSDP does this (all ranks)."""
        if self.model.config.n_expert:
            self.model.routing = self.routing
        if self.reduces_shards or self.buckets:
            return
        params = [p for p in self.model.parameters() if p.requires_grad]
        totals = [self.total(p, local(p)) for p in params]
        if self.group:
            sum_in_buckets(totals, self.group)
        for p in params:
            p.grad = torch.empty_like(p, requires_grad=False)
            self.write(p, local(p.grad).view(-1))

    def loss_term(self, loss: Tensor) -> Tensor:
        """A micro-batch's loss as a term of a sum without an order: 0 for padding."""
        if self.is_padding:
            return torch.zeros_like(loss, dtype=torch.float64)
        return rounded(loss.detach(), LOSS_UNIT)

    @torch.no_grad()
    def norm_share(self) -> tuple[Tensor, Tensor]:
        """
        This rank's share of the gradient's squared norm, see `sum_of_squares`; NaN if the rank's terms of the
        gradient did not fit. The sum over all ranks is the squared norm.
        """
        grads = [local(p.grad).flatten() for p in self.counted if p.grad is not None]
        coarse, fine = sum_of_squares([grad for grad in grads if grad.numel()], self.device)
        if self.fits:
            coarse = torch.where(torch.stack(list(self.fits.values())).all(), coarse, torch.nan)
        return coarse, fine


def reduce_bucket(sums: ExactSums, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """
    Add the last micro-batch's gradients in a DDP bucket, and start the reduction (DDP's communication hook).
    """
    flat = bucket.buffer()
    key = flat.data_ptr()
    sums.add(key, flat)

    def write(done: torch.futures.Future) -> Tensor:
        done.value()
        sums.write(key, flat)
        return flat

    return dist.all_reduce(sums.totals[key], group=sums.group, async_op=True).get_future().then(write)


@dataclass(eq=False)
class IntegerReduceScatter:
    """
    The reduce-scatter of one unit of fully_shard. The output is 0 until a step's last micro-batch, whose
    output is the step's gradient.
    """

    sums: ExactSums

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for an input or an output."""
        return torch.empty(size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """
        Add the sum of the ranks' gradients of a micro-batch to this rank's shards (all ranks of the group).
        """
        sums, terms = self.sums, torch.zeros_like(input_tensor, dtype=torch.int64)
        if not sums.is_padding:
            sums.add_terms(self, terms, input_tensor)
        shard = torch.empty_like(output_tensor, dtype=torch.int64)
        reduce_scatter_single(shard, terms, group=group)
        total = sums.total(self, output_tensor).add_(shard)
        if not sums.is_last:
            output_tensor.zero_()
            return
        if sums.group:
            dist.all_reduce(total, group=sums.group)
        sums.write(self, output_tensor)
