"""Fields and names in the checkpoints of nanoGPT and its forks."""

import operator
import re
from contextlib import suppress
from pathlib import Path

from isogpt.nn.architecture import GPTConfig

MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")  # required in model_args
# names of modules that wrap others: from torch.compile, DataParallel and DDP, FSDP, activation checkpointing,
# DeepSpeed
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
# Fields of forks in model_args, by parts of their names. HARMLESS fields concern speed, memory, training or
# what nanoGPT's model contains anyway. CHANGING fields change what is computed, although names and shapes of
# the weights stay the same. Other fields change the weights, see check_weights.
HARMLESS = re.compile(
    r"flash|sdp|compile|checkpoint|fused|kernel|device|dtype|init|seed|batch|backend|drop|tie|tying"
)
CHANGING = re.compile(
    r"rope|rotary|alibi|pos|norm|eps|window|cap|act|glu|gelu|relu|scale|residual|parallel|attn"
)
NANOGPTS = ("none", "layernorm", "layer_norm", "gelu")  # values that say what nanoGPT's model computes


def without_wrappers(name: str) -> str:
    """A parameter's name without the names of modules that wrap others."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def nanogpt_args(path: Path, saved: object) -> tuple[dict, tuple[str, ...]]:
    """
    nanoGPT's fields of the model_args in a ckpt.pt.

    Returns:
        (the fields, sentences about fields of a fork that are not used)

    Raises:
        ValueError: a field is missing, or a fork's field changes the model.
    """
    args = {}
    for name in MODEL_ARGS:
        with suppress(TypeError, KeyError):  # numbers of numpy are also accepted
            args[name] = bool(saved[name]) if name == "bias" else operator.index(saved[name])
    absent = [name for name in MODEL_ARGS if name not in args]
    if absent:
        raise ValueError(f"{path}: model_args lacks {', '.join(absent)}")
    args["dropout"] = float(saved.get("dropout") or 0.0)
    default = GPTConfig(**args)
    others = {
        name: v for name, v in saved.items() if name not in args and v and v != getattr(default, name, None)
    }
    # a feature that is off makes the fields that begin with its name harmless
    off = tuple(f"{name.removeprefix('use_')}_" for name, v in saved.items() if v is False)
    others = {
        name: v for name, v in others.items() if not name.startswith(off) and str(v).lower() not in NANOGPTS
    }
    harmless = [name for name in others if HARMLESS.search(name.lower())]
    changing = [name for name in others if name not in harmless and CHANGING.search(name.lower())]
    if changing:
        found = some_of([f"{name}={others[name]!r}" for name in changing])
        raise ValueError(
            f"{path}: {found} in model_args changes the model, which is not nanoGPT's: load it with "
            f"the program that saved it"
        )
    notes = []
    for name, value in others.items():
        reason = "it does not change the model"
        if name not in harmless:  # nanoGPT also ignores the field
            reason = (
                "the weights fit nanoGPT's model, but if the setting changes what a model computes, as "
                "rope=True would, losses and samples are wrong"
            )
        notes.append(f"{name}={value!r} in model_args of {path} is not used: {reason}")
    return args, tuple(notes)


def some_of(names: list[str]) -> str:
    """The first names of a list, and how many there are in addition."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
