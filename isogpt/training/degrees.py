"""Whether the degrees of parallelism divide the ranks and the model."""

from collections.abc import Iterator
from math import ceil, gcd, prod

import torch

from isogpt.common.console import count_text
from isogpt.common.torch_versions import SENDS_TO_ITSELF
from isogpt.parallel.mesh import AXES, stages_per_rank
from isogpt.parallel.plan import Plan
from isogpt.training.settings import report

DEGREES = tuple(axis for axis in AXES if axis != "dp_shard")


def check_degrees(plan: Plan, splits_sequence: bool = True) -> None:
    """
    Check that the degrees of parallelism divide the ranks and the model, and that both allow CUDA graphs.

    Args:
        plan: its model_args are empty if the model is not known yet.
        splits_sequence: whether cp and tp divide sequences of block_size tokens, as they do in training.

    Raises:
        ValueError: one line for each problem.
    """
    problems = list(problems_with_ranks(plan))
    if plan.model_args:
        problems += problems_with_model(plan, splits_sequence)
    report(problems)


def problems_with_ranks(plan: Plan) -> Iterator[str]:
    """A sentence for each reason why a plan cannot be used with its number of processes."""
    degrees = {name: getattr(plan, name) for name in DEGREES if getattr(plan, name) > 1}
    if plan.world_size % prod(degrees.values()):
        yield problem_with_product(plan.world_size, degrees)
    if plan.islands > 1 and plan.sequences < plan.islands:
        yield (
            f"islands is {plan.islands}, but a step reads only {count_text(plan.sequences, 'sequence')}: set "
            f"--gradient_accumulation_steps={ceil(plan.islands / plan.batch_size)}"
        )
    if plan.cuda_graphs and plan.world_size > 1:
        yield f"cuda_graphs is for one process, but there are {plan.world_size}: set --cuda_graphs=False"


def problem_with_product(world_size: int, degrees: dict[str, int]) -> str:
    """The sentence about degrees whose product does not divide the number of processes."""
    product = prod(degrees.values())
    started = "1 process" if world_size == 1 else f"{world_size} processes"
    text = " x ".join(f"{name} {n}" for name, n in degrees.items())
    if len(degrees) > 1:
        text += f" = {product}"
    counts = multiples_around(world_size, product)
    return f"{started} cannot be divided into {text}: start {counts} processes, or lower a degree"


def problems_with_model(plan: Plan, splits_sequence: bool) -> Iterator[str]:
    """A sentence for each reason why a plan cannot be used with its model."""
    yield from problems_with_heads(plan)
    yield from problems_with_experts(plan)
    yield from problems_with_stages(plan)
    if splits_sequence:
        yield from problems_with_sequence(plan)
    yield from problems_with_widths(plan)


def problems_with_heads(plan: Plan) -> Iterator[str]:
    """Each rank of a tp group computes whole heads."""
    args, tp = plan.model_args, plan.tp
    heads = args["n_kv_head"] or args["n_head"]
    if heads % tp:
        name = "n_head" if heads == args["n_head"] else "n_kv_head"
        yield f"tp is {tp}: it must divide {name}, {heads}: set --tp={gcd(heads, tp)}"


def problems_with_experts(plan: Plan) -> Iterator[str]:
    """Each rank of an ep group holds the same number of experts, and CUDA graphs allow none."""
    experts, ep = plan.model_args.get("n_expert", 0), plan.ep
    if plan.cuda_graphs and experts:
        yield "cuda_graphs is for models without experts: set --cuda_graphs=False"
    if ep > 1 and not experts:
        n = ceil(8 / ep) * ep
        yield f"ep is {ep}, but the model contains no experts: set --ep=1, or --n_expert={n}"
    elif experts % ep:
        yield f"ep is {ep}: it must divide n_expert, {experts}: set --ep={gcd(experts, ep)}"


def problems_with_stages(plan: Plan) -> Iterator[str]:
    """Each pipeline stage contains a block or more. With exact, some models cannot be divided into stages."""
    args, pp = plan.model_args, plan.pp
    layers, per_rank = args["n_layer"], stages_per_rank(plan.pp_schedule)
    if layers < pp * per_rank:
        schedule = " or --pp_schedule=1f1b" if layers >= pp else ""
        yield (
            f"pp_schedule {plan.pp_schedule!r} makes {pp * per_rank} stages with pp {pp}, but n_layer is "
            f"{layers}: set --pp={max(1, layers // per_rank)}{schedule}"
        )
    if pp > 1 and plan.pp_schedule == "zbv" and plan.device_type == "cpu" and not SENDS_TO_ITSELF:
        yield f"torch {torch.__version__} cannot run pp_schedule zbv on CPUs: set --pp_schedule=zero_bubble"
    if plan.exact and pp > 1 and args["tied"]:
        yield (
            "exact: in a pipeline, the gradients of a tied head and of the embeddings are rounded "
            "separately: set --pp=1, or start a model with --arch=llama or nanochat, or --exact=False"
        )
    if plan.exact and pp > 1 and args["n_expert"]:
        yield (
            "exact: in a pipeline, the order of the routers' statistics matters: set --pp=1, or --exact=False"
        )


def problems_with_sequence(plan: Plan) -> Iterator[str]:
    """Ranks of cp and tp groups hold equal parts of a sequence."""
    length, cp, tp = plan.model_args["block_size"], plan.cp, plan.tp
    parts = tp * (2 * cp if cp > 1 else 1)
    if length % parts:
        factors = f"2 x cp x tp, {parts}" if cp > 1 else f"tp, {tp}"
        lengths = multiples_around(length, parts)
        yield f"block_size is {length}: it must be a multiple of {factors}: set --block_size={lengths}"


def problems_with_widths(plan: Plan) -> Iterator[str]:
    """The last rank of a tp group must hold a part of each matrix."""
    tp = plan.tp
    for name in ("vocab_size", "n_hidden"):
        size = plan.model_args.get(name)
        if size and (tp - 1) * ceil(size / tp) >= size:
            yield f"tp is {tp}, which is too many ranks for {name} {size}: set --tp={max(1, tp // 2)}"


def multiples_around(n: int, factor: int) -> str:
    """The multiples of `factor` below and above n, as they are typed."""
    below = n // factor * factor
    return " or ".join(str(multiple) for multiple in (below, below + factor) if multiple)
