"""
Which settings fit each other, the ranks and the model, and which shape of a model they describe. The range of
a single setting is given in its line of the script, see options/values.py.

A conflict is a sentence that says what was found and what to type.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import fields
from math import ceil, gcd, prod
from pathlib import Path
from types import SimpleNamespace

import torch

from isogpt.common.console import count_text
from isogpt.common.torch_versions import SENDS_TO_ITSELF
from isogpt.data.dataset import Dataset
from isogpt.nn.architecture import OF_THE_RUN, GPTConfig, problems_of_shape
from isogpt.nn.huggingface import GPT2
from isogpt.options.values import is_url, without_credentials
from isogpt.parallel.mesh import AXES, make_mesh, splits_backward, stages_per_rank
from isogpt.parallel.plan import Plan, normalized, plan_of
from isogpt.parallel.shares import parse_shares
from isogpt.parallel.slow_network import keeps_errors
from isogpt.training import optim
from isogpt.training.optimizer_class import has_modes

Settings = SimpleNamespace  # all settings of train.py
# {setting: a regular expression of its values, and how they are described}
FORMS = {
    "activation_checkpointing": (
        r"none|full|selective|every:0*[1-9]\d*",
        "none, full, selective and every:K (K >= 1)",
    ),
    "grad_compression": (
        r"none|fp16|bf16|int8|powersgd:0*[1-9]\d*|topk:0?\.\d*[1-9]\d*",
        "none, fp16, bf16, int8, powersgd:RANK such as powersgd:4, and topk:FRACTION such as topk:0.01",
    ),
    "dry_run_ranks": (r"|(\d+/)?\d+", "a number of ranks such as 8, and 3/8 for rank 3 of these"),
    "max_tokens": (
        r"|(?=[\d.]*[1-9])(\d+\.?\d*|\.\d+)(e\+?\d\d?)? ?(epochs)?",
        "a number of tokens such as 3e9, or of epochs such as 2epochs",
    ),
}
# {setting: values with which a run can be exact}
EXACT = {
    "layout": ["manual"],
    "tp": [1],
    "cp": [1],
    "ep": [1],
    "islands": [1],
    "shares": ["equal"],
    "grad_compression": ["none"],
    "grad_sync": ["auto"],
    "cuda_graphs": [False],
    "cpu_offload": [False],
}
EXACT_PIPELINE = EXACT | {"pp_schedule": ["1f1b", "gpipe", "interleaved"], "dropout": [0.0]}


def check_training(config: dict) -> dict:
    """
    Check that train.py's settings fit each other. Returns them in their normal form, see plan.normalized.

    Raises:
        ValueError: one line for each conflict.
    """
    config = normalized(config)
    c = Settings(**config)
    report([*conflicts_of_values(c), *problems_of_shape(model_fields(config))])
    # the number of processes and the model are not known yet
    plan = plan_of(config, c.islands, world_size=0)
    report([*conflicts_of_start(c), *conflicts_of_model(c), *conflicts_of_updates(c), *conflicts(plan)])
    return config


def check_plan(plan: Plan, splits_sequence: bool = True) -> None:
    """
    Check that a plan's settings fit each other, its ranks, and its model if that is known.

    Args:
        splits_sequence: whether cp and tp divide sequences of block_size tokens, as they do in training.

    Raises:
        ValueError: one line for each conflict.
    """
    report([*conflicts(plan, splits_sequence)])


def report(sentences: list[str]) -> None:
    """Raise ValueError with all sentences, one on each line, if there are any."""
    if sentences:
        raise ValueError("\n".join(sentences))


def without_secrets(config: dict) -> dict:
    """
    The settings that checkpoints and logs record: not alert_command, which often contains a token, and URLs
    without credentials.
    """
    urls = {name: without_credentials(config[name]) for name in ("init_from", "mirror")}
    return {name: value for name, value in (config | urls).items() if name != "alert_command"}


# ------------------------------------------------------------------------------------------------------------
# conflicts between the settings of a run


def conflicts_of_values(c: Settings) -> Iterator[str]:
    """Values that are neither a number nor one of a few words."""
    for name, (form, described) in FORMS.items():
        value = getattr(c, name)
        if not re.fullmatch(form, value):
            yield f"{name} is {value!r}; choose from {described}"


def conflicts_of_start(c: Settings) -> Iterator[str]:
    """The run's folder, the weights that a run starts from, and dry runs."""
    name = c.init_from.removeprefix("auto:")
    is_word = re.fullmatch(r"scratch|auto|resume(:\d+)?", name) or name in GPT2
    if not is_word and not is_url(name) and not os.path.exists(name):
        yield (
            f"init_from is {c.init_from!r}; choose from scratch, resume, resume:STEP, auto, "
            "gpt2[-medium|-large|-xl], a folder of a run or of transformers, a ckpt.pt, and a mirror's URL"
        )
    if not c.out_dir.strip():
        yield "out_dir is empty: set --out_dir= to a folder"
    path = Path(c.mirror.removeprefix("file://")).resolve()
    if c.mirror and not is_url(c.mirror):
        yield f"mirror is {c.mirror!r}, not a URL: set --mirror=s3://bucket/run or file:///mnt/disk/run"
    elif c.mirror.startswith("file://") and path.is_relative_to(Path(c.out_dir).resolve()):
        yield f"mirror is in out_dir {c.out_dir} and would be lost with it: set a URL of a different folder"
    if c.mirror and not c.save_checkpoint:
        yield "mirror copies what save_checkpoint writes: set --mirror="
    if c.grad_sync == "never" and c.save_checkpoint:
        yield "grad_sync 'never' lets the ranks' weights drift apart: set --save_checkpoint=False"
    if not c.dry_run_ranks:
        return
    rank, ranks = (int(n) for n in f"0/{c.dry_run_ranks}".split("/")[-2:])
    if ranks < 2 or ranks <= rank:
        yield f"dry_run_ranks is {c.dry_run_ranks}: set --dry_run_ranks={rank}/{max(2, rank + 1)} or the like"
    if "RANK" in os.environ:
        yield "a dry run is one process: start train.py without a launcher"
    if name not in ("scratch", "auto"):
        yield "a dry run reads no weights: set --init_from=scratch, --n_layer, --n_head and --n_embd"
    if c.shares == "auto":
        yield "shares 'auto' measures all ranks, but a dry run has only one: set --shares=equal"


