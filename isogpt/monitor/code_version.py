"""The version of the code: the commit of the repository with train.py, and whether files differ from it."""

import subprocess
from contextlib import suppress

from isogpt.common.files import REPOSITORY
from isogpt.launch.process_group import Ranks

PATIENCE_S = 5.0  # seconds that a start waits for git: a repository on a network file system can be slow
# neither writes to the repository nor starts a daemon
OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false")
DESCRIBE = ("describe", "--always", "--exclude=*", "--abbrev=64", "--dirty")  # the commit, not a tag


def ask_git(ranks: Ranks) -> subprocess.Popen | None:
    """Start git, which runs while the run starts; None on ranks other than 0, and without git."""
    if not ranks.is_main:
        return None
    command = ["git", *OPTIONS, "-C", str(REPOSITORY), *DESCRIBE]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with suppress(OSError):
        return subprocess.Popen(command, text=True, errors="replace", **pipes)
    return None


def code_version(git: subprocess.Popen | None) -> dict:
    """
    Return the answer of git: {"commit": its hash, or "" outside a repository, "changed": whether tracked
    files differ from the commit}.
    """
    output = ""
    if git:
        try:
            output, _ = git.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            git.kill()
    name = output.strip()
    return {"commit": name.removesuffix("-dirty"), "changed": name.endswith("-dirty")}
