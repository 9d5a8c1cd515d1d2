"""The limit on open files. Each connection to another process is one, and most shells allow 1,024."""

import os
from contextlib import suppress

TOO_MANY = "too many open files"  # as the C library says it, in lower case
ADVICE = (
    "the limit on open files is too low: type ulimit -n 65536 as root before the command, start the "
    "container with --ulimit nofile=65536, or set LimitNOFILE=65536 in the systemd unit of the launcher "
    "(Slurm's slurmd)"
)


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
    if TOO_MANY not in message.lower():
        return message
    first, newline, rest = message.partition("\n")  # often only the first line of torch's errors is shown
    return f"{first} ({ADVICE}){newline}{rest}"
