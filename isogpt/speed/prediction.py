"""
Predict the memory and the time of a training step, for `bench.py --plan` and `--tune`.

Times follow the roofline model (Williams et al. 2009, doi:10.1145/1498765.1498785): an operation takes as
long as its FLOPs or its memory traffic, whichever is longer. Collectives cost a latency per message plus
bytes over bandwidth, as rings (Thakur et al. 2005, doi:10.1177/1094342005051521).
"""

from dataclasses import dataclass, field, replace
from math import ceil, inf, log2

from isogpt.nn.architecture import ARCHS
from isogpt.parallel.mesh import AXES, Mesh, make_mesh, stages_per_rank
from isogpt.parallel.plan import DEFAULTS, LAYOUT, Plan
from isogpt.parallel.recompute import recompute_every
from isogpt.parallel.shares import share_of
from isogpt.speed.devices import Hardware
from isogpt.speed.memory import block_activations, memory_estimate, parameter_counts, pipeline_part

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
# the idle time of a pipeline as a multiple of 1F1B's idle time: zero_bubble fills two thirds of it with
# gradients of weights, and zbv nearly all (Qi et al. 2023, arXiv:2401.10241, table 2)
IDLE = {"interleaved": 1 / 2, "zero_bubble": 1 / 3, "zbv": 1 / 6}


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a plan's step."""

    plan: Plan
    gb: float
    seconds: dict[str, float] = field(default_factory=dict)  # compute, bubble, communication, optimizer
    problem: str = ""

    @property
    def settings(self) -> dict:
        """The plan's layout, as settings of train.py."""
        return self.plan.layout_settings()

    @property
    def total_s(self) -> float:
        """Seconds of a step; infinite if the layout does not fit."""
        return inf if self.problem else sum(self.seconds.values())


# ------------------------------------------------------------------------------------------------------------
# computation


def matmul_s(hw: Hardware, m: float, k: float, n: float, size: int) -> float:
    """
    Seconds of an (m, k) x (k, n) matmul with elements of `size` bytes: small dimensions leave units idle.
    """
    flops, smallest = 2 * m * k * n, min(m, k, n)
    return max(flops / hw.matmul * (1 + hw.half / smallest), size * (m * k + k * n + m * n) / hw.bytes_per_s)


def with_backward_s(hw: Hardware, m: float, k: float, n: float, size: int) -> tuple[float, float]:
    """
    Seconds of a Linear layer's forward pass, and of the backward pass: gradients of the input and of the
    weight.
    """
    forward = matmul_s(hw, m, k, n, size)
    return forward, matmul_s(hw, m, n, k, size) + matmul_s(hw, k, m, n, size)


def block_s(hw: Hardware, plan: Plan, size: int) -> tuple[float, float]:
    """
    Return the seconds of a block's forward and backward pass on `plan.micro_batch` sequences.

    Attention takes 4 T C FLOPs per token in the forward pass, halved by the causal mask, and 2.5 times as
    many in the backward pass (Dao 2023, arXiv:2307.08691, section 4.1). Each kept activation is written and
    read in the forward pass and read in the backward pass, and the gradient is written and read.
    """
    args, tp, cp, ep = plan.model_args, plan.tp, plan.cp, plan.ep
    C, T, hidden, E = (args.get(name, 0) for name in ("n_embd", "block_size", "n_hidden", "n_expert"))
    tokens = plan.micro_batch * T / cp  # tokens in attention and the MLP
    kv = C * args["n_kv_head"] // args["n_head"]
    active, gated = args["n_expert_active"] if E else 1, ARCHS[args["arch"]].activation == "swiglu"
    copies = E / ep if E else 1  # a rank's experts run one matmul after the other
    m = tokens * active * (ep / E if E else 1)
    layers = [(1, tokens, C, (C + 2 * kv) / tp), (1, tokens, C / tp, C)]
    layers += [(copies, m, C, (2 if gated else 1) * hidden / tp), (copies, m, hidden / tp, C)]
    forward = backward = 0.0
    for count, *shape in layers:
        one, other = with_backward_s(hw, *shape, size)
        forward, backward = forward + count * one, backward + count * other
    attention = 2 * tokens * T * C / tp / (hw.attention * hw.matmul)
    stream = 4 if plan.zero < 2 else size
    kept, _, _ = block_activations(args, size, stream, plan.device_type == "cpu")
    traffic = kept * tokens / tp / hw.bytes_per_s
    forward += attention + 2 * traffic
    backward += (2.5 + (cp > 1)) * attention + 3 * traffic  # context_attention repeats the forward pass
    kernels = (20 + 12 * copies) * hw.kernel_s
    return max(forward, kernels), max(backward, 2 * kernels)


