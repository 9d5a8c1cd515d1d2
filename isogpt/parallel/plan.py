"""
The plan of a run: a record in which nothing is left open. speed/planner.py makes it before anything is built.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from isogpt.nn.counts import ModelCounts

# tf32 is stored as float32 and multiplied by tensor cores with a 10-bit mantissa
DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# the settings that a planner may choose: see isogpt/speed/planner.py
LAYOUT = ("zero", "dp_replicate", "tp", "pp", "pp_schedule", "cp", "ep", "activation_checkpointing")


class LayoutError(ValueError):
    """The model and the layout do not fit each other: all ranks raise this, and one of them prints it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """
    How a step is divided and what it computes. Fields that are settings of train.py use the same names, but
    leave nothing open: `zero` is 3 with fsdp, `islands` is a number, and `dtype` is the dtype to compute in.
    """

    # ranks
    world_size: int = 1
    device_type: str = "cpu"
    dtype: str
    # model
    model_args: dict = field(default_factory=dict)  # fields of GPTConfig; {}: the model is not known
    counts: ModelCounts | None = None  # of the model's parameters; None: not known
    # step
    batch_size: int
    gradient_accumulation_steps: int
    micro_batch: int  # most sequences in a micro-batch: batch_size, or fewer where memory is short
    optimizer: str
    # division
    zero: int
    dp_replicate: int
    tp: int
    pp: int
    pp_schedule: str
    cp: int
    shares: str
    ep: int
    grad_sync: str
    cpu_offload: bool
    grad_compression: str
    islands: int
    local_steps: int
    outer_lr: float
    outer_momentum: float
    outer_compression: str
    ddp_bucket_mb: float
    fsdp_prefetch: int
    activation_checkpointing: str
    compile: bool
    cuda_graphs: bool
    exact: bool
    # choice of a layout
    kept: list[str] = field(default_factory=list)  # settings that keep their values even at the defaults

    @property
    def torch_dtype(self) -> torch.dtype:
        """PyTorch's dtype of `dtype`."""
        return DTYPES[self.dtype]

    @property
    def uses_autocast(self) -> bool:
        """
        Whether autocast casts to a dtype of 16 bits. With zero 2 and 3, fully_shard casts instead, unless
        exact is set.
        """
        return self.torch_dtype.itemsize == 2 and (self.zero < 2 or self.exact)

    @property
    def stream_dtype(self) -> torch.dtype:
        """
        The dtype of the residual stream: autocast leaves it in float32, unless residual_dtype is bfloat16;
        fully_shard casts it.
        """
        is_cast = not self.uses_autocast or self.model_args.get("residual_dtype") == self.dtype
        return self.torch_dtype if is_cast else torch.float32

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps

    def layout_settings(self) -> dict:
        """The settings that a planner may choose, and those that divide the step into micro-batches."""
        return {name: getattr(self, name) for name in (*LAYOUT, "batch_size", "gradient_accumulation_steps")}

    def job(self) -> dict:
        """
        What must be equal for a choice that an earlier attempt has recorded to apply to this one. Such
        choices are the smaller micro-batch after running out of memory, and the layout of --layout=auto.
        """
        without_effect = ("micro_batch", "outer_lr", "outer_momentum")
        coefficients = ("balance_loss", "router_z_loss")
        model_args = {name: value for name, value in self.model_args.items() if name not in coefficients}
        settings = {name: value for name, value in asdict(self).items() if name not in without_effect}
        return settings | {"model_args": model_args, "counts": repr(self.counts)}


# a single process that takes no steps: nothing is divided, and what only training reads is None. sample.py
# divides the model of this plan, and a planner keeps the settings that differ from it
UNDIVIDED = Plan(
    **dict.fromkeys(field.name for field in fields(Plan))
    | {
        "world_size": 1,
        "dtype": "float32",
        "model_args": {},
        "kept": [],
        "zero": 0,
        "dp_replicate": 1,
        "tp": 1,
        "pp": 1,
        "pp_schedule": "1f1b",
        "cp": 1,
        "ep": 1,
        "islands": 1,
        "activation_checkpointing": "none",
        "cuda_graphs": False,
        "exact": False,
    }
)


def normalized(config: dict) -> dict:
    """The settings of train.py with `zero` instead of `fsdp`, which is short for zero=3."""
    return config | {"zero": 3, "fsdp": False} if config["fsdp"] else config


def plan_of(config: dict, islands: int, **decided: Any) -> Plan:
    """
    Return the plan for train.py's settings.

    Args:
        islands: the number of islands. A single island takes no outer steps.
        decided: fields of Plan that are not settings, or that the settings leave open.
    """
    values = {field.name: config[field.name] for field in fields(Plan) if field.name in config}
    values |= {"zero": normalized(config)["zero"], "micro_batch": config["batch_size"], "islands": islands}
    if islands == 1:
        values |= {"local_steps": 1, "outer_compression": "none"}
    return Plan(**values | decided)
