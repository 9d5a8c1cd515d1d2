"""
The planner: decide what the settings of a training run leave open, once, at the start. The result is a
parallel.plan.Plan. For `train.py --layout=auto` and `bench.py --plan`, the layouts that a number of devices
allows are ranked by predicted speed; settings of the layout that differ from the defaults, or were typed, are
kept.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import product
from math import gcd
from pathlib import Path

from torch import nn

from isogpt.checkpoint.folder import make_writable
from isogpt.checkpoint.start import Start
from isogpt.common.console import count_text, print_line
from isogpt.common.files import parse_json, read_utf8, write_whole
from isogpt.data.dataset import Dataset
from isogpt.lab.combinations import typed
from isogpt.launch.process_group import Ranks
from isogpt.launch.together import broadcast, do_together, exit_together, gather_objects
from isogpt.nn.counts import count_on_meta
from isogpt.parallel.mesh import make_mesh
from isogpt.parallel.plan import UNDIVIDED, Plan, plan_of
from isogpt.speed.devices import Hardware, hardware_of
from isogpt.speed.prediction import IDLE, Prediction, predict
from isogpt.training import precision
from isogpt.training.settings import check_plan, fit_model_args

MICRO_BATCH = "micro_batch.json"  # the micro-batch size to use after running out of memory


def make_plan(config: dict, ranks: Ranks, data: Dataset, start: Start, model_class: type[nn.Module]) -> Plan:
    """
    Decide what train.py's settings leave open: the number of islands, the model's shape, the dtype to compute
    in, the layout and the micro-batch (all ranks). Exits with a message if the settings do not fit the ranks,
    the data or the model.

    Args:
        model_class: GPT, from the model.py of the run.
    """
    with exit_together():
        plan = plan_of(
            config,
            config["islands"] or len(set(ranks.machines)),
            world_size=ranks.world_size,
            device_type=ranks.device.type,
            dtype=precision.resolve_dtype(config["dtype"], ranks.device, start.previous_dtype),
        )
        args = start.model_args(config, data.vocab_size)
        args = fit_model_args(args, config, data, start.is_resume)
        args = asdict(model_class.config_class(**args))
        plan = replace(plan, model_args=args, counts=count_on_meta(model_class, args))
        check_plan(plan)
    plan = replace(plan, dtype=precision.common_dtype(gather_objects(plan.dtype)))
    if config["layout"] == "auto":
        layout = do_together(choose_layout, plan, ranks, config["out_dir"])
        plan = replace(plan, **broadcast(layout))
    if plan.exact:  # a smaller micro-batch would give other bits
        return plan
    # an attempt at the same job has recorded a smaller size if it ran out of memory: the global batch and the
    # curve stay the same. All ranks look, since the rank that ran out may be on a different machine
    rows = recorded(Path(config["out_dir"]) / MICRO_BATCH, plan.job()) or plan.batch_size
    return replace(plan, micro_batch=min(plan.batch_size, *gather_objects(rows)))


def record(path: Path, job: dict, value: object) -> None:
    """
    Record a value for later attempts at the same job: out/layout.json contains the keys "layout" and "job".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({path.stem: value, "job": job}))


