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

from isogpt.common.console import count_text
from isogpt.common.torch_versions import SENDS_TO_ITSELF
from isogpt.data.dataset import Dataset
from isogpt.nn.architecture import GPT2, OF_THE_RUN, GPTConfig, problems_of_shape
from isogpt.options.values import is_url, without_credentials
from isogpt.parallel.compression import keeps_errors
from isogpt.parallel.mesh import AXES, make_mesh, splits_backward, stages_per_rank
from isogpt.parallel.plan import UNDIVIDED, Plan, normalized, plan_of
from isogpt.parallel.shares import parse_shares
from isogpt.training import optim
from isogpt.training.optimizer_class import has_modes

# {setting: a regular expression of its values, and how they are described}
FORMS = {
    "activation_checkpointing": (r"none|full|selective|every:0*[1-9]\d*", "none, full, selective, every:K"),
    "grad_compression": (
        r"none|fp16|bf16|int8|powersgd:0*[1-9]\d*|topk:0?\.\d*[1-9]\d*",
        "none, fp16, bf16, int8, powersgd:RANK and topk:FRACTION, such as topk:0.01",
    ),
    "dry_run_ranks": (r"|(\d+/)?\d+", "ranks such as 8, and 3/8 for rank 3 of 8"),
    "max_tokens": (
        r"|0|(?=[\d.]*[1-9])(\d+\.?\d*|\.\d+)(e\+?\d\d?)? ?(epochs)?",
        "tokens such as 3e9, and epochs such as 2epochs",
    ),
}
# settings that must be those of UNDIVIDED for a run to be exact
EXACT = ("tp", "cp", "ep", "islands", "shares", "grad_compression", "grad_sync", "cuda_graphs", "cpu_offload")


def check_training(config: dict) -> dict:
    """
    Check that train.py's settings fit each other. Returns them in their normal form, see plan.normalized.

    Raises:
        ValueError: one line for each conflict.
    """
    config = normalized(config)
    c = SimpleNamespace(**config)
    report([*conflicts_of_values(c), *problems_of_shape(model_fields(config))])
    layout = plan_of(config, c.islands)  # the number of processes and the model are not known yet
    report([*conflicts_of_start(c), *conflicts_of_training(c), *conflicts_of_layout(layout)])
    return config


def check_plan(plan: Plan, splits_sequence: bool = True) -> None:
    """
    Check that a plan's settings fit each other, its ranks, and its model if that is known.

    Args:
        splits_sequence: whether cp and tp divide sequences of block_size tokens, as they do in training.

    Raises:
        ValueError: one line for each conflict.
    """
    conflicts = [*conflicts_of_layout(plan), *conflicts_with_ranks(plan)]
    if plan.model_args:
        conflicts += [*conflicts_with_sizes(plan), *conflicts_with_stages(plan)]
        conflicts += conflicts_with_sequence(plan) if splits_sequence else ()
    report(conflicts)


def report(sentences: list[str]) -> None:
    """Raise ValueError with all sentences, one on each line and without credentials, if there are any."""
    if sentences:
        raise ValueError("\n".join(map(without_credentials, sentences)))


def without_secrets(config: dict) -> dict:
    """
    The settings that checkpoints and logs record: not alert_command, which often contains a token, and URLs
    without credentials.
    """
    urls = {name: without_credentials(config[name]) for name in ("init_from", "mirror")}
    return {name: value for name, value in (config | urls).items() if name != "alert_command"}


# ------------------------------------------------------------------------------------------------------------
# conflicts between the settings of a run


def conflicts_of_values(c: SimpleNamespace) -> Iterator[str]:
    """Values that are neither a number nor one of a few words."""
    for name, (form, described) in FORMS.items():
        value = getattr(c, name)
        if not re.fullmatch(form, value):
            yield f"{name} is {value!r}; choose from {described}"


def unmet(c: SimpleNamespace | Plan, needs: list[tuple]) -> Iterator[str]:
    """
    A sentence for each need that is not met.

    Args:
        needs: rows of (setting, a value without this need, whether the need is met, what is needed).
    """
    for name, fallback, is_met, need in needs:
        value = getattr(c, name)
        if value != fallback and not is_met:
            yield f"{name} is {value!r}, but needs {need}: set --{name}={fallback}"


