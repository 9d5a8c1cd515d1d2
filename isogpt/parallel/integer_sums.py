"""
The setting `exact`: sums that do not depend on an order, for the same bits on any number of processes.

A sum of floating-point numbers depends on the order of the terms, and the order depends on the layout. Here
each micro-batch is computed by one rank, with the same kernels on any rank, and the micro-batch's gradient is
rounded to multiples of UNIT. These are added as 64-bit integers, whose sum is the same in any order.

Gradients of a micro-batch arrive as flat tensors:
- the buckets of DistributedDataParallel (zero 0 and 1), which a hook reduces during the last micro-batch's
  backward pass;
- the inputs of fully_shard's reduce-scatter (zero 2 and 3), which is replaced;
- `p.grad` of several parameters, concatenated (one process, one shard, a pipeline).
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isogpt.common.torch_versions import reduce_scatter_single
from isogpt.parallel.compilation import is_compiled
from isogpt.parallel.data_parallel import allocate_gradients, fsdp_units, in_buckets, sum_in_buckets, views_of
from isogpt.parallel.gradients import clear_gradients
from isogpt.parallel.local_parts import like, local
from isogpt.parallel.mesh import Mesh, Role
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import Share

# What a gradient is rounded to. float32 numbers above 2^-27 (7e-9) are multiples of it, so they stay as they
# are.
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
# size; on a GPU, where these results take little memory; and by compiled code, which has no such results. The
# gradients of small parameters are concatenated up to this size.
CHUNK, GPU_CHUNK, COMPILED_CHUNK = 2**15, 2**22, 2**27
# Compiled code reduces rows of this length, and then the results, because only then does one kernel convert
# numbers and reduce them. Most parameters consist of whole rows.
ROW = 256


def rounded(x: Tensor, unit: float) -> Tensor:
    """
    x in float64, rounded to multiples of `unit`, a power of two. From 2^51 units on, the multiples are
    coarser.
    """
    shift = 1.5 * 2.0**52 * unit  # float64 numbers of this size are multiples of the unit
    return (x.double() + shift).sub_(shift)


def add_rounded(totals: Tensor, values: Tensor, factor: Tensor, largest: float, is_first: bool) -> Tensor:
    """
    Add `values` times `factor`, rounded to integers, to the int64 `totals` of equal shape, in place. Returns
    a bool tensor (): whether no integer is larger than `largest` and none is NaN.

    Args:
        is_first: whether totals contain nothing yet.
    """
    scaled = values * factor
    fit = scaled.abs().amax(-1).amax() <= largest  # False for NaN
    terms = scaled.round_().to(torch.int64)
    if is_first:
        totals.copy_(terms)
    else:
        totals += terms
    return fit


def write_sums(totals: Tensor, values: Tensor, factor: Tensor) -> None:
    """Write the int64 `totals` times `factor` to the float32 `values` of equal shape."""
    # rounds once, since the factor is a power of two; out= would divide the graph of torch.compile
    values.copy_(totals * factor)


def squares_of(values: Tensor) -> Tensor:
    """
    The sum of the squares of float32 `values` in two parts, (2,): a multiple of COARSE_UNIT, and one of
    FINE_UNIT. Both are exact sums of parts of each element's square.
    """
    square = values.double().square_()  # float64 holds the square of a float32 number exactly
    high = rounded(square, COARSE_UNIT)
    low = rounded(square.sub_(high), FINE_UNIT)
    return torch.stack((high.sum(-1).sum(), low.sum(-1).sum()))


@dataclass(frozen=True)
class Conversions:
    """
    Conversions of flat tensors: of gradients to integers, of sums to gradients, and of gradients to a squared
    norm. Their bits are the same for any division into chunks, compiled or not, because factors are powers of
    two, integers are added, and all other sums and products are exact.

    Args:
        chunk: how many elements are converted at once.
        compiled: compiled forms of the functions above, if there are any. On a GPU, they read and write each
            element once, instead of once in each of some ten operators.
    """

    chunk: int
    compiled: dict[Callable, Callable] = field(default_factory=dict)

    def results(self, function: Callable, *flat: Tensor, **how: Tensor | float | bool) -> list[Tensor]:
        """The results of a function for all chunks of flat tensors of equal length."""
        results = []
        for parts in zip(*(t.split(self.chunk) for t in flat), strict=True):
            n = len(parts[0])
            in_rows = n // ROW * ROW if self.compiled else 0
            if in_rows:
                rows = (part[:in_rows].view(-1, ROW) for part in parts)
                results.append(self.compiled[function](*rows, **how))
            if in_rows < n:
                results.append(function(*(part[in_rows:] for part in parts), **how))
        return results

    def add(self, totals: Tensor, values: Tensor, **how: Tensor | float | bool) -> Tensor:
        """See `add_rounded`."""
        fits = self.results(add_rounded, totals, values, **how)
        return torch.stack(fits).all() if len(fits) > 1 else fits[0]

    def write(self, totals: Tensor, values: Tensor, factor: Tensor) -> None:
        """See `write_sums`."""
        self.results(write_sums, totals, values, factor=factor)

    def sum_of_squares(self, grads: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """
        Return the sum of the squares of flat float32 tensors as (multiple of COARSE_UNIT, multiple of
        FINE_UNIT below COARSE_UNIT): the same however elements are divided over tensors and ranks.
        """
        sums = [part for grad in grads for part in self.results(squares_of, grad)]
        if not sums:
            return torch.zeros(2, dtype=torch.float64, device=device).unbind()
        high, low = torch.stack(sums).sum(0)
        carry = (low / COARSE_UNIT).floor() * COARSE_UNIT
        return high + carry, low - carry


def conversions_for(device: torch.device, compiles: bool = False) -> Conversions:
    """Conversions that suit a device, compiled or with PyTorch's operators."""
    if not compiles:
        return Conversions(CHUNK * torch.get_num_threads() if device.type == "cpu" else GPU_CHUNK)
    # a kernel for the first length, and one for all others, since DDP's buckets and FSDP's units have many
    functions = (add_rounded, write_sums, squares_of)
    return Conversions(COMPILED_CHUNK, {function: torch.compile(function) for function in functions})


