"""What bench.py launches or predicts: a model and a batch, as settings of train.py."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from isogpt.data.data_folder import prepared_datasets
from isogpt.data.dataset import GPT2_VOCAB, open_dataset
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.counts import count_on_meta
from isogpt.nn.huggingface import GPT2
from isogpt.options.values import Setting
from isogpt.parallel.mesh import make_mesh
from isogpt.parallel.plan import LAYOUT, Plan, normalized, plan_of
from isogpt.parallel.shares import parse_shares, share_of_plan
from isogpt.speed.launches import FIXED
from isogpt.speed.memory import largest_micro_batch
from isogpt.training import precision
from isogpt.training.degrees import check_degrees
from isogpt.training.settings import check_layout, model_args_of

SMALL = dict(dataset="shakespeare_char", n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8)
SMALL_VOCAB = 65
CHOOSES_MODEL = {"n_layer", "n_head", "n_embd", "block_size", "batch_size", "init_from"}


def described_for_bench(settings: dict[str, Setting]) -> dict[str, Setting]:
    """Return train.py's settings with the defaults and descriptions that --help of bench.py shows."""
    changes = {name: {"default": value, "section": "set by bench.py"} for name, value in FIXED.items()}
    for name, value in SMALL.items():
        changes[name] = {"meaning": f"{settings[name].meaning} (small model: {value})"}
    meaning = "micro-batches per step (0: one per process)"
    changes["gradient_accumulation_steps"] = {"range": ">= 0", "default": 0, "meaning": meaning}
    return settings | {name: replace(settings[name], **change) for name, change in changes.items()}


@dataclass(frozen=True)
class Workload:
    """
    What is trained.

    Args:
        config: bench.py's settings, and those of train.py's that the user's arguments set.
        typed: all of train.py's, as these arguments set them.
        settings: the same, with what bench.py sets. gradient_accumulation_steps 0: one micro-batch per
            process.
        chosen: settings that bench.py chooses, without which train.py would train a different model.
        device: of this machine.
        processes: how many are launched.
        is_random: whether the tokens are random.
        model_class: GPT, from the model.py that train.py trains.
    """

    config: dict
    typed: dict
    settings: dict
    chosen: dict
    device: torch.device
    processes: int
    is_random: bool
    model_class: Callable[[GPTConfig], nn.Module]

    def micro_batches(self, n: int) -> int:
        """
        The gradient_accumulation_steps of n processes: what the user has set, times n if the scaling is weak;
        n if the user has set nothing.
        """
        chosen = self.settings["gradient_accumulation_steps"]
        return chosen * n if chosen and self.config["weak"] else chosen or n

    def without_weights(self) -> dict:
        """
        Return the settings of a model that starts from scratch, with the shape of the weights that init_from
        names, such as gpt2-xl.

        Raises:
            ValueError: init_from is a folder or a file.
        """
        start = self.settings["init_from"].removeprefix("auto:")
        if start in ("scratch", "auto", "resume"):
            return self.settings
        if start not in GPT2:
            raise ValueError(
                f"init_from is {self.settings['init_from']!r}: a plan and an estimate know only the "
                f"shapes of {', '.join(GPT2)}. For a different model, set --init_from=scratch, --n_layer, "
                "--n_head and --n_embd"
            )
        shape = GPT2[start] | {"arch": "gpt2", "bias": True, "vocab_size": 50257}
        return self.settings | shape | {"init_from": "scratch"}

    def model_args(self) -> dict:
        """
        Return the fields of the model's GPTConfig.

        Raises:
            ValueError: the data set, from which the vocabulary's size is read, is not prepared.
        """
        settings = self.without_weights()
        return asdict(GPTConfig(**model_args_of(settings, vocab_size_of(settings))))

    def plan(self, world_size: int, card: str, machines: int = 1) -> Plan:
        """
        Return the plan that the settings describe for this many processes, on devices of a kind.

        Args:
            machines: the number of islands if the setting islands is 0.

        Raises:
            ValueError: the settings do not fit the devices, or the data set, from which the vocabulary's size
                is read, is not prepared.
        """
        settings, device_type = self.without_weights(), self.device.type
        settings = settings | {"gradient_accumulation_steps": self.micro_batches(world_size)}
        dtype = settings["dtype"]
        if card in ("this", "cpu"):
            dtype = precision.resolve_dtype(dtype, self.device)
        elif dtype in ("auto", "bfloat16", "float16"):
            device_type, dtype = "cuda", dtype.replace("auto", "bfloat16")
        else:
            raise ValueError(f"dtype is {dtype!r}: for {card}, set --dtype=bfloat16 or float16")
        precision.check_residual_dtype(settings["residual_dtype"], dtype)
        plan = plan_of(
            settings,
            settings["islands"] or machines,
            world_size=world_size,
            device_type=device_type,
            dtype=dtype,
            kept=[name for name in LAYOUT if name in self.config],
            model_args=self.model_args(),
        )
        plan = replace(plan, counts=count_on_meta(self.model_class, plan.model_args))
        check_layout(plan)
        check_degrees(plan)
        mesh = make_mesh(0, plan)
        share = share_of_plan(plan, mesh, parse_shares(plan.shares, mesh.data_size))
        return replace(plan, micro_batch=max(share.rows_of))

    def command(self, layout: dict, n: int, per_node: int, arguments: Iterable[str]) -> str:
        """
        Return the command that trains with a layout on n devices.

        Args:
            layout: settings that a plan chooses.
            arguments: bench.py's, of which the command repeats those for train.py.
        """
        wanted = self.chosen | layout
        changed = {name: value for name, value in wanted.items() if value != self.typed[name]}
        repeated = self.typed.keys() - changed.keys() - {"nproc", "profile", "layout"}
        words = [word for word in arguments if word[:2] != "--" or word[2:].split("=")[0] in repeated]
        words += [f"--{name}={value}" for name, value in changed.items()]
        program = f"torchrun --standalone --nproc_per_node={n}" if n > 1 else "python"
        if n > per_node:
            nodes = f"--nnodes={n // per_node} --node_rank=RANK"
            program = f"torchrun {nodes} --nproc_per_node={per_node} --master_addr=HOST"
        return f"{program} train.py {shlex.join(words)}"