def conflicts_of_start(c: SimpleNamespace) -> Iterator[str]:
    """The run's folder, the weights that a run starts from, and dry runs."""
    name = c.init_from.removeprefix("auto:")
    is_word = name in ("scratch", *GPT2) or re.fullmatch(r"auto|resume(:\d+)?", c.init_from)
    if not is_word and not is_url(name) and not os.path.exists(name):
        yield (
            f"init_from is {c.init_from!r}; choose from scratch, resume, resume:STEP, auto, "
            "gpt2[-medium|-large|-xl], a run's folder, ckpt.pt or mirror, and a folder of transformers"
        )
    if not c.out_dir.strip():
        yield "out_dir is empty: set --out_dir= to a folder"
    path = Path(c.mirror.removeprefix("file://")).resolve()
    is_inside = c.mirror.startswith("file://") and path.is_relative_to(Path(c.out_dir).resolve())
    needs = [
        ("mirror", "", is_url(c.mirror), "a URL such as s3://bucket/run"),
        ("mirror", "", not is_inside, f"a place outside of out_dir {c.out_dir}"),
        ("mirror", "", c.save_checkpoint, "save_checkpoint"),
        ("save_checkpoint", False, c.grad_sync != "never", "a grad_sync other than 'never'"),
    ]
    yield from unmet(c, needs)
    if not c.dry_run_ranks:
        return
    rank, ranks = (int(n) for n in f"0/{c.dry_run_ranks}".split("/")[-2:])
    least = max(2, rank + 1)
    needs = [
        ("dry_run_ranks", f"{rank}/{least}", ranks >= least, "a rank below the number of ranks"),
        ("dry_run_ranks", "", "RANK" not in os.environ, "to be started without a launcher"),
        ("init_from", "scratch", name == "auto", "weights, which a dry run does not read"),
        ("shares", "equal", c.shares != "auto", "all ranks, and a dry run is only one"),
    ]
    yield from unmet(c, needs)


def conflicts_of_training(c: SimpleNamespace) -> Iterator[str]:
    """The model, the optimizer, the schedule, islands and exact. Raises ValueError about an optimizer."""
    classes = optim.classes_of_users(c.optimizer)
    is_gpt2, others = c.arch == "gpt2", "arch llama or nanochat"
    has_rate = c.learning_rate > 0 or not optim.uses_muon(c.optimizer)
    needs = [
        ("n_kv_head", 0, not is_gpt2 or c.n_kv_head >= c.n_head, others),
        ("head", "auto", not is_gpt2 or c.head == "tied", others),
        ("bias", False, is_gpt2, "arch gpt2"),
        ("n_expert_active", 2, c.n_expert < 2 or c.n_expert_active > 1, "to be 2 or more"),
        ("learning_rate", 6e-4, has_rate, "to be above 0 with muon"),
        ("local_steps", 1, c.islands != 1, "islands"),
        ("islands", 1, not any(map(has_modes, classes)), "an optimizer that evaluates what it trains"),
    ]
    yield from unmet(c, needs)
    if c.lr_schedule == "wsd" and not c.cooldown_iters:
        yield "lr_schedule 'wsd' needs the steps of its decay: set --cooldown_iters="
    if not c.exact:
        return
    needs = {name: getattr(UNDIVIDED, name) for name in EXACT} | {"layout": "manual"}
    if c.pp > 1:
        needs["dropout"] = 0.0
    if c.pp > 1 and splits_backward(c.pp_schedule):
        needs["pp_schedule"] = "1f1b"
    if c.zero >= 2:
        needs["pp"] = 1
    if classes:
        needs["zero"] = 0
    for name, needed in needs.items():
        value = getattr(c, name)
        if value != needed:
            yield f"exact: {name} {value} changes the bits: set --{name}={needed}, or --exact=False"


# ------------------------------------------------------------------------------------------------------------
# conflicts in a plan


def conflicts_of_layout(plan: Plan) -> Iterator[str]:
    """How the ways of dividing the work fit each other. Raises ValueError about shares that are no list."""
    parse_shares(plan.shares)
    is_sharded, has_islands = plan.zero >= 2, plan.islands != 1
    holds_whole = not is_sharded and plan.ep == plan.cp == plan.tp == 1
    is_one_pass = plan.pp == 1 or not splits_backward(plan.pp_schedule)
    is_selective = plan.activation_checkpointing == "selective"
    compression = plan.replica_compression
    is_twice = plan.grad_sync == "every" and not is_sharded and compression != "none"
    has_replicas = has_islands or not is_sharded or plan.dp_replicate > 1
    is_of_gradients = plan.grad_compression.startswith(("powersgd", "topk"))
    has_errors = keeps_errors(compression) and plan.dtype == "float16"
    needs = [
        ("shares", "equal", plan.pp == 1, "pp 1"),
        ("shares", "equal", plan.shares != "auto" or holds_whole, "zero 0 or 1, and tp, cp and ep 1"),
        ("activation_checkpointing", "full", not is_selective or is_one_pass, "another pp_schedule"),
        ("cuda_graphs", False, plan.compile, "compile"),
        ("cuda_graphs", False, not is_sharded, "zero 0 or 1"),
        ("cuda_graphs", False, plan.world_size == 1, "a single process"),
        ("cuda_graphs", False, not plan.model_args.get("n_expert"), "a model without experts"),
        ("ep", 1, not plan.model_args or plan.model_args.get("n_expert"), "a model with experts"),
        ("cpu_offload", False, is_sharded, "zero 2 or 3"),
        ("dp_replicate", 1, is_sharded, "zero 2 or 3"),
        ("grad_sync", "last", not is_twice, "gradients that are not compressed"),
        ("grad_compression", "none", has_replicas, "zero 0 or 1, or dp_replicate"),
        ("grad_compression", "int8", not (has_islands and is_of_gradients), "islands 1"),
        ("grad_compression", "fp16", not has_errors, "dtype float32 or bfloat16"),
        ("exact", False, plan.device_type != "mps", "float64, which mps lacks"),
    ]
    yield from unmet(plan, needs)


