"""Checks at the start that all ranks use the same code, settings, data and versions of packages."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from isogpt.common.files import REPOSITORY
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.launch.together import exit_together, gather_objects
from isogpt.options.values import without_credentials

# scripts that train nothing, and the room that only they use
OTHERS = ("bench.py", "compare.py", "export.py", "sweep.py", "isogpt/lab/*.py")
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
    sources = {*REPOSITORY.glob("*.py"), *REPOSITORY.glob("isogpt/**/*.py")}
    for pattern in OTHERS:
        sources -= {*REPOSITORY.glob(pattern)}
    sources = sorted(sources)
    file, _, _ = config.get("optimizer", "").removeprefix("muon+").rpartition(":")
    if file:  # of a user's class
        sources.append(Path(file).expanduser())
    code = b"".join(path.read_bytes() for path in sources)
    facts = config | {
        "torch": torch.__version__,
        "the code's digest": f"{zlib.crc32(code):08x}",
        "init_from": without_credentials(config.get("init_from", "")),
        "mirror": bool(config.get("mirror")),  # only rank 0 copies
    }
    weights = Path(facts["init_from"].removeprefix("auto:"))
    if weights.exists():  # under a path that may differ; search.verify compares runs
        files = sorted(weights.glob("model*"))
        facts["init_from"] = [(path.name, path.stat().st_size) for path in files]
    return facts


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
