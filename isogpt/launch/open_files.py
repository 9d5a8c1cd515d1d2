"""The limit on open files. Each connection to another process is one, and most shells allow 1,024."""

import os
from contextlib import suppress

TOO_MANY = "Too many open files"  # as the C library says it
ADVICE = "type ulimit -n 65536 as root before the command, or raise the limit of the container or of slurmd"


def allow_connections() -> None:
    """
    Let this process, and torchrun's agent, which may serve the store of all ranks, open as many files as they
    may without root (Linux).
    """
    with suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        for process in (0, os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else (0,):
            _, most = resource.prlimit(process, resource.RLIMIT_NOFILE)
            resource.prlimit(process, resource.RLIMIT_NOFILE, (most, most))


def explained(message: str) -> str:
    """The message of an error, with what to do if it is about the limit on open files."""
    return message.replace(TOO_MANY, f"{TOO_MANY} ({ADVICE})")
