"""
The setting `exact`: sums that do not depend on an order, for the same bits on any number of processes.

A sum of floating-point numbers depends on the order of the terms, and the order depends on the layout. Here
each micro-batch is computed by one rank, with the same kernels on any rank, and the micro-batch's gradient is
rounded to multiples of UNIT. These are added as 64-bit integers, whose sum is the same in any order.

Without shards, each rank adds `p.grad` after every micro-batch, and a single all-reduce adds the sums of the
ranks when the step's last micro-batch is done: DistributedDataParallel is not used. With zero 2 and 3, the
reduce-scatter of fully_shard is replaced by one of integers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from isogpt.common.torch_versions import reduce_scatter_single
from isogpt.parallel.compilation import is_compiled
from isogpt.parallel.data_parallel import fsdp_units, in_buckets, norms_of, views_of
from isogpt.parallel.local_parts import like, local
from isogpt.parallel.mesh import Mesh
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


def add_rounded(totals: Tensor, values: Tensor, factor: Tensor, largest: float) -> Tensor:
    """
    Add `values` times `factor`, rounded to integers, to the int64 `totals` of equal shape, in place. Returns
    a bool tensor (): whether no integer is larger than `largest` and none is NaN.
    """
    terms = values * factor
    fit = terms.abs().amax(-1).amax() <= largest  # False for NaN
    totals += terms.round_().to(torch.int64)
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


class Conversions:
    """
    Calls the functions above with chunks of flat tensors. The bits are the same for any division into chunks,
    compiled or not, because factors are powers of two, integers are added, and all other sums and products
    are exact.

    Attributes:
        chunk: how many elements are converted at once.
        compiled: compiled forms of the functions, if there are any. On a GPU, they read and write each
            element once, instead of once in each of some ten operators.
    """

    def __init__(self, device: torch.device, compiles: bool) -> None:
        self.chunk, self.compiled = GPU_CHUNK, {}
        if compiles:  # a kernel for the first length, and one for all others, since FSDP's units have many
            self.chunk = COMPILED_CHUNK
            self.compiled = {f: torch.compile(f) for f in (add_rounded, write_sums, squares_of)}
        elif device.type == "cpu":
            self.chunk = CHUNK * torch.get_num_threads()

    def __call__(self, function: Callable, *flat: Tensor, **options: Tensor | float) -> list[Tensor]:
        """The results of a function for all chunks of flat tensors of equal length."""
        results = []
        for parts in zip(*(t.split(self.chunk) for t in flat), strict=True):
            n = len(parts[0])
            in_rows = n // ROW * ROW if self.compiled else 0
            if in_rows:
                rows = (part[:in_rows].view(-1, ROW) for part in parts)
                results.append(self.compiled[function](*rows, **options))
            if in_rows < n:
                results.append(function(*(part[in_rows:] for part in parts), **options))
        return results


def concatenated(tensors: list[Tensor]) -> Tensor:
    """This rank's parts of tensors as one flat tensor; a single one is not copied."""
    parts = [local(t).flatten() for t in tensors]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass(eq=False)
