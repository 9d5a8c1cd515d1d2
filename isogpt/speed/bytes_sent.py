"""How many bytes a process sends over TCP, counted by the kernel."""

import ctypes
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

# an option of getsockopt, and the offset of tcpi_bytes_sent in the struct tcp_info that it returns
# (linux/tcp.h)
TCP_INFO = 11
BYTES_SENT = slice(200, 208)
LIBC = ctypes.CDLL(None) if sys.platform == "linux" and os.path.isdir("/proc/self/fd") else None


def bytes_by_socket() -> dict[int, int]:
    """{inode: bytes sent} of this process's TCP sockets; empty unless this is Linux 4.19 or newer."""
    found = {}
    info, size = ctypes.create_string_buffer(256), ctypes.c_uint32()
    # not by socket.socket(fileno=...), which may change the descriptor's flags
    for fd in map(int, os.listdir("/proc/self/fd") if LIBC else ()):
        size.value = len(info)
        # fails if the descriptor is not a socket
        status = LIBC.getsockopt(fd, socket.IPPROTO_TCP, TCP_INFO, info, ctypes.byref(size))
        if status == 0 and size.value >= BYTES_SENT.stop:
            with suppress(OSError):  # a different thread may have closed it
                found[os.fstat(fd).st_ino] = int.from_bytes(info[BYTES_SENT], sys.byteorder)
    return found


@dataclass
class BytesSent:
    """
    The bytes that this process sends per step, from the construction on. A single process sends nothing and
    is not counted.

    These are the payload of the TCP connections: gloo's, also to processes on the same machine, NCCL's if
    NCCL uses sockets, and the few bytes of the store. Headers and acknowledgements are not included;
    retransmissions are included. What NCCL sends over NVLink, shared memory or InfiniBand is not TCP and is
    not counted. Bytes that a connection sends after the last count are not counted either; the
    connections of a process group stay open.
    """

    world_size: int
    counts: dict[int, int] = field(init=False)  # bytes_by_socket, at the last count
    sent: int = 0  # bytes since the last logged step, up to a pause
    steps: int = 0  # steps since the last logged step

    def __post_init__(self) -> None:
        self.counts = bytes_by_socket() if self.world_size > 1 else {}
        self.is_counted = bool(self.counts)

    def count(self) -> int:
        """
        Return the bytes sent since the last count. Counting lists all open files, at a few microseconds each.
        """
        before, self.counts = self.counts, bytes_by_socket()
        return sum(sent - before.get(inode, 0) for inode, sent in self.counts.items())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """
        Leave out what the block sends: an evaluation with sharded parameters gathers them for each batch.
        """
        if self.is_counted:
            self.sent += self.count()
        yield
        if self.is_counted:
            self.count()

    def per_step(self, is_logged: bool) -> float:
        """
        Return the bytes sent per step since the last logged step, including this step. nan if the system does
        not count bytes; 0 if this step is not logged, since counting takes time.
        """
        self.steps += 1
        if not is_logged:
            return 0.0
        sent = self.sent + self.count() if self.is_counted else math.nan
        per_step = sent / self.steps
        self.sent = self.steps = 0
        return per_step
