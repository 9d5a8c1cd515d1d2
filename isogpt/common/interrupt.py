"""
What Ctrl-C does. From the import of this module on, it ends the process without a traceback: imports take
seconds, and Python would raise KeyboardInterrupt anywhere in them.
"""

import signal


def raise_interrupt() -> None:
    """From here on, let Ctrl-C raise KeyboardInterrupt, since the caller has something to clean up."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the shell lets it be ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)
