"""Compare the weights of ranks that hold the same parameters."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from torch import nn

from isogpt.common.console import ranks_text, shortened
from isogpt.launch.together import exit_together, gather_objects
from isogpt.parallel.local_parts import local_parts_by_name, whole_tensors
from isogpt.parallel.mesh import Mesh

DIGITS = 12  # of a digest that people compare


def check_equal_weights(model: nn.Module, mesh: Mesh, step: int, on_error: Callable) -> None:
    """
    Compare the weights of ranks that hold the same parameters, and exit with a message if they differ (all
    ranks).
    """
    differences = weight_differences(model, mesh)
    with exit_together(on_error):
        if differences:
            raise ValueError(f"step {step}: weights differ across ranks: {differences}")


@torch.no_grad()
def weight_differences(model: nn.Module, mesh: Mesh) -> str:
    """
    Compare checksums of the weights between ranks of an island that hold the same parameters (all ranks).
    Returns which parameter differs on which rank; '' if none.
    """
    keys, sums = [], []
    for name, part in local_parts_by_name(model).items():
        for offsets, piece in part.pieces:
            keys.append((name, offsets, mesh.index("islands")))
            sums.append(piece.contiguous().view(torch.int32).sum(dtype=torch.int64))
    values = torch.stack(sums).tolist() if sums else []  # a single copy from the device
    by_rank = defaultdict(dict)  # {key: {rank: checksum}}
    for rank, checksums in enumerate(gather_objects(dict(zip(keys, values, strict=True)))):
        for key, checksum in checksums.items():
            by_rank[key][rank] = checksum
    wrong = defaultdict(set)
    for (name, *_), checksums in by_rank.items():
        ((usual, _),) = Counter(checksums.values()).most_common(1)
        wrong[name] |= {rank for rank, checksum in checksums.items() if checksum != usual}
    texts = [f"{name} differs on {ranks_text(sorted(ranks))}" for name, ranks in wrong.items() if ranks]
    return shortened(texts, between="; ")


@torch.no_grad()
def weights_digest(model: nn.Module, mesh: Mesh) -> str:
    """
    Return the first digits of the SHA-256 of the weights, the same on any layout (all ranks). It is the
    digest of the parameters' digests, which the ranks that hold a parameter divide among themselves.
    """
    number, copies = mesh.loss.index, mesh.loss.size
    shards = mesh.shards.group
    mine = {}
    for i, (name, part) in enumerate(local_parts_by_name(model).items()):
        if not shards and i % copies != number:
            continue
        whole = whole_tensors([part], shards, next(model.parameters()).device)  # (1, *shape)
        if i % copies == number:
            whole = whole.add_(0.0)  # -0 becomes 0, as in the sum over shards
            mine[name] = hashlib.sha256(whole.cpu().numpy()).hexdigest()
    digests = {name: digest for theirs in gather_objects(mine) for name, digest in theirs.items()}
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()[:DIGITS]
