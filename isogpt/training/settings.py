"""
How the scripts' settings fit each other, and which shape of a model they describe. The range of a single
setting is given in its line of the script, see options/values.py.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

from isogpt.data.dataset import Dataset
from isogpt.nn.architecture import GPT2, OF_THE_RUN, GPTConfig, problems_of_shape
from isogpt.options.values import is_url, without_credentials
from isogpt.parallel.mesh import splits_backward
from isogpt.parallel.plan import Plan, normalized
from isogpt.parallel.recompute import fits_schedule
from isogpt.parallel.shares import parse_shares
from isogpt.parallel.slow_network import keeps_errors
from isogpt.training import optim
from isogpt.training.optimizer_class import has_modes

Settings = SimpleNamespace  # all settings of train.py


def check_training(config: dict) -> dict:
    """
    Check that train.py's settings fit each other. Returns them in their normal form, see plan.normalized.

    Raises:
        ValueError: one line for each problem.
    """
    settings = Settings(**config)
    problems = problems_of_shape(model_fields(config))
    problems += rules_of_start(settings)
    problems += rules_of_dry_run(settings)
    problems += rules_of_model(settings)
    problems += rules_of_length(settings)
    problems += rules_of_updates(settings)
    if settings.fsdp and settings.zero not in (0, 3):
        problems.append(f"fsdp is short for zero=3, but zero is {settings.zero}: set only one of them")
    problems += rules_of_layout(Settings(**normalized(config)))
    if settings.exact:
        problems += [f"exact: {reason}, or --exact=False" for reason in rules_of_exact(settings)]
    report(problems)
    return normalized(config)


def without_secrets(config: dict) -> dict:
    """
    The settings that checkpoints and logs record: not alert_command, which often contains a token, and URLs
    without credentials.
    """
    urls = {name: without_credentials(config[name]) for name in ("init_from", "mirror")}
    return {name: value for name, value in (config | urls).items() if name != "alert_command"}


def check_layout(plan: Plan) -> None:
    """
    Check that a plan's settings fit each other.

    Raises:
        ValueError: one line for each problem.
    """
    report(list(rules_of_layout(plan)))


def report(problems: list[str]) -> None:
    """Raise ValueError with all problems, one on each line, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


# ------------------------------------------------------------------------------------------------------------
# the rules: each yields a sentence, which says what to type, for each conflict between settings


def rules_of_start(c: Settings) -> Iterator[str]:
    """The run's folder, and the weights that the run starts from."""
    weights = "scratch" if c.init_from in ("resume", "auto") else c.init_from.removeprefix("auto:")
    if not c.out_dir.strip():
        yield "out_dir is empty: set --out_dir= to a folder"
    if weights not in ("scratch", *GPT2) and not is_url(weights) and not os.path.exists(weights):
        yield (
            f"init_from is {c.init_from!r}; choose from scratch, resume, auto, gpt2[-medium|-large|-xl], a "
            "folder of a run or of Hugging Face weights, a ckpt.pt, or the URL of a run's mirror"
        )
    if c.resume_step != -1 and c.init_from != "resume":
        yield f"resume_step needs init_from 'resume', but it is {c.init_from!r}: set --init_from=resume"
    if c.mirror and not c.save_checkpoint:
        yield "mirror copies what save_checkpoint writes: set --save_checkpoint=True, or --mirror="
    if c.mirror and not is_url(c.mirror):
        yield f"mirror is {c.mirror!r}, not a URL: set --mirror=s3://bucket/run or file:///mnt/disk/run"
    path = Path(c.mirror.removeprefix("file://")).resolve()
    if c.mirror.startswith("file://") and path.is_relative_to(Path(c.out_dir).resolve()):
        yield f"mirror is in out_dir {c.out_dir} and would be lost with it: set a URL of a different folder"
    if c.grad_sync == "never" and c.save_checkpoint:
        yield (
            "grad_sync 'never' is for measuring communication, and lets the ranks' weights drift apart: set "
            "--save_checkpoint=False"
        )


