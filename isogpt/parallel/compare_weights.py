"""Compare the weights of ranks that hold the same parameters."""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from statistics import mode

import torch
from torch import nn

from isogpt.common.console import ranks_text, shortened
from isogpt.launch.together import exit_together, gather_objects
from isogpt.parallel.local_parts import local_parts_by_name, whole_tensors
from isogpt.parallel.mesh import Mesh

DIGITS = 12  # of a digest that people compare


@torch.no_grad()
def check_equal_weights(model: nn.Module, mesh: Mesh, step: int, on_error: Callable) -> None:
    """
    Compare checksums of the weights between ranks of an island that hold the same parameters, and exit with a
    message if some differ (all ranks).
    """
    checksums, island = {}, mesh.index("islands")
    for name, part in local_parts_by_name(model).items():
        for offsets, piece in part.pieces:
            bits = piece.contiguous().view(torch.int32)
            checksums[name, offsets, island] = bits.sum(dtype=torch.int64)
    values = torch.stack(list(checksums.values())).tolist()  # a single copy from the device
    by_rank = defaultdict(dict)  # {key: {rank: checksum}}
    for rank, theirs in enumerate(gather_objects(dict(zip(checksums, values, strict=True)))):
        for key, checksum in theirs.items():
            by_rank[key][rank] = checksum
    wrong = defaultdict(set)  # {name: ranks}
    for (name, *_), of_ranks in by_rank.items():
        usual = mode(of_ranks.values())
        wrong[name] |= {rank for rank, checksum in of_ranks.items() if checksum != usual}
    texts = [f"{name} differs on {ranks_text(sorted(ranks))}" for name, ranks in wrong.items() if ranks]
    with exit_together(on_error):
        if texts:
            differences = shortened(texts, between="; ")
            raise ValueError(f"step {step}: weights differ across ranks: {differences}")


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
