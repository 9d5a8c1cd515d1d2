"""
Estimate by formula the memory that a training step needs: for `bench.py --estimate`, for plans, and for the
message after running out of memory.
"""

import re
from dataclasses import replace
from functools import lru_cache
from math import ceil

from isogpt.nn.architecture import ARCHS, GPTConfig
from isogpt.nn.kernels import (
    HALF_ATTENTION_CHUNK,
    HALF_ATTENTION_KEEPS_UP_TO,
    HALF_ATTENTION_UP_TO,
    logits_at_once,
)
from isogpt.parallel.mesh import stages_per_rank
from isogpt.parallel.pipeline import cut_evenly, stages_of
from isogpt.parallel.plan import Plan
from isogpt.parallel.recompute import recompute_every
from isogpt.parallel.shares import share_of
from isogpt.parallel.slow_network import keeps_errors

# matches messages of PyTorch's allocators, and of CUDA, cuBLAS, cuDNN, NCCL and Triton, which allocate
# separately
OUT_OF_MEMORY = re.compile(
    r"out[ _]?of[ _]?memory|alloc(ation)?_failed|DefaultCPUAllocator|status_memory_error", re.I
)


def memory_estimate(plan: Plan) -> dict[str, float]:
    """
    Estimate the GB that a training step of a plan needs on a rank's device.

    The parts are weights, gradients, optimizer state (the moments, and what compression and islands keep),
    activations, and the total. In a pipeline, this is the first or the last rank, whichever needs more.
    """
    ranks = sorted({0, plan.pp - 1})
    return max((rank_estimate(plan, rank) for rank in ranks), key=lambda parts: parts["total"])