def conflicts_with_ranks(plan: Plan) -> Iterator[str]:
    """Whether the degrees of parallelism divide the ranks. Raises ValueError about shares of other ranks."""
    degrees = {axis: getattr(plan, axis) for axis in AXES if axis != "dp_shard"}
    product = prod(degrees.values())
    if plan.world_size % product:
        text = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        counts = multiples_around(plan.world_size, product)
        started = count_text(plan.world_size, "process", "processes")
        yield f"{started} cannot be divided into {text}: start {counts} processes, or lower a degree"
    else:
        parse_shares(plan.shares, make_mesh(0, plan).data_size)
    if plan.islands > plan.sequences > 0:
        n = ceil(plan.islands / plan.batch_size)
        yield f"islands is above a step's {plan.sequences} sequences: set --gradient_accumulation_steps={n}"


def conflicts_with_sizes(plan: Plan) -> Iterator[str]:
    """Whether tp divides heads and ep experts, and each rank of tp gets a part of each matrix."""
    args, tp = plan.model_args, plan.tp
    heads = "n_kv_head" if 0 < args["n_kv_head"] < args["n_head"] else "n_head"
    for name, divided in (("tp", heads), ("ep", "n_expert")):
        degree, size = getattr(plan, name), args.get(divided, 0)
        if size % degree:
            least = gcd(size, degree)
            yield f"{name} is {degree}: it must divide {divided}, {size}: set --{name}={least}"
    for name in ("vocab_size", "n_hidden"):
        size = args.get(name)
        if size and (tp - 1) * ceil(size / tp) >= size:
            yield f"tp is {tp}, which is too many ranks for {name} {size}: set --tp={max(1, tp // 2)}"


def conflicts_with_stages(plan: Plan) -> Iterator[str]:
    """Each pipeline stage contains a block or more. With exact, some models cannot be divided into stages."""
    args, pp, schedule = plan.model_args, plan.pp, plan.pp_schedule
    layers, per_rank = args["n_layer"], stages_per_rank(schedule)
    if layers < pp * per_rank:
        other = " or --pp_schedule=1f1b" if layers >= pp else ""
        yield (
            f"pp_schedule {schedule!r} makes {pp * per_rank} stages with pp {pp}, but n_layer is {layers}: "
            f"set --pp={max(1, layers // per_rank)}{other}"
        )
    if pp > 1 and schedule == "zbv" and plan.device_type == "cpu" and not SENDS_TO_ITSELF:
        yield "this torch cannot run pp_schedule zbv on CPUs: set --pp_schedule=zero_bubble"
    if plan.exact and pp > 1 and (args["tied"] or args["n_expert"]):
        yield "exact: pp changes the bits of a tied head and of experts: set --pp=1, or --exact=False"


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
    return f"{below} or {below + factor}" if below else str(factor)


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
    length, size = model_args["block_size"], config["block_size"]
    if size > length:
        raise ValueError(f"block_size is {size}, but the checkpoint's is {length}: set --block_size={length}")
    fitted = {"n_kv_head": 0, "n_expert": 0} | model_args | {name: config[name] for name in OF_THE_RUN}
    experts = fitted["n_expert"]
    if config["n_expert"] in (0, experts):
        return fitted
    problem = f"n_expert is {config['n_expert']}, but the checkpoint's is {experts}"
    if experts:
        raise ValueError(f"{problem}: set --n_expert={experts}")
    if is_resume:
        raise ValueError(
            f"{problem}: to start a new run in which each expert is a copy of the MLP, set "
            f"--init_from={config['out_dir']} and a different --out_dir"
        )
    return fitted | {name: config[name] for name in ("n_expert", "n_expert_active")}
