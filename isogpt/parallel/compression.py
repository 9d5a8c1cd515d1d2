"""
Gradient compression: data-parallel ranks on a slow network send each other fewer bytes for the mean of their
gradients.

The lossy kinds use error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847): the
compression error of a rank's gradient is added to the rank's next gradient. With signs, only a part is added
(Wu et al. 2018, arXiv:1806.08054), which trains better with AdamW. There is no momentum correction (Lin et
al. 2018, arXiv:1712.01887), which is for SGD, whose momentum is linear in the gradients. AdamW divides by the
second moment of the mean gradients, which a rank cannot compute from local gradients before they are reduced.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from isogpt.parallel.data_parallel import in_buckets, views_of
from isogpt.parallel.local_parts import LocalPart, is_sharded, local, local_part_of, splits_of
from isogpt.parallel.mesh import Mesh

BLOCKS = {"int8": 256, "sign": 64}  # elements that share a scale
KEPT = {"sign": 0.3}  # fraction of the errors that is added to the next gradient (otherwise 1)
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
POWERSGD_START = 2  # torch's hook reduces whole gradients before this step
# matrices that would not shrink to 1/12 are sent whole: small embeddings train badly at low rank
POWERSGD_GAIN = 12


@dataclass
class Compression:
    """
    How data-parallel ranks reduce gradients, and the compression errors of this rank's gradients. For each
    parameter, the mean of the ranks' `errors` is the sum of the errors of the mean gradients so far.
    """

    kind: str  # fp16, bf16, int8, sign, powersgd or topk
    amount: float  # powersgd: the rank of the matrices that are sent; topk: the fraction of the elements
    mesh: Mesh
    device: torch.device
    uses_feedback: bool = True
    errors: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    powersgd: PowerSGDState | None = None
    # PowerSGD's low-rank factors by bucket, also those read from a checkpoint
    factors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind == "powersgd":
            self.powersgd = PowerSGDState(
                None,
                int(self.amount),
                POWERSGD_START,
                POWERSGD_GAIN,
                use_error_feedback=False,
                orthogonalization_epsilon=1e-8,
            )

    def attach(self, model: nn.Module) -> None:
        """
        Let DistributedDataParallel reduce buckets with this compression; do nothing if the model is not
        wrapped.
        """
        if not isinstance(model, DistributedDataParallel):
            return
        half_hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}.get(
            self.kind
        )
        if half_hook and not is_sent_as_bytes(self.kind, model.process_group):
            model.register_comm_hook(model.process_group, half_hook)
        else:
            model.register_comm_hook((self, model.process_group), average_bucket)

    @torch.no_grad()
    def average(self, bucket: "Bucket", group: ProcessGroup) -> Tensor:
        """
        Replace a bucket of gradients by the mean over the group, as far as it was sent (all ranks of the
        group).
        """
        flat = bucket.flat
        if self.kind in HALF:
            return flat.copy_(half_mean(flat, self.kind, group))
        errors = [local(self.error_of(p)) for p in bucket.params]
        if self.uses_feedback:
            flat += torch.cat([error.flatten() for error in errors])
        if self.kind == "powersgd":
            error = flat.clone()
            self.low_rank_mean(bucket, group)
            error -= flat
        else:
            is_sparse = self.kind == "topk"
            mean, error = (
                topk_mean(flat, self.amount, group) if is_sparse else coded_mean(flat, self.kind, group)
            )
            flat.copy_(mean)
        torch._foreach_copy_(errors, views_of(error.mul_(KEPT.get(self.kind, 1.0)), errors))
        return flat

    def average_all(self, params: list[nn.Parameter], group: ProcessGroup, name: str) -> None:
        """
        `average` for gradients that are not in buckets of DistributedDataParallel; `name` is a unique prefix.
        """
        buckets = list(in_buckets(params))
        for i, bucket in enumerate(buckets):
            grads = [local(p.grad) for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            self.average(Bucket(bucket, flat, f"{name}{i}", i == len(buckets) - 1), group)
            torch._foreach_copy_(grads, views_of(flat, grads))

    def error_of(self, p: nn.Parameter) -> Tensor:
        """
        Return the compression error of this rank's gradient of a parameter; a DTensor if the parameter is.
        """
        if p not in self.errors:
            self.errors[p] = torch.zeros_like(p, requires_grad=False)
        return self.errors[p]

    def low_rank_mean(self, bucket: "Bucket", group: ProcessGroup) -> None:
        """
        Run torch's PowerSGD (Vogels et al. 2019, arXiv:1905.13727) in place, without torch's error feedback.
        """
        state, columns = self.powersgd, sum(matrix.size(-1) for matrix in bucket.gradients())
        key = f"{bucket.name}:{len(bucket.flat)}:{columns}"  # other versions may cut buckets differently
        if key in self.factors:
            state.p_memory_dict[bucket.name], state.q_memory_dict[bucket.name] = self.factors[key].values()
        state.process_group = group
        # wait, since gloo's threads would start the collectives of several buckets in any order
        powerSGD_hook(state, bucket).wait()
        if bucket.name in state.q_memory_dict:
            self.factors[key] = {"p": state.p_memory_dict[bucket.name], "q": state.q_memory_dict[bucket.name]}

    def forget(self) -> None:
        """Drop the errors, after a step that was not finite."""
        self.errors.clear()
        self.factors.clear()
        if self.powersgd:
            self.powersgd.p_memory_dict.clear()
            self.powersgd.q_memory_dict.clear()
            self.powersgd.rng.seed(0)  # new factors equal those of a run that was just started or resumed

    def restart(self, step: int, saved: dict[str, torch.Size]) -> None:
        """
        Start without errors before a step.

        Args:
            saved: the names (see state.flat) and shapes in a checkpoint; makes room for PowerSGD's
                factors.
        """
        self.forget()
        if self.powersgd:
            self.powersgd.iter = step
        prefix = f"optim.{self.own_name()}."
        for name, shape in saved.items():
            if name.startswith(prefix):
                key, _, letter = name.removeprefix(prefix).rpartition(".")
                self.factors.setdefault(key, {})[letter] = torch.empty(shape, device=self.device)

    def own_name(self) -> str:
        """Return the name in a checkpoint of what belongs to this rank alone."""
        return f"powersgd:{int(self.amount)}.rank{self.mesh.rank}"

    def saved_parts(self, model: nn.Module) -> dict[str, dict[str, LocalPart]]:
        """
        Return the errors by parameter name and PowerSGD's factors, whose order in a bucket only torch knows.
        An error is a row of a stack, with the errors of all ranks that hold the same part of the parameter.
        """
        found = {}
        for name, p in model.named_parameters() if self.kind not in HALF else ():
            holders = self.mesh.holders(p)
            if is_sharded(p):  # the sum over tp comes first
                holders = holders.without("tp")
            is_second = (
                self.mesh.index("pp") > 0
                and p is getattr(model.lm_head, "weight", None)
                and model.config.tied
            )
            # wte and the head, tied on different ranks, have separate errors
            key = "error_of_head" if is_second else "error"
            part = local_part_of(self.error_of(p), splits_of(p))
            found[name] = {key: part.in_row(holders.index, holders.size)}
        factors = {
            f"{key}.{letter}": local_part_of(t)
            for key, pair in self.factors.items()
            for letter, t in pair.items()
        }
        return found | ({self.own_name(): factors} if factors else {})


@dataclass
class Bucket:
    """
    Gradients that are reduced together, with the methods of DDP's GradBucket that torch's PowerSGD calls.
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
        """Return the bucket's name, where DDP's GradBucket returns a number."""
        return self.name

    def is_last(self) -> bool:
        """Whether no bucket follows in this step."""
        return self.is_last_one


