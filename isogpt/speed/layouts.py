"""
The layouts that a number of devices allows, ranked by predicted speed: the table of `bench.py --plan`, and
the choice of `train.py --layout=auto`. A layout's setting that is not at the default is kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from math import gcd
from pathlib import Path

import torch

from isogpt.checkpoint.folder import make_writable
from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.common.files import record, recorded
from isogpt.launch.launchers import rank_variables
from isogpt.launch.process_group import Ranks, machine_count
from isogpt.launch.together import broadcast, exit_together
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.mesh import make_mesh, stages_per_rank
from isogpt.parallel.shares import parse_shares
from isogpt.speed.devices import Hardware, hardware_of
from isogpt.speed.memory import cost_of, job_of
from isogpt.speed.prediction import LAYOUT, SCHEDULES, Plan, predict, stage_of
from isogpt.training.precision import resolve_dtype
from isogpt.training.settings import check_degrees, check_training, model_args_of

FILE = "layout.json"  # the layout that layout=auto has chosen, in out_dir
MOST_DEVICES = 2**17  # how far to look for a number of devices on which the model fits
DEGREES = ("zero", "dp_replicate", "tp", "pp", "cp", "ep")
RECOMPUTE = ("none", "selective", "full")


def divisors(n: int, most: int) -> list[int]:
    """The divisors of n up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def layouts(cost: dict, devices: int, per_node: int) -> Iterator[dict]:
    """
    Yield the possible degrees of parallelism and stages of ZeRO. tp stays within a machine, and the replicas
    of HSDP are machines: other choices communicate more over slower links.
    """
    args = cost["model_args"]
    experts, machines = args.get("n_expert", 0), devices // per_node
    sizes = {
        "tp": divisors(per_node, args["n_kv_head"]),
        "pp": divisors(devices, args["n_layer"]),
        "cp": divisors(devices, max(1, args["block_size"] // 256)),
        "ep": divisors(devices, max(1, experts)),
    }
    sequences, islands = sequences_of(cost), max(1, cost["islands"])
    for tp, pp, cp, ep in product(*(fixed_or(cost, name, values) for name, values in sizes.items())):
        left, rest = divmod(devices, islands * tp * pp * cp * ep)
        if rest or left * ep * islands > sequences:
            continue
        copies = fixed_or(cost, "dp_replicate", sorted({1, machines} if left % machines == 0 else {1}))
        for zero, n in product(fixed_or(cost, "zero", [0, 1, 2, 3]), copies):
            layout = LAYOUT | {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": zero, "dp_replicate": n}
            shards = left * ep * cp if zero == 1 else left // n
            is_zero_0 = zero not in (0, cost["zero"]) and shards == 1
            if not is_zero_0 and is_valid(cost | layout, devices):
                yield layout


def by_machine(cost: dict, machines: int) -> dict:
    """The cost with islands=0 resolved; a single island takes no outer steps."""
    islands = cost["islands"] or machines
    outer = {"local_steps": 1, "outer_parts": 1, "outer_compression": "none"} if islands == 1 else {}
    return cost | {"islands": islands} | outer


def sequences_of(cost: dict) -> int:
    """The global batch."""
    return cost["batch_size"] * cost["gradient_accumulation_steps"]


def fixed_or(cost: dict, name: str, values: Sequence) -> Sequence:
    """The value of a setting, if it is not the default, else `values`."""
    return values if cost[name] == LAYOUT[name] else [cost[name]]


def is_valid(settings: dict, devices: int) -> bool:
    """Whether train.py accepts these settings."""
    try:
        check_training(settings | {"out_dir": "out"})  # bench.py's settings lack out_dir
        check_degrees(devices, settings, settings["model_args"])
        parse_shares(settings["shares"], make_mesh(0, devices, settings, stage_of(settings)).data_size)
    except ValueError:
        return False
    return True


def plans_of(cost: dict, layout: dict, hw: Hardware, per_node: int) -> Iterator[Plan]:
    """A layout's plans: schedules, recomputation and micro-batches for the same global batch."""
    sequences, pp = sequences_of(cost), layout["pp"]
    most = -(-sequences * layout["tp"] * pp * layout["cp"] // cost["world_size"])  # sequences of a rank
    sizes = {2**k for k in range(11)} | {cost["batch_size"]}
    sizes = sorted((size for size in sizes if sequences % size == 0 and size < 2 * most), reverse=True)
    modes, has_fit = fixed_or(cost, "activation_checkpointing", RECOMPUTE), False
    schedules = [s for s in fixed_or(cost, "pp_schedule", SCHEDULES) if allows(cost, layout, s)]
    for mode, schedule in product(modes, schedules):
        if mode != modes[0] and has_fit:
            return  # if a plan without recomputation fits, recomputation only costs time
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
    Whether there are enough layers for the schedule. Without a pipeline, one schedule is enough; with the
    zero-bubble schedules, ZeRO-3 equals ZeRO-2 (isogpt/parallel/data.py).
    """
    if layout["pp"] == 1:
        return schedule in (LAYOUT["pp_schedule"], cost["pp_schedule"])
    is_known = layout["zero"] == 3 and schedule in ("zero_bubble", "zbv") and cost["zero"] != 3
    return cost["model_args"]["n_layer"] >= layout["pp"] * stages_per_rank(schedule) and not is_known


def order(plan: Plan) -> tuple[float, float]:
    """The key by which plans are sorted: the time, then the memory."""
    return plan.total_s, plan.gb


def all_plans(cost: dict, hw: Hardware, per_node: int) -> Iterator[Plan]:
    """The plans for cost["world_size"] devices."""
    cost, per_node = cost | {"zero": stage_of(cost), "fsdp": False}, min(per_node, cost["world_size"])
    for layout in layouts(cost, cost["world_size"], per_node):
        yield from plans_of(cost, layout, hw, per_node)


def ranked(cost: dict, hw: Hardware, per_node: int) -> list[Plan]:
    """
    Return all plans, fastest first; plans that do not fit are last.

    Raises:
        ValueError: there are no plans, or the settings do not describe the model.
    """
    if cost["init_from"] not in ("scratch", "auto", "resume"):
        raise ValueError(
            f"init_from is {cost['init_from']!r}: a plan is for the model that n_layer, n_head and n_embd "
            "describe: choose the layout yourself"
        )
    check_training(cost | {"out_dir": "out"})
    check_degrees(cost["world_size"], cost, cost["model_args"])
    plans = sorted(all_plans(cost, hw, per_node), key=order)
    if not plans:
        few = f"{sequences_of(cost)} sequences are too few for them"
        raise ValueError(f"no layout of {cost['world_size']} devices: {few}, or the settings exclude all")
    return plans


def check_fits(plans: list[Plan], cost: dict, hw: Hardware, per_node: int) -> None:
    """
    Raise ValueError if none of the ranked plans fits, with the number of devices on which one would fit.
    """
    if plans[0].problem:
        fewest = smallest_world(cost, hw, per_node)
        hint = f": start with {fewest}, the fewest that do" if fewest else ""
        raise ValueError(f"no layout fits on {cost['world_size']} devices{hint}")


def degrees(plan: Plan) -> tuple[int, ...]:
    """The degrees that define a layout, whose plans differ in schedule, recomputation and micro-batch."""
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
        return any(
            not plan.problem for plan in all_plans(cost | {"world_size": machines * per_node}, hw, per_node)
        )

    too_few, enough = 0, 1
    while not fits(enough):
        too_few, enough = enough, 2 * enough
        if enough * per_node > MOST_DEVICES:
            return 0
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough * per_node


# ------------------------------------------------------------------------------------------------------------
# the report


def spelled(settings: dict) -> str:
    """The settings of a plan that differ from the defaults, in the form in which they are typed."""
    return " ".join(f"--{name}={value}" for name, value in settings.items() if value != LAYOUT.get(name))


def reason(plan: Plan, best: Plan) -> str:
    """Why a plan is slower than the best plan: the part that takes longer by the largest amount."""
    if plan.problem:
        return plan.problem
    if plan.total_s < 1.001 * best.total_s:
        return "as fast, more memory" if plan.gb > best.gb else ""
    more = {name: s - best.seconds[name] for name, s in plan.seconds.items()}
    name = max(more, key=more.get)
    return f"{name} +{more[name] * 1e3:.3g} ms"


def table(plans: list[Plan], tokens: int, devices: int, flops: float, rows: int = 15) -> str:
    """
    Format the fastest layouts, and some layouts that do not fit.

    Args:
        tokens: tokens per step.
        flops: the model's FLOPs per token; the table shows FLOP/s per device.
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
        lines.append(f"  {figures} {plan.gb:6.1f}  {spelled(plan.settings)}{f'  ({why})' if why else ''}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------
# train.py --layout=auto


def chosen(config: dict, source: OpenCheckpoint | None, vocab_size: int, ranks: Ranks) -> list[str]:
    """
    With layout=auto, return the settings of the fastest plan for these processes, as command-line arguments
    (all ranks). Otherwise return an empty list. Exits with a message if no layout fits.

    Args:
        source: the checkpoint whose model is trained further, if there is one.
    """
    args = model_args_of(config, vocab_size)
    if source:
        args = source.run["model_args"] | {"block_size": config["block_size"]}
        args |= {"n_expert": args.get("n_expert") or config["n_expert"]}
    settings = {}
    with exit_together():
        if ranks.is_main and config["layout"] == "auto":
            settings = choose(config | {"init_from": "scratch"} if source else config, args, ranks)
    return [f"--{name}={value}" for name, value in broadcast(settings).items()]


def choose(config: dict, model_args: dict, ranks: Ranks) -> dict:
    """
    Choose the settings of the fastest plan (rank 0). They are printed with the reason, and recorded in
    out_dir: a restart of the same job on as many processes uses the same layout. On a different number of
    processes, the layout is planned again.
    """
    args = asdict(GPTConfig(**model_args))
    dtype, n = resolve_dtype(config["dtype"], ranks.device), ranks.world_size
    per_node = gcd(n, rank_variables()[3])
    cost = by_machine(
        cost_of(config, args, config["batch_size"], dtype, n, ranks.device.type), machine_count()
    )
    name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
    job = job_of(cost) | {"per_node": per_node, "device": name}
    make_writable(config["out_dir"])
    path = Path(config["out_dir"]) / FILE
    settings = recorded(path, job)
    if settings and is_usable(settings, cost):
        print(f"layout:  {spelled(settings)}, recorded in {path}", flush=True)
        return settings
    hw = hardware_of(ranks.device, dtype, per_node)
    plans = ranked(cost, hw, per_node)
    check_fits(plans, cost, hw, per_node)
    best, *others = best_of_layouts(plans)
    print(
        f"layout:  {spelled(best.settings)}, the fastest of {1 + len(others)} by prediction: "
        f"{best.total_s * 1e3:,.1f} ms per step, {best.gb:.1f} GB",
        flush=True,
    )
    for plan in others[:2]:
        print(f"         {spelled(plan.settings)}: {reason(plan, best)}", flush=True)
    record(path, job, best.settings)
    return best.settings


def is_usable(settings: object, cost: dict) -> bool:
    """Whether a recorded choice, which someone may have edited, is a layout for the same global batch."""
    if not isinstance(settings, dict) or any(
        type(v) is not type(cost.get(name)) for name, v in settings.items()
    ):
        return False
    new = cost | settings
    return sequences_of(new) == sequences_of(cost) and is_valid(new, cost["world_size"])
