"""
The planner: decide what the settings of a training run leave open, once, at the start. The result is a
parallel.plan.Plan; layouts.py ranks the layouts among which --layout=auto chooses.
"""

from dataclasses import asdict, replace
from pathlib import Path

from isogpt.checkpoint.start import Start
from isogpt.common.files import recorded
from isogpt.data.dataset import Dataset
from isogpt.launch.process_group import Ranks, island_count
from isogpt.launch.together import broadcast, exit_together, gather_objects
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.mesh import make_mesh
from isogpt.parallel.plan import Plan, plan_of
from isogpt.parallel.shares import parse_shares
from isogpt.speed import layouts
from isogpt.training import precision
from isogpt.training.degrees import check_degrees
from isogpt.training.settings import fit_model_args

MICRO_BATCH = "micro_batch.json"  # the micro-batch size to use after running out of memory


def make_plan(config: dict, ranks: Ranks, data: Dataset, start: Start) -> Plan:
    """
    Decide what train.py's settings leave open: the number of islands, the model's shape, the dtype to compute
    in, the layout and the micro-batch (all ranks). Exits with a message if the settings do not fit the ranks,
    the data or the model.
    """
    with exit_together():
        plan = plan_of(
            config,
            config["islands"] or island_count(ranks),
            world_size=ranks.world_size,
            device_type=ranks.device.type,
            dtype=precision.resolve_dtype(
                config["dtype"], ranks.device, previous=start.resumed.dtype if start.resumed else None
            ),
        )
        args = fit_model_args(start.model_args(config, data.vocab_size), config, data, start.is_resume)
        plan = replace(plan, model_args=asdict(GPTConfig(**args)))
        check_degrees(plan)
        parse_shares(plan.shares, make_mesh(0, plan).data_size)
    plan = replace(plan, dtype=precision.common_dtype(gather_objects(plan.dtype)))
    if config["layout"] == "auto":
        plan = with_best_layout(plan, ranks, config["out_dir"])
    if plan.exact:  # a smaller micro-batch would give other bits
        return plan
    rows = gather_objects(micro_batch_of(config["out_dir"], plan.job(), plan.batch_size))
    return replace(plan, micro_batch=min(rows))


def with_best_layout(plan: Plan, ranks: Ranks, out_dir: str) -> Plan:
    """The plan with the fastest layout (all ranks; rank 0 chooses). Exits with a message if none fits."""
    settings = {}
    with exit_together():
        if ranks.is_main:
            settings = layouts.choose(plan, ranks, out_dir)
    return replace(plan, **broadcast(settings))


def micro_batch_of(out_dir: str, job: dict, batch_size: int) -> int:
    """
    Return the micro-batch size to use: batch_size, or a smaller size that an attempt at the same job (see
    Plan.job) recorded when it ran out of memory. The global batch and thus the loss curve stay the same. The
    rank that ran out of memory may be on a different machine: all ranks look, and the smallest size is used.
    """
    rows = recorded(Path(out_dir) / MICRO_BATCH, job)
    return min(batch_size, rows) if isinstance(rows, int) else batch_size
