"""What a validation loss measures, and which losses can be compared."""

import math

NONE = -1  # best_step if the checkpoint of the best loss is not on the disk


def best_step_of(run: dict) -> int:
    """
    The step of the checkpoint with best_val_loss, as a checkpoint records it; NONE if this checkpoint is not
    on the disk. In nanoGPT's checkpoints, best_val_loss is the loss of the checkpoint itself, since nanoGPT
    saves where it evaluates. The recorded step shows if a fork saved at a different step.
    """
    ours = run.get("isogpt", {})
    if "best_step" in ours:
        return ours["best_step"]
    interval = run["config"].get("eval_interval")
    was_evaluated = not isinstance(interval, int) or interval < 1 or run["iter_num"] % interval == 0
    return run["iter_num"] if was_evaluated and math.isfinite(run["best_val_loss"]) else NONE


def measures_of(run: dict) -> dict:
    """What determined a checkpoint's validation losses, see `what_is_measured`."""
    return run.get("isogpt", {}).get("measures") or what_is_measured(run["config"])


def what_is_measured(config: dict, digest: str | None = None) -> dict:
    """
    What determines the value of a validation loss; None for what is not known. Losses are compared only if
    all of this is equal. The number of processes and their micro-batch are not part of it.
    """
    settings = {name: config.get(name) for name in ("dataset", "block_size", "seed")}
    counts = [config.get(name) for name in ("eval_iters", "batch_size")]
    sequences = math.prod(counts) if all(isinstance(n, int) for n in counts) else None
    return settings | {"digest": digest, "sequences": sequences}


def changed_measures(before: dict, now: dict) -> list[str]:
    """
    A phrase for each difference between two results of `what_is_measured`. A field that one result lacks does
    not count.
    """
    both = {name for name in now if now[name] is not None and before.get(name) is not None}
    names = ["digest" if "digest" in both else "dataset", "block_size", "sequences", "seed"]
    changed = [name for name in names if name in both and before[name] != now[name]]
    phrases = {name: f"{name} is {now[name]}, not {before.get(name)}" for name in changed}
    if "digest" in changed:
        is_renamed = before.get("dataset") != now["dataset"]
        phrases["digest"] = f"dataset is {now['dataset']}, not {before.get('dataset')}"
        if not is_renamed:
            phrases["digest"] = f"the files of dataset {now['dataset']} are different"
    if "sequences" in changed:
        phrases["sequences"] = f"eval_iters * batch_size is {now['sequences']}, not {before['sequences']}"
    return list(phrases.values())
