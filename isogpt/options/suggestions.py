"""Which setting was meant by a name that is not one: names in other tools, and misspellings."""

import difflib
from collections.abc import Mapping

from isogpt.options.values import Setting

# what everyone types who comes from transformers, Lightning, torchtitan or nanochat. docs/migrating.md lists
# more names, with their values
OTHER_NAMES = {
    "bf16": "dtype",
    "fp16": "dtype",
    "world_size": "nproc",
    "num_gpus": "nproc",
    "resume": "init_from",
    "bs": "batch_size",
    "grad_accum_steps": "gradient_accumulation_steps",
    "seq_len": "block_size",
    "gradient_checkpointing": "activation_checkpointing",
    "hidden_size": "n_embd",
    "lr": "learning_rate",
    "steps": "max_iters",
    "max_steps": "max_iters",
    "epochs": "max_epochs",
    "max_grad_norm": "grad_clip",
}
SIMILAR = 0.75  # at most 1; two letters that are swapped in a name of four give 0.75


def nearest(name: str, settings: Mapping[str, Setting]) -> str:
    """
    The setting that was probably meant by `name`, or SETTING=False for no_SETTING; "" if none is similar.
    Sections before a dot are left out, as in torchtitan's training.steps.
    """
    name = name.lower().replace("-", "_").rpartition(".")[2]
    if name in settings:
        return name
    negated = name.removeprefix("no_")
    if negated in settings and settings[negated].kind is bool:
        return f"{negated}=False"
    if OTHER_NAMES.get(name) in settings:
        return OTHER_NAMES[name]
    return next(iter(difflib.get_close_matches(name, settings, 1, SIMILAR)), "")
