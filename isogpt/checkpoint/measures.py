"""What a validation loss measures, and which losses can be compared."""

import math

NONE = -1  # best_step if the checkpoint of the best loss is not on the disk
# fields of `what_is_measured`, as a user knows them
LABELS = {"digest": "the digest of the data", "sequences": "eval_iters * batch_size"}


def best_step_of(run: dict) -> int:
    """
    The step of the checkpoint with best_val_loss, as a checkpoint records it; NONE if this checkpoint is not
    on the disk. In nanoGPT's checkpoints, best_val_loss is the loss of the checkpoint itself.
    """
    default = run["iter_num"] if math.isfinite(run["best_val_loss"]) else NONE
    return run.get("isogpt", {}).get("best_step", default)


def measures_of(run: dict) -> dict:
    """What determined a checkpoint's validation losses, see `what_is_measured`."""
    return run.get("isogpt", {}).get("measures") or what_is_measured(run["config"])


def what_is_measured(config: dict, digest: str | None = None, bytes_per_token: float | None = None) -> dict:
    """
    What determines the value of a validation loss; None for what is not known. Losses are compared only if
    all of this is equal. The number of processes and their micro-batch are not part of it. The whole split
    does not depend on the seed.
    """
    measures = {name: config.get(name) for name in ("dataset", "block_size", "seed")}
    measures |= {"digest": digest, "sequences": None}
    measures["bytes_per_token"] = bytes_per_token
    counts = [config.get(name) for name in ("eval_iters", "batch_size")]
    if None not in counts:
        measures["sequences"] = math.prod(counts)
    if measures["sequences"] == 0:
        measures["seed"] = None
    return measures


def changed_measures(before: dict, now: dict) -> list[str]:
    """
    A phrase for each difference between two results of `what_is_measured`. A field that one result lacks does
    not count, and a data set may be renamed.
    """
    known = {name: was for name, was in before.items() if None not in (was, now.get(name))}
    if "digest" in known:
        known.pop("dataset", None)
    changes = []
    for name, was in known.items():
        if was != now[name]:
            label = LABELS.get(name, name)
            changes.append(f"{label} is {now[name]}, not {was}")
    return changes
