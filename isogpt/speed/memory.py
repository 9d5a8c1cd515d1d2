"""
Estimate the memory that a training step needs: for `bench.py --estimate`, for plans, and for the message
after running out of memory.

A rank's memory has four parts: weights, gradients, the optimizer's state, and activations. The first three
follow from the parameters that the rank holds (`RankPart`), which are counted from the modules of the model,
and from how ZeRO divides them. The activations follow by formula from the settings and the tokens of a
micro-batch, of which activations.py measures what they take.
"""

import re
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch

from isogpt.lab.combinations import typed
from isogpt.nn.kernels import logits_at_once
from isogpt.parallel.compression import keeps_errors
from isogpt.parallel.mesh import splits_backward, stages_per_rank
from isogpt.parallel.pipeline import block_costs, cut_evenly, edges_of, stages_of
from isogpt.parallel.plan import Plan
from isogpt.parallel.recompute import recompute_every
from isogpt.parallel.shares import share_of
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
    part = part_of(plan, pp_rank)
    in_flight, exchanged = pipeline_load(plan, part, pp_rank)
    activations = activation_bytes(plan, part, in_flight, device_gb)
    sizes = state_bytes(plan, part) | {"activations": exchanged + activations}
    parts = {name: size / 1e9 for name, size in sizes.items()}
    return parts | {"total": sum(parts.values())}


def largest_micro_batch(plan: Plan, gb: float) -> int:
    """
    Return the largest micro-batch, a power of two up to 256, that is estimated to fit into 80% of `gb`; at
    least 1.
    """
    rows = 256
    while rows > 1 and memory_estimate(replace(plan, micro_batch=rows))["total"] > 0.8 * gb:
        rows //= 2
    return rows


