"""
Estimate the memory that a training step needs: for `bench.py --estimate`, for plans, and for the message
after running out of memory.

A rank's memory has four parts: weights, gradients, the optimizer's state, and activations. The first three
follow from the parameters that the rank holds (`RankPart`), which are counted from the modules of the model,
and from how ZeRO divides them. The activations follow by formula from the settings and the tokens of a
micro-batch, of which activations.py measures what they take.
"""

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from math import ceil

import torch

from isogpt.nn.counts import Counts, ModelCounts
from isogpt.nn.kernels import logits_at_once
from isogpt.parallel.integer_sums import COMPILED_CHUNK
from isogpt.parallel.mesh import splits_backward, stages_per_rank
from isogpt.parallel.pipeline import block_costs, cut_evenly, edges_of, stages_of
from isogpt.parallel.plan import Plan
from isogpt.parallel.recompute import recompute_every
from isogpt.parallel.shares import share_of
from isogpt.parallel.slow_network import keeps_errors
from isogpt.speed.activations import activations_of, is_fused
from isogpt.training.optim import moments_of

USUAL_GB, MOST_GB = 80, 1e6  # of a GPU that is neither here nor described; of one without a limit

# matches messages of PyTorch's allocators, and of CUDA, cuBLAS, cuDNN, NCCL and Triton, which allocate
# separately
OUT_OF_MEMORY = re.compile(
    r"out[ _]?of[ _]?memory|alloc(ation)?_failed|DefaultCPUAllocator|status_memory_error", re.I
)


def memory_estimate(plan: Plan, device_gb: float = 0.0) -> dict[str, float]:
    """
    Estimate the GB that a training step of a plan needs on a rank's device.

    The parts are weights, gradients, optimizer state (the moments, and what compression and islands keep),
    activations, and the total. In a pipeline, this is the first or the last rank, whichever needs more.

    Args:
        device_gb: memory of the GPU, on which the size of the loss's chunks depends (0: that of this
            machine's GPU, or usual without one).
    """
    ranks = (rank_estimate(plan, rank, device_gb) for rank in {0, plan.pp - 1})
    return max(ranks, key=lambda parts: parts["total"])


def rank_estimate(plan: Plan, pp_rank: int, device_gb: float) -> dict[str, float]:
    """Return `memory_estimate` for one rank of a pipeline."""
    part, in_flight = part_of(plan, pp_rank), micro_batches_in_flight(plan, pp_rank)
    activations = activation_bytes(plan, part, in_flight, device_gb)
    parts = state_bytes(plan, part)
    parts["activations"] = activations + pipeline_bytes(plan, part, pp_rank, in_flight)
    parts = {name: size / 1e9 for name, size in parts.items()}
    return parts | {"total": sum(parts.values())}


def largest_micro_batch(plan: Plan, gb: float) -> int:
    """
    Return the largest micro-batch, a power of two up to 256, that is estimated to fit into 80% of `gb`; at
    least 1.
    """
    sizes = [2**k for k in range(9)]
    return max(
        (n for n in sizes if memory_estimate(replace(plan, micro_batch=n))["total"] <= 0.8 * gb), default=1
    )


