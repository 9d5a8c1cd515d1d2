"""What a model computes, as facts that can be compared, also where ranks hold parts of the results."""

import traceback
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from isogpt.launch.together import gather_objects, is_connection_lost
from isogpt.parallel.local_parts import LocalPart, Splits, local_part_of
from isogpt.parallel.pipeline import cause_of


class Fact(NamedTuple):
    """A result: a whole tensor or, where ranks divide the work, this rank's part of it."""

    value: Tensor
    limit: float = 0.0  # the largest norm of the difference that rounding makes
    splits: Splits = ()  # how tensor and expert parallelism have split the value


def fact(value: Tensor | float, relative: float = 0.0) -> Fact:
    """A whole result, which may differ by this fraction of its norm."""
    value = torch.as_tensor(value).detach()
    return Fact(value, relative * value.float().norm().item())


def first_difference(expected: dict[str, Fact], facts: dict[str, Fact]) -> str:
    """
    Compare facts of one process with this rank's (all ranks). Returns the first difference of any rank, in
    the order of the expected facts; "" if there is none.
    """
    order = list(expected)
    differences = {}
    if unknown := facts.keys() - expected.keys():
        differences[-1] = f"one process has no {min(unknown)}"
    for place, name in enumerate(order):
        if name in facts:
            part = local_part_of(facts[name].value, facts[name].splits)
            text = difference(part, expected[name])
            if text:
                differences[place] = f"{name} {text}"
    missing = {place for place, name in enumerate(order) if name not in facts}
    gathered = gather_objects((missing, min(differences.items(), default=None)))
    lost = set.intersection(*(missing for missing, _ in gathered))
    first = [difference for _, difference in gathered if difference]
    first += [(place, f"{order[place]} is on no rank") for place in lost]
    return min(first)[1] if first else ""


def difference(part: LocalPart, whole: Fact) -> str:
    """How far a rank's part is from the same part of a whole result; "" if rounding explains it."""
    squares = torch.zeros(3, dtype=torch.float64)
    for piece, values in part.cut(whole.value):
        piece, values = piece.cpu().double(), values.cpu().double()
        squares += torch.stack([t.square().sum() for t in (piece - values, piece, values)])
    error, norm, expected = squares.sqrt().tolist()
    if error <= whole.limit:
        return ""
    if not part.shape:  # a number
        return f"is {norm:.6f} instead of {expected:.6f}"
    return f"differs by {error:.1e} (its norm is {norm:.4e} instead of {expected:.4e})"


def crash_of(error: Exception) -> str:
    """The error that was raised first, and the last line of our code that led to it."""
    error = cause_of(error)
    reason = " ".join(str(error).split())[:300]
    if is_connection_lost(error):
        reason = "a different rank has failed, or communicates differently"
    text = f"{type(error).__name__}: {reason}".removesuffix(": ")
    root = Path(__file__).resolve().parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(root):
            return f"{text} ({Path(frame.filename).relative_to(root)}, line {frame.lineno})"
    return text
