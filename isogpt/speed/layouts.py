"""
The layouts that a number of devices allows, ranked by predicted speed: the table of `bench.py --plan`, and
the choice of `train.py --layout=auto`. A layout's setting that is not at the default is kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd
from pathlib import Path
from typing import NamedTuple

import torch

from isogpt.checkpoint.folder import make_writable
from isogpt.common.files import record, recorded
from isogpt.launch.launchers import rank_variables
from isogpt.launch.process_group import Ranks
from isogpt.parallel.mesh import make_mesh, stages_per_rank
from isogpt.parallel.plan import UNDIVIDED, Plan
from isogpt.parallel.shares import parse_shares
from isogpt.speed.devices import Hardware, hardware_of
from isogpt.speed.prediction import SCHEDULES, Prediction, predict
from isogpt.training.degrees import check_degrees
from isogpt.training.settings import check_layout

FILE = "layout.json"  # the layout that layout=auto has chosen, in out_dir
MOST_DEVICES = 2**17  # to plan for, and to look for a number of devices on which the model fits
BATCH = ("batch_size", "gradient_accumulation_steps")  # always typed
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
    experts, machines = args.get("n_expert", 0), devices // per_node
    sizes = {
        "tp": divisors(per_node, args["n_kv_head"]),
        "pp": divisors(devices, args["n_layer"]),
        "cp": divisors(devices, max(1, args["block_size"] // 256)),
        "ep": divisors(devices, max(1, experts)),
    }
    for tp, pp, cp, ep in product(*(fixed_or(plan, name, values) for name, values in sizes.items())):
        left, rest = divmod(devices, plan.islands * tp * pp * cp * ep)
        if rest or left * ep * plan.islands > plan.sequences:
            continue
        copies = fixed_or(plan, "dp_replicate", sorted({1, machines} if left % machines == 0 else {1}))
        for zero, n in product(fixed_or(plan, "zero", [0, 1, 2, 3]), copies):
            others = {name: getattr(UNDIVIDED, name) for name in ("pp_schedule", "activation_checkpointing")}
            degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": zero, "dp_replicate": n}
            layout = replace(plan, **others, **degrees)
            shards = left * ep * cp if zero == 1 else left // n
            is_zero_0 = zero not in (0, plan.zero) and shards == 1
            if not is_zero_0 and is_valid(layout):
                yield layout


def fixed_or(plan: Plan, name: str, values: Sequence) -> Sequence:
    """The value of a setting, if it is not the default, else `values`."""
    value = getattr(plan, name)
    return values if value == getattr(UNDIVIDED, name) else [value]


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
        wanted: the plan that the settings describe, whose values are kept if they are not the defaults.
    """
    sequences, pp = wanted.sequences, layout.pp
    most = -(-sequences * layout.tp * pp * layout.cp // wanted.world_size)  # sequences of a rank
    sizes = {2**k for k in range(11)} | {wanted.batch_size}
    sizes = sorted((size for size in sizes if sequences % size == 0 and size < 2 * most), reverse=True)
    modes, has_fit = fixed_or(wanted, "activation_checkpointing", RECOMPUTE), False
    schedules = [s for s in fixed_or(wanted, "pp_schedule", SCHEDULES) if allows(wanted, layout, s)]
    for mode, schedule in product(modes, schedules):
        if mode != modes[0] and has_fit:
            return  # if a plan without recomputation fits, recomputation only costs time
        fits = 0
        for size in sizes:
            changes = {"pp_schedule": schedule, "activation_checkpointing": mode, "batch_size": size}
            changes["gradient_accumulation_steps"] = sequences // size
            found = predict(replace(layout, **changes), hw, per_node)
            yield found
            fits += not found.problem
            if pp == 1 and fits == 2:
                break  # smaller micro-batches are slower
        has_fit = has_fit or fits > 0


def allows(wanted: Plan, layout: Plan, schedule: str) -> bool:
    """
    Whether there are enough layers for the schedule. Without a pipeline, one schedule is enough; with the
    zero-bubble schedules, ZeRO-3 equals ZeRO-2 (isogpt/parallel/data.py).
    """
    if layout.pp == 1:
        return schedule in (UNDIVIDED.pp_schedule, wanted.pp_schedule)
    is_known = layout.zero == 3 and schedule in ("zero_bubble", "zbv") and wanted.zero != 3
    return wanted.model_args["n_layer"] >= layout.pp * stages_per_rank(schedule) and not is_known


def order(found: Prediction) -> tuple[float, float]:
    """The key by which predictions are sorted: the time, then the memory."""
    return found.total_s, found.gb


def all_predictions(plan: Plan, hw: Hardware, per_node: int) -> Iterator[Prediction]:
    """The predictions for plan.world_size devices."""
    per_node = min(per_node, plan.world_size)
    for layout in layouts(plan, per_node):
        yield from predictions_of(plan, layout, hw, per_node)


def ranked(plan: Plan, hw: Hardware, per_node: int) -> list[Prediction]:
    """
    Predict all layouts, fastest first; layouts that do not fit are last.

    Raises:
        ValueError: there are no layouts, or the settings do not describe the model.
    """
    check_layout(plan)
    check_degrees(plan)
    found = sorted(all_predictions(plan, hw, per_node), key=order)
    if not found:
        few = f"{plan.sequences} sequences are too few for them"
        raise ValueError(f"no layout of {plan.world_size} devices: {few}, or the settings exclude all")
    return found


def check_fits(found: list[Prediction], plan: Plan, hw: Hardware, per_node: int) -> None:
    """
    Raise ValueError if none of the ranked predictions fits, with the number of devices that would suffice,
    and on GPUs whether the memory of the CPU would.
    """
    if found[0].problem:
        fewest = smallest_world(plan, hw, per_node)
        hint = f": start with {fewest}, the fewest that do" if fewest else ""
        if fits_with_offload(plan, hw, per_node):
            hint += f"{', or' if hint else ':'} set --zero=3 --cpu_offload=True, with which a layout fits"
        count = f"{plan.world_size} device{'s' if plan.world_size > 1 else ''}"
        raise ValueError(f"no layout fits on {count}{hint}")


def fits_with_offload(plan: Plan, hw: Hardware, per_node: int) -> bool:
    """Whether a layout fits on GPUs if the CPU keeps parameters and optimizer state."""
    if plan.device_type != "cuda" or plan.cpu_offload or plan.zero not in (UNDIVIDED.zero, 3):
        return False
    offloaded = replace(plan, zero=3, cpu_offload=True)
    return any(not found.problem for found in all_predictions(offloaded, hw, per_node))


def degrees(found: Prediction) -> tuple[int, ...]:
    """The degrees that define a layout. Its predictions differ in schedule, recomputation and micro-batch."""
    return tuple(getattr(found.plan, name) for name in DEGREES)


def best_of_layouts(predictions: list[Prediction]) -> list[Prediction]:
    """The first prediction of each layout."""
    found = {}
    for prediction in predictions:
        found.setdefault(degrees(prediction), prediction)
    return list(found.values())


def smallest_world(plan: Plan, hw: Hardware, per_node: int) -> int:
    """
    The smallest number of devices on which the model fits: a part of a machine, or whole machines. 0 if there
    is none.
    """

    def fits(devices: int) -> bool:
        larger = replace(plan, world_size=devices)
        return any(not found.problem for found in all_predictions(larger, hw, per_node))

    for devices in range(1, per_node):
        if fits(devices):
            return devices
    too_few, enough = 0, 1
    while not fits(enough * per_node):
        too_few, enough = enough, 2 * enough
        if enough * per_node > MOST_DEVICES:
            return 0
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle * per_node) else (middle, enough)
    return enough * per_node


