"""
Predict the memory and the time of a training step, for `bench.py --plan` and `--tune`, and for
`train.py --layout=auto`.

Times follow the roofline model (Williams et al. 2009, doi:10.1145/1498765.1498785): an operation takes as
long as its FLOPs or its memory traffic, whichever is longer. Collectives cost a latency per message plus
bytes over bandwidth, as rings (Thakur et al. 2005, doi:10.1177/1094342005051521).
"""

from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf, log2

from isogpt.parallel.mesh import AXES, Mesh, Role, make_mesh, stages_per_rank
from isogpt.parallel.plan import Plan
from isogpt.parallel.recompute import recompute_every
from isogpt.parallel.shares import share_of
from isogpt.speed.activations import activations_of
from isogpt.speed.devices import Hardware
from isogpt.speed.memory import RankPart, memory_estimate, part_of
from isogpt.training.optim import uses_muon

# the idle time of a pipeline's schedules as a multiple of 1F1B's: zero_bubble fills two thirds of it with
# gradients of weights, and zbv nearly all (Qi et al. 2023, arXiv:2401.10241, table 2)
IDLE = {"gpipe": 1, "1f1b": 1, "interleaved": 1 / 2, "zero_bubble": 1 / 3, "zbv": 1 / 6}
# a GPU's memory traffic as a multiple of what the formulas count: eager is fitted to published runs, compiled
# to the time of Triton's kernels in GPT-2's step on an H200 (docs/scaling.md, docs/benchmarks.md)
EAGER, COMPILED = 1.8, 0.72
BUCKET = 25 * 2**20 / 4  # elements that DistributedDataParallel reduces together

Passes = tuple[float, float]  # seconds of a forward pass and of a backward pass


@dataclass(frozen=True, order=True)
class Prediction:
    """
    The predicted time and memory of a plan's step. The faster one of two is the smaller one.

    Args:
        total_s: seconds of a step; infinite if the layout does not fit.
        seconds: of computation, bubble, communication and optimizer.
        problem: why it does not fit.
    """

    total_s: float
    gb: float
    plan: Plan = field(compare=False)
    seconds: dict[str, float] = field(compare=False)
    problem: str = field(default="", compare=False)

    @property
    def tokens_per_s(self) -> float:
        """The speed of all devices; 0 if the layout does not fit."""
        return self.plan.sequences * self.plan.model_args["block_size"] / self.total_s


# ------------------------------------------------------------------------------------------------------------
# computation


def matmuls_s(hw: Hardware, tokens: float, weights: float, smallest: float) -> float:
    """Seconds in which tokens are multiplied by matrices, whose small dimensions leave units idle."""
    return 2 * tokens * weights / hw.matmul * (1 + hw.half / smallest)


def traffic_s(hw: Hardware, plan: Plan, size: float) -> float:
    """Seconds to read or write `size` bytes between matmuls. torch.compile does so in fewer kernels."""
    if plan.device_type == "cuda":
        size *= COMPILED if plan.compile else EAGER
    return size / hw.bytes_per_s


def block_s(hw: Hardware, plan: Plan, part: RankPart) -> Passes:
    """
    Return the seconds of a block on `plan.micro_batch` sequences.

    A matmul takes twice as many FLOPs in the backward pass, and reads its weights at least. Attention takes 4
    T C FLOPs per token in the forward pass, halved by the causal mask, and 2.5 times as many in the backward
    pass (Dao 2023, arXiv:2307.08691, section 4.1). Each kept activation is written and read in the forward
    pass and read in the backward pass, and the gradient is written and read.
    """
    args, tp = plan.model_args, plan.tp
    T, C, experts = args["block_size"], args["n_embd"], args["n_expert"]
    tokens = mlp_tokens = plan.micro_batch * T / plan.cp
    n_mlp = max(1, experts) / plan.ep  # a rank's experts run one matmul after the other
    if experts:
        mlp_tokens = tokens * args["n_expert_active"] / n_mlp
    read_s = plan.torch_dtype.itemsize * part.block / hw.bytes_per_s
    multiply_s = matmuls_s(hw, tokens, part.block_matrices / tp, min(C / tp, mlp_tokens))
    matmuls = max(read_s, multiply_s)
    # the length that takes as long at the speed of 1,024 tokens
    length = (T + hw.attention_half) / (1 + hw.attention_half / 1024)
    attention = 2 * tokens * length * C / tp / (hw.attention * hw.matmul)
    traffic = traffic_s(hw, plan, activations_of(plan).block * tokens / tp)
    forward = matmuls + attention + 2 * traffic
    # context_attention repeats the forward pass
    attention *= 2.5 + (plan.cp > 1)
    backward = 2 * matmuls + attention + 3 * traffic
    kernels = (20 + 12 * n_mlp) * hw.kernel_s
    return max(forward, kernels), max(backward, 2 * kernels)