def recorded(path: Path, job: dict) -> object | None:
    """What `record` wrote for the same job; None if there is nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = parse_json(read_utf8(path))
        if content["job"] == job:
            return content[path.stem]
    return None


def choose_layout(plan: Plan, ranks: Ranks, out_dir: str) -> dict:
    """
    Choose the settings of the fastest layout for these processes, with --layout=auto (rank 0). They are
    printed with the reason, and recorded in out_dir: a restart of the same job on as many processes uses the
    same layout. On a different number of processes, the layout is planned again. Returns {} on other ranks.

    Raises:
        ValueError: no layout fits, or out_dir cannot be written to.
    """
    if not ranks.is_main:
        return {}
    per_node = gcd(plan.world_size, ranks.machines.count(ranks.machines[ranks.rank]))
    job = plan.job() | {"per_node": per_node, "device": precision.device_name(ranks.device)}
    make_writable(out_dir)
    path = Path(out_dir) / "layout.json"
    settings = recorded(path, job) or {}
    # names of other settings, which someone else may have written there, would be taken for the run's
    if settings.keys() == plan.layout_settings().keys():
        layout = replace(plan, **settings)
        if is_valid(layout):
            print_line(f"layout:  {flags_of(layout)}, recorded in {path}")
            return settings
    hw = hardware_of("this", ranks.device, plan.dtype, per_node)
    ranking = [steps[0] for steps in ranked(plan, hw)]
    best = ranking[0]
    check_fits(best)
    took = f"{best.total_s * 1e3:,.1f} ms per step, {best.gb:.1f} GB"
    print_line(f"layout:  {flags_of(best.plan)}, the fastest of {len(ranking)} by prediction: {took}")
    for other in ranking[1:3]:
        print_line(f"         {flags_of(other.plan)}: {reason(other, best)}")
    record(path, job, best.plan.layout_settings())
    return best.plan.layout_settings()


# ------------------------------------------------------------------------------------------------------------
# layouts


def divisors(n: int, most: int) -> list[int]:
    """The divisors of n up to `most`, and 1."""
    return [d for d in range(1, max(1, most) + 1) if n % d == 0]


def layouts(plan: Plan, per_node: int) -> Iterator[Plan]:
    """
    Yield the possible degrees of parallelism and stages of ZeRO. tp stays within a machine, and the replicas
    of HSDP are machines: other choices communicate more over slower links.
    """
    args, devices = plan.model_args, plan.world_size
    choices = {
        "tp": divisors(per_node, args["n_kv_head"]),
        "pp": divisors(devices, args["n_layer"]),
        "cp": divisors(devices, args["block_size"] // 256),
        "ep": divisors(devices, args["n_expert"]),
        "zero": [0, 1, 2, 3],
        "dp_replicate": sorted({1, devices // per_node}),
    }
    choices = {name: fixed_or(plan, name, values) for name, values in choices.items()}
    for degrees in product(*choices.values()):
        layout = replace(plan, **dict(zip(choices, degrees, strict=True)))
        if not is_valid(layout):
            continue
        mesh = make_mesh(0, layout)
        shards = mesh.loss.size if layout.zero == 1 else mesh.dp_shard
        is_new = shards > 1 or layout.zero in (0, plan.zero)  # another one does as zero 0
        if is_new and mesh.data_size <= plan.sequences:
            yield layout


def fixed_or(plan: Plan, name: str, values: Sequence) -> Sequence:
    """The value of a setting, if it is not the default or was typed, else `values`."""
    value, default = getattr(plan, name), getattr(UNDIVIDED, name)
    if value != default or name in plan.fixed:
        return [value]
    return values


def is_valid(plan: Plan) -> bool:
    """Whether train.py accepts a plan."""
    with suppress(ValueError):
        check_plan(plan)
        return True
    return False


def predictions_of(wanted: Plan, layout: Plan, hw: Hardware) -> Iterator[Prediction]:
    """
    Predict a layout with different schedules, recomputation and micro-batches, for the same global batch.

    Args:
        wanted: the plan that the settings describe, some of whose values are kept, see `fixed_or`.
    """
    schedules = fixed_or(wanted, "pp_schedule", [*IDLE] if layout.pp > 1 else ["1f1b"])
    modes = fixed_or(wanted, "activation_checkpointing", ["none", "selective", "full"])
    for schedule, size in product(schedules, micro_batches(wanted, layout)):
        step = {"batch_size": size, "gradient_accumulation_steps": wanted.sequences // size}
        for mode in modes:
            plan = replace(layout, pp_schedule=schedule, activation_checkpointing=mode, **step)
            if not is_valid(plan):
                continue
            prediction = predict(plan, hw)
            yield prediction
            if not prediction.problem:
                break  # with this micro-batch, more recomputation only costs time


def micro_batches(wanted: Plan, layout: Plan) -> list[int]:
    """The sizes of micro-batches to predict, largest first: that of the settings, and powers of two."""
    replicas = wanted.world_size // (layout.tp * layout.pp * layout.cp)
    most = -(-wanted.sequences // replicas)  # sequences of a rank
    sizes = {2**k for k in range(11)} | {wanted.batch_size}
    return sorted((n for n in sizes if wanted.sequences % n == 0 and n < 2 * most), reverse=True)


def ranked(plan: Plan, hw: Hardware) -> list[list[Prediction]]:
    """
    Return the predictions of each layout of plan.world_size devices. The fastest layout is first, and in each
    layout the fastest prediction; those that do not fit are last.

    Raises:
        ValueError: there are no layouts.
    """
    ranking = []
    for layout in layouts(plan, hw.per_node):
        if predictions := sorted(predictions_of(plan, layout, hw)):
            ranking.append(predictions)
    ranking.sort(key=min)
    if not ranking:
        few = f"{plan.sequences} sequences are too few for {plan.world_size} devices"
        raise ValueError(f"no layout: {few}, or the settings exclude all")
    return ranking


def check_fits(fastest: Prediction) -> None:
    """Raise ValueError if the first of the ranked predictions does not fit, with what to try."""
    if fastest.problem:
        devices = count_text(fastest.plan.world_size, "device")
        advice = "try --zero=3 --cpu_offload=True on GPUs, or bench.py --plan --devices=1,2,4,8,16,32"
        raise ValueError(f"no layout fits on {devices}: {advice}")


def flags_of(plan: Plan) -> str:
    """The settings of a plan's layout that differ from the defaults, in the form in which they are typed."""
    usual = UNDIVIDED.layout_settings()
    settings = plan.layout_settings().items()
    return " ".join(typed({name: value for name, value in settings if value != usual[name]}))


def reason(prediction: Prediction, best: Prediction) -> str:
    """Why a layout is slower than the best layout: the part of a step that takes longest in comparison."""
    if prediction.problem:
        return prediction.problem
    if prediction.total_s < 1.001 * best.total_s:
        return "as fast, more memory" if prediction.gb > best.gb else ""
    longer = {name: s - best.seconds[name] for name, s in prediction.seconds.items()}
    name = max(longer, key=longer.get)
    return f"{name} +{longer[name] * 1e3:.3g} ms"
