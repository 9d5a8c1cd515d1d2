"""
Estimate the memory that a training step needs: for `bench.py --estimate`, for plans, and for the message
after running out of memory.

A rank's memory has four parts: weights, gradients, the optimizer's state, and activations. The first three
follow from the parameters that the rank holds (`RankPart`), which are counted from the modules of the model,
and from how ZeRO divides them. The activations follow by formula from the settings and the tokens of a
micro-batch; `about_edited_modules` names what the formulas do not know.
"""

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

from isogpt.nn.counts import Counts, ModelCounts
from isogpt.nn.kernels import (
    HALF_ATTENTION_CHUNK,
    HALF_ATTENTION_KEEPS_UP_TO,
    HALF_ATTENTION_UP_TO,
    logits_at_once,
)
from isogpt.parallel.integer_sums import COMPILED_CHUNK
from isogpt.parallel.mesh import splits_backward, stages_per_rank
from isogpt.parallel.pipeline import block_costs, cut_evenly, edges_of, stages_of
from isogpt.parallel.plan import Plan
from isogpt.parallel.recompute import recompute_every
from isogpt.parallel.shares import share_of
from isogpt.parallel.slow_network import keeps_errors
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
    parts = {
        "weights": weight_bytes(plan, part) / 1e9,
        "gradients": gradient_bytes(plan, part) / 1e9,
        "optimizer": optimizer_bytes(plan, part) / 1e9,
        "activations": activation_bytes(plan, part, in_flight, device_gb) / 1e9,
    }
    parts["activations"] += pipeline_bytes(plan, part, pp_rank, in_flight) / 1e9
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
    parts = memory_estimate(plan)
    half = max(1, plan.micro_batch // 2)
    full, fsdp = {"activation_checkpointing": "full"}, {"zero": 3}
    options = {f"--batch_size={half}": {"micro_batch": half}, "--activation_checkpointing=full": full}
    if plan.zero < 3 and plan.world_size > 1:
        options |= {"--fsdp=True": fsdp, "--fsdp=True --activation_checkpointing=full": fsdp | full}
    if plan.zero >= 2:
        options["--cpu_offload=True"] = {"cpu_offload": True}
    options |= {"--cuda_graphs=False": {"cuda_graphs": False}, "--grad_sync=every": {"grad_sync": "every"}}
    totals = {flags: memory_estimate(replace(plan, **changes))["total"] for flags, changes in options.items()}
    lower = [f"{flags} {total:.2f}" for flags, total in totals.items() if total < parts["total"]]
    text = "GB on each rank, estimated: " + ", ".join(f"{name} {part:.2f}" for name, part in parts.items())
    text += f"; lower totals: {', '.join(lower)}" if lower else ""
    note = about_edited_modules(plan)
    return f"{text}\n{note}" if note else text


def about_edited_modules(plan: Plan) -> str:
    """A sentence that names the modules that the formulas of activations do not know; "" if they know all."""
    names = ", ".join(plan.counts.edited)
    return f"the activations are estimated as if model.py were not edited in {names}" if names else ""


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
    isogpt/speed/layouts.py asks thousands of times.
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


def gathered(plan: Plan, part: RankPart) -> float:
    """
    Return how many parameters ZeRO-3 has gathered at once: those of the root unit, which stays gathered, of
    the block that computes, and of the blocks that arrive meanwhile.
    """
    blocks = min(1 + plan.fsdp_prefetch, part.layers)
    return part.edges + blocks * (part.block + part.block_experts)


def weight_bytes(plan: Plan, part: RankPart) -> float:
    """Return the bytes of the weights on a rank's device."""
    n = part.dense + part.experts
    if plan.zero < 2:
        return 4 * n
    shards = 0 if plan.cpu_offload else 4 * shard(plan, part.dense, part.experts)
    # with exact, autocast converts what has been gathered
    size = 4 if plan.exact else plan.torch_dtype.itemsize
    return shards + size * (n if plan.zero == 2 else gathered(plan, part))


def gradient_bytes(plan: Plan, part: RankPart) -> float:
    """Return the bytes of the gradients on a rank's device."""
    kept = n = part.dense + part.experts
    total = 4 * n
    if plan.cuda_graphs and plan.device_type == "cuda":
        total += 4 * n  # gradients of the graph, and gradients to which these are added
    if plan.zero >= 2:
        kept = shard(plan, part.dense, part.experts)
        # 'auto' adds up the shards of the gradients on the device, and offloads the sum
        total = 0 if plan.cpu_offload and plan.grad_sync != "auto" else 4 * kept
        reduces_always = plan.grad_sync in ("auto", "every")  # in every micro-step, not only in the last
        total += plan.torch_dtype.itemsize * (gathered(plan, part) if reduces_always else n)
    if plan.exact:
        total += 8 * kept  # the sums of all micro-batches, as 64-bit integers
    return total


def optimizer_bytes(plan: Plan, part: RankPart) -> float:
    """
    Return the bytes of the optimizer's moments on a rank's device, and of what compression and islands keep.
    """
    n, n_shard = part.dense + part.experts, shard(plan, part.dense, part.experts)
    kept = n_shard if plan.zero >= 2 else n
    total = 0.0
    if not plan.cpu_offload:
        of_blocks, of_others = moments_of(plan.optimizer)  # with Muon, one for the matrices of the blocks
        total += 4 * of_others * (n_shard if plan.zero >= 1 else n)
        blocks = part.layers * (part.block - part.block_embeddings), part.experts
        total -= 4 * (of_others - of_blocks) * (shard(plan, *blocks) if plan.zero >= 1 else sum(blocks))
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
        total += part.layers / len(stages) * tokens * block_activations(plan).linear
    return total


def activation_bytes(plan: Plan, part: RankPart, in_flight: float, device_gb: float) -> float:
    """
    Return the peak bytes of activations and of the backward pass's temporary tensors in a micro-step: the
    largest of four moments.

    Args:
        in_flight: see `micro_batches_in_flight`.
        device_gb: see `memory_estimate`.
    """
    args, tp = plan.model_args, plan.tp
    L, C = part.layers, args["n_embd"]
    size, stream = plan.torch_dtype.itemsize, plan.stream_dtype.itemsize
    gathered_tokens = plan.micro_batch * args["block_size"] // plan.cp  # in attention, the MLP and the loss
    tokens = gathered_tokens / tp

    # what the blocks keep; recomputed blocks keep a checkpoint
    block = block_activations(plan)
    # with tp, the inputs of attention and MLP are gathered, and each rank routes all tokens
    kept = block.kept + (tp - 1) * (2 * size * C + routing_activations(args, size))
    every = recompute_every(plan.activation_checkpointing)
    recomputed = ceil(L / every) if every else 0
    checkpoint = block.selective if plan.activation_checkpointing == "selective" else stream * C
    blocks = in_flight * tokens * ((L - recomputed) * kept + recomputed * checkpoint)
    if args.get("dropout"):
        blocks += tokens * C * (stream if plan.device_type == "cpu" else 1)  # mask of the embeddings' dropout
    last_norm = tokens * C * (stream + size)  # its input and output

    # autocast copies the weights; the backward pass of each block frees its copies. Recomputed blocks copy
    # twice: for the forward pass, which frees them at its end, and for their recomputation
    copied = 2 if size == 2 and plan.zero < 2 else 0  # bytes of a copy's element
    dense_copy = copied * part.block
    expert_copy = copied * part.block_experts  # a recomputed block frees it at once
    copies = (L - recomputed) * (dense_copy + expert_copy)

    # the head and the loss
    head = ceil(args["vocab_size"] / tp) * C if part.has_loss else 0  # weights
    loss_forward, loss_backward = (0, 0)
    if part.has_loss:
        loss_forward, loss_backward = loss_activations(plan, gathered_tokens, device_gb)

    end_of_forward = blocks + last_norm + copies + recomputed * dense_copy + copied * head + loss_forward
    start_of_backward = blocks + last_norm + copies + copied * head + loss_backward

    temporary = block.temporary + 2 * size * C * (tp - 1)
    # to the gradient of the head, that of the embeddings is added at the end of the backward pass
    last_block = blocks + copies + 4 * head + tokens * temporary
    # the gradient of the stacked experts
    last_block += 4 * args.get("n_expert", 0) * C * args["n_hidden"] / (plan.ep * tp)
    if recomputed:
        last_block += dense_copy + expert_copy
    if every and (L - 1) % every == 0:  # the last block is recomputed
        last_block += tokens * (kept - checkpoint)

    # tied: gradients of the head and of the embeddings, and their sum, besides the sum of earlier micro-steps
    end_of_backward = (3 if args["tied"] else 1) * 4 * head
    if plan.exact and plan.zero < 2 and plan.device_type == "cuda":  # concatenated gradients
        end_of_backward = max(end_of_backward, 4 * min(part.dense + part.experts, COMPILED_CHUNK))
    return max(end_of_forward, start_of_backward, last_block, end_of_backward)


def is_fused(plan: Plan) -> bool:
    """
    Whether compiled kernels compute what lies between two matmuls at once, so that only what matmuls read is
    kept. On a CPU, training is not compiled.
    """
    return plan.compile and plan.device_type == "cuda"


class BlockActivations(NamedTuple):
    """
    The activations of one block, in bytes per token.

    Args:
        kept: for the backward pass.
        linear: results of the Linear layers and of the router.
        selective: for the backward pass, with selective recomputation.
        temporary: what the block's backward pass allocates beyond what it has freed by then.
    """

    kept: float
    linear: float
    selective: float
    temporary: float


def block_activations(plan: Plan) -> BlockActivations:
    """
    Return the activations of one block, as if tp and cp divided nothing.

    The derivation follows Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), but without attention
    scores if the attention kernel recomputes them.
    """
    args, size, stream = plan.model_args, plan.torch_dtype.itemsize, plan.stream_dtype.itemsize
    arch, C, hidden = args["arch"], args["n_embd"], args["n_hidden"]
    keys = C * args["n_kv_head"] // args["n_head"]  # width of the keys, and of the values
    qkv = C + 2 * keys
    attention_kept, attention_selective, score_gradients = attention_activations(plan)
    if arch != "gpt2":
        attention_kept += size * (C + keys)  # the rotated queries and keys

    norms = 2 * (stream + size) * C + 16  # inputs, outputs and float32 statistics
    is_gated, keeps_all = arch == "llama", not is_fused(plan)
    if is_gated and keeps_all:
        norms += 2 * size * C  # outputs before the multiplication by the weights

    n_expert = args.get("n_expert", 0)
    active = args["n_expert_active"] if n_expert else 1  # MLPs for each token
    # the hidden layer before and after the activation function; SwiGLU keeps the gate, its SiLU, the other
    # factor and the product
    mlp = (3 + keeps_all if is_gated else 2) * size * hidden * active
    mlp += routing_activations(args, size)

    masks = 0
    if args.get("dropout"):
        masks = 2 * C * (size if plan.device_type == "cpu" else 1)  # torch's masks use 1 byte per element
    # results of the Linear layers and of the router
    linear = size * (qkv + C + active * (C + (2 if is_gated else 1) * hidden)) + 4 * n_expert
    # gradients of the residual stream, the block's output and the hidden layer
    mlp_gradients = stream * C + size * active * (C + (3 if is_gated else 1) * hidden)
    attention_gradients = stream * C + 2 * size * qkv + score_gradients - mlp
    if plan.cp > 1:  # gathered keys and values with their gradients, on a CPU in float32
        attention_gradients += 4 * (4 if plan.device_type == "cpu" else size) * plan.cp * keys
    return BlockActivations(
        kept=norms + attention_kept + mlp + masks,
        linear=linear,
        selective=stream * C + linear + attention_selective,
        temporary=max(mlp_gradients, attention_gradients),
    )


def attention_activations(plan: Plan) -> tuple[float, float, float]:
    """
    Return the activations of one attention by the kernel that the plan's device uses, in bytes per token:
    `kept` and `selective` of BlockActivations, and the gradients of the scores.
    """
    args, size = plan.model_args, plan.torch_dtype.itemsize
    C, H, T, dropout = args["n_embd"], args["n_head"], args["block_size"], args.get("dropout", 0)
    on_cpu = plan.device_type == "cpu"
    qkv = C + 2 * (C * args["n_kv_head"] // H)
    longest = HALF_ATTENTION_UP_TO // 2 if dropout else HALF_ATTENTION_UP_TO
    if on_cpu and size == 2 and longest >= T:  # CPUHalfAttention
        kept = size * (qkv + C)  # q, k, v and the output
        if dropout or T <= HALF_ATTENTION_KEEPS_UP_TO:
            scores = size * H * min(T, (T + HALF_ATTENTION_CHUNK) / 2)
            kept += 2 * scores if dropout else scores  # probabilities, and dropout's factors
        return kept, size * C, 3 * size * H * min(T, HALF_ATTENTION_CHUNK)
    if on_cpu and dropout:  # PyTorch's CPU kernels lack dropout: attention is composed in float32
        kept = 4 * qkv + size * C + 12 * H * T  # with three T x T matrices
        return kept, 4 * C + 4 * H * T, 4 * H * T
    # FlashAttention (Dao et al. 2022, arXiv:2205.14135): q, k, v, the output and a logsumexp per head
    return size * (qkv + C) + 4 * H, size * C + 4 * H, 0


def routing_activations(model_args: dict, size: int) -> int:
    """
    Return the bytes per token that the router, dispatch and combine of a block with experts keep, if tokens
    are distributed evenly; 0 without experts. With ep, received rows are kept instead of sent rows.
    """
    E, active, C = (model_args.get(name, 0) for name in ("n_expert", "n_expert_active", "n_embd"))
    if not E:
        return 0
    rows = 2 * size * active * C  # the experts' inputs and outputs
    # the router's input in float32, scores, indices and weights
    return rows + (4 - size) * C + 8 * E + 32 * active


def loss_activations(plan: Plan, tokens: int, device_gb: float = 0.0) -> tuple[int, int]:
    """
    Return the bytes that the head and the loss (isogpt.nn.kernels.summed_loss) of a micro-batch's tokens
    allocate in the forward pass and in the backward pass.
    """
    args, size, on_cpu = plan.model_args, plan.torch_dtype.itemsize, plan.device_type == "cpu"
    V, C = ceil(args["vocab_size"] / plan.tp), args["n_embd"]
    # nanochat's soft cap keeps float32 logits before and after tanh
    capped = 8 * tokens * V if args["arch"] == "nanochat" and not is_fused(plan) else 0
    device_gb = device_gb or (0 if torch.cuda.is_available() else USUAL_GB)
    memory = int(1e9 * min(device_gb, MOST_GB))
    unchunked, per_chunk, per_chunk_float = logits_at_once(on_cpu, size, V, memory)
    if tokens <= max(1, unchunked // V):
        if is_fused(plan):  # the gradient takes the place of the logits
            return size * tokens * V, size * tokens * V
        # forward: logits in half precision and in float32, log_softmax; backward: log_softmax and two
        # gradients
        return capped + 10 * tokens * V, capped + 12 * tokens * V
    # gradients of the weight, in float32, and of the hidden states
    gradients = capped + 4 * V * C + size * tokens * C
    logits = size * V * min(tokens, max(1, per_chunk // V))
    weight_part = (size if on_cpu else 4) * min(per_chunk_float, V * C)
    if size == 4:
        return gradients + logits + weight_part, gradients + 4 * V * C
    logits_float = 4 * V * min(tokens, max(1, per_chunk_float // V))
    return gradients + logits + max(logits_float, weight_part), gradients + (4 + size) * V * C