def memory_report(plan: Plan) -> str:
    """
    Describe the parts of memory_estimate(plan), and the settings that would lower the total, each with the
    new total.
    """
    parts = memory_estimate(plan)
    text = ", ".join(f"{name} {gb:.2f}" for name, gb in parts.items())
    recomputing = {"activation_checkpointing": "full"}
    lower = []
    for changes in (
        {"micro_batch": max(1, plan.micro_batch // 2)},
        recomputing,
        {"zero": 3},
        {"zero": 3} | recomputing,
        {"zero": 3, "cpu_offload": True},
        {"cuda_graphs": False},
        {"grad_sync": "every"},
    ):
        total = memory_estimate(replace(plan, **changes))["total"]
        if total < parts["total"]:
            flags = " ".join(typed(changes)).replace("micro_batch", "batch_size")
            lower.append(f"{flags} {total:.2f}")
    totals = f"; lower totals: {', '.join(lower)}" if lower else ""
    return f"GB on each rank, estimated: {text}{totals}"


# ------------------------------------------------------------------------------------------------------------
# parameters


class RankPart(NamedTuple):
    """
    What a rank of a pipeline holds of the model, before ZeRO divides it. Blocks may differ: the numbers of a
    block are the mean of the rank's blocks.

    Args:
        layers: number of blocks.
        block: parameters of a block.
        block_weights: those of `block` that are neither looked up nor of experts.
        block_matrices: weights of a block's matrices that a token is multiplied by, on any rank of tp and ep.
        edge_matrices: `block_matrices` outside of the blocks, such as the head's.
        has_loss: whether the rank computes the loss, as a pipeline's last stage does.
        dense, experts: parameters of experts, and all others.
    """

    layers: int
    block: float
    block_weights: float
    block_matrices: float
    edge_matrices: float
    has_loss: bool
    dense: float
    experts: float

    @property
    def parameters(self) -> float:
        """All parameters."""
        return self.dense + self.experts


def part_of(plan: Plan, pp_rank: int) -> RankPart:
    """Return what a rank of a pipeline holds."""
    args, tp, tied = plan.model_args, plan.tp, plan.model_args["tied"]
    n_stages, stages = 1, [0]
    if plan.pp > 1:
        n_stages = plan.pp * stages_per_rank(plan.pp_schedule)
        stages = stages_of(pp_rank, plan.pp, plan.pp_schedule)
    has_loss = n_stages - 1 in stages
    costs = block_costs(plan.counts, args["block_size"], args["n_embd"])
    runs = cut_evenly(costs, n_stages)
    # modules that edges_of does not know are on every rank
    elsewhere, blocks = edges_of(0, 1, tied), []
    for stage in stages:
        blocks += plan.counts.blocks[runs[stage].start : runs[stage].stop]
        elsewhere -= edges_of(stage, n_stages, tied)
    edges = [edge for name, edge in plan.counts.outside.items() if name not in elsewhere]
    layers = len(blocks)
    experts = sum(block.experts for block in blocks) / tp
    dense = sum(block.parameters for block in blocks) / tp - experts
    embeddings = sum(block.embeddings for block in blocks) / layers / tp
    return RankPart(
        layers=layers,
        block=dense / layers + experts / layers / plan.ep,
        block_weights=dense / layers - embeddings,
        block_matrices=sum(block.matrices for block in blocks) / layers,
        edge_matrices=sum(edge.matrices for edge in edges) if has_loss else 0,
        has_loss=has_loss,
        dense=dense + sum(edge.parameters for edge in edges) / tp,
        experts=experts / plan.ep,
    )


# ------------------------------------------------------------------------------------------------------------
# weights, gradients and the optimizer's state: float32, and with FSDP also units in the dtype to compute in.
# ZeRO divides them by the number of shards (Rajbhandari et al. 2020, arXiv:1910.02054, section 5)


def shard(plan: Plan, dense: float, experts: float) -> float:
    """
    Return how many of these parameters a rank's shard contains. Experts are divided by ep first, and then
    over the ranks that hold the same experts, so there are as many shards in total.
    """
    shards = plan.world_size // (plan.islands * plan.dp_replicate * plan.pp * plan.tp)
    return (dense + experts * plan.ep) / max(1, shards)


def state_bytes(plan: Plan, part: RankPart) -> dict[str, float]:
    """
    Return the bytes of the weights and gradients on a rank's device, and of the optimizer's moments with what
    compression and islands keep.
    """
    n, held, size = part.parameters, part.parameters, plan.torch_dtype.itemsize
    on_device = 0 if plan.cpu_offload else 4
    weights = gradients = 4 * n
    if plan.cuda_graphs and plan.device_type == "cuda":
        gradients += 4 * n  # those of the graph, and those to which these are added
    if plan.zero >= 2:
        held = shard(plan, part.dense, part.experts)
        # of the blocks, ZeRO-3 has gathered the one that computes, and the next one
        blocks = min(2, part.layers)
        gathered = n - (part.layers - blocks) * part.block
        whole = n if plan.zero == 2 else gathered
        # with exact, autocast converts what has been gathered
        weights = on_device * held + (4 if plan.exact else size) * whole
        # 'auto' adds up the shards of the gradients on the device, and offloads the sum
        gradients = (4 if plan.grad_sync == "auto" else on_device) * held
        # reduced in every micro-step, or only in the last
        gradients += size * (gathered if plan.grad_sync in ("auto", "every") else n)
    if plan.exact:
        gradients += 8 * held  # the sums of all micro-batches, as 64-bit integers

    of_blocks, of_others = moments_of(plan.optimizer)  # with Muon, one for the matrices of the blocks
    fewer = (of_others - of_blocks) * part.layers * part.block_weights
    dense, experts = of_others * part.dense - fewer, of_blocks * part.experts
    moments = shard(plan, dense, experts) if plan.zero else dense + experts
    optimizer = on_device * moments
    if plan.world_size > plan.islands and keeps_errors(plan.replica_compression):
        optimizer += 4 * held
    if plan.islands > 1:  # weights and momentum of the outer step, and the change that is sent
        optimizer += 12 * held
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


# ------------------------------------------------------------------------------------------------------------
# activations


def pipeline_load(plan: Plan, part: RankPart, pp_rank: int) -> tuple[float, float]:
    """
    Return how many micro-batches' activations a pipeline's rank holds at once, as a multiple of the
    activations of all its blocks, and the bytes that torch.distributed.pipelining needs besides (torch 2.11,
    2.13).

    It allocates what a rank receives at the start, for all micro-batches of a step: the outputs of the stage
    before, and the gradients of the stage after. What is sent stays until it has arrived, or with two stages
    on a rank until the end of the step.
    """
    pp, schedule = plan.pp, plan.pp_schedule
    if pp == 1:
        return 1, 0
    split = plan.cp * plan.tp
    replicas = max(1, plan.world_size // (pp * split))
    share = share_of(plan.sequences, 0, replicas, plan.micro_batch, pp)
    most = {
        "gpipe": share.micro_steps,
        "1f1b": pp - pp_rank,
        "interleaved": (3 * pp - 1) / 2 - pp_rank,
        "zero_bubble": pp - pp_rank / 2,
        "zbv": pp,
    }
    in_flight = min(share.micro_steps, most[schedule])
    stages = stages_of(pp_rank, pp, schedule)
    last = pp * len(stages) - 1
    received = share.micro_steps * sum((stage > 0) + (stage < last) for stage in stages)
    sent = in_flight if len(stages) == 1 else received
    tokens = plan.micro_batch * plan.model_args["block_size"] / split
    vector = plan.stream_dtype.itemsize * plan.model_args["n_embd"]
    exchanged = (received + sent) * tokens * vector
    if splits_backward(schedule):  # a stage's gradients wait until those of its weights are computed
        exchanged += part.layers / len(stages) * tokens * activations_of(plan).matmuls
    return in_flight, exchanged


def activation_bytes(plan: Plan, part: RankPart, in_flight: float, device_gb: float) -> float:
    """
    Return the peak bytes of activations and other temporary tensors in a micro-step: the largest of three
    moments.

    Args:
        in_flight: see `pipeline_load`.
        device_gb: see `memory_estimate`.
    """
    args, size, tp = plan.model_args, plan.torch_dtype.itemsize, plan.tp
    kind, layers, C = activations_of(plan), part.layers, args["n_embd"]
    gathered_tokens = plan.micro_batch * args["block_size"] // plan.cp  # in attention, the MLP and the loss
    tokens = gathered_tokens / tp

    # what blocks keep; recomputed blocks keep their input, and with 'selective' the results of matmuls
    gathered = (tp - 1) * 2 * size * C  # with tp: the inputs of attention and MLP, or their gradients
    kept = kind.block + gathered
    checkpoint = plan.stream_dtype.itemsize * C
    mode = plan.activation_checkpointing
    if mode == "selective":
        checkpoint += kind.matmuls
    every = recompute_every(mode)
    recomputed = ceil(layers / every) if every else 0
    whole = layers - recomputed
    blocks = in_flight * tokens * (whole * kept + recomputed * checkpoint)
    # autocast copies weights, for the backward pass only those of blocks that are not recomputed
    copies = 2 * part.block if plan.uses_autocast else 0

    loss = head = 0.0
    if part.has_loss:
        peak, kept_by_loss = loss_activations(plan, gathered_tokens, device_gb)
        peak = max(tokens * kind.loss + peak, tokens * kind.head + kept_by_loss)
        loss = blocks + layers * copies + peak
        if args["tied"]:  # its gradient waits for that of the embeddings
            head = 4 * ceil(args["vocab_size"] / tp) * C
    backward = blocks + whole * copies + tokens * (kind.backward + gathered) + head
    if every and (layers - 1) % every == 0:  # the last block is recomputed
        backward += copies + tokens * (kept - checkpoint)
    if plan.cp > 1:  # gathered keys and values with their gradients, on a CPU in float32
        keys = C * args["n_kv_head"] // args["n_head"]
        number = 4 if plan.device_type == "cpu" else size
        backward += tokens * 4 * number * plan.cp * keys
    # both gradients and their sum, besides the sum of earlier micro-steps
    return max(loss, backward, 3 * head)


def loss_activations(plan: Plan, tokens: int, device_gb: float = 0.0) -> tuple[int, int]:
    """
    Return the peak of the bytes that the head and the loss (isogpt.nn.kernels.summed_loss) of a micro-batch's
    tokens allocate, and what they keep for the backward pass.
    """
    args, size, on_cpu = plan.model_args, plan.torch_dtype.itemsize, plan.device_type == "cpu"
    V, C = ceil(args["vocab_size"] / plan.tp), args["n_embd"]
    if not device_gb and not torch.cuda.is_available():
        device_gb = USUAL_GB
    memory = int(1e9 * min(device_gb, MOST_GB))
    unchunked, per_chunk, floats_per_chunk = logits_at_once(on_cpu, size, V, memory)
    caps = args["arch"] == "nanochat" and not is_fused(plan)
    if tokens <= max(1, unchunked // V):
        logits = tokens * V
        if is_fused(plan):  # the gradient takes the place of the logits
            return size * logits, size * logits
        kept = (4 + size * caps) * logits  # log_softmax, and the soft cap's tanh
        return kept + 8 * logits, kept  # two gradients
    kept = 4 * V * C + size * tokens * C  # gradients of the weight, in float32, and of the hidden states
    rows, float_rows = (min(tokens, max(1, most // V)) for most in (per_chunk, floats_per_chunk))
    floats = 4 * float_rows * V * ((size < 4) + 3 * caps)
    weight_part = (size if on_cpu else 4) * min(floats_per_chunk, V * C)
    chunk = size * rows * V + max(floats, weight_part)
    # in the backward pass, both gradients are multiplied by a number
    products = kept + (size * V * C if size < 4 else 0)
    return kept + max(chunk, products), kept
