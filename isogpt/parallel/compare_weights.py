"""Compare the weights of ranks that hold the same parameters."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from torch import nn

from isogpt.common import console
from isogpt.launch.together import add_together, exit_together, gather_objects
from isogpt.parallel.gradients import is_tied_over_ranks
from isogpt.parallel.local_parts import local_parts_by_name, whole_tensors
from isogpt.parallel.mesh import Mesh

TERM = 2**40  # terms are smaller, so that the sum over millions of ranks fits into 64 bits
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
    Compare a checksum of the weights between ranks of an island that hold the same parameters (all ranks).
    Returns which parameter differs on which rank; '' if none. All checksums are gathered only if some differ.
    """
    island = mesh.index("islands")
    pieces = [(name, *piece) for name, part in local_parts_by_name(model).items() for piece in part.pieces]
    sums = [piece.contiguous().view(torch.int32).sum(dtype=torch.int64) for _, _, piece in pieces]
    sums = torch.stack(sums).tolist() if sums else []  # a single copy from the device
    mine = {(name, offsets, island): value for (name, offsets, _), value in zip(pieces, sums, strict=True)}
    (terms,) = add_together(term_of_comparison(model, mesh, mine))
    if terms % TERM == 0:
        return ""
    checksums = defaultdict(dict)  # {(name, offsets, island): {rank: checksum}}
    for rank, theirs in enumerate(gather_objects(mine)):
        for key, value in theirs.items():
            checksums[key][rank] = value
    wrong = defaultdict(set)
    for (name, *_), by_rank in checksums.items():
        ((usual, _),) = Counter(by_rank.values()).most_common(1)
        wrong[name] |= {rank for rank, value in by_rank.items() if value != usual}
    texts = [
        f"{name} differs on {console.ranks_text(sorted(ranks))}" for name, ranks in wrong.items() if ranks
    ]
    return console.shortened(texts, between="; ")


def term_of_comparison(model: nn.Module, mesh: Mesh, checksums: dict[tuple, int]) -> int:
    """
    Return this rank's term of a sum over all ranks. The sum is a multiple of TERM if all holders of each
    parameter have the same checksum, and almost never otherwise: holder i multiplies its checksum by a random
    number for i minus that for i + 1, and these differences add up to zero.
    """
    params, term = dict(model.named_parameters()), 0
    for key, checksum in checksums.items():
        p = params[key[0]]
        holders = mesh.holders(p).without("islands")
        index, size = holders.index, holders.size
        if mesh.pp > 1 and p is getattr(model.lm_head, "weight", None) and is_tied_over_ranks(model):
            index, size = index + (size if mesh.index("pp") else 0), 2 * size  # in two stages
        term += checksum * (random_factor(key, index) - random_factor(key, (index + 1) % size))
    return term % TERM


def random_factor(key: tuple, index: int) -> int:
    """A number that looks random, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(f"{key} {index}".encode(), digest_size=8).digest(), "little")


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
