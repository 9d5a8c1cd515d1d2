"""What bench.py launches or predicts: a model and a batch, as settings of train.py."""

import shlex
from collections.abc import Iterable
from dataclasses import asdict, replace

import torch
from torch import nn

from isogpt.data.data_folder import prepared_datasets
from isogpt.data.dataset import GPT2_VOCAB, open_dataset
from isogpt.lab.combinations import typed, without
from isogpt.nn.architecture import GPT2
from isogpt.nn.counts import count_on_meta
from isogpt.options.values import Setting, without_credentials
from isogpt.parallel.mesh import make_mesh
from isogpt.parallel.plan import LAYOUT, Plan, normalized, plan_of
from isogpt.parallel.shares import parse_shares, share_of_plan
from isogpt.speed.launches import FIXED
from isogpt.speed.memory import largest_micro_batch
from isogpt.training import precision
from isogpt.training.settings import check_plan, model_args_of

SMALL = dict(dataset="shakespeare_char", n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8)
SMALL_VOCAB = 65
WITHOUT_BFLOAT16 = ("t4", "v100", "v100-pcie")
CHOOSES_MODEL = {"n_layer", "n_head", "n_embd", "block_size", "batch_size", "init_from"}


def described_for_bench(settings: dict[str, Setting]) -> dict[str, Setting]:
    """Return train.py's settings as --help of bench.py shows them."""
    settings = dict(settings)
    for name, value in FIXED.items():
        settings[name] = replace(settings[name], default=value, section="set by bench.py")
    name, meaning = "gradient_accumulation_steps", "micro-batches of a step (0: one per process)"
    settings[name] = replace(settings[name], default=0, range=">= 0", meaning=meaning)
    return settings


