"""Checks of settings, shared by the scripts, and the model's shape that settings describe."""

import json
import os
import re
import shlex
from dataclasses import fields, replace
from math import ceil, gcd, prod
from pathlib import Path
from types import SimpleNamespace

from isogpt.data.dataset import Dataset
from isogpt.nn.architecture import ARCHS, GPTConfig, problems_of_shape
from isogpt.nn.huggingface import GPT2
from isogpt.parallel.mesh import stages_per_rank
from isogpt.parallel.plan import Plan, normalized
from isogpt.parallel.shares import parse_shares
from isogpt.parallel.slow_network import keeps_errors

AT_LEAST_1 = (
    "eval_iters",
    "gradient_accumulation_steps",
    "batch_size",
    "per_node",
    "dp_replicate",
    "pp",
    "ep",
    "cp",
    "tp",
    "nan_patience",
    "fsdp_prefetch",
    "local_steps",
    "outer_parts",
    "num_samples",
    "max_new_tokens",
    "steps",
)
NOT_NEGATIVE = (
    "max_iters",
    "save_interval",
    "sample_interval",
    "seed",
    "vocab_size",
    "warmup_iters",
    "lr_decay_iters",
    "learning_rate",
    "min_lr",
    "cooldown_iters",
    "muon_lr",
    "embedding_lr",
    "weight_decay",
    "grad_clip",
    "keep_last",
    "time_limit_s",
    "max_rollbacks",
    "nproc",
    "check_ranks_interval",
    "temperature",
    "top_k",
    "islands",
    "outer_lr",
    "balance_loss",
    "router_z_loss",
    "base_batch",
    "network",
    "device_memory_gb",
    "device_tflops",
)
# with a size beyond this, arithmetic overflows before the memory is exhausted
SIZES = (
    "gradient_accumulation_steps",
    "batch_size",
    "block_size",
    "eval_iters",
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "n_hidden",
    "n_expert",
    "vocab_size",
    "nproc",
)
# names, condition on the value, and how the message states it
RANGES = (
    (AT_LEAST_1, lambda v: v >= 1, "be at least 1"),
    (NOT_NEGATIVE, lambda v: v >= 0, "not be negative"),
    (("eval_interval", "log_interval", "dist_timeout_s", "ddp_bucket_mb"), lambda v: v > 0, "be above 0"),
    (("beta1", "beta2", "muon_momentum", "outer_momentum"), lambda v: 0 <= v < 1, "be in [0, 1)"),
    (("top_p",), lambda v: 0 < v <= 1, "be in (0, 1]; 1 samples among all tokens"),
    (("seed",), lambda v: v < 2**63, "be below 2**63"),
    (SIZES, lambda v: v < 2**31, "be below 2**31"),
)
CHOICES = {
    "data_order": ("random", "shuffle"),
    "on_nan": ("stop", "skip"),
    "zero": (0, 1, 2, 3),
    "grad_sync": ("auto", "last", "every", "never"),
    "head": ("auto", "tied", "untied"),
    "optimizer": ("adamw", "muon"),
    "lr_schedule": ("cosine", "linear", "wsd"),
    "lr_scaling": ("none", "linear", "sqrt"),
    "outer_compression": ("none", "fp16", "int8"),
    "hardware": (
        "h100",
        "h200",
        "b200",
        "a100",
        "a100-40gb",
        "v100",
        "l40s",
        "l4",
        "t4",
        "3090",
        "4090",
        "5090",
        "mi300x",
        "cpu",
        "this",
    ),
    "pp_schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"),
    "layout": ("manual", "auto"),
}
# settings that are fields of GPTConfig with the same meaning; a vocab_size of 0 is the data set's
MODEL_FIELDS = tuple(field.name for field in fields(GPTConfig) if field.name != "vocab_size")
# settings that the model determines if it is not new
SHAPE = (
    "arch",
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "n_hidden",
    "bias",
    "vocab_size",
    "n_expert",
    "n_expert_active",
)


def model_fields(config: dict) -> dict:
    """The settings in `config` that are fields of GPTConfig, see MODEL_FIELDS."""
    return {name: config[name] for name in MODEL_FIELDS if name in config}