def memory_report(plan: Plan) -> str:
    """
    Describe the parts of memory_estimate(plan), and the settings that would lower the total, each with the
    new total.
    """
    full, fsdp = {"activation_checkpointing": "full"}, {"zero": 3}
    half = max(1, plan.micro_batch // 2)
    options = {
        f"--batch_size={half}": {"micro_batch": half},
        "--activation_checkpointing=full": full,
        "--fsdp=True": fsdp,
        "--fsdp=True --activation_checkpointing=full": fsdp | full,
        "--fsdp=True --cpu_offload=True": fsdp | {"cpu_offload": True},
        "--cuda_graphs=False": {"cuda_graphs": False},
        "--grad_sync=every": {"grad_sync": "every"},
    }
    parts = memory_estimate(plan)
    totals = {flags: memory_estimate(replace(plan, **changes))["total"] for flags, changes in options.items()}
    lower = [f"{flags} {total:.2f}" for flags, total in totals.items() if total < parts["total"]]
    text = "GB on each rank, estimated: " + ", ".join(f"{name} {part:.2f}" for name, part in parts.items())
    return f"{text}; lower totals: {', '.join(lower)}" if lower else text


# ------------------------------------------------------------------------------------------------------------
# parameters


@dataclass(frozen=True)
class RankPart:
    """
    What a rank of a pipeline holds of the model, before ZeRO divides it. Blocks may differ: the numbers of a
    block are the mean of the rank's blocks.

    Args:
        layers: number of blocks.
        block: parameters of a block, without its experts.
        block_experts: parameters of the experts that the rank holds of a block.
        block_embeddings: those of `block` that are looked up.
        block_matrices: weights of a block's matrices that a token is multiplied by, on any rank of tp and ep.
        edges: parameters outside of the blocks: embeddings, the last norm, the head.
        edge_matrices: `block_matrices` outside of the blocks, such as the head's.
        has_loss: whether the rank computes the loss, as a pipeline's last stage does.
    """

    layers: int
    block: float
    block_experts: float
    block_embeddings: float
    block_matrices: float
    edges: float
    edge_matrices: float
    has_loss: bool

    @property
    def dense(self) -> float:
        """Parameters other than experts."""
        return self.layers * self.block + self.edges

    @property
    def experts(self) -> float:
        """Parameters of experts."""
        return self.layers * self.block_experts


def part_of(plan: Plan, pp_rank: int) -> RankPart:
    """Return what a rank of a pipeline holds."""
    args, tp = plan.model_args, plan.tp
    n_stages = plan.pp * stages_per_rank(plan.pp_schedule) if plan.pp > 1 else 1
    stages = stages_of(pp_rank, plan.pp, plan.pp_schedule) if plan.pp > 1 else [0]
    sizes = args["block_size"], args["n_embd"]
    layers, blocks = blocks_on(plan.counts, *sizes, tuple(stages), n_stages)
    held, called = (edges_on(plan.counts, stages, n_stages, tied) for tied in (args["tied"], False))
    return RankPart(
        layers=layers,
        block=(blocks.parameters - blocks.experts) / layers / tp,
        block_experts=blocks.experts / layers / tp / plan.ep,
        block_embeddings=blocks.embeddings / layers / tp,
        block_matrices=blocks.matrices / layers,
        edges=sum(edge.parameters for edge in held) / tp,
        edge_matrices=sum(edge.matrices for edge in called),
        has_loss=n_stages - 1 in stages,
    )


@lru_cache
def blocks_on(
    counts: ModelCounts, block_size: int, n_embd: int, stages: tuple[int, ...], n_stages: int
) -> tuple[int, Counts]:
    """
    How many blocks these stages of a pipeline contain, and the counts of all of them together. Cached, since
    isogpt/speed/planner.py asks thousands of times.
    """
    runs = cut_evenly(block_costs(counts, block_size, n_embd), n_stages)
    blocks = [astuple(counts.blocks[i]) for stage in stages for i in runs[stage]]
    return len(blocks), Counts(*map(sum, zip(*blocks, strict=True)))


def edges_on(counts: ModelCounts, stages: Sequence[int], n_stages: int, tied: bool) -> list[Counts]:
    """
    The counts of the modules outside of the blocks that a rank with these stages holds; with tied=False those
    that it calls. Modules that pipeline.edges_of does not know are on every rank.
    """
    here = set().union(*(edges_of(stage, n_stages, tied) for stage in stages))
    elsewhere = edges_of(0, 1, tied) - here
    return [edge for name, edge in counts.outside.items() if name not in elsewhere]


# ------------------------------------------------------------------------------------------------------------
# weights, gradients and the optimizer's state: float32, and with FSDP also units in the dtype to compute in.
# ZeRO divides them by the number of shards (Rajbhandari et al. 2020, arXiv:1910.02054, section 5)


def shard(plan: Plan, dense: float, experts: float) -> float:
    """
    Return how many of these parameters a rank's shard contains. Experts are divided by ep first, and then
    over the ranks that hold the same experts, so there are as many shards in total.
    """
    shards = plan.world_size // (max(1, plan.islands) * plan.dp_replicate * plan.pp * plan.tp)
    return (dense + experts * plan.ep) / max(1, shards)


def state_bytes(plan: Plan, part: RankPart) -> dict[str, float]:
    """
    Return the bytes of the weights and gradients on a rank's device, and of the optimizer's moments with what
    compression and islands keep.
    """
    n, own = part.dense + part.experts, shard(plan, part.dense, part.experts)
    kept = own if plan.zero >= 2 else n
    if plan.zero >= 2:
        # ZeRO-3 has gathered the root unit, which stays, the block that computes, and those that arrive
        blocks = min(1 + plan.fsdp_prefetch, part.layers)
        gathered, size = part.edges + blocks * (part.block + part.block_experts), plan.torch_dtype.itemsize
        # with exact, autocast converts what has been gathered
        weights = (4 if plan.exact else size) * (n if plan.zero == 2 else gathered)
        # reduced in every micro-step, or only in the last
        gradients = size * (gathered if plan.grad_sync in ("auto", "every") else n)
        weights += 0 if plan.cpu_offload else 4 * own
        # 'auto' adds up the shards of the gradients on the device, and offloads the sum
        gradients += 0 if plan.cpu_offload and plan.grad_sync != "auto" else 4 * own
    else:
        weights = gradients = 4 * n
        if plan.cuda_graphs and plan.device_type == "cuda":
            gradients += 4 * n  # those of the graph, and those to which these are added
    if plan.exact:
        gradients += 8 * kept  # the sums of all micro-batches, as 64-bit integers
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer_bytes(plan, part, kept)}


