"""
The planner: decide what the settings of a training run leave open, once, at the start. The result is a
parallel.plan.Plan; layouts.py ranks the layouts among which --layout=auto chooses.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from math import gcd
from pathlib import Path

from torch import nn

from isogpt.checkpoint.folder import make_writable
from isogpt.checkpoint.start import Start
from isogpt.common import console
from isogpt.common.files import parse_json, read_utf8, write_whole
from isogpt.data.dataset import Dataset
from isogpt.launch.process_group import Ranks
from isogpt.launch.together import broadcast, do_together, exit_together, gather_objects
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.counts import count_on_meta
from isogpt.parallel.mesh import make_mesh
from isogpt.parallel.plan import Plan, plan_of
from isogpt.parallel.shares import parse_shares
from isogpt.speed.devices import hardware_of
from isogpt.speed.layouts import best_of_layouts, check_fits, is_valid, ranked, reason, typed
from isogpt.training import precision
from isogpt.training.degrees import check_degrees
from isogpt.training.settings import fit_model_args

MICRO_BATCH = "micro_batch.json"  # the micro-batch size to use after running out of memory


def make_plan(
    config: dict, ranks: Ranks, data: Dataset, start: Start, model_class: Callable[[GPTConfig], nn.Module]
) -> Plan:
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
        args = fit_model_args(start.model_args(config, data.vocab_size), config, data, start.is_resume)
        args = asdict(GPTConfig(**args))
        plan = replace(plan, model_args=args, counts=count_on_meta(model_class, args))
        check_degrees(plan)
        parse_shares(plan.shares, make_mesh(0, plan).data_size)
    plan = replace(plan, dtype=precision.common_dtype(gather_objects(plan.dtype)))
    with exit_together():
        precision.check_residual_dtype(config["residual_dtype"], plan.dtype)
    if config["layout"] == "auto":
        plan = replace(plan, **broadcast(do_together(choose_layout, plan, ranks, config["out_dir"])))
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
        return content[path.stem] if content["job"] == job else None


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
    if settings.keys() == plan.layout_settings().keys() and is_valid(replace(plan, **settings)):
        console.print_line(f"layout:  {typed(settings)}, recorded in {path}")
        return settings
    hw = hardware_of(ranks.device, plan.dtype, per_node)
    predictions = ranked(plan, hw, per_node)
    best, *others = best_of_layouts(predictions)
    check_fits(best)
    console.print_line(
        f"layout:  {typed(best.settings)}, the fastest of {1 + len(others)} by prediction: "
        f"{best.total_s * 1e3:,.1f} ms per step, {best.gb:.1f} GB"
    )
    for other in others[:2]:
        console.print_line(f"         {typed(other.settings)}: {reason(other, best)}")
    record(path, job, best.settings)
    return best.settings
