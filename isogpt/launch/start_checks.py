"""Checks at the start that all ranks use the same code, settings, data and versions of packages."""

import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from isogpt.common.files import REPOSITORY
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.launch.together import exit_together, gather_objects
from isogpt.options.values import without_credentials

# scripts that train nothing, and the rooms that only they use
OTHERS = ("bench.py", "compare.py", "export.py", "sweep.py", "isogpt/lab/*.py", "tests/**/*.py")
FOLDER = str(Path(__file__).parents[2]) + os.sep  # REPOSITORY as modules name it: perhaps by a link
# paths may differ between machines; a run's name for wandb, too, since it may contain the time
MAY_DIFFER = ("out_dir", "dataset", "eval_datasets", "alert_command")


def check_start(ranks: Ranks, config: dict) -> str:
    """
    Exit with a message if the ranks were started differently or an all-reduce gives a wrong sum (all ranks).
    Returns the digest of the code.
    """
    n = ranks.world_size
    facts = gather_objects(start_facts(config))
    total = torch.ones((), device=ranks.device)
    if n > 1:
        dist.all_reduce(total)
    with exit_together():
        check_alike(facts, rank_names(ranks.hosts))
        if total.item() != n:
            problem = f"an all-reduce over {n} ranks returned {total.item()}"
            raise ValueError(f"{problem}: the network is faulty")
    return facts[0]["the code's digest"]


def start_facts(config: dict) -> dict:
    """Return what should be the same on all ranks: settings, code, torch, and what weights are read."""
    facts = config | {
        "torch": torch.__version__,
        "the code's digest": code_digest(config.get("optimizer", "")),
        "init_from": without_credentials(config.get("init_from", "")),
        "mirror": bool(config.get("mirror")),  # only rank 0 copies
    }
    weights = Path(facts["init_from"].removeprefix("auto:"))
    if weights.exists():  # under a path that may differ; search.verify compares runs
        files = sorted(weights.glob("model*"))
        facts["init_from"] = [(path.name, path.stat().st_size) for path in files]
    return facts


def code_digest(optimizer: str) -> str:
    """
    Return the digest of the code that trains: this repository's, with all modules that have been loaded from
    its folder, and the file of a user's optimizer (the setting `optimizer`).
    """
    sources = {*REPOSITORY.glob("*.py"), *REPOSITORY.glob("isogpt/**/*.py"), *loaded_files()}
    for pattern in OTHERS:
        sources -= {*REPOSITORY.glob(pattern)}
    file, _, _ = optimizer.removeprefix("muon+").rpartition(":")
    ordered = sorted(sources)
    if file:
        ordered.append(Path(file).expanduser())
    return f"{zlib.crc32(b''.join(path.read_bytes() for path in ordered)):08x}"


def loaded_files() -> set[Path]:
    """
    Return the files of the loaded modules in the repository's folder, such as layers of model.py in a folder
    of their own, without those of Python and of packages if they are installed in this folder too.
    """
    names = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    files = {Path(name) for name in names if name.startswith(FOLDER)}
    if sys.prefix.startswith(FOLDER):
        files = {path for path in files if not path.is_relative_to(sys.prefix)}
    return {REPOSITORY / path.relative_to(FOLDER) for path in files if path.is_file()}


def check_alike(facts: list[dict], names: Sequence[str]) -> None:
    """
    Compare the start_facts of all ranks: with different facts, they would train weights that drift apart.

    Args:
        names: of the ranks, for the message.

    Raises:
        ValueError: the facts differ.
    """
    for name, others in zip(names, facts, strict=True):
        for fact, value in facts[0].items():
            if fact in MAY_DIFFER or fact.startswith("wandb"):
                continue
            other = others.get(fact)
            if other != value:
                what = f"{fact} is {value!r} on {names[0]}, {other!r} on {name}"
                raise ValueError(f"the ranks were started with different settings: {what}")