def head_s(hw: Hardware, plan: Plan, size: int) -> tuple[float, float]:
    """Seconds of the forward and backward pass of the head and the loss (kernels.summed_loss)."""
    args = plan.model_args
    tokens, V = plan.micro_batch * args["block_size"] / plan.cp, args["vocab_size"] / plan.tp
    forward, backward = with_backward_s(hw, tokens, args["n_embd"], V, size)
    # logits in the computing dtype and in float32, log_softmax, and the gradients
    traffic = tokens * V / hw.bytes_per_s
    return forward + (8 + 2 * size) * traffic, backward + (4 + 2 * size) * traffic


def micro_step_s(hw: Hardware, plan: Plan, pp_rank: int) -> tuple[float, float]:
    """Seconds of the forward and backward pass of a micro-batch on one rank of a pipeline."""
    size = plan.torch_dtype.itemsize
    layers, _, has_loss = pipeline_part(plan, pp_rank)
    forward, backward = block_s(hw, plan, size)
    every = recompute_every(plan.activation_checkpointing)
    again = forward / every if every else 0.0
    if plan.activation_checkpointing == "selective":
        again *= 0.15  # without matmuls and attention
    forward, backward = layers * forward, layers * (backward + again)
    if has_loss:
        head = head_s(hw, plan, size)
        forward, backward = forward + head[0], backward + head[1]
    held = sum(parameters_held(plan, pp_rank))
    if size == 2 and plan.zero < 2:  # autocast reads each weight in float32 and writes it
        forward += 6 * held / hw.bytes_per_s
    backward += 12 * held / hw.bytes_per_s  # adding to the gradient reads two tensors and writes one
    return forward, backward


# ------------------------------------------------------------------------------------------------------------
# communication


def parameters_held(plan: Plan, pp_rank: int) -> tuple[float, float]:
    """Numbers of parameters of a pipeline's rank before ZeRO divides them: (dense parameters, experts)."""
    layers, edges, _ = pipeline_part(plan, pp_rank)
    _, block, experts = parameter_counts(plan.model_args)
    return ((block - experts) * layers + edges) / plan.tp, experts * layers / plan.tp / plan.ep


