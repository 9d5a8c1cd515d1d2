"""The layouts that a number of devices allows, ranked by isogpt.planner's predictions, and the table of them."""

from collections.abc import Iterator
from itertools import product

from isogpt.mesh import stages_per_rank
from isogpt.planner import LAYOUT, SCHEDULES, Hardware, Plan, predict
from isogpt.settings import check_degrees, check_training

MOST_DEVICES = 2**17  # how far to look for a number of devices on which the model fits
DEGREES = ("zero", "dp_replicate", "tp", "pp", "cp", "ep")
RECOMPUTE = ("none", "selective", "full")


def divisors(n: int, most: int) -> list[int]:
    """The divisors of n up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def layouts(cost: dict, devices: int, per_node: int) -> Iterator[dict]:
    """
    The degrees of parallelism and stages of ZeRO that are possible. tp stays within a machine, and the copies of HSDP
    are machines: other choices communicate more over slower links.
    """
    args = cost["model_args"]
    experts = args.get("n_expert", 0)
    sizes = (divisors(per_node, args["n_kv_head"]), divisors(devices, args["n_layer"]),
             divisors(devices, max(1, args["block_size"] // 256)), divisors(devices, max(1, experts)))  # fmt: skip
    sequences = cost["batch_size"] * cost["gradient_accumulation_steps"]
    for tp, pp, cp, ep in product(*sizes):
        left, rest = divmod(devices, tp * pp * cp * ep)
        if rest or left * ep > sequences:
            continue
        layout = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
        copies = {1, devices // per_node} if left % (devices // per_node) == 0 else {1}
        sharded = [{"zero": zero, "dp_replicate": n} for zero in (2, 3) for n in sorted(copies) if left // n > 1]
        stages = [{"zero": 0}, {"zero": 1}] if left * ep * cp > 1 else [{"zero": 0}]
        yield from (LAYOUT | layout | s for s in [*stages, *sharded] if is_valid(cost | LAYOUT | layout | s, devices))


def is_valid(settings: dict, devices: int) -> bool:
    """Whether train.py accepts these settings."""
    try:
        check_training(settings | {"out_dir": "out"})  # bench.py has none
        check_degrees(devices, settings, settings["model_args"])
    except ValueError:
        return False
    return True


def plans_of(cost: dict, layout: dict, hw: Hardware, per_node: int) -> Iterator[Plan]:
    """A layout's plans: schedules, recomputation and micro-batches for the same global batch."""
    sequences, pp = cost["batch_size"] * cost["gradient_accumulation_steps"], layout["pp"]
    most = -(-sequences * layout["tp"] * pp * layout["cp"] // cost["world_size"])  # sequences of a rank
    sizes = {2**k for k in range(11)} | {cost["batch_size"]}
    sizes = sorted((size for size in sizes if sequences % size == 0 and size < 2 * most), reverse=True)
    has_fit = False
    for mode, schedule in product(RECOMPUTE, [s for s in SCHEDULES if allows(cost, layout, s)]):
        if mode != RECOMPUTE[0] and has_fit:
            return  # recomputation only costs time if a plan without it fits
        fits = 0
        for size in sizes:
            changes = {"pp_schedule": schedule, "activation_checkpointing": mode, "batch_size": size}
            changes["gradient_accumulation_steps"] = sequences // size
            plan = predict(cost | layout | changes, hw, per_node)
            yield plan
            fits += not plan.problem
            if pp == 1 and fits == 2:
                break  # smaller micro-batches are slower
        has_fit = has_fit or fits > 0


def allows(cost: dict, layout: dict, schedule: str) -> bool:
    """
    Whether there are enough layers for the schedule. Without a pipeline one schedule is enough; with the zero-bubble
    ones ZeRO-3 is ZeRO-2 (isogpt/parallel/data.py).
    """
    if layout["pp"] == 1:
        return schedule == LAYOUT["pp_schedule"]
    is_known = layout["zero"] == 3 and schedule in ("zero_bubble", "zbv")
    return cost["model_args"]["n_layer"] >= layout["pp"] * stages_per_rank(schedule) and not is_known


def order(plan: Plan) -> tuple[float, float]:
    """What plans are sorted by: the time, then the memory."""
    return plan.total_s, plan.gb


def all_plans(cost: dict, hw: Hardware, per_node: int) -> Iterator[Plan]:
    """The plans for cost["world_size"] devices."""
    per_node = min(per_node, cost["world_size"])
    for layout in layouts(cost, cost["world_size"], per_node):
        yield from plans_of(cost, layout, hw, per_node)


def ranked(cost: dict, hw: Hardware, per_node: int) -> list[Plan]:
    """All plans, fastest first; those that do not fit are last."""
    return sorted(all_plans(cost, hw, per_node), key=order)


def degrees(plan: Plan) -> tuple[int, ...]:
    """What makes a layout; its plans differ in schedule, recomputation and micro-batch."""
    return tuple(plan.settings[name] for name in DEGREES)


def best_of_layouts(plans: list[Plan]) -> list[Plan]:
    """The first plan of each layout."""
    found = {}
    for plan in plans:
        found.setdefault(degrees(plan), plan)
    return list(found.values())


def smallest_world(cost: dict, hw: Hardware, per_node: int) -> int:
    """The smallest number of machines on which the model fits, times their devices; 0 if there is none."""

    def fits(machines: int) -> bool:
        return any(not plan.problem for plan in all_plans(cost | {"world_size": machines * per_node}, hw, per_node))

    too_few, enough = 0, 1
    while not fits(enough):
        too_few, enough = enough, 2 * enough
        if enough * per_node > MOST_DEVICES:
            return 0
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough * per_node


# ---------------------------------------------------------------------------------------------------------------------
# the report


def typed(plan: Plan) -> list[str]:
    """The settings of a plan that differ from the defaults, as they are typed."""
    return [f"--{name}={value}" for name, value in plan.settings.items() if value != LAYOUT.get(name)]


def reason(plan: Plan, best: Plan) -> str:
    """Why a plan is slower than the best one: the part that takes longer by the largest amount."""
    if plan.problem:
        return plan.problem
    if plan.total_s < 1.001 * best.total_s:
        return "as fast, more memory" if plan.gb > best.gb else ""
    more = {name: s - best.seconds[name] for name, s in plan.seconds.items()}
    name = max(more, key=more.get)
    return f"{name} +{more[name] * 1e3:.3g} ms"


def table(plans: list[Plan], tokens: int, devices: int, flops: float, rows: int = 15) -> str:
    """
    The fastest layouts, and some of those that do not fit.

    Args:
        tokens: of a step.
        flops: of the model per token; the table shows those of a device.
    """
    lines = [f"  {'ms/step':>9} {'tokens/s':>12} {'TFLOP/s':>8} {'GB':>6}  settings (why they are slower)"]
    best = best_of_layouts(plans)
    fitting = [plan for plan in best if not plan.problem]
    for plan in [*fitting[:rows], *[plan for plan in best if plan.problem][:3]]:
        figures = " " * 31
        if not plan.problem:
            s = plan.total_s
            figures = f"{s * 1e3:9,.1f} {tokens / s:12,.0f} {tokens * flops / s / devices / 1e12:8.1f}"
        why = reason(plan, plans[0])
        lines.append(f"  {figures} {plan.gb:6.1f}  {' '.join(typed(plan))}{f'  ({why})' if why else ''}")
    return "\n".join(lines)
