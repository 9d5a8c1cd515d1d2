"""
Gradient compression: data-parallel ranks on a slow network send each other fewer bytes to average their
gradients.

fp16, bf16 and PowerSGD are hooks of DistributedDataParallel that torch offers. The other kinds use error
feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847): each rank adds the compression error
of its gradient to its next gradient. The error feedback of torch's PowerSGD is not used, because it keeps
errors by bucket, whereas errors by parameter can be resumed on a different layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from isogpt.parallel.data_parallel import in_buckets, tied_over_ranks, views_of
from isogpt.parallel.local_parts import LocalPart, is_sharded, local, local_part_of, splits_of
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan

HALF_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
INT8_BLOCK = 256  # elements that share a scale
POWERSGD_START = 2  # torch's hook reduces whole gradients before this step
# matrices that would not shrink to 1/12 are sent whole: small embeddings train badly at low rank
POWERSGD_GAIN = 12


@dataclass
class Bucket:
    """
    Gradients that are reduced together, with the methods of DDP's GradBucket that torch's hooks call.
    """

    params: list[nn.Parameter]
    flat: Tensor  # (elements,)
    name: str
    is_last_one: bool

    def buffer(self) -> Tensor:
        """All gradients in one tensor."""
        return self.flat

    def gradients(self) -> Iterator[Tensor]:
        """
        Return the gradients as views of the buffer; tall matrices are cut into squares (stacked q, k, v into
        three).
        """
        for grad in filter(Tensor.numel, views_of(self.flat, [local(p) for p in self.params])):
            is_stack = grad.dim() == 2 and grad.size(0) % grad.size(1) == 0
            yield from grad.split(grad.size(1)) if is_stack else [grad]

    def index(self) -> str:
        """A name in place of DDP's number; it contains the sizes, as other versions may cut other buckets."""
        columns = sum(matrix.size(-1) for matrix in self.gradients())
        return f"{self.name}:{len(self.flat)}:{columns}"

    def is_last(self) -> bool:
        """Whether no bucket follows in this step."""
        return self.is_last_one


