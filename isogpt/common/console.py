"""Output of the scripts to the terminal. Printing must never end a training run or lose generated text."""

import atexit
import errno
import os
import re
import select
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

# to the start of the line, and erase from there to the end of the screen: a terminal that was made narrower
# has wrapped a line into several rows
ERASE = "\r\x1b[J"
# control characters, and those that change the order in which a line is shown
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
CLOSED = (errno.EPIPE, errno.EIO)  # nobody reads a pipe, or the terminal was closed
PATIENCE_S = 5.0  # seconds that a line waits until a terminal or a pipe takes it
RANKS_SHOWN = 8  # in a message; a job can have thousands


def prepare() -> None:
    """
    Let stdout and stderr escape what the console's encoding lacks, such as U+00E9 in ASCII, or a lone
    surrogate from a file name that is not UTF-8. Printing such characters would raise UnicodeEncodeError.
    Also let the process end quietly if nobody reads stdout, for example after `| head`. Every script calls
    this first.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # neither None (no console) nor a notebook's stream
            stream.reconfigure(errors="backslashreplace")
    atexit.register(flush)  # Python itself reports an error


def erase_line(stream: TextIO | None) -> str:
    """
    Return what erases the line on which a terminal's cursor waits, which may be a run's status line. This
    rank need not know whether there is a status line: rank 0 draws it, and every rank may report an error.
    Returns "" unless the stream is a terminal that a person looks at: not with TERM=dumb, nor if the terminal
    has no size, since mpirun and `docker run -t` give their processes such a terminal even when the output
    goes to a file or a log.
    """
    with suppress(OSError, AttributeError):  # it is a pipe, or there is no stream
        has_size = os.get_terminal_size(stream.fileno()).columns > 0
        return ERASE if has_size and os.environ.get("TERM", "dumb") != "dumb" else ""
    return ""


def visible(text: str, but: str = "") -> str:
    """
    Escape control characters: text from a file or a folder's name could otherwise change what a terminal
    shows, or look like a line of ours. `but` are characters that stay.
    """
    return CONTROL.sub(lambda c: c[0] if c[0] in but else repr(c[0])[1:-1], text)


def error_text(error: Exception) -> str:
    """An error in one line, with the last line of the repository's code that led to it."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    root = Path(__file__).resolve().parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return f"{text} ({path.relative_to(root)}, line {frame.lineno})"
    return text


def shortened(items: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """The first items of a list, up to 1,500 characters, and how many more there are."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return f"{visible(between.join(items[:most])):.1500}{more}"


def count_text(count: int, noun: str, plural: str = "") -> str:
    """'1 step', '2,000 steps'; the plural is the noun with an s if it is not given."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """'rank 3, 5, 9', at most RANKS_SHOWN of them, and how many more there are."""
    return f"rank {shortened([*map(str, ranks)], RANKS_SHOWN)}"


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def aligned(rows: Sequence[dict[str, str]]) -> list[str]:
    """
    The lines of a table, whose first one is the headings.

    Args:
        rows: {heading: cell} each. A column in which a cell begins with a number is aligned to the right.
    """
    shown = []
    for heading in rows[0]:
        cells = [visible(cell) for cell in (heading, *(row[heading] for row in rows))]
        width = max(map(len, cells))
        is_number = any(re.match(r"[+-]?\d", cell) for cell in cells[1:])
        shown.append([cell.rjust(width) if is_number else cell.ljust(width) for cell in cells])
    return ["  ".join(line).rstrip() for line in zip(*shown, strict=True)]


def is_blocked(stream: TextIO | None, patience_s: float = PATIENCE_S) -> bool:
    """
    Return whether printing would wait for longer than patience_s, because Ctrl-S has stopped the terminal or
    a pager reads no further. A run would wait, too, and end after dist_timeout_s.
    """
    with suppress(OSError, TypeError, ValueError):  # not a file, closed, or on Windows
        return not select.select([], [stream], [], patience_s)[1]
    return False


def print_to_stderr(text: str) -> None:
    """
    Print lines to stderr, in place of a status line if there is one. They are lost if stderr is closed, on a
    full disk or blocked.
    """
    with suppress(OSError):
        if not is_blocked(sys.stderr):
            print(erase_line(sys.stderr) + visible(text, but="\n\t"), file=sys.stderr, flush=True)


def print_error(message: str, source: str = "") -> None:
    """
    Print the message that ends a run to stderr. Each line, which is a separate problem, begins with 'error: '
    and the source, such as 'rank 1: '.
    """
    message = message.partition("\nException raised from ")[0]  # torch.distributed appends C++ frames
    print_to_stderr("\n".join(f"error: {source}{line}" for line in message.splitlines() or [""]))


def is_worker_of_nproc() -> bool:
    """
    Whether this process is a worker of the torchrun that launchers.start_workers has started. The variable
    contains the process id of that torchrun, since it may also be left over in a shell.
    """
    return os.environ.get("ISOGPT_STARTED") == str(os.getppid())


def flush() -> OSError | None:
    """Flush stdout, see `print_line`."""
    return print_line("", end="")


def discard_output() -> None:
    """Discard what is printed to stdout from here on, and what could not be written before."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_line(text: str, end: str = "\n", patience_s: float | None = None) -> OSError | None:
    """
    Print a line to stdout and flush it, unless stdout is blocked for longer than patience_s (None: wait). If
    nobody reads stdout, this and all later output is discarded. On a full disk, the next line tries again.

    Returns:
        why the output was not written; None: it was. It is not raised.
    """
    if patience_s is not None and is_blocked(sys.stdout, patience_s):
        return TimeoutError("nobody reads stdout, so lines are lost")
    try:
        print(text, end=end, flush=True)
    except OSError as e:
        if e.errno in CLOSED:
            discard_output()
        return e
    return None


def print_result(text: str) -> None:
    """
    Print the lines that a script was called for. Exits with a message if the disk is full, and goes on if
    nobody reads stdout.
    """
    error = print_line(text)
    if error and error.errno not in CLOSED:
        discard_output()  # else Python would report the same error at its end
        sys.exit(f"error: stdout cannot be written to: {error.strerror}")
