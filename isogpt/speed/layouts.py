"""
The layouts that a number of devices allows, ranked by predicted speed: for `bench.py --plan` and
`train.py --layout=auto`. Settings of the layout that differ from the defaults, or were typed, are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, product

from isogpt.common.console import count_text
from isogpt.parallel.mesh import make_mesh
from isogpt.parallel.plan import UNDIVIDED, Plan
from isogpt.parallel.shares import parse_shares
from isogpt.speed.devices import Hardware
from isogpt.speed.prediction import SCHEDULES, Prediction, predict
from isogpt.training.degrees import check_degrees
from isogpt.training.settings import check_layout

DEGREES = ("zero", "dp_replicate", "tp", "pp", "cp", "ep")
RECOMPUTE = ("none", "selective", "full")


def divisors(n: int, most: int) -> list[int]:
    """The divisors of n up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def layouts(plan: Plan, per_node: int) -> Iterator[Plan]:
    """
    Yield the possible degrees of parallelism and stages of ZeRO. tp stays within a machine, and the replicas
    of HSDP are machines: other choices communicate more over slower links.
    """
    args, devices = plan.model_args, plan.world_size
    choices = {
        "tp": divisors(per_node, args["n_kv_head"]),
        "pp": divisors(devices, args["n_layer"]),
        "cp": divisors(devices, max(1, args["block_size"] // 256)),
        "ep": divisors(devices, max(1, args.get("n_expert", 0))),
        "zero": [0, 1, 2, 3],
        "dp_replicate": sorted({1, devices // per_node}),
    }
    for degrees in product(*(fixed_or(plan, name, values) for name, values in choices.items())):
        layout = replace(plan, **dict(zip(choices, degrees, strict=True)))
        if is_valid(layout):
            mesh = make_mesh(0, layout)
            shards = mesh.loss.size if layout.zero == 1 else mesh.dp_shard
            is_zero_0 = layout.zero not in (0, plan.zero) and shards == 1
            if mesh.data_size <= plan.sequences and not is_zero_0:
                yield layout


def fixed_or(plan: Plan, name: str, values: Sequence) -> Sequence:
    """The value of a setting, if it is not the default or was typed, else `values`."""
    value = getattr(plan, name)
    return values if value == getattr(UNDIVIDED, name) and name not in plan.kept else [value]


def is_valid(plan: Plan) -> bool:
    """Whether train.py accepts a plan."""
    try:
        check_layout(plan)
        check_degrees(plan)
        parse_shares(plan.shares, make_mesh(0, plan).data_size)
    except ValueError:
        return False
    return True


def predictions_of(wanted: Plan, layout: Plan, hw: Hardware, per_node: int) -> Iterator[Prediction]:
    """
    Predict a layout with different schedules, recomputation and micro-batches, for the same global batch.

    Args:
        wanted: the plan that the settings describe, some of whose values are kept, see `fixed_or`.
    """
    schedules = fixed_or(wanted, "pp_schedule", SCHEDULES if layout.pp > 1 else ["1f1b"])
    modes = fixed_or(wanted, "activation_checkpointing", RECOMPUTE)
    fits = 0  # sizes that fit with the least recomputation
    for schedule, size in product(schedules, micro_batches(wanted, layout)):
        steps = {"batch_size": size, "gradient_accumulation_steps": wanted.sequences // size}
        plans = (
            replace(layout, pp_schedule=schedule, activation_checkpointing=mode, **steps) for mode in modes
        )
        for plan in filter(is_valid, plans):
            prediction = predict(plan, hw, per_node)
            yield prediction
            if not prediction.problem:
                fits += plan.activation_checkpointing == modes[0]
                break  # with this micro-batch, more recomputation only costs time
        if layout.pp == 1 and fits == 2:
            return  # smaller micro-batches are slower


def micro_batches(wanted: Plan, layout: Plan) -> list[int]:
    """The sizes of micro-batches to predict, largest first: that of the settings, and powers of two."""
    replicas = wanted.world_size // (layout.tp * layout.pp * layout.cp)
    most = -(-wanted.sequences // replicas)  # sequences of a rank
    sizes = {2**k for k in range(11)} | {wanted.batch_size}
    return sorted((n for n in sizes if wanted.sequences % n == 0 and n < 2 * most), reverse=True)


def ranked(plan: Plan, hw: Hardware, per_node: int) -> list[Prediction]:
    """
    Predict all layouts on plan.world_size devices, fastest first; layouts that do not fit are last.

    Raises:
        ValueError: there are no layouts, or the settings do not describe the model.
    """
    check_layout(plan)
    check_degrees(plan)
    per_node = min(per_node, plan.world_size)
    found = (predictions_of(plan, layout, hw, per_node) for layout in layouts(plan, per_node))
    steps = sorted(chain.from_iterable(found), key=lambda step: (step.total_s, step.gb))
    if not steps:
        raise ValueError(
            f"no layout: a step reads too few sequences ({plan.sequences}) for the devices "
            f"({plan.world_size}), or the settings exclude all layouts"
        )
    return steps


def check_fits(fastest: Prediction) -> None:
    """Raise ValueError if the first of the ranked predictions does not fit, with what to try."""
    if fastest.problem:
        raise ValueError(
            f"no layout fits on {count_text(fastest.plan.world_size, 'device')}: bench.py --plan "
            "--devices=1,2,4,8 predicts on which numbers one does; on GPUs, try --zero=3 --cpu_offload=True"
        )


def degrees(prediction: Prediction) -> tuple[int, ...]:
    """The degrees that define a layout. Its predictions differ in schedule, recomputation and micro-batch."""
    return tuple(getattr(prediction.plan, name) for name in DEGREES)


def best_of_layouts(predictions: list[Prediction]) -> list[Prediction]:
    """The first prediction of each layout."""
    first = {}
    for prediction in predictions:
        first.setdefault(degrees(prediction), prediction)
    return list(first.values())


def typed(settings: dict) -> str:
    """The settings of a layout that differ from the defaults, in the form in which they are typed."""
    changed = {name: value for name, value in settings.items() if value != getattr(UNDIVIDED, name)}
    return " ".join(f"--{name}={value}" for name, value in changed.items())


def reason(prediction: Prediction, best: Prediction) -> str:
    """Why a layout is slower than the best layout: the part of a step that takes longest in comparison."""
    if prediction.problem:
        return prediction.problem
    if prediction.total_s < 1.001 * best.total_s:
        return "as fast, more memory" if prediction.gb > best.gb else ""
    longer = {name: s - best.seconds[name] for name, s in prediction.seconds.items()}
    name = max(longer, key=longer.get)
    return f"{name} +{longer[name] * 1e3:.3g} ms"
