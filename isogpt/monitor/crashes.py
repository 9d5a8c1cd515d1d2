"""The crash hook, which explains the exceptions that end a process."""

import os
import sys
from contextlib import suppress
from datetime import timedelta

from isogpt.checkpoint.progress import Progress
from isogpt.common import console
from isogpt.launch import network
from isogpt.launch.process_group import Ranks
from isogpt.launch.together import is_connection_lost
from isogpt.monitor.log import Logger
from isogpt.monitor.out_of_memory import explain_out_of_memory, is_out_of_memory, line_of
from isogpt.monitor.watchdog import REPORTERS, STORE_TIMEOUT_S, Watchdog
from isogpt.parallel.pipeline import cause_of
from isogpt.parallel.plan import LayoutError


def watch_start(ranks: Ranks, timeout_s: float, progress: Progress, logger: Logger) -> Watchdog:
    """
    Return the watchdog of the start, and install the crash hook: from here on, a rank that fails is named.
    With other ranks, the watchdog connects to the store.
    """
    watchdog = Watchdog(ranks, timeout_s, progress, logger)
    explain_crashes(watchdog)  # including a store that does not respond
    if ranks.world_size > 1 and ranks.store:
        # a separate connection, since a request blocks all others on the same connection
        store = network.connect_store(timeout_s)
        store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        watchdog.start(store)
    return watchdog


def explain_crashes(watchdog: Watchdog) -> None:
    """Install an excepthook that explains an exception, tells the other ranks and ends the process."""

    def hook(kind: type, error: BaseException, trace: object) -> None:
        try:
            explain(watchdog, kind, error, trace)
        except Exception as e:  # an explanation that fails must not keep the process from exiting
            console.print_to_stderr(f"error: {error} (and while explaining it: {e})")
        watchdog.leave(summary_of(cause_of(error)), has_failed=True)
        watchdog.finish_checkpoint()
        console.flush()
        # destroying a process group that a DDP model still references was seen to hang (torch 2.13, gloo),
        # and a rank that hangs instead of exiting keeps its launcher from restarting it
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def explain(watchdog: Watchdog, kind: type, raised: BaseException, trace: object) -> None:
    """
    Print a message instead of a traceback if the cause of an exception is known, such as a different rank or
    too little memory. If several ranks run out of memory, the first of them explains it.
    """
    error = cause_of(raised)
    if watchdog.memory_use and is_out_of_memory(error):
        if watchdog.turn("out of memory") == 1:
            explain_out_of_memory(watchdog, error)
        else:  # rank 0 records and alerts, whichever rank explains
            watchdog.logger.failed(f"out of memory: {line_of(error)}")
        watchdog.let_others_finish()  # they may be about to ask whether they are the first
    elif is_connection_lost(error):
        reason = str(error).splitlines()[0].split(". ")[0][:200]
        watchdog.report(f"lost the connection to a different rank ({reason})")
    elif isinstance(raised, LayoutError):
        if watchdog.turn("layout") == 1:  # all ranks raise it
            console.print_error(str(raised))
            watchdog.logger.failed(str(raised))
        watchdog.let_others_finish()  # they may be about to ask whether they are the first
    else:
        watchdog.logger.failed(f"{type(error).__name__}: {error}")
        if (turn := watchdog.turn("exception")) > REPORTERS:
            return
        with suppress(OSError):  # a full disk
            print(console.erase_line(sys.stderr), end="", file=sys.stderr, flush=True)
        sys.__excepthook__(kind, raised, trace)
        if turn == REPORTERS < watchdog.ranks.world_size:
            console.print_to_stderr(f"note: {turn} ranks have failed; any others print no traceback")


def summary_of(error: BaseException) -> str:
    """Return the type of an error, and the line of the message that `line_of` chooses."""
    return f"{type(error).__name__}: {line_of(error)[:200]}".removesuffix(": ")
