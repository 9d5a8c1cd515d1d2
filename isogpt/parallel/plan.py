"""
The plan of a run: a record in which nothing is left open. speed/planner.py decides it, before anything is
built.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

# tf32 is stored as float32 and multiplied by tensor cores with a 10-bit mantissa
DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# the settings that a planner may choose: see isogpt/speed/layouts.py
LAYOUT = ("zero", "dp_replicate", "tp", "pp", "pp_schedule", "cp", "ep", "activation_checkpointing")


@dataclass(frozen=True)
class Plan:
    """
    How a step is divided and what it computes. Fields that are settings of train.py use the same names and
    defaults, but nothing is left open: `zero` is 3 with fsdp, `islands` is a number, and `dtype` is the dtype
    to compute in.
    """

    # ranks
    world_size: int = 1
    device_type: str = "cpu"
    dtype: str = "float32"
    # model
    model_args: dict = field(default_factory=dict)  # fields of GPTConfig; {}: the model is not known
    # step
    batch_size: int = 12
    gradient_accumulation_steps: int = 40
    micro_batch: int = 12  # most sequences in a micro-batch: batch_size, or fewer where memory is short
    optimizer: str = "adamw"
    # division
    zero: int = 0
    dp_replicate: int = 1
    tp: int = 1
    pp: int = 1
    pp_schedule: str = "1f1b"
    cp: int = 1
    shares: str = "equal"
    ep: int = 1
    grad_sync: str = "auto"
    cpu_offload: bool = False
    grad_compression: str = "none"
    islands: int = 1
    local_steps: int = 1
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_compression: str = "none"
    outer_parts: int = 1
    ddp_bucket_mb: float = 25.0
    fsdp_prefetch: int = 1
    activation_checkpointing: str = "none"
    compile: bool = True
    cuda_graphs: bool = False
    exact: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """PyTorch's dtype of `dtype`."""
        return DTYPES[self.dtype]

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps

    def layout_settings(self) -> dict:
        """The settings that a planner may choose, and those that divide the step into micro-batches."""
        return {name: getattr(self, name) for name in (*LAYOUT, "batch_size", "gradient_accumulation_steps")}

    def job(self) -> dict:
        """
        What must be equal so that a choice recorded by an earlier attempt applies to this attempt. Such
        choices are the smaller micro-batch after running out of memory, and the layout of --layout=auto.
        """
        without_effect = ("micro_batch", "outer_lr", "outer_momentum")
        found = {name: value for name, value in asdict(self).items() if name not in without_effect}
        coefficients = ("balance_loss", "router_z_loss")
        found["model_args"] = {k: v for k, v in self.model_args.items() if k not in coefficients}
        return found


DEFAULTS = Plan()


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
    values = {f.name: config[f.name] for f in fields(Plan) if f.name in config}
    values |= {"zero": normalized(config)["zero"], "micro_batch": config["batch_size"], "islands": islands}
    if islands == 1:
        values |= {
            name: getattr(DEFAULTS, name) for name in ("local_steps", "outer_parts", "outer_compression")
        }
    return Plan(**values | decided)
