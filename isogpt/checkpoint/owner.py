"""The owner of a folder: a run claims its folder with a file, which it compares before it writes there."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from isogpt.common.files import parse_json, read_utf8, write_whole
from isogpt.launch.launchers import Launch


def write_owner(out: Path, owner: str, launch: Launch | None) -> None:
    """
    Make `owner` the folder's owner. `launch` is the launch that has entered the folder; None until the folder
    is prepared.
    """
    facts = {"owner": owner, "launch": launch and asdict(launch)}
    write_whole(out / "owner", json.dumps(facts))


def read_owner(out: Path) -> dict:
    """Read what write_owner wrote; empty if there is no file, or something else is in it."""
    with suppress(OSError, ValueError, TypeError):
        return dict(parse_json(read_utf8(out / "owner")))
    return {}


def was_entered_by(out: Path, launch: Launch) -> bool:
    """Whether an earlier start of this launch has entered the folder, and no other launch since then."""
    with suppress(KeyError, TypeError):  # there is no record of a launch, or not one of ours
        return launch.continues(Launch(**read_owner(out)["launch"]))
    return False


def check_owner(out: Path, owner: str) -> None:
    """Raise ValueError if a different run has claimed the folder."""
    now = read_owner(out).get("owner", owner)  # the file may have been deleted
    if owner and now != owner:
        problem = f"a different run was started in {out}"
        raise ValueError(f"{problem}: this one stops, and keeps its checkpoints")
