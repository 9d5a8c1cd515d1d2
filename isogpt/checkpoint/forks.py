"""Fields and names in the checkpoints of nanoGPT and its forks."""

from pathlib import Path

from isogpt.common.console import shortened

MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")  # required in model_args
# names of modules that wrap others: from torch.compile, DataParallel and DDP, FSDP, activation checkpointing,
# DeepSpeed
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
# fields of forks in model_args that concern speed, memory or training, but not what the model computes
HARMLESS = {"compile", "device", "dtype", "flash", "flash_attn", "gradient_checkpointing", "seed"}


def without_wrappers(name: str) -> str:
    """A parameter's name without the names of modules that wrap others."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def nanogpt_args(path: Path, saved: object) -> dict:
    """
    Return nanoGPT's fields of the model_args in a ckpt.pt.

    Raises:
        ValueError: a field is missing, or there is a field of a fork that may change what the model computes.
    """
    # before February 2023, nanoGPT had no setting bias, and its models always had biases
    saved = {"bias": True, **saved} if isinstance(saved, dict) else {}
    absent = [name for name in MODEL_ARGS if name not in saved]
    if absent:
        raise ValueError(f"{path}: model_args lacks {', '.join(absent)}")
    args = {name: whole_number(path, name, saved[name]) for name in MODEL_ARGS}
    args |= {"bias": bool(args["bias"]), "dropout": saved.get("dropout") or 0.0}
    others = [f"{name}={saved[name]!r}" for name in saved if name not in args and name not in HARMLESS]
    if others:
        raise ValueError(
            f"{path}: nanoGPT's model does not know {shortened(others)} in model_args: load it with the "
            "program that saved it, or delete those of them that change no result"
        )
    return args


def whole_number(path: Path, name: str, value: object) -> int:
    """A size in model_args, which may be stored as a float. Raises ValueError if it is something else."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise ValueError(f"{path}: {name} in model_args is {value!r}, not a whole number")