def average_bucket(
    state: tuple[Compression, ProcessGroup], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """DistributedDataParallel's communication hook."""
    compression, group = state
    done = torch.futures.Future()
    own = Bucket(bucket.parameters(), bucket.buffer(), str(bucket.index()), bucket.is_last())
    done.set_result(compression.average(own, group))
    return done


def is_sent_as_bytes(kind: str, group: ProcessGroup) -> bool:
    """Whether half-precision numbers are sent as bytes, because the backend cannot add them."""
    return kind == "bf16" and dist.get_backend(group) == "gloo"


def mean_over(flat: Tensor, kind: str, group: ProcessGroup, generator: torch.Generator) -> Tensor:
    """
    Return the mean of tensors (N,) over a group (all its ranks), sent unchanged (none), in fp16 or in int8.
    """
    if kind == "int8":
        return coded_mean(flat, kind, group, generator)[0]
    if kind in HALF:
        return half_mean(flat, kind, group)
    dist.all_reduce(flat, group=group)
    return flat.div_(group.size())


def half_mean(flat: Tensor, kind: str, group: ProcessGroup) -> Tensor:
    """The mean of tensors over a group, sent in half precision."""
    if is_sent_as_bytes(kind, group):
        return coded_mean(flat, kind, group)[0]
    half = flat.to(HALF[kind]).div_(group.size())
    dist.all_reduce(half, group=group)
    return half


def coded_mean(
    corrected: Tensor, kind: str, group: ProcessGroup, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """
    Return the mean of tensors (N,) over a group, sent twice as codes (Tang et al. 2021, arXiv:2102.02888).
    Each rank receives a share of all tensors, computes the mean, and sends the mean to all ranks.

    Returns:
        (the mean, the compression error of this rank's tensor; for this rank's share, the compression error
        of the mean, times the number of ranks)
    """
    n, rank = group.size(), group.rank()
    shares = F.pad(corrected, (0, -len(corrected) % (n * max(BLOCKS.values())))).view(n, -1)
    codes = encode(shares, kind, generator)  # (n, bytes)
    errors = shares - decode(codes, kind)
    received = torch.empty_like(codes)
    dist.all_to_all_single(received, codes, group=group)
    received = decode(received, kind)
    received[rank] = shares[rank]  # the rank's own share was not sent
    mean = received.mean(0, keepdim=True)  # (1, elements of a share)
    code = encode(mean, kind, generator)
    errors[rank] = n * (mean - decode(code, kind))[0]
    dist.all_gather(list(codes.split(1)), code, group=group)
    return decode(codes, kind).flatten()[: len(corrected)], errors.flatten()[: len(corrected)]


def encode(x: Tensor, kind: str, generator: torch.Generator | None = None) -> Tensor:
    """
    Encode rows of numbers as bytes.

    bf16 uses 16 bits for each number. int8 uses 8 bits, in blocks with a float32 scale, rounded up or down at
    random so that the expected value stays (Alistarh et al. 2017, arXiv:1610.02132). sign keeps only the
    signs, in blocks with a scale.

    Args:
        x: (rows, elements), the elements a multiple of the largest block.

    Returns:
        (rows, bytes) uint8
    """
    rows = len(x)
    if kind == "bf16":
        return x.bfloat16().view(torch.uint8)
    blocks = x.view(rows, -1, BLOCKS[kind])
    if kind == "int8":
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        noise = torch.rand(blocks.shape, generator=generator, device=x.device)
        levels = noise.addcdiv_(blocks, scales.clamp(min=1e-38)).floor_()
        content = levels.clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        scales = blocks.abs().mean(-1, keepdim=True)
        bits = (blocks >= 0).view(rows, -1, 8) * bit_values(x.device)
        content = bits.sum(-1, dtype=torch.uint8)
    return torch.cat((content.view(rows, -1), scales.view(rows, -1).view(torch.uint8)), 1)


def decode(codes: Tensor, kind: str) -> Tensor:
    """Decode bytes (rows, bytes) that `encode` returned into numbers (rows, elements)."""
    rows = len(codes)
    if kind == "bf16":
        return codes.view(torch.bfloat16).float()
    per_block = BLOCKS[kind] if kind == "int8" else BLOCKS[kind] // 8  # bytes
    blocks = codes.size(1) // (per_block + 4)
    content, scales = codes.split((blocks * per_block, 4 * blocks), 1)
    scales = scales.contiguous().view(torch.float32)[..., None]  # (rows, blocks, 1)
    if kind == "int8":
        values = content.contiguous().view(torch.int8).float()
    else:
        values = F.embedding(content.int(), signs_of_bytes(codes.device))
    return values.view(rows, blocks, BLOCKS[kind]).mul_(scales).view(rows, -1)


@cache
def bit_values(device: torch.device) -> Tensor:
    """
    Return the value of each bit of a byte (8,), made once for a device: a copy for each use would wait for a
    GPU.
    """
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


@cache
def signs_of_bytes(device: torch.device) -> Tensor:
    """Return the eight signs, -1 or 1, that each byte encodes (256, 8), made once for a device."""
    is_set = torch.arange(256, device=device)[:, None] & bit_values(device)
    return is_set.ne(0).float() * 2 - 1


def topk_mean(corrected: Tensor, fraction: float, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """
    Return the mean over a group of the largest elements of each rank's tensor (N,), and the compression error
    of this rank's tensor. Elements that are not sent count as zero (Aji and Heafield 2017, arXiv:1704.05021).
    """
    n, count = group.size(), max(1, round(fraction * len(corrected)))
    chosen = corrected.abs().topk(count, sorted=False).indices
    mine = torch.stack((chosen.int(), corrected[chosen].view(torch.int32)))  # (2, count)
    everyone = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(everyone, mine, group=group)
    mean = torch.zeros_like(corrected)
    for places, values in everyone:
        mean[places.long()] += values.view(torch.float32) / n
    return mean, corrected.index_fill(0, chosen, 0.0)
