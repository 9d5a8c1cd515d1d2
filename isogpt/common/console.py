"""Output of the scripts to the terminal. Printing must never end a training run or lose generated text."""

import atexit
import json
import os
import sys
import time
from contextlib import suppress


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
    atexit.unregister(flush)  # a script may call this function twice
    atexit.register(flush)  # Python itself reports an error


def print_error(message: str, source: str = "") -> None:
    """
    Print the message that ends a run to stderr. Each line, which is a separate problem, begins with 'error: '
    and the source, such as 'rank 1: '.
    """
    message = message.partition("\nException raised from ")[0]  # torch.distributed appends C++ frames
    lines = [f"error: {source}{line}" for line in message.splitlines() or [""]]
    print("\n".join(lines), file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun repeats this text in the report that ends its output
        facts = {"py_callstack": "\n".join(lines), "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": facts}}, file)


def is_worker_of_nproc() -> bool:
    """
    Whether this process is a worker of the torchrun that launchers.start_workers has started. The variable
    contains the process id of that torchrun, since the variable may also be left over in a shell.
    """
    return os.environ.get("ISOGPT_STARTED") == str(os.getppid())


def flush() -> bool:
    """
    Flush stdout. If nobody reads it, this and all later output is discarded. Returns whether the output was
    written.
    """
    try:
        if sys.stdout:
            sys.stdout.flush()
        return True
    except BrokenPipeError:
        discard_output()
        return False


def discard_output() -> None:
    """Discard what is printed from here on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_line(text: str) -> bool:
    """Print a line to stdout and flush it. Returns whether it was written: False if nobody reads stdout."""
    try:
        print(text)
    except BrokenPipeError:  # the text is larger than the buffer, or there is none (PYTHONUNBUFFERED)
        discard_output()
        return False
    return flush()