# ------------------------------------------------------------------------------------------------------------
# the report


def spelled(settings: dict) -> str:
    """The settings of a plan that differ from the defaults, in the form in which they are typed."""
    return " ".join(
        f"--{name}={value}"
        for name, value in settings.items()
        if value != getattr(UNDIVIDED, name) or name in BATCH
    )


def reason(plan: Prediction, best: Prediction) -> str:
    """Why a plan is slower than the best plan: the part that takes longer by the largest amount."""
    if plan.problem:
        return plan.problem
    if plan.total_s < 1.001 * best.total_s:
        return "as fast, more memory" if plan.gb > best.gb else ""
    more = {name: s - best.seconds[name] for name, s in plan.seconds.items()}
    name = max(more, key=more.get)
    return f"{name} +{more[name] * 1e3:.3g} ms"


def table(plans: list[Prediction], tokens: int, devices: int, flops: float, rows: int = 15) -> str:
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


class Choice(NamedTuple):
    """The fastest layout on a number of devices of a kind."""

    devices: int
    hardware: str
    tokens: int  # per step
    found: Prediction  # the smallest layout if none fits
    fewest: int  # if none fits: how many devices suffice (0: unknown)

    @property
    def tokens_per_s(self) -> float:
        """The speed; 0 if no layout fits."""
        return 0.0 if self.found.problem else self.tokens / self.found.total_s