def problems_of(config: dict) -> list[str]:
    """A sentence for each setting in `config` that is out of range."""
    rules = [(name, is_good, rule) for names, is_good, rule in RANGES for name in names if name in config]
    found = [
        f"{name} is {config[name]}: it must {rule}"
        for name, is_good, rule in rules
        if not is_good(config[name])
    ]
    for name, (*others, last) in CHOICES.items():
        if name in config and config[name] not in (*others, last):
            found.append(f"{name} is {config[name]!r}; possible are {', '.join(map(str, others))} and {last}")
    found += problems_of_shape(model_fields(config))
    mode = config.get("activation_checkpointing", "none")
    if not re.fullmatch(r"none|full|selective|every:0*[1-9]\d*", mode):
        found.append(
            f"activation_checkpointing is {mode!r}; possible are none, full, selective and every:K (K >= 1)"
        )
    compression = config.get("grad_compression", "none")
    if not re.fullmatch(
        r"none|fp16|bf16|int8|sign|powersgd:0*[1-9]\d*|topk:(0?\.\d*[1-9]\d*|1|1\.0*)", compression
    ):
        found.append(
            f"grad_compression is {compression!r}; possible are none, fp16, bf16, int8, sign, powersgd:RANK "
            "such as powersgd:4, and topk:FRACTION of at most 1, such as topk:0.01"
        )
    try:
        parse_shares(config.get("shares", "equal"))
    except ValueError as e:
        found.append(str(e))
    return found