def concatenated(tensors: list[Tensor]) -> Tensor:
    """Tensors as one flat tensor; a single tensor is not copied."""
    return torch.cat([t.flatten() for t in tensors]) if len(tensors) > 1 else tensors[0].flatten()


def in_groups(module: nn.Module, elements: int) -> list[list[nn.Parameter]]:
    """
    Divide a module's trained parameters into lists of at most this many elements on this rank. A larger
    parameter is alone in its list.
    """
    params = iter([p for p in module.parameters() if p.requires_grad])
    parts = [local(p.detach()) for p in module.parameters() if p.requires_grad]
    return [[next(params) for _ in group] for group in in_buckets(parts, 4 * elements)]


def share_of(flat: Tensor, ranks: Role) -> Tensor:
    """This rank's share of a flat tensor that all these ranks hold: whole rows, except in the last share."""
    size = ceil(len(flat) / (ranks.size * ROW)) * ROW
    return flat[size * ranks.index : size * (ranks.index + 1)]


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
    # int64 sums, by the address of a bucket, FSDP's unit, or the first parameter of a group
    totals: dict[Hashable, Tensor] = field(default_factory=dict)
    # for each sum to which this rank has added in this step, whether its terms did fit
    fits: dict[Hashable, Tensor] = field(default_factory=dict)
    buckets: list[Tensor] = field(default_factory=list)  # DDP's flat gradients
    flat: list[Tensor] = field(default_factory=list)  # the step's gradients of groups
    is_padding: bool = False  # whether the current micro-batch consists of padding rows
    is_last: bool = False  # whether it is the rank's last of the step

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.conversions = conversions_for(self.device, is_compiled(self.model))
        stages = getattr(self.model, "stages", [self.model])
        # parameters by stage, in groups whose gradients are concatenated
        self.groups = {stage: in_groups(stage, self.conversions.chunk) for stage in stages}
        self.loss_divisor = float(self.plan.sequences * self.plan.model_args["block_size"])
        self.loss_weight = self.mesh.data_size
        self.group = self.mesh.replicas.group  # the ranks with the same parameters
        # limit of a micro-batch's integers; the number of micro-batches does not depend on the layout
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
        clear_gradients([*chain(*chain(*self.groups.values()))], self.keeps_memory)
        scale = self.scaler.scale(torch.ones((), device=self.device))
        self.to_units, self.from_units = 1 / (UNIT * scale), UNIT * scale
        self.count = 0
        self.fits.clear()
        self.flat.clear()
        if self.reduces_shards:  # a unit may leave out the first micro-batch
            self.totals.clear()
        if self.model.config.n_expert:
            self.routing = self.model.routing.double()

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """
        The context of a micro-batch's forward and backward pass, whose gradients are added. With DDP, only
        the last micro-batch reduces the buckets.
        """
        self.start_micro_batch(self.count)
        self.count += 1
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
        Add the gradients that a backward pass has left on this rank, of all parameters or of a module's. FSDP
        leaves none, and neither does DDP in the last micro-batch.
        """
        if self.model.config.n_expert and not self.is_padding:
            self.routing += rounded(self.model.routing, TOKENS_UNIT)
        if self.reduces_shards or (self.buckets and self.is_last):
            return
        for flat in self.buckets:
            self.add(flat.data_ptr(), flat)
            flat.zero_()
        for params in self.groups[module or self.model] if not self.buckets else ():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            for p in params:
                p.grad = None
            self.add(params[0], concatenated([local(grad) for grad in grads]))

    def add(self, key: Hashable, values: Tensor) -> None:
        """Add this micro-batch's flat gradients to a sum, which begins anew in each step."""
        if key not in self.totals:
            self.totals[key] = torch.empty_like(values, dtype=torch.int64)
        is_first = key not in self.fits
        if not self.is_padding:
            self.add_terms(key, self.totals[key], values, is_first)
        elif is_first:  # padding comes last, so the rank computes nothing else in this step
            self.totals[key].zero_()

    def add_terms(self, key: Hashable, total: Tensor, values: Tensor, is_first: bool) -> None:
        """Add values to integers, and note whether they fit, which they do if finite and small enough."""
        if values.numel():
            how = dict(factor=self.to_units, largest=self.largest, is_first=is_first)
            fit = self.conversions.add(total, values, **how)
            self.fits[key] = fit & self.fits[key] if key in self.fits else fit

    def write(self, key: Hashable, values: Tensor) -> None:
        """Write a complete sum as flat gradients: NaN if this rank's terms did not fit."""
        factor = self.from_units
        if key in self.fits:
            factor = torch.where(self.fits[key], factor, torch.nan)
        self.conversions.write(self.totals[key], values, factor)

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the step's sums where neither DDP nor FSDP does this (all ranks)."""
        if self.model.config.n_expert:
            self.model.routing = self.routing
        if self.reduces_shards or self.buckets:
            return
        groups = list(chain(*self.groups.values()))
        if self.group:
            sum_in_buckets([self.totals[params[0]] for params in groups], self.group)
        for params in groups:
            flat = torch.empty(len(self.totals[params[0]]), device=self.device)
            self.write(params[0], flat)
            for p, grad in zip(params, views_of(flat, [local(p) for p in params]), strict=True):
                p.grad = like(p, grad)
            self.flat.append(flat)

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
        grads = self.buckets or self.flat
        if self.reduces_shards:
            # FSDP leaves no gradient of a parameter that is not used
            groups = [[p.grad for p in params if p.grad is not None] for params in self.groups[self.model]]
            grads = [concatenated([local(grad) for grad in group]) for group in groups if group]
        # each element is counted by one of the ranks that hold it
        shares = [share_of(grad, self.mesh.replicas) for grad in grads]
        coarse, fine = self.conversions.sum_of_squares(shares, self.device)
        if self.fits:
            coarse = torch.where(torch.stack(list(self.fits.values())).all(), coarse, torch.nan)
        return coarse, fine


