"""Restore a model, its optimizers and the state of the slow network from a checkpoint, on any layout."""

import torch
import torch.nn as nn
from torch import Tensor

from isogpt.checkpoint.source import OpenCheckpoint
from isogpt.common.files import reason_of
from isogpt.parallel.data import reshard
from isogpt.parallel.local_parts import LocalPart, local_part_of, local_parts_by_name, splits_of
from isogpt.parallel.slow_network import SlowNetwork
from isogpt.training import optimizer_state

WPE = "transformer.wpe.weight"  # the only parameter whose shape may change on a resume: a shorter context


def restore_checkpoint(
    source: OpenCheckpoint,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer] | None = None,
    seed: int = 0,
    island: tuple[int, int] = (0, 1),
) -> None:
    """
    Copy a checkpoint into a model, and into its optimizers if given, on any layout. Each rank reads what it
    holds, and ranks do not communicate. Position embeddings are cut if the model uses fewer. MLPs are copied
    to experts if the model contains experts; `seed` then determines the routers' weights.

    Args:
        island: (this rank's island, number of islands); islands have separate optimizer state.

    Raises:
        ValueError: the checkpoint does not fit, or a file cannot be read or would run code.
    """
    reshard(model)
    saved_by = source.run["config"].get("optimizer", "adamw")
    if optimizers and saved_by != optimizer_state.kind_of(optimizers):
        advice = f"set --optimizer={saved_by}, or start a new run from the weights with --init_from=FOLDER"
        raise ValueError(f"{source.found.path} was saved with optimizer {saved_by!r}: {advice}")
    state = state_parts(model, optimizers, island) if optimizers else {}
    if source.weights is None:
        restore_shards(source, model, state, seed)
    else:
        try:
            load_weights(model, source.weights, seed)
        except (KeyError, RuntimeError) as e:
            raise ValueError(f"{source.found.path} does not fit the model: {reason_of(e)[:200]}") from e
        restore_moments(source, state)


def restore_moments(source: OpenCheckpoint, state: dict[str, dict[str, LocalPart]]) -> None:
    """Copy a ckpt.pt's optimizer state into the parts that this rank holds, see `restore_checkpoint`."""
    try:
        for name, saved in source.optimizer.items():
            for key, target in state.get(name, {}).items():
                whole = torch.as_tensor(saved[key], dtype=torch.float32)
                target = target.unstacked()  # the state is the same on all islands
                target.put(adapt(whole, target, name))
    except (KeyError, RuntimeError) as e:
        problem = " ".join(str(e).split())[:200]
        raise ValueError(
            f"the optimizer's state in {source.found.path} does not fit the weights ({problem}), which "
            "nanoGPT numbered differently before May 2023: start a new run from the weights, with "
            "--init_from=FOLDER and a different --out_dir"
        ) from e


def load_weights(model: nn.Module, weights: dict[str, Tensor], seed: int = 0) -> None:
    """Copy full tensors by parameter name into a model on any layout, see `restore_checkpoint`."""
    targets = local_parts_by_name(model)
    if not any(".router." in name for name in weights):
        init_routers(model, targets, seed)
    for name, target in targets.items():
        dense_name = name.replace(".experts.", ".")
        target.put(adapt(weights[name if name in weights else dense_name], target, name))


def init_routers(model: nn.Module, targets: dict[str, LocalPart], seed: int) -> None:
    """
    Initialize the routers of a model whose other weights come from a dense model. The routers are removed
    from `targets`.
    """
    for name in [name for name in targets if ".router." in name]:
        target = targets.pop(name)
        target.put(model.initial_weight(name, target.shape, seed))


def adapt(saved: Tensor, target: LocalPart, name: str) -> Tensor:
    """
    Give a saved tensor the target's shape: fewer position embeddings, or a copy of an MLP for each expert.
    """
    if name == WPE and target.shape:
        return saved[: target.shape[0]]
    if ".experts." in name and target.shape:
        return saved.repeat(target.shape[0] // saved.shape[0], *(1,) * (saved.dim() - 1))
    return saved


def state_parts(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], island: tuple[int, int] = (0, 1)
) -> dict[str, dict[str, LocalPart]]:
    """
    The parts of the optimizers' tensors that this rank holds, by parameter name: see
    optimizer_state.state_by_name. With several islands, the parts are rows of a stack.
    """
    splits = {name: splits_of(p) for name, p in model.named_parameters()}
    return {
        name: {key: local_part_of(value, splits[name]).in_row(*island) for key, value in tensors.items()}
        for name, tensors in optimizer_state.state_by_name(model, optimizers).items()
    }


def read_slow_network(source: OpenCheckpoint, slow_network: SlowNetwork, step: int) -> None:
    """
    Continue with a checkpoint's errors of compression and state of the islands, after `restore_checkpoint`.
    What the checkpoint lacks starts again; on a different number of ranks, each rank starts with the mean.
    `slow_network.resume` then sends again what islands were sending.
    """
    if source.weights is not None:  # a ckpt.pt does not contain this state
        slow_network.restart(step)
        return
    from isogpt.checkpoint import sharded_files

    slow_network.restart(
        step, sharded_files.shapes(source.found.path), source.run["isogpt"].get("averaged_at")
    )
    read_shards(source, {}, slow_network.saved_parts(), is_optional=True)


def restore_shards(
    source: OpenCheckpoint, model: nn.Module, state: dict[str, dict[str, LocalPart]], seed: int
) -> None:
    """
    Restore from shards: torch.distributed.checkpoint reads the parts that overlap with this rank's parts.
    """
    args, weights = source.run["model_args"], local_parts_by_name(model)
    length, adapted = (
        args["block_size"],
        [],
    )  # (name, this rank's part, a whole tensor of the saved shape to read into)
    state = {name: dict(parts) for name, parts in state.items()}
    moments = state.get(WPE, {})  # with zero 1 a different rank may hold the moments
    for parts, key in ((weights, WPE), (moments, "exp_avg"), (moments, "exp_avg_sq")):
        if key in parts and parts[key].unstacked().shape[0] != length:
            target = parts[key].unstacked()
            adapted.append((WPE, target, torch.empty(length, *target.shape[1:])))
            parts[key] = local_part_of(adapted[-1][2])
    if model.config.n_expert and not args.get("n_expert"):
        init_routers(model, weights, seed)
        for name in [name for name in weights if ".experts." in name]:
            target = weights.pop(name)
            adapted.append(
                (name, target, torch.empty(target.shape[0] // model.config.n_expert, *target.shape[1:]))
            )
            weights[name.replace(".experts.", ".")] = local_part_of(adapted[-1][2])
    read_shards(source, weights, state)
    for name, target, whole in adapted:
        target.put(adapt(whole, target, name))


def read_shards(source: OpenCheckpoint, *arguments: object, **options: object) -> None:
    """sharded_files.read from a checkpoint. Raises ValueError if it cannot be loaded."""
    from isogpt.checkpoint import sharded_files

    found = source.found
    try:
        sharded_files.read(
            found.path, *arguments, manifest=None if found.is_verified else found.manifest, **options
        )
    except sharded_files.ERRORS as e:  # damaged files raise nearly anything
        raise ValueError(f"{source.found.path} cannot be loaded: {reason_of(e)[:300]}") from e
