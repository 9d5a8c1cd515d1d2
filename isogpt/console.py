"""What the scripts write to the terminal. Printing must never end a training run or lose what was generated."""

import os
import sys


def escape_unprintable() -> None:
    """
    Let stdout and stderr escape what the console's encoding lacks, such as U+00E9 in ASCII, or a lone surrogate from a
    file name that is not UTF-8. Otherwise, printing it raises UnicodeEncodeError.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # neither None (no console) nor a notebook's stream
            stream.reconfigure(errors="backslashreplace")


def print_line(text: str) -> bool:
    """
    Print a line to stdout and flush it. Returns whether someone reads stdout. After `| head` has closed the pipe, this
    and all later output is discarded: Python would report an error when it flushes stdout at the exit.
    """
    try:
        print(text, flush=True)
        return True
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