@dataclass
class Compression:
    """
    How data-parallel ranks reduce gradients, and the compression errors of this rank's gradients. For each
    parameter, the mean of the ranks' `errors`, DTensors if the parameters are, is the sum of the errors of
    the mean gradients so far.
    """

    model: nn.Module
    mesh: Mesh
    kind: str  # fp16, bf16, int8, powersgd or topk
    amount: float  # powersgd: the rank of the matrices that are sent; topk: the fraction of the elements

    def __post_init__(self) -> None:
        params = self.model.parameters() if keeps_errors(self.kind) else ()
        self.errors = {p: torch.zeros_like(p, requires_grad=False) for p in params}
        sizes = (int(self.amount) or 1, POWERSGD_START, POWERSGD_GAIN)
        options = dict(use_error_feedback=False, orthogonalization_epsilon=1e-8)
        self.powersgd = powerSGD_hook.PowerSGDState(None, *sizes, **options)
        # PowerSGD's low-rank factors by bucket, from which the next step starts. In a checkpoint, each rank's
        # have a name of their own: only torch knows their order in a bucket
        self.factors = {"p": self.powersgd.p_memory_dict, "q": self.powersgd.q_memory_dict}
        self.name_of_factors = f"powersgd:{int(self.amount)}.rank{self.mesh.rank}"

    @torch.no_grad()
    def average(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        """
        Replace a bucket of gradients by what was sent of its mean over the group (all ranks of the group).
        """
        flat = bucket.flat
        if self.kind in HALF_HOOKS:
            HALF_HOOKS[self.kind](group, bucket).wait()
            return
        errors = [local(self.errors[p]) for p in bucket.params]
        flat += torch.cat([error.flatten() for error in errors])
        if self.kind == "powersgd":
            error = flat.clone()
            self.powersgd.process_group = group
            # wait, since gloo's threads would start the collectives of several buckets in any order
            powerSGD_hook.powerSGD_hook(self.powersgd, bucket).wait()
            error -= flat
        elif self.kind == "topk":
            error = average_topk(flat, self.amount, group)
        else:
            error = average_int8(flat, group)
        torch._foreach_copy_(errors, views_of(error, errors))

    def average_all(self, params: list[nn.Parameter], group: dist.ProcessGroup, name: str) -> None:
        """
        `average` for gradients that are not in buckets of DistributedDataParallel; `name` is a unique prefix.
        """
        buckets = list(in_buckets(params))
        for i, bucket in enumerate(buckets):
            grads = [local(p.grad) for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            self.average(Bucket(bucket, flat, f"{name}{i}", i == len(buckets) - 1), group)
            torch._foreach_copy_(grads, views_of(flat, grads))

    def forget(self) -> None:
        """Drop the errors, after a step that was not taken."""
        for error in self.errors.values():
            error.zero_()
        for factors in self.factors.values():
            factors.clear()
        self.powersgd.rng.seed(0)  # so that new factors equal those of a run that has just started or resumed

    def restart(self, step: int, saved: dict[str, torch.Size]) -> None:
        """
        Start without errors before a step.

        Args:
            saved: the names (see state.flat) and shapes in a checkpoint. Memory is allocated for PowerSGD's
                factors among them.
        """
        self.forget()
        self.powersgd.iter = step
        prefix, device = f"optim.{self.name_of_factors}.", next(self.model.parameters()).device
        for name, shape in saved.items():
            if name.startswith(prefix):
                bucket, _, letter = name.removeprefix(prefix).rpartition(".")
                self.factors[letter][bucket] = torch.empty(shape, device=device)

    def saved_parts(self) -> dict[str, dict[str, LocalPart]]:
        """
        Return the errors by parameter name, and PowerSGD's factors. Errors of all ranks that hold the same
        part of a parameter are stacked, and this rank's error is a row of the stack.
        """
        parts, tied = {}, tied_over_ranks(self.model)
        names = {p: name for name, p in self.model.named_parameters()}
        for p, error in self.errors.items():
            holders = self.mesh.holders(p)
            if is_sharded(p):  # the sum over tp comes first
                holders = holders.without("tp")
            # wte and the head have separate errors if they are tied but on different ranks
            key = "error_of_head" if p is tied and self.mesh.index("pp") > 0 else "error"
            part = local_part_of(error, splits_of(p))
            parts[names[p]] = {key: part.in_row(holders.index, holders.size)}
        saved = parts[self.name_of_factors] = {}
        for letter, factors in self.factors.items():
            for bucket, factor in factors.items():
                saved[f"{bucket}.{letter}"] = local_part_of(factor)
        return parts


def make_compression(model: nn.Module, mesh: Mesh, plan: Plan) -> Compression | None:
    """
    Make the Compression of a plan; None if gradients are not compressed. `restart` is called when the model
    contains the weights to start from.
    """
    if plan.replica_compression == "none" or mesh.replicas.size == 1:
        return None
    kind, _, amount = plan.replica_compression.partition(":")
    return Compression(model, mesh, kind, float(amount or 0))


def keeps_errors(grad_compression: str) -> bool:
    """Whether a compression of gradients keeps its errors, which are added to the next gradients."""
    return grad_compression not in ("none", *HALF_HOOKS)


def average_bucket(state: tuple[Compression, dist.ProcessGroup], bucket: dist.GradBucket) -> Future[Tensor]:
    """DistributedDataParallel's communication hook."""
    compression, group = state
    if compression.kind in HALF_HOOKS:  # called here, since DDP does not accept bf16 with gloo as its hook
        return HALF_HOOKS[compression.kind](group, bucket)
    flat, done = bucket.buffer(), Future()
    compression.average(Bucket(bucket.parameters(), flat, str(bucket.index()), bucket.is_last()), group)
    done.set_result(flat)
    return done


def average_flat(flat: Tensor, kind: str, group: dist.ProcessGroup, generator: torch.Generator) -> None:
    """
    Replace a tensor (N,) by its mean over a group (all its ranks), sent unchanged (none), in fp16, bf16 or
    int8.
    """
    if kind == "int8":
        average_int8(flat, group, generator)
    elif kind in HALF_HOOKS:
        HALF_HOOKS[kind](group, Bucket([], flat, "", True)).wait()
    else:
        dist.all_reduce(flat, group=group)
        flat.div_(group.size())


def average_int8(flat: Tensor, group: dist.ProcessGroup, generator: torch.Generator | None = None) -> Tensor:
    """
    Replace a tensor (N,) by its mean over a group, sent twice as codes (Tang et al. 2021, arXiv:2102.02888).
    Each rank receives one share of every rank's tensor, averages these, and sends the mean to all ranks.

    Returns:
        The compression error of this rank's tensor, (N,); for this rank's share, the compression error of the
        mean, times the number of ranks.
    """
    n, rank, length = group.size(), group.rank(), len(flat)
    shares = F.pad(flat, (0, -length % (n * INT8_BLOCK))).view(n, -1)
    codes = encode(shares, generator)  # (n, bytes)
    errors = shares - decode(codes)
    received = torch.empty_like(codes)
    dist.all_to_all_single(received, codes, group=group)
    received = decode(received)
    received[rank] = shares[rank]  # the rank's own share was not sent
    mean = received.mean(0, keepdim=True)  # (1, elements of a share)
    code = encode(mean, generator)
    errors[rank] = n * (mean - decode(code))[0]
    dist.all_gather(list(codes.split(1)), code, group=group)
    flat.copy_(decode(codes).flatten()[:length])
    return errors.flatten()[:length]


def encode(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """
    Encode rows of numbers as int8, in blocks that share a float32 scale. Numbers are rounded up or down at
    random, so that their expected values stay the same (Alistarh et al. 2017, arXiv:1610.02132).

    Args:
        x: (rows, elements), the elements a multiple of INT8_BLOCK.

    Returns:
        (rows, bytes) uint8: the codes of all elements, then the scales of all blocks.
    """
    rows = len(x)
    blocks = x.view(rows, -1, INT8_BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    noise = torch.rand(blocks.shape, generator=generator, device=x.device)
    levels = noise.addcdiv_(blocks, scales.clamp(min=1e-38)).floor_()
    content = levels.clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    return torch.cat((content.view(rows, -1), scales.view(rows, -1).view(torch.uint8)), 1)


def decode(codes: Tensor) -> Tensor:
    """Decode bytes (rows, bytes) that `encode` returned into numbers (rows, elements)."""
    rows = len(codes)
    blocks = codes.size(1) // (INT8_BLOCK + 4)
    content, scales = codes.split((blocks * INT8_BLOCK, 4 * blocks), 1)
    scales = scales.contiguous().view(torch.float32)[..., None]  # (rows, blocks, 1)
    values = content.contiguous().view(torch.int8).float()
    return values.view(rows, blocks, INT8_BLOCK).mul_(scales).view(rows, -1)


def average_topk(flat: Tensor, fraction: float, group: dist.ProcessGroup) -> Tensor:
    """
    Replace a tensor (N,) by the mean over a group of the largest elements of each rank's tensor. Elements
    that are not sent count as zero (Aji and Heafield 2017, arXiv:1704.05021). Returns the compression error
    of this rank's tensor, (N,).
    """
    n, count = group.size(), max(1, round(fraction * len(flat)))
    chosen = flat.abs().topk(count, sorted=False).indices
    mine = torch.stack((chosen.int(), flat[chosen].view(torch.int32)))  # (2, count)
    everyone = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(everyone, mine, group=group)
    error = flat.index_fill(0, chosen, 0.0)
    flat.zero_()
    for places, values in everyone:
        flat[places.long()] += values.view(torch.float32) / n
    return error