def rules_of_dry_run(c: Settings) -> Iterator[str]:
    """A process that is one of dry_run_ranks ranks."""
    least = max(2, c.dry_run_rank + 1)
    if not (c.dry_run_ranks or c.dry_run_rank):
        return
    if c.dry_run_ranks < least:
        yield f"dry_run_ranks is {c.dry_run_ranks}: set --dry_run_ranks={least} or more"
    if "RANK" in os.environ:
        yield "a dry run is one process: start train.py without a launcher"
    if c.init_from not in ("scratch", "auto"):
        yield (
            f"init_from is {c.init_from!r}, but a dry run reads no weights: set --init_from=scratch, and the "
            "model's shape with --n_layer, --n_head and --n_embd"
        )
    if c.shares == "auto":
        yield "shares 'auto' measures all ranks, but a dry run has only one: set --shares=equal"


def rules_of_model(c: Settings) -> Iterator[str]:
    """What an architecture cannot contain, and experts."""
    if c.arch == "gpt2" and 0 < c.n_kv_head < c.n_head and c.n_head % c.n_kv_head == 0:
        yield "arch 'gpt2' uses as many n_kv_head as n_head: set --n_kv_head=0, or --arch=llama or nanochat"
    if c.arch == "gpt2" and c.head == "untied":
        yield "arch 'gpt2' uses a tied head: set --head=auto, or --arch=llama or nanochat"
    if c.arch != "gpt2" and c.bias:
        yield f"arch {c.arch!r} uses no biases: set --bias=False"
    if c.n_expert > 1 and c.n_expert_active == 1:
        yield (
            "n_expert_active is 1: the weights of a token's experts add up to 1, so a router that chooses "
            "one expert learns nothing: set --n_expert_active=2"
        )


def rules_of_length(c: Settings) -> Iterator[str]:
    """How long a run trains."""
    if c.max_tokens and c.max_epochs:
        yield (
            f"max_tokens is {c.max_tokens:g} and max_epochs is {c.max_epochs:g}, but both set the number of "
            "steps: set --max_tokens=0 or --max_epochs=0"
        )


def rules_of_updates(c: Settings) -> Iterator[str]:
    """The optimizer and the schedule of the learning rate."""
    try:
        classes = optim.check_optimizer(vars(c))
    except ValueError as e:
        yield str(e)
        return
    if optim.uses_muon(c.optimizer) and c.learning_rate == 0:
        yield (
            f"learning_rate is 0, but optimizer {c.optimizer!r} needs it for embeddings and the head: set "
            "--learning_rate="
        )
    if c.islands != 1 and any(map(has_modes, classes)):
        yield (
            f"optimizer {c.optimizer!r} evaluates an average of its weights (it has eval and train), but "
            "islands evaluate the average over the islands: set --islands=1"
        )
    if c.exact and classes and normalized(vars(c))["zero"] >= 1:
        yield (
            f"exact: the bits of a step of {classes[0].__name__} may depend on how zero divides parameters: "
            "set --zero=0, or --exact=False"
        )
    if c.lr_schedule == "wsd" and c.cooldown_iters == 0:
        yield "lr_schedule 'wsd' needs the steps of the decay: set --cooldown_iters="


def rules_of_layout(c: Plan | Settings) -> Iterator[str]:
    """How the ways of dividing the work fit each other. All settings that are read are fields of Plan."""
    return chain(rules_of_shares(c), rules_of_compression(c), rules_of_islands(c), rules_of_memory(c))


def rules_of_shares(c: Plan | Settings) -> Iterator[str]:
    """Shares of a step that differ between ranks."""
    try:
        parse_shares(c.shares)
    except ValueError as e:
        yield str(e)
        return
    if c.shares != "equal" and c.pp > 1:
        yield (
            f"shares is {c.shares!r}, but the ranks of a pipeline (pp {c.pp}) need equal shares: set "
            "--shares=equal"
        )
    elif c.shares == "auto" and (c.zero >= 2 or max(c.ep, c.cp, c.tp) > 1):
        yield (
            "shares 'auto' needs a whole model on each rank (zero 0 or 1; tp, cp and ep 1) to measure each "
            "rank: set a list such as --shares=2,1, or --shares=equal"
        )


