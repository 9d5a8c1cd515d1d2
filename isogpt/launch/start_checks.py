"""Checks at the start that all ranks use the same code, settings, data and versions of packages."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from isogpt.common.console import RANKS_SHOWN, shortened
from isogpt.common.files import REPOSITORY
from isogpt.launch.pretended_ranks import is_pretended
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.launch.together import exit_together, gather_objects
from isogpt.options.values import without_credentials

# scripts that train nothing, and the room that only they use
OTHERS = ("bench.py", "compare.py", "export.py", "sweep.py", "isogpt/lab/*.py")


def check_start(ranks: Ranks, config: dict) -> str:
    """
    Exit with a message if the ranks were started differently or an all-reduce gives a wrong sum (all ranks).
    Returns the digest of the code.
    """
    facts, n = gather_objects(start_facts(config)), ranks.world_size
    total = torch.full((), ranks.rank + 1.0, device=ranks.device)
    if n > 1 and not is_pretended():
        dist.all_reduce(total)
    with exit_together():
        check_alike(facts, rank_names(ranks.hosts))
        if n > 1 and not is_pretended() and total.item() != n * (n + 1) / 2:
            raise ValueError(f"an all-reduce over {n} ranks returned {total.item()}: the network is faulty")
    return facts[0]["the code's digest"]


def start_facts(config: dict) -> dict:
    """Return what should be the same on all ranks: settings, code, torch."""
    sources = {*REPOSITORY.glob("*.py"), *REPOSITORY.glob("isogpt/**/*.py")}
    sources = sorted(sources - {path for pattern in OTHERS for path in REPOSITORY.glob(pattern)})
    file = config.get("optimizer", "").rpartition(":")[0].removeprefix("muon+")  # of a user's class
    sources += [Path(file).expanduser()] if file else []
    facts = config | {
        "torch": torch.__version__,
        "the code's digest": f"{zlib.crc32(b''.join(path.read_bytes() for path in sources)):08x}",
    }
    for name in ("init_from", "mirror"):
        facts[name] = without_credentials(config.get(name, ""))
    weights = Path(config.get("init_from", "").removeprefix("auto:"))
    facts["has_weights"] = weights.exists()
    if (weights / "config.json").is_file():  # not a run: search.verify compares runs
        sizes = [(path.name, path.stat().st_size) for path in sorted(weights.glob("*.*"))]
        facts["the weights' digest"] = zlib.crc32(str(sizes).encode())
    return facts


def check_alike(facts: list[dict], names: Sequence[str]) -> None:
    """
    Compare the start_facts of all ranks: with different facts, they would train weights that drift apart.
    Paths may differ between machines, also the path in init_from. A run name for wandb may contain the time.

    Args:
        names: of the ranks, for the message.

    Raises:
        ValueError: the facts differ.
    """
    may_differ = {"out_dir", "dataset", "eval_datasets", "alert_command", "has_weights"}
    if len({bool(f.get("mirror")) for f in facts}) == 1:  # only rank 0 copies
        may_differ.add("mirror")
    if all(f.get("has_weights") for f in facts):
        may_differ.add("init_from")
    compared = [k for k in facts[0] if k not in may_differ and not k.startswith("wandb")]
    if differ := [k for k in compared if any(f.get(k) != facts[0][k] for f in facts)]:
        raise ValueError(
            "the ranks were started with different settings: "
            f"{'; '.join(about_different(k, [f.get(k) for f in facts], names) for k in differ)}"
        )


def about_different(name: str, values: list, names: Sequence[str]) -> str:
    """Say which ranks have which values of a setting, beginning with one rank for each value."""
    firsts = {repr(value): rank for rank, value in reversed([*enumerate(values)])}
    others = [rank for rank in range(len(values)) if rank not in firsts.values()]
    return f"{name} is " + shortened(
        [f"{values[rank]!r} on {names[rank]}" for rank in (*sorted(firsts.values()), *others)], RANKS_SHOWN
    )