def optimizer_bytes(plan: Plan, part: RankPart, kept: float) -> float:
    """
    Return the bytes of the optimizer's moments, and of what compression and islands keep. `kept`: the weights
    that the rank holds.
    """
    of_blocks, of_others = moments_of(plan.optimizer)  # with Muon, one for the matrices of the blocks
    fewer = (of_others - of_blocks) * part.layers * (part.block - part.block_embeddings)
    moments = of_others * part.dense - fewer, of_blocks * part.experts
    total = 4 * (shard(plan, *moments) if plan.zero >= 1 else sum(moments))
    if plan.cpu_offload:
        total = 0
    islands = max(1, plan.islands)
    if keeps_errors(plan.grad_compression) and plan.world_size > islands:
        total += 4 * kept
    if islands > 1:  # weights and momentum of the outer step, and the change that is sent
        total += 12 * kept
    return total


# ------------------------------------------------------------------------------------------------------------
# activations


def micro_batches_in_flight(plan: Plan, pp_rank: int) -> float:
    """
    Return how many micro-batches' activations a pipeline rank holds at once, as a multiple of the activations
    of all blocks of the rank.
    """
    pp, schedule = plan.pp, plan.pp_schedule
    if pp == 1:
        return 1
    micro_steps = micro_steps_of(plan)
    most = {
        "gpipe": micro_steps,
        "1f1b": pp - pp_rank,
        "interleaved": (3 * pp - 1) / 2 - pp_rank,
        "zero_bubble": pp - pp_rank / 2,
        "zbv": pp,
    }
    return min(micro_steps, most[schedule])