def report(problems: list[str]) -> None:
    """Raise ValueError with all problems, one on each line, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


def check_training(config: dict) -> None:
    """
    Check train.py's settings.

    Raises:
        ValueError: one line for each problem.
    """
    problems = problems_of(config)
    c = SimpleNamespace(**config)
    weights = "scratch" if c.init_from in ("resume", "auto") else c.init_from.removeprefix("auto:")
    checks = (
        (
            c.arch == "gpt2" and c.n_kv_head > 0 and c.n_kv_head != c.n_head,
            "arch 'gpt2' uses as many n_kv_head as n_head: set --n_kv_head=0, or --arch=llama or nanochat",
        ),
        (
            c.arch == "gpt2" and c.head == "untied",
            "arch 'gpt2' uses a tied head: set --head=auto, or --arch=llama or nanochat",
        ),
        (c.arch != "gpt2" and c.bias, f"arch {c.arch!r} uses no biases: set --bias=False"),
        (
            c.lr_schedule == "wsd" and c.cooldown_iters == 0,
            "lr_schedule 'wsd' needs the steps of the decay: set --cooldown_iters=",
        ),
        (
            c.lr_scaling in ("linear", "sqrt") and c.base_batch == 0,
            f"lr_scaling {c.lr_scaling!r} needs the batch "
            "for which learning_rate was chosen: set --base_batch= to the sequences per step",
        ),
        (
            c.lr_scaling == "none" and c.base_batch > 0,
            f"base_batch is {c.base_batch}, but lr_scaling is 'none': set --lr_scaling=linear or sqrt, or "
            "--base_batch=0",
        ),
        (
            c.optimizer == "muon" and c.learning_rate == 0,
            "learning_rate is 0, but optimizer 'muon' needs it for the embeddings and the head: set "
            "--learning_rate=",
        ),
        (
            c.n_expert > 1 and c.n_expert_active == 1,
            "n_expert_active is 1: the weights of a token's experts add up to 1, and a router of a single "
            "expert learns nothing: set --n_expert_active=2",
        ),
        (not c.out_dir.strip(), "out_dir is empty: set --out_dir= to a folder"),
        (
            weights not in ("scratch", *GPT2) and not os.path.exists(weights),
            f"init_from is {c.init_from!r}; possible: scratch, resume, auto, gpt2[-medium|-large|-xl], a "
            "folder of a run or of Hugging Face weights, or a ckpt.pt",
        ),
        (
            c.resume_step != -1 and c.init_from != "resume",
            f"resume_step needs init_from 'resume', but it is {c.init_from!r}: set --init_from=resume",
        ),
        (
            c.fsdp and c.zero not in (0, 3),
            f"fsdp is short for zero=3, but zero is {c.zero}: set only one of them",
        ),
        (
            c.grad_sync == "never" and c.save_checkpoint,
            "grad_sync 'never' is for measuring communication, the ranks' weights drift apart: set "
            "--save_checkpoint=False",
        ),
    )
    problems += [message for is_wrong, message in checks if is_wrong]
    report(
        problems
        + layout_problems(SimpleNamespace(**normalized(config)))
        + (problems_of_exact(c) if c.exact else [])
    )


def problem_of_samples(c: Plan) -> str:
    """Return why no process can write samples by itself with this layout; '': rank 0 can."""
    divided = [f"zero {c.zero}"] if c.zero >= 2 else []
    divided += [f"{name} {getattr(c, name)}" for name in ("tp", "pp", "ep") if getattr(c, name) > 1]
    if not divided:
        return ""
    return (
        f"sample_interval needs the whole model on one process, but {', '.join(divided)} divides it: there "
        "are no samples. Run sample.py on a checkpoint"
    )


def check_layout(plan: Plan) -> None:
    """
    Check that a plan's settings fit each other.

    Raises:
        ValueError: one line for each problem.
    """
    report(problems_of(vars(plan)) + layout_problems(plan))


def layout_problems(c: Plan | SimpleNamespace) -> list[str]:
    """A sentence for each reason why the ways of dividing the work do not fit each other."""
    is_divided = c.zero >= 2 or max(c.ep, c.cp, c.tp) > 1
    checks = (
        (
            c.shares != "equal" and c.pp > 1,
            f"shares is {c.shares!r}, but the ranks of a pipeline (pp {c.pp}) need equal "
            "shares: set --shares=equal",
        ),
        (
            c.shares == "auto" and c.pp == 1 and is_divided,
            "shares 'auto' needs a whole model on each rank (zero 0 or 1; tp, cp and ep 1) to measure "
            "each rank: set a list such as --shares=2,1, or --shares=equal",
        ),
        (
            c.grad_compression != "none" and c.zero >= 2 and c.dp_replicate == 1,
            "grad_compression is for gradients of replicas, and zero 2 or 3 uses replicas only with "
            "dp_replicate: set --dp_replicate= to the number of replicas, or --grad_compression=none",
        ),
        (
            c.grad_compression != "none" and c.zero < 2 and c.grad_sync == "every",
            "grad_sync 'every' would compress what has been compressed already: set --grad_sync=last",
        ),
        (
            keeps_errors(c.grad_compression) and c.dtype == "float16",
            f"grad_compression {c.grad_compression!r} adds up errors of several steps, but dtype 'float16' "
            "changes their "
            "scale: set --dtype=bfloat16 or float32, or --grad_compression=fp16",
        ),
        (
            c.islands == 1 and (c.local_steps > 1 or c.outer_parts > 1 or c.outer_compression != "none"),
            "local_steps, outer_parts and outer_compression are for islands: set --islands= to their "
            "number, or 0 for one "
            "on each machine",
        ),
        (
            c.outer_parts > max(1, c.local_steps),
            f"outer_parts is {c.outer_parts}: it must not be above local_steps, "
            f"{c.local_steps}, since one part is sent after a step",
        ),
        (
            c.cuda_graphs and not c.compile,
            "cuda_graphs needs compile: set --compile=True, or --cuda_graphs=False",
        ),
        (
            c.cuda_graphs and c.zero >= 2,
            "cuda_graphs needs gradients that stay in place, and zero 2 and 3 "
            "allocate new gradients: set --zero=0 --fsdp=False, or --cuda_graphs=False",
        ),
        (
            (c.cpu_offload or c.dp_replicate != 1) and c.zero < 2,
            f"cpu_offload and dp_replicate need zero 2 or 3, but zero is {c.zero}: set --zero=3",
        ),
    )
    return [message for is_wrong, message in checks if is_wrong]


def problems_of_exact(c: SimpleNamespace) -> list[str]:
    """A sentence for each setting with which `exact` cannot give the same bits on any number of processes."""
    is_sharded = c.fsdp or c.zero >= 2
    checks = (
        *(
            (getattr(c, name) > 1, f"{name} divides the sums inside a micro-batch: set --{name}=1")
            for name in ("tp", "cp", "ep")
        ),
        (c.layout != "manual", "layout 'auto' may choose tp, cp or ep: set --layout=manual"),
        (
            c.shares != "equal",
            f"shares {c.shares!r} divides micro-batches, which must stay whole: set --shares=equal",
        ),
        (
            c.grad_compression != "none",
            f"grad_compression {c.grad_compression!r} rounds each rank's sum: set --grad_compression=none",
        ),
        (c.islands != 1, "the islands' weights depend on how many islands there are: set --islands=1"),
        (
            c.grad_sync != "auto",
            f"grad_sync {c.grad_sync!r} adds or leaves out floating-point sums: set --grad_sync=auto",
        ),
        (c.cuda_graphs, "cuda_graphs is for one process: set --cuda_graphs=False"),
        (
            c.cpu_offload,
            "the sums are on the GPU, and cpu_offload does not use them: set --cpu_offload=False",
        ),
        (
            c.pp > 1 and is_sharded,
            f"in a pipeline, zero 2 and 3 add a rank's micro-batches before they can be rounded: set "
            f"{'--fsdp=False' if c.fsdp else '--zero=1'}, or --pp=1",
        ),
        (
            c.pp > 1 and c.pp_schedule in ("zero_bubble", "zbv"),
            f"pp_schedule {c.pp_schedule!r} mixes several micro-batches' gradients: set --pp_schedule=1f1b",
        ),
        (
            c.pp > 1 and c.dropout > 0,
            "in a pipeline, dropout masks depend on the stages: set --dropout=0.0, or --pp=1",
        ),
    )
    return [f"exact: {message}, or --exact=False" for is_wrong, message in checks if is_wrong]


def check_degrees(plan: Plan, splits_sequence: bool = True) -> None:
    """
    Check that the degrees of parallelism divide the ranks and the model, and that both allow CUDA graphs.

    Args:
        plan: whose model_args are empty if the model is not known yet.
        splits_sequence: whether cp and tp divide sequences of block_size tokens, as they do in training.

    Raises:
        ValueError: one line for each problem.
    """
    found = problems_with_ranks(plan)
    if plan.model_args:
        found += problems_with_shape(plan, plan.model_args, splits_sequence)
        is_only_tp = plan.islands == plan.pp == plan.dp_replicate == plan.cp == plan.ep == 1
        if len(found) > 1 and is_only_tp and all(re.search(r"\btp\b", problem) for problem in found):
            found = [one_hint_about_tp(plan, splits_sequence)]
    report(found)


def one_hint_about_tp(plan: Plan, splits_sequence: bool) -> str:
    """One sentence about a tp for which there are several problems, with the largest tp without problems."""
    args = plan.model_args
    lower = [replace(plan, tp=n) for n in range(1, plan.tp)]
    fit = [other for other in lower if not problems_with_shape(other, args, splits_sequence)]
    here = [other.tp for other in fit if not problems_with_ranks(other)]
    advice = [f"set --tp={here[-1]}"] if here else []
    if fit and fit[-1].tp > max(here, default=1):
        advice += [f"start {fit[-1].tp} processes and set --tp={fit[-1].tp}"]
    numbers = f"the number of processes, {plan.world_size}, the heads, {args['n_kv_head'] or args['n_head']}"
    numbers += f", and block_size, {args['block_size']}"
    return f"tp is {plan.tp}: it must divide {numbers}: {', or '.join(advice)}"


def problems_with_ranks(plan: Plan) -> list[str]:
    """A sentence for each reason why a plan cannot be used with its number of processes."""
    world_size = plan.world_size
    names = ("islands", "pp", "dp_replicate", "ep", "cp", "tp")
    degrees = {name: getattr(plan, name) for name in names if getattr(plan, name) > 1}
    product = prod(degrees.values())
    found = []
    if world_size % product:
        text = " x ".join(f"{name} {n}" for name, n in degrees.items()) + (
            f" = {product}" if len(degrees) > 1 else ""
        )
        counts = " or ".join(
            str(n * product) for n in (world_size // product, world_size // product + 1) if n
        )
        nearest = f"set --{min(degrees)}={nearest_divisor(world_size, product)}"
        started = "1 process" if world_size == 1 else f"{world_size} processes"
        found.append(
            f"{started} cannot be divided into {text}: start {counts} processes, or "
            f"{nearest if len(degrees) == 1 else 'lower a degree'}"
        )
    if plan.sequences < plan.islands:
        found.append(
            f"islands is {plan.islands}, but a step reads only {plan.sequences} sequences: set "
            f"--gradient_accumulation_steps={ceil(plan.islands / plan.batch_size)}"
        )
    if plan.cuda_graphs and world_size > 1:
        found.append(f"cuda_graphs is for one process, but there are {world_size}: set --cuda_graphs=False")
    return found


def problems_with_shape(plan: Plan, model_args: dict, splits_sequence: bool) -> list[str]:
    """A sentence for each reason why settings cannot be used with a model of this shape."""
    pp, ep, cp, tp = plan.pp, plan.ep, plan.cp, plan.tp
    found = []
    heads = model_args["n_kv_head"] or model_args["n_head"]
    if heads % tp:
        name = "n_head" if heads == model_args["n_head"] else "n_kv_head"
        found.append(f"tp is {tp}: it must divide {name}, {heads}: set --tp={gcd(heads, tp)}")
    experts = model_args.get("n_expert", 0)
    if plan.cuda_graphs and experts:
        found.append("cuda_graphs is for models without experts: set --cuda_graphs=False")
    if ep > 1 and not experts:
        found.append(
            f"ep is {ep}, but the model contains no experts: set --ep=1, or --n_expert={ceil(8 / ep) * ep}"
        )
    elif experts % ep:
        found.append(f"ep is {ep}: it must divide n_expert, {experts}: set --ep={gcd(experts, ep)}")
    layers, per_rank = model_args["n_layer"], stages_per_rank(plan.pp_schedule)
    if layers < pp * per_rank:
        schedule = " or --pp_schedule=1f1b" if layers >= pp else ""
        found.append(
            f"pp_schedule {plan.pp_schedule!r} makes {pp * per_rank} stages with pp {pp}, but there are "
            f"only {layers} layers: set --pp={max(1, layers // per_rank)}{schedule}"
        )
    if plan.exact and pp > 1:
        found += problems_of_exact_stages(model_args)
    length, parts = model_args["block_size"], tp * (2 * cp if cp > 1 else 1)
    if splits_sequence and length % parts:
        lengths = " or ".join(str(n * parts) for n in (length // parts, length // parts + 1) if n)
        factors = f"2 x cp x tp, {parts}" if cp > 1 else f"tp, {tp}"
        found.append(
            f"block_size is {length}: it must be a multiple of {factors}: set --block_size={lengths}"
        )
    for name in ("vocab_size", "n_hidden"):  # the last rank would hold nothing
        if (size := model_args.get(name)) and (tp - 1) * ceil(size / tp) >= size:
            found.append(f"tp is {tp}, too many ranks for {name} {size}: set --tp={max(1, tp // 2)}")
    return found


def problems_of_exact_stages(model_args: dict) -> list[str]:
    """A sentence for each reason why `exact` cannot be used with a pipeline of a model of this shape."""
    found, is_tied = [], model_args.get("tied")
    if is_tied is None:  # not decided yet: settings of a new model, or the default of the architecture
        is_tied = {"tied": True, "untied": False}.get(model_args.get("head"), ARCHS[model_args["arch"]].tied)
    if is_tied:
        found.append(
            "exact: in a pipeline, the gradients of a tied head and of the embeddings are rounded "
            "separately: set --pp=1, or start a model with --arch=llama or nanochat, or --exact=False"
        )
    if model_args.get("n_expert"):
        found.append(
            "exact: in a pipeline, the order of the routers' statistics matters: set --pp=1, or --exact=False"
        )
    return found


def nearest_divisor(n: int, wanted: int) -> int:
    """The divisor of n that is nearest to `wanted`; the smaller of two equally near divisors."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: (abs(d - wanted), d))