def conflicts_of_model(c: Settings) -> Iterator[str]:
    """What an architecture cannot contain, and experts."""
    if c.arch == "gpt2" and 0 < c.n_kv_head < c.n_head and c.n_head % c.n_kv_head == 0:
        yield "arch 'gpt2' uses as many n_kv_head as n_head: set --n_kv_head=0, or --arch=llama or nanochat"
    if c.arch == "gpt2" and c.head == "untied":
        yield "arch 'gpt2' uses a tied head: set --head=auto, or --arch=llama or nanochat"
    if c.arch != "gpt2" and c.bias:
        yield f"arch {c.arch!r} uses no biases: set --bias=False"
    if c.n_expert > 1 and c.n_expert_active == 1:
        yield "n_expert_active is 1, with which a router learns nothing: set --n_expert_active=2"


def conflicts_of_updates(c: Settings) -> Iterator[str]:
    """The optimizer, the schedule of the learning rate, islands, and exact."""
    classes = optim.check_optimizer(vars(c))
    if optim.uses_muon(c.optimizer) and c.learning_rate == 0:
        yield f"optimizer {c.optimizer!r} updates embeddings and the head with learning_rate: set it above 0"
    if c.lr_schedule == "wsd" and c.cooldown_iters == 0:
        yield "lr_schedule 'wsd' needs the steps of the decay: set --cooldown_iters="
    if c.islands == 1 and c.local_steps > 1:
        yield "local_steps is for islands: set --islands= to their number, or 0 for one on each machine"
    if c.islands != 1 and any(map(has_modes, classes)):
        yield (
            f"optimizer {c.optimizer!r} evaluates an average of its weights, but islands evaluate their own: "
            "set --islands=1"
        )
    if not c.exact:
        return
    for name, allowed in (EXACT if c.pp == 1 else EXACT_PIPELINE).items():
        value = getattr(c, name)
        if value not in allowed:
            yield f"exact: {name} {value} changes the bits: set --{name}={allowed[0]}, or --exact=False"
    if classes and c.zero >= 1:
        yield f"exact: zero changes the bits of {classes[0].__name__}: set --zero=0, or --exact=False"


# ------------------------------------------------------------------------------------------------------------
# conflicts in a plan


def conflicts(plan: Plan, splits_sequence: bool = True) -> Iterator[str]:
    """A sentence for each conflict of a plan, as far as its ranks and its model are known."""
    yield from conflicts_of_layout(plan)
    if plan.world_size:
        yield from conflicts_with_ranks(plan)
    if plan.model_args:
        yield from conflicts_with_sizes(plan)
        yield from conflicts_with_stages(plan)
    if plan.model_args and splits_sequence:
        yield from conflicts_with_sequence(plan)