def rules_of_compression(c: Plan | Settings) -> Iterator[str]:
    """Compressed gradients."""
    kinds = r"none|fp16|bf16|int8|powersgd:0*[1-9]\d*|topk:0?\.\d*[1-9]\d*"
    if not re.fullmatch(kinds, c.grad_compression):
        yield (
            f"grad_compression is {c.grad_compression!r}; choose from none, fp16, bf16, int8, "
            "powersgd:RANK such as powersgd:4, and topk:FRACTION such as topk:0.01"
        )
        return
    if c.grad_compression != "none" and c.zero >= 2 and c.dp_replicate == 1:
        yield (
            "grad_compression is for gradients of replicas, but zero 2 and 3 use replicas only with "
            "dp_replicate: set --dp_replicate= to the number of replicas, or --grad_compression=none"
        )
    if c.grad_compression != "none" and c.zero < 2 and c.grad_sync == "every":
        yield "grad_sync 'every' would compress what has been compressed already: set --grad_sync=last"
    if keeps_errors(c.grad_compression) and c.dtype == "float16":
        yield (
            f"grad_compression {c.grad_compression!r} adds up errors of several steps, but dtype 'float16' "
            "changes their scale: set --dtype=bfloat16 or float32, or --grad_compression=fp16"
        )


def rules_of_islands(c: Plan | Settings) -> Iterator[str]:
    """Islands, and how they average their weights."""
    if c.islands == 1 and (c.local_steps > 1 or c.outer_compression != "none"):
        yield (
            "local_steps and outer_compression are for islands: set --islands= to their number, or 0 for one "
            "on each machine"
        )


def rules_of_memory(c: Plan | Settings) -> Iterator[str]:
    """What is recomputed, recorded as CUDA graphs, or kept in shards and on the CPU."""
    if not re.fullmatch(r"none|full|selective|every:0*[1-9]\d*", c.activation_checkpointing):
        yield (
            f"activation_checkpointing is {c.activation_checkpointing!r}; choose from none, full, selective "
            "and every:K (K >= 1)"
        )
    if not fits_schedule(c.activation_checkpointing, c.pp, c.pp_schedule):
        yield (
            "activation_checkpointing 'selective' keeps results for one backward pass, but pp_schedule "
            f"{c.pp_schedule!r} needs them in two: set --activation_checkpointing=full, or "
            "--pp_schedule=interleaved"
        )
    if c.cuda_graphs and not c.compile:
        yield "cuda_graphs needs compile: set --compile=True, or --cuda_graphs=False"
    if c.cuda_graphs and c.zero >= 2:
        yield (
            "cuda_graphs needs gradients that stay in place, but zero 2 and 3 allocate new gradients: set "
            "--zero=0 --fsdp=False, or --cuda_graphs=False"
        )
    if (c.cpu_offload or c.dp_replicate != 1) and c.zero < 2:
        yield f"cpu_offload and dp_replicate need zero 2 or 3, but zero is {c.zero}: set --zero=3"


def rules_of_exact(c: Settings) -> Iterator[str]:
    """With which settings `exact` cannot give the same bits on any number of processes, and what to set."""
    for name in ("tp", "cp", "ep"):
        if getattr(c, name) > 1:
            yield f"{name} divides the sums inside a micro-batch: set --{name}=1"
    if c.layout != "manual":
        yield "layout 'auto' may choose tp, cp or ep: set --layout=manual"
    if c.shares != "equal":
        yield f"shares {c.shares!r} divides micro-batches, which must stay whole: set --shares=equal"
    if c.grad_compression != "none":
        yield f"grad_compression {c.grad_compression!r} rounds each rank's sum: set --grad_compression=none"
    if c.islands != 1:
        yield "the islands' weights depend on how many islands there are: set --islands=1"
    if c.grad_sync != "auto":
        yield f"grad_sync {c.grad_sync!r} adds or leaves out floating-point sums: set --grad_sync=auto"
    if c.cuda_graphs:
        yield "cuda_graphs is for one process: set --cuda_graphs=False"
    if c.cpu_offload:
        yield "the sums are on the GPU, but cpu_offload does not use them: set --cpu_offload=False"
    if c.pp > 1:
        yield from rules_of_exact_pipeline(c)