@torch.no_grad()
def reduce_bucket(sums: ExactSums, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """
    Add the last micro-batch's gradients in a DDP bucket, and start the reduction (DDP's communication hook).
    """
    flat = bucket.buffer()
    key = flat.data_ptr()
    sums.add(key, flat)

    @torch.no_grad()
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
        sums, terms = self.sums, torch.empty_like(input_tensor, dtype=torch.int64)
        if sums.is_padding:
            terms.zero_()
        else:
            sums.add_terms(self, terms, input_tensor, is_first=True)
        shard = torch.empty_like(output_tensor, dtype=torch.int64)
        reduce_scatter_single(shard, terms, group=group)
        total = sums.totals[self] = sums.totals[self].add_(shard) if self in sums.totals else shard
        if not sums.is_last:
            output_tensor.zero_()
            return
        if sums.group:
            dist.all_reduce(total, group=sums.group)
        sums.write(self, output_tensor)


def make_sums(
    model: nn.Module,
    raw_model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    share: Share,
    scaler: torch.amp.GradScaler,
    compression: object = None,
) -> ExactSums:
    """The sums of a step's gradients: as integers with exact, else in floating point."""
    from isogpt.parallel.float_sums import FloatSums

    if plan.exact:
        return ExactSums(model, raw_model, mesh, plan, share, scaler)
    return FloatSums(model, raw_model, mesh, plan, share, compression)