def conflicts_of_layout(plan: Plan) -> Iterator[str]:
    """How the ways of dividing the work fit each other. Raises ValueError about shares that are no list."""
    parse_shares(plan.shares)
    delays_weights = plan.pp > 1 and splits_backward(plan.pp_schedule)
    if plan.shares != "equal" and plan.pp > 1:
        yield f"the ranks of a pipeline (pp {plan.pp}) need equal shares: set --shares=equal"
    elif plan.shares == "auto" and (plan.zero >= 2 or max(plan.ep, plan.cp, plan.tp) > 1):
        yield (
            "shares 'auto' measures ranks that hold a whole model (zero 0 or 1; tp, cp and ep 1): set a list "
            "such as --shares=2,1, or --shares=equal"
        )
    if plan.activation_checkpointing == "selective" and delays_weights:
        yield (
            f"pp_schedule {plan.pp_schedule!r} makes two backward passes, but activation_checkpointing "
            "'selective' allows one: set --activation_checkpointing=full"
        )
    if plan.cuda_graphs and not plan.compile:
        yield "cuda_graphs needs compile: set --cuda_graphs=False"
    if plan.cuda_graphs and plan.zero >= 2:
        yield f"zero {plan.zero} moves gradients, which cuda_graphs cannot: set --cuda_graphs=False"
    if plan.zero < 2 and (plan.cpu_offload or plan.dp_replicate != 1):
        yield f"cpu_offload and dp_replicate need zero 2 or 3, but zero is {plan.zero}: set --zero=3"
    yield from conflicts_of_compression(plan)


def conflicts_of_compression(plan: Plan) -> Iterator[str]:
    """What replicas or islands send."""
    compression = plan.replica_compression
    if plan.islands != 1 and plan.grad_compression.startswith(("powersgd", "topk")):
        yield (
            f"islands send none, fp16, bf16 or int8, not {plan.grad_compression}: set --grad_compression=int8"
        )
    if compression != "none" and plan.zero >= 2 and plan.dp_replicate == 1:
        yield (
            f"grad_compression is for replicas, which zero {plan.zero} uses only with dp_replicate: set "
            "--dp_replicate= to their number, or --grad_compression=none"
        )
    if compression != "none" and plan.zero < 2 and plan.grad_sync == "every":
        yield "grad_sync 'every' would compress what has been compressed already: set --grad_sync=last"
    if keeps_errors(compression) and plan.dtype == "float16":
        yield (
            f"grad_compression {compression!r} adds up errors of several steps, whose scale dtype 'float16' "
            "changes: set --dtype=bfloat16 or float32, or --grad_compression=fp16"
        )


def conflicts_with_ranks(plan: Plan) -> Iterator[str]:
    """Whether the degrees of parallelism divide the ranks. Raises ValueError about shares of other ranks."""
    degrees = {axis: getattr(plan, axis) for axis in AXES if axis != "dp_shard"}
    degrees = {axis: degree for axis, degree in degrees.items() if degree > 1}
    product = prod(degrees.values())
    if plan.world_size % product:
        text = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        text += f" = {product}" if len(degrees) > 1 else ""
        counts = multiples_around(plan.world_size, product)
        started = count_text(plan.world_size, "process", "processes")
        yield f"{started} cannot be divided into {text}: start {counts} processes, or lower a degree"
    else:
        parse_shares(plan.shares, make_mesh(0, plan).data_size)
    if plan.islands > 1 and 0 < plan.sequences < plan.islands:
        yield (
            f"islands is {plan.islands}, but a step reads only {count_text(plan.sequences, 'sequence')}: set "
            f"--gradient_accumulation_steps={ceil(plan.islands / plan.batch_size)}"
        )
    if plan.cuda_graphs and plan.world_size > 1:
        yield f"cuda_graphs is for one process, but there are {plan.world_size}: set --cuda_graphs=False"


def conflicts_with_sizes(plan: Plan) -> Iterator[str]:
    """Whether tp divides heads and ep experts, and each rank of tp gets a part of each matrix."""
    args, tp, ep = plan.model_args, plan.tp, plan.ep
    heads = "n_kv_head" if 0 < args["n_kv_head"] < args["n_head"] else "n_head"
    for name, divided in (("tp", heads), ("ep", "n_expert")):
        degree, size = getattr(plan, name), args.get(divided, 0)
        if size % degree:
            yield f"{name} is {degree}: it must divide {divided}, {size}: set --{name}={gcd(size, degree)}"
    if ep > 1 and not args.get("n_expert"):
        yield f"ep is {ep}, but the model contains no experts: set --ep=1, or --n_expert={ceil(8 / ep) * ep}"
    if plan.cuda_graphs and args.get("n_expert"):
        yield "cuda_graphs is for models without experts: set --cuda_graphs=False"
    for name in ("vocab_size", "n_hidden"):
        size = args.get(name)
        if size and (tp - 1) * ceil(size / tp) >= size:
            yield f"tp is {tp}, which is too many ranks for {name} {size}: set --tp={max(1, tp // 2)}"