def model_args_of(config: dict, vocab_size: int) -> dict:
    """The fields of GPTConfig for a model that starts from scratch with these settings."""
    tied = {"auto": None, "tied": True, "untied": False}[config["head"]]
    return model_fields(config) | {"vocab_size": vocab_size, "tied": tied}


def settings_of_model(model_args: dict) -> dict:
    """
    Return the settings for a new model of this shape, from fields of GPTConfig or nanoGPT: the inverse of
    model_args_of.
    """
    tied = model_args.get("tied", True)
    same = {name: model_args[name] for name in SHAPE if name in model_args}
    return {"arch": "gpt2"} | same | {"head": "tied" if tied else "untied"}


def fit_model_args(model_args: dict, config: dict, data: Dataset, is_resume: bool) -> dict:
    """
    Return the fields of GPTConfig for this run, from the fields of a checkpoint, a pretrained model or a new
    model. Dropout, the length of the context and the router's losses are settings of the run. With n_expert,
    a dense model that the run does not resume is upcycled: each expert starts as a copy of the MLP
    (Komatsuzaki et al. 2022, arXiv:2212.05055).

    Raises:
        ValueError: the model's context is shorter than block_size, the data set contains token ids beyond the
            model's, or the number of experts differs.
    """
    length, size, block_size = model_args["block_size"], model_args["vocab_size"], config["block_size"]
    if block_size > length:
        raise ValueError(
            f"block_size {block_size} exceeds the checkpoint's context length, {length}: set "
            f"--block_size={length} or less"
        )
    if data.highest >= size:
        raise ValueError(
            f"{data.folder} contains token id {data.highest}, but the checkpoint's vocabulary size is "
            f"{size}: it was trained on a different data set"
        )
    here = {"n_kv_head": 0, "n_expert": 0} | model_args
    here |= {name: config[name] for name in ("dropout", "block_size", "balance_loss", "router_z_loss")}
    found, wanted = here["n_expert"], config["n_expert"]
    if wanted not in (0, found):
        if found:
            raise ValueError(
                f"n_expert is {wanted}, but the checkpoint contains {found} experts: set --n_expert={found}"
            )
        if is_resume:
            folder = config["out_dir"]
            raise ValueError(
                f"n_expert is {wanted}, but the checkpoint in {folder} contains no experts: to start a new "
                f"run in which each expert is a copy of the MLP, set --init_from={folder} and a different "
                f"--out_dir"
            )
        here |= {name: config[name] for name in ("n_expert", "n_expert_active")}
    return here


