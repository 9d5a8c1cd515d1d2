"""
The owner of a folder: a run claims its folder with the file `owner`, which it keeps locked and touches every
few seconds as long as it lives. A start refuses the folder of a run that is alive, and a run compares the
file before it writes.

The lock decides on one machine, and between machines whose file system shares locks. Where it does not, as in
many mounted buckets, the time of the last touch decides.
"""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from isogpt.common.console import print_line
from isogpt.common.files import lock, parse_json, read_utf8
from isogpt.launch.launchers import Launch
from isogpt.launch.network import this_kernel

BEAT_S = 5.0  # seconds between two touches
SILENCE_S = 30.0  # without a touch, after which a run on a different machine counts as dead


def keep(out: Path, owner: str, file: IO[bytes]) -> None:
    """
    Keep the file of `owner` open, and so locked, and touch it, until a different run has claimed the folder
    (in a thread).
    """
    with file:
        while owns(out, owner):
            time.sleep(BEAT_S)
            lock(file)  # again, since the start that a restart replaces may still hold it
            with suppress(OSError):
                os.utime(out / "owner")


def is_alive(path: Path, before: dict, is_locked: bool | None) -> bool:
    """
    Whether the run that owns a folder is alive. If only its touches can tell, this waits for the next one, at
    most until the last one is SILENCE_S old.

    Args:
        path: of the file.
        before: what read_owner returned.
        is_locked: what `lock` returned.
    """
    if is_locked is False:
        return True
    if not before or (is_locked and before.get("kernel") == this_kernel()):
        return False
    last = path.stat().st_mtime
    with TemporaryFile(dir=path.parent) as new:  # whose time is by the same clock, which may be a server's
        left_s = min(SILENCE_S, SILENCE_S - (os.fstat(new.fileno()).st_mtime - last))
    if left_s > 0:
        print_line(f"{path.parent}: waiting up to {left_s:.0f} s for a sign of life of its last run")
    end = time.monotonic() + left_s
    while time.monotonic() < end and path.stat().st_mtime == last:
        time.sleep(0.1)
    return path.stat().st_mtime != last


def write_owner(out: Path, owner: str, launch: Launch | None) -> None:
    """
    Make `owner` the folder's owner. `launch` is the launch that has entered the folder; None until the folder
    is prepared. The file is written in place, since a new file would not be locked.
    """
    process = f"process {os.getpid()} on {socket.gethostname()}"
    facts = {"owner": owner, "process": process, "kernel": this_kernel(), "launch": launch and asdict(launch)}
    (out / "owner").write_text(json.dumps(facts))


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


def owns(out: Path, owner: str) -> bool:
    """Whether `owner` owns the folder; also if the file has been deleted, or if there is no owner."""
    return not owner or read_owner(out).get("owner", owner) == owner


def check_owner(out: Path, owner: str) -> None:
    """Raise ValueError if a different run has claimed the folder."""
    if not owns(out, owner):
        raise ValueError(f"a different run was started in {out}: this one stops, and keeps its checkpoints")