def conflicts_with_stages(plan: Plan) -> Iterator[str]:
    """Each pipeline stage contains a block or more. With exact, some models cannot be divided into stages."""
    args, pp = plan.model_args, plan.pp
    layers, per_rank = args["n_layer"], stages_per_rank(plan.pp_schedule)
    if layers < pp * per_rank:
        schedule = " or --pp_schedule=1f1b" if layers >= pp else ""
        yield (
            f"pp_schedule {plan.pp_schedule!r} makes {pp * per_rank} stages with pp {pp}, but n_layer is "
            f"{layers}: set --pp={max(1, layers // per_rank)}{schedule}"
        )
    if pp > 1 and plan.pp_schedule == "zbv" and plan.device_type == "cpu" and not SENDS_TO_ITSELF:
        yield f"torch {torch.__version__} cannot run pp_schedule zbv on CPUs: set --pp_schedule=zero_bubble"
    if plan.exact and pp > 1:
        causes = {"a tied head": args["tied"], "experts": args["n_expert"], "zero 2 or 3": plan.zero >= 2}
        for cause in filter(causes.get, causes):
            yield f"exact: {cause} changes the bits in a pipeline: set --pp=1, or --exact=False"


def conflicts_with_sequence(plan: Plan) -> Iterator[str]:
    """Ranks of cp and tp groups hold equal parts of a sequence."""
    length, cp, tp = plan.model_args["block_size"], plan.cp, plan.tp
    parts = tp * (2 * cp if cp > 1 else 1)
    if length % parts:
        factors = f"2 x cp x tp, {parts}" if cp > 1 else f"tp, {tp}"
        lengths = multiples_around(length, parts)
        yield f"block_size is {length}: it must be a multiple of {factors}: set --block_size={lengths}"


def multiples_around(n: int, factor: int) -> str:
    """The multiples of `factor` below and above n, as they are typed."""
    below = n // factor * factor
    return " or ".join(str(multiple) for multiple in (below, below + factor) if multiple)


# ------------------------------------------------------------------------------------------------------------
# the model's shape


def model_fields(config: dict) -> dict:
    """The settings that are fields of GPTConfig, except for vocab_size, where 0 stands for the data set's."""
    names = [field.name for field in fields(GPTConfig) if field.name != "vocab_size"]
    return {name: config[name] for name in names if name in config}


def model_args_of(config: dict, vocab_size: int) -> dict:
    """The fields of GPTConfig for a model that starts from scratch with these settings."""
    tied = {"auto": None, "tied": True, "untied": False}[config["head"]]
    return model_fields(config) | {"vocab_size": vocab_size, "tied": tied}


def settings_of_model(model_args: dict, config: dict) -> dict:
    """
    Return the settings for a new model of this shape, from fields of GPTConfig or nanoGPT: the inverse of
    model_args_of.
    """
    names = {*model_fields(config), "vocab_size"} - {*OF_THE_RUN}
    shape = {name: value for name, value in model_args.items() if name in names}
    return {"arch": "gpt2", "head": "tied" if model_args.get("tied", True) else "untied"} | shape


def fit_model_args(model_args: dict, config: dict, data: Dataset, is_resume: bool) -> dict:
    """
    Return the fields of GPTConfig for this run, from the fields of a checkpoint, a pretrained model or a new
    model. The fields OF_THE_RUN come from the run's settings. With n_expert, a dense model that the run does
    not resume is upcycled: each expert starts as a copy of the MLP (Komatsuzaki et al. 2022,
    arXiv:2212.05055).

    Raises:
        ValueError: the model's context is shorter than block_size, the data set contains token ids beyond the
            model's, or the number of experts differs.
    """
    length, vocab_size = model_args["block_size"], model_args["vocab_size"]
    if config["block_size"] > length:
        raise ValueError(
            f"block_size {config['block_size']} exceeds the checkpoint's context length, {length}: set "
            f"--block_size={length} or less"
        )
    if data.highest >= vocab_size:
        raise ValueError(
            f"{data.folder} contains token id {data.highest}, but the checkpoint's vocabulary size is "
            f"{vocab_size}: its model was trained on a different data set"
        )
    fitted = {"n_kv_head": 0, "n_expert": 0} | model_args | {name: config[name] for name in OF_THE_RUN}
    experts = fitted["n_expert"]
    if config["n_expert"] in (0, experts):
        return fitted
    if not experts and not is_resume:
        return fitted | {name: config[name] for name in ("n_expert", "n_expert_active")}
    advice = f"set --n_expert={experts}"
    if not experts:
        advice = (
            "to start a new run in which each expert is a copy of the MLP, set "
            f"--init_from={config['out_dir']} and a different --out_dir"
        )
    raise ValueError(f"n_expert is {config['n_expert']}, but the checkpoint's is {experts}: {advice}")