class Workload:
    """
    What is trained. If the settings choose no model, a GPU trains GPT-2 124M, with the micro-batch that fills
    its memory, and other devices a small model.

    Args:
        config: bench.py's settings, with nproc as many as are launched, and those of train.py's that are set.
        defaults: train.py's settings, see `described_for_bench`.
        device: of this machine.
        cards: kinds of devices to plan for.
        gpt: the class GPT, from the model.py that train.py trains.
    """

    def __init__(
        self, config: dict, defaults: dict, device: torch.device, cards: list[str], gpt: type[nn.Module]
    ) -> None:
        self.config = config
        self.device = device
        self.gpt = gpt
        self.processes = config["nproc"]
        fills_gpu = is_small = False
        if CHOOSES_MODEL.isdisjoint(config):
            fills_gpu = device.type == "cuda"
            is_small = not fills_gpu and {*cards} <= {"this", "cpu"}
        # all of train.py's settings, as the user's arguments set them
        self.typed = normalized({name: config.get(name, one.default) for name, one in defaults.items()})
        # what bench.py chooses, without which train.py would train a different model
        self.chosen = {}
        if is_small:
            self.chosen = {name: SMALL[name] for name in SMALL if name not in config}
        # gradient_accumulation_steps 0: one micro-batch per process
        self.settings = settings = self.typed | self.chosen
        if shape := GPT2.get(settings["init_from"].removeprefix("auto:")):  # as fast from scratch
            settings |= dict(init_from="scratch", arch="gpt2", bias=True, vocab_size=50257)
            settings |= shape
        if config["plan"] or config["tune"]:
            settings["layout"] = "manual"
        is_prepared = "dataset" in config or settings["dataset"] in prepared_datasets()
        self.is_random = not (config["real_data"] and is_prepared)
        if self.is_random and not settings["vocab_size"]:
            settings["vocab_size"] = SMALL_VOCAB if is_small else GPT2_VOCAB
        if fills_gpu:
            gb = torch.cuda.mem_get_info(device)[1] / 1e9
            plan = self.plan(self.processes, cards[0])
            settings["batch_size"] = largest_micro_batch(plan, gb)

    def batch_of(self, n: int) -> dict[str, int]:
        """
        The setting gradient_accumulation_steps of n processes: what the user has set, times n if the scaling
        is weak; n if the user has set nothing.
        """
        name = "gradient_accumulation_steps"
        steps = self.settings[name]
        if not steps:
            steps = n
        elif self.config["weak"]:
            steps *= n
        return {name: steps}

    def model_args(self) -> dict:
        """
        Return the fields of the model's GPTConfig.

        Raises:
            ValueError: init_from is a folder or a file, or the data set, from which the vocabulary's size is
                read, is not prepared.
        """
        init_from = self.settings["init_from"]
        if init_from not in ("scratch", "auto", "resume"):
            known = f"a plan and an estimate know only {', '.join(GPT2)}"
            raise ValueError(f"init_from is {init_from!r}: {known}: set --init_from=scratch and a shape")
        args = model_args_of(self.settings, vocab_size_of(self.settings))
        return asdict(self.gpt.config_class(**args))

    def plan(self, world_size: int, card: str, machines: int = 1) -> Plan:
        """
        Return the plan that the settings describe for this many processes, on devices of a kind.

        Args:
            machines: the number of islands if the setting islands is 0.

        Raises:
            ValueError: the settings do not fit the devices, or the data set, from which the vocabulary's size
                is read, is not prepared.
        """
        settings = self.settings | self.batch_of(world_size)
        device_type, dtype = self.device.type, settings["dtype"]
        if card in ("this", "cpu"):
            dtype = precision.resolve_dtype(dtype, self.device)
        elif dtype in ("auto", "bfloat16", "float16"):
            best = "float16" if card in WITHOUT_BFLOAT16 else "bfloat16"
            device_type, dtype = "cuda", dtype.replace("auto", best)
        else:
            raise ValueError(f"dtype is {dtype!r}: for {card}, set --dtype=bfloat16 or float16")
        args = self.model_args()
        plan = plan_of(
            settings,
            settings["islands"] or machines,
            world_size=world_size,
            device_type=device_type,
            dtype=dtype,
            fixed=[name for name in LAYOUT if name in self.config],
            model_args=args,
            counts=count_on_meta(self.gpt, args),
        )
        check_plan(plan)
        mesh = make_mesh(0, plan)
        share = share_of_plan(plan, mesh, parse_shares(plan.shares, mesh.data_size))
        return replace(plan, micro_batch=max(share.rows_of))

    def command(self, plan: Plan, arguments: Iterable[str]) -> str:
        """
        Return the command that trains with a plan.

        Args:
            arguments: bench.py's, of which the command repeats those for train.py, but no secrets.
        """
        n, per_node = plan.world_size, self.config["per_node"]
        wanted = self.chosen | plan.layout_settings()
        changed = {name: value for name, value in wanted.items() if value != self.typed[name]}
        own = self.config.keys() - self.typed.keys()
        others = ("nproc", "profile", "layout", "dry_run_ranks", "alert_command", "mirror")
        words = map(without_credentials, without(arguments, {*own, *changed, *others}))
        program = "python"
        if n > per_node:
            nodes = f"--nnodes={n // per_node} --node_rank=RANK"
            program = f"torchrun {nodes} --nproc_per_node={per_node} --master_addr=HOST"
        elif n > 1:
            program = f"torchrun --standalone --nproc_per_node={n}"
        return f"{program} train.py {shlex.join([*words, *typed(changed)])}"


def vocab_size_of(settings: dict) -> int:
    """
    The number of token ids: as it is set, or of the data set.

    Raises:
        ValueError: it is not set, and the data set is not prepared.
    """
    try:
        return settings["vocab_size"] or open_dataset(settings["dataset"], settings["block_size"]).vocab_size
    except ValueError as e:
        raise ValueError(f"{e}; without it, set --vocab_size={GPT2_VOCAB} for GPT-2's tokens") from e