def micro_step_s(hw: Hardware, plan: Plan, pp_rank: int) -> Passes:
    """Seconds of a micro-batch on one rank of a pipeline."""
    args, size, part = plan.model_args, plan.torch_dtype.itemsize, part_of(plan, pp_rank)
    forward, backward = block_s(hw, plan, part)
    mode = plan.activation_checkpointing
    if every := recompute_every(mode):
        # selective: without matmuls and attention
        share = 0.15 if mode == "selective" else 1.0
        backward += share * forward / every
    # matmuls outside of the blocks, such as the head
    tokens = plan.micro_batch * args["block_size"] / plan.cp
    head = matmuls_s(hw, tokens, part.edge_matrices / plan.tp, args["n_embd"])
    forward = part.layers * forward + head + hw.micro_step_s
    backward = part.layers * backward + 2 * head
    if part.has_loss:
        # kernels.summed_loss: logits in the computing dtype and in float32, log_softmax, and the gradients
        traffic = traffic_s(hw, plan, tokens * args["vocab_size"] / plan.tp)
        forward += (8 + 2 * size) * traffic
        backward += (4 + 2 * size) * traffic
    parameter_s = part.parameters / hw.bytes_per_s  # to read a byte of each
    if size == 2 and plan.zero < 2:  # autocast reads each weight in float32 and writes it
        forward += 6 * parameter_s
    # adding to the gradient reads two tensors and writes one
    return forward, backward + 12 * parameter_s


# ------------------------------------------------------------------------------------------------------------
# communication


