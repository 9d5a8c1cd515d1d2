"""Compare the weights of ranks that hold the same parameters."""

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Callable
from statistics import mode

import torch
from torch import nn

from isogpt.common.console import ranks_text, shortened
from isogpt.launch.together import exit_together, gather_objects
from isogpt.parallel.local_parts import local_part_of, local_parts_by_name, splits_of, whole_tensors
from isogpt.parallel.mesh import AXES, Mesh

DIGITS = 12  # of a digest that people compare


def check_equal_weights(model: nn.Module, mesh: Mesh, step: int, on_error: Callable, cause: str = "") -> None:
    """
    Compare the weights of the ranks of an island that hold the same parts of parameters, and exit with a
    message if some differ (all ranks). Each rank sends one digest; only if digests differ, checksums of all
    parts are compared.

    Args:
        cause: the probable one, for the message.
    """
    checksums = checksums_of_parts(model, mesh)
    digests = {holders: zlib.crc32(repr(parts).encode()) for holders, parts in checksums.items()}
    if not different_ranks(gather_objects(digests)):
        return
    parts = {(*holders, *key): n for holders, parts in checksums.items() for key, n in parts.items()}
    by_name = defaultdict(set)
    for (_, _, name, _), ranks in different_ranks(gather_objects(parts)).items():
        by_name[name].update(ranks)
    texts = [f"{name} differs on {ranks_text(sorted(ranks))}" for name, ranks in by_name.items()]
    with exit_together(on_error):
        differences = shortened(texts, between="; ")
        raise ValueError(f"step {step}: weights differ across ranks: {differences}{cause}")


@torch.no_grad()
def checksums_of_parts(model: nn.Module, mesh: Mesh) -> dict[tuple, dict[tuple, int]]:
    """
    Return checksums of the parts of parameters that several ranks of an island hold: {(axes of the mesh along
    which other ranks hold other parts, this rank's place there): {(name, offsets): checksum}}.
    """
    keys, sums = [], []
    for name, p in model.named_parameters():
        holders = mesh.holders(p).without("islands")
        if holders.size > 1:
            others = tuple(axis for axis in AXES if axis not in holders.axes)
            for offsets, piece in local_part_of(p.detach(), splits_of(p)).pieces:
                keys.append(((others, mesh.index(*others)), (name, offsets)))
                # in int32, which overflows: int64 took six times as long on a CPU
                sums.append(piece.float().flatten().view(torch.int32).sum(dtype=torch.int32))
    checksums = defaultdict(dict)
    values = torch.stack(sums).tolist() if sums else []  # a single copy from the device
    for (holders, part), value in zip(keys, values, strict=True):
        checksums[holders][part] = value
    return checksums


def different_ranks(by_rank: list[dict]) -> dict[tuple, list[int]]:
    """Return the ranks whose value of a key is not the one that most ranks have: {key: ranks}."""
    of_key = defaultdict(dict)  # {key: {rank: value}}
    for rank, theirs in enumerate(by_rank):
        for key, value in theirs.items():
            of_key[key][rank] = value
    usual = {key: mode(values.values()) for key, values in of_key.items()}
    different = {key: [r for r, v in values.items() if v != usual[key]] for key, values in of_key.items()}
    return {key: ranks for key, ranks in different.items() if ranks}


@torch.no_grad()
def weights_digest(model: nn.Module, mesh: Mesh) -> str:
    """
    Return the first digits of the SHA-256 of the weights, the same on any layout (all ranks). It is the
    digest of the parameters' digests, which the ranks that hold a parameter divide among themselves.
    """
    number, copies = mesh.loss.index, mesh.loss.size
    shards, device = mesh.shards.group, next(model.parameters()).device
    mine = {}
    for i, (name, part) in enumerate(local_parts_by_name(model).items()):
        is_mine = i % copies == number
        if shards or is_mine:
            whole = whole_tensors([part], shards, device)  # (1, *shape)
        if is_mine:
            whole = whole.add_(0.0)  # -0 becomes 0, as in the sum over shards
            mine[name] = hashlib.sha256(whole.cpu().numpy()).hexdigest()
    digests = {name: digest for theirs in gather_objects(mine) for name, digest in theirs.items()}
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()[:DIGITS]