class ExactSums:
    """
    The sums of a step over all micro-batches, with the methods of gradients.FloatSums.

    Attributes:
        model: the model, distributed.
        share: which micro-batches this rank computes.
        scaler: the scaler of the loss, whose scale is a power of two.
        loss_divisor: the tokens of a step, since the ranks' gradients are added, not averaged.
        groups: without shards, (module, its parameters whose gradients are converted together, the place of
            their sum in `total`). The module is the model, or a stage of a pipeline.
        total: the sums of all groups, int64, (elements,).
        units: with shards, the reduce-scatters of fully_shard.
        factors: what turns the sum of each group or unit into a gradient: NaN if one of this rank's terms was
            too large.
        micro_step: the number of the current micro-batch.
        is_last: whether it is the rank's last of the step.
    """

    model: nn.Module
    mesh: Mesh
    plan: Plan
    share: Share
    scaler: torch.amp.GradScaler

    def __post_init__(self) -> None:
        plan, share = self.plan, self.share
        self.device = next(self.model.parameters()).device
        self.convert = Conversions(self.device, is_compiled(self.model))
        self.loss_divisor = float(plan.sequences * plan.model_args["block_size"])
        # limit of a micro-batch's integers; the number of micro-batches does not depend on the layout
        self.largest = LARGEST_SUM / (share.sequences // share.rows)
        units = fsdp_units(self.model) if self.mesh.shards.size > 1 else []
        self.units = [IntegerReduceScatter(self, unit, i) for i, unit in enumerate(units)]
        self.groups, size = [], 0
        for module in [] if units else getattr(self.model, "stages", [self.model]):
            trained = [p for p in module.parameters() if p.requires_grad]
            for params in in_buckets(trained, 4 * self.convert.chunk):
                start, size = size, size + sum(p.numel() for p in params)
                self.groups.append((module, params, slice(start, size)))
        self.total = torch.empty(size, dtype=torch.int64, device=self.device)

    def allocate(self, x: Tensor, y: Tensor, autocast: AbstractContextManager) -> None:
        """Do nothing, since no gradient keeps its memory."""

    @torch.no_grad()
    def start_step(self) -> None:
        """Drop the gradients, begin new sums, and read the loss scale."""
        self.micro_step = -1
        self.total.zero_()
        scale = self.scaler.scale(torch.ones((), device=self.device))
        self.to_units = 1 / (UNIT * scale)
        self.factors = [UNIT * scale] * len(self.groups or self.units)
        for unit in self.units:
            unit.total = None
        self.model.zero_grad()
        if self.model.config.n_expert:
            self.routing = self.model.routing.double()

    @property
    def is_padding(self) -> bool:
        """Whether the current micro-batch consists of padding rows."""
        return self.share.first(self.micro_step) >= self.share.sequences

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """The context of a micro-batch's forward and backward pass, whose gradients are added at its end."""
        self.micro_step, self.is_last = self.micro_step + 1, is_last
        self.model.reset_routing(self.device)
        yield
        if self.model.config.n_expert and not self.is_padding:
            self.routing += rounded(self.model.routing, TOKENS_UNIT)
        self.add_gradients(self.model, self.micro_step)

    @torch.no_grad()
    def add_gradients(self, module: nn.Module, micro_step: int) -> None:
        """Add what a micro-batch's backward pass has left in the model, or in a stage of a pipeline."""
        self.micro_step = micro_step
        for number, (owner, params, place) in enumerate(self.groups):
            if owner is module:
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
                for p in params:
                    p.grad = None
                self.add(number, self.total[place], concatenated(grads))

    def add(self, number: int, total: Tensor, grad: Tensor) -> None:
        """Add a micro-batch's flat gradient to a sum. Padding adds nothing, even if it is not finite."""
        if self.is_padding:
            return
        fits = self.convert(add_rounded, total, grad, factor=self.to_units, largest=self.largest)
        self.factors[number] = torch.where(torch.stack(fits).all(), self.factors[number], torch.nan)

    @torch.no_grad()
    def finish(self) -> None:
        """Add the sums of all ranks, and write the gradients (all ranks). FSDP has done so with shards."""
        if self.model.config.n_expert:
            self.model.routing = self.routing
        if self.groups and self.mesh.replicas.group:
            dist.all_reduce(self.total, group=self.mesh.replicas.group)
        self.gradient = torch.empty(self.total.shape, device=self.device)
        for number, (_, params, place) in enumerate(self.groups):
            flat = self.gradient[place]
            self.convert(write_sums, self.total[place], flat, factor=self.factors[number])
            grads = views_of(flat, [local(p) for p in params])
            for p, grad in zip(params, grads, strict=True):
                p.grad = like(p, grad)

    def loss_term(self, loss: Tensor) -> Tensor:
        """A micro-batch's loss as a term of a sum without an order."""
        return rounded(loss.detach(), LOSS_UNIT)

    def mean_loss(self, loss_sum: Tensor) -> Tensor:
        """This rank's term of the mean over all ranks, the loss of the batch."""
        return loss_sum * self.mesh.data_size

    @torch.no_grad()
    def norm_share(self) -> tuple[Tensor, Tensor]:
        """
        This rank's share of the gradient's squared norm, see `squares_of`; NaN if the rank's terms of the
        gradient did not fit. The sum over all ranks is the squared norm.
        """
        self.norms = norms_of(self.model.parameters())
        flat, replicas = [self.gradient], self.mesh.replicas
        if self.units:  # FSDP leaves no gradient of a parameter that is not used
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            flat = [concatenated(group) for group in in_buckets(grads, 4 * self.convert.chunk)]
        squares = [torch.zeros(2, dtype=torch.float64, device=self.device)]
        for grad in flat:  # each element is counted by one of the ranks that hold it
            part = grad.tensor_split(replicas.size)[replicas.index]
            squares += self.convert(squares_of, part)
        coarse, fine = torch.stack(squares).sum(0)
        return coarse + 0 * sum(self.factors), fine


@dataclass(eq=False)
class IntegerReduceScatter:
    """
    The reduce-scatter of one unit of fully_shard. The output is 0 until a step's last micro-batch, whose
    output is the step's gradient.
    """

    sums: ExactSums
    unit: nn.Module
    number: int  # of the unit
    total: Tensor | None = None  # int64, of this rank's shards; a unit may leave out the first micro-batch

    def __post_init__(self) -> None:
        self.unit.set_custom_reduce_scatter(self)
        self.unit.set_gradient_divide_factor(1.0)  # the loss is divided by the targets of the batch
        self.unit.set_force_sum_reduction_for_comms(True)

    def allocate(self, size: tuple, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for an input or an output."""
        return torch.empty(size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, **_: object) -> None:
        """
        Add the sum of the ranks' gradients of a micro-batch to this rank's shards (all ranks of the group).
        """
        terms = torch.zeros_like(input_tensor, dtype=torch.int64)
        self.sums.add(self.number, terms, input_tensor)
        shard = torch.empty_like(output_tensor, dtype=torch.int64)
        reduce_scatter_single(shard, terms, group=group)
        self.total = shard if self.total is None else self.total.add_(shard)
        if not self.sums.is_last:
            output_tensor.zero_()
            return
        if replicas := self.sums.mesh.replicas.group:
            dist.all_reduce(self.total, group=replicas)
        factor = self.sums.factors[self.number]
        self.sums.convert(write_sums, self.total, output_tensor, factor=factor)