def rules_of_exact_pipeline(c: Settings) -> Iterator[str]:
    """The same for a pipeline."""
    if c.fsdp or c.zero >= 2:
        unsharded = "--fsdp=False" if c.fsdp else "--zero=1"
        yield (
            "in a pipeline, zero 2 and 3 add a rank's micro-batches before they can be rounded: set "
            f"{unsharded}, or --pp=1"
        )
    if splits_backward(c.pp_schedule):
        yield f"pp_schedule {c.pp_schedule!r} mixes several micro-batches' gradients: set --pp_schedule=1f1b"
    if c.dropout > 0:
        yield "in a pipeline, dropout masks depend on the stages: set --dropout=0.0, or --pp=1"


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
    length, block_size = model_args["block_size"], config["block_size"]
    if block_size > length:
        raise ValueError(
            f"block_size {block_size} exceeds the checkpoint's context length, {length}: set "
            f"--block_size={length} or less"
        )
    if data.highest >= model_args["vocab_size"]:
        raise ValueError(
            f"{data.folder} contains token id {data.highest}, but the checkpoint's vocabulary size is "
            f"{model_args['vocab_size']}: its model was trained on a different data set"
        )
    fitted = {"n_kv_head": 0, "n_expert": 0} | model_args
    fitted |= {name: value for name, value in model_fields(config).items() if name in OF_THE_RUN}
    if config["n_expert"] in (0, fitted["n_expert"]):
        return fitted
    if fitted["n_expert"] or is_resume:
        advice = f"set --n_expert={fitted['n_expert']}"
        if not fitted["n_expert"]:
            advice = "to start a new run in which each expert is a copy of the MLP, set "
            advice += f"--init_from={config['out_dir']} and a different --out_dir"
        problem = f"n_expert is {config['n_expert']}, but the checkpoint's is {fitted['n_expert']}"
        raise ValueError(f"{problem}: {advice}")
    return fitted | {name: config[name] for name in ("n_expert", "n_expert_active")}


# ------------------------------------------------------------------------------------------------------------
# sample.py


def problem_of_samples(c: Plan) -> str:
    """Return why no process can write samples by itself with this layout; '' if rank 0 can."""
    divided = [f"zero {c.zero}"] if c.zero >= 2 else []
    divided += [f"{name} {getattr(c, name)}" for name in ("tp", "pp", "ep") if getattr(c, name) > 1]
    if not divided:
        return ""
    return (
        f"sample_interval needs the whole model on one process, but {', '.join(divided)} divides it, so no "
        "samples are written. Run sample.py on a checkpoint"
    )


def check_sampling(config: dict) -> None:
    """
    Check where sample.py's settings take the model from.

    Raises:
        ValueError: init_from names no model.
    """
    init_from = config["init_from"]
    if os.path.isfile(init_from):
        folder = os.path.dirname(init_from) or "."
        raise ValueError(
            f"init_from {init_from} is a file: set --out_dir={folder} for a run's ckpt.pt in this folder, or "
            f"--init_from={folder} for a model of transformers"
        )
    if init_from not in ("resume", *GPT2) and not is_url(init_from) and not os.path.isdir(init_from):
        raise ValueError(
            f"init_from is {init_from!r}; choose from resume (a run in out_dir), gpt2[-medium|-large|-xl], a "
            "folder of Hugging Face weights, or the URL of a run's mirror"
        )


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
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"--start={start} must name a file of text in UTF-8: {e}") from e
