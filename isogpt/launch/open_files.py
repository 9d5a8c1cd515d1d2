"""The limit on open files. Each connection to another process is one, and most shells allow 1,024."""

import os
import socket
from contextlib import suppress

BASE = 600  # of a process without connections between ranks: libraries, a GPU, 256 shards of data
OF_A_RANK = 3  # connections to the store: two of the rank, and at most one of its launcher's agent
TOO_MANY = "too many open files"  # as the C library says it, in lower case


def raise_limit(process: int = 0) -> int | None:
    """
    Let a process, by default this one, open as many files as it may without root, and return how many. None:
    there is no limit, the system does not say (it is not Linux), or the process belongs to somebody else.
    """
    with suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        _, most = resource.prlimit(process, resource.RLIMIT_NOFILE)
        resource.prlimit(process, resource.RLIMIT_NOFILE, (most, most))
        return None if most == resource.RLIM_INFINITY else most
    return None


def allow_connections(rank: int, world_size: int) -> None:
    """
    Raise the limits of this process, and of torchrun's agent, which may serve the store of all ranks.

    Raises:
        ValueError: on rank 0, the process that serves the store may not have enough open files.
    """
    most, server = raise_limit(), "rank 0"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        most, server = raise_limit(os.getppid()), "torchrun"
    needed = BASE + OF_A_RANK * world_size
    if rank == 0 and most is not None and most < needed:
        raise ValueError(
            f"the store of {world_size:,} ranks needs {needed} open files, but {server} on "
            f"{socket.gethostname()} may have {most}: {how_to_allow(needed)}"
        )


def how_to_allow(needed: int) -> str:
    """What to type so that a process may have this many open files."""
    return (
        f"type ulimit -n {needed} as root before the command, start the container with --ulimit "
        f"nofile={needed}, or set LimitNOFILE={needed} in the systemd unit of the launcher (Slurm's slurmd)"
    )


def explained(message: str) -> str:
    """The message of an error, with what to do if it is about the limit on open files."""
    if TOO_MANY not in message.lower():
        return message
    first, newline, rest = message.partition("\n")  # often only the first line of torch's errors is shown
    return f"{first} (the limit on open files is too low: {how_to_allow(65536)}){newline}{rest}"
