"""The version of the code: the commit of the repository with train.py, and whether files differ from it."""

import subprocess
from contextlib import suppress

from isogpt.common.files import REPOSITORY
from isogpt.launch.process_group import Ranks

# the commit, not a tag, also of somebody else's repository. It neither writes there nor starts a daemon
GIT = "git --no-optional-locks -c core.fsmonitor=false -c safe.directory=*"
DESCRIBE = f"{GIT} describe --always --exclude=* --abbrev=64 --dirty"


def code_version(ranks: Ranks) -> dict:
    """
    Ask git on rank 0: {"commit": the hash, or "" outside a repository, "changed": whether tracked files
    differ from the commit}.
    """
    # 5 s, since a repository on a network file system can be slow
    git = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 5.0}
    name = ""
    if ranks.is_main:
        with suppress(OSError, subprocess.TimeoutExpired):  # there is no git, or a slow disk
            name = subprocess.run(DESCRIBE.split(), **git).stdout.strip()
    return {"commit": name.removesuffix("-dirty"), "changed": name.endswith("-dirty")}