def micro_steps_of(plan: Plan) -> int:
    """How many micro-batches each rank of a pipeline computes in a step."""
    data_size = max(1, plan.world_size // (plan.pp * plan.cp * plan.tp))
    return share_of(plan.sequences, 0, data_size, plan.micro_batch, plan.pp).micro_steps


def pipeline_bytes(plan: Plan, part: RankPart, pp_rank: int, in_flight: float) -> float:
    """
    Return the bytes that torch.distributed.pipelining needs on a pipeline's rank, besides what the blocks
    keep (torch 2.11, 2.13).

    It allocates what a rank receives at the start, for all micro-batches of a step: the outputs of the stage
    before, and the gradients of the stage after. What is sent stays until it has arrived, or with two stages
    on a rank until the end of the step.
    """
    if plan.pp == 1:
        return 0.0
    micro_steps, last = micro_steps_of(plan), plan.pp * stages_per_rank(plan.pp_schedule) - 1
    stages = stages_of(pp_rank, plan.pp, plan.pp_schedule)
    tokens = plan.micro_batch * plan.model_args["block_size"] / (plan.cp * plan.tp)
    neighbors = sum((stage > 0) + (stage < last) for stage in stages)
    count = neighbors * micro_steps * len(stages) if len(stages) > 1 else neighbors * micro_steps + in_flight
    total = count * tokens * plan.stream_dtype.itemsize * plan.model_args["n_embd"]
    if splits_backward(plan.pp_schedule):  # a stage's gradients wait until those of its weights are computed
        total += part.layers / len(stages) * tokens * activations_of(plan).matmuls
    return total


def activation_bytes(plan: Plan, part: RankPart, in_flight: float, device_gb: float) -> float:
    """
    Return the peak bytes of activations and other temporary tensors in a micro-step: the largest of three
    moments.

    Args:
        in_flight: see `micro_batches_in_flight`.
        device_gb: see `memory_estimate`.
    """
    args, tp, size, kind = plan.model_args, plan.tp, plan.torch_dtype.itemsize, activations_of(plan)
    C, L, mode = args["n_embd"], part.layers, plan.activation_checkpointing
    gathered_tokens = plan.micro_batch * args["block_size"] // plan.cp  # in attention, the MLP and the loss
    tokens = gathered_tokens / tp

    # what blocks keep; recomputed blocks keep their input, and with 'selective' the results of matmuls
    gathered = (tp - 1) * 2 * size * C  # with tp: the inputs of attention and MLP, or their gradients
    kept = kind.block + gathered
    checkpoint = plan.stream_dtype.itemsize * C + (kind.matmuls if mode == "selective" else 0)
    every = recompute_every(mode)
    recomputed = ceil(L / every) if every else 0
    blocks = in_flight * tokens * ((L - recomputed) * kept + recomputed * checkpoint)

    # autocast copies weights, for the backward pass only those of blocks that are not recomputed
    copies = 2 * (part.block + part.block_experts) if plan.uses_autocast else 0
    head = 4 * ceil(args["vocab_size"] / tp) * C if part.has_loss else 0  # its gradient
    peak, loss_kept = loss_activations(plan, gathered_tokens, device_gb) if part.has_loss else (0, 0)
    loss = blocks + L * copies + max(tokens * kind.loss + peak, tokens * kind.head + loss_kept)
    backward = blocks + (L - recomputed) * copies + tokens * (kind.backward + gathered)
    if args["tied"]:  # the gradient of the head waits for that of the embeddings
        backward += head
    if every and (L - 1) % every == 0:  # the last block is recomputed
        backward += copies + tokens * (kept - checkpoint)
    if plan.cp > 1:  # gathered keys and values with their gradients, on a CPU in float32
        keys = C * args["n_kv_head"] // args["n_head"]
        backward += tokens * 4 * (4 if plan.device_type == "cpu" else size) * plan.cp * keys

    # tied: gradients of the head and of the embeddings, and their sum, besides the sum of earlier micro-steps
    end = 3 * head if args["tied"] else head
    if plan.exact and plan.zero < 2 and plan.device_type == "cuda":  # concatenated gradients
        end = max(end, 4 * min(part.dense + part.experts, COMPILED_CHUNK))
    return max(loss, backward, end)


def loss_activations(plan: Plan, tokens: int, device_gb: float = 0.0) -> tuple[int, int]:
    """
    Return the peak of the bytes that the head and the loss (isogpt.nn.kernels.summed_loss) of a micro-batch's
    tokens allocate, and what they keep for the backward pass.
    """
    args, size, on_cpu = plan.model_args, plan.torch_dtype.itemsize, plan.device_type == "cpu"
    V, C = ceil(args["vocab_size"] / plan.tp), args["n_embd"]
    # nanochat's soft cap keeps float32 logits before and after tanh
    capped = 8 * tokens * V if args["arch"] == "nanochat" and not is_fused(plan) else 0
    device_gb = device_gb or (0 if torch.cuda.is_available() else USUAL_GB)
    unchunked, per_chunk, floats_per_chunk = logits_at_once(
        on_cpu, size, V, int(1e9 * min(device_gb, MOST_GB))
    )
    if tokens <= max(1, unchunked // V):
        if is_fused(plan):  # the gradient takes the place of the logits
            return size * tokens * V, size * tokens * V
        return capped + 12 * tokens * V, capped + 4 * tokens * V  # log_softmax, and two gradients
    # gradients of the weight, in float32, and of the hidden states
    kept = capped + 4 * V * C + size * tokens * C
    chunk = size * V * min(tokens, max(1, per_chunk // V))
    weight_part = (size if on_cpu else 4) * min(floats_per_chunk, V * C)
    if size == 4:
        return kept + max(chunk + weight_part, 4 * V * C), kept
    chunk_in_floats = 4 * V * min(tokens, max(1, floats_per_chunk // V))
    return kept + max(chunk + max(chunk_in_floats, weight_part), (4 + size) * V * C), kept