def vocab_size_of(settings: dict) -> int:
    """
    The number of token ids: as it is set, or of the data set.

    Raises:
        ValueError: it is not set, and the data set is not prepared.
    """
    try:
        return settings["vocab_size"] or open_dataset(settings["dataset"], settings["block_size"]).vocab_size
    except ValueError as e:
        hint = f"; to predict without the data, set --vocab_size={GPT2_VOCAB} for GPT-2's tokens"
        raise ValueError(f"{e}{hint}") from e


def choose_workload(
    config: dict,
    defaults: dict[str, Setting],
    device: torch.device,
    processes: int,
    cards: list[str],
    model_class: Callable[[GPTConfig], nn.Module],
) -> Workload:
    """
    Return the workload that the settings describe. If they choose no model, a GPU trains GPT-2 124M, with the
    micro-batch that fills its memory, and other devices a small model.

    Args:
        config: bench.py's settings, and those of train.py's that were set.
        defaults: train.py's settings, see `described_for_bench`.
        cards: kinds of devices to plan for.
        model_class: GPT, from the model.py that train.py trains.
    """
    chooses_nothing = CHOOSES_MODEL.isdisjoint(config)
    is_small = chooses_nothing and device.type != "cuda" and {*cards} <= {"this", "cpu"}
    typed = normalized({name: config.get(name, setting.default) for name, setting in defaults.items()})
    chosen = SMALL | {"dataset": config.get("dataset", SMALL["dataset"])} if is_small else {}
    settings = typed | chosen | {"nproc": processes}
    if config["plan"] or config["tune"]:
        settings["layout"] = "manual"
    is_prepared = "dataset" in config or settings["dataset"] in prepared_datasets()
    is_random = not (config["real_data"] and is_prepared)
    if is_random and not settings["vocab_size"]:
        settings["vocab_size"] = SMALL_VOCAB if is_small else GPT2_VOCAB
    workload = Workload(config, typed, settings, chosen, device, processes, is_random, model_class)
    if chooses_nothing and device.type == "cuda":
        plan = workload.plan(processes, cards[0])
        settings["batch_size"] = largest_micro_batch(plan, torch.cuda.mem_get_info(device)[1] / 1e9)
    return workload