def check_sampling(config: dict) -> None:
    """
    Check sample.py's settings.

    Raises:
        ValueError: one line for each problem.
    """
    problems, init_from = problems_of(config), config["init_from"]
    if init_from not in ("resume", *GPT2) and not os.path.isdir(init_from):
        possible = "resume, gpt2[-medium|-large|-xl], a folder of Hugging Face weights"
        folder = os.path.dirname(init_from) or "."
        advice = f"; for this file, set --out_dir={shlex.quote(folder)}" if os.path.isfile(init_from) else ""
        problems.append(f"init_from is {init_from!r}; possible: {possible}{advice}")
    report(problems)


def notes_about_text(start: str, stop: str) -> list[str]:
    """
    Return what a user should know about sample.py's `start` and `stop`, which may contain a backslash and an
    n on purpose.
    """
    found = []
    for name, text in (("start", start), ("stop", stop)):
        is_file = name == "start" and text.startswith("FILE:")
        if "\\n" in text and not is_file:
            quoted = shlex.quote(json.dumps(text.replace("\\n", "\n"), ensure_ascii=False))
            found.append(f"--{name} contains \\n as two characters: for a line break, type --{name}={quoted}")
    return found


def read_prompt(start: str) -> str:
    """
    Return the prompt that sample.py's `start` names: the text itself, or the content of the file after FILE:.

    Raises:
        ValueError: the file cannot be read as text.
    """
    if not start.startswith("FILE:"):
        return start
    path = os.path.expanduser(start.removeprefix("FILE:"))
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # drops a byte order mark
    except OSError as e:
        raise ValueError(f"--start={start} cannot be read as text: {e}") from e
    except UnicodeDecodeError as e:
        raise ValueError(f"--start={start} cannot be read as text: {e}; save it in UTF-8") from e