def rank_estimate(plan: Plan, pp_rank: int) -> dict[str, float]:
    """
    `memory_estimate` for one rank of a pipeline. ZeRO divides all but the activations by the number of shards
    (Rajbhandari et al. 2020, arXiv:1910.02054, section 5). Experts are divided by ep first, and then over the
    ranks that hold the same experts: into as many shards in total.
    """
    zero, tp, ep = plan.zero, plan.tp, plan.ep
    layers, edges, has_loss = pipeline_part(plan, pp_rank)
    model_args = plan.model_args | {"n_layer": layers}
    whole, experts = (count / tp for count in parameter_counts(model_args)[1:])
    block = whole - experts + experts / ep
    islands = max(1, plan.islands)
    shards = max(1, plan.world_size // (islands * plan.dp_replicate * plan.pp * tp))
    n, shard = block * layers + edges / tp, (whole * layers + edges / tp) / shards
    size = plan.torch_dtype.itemsize
    gathered_size = 4 if plan.exact else size  # with exact, autocast converts what has been gathered
    weights, gradients, moments = 4 * n, 4 * n, 8 * (shard if zero >= 1 else n)
    if plan.cuda_graphs and plan.device_type == "cuda":
        gradients *= 2  # gradients of the graph, and gradients to which these are added
    if plan.optimizer == "muon":  # one moment for the matrices of the blocks
        moments -= 4 * layers * (whole / shards if zero >= 1 else block)
    if zero >= 2:  # FSDP: shards in float32, and gathered units in the dtype to compute in
        gathered_blocks = min(1 + plan.fsdp_prefetch, model_args["n_layer"])
        # the root unit always stays gathered
        gathered = n - block * (model_args["n_layer"] - gathered_blocks)
        # in every micro-step, not only in the last micro-step
        reduces_always = plan.grad_sync in ("auto", "every")
        weights = 4 * shard + gathered_size * (n if zero == 2 else gathered)
        gradients = 4 * shard + size * (gathered if reduces_always else n)
    if plan.exact:  # the sums of all micro-batches, as 64-bit integers
        gradients += 8 * (shard if zero >= 2 else n)
    if plan.cpu_offload:
        weights, moments = weights - 4 * shard, 0
        if plan.grad_sync != "auto":  # 'auto' adds up the shards of the gradients on the device
            gradients -= 4 * shard
    own = shard if zero >= 2 else n
    if keeps_errors(plan.grad_compression) and plan.world_size > islands:
        moments += 4 * own  # the errors
    # weights and momentum of the outer step; for one part, the weights that are sent and their change
    if islands > 1:
        moments += 8 * own + 8 * own / plan.outer_parts
    mode, on_cpu = plan.activation_checkpointing, plan.device_type == "cpu"
    activations = activation_bytes(
        model_args,
        plan.micro_batch,
        size,
        zero,
        mode,
        on_cpu,
        tp,
        plan.cp,
        ep,
        in_flight(plan, pp_rank),
        has_loss,
    )
    parts = {"weights": weights, "gradients": gradients, "optimizer": moments, "activations": activations}
    parts["total"] = sum(parts.values())
    return {name: part / 1e9 for name, part in parts.items()}


def pipeline_part(plan: Plan, pp_rank: int) -> tuple[int, int, bool]:
    """
    Return a pipeline rank's number of blocks, number of other parameters, and whether the rank computes the
    loss.
    """
    model_args, pp, schedule = plan.model_args, plan.pp, plan.pp_schedule
    L, C, V = model_args["n_layer"], model_args["n_embd"], model_args["vocab_size"]
    n, block, _ = parameter_counts(model_args)
    if pp == 1:
        return L, n - L * block, True
    used = block - GPTConfig(**model_args).unused_count // L
    flops = [2.0 * (used + model_args["block_size"] * C)] * L  # per token, as in pipeline.block_costs
    flops[-1] += 2.0 * V * C
    stages, own = pp * stages_per_rank(schedule), stages_of(pp_rank, pp, schedule)
    runs, is_first, is_last = cut_evenly(tuple(flops), stages), 0 in own, stages - 1 in own
    edges = n - L * block if is_first else V * C
    if is_first and not is_last and not model_args["tied"]:
        edges -= V * C  # the head is on a different rank
    return sum(len(runs[stage]) for stage in own), edges, is_last


def in_flight(plan: Plan, pp_rank: int) -> float:
    """
    Return how many micro-batches' activations a pipeline rank holds at once, as a multiple of the activations
    of all blocks of the rank.
    """
    pp, schedule = plan.pp, plan.pp_schedule
    if pp == 1:
        return 1
    data_size = max(1, plan.world_size // (pp * plan.cp * plan.tp))
    micro_steps = share_of(plan.sequences, 0, data_size, plan.micro_batch, pp).micro_steps
    most = {"gpipe": micro_steps, "1f1b": pp - pp_rank, "zbv": pp}.get(schedule, (3 * pp - 1) / 2 - pp_rank)
    return min(micro_steps, most)


def largest_micro_batch(plan: Plan, gb: float) -> int:
    """
    Return the largest micro-batch, a power of two up to 256, that is estimated to fit into 80% of `gb`; at
    least 1.
    """
    fits = [
        rows
        for rows in (2**k for k in range(9))
        if memory_estimate(replace(plan, micro_batch=rows))["total"] <= 0.8 * gb
    ]
    return max(fits, default=1)


def memory_report(plan: Plan) -> str:
    """
    Describe the parts of memory_estimate(plan), and the settings that would lower the total, each with the
    new total.
    """
    parts, half = memory_estimate(plan), max(1, plan.micro_batch // 2)
    full, fsdp = {"activation_checkpointing": "full"}, {"zero": 3}
    options = {f"--batch_size={half}": {"micro_batch": half}, "--activation_checkpointing=full": full}
    if plan.zero < 3 and plan.world_size > 1:
        options |= {"--fsdp=True": fsdp, "--fsdp=True --activation_checkpointing=full": fsdp | full}
    if plan.cuda_graphs:
        options["--cuda_graphs=False"] = {"cuda_graphs": False}
    if plan.zero >= 2:
        options["--cpu_offload=True"] = {"cpu_offload": True}
    if plan.cpu_offload and plan.grad_sync == "auto":
        options["--grad_sync=every"] = {"grad_sync": "every"}
    totals = {flags: memory_estimate(replace(plan, **changes))["total"] for flags, changes in options.items()}
    lower = [f"{flags} {total:.2f}" for flags, total in totals.items() if total < parts["total"]]
    text = "GB on each rank, estimated: " + ", ".join(f"{name} {part:.2f}" for name, part in parts.items())
    return f"{text}; lower totals: {', '.join(lower)}" if lower else text


def parameter_counts(model_args: dict) -> tuple[int, int, int]:
    """Number of parameters of the whole model, of one block, and of all experts of a block."""
    return counts_of(tuple(model_args.items()))


@lru_cache
def counts_of(model_args: tuple[tuple[str, object], ...]) -> tuple[int, int, int]:
    """`parameter_counts`, cached: isogpt/speed/layouts.py asks for them thousands of times."""
    c = GPTConfig(**dict(model_args))
    C, qkv, experts = c.n_embd, sum(c.qkv_rows), c.n_expert * c.mlp_count
    norm = (2 if c.bias else 1) * C if ARCHS[c.arch].norm_weights else 0
    attention = C * (qkv + C) + (qkv + C if c.bias else 0)
    # including the router
    block = attention + 2 * norm + (c.n_expert * C + experts if c.n_expert else c.mlp_count)
    total = c.n_layer * block + norm + c.vocab_size * C * (1 if c.tied else 2)
    return total + (c.block_size * C if c.arch == "gpt2" else 0), block, experts


def activation_bytes(  # noqa: PLR0913  (the terms of a formula)
    model_args: dict,
    rows: int,
    size: int,
    zero: int,
    mode: str,
    on_cpu: bool,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    in_flight: float = 1,
    has_loss: bool = True,
) -> float:
    """
    Return the peak bytes of activations and of the backward pass's temporary tensors in a micro-step of
    `rows` sequences.

    Args:
        size: bytes per element of the dtype to compute in.
        in_flight: micro-batches at once in a pipeline.
        has_loss: whether this rank computes the loss, as a pipeline's last stage does.
    """
    L, C, V = model_args["n_layer"], model_args["n_embd"], ceil(model_args["vocab_size"] / tp)
    gathered_tokens = rows * model_args["block_size"] // cp  # tokens in attention, the MLP and the loss
    tokens = gathered_tokens / tp
    # autocast leaves the residual stream in float32, FSDP's mixed precision does not
    stream = 4 if zero < 2 else size
    kept, selective, temporary = block_activations(model_args, size, stream, on_cpu)
    # the inputs of attention and MLP are gathered, and each rank routes all tokens
    kept += (2 * size * C + routing_activations(model_args, size)) * (tp - 1)
    # keys and values, gathered and then ordered, with their gradients
    keys = 4 * size * C * model_args["n_kv_head"] // model_args["n_head"]
    temporary += 2 * size * C * (tp - 1) + (2 * keys * cp if cp > 1 else 0)
    loss_forward, loss_backward = (
        loss_activations(gathered_tokens, V, C, size, on_cpu) if has_loss else (0, 0)
    )
    if model_args["arch"] == "nanochat" and has_loss:  # logits of the soft cap, before and after tanh
        logits = 8 * gathered_tokens * V
        loss_forward, loss_backward = loss_forward + logits, loss_backward + logits

    every = recompute_every(mode)
    recomputed = ceil(L / every) if every else 0
    checkpoint = selective if mode == "selective" else stream * C
    blocks = in_flight * tokens * ((L - recomputed) * kept + recomputed * checkpoint)
    if model_args.get("dropout"):
        blocks += tokens * C * (stream if on_cpu else 1)  # the mask of the embeddings' dropout
    norm = tokens * C * (stream + size)  # input and output of the last LayerNorm

    # autocast copies the weights; the backward pass of each block frees its copies. Recomputed blocks copy
    # twice: for the forward pass, which frees them at its end, and for their recomputation
    copied = 2 if size == 2 and zero < 2 else 0  # bytes of a copy's element
    _, block, experts = parameter_counts(model_args)
    block_copy, head_copy = copied * (block - experts) / tp, copied * V * C if has_loss else 0
    expert_copy = copied * experts / (ep * tp)  # not a copy by autocast: a recomputed block frees it at once
    copies = (L - recomputed) * (block_copy + expert_copy)
    # gradient of lm_head, to which wte's gradient is added at the end of the backward pass
    head_gradient = 4 * V * C if has_loss else 0

    end_of_forward = blocks + norm + copies + recomputed * block_copy + head_copy + loss_forward
    start_of_backward = blocks + norm + copies + head_copy + loss_backward
    last_block = blocks + copies + head_gradient + tokens * temporary
    # the gradient of the stacked experts
    last_block += 4 * model_args.get("n_expert", 0) * C * model_args["n_hidden"] / (ep * tp)
    if recomputed:
        last_block += block_copy + expert_copy
    if every and (L - 1) % every == 0:  # the last block is recomputed
        last_block += tokens * (kept - checkpoint)
    # tied: gradients of lm_head and of wte, and their sum, besides the sum of earlier micro-steps
    end_of_backward = (3 if model_args["tied"] else 1) * head_gradient
    return max(end_of_forward, start_of_backward, last_block, end_of_backward)


def block_activations(model_args: dict, size: int, stream: int, on_cpu: bool) -> tuple[float, float, float]:
    """
    Return the activations of one block, in bytes per token.

    The derivation follows Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), but without attention
    scores if the attention kernel recomputes them.

    Args:
        size: bytes per element of the dtype to compute in.
        stream: bytes per element of the residual stream.

    Returns:
        (kept for the backward pass, kept by selective recomputation, and what the block's backward pass
        allocates beyond what it has freed by then)
    """
    C, H, T, dropout = (model_args.get(name, 0) for name in ("n_embd", "n_head", "block_size", "dropout"))
    arch, hidden, keys = model_args["arch"], model_args["n_hidden"], C * model_args["n_kv_head"] // H
    qkv = C + 2 * keys
    longest = HALF_ATTENTION_UP_TO // 2 if dropout else HALF_ATTENTION_UP_TO
    if on_cpu and size == 2 and longest >= T:  # CPUHalfAttention
        attention, attention_selective = size * (qkv + C), size * C  # q, k, v and the output
        score_gradients = 3 * size * H * min(T, HALF_ATTENTION_CHUNK)
        if dropout or T <= HALF_ATTENTION_KEEPS_UP_TO:
            scores = size * H * min(T, (T + HALF_ATTENTION_CHUNK) / 2)
            attention += 2 * scores if dropout else scores  # probabilities, and dropout's factors
    elif on_cpu and dropout:  # PyTorch's CPU kernels lack dropout: attention is composed in float32
        attention = 4 * qkv + size * C + 12 * H * T  # with three T x T matrices
        attention_selective = 4 * C + 4 * H * T
        score_gradients = 4 * H * T
    else:  # FlashAttention (Dao et al. 2022, arXiv:2205.14135): q, k, v, the output and a logsumexp per head
        attention, attention_selective, score_gradients = size * (qkv + C) + 4 * H, size * C + 4 * H, 0
    if arch != "gpt2":
        attention += size * (C + keys)  # the rotated queries and keys
    norms = 2 * (stream + size) * C + 16  # inputs, outputs and float32 statistics
    if arch == "llama":
        norms += 2 * size * C  # outputs before the multiplication by the weights
    gated = arch == "llama"  # SwiGLU keeps the gate, its SiLU, the other factor and the product
    n_expert = model_args.get("n_expert", 0)
    active = model_args["n_expert_active"] if n_expert else 1  # MLPs for each token
    # the hidden layer before and after the activation function
    mlp = (4 if gated else 2) * size * hidden * active
    mlp += routing_activations(model_args, size)
    masks = 2 * C * (size if on_cpu else 1) if dropout else 0  # torch's masks use 1 byte per element
    # results of the Linear layers and of the router
    linear = size * (qkv + C + active * (C + (2 if gated else 1) * hidden)) + 4 * n_expert
    # gradients of the residual stream, the block's output and the hidden layer
    mlp_gradients = stream * C + size * active * (C + (3 if gated else 1) * hidden)
    attention_gradients = stream * C + 2 * size * qkv + score_gradients - mlp
    kept, selective = norms + attention + mlp + masks, stream * C + linear + attention_selective
    return kept, selective, max(mlp_gradients, attention_gradients)


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


def loss_activations(tokens: int, V: int, C: int, size: int, on_cpu: bool) -> tuple[int, int]:
    """Bytes that isogpt.nn.kernels.summed_loss allocates in the forward pass and in the backward pass."""
    unchunked, per_chunk, per_chunk_float = logits_at_once(on_cpu, size, V)
    if tokens <= max(1, unchunked // V):
        # forward: logits in half precision and in float32, log_softmax; backward: log_softmax and two
        # gradients
        return 10 * tokens * V, 12 * tokens * V
    gradients = 4 * V * C + size * tokens * C  # gradients of the weight, in float32, and of the hidden states
    logits = size * V * min(tokens, max(1, per_chunk // V))
    weight_part = (size if on_cpu else 4) * min(per_chunk_float, V * C)
    if size == 4:
        return gradients + logits + weight_part, gradients + 4 * V * C
    logits_float = 4 * V * min(tokens, max(1, per_chunk_float // V))
    return gradients + logits + max(logits_float, weight_part), gradients + (4 + size) * V * C
