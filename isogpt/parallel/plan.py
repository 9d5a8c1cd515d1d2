"""
The plan of a run: a record in which nothing is left open. speed/planner.py makes it before anything is built.
"""

from dataclasses import asdict, dataclass, field, fields

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
    How a step is divided and what it computes; by default, nothing is divided. Fields that are settings of
    train.py use the same names, but leave nothing open: `zero` is 3 with fsdp, `islands` is a number, and
    `dtype` is the dtype to compute in.
    """

    # ranks
    world_size: int = 1
    device_type: str = "cpu"
    dtype: str = "float32"
    # model
    model_args: dict = field(default_factory=dict)  # fields of GPTConfig; {}: the model is not known
    counts: ModelCounts | None = None  # of the model's parameters; None: not known
    # step; 0: it takes none
    batch_size: int = 0
    gradient_accumulation_steps: int = 0
    micro_batch: int = 0  # most sequences in a micro-batch: batch_size, or fewer where memory is short
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
    activation_checkpointing: str = "none"
    compile: bool = False
    cuda_graphs: bool = False
    exact: bool = False
    # settings that a planner must not change, although they have their default
    fixed: list[str] = field(default_factory=list)

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
    def replica_compression(self) -> str:
        """How replicas compress gradients; with islands, only the islands compress what they send."""
        return self.grad_compression if self.islands == 1 else "none"

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
        facts = {name: value for name, value in asdict(self).items() if name not in without_effect}
        return facts | {"counts": repr(self.counts)}


# a single process, which divides nothing and takes no steps
UNDIVIDED = Plan()


def normalized(config: dict) -> dict:
    """
    Return the settings of train.py with `zero` instead of `fsdp`, which is short for zero=3.

    Raises:
        ValueError: both are set.
    """
    if not config["fsdp"]:
        return config
    if config["zero"] not in (0, 3):
        raise ValueError(f"fsdp is short for zero=3, but zero is {config['zero']}: set --fsdp=False")
    return config | {"zero": 3, "fsdp": False}


def plan_of(config: dict, islands: int, **decided: object) -> Plan:
    """
    Return the plan for train.py's settings.

    Args:
        islands: the number of islands. A single island takes no outer steps.
        decided: fields of Plan that are not settings, or that the settings leave open.
    """
    config = normalized(config)
    settings = {field.name: config[field.name] for field in fields(Plan) if field.name in config}
    settings |= {"micro_batch": config["batch_size"], "islands": islands}
    if islands == 1:
        settings["local_steps"] = 1
    return Plan(**settings | decided)