def fastest_first(choices: list[Choice]) -> list[Choice]:
    """Sort by tokens/s; choices on which no layout fits are last, smallest first."""
    return sorted(choices, key=lambda choice: (-choice.tokens_per_s, choice.found.gb))


def table_of_choices(choices: list[Choice]) -> str:
    """Format a line for each number of devices of each kind, in order."""
    columns = f"{'ms/step':>12} {'tokens/s':>12} {'per device':>12} {'GB':>6}  fits  settings"
    lines = [f"  {'devices':>15} {columns}"]
    for choice in choices:
        found, name = choice.found, f"{choice.devices} x {choice.hardware}"
        if found.problem:
            needs = f"{choice.fewest} devices are the fewest on which a layout fits" if choice.fewest else ""
            lines.append(f"  {name:>15} {'':38} {found.gb:6.1f}  no    {needs}".rstrip())
        else:
            speed = choice.tokens_per_s
            figures = f"{found.total_s * 1e3:12,.1f} {speed:12,.0f} {speed / choice.devices:12,.0f}"
            lines.append(f"  {name:>15} {figures} {found.gb:6.1f}  yes   {spelled(found.settings)}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------
# train.py --layout=auto


def choose(plan: Plan, ranks: Ranks, out_dir: str) -> dict:
    """
    Choose the settings of the fastest layout for these processes, with --layout=auto (rank 0). They are
    printed with the reason, and recorded in out_dir: a restart of the same job on as many processes uses the
    same layout. On a different number of processes, the layout is planned again.

    Raises:
        ValueError: no layout fits, or out_dir cannot be written to.
    """
    per_node = gcd(plan.world_size, rank_variables()[3])
    name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
    job = plan.job() | {"per_node": per_node, "device": name}
    make_writable(out_dir)
    path = Path(out_dir) / FILE
    settings = recorded(path, job)
    if settings and is_usable(settings, plan):
        print(f"layout:  {spelled(settings)}, recorded in {path}", flush=True)
        return settings
    hw = hardware_of(ranks.device, plan.dtype, per_node)
    found = ranked(plan, hw, per_node)
    check_fits(found, plan, hw, per_node)
    best, *others = best_of_layouts(found)
    print(
        f"layout:  {spelled(best.settings)}, the fastest of {1 + len(others)} by prediction: "
        f"{best.total_s * 1e3:,.1f} ms per step, {best.gb:.1f} GB",
        flush=True,
    )
    for other in others[:2]:
        print(f"         {spelled(other.settings)}: {reason(other, best)}", flush=True)
    record(path, job, best.settings)
    return best.settings


def is_usable(settings: object, plan: Plan) -> bool:
    """Whether a recorded choice, which someone may have edited, is a layout for the same global batch."""
    if not isinstance(settings, dict) or not settings.keys() <= plan.layout_settings().keys():
        return False
    if any(type(value) is not type(getattr(plan, name)) for name, value in settings.items()):
        return False
    new = replace(plan, **settings)
    return new.sequences == plan.sequences and is_valid(new)
