"""Verify the checkpoint that a run starts from, on all ranks at once: each file is read by one of them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from isogpt.checkpoint.manifest import damaged_file
from isogpt.checkpoint.search import (
    StoredCheckpoint,
    best_checkpoint,
    is_here,
    newest_checkpoint,
    place_of,
    share_checkpoint,
    where,
)
from isogpt.launch.together import broadcast, do_together, exit_together, gather_objects, is_main, own_rank

OF_ONE_RANK = re.compile(r"__(\d{1,9})_.+")  # a file of shards, with the number of the rank that wrote it


def find_together(
    out_dir: str, best: bool = False, on_error: Callable[[str], object] | None = None
) -> tuple[StoredCheckpoint | None, list[str]]:
    """
    Find and verify a run's newest checkpoint, or its best one, and share it (all ranks; rank 0 looks). Exits
    as `verify_together` does.

    Returns:
        (the checkpoint or None, on rank 0 a sentence for each checkpoint that is damaged)
    """
    known, is_intact = {}, False
    while not is_intact:
        found, reports = do_together(look_in, out_dir, best, known, on_error=on_error)
        stored, is_intact = verify_together(share_checkpoint(found, out_dir), known, on_error)
    return stored, reports


def look_in(out_dir: str, best: bool, known: dict[Path, str]) -> tuple[StoredCheckpoint | None, list[str]]:
    """Rank 0's part of `find_together`: what may be the checkpoint, if it is intact."""
    if not is_main():
        return None, []
    return best_checkpoint(out_dir, known) if best else newest_checkpoint(out_dir, known=known)


def verify_together(
    stored: StoredCheckpoint | None, known: dict[Path, str], on_error: Callable[[str], object] | None = None
) -> tuple[StoredCheckpoint | None, bool]:
    """
    Verify a checkpoint that rank 0 has found and `share_checkpoint` has shared (all ranks). Exits with a
    message if a copy is damaged although what rank 0 sees is not, or if a file cannot be read, but may be
    intact.

    Args:
        known: gets what is wrong with the checkpoint, on rank 0, which then looks for an older one.
        on_error: as in exit_together.

    Returns:
        (the checkpoint, with what this rank still has to verify when it reads it; whether it is intact). None
        counts as intact.
    """
    if not stored:
        return None, True
    files, places = stored.manifest["files"], gather_objects(place_of(stored.path))
    readers = readers_of(files, places)
    mine = [name for name, ranks in readers.items() if own_rank() in ranks]
    # a copy of a different checkpoint is reported by check_same, when the checkpoint is opened
    names = mine if stored.is_original or is_here(stored) else []
    problems = do_together(problems_in, stored, names, on_error=on_error)
    damaged = {name for theirs in gather_objects(problems) for name in theirs}
    if damaged:  # on a machine that may have a copy: rank 0 looks at what it sees itself
        confirmed = do_together(problems_in, stored, sorted(damaged) if is_main() else [], on_error=on_error)
        if problem := broadcast(next(iter(confirmed.values()), "")):
            known[stored.folder] = problem
            return stored, False
    with exit_together(on_error):
        if problems:
            raise ValueError(
                f"{where(stored)} is damaged, or not the checkpoint that rank 0 found: "
                f"{next(iter(problems.values()))}. Copy it from rank 0's machine again"
            )
    seen = {name: {places[rank] for rank in ranks} for name, ranks in readers.items()}
    unverified = {name: entry for name, entry in files.items() if places[own_rank()] not in seen[name]}
    return replace(stored, unverified=unverified), True


def readers_of(files: Iterable[str], places: list[str]) -> dict[str, list[int]]:
    """
    The ranks that verify each file: for a file of shards, the rank with the number of the one that wrote it,
    because on the same layout it also loads it; for a file that all ranks read, the first rank in each place.

    Args:
        places: where each rank sees the files, see `place_of`.
    """
    firsts = {}
    for rank, place in enumerate(places):
        firsts.setdefault(place, rank)
    readers = {}
    for name in files:
        writer = OF_ONE_RANK.fullmatch(name)
        readers[name] = [int(writer[1]) % len(places)] if writer else [*firsts.values()]
    return readers


def problems_in(stored: StoredCheckpoint, names: Iterable[str]) -> dict[str, str]:
    """
    What is wrong with these files of a checkpoint, by name: {} if their checksums match. Raises ValueError if
    a file cannot be read, but may be intact.
    """
    problems = {name: damaged_file(stored.folder / name, stored.manifest["files"]) for name in names}
    return {name: problem for name, problem in problems.items() if problem}