def collectives_s(hw: Hardware, ranks: Role, kind: str, size: float, count: int = 1) -> float:
    """
    Return the seconds of collectives of some ranks.

    Bytes move around a ring, in an all-reduce twice. Latency grows with the number of machines, or with its
    logarithm in trees (Sanders et al. 2009, doi:10.1016/j.parco.2009.09.001), which NCCL uses for
    all-reduces. A ring over several machines uses as many of a machine's links as it contains ranks on that
    machine.

    Args:
        kind: "reduce" (an all-reduce), "gather", "scatter" (a reduce-scatter), or "exchange" (an all-to-all,
            or what neighbours send).
        size: bytes of all `count` collectives together.
    """
    mesh, n = ranks.mesh, ranks.size
    if n == 1 or not size:
        return 0.0
    on_machine = 1  # ranks of the ring on a machine
    for axis in ranks.axes:
        inner = mesh.size(*AXES[AXES.index(axis) + 1 :])
        on_machine *= min(mesh.size(axis), max(1, hw.per_node // inner))
    machines = n / on_machine
    bandwidth = hw.local.bytes_per_s if on_machine > 1 else inf
    if machines > 1:
        links = hw.network.bytes_per_s * on_machine / hw.per_node
        bandwidth = min(bandwidth, links)
    rounds, hops = 1, machines - 1
    if kind == "reduce":
        rounds, hops = 2, ceil(log2(machines))
    latency = hops * hw.network.latency_s + ceil(log2(on_machine)) * hw.local.latency_s
    slowness = {"gather": hw.gather, "scatter": hw.scatter}.get(kind, 1.0)
    sent_s = slowness * size * (n - 1) / n / bandwidth
    return rounds * (count * latency + sent_s)


def parameters_s(hw: Hardware, part: RankPart, ranks: Role, kind: str, size: float, piece: float) -> float:
    """
    Return the seconds of collectives of all parameters, or of their gradients. Experts, which ep has divided
    already, are the same on fewer ranks.

    Args:
        size: bytes for a parameter.
        piece: parameters that are sent at once.
    """
    total = 0.0
    for n, holders in ((part.dense, ranks), (part.experts, ranks.without("ep"))):
        total += collectives_s(hw, holders, kind, size * n, ceil(n / piece))
    return total


def activations_s(hw: Hardware, mesh: Mesh, plan: Plan) -> float:
    """
    Return the seconds of a micro-step's collectives of activations, for which computation waits.

    With tp, attention and the MLP gather the input and scatter the output; the backward pass does the
    reverse. With cp, keys and values are gathered twice, and their gradients scattered. With ep, tokens are
    sent to their experts and back. With pp, stages send activations and gradients.
    """
    args, layers = plan.model_args, part_of(plan, 0).layers
    tokens = plan.micro_batch * args["block_size"] / plan.cp
    hidden = plan.torch_dtype.itemsize * tokens * args["n_embd"]
    kv = 2 * hidden * plan.cp * args["n_kv_head"] / args["n_head"] / plan.tp
    # each stage receives and sends, forwards and backwards: a ring of two ranks moves half
    mesh = replace(mesh, pp=min(2, plan.pp))
    total = 0.0
    for kind, axis, size, count in (
        ("gather", "tp", hidden, 4 * layers + 2),
        ("scatter", "tp", hidden, 4 * layers + 2),
        ("gather", "cp", kv, 2 * layers),
        ("scatter", "cp", kv, layers),
        ("exchange", "ep", hidden * args["n_expert_active"], 4 * layers),
        ("exchange", "pp", hidden / plan.tp, 4 * stages_per_rank(plan.pp_schedule)),
    ):
        total += count * collectives_s(hw, Role(mesh, (axis,)), kind, size)
    return total


def weights_s(hw: Hardware, mesh: Mesh, plan: Plan, micro_steps: int, computed: Passes) -> float:
    """
    Return the seconds of a step's collectives of weights and gradients that no computation hides.

    ZeRO-0 and 1 reduce gradients in float32, in buckets; ZeRO-1 then sends the weights. ZeRO-2 and 3 gather
    the weights of each block in the computing dtype, ZeRO-3 again in the backward pass, and scatter its
    gradients. With HSDP, the replicas then reduce the shards.

    Args:
        computed: the computation of a micro-step, which hides a part of them.
    """
    part, replicas = part_of(plan, 0), mesh.replicas
    send = partial(parameters_s, hw, part)
    gather = again = 0.0
    total = send(Role(mesh, ("islands",)), "reduce", 4, BUCKET) / plan.local_steps
    reductions = 1
    if plan.grad_sync == "every" or plan.zero >= 2 and plan.grad_sync == "auto":
        reductions = micro_steps
    if plan.zero < 2:
        reduction = send(replicas, "reduce", 4, BUCKET)
        if plan.zero == 1:
            total += send(replicas, "gather", 4, BUCKET)
    else:
        shards = mesh.shards
        piece = part.parameters / (part.layers + 1)
        gather = send(shards, "gather", plan.torch_dtype.itemsize, piece)
        if plan.zero == 3:
            again = gather
        reduction = send(shards, "scatter", 4, piece)
        total += reductions * send(replicas, "reduce", 4 / shards.size, piece)
    forward, backward = computed
    total += micro_steps * exposed_s(hw, gather, forward)
    total += reductions * exposed_s(hw, again + reduction, backward)
    return total + (micro_steps - reductions) * exposed_s(hw, again, backward)


def exposed_s(hw: Hardware, collectives: float, computation: float) -> float:
    """The seconds of collectives that computation at the same time does not hide."""
    return collectives - hw.overlap * min(collectives, computation)


# ------------------------------------------------------------------------------------------------------------
# a step


def predict(plan: Plan, hw: Hardware) -> Prediction:
    """Predict a plan's step on some devices."""
    mesh = make_mesh(0, plan)
    share = share_of(plan.sequences, 0, mesh.data_size, plan.batch_size, plan.pp)
    plan = replace(plan, micro_batch=share.rows)
    gb = memory_estimate(plan, hw.memory_gb)["total"] + hw.fixed_gb
    if gb > hw.memory_gb:
        return Prediction(inf, gb, plan, {}, f"does not fit: {gb:.1f} of {hw.memory_gb:g} GB")

    ranks = {0, plan.pp // 2, plan.pp - 1}
    slowest = max((micro_step_s(hw, plan, rank) for rank in ranks), key=sum)
    micro_step, part = sum(slowest), part_of(plan, 0)
    communication = share.micro_steps * activations_s(hw, mesh, plan)
    communication += weights_s(hw, mesh, plan, share.micro_steps, slowest)
    # ZeRO divides experts less, since ep has divided them already
    shards = mesh.loss if plan.zero == 1 else mesh.shards
    updated = part.dense / shards.size + part.experts / shards.without("ep").size
    seconds = {
        "compute": share.micro_steps * micro_step,
        "bubble": (plan.pp - 1) * micro_step * IDLE[plan.pp_schedule],
        "communication": communication,
        # AdamW reads weights, gradients and two moments, and writes all but the gradients; clipping scales
        # the gradients first. On an H200, AdamW took 1.3 ms for 124M parameters (docs/benchmarks.md), and 1.2
        # ms are predicted
        "optimizer": 40 * updated / hw.bytes_per_s,
    }
    if uses_muon(plan.optimizer):
        # Each of muon.POLYNOMIALS takes 4 m + 2 m^2 / n FLOPs per element of an m x n matrix: for the shapes
        # of a block, together as many as the weights take for 7.5 C tokens
        C, matrices = plan.model_args["n_embd"], part.layers * part.block_matrices
        seconds["optimizer"] += matmuls_s(hw, 7.5 * C, matrices / mesh.matrix_workers.size, C)
    return Prediction(sum(seconds.values()), gb, plan, seconds)