def ring_s(
    hw: Hardware,
    mesh: Mesh,
    per_node: int,
    axes: tuple[str, ...],
    size: float,
    count: int = 1,
    slowness: float = 1.0,
) -> float:
    """
    Return the seconds of all-gathers, reduce-scatters or all-to-alls over the ranks along some axes.

    An all-reduce takes twice as long. Latency grows with the logarithm of the ranks, as in trees (Sanders et
    al. 2009, doi:10.1016/j.parco.2009.09.001); bytes move around a ring. A ring over several machines uses as
    many of a machine's links as the ring contains ranks on this machine.

    Args:
        size: bytes of all `count` collectives together.
        slowness: the operation's factor: Hardware.gather or scatter.
    """
    n = mesh.size(*axes)
    if n == 1 or not size:
        return 0.0
    here = inner = 1  # here: ranks of the ring on a machine; inner: ranks along the axes so far
    for axis in reversed(AXES):
        if axis in axes:
            here *= min(mesh.size(axis), max(1, per_node // inner))
        inner *= mesh.size(axis)
    hops, bandwidth = n / here, hw.local.bytes_per_s if here > 1 else inf  # hops between machines
    if hops > 1:
        bandwidth = min(bandwidth, hw.network.bytes_per_s * here / per_node)
    latency = ceil(log2(hops)) * hw.network.latency_s + ceil(log2(here)) * hw.local.latency_s
    return count * latency + slowness * size * (n - 1) / n / bandwidth


def activations_s(hw: Hardware, plan: Plan, mesh: Mesh, per_node: int) -> float:
    """
    Return the seconds of a micro-step's collectives of activations, for which computation waits.

    With tp, attention and the MLP gather the input and scatter the output; the backward pass does the
    reverse. With cp, keys and values are gathered twice, and their gradients scattered. With ep, tokens are
    sent to their experts and back. With pp, stages send activations and gradients.
    """
    args, size = plan.model_args, plan.torch_dtype.itemsize
    layers = pipeline_part(plan, 0)[0]
    hidden = size * plan.micro_batch * args["block_size"] / plan.cp * args["n_embd"]
    kv = 2 * hidden * plan.cp * args["n_kv_head"] / args["n_head"] / plan.tp
    count = 4 * layers + 2  # number of gathers, and of scatters
    seconds = ring_s(hw, mesh, per_node, ("tp",), count * hidden, count, hw.gather)
    seconds += ring_s(hw, mesh, per_node, ("tp",), count * hidden, count, hw.scatter)
    seconds += ring_s(hw, mesh, per_node, ("cp",), 2 * layers * kv, 2 * layers, hw.gather)
    seconds += ring_s(hw, mesh, per_node, ("cp",), layers * kv, layers, hw.scatter)
    if plan.ep > 1:
        seconds += 4 * layers * ring_s(hw, mesh, per_node, ("ep",), hidden * args["n_expert_active"])
    # each stage receives and sends, forwards and backwards: a ring of two ranks moves half
    if plan.pp > 1:
        sends = 2 * stages_per_rank(plan.pp_schedule)
        seconds += sends * 2 * ring_s(hw, replace(mesh, pp=2), per_node, ("pp",), hidden / plan.tp)
    return seconds


def weights_s(
    hw: Hardware, plan: Plan, mesh: Mesh, per_node: int, micro_steps: int, forward: float, backward: float
) -> float:
    """
    Return the seconds of a step's collectives of weights and gradients that no computation hides.

    ZeRO-0 and 1 reduce gradients in float32, in buckets, the last of which is always exposed; ZeRO-1 then
    sends the weights. ZeRO-2 and 3 gather each block's weights in the computing dtype, once or twice in a
    micro-step, and scatter the block's gradients.
    """
    zero, size = plan.zero, plan.torch_dtype.itemsize
    dense, experts = parameters_held(plan, 0)
    times = micro_steps if plan.grad_sync == "every" or (plan.grad_sync == "auto" and zero >= 2) else 1
    hidden_by = (forward, backward) if hw.overlaps else (0.0, 0.0)

    def over(
        axes: tuple[str, ...],
        expert_axes: tuple[str, ...],
        element: float,
        piece: float,
        slowness: float = 1.0,
    ) -> float:
        """Seconds for the dense weights and for the experts, in pieces of so many parameters."""
        sizes = ((axes, dense), (expert_axes, experts))
        return sum(
            ring_s(hw, mesh, per_node, along, element * n, ceil(n / piece), slowness) for along, n in sizes
        )

    bucket = plan.ddp_bucket_mb * 2**20 / 4
    if zero < 2:
        axes = mesh.replicas.axes, mesh.replicas.without("ep").axes
        reduction = 2 * over(*axes, 4, bucket)
        exposed = times * max(reduction - hidden_by[1], min(1.0, bucket / dense) * reduction)
        exposed += over(*axes, 4, bucket, hw.gather) if zero == 1 else 0.0
    else:
        axes = mesh.shards.axes, mesh.shards.without("ep").axes
        unit = 1 / (pipeline_part(plan, 0)[0] + 1)
        piece = unit * (dense + experts)
        gather, scatter = over(*axes, size, piece, hw.gather), over(*axes, 4, piece, hw.scatter)
        again = gather if zero == 3 else 0.0
        exposed = micro_steps * max(gather - hidden_by[0], unit * gather)
        exposed += times * max(again + scatter - hidden_by[1], unit * scatter)
        exposed += (micro_steps - times) * max(again - hidden_by[1], unit * again)
        own = 4 / mesh.shards.size
        exposed += times * 2 * over(mesh.replicas.axes, mesh.replicas.axes, own, piece)
    islands = 2 * ring_s(hw, mesh, per_node, ("islands",), 4 * (dense + experts), ceil(dense / bucket))
    return exposed + islands / plan.local_steps


# ------------------------------------------------------------------------------------------------------------
# a step


def lost_gb(plan: Plan) -> float:
    """
    Return the GB that ZeRO-2, ZeRO-3 and experts take on a CPU besides memory_estimate: FSDP's modules, and
    gaps in the heap. glibc allocates short-lived pieces at new addresses each time. After ten steps the gaps
    were 32 times the largest piece: a block of weights, or the hidden layer of the experts. Pieces of more
    than 32 MiB are not in the heap.
    """
    if plan.device_type != "cpu":
        return 0.0
    args, pieces = plan.model_args, [0.0]
    if plan.zero >= 2:
        pieces.append(4 * parameter_counts(args)[1] / plan.tp / plan.ep)
    if args.get("n_expert"):
        pieces.append(
            4 * plan.micro_batch * args["block_size"] / plan.cp * args["n_expert_active"] * args["n_hidden"]
        )
    pieces = [piece for piece in pieces if piece <= 2**25]
    return (0.07 if plan.zero >= 2 else 0.0) + 32 * max(pieces) / 1e9


def two_blocks(plan: Plan, n: int, tokens: int = 1024) -> dict:
    """
    Return the settings with which n processes train two of the model's blocks alone, each on about `tokens`
    tokens.
    """
    rows = max(1, tokens // plan.model_args["block_size"])
    run = {"n_layer": 2, "batch_size": rows, "gradient_accumulation_steps": n, "grad_sync": "never"}
    run |= {
        "islands": 1,
        "local_steps": 1,
        "grad_compression": "none",
        "cpu_offload": False,
        "layout": "manual",
    }
    return {name: getattr(DEFAULTS, name) for name in LAYOUT} | run


def calibrated(hw: Hardware, plan: Plan, n: int, measured_s: float) -> Hardware:
    """
    Scale the speeds of `hw` so that the predicted time of a step of `two_blocks` equals the measured time: a
    prediction includes only the large operations.
    """
    settings = {name: value for name, value in two_blocks(plan, n).items() if name in vars(plan)}
    args = plan.model_args | {"n_layer": 2}
    two = replace(plan, **settings, model_args=args, world_size=n)
    seconds = predict(two, replace(hw, memory_gb=inf), n).seconds
    factor = (seconds["compute"] + seconds["optimizer"]) / measured_s
    return replace(hw, matmul=factor * hw.matmul, bytes_per_s=factor * hw.bytes_per_s)


def predict(plan: Plan, hw: Hardware, per_node: int) -> Prediction:
    """Predict a plan's step on `per_node` devices of each machine."""
    zero, pp = plan.zero, plan.pp
    mesh = make_mesh(0, plan)
    share = share_of(plan.sequences, 0, mesh.data_size, plan.batch_size, pp)
    plan = replace(plan, micro_batch=share.rows)
    gb = memory_estimate(plan)["total"] + hw.fixed_gb + lost_gb(plan)
    if gb > hw.memory_gb:
        return Prediction(plan, gb, problem=f"does not fit: {gb:.1f} of {hw.memory_gb:g} GB")
    stages = [micro_step_s(hw, plan, rank) for rank in sorted({0, pp // 2, pp - 1})]
    forward, backward = max(stages, key=sum)
    busy, mean_busy = (
        share.micro_steps * (forward + backward),
        share.micro_steps * sum(map(sum, stages)) / len(stages),
    )
    idle = (pp - 1) * (forward + backward) * IDLE.get(plan.pp_schedule, 1.0)
    # where processes share cores, other ranks use the cores of a rank that waits
    compute = max(busy, mean_busy * hw.sharing)
    bubble = max(busy + idle, mean_busy * hw.sharing) - compute
    exposed = share.micro_steps * activations_s(hw, plan, mesh, per_node)
    exposed += weights_s(hw, plan, mesh, per_node, share.micro_steps, forward, backward)
    dense, experts = parameters_held(plan, 0)  # ZeRO divides experts less, since ep has divided them already
    shards = mesh.loss if zero == 1 else mesh.shards
    own = dense / shards.size + experts / shards.without("ep").size
    # AdamW reads weights, gradients and two moments, and writes all but the gradients; clipping scales the
    # gradients first
    optimizer = 40 * own / hw.bytes_per_s * hw.sharing
    seconds = {"compute": compute, "bubble": bubble, "communication": exposed, "optimizer": optimizer}
    return Prediction(plan, gb, seconds)
