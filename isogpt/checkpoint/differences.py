"""Differences between the settings of a run and the settings of the checkpoint that the run starts from."""

from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.training.settings import settings_of_model

# settings that change the updates of the weights. max_iters alone does not: it continues a run
OF_UPDATES = (
    *("optimizer", "learning_rate", "weight_decay", "beta1", "beta2", "muon_lr", "embedding_lr"),
    *("muon_momentum", "grad_clip", "dropout", "lr_scaling", "base_batch"),
    *("decay_lr", "lr_schedule", "warmup_iters", "lr_decay_iters", "cooldown_iters", "min_lr"),
)


def differences(
    config: dict, model_args: dict, source: OpenCheckpoint | None, is_resume: bool = False
) -> list[str]:
    """
    Describe settings that differ from the model's or the checkpoint's, a sentence for each.

    Args:
        model_args: the fields of GPTConfig of the model that the run starts with.
        source: the checkpoint that contains the model, if there is one.
    """
    found, model = [], settings_of_model(model_args)
    ignored = [
        name for name in ("arch", "n_layer", "n_head", "n_embd", "bias") if config[name] != model[name]
    ]
    ignored += [
        name
        for name in ("n_kv_head", "n_hidden", "vocab_size", "head")
        if config[name] not in (0, "auto", model.get(name, config[name]))
    ]
    if model.get("n_expert") and config["n_expert_active"] != model["n_expert_active"]:
        ignored.append("n_expert_active")
    origin = "the checkpoint" if source else config["init_from"].removeprefix("auto:")
    if ignored:
        used, unused = (", ".join(f"{name} {values[name]}" for name in ignored) for values in (model, config))
        found.append(f"{used} of {origin} {'is' if len(ignored) == 1 else 'are'} used, not {unused}")
    if config["n_expert"] and not model.get("n_expert"):
        found.append(
            f"{origin} contains no experts: each of the {config['n_expert']} starts as a copy of the MLP"
        )
    before = source.run["config"].get("dataset", config["dataset"]) if source else config["dataset"]
    if before != config["dataset"]:
        found.append(f"the checkpoint was trained on data set {before}, this run reads {config['dataset']}")
    if is_resume:
        found += reading_differences(config, source) + update_differences(config, source)
    return found


def reading_differences(config: dict, source: OpenCheckpoint) -> list[str]:
    """Describe settings that change which sequences a resumed run reads, a sentence for each."""
    found, before = [], config | source.run["config"]
    was, now = (c["gradient_accumulation_steps"] * c["batch_size"] for c in (before, config))
    if was != now:
        found.append(
            f"the checkpoint's steps read {was} sequences, this run's read {now}: the loss curve changes"
        )
    names, effect = ["seed", "data_order"], "it draws different sequences"
    if "shuffle" in (before["data_order"], config["data_order"]):
        names.append("block_size")
        effect = "of this epoch, some sequences are read twice and some not at all"
    for name in names:
        if before[name] != config[name]:
            found.append(
                f"the checkpoint was trained with {name} {before[name]}, this run uses {config[name]}: "
                f"{effect}"
            )
    return found


def update_differences(config: dict, source: OpenCheckpoint) -> list[str]:
    """Describe settings that change the updates of a resumed run's weights, all in one sentence."""
    before = source.run["config"]
    changed = [name for name in OF_UPDATES if name in before and before[name] != config[name]]
    pairs = ", ".join(f"{name} {config[name]} (was {before[name]})" for name in changed)
    return [f"this run continues with {pairs}: the loss curve changes"] if changed else []
